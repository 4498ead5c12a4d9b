"""The manifest of a checkpoint: one JSON document, which ends with its own CRC-32C."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field
from typing import Any

from .. import _core
from ..errors import CheckpointCorrupt, InvalidArgument
from .directory import MANIFEST, step_name

__all__ = ["FileRecord", "Manifest", "TensorRecord", "read_manifest"]

FORMAT = "polyreme-1"
_MAX_BYTES = 256 << 20
_TAIL = re.compile(rb', "crc32c": "([0-9a-f]{8})"\}\n\Z')
# Our name of a dtype, and that of the safetensors format.
SHARD_DTYPES = {
    "float32": "F32",
    "float64": "F64",
    "bfloat16": "BF16",
    "float16": "F16",
    "int8": "I8",
    "uint8": "U8",
    "int32": "I32",
    "int64": "I64",
    "bool": "BOOL",
}
ITEM_BYTES = {
    "float32": 4,
    "float64": 8,
    "bfloat16": 2,
    "float16": 2,
    "int8": 1,
    "uint8": 1,
    "int32": 4,
    "int64": 8,
    "bool": 1,
}


@dataclass(frozen=True)
class TensorRecord:
    """A tensor as a whole: dtype ("float32") and shape, unpadded and uncut."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """The product of the extents."""
        count = 1
        for extent in self.shape:
            count *= extent
        return count

    @property
    def num_bytes(self) -> int:
        """Of its data."""
        return self.num_elements * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class FileRecord:
    """A shard: its size, the CRC-32C of its header (which has those of its data), the rank that wrote it."""

    name: str
    size_bytes: int
    header_crc32c: int
    rank: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint says of itself.

    state: scalars of the run, as the one who saved it gave them. extras: the user's own. layout: of the job
    that wrote it, for people: nothing depends on it.
    """

    step: int
    generation: str
    tensors: dict[str, TensorRecord]
    files: list[FileRecord]
    layout: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    extras: dict[str, Any] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Of all files but the manifest."""
        return sum(file.size_bytes for file in self.files)

    def encode(self) -> bytes:
        """The text of the file.

        Raises:
            InvalidArgument: extras that JSON cannot hold.
        """
        document = {
            "format": FORMAT,
            "generation": self.generation,
            "step": self.step,
            "tensors": {name: [t.dtype, list(t.shape)] for name, t in self.tensors.items()},
            "files": [[f.name, f.size_bytes, f.header_crc32c, f.rank] for f in self.files],
            "layout": self.layout,
            "state": self.state,
            "extras": self.extras,
        }
        body = encode_json("the manifest", document)[:-1]
        return body + f', "crc32c": "{_core.crc32c(body):08x}"}}\n'.encode()


def encode_json(what: str, document: Any) -> bytes:
    """`document` as JSON. Raises InvalidArgument for what JSON has not: NaN, sets, keys that are no texts."""
    try:
        # Non-finite numbers are refused: no other reader would take them.
        return json.dumps(document, allow_nan=False, ensure_ascii=True).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(
            f"{what} cannot be written as JSON: {error}; use texts, numbers, lists, dicts"
        ) from None


def read_manifest(directory: str | os.PathLike[str], step: int) -> Manifest:
    """The manifest of a checkpoint, checked.

    Raises:
        CheckpointCorrupt: damaged, of another step, or of a format that this version does not know.
    """
    path = os.path.join(os.fspath(directory), step_name(step))
    return decode_manifest(_core.read_flat_file(path, MANIFEST, _MAX_BYTES), step, f"'{path}/{MANIFEST}'")


def decode_manifest(text: bytes, step: int, where: str) -> Manifest:
    """The inverse of Manifest.encode; `where` is named in errors."""
    tail = _TAIL.search(text[-40:])
    if tail is None:
        raise CheckpointCorrupt(f"{where} does not end with its checksum: truncated, or not of this format")
    body = text[: len(text) - len(tail[0])]
    found = f"{_core.crc32c(body):08x}"
    if found != tail[1].decode():
        raise CheckpointCorrupt(f"{where} has the CRC-32C {found}; it says {tail[1].decode()}")
    try:
        manifest = _from_document(json.loads(body + b"}"))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointCorrupt(f"{where} is not a manifest of format {FORMAT!r}: {error}") from None
    if manifest.step != step:
        raise CheckpointCorrupt(f"{where} is of step {manifest.step}; the directory is of step {step}")
    return manifest


def _from_document(document: Any) -> Manifest:
    if document["format"] != FORMAT:
        raise ValueError(f"its format is {document['format']!r}")
    tensors = {}
    for name, (dtype, shape) in document["tensors"].items():
        if dtype not in ITEM_BYTES:
            raise ValueError(f"tensor {name!r} has the dtype {dtype!r}")
        tensors[name] = TensorRecord(dtype, tuple(_natural(extent) for extent in shape))
    files = []
    for name, size, checksum, rank in document["files"]:
        if not isinstance(name, str) or not name or "/" in name or "\0" in name or name.startswith("."):
            raise ValueError(f"{name!r} is no name of a file inside a checkpoint")
        files.append(FileRecord(name, _natural(size), _natural(checksum), _natural(rank)))
    for key in ("layout", "state", "extras"):
        if not isinstance(document[key], dict):
            raise TypeError(f"{key!r} is no object")
    if not isinstance(document["generation"], str):
        raise TypeError("'generation' is no text")
    return Manifest(
        step=_natural(document["step"]),
        generation=document["generation"],
        tensors=tensors,
        files=files,
        layout=document["layout"],
        state=document["state"],
        extras=document["extras"],
    )


def _natural(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"{value!r} is no count")
    return value
