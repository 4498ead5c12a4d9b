"""Slurm's short forms: lists of hosts, `n[01-03,7],m2`, and of counts, `2(x3),1`."""

from __future__ import annotations

import itertools
import math
import re

from ..errors import InvalidArgument

_MAX_ENTRIES = 1 << 20  # more than any cluster has; a range must not take all memory


def expand_node_list(name: str, text: str) -> list[str]:
    """The hosts of `text`, in its order. A first number keeps its width: [01-03] is 01, 02, 03.

    Raises:
        InvalidArgument: malformed; names the variable `name` and its value.
    """
    hosts: list[str] = []
    for item in re.split(r",(?![^\[]*\])", text):  # commas outside of brackets
        pieces = re.split(r"\[([0-9,-]+)\]", item)  # plain text and ranges in turn
        if not re.fullmatch(r"[A-Za-z0-9._-]*", "".join(pieces[::2])) or not item:
            raise InvalidArgument(f"{name}={text!r} is not a list of hosts such as 'n[01-03,7],m2'")
        choices = [_numbers(name, text, p) if i % 2 else [p] for i, p in enumerate(pieces)]
        if len(hosts) + math.prod(map(len, choices)) > _MAX_ENTRIES:
            raise InvalidArgument(f"{name}={text!r} has more than {_MAX_ENTRIES} hosts")
        hosts += ["".join(parts) for parts in itertools.product(*choices)]
    return hosts


def expand_counts(name: str, text: str) -> list[int]:
    """The numbers of `text`, one per node: `2(x3),1` is 2, 2, 2, 1.

    Raises:
        InvalidArgument: malformed; names the variable `name` and its value.
    """
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"([0-9]{1,7})(?:\(x([0-9]{1,7})\))?", item)
        if match is None or len(counts) + int(match[2] or 1) > _MAX_ENTRIES:
            raise InvalidArgument(f"{name}={text!r} is not a list of counts such as '2(x3),1'")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _numbers(name: str, text: str, ranges: str) -> list[str]:
    """`01-03,7` as 01, 02, 03, 7."""
    numbers: list[str] = []
    for item in ranges.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", item)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if match is None or not first <= last < first + _MAX_ENTRIES - len(numbers):
            raise InvalidArgument(f"{name}={text!r}: [{ranges}] is not a list of ranges such as [01-03,7]")
        numbers += [f"{number:0{len(match[1])}d}" for number in range(first, last + 1)]
    return numbers
