"""The optimizer half of a training step for loops of one's own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from . import _core
from .arrays import Target, check_distinct, check_float, check_memory, check_not_freed, dtype_name, readable
from .checks import MAX_SEED, check_int, check_number, check_type, matching
from .errors import InvalidArgument, NumericError
from .group import Group
from .loss_scaler import LossScaler
from .norms import check_norm_type
from .optim import AdamW, Optimizer
from .optimizer_checks import check_alike, check_state, named_arrays
from .precision import DTYPES, check_name

__all__ = ["ShardedOptimizer", "UpdateStats"]

_T = TypeVar("_T")
_MAX_COUNT = 1 << 48  # the sum over all ranks stays below 2^63


@dataclass(frozen=True, kw_only=True)
class UpdateStats:
    """What a step of a ShardedOptimizer did, the same on every rank.

    step: updates applied so far. lr: of this one. grad_norm: of the averaged gradient before clipping. count:
    what the sum of gradients was divided by. skipped: nothing was changed, as a gradient was not finite (then
    `overflow` names the first one) or the count was 0. loss_scale: that the gradients were made with.
    """

    step: int
    lr: float
    grad_norm: float
    count: int
    skipped: bool
    loss_scale: float
    overflow: str = ""


class ShardedOptimizer:
    """ZeRO stages 0 to 2 on arrays of one's own: sums gradients over ranks, updates, writes the arrays. Collective.

        optimizer = pr.ShardedOptimizer(module.named_parameters(), mesh["dp"], stage=2, rule=pr.AdamW(lr=1e-3))
        for batch in batches:
            (loss_sum(module, batch) * optimizer.loss_scale).backward()
            stats = optimizer.step(count=num_tokens(batch))     # takes and clears the .grad of each parameter

    The arrays are overwritten in place after every update, and with rank 0's values at the start, `buffers` too.
    Optimizer state and fp32 weights are divided over the group from stage 1 on, summed gradients from stage 2 on.
    Updates work on these fp32 weights, so an array that the script changes itself needs `read_arrays`.

    The bits of the weights are the same for every stage and bucket size, and, given `lanes`, for every size of
    the group. Gradients are summed in fp32 whatever their dtype: the micro-batches of a lane in order, then the
    lanes in a balanced tree.

    Averages: with `count` in every accumulate and step (the number of tokens or samples whose losses were
    *summed*) the gradient is divided by the sum of all counts of the step. Without, losses are taken for means,
    and the gradient is divided by the number of micro-batches over all ranks.

    Args:
        params: names to arrays, or pairs of both: NumPy's, or what speaks DLPack on the CPU (PyTorch); float32,
            bfloat16 or float16, of any strides. The same names, shapes and dtypes on every rank.
        group: the ranks of data parallelism, such as mesh["dp"].
        stage: 0, 1 or 2.
        rule: AdamW, SGD, Lion, LAMB or Muon; default: AdamW().
        frozen: patterns of names (as in fnmatch) that are never updated and have no state. (A parameter without a
            gradient on any rank is left as it is for that step, and keeps its state.)
        buffers: more arrays that start as rank 0's, of any dtype; the same names, shapes and dtypes on every rank.
        lanes: how many parts the batch is cut into for the order of sums; default: one for each rank. A power of
            two that the group's size divides, or that size.
        micro_batches: calls of accumulate and step together that make a step, on each rank. If given, a bucket
            is reduced while the last backward pass still goes on (see `add`). Needed where a rank has
            several lanes, of which it must be a multiple.
        bucket_bytes: gradients are reduced once a bucket has so many fp32 bytes.
        gradient_dtype: "fp32", "bf16" or "fp16": what the summed gradient of a lane is rounded to before lanes are
            added in fp32, and travels in where every rank has one lane; see `Precision.gradients`.
        clip_norm, norm_type: clips the averaged gradient; 0: no limit. norm_type: 1 to 8, or math.inf.
        loss_scaler: for float16; see LossScaler. The loss must be multiplied by `loss_scale`.
        nonfinite: "skip" or "raise" where a gradient is not finite. Default: "skip" with a loss scaler.
        max_skips: raise after so many skipped steps in a row; 0: never.
        stochastic_rounding: bfloat16 arrays get the fp32 weights rounded up or down at random, so that small
            updates are not lost on average; drawn for (`seed`, name, number of updates, element).
        offload: the rule's state stays in host memory; see `Zero.offload`.

    Raises:
        InvalidArgument: before anything is communicated; or on all ranks, naming what differs between them.
        NotAvailable: stage 3.
    """

    def __init__(
        self,
        params: Mapping[str, Any] | Iterable[tuple[str, Any]],
        group: Group,
        *,
        stage: int = 1,
        rule: Optimizer | None = None,
        frozen: Sequence[str] = (),
        buffers: Mapping[str, Any] | Iterable[tuple[str, Any]] = (),
        lanes: int | None = None,
        micro_batches: int | None = None,
        bucket_bytes: int = 25 << 20,
        gradient_dtype: str = "fp32",
        clip_norm: float = 0.0,
        norm_type: float = 2.0,
        loss_scaler: LossScaler | None = None,
        nonfinite: str | None = None,
        max_skips: int = 0,
        stochastic_rounding: bool = False,
        seed: int = 0,
        offload: bool = False,
    ) -> None:
        check_type("ShardedOptimizer: group", group, Group, 'a group of a mesh, such as mesh["dp"]')
        self.rule = AdamW() if rule is None else rule
        check_type("ShardedOptimizer: rule", self.rule, Optimizer, "a rule such as polyreme.AdamW()")
        if loss_scaler is not None:
            check_type("ShardedOptimizer: loss_scaler", loss_scaler, LossScaler, "a polyreme.LossScaler")
        if nonfinite not in (None, "skip", "raise"):
            raise InvalidArgument(f"ShardedOptimizer: nonfinite={nonfinite!r}; expected 'skip' or 'raise'")
        check_type("ShardedOptimizer: offload", offload, bool, "True or False")
        check_name("ShardedOptimizer: gradient_dtype", gradient_dtype, tuple(DTYPES))
        self.loss_scaler = loss_scaler
        self.group = group
        self._raises = nonfinite == "raise" or (nonfinite is None and loss_scaler is None)
        self._max_skips = check_int("ShardedOptimizer: max_skips", max_skips, 0)
        self._params = named_arrays("params", params)
        self._places = {name: place for place, name in enumerate(self._params)}
        for name, array in self._params.items():
            check_float(f"ShardedOptimizer: parameter {name!r}", array, written=True)
        check_distinct("ShardedOptimizer", {f"parameter {n!r}": a for n, a in self._params.items()})
        specs = [
            {"name": name, "shape": tuple(array.shape), "weight_decay": array.ndim >= 2}
            for name, array in self._params.items()
        ]
        names_frozen = matching("ShardedOptimizer: frozen", frozen, list(self._params))
        self._is_frozen = [name in names_frozen for name in self._params]
        if all(self._is_frozen):
            raise InvalidArgument("ShardedOptimizer: all parameters are frozen; nothing would be trained")
        order = check_norm_type("ShardedOptimizer: norm_type", norm_type)
        more = named_arrays("buffers", buffers)
        for name, array in more.items():
            check_memory(f"ShardedOptimizer: buffer {name!r}", array, written=True)
        self._micro_batches = (
            0 if micro_batches is None else check_int("ShardedOptimizer: micro_batches", micro_batches, 1)
        )
        world = group._mesh.world
        self._calls = world._calls
        self._core = _core.ShardedOptimizer(
            world._core,
            group._mesh._core,
            group.axes,
            [(s["name"], s["shape"], dtype_name(self._params[s["name"]])) for s in specs],
            stage=check_int("ShardedOptimizer: stage", stage, 0, 3),
            lanes=0 if lanes is None else check_int("ShardedOptimizer: lanes", lanes, 1),
            micro_batches=self._micro_batches,
            bucket_bytes=check_int("ShardedOptimizer: bucket_bytes", bucket_bytes, 1),
            gradient_dtype=DTYPES[gradient_dtype],
            clip_norm=check_number("ShardedOptimizer: clip_norm", clip_norm),
            norm_type=order,
            stochastic_rounding=bool(stochastic_rounding),
            seed=check_int("ShardedOptimizer: seed", seed, 0, MAX_SEED),
            rule={
                **self.rule.core_options(specs),
                "trainable": [int(not f) for f in self._is_frozen],
                "offload": offload,
            },
        )
        self.applied_steps = 0
        self._skips = 0
        self._counts: list[int | None] = []
        self._given: set[str] = set()
        self._attached = False
        self._multiplier = 1.0
        check_alike(group, more)
        for array in [*self._params.values(), *more.values()]:
            target = Target(array)
            group.broadcast(target.bytes())
            target.store()
        self.read_arrays()

    @property
    def loss_scale(self) -> float:
        """What the loss must be multiplied by before its backward pass; 1 without a loss scaler."""
        return 1.0 if self.loss_scaler is None else self.loss_scaler.scale

    def read_arrays(self) -> None:
        """Takes the arrays' values as the weights, after the script has changed them; the same on all ranks."""
        for name, array in self._params.items():
            self._core.write("weight", self._places[name], readable(array))

    # ---- gradients ----

    def add(self, name: str, grad: Any) -> None:
        """Hands over one gradient of the micro-batch at hand, for instance while its backward pass goes on.

        It is added up at once, and may be reused when the call returns. With `micro_batches` given, those of the
        last micro-batch are reduced in the background as buckets fill, from the last parameter to the first.

        Raises:
            InvalidArgument: an unknown name, another shape, or a second gradient in one micro-batch.
        """
        self._check_gradient(name, grad)
        self._add(name, grad)

    def attach(self) -> None:
        """Has PyTorch hand over every gradient as soon as its backward pass has it, and clear it. Once.

        Raises:
            InvalidArgument: a parameter is none of PyTorch's, or this was called before.
        """
        for name, param in self._params.items():
            if not hasattr(param, "register_post_accumulate_grad_hook"):
                raise InvalidArgument(f"attach: parameter {name!r} is no PyTorch parameter; use add")
        if self._attached:
            raise InvalidArgument("attach: gradients are handed over already; call it once")
        self._attached = True
        for name, frozen in zip(self._params, self._is_frozen, strict=True):

            def hand_over(param: Any, name: str = name, frozen: bool = frozen) -> None:
                if not frozen:
                    self.add(name, param.grad)
                param.grad = None

            if self._params[name].requires_grad:
                self._params[name].register_post_accumulate_grad_hook(hand_over)

    def accumulate(
        self, grads: Mapping[str, Any] | Iterable[Any] | None = None, *, count: int | None = None
    ) -> None:
        """Ends a micro-batch that is not the step's last one.

        Args:
            grads: names to gradients, pairs, or gradients in order of the parameters; those that are missing or
                None are zero. Default: the `.grad` of PyTorch's parameters, which is taken and set to None.
            count: what the losses of this micro-batch were summed over; see the class.

        Raises:
            InvalidArgument: nothing was taken, and the micro-batch goes on.
        """
        if self._micro_batches and len(self._counts) + 1 >= self._micro_batches:
            raise InvalidArgument(
                f"accumulate: this is micro-batch {len(self._counts) + 1} of micro_batches={self._micro_batches},"
                " the last one; call step"
            )
        found = self._gradients(grads)
        self._check_micro_batch(found, count)
        self._end_micro_batch(grads, found, count)

    def step(
        self, grads: Mapping[str, Any] | Iterable[Any] | None = None, *, count: int | None = None
    ) -> UpdateStats:
        """Ends the last micro-batch, if it was not ended by accumulate, and updates. Collective.

        A step without `grads` and without gradients since the last accumulate, after at least one accumulate,
        has no micro-batch of its own.

        Args:
            grads, count: as in accumulate.

        Returns: what was done.

        Raises:
            InvalidArgument: on all ranks if on one. Nothing was taken, and the micro-batch goes on.
            NumericError: a gradient is not finite; on all ranks. Nothing was updated.
        """
        taken, lr = self._agreed(
            lambda: (self._checked_step(grads, count), self.rule.lr_at(self.applied_steps + 1))
        )
        if taken is not None:
            self._end_micro_batch(grads, taken, count)
        counted = [each for each in self._counts if each is not None]
        total = sum(counted) if counted else len(self._counts)
        scale = self.loss_scale
        with self._calls("ShardedOptimizer.step"):
            raw = self._core.step(lr=lr, loss_scale=scale, count=total, counted=bool(counted))
        self._counts = []
        if raw["count"] > 0:
            self._multiplier = 1.0 / (raw["count"] * scale)
        overflowed = raw["count"] > 0 and not raw["applied"]
        if self.loss_scaler is not None and raw["count"] > 0:
            self.loss_scaler.update(overflowed)
        if raw["applied"]:
            self.applied_steps += 1
            self._write_arrays()
        self._skips = self._skips + 1 if overflowed else 0
        text = self._overflow_text(raw) if overflowed else ""
        if overflowed and (self._raises or 0 < self._max_skips <= self._skips):
            raise NumericError(
                f"step {self.applied_steps + 1}: {text}. Nothing was updated, {self._skips} time(s) in a row. Lower"
                " the learning rate or set clip_norm, and check the data"
            )
        return UpdateStats(
            step=self.applied_steps,
            lr=lr,
            grad_norm=raw["grad_norm"],
            count=raw["count"],
            skipped=not raw["applied"],
            loss_scale=scale,
            overflow=text,
        )

    def gradient(self, name: str) -> NDArray[np.float32]:
        """The averaged gradient of the last step, before clipping. Collective."""
        gradient = self._read("grad", [name])[name]
        gradient *= np.float32(self._multiplier)
        return gradient

    # ---- state ----

    def weight(self, name: str) -> NDArray[np.float32]:
        """The fp32 weight. Collective."""
        return self._read("weight", [name])[name]

    def optimizer_state(self, name: str, kind: str) -> NDArray[np.float32]:
        """State of a parameter, such as "exp_avg", "exp_avg_sq", "momentum". Collective."""
        return self._read(kind, [name])[name]

    def updates(self) -> dict[str, int]:
        """How many updates each parameter has had, which bias correction counts."""
        return dict(zip(self._params, self._core.updates, strict=True))

    def persistent_bytes(self) -> dict[str, int]:
        """Bytes that this rank keeps between steps for weights in fp32, summed gradients and state."""
        return self._core.persistent_bytes

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on, in full arrays by parameter, whatever stage and group. Collective."""
        names = self._trainable()
        return {
            **self._scalars(),
            "weight": self._read("weight", names),
            "state": {kind: self._read(kind, self._with_state(kind)) for kind in self._core.state_kinds},
        }

    def state_pieces(self) -> dict[str, Any]:
        """The same, but only what this rank holds: lists of (name, first element, values). Not collective."""
        names = list(self._params)

        def pieces(kind: str) -> list[tuple[str, int, NDArray[np.float32]]]:
            return [(names[param], begin, values) for param, begin, values in self._core.pieces(kind)]

        kinds = self._core.state_kinds
        return {
            **self._scalars(),
            "weight": pieces("weight"),
            "state": {kind: pieces(kind) for kind in kinds},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a state_dict, of any stage and group size; writes the arrays. Collective.

        Raises:
            InvalidArgument: names or shapes that do not fit, all of them listed; nothing is changed then.
        """
        loaded = self._agreed(
            lambda: check_state(
                state,
                rule=self._rule_name(),
                shapes={name: tuple(array.shape) for name, array in self._params.items()},
                kinds={"weight": self._trainable()}
                | {k: self._with_state(k) for k in self._core.state_kinds},
                loss_scaler=self.loss_scaler,
            )
        )
        if self.loss_scaler is not None:
            self.loss_scaler.load_state_dict(state["loss_scaler"])
        for (kind, name), values in loaded.items():
            self._core.write(kind, self._places[name], np.ascontiguousarray(values, dtype=np.float32))
        self._core.set_updates([int(state["updates"][name]) for name in self._params])
        self.applied_steps = int(state["applied_steps"])
        self._skips = int(state.get("skips", 0))  # earlier versions did not write it
        self._core.restart()
        self._counts, self._given = [], set()
        self._write_arrays()

    # ---- inside ----

    def _agreed(self, check: Callable[[], _T]) -> _T:
        """What `check` gives, if it gives something on every rank; otherwise all ranks raise."""
        try:
            result = check()
        except Exception as error:
            with contextlib.suppress(InvalidArgument), self._calls("ShardedOptimizer"):
                self._core.agree(str(error))
            raise
        with self._calls("ShardedOptimizer"):
            self._core.agree("")
        return result

    def _rule_name(self) -> str:
        return type(self.rule).__name__

    def _trainable(self) -> list[str]:
        return [name for name, frozen in zip(self._params, self._is_frozen, strict=True) if not frozen]

    def _with_state(self, kind: str) -> list[str]:
        return [name for name in self._trainable() if self._core.has_state(kind, self._places[name])]

    def _scalars(self) -> dict[str, Any]:
        return {
            "rule": self._rule_name(),
            "applied_steps": self.applied_steps,
            "skips": self._skips,
            "updates": self.updates(),
            "loss_scaler": None if self.loss_scaler is None else self.loss_scaler.state_dict(),
        }

    def _place(self, name: str) -> int:
        if name not in self._places:
            raise InvalidArgument(
                f"there is no parameter {name!r}; names are like {next(iter(self._places))!r}"
            )
        return self._places[name]

    def _check_gradient(self, name: str, grad: Any) -> None:
        place = self._place(name)
        check_float(f"gradient of {name!r}", grad)
        shape = tuple(self._params[name].shape)
        if tuple(grad.shape) != shape:
            raise InvalidArgument(
                f"gradient of {name!r} has shape {tuple(grad.shape)}; the parameter has {shape}"
            )
        if self._is_frozen[place]:
            raise InvalidArgument(f"gradient of {name!r}: the parameter is frozen; leave it out")
        if name in self._given:
            raise InvalidArgument(
                f"gradient of {name!r} was already given in this micro-batch; give the sum of both"
            )

    def _add(self, name: str, grad: Any) -> None:
        self._core.add(self._places[name], readable(grad))
        self._given.add(name)

    def _gradients(self, grads: Mapping[str, Any] | Iterable[Any] | None) -> dict[str, Any]:
        """Gradients by name, without those that are None; by default those of PyTorch's parameters that learn."""
        if grads is None:
            found = {name: getattr(self._params[name], "grad", None) for name in self._trainable()}
        elif isinstance(grads, Mapping):
            found = dict(grads)
        else:
            listed = list(grads)
            if listed and all(
                isinstance(each, tuple) and len(each) == 2 and isinstance(each[0], str) for each in listed
            ):
                found = dict(listed)
            elif len(listed) == len(self._params):
                found = dict(zip(self._params, listed, strict=True))
            else:
                raise InvalidArgument(
                    f"grads: {len(listed)} gradients for {len(self._params)} parameters; give one for each, or None"
                )
        return {name: grad for name, grad in found.items() if grad is not None}

    def _check_micro_batch(self, found: Mapping[str, Any], count: int | None) -> None:
        """Raises, before anything is taken, where these cannot end a micro-batch."""
        if count is not None:
            check_int("count", count, 0, _MAX_COUNT)
        if self._counts and (count is None) != (self._counts[0] is None):
            raise InvalidArgument("count was given for some micro-batches of this step and not for others")
        for name, grad in found.items():
            self._check_gradient(name, grad)

    def _checked_step(self, grads: Any, count: int | None) -> dict[str, Any] | None:
        """The gradients of the step's last micro-batch; None if all of its micro-batches have ended."""
        for name, array in self._params.items():
            check_not_freed(f"parameter {name!r}", array)
        found = self._gradients(grads)
        ends = bool(grads is not None or found or self._given or count is not None or not self._counts)
        if ends:
            self._check_micro_batch(found, count)
        done = len(self._counts) + ends
        if self._micro_batches and done != self._micro_batches:
            raise InvalidArgument(
                f"step: this would be a step of {done} micro-batches, with micro_batches={self._micro_batches}; call"
                " accumulate for each but the last one"
            )
        return found if ends else None

    def _end_micro_batch(self, grads: Any, taken: Mapping[str, Any], count: int | None) -> None:
        if grads is None:
            for param in self._params.values():
                if getattr(param, "grad", None) is not None:
                    param.grad = None
        # As backward passes do it, so that the buckets that are reduced first fill first.
        for name in reversed(self._params):
            if name in taken:
                self._add(name, taken[name])
        self._core.end_micro_batch()
        self._given = set()
        self._counts.append(count)

    def _read(self, kind: str, names: Sequence[str]) -> dict[str, NDArray[np.float32]]:
        out = {
            name: np.empty(tuple(self._params[name].shape), np.float32)
            for name in names
            if self._place(name) >= 0
        }
        with self._calls("ShardedOptimizer"):
            self._core.read(kind, [out.get(name) for name in self._params])
        return out

    def _write_arrays(self) -> None:
        targets = {name: Target(self._params[name]) for name in self._trainable()}
        self._core.read(
            "weight", [targets[name].memory if name in targets else None for name in self._params]
        )
        for target in targets.values():
            target.store()

    def _overflow_text(self, raw: Mapping[str, Any]) -> str:
        if raw["culprit_param"] < 0:
            return "every gradient is finite, but not their sum over the ranks"
        name = list(self._params)[raw["culprit_param"]]
        rank = self.group.ranks[raw["culprit_rank"]]
        return f"the gradient of {name!r} is not finite on rank {rank} (the first such parameter and rank)"
