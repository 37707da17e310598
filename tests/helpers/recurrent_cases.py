"""Arguments of the recurrent kernels, and what must hold of any implementation of them: a token's row has the same bits
in a chain, in a tree, in a chunk and where what was kept is committed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from gpu_device import copied, on_device

from edgellm.kernels.bfloat16 import bfloat16_bits
from edgellm.kernels.recurrent.contract import (
    AcceptedPath,
    Convolution,
    DeltaGates,
    LayerColumns,
    LayerMatrices,
    ScanGates,
)
from edgellm.kernels.recurrent.twin import NumpyRecurrent

#: Computes a kernel, by its name, of copies of arguments, which it gives back.
Run = Callable[..., list[Any]]


def twin_run(kernel: str, *arguments: Any) -> list[Any]:
    """By the twin."""
    given = copied(list(arguments))
    getattr(NumpyRecurrent(), kernel)(*given)()
    return given


def device_run(gpu: Any, kernels: Any) -> Run:
    """By the GPU's kernels."""

    def run(kernel: str, *arguments: Any) -> list[Any]:
        given = on_device(gpu, list(arguments))
        getattr(kernels, kernel)(*given)()
        return downloaded(gpu, given, list(arguments))

    return run


def downloaded(gpu: Any, device: Any, host: Any) -> Any:
    """What the device has where `host` has arrays."""
    if isinstance(host, np.ndarray):
        return gpu.download(device).view(host.dtype).reshape(host.shape)
    if isinstance(host, tuple):
        return type(host)(*(downloaded(gpu, *pair) for pair in zip(device, host, strict=True)))
    return [downloaded(gpu, *pair) for pair in zip(device, host, strict=True)] if isinstance(host, list) else host


def noise(rng: np.random.Generator, *shape: int, dtype: str = "float32") -> np.ndarray:
    """Normal values; bfloat16 as its bits."""
    values = rng.standard_normal(shape).astype(np.float32)
    return bfloat16_bits(values) if dtype == "bfloat16" else values.astype(dtype)


def trees(rng: np.random.Generator, slots: int, nodes: int, kind: str) -> np.ndarray:
    """Parents [slots, nodes] of chains, stars, binary trees, or random trees with padding and parents out of range."""
    before = np.arange(nodes) - 1
    parents = {"chain": before, "star": np.zeros_like(before), "binary": before // 2}.get(kind)
    if parents is not None:
        parents = np.tile(parents, (slots, 1))
    else:
        near = 3 if kind == "long" else nodes
        parents = rng.integers(np.maximum(0, before + 1 - near), np.maximum(1, before + 1), (slots, nodes))
        if nodes > 6:
            parents[:, [1, nodes // 2, -1]] = nodes, -1, -7
    parents[:, 0] = -1
    return parents.astype(np.int32)


def path_to(parents: np.ndarray, node: int) -> list[int]:
    """The nodes from the root [to] `node`; those from another node without a parent."""
    path = [node]
    while 0 <= parents[path[-1]] < path[-1]:
        path.append(int(parents[path[-1]]))
    return path[::-1]


@dataclass
class DeltaCase:
    """A gated delta rule, or a selective scan, of key and value heads and their sizes over so many tokens of so many
    sequences."""

    heads: tuple[int, int]
    sizes: tuple[int, int]
    tokens: int
    slots: int = 2
    dtype: str = "float32"  # of what was projected
    seed: int = 0
    scans: bool = False

    def __post_init__(self) -> None:
        self.kernel, self.commit = (
            ("selective_scan", "commit_scans") if self.scans else ("gated_delta", "commit_matrices")
        )
        rng, (keys, values), (key_heads, heads) = np.random.default_rng(self.seed), self.sizes, self.heads
        first = 2 * key_heads * keys + heads * values
        self.rows = noise(rng, self.slots, self.tokens, first)
        self.projected = noise(rng, self.slots, self.tokens, 2 * heads + 13, dtype=self.dtype)
        own = noise(rng, heads), noise(rng, heads)
        self.gates = ScanGates(*own, noise(rng, heads), 7) if self.scans else DeltaGates(*own, 7)
        self.matrix = noise(rng, self.slots, heads, values, keys)
        self.output = noise(rng, self.slots, self.tokens, heads * values)
        self.kept = noise(rng, self.slots, self.tokens, 2 * heads)

    def arguments(
        self,
        parents: np.ndarray | None = None,
        counts: Any = None,
        matrix: np.ndarray | None = None,
        tokens: Any = slice(None),
    ) -> list[Any]:
        """Of the kernel: a step that keeps, or with `counts` a chunk, of some of the tokens."""
        rows, projected, output, kept = (
            np.ascontiguousarray(array[:, tokens]) for array in (self.rows, self.projected, self.output, self.kept)
        )
        state = self.matrix if matrix is None else matrix
        chunk = None if counts is None else np.asarray(counts, np.int32)
        return [rows, projected, self.gates, state, output, parents, kept if counts is None else None, chunk]

    def check(self, run: Run, rng: np.random.Generator) -> None:
        """All that must hold of the bits."""
        tokens, slots = self.tokens, self.slots
        every = [tokens] * slots
        *_, outputs, _, kept, _ = run(self.kernel, *self.arguments())
        whole = run(self.kernel, *self.arguments(counts=every))
        np.testing.assert_array_equal(whole[4], outputs)
        state = whole[3]
        for border in {1, tokens // 2, tokens - 1} - {0, tokens}:
            first = run(self.kernel, *self.arguments(counts=[border] * slots))  # the rest is padding
            np.testing.assert_array_equal(first[4][:, :border], outputs[:, :border])
            assert not first[4][:, border:].any()
            rest = self.arguments(counts=[tokens - border] * slots, matrix=first[3], tokens=slice(border, None))
            second = run(self.kernel, *rest)
            np.testing.assert_array_equal(second[4], outputs[:, border:])
            np.testing.assert_array_equal(second[3], state)
        self._check_commits(run, kept, state)
        for kind in ("chain", "star", "binary", "random", "long"):
            parents = trees(rng, slots, tokens, kind)
            tree = run(self.kernel, *self.arguments(parents))
            np.testing.assert_array_equal(tree[6], kept)
            np.testing.assert_array_equal(tree[3], self.matrix)
            for node in {0, tokens - 1, *rng.integers(0, tokens, 2).tolist()}:
                path = path_to(parents[0], node)
                if path[0] != 0:
                    assert not tree[4][0, node].any()
                    continue
                alone = run(self.kernel, *self.arguments(tokens=path))
                np.testing.assert_array_equal(alone[4][0, -1], tree[4][0, node], err_msg=kind)

    def _check_commits(self, run: Run, kept: np.ndarray, state: np.ndarray) -> None:
        """What was kept, committed at once, in parts, and not at all."""
        slots, tokens = self.slots, self.tokens
        nodes = np.tile(np.arange(tokens, dtype=np.int32), (slots, 1))
        nodes = np.concatenate((nodes, np.full_like(nodes[:, :2], -1)), axis=1)
        layers = [LayerMatrices(self.matrix, self.rows, kept), LayerMatrices(self.matrix[::-1].copy(), self.rows, kept)]
        counts = np.array([tokens, *[0] * (slots - 1)], np.int32)
        committed, _ = run(self.commit, layers, AcceptedPath(nodes, counts))
        np.testing.assert_array_equal(committed[0].matrix[0], state[0])
        for layer, before in zip(committed, layers, strict=True):
            np.testing.assert_array_equal(layer.matrix[1:], before.matrix[1:])
        found = self.matrix
        for token in range(min(tokens, 5)):  # as plain steps do
            step = run(self.kernel, *self.arguments(matrix=found, tokens=[token]))
            layer = LayerMatrices(found, step[0], step[6])
            ((committed_layer,), _) = run(self.commit, [layer], AcceptedPath(nodes[:, :1], np.ones(slots, np.int32)))
            found = committed_layer.matrix
        chunk = run(self.kernel, *self.arguments(counts=[min(tokens, 5)] * slots))
        np.testing.assert_array_equal(found, chunk[3])


@dataclass
class ConvolutionCase:
    """A short convolution of so many channels and tokens of width over so many tokens of so many sequences."""

    channels: int
    width: int
    tokens: int
    gated: bool = False
    silu: bool = False
    bias: bool = False
    slots: int = 2
    dtype: str = "float32"  # of what was projected, and of a gated one's output
    seed: int = 0

    def __post_init__(self) -> None:
        rng, channels = np.random.default_rng(self.seed), self.channels
        self.value = noise(rng, self.slots, self.tokens, channels * (3 if self.gated else 1) + 5, dtype=self.dtype)
        self.convolution = Convolution(noise(rng, channels, self.width), self.silu, self.gated)
        self.offset = noise(rng, channels) if self.bias else None
        self.columns = noise(rng, self.slots, channels, self.width - 1)
        self.output = noise(rng, self.slots, self.tokens, channels, dtype=self.dtype if self.gated else "float32")
        self.kept = noise(rng, self.slots, self.tokens, channels)

    def arguments(
        self,
        parents: np.ndarray | None = None,
        counts: Any = None,
        columns: np.ndarray | None = None,
        tokens: Any = slice(None),
    ) -> list[Any]:
        """Of `short_convolution`: a step that keeps, or with `counts` a chunk, of some of the tokens."""
        value, output, kept = (np.ascontiguousarray(array[:, tokens]) for array in (self.value, self.output, self.kept))
        state = self.columns if columns is None else columns
        chunk = None if counts is None else np.asarray(counts, np.int32)
        step = [parents, kept if counts is None else None, chunk]
        return [value, self.convolution, self.offset, state, output, *step]

    def check(self, run: Run, rng: np.random.Generator) -> None:
        """All that must hold of the bits."""
        tokens, slots = self.tokens, self.slots
        *_, outputs, _, kept, _ = run("short_convolution", *self.arguments())
        whole = run("short_convolution", *self.arguments(counts=[tokens] * slots))
        np.testing.assert_array_equal(whole[4], outputs)
        for border in {1, tokens // 2, tokens - 1} - {0, tokens}:
            first = run("short_convolution", *self.arguments(counts=[border] * slots))
            rest = self.arguments(counts=[tokens - border] * slots, columns=first[3], tokens=slice(border, None))
            second = run("short_convolution", *rest)
            np.testing.assert_array_equal(second[4], outputs[:, border:])
            np.testing.assert_array_equal(second[3], whole[3])
        nodes = np.tile(np.arange(tokens, dtype=np.int32), (slots, 1))
        counts = np.array([tokens, *[0] * (slots - 1)], np.int32)
        layers = [LayerColumns(self.columns, kept), LayerColumns(self.columns[::-1].copy(), kept)]
        committed, _ = run("commit_columns", layers, AcceptedPath(nodes, counts))
        np.testing.assert_array_equal(committed[0].columns[0], whole[3][0])
        for layer, before in zip(committed, layers, strict=True):
            np.testing.assert_array_equal(layer.columns[1:], before.columns[1:])
        for kind in ("chain", "star", "binary", "random", "long"):
            if tokens > 64:
                break
            parents = trees(rng, slots, tokens, kind)
            tree = run("short_convolution", *self.arguments(parents))
            np.testing.assert_array_equal(tree[6], kept)
            for node in {0, tokens - 1, *rng.integers(0, tokens, 2).tolist()}:
                alone = run("short_convolution", *self.arguments(tokens=path_to(parents[0], node)))
                np.testing.assert_array_equal(alone[4][0, -1], tree[4][0, node], err_msg=kind)


#: Of key and value heads, and of their sizes.
DELTA_SHAPES = [
    ((1, 1), (16, 8)),
    ((2, 4), (24, 40)),
    ((1, 4), (64, 16)),
    ((2, 2), (128, 40)),
    ((1, 2), (256, 24)),
    ((1, 1), (8, 256)),
]
#: Of channels and width, and whether gated, with SiLU and with a bias.
CONVOLUTIONS = [
    (24, 2, False, True, False),
    (133, 4, False, True, False),
    (40, 3, True, False, False),
    (32, 7, True, False, True),
    (9, 8, False, False, True),
]
