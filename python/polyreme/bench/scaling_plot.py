"""The picture of `bench scaling`: throughput and efficiency over the number of ranks, as an SVG."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator
from typing import Any

__all__ = ["plot_scaling"]

# Told apart by people who do not see all colours (Okabe and Ito), and by their marks' dashes.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_WIDTH, _PANEL, _LEFT, _TOP, _GAP = 460, 300, 70, 48, 90


class _Panel:
    """One diagram: positions of ranks (logarithmic) and of values in [low, high]."""

    def __init__(self, left: int, sizes: list[int], low: float, high: float, *, logarithmic: bool) -> None:
        self.left = left
        self.sizes = sizes
        self.low, self.high = low, high
        self._logarithmic = logarithmic

    def x(self, size: int) -> float:
        first, last = math.log2(self.sizes[0]), math.log2(self.sizes[-1])
        share = 0.5 if first == last else (math.log2(size) - first) / (last - first)
        return self.left + _WIDTH * (0.06 + 0.88 * share)

    def y(self, value: float) -> float:
        if self._logarithmic:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return _TOP + _PANEL * (1 - share)

    def frame(self, title: str, ticks: list[tuple[float, str]]) -> Iterator[str]:
        bottom = _TOP + _PANEL
        yield (
            f'<rect x="{self.left}" y="{_TOP}" width="{_WIDTH}" height="{_PANEL}" fill="none" stroke="#888888"/>'
        )
        yield f'<text x="{self.left}" y="{_TOP - 10}" font-weight="bold">{html.escape(title)}</text>'
        for value, text in ticks:
            y = self.y(value)
            yield (
                f'<line x1="{self.left}" x2="{self.left + _WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dddddd"/>'
            )
            yield f'<text x="{self.left - 6}" y="{y + 4:.1f}" text-anchor="end">{html.escape(text)}</text>'
        for size in self.sizes:
            yield f'<text x="{self.x(size):.1f}" y="{bottom + 16}" text-anchor="middle">{size}</text>'
        middle = self.left + _WIDTH / 2
        yield f'<text x="{middle:.1f}" y="{bottom + 34}" text-anchor="middle">ranks</text>'

    def line(self, points: list[tuple[int, float]], colour: str, dashes: str = "") -> str:
        where = " ".join(f"{self.x(size):.1f},{self.y(value):.1f}" for size, value in points)
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        return f'<polyline points="{where}" fill="none" stroke="{colour}" stroke-width="1.5"{dashed}/>'

    def mark(self, size: int, value: float, colour: str, tip: str) -> str:
        x, y = self.x(size), self.y(value)
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"><title>{html.escape(tip)}</title></circle>'

    def bar(self, size: int, low: float, high: float, colour: str) -> str:
        x, top, bottom = self.x(size), self.y(min(high, self.high)), self.y(max(low, self.low))
        return (
            f'<path d="M{x:.1f} {top:.1f}V{bottom:.1f}M{x - 4:.1f} {top:.1f}h8M{x - 4:.1f} {bottom:.1f}h8"'
            f' stroke="{colour}" fill="none"/>'
        )


def plot_scaling(settings: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """An SVG of the rows of `summarise`: measured lines, dashed ideal ones, bars for the 95 % intervals."""
    series: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        series.setdefault(f"{row['kind']}, {row['label']}", []).append(row)
    height = _TOP + _PANEL + 60 + 18 * len(series)
    width = _LEFT + 2 * _WIDTH + _GAP + 20
    model = settings["model"]
    title = (
        f"GPT {model['layers']} x {model['hidden']}, sequence {model['seq_len']}, along {settings['axis']}:"
        f" {settings['batch']} samples and {settings['threads']} thread(s) for each rank"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
        f' viewBox="0 0 {width} {height}" role="img" font-family="sans-serif" font-size="12">',
        f"<title>{html.escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="18">{html.escape(title)}</text>',
    ]
    sizes = [row["size"] for row in next(iter(series.values()))]
    parts += _throughput(sizes, series)
    parts += _efficiency(sizes, series)
    for i, name in enumerate(series):
        y = _TOP + _PANEL + 56 + 18 * i
        colour = _COLOURS[i % len(_COLOURS)]
        parts.append(f'<rect x="{_LEFT}" y="{y - 9}" width="12" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{_LEFT + 18}" y="{y}">{html.escape(name)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _throughput(sizes: list[int], series: dict[str, list[dict[str, Any]]]) -> Iterator[str]:
    rates = [row["tokens_per_s"] for rows in series.values() for row in rows]
    low, high = min(rates) / 1.3, max(*rates, min(rates) * sizes[-1] / sizes[0]) * 1.3
    panel = _Panel(_LEFT, sizes, low, high, logarithmic=True)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = [10.0**d * m for d in decades for m in (1, 2, 5)]
    yield from panel.frame("tokens/s", [(value, f"{value:g}") for value in steps if low <= value <= high])
    for i, rows in enumerate(series.values()):
        colour = _COLOURS[i % len(_COLOURS)]
        first = rows[0]
        ideal = [(size, first["tokens_per_s"] * size / first["size"]) for size in sizes]
        yield panel.line([(s, min(max(v, low), high)) for s, v in ideal], "#999999", "4 3")
        yield panel.line([(row["size"], row["tokens_per_s"]) for row in rows], colour)
        for row in rows:
            tip = f"{row['size']} ranks: {row['tokens_per_s']:.1f} tokens/s"
            yield panel.mark(row["size"], row["tokens_per_s"], colour, tip)


def _efficiency(sizes: list[int], series: dict[str, list[dict[str, Any]]]) -> Iterator[str]:
    values = [row["efficiency"] for rows in series.values() for row in rows]
    low = max(0.0, math.floor(10 * min(values) - 0.5) / 10)
    high = max(1.05, math.ceil(20 * max(values)) / 20)
    panel = _Panel(_LEFT + _WIDTH + _GAP, sizes, low, high, logarithmic=False)
    spacing = next(step for step in (0.05, 0.1, 0.2, 0.5, 1.0, math.inf) if (high - low) / step <= 9)
    count = int((high - low) / spacing + 1e-9)
    ticks = [(low + i * spacing, f"{100 * (low + i * spacing):.0f}%") for i in range(count + 1)]
    yield from panel.frame("efficiency, with 95 % intervals", ticks)
    yield panel.line([(sizes[0], 1.0), (sizes[-1], 1.0)], "#999999", "4 3")
    for i, rows in enumerate(series.values()):
        colour = _COLOURS[i % len(_COLOURS)]
        yield panel.line([(row["size"], row["efficiency"]) for row in rows], colour)
        for row in rows:
            tip = f"{row['size']} ranks: {100 * row['efficiency']:.2f} %"
            if row["efficiency_low"] is not None:
                yield panel.bar(row["size"], row["efficiency_low"], row["efficiency_high"], colour)
                tip += f" ({100 * row['efficiency_low']:.2f} to {100 * row['efficiency_high']:.2f} %)"
            yield panel.mark(row["size"], row["efficiency"], colour, tip)
