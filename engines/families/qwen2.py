"""Qwen2 and Qwen2.5: a bias on the query, key and value projections, never on the others."""

from __future__ import annotations

from edgellm.engines.model.config import DecoderConfig
from edgellm.engines.families.decoders import read_decoder
from edgellm.engines.families.fields import ConfigFields


def read(fields: ConfigFields, dtype: str | None) -> DecoderConfig:
    """`sliding_window` has no effect here unless `use_sliding_window` is true, which is refused."""
    return read_decoder(fields, dtype, attention_bias=True)
