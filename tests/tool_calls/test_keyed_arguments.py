"""Calls as Gemma 4 writes them: names without quotes, text between marks, and values within others."""

from __future__ import annotations

from typing import Any

import pytest
from byte_level_tokenizer import byte_level
from call_templates import WRITTEN, call_template

from edgellm import RequestError
from edgellm.structure.grammar import GrammarVocabulary, matches
from edgellm.text.messages import checked_messages, checked_tools
from edgellm.text.template import ChatTemplate
from edgellm.text.tokenizer import Tokenizer
from edgellm.tool_calls.calls import ToolCall, ToolChoice, checked_choice
from edgellm.tool_calls.formats import FORMATS
from edgellm.tool_calls.reader import ToolReader
from edgellm.tool_calls.rules import call_constraint, call_grammar

GEMMA_4 = FORMATS["gemma4"]
#: What transformers 5.23 makes of calls with the chat template that was published with Gemma 4.
RENDERED: list[tuple[dict[str, Any], str]] = [
    (
        {
            "at": 'it\'s\na "cup", {x:1}',
            "n": -3,
            "Z": 1.5,
            "more": {"b": [True, False], "a": {"k": "v", "J": []}},
            "on": True,
        },
        '<|tool_call>call:look{at:<|"|>it\'s\na "cup", {x:1}<|"|>,more:{a:{J:[],k:<|"|>v<|"|>},b:[true,false]},n:-3,'
        "on:true,Z:1.5}<tool_call|>",
    ),
    ({}, "<|tool_call>call:look{}<tool_call|>"),
    ({"at": None, "l": [None, 1]}, "<|tool_call>call:look{at:None,l:[None,1]}<tool_call|>"),
]
RECURSIVE = {"type": "object", "properties": {"left": {"$ref": "#/$defs/tree"}, "n": {"type": "integer"}}}
#: Schemas of an argument; what of its values may be written, with the values; and what may not.
KEPT: dict[str, tuple[Any, dict[str, Any], list[str]]] = {
    "text": (
        {"type": "string"},
        {'<|"|><|"|>': "", '<|"|>a, "b"}\n<|<|"|>': 'a, "b"}\n<|'},
        ["a", '"a"', '<|"|>a', '<|"|>a<|"|>b<|"|>'],
    ),
    "code": (
        {"type": "string", "pattern": "^[a-z]/$", "maxLength": 2},
        {'<|"|>a/<|"|>': "a/"},
        ['<|"|>a<|"|>', '<|"|>1/<|"|>'],
    ),
    "of few": (
        {"enum": ["a", 1, None, {"b c": ["d"]}]},
        {'<|"|>a<|"|>': "a", "1": 1, "null": None, '{<|"|>b c<|"|>:[<|"|>d<|"|>]}': {"b c": ["d"]}},
        ["2", '<|"|>1<|"|>'],
    ),
    "perhaps": ({"type": ["string", "null"]}, {"null": None, '<|"|>null<|"|>': "null"}, ["None", "0"]),
    "many": (
        {"type": "array", "items": {"type": "integer", "maximum": 9}, "minItems": 2, "maxItems": 3},
        {"[1,2]": [1, 2], "[1,2,3]": [1, 2, 3]},
        ["[]", "[1]", "[1,2,3,4]", "[1,10]", "[1, 2]", "[1,2,]"],
    ),
    "some": ({"type": "array", "maxItems": 1}, {"[]": [], '[{a:<|"|>b<|"|>}]': [{"a": "b"}]}, ["[1,2]"]),
    "none": ({"type": "array", "maxItems": 0}, {"[]": []}, ["[1]"]),
    "within": (
        {"type": "object", "properties": {"b": {}, "A": {"type": "boolean"}}, "required": ["b"]},
        {"{A:true,b:1.5}": {"A": True, "b": 1.5}, "{b:[{}]}": {"b": [{}]}},
        ["{}", "{b:1,A:true}", "{A:1,b:1}", "{b:1,c:1}"],
    ),
    "map": (
        {"type": "object", "additionalProperties": {"type": "number"}},
        {"{}": {}, "{a:1,c_d:-2e3}": {"a": 1, "c_d": -2000.0}},
        ["{a:true}", "{a:1,}"],
    ),
    "tree": ({"$ref": "#/$defs/tree"}, {"{left:{left:{},n:2}}": {"left": {"left": {}, "n": 2}}}, ["{right:{}}"]),
    "one": ({"allOf": [{"$ref": "#/$defs/tree"}]}, {"{n:2}": {"n": 2}}, ["{n:a}"]),
    "whole": ({"$ref": "#"}, {"{whole:{}}": {"whole": {}}}, ["[]"]),
}


def choice_of(schema: Any, name: str = "at") -> ToolChoice:
    parameters = {"type": "object", "properties": {name: schema}, "$defs": {"tree": RECURSIVE}}
    found = checked_choice(checked_tools([{"name": "look", "parameters": parameters}]), "required", False)
    assert found is not None
    return found


def written(value: str, name: str = "at") -> str:
    return f"<|tool_call>call:look{{{name}:{value}}}<tool_call|>"


def called(choice: ToolChoice, text: str) -> tuple[ToolCall, str | None]:
    """The one call of a text, its pieces a character each, and the error."""
    reader = ToolReader(GEMMA_4, choice.schemas)
    assert "".join(reader.push(place, each) for place, each in enumerate(text)) + reader.finish() == ""
    (call,) = reader.calls
    return call, reader.error


@pytest.mark.parametrize(("arguments", "text"), RENDERED)
def test_calls_that_the_published_template_writes_are_read(arguments: dict[str, Any], text: str) -> None:
    call, error = called(choice_of(True), text)
    assert (call.parsed, error) == (arguments, None)
    assert GEMMA_4.written([("look", arguments)]) == text.replace("None", "null")
    template = ChatTemplate({"default": call_template(WRITTEN["gemma4"])}, "it")
    message = {"role": "assistant", "tool_calls": [call.as_message()]}
    messages = template.fitted(checked_messages([{"role": "user", "content": "hi"}, message]))
    assert text.replace("None", "null") in template.render({"messages": messages})


@pytest.mark.parametrize("is_special", [True, False])
@pytest.mark.parametrize("kept", sorted(KEPT))
def test_values_have_the_form_that_the_schema_says(kept: str, is_special: bool) -> None:
    schema, right, wrong = KEPT[kept]
    library, name = byte_level(), kept if kept == "of few" else kept.title()
    shown = f'<|"|>{name}<|"|>' if kept == "of few" else name
    schema = schema if kept != "whole" else {"type": "object", "properties": {"whole": schema}}
    choice = choice_of(schema, name)
    (library.add_special_tokens if is_special else library.add_tokens)(list(GEMMA_4.marks))
    tokenizer = Tokenizer(library)
    ids = {mark: library.token_to_id(mark) for mark in GEMMA_4.marks}
    vocabulary = GrammarVocabulary.of_tokenizer(tokenizer, tokenizer.vocab_size, (library.token_to_id("<|im_end|>"),))
    for value in (*right, *wrong):
        text = written(value, shown)
        rules = call_constraint(GEMMA_4, choice, vocabulary, ids)
        taken = all(map(rules.try_advance, tokenizer.encode(text, add_special_tokens=False)))
        assert (taken and rules.is_complete()) == (value in right), text
    for value, parsed in right.items():
        assert called(choice, written(value, shown))[0].parsed == {name: parsed}


def test_arguments_come_in_the_order_in_which_the_template_writes_them() -> None:
    properties = {name: {"type": "integer"} for name in ("b", "C", "a")}
    choice = checked_choice([{"function": {"name": "look", "parameters": {"properties": properties}}}], "required")
    assert choice is not None
    grammar = call_grammar(GEMMA_4, choice, {})
    assert matches(grammar, "<|tool_call>call:look{a:1,b:2,C:3}<tool_call|>")
    assert not matches(grammar, "<|tool_call>call:look{b:1,a:2}<tool_call|>")


@pytest.mark.parametrize(
    ("schema", "error"),
    [
        ({"type": "string", "pattern": "^a|b$"}, "has the argument 'at' with a value of a form"),
        ({"type": "array", "prefixItems": [{}]}, "has the argument 'at' with a value of a form"),
        ({"type": "string", "minLength": 3, "pattern": "^a$"}, "'at', whose text cannot be begun"),
        ({"type": "object", "properties": {"a": {}}, "minProperties": 1}, "has allOf beside properties"),
        ({"type": "object", "required": ["a"]}, "requires 'a'"),
        ({"enum": ['<|"|>']}, "ends a text in this model's calls"),
        ({"anyOf": [False]}, "'at' which nothing can be"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(schema: Any, error: str) -> None:
    with pytest.raises(RequestError, match=error):
        call_grammar(GEMMA_4, choice_of(schema), {})


@pytest.mark.parametrize(
    ("value", "parsed"),
    [
        ("cup", "cup"),
        (" 12:30 ", "12:30"),
        ("5", "5"),
        ('[ True , <|"|>a<|"|>, red ]', [True, "a", "red"]),
        ('{<|"|>a:b <|"|>:1 , c : {}}', {"a:b ": 1, "c": {}}),
    ],
)
def test_values_beside_the_rules_are_read_as_they_were_meant(value: str, parsed: Any) -> None:
    schema = {"type": "string"} if isinstance(parsed, str) else {}
    assert called(choice_of(schema), written(value, " at"))[0].parsed == {"at": parsed}


@pytest.mark.parametrize(
    "value",
    ["", "[1,]", "[1}", "{a}", "{a:}", "{1:2", '<|"|>a', 'b<|"|>a<|"|>', "<a>", "[" * 9000 + "]" * 9000, "1,n:2,n:3"],
)
def test_values_that_are_none_break_the_call(value: str) -> None:
    reader = ToolReader(GEMMA_4, choice_of({}).schemas)
    reader.push(0, written(value).removesuffix("<tool_call|>"))
    reader.finish()
    (call,) = reader.calls
    assert not call.complete and reader.error is not None


@pytest.mark.parametrize("text", ["look{}", "call:jump{}", "call:look(at=1)", "call look{}", 'call:{"name": 1}'])
def test_what_is_no_call_of_a_tool_stays_text(text: str) -> None:
    reader, whole = ToolReader(GEMMA_4, choice_of({}).schemas), f"so: <|tool_call>{text}<tool_call|>"
    assert reader.push(0, whole) + reader.finish() == whole and reader.error is not None and not reader.calls
