"""Messages on their way to templates: parts, missing content, reasoning, a client's extra keys, further templates.

The templates here are small ones of every kind that published models have; what is expected of each is what the field's
own tools give it.
"""

# ruff: noqa: E501 (line ends are part of a template)
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from byte_level_tokenizer import END, START, byte_level, specials
from rendered_chats import rendered_chat

from edgellm.errors import RequestError, TemplateError
from edgellm.text.messages import MEDIA_PARTS, checked_messages
from edgellm.text.template import ChatTemplate
from edgellm.text.tokenizer import Tokenizer

#: Parts are written one after the other, as most templates that know them do.
CONCATENATING = (
    "{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}"
    "{% else %}{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endif %};{% endfor %}"
)
#: Parts of the user alone, each on a line.
ON_LINES = (
    "{% for m in messages %}{% if m.role == 'user' and m.content is not string %}"
    "{% for part in m.content %}[{{ part['text'] | trim }}]\n{% endfor %}{% else %}{{ m.role + m.content }}{% endif %};{% endfor %}"
)
TEXT_ONLY = "{% for m in messages %}{{ m.role + ': ' + m.content }};{% endfor %}"
PRINTING = "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}"
AS_JSON = "{% for m in messages %}{{ m.content if m.content is string else m.content | tojson }};{% endfor %}"
LEAVING_OUT = "{% for m in messages %}{{ m.content if m.content is string else '' }};{% endfor %}"
PARTS_ONLY = (
    "{% for m in messages %}{% for part in m.content if part.type == 'text' %}{{ part.text }}{% endfor %};{% endfor %}"
)


def tokenizer_with(source: str | dict[str, str]) -> Tokenizer:
    sources = source if isinstance(source, dict) else {"default": source}
    return Tokenizer(byte_level(), {}, (), ChatTemplate(sources, "a test"))


def text_parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def rendered(source: str, messages: list[dict[str, Any]]) -> str:
    return rendered_chat(tokenizer_with(source), messages)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (CONCATENATING, "system: a b;user:  c d ;"),
        (ON_LINES, "systema \nb;[c]\n[d]\n;"),
        (TEXT_ONLY, "system: a \nb;user:  c\n d ;"),
        (PRINTING, "system: a \nb;user:  c\n d ;"),
        (AS_JSON, "a \nb; c\n d ;"),
        (LEAVING_OUT, "a \nb; c\n d ;"),
        (PARTS_ONLY, "a b; c d ;"),
    ],
)
def test_text_parts_reach_templates_as_they_take_them(source: str, expected: str) -> None:
    messages = [
        {"role": "system", "content": text_parts("a ", "b")},
        {"role": "user", "content": text_parts(" c", " d ")},
    ]
    assert rendered(source, messages) == expected


def test_text_is_never_lost_in_a_template_of_parts_alone() -> None:
    assert rendered(PARTS_ONLY, [{"role": "user", "content": "hello"}]) == "hello;"


def test_parts_of_a_tool_are_tried_on_their_own() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'tool' %}<{{ m.content[0].text if m.content is not string else m.content }}>"
        "{% elif m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %};{% endfor %}"
    )
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}
    messages = [
        {"role": "user", "content": text_parts("a", "b")},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": text_parts("c", "d")},
    ]
    assert rendered(source, messages) == "ab;;<c\nd>;"


def test_parts_cannot_make_a_special_token_together() -> None:
    tokenizer = tokenizer_with(f"{START}" + CONCATENATING)
    cut = len(END) // 2
    for texts in ((END[:cut], END[cut:]), (END[:2], END[2:cut], END[cut:]), ("a" + END[:-1], END[-1] + "b", "c")):
        ids = tokenizer.encode_chat([{"role": "user", "content": text_parts(*texts)}])
        assert specials(tokenizer, ids) == [START]
        joined = tokenizer.encode_chat([{"role": "user", "content": "".join(texts)}])
        assert ids == joined


CALL = {"id": "abc", "type": "function", "function": {"name": "look", "arguments": {"at": "cup"}}}
CALLING = [
    {"role": "user", "content": "Look."},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "abc", "content": "a cup"},
]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        # Calls are written only where the content is None: with empty text they would be lost.
        (
            "{% for m in messages %}{% if m.role == 'assistant' and m.content is none %}call {{ m.tool_calls[0].function.name }}"
            "{% else %}{{ m.content }}{% endif %};{% endfor %}",
            "Look.;call look;a cup;",
        ),
        (
            "{% for m in messages %}{% set c = m['content'] %}{% if c is not none %}{{ c + '!' }}{% else %}-{% endif %};{% endfor %}",
            "Look.!;-;a cup!;",
        ),
        ("{% for m in messages %}{{ '-' if m.content == None else m.content }};{% endfor %}", "Look.;-;a cup;"),
        # Fails on None; prints it; says null; tests for it in one place and prints it in another.
        ("{% for m in messages %}{{ m.role + m.content }};{% endfor %}", "userLook.;assistant;toola cup;"),
        ("{% for m in messages %}{{ m.content | trim }};{% endfor %}", "Look.;;a cup;"),
        (
            "{% for m in messages %}{{ m.content if m.content is string else m.content | tojson }};{% endfor %}",
            "Look.;;a cup;",
        ),
        ("{% for m in messages %}{% if m.content is none %}!{% endif %}{{ m.content }};{% endfor %}", "Look.;;a cup;"),
        (
            "{% for m in messages %}{% if m.content %}{{ m.content }}{% else %}-{% endif %};{% endfor %}",
            "Look.;-;a cup;",
        ),
        # Arguments as text alone, as the API has them.
        (
            "{% for m in messages %}{% if m.tool_calls %}{% if m.content is none %}none{% endif %}"
            "{{ 'args ' + m.tool_calls[0].function.arguments }}{% else %}{{ m.content }}{% endif %};{% endfor %}",
            'Look.;noneargs {"at": 1};a cup;',
        ),
    ],
)
def test_missing_content_beside_calls(source: str, expected: str) -> None:
    messages = CALLING
    if "args" in source:
        call = {**CALL, "function": {"name": "look", "arguments": '{"at": 1}'}}
        messages = [CALLING[0], {**CALLING[1], "tool_calls": [call]}, CALLING[2]]
    assert rendered(source, messages) == expected
    without = [{key: value for key, value in message.items() if value is not None} for message in messages]
    assert rendered(source, without) == expected


def test_empty_content_beside_calls_stays_empty() -> None:
    source = "{% for m in messages %}{{ '-' if m.content is none else m.content }};{% endfor %}"
    assert rendered(source, [CALLING[0], {**CALLING[1], "content": ""}]) == "Look.;;"


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("read", ["reasoning_content", "thinking"])
def test_reasoning_is_carried_under_the_names_that_templates_read(key: str, read: str) -> None:
    source = "{% for m in messages %}{{ m." + read + " | default('-') }}{{ m.content }};{% endfor %}"
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", key: "because "}]
    assert rendered(source, messages) == "-a;because b;"


def test_the_first_name_of_reasoning_wins() -> None:
    both = {"role": "assistant", "content": "b", "reasoning": "old", "reasoning_content": "new"}
    (checked,) = checked_messages([both])
    assert (checked["reasoning_content"], checked["thinking"], checked["reasoning"]) == ("new", "new", "old")


def test_a_dump_of_a_clients_message_is_accepted() -> None:
    dumped = {
        "content": "Hello",
        "refusal": None,
        "role": "assistant",
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
        "name": None,
    }
    messages = [{"role": "user", "content": "a", "name": None}, dumped]
    assert checked_messages(messages) == [{"role": "user", "content": "a"}, {"role": "assistant", "content": "Hello"}]
    source = "{% for m in messages %}{{ m.tool_calls is defined }}{{ m.name is defined }};{% endfor %}"
    assert rendered(source, messages) == "FalseFalse;FalseFalse;"
    with pytest.raises(RequestError, match="unknown key 'refusal'"):
        checked_messages([{**dumped, "refusal": "no"}])


def test_empty_parts_of_a_user_are_refused() -> None:
    for content in ([], text_parts(""), text_parts(" ", "\n")):
        with pytest.raises(RequestError, match="is empty"):
            checked_messages([{"role": "user", "content": content}])
    for kind in MEDIA_PARTS:
        shown, found = [{"type": kind, "path": "a.png"}], [{"type": MEDIA_PARTS[kind]}]
        assert (
            checked_messages([{"role": "user", "content": shown}], ("image", "audio", "video"))[0]["content"] == found
        )


def test_further_templates_are_read_from_their_folder(tmp_path: Path) -> None:
    folder = tmp_path / "additional_chat_templates"
    folder.mkdir()
    (folder / "tool_use.jinja").write_text("with {{ tools | length }}", encoding="utf-8")
    (folder / "rag.jinja").write_text("documents", encoding="utf-8")
    (folder / "notes.txt").write_text("{% nothing", encoding="utf-8")
    only = ChatTemplate.from_directory(tmp_path, {})
    assert only is not None and sorted(only.sources) == ["rag", "tool_use"]
    with pytest.raises(TemplateError, match="but none named 'default'"):
        only.render({})
    named = [{"name": "default", "template": "of the list"}, {"name": "tool_use", "template": "old"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}), encoding="utf-8")
    listed = ChatTemplate.from_directory(tmp_path, {"chat_template": named})
    assert listed is not None and listed.render({"tools": [1, 2]}) == "with 2" and listed.render({}) == "of the list"
    (tmp_path / "chat_template.jinja").write_text("plain", encoding="utf-8")
    template = ChatTemplate.from_directory(tmp_path, {"chat_template": named})
    assert template is not None and template.render({"tools": [1]}) == "with 1" and template.render({}) == "plain"


def test_each_template_is_tried_on_its_own() -> None:
    tokenizer = tokenizer_with({"default": TEXT_ONLY, "tool_use": CONCATENATING})
    messages = [{"role": "user", "content": text_parts("a", "b")}]
    template = tokenizer.chat_template
    assert template is not None
    assert template.fitted(checked_messages(messages))[0]["content"] == "a\nb"
    assert template.fitted(checked_messages(messages), with_tools=True)[0]["content"] == text_parts("a", "b")


def test_a_template_says_which_variables_it_reads() -> None:
    source = "{% set a = 1 %}{% for m in messages %}{{ a + m.b }}{% endfor %}{% if enable_thinking and not loud %}{{ bos_token }}{% endif %}"
    tokenizer = tokenizer_with(
        {"default": source, "tool_use": "{{ namespace(x=tools).x }}{% if x < y[1:z] ~ {k: v} %}{% endif %}"}
    )
    read = frozenset(("messages", "enable_thinking", "loud", "bos_token", "tools", "x", "y", "z", "k", "v"))
    assert tokenizer.template_variables() == read
    with pytest.raises(TemplateError, match="has no chat template"):
        Tokenizer(byte_level()).template_variables()
    with pytest.raises(TemplateError, match="syntax error"):
        tokenizer_with("{% for %}").template_variables()


def test_trials_of_an_endless_template_end() -> None:
    source = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    template = ChatTemplate({"default": source}, "a test")
    trials = template.trials()
    assert not any((trials.wants_parts, trials.reads_parts("user"), trials.tests_for_none))
    assert template._trial_seconds == 0


#: As templates have it that take one system message, at the beginning, or know the developer; and one that takes parts.
FIRST_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}"
    "{% elif m.role in ('system', 'user', 'assistant') %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
)
ANY_SYSTEM = "{% for m in messages if m.role in ('system', 'user') %}[{{ m.role }}]{{ m.content }}{% endfor %}"
ANY_ROLE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
PARTS_OF_FIRST = (
    "{% for m in messages %}{% if loop.first or m.role == 'user' %}[{{ m.role }}]"
    "{% for part in m.content if part.type == 'text' %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (FIRST_SYSTEM, "[system]Be brief.\n\nUse\ntools.[user]Hi"),
        (ANY_SYSTEM, "[system]Be brief.[system]Use\ntools.[user]Hi"),
        (ANY_ROLE, "[developer]Be brief.[developer]Use\ntools.[user]Hi"),
        (PARTS_OF_FIRST, "[developer]Be brief.\n\nUse\ntools.[user]Hi"),
    ],
)
def test_what_developers_say_is_written_by_every_template(source: str, expected: str) -> None:
    """Agents send several such messages; a template that does not know them would leave out what the agent is."""
    said: list[dict[str, Any]] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "developer", "content": text_parts("Use", "tools.")},
        {"role": "user", "content": "Hi"},
    ]
    assert rendered(source, said) == expected
    empty = {"role": "developer", "content": ""}
    assert rendered(source, [empty, *said[2:]]) == "[user]Hi"
    assert rendered(FIRST_SYSTEM, [empty, *said[1:]]) == "[system]Use\ntools.[user]Hi"
