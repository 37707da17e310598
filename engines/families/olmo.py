"""Families that norm what attention and MLP give, not what they take: OLMo-2, OLMo 3, EXAONE 4."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from edgellm.engines.families.decoders import Family, biases, read_decoder
from edgellm.engines.families.fields import ConfigFields, windowed_but_every
from edgellm.engines.model.config import DecoderConfig

_BEHIND: dict[str, Any] = {"pre_norms": False, "post_norms": True, "qk_norm": True}


def _read_olmo2(fields: ConfigFields, **own: Any) -> DecoderConfig:
    """Norms of query and key are over all heads together. `own` is what OLMo 3 adds, for `read_decoder`."""
    return read_decoder(fields, **biases(fields), **_BEHIND, joint_qk_norm=True, **own)


OLMO2 = Family("olmo2", "Olmo2ForCausalLM", _read_olmo2, {"num_key_value_heads": None})


def _read_olmo3(fields: ConfigFields) -> DecoderConfig:
    """Windows in three of four layers, unless `layer_types` says otherwise; a scaling of the rotary embedding is that
    of the other layers alone."""
    theta = fields.take_rope_of_windows("rope_theta")
    config = _read_olmo2(fields, windowed=windowed_but_every(4))
    has_own = config.layer_kinds and (config.rope_scaling is not None or config.rope_theta != theta)
    return replace(config, local_rope_theta=theta if has_own else None)


OLMO3 = Family(
    "olmo3",
    "Olmo3ForCausalLM",
    _read_olmo3,
    {"num_key_value_heads": None, "rope_theta": 500000.0, "sliding_window": 4096},
)


def _read_exaone4(fields: ConfigFields) -> DecoderConfig:
    """With a `sliding_window` (32B) layers that attend to all have no rotary embedding: every
    `sliding_window_pattern`-th, unless `layer_types` says otherwise. Without one (1.2B) all layers attend to all, and
    have it."""
    pattern = 1
    if fields.values.get("layer_types") is None and fields.values.get("sliding_window") is not None:
        pattern = max(1, fields.size("sliding_window_pattern"))
    config = read_decoder(fields, windowed=windowed_but_every(pattern), **_BEHIND)
    if fields.values.get("sliding_window") is None:
        return config
    unrotated = (layer for layer in range(config.num_layers) if config.layer_kind(layer) == "attention")
    return replace(config, nope_layers=tuple(unrotated))


EXAONE4 = Family("exaone4", "Exaone4ForCausalLM", _read_exaone4, {"sliding_window": 4096, "sliding_window_pattern": 4})
