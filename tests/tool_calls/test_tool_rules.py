"""Grammars of calls: what they allow in each format, and where they begin, drafted trees included."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from byte_level_tokenizer import byte_level
from processor_time import within_seconds

from edgellm import RequestError
from edgellm.engines.speculation.constraints import TokenConstraint, allows, fill_tree_masks, mask_words
from edgellm.opened_model import SHIPPED_MODEL
from edgellm.structure.grammar import GrammarVocabulary, byte_vocabulary, matches
from edgellm.structure.reasoning import AfterReasoning
from edgellm.text.messages import checked_tools
from edgellm.text.tokenizer import Tokenizer
from edgellm.tool_calls.calls import ToolChoice, checked_choice
from edgellm.tool_calls.formats import FORMATS
from edgellm.tool_calls.reader import ToolReader
from edgellm.tool_calls.rules import FromCall, call_constraint, call_grammar
from edgellm.tool_calls.values import all_kinds

LOOK = {
    "name": "look",
    "parameters": {
        "type": "object",
        "properties": {
            "at": {"type": "string"},
            "times": {"type": "integer", "minimum": 1, "maximum": 9},
            "fast": {"type": "boolean"},
            "how": {"enum": ["near", "far"]},
        },
        "required": ["at"],
        "additionalProperties": False,
    },
}
TOOLS = checked_tools([LOOK, {"name": "stop"}])
CALLS = {
    "hermes": '<tool_call>\n{"name": "look", "arguments": {"at": "cup", "times": 3}}\n</tool_call>\n<tool_call>\n'
    '{"name": "stop", "arguments": {}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=look>\n<parameter=at>\ncup <b>\n</parameter>\n<parameter=times>\n3\n"
    "</parameter>\n<parameter=how>\nfar\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=stop>\n</function>\n</tool_call>",
    "mistral": '[TOOL_CALLS][{"name": "look", "arguments": {"at": "cup"}}, {"name": "stop", "arguments": {}}]',
    "nemotron": '<TOOLCALL>[{"name": "look", "arguments": {"at": "cup"}}, {"name": "stop", '
    '"arguments": {}}]</TOOLCALL>',
    "mistral_args": '[TOOL_CALLS]look[ARGS]{"at": "cup", "how": "near"}[TOOL_CALLS]stop[ARGS]{}',
    "gemma4": '<|tool_call>call:look{at:<|"|>cup<|"|>,fast:true,how:<|"|>far<|"|>,times:3}<tool_call|>'
    "<|tool_call>call:stop{}<tool_call|>",
    "lfm2": '<|tool_call_start|>[look(at="cup", fast=True), stop()]<|tool_call_end|>',
    "llama4_pythonic": '[look(at="cup", fast=False, how="near"), stop()]',
    "pythonic": '[look(at="cup", how="far"), stop()]',
    "llama3_json": '{"name": "look", "parameters": {"at": "cup", "times": 3}}; {"name": "stop", "parameters": {}}',
}
WRONG = {
    "times=3": "times=0",
    "times:3": "times:0",
    '"times": 3': '"times": 30',
    "look": "jump",
    "far": "fat",
    "near": "ne",
    "cup": "c\x07",
}


def choice(mode: Any, parallel: bool = True, tools: Any = TOOLS) -> ToolChoice:
    found = checked_choice(tools, mode, parallel)
    assert found is not None
    return found


def taken(constraint: TokenConstraint, tokens: Any, size: int = byte_vocabulary().size) -> int:
    """How many tokens are allowed one after the other; each one's mask says the same as taking it does."""
    row = np.empty(mask_words(size), np.uint32)
    for count, token in enumerate(tokens):
        constraint.fill_mask(row)
        advanced = constraint.try_advance(token)
        assert advanced == allows(row, token)
        if not advanced:
            return count
    return len(tokens)


VOCABULARY = byte_vocabulary()


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_required_calls_are_those_of_the_format(name: str) -> None:
    text = CALLS[name].encode()
    rules = call_constraint(FORMATS[name], choice("required"), VOCABULARY, {})
    assert not rules.is_complete() and taken(rules, text) == len(text) and rules.is_complete()
    reader = ToolReader(FORMATS[name], choice("required").schemas)
    assert reader.push(0, CALLS[name]) + reader.finish() == ""
    assert [(call.name, call.complete) for call in reader.calls] == [("look", True), ("stop", True)]
    for right, wrong in WRONG.items():
        if right in CALLS[name] and not (right == "cup" and name in ("gemma4", "qwen3_coder")):
            broken = CALLS[name].replace(right, wrong).encode()
            rules = call_constraint(FORMATS[name], choice("required"), VOCABULARY, {})
            assert taken(rules, broken) < len(broken) or not rules.is_complete()


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_one_call_where_there_may_be_no_more_and_the_one_that_is_named(name: str) -> None:
    whole = CALLS[name].encode()
    rules = call_constraint(FORMATS[name], choice("required", parallel=False), VOCABULARY, {})
    assert 0 < taken(rules, whole) < len(whole)
    stop = choice("stop")
    assert (stop.mode, tuple(stop.schemas), stop.parallel) == ("required", ("stop",), False)
    assert taken(call_constraint(FORMATS[name], stop, VOCABULARY, {}), whole) < whole.index(b"look") + 4


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_auto_is_free_until_a_call_begins_and_takes_back_what_was_read(name: str) -> None:
    before = b"" if FORMATS[name].bare else b"a <tool <"
    whole = before + CALLS[name].encode()
    rules = call_constraint(FORMATS[name], choice("auto"), VOCABULARY, {})
    assert isinstance(rules, FromCall) and rules.is_complete() and not rules.is_stopped()
    assert rules.forced(4) == []
    free = 0
    while rules.is_free():
        assert rules.try_advance(whole[free])
        free += 1
    assert taken(rules, whole[free:]) == len(whole) - free and rules.is_complete()
    rules.rollback(len(whole) - free + 1)
    assert rules.is_free() and rules.is_complete()
    assert not rules.try_advance(VOCABULARY.size) and not rules.try_advance(-1)
    assert all(map(rules.try_advance, whole[free - 1 :])) and not rules.is_free()
    rules.rollback(len(whole))
    assert taken(rules, b"anything at all [ { <") == 21 and rules.is_free()


@pytest.mark.parametrize("is_special", [True, False])
def test_a_call_whose_mark_is_missing_is_kept_to_the_rules_too(is_special: bool) -> None:
    special = {"<tool_call>": 256} if is_special else {}
    call = b"<function=look>\n<parameter=at>\ncup\n</parameter>\n</function>\n</tool_call>"
    rules = call_constraint(FORMATS["qwen3_coder"], choice("auto"), VOCABULARY, special)
    text = b"a <function=jump> is none: " + b"x" * 300 + call
    assert taken(rules, text) == len(text) and not rules.is_free() and rules.is_complete()
    rules.rollback(len(call))
    assert rules.is_free() and taken(rules, call[: call.index(b"at>")] + b"on>") == call.index(b"at>")
    required = call_constraint(FORMATS["qwen3_coder"], choice("required"), VOCABULARY, special)
    assert taken(required, call) < len("<function=")


@pytest.mark.parametrize("name", ["llama3_json", "pythonic"])
@pytest.mark.parametrize(
    "text", [b'{"name": "Ann", "parameters": {}}', b'I say {"name": "look", "parameters": ', b"[1, 2]"]
)
def test_what_only_looks_like_a_call_stays_free(name: str, text: bytes) -> None:
    rules = call_constraint(FORMATS[name], choice("auto"), VOCABULARY, {})
    assert taken(rules, text) == len(text) and rules.is_free()


def vocabulary_of(tokenizer: Tokenizer, eos: int) -> GrammarVocabulary:
    return GrammarVocabulary.of_tokenizer(tokenizer, tokenizer.vocab_size, (eos,))


def test_a_mark_may_be_spelled_by_tokens_that_go_on_behind_it() -> None:
    tokenizer = Tokenizer.from_directory(SHIPPED_MODEL)
    vocabulary = vocabulary_of(tokenizer, tokenizer.eos_token_ids[0])
    ids = tokenizer.encode("I look.\n" + CALLS["hermes"], add_special_tokens=False)
    rules = call_constraint(FORMATS["hermes"], choice("auto"), vocabulary, {})
    assert all(map(rules.try_advance, ids)) and not rules.is_free() and rules.is_complete()
    assert not rules.try_advance(ids[0]) and rules.try_advance(tokenizer.eos_token_ids[0])
    wrong = tokenizer.encode('<tool_call>\n{"name": "jump"', add_special_tokens=False)
    rules = call_constraint(FORMATS["hermes"], choice("auto"), vocabulary, {})
    assert not all(map(rules.try_advance, wrong))


@pytest.mark.parametrize("is_special", [True, False])
@pytest.mark.parametrize("name", ["mistral", "nemotron", "mistral_args", "gemma4", "lfm2", "hermes", "qwen3_coder"])
def test_marks_that_are_tokens(name: str, is_special: bool) -> None:
    """Special ones, and those that are not, as published with Qwen's models."""
    library, tool_format = byte_level(), FORMATS[name]
    (library.add_special_tokens if is_special else library.add_tokens)(list(tool_format.marks))
    tokenizer = Tokenizer(library)
    special = {mark: library.token_to_id(mark) for mark in tool_format.marks}
    vocabulary = vocabulary_of(tokenizer, library.token_to_id("<|im_end|>"))
    ids = tokenizer.encode(CALLS[name], add_special_tokens=False)
    assert ids[0] == special[tool_format.begin]
    for mode in ("required", "auto"):
        rules = call_constraint(tool_format, choice(mode), vocabulary, special)
        assert all(map(rules.try_advance, ids)) and not rules.is_free() and rules.is_complete()
    detokenizer = tokenizer.detokenizer(shown_ids=special.values())
    assert "".join(map(detokenizer.push, ids)) == CALLS[name]
    begun = call_constraint(tool_format, choice("required"), vocabulary, special)
    assert taken(begun, ids[:1], vocabulary.size) == 1  # its mask and what it takes are the same
    if is_special:
        plain = tokenizer.encode("[TOOL_", add_special_tokens=False)
        assert taken_all(call_constraint(tool_format, choice("required"), vocabulary, special), plain) == 0


def taken_all(constraint: TokenConstraint, tokens: list[int]) -> int:
    return sum(1 for token in tokens if constraint.try_advance(token))


def test_masks_of_a_tree_that_goes_into_a_call() -> None:
    rules = call_constraint(FORMATS["hermes"], choice("auto"), VOCABULARY, {})
    for byte in b"so <tool_call":
        assert rules.try_advance(byte)
    tokens = list(b"\0>\n{x" + b">!") + [ord("b")]
    parents = [-1, 0, 1, 2, 2, 0, 5, 0]
    masks = np.zeros((len(tokens), mask_words(VOCABULARY.size)), np.uint32)
    rows = fill_tree_masks(rules, tokens, parents, masks)
    assert rows[0] == -1 and rows[7] == -1  # free before the mark, and beside it
    assert [row >= 0 for row in rows] == [False, True, True, True, False, True, False, False]
    assert allows(masks[rows[1]], ord("\n")) and not allows(masks[rows[1]], ord("!"))
    assert allows(masks[rows[3]], ord('"')) and not allows(masks[rows[3]], ord("x"))
    assert rules.is_free()


def test_a_model_thinks_before_it_is_held_to_anything() -> None:
    thinking = AfterReasoning(call_constraint(FORMATS["hermes"], choice("auto"), VOCABULARY, {}), [7], VOCABULARY.size)
    text = b"<tool_call>what?\7 and so <tool_call>"
    assert all(map(thinking.try_advance, text)) and not thinking.is_free()
    assert not thinking.try_advance(ord("w")) and thinking.try_advance(ord("\n"))
    thinking.rollback(2)
    assert thinking.is_free() and thinking.answer_start == 17
    undecided = AfterReasoning(call_constraint(FORMATS["hermes"], choice("auto"), VOCABULARY, {}), [7], 257, begin=6)
    row = np.empty(mask_words(257), np.uint32)
    undecided.fill_mask(row)
    assert allows(row, 6) and allows(row, 65) and undecided.answer_start == 0


def test_what_a_format_of_single_arguments_cannot_keep_is_refused_by_name() -> None:
    for parameters, found in (
        ({"type": "object", "additionalProperties": {"type": "string"}}, "leaves arguments open"),
        ({"type": "object", "properties": {}, "required": ["at"]}, "requires 'at'"),
        ({"type": "object", "properties": {"a": {}}, "anyOf": [{}]}, "has anyOf beside properties"),
    ):
        wanted = choice("required", tools=checked_tools([{"name": "look", "parameters": parameters}]))
        for name in ("pythonic", "qwen3_coder"):
            with pytest.raises(RequestError, match=found):
                call_constraint(FORMATS[name], wanted, VOCABULARY, {})
    texts = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^a|b$"}}}
    wanted = choice("required", tools=checked_tools([{"name": "look", "parameters": texts}]))
    with pytest.raises(RequestError, match="argument 'a' with text of a form"):
        call_constraint(FORMATS["qwen3_coder"], wanted, VOCABULARY, {})
    assert call_constraint(FORMATS["pythonic"], wanted, VOCABULARY, {}).try_advance(ord("["))
    odd = {"type": "object", "properties": {"a b": {"type": "string"}}}
    wanted = choice("required", tools=checked_tools([{"name": "look", "parameters": odd}]))
    with pytest.raises(RequestError, match="argument 'a b'"):
        call_constraint(FORMATS["lfm2"], wanted, VOCABULARY, {})


@pytest.mark.parametrize("name", ["pythonic", "qwen3_coder", "lfm2"])
@pytest.mark.parametrize("more", [{}, {"required": []}, {"additionalProperties": False}])
def test_a_tool_without_arguments_is_called_without_any(name: str, more: dict[str, Any]) -> None:
    tools = checked_tools([{"name": "stop", "parameters": {"type": "object", "properties": {}, **more}}])
    wanted = choice("required", tools=tools)
    grammar = call_grammar(FORMATS[name], wanted, {})
    assert matches(grammar, FORMATS[name].written([("stop", {})]))
    assert not matches(grammar, FORMATS[name].written([("stop", {"at": "cup"})]))


def test_definitions_are_found_from_each_argument() -> None:
    point = {
        "type": "object",
        "properties": {"x": {"type": "integer"}},
        "required": ["x"],
        "additionalProperties": False,
    }
    parameters = {
        "type": "object",
        "properties": {"to": {"$ref": "#/$defs/point"}},
        "required": ["to"],
        "additionalProperties": False,
        "$defs": {"point": point},
    }
    wanted = choice("required", tools=checked_tools([{"name": "go", "parameters": parameters}]))
    value = json.dumps({"x": 3})
    for name, text in (
        ("hermes", f'<tool_call>\n{{"name": "go", "arguments": {{"to": {value}}}}}\n</tool_call>'),
        ("pythonic", f"[go(to={value})]"),
    ):
        rules = call_constraint(FORMATS[name], wanted, VOCABULARY, {})
        assert taken(rules, text.encode()) == len(text) and rules.is_complete()


def test_schemas_that_lead_back_to_themselves_are_looked_at_once() -> None:
    recursive = {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}, {"type": "null"}]}
    parameters = {
        "type": "object",
        "properties": {"to": {"$ref": "#/$defs/a"}},
        "required": ["to"],
        "additionalProperties": False,
        "$defs": {"a": recursive, "b": {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}, {"type": "integer"}]}},
    }
    wanted = choice("required", tools=checked_tools([{"name": "go", "parameters": parameters}]))
    with within_seconds(1):
        assert all_kinds([recursive], parameters)[0] >= {"null", "integer"}
        rules = call_constraint(FORMATS["qwen3_coder"], wanted, VOCABULARY, {})
    text = "<tool_call>\n<function=go>\n<parameter=to>\n7\n</parameter>\n</function>\n</tool_call>"
    assert taken(rules, text.encode()) == len(text) and rules.is_complete()


def test_tools_are_bounded_together() -> None:
    many = {f"v{n}": {"type": "object", "properties": {"k": {"$ref": "#/$defs/d"}}} for n in range(399)}
    parameters = {"type": "object", "properties": many, "$defs": {"d": {"enum": [f"{n:08}" for n in range(4000)]}}}
    wanted = choice("required", tools=checked_tools([{"name": "go", "parameters": parameters}]))
    with within_seconds(2), pytest.raises(RequestError, match="the grammar of the tools takes too much"):
        call_constraint(FORMATS["pythonic"], wanted, VOCABULARY, {})
    kinds = [
        {"type": "object", "required": ["k"], "properties": {"k": {"type": "object", "required": ["k"]}}}
        for _ in range(320)
    ]
    for number, each in enumerate(kinds):
        each["properties"]["k"]["properties"] = {"k": {"const": number}}
    tools = [{"name": f"go{n}", "parameters": {"properties": {f"v{n}": {"oneOf": kinds}}}} for n in range(2)]
    assert checked_choice(checked_tools(tools[:1]), "auto") is not None
    with (
        within_seconds(4),
        pytest.raises(RequestError, match=r"tools\[.\].function.parameters: what the tools' parameters"),
    ):
        checked_choice(checked_tools(tools), "auto")
