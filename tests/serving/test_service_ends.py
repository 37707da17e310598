"""How requests and served models end before their time: cancellation, deadlines, failures, crashes, closing, forks."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from served_answers import LONG, SHORT, Answers, Pause, Slow, answer, check_before

from edgellm import LLM, SamplingParams
from edgellm.engines.backends.base import Engine
from edgellm.errors import AdapterError, EngineError, QueueFullError, RequestError
from edgellm.requests import Request


def test_a_full_queue_refuses_by_name(served: LLM, paused: Pause) -> None:
    with paused(served):
        generations = [served.stream("x", SHORT) for _ in range(8)]
        with pytest.raises(QueueFullError, match="8 requests are waiting"):
            served.stream("x", SHORT)
        generations.pop().cancel()
        generations.append(served.stream("x", SHORT))
        assert served.metrics()["requests_waiting"] == 8
    assert {generation.result().token_ids for generation in generations} == {served.generate("x", SHORT).token_ids}
    assert served.metrics()["requests"]["refused"] == 1
    many = served.handle([Request(prompt="x", params=SHORT)] * 30)
    assert {response.finish_reason for response in many} == {"length"}


@pytest.mark.parametrize("from_another_thread", [False, True])
def test_cancelling_ends_an_answer_at_the_next_round(served: LLM, from_another_thread: bool) -> None:
    expected = served.generate("hello", LONG)
    generation = served.stream("hello", LONG)

    def count_and_cancel() -> None:
        if generation.request_state.sequence.answer.token_count == 3:
            thread = threading.Thread(target=generation.cancel)
            if from_another_thread:
                thread.start()
                thread.join()
            else:
                thread.run()

    generation.on_change(count_and_cancel)
    response = generation.result()
    assert (response.finish_reason, response.usage.completion_tokens) == ("cancelled", 3)
    assert response.token_ids == expected.token_ids[:3]
    assert served.generate("hello", LONG).token_ids == expected.token_ids


def test_cancelling_what_waits_is_immediate(served: LLM, paused: Pause) -> None:
    with paused(served):
        generation = served.stream("x", LONG)
        generation.cancel()
        assert generation.finished
        assert (generation.result().finish_reason, generation.result().token_ids) == ("cancelled", ())
        assert list(generation) == []


def test_letting_go_of_a_request_and_leaving_its_block_cancel_it(served: LLM, slowed: Slow) -> None:
    slowed(served)
    with pytest.raises(ZeroDivisionError), served.stream("x", LONG) as generation:
        generation.next_chunk()
        raise ZeroDivisionError
    assert generation.result().finish_reason == "cancelled"
    forgotten = served.stream("x", LONG)
    request_state = forgotten.request_state
    forgotten.next_chunk()
    del forgotten
    with request_state.changed:
        assert request_state.changed.wait_for(lambda: request_state.ended, 10)
    assert request_state.response.finish_reason == "cancelled"


def test_deadlines(served: LLM, paused: Pause, slowed: Slow, monkeypatch: pytest.MonkeyPatch) -> None:
    slowed(served)
    with paused(served):
        late = served.stream("x", LONG, deadline=0.01)
        patient = served.stream("x", SHORT, deadline=60)
        time.sleep(0.02)
    assert (late.result().finish_reason, late.result().token_ids) == ("deadline", ())
    assert patient.result().finish_reason == "length"
    prepare = served._runtime._preparation.sequence

    def slow(*arguments: object) -> object:
        sequence = prepare(*arguments)
        time.sleep(0.02)  # as reading images takes
        return sequence

    with monkeypatch.context() as patched:
        patched.setattr(served._runtime._preparation, "sequence", slow)
        assert served.generate("x", LONG, deadline=0.02).token_ids == ()
    begun = served.stream("x", LONG, deadline=60)
    begun.next_chunk()
    begun.request_state.deadline = time.perf_counter()
    response = begun.result()
    assert response.finish_reason == "deadline"
    assert 1 <= response.usage.completion_tokens < 60
    for passed in (0, -1, -1e308):
        assert served.generate("x", LONG, deadline=passed).finish_reason == "deadline"
    for wrong in (float("nan"), float("inf"), 10**400, "1", True):
        with pytest.raises(RequestError, match="deadline"):
            served.stream("x", LONG, deadline=wrong)


def test_a_failing_request_does_not_touch_the_others(served: LLM, alone: Answers, paused: Pause) -> None:
    requests, expected = alone
    with paused(served):
        good = [served.submit(request) for request in requests[:5]]
        unknown = served.stream([5, 5000], LONG)
        broken = served.stream("x", LONG)
        detokenizer = broken.request_state.sequence.answer._detokenizer

        def fail(token: int) -> str:
            raise UnicodeError(f"no text for {token}")

        detokenizer.push = fail
    with pytest.raises(EngineError, match=r"0\.\.319"):
        unknown.result()
    with pytest.raises(UnicodeError, match="no text for"):
        list(broken)
    assert [answer(generation.result()) for generation in good] == expected[:5]
    results = served.handle([requests[0], Request(prompt=""), requests[1], Request(prompt="x", adapter="none")])
    assert [answer(results[0]), answer(results[2])] == expected[:2]
    assert isinstance(results[1], RequestError)
    assert isinstance(results[3], AdapterError)
    assert served.metrics()["requests"]["failed"] == 2
    with pytest.raises(RequestError, match="either a prompt or messages"):
        Request(prompt="x", messages=[])


def test_rows_of_a_snapshot_survive_a_failing_prompt_and_the_steps_of_others(
    served: LLM, serving_engines: Path, slowed: Slow
) -> None:
    """Steps for three sequences compute an idle fourth slot, too, which writes the row after its latest sequence."""
    system = served.cache_system_prompt("a system prompt of some length")
    known = list(system.token_ids)
    with LLM(serving_engines, backend="numpy", drafting=None) as llm:
        expected = llm.generate([*known, 65, 66], LONG).token_ids
    served.handle([Request(prompt=[index], params=SHORT) for index in range(4)])  # short ones in all slots
    slowed(served)
    running = [served.stream([index], SamplingParams(max_tokens=90, ignore_eos=True)) for index in range(3)]
    for generation in running:
        generation.next_chunk()
    with pytest.raises(EngineError, match=r"0\.\.319"):
        served.generate([*known, 5000], LONG)
    for _ in range(3):
        running[0].next_chunk()
    response = served.generate([*known, 65, 66], LONG)
    assert not running[0].finished
    assert response.usage.reused_tokens >= len(known) - 1
    assert response.token_ids == expected


def test_a_listener_that_fails_cancels_its_own_request(served: LLM) -> None:
    generation = served.stream("x", LONG)
    calls = []

    def wake() -> None:
        calls.append(None)
        if len(calls) > 2:
            raise RuntimeError("the listener is gone")

    generation.on_change(wake)
    assert generation.result().finish_reason == "cancelled"
    assert served.generate("x", SHORT).finish_reason == "length"


def test_a_failing_step_fails_what_runs_and_nothing_else(
    served: LLM, alone: Answers, paused: Pause, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests, expected = alone
    left = [3]

    def fail_once(engine: Engine) -> None:
        left[0] -= engine.shape.phase == "decode"
        if left[0] == 0:
            left[0] = -1
            raise MemoryError("no more")

    check_before(monkeypatch, fail_once)
    with paused(served):
        failing = [served.stream("x", LONG) for _ in range(4)]
        waiting = [served.submit(request) for request in requests[:4]]
    for generation in failing:
        with pytest.raises(EngineError, match="MemoryError: no more") as caught:
            generation.result()
        assert isinstance(caught.value.__cause__, MemoryError)
        assert len(list_of_ids(generation)) > 0
    assert [answer(generation.result()) for generation in waiting] == expected[:4]
    assert served.metrics()["requests_running"] == 0


def list_of_ids(generation: object) -> list[int]:
    return [token for chunk in generation.request_state.chunks for token in chunk.token_ids]


def test_a_crash_of_the_thread_is_told_to_everybody(
    serving_engines: Path, paused: Pause, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = LLM(serving_engines, backend="numpy", drafting=None)

    def fail(*_: object) -> None:
        raise OSError("the device is gone")

    with paused(served):
        generations = [served.stream("x", LONG) for _ in range(6)]
        monkeypatch.setattr(served._runtime._runner, "decode", fail)
        monkeypatch.setattr(served._runtime._runner, "stop", fail)
        call = served.call(lambda llm: llm.adapters)
    for generation in generations:
        with pytest.raises(EngineError, match="the device is gone") as caught:
            generation.result(10)
        assert isinstance(caught.value.__cause__, OSError)
    with pytest.raises(EngineError, match="the device is gone"):
        call.result(10)
    with pytest.raises(EngineError, match=r"thread has ended with OSError.*open the model anew"):
        served.generate("x", SHORT)
    served.close()
    assert served._thread.closed.done()


def test_closing_is_prompt_and_ends_everything(serving_engines: Path, slowed: Slow) -> None:
    before = {*threading.enumerate()}
    served = LLM(serving_engines, backend="numpy", drafting=None)
    slowed(served)
    generations = [served.stream("x", LONG) for _ in range(20)]
    generations[0].next_chunk()
    began = time.perf_counter()
    served.close()
    assert time.perf_counter() - began < 2
    served.close()
    assert {generation.result(0).finish_reason for generation in generations} <= {"cancelled", "length"}
    assert generations[-1].result(0).finish_reason == "cancelled"
    assert not {*threading.enumerate()} - before
    assert served._runtime._runner is None
    for use in (
        lambda: served.generate("x"),
        lambda: served.call(lambda llm: llm),
        lambda: served.submit(Request("x")),
    ):
        with pytest.raises(RequestError, match="closed"):
            use()


def test_a_model_that_cannot_be_opened(tmp_path: Path, serving_engines: Path) -> None:
    before = {*threading.enumerate()}
    with pytest.raises(Exception, match=str(tmp_path)):
        LLM(tmp_path)
    with pytest.raises(RequestError, match="queue_limit is 0"):
        LLM(serving_engines, queue_limit=0)
    deadline = time.perf_counter() + 5
    while {*threading.enumerate()} - before and time.perf_counter() < deadline:
        time.sleep(0.01)
    assert not {*threading.enumerate()} - before


FORK = """
import os, sys, time
from edgellm import EdgeLLMError, SamplingParams
from edgellm.llm import LLM
served = LLM(sys.argv[1], backend="numpy", drafting=None)
decode = served._runtime._runner.decode
served._runtime._runner.decode = lambda *others: (time.sleep(0.005), decode(*others))[1]
running = served.stream("x", SamplingParams(max_tokens=80, ignore_eos=True))
waiting = [served.stream("x") for _ in range(10)]
running.next_chunk()
child = os.fork()
if child == 0:
    for use in (lambda: served.generate("x"), waiting[-1].result, lambda: list(running), lambda: served.call(print)):
        try:
            use()
            os._exit(1)
        except EdgeLLMError as error:
            if "was forked" not in str(error):
                os._exit(2)
    served.close()
    os._exit(0)
_, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status), running.result().finish_reason)
"""


@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="this system has no fork")
def test_use_in_a_forked_process_is_a_clear_error(serving_engines: Path) -> None:
    """The process ends without `close`, too."""
    command = [sys.executable, "-c", FORK, str(serving_engines)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.split() == ["0", "length"], found.stderr
