"""The programs of drafts: EAGLE-1 and 2 (Li et al. 2024), EAGLE-3 (Li et al. 2025) and 3.1, the heads for multi-token
prediction that ship inside checkpoints of Qwen3.5 and Nemotron-H (after DeepSeek-AI 2024), and DFlash (Chen et al.
2026)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from edgellm.engines.model.config import DRAFT_EMBEDDING, MTP, DecoderConfig, DraftConfig, WeightSpec
from edgellm.engines.model.decoder import as_published, embedding_name, head_weight_name
from edgellm.engines.model.layer_weights import LayerWeights
from edgellm.engines.model.limits import EngineShape
from edgellm.engines.model.named_weights import NamedWeights
from edgellm.engines.model.program import Program, single_weight, token_inputs
from edgellm.engines.model.states import Edge
from edgellm.engines.model.steps import Input, Keep, Linear, NormLinear, Step

Buffer = TypeVar("Buffer")

_LAYER = "layers.0."
MAPPING = "d2t"


def mtp_draft(base: DecoderConfig, vocabulary: int | None = None) -> DraftConfig:
    """The head for multi-token prediction inside the checkpoint of a `base`: one layer of its full attention.

    It takes the base's last hidden state, behind the final norm, with the next token, and then its own, behind its
    own. Its logits are those of `vocabulary` rows of the base's head (None: of all, and the head is shared). A base
    without a rotary embedding has a head without; where the base's layers are one part each, the head's is attention
    with a mixture of experts behind it.
    """
    none: dict[str, Any] = dict.fromkeys(("layer_kinds", "delta_heads", "delta_products", "feature_layers"), ())
    none["nope_layers"] = (0,) if len(base.nope_layers) == base.num_layers else ()
    layer = replace(base, num_layers=1, conv_width=0, conv_bias=False, deepstack_layers=0, lone_parts=False, **none)
    layer = as_published(layer)  # what the base's own head became is no matter
    prefix = "mtp.layers.0."
    if base.lone_parts:
        mixture = base.mixture and replace(base.mixture, dense_layers=())
        layer, prefix = replace(layer, mixture=mixture, naming="nemotron_h_mtp"), "mtp.layers."
    return DraftConfig(
        generation=MTP,
        decoder=layer,
        draft_vocab_size=base.vocab_size if vocabulary is None else vocabulary,
        has_mapping=vocabulary is not None,
        feature_layers=(base.num_layers,),
        feature_norm="none",
        layer_prefix=prefix,
        has_embedding=False,
        has_head=vocabulary is not None,
        base_embedding=embedding_name(base),
        base_head=head_weight_name(base),
        fc_bias=False,
        norm_before_residual=False,
        feed_back_normed=True,
    )


def draft_program(config: DraftConfig, shape: EngineShape) -> Program:
    """One step of a draft; phases `prefill` and `accept` take the base's features, `propose` what it put out before.

    Its outputs are `logits` [B, selected, Vd] float32 and `hidden_states` [B, selected, H], which a propose step takes.
    Of a draft of blocks see `_context_program` and `_block_program`.
    """
    if config.block is not None:
        return (_block_program if shape.phase == "propose" else _context_program)(config, shape)
    hidden, decoder = config.hidden_size, config.decoder
    feature, width = "hidden_states_input", config.feature_size
    if shape.phase == "propose":
        feature, width = "hidden_states_from_draft", hidden
    inputs = token_inputs(shape, hidden, decoder.rotary_dim)
    inputs[feature] = ((shape.batch, shape.tokens, width), "compute")
    layer = LayerWeights(decoder, _LAYER, config.layer_prefix)
    own = LayerWeights(decoder, "", config.checkpoint_prefix)
    steps: list[Step] = []
    attended: tuple[Input, ...]
    if config.generation in ("1", MTP):  # fc([embedding | feature]) at every step, and a decoder layer that takes it
        embedded, taken, attended = Input("inputs_embeds"), Input(feature), (Input("hidden"),)
        if config.generation == MTP:  # with a norm before each of the three
            embedded = Input("inputs_embeds", (own.norm("pre_fc_norm_embedding"),))
            taken = Input(feature, (own.norm("pre_fc_norm_hidden"),))
            attended = (Input("hidden", (layer.norm("input_layernorm"),)),)
        steps.append(NormLinear("hidden", (embedded, taken), own.linear("fc", hidden, 2 * hidden, config.fc_bias)))
        residual, keep = "hidden", None
    else:  # fc on the base's features only, and an attention that takes [normed embedding | normed feature]
        if shape.phase != "propose":
            linear = own.linear("fc", hidden, config.feature_size, config.fc_bias)
            count = len(config.feature_layers) if config.feature_norm == "each" else 0
            norms = tuple(own.norm(f"fc_norm.{index}") for index in range(count))
            if config.feature_norm == "whole":
                norms = (own.norm("input_norm", config.feature_size),)
            steps.append(NormLinear("feature", (Input(feature, norms),), linear))
            feature = "feature"
        residual, keep = (feature, None) if not config.norm_before_residual else ("normed", Keep("normed"))
        of_embedding, of_feature = layer.norm("input_layernorm"), layer.norm("hidden_norm")
        attended = (Input("inputs_embeds", (of_embedding,)), Input(feature, (of_feature,)))
    steps += layer.attention(0, attended, masks_all=True, keep=keep)
    steps += layer.residual(residual, shape.selected < shape.tokens)
    normed = Input(steps[-1].output, () if config.generation == "1" else (own.norm("norm"),))
    kept = Keep("hidden_states", raw=not config.feed_back_normed)
    steps.append(NormLinear("logits", (normed,), _head(config), keep=kept))
    outputs: Edge = {
        "logits": ((shape.batch, shape.selected, config.draft_vocab_size), "float32"),
        "hidden_states": ((shape.batch, shape.selected, hidden), "compute"),
    }
    return Program(shape, inputs, tuple(steps), outputs)


def _context_program(config: DraftConfig, shape: EngineShape) -> Program:
    """What takes the base's features into the rows of a draft of blocks: every layer's keys and values of them, all of
    the same normed fc(features). Nothing attends, and nothing is put out.

    Its key and value weights are those of `_block_program`, which multiplies them with the queries'; there they lie a
    second time (4 % of a layer of Qwen3-8B's shapes), so that neither step reads rows that it does not need.
    """
    hidden, decoder = config.hidden_size, config.decoder
    own = LayerWeights(decoder, "", config.checkpoint_prefix)
    fused = own.linear("fc", hidden, config.feature_size, config.fc_bias)
    steps: list[Step] = [NormLinear("fused", (Input("hidden_states_input"),), fused)]
    taken, keep = Input("fused", (own.norm("hidden_norm"),)), Keep("context_feature")
    for index, layer in enumerate(_block_layers(config)):
        steps += layer.key_value_rows(index, taken, keep if index == 0 and decoder.num_layers > 1 else None)
        taken = Input("context_feature")
    inputs: Edge = {
        "hidden_states_input": ((shape.batch, shape.tokens, config.feature_size), "compute"),
        "rope_rotary_cos_sin": ((shape.batch, shape.tokens, decoder.rotary_dim), "compute"),
        "kvcache_start_index": ((shape.batch,), "int32"),
    }
    return Program(shape, inputs, tuple(steps), {})


def _block_program(config: DraftConfig, shape: EngineShape) -> Program:
    """One pass of a draft over a block behind the rows of the base's features; `attention_mask` says which of the block
    each of its tokens sees. Its output are the `logits` [B, T, Vd] float32 of its places."""
    decoder, value = config.decoder, "inputs_embeds"
    steps: list[Step] = []
    for index, layer in enumerate(_block_layers(config)):
        steps += layer.attention(index, (Input(value, (layer.norm("input_layernorm"),)),))
        steps += layer.residual(value, False)
        value = steps[-1].output
    final = LayerWeights(decoder, "", config.checkpoint_prefix).norm("norm")
    steps.append(NormLinear("logits", (Input(value, (final,)),), _head(config)))
    inputs = token_inputs(shape, config.hidden_size, decoder.rotary_dim)
    outputs: Edge = {"logits": ((shape.batch, shape.tokens, config.draft_vocab_size), "float32")}
    return Program(shape, inputs, tuple(steps), outputs, wide_residual=True)


def _block_layers(config: DraftConfig) -> list[LayerWeights]:
    names = [f"layers.{index}." for index in range(config.decoder.num_layers)]
    return [LayerWeights(config.decoder, name, f"{config.checkpoint_prefix}{name}") for name in names]


def _head(config: DraftConfig) -> Linear:
    """What gives logits: of the draft's own weights, or the base's."""
    name, shape = config.head_name, (config.draft_vocab_size, config.hidden_size)
    weight = single_weight(name, *shape) if config.has_head else WeightSpec(name, shape, ())
    return Linear(name.removesuffix(".weight"), weight)


def draft_weights(config: DraftConfig) -> list[WeightSpec]:
    """Every weight of the draft's own, in order of use, named as EAGLE's `layers.0` layout names them."""
    names = NamedWeights("", config.checkpoint_prefix)
    table = names.weight(DRAFT_EMBEDDING, config.decoder.vocab_size, config.hidden_size)
    shapes = [EngineShape(phase, 1, 1, 1, 1, model="draft") for phase in ("accept", "propose")]
    weights = {name: spec for shape in shapes for name, spec in draft_program(config, shape).weights.items()}
    own = [spec for spec in weights.values() if spec.parts]
    return [table, *own] if config.has_embedding else own


def draft_engine_weights(
    config: DraftConfig, phase: str, own: Mapping[str, Buffer], base: Mapping[str, Buffer]
) -> dict[str, Buffer]:
    """What the draft's engines of a phase are bound to: the head's `own` weights, and the `base`'s head where it has
    none."""
    weights = draft_program(config, EngineShape(phase, 1, 1, 1, 1, model="draft")).weights
    return {name: own[name] if spec.parts else base[name] for name, spec in weights.items()}
