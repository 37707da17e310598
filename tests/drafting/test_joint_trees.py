"""Given candidates and a draft model's in one tree: more tokens a round than either, the same answers, and when it is
taken."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from drafted_conversations import ask_freely
from runner_steps import fitting, take_step
from served_answers import answer
from token_rules import RuledSequence

from edgellm import LLM, Request, RequestError, SamplingParams
from edgellm.decoding.runner import read_adapters
from edgellm.decoding.sequence import StepMasks
from edgellm.drafting import learner as learner_module
from edgellm.drafting.config import DraftingConfig
from edgellm.drafting.drafter import Policy, fitting_plans
from edgellm.drafting.learner import Learner
from edgellm.engines.backends.opening import open_backend
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.errors import EngineError
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.runners.sampling_state import SamplingValues
from edgellm.engines.speculation.draft_plan import DraftPlan, chain, given, tree
from edgellm.engines.speculation.round import GivenTree
from edgellm.engines.speculation.runner import DecodingRunner
from edgellm.engines.speculation.suffix_index import SuffixIndex
from edgellm.opened_model import SHIPPED_MODEL
from edgellm.structure.description import Structure
from edgellm.structure.grammar import GrammarVocabulary
from edgellm.text.tokenizer import Tokenizer

shipped = pytest.mark.skipif(not (SHIPPED_MODEL / "draft").exists(), reason="the shipped model has no draft head")
THINGS = ["red cup", "blue cup", "green apple", "yellow banana", "white bowl"]
COMMANDS = [f"Push the {thing} to the left." for thing in THINGS] + ["Wait for five seconds.", "Go home."]
SCHEMA = {
    "oneOf": [
        {
            "type": "object",
            "properties": {"action": {"const": name}, field: field_schema},
            "required": ["action", field],
            "additionalProperties": False,
        }
        for name, field, field_schema in (
            ("push", "object", {"type": "string", "maxLength": 40}),
            ("say", "text", {"type": "string", "maxLength": 100}),
            ("wait", "seconds", {"type": "integer", "minimum": 0, "maximum": 600}),
        )
    ]
}


class Commands:
    """The shipped model answers commands with its JSON adapter, in rounds of one plan, token for token known."""

    def __init__(self, runner: DecodingRunner, directory: EngineDirectory, schema: bool) -> None:
        self.runner, self._schema = runner, schema
        tokenizer = Tokenizer.from_directory(SHIPPED_MODEL)
        self._ends = set(directory.config.eos_token_ids)
        width = directory.config.vocab_size
        self._vocabulary = GrammarVocabulary.of_tokenizer(tokenizer, width, tuple(self._ends))
        self._prompts = [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in COMMANDS]

    def answers(self, plan: DraftPlan | None, leads: bool = False) -> tuple[list[list[int]], float]:
        """The answers, and tokens a round behind their first ones. Given are what the schema forces, or else what
        followed the last tokens before."""
        index, found, rounds = SuffixIndex(), [], 0
        for prompt in self._prompts:
            constraint = self._vocabulary.constraint_for(Structure(json=SCHEMA).grammar_text) if self._schema else None
            sequence, said = RuledSequence(constraint), index.open(prompt)
            rules = StepMasks([sequence]) if self._schema else None
            self.runner.base.set_adapter(0, "json")
            tokens: list[int] = []
            emitted = self.runner.start(0, prompt, 0, SamplingValues(), None, rules).wait().tolist()
            while True:
                ends = [place for place, token in enumerate(emitted) if token in self._ends]
                taken = emitted[: ends[0] + 1] if ends else emitted
                tokens += taken
                sequence.know(taken)
                index.extend(said, taken)
                if ends or len(tokens) > 40:
                    break
                trees = None
                if plan is not None and plan.takes_given:
                    trees = [self._given(plan, constraint, index.propose(said, 7, 6, 3), leads)]
                emitted = take_step(self.runner, 1, plan, rules, trees).wait()[0]
                rounds += 1
            self.runner.stop(0)
            index.close(said)
            found.append(tokens)
        return found, (sum(map(len, found)) - len(found)) / rounds

    @staticmethod
    def _given(plan: DraftPlan, constraint: Any, proposal: Any, leads: bool) -> GivenTree:
        if constraint is None:
            return GivenTree(proposal.tokens, proposal.parents)
        forced = constraint.forced(plan.given_depth)
        return GivenTree(forced, range(-1, len(forced) - 1), leads)


@pytest.fixture(scope="module", params=[False, True], ids=["free", "schema"])
def commands(request: pytest.FixtureRequest) -> Iterator[Commands]:
    directory = EngineDirectory.open(SHIPPED_MODEL)
    runner = DecodingRunner.open(
        open_backend("numpy", directory), directory, adapters=read_adapters(directory, {}), drafts=True
    )
    try:
        yield Commands(runner, directory, request.param)
    finally:
        runner.close()


@shipped
def test_a_joint_tree_gives_more_tokens_a_round_than_either_alone(commands: Commands) -> None:
    """Deterministic: the draft model knows the texts of the objects, not the adapter's form; what was said before, or
    the schema, knows that."""
    plain, _ = commands.answers(None)
    own = tree(10, 6, 30)
    found = {plan.name: commands.answers(plan) for plan in (given(7, 6), own, own.joined(7, 6, 64))}
    found["leads"] = commands.answers(own.joined(7, 6, 64), leads=True)
    assert all(tokens == plain for tokens, _ in found.values())
    lengths = {name: length for name, (_, length) in found.items()}
    print(commands._schema, {name: round(length, 2) for name, length in lengths.items()})
    joint = lengths["tree 10/6/30 + given 7"]
    assert joint > 1.2 * max(lengths["given 7"], lengths[own.name])
    assert lengths["leads"] > 1.05 * joint if commands._schema else lengths["leads"] == joint


QUESTIONS = ["What is on the table?", "Push the red cup to the left.", "Push the blue cup to the left.", "Who are you?"]
JOINT = DraftingConfig(4, 4, 16, suffix_decoding=True)


@pytest.fixture
def always_joint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is proposed stands beside the draft model's, also where that does not pay."""
    ask_freely(monkeypatch)
    monkeypatch.setattr(learner_module, "GAIN", 1e9)
    monkeypatch.setattr(learner_module, "JOINT_GAIN", -1e9)


def joint_rounds(responses: Sequence[Any]) -> int:
    return sum(count for each in responses for name, count in each.drafting.plans.items() if "+ given" in name)


@pytest.fixture(scope="module")
def batched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped model with its draft, for several sequences."""
    folder = tmp_path_factory.mktemp("shipped") / "engines"
    limits = EngineLimits(4, 128, 512, draft_top_k=4, draft_steps=4, verify_tree_size=24)
    build_engine_directory(SHIPPED_MODEL, folder, limits, [], draft=SHIPPED_MODEL / "draft")
    return folder


@shipped
@pytest.mark.usefixtures("always_joint")
def test_answers_of_the_shipped_model_are_those_of_plain_decoding(batched: Path) -> None:
    """Greedy and sampled, free and under a schema, alone and in a batch of which some have nothing given."""
    tokenizer = Tokenizer.from_directory(SHIPPED_MODEL)
    requests = []
    for number, question in enumerate(QUESTIONS):
        ids = tokenizer.encode_chat([{"role": "user", "content": question}])
        for temperature in (0.0, 1.2):
            ruled = {"structure": Structure(json=SCHEMA)} if number % 2 else {}
            params = SamplingParams(temperature=temperature, seed=number, max_tokens=24, **ruled)
            requests.append(Request(ids, None, params))
    with LLM(batched, backend="numpy", drafting=None) as plain:
        plain.call(lambda runtime: setattr(runtime._drafters, "drafter", Policy())).result()
        expected = [answer(each) for request in requests for each in plain.handle([request])]
    with LLM(batched, backend="numpy", drafting=JOINT) as drafted:
        for _ in range(2):  # the second time all was said before
            alone = [each for request in requests for each in drafted.handle([request])]
            together = drafted.handle(requests)
            for found in (alone, together):
                assert [answer(each) for each in found] == expected
                assert joint_rounds(found) > 3


# Which round is taken, by what steps took and gave, as told.

TEXT = [*range(11, 31)]
OWN = tree(4, 4, 16)


class Answer:
    """As `Drafted` has it."""

    constraint, said, is_over, finished, drawn, known = None, None, False, False, (), 0


class Takes:
    """A runner that takes all trees, but for joint ones if it is told so."""

    def __init__(self, joint: bool = True) -> None:
        self._joint = joint

    def takes_given(self, batch: int, plan: DraftPlan, ruled: bool = False) -> bool:
        return self._joint or not plan.is_joint

    def is_ready(self, batch: int, plan: DraftPlan, ruled: bool = False) -> bool:
        return True


def drafting() -> Learner:
    return Learner(6, True, SuffixIndex(), fitting_plans(OWN), adaptive=False, most_nodes=64)


def choice(drafts: Learner, joint: bool = True) -> Any:
    """The round of given candidates that is chosen, and their trees; None where there is none."""
    plan, trees = drafts.choose(Takes(joint), [opened(drafts)], 100, False)  # type: ignore[list-item]
    return None if trees is None else (plan, trees)


def opened(drafts: Learner, prompt: Sequence[int] = (*TEXT, *TEXT[:12])) -> Answer:
    sequence = Answer()
    drafts.open(sequence, prompt)  # type: ignore[arg-type]
    return sequence


def told(drafts: Learner, joint_seconds: float, given_seconds: float = 0.03, own_tokens: int = 3) -> None:
    """Rounds of the draft model gave so many tokens in 30 ms, others took so long."""
    for _ in range(6):
        drafts.record(OWN, [own_tokens], 0.03)
        for plan in drafts.plans:
            for _ in range(8 if plan.is_joint else 1):
                if plan.takes_given:
                    seconds = joint_seconds if plan.is_joint else given_seconds
                    drafts.record(plan, [own_tokens + 2 * plan.is_joint], seconds)
    for _ in range(20):
        drafts.record(OWN, [own_tokens], 0.03)


@pytest.mark.usefixtures("always_asked")
@pytest.mark.parametrize(
    ("joint_seconds", "given_seconds", "taken"), [(0.032, 0.03, "joint"), (0.2, 0.3, "own"), (0.2, 0.02, "given")]
)
def test_the_best_of_three_is_taken(joint_seconds: float, given_seconds: float, taken: str) -> None:
    drafts = drafting()
    told(drafts, joint_seconds, given_seconds)
    chosen = choice(drafts)
    if taken == "own":
        assert chosen is None
        return
    plan, (found,) = chosen
    assert plan.is_joint == (taken == "joint") and list(found.tokens[:4]) == TEXT[12:16]
    assert drafts.report().rounds[plan.name] > 0
    if plan.is_joint:
        assert (plan.name, plan.tree_size, plan.given_nodes) == ("tree 4/4/16 + given 7", 23, 7)
        chosen = choice(drafts, False)
        assert chosen is None or chosen[0].is_given, "where no engine verifies it"


@pytest.fixture
def always_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    ask_freely(monkeypatch)


@pytest.mark.usefixtures("always_asked")
def test_nothing_is_joined_where_the_draft_model_has_no_turn() -> None:
    drafts = Learner(6, True, SuffixIndex(), [OWN], most_nodes=64)
    for _ in range(60):
        drafts.record(OWN, [1], 0.03)
        drafts.record(None, [1], 0.01)
        for plan in drafts.plans:
            if plan.takes_given:
                drafts.record(plan, [3], 0.011)
    chosen = choice(drafts)
    assert chosen is None or chosen[0].is_given


@pytest.mark.usefixtures("always_joint")
def test_what_the_draft_model_reaches_is_learned_from_its_own_rounds_alone(
    batched: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is known of the draft stays true, whatever stands beside it."""
    monkeypatch.setattr(learner_module, "COMPUTED", learner_module.CAPTURED)  # so that drafts should pay
    tokenizer = Tokenizer.from_directory(SHIPPED_MODEL)
    ids = tokenizer.encode_chat([{"role": "user", "content": QUESTIONS[0]}])
    config = DraftingConfig(4, 4, 16, adaptive=True, suffix_decoding=True)
    heard: list[DraftPlan | None] = []
    with LLM(batched, backend="numpy", drafting=config) as llm:
        drafter = llm._runtime._drafters.drafter
        chances = drafter._choice.chances[False]
        record = chances.record
        chances.record = lambda plan, emitted, steps: (heard.extend([plan] * steps), record(plan, emitted, steps))[1]
        responses = [llm.generate(ids, SamplingParams(max_tokens=24)) for _ in range(4)]
        counted = llm.drafting_report.rounds
        if drafter.rested_steps:
            drafter._count_rests()  # the latest plain steps
    assert len({tuple(each.token_ids) for each in responses}) == 1
    steps = sum(each.drafting.plain_steps + each.drafting.rounds for each in responses)
    given_rounds = sum(count for name, count in counted.items() if "given" in name)
    assert steps == sum(counted.values()) and given_rounds > 3
    assert len(heard) == steps - given_rounds and not any(plan is not None and plan.takes_given for plan in heard)


def test_lossy_kinds_take_no_given_nodes() -> None:
    with pytest.raises(EngineError, match="given nodes beside a sampled chain: which candidates there are would show"):
        chain(3, sampled=True).joined(4, 3, 16)
    with pytest.raises(EngineError, match="given nodes beside typical acceptance: which candidates there are"):
        tree(4, 4, 16, acceptance="typical").joined(4, 3, 32)
    with pytest.raises(RequestError, match="suffix_decoding is true beside acceptance typical"):
        DraftingConfig(acceptance="typical", suffix_decoding=True)
    for nodes, depth in ((4, 0), (0, 2), (-1, -1)):
        with pytest.raises(EngineError, match=f"{nodes} given nodes, up to {depth} deep, in a tree of"):
            OWN.joined(nodes, depth, 64)
    assert (OWN.joined(7, 4, 16).tree_size, OWN.joined(40, 4, 16).given_nodes) == (16, 8)
    assert chain(5).joined(9, 5, 14).given_nodes == 8


@pytest.mark.parametrize("plan", [OWN.joined(7, 4, 64), chain(3).joined(7, 6, 64), chain(5).joined(3, 2, 64)])
def test_joint_plans_are_shortened_to_the_room_there_is(plan: DraftPlan) -> None:
    for room in range(2, 9):
        fitted = fitting(plan, room)
        assert fitted.longest <= room and fitted.given_nodes == plan.given_nodes
        assert (fitted == plan) == (plan.longest <= room)
        assert fitted.tree_size <= plan.tree_size and fitted.selected + fitted.given_nodes >= fitted.tree_size - 1
    assert fitting(plan, 1) is None
