"""Layer norms and activations without a gate, launches of their own, on the GPU: a row has the same bits whatever the
number of rows, by each way of a linear layer, packed as dense, captured or not; and float64's values but for rounding.

Needs a GPU, not TensorRT. Prompts are in test_prompt_engine_gpu.py, whose models have such layers, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from decode_models import (
    LLAMA,
    SCALED,
    TOLERANCE,
    TREE,
    Loaded,
    assert_step_equals_twin,
    random_adapters,
    random_model,
    step_shape,
)
from device_bits import relative, rounded
from packed_checkpoints import write_packed
from tiny_families import FAMILIES

from edgellm.engines.backends.numpy_operations import NumpyOperations
from edgellm.engines.backends.steps.linear import FewRows, ManyRows
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.families.programs import model_program
from edgellm.engines.model.adapted_projections import SCALES
from edgellm.engines.model.config import DecoderConfig
from edgellm.engines.model.graph import ProgramGraph
from edgellm.engines.model.limits import EngineLimits, EngineShape
from edgellm.engines.runners.comparison import greedy_tokens, open_runner, teacher_forced_logits
from edgellm.kernels.encoder.contract import ACTIVATIONS

pytestmark = pytest.mark.gpu
ROWS = 160
#: Widths of a small model of this kind, and odd ones.
WIDE = replace(SCALED["starcoder2"], hidden_size=1536, intermediate_size=6144, num_heads=12, head_dim=128)
MODELS: dict[str, DecoderConfig] = {
    "starcoder2": replace(WIDE, rotary_dim=128, feature_layers=(0, 2)),
    "odd": replace(SCALED["starcoder2"], hidden_size=1032, intermediate_size=2056, feature_layers=(1,)),
    "gate": replace(SCALED["layer_norms_and_a_gate"], hidden_size=512, intermediate_size=1544),
    "rms": replace(LLAMA, gated_mlp=False, hidden_act="silu"),
}
MODEL = pytest.mark.parametrize("name", MODELS)
DTYPE = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
#: What each sequence of a step has of its own.
_OF_SEQUENCES = {"inputs_embeds", "rope_rotary_cos_sin", "kvcache_start_index", "attention_mask", SCALES}


def of_first(arrays: dict[str, np.ndarray], count: int) -> dict[str, np.ndarray]:
    """What the first sequences of a step are bound to."""
    return {
        name: array[:count].copy() if name in _OF_SEQUENCES or "_cache_" in name else array
        for name, array in arrays.items()
    }


def results(gpu, config: DecoderConfig, shape: EngineShape, arrays: dict[str, np.ndarray], *way) -> dict:
    """Outputs and KV rows of a step, as the device holds them."""
    loaded = Loaded(gpu, config, shape, arrays, *way)
    loaded.engine.enqueue()
    program = model_program(config, shape)
    return {name: gpu.download(loaded.arrays[name]) for name in (*program.outputs, *program.states)}


@DTYPE
@MODEL
def test_a_row_has_the_same_bits_whatever_the_number_of_rows(gpu, name: str, dtype: str) -> None:
    """Of decode steps of 1 to 64 sequences, by kernels of few rows and of many."""
    config, starts = MODELS[name], [(29 * sequence + 7) % 150 for sequence in range(64)]
    arrays = random_model(config, len(starts), ROWS, starts)
    expected = results(gpu, config, step_shape(arrays, ROWS), arrays, dtype)
    for count in (1, 2, 5, 16, 17, 40):
        own = of_first(arrays, count)
        for way in (FewRows, ManyRows):
            for key, found in results(gpu, config, step_shape(own, ROWS), own, dtype, way).items():
                np.testing.assert_array_equal(found, expected[key][:count], err_msg=f"{key}, {count} {way.__name__}")


@MODEL
def test_a_row_with_adapters_has_the_same_bits_whatever_the_number_of_rows(gpu, name: str) -> None:
    config, taken = MODELS[name], [sequence % 3 or None for sequence in range(24)]
    starts = [(29 * sequence + 7) % 150 for sequence in range(len(taken))]
    arrays = random_model(config, len(taken), ROWS, starts) | random_adapters(config, taken, 3, 8)
    adapted = {"lora_slots": 3, "lora_rank": 8}
    expected = results(gpu, config, replace(step_shape(arrays, ROWS), **adapted), arrays, "float16")
    plain = results(gpu, config, step_shape(arrays, ROWS), arrays, "float16")
    assert relative(expected["logits"][1:2], plain["logits"][1:2]) > 0.01
    for count in (1, 3, 16, 17):
        own = of_first(arrays, count)
        found = results(gpu, config, replace(step_shape(own, ROWS), **adapted), own, "float16")
        np.testing.assert_array_equal(found["logits"], expected["logits"][:count])


@DTYPE
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("parents", [(None,), TREE], ids=["decode", "tree"])
def test_each_activation_is_that_of_the_twin(gpu, activation: str, parents, dtype: str) -> None:
    config = replace(MODELS["starcoder2"], hidden_act=activation)
    assert_step_equals_twin(gpu, config, [77, 20], 128, dtype, parents)


@DTYPE
@MODEL
def test_logits_and_features_are_those_of_float64(gpu, name: str, dtype: str) -> None:
    config, starts = MODELS[name], [77, 3, 100]
    arrays = rounded(random_model(config, len(starts), ROWS, starts), dtype)
    shape = step_shape(arrays, ROWS)
    loaded = Loaded(gpu, config, shape, arrays, dtype)
    loaded.engine.enqueue()
    expected = {key: array.copy() for key, array in arrays.items()}
    program = model_program(config, shape)
    ProgramGraph(NumpyOperations(expected, expected, wide=True), program).run()
    for output in program.outputs:
        assert relative(loaded.values(output), expected[output]) < TOLERANCE[dtype], output


@MODEL
def test_a_captured_step_has_the_bits_of_one_that_is_not(gpu, name: str) -> None:
    config, starts = MODELS[name], [40, 9]
    arrays = random_model(config, len(starts), ROWS, starts)
    loaded = Loaded(gpu, config, step_shape(arrays, ROWS), arrays, "float16")
    loaded.engine.enqueue()
    expected = gpu.download(loaded.arrays["logits"])
    graph = gpu.capture(loaded.engine.enqueue, "decode")
    assert graph != loaded.engine.enqueue, "the step was not captured"
    for _ in range(3):
        loaded.clear_logits()
        graph()
        np.testing.assert_array_equal(gpu.download(loaded.arrays["logits"]), expected)


def test_packed_layers_have_the_bits_of_their_dense_twin(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Of a prompt of 100 tokens, in chunks of 80 and 20, and of steps behind it."""
    published = make_checkpoint(tmp_path / "model", 4, **FAMILIES["starcoder2"])
    prompt, found = [(7 * place + 3) % 250 for place in range(100)], []
    for folder in write_packed(published, tmp_path / "packed", tmp_path / "twin", None):
        built = tmp_path / f"{folder.name}_engines"
        build_engine_directory(folder, built, EngineLimits(1, 80, 192), None, "float16")
        with open_runner("tensorrt", EngineDirectory.open(built)) as runner:
            answer = greedy_tokens(runner, prompt, 12)
            found.append((answer, teacher_forced_logits(runner, prompt, answer)))
    (packed, packed_logits), (dense, dense_logits) = found
    assert packed == dense
    np.testing.assert_array_equal(packed_logits, dense_logits)
