"""Every network is emitted and built for real by TensorRT; that needs no GPU with TensorRT-RTX."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from edgellm.engines.backends import platform
from edgellm.engines.backends.executors import planned_shapes
from edgellm.engines.backends.platform import TensorRTLibrary, find_tensorrt
from edgellm.engines.backends.tensorrt_engine import TensorRTEngine
from edgellm.engines.backends.tensorrt_operations import TensorRTOperations, attention_kind, build_plan
from edgellm.engines.errors import BuildError, EngineError
from edgellm.engines.model.config import DecoderConfig
from edgellm.engines.model.decoder import decoder_program, decoder_weights
from edgellm.engines.model.graph import ProgramGraph
from edgellm.engines.model.limits import EngineLimits, EngineShape
from edgellm.engines.model.operations import Scoring
from edgellm.engines.model.program import Program
from edgellm.engines.model.segments import planned_runs, segment_of
from edgellm.engines.model.vision import ACTIVATIONS

LLAMA = DecoderConfig("llama", 96, 64, 128, 2, 4, 2, 16, 256, 1e-5, 10000.0, 16, "float16", True)
FAMILIES = {
    "llama": LLAMA,
    "llama_untied_biases": replace(
        LLAMA, tie_word_embeddings=False, attention_bias=True, attention_output_bias=True, mlp_bias=True
    ),
    "qwen2": replace(LLAMA, family="qwen2", attention_bias=True, dtype="bfloat16"),
    "qwen3": replace(LLAMA, family="qwen3", qk_norm=True, head_dim=32, rotary_dim=32),
    "qwen3_vl": replace(LLAMA, family="qwen3_vl", qk_norm=True, mrope_section=(4, 2, 2), deepstack_layers=2),
    "olmo2": replace(LLAMA, pre_norms=False, post_norms=True, qk_norm=True, joint_qk_norm=True, dtype="bfloat16"),
    "starcoder2": replace(LLAMA, naming="starcoder2", layer_norms=True, gated_mlp=False, hidden_act="gelu_tanh"),
}
RECURRENT = {
    "convolution": replace(LLAMA, layer_kinds=("attention", "convolution"), conv_width=3, naming="lfm2"),
    "delta": replace(LLAMA, layer_kinds=("attention", "delta"), conv_width=4, delta_heads=(2, 4, 16, 8)),
}
SHAPES = EngineLimits(max_batch=2, prefill_chunk=16, kv_capacity=1040).engine_shapes()


@pytest.fixture(scope="module")
def library() -> TensorRTLibrary:
    found = find_tensorrt()
    if found is None:
        pytest.skip("TensorRT is not installed: pip install '.[test]'")
    return found


def test_limits_name_every_engine() -> None:
    assert [shape.name for shape in SHAPES] == [
        "base.decode-b1-t1-l1024",
        "base.decode-b1-t1-l1040",
        "base.decode-b2-t1-l1024",
        "base.decode-b2-t1-l1040",
        "base.prefill-b1-t16-l1024",
        "base.prefill-b1-t16-l1040",
    ]


@pytest.mark.parametrize(
    ("family", "attention"),
    [(family, "native") for family in FAMILIES]
    + [("qwen3_vl", "composed")]
    + [pytest.param(family, "composed", marks=pytest.mark.slow) for family in FAMILIES if family != "qwen3_vl"],
)
def test_every_phase_of_every_family_builds(library: TensorRTLibrary, family: str, attention: str) -> None:
    config = FAMILIES[family]
    target = None if library.flavour == "trt" else "sm_86"
    for shape in (SHAPES[0], SHAPES[3], SHAPES[4]):
        plan = build_plan(config, shape, config.dtype, attention, target)
        assert isinstance(plan, bytes)
        assert len(plan) > 1000


def described(trt: Any, config: DecoderConfig, shape: EngineShape) -> Any:
    """The network of an engine, not built, and what keeps it alive."""
    builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
    strongly_typed = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    network = builder.create_network(0 if strongly_typed is None else 1 << int(strongly_typed))
    ProgramGraph(TensorRTOperations(trt, network, config.dtype, "composed"), decoder_program(config, shape)).run()
    return network, builder


@pytest.mark.parametrize("family", FAMILIES)
def test_what_adds_up_does_so_in_float32(library: TensorRTLibrary, family: str) -> None:
    """Of float16 sums, in linear layers and the residual stream, logits would get most of their error."""
    trt, config = library.module, FAMILIES[family]
    network, _builder = described(trt, config, EngineShape("prefill", 1, 16, 64, 80))
    states = [(1, rows, config.hidden_size) for rows in (16, 1)]  # behind the last attention of what gets logits
    residuals = linears = 0
    for layer in map(network.get_layer, range(network.num_layers)):
        output = layer.get_output(0)
        if layer.type == trt.LayerType.ELEMENTWISE:
            layer.__class__ = trt.IElementWiseLayer
            if layer.op == trt.ElementWiseOperation.SUM and tuple(output.shape) in states:
                residuals += output.dtype == trt.float32
        elif layer.type == trt.LayerType.MATRIX_MULTIPLY:
            linears += output.dtype == trt.float32
    assert residuals == 2 * config.num_layers + config.deepstack_layers
    assert linears == 4 * config.num_layers + 1


@pytest.mark.parametrize("family", FAMILIES)
def test_the_edge_of_an_engine(library: TensorRTLibrary, family: str) -> None:
    """Names, shapes and dtypes of inputs and outputs are those of the contract; every weight is an input."""
    trt, config = library.module, FAMILIES[family]
    network, _builder = described(trt, config, EngineShape("prefill", 1, 16, 64, 80))
    inputs = {network.get_input(index).name: network.get_input(index) for index in range(network.num_inputs)}
    outputs = {network.get_output(index).name: network.get_output(index) for index in range(network.num_outputs)}
    compute = trt.bfloat16 if config.dtype == "bfloat16" else trt.float16
    caches = {f"{kind}_cache_{index}" for kind in "kv" for index in range(config.num_layers)}
    weights = {spec.name: spec.shape for spec in decoder_weights(config)}
    weights.pop("model.embed_tokens.weight") if not config.tie_word_embeddings else None
    step = {"inputs_embeds", "rope_rotary_cos_sin", "attention_mask", "kvcache_start_index", "last_token_ids"}
    deepstack = {f"deepstack_features_{index}" for index in range(config.deepstack_layers)}
    assert set(inputs) == caches | step | deepstack | set(weights)
    assert all(tuple(inputs[name].shape) == (1, 16, config.hidden_size) for name in deepstack)
    assert set(outputs) == {f"present_{cache}" for cache in caches} | {"logits"}
    for name, expected in weights.items():
        assert tuple(inputs[name].shape) == expected
        assert inputs[name].dtype == compute
    assert tuple(inputs["attention_mask"].shape) == (1, 1, 16, 64)
    assert tuple(inputs["k_cache_0"].shape) == (1, config.num_kv_heads, 80, config.head_dim)
    assert (tuple(outputs["logits"].shape), outputs["logits"].dtype) == ((1, 1, config.vocab_size), trt.float32)


def test_a_target_that_cannot_be_built_here_is_refused(library: TensorRTLibrary) -> None:
    if library.flavour == "trt":
        pytest.skip("full TensorRT builds for the present GPU only")
    with pytest.raises(BuildError, match=r"sm_87.*sm_86.*Jetson"):
        build_plan(LLAMA, SHAPES[0], "float16", "auto", "sm_87")


@pytest.mark.parametrize("phase", ["prefill", "decode", "verify"])
def test_neighbours_are_not_rotated(library: TensorRTLibrary, phase: str) -> None:
    shape = EngineShape(phase, 1, 1 if phase == "decode" else 16, 64, 96)
    with pytest.raises(EngineError, match="TensorRT has nothing for rotary embeddings of neighbours"):
        build_plan(replace(LLAMA, rotates_neighbours=True), shape, "float16", "composed", "sm_89")


@pytest.mark.parametrize("kind", RECURRENT)
@pytest.mark.parametrize("phase", ["prefill", "decode", "verify"])
def test_recurrent_layers_are_refused_by_name(library: TensorRTLibrary, kind: str, phase: str) -> None:
    shape = EngineShape(phase, 1, 1 if phase == "decode" else 16, 64, 96)
    with pytest.raises(EngineError, match=r"nothing for the short convolution of layer 1: .*--backend numpy"):
        build_plan(RECURRENT[kind], shape, "float16", "composed", "sm_86")


def test_gated_attention_builds(library: TensorRTLibrary) -> None:
    config = replace(LLAMA, attention_gate=True, qk_norm=True, norm_offset=1.0, rotary_dim=8)
    for attention in ("native", "composed"):
        assert build_plan(config, EngineShape("prefill", 1, 16, 64, 96), "float16", attention, "sm_86")


def test_attention_follows_setting_and_target() -> None:
    assert attention_kind("auto", "sm_90") == "composed"
    assert attention_kind("auto", "sm_86") == "native"
    assert attention_kind("composed", "sm_86") == "composed"


@pytest.mark.parametrize("attention", ["native", "composed"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_operations_of_vision_encoders_build(library: TensorRTLibrary, dtype: str, attention: str) -> None:
    """Layer norm, every activation, attention with one row of mask or with none."""
    trt = library.module
    builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
    strongly_typed = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    network = builder.create_network(0 if strongly_typed is None else 1 << int(strongly_typed))
    ops = TensorRTOperations(trt, network, dtype, attention)
    x = ops.to_compute(ops.input("x", (1, 32, 32), "float32"))
    assert x.dtype == ops.compute
    mask = ops.input("mask", (2, 1, 1, 16), "bool")
    x = ops.layer_norm(x, ops.weight("weight", (32,)), ops.weight("bias", (32,)), 1e-6)
    for kind in ACTIVATIONS:
        x = ops.activation(x, kind)
    assert (tuple(x.shape), x.dtype) == ((1, 32, 32), ops.compute)
    windows = ops.split_heads(ops.reshape(x, (2, 16, 32)), 2)
    context = ops.attention(windows, (windows, windows), mask, Scoring(0.25))
    assert tuple(context.shape) == (2, 2, 16, 16)
    rows = ops.split_heads(ops.reshape(ops.merge_heads(context), (1, 32, 32)), 2)
    context = ops.attention(rows, (rows, rows), None, Scoring(0.25))
    assert (tuple(context.shape), context.dtype) == ((1, 2, 32, 16), ops.compute)
    ops.output("y", ops.to_float32(context))
    settings = builder.create_builder_config()
    if library.flavour == "rtx":
        settings.num_compute_capabilities = 1
        settings.set_compute_capability(library.compute_capability("sm_86"), 0)
    assert builder.build_serialized_network(network, settings) is not None


class _Older:
    """A network as releases before 10.15 have it."""

    def __init__(self, network: Any) -> None:
        self._network = network

    def __getattr__(self, name: str) -> Any:
        if name in ("add_kv_cache_update", "add_attention", "add_rotary_embedding"):
            raise AttributeError(name)
        return getattr(self._network, name)


def test_older_releases_run_segments_and_are_asked_for_nothing_else(
    library: TensorRTLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JetPack 6 has TensorRT 10.3, whose networks lack three layers, and whose engines no runtime configuration."""
    shape = EngineShape("prefill", 1, 128, 128, 128)
    program = decoder_program(LLAMA, shape)

    def emit(program: Program) -> None:
        trt = library.module
        network = trt.Builder(trt.Logger()).create_network(0)
        ProgramGraph(TensorRTOperations(trt, _Older(network), "float16", "composed"), program).run()

    for run in planned_runs(program, {step.title for step in program.steps if not step.cuts}).values():
        emit(segment_of(program, run).program)
    with pytest.raises(EngineError, match=r"has no add_rotary_embedding, which 10\.15 has: kernels run such layers"):
        emit(program)
    older = SimpleNamespace(INetworkDefinition=SimpleNamespace(add_select=None), __version__="10.3.0")
    found = TensorRTLibrary("trt", "10.3.0", older)
    assert found.lacks == ("add_kv_cache_update", "add_attention", "add_rotary_embedding") and library.lacks == ()
    limits = EngineLimits(max_batch=1, prefill_chunk=128, kv_capacity=1040)
    every = planned_shapes({"base": LLAMA}, limits, "float16", "sm_87", needless=True)
    monkeypatch.setattr(platform, "_search", lambda: (found, ""))
    planned = planned_shapes({"base": LLAMA}, limits, "float16", "sm_87", needless=True)
    assert planned == [shape for shape in every if shape.segment] and len(planned) < len(every)


def test_an_engine_without_a_runtime_configuration_gets_memory_of_ours_too() -> None:
    asked = []
    strategies = SimpleNamespace(USER_MANAGED="ours")
    library: Any = SimpleNamespace(
        module=SimpleNamespace(ExecutionContextAllocationStrategy=strategies), version="10.3.0"
    )
    engine = SimpleNamespace(create_execution_context=asked.append)
    runtime = SimpleNamespace(deserialize_cuda_engine=lambda plan: engine)
    with pytest.raises(EngineError, match=r"TensorRT 10\.3\.0 made no execution context"):
        TensorRTEngine(library, runtime, b"", SHAPES[0], SimpleNamespace())  # type: ignore[arg-type]
    assert asked == ["ours"]
