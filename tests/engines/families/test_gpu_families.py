"""Every family on kernels and on TensorRT against the NumPy backend, which is itself tested against transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tiny_families import FAMILIES, PROMPT, RECURRENT, TOLERANCES

from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.runners.comparison import greedy_tokens, open_runner, teacher_forced_logits
from edgellm.engines.runners.sampling_state import SamplingValues

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("executor", "attention"), [("auto", "composed"), ("tensorrt", "composed"), ("tensorrt", "native")]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_agree_with_numpy(
    family: str, executor: str, attention: str, dtype: str, tmp_path: Path, make_checkpoint: Callable[..., Path]
) -> None:
    """A prompt of 40 tokens takes chunks of 32 and of 16; TensorRT runs decode steps whole, attention included."""
    checkpoint = make_checkpoint(tmp_path / "checkpoint", 1, **FAMILIES[family])
    limits, plans = EngineLimits(max_batch=2, prefill_chunk=32, kv_capacity=96), executor == "tensorrt"
    built = tmp_path / "engines"
    build_engine_directory(checkpoint, built, limits, None, dtype=dtype, attention=attention, all_plans=plans)
    directory = EngineDirectory.open(tmp_path / "engines")
    with open_runner("numpy", directory) as runner:
        answers = [greedy_tokens(runner, prompt, 12) for prompt in (PROMPT, PROMPT[5:12])]
        expected = [
            teacher_forced_logits(runner, prompt, answer)
            for prompt, answer in zip((PROMPT, PROMPT[5:12]), answers, strict=True)
        ]
    with open_runner("tensorrt", directory, executor=executor) as runner:
        found = teacher_forced_logits(runner, PROMPT, answers[0])
        # Both slots at once, each with its own length.
        for slot, prompt in enumerate((PROMPT, PROMPT[5:12])):
            runner.start(slot, prompt, 0, SamplingValues()).wait()
        pairs = []
        for first, second in zip(*answers, strict=True):
            pairs.append((runner.logits(0), runner.logits(1)))
            runner.force_token(0, first)
            runner.force_token(1, second)
            runner.decode(2).wait()
    largest = max(np.abs(logits).max() for logits in expected)
    differences = [np.abs(found - expected[0]).max() / largest]
    differences += [
        np.abs(np.stack([pair[slot] for pair in pairs]) - expected[slot]).max() / largest for slot in (0, 1)
    ]
    shown = ", ".join(f"{difference:.2%}" for difference in differences)
    print(f"\n{family} {executor} {attention} {dtype}: {shown}")
    assert max(differences) <= TOLERANCES[dtype]


@pytest.mark.parametrize("executor", ["auto", "tensorrt"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("family", [*RECURRENT, "olmo2", "starcoder2"])
def test_logits_of_long_prompts_agree_with_numpy(
    family: str, dtype: str, executor: str, tmp_path: Path, make_checkpoint: Callable[..., Path]
) -> None:
    """Chunks of 80 tokens run on the kernels of prompts, of fewer on those of decode steps, or both by segments on
    TensorRT with kernels between: a prompt of 100 takes both."""
    checkpoint = make_checkpoint(tmp_path / "checkpoint", 1, **(RECURRENT | FAMILIES)[family])
    limits = EngineLimits(max_batch=2, prefill_chunk=80, kv_capacity=192)
    build_engine_directory(checkpoint, tmp_path / "engines", limits, None, dtype=dtype)
    directory = EngineDirectory.open(tmp_path / "engines")
    prompt = (PROMPT * 3)[:100]
    with open_runner("numpy", directory) as runner:
        answer = greedy_tokens(runner, prompt, 12)
        expected = teacher_forced_logits(runner, prompt, answer)
    with open_runner("tensorrt", directory, executor=executor) as runner:
        found = teacher_forced_logits(runner, prompt, answer)
    difference = np.abs(found - expected).max() / np.abs(expected).max()
    print(f"\n{family} {executor} {dtype}: {difference:.2%}")
    assert difference <= TOLERANCES[dtype]
