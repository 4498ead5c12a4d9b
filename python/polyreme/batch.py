"""Tokens of a caller as the core takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .arrays import plain
from .errors import InvalidArgument

__all__ = ["as_array", "joined_batch", "token_array"]


def joined_batch(
    tokens: Sequence[Any], targets: Any, seq_len: int, rows: list[int]
) -> tuple[Any, Any, list[int]]:
    """Micro-batches as one array, each sample followed by tokens that do not count; and their lengths."""
    if not isinstance(targets, (list, tuple)) or len(targets) != len(tokens):
        raise InvalidArgument(
            f"tokens are a list of {len(tokens)} micro-batches; expected targets as a list of as many"
        )
    if len(tokens) != len(rows):
        raise InvalidArgument(
            f"tokens are a list of {len(tokens)} micro-batches; this rank expects {len(rows)}, of {rows} samples"
            " (global_batch by lanes, ranks and micro_batch)"
        )
    joined: list[NDArray[np.int32]] = []
    lengths: list[int] = []
    for what, values, filler in (("tokens", tokens, 0), ("targets", targets, -100)):
        arrays = [token_array(each, f"{what} of micro-batch {i}") for i, each in enumerate(values)]
        for i, array in enumerate(arrays):
            if joined and array.shape[1] != lengths[i]:
                raise InvalidArgument(
                    f"targets of micro-batch {i} have {array.shape[1]} tokens a sample; its tokens {lengths[i]}"
                )
            if len(array) != rows[i]:
                raise InvalidArgument(
                    f"micro-batch {i} has {len(array)} samples; this rank expects micro-batches of {rows} samples"
                )
            if not 1 <= array.shape[1] <= seq_len:
                raise InvalidArgument(
                    f"micro-batch {i} has {array.shape[1]} tokens a sample; the model takes 1 to {seq_len}"
                )
        whole = np.full((sum(len(array) for array in arrays), seq_len), filler, np.int32)
        begin = 0
        for array in arrays:
            whole[begin : begin + len(array), : array.shape[1]] = array
            begin += len(array)
        joined.append(whole)
        lengths = [array.shape[1] for array in arrays]
    return joined[0], joined[1], lengths


def as_array(values: Any, what: str) -> NDArray[Any]:
    """Whatever NumPy takes for an array. Raises InvalidArgument, naming `what`, where it takes it for none."""
    try:
        return np.asarray(plain(values))
    except Exception as error:  # each framework has its own, such as of memory that is not on the CPU
        raise InvalidArgument(
            f"{what} cannot be read as an array ({type(error).__name__}: {error}); expected integers of shape"
            " [num_samples, seq_len]"
        ) from error


def token_array(values: ArrayLike, what: str) -> NDArray[np.int32]:
    """`values` as int32 [num_samples, seq_len]. Raises InvalidArgument, naming `what`, for anything else."""
    array = as_array(values, what)
    if array.ndim != 2 or array.dtype.kind not in "iu":
        raise InvalidArgument(
            f"{what} are {array.dtype}{list(array.shape)}; expected integers of shape [num_samples, seq_len]"
        )
    if array.size and (int(array.max()) > 2**31 - 1 or int(array.min()) < -(2**31)):
        raise InvalidArgument(f"{what} have values outside 32 bits: {array.min()} to {array.max()}")
    return np.ascontiguousarray(array, dtype=np.int32)
