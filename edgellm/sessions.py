"""`Session`: a conversation that remembers what was said."""

from __future__ import annotations

import copy
import inspect
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from edgellm.errors import RequestError, is_whole, require
from edgellm.generation import Generation, RequestState
from edgellm.requests import Request, RequestOptions, Response, TurnOptions
from edgellm.sampling_params import SamplingParams
from edgellm.text.messages import ENCODER_NAMES, checked_messages
from edgellm.text.turns import OngoingConversation, Overflow, stays, turn_starts, without_oldest
from edgellm.tool_calls.functions import call_arguments, functions_among, result_message

if TYPE_CHECKING:
    from typing_extensions import Unpack

logger = logging.getLogger("edgellm.sessions")

#: Of a message: text, or a list of parts.
Content = str | Sequence[dict[str, Any]]
#: Of the context: a conversation that fills so much of it is warned of.
NEARLY_FULL = 0.9
#: An answer on its way, and a whole one: `Generation` and `Response`, or `AsyncGeneration` and what gives a `Response`.
Growing = TypeVar("Growing")
Answer = TypeVar("Answer")
#: What of a conversation a message is said behind, and the message.
Turn = Callable[[], tuple[list[dict[str, Any]], list[dict[str, Any]]]]
#: Of one run, where nobody says otherwise.
MOST_ANSWERS = 10


@dataclass(frozen=True)
class _OpenTurn:
    """Messages whose answer is growing, what of the conversation came before it in the prompt, and whether whoever
    asked has given it up since."""

    before: list[dict[str, Any]]
    messages: list[dict[str, Any]]
    request_state: RequestState
    given_up: threading.Event


class Conversation(Generic[Growing, Answer]):
    """What `Session` and `AsyncSession` have in common."""

    _awaits = False  # whether functions of a run may be coroutine functions

    def __init__(
        self,
        ask: Callable[[Request, OngoingConversation], Generation],
        system: str | None = None,
        params: SamplingParams | None = None,
        adapter: str | None = None,
        *,
        overflow: Overflow = "drop_oldest",
        **options: Unpack[TurnOptions],
    ) -> None:
        """`ask` queues a request that goes on a conversation, perhaps without the oldest turns.

        It is answered with the model's default system prompt where `system` is None, without any where it is "". Raises
        RequestError for malformed options.
        """
        first = Request.of(None, (), params, adapter, **options)
        self._ask, self._conversation = ask, OngoingConversation(overflow)
        self.params, self.adapter, self.priority = first.params, adapter, first.priority
        #: The `tool_choice` of the next answers.
        self.tool_choice = first.tool_choice
        self._options: TurnOptions = {
            "tools": first.tools,
            "parallel_tool_calls": first.parallel_tool_calls,
            "template_variables": first.template_variables,
            "stop_when": first.stop_when,
        }
        self._functions = functions_among(options.get("tools"))
        self.warn: Callable[[str], object] = logger.warning
        self._messages: list[dict[str, Any]] = []
        self._open: _OpenTurn | None = None
        self._runs = False
        self._lock = threading.RLock()  # `warn` may change the conversation
        self.system = system

    @property
    def messages(self) -> list[dict[str, Any]]:
        """What was said so far, without a message whose answer is still growing; a copy."""
        with self._lock:
            self.take_in()
            return [dict(message) for message in self._messages]

    @property
    def system(self) -> Any:
        """The system prompt, text or parts; "" for none, None for the model's default. Set, it is that of all that was
        said.

        Setting it raises RequestError for what is none, and while an answer is growing.
        """
        messages = self.messages
        return messages[0]["content"] if messages and messages[0]["role"] == "system" else None

    @system.setter
    def system(self, content: Any) -> None:
        with self._lock:
            self._settle()
            first = self._messages[:1]
            behind = self._messages[1:] if first and first[0]["role"] == "system" else self._messages
            told = [] if content is None else [{"role": "system", "content": _kept(content)}]
            if told:
                checked_messages(told, media=ENCODER_NAMES)
            self._messages = [*told, *behind]

    def replace(self, messages: Sequence[dict[str, Any]]) -> None:
        """Go on as if this had been said. Raises RequestError for what are no messages, and while an answer grows."""
        if not (isinstance(messages, (list, tuple)) and not messages):
            checked_messages(messages, media=ENCODER_NAMES)
        with self._lock:
            self._settle()
            self._messages = [_kept(message) for message in messages]

    def trim(self, turns: int) -> int:
        """Forget all but system messages and the last `turns`: messages of the user, with all that answers them.

        Returns how many turns left. Raises RequestError while an answer is growing.
        """
        require(is_whole(turns, 0), "turns", turns, "how many to keep, a whole number from 0")
        with self._lock:
            self._settle()
            starts = turn_starts(self._messages)
            leaving = max(0, len(starts) - turns)
            ends = [*starts, len(self._messages)]
            self._messages = list(compress(self._messages, stays(self._messages, ends[leaving])))
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
            self.take_in()
            self._lock.release()
        count, state = len(self._messages), "being answered" if self._open or self._runs else "idle"
        return f"<{type(self).__name__}: {count} message{'' if count == 1 else 's'}, {state}>"

    def stream(
        self,
        content: Content,
        params: SamplingParams | None = None,
        deadline: float | None = None,
        **options: Unpack[TurnOptions],
    ) -> Growing:
        """Say something: text, or parts of a message, images among them. Gives the answer as it grows, a `Generation`;
        of an `AsyncSession` an `AsyncGeneration`: it is said when that is first iterated, awaited or entered.

        Instead of a message of the user it may be the results of calls: a list of messages of the role "tool".

        The conversation goes on with what of the answer stands where `stop_when` ended it (see `Request`). Raises
        RequestError while the one before is growing.
        """
        asked: RequestOptions = {**options, "deadline": deadline}
        return self._asked(lambda: (self._messages, _messages_of(content)), params, asked)

    def send(
        self,
        content: Content,
        params: SamplingParams | None = None,
        deadline: float | None = None,
        **options: Unpack[TurnOptions],
    ) -> Answer:
        """Say something and wait for the answer, a `Response`; an interrupt while waiting cancels it."""
        return self._result(self.stream(content, params, deadline, **options))

    def retry(
        self, params: SamplingParams | None = None, deadline: float | None = None, **options: Unpack[TurnOptions]
    ) -> Growing:
        """Answer the last message again, with a new seed where tokens are drawn and none is given. Gives the answer as
        `stream` does; it takes the place of the one before once there is something of it.

        Raises RequestError where there is no message of the user, and while an answer is growing.
        """
        asked: RequestOptions = {**options, "deadline": deadline}
        return self._asked(self._last_question, params, asked)

    def run(
        self,
        content: Content,
        params: SamplingParams | None = None,
        deadline: float | None = None,
        *,
        max_answers: int = MOST_ANSWERS,
        raise_errors: bool = False,
        **options: Unpack[TurnOptions],
    ) -> Answer:
        """Say something, call the functions among the `tools` that the model asks for, tell it what they returned, and
        so on until it answers without a call; gives that answer, a `Response`.

        Functions are called one after the other, in this thread; an `AsyncSession` awaits coroutine functions, and
        calls others in a thread. Results are told as text or JSON (see `result_message` of
        `edgellm.tool_calls.functions`). What a function raises is told to the model as "error: ..." and logged, or
        raised with `raise_errors`. A call of a tool that is no function is for the caller: the answer with it is given,
        as is the last of `max_answers`. `deadline` is of all answers together, the `params` and `options` are of each;
        `tool_choice` is of the first.

        All of it is remembered, or nothing: what is raised, an interrupt, too, leaves the conversation as it was.
        """
        return self._to_its_end(self._run(content, params, deadline, max_answers, raise_errors, options))

    def _asked(self, turn: Turn, params: SamplingParams | None, options: RequestOptions) -> Growing:
        """What `_ask_turn` gives, as one who waits for it sees it."""
        raise NotImplementedError

    def _result(self, growing: Growing) -> Answer:
        raise NotImplementedError

    def _to_its_end(self, running: Coroutine[Any, Any, Response]) -> Answer:
        raise NotImplementedError

    def _call(self, function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """What a function of a run returns, or what gives it when it is awaited."""
        raise NotImplementedError

    def _last_question(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """What was said before the last message of the user, and that message."""
        places = [place for place, message in enumerate(self._messages) if message["role"] == "user"]
        if not places:
            raise RequestError("nothing was asked yet: there is no answer to give again")
        return self._messages[: places[-1]], self._messages[places[-1] :][:1]

    def _ask_turn(
        self, given_up: threading.Event, turn: Turn, params: SamplingParams | None, options: RequestOptions
    ) -> Generation:
        """Ask for the answer to messages behind others, once the latest answer has ended; RequestError where it grows.

        Who no longer waits for this call to return, as it goes on in another thread, sets `given_up`: what is not said
        yet stays unsaid (a RequestError), and the answer to what is said counts as let go of.
        """
        with self._lock:
            if given_up.is_set():
                raise RequestError("the message was given up before it was said")
            self._settle()
            before, messages = turn()
            own: RequestOptions = {"tool_choice": self.tool_choice, "priority": self.priority, **self._options}
            asked: RequestOptions = {**own, **options}
            params = self.params if params is None else params
            request = Request.of(None, [*before, *messages], params, self.adapter, **asked)
            generation = self._ask(request, self._conversation)
            kept = without_oldest(before, generation.request_state.sequence.dropped.messages)
            self._open = _OpenTurn(kept, messages, generation.request_state, given_up)
            return generation

    async def _run(
        self,
        content: Content,
        params: SamplingParams | None,
        deadline: float | None,
        max_answers: int,
        raise_errors: bool,
        options: TurnOptions,
    ) -> Response:
        """As `run`. All is said in a copy of this session, which takes over what was said there once there is
        an answer."""
        require(is_whole(max_answers, 1), "max_answers", max_answers, "a whole number of at least 1")
        functions = functions_among(options["tools"]) if "tools" in options else self._functions
        waits = [name for name, function in functions.items() if inspect.iscoroutinefunction(function)]
        if waits and not self._awaits:
            raise RequestError(f"the function {waits[0]} is a coroutine function: AsyncSession.run awaits such")
        with self._lock:
            self._check_runs()
            self._runs, fork = True, copy.copy(self)
            fork._runs, fork._lock = False, threading.RLock()
        try:
            begun, left = time.monotonic(), deadline
            for asked in range(1, max_answers + 1):
                response = await _waited_for(fork.send(content, params, left, **options))
                calls = [each for each in response.tool_calls if each.complete]  # as the conversation has them
                known = all(each.name in functions for each in calls)
                if response.finish_reason != "tool_calls" or not known or asked == max_answers:
                    break
                results = []
                for each in calls:
                    function = functions[each.name]
                    try:
                        result = await _waited_for(self._call(function, call_arguments(function, each)))
                    except Exception as error:
                        if raise_errors:
                            raise
                        logger.warning("the function %s failed: %r", each.name, error, exc_info=error)
                        result = f"error: {str(error) or type(error).__name__}"
                    results.append(result_message(each, result))
                content, options = results, {**options, "tool_choice": None}  # a call that was required was made
                left = None if deadline is None else deadline - (time.monotonic() - begun)
            fork.take_in()
            if response.is_answered:
                with self._lock:
                    self._messages, self._open = fork._messages, None
            return response
        finally:
            self._runs = False

    def _check_runs(self) -> None:
        if self._runs:
            raise RequestError("the last message is still being answered: wait for the end of its run")

    def _settle(self) -> None:
        self._check_runs()
        latest = self._open
        if latest is not None and (latest.request_state.cancelled or latest.given_up.is_set()):
            latest.request_state.cancel()  # what was let go of may wait in the queue still
            latest.request_state.wait()
        self.take_in()
        if self._open is not None:
            raise RequestError("the last message is still being answered: wait for its result, or cancel it")

    def take_in(self) -> None:
        """Remember the latest message and its answer, once that has ended: now, and not only when the session is used
        again."""
        with self._lock:
            if self._open is None or not self._open.request_state.ended:
                return
            if not self._open.request_state.look_ahead(waits=False):  # what `stop_when` lets stand is remembered
                return
            turn, self._open = self._open, None
            response = turn.request_state.response
            if response is not None and response.is_answered:  # of a failure whoever waits for the answer is told
                self._messages = [*turn.before, *turn.messages, response.as_message()]
                context = turn.request_state.sequence.context_length
                used = context - response.usage.context_left
                if used >= NEARLY_FULL * context and response.finish_reason != "context":  # which says it, too
                    drops = self._conversation.overflow == "drop_oldest"
                    soon = "its oldest turns leave soon" if drops else "messages will not fit soon"
                    self.warn(f"the conversation fills {used} of the {context} tokens of the context: {soon}")


class Session(Conversation[Generation, Response]):
    """A conversation with a model: each message is answered with all that came before.

    What is said again is not computed again while the KV cache holds it (`usage.reused_tokens`). An answer that was cut
    short stays as far as it came; a message whose answer failed, or did not begin, is taken back. After an answer that
    was cancelled, or let go of, the conversation goes on at once: the next message waits for its last round.

    A conversation may go on for ever. Before each answer room is kept for its `max_tokens`, or else for a quarter of
    the context. Where that is not there, the oldest turns leave at once, down to about half of the context; the system
    prompt and the newest turns stay. The response tells (`dropped_turns`), `messages` are what stayed. With the
    `overflow` "error" nothing leaves. A message that does not fit raises ContextError and changes nothing: with "error"
    with all that was said, with "drop_oldest" with the system prompt alone.

    `params`, `adapter`, `priority` and `tool_choice` may be set: they are those of the next answers; `warn`, too, which
    is called with a sentence where an answer filled nine tenths of the context (by default it goes to the log). What
    `options` (see `TurnOptions`) say of one answer goes before that.
    """

    def _asked(self, *turn: Any) -> Generation:
        return self._ask_turn(threading.Event(), *turn)

    def _result(self, growing: Generation) -> Response:
        with growing:
            response = growing.result()
        self.take_in()
        return response

    def _to_its_end(self, running: Coroutine[Any, Any, Response]) -> Response:
        try:
            running.send(None)  # nothing of ours in it waits for an event loop
        except StopIteration as ended:
            return ended.value
        running.close()
        raise RequestError("a function has returned what waits for an event loop: AsyncSession.run awaits such")

    def _call(self, function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        return function(**arguments)


async def _waited_for(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def _messages_of(content: Content) -> list[dict[str, Any]]:
    """What a session is told, as messages: the results of calls as they are, all else as a message of the user."""
    parts = content if isinstance(content, (list, tuple)) else ()
    if parts and all(isinstance(part, dict) and part.get("role") == "tool" for part in parts):
        return _kept(parts)
    return [{"role": "user", "content": _kept(content)}]


def _kept(value: Any, depth: int = 6) -> Any:
    """What was said as it is now: the next frame in a camera's buffer does not change what a conversation was shown.
    Frames of a video, with their times, lie five deep in a message."""
    if isinstance(value, (list, tuple)) and depth:
        kept = [_kept(each, depth - 1) for each in value]
        return kept if isinstance(value, list) else tuple(kept)
    if isinstance(value, dict) and depth:
        return {key: _kept(each, depth - 1) for key, each in value.items()}
    return value.copy() if isinstance(value, (np.ndarray, bytearray)) else value
