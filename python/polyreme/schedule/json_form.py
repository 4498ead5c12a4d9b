"""The JSON form of a schedule: written and strictly read.

    {"format": "polyreme.schedule", "version": 1, "micro_batches": 2, "forward_only": false,
     "chunks": [[0], [1]],
     "ranks": [[{"kind": "forward", "chunk": 0, "micro_batch": 0},
                {"kind": "send_activation", "chunk": 0, "micro_batch": 0, "peer": 1}, ...], ...]}

A transfer that runs at once with the one before it has "with_previous": true.
"""

from __future__ import annotations

import json
from typing import Any

from polyreme import _core
from polyreme.checks import check_int
from polyreme.errors import InvalidArgument

__all__ = ["MAX_BYTES", "parse", "write"]

MAX_BYTES = 1 << 26
_MAX_RANKS = 1024
_FORMAT = "polyreme.schedule"
_VERSION = 1
_FIELDS = {"format", "version", "micro_batches", "forward_only", "chunks", "ranks"}
_INTEGERS = ("chunk", "micro_batch", "peer")
_WHAT = "schedule JSON"


def write(schedule: _core.Schedule) -> str:
    """One line for each rank."""
    head = {
        "format": _FORMAT,
        "version": _VERSION,
        "micro_batches": schedule.micro_batches,
        "forward_only": schedule.forward_only,
        "chunks": schedule.chunks,
    }
    lines = ",\n  ".join(json.dumps([_to_object(action) for action in rank]) for rank in schedule.actions)
    return f'{json.dumps(head)[:-1]}, "ranks": [\n  {lines}\n]}}\n'


def _to_object(action: tuple[str, int, int, int, bool]) -> dict[str, object]:
    kind, *numbers, with_previous = action
    fields: dict[str, object] = {"kind": kind}
    fields.update((name, n) for name, n in zip(_INTEGERS, numbers, strict=True) if n >= 0)
    if with_previous:
        fields["with_previous"] = True
    return fields


def parse(text: str) -> _core.Schedule:
    """The schedule. Raises InvalidArgument with line and column, or the path of what is wrong."""
    if len(text) > MAX_BYTES:
        raise InvalidArgument(f"{_WHAT}: {len(text)} characters; expected at most {MAX_BYTES}")
    try:
        data = json.loads(text, object_pairs_hook=_unique, parse_float=_no_number, parse_constant=_no_number)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise InvalidArgument(f"{_WHAT}, {where}: {error.msg}") from None
    except RecursionError:
        raise InvalidArgument(f"{_WHAT}: nested too deeply; expected lists of objects") from None
    except InvalidArgument:
        raise
    except ValueError as error:  # an integer of thousands of digits
        raise InvalidArgument(f"{_WHAT}: {error}") from None
    _check_fields("the top", data, _FIELDS, _FIELDS)
    if data["format"] != _FORMAT:
        raise InvalidArgument(f"{_WHAT}, format: {_short(data['format'])}; expected '{_FORMAT}'")
    check_int(f"{_WHAT}: version", data["version"], _VERSION, _VERSION)
    if not isinstance(data["forward_only"], bool):
        raise InvalidArgument(
            f"{_WHAT}, forward_only: {_short(data['forward_only'])}; expected true or false"
        )
    return _core.Schedule(
        _number("micro_batches", data["micro_batches"]),
        data["forward_only"],
        [
            [_number(f"chunks[{r}][{i}]", chunk) for i, chunk in enumerate(_list(f"chunks[{r}]", held))]
            for r, held in enumerate(_list("chunks", data["chunks"], _MAX_RANKS))
        ],
        [
            [_action(f"ranks[{r}][{i}]", action) for i, action in enumerate(_list(f"ranks[{r}]", rank))]
            for r, rank in enumerate(_list("ranks", data["ranks"], _MAX_RANKS))
        ],
    )


def _action(path: str, fields: Any) -> tuple[str, int, int, int, bool]:
    _check_fields(path, fields, {"kind"}, {"kind", "with_previous", *_INTEGERS})
    kind = fields["kind"]
    if not isinstance(kind, str):
        raise InvalidArgument(f"{_WHAT}, {path}.kind: {_short(kind)}; expected a string")
    chunk, micro_batch, peer = (
        _number(f"{path}.{name}", fields[name]) if name in fields else -1 for name in _INTEGERS
    )
    with_previous = fields.get("with_previous", False)
    if not isinstance(with_previous, bool):
        raise InvalidArgument(
            f"{_WHAT}, {path}.with_previous: {_short(with_previous)}; expected true or false"
        )
    return kind, chunk, micro_batch, peer, with_previous


def _check_fields(path: str, fields: Any, needed: set[str], known: set[str]) -> None:
    if not isinstance(fields, dict):
        raise InvalidArgument(f"{_WHAT}, {path}: {_short(fields)}; expected an object")
    for name in sorted(needed - fields.keys()):
        raise InvalidArgument(f"{_WHAT}, {path}: '{name}' is missing")
    for name in sorted(fields.keys() - known):
        raise InvalidArgument(
            f"{_WHAT}, {path}: unknown field {_short(name)}; expected {', '.join(sorted(known))}"
        )


def _number(path: str, value: Any) -> int:
    return check_int(f"{_WHAT}: {path}", value, 0, (1 << 31) - 1)


def _list(path: str, value: Any, longest: int | None = None) -> list[Any]:
    if not isinstance(value, list) or (longest is not None and len(value) > longest):
        most = "" if longest is None else f" of at most {longest}"
        raise InvalidArgument(f"{_WHAT}, {path}: {_short(value)}; expected a list{most}")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidArgument(f"{_WHAT}: the field {_short(twice)} stands twice in one object")
    return fields


def _no_number(text: str) -> Any:
    raise InvalidArgument(f"{_WHAT}: the number {text[:40]}; expected integers alone")


def _short(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
