"""Models with windows on a GPU, over rings that are written over many times: logits of NumPy, trees, snapshots of
slots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tiny_families import TOLERANCES, WINDOWED

from edgellm.engines.backends.opening import open_backend
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.runners.comparison import greedy_tokens, open_runner, teacher_forced_logits
from edgellm.engines.runners.sampling_state import SamplingValues
from edgellm.engines.speculation.draft_plan import given
from edgellm.engines.speculation.round import GivenTree
from edgellm.engines.speculation.runner import DecodingRunner

pytestmark = pytest.mark.gpu
PROMPT = [(7 * index + 3) % 250 for index in range(150)]


@pytest.fixture(params=[(family, kv_cache) for family in WINDOWED for kv_cache in ("compute", "int8")], ids=str)
def directory(request, tmp_path: Path, make_checkpoint: Callable[..., Path]) -> EngineDirectory:
    """Chunks of 80 tokens are prefilled between TensorRT's engines, of 16 by the decode kernels; a ring has 192
    rows."""
    family, kv_cache = request.param
    checkpoint = make_checkpoint(tmp_path / "checkpoint", 1, **WINDOWED[family])
    limits = EngineLimits(2, prefill_chunk=80, kv_capacity=512, kv_cache=kv_cache, window_rows=192)
    build_engine_directory(checkpoint, tmp_path / "engines", limits, None, dtype="bfloat16")
    return EngineDirectory.open(tmp_path / "engines")


def test_logits_agree_with_numpy(directory: EngineDirectory) -> None:
    with open_runner("numpy", directory) as runner:
        answer = greedy_tokens(runner, PROMPT, 200)
        expected = teacher_forced_logits(runner, PROMPT, answer)
    with open_runner("tensorrt", directory) as runner:
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
    backend = open_backend("tensorrt", directory)
    runner, rng = DecodingRunner.open(backend, directory, drafts=False), np.random.default_rng(1)
    plain = runner.start(0, PROMPT, 0, SamplingValues()).wait().tolist()
    while len(plain) < 320:
        plain += runner.decode(1).wait()[0]
    runner.stop(0)
    said = runner.start(0, PROMPT, 0, SamplingValues()).wait().tolist()
    while len(said) < 300:
        depth = int(rng.integers(1, 9))
        path = plain[len(said) : len(said) + depth]
        wrong = int(rng.integers(0, depth + 1))
        if wrong < depth:
            path[wrong] = (path[wrong] + 1) % 250
        tree = GivenTree([*path, *rng.integers(0, 250, 3).tolist()], [*range(-1, depth - 1), -1, -1, 0])
        said += runner.round(1, given(len(tree.tokens), 8), None, [tree]).wait()[0]
    runner.close()
    assert said[:300] == plain[:300]


def test_a_shorter_ring_changes_no_bit(directory: EngineDirectory) -> None:
    with open_runner("tensorrt", directory) as runner:
        answer = greedy_tokens(runner, PROMPT, 200)
        expected = teacher_forced_logits(runner, PROMPT, answer)
    longer = replace(directory, limits=replace(directory.limits, window_rows=448))
    with open_runner("tensorrt", longer) as runner:
        np.testing.assert_array_equal(teacher_forced_logits(runner, PROMPT, answer), expected)
