"""What a client is asked to do: scenarios register themselves, and those of one client run in its own environment.

It imports nothing but the standard library and pydantic, which every client brings.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

#: What the server calls the shipped model, and its adapter that calls tools.
MODEL, TOOLS = "shipped", "tools"
WHERE, BATTERY, LOOK = "Where is the red cup?", "How full is your battery?", "Look at the yellow banana."
#: What the shipped model says to the first, and a picture with a ball.
PLACE = "front left"
TOYS = Path(__file__).parents[2] / "edgellm" / "shipped" / "scenes" / "toys.png"


class Seen(BaseModel):
    """What the robot saw."""

    model_config = ConfigDict(extra="forbid")
    colour: Literal["red", "blue"]
    certain: bool


@dataclass(frozen=True)
class Server:
    """Where the server is: of OpenAI's clients, and of Anthropic's and ollama's."""

    root: str

    @property
    def url(self) -> str:
        return f"{self.root}/v1"


_SCENARIOS: list[tuple[str, str, str, Callable[[Server], Any]]] = []


def scenario(client: str, endpoint: str, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function of a `Server`, perhaps asynchronous, which raises what a client does not get as it should."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _SCENARIOS.append((client, endpoint, name, function))
        return function

    return register


def is_place(text: Any) -> None:
    """Raise for another answer than the model's to `WHERE`."""
    assert isinstance(text, str) and PLACE in text, text


def refused(error: BaseException, *words: str) -> None:
    """Raise for an error that does not tell the server's own words."""
    assert all(word in str(error) for word in words), repr(error)


def run(function: Callable[[Server], Any], server: Server) -> str:
    """What goes wrong in a scenario; "" where nothing does."""
    try:
        found = function(server)
        if inspect.isawaitable(found):
            asyncio.run(_awaited(found))
    except BaseException as error:
        return f"{type(error).__name__}: {error}".splitlines()[0][:300] or type(error).__name__
    return ""


async def _awaited(found: Any) -> None:
    await found


def main() -> None:
    """Run the scenarios of the client that the first argument names at the server that the second one does; a line of
    JSON tells each outcome."""
    client, root = sys.argv[1:]
    for name, endpoint, what, function in _SCENARIOS:
        if name == client:
            outcome = {"endpoint": endpoint, "scenario": what, "wrong": run(function, Server(root))}
            print("OUTCOME", json.dumps(outcome), flush=True)
