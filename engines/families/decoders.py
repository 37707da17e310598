"""What the families share: how one is described, the fields of `config.json` that all of them have, and those of the
language model inside a multimodal checkpoint.

The latter stand in `text_config`, in Qwen2.5-VL's first releases at the top level. A file leaves out what equals the
defaults of the class that wrote it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from edgellm.engines.families.fields import ConfigFields, read_mrope, read_rope
from edgellm.engines.formats.strict_formats import is_integer
from edgellm.engines.model.config import LARGEST_DEPTH, DecoderConfig


@dataclass(frozen=True)
class Family:
    """A family of models: its names in `config.json`, and how that becomes a `DecoderConfig`.

    `name` is its `model_type`, `architecture` the class in `architectures`. `read` notes problems in the fields that it
    takes, and what it gives is of use where there are none. `like`: under which name defaults.json has what its class
    takes for fields that a file leaves out; nothing: its own.
    """

    name: str
    architecture: str
    read: Callable[[ConfigFields], DecoderConfig]
    like: str = ""

    @property
    def defaults(self) -> dict[str, Any]:
        """What its class takes for fields that a file leaves out."""
        return class_defaults(self.like or self.name)


def family_of(name: str, architecture: str) -> Callable[[Callable[[ConfigFields], DecoderConfig]], Family]:
    """Makes of a function the `Family` that it reads."""
    return lambda read: Family(name, architecture, read)


#: What the classes of models, and of parts of them, take for fields that a file leaves out; each has what another one
#: has that it is "like", unless it says otherwise.
_CLASSES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("defaults.json").read_text("utf-8"))


@cache
def class_defaults(name: str) -> dict[str, Any]:
    """What the class of a model takes for fields that a file leaves out, by its `model_type`, or that of a part of one:
    "qwen3_asr_text" is the language model inside "qwen3_asr". Nothing of a class that is not known."""
    own = _CLASSES.get(name, {})
    return (class_defaults(own["like"]) if "like" in own else {}) | {key: own[key] for key in own if key != "like"}


#: What the file of a language model writes down; that of a multimodal model may leave it out of its part.
_WRITTEN_DOWN = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "rms_norm_eps",
    "bos_token_id",
    "eos_token_id",
)


def filled(values: Mapping[str, Any], defaults: Mapping[str, Any], is_part: bool = False) -> dict[str, Any]:
    """`values` of a `config.json` with the `defaults` for fields that are absent or null.

    The language model's own file must have its sizes, so these are filled in for a part alone. A default of None says
    that a size may be left out even there. `sliding_window` is null on purpose: no window.
    """
    known = {key: value for key, value in defaults.items() if is_part or value is None or key not in _WRITTEN_DOWN}
    return known | {
        key: value for key, value in values.items() if value is not None or key not in known or key == "sliding_window"
    }


def biases(fields: ConfigFields) -> dict[str, Any]:
    """The switch `attention_bias` where it gives all four projections of the attention a bias."""
    bias = fields.switch("attention_bias")
    return {"attention_bias": bias, "attention_output_bias": bias}


def all_biases(fields: ConfigFields) -> dict[str, Any]:
    """The switch `use_bias`, which gives all linear layers a bias."""
    return dict.fromkeys(("attention_bias", "attention_output_bias", "mlp_bias"), fields.switch("use_bias"))


def rotary_share(fields: ConfigFields, default: float) -> float:
    """The part of a head that is rotated: `partial_rotary_factor` among the parameters of the rotary embedding or, in
    older files, by itself."""
    key = "partial_rotary_factor"
    share = fields.take_rotary(key)
    if share is not None:
        fields.values = fields.values | {key: share}
    return fields.positive(key, default)


#: The words of `hidden_act` that most families know.
SILU: Mapping[str | None, str] = {None: "silu", "silu": "silu", "swish": "silu"}


def read_decoder(
    fields: ConfigFields,
    *,
    mrope: tuple[tuple[int, ...], bool] = ((), False),
    rotary_share: float = 1.0,
    activations: Mapping[str | None, str] = SILU,
    windowed: Callable[[int], bool] | None = None,
    **own: Any,
) -> DecoderConfig:
    """Read and check the fields that all families have; `own` are those of `DecoderConfig` that the family adds.

    A `num_key_value_heads` of null means as many as query heads, a `head_dim` of null hidden_size /
    num_attention_heads. A family with M-RoPE has `mrope`: its usual sections and whether they are interleaved; others
    may not have M-RoPE. `rotary_share` is the part of a head that is rotated; `activations` say what the words of
    `hidden_act` stand for, `windowed` which layers look back on a window where there is one (see
    `ConfigFields.windows`). Problems are noted in `fields`; the result is of use where there are none.
    """
    if own.get("qk_norm"):  # some files say so
        fields.ignore("use_qk_norm", "qk_layernorm")
    vocab_size, hidden = fields.size("vocab_size"), fields.size("hidden_size")
    heads = fields.size("num_attention_heads")
    kv_heads = fields.size("num_key_value_heads", heads if heads and "num_key_value_heads" in fields.values else None)
    if heads and kv_heads and heads % kv_heads:
        fields.wrong.append(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    head_dim = _head_dim(fields, hidden, heads)
    rotary_dim = int(head_dim * rotary_share)
    if rotary_dim % 2 or (head_dim and not rotary_dim):
        fields.wrong.append(f"{rotary_dim} elements of a head are rotated, expected an even number (head_dim)")
    max_positions = fields.size("max_position_embeddings")
    sections, interleaved = mrope
    if sections:
        sections, interleaved = read_mrope(fields, rotary_dim, sections, interleaved)
    rope_theta, rope_scaling = read_rope(fields, rotary_dim, max_positions)
    beginnings = fields.token_ids("bos_token_id", 0)
    layers = fields.size("num_hidden_layers", largest=LARGEST_DEPTH)
    window, kinds = fields.windows(layers, windowed)
    if kinds:
        own = {"layer_kinds": kinds} | own
    config = DecoderConfig(
        family=fields.family,
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=fields.size("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        rms_norm_eps=fields.positive("rms_norm_eps"),
        rope_theta=rope_theta,
        rotary_dim=rotary_dim,
        dtype=fields.dtype(),
        tie_word_embeddings=fields.switch("tie_word_embeddings"),
        rope_scaling=rope_scaling,
        eos_token_ids=fields.token_ids("eos_token_id", vocab_size),
        bos_token_id=beginnings[0] if beginnings else None,
        mrope_section=sections,
        mrope_interleaved=interleaved,
        hidden_act=fields.word("hidden_act", activations),
        sliding_window=window,
        **own,
    )
    fields.refuse_unsupported()
    return config


def _head_dim(fields: ConfigFields, hidden: int, heads: int) -> int:
    if fields.values.get("head_dim") is not None:
        return fields.size("head_dim")
    if hidden and heads and hidden % heads:
        fields.wrong.append(
            f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}, and there is no head_dim"
        )
        return 0
    return hidden // heads if heads else 0


#: Fields of the whole checkpoint, which count more than those of its part.
_OF_THE_WHOLE = ("tie_word_embeddings", "dtype", "torch_dtype", "bos_token_id", "eos_token_id")


def text_fields(fields: ConfigFields, defaults: Mapping[str, Any]) -> ConfigFields:
    """The language model's fields; what is wrong with them is noted in `fields`."""
    top = {key: value for key, value in fields.values.items() if value is not None}
    nested = top.get("text_config", {})
    if not isinstance(nested, dict):
        fields.expect("text_config", nested, "an object")
        nested = {}
    given = nested | {key: top[key] for key in _OF_THE_WHOLE if key in top} if nested else top
    values = filled(given, defaults, is_part=True)
    text = ConfigFields(values, fields.generation_values, fields.family, fields.tensors_dtype)
    text.wrong, text.unsupported = fields.wrong, fields.unsupported
    return text


def inner_family(fields: ConfigFields, *families: Family) -> Family:
    """Which of the families the language model is of; the first where the file does not say, or names another."""
    known = {family.name: family for family in families}
    kind = fields.section("text_config").get("model_type", families[0].name)
    if isinstance(kind, str) and kind in known:
        return known[kind]
    fields.refuse("text_config: model_type", kind, f"supported are {', '.join(known)}")
    return families[0]


def read_inner(fields: ConfigFields, *families: Family) -> DecoderConfig:
    """The language model inside, of one of the families, with what its class takes for what the file leaves out."""
    family = inner_family(fields, *families)
    return family.read(text_fields(fields, family.defaults))


def with_image_tokens(
    config: DecoderConfig, fields: ConfigFields, default: int | None = None, merge_size: int | None = None
) -> DecoderConfig:
    """The config with the id of image tokens, and how many patches become one (`default` and `merge_size` where the
    file does not say). Models for which that is to be said (Qwen's) take videos, too, where the vocabulary has the
    token of these."""
    largest = max(0, config.vocab_size - 1)
    key = fields.image_key if merge_size is None else "image_token_id"
    token = fields.token_id(key, default, largest=largest)
    if merge_size is not None:
        video = fields.values.get("video_token_id")
        if is_integer(video) and 0 < video <= largest:  # a small vocabulary has none
            config = replace(config, video_token_id=video)
        found = fields.section("vision_config").get("spatial_merge_size")
        if found is not None and (not is_integer(found) or found < 1):
            fields.expect("vision_config: spatial_merge_size", found, "a whole number above 0")
        elif found is not None:
            merge_size = found
    return replace(config, image_token_id=token, spatial_merge_size=merge_size or 1)
