"""Times a mixture's layer by kernels, over the weights of several layers in turn: of decode steps, and of prompts.

    python tools/bench/experts_speed.py [--rows 1 4 16 64 512 4000] [--experts 128 --chosen 8 --hidden 2048 --size 768]
                                        [--format int4 fp8 nvfp4 mxfp4 dense] [--sort-from 65] [--tilings]
                                        [--choices even skewed] [--as orin [--alone]] [--output FILE]

Random weights in the shapes of Qwen3-30B-A3B; experts are chosen evenly, and `skewed`: expert of rank r, another one in
each layer, is as likely as r^-0.8. Milliseconds of a layer, from CUDA graphs of all layers, and of its kernels each by
itself; GB/s are those of the weights of the experts that were chosen, each read once, and their share of what was read
before and behind; TFLOP/s of the experts' products. As in models, from 65 rows on pairs are sorted by expert (`sort`),
or `--sort-from` others. Norms are left out but where a router has them inside. `--tilings`: every tiling of sorted
pairs, gates and ups, and downs. Needs pycuda and a GPU; all layers take 2.5 GB of it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[2] / "tests" / "helpers")]
from as_device import one_of, parse
from device_limits import read_around
from device_weights import to_device_layout
from provenance import provenance
from random_layouts import MXFP4, even_weight

from edgellm.device.limits import gpu_milliseconds
from edgellm.engines.backends.cuda_device import CudaDevice
from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.decode.contract import MAX_TILED_ROWS, Kept, LinearWeights, NormedInput
from edgellm.kernels.decode.linear import CudaDecodeKernels
from edgellm.kernels.decode.packed_rows import MAX_NORMED_ROWS
from edgellm.kernels.decode.tiled_linear import CudaTiledKernels
from edgellm.kernels.experts.contract import (
    TILES,
    Activation,
    Addition,
    Choice,
    ExpertWeights,
    Routed,
    Routing,
    rows_of_tiles,
    sorted_pairs,
    sorted_words,
)
from edgellm.kernels.experts.launcher import counter_words
from edgellm.kernels.experts.prompt_launcher import CudaSortedExperts, expert_tilings
from edgellm.kernels.launch import KernelModule, Launch
from edgellm.kernels.prefill.linear import CudaPromptLinear
from edgellm.kernels.quantization.device_layout import PackedMatrix
from edgellm.kernels.quantization.packed_weight import WeightFormat

LAYERS, DTYPE, _SERIES, _SKEW = 8, "float16", 3, 0.8
FORMATS = {
    "int4": WeightFormat("int4", 128, False, DTYPE),
    "fp8": WeightFormat("fp8", 128, False, DTYPE),
    "nvfp4": WeightFormat("fp4", 16, False, DTYPE),
    "mxfp4": MXFP4,
    "dense": None,
}


def drawn_choices(random: np.random.Generator, ranks: np.ndarray, rows: int, chosen: int) -> np.ndarray:
    """Ids, int32 [rows, chosen], rising, of experts that are as likely as their ranks [E] say: (rank + 1)^-0.8."""
    order = np.argsort(_SKEW * np.log(ranks + 1) - random.gumbel(size=(rows, len(ranks))), axis=1)
    return np.sort(order[:, :chosen], axis=1).astype(np.int32)


class Layer(NamedTuple):
    """The weights of one layer."""

    router: DeviceArray
    gate_up: ExpertWeights
    down: ExpertWeights


class Bench:
    """Memory, kernels, layers and the stopwatch."""

    def __init__(self, device: CudaDevice, module: KernelModule, options: argparse.Namespace, name: str) -> None:
        self.device, self.format = device, FORMATS[name]
        self.kernels = CudaSortedExperts(module, DTYPE)
        self.linears = CudaTiledKernels(module, DTYPE), CudaPromptLinear(module, DTYPE)
        self.few = CudaDecodeKernels(module, DTYPE, 128)
        self.experts, self.chosen, self.hidden, self.size = (
            getattr(options, each) for each in ("experts", "chosen", "hidden", "size")
        )
        self.sort_from: int = options.sort_from
        noise = (np.random.default_rng(0).standard_normal(1 << 20) * 0.02).astype(np.float16)
        self._noise = self.array_of(noise)
        if self.format is not None:
            self._like, blocks = to_device_layout(even_weight(self.format, 8, 1 << 15), DTYPE)
            self._blocks = self.array_of(blocks.reshape(-1))
        self.norm = self.array_of(np.ones(self.hidden, np.float16))
        self.layers = [self._layer() for _ in range(LAYERS)]

    def array_of(self, values: np.ndarray) -> DeviceArray:
        """Host values on the device."""
        array = self.device.empty(values.shape, values.dtype.name)
        self.device.upload(array, values)
        return array

    def random(self, *shape: int) -> DeviceArray:
        """Random values, over and over."""
        return self._filled(self.device.empty(shape, DTYPE), self._noise)

    def _filled(self, array: DeviceArray, noise: DeviceArray) -> DeviceArray:
        for first in range(0, array.size, noise.size):
            part = array.reshape(-1)[first : first + noise.size]
            self.device.copy(part, noise[: part.size])
        return array

    def _weights(self, rows: int, columns: int) -> ExpertWeights:
        """Random ones, [rows, columns] of each expert."""
        if self.format is None:
            return ExpertWeights(LinearWeights(self.random(self.experts * rows, columns)), self.experts)
        layout = replace(self._like, rows=self.experts * rows, columns=columns)
        data = self._filled(self.device.empty(layout.shape, "uint8"), self._blocks)
        return ExpertWeights(LinearWeights(PackedMatrix(layout, data)), self.experts)

    def _layer(self) -> Layer:
        inner = self._weights(2 * self.size, self.hidden), self._weights(self.hidden, self.size)
        return Layer(self.random(self.experts, self.hidden), *inner)

    def expert_bytes(self) -> int:
        """Those of one expert's weights."""
        layers = self.layers[0].gate_up, self.layers[0].down
        data = (each.linear.weight.data if each.layout else each.linear.weight for each in layers)
        return sum(each.nbytes for each in data) // self.experts

    def choices(self, rows: int, skewed: bool) -> list[np.ndarray]:
        """Ids of each layer, int32 [rows, chosen]."""
        found = []
        for layer in range(LAYERS):
            random = np.random.default_rng(layer)
            ranks = random.permutation(self.experts) * skewed
            found.append(drawn_choices(random, ranks, rows, self.chosen))
        return found

    def milliseconds(self, launches: Sequence[Launch]) -> float:
        """Of a layer, where these are those of all."""
        for launch in launches:
            launch.overlap_previous()

        def every() -> None:
            for launch in launches:
                launch()

        every()
        graph = self.device.capture(every, "experts")
        return gpu_milliseconds(self.device.stream, graph, 4, _SERIES, graph) / LAYERS


class Step:
    """A step of so many rows, whose experts are chosen as the `ids` of each layer say."""

    def __init__(self, bench: Bench, ids: Sequence[np.ndarray]) -> None:
        self.bench, (self.rows, chosen) = bench, ids[0].shape
        self.pairs, empty = self.rows * chosen, bench.device.empty
        self.ids = [bench.array_of(each) for each in ids]
        self.x, self.residual = bench.random(self.rows, bench.hidden), bench.random(self.rows, bench.hidden)
        self.scores, self.output = (empty((self.rows, each), "float32") for each in (bench.experts, bench.hidden))
        self.routed = Routed(empty((self.rows, chosen), "int32"), empty((self.rows, chosen), "float32"))
        self.inner = bench.random(self.rows, chosen * bench.size)
        self.products = empty((self.rows, chosen * bench.hidden), "float32")
        self.counters = bench.device.zeros((self.rows, counter_words(bench.hidden)), "uint32")
        self.sorted = self.room(rows_of_tiles(self.pairs, bench.experts)) if self.rows >= bench.sort_from else None

    def room(self, tile: int) -> Any:
        """Sorted pairs in tiles of so many rows."""
        sizes = self.pairs, self.bench.experts, tile
        return sorted_pairs(self.bench.device.empty((sorted_words(*sizes),), "int32"), *sizes)

    def launches(self, number: int) -> dict[str, Launch]:
        """Those of a layer, in order."""
        bench, layer, ids = self.bench, self.bench.layers[number], self.ids[number]
        kernels, linears = bench.kernels, bench.linears[self.rows > MAX_TILED_ROWS]
        routing, router = Routing(bench.experts, bench.chosen), LinearWeights(layer.router)
        if self.rows <= MAX_NORMED_ROWS:
            given = [NormedInput(self.residual, bench.norm, 1e-6)], router, self.scores, 1.0, Kept(self.x)
            found = {"router": bench.few.norm_linear(*given)}
        else:
            found = {"router": linears.linear(self.x, router, self.scores)}
        found["choose"] = kernels.choose(Choice(routing, self.scores), self.routed)
        addition = Addition(self.routed._replace(expert_ids=ids), self.residual, self.output)
        if self.sorted is None:
            found["gate_up"] = kernels.gate_up(self.x, ids, layer.gate_up, Activation(), self.inner)
            found["down and add"] = kernels.down_add(self.inner, layer.down, self.products, addition, self.counters)
        else:
            found["sort"] = kernels.sort(ids, bench.experts, self.sorted)
            found["gate_up"] = kernels.sorted_gate_up(self.x, self.sorted, layer.gate_up, Activation(), self.inner)
            found["down"] = kernels.sorted_down(self.inner, self.sorted, layer.down, self.products)
            found["add"] = kernels.add(self.products, addition)
        return found

    def figures(self) -> dict[str, float]:
        """Milliseconds of a layer and of its kernels."""
        every = [self.launches(number) for number in range(LAYERS)]
        # A kernel alone takes what the ones before it left: of the last layer, whose pairs are as many.
        found = {"layer": self.bench.milliseconds([launch for own in every for launch in own.values()])}
        return found | {name: self.bench.milliseconds([own[name] for own in every]) for name in every[0]}

    def tilings(self) -> dict[str, float]:
        """Milliseconds of both products of a layer in each tiling."""
        kernels, found, every = self.bench.kernels, dict[str, float](), self.bench.layers
        for tile in TILES:
            own = self.room(tile)
            kernels.sort(self.ids[0], self.bench.experts, own)()
            for tiling in expert_tilings(tile, kernels.gpu, every[0].gate_up.layout):
                kernels.tiling, name = tiling, f"{tiling.rows} x {tiling.weight_rows}, {tiling.threads} threads"
                ups = [kernels.sorted_gate_up(self.x, own, each.gate_up, Activation(), self.inner) for each in every]
                downs = [kernels.sorted_down(self.inner, own, each.down, self.products) for each in every]
                found[f"{name}: gate_up"], found[f"{name}: down"] = map(self.bench.milliseconds, (ups, downs))
        kernels.tiling = None
        return found


def measured(bench: Bench, name: str, step: Callable[[], dict[str, float]], distinct: float, pairs: int) -> Any:
    """Figures of a step, printed."""
    with read_around() as readings:
        found = step()
    numbers: dict[str, float] = {key: round(value, 4) for key, value in found.items()}
    if "layer" in found:
        nbytes, operations = distinct * bench.expert_bytes(), 6 * pairs * bench.hidden * bench.size
        numbers["experts"], numbers["MB"] = round(distinct, 1), round(nbytes / 1e6, 1)
        numbers["GB/s"] = round(nbytes / found["layer"] / 1e6)
        numbers["share"] = round(numbers["GB/s"] / readings.read_gb_per_s, 3)
        numbers["TFLOP/s"] = round(operations / found["layer"] / 1e9, 1)
    print(f"{name}: {json.dumps(numbers)}", flush=True)
    return numbers


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, usual in (("experts", 128), ("chosen", 8), ("hidden", 2048), ("size", 768)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 512, 4000])
    parser.add_argument("--format", nargs="+", type=one_of(*FORMATS), default=["int4"])
    parser.add_argument("--choices", nargs="+", choices=("even", "skewed"), default=["even", "skewed"])
    parser.add_argument("--sort-from", type=int, default=MAX_TILED_ROWS + 1, metavar="ROWS")
    parser.add_argument("--tilings", action="store_true")
    parser.add_argument("--output", type=Path, help="a JSON file for the results")
    options = parse(parser)
    device, result = CudaDevice(), dict[str, Any]()
    module = KernelModule(device.gpu, device.stream)
    for name in options.format:
        bench = Bench(device, module, options, name)
        for rows in options.rows:
            for choice in options.choices:
                ids = bench.choices(rows, choice == "skewed")
                step, distinct = Step(bench, ids), float(np.mean([len(np.unique(each)) for each in ids]))
                label = f"{name}, {rows} rows{', skewed' if choice == 'skewed' else ''}"
                result[label] = measured(bench, label, step.figures, distinct, ids[0].size)
                if options.tilings and rows >= options.sort_from:
                    label += ", tilings"
                    result[label] = measured(bench, label, step.tilings, distinct, ids[0].size)
    if options.output:
        options.output.write_text(json.dumps(provenance() | {"ms": result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
