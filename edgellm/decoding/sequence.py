"""A request as the decoding loop answers it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from edgellm.drafting.proposals import Said
from edgellm.drafting.report import DraftingTally
from edgellm.engines.runners.media import PromptMedia, TokenIdentity
from edgellm.engines.runners.sampling_state import SamplingValues
from edgellm.engines.speculation.constraints import TokenConstraint, fill_tree_masks
from edgellm.errors import AdapterError, ConstraintError
from edgellm.requests import Response, Timings, TokenLogprobs, Usage
from edgellm.snapshots.kept_on_host import KeptRows
from edgellm.structure.answers import AnswerRules
from edgellm.structure.description import Structure
from edgellm.text.output import OutputText
from edgellm.text.turns import Dropped, OngoingConversation
from edgellm.tool_calls.calls import ToolCallDelta
from edgellm.tool_calls.harmony import HarmonyReader
from edgellm.tool_calls.reader import ToolReader

if TYPE_CHECKING:
    from edgellm.media.encoders import PreparedMedia


@dataclass
class Clock:
    """When a request was accepted, joined the queue, began to be prefilled, gave its first token and its last
    (monotonic seconds).

    `gaps` are the seconds between the steps that gave it tokens. It gave way to others so many times
    (`preemptions`), the latest time when it `left` (None: it goes on), and waited so many seconds in all before that.
    """

    accepted: float = field(default_factory=time.perf_counter)
    queued: float = 0.0
    started: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    gaps: list[float] = field(default_factory=list)
    preemptions: int = 0
    left: float | None = None
    waited: float = 0.0

    def begin(self) -> None:
        """It has its turn, for the first time or again."""
        if self.left is None:
            self.started = time.perf_counter()
        self.waited, self.left = self.waiting(), None

    def give_way(self) -> None:
        """Others have its turn."""
        self.preemptions, self.left = self.preemptions + 1, time.perf_counter()

    def waiting(self) -> float:
        """The seconds for which it gave way."""
        return self.waited + (0.0 if self.left is None else time.perf_counter() - self.left)

    def step(self, now: float) -> None:
        """A step has given tokens."""
        if self.first_token:
            self.gaps.append(now - self.last_token)
        else:
            self.first_token = now
        self.last_token = now

    def timings(self) -> Timings:
        """The spans between them."""
        first = self.first_token or self.started
        return Timings(
            prefill_seconds=first - self.started,
            time_to_first_token=first - self.accepted,
            decode_seconds=max(0.0, self.last_token - first),
            total_seconds=time.perf_counter() - self.accepted,
            queue_seconds=max(0.0, self.started - (self.queued or self.accepted)),
            step_gaps=tuple(self.gaps),
            preemptions=self.preemptions,
            preempted_seconds=self.waiting(),
        )


@dataclass(eq=False)
class DecodingSequence:
    """A request that is being answered, with the LoRA adapter of that name (None: without one).

    `prepared_media` are those of its prompt, which has all their tokens; `media` what they are for the engines, once it
    has its turn.

    `max_tokens` only keeps steps from being launched that it will not need. `failure` is what ended it where it was
    neither finished nor cancelled.
    """

    prompt_ids: Sequence[int]
    sampling: SamplingValues
    answer: OutputText
    clock: Clock = field(default_factory=Clock)
    max_tokens: int | None = None
    tally: DraftingTally | None = None
    adapter: str | None = None
    prepared_media: Sequence[PreparedMedia] = ()
    media: PromptMedia | None = None
    #: How many likeliest tokens to give with each token's log-probability; None: no log-probabilities.
    logprobs: int | None = None
    #: How many tokens prompt and answer can have together.
    context_length: int = 0
    structure: Structure | None = None
    #: Where there is no slot for all, the larger goes first.
    priority: int = 0
    #: The conversation that it goes on, and what that left out of the prompt.
    conversation: OngoingConversation | None = None
    dropped: Dropped = field(default_factory=Dropped)
    token_logprobs: list[TokenLogprobs] = field(default_factory=list)
    adapter_digest: str | None = None
    #: Whether it gave way, and its rows were not kept.
    lost_rows: bool = False
    reused_tokens: int = 0
    # Of tokens after the prompt: how many there may be, how many of them the answer takes at most, how many are
    # launched at least and at most.
    room: int = 0
    wanted: int = 0
    least: int = 0
    most: int = 0
    failure: Exception | None = None
    #: The rules that its tokens obey, and what an index of what was said knows of it: both know the tokens that were
    #: read, which may be more than the answer has taken.
    rules: AnswerRules | None = None
    said: Said | None = None
    #: Reads the calls of tools out of the answer's text.
    calls: ToolReader | HarmonyReader | None = None
    #: All tokens that were drawn for it, those behind the answer's end, too.
    drawn: list[int] = field(default_factory=list)
    #: So many of its first tokens are those of system messages and tools, as far as that is known.
    system_tokens: int = 0
    #: Whether all of it is computed, whatever slots hold of it, and whether rows that no step sees any more are wanted.
    is_fresh: bool = False
    needs_all_rows: bool = False
    #: How many tokens were read, and whether the last of them ends the answer.
    known: int = 0
    is_over: bool = False
    #: Why rules had no way on behind the tokens that were read: a failure, unless the answer ends at one of these.
    dead_end: ConstraintError | None = None
    #: Whether rows of a snapshot were taken for it, and no logits behind them were looked at.
    is_unproven: bool = False
    #: Whether its latest token may be that of a row without a number, whose logits were not there any more.
    is_suspicious: bool = False
    #: Its rows, where it gave way to another and they are kept on the host.
    kept: KeptRows | None = None

    @property
    def text_ids(self) -> Sequence[int]:
        """The tokens of the prompt, and of the answer so far."""
        return [*self.prompt_ids, *self.answer.token_ids] if self.answer.token_count else self.prompt_ids

    @property
    def constraint(self) -> TokenConstraint | None:
        return None if self.rules is None else self.rules.constraint

    def bind(self, digest: str | None) -> None:
        """The adapter of its name has this digest now. Raises AdapterError where it had another when it began."""
        if self.known and digest != self.adapter_digest:
            raise AdapterError(
                f"the adapter {self.adapter!r} was replaced by another one while the answer waited for others to be "
                "finished: ask again"
            )
        self.adapter_digest = digest

    def know(self, tokens: Sequence[int]) -> None:
        """Take notice of tokens that were read, as far as they belong to the answer, which takes them later. Where one
        is drawn that rules forbid, they had no way on: it is a `stuck` sequence."""
        for token in tokens:
            if self.is_over or self.finished:
                return
            try:
                if self.rules is not None and not self.rules.constraint.try_advance(token):
                    self.rules.check_way_on()
                    raise ConstraintError(
                        f"the rules on the answer have no way on: token {token} was drawn where no token is allowed"
                    )
            except ConstraintError as error:
                self.stuck(error)
                return
            self.known += 1
            self.is_over = self.answer.ends_at(token) or self.known == self.wanted

    def stuck(self, error: ConstraintError) -> None:
        """Rules have no way on behind the tokens that are known. Nothing more is computed; whether it is a failure is
        told by the text of these tokens, at which the answer may end."""
        self.dead_end, self.is_over = error, True

    def take(self, token: int) -> str:
        """Add a token that was read to the answer; gives the text that it completes. Raises the `dead_end` in place of
        a token behind it."""
        if self.dead_end is not None and self.answer.token_count == self.known:
            raise self.dead_end
        text = self.answer.push(token)
        if not self.finished and self.answer.token_count >= self.room:
            text += self.answer.finish("context")
        return text

    def take_call_deltas(self) -> tuple[ToolCallDelta, ...]:
        """The pieces of calls that the answer's latest tokens gave."""
        return () if self.calls is None else self.calls.take_deltas()

    @property
    def identities(self) -> Sequence[TokenIdentity]:
        """The tokens of its text as KV rows see them."""
        return self.text_ids if self.media is None else self.media.identities(self.text_ids)

    @property
    def finished(self) -> bool:
        return self.answer.finish_reason is not None or self.failure is not None

    def response(self) -> Response:
        """The response to a request that has ended; one that was ended before it began took no time."""
        answer, clock = self.answer, self.clock
        if clock.started == 0.0:
            clock.started = clock.accepted
        left = max(0, self.context_length - len(self.prompt_ids) - answer.token_count)
        calls, reason = () if self.calls is None else self.calls.calls, answer.finish_reason or "cancelled"
        if reason == "stop" and any(call.complete for call in calls):
            reason = "tool_calls"
        return Response(
            answer.text,
            answer.token_ids,
            reason,
            Usage(len(self.prompt_ids), self.reused_tokens, answer.token_count, left),
            clock.timings(),
            answer.stop_match,
            None if self.tally is None else self.tally.statistics(),
            None if self.logprobs is None else tuple(self.token_logprobs),
            *self.dropped,
            structure=self.structure,
            structured_from=None if self.rules is None else self.rules.structured_from(answer.token_ids),
            tool_calls=calls,
            tool_call_error=None if self.calls is None else self.calls.error,
        )


class StepMasks:
    """See `edgellm.engines.runners.sampling_state.StepRules`: the masks of `sequences`, slot by slot.

    A sequence whose rules have no way on is `stuck` alone; what is drawn for it is dropped.
    """

    def __init__(self, sequences: Sequence[DecodingSequence]) -> None:
        self._sequences = sequences

    def fill(self, trees: tuple[np.ndarray, np.ndarray] | None, rows: np.ndarray, masks: np.ndarray) -> int:
        """Masks of the leading slots, those of idle ones left out; see `StepRules`."""
        rows.fill(-1)
        used = 0
        for slot, sequence in enumerate(self._sequences):
            constraint = sequence.constraint
            if constraint is None or sequence.finished or sequence.is_over:
                continue
            try:
                if trees is not None:
                    tokens, parents = trees
                    nodes = tokens.shape[1]
                    found = fill_tree_masks(constraint, tokens[slot].tolist(), parents[slot].tolist(), masks[used:])
                    rows[slot * nodes : (slot + 1) * nodes] = np.where(found >= 0, found + used, -1)
                    used += int(found.max()) + 1
                elif not constraint.is_free():
                    constraint.fill_mask(masks[used])
                    rows[slot], used = used, used + 1
            except ConstraintError as error:
                sequence.stuck(error)
        return used
