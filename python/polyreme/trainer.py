"""The training loop: one call into the C++ core per step."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import _core, optim
from .batch import as_array, joined_batch, token_array
from .checkpoint import Checkpointer, Restored
from .checkpoint.training import TrainerState
from .checks import MAX_SEED, check_int, check_number, check_type, matching
from .data import TokenDataset
from .errors import InvalidArgument, NotAvailable
from .layout import lanes_to_verify, layout_to_verify
from .mesh import Mesh
from .models import Model
from .precision import DTYPES, Precision
from .schedule import FixedSchedule, Schedule, ScheduleKind, one_f_one_b
from .step_stats import StepStats
from .verification import StepRecorder, precision_to_verify
from .world import Lanes
from .zero import Zero

__all__ = ["Trainer"]

_SKIPS: dict[str | int, Any] = {"raise": 0, "skip": -1}


class Trainer:
    """Trains a model over the ranks of a mesh. Collective: every rank makes the same calls.

    Args:
        model: what to train.
        mesh: the ranks, along dp, tp and pp.
        optimizer: the update rule with its learning rate.
        global_batch: samples of one step, over all ranks.
        micro_batch: samples of one forward pass; changes memory and speed, not the bits.
        schedule: the order of a pipeline's computations, of `pr.schedule`; changes memory and speed, not the bits.
            Default with pp > 1: one_f_one_b. The layers are dealt out by cost.
        split: instead, the number of the model's blocks in each chunk of the pipeline, such as [7, 5].
        clip_norm: limit of the gradient's 2-norm, or None.
        lanes: where sums may be cut (see Lanes); equal lanes, equal bits on every layout. Several lanes of tp, which
            tp > 1 has by default, must divide the model's heads, MLP and seq_len.
        seed: initial weights, dropout and the order of samples.
        zero: what the ranks of dp divide among them (see Zero), the same bits in every stage. 0: nothing. 1: the
            optimizer state; 8 / dp instead of 8 bytes per parameter with AdamW, the same traffic. 2: gradients
            too; 4 / dp instead of 4 bytes per parameter. 3: weights too; again 4 / dp instead of 4, half as
            much traffic again. A `Zero` has options such as the size of buckets and hybrid sharding.
        precision: "fp32", "bf16", "fp16" or a Precision: how parameters and activations are stored, and the scale
            of the loss. Arithmetic and the optimizer are fp32; the same bits on every layout in each of them.
        on_nonfinite: what to do when the gradient or the loss is not finite: "raise" NumericError, "skip" the
            step, or skip this many in a row and raise at the next one. The error and `StepStats.not_finite` name
            the first bad parameter. A dynamic loss scale that can back off always skips the step.
        frozen: patterns of names (as in fnmatch) of parameters that do not learn: ["wte.*", "h.0.*"]. They have
            neither gradient nor optimizer state, and backward ends with the first layer that learns.

        check_every: steps between two calls of `check_replicas`; 0: none.

    Raises:
        InvalidArgument: sizes that do not fit together, naming them; a pattern that matches nothing.
        NotAvailable: options of a later version.

    Example:
        >>> trainer = pr.Trainer(  # doctest: +SKIP
        ...     model, pr.Mesh(world), optimizer=pr.AdamW(lr=3e-4), global_batch=64, micro_batch=4,
        ...     lanes=pr.Lanes(dp=8), zero=pr.Zero(stage=3, prefetch=2), clip_norm=1.0,
        ... )
    """

    def __init__(
        self,
        model: Model,
        mesh: Mesh,
        *,
        optimizer: optim.Optimizer,
        global_batch: int,
        micro_batch: int = 1,
        clip_norm: float | None = None,
        lanes: Lanes | None = None,
        seed: int = 0,
        zero: int | Zero = 0,
        precision: str | Precision = "fp32",
        on_nonfinite: str | int = "raise",
        schedule: ScheduleKind | FixedSchedule | None = None,
        split: Sequence[int] | None = None,
        frozen: Sequence[str] = (),
        check_every: int = 0,
    ) -> None:
        check_type("model", model, Model, "a polyreme.models.GPT or Llama")
        _check_mesh(mesh)
        check_type("optimizer", optimizer, optim.Optimizer, "a rule such as polyreme.AdamW()")
        if lanes is not None:
            check_type("lanes", lanes, Lanes, "a polyreme.Lanes, such as Lanes(dp=4), or None")
        lanes = lanes_to_verify(lanes or Lanes())
        zero = Zero.of(zero)
        precision = precision_to_verify(Precision.of(precision))
        if on_nonfinite not in ("raise", "skip"):
            on_nonfinite = check_int("on_nonfinite", on_nonfinite, 1, otherwise="'raise' or 'skip'")
        global_batch = check_int("global_batch", global_batch, 1)
        micro_batch = check_int("micro_batch", micro_batch, 1)
        if clip_norm is not None:
            clip_norm = check_number("clip_norm", clip_norm, above=True, otherwise="None for no limit")
        seed = check_int("seed", seed, 0, MAX_SEED)
        if (layout := layout_to_verify()) is not None:
            zero, schedule, split = layout.of_zero(zero), layout.of_schedule(schedule), None
            micro_batch = layout.micro_batch or micro_batch
        self.model = model
        self.mesh = mesh
        self.optimizer = optimizer
        self.global_batch = global_batch
        self.micro_batch = micro_batch
        self.seed = seed
        self.precision = precision
        self.zero = zero
        self.check_every = check_int("check_every", check_every, 0)
        self.frozen = matching("frozen", frozen, self.parameter_names())
        self.peak_flops: float | None = None
        self.schedule = _pipeline(mesh, schedule, global_batch, micro_batch, lanes.dp)
        self._engine = self._make_engine(
            lanes, clip_norm or 0.0, _SKIPS.get(on_nonfinite, on_nonfinite), split
        )
        self.lanes = replace(lanes, dp=self._engine.lanes_dp, tp=self._engine.lanes_tp)
        self._calls = mesh.world._calls
        self._data_facts: dict[str, Any] | None = None  # of what fit has trained on, for checkpoints
        self._compared_batches = False
        self._recorder = StepRecorder.from_environment(mesh.world.rank)

    def _make_engine(
        self, lanes: Lanes, clip_norm: float, max_skipped: Any, split: Sequence[int] | None
    ) -> _core.Engine:
        zero, lists = self.zero, self.schedule
        return _core.Engine(
            self.mesh.world._core,
            self.mesh._core,
            self.model._config(self.precision),
            global_batch=self.global_batch,
            micro_batch=self.micro_batch,
            lanes_dp=lanes.dp or 0,
            lanes_tp=lanes.tp or 0,
            seed=self.seed,
            clip_norm=clip_norm,
            zero_stage=zero.stage,
            shard_size=zero.shard_size or 0,
            bucket_bytes=zero.bucket_bytes,
            overlap=zero.overlap,
            round_first=lanes.order == "round_first",
            gradient_dtype=DTYPES[self.precision.gradients],
            prefetch=zero.prefetch,
            persist_below=zero.persist_below,
            gather_for_step=zero._gather_for_step(lists is not None),
            loss_scale=_core.LossScalerOptions(**asdict(self.precision.scaling())),
            max_skipped=max_skipped,
            optimizer={
                **self.optimizer.core_options(self.model.param_specs()),
                "trainable": [int(name not in self.frozen) for name in self.parameter_names()],
                "offload": zero.offload,
            },
            schedule=lists._core if lists is not None else None,
            split=_split(split, lists),
        )

    # ---- steps ----

    @property
    def applied_steps(self) -> int:
        """Updates made so far."""
        return self._engine.applied_steps

    @property
    def skipped_steps(self) -> int:
        """Steps that were skipped because a gradient was not finite."""
        return self._engine.skipped_steps

    @property
    def loss_scale(self) -> float:
        """The factor of the loss in the next step."""
        return self._engine.loss_scaler_state[0]

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters; tied ones count once."""
        return self._engine.num_parameters

    def step(
        self, tokens: ArrayLike | Sequence[ArrayLike], targets: ArrayLike | Sequence[ArrayLike]
    ) -> StepStats:
        """One update on the caller's own batch.

        Args:
            tokens: int [global_batch / dp, seq_len]: the part of the global batch at this rank's place along
                dp, seq_len up to the model's. Or a list of this rank's micro-batches in order, int
                [micro_batch, seq_len of its own]; every rank of dp may have other lengths. A lane's last one has
                what is left of its samples.
            targets: same shape; -100 marks tokens that do not count.

        Raises:
            InvalidArgument: wrong shape or a token outside the vocabulary; nothing has changed.
            NumericError: the gradient is not finite; weights and optimizer are as before.

        Example:
            >>> trainer.step([short_tokens, long_tokens], [short_targets, long_targets])  # doctest: +SKIP
        """
        start = self._begin()
        lengths: list[int] = []
        given: tuple[Any, Any] = (tokens, targets)
        with self._told_if_refused():
            lr = self.optimizer.lr_at(self.applied_steps + 1)
            if isinstance(tokens, (list, tuple)) and tokens and as_array(tokens[0], "tokens").ndim == 2:
                *joined, lengths = joined_batch(tokens, targets, self.model.seq_len, self._micro_rows())
                given = (joined[0], joined[1])
            arrays = token_array(given[0], "tokens"), token_array(given[1], "targets")
            if arrays[0].shape != arrays[1].shape:
                raise InvalidArgument(
                    f"tokens have shape {list(arrays[0].shape)}, targets {list(arrays[1].shape)}; they must be equal"
                )
        with self._calls("step"):
            raw = self._engine.train_batch(*arrays, lr, lengths)
        seconds = time.perf_counter() - start
        if not self._compared_batches:
            self._warn_of_equal_batches(*arrays)
        return self._stats(raw, lr, seconds)

    @contextlib.contextmanager
    def _told_if_refused(self) -> Iterator[None]:
        """What this rank raises before it takes part in a step, the others, which wait in it, raise too."""
        try:
            yield
        except Exception:
            nothing = np.zeros((0, 0), np.int32)
            with contextlib.suppress(InvalidArgument), self._calls("step"):
                self._engine.train_batch(nothing, nothing, 0.0)  # which it refuses, on all ranks
            raise

    def _micro_rows(self) -> list[int]:
        """Samples of each of this rank's micro-batches, in order."""
        lanes = self.lanes.dp or 1
        samples = self.global_batch // lanes
        sizes = [min(self.micro_batch, samples - begin) for begin in range(0, samples, self.micro_batch)]
        return sizes * (lanes // self.mesh.size("dp"))

    def _warn_of_equal_batches(self, tokens: NDArray[np.int32], targets: NDArray[np.int32]) -> None:
        """Of the first step alone: a loader that gives several ranks the same samples is one from the start."""
        self._compared_batches = True
        if self.mesh.size("dp") == 1:
            return
        digest = hashlib.sha256(tokens.tobytes() + targets.tobytes()).digest()
        places: dict[bytes, list[int]] = {}
        for place, row in enumerate(self.mesh["dp"].all_gather(np.frombuffer(digest, np.uint8)[None])):
            places.setdefault(row.tobytes(), []).append(place)
        equal = [ranks for ranks in places.values() if len(ranks) > 1]
        if equal and self.mesh.world.rank == 0:
            logging.getLogger("polyreme").warning(
                "the first batch is the same on dp ranks %s: give each rank its own part of the global batch, or"
                " what they compute is computed twice",
                " and on ".join(", ".join(map(str, ranks)) for ranks in equal),
            )

    def fit(
        self,
        data: TokenDataset,
        *,
        steps: int,
        validation: TokenDataset | None = None,
        validate_every: int = 0,
        validation_samples: int | None = None,
        checkpoints: Checkpointer | None = None,
    ) -> Iterator[StepStats]:
        """Trains until `steps` updates are made in all, yielding the stats of each.

        Step k takes the samples k * global_batch and on of an order that is a pure function of
        (seed, position): every epoch is a permutation of the data, for any number of ranks. All samples have
        data.seq_len tokens, here and in evaluate(); micro-batches of different lengths are for step().

        Args:
            validation: evaluated every `validate_every` steps (0: never between) and after the last one.
            validation_samples: samples of one evaluation; default: all.
            checkpoints: saves as it says, and after the last step. The place in the order of samples is part of
                the checkpoint: it is the number of steps, skipped ones included.

        Raises:
            InvalidArgument: data that does not fit the model, or has fewer samples than global_batch.
        """
        self._check_data(data)
        if validation is not None:
            self._check_data(validation)
        steps = check_int("fit: steps", steps, 0)
        validate_every = check_int("fit: validate_every", validate_every, 0)
        if validation_samples is not None:
            validation_samples = check_int(
                "fit: validation_samples", validation_samples, 1, otherwise="None for all"
            )
        if data.num_samples < self.global_batch:
            raise InvalidArgument(
                f"fit: '{data.path}' has {data.num_samples} samples, fewer than global_batch={self.global_batch}:"
                " samples would repeat inside a batch; use more text, a shorter seq_len or a smaller global_batch"
            )
        if checkpoints is not None:
            check_type("fit: checkpoints", checkpoints, Checkpointer, "a polyreme.Checkpointer, or None")
            checkpoints._claim(checkpoints._open(self.mesh.world))
        self._check_data_facts(data)
        return self._fit(data, steps, validation, validate_every, validation_samples, checkpoints)

    def _fit(
        self,
        data: TokenDataset,
        steps: int,
        validation: TokenDataset | None,
        validate_every: int,
        validation_samples: int | None,
        checkpoints: Checkpointer | None,
    ) -> Iterator[StepStats]:
        order = _core.SampleOrder(data.num_samples, self.seed, True)
        while self.applied_steps < steps:
            position = self.applied_steps + self.skipped_steps
            start = self._begin()
            with self._told_if_refused():
                lr = self.optimizer.lr_at(self.applied_steps + 1)
            with self._calls("fit"):
                raw = self._engine.train_step(data._core, order, position, lr)
            stats = self._stats(raw, lr, time.perf_counter() - start)
            due = stats.step == steps or (validate_every > 0 and stats.step % validate_every == 0)
            due = due and not stats.skipped
            if validation is not None and due:
                stats = replace(
                    stats, validation_loss=self.evaluate(validation, num_samples=validation_samples)
                )
            if checkpoints is not None:
                checkpoints._after_step(self, stats.step, last=stats.step == steps)
            yield stats

    def resume(
        self, checkpoints: Checkpointer, *, step: int | None = None, must_exist: bool = False
    ) -> Restored | None:
        """Goes on from a checkpoint, whatever layout has made it; None if there is none. Collective.

        With the same lanes the run continues bit for bit as if it had never stopped: weights, optimizer,
        learning rate, order of samples. The directory is then this job's to save to; a run that only wants to
        read calls `checkpoints.load`.

        Args:
            step: which; default: the newest that is complete and undamaged.
            must_exist: having none is an error, instead of a warning and a fresh start.

        Raises:
            CheckpointError: it does not fit; names all that differs. Nothing has changed.
        """
        check_type("resume: checkpoints", checkpoints, Checkpointer, "a polyreme.Checkpointer")
        checkpoints._claim(checkpoints._open(self.mesh.world))
        if must_exist or step is not None:
            return checkpoints.load(self, step=step)
        return checkpoints._load(self, None, True, False)

    def _checkpoint_state(self) -> TrainerState:
        return TrainerState(self)

    def _check_data_facts(self, data: TokenDataset) -> None:
        facts = {"num_samples": data.num_samples, "seq_len": data.seq_len}
        if self._data_facts not in (None, facts) and self.mesh.world.rank == 0:
            logging.getLogger("polyreme").warning(
                "fit: '%s' has %s; before this run had trained on %s: the order of samples is another one",
                data.path,
                facts,
                self._data_facts,
            )
        self._data_facts = facts

    def evaluate(self, data: TokenDataset, *, num_samples: int | None = None) -> float:
        """Mean loss over the first `num_samples` samples (default: all), without dropout."""
        self._check_data(data)
        count = data.num_samples
        if num_samples is not None:
            count = min(count, check_int("evaluate: num_samples", num_samples, 1, otherwise="None for all"))
        with self._calls("evaluate"):
            return float(self._engine.evaluate(data._core, 0, count)["loss"])

    def _check_data(self, data: TokenDataset) -> None:
        check_type("data", data, TokenDataset, "a polyreme.data.TokenDataset")
        if data.vocab_size > self.model.vocab:
            raise InvalidArgument(
                f"'{data.path}' has a vocabulary of {data.vocab_size} tokens, the model one of {self.model.vocab};"
                f" use a model with vocab >= {data.vocab_size}"
            )
        if data.seq_len != self.model.seq_len:
            raise InvalidArgument(
                f"'{data.path}' is read with seq_len={data.seq_len}, the model has seq_len={self.model.seq_len};"
                " use the same"
            )

    def _begin(self) -> float:
        """Returns the time at which the step starts."""
        if self._recorder is not None:
            self._recorder.begin(self)
        return time.perf_counter()

    def _stats(self, raw: dict[str, Any], lr: float, seconds: float) -> StepStats:
        flops = self.model.flops_per_token() * raw["tokens"]
        mfu = flops / seconds / self.peak_flops if self.peak_flops and seconds > 0 else None
        if self.check_every and self.applied_steps % self.check_every == 0:
            self.check_replicas()
        stats = StepStats(step=self.applied_steps, lr=lr, seconds=seconds, mfu=mfu, **raw)
        if self._recorder is not None:
            self._recorder.record(self, stats)
        return stats

    # ---- looking inside ----

    def logits(self, tokens: ArrayLike) -> NDArray[np.float32]:
        """Scores [num_samples, seq_len, vocab] of this rank's own tokens, which may be none.

        Collective along pp and tp, whose ranks give the same tokens, and with zero=3, where the ranks gather weights together; local otherwise.
        """
        array = token_array(tokens, "tokens")
        with self._calls("logits"):
            return self._engine.logits(array)

    def parameter(self, name: str) -> NDArray[np.float32]:
        """A copy of a parameter as the model reads it, in fp32. Collective along pp and tp, and with zero=3."""
        return self._read(name, "weight")

    def master_parameter(self, name: str) -> NDArray[np.float32]:
        """A copy of a parameter as the optimizer updates it, in fp32. Collective along pp and tp, and from zero=1 on."""
        return self._read(name, "master")

    def set_parameter(self, name: str, values: ArrayLike) -> None:
        """Overwrites a parameter; every rank must give the same values.

        Raises:
            InvalidArgument: unknown name or another shape.
        """
        array = np.ascontiguousarray(values, dtype=np.float32)
        shapes = {spec["name"]: spec["shape"] for spec in self.model.param_specs()}
        if name in shapes and array.shape != shapes[name]:
            raise InvalidArgument(
                f"parameter {name!r} has shape {shapes[name]}; the values have {array.shape}"
            )
        with self._calls("set_parameter"):
            self._engine.write_param(name, array)

    def gradient(self, name: str) -> NDArray[np.float32]:
        """The gradient of the last step, over all ranks, before clipping. Collective along pp and tp, and unless zero=0."""
        return self._read(name, "grad")

    def optimizer_state(self, name: str, kind: str) -> NDArray[np.float32]:
        """State of a parameter: "exp_avg", "exp_avg_sq" (AdamW) or "momentum" (SGD). Collective along pp and tp, and unless
        zero=0.
        """
        return self._read(name, kind)

    def check_replicas(self) -> None:
        """Compares what several ranks hold alike, weights and optimizer state: a hash of each tensor. Collective.

        A flipped bit, or a script that changed one rank's weights, would otherwise go unnoticed.

        Raises:
            NumericError: on every rank, naming a tensor and the ranks that have it otherwise than most.
        """
        with self._calls("check_replicas"):
            self._engine.check_replicas()

    def memory(self, *, step: bool = False, host: bool = False) -> dict[str, int]:
        """Bytes of this rank by what they are for, computed from how parameters are divided; not collective.

        Without `step`, what stays between steps: weights, masters (fp32, of 16-bit weights), gradients, tied gradients (of a tied parameter's
        further uses), lane buffers (partial sums of a rank that has several lanes), moments, shared weights (along pp, copies
        of what another stage owns). With it, also the most that a step adds at once: gather window (zero=3), buckets
        (zero=2 and 3, gradients that are not reduced yet), rounded gradients (what `Precision.gradients` makes of
        them), visiting moments (of one unit, with `Zero.offload`), shared gradients (along pp). With `host`, what is in host memory instead: moments. Activations and the communicators' staging are not among them.

        Example:
            >>> sum(trainer.memory().values()) / trainer.num_parameters  # doctest: +SKIP
            16.1
        """
        terms = self._engine.memory()
        return {name: size for name, size, stays, there in terms if there == host and (stays or step)}

    def _read(self, name: str, kind: str) -> NDArray[np.float32]:
        with self._calls(f"reading {kind} of {name!r}"):
            return self._engine.read_param(name, kind)

    def parameter_names(self) -> list[str]:
        """The names of all parameters, in order."""
        return [spec["name"] for spec in self.model.param_specs()]


def _check_mesh(mesh: Mesh) -> None:
    check_type("mesh", mesh, Mesh, "a polyreme.Mesh")
    for axis in mesh.order:
        if axis not in ("dp", "pp", "tp") and mesh.size(axis) > 1:
            raise NotAvailable(
                f"mesh axis {axis}={mesh.size(axis)}: the Trainer of this version trains along dp, tp and pp only; use"
                f" pr.Mesh(world, dp={mesh.world.size})"
            )


def _pipeline(
    mesh: Mesh, schedule: Any, global_batch: int, micro_batch: int, lanes_dp: int | None
) -> Schedule | None:
    """The schedule of a training step on this mesh; None for one stage without one."""
    if schedule is not None:
        kinds = (ScheduleKind, FixedSchedule)
        check_type("schedule", schedule, kinds, "one of pr.schedule, such as pr.schedule.zb_h1(), or None")
    stages = mesh.size("pp")
    if schedule is None and stages == 1:
        return None
    lanes = lanes_dp or mesh.size("dp")
    if global_batch % lanes or lanes % mesh.size("dp"):
        raise InvalidArgument(
            f"global_batch={global_batch} with lanes.dp={lanes} and dp={mesh.size('dp')}: every lane needs the same"
            " number of samples, and every rank the same number of lanes; choose a global_batch that lanes.dp divides,"
            " and lanes.dp a multiple of dp"
        )
    micro_batches = lanes // mesh.size("dp") * -(-(global_batch // lanes) // micro_batch)
    return (schedule or one_f_one_b()).build(stages, micro_batches)


def _split(split: Sequence[int] | None, lists: Schedule | None) -> list[int]:
    if split is None:
        return []
    if lists is None:
        raise InvalidArgument(
            "split: there is no pipeline to split the model for; use pp > 1, or give a schedule"
        )
    return [check_int("split: blocks of a chunk", blocks, 0) for blocks in split]
