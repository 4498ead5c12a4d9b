"""PyTorch's ways to train the same GPT, and DeepSpeed's, as rivals of `bench step`: each as its documentation has it.

All use AdamW with the native default groups, clipping, and gradients accumulated over the same micro-batches. bf16 is
autocast over fp32 weights in PyTorch, its mixed precision in FSDP2, and DeepSpeed's own.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..errors import InvalidArgument, NotAvailable

__all__ = ["RIVALS", "check_rivals"]

LR, EPS, WEIGHT_DECAY, CLIP_NORM = 1e-4, 1e-8, 0.1, 1.0

Step = Callable[[Any, Any], float]  # from a rank's int32 tokens and targets to its mean loss


def _module(settings: dict[str, Any]) -> Any:
    import torch

    from ..models import GPT
    from .torch_gpt import TorchGPT, load_weights

    torch.set_num_threads(settings["threads"])
    module = TorchGPT(GPT(**settings["model"]))
    load_weights(module, lambda name: np.load(os.path.join(settings["weights"], name + ".npy")))
    return module


def _join_gloo(settings: dict[str, Any]) -> None:
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        init_method=f"file://{settings['weights']}/gloo-{settings['contender']}",
        rank=settings["rank"],
        world_size=settings["ranks"],
    )


def _step(
    settings: dict[str, Any],
    module: Any,
    forward: Any,
    last: Callable[[bool], Any],
    parts: Callable[[list[dict[str, Any]]], list[dict[str, Any]]] = list,
    clip: Callable[[], Any] | None = None,
) -> Step:
    """A training step. last(whether it is the last micro-batch) is the context in which one runs.

    parts: makes the optimizer's groups of the default ones. clip: instead of PyTorch's clipping.
    """
    import torch

    from .torch_gpt import groups

    optimizer = torch.optim.AdamW(parts(groups(module, WEIGHT_DECAY)), lr=LR, eps=EPS, fused=True)
    size = settings["micro_batch"]

    def step(tokens: Any, targets: Any) -> float:
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for begin in range(0, len(tokens), size):
            part = slice(begin, begin + size)
            share = len(tokens[part]) / len(tokens)
            with last(begin + size >= len(tokens)):
                with _autocast(settings):
                    loss = forward(_long(tokens[part]), _long(targets[part])) * share
                loss.backward()
            total += float(loss.detach())
        if clip is None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), CLIP_NORM)
        else:
            clip()
        optimizer.step()
        return total

    return step


def _long(array: Any) -> Any:
    import torch

    return torch.from_numpy(array).long()


def _autocast(settings: dict[str, Any]) -> Any:
    import torch

    if settings["precision"] == "fp32" or settings["contender"] == "torch-fsdp":
        return contextlib.nullcontext()
    return torch.autocast("cpu", dtype=torch.bfloat16)


def _anywhere(is_last: bool) -> Any:
    return contextlib.nullcontext()


def _make_torch(settings: dict[str, Any]) -> Step:
    """Eager, one process."""
    module = _module(settings)
    return _step(settings, module, module, _anywhere)


def _make_compile(settings: dict[str, Any]) -> Step:
    """torch.compile, one process. The first step compiles."""
    import torch

    module = _module(settings)
    return _step(settings, module, torch.compile(module), _anywhere)


def _make_ddp(settings: dict[str, Any]) -> Step:
    """DistributedDataParallel."""
    from torch.nn.parallel import DistributedDataParallel

    _join_gloo(settings)
    module = _module(settings)
    parallel = DistributedDataParallel(module)
    return _step(
        settings,
        module,
        parallel,
        lambda is_last: contextlib.nullcontext() if is_last else parallel.no_sync(),
    )


def _make_fsdp(settings: dict[str, Any]) -> Step:
    """FSDP2: every block, and the rest, sharded over the ranks (ZeRO-3)."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    _join_gloo(settings)
    module: Any = _module(settings)
    options: dict[str, Any] = {"mesh": init_device_mesh("cpu", (settings["ranks"],))}
    if settings["precision"] == "bf16":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in module.h:
        fully_shard(block, **options)
    fully_shard(module, **options)

    def last(is_last: bool) -> Any:
        module.set_requires_gradient_sync(is_last)
        return contextlib.nullcontext()

    return _step(settings, module, module, last)


def _make_deepspeed(settings: dict[str, Any]) -> Step:
    """DeepSpeed with the same ZeRO stage as ours."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    import torch

    from .torch_gpt import groups

    _join_gloo(settings)
    module = _module(settings)
    optimizer = torch.optim.AdamW(groups(module, WEIGHT_DECAY), lr=LR, eps=EPS, fused=True)
    accumulated = settings["batch"] // settings["micro_batch"]
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=optimizer,
        config={
            "train_micro_batch_size_per_gpu": settings["micro_batch"],
            "gradient_accumulation_steps": accumulated,
            "gradient_clipping": CLIP_NORM,
            "zero_optimization": {"stage": settings["zero"]},
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": settings["precision"] == "bf16"},
            "steps_per_print": 1 << 30,
        },
    )

    def step(tokens: Any, targets: Any) -> float:
        total = 0.0
        for begin in range(0, len(tokens), settings["micro_batch"]):
            part = slice(begin, begin + settings["micro_batch"])
            loss = engine(_long(tokens[part]), _long(targets[part]))
            engine.backward(loss)
            engine.step()
            total += float(loss.detach()) / accumulated
        return total

    return step


def _make_pipelining(settings: dict[str, Any]) -> Step:
    """torch.distributed.pipelining: 1F1B over stages of our split; every rank has the samples of all."""
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    from .torch_gpt import TorchStage, groups

    _join_gloo(settings)
    rank, stages = settings["rank"], settings["ranks"]
    begin = sum(settings["split"][:rank])
    part = TorchStage(_module(settings), begin, begin + settings["split"][rank])
    optimizer = torch.optim.AdamW(groups(part, WEIGHT_DECAY), lr=LR, eps=EPS, fused=True)

    def loss_of(logits: Any, targets: Any) -> Any:
        flat = logits.view(-1, logits.shape[-1]).float()
        return torch.nn.functional.cross_entropy(flat, targets.reshape(-1))

    schedule = Schedule1F1B(
        PipelineStage(part, rank, stages, torch.device("cpu")),
        n_microbatches=settings["batch"] * stages // settings["micro_batch"],
        loss_fn=loss_of,
    )

    def step(tokens: Any, targets: Any) -> float:
        optimizer.zero_grad(set_to_none=True)
        losses: list[Any] = []
        arguments = (_long(tokens),) if part.is_first else ()
        with _autocast(settings):
            if part.is_last:
                schedule.step(*arguments, target=_long(targets), losses=losses)
            else:
                schedule.step(*arguments)
        loss = torch.stack(losses).mean().detach() if part.is_last else torch.zeros(())
        dist.broadcast(loss, stages - 1)
        _clip([p.grad for p in part.parameters() if p.grad is not None])
        optimizer.step()
        return float(loss)

    return step


def _clip(own: list[Any], alike: Sequence[Any] = ()) -> None:
    """Clips by the norm over all ranks, as clip_grad_norm_ does; `alike` are gradients that every rank has."""
    import torch
    import torch.distributed as dist

    squares = sum((gradient.square().sum() for gradient in own), torch.zeros(()))
    dist.all_reduce(squares)
    squares += sum((gradient.square().sum() for gradient in alike), torch.zeros(()))
    factor = torch.clamp(CLIP_NORM / (squares.sqrt() + 1e-6), max=1.0)
    for gradient in (*own, *alike):
        gradient.mul_(factor)


def _make_dtensor(settings: dict[str, Any]) -> Step:
    """DTensor's tensor parallel: attention by heads, MLP, embedding and head by vocabulary, with the loss in parts."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        loss_parallel,
        parallelize_module,
    )

    from .torch_gpt import SplitAttention

    _join_gloo(settings)
    module = _module(settings)
    plan: dict[str, Any] = {
        "wte": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
        "h.*.mlp.fc": ColwiseParallel(),
        "h.*.mlp.proj": RowwiseParallel(),
        "h.*.attn.proj": RowwiseParallel(),
        **{f"h.*.attn.{part}": ColwiseParallel() for part in "qkv"},
    }
    blocks: Any = module.h
    for block in blocks:
        block.attn = SplitAttention(block.attn)
    parallelize_module(module, init_device_mesh("cpu", (settings["ranks"],)), plan)
    if settings["model"]["tied"]:
        module.lm_head.weight = module.wte.weight

    def is_part(parameter: Any) -> bool:
        return isinstance(parameter, DTensor) and parameter.placements[0].is_shard()

    def parts(found: list[dict[str, Any]]) -> list[dict[str, Any]]:  # those of DTensors apart from others
        return [
            {**group, "params": [p for p in group["params"] if isinstance(p, DTensor) == is_distributed]}
            for group in found
            for is_distributed in (False, True)
        ]

    def local(parameter: Any) -> Any:
        gradient = parameter.grad
        return gradient.to_local() if isinstance(gradient, DTensor) else gradient

    def clip() -> None:
        parameters = list(module.parameters())
        _clip([local(p) for p in parameters if is_part(p)], [local(p) for p in parameters if not is_part(p)])

    def forward(tokens: Any, targets: Any) -> Any:
        return module(tokens, DTensor.from_local(targets, module.wte.weight.device_mesh, [Replicate()]))

    torch.set_num_threads(settings["threads"])
    return _step(settings, module, forward, lambda is_last: loss_parallel(), parts, clip)


RIVALS: dict[str, Callable[[dict[str, Any]], Step]] = {
    "torch": _make_torch,
    "torch-compile": _make_compile,
    "torch-ddp": _make_ddp,
    "torch-fsdp": _make_fsdp,
    "deepspeed": _make_deepspeed,
    "torch-pipelining": _make_pipelining,
    "torch-dtensor": _make_dtensor,
}
ALONG = {
    "dp": ("torch-ddp", "torch-fsdp", "deepspeed"),
    "tp": ("torch-dtensor",),
    "pp": ("torch-pipelining",),
}
DISTRIBUTED = tuple(name for names in ALONG.values() for name in names)


def check_rivals(
    names: list[str], ranks: int, precision: str, batch: int, micro_batch: int, axis: str = "dp"
) -> None:
    """Refuses what cannot run here.

    Raises:
        InvalidArgument: an unknown rival, or one that trains in one process.
        NotAvailable: one that is not installed; the message has the command that installs it.
    """
    for name in names:
        if name not in RIVALS:
            raise InvalidArgument(f"--against {name}: expected {', '.join(RIVALS)}")
        if ranks > 1 and name not in DISTRIBUTED:
            raise InvalidArgument(
                f"--against {name}: it trains in one process; with --ranks {ranks} compare with torch-ddp"
            )
        if ranks > 1 and name not in ALONG.get(axis, ()):
            fitting = ALONG.get(axis) or ("nothing",)
            raise InvalidArgument(f"--against {name}: along {axis} compare with {', '.join(fitting)}")
        if name == "torch-pipelining" and (ranks == 1 or batch * ranks % micro_batch):
            raise InvalidArgument(
                f"--against torch-pipelining: it needs --ranks of 2 or more, and micro-batches of equal size; {ranks} x"
                f" --batch {batch} is no multiple of --micro-batch {micro_batch}, or --ranks is 1"
            )
        if name == "torch-dtensor" and ranks == 1:
            raise InvalidArgument("--against torch-dtensor: it needs --ranks of 2 or more, and --axis tp")
        if precision not in ("fp32", "bf16"):
            raise InvalidArgument(f"--against {name}: it runs in fp32 and bf16, not in {precision!r}")
        if name == "deepspeed" and batch % micro_batch:
            raise InvalidArgument(
                f"--against deepspeed: --batch {batch} must be a multiple of --micro-batch {micro_batch}"
            )
    if names and importlib.util.find_spec("torch") is None:
        raise NotAvailable(f"--against {names[0]}: PyTorch is not installed; pip install torch")
    if "deepspeed" in names and importlib.util.find_spec("deepspeed") is None:
        raise NotAvailable(
            "--against deepspeed: DeepSpeed is not installed; DS_ACCELERATOR=cpu pip install deepspeed"
        )
