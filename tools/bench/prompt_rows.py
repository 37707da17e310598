"""How fast linear layers of a prompt's rows are, in each tiling, beside cuBLAS.

    python tools/bench/prompt_rows.py OUTPUT.json [--rows 65 128 256 512 2048 4000] [--dtype float16] [--packed int4]
    python tools/bench/prompt_rows.py --compile-only sm_87 [--packed int4]

TFLOP/s over the layers of Llama-1B and 8B in CUDA graphs, weights in turns beyond the cache; `chosen` is the tiling
that a model gets, and `dense` what it gets for dense weights where they are `--packed` in groups of 128, or as a type
of GGUF files. Needs PyTorch with CUDA. `--compile-only` prints registers and bytes of stack of every kernel for an
architecture and needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import struct
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).parent))
from provenance import provenance

from edgellm.engines.quantization.gguf_blocks import PACKED_TYPES, BlockLayout
from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.compiler import compile_module
from edgellm.kernels.decode.arguments import CUDA_TYPES
from edgellm.kernels.decode.contract import LinearWeights
from edgellm.kernels.gpu import find_gpu
from edgellm.kernels.launch import KernelModule, Launch
from edgellm.kernels.prefill.linear import (
    PACKED_TILINGS,
    REGISTERS,
    SHARED,
    TILINGS,
    CudaPromptLinear,
    PromptTiling,
    packed_prompt_kernel,
    prompt_kernel,
    prompt_tiling,
    prompt_tilings,
)
from edgellm.kernels.quantization.device_layout import DeviceLayout, PackedMatrix
from edgellm.kernels.quantization.packed_weight import Codes, WeightFormat

#: N and K of the layers of Llama-1B, then of 8B: qkv, output, gate and up, down.
LAYERS = ((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192), (6144, 4096), (28672, 4096), (4096, 14336))
#: Tilings that no model gets.
MORE = (
    PromptTiling(4, 4, 2, 4, 1, SHARED),
    PromptTiling(2, 8, 2, 4, 1, SHARED),
    PromptTiling(4, 4, 2, 2, 2, SHARED),
    PromptTiling(2, 4, 4, 2, 1, REGISTERS),
)
#: Milliseconds that a graph takes at 200 TFLOP/s, and the most copies of a weight.
_SPAN, _COPIES = 2.0, 8
#: Words in front of what a cubin says of a kernel.
_REGISTERS, _FRAME = 0x0008_2F04, 0x0008_1104


class Bench:
    """The kernels for one dtype, and memory of PyTorch's, on a stream of its own."""

    def __init__(self, dtype: str, codes: str | None = None) -> None:
        """`codes`: of packed weights; None: they are dense."""
        import torch

        self.torch, self.dtype, self.codes = torch, dtype, codes
        torch.zeros(1, device="cuda")  # the context
        self.stream = torch.cuda.Stream()
        module = KernelModule(find_gpu(), SimpleNamespace(handle=self.stream.cuda_stream))
        self.kernels = CudaPromptLinear(module, dtype)

    def choices(self) -> list[PromptTiling]:
        """Tilings that fit."""
        gpu = self.kernels.gpu
        if self.codes is not None:
            return prompt_tilings(gpu, packed_layout(self.codes, self.dtype, 8, 128).block_bytes)
        return [*prompt_tilings(gpu), *(tiling for tiling in MORE if tiling.resident(2, gpu))]

    def packed(self, weight: Any) -> PackedMatrix:
        """Other values of as many rows and columns: the bytes of 0.07, over and over, are codes and scales."""
        assert self.codes is not None
        layout = packed_layout(self.codes, self.dtype, *weight.shape)
        data = self.torch.full(layout.shape, 0x2C, device="cuda", dtype=self.torch.uint8)
        data[..., : layout.code_bytes].random_(0, 256)
        return PackedMatrix(layout, self.array(data))

    def launch(self, tiling: PromptTiling | None, x: Any, weight: Any, output: Any, gated: bool) -> Launch:
        """What multiplies rows x [M, K] with weight [N, K] into output [M, N], or [M, N / 2] of gates and ups."""
        self.kernels.tiling = tiling
        linear = LinearWeights(weight if isinstance(weight, PackedMatrix) else self.array(weight))
        if gated:
            launch = self.kernels.gate_up(self.array(x), linear, "silu", self.array(output))
        else:
            launch = self.kernels.linear(self.array(x), linear, self.array(output))
        launch.overlap_previous()
        return launch

    def array(self, tensor: Any) -> DeviceArray:
        """A tensor as kernels take it."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        return DeviceArray(tensor.data_ptr(), tuple(tensor.shape), dtype, tensor)

    def matrix(self, rows: int, columns: int, scale: float = 1.0) -> Any:
        """Random elements."""
        return self.torch.randn(rows, columns, device="cuda", dtype=getattr(self.torch, self.dtype)) * scale

    def milliseconds(self, launches: list[Callable[[], Any]], repeats: int) -> float:
        """Of one launch, on average, in a graph of all of them."""
        torch = self.torch
        with torch.cuda.stream(self.stream):
            for launch in launches:
                launch()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self.stream):
                for _ in range(repeats):
                    for launch in launches:
                        launch()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            graph.replay()
            begin.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / repeats / len(launches)


def named(tiling: PromptTiling) -> str:
    """Rows times weight rows of a tile, then of a warp, and where totals are."""
    warp = f"{16 * tiling.row_tiles}x{8 * tiling.column_tiles}"
    return f"{tiling.rows}x{tiling.weight_rows}/{warp}{'rsj'[tiling.totals]}"


def packed_layout(codes: str, dtype: str, rows: int, columns: int) -> DeviceLayout:
    """That of weights in groups of 128 columns, or of a type of GGUF files."""
    if codes in PACKED_TYPES:
        return DeviceLayout(BlockLayout(codes).format(dtype), rows, columns, dtype=dtype, multiplied="float32")
    is_small = (codes, dtype) == ("int4", "float16")
    return DeviceLayout(WeightFormat(cast(Codes, codes), 128, False, dtype), rows, columns, small=is_small)


def errors(bench: Bench) -> dict[str, Any]:
    """The largest error of each tiling beside float64, and how many elements the first tiling has otherwise."""
    rows, weight_rows, columns = 300, 640, 1536
    x, weight = bench.matrix(rows, columns), bench.matrix(weight_rows, columns, 0.05)
    expected, first, found = x.double() @ weight.double().T, None, {}
    for tiling in bench.choices():
        output = bench.torch.full((rows, weight_rows), float("nan"), device="cuda")
        bench.torch.cuda.synchronize()
        bench.launch(tiling, x, weight, output, False)()
        bench.torch.cuda.synchronize()
        first = output if first is None else first
        found[named(tiling)] = [(output.double() - expected).abs().max().item(), (output != first).sum().item()]
    return found


def speeds(bench: Bench, counts: list[int]) -> dict[str, dict[str, Any]]:
    """TFLOP/s of cuBLAS and of each tiling by layer and rows."""
    found = {}
    for rows, (weight_rows, columns) in product(counts, LAYERS):
        operations, gated = 2 * rows * weight_rows * columns / 1e9, weight_rows > 3 * columns
        copies = max(1, min(_COPIES, (120 << 20) // (weight_rows * columns * 2)))
        x, weights = bench.matrix(rows, columns), [bench.matrix(weight_rows, columns, 0.05) for _ in range(copies)]
        repeats = max(1, int(200 * _SPAN / operations / copies))
        product_of = bench.matrix(rows, weight_rows)
        output = bench.matrix(rows, weight_rows // 2) if gated else product_of.float()
        library = [partial(bench.torch.mm, x, weight.T, out=product_of) for weight in weights]
        row: dict[str, Any] = {"cuBLAS": round(operations / bench.milliseconds(library, repeats))}
        choices = bench.choices()
        if bench.codes is not None:
            launches = [bench.launch(None, x, weight, output, gated) for weight in weights]
            row["dense"] = round(operations / bench.milliseconds(launches, repeats))
            weights = [bench.packed(weight) for weight in weights]
        for tiling in choices:
            launches = [bench.launch(tiling, x, weight, output, gated) for weight in weights]
            row[named(tiling)] = round(operations / bench.milliseconds(launches, repeats))
        layout = None if bench.codes is None else packed_layout(bench.codes, bench.dtype, weight_rows, columns)
        row["chosen"] = named(prompt_tiling(rows, weight_rows, columns, bench.kernels.gpu, layout))
        found[f"{rows} x {weight_rows} x {columns}"] = row
        print(rows, weight_rows, columns, json.dumps(row), flush=True)
    return found


def resources(code: bytes) -> tuple[int, int]:
    """Registers of a thread and bytes of its stack, of the only kernel of a cubin.

    That is an ELF file of 64 bits. Its section .nv.info has them behind a word that says so: a symbol, then the value.
    """
    (table,), (size, count, names) = struct.unpack_from("<Q", code, 0x28), struct.unpack_from("<3H", code, 0x3A)
    every = [struct.unpack_from("<IIQQQQ", code, table + i * size) for i in range(count)]
    texts, found = every[names][4], {_REGISTERS: 0, _FRAME: 0}
    for name, _, _, _, offset, length in every:
        if code[texts + name :].startswith(b".nv.info\0"):
            for at in range(offset, offset + length - 11, 4):
                kind, value = struct.unpack_from("<I4xI", code, at)
                if kind in found:
                    found[kind] = max(found[kind], value)
    return found[_REGISTERS], found[_FRAME]


def compile_only(architecture: str, dtype: str, codes: str | None) -> None:
    """Print what each kernel takes of a thread's memory."""
    tilings = TILINGS if codes is None else PACKED_TILINGS
    for name, tiling in product(("linear", "gate_up", "linear_residual", "low_products"), tilings):
        for adapted in (False, True)[: 1 + (name != "low_products")]:
            if codes is None:
                kernel = prompt_kernel(name, dtype, tiling, 3, adapted)
            elif name != "low_products":
                kernel = packed_prompt_kernel(name, packed_layout(codes, dtype, 8, 128), tiling, 3, adapted)
            else:
                continue
            compiled = compile_module(kernel.source, architecture)
            registers, stack = resources(compiled.code)
            more = " with adapters" if adapted else ""
            print(f"{named(tiling):22s} {name}{more}: {registers} registers, {stack} bytes of stack", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("output", type=Path, nargs="?")
    parser.add_argument("--rows", type=int, nargs="+", default=[65, 128, 256, 512, 2048, 4000])
    parser.add_argument("--dtype", choices=list(CUDA_TYPES), default="float16")
    parser.add_argument("--packed", choices=("int4", "int8", "fp8", "q4_k", "q5_k", "q6_k"))
    parser.add_argument("--compile-only", metavar="ARCHITECTURE")
    arguments = parser.parse_args()
    if arguments.compile_only:
        return compile_only(arguments.compile_only, arguments.dtype, arguments.packed)
    bench, result = Bench(arguments.dtype, arguments.packed), dict(provenance())
    if arguments.packed is None:
        result["error, differ"] = errors(bench)
        print(json.dumps(result["error, differ"]), flush=True)
    result["TFLOP/s"] = speeds(bench, arguments.rows)
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
