"""The states of a model's layers in memory, for all slots: bound to engines, exchanged, committed, saved, restored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from edgellm.engines.backends.base import Backend
from edgellm.engines.model.states import PRESENT, Edge, LayerState, exchange_sizes, state_edge
from edgellm.kernels.acceptance.contract import Accepted, Pending
from edgellm.kernels.arrays import Array, leading


class SlotRows(NamedTuple):
    """The memory [groups, C, size] that a tensor `name` has for one slot, and how many of the rows a snapshot holds."""

    name: str
    memory: Array
    rows: int


class ModelStates:
    """Owns the tensors of all layers' states, by name, the slots as their first axis.

    `starts` [S] int32 is the row that an idle slot's part in a step writes: it changes places with the states, so that
    a step of the slots before it never writes over what an idle one holds.
    """

    def __init__(self, backend: Backend, layers: Sequence[LayerState], slots: int, rows: int, starts: Array) -> None:
        self._backend, self._layers, self._starts = backend, tuple(layers), starts
        edge = state_edge(layers, slots, rows)
        self.tensors = backend.zeros_side_by_side(edge)
        self._dtypes = {name: dtype for name, (_, dtype) in edge.items()}
        self._views: dict[int, dict[str, Array]] = {}
        self._spare: dict[str, Array] = {}
        if slots > 1:
            sizes = {"int32": 1} | exchange_sizes(edge)
            self._spare = {dtype: backend.empty((size,), dtype) for dtype, size in sizes.items()}

    def bound(self, slots: slice) -> dict[str, Array]:
        """What an engine of the slots is bound to: it changes the states where they are."""
        parts = {name: tensor[slots] for name, tensor in self.tensors.items()}
        return parts | {PRESENT + name: part for name, part in parts.items()}

    def last_of(self, layer: int) -> str:
        """The last of a layer's tensors."""
        return self._layers[layer].names[-1]

    def swap(self, first: int, second: int) -> None:
        """Exchange what two slots hold."""
        for array, dtype in self._of_slots():
            one, other = array[first : first + 1], array[second : second + 1]
            spare = leading(self._spare[dtype], tuple(one.shape))
            for target, source in ((spare, one), (one, other), (other, spare)):
                self._backend.copy(target, source)

    def copy(self, source: int, target: int) -> None:
        """Let slot `target` hold what `source` holds."""
        for array, _ in self._of_slots():
            self._backend.copy(array[target : target + 1], array[source : source + 1])

    def commit(self, start: Array, accepted: Accepted, features: Array, pending: Pending) -> Callable[[], None]:
        """What keeps of the tokens behind row `start` [B] those that were `accepted`, at consecutive places, and their
        features for the draft; before lengths advance."""
        move = self._backend.acceptance.move_accepted
        return partial(move, list(self.tensors.values()), start, accepted, features, pending)

    def saved(self, tokens: int) -> Edge:
        """What a snapshot holds of a slot of so many tokens."""
        compute = self._backend.compute_dtype
        return {
            name: (shape, compute if dtype == "compute" else dtype)
            for layer in self._layers
            for name, (shape, dtype) in layer.saved(tokens).items()
        }

    def of_slot(self, slot: int, tokens: int) -> Iterator[SlotRows]:
        """The memory of what is `saved` of a slot, tensor by tensor, to be filled or read."""
        if slot not in self._views:
            self._views[slot] = {
                name: tensor[slot : slot + 1].reshape(*tensor.shape[1:]) for name, tensor in self.tensors.items()
            }
        for name, memory in self._views[slot].items():
            yield SlotRows(name, memory, tokens)

    def cut(self, held: int, wanted: int) -> int:
        """Which place, at most `wanted`, the states of `held` tokens can all be cut to."""
        for layer in self._layers:
            wanted = layer.cut(held, wanted)
        return wanted

    def clear(self) -> None:
        """Let go of the memory."""
        self.tensors.clear()
        self._views.clear()
        self._spare.clear()

    def _of_slots(self) -> Iterator[tuple[Any, str]]:
        """Everything that a slot has, with its dtype."""
        yield from ((tensor, self._dtypes[name]) for name, tensor in self.tensors.items())
        yield self._starts, "int32"
