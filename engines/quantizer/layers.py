"""Quantizes one layer of a model: scales folded, linear layers packed, everything else as it was published."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from edgellm.engines.checkpoints.checkpoint import Checkpoint, converted
from edgellm.engines.checkpoints.weights import load_numpy_weights, part_places
from edgellm.engines.formats.safetensors_file import TensorInfo
from edgellm.engines.formats.tensors import STORAGE
from edgellm.engines.model.config import DecoderConfig, WeightSpec
from edgellm.engines.model.program import Program, single_weight
from edgellm.engines.model.steps import Experts, Linear
from edgellm.engines.quantizer.arithmetic import NUMPY, Arithmetic
from edgellm.engines.quantizer.calibration import layer_program
from edgellm.engines.quantizer.scaling import expert_linears, experts_apart, foldings, scale_norm, search_scales
from edgellm.engines.quantizer.statistics import InputStatistics
from edgellm.engines.quantizer.written_layout import StoredTensor, packed_tensors
from edgellm.kernels.quantization.packed_weight import PackedWeight, WeightFormat

#: Of an EAGLE head, weights of two dimensions that are no linear layer's, or stay as published.
_TABLES = ("embed_tokens.weight", "lm_head.weight")
#: Parts of linear layers that stay dense, as published models have them: two rows for each head are little memory, and
#: what is wrong with a gate of the delta rule counts once for each token behind it. With the pattern that says so.
DENSE_PARTS = (".linear_attn.in_proj_b.weight", ".linear_attn.in_proj_a.weight")
DENSE_PATTERN = "re:.*linear_attn[.]in_proj_[ab]$"


def linears(program: Program, experts: int | None = None) -> list[Linear]:
    """The linear layers of a program that are quantized, in order of use; of a mixture those of the first so many
    `experts`, by default of all."""
    found: list[Linear] = []
    for step in program.steps:
        if isinstance(step, Experts):
            found += [linear for pair in expert_linears(step)[:experts] for linear in pair] + list(step.shared[:2])
        elif step.multiplies is not None:
            found.append(step.multiplies)
    return found


def router_modules(program: Program) -> list[str]:
    """The modules, by their published names, that choose experts or weigh one for all tokens; they stay dense."""
    layers = [each for step in program.mixtures for each in (step.router, *step.shared[2:])]
    return [linear.weight.parts[0][0].removesuffix(".weight") for linear in layers]


def router_patterns(config: DecoderConfig) -> list[str]:
    """Patterns of these, as compressed-tensors matches them, of all layers of a model."""
    programs = (layer_program(config, index, 1) for index in range(config.num_layers))
    names = (module.split(".", 3)[3].replace(".", "[.]") for own in programs for module in router_modules(own))
    return [f"re:.*{each}$" for each in dict.fromkeys(names)]


def layer_specs(program: Program) -> list[WeightSpec]:
    """The weights of a layer, each expert's by itself."""
    return [each for spec in program.weights.values() for each in (experts_apart(spec) if spec.experts else [spec])]


class _ExpertArrays:
    """What a step reads experts from: the arrays of `weights` by the names that `experts_apart` gives them."""

    def __init__(self, weights: Mapping[str, Any], spec: WeightSpec) -> None:
        self._weights, self._names, self.shape = weights, [each.name for each in experts_apart(spec)], spec.shape

    def of(self, expert: int) -> np.ndarray:
        """The matrix [N, K] of one expert, float32."""
        return self._weights[self._names[expert]]


def layer_weights(checkpoint: Checkpoint, program: Program) -> dict[str, Any]:
    """The weights of a layer, float32 by the names of `layer_specs`, and what its program takes."""
    weights = load_numpy_weights(checkpoint, list(program.weights.values()))
    for spec in [each for each in program.weights.values() if each.experts]:
        matrices = weights[spec.name]
        for expert, own in enumerate(experts_apart(spec)):
            weights[own.name] = np.require(matrices.of(expert), requirements=["C", "W"])
        weights[spec.name] = _ExpertArrays(weights, spec)
    return weights


def published_name(name: str, info: TensorInfo) -> str:
    """What a tensor is called where it is written: as published, or where that is a slice of a stack of experts, as if
    these had a tensor each."""
    stack, bracket, _ = info.name.partition("[")
    if not bracket:
        return info.name
    return stack[: stack.index("layers.")] + name[name.index("layers.") :]


def is_eagle_head(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint is an EAGLE head's, not a language model's."""
    return any(f"{prefix}fc.weight" in checkpoint.tensors for prefix in ("", "model."))


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
        if linear.name in places and linear.name in seen
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
    for spec in layer_specs(program):
        whole = quantize(packed[spec.name].name, weights[spec.name]) if spec.name in packed else None
        width = math.prod(spec.shape[1:])
        for _, name, place in part_places([spec]):
            info, part = checkpoint.info(name), slice(place.start // width, place.stop // width)
            if whole is None or name.endswith(DENSE_PARTS):
                values = converted(info, weights[spec.name][part], info.dtype, source="float32")
                elements = np.asarray(values, STORAGE[info.dtype]).reshape(info.shape)
                tensors[published_name(name, info)] = StoredTensor(info.dtype, elements)
            else:
                zeros = None if whole.zeros is None else whole.zeros[part]
                own = PackedWeight(whole.format, whole.codes[part], whole.scales[part], zeros)
                tensors |= packed_tensors(published_name(name, info).removesuffix(".weight"), own)
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
