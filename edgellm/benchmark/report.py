"""The table that ends a benchmark."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
            first = outputs["differences"][0]
            yield (
                f"{values['name']}: {differing} of {outputs['compared']} answers DIFFER from those of "
                f"{yardstick['name']}, the first (prompt {first['prompt'] + 1}) at token {first['token'] + 1}"
            )


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        yield "  ".join(cells).rstrip()


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
