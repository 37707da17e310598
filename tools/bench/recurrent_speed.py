"""Times each kernel of recurrent layers alone, with the shapes of Qwen3.5-2B, LFM2-1.2B and a Mamba-2 of 1B.

    python tools/bench/recurrent_speed.py [decode] [trees] [prefill] [commits] [--slots 1 8]

Each number is the time of one launch where those of all the model's layers, each with a state of its own, follow each
other in a CUDA graph, median of five; a commit is one launch for all layers. GB/s are those of the states that it reads
and writes, shares of the bandwidth that is measured in the same run; of a chunk the clocks of a token are told as well.
Needs pycuda and a GPU, not TensorRT. `--as orin` and the like: on a part of the GPU, see `as_device.py`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from as_device import one_of, parse
from device_limits import device_limits
from kernel_speed import Bench
from provenance import provenance

from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.recurrent.contract import (
    AcceptedPath,
    Convolution,
    DeltaGates,
    GatedHeadNorm,
    GatedHeads,
    GroupNorm,
    LayerColumns,
    LayerMatrices,
    ScanGates,
)
from edgellm.kernels.recurrent.launcher import CudaRecurrent

#: Of Qwen3.5-2B its layers of the delta rule, key and value heads, their size, and the width of the convolution.
QWEN_LAYERS, HEADS, SIZE, WIDTH = 18, 16, 128, 4
#: Layers of Mamba-2 about as in a Granite 4 of 1B: heads, their size, that of the state, and what is convolved.
GRANITE_LAYERS, SPACES, SPACE_SIZE, STATE_SIZE = 36, 48, 64, 128
SPACE_CHANNELS = SPACES * SPACE_SIZE + 2 * STATE_SIZE
#: Of LFM2-1.2B its layers of convolutions, their channels and width.
LFM_LAYERS, LFM_HIDDEN, LFM_WIDTH = 10, 2048, 3
CHANNELS, VALUES = 3 * HEADS * SIZE, HEADS * SIZE
PROJECTED = CHANNELS + VALUES + 2 * HEADS
#: Tokens of verified trees, and of chunks of prompts.
TREES, CHUNKS = (4, 16, 60), (512, 2048)
ACCEPTED = 3


class Layers:
    """Memory of the layers of both models for steps of so many tokens, and their launches."""

    def __init__(self, bench: Bench, slots: int, tokens: int, projected: str) -> None:
        self.bench, self.kernels = bench, CudaRecurrent(bench.module)
        self.slots, self.tokens, self.projected = slots, tokens, projected
        self._alive: list[DeviceArray] = []

    def array(self, *shape: int, dtype: str = "float32") -> DeviceArray:
        """Normal values, roughly, which live as long as the layers: launches know addresses alone."""
        self._alive.append(self.bench.array((self.slots, *shape), dtype, 50))
        return self._alive[-1]

    def weight(self, *shape: int, dtype: str = "float32") -> DeviceArray:
        """The same without sequences."""
        self._alive.append(self.bench.array(shape, dtype, 50))
        return self._alive[-1]

    def qwen(self, parents: DeviceArray | None, chunk: DeviceArray | None) -> dict[str, list[Callable[[], None]]]:
        """The launches of each layer, by kernel."""
        found: dict[str, list[Callable[[], None]]] = {"convolution": [], "delta": [], "norm": []}
        value, rows = self.array(self.tokens, PROJECTED, dtype=self.projected), self.array(self.tokens, CHANNELS)
        output, normed = self.array(self.tokens, VALUES), self.array(self.tokens, VALUES, dtype="float16")
        norm = GatedHeadNorm(self.weight(SIZE, dtype="float16"), 1e-6, CHANNELS)
        for _ in range(QWEN_LAYERS):
            kept = None if chunk is not None else self.array(self.tokens, CHANNELS)
            kept_gates = None if chunk is not None else self.array(self.tokens, 2 * HEADS)
            weight = self.weight(CHANNELS, WIDTH)
            columns, matrix = self.array(CHANNELS, WIDTH - 1), self.array(HEADS, SIZE, SIZE)
            gates = DeltaGates(*(self.weight(HEADS) for _ in "ab"), CHANNELS + VALUES)
            convolution = Convolution(weight, True, False)
            found["convolution"].append(
                self.kernels.short_convolution(value, convolution, None, columns, rows, parents, kept, chunk)
            )
            found["delta"].append(
                self.kernels.gated_delta(rows, value, gates, matrix, output, parents, kept_gates, chunk)
            )
            found["norm"].append(self.kernels.gated_norm(output, value, norm, normed))
        return found

    def granite(self, parents: DeviceArray | None, chunk: DeviceArray | None) -> dict[str, list[Callable[[], None]]]:
        """The launches of each layer, by kernel."""
        found: dict[str, list[Callable[[], None]]] = {"convolution of a scan": [], "scan": [], "norm of a scan": []}
        inner, kernels = SPACES * SPACE_SIZE, self.kernels
        value = self.array(self.tokens, inner + SPACE_CHANNELS + SPACES, dtype=self.projected)
        rows, output = self.array(self.tokens, SPACE_CHANNELS), self.array(self.tokens, inner)
        normed, norm = (
            self.array(self.tokens, inner, dtype="float16"),
            GroupNorm(self.weight(inner, dtype="float16"), 1e-5, 0, 1),
        )
        for _ in range(GRANITE_LAYERS):
            kept, sizes = (
                None if chunk is not None else self.array(self.tokens, width) for width in (SPACE_CHANNELS, 2 * SPACES)
            )
            columns, matrix = self.array(SPACE_CHANNELS, WIDTH - 1), self.array(SPACES, SPACE_SIZE, STATE_SIZE)
            gates = ScanGates(*(self.weight(SPACES) for _ in range(3)), inner + SPACE_CHANNELS)
            convolution, bias = (
                Convolution(self.weight(SPACE_CHANNELS, WIDTH), True, False, inner),
                self.weight(SPACE_CHANNELS),
            )
            found["convolution of a scan"].append(
                kernels.short_convolution(value, convolution, bias, columns, rows, parents, kept, chunk)
            )
            found["scan"].append(kernels.selective_scan(rows, value, gates, matrix, output, parents, sizes, chunk))
            found["norm of a scan"].append(kernels.gated_group_norm(output, value, norm, normed))
        return found

    def lfm(self, parents: DeviceArray | None, chunk: DeviceArray | None) -> list[Callable[[], None]]:
        """The convolution of each layer."""
        value = self.array(self.tokens, 3 * LFM_HIDDEN, dtype=self.projected)
        output, found = self.array(self.tokens, LFM_HIDDEN, dtype="float16"), []
        for _ in range(LFM_LAYERS):
            kept = None if chunk is not None else self.array(self.tokens, LFM_HIDDEN)
            convolution = Convolution(self.weight(LFM_HIDDEN, LFM_WIDTH), False, True)
            columns = self.array(LFM_HIDDEN, LFM_WIDTH - 1)
            found.append(
                self.kernels.short_convolution(value, convolution, None, columns, output, parents, kept, chunk)
            )
        return found

    def gated_attention(self) -> list[Callable[[], None]]:
        """What stands around the attention of a layer of Qwen3.5-2B."""
        heads = GatedHeads(8, 2, 256)
        value = self.array(self.tokens, 20 * 256, dtype=self.projected)
        qkv, context = (
            self.array(self.tokens, 12 * 256, dtype=self.projected),
            self.array(self.tokens, 8 * 256, dtype="float16"),
        )
        return [self.kernels.separate_gates(value, heads, qkv), self.kernels.sigmoid_gate(value, heads, context)] * 6

    def commits(self) -> dict[str, Callable[[], None]]:
        """One launch for all layers."""
        self._alive.append(self.bench.device.zeros((self.slots, self.tokens), "int32"))
        path = AcceptedPath(self._alive[-1], self.counts(self.tokens))
        columns = [
            LayerColumns(self.array(CHANNELS, WIDTH - 1), self.array(self.tokens, CHANNELS)) for _ in range(QWEN_LAYERS)
        ]
        matrices = [
            LayerMatrices(
                self.array(HEADS, SIZE, SIZE), self.array(self.tokens, CHANNELS), self.array(self.tokens, 2 * HEADS)
            )
            for _ in range(QWEN_LAYERS)
        ]
        return {
            "columns": self.kernels.commit_columns(columns, path),
            "matrices": self.kernels.commit_matrices(matrices, path),
        }

    def counts(self, tokens: int) -> DeviceArray:
        """So many of each sequence."""
        array = self.bench.device.empty((self.slots,), "int32")
        self.bench.device.upload(array, np.full(self.slots, tokens, np.int32))
        self._alive.append(array)
        return array

    def state_bytes(self) -> int:
        """Of a layer's matrices."""
        return 4 * self.slots * HEADS * SIZE * SIZE


def report_all(layers: Layers, name: str, parents: DeviceArray | None, chunk: DeviceArray | None) -> None:
    """Each kernel of a step."""
    bench = layers.bench
    scanned = 4 * layers.slots * SPACES * SPACE_SIZE * STATE_SIZE
    traffic = {"delta": layers.state_bytes(), "scan": scanned}
    for kernel, launches in (layers.qwen(parents, chunk) | layers.granite(parents, chunk)).items():
        span = bench.microseconds(launches, kernel)
        bench.report(f"{name}, {kernel}", layers.slots, span, traffic.get(kernel, 0))
        if kernel in traffic and layers.tokens > 1:
            print(f"{'':32s} {1000 * span / layers.tokens:9.1f} ns a token")
    bench.report(f"{name}, gated convolution", layers.slots, bench.microseconds(layers.lfm(parents, chunk), "lfm"))
    bench.report(f"{name}, gates of attention", layers.slots, bench.microseconds(layers.gated_attention(), "gates"))


def time_decode(bench: Bench, all_slots: Sequence[int]) -> None:
    """One token of each sequence."""
    for slots in all_slots:
        report_all(Layers(bench, slots, 1, "float32"), "decode", None, None)


def time_trees(bench: Bench, all_slots: Sequence[int]) -> None:
    """Random trees."""
    rng = np.random.default_rng(0)
    for slots, tokens in ((slots, tokens) for slots in all_slots for tokens in TREES):
        nodes = np.arange(tokens)
        parents = rng.integers(np.maximum(0, nodes - 8), np.maximum(1, nodes), (slots, tokens)).astype(np.int32)
        parents[:, 0] = -1
        array = bench.device.empty(parents.shape, "int32")
        bench.device.upload(array, parents)
        report_all(Layers(bench, slots, tokens, "float32"), f"tree of {tokens}", array, None)


def time_prefill(bench: Bench, all_slots: Sequence[int]) -> None:
    """Chunks of one prompt."""
    for tokens in CHUNKS:
        layers = Layers(bench, 1, tokens, "float16")
        report_all(layers, f"chunk of {tokens}", None, layers.counts(tokens))


def time_commits(bench: Bench, all_slots: Sequence[int]) -> None:
    """Of plain steps and of rounds."""
    for slots, tokens in ((slots, tokens) for slots in all_slots for tokens in (1, ACCEPTED)):
        layers = Layers(bench, slots, tokens, "float32")
        for name, launch in layers.commits().items():
            traffic = 2 * QWEN_LAYERS * layers.state_bytes() if name == "matrices" else 0
            bench.report(f"commit of {tokens}, {name}", slots, bench.microseconds([launch], name), traffic)


SECTIONS = {"decode": time_decode, "trees": time_trees, "prefill": time_prefill, "commits": time_commits}


def main() -> None:
    """Time what was asked for, print it and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", type=one_of(*SECTIONS), default=list(SECTIONS))
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--output", type=Path)
    arguments = parse(parser)
    bench = Bench()
    print(bench.device.gpu.name, bench.module.multiprocessors, "multiprocessors")
    for section in arguments.sections:
        SECTIONS[section](bench, arguments.slots)
    results = {**provenance(), "limits": device_limits()._asdict(), "microseconds": bench.results}
    if arguments.output:
        arguments.output.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
