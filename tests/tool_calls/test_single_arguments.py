"""Formats that write arguments one by one: every call that their grammars allow is read whole and valid, and what
models write beside the rules is read as it was meant."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_answers import random_answer

from edgellm import RequestError
from edgellm.structure.grammar import matches
from edgellm.text.messages import checked_tools
from edgellm.tool_calls.calls import ToolCall, checked_choice
from edgellm.tool_calls.formats import FORMATS
from edgellm.tool_calls.reader import ToolReader
from edgellm.tool_calls.rules import call_grammar

POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
#: Schemas of one argument, and texts that are values of it between tags, with the values.
KEPT: dict[str, tuple[Any, dict[str, Any]]] = {
    "text": ({"type": "string"}, {"5": "5", "null": "null", "": "", "a\nb\n": "a\nb\n", "</p> é": "</p> é"}),
    "short": ({"type": "string", "minLength": 2, "maxLength": 4}, {"ab": "ab", "1234": "1234"}),
    "long": ({"type": "string", "minLength": 9}, {"</parameter": "</parameter", "a" * 40: "a" * 40}),
    "anything": (True, {"5": 5, "red": "red", "True": True, "[1]": [1]}),
    "perhaps": ({"anyOf": [{"type": "string"}, {"type": "null"}]}, {"null": None, "None": None, "5": "5", "a": "a"}),
    "types": (
        {"type": ["string", "integer"], "maxLength": 3},
        {"5": 5, "5.5": "5.5", "abc": "abc", "-123456": -123456},
    ),
    "digits": ({"enum": ["1", "2", "true"]}, {"1": "1", "true": "true"}),
    "mixed": ({"enum": ["a", 1, 2.5, None, True, [1], {"b": "c"}]}, {"1": 1, "None": None, "true": True, "[1]": [1]}),
    "chosen": ({"anyOf": [{"enum": ["null", "red"]}, {"type": "null"}]}, {"red": "red", "null": None}),
    "alike": ({"enum": ["1", 0, None]}, {"1": "1", "0": 0, "null": None}),
    "link": ({"type": "string", "format": "uri"}, {"https://a.b/c?d=1": "https://a.b/c?d=1", "urn:a:1": "urn:a:1"}),
    "code": ({"type": ["string", "null"], "pattern": r"^[A-Z]{2}/\d[.\d]$"}, {"AB/3.": "AB/3.", "null": None}),
    "day": ({"type": "string", "format": "date", "pattern": "^2.*-0[12]-"}, {"2024-02-29": "2024-02-29"}),
    "found": ({"type": "string", "pattern": "a.b|/", "maxLength": 4}, {"xa.b": "xa.b", "/\n": "/\n"}),
    "flag": ({"type": "boolean"}, {"true": True, "True": True, "False": False}),
    "nothing": ({"type": "null"}, {"null": None, "None": None}),
    "count": ({"type": "integer", "minimum": 1, "maximum": 20}, {"7": 7}),
    "size": ({"type": "number"}, {"1.5": 1.5, "-3": -3, "1e3": 1000.0}),
    "point": ({"$ref": "#/$defs/point"}, {'{"x": 3}': {"x": 3}}),
    "named": ({"$ref": "#/$defs/a%20point~1b"}, {'{"x": 3}': {"x": 3}}),
    "where": ({"anyOf": [{"$ref": "#/$defs/point"}, {"type": "boolean"}]}, {'{"x": 3}': {"x": 3}, "true": True}),
    "list": ({"type": "array", "items": {"type": "string"}}, {'["a", "</parameter> b"]': ["a", "</parameter> b"]}),
}
#: Python words are names of arguments too.
NAMES = {name: {"perhaps": "from", "flag": "None", "list": "class"}.get(name, name) for name in KEPT}


def tool(schemas: dict[str, Any], required: bool = True) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": schemas,
        "required": list(schemas) if required else [],
        "additionalProperties": False,
        "$defs": {"point": POINT, "a point/b": POINT},
    }
    return {"name": "look", "parameters": parameters}


def called(name: str, text: str, given: dict[str, Any]) -> tuple[list[ToolCall], str, str | None]:
    choice = checked_choice(checked_tools([given]), "required")
    assert choice is not None
    reader = ToolReader(FORMATS[name], choice.schemas)
    shown = "".join(reader.push(place, each) for place, each in enumerate(text)) + reader.finish()
    return list(reader.calls), shown, reader.error


def grammar_of(name: str, given: dict[str, Any]) -> str:
    choice = checked_choice(checked_tools([given]), "required", parallel=True)
    assert choice is not None
    return call_grammar(FORMATS[name], choice, {})


@pytest.mark.parametrize("name", ["gemma4", "qwen3_coder", "lfm2", "llama4_pythonic", "pythonic"])
@pytest.mark.parametrize("seed", range(6))
def test_every_call_that_the_grammar_allows_is_read_whole_and_valid(name: str, seed: int) -> None:
    generator, calls = random.Random(seed), 0
    for _ in range(40):
        chosen = generator.sample(sorted(KEPT), 3)
        given = tool({NAMES[each]: KEPT[each][0] for each in chosen}, generator.random() < 0.5)
        text = random_answer(grammar_of(name, given), generator)
        if text is None:
            continue
        found, shown, error = called(name, text, given)
        assert (shown, error) == ("", None) and found, text
        for call in found:
            calls += 1
            assert call.complete, (text, call)
            if "Infinity" not in json.dumps(call.parsed):  # of 1e400, on which jsonschema fails
                jsonschema.validate(call.parsed, given["parameters"])
    assert calls > 20


@pytest.mark.parametrize("kept", sorted(KEPT))
def test_values_between_tags_have_the_type_that_the_schema_allows(kept: str) -> None:
    schema, texts = KEPT[kept]
    given = tool({kept: schema})
    for text, value in texts.items():
        answer = f"<tool_call>\n<function=look>\n<parameter={kept}>\n{text}\n</parameter>\n</function>\n</tool_call>"
        assert matches(grammar_of("qwen3_coder", given), answer), answer
        (call,), shown, error = called("qwen3_coder", answer, given)
        assert (call.parsed, shown, error) == ({kept: value}, "", None)
        assert type(call.parsed[kept]) is type(value)


@pytest.mark.parametrize(
    ("kept", "text"),
    [
        ("text", "a\n</parameter>\n<parameter=b>"),
        ("text", "a</parameter>b"),
        ("short", "a"),
        ("short", "abcde"),
        ("digits", "3"),
        ("flag", "yes"),
        ("count", "21"),
        ("point", '{"y": 1}'),
        ("types", "abcd"),
        ("link", "a.b/c"),
        ("code", "AB/34\u0663"),
        ("code", "AB/3x"),
        ("day", "2024-03-01"),
        ("day", "2024-02-30"),
        ("found", "a\nb"),
        ("found", "xxa.b"),
        ("mixed", "false"),
    ],
)
def test_other_values_between_tags_are_not_allowed(kept: str, text: str) -> None:
    answer = f"<tool_call>\n<function=look>\n<parameter={kept}>\n{text}\n</parameter>\n</function>\n</tool_call>"
    assert not matches(grammar_of("qwen3_coder", tool({kept: KEPT[kept][0]})), answer)


@pytest.mark.parametrize(
    ("schema", "error"),
    [
        ({"type": "string", "pattern": "^a|b$"}, "text of a form"),
        ({"type": "string", "pattern": r"^[\D]$"}, "text of a form"),
        ({"type": "string", "format": "date", "pattern": "^2|^3"}, "text of a form"),
        ({"type": "string", "allOf": [{"maxLength": 3}]}, "text of a form"),
        ({"type": "string", "format": "uuid", "maxLength": 20}, "whose text cannot be begun"),
        ({"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 3}]}, "text, or something of a form"),
        ({"anyOf": [{"type": "string"}, {"$ref": "#/$defs/point"}]}, "text, or something of a form"),
        ({"type": "string", "enum": [1]}, "which nothing can be"),
    ],
)
def test_text_that_tags_cannot_keep_is_refused_by_name(schema: Any, error: str) -> None:
    with pytest.raises(RequestError, match=f"'at'.*{error}|at.*{error}"):
        grammar_of("qwen3_coder", tool({"at": schema}))


@pytest.mark.parametrize(
    ("name", "key"),
    [("qwen3_coder", key) for key in ("", "a>b", "<x>", "a\nb", "</parameter>")] + [("lfm2", "a-b"), ("pythonic", "1")],
)
def test_names_of_arguments_that_would_be_read_as_others_are_refused(name: str, key: str) -> None:
    with pytest.raises(RequestError, match=r"the tool look has the argument .*cannot write: expected a name "):
        grammar_of(name, tool({key: {"type": "integer"}}))


@pytest.mark.parametrize("parameters", [{"type": "object"}, {"type": "object", "additionalProperties": True}])
@pytest.mark.parametrize("strict", [None, False])
def test_a_function_without_a_schema_takes_any_arguments(parameters: dict[str, Any], strict: bool | None) -> None:
    given = {"name": "look", "parameters": parameters, "strict": strict}
    some = {
        "qwen3_coder": "<parameter=at>\ncup\n</parameter>\n<parameter=n>\n3\n</parameter>\n",
        "lfm2": 'at="cup", n=3',
    }
    for name, arguments in some.items():
        for written, value in ((arguments, {"at": "cup", "n": 3}), ("", {})):
            text = {
                "qwen3_coder": f"<tool_call>\n<function=look>\n{written}</function>\n</tool_call>",
                "lfm2": f"<|tool_call_start|>[look({written})]<|tool_call_end|>",
            }[name]
            assert matches(grammar_of(name, given), text)
            (call,), shown, error = called(name, text, given)
            assert (call.parsed, shown, error) == (value, "", None)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(at=VALUES, count=VALUES)
def test_values_are_read_as_python_and_json_write_them(at: Any, count: Any) -> None:
    given = {"name": "look", "strict": False}
    for write in (repr, json.dumps, lambda value: json.dumps(value, ensure_ascii=False)):
        text = f"<|tool_call_start|>[look(at={write(at)}, count={write(count)})]<|tool_call_end|>"
        (call,), shown, error = called("lfm2", text, given)
        assert (shown, error, call.parsed) == ("", None, {"at": at, "count": count})
    for value in (at, count):
        text = f"<tool_call><function=look><parameter=at>\n{json.dumps(value)}\n</parameter></function></tool_call>"
        (call,), shown, error = called("qwen3_coder", text, {"name": "look", "strict": False})
        assert (shown, error, call.parsed) == ("", None, {"at": value})


@pytest.mark.parametrize(
    ("written", "parsed"),
    [
        ("at='it's here', n=-3", {"at": "it's here", "n": -3}),
        ("at='say \"]\" or (', n=(1, 2)", {"at": 'say "]" or (', "n": [1, 2]}),
        ("at='two\nlines'", {"at": "two\nlines"}),
        ("at='''two 'quoted'\nlines''' , n=''", {"at": "two 'quoted'\nlines", "n": ""}),
        (r"at='C:\users\new', n='\d+\.'", {"at": "C:\\users\new", "n": "\\d+\\."}),
        (r'at="\ud83d\ude00\u00e9\x41\101\/"', {"at": "\U0001f600\u00e9AA/"}),
        (
            "from='a', class=True, None=null, in=[None, false]",
            {"from": "a", "class": True, "None": None, "in": [None, False]},
        ),
        ("at={'a': [True, 'b'], \"c\": 1.5,},", {"at": {"a": [True, "b"], "c": 1.5}}),
        (" at = 'a' ,\n n = 1 ", {"at": "a", "n": 1}),
        ("at=',)]', n='=('", {"at": ",)]", "n": "=("}),
        ("", {}),
    ],
)
def test_arguments_in_python_as_models_write_them(written: str, parsed: dict[str, Any]) -> None:
    for name, text in (
        ("lfm2", f"<|tool_call_start|> [look({written})]<|tool_call_end|>"),
        ("pythonic", f"[look({written})]"),
    ):
        (call,), shown, error = called(name, text, {"name": "look", "strict": False})
        assert (shown, error, call.parsed) == ("", None, parsed)


@pytest.mark.parametrize(
    "written", ["'a'", "at", "at=", "at=a b", "at=f'a'", "at=b'a'", "=1", "**{}", "at=1 n=2", "at=]", "at=1e999+1"]
)
def test_arguments_that_are_no_python_break_the_call(written: str) -> None:
    (call,), _, error = called(
        "lfm2", f"<|tool_call_start|>[look(n=1, {written})]<|tool_call_end|>", {"name": "look", "strict": False}
    )
    assert call.arguments == '{"n": 1' and not call.complete and error is not None


def test_each_argument_is_shown_when_it_is_whole() -> None:
    reader = ToolReader(FORMATS["lfm2"], {"look": {}})
    text, found = "<|tool_call_start|>[look(at='cup', n=[1, 2], ", []
    for place, character in enumerate(text):
        reader.push(place, character)
        found += [delta.arguments for delta in reader.take_deltas()]
    assert found == ["", '{"at": "cup"', ', "n": [1, 2]']


def test_objects_in_the_list_of_a_model_that_was_told_to_write_json() -> None:
    text = '<|tool_call_start|>[{"name": "look", "arguments": {"at": "cup"}}, look(n=2)]<|tool_call_end|>'
    calls, shown, error = called("lfm2", text, {"name": "look", "strict": False})
    assert ([call.parsed for call in calls], shown, error) == ([{"at": "cup"}, {"n": 2}], "", None)


@pytest.mark.parametrize(
    ("value", "parsed"),
    [
        ("a </parameter> b", "a </parameter> b"),
        ("</parameter>\nand", "</parameter>\nand"),
        ("['a', True]", ["a", True]),
        ("{'a': None}", {"a": None}),
        (r"['\d']", r"['\d']"),
        ("[a]", "[a]"),
        ("NaN", "NaN"),
        ("1e999", "1e999"),
        ("[" * 9000, "[" * 9000),
    ],
)
def test_values_between_tags_as_models_write_them(value: str, parsed: Any) -> None:
    text = f"<tool_call>\n<function=look>\n<parameter=at>\n{value}\n</parameter>\n</function>\n</tool_call>"
    given = {"name": "look", "strict": False} if parsed != "1e999" else tool({"at": {"type": ["string", "null"]}})
    (call,), shown, error = called("qwen3_coder", text, given)
    assert (shown, error, call.parsed) == ("", None, {"at": parsed})


@pytest.mark.parametrize(
    "end", ["<parameter=at>\ncup\n</parameter>\n</tool_call>", "<parameter=at>\ncup\n</function>\n", "<param"]
)
def test_tags_that_are_missing_break_the_call(end: str) -> None:
    (call,), _, error = called("qwen3_coder", f"<tool_call>\n<function=look>\n{end}", {"name": "look", "strict": False})
    assert not call.complete and error is not None and call.arguments in ("", '{"at": "cup"')


@pytest.mark.parametrize("name", ["lfm2", "qwen3_coder"])
def test_an_argument_of_several_types_has_a_grammar(name: str) -> None:
    assert "args_0" in grammar_of(name, tool({"a": {"type": ["boolean", "null"]}}, True))
