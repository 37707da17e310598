"""Times many tilings of the linear layers of 17 to 64 rows, checks their bits, then whole layers of the best.

    python tools/bench/tiled_trial/trial.py --output FILE

Each tiling runs in a process of its own, so that one that fails does not stop the others.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from edgellm.kernels import compiler

FOLDER = Path("/tmp/edgellm-trial")
SOURCES = compiler._sources()
WARPS = 8


@dataclass(frozen=True)
class Geometry:
    """Template arguments of a kernel, blocks on a multiprocessor, whether weights pass the cache."""

    row_tiles: int
    column_tiles: int
    teams: int
    stage_steps: int
    blocks: int = 1
    evict: int = 0

    @property
    def name(self) -> str:
        return f"r{self.row_tiles}c{self.column_tiles}t{self.teams}s{self.stage_steps}b{self.blocks}e{self.evict}"

    @property
    def weight_rows(self) -> int:
        return WARPS // self.teams * self.column_tiles * 8

    def shared_bytes(self, splits: int, stages: int) -> int:
        rows, parts = 16 * self.row_tiles, splits * self.teams
        area = rows * (self.weight_rows + 8) * 4
        ring = max(stages * self.stage_steps * (self.weight_rows + rows) * 64, area)
        items = (16 if parts > 4 else 4) // parts
        return self.teams * (ring + (area if items > 1 else 0))

    def source(self) -> bytes:
        arguments = f"{self.row_tiles}, {self.column_tiles}, {self.teams}, {self.stage_steps}, {self.blocks}"
        text = f'#include "trial_tiled_linear.cuh"\nTRIAL_KERNELS(float16, __half, {arguments})\n'
        if self.column_tiles % 2 == 0 and self.teams * self.stage_steps < 8:
            text += f"TRIAL_GATE_UP(float16, __half, {arguments})\n"
        return text.encode()


GEOMETRIES = [
    Geometry(4, 4, 2, 1),
    Geometry(4, 4, 4, 1),
    Geometry(4, 4, 1, 1),
    Geometry(2, 4, 2, 1),
    Geometry(2, 4, 4, 1),
    Geometry(2, 4, 1, 1),
    Geometry(4, 4, 2, 2),
    Geometry(4, 4, 1, 2),
    Geometry(4, 4, 4, 2),
    Geometry(2, 4, 2, 1, 2),
    Geometry(2, 4, 4, 1, 2),
    Geometry(2, 4, 2, 2),
    Geometry(4, 3, 2, 1),
    Geometry(4, 2, 2, 1, 2),
    Geometry(4, 2, 1, 1, 2),
    Geometry(4, 2, 4, 1, 2),
    Geometry(4, 4, 2, 1, 1, 1),
    Geometry(4, 4, 1, 1, 1, 1),
]

#: Splits worth trying; of gate_up and head fewer, which have many tiles.
SPLITS = {"qkv": (1, 2, 4, 8), "o": (1, 2, 4, 8), "gate_up": (1, 2, 4), "down": (1, 2, 4, 8), "head": (1, 2)}

HINTED = b"""
__device__ __forceinline__ void copy_async_16_once(unsigned shared, const void* global, bool exists) {
    asm volatile("{.reg .b64 policy; createpolicy.fractional.L2::evict_first.b64 policy, 1.0;"
                 "cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, policy;}" ::"r"(shared), "l"(global),
                 "r"(exists ? 16u : 0u)
                 : "memory");
}
"""


def compile_geometry(geometry: Geometry, architecture: str) -> str:
    """Write the cubin; returns the name and how it went."""
    started = time.perf_counter()
    own = {name: text for name, text in SOURCES.items() if name.endswith(".cuh")}
    text = (Path(__file__).parent / "trial_tiled_linear.cuh").read_bytes()
    if geometry.evict:
        copy = b"copy_async_16(ring + slot * G::STAGE_BYTES + i *"
        assert text.count(copy) == 1
        text = text.replace(copy, copy.replace(b"16(", b"16_once("))
        own["decode_common.cuh"] = own["decode_common.cuh"].replace(
            b"// Ends a group of", HINTED + b"// Ends a group of"
        )
    own["trial_tiled_linear.cuh"] = text
    own["trial.cu"] = geometry.source()
    compiler._sources = lambda: own
    try:
        (FOLDER / f"{geometry.name}.cubin").write_bytes(compiler.compile_kernels(architecture))
    except Exception as error:
        return f"{geometry.name}: {str(error)[:2000]}"
    finally:
        compiler._sources = lambda: SOURCES
    return f"{geometry.name}: compiled in {time.perf_counter() - started:.1f} s"


class Trial:
    """The bench with kernels of geometries."""

    def __init__(self) -> None:
        import kernel_speed

        self.speed = kernel_speed
        self.bench = kernel_speed.Bench()
        self._modules: dict[str, Any] = {}

    def module(self, geometry: Geometry) -> Any:
        from edgellm.kernels.launch import KernelModule

        if geometry.name not in self._modules:
            device = self.bench.device
            cubin = (FOLDER / f"{geometry.name}.cubin").read_bytes()
            self._modules[geometry.name] = KernelModule(device.compute_capability, device.stream.handle, cubin)
        return self._modules[geometry.name]

    def weights(self, width: int, columns: int, copies: int) -> list[Any]:
        device, noise = self.bench.device, self.bench.array((4_000_008,))
        first = device.empty((width, columns), "float16")
        for begin in range(0, first.size, noise.size):
            size = (min(noise.size, first.size - begin),)
            source = type(noise)(noise.pointer, size, "float16", noise)
            device.copy(type(noise)(first.pointer + 2 * begin, size, "float16", first), source)
        arrays = [first]
        for _ in range(copies - 1):
            arrays.append(self.bench.device.empty((width, columns), "float16"))
            self.bench.device.copy(arrays[-1], first)
        return arrays

    def launch(
        self, kind: str, geometry: Geometry, splits: int, stages: int, x: Any, weight: Any, output: Any, residual: Any
    ) -> Any:
        from edgellm.kernels.decode_kernels import slice_steps
        from edgellm.kernels.launch import Launch, pointer

        width, columns = weight.shape
        rows = width // 2 if kind == "gate_up" else width
        unit = geometry.weight_rows // 2 if kind == "gate_up" else geometry.weight_rows
        own: tuple[Any, ...] = (pointer(output),)
        behind: tuple[Any, ...] = ()
        name = {"gate_up": "gate_up", "qkv": "linear", "head": "linear"}.get(kind, "residual")
        if name == "residual":
            own = pointer(residual), ctypes.c_int(1), pointer(output)
            behind = pointer(None), ctypes.c_int(0)
        numbers = x.shape[0], rows, columns, slice_steps(columns), stages
        every = (
            *map(pointer, (weight, None, x)),
            ctypes.c_int(x.shape[1]),
            *own,
            *map(ctypes.c_int, numbers),
            *behind,
        )
        grid, cluster = (-(-rows // unit), splits, 1), (1, splits, 1)
        shared = geometry.shared_bytes(splits, stages)
        return Launch(self.module(geometry), f"trial_{name}_float16", grid, 32 * WARPS, shared, every, cluster)

    def inputs(self, kind: str, rows: int, width: int, columns: int) -> tuple[Any, Any, Any]:
        x = self.bench.array((rows, columns), scale=50)
        residual = self.bench.array((rows, width), "float32", 50) if kind in ("o", "down") else None
        shape, dtype = ((rows, width // 2), "float16") if kind == "gate_up" else ((rows, width), "float32")
        return x, residual, self.bench.device.empty(shape, dtype)

    def expected(self, kind: str, x: Any, weight: Any, residual: Any, output: Any) -> np.ndarray:
        """By the kernels of few rows; of gate and up by those of up to 32, whose bits are proven to be the same."""
        many = 32 if kind == "gate_up" else 16

        def part(array: Any, first: int, count: int) -> Any:
            if array is None:
                return None
            item = array.nbytes // array.shape[0]
            return type(array)(array.pointer + first * item, (count, array.shape[1]), array.dtype, array)

        for first in range(0, x.shape[0], many):
            count = min(many, x.shape[0] - first)
            own = part(x, first, count), part(output, first, count)
            if kind == "gate_up":
                self.bench.tiled.gate_up(own[0], weight, None, own[1])()
            else:
                self.bench.kernels.linear_residual(own[0], weight, None, part(residual, first, count), own[1])()
        return self.bench.device.download(output)

    def clear(self, output: Any) -> None:
        self.bench.device.upload(output, np.full(output.shape, np.nan, output.dtype))


def shapes() -> dict[str, tuple[int, int, int]]:
    import kernel_speed

    return kernel_speed.linear_shapes()


def time_geometry(geometry: Geometry) -> None:
    """All matrices with one geometry; a line of JSON for each result."""
    trial = Trial()
    limit = trial.bench.kernels.shared_limit // geometry.blocks - (1024 if geometry.blocks > 1 else 0)
    for kind, (width, columns, copies) in shapes().items():
        weights = trial.weights(width, columns, copies)
        for rows in (64, 48) if geometry.row_tiles == 4 else (32, 17):
            x, residual, output = trial.inputs(kind, rows, width, columns)
            expected = trial.expected(kind, x, weights[0], residual, output)
            for splits in SPLITS[kind]:
                if splits * geometry.teams > 16:
                    continue
                fitting = [s for s in (2, 3, 4, 5, 6, 8) if geometry.shared_bytes(splits, s) <= limit]
                if geometry.shared_bytes(splits, 2) > limit:
                    fitting = []
                for stages in fitting[-4:] if rows in (64, 32) else fitting[-1:]:
                    result = {"kind": kind, "rows": rows, "splits": splits, "stages": stages, "geometry": geometry.name}
                    try:
                        launches = [
                            trial.launch(kind, geometry, splits, stages, x, weight, output, residual)
                            for weight in weights
                        ]
                        trial.clear(output)
                        launches[0]()
                        same = np.array_equal(trial.bench.device.download(output), expected)
                        result["us"] = round(trial.bench.microseconds(launches, kind), 2)
                        after = np.array_equal(trial.bench.device.download(output), expected)
                        result["bits"] = "same" if same and after else f"OTHER {same} {after}"
                        result["shared"] = geometry.shared_bytes(splits, stages)
                    except Exception as error:
                        result["error"] = str(error)[:200]
                    print(json.dumps(result), flush=True)
        del weights


def time_present(rows_list: Sequence[int]) -> None:
    """The kernels there are, for comparison."""
    trial = Trial()
    speed = trial.speed
    norm_weight = trial.bench.array((speed.LLAMA.hidden_size,), scale=50)
    for kind, (width, columns, copies) in shapes().items():
        weights = trial.weights(width, columns, copies)
        for rows in rows_list:
            few, many, _kept = speed.linear_launches(trial.bench, kind, norm_weight, weights, rows)
            for name, launches in (("few", few), ("many", many)):
                if launches:
                    span = trial.bench.microseconds(launches, kind)
                    print(json.dumps({"kind": kind, "rows": rows, "present": name, "us": round(span, 2)}), flush=True)


def time_layers(best: dict[str, dict[str, list[dict[str, Any]]]]) -> None:
    """Sixteen layers without attention, and with the head, for combinations of the best of each matrix."""
    from edgellm.kernels.decode_kernels import padded_columns

    trial = Trial()
    bench, llama = trial.bench, trial.speed.LLAMA
    weights = {kind: trial.weights(*shape) for kind, shape in shapes().items()}
    named = {geometry.name: geometry for geometry in GEOMETRIES}
    norm_weight = bench.array((llama.hidden_size,), scale=50)
    for rows, of_kinds in best.items():
        count = int(rows)
        hidden = bench.array((count, llama.hidden_size), "float32", 50)
        normed = bench.device.empty((count, padded_columns(llama.hidden_size)), "float16")
        context = bench.array((count, llama.query_size), scale=50)
        outputs = {kind: trial.inputs(kind, count, *shapes()[kind][:2])[2] for kind in ("qkv", "gate_up", "head")}
        inputs = {"qkv": normed, "o": context, "gate_up": normed, "down": outputs["gate_up"], "head": normed}

        def launch(kind: str, index: int, choice: dict[str, Any]) -> Any:
            return trial.launch(
                kind, named[choice["geometry"]], choice["splits"], choice["stages"], inputs[kind],  # noqa: B023
                weights[kind][index], outputs.get(kind, hidden), hidden,  # noqa: B023
            )  # fmt: skip

        def norm() -> Any:
            return bench.tiled.norm(hidden, norm_weight, trial.speed.EPSILON, normed)  # noqa: B023

        kinds = ("qkv", "o", "gate_up", "down")
        for chosen in itertools.product(*(of_kinds[kind] for kind in kinds)):
            choice = dict(zip(kinds, chosen, strict=True))
            launches: list[Callable[[], None]] = []
            for index in range(llama.num_layers):
                launches += [norm(), launch("qkv", index, choice["qkv"]), launch("o", index, choice["o"])]
                launches += [norm(), launch("gate_up", index, choice["gate_up"]), launch("down", index, choice["down"])]
            layers = bench.microseconds(launches, "layers") * len(launches) / llama.num_layers
            launches += [norm(), launch("head", 0, of_kinds["head"][0])]
            whole = bench.microseconds(launches, "whole") * len(launches)
            names = " ".join(f"{kind}={describe(choice[kind])}" for kind in kinds)
            print(f"LAYER {rows} rows {layers:7.2f} us a layer, with head {whole:8.1f} us: {names}", flush=True)


def describe(result: dict[str, Any]) -> str:
    """Short."""
    return f"{result['geometry']}/{result['splits']}x{result['stages']}"


def best_of(results: Sequence[dict[str, Any]], count: int) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """By rows and matrix: the fastest of different geometries or splits, or of much less shared memory."""
    best: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for rows in (64, 32):
        best[str(rows)] = {}
        for kind in SPLITS:
            own = [r for r in results if r["kind"] == kind and r["rows"] == rows and r.get("bits") == "same"]
            chosen: list[dict[str, Any]] = []
            for result in sorted(own, key=lambda r: r["us"]):
                if len(chosen) < count and all(
                    (r["geometry"], r["splits"]) != (result["geometry"], result["splits"])
                    or result["shared"] < 0.6 * r["shared"]
                    for r in chosen
                ):
                    chosen.append(result)
            best[str(rows)][kind] = chosen
    return best


def main() -> None:
    """All of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--child", help="name of a geometry, 'present' or 'layers'")
    parser.add_argument("--output", type=Path, default=FOLDER / "results.json")
    parser.add_argument("--architecture", default="sm_90")
    parser.add_argument("--compile", action="store_true", help="compile only")
    parser.add_argument("--gpus", type=int, nargs="+", default=[0])
    parser.add_argument("--seconds", type=float, default=180, help="start no further geometry after so long")
    arguments = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    if arguments.child == "present":
        return time_present((1, 8, 16, 32))
    if arguments.child == "layers":
        return time_layers(json.loads((FOLDER / "best.json").read_text()))
    if arguments.child:
        return time_geometry(next(g for g in GEOMETRIES if g.name == arguments.child))
    started = time.perf_counter()
    with ProcessPoolExecutor(12) as pool:
        pool.submit(compiler.cached_kernels, arguments.architecture)
        for line in pool.map(compile_geometry, GEOMETRIES, itertools.repeat(arguments.architecture)):
            print(line, flush=True)
    if arguments.compile:
        return None
    results: list[dict[str, Any]] = []
    names = ["present", *(geometry.name for geometry in GEOMETRIES if (FOLDER / f"{geometry.name}.cubin").exists())]

    def work(gpu: int) -> None:
        while names and time.perf_counter() - started < arguments.seconds:
            name = names.pop(0)
            lines = child(name, 60, gpu)
            results.extend(lines)
            show(name, lines)
            arguments.output.write_text(json.dumps(results) + "\n")

    with ThreadPoolExecutor(len(arguments.gpus)) as pool:
        list(pool.map(work, arguments.gpus))
    print("not tried:", names, flush=True)
    best = best_of(results, 2)
    for rows, kinds in best.items():
        for kind, chosen in kinds.items():
            print(f"BEST {rows} {kind:8s} " + ", ".join(f"{describe(r)} {r['us']}" for r in chosen), flush=True)
    (FOLDER / "best.json").write_text(json.dumps(best))
    child("layers", 90, arguments.gpus[0])
    return None


def show(name: str, lines: Sequence[dict[str, Any]]) -> None:
    """A line for each matrix."""
    for kind in SPLITS:
        own = [r for r in lines if r["kind"] == kind]
        text = " ".join(
            f"{r['rows']}:{r.get('present') or str(r['splits']) + 'x' + str(r['stages'])}="
            f"{r.get('us', r.get('error'))}{'' if r.get('bits', 'same') == 'same' else r['bits']}"
            for r in own
        )
        print(f"{name:16s} {kind:8s} {text}", flush=True)


def child(name: str, seconds: float, gpu: int) -> list[dict[str, Any]]:
    """The results that a process of its own prints; other lines are passed on, and the end of what it complains of."""
    command = [sys.executable, __file__, "--child", name]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": str(gpu)}
    try:
        done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=seconds)
        out, errors = done.stdout, done.stderr if done.returncode else ""
    except subprocess.TimeoutExpired as error:
        out, errors = ((text or b"").decode() for text in (error.stdout, error.stderr))
        errors += " timed out"
    found = []
    for line in out.splitlines():
        if line.startswith("{"):
            found.append(json.loads(line))
        else:
            print(line, flush=True)
    if errors:
        print(f"{name} FAILED: {errors.strip()[:300]} ... {errors.strip()[-600:]}", flush=True)
    return found


if __name__ == "__main__":
    main()
