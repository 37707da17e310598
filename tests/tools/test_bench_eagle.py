"""The parts of the EAGLE benchmark that need no GPU: schedules of simulated lengths, and the random draft head."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgellm.engines.speculation.draft_plan import chain, tree


@pytest.fixture(autouse=True)
def bench_modules(repository: Path, monkeypatch):
    monkeypatch.syspath_prepend(str(repository / "tools" / "bench"))


@pytest.mark.parametrize(("mean", "steps"), [(4.24, 6), (1.71, 1), (2.5, 3), (1.0, 4), (3.333, 5)])
def test_schedules_have_the_mean_that_is_asked_for(mean, steps):
    from simulated_acceptance import SCHEDULE_ROUNDS, schedule

    lengths = schedule(mean, steps)
    assert len(lengths) == SCHEDULE_ROUNDS and lengths.min() >= 1 and lengths.max() <= steps + 1
    assert abs(lengths.mean() - mean) <= 0.5 / SCHEDULE_ROUNDS + 1e-9


def test_simulated_means_keep_to_one_draft():
    from simulated_acceptance import simulated_mean

    reference = tree(10, 6, 60)
    means = [
        simulated_mean(plan, reference, 4.24) for plan in (chain(1), chain(4), chain(6), tree(10, 4, 16), reference)
    ]
    assert means == sorted(means)
    assert means[-1] == pytest.approx(4.24) and 1.5 < means[0] < 2.0
