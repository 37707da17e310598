"""The parts of the EAGLE benchmark that need no GPU: schedules of simulated lengths, and the random draft head."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from runner_steps import take_step

from edgellm.engines.backends.opening import open_backend
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.runners.sampling_state import SamplingValues
from edgellm.engines.speculation.draft_plan import chain, tree
from edgellm.engines.speculation.runner import DecodingRunner


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


@pytest.mark.parametrize("plan", [chain(3), tree(4, 3, 12)])
def test_rounds_of_a_random_draft_get_the_lengths_of_the_schedule(make_checkpoint, tmp_path, plan):
    """The kernel's rule in NumPy, before the real acceptance: the path's tokens become the likeliest."""
    from random_draft import write_draft
    from simulated_acceptance import schedule

    # Seven layers: so many the layers need whose features EAGLE-3 takes by default.
    base = make_checkpoint(
        tmp_path / "base", model_type="llama", architectures=["LlamaForCausalLM"], num_hidden_layers=7
    )
    write_draft(tmp_path / "draft", json.loads((base / "config.json").read_text()), draft_vocabulary=64)
    limits = EngineLimits(1, 16, 240, draft_top_k=4, draft_steps=3, verify_tree_size=12)
    build_engine_directory(base, tmp_path / "engines", limits, [], draft=tmp_path / "draft")
    directory = EngineDirectory.open(tmp_path / "engines")
    runner = DecodingRunner.open(open_backend("numpy", directory), directory)
    wanted = iter(schedule(2.6, 3)[:40])
    expected = []

    def force(verified) -> None:
        length, nodes, logits = int(next(wanted)), verified.nodes, verified.logits.logits
        depths = np.where(nodes.tokens[0] >= 0, nodes.depths[0], 0)
        node = next(int(np.argmax(depths == depth)) for depth in range(length - 1, -1, -1) if (depths == depth).any())
        expected.append(int(depths[node]) + 1)
        logits[0, node] = -np.arange(logits.shape[2])  # token 0, which no child carries
        assert 0 not in nodes.tokens[0, nodes.parents[0] == node]
        while node > 0:
            parent = nodes.parents[0, node]
            logits[0, parent, nodes.tokens[0, node]] = 1e30
            node = parent

    runner.verification.before_acceptance = force
    try:
        runner.start(0, [5, 6, 7], 0, SamplingValues()).wait()
        lengths = [len(take_step(runner, 1, plan).wait()[0]) for _ in range(40)]
    finally:
        runner.close()
    assert lengths == expected
    if plan.kind == "chain":  # such a small head is not sure enough of its tokens for a tree as deep in every round
        assert lengths == schedule(2.6, 3)[:40].tolist()
