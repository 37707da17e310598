"""The kernels of a plain step on the GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.compiler import ModuleSource
from edgellm.kernels.contracts import cuda_header
from edgellm.kernels.decode.arguments import MACROS
from edgellm.kernels.errors import KernelError
from edgellm.kernels.launch import Kernel, KernelModule
from edgellm.kernels.launcher import CUDA_TYPES, Launcher
from edgellm.kernels.quantization.device_layout import DeviceLayout, PackedMatrix
from edgellm.kernels.sampling.contract import (
    IN_PROMPT,
    ModelTables,
    SamplingKernels,
    SamplingRows,
    SequenceState,
    StepInputs,
)

#: Bytes of one `FilterRow` of filter.cu, which asserts it; threads of a block that works on a row of the vocabulary.
FILTER_ROW_BYTES, ROW_THREADS = 45_088, 512
#: What kernels that use headers of this folder are compiled with.
SAMPLING_HEADER = ("sampling/arguments.cuh", cuda_header(SamplingKernels))
SAMPLING_MACROS = (("FILTER_ROW_BYTES", FILTER_ROW_BYTES), ("ROW_THREADS", ROW_THREADS), ("IN_PROMPT", IN_PROMPT))
_COPY_THREADS = 256
_TOKENS_PER_BLOCK = 4 * ROW_THREADS
#: Above this, more blocks only wait in line for the row's atomics.
_MAXIMUM_BLOCKS_PER_ROW = 64
#: What one thread looks at, where that makes no more blocks than fill the largest GPUs a few times.
_BYTES_PER_THREAD, _MOST_BLOCKS = 64, 2048
#: Of each row's workspace: the best token, the blocks that are done, the filter's.
_ROW_BYTES = 8 + 4 + 4 + FILTER_ROW_BYTES


def _source(name: str, files: tuple[str, ...], *expressions: str) -> ModuleSource:
    return ModuleSource(name, files, expressions, SAMPLING_MACROS, (SAMPLING_HEADER,))


#: What draws tokens, apart from what the argmax needs.
DRAWING = _source(
    "sampling",
    ("sampling/filter.cu", "sampling/sample.cu"),
    *("filter_range", "filter_histogram", "filter_select", "process_logits", "sample", "count_tokens"),
)

#: What brings masks and biases to the logits; most requests have neither.
CONSTRAINING = _source("constrain", ("sampling/constrain.cu",), "constrain_logits")


@dataclass(frozen=True)
class SharedTable:
    """An embedding table [V, H] in `pieces` in the memory of n GPUs, of which piece i has the rows from V i / n to
    before V (i + 1) / n; `places` uint64 [n] are their addresses, for kernels that reach them all."""

    pieces: tuple[DeviceArray | PackedMatrix, ...]
    places: DeviceArray

    @property
    def whole(self) -> DeviceArray:
        """The table as contracts check it."""
        first, rows = self.pieces[0], sum(piece.shape[0] for piece in self.pieces)
        return DeviceArray(self.places.pointer, (rows, first.shape[1]), first.dtype, self)


class EmbeddingTable(NamedTuple):
    """What kernels know of an embedding table when they are compiled: of a packed one `scales` and `mode`, which see
    decode/packed_codes.cuh, and in how many `pieces` it is."""

    scales: int = 0
    mode: int = 0
    pieces: int = 1

    @classmethod
    def of(cls, layout: DeviceLayout | None, pieces: int = 1) -> EmbeddingTable | None:
        """Of a table that is packed so (None: dense); None of a dense one in one piece."""
        if layout is None:
            return cls(pieces=pieces) if pieces > 1 else None
        return cls(layout.scales, layout.mode, pieces)

    @property
    def name(self) -> str:
        """What the names of its sources end with."""
        packed = f"_{self.scales}_{self.mode}" if self.scales else ""
        return packed + (f"_in_{self.pieces}" if self.pieces > 1 else "")

    @property
    def macros(self) -> tuple[tuple[str, int | str], ...]:
        """What a source is compiled with."""
        packed = (("EMBEDDING_SCALES", self.scales), ("EMBEDDING_MODE", self.mode), *MACROS) if self.scales else ()
        return (*packed, *((("EMBEDDING_PIECES", self.pieces),) if self.pieces > 1 else ()))


def split_tables(tables: ModelTables) -> tuple[ModelTables, EmbeddingTable | None]:
    """Tables as contracts check them, and what kernels know of the embedding: None of a dense one in one piece."""
    table = tables.embedding
    first, pieces = (table.pieces[0], len(table.pieces)) if isinstance(table, SharedTable) else (table, 1)
    packed = first if isinstance(first, PackedMatrix) else None
    if packed is not None and packed.shape[1] % 8:
        raise KernelError(f"a packed embedding has {packed.shape[1]} columns; expected a multiple of 8")
    if isinstance(table, SharedTable):
        table = table.whole
    elif packed is not None:
        table = DeviceArray(packed.pointer, packed.shape, packed.dtype, packed.data)
    return tables._replace(embedding=table), EmbeddingTable.of(None if packed is None else packed.layout, pieces)


@lru_cache
def step_source(dtype: str, embedding: EmbeddingTable | None = None) -> ModuleSource:
    """What a plain greedy step of a model of `dtype` needs, which may have an embedding that is packed or in
    pieces."""
    kernel = f"prepare_step<{CUDA_TYPES[dtype]}>"
    if embedding is None:
        return _source(f"step_{dtype}", ("sampling/step.cu",), kernel, "argmax")
    source = _source(f"step_{dtype}{embedding.name}", ("sampling/step.cu",), kernel)
    return replace(source, macros=source.macros + embedding.macros)


@lru_cache
def finite_source(dtype: str) -> ModuleSource:
    """What looks for infinities and NaN among weights of `dtype`."""
    return _source(f"finite_{dtype}", ("sampling/first_not_finite.cu",), f"first_not_finite<{CUDA_TYPES[dtype]}>")


class CudaSampling(Launcher):
    """See `edgellm.kernels.sampling.contract.SamplingKernels`; arrays are `DeviceArray`."""

    def __init__(self, module: KernelModule, dtype: str, workspace: DeviceArray) -> None:
        """Prepares the kernels for a model of `dtype`. `workspace` [N] uint8 is zero, of `workspace_bytes` for the most
        rows of a call.

        Raises MissingDependencyError or KernelError where what every step needs cannot be compiled or loaded.
        """
        super().__init__(module, SamplingKernels)
        self._step = step_source(dtype)
        module.load(self._step)
        self._rows = workspace.size // _ROW_BYTES
        self._workspace = workspace
        self._best = workspace[: 8 * self._rows]
        self._filter_rows = workspace[8 * self._rows :][: FILTER_ROW_BYTES * self._rows]
        self._finished = workspace[(8 + FILTER_ROW_BYTES) * self._rows :]

    @staticmethod
    def workspace_bytes(rows: int) -> int:
        """Bytes of workspace for up to `rows` rows (sequences, or nodes of all trees) of a call."""
        if rows < 1:
            raise KernelError(f"{rows} rows; expected at least 1")
        return _ROW_BYTES * rows

    def prepare_step(self, tables: ModelTables, token_ids: DeviceArray, inputs: StepInputs) -> None:
        """Embeddings, rotary rows and mask; it lets the next kernel overlap it. See the contract."""
        tables, embedding = split_tables(tables)
        sizes, packed = self._packed("prepare_step", tables, token_ids, inputs)
        dtype = tables.embedding.dtype
        kernel = Kernel(step_source(dtype, embedding), f"prepare_step<{CUDA_TYPES[dtype]}>")
        self._launch(kernel, (sizes["T"], sizes["B"], 2), _COPY_THREADS, (packed,))

    def argmax(self, logits: DeviceArray, tokens: DeviceArray, state: SequenceState | None = None) -> None:
        """The lowest id of the largest logits; a `state` takes it. It overlaps the kernel before it."""
        sizes, packed = self._packed("argmax", logits, tokens, state)
        self._launch_rows(Kernel(self._step, "argmax"), sizes, packed, self._best, self._finished, early=True)

    def constrain_logits(self, logits, mask_rows, masks, bias, rows):
        """Masks, then biases, in place; it overlaps the kernel before it and lets the next one do so. See the
        contract."""
        sizes, packed = self._packed("constrain_logits", logits, mask_rows, masks, bias, rows)
        self._launch_rows(Kernel(CONSTRAINING, "constrain_logits"), sizes, packed)

    def process_logits(self, logits, token_counts, rows, processed):
        sizes, packed = self._packed("process_logits", logits, token_counts, rows, processed)
        self._launch_rows(Kernel(DRAWING, "process_logits"), sizes, packed)

    def filter_threshold(self, processed: DeviceArray, rows: SamplingRows, thresholds: DeviceArray) -> None:
        """The bound of top-k, top-p and min-p of each row, in three launches; see the contract."""
        sizes, packed = self._packed("filter_threshold", processed, rows, thresholds)
        for name in ("filter_range", "filter_histogram", "filter_select"):
            self._launch_rows(Kernel(DRAWING, name), sizes, packed, self._filter_rows)

    def sample(self, processed, thresholds, rows, positions, tokens, state=None):
        """Draw a token of each row by Gumbel-max; a `state` takes it. See the contract."""
        sizes, packed = self._packed("sample", processed, thresholds, rows, positions, tokens, state)
        self._launch_rows(Kernel(DRAWING, "sample"), sizes, packed, self._best, self._finished)

    def count_tokens(self, token_ids: DeviceArray, token_counts: DeviceArray) -> None:
        sizes, packed = self._packed("count_tokens", token_ids, token_counts)
        self._fill(token_counts, 0)
        if sizes["N"]:
            self._launch(Kernel(DRAWING, "count_tokens"), (-(-sizes["N"] // _COPY_THREADS),), _COPY_THREADS, (packed,))

    def first_not_finite(self, values: DeviceArray, index: DeviceArray) -> None:
        sizes, packed = self._packed("first_not_finite", values, index)
        self._fill(index, 0xFF)  # -1: more than any index where bits are a size
        if sizes["N"]:
            blocks = min(-(-values.nbytes // (_BYTES_PER_THREAD * _COPY_THREADS)), _MOST_BLOCKS)
            kernel = Kernel(finite_source(values.dtype), f"first_not_finite<{CUDA_TYPES[values.dtype]}>")
            self._launch(kernel, (blocks,), _COPY_THREADS, (packed,))

    def _launch_rows(self, kernel: Kernel, sizes: dict[str, int], *arguments: object, early: bool = False) -> None:
        """Launch a kernel that spreads each row of the vocabulary over several blocks."""
        rows = sizes["B"]
        if rows > self._rows:
            raise KernelError(
                f"{kernel.expression}: {rows} rows; these kernels have a workspace for at most {self._rows}"
            )
        blocks = min(-(-sizes["V"] // _TOKENS_PER_BLOCK), _MAXIMUM_BLOCKS_PER_ROW)
        self._launch(kernel, (blocks, rows), ROW_THREADS, arguments, early=early, zeroed=self._workspace)
