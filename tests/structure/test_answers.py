"""The rules of requests to the shipped model and to one that thinks, and what responses say of structured answers."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from byte_level_tokenizer import byte_level
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import models

from edgellm import Request, RequestError, Response, SamplingParams, Session, Structure, Timings, Usage
from edgellm.decoding.sequence import DecodingSequence
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.runners.sampling_state import SamplingValues
from edgellm.engines.speculation.constraints import allows, mask_words
from edgellm.opened_model import SHIPPED_MODEL
from edgellm.structure.answers import RuleMaker
from edgellm.text.output import OutputText
from edgellm.text.tokenizer import Tokenizer

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}


@pytest.fixture(scope="module")
def shipped():
    directory = EngineDirectory.open(SHIPPED_MODEL)
    tokenizer = Tokenizer.from_directory(directory.path, directory.config.vocab_size)
    return RuleMaker(tokenizer, directory.config.vocab_size, directory.config.eos_token_ids), tokenizer, directory


def thinking():
    library = byte_level()
    library.add_tokens(["<think>", "</think>"])
    tokenizer = Tokenizer(library)
    return RuleMaker(tokenizer, 350, (tokenizer.token_to_id("<|im_end|>"),)), tokenizer


def response(text, params, structured_from=0, **more):
    usage, timings = Usage(1, 0, 1), Timings(0.0, 0.0, 0.0, 0.0)
    return Response(
        text, (1,), "stop", usage, timings, structure=params.structure, structured_from=structured_from, **more
    )


def test_the_shipped_model_writes_json_under_masks(shipped):
    maker, tokenizer, directory = shipped
    rules = maker.rules(SamplingParams(structure=SCHEMA), [1, 2, 3])
    assert rules is not None and rules.after_reasoning is None and rules.structured_from([5]) == 0
    row, generator, answer = np.zeros(mask_words(directory.config.vocab_size), np.uint32), np.random.default_rng(0), []
    while not rules.constraint.is_stopped():
        rules.constraint.fill_mask(row)
        allowed = [token for token in range(directory.config.vocab_size) if allows(row, token)]
        token = int(generator.choice(rules.constraint.forced(1) or allowed))
        assert rules.constraint.try_advance(token)
        answer.append(token)
    params = SamplingParams(structure=SCHEMA)
    text = tokenizer.decode([token for token in answer if token not in directory.config.eos_token_ids])
    found = response(text, params)
    assert found.structure_complete and isinstance(found.parsed["n"], int)


def test_requests_without_rules_have_none_and_load_nothing(shipped):
    maker, *_ = shipped
    assert RuleMaker(None, 10, ()).rules(SamplingParams(logit_bias={3: 1}), [1]) is None
    assert maker.rules(SamplingParams(), [1]) is None


def test_bad_words_are_forbidden_as_they_stand_and_behind_a_space():
    maker, tokenizer = thinking()
    rules = maker.rules(SamplingParams(bad_words=["hello", "user", (7, 8)]), [1])
    for text in ("hello", " hello", "the user", "user", "say hello"):
        ids = tokenizer.encode(text)
        consumed = [rules.constraint.try_advance(token) for token in ids]
        assert not all(consumed), text
        rules.constraint.rollback(sum(consumed))
    assert rules.constraint.try_advance(7) and not rules.constraint.try_advance(8) and rules.constraint.try_advance(9)


def test_rules_go_together_and_a_dead_end_is_named():
    from edgellm.errors import ConstraintError

    maker, tokenizer = thinking()
    brace = tokenizer.encode("{")[0]
    rules = maker.rules(SamplingParams(structure=["{}"], allowed_token_ids=[brace, 1], bad_words=["x"]), [1])
    row = np.zeros(mask_words(350), np.uint32)
    rules.constraint.fill_mask(row)
    assert [token for token in range(350) if allows(row, token)] == [brace]
    assert rules.constraint.try_advance(brace)
    with pytest.raises(ConstraintError, match="together leave no token"):
        rules.constraint.fill_mask(row)
    drawn = DecodingSequence((1,), SamplingValues(), OutputText(tokenizer.detokenizer()), wanted=9, rules=rules)
    drawn.know([5])  # as behind a dead end, where the mask could not be made
    assert drawn.is_over and "together leave no token" in str(drawn.dead_end)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"allowed_token_ids": [3, 350]}, "allowed_token_ids has the token id 350: the model's vocabulary has 350"),
        ({"logit_bias": {400: 1}}, "logit_bias has the token id 400"),
        ({"bad_words": [[1, 999]]}, "bad_words has the token id 999"),
    ],
)
def test_ids_beyond_the_vocabulary_are_refused(fields, words):
    with pytest.raises(RequestError, match=words):
        thinking()[0].rules(SamplingParams(**fields), [1])


def test_a_tokenizer_that_cannot_be_read_fails_structured_requests_alone():
    library = LibraryTokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2}, unk_token="c"))
    maker = RuleMaker(Tokenizer(library), 3, (2,))
    assert maker.rules(SamplingParams(bad_words=[[1]], allowed_token_ids=[0, 2]), [0]) is not None
    with pytest.raises(RequestError, match=r"tokenizer.json cannot be used for structured answers"):
        maker.rules(SamplingParams(structure=["a"]), [0])


@pytest.mark.parametrize(
    ("prompt", "free", "opens"),
    [("user: hi\n", False, True), ("<think>\n", True, True), ("<think>\n\n</think>\n\n", False, False)],
)
def test_the_answer_of_a_model_that_thinks_begins_behind_its_reasoning(prompt, free, opens):
    maker, tokenizer = thinking()
    params, begin = SamplingParams(structure=SCHEMA), tokenizer.token_to_id("<think>")
    rules = maker.rules(params, tokenizer.encode(prompt))
    assert rules.constraint.is_free() == free
    assert rules.constraint.try_advance(begin) == opens
    if not opens:
        assert rules.structured_from([]) == 0
        return
    reasoning = tokenizer.encode("hello world</think>")
    assert rules.structured_from(reasoning[:1]) is None
    answer = [begin, *reasoning, *tokenizer.encode('{"n": 12}')]
    assert all(map(rules.constraint.try_advance, answer[1:])) and rules.constraint.is_stopped()
    text = tokenizer.decode(answer)
    start = rules.structured_from(answer)
    assert text[start:] == '{"n": 12}' and response(text, params, start).parsed == {"n": 12}


def test_responses_say_whether_they_are_complete():
    params = SamplingParams(structure=SCHEMA)
    whole = response('{"n": 1}', params)
    assert whole.structure_complete is True and whole.parsed == {"n": 1}
    cut = dataclasses.replace(whole, text='{"n": ', finish_reason="length")
    assert cut.structure_complete is False and cut.parsed is None
    lost = response("I think so", params, None)
    assert lost.structure_complete is False and lost.parsed is None
    plain = dataclasses.replace(whole, structure=None)
    assert plain.structure_complete is None and plain.parsed is None


class Asked(Exception):
    """Carries what a session asked for."""


def ask(request, conversation):
    raise Asked(request)


def test_a_message_of_a_session_has_a_structure_of_its_own():
    session = Session(ask, params=SamplingParams(temperature=0.5, structure=["never"]))
    for call, expected in (
        (lambda: session.send("hi", structure=["yes", "no"]), Structure(choice=["yes", "no"])),
        (lambda: session.stream("hi", response_format={"type": "json_object"}), Structure(json_object=True)),
        (lambda: session.send("hi", response_format={"type": "text"}), None),
        (lambda: session.send("hi"), Structure(choice=["never"])),
    ):
        with pytest.raises(Asked) as asked:
            call()
        assert asked.value.args[0].params == SamplingParams(temperature=0.5, structure=expected)
    with pytest.raises(Asked) as asked:
        session.send("hi", SamplingParams(top_k=3), structure="json_object")
    assert asked.value.args[0].params == SamplingParams(top_k=3, structure="json_object")


def test_requests_take_structures_and_response_formats():
    schema = Structure(json=SCHEMA)
    asked = Request("hi", structure=SCHEMA, params=SamplingParams(temperature=0.5))
    assert asked.params == SamplingParams(temperature=0.5, structure=schema)
    described = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    assert Request("hi", response_format=described).params == SamplingParams(structure=schema)
    assert dataclasses.replace(asked, prompt="ho").params == asked.params
    assert Request("hi").params is None
    with pytest.raises(RequestError, match="give one of them"):
        Request("hi", structure=SCHEMA, response_format=described)
