"""The learner on simulated devices and known texts: what it loses against plain decoding and against the best plan."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from published_families import QWEN3_30B_A3B

from edgellm.drafting.acceptance import AcceptanceModel
from edgellm.drafting.config import DraftingConfig
from edgellm.drafting.drafters import candidate_plans, experts_read
from edgellm.drafting.learner import Learner
from edgellm.drafting.seconds import CAPTURED, PLAIN
from edgellm.engines.families import decoder_config
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.speculation.draft_plan import DraftPlan, chain, tree
from edgellm.errors import EngineError
from tools.bench.drafting_simulation import CPU, H200, INT4, SHIPPED
from tools.bench.drafting_workloads import Workload, figures

LIMITS = EngineLimits(draft_top_k=10, draft_steps=6, verify_tree_size=60)
PLANS = candidate_plans(DraftingConfig(), LIMITS)
RUNNER = SimpleNamespace(is_ready=lambda *_: True, takes_given=lambda *_: True)
FREE = SimpleNamespace(constraint=None, said=None, is_over=False, finished=False)

#: What is drafted, and its least speed over plain decoding's and, behind 1,024 tokens, over the best fixed plan's.
CASES = {
    "a_text_that_the_head_never_saw": (Workload(H200, "model", ("unseen",)), 0.98, 1.0),
    "the_same_where_rounds_are_dear": (Workload(CPU, "model", ("unseen",)), 0.98, 1.0),
    "code": (Workload(H200, "model", ("code",)), 1.6, 0.9),
    "texts_that_change": (Workload(INT4, "model", ("code", "unseen", "chat")), 0.99, 0.9),
    "edits": (Workload(H200, "suffix", ("edit",)), 3.5, 0.8),
    "edits_on_a_cpu": (Workload(CPU, "suffix", ("edit", "prose"), length=1500, turn=300), 1.1, 0.7),
    "rules": (Workload(H200, "rules", ("schema",), answers=8, length=150), 2.5, 0.95),
    "batches": (Workload(H200, "model", ("chat", "code"), 4, length=1000), 1.2, 0.9),
}


@pytest.mark.parametrize("name", CASES)
def test_no_window_is_slower_than_plain_and_what_pays_is_taken(name: str) -> None:
    workload, overall, share = CASES[name]
    found = figures(workload)
    print(workload.name, found)
    assert found.worst >= 0.97  # what was earned may be lost: see `Account`. Texts are the checkout's, which change
    assert found.overall >= overall and found.share >= share


@pytest.mark.parametrize("kinds", [("unseen",), ("code", "unseen", "chat", "unseen")])
@pytest.mark.parametrize(("cold", "least"), [(0, 0.97), (SHIPPED.cold, 0.96)])
def test_where_the_host_is_late_for_what_it_is_asked_no_window_is_slower_than_plain(
    kinds: tuple[str, ...], cold: int, least: float
) -> None:
    """A plain step takes as long as the host's, so that choosing is not hidden, and steps chosen look slower than those
    in a row; `cold` ones, the first, make plain decoding look slow until it is timed again. Texts are the checkout's,
    which change; other seeds gave 0.976 at least."""
    found = figures(Workload(SHIPPED._replace(cold=cold), "model", kinds))
    print(found)
    assert found.worst >= least


def choices(learner: Learner, steps: int, seconds: Any, tokens: Any, batch: int = 1) -> dict[str, int]:
    """How often each plan was taken, by name, where steps take and give what they are told to."""
    taken: dict[str, int] = {}
    for _ in range(steps):
        plan, _ = learner.choose(RUNNER, [FREE] * batch, 1000, False)
        name = PLAIN if plan is None else plan.name
        taken[name] = taken.get(name, 0) + 1
        took = seconds(plan, batch)
        learner.record(plan, [tokens(plan)] * batch, took, blocked=took)
    return taken


def test_where_drafting_always_loses_tries_are_rare_and_where_it_gains_it_is_soon_taken() -> None:
    learner = Learner(0, True, None, PLANS)
    losing = choices(learner, 2000, lambda plan, _: 0.001 if plan is None else 0.002, lambda plan: 1)
    assert 3 < 2000 - losing[PLAIN] < 20
    gaining = choices(learner, 1000, lambda plan, _: 0.001 if plan is None else 0.0012, lambda plan: 3 if plan else 1)
    assert gaining[PLAIN] < 600


def test_steps_shrink_with_the_batch_where_nodes_cost() -> None:
    def seconds(plan: DraftPlan | None, batch: int) -> float:
        return 0.001 if plan is None else 0.001 * (1.0 + 0.05 * plan.steps + 0.006 * batch * (plan.tree_size - 1))

    def tokens(plan: DraftPlan | None) -> int:
        return 1 if plan is None else 2 + (plan.tree_size > 10)

    sizes = []
    for batch in (1, 8, 32):
        taken = choices(Learner(0, True, None, PLANS), 600, seconds, tokens, batch)
        most = max(taken, key=lambda name: taken[name])
        sizes.append(next((plan.tree_size for plan in PLANS if plan.name == most), 1))
    print(sizes)
    assert sizes[0] > sizes[1] >= sizes[2]


def test_rounds_of_a_mixture_are_guessed_by_distinct_experts() -> None:
    """Of 128 with 8 chosen 4 rows reach 29 and 16 rows 82: where rounds lose they are hardly tried."""
    chosen, read = experts_read(decoder_config(QWEN3_30B_A3B))
    assert (chosen, round(read, 2)) == (1 / 16, 0.6)
    dense, mixed = CAPTURED, CAPTURED._replace(chosen=chosen, read=read)
    for plan, distinct in ((chain(3), 29.1), (tree(10, 4, 16), 82.4)):
        more = mixed.ratio(plan, 1) - dense.ratio(plan, 1)
        assert more == pytest.approx(read * (distinct / 8 - 1), rel=0.01)
        assert 0 < mixed.ratio(plan, 4) - dense.ratio(plan, 4) < more

    def speed(guessed: tuple[float, float]) -> float:
        """Over plain decoding's, of 300 steps with each draw of what is accepted."""
        steps = tokens = 0.0
        for seed in range(4):
            draw, learner = random.Random(seed), Learner(0, True, None, PLANS, experts=guessed)
            for _ in range(300):
                plan, _ = learner.choose(RUNNER, [FREE], 1000, False)
                took, given = (1.0, 0) if plan is None else (mixed.ratio(plan, 1), plan.steps)
                emitted = 1 + next((n for n in range(given) if draw.random() > 0.75), given)
                learner.record(plan, [emitted], 0.002 * took)
                steps, tokens = steps + took, tokens + emitted
        return tokens / steps

    unaware, aware = speed((1.0, 0.0)), speed((chosen, read))
    assert aware > 0.99 and aware > unaware + 0.003


def test_choices_follow_from_finished_steps_alone() -> None:
    first, second = (Learner(0, True, None, PLANS) for _ in range(2))
    for number in range(400):
        expected = first.choose(RUNNER, [FREE], 1000, False)
        second.report()  # which changes nothing
        assert second.choose(RUNNER, [FREE], 1000, False) == expected
        for learner in (first, second):
            plan = expected[0]
            learner.record(
                plan, [1 if plan is None else 1 + number % 3], 0.001 if plan is None else 0.0015, blocked=1.0
            )
    assert len(first.report().rounds) > 3


def test_plans_that_need_more_room_or_a_capture_are_left_out() -> None:
    learner = Learner(0, True, None, PLANS)
    choices(learner, 300, lambda plan, _: 0.001 if plan is None else 0.0012, lambda plan: 3 if plan else 1)
    seen = set()
    for room in range(12):
        plan, _ = learner.choose(RUNNER, [FREE], room, False)
        assert plan is None or plan.longest <= room
        seen.add(plan)
    assert len(seen) > 1
    runner = SimpleNamespace(is_ready=lambda batch, plan, ruled: plan.kind == "chain", takes_given=lambda *_: False)
    found = {learner.choose(runner, [FREE], 1000, False)[0] for _ in range(200)}
    assert all(plan is None or plan.kind == "chain" for plan in found)


def test_a_step_that_has_begun_is_a_plain_one() -> None:
    learner = Learner(0, True, None, PLANS)
    choices(learner, 100, lambda plan, _: 0.001 if plan is None else 0.0012, lambda plan: 3 if plan else 1)
    assert learner.choose(RUNNER, [FREE], 1000, False, begun=True) == (None, None)
    assert learner.expects_round(1, 0.0001), "where rounds pay none begins"


def test_the_report_says_what_was_chosen_and_why() -> None:
    learner = Learner(0, True, None, PLANS)
    assert learner.report().reason == "nothing was timed yet"
    choices(learner, 400, lambda plan, _: 0.01 if plan is None else 0.015, lambda plan: 3 if plan else 1)
    report = learner.report()
    assert report.chosen in {plan.name for plan in PLANS} and report.explored > 0
    assert report.reason.startswith(f"{report.chosen}: ") and f"; {PLAIN}: 1.00 tokens in " in report.reason
    assert sum(report.rounds.values()) == 400 and report.acceptance["chain"][0] > 0.5
    rates = [forecast.tokens_per_second for forecast in report.forecasts]
    assert rates == sorted(rates, reverse=True) and len(rates) == len(PLANS) + 1
    plain = Learner(0, True, None, PLANS)
    choices(plain, 400, lambda plan, _: 0.01 if plan is None else 0.05, lambda plan: 1)
    assert plain.report().reason.startswith(f"{PLAIN}: 1.00 tokens") and "; the best draft, " in plain.report().reason


def test_candidates_of_each_kind() -> None:
    def names(**values: Any) -> list[str]:
        return [plan.name for plan in candidate_plans(DraftingConfig(**values), LIMITS)]

    trees = ["tree 10/3/8", "tree 10/4/16", "tree 10/5/32", "tree 10/6/60"]
    assert names() == ["chain 2", "chain 3", "chain 5", "chain 6", *trees]
    assert names(kind="chain", draft_steps=5) == ["chain 2", "chain 3", "chain 5"]
    assert names(draft_top_k=1, draft_steps=3) == ["chain 2", "chain 3"]
    assert names(kind="choices", choices=[[0], [1], [0, 0]]) == ["choices 2/1/3", "choices 2/2/4"]
    with pytest.raises(EngineError, match="draft_steps is 7"):
        names(kind="chain", draft_steps=7)


def test_a_text_of_another_kind_is_soon_known_and_a_plan_shows_what_it_gives() -> None:
    drafted, wide = chain(2), tree(10, 3, 50)
    model = AcceptanceModel([drafted, wide])
    first = dict(model.promises())
    for _ in range(20):
        model.record(drafted, [3])
    suited = dict(model.promises())
    assert 2.7 < suited[drafted] <= 3.0 < suited[wide], "what one plan shows is believed of the other"
    assert model.estimates()["chain"][0] > 0.85
    for _ in range(8):
        model.record(drafted, [1])
    unsuited = dict(model.promises())
    assert unsuited[drafted] < 1.4 < first[drafted]
    model.record(None, (), 60)
    assert unsuited[drafted] < dict(model.promises())[drafted] < first[drafted], "a text may change meanwhile"
    model.record(None, (), 2000)
    assert dict(model.promises())[drafted] == pytest.approx(first[drafted], rel=0.01)
    for _ in range(200):  # batches, too
        model.record(drafted, [3, 2, 3])
        model.record(wide, [2, 1, 3])
    shown = dict(model.promises())
    assert shown[wide] < shown[drafted] < 3.0
