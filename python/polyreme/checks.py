"""Checks of arguments, with one wording: the name with its value, the type where it is wrong, the range."""

from __future__ import annotations

import fnmatch
import math
import numbers
import operator
from collections.abc import Iterable, Sequence
from typing import Any

from .errors import InvalidArgument

__all__ = [
    "MAX_SEED",
    "MAX_THREADS",
    "MAX_TIMEOUT_S",
    "check_int",
    "check_number",
    "check_timeout",
    "check_type",
    "matching",
]

MAX_SEED = (1 << 64) - 1
MAX_THREADS = 1024
_MAX_INT = (1 << 63) - 1  # what the C++ core takes
MAX_TIMEOUT_S = 1e9


def check_int(what: str, value: Any, low: int, high: int | None = None, *, otherwise: str = "") -> int:
    """`value` as an int in [low, high]; anything with __index__ but a bool counts.

    what: as in "GPT: layers". otherwise: what else is accepted, as in "None for all samples".
    """
    try:
        number = None if _is_bool(value) else operator.index(value)
    except TypeError:
        number = None
    limit = _MAX_INT if high is None else high
    if number is not None and low <= number <= limit:
        return number
    if high is None and (number is None or number < low):
        expected = f"an integer, at least {low}"
    else:
        expected = f"an integer from {low} to {_text(limit)}"
    raise _refusal(what, value, expected, otherwise, wrong_type=number is None)


def check_number(
    what: str,
    value: Any,
    low: float = 0.0,
    high: float = math.inf,
    *,
    above: bool = False,
    otherwise: str = "",
) -> float:
    """`value` as a float: low <= value < high, or low < value < high with `above`. Never NaN."""
    wrong_type = _is_bool(value) or not isinstance(value, numbers.Real)
    if not wrong_type:
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if number < high and (low < number if above else low <= number):
            return number
    if high == math.inf:
        expected = f"a finite number, more than {low:g}" if above else f"a finite number, {low:g} or more"
    else:
        name = what.rpartition(" ")[2]
        expected = f"a number, {low:g} {'<' if above else '<='} {name} < {high:g}"
    raise _refusal(what, value, expected, otherwise, wrong_type=wrong_type)


def check_timeout(what: str, value: Any) -> float:
    """Seconds of a deadline."""
    return check_number(what, value, high=MAX_TIMEOUT_S, above=True)


def check_type(what: str, value: Any, kind: type | tuple[type, ...], expected: str) -> None:
    """Refuses what is no `kind`, which `expected` names for people."""
    if not isinstance(value, kind):
        raise _refusal(what, value, expected, "", wrong_type=True)


def matching(what: str, patterns: Sequence[str], names: Sequence[str]) -> frozenset[str]:
    """The names of parameters that a pattern matches, as in fnmatch. A pattern that matches none is refused."""
    if isinstance(patterns, str) or not isinstance(patterns, Iterable):
        raise InvalidArgument(f"{what}={patterns!r}; expected a list of patterns of names, such as ['wte.*']")
    found: set[str] = set()
    for pattern in patterns:
        check_type(what, pattern, str, "patterns of names, such as 'wte.*'")
        matches = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
        if not matches:
            raise InvalidArgument(f"{what}: no parameter matches {pattern!r}; names are like {names[0]!r}")
        found.update(matches)
    return frozenset(found)


def _is_bool(value: Any) -> bool:
    return type(value).__name__ in ("bool", "bool_")  # also NumPy's, without importing it


def _text(limit: int) -> str:
    is_long = limit >= 1 << 16 and limit & (limit + 1) == 0
    return f"2^{(limit + 1).bit_length() - 1} - 1" if is_long else str(limit)


def _refusal(what: str, value: Any, expected: str, otherwise: str, *, wrong_type: bool) -> InvalidArgument:
    shown = repr(value)
    if len(shown) > 200:
        shown = f"{shown[:200]}..."
    kind = f" of type {type(value).__name__}" if wrong_type else ""
    return InvalidArgument(
        f"{what}={shown}{kind}; expected {expected}{f', or {otherwise}' if otherwise else ''}"
    )
