"""The kernels on the GPU: compiled by NVRTC, launched through pycuda.

Those at the two ends of a decode step overlap with the engine between them, which pycuda cannot ask for: they are
launched as the decode engine's own kernels are.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from edgellm.kernels.arrays import ITEM_SIZES, DeviceArray
from edgellm.kernels.checks import check_device_arguments
from edgellm.kernels.compiler import ModuleSource, cached_module
from edgellm.kernels.errors import KernelError, MissingDependencyError
from edgellm.kernels.interface import SequenceState
from edgellm.kernels.launch import Kernel, KernelModule, Launch, pointer, refused_by_driver

#: Bytes of one `FilterRow` of cuda/filter_workspace.cuh, which asserts it.
FILTER_ROW_BYTES = 45_088
#: All kernels but those of linear layers and attention.
OTHER_KERNELS = ModuleSource(
    "kernels",
    tuple(f"cuda/{name}" for name in sorted(path.name for path in (Path(__file__).parent / "cuda").glob("*.cu"))),
    macros=(("FILTER_ROW_BYTES", FILTER_ROW_BYTES),),
)
#: Kernel name -> types of its parameters, as `struct` spells them (P pointer, i int, I unsigned int, N size_t).
_PARAMETERS = {
    "embedding_lookup": "PPPIN",
    "prepare_attention_float32": "PPPPPIII",
    "prepare_attention_float16": "PPPPPIII",
    "prepare_attention_bfloat16": "PPPPPIII",
    "insert_image_rows": "PPPPiiIN",
    "mrope_rotary_rows_float32": "PPPPII",
    "mrope_rotary_rows_float16": "PPPPII",
    "mrope_rotary_rows_bfloat16": "PPPPII",
    "process_logits": "PPPPPPPI",
    "filter_range": "PPPPPI",
    "filter_histogram": "PPPPPI",
    "filter_select": "PPPPPPI",
    "sample": "PPPPPPPIPPPPPPPPPI",
    "count_tokens": "PPII",
    "first_not_finite_float32": "PPN",
    "first_not_finite_float16": "PPN",
    "first_not_finite_bfloat16": "PPN",
}
_COPY_THREADS = 256
_ROW_THREADS = 512  # as FILTER_THREADS of cuda/filter_workspace.cuh
_TOKENS_PER_BLOCK = 4 * _ROW_THREADS
#: The filter's sums of one block stay below 2^32 up to this vocabulary.
_MAXIMUM_FILTERED_VOCABULARY = 1 << 21
#: Above this, more blocks only wait in line for the row's atomics.
_MAXIMUM_BLOCKS_PER_ROW = 64
#: What one thread looks at, where that makes no more blocks than fill the largest GPUs a few times.
_BYTES_PER_THREAD, _MOST_BLOCKS = 64, 2048
_NO_STATE = (None,) * len(SequenceState._fields)


class CudaKernels:
    """See `edgellm.kernels.interface.Kernels`; arrays are `DeviceArray`, launches go to one stream, in order.

    A NaN among logits counts as -inf; a row without any larger value selects id 0.
    """

    def __init__(self, stream: Any, module: KernelModule, max_batch: int = 8) -> None:
        """Load the kernels into the current CUDA context and allocate workspace for `max_batch` rows.

        `stream` is a pycuda stream, `module` the kernels made ready for it. Raises MissingDependencyError or
        KernelError.
        """
        try:
            import pycuda.driver as cuda
        except ImportError as error:
            raise MissingDependencyError(
                f"pycuda does not load ({error}). Install it with pip install '.[gpu]' in EdgeLLM's checkout"
            ) from error
        if max_batch < 1:
            raise KernelError(f"max_batch is {max_batch}; expected at least 1")
        try:
            self._module = cuda.module_from_buffer(cached_module(OTHER_KERNELS, module.architecture).code)
        except cuda.Error as error:
            raise refused_by_driver(module.architecture, error) from error
        self._overlapping = module
        self._stream = stream
        self._max_batch = max_batch
        self._memset = cuda.memset_d32_async
        self._functions = {}
        for name, parameters in _PARAMETERS.items():
            function = self._module.get_function(name)
            function.prepare(parameters)
            self._functions[name] = function.prepared_async_call
        # The kernels leave the workspace zeroed, as they find it.
        workspace_bytes = max_batch * (8 + 4 + 4 + FILTER_ROW_BYTES)
        self._workspace = cuda.mem_alloc(workspace_bytes)
        cuda.memset_d8_async(self._workspace, 0, workspace_bytes, stream)
        self._best = int(self._workspace)
        self._filter_rows = self._best + 8 * max_batch
        self._finished = self._filter_rows + FILTER_ROW_BYTES * max_batch

    def embedding_lookup(self, table: DeviceArray, token_ids: DeviceArray, inputs_embeds: DeviceArray) -> None:
        """Copy rows of `table` [V, H] named by `token_ids` [B, T] to `inputs_embeds` [B, T, H]; zeros for others."""
        sizes = check_device_arguments("embedding_lookup", table, token_ids, inputs_embeds)
        self._functions["embedding_lookup"](
            (sizes["B"] * sizes["T"], 1),
            (_COPY_THREADS, 1, 1),
            self._stream,
            table.pointer,
            token_ids.pointer,
            inputs_embeds.pointer,
            sizes["V"],
            sizes["H"] * ITEM_SIZES[table.dtype],
        )

    def prepare_attention(
        self,
        kvcache_start_index: DeviceArray,
        position_offsets: DeviceArray,
        rotary_table: DeviceArray,
        rope_rotary_cos_sin: DeviceArray,
        attention_mask: DeviceArray,
    ) -> None:
        """Rotary rows [B, T, R] and causal mask [B, 1, T, L] of T tokens after `kvcache_start_index` [B] rows."""
        sizes = check_device_arguments(
            "prepare_attention",
            kvcache_start_index,
            position_offsets,
            rotary_table,
            rope_rotary_cos_sin,
            attention_mask,
        )
        self._functions[f"prepare_attention_{rope_rotary_cos_sin.dtype}"](
            (sizes["T"], sizes["B"]),
            (_COPY_THREADS, 1, 1),
            self._stream,
            kvcache_start_index.pointer,
            position_offsets.pointer,
            rotary_table.pointer,
            rope_rotary_cos_sin.pointer,
            attention_mask.pointer,
            sizes["P"],
            sizes["R"],
            sizes["L"],
        )

    def prepare_step(
        self,
        table: DeviceArray,
        token_ids: DeviceArray,
        inputs_embeds: DeviceArray,
        kvcache_start_index: DeviceArray,
        position_offsets: DeviceArray,
        rotary_table: DeviceArray,
        rope_rotary_cos_sin: DeviceArray,
        attention_mask: DeviceArray,
    ) -> None:
        """`embedding_lookup` and `prepare_attention` at once. It lets the next kernel overlap it."""
        embedding = (table, token_ids, inputs_embeds)
        attention = (kvcache_start_index, position_offsets, rotary_table, rope_rotary_cos_sin, attention_mask)
        sizes = check_device_arguments("prepare_step", *embedding, *attention)
        arguments = (
            *map(pointer, embedding),
            ctypes.c_uint(sizes["V"]),
            ctypes.c_size_t(sizes["H"] * ITEM_SIZES[table.dtype]),
            *map(pointer, attention),
            *(ctypes.c_uint(sizes[axis]) for axis in "PRL"),
        )
        grid = (sizes["T"], sizes["B"], 2)
        kernel = Kernel(OTHER_KERNELS, f"prepare_step_{table.dtype}")
        Launch(self._overlapping, kernel, grid, _COPY_THREADS, 0, arguments)()

    def insert_image_rows(
        self,
        image_rows: DeviceArray,
        token_ids: DeviceArray,
        target: DeviceArray,
        inserted: DeviceArray,
        image_token_id: int,
        first_row: int,
    ) -> None:
        """Rows of `image_rows` [M, H] from `first_row` on at the image tokens among `token_ids` [1, T]."""
        arrays = (image_rows, token_ids, target, inserted)
        sizes = check_device_arguments("insert_image_rows", *arrays)
        self._functions["insert_image_rows"](
            (sizes["T"], 1),
            (_COPY_THREADS, 1, 1),
            self._stream,
            *[array.pointer for array in arrays],
            image_token_id,
            first_row,
            sizes["M"],
            sizes["H"] * ITEM_SIZES[image_rows.dtype],
        )

    def mrope_rotary_rows(
        self, positions: DeviceArray, axes: DeviceArray, rotary_table: DeviceArray, rope_rotary_cos_sin: DeviceArray
    ) -> None:
        """Rotary rows [1, T, R] of tokens at `positions` [3, T]: column i follows the axis axes[i]."""
        arrays = (positions, axes, rotary_table, rope_rotary_cos_sin)
        sizes = check_device_arguments("mrope_rotary_rows", *arrays)
        self._functions[f"mrope_rotary_rows_{rope_rotary_cos_sin.dtype}"](
            (sizes["T"], 1),
            (_COPY_THREADS, 1, 1),
            self._stream,
            *[array.pointer for array in arrays],
            sizes["P"],
            sizes["R"],
        )

    def argmax(self, logits: DeviceArray, tokens: DeviceArray, state: SequenceState | None = None) -> None:
        """`tokens` [B]: the lowest id of the largest of `logits` [B, V]; a `state` takes them.

        It overlaps the kernel before it.
        """
        arrays = (logits, tokens, *(state or ()))
        sizes = check_device_arguments("argmax" if state is None else "argmax_and_advance", *arrays)
        arguments = (
            pointer(logits),
            pointer(tokens),
            ctypes.c_uint(sizes["V"]),
            ctypes.c_void_p(self._best),
            ctypes.c_void_p(self._finished),
            *map(pointer, state or _NO_STATE),
            ctypes.c_uint(sizes.get("E", 0)),
        )
        kernel, grid = Kernel(OTHER_KERNELS, "argmax"), self._row_grid("argmax", sizes)
        launch = Launch(self._overlapping, kernel, grid, _ROW_THREADS, 0, arguments)
        launch.overlap_previous()
        launch()

    def process_logits(
        self,
        logits: DeviceArray,
        token_counts: DeviceArray,
        repetition_penalty: DeviceArray,
        presence_penalty: DeviceArray,
        frequency_penalty: DeviceArray,
        temperature: DeviceArray,
        processed: DeviceArray,
    ) -> None:
        """Penalties, then temperature, `logits` [B, V] to `processed` [B, V]."""
        arrays = (
            logits,
            token_counts,
            repetition_penalty,
            presence_penalty,
            frequency_penalty,
            temperature,
            processed,
        )
        sizes = check_device_arguments("process_logits", *arrays)
        self._launch_rows("process_logits", sizes, *[array.pointer for array in arrays], sizes["V"])

    def filter_threshold(
        self,
        processed: DeviceArray,
        top_k: DeviceArray,
        top_p: DeviceArray,
        min_p: DeviceArray,
        thresholds: DeviceArray,
    ) -> None:
        """`thresholds` [B]: exactly the values of `processed` [B, V] that are at least this pass; -inf where all do."""
        sizes = check_device_arguments("filter_threshold", processed, top_k, top_p, min_p, thresholds)
        if sizes["V"] > _MAXIMUM_FILTERED_VOCABULARY:
            raise KernelError(f"filter_threshold: V = {sizes['V']}; expected at most {_MAXIMUM_FILTERED_VOCABULARY}")
        settings = (processed.pointer, top_k.pointer, top_p.pointer, min_p.pointer, self._filter_rows)
        self._launch_rows("filter_range", sizes, *settings, sizes["V"])
        self._launch_rows("filter_histogram", sizes, *settings, sizes["V"])
        self._launch_rows("filter_select", sizes, *settings, thresholds.pointer, sizes["V"])

    def sample(
        self,
        processed: DeviceArray,
        thresholds: DeviceArray,
        temperature: DeviceArray,
        seeds: DeviceArray,
        sequences: DeviceArray,
        positions: DeviceArray,
        tokens: DeviceArray,
        state: SequenceState | None = None,
    ) -> None:
        """Draw `tokens` [B] by Gumbel-max from `processed` [B, V] where >= `thresholds` [B]; a `state` takes them."""
        arrays = (processed, thresholds, temperature, seeds, sequences, positions, tokens)
        sizes = check_device_arguments("sample" if state is None else "sample_and_advance", *arrays, *(state or ()))
        pointers = [array.pointer for array in arrays]
        advance = [0 if array is None else array.pointer for array in state or _NO_STATE]
        workspace = (self._best, self._finished)
        self._launch_rows("sample", sizes, *pointers, sizes["V"], *workspace, *advance, sizes.get("E", 0))

    def count_tokens(self, token_ids: DeviceArray, token_counts: DeviceArray) -> None:
        """Clear `token_counts` [V] and mark those of `token_ids` [N] that are ids of it as `IN_PROMPT`."""
        sizes = check_device_arguments("count_tokens", token_ids, token_counts)
        self._memset(token_counts.pointer, 0, sizes["V"], self._stream)
        if sizes["N"]:
            self._functions["count_tokens"](
                (-(-sizes["N"] // _COPY_THREADS), 1),
                (_COPY_THREADS, 1, 1),
                self._stream,
                token_ids.pointer,
                token_counts.pointer,
                sizes["N"],
                sizes["V"],
            )

    def first_not_finite(self, values: DeviceArray, index: DeviceArray) -> None:
        """`index` [1]: that of the first of `values` [N] that is infinite or NaN; -1 where none is."""
        sizes = check_device_arguments("first_not_finite", values, index)
        self._memset(index.pointer, 0xFFFFFFFF, 2, self._stream)  # -1: more than any index where bits are a size
        if sizes["N"]:
            blocks = min(-(-values.nbytes // (_BYTES_PER_THREAD * _COPY_THREADS)), _MOST_BLOCKS)
            launch = self._functions[f"first_not_finite_{values.dtype}"]
            launch((blocks, 1), (_COPY_THREADS, 1, 1), self._stream, values.pointer, index.pointer, sizes["N"])

    def _launch_rows(self, name: str, sizes: dict[str, int], *arguments: int) -> None:
        """Launch a kernel that spreads each row of the vocabulary over several blocks."""
        grid = self._row_grid(name, sizes)
        self._functions[name](grid[:2], (_ROW_THREADS, 1, 1), self._stream, *arguments)

    def _row_grid(self, name: str, sizes: dict[str, int]) -> tuple[int, int, int]:
        """Blocks of a row, rows, 1."""
        rows = sizes["B"]
        if rows > self._max_batch:
            raise KernelError(f"{name}: {rows} rows; these kernels were made for at most {self._max_batch} (max_batch)")
        return min(-(-sizes["V"] // _TOKENS_PER_BLOCK), _MAXIMUM_BLOCKS_PER_ROW), rows, 1
