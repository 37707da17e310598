"""Answers as clients of ollama's API read them, as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from edgellm.engines.formats.strict_formats import parsed_json
from edgellm.http.answers import FINISH_REASONS, Piece, Writer, logprob_objects
from edgellm.http.errors import HTTPError
from edgellm.requests import Response
from edgellm.tool_calls.calls import ToolCallDelta, joined_deltas
from edgellm.tool_calls.values import is_object

_BILLION = 10**9


class GenerateWriter(Writer):
    """Writes answers of `/api/generate`."""

    media_type = "application/x-ndjson"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._deltas: list[ToolCallDelta] = []

    def whole(self, pieces: Sequence[Piece], responses: Sequence[Response]) -> dict[str, Any]:
        if not responses:
            return self._object(Piece()) | {"done": True, "done_reason": "load"}
        return self._object(pieces[0]) | self._ending(responses[0])

    def piece(self, index: int, piece: Piece) -> Iterator[bytes]:
        self._deltas += piece.calls  # which are told as a whole
        if piece.reasoning or piece.content or piece.logprobs:
            yield _line(self._object(Piece(piece.reasoning, piece.content, piece.logprobs)) | {"done": False})

    def ended(self, index: int, response: Response) -> Iterator[bytes]:
        if self._deltas:
            yield _line(self._object(Piece(calls=joined_deltas(self._deltas))) | {"done": False})
        yield _line(self._object(Piece()) | self._ending(response))

    def failure(self, error: HTTPError) -> Iterator[bytes]:
        yield _line({"error": error.message})

    def _object(self, piece: Piece) -> dict[str, Any]:
        found = {"model": self._asked.model, "created_at": written_time(), **self._said(piece)}
        if piece.logprobs:
            found["logprobs"] = logprob_objects(self._tokenizer, piece.logprobs)
        return found

    def _said(self, piece: Piece) -> dict[str, Any]:
        return {"response": piece.content} | ({"thinking": piece.reasoning} if piece.reasoning else {})

    def _ending(self, response: Response) -> dict[str, Any]:
        """Why an answer ended, and what it took, in nanoseconds."""
        usage, timings = response.usage, response.timings
        reason = "length" if FINISH_REASONS.get(response.finish_reason) == "length" else "stop"
        error = response.tool_call_error
        return {
            "done": True,
            "done_reason": reason,
            "total_duration": round(timings.total_seconds * _BILLION),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": round(timings.prefill_seconds * _BILLION),
            "eval_count": usage.completion_tokens,
            "eval_duration": round(timings.decode_seconds * _BILLION),
            **({} if error is None else {"tool_call_error": error}),
        }


class ChatLineWriter(GenerateWriter):
    """Writes answers of `/api/chat`. A call that was cut is not told."""

    def _said(self, piece: Piece) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": piece.content}
        if piece.reasoning:
            message["thinking"] = piece.reasoning
        if calls := [call for call in piece.calls if is_object(call.arguments)]:
            message["tool_calls"] = [
                {"id": call.id, "function": {"name": call.name, "arguments": parsed_json(call.arguments)}}
                for call in calls
            ]
        return {"message": message}


def _line(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False) + "\n").encode()


def written_time(moment: datetime | None = None) -> str:
    """A moment of UTC, else this one, as clients read it."""
    moment = moment or datetime.now(timezone.utc)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")
