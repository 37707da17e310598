"""Given candidates and a draft model's in one tree: more tokens a round than either, and the same answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from runner_steps import fitting, take_step
from token_rules import RuledSequence

from edgellm import RequestError
from edgellm.decoding.runner import read_adapters
from edgellm.decoding.sequence import StepMasks
from edgellm.drafting.config import DraftingConfig
from edgellm.engines.backends.opening import open_backend
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.errors import EngineError
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


OWN = tree(4, 4, 16)


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
