"""Qwen2 and Qwen2.5: biases on query, key and value. Qwen3: norms on query and key, and heads whose size does not
follow from hidden_size. Qwen2.5-VL and Qwen3-VL: their layers, at positions in time, height and width."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from edgellm.engines.families.decoders import (
    Family,
    biases,
    class_defaults,
    family_of,
    read_decoder,
    text_fields,
    with_image_tokens,
)
from edgellm.engines.families.fields import ConfigFields
from edgellm.engines.formats.strict_formats import is_integer
from edgellm.engines.model.config import DecoderConfig

#: What the vision encoders have where the file does not say.
_IMAGE_TOKEN, QWEN_MERGE_SIZE, _DEEPSTACK_LAYERS = 151655, 2, 3


def _behind_full_layers(fields: ConfigFields) -> Callable[[int], bool]:
    """Which layers look back on a window: those behind the first `max_window_layers`, which attend to all."""
    value = fields.values.get("max_window_layers")
    full = 28 if value is None else value
    if not is_integer(full) or full < 0:
        fields.expect("max_window_layers", value, "a whole number from 0 on")
        full = 0
    return lambda layer: layer >= full


#: `sliding_window` has no effect unless `use_sliding_window` is true.
QWEN2 = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    lambda fields: read_decoder(fields, windowed=_behind_full_layers(fields), attention_bias=True),
)


def read_qwen3(fields: ConfigFields, mrope: tuple[tuple[int, ...], bool] = ((), False)) -> DecoderConfig:
    """`attention_bias` gives all four projections of the attention a bias; `mrope` is for `read_decoder`."""
    windowed = _behind_full_layers(fields)
    return read_decoder(fields, mrope=mrope, windowed=windowed, **biases(fields), qk_norm=True)


QWEN3 = Family("qwen3", "Qwen3ForCausalLM", read_qwen3)


@family_of("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration")
def QWEN2_5_VL(fields: ConfigFields) -> DecoderConfig:
    text = text_fields(fields, class_defaults("qwen2_5_vl_text"))
    config = read_decoder(text, mrope=((16, 24, 24), False), attention_bias=True)
    return with_image_tokens(config, fields, _IMAGE_TOKEN, QWEN_MERGE_SIZE)


def read_qwen3_vl(
    fields: ConfigFields, read: Callable[..., DecoderConfig] = read_qwen3, text: str = "qwen3_vl_text"
) -> DecoderConfig:
    """Positions are interleaved; features of the images are added to the first layers' outputs. The language model is
    read by `read`, with the defaults of `text`."""
    config = read(text_fields(fields, class_defaults(text)), mrope=((24, 20, 20), True))
    taps = fields.section("vision_config").get("deepstack_visual_indexes")
    if taps is not None and not isinstance(taps, list):
        fields.expect("vision_config: deepstack_visual_indexes", taps, "a list of layers")
        taps = None
    count = _DEEPSTACK_LAYERS if taps is None else len(taps)
    if count > config.num_layers > 0:
        fields.wrong.append(f"features of {count} layers are added to {config.num_layers} layers, expected no more")
    return replace(with_image_tokens(config, fields, _IMAGE_TOKEN, QWEN_MERGE_SIZE), deepstack_layers=count)


QWEN3_VL = Family("qwen3_vl", "Qwen3VLForConditionalGeneration", read_qwen3_vl)
