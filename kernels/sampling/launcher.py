"""The kernels of a plain step on the GPU."""

from __future__ import annotations

from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.errors import KernelError
from edgellm.kernels.launch import CUDA_TYPES, KernelModule
from edgellm.kernels.launcher import Launcher
from edgellm.kernels.sampling.contract import (
    ModelTables,
    SamplingKernels,
    SamplingRows,
    SequenceState,
    StepInputs,
)
from edgellm.kernels.sampling.sources import FILTER_ROW_BYTES, ROW_THREADS

_COPY_THREADS = 256
_TOKENS_PER_BLOCK = 4 * ROW_THREADS
#: Above this, more blocks only wait in line for the row's atomics.
_MAXIMUM_BLOCKS_PER_ROW = 64
#: What one thread looks at, where that makes no more blocks than fill the largest GPUs a few times.
_BYTES_PER_THREAD, _MOST_BLOCKS = 64, 2048
#: Of each row's workspace: the best token, the blocks that are done, the filter's.
_ROW_BYTES = 8 + 4 + 4 + FILTER_ROW_BYTES


class CudaSampling(Launcher):
    """See `edgellm.kernels.sampling.contract.SamplingKernels`; arrays are `DeviceArray`."""

    def __init__(self, module: KernelModule, workspace: DeviceArray) -> None:
        """`workspace` [N] uint8 is zero, of `workspace_bytes` for the most rows that a call may have."""
        super().__init__(module, SamplingKernels)
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
        sizes = self._check("prepare_step", tables, token_ids, inputs)
        packed = self._check.pack("prepare_step", sizes, tables, token_ids, inputs)
        name = f"prepare_step<{CUDA_TYPES[tables.embedding.dtype]}>"
        self._launch(name, (sizes["T"], sizes["B"], 2), _COPY_THREADS, (packed,))

    def argmax(self, logits: DeviceArray, tokens: DeviceArray, state: SequenceState | None = None) -> None:
        """The lowest id of the largest logits; a `state` takes it. It overlaps the kernel before it."""
        sizes = self._check("argmax", logits, tokens, state)
        packed = self._check.pack("argmax", sizes, logits, tokens, state)
        self._launch_rows("argmax", sizes, packed, self._best, self._finished, early=True)

    def process_logits(
        self, logits: DeviceArray, token_counts: DeviceArray, rows: SamplingRows, processed: DeviceArray
    ) -> None:
        """Penalties, then temperature; see the contract."""
        sizes = self._check("process_logits", logits, token_counts, rows, processed)
        packed = self._check.pack("process_logits", sizes, logits, token_counts, rows, processed)
        self._launch_rows("process_logits", sizes, packed)

    def filter_threshold(self, processed: DeviceArray, rows: SamplingRows, thresholds: DeviceArray) -> None:
        """The bound of top-k, top-p and min-p of each row, in three launches; see the contract."""
        sizes = self._check("filter_threshold", processed, rows, thresholds)
        packed = self._check.pack("filter_threshold", sizes, processed, rows, thresholds)
        for name in ("filter_range", "filter_histogram", "filter_select"):
            self._launch_rows(name, sizes, packed, self._filter_rows)

    def sample(
        self,
        processed: DeviceArray,
        thresholds: DeviceArray,
        rows: SamplingRows,
        positions: DeviceArray,
        tokens: DeviceArray,
        state: SequenceState | None = None,
    ) -> None:
        """Draw a token of each row by Gumbel-max; a `state` takes it. See the contract."""
        arguments = (processed, thresholds, rows, positions, tokens, state)
        sizes = self._check("sample", *arguments)
        packed = self._check.pack("sample", sizes, *arguments)
        self._launch_rows("sample", sizes, packed, self._best, self._finished)

    def count_tokens(self, token_ids: DeviceArray, token_counts: DeviceArray) -> None:
        """Mark the tokens of a prompt in a cleared row of counts; see the contract."""
        sizes = self._check("count_tokens", token_ids, token_counts)
        self._fill(token_counts, 0)
        if sizes["N"]:
            packed = self._check.pack("count_tokens", sizes, token_ids, token_counts)
            self._launch("count_tokens", (-(-sizes["N"] // _COPY_THREADS),), _COPY_THREADS, (packed,))

    def first_not_finite(self, values: DeviceArray, index: DeviceArray) -> None:
        """The index of the first value that is infinite or NaN; see the contract."""
        sizes = self._check("first_not_finite", values, index)
        self._fill(index, 0xFF)  # -1: more than any index where bits are a size
        if sizes["N"]:
            packed = self._check.pack("first_not_finite", sizes, values, index)
            blocks = min(-(-values.nbytes // (_BYTES_PER_THREAD * _COPY_THREADS)), _MOST_BLOCKS)
            name = f"first_not_finite<{CUDA_TYPES[values.dtype]}>"
            self._launch(name, (blocks,), _COPY_THREADS, (packed,))

    def _launch_rows(self, name: str, sizes: dict[str, int], *arguments: object, early: bool = False) -> None:
        """Launch a kernel that spreads each row of the vocabulary over several blocks."""
        rows = sizes["B"]
        if rows > self._rows:
            raise KernelError(f"{name}: {rows} rows; these kernels have a workspace for at most {self._rows}")
        blocks = min(-(-sizes["V"] // _TOKENS_PER_BLOCK), _MAXIMUM_BLOCKS_PER_ROW)
        self._launch(name, (blocks, rows), ROW_THREADS, arguments, early=early, zeroed=self._workspace)
