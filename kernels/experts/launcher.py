"""The kernels of mixtures of experts on the GPU.

Each method has the arguments of its NumPy twin in `twin`, which defines what it computes, and returns a `Launch`.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import replace

from edgellm.kernels.arrays import DeviceArray, members
from edgellm.kernels.decode.arguments import (
    THREADS,
    LinearArgument,
    addresses,
    check_room,
    cuda_type,
    decode_kernel,
    linear_argument,
    rows_of,
)
from edgellm.kernels.decode.contract import MAX_TILED_ROWS, SLICES, STEP, slice_steps
from edgellm.kernels.decode.geometries import DEEP, LINES, NARROW, Geometry, block_share, takes_lines
from edgellm.kernels.decode.linear import LINEAR_MACROS
from edgellm.kernels.decode.packed_rows import PackedRows, packed_rows, packed_rows_kernel
from edgellm.kernels.decode.tiled_linear import capacity_of
from edgellm.kernels.decode.tilings import Capacity
from edgellm.kernels.errors import KernelError
from edgellm.kernels.experts import contract
from edgellm.kernels.launch import Argument, Kernel, KernelModule, Launch
from edgellm.kernels.quantization.device_layout import DeviceLayout

_ADDING_THREADS = 128
#: Of a block's own variables, at most.
_GROUP_BYTES = 64
#: Blocks of one launch of dense experts: so many times what the GPU has at once, where pairs have work for as many.
_ROUNDS = 2


class _Choice(Argument):
    """`Choice` of choice.cu."""

    holds_next = True
    _fields_ = members(
        "void* scores correction x gate scales",
        "int experts chosen columns sigmoid normalized first last next_early",
        "float epsilon scale",
    )


class _Addition(ctypes.Structure):
    """`Addition` of addition.cuh."""

    _fields_ = members(
        "void* outputs weights shared shared_weights residual output", "int chosen width residual_float", "float scale"
    )


class _Product(Argument):
    """`Product` of few_rows.cuh."""

    waits_late = True
    _fields_ = (
        ("linear", LinearArgument),
        ("addition", _Addition),
        *members(
            "void* expert_ids input output counters",
            "ulonglong stride",
            "int experts biases sharing pairs most",
            "float limit",
            "int beside",
        ),
    )


_CHOICE_MACROS = (
    ("HOST_CHOICE_BYTES", ctypes.sizeof(_Choice)),
    ("HOST_ADDITION_BYTES", ctypes.sizeof(_Addition)),
    ("HOST_ADDING_THREADS", _ADDING_THREADS),
)
_PRODUCT_MACROS = (*LINEAR_MACROS, ("HOST_PRODUCT_BYTES", ctypes.sizeof(_Product)))


class CudaExperts:
    """The kernels for one GPU, stream and dtype; each is loaded when a launch first needs it."""

    def __init__(self, module: KernelModule, dtype: str) -> None:
        self.module, self.dtype, self._type = module, dtype, cuda_type(dtype, "kernels of experts")
        self.gpu = capacity_of(module)

    def choose(self, choice, routed):
        routing, scores, correction, shared, own, scales = choice
        experts, chosen, rows = routing.experts, routing.chosen, scores.size // routing.experts
        reason = contract.experts_refusal(experts, chosen)
        if reason is not None or scores.dtype != "float32":
            raise KernelError(reason or f"scores of experts are {scores.dtype}; expected float32")
        for name, array in (("expert_ids", routed.expert_ids), ("expert_weights", routed.expert_weights)):
            check_room(name, array, rows, chosen)
        x, gate = shared or (None, None)
        if x is not None and (x.shape[-1] % 8 or {x.dtype, *(() if gate is None else (gate.dtype,))} != {self.dtype}):
            raise KernelError(f"rows {x.dtype} {list(x.shape)} have no shared expert; expected {self.dtype} in eights")
        argument = _Choice(
            *addresses(scores, correction, x, gate, scales),
            *(experts, chosen, 0 if x is None else x.shape[-1], routing.sigmoid, routing.normalized),
            *(own or (0, experts)),
            *(True, routing.epsilon, routing.scale),
        )
        each = 1 << (-(-experts // 32) - 1).bit_length()  # of a lane
        kernel = decode_kernel("experts/choice.cu", f"experts::choose<{self._type}, {each}>", _CHOICE_MACROS)
        return Launch(self.module, kernel, (rows, 1, 1), 32, 0, (argument, *map(ctypes.c_void_p, addresses(*routed))))

    def gate_up(self, x, expert_ids, experts, how, output):
        return self._product(x, expert_ids, experts, output, how)

    def down(self, x, expert_ids, experts, output):
        return self._product(x, expert_ids, experts, output, contract.SUMS)

    def down_add(self, x, experts, products, addition, counters):
        argument, rows = self._addition(products, addition)
        check_room("counters", counters, rows, counter_words(argument.width))
        return self._product(x, addition.routed.expert_ids, experts, products, contract.SUMS, (argument, counters))

    def add(self, outputs, addition):
        """See `NumpyExperts.add`, of up to 65,535 rows."""
        argument, rows = self._addition(outputs, addition)
        kernel = decode_kernel("experts/choice.cu", f"experts::add<{self._type}>", _CHOICE_MACROS)
        grid = -(-argument.width // (4 * _ADDING_THREADS)), rows, 1
        return Launch(self.module, kernel, grid, _ADDING_THREADS, 0, (argument,))

    def _addition(self, outputs: DeviceArray, addition: contract.Addition) -> tuple[_Addition, int]:
        """What is added, and of how many rows."""
        routed, residual, output, scale, shared = addition
        before = output if residual is None else residual
        width, chosen = before.shape[-1], routed.expert_weights.shape[-1]
        rows = routed.expert_weights.size // chosen
        if width % 8 or before.dtype not in ("float32", self.dtype) or output.dtype != "float32":
            raise KernelError(
                f"a residual {before.dtype} {list(before.shape)} gets no experts' sum of {output.dtype}; expected "
                f"float32 or {self.dtype} in eights, and float32"
            )
        for name, array, columns in (("outputs", outputs, chosen * width), ("residual", before, width)):
            check_room(name, array, rows, columns)
        check_room("output", output, rows, width)
        arrays = addresses(outputs, routed.expert_weights, shared, routed.shared_weights, residual, output)
        return _Addition(*arrays, chosen, width, before.dtype == "float32", scale), rows

    def _product(
        self,
        x: DeviceArray,
        expert_ids: DeviceArray,
        experts: contract.ExpertWeights,
        output: DeviceArray,
        how: contract.Activation,
        adding: tuple[_Addition, DeviceArray] | None = None,
    ) -> Launch:
        """The product of all pairs: of x [R, K] `how` activated, or for sums of each pair's own row. `adding`: what is
        added, too, and its counters."""
        (rows, columns), layout, chosen = experts.shape, experts.layout, expert_ids.shape[-1]
        gated = how.kind == "gated"
        outputs, sharing = rows // how.sums, 1 if how == contract.SUMS else chosen
        pairs = contract.check_pairs(rows_of(expert_ids), chosen)
        reason = contract.matrix_refusal(rows, columns, gated, layout)
        if reason is not None or x.dtype != self.dtype:
            raise KernelError(reason or f"experts multiply {self.dtype}, not {x.dtype}")
        check_room("x", x, pairs // sharing, columns)
        check_room("output", output, pairs, outputs)
        linear = linear_argument(experts.linear, 1, rows // 2 if gated else rows, 1.0)
        addition, counters = adding or (_Addition(), None)
        most, (kernel, blocks, shared_bytes) = self._way(how, experts, pairs, chosen)
        arguments = _Product(
            *(linear, addition),
            *addresses(expert_ids, x, output, counters),
            rows * columns * 2 if layout is None else expert_bytes(layout, experts.experts),
            *(experts.experts, rows, sharing, pairs, most, how.limit),
        )
        return Launch(self.module, kernel, (blocks, pairs, 1), THREADS, shared_bytes, (arguments,))

    def _way(
        self, how: contract.Activation, experts: contract.ExpertWeights, pairs: int, chosen: int
    ) -> tuple[int, tuple[Kernel, int, int]]:
        """How many pairs of an expert a block multiplies at most, the kernel, the blocks of each pair, or group of
        them, and their shared memory."""
        (height, columns), layout, gpu = experts.shape, experts.layout, self.gpu
        rows, active, gated = pairs // chosen, min(pairs, experts.experts), how.kind == "gated"
        macros = (*_PRODUCT_MACROS, ("HOST_GATE", how.number))
        found = expert_way(rows, active, (height, columns), gated, layout, gpu)
        if found is None or (layout is not None and layout.compute != self.dtype):
            raise KernelError(f"experts of [{height}, {columns}] ({layout}) have no kernel of {self.dtype} here")
        most, way, needed = found
        if isinstance(way, Geometry):
            name, tiles = f"decode::{way.name}{'Pairs' if gated else ''}", 1 + gated
            arguments = f"{self._type}, {name}, experts::{how.kind.upper()}, {str(most > 1).lower()}"
            kernel = decode_kernel("experts/dense_rows.cu", f"experts::dense<{arguments}>", macros)
            at_once = _ROUNDS * way.blocks_per_multiprocessor * gpu.multiprocessors
            return most, (kernel, min(-(-height // (8 * tiles)), -(-at_once // active)), needed)
        assert layout is not None  # whose way it is
        own = replace(layout, rows=height)
        kernel = packed_rows_kernel(f"expert_{how.kind}", self.dtype, way, own, macros, "experts/packed_rows.cu")
        count = experts.experts  # of which rows that choose evenly have pairs of about so many:
        rest = max(0, 1 - chosen / count)  # of a rank's experts there may be fewer than a row chooses
        groups = pairs if most == 1 else min(pairs, math.ceil(count * (1 - rest**rows)))
        # A few more than there is room for would wait until others have ended, and take as long again.
        blocks = max(1, min(way.grid(height, gpu)[0], way.blocks * gpu.multiprocessors // groups))
        return most, (kernel, blocks, needed)


def expert_way(
    rows: int, active: int, matrix: tuple[int, int], gated: bool, layout: DeviceLayout | None, gpu: Capacity
) -> tuple[int, Geometry | PackedRows, int] | None:
    """How many pairs of one expert, a `matrix` of rows and columns, a block multiplies at most where so many rows
    chose, up to so many `active` experts: several of few rows, as far as shared memory has room, else 1; how blocks
    work, and their shared memory. None where they have not enough. `layout`: that of all experts, if they are packed,
    whose blocks work as on the active ones' rows."""
    height, columns = matrix
    for pairs in (8, 4, 2, 1) if 1 < rows <= MAX_TILED_ROWS else (1,):
        way: Geometry | PackedRows | None
        if layout is None:
            way, needed = _dense_geometry(pairs, columns, gated, gpu)
        elif (way := packed_rows(pairs, replace(layout, rows=height * active), gpu, False, rows)) is not None:
            needed = way.shared_bytes(layout.block_bytes, columns, pairs, normed=False)
        if way is not None and needed + _GROUP_BYTES <= gpu.shared_limit:
            return pairs, way, needed
    return None


def _dense_geometry(pairs: int, columns: int, gated: bool, gpu: Capacity) -> tuple[Geometry, int]:
    """How blocks multiply dense experts with so many rows of so many columns, and their shared memory."""
    staged = SLICES * slice_steps(columns) * STEP * 2 * pairs
    room = block_share(gpu.shared_limit, DEEP.blocks_per_multiprocessor)
    geometry = DEEP if not gated and DEEP.ring_bytes(1) + staged <= room else NARROW
    if takes_lines(pairs, LINES.ring_bytes(1 + gated) + staged, gpu):
        geometry = LINES
    return geometry, geometry.ring_bytes(1 + gated) + staged


def counter_words(width: int) -> int:
    """Counters of a row of so many columns, for `down_add`."""
    return -(-width // 8)


def expert_bytes(layout: DeviceLayout, experts: int) -> int:
    """From one expert's packed weight to the next one's, of the layout of all."""
    (down, along), block = layout.blocks, layout.block_bytes
    return down // experts * along * block
