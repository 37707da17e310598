"""The decoding loop: launches steps, reads their tokens, and decides when an answer is finished.

Vanilla decoding is here; a drafting round will be another way to launch, with the same reading side.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from edgellm.engines.backend import Readback
from edgellm.engines.base_runner import BaseEngineRunner
from edgellm.engines.sampling_state import SamplingValues
from edgellm.responses import Timings
from edgellm.text.stop import Answer

#: The slot that a single sequence uses.
SLOT = 0


@dataclass
class Clock:
    """When a request was accepted, began to be prefilled, gave its first token and its last (monotonic seconds)."""

    accepted: float = field(default_factory=time.perf_counter)
    started: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0

    def timings(self) -> Timings:
        """The spans between them."""
        first = self.first_token or self.started
        return Timings(
            prefill_seconds=first - self.started,
            time_to_first_token=first - self.accepted,
            decode_seconds=max(0.0, self.last_token - first),
            total_seconds=time.perf_counter() - self.accepted,
        )


class KVContents:
    """Which tokens the KV rows of the slot belong to, so that the next request can reuse the prefix they share."""

    def __init__(self) -> None:
        self._ids: list[int] = []

    def reusable(self, prompt_ids: Sequence[int]) -> int:
        """Rows to reuse for a prompt: the longest common prefix, but never the prompt's last token."""
        limit = min(len(self._ids), len(prompt_ids) - 1)
        for index in range(limit):
            if self._ids[index] != prompt_ids[index]:
                return index
        return max(0, limit)

    def replace(self, token_ids: Sequence[int]) -> None:
        """The rows now hold exactly these tokens."""
        self._ids = list(token_ids)


def decode(
    runner: BaseEngineRunner,
    contents: KVContents,
    prompt_ids: Sequence[int],
    sampling: SamplingValues,
    answer: Answer,
    clock: Clock,
    max_tokens: int | None = None,
) -> Iterator[tuple[int, str]]:
    """Generate until `answer` is finished; yields (token id, text that it completed).

    The number of reused tokens is `contents.reusable(prompt_ids)` as of the call. `answer.finish("cancelled")` from
    outside, or closing the iterator, ends it at the next token. Rows of the tokens in between stay reusable.
    `max_tokens` only keeps steps from being launched that the answer will not need.
    """
    clock.started = time.perf_counter()
    reused = contents.reusable(prompt_ids)
    contents.replace(prompt_ids[:reused])  # what a failure from here on leaves behind
    room = runner.limits.kv_capacity - len(prompt_ids)
    most = room if max_tokens is None else min(room, max_tokens)
    pending: deque[Readback] = deque([runner.start(SLOT, prompt_ids, reused, sampling)])
    launched = 1
    try:
        while answer.finish_reason is None:
            while len(pending) <= runner.backend.steps_ahead and launched < most:
                pending.append(runner.decode(1))
                launched += 1
            token = int(pending.popleft().wait()[0])
            clock.last_token = time.perf_counter()
            clock.first_token = clock.first_token or clock.last_token
            text = answer.push(token)
            if answer.finish_reason is None and answer.token_count >= room:
                text += answer.finish("context")
            yield token, text
            if not pending and answer.finish_reason is None:
                pending.append(runner.decode(1))
                launched += 1
    finally:
        for unread in pending:
            unread.wait()
        runner.stop(SLOT)
        contents.replace([*prompt_ids, *answer.token_ids[:-1]])
