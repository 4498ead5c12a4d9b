"""Polyreme: distributed training with the same bits on any layout.

Names are imported when they are first used, so `import polyreme` is quick and touches neither
NumPy nor the C++ core.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import checkpoint, data, errors, lr, models, schedule, testing
    from ._core import __version__
    from .checkpoint import Checkpointer
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
    from .mesh import Mesh
    from .optim import SGD, AdamW
    from .progress import Progress
    from .trainer import StepStats, Trainer
    from .world import Lanes, World, init
    from .zero import Zero

__all__ = [
    "SGD",
    "AdamW",
    "CheckpointCorrupt",
    "CheckpointError",
    "Checkpointer",
    "CollectiveMismatch",
    "CommError",
    "DeviceError",
    "Error",
    "InvalidArgument",
    "Lanes",
    "Mesh",
    "NotAvailable",
    "NumericError",
    "OutOfMemory",
    "PeerLost",
    "Progress",
    "StepStats",
    "Timeout",
    "Trainer",
    "World",
    "Zero",
    "__version__",
    "checkpoint",
    "data",
    "errors",
    "generate",
    "init",
    "lr",
    "measure_peak_flops",
    "models",
    "schedule",
    "testing",
]

_MODULE_OF = {
    **dict.fromkeys(("SGD", "AdamW"), "optim"),
    **dict.fromkeys(("StepStats", "Trainer"), "trainer"),
    **dict.fromkeys(("Lanes", "World", "init"), "world"),
    "Checkpointer": "checkpoint",
    "Mesh": "mesh",
    "Progress": "progress",
    "Zero": "zero",
    "__version__": "_core",
    "generate": "generation",
    "measure_peak_flops": "gemm_rate",
}
_SUBMODULES = ("checkpoint", "data", "errors", "lr", "models", "schedule", "testing")


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
