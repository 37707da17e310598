"""Linear layers that follow each other in one kernel (chain.cu), for up to eight rows on GPUs of sm_90 and later."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.decode.arguments import (
    CUDA_TYPES,
    THREADS,
    LinearResidualArgument,
    NormLinearArgument,
    decode_kernel,
)
from edgellm.kernels.decode.contract import MOST_LAYERS, SLICES, STEP
from edgellm.kernels.errors import KernelError
from edgellm.kernels.launch import Kernel, KernelModule, Launch

_MOST_ROWS, _TILE_ROWS, _BUFFERS = 8, 8, 4
#: Chunks of 64 columns of each of the eight rows in a slot of the ring, and the most and fewest slots.
_CHUNK_COLUMNS, _SLOT_CHUNKS, _MOST_SLOTS, _FEWEST_SLOTS = 64, 20, 26, 3
#: Slots that a block copies at once.
_UNDER_WAY = 4
_SLOT_BYTES = _TILE_ROWS * _SLOT_CHUNKS * _CHUNK_COLUMNS * 2
_CHAIN_THREADS = THREADS + 96
_BARRIERS_BYTES = 8 * (2 * _MOST_SLOTS + 2 * _BUFFERS + MOST_LAYERS)
_NORM_LINEAR, _NORM_GATE_UP, _RESIDUAL = range(3)


class _Arguments(ctypes.Union):
    _fields_ = [("norm", NormLinearArgument), ("residual", LinearResidualArgument)]


class _Layer(ctypes.Structure):
    """`Layer` of chain.cu."""

    _fields_ = [("arguments", _Arguments), ("kind", ctypes.c_int)]

    @property
    def linear(self) -> Any:
        return self.arguments.residual.linear if self.kind == _RESIDUAL else self.arguments.norm.linear


_FIELDS = [
    ("weights", ctypes.c_uint64 * (16 * MOST_LAYERS)),
    ("layers", _Layer * MOST_LAYERS),
    ("counters", ctypes.c_void_p),
    *((name, ctypes.c_int) for name in ("count", "slots", "early", "under_way", "steps", "norm_steps")),
]


class _Chain(ctypes.Structure):
    """`Chain` of chain.cu, which begins and ends at multiples of 64 bytes."""

    _fields_ = [*_FIELDS, ("rest", ctypes.c_char * (-sum(ctypes.sizeof(kind) for _, kind in _FIELDS) % 64))]


def _shared_bytes(slots: int, steps: int, norm_steps: int, norms: int, batch: int) -> int:
    """Shared memory of a block."""
    ring, activations = slots * _SLOT_BYTES, SLICES * steps * batch * STEP * 2
    of_norms = norms * (SLICES * norm_steps * STEP * 2 + 8 * (SLICES + 1) * 4)
    return ring + activations + of_norms + _BUFFERS * SLICES * (2 * batch * _TILE_ROWS + 2) * 4 + _BARRIERS_BYTES


def _macros() -> tuple[tuple[str, int], ...]:
    """What host and device agree on."""
    return (
        ("HOST_CHAIN_LAYERS", MOST_LAYERS),
        ("HOST_CHAIN_SLOTS", _MOST_SLOTS),
        ("HOST_SLOT_CHUNKS", _SLOT_CHUNKS),
        ("HOST_CHAIN_THREADS", _CHAIN_THREADS),
        ("HOST_CHAIN_BYTES", ctypes.sizeof(_Chain)),
        ("HOST_CHAIN_SHARED_BYTES", _shared_bytes(5, 3, 2, 2, 7)),
    )


def chain_kernel(dtype: str) -> Kernel:
    """The kernel for a compute dtype."""
    return decode_kernel("chain.cu", f"decode::chain::linear_chain<{CUDA_TYPES[dtype]}>", _macros())


def chained(module: KernelModule, dtype: str, launches: Sequence[Any], counters: DeviceArray) -> list[Any]:
    """The launches of a step in their order; linear layers that follow each other, which a chain takes, as one launch.

    `counters` [MOST_LAYERS] uint32, zero before and after. The results have the same bits.
    """
    takes_chains = module.has_clusters and module.has_gpu_alone()
    layers = [_layer(launch) if takes_chains else None for launch in launches]
    pairs = zip(launches, layers, strict=True)
    result: list[Any] = []
    for rows, group in groupby(pairs, key=lambda pair: None if pair[1] is None else pair[1].linear.batch):
        members = list(group)
        for first in range(0, len(members), MOST_LAYERS):
            part = members[first : first + MOST_LAYERS]
            chain = None if rows is None else _chain([layer for _, layer in part], module, dtype, counters)
            result += [launch for launch, _ in part] if chain is None else [chain]
    return result


def _layer(launch: Any) -> _Layer | None:
    """What a launch is as a layer of a chain; None if it cannot be one."""
    arguments = launch.arguments[0] if isinstance(launch, Launch) else None
    if isinstance(arguments, LinearResidualArgument):
        layer = _Layer(_Arguments(residual=arguments), _RESIDUAL)
    elif isinstance(arguments, NormLinearArgument) and arguments.next_early and not arguments.inputs[1].values:
        layer = _Layer(_Arguments(norm=arguments), _NORM_GATE_UP if "norm_gate_up" in launch.name else _NORM_LINEAR)
    else:
        return None
    linear = layer.linear
    takes = linear.batch <= _MOST_ROWS and linear.columns % _CHUNK_COLUMNS == 0
    return layer if takes else None


def _chain(layers: Sequence[Any], module: KernelModule, dtype: str, counters: DeviceArray) -> Launch | None:
    """One launch for several layers; None where there is nothing to win, or no memory for it."""
    if len(layers) < 2:
        return None
    normed = [layer.linear.steps for layer in layers if layer.kind != _RESIDUAL]
    steps, norm_steps = max(layer.linear.steps for layer in layers), max(normed, default=0)
    batch = layers[0].linear.batch
    own = _shared_bytes(0, steps, norm_steps, len(normed), batch)
    slots = min(_MOST_SLOTS, (module.shared_limit - own) // _SLOT_BYTES)
    if slots < _FEWEST_SLOTS:
        return None
    maps = [word for layer in layers for word in weight_map(module, layer.linear, layer.kind == _NORM_GATE_UP)]
    arguments = _Chain(
        (ctypes.c_uint64 * (16 * MOST_LAYERS))(*maps),
        (_Layer * MOST_LAYERS)(*layers),
        counters.pointer,
        *(len(layers), slots, slots, _UNDER_WAY, steps, norm_steps),
    )
    blocks, shared = (module.multiprocessors, 1, 1), own + slots * _SLOT_BYTES
    return Launch(module, chain_kernel(dtype), blocks, _CHAIN_THREADS, shared, (arguments,))


def weight_map(module: KernelModule, linear: Any, gated: bool) -> list[int]:
    """What tells the tensor memory accelerator of a weight as [rows, chunks, 64], in tiles that fill a slot.

    Behind the rows and chunks stand zeros. Raises KernelError if the driver refuses it.
    """
    driver, rows = module.driver, linear.rows * (1 + gated)
    status, found = driver.cuTensorMapEncodeTiled(
        driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,  # or any other of as many bits
        3,
        linear.weight,
        [driver.cuuint64_t(size) for size in (_CHUNK_COLUMNS, linear.columns // _CHUNK_COLUMNS, rows)],
        [driver.cuuint64_t(size) for size in (2 * _CHUNK_COLUMNS, 2 * linear.columns)],
        [driver.cuuint32_t(size) for size in (_CHUNK_COLUMNS, _SLOT_CHUNKS, _TILE_ROWS)],
        [driver.cuuint32_t(1)] * 3,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if status != driver.CUresult.CUDA_SUCCESS:
        raise KernelError(
            f"CUDA reported {status} for a tensor map of a weight [{rows}, {linear.columns}] at {linear.weight:#x}: "
            "expected an address that is a multiple of 16 bytes"
        )
    return [int(word) for word in found.opaque]
