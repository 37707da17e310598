"""Answers drafted from what was said before: the same as without, with a draft model and without one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from drafted_conversations import ask_freely

from edgellm.drafting import learner, own_plans
from edgellm.drafting.config import DraftingConfig
from edgellm.engines.backends.numpy_backend import NumpyBackend
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.errors import DeviceMemoryError
from edgellm.engines.speculation.tree_verification import GIVEN_SIZES, TreeVerification
from edgellm.errors import EngineError, RequestError
from edgellm.llm import LLM
from edgellm.sampling_params import SamplingParams

SUFFIX = DraftingConfig(kind="suffix")
BESIDE = DraftingConfig(4, 4, 16, suffix_decoding=True)
GREEDY = SamplingParams(ignore_eos=True, max_tokens=30)
SAMPLED = SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.1, seed=11, max_tokens=30, ignore_eos=True)
REPEATED = "The quick brown fox. The quick brown fox. The"


@pytest.fixture(scope="module", autouse=True)
def asks_freely() -> Iterator[None]:
    """What is taken does not depend on how long the index takes on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        ask_freely(patch)
        yield


@pytest.fixture(scope="module")
def directory(make_engines: Callable[..., EngineDirectory]) -> EngineDirectory:
    return make_engines(1)


@pytest.fixture(scope="module")
def plain(directory: EngineDirectory) -> Iterator[LLM]:
    with LLM(directory.path, backend="numpy", drafting=None) as llm:
        yield llm


@pytest.fixture(params=[(SUFFIX, 1), (BESIDE, 0)], ids=lambda pair: f"{pair[0].kind}-{pair[1]} ahead")
def drafted(
    request: pytest.FixtureRequest, directory: EngineDirectory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[LLM]:
    """Whatever is proposed is verified, also where it does not pay; steps are read at once or one later."""
    config, ahead = request.param
    monkeypatch.setattr(NumpyBackend, "steps_ahead", ahead)
    monkeypatch.setattr(learner, "GAIN", 0.0)
    monkeypatch.setattr(own_plans, "MOST_REST", 0)
    with LLM(directory.path, backend="numpy", drafting=config) as llm:
        yield llm


def given_rounds(response: object) -> int:
    return sum(count for name, count in response.drafting.plans.items() if name.startswith("given"))


def test_answers_are_those_of_plain_decoding(plain: LLM, drafted: LLM) -> None:
    rounds = 0
    for params in (GREEDY, SAMPLED, replace(SAMPLED, seed=4, repetition_penalty=1.0, presence_penalty=0.3)):
        for _ in range(2):  # the second time the first answer was said before
            expected, found = plain.generate(REPEATED, params), drafted.generate(REPEATED, params)
            assert (found.token_ids, found.text) == (expected.token_ids, expected.text)
            statistics = found.drafting
            rounds += given_rounds(found)
            assert sum(statistics.tokens.values()) + statistics.plain_steps == found.usage.completion_tokens - 1
            assert sum(statistics.tokens.values()) == statistics.rounds + statistics.accepted_tokens
            assert statistics.drafted_tokens >= statistics.accepted_tokens
    assert rounds > 5 and given_rounds(found) > 0
    assert expected.drafting is None


def test_an_answer_that_was_said_before_takes_few_rounds(plain: LLM, drafted: LLM) -> None:
    drafted.generate("once upon a time", GREEDY)
    again = drafted.generate("once upon a time", GREEDY)
    assert again.token_ids == plain.generate("once upon a time", GREEDY).token_ids
    assert again.drafting.rounds + again.drafting.plain_steps <= 15


def test_structured_answers_are_the_same_drafted(plain: LLM, drafted: LLM) -> None:
    for params in (SamplingParams(max_tokens=40), SamplingParams(max_tokens=40, temperature=1.2, seed=3)):
        ruled = replace(params, allowed_token_ids=tuple(range(40, 60)), ignore_eos=True)
        for _ in range(2):
            assert drafted.generate(REPEATED, ruled).token_ids == plain.generate(REPEATED, ruled).token_ids
    only = replace(GREEDY, allowed_token_ids=(7,), max_tokens=20)
    found = plain.generate(REPEATED, only)
    assert list(found.token_ids) == [7] * 20
    assert found.drafting.accepted_tokens > 0  # forced tokens need no setting


def test_what_was_said_is_kept_by_the_process_and_not_by_the_sequence(directory: EngineDirectory) -> None:
    with LLM(directory.path, backend="numpy", drafting=SUFFIX) as llm:
        drafters = llm._runtime._drafters
        seen = []
        made = drafters.index.open

        def opening(prompt_ids: object) -> object:
            seen.append(made(prompt_ids))
            return seen[-1]

        drafters.index.open = opening
        llm.generate(REPEATED, GREEDY)
        with llm.stream(REPEATED, GREEDY) as generation:
            generation.next_chunk()
        generation.result()
        assert len(seen) == 2 and not any(said.is_open for said in seen)
        for count in range(2):
            stop = SamplingParams(stop_token_ids=(llm.generate(REPEATED, GREEDY).token_ids[3],), max_tokens=30)
            answer = llm.generate(REPEATED, replace(stop, ignore_eos=True)).token_ids
            said = seen[-1].history
            assert said.tokens[1 + seen[-1].prompt_size : said.end].tolist() == list(answer), count  # and none behind


def test_drafting_is_switched_without_loading(directory: EngineDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner, "GAIN", 0.0)
    monkeypatch.setattr(own_plans, "MOST_REST", 0)
    with LLM(directory.path, backend="numpy", drafting=SUFFIX) as llm:
        assert not llm._runtime.has_draft_model
        llm.generate(REPEATED, GREEDY)
        whole = llm.generate(REPEATED, GREEDY)
        assert whole.drafting.rounds > 0 and llm.drafting_report.rounds
        llm.use_drafting(None)
        off = llm.generate(REPEATED, GREEDY)
        assert (off.token_ids, off.drafting, llm.drafting_report) == (whole.token_ids, None, None)
        llm.use_drafting(SUFFIX)
        assert llm.generate(REPEATED, GREEDY).drafting.rounds > 0
        with pytest.raises(RequestError, match="no draft model is loaded"):
            llm.use_drafting(BESIDE)
        assert llm.drafting == SUFFIX
    with LLM(directory.path, backend="numpy", drafting=DraftingConfig(4, 4, 16)) as llm:
        llm.generate(REPEATED, GREEDY)
        for config in (BESIDE, SUFFIX):
            llm.use_drafting(config)
            assert llm.generate(REPEATED, GREEDY).token_ids == whole.token_ids
            assert given_rounds(llm.generate(REPEATED, GREEDY)) > 0


def test_memory_is_planned_and_less_is_taken_where_it_is_short(
    directory: EngineDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = NumpyBackend.check_memory

    def short(self: NumpyBackend, plan: object) -> None:
        if any(f"{nodes} candidates" in name for name in plan.items for nodes in GIVEN_SIZES[:-1]):
            raise DeviceMemoryError("short")
        check(self, plan)

    with LLM(directory.path, backend="numpy", drafting=SUFFIX) as llm:
        runner = llm._runtime._runner
        name = f"trees of {GIVEN_SIZES[0]} candidates"
        logits = GIVEN_SIZES[0] * runner.limits.max_batch * runner.config.vocab_size * 4
        assert logits < runner.base.memory_plan.items[name] < 2 * logits
        assert runner.verification.most_nodes == GIVEN_SIZES[0]
        whole = llm.generate(REPEATED, GREEDY).token_ids
    monkeypatch.setattr(NumpyBackend, "check_memory", short)
    monkeypatch.setattr(learner, "GAIN", 0.0)
    monkeypatch.setattr(own_plans, "MOST_REST", 0)
    with LLM(directory.path, backend="numpy", drafting=SUFFIX) as llm:
        assert llm._runtime._runner.verification.most_nodes == GIVEN_SIZES[-1]
        for _ in range(2):
            found = llm.generate(REPEATED, GREEDY)
        assert found.token_ids == whole
        assert {int(name.split()[1]) for name in found.drafting.plans} <= {2, 4, 7}
    with LLM(directory.path, backend="numpy", drafting=None) as llm:
        assert not any("candidates" in name for name in llm._runtime._runner.base.memory_plan.items)


def test_engines_that_verify_no_trees_are_refused_at_opening(
    directory: EngineDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TreeVerification, "takes", lambda *_: False)
    with pytest.raises(EngineError, match="drafts from what was said cannot be verified with "):
        LLM(directory.path, backend="numpy", drafting=SUFFIX)
    with LLM(directory.path, backend="numpy", drafting=None) as llm:  # what needs no trees goes on
        llm.generate(REPEATED, GREEDY)


def test_adapters_and_system_prompts_of_the_shipped_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner, "GAIN", 0.0)
    monkeypatch.setattr(own_plans, "MOST_REST", 0)
    questions = ["Push the red cup to the left.", "Push the green apple to the left."]
    rounds = 0
    with LLM(backend="numpy", drafting=None) as plain, LLM(backend="numpy", drafting=SUFFIX) as drafted:
        drafted.cache_system_prompt(drafted.default_system_prompt, "json")
        for adapter in ("json", None, "json"):
            for question in questions:
                answers = [
                    llm.chat([{"role": "user", "content": question}], SamplingParams(max_tokens=40), adapter=adapter)
                    for llm in (plain, drafted)
                ]
                assert answers[0].token_ids == answers[1].token_ids
                assert answers[1].usage.reused_tokens > 0 or adapter is None
                rounds += given_rounds(answers[1])
    assert rounds > 5


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "suffix", "acceptance": "typical"}, "kind is 'suffix' beside acceptance typical: measured time"),
        ({"suffix_decoding": True, "acceptance": "typical"}, "suffix_decoding is true beside acceptance typical"),
        ({"suffix_decoding": True, "sampled": True, "kind": "chain"}, "suffix_decoding is true beside sampled"),
        ({"suffix_decoding": 1}, "suffix_decoding is 1: expected true or false"),
        ({"kind": "suffix", "choices": "eagle_25"}, "they are of use to kind 'choices' only"),
        ({"kind": "suffixes"}, "kind is 'suffixes': expected one of tree, chain, choices, suffix"),
    ],
)
def test_wrong_settings_are_refused_by_name(values: dict, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        DraftingConfig(**values)
