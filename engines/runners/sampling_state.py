"""How each slot draws its tokens, by parameters on the device, and the rings through which the host reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from edgellm.engines.backends.base import Backend, Readback, uploaded
from edgellm.kernels.arrays import Array
from edgellm.kernels.contracts import rows_of
from edgellm.kernels.sampling.contract import SamplingRows, SequenceState


@dataclass(frozen=True)
class SamplingValues:
    """One sequence's sampling, as the kernels take it (`SamplingRows`)."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    sequence: int = 0

    @cached_property
    def penalizes(self) -> bool:
        """True if the tokens so far change the logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @cached_property
    def plain(self) -> bool:
        """True for the argmax of the unchanged logits."""
        return self.temperature == 0.0 and not self.penalizes


def sampling_row(values: SamplingValues) -> list[tuple[float, str]]:
    """Values and dtypes of a sequence's row, in the order of `SamplingRows`."""
    return [
        (values.repetition_penalty, "float32"),
        (values.presence_penalty, "float32"),
        (values.frequency_penalty, "float32"),
        (values.temperature, "float32"),
        (values.top_k, "int32"),
        (values.top_p, "float32"),
        (values.min_p, "float32"),
        (values.seed, "uint64"),
        (values.sequence, "int32"),
    ]


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

    def __init__(self, backend: Backend, slots: int, vocab_size: int, longest_prompt: int) -> None:
        self._backend = backend
        self._values = [SamplingValues()] * slots
        neutral = sampling_row(SamplingValues())
        self._rows = SamplingRows(*[uploaded(backend, np.full(slots, value, dtype)) for value, dtype in neutral])
        self._processed = backend.empty((slots, vocab_size), "float32")
        self._thresholds = backend.zeros((slots,), "float32")
        self._prompt = backend.empty((longest_prompt,), "int32")
        self.token_counts = backend.zeros((slots, vocab_size), "int32")

    def set(self, slot: int, values: SamplingValues, prompt_ids: Sequence[int]) -> None:
        """Start a request in `slot`."""
        self._take(slot, values)
        if values.penalizes:
            prompt = self._prompt[: len(prompt_ids)]
            self._backend.upload(prompt, np.asarray(prompt_ids, np.int32))
            counts = self.token_counts[slot : slot + 1]
            self._backend.kernels.count_tokens(prompt, counts.reshape(counts.shape[1]))

    def move(self, source: int, target: int) -> None:
        """Go on in slot `target` with the request of slot `source`."""
        self._take(target, self._values[source])
        self._backend.copy(self.token_counts[target : target + 1], self.token_counts[source : source + 1])

    def values(self, slots: slice) -> list[SamplingValues]:
        """How the slots draw."""
        return self._values[slots]

    def rows(self, slots: slice) -> SamplingRows:
        """The parameters of the slots."""
        return rows_of(self._rows, slots)

    def _take(self, slot: int, values: SamplingValues) -> None:
        """Bring what changes to the device: most requests draw as the one before."""
        before, self._values[slot] = self._values[slot], values
        if before == values:
            return
        for array, (value, dtype), old in zip(self._rows, sampling_row(values), sampling_row(before), strict=True):
            if (value, dtype) != old:
                self._backend.upload(array[slot : slot + 1], np.asarray([value], dtype))

    def biased(self, slots):
        return False

    def clear_masks(self):
        pass

    def fill_masks(self, rules, rows, trees=None):
        raise NotImplementedError

    def constrain(self, slots, logits):
        raise NotImplementedError

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
