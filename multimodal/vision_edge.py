"""The edge of the vision engines: what goes in, and of which shapes engines exist.

An engine takes one image, its patches padded to the engine's number of rows; what depends on the image's grid alone
(`vision_layout`) goes in beside them.
"""

from __future__ import annotations

from edgellm.engines.model.config import EngineShape
from edgellm.engines.model.operations import Operations, Tensor
from edgellm.engines.model.vision import VisionConfig


def vision_inputs(config: VisionConfig, shape: EngineShape) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of every input but the weights, by name.

    `patches` [1, R, elements], the image's first; for Qwen's `rotary_cos_sin` [1, R, D] and `attention_mask`
    [1, 1, 1, R] (which rows are patches); for Qwen2.5-VL `input_rows` [1, R] (which patch stands in each row),
    `window_mask` [windows, 1, 1, rows of a window] and `output_rows` [1, M] (which merged row is each token's); for
    Qwen3-VL `position_embeddings` [1, R, H]. Masks are there if a layer reads them.
    """
    rows = shape.tokens
    inputs: dict[str, tuple[tuple[int, ...], str]] = {"patches": ((1, rows, config.patch_elements), "compute")}
    if config.family == "llava":
        return inputs
    inputs["rotary_cos_sin"] = ((1, rows, config.head_dim), "float32")
    full = len(config.full_attention_layers) if config.window_size else config.num_layers
    if full:
        inputs["attention_mask"] = ((1, 1, 1, rows), "bool")
    if full < config.num_layers:
        window = config.window_patches
        inputs["window_mask"] = ((rows // window, 1, 1, window), "bool")
    if config.family == "qwen2_5_vl":
        inputs["input_rows"] = ((1, rows), "int32")
        inputs["output_rows"] = ((1, embedding_rows(config, shape)), "int32")
    else:
        inputs["position_embeddings"] = ((1, rows, config.hidden_size), "float32")
    return inputs


def embedding_rows(config: VisionConfig, shape: EngineShape) -> int:
    """M: rows of the outputs; an image's tokens come first, what stands behind them is padding."""
    return config.token_count((1, 1, shape.tokens))


def vision_outputs(config: VisionConfig) -> tuple[str, ...]:
    """Names of the outputs, each [1, M, H of the language model] compute: embeddings, then deepstack features."""
    return ("image_embeddings", *(deepstack_name(place) for place in range(len(config.deepstack_layers))))


def deepstack_name(place: int) -> str:
    """The output with the features that are added after the language model's layer `place`."""
    return f"deepstack_features_{place}"


def declare_inputs(operations: Operations[Tensor], config: VisionConfig, shape: EngineShape) -> dict[str, Tensor]:
    """Declare all `vision_inputs`."""
    inputs = vision_inputs(config, shape)
    return {name: operations.input(name, dimensions, dtype) for name, (dimensions, dtype) in inputs.items()}
