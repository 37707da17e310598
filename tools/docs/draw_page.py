"""Takes pictures of the server's page, in a conversation with the shipped model, for the documentation.

python tools/docs/draw_page.py docs/pages/pictures

Needs a Chromium of the system. The pictures have few colours, so that they stay small.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from PIL import Image

from edgellm.opened_model import SHIPPED_MODEL
from tools.docs.browser import Page

COLOURS = 32
_SCHEMA = """{
  "type": "object",
  "properties": {
    "action": {"enum": ["say"]},
    "text": {"type": "string"}
  },
  "required": ["action", "text"],
  "additionalProperties": false
}"""
_BEFORE = ("What is on the table?", "How full is your battery?", "Pick up the red cup.", "Where is the banana?")
_DONE = "document.querySelectorAll('.answered[aria-busy=false]').length === {}"


def small(png: bytes) -> bytes:
    """A picture with few colours."""
    made = io.BytesIO()
    with Image.open(io.BytesIO(png)) as image:
        reduced = image.convert("RGB").quantize(COLOURS, Image.Quantize.MAXCOVERAGE, 3, dither=Image.Dither.NONE)
        reduced.save(made, "PNG", optimize=True)
    return made.getvalue()


def ask(page: Page, text: str, number: int) -> None:
    """Ask the conversation's question of that number, and wait for the answer."""
    page.fill("#question", text)
    page.press("Enter")
    page.wait_for(_DONE.format(number))


def pictures(url: str) -> dict[str, bytes]:
    """PNG files of the page by name."""
    found = {}
    with Page(size=(1200, 820)) as page:
        page.open(url)
        page.wait_for("document.getElementById('model').value")
        for number, question in enumerate(_BEFORE, 1):  # for the course of tokens a second
            ask(page, question, number)
            time.sleep(2.5)
        page.click("#new")
        page.choose_files("#file", [SHIPPED_MODEL / "scenes" / "toys.png"])
        page.wait_for("document.querySelectorAll('#pictures img').length === 1")
        ask(page, "What do you see?", 1)
        page.evaluate("document.getElementById('model').value = 'json'")
        page.fill("#schema", _SCHEMA)
        ask(page, "Where is the green ball?", 2)
        page.wait_for("document.getElementById('queue-more').innerText === '0 running'")
        page.evaluate("document.getElementById('schema').scrollTop = 0")
        found["page.png"] = page.screenshot()
    return found


def main() -> None:
    """Start a server, and write the pictures into a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    command = [sys.executable, "-m", "edgellm", "serve", "--port", "0", "--backend", "numpy"]
    environment = {**os.environ, "EDGELLM_CONFIG": os.devnull}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stderr is not None
        try:
            listening = re.search(r"http://\S+:\d+", server.stderr.readline())
            if listening is None:
                raise SystemExit("the server did not start")
            for name, png in pictures(f"{listening[0]}/").items():
                (folder / name).write_bytes(small(png))
                print(f"{folder / name}: {(folder / name).stat().st_size:,} bytes")
        finally:
            server.terminate()


if __name__ == "__main__":
    main()
