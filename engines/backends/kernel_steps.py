"""What a program's steps ask of hand-written kernels: rows, scratch, passes, and what no kernel can do."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

from edgellm.engines.backends.recurrent_steps import RECURRENT, UNGATED, recurrent_refusal
from edgellm.engines.model.adapted_projections import AdaptedProjection
from edgellm.engines.model.limits import EngineShape
from edgellm.engines.model.program import (
    Attention,
    LinearResidual,
    NormLinear,
    NormParts,
    Program,
    Scale,
    SideBySide,
    Step,
)
from edgellm.engines.model.states import Edge, without_layer
from edgellm.kernels.decode.attention import AttentionShape, attention_partials
from edgellm.kernels.decode.contract import (
    ACTIVATIONS,
    MAX_PARTS,
    MAX_TILED_ROWS,
    MAX_TOKENS,
    adapters_refusal,
    attention_refusal,
    low_words,
    padded_columns,
)
from edgellm.kernels.prefill.contract import RING_STEP
from edgellm.kernels.quantization.device_layout import DeviceLayout

#: Where the inputs of a linear layer come together that does not norm them itself.
JOINED_INPUTS = "joined_inputs"
#: What a linear layer gives before it is normed and added.
UNNORMED = "unnormed"


def packed_layout(step: Step, program: Program) -> DeviceLayout | None:
    """How a step's weight is packed, if it is."""
    return None if step.multiplies is None else program.packed.get(step.multiplies.weight.name)


def step_rows(step: Step, program: Program) -> int:
    """Rows of activations that a step computes."""
    return math.prod(program.kinds[step.output][0][:-1])


def comes_rounded(value: str, program: Program) -> bool:
    """Whether a value is an input of the engine in the compute dtype; the residual stream between segments is not."""
    return value in program.inputs and program.inputs[value][1] == "compute"


def most_rows(program: Program) -> int:
    """The most rows of its steps that multiply or attend."""
    steps = (step for step in program.steps if step.multiplies is not None or isinstance(step, Attention))
    return max(step_rows(step, program) for step in steps)


def step_refusal(step: Step, program: Program) -> str | None:
    """What about a step no kernel can do, whatever the GPU has; None if there is nothing."""
    shape = program.shape
    if isinstance(step, Attention):
        if shape.tokens > MAX_TOKENS:
            return f"it takes up to {MAX_TOKENS} tokens of a sequence, not {shape.tokens}"
        if step.looks_ahead:
            return "a token of an image sees those behind it, which the kernels of long prompts do"
        return attention_refusal(*step.heads, shape.kv_cache == "int8") or ring_refusal(shape)
    if isinstance(step, Scale | SideBySide):
        return None
    if isinstance(step, NormParts):
        return parts_refusal(step)
    if isinstance(step, RECURRENT):
        return recurrent_refusal(step, program)
    if not isinstance(step, NormLinear | LinearResidual):
        return "there is no kernel for it"
    gated = isinstance(step, NormLinear) and step.gated
    if not gated and program.kinds[step.output][1] != "float32" and step.output in program.outputs:
        return f"kernels put {step.output} out in float32 alone"
    adapted = program.adapted.get(step.linear.name)
    refused = adapted and adapters_refusal(shape.lora_slots, shape.lora_rank, module_rows(adapted))
    if refused:
        return refused
    columns = step.linear.weight.shape[1]
    if columns % 8:
        return f"widths must be multiples of 8, not {columns}"
    if isinstance(step, LinearResidual):
        return "features are taken where what is added is normed" if step.norm and step.keep else None
    if any(norm.bias is not None for given in step.inputs for norm in given.norms):
        return "there is no kernel for layer norms"
    if step.activation is not None and not (step.gated and step.activation in ACTIVATIONS):
        return f"the activation {step.activation} has no kernel"
    return None


def parts_refusal(step: NormParts) -> str | None:
    """Why kernels do not norm the parts of a value where they are, None if they do."""
    widths = [norm.weight.shape[0] for norm in step.norms]
    if step.value != step.output or not 1 <= len(widths) <= MAX_PARTS or any(width % 8 for width in widths):
        return f"up to {MAX_PARTS} parts of rows are normed where they are, of widths in eights, not {widths}"
    return "there is no kernel for layer norms" if any(norm.bias is not None for norm in step.norms) else None


def ring_refusal(shape: EngineShape) -> str | None:
    """Why kernels do not take the rings of windows of a shape, None if they do, or there are none."""
    if shape.window_rows % RING_STEP == 0:
        return None
    return f"rings of windows have a multiple of {RING_STEP} rows, not {shape.window_rows}"


def module_rows(adapted: AdaptedProjection) -> tuple[int, ...]:
    """The rows of each layer that is multiplied as one with others."""
    return tuple(rows for _, rows in adapted.modules)


def adapter_words(program: Program) -> int:
    """The most words that a linear layer needs as `LinearAdapters.low`."""
    shape = program.shape
    fused = max((len(each.modules) for each in program.adapted.values()), default=0)
    return low_words(most_rows(program), shape.lora_slots, fused, shape.lora_rank)


def attention_shape(step: Attention, shape: EngineShape) -> AttentionShape:
    """What the attention of a layer works on."""
    rows, window = (shape.kv_rows, 0) if step.window is None else (shape.window_rows, step.window)
    return AttentionShape(shape.batch, shape.tokens, *step.heads, rows, shape.kv_cache == "int8", window)


def scratch_of(program: Program, many_tokens: bool = False) -> Edge:
    """Shape and dtype of every value of a program that is not at its edge, and of what kernels need beside them;
    `many_tokens`: those of prompts."""
    shape, edge = program.shape, program.inputs.keys() | program.outputs.keys()
    found: Edge = {}
    packed = 0
    for step in program.steps:
        rows, width = step_rows(step, program), program.kinds[step.output][0][-1]
        dtype = "float32"
        if isinstance(step, Attention):
            dtype = "compute"
            if not many_tokens:
                found["partial"] = ((attention_partials(attention_shape(step, shape)),), "float32")
            if step.gated:
                found[UNGATED] = ((rows, program.kinds[step.value][0][-1] - width), "float32")
        elif isinstance(step, RECURRENT):
            dtype = program.kinds[step.output][1]
        elif isinstance(step, NormLinear):
            dtype, columns = "compute" if step.gated else "float32", step.linear.weight.shape[1]
            given = math.prod(program.kinds[step.inputs[-1].value][0][:-1])
            packed = max(packed, given * padded_columns(columns))
            if step.keep is not None and step.keep.target not in edge:
                found[step.keep.target] = ((given, columns // len(step.inputs)), "compute")
        elif isinstance(step, LinearResidual):
            given = math.prod(program.kinds[step.residual][0][:-1])
            if step.norm is not None:
                most = max(rows * width, found.get(UNNORMED, ((0,), dtype))[0][0])
                found[UNNORMED] = ((most,), dtype)
            if step.keep is not None and step.selects:
                packed = max(packed, given * width)
            if step.keep is not None and step.keep.target not in edge:
                found[step.keep.target] = ((given, width), "compute")
        if step.output not in edge:
            found[without_layer(step.output)] = ((rows, width), dtype)
    return found | {JOINED_INPUTS: ((packed,), "compute")}


def passes(shape: EngineShape) -> list[tuple[slice, EngineShape]]:
    """The slots of each pass, as even as they can be, and its shape: one pass but for large steps of several slots."""
    count = 1
    if shape.phase != "decode" and shape.tokens <= MAX_TILED_ROWS:
        count = -(-shape.batch // (MAX_TILED_ROWS // shape.tokens))
    ends = [shape.batch * number // count for number in range(count + 1)]
    return [(slice(start, end), replace(shape, batch=end - start)) for start, end in pairwise(ends)]
