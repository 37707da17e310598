"""What layers keep of the tokens before: the state of each, as engines take it, memory holds it and snapshots save it.

`ModelStates` of the runners does the same with each kind. Nobody else builds the names of these tensors.

KV rows are written by the step itself, behind those that count; those of a window in a ring, over the oldest. Columns
of a convolution and recurrent matrices are not: a step reads them, keeps its inputs, and a commit then takes those of
the accepted tokens into the state. So a step whose tokens are not known yet, or may be refused, changes nothing. A
chunk of a prompt, all of whose tokens count, commits itself, and keeps nothing.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar

from edgellm.engines.model.config import DecoderConfig
from edgellm.engines.model.limits import WINDOW_SLACK, EngineLimits
from edgellm.kernels.arrays import ITEM_SIZES, Array

if TYPE_CHECKING:
    from edgellm.kernels.launch import Kernel

#: Shape and dtype ("compute", or one of `ITEM_SIZES`) by name.
Edge = dict[str, tuple[tuple[int, ...], str]]

#: What begins the name of the output by which an engine says that it changed a state in its own memory.
PRESENT = "present_"
_NAME = re.compile(r"(?:[kv]_(cache|scale)|([a-z]+_[a-z]+))_(?:0|[1-9][0-9]{0,3})")


@dataclass(frozen=True)
class LayerState(ABC):
    """What layer `index` keeps of the tokens before. B slots, T tokens of a step, C rows of memory.

    As it stands here it is of the place where it is, and of no other: a recurrent state.
    """

    index: int

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """Names of its tensors."""

    @abstractmethod
    def of_sequence(self, rows: int) -> Edge:
        """The tensors of one sequence, of so many rows where there are rows at all."""

    def tensors(self, slots: int, rows: int) -> Edge:
        """The tensors in memory, for so many slots, and so many rows where it has rows at all."""
        return {name: ((slots, *shape), dtype) for name, (shape, dtype) in self.of_sequence(rows).items()}

    def saved(self, tokens: int) -> Edge:
        """What a snapshot holds of one sequence of so many tokens."""
        return self.of_sequence(tokens)

    def kept(self, slots: int, tokens: int) -> Edge:
        """The inputs that a step of so many tokens keeps for the commit of those that are accepted."""
        return {}

    def first_saved(self, tokens: int) -> int:
        """The row in memory where, of a sequence of so many tokens, the first row that a snapshot holds stands; the
        others follow, row 0 behind the last."""
        return 0

    def cut(self, held: int, wanted: int) -> int:
        """Which place, at most `wanted`, a state can be cut to that has taken `held` tokens since it began anew or was
        restored, those that were cut off meanwhile included (0: it begins anew)."""
        return held if wanted >= held else 0


@dataclass(frozen=True)
class KVRows(LayerState):
    """Keys and values of an attention layer: a row of `size` elements for each token and key-value head.

    `dtype` is "compute" or "int8"; rows of int8 have a scale each (`edgellm.kernels.quantization.rows`). In memory
    they are [B, n_kv, C, D], the scales [B, n_kv, C, 1] float32.
    """

    heads: int
    size: int
    dtype: str = "compute"

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of its tensors: keys, values and, of rows of int8, the scales of both."""
        parts = ("cache",) if self.dtype == "compute" else ("cache", "scale")
        return tuple(f"{kind}_{part}_{self.index}" for part in parts for kind in ("k", "v"))

    def of_sequence(self, rows: int) -> Edge:
        """So many rows, and their scales."""
        kinds = ((self.size, self.dtype),) * 2 + ((1, "float32"),) * 2
        return {
            name: ((self.heads, rows, width), dtype) for name, (width, dtype) in zip(self.names, kinds, strict=False)
        }

    def cut(self, held: int, wanted: int) -> int:
        """Any place, by dropping rows."""
        return min(held, wanted)


@dataclass(frozen=True)
class WindowRows(KVRows):
    """The same of a layer that looks back on `window` tokens, the new one's own included: a ring of `rows` rows, the
    token at position p in row p % rows.

    Of a sequence the latest `reach` rows are surely there, whatever the latest step wrote behind them: those of the
    window, and by how far it can be cut.
    """

    window: int = 0
    rows: int = 0
    reach: int = 0

    def tensors(self, slots: int, rows: int) -> Edge:
        """Tensors of as many rows as the ring has, whatever the context."""
        return super().tensors(slots, self.rows)

    def saved(self, tokens: int) -> Edge:
        """The latest rows, in the order of their positions."""
        return self.of_sequence(min(tokens, self.reach))

    def first_saved(self, tokens: int) -> int:
        """The first in reach."""
        return max(0, tokens - self.reach) % self.rows

    def cut(self, held: int, wanted: int) -> int:
        """A place whose window is in reach, or the beginning."""
        wanted = min(held, wanted)
        return wanted if max(0, wanted - self.window + 1) >= held - self.reach else 0


@dataclass(frozen=True)
class RecurrentState(LayerState):
    """A state that a step only reads, and a commit changes: it is of one place in a text, and of no other.

    A kind says here all that others ask for by its name; they know no kind of it.
    """

    #: What begins the name of its tensor; the layer's number follows.
    stem: ClassVar[str]
    #: The method of `RecurrentKernels` that commits layers of this kind.
    commit: ClassVar[str]
    #: What begins the names of those values that serve all layers from one place where they are not kept.
    shared: ClassVar[tuple[str, ...]] = ()
    #: All kinds, by their stems.
    kinds: ClassVar[dict[str, type[RecurrentState]]] = {}

    def __init_subclass__(cls, **own: Any) -> None:
        super().__init_subclass__(**own)
        if "stem" in vars(cls):
            RecurrentState.kinds[cls.stem] = cls

    @property
    def names(self) -> tuple[str, ...]:
        return (f"{self.stem}_{self.index}",)

    @property
    @abstractmethod
    def kept_names(self) -> tuple[str, ...]:
        """Names of what a step keeps of its inputs, that which the step itself makes as the last."""

    @abstractmethod
    def committed(self, *arrays: Array) -> tuple[Array, ...]:
        """What the commit takes of the layer: its tensor, and what was kept."""

    @abstractmethod
    def commit_kernels(self) -> Iterator[Kernel]:
        """The kernels of its commits, of one token or of several."""


@dataclass(frozen=True)
class ConvColumns(RecurrentState):
    """The last `width` - 1 inputs of a short convolution over `channels`, the latest last, [B, channels, width - 1]
    float32.

    A sequence of fewer tokens has zeros before its first, as the convolution asks for.
    """

    channels: int
    width: int
    stem, commit = "conv_columns", "commit_columns"

    def of_sequence(self, rows: int) -> Edge:
        return dict.fromkeys(self.names, ((self.channels, self.width - 1), "float32"))

    @property
    def kept_names(self) -> tuple[str]:
        return (f"conv_inputs_{self.index}",)

    def kept(self, slots: int, tokens: int) -> Edge:
        """What is convolved: [B, T, channels] float32."""
        return dict.fromkeys(self.kept_names, ((slots, tokens, self.channels), "float32"))

    def committed(self, *arrays: Array) -> tuple[Array, ...]:
        from edgellm.kernels.recurrent.contract import LayerColumns  # NumPy, which the command line does without

        return LayerColumns(*arrays)

    def commit_kernels(self) -> Iterator[Kernel]:
        from edgellm.kernels.recurrent.launcher import convolution_kernel

        yield convolution_kernel(self.commit, self.width)


@dataclass(frozen=True)
class DeltaMatrix(RecurrentState):
    """The recurrent matrix S of each value head of a gated delta rule, float32.

    `heads` are the numbers of key and of value heads, `sizes` those of a key (Dk) and of a value (Dv). It is held
    turned, [B, value heads, Dv, Dk], since the elements of a value are independent of each other.
    """

    heads: tuple[int, int]
    sizes: tuple[int, int]
    stem, commit, shared = "delta_matrix", "commit_matrices", ("delta_rows",)
    #: What begins the names of what is kept, and whether kernels are those of scans.
    rows: ClassVar[str] = "delta_rows"
    gates: ClassVar[str] = "delta_gates"
    scans: ClassVar[bool] = False

    def of_sequence(self, rows: int) -> Edge:
        return dict.fromkeys(self.names, ((self.heads[1], self.sizes[1], self.sizes[0]), "float32"))

    @property
    def kept_names(self) -> tuple[str, str]:
        """Names of queries, keys and values; of decays and weights."""
        return f"{self.rows}_{self.index}", f"{self.gates}_{self.index}"

    def kept(self, slots: int, tokens: int) -> Edge:
        """Queries, keys and values behind the convolution, [B, T, 2 * key heads * Dk + value heads * Dv], and the
        logarithm of each value head's decay, then the weight of each one's new value, [B, T, 2 * value heads]; all
        float32."""
        width = 2 * self.heads[0] * self.sizes[0] + self.heads[1] * self.sizes[1]
        widths = zip(self.kept_names, (width, 2 * self.heads[1]), strict=True)
        return {name: ((slots, tokens, size), "float32") for name, size in widths}

    def committed(self, *arrays: Array) -> tuple[Array, ...]:
        from edgellm.kernels.recurrent.contract import LayerMatrices  # NumPy, which the command line does without

        return LayerMatrices(*arrays)

    def commit_kernels(self) -> Iterator[Kernel]:
        from edgellm.kernels.recurrent.launcher import delta_kernel

        return (
            delta_kernel("commit_matrices", self.sizes[0], is_one, scans=self.scans) for is_one in ("true", "false")
        )


@dataclass(frozen=True)
class SpaceMatrix(DeltaMatrix):
    """The matrix of each head of a state space of Mamba-2, held as that of a delta rule is: its key heads are the
    groups of B and C, its keys B, its queries C, its values x.

    What is kept are x, B and C, of the same widths together, and step sizes in place of weights.
    """

    stem, commit, shared = "space_matrix", "commit_scans", ("space_rows",)
    rows, gates, scans = "space_rows", "space_gates", True


def _delta(config: DecoderConfig, index: int, matrix_kind: type[DeltaMatrix] = DeltaMatrix) -> list[RecurrentState]:
    key_heads, value_heads, key_size, value_size = config.delta_heads
    matrix = matrix_kind(index, (key_heads, value_heads), (key_size, value_size))
    return [ConvColumns(index, config.delta_channels, config.conv_width), matrix]


#: The states of a layer without KV rows, by its kind.
_OTHERS: dict[str, Callable[[DecoderConfig, int], list[RecurrentState]]] = {
    "convolution": lambda config, index: [ConvColumns(index, config.hidden_size, config.conv_width)],
    "delta": _delta,
    "mamba": partial(_delta, matrix_kind=SpaceMatrix),
    "mlp": lambda config, index: [],
}


def decoder_states(
    config: DecoderConfig, kv_cache: str = "compute", limits: EngineLimits | None = None
) -> list[LayerState]:
    """The states of a decoder's layers, in their order; a layer may have several. Without `limits` they are those of a
    draft, or of a context that no window is shorter than."""
    own = (index for index in range(config.num_layers) if config.rows_layer(index) == index)
    return [state for index in own for state in _layer_states(config, index, kv_cache, limits)]


def _layer_states(config: DecoderConfig, index: int, kv_cache: str, limits: EngineLimits | None) -> list[LayerState]:
    kind = config.layer_kind(index)
    if kind in _OTHERS:
        return [*_OTHERS[kind](config, index)]
    rows = KVRows(index, *config.kv_heads(index), kv_cache)
    if limits is None or kind != "window" or not limits.window_rows or config.sliding_window is None:
        return [rows]
    held, reach = limits.window_rows, config.sliding_window + WINDOW_SLACK
    if held < limits.kv_rows:  # else nothing is ever written over
        reach = min(reach, held - limits.window_step)
    return [WindowRows(index, rows.heads, rows.size, kv_cache, config.sliding_window, held, reach)]


def state_edge(states: Iterable[LayerState], slots: int, rows: int) -> Edge:
    """The tensors of several layers' states, layer by layer."""
    return {name: kind for state in states for name, kind in state.tensors(slots, rows).items()}


def without_layer(name: str) -> str:
    """The name of a value that is `RecurrentState.shared` without the number of its layer; others as they are."""
    prefix, _, number = name.rpartition("_")
    is_shared = number.isdigit() and any(prefix in kind.shared for kind in RecurrentState.kinds.values())
    return prefix if is_shared else name


def saved_dtype(name: str, kv_cache: str) -> str | None:
    """The dtype of the tensor `name` of a state whose rows are of `kv_cache`; None for a name that it has not."""
    match = _NAME.fullmatch(name)
    if match is None or (match[1] == "scale" and kv_cache == "compute"):
        return None
    if match[2] is not None and match[2] not in RecurrentState.kinds:
        return None
    return kv_cache if match[1] == "cache" else "float32"


def is_recurrent(name: str) -> bool:
    """Whether a tensor of this name is a recurrent state."""
    match = _NAME.fullmatch(name)
    return match is not None and match[2] in RecurrentState.kinds


def kept_edge(states: Iterable[LayerState], slots: int, tokens: int) -> Edge:
    """What a step of so many tokens keeps for its commit, layer by layer."""
    return {name: kind for state in states for name, kind in state.kept(slots, tokens).items()}


def state_bytes(edge: Edge, compute_dtype: str) -> int:
    """The bytes of tensors."""
    return sum(math.prod(shape) * _item_size(dtype, compute_dtype) for shape, dtype in edge.values())


def recurrent_states(states: Iterable[LayerState]) -> list[RecurrentState]:
    """Those of them that a step only reads, and a commit changes."""
    return [state for state in states if isinstance(state, RecurrentState)]


def largest_state(edge: Edge) -> int:
    """The most elements of a sequence that a tensor has."""
    return max(math.prod(shape) for (_, *shape), _ in edge.values())


def _item_size(dtype: str, compute_dtype: str) -> int:
    return ITEM_SIZES[compute_dtype if dtype == "compute" else dtype]
