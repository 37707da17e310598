"""Llama 2, 3, 3.1, 3.2 and the many models published with its architecture."""

from __future__ import annotations

from edgellm.engines.model.config import DecoderConfig
from edgellm.engines.families.decoders import read_decoder, refuse_sliding_window
from edgellm.engines.families.fields import ConfigFields


def read(fields: ConfigFields, dtype: str | None) -> DecoderConfig:
    """`attention_bias` gives all four projections of the attention a bias, `mlp_bias` all three of the MLP."""
    refuse_sliding_window(fields)
    bias = fields.switch("attention_bias")
    return read_decoder(
        fields,
        dtype,
        default_kv_heads=True,
        attention_bias=bias,
        attention_output_bias=bias,
        mlp_bias=fields.switch("mlp_bias"),
    )
