"""Conversations with models that attend within windows: what is reused, from where, and that it changes no token."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import drafted_conversations
import numpy as np
import pytest
from drafted_conversations import (
    GREEDY,
    SAMPLED,
    Cold,
    assert_same_in_every_order,
    capturing_before,
    cold,
    drafting_freely,
    giving_way,
    text_request,
    tokens_reused,
)
from fixed_shape_backend import FixedShapeBackend
from tiny_families import WINDOWED

from edgellm import Request, SamplingParams, SpecDecodeRuntime
from edgellm.engines.backends.numpy_backend import NumpyBackend
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.model.limits import EngineLimits
from edgellm.errors import SnapshotError
from edgellm.snapshots.file import write_snapshot
from edgellm.snapshots.snapshot import Snapshot

__all__ = ["cold"]  # a fixture

MODES = {name: drafting for name, drafting in drafted_conversations.MODES.items() if name != "chain"}
PROMPT = [(7 * index + 3) % 250 for index in range(150)]
#: By how many tokens a text can be cut.
SLACK = 12


@pytest.fixture(scope="module", params=list(WINDOWED))
def engines(
    request: pytest.FixtureRequest,
    make_checkpoint: Callable[..., Path],
    tiny_draft: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """Two slots, a draft, context 320; rings go round once in a hundred tokens or so."""
    folder, changes = tmp_path_factory.mktemp("windows"), WINDOWED[request.param]
    checkpoint = make_checkpoint(folder / "checkpoint", **changes)
    limits = EngineLimits(2, 16, 320, draft_top_k=4, draft_steps=3, verify_tree_size=12)
    limits = replace(limits, window_rows=changes["sliding_window"] + limits.window_step + SLACK)
    build_engine_directory(checkpoint, folder / "engines", limits, [], dtype="bfloat16", draft=tiny_draft)
    return folder / "engines"


@pytest.fixture(params=list(MODES))
def runtime(
    request: pytest.FixtureRequest, engines: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SpecDecodeRuntime]:
    with drafting_freely(engines, MODES[request.param], monkeypatch) as opened:
        yield opened


def ask(runtime: SpecDecodeRuntime, prompt: list[int], params: SamplingParams = GREEDY) -> tuple[tuple[int, ...], int]:
    response = runtime.handle_request(Request(prompt, None, params))
    return tuple(response.token_ids), response.usage.reused_tokens


def test_where_a_prompt_goes_on(runtime: SpecDecodeRuntime, cold: Cold) -> None:
    """At the last token that it shares with what a slot holds, if that is no more than the slack behind: with a draft
    a few tokens before, whose rows follow the base's."""

    def reused(prompt: list[int]) -> int:
        found, count = ask(runtime, prompt)
        assert found == cold(prompt)
        return count

    answer = list(cold(PROMPT))
    told = [*PROMPT, *answer, 5, 6]
    assert reused(PROMPT) == 0
    assert len(PROMPT) + 4 < reused(told) < len(told)
    held = [*told, *cold(told)]
    assert len(held) - 10 < reused([*held[:-4], 99, 98]) < len(held)
    assert reused([*PROMPT, 97, 96]) == 0  # too far back: an answer, a message and more were written behind
    short = PROMPT[:5]
    assert reused(short) == 0
    assert reused([*short[:4], 1, 2, 3]) in (3, 4)  # nothing has been written over


def test_a_text_that_is_cut_again_and_again(runtime: SpecDecodeRuntime, cold: Cold) -> None:
    """What was written behind a cut stays written over: a second cut must not count from the shorter text."""
    text, one = PROMPT[:130], replace(GREEDY, max_tokens=1)
    for _ in range(8):
        found, _ = ask(runtime, text, one)
        assert found == cold(text, one)
        text = [*text[: len(text) - 9], text[-1] + 1, 7]


def random_prompts(cold: Cold, seed: int, count: int) -> Iterator[list[int]]:
    """Turns of three conversations in no order: told further, edited, asked again, begun alike."""
    random = np.random.default_rng(seed)
    system = random.integers(0, 250, 25).tolist()
    texts = [[*system, *random.integers(0, 250, 60).tolist()] for _ in range(3)]
    for _ in range(count):
        which = int(random.integers(0, 3))
        text, kind = texts[which], random.choice(["tell", "tell", "tell", "edit", "again", "back", "new"])
        said = random.integers(0, 250, int(random.integers(1, 12))).tolist()
        if kind == "new" or len(text) > 280:
            text = [*system, *said]
        elif kind == "edit":
            text = [*text[: int(random.integers(1, len(text)))], *said]
        elif kind == "back":
            text = [*text[: max(1, len(text) - int(random.integers(1, 2 * SLACK)))], *said]
        elif kind == "tell":
            text = [*text, *cold(text), *said]
        texts[which] = text
        yield text


def test_reuse_and_eviction_change_no_token(runtime: SpecDecodeRuntime, cold: Cold) -> None:
    assert tokens_reused(runtime, cold, random_prompts(cold, 5, 24)) > 500


@pytest.mark.parametrize("place", ["memory", "file"])
def test_snapshots_go_on_where_their_rows_reach(
    runtime: SpecDecodeRuntime, cold: Cold, tmp_path: Path, place: str
) -> None:
    """Of texts shorter and longer than a window and than a ring: whole, cut a little, and cut too far."""
    snapshots, base = runtime._open_snapshots(), runtime._open_runner().base
    reach = base.states.window_reach
    for tokens in (4, 30, 90, 150, 290):
        for stored in snapshots.store.snapshots():
            snapshots.store.discard(stored)
        text = [(11 * index + tokens) % 250 for index in range(tokens)]
        made = snapshots.compute(0, text, runtime._contents[0], "a text")
        sizes = {name: made.tensor(name).shape[1] for name in made.rows if name.startswith("base.k_cache")}
        assert set(sizes.values()) <= {tokens, min(tokens, reach)} and min(sizes.values()) == min(tokens, reach)
        if place == "file":
            write_snapshot(tmp_path / "text.edgekv", made)
            snapshots.load(tmp_path / "text.edgekv")
        else:
            snapshots.store.put(made)
        for cut in (0, 3, SLACK - 3, SLACK + 30):
            prompt = [*text[: max(1, tokens - cut)], 251, 7]
            for cache in base.states.tensors.values():
                cache[...] = 111 if cache.dtype == np.int8 else np.nan
            runtime._forget_contents()
            found, count = ask(runtime, prompt)
            assert found == cold(prompt), (tokens, cut)
            shared = max(1, tokens - cut) - runtime.has_draft_model
            assert (count > 0) == (shared > 0 and (cut <= SLACK or tokens <= reach)), (tokens, cut)


def test_a_snapshot_of_other_rows_is_refused(runtime: SpecDecodeRuntime, engines: Path, tmp_path: Path) -> None:
    """One of a shorter reach; one whose facts say so though the rows do not."""
    shorter = shutil.copytree(engines, tmp_path / "engines", symlinks=True)
    description = (shorter / "edgellm.json").read_text()
    rows = EngineDirectory.open(engines).limits.window_rows
    (shorter / "edgellm.json").write_text(description.replace(f'"window_rows": {rows}', f'"window_rows": {rows - 5}'))
    with SpecDecodeRuntime(shorter, backend="numpy") as other:
        made = other._open_snapshots().compute(0, PROMPT, other._contents[0], "shorter")
    if runtime.has_draft_model:
        return
    write_snapshot(tmp_path / "shorter.edgekv", made)
    with pytest.raises(SnapshotError, match=r"the tensor 'base\.[kv]_cache_\d' has the shape .*, expected"):
        runtime.load_snapshot(tmp_path / "shorter.edgekv")
    whole = runtime._open_snapshots().compute(0, PROMPT, runtime._contents[0], "whole")
    host_memory = runtime._open_runner().backend.host_memory
    facts = replace(whole.facts, window_rows=whole.facts.window_rows - 1)
    tensors = {name: (place.dtype, place.shape) for name, place in whole.places.items() if name != "sha256"}
    hostile = Snapshot.allocate(
        facts, {name: kind for name, kind in tensors.items() if name != "token_ids"}, host_memory
    )
    for name in tensors:
        np.copyto(hostile.tensor(name), whole.tensor(name))
    write_snapshot(tmp_path / "hostile.edgekv", hostile)
    with pytest.raises(SnapshotError, match="as its metadata say"):
        runtime.load_snapshot(tmp_path / "hostile.edgekv")


@pytest.mark.parametrize("budget", [1 << 24, 0], ids=["kept", "computed again"])
def test_an_answer_that_gives_way(engines: Path, cold: Cold, budget: int) -> None:
    params = replace(SAMPLED, max_tokens=60), GREEDY, GREEDY
    prompts = PROMPT, PROMPT[3:], PROMPT[7:]
    expected = [cold(prompt, each) for prompt, each in zip(prompts, params, strict=True)]
    requests = [text_request(prompt, each) for prompt, each in zip(prompts, params, strict=True)]
    for drafting in MODES.values():
        with SpecDecodeRuntime(engines, drafting=drafting, backend="numpy", preemption_budget=budget) as runtime:
            for rounds in (1, 4):
                was_kept, answers = giving_way(runtime, requests, rounds)
                assert was_kept == bool(budget) and answers == expected, (drafting, rounds)


@pytest.mark.parametrize("ahead", [0, 1])
def test_batches_in_every_order(
    runtime: SpecDecodeRuntime, cold: Cold, monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    """More sequences than slots, of different lengths, so that slots change owners; steps are read late or at once."""
    monkeypatch.setattr(NumpyBackend, "steps_ahead", ahead)
    prompts = [PROMPT, [*PROMPT[:140], 4, 5], [9, 8, 7], [*PROMPT, *cold(PROMPT), 1, 2, 3]]
    assert_same_in_every_order(runtime, cold, prompts, 5)


def test_captures_between_answers_change_no_token(engines: Path, cold: Cold, monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured step runs once, behind the rows of idle slots: in a window it takes the oldest."""
    monkeypatch.setattr("edgellm.opened_model.open_backend", lambda _, directory, *others: FixedShapeBackend(directory))
    monkeypatch.setattr("edgellm.opened_model.CAPTURED_AT_ONCE", 2)
    with SpecDecodeRuntime(engines, drafting=MODES["tree"]) as runtime:
        monkeypatch.undo()
        assert tokens_reused(runtime, cold, capturing_before(runtime, list(random_prompts(cold, 8, 10)))) > 100
