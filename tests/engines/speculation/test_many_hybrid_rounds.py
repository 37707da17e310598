"""Drafted rounds by the thousand through whole models with recurrent layers: memory stays flat, states are those of
plain decoding. With `-s` they print what they found."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from mtp_checkpoints import TINY, add_head
from runner_steps import take_step
from tiny_families import RECURRENT

from edgellm.engines.backends.opening import open_backend
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.runners.sampling_state import SamplingValues
from edgellm.engines.speculation.draft_plan import DraftPlan, chain, given, tree
from edgellm.engines.speculation.round import GivenTree
from edgellm.engines.speculation.runner import DecodingRunner

#: As small as models can be that have each kind of layer.
SMALL = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "max_position_embeddings": 1 << 16,
}
DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MODELS = ("qwen3_5 and its head", "lfm2")
PROMPT = [3, 141, 59, 26, 5]
DRAWN = SamplingValues(temperature=1.0, seed=11)


def made(make_checkpoint: Callable[..., Path], folder: Path, model: str, limits: EngineLimits) -> EngineDirectory:
    """An engine directory without plans: Qwen3.5's own head drafts, LFM2 takes what is given."""
    if model == "lfm2":
        base = make_checkpoint(folder / "base", 1, **RECURRENT["lfm2"] | SMALL)
    else:
        base = add_head(make_checkpoint(folder / "base", 1, **TINY | SMALL | DELTA))
    build_engine_directory(base, folder / "engines", limits, [])
    return EngineDirectory.open(folder / "engines")


def opened(directory: EngineDirectory) -> closing[DecodingRunner]:
    """A runner on NumPy, to be closed."""
    backend = open_backend("numpy", directory)
    return closing(DecodingRunner.open(backend, directory, drafts=directory.draft is not None))


def limits_of(model: str, context: int, kv_cache: str = "compute") -> EngineLimits:
    drafts = {} if model == "lfm2" else {"draft_top_k": 2, "draft_steps": 2, "verify_tree_size": 6}
    return EngineLimits(1, 16, context, kv_cache=kv_cache, **drafts)


class Said:
    """Candidates that cost no model: what last followed each token, and beside it what never does."""

    def __init__(self) -> None:
        self._next: dict[int, int] = {}

    def learn(self, tokens: list[int]) -> None:
        self._next |= dict(pairwise(tokens))

    def tree(self, last: int) -> GivenTree:
        first = self._next.get(last, 7)
        return GivenTree([first, (first + 1) % 250, self._next.get(first, 7)], [-1, -1, 0])


def conversations(runner: DecodingRunner, context: int, rounds: int) -> Iterator[int]:
    """So many rounds of conversations of several turns, each of which goes on where the slot stands, until the context
    is full: the number of the present one."""
    plan = chain(1) if runner.draft.has_model else given(3, 2)
    said, number, start = Said(), 0, 0
    while number < rounds:
        text, reused, start = [start % 250, *PROMPT], 0, start + 1
        while len(text) + 4 * plan.longest < context and number < rounds:
            found = runner.start(0, text, reused, SamplingValues()).wait().tolist()
            for _ in range(12):
                if runner.base.lengths[0] + plan.longest > context or number == rounds:
                    break
                trees = [said.tree(found[-1])] if plan.is_given else None
                found += take_step(runner, 1, plan, None, trees).wait()[0]
                number += 1
                yield number
            runner.draft.complete(0, 1)
            runner.stop(0)
            said.learn(found)
            text, reused = [*text, *found, 9, 17], len(text) + len(found) - 1


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_memory_is_flat(model: str, make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """That of the process: texts end, and begin anew."""
    context, rounds = 96, 100_000
    directory = made(make_checkpoint, tmp_path, model, limits_of(model, context))
    sizes: dict[int, float] = {}
    with opened(directory) as runner:
        for number in conversations(runner, context, rounds):
            if number % (rounds // 10) == 0:
                sizes[number] = resident_mib()
        assert all(np.isfinite(tensor).all() for tensor in runner.base.states.tensors.values())
    print(f"\n{model}: " + ", ".join(f"{size:.1f} MiB after {number:,}" for number, size in sizes.items()))
    assert number == rounds
    first, *later = list(sizes.values())[1:]  # by then every kind of step was made
    assert max(later) - first < 1


def recurrent(runner: DecodingRunner) -> np.ndarray:
    """A copy of the slot's recurrent states, all in a row."""
    return np.concatenate([np.ravel(each.memory) for each in runner.base.states.recurrent_of_slot(0)])


def branching(following: list[int], random: np.random.Generator) -> GivenTree:
    """A path of up to two of the tokens that follow, most often, with another token beside each."""
    nodes: list[int] = []
    parents: list[int] = []
    above = -1
    for right in following:
        taken = right if random.random() < 0.8 else (right + 3) % 250
        children = [taken, (right + 1) % 250] if random.random() < 0.5 else [(right + 1) % 250, taken]
        nodes, parents, above = [*nodes, *children], [*parents, above, above], len(nodes) + children.index(taken)
    return GivenTree(nodes, parents)


@pytest.mark.parametrize("rounds", [100, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kv_cache", ["int8", "compute"])
@pytest.mark.parametrize("model", MODELS)
def test_states_after_rounds_are_those_of_plain_decoding(
    model: str, kv_cache: str, rounds: int, make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Of one text, whose tokens are drawn. With KV rows of int8, where NumPy computes in float64, they have the very
    bits; in float32 products of several rows round otherwise, and differences do not add up, since states forget."""
    limits = limits_of(model, 3 * rounds + 32, kv_cache)
    directory = made(make_checkpoint, tmp_path, model, limits)
    plans: list[DraftPlan | None] = [given(5, 2)]
    if limits.has_draft:
        plans = [chain(2), given(5, 2), tree(2, 2, 6), None]
    random, number, step = np.random.default_rng(5), 0, 0
    largest, risen, curve = 0.0, 0, dict[int, float]()
    with opened(directory) as runner, opened(directory) as plain:
        found, wanted = (each.start(0, PROMPT, 0, DRAWN).wait().tolist() for each in (runner, plain))
        states: dict[int, np.ndarray] = {}
        while number < rounds:
            while len(wanted) < len(found) + 4:  # what is given is what will be drawn
                wanted += take_step(plain, 1, None).wait()[0]
                states[len(wanted)] = recurrent(plain)
            plan, step = plans[step % len(plans)], step + 1
            trees = [branching(wanted[len(found) : len(found) + 2], random)] if plan and plan.is_given else None
            found += take_step(runner, 1, plan, None, trees).wait()[0]
            number += plan is not None
            assert found == wanted[: len(found)], f"{number:,} rounds"
            difference = float(np.abs(recurrent(runner) - states[len(found)]).max())
            largest, risen = (difference, number) if difference > largest else (largest, risen)
            states = {at: each for at, each in states.items() if at > len(found)}
            if str(number).strip("0") == "1":
                curve[number] = largest
        rows, most = len(PROMPT) + len(found) - 1, float(np.abs(recurrent(runner)).max())
        shown = ", ".join(f"{value:.1e} after {at:,}" for at, value in curve.items())
        print(f"\n{model}, {kv_cache} rows, {len(found):,} tokens: up to {shown}, last risen at {risen:,}", end="; ")
        print(f"values up to {most:.2f}")
        assert curve[rounds] == 0 if kv_cache == "int8" else 0 < curve[rounds] < 1e-4
        assert number == rounds and rows < limits.kv_capacity
