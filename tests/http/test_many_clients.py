"""Clients that share a server's slots: one that floods it keeps nobody waiting, and no answer changes or is lost."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from http_server import ServerProcess, running, wait_for

from edgellm import LLM, Request, SamplingParams
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.model.limits import EngineLimits

LONG, SHORT, FLOOD = 600, 30, 3
KEYS = {"flood": "1" * 32, "other": "2" * 32}
ADDRESSES = {"flood": "192.0.2.1", "other": "192.0.2.2"}


@pytest.fixture(scope="module")
def engines(make_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with two slots."""
    folder = tmp_path_factory.mktemp("slots")
    checkpoint = make_checkpoint(folder / "checkpoint", max_position_embeddings=1024)
    build_engine_directory(checkpoint, folder / "robot", EngineLimits(2, 128, 1024), [])
    return folder / "robot"


@pytest.fixture(scope="module")
def undisturbed(engines: Path) -> list[str]:
    """The answers to the flood where nobody else asks."""
    with LLM(engines, backend="numpy") as llm:
        params = [SamplingParams(temperature=1, max_tokens=LONG, ignore_eos=True, seed=seed) for seed in range(FLOOD)]
        return [each.text for each in llm.handle([Request("A", params=each) for each in params])]


@pytest.mark.parametrize("told_apart_by", ["key", pytest.param("forwarded address", marks=pytest.mark.slow)])
def test_one_that_floods_keeps_another_from_no_slot(
    engines: Path, undisturbed: list[str], told_apart_by: str, tmp_path: Path
) -> None:
    """The other one's answers, streamed and two of a request, have all come before any of the flood's ends: of these
    two run, and one waits."""
    (tmp_path / "keys").write_text("\n".join(KEYS.values()))
    by_key = told_apart_by == "key"
    options = ("--api-key-file", tmp_path / "keys") if by_key else ("--trusted-proxy", "127.0.0.1")

    with (
        running(engines, *options, "--log-level", "info", key=KEYS["other"]) as server,
        ThreadPoolExecutor(FLOOD) as pool,
    ):

        def ask(client: str, tokens: int, **more: Any) -> Any:
            body = {"model": "robot", "prompt": "A", "max_tokens": tokens, "ignore_eos": True, "temperature": 1, **more}
            told = {"authorization": f"Bearer {KEYS[client]}"} if by_key else {"x-forwarded-for": ADDRESSES[client]}
            status, answer, _ = server.ask("POST", "/v1/completions", body, told)
            assert status == 200, answer
            return joined(answer) if "stream" in more else [each["text"] for each in answer["choices"]]

        alone = ask("other", SHORT, seed=7, n=2), ask("other", SHORT, seed=7, stream=True)
        ended = server.metric("requests_ended_total")
        flood = [pool.submit(ask, "flood", LONG, seed=seed) for seed in range(FLOOD)]
        wait_for(lambda: server.metric("requests_running") == 2 and server.metric("requests_waiting") == FLOOD - 2)
        for number in range(2):
            assert ask("other", SHORT, seed=7, n=2) == alone[0]
            assert ask("other", SHORT, seed=7, stream=True) == alone[1]
            assert server.metric("requests_ended_total") - ended == 3 * (number + 1), (
                "an answer of the flood was awaited"
            )
        assert 2 <= server.metric("preemptions_by_equals_total") <= 6
        assert [each.result(60) for each in flood] == [[text] for text in undisturbed]
        assert "request gave way to another client's" in server.said
        assert left_over(server) == 0


def joined(stream: str) -> str:
    """The text of a stream."""
    events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    return "".join(event["choices"][0]["text"] for event in events)


def left_over(server: ServerProcess) -> float:
    """What is waiting, running or kept."""
    return sum(map(server.metric, ("requests_running", "requests_waiting", "requests_preempted", "preempted_bytes")))
