"""What comes back from a request."""

from __future__ import annotations

from dataclasses import dataclass, field

from edgellm.drafting.acceptance import DraftingStatistics
from edgellm.logprobs import TokenLogprobs


@dataclass(frozen=True)
class Usage:
    """Token counts. `reused_tokens` of the prompt were already in the KV cache."""

    prompt_tokens: int
    reused_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class Timings:
    """Seconds, as the caller saw them.

    `time_to_first_token` runs from the request's acceptance; `decode_seconds` from the first token to the last;
    `tokens_per_second` counts the tokens after the first over `decode_seconds` (0.0 where there are none).
    `queue_seconds` went by before a slot was free. `step_gaps` are the times between the steps that gave tokens, one
    token each, or several where a draft was accepted.
    """

    prefill_seconds: float
    time_to_first_token: float
    decode_seconds: float
    total_seconds: float
    queue_seconds: float = 0.0
    step_gaps: tuple[float, ...] = ()

    def tokens_per_second(self, completion_tokens: int) -> float:
        """Decoding speed for an answer of `completion_tokens` tokens."""
        return (completion_tokens - 1) / self.decode_seconds if completion_tokens > 1 and self.decode_seconds else 0.0


@dataclass(frozen=True)
class Chunk:
    """A piece of a streamed answer: whole characters only. `text` may be empty where a token ends no character.

    `from_draft` says of each token whether the draft had proposed it; it is empty where that is not known.
    `logprobs` are those of each token, where they were asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    from_draft: tuple[bool, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True)
class Response:
    """A finished answer.

    `finish_reason` is "stop" (end of turn or a stop id), "stop_string", "length" (max_tokens), "context" (the KV
    capacity is used up), "cancelled", or "deadline" (its time was over). `text` excludes the stop string; `token_ids`
    are all that were generated and count towards usage, the ending one included. `drafting` says what drafting did,
    where a draft model is loaded; `logprobs` has those of each token, where they were asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    usage: Usage
    timings: Timings
    stop_match: str | int | None = field(default=None)
    drafting: DraftingStatistics | None = field(default=None)
    logprobs: tuple[TokenLogprobs, ...] | None = field(default=None)
