"""Llama 2, 3, 3.1, 3.2 and the many models published with its architecture."""

from __future__ import annotations

from edgellm.engines.decoder_config import DecoderConfig
from edgellm.engines.families.common import read_decoder
from edgellm.engines.families.config_fields import ConfigFields, shown


def read(fields: ConfigFields, dtype: str | None) -> DecoderConfig:
    """`attention_bias` gives all four projections of the attention a bias, `mlp_bias` all three of the MLP."""
    window = fields.values.get("sliding_window")
    if window is not None and fields.values.get("use_sliding_window") is not False:
        fields.unsupported.append(f"sliding_window is {shown(window)} (sliding-window attention), expected null")
    bias = fields.switch("attention_bias")
    return read_decoder(
        fields,
        dtype,
        default_kv_heads=True,
        attention_bias=bias,
        attention_output_bias=bias,
        mlp_bias=fields.switch("mlp_bias"),
    )
