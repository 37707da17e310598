"""The figure of a benchmark, as SVG: speeds as bars, acceptance by position as lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

_WIDTH, _ROW, _LABELS, _BARS = 760, 26, 190, 460
_LINES_HEIGHT, _TOP = 220, 46
_COLOURS = ("#3b6ea5", "#c8553d", "#5b8c5a", "#8a5a9e", "#c79a2b", "#4a9ba8", "#8c6d4f", "#666666")


def speed_plot(results: dict[str, Any]) -> str:
    """The SVG text for the results of `commands.bench.measure`."""
    configurations = results["configurations"]
    drafted = [values for values in configurations if values.get("acceptance_by_position")]
    bars = _TOP + _ROW * len(configurations) + 20
    height = bars + (_LINES_HEIGHT + 90 if drafted else 0)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="13">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        _text(12, 26, f"{results['model']}, {results['backend']} backend: tokens per second", weight="bold"),
        *_bars(configurations),
    ]
    if drafted:
        parts += _lines(drafted, bars)
    return "\n".join([*parts, "</svg>", ""])


def _bars(configurations: Sequence[dict[str, Any]]) -> Iterator[str]:
    fastest = max((values["tokens_per_second"] for values in configurations), default=0.0) or 1.0
    for index, values in enumerate(configurations):
        y = _TOP + _ROW * index
        width = _BARS * values["tokens_per_second"] / fastest
        ratio = "" if values["ratio"] is None else f" ({values['ratio']:.2f})"
        yield _text(_LABELS - 8, y + 15, values["name"], anchor="end")
        yield f'<rect x="{_LABELS}" y="{y}" width="{width:.1f}" height="{_ROW - 6}" fill="{_colour(index)}"/>'
        yield _text(_LABELS + width + 6, y + 15, f"{values['tokens_per_second']:.1f}{ratio}")


def _lines(drafted: Sequence[dict[str, Any]], top: float) -> Iterator[str]:
    left, right, bottom = 60.0, _WIDTH - 220.0, top + 40 + _LINES_HEIGHT
    positions = max(len(values["acceptance_by_position"]) for values in drafted)
    step = (right - left) / max(1, positions - 1)
    yield _text(12, top + 20, "Share of rounds in which a position was accepted", weight="bold")
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = bottom - share * _LINES_HEIGHT
        yield f'<line x1="{left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#dddddd"/>'
        yield _text(left - 8, y + 4, f"{share:.0%}", anchor="end")
    for position in range(positions):
        yield _text(left + position * step, bottom + 18, str(position + 1), anchor="middle")
    for index, values in enumerate(drafted):
        shares = values["acceptance_by_position"]
        points = [(left + n * step, bottom - share * _LINES_HEIGHT) for n, share in enumerate(shares)]
        colour = _colour(index + 1)
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
        yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points)
        legend = top + 50 + 20 * index
        yield f'<rect x="{right + 24}" y="{legend - 10}" width="12" height="12" fill="{colour}"/>'
        yield _text(right + 42, legend, values["name"])


def _text(x: float, y: float, text: str, anchor: str = "start", weight: str = "normal") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}">{escape(text)}</text>'


def _colour(index: int) -> str:
    return _COLOURS[index % len(_COLOURS)]
