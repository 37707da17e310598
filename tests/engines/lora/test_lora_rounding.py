"""The bound that the GPU's adapter tests take from a dtype's rounding: right without rounding, and narrow enough."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from rounded_arithmetic import Distance, open_rounded_runner
from tiny_families import FAMILIES, PROMPT

from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.building.inputs import read_decoder_config
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.runners.base_runner import BaseEngineRunner
from edgellm.engines.runners.comparison import greedy_tokens, open_runner, teacher_forced_logits

NAMES = ("wide", "attention")


@pytest.fixture
def build(tmp_path: Path, make_checkpoint: Callable[..., Path], make_adapter: Callable[..., Path]) -> Callable:
    """(family, dtype) to an engine directory without plans, with two adapters."""

    def make(family: str, dtype: str) -> EngineDirectory:
        checkpoint = make_checkpoint(tmp_path / "checkpoint", 1, **FAMILIES[family])
        config = read_decoder_config(checkpoint)
        adapters = {
            "wide": make_adapter(tmp_path / "wide", config, 1, 12),
            "attention": make_adapter(tmp_path / "attention", config, 2, 3, ("q_proj", "v_proj")),
        }
        limits = EngineLimits(2, 16, 96, max_lora_rank=12, lora_slots=2)
        build_engine_directory(checkpoint, tmp_path / "engines", limits, [], dtype, adapters=adapters)
        return EngineDirectory.open(tmp_path / "engines")

    return make


def logits_of(runner: BaseEngineRunner, name: str, answer: list[int] | None = None) -> tuple[np.ndarray, list[int]]:
    """Logits along `answer` (None: the greedy one) with an adapter, and the answer."""
    if answer is None:
        runner.set_adapter(0, name)
        answer = greedy_tokens(runner, PROMPT, 12)
    runner.set_adapter(0, name)  # a sequence's end has taken it away
    return teacher_forced_logits(runner, PROMPT, answer), answer


@pytest.mark.parametrize("family", ["llama_biases", "qwen2", "qwen3"])
def test_without_rounding_the_arithmetic_is_the_numpy_backends(family: str, build: Callable) -> None:
    directory = build(family, "float32")
    with open_runner("numpy", directory, with_adapters=True) as runner:
        expected = [logits_of(runner, name) for name in NAMES]
    with open_rounded_runner(directory, with_adapters=True) as runner:
        for name, (logits, answer) in zip(NAMES, expected, strict=True):
            assert Distance.between(logits_of(runner, name, answer)[0], logits).largest < 1e-4
