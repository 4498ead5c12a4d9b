"""Polyreme: distributed training with the same bits on any layout.

Names are imported when they are first used, so `import polyreme` is quick and touches neither
NumPy nor the C++ core.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import checkpoint, data, errors, layers, lr, models, schedule, testing
    from ._core import __version__
    from .checkpoint import Checkpointer
    from .dry_run import Forecast, forecast
    from .errors import (
        CheckpointCorrupt,
        CheckpointError,
        CollectiveMismatch,
        CommError,
        DeviceError,
        Error,
        InvalidArgument,
        NotAvailable,
        NumericError,
        OutOfMemory,
        PeerLost,
        Timeout,
    )
    from .gemm_rate import measure_peak_flops
    from .generation import generate
    from .loss_scaler import LossScaler
    from .mesh import Mesh
    from .norms import clip_grad_norm
    from .optim import LAMB, SGD, AdamW, Lion, Muon
    from .precision import LossScale, Precision
    from .progress import Progress
    from .sharded_optimizer import ShardedOptimizer, UpdateStats
    from .step_stats import StepStats
    from .trainer import Trainer
    from .world import Lanes, World, init
    from .zero import Zero

__all__ = [
    "LAMB",
    "SGD",
    "AdamW",
    "CheckpointCorrupt",
    "CheckpointError",
    "Checkpointer",
    "CollectiveMismatch",
    "CommError",
    "DeviceError",
    "Error",
    "Forecast",
    "InvalidArgument",
    "Lanes",
    "Lion",
    "LossScale",
    "LossScaler",
    "Mesh",
    "Muon",
    "NotAvailable",
    "NumericError",
    "OutOfMemory",
    "PeerLost",
    "Precision",
    "Progress",
    "ShardedOptimizer",
    "StepStats",
    "Timeout",
    "Trainer",
    "UpdateStats",
    "World",
    "Zero",
    "__version__",
    "checkpoint",
    "clip_grad_norm",
    "data",
    "errors",
    "forecast",
    "generate",
    "init",
    "layers",
    "lr",
    "measure_peak_flops",
    "models",
    "schedule",
    "testing",
]

_MODULE_OF = {
    **dict.fromkeys(("LAMB", "SGD", "AdamW", "Lion", "Muon"), "optim"),
    **dict.fromkeys(("ShardedOptimizer", "UpdateStats"), "sharded_optimizer"),
    **dict.fromkeys(("Forecast", "forecast"), "dry_run"),
    **dict.fromkeys(("LossScale", "Precision"), "precision"),
    **dict.fromkeys(("Lanes", "World", "init"), "world"),
    "LossScaler": "loss_scaler",
    "Checkpointer": "checkpoint",
    "Mesh": "mesh",
    "Progress": "progress",
    "StepStats": "step_stats",
    "Trainer": "trainer",
    "Zero": "zero",
    "__version__": "_core",
    "clip_grad_norm": "norms",
    "generate": "generation",
    "measure_peak_flops": "gemm_rate",
}
_SUBMODULES = ("checkpoint", "data", "errors", "layers", "lr", "models", "schedule", "testing")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'polyreme' has no attribute {name!r}")
    if name in _SUBMODULES:
        return importlib.import_module(f".{name}", __name__)
    module = importlib.import_module(f".{_MODULE_OF.get(name, 'errors')}", __name__)
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
