"""The decode step as one CUDA kernel: what it takes, how much memory it needs, and its launch.

`numpy_decode_kernels.decode_step` is the kernel's twin and defines what it computes. It goes through `cuda.bindings`,
because pycuda has no cooperative launch, which guarantees that all blocks run at once and may wait for each other.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from edgellm.kernels.arrays import Array, DeviceArray
from edgellm.kernels.compiler import cached_kernels
from edgellm.kernels.errors import KernelError, MissingDependencyError

#: The largest batch: a unit of the tensor-core instruction has eight rows.
MAX_BATCH = 8
MAX_HEAD_SIZE = 256
MAX_GROUP = 16

# These mirror cuda/decode_*.cuh.
_WARPS, _UNIT, _STEP, _TILE, _PADDING = 16, 8, 32, 32, 8
_THREADS = 32 * _WARPS
_SLOT_BYTES = _THREADS * 16
_DEPTHS = (24, 20, 16, 12, 8, 4)
#: Below this depth the ring of weights is too short for the fastest memory; activations then stay in global memory.
_GOOD_DEPTH = 8
_STATIC_BYTES = 1024


@dataclass(frozen=True)
class DecodeDimensions:
    """Sizes of a decode step; `kv_rows` are the rows that a cache holds, `rotary` the rotated part of a head."""

    num_layers: int
    batch: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    heads: int
    kv_heads: int
    head_size: int
    rotary: int
    kv_rows: int

    @property
    def query_size(self) -> int:
        """Width of all query heads."""
        return self.heads * self.head_size

    @property
    def qkv_size(self) -> int:
        """Width of queries, keys and values together."""
        return self.query_size + 2 * self.kv_heads * self.head_size

    @property
    def splits(self) -> int:
        """Over how many blocks the rows of one key-value head are split, at most; not a function of the batch."""
        return min(-(-self.kv_rows // _TILE), max(4, min(64, 128 // self.kv_heads)))

    @property
    def partial_shape(self) -> tuple[int, int, int, int]:
        """What the splits of one layer's attention leave for the merge, float32."""
        return (self.batch, self.heads, self.splits, self.head_size + 2)

    def problem(self) -> str | None:
        """Why the kernel cannot take these sizes, or None."""
        if not 1 <= self.batch <= MAX_BATCH:
            return f"the decode kernel takes 1 to {MAX_BATCH} sequences, not {self.batch}"
        for name in ("hidden_size", "intermediate_size", "head_size"):
            if getattr(self, name) % 8:
                return f"the decode kernel needs {name} to be a multiple of 8, not {getattr(self, name)}"
        if self.head_size > MAX_HEAD_SIZE:
            return f"the decode kernel takes heads of up to {MAX_HEAD_SIZE}, not {self.head_size}"
        if self.heads % self.kv_heads or self.heads > MAX_GROUP * self.kv_heads:
            return (
                f"the decode kernel takes up to {MAX_GROUP} query heads for each key-value head, "
                f"not {self.heads} for {self.kv_heads}"
            )
        return None


@dataclass(frozen=True)
class DecodeLayer:
    """Weights and caches of one layer, in the order of `decode::Layer`; matrices are [N, K], absent ones None."""

    input_norm: Array
    qkv: Array
    qkv_bias: Array | None
    q_norm: Array | None
    k_norm: Array | None
    o: Array
    o_bias: Array | None
    post_attention_norm: Array
    gate_up: Array
    gate_up_bias: Array | None
    down: Array
    down_bias: Array | None
    k_cache: Array
    v_cache: Array


@dataclass(frozen=True)
class DecodeStep:
    """Everything a decode step reads and writes.

    embeddings [B, 1, H], cos_sin [B, 1, R] and the layers in compute dtype, start_index [B] int32, logits [B, 1, V]
    float32. Scratch: hidden [B, H] and qkv [B, (n_q + 2 n_kv) D] float32, context [B, n_q D] and activation [B, F]
    compute, partial float32; counters [B, n_kv] uint32 and barrier [1] uint64 are zeroed once, before the first launch.
    """

    dimensions: DecodeDimensions
    epsilon: float
    layers: tuple[DecodeLayer, ...]
    embeddings: Array
    cos_sin: Array
    start_index: Array
    norm: Array
    head: Array
    logits: Array
    hidden: Array
    qkv: Array
    context: Array
    activation: Array
    partial: Array | None = None
    counters: Array | None = None
    barrier: Array | None = None


def layer_table(step: DecodeStep) -> np.ndarray:
    """Device addresses of all layers, [num_layers, 14] uint64, as the kernel reads them."""
    rows = [
        [_address(getattr(layer, field.name)) for field in fields(DecodeLayer)]  #
        for layer in step.layers
    ]
    return np.array(rows, np.uint64)


class _Arguments(ctypes.Structure):
    """`decode::Arguments`."""

    _POINTERS = ("embeddings", "cos_sin", "start_index", "norm", "head", "logits", "hidden", "qkv", "context") + (
        "activation",
        "partial",
        "counters",
        "barrier",
    )
    _SIZES = tuple(DecodeDimensions.__dataclass_fields__) + ("splits",)
    _fields_ = (
        [("layers", ctypes.c_uint64)]
        + [(name, ctypes.c_uint64) for name in _POINTERS]
        + [("epsilon", ctypes.c_float), ("scale", ctypes.c_float)]
        + [(name, ctypes.c_int) for name in (*_SIZES, "depth", "stage_o", "stage_down")]
    )


@dataclass(frozen=True)
class SharedMemory:
    """How the kernel uses shared memory: copies in flight of a thread, and which activations are staged in it."""

    depth: int
    stage_o: bool
    stage_down: bool
    total_bytes: int


def shared_memory(dimensions: DecodeDimensions, limit: int) -> SharedMemory:
    """The best use of `limit` bytes a block. Raises KernelError if the sizes do not fit at all."""
    d = dimensions
    layers = -(-d.num_layers * len(fields(DecodeLayer)) * 8 // 128) * 128
    sums = (2 * _WARPS * 2 * 64 + _UNIT * _WARPS) * 4
    smallest = 0
    for good in (True, False):
        for stage_o, stage_down in ((True, True), (True, False), (False, False)):
            staged = [(d.hidden_size, 4), (d.query_size, 2 * stage_o), (d.intermediate_size, 2 * stage_down)]
            activations = max(d.batch * (_slices(columns) * size + 64) for columns, size in staged)
            fixed = _STATIC_BYTES + layers + max(sums + activations, _attention_bytes(d))
            for depth in _DEPTHS:
                smallest = fixed + depth * _SLOT_BYTES
                if smallest <= limit and (depth >= _GOOD_DEPTH or not good):
                    return SharedMemory(depth, stage_o, stage_down, smallest - _STATIC_BYTES)
    raise KernelError(
        f"the decode kernel needs {smallest} bytes of shared memory for {d.batch} sequences of width {d.hidden_size}, "
        f"the GPU has {limit}; use a smaller batch"
    )


def _slices(columns: int) -> int:
    """Columns that the warps of a block cover together."""
    return -(-columns // (_WARPS * _STEP)) * _WARPS * _STEP


def _attention_bytes(d: DecodeDimensions) -> int:
    group, size = d.heads // d.kv_heads, d.head_size
    at_once = max(1, min(_WARPS // group, 256 // size))
    tiles = 2 * at_once * _TILE * (size + _PADDING) * 2
    return tiles + (group * size + size + _WARPS * _TILE + group * at_once * (size + 2)) * 4


class CudaDecodeKernels:
    """The kernel on one GPU and stream; the GPU's primary context must be current."""

    def __init__(self, architecture: str, stream_handle: int, cubin: bytes | None = None) -> None:
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise MissingDependencyError(
                f"cuda.bindings does not load ({error}). Install it with: pip install 'cuda-bindings>=12.9'"
            ) from error
        self._driver = driver
        self._stream = driver.CUstream(stream_handle)
        self._module = self._checked(driver.cuModuleLoadData(cubin or cached_kernels(architecture)))
        device = self._checked(driver.cuCtxGetDevice())
        names = driver.CUdevice_attribute
        self.multiprocessors = self._checked(
            driver.cuDeviceGetAttribute(names.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device)
        )
        self.shared_limit = self._checked(
            driver.cuDeviceGetAttribute(names.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, device)
        )

    def prepare(self, step: DecodeStep, layers: DeviceArray) -> Launch:
        """The launch of `step`; `layers` is its `layer_table` on the device. Raises KernelError for sizes beyond it."""
        dimensions = step.dimensions
        problem = dimensions.problem()
        if problem is not None:
            raise KernelError(problem)
        memory = shared_memory(dimensions, self.shared_limit)
        arguments = _Arguments()
        arguments.layers = layers.pointer
        for name in _Arguments._POINTERS:
            setattr(arguments, name, _address(getattr(step, name)))
        arguments.epsilon = step.epsilon
        arguments.scale = dimensions.head_size**-0.5 * 1.4426950408889634  # exponents to base 2
        for name in _Arguments._SIZES:
            setattr(arguments, name, getattr(dimensions, name))
        arguments.depth, arguments.stage_o, arguments.stage_down = memory.depth, memory.stage_o, memory.stage_down
        driver = self._driver
        name = f"decode_step_{step.head.dtype}"
        function = self._checked(driver.cuModuleGetFunction(self._module, name.encode()))
        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self._checked(driver.cuFuncSetAttribute(function, limit, self.shared_limit - _STATIC_BYTES))
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = self.multiprocessors, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = _THREADS, 1, 1
        config.sharedMemBytes = memory.total_bytes
        config.hStream = self._stream
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        attribute.value.cooperative = 1
        config.attrs, config.numAttrs = [attribute], 1
        return Launch(driver, config, function, arguments, name)

    def _checked(self, result: tuple) -> Any:
        status, *values = result
        if status != self._driver.CUresult.CUDA_SUCCESS:
            raise KernelError(f"CUDA reported {status} while the decode kernel was prepared")
        return values[0] if values else None


class Launch:
    """A kernel with its grid and arguments; calling it enqueues it on the stream."""

    def __init__(self, driver: Any, config: Any, function: Any, arguments: ctypes.Structure, name: str) -> None:
        self._driver, self._config, self._function, self._name = driver, config, function, name
        self._arguments = arguments
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        self._address = ctypes.addressof(self._pointers)

    def __call__(self) -> None:
        (status,) = self._driver.cuLaunchKernelEx(self._config, self._function, self._address, 0)
        if status != self._driver.CUresult.CUDA_SUCCESS:
            raise KernelError(f"launching {self._name} failed: {status}")


def _address(array: DeviceArray | None) -> int:
    return 0 if array is None else array.pointer
