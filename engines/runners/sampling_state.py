"""How each slot draws its tokens, by parameters on the device, and the rings through which the host reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from edgellm.engines.backends.base import Backend, Readback
from edgellm.kernels.acceptance_interface import NodeDraws, SlotDraws
from edgellm.kernels.arrays import Array
from edgellm.kernels.interface import SequenceState


@dataclass(frozen=True)
class SamplingValues:
    """One sequence's sampling, as the kernels take it (`Kernels.process_logits`, `filter_threshold`, `sample`)."""

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


#: The parameters with their dtypes on the device.
_DTYPES = {
    "temperature": "float32",
    "top_k": "int32",
    "top_p": "float32",
    "min_p": "float32",
    "repetition_penalty": "float32",
    "presence_penalty": "float32",
    "frequency_penalty": "float32",
    "seed": "uint64",
    "sequence": "int32",
}
#: What is drawn with, in the order of `SlotDraws` and, at every node of a tree, of `NodeDraws`.
_PER_SLOT = (
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "sequence",
)
_PER_NODE = ("temperature", "top_k", "top_p", "min_p", "seed", "sequence")


class SamplingState:
    """Sampling parameters and buffers of all slots."""

    def __init__(self, backend: Backend, slots: int, vocab_size: int, longest_prompt: int) -> None:
        self._backend = backend
        self._values = [SamplingValues()] * slots
        self._node_parameters: dict[int, dict[str, Array]] = {}
        self._stale: set[int] = set()
        self._parameters: dict[str, Array] = {name: backend.zeros((slots,), dtype) for name, dtype in _DTYPES.items()}
        for name, array in self._parameters.items():
            backend.upload(array, np.full(slots, getattr(SamplingValues(), name), np.dtype(_DTYPES[name])))
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

    def slot_draws(self, slots: slice) -> SlotDraws:
        """The parameters of the slots, each [n]."""
        return SlotDraws(*[self._parameters[name][slots] for name in _PER_SLOT])

    def node_draws(self, batch: int, nodes: int) -> NodeDraws:
        """The parameters of the leading slots, each repeated for its `nodes` nodes: [batch * nodes].

        They hold what was set before the latest `refresh_nodes`.
        """
        repeated = self._repeated(nodes)
        return NodeDraws(*[repeated[name][: batch * nodes] for name in _PER_NODE])

    def refresh_nodes(self, nodes: int) -> None:
        """Bring the arrays of `node_draws` up to date, which a captured step cannot do itself."""
        arrays = self._repeated(nodes)
        if nodes in self._stale:
            self._stale.remove(nodes)
            for name, array in arrays.items():
                values = np.asarray([getattr(values, name) for values in self._values], np.dtype(_DTYPES[name]))
                self._backend.upload(array, np.repeat(values, nodes))

    def _repeated(self, nodes: int) -> dict[str, Array]:
        if nodes not in self._node_parameters:
            shape = (len(self._values) * nodes,)
            self._node_parameters[nodes] = {name: self._backend.zeros(shape, _DTYPES[name]) for name in _PER_NODE}
            self._stale.add(nodes)
        return self._node_parameters[nodes]

    def _take(self, slot: int, values: SamplingValues) -> None:
        """Bring what changes to the device: most requests draw as the one before."""
        before, self._values[slot] = self._values[slot], values
        if before == values:
            return
        self._stale.update(self._node_parameters)
        for name, array in self._parameters.items():
            value = getattr(values, name)
            if value != getattr(before, name):
                self._backend.upload(array[slot : slot + 1], np.asarray([value], np.dtype(_DTYPES[name])))

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
        draws = self.slot_draws(slots)
        processed, thresholds = self._processed[slots], self._thresholds[slots]
        penalties = (draws.repetition_penalty, draws.presence_penalty, draws.frequency_penalty)
        kernels.process_logits(logits, self.token_counts[slots], *penalties, draws.temperature, processed)
        kernels.filter_threshold(processed, draws.top_k, draws.top_p, draws.min_p, thresholds)
        draw = (draws.temperature, draws.seeds, draws.sequences, state.positions)
        kernels.sample(processed, thresholds, *draw, tokens, state)


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
