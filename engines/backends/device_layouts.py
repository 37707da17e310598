"""Which packed weights of a model the kernels of a GPU take, and what they are in its memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.errors import EngineError
from edgellm.engines.families.programs import ModelConfig, model_weights
from edgellm.engines.model.config import DELTA_PROJECTIONS, DecoderConfig, WeightSpec
from edgellm.engines.model.decoder import HEAD, decoder_weights, head_format
from edgellm.engines.model.memory_plan import weight_bytes
from edgellm.kernels.quantization.code_words import BLOCK_ROWS
from edgellm.kernels.quantization.device_layout import DeviceLayout, layout_refusal
from edgellm.kernels.quantization.packed_weight import WeightFormat
from edgellm.kernels.quantization.row_runs import DenseRows, PackedLayout, RunsLayout

#: By model ("base", "draft"), of those with packed weights, their layouts on the device by name.
PackedLayouts = Mapping[str, Mapping[str, PackedLayout]]
_REFUSED = (
    "the GPU's kernels do not take the packed weights of the {}. The NumPy backend runs them (--backend numpy); for a "
    "GPU take another release of the model, or quantize the unquantized one: edgellm quantize CHECKPOINT TARGET"
)


def model_layouts(
    models: Mapping[str, ModelConfig], checkpoints: Mapping[str, Callable[[], Checkpoint]], dtype: str
) -> PackedLayouts:
    """The layouts of the packed weights of models, whose checkpoints are opened, on engines that compute in `dtype`, as
    far as they are known before scales are read: such that they hold all.

    Raises EngineError, with what to do, for a linear layer that the kernels do not take, and CheckpointError.
    """
    found: dict[str, Mapping[str, PackedLayout]] = {}
    for model, config in models.items():
        with checkpoints[model]() as checkpoint:
            layouts = packed_layouts(checkpoint, model_weights(config), dtype)
        if isinstance(config, DecoderConfig):
            layouts |= _head_layout(config, dtype)
        if layouts and model in ("vision", "audio"):
            where = f"{model} encoder ({next(iter(layouts))}): there they are dense"
            raise EngineError(f"{checkpoint.path}: {_REFUSED.format(where)}")
        if layouts:
            found[model] = layouts
    return found


def gpu_layouts(
    models: Mapping[str, ModelConfig], checkpoints: Mapping[str, Callable[[], Checkpoint]], dtype: str
) -> tuple[PackedLayouts, str | None]:
    """`model_layouts`, and why the kernels of GPUs do not take them, if they do not."""
    try:
        return model_layouts(models, checkpoints, dtype), None
    except EngineError as error:
        return {}, str(error)


def with_delta_products(config: DecoderConfig, checkpoint: Checkpoint) -> DecoderConfig:
    """The same with the `delta_products` by which one linear layer multiplies what the checkpoint has in one format, in
    every layer that has the delta rule.

    Its gates b and a stay together, so that packing one of them otherwise is refused where kernels multiply.
    """
    formats: list[list[WeightFormat | None]] = [[] for _ in DELTA_PROJECTIONS]
    for spec in decoder_weights(replace(config, delta_products=())):
        if spec.name.endswith(".linear_attn.in_proj.weight"):
            for own, part in zip(formats, spec.parts, strict=True):
                own.append(checkpoint.weight_format(*part))
    formats[3] = formats[2]
    firsts = [formats.index(each) for each in formats]
    products = tuple(sorted(set(firsts)).index(first) for first in firsts)
    return replace(config, delta_products=products if any(products) else ())


def packed_layouts(checkpoint: Checkpoint, specs: Sequence[WeightSpec], dtype: str) -> dict[str, PackedLayout]:
    """The `model_layouts` of one checkpoint: those of `specs` that are packed, by name."""
    found: dict[str, PackedLayout] = {}
    for spec in specs:
        formats = part_formats(checkpoint, spec, dtype)
        known = [format for format in formats if format is not None]
        if not known:
            continue
        format = next((each for each in known if layout_refusal(each, dtype) is not None), known[0])
        reason = layout_refusal(format, dtype)
        if spec.experts and reason is None:
            arranged = any(each.permuted or each.scaled for each in known)
            reason = "experts whose inputs are permuted or scaled have no kernel" if arranged else None
        if len({*formats}) > 1 and not takes_runs(spec):
            listed = " and ".join(sorted({str(each or "dense") for each in formats}))
            reason = f"layers that are multiplied as one have one format there, not {listed}"
        if reason is not None:
            layer = f"linear layer {spec.parts[0][0].removesuffix('.weight')} ({format}): {reason}"
            if format.dtype != dtype and layout_refusal(format, format.dtype) is None:
                layer += f" (edgellm build --dtype {format.dtype})"
            raise EngineError(f"{checkpoint.path}: {_REFUSED.format(layer)}")
        runs, columns = list[Any](), spec.shape[1]
        inputs = [_inputs(checkpoint, *part, format) for format, part in zip(formats, spec.parts, strict=True)]
        for (own, _), of_run in groupby(zip(formats, inputs, spec.parts, strict=True), key=lambda each: each[:2]):
            rows = sum(shape[0] for *_, (_, shape) in of_run)
            if own is None:
                runs.append(DenseRows(rows, columns, dtype))
                continue
            # Scales that 16 bits may not hold are planned with 32.
            multiplied = "float32" if own.codes == "fp8" or own.dtype == "float32" else None
            runs.append(DeviceLayout(own, rows, columns, dtype=dtype, multiplied=multiplied))
        found[spec.name] = runs[0] if len(runs) == 1 else RunsLayout(tuple(runs))
    return found


def takes_runs(spec: WeightSpec) -> bool:
    """Whether the parts of a layer may be multiplied in launches of their own: where they have whole blocks of rows;
    those of a mixture's experts may not."""
    return not spec.experts and all(shape[0] % BLOCK_ROWS == 0 for _, shape in spec.parts)


def part_formats(checkpoint: Checkpoint, spec: WeightSpec, dtype: str) -> list[WeightFormat | None]:
    """How each part of a spec is packed on the device, for kernels that compute in `dtype`; None: it is dense there. So
    are those packed ones that may be, where kernels do not take them, or not beside the others; and a single row, the
    gate of an expert of all tokens, which the choice of experts reads as it is."""
    found, may_be_dense = list[WeightFormat | None](), True
    for name, shape in spec.parts:
        layout, format = checkpoint.layout(name, shape), checkpoint.weight_format(name, shape)
        own = layout is None or layout.may_be_dense
        may_be_dense &= own
        found.append(None if own and format is not None and layout_refusal(format, dtype) is not None else format)
    together = len({*found}) == 1 or takes_runs(spec) or not may_be_dense
    return found if together and spec.shape[0] > 1 else [None] * len(found)


def _inputs(checkpoint: Checkpoint, name: str, shape: tuple[int, ...], format: WeightFormat | None) -> bytes:
    """What a part says of the order of its inputs or of their scales, which is read where its format has either."""
    if format is None or not (format.permuted or format.scaled) or (layout := checkpoint.layout(name, shape)) is None:
        return b""
    tensor = name.removesuffix("weight") + layout.input_tensor
    return checkpoint.raw_bytes(tensor).tobytes() if tensor in checkpoint.tensors else b""


def _head_layout(config: DecoderConfig, dtype: str) -> dict[str, DeviceLayout]:
    """The layout of a head which is packed when a directory is built."""
    format = head_format(config.head, config.hidden_size, dtype)
    return {} if format is None else {HEAD: DeviceLayout(format, config.vocab_size, config.hidden_size)}


def packed_memory(models: Mapping[str, ModelConfig], packed: PackedLayouts, dtype: str) -> dict[str, int]:
    """What the weights of models with packed ones take on the device, in bytes, by the memory plan's names."""
    found = {}
    for model, layouts in packed.items():
        specs = model_weights(models[model])
        dense = sum(weight_bytes(spec, dtype) for spec in specs if spec.name not in layouts)
        name = "weights" if model == "base" else f"{model} weights"
        found[name] = dense + sum(math.prod(layout.shape) for layout in layouts.values())
    return found
