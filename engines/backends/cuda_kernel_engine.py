"""What engines of hand-written kernels have in common: tensors at the edge, scratch memory, launches prepared once."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Any

from edgellm.engines.backends.cuda_device import CudaDevice
from edgellm.engines.errors import EngineError
from edgellm.engines.model.config import DecoderConfig, EngineShape
from edgellm.kernels.arrays import ITEM_SIZES, DeviceArray
from edgellm.kernels.decode.attention import attention_partials
from edgellm.kernels.decode.linear import CudaDecodeKernels
from edgellm.kernels.launch import Launch

#: Shape and dtype of arrays, by name.
ArrayTable = dict[str, tuple[tuple[int, ...], str]]

_ALIGNMENT = 256


class CudaKernelEngine(ABC):
    """Enqueues the launches that a subclass makes of what is bound.

    Not thread-safe: enqueue from the thread that owns the stream.
    """

    reads_attention_mask: bool

    def __init__(
        self,
        kernels: CudaDecodeKernels,
        decoder: DecoderConfig,
        shape: EngineShape,
        edge: ArrayTable,
        scratch: ArrayTable,
        unneeded: Collection[str],
    ) -> None:
        """`edge` are the tensors that can be bound, `unneeded` those of them that need not be."""
        self.shape = shape
        self._kernels, self._decoder = kernels, decoder
        self._tensors, self._unneeded = edge, unneeded
        self._bound: dict[str, DeviceArray] = {}
        self._scratch: dict[str, DeviceArray] = {}
        self._layout, self.scratch_bytes = _scratch_layout(scratch)
        self._launches: list[Launch] = []
        self._launches_by_layer: list[Launch] = []

    @staticmethod
    @abstractmethod
    def unsupported(config: Any, shape: EngineShape, dtype: str, shared_limit: int | None = None) -> str | None:
        """Why no such engine can be made of a model's `config`, or None if it can.

        `shared_limit` is the shared memory that a block may have on the GPU, in bytes (None: not checked).
        """

    @classmethod
    def _check_supported(cls, kernels: CudaDecodeKernels, config: Any, shape: EngineShape, dtype: str) -> None:
        reason = cls.unsupported(config, shape, dtype, kernels.shared_limit)
        if reason is not None:
            raise EngineError(f"{shape.name}: {reason}")

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """Names of all inputs and outputs."""
        return tuple(self._tensors)

    def attach(self, device: CudaDevice, scratch: DeviceArray) -> None:
        """Use `scratch` (at least `scratch_bytes`, shared with other engines) and the device's stream."""
        if scratch.nbytes < self.scratch_bytes:
            raise EngineError(f"{self.shape.name} needs {self.scratch_bytes} bytes of scratch, got {scratch.nbytes}")
        self._scratch = {
            name: DeviceArray(scratch.pointer + offset, shape, dtype, scratch)
            for name, (offset, shape, dtype) in self._layout.items()
        }
        # Not in the shared scratch: the counters must be zero between steps.
        self._scratch["counters"] = device.zeros(self._counters(), "uint32")
        self._launches, self._launches_by_layer = [], []

    def _counters(self) -> tuple[int, ...]:
        """Shape of what the launches count in: of blocks that have finished."""
        return rows(self.shape), self._decoder.num_kv_heads

    def bind(self, bindings: Mapping[str, DeviceArray]) -> None:
        """See `Engine.bind`."""
        self._launches, self._launches_by_layer = [], []
        for name, array in bindings.items():
            if name not in self._tensors:
                raise EngineError(f"{self.shape.name} has no tensor {name!r}; it has {', '.join(self._tensors)}")
            expected = self._tensors[name]
            if (array.shape, array.dtype) != expected:
                raise EngineError(
                    f"{self.shape.name}: {name} is {array.dtype} {array.shape}, "
                    f"the engine expects {expected[1]} {expected[0]}"
                )
            self._bound[name] = array

    def enqueue(self) -> None:
        """Enqueue on the stream; raises EngineError if a tensor was never bound."""
        if not self._launches:
            self._check_bound()
            launches = self._prepare()
            for launch in launches:
                launch.overlap_previous()
            self._launches = launches
        for launch in self._launches:
            launch()

    @abstractmethod
    def _prepare(self) -> list[Launch]:
        """The launches of a step, all of which may start while the one before still runs."""

    def _check_bound(self) -> None:
        unbound = self._tensors.keys() - self._bound.keys() - set(self._unneeded)
        if unbound:
            raise EngineError(f"{self.shape.name}: never bound: {', '.join(sorted(unbound))}")
        if not self._scratch:
            raise EngineError(f"{self.shape.name}: attach was not called")
        for kind in ("k", "v"):
            for index in range(self._decoder.num_layers):
                present, cache = (self._bound[f"{prefix}{kind}_cache_{index}"] for prefix in ("present_", ""))
                if present.pointer != cache.pointer:
                    raise EngineError(
                        f"{self.shape.name}: present_{kind}_cache_{index} must be bound to the memory of its cache"
                    )

    def _attention(self, index: int, prefix: str, mask: DeviceArray | None, masks_all: bool = False) -> Launch:
        """From `qkv` to `context`, with the caches `index` and the norms of the layer whose weights begin so."""
        bound, scratch = self._bound, self._scratch
        return self._kernels.attention(
            scratch["qkv"],
            bound.get(f"{prefix}self_attn.q_norm.weight"),
            bound.get(f"{prefix}self_attn.k_norm.weight"),
            self._decoder.rms_norm_eps,
            bound["rope_rotary_cos_sin"],
            bound["kvcache_start_index"],
            mask,
            bound[f"k_cache_{index}"],
            bound[f"v_cache_{index}"],
            scratch["partial"],
            scratch["counters"],
            scratch["context"],
            masks_all,
        )

    def _mlp(self, prefix: str, hidden: DeviceArray, activation: DeviceArray) -> list[Launch]:
        """The gated MLP of that layer, added to `hidden` in place."""
        kernels, bound = self._kernels, self._bound
        return [
            kernels.norm_gate_up(
                hidden,
                bound[f"{prefix}post_attention_layernorm.weight"],
                self._decoder.rms_norm_eps,
                bound[f"{prefix}mlp.gate_up_proj.weight"],
                bound.get(f"{prefix}mlp.gate_up_proj.bias"),
                activation,
            ),
            kernels.linear_residual(
                activation,
                bound[f"{prefix}mlp.down_proj.weight"],
                bound.get(f"{prefix}mlp.down_proj.bias"),
                hidden,
                hidden,
            ),
        ]


def rows(shape: EngineShape) -> int:
    """New tokens of all sequences."""
    return shape.batch * shape.tokens


def edge_of_layers(config: DecoderConfig, shape: EngineShape, dtype: str) -> ArrayTable:
    """The tensors at the edge that every engine with a decoder's layers has, but weights and results."""
    batch, tokens = shape.batch, shape.tokens
    tensors: ArrayTable = {
        "inputs_embeds": ((batch, tokens, config.hidden_size), dtype),
        "rope_rotary_cos_sin": ((batch, tokens, config.rotary_dim), dtype),
        "attention_mask": ((batch, 1, tokens, shape.key_range), "bool"),
        "kvcache_start_index": ((batch,), "int32"),
    }
    cache = (batch, config.num_kv_heads, shape.kv_rows, config.head_dim)
    for index in range(config.num_layers):
        for name in ("k_cache", "v_cache", "present_k_cache", "present_v_cache"):
            tensors[f"{name}_{index}"] = (cache, dtype)
    return tensors


def scratch_of_layers(config: DecoderConfig, shape: EngineShape, dtype: str, mlp_rows: int) -> ArrayTable:
    """The intermediate results of a decoder's layers, of which `mlp_rows` rows go through the MLP."""
    count = rows(shape)
    partials = attention_partials(count, config.num_heads, config.num_kv_heads, shape.kv_rows, config.head_dim)
    return {
        "hidden": ((mlp_rows, config.hidden_size), "float32"),
        "qkv": ((count, config.query_size + 2 * config.kv_size), "float32"),
        "context": ((count, config.query_size), dtype),
        "activation": ((mlp_rows, config.intermediate_size), dtype),
        "partial": ((partials,), "float32"),
    }


def unsupported_layers(config: DecoderConfig, shape: EngineShape, dtype: str) -> str | None:
    """Why the kernels cannot compute a decoder's layers, or None if they can."""
    if dtype not in ("float16", "bfloat16"):
        return f"decode kernels compute in float16 and bfloat16, not {dtype}"
    if shape.lora_slots:
        return "decode kernels do not apply LoRA adapters"
    sizes = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "query size": config.query_size,
        "head_dim": config.head_dim,
    }
    for name, size in sizes.items():
        if size % 8:
            return f"decode kernels need {name} to be a multiple of 8, not {size}"
    if config.head_dim > 256 or config.num_heads > 16 * config.num_kv_heads:
        return (
            "decode attention takes head_dim up to 256 and 16 query heads a key-value head, not head_dim "
            f"{config.head_dim} with {config.num_heads} query heads and {config.num_kv_heads} key-value heads"
        )
    return None


def too_much_memory(needed: int, shape: EngineShape, width: int, shared_limit: int) -> str | None:
    """Why a block does not get the shared memory that it needs, in bytes, or None if it does."""
    if needed <= shared_limit:
        return None
    return (
        f"decode kernels need {needed} bytes of shared memory for {rows(shape)} tokens of width {width}, "
        f"the GPU has {shared_limit}"
    )


def _scratch_layout(arrays: ArrayTable) -> tuple[dict[str, tuple[int, tuple[int, ...], str]], int]:
    """Offset, shape and dtype of every intermediate result, and the bytes of all."""
    layout, offset = {}, 0
    for name, (dimensions, kind) in arrays.items():
        layout[name] = (offset, dimensions, kind)
        size = math.prod(dimensions) * ITEM_SIZES[kind]
        offset += -(-size // _ALIGNMENT) * _ALIGNMENT
    return layout, offset
