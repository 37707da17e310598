"""Times the parts of a prefill step with random weights: attention's kernels, and TensorRT's engines between them.

    python tools/bench/prefill_speed.py [attention] [linears] [narrow] [packed] [prompts] [torch] [--as orin]
                                        [--shapes llama-1b llama-8b] [--chunks 512 2048] [--output RESULTS.json]
                                        [--kernels-only]

Needs pycuda and a GPU; TensorRT for `linears`, `narrow` (the largest chunk, with sums that are not in fp32) and
`packed`, PyTorch for `torch`: its flash attention and matrix products. Times are medians of five, on the GPU; TFLOP/s
count what causal attention and the linear layers need. Attention's are microseconds of a layer in CUDA graphs, of the
tiling that is taken and of either one. `host` is what the host takes, for a layer to bind its weights
and to enqueue its engine. `packed`: dequantizing weights of 4 bits, and whole chunks over dense and over packed weights
by either way there is: TensorRT and dequantizing in front of it, or the kernels of up to 64 rows; and how far their
logits are apart. `prompts`: whole chunks by kernels, dense and packed, beside TensorRT between attention (but with
`--kernels-only`), behind 0 and 2,000 rows. Whole prompts with all that goes with them: `gpu_speed.py prefill`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from as_device import one_of, parse
from provenance import provenance

from edgellm.device.limits import gpu_milliseconds
from edgellm.engines.backends.cuda_device import CudaDevice
from edgellm.engines.backends.executors import Executors
from edgellm.engines.backends.kernel_engine import KernelEngine
from edgellm.engines.backends.platform import find_tensorrt, load_tensorrt
from edgellm.engines.backends.steps.launching import StepKernels
from edgellm.engines.backends.steps.table import kernel_choice
from edgellm.engines.backends.tensorrt_engine import TensorRTEngine
from edgellm.engines.backends.tensorrt_operations import TensorRTOperations, build_plan
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
from edgellm.kernels.quantization.device_layout import DeviceLayout, PackedMatrix, to_device_layout
from edgellm.kernels.quantization.packed_weight import PackedWeight, WeightFormat

SHAPES = {
    "llama-1b": DecoderConfig("llama", 128256, 2048, 8192, 16, 32, 8, 64, 131072, 1e-5, 5e5, 64, "float16", True),
    "llama-8b": DecoderConfig("llama", 128256, 4096, 14336, 32, 32, 8, 128, 131072, 1e-5, 5e5, 128, "float16", False),
    "gemma-2b": DecoderConfig("gemma", 256000, 2048, 16384, 18, 8, 1, 256, 8192, 1e-6, 1e4, 256, "float16", True),
}
PARTS = ("attention", "linears", "narrow", "packed", "prompts", "torch")
#: Tokens that are new, and rows before them.
STEPS = ((128, 0), (512, 0), (2000, 0), (4000, 0), (8000, 0), (512, 3488), (2000, 2000), (2000, 6000))
LAYERS_IN_TURN = 4
#: Launches of a kernel of attention in a graph: enough of them that a graph's own launch is little.
IN_GRAPH = 20
#: Of packed weights; the rows of steps by kernels, and the KV rows of whole steps.
GROUP, KERNEL_ROWS, KV_ROWS = 128, (16, 32, 64), 4608


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


def segment_engine(bench: Bench, config: DecoderConfig, shape: EngineShape, wide: bool) -> TensorRTEngine:
    """The engine of one segment."""
    library = load_tensorrt()
    TensorRTOperations.wide_linear = wide
    try:
        plan = build_plan(config, shape, "float16", "composed", bench.device.gpu.compute_capability)
    finally:
        TensorRTOperations.wide_linear = True
    cache = SimpleNamespace(attach=lambda configuration: None)
    runtime = library.module.Runtime(library.module.Logger(library.module.Logger.ERROR))
    return TensorRTEngine(library, runtime, plan, shape, cache)


def time_linears(bench: Bench, name: str, config: DecoderConfig, chunk: int, wide: bool = True) -> None:
    """The engine between the attention of two middle layers, with the weights of some layers in turn."""
    shape = EngineShape("prefill", 1, chunk, 1, 1, segment=(7, 11))
    engine = segment_engine(bench, config, shape, wide)
    scratch = bench.device.empty((engine.scratch_bytes,), "uint8")
    engine.attach(bench.device, scratch)
    program = model_program(config, shape)
    kinds = {key: (size, "float16" if kind == "compute" else kind) for key, (size, kind) in program.edge.items()}
    engine.bind({key: bench.random(*kind) for key, kind in kinds.items() if key not in program.weights})
    layers = [{key: bench.random(*kinds[key]) for key in program.weights} for _ in range(LAYERS_IN_TURN)]

    def all_layers() -> None:
        for weights in layers:
            engine.bind(weights)
            engine.enqueue()

    span = bench.milliseconds(all_layers) / LAYERS_IN_TURN
    spent = []
    for _ in range(5):
        bench.device.synchronize()
        started = time.perf_counter()
        all_layers()
        spent.append((time.perf_counter() - started) * 1e6 / LAYERS_IN_TURN)
    operations = 2 * chunk * sum(int(np.prod(spec.shape)) for spec in program.weights.values() if len(spec.shape) > 1)
    label = f"{name} layer of {chunk}{'' if wide else ', not wide'}"
    host, megabytes = statistics.median(spent), scratch.nbytes / 1e6
    bench.report(label, ms=span, tflops=operations / span / 1e9, host_us=host, scratch_mb=megabytes)


def random_weights(bench: Bench, program: Program) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """A program's weights, dense ones and with packed layers, and the names of these; those of norms are ones."""
    weights = {key: bench.random(spec.shape) for key, spec in program.weights.items()}
    for array in (array for array in weights.values() if len(array.shape) == 1):
        bench.device.upload(array, np.ones(array.shape, np.float16))
    layers = {key: spec.shape for key, spec in program.weights.items() if ".layers." in key and len(spec.shape) == 2}
    packed = weights | {key: bench.packed(*shape) for key, shape in layers.items()}
    return weights, packed, list(layers)


def time_packed(bench: Bench, name: str, config: DecoderConfig, chunks: list[int]) -> None:
    """Dequantizing a layer, then whole steps over dense weights and over packed ones."""
    program = model_program(config, EngineShape("prefill", 1, chunks[0], KV_ROWS, KV_ROWS))
    weights, packed, layers = random_weights(bench, program)
    time_dequantizing(bench, name, [packed[key] for key in layers])
    for rows in KERNEL_ROWS:
        engines: list[Any] = [kernel_engine(bench, config, EngineShape("prefill", 1, rows, KV_ROWS, KV_ROWS))] * 2
        time_steps(bench, f"{name} {rows} tokens by kernels", engines, (weights, packed), 0)
    for chunk in chunks:
        shape = EngineShape("prefill", 1, chunk, KV_ROWS, KV_ROWS)
        program = model_program(config, shape)
        layouts = {key: packed[key].layout for key in layers}
        engines = [kernel_engine(bench, config, shape, own, by_plan=True) for own in (None, layouts)]
        for start in (0, chunk):
            time_steps(bench, f"{name} {chunk} tokens behind {start}", engines, (weights, packed), start)
        by_kernels = kernel_engine(bench, config, EngineShape("prefill", 1, KERNEL_ROWS[-1], KV_ROWS, KV_ROWS))
        compare_logits(bench, f"{name} logits behind {chunk} tokens", engines[1], by_kernels, packed)


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


def compare_logits(bench: Bench, label: str, whole: Any, parts: Any, weights: dict[str, Any]) -> None:
    """How far the logits behind a chunk are from those of the same tokens by kernels, a few at a time: the weights are
    the same, the order of sums is not."""
    config, (count, few), found = SHAPES[label.split()[0]], (whole.shape.tokens, parts.shape.tokens), []
    rows = {
        "inputs_embeds": bench.random((1, count, config.hidden_size)),
        "rope_rotary_cos_sin": bench.random((1, count, config.rotary_dim)),
    }
    for engine, size in ((whole, count), (parts, few)):
        arrays = edge_arrays(bench, config, engine.shape)
        scratch = bench.device.zeros((engine.scratch_bytes,), "uint8")
        engine.attach(bench.device, scratch)
        bench.device.upload(arrays["last_token_ids"], np.array([[size - 1]], np.int32))
        for first in range(0, count, size):
            place_tokens(bench, arrays, engine.shape, first)
            own = {key: array.reshape(count, -1)[first : first + size] for key, array in rows.items()}
            engine.bind(arrays | weights | {key: part.reshape(1, size, -1) for key, part in own.items()})
            engine.enqueue()
        found.append(bench.device.download(arrays["logits"]))
    difference = float(np.abs(found[0] - found[1]).max())
    bench.report(label, largest_difference=difference, deviation=float(found[1].std()))


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


def time_dequantizing(bench: Bench, name: str, weights: list[PackedMatrix]) -> None:
    """Each kind of matrix of a layer, and all of a layer one beside the other; bytes are those read and written."""
    largest = bench.device.empty((max(int(np.prod(weight.shape)) for weight in weights),), "float16")
    four = [bench.device.empty(weight.shape, "float16") for weight in weights[:4]]
    for number in range(4):
        kind, shape = weights[number::4], weights[number].shape
        values = largest[: int(np.prod(shape))].reshape(*shape)
        report_dequantizing(bench, f"{name} dequantizing {list(shape)}", kind, [values] * len(kind), 1)
    report_dequantizing(bench, f"{name} dequantizing a layer", weights, four * (len(weights) // 4), 4)


def report_dequantizing(
    bench: Bench, label: str, weights: list[PackedMatrix], values: list[DeviceArray], beside: int
) -> None:
    """Time launches one behind the other, of which so many are `beside` each other."""
    pairs = zip(weights, values, strict=True)
    launches = [bench.prefill.dequantize(*pair, beside=n % beside > 0) for n, pair in enumerate(pairs)]
    span = bench.milliseconds(lambda: [launch() for launch in launches]) * beside / len(launches)
    moved = sum(weight.data.nbytes + array.nbytes for weight, array in zip(weights, values, strict=True))
    bench.report(label, us=1000 * span, gb_per_s=moved * beside / len(launches) / span / 1e6)


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
    plans = {part: segment_engine(bench, config, part, wide=True) for part in ways.plans(shape)}
    kernels = kernels._replace(plans=plans)
    return KernelEngine(kernels, choice, config, shape, "float16", packed)


def time_steps(bench: Bench, label: str, engines: Sequence[Any], weights: Sequence[dict[str, Any]], start: int) -> None:
    """The engines of one shape, with dense weights and with packed ones, behind `start` rows; the scratch of each."""
    device, arrays = bench.device, edge_arrays(bench, SHAPES[label.split()[0]], engines[0].shape)
    place_tokens(bench, arrays, engines[0].shape, start)
    numbers: dict[str, float] = {}
    for kind, engine, own in zip(("dense", "packed"), engines, weights, strict=True):
        engine.bind(arrays | own)
        scratch = device.zeros((engine.scratch_bytes,), "uint8")
        engine.attach(device, scratch)
        numbers[f"{kind}_ms"] = bench.milliseconds(engine.enqueue)
        numbers[f"{kind}_scratch_mb"] = scratch.nbytes / 1e6
    bench.report(label, ratio=numbers["packed_ms"] / numbers["dense_ms"], **numbers)


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
    parser.add_argument("parts", nargs="*", type=one_of(*PARTS), default=["attention", "linears"])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["llama-1b"])
    parser.add_argument("--chunks", nargs="+", type=int, default=[512, 1024, 2048, 4096])
    parser.add_argument("--output", type=Path, help="a JSON file for the results")
    parser.add_argument("--kernels-only", action="store_true")
    options = parse(parser)
    bench = Bench()
    for name in options.shapes:
        if "attention" in options.parts:
            time_attention(bench, name, SHAPES[name])
        if "linears" in options.parts:
            for chunk in options.chunks:
                time_linears(bench, name, SHAPES[name], chunk)
        if "narrow" in options.parts:
            time_linears(bench, name, SHAPES[name], options.chunks[-1], wide=False)
        if "packed" in options.parts:
            time_packed(bench, name, SHAPES[name], options.chunks)
        if "prompts" in options.parts:
            time_prompts(bench, name, SHAPES[name], options.chunks, options.kernels_only)
        if "torch" in options.parts:
            time_torch(bench, name, SHAPES[name], options.chunks)
    if options.output:
        options.output.write_text(json.dumps({"provenance": provenance(), **bench.results}, indent=1))


if __name__ == "__main__":
    main()
