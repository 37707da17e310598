"""Drafting on the GPU: against plain decoding there, against NumPy, captured and not, in batches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from gpu_drafting import answers, assert_explained

from edgellm.drafting.config import DraftingConfig
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.runners.comparison import LOGIT_TOLERANCES
from edgellm.engines.runners.sampling_state import SamplingValues
from edgellm.engines.speculation.draft_plan import DraftPlan, chain, choices_plan, tree
from edgellm.engines.speculation.runner import DecodingRunner
from edgellm.engines.speculation.tree import VerifiedTree
from edgellm.llm import LLM
from edgellm.opened_model import SHIPPED_MODEL
from edgellm.requests import Request
from edgellm.sampling_params import SamplingParams

pytestmark = pytest.mark.gpu

LIMITS = EngineLimits(max_batch=2, prefill_chunk=16, kv_capacity=128, draft_top_k=4, draft_steps=4, verify_tree_size=16)
PLANS = [chain(4), chain(1), tree(4, 4, 16), tree(4, 2, 7), choices_plan([[0], [1], [0, 0], [0, 1], [0, 0, 0]])]
GREEDY = SamplingValues()
SAMPLED = SamplingValues(1.0, 0, 0.9, 0.0, 1.1, 0.1, 0.05, seed=5)
PROMPTS = [[(7 * index + 5 * seed) % 250 for index in range(length)] for seed, length in enumerate((20, 3, 33, 11))]


@pytest.fixture(
    scope="module",
    params=[(1, "as-published"), (3, "as-published"), (1, "int8"), (3, "int8"), (3, "int4")],
    ids=lambda param: "-".join(map(str, param)),
)
def directory(
    request: pytest.FixtureRequest,
    make_tiny_pair: Callable[..., tuple[Path, Path]],
    tmp_path_factory: pytest.TempPathFactory,
) -> EngineDirectory:
    """A tiny base with a head that mostly agrees, dense or packed, built for this GPU."""
    generation, weights = request.param
    base, head = make_tiny_pair(generation)
    target = tmp_path_factory.mktemp("gpu") / f"eagle{generation}"
    build_engine_directory(base, target, LIMITS, None, dtype="float16", draft=head, draft_weights=weights)
    return EngineDirectory.open(target)


@pytest.fixture
def runner(directory: EngineDirectory, open_eagle: Callable[..., object]) -> Iterator[DecodingRunner]:
    with open_eagle(directory, "tensorrt") as opened:
        yield opened


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_drafted_answers_are_those_of_plain_decoding(
    directory: EngineDirectory, runner: DecodingRunner, sampling: SamplingValues
) -> None:
    plain = [answers(runner, [prompt], [sampling], None)[0] for prompt in PROMPTS]
    for plan in PLANS:
        drafted = [answers(runner, [prompt], [sampling], plan)[0] for prompt in PROMPTS]
        different = assert_explained(directory, PROMPTS, [sampling] * 4, plain, drafted, plan.name)
        print(f"{plan.name}: {different} of {len(PROMPTS)} answers differ from plain decoding")


@pytest.mark.parametrize("weights", ["as-published", "int8", "int4"])
@pytest.mark.parametrize("family", ["mtp", "nemotron_mtp"])
def test_a_head_that_ships_with_its_model_changes_no_token(
    family: str, weights: str, make_engines: Callable[..., EngineDirectory], open_eagle: Callable[..., object]
) -> None:
    with open_eagle(make_engines(family, True, weights=weights), "tensorrt") as runner:
        for sampling in (GREEDY, SAMPLED):
            plain = answers(runner, PROMPTS[:2], [sampling] * 2, None)
            for plan in (PLANS[0], PLANS[2]):
                assert answers(runner, PROMPTS[:2], [sampling] * 2, plan) == plain, plan.name


@pytest.mark.parametrize("weights", ["as-published", "int8", "int4"])
@pytest.mark.parametrize("kind", ["dflash", "jetspec"])
def test_a_draft_of_blocks_changes_no_token(
    kind: str, weights: str, make_engines: Callable[..., EngineDirectory], open_eagle: Callable[..., object]
) -> None:
    """Of two slots; and a chain that is drawn at temperature 0."""
    with open_eagle(make_engines(kind, True, LIMITS, weights), "tensorrt") as runner:
        for sampling in (GREEDY, SAMPLED):
            plain = answers(runner, PROMPTS[:2], [sampling] * 2, None)
            for plan in PLANS:
                assert answers(runner, PROMPTS[:2], [sampling] * 2, plan) == plain, plan.name
        plain = answers(runner, PROMPTS[:2], [GREEDY] * 2, None)
        assert answers(runner, PROMPTS[:2], [GREEDY] * 2, chain(3, sampled=True)) == plain


@pytest.mark.parametrize("kind", ["dflash", "jetspec"])
def test_what_a_block_says_agrees_with_numpy(
    kind: str, make_engines: Callable[..., EngineDirectory], open_eagle: Callable[..., object]
) -> None:
    """Logits of all its places, and the candidates of a chain, behind the same prompt."""
    directory, found = make_engines(kind, False), []
    for backend in ("numpy", "tensorrt"):
        with open_eagle(directory, backend) as runner:
            runner.start(0, PROMPTS[0], 0, GREEDY).wait()
            runner.round(1, chain(4)).wait()
            logits = runner.draft.logits(1, directory.limits.draft_block)
            found.append(runner.backend.read(logits).wait()[0, 1:].astype(np.float32))
    assert np.linalg.norm(found[1] - found[0]) < 0.02 * np.linalg.norm(found[0])


@pytest.mark.parametrize("plan", [PLANS[0], PLANS[2]], ids=lambda plan: plan.name)
def test_slots_of_different_lengths_and_samplings(
    directory: EngineDirectory, runner: DecodingRunner, plan: DraftPlan
) -> None:
    samplings = [GREEDY, SAMPLED]
    alone = [answers(runner, [p], [s], None)[0] for p, s in zip(PROMPTS[:2], samplings, strict=True)]
    together = answers(runner, PROMPTS[:2], samplings, plan)
    assert_explained(directory, PROMPTS, samplings, alone, together, f"two slots, {plan.name}")


def test_the_draft_and_the_verified_tree_agree_with_numpy(
    directory: EngineDirectory, runner: DecodingRunner, open_eagle: Callable[..., object]
) -> None:
    """The same prompt, one round of a chain: candidates of the draft, logits of the base, on both backends."""
    with open_eagle(directory, "numpy") as reference:
        values = []
        for one in (reference, runner):
            one.start(0, PROMPTS[2], 0, GREEDY).wait()
            one.prepare_round(1, chain(4)).stages["draft accept"]()
            values.append(one.backend.read(one.draft.logits(1, 1)).wait())
            one.round(1, chain(4)).wait()
            trees = one.verification.tree(
                chain(4), one.prepare_round(1, chain(4)).key.verify_range, one.base.sequences(slice(0, 1))
            )
            values.append(one.backend.read(trees.logits.logits).wait()[:, :1])
        for expected, found in (values[0::2], values[1::2]):
            tolerance = LOGIT_TOLERANCES[directory.dtype] * np.abs(expected).max()
            np.testing.assert_allclose(found, expected, atol=tolerance)


def test_captured_rounds_equal_uncaptured_ones_and_stages_captured_alone(
    directory: EngineDirectory, open_eagle: Callable[..., object], caplog: pytest.LogCaptureFixture
) -> None:
    """A whole round that cannot be captured is captured by stages; stages that cannot be are run as they are."""
    found = []
    for refused in ("none", "whole", "all"):
        with open_eagle(directory, "tensorrt") as runner, caplog.at_level(logging.WARNING):
            capture, capture_named = runner.backend._capture, runner.backend.capture
            taken: list[str] = []
            names: list[str] = []

            def named(step, name, capture_named=capture_named, names=names) -> Callable[[], None]:
                names.append("whole" if name.startswith("the step ") else "stage")
                return capture_named(step, name)

            def limited(step, capture=capture, refused=refused, taken=taken, names=names) -> Callable[[], None]:
                if refused in ("all", names[-1]):
                    raise RuntimeError("capture is not possible")
                taken.append(names[-1])
                return capture(step)

            with patch.multiple(runner.backend, capture=named, _capture=limited):  # which hold the device
                found.append(answers(runner, PROMPTS[:1], [GREEDY], PLANS[2]))
            assert {"none": "whole" in taken, "whole": "stage" in taken, "all": not taken}[refused]
    assert found[0] == found[1] == found[2]


def test_lossy_and_sampled_kinds_run_and_repeat(runner: DecodingRunner) -> None:
    for plan in (chain(3, sampled=True), tree(4, 3, 12, acceptance="typical")):
        first, second = (answers(runner, PROMPTS[:2], [SAMPLED, GREEDY], plan) for _ in range(2))
        assert first == second


def test_acceptance_can_be_simulated(runner: DecodingRunner) -> None:
    """The benchmark's seam: here the tree's tokens are replaced by what the base's logits draw, level by level."""
    wanted = 2
    runner.start(0, PROMPTS[0], 0, GREEDY).wait()
    before = runner.prepare_round(1, chain(4))
    for name in list(before.stages)[:3]:
        before.stages[name]()
    state = runner.base.sequences(slice(0, 1))
    verified: VerifiedTree = runner.verification.tree(chain(4), before.key.verify_range, state)
    drawn = runner.backend.read(verified.logits.logits).wait().argmax(axis=2).astype(np.int32)
    tokens = runner.backend.read(verified.nodes.tokens).wait()
    tokens[0, 1 : wanted + 1] = drawn[0, :wanted]
    tokens[0, wanted + 1] = (drawn[0, wanted] + 1) % 320
    runner.backend.upload(verified.nodes.tokens, tokens)
    before.stages["acceptance"]()
    assert runner.backend.read(before.emitted).wait()[0, 0] == wanted + 1


def test_a_moved_slot_goes_on(runner: DecodingRunner) -> None:
    runner.start(0, PROMPTS[1], 0, SAMPLED).wait()
    expected = [token for _ in range(6) for token in runner.round(1, PLANS[2]).wait()[0]]
    runner.stop(0)
    runner.start(0, PROMPTS[0], 0, GREEDY).wait()
    runner.start(1, PROMPTS[1], 0, SAMPLED).wait()
    runner.stop(0)
    runner.move(1, 0)
    assert [token for _ in range(6) for token in runner.round(1, PLANS[2]).wait()[0]] == expected


def test_conversations_with_reuse_and_the_end_of_the_context(directory: EngineDirectory) -> None:
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    with LLM(directory.path, backend="tensorrt", drafting=DraftingConfig(4, 4, 16)) as llm:
        text = list(PROMPTS[0])
        for turn in range(3):
            response = llm.generate(text, params)
            assert response.usage.completion_tokens == 20
            assert response.drafting.rounds > 0
            assert (response.usage.reused_tokens > 0) == (turn > 0)
            text += [*response.token_ids[:6], 3]
        with LLM(directory.path, backend="tensorrt", drafting=DraftingConfig(4, 4, 16)) as fresh:
            again = fresh.generate(text, params)
        reused = llm.generate(text, params)
        assert_explained(directory, [text], [GREEDY], [again.token_ids], [reused.token_ids], "with reuse")
        whole = llm.generate([5] * 100, SamplingParams(ignore_eos=True))
        assert (whole.finish_reason, whole.usage.completion_tokens) == ("context", 28)
        batch = llm.handle([Request(PROMPTS[index], None, params) for index in (0, 1, 3)])
        assert [response.usage.completion_tokens for response in batch] == [20, 20, 20]


@pytest.mark.skipif(not (SHIPPED_MODEL / "draft").exists(), reason="the shipped model has no draft head")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_shipped_model(dtype: str, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most one answer in ten differs from plain decoding, each where rounding decides."""
    monkeypatch.syspath_prepend(str(repository))
    from tools.bench import drafting_equality

    limits = replace(drafting_equality.LIMITS, kv_capacity=512, max_batch=1)
    build_engine_directory(
        SHIPPED_MODEL, tmp_path / "engines", limits, None, dtype=dtype, draft=SHIPPED_MODEL / "draft"
    )
    directory = EngineDirectory.open(tmp_path / "engines")
    prompts = drafting_equality.held_out_prompts(directory, 20)
    kinds = ["chain 5", "tree 10/6/60", "mc_sim_7b_63"]
    for comparison in drafting_equality.compare(
        directory, "tensorrt", prompts, 48, kinds, ["greedy", "sampled"], batches=(1,), until_end=True
    ):
        print(drafting_equality.line(comparison))
        assert comparison.explained
        assert len(comparison.differences) <= 0.1 * len(prompts)
