"""Models with windows on a GPU, over rings that are written over many times: logits of NumPy, trees, snapshots of
slots."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gpu_drafting import assert_given_trees_change_no_token
from tiny_families import TOLERANCES, WINDOWED

from edgellm.engines.backends.opening import open_backend
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.runners.comparison import greedy_tokens, open_runner, teacher_forced_logits
from edgellm.engines.runners.sampling_state import SamplingValues
from edgellm.engines.speculation.runner import DecodingRunner

pytestmark = pytest.mark.gpu
PROMPT = [(7 * index + 3) % 250 for index in range(150)]


@pytest.fixture(params=[(family, kv_cache) for family in WINDOWED for kv_cache in ("compute", "int8")], ids=str)
def directory(request, tmp_path: Path, make_checkpoint: Callable[..., Path]) -> EngineDirectory:
    """Chunks of 80 tokens are prefilled by the kernels of prompts, of 16 by those of decode steps; a ring has 192
    rows."""
    family, kv_cache = request.param
    checkpoint = make_checkpoint(tmp_path / "checkpoint", 1, **WINDOWED[family])
    limits = EngineLimits(2, prefill_chunk=80, kv_capacity=512, kv_cache=kv_cache, window_rows=192)
    build_engine_directory(checkpoint, tmp_path / "engines", limits, None, dtype="bfloat16")
    return EngineDirectory.open(tmp_path / "engines")


@pytest.mark.parametrize("executor", ["auto", "tensorrt"])
def test_logits_agree_with_numpy(directory: EngineDirectory, executor: str) -> None:
    """Prompts between TensorRT's engines, too."""
    with open_runner("numpy", directory) as runner:
        answer = greedy_tokens(runner, PROMPT, 200)
        expected = teacher_forced_logits(runner, PROMPT, answer)
    with open_runner("tensorrt", directory, executor=executor) as runner:
        found = teacher_forced_logits(runner, PROMPT, answer)
        # In both slots at once, each with its own length.
        for slot, prompt in enumerate((PROMPT, PROMPT[:90])):
            runner.start(slot, prompt, 0, SamplingValues()).wait()
        pairs = []
        for token in answer:
            pairs.append(runner.logits(0))
            runner.force_token(0, token)
            runner.decode(2).wait()
    largest = np.abs(expected).max()
    difference = max(np.abs(logits - expected).max() / largest for logits in (found, np.stack(pairs)))
    print(f"\n{directory.config.family} {directory.limits.kv_cache}: {difference:.2%}")
    # An element of a row may be rounded to another of its 8 bits, which adds to bfloat16's own rounding.
    assert difference <= TOLERANCES["bfloat16"] * (1.5 if directory.limits.kv_cache == "int8" else 1.0)
    np.testing.assert_array_equal(found[1:], np.stack(pairs)[1:])


def test_trees_give_the_tokens_of_plain_decoding(directory: EngineDirectory) -> None:
    with closing(DecodingRunner.open(open_backend("tensorrt", directory), directory, drafts=False)) as runner:
        assert_given_trees_change_no_token(runner, PROMPT, None, 300)


def test_a_shorter_ring_changes_no_bit(directory: EngineDirectory) -> None:
    with open_runner("tensorrt", directory) as runner:
        answer = greedy_tokens(runner, PROMPT, 200)
        expected = teacher_forced_logits(runner, PROMPT, answer)
    longer = replace(directory, limits=replace(directory.limits, window_rows=448))
    with open_runner("tensorrt", longer) as runner:
        np.testing.assert_array_equal(teacher_forced_logits(runner, PROMPT, answer), expected)
