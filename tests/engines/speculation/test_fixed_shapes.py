"""Rounds where engines have fixed shapes, steps are captured and one is always under way: the GPU's way, on NumPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.runners.sampling_state import SamplingValues
from edgellm.engines.speculation.draft_plan import DraftPlan, chain, choices_plan, tree
from edgellm.engines.speculation.eagle_runner import EagleRunner

PLANS = [
    chain(4),
    chain(2),
    tree(4, 4, 16),
    tree(4, 2, 7),
    tree(2, 3, 9),
    tree(3, 4, 12),
    choices_plan([[0], [1], [0, 0], [0, 1], [0, 0, 0]]),
]
SAMPLINGS = {
    "greedy": SamplingValues(),
    "sampled": SamplingValues(1.0, 0, 0.9, 0.0, 1.1, 0.1, 0.05, seed=5),
}
PROMPTS = [[(7 * index + 5 * seed) % 250 for index in range(length)] for seed, length in enumerate((20, 3, 33))]
COUNT = 32


def answers(runner: EagleRunner, sampling: SamplingValues, plans: Sequence[DraftPlan | None]) -> list[list[int]]:
    """The first tokens of all prompts together, the plans in turn, each step launched before the last one is read."""
    found = [runner.start(slot, prompt, 0, sampling).wait().tolist() for slot, prompt in enumerate(PROMPTS)]
    steps = [runner.step(len(PROMPTS), plans[0])]
    count = 1
    while min(map(len, found)) < COUNT:
        steps.append(runner.step(len(PROMPTS), plans[count % len(plans)]))
        count += 1
        for tokens, emitted in zip(found, steps.pop(0).wait(), strict=True):
            tokens.extend(emitted)
    steps.pop().wait()
    for slot in range(len(PROMPTS)):
        runner.stop(slot)
    return [tokens[:COUNT] for tokens in found]


@pytest.mark.parametrize(
    ("generation", "sampling"),
    [
        ("1", "greedy"),
        ("3", "sampled"),
        pytest.param("1", "sampled", marks=pytest.mark.slow),
        pytest.param("3", "greedy", marks=pytest.mark.slow),
    ],
)
def test_captured_rounds_of_fixed_shapes_equal_plain_decoding(
    generation: str,
    sampling: str,
    make_engines: Callable[..., EngineDirectory],
    open_eagle: Callable[..., object],
) -> None:
    directory, values = make_engines(int(generation)), SAMPLINGS[sampling]
    with open_eagle(directory) as runner:
        expected = answers(runner, values, [None])
    with open_eagle(directory, "fixed") as runner:
        assert answers(runner, values, [None]) == expected
        for plans in ([plan] for plan in PLANS):
            assert answers(runner, values, plans) == expected, plans[0].name
        assert answers(runner, values, [*PLANS, None, None]) == expected
        assert any("chain" in name for name in runner.backend.captures)
        assert len(runner.backend.captures) == len(set(runner.backend.captures))
