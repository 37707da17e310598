"""Conversations with models that have recurrent layers: what is reused, from where, and that it changes no token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from drafted_conversations import (
    GREEDY,
    MODES,
    SAMPLED,
    Cold,
    assert_same_in_every_order,
    capturing_before,
    cold,
    giving_way,
    runtime,
    text_request,
    tokens_reused,
)
from fixed_shape_backend import FixedShapeBackend
from tiny_families import RECURRENT, keeping_near

from edgellm import LLM, Request, SamplingParams, SpecDecodeRuntime
from edgellm.engines.backends.numpy_backend import NumpyBackend
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.model.limits import EngineLimits

__all__ = ["cold", "runtime"]  # fixtures

PROMPT = [(7 * index + 3) % 250 for index in range(40)]


@pytest.fixture(scope="module", params=["lfm2", "qwen3_5"])
def engines(
    request: pytest.FixtureRequest,
    make_checkpoint: Callable[..., Path],
    tiny_draft: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """Two slots, a draft, context 192."""
    folder = tmp_path_factory.mktemp("recurrent")
    checkpoint = make_checkpoint(folder / "checkpoint", **RECURRENT[request.param])
    limits = EngineLimits(2, 16, 192, draft_top_k=4, draft_steps=3, verify_tree_size=12)
    build_engine_directory(checkpoint, folder / "engines", limits, [], draft=tiny_draft)
    return folder / "engines"


def ask(runtime: SpecDecodeRuntime, prompt: list[int], params: SamplingParams = GREEDY) -> tuple[list[int], int]:
    response = runtime.handle_request(Request(prompt, None, params))
    return list(response.token_ids), response.usage.reused_tokens


def test_few_system_prompts_are_remembered(runtime: SpecDecodeRuntime) -> None:
    """However many are asked with, by however many threads."""

    def prepare(number: int) -> int:
        system = {"role": "system", "content": f"be {number % 100}"}
        prompt = Request(messages=[system, {"role": "user", "content": "hi"}])
        return runtime.prepare(prompt).system_tokens

    with ThreadPoolExecutor(4) as threads:
        assert min(threads.map(prepare, range(300))) > 0
    assert runtime._preparation._system_ids.cache_info().currsize == 16


def test_what_developers_say_is_a_system_prompt_too(runtime: SpecDecodeRuntime) -> None:
    said = [
        {"role": "developer", "content": "be brief"},
        {"role": "developer", "content": [{"type": "text", "text": "do"}]},
    ]
    question = {"role": "user", "content": "hi"}
    one, both = (runtime.prepare(Request(messages=[*said[:count], question])).system_tokens for count in (1, 2))
    assert 0 < one < both


def test_where_a_prompt_goes_on(runtime: SpecDecodeRuntime, cold: Cold) -> None:
    def reused(prompt: list[int]) -> int:
        found, count = ask(runtime, prompt)
        assert tuple(found) == cold(prompt)
        return count

    answer = list(cold(PROMPT))
    assert reused(PROMPT) == 0
    assert reused(PROMPT) == len(PROMPT) - 4  # the same again: from before its end
    turn = [*PROMPT, *answer, 5, 6, 7, 8, 9, 10, 11, 12]
    ended = reused(turn)
    assert ended in (49, 50)  # where the answer ended, whose last token only a round has taken
    assert reused([*PROMPT, *answer, 13, 14]) == ended  # the last message edited
    assert reused([*PROMPT, *answer[3:], 5, 6]) == 36  # what was thought left out of the history
    assert reused([*PROMPT[:20], 9, 9, 9]) == 0  # nobody knew that texts part here
    assert reused([*PROMPT[:20], 8, 8, 8]) == 19
    assert reused([*PROMPT[:12], 8, 8, 8]) == 0
    long = [(11 * index + 5) % 250 for index in range(130)]
    assert reused(long) == 0
    assert reused([*long[:100], 3, 3]) == 96
    assert reused([*long[:60], 4, 4]) == 48
    assert reused(long) == 96  # its last rows were written over


def test_the_places_of_a_conversation_in_words(engines: Path) -> None:
    """The system prompt ends where the template says, and is found by another conversation at once."""
    with LLM(engines, backend="numpy", drafting=None) as llm:
        keeping_near(llm._runtime)
        system = {"role": "system", "content": "Be brief, and say so."}
        first = llm.chat([system, {"role": "user", "content": "one two three"}], GREEDY)
        second = llm.chat([system, {"role": "user", "content": "four"}], GREEDY)
        parted = len(llm.tokenizer.encode_chat([system], add_generation_prompt=False))
        assert first.usage.reused_tokens == 0
        assert parted <= second.usage.reused_tokens <= parted + len("<|im_start|>user\n")
        session = llm.create_session(system["content"], GREEDY)
        before = parted
        for number in range(2):
            response = session.send(f"number {number}")
            assert response.usage.reused_tokens >= before - 4  # random bytes are rendered otherwise
            before = response.usage.prompt_tokens


def random_prompts(cold: Cold, seed: int, count: int) -> Iterator[list[int]]:
    """Turns of three conversations in no order: told further, edited, asked again, rendered otherwise, begun alike."""
    random = np.random.default_rng(seed)
    system = random.integers(0, 250, 15).tolist()
    texts = [[*system, *random.integers(0, 250, 8).tolist()] for _ in range(3)]
    for _ in range(count):
        which = int(random.integers(0, 3))
        text = texts[which]
        kind = random.choice(["tell", "tell", "tell", "edit", "again", "render", "new"])
        said = random.integers(0, 250, int(random.integers(1, 12))).tolist()
        if kind == "new" or len(text) > 120:
            text = [*system, *said]
        elif kind == "edit":
            text = [*text[: int(random.integers(1, len(text)))], *said]
        elif kind in ("tell", "render"):
            answer = cold(text)
            text = [*text, *answer[int(random.integers(1, 5)) if kind == "render" else 0 :], *said]
        texts[which] = text
        yield text


@pytest.mark.parametrize("budget", [3, *(pytest.param(budget, marks=pytest.mark.slow) for budget in (None, 0))])
def test_reuse_and_eviction_change_no_token(runtime: SpecDecodeRuntime, cold: Cold, budget: int | None) -> None:
    states = runtime._states
    assert states is not None
    if budget is not None:
        states.most = budget
    assert tokens_reused(runtime, cold, random_prompts(cold, 5, 24)) > (500 if budget is None else 150)


@pytest.mark.parametrize("ahead", [0, 1])
def test_batches_in_every_order(
    runtime: SpecDecodeRuntime, cold: Cold, monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    """More sequences than slots, of different lengths, so that slots change owners; steps are read late or at once."""
    monkeypatch.setattr(NumpyBackend, "steps_ahead", ahead)
    prompts = [PROMPT, [*PROMPT[:20], 4, 5], [9, 8, 7], [*PROMPT, *cold(PROMPT), 1, 2, 3]]
    assert_same_in_every_order(runtime, cold, prompts, 5)


def test_an_answer_that_ends_before_its_last_step(
    runtime: SpecDecodeRuntime, cold: Cold, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps and rounds go beyond a stop token: the states have taken tokens that belong to no answer."""
    monkeypatch.setattr(NumpyBackend, "steps_ahead", 1)
    for prompt in (PROMPT, PROMPT[5:], PROMPT[:33]):
        whole = cold(prompt, GREEDY)
        for _ in range(2):  # the second time it was said before, and is drafted
            stopping = replace(GREEDY, stop_token_ids=(whole[4],))
            found, _ = ask(runtime, prompt, stopping)
            assert found == list(whole[: whole.index(whole[4]) + 1])
            for said in ([], [1, 2], list(whole[5:9])):
                turn = [*prompt, *found, *said, 77]
                assert tuple(ask(runtime, turn)[0]) == cold(turn)


@pytest.mark.parametrize("budget", [1 << 24, 0], ids=["kept", "computed again"])
def test_an_answer_that_gives_way(engines: Path, cold: Cold, budget: int) -> None:
    requests = [
        text_request(PROMPT, replace(SAMPLED, max_tokens=60)),
        text_request(PROMPT[3:], GREEDY),
        text_request(PROMPT[7:], GREEDY),
    ]
    expected = [cold(request.prompt, request.params) for request in requests]
    for drafting in MODES.values():
        with SpecDecodeRuntime(engines, drafting=drafting, backend="numpy", preemption_budget=budget) as runtime:
            keeping_near(runtime)
            for rounds in (1, 4):
                was_kept, answers = giving_way(runtime, requests, rounds)
                assert was_kept == bool(budget) and answers == expected, (drafting, rounds)


def test_forced_tokens_and_rules(runtime: SpecDecodeRuntime, engines: Path) -> None:
    """A grammar's masks, and the tokens that it forces, in rounds over recurrent layers."""
    from edgellm.structure.description import Structure

    structure = Structure(regex=r"(yes|no), of course, my dear [a-z]{3}\.")
    params = SamplingParams(max_tokens=60, structure=structure)
    with SpecDecodeRuntime(engines, backend="numpy") as plain:
        expected = [plain.handle_request(Request(p, None, params)) for p in (PROMPT, PROMPT[4:])]
    for _ in range(2):
        responses = runtime.handle_request([Request(p, None, params) for p in (PROMPT, PROMPT[4:])])
        assert [each.token_ids for each in responses] == [each.token_ids for each in expected]
        assert all("of course" in each.text for each in responses)


@pytest.mark.parametrize("mode", ["plain", "tree"])
def test_the_ways_of_a_gpu(engines: Path, cold: Cold, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """Fixed shapes, padded chunks, a step always under way, captures between answers: turns, edits, eviction, giving
    way."""
    monkeypatch.setattr("edgellm.opened_model.open_backend", lambda _, directory, *others: FixedShapeBackend(directory))
    monkeypatch.setattr("edgellm.opened_model.CAPTURED_AT_ONCE", 2)
    with SpecDecodeRuntime(engines, drafting=MODES[mode]) as runtime:
        monkeypatch.undo()
        states = keeping_near(runtime)._states
        assert states is not None
        states.most = 6
        prompts = list(random_prompts(cold, 8, 16))
        assert tokens_reused(runtime, cold, capturing_before(runtime, prompts)) > 150
        responses = runtime.handle_request([Request(prompt, None, GREEDY) for prompt in prompts[:6]])
        assert [tuple(each.token_ids) for each in responses] == [cold(prompt) for prompt in prompts[:6]]


def test_states_are_those_of_an_adapter(engines: Path, make_adapter: Callable[..., Path], tmp_path: Path) -> None:
    """What was computed with another adapter, or without, is never gone on from."""
    directory = EngineDirectory.open(engines)
    adapters = {name: make_adapter(tmp_path / name, directory.config, seed) for seed, name in enumerate(("a", "b"))}
    limits = replace(EngineLimits(2, 16, 192), max_lora_rank=4, lora_slots=2)
    build_engine_directory(engines.parent / "checkpoint", tmp_path / "engines", limits, [], adapters=adapters)
    with SpecDecodeRuntime(tmp_path / "engines", backend="numpy") as runtime:
        keeping_near(runtime)
        states, longer = runtime._states, replace(GREEDY, max_tokens=40)
        assert states is not None
        expected = {}
        for adapter in ("a", "b", None):
            runtime._forget_contents()
            states.close()
            expected[adapter] = runtime.handle_request(Request(PROMPT, None, longer, adapter=adapter)).token_ids
        assert len(set(map(tuple, expected.values()))) == 3
        runtime._forget_contents()
        states.close()
        for number, adapter in enumerate(("a", "b", None, "a", None, "b", "a")):
            response = runtime.handle_request(Request(PROMPT, None, longer, adapter=adapter))
            assert response.token_ids == expected[adapter]
            assert response.usage.reused_tokens in ((0,) if number < 3 else (0, 36))


def test_memory_of_many_turns_is_flat(engines: Path) -> None:
    with SpecDecodeRuntime(engines, backend="numpy", state_budget=0) as runtime:
        states = keeping_near(runtime)._states
        assert states is not None and states.most == 0
        ask(runtime, PROMPT)
        assert states.nbytes == 0
    with SpecDecodeRuntime(engines, backend="numpy") as runtime:
        states = keeping_near(runtime)._states
        assert states is not None
        states.most = 5
        for number in range(30):
            ask(runtime, [number, *PROMPT])
            assert len(states._kept) <= 5
        assert states.nbytes == 5 * states.size
        assert runtime._open_runner().base.memory_plan.host["states at places of texts"] == 256 << 20


def test_logits_behind_a_text_leave_nothing_to_reuse(runtime: SpecDecodeRuntime, cold: Cold) -> None:
    ask(runtime, PROMPT)
    taken: list[np.ndarray] = []
    text = [*PROMPT[:30], *cold(PROMPT[:30])]
    runtime.following_logits(text, 30, lambda block: taken.append(block.copy()))
    assert np.concatenate(taken).argmax(axis=1).tolist() == text[30:]
    for prompt in (PROMPT, [*text, 1]):
        assert tuple(ask(runtime, prompt)[0]) == cold(prompt)
