"""Families whose layers keep recurrent states beside those that attend.

LFM2 and LFM2.5: gated short convolutions in most layers, attention with norms on query and key in the others. Qwen3.5:
the gated delta rule in three of four layers, gated attention with a partial rotary embedding in the others; its
checkpoints have Qwen3-VL's vision encoder, whose features go in at the image tokens alone, and a draft head, whose
tensors the decoder leaves alone. Granite 4: Mamba-2 in all layers, in nine of ten or in none, else attention, mostly
without a rotary embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from edgellm.engines.families.decoders import (
    Family,
    biases,
    family_of,
    read_decoder,
    rotary_share,
    text_fields,
    with_image_tokens,
)
from edgellm.engines.families.fields import ConfigFields, layer_count
from edgellm.engines.families.llama import read_granite
from edgellm.engines.families.qwen import QWEN_MERGE_SIZE
from edgellm.engines.formats.strict_formats import is_integer
from edgellm.engines.model.config import CONV_WIDTHS, DecoderConfig


def _conv_width(fields: ConfigFields, key: str) -> int:
    """How many tokens a short convolution reaches over; problems are noted in `fields`."""
    width, (least, most) = fields.size(key), CONV_WIDTHS
    if width and not least <= width <= most:
        fields.refuse(key, width, f"supported are short convolutions of {least} to {most} tokens")
    return width


@family_of("lfm2", "Lfm2ForCausalLM")
def LFM2(fields: ConfigFields) -> DecoderConfig:
    """`block_ff_dim` of older files counts more than `intermediate_size`, their `full_attn_idxs` less than
    `layer_types`."""
    # What is wrong with the size has been noted.
    fields.values = fields.values | {"intermediate_size": _inner_size(fields) or 1}
    return read_lfm2_layers(fields, _types_by_index(fields))


def read_lfm2_layers(fields: ConfigFields, usual: Sequence[str], **own: Any) -> DecoderConfig:
    """Layers of the `usual` types where `layer_types` does not say; `tie_embedding` of older files counts more than
    `tie_word_embeddings`. `own` is for `read_decoder`."""
    tied = "tie_embedding" if fields.values.get("tie_embedding") is not None else "tie_word_embeddings"
    fields.values = fields.values | {
        "rms_norm_eps": fields.positive("norm_eps"),
        "tie_word_embeddings": fields.switch(tied),
    }
    return read_decoder(
        fields,
        qk_norm=True,
        layer_kinds=fields.layer_kinds({"conv": "convolution", "full_attention": "attention"}, usual),
        conv_width=_conv_width(fields, "conv_L_cache"),
        conv_bias=fields.switch("conv_bias"),
        naming="lfm2",
        **own,
    )


def _types_by_index(fields: ConfigFields) -> list[str]:
    """What `full_attn_idxs` says: which of the layers are attention; all where it is missing."""
    count = layer_count(fields)
    indices = fields.values.get("full_attn_idxs")
    if indices is None:
        indices = range(count)
    elif not isinstance(indices, list) or not all(is_integer(each) and 0 <= each < count for each in indices):
        fields.expect("full_attn_idxs", indices, f"a list of layers from 0 to {count - 1}")
        indices = ()
    return ["full_attention" if index in indices else "conv" for index in range(count)]


def _inner_size(fields: ConfigFields) -> int:
    """The size of the MLP: with `block_auto_adjust_ff_dim` two thirds of what is written down, times
    `block_ffn_dim_multiplier`, rounded up to a multiple of `block_multiple_of`; each product is cut to a whole
    number."""
    size = fields.size("block_ff_dim" if fields.values.get("block_ff_dim") is not None else "intermediate_size")
    if not fields.switch("block_auto_adjust_ff_dim"):
        return size
    step, factor = fields.size("block_multiple_of"), fields.positive("block_ffn_dim_multiplier", largest=1000)
    adjusted = int(factor * int(2 * size / 3))
    return -(-adjusted // step) * step if step else 0


_QWEN_TYPES = {"linear_attention": "delta", "full_attention": "attention"}
#: What the class of the whole model takes for the image token.
_IMAGE_TOKEN = 248056


def read_qwen3_5_text(fields: ConfigFields, **own: Any) -> DecoderConfig:
    """Norms by 1 + weight, with those on query and key. `own` is for `read_decoder`."""
    gate = fields.values.get("attn_output_gate")
    if gate not in (None, True):
        fields.refuse("attn_output_gate", gate, "supported is attention with a gate")
    interval, layers = max(1, fields.size("full_attention_interval")), range(1, layer_count(fields) + 1)
    usual = ["linear_attention" if layer % interval else "full_attention" for layer in layers]
    return read_decoder(
        fields,
        mrope=((11, 11, 10), True),
        rotary_share=rotary_share(fields, 0.25),
        **biases(fields),
        qk_norm=True,
        norm_offset=1.0,
        attention_gate=True,
        layer_kinds=fields.layer_kinds(_QWEN_TYPES, usual),
        conv_width=_conv_width(fields, "linear_conv_kernel_dim"),
        delta_heads=_delta_heads(fields),
        naming="qwen3_5",
        **own,
    )


def read_qwen3_5(fields: ConfigFields, text: Family) -> DecoderConfig:
    """The language model inside a whole checkpoint, of the family `text`; without a `vision_config` its image token is
    one like any other."""
    config, vision = text.read(text_fields(fields, text.defaults)), fields.values.get("vision_config")
    if vision is None:
        return config
    if not isinstance(vision, dict):
        fields.expect("vision_config", vision, "an object")
    return with_image_tokens(config, fields, _IMAGE_TOKEN, QWEN_MERGE_SIZE)


def _delta_heads(fields: ConfigFields) -> tuple[int, int, int, int]:
    """The numbers of key and value heads, and the sizes of both."""
    keys, values = fields.size("linear_num_key_heads"), fields.size("linear_num_value_heads")
    if keys and values % keys:
        shared = f"a multiple of linear_num_key_heads {keys}: value heads share keys"
        fields.wrong.append(f"linear_num_value_heads {values} is not {shared}")
    return keys, values, fields.size("linear_key_head_dim"), fields.size("linear_value_head_dim")


QWEN3_5_TEXT = Family("qwen3_5_text", "Qwen3_5ForCausalLM", read_qwen3_5_text)
QWEN3_5 = Family("qwen3_5", "Qwen3_5ForConditionalGeneration", partial(read_qwen3_5, text=QWEN3_5_TEXT))

#: What checkpoints call layers that attend, and those of Mamba-2.
MIXER_TYPES = {
    **dict.fromkeys(("attention", "full_attention"), "attention"),
    **dict.fromkeys(("mamba", "linear_attention"), "mamba"),
}


def read_granite4(fields: ConfigFields, **own: Any) -> DecoderConfig:
    """Granite 3 with other names, and layers of Mamba-2 beside those that attend: gate and up are one layer of the
    checkpoint. `position_embedding_type` says whether there is a rotary embedding. `own` is for `read_decoder`."""
    kinds = fields.layer_kinds(MIXER_TYPES, ["mamba"] * layer_count(fields))
    if "mamba" in kinds:
        own |= _granite4_mamba(fields, kinds)
    unrotated = range(0 if fields.values.get("position_embedding_type") == "rope" else layer_count(fields))
    fields.values = fields.values | {"intermediate_size": fields.size("shared_intermediate_size") or 1}
    return read_granite(fields, naming="granitemoehybrid", nope_layers=tuple(unrotated), **own)


def _granite4_mamba(fields: ConfigFields, kinds: tuple[str, ...]) -> dict[str, Any]:
    """Granite 4's names for `read_mamba`, and what sizes its layers of Mamba-2 have."""
    if fields.switch("mamba_proj_bias"):
        fields.refuse("mamba_proj_bias", True, "supported are projections without biases")
    heads = fields.size("mamba_n_heads")
    inner = fields.size("mamba_expand") * fields.size("hidden_size")
    size = fields.values.get("mamba_d_head")
    size = inner // max(heads, 1) if size in (None, "auto") else fields.size("mamba_d_head")
    if heads * size != inner:
        fields.wrong.append(f"mamba_n_heads {heads} of {size} are not mamba_expand times hidden_size, {inner}")
    names = "mamba_n_groups", "mamba_n_heads", "mamba_d_state", "mamba_d_conv", "mamba_conv_bias"
    return read_mamba(fields, kinds, size, names)


def read_mamba(fields: ConfigFields, kinds: tuple[str, ...], size: int, names: Sequence[str]) -> dict[str, Any]:
    """What the layers of Mamba-2 are, among those of all `kinds`, for `read_decoder`: their heads are of `size`, and
    the fields of `names` have groups, heads, size of states, width of convolutions, and whether these have biases."""
    limit = fields.values.get("time_step_limit")
    if limit is not None and not (isinstance(limit, list) and limit[:1] == [0.0] and _is_huge(*limit[1:])):
        fields.refuse("time_step_limit", limit, "supported are step sizes without limits")
    groups, heads, state = (fields.size(name) for name in names[:3])
    if heads % max(groups, 1):
        fields.wrong.append(f"{names[1]} {heads} is no multiple of {names[0]} {groups}")
    return {
        "layer_kinds": kinds,
        "delta_heads": (groups, heads, state, size),
        "conv_width": _conv_width(fields, names[3]),
        "conv_bias": fields.switch(names[4]),
    }


def _is_huge(number: Any = None, *others: Any) -> bool:
    """Whether an upper limit is beyond all step sizes: infinity, as files write it, or what they write for it."""
    return not others and (number == {"__float__": "Infinity"} or (isinstance(number, float) and number > 1e30))
