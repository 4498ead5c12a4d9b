"""What a step takes, before any rank is started: memory and traffic, counted by a run that computes nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import _core
from .checks import check_int
from .errors import InvalidArgument
from .mesh import Mesh
from .models import Model
from .trainer import Trainer
from .world import World

__all__ = ["Forecast", "forecast"]


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What one rank needs.

    rank: in the mesh. coordinates: its place along each axis that was named.
    peak_bytes: the most device memory at once, over the making of the trainer and its steps: weights, optimizer,
        gradients, activations, gathered weights, buckets. `World.memory` gives the same of a real run; there what
        runs in the background may let go of its memory earlier, so that this is the most it can be.
    kept_bytes: of it, what stays between steps.
    sent_bytes: in one step, by group and operation, such as {"dp: reduce_scatter": 1048576, "pp: exchange": 65536}.
    """

    rank: int
    coordinates: dict[str, int]
    peak_bytes: int
    kept_bytes: int
    sent_bytes: dict[str, int]


def forecast(
    model: Model,
    axes: dict[str, Any],
    *,
    ranks: Iterable[int] | None = None,
    seq_len: int | None = None,
    **options: Any,
) -> list[Forecast]:
    """Memory and traffic of a step of `Trainer(model, Mesh(world, **axes), **options)`, for each rank.

    It makes that very trainer for one rank after the other, over a device without memory and groups without other
    ranks, and lets it train two steps on empty tokens. So it knows every option, needs no more memory than a list of
    the layers, and takes milliseconds; the machine may be smaller than the model by any factor.

    Args:
        axes: sizes of the mesh's axes, such as {"dp": 64, "pp": 8}.
        ranks: which ones; default: all. Those that differ along dp alone need the same.
        seq_len: tokens of a sample; default: the model's longest.

    Raises:
        InvalidArgument: whatever the Trainer would refuse.

    Example:
        >>> import polyreme as pr
        >>> layout = pr.forecast(pr.models.Llama(), {"dp": 4, "pp": 2}, optimizer=pr.AdamW(), global_batch=64, zero=1)
        >>> max(rank.peak_bytes for rank in layout) < 16e9
        True
    """
    size = 1
    unknown = [name for name in axes if name not in Mesh.AXES]
    if unknown:
        raise InvalidArgument(f"forecast: there is no axis {unknown[0]!r}; axes are {', '.join(Mesh.AXES)}")
    for name, length in axes.items():
        size *= check_int(f"forecast: {name}", length, 1)
    tokens = check_int("forecast: seq_len", model.seq_len if seq_len is None else seq_len, 1, model.seq_len)
    chosen = range(size) if ranks is None else ranks
    return [_of_rank(model, axes, rank, size, tokens, options) for rank in chosen]


def _of_rank(
    model: Model, axes: dict[str, Any], rank: int, size: int, seq_len: int, options: dict[str, Any]
) -> Forecast:
    if not 0 <= check_int("forecast: ranks", rank, 0) < size:
        raise InvalidArgument(f"forecast: rank {rank} of {size}; expected 0 to {size - 1}")
    core, traffic = _core.make_dry_world(rank=rank, size=size)
    world = World(core)
    mesh = Mesh(world, **axes)
    trainer = Trainer(model, mesh, **options)
    batch = np.zeros((trainer.global_batch // mesh.size("dp"), seq_len), dtype=np.int32)
    trainer._engine.train_batch(batch, batch, 0.0)  # `step` would look at the batches of other ranks, too
    before = traffic()
    trainer._engine.train_batch(batch, batch, 0.0)
    memory = world.memory()
    sent = {name: count - before.get(name, 0) for name, count in traffic().items()}
    return Forecast(
        rank=rank,
        coordinates={axis: mesh.coordinate(axis) for axis in axes},
        peak_bytes=memory["peak_bytes"],
        kept_bytes=memory["in_use_bytes"],
        sent_bytes={name: count for name, count in sent.items() if count},
    )
