"""The decode step as one hand-written kernel that reads every weight once, at the speed of memory.

It stands behind the same edge as the TensorRT engine of phase "decode" and writes the same KV rows, so that prefill
and decode engines share caches and weights. `attention_mask` is accepted and not read: the rows that attention sees
follow from `kvcache_start_index`, so a step costs what the sequence's length asks for, not what the capacity does.
A sequence's logits are the same bits in every batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from edgellm.engines.cuda_device import CudaDevice
from edgellm.engines.decoder import EMBEDDING, decoder_weights, head_weight_name
from edgellm.engines.decoder_config import DecoderConfig, EngineShape
from edgellm.engines.errors import EngineError, KernelError
from edgellm.kernels.arrays import ITEM_SIZES, DeviceArray
from edgellm.kernels.decode_kernels import (
    CudaDecodeKernels,
    DecodeDimensions,
    DecodeLayer,
    DecodeStep,
    Launch,
    layer_table,
    shared_memory,
)

_ALIGNMENT = 256

#: Weight names of a layer by the kernel's names of them.
_LAYER_WEIGHTS = {
    "input_norm": "input_layernorm.weight",
    "qkv": "self_attn.qkv_proj.weight",
    "qkv_bias": "self_attn.qkv_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "o": "self_attn.o_proj.weight",
    "o_bias": "self_attn.o_proj.bias",
    "post_attention_norm": "post_attention_layernorm.weight",
    "gate_up": "mlp.gate_up_proj.weight",
    "gate_up_bias": "mlp.gate_up_proj.bias",
    "down": "mlp.down_proj.weight",
    "down_bias": "mlp.down_proj.bias",
}


class CudaDecodeEngine:
    """One decode step of `shape.batch` sequences. Not thread-safe: enqueue from the thread that owns the stream."""

    def __init__(self, kernels: CudaDecodeKernels, config: DecoderConfig, shape: EngineShape, dtype: str) -> None:
        reason = unsupported(config, shape, dtype, kernels.shared_limit)
        if reason is not None:
            raise EngineError(f"{shape.name}: {reason}")
        self.shape = shape
        self._kernels = kernels
        self._config = config
        self._dimensions = decode_dimensions(config, shape)
        self._tensors = _edge(config, shape, dtype)
        self._unneeded = {"attention_mask"} if config.tie_word_embeddings else {"attention_mask", EMBEDDING}
        self._bound: dict[str, DeviceArray] = {}
        self._layout, self.scratch_bytes = _scratch_layout(self._dimensions, dtype)
        self._scratch: dict[str, DeviceArray] = {}
        self._device: CudaDevice | None = None
        self._table: DeviceArray | None = None
        self._launch: Launch | None = None

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """Names of all inputs and outputs."""
        return tuple(self._tensors)

    def attach(self, device: CudaDevice, scratch: DeviceArray) -> None:
        """Use `scratch` (at least `scratch_bytes`, shared with other engines) and the device's stream."""
        if scratch.nbytes < self.scratch_bytes:
            raise EngineError(f"{self.shape.name} needs {self.scratch_bytes} bytes of scratch, got {scratch.nbytes}")
        self._device = device
        self._scratch = {
            name: DeviceArray(scratch.pointer + offset, shape, dtype, scratch)
            for name, (offset, shape, dtype) in self._layout.items()
        }
        # Their own memory, since other engines write the shared scratch: they must keep their values between steps.
        self._scratch["counters"] = device.zeros((self.shape.batch, self._dimensions.kv_heads), "uint32")
        self._scratch["barrier"] = device.zeros((1,), "uint64")
        self._table = device.empty((self._dimensions.num_layers, len(DecodeLayer.__dataclass_fields__)), "uint64")
        self._launch = None

    def bind(self, bindings: Mapping[str, DeviceArray]) -> None:
        """See `Engine.bind`."""
        for name, array in bindings.items():
            if name not in self._tensors:
                raise EngineError(f"{self.shape.name} has no tensor {name!r}; it has {', '.join(self._tensors)}")
            expected_shape, expected_dtype = self._tensors[name]
            if array.shape != expected_shape or array.dtype != expected_dtype:
                raise EngineError(
                    f"{self.shape.name}: {name} is {array.dtype} {array.shape}, "
                    f"the engine expects {expected_dtype} {expected_shape}"
                )
            if array.pointer % 16 and name not in ("attention_mask", "kvcache_start_index"):
                raise EngineError(f"{self.shape.name}: {name} is not aligned to 16 bytes; allocate it on its own")
            self._bound[name] = array
        self._launch = None

    def enqueue(self) -> None:
        """Enqueue on the stream; raises EngineError if a tensor was never bound.

        The first call after `bind` uploads a table of addresses: make one before capturing a graph.
        """
        if self._launch is None:
            self._launch = self._prepare()
        self._launch()

    def _prepare(self) -> Launch:
        unbound = self._tensors.keys() - self._bound.keys() - self._unneeded
        if unbound:
            raise EngineError(f"{self.shape.name}: never bound: {', '.join(sorted(unbound))}")
        if self._device is None or self._table is None:
            raise EngineError(f"{self.shape.name}: attach was not called")
        bound = self._bound
        step = DecodeStep(
            dimensions=self._dimensions,
            epsilon=self._config.rms_norm_eps,
            layers=tuple(self._layer(index) for index in range(self._dimensions.num_layers)),
            embeddings=bound["inputs_embeds"],
            cos_sin=bound["rope_rotary_cos_sin"],
            start_index=bound["kvcache_start_index"],
            norm=bound["model.norm.weight"],
            head=bound[head_weight_name(self._config)],
            logits=bound["logits"],
            **self._scratch,
        )
        self._device.upload(self._table, layer_table(step))
        return self._kernels.prepare(step, self._table)

    def _layer(self, index: int) -> DecodeLayer:
        weights = {name: self._bound.get(f"model.layers.{index}.{source}") for name, source in _LAYER_WEIGHTS.items()}
        caches = {}
        for name in ("k_cache", "v_cache"):
            caches[name] = self._bound[f"{name}_{index}"]
            if self._bound[f"present_{name}_{index}"].pointer != caches[name].pointer:
                raise EngineError(f"{self.shape.name}: present_{name}_{index} must be bound to the memory of its cache")
        return DecodeLayer(**weights, **caches)


def decode_dimensions(config: DecoderConfig, shape: EngineShape) -> DecodeDimensions:
    """The kernel's sizes for a model and an engine shape."""
    return DecodeDimensions(
        num_layers=config.num_layers,
        batch=shape.batch,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_size=config.head_dim,
        rotary=config.rotary_dim,
        kv_rows=shape.kv_rows,
    )


def unsupported(config: DecoderConfig, shape: EngineShape, dtype: str, shared_limit: int) -> str | None:
    """Why no such engine can be made on a GPU with `shared_limit` bytes of shared memory a block, or None if it can."""
    if dtype not in ("float16", "bfloat16"):
        return f"the decode kernel computes in float16 and bfloat16, not {dtype}"
    if shape.tokens != 1:
        return f"the decode kernel takes one token of each sequence, not {shape.tokens}"
    if config.feature_layers:
        return "the decode kernel does not output hidden_states"
    dimensions = decode_dimensions(config, shape)
    problem = dimensions.problem()
    if problem is not None:
        return problem
    try:
        shared_memory(dimensions, shared_limit)
    except KernelError as error:
        return str(error)
    return None


def _edge(config: DecoderConfig, shape: EngineShape, dtype: str) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of every tensor at the engine's edge."""
    batch = shape.batch
    tensors: dict[str, tuple[tuple[int, ...], str]] = {
        "inputs_embeds": ((batch, 1, config.hidden_size), dtype),
        "rope_rotary_cos_sin": ((batch, 1, config.rotary_dim), dtype),
        "attention_mask": ((batch, 1, 1, shape.key_range), "bool"),
        "kvcache_start_index": ((batch,), "int32"),
    }
    for spec in decoder_weights(config):
        tensors[spec.name] = (spec.shape, dtype)
    cache = (batch, config.num_kv_heads, shape.kv_rows, config.head_dim)
    for index in range(config.num_layers):
        for name in ("k_cache", "v_cache", "present_k_cache", "present_v_cache"):
            tensors[f"{name}_{index}"] = (cache, dtype)
    tensors["logits"] = ((batch, 1, config.vocab_size), "float32")
    return tensors


def _scratch_layout(
    dimensions: DecodeDimensions, dtype: str
) -> tuple[dict[str, tuple[int, tuple[int, ...], str]], int]:
    """Offset, shape and dtype of every intermediate result, and the bytes of all."""
    batch = dimensions.batch
    arrays: dict[str, tuple[tuple[int, ...], str]] = {
        "hidden": ((batch, dimensions.hidden_size), "float32"),
        "qkv": ((batch, dimensions.qkv_size), "float32"),
        "context": ((batch, dimensions.query_size), dtype),
        "activation": ((batch, dimensions.intermediate_size), dtype),
        "partial": (dimensions.partial_shape, "float32"),
    }
    layout: dict[str, tuple[int, tuple[int, ...], str]] = {}
    offset = 0
    for name, (shape, kind) in arrays.items():
        layout[name] = (offset, shape, kind)
        offset += -(-math.prod(shape) * ITEM_SIZES[kind] // _ALIGNMENT) * _ALIGNMENT
    return layout, offset
