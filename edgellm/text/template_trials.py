"""Trials of what a chat template can take: it renders small conversations, and what it writes tells."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, cached_property
from typing import Any

Messages = list[dict[str, Any]]
#: Renders messages, with a tool or without; None where the template fails.
Render = Callable[[Messages, bool], "str | None"]

_WORDS = ("Alpha1", "Omega2")
#: How Python and JSON write a word that was not meant to be printed in a list.
_QUOTED = tuple(f"{quote}{word}{quote}" for word in _WORDS for quote in "'\"")
_QUESTION = {"role": "user", "content": "Hello"}
#: Arguments of a call as templates take them: most an object, some the text of one.
_ARGUMENTS: tuple[Any, ...] = ({"at": "cup"}, '{"at": "cup"}')
#: A tool that the trials' calls may name.
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks at a thing.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string", "description": "The thing."}}},
    },
}


#: Conversations with a call of that tool and its result, for each form of arguments.
_CALLS: list[Messages] = [
    [
        _QUESTION,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "call00001", "type": "function", "function": {"name": "look", "arguments": arguments}}
            ],
        },
        {"role": "tool", "name": "look", "tool_call_id": "call00001", "content": "a cup"},
    ]
    for arguments in _ARGUMENTS
]


class TemplateTrials:
    """What one template does with forms of messages that not all templates take; each trial runs when first needed."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self.reads_parts, self.writes = cache(self._reads_parts), cache(self._writes)

    @cached_property
    def wants_parts(self) -> bool:
        """Whether a message must be a list of parts for its text to be written."""
        as_text, as_parts = (
            self._render([{"role": "user", "content": content}], False) or "" for content in (_WORDS[0], _parts(1))
        )
        return _WORDS[0] not in as_text and _WORDS[0] in as_parts

    def _writes(self, role: str, count: int) -> bool:
        """Whether so many messages of a role at the beginning are all written."""
        contents = [[part] if self.wants_parts else part["text"] for part in _parts(count)]
        written = self._render([*({"role": role, "content": content} for content in contents), _QUESTION], False) or ""
        return all(word in written for word in _WORDS[:count])

    def _reads_parts(self, role: str) -> bool:
        """Whether a list of text parts as the content of a message of `role` is written as the text in it."""
        message: dict[str, Any] = {"role": role, "content": _parts(2)}
        trials = {
            "tool": [_with_content(messages, 2, message["content"]) for messages in _CALLS],
            "assistant": [[_QUESTION, message, _QUESTION]],
            "user": [[message]],
        }.get(role, [[message, _QUESTION]])
        texts = [self._render(trial, role == "tool") or "" for trial in trials]
        return any(all(word in text for word in _WORDS) and not any(word in text for word in _QUOTED) for text in texts)

    @cached_property
    def calls(self) -> tuple[str | None, ...]:
        """A conversation in which the assistant has called look(at="cup"): with arguments as an object, and as text."""
        return tuple(self._render(messages, True) for messages in _CALLS)

    def writes_calls(self, with_tools: bool) -> bool:
        """Whether a call of an earlier answer makes a difference to what is written beside tools, or without any; so it
        does where it cannot be. Some templates tell of tools, and leave calls to the text of the messages."""
        found = []
        for messages in _CALLS:
            without = [{key: kept for key, kept in message.items() if key != "tool_calls"} for message in messages]
            if (written := self._render(messages, with_tools)) is not None:
                found.append(written != self._render(without, with_tools))
        return not found or any(found)

    def has_own_prompt(self, with_tools: bool) -> bool:
        """Whether the template writes a system prompt of its own where there is none, and less where it is empty."""
        own = self._render([_QUESTION], with_tools)
        empty = self._render([{"role": "system", "content": ""}, _QUESTION], with_tools)
        return own is not None and empty is not None and len(own) > len(empty)

    @cached_property
    def wants_argument_text(self) -> bool:
        """Whether arguments of a call must be text to be written as JSON."""
        as_object, as_text = self.calls
        written = as_text is not None and _ARGUMENTS[1] in as_text
        return written and (as_object is None or str(_ARGUMENTS[0]) in as_object)

    @cached_property
    def tests_for_none(self) -> bool:
        """Whether the template tells None beside tool calls from empty text, and neither fails on it nor prints it."""
        differs = False
        for messages in _CALLS:
            with_text, with_none = (self._render(_with_content(messages, 1, content), True) for content in ("", None))
            if with_text is not None and (with_none is None or _nothings(with_none) > _nothings(with_text)):
                return False
            differs |= with_none is not None and with_none != with_text
        return differs


def _parts(count: int) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in _WORDS[:count]]


def _with_content(messages: Messages, place: int, content: Any) -> Messages:
    return [{**message, "content": content} if at == place else message for at, message in enumerate(messages)]


def _nothings(text: str) -> int:
    return text.count("None") + text.count("null")
