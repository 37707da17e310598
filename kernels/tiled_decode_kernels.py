"""The kernels of steps of up to 64 tokens on the GPU, as trees have that are verified, prepared once for every step.

Each method has the arguments of its NumPy twin in `numpy_tiled_decode_kernels` and returns a `Launch` that
enqueues it; their attention is that of `CudaDecodeKernels`. A row gets the bits that `CudaDecodeKernels` computes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.cuda_kernels import OTHER_KERNELS
from edgellm.kernels.decode_attention import attention_shared_bytes
from edgellm.kernels.decode_kernels import check_room, feature_arguments, padded_columns, slice_steps
from edgellm.kernels.errors import KernelError
from edgellm.kernels.launch import Kernel, KernelModule, Launch, pointer
from edgellm.kernels.linear_tilings import TiledGpu, Tiling, fastest_tiling, tilings
from edgellm.kernels.tensor_maps import tensor_map

#: The most rows of a step (its tokens, of all sequences together).
MAX_TILED_ROWS = 64

_THREADS = 256
_NORM_THREADS, _NORM_SLICES = 512, 16


class CudaTiledKernels:
    """The kernels in a loaded module, on its stream."""

    def __init__(self, module: KernelModule) -> None:
        self._module = module
        self.gpu = TiledGpu(module.multiprocessors, module.shared_limit, module.has_clusters)

    def norm(
        self,
        hidden: DeviceArray,
        norm_weight: DeviceArray,
        epsilon: float,
        output: DeviceArray,
        features: DeviceArray | None = None,
        place: int = 0,
        keeps_raw: bool = False,
        next_early: bool = True,
    ) -> Launch:
        """See `numpy_tiled_decode_kernels.norm`.

        `next_early` False: a kernel that overlaps this one starts only when the one before this one has finished.
        """
        rows, columns = _rows(hidden), hidden.shape[-1]
        check_room("output", output, rows, padded_columns(columns))
        arguments = (
            pointer(hidden),
            ctypes.c_int(hidden.dtype == "float32"),
            pointer(norm_weight),
            ctypes.c_float(epsilon),
            pointer(output),
            *map(ctypes.c_int, (columns, slice_steps(columns), next_early)),
            *feature_arguments(features, place, columns),
            ctypes.c_int(keeps_raw),
        )
        shared = 8 * (_NORM_SLICES + 1) * 4 + 2 * padded_columns(columns)
        kernel = Kernel(OTHER_KERNELS, f"decode_norm_{output.dtype}")
        return Launch(self._module, kernel, (1, rows, 1), _NORM_THREADS, shared, arguments)

    def linear(self, x: DeviceArray, weight: DeviceArray, bias: DeviceArray | None, output: DeviceArray) -> Launch:
        """See `numpy_tiled_decode_kernels.linear`."""
        return self.tiled_linear(self._tiling(x, weight), x, weight, bias, output)

    def tiled_linear(
        self, tiling: Tiling, x: DeviceArray, weight: DeviceArray, bias: DeviceArray | None, output: DeviceArray
    ) -> Launch:
        """`linear` with a tiling of the caller's choice."""
        return self._linear("linear", tiling, x, weight, bias, weight.shape[0], output)

    def gate_up(self, x: DeviceArray, weight: DeviceArray, bias: DeviceArray | None, output: DeviceArray) -> Launch:
        """See `numpy_tiled_decode_kernels.gate_up`."""
        tiling = self._tiling(x, weight)
        return self._linear("gate_up", tiling, x, weight, bias, weight.shape[0] // 2, output)

    def linear_residual(
        self,
        x: DeviceArray,
        weight: DeviceArray,
        bias: DeviceArray | None,
        residual: DeviceArray,
        output: DeviceArray,
        features: DeviceArray | None = None,
        place: int = 0,
    ) -> Launch:
        """See `numpy_tiled_decode_kernels.linear_residual`."""
        rows = weight.shape[0]
        before = pointer(residual), ctypes.c_int(residual.dtype == "float32")
        extra = (*before, *feature_arguments(features, place, rows))
        return self._linear("residual", self._tiling(x, weight), x, weight, bias, rows, output, extra)

    def _tiling(self, x: DeviceArray, weight: DeviceArray) -> Tiling:
        rows, columns = weight.shape
        return fastest_tiling(_rows(x), rows, columns, self.gpu)

    def _linear(
        self,
        name: str,
        tiling: Tiling,
        x: DeviceArray,
        weight: DeviceArray,
        bias: DeviceArray | None,
        rows: int,
        output: DeviceArray,
        extra: Sequence[Any] = (),
    ) -> Launch:
        batch, columns, stride = _rows(x), weight.shape[1], x.shape[-1]
        if not 1 <= batch <= MAX_TILED_ROWS or columns % 8 or stride not in (columns, padded_columns(columns)):
            raise KernelError(
                f"tiled decode kernels take 1 to {MAX_TILED_ROWS} rows of a width that is a multiple of 8, found "
                f"{x.shape} times {weight.shape}"
            )
        if batch > tiling.rows:
            raise KernelError(f"a tiling for {tiling.rows} rows was given {batch}: take one of tilings({batch}, gpu)")
        check_room("output", output, batch, rows)
        module, stages, every_row = self._module, tiling.stages(self.gpu), weight.shape[0]
        arguments = (
            tensor_map(module, weight, columns, tiling.weight_rows * rows // every_row),
            tensor_map(module, x, columns, tiling.rows),
            *map(pointer, (weight, bias, x)),
            *map(ctypes.c_int, (stride, batch, rows, columns, slice_steps(columns), stages)),
            pointer(output),
            *extra,
        )
        grid, cluster = (tiling.blocks(every_row) // tiling.splits, tiling.splits, 1), (1, tiling.splits, 1)
        name = f"decode_tiled_{name}_{tiling.rows}_{tiling.weight_rows}_{weight.dtype}"
        return Launch(
            module,
            Kernel(OTHER_KERNELS, name),
            grid,
            _THREADS,
            tiling.shared_bytes(stages, self.gpu),
            arguments,
            cluster,
        )


def tiled_shared_bytes(tokens: int, hidden_size: int, head_size: int, shared_limit: int) -> int:
    """The most shared memory that a block of any of the kernels needs, where a GPU has a limit."""
    gpu = TiledGpu(1, shared_limit, has_clusters=True)  # which needs more than one without
    return max(
        min(tiling.shared_bytes(2, gpu) for tiling in tilings(MAX_TILED_ROWS, gpu)),
        attention_shared_bytes(tokens, head_size),
        8 * (_NORM_SLICES + 1) * 4 + 2 * padded_columns(hidden_size),
    )


def _rows(array: DeviceArray) -> int:
    return array.size // array.shape[-1]
