"""Gemma 1: norms by 1 + weight, a gate with the tanh-GELU, scaled embeddings, heads of 256. Gemma 2: windows in every
other layer, norms behind attention and MLP, too, and caps of scores and logits. Gemma 3's language model: windows in
five of six layers, which have a rotary base of their own."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from edgellm.engines.families.decoders import Family, biases, family_of, read_decoder
from edgellm.engines.families.fields import ConfigFields, windowed_but_every
from edgellm.engines.model.config import DecoderConfig

_TANH_GELU = "gelu_pytorch_tanh"


def read_gemma(fields: ConfigFields, word: str | None, norm_offset: float = 1.0, **own: Any) -> DecoderConfig:
    """What all have in common; `word` is what files write for the tanh-GELU beside its name (None: nothing)."""
    activation = fields.values.get("hidden_activation")
    if activation not in (None, _TANH_GELU):
        fields.refuse("hidden_activation", activation, f"supported is {_TANH_GELU}")
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
