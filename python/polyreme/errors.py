"""The exceptions of polyreme; the C++ core raises the same ones.

A message carries the operation, what was expected, what came, and what to do. For errors between
ranks it also names the group, the ranks, their hosts and process ids.
"""

from __future__ import annotations

__all__ = [
    "CheckpointCorrupt",
    "CheckpointError",
    "CollectiveMismatch",
    "CommError",
    "DeviceError",
    "Error",
    "InvalidArgument",
    "NotAvailable",
    "NumericError",
    "OutOfMemory",
    "PeerLost",
    "Timeout",
]


class Error(Exception):
    """The root of every exception that polyreme raises."""


class InvalidArgument(Error, ValueError):
    """An argument breaks the documented contract. Nothing was changed."""


class NotAvailable(Error):
    """Not in this build or on this machine; the message has the remedy."""


class DeviceError(Error):
    """A device operation failed or broke the ordering rules of streams."""


class OutOfMemory(Error, MemoryError):
    """Memory could not be had."""


class NumericError(Error, ArithmeticError):
    """A loss or gradient is not finite. Weights and optimizer are as before the step."""


class CommError(Error):
    """Something went wrong between ranks. The group cannot be used any more."""


class PeerLost(CommError):
    """A rank died or left; the message names it."""


class Timeout(CommError, TimeoutError):
    """A deadline passed; the message names who was waited for."""


class CollectiveMismatch(CommError):
    """Ranks called different collectives. No user memory was written."""


class CheckpointError(Error):
    """A checkpoint could not be written or read; the message names rank, path and reason."""


class CheckpointCorrupt(CheckpointError):
    """A checkpoint is not what was written: truncated, damaged, or made by somebody else."""
