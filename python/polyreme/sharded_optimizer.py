"""The optimizer half of a training step for loops of one's own."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import _core
from .arrays import Target, check_float, dtype_name, plain, readable
from .checks import MAX_SEED, check_int, check_number, check_type
from .errors import InvalidArgument, NumericError
from .group import Group
from .loss_scaler import LossScaler
from .optim import AdamW, Optimizer
from .precision import DTYPES, check_name

__all__ = ["ShardedOptimizer", "UpdateStats"]


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
        buffers: more arrays that start as rank 0's, of any dtype.
        lanes: how many parts the batch is cut into for the order of sums; default: one for each rank. A power of
            two that the group's size divides, or that size.
        micro_batches: calls of accumulate and step together that make a step, on each rank. If given, a bucket
            is reduced while the last backward pass still goes on (see `add`). Needed where a rank has
            several lanes, of which it must be a multiple.
        bucket_bytes: gradients are reduced once a bucket has so many fp32 bytes.
        gradient_dtype: "fp32", "bf16" or "fp16": what the summed gradient of a lane is rounded to before lanes are
            added in fp32, and travels in where every rank has one lane; see `Precision.gradients`.
        clip_norm, norm_type: clips the averaged gradient; 0: no limit. norm_type: 1 or more, or math.inf.
        loss_scaler: for float16; see LossScaler. The loss must be multiplied by `loss_scale`.
        nonfinite: "skip" or "raise" where a gradient is not finite. Default: "skip" with a loss scaler.
        max_skips: raise after so many skipped steps in a row; 0: never.
        stochastic_rounding: bfloat16 arrays get the fp32 weights rounded up or down at random, so that small
            updates are not lost on average; drawn for (`seed`, name, number of updates, element).

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
    ) -> None:
        check_type("ShardedOptimizer: group", group, Group, 'a group of a mesh, such as mesh["dp"]')
        self.rule = AdamW() if rule is None else rule
        check_type("ShardedOptimizer: rule", self.rule, Optimizer, "a rule such as polyreme.AdamW()")
        if loss_scaler is not None:
            check_type("ShardedOptimizer: loss_scaler", loss_scaler, LossScaler, "a polyreme.LossScaler")
        if nonfinite not in (None, "skip", "raise"):
            raise InvalidArgument(f"ShardedOptimizer: nonfinite={nonfinite!r}; expected 'skip' or 'raise'")
        check_name("ShardedOptimizer: gradient_dtype", gradient_dtype, tuple(DTYPES))
        self.loss_scaler = loss_scaler
        self.group = group
        self._raises = nonfinite == "raise" or (nonfinite is None and loss_scaler is None)
        self._max_skips = check_int("ShardedOptimizer: max_skips", max_skips, 0)
        self._params = _named("params", params)
        self._places = {name: place for place, name in enumerate(self._params)}
        for name, array in self._params.items():
            check_float(f"ShardedOptimizer: parameter {name!r}", array, written=True)
        specs = [
            {"name": name, "shape": tuple(array.shape), "weight_decay": array.ndim >= 2}
            for name, array in self._params.items()
        ]
        _check_patterns("frozen", frozen, list(self._params))
        self._is_frozen = [any(fnmatch.fnmatchcase(name, f) for f in frozen) for name in self._params]
        if all(self._is_frozen):
            raise InvalidArgument("ShardedOptimizer: all parameters are frozen; nothing would be trained")
        order = (
            math.inf if norm_type == math.inf else check_number("ShardedOptimizer: norm_type", norm_type, 1.0)
        )
        self._micro_batches = (
            0 if micro_batches is None else check_int("ShardedOptimizer: micro_batches", micro_batches, 1)
        )
        world = group._mesh.world
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
            rule={**self.rule.core_options(specs), "trainable": [int(not f) for f in self._is_frozen]},
        )
        self.applied_steps = 0
        self._skips = 0
        self._counts: list[int | None] = []
        self._given: set[str] = set()
        self._multiplier = 1.0
        for array in [*self._params.values(), *_named("buffers", buffers).values()]:
            target = Target(array)
            group.broadcast(target.memory)
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
        self._core.add(self._place(name), readable(self._checked(name, grad)))
        self._given.add(name)

    def attach(self) -> None:
        """Has PyTorch hand over every gradient as soon as its backward pass has it, and clear it."""
        for name, param in self._params.items():
            if not hasattr(param, "register_post_accumulate_grad_hook"):
                raise InvalidArgument(f"attach: parameter {name!r} is no PyTorch parameter; use add")

            def hand_over(param: Any, name: str = name) -> None:
                self.add(name, param.grad)
                param.grad = None

            param.register_post_accumulate_grad_hook(hand_over)

    def accumulate(
        self, grads: Mapping[str, Any] | Iterable[Any] | None = None, *, count: int | None = None
    ) -> None:
        """Ends a micro-batch that is not the step's last one.

        Args:
            grads: names to gradients, pairs, or gradients in order of the parameters; those that are missing or
                None are zero. Default: the `.grad` of PyTorch's parameters, which is taken and set to None.
            count: what the losses of this micro-batch were summed over; see the class.
        """
        if self._micro_batches and len(self._counts) + 1 >= self._micro_batches:
            raise InvalidArgument(
                f"accumulate: this is micro-batch {len(self._counts) + 1} of micro_batches={self._micro_batches},"
                " the last one; call step"
            )
        self._end_micro_batch(grads, count)

    def step(
        self, grads: Mapping[str, Any] | Iterable[Any] | None = None, *, count: int | None = None
    ) -> UpdateStats:
        """Ends the last micro-batch, if it was not ended by accumulate, and updates. Collective.

        A step without `grads` and without gradients since the last accumulate, after at least one accumulate and
        with no `micro_batches` missing, has no micro-batch of its own.

        Args:
            grads, count: as in accumulate.

        Returns: what was done.

        Raises:
            NumericError: a gradient is not finite; on all ranks. Nothing was updated.
        """
        missing = len(self._counts) < self._micro_batches
        taken = self._take(grads)
        if grads is not None or taken or self._given or count is not None or not self._counts or missing:
            self._end_micro_batch(taken, count)
        counted = [each for each in self._counts if each is not None]
        total = sum(counted) if counted else len(self._counts)
        lr = self.rule.lr_at(self.applied_steps + 1)
        scale = self.loss_scale
        self._counts = []
        raw = self._core.step(lr=lr, loss_scale=scale, count=total, counted=bool(counted))
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
        if state.get("rule") != self._rule_name():
            raise InvalidArgument(
                f"load_state_dict: the state is of rule {state.get('rule')!r}, this optimizer has {self._rule_name()!r}"
            )
        parts = {"weight": state["weight"], **state["state"]}
        wanted = {"weight": self._trainable()} | {k: self._with_state(k) for k in self._core.state_kinds}
        problems = []
        for kind, names in wanted.items():
            have = parts.get(kind, {})
            problems += [f"{kind} of {name!r} is missing" for name in names if name not in have]
            problems += [f"{kind} of {name!r} belongs to no parameter" for name in have if name not in names]
            for name in names:
                shape = tuple(self._params[name].shape)
                if name in have and np.shape(have[name]) != shape:
                    problems.append(f"{kind} of {name!r} has shape {np.shape(have[name])}; expected {shape}")
        if (state.get("loss_scaler") is None) != (self.loss_scaler is None):
            problems.append("one of both has a loss scaler, the other none")
        if problems:
            raise InvalidArgument(f"load_state_dict: {'; '.join(problems)}. Nothing was changed")
        if self.loss_scaler is not None:
            self.loss_scaler.load_state_dict(state["loss_scaler"])
        for kind, names in wanted.items():
            for name in names:
                values = np.ascontiguousarray(parts[kind][name], dtype=np.float32)
                self._core.write(kind, self._places[name], values)
        self._core.set_updates([int(state["updates"].get(name, 0)) for name in self._params])
        self.applied_steps = int(state["applied_steps"])
        self._skips = 0
        self._core.restart()
        self._counts, self._given = [], set()
        self._write_arrays()

    # ---- inside ----

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
            "updates": self.updates(),
            "loss_scaler": None if self.loss_scaler is None else self.loss_scaler.state_dict(),
        }

    def _place(self, name: str) -> int:
        if name not in self._places:
            raise InvalidArgument(
                f"there is no parameter {name!r}; names are like {next(iter(self._places))!r}"
            )
        return self._places[name]

    def _checked(self, name: str, grad: Any) -> Any:
        check_float(f"gradient of {name!r}", grad)
        shape = tuple(self._params[name].shape) if name in self._params else ()
        if tuple(grad.shape) != shape:
            raise InvalidArgument(
                f"gradient of {name!r} has shape {tuple(grad.shape)}; the parameter has {shape}"
            )
        return plain(grad)

    def _take(self, grads: Mapping[str, Any] | Iterable[Any] | None) -> dict[str, Any]:
        """Gradients by name, without those that are None."""
        if grads is None:
            found = {name: getattr(param, "grad", None) for name, param in self._params.items()}
            for name, param in self._params.items():
                if found[name] is not None:
                    param.grad = None
        elif isinstance(grads, Mapping):
            found = dict(grads)
        else:
            listed = list(grads)
            if all(isinstance(each, tuple) and len(each) == 2 for each in listed):
                found = dict(listed)
            elif len(listed) == len(self._params):
                found = dict(zip(self._params, listed, strict=True))
            else:
                raise InvalidArgument(
                    f"grads: {len(listed)} gradients for {len(self._params)} parameters; give one for each, or None"
                )
        return {name: grad for name, grad in found.items() if grad is not None}

    def _end_micro_batch(self, grads: Any, count: int | None) -> None:
        if count is not None:
            count = check_int("count", count, 0)
        if self._counts and (count is None) != (self._counts[0] is None):
            raise InvalidArgument("count was given for some micro-batches of this step and not for others")
        taken = self._take(grads)
        for name, grad in taken.items():
            self._place(name)
            self._checked(name, grad)
        # As backward passes do it, so that the buckets that are reduced first fill first.
        for name in reversed(self._params):
            if name in taken:
                self.add(name, taken[name])
        self._core.end_micro_batch()
        self._given = set()
        self._counts.append(count)

    def _read(self, kind: str, names: Sequence[str]) -> dict[str, NDArray[np.float32]]:
        out = {
            name: np.empty(tuple(self._params[name].shape), np.float32)
            for name in names
            if self._place(name) >= 0
        }
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


def _named(what: str, arrays: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> dict[str, Any]:
    pairs = list(arrays.items() if isinstance(arrays, Mapping) else arrays)
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str):
            raise InvalidArgument(
                f"ShardedOptimizer: {what}: expected names to arrays, or pairs of a name and an array;"
                f" got a {type(pair).__name__}"
            )
    named = dict(pairs)
    if len(named) != len(pairs):
        twice = next(name for name, _ in pairs if sum(name == other for other, _ in pairs) > 1)
        raise InvalidArgument(f"ShardedOptimizer: {what}: the name {twice!r} comes twice")
    if what == "params" and not named:
        raise InvalidArgument("ShardedOptimizer: there are no parameters")
    return named


def _check_patterns(what: str, patterns: Sequence[str], names: list[str]) -> None:
    if isinstance(patterns, str):
        raise InvalidArgument(f"ShardedOptimizer: {what}={patterns!r}; expected a list of patterns of names")
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            raise InvalidArgument(
                f"ShardedOptimizer: {what}: no parameter matches {pattern!r}; names are like {names[0]!r}"
            )
