"""How data parallelism divides memory and overlaps its communication."""

from __future__ import annotations

from dataclasses import dataclass

from .checks import check_int, check_type
from .errors import InvalidArgument

__all__ = ["Zero"]

# The defaults, measured: seconds of a step of two processes over shared memory, a core of a Xeon each, 6 x 768 with
# a vocabulary of 50304 and so few tokens that half of the step is exchange and update (a fifteenth, with 1024 a
# sample): medians of six steps, which repeat within 3 %.
#
#   polyreme bench scaling --seq-len 64 --sizes 2 --steps 3 --repeats 2 --zero 0,1,2,3 --bucket-mib 2,8,25,100
#   stage    2 MiB   8 MiB  25 MiB  100 MiB
#       0    0.674   0.675   0.668    0.642
#       1    0.623   0.609   0.617    0.611
#       2    0.638   0.624   0.620    0.642
#       3    0.733   0.725   0.691    0.687
#
# `--overlap off` takes 1.01 to 1.03 of the time (stage 1: 0.99): on a CPU the exchange costs the rank's own core what
# it costs, and only waits are hidden. `--zero 3 --prefetch 0,1,2` are equal within 0.4 % for the same reason; over a
# network, or with a GPU's copy engines, one layer ahead can hide a gather (not measured).


@dataclass(frozen=True, kw_only=True)
class Zero:
    """ZeRO (Rajbhandari et al. 2020) over the ranks of dp. `Trainer(zero=2)` is `Trainer(zero=pr.Zero(stage=2))`.

    No field changes a bit of the results.

    stage: what is divided. 0: nothing. 1: optimizer state. 2: gradients too. 3: weights too; a layer's are
        gathered ahead of its use and released after it.
    shard_size: ranks that divide it among them: a power of two that divides dp, or None for all of dp. Below
        dp each such group of neighbouring ranks holds everything once (hybrid sharding): more memory, and
        weights are gathered inside the group only.
    bucket_bytes: gradients are reduced in buckets of about this many bytes.
    overlap: buckets are reduced, and weights gathered, while the backward pass goes on.
    prefetch: stage 3: layers whose weights are gathered ahead of use.
    persist_below: stage 3: parameters of fewer elements stay whole on every rank.
    gather: stage 3: "use": a layer's weights are gathered for each micro-batch, forwards and again backwards; least
        memory. "step": once a step, and they stay until its last use of any; the traffic of one gather instead of
        two for each micro-batch, and a rank's weights whole while the step runs. Default: "step" with a pipeline,
        whose stages hold a part of the model and take many micro-batches, "use" without.
    offload: the optimizer's moments stay in host memory, and visit the device for the update a bucket at a time:
        8 / dp bytes per parameter less with AdamW. For AdamW, SGD and Lion. (On the CPU, where the device's memory
        is the host's, it moves bytes from one count to the other and costs copies: to try a run before a GPU does.)

    Example:
        >>> import polyreme as pr
        >>> pr.Zero(stage=3, shard_size=8, prefetch=2).stage
        3

    Raises:
        InvalidArgument: a field out of range, naming it.
    """

    stage: int = 0
    shard_size: int | None = None
    bucket_bytes: int = 25 << 20
    overlap: bool = True
    prefetch: int = 1
    persist_below: int = 0
    gather: str | None = None
    offload: bool = False

    def __post_init__(self) -> None:
        def set_int(name: str, low: int, high: int | None = None) -> None:
            object.__setattr__(self, name, check_int(f"Zero: {name}", getattr(self, name), low, high))

        set_int("stage", 0, 3)
        if self.shard_size is not None:
            size = check_int("Zero: shard_size", self.shard_size, 1, otherwise="None for all of dp")
            object.__setattr__(self, "shard_size", size)
        set_int("bucket_bytes", 1)
        check_type("Zero: overlap", self.overlap, bool, "True or False")
        set_int("prefetch", 0)
        set_int("persist_below", 0)
        check_type("Zero: offload", self.offload, bool, "True or False")
        if self.gather not in (None, "use", "step"):
            raise InvalidArgument(
                f"Zero: gather={self.gather!r}; expected 'use', 'step', or None for the default"
            )

    def _gather_for_step(self, in_a_pipeline: bool) -> bool:
        return self.gather == "step" or (self.gather is None and in_a_pipeline)

    @classmethod
    def of(cls, value: int | Zero) -> Zero:
        """`value`, or the stage of that number."""
        if isinstance(value, Zero):
            return value
        return cls(stage=check_int("zero", value, 0, 3, otherwise="a polyreme.Zero"))
