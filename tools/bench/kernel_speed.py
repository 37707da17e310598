"""Times each hand-written kernel of decode and verify steps alone, with the shapes of Llama-3.2-1B and random weights.

    python tools/bench/kernel_speed.py [steps] [attention] [linear] [variants] [--rows 1 8 16]

Each number is the time of one launch in a CUDA graph of sixteen, each with weights of its own (together more than the
cache holds), median of five; GB/s are those of the weights, shares of the bandwidth that is read before and behind them
(`--as orin` and the like: of a part of the GPU, see `as_device.py`). Then whole steps, as they are and without some of
their kernels, which shows what those cost where kernels overlap. `variants` are other tilings of the kernels of many
rows, and whether their results have the same bits. Needs pycuda and a GPU, not TensorRT.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from as_device import one_of, parse
from device_limits import Readings, device_limits, read_around
from probes import weight_bytes
from provenance import provenance

from edgellm.device.limits import gpu_milliseconds
from edgellm.engines.backends.cuda_device import CudaDevice
from edgellm.engines.backends.kernel_engine import KernelEngine
from edgellm.engines.backends.steps.launching import StepKernels
from edgellm.engines.backends.steps.linear import FewRows, ManyRows
from edgellm.engines.backends.steps.table import kernel_choice
from edgellm.engines.model.config import DecoderConfig
from edgellm.engines.model.decoder import decoder_weights
from edgellm.engines.model.limits import EngineShape
from edgellm.engines.model.states import PRESENT, decoder_states, state_edge
from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.decode.attention import attention_launch
from edgellm.kernels.decode.attention_geometries import AttentionShape, attention_partials
from edgellm.kernels.decode.contract import (
    MAX_ROWS,
    AttentionScratch,
    AttentionStep,
    AttentionWeights,
    LinearWeights,
    NormedInput,
    padded_columns,
)
from edgellm.kernels.decode.geometries import linear_residual_shared_bytes, norm_linear_shared_bytes
from edgellm.kernels.decode.linear import CudaDecodeKernels
from edgellm.kernels.decode.tiled_linear import CudaTiledKernels
from edgellm.kernels.decode.tilings import direct_tilings, tilings
from edgellm.kernels.launch import KernelModule, Launch

LLAMA = DecoderConfig("llama", 128256, 2048, 8192, 16, 32, 8, 64, 131072, 1e-5, 5e5, 64, "float16", True)
LAYERS = LLAMA.num_layers
#: Rows of caches behind a context.
MORE_ROWS = 96
KV_CACHES = ("compute", "int8")
REPEATS, SERIES = 10, 5
EPSILON = LLAMA.rms_norm_eps


class Bench:
    """Memory, kernels and the stopwatch."""

    def __init__(self, contexts: Sequence[int] = (530,)) -> None:
        self.device = CudaDevice()
        self.module = KernelModule(self.device.gpu, self.device.stream)
        self.kernels = CudaDecodeKernels(self.module, "float16", LLAMA.head_dim)
        self.tiled = CudaTiledKernels(self.module, "float16")
        self.random = np.random.default_rng(0)
        noise = (self.random.standard_normal(1 << 22) * 0.02).astype(np.float16)
        self._noise = cache(lambda dtype, scale: (noise * scale).astype(dtype))  # half-precision products take long
        self.contexts, self.results = contexts, dict[str, Any]()
        self._around: tuple[Readings, int] | None = None

    def array(self, shape: Sequence[int], dtype: str = "float16", scale: float = 1.0) -> DeviceArray:
        """Random values."""
        array = self.device.empty(tuple(shape), dtype)
        self.device.upload(array, np.resize(self._noise(dtype, scale), array.shape))
        return array

    def microseconds(self, launches: Sequence[Callable[[], None]], name: str, repeats: int = REPEATS) -> float:
        """Of one launch, where all of them follow each other in a graph. `report` knows what was read around it."""
        for launch in launches:
            if isinstance(launch, Launch):
                launch.overlap_previous()

        def all_of_them() -> None:
            for launch in launches:
                launch()

        all_of_them()
        graph = self.device.capture(all_of_them, name)
        with read_around() as around:
            # `before`, so that the host is ahead of the GPU when the clock starts.
            span = gpu_milliseconds(self.device.stream, graph, repeats, SERIES, before=graph)
        self._around = around, len(launches)
        return 1000 * span / len(launches)

    def report(self, name: str, rows: int, microseconds: float, weight_bytes: int = 0) -> None:
        """Print and keep, with the share of the read bandwidth where it is a matter of weights."""
        speed = ""
        if weight_bytes:
            assert self._around is not None
            around, launches = self._around
            share = around.read_share(name, launches * weight_bytes, launches * microseconds / 1000)
            speed = f"{weight_bytes / microseconds / 1000:8.0f} GB/s, {share:.0%} of {around}"
        print(f"{name:32s} {rows:3d} rows {microseconds:9.2f} us {speed}", flush=True)
        self.results.setdefault(name, {})[rows] = round(microseconds, 3)


def linear_shapes() -> dict[str, tuple[int, int, int]]:
    """Rows, columns and number of copies of each matrix."""
    hidden, query, kv = LLAMA.hidden_size, LLAMA.query_size, LLAMA.kv_size
    return {
        "qkv": (query + 2 * kv, hidden, LAYERS),
        "o": (hidden, query, LAYERS),
        "gate_up": (2 * LLAMA.intermediate_size, hidden, LAYERS),
        "down": (hidden, LLAMA.intermediate_size, LAYERS),
        "head": (LLAMA.vocab_size, hidden, 2),
    }


def time_linear(bench: Bench, all_rows: Sequence[int]) -> None:
    """The four linear layers of a layer and the head, by the kernels of few rows and by those of many."""
    norm_weight = bench.array((LLAMA.hidden_size,), scale=50)
    for name, (width, columns, copies) in linear_shapes().items():
        weights = [bench.array((width, columns)) for _ in range(copies)]
        for rows in all_rows:
            few, many, _kept = linear_launches(bench, name, norm_weight, weights, rows)
            for kind, launches in (("few", few), ("many", many)):
                if launches:
                    span = bench.microseconds(launches, name)
                    bench.report(f"{name}, {kind} rows", rows, span, 2 * width * columns)


def linear_launches(
    bench: Bench, name: str, norm_weight: DeviceArray, weights: Sequence[DeviceArray], rows: int
) -> tuple[list[Launch], list[Launch], tuple[DeviceArray, ...]]:
    """Of the kernels of few rows, if they take so many on the GPU, of those of many, and the memory that they use."""
    kernels, tiled = bench.kernels, bench.tiled
    width, columns = weights[0].shape
    hidden = bench.array((rows, LLAMA.hidden_size), "float32", 50)
    normed = bench.array((rows, padded_columns(LLAMA.hidden_size)), scale=50)
    x, out = bench.array((rows, columns), scale=50), bench.device.empty((rows, width), "float32")
    activation = bench.device.empty((rows, width // 2), "float16")
    normed_input, layers = NormedInput(hidden, norm_weight, EPSILON), [LinearWeights(weight) for weight in weights]
    if name == "gate_up":
        few = [lambda w=w: kernels.norm_gate_up(normed_input, w, "silu", activation) for w in layers]
        many = [tiled.gate_up(normed, w, "silu", activation) for w in layers]
    elif name in ("qkv", "head"):
        few = [lambda w=w: kernels.norm_linear([normed_input], w, out) for w in layers]
        many = [tiled.linear(normed, w, out) for w in layers]
    else:
        few = [lambda w=w: kernels.linear_residual(x, w, hidden, out) for w in layers]
        many = [tiled.linear_residual(x, w, hidden, out) for w in layers]
    limit = bench.module.shared_limit
    needed = linear_residual_shared_bytes(rows, limit)
    if name in ("qkv", "head", "gate_up"):
        needed = norm_linear_shared_bytes(rows, [columns], limit, name == "gate_up")
    few = [make() for make in few] if rows <= MAX_ROWS and needed <= limit else []
    return few, many, (hidden, normed, x, out, activation)


def time_variants(bench: Bench, all_rows: Sequence[int]) -> None:
    """Every tiling of the linear layers, without what follows their sums, and whether the bits are the same."""
    for label, (width, columns, copies) in linear_shapes().items():
        weights = [bench.array((width, columns)) for _ in range(copies)]
        for rows in all_rows:
            x, out = bench.array((rows, columns), scale=50), bench.device.empty((rows, width), "float32")
            expected = None
            for tiling in (*tilings(rows, bench.tiled.gpu), *direct_tilings(rows, bench.tiled.gpu)):
                launches = [bench.tiled.linear(x, LinearWeights(weight), out, tiling=tiling) for weight in weights]
                bench.device.upload(out, np.full(out.shape, np.nan, np.float32))
                launches[0]()
                found = bench.device.download(out)
                expected = found if expected is None else expected
                same = "same bits" if np.array_equal(found, expected) else "OTHER BITS"
                name = f"{label}: {tiling}, {same}"
                bench.report(name, rows, bench.microseconds(launches, name), 2 * width * columns)


def time_attention(bench: Bench, all_rows: Sequence[int]) -> None:
    """One sequence behind some contexts, whose new tokens are a chain, with rows of 16 and of 8 bits; and the norm."""
    heads = LLAMA.num_heads, LLAMA.num_kv_heads, LLAMA.head_dim
    for rows, context, kv_cache in product(all_rows, bench.contexts, KV_CACHES):
        shape = AttentionShape(1, rows, *heads, context + MORE_ROWS, kv_cache == "int8")
        inputs = attention_inputs(bench, shape, context)  # whose memory launches use
        launches = [attention_launch(bench.module, *given) for given in inputs]
        bench.report(f"attention, {context} {kv_cache}", rows, bench.microseconds(launches, "attention"))
    weight = bench.array((LLAMA.hidden_size,), scale=50)
    for rows in all_rows:
        hidden = bench.array((rows, LLAMA.hidden_size), "float32", 50)
        normed = bench.device.empty((rows, padded_columns(LLAMA.hidden_size)), "float16")
        norms = [bench.kernels.norm(NormedInput(hidden, weight, EPSILON), normed) for _ in range(LAYERS)]
        bench.report("norm", rows, bench.microseconds(norms, "norm"))


def attention_inputs(bench: Bench, shape: AttentionShape, context: int) -> list[tuple[Any, ...]]:
    """What `attention_launch` takes for layers of one sequence, together with more KV rows than the cache holds."""
    rows, size, kv_heads, capacity = shape.tokens, shape.size, shape.kv_heads, shape.kv_rows
    layers = min(64, max(LAYERS, (128 << 20) // (2 * kv_heads * context * size)))
    caches = [[bench.array((1, kv_heads, capacity, size), scale=50) for _ in "kv"] for _ in range(layers)]
    if shape.int8:
        caches = [[bench.array((1, kv_heads, capacity, size), "int8", 1500) for _ in "kv"] for _ in range(layers)]
        scales = bench.array((1, kv_heads, capacity, 1), "float32")
    start, mask = bench.device.empty((1,), "int32"), bench.device.empty((1, 1, rows, capacity), "bool")
    bench.device.upload(start, np.array([context], np.int32))
    bench.device.upload(mask, np.arange(capacity) <= context + np.arange(rows)[None, None, :, None] % 7)
    qkv = bench.array((rows, (shape.heads + 2 * kv_heads) * size), "float32", 50)
    rotations = bench.array((1, rows, size), scale=50)
    out = bench.device.empty((rows, shape.heads * size), "float16")
    partial = bench.device.empty((attention_partials(shape),), "float32")
    counters = bench.device.zeros((rows, kv_heads), "uint32")
    layer, scratch = AttentionWeights(None, None, EPSILON, 0.0, size**-0.5), AttentionScratch(partial, counters)
    before, behind = (rotations, start, mask if rows > 1 else None), (False, scales, scales) if shape.int8 else ()
    return [(qkv, layer, AttentionStep(*before, *cache, *behind), scratch, out) for cache in caches]


def time_steps(bench: Bench, all_rows: Sequence[int]) -> None:
    """Whole steps, as they are and without some kernels (whose results then are those of the launch before)."""
    arrays = {}
    for spec in decoder_weights(LLAMA):
        arrays[spec.name] = bench.array(spec.shape, scale=50 if len(spec.shape) == 1 else 1)
    start = bench.device.empty((1,), "int32")
    for rows, context, kv_cache in product(all_rows, bench.contexts, KV_CACHES):
        capacity = context + MORE_ROWS
        bench.device.upload(start, np.array([context], np.int32))
        for name, (shape, dtype) in state_edge(decoder_states(LLAMA, kv_cache), 1, capacity).items():
            scale = 1500 if dtype == "int8" else 1
            arrays[name] = bench.array(shape, "float16" if dtype == "compute" else dtype, scale)
            arrays[PRESENT + name] = arrays[name]
        for kind, only in (("step", (FewRows,)), ("tiled step", (ManyRows,)), ("chosen step", ())):
            phase = "decode" if rows == 1 else "verify"
            shape = EngineShape(phase, 1, rows, capacity, capacity, rows, kv_cache=kv_cache)
            name, gpu = f"{kind}, {context} {kv_cache}", bench.tiled.gpu
            choice, refusal = kernel_choice(LLAMA, shape, "float16", gpu, only=only)
            if choice is None or (only and not any(isinstance(each, only) for each in choice.implementations)):
                print(f"{name:32s} {rows:3d} rows run elsewhere, or on TensorRT: {refusal}", flush=True)
                continue
            kernels = StepKernels(bench.kernels, bench.tiled, gpu)
            engine = KernelEngine(kernels, choice, LLAMA, shape, "float16")
            engine.attach(bench.device, bench.device.empty((engine.scratch_bytes,), "uint8"))
            mask = bench.device.empty((1, 1, rows, capacity), "bool")
            bench.device.upload(mask, np.arange(capacity) <= context + np.arange(rows)[None, None, :, None] % 7)
            own = {
                "inputs_embeds": bench.array((1, rows, LLAMA.hidden_size), scale=50),
                "rope_rotary_cos_sin": bench.array((1, rows, LLAMA.rotary_dim), scale=50),
                "attention_mask": mask,
                "kvcache_start_index": start,
                "logits": bench.device.empty((1, rows, LLAMA.vocab_size), "float32"),
            }
            engine.bind({name: array for name, array in (arrays | own).items() if name in engine.tensors})
            engine.enqueue()
            launches = engine._launches
            whole = bench.microseconds([engine.enqueue], "step")
            bench.report(name, rows, whole, weight_bytes(LLAMA, shape, "float16"))
            for left_out in ("attention", "decode::norm<", "residual", "gate_up"):
                rest = [launch for launch in launches if left_out not in launch.name]
                if len(rest) == len(launches):
                    continue

                def enqueue(rest: list[Launch] = rest) -> None:
                    for launch in rest:
                        launch()

                bench.report(f"{name} without {left_out}", rows, bench.microseconds([enqueue], "step"))


SECTIONS = {"steps": time_steps, "attention": time_attention, "linear": time_linear, "variants": time_variants}


def main() -> None:
    """Time what was asked for, print it and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = ["steps", "attention", "linear"]
    parser.add_argument("sections", nargs="*", type=one_of(*SECTIONS), default=usual)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 32])
    parser.add_argument("--contexts", type=int, nargs="+", default=[530], help="of attention and whole steps")
    parser.add_argument("--output", type=Path)
    arguments = parse(parser)
    bench = Bench(arguments.contexts)
    print(bench.device.gpu.name, bench.module.multiprocessors, "multiprocessors")
    for section in arguments.sections:
        SECTIONS[section](bench, arguments.rows)
    results = {**provenance(), "limits": device_limits()._asdict(), "microseconds": bench.results}
    if arguments.output:
        arguments.output.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
