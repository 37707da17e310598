"""What a template makes of messages, found out by rendering small conversations with it.

Templates differ in what they take as the content of a message: text, a list of parts, nothing beside tool calls. They
declare it nowhere, and what a template cannot take it refuses, prints as Python does, or silently leaves out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
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
#: A tool that the trial's calls may name.
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks at a thing.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string", "description": "The thing."}}},
    },
}


class TemplateTrials:
    """One template's answers; each is found when it is first asked for."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self._reads_parts: dict[str, bool] = {}

    @cached_property
    def wants_parts(self) -> bool:
        """Whether a message must be a list of parts for its text to be written, as some templates of models that take
        images have it."""

        def writes(content: Any) -> bool:
            return _WORDS[0] in (self._render([{"role": "user", "content": content}], False) or "")

        return not writes(_WORDS[0]) and writes(_parts(_WORDS[:1]))

    def reads_parts(self, role: str) -> bool:
        """Whether a list of text parts as the content of a message of `role` is written as the text in it."""
        if role not in self._reads_parts:
            self._reads_parts[role] = any(
                text is not None and all(word in text for word in _WORDS) and not any(word in text for word in _QUOTED)
                for text in (self._render(*trial) for trial in _with_content(role, _parts(_WORDS)))
            )
        return self._reads_parts[role]

    @cached_property
    def tests_for_none(self) -> bool:
        """Whether the template tells None, as the content beside tool calls, from empty text, rather than failing on it
        or printing it."""
        differs = False
        for trial in _calls():
            with_text = self._render(*_with_call_content(trial, ""))
            with_none = self._render(*_with_call_content(trial, None))
            if with_text is not None and (with_none is None or _nothings(with_none) > _nothings(with_text)):
                return False
            differs |= with_none is not None and with_none != with_text
        return differs


def _parts(texts: tuple[str, ...]) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def _calls() -> list[tuple[Messages, bool]]:
    """Conversations with a call of a tool and its result."""
    found = []
    for arguments in _ARGUMENTS:
        call = {"id": "call00001", "type": "function", "function": {"name": "look", "arguments": arguments}}
        messages: Messages = [
            _QUESTION,
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": "look", "tool_call_id": "call00001", "content": "a cup"},
        ]
        found.append((messages, True))
    return found


def _with_content(role: str, content: Any) -> list[tuple[Messages, bool]]:
    message = {"role": role, "content": content}
    if role == "tool":
        return [([*messages[:2], {**messages[2], "content": content}], tools) for messages, tools in _calls()]
    if role == "assistant":
        return [([_QUESTION, message, _QUESTION], False)]
    return [([message] if role == "user" else [message, _QUESTION], False)]


def _with_call_content(trial: tuple[Messages, bool], content: Any) -> tuple[Messages, bool]:
    messages, tools = trial
    return [message if "tool_calls" not in message else {**message, "content": content} for message in messages], tools


def _nothings(text: str) -> int:
    return text.count("None") + text.count("null")
