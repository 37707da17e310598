"""Adapters where steps are captured: engines of fixed shapes, replayed as they were launched, without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fixed_shape_backend import FixedShapeBackend

from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.model.limits import EngineShape
from edgellm.engines.runners.base_runner import BaseEngineRunner
from edgellm.engines.runners.comparison import open_runner, teacher_forced_logits
from edgellm.engines.runners.following_logits import FollowingLogits
from edgellm.engines.runners.sampling_state import SamplingValues

PROMPT = [(7 * index + 3) % 250 for index in range(21)]


@contextmanager
def captured_runner(directory: EngineDirectory, with_adapters: bool) -> Iterator[tuple[BaseEngineRunner, Any, list]]:
    """A runner on a backend that captures, the backend, and the shapes of the engines that were loaded."""
    loaded: list[EngineShape] = []

    class Backend(FixedShapeBackend):
        def __init__(self) -> None:
            super().__init__(directory)
            self._shapes = set(directory.limits.all_engine_shapes())

        def load_engine(self, shape: EngineShape) -> Any:
            loaded.append(shape)
            return super().load_engine(shape)

        def host_memory(self, nbytes: int) -> np.ndarray:
            return np.empty((nbytes,), np.uint8)

    adapters = {name: adapter.read(directory.config) for name, adapter in directory.adapters.items()}
    backend = Backend()
    with directory.checkpoint() as checkpoint:
        runner = BaseEngineRunner(
            backend, directory.config, directory.limits, checkpoint, adapters=adapters if with_adapters else None
        )
    try:
        yield runner, backend, loaded
    finally:
        runner.close()


def answers(runner: BaseEngineRunner, names: tuple[str | None, ...]) -> list[list[int]]:
    """Greedy tokens of the prompt with another adapter in each slot, decoded together."""
    found = []
    for slot, name in enumerate(names):
        runner.set_adapter(slot, name)
        found.append(runner.start(slot, PROMPT, 0, SamplingValues()).wait().tolist())
    for _ in range(9):
        for tokens, token in zip(found, runner.decode(len(names)).wait().tolist(), strict=True):
            tokens.append(token)
    for slot in range(len(names)):
        runner.stop(slot)
    return found


@pytest.fixture
def directory(tiny_lora_engines: Path) -> EngineDirectory:
    return EngineDirectory.open(tiny_lora_engines)


def test_switches_keep_captured_steps_valid(directory: EngineDirectory) -> None:
    """One capture for all adapters, one for none; each replay computes with what the slots have by then."""
    with open_runner("numpy", directory, with_adapters=True) as plain:
        expected = {name: answers(plain, (name,))[0] for name in ("wide", "attention", "mlp", None)}
    assert len(set(map(tuple, expected.values()))) == 4
    order = ("wide", None, "mlp", "attention", None, "wide", "mlp", "wide", "attention", None, "mlp")
    with captured_runner(directory, True) as (runner, backend, _):
        for name in order:
            assert answers(runner, (name,)) == [expected[name]]
        assert len(backend.captures) == 2
        for names in (("wide", None, "mlp"), (None, "mlp", "wide"), (None, None, None), ("attention", "mlp", "mlp")):
            assert answers(runner, names) == [expected[name] for name in names]
        assert len(backend.captures) == 4


def test_logits_behind_a_text_s_tokens_are_those_of_the_adapter(directory: EngineDirectory) -> None:
    expected = {}
    with open_runner("numpy", directory, with_adapters=True) as plain:
        for name in ("wide", None):
            plain.set_adapter(0, name)
            expected[name] = teacher_forced_logits(plain, PROMPT[:4], PROMPT[4:])
            plain.set_adapter(1, name)
            found = np.concatenate([block.copy() for block in FollowingLogits(plain).blocks(1, PROMPT, 4)])
            np.testing.assert_allclose(found, expected[name], atol=1e-4)
    assert np.abs(expected["wide"] - expected[None]).max() > 0.1
    with captured_runner(directory, True) as (runner, _, _):
        following = FollowingLogits(runner)
        for name in ("wide", None, "wide"):
            runner.set_adapter(1, name)
            found = np.concatenate([block.copy() for block in following.blocks(1, PROMPT, 4)])
            np.testing.assert_allclose(found, expected[name], atol=1e-4)


def test_without_adapters_nothing_of_them_is_loaded(directory: EngineDirectory) -> None:
    with captured_runner(directory, False) as (runner, _, loaded):
        assert set(loaded) == set(directory.limits.engine_shapes())
        assert "LoRA adapters" not in runner.memory_plan.items
    with captured_runner(directory, True) as (runner, _, loaded):
        assert sorted(shape.name for shape in loaded) == sorted(
            shape.name for shape in directory.limits.all_engine_shapes()
        )
