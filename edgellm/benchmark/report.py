"""The results of a benchmark for people: a table as text, and a plot as SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from math import floor, log10
from typing import Any


def report_lines(results: dict[str, Any]) -> Iterator[str]:
    """The results of `commands.bench.measure` for people: speeds, acceptance by position and by task, equality."""
    configurations = results["configurations"]
    yield (
        f"{results['model']} on the {results['backend']} backend: {results['prompts']} prompts, each answered "
        f"{_times(results['repeat'])} with up to {results['sampling']['max_tokens']} tokens, temperature "
        f"{results['sampling']['temperature']:g}"
    )
    yield ""
    yield from _table([_HEADER, *map(_row, configurations)])
    drafted = [values for values in configurations if "rounds" in values]
    if drafted:
        yield ""
        yield "accepted at position (share of all rounds)"
        yield from _table(_position_rows(drafted))
    tasks = sorted({task for values in configurations for task in values["tasks"]})
    if len(tasks) > 1:
        yield ""
        yield "speed against plain, and tokens a round, by task"
        yield from _table([["", *tasks], *([values["name"], *_task_cells(values, tasks)] for values in configurations)])
    yield ""
    yield from _outputs(configurations)
    for values in configurations:
        if values["controller"] is not None:
            yield f"{values['name']} chose {values['controller']['reason']}"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


_HEADER = ["configuration", "tokens/s", "ratio", "tokens/round", "rounds", "plain steps", "drafting s", "verifying s"]


def _row(values: dict[str, Any]) -> list[str]:
    cells = [values["name"], f"{values['tokens_per_second']:.1f}", _number(values["ratio"])]
    if "rounds" not in values:
        return [*cells, "", "", "", "", ""]
    return [
        *cells,
        f"{values['mean_acceptance_length']:.2f}",
        str(values["rounds"]),
        str(values["plain_steps"]),
        _number(values["draft_seconds"]),
        _number(values["verify_seconds"]),
    ]


def _position_rows(drafted: Sequence[dict[str, Any]]) -> list[list[str]]:
    most = max(len(values["acceptance_by_position"]) for values in drafted)
    rows = [["", *map(str, range(1, most + 1))]]
    for values in drafted:
        shares = [f"{share:.0%}" for share in values["acceptance_by_position"]]
        rows.append([values["name"], *shares, *[""] * (most - len(shares))])
    return rows


def _task_cells(values: dict[str, Any], tasks: Sequence[str]) -> list[str]:
    cells = []
    for task in tasks:
        figures = values["tasks"].get(task, {})
        length = figures.get("mean_acceptance_length")
        cells.append(_number(figures.get("ratio")) + ("" if length is None else f" ({length:.2f})"))
    return cells


def _outputs(configurations: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Whether the answers are those of plain decoding."""
    yardstick, *others = configurations
    differs = False
    for values in (yardstick, *others):
        outputs = values["outputs"]
        differing = outputs["compared"] - outputs["equal"]
        if values is yardstick and not differing:
            continue
        if not differing:
            yield f"{values['name']}: all {outputs['compared']} answers equal {yardstick['name']}'s, token for token"
        elif not values["lossless"]:
            yield f"{values['name']}: {differing} of {outputs['compared']} answers differ, as is to be expected of it"
        else:
            first, differs = outputs["differences"][0], True
            yield (
                f"{values['name']}: {differing} of {outputs['compared']} answers DIFFER from those of "
                f"{yardstick['name']}, the first (prompt {first['prompt'] + 1}) at token {first['token'] + 1}"
            )
    if differs:
        yield (
            f"Also {yardstick['name']} may differ from itself: what of a prompt is not in the KV cache yet is computed "
            "in other pieces each time, whose sums round otherwise; of two tokens nearly as likely either may come"
        )


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        yield "  ".join(cells).rstrip()


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


_WIDTH, _ROW, _LABELS, _BARS = 760, 26, 190, 440
_LINES_HEIGHT, _TOP, _AXIS = 220, 106, 52
_COLOURS = ("#3b6ea5", "#c8553d", "#5b8c5a", "#8a5a9e", "#c79a2b", "#4a9ba8", "#8c6d4f", "#666666")
_GREY = "#555555"


def speed_plot(results: dict[str, Any]) -> str:
    """The SVG text for the results of `commands.bench.measure`: it says itself what was measured, where and when."""
    configurations = results["configurations"]
    drafted = [values for values in configurations if values.get("acceptance_by_position")]
    bars = _TOP + _ROW * len(configurations) + _AXIS
    height = bars + (_LINES_HEIGHT + 110 if drafted else 0)
    title, sampling = f"Decoding speed of {results['model']}", results["sampling"]
    measured = [
        f"{results['machine']}, {results['backend']} backend, {results['date']}",
        f"{results['prompts']} prompts, each answered {_times(results['repeat'])} with up to {sampling['max_tokens']} "
        f"tokens, temperature {sampling['temperature']:g}",
    ]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="13" role="img">',
        f"<title>{escape(title)}</title>",
        f"<desc>{escape('; '.join(measured))}</desc>",
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        _text(12, 28, title, weight="bold", size=17),
        *(_text(12, 48 + 18 * index, line, colour=_GREY) for index, line in enumerate(measured)),
        *_bars(configurations),
    ]
    if drafted:
        parts += _lines(drafted, bars)
    return "\n".join([*parts, "</svg>", ""])


def _bars(configurations: Sequence[dict[str, Any]]) -> Iterator[str]:
    fastest = max((values["tokens_per_second"] for values in configurations), default=0.0) or 1.0
    step = _round_step(fastest)
    ticks = [step * index for index in range(int(fastest / step) + 1)]
    scale, bottom = _BARS / fastest, _TOP + _ROW * len(configurations)
    for tick in ticks:
        x = _LABELS + scale * tick
        yield f'<line x1="{x:.1f}" y1="{_TOP - 6}" x2="{x:.1f}" y2="{bottom}" stroke="#dddddd"/>'
        yield _text(x, bottom + 16, f"{tick:g}", anchor="middle", colour=_GREY)
    yield _text(
        _LABELS + _BARS / 2,
        bottom + 36,
        f"tokens per second (in brackets: against {configurations[0]['name']})" if configurations else "",
        anchor="middle",
    )
    for index, values in enumerate(configurations):
        y = _TOP + _ROW * index
        width = scale * values["tokens_per_second"]
        ratio = "" if values["ratio"] is None else f" ({values['ratio']:.2f})"
        yield _text(_LABELS - 8, y + 15, values["name"], anchor="end")
        yield f'<rect x="{_LABELS}" y="{y}" width="{width:.1f}" height="{_ROW - 6}" fill="{_colour(index)}"/>'
        yield _text(_LABELS + width + 6, y + 15, f"{values['tokens_per_second']:.1f}{ratio}")


def _round_step(largest: float) -> float:
    """A distance of 1, 2 or 5 times a power of ten between at most six marks from 0 to `largest`."""
    power = 10.0 ** floor(log10(largest / 5))
    return next(power * factor for factor in (1, 2, 5, 10) if largest / (power * factor) <= 5)


def _lines(drafted: Sequence[dict[str, Any]], top: float) -> Iterator[str]:
    left, right, bottom = 76.0, _WIDTH - 220.0, top + 50 + _LINES_HEIGHT
    positions = max(len(values["acceptance_by_position"]) for values in drafted)
    step = (right - left) / max(1, positions - 1)
    yield _text(12, top + 20, "Acceptance by position of the draft", weight="bold", size=15)
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = bottom - share * _LINES_HEIGHT
        yield f'<line x1="{left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#dddddd"/>'
        yield _text(left - 8, y + 4, f"{share:.0%}", anchor="end", colour=_GREY)
    for position in range(positions):
        yield _text(left + position * step, bottom + 18, str(position + 1), anchor="middle", colour=_GREY)
    yield _text((left + right) / 2, bottom + 38, "position in the draft", anchor="middle")
    middle = bottom - _LINES_HEIGHT / 2
    yield _text(20, middle, "share of rounds", anchor="middle", turned=True)
    for index, values in enumerate(drafted):
        shares = values["acceptance_by_position"]
        points = [(left + n * step, bottom - share * _LINES_HEIGHT) for n, share in enumerate(shares)]
        colour = _colour(index + 1)
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
        yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points)
        legend = top + 60 + 20 * index
        yield f'<rect x="{right + 24}" y="{legend - 10}" width="12" height="12" fill="{colour}"/>'
        yield _text(right + 42, legend, values["name"])


def _text(
    x: float,
    y: float,
    text: str,
    anchor: str = "start",
    weight: str = "normal",
    size: int = 13,
    colour: str = "black",
    turned: bool = False,
) -> str:
    turn = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turned else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}" font-size="{size}" '
        f'fill="{colour}"{turn}>{escape(text)}</text>'
    )


def _colour(index: int) -> str:
    return _COLOURS[index % len(_COLOURS)]
