"""Draws the speeds of decoding on an H200 as SVG, from the result files of two runs.

python tools/docs/draw_speeds.py docs/pages/pictures/speeds.svg
"""

from __future__ import annotations

import argparse
import json
import lzma
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "bench" / "results"
DECODING, DRAFTING = RESULTS / "2026-11-22-h200-decode.json", RESULTS / "2026-11-23-h200-eagle.json.xz"
#: Those of the chart, in its order; the file has more.
CONFIGURATIONS = ("chain 2", "chain 5", "tree 10/4/16", "tree 10/5/32", "tree 10/6/60")
_FONTS = "Helvetica, Arial, DejaVu Sans, sans-serif"
_WIDTH, _LABELS, _BARS, _ROW, _TOP = 760, 230, 330, 30, 74
_YARDSTICK, _PLAIN, _DRAFTED = "#9aa3af", "#3b6ea5", "#5b8c5a"


@dataclass(frozen=True)
class Bar:
    """One row of the chart: tokens a second, what the speed is of, what is written behind the bar."""

    label: str
    speed: float
    colour: str
    note: str = ""


def bars(decoding: dict[str, Any], drafting: dict[str, Any]) -> list[Bar]:
    """The rows, from the results of `gpu_speed.py` and `eagle_speed.py`."""
    found = drafting["llama-1b"]
    rounds = {each["configuration"]: each for each in found["rounds"]}
    compiled, plain = decoding["torch_compile"]["milliseconds"], found["plain"]["step_ms"]
    return [
        Bar("torch.compile, decode step", 1000 / compiled, _YARDSTICK, f"{compiled:.2f} ms"),
        Bar("EdgeLLM without a draft", 1000 / plain, _PLAIN, f"{plain:.2f} ms"),
        *(_drafted(rounds[name]) for name in CONFIGURATIONS),
    ]


def _drafted(found: dict[str, Any]) -> Bar:
    note = f"{found['found_mean']:.2f} tokens a round"
    return Bar(f"EAGLE, {found['configuration']}", found["tokens_per_second"], _DRAFTED, note)


def chart(rows: Sequence[Bar], lines: Sequence[str]) -> str:
    """The SVG text: a title, one more line of `lines` each, and the bars."""
    height, most = _TOP + _ROW * len(rows) + 14, max(bar.speed for bar in rows)
    title, *more = lines
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" font-family="{_FONTS}" font-size="13" role="img" '
        f'aria-label="{escape(title)}">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="12" y="24" font-size="15" font-weight="bold">{escape(title)}</text>',
        *(f'<text x="12" y="{43 + 17 * n}" fill="#555555">{escape(line)}</text>' for n, line in enumerate(more)),
    ]
    for index, bar in enumerate(rows):
        y, width = _TOP + _ROW * index, _BARS * bar.speed / most
        parts += [
            f'<text x="{_LABELS - 10}" y="{y + 15}" text-anchor="end">{escape(bar.label)}</text>',
            f'<rect x="{_LABELS}" y="{y}" width="{width:.1f}" height="{_ROW - 9}" fill="{bar.colour}"/>',
            f'<text x="{_LABELS + width + 8:.1f}" y="{y + 15}">{bar.speed:,.0f} '
            f'<tspan fill="#555555">({escape(bar.note)})</tspan></text>',
        ]
    return "\n".join([*parts, "</svg>", ""])


def figures() -> tuple[Any, Any]:
    """What was recorded of decoding and of drafting."""
    return json.loads(DECODING.read_bytes()), json.loads(lzma.decompress(DRAFTING.read_bytes()))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("picture", type=Path, help="the SVG file to write")
    picture = parser.parse_args().picture
    decoding, drafting = figures()
    machine = drafting["machine"].split(" (")[0]
    lines = [
        "Tokens per second: Llama-3.2-1B's shapes, random fp16 weights, batch 1",
        f"{machine}, {drafting['date']}. Drafts: accepted lengths are simulated inside the real kernels;",
        "what a draft gains in earnest depends on its head and on the text.",
    ]
    picture.parent.mkdir(parents=True, exist_ok=True)
    picture.write_text(chart(bars(decoding, drafting), lines), encoding="utf-8")


if __name__ == "__main__":
    main()
