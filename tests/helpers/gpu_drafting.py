"""Drafted answers on a GPU: decoded with a step in flight, differences that rounding explains, and given trees."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from runner_steps import take_step

from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.runners.base_runner import BaseEngineRunner
from edgellm.engines.runners.comparison import open_runner, teacher_forced_logits
from edgellm.engines.runners.media import PromptMedia
from edgellm.engines.runners.sampling_state import SamplingValues
from edgellm.engines.speculation.draft_plan import DraftPlan, given
from edgellm.engines.speculation.round import GivenTree
from edgellm.engines.speculation.runner import DecodingRunner
from tools.bench.draw_comparison import draw_gap, first_difference, spacing

COUNT = 40
#: Logits of one tree and of single steps may differ by so many spacings of the dtype.
SPACINGS = 4
#: The images of the prompt of that number, in a runner's memory.
ImagesOf = Callable[[BaseEngineRunner, int], PromptMedia | None]


def no_images(runner: BaseEngineRunner, index: int) -> None:
    """Prompts of text alone."""


def answers(
    runner: DecodingRunner,
    prompts: Sequence[Sequence[int]],
    samplings: Sequence[SamplingValues],
    plan: DraftPlan | None,
    count: int = COUNT,
    images: ImagesOf = no_images,
) -> list[list[int]]:
    """The first `count` tokens of each slot, with one step in flight while the one before is read."""
    found = [
        runner.start(slot, prompt, 0, sampling, images(runner.base, slot)).wait().tolist()
        for slot, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True))
    ]
    under_way = take_step(runner, len(prompts), plan)
    while True:
        following = take_step(runner, len(prompts), plan)
        for tokens, emitted in zip(found, under_way.wait(), strict=True):
            tokens.extend(emitted)
        under_way = following
        if min(map(len, found)) >= count:
            break
    under_way.wait()
    for slot in range(len(prompts)):
        runner.stop(slot)
    return [tokens[:count] for tokens in found]


def assert_explained(
    directory: EngineDirectory,
    prompts: Sequence[Sequence[int]],
    samplings: Sequence[SamplingValues],
    expected: Sequence[Sequence[int]],
    found: Sequence[Sequence[int]],
    what: str,
    images: ImagesOf = no_images,
) -> int:
    """Each first difference lies where the draw was within rounding; returns how many answers differ."""
    different = [first_difference(one, other) for one, other in zip(expected, found, strict=True)]
    for index, place in enumerate(different):
        if place is None:
            continue
        with open_runner("tensorrt", directory) as base:
            answer = list(expected[index][: place + 1])
            logits = teacher_forced_logits(base, prompts[index], answer, images(base, index))[-1]
        gap = draw_gap(logits, prompts[index], answer[:-1], samplings[index], answer[-1], found[index][place])
        allowed = SPACINGS * spacing(np.abs(logits).max(), directory.dtype)
        print(f"\n{what}: answer {index} differs at token {place}: gap {gap:.4g}, allowed {allowed:.4g}")
        assert gap < allowed
    return sum(place is not None for place in different)


def assert_given_trees_change_no_token(
    runner: DecodingRunner, ids: Sequence[int], images: PromptMedia | None, count: int
) -> None:
    """Rounds of given trees give the first `count` greedy tokens of plain decoding: each tree is a path that goes on as
    that does, often with one wrong token, and three tokens beside it."""
    rng = np.random.default_rng(1)
    plain = runner.start(0, ids, 0, SamplingValues(), images).wait().tolist()
    while len(plain) < count + 10:
        plain += take_step(runner, 1, None).wait()[0]
    runner.stop(0)
    said = runner.start(0, ids, 0, SamplingValues(), images).wait().tolist()
    while len(said) < count:
        depth = int(rng.integers(1, 9))
        path = plain[len(said) : len(said) + depth]
        wrong = int(rng.integers(0, depth + 1))
        if wrong < depth:
            path[wrong] = (path[wrong] + 1) % 250
        tree = GivenTree([*path, *rng.integers(0, 250, 3).tolist()], [*range(-1, depth - 1), -1, -1, 0])
        said += runner.round(1, given(len(tree.tokens), 8), None, [tree]).wait()[0]
    place = first_difference(plain[:count], said[:count])
    assert place is None, f"token {place}: {said[place : place + 5]}, plainly {plain[place : place + 5]}"
