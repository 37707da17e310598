"""Times prefill steps with random weights: attention's kernels alone, and whole chunks.

    python tools/bench/prefill_speed.py [attention] [prompts] [torch] [--as orin]
                                        [--shapes llama-1b llama-8b] [--chunks 512 2048] [--output RESULTS.json]
                                        [--kernels-only]

Needs pycuda and a GPU; PyTorch for `torch`: its flash attention and matrix products. Times are medians of five, on the
GPU; TFLOP/s count what causal attention and the linear layers need. Attention's are microseconds of a layer in CUDA
graphs, of the tiling that is taken and of either one. `prompts`: whole chunks by kernels, dense and packed, beside
TensorRT between attention where it is there (but with `--kernels-only`), behind 0 and 2,000 rows; `host` is what the
host takes to enqueue one. Whole prompts with all that goes with them: `gpu_speed.py prefill`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[2] / "tests" / "helpers")]
from as_device import one_of, parse
from device_weights import to_device_layout
from provenance import provenance

from edgellm.device.limits import gpu_milliseconds
from edgellm.engines.backends.cuda_device import CudaDevice
from edgellm.engines.backends.executors import Executors
from edgellm.engines.backends.kernel_engine import KernelEngine
from edgellm.engines.backends.platform import find_tensorrt, load_tensorrt
from edgellm.engines.backends.steps.launching import StepKernels
from edgellm.engines.backends.steps.table import kernel_choice
from edgellm.engines.backends.tensorrt_engine import TensorRTEngine
from edgellm.engines.backends.tensorrt_operations import build_plan
from edgellm.engines.families.programs import model_program
from edgellm.engines.model.config import DecoderConfig
from edgellm.engines.model.limits import EngineLimits, EngineShape
from edgellm.engines.model.program import Program
from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.decode.linear import CudaDecodeKernels
from edgellm.kernels.decode.tiled_linear import CudaTiledKernels, capacity_of
from edgellm.kernels.launch import KernelModule, Launch
from edgellm.kernels.prefill.contract import KeyValueRows
from edgellm.kernels.prefill.launcher import CudaPrefill
from edgellm.kernels.prefill.linear import CudaPromptLinear
from edgellm.kernels.quantization.device_layout import DeviceLayout, PackedMatrix
from edgellm.kernels.quantization.packed_weight import PackedWeight, WeightFormat

SHAPES = {
    "llama-1b": DecoderConfig("llama", 128256, 2048, 8192, 16, 32, 8, 64, 131072, 1e-5, 5e5, 64, "float16", True),
    "llama-8b": DecoderConfig("llama", 128256, 4096, 14336, 32, 32, 8, 128, 131072, 1e-5, 5e5, 128, "float16", False),
    "gemma-2b": DecoderConfig("gemma", 256000, 2048, 16384, 18, 8, 1, 256, 8192, 1e-6, 1e4, 256, "float16", True),
}
PARTS = ("attention", "prompts", "torch")
#: Tokens that are new, and rows before them.
STEPS = ((128, 0), (512, 0), (2000, 0), (4000, 0), (8000, 0), (512, 3488), (2000, 2000), (2000, 6000))
#: Launches of a kernel of attention in a graph: enough of them that a graph's own launch is little.
IN_GRAPH = 20
#: Of packed weights, and the KV rows of whole steps.
GROUP, KV_ROWS = 128, 4608


FORMAT = WeightFormat("int4", GROUP, False, "float16")


def random_weight(rows: int, columns: int) -> PackedWeight:
    """Codes and small scales."""
    random = np.random.default_rng(0)
    scales = random.uniform(1e-3, 1e-2, (rows, FORMAT.groups(columns))).astype(np.float16).astype(np.float32)
    return PackedWeight(FORMAT, random.integers(0, 16, (rows, columns)).astype(np.uint8), scales)


class Bench:
    """Memory, kernels and the stopwatch."""

    def __init__(self) -> None:
        self.device = CudaDevice()
        self.module = KernelModule(self.device.gpu, self.device.stream)
        self.prefill = CudaPrefill(self.module)
        noise = np.random.default_rng(0).standard_normal(1 << 20) * 0.02
        self._noise = self.array_of(noise.astype(np.float16))
        self._codes = self.array_of(to_device_layout(random_weight(8, 1 << 16))[1].reshape(-1))
        self.results: dict[str, Any] = {}

    def array_of(self, values: np.ndarray) -> DeviceArray:
        """Host values on the device."""
        array = self.device.empty(values.shape, values.dtype.name)
        self.device.upload(array, values)
        return array

    def random(self, shape: tuple[int, ...], dtype: str = "float16") -> DeviceArray:
        """Random float16 values, over and over; zeros of another dtype."""
        array = self.device.zeros(shape, dtype)
        if dtype == "float16":
            self._fill(array, self._noise)
        return array

    def packed(self, rows: int, columns: int) -> PackedMatrix:
        """Random codes, over and over."""
        layout = DeviceLayout(FORMAT, rows, columns, small=True)
        data = self.device.empty(layout.shape, "uint8")
        self._fill(data, self._codes)
        return PackedMatrix(layout, data)

    def _fill(self, array: DeviceArray, noise: DeviceArray) -> None:
        for first in range(0, array.size, noise.size):
            part = array.reshape(-1)[first : first + noise.size]
            self.device.copy(part, noise[: part.size])

    def milliseconds(self, step: Any, repeats: int = 5) -> float:
        """Of one of several, one behind the other."""
        step()
        return gpu_milliseconds(self.device.stream, step, repeats, before=step)

    def microseconds(self, launch: Launch) -> float:
        """Of one of several launches that follow each other in a graph."""

        def several() -> None:
            for _ in range(IN_GRAPH):
                launch()

        several()
        return 1000 * self.milliseconds(self.device.capture(several, launch.name), 1) / IN_GRAPH

    def report(self, name: str, **numbers: float) -> None:
        """Print and keep."""
        print(f"{name:44s} " + "  ".join(f"{key} {value:8.3f}" for key, value in numbers.items()), flush=True)
        self.results[name] = {key: round(value, 4) for key, value in numbers.items()}


def time_attention(bench: Bench, name: str, config: DecoderConfig) -> None:
    """Both kernels for steps of one sequence."""
    heads, kv_heads, size = config.num_heads, config.num_kv_heads, config.head_dim
    for tokens, start in STEPS:
        cache = (1, kv_heads, start + tokens, size)
        rows = KeyValueRows(bench.random(cache), bench.random(cache), bench.array_of(np.array([start], np.int32)))
        qkv = bench.random((1, tokens, (heads + 2 * kv_heads) * size))
        rotary = bench.random((1, tokens, config.rotary_dim))
        queries, context = (bench.random((1, tokens, heads * size)) for _ in range(2))
        prepare = bench.microseconds(bench.prefill.prepare_heads(qkv, None, rotary, rows, None, None, queries))
        given = queries, rows, size**-0.5, context
        span = bench.microseconds(bench.prefill.causal_attention(*given))
        each = {
            f"tiles_{tiles}_us": bench.microseconds(bench.prefill.causal_attention(*given, tiles=tiles))
            for tiles in ((1, 2) if size <= 128 else (1,))
        }
        operations = 4 * heads * size * (tokens * start + tokens * (tokens + 1) / 2)
        label = f"{name} attention {tokens} behind {start}"
        bench.report(label, us=span, tflops=operations / span / 1e6, heads_us=prepare, **each)


def segment_engine(bench: Bench, config: DecoderConfig, shape: EngineShape) -> TensorRTEngine:
    """The engine of one segment."""
    library = load_tensorrt()
    plan = build_plan(config, shape, "float16", "composed", bench.device.gpu.compute_capability)
    cache = SimpleNamespace(attach=lambda configuration: None)
    runtime = library.module.Runtime(library.module.Logger(library.module.Logger.ERROR))
    return TensorRTEngine(library, runtime, plan, shape, cache)


def random_weights(bench: Bench, program: Program) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """A program's weights, dense ones and with packed layers, and the names of these; those of norms are ones."""
    weights = {key: bench.random(spec.shape) for key, spec in program.weights.items()}
    for array in (array for array in weights.values() if len(array.shape) == 1):
        bench.device.upload(array, np.ones(array.shape, np.float16))
    layers = {key: spec.shape for key, spec in program.weights.items() if ".layers." in key and len(spec.shape) == 2}
    packed = weights | {key: bench.packed(*shape) for key, shape in layers.items()}
    return weights, packed, list(layers)


def time_prompts(bench: Bench, name: str, config: DecoderConfig, chunks: list[int], kernels_only: bool) -> None:
    """Whole steps by kernels, dense and packed, and dense ones by TensorRT between attention, where it is there."""
    program = model_program(config, EngineShape("prefill", 1, chunks[0], KV_ROWS, KV_ROWS))
    weights, packed, layers = random_weights(bench, program)
    layouts = {key: packed[key].layout for key in layers}
    for chunk in chunks:
        shape = EngineShape("prefill", 1, chunk, KV_ROWS, KV_ROWS)
        ways = {"kernels_ms": (kernel_engine(bench, config, shape), weights)}
        ways["packed_ms"] = kernel_engine(bench, config, shape, layouts), packed
        if not kernels_only and find_tensorrt() is not None and chunk > 64:
            ways["tensorrt_ms"] = kernel_engine(bench, config, shape, by_plan=True), weights
        for start in (0, 2000):
            numbers = {}
            for way, (engine, own) in ways.items():
                arrays = edge_arrays(bench, config, shape)
                place_tokens(bench, arrays, shape, start)
                engine.bind(arrays | own)
                engine.attach(bench.device, bench.device.zeros((engine.scratch_bytes,), "uint8"))
                numbers[way] = bench.milliseconds(engine.enqueue)
            started = time.perf_counter()
            ways["kernels_ms"][0].enqueue()
            numbers["host_ms"] = 1e3 * (time.perf_counter() - started)
            bench.device.synchronize()
            bench.report(f"{name} prompt of {chunk} behind {start}", **numbers)


def edge_arrays(bench: Bench, config: DecoderConfig, shape: EngineShape) -> dict[str, DeviceArray]:
    """What an engine is bound to beside weights, random."""
    program = model_program(config, shape)
    kinds = {key: (size, "float16" if kind == "compute" else kind) for key, (size, kind) in program.edge.items()}
    arrays = {key: bench.random(*kind) for key, kind in kinds.items() if key not in program.weights}
    return arrays | {f"present_{key}": arrays[key] for key in program.states}


def place_tokens(bench: Bench, arrays: dict[str, DeviceArray], shape: EngineShape, start: int) -> None:
    """A step's tokens behind `start` rows."""
    bench.device.upload(arrays["kvcache_start_index"], np.array([start], np.int32))
    bench.device.upload(arrays["attention_mask"], np.tri(shape.tokens, KV_ROWS, start, dtype=bool)[None, None])


def kernel_engine(
    bench: Bench,
    config: DecoderConfig,
    shape: EngineShape,
    packed: dict[str, DeviceLayout] | None = None,
    by_plan: bool = False,
) -> Any:
    """That of a step, on kernels or with TensorRT between attention."""
    module, gpu, asked = bench.module, capacity_of(bench.module), "tensorrt" if by_plan else "auto"
    ways = Executors({"base": config}, EngineLimits(), "float16", gpu.shared_limit, executor=asked)
    choice = kernel_choice(config, shape, "float16", gpu, packed, planned=ways.planned(shape) or ())[0]
    assert choice is not None
    few, many = CudaDecodeKernels(module, "float16", config.head_dim), CudaTiledKernels(module, "float16")
    kernels = StepKernels(few, many, gpu, any_rows=CudaPromptLinear(module, "float16"), prefill=bench.prefill)
    plans = {part: segment_engine(bench, config, part) for part in ways.plans(shape)}
    kernels = kernels._replace(plans=plans)
    return KernelEngine(kernels, choice, config, shape, "float16", packed)


def time_torch(bench: Bench, name: str, config: DecoderConfig, chunks: list[int]) -> None:
    """The same products and flash attention by PyTorch."""
    import torch

    stream = torch.cuda.ExternalStream(bench.device.stream.handle)
    hidden, inner, heads, size = config.hidden_size, config.intermediate_size, config.num_heads, config.head_dim
    query, keys = config.query_size, config.query_size + 2 * config.kv_size
    widths = ((hidden, query), (2 * inner, hidden), (hidden, inner), (keys, hidden))
    with torch.cuda.stream(stream), torch.inference_mode():
        weights = [torch.randn(*width, device="cuda", dtype=torch.float16) * 0.02 for width in widths]
        for chunk in chunks:
            given = [torch.randn(chunk, width[1], device="cuda", dtype=torch.float16) for width in widths]

            def products(given: Any = given) -> None:
                for x, weight in zip(given, weights, strict=True):
                    torch.nn.functional.linear(x, weight)

            span = bench.milliseconds(products)
            operations = 2 * chunk * sum(rows * columns for rows, columns in widths)
            bench.report(f"{name} PyTorch's products of {chunk}", ms=span, tflops=operations / span / 1e9)
        for tokens, start in STEPS:
            if start:
                continue
            shapes = ((1, heads, tokens, size), (1, config.num_kv_heads, tokens, size))
            q, k, v = (torch.randn(*shapes[n > 0], device="cuda", dtype=torch.float16) for n in range(3))

            def attend(q: Any = q, k: Any = k, v: Any = v) -> None:
                torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

            span = bench.milliseconds(attend)
            operations = 2 * heads * size * tokens * (tokens + 1)
            bench.report(f"{name} PyTorch's attention of {tokens}", ms=span, tflops=operations / span / 1e9)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", type=one_of(*PARTS), default=["attention", "prompts"])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["llama-1b"])
    parser.add_argument("--chunks", nargs="+", type=int, default=[512, 1024, 2048, 4096])
    parser.add_argument("--output", type=Path, help="a JSON file for the results")
    parser.add_argument("--kernels-only", action="store_true")
    options = parse(parser)
    bench = Bench()
    for name in options.shapes:
        if "attention" in options.parts:
            time_attention(bench, name, SHAPES[name])
        if "prompts" in options.parts:
            time_prompts(bench, name, SHAPES[name], options.chunks, options.kernels_only)
        if "torch" in options.parts:
            time_torch(bench, name, SHAPES[name], options.chunks)
    if options.output:
        options.output.write_text(json.dumps({"provenance": provenance(), **bench.results}, indent=1))


if __name__ == "__main__":
    main()
