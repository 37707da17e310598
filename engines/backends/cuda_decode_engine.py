"""Decode and verify steps, and short prefills, as hand-written kernels: five a layer, each streams its weights once.

They stand behind the same edge as the TensorRT engines of phases "decode" and "verify" and write the same KV rows, so
that all engines share caches and weights. "prefill" takes few tokens of one sequence, as a question behind a long
context that is there already, and gives the logits of one of them. Each new token sees the committed rows, itself, and
in steps of several tokens the new ones that `attention_mask` lets it see; nothing else of the mask is read, so a step
costs what the sequences' lengths ask for, not what the capacity does.

A token's logits and features are the same bits in every batch, in every tree that has its ancestors in order of depth,
and in the decode step that computes it alone: whether a draft is accepted cannot depend on what else was verified.
"""

from __future__ import annotations

from collections.abc import Callable

from edgellm.engines.backends.cuda_kernel_engine import (
    ArrayTable,
    CudaKernelEngine,
    edge_of_layers,
    rows,
    scratch_of_layers,
    too_much_memory,
    unsupported_layers,
)
from edgellm.engines.model.config import DecoderConfig, EngineShape
from edgellm.engines.model.decoder import EMBEDDING, decoder_weights, head_weight_name
from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.decode.attention import attention_shared_bytes
from edgellm.kernels.decode.contract import MAX_ROWS
from edgellm.kernels.decode.linear import CudaDecodeKernels, linear_residual_shared_bytes, norm_linear_shared_bytes
from edgellm.kernels.launch import Launch


class CudaDecodeEngine(CudaKernelEngine):
    """One step of `shape.batch` sequences by `shape.tokens` tokens each."""

    def __init__(self, kernels: CudaDecodeKernels, config: DecoderConfig, shape: EngineShape, dtype: str) -> None:
        self._check_supported(kernels, config, shape, dtype)
        self.config = config
        self.reads_attention_mask = shape.phase != "decode"
        scratch = scratch_of_layers(config, shape, dtype, rows(shape)) | self._own_scratch(
            kernels, config, shape, dtype
        )
        edge = edge_of_decoder(config, shape, dtype)
        super().__init__(kernels, config, shape, edge, scratch, unneeded_at_edge(config, shape))

    @staticmethod
    def unsupported(
        config: DecoderConfig, shape: EngineShape, dtype: str, shared_limit: int | None = None
    ) -> str | None:
        """See `CudaKernelEngine.unsupported`."""
        if shape.phase not in ("decode", "verify", "prefill") or (shape.phase == "decode" and shape.tokens != 1):
            return f"decode kernels decode one token, or verify or prefill some, not {shape.tokens} in {shape.phase}"
        if not 1 <= rows(shape) <= MAX_ROWS or shape.selected != (1 if shape.phase == "prefill" else shape.tokens):
            return (
                f"decode kernels take 1 to {MAX_ROWS} tokens and give logits of all (prefill: of one), not of "
                f"{shape.selected} of {shape.tokens} tokens of {shape.batch} sequences"
            )
        if _selects(shape) and any(layer >= config.num_layers - 1 for layer in config.feature_layers):
            return "decode kernels prefill the last layer for one token, but the draft takes its features for all"
        if shape.phase == "prefill" and config.deepstack_layers:
            return "decode kernels do not add the features of images to layers"
        reason = unsupported_layers(config, shape, dtype)
        if reason is not None or shared_limit is None:
            return reason
        needed = max(
            *(norm_linear_shared_bytes(rows(shape), [config.hidden_size], shared_limit, gated) for gated in (0, 1)),
            linear_residual_shared_bytes(rows(shape), shared_limit),
            attention_shared_bytes(shape.tokens, config.head_dim),
        )
        return too_much_memory(needed, shape, config.hidden_size, shared_limit)

    @staticmethod
    def _own_scratch(kernels: CudaDecodeKernels, config: DecoderConfig, shape: EngineShape, dtype: str) -> ArrayTable:
        """Intermediate results in addition to those of every decoder's layers."""
        if not _selects(shape):
            return {}
        return {"selected": ((shape.batch * shape.selected, config.hidden_size), "float32")}

    def enqueue_by_layer(self, before_layer: Callable[[int], None]) -> None:
        """As `enqueue`; `before_layer` is called before each layer's work is enqueued, and can let that wait."""
        if not self._launches_by_layer:
            self._check_bound()
            launches = self._prepare()
            for number, launch in enumerate(launches):
                if number not in self._layer_starts:  # that one must not overtake what its layer waits for
                    launch.overlap_previous()
            self._launches_by_layer = launches
        for number, launch in enumerate(self._launches_by_layer):
            if number in self._layer_starts:
                before_layer(self._layer_starts[number])
            launch()

    def _prepare(self) -> list[Launch]:
        self._layer_starts: dict[int, int] = {}
        launches: list[Launch] = []
        hidden = self._bound["inputs_embeds"]
        for index in range(self.config.num_layers):
            self._layer_starts[len(launches)] = index
            launches += self._layer(index, hidden)
            hidden = self._scratch["hidden"]
        if _selects(self.shape):
            hidden = self._scratch["selected"]
        return launches + self._head(hidden)

    def _head(self, hidden: DeviceArray) -> list[Launch]:
        """The final norm and the logits of `hidden`."""
        head = self._kernels.norm_linear(
            hidden,
            self._bound["model.norm.weight"],
            self.config.rms_norm_eps,
            self._bound[head_weight_name(self.config)],
            None,
            self._bound["logits"],
            *self._feature(self.config.num_layers),
        )
        return [head]

    def _layer(self, index: int, hidden: DeviceArray) -> list[Launch]:
        """Behind the last layer's attention only the rows whose logits are wanted go on."""
        kernels, bound, scratch = self._kernels, self._bound, self._scratch
        layer = f"model.layers.{index}."
        result, selected = scratch["hidden"], None
        if _selects(self.shape) and index == self.config.num_layers - 1:
            result, selected = scratch["selected"], bound["last_token_ids"]
        attention = f"{layer}self_attn."
        return [
            kernels.norm_linear(
                hidden,
                bound[f"{layer}input_layernorm.weight"],
                self.config.rms_norm_eps,
                bound[f"{attention}qkv_proj.weight"],
                bound.get(f"{attention}qkv_proj.bias"),
                scratch["qkv"],
                # The first attention reads KV rows early, which whatever was enqueued before the step may have written.
                next_early=index > 0,
            ),
            self._attention(index, layer, bound["attention_mask"] if self.reads_attention_mask else None),
            kernels.linear_residual(
                scratch["context"],
                bound[f"{attention}o_proj.weight"],
                bound.get(f"{attention}o_proj.bias"),
                hidden,
                result,
                *self._feature(index),
                selected,
            ),
            *self._mlp(layer, result, scratch["activation"]),
        ]

    def _feature(self, layer: int) -> tuple[DeviceArray | None, int]:
        """Where what enters `layer` (or leaves the final norm) belongs in `hidden_states`, if anywhere."""
        if layer not in self.config.feature_layers:
            return None, 0
        return self._bound["hidden_states"], self.config.feature_layers.index(layer)


def _selects(shape: EngineShape) -> bool:
    """Whether logits of some tokens alone are wanted."""
    return shape.selected < shape.tokens


def unneeded_at_edge(config: DecoderConfig, shape: EngineShape) -> set[str]:
    """The tensors at the edge that such an engine does not read."""
    unneeded = set() if config.tie_word_embeddings else {EMBEDDING}
    return unneeded | ({"attention_mask"} if shape.phase == "decode" else set())


def edge_of_decoder(config: DecoderConfig, shape: EngineShape, dtype: str) -> ArrayTable:
    """Shape and dtype of every tensor at the edge of such an engine."""
    tensors = edge_of_layers(config, shape, dtype)
    for spec in decoder_weights(config):
        tensors[spec.name] = (spec.shape, dtype)
    if _selects(shape):
        tensors["last_token_ids"] = ((shape.batch, shape.selected), "int32")
    tensors["logits"] = ((shape.batch, shape.selected, config.vocab_size), "float32")
    if config.feature_layers:
        width = len(config.feature_layers) * config.hidden_size
        tensors["hidden_states"] = ((shape.batch, shape.tokens, width), dtype)
    return tensors
