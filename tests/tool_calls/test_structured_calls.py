"""Tools beside a structure: an answer is calls by their grammar or text of the structure, and is read as the one that
it is, in each format."""

from __future__ import annotations

import random
from typing import Any

import jsonschema
import numpy as np
import pytest
from random_answers import random_answer

from edgellm.engines.speculation.constraints import mask_words
from edgellm.structure.description import Structure
from edgellm.structure.grammar import byte_vocabulary
from edgellm.text.messages import checked_tools
from edgellm.tool_calls.calls import checked_choice
from edgellm.tool_calls.formats import FORMATS
from edgellm.tool_calls.reader import ToolReader
from edgellm.tool_calls.rules import CallsOrText, call_constraint

VOCABULARY = byte_vocabulary()
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"at": {"enum": ["cup", "table"]}, "times": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["at"],
    "additionalProperties": False,
}
CHOICE = checked_choice(
    checked_tools([{"name": "look", "parameters": PARAMETERS}, {"name": "look_up"}]), "auto", parallel=True
)
#: Answers that look like calls, whole and in part.
CALL_LIKE = "<tool_call><function=look></function></tool_call>[TOOL_CALLS]look[ARGS]{}<|tool_call_start|>[look()]"
STRUCTURES = {
    "object": Structure(json_object=True),
    "named": Structure(
        json={
            "type": "object",
            "properties": {"name": {"enum": ["look", "Ann"]}, "parameters": {"type": "integer"}},
            "required": ["name"],
            "additionalProperties": False,
        }
    ),
    "text": Structure(json={"enum": [CALL_LIKE, "[look("]}),
    "choice": Structure(choice=[f" {CALL_LIKE}", "[look_", "<tool_cal", '{"name": "look", "parameters": ', "yes"]),
    "regex": Structure(regex=r"[a-c\[<{]{1,3}"),
}


def rules_of(name: str, structure: str) -> CallsOrText:
    assert CHOICE is not None
    found = call_constraint(FORMATS[name], CHOICE, VOCABULARY, {}, STRUCTURES[structure])
    assert isinstance(found, CallsOrText)
    return found


@pytest.mark.parametrize("structure", sorted(STRUCTURES))
@pytest.mark.parametrize("name", sorted(FORMATS))
def test_an_answer_is_calls_or_text_and_is_read_so(name: str, structure: str) -> None:
    assert CHOICE is not None
    generator, counts = random.Random(f"{name} {structure}"), {"calls": 0, "text": 0}
    openings = [opening.encode() for opening in FORMATS[name].openings(CHOICE.schemas)]
    for begin in [*[b""] * 12, *openings * 3]:
        answer = random_answer(rules_of(name, structure), generator, begin=begin)
        if answer is None:
            continue
        reader = ToolReader(FORMATS[name], CHOICE.schemas, calls_first=True)
        text = "".join(reader.push(0, each) for each in answer) + reader.finish()
        assert reader.error is None
        if begin or reader.calls:
            counts["calls"] += 1
            assert text == "" and reader.calls
        else:
            counts["text"] += 1
            assert text == answer and STRUCTURES[structure].is_complete(text)
        for call in reader.calls:
            assert call.complete
            jsonschema.validate(call.parsed, CHOICE.schemas[call.name])
    assert all(counts.values())


@pytest.mark.parametrize("name", ["llama3_json", "pythonic", "hermes"])
def test_what_was_drafted_is_taken_back(name: str) -> None:
    """Whichever way it went, and across the place where that was decided."""
    assert CHOICE is not None
    generator, row = random.Random(name), np.empty(mask_words(VOCABULARY.size), np.uint32)
    call = FORMATS[name].written([("look", {"at": "cup"})])
    rules = rules_of(name, "named")
    masks: dict[bytes, bytes] = {}
    for text in ('{"name": "look", "parameters": 5}', call, '{"name": "look"}', '{"name": "Ann"}', call):
        if name == "llama3_json" and "5" in text:
            assert not all(map(rules.try_advance, text.encode()))  # it begins as a call does
            rules.rollback(len(text) - len("5}"))
            continue
        answer, place = text.encode(), 0
        while place < len(answer):
            rules.fill_mask(row)
            assert masks.setdefault(answer[:place], row.tobytes()) == row.tobytes()
            assert rules.try_advance(answer[place])
            place += 1
            if generator.random() < 0.2:
                back = generator.randint(1, min(place, 4))
                rules.rollback(back)
                place -= back
        assert rules.is_complete() and not rules.is_free()
        assert rules.try_advance(256) and rules.is_stopped() and rules.forced(3) == []
        rules.rollback(len(answer) + 1)
        assert not rules.is_complete() and not rules.try_advance(ord("x"))
