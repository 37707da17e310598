"""Answers with a draft: the same as without, whatever ends them, and what later requests may reuse of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from edgellm.drafting.config import DraftingConfig
from edgellm.engines.backends.numpy_backend import NumpyBackend
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.errors import EngineError, RequestError
from edgellm.llm import LLM
from edgellm.requests import Request
from edgellm.sampling_params import SamplingParams
from edgellm.snapshots.contents import KVContents

TREE = DraftingConfig(4, 4, 16)
KINDS = [TREE, DraftingConfig(kind="chain", draft_steps=4), DraftingConfig(kind="choices", choices=[[0], [1], [0, 0]])]
GREEDY = SamplingParams(ignore_eos=True, max_tokens=20)
SAMPLED = SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.1, seed=11, max_tokens=20, ignore_eos=True)
PROMPT = "The quick brown fox"


@pytest.fixture(scope="module")
def directory(make_engines: Callable[..., EngineDirectory]) -> EngineDirectory:
    return make_engines(1)


@pytest.fixture(scope="module")
def plain(directory: EngineDirectory) -> Iterator[LLM]:
    with LLM(directory.path, backend="numpy", drafting=None) as llm:
        yield llm


@pytest.fixture(
    params=[(KINDS[0], 1), (KINDS[1], 2), (KINDS[2], 0)], ids=lambda pair: f"{pair[0].kind}-{pair[1]} ahead"
)
def drafted(
    request: pytest.FixtureRequest, directory: EngineDirectory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[LLM]:
    """Rounds are read at once, or, as on a GPU, while one or two later ones are under way already."""
    config, ahead = request.param
    monkeypatch.setattr(NumpyBackend, "steps_ahead", ahead)
    with LLM(directory.path, backend="numpy", drafting=config) as llm:
        yield llm


def test_answers_are_the_same_and_the_response_says_what_drafting_did(plain: LLM, drafted: LLM) -> None:
    for params in (GREEDY, SAMPLED):
        expected, found = plain.generate(PROMPT, params), drafted.generate(PROMPT, params)
        assert (found.token_ids, found.text, found.finish_reason) == (
            expected.token_ids,
            expected.text,
            expected.finish_reason,
        )
        assert expected.drafting is None
        statistics = found.drafting
        tokens = sum(length * count for length, count in enumerate(statistics.lengths))
        assert tokens + statistics.plain_steps == found.usage.completion_tokens - 1
        assert sum(statistics.lengths) == statistics.rounds == sum(statistics.plans.values()) > 0
        assert statistics.accepted_tokens == tokens - statistics.rounds
        assert statistics.drafted_tokens >= statistics.accepted_tokens
        assert statistics.mean_acceptance_length == tokens / statistics.rounds
        assert min(statistics.draft_seconds, statistics.verify_seconds, statistics.seconds) > 0
        if drafted._runtime._runner.backend.steps_ahead == 0:  # else rounds behind the end are timed, too
            assert statistics.draft_seconds + statistics.verify_seconds < statistics.seconds
        shares = statistics.acceptance_by_position
        assert list(shares) == sorted(shares, reverse=True)
        assert 1 + sum(shares) == pytest.approx(statistics.mean_acceptance_length)
    assert found.drafting.mean_acceptance_length > 1


def test_an_ending_token_inside_an_accepted_run_ends_the_answer_there(plain: LLM, drafted: LLM) -> None:
    """Each of many tokens of the answer ends one: nothing behind it is shown, counted, or left to be reused."""
    whole = plain.generate(PROMPT, GREEDY).token_ids
    for index, token in list(enumerate(whole))[::5]:
        params = SamplingParams(ignore_eos=True, max_tokens=20, stop_token_ids=(token,))
        first = whole.index(token)
        response = drafted.generate(PROMPT, params)
        assert response.token_ids == whole[: first + 1]
        assert (response.finish_reason, response.stop_match) == ("stop", token)
        follow_up = [*drafted.tokenizer.encode(PROMPT), *response.token_ids, 5, index % 7]
        found = drafted.generate(follow_up, SAMPLED)
        assert found.usage.reused_tokens > 0
        assert found.token_ids == plain.generate(follow_up, SAMPLED).token_ids


def test_max_tokens_inside_a_round(plain: LLM, drafted: LLM) -> None:
    for count in range(1, 9):
        params = SamplingParams(ignore_eos=True, max_tokens=count)
        found, expected = drafted.generate(PROMPT, params), plain.generate(PROMPT, params)
        assert (found.token_ids, found.text, found.finish_reason) == (expected.token_ids, expected.text, "length")


def test_a_stop_string_inside_a_round(plain: LLM, drafted: LLM) -> None:
    text = plain.generate(PROMPT, SAMPLED).text
    for start in range(2, len(text) - 2, 4):
        params = SamplingParams(
            temperature=1.0,
            top_p=0.9,
            repetition_penalty=1.1,
            seed=11,
            ignore_eos=True,
            stop=(text[start : start + 2],),
        )
        found, expected = drafted.generate(PROMPT, params), plain.generate(PROMPT, params)
        assert (found.text, found.token_ids, found.stop_match) == (
            expected.text,
            expected.token_ids,
            expected.stop_match,
        )


def test_the_context_ends_in_the_middle_of_a_round(plain: LLM, drafted: LLM) -> None:
    for length in range(80, 96):
        prompt = [(3 * index + length) % 250 for index in range(length)]
        found, expected = (
            drafted.generate(prompt, SamplingParams(ignore_eos=True)),
            plain.generate(prompt, SamplingParams(ignore_eos=True)),
        )
        assert found.token_ids == expected.token_ids
        assert (found.finish_reason, found.usage.completion_tokens) == ("context", 96 - length)


def test_an_answer_cancelled_inside_a_round_leaves_only_its_own_tokens(plain: LLM, drafted: LLM) -> None:
    whole = plain.generate(PROMPT, GREEDY).token_ids
    for count in range(1, 8):
        with drafted.stream(PROMPT, GREEDY) as generation:
            for _ in range(count):
                generation.next_chunk()
        response = generation.result()
        taken = response.token_ids
        assert taken == whole[: len(taken)]
        follow_up = [*drafted.tokenizer.encode(PROMPT), *taken[:count], 9]
        assert drafted.generate(follow_up, SAMPLED).token_ids == plain.generate(follow_up, SAMPLED).token_ids


def test_a_conversation_reuses_all_but_what_must_be_recomputed(plain: LLM, drafted: LLM) -> None:
    text = plain.tokenizer.encode(PROMPT)
    for turn in range(5):
        found = drafted.generate(text, SAMPLED if turn % 2 else GREEDY)
        assert found.token_ids == plain.generate(text, SAMPLED if turn % 2 else GREEDY).token_ids
        if turn:
            longest_round = drafted.drafting.plan(drafted.directory.limits).longest
            assert found.usage.reused_tokens >= len(text) - 3 - longest_round
        text = [*text, *found.token_ids[:8], 7, turn]


def test_a_failing_request_leaves_the_model_usable(plain: LLM, drafted: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        acceptance = drafted._runtime._runner.backend.acceptance
        patch.setattr(acceptance, "move_accepted", lambda *_: (_ for _ in ()).throw(MemoryError("no more")))
        with pytest.raises(EngineError, match="MemoryError: no more"):
            drafted.generate(PROMPT, GREEDY)
    assert drafted.generate(PROMPT, SAMPLED).token_ids == plain.generate(PROMPT, SAMPLED).token_ids


def test_a_batch_gives_each_prompt_its_own_answer(plain: LLM, drafted: LLM) -> None:
    """More prompts than slots, of different lengths, ending at different times: slots are given up and taken over."""
    prompts = [PROMPT[:length] for length in (3, 19, 8, 1, 12)]
    stop = plain.generate(PROMPT[:8], GREEDY).token_ids[6]
    for params in (
        SamplingParams(ignore_eos=True, max_tokens=25, stop_token_ids=(stop,)),
        SAMPLED,
        SamplingParams(ignore_eos=True, max_tokens=40),
    ):
        expected = [plain.generate(prompt, params).token_ids for prompt in prompts]
        requests = [Request(prompt, None, params) for prompt in prompts]
        assert [response.token_ids for response in plain.handle(requests)] == expected
        assert [response.token_ids for response in drafted.handle(requests)] == expected
    assert drafted.generate(PROMPT, GREEDY).token_ids == plain.generate(PROMPT, GREEDY).token_ids


def test_drafting_can_be_changed_between_requests(plain: LLM, directory: EngineDirectory) -> None:
    expected = plain.generate(PROMPT, SAMPLED).token_ids
    with LLM(directory.path, backend="numpy", drafting=TREE) as llm:
        for config in (None, KINDS[1], TREE, None):
            llm.use_drafting(config)
            assert llm.drafting == config
            response = llm.generate(PROMPT, SAMPLED)
            assert response.token_ids == expected
            assert (response.drafting.rounds == 0) == (config is None)
        assert llm.drafting_report is None
        with llm.stream(PROMPT, GREEDY) as under_way:
            llm.use_drafting(TREE)  # in turn: the request before it is answered as it was asked
        assert under_way.result().drafting.rounds == 0
        assert llm.generate(PROMPT, SAMPLED).drafting.rounds > 0


def test_without_drafting_no_draft_is_loaded(plain: LLM, drafted: LLM) -> None:
    assert not any("draft" in item for item in plain._runtime._runner.base.memory_plan.items)
    assert any("draft" in item for item in drafted._runtime._runner.base.memory_plan.items)
    with pytest.raises(RequestError, match="no draft model is loaded"):
        plain.use_drafting(TREE)


def test_drafting_is_refused_where_it_cannot_be(directory: EngineDirectory, tiny_engines: object) -> None:
    with pytest.raises(RequestError, match="no draft model: build one with it"):
        LLM(tiny_engines, backend="numpy", drafting=TREE)
    with pytest.raises(EngineError, match="verify_tree_size is 40 for a tree: the engines were built for at most 16"):
        LLM(directory.path, backend="numpy", drafting=DraftingConfig(4, 4, 40))
    with LLM(tiny_engines, backend="numpy") as llm:
        assert llm.drafting is None


class TestKVContents:
    def test_without_a_draft_the_common_prefix_but_not_the_last_token(self) -> None:
        contents = KVContents()
        contents.replace([1, 2, 3, 4])
        assert contents.reusable([1, 2, 3, 4]) == 3
        assert contents.reusable([1, 2, 3, 4, 5]) == 4
        assert contents.reusable([1, 2, 9]) == 2
        assert contents.reusable([9]) == 0

    def test_with_a_draft_a_row_needs_the_token_after_it(self) -> None:
        contents = KVContents()
        contents.replace([1, 2, 3, 4], draft_rows=3)
        assert contents.reusable([1, 2, 3, 4, 5]) == 3
        assert contents.reusable([1, 2, 3, 9, 9]) == 2
        assert contents.reusable([9, 9]) == 0
        contents.replace([1, 2, 3, 4], draft_rows=1)
        assert contents.reusable([1, 2, 3, 4, 5]) == 1
