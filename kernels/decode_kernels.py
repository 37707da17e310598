"""The kernels of the decode step on the GPU, prepared once and launched every step.

Each method has the arguments of its NumPy twin in `numpy_decode_kernels`, which defines what it computes, and returns
a `Launch` that enqueues it. Launches go through `cuda.bindings`, because pycuda cannot ask for programmatic dependent
launch, which lets a kernel load weights while its predecessor finishes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.compiler import cached_kernels
from edgellm.kernels.errors import KernelError, MissingDependencyError

#: The largest batch: the tensor-core instruction multiplies eight rows.
MAX_BATCH = 8

_WARPS, _UNIT, _STEP = 16, 8, 32
_KEY_TILE, _STAGES, _PADDING = 32, 2, 8
#: decode_linear.cu's DEPTH.
_DEPTH = 4


class Launch:
    """One kernel with its grid and arguments; calling it enqueues it on the stream."""

    def __init__(
        self,
        kernels: CudaDecodeKernels,
        name: str,
        grid: tuple[int, int, int],
        threads: int,
        shared_bytes: int,
        arguments: Sequence[Any],
    ) -> None:
        driver = kernels.driver
        self._driver = driver
        self._function = kernels.function(name, shared_bytes)
        self._arguments = arguments
        self._pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(value) for value in arguments))
        self._address = ctypes.addressof(self._pointers)
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = shared_bytes
        config.hStream = kernels.stream
        self._config = config
        self.name = name

    def overlap_previous(self) -> None:
        """Let this kernel start before its predecessor, which must be a kernel of this module, has finished."""
        attribute = self._driver.CUlaunchAttribute()
        attribute.id = self._driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        self._config.attrs = [attribute]
        self._config.numAttrs = 1

    def __call__(self) -> None:
        (status,) = self._driver.cuLaunchKernelEx(self._config, self._function, self._address, 0)
        if status != self._driver.CUresult.CUDA_SUCCESS:
            raise KernelError(f"launching {self.name} failed: {status}")


class CudaDecodeKernels:
    """The kernels for one GPU and stream; the GPU's primary context must be current."""

    def __init__(self, architecture: str, stream_handle: int, cubin: bytes | None = None) -> None:
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise MissingDependencyError(
                f"cuda.bindings does not load ({error}). Install it with: pip install 'cuda-bindings>=12.9'"
            ) from error
        self.driver = driver
        self.stream = driver.CUstream(stream_handle)
        self._module = self._checked(driver.cuModuleLoadData(cubin or cached_kernels(architecture)))
        self._functions: dict[str, Any] = {}
        self._shared_bytes: dict[str, int] = {}
        device = self._checked(driver.cuCtxGetDevice())
        names = driver.CUdevice_attribute

        def attribute(name: Any) -> int:
            return self._checked(driver.cuDeviceGetAttribute(name, device))

        self.multiprocessors = attribute(names.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
        self.shared_limit = attribute(names.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
        self.can_overlap = attribute(names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) >= 9
        self.blocks_per_multiprocessor = 2
        self.depth = _DEPTH

    def _checked(self, result: tuple) -> Any:
        status, *values = result
        if status != self.driver.CUresult.CUDA_SUCCESS:
            raise KernelError(f"CUDA reported {status} to the kernels of the decode step")
        return values[0] if values else None

    def function(self, name: str, shared_bytes: int) -> Any:
        """The kernel `name`, allowed to use `shared_bytes` of shared memory."""
        attributes = self.driver.CUfunction_attribute
        if name not in self._functions:
            function = self._checked(self.driver.cuModuleGetFunction(self._module, name.encode()))
            # One split of cache and shared memory for all: another split would keep kernels from running side by side.
            carveout = attributes.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
            self._checked(self.driver.cuFuncSetAttribute(function, carveout, 100))
            self._functions[name], self._shared_bytes[name] = function, 0
        if shared_bytes > self.shared_limit:
            raise KernelError(
                f"{name} needs {shared_bytes} bytes of shared memory for this batch and width, "
                f"the GPU has {self.shared_limit}"
            )
        if shared_bytes > self._shared_bytes[name]:
            limit = attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._checked(self.driver.cuFuncSetAttribute(self._functions[name], limit, shared_bytes))
            self._shared_bytes[name] = shared_bytes
        return self._functions[name]

    def norm_linear(
        self,
        hidden: DeviceArray,
        norm_weight: DeviceArray,
        epsilon: float,
        weight: DeviceArray,
        bias: DeviceArray | None,
        output: DeviceArray,
    ) -> Launch:
        """See `numpy_decode_kernels.norm_linear`."""
        return self._norm("norm_linear", 1, hidden, norm_weight, epsilon, weight, bias, output)

    def norm_gate_up(
        self,
        hidden: DeviceArray,
        norm_weight: DeviceArray,
        epsilon: float,
        weight: DeviceArray,
        bias: DeviceArray | None,
        output: DeviceArray,
    ) -> Launch:
        """See `numpy_decode_kernels.norm_gate_up`."""
        return self._norm("norm_gate_up", 2, hidden, norm_weight, epsilon, weight, bias, output)

    def _norm(
        self,
        name: str,
        tiles: int,
        hidden: DeviceArray,
        norm_weight: DeviceArray,
        epsilon: float,
        weight: DeviceArray,
        bias: DeviceArray | None,
        output: DeviceArray,
    ) -> Launch:
        batch, rows, columns = self._sizes(hidden, weight, tiles)
        steps = _steps(columns)
        shared = _norm_bytes(tiles, batch, columns, self.depth)
        arguments = (
            _pointer(weight),
            _pointer(bias),
            _pointer(hidden),
            ctypes.c_int(hidden.dtype == "float32"),
            _pointer(norm_weight),
            ctypes.c_float(epsilon),
            _pointer(output),
            *map(ctypes.c_int, (batch, rows, columns, steps)),
        )
        return self._linear(f"decode_{name}_{weight.dtype}", rows, shared, arguments)

    def linear_residual(
        self,
        x: DeviceArray,
        weight: DeviceArray,
        bias: DeviceArray | None,
        residual: DeviceArray,
        output: DeviceArray,
    ) -> Launch:
        """See `numpy_decode_kernels.linear_residual`."""
        batch, rows, columns = self._sizes(x, weight, 1)
        steps = _steps(columns)
        staged = _linear_bytes(1, self.depth) + batch * (_WARPS * steps * _STEP * 2 + 64)
        stage = staged <= self.shared_limit
        arguments = (
            _pointer(weight),
            _pointer(bias),
            _pointer(x),
            _pointer(residual),
            ctypes.c_int(residual.dtype == "float32"),
            _pointer(output),
            *map(ctypes.c_int, (batch, rows, columns, steps, stage)),
        )
        name = f"decode_linear_residual_{weight.dtype}"
        return self._linear(name, rows, staged if stage else _linear_bytes(1, self.depth), arguments)

    def _sizes(self, x: DeviceArray, weight: DeviceArray, tiles: int) -> tuple[int, int, int]:
        columns = weight.shape[1]
        batch = x.size // columns
        if not 1 <= batch <= MAX_BATCH or columns % 8 or batch * columns != x.size:
            raise KernelError(
                f"decode kernels take 1 to {MAX_BATCH} rows of a width that is a multiple of 8, "
                f"found {x.shape} times {weight.shape}"
            )
        return batch, weight.shape[0] // tiles, columns

    def _linear(self, name: str, rows: int, shared_bytes: int, arguments: Sequence[Any]) -> Launch:
        blocks = min(-(-rows // _UNIT), self.multiprocessors * self.blocks_per_multiprocessor)
        return Launch(self, name, (blocks, 1, 1), 32 * _WARPS, shared_bytes, arguments)

    def attention(
        self,
        qkv: DeviceArray,
        q_norm: DeviceArray | None,
        k_norm: DeviceArray | None,
        epsilon: float,
        rope_rotary_cos_sin: DeviceArray,
        kvcache_start_index: DeviceArray,
        k_cache: DeviceArray,
        v_cache: DeviceArray,
        partial: DeviceArray,
        counters: DeviceArray,
        context: DeviceArray,
    ) -> Launch:
        """See `numpy_decode_kernels.attention`.

        `partial` float32 of `attention_partials` and `counters` [B, n_kv] uint32 (zero before and after) are its own.
        """
        batch, kv_heads, kv_rows, size = k_cache.shape
        heads = context.size // (batch * size)
        group, rotary = heads // kv_heads, rope_rotary_cos_sin.shape[-1]
        if size % 8 or size > 256 or group > 16 or heads % kv_heads:
            raise KernelError(
                f"decode attention takes head sizes up to 256 (multiples of 8) and up to 16 query heads a key-value "
                f"head, found head size {size}, {heads} query heads, {kv_heads} key-value heads"
            )
        shared = _attention_bytes(group, size)
        arguments = (
            _pointer(qkv),
            _pointer(q_norm),
            _pointer(k_norm),
            ctypes.c_float(epsilon),
            _pointer(rope_rotary_cos_sin),
            _pointer(kvcache_start_index),
            _pointer(k_cache),
            _pointer(v_cache),
            _pointer(context),
            _pointer(partial),
            _pointer(counters),
            ctypes.c_float(size**-0.5 * 1.4426950408889634),
            *map(ctypes.c_int, (group, size, rotary, kv_rows)),
        )
        pairs = 1 if size <= 64 else 2 if size <= 128 else 4
        grid = (attention_splits(kv_heads, kv_rows), kv_heads, batch)
        threads = 32 * _attention_warps(group)
        return Launch(self, f"decode_attention_{pairs}_{k_cache.dtype}", grid, threads, shared, arguments)


def attention_splits(kv_heads: int, kv_rows: int) -> int:
    """Over how many blocks the rows of one key-value head are split, at most; not a function of the batch."""
    return min(-(-kv_rows // _KEY_TILE), max(16, min(128, 256 // kv_heads)))


def attention_partials(batch: int, heads: int, kv_heads: int, kv_rows: int, size: int) -> int:
    """Number of float32 values that the splits of one attention layer leave for the merge."""
    return batch * heads * attention_splits(kv_heads, kv_rows) * (size + 2)


def shared_bytes(batch: int, hidden_size: int, head_size: int, group: int) -> int:
    """The most shared memory that a block of any of the kernels needs.

    Widths other than the hidden size do not count: `linear_residual` reads what does not fit from global memory.
    """
    return max(_norm_bytes(2, batch, hidden_size, _DEPTH), _attention_bytes(group, head_size))


def _norm_bytes(tiles: int, batch: int, columns: int, depth: int) -> int:
    """Ring, partial sums, and the activations, which are float before they are normalized."""
    return _linear_bytes(tiles, depth) + batch * (_WARPS * _steps(columns) * _STEP * 4 + 64)


def _linear_bytes(tiles: int, depth: int) -> int:
    """Ring and partial sums."""
    return depth * 32 * _WARPS * 16 + (2 * _WARPS * tiles * 64 + _UNIT * _WARPS) * 4


def _attention_warps(group: int) -> int:
    return max(4, group)


def _attention_bytes(group: int, size: int) -> int:
    tiles = 2 * _STAGES * _KEY_TILE * (size + _PADDING) * 2
    return tiles + (group * size + size + _attention_warps(group) * _KEY_TILE) * 4


def _steps(columns: int) -> int:
    """Steps of 32 columns that each of a block's warps takes."""
    return -(-columns // (_WARPS * _STEP))


def _pointer(array: DeviceArray | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(0 if array is None else array.pointer)
