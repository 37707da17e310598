"""What a snapshot's header says of its prompt: kept as it was given, and read without trust."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgellm.errors import RequestError, SnapshotError
from edgellm.snapshots.file import read_snapshot, write_snapshot
from edgellm.snapshots.snapshot import Snapshot
from edgellm.snapshots.system_prompt import LARGEST_RECORD, PromptRecord, system_prompt_ids
from edgellm.text.template import ChatTemplate
from edgellm.text.tokenizer import Tokenizer

TOOLS = [{"type": "function", "function": {"name": "grasp", "parameters": {"z": 1, "a": [None, True, 0.5]}}}]
DIGEST = "0123456789abcdef" * 4


@pytest.mark.parametrize(
    "record",
    [
        PromptRecord(""),
        PromptRecord('You are "Pip", ünïcode \U0001f916\n\x00.'),
        PromptRecord("x", TOOLS, {"enable_thinking": False, "level": "high"}),
        PromptRecord([{"type": "text", "text": "This is a cup:"}, {"type": "image", "digest": DIGEST}]),
    ],
)
def test_a_record_is_read_as_it_was_written(
    make_snapshot: Callable[..., Snapshot], tmp_path: Path, record: PromptRecord
) -> None:
    assert PromptRecord.from_json(record.to_json()) == record
    write_snapshot(tmp_path / "x", make_snapshot([1, 2, 3], prompt=record))
    found = read_snapshot(tmp_path / "x").prompt
    assert found == record
    assert json.dumps(found.tools) == json.dumps(record.tools)  # keys in their order, which templates show


def test_what_is_no_system_prompt_has_no_record(make_snapshot: Callable[..., Snapshot], tmp_path: Path) -> None:
    write_snapshot(tmp_path / "x", make_snapshot([1, 2, 3]))
    assert read_snapshot(tmp_path / "x").prompt is None


def test_records_of_prompts() -> None:
    parts = [{"type": "text", "text": "A"}, {"type": "image", "image": b"..."}, {"type": "image_url", "image_url": "x"}]
    record = PromptRecord.of(parts, [DIGEST, DIGEST[::-1]], [], {})
    assert record.content == [
        {"type": "text", "text": "A"},
        {"type": "image", "digest": DIGEST},
        {"type": "image", "digest": DIGEST[::-1]},
    ]
    assert (record.tools, record.template_variables, record.text) == (None, None, None)
    assert PromptRecord.of("A").text == PromptRecord.of(parts[:1]).text == "A"
    assert PromptRecord.of(parts[1:2], [DIGEST]).text is None


def nested(depth: int) -> str:
    return '{"content": "x", "template_variables": {"v": ' + "[" * depth + "]" * depth + "}}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not valid JSON"),
        ("[]", "not an object with the keys content, tools, template_variables"),
        ("{}", "not an object with the keys"),
        ('{"content": "x", "other": 1}', "not an object with the keys"),
        ('{"content": 5}', "content is a int"),
        ('{"content": []}', "content is a list: expected text, or a list of parts"),
        ('{"content": ["x"]}', "part 1 of content"),
        ('{"content": [{"type": "text", "text": 5}]}', "part 1 of content"),
        ('{"content": [{"type": "text", "text": "x", "digest": "y"}]}', "part 1 of content"),
        ('{"content": [{"type": "image", "path": "/etc/passwd"}]}', "part 1 of content"),
        ('{"content": [{"type": "image", "digest": "' + "g" * 64 + '"}]}', "part 1 of content"),
        ('{"content": "\\ud800"}', "half of a surrogate pair"),
        ('{"content": "x", "tools": {}}', "tools is a dict"),
        ('{"content": "x", "tools": "grasp"}', "tools is a str"),
        ('{"content": "x", "tools": [1]}', r"tools\[0\] is a int"),
        ('{"content": "x", "template_variables": []}', "template_variables is a list"),
        ('{"content": "x", "template_variables": {"messages": 1}}', "the name 'messages'"),
        ('{"content": "x", "template_variables": {"a b": 1}}', "the name 'a b'"),
        (
            '{"content": "x", "template_variables": {"v": 1e999}}',
            "the template variable v is inf: expected a finite number",
        ),
        (
            '{"content": "x", "template_variables": {"v": NaN}}',
            "the template variable v is nan: expected a finite number",
        ),
        (
            '{"content": "x", "template_variables": {"v": 1' + "0" * 400 + "}}",
            "number of 1329 bits: expected 63 and a sign",
        ),
        ('{"content": "x", "template_variables": {"v": 1' + "0" * 5000 + "}}", "expected 63 and a sign|not valid JSON"),
        ('{"content": "x", "tools": [' + "1," * 2_000_000 + "1]}", r"tools\[0\] is a int"),
        ('{"content": "x", "tools": [{"name": [' + "1," * 2_000_000 + "1]}]}", "tools has more than 100,000 values"),
        (nested(70), "is nested more than 64 deep"),
        (nested(100_000), "not valid JSON"),
        ('{"content": "' + "x" * LARGEST_RECORD + '"}', "characters, expected at most 4,194,304"),
    ],
    ids=lambda text: text[:40],
)
def test_hostile_records_are_refused(
    make_snapshot: Callable[..., Snapshot], tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        PromptRecord.from_json(text)
    assert len(str(caught.value)) < 400
    write_snapshot(tmp_path / "x", make_snapshot([1], prompt=Written(text)))
    with pytest.raises(SnapshotError, match=message) as refused:
        read_snapshot(tmp_path / "x")
    assert refused.value.reason == "damaged"


class Written(PromptRecord):
    """A record whose JSON is what somebody else wrote."""

    def to_json(self) -> str:
        return str(self.content)


def test_a_record_that_is_no_text(make_snapshot: Callable[..., Snapshot], tmp_path: Path) -> None:
    write_snapshot(tmp_path / "x", make_snapshot([1], prompt=PromptRecord("x")))
    data = (tmp_path / "x").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["__metadata__"]["edgellm_prompt"] = {"content": "x"}
    encoded = json.dumps(header).encode()
    (tmp_path / "x").write_bytes(len(encoded).to_bytes(8, "little") + encoded + data[8 + length :])
    with pytest.raises(SnapshotError, match="edgellm_prompt in its header is a dict, expected text"):
        read_snapshot(tmp_path / "x")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(content=JSON, tools=JSON, variables=JSON)
def test_any_json_is_read_or_refused(content: object, tools: object, variables: object) -> None:
    text = json.dumps({"content": content, "tools": tools, "template_variables": variables})
    try:
        record = PromptRecord.from_json(text)
    except RequestError:
        return
    assert PromptRecord.from_json(record.to_json()) == record


def test_a_prompt_too_large_to_be_kept_is_refused_when_it_is_written() -> None:
    with pytest.raises(RequestError, match="characters of JSON: expected at most 4,194,304"):
        PromptRecord("x" * LARGEST_RECORD).to_json()


@pytest.fixture
def tokenizer(tiny_engines: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_directory(tiny_engines)
    tokenizer.chat_template = ChatTemplate({"default": TEMPLATE}, "a test")
    return tokenizer


TEMPLATE = (
    "{% if tools %}<{{ tools | tojson }}>{% endif %}{% if terse is defined %}{{ terse }} {% endif %}"
    "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}"
)


def test_tools_and_variables_reach_the_template(tokenizer: Tokenizer) -> None:
    ids = system_prompt_ids(tokenizer, "Be kind.", TOOLS, {"terse": "yes"})
    assert tokenizer.decode(ids) == f"<{json.dumps(TOOLS)}>yes [system] Be kind.\n[user] "
    assert tokenizer.decode(system_prompt_ids(tokenizer, "Be kind.")) == "[system] Be kind.\n[user] "


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"tools": "grasp"}, "tools is a str: expected a list of tools"),
        ({"tools": {"name": "grasp"}}, "tools is a dict"),
        ({"tools": [len]}, r"tools\[0\]: the parameter obj of the function len is positional-only"),
        ({"tools": [{"f": len}]}, r"tools\[0\].f is a builtin_function_or_method: expected a value as JSON"),
        ({"tools": [{1: "x"}]}, r"tools\[0\] has the key 1: expected text"),
        ({"template_variables": ["x"]}, "template_variables is a list"),
        ({"template_variables": {"tools": []}}, "the name 'tools', which every request sets itself"),
        ({"template_variables": {"x": float("nan")}}, "the template variable x is nan: expected a finite number"),
    ],
)
def test_wrong_tools_and_variables_are_named(tokenizer: Tokenizer, inputs: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        system_prompt_ids(tokenizer, "Be kind.", **inputs)
