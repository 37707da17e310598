"""Tries of the decode kernels of a mixture's layer: each with its bits and times, beside what ships.

    python tools/bench/experts_variants.py [--rows 1 4 16] [--seconds 45]

Shapes and weights are those of `experts_speed.py` in int4. Of each number of rows microseconds of a layer (CUDA graphs
of all layers), and of its kernels. Nothing of what is tried is in the kernels that ship: their sources are edited here.

- row adds: of one row, a block of downs has its columns of all experts and adds them, without a word to other blocks.
- asks: gates and ups ask the second-level cache for the same experts' downs, 1 when their own weights are under way, 2
  when they have been multiplied.
- fences: who comes last is found by an atomic between two fences, in place of one instruction.
- routes: of one row, each block of gates and ups chooses for itself, 1 by the scores of a router without a last block,
  2 in clusters of eight blocks that score, too: two launches in place of three. Downs that add rows read what was
  chosen before gates and ups end, and again behind that, lest it was another choice. `blocks` are those of a pair.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
from as_device import parse
from experts_speed import LAYERS, Bench, Step

from edgellm.engines.backends.cuda_device import CudaDevice
from edgellm.kernels import compiler
from edgellm.kernels.compiler import ModuleSource
from edgellm.kernels.decode.contract import SLICES, slice_steps
from edgellm.kernels.decode.packed_rows import PackedRows, packed_rows
from edgellm.kernels.experts import launcher
from edgellm.kernels.experts.launcher import expert_bytes
from edgellm.kernels.launch import Kernel, KernelModule, Launch

#: Edits of shared/last_of.cuh and of experts/packed_rows.cu: what stands there, what stands in its place.
_FENCES = {
    """    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(__cvta_generic_to_global(counter)), "r"(total - 1)
                 : "memory");
""": """    __threadfence();
    before = atomicInc(counter, total - 1);
    __threadfence();
"""
}
_BEGIN = "template <typename T, typename G, int KIND, typename Pairs>\n"
_MULTIPLIES = {
    _BEGIN: Path(__file__).with_suffix(".cuh").read_text("utf-8") + "\n" + _BEGIN,
    "    stream.start();\n": """    stream.start();
    if (HOST_ASKS == 1 && KIND == experts::GATED) ask_for_downs(given);
""",
    "\n    if constexpr (KIND == experts::SUMS) experts::add": """
    if (HOST_ASKS == 2 && KIND == experts::GATED) ask_for_downs(given);
    if constexpr (KIND == experts::SUMS) experts::add""",
    "    experts::begin_behind_choice<KIND, G::LATE>();\n": """    experts::begin_behind_choice<KIND, G::LATE>();
    if constexpr (HOST_ROW_ADDS && G::ONE && KIND == experts::SUMS) return multiply_row<T, G>(given, shared);
    else
""",
}
#: Of experts/router.cu: without the choice, and of scores in shared memory.
_ROUTES = {
    "    if (!comes_last(counter, gridDim.x)) return;\n": "    return;\n",
    "__ldcg(given.scores + static_cast<size_t>(row) * given.experts + expert)": "given.scores[expert]",
}
_ROUTED = {"experts/routed.cu": Path(__file__).with_name("experts_routed.cu").read_text("utf-8")}
_CLUSTER, _NORM_SUMS = 8, 8 * (SLICES + 1) * 4
#: A row's downs in a block: eight warps share K of each of its tiles. Bytes of shared memory that it asks for.
_ROW, _ROW_BYTES = PackedRows(True, 8, 1, 4, 8, 1, 2), 112 << 10


class Variant(NamedTuple):
    """What is tried, and forms by columns of the matrix: weight tiles, depth, blocks, how many have registers; and the
    blocks of a pair in gates and ups that route."""

    row_adds: int = 0
    asks: int = 0
    fences: int = 0
    routes: int = 0
    forms: tuple[tuple[int, tuple[int, ...]], ...] = ()
    blocks: int = 33

    def __str__(self) -> str:
        said = [f"{name}={value}" for name, value in zip(self._fields[:4], self[:4], strict=True) if value]
        said += [f"{self.blocks} blocks"] * (self.routes > 0)
        return ", ".join(said + [f"K={columns} {form}" for columns, form in self.forms]) or "as it ships"


def variants(rows: int, hidden: int, size: int) -> list[Variant]:
    """All, by themselves and together."""
    few, ring, downs = (hidden, (1, 0, 1, 2)), (hidden, (2, 3, 1, 2)), (size, (1, 2, 2, 2))
    found = [Variant(), Variant(fences=1), Variant(forms=(downs,))]
    if rows > 1:
        forms = (1, 0, 2, 2), (2, 1, 2, 2), (2, 2, 1, 1)
        return found + [Variant(asks=1), Variant(asks=2), *(Variant(forms=((size, form),)) for form in forms)]
    found += [Variant(forms=(form, *more)) for form in (few, ring) for more in ((), (downs,))]
    found += [Variant(row_adds=1, forms=forms) for forms in ((), (few,), (ring,))]
    found += [Variant(adds, routes=1) for adds in (0, 1)]
    shapes = (32, 0, 2), (16, 0, 2), (16, 3, 1), (16, 6, 1), (32, 2, 2)  # blocks of a pair; depth, and blocks
    for blocks, *form in shapes:
        found += [Variant(adds, routes=2, forms=((hidden, (1, *form, 2)),), blocks=blocks) for adds in (0, 1)]
    return found


def patched(kernel: Kernel, variant: Variant) -> Kernel:
    """The same of edited sources."""
    headers, own = {}, (variant.row_adds, variant.asks, variant.routes)
    is_routed = "routed_gated" in kernel.expression
    for file, edits, is_needed in (
        ("experts/router.cu", _ROUTES, variant.routes and (is_routed or "::route<" in kernel.expression)),
        ("shared/last_of.cuh", _FENCES, variant.fences),
        ("experts/packed_rows.cu", _MULTIPLIES, any(own) and (is_routed or "expert_" in kernel.expression)),
    ):
        if not is_needed:
            continue
        text = (Path(compiler.__file__).parent / file).read_text("utf-8")
        for before, after in edits.items():
            assert text.count(before) == 1, before
            text = text.replace(before, after)
        headers[file] = text
    names = "HOST_ROW_ADDS", "HOST_ASKS", "HOST_ROUTES"
    macros = *kernel.source.macros, *zip(names, own, strict=True)
    source = replace(kernel.source, headers=(*kernel.source.headers, *headers.items()))
    return kernel._replace(source=replace(source, macros=macros) if any(own) else source)


def routed(variant: Variant, bench: Bench, route: tuple[Kernel, Any], gated: Kernel) -> tuple[Kernel, int]:
    """Gates and ups that choose, and how many tiles of 8 experts each block scores."""
    tiles = bench.experts // (8 * _CLUSTER) if variant.routes == 2 else 0
    each = route[0].expression.rpartition(",")[2].strip(" >")
    expression = gated.expression.replace("expert_gated<", f"routed_gated<{tiles}, {each}, ")
    macros = dict(route[0].source.macros) | dict(gated.source.macros)
    name, text = next(iter(_ROUTED.items()))
    source = ModuleSource(f"routed-{gated.source.name}", (name,), (expression,), tuple(macros.items()), ((name, text),))
    return Kernel(source, expression), tiles


@contextmanager
def kernels_of(variant: Variant, bench: Bench, rows: int) -> Iterator[None]:
    """Meanwhile launches are made as a variant says."""
    forms, in_row = dict(variant.forms), variant.row_adds and rows == 1
    router: list[tuple[Kernel, Any]] = []

    def chosen(batch: int, layout: Any, gpu: Any, normed: bool, experts_rows: int = 0) -> PackedRows | None:
        usual, form = packed_rows(batch, layout, gpu, normed, experts_rows), forms.get(layout.columns)
        if in_row and layout.columns == bench.size:
            return _ROW
        if usual is None or form is None:
            return usual
        weight_tiles, depth, blocks, resident = form
        at_once = max(16 // usual.sharing, (8 if batch == 1 else 2) // weight_tiles)
        return PackedRows(batch == 1, usual.sharing, weight_tiles, depth, at_once, blocks, resident)

    def launch(module: Any, kernel: Kernel, grid: Any, threads: int, shared_bytes: int, given: Any) -> Launch:
        if in_row and "expert_sums" in kernel.expression:
            grid, shared_bytes = (bench.hidden // 16, 1, 1), _ROW_BYTES
        if variant.routes and "::route<" in kernel.expression:
            router[:] = [(kernel, given)]
        if variant.routes and "expert_gated" in kernel.expression:
            kernel, tiles = routed(variant, bench, router[0], kernel)
            staged = SLICES * slice_steps(bench.hidden) * 64
            begin = max(shared_bytes - staged, tiles * 8 * bench.hidden * 2)
            shared_bytes = begin + _NORM_SUMS + 2 * staged + tiles * SLICES * 32 + bench.experts * 4 + 2 * 32 * 4
            grid, given = (variant.blocks, bench.chosen, 1), (*router[0][1][:2], *given)
            cluster = (1, _CLUSTER, 1) if tiles else (1, 1, 1)
            return Launch(module, patched(kernel, variant), grid, threads, shared_bytes, given, cluster)
        return Launch(module, patched(kernel, variant), grid, threads, shared_bytes, given)

    patches = patch.object(launcher, "packed_rows", chosen), patch.object(launcher, "Launch", launch)
    with patches[0], patches[1]:
        yield


def _without_router(own: dict[str, Launch]) -> dict[str, Launch]:
    return {name: launch for name, launch in own.items() if name != "route"}


class Tried:
    """A step of so many rows, and what its variants gave."""

    def __init__(self, bench: Bench, rows: int) -> None:
        self.bench, self.expected = bench, b""
        self.step, self.routed = (Step(bench, bench.choices(rows, False)) for _ in range(2))
        self.routed.ids = [self.routed.routed.expert_ids] * LAYERS  # what its router chooses

    def compile(self, tries: Sequence[Variant]) -> None:
        """The modules of all, side by side: launches that are made meanwhile cannot run. What fails does so again."""
        with suppress(Exception), self.bench.kernels.module.side_by_side():
            for variant in tries:
                with suppress(Exception), kernels_of(variant, self.bench, self.step.rows):
                    self.routed.launches(0)

    def launches(self, variant: Variant) -> list[dict[str, Launch]]:
        """Those of a layer whose router chooses, and of all layers."""
        bench = self.bench
        with kernels_of(variant, bench, self.step.rows):
            step = self.routed if variant.routes else self.step
            every = [self.routed.launches(0), *(step.launches(number) for number in range(LAYERS))]
        if variant.routes:
            return [own if variant.routes == 1 else _without_router(own) for own in every]
        for own, layer in zip(every, (bench.layers[0], *bench.layers), strict=True):
            addition, layout = own["gate_up"]._arguments[0].addition, layer.down.layout
            assert layout is not None
            addition.outputs = layer.down.linear.weight.pointer  # which gates and ups have no use for but to ask
            addition.width = expert_bytes(layout, layer.down.experts)
        return every

    def bits(self, own: dict[str, Launch]) -> bytes:
        """What a router and its experts give in a graph whose launches overlap, behind other choices and sums."""
        routed, device = self.routed, self.bench.device
        arrays = routed.x, *routed.routed[:2], routed.inner, routed.output, routed.counters
        for launch in own.values():
            launch.overlap_previous()
            launch()
        graph = device.capture(lambda: [launch() for launch in own.values()], "experts")
        for array in arrays:
            device.upload(array, np.zeros(array.shape, array.dtype))
        graph()
        return b"".join(device.download(each).tobytes() for each in arrays)

    def take(self, variant: Variant) -> None:
        """Its bits and microseconds, printed."""
        name = f"{self.step.rows:2d} rows, {variant}"
        try:
            chosen, *every = self.launches(variant)
            found = self.bits(chosen)
            self.expected = self.expected or found
            spans = {"layer": self.bench.milliseconds([launch for own in every for launch in own.values()])}
            spans |= {kernel: self.bench.milliseconds([own[kernel] for own in every]) for kernel in every[0]}
            spans = {key: round(1000 * span, 2) for key, span in spans.items()}
            said = "same bits" if found == self.expected == self.bits(chosen) else "OTHER BITS"
        except Exception as error:
            spans, said = {}, f"FAILED {type(error).__name__}: {str(error)[:200]}"
        print(f"{name:64s} {said} {json.dumps(spans)}", flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, usual in (("experts", 128), ("chosen", 8), ("hidden", 2048), ("size", 768)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--seconds", type=float, default=45.0, help="behind which nothing new is begun")
    options = parse(parser)
    options.sort_from, begun = math.inf, time.monotonic()
    device = CudaDevice()
    bench = Bench(device, KernelModule(device.gpu, device.stream), options, "int4")
    for rows in options.rows:
        tried, in_clusters = Tried(bench, rows), bench.chosen == _CLUSTER and bench.experts % (8 * _CLUSTER) == 0
        tries = [each for each in variants(rows, bench.hidden, bench.size) if each.routes < 2 or in_clusters]
        tried.compile(tries)
        print(f"{rows} rows compiled behind {time.monotonic() - begun:.1f} s", flush=True)
        for variant in (*tries, Variant()):
            if time.monotonic() - begun < options.seconds:
                tried.take(variant)
        print(f"{rows} rows done behind {time.monotonic() - begun:.1f} s", flush=True)


if __name__ == "__main__":
    main()
