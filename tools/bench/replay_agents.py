"""Asks a server with the requests that `record_agent.py` recorded, and tells how much of each prompt was reused.

    edgellm build edgellm/shipped long --max-batch 2 --kv-capacity 20480 --beyond-trained-context \\
        --lora tools=edgellm/shipped/lora/tools
    edgellm serve long --port 8000
    python tools/bench/replay_agents.py http://127.0.0.1:8000 tests/goldens/agents/codex.json.xz

The history is the recorded one whatever the model answers; of its answers few tokens are asked for (`--tokens`), which
is the one thing that is changed. Two files, or one twice, are two conversations that take turns.
"""

from __future__ import annotations

import argparse
import json
import lzma
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from http.client import HTTPConnection
from itertools import zip_longest
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

#: The tokens of an answer, under the name that each endpoint has for them.
_LIMITS = {"/v1/messages": "max_tokens", "/v1/responses": "max_output_tokens"}


@dataclass(frozen=True)
class Turn:
    """The answer to a request: the tokens of its prompt, how many of them were reused, and the names of the fields that
    were ignored. `before` are the tokens of the prompt that the conversation had one turn earlier (0: none)."""

    prompt: int
    cached: int
    ignored: str
    before: int = 0

    @property
    def share(self) -> float:
        """How much of the prompt before was reused: its tokens are those of this prompt without the new messages."""
        return self.cached / self.before if self.before else 0.0


def read_recording(file: Path) -> dict[str, Any]:
    """What `record_agent.py` wrote: the agent, its version and licence, the task, and the requests in order."""
    found: dict[str, Any] = json.loads(lzma.decompress(file.read_bytes()))
    return found


def turns_of(recording: dict[str, Any]) -> list[dict[str, Any]]:
    """The requests of an agent's own conversation, without those for a title, which have no tools."""
    return [request for request in recording["requests"] if request["body"].get("tools")]


def renamed(request: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    """A request of another conversation: with another text where the recorded one has `old`."""
    found: dict[str, Any] = json.loads(json.dumps(request).replace(old, new))
    return found


def ask(url: str, request: dict[str, Any], tokens: int, before: int = 0) -> Turn:
    """The turn of a recorded request. Raises RuntimeError for what the server refuses, or where a stream fails."""
    host, path = urlsplit(url), request["path"]
    body = request["body"] | {_LIMITS[path.partition("?")[0]]: tokens}
    connection = HTTPConnection(host.hostname or "", host.port, timeout=600)
    connection.request("POST", path, json.dumps(body).encode(), request["headers"])
    response = connection.getresponse()
    said, ignored = response.read().decode(), response.getheader("edgellm-ignored", "")
    connection.close()
    if response.status != 200:
        raise RuntimeError(f"{path} was answered with {response.status}: {said}")
    events = [json.loads(line[6:]) for line in said.splitlines() if line.startswith("data: {")]
    ends = {"message_stop", "response.completed", "response.incomplete"}
    if not events or events[-1]["type"] not in ends:
        raise RuntimeError(f"{path}: the stream ended with {events[-1:] or said[-300:]}")
    usage = events[-1]["response"]["usage"] if "response" in events[-1] else events[-2]["usage"]
    if "input_tokens_details" in usage:
        return Turn(usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"], ignored, before)
    cached = usage["cache_read_input_tokens"]
    return Turn(usage["input_tokens"] + cached, cached, ignored, before)


def replay(url: str, conversations: Sequence[Sequence[dict[str, Any]]], tokens: int = 8) -> Iterator[tuple[int, Turn]]:
    """The turns of conversations that take turns, each with the conversation's number."""
    before = [0] * len(conversations)
    for requests in zip_longest(*conversations):
        for number, request in enumerate(requests):
            if request is not None:
                turn = ask(url, request, tokens, before[number])
                before[number] = turn.prompt
                yield number, turn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--all", action="store_true", help="ask for titles, too")
    given = parser.parse_args()
    recordings = [read_recording(file) for file in given.files]
    conversations = []
    for number, each in enumerate(recordings):
        requests = each["requests"] if given.all else turns_of(each)
        task = f"Task {number}: {each['task']}"
        conversations.append([renamed(request, each["task"], task) if number else request for request in requests])
    print("| agent | tokens | reused | of the prompt before | of the whole | ignored |\n|---|---|---|---|---|---|")
    for number, turn in replay(given.url, conversations, given.tokens):
        shares = f"{turn.share:.1%}" if turn.before else "", f"{turn.cached / turn.prompt:.1%}"
        name = f"{recordings[number]['agent']}{f' ({number})' if number else ''}"
        print(f"| {name} | {turn.prompt} | {turn.cached} | {' | '.join(shares)} | {turn.ignored} |", flush=True)


if __name__ == "__main__":
    main()
