"""Answers as clients of OpenAI's API read them: reasoning apart, whole or in pieces, with usage and
log-probabilities."""

from __future__ import annotations

import json
import sys
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from edgellm.decoding.preparation import continued_text
from edgellm.decoding.sequence import DecodingSequence
from edgellm.http.errors import HTTPError
from edgellm.http.fields import ParsedRequest
from edgellm.requests import Chunk, Request, Response, TokenLogprobs
from edgellm.structure.reasoning import ReasoningMarks, ReasoningState, channel_name, reasoning_marks, reasoning_state
from edgellm.text.output import OutputText
from edgellm.text.tokenizer import Tokenizer
from edgellm.tool_calls.calls import ToolCall, ToolCallDelta
from edgellm.tool_calls.harmony import HarmonyReader

#: What finish reasons are called in OpenAI's API; "deadline" and "context" are told beside it, as `stop_reason`.
FINISH_REASONS = {"stop_string": "stop", "context": "length", "deadline": "length"}
FINISH_REASONS |= {same: same for same in ("stop", "length", "tool_calls")}
#: JSON has no infinity: less than any log-probability of a token that could be drawn.
LEAST_LOGPROB = -9999.0


@dataclass(frozen=True)
class Piece:
    """What has come of an answer, in this order; `logprobs` are of all but what the model thinks."""

    reasoning: str = ""
    content: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    calls: tuple[ToolCallDelta, ...] = ()


class AnswerReader:
    """Parts an answer, in pieces as they come, into what the model thinks and what it says, without the space around
    the reasoning. Tokens decide, not text: what only looks like a mark is none."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        answer: OutputText,
        marks: ReasoningMarks | None,
        state: ReasoningState,
        shown_ids: Iterable[int] = (),
        name: str = "",
    ) -> None:
        """`answer` is the engine's, which knows the tokens that end it without being a part of it; `state` is that of
        the reasoning behind the prompt, of no account without `marks`. `shown_ids` are special tokens whose text is in
        the answer's. A `name` that the reasoning begins with is no part of it."""
        self._text_of = partial(tokenizer.decode, shown_ids=frozenset(shown_ids))
        self._ends_at, self._marks = answer.ends_at, marks
        self._state: ReasoningState = "closed" if marks is None else state
        self._ids: list[int] = []  # as long as the model may be thinking
        self._tokens = self._characters = 0  # that were read
        self._thought_from = 0  # the rest are characters of the answer, and a token
        self._thought_to = self._said_from = 0 if self._state == "closed" else sys.maxsize
        self._first_said = self._said_from
        self._held: str | None = None  # space at the end of what was thought so far, None before there is anything
        self._strips = False
        self._name, self._opening = name, ""  # of what was thought, where it may be the name
        #: How many tokens the model has thought, the marks among them.
        self.reasoning_tokens = 0

    @classmethod
    def of(cls, tokenizer: Tokenizer, sequence: DecodingSequence, request: Request) -> AnswerReader:
        """The reader of the answer to a request; a prompt without messages is continued with whatever comes."""
        if isinstance(sequence.calls, HarmonyReader):
            return _ChannelReader(tokenizer, sequence.answer, sequence.calls)
        marks = None if request.messages is None else reasoning_marks(tokenizer)
        state = reasoning_state(tokenizer, marks, sequence.prompt_ids, continued_text(request))
        shown_ids = () if sequence.calls is None else sequence.calls.shown_ids
        name = channel_name(tokenizer, marks, sequence.prompt_ids, state)
        return cls(tokenizer, sequence.answer, marks, state, shown_ids, name)

    def read(self, chunk: Chunk) -> Piece:
        """What a chunk of the answer has."""
        if self._state != "closed":
            self._ids += chunk.token_ids
            self._find_marks(len(self._ids) - len(chunk.token_ids))
        begin, text = self._characters, chunk.text
        logprobs = chunk.logprobs[max(0, self._first_said - self._tokens) :]
        self._tokens, self._characters = self._tokens + len(chunk.token_ids), begin + len(text)
        thought = text[max(0, self._thought_from - begin) : max(0, self._thought_to - begin)]
        said = text[max(0, self._said_from - begin) :]
        if self._strips:
            said = said.lstrip()
            self._strips = not said
        logprobs = tuple(each for each in logprobs if not self._ends_at(each.token_id))
        return Piece(self._shown(thought), said, logprobs, chunk.tool_calls)

    def _find_marks(self, read: int) -> None:
        """Note where reasoning begins and ends, of tokens of which so many were `read`: they come before their text."""
        marks, ids = self._marks, self._ids
        assert marks is not None
        if self._state == "undecided" and ids:
            self._state = "open" if ids[0] == marks.begin else "closed"
            if self._state == "closed":
                self._thought_to = self._said_from = self._first_said = 0
            else:
                self._thought_from = len(self._text_of(ids[:1]))
        if self._state == "open":
            self.reasoning_tokens = len(ids)
            if marks.end in ids[read:]:
                end = ids.index(marks.end, read)
                self._thought_to, self._said_from = (len(self._text_of(ids[: end + more])) for more in (0, 1))
                self.reasoning_tokens = self._first_said = end + 1
                self._state, self._strips = "closed", True

    def _shown(self, thought: str) -> str:
        """Reasoning as it is shown: without its name, and space before it, and with that at its end once there is
        more."""
        if self._name:
            self._opening += thought
            if self._name.startswith(self._opening):
                return ""
            thought, self._name = self._opening.removeprefix(self._name), ""
        text = thought.lstrip() if self._held is None else self._held + thought
        shown = text.rstrip()
        if shown or self._held is not None:
            self._held = text[len(shown) :]
        return shown


class _ChannelReader(AnswerReader):
    """Of a model that writes in channels: what it thinks is no part of the text."""

    def __init__(self, tokenizer: Tokenizer, answer: OutputText, channels: HarmonyReader) -> None:
        super().__init__(tokenizer, answer, None, "closed")
        self._channels, self._thoughts = channels, 0

    def read(self, chunk: Chunk) -> Piece:
        said = self._channels.said[self._tokens : self._tokens + len(chunk.token_ids)]
        self._tokens += len(chunk.token_ids)
        thoughts = self._channels.thoughts[self._thoughts :]
        self._thoughts += len(thoughts)
        self.reasoning_tokens = self._channels.thinking_tokens
        logprobs = tuple(each for each, is_said in zip(chunk.logprobs, said, strict=False) if is_said)
        return Piece("".join(thoughts), chunk.text, logprobs, chunk.tool_calls)


def is_cut(response: Response) -> bool:
    """Whether an answer ended where it might have gone on, by what OpenAI's API calls its length."""
    return FINISH_REASONS.get(response.finish_reason) == "length"


def token_text(tokenizer: Tokenizer, token_id: int) -> tuple[str, list[int]]:
    if (data := tokenizer.token_bytes(token_id)) is not None:
        return data.decode("utf-8", "replace"), list(data)
    text = (tokenizer.id_to_token(token_id) or "").replace("\u2581", " ")
    return text, list(text.encode())


def logprob_object(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    text, data = token_text(tokenizer, token_id)
    return {"token": text, "logprob": max(logprob, LEAST_LOGPROB), "bytes": data}


def logprob_objects(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
    return [
        logprob_object(tokenizer, each.token_id, each.logprob)
        | {"top_logprobs": [logprob_object(tokenizer, *pair) for pair in each.top]}
        for each in logprobs
    ]


def call_object(delta: ToolCallDelta) -> dict[str, Any]:
    """A call of a chat's answer, or a piece of one: the first has id and name."""
    if delta.name is None:
        return {"function": {"arguments": delta.arguments}}
    return ToolCall(delta.id or "", delta.name, delta.arguments).as_message()


def event(value: Any, name: str | None = None) -> bytes:
    data = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return (f"data: {data}\n\n" if name is None else f"event: {name}\ndata: {data}\n\n").encode()


class Writer:
    """Writes the answers to one request in the form of an endpoint; `index` says which of them something is of."""

    media_type = "text/event-stream"

    def __init__(
        self,
        asked: ParsedRequest,
        tokenizer: Tokenizer,
        readers: Sequence[AnswerReader],
        sequences: Sequence[DecodingSequence],
    ) -> None:
        """`sequences` are the engine's, whose prompts a stream may tell before they have ended."""
        self._asked, self._tokenizer, self._readers, self._sequences = asked, tokenizer, readers, sequences

    def whole(self, pieces: Sequence[Piece], responses: Sequence[Response]) -> dict[str, Any] | str:
        """The answers to a request that does not stream: JSON, or text as it is."""
        raise NotImplementedError

    def begin(self) -> Iterator[bytes]:
        """The first events of a stream, sent with its first piece."""
        return iter(())

    def piece(self, index: int, piece: Piece) -> Iterator[bytes]:
        """The events of a piece."""
        raise NotImplementedError

    def ended(self, index: int, response: Response) -> Iterator[bytes]:
        """The events of an answer's end."""
        raise NotImplementedError

    def end(self, responses: Sequence[Response]) -> Iterator[bytes]:
        """The last events, when all answers have ended."""
        return iter(())

    def failure(self, error: HTTPError) -> Iterator[bytes]:
        """The events of a stream that fails."""
        yield event(error.body())


class CompletionWriter(Writer):
    """Writes answers of `/v1/completions`."""

    prefix, kind, streamed_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._common = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time())}
        self._common["model"] = self._asked.model
        self._offsets = [0] * len(self._readers)

    def whole(self, pieces: Sequence[Piece], responses: Sequence[Response]) -> dict[str, Any] | str:
        choices = []
        for index, (piece, response) in enumerate(zip(pieces, responses, strict=True)):
            echoing = replace(piece, content=self._echoed(index) + piece.content)
            choices.append({"index": index, **self._said(index, echoing), **self._ending(response)})
        return {**self._common, "object": self.kind, "choices": choices, "usage": self._usage(responses)}

    def begin(self) -> Iterator[bytes]:
        for index in range(len(self._readers)):
            yield from self.piece(index, Piece(content=self._echoed(index)))

    def piece(self, index: int, piece: Piece) -> Iterator[bytes]:
        if piece != Piece():
            yield self._event({"index": index, **self._delta(index, piece), "finish_reason": None})

    def ended(self, index: int, response: Response) -> Iterator[bytes]:
        yield self._event({"index": index, **self._delta(index, Piece()), **self._ending(response)})

    def end(self, responses: Sequence[Response]) -> Iterator[bytes]:
        if self._asked.include_usage:
            yield event({**self._common, "object": self.streamed_kind, "choices": [], "usage": self._usage(responses)})
        yield b"data: [DONE]\n\n"

    def _echoed(self, index: int) -> str:
        """The prompt's text, where answers begin with it."""
        prompt = self._asked.requests[index].prompt if self._asked.echo else ""
        return prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt or ())

    def _event(self, choice: dict[str, Any]) -> bytes:
        usage = {"usage": None} if self._asked.include_usage else {}
        return event({**self._common, "object": self.streamed_kind, "choices": [choice], **usage})

    def _said(self, index: int, piece: Piece) -> dict[str, Any]:
        """What a choice has of a piece: here the text as the model wrote it, its reasoning too."""
        return {"text": piece.content, "logprobs": self._logprobs(index, piece)}

    _delta = _said

    def _logprobs(self, index: int, piece: Piece) -> dict[str, Any] | None:
        """The log-probabilities of a piece, where they were asked for and, in a stream, there are some."""
        params = self._asked.request.params
        if params is None or params.logprobs is None or (self._asked.stream and not piece.logprobs):
            return None
        return self._logprob_lists(index, piece.logprobs)

    def _logprob_lists(self, index: int, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for each in logprobs:
            text, _ = token_text(self._tokenizer, each.token_id)
            likeliest = {token_text(self._tokenizer, other)[0]: max(value, LEAST_LOGPROB) for other, value in each.top}
            row = (text, max(each.logprob, LEAST_LOGPROB), likeliest, self._offsets[index])
            for column, value in zip(found.values(), row, strict=True):
                column.append(value)
            self._offsets[index] += len(text)
        return found

    def _ending(self, response: Response) -> dict[str, Any]:
        """Why the answer ended; `stop_reason` is the stop string or token id, or what OpenAI's API has no name for, and
        `tool_call_error` says why what began like a call is none, or is cut."""
        reason = response.finish_reason
        beside = reason if reason in ("deadline", "context") else response.stop_match
        ending = {"finish_reason": FINISH_REASONS.get(reason, "stop"), "stop_reason": beside}
        error = response.tool_call_error
        return ending if error is None else ending | {"tool_call_error": error}

    def _usage(self, responses: Sequence[Response]) -> dict[str, Any]:
        """The sum over all answers, of a prompt's tokens once."""
        usages = [each.usage for each in responses]
        first = usages[:: self._asked.answers_each]
        prompt_tokens = sum(each.prompt_tokens for each in first)
        completion_tokens = sum(each.completion_tokens for each in usages)
        details = {"reasoning_tokens": sum(each.reasoning_tokens for each in self._readers)}
        if drafted := [each.drafting.accepted_tokens for each in responses if each.drafting is not None]:
            details["accepted_prediction_tokens"] = sum(drafted)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(each.reused_tokens for each in first)},
            "completion_tokens_details": details,
        }


class ChatWriter(CompletionWriter):
    """Writes answers of `/v1/chat/completions`."""

    prefix, kind, streamed_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def begin(self) -> Iterator[bytes]:
        choice = self._asked.request.choice
        content = "" if choice is None or choice.mode == "none" else None  # which it stays beside calls
        delta = {"role": "assistant", "content": content}
        yield self._event({"index": 0, "delta": delta, "logprobs": None, "finish_reason": None})

    def _said(self, index: int, piece: Piece) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": piece.content, "refusal": None, "annotations": []}
        if piece.calls:
            message |= {"content": piece.content or None, "tool_calls": [call_object(each) for each in piece.calls]}
        if self._readers[index].reasoning_tokens:
            message["reasoning_content"] = piece.reasoning
        return {"message": message, "logprobs": self._logprobs(index, piece)}

    def _delta(self, index: int, piece: Piece) -> dict[str, Any]:
        delta: dict[str, Any] = {"reasoning_content": piece.reasoning, "content": piece.content}
        delta["tool_calls"] = [{"index": each.index, **call_object(each)} for each in piece.calls]
        delta = {name: value for name, value in delta.items() if value}
        return {"delta": delta, "logprobs": self._logprobs(index, piece)}

    def _logprob_lists(self, index: int, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        return {"content": logprob_objects(self._tokenizer, logprobs), "refusal": None}
