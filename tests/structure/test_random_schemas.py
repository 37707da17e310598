"""Random schemas, random answers under their masks, and jsonschema as the judge."""

import json
import random

import jsonschema
import pytest
from random_answers import random_answer, random_document

from edgellm.errors import RequestError
from edgellm.structure.description import Structure


@pytest.mark.parametrize("first", range(0, 400, 50))
def test_whole_answers_are_valid_by_an_independent_judge(first):
    taken = whole = 0
    for seed in range(first, first + 50):
        generator = random.Random(seed)
        schema, whitespace = random_document(generator), generator.choice(["spaced", "compact", "free"])
        try:
            structure = Structure(json=schema, whitespace=whitespace)
        except RequestError:
            continue
        taken += 1
        validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker(["ipv4", "uuid"]))
        for _ in range(6):
            text = random_answer(structure.grammar_text, generator)
            if text is None:
                continue
            whole += 1
            value = json.loads(text)
            try:
                assert validator.is_valid(value), (seed, schema, text)
            except OverflowError:  # jsonschema fails on 1e400, which Python reads as infinity
                continue
            assert structure.is_complete(text) and structure.parsed(text) == value
    assert taken > 12 and whole > 60


@pytest.mark.parametrize("seed", range(5))
def test_cut_answers_are_not_complete(seed):
    generator = random.Random(seed)
    schema = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 9}, "b": {"enum": [1, "x"]}}}
    structure = Structure(json=schema | {"required": ["a", "b"]})
    text = random_answer(structure.grammar_text, generator)
    assert text is not None
    for end in range(len(text)):
        assert not structure.is_complete(text[:end])
        with pytest.raises(RequestError, match="is not complete"):
            structure.parsed(text[:end])
