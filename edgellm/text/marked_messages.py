"""Places of messages that are found again in what a chat template wrote: where the last message ends, and where calls
belong that the template leaves out. They bear marks, characters that occur nowhere in what the template is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from edgellm.errors import RequestError
from edgellm.text.messages import free_marks, shown_texts, strings_in

if TYPE_CHECKING:
    from edgellm.text.template import ChatTemplate

#: Gives the text of a message's calls, as its model writes them; "" where that is not known.
WriteCalls = Callable[[Sequence[Any]], str]


class EarlierCalls:
    """Puts the calls of messages behind their text where the template has no place for them: it gets marks there. So
    the calls' own marks become special tokens, and text of the arguments does not."""

    def __init__(self, values: dict[str, Any], write: WriteCalls | None, template: ChatTemplate) -> None:
        """`values` is all that the template is given, its `messages` as it takes them; the `values` of this object are
        those to render. Raises RequestError for calls that cannot be written, which the model would not know of."""
        self.values, messages = values, list(values["messages"])
        self._texts: dict[str, str] = {}
        places = [place for place, message in enumerate(messages) if message.get("tool_calls")]
        with_tools = bool(values.get("tools"))
        if not places or template.trials(with_tools).writes_calls(with_tools):
            return
        for place, mark in zip(places, free_marks(strings_in(values)), strict=False):
            text = "" if write is None else write(messages[place]["tool_calls"])
            if not text:
                raise RequestError(
                    f"an earlier message has tool_calls, which the chat template of {template.origin} does not write, "
                    "and no form is known in which this model calls: leave them out and say in the message's text what "
                    "was called, or build with --tool-format"
                )
            self._texts[mark] = text
            content = messages[place]["content"] or ""
            marked = [*content, {"type": "text", "text": mark}] if isinstance(content, list) else content + mark
            messages[place] = {**messages[place], "content": marked}
        self.values = {**values, "messages": messages}

    def put_into(self, rendered: str) -> str:
        """What the template wrote with the calls in place of their marks."""
        return rendered.translate({ord(mark): text for mark, text in self._texts.items()})


class FinalMessage:
    """The last message of a conversation, an assistant's, which the model is to go on with. A mark behind its text says
    where what is rendered is cut, and a space behind that whether the template trims messages."""

    def __init__(self, message: dict[str, Any], texts: Sequence[str]) -> None:
        """`message` was checked; `texts` are all that the template is given."""
        if message["role"] != "assistant":
            raise RequestError(
                f"continue_final_message is true, but the last message is of the role {message['role']!r}: expected an "
                "assistant's message, whose text is gone on with"
            )
        self._mark = next(free_marks(texts))
        content = message["content"]
        if isinstance(content, str):
            self.marked = {**message, "content": f"{content}{self._mark} "}
            return
        parts = list(content or ())
        places = [place for place, part in enumerate(parts) if part["type"] == "text"]
        if not places:
            raise RequestError("continue_final_message is true, but the last message has no text to go on with")
        parts[places[-1]] = {"type": "text", "text": f"{parts[places[-1]]['text']}{self._mark} "}
        self.marked = {**message, "content": parts}

    def cut(self, rendered: str, marked: dict[str, Any]) -> str:
        """A rendered conversation up to the end of the message's text; `marked` is the message as the template saw it.
        Raises RequestError where the text does not stand there."""
        content = marked["content"]
        text = next(each for each in shown_texts(content) if self._mark in each).split(self._mark)[0]
        kept, mark, rest = rendered.rpartition(self._mark)
        if not mark or not kept.rstrip().endswith(text.strip()):
            raise RequestError(
                "the chat template does not end the conversation with the last message's text as it is, so that "
                "continue_final_message cannot go on with it: leave it out, or send a prompt as text"
            )
        trims = not rest.startswith(" ")
        return kept.rstrip() if trims and text.strip() else kept
