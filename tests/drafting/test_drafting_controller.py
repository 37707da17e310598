"""The drafting controller on simulated devices and texts: what it loses against the best configuration, in percent."""

from __future__ import annotations

import math

import numpy as np
import pytest

from edgellm.drafting.acceptance import AcceptanceModel
from edgellm.drafting.config import DraftingConfig
from edgellm.drafting.controller import DraftingController, candidate_plans
from edgellm.drafting.costs import PLAIN, RoundCosts
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.speculation.draft_plan import DraftPlan, chain
from edgellm.errors import EngineError

LIMITS = EngineLimits(draft_top_k=10, draft_steps=6, verify_tree_size=60)
PLANS = candidate_plans(DraftingConfig(), LIMITS)
CHAINS = (2, 3, 5, 6)
# Milliseconds of a round. On a GPU verifying is cheap and drafting is not; on a CPU, as the shipped model has it on two
# cores, every verified node costs.
GPU = {PLAIN: 0.88} | {f"chain {n}": 1.05 + 0.17 * n for n in CHAINS}
GPU |= {"tree 10/3/8": 1.65, "tree 10/4/16": 1.9, "tree 10/5/32": 2.3, "tree 10/6/60": 2.85}
CPU = {PLAIN: 7.5, "chain 2": 16.8, "chain 3": 18.5, "chain 5": 23.1, "chain 6": 26.9}
CPU |= {"tree 10/3/8": 23.0, "tree 10/4/16": 30.0, "tree 10/5/32": 42.0, "tree 10/6/60": 60.0}
CPU_PLANS = candidate_plans(DraftingConfig(kind="chain", draft_steps=5), LIMITS)
LOSING = {name: cost if name == PLAIN else 5.0 * cost for name, cost in GPU.items()}
# How much a tree helps: the logarithm of a level's miss, against a chain's.
GAINS = {"tree 10/3/8": 1.3, "tree 10/4/16": 1.4, "tree 10/5/32": 1.5, "tree 10/6/60": 1.6}


def truth(plan: DraftPlan | None, acceptance: float) -> list[float]:
    """The acceptance at each depth of a plan where a chain's is `acceptance`."""
    if plan is None:
        return []
    return [1.0 - (1.0 - acceptance) ** GAINS.get(plan.name, 1.0)] * plan.steps


def tokens(depths: list[float]) -> float:
    return 1.0 + sum(math.prod(depths[:depth]) for depth in range(1, len(depths) + 1))


def name_of(plan: DraftPlan | None) -> str:
    return PLAIN if plan is None else plan.name


def best_rate(costs: dict[str, float], acceptance: float, plans=PLANS) -> float:
    """Tokens per millisecond of the configuration that an oracle would take."""
    return max(tokens(truth(plan, acceptance)) / costs[name_of(plan)] for plan in (None, *plans))


def make(costs: dict[str, float], believed: dict[str, float] | None = None, plans=PLANS, wrong=None):
    measured = costs if believed is None else believed
    return DraftingController(plans, RoundCosts({name: {1: cost / 1000} for name, cost in measured.items()}), wrong)


def simulate(
    controller, costs, acceptance: float, count: int, seed: int, in_flight: int = 0, load=None, noise=0.03, plans=PLANS
) -> tuple[float, dict]:
    """Emit `count` tokens; returns the regret (share of the oracle's speed that was lost) and rounds by name.

    `load` gives the factor by which the machine is slow at a time in seconds, for the oracle as well.
    """
    random = np.random.default_rng(seed)
    emitted, spent, work, used, unread = 0, 0.0, 0.0, {}, []
    while emitted < count:
        plan = controller.next_plan(10_000, 1)
        length = 1
        for chance in truth(plan, acceptance):
            if random.random() >= chance:
                break
            length += 1
        factor = 1.0 if load is None else load(spent)
        seconds = factor * costs[name_of(plan)] / 1000 * math.exp(noise * random.standard_normal())
        unread.append((plan, [length], seconds))
        if len(unread) > in_flight:
            controller.record(*unread.pop(0))
        emitted += length
        spent += seconds
        work += seconds / factor
        used[name_of(plan)] = used.get(name_of(plan), 0) + 1
    return 1.0 - emitted / work / 1000 / best_rate(costs, acceptance, plans), used


@pytest.mark.parametrize(
    ("device", "in_flight"),
    [
        pytest.param(GPU, 1, id="GPU-1"),
        pytest.param(CPU, 0, id="CPU-0"),
        pytest.param(GPU, 0, id="GPU-0", marks=pytest.mark.slow),
        pytest.param(CPU, 1, id="CPU-1", marks=pytest.mark.slow),
    ],
)
def test_regret_on_a_steady_text(device, in_flight):
    """What 2,000 tokens lose, finding out included, of which 2 % goes into trying what does not look best."""
    regrets = []
    for acceptance in (0.05, 0.5, 0.7, 0.8, 0.9):
        found = [simulate(make(device), device, acceptance, 2000, seed, in_flight)[0] for seed in range(3)]
        print(f"acceptance {acceptance}: regret {np.mean(found):.1%}, at most {max(found):.1%}")
        regrets.append(np.mean(found))
    print(f"mean regret {np.mean(regrets):.1%}")
    assert max(regrets) < 0.08
    assert np.mean(regrets) < 0.05


@pytest.mark.parametrize("count", [10, 30, 100])
def test_regret_of_a_first_short_answer(count):
    """The shipped model's costs, nothing learned yet: a text that suits the draft gains from the first round on."""
    regrets = {}
    for acceptance in (0.3, 0.85, 0.93):
        controllers = [make(CPU, plans=CPU_PLANS) for _ in range(30)]
        lost = [simulate(each, CPU, acceptance, count, n, plans=CPU_PLANS)[0] for n, each in enumerate(controllers)]
        regrets[acceptance] = float(np.mean(lost))
    print(f"{count} tokens: mean regret {regrets}")
    assert regrets[0.93] < 0.06 and regrets[0.85] < 0.12
    assert regrets[0.3] < {10: 0.25, 30: 0.12, 100: 0.07}[count]


def test_where_drafting_always_loses_it_decodes_plainly():
    for acceptance in (0.05, 0.5, 0.95):
        regret, used = simulate(make(LOSING), LOSING, acceptance, 2000, 0)
        print(f"acceptance {acceptance}: regret {regret:.2%}, {used}")
        assert regret < 0.025
        assert used[PLAIN] > 0.95 * sum(used.values())


@pytest.mark.parametrize("device", [GPU, CPU], ids=["GPU", "CPU"])
def test_it_follows_a_text_that_changes(device):
    """What a change costs: the regret over the first 500 tokens after it, which includes finding out."""
    controller = make(device)
    regrets = {}
    for number, acceptance in enumerate((0.85, 0.05, 0.85, 0.3, 0.95, 0.02, 0.9)):
        early, _ = simulate(controller, device, acceptance, 500, number)
        late, used = simulate(controller, device, acceptance, 1500, 100 + number)
        print(f"to {acceptance}: regret {early:.1%}, then {late:.1%}, {sorted(used.items(), key=lambda x: -x[1])[:2]}")
        regrets[number] = (early, late)
    assert max(late for _, late in regrets.values()) < 0.09
    assert max(early for early, _ in regrets.values()) < 0.3
    assert np.mean([early for early, _ in regrets.values()]) < 0.15


@pytest.mark.parametrize("costs, longest", [(GPU, 60), (CPU, 130)], ids=["GPU", "CPU"])
def test_plain_decoding_never_lasts_long_without_a_try(costs, longest):
    """On a text that no draft suits, tries come at a price of 2 %; on one that does, they bring drafting back."""
    controller = make(costs)
    simulate(controller, costs, 0.02, 3000, 0)
    assert controller.report().chosen == PLAIN
    drafted = [controller.next_plan(1000, 1) is not None]
    while len(drafted) < 2000:
        plan = controller.next_plan(1000, 1)
        drafted.append(plan is not None)
        controller.record(plan, [1], costs[name_of(plan)] / 1000)
    gaps = np.diff([0, *np.flatnonzero(drafted)])
    print(f"steps from try to try: {np.mean(gaps):.0f}, at most {max(gaps)}")
    assert max(gaps) <= longest
    _, used = simulate(controller, costs, 0.9, 400, 1)
    assert used.get(PLAIN, 0) < 200
    assert controller.report().chosen != PLAIN


@pytest.mark.parametrize("factor", [0.5, 2.0])
@pytest.mark.parametrize("acceptance", [0.3, 0.9])
def test_costs_that_were_measured_wrongly_are_corrected_by_what_rounds_take(factor, acceptance):
    """Drafts that were thought half or twice as dear as they are: the first 600 tokens, and what remains then."""
    believed = {name: cost * (1.0 if name == PLAIN else factor) for name, cost in CPU.items()}
    controller = make(CPU, believed, CPU_PLANS)
    early, _ = simulate(controller, CPU, acceptance, 600, 0, plans=CPU_PLANS)
    late, used = simulate(controller, CPU, acceptance, 2000, 1, plans=CPU_PLANS)
    print(f"regret {early:.1%}, then {late:.1%}, {used}")
    assert early < 0.25 and late < 0.06


def test_costs_that_are_wrong_by_far_are_told_once():
    for factor, expected in ((1.0, 0), (0.5, 1), (2.0, 1)):
        told = []
        believed = {name: cost * (1.0 if name == PLAIN else factor) for name, cost in CPU.items()}
        controller = make(CPU, believed, CPU_PLANS, lambda told=told: told.append(1))
        simulate(controller, CPU, 0.8, 4000, 0, noise=0.15, load=_unsteady, plans=CPU_PLANS)
        assert len(told) == expected, factor


def _unsteady(seconds: float) -> float:
    """A machine that does other work at times."""
    return (1.0, 3.0, 1.7, 1.0, 2.2)[int(seconds / 0.5) % 5]


@pytest.mark.parametrize("acceptance", [0.05, 0.5, 0.93])
def test_load_that_comes_and_goes_changes_little(acceptance):
    conditions = {"noise": 0.15, "load": _unsteady, "plans": CPU_PLANS}
    found = [simulate(make(CPU, plans=CPU_PLANS), CPU, acceptance, 3000, seed, **conditions)[0] for seed in range(3)]
    print(f"regret {np.mean(found):.1%}, at most {max(found):.1%}")
    assert np.mean(found) < 0.08


def test_a_device_that_slows_down_as_a_whole_changes_no_choice():
    controller = make(GPU)
    simulate(controller, GPU, 0.8, 1500, 0)
    slow = {name: 1.8 * cost for name, cost in GPU.items()}
    regret, used = simulate(controller, slow, 0.8, 1500, 1)
    print(f"regret {regret:.1%}, {used}")
    assert regret < 0.08


def test_one_interrupted_round_does_not_drive_a_configuration_out():
    controller = make(GPU)
    simulate(controller, GPU, 0.8, 1000, 0)
    chosen = controller.report().chosen
    plan = next(plan for plan in PLANS if plan.name == chosen)
    controller.record(plan, [plan.steps + 1], 30.0)  # half a minute: the machine slept
    assert controller.next_plan(1000, 1) is not None
    regret, _ = simulate(controller, GPU, 0.8, 1000, 1)
    assert regret < 0.06


@pytest.mark.parametrize("acceptance", [0.5, 0.6, 0.7, 0.8, 0.9])
def test_a_chain_goes_on_while_a_node_is_worth_its_time(acceptance):
    """Depth d pays while its probability of being reached is at least tokens per ms times the ms that it adds."""
    plans, added = [chain(steps) for steps in range(1, 9)], 0.2
    costs = {PLAIN: 1.0} | {plan.name: 1.2 + added * plan.steps for plan in plans}
    controller = make(costs, plans=plans)
    random = np.random.default_rng(0)
    for _ in range(400):
        length = 1 + int(np.argmin([*(random.random(8) < acceptance), False]))
        controller.record(plans[-1], [length], costs["chain 8"] / 1000)
    controller.next_plan(1000, 1)
    report = controller.report()
    best = report.forecasts[0]
    steps = int(best.name.removeprefix("chain "))
    reached = [0.0, *np.cumprod(report.acceptance["chain"]), 0.0]
    worth = best.tokens_per_second / 1000 * added
    print(f"{best.name}: reached {reached[steps]:.3f}, next {reached[steps + 1]:.3f}, worth from {worth:.3f}")
    assert reached[steps] >= worth - 1e-9 and reached[steps + 1] <= worth + 1e-9
    chosen = next(forecast for forecast in report.forecasts if forecast.name == report.chosen)
    assert chosen.tokens_per_second * 1.02 >= best.tokens_per_second * (1 - 1e-9)


def test_plans_that_need_more_room_are_left_out():
    controller = make(GPU)
    simulate(controller, GPU, 0.95, 500, 0)
    for room in range(1, 12):
        plan = controller.next_plan(room, 1)
        assert (0 if plan is None else plan.steps) + 1 <= room
    assert controller.next_plan(0, 1) is None


def test_steps_shrink_with_the_batch_where_drafting_loses():
    """Where a batch makes every node cost, the chosen plan gets smaller."""
    batches = (1, 8, 32)
    costs = {PLAIN: {1: 1e-3, 8: 1.05e-3, 32: 1.1e-3}}
    for plan in PLANS:
        costs[plan.name] = {
            size: (1.0 + 0.05 * plan.steps + 0.006 * size * (plan.tree_size - 1)) * 1e-3 for size in batches
        }
    sizes = []
    for batch in batches:
        controller = DraftingController(PLANS, RoundCosts(costs))
        random = np.random.default_rng(0)
        for _ in range(700):
            plan = controller.next_plan(1000, batch)
            lengths = [1 + int(np.argmin([*(random.random(len(t)) < t), False])) for t in [truth(plan, 0.6)] * batch]
            controller.record(plan, lengths, RoundCosts(costs).seconds(name_of(plan), batch))
        chosen = next((plan for plan in PLANS if plan.name == controller.report().chosen), None)
        sizes.append(chosen.tree_size if chosen else 1)
    print(sizes)
    assert sizes[0] > sizes[1] >= sizes[2]


def test_what_is_likely_is_what_comes_next_but_for_tries_and_is_not_noted():
    controller, other = make(GPU), make(GPU)
    tried = 0
    for number in range(300):
        likely = controller.likely(1000, 1)
        assert controller.likely(3, 1) is None or controller.likely(3, 1).steps < 3
        plan = controller.next_plan(1000, 1)
        assert plan == other.next_plan(1000, 1), "asking changes nothing"
        tried += plan != likely
        for each in (controller, other):
            each.record(plan, [1 + number % 3 if plan is not None else 1], GPU[name_of(plan)] / 1000)
    assert 0 < tried == controller.report().explored
    assert controller.plain_seconds(1) == pytest.approx(GPU[PLAIN] / 1000, rel=0.3)


def test_choices_follow_from_finished_rounds_alone():
    controller, other = make(GPU), make(GPU)
    for plan, length in ((PLANS[2], 3), (PLANS[-1], 5), (None, 1), (PLANS[0], 1)) * 20:
        seconds = GPU[name_of(plan)] / 1000
        controller.record(plan, [length], seconds)
        other.record(plan, [length], seconds)
        other.report()  # which changes nothing
        assert controller.next_plan(1000, 1) == other.next_plan(1000, 1)


def test_rounds_of_the_deterministic_form_count_for_their_plan():
    plans = candidate_plans(DraftingConfig(kind="chain", draft_steps=3, sampled=True), LIMITS)
    costs = RoundCosts({name: {1: 0.001} for name in (PLAIN, *(plan.name for plan in plans))})
    controller = DraftingController(plans, costs)
    controller.record(plans[1].deterministic(), [2], 0.001)
    assert controller.report().rounds == {"chain 3 sampled": 1}


def test_the_report_says_what_was_chosen_and_why():
    controller = make(CPU)
    simulate(controller, CPU, 0.85, 800, 0)
    report = controller.report()
    assert report.chosen in {plan.name for plan in PLANS}
    assert report.reason.startswith(f"{report.chosen}: ") and f"; {PLAIN}: 1.00 tokens in 7." in report.reason
    assert sum(report.rounds.values()) > 200 and 0 < report.explored < 0.2 * sum(report.rounds.values())
    assert abs(report.acceptance["chain"][0] - 0.85) < 0.1
    rates = [forecast.tokens_per_second for forecast in report.forecasts]
    assert rates == sorted(rates, reverse=True) and len(rates) == len(PLANS) + 1
    plain = make(LOSING)
    simulate(plain, LOSING, 0.5, 300, 0)
    assert plain.report().reason.startswith(f"{PLAIN}: 1.00 tokens") and "; the best draft, " in plain.report().reason


def test_candidates_of_each_kind():
    def names(**values):
        return [plan.name for plan in candidate_plans(DraftingConfig(**values), LIMITS)]

    assert names() == [f"chain {n}" for n in CHAINS] + ["tree 10/3/8", "tree 10/4/16", "tree 10/5/32", "tree 10/6/60"]
    assert names(kind="chain", draft_steps=5) == [f"chain {n}" for n in (2, 3, 5)]
    assert names(draft_top_k=1, draft_steps=3) == ["chain 2", "chain 3"]
    assert names(kind="choices", choices=[[0], [1], [0, 0]]) == ["choices 2/1/3", "choices 2/2/4"]
    with pytest.raises(EngineError, match="draft_steps is 7"):
        names(kind="chain", draft_steps=7)


def test_acceptance_is_borrowed_until_a_kind_has_figures_of_its_own():
    model = AcceptanceModel({"chain": 1.0, "tree": 1.5}, 3)
    for _ in range(200):
        model.record("chain", 2, [3])
        model.record("chain", 2, [1])
    estimates = model.estimates()
    assert abs(estimates["chain"][0] - 0.5) < 0.05
    assert estimates["chain"][1] > 0.9  # once the first was right the second always was
    assert 0.55 < estimates["tree"][0] < 0.75  # 1 - 0.5^1.5 = 0.65
    for _ in range(500):
        model.age()
    assert abs(model.estimates()["chain"][0] - estimates["chain"][0]) < 0.15
    for _ in range(4):  # what is old gives way quickly
        model.record("chain", 2, [3])
    assert model.estimates()["chain"][0] > 0.7
