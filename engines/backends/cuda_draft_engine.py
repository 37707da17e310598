"""Propose and accept steps of an EAGLE-3 draft head as hand-written kernels.

They stand behind the same edge as the TensorRT engines of these phases, as `CudaDecodeEngine` does for the base. A
propose step sees what `attention_mask` lets it see, of the rows before its own too: the nodes of earlier levels stand
there. An accept step writes the KV rows of all its tokens; of what follows the attention it computes the selected rows
alone.
"""

from __future__ import annotations

from edgellm.engines.backends.cuda_kernel_engine import (
    ArrayTable,
    CudaKernelEngine,
    edge_of_layers,
    rows,
    scratch_of_layers,
    too_much_memory,
    unsupported_layers,
)
from edgellm.engines.model.config import DraftConfig, EngineShape
from edgellm.engines.model.draft_decoder import draft_engine_weights, draft_weights
from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.decode.attention import attention_shared_bytes
from edgellm.kernels.decode.contract import MAX_ROWS
from edgellm.kernels.decode.linear import CudaDecodeKernels, linear_residual_shared_bytes, norm_linear_shared_bytes
from edgellm.kernels.launch import Launch

_LAYER = "layers.0."
_ACCEPT, _PROPOSE = "accept", "propose"


class CudaDraftEngine(CudaKernelEngine):
    """One step of `shape.batch` sequences: `propose` of `shape.tokens` nodes, or `accept` of as many tokens, each."""

    reads_attention_mask = True

    def __init__(self, kernels: CudaDecodeKernels, config: DraftConfig, shape: EngineShape, dtype: str) -> None:
        self._check_supported(kernels, config, shape, dtype)
        self.config = config
        edge = _edge(config, shape, dtype)
        super().__init__(kernels, config.decoder, shape, edge, _scratch(config, shape, dtype), set())

    @staticmethod
    def unsupported(config: DraftConfig, shape: EngineShape, dtype: str, shared_limit: int | None = None) -> str | None:
        """See `CudaKernelEngine.unsupported`."""
        if config.generation == "1":
            return "draft kernels compute heads of EAGLE-3, not of EAGLE-1"
        if shape.phase not in (_ACCEPT, _PROPOSE):
            return f"draft kernels propose and accept, they have no phase {shape.phase}"
        if config.feature_norm != "none" and shape.phase == _ACCEPT:
            return f"draft kernels do not norm the features, which this head wants (norm: {config.feature_norm})"
        if not 1 <= rows(shape) <= MAX_ROWS or shape.selected != (shape.tokens if shape.phase == _PROPOSE else 1):
            return (
                f"draft kernels take 1 to {MAX_ROWS} tokens and give logits of all they propose or of one they accept, "
                f"not {shape.selected} of {shape.tokens} tokens of {shape.batch} sequences"
            )
        decoder = config.decoder
        reason = unsupported_layers(decoder, shape, dtype)
        if reason is not None or shared_limit is None:
            return reason
        hidden = config.hidden_size
        needed = max(
            norm_linear_shared_bytes(rows(shape), [hidden, hidden], shared_limit),
            *(norm_linear_shared_bytes(rows(shape), [hidden], shared_limit, gated) for gated in (False, True)),
            linear_residual_shared_bytes(rows(shape), shared_limit),
            attention_shared_bytes(shape.tokens, decoder.head_dim),
        )
        return too_much_memory(needed, shape, 2 * config.hidden_size, shared_limit)

    def _prepare(self) -> list[Launch]:
        kernels, bound, scratch, epsilon = self._kernels, self._bound, self._scratch, self._decoder.rms_norm_eps
        attention, hidden = f"{_LAYER}self_attn.", scratch["hidden"]
        launches: list[Launch] = []
        feature = self._feature(launches)
        normed = scratch.get("normed")
        launches.append(
            kernels.norms_linear(
                bound["inputs_embeds"],
                bound[f"{_LAYER}input_layernorm.weight"],
                feature,
                bound[f"{_LAYER}hidden_norm.weight"],
                epsilon,
                bound[f"{attention}qkv_proj.weight"],
                bound.get(f"{attention}qkv_proj.bias"),
                scratch["qkv"],
                normed,
            )
        )
        launches.append(self._attention(0, _LAYER, bound["attention_mask"], masks_all=True))
        launches.append(
            kernels.linear_residual(
                scratch["context"],
                bound[f"{attention}o_proj.weight"],
                bound.get(f"{attention}o_proj.bias"),
                feature if normed is None else normed,
                hidden,
                selected=bound.get("last_token_ids"),
            )
        )
        launches += self._mlp(_LAYER, hidden, scratch["activation"])
        launches.append(
            kernels.norm_linear(
                hidden,
                bound["norm.weight"],
                epsilon,
                bound[self.config.head_name],
                None,
                bound["logits"],
                bound["hidden_states"],
                keeps_raw=not self.config.feed_back_normed,
            )
        )
        return launches

    def _feature(self, launches: list[Launch]) -> DeviceArray:
        """What is concatenated to the embeddings; in an accept step `launches` gets what computes it."""
        if self.shape.phase == _PROPOSE:
            return self._bound["hidden_states_from_draft"]
        feature, bias = self._scratch["feature"], self._bound.get("fc.bias")
        features = self._bound["hidden_states_input"]
        launches.append(self._kernels.linear_residual(features, self._bound["fc.weight"], bias, None, feature))
        return feature


def _edge(config: DraftConfig, shape: EngineShape, dtype: str) -> ArrayTable:
    """Shape and dtype of every tensor at the engine's edge."""
    batch, tokens, selected, hidden = shape.batch, shape.tokens, shape.selected, config.hidden_size
    tensors = edge_of_layers(config.decoder, shape, dtype)
    if shape.phase == _PROPOSE:
        tensors["hidden_states_from_draft"] = ((batch, tokens, hidden), dtype)
    else:
        tensors["hidden_states_input"] = ((batch, tokens, config.feature_size), dtype)
        if selected < tokens:
            tensors["last_token_ids"] = ((batch, selected), "int32")
    own = {spec.name: (spec.shape, dtype) for spec in draft_weights(config)}
    base_head = {config.base_head: ((config.decoder.vocab_size, hidden), dtype)}
    tensors |= draft_engine_weights(config, shape.phase, own, base_head)
    tensors["logits"] = ((batch, selected, config.draft_vocab_size), "float32")
    tensors["hidden_states"] = ((batch, selected, hidden), dtype)
    return tensors


def _scratch(config: DraftConfig, shape: EngineShape, dtype: str) -> ArrayTable:
    """Shape and dtype of every intermediate result."""
    count, hidden = rows(shape), config.hidden_size
    arrays = scratch_of_layers(config.decoder, shape, dtype, shape.batch * shape.selected)
    if shape.phase == _ACCEPT:
        arrays["feature"] = ((count, hidden), "float32")
    if config.norm_before_residual:
        arrays["normed"] = ((count, hidden), dtype)
    return arrays
