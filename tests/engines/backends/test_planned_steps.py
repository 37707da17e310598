"""Steps that TensorRT runs, between those of kernels, give what the whole program does; which these are, and what is
refused by name."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from absent_gpu import Module, prepare
from decode_models import LLAMA, RECURRENT
from numpy_kernel_device import NumpyKernelDevice, numpy_kernel_engine
from packed_weights import random_packed
from prompt_arrays import (
    DRAFTS,
    assert_gives_what_the_program_does,
    assert_keeps_rows_of_8_bits,
    bound_to,
    random_arrays,
)
from prompt_arrays import PROMPT_MODELS as MODELS

from edgellm.engines.backends import tensorrt_engine
from edgellm.engines.backends.executors import Executors, planned_shapes, shared_limit_of
from edgellm.engines.backends.kernel_engine import KernelEngine
from edgellm.engines.backends.numpy_operations import NumpyOperations
from edgellm.engines.backends.platform import find_tensorrt
from edgellm.engines.backends.steps.table import TABLE, step_program
from edgellm.engines.backends.tensorrt_engine import TensorRTPlans
from edgellm.engines.backends.tensorrt_operations import TensorRTOperations, build_plan
from edgellm.engines.building.needed_kernels import AbsentBackend
from edgellm.engines.errors import EngineError, MissingDependencyError
from edgellm.engines.families.programs import ModelConfig, model_program
from edgellm.engines.model import segments
from edgellm.engines.model.graph import ProgramGraph
from edgellm.engines.model.limits import EngineLimits, EngineShape
from edgellm.engines.model.program import Program
from edgellm.engines.model.segments import planned_runs, segment_of
from edgellm.engines.model.steps import Attention, Normed, NormLinear, Step
from edgellm.kernels.decode import tiled_linear
from edgellm.kernels.gpu import absent_gpu
from edgellm.kernels.quantization.device_layout import DeviceLayout
from edgellm.kernels.quantization.packed_weight import PackedWeight, WeightFormat

DEEP, PROMPT = MODELS["deep"], EngineShape("prefill", 1, 32, 96, 96)
INT4 = WeightFormat("int4", 32, True, "float16")
#: Heads that no kernel takes: TensorRT attends.
ODD_HEADS = replace(LLAMA, head_dim=20, rotary_dim=20)
#: Which steps TensorRT runs.
WAYS: dict[str, Callable[[Step], bool]] = {
    "between attention": lambda step: not step.cuts,
    "attention": lambda step: isinstance(step, Attention),
    "attention and gates": lambda step: isinstance(step, Attention) or "gate_up" in step.title,
    "some layers": lambda step: any(part in step.title for part in ("qkv", "down", "embed_tokens", "fc", "in_proj")),
}


def titles(program: Program, way: str = "between attention") -> frozenset[str]:
    return frozenset(step.title for step in program.steps if WAYS[way](step))


def attach(engine: KernelEngine) -> None:
    """Give an engine its scratch."""
    engine.attach(NumpyKernelDevice(), np.full(engine.scratch_bytes, 0xFF, np.uint8))  # NaN: nothing unwritten is read


def planned_engine(config: ModelConfig, shape: EngineShape, way: str = "between attention", **more: Any) -> Any:
    return numpy_kernel_engine(config, shape, planned=titles(step_program(config, shape), way), **more)


def plans_of(engine: Any) -> dict[tuple[int, ...], Any]:
    """The engines of runs, by their first step and the one behind their last."""
    return {shape.segment: plan for shape, plan in engine._kernels.plans.items()}


def executors(config: ModelConfig, limits: EngineLimits, limit: int = 99 << 10, **more: Any) -> Executors:
    return Executors({"base": config}, limits, "float16", limit, **more)


def compare(config: ModelConfig, shape: EngineShape, way: str = "between attention") -> None:
    """The engine and the whole program."""
    engine = planned_engine(config, shape, way)
    attach(engine)
    assert_gives_what_the_program_does(engine, model_program(config, shape), 13, 2e-5)


def test_scratch_of_plans_begins_where_tensorrt_takes_it() -> None:
    """At multiples of 512 bytes behind the values."""
    engine = planned_engine(LLAMA, EngineShape("prefill", 1, 17, 64, 96))
    begins: list[int] = []
    for plan in plans_of(engine).values():
        plan.attach = lambda device, scratch: begins.append(scratch.ctypes.data)
    whole = np.empty(engine.scratch_bytes, np.uint8)
    engine.attach(NumpyKernelDevice(), whole)
    assert begins and {(begin - whole.ctypes.data) % 512 for begin in begins} == {0}


@pytest.mark.parametrize("way", ["between attention", "attention and gates"])
@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_is_what_the_whole_program_gives(name: str, way: str) -> None:
    compare(MODELS[name], PROMPT, way)


@pytest.mark.parametrize("name", [name for name, config in MODELS.items() if not config.image_tokens])
def test_steps_of_few_rows_are_what_the_whole_program_gives(name: str) -> None:
    """In passes, too."""
    compare(MODELS[name], EngineShape("decode", 2, 1, 96, 96), "some layers")
    compare(MODELS[name], EngineShape("verify", 3, 30, 96, 96, 30), "attention")


@pytest.mark.parametrize(("phase", "batch"), [("prefill", 1), ("accept", 3), ("propose", 2)])
@pytest.mark.parametrize("name", DRAFTS)
def test_drafts_are_what_the_whole_program_gives(name: str, phase: str, batch: int) -> None:
    tokens = (6, 96, 96, 6) if phase == "propose" else (24, 96, 96)
    for way in WAYS:
        compare(DRAFTS[name], EngineShape(phase, batch, *tokens, model="draft"), way)


@pytest.mark.parametrize("shape", [PROMPT, EngineShape("decode", 2, 1, 96, 96)], ids=["prompt", "decode"])
def test_applies_adapters(shape: EngineShape) -> None:
    """Areas of the kernels' adapters alternate, whichever layers TensorRT runs."""
    for way in WAYS:
        compare(LLAMA, replace(shape, lora_slots=2, lora_rank=8), way)


@pytest.mark.parametrize("window", [None, 7, 40])
def test_tokens_of_images_see_those_behind_them(window: int | None) -> None:
    """And would give something else if they did not; with windows in rings."""
    kinds = () if window is None else ("window", "attention") * 4
    config = replace(MODELS["images"], layer_kinds=kinds, sliding_window=window)
    shape = replace(PROMPT, window_rows=0 if window is None else 128)
    compare(config, shape)
    program, causal = model_program(config, shape), model_program(replace(config, image_tokens=0), shape)
    assert all(step.looks_ahead for step in program.attentions)
    arrays = random_arrays(program, 13)
    found = []
    for each in (program, causal):
        bound = {name: array.copy() for name, array in arrays.items()}
        ProgramGraph(NumpyOperations(bound, bound), each).run()
        found.append(bound["logits"])
    assert np.abs(found[0] - found[1]).max() > 1e-3


def test_what_runs_attention_to_tokens_behind() -> None:
    """Kernels of prompts alone; other phases look back, as those of other models, and so do chunks that are too short
    for an image."""
    config, limits = MODELS["images"], EngineLimits(1, 128, 256)
    wide = Executors({"base": config}, limits, "float32", 99 << 10)
    for tokens in (16, 128):
        shape = limits.base_shape("prefill", 1, tokens, 256)
        assert executors(config, limits).planned(shape) == frozenset()
        assert "attention of an image's tokens to those behind them" in str(wide.problem(shape))
        with pytest.raises(EngineError, match="TensorRT has nothing for attention of tokens to those behind them"):
            TensorRTOperations.attention_ahead(None, None)
    needed = planned_shapes({"base": config}, limits, "bfloat16", "sm_90", needless=True)
    assert {shape.tokens for shape in needed if shape.segment} == {128}
    for phase, tokens in (("decode", 1), ("verify", 8), ("prefill", 8)):
        shape = limits.base_shape(phase, 1, tokens, 256, tokens)
        assert model_program(config, shape) == model_program(replace(config, image_tokens=0), shape)
    prefill = limits.base_shape("prefill", 1, 16, 256)
    plain = model_program(replace(config, image_tokens=0), prefill)
    assert "looks_ahead" not in str(plain) and "last_seen" not in plain.inputs


@pytest.mark.parametrize("name", ["deep", "features", "deepstack"])
def test_large_layers_are_cut_between_their_matrices(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """And the answers stay."""
    config, whole = MODELS[name], model_program(MODELS[name], PROMPT)
    gate_up = next(math.prod(spec.shape) for each, spec in whole.weights.items() if "gate_up" in each)
    before = planned_runs(whole, titles(whole))
    monkeypatch.setattr(segments, "MOST_WEIGHTS", gate_up)
    runs = planned_runs(whole, titles(whole))
    sizes = [
        [math.prod(each.shape) for each in segment_of(whole, run).program.weights.values() if len(each.shape) == 2]
        for run in runs
    ]
    assert all(len(each) == 1 or sum(each) <= gate_up for each in sizes) and len(runs) > len(before)
    compare(config, PROMPT)


def test_keeps_rows_of_8_bits_and_reads_what_it_keeps() -> None:
    shape = replace(PROMPT, kv_cache="int8")
    engine = planned_engine(DEEP, shape)
    attach(engine)
    assert_keeps_rows_of_8_bits(engine, model_program(DEEP, shape))


@pytest.mark.parametrize("lora", [{}, {"lora_slots": 2, "lora_rank": 8}], ids=["", "adapters"])
@pytest.mark.parametrize("kept_dense", ["none", "embed|layers.3.mlp", "layers.[0-6].self_attn"])
@pytest.mark.parametrize("way", ["between attention", "some layers"])
def test_packed_weights_give_what_their_values_do(way: str, kept_dense: str, lora: dict[str, int]) -> None:
    """Those of steps that TensorRT runs become dense in scratch, which holds one run's."""
    shape = replace(PROMPT, **lora)
    program = model_program(DEEP, shape)
    arrays, packed = random_arrays(program, 13), dict[str, PackedWeight]()
    for name, spec in program.weights.items():
        if len(spec.shape) == 2 and not re.search(kept_dense, name):
            packed[name] = random_packed(*spec.shape, 32, True, "float32", seed=len(packed))
            arrays[name] = packed[name].values()
    assert len(packed) > 10
    layouts = {name: DeviceLayout(INT4, *program.weights[name].shape) for name in packed}
    found, expected = ({name: array.copy() for name, array in arrays.items()} for _ in range(2))
    for weights, bound in (({}, expected), (packed, found)):
        engine = planned_engine(DEEP, shape, way, packed=layouts if weights else None)
        attach(engine)
        engine.bind(bound_to(bound, program) | weights)
        for _ in range(2):
            bound["logits"].fill(np.nan)
            engine.enqueue()
    for name in (*program.outputs, *program.states):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, atol=1e-5, err_msg=name)


def test_equal_runs_are_one_engine() -> None:
    """Whether they have attention or not; layers are counted in order."""
    for way, expected in (
        ("between attention", {(0, 1): 1, (2, 6): 1, (7, 11): 6, (37, 41): 1}),
        ("attention", {(1, 2): 8}),
    ):
        engine = planned_engine(DEEP, PROMPT, way)
        attach(engine)
        engine.bind(bound_to(random_arrays(model_program(DEEP, PROMPT), 0), engine.program))
        layers: list[int] = []
        engine.enqueue_by_layer(layers.append)
        assert {run: each.enqueued for run, each in plans_of(engine).items()} == expected
        assert layers == list(range(8))
        keys = "-l96" if way == "attention" else ""
        names = [shape.name for shape in engine._kernels.plans]
        assert names == [f"base.prefill-b1-t32{keys}-s{first}-{end}" for first, end in expected]


def test_runs_without_attention_know_no_key_range_and_no_capacity() -> None:
    shapes = [EngineShape("prefill", 1, 32, key_range, rows) for key_range, rows in ((96, 96), (64, 128))]
    for way in ("between attention", "attention"):
        first, second = (list(planned_engine(DEEP, shape, way)._kernels.plans) for shape in shapes)
        assert (first == second) == (way != "attention")
    part = first[0]
    assert str(model_program(DEEP, part)) == str(segment_of(model_program(DEEP, shapes[0]), (1, 2)).program)


def test_memory_grows_with_the_chunk_not_with_the_context() -> None:
    def scratch(tokens: int, rows: int) -> int:
        engine = planned_engine(DEEP, EngineShape("prefill", 1, tokens, rows, rows))
        return engine.scratch_bytes - 512  # the plans'

    width = 2 * 64 + 128 + 64  # hidden twice, qkv, context
    assert scratch(128, 256) == scratch(128, 1 << 20) and scratch(256, 256) - scratch(128, 256) == 128 * 4 * width


@pytest.mark.parametrize(
    ("shape", "way"),
    [(PROMPT, "between attention"), (("decode", 2, 1, 96, 96), ""), (("verify", 1, 4, 96, 96, 4), "attention")],
    ids=["planned prefill", "kernels' decode", "planned verify"],
)
def test_says_what_was_not_bound(shape: Any, way: str) -> None:
    shape = shape if isinstance(shape, EngineShape) else EngineShape(*shape)
    program = model_program(LLAMA, shape)
    engine = planned_engine(LLAMA, shape, way) if way else numpy_kernel_engine(LLAMA, shape)
    arrays = bound_to(random_arrays(program, 0), program)
    unread = () if engine.reads_attention_mask else ("attention_mask",)
    engine.bind({name: array for name, array in arrays.items() if name not in ("logits", *unread)})
    with pytest.raises(EngineError, match=f"{shape.name}: never bound: logits$"):
        engine.enqueue()
    with pytest.raises(EngineError, match="has no tensor 'other'"):
        engine.bind({"other": arrays["logits"]})
    engine.bind({"logits": arrays["logits"]})
    with pytest.raises(EngineError, match=f"{shape.name}: attach was not called"):
        engine.enqueue()
    with pytest.raises(EngineError, match=rf"{shape.name} needs {engine.scratch_bytes} bytes of scratch, got 1"):
        engine.attach(NumpyKernelDevice(), np.zeros(1, np.uint8))
    attach(engine)
    engine.bind({"present_k_cache_0": arrays["k_cache_1"]})
    with pytest.raises(EngineError, match="present_k_cache_0 must be bound to the memory of its cache"):
        engine.enqueue()


def test_tensorrts_attention_alone_reads_the_mask_of_a_decode_step() -> None:
    shape = EngineShape("decode", 1, 1, 96, 96)
    found = {way: planned_engine(LLAMA, shape, way).reads_attention_mask for way in WAYS}
    assert [way for way, reads in found.items() if reads] == ["attention", "attention and gates"]


def test_a_refused_step_costs_that_step_alone_in_every_shape() -> None:
    """Adapters of a rank that no kernel takes: their layers are TensorRT's, in steps without adapters, too."""
    limits = EngineLimits(2, 128, 1024, max_lora_rank=72, lora_slots=2)
    ways, needed = executors(LLAMA, limits), planned_shapes({"base": LLAMA}, limits, "float16", "sm_86")
    expected = frozenset(
        step.title for step in model_program(LLAMA, PROMPT).steps if step.multiplies and "embed" not in step.title
    )
    for shape in limits.all_engine_shapes():
        assert ways.planned(shape) == expected and ways.problem(shape) is None
        assert set(ways.plans(shape)) <= set(needed) and ways.plans(shape)
        assert "of rank 72" in str(ways.refusal(shape))
    assert all(shape.segment for shape in needed)
    for rank, bound in ((72, "tensorrt"), (64, "auto")):  # what snapshots are bound to
        own, gpu = replace(limits, max_lora_rank=rank), absent_gpu("sm_86", 46, 99 << 10)
        assert AbsentBackend({"base": LLAMA}, own, "float16", {}, gpu).executor == bound


def test_an_attention_that_kernels_refuse_is_tensorrts_alone() -> None:
    limits = EngineLimits(2, 128, 4096)
    ways = executors(ODD_HEADS, limits)
    expected = frozenset({"the attention of layer 0", "the attention of layer 1"})
    assert {ways.planned(shape) for shape in limits.all_engine_shapes()} == {expected}
    needed = planned_shapes({"base": ODD_HEADS}, limits, "float16", "sm_86")
    assert {shape.segment for shape in needed} == {(1, 2)}  # of both layers
    assert {shape.key_range for shape in needed} == {1024, 4096}
    rows8 = replace(limits, kv_cache="int8")
    ways, shape = executors(ODD_HEADS, rows8), rows8.base_shape("decode", 1, 1, 1024)
    assert str(ways.problem(shape)) == (
        "base.decode-b1-t1-l1024 cannot run on this GPU: kernels cannot run the attention of layer 0: "
        f"{ways.refused['base']['the attention of layer 0']}, and TensorRT has nothing for KV caches of 8 bits. "
        'Take --kv-cache compute (kv_cache="compute"), or --backend numpy'
    )
    assert planned_shapes({"base": ODD_HEADS}, rows8, "float16", "sm_86") == []


def test_layers_of_odd_widths_are_tensorrts_and_kernels_stand_around_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their launches are prepared as for a GPU."""
    monkeypatch.setattr(tiled_linear, "tensor_map", lambda *arguments: tiled_linear._Map())
    limits, config = EngineLimits(2, 80, 256), replace(LLAMA, intermediate_size=100)
    ways = executors(config, limits)
    for shape in limits.engine_shapes():
        planned = ways.planned(shape)
        assert planned == {f"the linear layer model.layers.{index}.mlp.down_proj" for index in range(2)}
        last = [(9, 10)] * (shape.phase == "prefill")  # of the rows that get logits
        assert [part.segment for part in ways.plans(shape)] == [(4, 5), *last]
        prepare(Module(), config, shape, planned=planned)


def test_without_tensorrt_a_refused_step_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(instead: str) -> None:
        raise MissingDependencyError(f"No usable TensorRT. {instead}")

    monkeypatch.setattr(tensorrt_engine, "load_tensorrt", missing)
    limits = EngineLimits(1, 16, 128)
    reason = executors(ODD_HEADS, limits).refusal(limits.base_shape("decode", 1, 1, 128))
    named = r"kernels cannot run the attention of layer 0: .* --backend numpy"
    with pytest.raises(MissingDependencyError, match=named):
        TensorRTPlans(SimpleNamespace(), None, None, reason)  # type: ignore[arg-type]


@pytest.mark.skipif(find_tensorrt() is None, reason="TensorRT is not installed: pip install '.[test]'")
def test_every_step_that_tensorrt_has_can_be_planned_alone() -> None:
    """Between values as kernels have them: their dtypes fit those of the network."""
    for config in (ODD_HEADS, MODELS["gemma4"], MODELS["features"]):
        program = step_program(config, PROMPT)
        for step in program.steps[:5:2]:
            (run, *_) = planned_runs(program, {step.title})
            assert build_plan(config, replace(PROMPT, segment=run), "float16", "composed", "sm_86")


def test_values_have_the_dtypes_that_kernels_give_them() -> None:
    for name, config in MODELS.items():
        for shape in (PROMPT, EngineShape("decode", 2, 1, 96, 96)):
            program = step_program(config, shape)
            for step in (step for step in program.steps if step.output not in program.outputs):
                for way in TABLE[type(step)]:
                    if way.suits(step, program) and way.refusal(step, program, 1 << 20) is None:
                        kind = way.scratch(step, program).get(step.output, program.kinds[step.output])
                        assert kind[1] == program.kinds[step.output][1], (name, step.title)


def test_which_steps_run_between_attention() -> None:
    """Where TensorRT is asked for: of prompts all of many rows; attention and what follows the last one by kernels."""
    limits, asked = EngineLimits(1, 512, 1024), {"executor": "tensorrt"}
    prefill = limits.base_shape("prefill", 1, 512, 1024)
    found = executors(LLAMA, limits, **asked).planned(prefill)
    rows = [step for step in model_program(LLAMA, prefill).steps if "layers.1" not in step.title and not step.cuts]
    assert found == {step.title for step in rows[:-1]} | {"the linear layer model.layers.1.self_attn.qkv_proj"}
    late = replace(LLAMA, feature_layers=(2,))  # of all rows the features behind the last layer
    assert executors(late, limits, **asked).planned(prefill) == titles(model_program(late, prefill)) - {
        "the linear layer model.embed_tokens"
    }
    assert executors(LLAMA, limits, **asked).planned(limits.base_shape("prefill", 1, 16, 1024)) == frozenset()
    assert executors(LLAMA, limits, **asked).planned(limits.base_shape("decode", 1, 1, 1024)) is None
    wide = Executors({"base": LLAMA}, limits, "float32", 99 << 10)
    assert wide.planned(prefill) is wide.problem(prefill) is None and "not float32" in str(wide.refusal(prefill))


def test_what_is_planned() -> None:
    limits = EngineLimits(max_batch=1, prefill_chunk=512, kv_capacity=8192, max_lora_rank=8, lora_slots=1)
    assert planned_shapes({"base": LLAMA}, limits, "float16", "sm_90") == []
    names = {shape.name for shape in planned_shapes({"base": LLAMA}, limits, "float16", "sm_90", needless=True)}
    assert {f"base.prefill-b1-t{tokens}-s{run}" for tokens in (128, 512) for run in ("0-1", "2-6")} <= names
    unknown = [shape.name for shape in planned_shapes({"base": LLAMA}, limits, "float16", "sm_75")]
    assert "base.prefill-b1-t512-l4096" in unknown and not any("-s" in name for name in unknown)
    ways = Executors({"base": LLAMA}, limits, "float16", shared_limit_of("sm_75"))
    assert ways.refusal(limits.base_shape("decode", 1, 1, 1024)) == "no kernels for this GPU"


def test_packed_models_have_plans_of_runs_alone() -> None:
    """And a shape that TensorRT would have to run whole is refused, with the reason."""
    limits, models = EngineLimits(1, 512, 1024), {"base": LLAMA}
    planned = planned_shapes(models, limits, "float16", "sm_90", needless=True, packed={"base": {}})
    assert planned and all(shape.segment for shape in planned)
    assert planned_shapes({"base": ODD_HEADS}, limits, "float16", "sm_90", packed={"base": {}})
    wide = Executors(models, limits, "float32", 99 << 10, {"base": {}})
    assert wide.problem(limits.base_shape("decode", 1, 1, 1024)) == (
        "base.decode-b1-t1-l1024 cannot run on this GPU: kernels compute in float16 and bfloat16, not float32, and "
        "TensorRT has nothing for packed weights. Take the unquantized model, or --backend numpy"
    )


def test_recurrent_layers_are_run_by_kernels_alone() -> None:
    """Equal runs between them are one; what neither kernels nor TensorRT have is refused, with the reasons."""
    config, limits = RECURRENT["gated_delta_nets"], EngineLimits(1, 512, 1024)
    engine = planned_engine(config, PROMPT)
    attach(engine)
    engine.bind(bound_to(random_arrays(engine.program, 0), engine.program))
    layers: list[int] = []
    engine.enqueue_by_layer(layers.append)
    assert layers == list(range(7))
    assert [each.enqueued for each in plans_of(engine).values()] == [1, 1, 2, 2, 1, 1]
    deeper = replace(config, num_layers=14, layer_kinds=config.layer_kinds * 2)
    assert engine.scratch_bytes == planned_engine(deeper, PROMPT).scratch_bytes
    assert planned_shapes({"base": config}, limits, "float16", "sm_87") == []
    planned = planned_shapes({"base": config}, limits, "float16", "sm_87", needless=True)
    assert {shape.tokens for shape in planned} == {128, 512} and all(shape.segment for shape in planned)
    for dtype, capability in (("float32", "sm_90"), ("float16", "sm_75")):
        assert planned_shapes({"base": config}, limits, dtype, capability) == []
    odd = replace(config, delta_heads=(2, 4, 24, 12))
    refusal = str(executors(odd, limits).problem(limits.base_shape("prefill", 1, 512, 1024)))
    assert "kernels cannot run the gated delta rule of layer 0: " in refusal and "value heads of 12, and" in refusal
    assert refusal.endswith("TensorRT has nothing for recurrent layers. Take --backend numpy")


def test_a_model_in_float32_is_opened_without_kernels_of_steps() -> None:
    """TensorRT runs it whole."""
    backend = AbsentBackend({"base": LLAMA}, EngineLimits(1, 16, 128), "float32", {}, absent_gpu("sm_86", 46, 99 << 10))
    backend.load_all([{}])
    assert len(backend._engines) > 2 and not [each for each in backend._engines if isinstance(each, KernelEngine)]
    assert "step_float32" in {source.name for source in backend.module.sources}


def test_every_step_declares_what_it_reads() -> None:
    """A name that is not declared would be left out of a segment's inputs."""
    written, known = {"output", "activation"}, set[str]()
    waiting = Step.__subclasses__()
    for kind in waiting:
        waiting += kind.__subclasses__()
        names = [
            each for each in fields(kind) if each.name not in written and re.search(r"\bstr\b|Input", str(each.type))
        ]
        assert [each.name for each in names if "reads" not in each.metadata] == [], kind
        known |= {each.name for each in names}
    assert {"value", "residual", "gates", "other", "inputs"} <= known


def test_what_a_step_alone_reads_is_an_input_of_its_run() -> None:
    """A norm of its own behind the last attention."""
    program = model_program(LLAMA, EngineLimits(prefill_chunk=16, kv_capacity=256).base_shape("prefill", 1, 16, 256))
    attention = next(number for number, step in enumerate(program.steps) if isinstance(step, Attention))
    head = program.steps[-1]
    assert isinstance(head, NormLinear) and head.reads == (head.inputs[0].value,)
    assert any("last_token_ids" in step.reads for step in program.steps)
    normed = Normed(head.output, program.steps[attention].output, head.inputs[0].norms[0])
    last = segment_of(replace(program, steps=(*program.steps[: attention + 1], normed)), (attention + 1, attention + 2))
    assert list(last.program.inputs) == [normed.value]
