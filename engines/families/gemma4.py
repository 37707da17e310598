"""Gemma 4's language model: heads of one size in windows and of another beside them, embeddings of each layer, and last
layers that attend to the rows of earlier ones. Images and audio are not supported: models with their encoders are
served without."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from edgellm.engines.families.decoders import Family, inner_family, text_fields
from edgellm.engines.families.fields import ConfigFields, layer_count, windowed_but_every
from edgellm.engines.families.gemma import read_gemma
from edgellm.engines.formats.strict_formats import is_integer
from edgellm.engines.model.config import LARGEST_DEPTH, DecoderConfig

_FULL = "full_attention"
_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
}


def read_gemma4(fields: ConfigFields) -> DecoderConfig:
    """Every sixth layer attends to all, unless `layer_types` says otherwise, and the last always does. Heads of these
    layers are in `global_head_dim` or, as transformers 5 writes it, in `per_layer_config`."""
    types = fields.values.get("layer_types")
    if isinstance(types, list) and types:
        fields.values = fields.values | {"layer_types": [*types[:-1], _FULL]}
    if fields.values.get("rope_parameters") is None:
        fields.values = fields.values | {"rope_parameters": _ROPE}
    _refuse(fields)
    local_theta = fields.take_rope_of_windows("rope_local_base_freq")
    cap = fields.values.get("final_logit_softcapping")
    own: dict[str, Any] = {
        "logits_cap": 0.0 if cap is None else fields.positive("final_logit_softcapping", largest=1e6)
    }
    layers = layer_count(fields)
    own |= {"shared_rows": _count(fields, "num_kv_shared_layers", max(0, layers - 1))}
    own |= {"layer_embedding_size": _count(fields, "hidden_size_per_layer_input", LARGEST_DEPTH * LARGEST_DEPTH, 256)}
    config = read_gemma(
        fields,
        None,
        norm_offset=0.0,
        windowed=lambda layer: windowed_but_every(6)(layer) and layer + 1 < layers,
        qk_norm=True,
        value_norms=True,
        layer_scalars=True,
        post_norms=True,
        attention_scale=1.0,
        full_heads=_full_heads(fields),
        **own,
    )
    rows = fields.size("vocab_size_per_layer_input", 262144)
    if config.layer_embedding_size and config.vocab_size not in (0, rows):
        fields.refuse("vocab_size_per_layer_input", rows, f"supported is vocab_size, {config.vocab_size}")
    kinds = [config.layer_kind(index) for index in range(config.num_layers)]
    first = config.num_layers - config.shared_rows
    if not set(kinds[first:]) <= set(kinds[:first]):
        fields.wrong.append(
            f"num_kv_shared_layers is {config.shared_rows}: layer_types has a kind in these layers alone"
        )
    wide = 2 * config.intermediate_size if fields.switch("use_double_wide_mlp") else 0
    return replace(
        config,
        rotary_dim=config.full_heads[1],
        local_rope_theta=local_theta if config.layer_kinds else None,
        shared_intermediate_size=wide if config.shared_rows else 0,
    )


def _refuse(fields: ConfigFields) -> None:
    """What other sizes of Gemma 4 have, and this one is not."""
    nearest = "which is not supported: take Gemma 4 E2B or E4B"
    if fields.switch("enable_moe_block"):
        fields.refuse("enable_moe_block", True, f"a mixture of experts beside an MLP, {nearest}")
    if fields.switch("attention_k_eq_v"):
        fields.refuse("attention_k_eq_v", True, f"values that are keys, {nearest}")
    fields.ignore("use_bidirectional_attention", "num_experts")
    if fields.values.get("use_bidirectional_attention") not in (
        None,
        False,
        "vision",
    ):  # of images, which do not come up
        fields.refuse(
            "use_bidirectional_attention", fields.values["use_bidirectional_attention"], "supported is vision"
        )


def _count(fields: ConfigFields, key: str, largest: int, default: int = 0) -> int:
    """A whole number from 0 to `largest`."""
    value = fields.values.get(key)
    value = default if value is None else value
    if is_integer(value) and 0 <= value <= largest:
        return value
    fields.expect(key, value, f"a whole number from 0 to {largest}")
    return 0


def _full_heads(fields: ConfigFields) -> tuple[int, int]:
    """Key-value heads of layers that attend to all, and their elements."""
    of_layers, key = fields.values.get("per_layer_config"), "num_key_value_heads"
    given: Any = {"head_dim": fields.values.get("global_head_dim") or 512}
    if of_layers is not None:
        parts = list(of_layers.values()) if isinstance(of_layers, dict) else [None]
        given = parts[0] if parts else {}
        if not isinstance(given, dict) or any(part != given for part in parts) or not set(given) <= {"head_dim", key}:
            fields.refuse(
                "per_layer_config", of_layers, f"supported are head_dim and {key}, one for all {_FULL} layers"
            )
            given = {}
    own = ConfigFields(fields.values | given, None, fields.family)
    own.wrong = fields.wrong
    return own.size(key), own.size("head_dim")


GEMMA4_TEXT = Family(
    "gemma4_text",
    "Gemma4ForCausalLM",
    read_gemma4,
    {
        "vocab_size": 262144,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "sliding_window": 512,
        "tie_word_embeddings": True,
        "hidden_act": "gelu_pytorch_tanh",
        "eos_token_id": 1,
        "bos_token_id": 2,
    },
)


def _read_gemma4(fields: ConfigFields) -> DecoderConfig:
    """The language model inside; its images and audio are no part of it."""
    return inner_family(fields, GEMMA4_TEXT).read(text_fields(fields, GEMMA4_TEXT.defaults))


GEMMA4 = Family("gemma4", "Gemma4ForConditionalGeneration", _read_gemma4)
