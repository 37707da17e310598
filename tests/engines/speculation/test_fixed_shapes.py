"""Rounds where engines have fixed shapes, steps are captured and one is always under way: the GPU's way, on NumPy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from fixed_shape_backend import FixedShapeBackend
from runner_steps import take_step

from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.model import limits
from edgellm.engines.model.limits import EngineLimits, EngineShape
from edgellm.engines.runners.sampling_state import SamplingValues
from edgellm.engines.speculation.draft_plan import DraftPlan, chain, choices_plan, tree
from edgellm.engines.speculation.round import RoundKey
from edgellm.engines.speculation.runner import DecodingRunner

PLANS = [
    chain(4),
    chain(2),
    tree(4, 4, 16),
    tree(4, 2, 7),
    tree(2, 3, 9),
    tree(3, 4, 12),
    choices_plan([[0], [1], [0, 0], [0, 1], [0, 0, 0]]),
]
SAMPLINGS = {"greedy": SamplingValues(), "sampled": SamplingValues(1.0, 0, 0.9, 0.0, 1.1, 0.1, 0.05, seed=5)}
PROMPTS = [[(7 * index + 5 * seed) % 250 for index in range(length)] for seed, length in enumerate((20, 3, 33))]
COUNT = 14


def answers(runner: DecodingRunner, sampling: SamplingValues, plans: Sequence[DraftPlan | None]) -> list[list[int]]:
    """The first tokens of all prompts together, the plans in turn, each step launched before the last one is read."""
    found = [runner.start(slot, prompt, 0, sampling).wait().tolist() for slot, prompt in enumerate(PROMPTS)]
    steps = [take_step(runner, len(PROMPTS), plans[0])]
    count = 1
    while min(map(len, found)) < COUNT:
        steps.append(take_step(runner, len(PROMPTS), plans[count % len(plans)]))
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
    generation: str, sampling: str, make_engines: Callable[..., EngineDirectory], open_eagle: Callable[..., object]
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


def test_kernels_run_every_key_range_with_the_largest(
    make_engines: Callable[..., EngineDirectory], open_eagle: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One engine and one capture for all lengths, the same tokens; without kernels each range has its own."""
    monkeypatch.setattr(limits, "_KEY_RANGES", (32, 64))
    directory, values = make_engines(3), SAMPLINGS["greedy"]
    directory = replace(directory, limits=replace(directory.limits))  # which remember their key ranges
    plans, found = [chain(4), tree(4, 4, 16), None], {}
    for backend in ("numpy", "fixed", "fixed on sm_90"):
        with open_eagle(directory, backend) as runner:
            tokens = answers(runner, values, plans)
            loaded = [*runner.base.engines.loaded, *runner._engines.loaded]
        found[backend] = tokens, {shape for shape in loaded if shape.batch == 4}
    assert found["numpy"][0] == found["fixed"][0] == found["fixed on sm_90"][0]
    for backend, fewer in (("fixed", False), ("fixed on sm_90", True)):
        ranges: dict[str, set[int]] = {}
        for shape in found[backend][1]:
            ranges.setdefault(f"{shape.phase} {shape.tokens}", set()).add(shape.key_range)
        assert ranges["decode 1"] == ({96} if fewer else {32, 64, 96})
        for phase in ("verify 16", "propose 4", "accept 5"):
            assert ranges[phase] == ({112} if fewer else {32, 64, 112})


class _KernelsRunSteps(FixedShapeBackend):
    """As a GPU whose kernels take every shape but long prefill."""

    def takes_any_key_range(self, shape: EngineShape) -> bool:
        return shape.phase != "prefill"


@pytest.mark.parametrize(("backend_type", "ranges", "rounds"), [(FixedShapeBackend, 4, 640), (_KernelsRunSteps, 1, 64)])
def test_captures_of_a_long_context(
    make_engines: Callable[..., EngineDirectory], backend_type: type[FixedShapeBackend], ranges: int, rounds: int
) -> None:
    """At a context of 32,768 tokens, batch 8: one capture for each batch size, plan and way of drawing, two under
    rules, whose choice alone depends on the way of drawing in plain steps."""
    directory = replace(make_engines(3), limits=EngineLimits(8, 16, 32768, 10, 6, 60))
    plans = [chain(2), chain(3), chain(5), tree(10, 3, 8), tree(10, 3, 16), tree(10, 4, 16), tree(10, 5, 32)]
    runner = DecodingRunner.open(backend_type(directory), directory)
    try:
        runner.plan_captures([*plans, tree(10, 6, 60)])
        plain, drafted = [[*steps.planned] for steps in (runner.base.steps, runner._steps)]
        assert len(plain) == 4 * ranges * 2 + 4 * ranges + 4 * 2
        kinds = ["flush" if key[0] == "flush" else "round" if isinstance(key, RoundKey) else key[1] for key in drafted]
        expected = {"flush": 4 * ranges, "round": rounds, "base verify": rounds, "acceptance": rounds}
        assert dict(Counter(kinds)) == expected
        assert not runner.base.steps.captures, "nothing is captured before its turn"
    finally:
        runner.close()


def test_a_round_is_not_ready_before_it_is_captured(
    make_engines: Callable[..., EngineDirectory], open_eagle: Callable[..., object]
) -> None:
    """A plain step runs meanwhile as it is: nothing is captured while somebody waits."""
    with open_eagle(make_engines(3), "fixed") as runner:
        small, large = chain(2), tree(3, 3, 12)
        assert runner.is_ready(1, large)
        runner.plan_captures([small, large])
        while not runner.is_ready(1, small):
            assert runner.capture_next()
        count = len(runner.backend.captures)
        runner.start(0, PROMPTS[0], 0, SamplingValues()).wait()
        assert runner.is_ready(1, small) and not runner.is_ready(1, large) and not runner.is_ready(1, small, True)
        for plan in (None, small, None, None, small):
            take_step(runner, 1, plan).wait()
        assert len(runner.backend.captures) == count
        runner.stop(0)
        while runner.capture_next():
            pass
        assert runner.is_ready(1, large) and runner.is_ready(1, small, True) and not runner.uncaptured
        count = len(runner.backend.captures)
        assert count == len(set(runner.backend.captures))
        for values in (SAMPLINGS["greedy"], SAMPLINGS["sampled"], SamplingValues(logit_bias=((7, 2.0),))):
            runner.start(0, PROMPTS[0], 0, values).wait()
            for plan in (None, small, large, None, large):
                take_step(runner, 1, plan).wait()
            runner.stop(0)
        assert len(runner.backend.captures) == count
