"""Attention within a window as it is served: greedy text against transformers, batches, trees, over rings that are
written over many times."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from golden_answers import GOLDENS, answer, make_runner
from runner_steps import take_step

from edgellm.engines.backends.numpy_backend import NumpyBackend
from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.errors import EngineError
from edgellm.engines.families import decoder_config
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.runners.sampling_state import SamplingValues
from edgellm.engines.speculation.runner import DecodingRunner


@pytest.mark.parametrize("name", ["gemma3", "qwen2_window_7"])
def test_a_slot_that_is_moved_copied_and_exchanged_goes_on(name: str) -> None:
    runner, rng = make_runner(name, slots=2), np.random.default_rng(3)
    prompt = rng.integers(3, 80, 150).tolist()
    wanted = answer(runner, prompt, 40)
    said = runner.start(1, prompt, 0, SamplingValues()).wait().tolist()
    runner.move(1, 0)
    while len(said) < 20:
        said += take_step(runner, 1, None).wait()[0]
    runner.stop(0)
    runner.copy_rows(0, 1)
    answer(runner, prompt[::-1], 30)
    runner.swap_rows(0, 1)
    said += answer(runner, prompt + said, 20, len(prompt) + 19)
    assert said == wanted
    runner.close()


def test_a_window_is_cut_as_far_as_its_rows_reach() -> None:
    """From where a cut is allowed the text goes on as if nothing had been behind it; one token before, it does not."""
    runner, rng = make_runner("gemma3"), np.random.default_rng(4)
    states, slack = runner.base.states, runner.limits.window_rows - runner.limits.window_step - 5
    text = rng.integers(3, 80, 200).tolist()
    assert states.cut(200, 199) == 199
    first = 200 - slack - 1
    assert [states.cut(200, place) for place in (first, first - 1, 3, 0)] == [first, 0, 0, 0]
    other = [*text[:first], *rng.integers(3, 80, 10).tolist()]
    wanted = answer(runner, other, 30)
    runner.start(0, text, 0, SamplingValues()).wait()
    runner.stop(0)
    assert answer(runner, other, 30, first) == wanted
    runner.close()


def test_windows_without_the_rows_that_they_need_are_refused() -> None:
    with Checkpoint.open(GOLDENS / "gemma3") as checkpoint:
        config = decoder_config(checkpoint.config)
        limits = EngineLimits(prefill_chunk=16, kv_capacity=400)
        assert limits.window_step == 64
        for rows, problem in ((0, "it is 0, expected at least 69"), (68, "it is 68, expected at least 69")):
            with pytest.raises(EngineError, match=problem):
                DecodingRunner(NumpyBackend(config), config, replace(limits, window_rows=rows), checkpoint)
        short = EngineLimits(prefill_chunk=5, kv_capacity=5, window_rows=128)
        with pytest.raises(EngineError, match="it is 128, expected 0: no window is shorter than the context"):
            DecodingRunner(NumpyBackend(config), config, short, checkpoint)
