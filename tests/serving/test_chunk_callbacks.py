"""`SpecDecodeRuntime.handle_request` with `on_chunk`: each request's answer as it comes, in the thread that asks."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fixed_shape_backend import FixedShapeBackend
from served_answers import LONG, SHORT, Answers, answer

from edgellm import EdgeLLMError, Request, RequestError, SamplingParams, SpecDecodeRuntime
from edgellm.drafting.config import DraftingConfig
from edgellm.errors import EngineError
from edgellm.requests import Chunk
from tools.bench.answering import answered

Captured = Callable[[DraftingConfig | None], tuple[SpecDecodeRuntime, FixedShapeBackend]]
Failing = Callable[[SpecDecodeRuntime], tuple[Callable[[], None], list[object]]]


def joined(chunks: list[Chunk]) -> tuple[str, tuple[int, ...]]:
    return "".join(chunk.text for chunk in chunks), tuple(token for chunk in chunks for token in chunk.token_ids)


def idle(runtime: SpecDecodeRuntime) -> bool:
    return not any(runtime._open_runner().base.lengths)


def test_one_request(runtime: SpecDecodeRuntime) -> None:
    """It comes piece by piece, in this thread."""
    chunks: list[Chunk] = []
    rounds, threads, counted = [], set(), runtime.metrics.round

    def count() -> None:
        counted()
        rounds.append(len(chunks))

    def on_chunk(chunk: Chunk) -> None:
        chunks.append(chunk)
        threads.add(threading.current_thread())

    runtime.metrics.round = count
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=20, ignore_eos=True, logprobs=1)
    expected = runtime.handle_request(Request("hello", params=params))
    rounds.clear()
    response = runtime.handle_request(Request("hello", params=params), on_chunk)
    assert answer(response) == answer(expected)
    assert joined(chunks) == (response.text, response.token_ids)
    assert tuple(each for chunk in chunks for each in chunk.logprobs) == response.logprobs
    assert threads == {threading.current_thread()}
    assert rounds == list(range(len(rounds))) and len(rounds) >= 5  # each round's chunk comes before the next round
    flags = [flag for chunk in chunks for flag in chunk.from_draft]
    assert len(flags) == 20
    if response.drafting is not None:
        assert sum(flags) - response.drafting.accepted_tokens in (
            0,
            1,
        )  # the last round may be cut before its own token


def test_several_have_each_their_own(runtime: SpecDecodeRuntime, alone: Answers) -> None:
    """Lengths, sampling, penalties, limits and stop strings differ; one has no callback, others fail or are late."""
    requests, expected = alone
    asked = [*requests[:12], Request([5000]), Request("x", adapter="none"), Request("x", params=LONG, deadline=1e-9)]
    chunks: list[list[Chunk]] = [[] for _ in asked]
    callbacks = [None if index == 4 else each.append for index, each in enumerate(chunks)]
    results = runtime.handle_request(asked, callbacks)
    assert [answer(result) for result in results[:12]] == expected[:12]
    assert not chunks[4]
    for result, got in zip(results[:4] + results[5:12], chunks[:4] + chunks[5:12], strict=True):
        assert joined(got) == (result.text, result.token_ids)
    assert all(isinstance(result, EdgeLLMError) for result in results[12:14])
    assert results[14].finish_reason == "deadline"
    assert not any(chunks[12:])
    assert runtime.handle_request([], []) == []


def test_those_that_run_together_take_turns(runtime: SpecDecodeRuntime) -> None:
    """What waits for a place begins when another has ended."""
    order: list[int] = []
    slots = runtime.directory.limits.max_batch
    asked = [Request([index], params=SHORT if index else LONG) for index in range(slots + 1)]
    results = runtime.handle_request(asked, [lambda _, index=index: order.append(index) for index in range(slots + 1)])
    assert [result.finish_reason for result in results] == ["length"] * (slots + 1)
    before, after = order[: order.index(slots)], order[order.index(slots) :]
    assert set(before) == set(range(slots))
    assert 0 in after and not set(range(1, slots)) <= set(after)


def raising_at(count: int, error: BaseException) -> Callable[[Chunk], None]:
    """Raises with the chunk that completes so many tokens, and fails the test if it is called once more."""
    left = [count]

    def on_chunk(chunk: Chunk) -> None:
        assert left[0] > 0, "called again after it has raised"
        left[0] -= len(chunk.token_ids)
        if left[0] <= 0:
            raise error

    return on_chunk


@pytest.mark.parametrize("count", [1, 7, 60])
def test_a_callback_that_raises_ends_its_request_alone(runtime: SpecDecodeRuntime, alone: Answers, count: int) -> None:
    """With its first token (of two that the first round gives), among others, and with its last."""
    requests, expected = alone
    chunks: list[list[Chunk]] = [[] for _ in range(6)]
    error = ZeroDivisionError("the display is gone")
    asked = [Request("hello", params=LONG), *requests[:6]]
    callbacks = [each.append for each in chunks]
    callbacks.insert(0, raising_at(count, error))
    results = runtime.handle_request(asked, callbacks)
    assert results.pop(0) is error
    assert [answer(result) for result in results] == expected[:6]
    assert [joined(each) for each in chunks] == [(text, ids) for ids, text, _ in expected[:6]]
    assert idle(runtime)
    with pytest.raises(ZeroDivisionError) as caught:
        runtime.handle_request(asked[0], raising_at(count, error))
    assert caught.value is error
    assert idle(runtime)
    assert answer(runtime.handle_request(requests[0])) == expected[0]


def test_an_interrupt_in_a_callback_unwinds_everything(runtime: SpecDecodeRuntime) -> None:
    expected = runtime.handle_request(Request("hello", params=SHORT)).token_ids
    slots = runtime.directory.limits.max_batch
    with pytest.raises(KeyboardInterrupt):
        runtime.handle_request(
            [Request("hello", params=LONG)] * (slots + 2),
            [None, lambda _: os.kill(os.getpid(), signal.SIGINT)] + [None] * slots,
        )
    assert idle(runtime)
    again = runtime.handle_request([Request("hello", params=SHORT)] * slots)
    assert {response.token_ids for response in again} == {expected}


def test_callbacks_while_steps_run_ahead(
    captured: Captured, runtime: SpecDecodeRuntime, drafting: DraftingConfig | None, alone: Answers
) -> None:
    """A step is under way on the device when a callback runs, and when its request is taken out."""
    requests, expected = alone
    error = ZeroDivisionError("the display is gone")
    ahead, _ = captured(drafting)
    with ahead:
        chunks: list[list[Chunk]] = [[] for _ in range(6)]
        callbacks = [each.append for each in chunks]
        callbacks.insert(1, raising_at(5, error))
        results = ahead.handle_request([requests[0], Request("hello", params=LONG), *requests[1:6]], callbacks)
        assert results.pop(1) is error
        assert [answer(result) for result in results] == expected[:6]
        assert [joined(each) for each in chunks] == [(text, ids) for ids, text, _ in expected[:6]]
        assert idle(ahead)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Failing:
    """Of a runtime: a function after which the steps that are under way fail when they are waited for, and those that
    did."""

    def prepare(runtime: SpecDecodeRuntime) -> tuple[Callable[[], None], list[object]]:
        runner, launched, doomed, failed = runtime._open_runner(), [], [], []

        def observed(step: Callable[..., Any]) -> Callable[..., Any]:
            def observed_step(*arguments: object) -> Any:
                launched.append(step(*arguments))
                latest, wait = launched[-1], launched[-1].wait

                def wait_or_fail() -> object:
                    if latest in doomed:
                        failed.append(latest)
                        raise MemoryError("no more")
                    launched.remove(latest)
                    return wait()

                latest.wait = wait_or_fail
                return latest

            return observed_step

        for name in ("decode", "round"):
            monkeypatch.setattr(runner, name, observed(getattr(runner, name)))
        return lambda: doomed.extend(launched), failed

    return prepare


def test_an_interrupt_frees_the_slots_where_the_step_under_way_fails(
    captured: Captured, drafting: DraftingConfig | None, failing: Failing
) -> None:
    ahead, _ = captured(drafting)
    with ahead:
        slots = ahead.directory.limits.max_batch
        expected = ahead.handle_request(Request("hello", params=LONG)).token_ids
        fail_steps, failed = failing(ahead)

        def interrupt(chunk: Chunk) -> None:
            fail_steps()
            raise KeyboardInterrupt

        others = [Request([index], params=LONG) for index in range(slots - 1)]
        with pytest.raises(KeyboardInterrupt):
            ahead.handle_request([*others, Request("hello", params=LONG)], [None] * (slots - 1) + [interrupt])
        assert len(failed) == 1 and idle(ahead)
        again = ahead.handle_request([Request("hello", params=LONG)] * slots)
        assert {response.token_ids for response in again} == {expected}
        assert again[0].usage.reused_tokens == 0


def test_rows_are_not_kept_where_the_step_under_way_fails(
    captured: Captured, runtime: SpecDecodeRuntime, drafting: DraftingConfig | None, failing: Failing
) -> None:
    """Who closes the loop's iterator keeps them otherwise."""
    ahead, _ = captured(drafting)
    with ahead:
        fail_steps, failed = failing(ahead)
        for fails, prompt in ((False, [1, 2, 3]), (True, [9, 8, 7])):
            request = Request(prompt, params=LONG)
            tokens = answered(ahead.loop(), [ahead.prepare(request)])
            next(tokens)
            if fails:
                fail_steps()
            tokens.close()
            assert len(failed) == fails and idle(ahead)
            response = ahead.handle_request(request)
            assert response.token_ids == runtime.handle_request(request).token_ids
            assert (response.usage.reused_tokens == 0) is fails


def test_what_waits_is_answered_where_the_engine_fails_twice(
    captured: Captured, drafting: DraftingConfig | None, failing: Failing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step cannot be launched, and the one before, which is under way, fails too."""
    ahead, _ = captured(drafting)
    with ahead:
        slots = ahead.directory.limits.max_batch
        expected = ahead.handle_request(Request("hello", params=SHORT))
        fail_steps, failed = failing(ahead)
        runner = ahead._open_runner()
        name = "decode" if drafting is None else "round"
        step = getattr(runner, name)

        def fail_once(*arguments: object) -> object:
            monkeypatch.setattr(runner, name, step)
            raise MemoryError("no room")

        def fail_both(chunk: Chunk) -> None:
            fail_steps()
            monkeypatch.setattr(runner, name, fail_once)

        asked = [Request([index], params=LONG) for index in range(slots)] + [Request("hello", params=SHORT)]
        results = ahead.handle_request(asked, [fail_both] + [None] * slots)
        assert len(failed) == 1
        assert all(isinstance(result, EngineError) for result in results[:slots])
        assert answer(results[slots]) == answer(expected)


@pytest.mark.parametrize(
    ("on_chunk", "message"),
    [
        (print, "on_chunk is a builtin_function_or_method: expected a list with a callable or None for each of the 2"),
        ([print], "on_chunk has 1 entries: expected a list with a callable or None for each of the 2 requests"),
        ([print] * 3, "on_chunk has 3 entries"),
        ([None, "print"], r"on_chunk\[1\] is a str: expected a callable that takes a Chunk, or None"),
        ("ab", "on_chunk is a str: expected a list"),
        (iter([print, print]), "on_chunk is a list_iterator: expected a list"),
    ],
)
def test_wrong_callbacks_are_refused_before_anything_starts(
    runtime: SpecDecodeRuntime, on_chunk: object, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        runtime.handle_request([Request("x"), Request("y")], on_chunk)
    with pytest.raises(RequestError, match="on_chunk is a list: expected a callable that takes a Chunk, or None"):
        runtime.handle_request(Request("x"), [print])
    assert runtime.metrics.snapshot()["requests"]["accepted"] == 0


def test_a_callback_cannot_use_the_runtime_that_calls_it(runtime: SpecDecodeRuntime, tmp_path: Path) -> None:
    """Not to close it either: it is computing."""
    expected = runtime.handle_request(Request("hello", params=LONG)).token_ids
    for use in (lambda _: runtime.close(), lambda _: runtime.handle_request(Request("x"))):
        refused, answered = runtime.handle_request([Request("hello", params=LONG)] * 2, [use, None])
        assert isinstance(refused, RequestError) and "calls on_chunk" in str(refused)
        assert answered.token_ids == expected
