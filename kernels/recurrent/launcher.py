"""The recurrent kernels on the GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

from edgellm.kernels.arrays import members
from edgellm.kernels.compiler import ModuleSource
from edgellm.kernels.contracts import MAXIMUM_ROWS, cuda_header
from edgellm.kernels.errors import KernelError
from edgellm.kernels.launch import Kernel, KernelModule, Launch
from edgellm.kernels.launcher import CUDA_TYPES, Launcher
from edgellm.kernels.numpy_launch import Enqueued
from edgellm.kernels.recurrent import contract

_CONVOLUTION_THREADS, _CONVOLUTION_TILE, _GATES_THREADS, _WIDE_THREADS = 128, 32, 128, 256
#: Warps that walk, and those that help.
_WALKERS, _HELPERS = 4, 2
_DELTA_THREADS = 32 * (_WALKERS + _HELPERS)
#: Layers of one launch: their addresses are an argument, of 4 KiB at most.
_MOST_LAYERS = 128


class _CommitColumns(ctypes.Structure):
    """`CommitColumns` of convolution.cu."""

    _fields_ = [
        *members("void* indices counts", "uint batch tokens most channels"),
        *((name, ctypes.c_void_p * _MOST_LAYERS) for name in ("columns", "inputs")),
    ]


class _CommitMatrices(ctypes.Structure):
    """`CommitMatrices` of delta.cu."""

    _fields_ = [
        *members("void* indices counts", "uint batch tokens most row_size heads values keys"),
        *((name, ctypes.c_void_p * _MOST_LAYERS) for name in ("matrices", "rows", "gates")),
    ]


def _padded(keys: int) -> int:
    """Elements of a key that a walk works on."""
    return next(size for size in (64, 128, 256) if size >= keys)


def _block_columns(keys: int) -> int:
    """Columns of a head's matrix that a block walks with."""
    return 2 * _WALKERS * (1 if _padded(keys) > 128 else 2)


def saved_matrices(nodes: int) -> int:
    """How many matrices of nodes wait at most while a walk goes through a tree (tree_plan.cuh): the first of a node of
    three, a further one where that node is at most half of what is below another."""
    return max(0, (nodes + 1).bit_length() - 2)


def delta_bytes(keys: int, tokens: int, tree: bool = False) -> int:
    """Shared memory of a block that walks through so many tokens, with keys of so many elements."""
    size, columns = _padded(keys), _block_columns(keys)
    record, ready = 2 * size + columns + 4, 2048 // size
    if not tree:
        return 4 * record * (tokens if tokens <= ready else 2 * ready)
    return 4 * (2 * ready * record + saved_matrices(tokens) * columns * size)


def _source(name: str, file: str, expression: str, *macros: tuple[str, int | str]) -> ModuleSource:
    header = ("recurrent/arguments.cuh", cuda_header(contract.RecurrentArrays))
    return ModuleSource(f"recurrent_{name}", (f"recurrent/{file}",), (expression,), macros, (header,))


@lru_cache
def convolution_kernel(name: str, width: int, *dtypes: str) -> Kernel:
    """A kernel of convolution.cu for a width: `commit_columns`, or one for a value and an output of `dtypes`."""
    expression = f"recurrent::{name}<{', '.join([*(CUDA_TYPES[dtype] for dtype in dtypes), str(width)])}>"
    macros = (
        ("HOST_CONVOLUTION_THREADS", _CONVOLUTION_THREADS),
        ("HOST_CONVOLUTION_TILE", _CONVOLUTION_TILE),
        ("HOST_MOST_NODES", contract.MAX_NODES),
        ("HOST_MOST_LAYERS", _MOST_LAYERS),
        ("HOST_COMMIT_COLUMNS_BYTES", ctypes.sizeof(_CommitColumns)),
    )
    return Kernel(_source("_".join((name, str(width), *dtypes)), "convolution.cu", expression, *macros), expression)


@lru_cache
def gates_kernel(name: str, *dtypes: str) -> Kernel:
    """A kernel of gates.cu for arrays of `dtypes`."""
    expression = f"recurrent::{name}<{', '.join(CUDA_TYPES[dtype] for dtype in dtypes)}>"
    macros = (
        ("HOST_GATES_THREADS", _GATES_THREADS),
        ("HOST_WIDE_THREADS", _WIDE_THREADS),
        ("HOST_MOST_SIZE", contract.MAX_DELTA_SIZE),
        ("HOST_MOST_GROUP_SIZE", contract.MAX_GROUP_SIZE),
    )
    return Kernel(_source("_".join((name, *dtypes)), "gates.cu", expression, *macros), expression)


@lru_cache
def delta_kernel(name: str, keys: int, *arguments: str, scans: bool = False) -> Kernel:
    """A kernel of delta.cu for keys of so many elements: `commit_matrices`, or one with the template's `arguments`; of
    the delta rule, or of selective scans."""
    size = _padded(keys)
    expression = f"recurrent::{name}<{', '.join((str(size), *arguments))}>"
    macros = (
        ("HOST_SCAN", int(scans)),
        ("HOST_SIZE", size),
        ("HOST_DELTA_THREADS", _DELTA_THREADS),
        ("HOST_COLUMNS", _block_columns(keys)),
        ("HOST_BYTES", delta_bytes(keys, 2 * 2048 // size)),
        ("HOST_TREE_BYTES", delta_bytes(keys, contract.MAX_NODES, tree=True)),
        ("HOST_MOST_NODES", contract.MAX_NODES),
        ("HOST_MOST_LAYERS", _MOST_LAYERS),
        ("HOST_COMMIT_MATRICES_BYTES", ctypes.sizeof(_CommitMatrices)),
        ("HOST_NORM_EPSILON", repr(contract.NORM_EPSILON)),
    )
    names = "_".join((*["scan"] * scans, name, str(size), *(argument.strip("_") for argument in arguments)))
    return Kernel(_source(names, "delta.cu", expression, *macros), expression)


class CudaRecurrent(Launcher):
    """See `edgellm.kernels.recurrent.contract.RecurrentKernels`; arrays are `DeviceArray`, a call gives a `Launch`."""

    def __init__(self, module: KernelModule) -> None:
        super().__init__(module, contract.RecurrentArrays)

    def short_convolution(self, value, convolution, bias, columns, output, parents, kept, state_tokens):
        arguments = (value, convolution, bias, columns, output, parents, kept, state_tokens)
        sizes, packed = self._packed("short_convolution", *arguments)
        tokens, batch = sizes["T"], sizes["B"]
        if parents is not None and tokens > contract.MAX_NODES:
            raise KernelError(f"short_convolution: a tree of {tokens} nodes; expected at most {contract.MAX_NODES}")
        tiles = tokens if state_tokens is None else -(-tokens // _CONVOLUTION_TILE)
        name = "convolve_nodes" if state_tokens is None else "convolve_chunk"
        kernel = convolution_kernel(name, sizes["W"], value.dtype, output.dtype)
        grid = (-(-sizes["C"] // _CONVOLUTION_THREADS), tiles, batch)
        return Launch(self._module, kernel, grid, _CONVOLUTION_THREADS, 0, (packed,))

    def gated_delta(self, rows, projected, gates, matrix, output, parents, kept, state_tokens):
        return self._walk("gated_delta", rows, projected, gates, matrix, output, parents, kept, state_tokens)

    def selective_scan(self, rows, projected, gates, matrix, output, parents, kept, state_tokens):
        return self._walk("selective_scan", rows, projected, gates, matrix, output, parents, kept, state_tokens)

    def _walk(self, name: str, *arguments: Any) -> Launch:
        (_, projected, *_, parents, _, state_tokens), scans = arguments, name == "selective_scan"
        sizes, packed = self._packed(name, *arguments)
        tree, tokens = parents is not None, sizes["T"]
        _check_sizes(name, sizes, tokens if tree else 1)
        own = CUDA_TYPES[projected.dtype]
        if state_tokens is not None:
            kernel = delta_kernel("delta_chunk", sizes["D"], own, scans=scans)
        elif tokens > 1:
            kernel = delta_kernel("delta_nodes", sizes["D"], own, str(tree).lower(), scans=scans)
        else:
            kernel = delta_kernel("delta_token", sizes["D"], own, scans=scans)
        grid, shared = _delta_grid(sizes, sizes["B"]), delta_bytes(sizes["D"], tokens, tree and tokens > 1)
        return Launch(self._module, kernel, grid, _DELTA_THREADS, shared, (packed,))

    def gated_norm(self, value, gate, norm, output):
        sizes, packed = self._packed("gated_norm", value, gate, norm, output)
        if (refusal := contract.norm_refusal(sizes["E"])) is not None:
            raise KernelError(f"gated_norm: {refusal}")
        grid = (sizes["O"] // sizes["E"], sizes["T"], sizes["B"])
        kernel = gates_kernel("gated_norm", gate.dtype, output.dtype)
        return Launch(self._module, kernel, grid, _GATES_THREADS, 0, (packed,))

    def gated_group_norm(self, value, gate, norm, output):
        sizes, packed = self._packed("gated_group_norm", value, gate, norm, output)
        if (refusal := contract.group_refusal(sizes["O"] // norm.groups)) is not None:
            raise KernelError(f"gated_group_norm: {refusal}")
        kernel = gates_kernel("gated_group_norm", gate.dtype, output.dtype)
        return Launch(self._module, kernel, (norm.groups, sizes["T"], sizes["B"]), _WIDE_THREADS, 0, (packed,))

    def gated_part(self, value, gate, first, place, norm, squares, output):
        sizes, packed = self._packed("gated_part", value, gate, first, place, norm, squares, output)
        if (refusal := contract.group_refusal(sizes["O"])) is not None:
            raise KernelError(f"gated_part: {refusal}")
        kind = ("gated_squares", gate.dtype) if output is None else ("gated_part_norm", gate.dtype, output.dtype)
        return Launch(self._module, gates_kernel(*kind), (1, sizes["T"], sizes["B"]), _WIDE_THREADS, 0, (packed,))

    def separate_gates(self, value, heads, qkv):
        sizes, packed = self._packed("separate_gates", value, heads, qkv)
        return self._by_columns(gates_kernel("separate_gates", value.dtype), sizes, "Q", packed)

    def sigmoid_gate(self, value, heads, context):
        sizes, packed = self._packed("sigmoid_gate", value, heads, context)
        return self._by_columns(gates_kernel("sigmoid_gate", value.dtype, context.dtype), sizes, "O", packed)

    def commit_columns(self, layers, accepted):
        return self._commit("commit_columns", layers, accepted)

    def commit_matrices(self, layers, accepted):
        return self._commit("commit_matrices", layers, accepted)

    def commit_scans(self, layers, accepted):
        return self._commit("commit_scans", layers, accepted)

    def _commit(self, name: str, layers: Sequence[Any], accepted: contract.AcceptedPath) -> _Launches:
        """Launches of layers of the same sizes, as many at once as one takes."""
        alike: dict[tuple[Any, ...], list[Any]] = {}
        for layer in layers:
            alike.setdefault(tuple(sorted(self._check(name, layer, accepted).items())), []).append(layer)
        launches, path = list[Launch](), (accepted.indices.pointer, accepted.counts.pointer)
        for found, own in alike.items():
            sizes = dict(found)
            most = min(_MOST_LAYERS, MAXIMUM_ROWS // sizes["B"])
            for some in (own[begin : begin + most] for begin in range(0, len(own), most)):
                commit = self._columns if name == "commit_columns" else partial(self._matrices, name)
                launches.append(commit(sizes, some, path))
        return _Launches(launches)

    def _columns(self, sizes: dict[str, Any], own: Sequence[contract.LayerColumns], path: tuple[int, int]) -> Launch:
        arguments = _CommitColumns(*path, sizes["B"], sizes["T"], sizes["N"], sizes["C"])
        for place, layer in enumerate(own):
            arguments.columns[place], arguments.inputs[place] = (array.pointer for array in layer)
        grid = (-(-sizes["C"] // _CONVOLUTION_THREADS), len(own), sizes["B"])
        kernel = convolution_kernel("commit_columns", sizes["K"] + 1)
        return Launch(self._module, kernel, grid, _CONVOLUTION_THREADS, 0, (arguments,))

    def _matrices(
        self, name: str, sizes: dict[str, Any], own: Sequence[contract.LayerMatrices], path: tuple[int, int]
    ) -> Launch:
        _check_sizes(name, sizes)
        arguments = _CommitMatrices(*path, *(sizes[letter] for letter in ("B", "T", "N", "R", "G", "E", "D")))
        for place, layer in enumerate(own):
            pointers = (array.pointer for array in layer)
            arguments.matrices[place], arguments.rows[place], arguments.gates[place] = pointers
        keys, nodes, scans = sizes["D"], sizes["N"], name == "commit_scans"
        kernel = delta_kernel("commit_matrices", keys, str(nodes == 1).lower(), scans=scans)
        grid = _delta_grid(sizes, sizes["B"] * len(own))
        return Launch(self._module, kernel, grid, _DELTA_THREADS, delta_bytes(keys, nodes), (arguments,))

    def _by_columns(self, kernel: Kernel, sizes: dict[str, Any], letter: str, packed: ctypes.Array) -> Launch:
        grid = (-(-sizes[letter] // _GATES_THREADS), sizes["T"], sizes["B"])
        return Launch(self._module, kernel, grid, _GATES_THREADS, 0, (packed,))


class _Launches(Enqueued):
    """Launches that follow each other: one, unless layers differ or are very many."""

    def __init__(self, launches: Sequence[Launch]) -> None:
        self._launches = launches

    def __call__(self) -> None:
        for launch in self._launches:
            launch()

    def overlap_previous(self) -> None:
        for launch in self._launches:
            launch.overlap_previous()


def _check_sizes(kernel: str, sizes: dict[str, Any], nodes: int = 1) -> None:
    refusal = contract.delta_refusal((contract.key_heads(sizes), sizes["G"]), (sizes["D"], sizes["E"]), nodes)
    if refusal is not None:
        raise KernelError(f"{kernel}: {refusal}")


def _delta_grid(sizes: dict[str, Any], sequences: int) -> tuple[int, int, int]:
    return -(-sizes["E"] // _block_columns(sizes["D"])), sizes["G"], sequences
