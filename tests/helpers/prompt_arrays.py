"""Models whose prompts are taken, and what their programs are bound to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from decode_models import EAGLE3, FAMILIES, HEADS, LLAMA, RECURRENT, SCALED

from edgellm.engines.backends.numpy_operations import NumpyOperations
from edgellm.engines.model.config import DecoderConfig
from edgellm.engines.model.graph import ProgramGraph
from edgellm.engines.model.program import Program
from edgellm.kernels.quantization.rows import quantize_rows

DEEP = replace(LLAMA, num_layers=8)
PROMPT_MODELS: dict[str, DecoderConfig] = {
    **FAMILIES,
    **SCALED,
    **RECURRENT,
    "deep": DEEP,
    "features": replace(DEEP, feature_layers=(2, 4, 5)),
    "feature_of_the_last_layer": replace(DEEP, feature_layers=(2, 7)),
    "last_feature": replace(DEEP, feature_layers=(8,)),
    "features_of_the_end": replace(DEEP, feature_layers=(3, 7, 8)),
    "deepstack": replace(DEEP, deepstack_layers=3),
    "images": replace(DEEP, image_tokens=9),
}
#: Heads of drafts, of each generation.
DRAFTS = {**HEADS, "eagle1": replace(EAGLE3, generation="1", feature_layers=(2,), layer_prefix="layers.0.")}


def random_arrays(program: Program, start: int) -> dict[str, np.ndarray]:
    """What a program is bound to, in float32; the mask is causal."""
    random, shape = np.random.default_rng(0), program.shape
    arrays = {}
    for name, (size, kind) in program.edge.items():
        if not name.startswith("present_"):
            values = random.standard_normal(size, np.float32) * 0.1
            arrays[name] = values if kind in ("compute", "float32") else values.astype(kind)
    arrays["kvcache_start_index"][:] = start
    if "last_token_ids" in arrays:
        arrays["last_token_ids"][:] = shape.tokens - 3
    if "state_tokens" in arrays:
        arrays["state_tokens"][:] = shape.tokens - 2
    rows = start + np.arange(shape.tokens)[:, None]
    if "last_seen" in arrays:  # the last of an image's 9 tokens; all of the step's end with one
        arrays["last_seen"][:] = np.minimum(start + np.arange(shape.tokens) // 9 * 9 + 8, start + shape.tokens - 1)
    arrays["attention_mask"][:] = np.arange(shape.key_range) <= rows
    return arrays


def bound_to(arrays: Mapping[str, np.ndarray], program: Program) -> dict[str, np.ndarray]:
    """With the caches as outputs."""
    return {**arrays, **{f"present_{name}": arrays[name] for name in program.changed}}


def assert_gives_what_the_program_does(engine: Any, program: Program, start: int, tolerance: float) -> None:
    """An attached engine and the whole program on the same arrays, twice."""
    expected = random_arrays(program, start)
    found, before = ({name: array.copy() for name, array in expected.items()} for _ in range(2))
    ProgramGraph(NumpyOperations(expected, expected), program).run()
    engine.bind(bound_to(found, program))
    for _ in range(2):
        for name in program.outputs:
            found[name].fill(np.nan)
        for name in program.states:
            found[name][...] = before[name]
        engine.enqueue()
        for name in (*program.outputs, *program.states):
            np.testing.assert_allclose(found[name], expected[name], rtol=tolerance, atol=tolerance, err_msg=name)


def assert_keeps_rows_of_8_bits(engine: Any, program: Program) -> None:
    """An attached engine and the whole program read the same rows of 8 bits, and leave the same ones."""
    expected = random_arrays(program, 13)
    for name in [name for name in program.states if "_cache_" in name]:
        values = np.random.default_rng(2).standard_normal(expected[name].shape, np.float32)
        expected[name], expected[name.replace("cache", "scale")] = quantize_rows(values)
    found = {name: array.copy() for name, array in expected.items()}
    engine.bind(bound_to(found, program))
    ProgramGraph(NumpyOperations(expected, expected), program).run()
    engine.enqueue()
    for name in (*program.outputs, *program.states):  # a value between two steps may have become either
        atol = 1.0 if expected[name].dtype == np.int8 else 0.01
        np.testing.assert_allclose(found[name].astype(float), expected[name], atol=atol, rtol=1e-3, err_msg=name)
