"""Pictures of a schedule by its times: an SVG, and lines for a terminal."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

from polyreme import _core
from polyreme.errors import InvalidArgument

__all__ = ["svg", "terminal"]

Spans: TypeAlias = Sequence[Sequence[tuple[float, float]]]

_MAX_BOXES = 100_000
_LETTERS = {"forward": "F", "backward": "B", "backward_input": "I", "backward_weight": "W"}
# Of the first chunk of a rank, and of its others; dark text reads on all of them.
_COLOURS = {
    "forward": ("#8ab4f8", "#c5dafc"),
    "backward": ("#7fcf94", "#c0e8ca"),
    "backward_input": ("#5ec4c4", "#b0e3e3"),
    "backward_weight": ("#f6b26b", "#fbd9b5"),
}
_WORDS = {
    "forward": "forward",
    "backward": "backward (both)",
    "backward_input": "backward of the input",
    "backward_weight": "backward of the weights",
}
_OTHER_COLOUR = "#7d6bb0"  # transfers and collectives that take time
_ROW, _BOX, _LEFT, _TOP, _WIDTH = 30, 22, 64, 12, 1200
_CHARACTER = 6.2  # width of a digit of the picture's font


class _Box(NamedTuple):
    """One action that takes time."""

    kind: str
    slot: int  # the index of its chunk on the rank; 0 for what has none
    micro_batch: int
    position: int
    start: float
    end: float


def _boxes(schedule: _core.Schedule, spans: Spans) -> list[list[_Box]]:
    rows = []
    for held, actions, times in zip(schedule.chunks, schedule.actions, spans, strict=True):
        slots = {chunk: slot for slot, chunk in enumerate(held)}
        rows.append(
            [
                _Box(kind, slots.get(chunk, 0), micro_batch, i, start, end)
                for i, ((kind, chunk, micro_batch, _, _), (start, end)) in enumerate(
                    zip(actions, times, strict=True)
                )
                if end > start
            ]
        )
    if sum(map(len, rows)) > _MAX_BOXES:
        raise InvalidArgument(f"a picture of more than {_MAX_BOXES} actions; draw fewer micro-batches")
    return rows


def _makespan(rows: list[list[_Box]]) -> float:
    return max((box.end for row in rows for box in row), default=0.0)


def svg(schedule: _core.Schedule, spans: Spans) -> str:
    """A picture of ranks as rows; every box has its action and times as a tooltip."""
    rows = _boxes(schedule, spans)
    makespan = _makespan(rows)
    scale = (_WIDTH - _LEFT - 12) / makespan if makespan > 0 else 0.0
    axis = _TOP + _ROW * len(rows)
    height = axis + 64
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}"'
        f' viewBox="0 0 {_WIDTH} {height}" role="img" font-family="sans-serif" font-size="11">',
        f"<title>Pipeline schedule: {len(rows)} stages, {schedule.micro_batches} micro-batches</title>",
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    for rank, row in enumerate(rows):
        y = _TOP + _ROW * rank
        parts.append(f'<text x="8" y="{y + 15}">rank {rank}</text>')
        parts.append(
            f'<rect x="{_LEFT}" y="{y}" width="{makespan * scale:.2f}" height="{_BOX}" fill="#f1f1f1"/>'
        )
        parts += [_draw(schedule, rank, box, y, scale) for box in row]
    parts += _axis(makespan, scale, axis)
    parts += _legend(rows, axis + 36)
    return "\n".join([*parts, "</svg>", ""])


def _draw(schedule: _core.Schedule, rank: int, box: _Box, y: int, scale: float) -> str:
    x, width = _LEFT + box.start * scale, (box.end - box.start) * scale
    token = html.escape(schedule.token(rank, box.position))
    tip = f"<title>{token}: {box.start:g} to {box.end:g}</title>"
    if box.kind not in _COLOURS:
        return f'<rect x="{x:.2f}" y="{y + _BOX}" width="{width:.2f}" height="4" fill="{_OTHER_COLOUR}">{tip}</rect>'
    label = str(box.micro_batch)
    text = ""
    if len(label) * _CHARACTER < width:
        text = f'<text x="{x + width / 2:.2f}" y="{y + 15}" text-anchor="middle">{label}</text>'
    colour = _COLOURS[box.kind][min(box.slot, 1)]
    return (
        f'<g>{tip}<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_BOX}" fill="{colour}"'
        f' stroke="#555555" stroke-width="0.5"/>{text}</g>'
    )


def _axis(makespan: float, scale: float, y: int) -> Iterator[str]:
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        x = _LEFT + makespan * scale * share
        anchor = "end" if share == 1.0 else "middle"
        yield f'<text x="{x:.2f}" y="{y + 12}" text-anchor="{anchor}" fill="#555555">{makespan * share:g}</text>'


def _legend(rows: list[list[_Box]], y: int) -> Iterator[str]:
    used = {(box.kind, min(box.slot, 1)) for row in rows for box in row}
    entries = [
        (_COLOURS[kind][slot], word + (" (later chunk)" if slot else ""))
        for kind, word in _WORDS.items()
        for slot in (0, 1)
        if (kind, slot) in used
    ]
    if any(kind not in _COLOURS for kind, _ in used):
        entries.append((_OTHER_COLOUR, "transfer or collective"))
    x = _LEFT
    for i, (colour, word) in enumerate(entries):
        if i == 4:
            x, y = _LEFT, y + 18
        yield f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{colour}" stroke="#555555" stroke-width="0.5"/>'
        yield f'<text x="{x + 17}" y="{y}">{word}</text>'
        x += 270


def terminal(schedule: _core.Schedule, spans: Spans, width: int) -> str:
    """One line for each rank: letters at their times, small ones for the later chunks of a rank."""
    rows = [[box for box in row if box.kind in _LETTERS] for row in _boxes(schedule, spans)]
    makespan = _makespan(rows)
    label = len(f"rank {len(rows) - 1} ")
    columns = max(width - label, 1)
    shortest = min((box.end - box.start for row in rows for box in row), default=1.0)
    # Room for every number, if the lines do not grow too long by it.
    wanted = (len(str(schedule.micro_batches - 1)) + 2) / shortest
    scale = min(wanted, columns / makespan) if makespan > 0 else 0.0
    lines = []
    for rank, row in enumerate(rows):
        line = ["."] * max(1, min(columns, round(makespan * scale)))
        for box in row:
            first, last = round(box.start * scale), round(box.end * scale)
            letter = _LETTERS[box.kind] if box.slot == 0 else _LETTERS[box.kind].lower()
            text = f"{letter}{box.micro_batch}"
            room = last - first
            # A blank sets neighbours apart where there is room for it.
            text = text.ljust(room) if len(text) < room else (text if len(text) == room else letter * room)
            line[first:last] = text[:room]
        lines.append(f"rank {rank} ".ljust(label) + "".join(line).rstrip())
    return "\n".join([*lines, ""])
