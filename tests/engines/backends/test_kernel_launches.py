"""Engines of hand-written kernels prepare their launches without a GPU: for every shape that they say they support."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
from decode_models import DRAFTS, FAMILIES, LLAMA, SCALED
from published_families import PUBLISHED

from edgellm.engines.backends.kernel_engine import KernelEngine
from edgellm.engines.backends.steps.launching import StepKernels
from edgellm.engines.backends.steps.linear import FewRows, ManyRows
from edgellm.engines.backends.steps.table import choose, kernel_choice
from edgellm.engines.families import decoder_config
from edgellm.engines.families.programs import ModelConfig, model_program
from edgellm.engines.model.config import DecoderConfig
from edgellm.engines.model.decoder import decoder_weights
from edgellm.engines.model.limits import EngineShape
from edgellm.engines.model.steps import Attention
from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.decode import attention, columns, linear, norms, tiled_linear
from edgellm.kernels.decode.tilings import Capacity
from edgellm.kernels.encoder import launcher as encoder
from edgellm.kernels.experts import launcher as experts
from edgellm.kernels.experts import prompt_launcher as sorted_experts
from edgellm.kernels.numpy_launch import Enqueued
from edgellm.kernels.prefill import launcher as prefill
from edgellm.kernels.quantization.device_layout import DeviceLayout, PackedMatrix
from edgellm.kernels.quantization.packed_weight import WeightFormat
from edgellm.kernels.recurrent import launcher

#: Of an H200, of RTX PCs without and with clusters.
GPUS = pytest.mark.parametrize(("shared_limit", "has_clusters"), [(232_448, True), (101_376, False), (101_376, True)])
MIXTURES = ("Qwen3-30B-A3B", "OLMoE-1B-7B", "gpt-oss-20b", "granite-3.1-3b-a800m")
H200, ORIN, RTX = 232_448, 166_912, 101_376
WIDE = replace(
    LLAMA, hidden_size=2048, intermediate_size=8192, num_heads=32, num_kv_heads=8, head_dim=64, rotary_dim=64
)


class Made(NamedTuple):
    """A launch that was prepared: its kernel, its grid, its shared memory, and whether it lets what overlaps it start
    before its own predecessor is done."""

    name: str
    grid: tuple[int, int, int]
    shared: int
    next_early: bool


def lets_next_start(expression: str, arguments: Any) -> bool:
    """By what a kernel is given: a struct, or for layer norms the words of their contract, whose seventh says so."""
    first = arguments[0]
    return bool(first[6] if expression.startswith("encoder::norm<") else getattr(first, "next_early", True))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Made]:
    """Every launch that is prepared."""
    found: list[Made] = []

    class Launch(Enqueued):
        def __init__(
            self, module: Any, kernel: Any, grid: tuple[int, int, int], threads: int, shared: int, *more: Any
        ) -> None:
            arguments, *_ = more
            found.append(Made(str(kernel), grid, shared, lets_next_start(kernel.expression, arguments)))

        def __call__(self) -> None:
            pass

    several = experts, sorted_experts, attention, columns, linear, norms, tiled_linear, launcher, encoder, prefill
    for module in several:
        monkeypatch.setattr(module, "Launch", Launch)
    monkeypatch.setattr(tiled_linear, "tensor_map", lambda *arguments: tiled_linear._Map())
    return found


def prepared(
    config: ModelConfig,
    shape: EngineShape,
    shared_limit: int,
    has_clusters: bool,
    way: type | None = None,
    packed: Mapping[str, DeviceLayout] = MappingProxyType({}),
) -> KernelEngine:
    """An engine that made a step on memory that nothing reads; by the implementations that would be taken by default,
    or by one `way`."""
    module: Any = SimpleNamespace(
        multiprocessors=100,
        architecture="sm_90" if has_clusters else "sm_86",
        shared_limit=shared_limit,
        has_clusters=has_clusters,
        can_overlap=has_clusters,
        load=lambda source: None,
    )
    size = getattr(config, "decoder", config).head_dim
    few, many = linear.CudaDecodeKernels(module, "float16", size), tiled_linear.CudaTiledKernels(module, "float16")
    more: Any = {"recurrent": launcher.CudaRecurrent(module), "encoder": encoder.CudaEncoder(module)}
    more |= {"prefill": prefill.CudaPrefill(module), "experts": sorted_experts.CudaSortedExperts(module, "float16")}
    kernels = StepKernels(few, many, **more)
    only = () if way is None else (way,)
    choice, reason = kernel_choice(config, shape, "float16", shared_limit, packed=packed, only=only)
    assert choice is not None, reason
    engine = KernelEngine(kernels, choice, config, shape, "float16", packed)
    device = SimpleNamespace(
        zeros=lambda shape, dtype: DeviceArray(1 << 20, shape, dtype),
        part=lambda memory, offset, shape, dtype: DeviceArray(memory.pointer + offset, shape, dtype),
    )
    engine.attach(device, DeviceArray(1 << 20, (engine.scratch_bytes,), "uint8"))
    memory = DeviceArray(1 << 20, (1 << 20,), "uint8")
    weights = {name: PackedMatrix(layout, memory) for name, layout in packed.items()}
    engine.bind({name: DeviceArray(1 << 20, *tensor) for name, tensor in engine.tensors.items()} | weights)
    engine.enqueue()
    return engine


def taken(config: ModelConfig, shape: EngineShape, gpu: Capacity, **packed: Any) -> str:
    """Which kernels take the most of a step's linear layers: "few", "many", "packed rows"."""
    choice, reason = kernel_choice(config, shape, "float16", gpu, **packed)
    assert choice is not None, reason
    names = [each.name for each in choice.implementations if each.name.endswith("rows")]
    return Counter(names).most_common(1)[0][0].split()[2]


def base_shapes() -> Iterator[EngineShape]:
    yield from (EngineShape("decode", batch, 1, 64, 64) for batch in (1, 2, 3, 8, 16))
    for tokens in (2, 8, 16, 17, 40, 64):
        yield from (EngineShape("verify", batch, tokens, 64, 64, tokens) for batch in (1, 2, 4, 8))
    yield from (EngineShape("prefill", 1, tokens, 64, 64) for tokens in (2, 16))


@GPUS
@pytest.mark.parametrize("family", [*FAMILIES, "wide", "wide_layer_norms", "olmo2", "starcoder2"])
def test_every_shape_of_the_base_is_prepared_by_each_way_that_takes_it(
    launches: list, family: str, shared_limit: int, has_clusters: bool
) -> None:
    made = set[tuple[str, str]]()
    configs = FAMILIES | SCALED | {"wide": WIDE, "wide_layer_norms": replace(WIDE, hidden_size=4096, layer_norms=True)}
    for layers in ((), (0, 1, 2)):
        config = replace(configs[family], feature_layers=layers)
        for shape in base_shapes():
            for way in (FewRows, ManyRows):
                engine = prepared(config, shape, shared_limit, has_clusters, way)
                made |= {(name, shape.phase) for name in engine.choice.names}
    few = {("kernels of few rows", phase) for phase in ("decode", "verify", "prefill")}
    assert few <= made
    assert ("kernels of many rows", "verify") in made
    check(launches, shared_limit)


@pytest.mark.parametrize("shared_limit", [H200, ORIN, RTX], ids=["h200", "orin", "rtx"])
@pytest.mark.parametrize("hidden_size", [2048, 2560, 3072, 4096])
def test_no_step_of_usual_widths_is_left_to_tensorrt(hidden_size: int, shared_limit: int) -> None:
    """It rounds otherwise: what a draft is accepted for would depend on how many tokens are verified."""
    head_size = 64 if hidden_size == 2048 else 128
    config = replace(WIDE, hidden_size=hidden_size, head_dim=head_size, rotary_dim=head_size)
    for shape in base_shapes():
        if shape.phase != "prefill" or shared_limit != RTX:
            choice, reason = kernel_choice(config, shape, "float16", shared_limit)
            assert choice is not None, (shape, reason)


@pytest.mark.parametrize("shared_limit", [H200, ORIN, RTX], ids=["h200", "orin", "rtx"])
@pytest.mark.parametrize("name", [name for name in PUBLISHED if name not in MIXTURES])
def test_kernels_take_every_step_of_published_models(name: str, shared_limit: int) -> None:
    """Those of all families that have no mixtures of experts, with windows that slide, on every device."""
    config = decoder_config(PUBLISHED[name][0])
    few, shared = (12, 6) if config.shared_rows else (4, 0)  # of both kinds
    config = replace(config, num_layers=few, layer_kinds=config.layer_kinds[:few], shared_rows=shared)
    rows = 0 if config.window is None else 8192
    for shape in base_shapes():
        if shape.phase != "prefill" or shared_limit != RTX:
            choice, reason = kernel_choice(config, replace(shape, window_rows=rows), "bfloat16", shared_limit)
            assert choice is not None, (shape, reason)


@pytest.mark.parametrize("name", ["gemma-4-E2B", "gemma-4-E4B"])
def test_steps_of_gemma_4_are_prepared(launches: list, name: str) -> None:
    """Of its widths and heads of 256 and 512, dense and packed, with rows that layers share."""
    config = decoder_config(PUBLISHED[name][0])
    config = replace(config, num_layers=12, layer_kinds=config.layer_kinds[:12], shared_rows=6)
    for (tokens, kv_cache), packed in product(
        ((1, "compute"), (8, "int8"), (60, "compute")), ({}, packed_layers(config))
    ):
        kind = "decode" if tokens == 1 else "verify"
        shape = EngineShape(kind, 1, tokens, 4096, 4096, tokens, kv_cache=kv_cache, window_rows=1088)
        begin = len(launches)
        prepared(config, shape, ORIN, False, packed=packed)
        # Seven a layer; embeddings scaled, inputs of all layers, the head.
        assert tokens > 1 or len(launches) - begin == 12 * 7 + 5
    check(launches, ORIN)


@GPUS
@pytest.mark.parametrize("kv_cache", ["compute", "int8"])
def test_no_step_of_heads_of_256_is_left_to_tensorrt(
    launches: list, kv_cache: str, shared_limit: int, has_clusters: bool
) -> None:
    """Which has no rings for windows and no recurrent layers: such models have these heads and no other executor."""
    config = replace(WIDE, num_heads=8, num_kv_heads=2, head_dim=256, rotary_dim=256)
    for rows, tokens in product((1088, 70_000), (1, 8, 33, 64)):
        kind = "decode" if tokens == 1 else "verify"
        shape = EngineShape(kind, 1, tokens, rows, rows, tokens, kv_cache=kv_cache)
        prepared(config, shape, shared_limit, has_clusters)
    check(launches, shared_limit)


def test_the_fastest_kernels_that_have_the_memory_are_taken() -> None:
    def found(shape: EngineShape, shared_limit: int) -> str:
        return taken(replace(WIDE, hidden_size=4096), shape, Capacity(shared_limit=shared_limit))

    step, chain, tree = (EngineShape("verify", 1, tokens, 64, 64, tokens) for tokens in (1, 8, 64))
    assert [found(step, limit) for limit in (H200, ORIN, RTX)] == ["few"] * 3
    assert [found(tree, limit) for limit in (H200, ORIN, RTX)] == ["many"] * 3
    assert found(chain, RTX) == "many"


def test_what_a_gpu_is_estimated_to_take_decides() -> None:
    """Few rows are normed inside their layers, more by launches of their own: sooner where none overlap."""

    def layers_of_few(capacity: Capacity) -> int:
        shapes = (EngineShape("verify", 1, tokens, 64, 64, tokens) for tokens in range(1, 17))
        choices = [kernel_choice(WIDE, shape, "float16", capacity)[0] for shape in shapes]
        return sum(
            each.name == "kernels of few rows" for choice in choices if choice for each in choice.implementations
        )

    orin, rtx, thor = Capacity(16, ORIN, False, "sm_87"), Capacity(128, RTX, False, "sm_89"), Capacity(20, H200)
    assert layers_of_few(orin) < layers_of_few(rtx) < layers_of_few(thor)


def packed_layers(config: DecoderConfig = WIDE) -> dict[str, DeviceLayout]:
    format = WeightFormat("int4", 128, False, "float16")
    specs = (spec for spec in decoder_weights(config) if len(spec.shape) == 2 and "layers" in spec.name)
    return {spec.name: DeviceLayout(format, *spec.shape) for spec in specs}


@pytest.mark.parametrize("tokens", [1, 2, 64])
def test_packed_layers_and_a_dense_head_are_chosen_for_apart(tokens: int) -> None:
    shape, config = EngineShape("verify", 1, tokens, 64, 64, tokens), replace(WIDE, vocab_size=128_256)
    for gpu in (Capacity(), Capacity(16, ORIN, False, "sm_87")):
        choice, _ = kernel_choice(config, shape, "float16", gpu, packed_layers())
        assert choice is not None and "kernels of packed rows" in choice.names
        few = tokens <= 2 and gpu.has_clusters
        assert choice.implementations[-1].name == f"kernels of {'few' if few else 'many'} rows"


@pytest.mark.parametrize("way", [FewRows, ManyRows])
@pytest.mark.parametrize(("tokens", "norms"), [(1, 0), (2, 0), (3, 4), (8, 4), (9, 4)])
def test_packed_layers_of_few_rows_have_kernels_of_their_own(
    launches: list, way: type, tokens: int, norms: int
) -> None:
    """They norm the fewest rows themselves. Heads are dense, and taken by either kernels."""
    prepared(WIDE, EngineShape("verify", 1, tokens, 64, 64, tokens), H200, True, way, packed_layers())
    names = [name for name, *_ in launches]
    few = [name for name in names if "packed_rows.cu" in name]
    assert len(few) == (4 * WIDE.num_layers if tokens <= 8 else 0)
    assert sum("decode::norm<" in name for name in names) == norms + (way is ManyRows)


def test_a_layer_rounds_an_input_without_a_norm_itself(launches: list) -> None:
    """But embeddings, which come rounded; queries and keys are normed by one launch a layer. What is added to the
    residual stream is added by the layer that takes this, but to embeddings."""
    config = replace(WIDE, pre_norms=False, post_norms=True, qk_norm=True, joint_qk_norm=True)
    shape, layers = EngineShape("decode", 1, 1, 64, 64), config.num_layers
    prepared(config, shape, H200, True, FewRows)

    def count(*parts: str) -> int:
        return sum(all(part in name for part in parts) for name, *_ in launches)

    assert (count("norm_parts"), count("norm_residual"), count("decode::norm<")) == (layers, 1, 0)
    assert count("added_norm_linear", "false, false") == layers - 1 and count("added_norm_linear") == layers
    assert count("added_norm_gate_up", "false, false") == layers - 1 and count("norm_gate_up", "false, false") == layers
    launches.clear()
    prepared(config, shape, H200, True, FewRows, packed_layers())
    assert (count("norm_parts"), count("norm_residual"), count("decode::norm<")) == (layers, 1, 0)
    assert count("packed::added_rounded_linear") == count("packed::added_rounded_gate_up") == layers - 1
    assert count("packed::rounded_gate_up") == 1 and count("packed::rounded_linear") == 0
    launches.clear()
    prepared(config, replace(shape, phase="verify", tokens=3, selected=3), H200, True, FewRows, packed_layers())
    assert count("norm_residual") == 2 * layers and count("added_") == 0


@pytest.mark.parametrize("way", [FewRows, ManyRows])
@pytest.mark.parametrize("model", [*FAMILIES, *SCALED, *DRAFTS])
def test_the_first_attention_waits_for_what_was_enqueued_before(launches: list, model: str, way: type) -> None:
    """It reads lengths, masks and KV rows early: a launch before it holds it back until the last step is done, and what
    laid out a tree. Also where queries come straight from embeddings, without a norm."""
    config = (FAMILIES | SCALED | DRAFTS)[model]
    phase, kind, most = ("propose", "draft", 12) if model in DRAFTS else ("verify", "base", 40)
    packed = {} if model in DRAFTS else packed_layers(config)
    for tokens, own in product((2, 12, most), ({}, packed)):
        launches.clear()
        prepared(config, EngineShape(phase, 1, tokens, 64, 64, tokens, kind), H200, True, way, own)
        first = next(number for number, made in enumerate(launches) if "attention.cu" in made.name)
        early = [made.next_early for made in launches]
        assert not all(early[:first]) and all(early[first:]), (tokens, launches[: first + 1])


@pytest.mark.parametrize(("phase", "tokens", "own"), [("decode", 1, 1), ("verify", 1, 0), ("verify", 4, 0)])
def test_plain_steps_take_attention_of_one_token(launches: list, phase: str, tokens: int, own: int) -> None:
    prepared(WIDE, EngineShape(phase, 1, tokens, 64, 64, tokens), H200, True, FewRows)
    kinds = [made.name for made in launches if "attention.cu" in made.name]
    assert kinds and all(f"('HOST_ONE_TOKEN', {own})" in name for name in kinds)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_what_no_linear_layer_knows_is_a_launch_of_its_own(launches: list, packed: bool) -> None:
    """An activation without a gate, or a layer norm, costs its layer one more; all others have the launches that they
    had."""
    shape, layers = EngineShape("decode", 1, 1, 64, 64), WIDE.num_layers

    def counted(**changes: Any) -> Counter[str]:
        config = replace(WIDE, **changes)
        launches.clear()
        prepared(config, shape, H200, True, FewRows, packed_layers(config) if packed else {})
        return Counter(re.search(r"expression='\w+::(\w+)", name)[1] for name, *_ in launches)

    plain, ungated, normed = counted(), counted(gated_mlp=False, hidden_act="gelu"), counted(layer_norms=True)
    assert plain["norm_gate_up"] == layers
    assert ungated - plain == {"norm_linear": layers, "activate": layers}
    assert plain - ungated == {"norm_gate_up": layers}
    products = "norm_linear", "linear_residual", "norm_gate_up", "gate_up"
    assert sum(normed[name] for name in products) == sum(plain[name] for name in products) == 4 * layers + 1
    assert normed["norm"] == 2 * layers + 1 and normed.total() == plain.total() + normed["norm"]


@GPUS
@pytest.mark.parametrize("head", DRAFTS)
def test_every_shape_of_a_draft_is_prepared(launches: list, head: str, shared_limit: int, has_clusters: bool) -> None:
    shapes = [EngineShape("accept", batch, tokens, 64, 64, 1, "draft") for batch in (1, 4, 20) for tokens in (1, 3, 7)]
    shapes = [shape for shape in shapes if shape.batch * shape.tokens <= 64]
    shapes += [EngineShape("propose", batch, width, 64, 64, width, "draft") for batch in (1, 2) for width in (1, 8, 10)]
    for shape in shapes:
        prepared(DRAFTS[head], shape, shared_limit, has_clusters)
    check(launches, shared_limit)


@pytest.mark.parametrize(
    ("batch", "tokens", "slots"),
    [(4, 64, [1, 1, 1, 1]), (3, 32, [1, 2]), (4, 32, [2, 2]), (8, 16, [4, 4]), (9, 8, [4, 5]), (5, 40, [1] * 5)],
)
def test_passes_cover_every_sequence_once(launches: list, batch: int, tokens: int, slots: list[int]) -> None:
    shape = EngineShape("verify", batch, tokens, 64, 64, tokens)
    engine = prepared(replace(LLAMA, feature_layers=(0, 1)), shape, H200, True)
    assert [part.shape.batch for _, part in engine._passes] == slots
    first = 0
    for (place, part), scratch in zip(engine._passes, engine._scratch, strict=True):
        for name, (size, _) in part.edge.items():
            array, whole = engine._array(place, scratch, name), engine._bound[name]
            row = whole.nbytes // batch if name not in part.weights else 0
            assert (array.pointer, array.shape) == (whole.pointer + first * row, size), name
        first += part.shape.batch
    assert first == batch


def check(launches: list[Made], shared_limit: int) -> None:
    """What a launch needs lies within what every GPU allows and this one has."""
    assert launches
    for name, (x, y, z), shared, _ in launches:
        assert 1 <= x < 1 << 31 and 1 <= y <= 65_535 and 1 <= z <= 65_535, name
        assert shared <= shared_limit, name


#: Hidden and intermediate size, heads, key-value heads and head size of bases of 0.5B, 1B, 1.7B, 3B and 8B.
BASES = {
    "0.5B": (896, 4864, 14, 2, 64),
    "1B": (2048, 8192, 32, 8, 64),
    "1.7B": (2048, 6144, 16, 8, 128),
    "3B": (3072, 8192, 24, 8, 128),
    "8B": (4096, 14336, 32, 8, 128),
}


def usual_shapes() -> Iterator[EngineShape]:
    """What a base and its draft run at the field's largest tree and chunks of 16."""
    for tokens in (1, 8, 16, 17, 32, 60, 64):
        yield EngineShape("verify" if tokens > 1 else "decode", 1, tokens, 64, 64, tokens)
    yield from (EngineShape("prefill", 1, 16, 64, 64, 1, model) for model in ("base", "draft"))
    yield from (EngineShape("accept", batch, 7, 64, 64, 1, "draft") for batch in (1, 3, 9))
    yield from (EngineShape("propose", 1, nodes, 64, 64, nodes, "draft") for nodes in range(1, 11))


@pytest.mark.parametrize("shared_limit", [ORIN, RTX], ids=["orin", "rtx"])
@pytest.mark.parametrize("head", ["eagle1", "each_feature_normed", "straddling_slices"])
@pytest.mark.parametrize("name", BASES)
def test_no_linear_layer_of_usual_models_needs_more_memory_than_devices_have(
    name: str, head: str, shared_limit: int
) -> None:
    hidden, intermediate, heads, kv_heads, size = BASES[name]
    base = replace(
        LLAMA,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=size,
        rotary_dim=size,
        vocab_size=128_256,
    )
    draft = replace(DRAFTS[head], decoder=replace(base, num_layers=1), draft_vocab_size=32_000)
    for shape in usual_shapes():
        program = model_program(draft if shape.model == "draft" else base, shape)
        steps = tuple(step for step in program.steps if not isinstance(step, Attention))
        inputs = program.inputs | {"context": program.kinds["context"]}
        linear_layers = replace(program, steps=steps, inputs=inputs)
        choice, reason = choose(linear_layers, Capacity(shared_limit=shared_limit))
        assert choice is not None, (shape, reason)
