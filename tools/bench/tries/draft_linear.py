"""Linear layers of draft steps alone, by rows, and other versions of the one that norms two inputs. Needs a GPU.

python tools/bench/tries/draft_linear.py
"""

from __future__ import annotations

import sys
import traceback
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from kernel_speed import EPSILON, LLAMA, Bench

from edgellm.engines.gpu import find_gpu
from edgellm.kernels import compiler
from edgellm.kernels.decode_kernels import CudaDecodeKernels

ROWS = (1, 4, 7, 10, 16)
STAGE = "        stage_normalized_in_place<T, G>(inputs, norm_weights, sums, activations, batch, columns, steps);"
REGISTERS = "stage_normalized<T, PARTS, HELD, G>(inputs, norm_weights, sums, activations, batch, columns, steps);"
COPY = "copy_async_16(shared_address(place(row, chunk)), source + static_cast<size_t>(row) * inputs.width, exists);"
LINEAR, ACTIVATIONS = "decode_linear.cu", "decode_activations.cuh"
VARIANTS: dict[str, list[tuple[str, str, str]]] = {
    "as it is": [],
    "no staging": [(LINEAR, STAGE, "        wait_for_copies<0>();"), (LINEAR, REGISTERS, "wait_for_copies<0>();")],
    "no sums": [(ACTIVATIONS, "for (int part = 0; part < 2; ++part) {", "for (int part = 2; part < 2; ++part) {")],
    "no copies": [(ACTIVATIONS, COPY, ";")],
    "rows rotated": [
        (
            ACTIVATIONS,
            "        for (int row = 0; row < batch; ++row)\n            " + COPY,
            "        for (int r = 0; r < batch; ++r) {\n            const int row = (r + blockIdx.x) % batch;\n"
            "            " + COPY + "\n        }",
        )
    ],
    "in registers": [
        (
            LINEAR,
            "DECODE_NORMS_LINEAR_KERNEL(float16, __half, __half, 0)",
            "DECODE_NORMS_LINEAR_KERNEL(float16, __half, __half, 8)",
        ),
        (LINEAR, "{false, HELD != 0}", "{false, sizeof(SECOND) == 4}"),
    ],
    "ring of 4": [(LINEAR, "WIDE_DEPTH = 8;", "WIDE_DEPTH = 4;")],
    "all sums at once": [(ACTIVATIONS, "AT_ONCE = 4;", "AT_ONCE = 10;")],
    "next early": [
        (
            LINEAR,
            "decode::FloatOutput{output}, batch, rows, columns, steps, false);",
            "decode::FloatOutput{output}, batch, rows, columns, steps, true);",
        )
    ],
    "no multiplication": [
        (LINEAR, "for (int unit = blockIdx.x; unit * G::UNIT < rows;", "for (int unit = rows; unit * G::UNIT < rows;")
    ],
}


def cubin_of(architecture: str, name: str) -> bytes:
    """The linear layers' kernels with some text replaced."""
    sources = {file: text for file, text in compiler._sources().items() if file.endswith(".cuh") or file == LINEAR}
    for file, old, new in VARIANTS[name]:
        if old.encode() not in sources[file]:
            raise ValueError(f"{file} has no {old!r}")
        sources[file] = sources[file].replace(old.encode(), new.encode())
    original, compiler._sources = compiler._sources, lambda: sources
    try:
        return compiler.compile_kernels(architecture)
    finally:
        compiler._sources = original


def time_rows(bench: Bench, kernels: CudaDecodeKernels, weights: dict, variant: str, rows: int) -> None:
    """The layers with so many rows of activations."""
    hidden, query, inner = LLAMA.hidden_size, LLAMA.query_size, LLAMA.intermediate_size
    norm = bench.array((hidden,), scale=50)
    first, second = bench.array((rows, hidden), scale=50), bench.array((rows, hidden), scale=50)
    floats = bench.array((rows, hidden), "float32", 50)
    out = {name: bench.device.empty((rows, each[0].shape[0]), "float32") for name, each in weights.items()}
    activation, context = bench.array((rows, inner), scale=50), bench.array((rows, query), scale=50)
    kept = bench.device.empty((rows, hidden), "float16")
    both = (norm, EPSILON)
    makes = {"qkv": lambda w: kernels.norms_linear(first, norm, second, *both, w, None, out["qkv"])}
    if variant in ("as it is", "no staging", "no multiplication", "ring of 4"):
        makes |= {
            "qkv float": lambda w: kernels.norms_linear(first, norm, floats, *both, w, None, out["qkv"]),
            "gate_up": lambda w: kernels.norm_gate_up(floats, *both, w, None, activation),
            "head": lambda w: kernels.norm_linear(floats, *both, w, None, out["head"], kept),
            "o": lambda w: kernels.linear_residual(context, w, None, second, out["o"]),
            "down": lambda w: kernels.linear_residual(activation, w, None, floats, out["down"]),
        }
    for name, make in makes.items():
        matrices = weights[name.split()[0]]
        span = bench.microseconds([make(w) for w in matrices], name)
        bench.report(f"{variant}: {name}", rows, span, matrices[0].nbytes)


def main() -> None:
    """Print one line a measurement."""
    architecture = find_gpu().compute_capability
    pool = ProcessPoolExecutor(8, get_context("spawn"))
    cubins = {name: pool.submit(cubin_of, architecture, name) for name in VARIANTS}
    bench = Bench()
    hidden, query, kv, inner = LLAMA.hidden_size, LLAMA.query_size, LLAMA.kv_size, LLAMA.intermediate_size
    shapes = {
        "qkv": (query + 2 * kv, 2 * hidden, 6),
        "o": (hidden, query, 12),
        "gate_up": (2 * inner, hidden, 3),
        "down": (hidden, inner, 4),
        "head": (32_000, hidden, 2),
    }
    weights = {name: [bench.array((n, k)) for _ in range(copies)] for name, (n, k, copies) in shapes.items()}
    for variant, cubin in cubins.items():
        try:
            kernels = CudaDecodeKernels(architecture, bench.device.stream.handle, cubin.result())
            for rows in ROWS:
                time_rows(bench, kernels, weights, variant, rows)
        except Exception:
            traceback.print_exc()
    pool.shutdown()


if __name__ == "__main__":
    main()
