"""Gemma 1: norms by 1 + weight, a gate with the tanh-GELU, scaled embeddings, heads of 256. Gemma 2: windows in every
other layer, norms behind attention and MLP, too, and caps of scores and logits. Gemma 3's language model: windows in
five of six layers, which have a rotary base of their own. Gemma 4's language model: heads of one size in windows and of
another beside them, embeddings of each layer, and last layers that attend to the rows of earlier ones."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from edgellm.engines.families.decoders import (
    Family,
    biases,
    family_of,
    inner_family,
    read_decoder,
    text_fields,
    with_image_tokens,
)
from edgellm.engines.families.fields import ConfigFields, layer_count, windowed_but_every
from edgellm.engines.families.mixtures import read_mixture
from edgellm.engines.model.config import LARGEST_DEPTH, LARGEST_EXPERTS, LARGEST_IMAGE_TOKENS, DecoderConfig, Mixture

_TANH_GELU = "gelu_pytorch_tanh"


def read_gemma(fields: ConfigFields, word: str | None, norm_offset: float = 1.0, **own: Any) -> DecoderConfig:
    """What all have in common; `word` is what files write for the tanh-GELU beside its name (None: nothing)."""
    fields.only(hidden_activation=_TANH_GELU)
    activations: dict[str | None, str] = {_TANH_GELU: "gelu_tanh", word: "gelu_tanh"}
    config = read_decoder(fields, activations=activations, norm_offset=norm_offset, **biases(fields), **own)
    return replace(config, embedding_scale=config.hidden_size**0.5)


#: The first files write "gelu" and mean its tanh form; `hidden_activation` of later ones says so.
GEMMA = Family("gemma", "GemmaForCausalLM", partial(read_gemma, word="gelu"))


@family_of("gemma2", "Gemma2ForCausalLM")
def GEMMA2(fields: ConfigFields) -> DecoderConfig:
    """Every other layer attends to all, the first not among them, unless `layer_types` says otherwise. A cap of null is
    none."""
    return read_gemma(
        fields,
        None,
        windowed=windowed_but_every(2),
        attention_scale=_scale(fields),
        post_norms=True,
        scores_cap=_cap(fields, "attn_logit_softcapping", 50.0),
        logits_cap=_cap(fields, "final_logit_softcapping", 30.0),
    )


def _cap(fields: ConfigFields, key: str, usual: float) -> float:
    cap = fields.positive(key, usual, largest=1e6)
    return 0.0 if fields.values.get(key, usual) is None else cap


def _scale(fields: ConfigFields) -> float:
    return fields.positive("query_pre_attn_scalar", 256, largest=1e6) ** -0.5


@family_of("gemma3_text", "Gemma3ForCausalLM")
def GEMMA3(fields: ConfigFields) -> DecoderConfig:
    """Every `sliding_window_pattern`-th layer attends to all, unless `layer_types` says otherwise.

    The first files write the bases of the rotary embedding as `rope_theta` and, of layers with a window, as
    `rope_local_base_freq`; later ones have the parameters of both kinds of layers in `rope_parameters`.
    """
    local_theta = fields.take_rope_of_windows("rope_local_base_freq")
    if fields.values.get("sliding_window") is None:
        fields.wrong.append("sliding_window is null, expected a whole number: there is no sliding_window in use")
    pattern = max(1, fields.size("sliding_window_pattern", 6))
    config = read_gemma(
        fields,
        None,
        windowed=windowed_but_every(pattern),
        qk_norm=True,
        attention_scale=_scale(fields),
        post_norms=True,
    )
    return replace(config, local_rope_theta=local_theta if config.layer_kinds else None)


_FULL, _KV_HEADS = "full_attention", "num_key_value_heads"
_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
}


def read_gemma4(fields: ConfigFields) -> DecoderConfig:
    """Every sixth layer attends to all, unless `layer_types` says otherwise, and the last always does."""
    types, layers = fields.values.get("layer_types"), layer_count(fields)
    if isinstance(types, list) and types:
        fields.values = fields.values | {"layer_types": [*types[:-1], _FULL]}
    if fields.values.get("rope_parameters") is None:
        fields.values = fields.values | {"rope_parameters": _ROPE}
    fields.ignore("use_bidirectional_attention", "num_experts")
    own: dict[str, Any] = {"naming": "gemma4", "mixture": _mixture(fields)} if fields.switch("enable_moe_block") else {}
    fields.only(use_bidirectional_attention="vision")  # of the tokens of an image
    local_theta, cap = fields.take_rope_of_windows("rope_local_base_freq"), "final_logit_softcapping"
    config = read_gemma(
        fields,
        None,
        norm_offset=0.0,
        windowed=lambda layer: windowed_but_every(6)(layer) and layer + 1 < layers,
        qk_norm=True,
        value_norms=True,
        layer_scalars=True,
        post_norms=True,
        attention_scale=1.0,
        logits_cap=0.0 if fields.values.get(cap) is None else fields.positive(cap, largest=1e6),
        full_heads=_full_heads(fields),
        values_are_keys=fields.switch("attention_k_eq_v"),
        shared_rows=fields.count("num_kv_shared_layers", 0, max(0, layers - 1)),
        layer_embedding_size=fields.count("hidden_size_per_layer_input", 256, LARGEST_DEPTH * LARGEST_DEPTH),
        **own,
    )
    rows = fields.size("vocab_size_per_layer_input", 262144)
    if config.layer_embedding_size and config.vocab_size not in (0, rows):
        fields.refuse("vocab_size_per_layer_input", rows, f"supported is vocab_size, {config.vocab_size}")
    kinds, first = [config.layer_kind(index) for index in range(layers)], layers - config.shared_rows
    if not set(kinds[first:]) <= set(kinds[:first]):
        fields.wrong.append(
            f"num_kv_shared_layers is {config.shared_rows}: layer_types has a kind in these layers alone"
        )
    is_wide = fields.switch("use_double_wide_mlp") and config.shared_rows
    return replace(
        config,
        rotary_dim=config.full_heads[1],
        local_rope_theta=local_theta if config.layer_kinds else None,
        shared_intermediate_size=2 * config.intermediate_size if is_wide else 0,
    )


def _mixture(fields: ConfigFields) -> Mixture:
    """Experts beside the MLP of each layer; shares are always normalized."""
    chosen = fields.size("top_k_experts", largest=LARGEST_EXPERTS)
    fields.size("num_experts", largest=LARGEST_EXPERTS)
    fields.values = fields.values | {"num_experts_per_tok": chosen or 1}
    return read_mixture(fields, "moe_intermediate_size", LARGEST_EXPERTS, normalized=True, beside_mlp=True)


def _full_heads(fields: ConfigFields) -> tuple[int, int]:
    """Key-value heads of layers that attend to all, and their elements: in fields of their own or, as transformers 5
    writes it, in `per_layer_config`."""
    values, of_layers = fields.values, fields.values.get("per_layer_config")
    given: Any = {"head_dim": values.get("global_head_dim") or 512}
    if values.get("attention_k_eq_v") and values.get("num_global_key_value_heads") is not None:
        given |= {_KV_HEADS: values["num_global_key_value_heads"]}
    if of_layers is not None:
        parts = [*of_layers.values()] if isinstance(of_layers, dict) else [None]
        given = parts[0] if parts else {}
        known = isinstance(given, dict) and set(given) <= {"head_dim", _KV_HEADS}
        if not known or any(part != given for part in parts):
            reason = f"supported are head_dim and {_KV_HEADS}, one for all {_FULL} layers"
            fields.refuse("per_layer_config", of_layers, reason)
            given = {}
    own = ConfigFields(values | given, None, fields.family)
    own.wrong = fields.wrong
    return own.size(_KV_HEADS), own.size("head_dim")


GEMMA4_TEXT = Family("gemma4_text", "Gemma4ForCausalLM", read_gemma4)
#: 12B, whose images and audio come without encoders: the layers are those of 31B.
GEMMA4_UNIFIED_TEXT = Family("gemma4_unified_text", "Gemma4UnifiedForCausalLM", read_gemma4)


@family_of("gemma4", "Gemma4ForConditionalGeneration")
def GEMMA4(fields: ConfigFields) -> DecoderConfig:
    """The language model inside, whose embeddings of each layer take tokens of images and speech for padding. In the
    larger models the tokens of an image see all of them, in the layers that have a window alone."""
    text = text_fields(fields, GEMMA4_TEXT.defaults)
    config = inner_family(fields, GEMMA4_TEXT).read(text)
    largest = max(0, config.vocab_size - 1)
    config = replace(config, padding_id=text.token_id("pad_token_id", 0, largest=largest))
    if isinstance(fields.values.get("audio_config"), dict):
        config = replace(config, audio_token_id=fields.token_id("audio_token_id", largest=largest))
    if not fields.section("vision_config"):
        return config
    config = with_image_tokens(config, fields)
    if text.values.get("use_bidirectional_attention") != "vision":
        return config
    tokens = fields.size("vision_soft_tokens_per_image", largest=LARGEST_IMAGE_TOKENS)
    return replace(config, image_tokens=tokens, images_vary=True)


@family_of("gemma4_unified", "Gemma4UnifiedForConditionalGeneration")
def GEMMA4_UNIFIED(fields: ConfigFields) -> DecoderConfig:
    """The language model inside; its images and audio are no part of it."""
    return inner_family(fields, GEMMA4_UNIFIED_TEXT).read(text_fields(fields, GEMMA4_UNIFIED_TEXT.defaults))
