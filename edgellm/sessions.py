"""`Session`: a conversation that remembers what was said."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from edgellm.errors import RequestError
from edgellm.generation import Answering, Generation
from edgellm.requests import Response, check_choices
from edgellm.sampling_params import SamplingParams
from edgellm.text.messages import checked_messages

#: Of a message: text, or a list of parts.
Content = str | Sequence[dict[str, Any]]


@dataclass(frozen=True)
class _Asked:
    """A message whose answer is growing, and whether whoever asked has given it up since."""

    message: dict[str, Any]
    answering: Answering
    given_up: threading.Event

    @property
    def unwanted(self) -> bool:
        return self.answering.cancelled or self.given_up.is_set()


class Session:
    """A conversation with a model: each message is answered with all that came before.

    What is said again is not computed again while the KV cache holds it (`usage.reused_tokens`). An answer that was cut
    short stays as far as it came; a message whose answer failed, or did not begin, is taken back. After an answer that
    was cancelled, or let go of, the conversation goes on at once: the next message waits for its last round.
    """

    def __init__(
        self,
        ask: Callable[..., Generation],
        system: str | None = None,
        params: SamplingParams | None = None,
        adapter: str | None = None,
    ) -> None:
        """`ask` answers messages (`LLM.stream_chat`)."""
        check_choices(params, adapter)
        if system is not None:
            checked_messages([{"role": "system", "content": system}], takes_images=True)
        self._ask, self._params, self._adapter = ask, params, adapter
        self._messages: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
        self._open: _Asked | None = None
        self._lock = threading.Lock()

    @property
    def messages(self) -> list[dict[str, Any]]:
        """What was said so far, without a message whose answer is still growing; a copy."""
        with self._lock:
            self._take_in()
            return [dict(message) for message in self._messages]

    def replace(self, messages: Sequence[dict[str, Any]]) -> None:
        """Go on as if this had been said. Raises RequestError for what are no messages, and while an answer grows."""
        if not (isinstance(messages, (list, tuple)) and not messages):
            checked_messages(messages, takes_images=True)
        with self._lock:
            self._settle()
            self._messages = [dict(message) for message in messages]

    def __repr__(self) -> str:
        if self._lock.acquire(blocking=False):  # a debugger may ask at any time
            self._take_in()
            self._lock.release()
        count, state = len(self._messages), "idle" if self._open is None else "being answered"
        return f"<Session: {count} message{'' if count == 1 else 's'}, {state}>"

    def stream(
        self, content: Content, params: SamplingParams | None = None, deadline: float | None = None
    ) -> Generation:
        """Say something: text, or parts of a message, images among them. Returns the answer as it grows.

        Raises RequestError while the one before is growing.
        """
        return self._say(content, params, deadline, threading.Event())

    def _say(
        self, content: Content, params: SamplingParams | None, deadline: float | None, given_up: threading.Event
    ) -> Generation:
        """As `stream`. Who no longer waits for this call to return, as it goes on in another thread, sets `given_up`:
        what is not said yet stays unsaid (a RequestError), and the answer to what is said counts as let go of.
        """
        with self._lock:
            if given_up.is_set():
                raise RequestError("the message was given up before it was said")
            self._settle()
            message = {"role": "user", "content": content}
            generation = self._ask(
                [*self._messages, message],
                self._params if params is None else params,
                adapter=self._adapter,
                deadline=deadline,
            )
            self._open = _Asked(message, generation.answering, given_up)
            return generation

    def send(self, content: Content, params: SamplingParams | None = None, deadline: float | None = None) -> Response:
        """Say something and wait for the answer; an interrupt while waiting cancels it."""
        with self.stream(content, params, deadline) as generation:
            return generation.result()

    def _settle(self) -> None:
        if self._open is not None and self._open.unwanted:
            self._open.answering.cancel()  # what was let go of may wait in the queue still
            self._open.answering.wait()
        self._take_in()
        if self._open is not None:
            raise RequestError("the last message is still being answered: wait for its result, or cancel it")

    def _take_in(self) -> None:
        """Remember the latest message and its answer, once that has ended."""
        if self._open is None or not self._open.answering.ended:
            return
        asked, self._open = self._open, None
        response = asked.answering.response
        if response is not None and response.text:  # of a failure whoever waits for the answer is told
            self._messages += [asked.message, {"role": "assistant", "content": response.text}]
