"""Rotary tables that golden files are made of: each kind of scaling, at lengths where it is another."""

from __future__ import annotations

from typing import Any

#: `max_position_embeddings`, the parameters, and the length that the table is for.
Case = tuple[int, dict[str, Any], int]
#: Of heads of 32 elements.
FREQUENCIES = 16


def _case(kind: str, positions: int, length: int = 4096, original: int | None = None, **settings: Any) -> Case:
    """A case whose model had `original` positions before its table was scaled."""
    lengths = {} if original is None else {"original_max_position_embeddings": original}
    return positions, {"rope_type": kind, "rope_theta": 10000.0, **lengths, **settings}, length


def _longrope(length: int, **settings: Any) -> Case:
    return _case("longrope", 32768, length, 4096, **settings)


_RISING = {
    "short_factor": [1.0 + index / 20 for index in range(FREQUENCIES)],
    "long_factor": [1.0 + index**1.5 for index in range(FREQUENCIES)],
}
_LEVEL = {"short_factor": [1.0] * FREQUENCIES, "long_factor": [2.0] * FREQUENCIES, "factor": 3.0}
_LLAMA3 = {"rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_MSCALE = {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 24, "beta_slow": 2}

ROTARY_CASES = {
    "default": _case("default", 4096),
    "default_theta_1e6": _case("default", 32768, rope_theta=1e6),
    "linear": _case("linear", 4096, factor=4.0),
    "dynamic_within": _case("dynamic", 2048, 2048, factor=4.0),
    "dynamic_beyond": _case("dynamic", 2048, 5000, factor=4.0),
    "llama3": _case("llama3", 131072, 16384, 8192, **_LLAMA3),
    "yarn": _case("yarn", 131072, original=32768, rope_theta=1e6, factor=4.0),
    "yarn_attention_factor": _case("yarn", 8192, original=4096, factor=2.0, attention_factor=0.7),
    "yarn_mscale": _case("yarn", 163840, original=4096, **_MSCALE),
    "yarn_not_truncated": _case("yarn", 16384, original=4096, factor=4.0, truncate=False),
    # Both ends of the ramp fall on the first frequency.
    "yarn_ramp_without_width": _case("yarn", 24, original=6, factor=4.0),
    # The ramp would end beyond the last element of a head.
    "yarn_ramp_cut_off": _case("yarn", 262144, original=65536, rope_theta=100.0, factor=4.0, beta_fast=1000),
    "yarn_factor_from_lengths": _case("yarn", 16384, original=2048, factor=None),
    "proportional": _case("proportional", 32768, rope_theta=1e6, partial_rotary_factor=0.25),
    "longrope_short": _longrope(4096, **_RISING),
    "longrope_long": _longrope(4097, **_RISING),
    "longrope_factor_and_attention_factor": _longrope(8192, **_LEVEL, attention_factor=1.25),
    "longrope_factor": _longrope(8192, **_LEVEL),
}
