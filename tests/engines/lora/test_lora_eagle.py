"""Drafting with adapters on NumPy: the draft is unadapted, the base verifies with each sequence's adapter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fixed_shape_backend import FixedShapeBackend
from runner_steps import take_step

from edgellm.engines.backends.base import Backend
from edgellm.engines.backends.opening import open_backend
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.building.inputs import read_decoder_config
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.runners.sampling_state import SamplingValues
from edgellm.engines.speculation.draft_plan import DraftPlan, chain, tree
from edgellm.engines.speculation.runner import DecodingRunner

LIMITS = EngineLimits(3, 16, 96, draft_top_k=4, draft_steps=3, verify_tree_size=12, max_lora_rank=4, lora_slots=2)
NAMES = ("first", "second", None)
PROMPTS = [[(7 * index + 3 * seed) % 250 for index in range(length)] for seed, length in enumerate((20, 3, 33))]
SAMPLINGS = {"greedy": SamplingValues(), "sampled": SamplingValues(temperature=1.0, top_p=0.9, seed=11)}
COUNT = 24


@pytest.fixture(scope="module")
def directory(
    tmp_path_factory: pytest.TempPathFactory,
    make_checkpoint: Callable[..., Path],
    make_draft: Callable[..., Path],
    make_adapter: Callable[..., Path],
) -> EngineDirectory:
    folder = tmp_path_factory.mktemp("lora_eagle")
    base, draft = make_checkpoint(folder / "base", 4), make_draft(folder / "draft", 4)
    config = read_decoder_config(base)
    adapters = {name: make_adapter(folder / name, config, seed) for seed, name in enumerate(("first", "second"))}
    build_engine_directory(base, folder / "engines", LIMITS, [], draft=draft, adapters=adapters)
    return EngineDirectory.open(folder / "engines")


def opened(directory: EngineDirectory, backend: Backend) -> DecodingRunner:
    read = {name: adapter.read(directory.config) for name, adapter in directory.adapters.items()}
    return DecodingRunner.open(backend, directory, adapters=read)


@pytest.fixture(scope="module")
def runner(directory: EngineDirectory) -> Iterator[DecodingRunner]:
    runner = opened(directory, open_backend("numpy", directory))
    yield runner
    runner.close()


def answers(
    runner: DecodingRunner, names: tuple[str | None, ...], plan: DraftPlan | None, sampling: SamplingValues
) -> list[list[int]]:
    """The first tokens of a prompt in each slot, each with its own adapter, all drafted by one plan."""
    found = []
    for slot, (name, prompt) in enumerate(zip(names, PROMPTS, strict=False)):
        runner.base.set_adapter(slot, name)
        found.append(runner.start(slot, prompt, 0, sampling).wait().tolist())
    while min(map(len, found)) < COUNT:
        for tokens, emitted in zip(found, take_step(runner, len(names), plan).wait(), strict=True):
            tokens.extend(emitted)
    for slot in range(len(names)):
        runner.stop(slot)
    return [tokens[:COUNT] for tokens in found]


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_drafting_changes_no_token_under_an_adapter(runner: DecodingRunner, sampling: SamplingValues) -> None:
    plain = {name: answers(runner, (name,), None, sampling) for name in NAMES}
    assert len({tuple(tokens[0]) for tokens in plain.values()}) == len(NAMES)
    for plan, names in ((chain(3), NAMES), (tree(4, 3, 12), tuple(reversed(NAMES)))):
        for name in names:
            assert answers(runner, (name,), plan, sampling) == plain[name]


def test_what_is_captured_without_adapters_in_use_applies_them(
    directory: EngineDirectory, runner: DecodingRunner
) -> None:
    """Rounds and plain steps are captured before any sequence has an adapter."""
    captured, plan = opened(directory, FixedShapeBackend(directory)), tree(4, 3, 12)
    captured.plan_captures([plan])
    while captured.capture_next():
        pass
    assert captured._steps.captures and not captured.uncaptured
    for each in (plan, None):
        names: tuple[str | None, ...] = ("first", None)
        assert answers(captured, names, each, SAMPLINGS["greedy"]) == answers(runner, names, each, SAMPLINGS["greedy"])
    captured.close()
