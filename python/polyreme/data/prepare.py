"""Token files of text files, by a byte tokenizer.

It maps byte b to token b. After each document it puts the separator, token 256, so the
vocabulary has 257 tokens. The format of the file is described in `token_file`.
"""

from __future__ import annotations

import codecs
import fnmatch
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .token_file import TokenFileError, TokenFileInfo, check_replaceable, write_tokens

if TYPE_CHECKING:
    import numpy as np

__all__ = [
    "BYTE_VOCAB_SIZE",
    "SEPARATOR_TOKEN",
    "Corpus",
    "Prepared",
    "TokenFileError",
    "TokenFileInfo",
    "find_documents",
    "prepare_bytes",
    "val_path",
    "write_tokens",
]

SEPARATOR_TOKEN = 256
BYTE_VOCAB_SIZE = 257

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The documents found below the given paths, in the order of the token file.

    documents: (path, size in bytes). skipped_*: files left out.
    """

    documents: tuple[tuple[str, int], ...]
    skipped_binary: int
    skipped_empty: int
    skipped_unreadable: int

    @property
    def num_bytes(self) -> int:
        """Bytes of all documents together."""
        return sum(size for _, size in self.documents)

    @property
    def num_skipped(self) -> int:
        """Files left out, for whatever reason."""
        return self.skipped_binary + self.skipped_empty + self.skipped_unreadable


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What `prepare_bytes` has written. val is None without a split."""

    train: TokenFileInfo
    val: TokenFileInfo | None
    corpus: Corpus
    num_val_documents: int
    seconds: float


Progress = Callable[[int, int], None]  # bytes done, bytes in all


def find_documents(
    paths: Sequence[str], *, include: Sequence[str] = (), exclude_files: Sequence[str] = ()
) -> Corpus:
    """The text files at and below `paths`, in the order of `paths`, folders in sorted order.

    A file named by itself is always taken. Below a folder names that start with a dot are left
    out, symbolic links are not followed, and with `include` a file's name or its path inside
    the folder must match one of the patterns. A document is a non-empty file of UTF-8 without
    NUL bytes. No file comes twice. exclude_files: the files about to be written.

    Raises TokenFileError if a path is missing or no document is found.
    """
    missing = [path for path in paths if not os.path.exists(path)]
    if missing:
        raise TokenFileError(f"no such file or folder: {', '.join(missing)}; check the paths")
    seen = {os.path.realpath(name) for name in exclude_files}
    documents: list[tuple[str, int]] = []
    skipped = {"binary": 0, "empty": 0, "unreadable": 0}
    for path in paths:
        for name in _walk(path, include) if os.path.isdir(path) else [path]:
            real = os.path.realpath(name)
            if real in seen:
                continue
            seen.add(real)
            size, why_not = _inspect(name)
            if why_not:
                skipped[why_not] += 1
            else:
                documents.append((name, size))
    if not documents:
        patterns = f" that match {', '.join(include)}" if include else ""
        raise TokenFileError(
            f"no text files{patterns} in {', '.join(paths)} (left out: {skipped['binary']} binary,"
            f" {skipped['empty']} empty, {skipped['unreadable']} unreadable); name other paths"
            " or patterns"
        )
    return Corpus(
        documents=tuple(documents),
        skipped_binary=skipped["binary"],
        skipped_empty=skipped["empty"],
        skipped_unreadable=skipped["unreadable"],
    )


def prepare_bytes(
    paths: Sequence[str],
    out: str,
    *,
    include: Sequence[str] = (),
    val_fraction: float = 0.0,
    progress: Progress | None = None,
) -> Prepared:
    """Makes a token file of text files with the byte tokenizer; same input, same bytes.

    With `val_fraction` in (0, 0.5] a second file, `corpus.val.bin` beside `corpus.bin`, gets
    about that share of the bytes: whole documents spread evenly over the corpus, or the end of
    the document if there is only one.

    Raises TokenFileError as `find_documents` and `write_tokens` do.
    """
    start = time.monotonic()
    if not 0.0 <= val_fraction <= 0.5:
        raise TokenFileError(f"the validation fraction is {val_fraction}; give 0 to 0.5")
    val_out = val_path(out)
    for path in (out, val_out) if val_fraction else (out,):
        check_replaceable(path)
    corpus = find_documents(paths, include=include, exclude_files=(out, val_out))
    train_pieces, val_pieces = _split(corpus.documents, val_fraction)
    total = corpus.num_bytes
    done = 0

    def count(size: int) -> None:
        nonlocal done
        done += size
        if progress is not None:
            progress(done, total)

    train = write_tokens(out, _byte_tokens(train_pieces, count), BYTE_VOCAB_SIZE)
    val = None
    if val_pieces:
        val = write_tokens(val_out, _byte_tokens(val_pieces, count), BYTE_VOCAB_SIZE)
    return Prepared(
        train=train,
        val=val,
        corpus=corpus,
        num_val_documents=len(val_pieces),
        seconds=time.monotonic() - start,
    )


def val_path(out: str) -> str:
    """`corpus.val.bin` for `corpus.bin`."""
    stem, extension = os.path.splitext(out)
    return f"{stem}.val{extension}"


def _walk(folder: str, include: Sequence[str]) -> Iterator[str]:
    """Regular files below `folder`, sorted by the bytes of their names at each level."""

    def below(path: str, inner: str) -> Iterator[str]:
        with os.scandir(path) as entries:
            ordered = sorted(entries, key=lambda entry: os.fsencode(entry.name))
        for entry in ordered:
            relative = f"{inner}{entry.name}"
            if entry.name.startswith("."):
                continue
            if entry.is_dir(follow_symlinks=False):
                yield from below(entry.path, f"{relative}/")
            elif entry.is_file(follow_symlinks=False) and (
                not include
                or any(
                    fnmatch.fnmatchcase(entry.name, pattern) or fnmatch.fnmatchcase(relative, pattern)
                    for pattern in include
                )
            ):
                yield entry.path

    return below(folder, "")


def _inspect(path: str) -> tuple[int, str]:
    """(size, why it is no document); reads the file to its end, or to the first odd byte."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    size = 0
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return 0, "unreadable"
        with open(path, "rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                size += len(chunk)
                if b"\0" in chunk:
                    return size, "binary"
                decoder.decode(chunk)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return size, "binary"
    except OSError:
        return size, "unreadable"
    return size, "" if size else "empty"


def _split(
    documents: Sequence[tuple[str, int]], val_fraction: float
) -> tuple[list[tuple[str, int, int]], list[tuple[str, int, int]]]:
    """Pieces for training and for validation.

    Each document adds its share to what is owed to validation; one is taken when at least half
    of it is owed. The first is the first to be owed, never all of them.
    """
    pieces = [(path, 0, size) for path, size in documents]
    if val_fraction == 0.0:
        return pieces, []
    if len(pieces) == 1:
        path, _, size = pieces[0]
        cut = size - max(1, round(size * val_fraction))
        if cut < 1:
            raise TokenFileError(f"'{path}' has {size} bytes: too small to split")
        return [(path, 0, cut)], [(path, cut, size)]
    train, val = [], []
    owed = 0.0
    for piece in pieces:
        owed += val_fraction * piece[2]
        if 2 * owed >= piece[2]:
            owed -= piece[2]
            val.append(piece)
        else:
            train.append(piece)
    if not val:  # few documents: the smallest is the nearest to what is owed
        smallest = min(range(len(train)), key=lambda index: train[index][2])
        val.append(train.pop(smallest))
    return train, val


def _byte_tokens(
    pieces: Sequence[tuple[str, int, int]], count: Callable[[int], None]
) -> Iterator[np.ndarray[Any, Any]]:
    """The tokens of each piece in chunks, and the separator after it."""
    import numpy as np

    separator = np.array([SEPARATOR_TOKEN], dtype=np.uint16)
    for path, first, end in pieces:
        with open(path, "rb") as file:
            file.seek(first)
            left = end - first
            while left > 0:
                chunk = file.read(min(left, _CHUNK_BYTES))
                if not chunk:
                    raise TokenFileError(f"'{path}' has become shorter meanwhile; try again")
                left -= len(chunk)
                count(len(chunk))
                yield np.frombuffer(chunk, dtype=np.uint8)
        yield separator
