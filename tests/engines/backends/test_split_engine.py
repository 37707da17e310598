"""Segments of programs and the kernels of attention between them give what the whole program does."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from decode_models import EAGLE3, FAMILIES, HEADS, LLAMA, RECURRENT
from numpy_kernel_device import NumpyKernelDevice, numpy_kernel_engine
from packed_weights import random_packed
from prefill_twin import NumpyPrefill
from prompt_arrays import PROMPT_MODELS as MODELS
from prompt_arrays import assert_gives_what_the_program_does, bound_to, random_arrays

from edgellm.engines.backends.executors import plan_refusal, planned_shapes, refusal_on, split_refusal
from edgellm.engines.backends.kernel_engine import KernelEngine
from edgellm.engines.backends.numpy_operations import NumpyOperations
from edgellm.engines.backends.split_engine import SplitEngine
from edgellm.engines.backends.steps.launching import StepKernels
from edgellm.engines.backends.steps.table import kernel_choice
from edgellm.engines.backends.tensorrt_operations import TensorRTOperations
from edgellm.engines.errors import EngineError
from edgellm.engines.families.programs import ModelConfig, model_program, model_weights
from edgellm.engines.model import segments
from edgellm.engines.model.config import DecoderConfig
from edgellm.engines.model.graph import ProgramGraph
from edgellm.engines.model.limits import EngineLimits, EngineShape
from edgellm.engines.model.program import Program
from edgellm.engines.model.segments import segment_shapes, segments_of
from edgellm.engines.model.steps import Attention, Normed, NormLinear, Step
from edgellm.kernels.quantization.device_layout import DeviceLayout
from edgellm.kernels.quantization.packed_weight import PackedWeight, WeightFormat
from edgellm.kernels.quantization.row_runs import PackedRuns
from edgellm.kernels.quantization.rows import quantize_rows
from edgellm.kernels.recurrent.twin import NumpyRecurrent

DEEP = MODELS["deep"]


class NumpySegment:
    """A segment's engine, of NumPy; its inputs and outputs are apart, as TensorRT's must be."""

    scratch_bytes = 512
    takes_packed = False

    def __init__(self, program: Program) -> None:
        self._program, self._bound = program, {}
        self.enqueued = 0

    def attach(self, device: Any, scratch: np.ndarray) -> None:
        assert scratch.nbytes >= self.scratch_bytes

    def bind(self, bindings: Mapping[str, np.ndarray]) -> None:
        assert bindings.keys() <= self._program.edge.keys()
        self._bound.update(bindings)

    def enqueue(self) -> None:
        program, self.enqueued = self._program, self.enqueued + 1
        outputs = [self._bound[name] for name in program.outputs]
        inputs = [array for name, array in self._bound.items() if name not in program.outputs]
        assert not any(np.shares_memory(one, other) for one in outputs for other in inputs)
        ProgramGraph(NumpyOperations(self._bound, self._bound), program).run()


class _Float32SplitEngine(SplitEngine):
    """NumPy computes in float32 what the GPU has in its compute dtype."""

    def _own(self, kind: str) -> str:
        return "float32" if kind == "compute" else kind


def numpy_split_engine(
    program: Program, packed: Collection[str] = (), config: ModelConfig | None = None
) -> tuple[SplitEngine, dict[int, Any]]:
    """The engine on NumPy, and those of its segments: of a `config` the twins of kernels where they take a segment."""
    engines: dict[int, Any] = {segment.number: NumpySegment(segment.program) for segment in segments_of(program)}
    for part in segment_shapes(program) if config is not None else ():
        if kernel_choice(config, part, "float16", 227 << 10)[0] is not None:
            engines[part.segment] = numpy_kernel_engine(config, part)
    kernels = StepKernels(None, None, recurrent=NumpyRecurrent(), prefill=NumpyPrefill())
    return _Float32SplitEngine(kernels, program, engines, "float32", packed), engines


def attach(engine: SplitEngine | KernelEngine) -> None:
    """Give an engine its scratch."""
    engine.attach(NumpyKernelDevice(), np.full(engine.scratch_bytes, 0xFF, np.uint8))  # NaN: nothing unwritten is read


@pytest.mark.parametrize("tokens", [1, 3, 16, 17])
def test_scratch_of_segments_begins_where_tensorrt_takes_it(tokens: int) -> None:
    """At multiples of 512 bytes behind what lies between the segments."""
    program = model_program(FAMILIES["one_kv_head"], EngineShape("prefill", 1, tokens, 64, 96))
    engine, segments = numpy_split_engine(program)
    begins: list[int] = []
    for segment in segments.values():
        segment.attach = lambda device, scratch: begins.append(scratch.ctypes.data)
    whole = np.empty(engine.scratch_bytes, np.uint8)
    engine.attach(NumpyKernelDevice(), whole)
    assert begins and {(begin - whole.ctypes.data) % 512 for begin in begins} == {0}


def compare(config: ModelConfig, shape: EngineShape, start: int = 13) -> None:
    """The split engine and the whole program."""
    program = model_program(config, shape)
    for engine, _ in (numpy_split_engine(program), numpy_split_engine(program, config=config)):
        attach(engine)
        assert_gives_what_the_program_does(engine, program, start, 2e-5)


@pytest.mark.parametrize("name", MODELS)
def test_gives_what_the_whole_program_does(name: str) -> None:
    compare(MODELS[name], EngineShape("prefill", 1, 32, 96, 96))


@pytest.mark.parametrize("window", [None, 7, 40])
def test_tokens_of_images_see_those_behind_them(window: int | None) -> None:
    """And would give something else if they did not; with windows in rings."""
    kinds = () if window is None else ("window", "attention") * 4
    config = replace(MODELS["images"], layer_kinds=kinds, sliding_window=window)
    shape = EngineShape("prefill", 1, 32, 96, 96, window_rows=0 if window is None else 128)
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
    for tokens in (16, 128):
        shape = limits.base_shape("prefill", 1, tokens, 256)
        assert kernel_choice(config, shape, "bfloat16", 99 << 10)[0] is not None
        assert split_refusal(config, shape, "bfloat16", 99 << 10) is None
        assert "attention of an image's tokens to those behind them" in str(
            plan_refusal(config, shape, "float32", 99 << 10, False)
        )
        with pytest.raises(EngineError, match="TensorRT has nothing for attention of tokens to those behind them"):
            TensorRTOperations.attention_ahead(None, None)
    needed = planned_shapes({"base": config}, limits, "bfloat16", "sm_90", needless=True)
    assert {shape.tokens for shape in needed if shape.segment is not None} == {16, 128}
    for phase, tokens in (("decode", 1), ("verify", 8), ("prefill", 8)):
        shape = limits.base_shape(phase, 1, tokens, 256, tokens)
        assert model_program(config, shape) == model_program(replace(config, image_tokens=0), shape)
    prefill = limits.base_shape("prefill", 1, 16, 256)
    plain = model_program(replace(config, image_tokens=0), prefill)
    assert "looks_ahead" not in str(plain) and "last_seen" not in plain.inputs


@pytest.mark.parametrize("name", ["deep", "features", "deepstack"])
def test_large_layers_are_cut_between_their_matrices(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """So that scratch holds one of them, and the answers stay."""
    config, shape = MODELS[name], EngineShape("prefill", 1, 32, 96, 96)
    whole = model_program(config, shape)
    names = [each for each in whole.weights if ".layers." in each and len(whole.weights[each].shape) == 2]
    before = numpy_split_engine(whole, names, config)[0].scratch_bytes
    gate_up = next(math.prod(whole.weights[each].shape) for each in names if "gate_up" in each)
    monkeypatch.setattr(segments, "MOST_WEIGHTS", gate_up)
    found = segments_of(whole)
    matrices = [[each for each in segment.program.weights.values() if len(each.shape) == 2] for segment in found[:-1]]
    assert all(len(each) == 1 or sum(math.prod(one.shape) for one in each) <= gate_up for each in matrices)
    assert len(found) > config.num_layers + 1 and max(map(len, matrices)) == 2
    assert sum(bool(segment.between) for segment in found) == config.num_layers
    assert numpy_split_engine(whole, names, config)[0].scratch_bytes < before
    compare(config, shape)


def test_keeps_rows_of_8_bits_and_reads_what_it_keeps() -> None:
    program = model_program(DEEP, EngineShape("prefill", 1, 32, 96, 96, kv_cache="int8"))
    expected = random_arrays(program, 13)
    for name in [name for name in program.states if "_cache_" in name]:
        values = np.random.default_rng(2).standard_normal(expected[name].shape, np.float32)
        expected[name], expected[name.replace("cache", "scale")] = quantize_rows(values)
    found = {name: array.copy() for name, array in expected.items()}
    engine, _ = numpy_split_engine(program)
    attach(engine)
    engine.bind(bound_to(found, program))
    ProgramGraph(NumpyOperations(expected, expected), program).run()
    engine.enqueue()
    for name in (*program.outputs, *program.states):  # a value between two steps may have become either
        atol = 1.0 if expected[name].dtype == np.int8 else 0.01
        np.testing.assert_allclose(found[name].astype(float), expected[name], atol=atol, rtol=1e-3, err_msg=name)


@pytest.mark.parametrize(
    ("config", "lora"),
    [(None, {}), (DEEP, {}), (DEEP, {"lora_slots": 2, "lora_rank": 8})],
    ids=["", "kernels behind the last attention", "adapters"],
)
@pytest.mark.parametrize("kept_dense", ["none", "embed|layers.3.mlp", "layers.[0-6].self_attn"])
def test_packed_weights_give_what_their_values_do(
    config: DecoderConfig | None, kept_dense: str, lora: dict[str, int]
) -> None:
    program = model_program(DEEP, EngineShape("prefill", 1, 32, 96, 96, **lora))
    arrays, packed = random_arrays(program, 13), dict[str, PackedWeight | PackedRuns]()
    for name, spec in program.weights.items():
        if len(spec.shape) == 2 and not re.search(kept_dense, name):
            rows, dense = spec.shape[0], 8 if "qkv" in name else 0  # of which are not packed
            weight = random_packed(rows - dense, spec.shape[1], 32, True, "float32", seed=len(packed))
            arrays[name] = np.concatenate((weight.values(), arrays[name][rows - dense :]))
            packed[name] = PackedRuns((weight, arrays[name][rows - dense :])) if dense else weight
    assert len(packed) > 10
    found, expected = ({name: array.copy() for name, array in arrays.items()} for _ in range(2))
    for weights, bound in (({}, expected), (packed, found)):
        engine, engines = numpy_split_engine(program, weights, config)
        assert isinstance(engines[8], KernelEngine) == (config is not None)
        attach(engine)
        engine.bind(bound_to(bound, program) | weights)
        for _ in range(2):
            bound["logits"].fill(np.nan)
            engine.enqueue()
    for name in (*program.outputs, *program.states):
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)


def test_scratch_has_the_dense_weights_of_one_segment() -> None:
    program = model_program(DEEP, EngineShape("prefill", 1, 32, 96, 96))
    layer = [name for name in program.weights if "layers.4." in name and len(program.weights[name].shape) == 2]
    every = [name for name in program.weights if ".layers." in name and len(program.weights[name].shape) == 2]
    dense, one, all_layers = (numpy_split_engine(program, names)[0].scratch_bytes for names in ((), layer, every))
    heads = ([*every, *head] for head in ((), ("model.embed_tokens.weight",)))  # which kernels multiply packed
    assert len({numpy_split_engine(program, names, DEEP)[0].scratch_bytes for names in heads}) == 1
    between = [name for name in layer if "qkv" not in name]  # the layer's q, k and v are of the segment before
    largest = sum(4 * math.prod(program.weights[name].shape) for name in layer)
    assert one == dense + sum(4 * math.prod(program.weights[name].shape) for name in between)
    assert all_layers == dense + largest


def test_applies_adapters() -> None:
    compare(DEEP, EngineShape("prefill", 1, 32, 96, 96, lora_slots=2, lora_rank=8))


DRAFTS = {**HEADS, "eagle1": replace(EAGLE3, generation="1", feature_layers=(2,), layer_prefix="layers.0.")}


@pytest.mark.parametrize(("phase", "batch"), [("prefill", 1), ("accept", 3)])
@pytest.mark.parametrize("name", DRAFTS)
def test_gives_what_a_draft_does(name: str, phase: str, batch: int) -> None:
    compare(DRAFTS[name], EngineShape(phase, batch, 24, 96, 96, model="draft"))


def test_equal_segments_are_one_engine() -> None:
    program = model_program(DEEP, EngineShape("prefill", 1, 32, 96, 96))
    assert [segment.number for segment in segments_of(program)] == [0, 1, *[2] * 6, 8]
    engine, engines = numpy_split_engine(program)
    attach(engine)
    engine.bind(bound_to(random_arrays(program, 0), program))
    layers: list[int] = []
    engine.enqueue_by_layer(layers.append)
    assert {number: each.enqueued for number, each in engines.items()} == {0: 1, 1: 1, 2: 6, 8: 1}
    assert layers == list(range(8))
    names = [shape.name for shape in segment_shapes(program)]
    assert names == [f"base.prefill-b1-t32-s{number}" for number in (0, 1, 2, 8)]


def test_segments_know_no_key_range_and_no_capacity() -> None:
    shapes = [EngineShape("prefill", 1, 32, key_range, rows) for key_range, rows in ((96, 96), (64, 128))]
    first, second = (segment_shapes(model_program(DEEP, shape)) for shape in shapes)
    assert first == second
    assert str(model_program(DEEP, first[2])) == str(segments_of(model_program(DEEP, shapes[0]))[2].program)


def test_memory_grows_with_the_chunk_not_with_the_context() -> None:
    def scratch(tokens: int, rows: int) -> int:
        program = model_program(DEEP, EngineShape("prefill", 1, tokens, rows, rows))
        return numpy_split_engine(program)[0].scratch_bytes - NumpySegment.scratch_bytes

    assert scratch(64, 128) == scratch(64, 1 << 20) == 64 * 4 * (2 * 64 + 128 + 64)  # hidden twice, qkv, context
    assert scratch(128, 128) == 2 * scratch(64, 128)


@pytest.mark.parametrize(
    ("shape", "on_kernels"),
    [
        (EngineShape("prefill", 1, 32, 96, 96), False),
        (EngineShape("decode", 2, 1, 96, 96), True),
        (EngineShape("verify", 1, 4, 96, 96, 4), True),
    ],
    ids=["split prefill", "kernels' decode", "kernels' verify"],
)
def test_says_what_was_not_bound(shape: EngineShape, on_kernels: bool) -> None:
    program = model_program(LLAMA, shape)
    engine = numpy_kernel_engine(LLAMA, shape) if on_kernels else numpy_split_engine(program)[0]
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


def test_which_shapes_are_split() -> None:
    def refusal(config: DecoderConfig, shape: EngineShape, dtype: str = "float16") -> str | None:
        return split_refusal(config, shape, dtype, 99 << 10)

    prefill = EngineShape("prefill", 1, 512, 1024, 1536)
    assert refusal(LLAMA, prefill) is refusal(LLAMA, prefill, "bfloat16") is None
    assert refusal(replace(LLAMA, head_dim=256, rotary_dim=256), prefill) is None
    assert "not float32" in str(refusal(LLAMA, prefill, "float32"))
    assert "multiples of 8" in str(refusal(replace(LLAMA, head_dim=20, rotary_dim=20), prefill))
    assert "see all before them" in str(refusal(LLAMA, EngineShape("verify", 1, 64, 1024, 1088, 64)))


def test_what_is_planned() -> None:
    limits = EngineLimits(max_batch=1, prefill_chunk=512, kv_capacity=8192, max_lora_rank=8, lora_slots=1)
    assert planned_shapes({"base": LLAMA}, limits, "float16", "sm_90") == []
    names = [shape.name for shape in planned_shapes({"base": LLAMA}, limits, "float16", "sm_90", needless=True)]
    expected = {f"base.prefill-b1-t{tokens}-s{number}" for tokens in (128, 512) for number in (0, 1)}
    assert expected <= set(names)
    last = replace(EngineShape("prefill", 1, 512, 8192, 8192), segment=2)  # whose rows are those that get logits
    choice, _ = kernel_choice(LLAMA, last, "float16", 99 << 10)
    assert choice is not None and choice.names == ("kernels of few rows",)
    late = replace(LLAMA, feature_layers=(2,))  # of all rows the features behind the last layer
    assert "take up to 64 rows, not 512" in kernel_choice(late, last, "float16", 99 << 10)[1]
    int4 = WeightFormat("int4", 64, zeros=False, dtype="float16")
    specs = [spec for spec in model_weights(LLAMA) if len(spec.shape) == 2 and ".layers." in spec.name]
    packed = {spec.name: DeviceLayout(int4, *spec.shape) for spec in specs}
    for number in (0, 1):
        part = replace(EngineShape("prefill", 1, 512, 8192, 8192), segment=number)
        for weights in (None, packed):
            found = kernel_choice(LLAMA, part, "float16", 99 << 10, packed=weights)
            assert found == (None, "kernels take up to 64 rows, not 512")
    parts = planned_shapes({"base": LLAMA}, EngineLimits(1, 16, 128), "float16", "sm_86", needless=True)[1:]
    for part in parts:  # of what kernels run whole
        whole = replace(part, segment=None)
        for capability in ("sm_86", "sm_80", "sm_75"):
            reason = refusal_on(LLAMA, part, "float16", capability)
            assert part.segment is not None and reason == refusal_on(LLAMA, whole, "float16", capability)
    unknown = [shape.name for shape in planned_shapes({"base": LLAMA}, limits, "float16", "sm_75")]
    assert "base.prefill-b1-t512-l4096" in unknown and not any("-s" in name for name in unknown)


def test_packed_models_have_plans_of_segments_alone() -> None:
    """And a shape whose attention kernels do not compute either is refused, with the reasons."""
    limits, models = EngineLimits(1, 512, 1024), {"base": LLAMA}
    planned = planned_shapes(models, limits, "float16", "sm_90", needless=True, packed=("base",))
    assert planned and all(shape.segment is not None for shape in planned)
    odd = replace(LLAMA, head_dim=20, rotary_dim=20)
    assert planned_shapes({"base": odd}, limits, "float16", "sm_90", packed=("base",)) == []
    prefill = EngineShape("prefill", 1, 512, 1024, 1536)
    refusal = str(plan_refusal(odd, prefill, "float16", 227 << 10, packed=True))
    assert refusal.startswith(
        "base.prefill-b1-t512-l1024 cannot run with packed weights on this GPU: kernels cannot run the "
    )
    assert "head sizes up to 256 (multiples of 8)" in refusal and refusal.endswith("--backend numpy")
    assert plan_refusal(odd, prefill, "float16", 227 << 10, packed=False) is None
    assert plan_refusal(LLAMA, segment_shapes(model_program(LLAMA, prefill))[0], "float16", 227 << 10, True) is None


def test_programs_are_cut_at_recurrent_layers() -> None:
    """Whose kernels run between segments, of which those that do the same are one."""
    config, shape = RECURRENT["gated_delta_nets"], EngineShape("prefill", 1, 32, 96, 96)
    program = model_program(config, shape)
    found = segments_of(program)
    assert [segment.number for segment in found] == [0, 1, 2, 3, 4, 2, 3, 7]
    kinds = [[type(step).__name__ for step in segment.between] for segment in found]
    delta = ["ShortConvolution", "GatedDelta", "GatedNorm"]
    assert kinds == [delta, delta, ["Attention"], delta, delta, ["Attention"], delta, []]
    engine, engines = numpy_split_engine(program)
    attach(engine)
    engine.bind(bound_to(random_arrays(program, 0), program))
    layers: list[int] = []
    engine.enqueue_by_layer(layers.append)
    assert layers == list(range(7))
    assert {number: each.enqueued for number, each in engines.items()} == {0: 1, 1: 1, 2: 2, 3: 2, 4: 1, 7: 1}
    deeper = replace(config, num_layers=14, layer_kinds=config.layer_kinds * 2)
    scratch = [numpy_split_engine(model_program(each, shape))[0].scratch_bytes for each in (config, deeper)]
    assert scratch[0] == scratch[1]


def test_recurrent_models_have_plans_of_segments_alone() -> None:
    """And what neither kernels nor segments run is refused, with the reasons."""
    limits, config = EngineLimits(1, 512, 1024), RECURRENT["gated_delta_nets"]
    assert planned_shapes({"base": config}, limits, "float16", "sm_87") == []
    planned = planned_shapes({"base": config}, limits, "float16", "sm_87", needless=True)
    names = {f"base.prefill-b1-t{tokens}-s{number}" for tokens in (128, 512) for number in range(5)}
    assert names <= {shape.name for shape in planned} and all(shape.segment is not None for shape in planned)
    for dtype, capability in (("float32", "sm_90"), ("float16", "sm_75")):
        assert planned_shapes({"base": config}, limits, dtype, capability) == []
    prefill, odd = EngineShape("prefill", 1, 512, 1024, 1536), replace(config, delta_heads=(2, 4, 24, 12))
    assert planned_shapes({"base": odd}, limits, "float16", "sm_90") == []
    refusal = str(plan_refusal(odd, prefill, "float16", 227 << 10, packed=False))
    assert refusal.startswith(
        "base.prefill-b1-t512-l1024 cannot run on this GPU: kernels cannot run the gated delta rule of "
    )
    assert "kernels cannot run the gated delta rule of layer 0: " in refusal and "value heads of 12. Take" in refusal
    assert refusal.endswith("--backend numpy")
    assert plan_refusal(odd, segment_shapes(model_program(odd, prefill))[0], "float16", 227 << 10, False) is None


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


def test_what_a_step_alone_reads_is_an_input_of_its_segment() -> None:
    """A norm of its own behind the last attention."""
    program = model_program(LLAMA, EngineLimits(prefill_chunk=16, kv_capacity=256).base_shape("prefill", 1, 16, 256))
    attention = next(number for number, step in enumerate(program.steps) if isinstance(step, Attention))
    head = program.steps[-1]
    assert isinstance(head, NormLinear) and head.reads == (head.inputs[0].value,)
    assert any("last_token_ids" in step.reads for step in program.steps)
    normed = Normed(head.output, program.steps[attention].output, head.inputs[0].norms[0])
    last = segments_of(replace(program, steps=(*program.steps[: attention + 1], normed)))[-1]
    assert list(last.program.inputs) == [normed.value]
