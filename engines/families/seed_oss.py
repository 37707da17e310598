"""Seed-OSS: Llama whose biases of the attention have a switch each for its inputs and its output."""

from __future__ import annotations

from edgellm.engines.families.decoders import Family, read_decoder
from edgellm.engines.families.fields import ConfigFields
from edgellm.engines.model.config import DecoderConfig


def read_seed_oss(fields: ConfigFields, dtype: str | None) -> DecoderConfig:
    """`attention_bias` is of query, key and value, `attention_out_bias` of the output."""
    return read_decoder(
        fields,
        dtype,
        attention_bias=fields.switch("attention_bias"),
        attention_output_bias=fields.switch("attention_out_bias"),
        mlp_bias=fields.switch("mlp_bias"),
    )


SEED_OSS = Family("seed_oss", "SeedOssForCausalLM", read_seed_oss, {"attention_bias": True, "head_dim": 128})
