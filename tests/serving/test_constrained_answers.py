"""Structures, allowed tokens, bad words and biases through whole models: drafted, given, batched, captured, cut."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from runner_steps import watch_steps
from served_answers import Answer, answer
from tokenizers import Tokenizer

from edgellm import LLM, AsyncLLM, Request, RequestError, SamplingParams, SpecDecodeRuntime
from edgellm.drafting.config import DraftingConfig
from edgellm.drafting.drafter import Choice, FixedDrafter, Policy
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.speculation.draft_plan import given, tree
from edgellm.engines.speculation.round import GivenTree
from edgellm.errors import ConstraintError
from edgellm.structure.description import Structure

SCHEMAS = [
    {
        "type": "object",
        "properties": {"action": {"enum": ["go", "stop"]}, "to": {"type": "integer", "minimum": -5, "maximum": 40}},
        "required": ["action", "to"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"enum": [0.5, "caf\u00e9", None, [1]]}, "minItems": 2, "maxItems": 2},
    {"type": "string", "maxLength": 4},
    {"oneOf": [{"const": 1}, {"type": "boolean"}, {"type": "string", "pattern": "^x[0-9]$"}]},
]
TREE = DraftingConfig(draft_top_k=4, draft_steps=3, verify_tree_size=12)
DRAFTINGS = {
    "plain": None,
    "tree": TREE,
    "chain": DraftingConfig(kind="chain", draft_steps=3),
    "choices": DraftingConfig(kind="choices", choices=[[0], [1], [2], [0, 0], [0, 1]]),
}


class GivenTrees(Policy):
    """Gives candidates wherever it may, what rules force and others, right and wrong ones; plain steps begin in the
    place of every other round, where steps begin before tokens are known. In turns with `another` drafter's rounds, if
    there is one."""

    looks_up = drafts = True

    def __init__(self, seed: int = 0, another: Policy | None = None) -> None:
        self._random, self._plan, self.rounds, self.others = random.Random(seed), given(7, 3), 0, 0
        self._another = another or Policy()

    def choose(
        self, runner: Any, sequences: Sequence[Any], room: int, ruled: bool, known: bool, begun: bool, waited: bool
    ) -> Choice:
        other, _ = self._another.choose(runner, sequences, room, ruled)
        is_its_turn = other is not None and self._random.random() < 0.5
        may_give = known and not begun and self._plan.longest <= room
        if is_its_turn or not may_give or not runner.takes_given(len(sequences), self._plan):
            self.others += other is not None
            return other, None
        self.rounds += 1
        return self._plan, [self._tree(sequence.constraint) for sequence in sequences]

    def expects_round(self, batch: int, waits: float) -> bool:
        return self._random.random() < 0.5

    goes_on = expects_round

    def _tree(self, constraint: Any) -> GivenTree:
        try:
            forced = [] if constraint is None else constraint.forced(3)
        except ConstraintError:
            forced = []
        others = self._random.sample(range(300), 2)
        return GivenTree([*forced, *others], [*range(-1, len(forced) - 1), -1, -1])


def varied_requests(count: int, seed: int) -> list[Request]:
    """Constrained, biased and free ones in any order, greedy and sampled."""
    chosen, requests = random.Random(seed), []
    structures = [*(Structure(json=schema) for schema in SCHEMAS), Structure(regex="[a-f]{2,7}(, [0-9])?")]
    structures.append(Structure(choice=["yes", "no", "perhaps not"]))
    for index in range(count):
        ruled: dict[str, Any] = chosen.choice(
            [
                {"structure": chosen.choice(structures)},
                {"structure": chosen.choice(structures)},
                {"structure": structures[0], "bad_words": ["go"], "logit_bias": {60: 3.0}},
                {"bad_words": [[a, b] for a in range(0, 300, 2) for b in range(a % 5, 300, 5)][:1000]},
                {"allowed_token_ids": [*range(40, 120, 3), 257], "bad_words": [[43, 46], [52, 55, 58]]},
                {"logit_bias": {chosen.randrange(320): chosen.uniform(-9, 9) for _ in range(20)}},
                {},
            ]
        )
        params = SamplingParams(
            temperature=chosen.choice((0.0, 0.0, 0.9, 1.5)),
            top_p=chosen.choice((1.0, 0.9)),
            repetition_penalty=chosen.choice((1.0, 1.2)),
            presence_penalty=chosen.choice((0.0, 0.3)),
            seed=index,
            max_tokens=(most := chosen.choice((1, 3, 9, 40, 40, 40))),
            min_tokens=0 if "structure" in ruled else min(most, (0, 5, 30)[index % 3]),
            stop=chosen.choice(((), (), (), (), ("a",), ('o"', "7"))),
            stop_token_ids=chosen.choice(((), (), (), (), (64,))),
            ignore_eos="structure" not in ruled and chosen.random() < 0.5,
            **ruled,
        )
        requests.append(Request([chosen.randrange(250) for _ in range(chosen.choice((1, 3, 9, 17, 40)))], None, params))
    return requests


def plain_answers(engines: Path, requests: Sequence[Request]) -> list[Answer]:
    """Alone, without any draft, and with nothing given."""
    with SpecDecodeRuntime(engines, backend="numpy") as runtime:
        runtime._drafters.drafter = Policy()
        responses = [runtime.handle_request(request) for request in requests]
    for request, response in zip(requests, responses, strict=True):
        structure = request.params.structure
        assert len(response.token_ids) >= request.params.min_tokens or response.finish_reason == "context"
        if structure is None:
            assert response.structure_complete is None
        elif response.structure_complete and structure.json is not None:
            jsonschema.validate(json.loads(response.text), structure.json)
            assert response.parsed == json.loads(response.text)
        elif not response.structure_complete:
            assert response.finish_reason in ("length", "stop_string", "stop") and response.parsed is None
    assert sum(bool(response.structure_complete) for response in responses) > len(responses) / 10
    return [answer(response) for response in responses]


@pytest.fixture(scope="module")
def expected(serving_engines: Path) -> tuple[list[Request], list[Answer]]:
    requests = varied_requests(40, 1)
    return requests, plain_answers(serving_engines, requests)


def giving(runtime: SpecDecodeRuntime, gives: str) -> None:
    """Let a runtime give no candidates, or these alone ("given"), or in turns with its draft model ("turns")."""
    drafters = runtime._drafters
    fixed = FixedDrafter(drafters.setting.plan(runtime.directory.limits)) if drafters.setting else Policy()
    drafters.drafter = GivenTrees(0, fixed if gives == "turns" else None) if gives else fixed


@contextmanager
def opened(engines: Path, name: str, gives: str) -> Iterator[SpecDecodeRuntime]:
    with SpecDecodeRuntime(engines, drafting=DRAFTINGS[name], backend="numpy") as runtime:
        giving(runtime, gives)
        yield runtime


@pytest.mark.parametrize(
    ("name", "gives"),
    [("plain", "given"), ("tree", ""), ("tree", "turns"), ("chain", "given"), ("chain", "turns"), ("choices", "given")],
)
def test_batches_whose_members_come_and_go(
    serving_engines: Path, expected: tuple[list[Request], list[Answer]], name: str, gives: str
) -> None:
    requests, alone = expected
    with opened(serving_engines, name, gives) as runtime:
        assert [answer(each) for each in runtime.handle_request(requests)] == alone
        assert [answer(runtime.handle_request(each)) for each in requests[:8]] == alone[:8]
        assert not gives or runtime._drafters.drafter.rounds > 5
        assert gives != "turns" or runtime._drafters.drafter.others > 5


@pytest.mark.parametrize(("name", "gives"), [("plain", ""), ("plain", "given"), ("tree", "turns"), ("chain", "")])
def test_captured_steps_with_one_under_way(
    captured: Callable[..., Any], expected: tuple[list[Request], list[Answer]], name: str, gives: str
) -> None:
    requests, alone = expected
    runtime, backend = captured(DRAFTINGS[name])
    with runtime:
        giving(runtime, gives)
        assert [answer(each) for each in runtime.handle_request(requests)] == alone
        captures = [*backend.captures]
        assert any("forward" in each for each in captures) or name != "plain"
        assert any("choice" in each or "acceptance" in each for each in captures)
        assert [answer(runtime.handle_request(each)) for each in requests[:6]] == alone[:6]


def test_the_device_has_work_while_the_host_waits_for_what_rules_must_know(captured: Callable[..., Any]) -> None:
    """Each forward pass is enqueued before the token that it begins with is waited for; one behind the end is lost."""
    params = SamplingParams(structure=Structure(regex="[a-z]{20}"))
    runtime, _ = captured(None)
    with runtime:
        runtime._drafters.drafter = Policy()
        runner, events = runtime._runner, []
        begin, decode, start = runner.begin, runner.decode, runner.start

        def noted(call: Callable[..., Any], name: str) -> Callable[..., Any]:
            def launch(*arguments: Any) -> Any:
                events.append(name)
                emitted = call(*arguments)
                wait = emitted.wait if hasattr(emitted, "wait") else None
                if wait is None:
                    return emitted
                return type("Noted", (), {"wait": lambda _: (events.append("token"), wait())[1]})()

            return launch

        runner.begin, runner.decode = noted(begin, "begin"), noted(decode, "choose")
        runner.start = noted(start, "prefill")
        response = runtime.handle_request(Request([1, 2, 3], None, params))
        assert response.structure_complete and len(response.text) == 20
        launches = len(response.token_ids) - 1
        assert events == ["prefill", *["begin", "token", "choose"] * launches, "begin", "token"][: len(events)]
        assert (events.count("token"), events.count("choose")) == (launches + 1, launches)
        assert events.count("begin") <= launches + 1
        events.clear()
        runtime.handle_request(Request([1, 2, 3], None, replace(params, logprobs=2)))
        assert "begin" not in events, "logits are there until the next forward pass is enqueued"


def test_default_drafting_takes_what_is_forced(serving_engines: Path) -> None:
    params = SamplingParams(structure=Structure(choice=["a long text that is forced but for its end: 1", "xyz"]))
    with SpecDecodeRuntime(serving_engines, backend="numpy") as runtime:
        steps = []
        watch_steps(runtime._runner, lambda take, batch, plan: (steps.append(plan), take())[1])
        response = runtime.handle_request(Request([1, 2, 3], None, params))
    assert response.structure_complete and response.finish_reason == "stop"
    assert len(steps) < len(response.token_ids) / 2 or response.text == "xyz"


@pytest.fixture(scope="module")
def ids(serving_engines: Path) -> Callable[[str], list[int]]:
    from edgellm.text.tokenizer import Tokenizer

    return Tokenizer.from_directory(serving_engines).encode


@pytest.mark.parametrize(
    ("name", "gives"), [("plain", ""), ("plain", "given"), ("tree", "given"), ("tree", "turns"), ("chain", "given")]
)
def test_a_grammar_without_a_way_on_fails_one_request_alone(
    captured: Callable[..., Any], ids: Callable[[str], list[int]], name: str, gives: str
) -> None:
    """Its end of sequence is not allowed; where max_tokens or a stop string ends the answer before that, nothing is
    amiss. What came before is read, however far a draft went beyond it."""
    closed = SamplingParams(structure=Structure(choice=["abc"]), allowed_token_ids=ids("abc"))
    others = [SamplingParams(structure=Structure(json=SCHEMAS[0])), SamplingParams(max_tokens=12, ignore_eos=True)]
    each = [closed, *others, replace(closed, max_tokens=3), replace(closed, stop="c"), replace(closed, stop="bc")]
    requests = [Request([number, 7, 9], None, params) for number, params in enumerate(each)]
    runtime, _ = captured(DRAFTINGS[name])
    shown: list[list[Any]] = [[] for _ in requests]
    with runtime:
        giving(runtime, gives)
        failed, *found = runtime.handle_request(requests, [chunks.append for chunks in shown])
        assert isinstance(failed, ConstraintError), failed
        assert [response.finish_reason for response in found] == ["stop", "length", "length", *["stop_string"] * 2]
        assert found[0].structure_complete and found[1].structure_complete is None
        assert [(each.text, each.structure_complete) for each in found[2:]] == [
            ("abc", True),
            ("ab", False),
            ("a", False),
        ]
        streamed = [[token for chunk in chunks for token in chunk.token_ids] for chunks in shown]
        assert streamed[0] == ids("abc") and streamed[1:] == [[*response.token_ids] for response in found]
        for request, response in zip(requests[1:], found, strict=True):
            assert answer(runtime.handle_request(request)) == answer(response)
        with pytest.raises(ConstraintError):
            runtime.handle_request(requests[0])


def test_answers_that_are_over_leave_room_to_others(captured: Callable[..., Any], ids: Callable) -> None:
    """One ends at the end of the context while rounds of another go on."""
    prompt = [number % 200 for number in range(93)]
    requests = [
        Request(prompt, None, SamplingParams(structure=Structure(choice=["a"]))),
        Request([5], None, SamplingParams(structure=Structure(regex="[a-z]{40}"))),
        Request(prompt, None, SamplingParams(structure=Structure(regex="[a-z]{40}"))),
    ]
    for name in ("plain", "chain"):
        runtime, _ = captured(DRAFTINGS[name])
        with runtime:
            runtime._drafters.drafter = Policy()
            first, second = runtime.handle_request(requests[:2])
            third = runtime.handle_request(requests[2])
            assert (first.text, first.finish_reason) == ("a", "stop")
            assert len(second.text) == 40 and second.structure_complete
            assert third.finish_reason == "context" and third.structure_complete is False and third.parsed is None


@pytest.mark.parametrize("name", ["plain", "tree"])
def test_limits_cut_answers(serving_engines: Path, name: str) -> None:
    structure = Structure(json=SCHEMAS[0])
    with opened(serving_engines, name, "") as runtime:
        whole = runtime.handle_request(Request([1, 2], None, SamplingParams(structure=structure)))
        assert whole.structure_complete and whole.finish_reason == "stop"
        count = len(whole.token_ids)
        for limit in range(1, count):
            cut = runtime.handle_request(Request([1, 2], None, SamplingParams(structure=structure, max_tokens=limit)))
            assert cut.token_ids == whole.token_ids[:limit] and cut.finish_reason == "length"
            assert cut.structure_complete == (limit == count - 1)
            assert (cut.parsed is None) == (limit < count - 1)
        stopped = runtime.handle_request(Request([1, 2], None, SamplingParams(structure=structure, stop='"to"')))
        assert stopped.finish_reason == "stop_string" and stopped.structure_complete is False and stopped.parsed is None


def test_ignore_eos_with_a_structure_is_refused_by_name() -> None:
    with pytest.raises(RequestError, match=r"ignore_eos .* structure"):
        SamplingParams(structure=["yes"], ignore_eos=True)


@pytest.mark.parametrize("name", ["plain", "tree"])
def test_logprobs_are_those_after_mask_and_bias(serving_engines: Path, name: str, ids: Callable) -> None:
    """Before temperature; alike drafted and plain. The only token left has 0, what is forbidden minus infinity."""
    yes, no = ids("yn")
    params = SamplingParams(
        temperature=1.3, seed=3, structure=Structure(choice=["yes", "no"]), logprobs=3, logit_bias={no: 2.0}
    )
    with opened(serving_engines, "plain", "") as runtime:
        free = runtime.handle_request(Request([4, 5], None, SamplingParams(max_tokens=1, logprobs=20, logit_bias={})))
        logits = runtime._runner.base.logits(0).astype(np.float64)
        plain = runtime.handle_request(Request([4, 5], None, params))
    first = plain.logprobs[0]
    odds = np.array([logits[yes], logits[no] + 2.0])
    law = dict(zip((yes, no), odds - np.log(np.exp(odds).sum()), strict=True))
    assert dict(first.top) == pytest.approx(law, abs=1e-4)  # of what the mask forbids there is none
    assert first.logprob == pytest.approx(law[first.token_id], abs=1e-4)
    assert [each.logprob for each in plain.logprobs[1:]] == [0.0] * (len(plain.token_ids) - 1)
    assert free.logprobs[0].top[-1][1] > -np.inf
    with opened(serving_engines, name, "turns" if name != "plain" else "") as runtime:
        found = runtime.handle_request(Request([4, 5], None, params))
        assert found.token_ids == plain.token_ids
        for one, other in zip(found.logprobs, plain.logprobs, strict=True):
            assert one.token_id == other.token_id
            assert [pair[0] for pair in one.top[:2]] == [pair[0] for pair in other.top[:2]]
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_bad_words_of_several_tokens_never_come(serving_engines: Path) -> None:
    """Greedy answers are driven along: each pair of tokens that came is forbidden then."""
    with opened(serving_engines, "plain", "") as plain, opened(serving_engines, "tree", "turns") as drafted:
        words: list[list[int]] = []
        for _ in range(6):
            params = SamplingParams(max_tokens=12, ignore_eos=True, bad_words=words)
            found = plain.handle_request(Request([9, 8, 7], None, params)).token_ids
            assert drafted.handle_request(Request([9, 8, 7], None, params)).token_ids == found
            pairs = [list(found[place : place + 2]) for place in range(11)]
            assert not any(pair in words for pair in pairs)
            words += [pair for pair in pairs if pair not in words]
        assert len(words) > 20


def test_sessions_messages_that_go_on_and_async(serving_engines: Path) -> None:
    structure = Structure(json=SCHEMAS[0])
    with LLM(serving_engines, backend="numpy", drafting=TREE) as llm:
        session = llm.create_session()
        for question in ("a", "b"):
            assert session.send(question, structure=structure).structure_complete
        free = session.send("c", SamplingParams(max_tokens=4))
        assert free.structure_complete is None
        messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "it is "}]
        going = llm.chat(messages, SamplingParams(structure=["yes", "no"]), continue_final_message=True)
        assert going.parsed in ("yes", "no")
        plain = llm.chat([{"role": "user", "content": "q"}], SamplingParams(structure=structure))

    async def ask() -> list[Any]:
        async with AsyncLLM(serving_engines, backend="numpy", drafting=TREE) as model:
            question = [{"role": "user", "content": "q"}]
            asked = [model.chat(question, SamplingParams(structure=structure)) for _ in range(3)]
            return await asyncio.gather(*asked)

    assert [each.parsed for each in asyncio.run(ask())] == [plain.parsed] * 3


class KnownAnswers(GivenTrees):
    """Gives what a sequence will say, as far as its rules or chance do not say otherwise."""

    def __init__(self, expected: Mapping[tuple[int, ...], Sequence[int]], another: Policy | None = None) -> None:
        super().__init__(0, another)
        self._expected = expected

    def choose(
        self, runner: Any, sequences: Sequence[Any], room: int, ruled: bool, known: bool, begun: bool, waited: bool
    ) -> Choice:
        chosen = super().choose(runner, sequences, room, ruled, known, begun, waited)
        if chosen[1] is None:
            return chosen
        trees = []
        for sequence in sequences:
            tokens = self._expected[tuple(sequence.prompt_ids)][sequence.known : sequence.known + 3]
            trees.append(GivenTree([*tokens, 5], [*range(-1, len(tokens) - 1), -1]))
        return chosen[0], trees


@pytest.fixture(scope="module")
def thinking_engines(
    make_checkpoint: Callable[..., Path], tiny_draft: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A tiny model that may think before it answers, and a draft."""
    folder = tmp_path_factory.mktemp("thinking")
    checkpoint = make_checkpoint(folder / "base", 5)
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.save(str(checkpoint / "tokenizer.json"))
    limits = EngineLimits(4, 16, 96, draft_top_k=4, draft_steps=3, verify_tree_size=12)
    build_engine_directory(checkpoint, folder / "engines", limits, [], draft=tiny_draft)
    return folder / "engines"


def thinking_requests(**others: Any) -> list[Request]:
    """Some whose prompt has begun to think, some that may begin to."""
    requests = []
    for number in range(16):
        params = SamplingParams(
            temperature=1.5 * (number % 4 > 0),
            seed=number,
            max_tokens=40,
            **({"structure": Structure(json=SCHEMAS[number % 2])} | others),
            logit_bias={259: 6.0, 258: 4.0, 257: -20.0},
        )
        requests.append(Request([number, 7, *([258] if number % 2 else [])], None, params))
    return requests


def test_reasoning_that_ends_inside_of_a_round(thinking_engines: Path) -> None:
    requests = thinking_requests()
    with SpecDecodeRuntime(thinking_engines, backend="numpy") as runtime:
        runtime._drafters.drafter = Policy()
        plain = [runtime.handle_request(request) for request in requests]
    assert sum(bool(response.structured_from) for response in plain) > 6
    assert sum(bool(response.structure_complete) for response in plain) > 3
    known = {tuple(request.prompt): response.token_ids for request, response in zip(requests, plain, strict=True)}
    inside = 0
    for gives in (GivenTrees(), KnownAnswers(known, FixedDrafter(tree(4, 2, 8)))):
        with SpecDecodeRuntime(thinking_engines, drafting=TREE, backend="numpy") as runtime:
            runtime._drafters.drafter = gives

            def watched(take: Callable[[], Any], batch: int, plan: Any) -> Any:
                nonlocal inside
                found = take()
                inside += sum(259 in tokens[:-1] for tokens in found.wait())
                return found

            watch_steps(runtime._runner, watched)
            drafted = runtime.handle_request(requests)
        for one, other in zip(drafted, plain, strict=True):
            assert answer(one) == answer(other)
            assert (one.structured_from, one.parsed) == (other.structured_from, other.parsed)
    assert inside > 4


def test_an_answer_that_is_cut_while_it_thinks_has_no_structure(thinking_engines: Path) -> None:
    """Though the round that cut it went on, and an empty text would be complete."""
    requests = thinking_requests(structure=Structure(regex="a*"))
    with SpecDecodeRuntime(thinking_engines, drafting=TREE, backend="numpy") as runtime:
        runtime._drafters.drafter = Policy()
        whole = [runtime.handle_request(request) for request in requests]
        cut = 0
        for request, response in zip(requests, whole, strict=True):
            if 259 not in response.token_ids or response.token_ids.index(259) < 2:
                continue
            thought = runtime.tokenizer.decode(response.token_ids[: response.token_ids.index(259)])[-1:]
            params = replace(request.params, stop=thought)
            runtime._drafters.drafter = KnownAnswers({tuple(request.prompt): response.token_ids})
            found = runtime.handle_request(Request(request.prompt, None, params))
            if found.finish_reason == "stop_string" and 259 not in found.token_ids:
                cut += 1
                assert found.structured_from is None and not found.structure_complete and found.parsed is None
        assert cut > 2


def test_typical_answers_are_those_of_the_same_rounds_alone(serving_engines: Path) -> None:
    """Neighbours that leave the plan as it is change nothing: others draw, choose, are biased, are under rules."""
    typical = replace(TREE, acceptance="typical", posterior_threshold=0.002, posterior_alpha=0.9)
    own = SamplingParams(temperature=1.0, seed=1, max_tokens=20, ignore_eos=True)
    others = [
        replace(own, temperature=0.0),
        replace(own, bad_words=[[5], [7, 9]]),
        replace(own, seed=3, logit_bias={5: 3.0}),
    ]
    with SpecDecodeRuntime(serving_engines, drafting=typical, backend="numpy") as runtime:
        requests = [Request([4, 1, 9], None, each) for each in (own, *others)]
        found = runtime.handle_request(requests)[0]
        assert found.token_ids == runtime.handle_request(requests[0]).token_ids
        assert found.drafting.rounds < len(found.token_ids) - 4
