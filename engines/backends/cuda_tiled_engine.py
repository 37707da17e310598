"""Decode and verify steps of up to 64 tokens, of trees or of several sequences, as hand-written kernels: seven a layer.

They stand behind the same edge as `CudaDecodeEngine` and give every token the same bits as it does, so that what is
accepted does not depend on the size of a tree. The norms are launches of their own here: their results serve every
block of the linear layer that follows. From a dozen tokens on that is faster. It also takes less shared memory: GPUs
whose blocks get little of it, as those of RTX PCs, take wide models' steps of fewer tokens so, too.
"""

from __future__ import annotations

from edgellm.engines.backends.cuda_decode_engine import CudaDecodeEngine
from edgellm.engines.backends.cuda_kernel_engine import ArrayTable, rows, too_much_memory, unsupported_layers
from edgellm.engines.model.decoder import head_weight_name
from edgellm.engines.model.config import DecoderConfig, EngineShape
from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.decode_kernels import (
    MAX_ROWS,
    CudaDecodeKernels,
    Launch,
    padded_columns,
    streamed_shared_bytes,
)
from edgellm.kernels.tiled_decode_kernels import MAX_TILED_ROWS, CudaTiledKernels, tiled_shared_bytes


class CudaTiledEngine(CudaDecodeEngine):
    """One step of `shape.batch` sequences by `shape.tokens` tokens each."""

    def __init__(self, kernels: CudaDecodeKernels, config: DecoderConfig, shape: EngineShape, dtype: str) -> None:
        super().__init__(kernels, config, shape, dtype)
        self._tiled = CudaTiledKernels(kernels)
        count, limit = rows(shape), kernels.shared_limit
        streams = count <= MAX_ROWS and streamed_shared_bytes(count, limit) <= limit
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
        needed = tiled_shared_bytes(shape.tokens, config.hidden_size, config.head_dim, shared_limit)
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
