"""Grammars tried in a child process: what ends it is an error of the request, and the next one is answered."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from byte_level_tokenizer import END, byte_level
from costly_schemas import chain, lark_grammar, patterns, patterns_of_a_property, rules, schema_grammar

from edgellm.errors import EngineError, RequestError
from edgellm.structure import trial
from edgellm.structure.description import Structure
from edgellm.structure.grammar import GrammarVocabulary
from edgellm.structure.steps import try_apart
from edgellm.structure.trial import TrialProcess
from edgellm.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def process() -> Iterator[TrialProcess]:
    """A child that gives a grammar at most a second, and 48 MiB."""
    process = TrialProcess(1, 48 << 20)
    yield process
    process.close()


KILLERS = {
    "2,500 $refs": schema_grammar(chain(2500)),
    "9,000 rules": lark_grammar(rules(9000)),
    "60 patterns": schema_grammar({"allOf": patterns(60)}),
    # those that pass the bounds which are looked at beforehand
    "199 $refs to 9 arrays": schema_grammar(chain(199, arrays=9)),
    "60 patterns of a property": schema_grammar(patterns_of_a_property(60)),
}


@pytest.mark.parametrize("killer", KILLERS)
def test_what_ends_the_child_is_refused_and_remembered(process: TrialProcess, killer: str) -> None:
    with pytest.raises(RequestError, match=r"killer takes too much to compile: more than 1 seconds, 48 MiB, or"):
        process.check(None, KILLERS[killer], "killer")
    another = process._process
    process.check(None, lark_grammar(f'start: "{killer}"'), "the grammar")
    assert process._process is another and another.poll() is None
    with pytest.raises(RequestError, match="killer takes too much to compile"):
        process.check(None, KILLERS[killer], "killer")
    assert process._process is another, "a killer is tried once"


def test_a_vocabulary_is_tried_apart_with_the_errors_that_it_has_here(process: TrialProcess) -> None:
    library = byte_level()
    tokenizer = Tokenizer(library)
    try_apart(process.check)
    try:
        vocabulary = GrammarVocabulary.of_tokenizer(tokenizer, 401, [library.token_to_id(END)])
        structure = Structure(choice=["tried apart"])
        assert vocabulary.constraint_for(structure.grammar_text).forced(3)
        assert len(process._defined) == 2, "single bytes, and this vocabulary once"
        with pytest.raises(RequestError, match=r"the regular expression cannot be enforced .*say it in another way"):
            Structure(regex="(?=a)")
        process._process.kill()
        process._process.wait()
        vocabulary.constraint_for(Structure(choice=["after its end"]).grammar_text)
    finally:
        try_apart(None)
    with pytest.raises(RequestError, match="cannot be enforced"):
        Structure(regex="(?=a)")


def test_a_child_that_cannot_start_is_an_error_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    process = TrialProcess()
    monkeypatch.setattr(trial.sys, "executable", "/bin/false")
    with pytest.raises(EngineError, match=r"has ended before it was ready \(exit code 1\)"):
        process.check(None, lark_grammar('start: "a"'), "the grammar")
    monkeypatch.setattr(trial.sys, "executable", "/no/such/python")
    with pytest.raises(EngineError, match=r"cannot be started"):
        process.check(None, lark_grammar('start: "a"'), "the grammar")
