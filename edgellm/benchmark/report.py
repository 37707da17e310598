"""The results of a benchmark for people: a table as text, and a plot as SVG."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import floor, log10
from typing import Any
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from edgellm.errors import number_of


def report_lines(results: dict[str, Any]) -> Iterator[str]:
    """The results of `commands.bench.measure` for people: speeds, acceptance by position and by task, equality."""
    configurations = results["configurations"]
    yield f"{results['model']} on the {backend_of(results)}: {_asked(results)}"
    yield ""
    yield from _table([_HEADER, *map(_row, configurations)])
    if drafted := [values for values in configurations if "rounds" in values]:
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


def backend_of(results: Mapping[str, Any]) -> str:
    """What computed, and how many GPUs (of NumPy: threads) shared the model."""
    return f"{results['backend']} backend" + (f" with {results['gpus']} GPUs" if results["gpus"] > 1 else "")


def _asked(results: dict[str, Any]) -> str:
    sampling, repeat = results["sampling"], results["repeat"]
    times = "once" if repeat == 1 else f"{repeat} times"
    asked = f"{number_of(results['prompts'], 'prompt')}, each answered {times}"
    return f"{asked} with up to {sampling['max_tokens']} tokens, temperature {sampling['temperature']:g}"


_HEADER = ["configuration", "tokens/s", "ratio", "tokens/round", "rounds", "plain steps", "drafting s", "verifying s"]


def _row(values: dict[str, Any]) -> list[str]:
    cells = [values["name"], f"{values['tokens_per_second']:.1f}", _number(values["ratio"])]
    if "rounds" not in values:
        return [*cells, "", "", "", "", ""]
    counts = [f"{values['mean_acceptance_length']:.2f}", str(values["rounds"]), str(values["plain_steps"])]
    return [*cells, *counts, _number(values["draft_seconds"]), _number(values["verify_seconds"])]


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
            found = f"all {outputs['compared']}" if outputs["compared"] > 1 else "1 of 1"
            yield f"{values['name']}: {found} answers equal {yardstick['name']}'s, token for token"
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
    title = f"Decoding speed of {results['model']}"
    measured = [f"{results['machine']}, {backend_of(results)}, {results['date']}", _asked(results)]
    svg = Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "font-family": "sans-serif", "font-size": "13"})
    svg.attrib |= {"width": str(_WIDTH), "height": str(height), "viewBox": f"0 0 {_WIDTH} {height}", "role": "img"}
    _add(svg, "title", title)
    _add(svg, "desc", "; ".join(measured))
    _add(svg, "rect", width=_WIDTH, height=height, fill="white")
    _add(svg, "text", title, x=12, y=28, font_weight="bold", font_size=17)
    for index, line in enumerate(measured):
        _add(svg, "text", line, x=12, y=48 + 18 * index, fill=_GREY)
    _add_bars(svg, configurations)
    if drafted:
        _add_lines(svg, drafted, bars)
    indent(svg)
    return tostring(svg, encoding="unicode") + "\n"


def _add(svg: Element, tag: str, text: str | None = None, **attributes: float | str) -> None:
    """Add an element; in names of attributes `_` stands for a hyphen."""
    written = {name: f"{value:.1f}" if isinstance(value, float) else str(value) for name, value in attributes.items()}
    SubElement(svg, tag, {name.replace("_", "-"): value for name, value in written.items()}).text = text


def _add_bars(svg: Element, configurations: Sequence[dict[str, Any]]) -> None:
    fastest = max((values["tokens_per_second"] for values in configurations), default=0.0) or 1.0
    step = _round_step(fastest)
    scale, bottom = _BARS / fastest, _TOP + _ROW * len(configurations)
    for tick in (step * index for index in range(int(fastest / step) + 1)):
        x = _LABELS + scale * tick
        _add(svg, "line", x1=x, y1=_TOP - 6, x2=x, y2=bottom, stroke="#dddddd")
        _add(svg, "text", f"{tick:g}", x=x, y=bottom + 16, text_anchor="middle", fill=_GREY)
    title = f"tokens per second (in brackets: against {configurations[0]['name']})" if configurations else ""
    _add(svg, "text", title, x=_LABELS + _BARS / 2, y=bottom + 36, text_anchor="middle")
    for index, values in enumerate(configurations):
        y, width = _TOP + _ROW * index, scale * values["tokens_per_second"]
        ratio = "" if values["ratio"] is None else f" ({values['ratio']:.2f})"
        _add(svg, "text", values["name"], x=_LABELS - 8, y=y + 15, text_anchor="end")
        _add(svg, "rect", x=_LABELS, y=y, width=width, height=_ROW - 6, fill=_colour(index))
        _add(svg, "text", f"{values['tokens_per_second']:.1f}{ratio}", x=_LABELS + width + 6, y=y + 15)


def _round_step(largest: float) -> float:
    """A distance of 1, 2 or 5 times a power of ten between at most six marks from 0 to `largest`."""
    power = 10.0 ** floor(log10(largest / 5))
    return next(power * factor for factor in (1, 2, 5, 10) if largest / (power * factor) <= 5)


def _add_lines(svg: Element, drafted: Sequence[dict[str, Any]], top: int) -> None:
    left, right, bottom = 76.0, _WIDTH - 220.0, top + 50 + _LINES_HEIGHT
    positions = max(len(values["acceptance_by_position"]) for values in drafted)
    step = (right - left) / max(1, positions - 1)
    _add(svg, "text", "Acceptance by position of the draft", x=12, y=top + 20, font_weight="bold", font_size=15)
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = bottom - share * _LINES_HEIGHT
        _add(svg, "line", x1=left, y1=y, x2=right, y2=y, stroke="#dddddd")
        _add(svg, "text", f"{share:.0%}", x=left - 8, y=y + 4, text_anchor="end", fill=_GREY)
    for position in range(positions):
        _add(svg, "text", str(position + 1), x=left + position * step, y=bottom + 18, text_anchor="middle", fill=_GREY)
    _add(svg, "text", "position in the draft", x=(left + right) / 2, y=bottom + 38, text_anchor="middle")
    middle = bottom - _LINES_HEIGHT / 2
    turn = f"rotate(-90 20 {middle:g})"
    _add(svg, "text", "share of rounds", x=20, y=middle, text_anchor="middle", transform=turn)
    for index, values in enumerate(drafted):
        shares, colour, legend = values["acceptance_by_position"], _colour(index + 1), top + 60 + 20 * index
        points = [(left + n * step, bottom - share * _LINES_HEIGHT) for n, share in enumerate(shares)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        _add(svg, "polyline", points=path, fill="none", stroke=colour, stroke_width=2)
        for x, y in points:
            _add(svg, "circle", cx=x, cy=y, r=3, fill=colour)
        _add(svg, "rect", x=right + 24, y=legend - 10, width=12, height=12, fill=colour)
        _add(svg, "text", values["name"], x=right + 42, y=legend)


def _colour(index: int) -> str:
    return _COLOURS[index % len(_COLOURS)]
