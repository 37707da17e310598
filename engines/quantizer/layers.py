"""Quantizes one layer of a model: scales folded, linear layers packed, everything else as it was published."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from edgellm.engines.checkpoints.checkpoint import Checkpoint, converted
from edgellm.engines.checkpoints.weights import load_numpy_weights, part_places
from edgellm.engines.formats.tensors import STORAGE
from edgellm.engines.model.config import WeightSpec
from edgellm.engines.model.program import Program, single_weight
from edgellm.engines.model.steps import Linear
from edgellm.engines.quantizer.arithmetic import NUMPY, Arithmetic
from edgellm.engines.quantizer.scaling import foldings, scale_norm, search_scales
from edgellm.engines.quantizer.statistics import InputStatistics
from edgellm.engines.quantizer.written_layout import StoredTensor, packed_tensors
from edgellm.kernels.quantization.packed_weight import PackedWeight, WeightFormat

#: Of an EAGLE head, weights of two dimensions that are no linear layer's, or stay as published.
_TABLES = ("embed_tokens.weight", "lm_head.weight")
#: Parts of linear layers that stay dense, as published models have them: two rows for each head are little memory, and
#: what is wrong with a gate of the delta rule counts once for each token behind it. With the pattern that says so.
DENSE_PARTS = (".linear_attn.in_proj_b.weight", ".linear_attn.in_proj_a.weight")
DENSE_PATTERN = "re:.*linear_attn[.]in_proj_[ab]$"


def linears(program: Program) -> list[Linear]:
    """The linear layers of a program, in order of use."""
    return [step.multiplies for step in program.steps if step.multiplies is not None]


def scale_layer(
    program: Program,
    weights: dict[str, np.ndarray],
    seen: Mapping[str, InputStatistics],
    format: WeightFormat,
    dtypes: Mapping[str, str],
    arithmetic: Arithmetic = NUMPY,
) -> dict[str, InputStatistics]:
    """Scale what the layer's linear layers take, where that can be folded, as leaves the least error.

    `weights`, float32 by name, are changed in place; the layer's output stays the same. `dtypes` are those that norms
    are written in. Gives what each linear layer takes then, by its name.
    """
    places = foldings(program.steps)
    chosen = {
        linear.name: search_scales(weights[linear.weight.name], seen[linear.name], format, arithmetic)
        for linear in linears(program)
        if linear.name in places
    }
    for name, scales in chosen.items():
        place = places[name]
        if place.norm is not None:
            norm = place.norm.weight.name
            weights[norm], chosen[name] = scale_norm(weights[norm], place.norm.offset, scales, dtypes[norm])
            if place.norm.bias is not None:
                weights[place.norm.bias.name] /= chosen[name]
        elif place.linear is not None:
            rows = slice(place.start, place.start + len(scales))
            weights[place.linear.weight.name][rows] /= scales[:, None]
            if place.linear.bias is not None:
                weights[place.linear.bias.name][rows] /= scales
        weights[f"{name}.weight"] *= chosen[name]
    return {name: each.scaled(chosen[name]) if name in chosen else each for name, each in seen.items()}


def layer_tensors(
    checkpoint: Checkpoint,
    program: Program,
    weights: Mapping[str, np.ndarray],
    quantize: Callable[[str, np.ndarray], PackedWeight],
) -> dict[str, StoredTensor]:
    """What the layer is stored as, by published names: each tensor that fills a linear layer packed by itself, as
    `quantize` makes it of the linear layer's name and weight, `DENSE_PARTS`, norms and biases in their own dtype."""
    packed = {linear.weight.name: linear for linear in linears(program)}
    tensors: dict[str, StoredTensor] = {}
    for spec in program.weights.values():
        whole = quantize(packed[spec.name].name, weights[spec.name]) if spec.name in packed else None
        for name, part in _parts(spec):
            info = checkpoint.info(name)
            if whole is None or name.endswith(DENSE_PARTS):
                values = converted(info, weights[spec.name][part], info.dtype, source="float32")
                elements = np.asarray(values, STORAGE[info.dtype]).reshape(info.shape)
                tensors[info.name] = StoredTensor(info.dtype, elements)
            else:
                zeros = None if whole.zeros is None else whole.zeros[part]
                own = PackedWeight(whole.format, whole.codes[part], whole.scales[part], zeros)
                tensors |= packed_tensors(info.name.removesuffix(".weight"), own)
    return tensors


def packed_linears(
    checkpoint: Checkpoint,
    shapes: Mapping[str, tuple[int, ...]],
    format: WeightFormat,
    advance: Callable[[int], None],
    arithmetic: Arithmetic = NUMPY,
) -> dict[str, StoredTensor]:
    """What linear layers of a draft head are stored as, each rounded to nearest by itself; `shapes` are theirs, by the
    names of their weights. `advance` gets the rows of each. Raises CheckpointError for values that no weight has."""
    tensors: dict[str, StoredTensor] = {}
    for name, shape in shapes.items():
        weight = load_numpy_weights(checkpoint, [single_weight(name, *shape)])[name]
        tensors |= packed_tensors(name.removesuffix(".weight"), arithmetic.quantize_rows(weight, format))
        advance(len(weight))
    return tensors


def head_shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """The shapes of an EAGLE head's linear layers that are quantized, by the names of their weights."""
    return {
        name: info.shape
        for name, info in checkpoint.tensors.items()
        if name.endswith(".weight") and len(info.shape) == 2 and not name.endswith(_TABLES)
    }


def _parts(spec: WeightSpec) -> list[tuple[str, slice]]:
    """The published tensors of a buffer, and which of its rows (or elements) each is."""
    width = int(np.prod(spec.shape[1:]))
    return [(name, slice(place.start // width, place.stop // width)) for _, name, place in part_places([spec])]
