"""Qwen3: norms on query and key, and heads whose size does not follow from hidden_size."""

from __future__ import annotations

from edgellm.engines.families.decoders import Family, read_decoder
from edgellm.engines.families.fields import ConfigFields
from edgellm.engines.families.qwen2 import QWEN2, behind_full_layers
from edgellm.engines.model.config import DecoderConfig


def read_qwen3(
    fields: ConfigFields, dtype: str | None, mrope: tuple[tuple[int, ...], bool] = ((), False)
) -> DecoderConfig:
    """`attention_bias` gives all four projections of the attention a bias; `mrope` is for `read_decoder`."""
    bias = fields.switch("attention_bias")
    return read_decoder(
        fields,
        dtype,
        mrope=mrope,
        windowed=behind_full_layers(fields),
        attention_bias=bias,
        attention_output_bias=bias,
        qk_norm=True,
    )


QWEN3 = Family("qwen3", "Qwen3ForCausalLM", read_qwen3, {**QWEN2.defaults, "head_dim": 128})
