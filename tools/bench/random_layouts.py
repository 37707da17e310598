"""How the weights of models with random ones are packed, and what of each kind is repeated."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from random_draft import SCALE
from random_gguf import type_in_mixture

from edgellm.engines.building.draft_weights import chosen_format
from edgellm.engines.model.config import DecoderConfig, DraftConfig, WeightSpec
from edgellm.engines.model.decoder import decoder_weights
from edgellm.engines.model.draft_decoder import draft_weights
from edgellm.engines.quantization.gguf_blocks import BlockLayout
from edgellm.kernels.quantization.device_layout import DeviceLayout, device_layout
from edgellm.kernels.quantization.packed_weight import (
    LEVEL_COLUMNS,
    Levels,
    PackedWeight,
    WeightFormat,
    code_values,
    rounded,
)
from edgellm.kernels.quantization.row_runs import PackedLayout, RunsLayout

#: Of gpt-oss's experts.
MXFP4 = WeightFormat("fp4", 32, False, "float32", scaling="powers")
#: Layers of a mixture that choose among experts: they stay dense, as whoever packs leaves them.
_CHOOSERS = (".mlp.gate.weight", ".mlp.shared_expert_gate.weight")


def even_weight(format: WeightFormat, rows: int, columns: int) -> PackedWeight:
    """Evenly distributed codes with scales, and minima, that give them the deviation of dense weights around zero; both
    compute dtypes hold the scales."""
    random, values, shape = np.random.default_rng(0), code_values(format.codes), (rows, format.groups(columns))
    # Of floats those that are numbers, and no zero with a sign, which nobody stores.
    known = np.flatnonzero(np.isfinite(values) & ~((values == 0) & np.signbit(values)))
    codes, values = random.choice(known, (rows, columns)).astype(np.uint8), values[known]
    scale = SCALE / values.std()
    if format.scaling == "powers":
        scale = 2.0 ** np.round(np.log2(scale))
    found = rounded(np.array([scale, -values.mean() * scale], np.float32), "bfloat16").astype(np.float16)
    found = found[: 1 + format.minima]
    if format.scaling != "levels":
        own = [np.full(shape, each, np.float32) for each in found]
        return PackedWeight(format, codes, own[0], minima=own[1] if format.minima else None)
    factors = np.broadcast_to(found / np.float16(32), (rows, -(-columns // LEVEL_COLUMNS), len(found)))
    levels = Levels(factors, np.full((*shape, len(found)), 32, np.int8))
    own = [np.ascontiguousarray(each) for each in np.moveaxis(levels.products(format.group), -1, 0)]
    return PackedWeight(format, codes, own[0], minima=own[1] if format.minima else None, levels=levels)


def packed_layers(config: DecoderConfig, weights: str, dtype: str) -> dict[str, PackedLayout]:
    """How the weights of layers are packed: symmetric int4 in groups of 128, but for those that choose experts; where
    `weights` are "mxfp4" experts alone."""
    specs = [spec for spec in linear_specs(config) if ".layers." in spec.name]
    if weights == "mxfp4":
        like = device_layout(even_weight(MXFP4, 8, 256), dtype)
        return {spec.name: replace(like, rows=spec.shape[0], columns=spec.shape[1]) for spec in specs if spec.experts}
    format = WeightFormat("int4", 128, False, dtype)
    return {spec.name: DeviceLayout(format, *spec.shape, dtype == "float16") for spec in specs}


def linear_specs(config: DecoderConfig) -> list[WeightSpec]:
    """The weights of linear layers that may be packed, and of the embedding."""
    dense = (spec for spec in decoder_weights(config) if spec.dtype == "compute" and len(spec.shape) == 2)
    matrices = (spec for spec in dense if spec.name.endswith(".weight") and len(spec.parts[0][1]) == 2)
    return [spec for spec in matrices if not spec.name.endswith(_CHOOSERS)]


def gguf_layouts(config: DecoderConfig, mixture: str, dtype: str) -> dict[str, PackedLayout]:
    """How the weights of a GGUF file are packed that is such a mixture; an embedding as the head."""
    found, layers, made = dict[str, PackedLayout](), config.num_layers, dict[str, DeviceLayout]()
    for spec in linear_specs(config):
        layer, runs = int(spec.name.split(".")[2]) if ".layers." in spec.name else -1, list[DeviceLayout]()
        for part, shape in spec.parts:
            module = "attn_v" if ".v_proj." in part else "ffn_down" if ".down_proj." in spec.name else ""
            kind = type_in_mixture(mixture, f"{module}_exps" if spec.experts else module, layer, layers)
            if kind not in made:
                made[kind] = device_layout(even_weight(BlockLayout(kind).format(dtype), 8, 256), dtype)
            if runs and runs[-1].format == made[kind].format:
                runs[-1] = replace(runs[-1], rows=runs[-1].rows + shape[0])
            else:
                runs.append(replace(made[kind], rows=shape[0], columns=shape[1]))
        found[spec.name] = runs[0] if len(runs) == 1 else RunsLayout(tuple(runs))
    return found


def draft_layouts(draft: DraftConfig, layers: WeightFormat, dtype: str) -> dict[str, DeviceLayout]:
    """How a build packs a draft beside a base whose `layers` are packed: all but what chooses experts."""
    matrices = (spec for spec in draft_weights(draft) if len(spec.shape) == 2)
    shapes = {spec.name: spec.shape for spec in matrices if not spec.name.endswith(_CHOOSERS)}
    format = chosen_format("auto", layers, math.gcd(*(shape[1] for shape in shapes.values())), dtype)
    assert format is not None
    small = format.codes == "int4" and dtype == "float16"
    return {name: DeviceLayout(format, *shape, small) for name, shape in shapes.items()}
