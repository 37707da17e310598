"""Steps that TensorRT runs between kernels on the GPU, against NumPy: of prompts and of every other step; and long
prompts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from decode_models import FAMILIES, LLAMA, SCALED, TOLERANCE, random_adapters, random_model, step_kernels
from device_bits import from_bits, relative, rounded, to_bits
from packed_weights import packed_copy, random_packed
from planned_engines import plan_engine
from tiny_families import PROMPT, TOLERANCES

from edgellm import LLM, DraftingConfig, SamplingParams
from edgellm.engines.backends.cuda_backend import CODE
from edgellm.engines.backends.executors import Executors
from edgellm.engines.backends.kernel_engine import KernelEngine
from edgellm.engines.backends.numpy_operations import NumpyOperations
from edgellm.engines.backends.steps.table import kernel_choice, passes, step_program
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.families.programs import model_program
from edgellm.engines.model import segments
from edgellm.engines.model.config import DecoderConfig
from edgellm.engines.model.graph import ProgramGraph
from edgellm.engines.model.limits import EngineLimits, EngineShape
from edgellm.engines.runners.comparison import greedy_tokens, open_runner, teacher_forced_logits
from edgellm.engines.runners.sampling_state import SamplingValues
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


#: Of what kernels refuse some steps in every shape: attention; the layer behind each MLP; those of the hidden size.
DECOYS: dict[str, DecoderConfig] = {
    "attention": replace(LLAMA, head_dim=20, rotary_dim=20),
    "down": replace(LLAMA, intermediate_size=100),
    "hidden": replace(LLAMA, hidden_size=68),
}
#: Of a model in float32 kernels run no step.
REFUSED: dict[str, dict[str, Any]] = {"attention": {"head_dim": 20}, "down": {"intermediate_size": 100}, "float32": {}}


class OnDevice:
    """An engine whose steps with some titles TensorRT runs, bound to copies of arrays: by default those between
    attention, of many rows."""

    def __init__(
        self,
        gpu: Any,
        config: DecoderConfig,
        shape: EngineShape,
        arrays: dict[str, np.ndarray],
        packed: Mapping[str, PackedWeight] = MappingProxyType({}),
        planned: Collection[str] | None = None,
    ) -> None:
        self.gpu, self.dtype, self.bound = gpu, "float16", {}
        limit, own = gpu.kernel_module.shared_limit, step_kernels(gpu.kernel_module, self.dtype, config.head_dim)
        self.bound |= {name: packed_copy(gpu, weight) for name, weight in packed.items()}
        layouts = {name: weight.layout for name, weight in self.bound.items()}
        program = model_program(config, shape)
        if planned is None:
            asked = Executors({"base": config}, EngineLimits(), self.dtype, limit, executor="tensorrt")
            planned = asked.planned(shape) or ()
        choice, reason = kernel_choice(config, shape, self.dtype, limit, layouts, planned=planned)
        assert choice is not None and choice.plans, reason
        parts = [step_program(config, part, layouts) for _, part in passes(shape)]
        plans = {plan.plan_shape(part): None for plan in choice.plans for part in parts}
        own = own._replace(plans={part: plan_engine(gpu, config, part, self.dtype) for part in plans})
        self.engine = KernelEngine(own, choice, config, shape, self.dtype, layouts)
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
        if self.engine.reads_attention_mask:
            gpu.upload(self.bound["attention_mask"], arrays["attention_mask"])
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


@pytest.mark.parametrize("name", DECOYS)
@pytest.mark.parametrize(
    "shape",
    [("prefill", 1, 80), ("prefill", 1, 16), ("decode", 2, 1), ("decode", 8, 1), ("verify", 3, 30)],
    ids=lambda shape: f"{shape[0]}-{shape[1]}-{shape[2]}",
)
def test_a_step_that_kernels_refuse_is_tensorrts(gpu: Any, name: str, shape: Any) -> None:
    config, (phase, batch, tokens) = DECOYS[name], shape
    selected = tokens if phase == "verify" else 1
    shape, starts = EngineShape(phase, batch, tokens, 160, 160, selected), [13 + 5 * slot for slot in range(batch)]
    arrays = rounded(random_model(config, batch, 160, starts, (None, *range(tokens - 1))), "float16")
    if selected < tokens:
        arrays["last_token_ids"] = np.array([[tokens - 3]] * batch, np.int32)
    ways = Executors({"base": config}, EngineLimits(2, 80, 160), "float16", gpu.kernel_module.shared_limit)
    found = OnDevice(gpu, config, shape, arrays, planned=ways.planned(shape))
    expected = {key: array.copy() for key, array in arrays.items()}
    ProgramGraph(NumpyOperations(expected, expected), model_program(config, shape)).run()
    for key in ("logits", "k_cache_1", "v_cache_1"):
        assert relative(found.values(key), expected[key]) < 2 * TOLERANCE["float16"], key
    first = found.values("logits")
    found.engine.enqueue()  # what was written is written again
    np.testing.assert_array_equal(found.values("logits"), first)


@pytest.mark.parametrize("refused", REFUSED)
def test_a_model_with_a_refused_step_answers_as_numpy_does(
    refused: str, tmp_path: Path, make_checkpoint: Callable[..., Path], tiny_draft: Path
) -> None:
    """Behind a prompt of two chunks, plain and drafted, captured and not. No two logits of an answer are near."""
    model = make_checkpoint(tmp_path / "model", 6, **REFUSED[refused])
    limits = EngineLimits(2, 80, 192, draft_top_k=4, draft_steps=3, verify_tree_size=12)
    dtype = refused if refused == "float32" else "float16"
    build_engine_directory(model, tmp_path / "engines", limits, None, dtype=dtype, draft=tiny_draft)
    directory, prompt = EngineDirectory.open(tmp_path / "engines"), (PROMPT * 3)[:100]
    with open_runner("numpy", directory) as runner:
        answer = greedy_tokens(runner, prompt, 16)
        expected = teacher_forced_logits(runner, prompt, answer)
    with open_runner("tensorrt", directory) as runner:
        found = teacher_forced_logits(runner, prompt, answer)
    assert np.abs(found - expected).max() / np.abs(expected).max() <= TOLERANCES["float16"]
    greedy = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    for drafting in (None, DraftingConfig(4, 3, 12, adaptive=False)):
        with LLM(tmp_path / "engines", backend="tensorrt", drafting=drafting) as llm:
            for _ in range(3):
                assert [*llm.generate(prompt, greedy).token_ids] == answer


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
