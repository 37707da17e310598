"""Rules on tokens on a GPU: two captured launches, masks that are uploaded, trees shown within a graph, drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from gpu_device import cuda_device
from token_rules import VOCABULARY, RandomRules, RuledSequence, ruled_answers, rules

from edgellm import Request, SamplingParams, SpecDecodeRuntime
from edgellm.decoding.sequence import StepMasks
from edgellm.drafting.config import DraftingConfig
from edgellm.engines.backends.opening import open_backend
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.runners.comparison import open_runner, teacher_forced_logits
from edgellm.engines.runners.sampling_state import SamplingValues
from edgellm.engines.speculation.constraints import TokenConstraint, allows, mask_words
from edgellm.engines.speculation.draft_plan import DraftPlan, chain, choices_plan, given, tree
from edgellm.engines.speculation.runner import DecodingRunner
from edgellm.structure.description import Structure
from tools.bench.draw_comparison import draw_gap, first_difference, spacing

pytestmark = pytest.mark.gpu

LIMITS = EngineLimits(max_batch=4, prefill_chunk=16, kv_capacity=96, draft_top_k=4, draft_steps=4, verify_tree_size=16)
PLANS = [chain(4), tree(4, 4, 16), choices_plan([[0], [1], [0, 0], [0, 1], [0, 0, 0]]), given(7, 4)]
GREEDY = SamplingValues()
SAMPLED = SamplingValues(1.0, 0, 0.9, 0.0, 1.1, 0.1, 0.05, seed=5, logit_bias=((3, 4.0), (40, 2.5)))
PROMPTS = [[(7 * index + 5 * seed) % 250 for index in range(length)] for seed, length in enumerate((20, 3, 33, 11))]
SCHEMA = {
    "type": "object",
    "properties": {"action": {"enum": ["go", "stop"]}, "to": {"type": "integer", "minimum": -5, "maximum": 40}},
    "required": ["action", "to"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def directory(
    make_tiny_pair: Callable[..., tuple[Path, Path]], tmp_path_factory: pytest.TempPathFactory
) -> EngineDirectory:
    """A tiny base with a head that mostly agrees, built for this GPU."""
    base, head = make_tiny_pair(3)
    target = tmp_path_factory.mktemp("gpu") / "constrained"
    build_engine_directory(base, target, LIMITS, None, dtype="float16", draft=head)
    return EngineDirectory.open(target)


@pytest.fixture
def runner(directory: EngineDirectory, open_eagle: Callable[..., object]) -> Iterator[DecodingRunner]:
    with open_eagle(directory, "tensorrt") as opened:
        yield opened


def assert_explained(
    directory: EngineDirectory,
    samplings: Sequence[SamplingValues],
    made: Callable[[], Sequence[TokenConstraint | None]],
    expected: Sequence[Sequence[int]],
    found: Sequence[Sequence[int]],
    what: str,
) -> None:
    """Answers part where the masked draw was within rounding, if at all."""
    for index, (one, other) in enumerate(zip(expected, found, strict=True)):
        place = first_difference(one, other)
        if place is None:
            continue
        answer, rule = list(one[: place + 1]), made()[index]
        with open_runner("tensorrt", directory) as base:
            logits = teacher_forced_logits(base, PROMPTS[index], answer)[-1]
        allowed = 4 * spacing(float(np.abs(logits).max()), directory.dtype)
        if rule is not None:
            assert all(map(rule.try_advance, answer[:-1]))
            row = np.empty(mask_words(VOCABULARY), np.uint32)
            rule.fill_mask(row)
            logits[[not allows(row, token) for token in range(VOCABULARY)]] = -np.inf
        for token, bias in samplings[index].logit_bias:
            logits[token] += np.float32(bias)
        gap = draw_gap(logits, PROMPTS[index], answer[:-1], samplings[index], answer[-1], other[place])
        print(f"\n{what}: answer {index} differs at token {place}: gap {gap:.4g}, allowed {allowed:.4g}")
        assert gap < allowed


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_drafted_answers_obey_rules_as_plain_ones_do(
    directory: EngineDirectory, runner: DecodingRunner, sampling: SamplingValues
) -> None:
    def made() -> list[TokenConstraint | None]:
        return [rules()]

    plain, most = ruled_answers(runner, PROMPTS, [sampling], made(), None)
    free, _ = ruled_answers(runner, PROMPTS, [sampling], [None], None)
    assert plain != free
    for plan in PLANS:
        drafted, steps = ruled_answers(runner, PROMPTS, [sampling], made(), plan, plain)
        assert_explained(directory, [sampling], made, plain, drafted, plan.name)
        assert steps < most
    assert ruled_answers(runner, PROMPTS, [sampling], [None], None)[0] == free  # no mask is left behind


@pytest.mark.parametrize("plan", [None, PLANS[0], PLANS[3]], ids=lambda plan: plan.name if plan else "plain")
def test_slots_of_which_some_are_free(
    directory: EngineDirectory, runner: DecodingRunner, plan: DraftPlan | None
) -> None:
    samplings = [GREEDY, SAMPLED, GREEDY, SAMPLED]

    def made() -> list[TokenConstraint | None]:
        return [rules(4), rules(2), None, rules(3)]

    expected, _ = ruled_answers(runner, PROMPTS, samplings, made(), None)
    found, _ = ruled_answers(runner, PROMPTS, samplings, made(), plan, expected)
    assert_explained(directory, samplings, made, expected, found, "four slots")


def test_two_launches_are_captured(runner: DecodingRunner) -> None:
    """Logits and choice of steps, everything up to verification and acceptance of rounds."""
    ruled_answers(runner, PROMPTS, [GREEDY], [rules()], None)
    ruled_answers(runner, PROMPTS, [GREEDY], [rules()], PLANS[1])
    ruled_answers(runner, PROMPTS, [GREEDY], [rules()], PLANS[3], [list(range(30))])
    steps, rounds = runner.base.steps.captures, runner._steps.captures
    assert {key[0] for key in steps if isinstance(key[0], str)} == {"forward", "choice"}
    parts = {(key[0].plan.kind, key[1]) for key in rounds if isinstance(key[0], tuple)}
    assert parts == {(kind, part) for kind in ("tree", "given") for part in ("base verify", "acceptance")}
    for captures in (steps, rounds):
        assert all(len(launches) == 1 for launches in captures.values())


def test_prompts_that_follow_each_other_have_their_own_masks(runner: DecodingRunner) -> None:
    """The memory of masks is written again only once it was copied from."""
    for seed in range(12):
        sequences = [RuledSequence(RandomRules(VOCABULARY, seed * 4 + slot, 0.05)) for slot in range(4)]
        firsts = [
            runner.start(slot, PROMPTS[slot], 0, GREEDY, None, StepMasks([sequence]) if slot != seed % 4 else None)
            for slot, sequence in enumerate(sequences)
        ]
        for slot, (sequence, first) in enumerate(zip(sequences, firsts, strict=True)):
            tokens = first.wait().tolist()
            if slot != seed % 4:
                sequence.know(tokens)
            runner.stop(slot)


def test_a_captured_signal_is_that_of_its_own_launch() -> None:
    """The host sees what the latest launch has shown, not the one before, while the launch goes on."""
    with cuda_device() as gpu:
        source, shown, signal = gpu.zeros((4,), "int32"), gpu.host_visible((4,), "int32"), gpu.signal()
        long = [gpu.zeros((1 << 26,), "uint8") for _ in range(2)]

        def step() -> None:
            for _ in range(8):
                gpu.copy(long[0], long[1])
            gpu.copy(shown, source)
            signal.give()
            for _ in range(8):
                gpu.copy(long[1], long[0])

        step()
        gpu.synchronize()
        captured = gpu.capture(step, "a step that shows")
        assert captured is not step
        for number in range(1, 40):
            gpu.upload(source, np.full(4, number, np.int32))
            captured()
            signal.wait()
            assert gpu.seen(shown).tolist() == [number] * 4
        gpu.synchronize()


def test_the_largest_given_trees_of_all_slots_of_a_model_without_a_draft(
    make_tiny_pair: Callable[..., tuple[Path, Path]], tmp_path: Path
) -> None:
    """Masked, filtered and drawn from: each node is a row of logits."""
    limits = EngineLimits(max_batch=4, prefill_chunk=16, kv_capacity=96)
    build_engine_directory(make_tiny_pair(3)[0], tmp_path / "plain", limits, None, dtype="float16")
    directory = EngineDirectory.open(tmp_path / "plain")
    runner = DecodingRunner.open(open_backend("tensorrt", directory), directory, drafts=False)
    try:
        plan = given(runner.verification.most_nodes - 1, runner.verification.most_given)
        if not runner.takes_given(4, plan):
            pytest.skip("no engine verifies given trees on this GPU")
        for made in (lambda: [rules(seed) for seed in range(4)], lambda: [None] * 4):
            expected, _ = ruled_answers(runner, PROMPTS, [SAMPLED] * 4, made(), None)
            found, _ = ruled_answers(runner, PROMPTS, [SAMPLED] * 4, made(), plan, expected)
            assert_explained(directory, [SAMPLED] * 4, made, expected, found, plan.name)
    finally:
        runner.close()


def test_given_rounds_without_a_draft_model(directory: EngineDirectory) -> None:
    runner = DecodingRunner.open(open_backend("tensorrt", directory), directory, drafts=False)
    try:
        plan = given(7, 4)
        if not runner.takes_given(1, plan):
            pytest.skip("no engine verifies given trees on this GPU")

        def made() -> list[TokenConstraint | None]:
            return [rules(), None]

        for sampling in (GREEDY, SAMPLED):
            plain, most = ruled_answers(runner, PROMPTS, [sampling] * 2, made(), None)
            drafted, steps = ruled_answers(runner, PROMPTS, [sampling] * 2, made(), plan, plain)
            assert_explained(directory, [sampling] * 2, made, plain, drafted, "given")
            assert steps < most
    finally:
        runner.close()


@pytest.mark.parametrize("drafted", [False, True], ids=["plain", "drafted"])
def test_structures_through_a_runtime(tiny_checkpoint: Path, tiny_draft: Path, tmp_path: Path, drafted: bool) -> None:
    limits = EngineLimits(4, 16, 96, draft_top_k=4, draft_steps=3, verify_tree_size=12)
    build_engine_directory(tiny_checkpoint, tmp_path / "engines", limits, None, dtype="float16", draft=tiny_draft)
    drafting = DraftingConfig(draft_top_k=4, draft_steps=3, verify_tree_size=12) if drafted else None
    structures = [
        Structure(json=SCHEMA),
        Structure(choice=["yes", "no"]),
        Structure(regex="[a-f]{2,7}(, [0-9])?"),
        None,
    ]
    requests = [
        Request(
            PROMPTS[number % 4],
            None,
            SamplingParams(
                temperature=1.5 * (number % 3 > 0), seed=number, max_tokens=40, structure=structures[number % 4]
            ),
        )
        for number in range(24)
    ]
    with SpecDecodeRuntime(tmp_path / "engines", drafting=drafting, backend="tensorrt") as runtime:
        for _ in range(2):  # the second time captured
            for request, response in zip(requests, runtime.handle_request(requests), strict=True):
                structure = request.params.structure
                assert (response.structure_complete is None) == (structure is None)
                assert structure is None or structure.is_complete(response.text) or response.finish_reason == "length"
        assert runtime.handle_request(requests[1]).parsed in ("yes", "no")
