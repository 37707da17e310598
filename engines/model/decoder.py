"""The program of decoder-only transformers: Llama's layers, and what other families change in them by parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from edgellm.engines.model.config import HEADS, DecoderConfig, EngineShape, WeightSpec
from edgellm.engines.model.program import (
    Add,
    Attention,
    Input,
    Keep,
    Linear,
    LinearResidual,
    Norm,
    NormLinear,
    Program,
    Scale,
    Step,
    single_weight,
    token_inputs,
)
from edgellm.engines.model.states import Edge
from edgellm.kernels.quantization.packed_weight import WeightFormat

#: Columns of a packed head of 4 bits that may share a scale, best first: fewer are better, and take more memory.
HEAD_GROUPS = (128, 64, 32)

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class LayerWeights:
    """Makes the weights and steps of a layer: `prefix` begins their names, `source` those in the checkpoint."""

    def __init__(self, config: DecoderConfig, prefix: str, source: str) -> None:
        self._config, self._prefix, self._source = config, prefix, source

    def norm(self, name: str, size: int | None = None) -> Norm:
        """An RMS norm, by default of the hidden size."""
        config = self._config
        weight = single_weight(
            f"{self._prefix}{name}.weight", size or config.hidden_size, source=f"{self._source}{name}.weight"
        )
        return Norm(weight, config.rms_norm_eps, offset=config.norm_offset)

    def linear(self, name: str, parts: Mapping[str, int], columns: int, bias: bool) -> Linear:
        """A linear layer that `parts` (names and rows in the checkpoint) fill one behind the other."""
        folder = name[: name.rindex(".") + 1]

        def spec(kind: str, *width: int) -> WeightSpec:
            sources = tuple((f"{self._source}{folder}{part}.{kind}", (rows, *width)) for part, rows in parts.items())
            return WeightSpec(f"{self._prefix}{name}.{kind}", (sum(parts.values()), *width), sources)

        return Linear(f"{self._prefix}{name}", spec("weight", columns), spec("bias") if bias else None)

    def attention(
        self, index: int, inputs: tuple[Input, ...], rotary: int, masks_all: bool = False, keep: Keep | None = None
    ) -> list[Step]:
        """From the `inputs` of the q, k and v projections to the value "context"; see `Attention`, `NormLinear`."""
        config = self._config
        parts = {"q_proj": config.query_size, "k_proj": config.kv_size, "v_proj": config.kv_size}
        if config.fused_projections:
            parts = {"qkv_proj": sum(parts.values())}
        qkv = self.linear("self_attn.qkv_proj", parts, len(inputs) * config.hidden_size, config.attention_bias)
        size, scale = config.head_dim, config.attention_scale
        attention = Attention(
            "context",
            "qkv",
            index,
            (config.num_heads, config.num_kv_heads, size),
            size**-0.5 if scale is None else scale,
            rotary,
            self.norm("self_attn.q_norm", size) if config.qk_norm else None,
            self.norm("self_attn.k_norm", size) if config.qk_norm else None,
            masks_all,
        )
        return [NormLinear("qkv", inputs, qkv, keep=keep), attention]

    def residual(self, residual: str, selects: bool, keep: Keep | None = None) -> list[Step]:
        """From "context" and the `residual` through the gated MLP to "hidden", or with `selects` to "selected"."""
        config = self._config
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        parts = {"gate_up_proj": 2 * inner} if config.fused_projections else {"gate_proj": inner, "up_proj": inner}
        output = self.linear("self_attn.o_proj", {"o_proj": hidden}, config.query_size, config.attention_output_bias)
        result, activation = ("selected", "selected_activation") if selects else ("hidden", "activation")
        normed = Input(result, (self.norm("post_attention_layernorm"),))
        gate_up = self.linear("mlp.gate_up_proj", parts, hidden, bias)
        down = self.linear("mlp.down_proj", {"down_proj": hidden}, inner, bias)
        return [
            LinearResidual(result, "context", output, residual, config.residual_scale, keep, selects),
            NormLinear(activation, (normed,), gate_up, config.hidden_act, gated=True),
            LinearResidual(result, activation, down, result, config.residual_scale),
        ]


def decoder_program(config: DecoderConfig, shape: EngineShape) -> Program:
    """One step of a decoder.

    Its outputs are `logits` [B, selected, V] float32 and, with `feature_layers`, `hidden_states` [B, T, n H]. Behind
    the last layer's attention only the rows that get logits go on, unless features of all are taken behind it.
    """
    hidden, layers, taps = config.hidden_size, config.num_layers, config.feature_layers
    selects = shape.selected < shape.tokens
    selects_late = selects and (layers in taps or config.deepstack_layers >= layers)
    inputs = token_inputs(shape, hidden, config.rotary_dim)
    steps: list[Step] = []
    value = "inputs_embeds"
    if config.embedding_scale != 1.0:
        steps.append(Scale("hidden", value, config.embedding_scale))
        value = "hidden"
    for index in range(layers):
        selecting = selects and not selects_late and index == layers - 1
        steps += decoder_layer(config, index, value, selecting, _tap(taps, index, raw=True))
        value = steps[-1].output
        if shape.phase == "prefill" and index < config.deepstack_layers:
            name = f"deepstack_features_{index}"
            inputs[name] = ((shape.batch, shape.tokens, hidden), "compute")
            steps.append(Add("hidden", "hidden", name))
    final = LayerWeights(config, "model.", "model.").norm("norm")
    name = head_weight_name(config)
    head = Linear(name.removesuffix(".weight"), single_weight(name, config.vocab_size, hidden))
    keep = _tap(taps, layers)
    normed = Input(value, (final,))
    steps.append(NormLinear("logits", (normed,), head, scale=config.logits_scale, keep=keep, selects=selects_late))
    outputs: Edge = {"logits": ((shape.batch, shape.selected, config.vocab_size), "float32")}
    if taps:
        outputs["hidden_states"] = ((shape.batch, shape.tokens, len(taps) * hidden), "compute")
    return Program(shape, inputs, tuple(steps), outputs, wide_residual=True)


def decoder_layer(
    config: DecoderConfig, index: int, value: str, selects: bool = False, keep: Keep | None = None
) -> list[Step]:
    """The steps of one layer, from the residual stream `value` to "hidden", or with `selects` to "selected"."""
    layer = LayerWeights(config, f"model.layers.{index}.", f"model.layers.{index}.")
    normed = Input(value, (layer.norm("input_layernorm"),))
    steps = layer.attention(index, (normed,), 0 if index in config.nope_layers else config.rotary_dim)
    return steps + layer.residual(value, selects, keep)


def _tap(taps: tuple[int, ...], layer: int, raw: bool = False) -> Keep | None:
    """Where what enters `layer` (or leaves the final norm) belongs in `hidden_states`, if anywhere."""
    return Keep("hidden_states", taps.index(layer), raw) if layer in taps else None


def head_weight_name(config: DecoderConfig) -> str:
    """The weight that turns hidden states into logits: the embedding table itself where the two are tied, unless the
    head is packed."""
    return EMBEDDING if config.tie_word_embeddings and config.head == HEADS[0] else HEAD


def embedding_name(config: DecoderConfig) -> str:
    """The weight whose rows embed tokens."""
    return HEAD if config.embeds_by_head else EMBEDDING


def decoder_weights(config: DecoderConfig) -> list[WeightSpec]:
    """Every weight of the decoder: the embedding, then those of its program in order of use."""
    table = single_weight(embedding_name(config), config.vocab_size, config.hidden_size)
    program = decoder_program(config, EngineShape("decode", 1, 1, 1, 1))
    return list(({table.name: table} | program.weights).values())


def head_format(head: str, columns: int, dtype: str) -> WeightFormat | None:
    """That of a head that is one of `HEADS`, with rows of so many columns, of a model that computes in `dtype`.

    int8: a scale for each row; int4: for each 128, 64 or 32 columns, the most that divide a row. None for one as
    published. Raises ValueError where none of these divides.
    """
    if head == HEADS[0]:
        return None
    if head == "int8":
        return WeightFormat("int8", None, False, dtype)
    group = next((size for size in HEAD_GROUPS if columns % size == 0), None)
    if group is None:
        raise ValueError(f"rows of {columns} columns are no whole groups of {', '.join(map(str, HEAD_GROUPS))}")
    return WeightFormat("int4", group, False, dtype)


def as_published(config: DecoderConfig) -> DecoderConfig:
    """The same without a packed head."""
    return replace(config, head=HEADS[0], embeds_by_head=False)
