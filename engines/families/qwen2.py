"""Qwen2 and Qwen2.5: biases on query, key and value."""

from __future__ import annotations

from collections.abc import Callable

from edgellm.engines.families.decoders import Family, read_decoder
from edgellm.engines.families.fields import ConfigFields
from edgellm.engines.formats.strict_formats import as_json, is_integer
from edgellm.engines.model.config import DecoderConfig


def read_qwen2(fields: ConfigFields, dtype: str | None) -> DecoderConfig:
    """`sliding_window` has no effect unless `use_sliding_window` is true."""
    return read_decoder(fields, dtype, windowed=behind_full_layers(fields), attention_bias=True)


def behind_full_layers(fields: ConfigFields) -> Callable[[int], bool]:
    """Which layers look back on a window: those behind the first `max_window_layers`, which attend to all."""
    value = fields.values.get("max_window_layers")
    full = 28 if value is None else value
    if not is_integer(full) or full < 0:
        fields.wrong.append(f"max_window_layers is {as_json(value)}, expected a whole number from 0 on")
        full = 0
    return lambda layer: layer >= full


QWEN2 = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    read_qwen2,
    {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "use_sliding_window": False,
    },
)
