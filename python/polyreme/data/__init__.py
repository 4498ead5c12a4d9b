"""Token files and the global order of samples.

`prepare` makes token files and needs neither NumPy nor the C++ core to be imported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .dataset import TokenDataset
    from .loaders import together

__all__ = ["TokenDataset", "together"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'polyreme.data' has no attribute {name!r}")
    module = importlib.import_module(".dataset" if name == "TokenDataset" else ".loaders", __name__)
    return getattr(module, name)
