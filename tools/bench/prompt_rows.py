"""What one order of sums costs at the size of prompts: linear layers of 128 to 8,000 rows by mma.sync, beside cuBLAS.

    python tools/bench/prompt_rows.py OUTPUT.json [--rows 128 512 2048 4000] [--dtype float16]

The kernel of prompt_rows.cu with one sum of all columns, with slices added in order, and with the decode kernels' order
(slices, groups of four, groups), at several tiles, over the layers of Llama-1B and 8B: TFLOP/s of the best of a few
walks over the tiles, in CUDA graphs, weights in turns beyond the cache. Before, every tiling is compared with float64,
and those of one order with each other, bit for bit. Needs PyTorch with CUDA, on sm_90 or later.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
from provenance import provenance

from edgellm.kernels.compiler import ModuleSource, compile_module
from edgellm.kernels.decode.arguments import CUDA_TYPES
from edgellm.kernels.decode.contract import MAX_LORA_PLACES, SLICES, slice_steps

ONE, RUNNING, GROUPED = range(3)
#: N and K of the layers of Llama-1B, then of 8B: qkv, output, gate and up, down.
LAYERS = ((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192), (6144, 4096), (28672, 4096), (4096, 14336))


class Tiling(NamedTuple):
    """Template arguments of `Geometry` in prompt_rows.cu."""

    row_tiles: int
    column_tiles: int
    row_warps: int
    column_warps: int
    stages: int
    order: int
    shared_total: bool
    ahead: bool
    cluster: int = 1

    @property
    def tile(self) -> tuple[int, int]:
        """Rows of activations and weight rows of a block."""
        return 16 * self.row_tiles * self.row_warps, 8 * self.column_tiles * self.column_warps

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.row_warps * self.column_warps

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block."""
        rows, columns = self.tile
        return self.stages * (rows + columns) * 128 + 1024 + self.shared_total * rows * columns * 4

    def expression(self, dtype: str) -> str:
        """Its instantiation of the kernel."""
        return f"prompt::multiply_rows<{CUDA_TYPES[dtype]}, {', '.join(str(int(each)) for each in self)}>"


TILINGS = (
    *(Tiling(4, 4, 2, 4, 4, order, order == GROUPED, True) for order in (ONE, RUNNING, GROUPED)),
    *(Tiling(2, 8, 4, 2, 4, order, order == GROUPED, True) for order in (ONE, GROUPED)),
    *(Tiling(4, 4, 2, 4, 4, order, order == GROUPED, True, 2) for order in (ONE, GROUPED)),
    Tiling(4, 4, 2, 4, 4, GROUPED, True, False),
    Tiling(4, 8, 2, 4, 4, ONE, False, False),
    Tiling(4, 6, 2, 4, 4, ONE, False, False),
    *(Tiling(2, 4, *warps, 4, GROUPED, False, True) for warps in ((2, 4), (4, 2), (2, 2))),
    Tiling(4, 4, 2, 2, 3, GROUPED, True, True),
)


class Bench:
    """The kernels of all tilings for one dtype, on PyTorch's current stream."""

    def __init__(self, dtype: str) -> None:
        import torch
        from cuda.bindings import driver

        self.torch, self.driver, self.dtype = torch, driver, dtype
        torch.zeros(1, device="cuda")  # the context
        self.multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
        macros = {"HOST_SLICES": SLICES, "HOST_KEPT_BYTES": 16, "HOST_LINEAR_BYTES": "sizeof(Linear)"}
        macros |= {"HOST_TILED_WARPS": 8, "HOST_MOST_STAGES": 8, "HOST_ROW_BYTES": 128, "HOST_BARRIER_BYTES": 16}
        macros |= {"HOST_GELU_TANH": 1, "HOST_MOST_PLACES": MAX_LORA_PLACES}
        text = (Path(__file__).parent / "prompt_rows.cu").read_text()
        expressions = tuple(tiling.expression(dtype) for tiling in TILINGS)
        source = ModuleSource(
            "prompt_rows", ("prompt_rows.cu",), expressions, tuple(macros.items()), (("prompt_rows.cu", text),)
        )
        major, minor = torch.cuda.get_device_capability()
        compiled = compile_module(source, f"sm_{major}{minor}")
        module = self._checked(driver.cuModuleLoadData(compiled.code))
        self.functions = {}
        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        for tiling in TILINGS:
            name = compiled.lowered_names[tiling.expression(dtype)]
            function = self._checked(driver.cuModuleGetFunction(module, name.encode()))
            self._checked(driver.cuFuncSetAttribute(function, limit, tiling.shared_bytes))
            self.functions[tiling] = function

    def _checked(self, result: tuple) -> Any:
        status, *values = result
        assert status == self.driver.CUresult.CUDA_SUCCESS, status
        return values[0] if values else None

    def _map(self, matrix: Any, tile_rows: int) -> Any:
        """A tensor map of a matrix [rows, columns] in tiles of 64 columns, whose 16 bytes are swizzled by the row."""
        driver, (rows, columns) = self.driver, matrix.shape
        found = self._checked(
            driver.cuTensorMapEncodeTiled(
                driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                2,
                matrix.data_ptr(),
                [driver.cuuint64_t(columns), driver.cuuint64_t(rows)],
                [driver.cuuint64_t(2 * columns)],
                [driver.cuuint32_t(64), driver.cuuint32_t(tile_rows)],
                [driver.cuuint32_t(1), driver.cuuint32_t(1)],
                driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
                driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
                driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        )
        return (ctypes.c_uint64 * 16)(*map(int, found.opaque))

    def launch(self, tiling: Tiling, x: Any, weight: Any, output: Any, band: int = 8) -> Callable[[], None]:
        """What multiplies `permuted` rows x [M, K] with weight [N, K] into output [M, N]."""
        driver, (rows, columns), weight_rows = self.driver, x.shape, weight.shape[0]
        high, wide = (-(-size // side) for size, side in zip((rows, weight_rows), tiling.tile, strict=True))
        tiles = -(-high // tiling.cluster) * wide
        resident = 2 if tiling.threads <= 128 and 2 * tiling.shared_bytes <= 227 << 10 else 1
        maps = self._map(x, tiling.tile[0]), self._map(weight, tiling.tile[1] // tiling.cluster)
        numbers = (rows, weight_rows, columns, slice_steps(columns), band)
        arguments = (*maps, ctypes.c_uint64(output.data_ptr()), *map(ctypes.c_int, numbers))
        pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        config = driver.CUlaunchConfig()
        config.gridDimX = min(tiles, self.multiprocessors * resident // tiling.cluster) * tiling.cluster
        config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1
        config.blockDimX, config.sharedMemBytes = tiling.threads, tiling.shared_bytes
        if tiling.cluster > 1:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            size = attribute.value.clusterDim
            size.x, size.y, size.z = tiling.cluster, 1, 1
            config.attrs, config.numAttrs = [attribute], 1

        def enqueue(kept: Any = (arguments, pointers)) -> None:
            config.hStream = driver.CUstream(self.torch.cuda.current_stream().cuda_stream)
            self._checked(driver.cuLaunchKernelEx(config, self.functions[tiling], ctypes.addressof(kept[1]), 0))

        return enqueue

    def matrix(self, rows: int, columns: int, scale: float = 1.0) -> Any:
        """Random elements."""
        return self.torch.randn(rows, columns, device="cuda", dtype=getattr(self.torch, self.dtype)) * scale

    def milliseconds(self, launches: list[Callable[[], Any]], repeats: int) -> float:
        """Of one launch, on average, in a graph of all of them."""
        torch = self.torch
        for launch in launches:
            launch()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(repeats):
                for launch in launches:
                    launch()
        graph.replay()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / repeats / len(launches)


def permuted(x: Any) -> Any:
    """Columns as the kernel takes them: of each 32, element e of the first (second) four of eights q is at place
    2 q + e of the first (second) 16, and there at 8 + 2 q + e - 2 from e = 2 on."""
    eights = x.reshape(*x.shape[:-1], -1, 4, 2, 2, 2)  # 32 columns: q, half, e // 2, e % 2
    return eights.movedim(-4, -2).reshape(x.shape).contiguous()


def compared(bench: Bench) -> dict[str, Any]:
    """The largest error of each tiling beside float64, and how many elements the first of its order has otherwise."""
    rows, weight_rows, columns = 300, 640, 1536
    x, weight = bench.matrix(rows, columns), bench.matrix(weight_rows, columns, 0.05)
    expected, first, found = x.double() @ weight.double().T, dict[int, Any](), {}
    for tiling in TILINGS:
        output = bench.torch.full((rows, weight_rows), float("nan"), device="cuda", dtype=x.dtype)
        bench.launch(tiling, permuted(x), weight, output, 2)()
        bench.torch.cuda.synchronize()
        differ = (output != first.setdefault(tiling.order, output)).sum().item()
        found[str(tuple(tiling))] = [(output.double() - expected).abs().max().item(), differ]
    return found


def speeds(bench: Bench, counts: list[int]) -> dict[str, dict[str, Any]]:
    """TFLOP/s of cuBLAS and of each tiling by layer and rows."""
    found = {}
    for rows, (weight_rows, columns) in product(counts, LAYERS):
        operations = 2 * rows * weight_rows * columns / 1e9
        x, output = bench.matrix(rows, columns), bench.matrix(rows, weight_rows)
        copies = max(1, min(8, (120 << 20) // (weight_rows * columns * 2)))
        weights = [bench.matrix(weight_rows, columns, 0.05) for _ in range(copies)]
        repeats = max(1, int(1.2e3 / operations / copies))
        library = [partial(bench.torch.mm, x, weight.T, out=output) for weight in weights]
        row = {"cuBLAS": round(operations / bench.milliseconds(library, repeats))}
        for tiling in TILINGS:
            bands = (4, 16) if rows > 512 else (8,)
            times = [
                bench.milliseconds([bench.launch(tiling, x, weight, output, band) for weight in weights], repeats)
                for band in bands
            ]
            row[str(tuple(tiling))] = round(operations / min(times))
        found[f"{rows} x {weight_rows} x {columns}"] = row
        print(rows, weight_rows, columns, json.dumps(row), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--rows", type=int, nargs="+", default=[128, 512, 2048, 4000])
    parser.add_argument("--dtype", choices=list(CUDA_TYPES), default="float16")
    arguments = parser.parse_args()
    bench = Bench(arguments.dtype)
    result = {**provenance(), "error, differ": compared(bench)}
    print(json.dumps(result["error, differ"], indent=1), flush=True)
    result["TFLOP/s"] = speeds(bench, arguments.rows)
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
