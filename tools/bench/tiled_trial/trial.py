"""Times many tilings of the linear layers of 17 to 64 rows, checks their bits, then whole layers of the best.

    python tools/bench/tiled_trial/trial.py --output FILE

Each tiling runs in a process of its own, so that one that fails does not stop the others.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
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
    """Template arguments of a kernel, blocks on a multiprocessor, promotion in the cache, what is left out."""

    row_tiles: int
    teams: int
    bulk: int
    blocks: int = 1
    promotion: int = 2
    idle: int = 0
    column_tiles: int = 4

    @property
    def name(self) -> str:
        return (
            f"r{self.row_tiles}t{self.teams}k{self.bulk}b{self.blocks}p{self.promotion}i{self.idle}c{self.column_tiles}"
        )

    @property
    def weight_rows(self) -> int:
        return WARPS // self.teams * 8 * self.column_tiles

    def shared_bytes(self, splits: int, stages: int) -> int:
        rows, parts = 16 * self.row_tiles, splits * self.teams
        area = rows * (self.weight_rows + 8) * 4
        ring = max(stages * (self.weight_rows + rows) * 64, area)
        items = (16 if parts > 4 else 4) // parts
        return self.teams * (ring + (area if items > 1 else 0))

    def source(self) -> bytes:
        arguments = (
            f"{self.row_tiles}, {self.column_tiles}, {self.teams}, {'true' if self.bulk else 'false'}, {self.blocks}"
        )
        return f'#include "trial_tiled_linear.cuh"\nTRIAL_KERNELS(float16, __half, {arguments})\n'.encode()


GEOMETRIES = [
    Geometry(4, 2, 1),
    Geometry(2, 4, 1, 2),
    Geometry(4, 4, 1),
    Geometry(2, 2, 1, 2),
    Geometry(4, 1, 1, 2, 2, 0, 2),
    Geometry(4, 2, 0),
    Geometry(4, 2, 1, 2, 2, 0, 2),
    Geometry(2, 2, 1),
    Geometry(4, 1, 1),
    Geometry(2, 4, 0, 2),
    Geometry(4, 4, 0),
    Geometry(2, 4, 1),
    Geometry(4, 2, 1, 1, 0),
    Geometry(4, 2, 1, 1, 3),
    Geometry(2, 4, 1, 2, 3),
    Geometry(2, 2, 0),
    Geometry(4, 2, 1, 1, 2, 1),
    Geometry(4, 2, 0, 1, 2, 1),
]

#: Splits worth trying; of gate_up and head fewer, which have many tiles.
SPLITS = {"qkv": (1, 2, 4), "o": (1, 2, 4), "gate_up": (1, 2), "down": (1, 2, 4), "head": (1,)}


def tensor_map(array: Any, columns: int, box_rows: int, promotion: int) -> Any:
    """A CUtensorMap of a matrix [rows, stride] of 16-bit values, whose tiles are [box_rows, 32]."""
    rows, stride = array.shape
    space = (ctypes.c_char * 192)()
    address = -(-ctypes.addressof(space) // 64) * 64
    dimensions = (ctypes.c_uint64 * 2)(columns, rows)
    strides = (ctypes.c_uint64 * 1)(stride * 2)
    box, steps = (ctypes.c_uint32 * 2)(32, box_rows), (ctypes.c_uint32 * 2)(1, 1)
    encode = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
    status = encode(
        *(ctypes.c_void_p(address), 6, ctypes.c_uint32(2), ctypes.c_void_p(array.pointer)),
        *(dimensions, strides, box, steps, 0, 0, promotion, 0),
    )
    if status:
        raise RuntimeError(f"cuTensorMapEncodeTiled: {status}")
    return (ctypes.c_uint64 * 16).from_buffer_copy(ctypes.string_at(address, 128))


def compile_geometry(geometry: Geometry, architecture: str) -> str:
    """Write the cubin; returns the name and how it went."""
    started = time.perf_counter()
    own = {name: text for name, text in SOURCES.items() if name.endswith(".cuh")}
    text = (Path(__file__).parent / "trial_tiled_linear.cuh").read_bytes()
    if geometry.idle:
        multiply = b"multiply_add(sum[r][c], a[r]"
        assert text.count(multiply) == 2
        text = text.replace(multiply, b"if (a[r][0][0] == 0x7fff7ffeu) " + multiply)
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

    def map(self, array: Any, columns: int, rows: int, promotion: int) -> Any:
        return tensor_map(array, columns, rows, promotion)

    def launch(
        self, kind: str, geometry: Geometry, splits: int, stages: int, x: Any, weight: Any, output: Any, residual: Any
    ) -> Any:
        from edgellm.kernels.decode_kernels import slice_steps
        from edgellm.kernels.launch import Launch, pointer

        width, columns = weight.shape
        rows = width // 2 if kind == "gate_up" else width
        unit = geometry.weight_rows // 2 if kind == "gate_up" else geometry.weight_rows
        maps = (ctypes.c_uint64 * 16)(), (ctypes.c_uint64 * 16)()
        if geometry.bulk:
            maps = (
                self.map(weight, columns, unit, geometry.promotion),
                self.map(x, columns, 16 * geometry.row_tiles, geometry.promotion),
            )
        own: tuple[Any, ...] = (pointer(output),)
        behind: tuple[Any, ...] = ()
        name = {"gate_up": "gate_up", "qkv": "linear", "head": "linear"}.get(kind, "residual")
        if name == "residual":
            own = pointer(residual), ctypes.c_int(1), pointer(output)
            behind = pointer(None), ctypes.c_int(0)
        numbers = x.shape[0], rows, columns, slice_steps(columns), stages
        every = (
            *maps,
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
    limit = trial.bench.kernels.shared_limit // geometry.blocks - 1024
    for kind, (width, columns, copies) in shapes().items():
        weights = trial.weights(width, columns, copies)
        for rows in (64, 48) if geometry.row_tiles == 4 else (32, 17):
            x, residual, output = trial.inputs(kind, rows, width, columns)
            expected = None if geometry.idle else trial.expected(kind, x, weights[0], residual, output)
            for splits in SPLITS[kind]:
                fitting = [s for s in (2, 3, 4, 6, 8) if geometry.shared_bytes(splits, s) <= limit]
                for stages in fitting[-3:] if rows in (64, 32) else fitting[-1:]:
                    result = {"kind": kind, "rows": rows, "splits": splits, "stages": stages, "geometry": geometry.name}
                    try:
                        launches = [
                            trial.launch(kind, geometry, splits, stages, x, weight, output, residual)
                            for weight in weights
                        ]
                        trial.clear(output)
                        launches[0]()
                        same = geometry.idle or np.array_equal(trial.bench.device.download(output), expected)
                        result["us"] = round(trial.bench.microseconds(launches, kind), 2)
                        after = geometry.idle or np.array_equal(trial.bench.device.download(output), expected)
                        result["bits"] = "same" if same and after else f"OTHER {same} {after}"
                        if geometry.idle:
                            result["bits"] = "idle"
                        result["shared"] = geometry.shared_bytes(splits, stages)
                        if stages == fitting[-1] and kind in ("o", "qkv") and rows in (64, 32):
                            hot = launches[:1] * len(launches)
                            result["hot"] = round(trial.bench.microseconds(hot, kind), 2)
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
    parser.add_argument("--seconds", type=float, default=180, help="start no further geometry after so long")
    arguments = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    if arguments.child == "present":
        return time_present((1, 16, 32))
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
    names = [
        "present",
        *(geometry.name for geometry in GEOMETRIES if (FOLDER / f"{geometry.name}.cubin").exists()),
        "present",
    ]

    while names and time.perf_counter() - started < arguments.seconds:
        name = names.pop(0)
        lines = child(name, 45)
        if not lines and "k1" in name:  # it hangs or is refused: so do all that copy in bulk
            names = [other for other in names if "k1" not in other]
        results.extend(lines)
        show(name, lines)
        arguments.output.write_text(json.dumps(results) + "\n")
    print("not tried:", names, flush=True)
    best = best_of(results, 2)
    for rows, kinds in best.items():
        for kind, chosen in kinds.items():
            print(f"BEST {rows} {kind:8s} " + ", ".join(f"{describe(r)} {r['us']}" for r in chosen), flush=True)
    (FOLDER / "best.json").write_text(json.dumps(best))
    child("layers", 90)
    return None


def show(name: str, lines: Sequence[dict[str, Any]]) -> None:
    """A line for each matrix."""
    for kind in SPLITS:
        own = []
        for r in lines:
            if r["kind"] == kind:
                hot = f"({r['hot']})" if "hot" in r else ""
                bits = "" if r.get("bits", "same") in ("same", "idle") else r["bits"]
                what = r.get("present") or f"{r['splits']}x{r['stages']}"
                own.append(f"{r['rows']}:{what}={r.get('us', r.get('error'))}{hot}{bits}")
        print(f"{name:16s} {kind:8s} {' '.join(own)}", flush=True)


def child(name: str, seconds: float) -> list[dict[str, Any]]:
    """The results that a process of its own prints; other lines are passed on, and the end of what it complains of."""
    command = [sys.executable, __file__, "--child", name]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=seconds)
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
