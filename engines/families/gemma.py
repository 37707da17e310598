"""Gemma 1: norms by 1 + weight, a gate with the tanh-GELU, scaled embeddings, heads of 256."""

from __future__ import annotations

from dataclasses import replace

from edgellm.engines.directories.strict_formats import as_json
from edgellm.engines.families.decoders import Family, read_decoder
from edgellm.engines.families.fields import ConfigFields
from edgellm.engines.model.config import DecoderConfig

_TANH_GELU = "gelu_pytorch_tanh"


def read_gemma(fields: ConfigFields, dtype: str | None) -> DecoderConfig:
    """The first files write "gelu" and mean its tanh form; `hidden_activation` of later ones says so."""
    activation = fields.values.get("hidden_activation")
    if activation not in (None, _TANH_GELU):
        fields.unsupported.append(f"hidden_activation is {as_json(activation)}, supported is {_TANH_GELU}")
    bias = fields.switch("attention_bias")
    config = read_decoder(
        fields,
        dtype,
        activations={_TANH_GELU: "gelu_tanh", "gelu": "gelu_tanh"},
        attention_bias=bias,
        attention_output_bias=bias,
        norm_offset=1.0,
    )
    return replace(config, embedding_scale=config.hidden_size**0.5)


GEMMA = Family(
    "gemma",
    "GemmaForCausalLM",
    read_gemma,
    {"num_key_value_heads": 16, "head_dim": 256, "hidden_act": _TANH_GELU, "tie_word_embeddings": True},
)
