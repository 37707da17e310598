"""What a slot holds of a sequence that gave way and goes on: bit for bit what it would hold, in every kind of cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgellm import Request, SamplingParams, SpecDecodeRuntime
from edgellm.decoding.loop import DecodingLoop
from edgellm.decoding.sequence import DecodingSequence
from edgellm.drafting.config import DraftingConfig
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.model.limits import EngineLimits
from edgellm.snapshots.kept_on_host import RowKeeper, copies_in
from tools.bench.answering import answered

SLOTS = 3
TREE = DraftingConfig(draft_top_k=4, draft_steps=3, verify_tree_size=12, adaptive=False)
CASES = [
    (backend, kv_cache, drafting)
    for backend in ("numpy", "tensorrt")
    for kv_cache in ("compute", "int8")
    for drafting in ("without a draft", "plain steps beside a draft", "drafted")
]
PARAMS = SamplingParams(
    temperature=0.9, repetition_penalty=1.2, frequency_penalty=0.3, seed=4, max_tokens=60, ignore_eos=True
)


@pytest.fixture(scope="module")
def engines(
    tiny_checkpoint: Path, tiny_draft: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], Path]:
    """The engine directory for a backend, with a kind of KV cache."""

    @cache
    def built(backend: str, kv_cache: str) -> Path:
        target = tmp_path_factory.mktemp("preempted") / "engines"
        limits = EngineLimits(SLOTS, 16, 96, draft_top_k=4, draft_steps=3, verify_tree_size=12, kv_cache=kv_cache)
        targets, dtype = ([], "float32") if backend == "numpy" else (None, "float16")
        build_engine_directory(tiny_checkpoint, target, limits, targets, dtype=dtype, draft=tiny_draft)
        return target

    return built


@pytest.fixture(
    scope="module",
    params=[pytest.param(case, marks=pytest.mark.gpu) if case[0] == "tensorrt" else case for case in CASES],
    ids=str,
)
def runtime(request: pytest.FixtureRequest, engines: Callable[[str, str], Path]) -> Iterator[SpecDecodeRuntime]:
    backend, kv_cache, drafting = request.param
    chosen = None if drafting == "without a draft" else TREE
    with SpecDecodeRuntime(engines(backend, kv_cache), backend=backend, drafting=chosen) as opened:
        if drafting == "plain steps beside a draft":
            opened.use_drafting(None)
        yield opened


def sequence(runtime: SpecDecodeRuntime, seed: int, priority: int = 0) -> DecodingSequence:
    prompt = [(7 * place + 5 * seed) % 250 for place in range(19 + seed)]
    return runtime.prepare(Request(prompt, None, PARAMS, priority=priority))


def held(runtime: SpecDecodeRuntime, loop: DecodingLoop, found: DecodingSequence) -> dict[str, Any]:
    """Everything that the slot of the only sequence has, on the device and in the runner's own books."""
    runner, one = runtime._open_runner(), slice(0, 1)
    assert loop.running == [found]
    rows, draft_rows = len(found.text_ids) - 1, runner.draft.rows(0)
    kept = RowKeeper(runner, 1 << 24).keep(0, rows, draft_rows)
    assert kept is not None
    runner.backend.synchronize()
    state = runner.base._state
    arrays = {name: getattr(state, name) for name in ("active", "token_ids", "kvcache_start_index", "positions")}
    arrays |= {"token_counts": state.token_counts, "offsets": runner.base.offsets}
    copies = copies_in(runner.held(0, rows, draft_rows), kept.memory)
    values: dict[str, Any] = {copy.name: copy.values.tobytes() for copy in copies}
    values |= {"lengths": runner.base.lengths[0], "counts": rows}
    if runner.draft.has_model and draft_rows is not None:
        draft, pending = runner.draft, runner.draft.pending
        values["progress"] = draft.unseen[0], draft.base_rows[0], draft.draft_rows[0]
        arrays |= {name: getattr(pending, name) for name in ("counts", "start", "last")}
        tokens = runner.backend.read(pending.token_ids[one]).wait()
        values["pending"] = tokens[0, : rows - draft_rows].tolist()
    return values | {name: np.array(runner.backend.read(array[one]).wait()).tolist() for name, array in arrays.items()}


def settled(loop: DecodingLoop, rounds: int) -> None:
    for _ in range(rounds):
        list(loop.advance())
    list(loop.settle())


def run(
    runtime: SpecDecodeRuntime, before: int, after: int, between: Callable[[DecodingLoop, DecodingSequence], None]
) -> list[dict[str, Any]]:
    """What is held after so many rounds, what is `between`, and so many more rounds; and the tokens."""
    for contents in runtime._contents:
        contents.replace((), None if runtime._open_runner().draft.rows(0) is None else 0)
    loop, found = runtime.loop(), sequence(runtime, 1)
    loop.admit(found)
    settled(loop, before)
    first = held(runtime, loop, found)
    between(loop, found)
    now = held(runtime, loop, found)
    assert now == first
    settled(loop, after)
    last = held(runtime, loop, found) | {"tokens": found.answer.token_ids}
    loop.abandon()
    return [first, last]


@pytest.mark.parametrize("before", [0, 2, 7])
def test_rows_that_are_put_back_are_all_that_a_sequence_had(runtime: SpecDecodeRuntime, before: int) -> None:
    def give_way(loop: DecodingLoop, found: DecodingSequence) -> None:
        loop.give_way(found)
        assert runtime.kept_bytes > 0
        others = [sequence(runtime, seed) for seed in range(2, 2 + SLOTS + 1)]
        for _ in answered(loop, others):
            pass
        loop.admit(found)
        assert runtime.kept_bytes == 0

    undisturbed = run(runtime, before, 4, lambda loop, found: None)
    disturbed = run(runtime, before, 4, give_way)
    assert disturbed == undisturbed
