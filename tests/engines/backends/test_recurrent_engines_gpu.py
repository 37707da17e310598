"""Engines of kernels with recurrent layers on a GPU: against the twins, and the bits of trees and plain steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from decode_models import RECURRENT, TOLERANCE, random_parents, step_kernels
from device_bits import from_bits, relative, to_bits
from gpu_device import device_copy
from numpy_kernel_device import NumpyKernelDevice, numpy_kernel_engine

from edgellm.engines.backends.kernel_engine import KernelEngine
from edgellm.engines.backends.steps.table import kernel_choice
from edgellm.engines.families.programs import model_program
from edgellm.engines.model.config import DecoderConfig
from edgellm.engines.model.limits import EngineShape
from edgellm.engines.model.program import Program
from edgellm.engines.model.states import PRESENT, decoder_states, recurrent_states
from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.recurrent.contract import AcceptedPath
from edgellm.kernels.recurrent.launcher import CudaRecurrent

pytestmark = pytest.mark.gpu
ROWS = 96
START = 21


def tree_of(batch: int, tokens: int) -> np.ndarray:
    """Parents [B, T], another tree in each slot."""
    trees = [random_parents(tokens, seed) for seed in range(batch)]
    return np.array([[-1 if parent is None else parent for parent in tree] for tree in trees], np.int32)


def step_shape(phase: str, batch: int, tokens: int) -> EngineShape:
    return EngineShape(phase, batch, tokens, ROWS, ROWS, 1 if phase == "prefill" else tokens)


def arrays_of(program: Program, dtype: str, seed: int = 3) -> dict[str, np.ndarray]:
    """All that a program reads, in float32, as the dtype holds it."""
    random, shape, arrays = np.random.default_rng(seed), program.shape, {}
    for name, (size, kind) in program.edge.items():
        if name.startswith(PRESENT) or name in program.outputs:
            continue
        scale = size[-1] ** -0.5 if name.endswith("_proj.weight") else 1.0
        values = (random.standard_normal(size) * scale).astype(np.float32)
        arrays[name] = from_bits(to_bits(values, dtype), dtype) if kind == "compute" else values
    arrays["kvcache_start_index"] = np.full(shape.batch, START, np.int32)
    mask = np.zeros((shape.batch, 1, shape.tokens, ROWS), bool)
    mask[..., :START] = True
    parents = np.tile(np.arange(shape.tokens) - 1, (shape.batch, 1))
    if shape.phase == "verify":
        parents = arrays["node_parents"] = tree_of(shape.batch, shape.tokens)
    for slot in range(shape.batch):
        for node in range(shape.tokens):
            if (parent := parents[slot, node]) >= 0:
                mask[slot, 0, node] |= mask[slot, 0, parent]
            mask[slot, 0, node, START + node] = True
    arrays["attention_mask"] = mask
    if shape.phase == "prefill":
        arrays["state_tokens"] = np.full(shape.batch, shape.tokens - 3, np.int32)
        arrays["last_token_ids"] = np.full((shape.batch, 1), shape.tokens - 4, np.int32)
    return arrays


class DeviceStep:
    """An engine on the GPU, bound to copies of arrays; states may be another's."""

    def __init__(
        self, gpu: Any, config: DecoderConfig, shape: EngineShape, arrays: dict[str, np.ndarray], dtype: str, **own: Any
    ) -> None:
        self.gpu, self.dtype, self.program = gpu, dtype, model_program(config, shape)
        limit = gpu.kernel_module.shared_limit
        choice, reason = kernel_choice(config, shape, dtype, limit)
        assert choice is not None, reason
        kernels = step_kernels(gpu.kernel_module, dtype, config.head_dim)
        engine = KernelEngine(kernels, choice, config, shape, dtype)
        self.arrays: dict[str, DeviceArray] = dict(own)
        for name, values in arrays.items():
            if name not in own:
                is_compute = self.program.edge[name][1] == "compute"
                self.arrays[name] = device_copy(gpu, to_bits(values, dtype) if is_compute else values)
        self.arrays |= {PRESENT + name: self.arrays[name] for name in self.program.changed}
        for name, (size, kind) in self.program.outputs.items():
            self.arrays[name] = gpu.zeros(size, dtype if kind == "compute" else kind)
        scratch = gpu.empty((engine.scratch_bytes,), "uint8")
        gpu.upload(scratch, np.full(scratch.shape, 0xFF, np.uint8))
        engine.attach(gpu, scratch)
        engine.bind({name: array for name, array in self.arrays.items() if name in engine.tensors})
        self.enqueue = engine.enqueue

    def values(self, name: str) -> np.ndarray:
        values = self.gpu.download(self.arrays[name])
        return values if self.program.edge[name][1] != "compute" else from_bits(values, self.dtype)


def twin_outputs(config: DecoderConfig, shape: EngineShape, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The outputs of the twins, and what they leave of the states."""
    program, engine = model_program(config, shape), numpy_kernel_engine(config, shape)
    bound = {name: values.copy() for name, values in arrays.items()}
    bound |= {PRESENT + name: bound[name] for name in program.changed}
    bound |= {name: np.full(size, np.nan, np.float32) for name, (size, _) in program.outputs.items()}
    engine.bind({name: bound[name] for name in engine.tensors})
    engine.attach(NumpyKernelDevice(), np.full(engine.scratch_bytes, 0xFF, np.uint8))
    engine.enqueue()
    return bound


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("step", [("decode", 2, 1), ("verify", 2, 12), ("verify", 1, 40), ("prefill", 1, 16)])
@pytest.mark.parametrize("name", RECURRENT)
def test_a_step_is_the_twins(gpu, name: str, step: tuple[str, int, int], dtype: str) -> None:
    config, shape = RECURRENT[name], step_shape(*step)
    program = model_program(config, shape)
    arrays = arrays_of(program, dtype)
    found, expected = DeviceStep(gpu, config, shape, arrays, dtype), twin_outputs(config, shape, arrays)
    found.enqueue()
    first = found.values("logits")
    for output in program.outputs:
        assert relative(found.values(output), expected[output]) < 2 * TOLERANCE[dtype], output
    for state in program.states:
        if state in program.changed:
            assert relative(found.values(state), expected[state]) < 2 * TOLERANCE[dtype], state
        else:
            np.testing.assert_array_equal(found.values(state), arrays[state], err_msg=state)
    if shape.phase != "prefill":
        found.enqueue()
        np.testing.assert_array_equal(found.values("logits"), first)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", RECURRENT)
def test_a_tree_has_the_bits_of_plain_steps_and_commits(gpu, name: str, dtype: str) -> None:
    """Of two slots at once; then one of them idle."""
    config, tokens = RECURRENT[name], 12
    shape = step_shape("verify", 2, tokens)
    arrays = arrays_of(model_program(config, shape), dtype)
    verify = DeviceStep(gpu, config, shape, arrays, dtype)
    verify.enqueue()
    logits, parents = verify.values("logits"), arrays["node_parents"]
    states = {each: arrays[each] for each in model_program(config, shape).states}
    paths = []
    for slot in range(2):
        path = [tokens - 1]
        while parents[slot, path[0]] >= 0:
            path.insert(0, int(parents[slot, path[0]]))
        paths.append(path)
    layers, recurrent = decoder_states(config), CudaRecurrent(gpu.kernel_module)

    def commit(step: DeviceStep, indices: list[list[int]]) -> None:
        most = max(map(len, indices))
        padded = np.array([each + [-1] * (most - len(each)) for each in indices], np.int32)
        accepted = AcceptedPath(
            *(device_copy(gpu, values) for values in (padded, np.array([*map(len, indices)], np.int32)))
        )
        commits: dict[str, list] = {}
        for layer in recurrent_states(layers):
            arrays = (step.arrays[each] for each in (*layer.names, *layer.kept_names))
            commits.setdefault(layer.commit, []).append(layer.committed(*arrays))
        for kernel, named in commits.items():
            getattr(recurrent, kernel)(named, accepted)()

    commit(verify, [paths[0], []])
    for slot in range(2):
        plain_shape, path = step_shape("decode", 1, 1), paths[slot]
        one = {each: values[slot : slot + 1].copy() for each, values in states.items()}
        own: dict[str, DeviceArray] = {}
        for place, node in enumerate(path):
            given = (
                arrays
                | one
                | {
                    each: arrays[each][slot : slot + 1, node : node + 1].copy()
                    for each in ("inputs_embeds", "rope_rotary_cos_sin")
                }
            )
            given["kvcache_start_index"] = np.array([START + place], np.int32)
            given["attention_mask"] = (np.arange(ROWS) <= START + place)[None, None, None]
            given = {each: given[each] for each in model_program(config, plain_shape).edge if each in given}
            plain = DeviceStep(gpu, config, plain_shape, given, dtype, **own)
            own = {each: plain.arrays[each] for each in states}
            plain.enqueue()
            np.testing.assert_array_equal(plain.values("logits")[0, 0], logits[slot, node], err_msg=f"{slot} {node}")
            commit(plain, [[0]])
        for layer in recurrent_states(layers):
            (state,) = layer.names
            expected = gpu.download(own[state])[0] if slot == 0 else states[state][1]
            np.testing.assert_array_equal(gpu.download(verify.arrays[state])[slot], expected, err_msg=state)
