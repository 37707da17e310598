"""Programs on TensorRT equal what operations compute on NumPy, within the rounding of the dtype: every parameter."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from decode_models import FAMILIES, LLAMA, SCALED, TOLERANCE, random_model
from device_bits import from_bits, relative, rounded, to_bits

from edgellm.engines.backends.numpy_operations import NumpyOperations
from edgellm.engines.backends.platform import load_tensorrt
from edgellm.engines.backends.tensorrt_engine import TensorRTEngine
from edgellm.engines.backends.tensorrt_operations import build_plan
from edgellm.engines.model.config import DecoderConfig
from edgellm.engines.model.decoder import decoder_program
from edgellm.engines.model.graph import ProgramGraph
from edgellm.engines.model.limits import EngineShape

pytestmark = pytest.mark.gpu

#: One parameter of a step at a time, then those of families together, but what is refused by name: see
#: test_tensorrt_operations.py.
VARIANTS: dict[str, DecoderConfig] = {
    "llama": LLAMA,
    "gelu_tanh": replace(LLAMA, hidden_act="gelu_tanh"),
    "norm_offset": replace(LLAMA, norm_offset=1.0),
    "embedding_scale": replace(LLAMA, embedding_scale=8.0),
    "residual_scale": replace(LLAMA, residual_scale=0.22),
    "attention_scale": replace(LLAMA, attention_scale=0.1),
    "logits_scale": replace(LLAMA, logits_scale=0.125),
    "heads_of_128": replace(LLAMA, head_dim=128, rotary_dim=128, num_heads=2, num_kv_heads=1),
    "heads_of_256": replace(LLAMA, head_dim=256, rotary_dim=256, num_heads=2, num_kv_heads=1),
    **{
        name: config
        for name, config in SCALED.items()
        if not (config.rotates_neighbours or config.scores_cap or config.layers_differ)
    },
    "qwen3": FAMILIES["qwen3"],
}


def computed(config: DecoderConfig, shape: EngineShape, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    bindings = {name: array.copy() for name, array in arrays.items()}
    ProgramGraph(NumpyOperations(bindings, bindings), decoder_program(config, shape)).run()
    return bindings


def on_tensorrt(gpu: Any, config: DecoderConfig, shape: EngineShape, arrays: dict[str, np.ndarray]) -> Any:
    library, dtype = load_tensorrt(), "float16"
    cache = SimpleNamespace(attach=lambda configuration: None)
    runtime = library.module.Runtime(library.module.Logger())
    plan = build_plan(config, shape, dtype, "composed", gpu.gpu.compute_capability)
    engine = TensorRTEngine(library, runtime, plan, shape, cache)
    engine.attach(gpu, gpu.empty((engine.scratch_bytes,), "uint8"))
    program, bound = decoder_program(config, shape), {}
    for name, (size, kind) in program.edge.items():
        own = dtype if kind == "compute" else kind
        if name in arrays:
            bound[name] = gpu.empty(size, own)
            gpu.upload(bound[name], to_bits(arrays[name], dtype) if kind == "compute" else arrays[name])
        elif not name.startswith("present_"):
            bound[name] = gpu.zeros(size, own)
    bound |= {f"present_{name}": bound[name] for name in program.states}
    engine.bind(bound)
    engine.enqueue()

    def values(name: str) -> np.ndarray:
        found = gpu.download(bound[name])
        return found if bound[name].dtype == "float32" else from_bits(found, dtype)

    return values


@pytest.mark.parametrize("tokens", [1, 32])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_step_is_what_operations_compute(gpu: Any, variant: str, tokens: int) -> None:
    """A decode step, and a chunk of a prompt behind rows that are there."""
    config, start, parents = VARIANTS[variant], 13, (None, *range(tokens - 1))
    arrays = rounded(random_model(config, 1, 96, [start], parents), "float16")
    shape = EngineShape("decode", 1, 1, 96, 96)
    if tokens > 1:
        shape = EngineShape("prefill", 1, tokens, 96, 96)
        arrays["last_token_ids"] = np.array([[tokens - 3]], np.int32)
    found, expected = on_tensorrt(gpu, config, shape, arrays), computed(config, shape, arrays)
    for name in ("k_cache_1", "v_cache_1", "logits"):
        assert relative(found(name), expected[name]) < 2 * TOLERANCE["float16"], name
