"""Split engines on the GPU: TensorRT's segments and the kernels of attention against NumPy, and long prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from decode_models import FAMILIES, LLAMA, SCALED, TOLERANCE, random_adapters, random_model, step_kernels
from device_bits import from_bits, relative, rounded, to_bits
from gpu_device import device_copy
from numpy_kernel_device import NumpyKernelDevice, numpy_kernel_engine
from packed_weights import packed_copy, random_packed

from edgellm.engines.backends.cuda_backend import CODE
from edgellm.engines.backends.kernel_engine import KernelEngine
from edgellm.engines.backends.numpy_operations import NumpyOperations
from edgellm.engines.backends.platform import load_tensorrt
from edgellm.engines.backends.split_engine import SplitEngine
from edgellm.engines.backends.steps.table import kernel_choice
from edgellm.engines.backends.tensorrt_engine import TensorRTEngine
from edgellm.engines.backends.tensorrt_operations import build_plan
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.families.programs import model_program
from edgellm.engines.model import segments
from edgellm.engines.model.config import DecoderConfig
from edgellm.engines.model.graph import ProgramGraph
from edgellm.engines.model.limits import EngineLimits, EngineShape
from edgellm.engines.model.segments import segment_shapes, segments_of
from edgellm.engines.runners.comparison import open_runner
from edgellm.engines.runners.sampling_state import SamplingValues
from edgellm.kernels.quantization.device_layout import PackedMatrix
from edgellm.kernels.quantization.packed_weight import PackedWeight

pytestmark = pytest.mark.gpu

DEEP = replace(LLAMA, num_layers=5)
MODELS: dict[str, DecoderConfig] = {
    **FAMILIES,
    **{name: config for name, config in SCALED.items() if not config.layers_differ},
    "deep": DEEP,
    "features": replace(DEEP, feature_layers=(1, 2, 4)),
    "heads_of_128": replace(LLAMA, head_dim=128, rotary_dim=128, num_heads=2, num_kv_heads=1),
    "heads_of_256": replace(LLAMA, head_dim=256, rotary_dim=256, num_heads=2, num_kv_heads=1),
}


class OnDevice:
    """A split engine, bound to copies of arrays."""

    def __init__(
        self,
        gpu: Any,
        config: DecoderConfig,
        shape: EngineShape,
        arrays: dict[str, np.ndarray],
        packed: Mapping[str, PackedWeight] = MappingProxyType({}),
    ) -> None:
        self.gpu, self.dtype, self.bound = gpu, "float16", {}
        library = load_tensorrt()
        cache = SimpleNamespace(attach=lambda configuration: None)
        runtime = library.module.Runtime(library.module.Logger())
        program, engines = model_program(config, shape), {}
        limit, own = gpu.kernel_module.shared_limit, step_kernels(gpu.kernel_module, self.dtype, config.head_dim)
        self.bound |= {name: packed_copy(gpu, weight) for name, weight in packed.items()}
        layouts = {name: weight.layout for name, weight in self.bound.items()}
        packed_of = {segment.number: segment.weights_of(layouts) for segment in segments_of(program)}
        for part in segment_shapes(program):
            assert part.segment is not None
            choice = kernel_choice(config, part, self.dtype, limit, packed=packed_of[part.segment])[0]
            if choice is not None:
                engines[part.segment] = KernelEngine(own, choice, config, part, self.dtype, packed_of[part.segment])
                continue
            plan = build_plan(config, part, self.dtype, "composed", gpu.gpu.compute_capability)
            engines[part.segment] = TensorRTEngine(library, runtime, plan, part, cache)
        self.engine = SplitEngine(own, program, engines, self.dtype, packed)
        self.scratch = gpu.empty((self.engine.scratch_bytes,), "uint8")
        self.engine.attach(gpu, self.scratch)
        gpu.upload(self.scratch, np.full(self.scratch.shape, 0xFF, np.uint8))  # NaN: nothing unwritten is read
        for name, (size, kind) in program.edge.items():
            if name in packed:
                continue
            if name in arrays and name != "attention_mask":
                self.bound[name] = gpu.empty(size, self.dtype if kind == "compute" else kind)
                gpu.upload(self.bound[name], to_bits(arrays[name], self.dtype) if kind == "compute" else arrays[name])
            elif not name.startswith("present_"):
                self.bound[name] = gpu.zeros(size, self.dtype if kind == "compute" else kind)
        self.engine.bind(self.bound | {f"present_{name}": self.bound[name] for name in program.states})
        self.engine.enqueue()

    def values(self, name: str) -> np.ndarray:
        """In float32."""
        found = self.gpu.download(self.bound[name])
        return found if self.bound[name].dtype == "float32" else from_bits(found, self.dtype)


@pytest.mark.parametrize("name", MODELS)
def test_a_chunk_is_what_operations_compute(gpu: Any, name: str) -> None:
    config, tokens, start = MODELS[name], 80, 13
    parents = (None, *range(tokens - 1))
    arrays = rounded(random_model(config, 1, 160, [start], parents), "float16")
    arrays["last_token_ids"] = np.array([[tokens - 3]], np.int32)
    shape = EngineShape("prefill", 1, tokens, 160, 160)
    found, expected = OnDevice(gpu, config, shape, arrays), {key: array.copy() for key, array in arrays.items()}
    ProgramGraph(NumpyOperations(expected, expected), model_program(config, shape)).run()
    names = ["logits", f"k_cache_{config.num_layers - 1}", f"v_cache_{config.num_layers - 1}"]
    for key in names + ["hidden_states"] * bool(config.feature_layers):
        assert relative(found.values(key), expected[key]) < 2 * TOLERANCE["float16"], key


@pytest.mark.parametrize("lora", [{}, {"lora_slots": 2, "lora_rank": 8}], ids=["", "adapters"])
@pytest.mark.parametrize(("group", "zeros"), [(32, True), (64, False), (None, False)])
def test_packed_weights_give_the_bits_of_their_values(
    gpu: Any, group: int | None, zeros: bool, lora: dict[str, int]
) -> None:
    shape = EngineShape("prefill", 1, 80, 160, 160, **lora)
    arrays = rounded(random_model(DEEP, 1, 160, [13], (None, *range(79))), "float16")
    arrays["last_token_ids"] = np.array([[77]], np.int32)
    packed = {}
    for name, spec in model_program(DEEP, shape).weights.items():
        if len(spec.shape) == 2 and "layers.3.mlp" not in name:
            packed[name] = random_packed(*spec.shape, group, zeros, "float16", 0.02, seed=len(packed))
            arrays[name] = packed[name].values()
    if lora:
        arrays |= rounded(random_adapters(DEEP, [1], 2, 8), "float16")
    dense, found = OnDevice(gpu, DEEP, shape, arrays), OnDevice(gpu, DEEP, shape, arrays, packed)
    for name in ("logits", f"k_cache_{DEEP.num_layers - 1}"):
        assert np.isfinite(dense.values(name)).all()
        np.testing.assert_array_equal(found.values(name), dense.values(name), err_msg=name)
    first = found.values("logits")
    found.engine.enqueue()
    np.testing.assert_array_equal(found.values("logits"), first)


def test_large_layers_are_cut_between_their_matrices(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense and packed: what the whole layers' engines compute, and each other's bits."""
    config, shape = replace(DEEP, feature_layers=(2, 4, 5)), EngineShape("prefill", 1, 80, 160, 160)
    arrays = rounded(random_model(config, 1, 160, [13], (None, *range(79))), "float16")
    arrays["last_token_ids"] = np.array([[77]], np.int32)
    packed = {}
    for name, spec in model_program(config, shape).weights.items():
        if len(spec.shape) == 2 and ".layers." in name:
            packed[name] = random_packed(*spec.shape, 32, True, "float16", 0.02, seed=len(packed))
            arrays[name] = packed[name].values()
    whole = OnDevice(gpu, config, shape, arrays)
    monkeypatch.setattr(segments, "MOST_WEIGHTS", 1)
    dense, found = OnDevice(gpu, config, shape, arrays), OnDevice(gpu, config, shape, arrays, packed)
    for name in ("logits", "hidden_states", f"v_cache_{config.num_layers - 1}"):
        assert relative(dense.values(name), whole.values(name)) < TOLERANCE["float16"], name
        np.testing.assert_array_equal(found.values(name), dense.values(name), err_msg=name)


@pytest.mark.parametrize("batch", [1, 3])
def test_rows_that_get_logits_go_on_by_kernels(gpu: Any, batch: int) -> None:
    """Behind the last attention, over dense and over packed weights."""
    config, shape = (
        replace(LLAMA, vocab_size=200),
        EngineShape("prefill", batch, 80, 160, 160, segment=LLAMA.num_layers),
    )
    program, limit = model_program(config, shape), gpu.kernel_module.shared_limit
    random, host, packed = np.random.default_rng(3), dict[str, np.ndarray](), dict[str, PackedMatrix]()
    for name, (size, kind) in program.edge.items():
        values = random.standard_normal(size, np.float32)
        host[name] = values if kind == "float32" else rounded({name: values}, "float16")[name]
        if len(size) == 2 and name in program.weights:
            weight = random_packed(*size, 32, True, "float16", 0.02, seed=len(packed))
            host[name], packed[name] = weight.values(), packed_copy(gpu, weight)
    host["last_token_ids"] = random.integers(0, 80, (batch, 1)).astype(np.int32)
    twin = numpy_kernel_engine(config, shape)
    twin.bind(host)
    twin.attach(NumpyKernelDevice(), np.full(twin.scratch_bytes, 0xFF, np.uint8))
    twin.enqueue()
    arrays = {}
    for name, (_, kind) in program.edge.items():
        arrays[name] = device_copy(gpu, to_bits(host[name], "float16") if kind == "compute" else host[name])
    kernels = step_kernels(gpu.kernel_module, "float16", config.head_dim)
    found = []
    for weights in ({}, packed):
        layouts = {name: weight.layout for name, weight in weights.items()}
        choice, reason = kernel_choice(config, shape, "float16", limit, packed=layouts)
        assert choice is not None, reason
        engine = KernelEngine(kernels, choice, config, shape, "float16", layouts)
        scratch = gpu.empty((engine.scratch_bytes,), "uint8")
        engine.attach(gpu, scratch)
        gpu.upload(arrays["logits"], np.full((batch, 1, 200), np.nan, np.float32))
        engine.bind(arrays | weights)
        engine.enqueue()
        found.append(gpu.download(arrays["logits"]))
    assert relative(found[0], host["logits"]) < TOLERANCE["float16"]
    np.testing.assert_array_equal(found[1], found[0])


def test_a_chunk_repeats_its_bits(gpu: Any) -> None:
    arrays = rounded(random_model(DEEP, 1, 160, [13], (None, *range(79))), "float16")
    arrays["last_token_ids"] = np.array([[79]], np.int32)
    engine = OnDevice(gpu, DEEP, EngineShape("prefill", 1, 80, 160, 160), arrays)
    first = engine.values("logits")
    for _ in range(20):
        engine.engine.enqueue()
        np.testing.assert_array_equal(engine.values("logits"), first)


@pytest.mark.alone
def test_a_prompt_of_32_000_tokens_takes_the_memory_that_was_planned(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """And is the same whether it is prefilled whole or behind rows that are reused: on kernels wherever that ends."""
    from edgellm.engines.backends.cuda_device import CudaDevice

    limits = EngineLimits(max_batch=1, prefill_chunk=512, kv_capacity=32_768)
    build_engine_directory(tiny_checkpoint, tmp_path / "engines", limits, beyond_trained_context=True)
    directory, prompt = EngineDirectory.open(tmp_path / "engines"), [(7 * n + 3) % 250 for n in range(32_000)]
    device = CudaDevice()
    before = device.free_memory()[0]
    try:
        with open_runner("tensorrt", directory) as runner:
            runner.start(0, prompt, 0, SamplingValues()).wait()
            whole, used = runner.logits(0), before - device.free_memory()[0]
            for reused in (61 * 512, 31_007):  # chunks are cut as before, and otherwise
                runner.start(0, prompt, reused, SamplingValues()).wait()
                np.testing.assert_array_equal(runner.logits(0), whole)
            scores = 32_000 * limits.prefill_chunk * directory.config.num_heads * 2
            plan = runner.memory_plan.total - sum(CODE.values())
            assert plan < scores  # what a matrix of a chunk's scores would take
            assert used < plan + (256 << 20)  # of contexts and code
    finally:
        device.close()
