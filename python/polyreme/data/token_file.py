"""The token file: its format, a writer for any tokenizer, a reader of the header.

A token file is little-endian: a header of 64 bytes, then `num_tokens` unsigned integers.

    offset  type     field
    0       8 bytes  magic, `POLYTOK1`
    8       uint32   version, 1
    12      uint32   dtype code and bytes per token: 2 = uint16, 4 = uint32
    16      uint64   num_tokens
    24      uint64   vocab_size; every token is below it
    32      uint32   crc32 (zlib) of the tokens' bytes
    36      zeros

A file appears under its name only when it is whole and on disk.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

from ..errors import InvalidArgument

if TYPE_CHECKING:
    import numpy as np

MAGIC = b"POLYTOK1"
VERSION = 1
HEADER_BYTES = 64

_HEADER = struct.Struct("<8sIIQQI")
_DTYPES = {2: "<u2", 4: "<u4"}
_CHUNK_BYTES = 1 << 20
_CHUNK_TOKENS = 1 << 20
_DISK_IS_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class TokenFileError(InvalidArgument):
    """Input that cannot become a token file, or a file that is none; says what to do."""


@dataclass(frozen=True, kw_only=True)
class TokenFileInfo:
    """The header of a token file.

    dtype: `uint16` or `uint32`. crc32: of the tokens' bytes. size_bytes: of the whole file.
    """

    path: str
    num_tokens: int
    vocab_size: int
    dtype: str
    crc32: int
    size_bytes: int


def write_tokens(path: str | os.PathLike[str], tokens: Iterable[Any], vocab_size: int) -> TokenFileInfo:
    """Writes a token file of the integers in `tokens`, one array or buffer after the other.

    tokens: NumPy arrays of any integer type and shape, or objects with the buffer protocol
        (`bytes` counts as 8-bit tokens). They may come from a generator: memory stays bounded.
    vocab_size: number of different tokens; up to 65536 are stored in 16 bits, more in 32.

    Raises TokenFileError if a token is not in [0, vocab_size) or there is none, or if `path` is a file
    of another kind; OSError if the disk does not take the file. Then `path` is as it was before.

    Example: write_tokens("corpus.bin", (tokenizer(text) for text in texts), vocab_size=50257)
    """
    import numpy as np

    if not 1 <= vocab_size <= 1 << 32:
        raise TokenFileError(f"vocab_size is {vocab_size}; give 1 to 2^32")
    item_bytes = 2 if vocab_size <= 1 << 16 else 4
    target = os.fspath(path)
    num_tokens, crc = 0, 0
    with _new_file(target) as file:
        file.write(bytes(HEADER_BYTES))
        for part in tokens:
            flat = _as_flat_integers(part)
            for start in range(0, flat.size, _CHUNK_TOKENS):
                chunk = flat[start : start + _CHUNK_TOKENS]
                low, high = int(chunk.min()), int(chunk.max())
                if low < 0 or high >= vocab_size:
                    bad = low if low < 0 else high
                    raise TokenFileError(
                        f"token {bad} is not in [0, {vocab_size}) (in the {chunk.size} tokens from"
                        f" number {num_tokens}); check the tokenizer's vocabulary size"
                    )
                payload = np.ascontiguousarray(chunk, dtype=_DTYPES[item_bytes]).data.cast("B")
                file.write(payload)
                crc = zlib.crc32(payload, crc)
                num_tokens += chunk.size
        if num_tokens == 0:
            raise TokenFileError(f"no tokens to write to '{target}'")
        file.seek(0)
        file.write(_HEADER.pack(MAGIC, VERSION, item_bytes, num_tokens, vocab_size, crc))
    return TokenFileInfo(
        path=target,
        num_tokens=num_tokens,
        vocab_size=vocab_size,
        dtype=f"uint{8 * item_bytes}",
        crc32=crc,
        size_bytes=HEADER_BYTES + num_tokens * item_bytes,
    )


def read_info(path: str | os.PathLike[str], *, check_payload: bool = False) -> TokenFileInfo:
    """The header of a token file, checked against its size; with `check_payload` also the crc32.

    Raises TokenFileError for anything that is not a whole token file of this version.
    """
    name = os.fspath(path)
    # Non-blocking, since to open a pipe would wait for its writer.
    with open(os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise TokenFileError(f"'{name}' is not a regular file; give a token file")
        header = file.read(HEADER_BYTES)
        size = os.fstat(file.fileno()).st_size
        if len(header) < HEADER_BYTES or header[:8] != MAGIC:
            raise TokenFileError(
                f"'{name}' is not a token file (it does not start with {MAGIC.decode()});"
                " make one with: polyreme data prepare PATH... --out FILE"
            )
        _, version, item_bytes, num_tokens, vocab_size, crc = _HEADER.unpack_from(header)
        if version != VERSION or item_bytes not in _DTYPES:
            raise TokenFileError(
                f"'{name}' has version {version} and dtype code {item_bytes}; this release reads"
                f" version {VERSION} with code 2 or 4: prepare the file again"
            )
        expected = HEADER_BYTES + num_tokens * item_bytes
        if size != expected:
            raise TokenFileError(
                f"'{name}' has {size} bytes, but its header tells of {expected}; it was cut or"
                " changed: prepare it again"
            )
        if check_payload:
            _check_crc(name, file, crc)
    return TokenFileInfo(
        path=name,
        num_tokens=num_tokens,
        vocab_size=vocab_size,
        dtype=f"uint{8 * item_bytes}",
        crc32=crc,
        size_bytes=size,
    )


def check_replaceable(path: str | os.PathLike[str]) -> None:
    """Refuses a path at which there is anything but a token file or an empty file: it may be the only copy.

    Raises TokenFileError; OSError for a folder, or what cannot be read.
    """
    if not os.path.lexists(path):
        return
    if os.path.isdir(path):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    with contextlib.suppress(FileNotFoundError):  # a link to nothing
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            # A device must not be replaced by a file either.
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode) and file.read(len(MAGIC)) in (b"", MAGIC):
                return
        raise TokenFileError(
            f"'{os.fspath(path)}' is there and not a token file; it is left as it is: give another path, or remove it"
        )


def _as_flat_integers(part: Any) -> np.ndarray[Any, Any]:
    import numpy as np

    if isinstance(part, (bytes, bytearray)):
        return np.frombuffer(part, dtype=np.uint8)
    array = np.asarray(part)
    if array.size and array.dtype.kind not in "iu":
        raise TokenFileError(f"tokens have type {array.dtype}; give integers")
    return array.reshape(-1)


@contextlib.contextmanager
def _new_file(target: str) -> Iterator[BinaryIO]:
    """A file that takes the name `target` when the block ends well, and vanishes otherwise."""
    check_replaceable(target)
    folder, name = os.path.split(os.path.abspath(target))
    temporary = os.path.join(folder, f".{name}.{os.getpid()}-{os.urandom(4).hex()}.tmp")
    try:
        # Not tempfile: the file gets the permissions that any other new file of the user has.
        # Inside the try: a signal that raises right after it must not leave the file behind.
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with open(fd, "wb", buffering=_CHUNK_BYTES) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, OSError) and (error.filename == temporary or error.errno in _DISK_IS_FULL):
            # The user knows the target only.
            raise OSError(error.errno, error.strerror, target) from error
        raise
    folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder_fd)  # the new name itself
    finally:
        os.close(folder_fd)


def _check_crc(name: str, file: BinaryIO, expected: int) -> None:
    crc = 0
    while chunk := file.read(_CHUNK_BYTES):
        crc = zlib.crc32(chunk, crc)
    if crc != expected:
        raise TokenFileError(
            f"the tokens of '{name}' have crc32 {crc:08x}, but its header tells of {expected:08x};"
            " it is damaged: prepare it again"
        )
