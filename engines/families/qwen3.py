"""Qwen3, dense: the queries and keys of every head are normalized before they are rotated."""

from __future__ import annotations

from edgellm.engines.model.config import DecoderConfig
from edgellm.engines.families.decoders import read_decoder
from edgellm.engines.families.fields import ConfigFields

#: The head size where `head_dim` is absent; unlike in the other families it does not follow from hidden_size.
DEFAULT_HEAD_DIM = 128


def read(fields: ConfigFields, dtype: str | None) -> DecoderConfig:
    """`attention_bias` gives all four projections of the attention a bias."""
    bias = fields.switch("attention_bias")
    return read_decoder(
        fields,
        dtype,
        default_head_dim=DEFAULT_HEAD_DIM,
        attention_bias=bias,
        attention_output_bias=bias,
        qk_norm=True,
    )
