"""The kernels of mixtures of experts on the GPU.

Each method has the arguments of its NumPy twin in `twin`, which defines what it computes, and returns a `Launch`.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace

from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.decode.arguments import (
    CUDA_TYPES,
    THREADS,
    LinearArgument,
    addresses,
    check_room,
    decode_kernel,
    linear_argument,
    rows_of,
)
from edgellm.kernels.decode.contract import ACTIVATIONS, SLICES, STEP, slice_steps
from edgellm.kernels.decode.geometries import NARROW, Geometry, staged_geometry
from edgellm.kernels.decode.linear import LINEAR_MACROS
from edgellm.kernels.decode.packed_rows import PackedRows, packed_rows, packed_rows_kernel
from edgellm.kernels.decode.tiled_linear import capacity_of
from edgellm.kernels.decode.tilings import Capacity
from edgellm.kernels.errors import KernelError
from edgellm.kernels.experts.contract import (
    ExpertWeights,
    Routed,
    Routing,
    check_pairs,
    experts_refusal,
    matrix_refusal,
)
from edgellm.kernels.launch import Kernel, KernelModule, Launch
from edgellm.kernels.quantization.device_layout import DeviceLayout

_ADDING_THREADS = 64
#: Blocks of one launch: so many times what the GPU has at once, where pairs have work for as many.
_ROUNDS = 2


class _Choice(ctypes.Structure):
    """`Choice` of router.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("scores", "correction", "x", "gate", "ids", "weights", "shared")),
        *((name, ctypes.c_int) for name in ("experts", "chosen", "columns", "sigmoid", "normalized")),
        *((name, ctypes.c_float) for name in ("epsilon", "scale")),
    ]


class _Addition(ctypes.Structure):
    """`Addition` of router.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("outputs", "weights", "shared", "shared_weights", "residual", "output")),
        *((name, ctypes.c_int) for name in ("chosen", "width", "residual_float")),
        ("scale", ctypes.c_float),
    ]


class _Product(ctypes.Structure):
    """`Product` of few_rows.cuh."""

    _fields_ = [
        ("linear", LinearArgument),
        *((name, ctypes.c_void_p) for name in ("expert_ids", "input", "output")),
        ("stride", ctypes.c_ulonglong),
        *((name, ctypes.c_int) for name in ("experts", "biases", "sharing")),
        ("limit", ctypes.c_float),
    ]


_ROUTER_MACROS = (
    ("HOST_CHOICE_BYTES", ctypes.sizeof(_Choice)),
    ("HOST_ADDITION_BYTES", ctypes.sizeof(_Addition)),
    ("HOST_ADDING_THREADS", _ADDING_THREADS),
)
_PRODUCT_MACROS = (*LINEAR_MACROS, ("HOST_PRODUCT_BYTES", ctypes.sizeof(_Product)), ("HOST_SILU", ACTIVATIONS["silu"]))


class CudaExperts:
    """The kernels for one GPU, stream and dtype; each is loaded when a launch first needs it."""

    def __init__(self, module: KernelModule, dtype: str) -> None:
        if dtype not in CUDA_TYPES:
            raise KernelError(f"kernels of experts compute in {' and '.join(CUDA_TYPES)}, not in {dtype}")
        self.module, self.dtype, self._type = module, dtype, CUDA_TYPES[dtype]

    def choose(
        self,
        scores: DeviceArray,
        routing: Routing,
        routed: Routed,
        correction: DeviceArray | None = None,
        shared: tuple[DeviceArray, DeviceArray] | None = None,
    ) -> Launch:
        """See `NumpyExperts.choose`."""
        rows, experts, chosen = scores.size // routing.experts, routing.experts, routing.chosen
        reason = experts_refusal(experts, chosen)
        if reason is not None or scores.dtype != "float32":
            raise KernelError(reason or f"scores of experts are {scores.dtype}; expected float32")
        check_room("expert_ids", routed.expert_ids, rows, chosen)
        check_room("expert_weights", routed.expert_weights, rows, chosen)
        x, gate = shared or (None, None)
        if x is not None and (x.shape[-1] % 8 or {x.dtype, *(() if gate is None else (gate.dtype,))} != {self.dtype}):
            raise KernelError(f"rows {x.dtype} {list(x.shape)} have no shared expert; expected {self.dtype} in eights")
        arguments = _Choice(
            *addresses(scores, correction, x, gate, routed.expert_ids, routed.expert_weights, routed.shared_weights),
            *(experts, chosen, 0 if x is None else x.shape[-1], routing.sigmoid, routing.normalized),
            *(routing.epsilon, routing.scale),
        )
        each = 1 << (-(-experts // 32) - 1).bit_length()
        kernel = decode_kernel("experts/router.cu", f"experts::choose<{self._type}, {each}>", _ROUTER_MACROS)
        return Launch(self.module, kernel, (rows, 1, 1), 32, 0, (arguments,))

    def gate_up(
        self, x: DeviceArray, expert_ids: DeviceArray, experts: ExpertWeights, limit: float, output: DeviceArray
    ) -> Launch:
        """See `NumpyExperts.gate_up`."""
        kind = "alternating" if limit else "gated"
        return self._product(kind, x, expert_ids, experts, output, expert_ids.shape[-1], limit)

    def down(self, x: DeviceArray, expert_ids: DeviceArray, experts: ExpertWeights, output: DeviceArray) -> Launch:
        """See `NumpyExperts.down`."""
        return self._product("sums", x, expert_ids, experts, output, 1, 0.0)

    def add(
        self,
        outputs: DeviceArray,
        routed: Routed,
        residual: DeviceArray,
        output: DeviceArray,
        scale: float = 1.0,
        shared: DeviceArray | None = None,
    ) -> Launch:
        """See `NumpyExperts.add`, of up to 65,535 rows."""
        width, chosen = residual.shape[-1], routed.expert_weights.shape[-1]
        rows = routed.expert_weights.size // chosen
        if width % 8 or residual.dtype not in ("float32", self.dtype) or output.dtype != "float32":
            raise KernelError(
                f"a residual {residual.dtype} {list(residual.shape)} gets no experts' sum of {output.dtype}; expected "
                f"float32 or {self.dtype} in eights, and float32"
            )
        for name, array, columns in (("outputs", outputs, chosen * width), ("residual", residual, width)):
            check_room(name, array, rows, columns)
        check_room("output", output, rows, width)
        arguments = _Addition(
            *addresses(outputs, routed.expert_weights, shared, routed.shared_weights, residual, output),
            *(chosen, width, residual.dtype == "float32", scale),
        )
        kernel = decode_kernel("experts/router.cu", f"experts::add<{self._type}>", _ROUTER_MACROS)
        grid = -(-width // (8 * _ADDING_THREADS)), rows, 1
        return Launch(self.module, kernel, grid, _ADDING_THREADS, 0, (arguments,))

    def _product(
        self,
        kind: str,
        x: DeviceArray,
        expert_ids: DeviceArray,
        experts: ExpertWeights,
        output: DeviceArray,
        sharing: int,
        limit: float,
    ) -> Launch:
        """The product of all pairs: `sharing` of them have one row of x."""
        (rows, columns), layout, gated = experts.shape, experts.layout, kind == "gated"
        outputs = rows // 2 if kind != "sums" else rows
        pairs = check_pairs(rows_of(expert_ids), expert_ids.shape[-1])
        reason = matrix_refusal(rows, columns, gated, layout)
        if reason is not None or x.dtype != self.dtype:
            raise KernelError(reason or f"experts multiply {self.dtype}, not {x.dtype}")
        check_room("x", x, pairs // sharing, columns)
        check_room("output", output, pairs, outputs)
        linear = linear_argument(experts.linear, 1, rows // 2 if gated else rows, 1.0)
        linear.width = linear.rows
        stride = rows * columns * 2 if layout is None else expert_bytes(layout, experts.experts)
        arguments = _Product(
            linear, *addresses(expert_ids, x, output), *(stride, experts.experts, rows, sharing, limit)
        )
        kernel, grid, threads_bytes = self._way(kind, experts)
        # Each pair has its share of the blocks that the GPU has at once, in a few rounds.
        blocks = min(grid, max(1, -(-_ROUNDS * 2 * self.module.multiprocessors // pairs)))
        return Launch(self.module, kernel, (blocks, pairs, 1), THREADS, threads_bytes, (arguments,))

    def _way(self, kind: str, experts: ExpertWeights) -> tuple[Kernel, int, int]:
        """The kernel, how many blocks one expert has work for, and their shared memory."""
        (rows, columns), layout = experts.shape, experts.layout
        if layout is None:
            geometry, tiles, needed = dense_geometry(columns, kind == "gated", self.module.shared_limit)
            name = f"decode::{geometry.name}{'Pairs' if kind == 'gated' else ''}"
            expression = f"experts::dense<{self._type}, {name}, experts::{kind.upper()}>"
            kernel = decode_kernel("experts/dense_rows.cu", expression, _PRODUCT_MACROS)
            return kernel, -(-rows // (8 * tiles)), needed
        own, gpu = replace(layout, rows=rows), capacity_of(self.module)
        if layout.compute != self.dtype:
            raise KernelError(f"a weight that is rounded in {layout.compute} was given to kernels of {self.dtype}")
        way = packed_way(own, gpu)
        if way is None:
            raise KernelError(f"packed experts of [{rows}, {columns}] do not fit into shared memory")
        kernel = packed_rows_kernel(f"expert_{kind}", self.dtype, way, own, _PRODUCT_MACROS, "experts/packed_rows.cu")
        needed = way.shared_bytes(own.block_bytes, columns, 1, normed=False)
        return kernel, way.grid(rows, gpu)[0], needed


def dense_geometry(columns: int, gated: bool, shared_limit: int) -> tuple[Geometry, int, int]:
    """How dense experts are multiplied with one row of so many columns: how blocks work, tiles of 8 weight rows of a
    unit, and their shared memory."""
    geometry = NARROW if gated else staged_geometry(1, columns, shared_limit) or NARROW
    tiles = 1 + gated
    return geometry, tiles, geometry.ring_bytes(tiles) + SLICES * slice_steps(columns) * STEP * 2


def packed_way(layout: DeviceLayout, gpu: Capacity) -> PackedRows | None:
    """How packed experts are, of one expert's layout; None where blocks have not the memory."""
    return packed_rows(1, layout, gpu, normed=False)


def expert_bytes(layout: DeviceLayout, experts: int) -> int:
    """From one expert's packed weight to the next one's, of the layout of all."""
    (down, along), block = layout.blocks, layout.block_bytes
    return down // experts * along * block
