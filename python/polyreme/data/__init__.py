"""Token files and the global order of samples.

`prepare` makes token files and needs neither NumPy nor the C++ core to be imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .dataset import TokenDataset

__all__ = ["TokenDataset"]


def __getattr__(name: str) -> Any:
    if name != "TokenDataset":
        raise AttributeError(f"module 'polyreme.data' has no attribute {name!r}")
    from .dataset import TokenDataset

    return TokenDataset
