"""`Session`: a conversation that remembers what was said."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from edgellm.errors import RequestError
from edgellm.generation import Generation, RequestState
from edgellm.requests import Request, Response, StopWhen, check_choices, checked_priority
from edgellm.sampling_params import SamplingParams, with_structure
from edgellm.text.messages import checked_messages, checked_tools, checked_variables
from edgellm.text.turns import OngoingConversation, Overflow, turn_starts, without_oldest
from edgellm.tools.calls import checked_choice

logger = logging.getLogger("edgellm.sessions")

#: Of a message: text, or a list of parts.
Content = str | Sequence[dict[str, Any]]
#: Of the context: a conversation that fills so much of it is warned of.
NEARLY_FULL = 0.9


@dataclass(frozen=True)
class _OpenTurn:
    """Messages whose answer is growing, what of the conversation came before it in the prompt, and whether whoever
    asked has given it up since."""

    before: list[dict[str, Any]]
    messages: list[dict[str, Any]]
    request_state: RequestState
    given_up: threading.Event

    @property
    def unwanted(self) -> bool:
        return self.request_state.cancelled or self.given_up.is_set()


class Session:
    """A conversation with a model: each message is answered with all that came before.

    What is said again is not computed again while the KV cache holds it (`usage.reused_tokens`). An answer that was cut
    short stays as far as it came; a message whose answer failed, or did not begin, is taken back. After an answer that
    was cancelled, or let go of, the conversation goes on at once: the next message waits for its last round.

    A conversation may go on for ever. Before each answer room is kept for its `max_tokens`, or else for a quarter of
    the context. Where that is not there, the oldest turns leave at once, down to about half of the context; the system
    prompt and the newest turns stay. The response tells (`dropped_turns`), `messages` are what stayed. With the
    `overflow` "error" nothing leaves. A message that does not fit raises ContextError and changes nothing: with "error"
    with all that was said, with "drop_oldest" with the system prompt alone.

    `params`, `adapter` and `priority` may be set: they are those of the next answers; `warn`, too, which is called with
    a sentence where an answer filled nine tenths of the context (by default it goes to the log).
    """

    def __init__(
        self,
        ask: Callable[[Request, OngoingConversation], Generation],
        system: str | None = None,
        params: SamplingParams | None = None,
        adapter: str | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: Any = None,
        parallel_tool_calls: bool | None = None,
        template_variables: Mapping[str, Any] | None = None,
        overflow: Overflow = "drop_oldest",
        priority: int = 0,
    ) -> None:
        """`ask` queues a request that goes on a conversation, perhaps without the oldest turns.

        It is answered with the model's default system prompt where `system` is None, without any where it is "". Raises
        RequestError for malformed tools or template variables.
        """
        check_choices(params, adapter)
        if system is not None:
            checked_messages([{"role": "system", "content": system}], takes_images=True)
        self._ask, self._conversation = ask, OngoingConversation(overflow)
        self.params, self.adapter, self.priority = params, adapter, checked_priority(priority)
        self._tools, self._variables = checked_tools(tools), checked_variables(template_variables)
        checked_choice(self._tools, tool_choice, parallel_tool_calls)
        self._parallel_tool_calls = parallel_tool_calls
        #: The `tool_choice` of the next answers.
        self.tool_choice = tool_choice
        self.warn: Callable[[str], object] = logger.warning
        self._messages: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
        self._open: _OpenTurn | None = None
        self._lock = threading.RLock()  # `warn` may change the conversation

    @property
    def messages(self) -> list[dict[str, Any]]:
        """What was said so far, without a message whose answer is still growing; a copy."""
        with self._lock:
            self._take_in()
            return [dict(message) for message in self._messages]

    @property
    def system(self) -> Any:
        """The system prompt, text or parts; "" for none, None for the model's default. Set, it is that of all that was
        said.

        Setting it raises RequestError while an answer is growing.
        """
        messages = self.messages
        return messages[0]["content"] if messages and messages[0]["role"] == "system" else None

    @system.setter
    def system(self, content: Any) -> None:
        with self._lock:
            self._settle()
            first = self._messages[:1]
            behind = self._messages[1:] if first and first[0]["role"] == "system" else self._messages
            self._messages = behind if content is None else [{"role": "system", "content": content}, *behind]

    def replace(self, messages: Sequence[dict[str, Any]]) -> None:
        """Go on as if this had been said. Raises RequestError for what are no messages, and while an answer grows."""
        if not (isinstance(messages, (list, tuple)) and not messages):
            checked_messages(messages, takes_images=True)
        with self._lock:
            self._settle()
            self._messages = [dict(message) for message in messages]

    def trim(self, turns: int) -> int:
        """Forget all but the system prompt and the last `turns`: messages of the user, with all that answers them.

        Returns how many turns left. Raises RequestError while an answer is growing.
        """
        if isinstance(turns, bool) or not isinstance(turns, int) or turns < 0:
            raise RequestError(f"turns is {turns!r}: expected how many to keep, a whole number from 0")
        with self._lock:
            self._settle()
            starts = turn_starts(self._messages)
            leaving = max(0, len(starts) - turns)
            ends = [*starts, len(self._messages)]
            self._messages = without_oldest(self._messages, ends[leaving] - ends[0])
            return leaving

    def undo(self) -> list[dict[str, Any]]:
        """Take the last turn back; returns its messages. Raises RequestError where there is none, and while an answer
        is growing."""
        with self._lock:
            self._settle()
            starts = turn_starts(self._messages)
            if not starts:
                raise RequestError("nothing was said yet: there is no turn to take back")
            turn = self._messages[starts[-1] :]
            self._messages = self._messages[: starts[-1]]
            return turn

    def __repr__(self) -> str:
        if self._lock.acquire(blocking=False):  # a debugger may ask at any time
            self._take_in()
            self._lock.release()
        count, state = len(self._messages), "idle" if self._open is None else "being answered"
        return f"<Session: {count} message{'' if count == 1 else 's'}, {state}>"

    def stream(
        self,
        content: Content,
        params: SamplingParams | None = None,
        deadline: float | None = None,
        *,
        stop_when: StopWhen | None = None,
        structure: Any = None,
        response_format: Any = None,
    ) -> Generation:
        """Say something: text, or parts of a message, images among them. Returns the answer as it grows.

        Instead of a message of the user it may be the results of calls: a list of messages of the role "tool".

        `structure`, or `response_format`, is that of this answer alone (see `Request`).

        The conversation goes on with what of the answer stands where `stop_when` ended it (see `Request`). Raises
        RequestError while the one before is growing.
        """
        params = self._asked_params(params, structure, response_format)
        return self._say(content, params, deadline, stop_when, threading.Event())

    def _asked_params(
        self, params: SamplingParams | None, structure: Any, response_format: Any
    ) -> SamplingParams | None:
        """The parameters of one answer that has a structure of its own; as given where it has none."""
        if structure is None and response_format is None:
            return params
        return with_structure(self.params if params is None else params, structure, response_format)

    def retry(
        self,
        params: SamplingParams | None = None,
        deadline: float | None = None,
        *,
        stop_when: StopWhen | None = None,
    ) -> Generation:
        """Answer the last message again, with a new seed where tokens are drawn and none is given. Returns the answer
        as it grows, which takes the place of the one before once there is something of it.

        Raises RequestError where there is no message of the user, and while an answer is growing.
        """
        return self._retry(params, deadline, stop_when, threading.Event())

    def _retry(
        self,
        params: SamplingParams | None,
        deadline: float | None,
        stop_when: StopWhen | None,
        given_up: threading.Event,
    ) -> Generation:
        """As `retry`; `given_up` as of `_say`."""
        with self._ready_for_more(given_up):
            places = [place for place, message in enumerate(self._messages) if message["role"] == "user"]
            if not places:
                raise RequestError("nothing was asked yet: there is no answer to give again")
            last = places[-1]
            asked = self._messages[last : last + 1]
            return self._answer(self._messages[:last], asked, params, deadline, stop_when, given_up)

    def _say(
        self,
        content: Content,
        params: SamplingParams | None,
        deadline: float | None,
        stop_when: StopWhen | None,
        given_up: threading.Event,
    ) -> Generation:
        """As `stream`. Who no longer waits for this call to return, as it goes on in another thread, sets `given_up`:
        what is not said yet stays unsaid (a RequestError), and the answer to what is said counts as let go of.
        """
        with self._ready_for_more(given_up):
            return self._answer(self._messages, _messages_of(content), params, deadline, stop_when, given_up)

    @contextmanager
    def _ready_for_more(self, given_up: threading.Event) -> Iterator[None]:
        """The lock, once the latest answer has ended; RequestError where it grows, or what comes was given up."""
        with self._lock:
            if given_up.is_set():
                raise RequestError("the message was given up before it was said")
            self._settle()
            yield

    def send(
        self,
        content: Content,
        params: SamplingParams | None = None,
        deadline: float | None = None,
        *,
        stop_when: StopWhen | None = None,
        structure: Any = None,
        response_format: Any = None,
    ) -> Response:
        """Say something and wait for the answer; an interrupt while waiting cancels it."""
        with self.stream(
            content, params, deadline, stop_when=stop_when, structure=structure, response_format=response_format
        ) as generation:
            response = generation.result()
        self.take_in()
        return response

    def take_in(self) -> None:
        """Remember an answer that has ended now, and not only when the session is used again."""
        with self._lock:
            self._take_in()

    def _answer(
        self,
        before: list[dict[str, Any]],
        messages: list[dict[str, Any]],
        params: SamplingParams | None,
        deadline: float | None,
        stop_when: StopWhen | None,
        given_up: threading.Event,
    ) -> Generation:
        """Ask for the answer to messages behind others; they are the conversation once it is there."""
        request = Request(
            messages=[*before, *messages],
            params=self.params if params is None else params,
            adapter=self.adapter,
            deadline=deadline,
            tools=self._tools,
            tool_choice=self.tool_choice,
            parallel_tool_calls=self._parallel_tool_calls,
            template_variables=self._variables,
            stop_when=stop_when,
            priority=self.priority,
        )
        generation = self._ask(request, self._conversation)
        kept = without_oldest(before, generation.request_state.sequence.dropped.messages)
        self._open = _OpenTurn(kept, messages, generation.request_state, given_up)
        return generation

    def _settle(self) -> None:
        if self._open is not None and self._open.unwanted:
            self._open.request_state.cancel()  # what was let go of may wait in the queue still
            self._open.request_state.wait()
        self._take_in()
        if self._open is not None:
            raise RequestError("the last message is still being answered: wait for its result, or cancel it")

    def _take_in(self) -> None:
        """Remember the latest message and its answer, once that has ended."""
        if self._open is None or not self._open.request_state.ended:
            return
        if not self._open.request_state.look_ahead_now():  # what is remembered is what `stop_when` lets stand
            return
        turn, self._open = self._open, None
        response = turn.request_state.response
        if response is not None and response.is_answered:  # of a failure whoever waits for the answer is told
            self._messages = [*turn.before, *turn.messages, response.as_message()]
            self._warn_of_full_context(response, turn.request_state.sequence.context_length)

    def _warn_of_full_context(self, response: Response, context_length: int) -> None:
        used = context_length - response.usage.context_left
        if used >= NEARLY_FULL * context_length and response.finish_reason != "context":  # which says it, too
            drops = self._conversation.overflow == "drop_oldest"
            soon = "its oldest turns leave soon" if drops else "messages will not fit soon"
            self.warn(f"the conversation fills {used} of the {context_length} tokens of the context: {soon}")


def _messages_of(content: Content) -> list[dict[str, Any]]:
    """What a session is told, as messages: the results of calls as they are, all else as a message of the user."""
    if isinstance(content, (list, tuple)) and content and all(_is_result(each) for each in content):
        return [dict(each) for each in content]
    return [{"role": "user", "content": content}]


def _is_result(part: Any) -> bool:
    return isinstance(part, dict) and part.get("role") == "tool"
