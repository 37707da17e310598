"""Calls of earlier answers, written where a chat template leaves them out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from edgellm.text.messages import DISGUISES, strings_in

#: Gives the text of a message's calls, as its model writes them; "" where that is not known.
WriteCalls = Callable[[Sequence[Any]], str]


class EarlierCalls:
    """Puts the calls of messages behind their text where the template has no place for them.

    The template gets marks, characters that occur nowhere in the messages, in their place. So the calls' own marks
    become special tokens as if the template had written them, and text of the arguments does not.
    """

    def __init__(self, values: dict[str, Any], write: WriteCalls | None, template_writes: Callable[[], bool]) -> None:
        """`values` is all that the template is given, its `messages` as it takes them; the `values` of this object are
        those to render."""
        self.values, messages = values, list(values["messages"])
        self._texts: dict[str, str] = {}
        places = [place for place, message in enumerate(messages) if message.get("tool_calls")]
        if write is None or not places or template_writes():
            return
        used = set().union(*strings_in(values))
        free = (mark for mark in map(chr, reversed(DISGUISES)) if mark not in used)
        for place, mark in zip(places, free, strict=False):
            text = write(messages[place]["tool_calls"])
            if text:
                self._texts[mark] = text
                messages[place] = {**messages[place], "content": _behind(messages[place]["content"], mark)}
        self.values = {**values, "messages": messages}

    def put_into(self, rendered: str) -> str:
        """What the template wrote with the calls in place of their marks."""
        return rendered.translate({ord(mark): text for mark, text in self._texts.items()})


def _behind(content: Any, text: str) -> Any:
    return [*content, {"type": "text", "text": text}] if isinstance(content, list) else (content or "") + text
