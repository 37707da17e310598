"""Times attention alone, by kernels and by how their blocks share the work, in graphs of 16 layers (Llama-3.2-1B).

python tools/bench/tries/attention_shapes.py [--output FILE]
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
from kernel_speed import EPSILON, LAYERS, LLAMA, Bench

from edgellm.kernels import decode_attention
from edgellm.kernels.decode_attention import AttentionGeometry, attention_launch
from edgellm.kernels.launch import KernelModule

#: new tokens, sequences, committed rows, capacity, head size, whether the mask speaks of all rows
SHAPES = [
    *((1, batch, committed, 1088, 64, False) for batch, committed in ((1, 1000), (1, 530), (1, 100), (8, 1000))),
    *((tokens, 1, 1000, 1088, 64, False) for tokens in (64, 32, 16)),
    (64, 1, 530, 1088, 64, False),
    *((tokens, 1, 1000, 1088, 64, True) for tokens in (10, 6)),
    *((tokens, 4, 1000, 1088, 64, False) for tokens in (8, 4)),
    *((tokens, 1, 32000, 32832, 64, False) for tokens in (1, 32)),
    *((tokens, 1, 1000, 1088, 128, False) for tokens in (1, 32)),
]


#: What is changed in the kernel's text: how long it takes without some of its parts.
PHASES = {
    "whole": ("", ""),
    "until the wait": (
        "    __syncthreads();\n\n    wait_for_previous_kernel();\n",
        "    __syncthreads();\n    wait_for_previous_kernel();\n    if (scale > 0.f) return;\n",
    ),
    "until heads are ready": (
        "    const int team = warp / TEAM",
        "    if (scale > 0.f) return;\n    const int team = warp / TEAM",
    ),
    "without tiles": ("if (begin >= __reduce", "if (scale > 0.f || begin >= __reduce"),
    "without own passes": ("return masks_all || begin", "return scale > 0.f || begin"),
    "without merge": ("    if (blocks == 1) return;\n", "    if (scale > 0.f) return;\n"),
}


def phase_modules(bench: Bench) -> dict[str, KernelModule]:
    """The kernel of float16 and heads up to 64, compiled anew for each phase."""
    folder = Path(decode_attention.__file__).parent / "cuda"
    text = (folder / "decode_mma_attention.cu").read_text()
    text = re.sub("DECODE_MMA_ATTENTION_KERNEL\\(b?float16, [^4]*, (8|16), .*\n", "", text)
    text = re.sub("DECODE_MMA_ATTENTION_KERNEL\\(bfloat16.*\n", "", text)
    target = Path(tempfile.mkdtemp())
    running = {}
    for number, (name, (old, new)) in enumerate(PHASES.items()):
        assert not old or text.count(old) == 1, name
        own = text.replace(old, new) if old else text
        source = target / f"{number}.cu"
        source.write_text(own)
        command = ["nvcc", "-std=c++17", "--fmad=false", "-arch=sm_90", "-cubin", "-w", f"-I{folder}"]
        running[name] = subprocess.Popen([*command, "-o", f"{source}bin", str(source)]), Path(f"{source}bin")
    modules = {}
    for name, (process, cubin) in running.items():
        if process.wait() == 0:
            device = bench.device
            modules[name] = KernelModule(device.compute_capability, device.stream.handle, cubin.read_bytes())
    return modules


def geometries(row_tiles: int, stages: int) -> list[AttentionGeometry]:
    return [
        AttentionGeometry(slots, tiles, stages)
        for slots in (4, 2)
        for tiles in sorted({min(row_tiles, most) for most in (1, 2, 3, 4)})
        if slots == 4 or tiles == min(4, row_tiles)
    ]


def time_shape(bench: Bench, shape: tuple, phases: dict[str, KernelModule]) -> None:
    tokens, batch, committed, rows, size, masks_all = shape
    heads, kv_heads = LLAMA.num_heads, LLAMA.num_kv_heads
    layers = LAYERS if rows < 4096 else 2
    label = f"{tokens}x{batch} at {committed}, size {size}{', draft' if masks_all else ''}"
    device = bench.device
    caches = [tuple(bench.array((batch, kv_heads, rows, size), scale=50) for _ in range(2)) for _ in range(layers)]
    start = device.empty((batch,), "int32")
    device.upload(start, np.full(batch, committed, np.int32))
    mask = None
    if tokens > 1:
        random = np.random.default_rng(1)
        seen = np.eye(tokens, dtype=bool)
        depths = np.zeros(tokens, int)
        for node in range(1, tokens):
            parent = int(random.choice(np.flatnonzero(depths[:node] < 6)))
            depths[node] = depths[parent] + 1
            seen[node] |= seen[parent]
        full = np.zeros((batch, 1, tokens, rows), bool)
        full[..., :committed] = True
        full[..., committed : committed + tokens] = seen
        mask = device.empty(full.shape, "bool")
        device.upload(mask, full)
    qkv = bench.array((batch * tokens, (heads + 2 * kv_heads) * size), "float32", 50)
    rotations = bench.array((batch, tokens, size), scale=50)
    context = device.empty((batch * tokens, heads * size), "float16")
    partial = device.empty((batch * tokens * heads * 32 * (size + 4),), "float32")
    counters = device.zeros((batch * tokens * kv_heads,), "uint32")
    common = (qkv, None, None, EPSILON, rotations, start, mask)

    def report(name: str, launches: list) -> np.ndarray | None:
        try:
            device.upload(context, np.full(context.shape, 0x7E00, np.uint16).view(np.float16))
            launches[0]()
            found = device.download(context).astype(np.float32)
            bench.report(f"{label}: {name}", tokens * batch, bench.microseconds(launches, "attention"))
            return found
        except Exception:
            traceback.print_exc()
            return None

    old = None
    if hasattr(bench.kernels, "attention") and batch * tokens <= 16:
        old = report(
            "few", [bench.kernels.attention(*common, *c, partial, counters, context, masks_all) for c in caches]
        )
    elif hasattr(bench.tiled, "attention") and batch * tokens <= 64:
        old = report("many", [bench.tiled.attention(*common, *c, partial, context) for c in caches])
    row_tiles = -(-tokens // 4)
    chosen = decode_attention.attention_geometry(tokens, 4, size, kv_heads, rows, bench.kernels.shared_limit)
    first = None
    for geometry in geometries(row_tiles, chosen.stages):
        if not geometry.fits(tokens, size, bench.kernels.shared_limit):
            continue
        launches = [
            attention_launch(bench.kernels, *common, *c, partial, counters, context, masks_all, geometry)
            for c in caches
        ]
        mark = " CHOSEN" if geometry == chosen else ""
        found = report(f"{geometry.slots} slots, {geometry.row_tiles} tiles, {geometry.stages} stages{mark}", launches)
        if found is None:
            continue
        notes = []
        if first is None:
            first = found
        elif not np.array_equal(found, first):
            notes.append("OTHER BITS")
        if old is not None:
            notes.append(f"differs from old by {np.linalg.norm(found - old) / np.linalg.norm(old):.2e}")
        if notes:
            print("    ", "; ".join(notes), flush=True)
    if size == 64 and rows < 4096:
        for name, module in phases.items():
            launches = [
                attention_launch(module, *common, *c, partial, counters, context, masks_all, chosen) for c in caches
            ]
            report(f"{name} (CHOSEN)", launches)


def time_patched_steps(bench: Bench) -> None:
    """Whole steps with the kernels as they are, then with tensor-core attention."""
    import tensor_core_attention
    from kernel_speed import time_steps

    sizes = (1, 8, 16, 32, 64)
    print("steps as they are", flush=True)
    time_steps(bench, sizes)
    tensor_core_attention.install()
    print("steps with tensor-core attention", flush=True)
    time_steps(bench, sizes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    bench = Bench()
    print(bench.device.name, flush=True)
    phases = phase_modules(bench)
    for shape in SHAPES:
        try:
            time_shape(bench, shape, phases)
        except Exception:
            traceback.print_exc()
        if arguments.output:
            arguments.output.write_text(json.dumps(bench.results, indent=1))
    time_patched_steps(bench)


if __name__ == "__main__":
    main()
