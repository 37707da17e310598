"""Prompts by hand-written kernels: their twins give what the whole program does, and which programs they take."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from decode_models import LLAMA
from device_weights import to_device_layout
from numpy_kernel_device import NumpyKernelDevice, numpy_kernel_engine
from packed_weights import random_packed
from prompt_arrays import (
    DRAFTS,
    PROMPT_MODELS,
    assert_gives_what_the_program_does,
    assert_keeps_rows_of_8_bits,
    bound_to,
    random_arrays,
)

from edgellm.engines.backends.executors import planned_shapes
from edgellm.engines.backends.numpy_operations import NumpyOperations
from edgellm.engines.backends.steps.attention import PromptTokens
from edgellm.engines.backends.steps.table import kernel_choice
from edgellm.engines.families.programs import ModelConfig, model_program
from edgellm.engines.model.graph import ProgramGraph
from edgellm.engines.model.limits import EngineLimits, EngineShape
from edgellm.kernels.quantization.device_layout import DeviceLayout, InputPermutation, PackedMatrix

ADAPTED = {"lora_slots": 2, "lora_rank": 8}


def compare(config: ModelConfig, shape: EngineShape, start: int = 13, tolerance: float = 5e-5) -> None:
    """The engine of the kernels' twins and the whole program."""
    engine = numpy_kernel_engine(config, shape, PromptTokens)
    engine.attach(NumpyKernelDevice(), np.full(engine.scratch_bytes, 0xFF, np.uint8))  # NaN: nothing unwritten is read
    assert_gives_what_the_program_does(engine, model_program(config, shape), start, tolerance)


@pytest.mark.parametrize("tokens", [8, 72])
@pytest.mark.parametrize("name", PROMPT_MODELS)
def test_gives_what_the_whole_program_does(name: str, tokens: int) -> None:
    compare(PROMPT_MODELS[name], EngineShape("prefill", 1, tokens, 128, 128))


@pytest.mark.parametrize(("window", "varies"), [(None, False), (7, False), (40, False), (7, True)])
def test_tokens_of_images_see_those_behind_them(window: int | None, varies: bool) -> None:
    """Where images vary in size, in layers with a window alone."""
    kinds = () if window is None else ("window", "attention") * 4
    config = replace(PROMPT_MODELS["images"], layer_kinds=kinds, sliding_window=window, images_vary=varies)
    shape = EngineShape("prefill", 1, 72, 128, 128, window_rows=0 if window is None else 128)
    for step in model_program(config, shape).attentions:
        assert step.looks_ahead == (step.window is not None or not varies)
    compare(config, shape)


@pytest.mark.parametrize("name", ["deep", "features", "features_of_the_end", "qwen3"])
def test_applies_adapters(name: str) -> None:
    compare(PROMPT_MODELS[name], EngineShape("prefill", 1, 72, 128, 128, **ADAPTED))


@pytest.mark.parametrize(("phase", "batch", "tokens"), [("prefill", 1, 72), ("accept", 3, 24)])
@pytest.mark.parametrize("name", DRAFTS)
def test_gives_what_a_draft_does(name: str, phase: str, batch: int, tokens: int) -> None:
    compare(DRAFTS[name], EngineShape(phase, batch, tokens, 128, 128, model="draft"))


def test_keeps_rows_of_8_bits_and_reads_what_it_keeps() -> None:
    config, shape = PROMPT_MODELS["deep"], EngineShape("prefill", 1, 72, 128, 128, kv_cache="int8")
    engine = numpy_kernel_engine(config, shape, PromptTokens)
    engine.attach(NumpyKernelDevice(), np.zeros(engine.scratch_bytes, np.uint8))
    assert_keeps_rows_of_8_bits(engine, model_program(config, shape))


@pytest.mark.parametrize("lora", [{}, ADAPTED], ids=["", "adapters"])
@pytest.mark.parametrize("kept_dense", ["none", "embed|layers.3.mlp", "layers.[0-6].self_attn"])
def test_packed_weights_whose_inputs_are_arranged_give_what_their_values_do(
    kept_dense: str, lora: dict[str, int]
) -> None:
    config, shape = PROMPT_MODELS["deep"], EngineShape("prefill", 1, 72, 128, 128, **lora)
    program, random = model_program(config, shape), np.random.default_rng(5)
    dense, layouts = random_arrays(program, 13), dict[str, DeviceLayout]()
    packed: dict[str, Any] = {name: array.copy() for name, array in dense.items()}
    for number, (name, spec) in enumerate(program.weights.items()):
        if len(spec.shape) != 2 or re.search(kept_dense, name):
            continue
        columns = spec.shape[1]
        order = random.permutation(columns).astype(np.int32) if number % 3 else None
        scales = random.uniform(0.5, 2, columns).astype(np.float32) if number % 3 != 1 else None
        weight = replace(
            random_packed(*spec.shape, 16, True, "float16", 0.3 * columns**-0.5), order=order, input_scales=scales
        )
        layout, data = to_device_layout(weight)
        layouts[name] = replace(layout, dtype="float32")
        dense[name] = weight.values() if scales is None else weight.values() * scales
        packed[name] = PackedMatrix(layouts[name], data, InputPermutation.of(weight))
    assert len(layouts) > 10
    engine = numpy_kernel_engine(config, shape, PromptTokens, layouts)
    engine.attach(NumpyKernelDevice(), np.full(engine.scratch_bytes, 0xFF, np.uint8))
    engine.bind(bound_to(packed, program))
    engine.enqueue()
    ProgramGraph(NumpyOperations(dense, dense), program).run()
    for name in (*program.outputs, *program.states):
        np.testing.assert_allclose(packed[name], dense[name], rtol=1e-4, atol=1e-4, err_msg=name)


def test_what_the_kernels_of_prompts_take() -> None:
    """What few rows need nothing of them for, a tree they do not take, and what no kernel computes."""
    taken = {512: "kernels of prompts", 64: "kernels of many rows"}
    for tokens, name in taken.items():
        choice, _ = kernel_choice(LLAMA, EngineShape("prefill", 1, tokens, 1024, 1536), "float16", 99 << 10)
        assert choice is not None and name in choice.names
    assert kernel_choice(LLAMA, EngineShape("verify", 1, 72, 1024, 1536, 72), "float16", 99 << 10)[0] is None
    prefill = EngineShape("prefill", 1, 512, 1024, 1536)
    odd = replace(LLAMA, head_dim=20, rotary_dim=20)
    choice, reason = kernel_choice(odd, prefill, "float16", 99 << 10)
    assert choice is None and "multiples of 8" in reason
    limits = EngineLimits(max_batch=1, prefill_chunk=512, kv_capacity=8192, max_lora_rank=8, lora_slots=1)
    assert planned_shapes({"base": LLAMA}, limits, "float16", "sm_90") == []
