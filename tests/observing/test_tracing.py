"""Traces: spans of real rounds, nested and in order; the command's file; nothing is changed or left behind."""

from __future__ import annotations

import inspect
import json
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fixed_shape_backend import FixedShapeBackend

from edgellm import LLM, DraftingConfig, SamplingParams
from edgellm.commands.app import run
from edgellm.decoding.loop import DecodingLoop
from edgellm.decoding.sequence import DecodingSequence
from edgellm.decoding.slot_table import SlotTable
from edgellm.drafting.drafter import FixedDrafter
from edgellm.engines.backends.numpy_backend import NumpyEngine, NumpyTimestamp
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.runners.base_runner import BaseEngineRunner
from edgellm.engines.runners.sampling_state import SamplingValues
from edgellm.engines.speculation.draft_plan import ACCEPTANCE, BASE_VERIFY, DRAFT_ACCEPT, DRAFT_PROPOSAL, DraftPlan
from edgellm.engines.speculation.runner import DecodingRunner
from edgellm.snapshots.contents import KVContents
from edgellm.text.output import OutputText
from edgellm.text.tokenizer import Tokenizer
from edgellm.tracing import (
    DECODE,
    DEVICE_TRACK,
    HOST_TRACK,
    LAUNCH,
    PREFILL,
    ROUND,
    SNAPSHOT,
    TOKENS,
    WAIT,
    ObservedRunner,
    Span,
    Trace,
)
from tools.bench.answering import answered

STAGES = [DRAFT_ACCEPT, DRAFT_PROPOSAL, BASE_VERIFY, ACCEPTANCE]
PROMPT = [(7 * index + 3) % 250 for index in range(21)]
CHAIN = DraftingConfig(kind="chain", draft_top_k=1, draft_steps=3, verify_tree_size=4, adaptive=False)


def traced_answer(directory: Path, drafting: DraftingConfig | None) -> tuple[Trace, Any]:
    """The trace of one answer, and the answer."""
    trace = Trace()
    with LLM(directory, backend="numpy", drafting=drafting) as llm:
        llm.observe(trace)
        response = llm.generate(PROMPT, SamplingParams(max_tokens=24, ignore_eos=True))
    return trace, response


class WorkClock:
    """The clock of a trace counts runs of NumPy engines instead of seconds, so that a busy machine changes nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runs, self._readings, compute = 0, 0, NumpyEngine.enqueue

        def counted(engine: NumpyEngine) -> None:
            compute(engine)
            self.runs += 1

        def begin(timestamp: NumpyTimestamp) -> None:
            timestamp._seconds = self.read()

        monkeypatch.setattr(NumpyEngine, "enqueue", counted)
        monkeypatch.setattr(NumpyTimestamp, "__init__", begin)
        monkeypatch.setattr("edgellm.tracing.time", SimpleNamespace(perf_counter=self.read))

    def read(self) -> float:
        """The runs so far; no two readings are equal, so that spans which follow each other do not touch."""
        self._readings += 1
        return self.runs + self._readings * 1e-7


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> WorkClock:
    return WorkClock(monkeypatch)


def work(span: Span) -> int:
    """How many engines ran while a span lasted, by the `WorkClock`."""
    return round(span.end - span.begin)


def on_track(trace: Trace, track: int) -> list[Span]:
    return sorted((span for span in trace.spans if span.track == track), key=lambda span: (span.begin, -span.end))


def inside(inner: Span, outer: Span) -> bool:
    return outer.begin <= inner.begin and inner.end <= outer.end


def test_each_round_is_its_stages_in_order(tiny_draft_engines: Path, clock: WorkClock) -> None:
    trace, response = traced_answer(tiny_draft_engines, CHAIN)
    device = on_track(trace, DEVICE_TRACK)
    assert device[0].name == PREFILL
    assert device[0].details | {"step": 0} == {"step": 0, "slot": 0, "prompt_tokens": 21, "reused_tokens": 0}
    rounds = [span for span in device if span.name == ROUND]
    assert len(rounds) == response.drafting.rounds > 3
    for span in rounds:
        stages = [each for each in device if each is not span and inside(each, span)]
        assert [each.name for each in stages] == STAGES
        assert all(earlier.end <= later.begin for earlier, later in pairwise(stages))
        accepting, proposing, verifying, choosing = map(work, stages)
        assert (accepting, verifying, choosing) == (1, 1, 0)
        assert work(span) == 2 + proposing, "an engine ran outside of the stages"
    assert max(map(work, rounds)) == 4, "a chain of 3 takes two more runs of the draft"
    assert sum(map(work, rounds)) + work(device[0]) == clock.runs, "an engine ran outside of prefill and rounds"


def test_observing_ends_when_it_is_told_to(tiny_draft_engines: Path) -> None:
    first, second, params = Trace(), Trace(), SamplingParams(max_tokens=8, ignore_eos=True)
    with LLM(tiny_draft_engines, backend="numpy", drafting=CHAIN) as llm:
        llm.observe(first)
        llm.generate(PROMPT, params)
        llm.observe(second)
        seen = len(first.spans)
        llm.generate(PROMPT, params)
        llm.observe(None)
        assert llm._runtime._open_runner()._steps.around is None, "rounds are one graph again"
        known = len(second.spans)
        llm.generate(PROMPT, params)
    assert len(first.spans) == seen > 0
    assert len(second.spans) == known > 0


def test_the_host_launches_waits_and_handles_what_came(tiny_draft_engines: Path, clock: WorkClock) -> None:
    trace, response = traced_answer(tiny_draft_engines, CHAIN)
    host = [span for span in on_track(trace, HOST_TRACK) if span.name != SNAPSHOT]
    assert [span.name for span in host] == [LAUNCH, WAIT, TOKENS] * (1 + response.drafting.rounds)
    assert all(earlier.end <= later.begin for earlier, later in pairwise(host)), "they overlap"
    assert [span.details["step"] for span in host[::3]] == list(range(1, 2 + response.drafting.rounds))
    assert sum(sum(span.details["tokens"]) for span in host[2::3]) >= response.usage.completion_tokens
    assert sum(map(work, host[::3])) == clock.runs > 0, "an engine ran that was not launched"


def test_plain_decoding_has_a_span_a_step(tiny_engines: Path) -> None:
    trace, response = traced_answer(tiny_engines, None)
    assert [span.name for span in on_track(trace, DEVICE_TRACK)] == [PREFILL] + [DECODE] * 23
    assert response.usage.completion_tokens == 24


@pytest.mark.parametrize("drafting", [CHAIN, None], ids=["draft", "plain"])
def test_answers_are_the_same_with_a_trace_and_without(
    tiny_draft_engines: Path, drafting: DraftingConfig | None
) -> None:
    with LLM(tiny_draft_engines, backend="numpy", drafting=drafting) as llm:
        expected = llm.generate(PROMPT, SamplingParams(max_tokens=24, ignore_eos=True))
    assert traced_answer(tiny_draft_engines, drafting)[1].token_ids == expected.token_ids


def captured_answer(directory: EngineDirectory, observed: bool) -> tuple[list[int], FixedShapeBackend, Trace]:
    """An answer on a backend that captures, with what it captured."""
    backend, trace = FixedShapeBackend(directory), Trace()
    runner = DecodingRunner.open(backend, directory)
    tokenizer = Tokenizer.from_directory(directory.path, directory.config.vocab_size)
    sequence = DecodingSequence(
        PROMPT, SamplingValues(), OutputText(tokenizer.detokenizer(), (), (), (), 24), max_tokens=24
    )
    plan = FixedDrafter(DraftPlan("chain", 1, 3, 4))
    contents = [KVContents() for _ in range(directory.limits.max_batch)]
    for _ in answered(
        DecodingLoop(SlotTable(ObservedRunner(runner, trace) if observed else runner, contents, drafter=plan)),
        [sequence],
    ):
        pass
    trace.finish()
    runner.close()
    return sequence.answer.token_ids, backend, trace


def test_a_captured_round_is_one_graph_unless_it_is_traced(tiny_draft_engines: Path) -> None:
    directory = EngineDirectory.open(tiny_draft_engines)
    expected, backend, _ = captured_answer(directory, observed=False)
    rounds = [name for name in backend.captures if "acceptance of" in name or name.startswith("the step RoundKey(")]
    assert rounds and not any(" of the step" in name for name in rounds)
    tokens, backend, trace = captured_answer(directory, observed=True)
    assert tokens == expected
    for stage in STAGES:
        assert sum(name.startswith(f"{stage} of the step") for name in backend.captures) == 1
    rounds = [span for span in trace.spans if span.name == ROUND]
    for stage in STAGES:
        assert sum(span.name == stage for span in trace.spans) == len(rounds) > 3


def test_an_observed_runner_has_all_that_the_loop_asks_of_one(tiny_draft_engines: Path) -> None:
    directory = EngineDirectory.open(tiny_draft_engines)
    runner = DecodingRunner.open(FixedShapeBackend(directory), directory)
    observed = ObservedRunner(runner, Trace())
    for name in ("base", "draft", "backend", "limits"):
        assert getattr(observed, name) is getattr(runner, name)
    methods = {name: method for name, method in vars(DecodingRunner).items() if inspect.isfunction(method)}
    methods["decode"] = BaseEngineRunner.decode
    for name, method in methods.items():
        if not name.startswith("_"):
            parameters = list(inspect.signature(method).parameters.values())[1:]
            arguments = {each.name: object() for each in parameters}
            inspect.signature(getattr(observed, name)).bind(**arguments)
    assert {"start", "round", "held", "copy_rows"} <= set(methods)
    observed.close()


def test_what_is_pending_is_read_as_it_grows_old() -> None:
    class Late:
        """A moment that is known when it is asked for."""

        asked = 0

        def seconds(self) -> float:
            Late.asked += 1
            return float(Late.asked)

    class Backend:
        name, timestamp = "late", staticmethod(Late)

    trace = Trace()
    for _ in range(600):
        with trace.device_span(Backend(), "step"):
            pass
    assert 0 < len(trace.spans) < 600
    trace.finish()
    assert len(trace.spans) == 600 and all(span.end - span.begin == 1 for span in trace.spans)


def test_the_command_writes_what_perfetto_opens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """On the shipped model: valid JSON, complete events of known tracks, nested as times say."""
    path = tmp_path / "trace.json"
    ask(["chat", "--draft", "--no-adaptive", "--trace", str(path), "--max-tokens", "12"], monkeypatch)
    assert f"spans is in {path}: open it at ui.perfetto.dev" in capsys.readouterr().err
    content = json.loads(path.read_text())
    events = [event for event in content["traceEvents"] if event["ph"] == "X"]
    assert {event["tid"] for event in events} == {DEVICE_TRACK, HOST_TRACK}
    names = [event["args"]["name"] for event in content["traceEvents"] if event["ph"] == "M"]
    assert names == ["numpy (device)", "host"]
    assert all(event["ts"] >= 0 and event["dur"] >= 0 and event["pid"] == events[0]["pid"] for event in events)
    assert {*STAGES, ROUND, PREFILL, LAUNCH, WAIT, TOKENS} <= {event["name"] for event in events}
    for track in (DEVICE_TRACK, HOST_TRACK):
        open_spans: list[float] = []
        for event in [event for event in events if event["tid"] == track]:
            begin, end = event["ts"], event["ts"] + event["dur"]
            while open_spans and open_spans[-1] <= begin:
                open_spans.pop()
            assert not open_spans or end <= open_spans[-1] + 1e-3, "a span ends outside of the one that it began in"
            open_spans.append(end)


def test_a_trace_that_cannot_be_written_is_refused_before_the_model_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setattr("edgellm.commands.models.open_model", lambda *_, **__: pytest.fail("the model was opened"))
    assert ask(["chat", "--trace", str(tmp_path / "no" / "trace.json")], monkeypatch) == 1
    assert "cannot be written: No such file or directory" in capsys.readouterr().err


def ask(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """Run a command with one question by pipe; its exit code."""
    import io

    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"What is on the table?\n")))
    with pytest.raises(SystemExit) as left:
        run(arguments)
    return left.value.code


@pytest.mark.gpu
def test_device_spans_of_a_gpu_are_in_order_and_on_the_hosts_clock(tiny_draft_engines: Path) -> None:
    """Timestamps come from events: each round's stages in order, all between the host's first and last reading."""
    started = time.perf_counter()
    trace = Trace()
    with LLM(tiny_draft_engines, backend="tensorrt", drafting=CHAIN) as llm:
        llm.observe(trace)
        answers = [llm.generate(PROMPT, SamplingParams(max_tokens=24, ignore_eos=True)) for _ in range(2)]
    ended = time.perf_counter()
    assert answers[0].token_ids == answers[1].token_ids
    device = on_track(trace, DEVICE_TRACK)
    assert all(started < span.begin <= span.end < ended for span in device)
    rounds = [span for span in device if span.name == ROUND]
    assert len(rounds) >= sum(answer.drafting.rounds for answer in answers)
    for outer in rounds:
        assert [span.name for span in device if span is not outer and inside(span, outer)] == STAGES
