"""Tiny models with several slots, served and alone."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fixed_shape_backend import FixedShapeBackend
from priority_driver import SLOTS as PRIORITY_SLOTS
from served_answers import Answer, Answers, answer

from edgellm import LLM, SamplingParams, SpecDecodeRuntime
from edgellm.drafting.config import DraftingConfig
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.building.inputs import read_decoder_config
from edgellm.engines.model.limits import EngineLimits
from edgellm.requests import Request

SLOTS = 4
DRAFTING = DraftingConfig(draft_top_k=4, draft_steps=3, verify_tree_size=12)


@pytest.fixture(scope="session")
def serving_engines(tiny_checkpoint: Path, tiny_draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine directory of the tiny checkpoint and its draft: four sequences at a time, context 96 tokens."""
    target = tmp_path_factory.mktemp("engines") / "serving"
    limits = EngineLimits(SLOTS, 16, 96, draft_top_k=4, draft_steps=3, verify_tree_size=12)
    build_engine_directory(tiny_checkpoint, target, limits, [], draft=tiny_draft)
    return target


@pytest.fixture(scope="session")
def priority_engines(
    tiny_checkpoint: Path, tiny_draft: Path, make_adapter: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Three slots, a draft, three adapters of which the engines hold two, context 96."""
    folder = tmp_path_factory.mktemp("priorities")
    config = read_decoder_config(tiny_checkpoint)
    adapters = {name: make_adapter(folder / name, config, seed) for seed, name in enumerate(("one", "two", "three"))}
    limits = EngineLimits(
        PRIORITY_SLOTS, 16, 96, draft_top_k=4, draft_steps=3, verify_tree_size=12, max_lora_rank=4, lora_slots=2
    )
    build_engine_directory(tiny_checkpoint, folder / "engines", limits, [], draft=tiny_draft, adapters=adapters)
    return folder / "engines"


@pytest.fixture
def plain_runtime(priority_engines: Path) -> Iterator[SpecDecodeRuntime]:
    """Those engines without drafting."""
    with SpecDecodeRuntime(priority_engines, backend="numpy") as opened:
        yield opened


@pytest.fixture(params=["plain", "drafted"])
def drafting(request: pytest.FixtureRequest) -> DraftingConfig | None:
    return DRAFTING if request.param == "drafted" else None


@pytest.fixture
def served(serving_engines: Path) -> Iterator[LLM]:
    """The model without its draft, with a short queue."""
    with LLM(serving_engines, backend="numpy", drafting=None, queue_limit=8) as opened:
        yield opened


@pytest.fixture
def runtime(serving_engines: Path, drafting: DraftingConfig | None) -> Iterator[SpecDecodeRuntime]:
    with SpecDecodeRuntime(serving_engines, drafting=drafting, backend="numpy") as opened:
        yield opened


@pytest.fixture
def captured(serving_engines: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., SpecDecodeRuntime]:
    """Opens a runtime on a backend that captures as the GPU does."""

    def open_runtime(drafting: DraftingConfig | None) -> tuple[SpecDecodeRuntime, FixedShapeBackend]:
        made: list[FixedShapeBackend] = []
        with monkeypatch.context() as patch:
            patch.setattr(
                "edgellm.opened_model.open_backend",
                lambda _, directory, *others: made.append(FixedShapeBackend(directory)) or made[-1],
            )
            return SpecDecodeRuntime(serving_engines, drafting=drafting), made.pop()

    return open_runtime


def varied_requests(count: int, seed: int = 0) -> list[Request]:
    """Requests of many kinds: lengths, greedy and sampled, penalties, stop strings, limits."""
    chosen, requests = random.Random(seed), []
    for index in range(count):
        prompt = [chosen.randrange(250) for _ in range(chosen.choice((1, 3, 9, 17, 40)))]
        params = SamplingParams(
            temperature=chosen.choice((0.0, 0.0, 0.8, 1.2)),
            top_k=chosen.choice((0, 20)),
            top_p=chosen.choice((1.0, 0.9)),
            repetition_penalty=chosen.choice((1.0, 1.1)),
            seed=index,
            max_tokens=chosen.choice((1, 4, 9, 16)),
            stop=chosen.choice(((), ("e",), ("ab", "zz"))),
            ignore_eos=chosen.random() < 0.5,
        )
        requests.append(Request(prompt=prompt, params=params))
    return requests


def answers_alone(engines: Path, requests: list[Request]) -> list[Answer]:
    """What each request gives by itself, without a draft: ids, text, finish reason."""
    with LLM(engines, backend="numpy", drafting=None) as llm:
        responses = [llm.generate(request.prompt, request.params) for request in requests]
    return [answer(response) for response in responses]


@pytest.fixture(scope="session")
def alone(serving_engines: Path) -> Answers:
    """Sixty requests and their answers."""
    requests = varied_requests(60)
    return requests, answers_alone(serving_engines, requests)


@pytest.fixture
def paused() -> Callable[[LLM], object]:
    """A context in which the model's thread waits, so that requests queue up."""

    @contextmanager
    def pause(served: LLM) -> Iterator[None]:
        reached, go_on = threading.Event(), threading.Event()
        result = served.call(lambda _: (reached.set(), go_on.wait()))
        reached.wait()
        try:
            yield
        finally:
            go_on.set()
            result.result()

    return pause


@pytest.fixture(scope="session")
def slowed() -> Callable[[LLM], None]:
    """Lets each round of a model take a while, so that what a test does meanwhile comes in time on a busy machine."""

    def slow_down(served: LLM) -> None:
        runner = served._runtime._runner

        def slow(step: Callable[..., object]) -> Callable[..., object]:
            return lambda *arguments: (time.sleep(0.005), step(*arguments))[1]

        runner.decode, runner.round = slow(runner.decode), slow(runner.round)

    return slow_down
