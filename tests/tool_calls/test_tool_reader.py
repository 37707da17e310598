"""Calls read from text in each format: whole, broken, cut, and in pieces of every size."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm import ToolCall
from edgellm.structure.reasoning import ReasoningMarks, ReasoningState
from edgellm.tool_calls.calls import ToolCallDelta, joined_deltas
from edgellm.tool_calls.formats import FORMATS
from edgellm.tool_calls.reader import ToolReader

LOOK = {
    "type": "object",
    "properties": {"at": {"type": "string"}, "times": {"type": "integer"}, "fast": {"type": "boolean"}},
}
SCHEMAS: dict[str, Any] = {"look": LOOK, "stop": {"type": "object", "properties": {}}, "free": {"type": "object"}}
TWO_CALLS = [("look", {"at": 'a "cup"\n', "times": 3, "fast": True}), ("stop", {})]
ARGUMENTS = json.dumps(TWO_CALLS[0][1])
CALLS = {
    "hermes": f'<tool_call>\n{{"name": "look", "arguments": {ARGUMENTS}}}\n</tool_call>\n<tool_call>\n'
    '{"arguments": {}, "name": "stop"}\n</tool_call>',
    "qwen3_coder": '<tool_call>\n<function=look>\n<parameter=at>\na "cup"\n\n</parameter>\n<parameter=times>\n3\n'
    "</parameter>\n<parameter=fast>\nTrue\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=stop>\n</function>\n</tool_call>",
    "mistral": f'[TOOL_CALLS][{{"name": "look", "arguments": {ARGUMENTS}}}, {{"name": "stop", "arguments": {{}}, '
    '"id": "abc"}]',
    "nemotron": f'<TOOLCALL>[{{"name": "look", "arguments": {ARGUMENTS}}}, {{"name": "stop", '
    '"arguments": {}}]</TOOLCALL>',
    "mistral_args": f"[TOOL_CALLS]look[CALL_ID]abc123XYZ[ARGS]{ARGUMENTS}[TOOL_CALLS]stop{{}}",
    "gemma4": '<|tool_call>call:look{at:<|"|>a "cup"\n<|"|>,fast:true,times:3}<tool_call|>'
    "<|tool_call>call:stop{}<tool_call|>",
    "lfm2": "<|tool_call_start|>[look(at='a \"cup\"\\n', times=3, fast=True), stop()]<|tool_call_end|>",
    "llama4_pythonic": '<|python_start|>[look(at="a \\"cup\\"\\n", times=3, fast=true), stop()]<|python_end|>',
    "pythonic": '[look(at="a \\"cup\\"\\n", times=3, fast=True), stop()]',
    "llama3_json": f'{{"name": "look", "parameters": {ARGUMENTS}}}; {{"name": "stop", "parameters": {{}}}}',
}
BARE = [name for name, each in FORMATS.items() if each.bare]
MARKED = [name for name, each in FORMATS.items() if each.begin]
ALL = sorted(FORMATS)


class Reading:
    """What a reader made of pieces."""

    def __init__(self, name: str, pieces: list[str], **more: Any) -> None:
        reader, self.deltas = ToolReader(FORMATS[name], SCHEMAS, **more), list[ToolCallDelta]()
        self.shown: list[str] = []
        for token, piece in enumerate(pieces):
            self.shown.append(reader.push(token, piece))
            self.deltas += reader.take_deltas()
        self.shown.append(reader.finish())
        self.deltas += reader.take_deltas()
        self.text, self.calls, self.error = "".join(self.shown), reader.calls, reader.error
        joined = joined_deltas(self.deltas)
        assert [(each.id, each.name, each.arguments) for each in joined] == [
            (call.id, call.name, call.arguments) for call in self.calls
        ]
        assert all((each.id is None) == (each.name is None) for each in self.deltas)

    @property
    def outcome(self) -> tuple[Any, ...]:
        return self.text, [(call.name, call.arguments, call.complete) for call in self.calls], self.error


def read(name: str, text: str, **more: Any) -> Reading:
    """A text read in one piece, when all ways to cut it in two, and into characters, have given the same."""
    whole = Reading(name, [text], **more)
    assert Reading(name, list(text), **more).outcome == whole.outcome
    for cut in range(1, len(text)):
        assert Reading(name, [text[:cut], text[cut:]], **more).outcome == whole.outcome
    return whole


@pytest.mark.parametrize("name", ALL)
def test_two_calls_in_each_format(name: str) -> None:
    found = read(name, CALLS[name])
    assert (found.text, found.error) == ("", None)
    assert [(call.name, call.parsed) for call in found.calls] == TWO_CALLS
    assert all(call.complete and len(call.id) == 9 and call.id.isalnum() for call in found.calls)


@pytest.mark.parametrize("name", MARKED)
def test_text_before_a_call_stays_text_without_the_space_between(name: str) -> None:
    if name in BARE:
        pytest.skip("its calls begin an answer")
    found = read(name, f"I look < there.\n\n{CALLS[name]}\n")
    assert found.text == "I look < there."
    assert [(call.name, call.parsed) for call in found.calls] == TWO_CALLS


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    "text", ["", " ", "Hello, world!\n", "a < b <tool", "[1] {x} [TOOL", '{"a": 1}', "[look at this]", "<|python"]
)
def test_text_without_a_call_is_left_alone(name: str, text: str) -> None:
    found = read(name, text)
    assert (found.text, found.calls) == (text, ())


@pytest.mark.parametrize("name", ALL)
def test_cut_at_each_character_nothing_of_a_call_is_text(name: str) -> None:
    whole = CALLS[name]
    for end in range(1, len(whole)):
        found = Reading(name, list(whole[:end]))
        if not found.calls:  # its name was not whole: then it is text, all of it
            assert found.text == whole[:end]
        else:
            assert whole[:end].endswith(found.text) and not any(name in found.text for name in ("look", "times"))
            assert [call.name for call in found.calls] == ["look", "stop"][: len(found.calls)]
            for call, (_, arguments) in zip(found.calls, TWO_CALLS, strict=False):
                assert call.parsed == (arguments if call.complete else None)
            assert all(call.complete for call in found.calls[:-1])


def test_arguments_cut_by_a_limit_are_a_call_that_is_not_complete() -> None:
    found = read("hermes", '<tool_call>\n{"name": "look", "arguments": {"at": "cu')
    (call,) = found.calls
    assert call == ToolCall(call.id, "look", '{"at": "cu', complete=False)
    assert (found.text, call.parsed) == ("", None)
    assert found.error == "the answer ended within a call"


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("hermes", '<tool_call>\n{"name": "jump", "arguments": {}}\n</tool_call>', "calls the tool 'jump'"),
        ("hermes", "<tool_call> is how a call begins", "'i' where '{' was expected"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', "has no name"),
        ("hermes", '<tool_call>{"name": 5}</tool_call>', "where '\"' was expected"),
        ("qwen3_coder", "<tool_call>\n<function=jump>\n</function>\n</tool_call>", "calls the tool 'jump'"),
        ("mistral", '[TOOL_CALLS][{"name": "jump", "arguments": {}}]', "calls the tool 'jump'"),
        ("mistral_args", "[TOOL_CALLS]jump[ARGS]{}", "calls the tool 'jump'"),
        ("llama3_json", '{"name": "Ann", "parameters": {}}', "calls the tool 'Ann'"),
        ("pythonic", "[jump(at=3)]", "calls the tool 'jump'"),
    ],
)
def test_what_is_no_call_of_the_tools_stays_text(name: str, text: str, error: str) -> None:
    found = read(name, text)
    assert (found.text, found.calls) == (text, ())
    assert found.error is not None and error in found.error


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "look", "arguments": {"at": }}</tool_call>'),
        ("hermes", '<tool_call>{"name": "look", "arguments": {"times": NaN}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "look", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "look", "arguments": {}, "arguments": {}}</tool_call>'),
        ("mistral_args", "[TOOL_CALLS]look[ARGS]{at: 3}"),
        ("pythonic", "[look(at=open('/etc/passwd'))]"),
        ("pythonic", "[look('cup')]"),
        ("pythonic", r"[look(at=r'a\d')]"),
        ("pythonic", "[look(at={**{'a': 1}})]"),
        ("pythonic", "[look(at='a', at='b')]"),
        ("pythonic", '[look(at="cup")'),
        ("pythonic", '[look(at=["a "b", c"])]'),
        (
            "qwen3_coder",
            "<function=look>\n<parameter=at>\na\n</parameter>\n<parameter=at>\nb\n</parameter>\n</function>",
        ),
        ("qwen3_coder", "<function=look>\n<parameter=at>\ncup\n</function>"),
        ("pythonic", "[look(times=[None, 1e999])]"),
        ("pythonic", "[look(at=" + "(" * 300 + ")" * 300 + ")]"),
    ],
)
def test_broken_arguments_are_a_call_that_is_not_complete(name: str, text: str) -> None:
    found = read(name, text)
    assert [(call.name, call.complete, call.parsed) for call in found.calls] == [("look", False, None)]
    assert found.error is not None


def test_a_call_whose_end_is_missing_is_complete_where_its_object_is() -> None:
    found = read("hermes", '<tool_call>\n{"name": "stop", "arguments": {}}\n')
    assert ([call.complete for call in found.calls], found.text) == ([True], "")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("<function=look>\n<parameter=at>\ncup\n</parameter>\n</function>\n</tool_call>", ""),
        ("I look.\n<function=look>\n<parameter=at>\ncup\n</parameter>\n</function>", "I look."),
        ("<tool_call>\n<function=look>\n<parameter=at>\ncup\n</function>\n</tool_call>", ""),
    ],
)
def test_tags_that_are_missing(text: str, shown: str) -> None:
    """Behind the first call others come whole."""
    found = read("qwen3_coder", f"{text}\n{CALLS['qwen3_coder']}")
    assert (found.text, found.error) == (shown, None)
    assert [(call.name, call.parsed) for call in found.calls] == [("look", {"at": "cup"}), *TWO_CALLS]


@pytest.mark.parametrize("name", ["look", "free"])
@pytest.mark.parametrize("end", ["", "\n</parameter>"])
def test_the_next_argument_ends_a_value_whose_tag_is_missing(name: str, end: str) -> None:
    text = (
        f"<tool_call>\n<function={name}>\n<parameter=at>\na <parameter=b> c{end}\n<parameter=times>\n3\n</parameter>\n"
    )
    found = Reading("qwen3_coder", [f"{text}</function>\n</tool_call>"])
    assert [call.parsed for call in found.calls] == [{"at": "a <parameter=b> c", "times": 3}]


@pytest.mark.parametrize(
    "text",
    [
        'say "hi", ok',
        'say "hi")',
        'a 5" screen',
        '"hi", he said',
        "it's (or 'was'), ok",
        'it ends with "hi"',
        'r"x',
        '"',
    ],
)
@pytest.mark.parametrize("quote", ["'", '"'])
@pytest.mark.parametrize("behind", [")]", ", times=3)]", ", times=3), stop()]", " , )]"])
def test_text_with_quotes_that_nobody_escaped_is_read_whole_or_an_error(text: str, quote: str, behind: str) -> None:
    found = read("pythonic", f"[look(at={quote}{text}{quote}{behind}")
    if found.error is None or found.calls[0].complete:
        assert found.calls[0].parsed == {"at": text} | ({"times": 3} if "times" in behind else {})
        assert found.text == ""


@pytest.mark.parametrize("name", ALL)
@given(text=st.text("ab\"'\\,)]}=( \n<>&{:[", max_size=12), end=st.integers(0, 200))
def test_a_written_call_is_read_exactly_and_a_cut_one_is_not_complete(name: str, text: str, end: int) -> None:
    calls = [("look", {"at": text, "more": [text, {text: None}], "times": 3}), ("look", {"at": ""})]
    whole = FORMATS[name].written(calls)
    found = Reading(name, [whole])
    assert ([(call.name, call.parsed) for call in found.calls], found.text, found.error) == (calls, "", None)
    cut = Reading(name, [whole[:end]])
    for call, expected in zip(cut.calls, calls, strict=False):
        assert not call.complete or (call.name, call.parsed) == expected
        assert call.complete or cut.error is not None


@pytest.mark.parametrize(
    ("name", "before", "piece"),
    [
        ("pythonic", '[look(at="cup"', " "),
        ("pythonic", '[look(at="cup', '" '),
        ("pythonic", '[look(at="cup"', ", a"),
        ("qwen3_coder", "<tool_call><function=look><parameter=at>cup</parameter>", " "),
        ("qwen3_coder", "<tool_call><function=look><parameter=at>", "</parameter> "),
        ("qwen3_coder", "<tool_call><function=look><parameter=at>", "<a>\n"),
        ("hermes", '<tool_call>{"name": "stop"', " "),
        ("hermes", '<tool_call>{"name": "look", "arguments": {"at": "', " "),
    ],
)
def test_reading_a_character_takes_as_long_in_a_long_text(name: str, before: str, piece: str) -> None:
    def seconds(count: int) -> float:
        reader, text = ToolReader(FORMATS[name], SCHEMAS), before + piece * count
        began = time.thread_time()
        for each in text:
            reader.push(0, each)
            reader.take_deltas()
        reader.finish()
        return time.thread_time() - began

    # The best of several each: a collection of garbage, of all that the tests keep, takes longer than either.
    assert min(seconds(12_000) for _ in range(3)) < 9 * min(seconds(3_000) for _ in range(3))


def test_a_second_mark_begins_a_call_behind_a_broken_one() -> None:
    found = read("hermes", f"<tool_call>{CALLS['hermes']}")
    assert (found.text, len(found.calls)) == ("<tool_call>", 2)


def test_text_behind_a_call_is_text() -> None:
    found = read("hermes", f"{CALLS['hermes']}\nDone: <tool_call")
    assert (found.text, len(found.calls)) == ("\nDone: <tool_call", 2)


def test_arguments_as_text_null_and_none_at_all() -> None:
    texts = ['"arguments": "{\\"at\\": \\"cup\\"}"', '"arguments": null', '"id": [1, {"a": "]"}]']
    calls = [read("hermes", f'<tool_call>{{"name": "look", {text}}}</tool_call>').calls for text in texts]
    assert [call.parsed for (call,) in calls] == [{"at": "cup"}, {}, {}]


def test_text_is_shown_as_soon_as_it_is_certain() -> None:
    found = Reading(
        "hermes", ["Hello", " world", " <", "b", "> ", "<tool", "_call", ">{", '"name": "stop"}', "</tool_call>"]
    )
    assert found.shown == ["Hello", " world", "", " <b", ">", "", "", "", "", "", ""]
    deltas = Reading("hermes", list(CALLS["hermes"])).deltas
    assert len([each for each in deltas if each.index == 0]) > 20  # arguments come character by character


@pytest.mark.parametrize(
    ("reasoning", "text", "shown", "count"),
    [
        ("open", ["a", "<tool_call>", "</think>", CALLS["hermes"]], "a<tool_call></think>", 2),
        ("undecided", ["<think>", CALLS["hermes"], "</think>", CALLS["hermes"]], None, 2),
        ("undecided", [CALLS["hermes"], "<think>"], "<think>", 2),
        ("open", ["a", "<tool_call>"], "a<tool_call>", 0),
        ("closed", ["<think>", CALLS["hermes"]], "<think>", 2),
    ],
)
def test_nothing_is_called_while_a_model_thinks(
    reasoning: ReasoningState, text: list[str], shown: str | None, count: int
) -> None:
    marks = ReasoningMarks(begin=900, end=901)
    reader = ToolReader(FORMATS["hermes"], SCHEMAS, marks, reasoning)
    ids = {"<think>": 900, "</think>": 901}
    found = "".join(reader.push(ids.get(piece, 5), piece) for piece in text) + reader.finish()
    assert found == (f"<think>{CALLS['hermes']}</think>" if shown is None else shown)
    assert len(reader.calls) == count


PIECES = [
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    '{"name": "look", ',
    '"arguments": ',
    '{"at": "cup"}',
    "}",
    "\n",
]
PIECES += [
    "[look(",
    "at='cup'",
    ")",
    "]",
    ", ",
    "; ",
    "<function=look>",
    "<parameter=at>",
    "</parameter>",
    "</function>",
]
PIECES += ['"', "\\", " ", "a", "é", "[ARGS]", "look", "{", "stop()"]


@given(name=st.sampled_from(ALL), pieces=st.lists(st.sampled_from(PIECES), max_size=20), data=st.data())
def test_any_text_gives_the_same_however_it_is_cut(name: str, pieces: list[str], data: st.DataObject) -> None:
    text = "".join(pieces)
    whole = Reading(name, [text]).outcome
    assert Reading(name, pieces).outcome == whole
    assert Reading(name, list(text)).outcome == whole
    if not whole[1]:
        assert whole[0] == text
