"""The server's page in a browser, used as a person would."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from http_server import ServerProcess

from tools.docs.browser import NAMES, Page, find_browser

TURN = "document.querySelectorAll('#turns > li')"


@contextmanager
def opened(server: ServerProcess, *options: str, host: str | None = None) -> Iterator[Page]:
    """The server's page in a browser of its own, which at the end has asked nobody else and seen nothing wrong."""
    if find_browser() is None:
        pytest.skip(f"no browser on this system: expected one of {', '.join(NAMES)}")
    with Page(*options) as page:
        origin = f"http://{host or server.host}:{server.port}"
        page.open(f"{origin}/")
        yield page
        page.evaluate("1")  # what was noted meanwhile is read
        foreign = [url for url in page.requested if not url.startswith((f"{origin}/", "data:image/", "about:"))]
        assert not foreign and not page.wrong


def ask(page: Page, text: str) -> None:
    page.fill("#question", text)
    page.wait_for("!document.getElementById('send').disabled")
    page.press("Enter")


def answer(page: Page, turn: int = 0) -> str:
    """The text of an answer, as soon as it is there as a whole."""
    page.wait_for(f"{TURN}[{turn}]?.querySelector('.answered').ariaBusy === 'false'")
    return page.evaluate(f"{TURN}[{turn}].querySelector('.said').innerText")


def facts(page: Page, turn: int = 0) -> str:
    return page.evaluate(f"{TURN}[{turn}].querySelector('.facts').innerText")


def streamed(*deltas: dict[str, Any], end: str = "data: [DONE]\n\n") -> bytes:
    events = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}], "usage": None} for delta in deltas]
    return ("".join(f"data: {json.dumps(each)}\n\n" for each in events) + end).encode()
