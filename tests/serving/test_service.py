"""A served model: equality with single requests, queueing, chunks, sessions."""

from __future__ import annotations

import logging
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from served_answers import LONG, SHORT, Answers, Pause, Slow, answer

from edgellm import LLM, SamplingParams
from edgellm.drafting.config import DraftingConfig
from edgellm.errors import RequestError
from edgellm.generation import UNREAD_CHUNKS


def test_answers_equal_those_of_single_requests_in_every_order(
    serving_engines: Path, alone: Answers, drafting: DraftingConfig | None
) -> None:
    requests, expected = alone
    with LLM(serving_engines, backend="numpy", drafting=drafting) as served:
        for seed, group in ((0, 60), (1, 8), (2, 3)):
            order = list(range(len(requests)))
            random.Random(seed).shuffle(order)
            order = order[: 60 if group == 60 else 24]
            for start in range(0, len(order), group):
                part = order[start : start + group]
                found = served.handle([requests[index] for index in part])
                assert [answer(response) for response in found] == [expected[index] for index in part]
        snapshot = served.metrics()
    generation = snapshot["vanilla_generation" if drafting is None else "eagle_generation"]
    assert generation["requests"] == snapshot["requests"]["accepted"] == 108
    assert snapshot["rounds"] < generation["tokens"]


def test_steps_launched_ahead_change_nothing(
    serving_engines: Path, alone: Answers, drafting: DraftingConfig | None
) -> None:
    """As on a GPU: the next step is under way when the tokens of one are read, and when requests come and go."""
    requests, expected = alone
    with LLM(serving_engines, backend="numpy", drafting=drafting) as served:
        served.call(lambda runtime: setattr(runtime._runner.backend, "steps_ahead", 1)).result()
        generations = []
        for index, request in enumerate(requests):
            generations.append(served.submit(request))
            if index % 7 == 3:
                served.stream([index, 2, 3], LONG).next_chunk()  # let go of, so cancelled, at once
            if index % 5 == 0:
                generations[-1].result()
        assert [answer(generation.result()) for generation in generations] == expected


def test_chunks_are_the_answer(serving_engines: Path, alone: Answers, drafting: DraftingConfig | None) -> None:
    requests, expected = alone
    with LLM(serving_engines, backend="numpy", drafting=drafting) as served:
        generations = [served.submit(request) for request in requests[:20]]
        for generation, (ids, text, reason) in zip(generations, expected, strict=False):
            chunks = list(generation)
            response = generation.result()
            assert "".join(chunk.text for chunk in chunks) == text
            assert tuple(token for chunk in chunks for token in chunk.token_ids) == ids
            flags = [flag for chunk in chunks for flag in chunk.from_draft]
            assert (len(flags), response.finish_reason) == (len(ids), reason)
            assert drafting is not None or not any(flags)
            gaps = response.timings.step_gaps
            assert sum(gaps) == pytest.approx(response.timings.decode_seconds, abs=1e-6)
            assert 0 <= response.timings.queue_seconds <= response.timings.time_to_first_token


def test_drafted_tokens_are_named() -> None:
    with LLM(backend="numpy", drafting=DraftingConfig(1, 5, 6, kind="chain")) as served:
        generation = served.stream_chat(
            [{"role": "user", "content": "What can you do?"}], SamplingParams(max_tokens=40)
        )
        chunks = list(generation)
    statistics = generation.result().drafting
    flags = [flag for chunk in chunks for flag in chunk.from_draft]
    assert len(flags) == generation.result().usage.completion_tokens
    # Where the answer ends with a drafted token, the round's own token lies behind its end.
    assert sum(flags) - statistics.accepted_tokens in (0, 1)
    assert sum(flags) > len(flags) / 2
    assert len(chunks) == 1 + statistics.rounds + statistics.plain_steps


def test_a_request_joins_while_another_runs(served: LLM, slowed: Slow) -> None:
    slowed(served)
    expected = served.generate("short", SHORT)
    long = served.stream("a long story", SamplingParams(max_tokens=80, ignore_eos=True))
    assert long.next_chunk() is not None
    short = served.generate("short", SHORT)
    assert not long.finished
    assert short.token_ids == expected.token_ids
    assert long.result().usage.completion_tokens == 80


def test_a_reader_that_stops_blocks_nobody(served: LLM, paused: Pause) -> None:
    unread = served.stream("unread", SamplingParams(max_tokens=85, ignore_eos=True))
    assert served.generate("x", SHORT).finish_reason == "length"
    response = unread.result()
    chunks = list(unread)
    assert len(chunks) == UNREAD_CHUNKS < response.usage.completion_tokens
    assert tuple(token for chunk in chunks for token in chunk.token_ids) == response.token_ids
    assert "".join(chunk.text for chunk in chunks) == response.text
    assert unread.poll() is None
    with paused(served), pytest.raises(TimeoutError):
        served.stream("x", LONG).result(timeout=0)


def test_calls_have_the_model_for_themselves(served: LLM) -> None:
    generation = served.stream("x", LONG)
    assert served.call(lambda llm: (threading.current_thread().name, served._thread.running)).result() == (
        "edgellm-engine",
        0,
    )
    assert generation.finished
    with pytest.raises(RequestError, match="no draft model is loaded"):
        served.use_drafting(DraftingConfig())
    assert served.generate("x", SHORT).finish_reason == "length"


def test_logging_is_quiet_by_default_and_structured_on_request(
    serving_engines: Path, caplog: pytest.LogCaptureFixture
) -> None:
    program = (
        "import sys\nfrom edgellm import LLM\n"
        "served = LLM(sys.argv[1], backend='numpy', drafting=None)\n"
        "generation = served.stream([5000])\n"
        "try:\n    generation.result()\nexcept Exception as error:\n    print(type(error).__name__)\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", program, str(serving_engines)], capture_output=True, text=True, timeout=60, check=True
    )
    assert (found.stdout, found.stderr) == ("EngineError\n", "")
    with (
        caplog.at_level(logging.INFO, "edgellm.serving"),
        LLM(serving_engines, backend="numpy", drafting=None) as served,
    ):
        served.generate("x", SHORT)
    (record,) = [record for record in caplog.records if record.name == "edgellm.serving"]
    assert record.edgellm["outcome"] == "length"
    assert record.edgellm["completion_tokens"] == 5
