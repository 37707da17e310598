"""Decode and verify steps of up to 64 tokens, of trees or of several sequences, as hand-written kernels: seven a layer.

They stand behind the same edge as `CudaDecodeEngine` and give every token the same bits as it does, so that what is
accepted does not depend on the size of a tree. The norms are launches of their own here: their results serve every
block of the linear layer that follows. From a dozen tokens on that is faster. It also takes less shared memory: GPUs
whose blocks get little of it, as those of RTX PCs, take wide models' steps of fewer tokens so, too.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from edgellm.engines.backends.cuda_decode_engine import CudaDecodeEngine, edge_of_decoder, unneeded_at_edge
from edgellm.engines.backends.cuda_device import CudaDevice
from edgellm.engines.backends.cuda_kernel_engine import (
    ArrayTable,
    CudaKernelEngine,
    edge_of_layers,
    rows,
    too_much_memory,
    unsupported_layers,
)
from edgellm.engines.model.config import DecoderConfig, EngineShape
from edgellm.engines.model.decoder import head_weight_name
from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.decode.attention import attention_shared_bytes
from edgellm.kernels.decode.contract import MAX_ROWS, MAX_TILED_ROWS, padded_columns
from edgellm.kernels.decode.linear import CudaDecodeKernels, linear_residual_shared_bytes, norm_shared_bytes
from edgellm.kernels.decode.tiled_linear import CudaTiledKernels, tiled_shared_bytes
from edgellm.kernels.launch import Launch


class CudaTiledEngine(CudaDecodeEngine):
    """One step of `shape.batch` sequences by `shape.tokens` tokens each."""

    def __init__(self, kernels: CudaDecodeKernels, config: DecoderConfig, shape: EngineShape, dtype: str) -> None:
        super().__init__(kernels, config, shape, dtype)
        self._tiled = CudaTiledKernels(kernels)
        count, limit = rows(shape), kernels.shared_limit
        streams = count <= MAX_ROWS and linear_residual_shared_bytes(count, limit) <= limit
        # What needs no norm is faster by the kernels of few rows, as far as they go.
        self._residual_kernels: CudaDecodeKernels | CudaTiledKernels = kernels if streams else self._tiled

    @staticmethod
    def unsupported(
        config: DecoderConfig, shape: EngineShape, dtype: str, shared_limit: int | None = None
    ) -> str | None:
        """See `CudaKernelEngine.unsupported`."""
        if shape.phase not in ("decode", "verify") or (shape.phase == "decode" and shape.tokens != 1):
            return f"tiled decode kernels decode one token or verify some, not {shape.tokens} in {shape.phase}"
        if not 1 <= rows(shape) <= MAX_TILED_ROWS or shape.selected != shape.tokens:
            return (
                f"tiled decode kernels take 1 to {MAX_TILED_ROWS} tokens and give logits of all, not of "
                f"{shape.selected} of {shape.tokens} tokens of {shape.batch} sequences"
            )
        reason = unsupported_layers(config, shape, dtype)
        if reason is not None or shared_limit is None:
            return reason
        needed = max(
            tiled_shared_bytes(shared_limit),
            attention_shared_bytes(shape.tokens, config.head_dim),
            norm_shared_bytes(config.hidden_size),
        )
        return too_much_memory(needed, shape, config.hidden_size, shared_limit)

    @staticmethod
    def _own_scratch(kernels: CudaDecodeKernels, config: DecoderConfig, shape: EngineShape, dtype: str) -> ArrayTable:
        return {"normed": ((rows(shape), padded_columns(config.hidden_size)), dtype)}

    def _head(self, hidden: DeviceArray) -> list[Launch]:
        return [
            self._norm(hidden, "model.norm.weight", self.config.num_layers),
            self._linear(head_weight_name(self.config), None, self._bound["logits"]),
        ]

    def _layer(self, index: int, hidden: DeviceArray) -> list[Launch]:
        tiled, bound, scratch = self._tiled, self._bound, self._scratch
        layer = f"model.layers.{index}."
        attention = f"{layer}self_attn."
        return [
            # The first attention reads KV rows early, which whatever was enqueued before the step may have written.
            self._norm(hidden, f"{layer}input_layernorm.weight", next_early=index > 0),
            self._linear(f"{attention}qkv_proj.weight", f"{attention}qkv_proj.bias", scratch["qkv"]),
            self._attention(index, layer, bound["attention_mask"] if self.reads_attention_mask else None),
            self._linear_residual(scratch["context"], f"{attention}o_proj", hidden, *self._feature(index)),
            self._norm(scratch["hidden"], f"{layer}post_attention_layernorm.weight"),
            tiled.gate_up(
                scratch["normed"],
                bound[f"{layer}mlp.gate_up_proj.weight"],
                bound.get(f"{layer}mlp.gate_up_proj.bias"),
                scratch["activation"],
            ),
            self._linear_residual(scratch["activation"], f"{layer}mlp.down_proj", scratch["hidden"]),
        ]

    def _norm(
        self, hidden: DeviceArray, weight: str, feature_layer: int | None = None, next_early: bool = True
    ) -> Launch:
        features, place = (None, 0) if feature_layer is None else self._feature(feature_layer)
        normed = self._scratch["normed"]
        epsilon = self.config.rms_norm_eps
        return self._tiled.norm(hidden, self._bound[weight], epsilon, normed, features, place, next_early=next_early)

    def _linear(self, weight: str, bias: str | None, output: DeviceArray) -> Launch:
        bound, scratch = self._bound, self._scratch
        return self._tiled.linear(scratch["normed"], bound[weight], None if bias is None else bound.get(bias), output)

    def _linear_residual(
        self,
        x: DeviceArray,
        layer: str,
        residual: DeviceArray,
        features: DeviceArray | None = None,
        place: int = 0,
    ) -> Launch:
        bound, scratch = self._bound, self._scratch
        return self._residual_kernels.linear_residual(
            x,
            bound[f"{layer}.weight"],
            bound.get(f"{layer}.bias"),
            residual,
            scratch["hidden"],
            features,
            place,
        )


#: Up to so many tokens the engine that norms while it multiplies is the faster one (`kernel_speed.py steps`, H200).
_FEW_ROWS = 12


class CudaVerifyPasses(CudaKernelEngine):
    """One verify step of `shape.batch` sequences by `shape.tokens` tokens each."""

    reads_attention_mask = True

    def __init__(self, kernels: CudaDecodeKernels, config: DecoderConfig, shape: EngineShape, dtype: str) -> None:
        self._check_supported(kernels, config, shape, dtype)
        self._passes = [
            (slots, decoder_engine_kind(config, part, dtype, kernels.shared_limit)(kernels, config, part, dtype))
            for slots, part in _passes(shape)
        ]
        edge = edge_of_decoder(config, shape, dtype)
        super().__init__(kernels, config, shape, edge, {}, unneeded_at_edge(config, shape))
        self.scratch_bytes = max(engine.scratch_bytes for _, engine in self._passes)
        self._of_slots = {*edge_of_layers(config, shape, dtype), "logits", "hidden_states"}

    @staticmethod
    def unsupported(
        config: DecoderConfig, shape: EngineShape, dtype: str, shared_limit: int | None = None
    ) -> str | None:
        """See `CudaKernelEngine.unsupported`."""
        if shape.phase != "verify" or not 2 <= shape.tokens <= MAX_TILED_ROWS < rows(shape):
            return (
                f"passes of decode kernels verify trees of 2 to {MAX_TILED_ROWS} tokens with more than "
                f"{MAX_TILED_ROWS} of all sequences, not {shape.tokens} tokens of {shape.batch} sequences in "
                f"{shape.phase}"
            )
        for _, part in _passes(shape):
            kind = decoder_engine_kind(config, part, dtype, shared_limit)
            reason = kind.unsupported(config, part, dtype, shared_limit)
            if reason is not None:
                return reason
        return None

    def attach(self, device: CudaDevice, scratch: DeviceArray) -> None:
        """See `CudaKernelEngine.attach`; the passes share the scratch."""
        super().attach(device, scratch)
        for _, engine in self._passes:
            engine.attach(device, scratch)

    def _prepare(self) -> list[Launch]:
        launches: list[Launch] = []
        for slots, engine in self._passes:
            engine.bind(
                {name: array[slots] if name in self._of_slots else array for name, array in self._bound.items()}
            )
            launches += engine._prepare()
        return launches


def decoder_engine_kind(
    config: DecoderConfig, shape: EngineShape, dtype: str, shared_limit: int | None = None
) -> type[CudaDecodeEngine] | type[CudaVerifyPasses]:
    """The fastest engine of a base model's layers for a shape; where none supports it, one whose reason tells why."""
    if shape.phase == "prefill":
        return CudaDecodeEngine
    if rows(shape) > MAX_TILED_ROWS:
        return CudaVerifyPasses
    kinds = (CudaDecodeEngine, CudaTiledEngine) if rows(shape) <= _FEW_ROWS else (CudaTiledEngine, CudaDecodeEngine)
    supporting = (kind for kind in kinds if kind.unsupported(config, shape, dtype, shared_limit) is None)
    return next(supporting, CudaTiledEngine)


def _passes(shape: EngineShape) -> list[tuple[slice, EngineShape]]:
    """The slots of each pass, as even as they can be, and its shape."""
    count = -(-shape.batch // (MAX_TILED_ROWS // shape.tokens))
    ends = [shape.batch * number // count for number in range(count + 1)]
    return [(slice(start, end), replace(shape, batch=end - start)) for start, end in pairwise(ends)]
