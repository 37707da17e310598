"""Draws a conversation with `edgellm chat` as SVG, from a real run in a terminal of its own.

python tools/docs/draw_chat.py docs/pages/pictures/chat.svg

The questions are typed into the terminal, as a person would; what it shows is drawn as it is, speeds included.
"""

from __future__ import annotations

import argparse
import os
import pty
import re
import select
import struct
import sys
import tempfile
import termios
import textwrap
import time
from collections.abc import Iterator, Sequence
from fcntl import ioctl
from html import escape
from pathlib import Path

QUESTIONS = (
    "What is on the table?",
    "Put the banana in the bowl, please.",
    "Pick up the cup.",
    "The blue one.",
    "Can you fly?",
)
COLUMNS, ROWS = 110, 40
PROMPT = ">>> "
_SECONDS = 120.0
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07]*\x07|\x1b[=>]|[\x00-\x08\x0b\x0c\x0e-\x1f]")
_CHARACTER, _LINE, _MARGIN, _BAR = 7.83, 19, 18, 30
_FONTS = "Helvetica, Arial, DejaVu Sans, sans-serif"
_PAPER, _TEXT, _QUESTION, _COUNTS = "#1b1f27", "#d8dee9", "#8fd3a5", "#7b8698"


def conversation(questions: Sequence[str], options: Sequence[str] = ()) -> str:
    """What a terminal of `COLUMNS` columns shows of a chat with the shipped model, the questions typed one by one."""
    with tempfile.TemporaryDirectory() as home:
        child, terminal = pty.fork()
        if child == 0:
            environment = os.environ | {"TERM": "dumb", "HOME": home, "XDG_CONFIG_HOME": home, "XDG_STATE_HOME": home}
            command = [sys.executable, "-m", "edgellm", "chat", "--temperature", "0", "--no-history", *options]
            os.execve(sys.executable, command, environment)
        try:
            ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
            shown = _read_until_prompt(terminal)
            for question in questions:
                os.write(terminal, f"{question}\n".encode())
                shown += _read_until_prompt(terminal)
            os.write(terminal, b"\x04")
        finally:
            os.close(terminal)
            os.waitpid(child, 0)
    return _CONTROL.sub("", shown).replace("\r", "").removesuffix(PROMPT)


def _read_until_prompt(terminal: int) -> str:
    """What comes until the terminal asks for the next question. Raises TimeoutError."""
    data, end = b"", time.monotonic() + _SECONDS
    while time.monotonic() < end:
        if select.select([terminal], [], [], 0.3)[0]:
            data += os.read(terminal, 65536)
        elif _CONTROL.sub("", data.decode("utf-8", "replace")).endswith(PROMPT):
            return data.decode("utf-8")
    raise TimeoutError(f"no prompt within {_SECONDS:g} s; the terminal shows: {data.decode('utf-8', 'replace')!r}")


def drawn(shown: str, title: str) -> str:
    """The SVG text of a terminal; lines are wrapped at words."""
    rows = list(_rows(shown.strip().splitlines()))
    width, height = round(COLUMNS * _CHARACTER) + 2 * _MARGIN, _BAR + _LINE * len(rows) + 2 * _MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img" aria-label="{escape(title)}">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" rx="10" fill="{_PAPER}"/>',
        *(f'<circle cx="{_MARGIN + 18 * n}" cy="18" r="5.5" fill="#4c5566"/>' for n in range(3)),
        f'<text x="{width / 2}" y="22" text-anchor="middle" font-family="{_FONTS}" font-size="12" '
        f'fill="{_COUNTS}">{escape(title)}</text>',
        '<g font-family="ui-monospace, Menlo, Consolas, DejaVu Sans Mono, monospace" font-size="13" '
        'xml:space="preserve">',
    ]
    for index, (row, colour) in enumerate(rows):
        y = _BAR + _MARGIN + _LINE * index + 8
        # The length is given, so that columns fit whatever font there is.
        length = f' textLength="{len(row) * _CHARACTER:.1f}" lengthAdjust="spacingAndGlyphs"' if row else ""
        parts.append(f'<text x="{_MARGIN}" y="{y}" fill="{colour}"{length}>{escape(row)}</text>')
    return "\n".join([*parts, "</g>", "</svg>", ""])


def _rows(lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The rows of a terminal with their colours; what comes before the first question is a remark."""
    has_begun = False
    for line in lines:
        has_begun = has_begun or line.startswith(PROMPT)
        colour = _COUNTS if line.startswith("[") or not has_begun else _TEXT
        if line.startswith(PROMPT):
            colour = _QUESTION
        for row in textwrap.wrap(line, COLUMNS) or [""]:
            yield row, colour


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("picture", type=Path, help="the SVG file to write")
    arguments = parser.parse_args()
    arguments.picture.parent.mkdir(parents=True, exist_ok=True)
    shown = conversation(QUESTIONS)
    title = f"edgellm chat: the shipped model on {len(os.sched_getaffinity(0))} CPU cores, without a GPU"
    arguments.picture.write_text(drawn(shown, title), encoding="utf-8")
    print(shown)


if __name__ == "__main__":
    main()
