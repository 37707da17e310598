"""The states of a model's layers in memory, for all slots: bound to engines, exchanged, committed, saved, restored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from edgellm.engines.backends.base import Backend
from edgellm.engines.errors import EngineError
from edgellm.engines.model import states
from edgellm.engines.runners.captured_steps import in_order
from edgellm.kernels.acceptance.contract import Accepted, Pending
from edgellm.kernels.arrays import Array, leading
from edgellm.kernels.dlpack import SharedArray
from edgellm.kernels.recurrent.contract import AcceptedPath

#: The arrays by name in which a step keeps what a commit asks for; none of a model that attends in every layer.
Kept = Mapping[str, Array]
#: What makes zeroed arrays of shapes and dtypes by name.
_Zeros = Callable[[states.Edge], dict[str, Array]]


class SlotRows(NamedTuple):
    """The memory [groups, C, size] that a tensor `name` has for one slot, and how many of the rows a snapshot holds,
    from row `first` of the memory on and, behind its last, from its first."""

    name: str
    memory: Array
    rows: int
    first: int = 0


class ReplayInputs:
    """Memory for what steps of up to `tokens` tokens in up to `slots` slots keep of their inputs for a commit."""

    def __init__(self, zeros: _Zeros, layers: Sequence[states.LayerState], slots: int, tokens: int) -> None:
        """`zeros` makes the arrays."""
        self._layers = states.recurrent_states(layers)
        edge = states.kept_edge(self._layers, slots, tokens)
        rows: states.Edge = {name: ((slots * tokens, shape[2]), dtype) for name, (shape, dtype) in edge.items()}
        self._buffers = zeros(rows) if rows else {}

    def of(self, batch: int, tokens: int) -> Kept:
        """The arrays [batch, tokens, ...] of a step of that size."""
        edge = states.kept_edge(self._layers, batch, tokens)
        return {name: self._buffers[name][: batch * tokens].reshape(*shape) for name, (shape, _) in edge.items()}


class ModelStates:
    """Owns the tensors of all layers' states, by name, the slots as their first axis.

    `starts` [S] int32 is the row that an idle slot's part in a step writes: it changes places with the states, so that
    a step of the slots before it never writes over what an idle one holds. Recurrent states change by commits alone,
    where a slot is active, and by what is prefilled there.
    """

    def __init__(
        self,
        backend: Backend,
        layers: Sequence[states.LayerState],
        slots: int,
        rows: int,
        starts: Array,
        is_base: bool = False,
    ) -> None:
        """`is_base`: the layers are those that several GPUs may share."""
        self._backend, self._layers, self._starts = backend, tuple(layers), starts
        self._zeros_of: _Zeros = backend.shared_zeros if is_base else backend.zeros_side_by_side
        self.tensors = self._zeros_of(states.state_edge(layers, slots, rows))
        self._views: dict[int, dict[str, Array]] = {}
        self._rings = {name for state in layers if isinstance(state, states.WindowRows) for name in state.names}
        #: The last tensor of each layer.
        self.last_of = {state.index: state.names[-1] for state in layers}
        recurrent = states.recurrent_states(layers)
        self._recurrent = {name: kind for state in recurrent for name, kind in state.tensors(slots, rows).items()}
        self._zeros: Array | None = None
        self._first: Array | None = None
        if recurrent:
            self._zeros = backend.zeros((states.largest_state(self._recurrent),), "float32")
            self._first = backend.zeros((slots, 1), "int32")

    @property
    def is_recurrent(self) -> bool:
        """Whether a layer has a state that is of one place in a text alone."""
        return bool(self._recurrent)

    def bound(self, slots: slice, kept: Kept | None = None) -> dict[str, Array]:
        """What an engine of the slots is bound to: it changes the states where they are. One of a step that is
        committed later changes rows alone, and keeps its inputs in `kept`."""
        parts = {name: tensor[slots] for name, tensor in self.tensors.items()}
        changed = (name for name in parts if kept is None or name not in self._recurrent)
        return parts | {states.PRESENT + name: parts[name] for name in changed} | dict(kept or {})

    def kept_inputs(self, slots: int, tokens: int) -> ReplayInputs:
        """Memory for what steps of these states keep."""
        return ReplayInputs(self._zeros_of, self._layers, slots, tokens)

    def clear_slot(self, slot: int) -> None:
        """Let a slot's recurrent states be those before the first token."""
        for name in self._recurrent:
            part = self.tensors[name][slot : slot + 1]
            assert self._zeros is not None
            self._backend.copy(part, leading(self._zeros, tuple(part.shape)))

    def move(self, source: int, target: int, rows: int, swaps: bool) -> None:
        """Let slot `target` hold what `source` does, where it `swaps` the other way round, too; neither holds more than
        `rows` rows that are asked for again."""
        of_rows = [tensor for name, tensor in self.tensors.items() if name not in self._recurrent]
        whole = *(self.tensors[name] for name in self._recurrent), self._starts
        self._backend.move_slots(of_rows, source, target, rows, swaps)
        self._backend.move_slots(whole, source, target, None, swaps)

    def commit(
        self, start: Array, accepted: Accepted, features: Array, pending: Pending, kept: Kept | None = None
    ) -> Callable[[], None]:
        """What keeps of the tokens behind row `start` [B] those that were `accepted`: rows at consecutive places, their
        features for the draft, and recurrent states by a replay of what was `kept`; before lengths advance."""
        move_accepted = self._backend.acceptance.move_accepted
        steps: list[Callable[[], None]] = []
        moved: dict[tuple[bool, int], list[Array]] = {}  # alike; features move with each
        for name, tensor in self.tensors.items():
            if name not in self._recurrent:
                moved.setdefault((name in self._rings, tensor.shape[1]), []).append(tensor)
        for (wraps, _), tensors in moved.items():
            steps.append(partial(move_accepted, tensors, start, accepted, features, pending, wraps))
        if self._recurrent:
            steps.append(self.replay(slice(0, start.shape[0]), kept or {}, accepted.indices, accepted.lengths))
        return in_order(steps)

    def commit_step(self, slots: slice, active: Array, kept: Kept) -> list[Callable[[], None]]:
        """What takes the token of a plain step into the recurrent states of those slots that are `active` [B] int32 (1,
        or 0); nothing where there are no such states."""
        return [] if self._first is None else [self.replay(slots, kept, self._first[: active.shape[0]], active)]

    def replay(self, slots: slice, kept: Kept, indices: Array, counts: Array) -> Callable[[], None]:
        """What takes the first `counts` [B] of the tokens `indices` [B, N] of a step, in this order, into the recurrent
        states of the slots, from what was `kept` of the step."""
        commits: dict[str, list[tuple[Array, ...]]] = {}
        for state in states.recurrent_states(self._layers):
            arrays = *(self.tensors[name][slots] for name in state.names), *(kept[name] for name in state.kept_names)
            commits.setdefault(state.commit, []).append(state.committed(*arrays))
        kernels, replayed = self._backend.recurrent, AcceptedPath(indices, counts)
        return in_order([getattr(kernels, commit)(layers, replayed) for commit, layers in commits.items()])

    def saved(self, tokens: int) -> states.Edge:
        """What a snapshot holds of a slot of so many tokens: tensors [groups, rows, size]."""
        compute = self._backend.compute_dtype
        return {
            name: (shape if len(shape) == 3 else (1, *shape), compute if dtype == "compute" else dtype)
            for layer in self._layers
            for name, (shape, dtype) in layer.saved(tokens).items()
        }

    def of_slot(self, slot: int, tokens: int, held: int | None = None) -> Iterator[SlotRows]:
        """The memory of what is `saved` of a slot, tensor by tensor, to be filled or read: of so many tokens, or the
        first of them of a text of `held`, of which windows have the latest rows."""
        views = self._of_slot(slot)
        for layer in self._layers:
            count = tokens if held is None or not isinstance(layer, states.WindowRows) else held
            for name, (shape, _) in layer.saved(count).items():
                if name in views:
                    yield SlotRows(name, views[name], shape[-2], layer.first_saved(count))

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers that keep keys and values of their own."""
        return tuple(each.index for each in self._layers if isinstance(each, states.KVRows))

    def shared_rows(self, slot: int, layer: int, tokens: int, owner: object) -> tuple[SharedArray, SharedArray]:
        """Keys and values [1, key-value heads, N, D] of a slot's first N = `tokens` tokens in an attention layer, where
        they are; they keep `owner`. Raises EngineError for a layer that has no such rows, or not as they are read."""
        rows = next((each for each in self._layers if each.index == layer and isinstance(each, states.KVRows)), None)
        if rows is None:
            raise EngineError(f"layer {layer} keeps no keys and values: name layers of attention")
        if rows.dtype != "compute":
            raise EngineError(
                f"layer {layer} keeps its keys and values as {rows.dtype}, which nobody else reads: open the model "
                "with kv_cache='compute'"
            )
        if (
            isinstance(rows, states.WindowRows) and tokens > rows.reach
        ):  # behind it a step begins at the ring's first row
            raise EngineError(
                f"layer {layer} keeps its rows in a ring, in which {tokens} tokens are not in their order: prefill at "
                f"most {rows.reach}, or name layers without a window"
            )
        shape, gpu = (1, rows.heads, tokens, rows.size), self._backend.gpu_index
        if gpu is not None and self._backend.gpus > 1:
            raise EngineError("keys and values of several GPUs are not handed out: open the model on one")
        keys, values = (SharedArray(self.tensors[name][slot : slot + 1], shape, owner, gpu) for name in rows.names)
        return keys, values

    def recurrent_of_slot(self, slot: int) -> Iterator[SlotRows]:
        """The same of the recurrent states alone, which are as large after any number of tokens."""
        return (each for each in self.of_slot(slot, 0) if each.name in self._recurrent)

    def cut(self, held: int, wanted: int, kind: type[states.LayerState] | None = None) -> int:
        """Which place, at most `wanted`, the states of `held` tokens, all or those of a kind, can be cut to."""
        for layer in self._layers:
            if kind is None or isinstance(layer, kind):
                wanted = layer.cut(held, wanted)
        return wanted

    @property
    def window_reach(self) -> int:
        """How many tokens' rows a snapshot holds in layers that look back on a window; 0 without such layers."""
        return max((layer.reach for layer in self._layers if isinstance(layer, states.WindowRows)), default=0)

    def cut_windows(self, held: int, wanted: int) -> int:
        """Cuts as `cut` does, the layers that look back on a window alone."""
        return self.cut(held, wanted, states.WindowRows)

    def clear(self) -> None:
        """Let go of the memory."""
        self.tensors.clear()
        self._views.clear()
        self._recurrent.clear()
        self._zeros = self._first = None

    def _of_slot(self, slot: int) -> dict[str, Array]:
        """A slot's memory by name: [groups, C, size], one group where a tensor has none."""
        if slot not in self._views:
            parts = {name: tensor[slot : slot + 1] for name, tensor in self.tensors.items()}
            self._views[slot] = {
                name: part.reshape(*part.shape[1:]) if len(part.shape) == 4 else part for name, part in parts.items()
            }
        return self._views[slot]
