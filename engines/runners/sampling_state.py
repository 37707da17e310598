"""How each slot draws its tokens, by parameters on the device, and the rings through which the host reads them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from edgellm.engines.backends.base import Backend, Readback, Transfer, uploaded
from edgellm.kernels.arrays import Array
from edgellm.kernels.sampling.contract import IN_PROMPT, SequenceState
from edgellm.kernels.sampling.record import SamplingRecord


@dataclass(frozen=True)
class SamplingValues(SamplingRecord):
    """One sequence's sampling: its record, and what is added to the logits of single tokens, (id, bias) in 0..V-1."""

    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "biased", int(bool(self.logit_bias)))


class TokenMasks:
    """The masks of a step's tokens: memory for up to R rows of logits, on the host (pinned on the GPU) and the device.

    `host_masks` [R, W] uint32 and `host_rows` [R] int32 are for the caller to fill: row r of the logits that the next
    `SamplingState.constrain` is given obeys mask `host_rows[r]`, none where that is -1, as all are at first. Bit i % 32
    of word i // 32 of a mask is set where token i may come next; at least one has to be. There is one buffer: what was
    uploaded is on its way until `wait` returns, and must stay as it is until then.
    """

    def __init__(self, backend: Backend, rows: int, vocab_size: int) -> None:
        self._backend = backend
        words = -(-vocab_size // 32)
        shape, size = (rows, words), np.dtype(np.uint32).itemsize
        self.host_masks = backend.host_memory(rows * words * size).view(np.uint32).reshape(shape)
        self.host_rows = backend.host_memory(rows * size).view(np.int32)
        #: On the device, as `SamplingKernels.constrain_logits` takes them.
        self.masks = backend.zeros(shape, "uint32")
        self.rows = backend.zeros((rows,), "int32")
        self._uploads: list[Transfer] = []
        self._sent = np.zeros(rows, np.int32)  # what `rows` are on the device
        self.host_masks.fill(0)
        self.clear()

    def upload(self, rows: int, masks: int) -> None:
        """Bring the first so many of `host_rows`, where they changed, and of `host_masks` to the device, in order with
        the other work."""
        count, words = self.host_masks.shape
        pairs: list[tuple[Array, np.ndarray, int, int]] = [(self.masks, self.host_masks, words, masks)] if masks else []
        if not np.array_equal(self._sent[:rows], self.host_rows[:rows]):
            self._sent[:rows] = self.host_rows[:rows]
            pairs.append((self.rows, self.host_rows, 1, rows))
        self._uploads = [
            self._backend.upload_rows(device.reshape(1, count, width), host.reshape(1, count, width), used)
            for device, host, width, used in pairs
        ]

    def wait(self) -> None:
        """Return once what was uploaded last may be changed on the host: at once, but for prompts that follow each
        other, since tokens were waited for."""
        for upload in self._uploads:
            upload.wait()

    def clear(self) -> None:
        """No row has a mask any more, on the host and, in order with the other work, on the device."""
        self.wait()
        self.host_rows.fill(-1)
        self.upload(self.host_rows.size, 0)


class StepRules(Protocol):
    """Which tokens each row of logits may become, filled in while the logits are computed."""

    def fill(self, trees: tuple[np.ndarray, np.ndarray] | None, rows: np.ndarray, masks: np.ndarray) -> int:
        """Write masks uint32 [ceil(V / 32)] to the leading rows of `masks`, and to `rows` int32 which of them each row
        of logits has, -1 for none; returns how many masks there are.

        Rows are those of slots, or of the nodes of their `trees`: tokens and parents int32 [B, T], of which node 0 is
        the root.
        """


class SamplingState:
    """Sampling parameters and buffers of all slots."""

    def __init__(
        self, backend: Backend, slots: int, vocab_size: int, longest_prompt: int, mask_rows: int | None = None
    ) -> None:
        """`mask_rows`: the most rows of logits that `constrain` is given at a time; as many as slots by default."""
        self._backend, self._vocab_size, self._mask_rows = backend, vocab_size, mask_rows or slots
        self._values = [SamplingValues()] * slots
        self._rows = uploaded(backend, np.stack([values.words() for values in self._values]))
        self._processed = backend.empty((slots, vocab_size), "float32")
        self._thresholds = backend.zeros((slots,), "float32")
        self._prompt = backend.empty((longest_prompt,), "int32")
        self.token_counts = backend.zeros((slots, vocab_size), "int32")
        self._masked = False

    @cached_property
    def masks(self) -> TokenMasks:
        """The memory of masks, made when it is first asked for: before anything is captured that uses it."""
        return TokenMasks(self._backend, self._mask_rows, self._vocab_size)

    @cached_property
    def _bias(self) -> Array:
        """[S, V] float32, read of slots that are biased alone; made like `masks`."""
        return self._backend.empty((len(self._values), self._vocab_size), "float32")

    def set(self, slot: int, values: SamplingValues, text_ids: Sequence[int], generated: int = 0) -> None:
        """Start a request in `slot`, or go on with one: the last `generated` tokens of its text were drawn."""
        self._take(slot, values)
        if not values.penalizes:
            return
        counts, ids = self.token_counts[slot : slot + 1], np.asarray(text_ids, np.int32)
        if generated:
            count = len(ids) - generated
            known = np.zeros((1, self._vocab_size), np.int32)
            known[0, ids[:count]] = IN_PROMPT
            np.add.at(known[0], ids[count:], 1)
            self._backend.upload(counts, known)
            return
        prompt = self._prompt[: len(ids)]
        self._backend.upload(prompt, ids)
        self._backend.kernels.count_tokens(prompt, counts.reshape(counts.shape[1]))

    def move(self, source: int, target: int) -> None:
        """Go on in slot `target` with the request of slot `source`."""
        self._take(target, self._values[source])
        self._backend.copy(self.token_counts[target : target + 1], self.token_counts[source : source + 1])

    def values(self, slots: slice) -> list[SamplingValues]:
        """How the slots draw."""
        return self._values[slots]

    def rows(self, slots: slice) -> Array:
        """The parameters of the slots, as kernels take them (`SamplingRows`)."""
        return self._rows[slots]

    def _take(self, slot: int, values: SamplingValues) -> None:
        """Bring what changes to the device: most requests draw as the one before."""
        before, self._values[slot] = self._values[slot], values
        if before == values:
            return
        self._backend.upload(self._rows[slot : slot + 1], values.words()[None])
        if values.logit_bias and values.logit_bias != before.logit_bias:
            bias = np.zeros((1, self._vocab_size), np.float32)
            for token, amount in values.logit_bias:
                bias[0, token] = amount
            self._backend.upload(self._bias[slot : slot + 1], bias)

    def biased(self, slots: slice) -> bool:
        """True if one of the slots has biases, so that `constrain` has something to do without masks."""
        return any(values.biased for values in self._values[slots])

    def constrain(self, slots: slice, logits: Array) -> None:
        """Masks, then biases, of `logits` [n, V] or [n, T, V] of the n slots, in place: before anything reads them.

        Row r of them, n * T in all, obeys what was uploaded for row r of `masks`.
        """
        count = math.prod(logits.shape[:-1])
        masks, flat = self.masks, logits.reshape(count, self._vocab_size)
        kernels = self._backend.kernels
        kernels.constrain_logits(flat, masks.rows[:count], masks.masks, self._bias[slots], self.rows(slots))

    def obey(self, rules: StepRules | None, rows: int = 0, trees: tuple[np.ndarray, np.ndarray] | None = None) -> None:
        """Let the rules say which masks the next `rows` rows of logits obey, or those of the nodes of `trees`, and
        bring these to the device; without rules no row obeys a mask any more."""
        masks, rows = self.masks, rows if trees is None else trees[0].size
        if rules is not None:
            masks.wait()
            used = rules.fill(trees, masks.host_rows[:rows], masks.host_masks)
            masks.upload(rows, used)
        elif self._masked:
            masks.clear()
        self._masked = rules is not None

    def plain(self, slots: slice) -> bool:
        """True if argmax serves every one of the slots."""
        return all(values.plain for values in self._values[slots])

    def select(self, slots: slice, logits: Array, tokens: Array, state: SequenceState, plain: bool) -> None:
        """Choose `tokens` [n] from `logits` [n, V] of the slots, whose sequences (`state`, of n) take them.

        `plain` (see there) takes the short way.
        """
        kernels = self._backend.kernels
        if plain:
            kernels.argmax(logits, tokens, state)
            return
        rows, processed, thresholds = self.rows(slots), self._processed[slots], self._thresholds[slots]
        kernels.process_logits(logits, self.token_counts[slots], rows, processed)
        kernels.filter_threshold(processed, rows, thresholds)
        kernels.sample(processed, thresholds, rows, state.positions, tokens, state)


#: Places of the ring that a sequence's tokens are emitted to: how many may be unread at a time.
_PLACES = 8


@dataclass(eq=False)
class EmittedTokens:
    """The tokens that a step emits: for each of n sequences the one at its place of its `ring`, which reads [n, E]
    int32."""

    ring: Readback
    places: Sequence[int]

    def wait(self) -> np.ndarray:
        """[n] int32, once the step is done."""
        return self.ring.wait()[np.arange(len(self.places)), self.places]


class EmittedRings:
    """A ring of emitted tokens for each slot: `tokens` [S, E] int32, which kernels write at the places `index` [S]."""

    def __init__(self, backend: Backend, slots: int) -> None:
        self._backend = backend
        self.index = backend.zeros((slots,), "int32")
        self.tokens = backend.host_visible((slots, _PLACES), "int32")
        self._next_places = [0] * slots  # the values of `index`

    def read(self, slots: slice, advanced: slice) -> EmittedTokens:
        """Read what a step that advanced the slots `advanced` emitted for `slots`."""
        emitted = EmittedTokens(self._backend.read(self.tokens[slots]), self._next_places[slots])
        for slot in range(advanced.start, advanced.stop):
            self._next_places[slot] = (self._next_places[slot] + 1) % _PLACES
        return emitted


@dataclass(eq=False)
class StepReadback:
    """The tokens of a round, or of a plain step beside a draft model, of `batch` slots, on their way to the host.

    `emitted` reads them, and `read` is told how many each slot got; `longest` is how many a round may give a slot, 0 of
    a plain step; `lengths` are those of `BaseEngineRunner`, bounds that become exact; `draft_accepted` says whether the
    step began with the draft taking its pending entries.
    """

    read: Callable[[StepReadback, Sequence[int]], None]
    lengths: list[int]
    batch: int
    longest: int
    emitted: Readback
    draft_accepted: bool
    _tokens: list[list[int]] | None = None

    def wait(self) -> list[list[int]]:
        """The tokens of each slot, in order: none for an idle one, else at least one."""
        if self._tokens is None:
            values = self.emitted.wait()[: self.batch].tolist()
            if not self.longest:
                self._tokens = [[token] if token >= 0 else [] for token in values]
            else:
                self._tokens = [row[1 : 1 + row[0]] for row in values]
                for slot, tokens in enumerate(self._tokens):
                    if tokens:
                        self.lengths[slot] += len(tokens) - self.longest
            self.read(self, [len(tokens) for tokens in self._tokens])
        return self._tokens
