"""Samples from token files."""

from __future__ import annotations

import os

import numpy as np
from numpy.typing import NDArray

from .. import _core
from ..checks import check_int, check_number
from ..errors import InvalidArgument

__all__ = ["TokenDataset"]


class TokenDataset:
    """Samples of `seq_len` tokens from a token file (`polyreme data prepare`).

    Sample i has the tokens [i * seq_len, (i + 1) * seq_len) as inputs and the ones after them as
    targets; a shorter rest is left out.

    Raises:
        InvalidArgument: the file is missing, empty, damaged, or too short for one sample.
    """

    def __init__(self, path: str | os.PathLike[str], *, seq_len: int) -> None:
        seq_len = check_int("TokenDataset: seq_len", seq_len, 1)
        self._set(_core.TokenDataset(os.fspath(path)), seq_len)

    def _set(self, core: _core.TokenDataset, seq_len: int) -> None:
        self._core = core
        self.seq_len = seq_len
        self.num_samples: int = core.num_samples(seq_len)
        if self.num_samples < 1:
            raise InvalidArgument(
                f"'{core.path}': {core.num_tokens} tokens are too few for one sample of seq_len={seq_len},"
                f" which takes {seq_len + 1}; use more text or a shorter seq_len"
            )

    @property
    def path(self) -> str:
        """The token file."""
        return self._core.path

    @property
    def num_tokens(self) -> int:
        """Tokens of this range of the file."""
        return self._core.num_tokens

    @property
    def vocab_size(self) -> int:
        """Tokens are below this."""
        return self._core.vocab_size

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """(inputs, targets) of sample `index`, int32 [seq_len] each."""
        if not -self.num_samples <= index < self.num_samples:
            raise IndexError(f"sample {index} of {self.num_samples}")
        return self._core.read_sample(index % self.num_samples, self.seq_len)

    def split(self, *, validation: float) -> tuple[TokenDataset, TokenDataset]:
        """(training, validation): the last `validation` share of the tokens is held out.

        Raises:
            InvalidArgument: a part would be shorter than one sample.
        """
        validation = check_number("split: validation", validation, high=1.0, above=True)
        cut = self.num_tokens - round(self.num_tokens * validation)
        return self._range(0, cut), self._range(cut, self.num_tokens)

    def _range(self, begin: int, end: int) -> TokenDataset:
        part = TokenDataset.__new__(TokenDataset)
        part._set(self._core.subset(begin, end), self.seq_len)
        return part

    def __repr__(self) -> str:
        return f"TokenDataset({self.path!r}, seq_len={self.seq_len}, num_samples={self.num_samples})"
