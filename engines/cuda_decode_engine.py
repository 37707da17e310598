"""Decode and verify steps as hand-written kernels: five a layer, each reading its weights once at the speed of memory.

They stand behind the same edge as the TensorRT engines of phases "decode" and "verify" and write the same KV rows, so
that all engines share caches and weights. Each new token sees the committed rows, itself, and in a verify step the new
tokens that `attention_mask` lets it see; nothing else of the mask is read, so a step costs what the sequences' lengths
ask for, not what the capacity does.

A token's logits and features are the same bits in every batch, in every tree that has its ancestors in order of depth,
and in the decode step that computes it alone: whether a draft is accepted cannot depend on which of them verified it.
"""

from __future__ import annotations

from collections.abc import Mapping

from edgellm.engines.cuda_device import CudaDevice
from edgellm.engines.decoder import EMBEDDING, decoder_weights, head_weight_name
from edgellm.engines.decoder_config import DecoderConfig, EngineShape
from edgellm.engines.errors import EngineError
from edgellm.kernels.arrays import ITEM_SIZES, DeviceArray
from edgellm.kernels.decode_kernels import (
    MAX_ROWS,
    CudaDecodeKernels,
    Launch,
    attention_partials,
    shared_bytes,
)

_ALIGNMENT = 256


class CudaDecodeEngine:
    """One step of `shape.batch` sequences by `shape.tokens` tokens each.

    Not thread-safe: enqueue from the thread that owns the stream.
    """

    def __init__(self, kernels: CudaDecodeKernels, config: DecoderConfig, shape: EngineShape, dtype: str) -> None:
        reason = unsupported(config, shape, dtype, kernels.shared_limit)
        if reason is not None:
            raise EngineError(f"{shape.name}: {reason}")
        self.shape = shape
        self.config = config
        self._kernels = kernels
        self._dtype = dtype
        self._tensors = _edge(config, shape, dtype)
        self.reads_attention_mask = shape.phase == "verify"
        self._unneeded = set() if config.tie_word_embeddings else {EMBEDDING}
        if not self.reads_attention_mask:
            self._unneeded.add("attention_mask")
        self._bound: dict[str, DeviceArray] = {}
        self._scratch: dict[str, DeviceArray] = {}
        self._layout, self.scratch_bytes = _scratch_layout(config, shape, dtype)
        self._launches: list[Launch] = []

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
        self._scratch["counters"] = device.zeros((_rows(self.shape), self.config.num_kv_heads), "uint32")
        self._launches = []

    def bind(self, bindings: Mapping[str, DeviceArray]) -> None:
        """See `Engine.bind`."""
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
        self._launches = []

    def enqueue(self) -> None:
        """Enqueue on the stream; raises EngineError if a tensor was never bound."""
        if not self._launches:
            self._launches = self._prepare()
        for launch in self._launches:
            launch()

    def _prepare(self) -> list[Launch]:
        unbound = self._tensors.keys() - self._bound.keys() - self._unneeded
        if unbound:
            raise EngineError(f"{self.shape.name}: never bound: {', '.join(sorted(unbound))}")
        if not self._scratch:
            raise EngineError(f"{self.shape.name}: attach was not called")
        for kind in ("k", "v"):
            for index in range(self.config.num_layers):
                present, cache = (self._bound[f"{prefix}{kind}_cache_{index}"] for prefix in ("present_", ""))
                if present.pointer != cache.pointer:
                    raise EngineError(
                        f"{self.shape.name}: present_{kind}_cache_{index} must be bound to the memory of its cache"
                    )
        launches: list[Launch] = []
        hidden = self._bound["inputs_embeds"]
        for index in range(self.config.num_layers):
            hidden = self._layer(index, hidden, launches)
        launches.append(
            self._kernels.norm_linear(
                hidden,
                self._bound["model.norm.weight"],
                self.config.rms_norm_eps,
                self._bound[head_weight_name(self.config)],
                None,
                self._bound["logits"],
                *self._feature(self.config.num_layers),
            )
        )
        for launch in launches:
            launch.overlap_previous()
        return launches

    def _layer(self, index: int, hidden: DeviceArray, launches: list[Launch]) -> DeviceArray:
        kernels, bound, scratch, epsilon = self._kernels, self._bound, self._scratch, self.config.rms_norm_eps
        layer = f"model.layers.{index}."
        attention, mlp = f"{layer}self_attn.", f"{layer}mlp."
        launches.append(
            kernels.norm_linear(
                hidden,
                bound[f"{layer}input_layernorm.weight"],
                epsilon,
                bound[f"{attention}qkv_proj.weight"],
                bound.get(f"{attention}qkv_proj.bias"),
                scratch["qkv"],
                # The first attention reads KV rows early, which whatever was enqueued before the step may have written.
                next_early=index > 0,
            )
        )
        launches.append(
            kernels.attention(
                scratch["qkv"],
                bound.get(f"{attention}q_norm.weight"),
                bound.get(f"{attention}k_norm.weight"),
                epsilon,
                bound["rope_rotary_cos_sin"],
                bound["kvcache_start_index"],
                bound["attention_mask"] if self.reads_attention_mask else None,
                bound[f"k_cache_{index}"],
                bound[f"v_cache_{index}"],
                scratch["partial"],
                scratch["counters"],
                scratch["context"],
            )
        )
        launches.append(
            kernels.linear_residual(
                scratch["context"],
                bound[f"{attention}o_proj.weight"],
                bound.get(f"{attention}o_proj.bias"),
                hidden,
                scratch["hidden"],
                *self._feature(index),
            )
        )
        launches.append(
            kernels.norm_gate_up(
                scratch["hidden"],
                bound[f"{layer}post_attention_layernorm.weight"],
                epsilon,
                bound[f"{mlp}gate_up_proj.weight"],
                bound.get(f"{mlp}gate_up_proj.bias"),
                scratch["activation"],
            )
        )
        launches.append(
            kernels.linear_residual(
                scratch["activation"],
                bound[f"{mlp}down_proj.weight"],
                bound.get(f"{mlp}down_proj.bias"),
                scratch["hidden"],
                scratch["hidden"],
            )
        )
        return scratch["hidden"]

    def _feature(self, layer: int) -> tuple[DeviceArray | None, int]:
        """Where what enters `layer` (or leaves the final norm) belongs in `hidden_states`, if anywhere."""
        if layer not in self.config.feature_layers:
            return None, 0
        return self._bound["hidden_states"], self.config.feature_layers.index(layer)


def unsupported(config: DecoderConfig, shape: EngineShape, dtype: str, shared_limit: int | None = None) -> str | None:
    """Why no such engine can be made, or None if it can.

    `shared_limit` is the shared memory that a block may have on the GPU, in bytes (None: not checked).
    """
    if dtype not in ("float16", "bfloat16"):
        return f"decode kernels compute in float16 and bfloat16, not {dtype}"
    if shape.lora_slots:
        return "decode kernels do not apply LoRA adapters"
    if shape.phase not in ("decode", "verify") or (shape.phase == "decode" and shape.tokens != 1):
        return f"decode kernels decode one token or verify some, not {shape.tokens} in the phase {shape.phase}"
    if not 1 <= _rows(shape) <= MAX_ROWS or shape.selected != shape.tokens:
        return (
            f"decode kernels take 1 to {MAX_ROWS} tokens and give logits of all, not {shape.selected} of "
            f"{shape.tokens} tokens of {shape.batch} sequences"
        )
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
        return f"decode attention takes head_dim up to 256 and 16 query heads a key-value head, not {config}"
    group = config.num_heads // config.num_kv_heads
    needed = shared_bytes(shape.batch, shape.tokens, config.hidden_size, config.head_dim, group)
    if shared_limit is not None and needed > shared_limit:
        return (
            f"decode kernels need {needed} bytes of shared memory for {_rows(shape)} tokens of width "
            f"{config.hidden_size}, the GPU has {shared_limit}"
        )
    return None


def _rows(shape: EngineShape) -> int:
    """New tokens of all sequences."""
    return shape.batch * shape.tokens


def _edge(config: DecoderConfig, shape: EngineShape, dtype: str) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of every tensor at the engine's edge."""
    batch, tokens = shape.batch, shape.tokens
    tensors: dict[str, tuple[tuple[int, ...], str]] = {
        "inputs_embeds": ((batch, tokens, config.hidden_size), dtype),
        "rope_rotary_cos_sin": ((batch, tokens, config.rotary_dim), dtype),
        "attention_mask": ((batch, 1, tokens, shape.key_range), "bool"),
        "kvcache_start_index": ((batch,), "int32"),
    }
    for spec in decoder_weights(config):
        tensors[spec.name] = (spec.shape, dtype)
    cache = (batch, config.num_kv_heads, shape.kv_rows, config.head_dim)
    for index in range(config.num_layers):
        for name in ("k_cache", "v_cache", "present_k_cache", "present_v_cache"):
            tensors[f"{name}_{index}"] = (cache, dtype)
    tensors["logits"] = ((batch, tokens, config.vocab_size), "float32")
    if config.feature_layers:
        tensors["hidden_states"] = ((batch, tokens, len(config.feature_layers) * config.hidden_size), dtype)
    return tensors


def _scratch_layout(
    config: DecoderConfig, shape: EngineShape, dtype: str
) -> tuple[dict[str, tuple[int, tuple[int, ...], str]], int]:
    """Offset, shape and dtype of every intermediate result, and the bytes of all."""
    rows = _rows(shape)
    partials = attention_partials(rows, config.num_heads, config.num_kv_heads, shape.kv_rows, config.head_dim)
    arrays: dict[str, tuple[tuple[int, ...], str]] = {
        "hidden": ((rows, config.hidden_size), "float32"),
        "qkv": ((rows, config.query_size + 2 * config.kv_size), "float32"),
        "context": ((rows, config.query_size), dtype),
        "activation": ((rows, config.intermediate_size), dtype),
        "partial": ((partials,), "float32"),
    }
    layout, offset = {}, 0
    for name, (dimensions, kind) in arrays.items():
        layout[name] = (offset, dimensions, kind)
        size = ITEM_SIZES[kind]
        for dimension in dimensions:
            size *= dimension
        offset += -(-size // _ALIGNMENT) * _ALIGNMENT
    return layout, offset
