"""Rounds of a draft that fills a block in one pass: its candidates, its rows, and that it changes no token."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
from block_checkpoints import BLOCK
from runner_steps import answers, take_step

from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.runners.sampling_state import SamplingValues
from edgellm.engines.speculation.draft_plan import DraftPlan, chain, choices_plan, given, tree
from edgellm.engines.speculation.runner import DecodingRunner

GREEDY, SAMPLED = SamplingValues(), SamplingValues(temperature=0.7, seed=11)
EVERYTHING = SamplingValues(1.0, 0, 0.9, 0.0, 1.2, 0.3, 0.2, seed=5, sequence=2)
PLANS = [chain(4), chain(1), tree(4, 4, 16), tree(3, 2, 10), choices_plan([[0], [1], [0, 0], [1, 0], [0, 0, 0]])]
PROMPTS = [[(7 * index + 3 * seed) % 250 for index in range(length)] for seed, length in enumerate((20, 3, 33, 1))]
COUNT = 16

MakeEngines, OpenRunner = Callable[..., EngineDirectory], Callable[..., object]


@pytest.mark.parametrize(
    ("kind", "agreeing", "backend"),
    [("dflash", True, "numpy"), ("jetspec", True, "fixed on sm_90"), ("dflash", False, "fixed")],
)
def test_drafted_answers_are_those_of_plain_decoding(
    kind: str, agreeing: bool, backend: str, make_engines: MakeEngines, open_eagle: OpenRunner
) -> None:
    """Alone and together, by every plan, in turns with given trees, and with plain steps for longer than pending
    entries last."""
    with open_eagle(make_engines(kind, agreeing), backend) as runner:
        samplings = [GREEDY, SAMPLED, EVERYTHING]
        plain, _ = answers(runner, PROMPTS[:3], samplings, [None])
        for plan in PLANS if backend == "numpy" else PLANS[1:3]:
            drafted, steps = answers(runner, PROMPTS[:1], [GREEDY], [plan])
            assert drafted == plain[:1] and steps < COUNT, plan.name
        assert not agreeing or steps <= COUNT / 1.8
        for plans in ([PLANS[1], given(4, 2)], [*PLANS[:3], *[None] * 6]):
            assert answers(runner, PROMPTS[:3], samplings, plans)[0] == plain


def test_to_the_end_of_the_context_and_chains_at_temperature_0(
    make_engines: MakeEngines, open_eagle: OpenRunner
) -> None:
    """The last rounds are shorter, with a block as long as ever; what is drawn at temperature 0 is the likeliest."""
    with open_eagle(make_engines("dflash")) as runner:
        prompt = [(7 * index + 6) % 250 for index in range(75)]
        count = runner.limits.kv_capacity - len(prompt)
        whole, _ = answers(runner, [prompt], [SAMPLED], [None], count)
        assert answers(runner, [prompt], [SAMPLED], [PLANS[2]], count)[0] == whole
        zero = SamplingValues(temperature=0.0, repetition_penalty=1.3)
        penalized, _ = answers(runner, PROMPTS[:2], [zero] * 2, [None])
        assert answers(runner, PROMPTS[:2], [zero] * 2, [chain(3, sampled=True)])[0] == penalized


def test_packed_drafts_change_no_token(make_engines: MakeEngines, open_eagle: OpenRunner) -> None:
    directory = make_engines("dflash", True, weights="int4")
    assert "draft" in directory.packed_names
    with open_eagle(directory) as runner:
        plain, _ = answers(runner, PROMPTS[:2], [GREEDY, SAMPLED], [None])
        drafted, steps = answers(runner, PROMPTS[:2], [GREEDY, SAMPLED], [PLANS[2]])
        assert drafted == plain and steps < COUNT


def test_sampled_chains_have_q_of_each_place(make_engines: MakeEngines, open_eagle: OpenRunner) -> None:
    """Drawn again with the same seed they are the same; what is kept is the distribution that was drawn from."""
    plan, batch = chain(3, sampled=True), 2
    with open_eagle(make_engines("dflash", False)) as runner:
        found, _ = answers(runner, PROMPTS[:batch], [SAMPLED] * batch, [plan])
        assert answers(runner, PROMPTS[:batch], [SAMPLED] * batch, [plan])[0] == found
        for slot in range(batch):
            runner.start(slot, PROMPTS[slot], 0, SAMPLED).wait()
        runner.round(batch, plan).wait()
        logits = runner.draft.logits(batch, BLOCK)[:, 1:4].astype(np.float64) / SAMPLED.temperature
        q = np.exp(logits - logits.max(axis=-1, keepdims=True))
        chained = runner.draft.proposal(batch, plan).chain
        np.testing.assert_allclose(chained.probabilities, q / q.sum(axis=-1, keepdims=True), atol=1e-5)
        assert len({tuple(tokens) for tokens in chained.tokens.tolist()}) == batch


@pytest.mark.parametrize("kind", ["dflash", "jetspec"])
def test_candidates_are_the_likeliest_of_each_place_and_the_best_products(
    kind: str, make_engines: MakeEngines, open_eagle: OpenRunner
) -> None:
    """By what the pass says of each place, and a tree by looking at all paths of the K likeliest tokens."""
    top_k, steps, size = 3, 4, 12
    with open_eagle(make_engines(kind, False)) as runner:
        for slot in range(2):
            runner.start(slot, PROMPTS[slot], 0, GREEDY).wait()
        shown: list[np.ndarray] = []
        runner.verification.before_acceptance = lambda laid_out: shown.append(
            np.stack((laid_out.nodes.tokens, laid_out.nodes.parents))
        )
        for plan in (chain(4), tree(top_k, steps, size)):
            runner.round(2, plan).wait()
            said = runner.draft.logits(2, BLOCK)[:, 1:].astype(np.float64)
            scores = (
                said
                - np.log(np.exp(said - said.max(-1, keepdims=True)).sum(-1, keepdims=True))
                - said.max(-1, keepdims=True)
            )
            tokens, parents = shown[-1]
            for slot in range(2):
                if plan.kind == "chain":
                    assert tokens[slot, 1:].tolist() == said[slot, :4].argmax(axis=-1).tolist()
                    continue
                best = np.argsort(-scores[slot], axis=-1, kind="stable")[:, :top_k]
                paths: dict[tuple[int, ...], float] = {}
                for depth in range(1, steps + 1):
                    for ranks in product(range(top_k), repeat=depth):
                        ids = tuple(int(best[place, rank]) for place, rank in enumerate(ranks))
                        paths[ids] = sum(scores[slot, place, token] for place, token in enumerate(ids))
                expected = set(sorted(paths, key=paths.__getitem__, reverse=True)[: size - 1])
                ways: list[tuple[int, ...]] = [()]
                for token, parent in zip(tokens[slot, 1:].tolist(), parents[slot, 1:].tolist(), strict=True):
                    ways.append((*ways[parent], token))
                assert set(ways[1:]) == expected


def committed(runner: DecodingRunner) -> dict[str, np.ndarray]:
    """The draft's rows of slot 0, once it has taken what is pending."""
    length = runner.base.lengths[0]
    runner.draft.accept_step(1, runner.draft.taken(1), 128)()
    return {name: cache[0, :, :length].copy() for name, cache in runner.draft.models["draft"].tensors.items()}


@pytest.mark.parametrize("plan", [*PLANS[1:3], None], ids=["chain", "tree", "plain"])
def test_the_drafts_rows_are_those_of_a_prefill_of_the_same_tokens(
    plan: DraftPlan | None, make_engines: MakeEngines, open_eagle: OpenRunner
) -> None:
    """Whatever led to them; and a text that goes on where another began shares the rows that it can."""
    with open_eagle(make_engines("dflash")) as runner:
        text = [*PROMPTS[0], *runner.start(0, PROMPTS[0], 0, GREEDY).wait().tolist()]
        for _ in range(7):
            text += take_step(runner, 1, plan).wait()[0]
        found = committed(runner)
        runner.stop(0)
        runner.start(0, text[:-1], 0, GREEDY).wait()
        expected = committed(runner)
        assert {name: values.shape for name, values in found.items()} == {n: v.shape for n, v in expected.items()}
        assert len(found) == 4  # two layers
        for name, values in expected.items():
            np.testing.assert_allclose(found[name], values, atol=2e-3, err_msg=name)
        runner.stop(0)
        runner.start(0, text[:-1], 10, GREEDY).wait()
        for name, values in committed(runner).items():
            np.testing.assert_allclose(values, expected[name], atol=2e-3, err_msg=name)
