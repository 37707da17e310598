"""Measuring round costs with a real runner, and what adaptive drafting does with them."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

from edgellm.drafting.adaptive import adaptive_drafting, measure_round_costs
from edgellm.drafting.config import DraftingConfig
from edgellm.drafting.controller import candidate_plans
from edgellm.drafting.costs import PLAIN, Device, read_round_costs
from edgellm.engines.backends.opening import open_backend
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.runners.sampling_state import SamplingValues
from edgellm.engines.speculation.draft_plan import chain
from edgellm.engines.speculation.runner import DecodingRunner
from edgellm.errors import EngineError


@contextmanager
def opened(path):
    """A runner of base and draft on the NumPy backend."""
    directory = EngineDirectory.open(path)
    runner = DecodingRunner.open(open_backend("numpy", directory), directory)
    try:
        yield directory, runner
    finally:
        runner.close()


def tokens_of(runner, plan, count: int) -> list[int]:
    """The first `count` tokens of an answer, with rounds of `plan`, or plainly without one."""
    found = [int(runner.start(0, [5, 6, 7, 8], 0, SamplingValues()).wait()[0])]
    while len(found) < count:
        found += runner.step(1, plan).wait()[0]
    runner.stop(0)
    return found[:count]


def test_every_configuration_is_measured_for_every_batch(tiny_draft_engines):
    with opened(tiny_draft_engines) as (directory, runner):
        plans = candidate_plans(DraftingConfig.largest(directory.limits), directory.limits)
        before = tokens_of(runner, plans[-1], 30)
        costs = measure_round_costs(runner, plans, directory.limits.batches)
        assert set(costs.measured) == {PLAIN, "chain 2", "chain 3", "tree 4/3/8", "tree 4/3/12"}
        assert all(set(points) == {1, 2} and min(points.values()) > 0 for points in costs.measured.values())
        assert runner.base.lengths == [0, 0]
        assert tokens_of(runner, plans[-1], 30) == before == tokens_of(runner, None, 30)


@pytest.mark.parametrize("sampled", [False, True])
def test_the_controller_decodes_with_what_was_measured(tiny_draft_engines, tmp_path, monkeypatch, sampled):
    monkeypatch.setenv("EDGELLM_CACHE_DIR", str(tmp_path))
    config = DraftingConfig(kind="chain", draft_steps=3, sampled=sampled)
    with opened(tiny_draft_engines) as (directory, runner):
        expected = tokens_of(runner, None, 60)
        controller = adaptive_drafting(config, directory, runner)
        (kept,) = tmp_path.rglob("round-costs-*.json")
        stamp, costs = kept.stat().st_mtime_ns, read_round_costs(kept, Device.present(directory, "numpy"))
        found = [int(runner.start(0, [5, 6, 7, 8], 0, SamplingValues()).wait()[0])]
        while len(found) < 60:
            plan = controller.next_plan(directory.limits.kv_capacity - runner.base.lengths[0], 1)
            tokens = runner.step(1, plan).wait()[0]
            controller.record(plan, [len(tokens)], costs.seconds(PLAIN if plan is None else plan.name, 1))
            found += tokens
        assert found[:60] == expected
        assert sum(controller.report().rounds.values()) > 10
    with opened(tiny_draft_engines) as (directory, runner):
        adaptive_drafting(config, directory, runner)
        assert kept.stat().st_mtime_ns == stamp


def test_kept_costs_that_rounds_prove_wrong_are_measured_again(tiny_draft_engines, tmp_path, monkeypatch):
    monkeypatch.setenv("EDGELLM_CACHE_DIR", str(tmp_path))
    with opened(tiny_draft_engines) as (directory, runner):
        controller = adaptive_drafting(DraftingConfig(kind="chain", draft_steps=3), directory, runner)
        (kept,) = tmp_path.rglob("round-costs-*.json")
        measured = read_round_costs(kept, Device.present(directory, "numpy"))
        plain, drafted = (measured.seconds(name, 1) for name in (PLAIN, "chain 3"))
        for _ in range(100):
            controller.record(None, [1], plain)
            controller.record(chain(3), [2], 3 * drafted)
        assert not kept.exists()
        adaptive_drafting(DraftingConfig(kind="chain", draft_steps=3), directory, runner)
        assert kept.exists()


def test_a_configuration_that_the_engines_cannot_serve_is_refused(tiny_draft_engines):
    with opened(tiny_draft_engines) as (directory, runner), pytest.raises(EngineError, match="draft_steps is 5"):
        adaptive_drafting(DraftingConfig(4, 5, 12), directory, runner)
