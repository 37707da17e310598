"""Answers of the golden models of `tests/goldens/decoder` by whole runners, and what transformers goes on with."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from golden_files import golden_folder
from runner_steps import take_step
from safetensors.numpy import load_file

from edgellm.engines.backends.numpy_backend import NumpyBackend
from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.families import decoder_config
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.runners.sampling_state import SamplingValues
from edgellm.engines.speculation.draft_plan import given
from edgellm.engines.speculation.round import GivenTree
from edgellm.engines.speculation.runner import DecodingRunner

GOLDENS = golden_folder("decoder")
PROMPT, ANSWER = 9, 64


def make_runner(name: str, kv_cache: str = "compute", slots: int = 1) -> DecodingRunner:
    """Rings, of models with windows, are as short as they may be, and of an odd number of rows: texts of 300 tokens go
    round four times."""
    with Checkpoint.open(GOLDENS / name) as checkpoint:
        config = decoder_config(checkpoint.config, checkpoint.generation_config)
        limits = EngineLimits(slots, prefill_chunk=16, kv_capacity=400, kv_cache=kv_cache)
        rows = 0 if config.window is None else config.window + limits.window_step + 1 - config.window % 2
        limits = replace(limits, window_rows=rows)
        return DecodingRunner(NumpyBackend(config), config, limits, checkpoint)


def expected(name: str) -> tuple[list[int], list[int]]:
    """The prompt, and what transformers goes on with."""
    tensors = load_file(GOLDENS / name / "expected.safetensors")
    return tensors["token_ids"][0, :PROMPT].tolist(), tensors["generated"][0].tolist()


def answer(runner: DecodingRunner, prompt: list[int], count: int, reused: int = 0) -> list[int]:
    """So many greedy tokens behind a prompt, of which `reused` tokens have their rows already."""
    found = [int(runner.start(0, prompt, reused, SamplingValues()).wait()[0])]
    while len(found) < count:
        found += take_step(runner, 1, None).wait()[0]
    runner.stop(0)
    return found


def assert_trees_give_what_plain_decoding_does(runner: DecodingRunner) -> None:
    """300 tokens by trees of right and wrong candidates, up to 12 deep."""
    rng = np.random.default_rng(1)
    prompt = rng.integers(3, 80, 30).tolist()
    plain, said, steps = answer(runner, prompt, 320), [], 0
    said += runner.start(0, prompt, 0, SamplingValues()).wait().tolist()
    while len(said) < 300:
        depth = int(rng.integers(1, 13))
        path, parents = plain[len(said) : len(said) + depth], [*range(-1, depth - 1)]
        wrong = int(rng.integers(0, depth + 1))
        if wrong < depth:
            path[wrong] = (path[wrong] + 1) % 80
        tokens = [*path, *rng.integers(0, 80, 5).tolist(), plain[len(said)]]
        parents += rng.integers(-1, depth, 5).tolist() + [-1]
        plan = given(len(tokens), 16)
        order = np.argsort(_depths(parents), kind="stable")  # a place is behind its parent's
        places = {int(old): new for new, old in enumerate(order)}
        tree = GivenTree([tokens[old] for old in order], [places.get(parents[old], -1) for old in order])
        said += runner.round(1, plan, None, [tree]).wait()[0]
        steps += 1
    runner.stop(0)
    assert said[:300] == plain[:300]
    assert steps < 150


def _depths(parents: list[int]) -> list[int]:
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths


def assert_a_batch_gives_what_each_does_alone(runner: DecodingRunner) -> None:
    """Three sequences of different lengths, 100 tokens each."""
    rng = np.random.default_rng(2)
    prompts = [rng.integers(3, 80, length).tolist() for length in (5, 170, 90)]
    alone = [answer(runner, prompt, 100) for prompt in prompts]
    said = [runner.start(slot, prompt, 0, SamplingValues()).wait().tolist() for slot, prompt in enumerate(prompts)]
    while len(said[0]) < 100:
        for slot, emitted in enumerate(take_step(runner, 3, None).wait()):
            said[slot] += emitted
    assert said == alone
    for slot in range(3):
        runner.stop(slot)
