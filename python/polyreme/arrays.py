"""Arrays of scripts: NumPy's, or whatever speaks DLPack on the CPU, such as PyTorch's tensors."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from .errors import InvalidArgument

__all__: list[str] = []

FLOAT_DTYPES = ("float32", "bfloat16", "float16")


def plain(array: Any) -> Any:
    """`array` without what a framework records of it: PyTorch exports nothing that requires gradients."""
    detach = getattr(array, "detach", None)
    return detach() if callable(detach) else array


def dtype_name(array: Any) -> str:
    """As NumPy spells it: "float32", also for PyTorch's torch.float32."""
    return str(getattr(array, "dtype", type(array).__name__)).rpartition(".")[2]


def check_memory(what: str, array: Any, *, written: bool = False) -> None:
    """Refuses what is no array, and with `written` what cannot be: NumPy's scalars, views that are read-only or
    have several elements in one place.
    """
    numpy_kinds = (np.ndarray,) if written else (np.ndarray, np.generic)
    is_numpy = isinstance(array, numpy_kinds)
    if not is_numpy and not hasattr(array, "__dlpack__"):
        raise InvalidArgument(
            f"{what} is a {type(array).__name__}; expected a NumPy array or an object that speaks DLPack"
        )
    layout = str(getattr(array, "layout", "")).rpartition(".")[2]
    if layout not in ("", "strided") or getattr(array, "is_meta", False):
        raise InvalidArgument(f"{what} is {layout} or has no memory; expected a dense tensor")
    check_not_freed(what, array)
    if not written:
        return
    if is_numpy and not array.flags.writeable:
        raise InvalidArgument(f"{what} is read-only; expected an array that can be overwritten")
    strides = array.strides if is_numpy else getattr(array, "stride", tuple)()
    shape = tuple(array.shape)
    if 0 not in shape and any(s == 0 and n > 1 for s, n in zip(strides, shape, strict=False)):
        raise InvalidArgument(
            f"{what} is a broadcast view, with several elements in one place; expected an array of its own, such as"
            " a copy"
        )


def check_not_freed(what: str, array: Any) -> None:
    """Refuses a tensor of PyTorch whose storage was resized to nothing, as FSDP does between uses."""
    if hasattr(array, "untyped_storage") and array.numel() and array.data_ptr() == 0:
        raise InvalidArgument(f"{what} has no memory any more; expected a tensor whose storage is there")


def check_distinct(what: str, arrays: Mapping[str, Any]) -> None:
    """Refuses arrays (by what to call them) of which two share memory: each would be updated on its own.

    Of views that have gaps only those with one start are known to share: columns of one matrix do not.
    """
    spans = []
    for name, array in arrays.items():
        if isinstance(array, np.ndarray):
            start, dense, size = array.__array_interface__["data"][0], array.flags.c_contiguous, array.nbytes
        elif hasattr(array, "data_ptr"):
            start, dense = array.data_ptr(), array.is_contiguous()
            size = array.numel() * array.element_size()
        else:
            continue
        if size:
            spans.append((start, start + size, dense, name))
    spans.sort(key=lambda span: span[0])
    for first, second in itertools.pairwise(spans):
        if first[0] == second[0] or (first[2] and second[0] < first[1]):
            raise InvalidArgument(
                f"{what}: {first[3]} and {second[3]} share memory; give what is tied or overlaps once"
            )


def check_float(what: str, array: Any, *, written: bool = False) -> None:
    """The same, and what is not of floating-point numbers."""
    check_memory(what, array, written=written)
    if dtype_name(array) not in FLOAT_DTYPES:
        raise InvalidArgument(f"{what} is of {dtype_name(array)}; expected {', '.join(FLOAT_DTYPES)}")


def readable(array: Any) -> Any:
    """`array` in C order, copied only where it must be."""
    array = plain(array)
    if isinstance(array, (np.ndarray, np.generic)) or not hasattr(array, "__dlpack__"):
        return np.ascontiguousarray(array)
    return array.contiguous() if hasattr(array, "contiguous") else array


class Target:
    """Memory in C order to be written for an array, which may have any strides: `memory`, then `store`."""

    def __init__(self, array: Any) -> None:
        self._array = plain(array)
        self.memory = readable(self._array)
        if isinstance(self._array, np.ndarray):
            self._in_place = self._array.flags.c_contiguous
        else:
            self._in_place = bool(getattr(self._array, "is_contiguous", lambda: True)())

    def bytes(self) -> Any:
        """`memory` as bytes; other than NumPy's and PyTorch's stay as they are."""
        if isinstance(self.memory, np.ndarray):
            return self.memory.reshape(-1).view(np.uint8)
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(self.memory, torch.Tensor):
            return self.memory.reshape(-1).view(torch.uint8)
        return self.memory

    def store(self) -> None:
        """Copies `memory` into the array where it is not the array's own."""
        if self._in_place:
            return
        if isinstance(self._array, np.ndarray):
            self._array[...] = self.memory.reshape(self._array.shape)
        else:
            self._array.copy_(self.memory)
