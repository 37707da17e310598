"""Times whole decode steps by variants of the chain of linear layers, and where in a layer the time goes.

    python tools/bench/decode_edges.py [--shapes 0.5B 1.7B 1B 8B] [--keys 128] [--variants plain chain] [--output FILE]

Each number is the GPU's time of one replay of a CUDA graph of the step, median of five; the share is the bytes of the
weights by that time by the read bandwidth that the same run measured. `timed` says of one step when the blocks of a
chain had their input and had written their output. Needs pycuda and a GPU, not TensorRT.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from gpu_timer import gpu_milliseconds
from provenance import provenance

from edgellm.engines.backends.cuda_device import CudaDevice
from edgellm.engines.backends.kernel_engine import KernelEngine
from edgellm.engines.backends.kernel_executors import FewRows, StepKernels
from edgellm.engines.model.config import DecoderConfig, EngineShape
from edgellm.engines.model.programs import model_program
from edgellm.kernels import compiler
from edgellm.kernels.arrays import ITEM_SIZES, DeviceArray
from edgellm.kernels.compiler import ModuleSource
from edgellm.kernels.decode import attention as attention_module
from edgellm.kernels.decode import chain as chain_module
from edgellm.kernels.decode.linear import CudaDecodeKernels
from edgellm.kernels.decode.tiled_linear import CudaTiledKernels
from edgellm.kernels.launch import Kernel, KernelModule, Launch

SHAPES = {
    "0.5B": DecoderConfig(
        "qwen2", 151936, 896, 4864, 24, 14, 2, 64, 32768, 1e-6, 1e6, 64, "float16", True, attention_bias=True
    ),
    "1.7B": DecoderConfig(
        "qwen3", 151936, 2048, 6144, 28, 16, 8, 128, 40960, 1e-6, 1e6, 128, "float16", True, qk_norm=True
    ),
    "1B": DecoderConfig("llama", 128256, 2048, 8192, 16, 32, 8, 64, 131072, 1e-5, 5e5, 64, "float16", True),
    "8B": DecoderConfig("llama", 128256, 4096, 14336, 32, 32, 8, 128, 131072, 1e-5, 5e5, 128, "float16", False),
}
KV_ROWS = 1088
#: Bytes between the counters of two chains, where times are written behind them; 32-bit words of the counters.
TIMES_BYTES, TIMES_WORDS = 1 << 16, 16
EVENTS = 2 * 4 + 1

#: Reads memory, sixteen bytes a thread at a time; the sum keeps the reads.
READ = """
extern "C" __global__ void read_all(const uint4* data, unsigned long long count, unsigned* sum) {
    unsigned total = 0;
    const unsigned long long stride = (unsigned long long)gridDim.x * blockDim.x;
    unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i + 7 * stride < count; i += 8 * stride) {
        uint4 v[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] = __ldcs(data + i + j * stride);
#pragma unroll
        for (int j = 0; j < 8; ++j) total += v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
    }
    if (total == 123456789u) *sum = total;
}
"""


class Bench:
    """Memory, kernels and the stopwatch."""

    def __init__(self) -> None:
        self.device = CudaDevice()
        self.module = KernelModule(self.device.gpu, self.device.stream.handle)
        noise = np.random.default_rng(0).standard_normal(1 << 22) * 0.02
        self._noise = {
            dtype: self._uploaded((noise * scale).astype(dtype), dtype)
            for dtype, scale in (("float16", 1), ("float32", 50))
        }

    def _uploaded(self, values: np.ndarray, dtype: str) -> DeviceArray:
        array = self.device.empty(values.shape, dtype)
        self.device.upload(array, values)
        return array

    def array(self, shape: tuple[int, ...], dtype: str = "float16") -> DeviceArray:
        """Random values, the same 2^22 again and again."""
        import pycuda.driver as cuda

        array, noise = self.device.empty(shape, dtype), self._noise[dtype]
        for offset in range(0, array.nbytes, noise.nbytes):
            size = min(noise.nbytes, array.nbytes - offset)
            cuda.memcpy_dtod_async(array.pointer + offset, noise.pointer, size, self.device.stream)
        return array

    def microseconds(self, enqueue: Any, name: str, repeats: int = 20) -> float:
        """Of one replay of a graph."""
        enqueue()
        graph = self.device.capture(enqueue, name)
        return 1000 * gpu_milliseconds(self.device.stream, graph, repeats, 5, before=graph)

    def bandwidth(self) -> float:
        """Bytes a second that a kernel reads of four gigabytes."""
        import ctypes

        count = 1 << 28
        memory, found = self.device.empty((count * 8,), "float16"), self.device.zeros((1,), "uint32")
        source = ModuleSource("read-all", ("read.cu",), headers=(("read.cu", READ),))
        kernel = Kernel(source, "read_all")
        best = 0.0
        for blocks in (2, 4):
            arguments = (ctypes.c_void_p(memory.pointer), ctypes.c_uint64(count), ctypes.c_void_p(found.pointer))
            launch = Launch(self.module, kernel, (blocks * self.module.multiprocessors, 1, 1), 512, 0, arguments)
            best = max(best, count * 16 / self.microseconds(launch, "read", 5) * 1e6)
        return best


def engine_of(bench: Bench, config: DecoderConfig, keys: int) -> KernelEngine:
    """A decode step of one sequence, bound to random weights."""
    shape = EngineShape("decode", 1, 1, KV_ROWS, KV_ROWS)
    kernels = StepKernels(
        CudaDecodeKernels(bench.module, "float16", config.head_dim), CudaTiledKernels(bench.module, "float16")
    )
    engine = KernelEngine(kernels, FewRows, config, shape, "float16", bench.module.shared_limit)
    engine.attach(bench.device, bench.device.empty((engine.scratch_bytes,), "uint8"))
    bound: dict[str, DeviceArray] = {}
    for name, (size, dtype) in engine._tensors.items():
        if name.startswith("present_"):
            continue
        if dtype in ("float16", "float32"):
            bound[name] = bench.array(size, dtype)
        else:
            bound[name] = bench.device.zeros(size, dtype)
    bound |= {name: bound[name[8:]] for name in engine._tensors if name.startswith("present_")}
    bench.device.upload(bound["kvcache_start_index"], np.array([keys], np.int32))
    engine.bind(bound)
    return engine


def enqueuing(launches: list[Any]) -> Any:
    """All launches one after the other, each overlapping the one before."""
    for launch in launches:
        launch.overlap_previous()

    def enqueue() -> None:
        for launch in launches:
            launch()

    return enqueue


#: What stands in chain.cu, and before or behind it what notes a time: 8 when a block starts, 2 l when layer l has its
#: input, 2 l + 1 when the block has written it.
NOTE = """
__device__ __forceinline__ void note(const Chain& chain, int event) {
    unsigned long long now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    reinterpret_cast<unsigned long long*>(chain.counters + 16)[blockIdx.x * 9 + event] = now;
}
"""
NOTES = (
    (NOTE, "// One thread: all weights of the block, of all", ""),
    ("    note(chain, 8);\n", "    wait_for_previous_kernel();\n", "    note(chain, 0);\n"),
    ("        note(chain, 2 * l + 2);\n", "        arrive(barriers.ready[l + 1]);\n", ""),
    (
        "        __syncwarp();\n        if (threadIdx.x % 32 == 0) note(chain, 2 * l + 1);\n",
        "        __syncwarp();\n        if (threadIdx.x % 32 == 0 && shape.first < shape.units && l + 1",
        "",
    ),
)


#: The same in attention.cu, by the block of each key-value head: 0 when it starts, 1 when it has the length, 2 when it
#: waits, 3 when it waited, 4 when heads are ready, 5 when it ends.
ATTENTION_NOTE = """
template <typename T> __device__ __forceinline__ void note(const Block<T>& block, int event) {
    unsigned long long now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    if (threadIdx.x == 0) reinterpret_cast<unsigned long long*>(block.counters + 16)[block.kv_head * 8 + event] = now;
}
"""
ATTENTION_NOTES = (
    (ATTENTION_NOTE, "// STEPS: of 16 head elements (head", ""),
    ("", "    block.find_place(shared, tables);\n", "    if (block.split == 0) note(block, 0);\n"),
    ("    note(block, 1);\n", "    load_tiles<T, STEPS>(block, 0, 0, block.least);\n", ""),
    ("    note(block, 2);\n", "    wait_for_previous_kernel();\n", "    note(block, 3);\n"),
    ("", "    make_heads_ready(block, new_keys);\n    __syncthreads();\n", "    note(block, 4);\n"),
    ("    note(block, 5);\n", "    if (block.blocks == 1) return;\n", ""),
)


def timed(text: str, notes: Sequence[tuple[str, str, str]] = NOTES) -> str:
    """A kernel with times written behind its counters."""
    for before, found, behind in notes:
        assert text.count(found) == 1, found
        text = text.replace(found, before + found + behind)
    return text


CHAIN_TEXT, ATTENTION_TEXT = (
    (Path(compiler.__file__).parent / "decode" / name).read_text() for name in ("chain.cu", "attention.cu")
)


def evicting(text: str) -> str:
    """Weights leave the second-level cache first."""
    for before, after in (
        ("complete_tx::bytes [%0]", "complete_tx::bytes.L2::cache_hint [%0]"),
        ("{%2, %3, %4}], [%5];", "{%2, %3, %4}], [%5], %6;"),
        (
            '"r"(row), "r"(shared_address(&barrier))',
            '"r"(row), "r"(shared_address(&barrier)), "l"(0x12F0000000000000ull)',
        ),
    ):
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    return text


@dataclass(frozen=True)
class Variant:
    """`chunks` of a row in a slot; what becomes of the source; slots `under_way` at once.

    `early`: the share of the ring that is filled before attention is done. `free`: multiprocessors that chains leave to
    attention, for each key-value head.
    """

    chunks: int = 20
    change: Callable[[str], str] | None = None
    under_way: int = 4
    early: float = 1.0
    free: int = 0


VARIANTS = {
    "chain": Variant(),
    "timed": Variant(change=timed),
    "way2": Variant(under_way=2),
    "way3": Variant(under_way=3),
    "way6": Variant(under_way=6),
    "way99": Variant(under_way=99),
    "way99-timed": Variant(under_way=99, change=timed),
    "free": Variant(free=1),
    "free-timed": Variant(free=1, change=timed),
    "free2": Variant(free=2),
    "free-way3": Variant(free=1, under_way=3),
    "evict": Variant(change=evicting),
    "early.5": Variant(early=0.5),
    "chunks12": Variant(12, under_way=6),
    "chunks28": Variant(28, under_way=3),
}


def chain_of(bench: Bench, engine: KernelEngine, variant: Variant, kv_heads: int) -> list[Any]:
    """The engine's launches with chains of a variant."""
    original = chain_module.decode_kernel
    chain_module._SLOT_CHUNKS, chain_module._SLOT_BYTES = variant.chunks, 1024 * variant.chunks

    def changed(file: str, expression: str, macros: Any) -> Kernel:
        is_chain = file == "chain.cu"
        kernel = original(file, expression, chain_module._macros() if is_chain else macros)
        if variant.change is None or not (is_chain or variant.change is timed):
            return kernel
        text = variant.change(CHAIN_TEXT) if is_chain else timed(ATTENTION_TEXT, ATTENTION_NOTES)
        source, headers = kernel.source, ((f"decode/{file}", text),)
        return Kernel(ModuleSource(source.name, source.files, source.expressions, source.macros, headers), expression)

    chain_module.decode_kernel = attention_module.decode_kernel = changed
    try:
        launches = engine._chained(engine._prepare())
    finally:
        chain_module.decode_kernel = attention_module.decode_kernel = original
    for launch in launches:
        if "linear_chain" in launch.name:
            launch.arguments[0].under_way = variant.under_way
            launch.arguments[0].early = int(launch.arguments[0].slots * variant.early)
            launch._config.gridDimX = bench.module.multiprocessors - variant.free * kv_heads
    return launches


def report_times(bench: Bench, launches: list[Any], enqueue: Any) -> None:
    """Of the chains between two others: what each part of a layer takes, in microseconds, medians over the layers."""
    chains = [launch for launch in launches if "linear_chain" in launch.name]
    memory = bench.device.zeros((len(chains) * TIMES_BYTES,), "uint8")
    attentions = [launch for launch in launches if "attention" in launch.name]
    for number, (attention, chain) in enumerate(zip(attentions, chains, strict=True)):
        chain.arguments[0].counters = memory.pointer + number * TIMES_BYTES
        attention.arguments[0].counters = chain.arguments[0].counters + TIMES_BYTES // 2
    enqueue()
    graph = bench.device.capture(enqueue, "times")
    for _ in range(3):
        graph()
    bench.device.stream.synchronize()
    words = bench.device.download(memory).reshape(len(chains), TIMES_BYTES)[:, 4 * TIMES_WORDS :]
    blocks = chains[0]._config.gridDimX
    times = words[:, : blocks * EVENTS * 8].copy().view(np.uint64).reshape(len(chains), blocks, EVENTS).astype(np.int64)
    heads = attentions[0]._config.gridDimY
    inside = words[:, TIMES_BYTES // 2 :][:, : heads * 64].copy().view(np.uint64).reshape(len(chains), heads, 8)
    inside = inside.astype(np.int64)
    of_layers = []
    for number, (before, now) in enumerate(pairwise(times[1:-1]), 2):
        end = before[:, 7].max()
        of_attention = (np.median(inside[number, :, :6], axis=0) - end).tolist()
        rows = [now[:, 8].min() - end, np.median(now[:, 8]) - end, now[:, 8].max() - end, now[:, 0].max() - end]
        for layer in range(4):
            ready, written = now[:, 2 * layer], now[:, 2 * layer + 1]
            start = ready.max()
            rows += [np.median(written) - start, written.max() - start]
            if layer < 3:
                rows.append(now[:, 2 * layer + 2].min() - written.max())
        of_layers.append(of_attention + rows)
    median = np.median(np.array(of_layers) / 1000, axis=0)
    names = [
        "attention starts",
        "has length",
        "waits",
        "waited",
        "has heads",
        "ends",
        "first block",
        "median block",
        "last block",
        "attention",
    ]
    for name in ("o", "gate_up", "down", "qkv"):
        names += [f"{name} median", f"{name} last"] + ([f"{name} edge"] if name != "qkv" else [])
    parts = ", ".join(f"{name} {value:.2f}" for name, value in zip(names, median, strict=True))
    slots, shared = chains[1].arguments[0].slots, chains[1].shared_bytes
    print(f"   {slots} slots, {shared} bytes; from the end of the chain before: {parts}", flush=True)


def main() -> None:
    """Time what was asked for, print it and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--keys", type=int, default=128)
    parser.add_argument("--variants", nargs="+", default=["plain", *VARIANTS])
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    bench = Bench()
    bandwidth = bench.bandwidth()
    print(f"{bench.device.gpu.name}, reads {bandwidth / 1e12:.3f} TB/s", flush=True)
    found: dict[str, Any] = {"bandwidth": bandwidth}
    for name in arguments.shapes:
        config = SHAPES[name]
        engine = engine_of(bench, config, arguments.keys)
        weights = model_program(config, engine.shape).weights
        size = sum(math.prod(spec.shape) for spec in weights.values()) * ITEM_SIZES["float16"]
        for variant in arguments.variants:
            plain = variant == "plain"
            launches = engine._prepare() if plain else chain_of(bench, engine, VARIANTS[variant], config.num_kv_heads)
            bench.device.upload(engine._bound["logits"], np.zeros(engine._bound["logits"].shape, np.float32))
            enqueue = enqueuing(launches)
            if "timed" in variant:
                report_times(bench, launches, enqueue)
                continue
            time = bench.microseconds(enqueue, variant)
            logits = bench.device.download(engine._bound["logits"])
            digest = hash(logits.tobytes()) & 0xFFFF
            rest = enqueuing([launch for launch in launches if "attention" not in launch.name])
            without = bench.microseconds(rest, variant)
            share = size / bandwidth / time * 1e8
            print(
                f"{name:5s}{variant:14s}{len(launches):4d} launches {time:9.1f} us {share:5.1f} %, without attention "
                f"{without:9.1f} us, logits {digest:04x}",
                flush=True,
            )
            found.setdefault(name, {})[variant] = {"us": time, "share": share, "without_attention_us": without}
        del engine
    if arguments.output:
        results = {**provenance(), "gpu": bench.device.gpu.name, **found}
        arguments.output.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
