"""Engines of kernels over KV rows of 8 bits: on the twins, against operations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from decode_models import LLAMA, random_model
from numpy_kernel_device import NumpyKernelDevice, numpy_kernel_engine

from edgellm.engines.backends.numpy_operations import NumpyOperations
from edgellm.engines.backends.steps.linear import FewRows, ManyRows
from edgellm.engines.families.programs import model_program
from edgellm.engines.model.graph import ProgramGraph
from edgellm.engines.model.limits import EngineShape
from edgellm.engines.model.program import Program
from edgellm.kernels.quantization.rows import quantize_rows

CHAIN = (None, 0, 1, 2, 3)


def with_scales(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays, their caches quantized."""
    found = dict(arrays)
    for name in [name for name in arrays if "_cache_" in name]:
        found[name], found[name.replace("cache", "scale")] = quantize_rows(arrays[name])
    return found


def assert_close(program: Program, found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    """A value between two steps of 8 bits may have become either, as two ways of float32 round: outputs show it."""
    for name in program.outputs:
        np.testing.assert_allclose(found[name], expected[name], atol=0.02, err_msg=name)
    for name in program.states:
        if "_cache_" in name:
            steps = np.abs(found[name].astype(int) - expected[name])
            assert steps.max() <= 1 and (steps > 0).mean() < 1e-3, name
        else:
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-3, err_msg=name)


@pytest.mark.parametrize("way", [FewRows, ManyRows])
@pytest.mark.parametrize(("phase", "parents"), [("decode", (None,)), ("verify", CHAIN)])
def test_engines_of_kernels(way: type, phase: str, parents: tuple[int | None, ...]) -> None:
    config, tokens = replace(LLAMA, feature_layers=(0,)), len(parents)
    shape = EngineShape(phase, 2, tokens, 48, 48, tokens, kv_cache="int8")
    program, arrays = model_program(config, shape), with_scales(random_model(config, 2, 48, [9, 30], parents))
    expected = {name: array.copy() for name, array in arrays.items()}
    ProgramGraph(NumpyOperations(expected, expected), program).run()
    engine = numpy_kernel_engine(config, shape, way)
    bound = {name: array.copy() for name, array in arrays.items() if name in engine.tensors}
    bound |= {f"present_{name}": bound[name] for name in program.states}
    for name, (size, _) in program.outputs.items():
        bound[name] = np.full(size, np.nan, np.float32)
    engine.bind(bound)
    engine.attach(NumpyKernelDevice(), np.full(engine.scratch_bytes, 0xFF, np.uint8))
    engine.enqueue()
    assert_close(program, bound, expected)
