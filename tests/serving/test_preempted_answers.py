"""Random schedules of clients' requests, with priorities or without: answers that gave way are what they are
undisturbed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from priority_driver import SLOTS

from edgellm import Request, SamplingParams, SpecDecodeRuntime
from edgellm.drafting.config import DraftingConfig
from edgellm.structure.description import Structure

TREE = DraftingConfig(draft_top_k=4, draft_steps=3, verify_tree_size=12, adaptive=False)
DRAFTINGS = {"plain": None, "tree": TREE, "chain": DraftingConfig(kind="chain", draft_steps=3), "suffix": "suffix"}
#: Bytes: nothing is kept, one sequence or two are, all are.
BUDGETS = {"none": 0, "tiny": 60_000, "all": 1 << 24}


@pytest.fixture(scope="module", params=list(DRAFTINGS))
def runtime(request: pytest.FixtureRequest, priority_engines: Path) -> Iterator[SpecDecodeRuntime]:
    drafting = DRAFTINGS[request.param]
    if drafting == "suffix":
        drafting = DraftingConfig(kind="suffix")
    with SpecDecodeRuntime(priority_engines, drafting=drafting, backend="numpy") as opened:
        yield opened


@pytest.fixture(scope="module")
def schedules(repository: Path) -> Iterator[Any]:
    """The module that serves random schedules."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(repository))
        from tools.bench import preemption_schedules

        yield preemption_schedules


@pytest.fixture(scope="module")
def thirty(schedules: Any, priority_engines: Path) -> tuple[list[Request], list[Any]]:
    """Requests and their answers, each alone."""
    pool = pool_of(30)
    with SpecDecodeRuntime(priority_engines, backend="numpy") as plain:
        return pool, list(schedules.alone(plain, pool))


def pool_of(count: int, seed: int = 0) -> list[Request]:
    """Requests of many kinds."""
    chosen, found = random.Random(seed), []
    for number in range(count):
        structure = chosen.choice((None, None, Structure(regex="[a-z]{4,30}( [0-9]{2,9}){0,3}")))
        params = SamplingParams(
            temperature=chosen.choice((0.0, 0.8, 1.3)),
            top_k=chosen.choice((0, 20)),
            repetition_penalty=chosen.choice((1.0, 1.2)),
            presence_penalty=chosen.choice((0.0, 0.4)),
            seed=number,
            max_tokens=chosen.choice((1, 4, 12, 30)),
            stop=chosen.choice(((), ("e",), ("ab", "zz"))) if structure is None else (),
            ignore_eos=structure is None and chosen.random() < 0.7,
            logprobs=chosen.choice((None, None, 3)),
            logit_bias=chosen.choice(({}, {}, {101: 1.5})),
            structure=structure,
        )
        prompt = [chosen.randrange(250) for _ in range(chosen.choice((1, 3, 9, 17, 40)))]
        found.append(Request(prompt, None, params, chosen.choice((None, None, "one", "two", "three"))))
    return found


def check(
    schedules: Any, runtime: SpecDecodeRuntime, expected: Sequence[Any], pool: list[Request], seeds: range
) -> Counter[str]:
    """Serve schedules, of which every answer must be right; how many gave way to more urgent ones, and to equals."""
    gave_way: Counter[str] = Counter()
    for seed in seeds:
        kind = "equal" if seed % 4 in (1, 2) else "urgent"
        schedule = schedules.random_schedule(seed, len(pool), SLOTS if kind == "urgent" else 2 * SLOTS)
        if kind == "equal":
            later = {arrival: str(arrival.number % 4) for arrival in schedule if arrival.round > 8}
            schedule = [replace(each, priority=0, client=later.get(each, "the first")) for each in schedule]
        runtime._keeper.budget = list(BUDGETS.values())[seed % 3]
        served = schedules.serve(runtime, pool, schedule, seed % 2 == 0)
        for outcome in served.outcomes:
            assert schedules.is_right(outcome, expected[outcome.arrival.number], "numpy"), (seed, outcome)
            assert outcome.kept == 0 or seed % 3, "rows were kept without a budget"
            assert outcome.recomputed == 0 or seed % 3 != 2, "rows were not kept though there was room"
            gave_way[kind] += bool(outcome.kept or outcome.recomputed)
        assert served.most_bytes <= runtime._keeper.budget
    return gave_way


@pytest.mark.parametrize("ahead", [0, 1])
def test_answers_that_gave_way_are_what_they_are_undisturbed(
    schedules: Any,
    runtime: SpecDecodeRuntime,
    thirty: tuple[list[Request], list[Any]],
    ahead: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With every kind of draft; kept, computed again, and both; with the next step under way, as on a GPU, too."""
    pool, expected = thirty
    monkeypatch.setattr(runtime._open_runner().backend, "steps_ahead", ahead)
    gave_way = check(schedules, runtime, expected, pool, range(6 * ahead, 6 * ahead + 6))
    assert gave_way["urgent"] > 1 and gave_way["equal"] > 1


@pytest.mark.slow
def test_200_schedules(schedules: Any, runtime: SpecDecodeRuntime, plain_runtime: SpecDecodeRuntime) -> None:
    pool = pool_of(100, 1)
    expected = list(schedules.alone(plain_runtime, pool))
    gave_way = check(schedules, runtime, expected, pool, range(100, 300))
    assert gave_way["urgent"] > 75 and gave_way["equal"] > 40


@pytest.mark.slow
def test_the_shipped_model_with_images_and_adapters(
    repository: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(repository))
    from tools.bench import preemption_equality as equality

    directory = equality.build(equality.SHIPPED_MODEL, tmp_path / "engines", "numpy")
    ways = [("plain", "none"), ("chain", "all")]
    found = equality.compare(directory, "numpy", range(4, 6), ways, 8, equality.SHIPPED_MODEL)
    assert equality.is_fine(found) and not any(each.differences for each in found)
    assert found[0].counts["recomputed"].answers and found[1].counts["kept"].answers
    assert "differ" in found[0].line()
    found[1].counts["kept"].differ = 1
    assert not equality.is_fine(found)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_cache", ["compute", "int8"])
def test_rows_that_were_kept_change_no_answer_on_a_gpu(
    repository: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kv_cache: str
) -> None:
    """Nor those that were computed again."""
    monkeypatch.syspath_prepend(str(repository))
    from tools.bench import preemption_equality as equality

    directory = equality.build(equality.SHIPPED_MODEL, tmp_path / "engines", "tensorrt", kv_cache)
    ways = [("plain", "all"), ("chain", "all"), ("plain", "none")]
    found = equality.compare(directory, "tensorrt", range(9), ways, 16, equality.SHIPPED_MODEL)
    assert equality.is_fine(found), [each.differences for each in found]
    assert all(each.counts["kept" if each.budget == "all" else "recomputed"].answers for each in found)
