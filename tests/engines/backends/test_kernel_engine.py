"""Engines of hand-written kernels on their NumPy twins: programs by either way, as operations compute them."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from absent_gpu import DEVICE, Module, prepare
from decode_models import (
    CHAIN,
    DRAFTS,
    EAGLE3,
    FAMILIES,
    LLAMA,
    MIXED,
    RECURRENT,
    SCALED,
    TREE,
    Loaded,
    computed,
    draft_shape,
    random_adapters,
    random_draft,
    random_model,
    step_shape,
)
from device_weights import to_device_layout
from numpy_kernel_device import NumpyKernelDevice, numpy_kernel_engine
from packed_weights import random_packed

from edgellm.engines.backends import encoder_calls, kernel_engine
from edgellm.engines.backends.steps import table
from edgellm.engines.backends.steps.attention import FewTokens
from edgellm.engines.backends.steps.linear import FewRows, ManyRows
from edgellm.engines.backends.steps.table import TABLE, choose, kernel_choice
from edgellm.engines.families.programs import ModelConfig, model_program
from edgellm.engines.model.config import DraftConfig
from edgellm.engines.model.encoder_steps import Product
from edgellm.engines.model.expert_steps import for_kernels
from edgellm.engines.model.limits import EngineShape
from edgellm.engines.model.program import Program
from edgellm.engines.model.row_steps import TOKEN_ROWS
from edgellm.engines.model.sharding import sharded
from edgellm.engines.model.steps import Experts, Input, LinearResidual, NormLinear, Step
from edgellm.kernels.decode.contract import LinearWeights
from edgellm.kernels.decode.tilings import Capacity
from edgellm.kernels.errors import KernelError
from edgellm.kernels.quantization.device_layout import InputPermutation, PackedMatrix
from edgellm.kernels.quantization.row_runs import PackedRuns

WAYS = pytest.mark.parametrize("way", [FewRows, ManyRows])
H200 = 232_448
#: Steps of engines with three places for adapters of rank 8.
ADAPTED = [
    EngineShape("decode", 3, 1, 48, 48, 1, "base", 3, 8),
    EngineShape("verify", 2, 8, 48, 48, 8, "base", 3, 8),
    EngineShape("prefill", 1, 8, 48, 48, 1, "base", 3, 8),
]


def launched(
    way: type, config: ModelConfig, shape: EngineShape, arrays: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """What the twins of kernels compute of it, by launches of an engine."""
    layouts = {name: array.layout for name, array in arrays.items() if isinstance(array, PackedMatrix | PackedRuns)}
    engine = numpy_kernel_engine(config, shape, way, layouts)
    bound = {name: copy(array) for name, array in arrays.items() if name in engine.tensors}
    bound |= {f"present_{name}": array for name, array in bound.items() if "_cache_" in name}
    for name, (size, dtype) in model_program(config, shape).outputs.items():
        bound[name] = np.full(size, np.nan, np.float32 if dtype == "compute" else dtype)
    engine.bind(bound)
    engine.attach(NumpyKernelDevice(), np.full(engine.scratch_bytes, 0xFF, np.uint8))  # NaN: nothing unwritten is read
    engine.enqueue()
    first = {name: bound[name].copy() for name in model_program(config, shape).outputs}
    engine.enqueue()  # the same step again gives the same
    for name, values in first.items():
        np.testing.assert_array_equal(bound[name], values)
    return bound


def packed_linears(arrays: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Arrays with packed linear layers whose inputs are permuted, scaled, or both: dense, and as kernels have them.

    Of what is multiplied as one, the last eight rows, or the ups, are packed in another way, with inputs in another
    order, or not packed."""
    dense, packed, random = dict(arrays), dict[str, Any](arrays), np.random.default_rng(5)
    for number, (name, array) in enumerate(arrays.items()):
        if not name.endswith("weight") or array.ndim != 2 or "embed" in name:
            continue
        columns = array.shape[1]
        order = random.permutation(columns).astype(np.int32) if number % 3 else None
        scales = random.uniform(0.5, 2, columns).astype(np.float32) if number % 3 != 1 else None
        # Gates and ups are halves.
        size, apart = 0.3 * columns**-0.5, 8 if "qkv" in name else array.shape[0] // 2 if "gate_up" in name else 0
        weights = [random_packed(array.shape[0] - apart, columns, 16, True, "float16", size)]
        weights, beside = [replace(weights[0], order=order, input_scales=scales)], list[np.ndarray]()
        if apart and number % 2:
            beside.append(random.normal(0, size, (apart, columns)).astype(np.float32))
        elif apart:
            other = random_packed(apart, columns, 16, True, "float32", size / 8, codes="int6")
            weights.append(replace(other, order=random.permutation(columns).astype(np.int32)))
        values = [each.values() * (1 if each.input_scales is None else each.input_scales) for each in weights]
        dense[name], runs = np.concatenate([*values, *beside]).astype(np.float32), list[Any]()
        for weight in weights:
            layout, data = to_device_layout(weight, "float16")
            runs.append(PackedMatrix(replace(layout, dtype="float32"), data, InputPermutation.of(weight)))
        packed[name] = PackedRuns((*runs, *beside)) if apart else runs[0]
    return dense, packed


def assert_equal(
    config: ModelConfig, shape: EngineShape, found: Mapping[str, Any], expected: Mapping[str, Any]
) -> None:
    program = model_program(config, shape)
    for name in (*program.outputs, *program.states):
        np.testing.assert_allclose(found[name], expected[name], atol=5e-5, rtol=5e-5, err_msg=name)


@WAYS
@pytest.mark.parametrize("family", [*FAMILIES, *SCALED])
def test_a_decode_step_is_what_operations_compute(family: str, way: type) -> None:
    config, shape = (FAMILIES | SCALED)[family], EngineShape("decode", 3, 1, 48, 48)
    arrays = random_model(config, 3, 48, [5, 0, 40])
    assert_equal(config, shape, launched(way, config, shape, arrays), computed(config, shape, arrays))


@pytest.mark.parametrize("batch", [1, 3])
def test_a_part_of_a_step_needs_no_rows_of_tokens_own(batch: int) -> None:
    """The first layer up to what its MLP gives."""
    config, shape = SCALED["gemma4"], EngineShape("decode", batch, 1, 48, 48)
    arrays = random_model(config, batch, 48, [5, 0, 40][:batch])
    expected = launched(FewRows, config, shape, arrays)["logits"]
    engine, rows = numpy_kernel_engine(config, shape, FewRows, {}), arrays[TOKEN_ROWS].copy()
    bound = {name: copy(array) for name, array in arrays.items() if name in engine.tensors}
    bound |= {f"present_{name}": array for name, array in bound.items() if "_cache_" in name}
    engine.bind(bound | {"logits": np.zeros_like(expected), TOKEN_ROWS: rows})
    engine.attach(NumpyKernelDevice(), np.full(engine.scratch_bytes, 0xFF, np.uint8))
    before, behind = engine.around_rows()
    taken, rows[...] = rows.copy(), np.nan
    before()
    assert engine._rows_taken > 5
    rows[...] = taken
    behind()
    np.testing.assert_array_equal(engine._bound["logits"], expected)


@pytest.mark.parametrize("step", ["decode", "verify", "prefill", "long prefill"])
@pytest.mark.parametrize("family", sorted(MIXED.keys() - {"qwen3_5_moe"}))  # which commits states
def test_mixtures_of_experts_are_what_operations_compute(family: str, step: str) -> None:
    """Of three sequences, of two trees, and of prompts of few rows and of many."""
    config, phase = MIXED[family], step.split()[-1]
    parents = (None,) if step == "decode" else TREE if step == "verify" else (None, *range(7 if phase == step else 71))
    batch = {"decode": 3, "verify": 2}.get(step, 1)
    selected = len(parents) if step == "verify" else 1
    shape = EngineShape(phase, batch, len(parents), 112, 112, selected)
    arrays = random_model(config, batch, 112, [5, 0, 30][:batch], parents)
    if phase == "prefill":
        arrays["last_token_ids"] = np.array([[len(parents) - 2]], np.int32)
    found, expected = launched(FewRows, config, shape, arrays), computed(config, shape, arrays)
    assert_equal(config, shape, found, expected)


@pytest.mark.parametrize("family", sorted(MIXED))
def test_mixtures_of_experts_are_bound_and_prepared(family: str) -> None:
    """On the memory and in the dtypes that tests on a GPU give them; prompts of few rows and of many."""
    config, module = MIXED[family], Module()
    gpu = SimpleNamespace(**vars(DEVICE), kernel_module=module)
    if not config.is_recurrent:  # whose states are bound otherwise
        for batch, parents in ((1, (None,)), (64, (None,)), (1, TREE)):
            arrays = random_model(config, batch, 128, [3] * batch, parents)
            assert Loaded(gpu, config, step_shape(arrays, 128), arrays, "float16").engine._prepare()
    for tokens in (16, 65, 300):
        prepare(module, config, EngineShape("prefill", 1, tokens, 320, 320), "bfloat16")
    assert sum("experts" in source.name for source in module.sources) >= 6


@WAYS
@pytest.mark.parametrize("features", [(), (1, 0), (0, 2)], ids=str)
@pytest.mark.parametrize("parents", [(None, 0), TREE], ids=["two", "tree"])
@pytest.mark.parametrize(
    "family", ["llama_untied_biases", "qwen3", "granite", "gemma4", "olmo2", "starcoder2", "layer_norms_and_a_gate"]
)
def test_verified_tokens_and_features_are_what_operations_compute(
    family: str, parents: tuple[int | None, ...], features: tuple[int, ...], way: type
) -> None:
    """Two sequences; `num_layers` (2) among the features stands for the final norm."""
    config, tokens = replace((FAMILIES | SCALED)[family], feature_layers=features), len(parents)
    arrays = random_model(config, 2, 48, [0, 29], parents)
    shape = EngineShape("verify", 2, tokens, 48, 48, tokens)
    assert_equal(config, shape, launched(way, config, shape, arrays), computed(config, shape, arrays))


@WAYS
@pytest.mark.parametrize(
    "family", ["llama_untied_biases", "gemma", "gemma4", "olmo2", "starcoder2", "layer_norms_and_a_gate"]
)
def test_a_short_prefill_is_what_operations_compute(family: str, way: type) -> None:
    config, shape = replace((FAMILIES | SCALED)[family], feature_layers=(0,)), EngineShape("prefill", 1, 8, 48, 48)
    arrays = random_model(config, 1, 48, [21], CHAIN) | {"last_token_ids": np.array([[5]], np.int32)}
    assert_equal(config, shape, launched(way, config, shape, arrays), computed(config, shape, arrays))


def test_a_tree_of_more_rows_than_a_launch_takes_is_verified_in_passes() -> None:
    config, parents = replace(LLAMA, feature_layers=(0, 1)), (None, *range(23))
    shape = EngineShape("verify", 3, 24, 48, 48, 24)
    arrays = random_model(config, 3, 48, [0, 20, 7], parents)
    found = launched(ManyRows, config, shape, arrays)
    assert_equal(config, shape, found, computed(config, shape, arrays))
    assert len(numpy_kernel_engine(config, shape, ManyRows)._passes) == 2


@WAYS
@pytest.mark.parametrize("shape", ADAPTED, ids=lambda shape: shape.phase)
@pytest.mark.parametrize("family", ["llama_untied_biases", "granite", "olmo2", "starcoder2", "gemma4"])
def test_adapters_are_applied_as_operations_apply_them(family: str, shape: EngineShape, way: type) -> None:
    """Each sequence takes another of three, or none."""
    config, taken = (FAMILIES | SCALED)[family], [2, None, 0][: shape.batch]
    parents = CHAIN[: shape.tokens] if shape.tokens > 1 else (None,)
    arrays = random_model(config, shape.batch, 48, [21, 0, 5][: shape.batch], parents)
    arrays |= random_adapters(config, taken, 3, 8) | {"last_token_ids": np.array([[5]], np.int32)}
    found = launched(way, config, shape, arrays)
    assert_equal(config, shape, found, computed(config, shape, arrays))
    plain = computed(config, replace(shape, lora_slots=0, lora_rank=0), arrays)
    assert np.linalg.norm(found["logits"] - plain["logits"]) > 0.01 * np.linalg.norm(plain["logits"])


@WAYS
@pytest.mark.parametrize("shape", ADAPTED, ids=lambda shape: shape.phase)
@pytest.mark.parametrize("family", ["llama", "starcoder2", "olmo2"])
def test_adapters_take_the_inputs_of_packed_layers_as_they_were(family: str, shape: EngineShape, way: type) -> None:
    """Before they are permuted and scaled."""
    config, parents = (FAMILIES | SCALED)[family], CHAIN[: shape.tokens] if shape.tokens > 1 else (None,)
    arrays = random_model(config, shape.batch, 48, [21, 0, 5][: shape.batch], parents)
    arrays |= random_adapters(config, [2, None, 0][: shape.batch], 3, 8) | {"last_token_ids": np.array([[5]], np.int32)}
    dense, packed = packed_linears(arrays)
    found = launched(way, config, shape, packed)
    assert_equal(config, shape, found, computed(config, shape, dense))
    plain = computed(config, replace(shape, lora_slots=0, lora_rank=0), dense)
    assert np.linalg.norm(found["logits"] - plain["logits"]) > 0.01 * np.linalg.norm(plain["logits"])


@WAYS
@pytest.mark.parametrize(("phase", "tokens"), [("propose", 1), ("propose", 7), ("accept", 7), ("prefill", 8)])
@pytest.mark.parametrize("head", DRAFTS)
def test_a_step_of_a_draft_is_what_operations_compute(head: str, phase: str, tokens: int, way: type) -> None:
    config, batch = DRAFTS[head], 1 if phase == "prefill" else 2
    shape = draft_shape(phase, batch, tokens, 64)
    arrays = random_draft(config, shape, [29, 0][:batch])
    assert_equal(config, shape, launched(way, config, shape, arrays), computed(config, shape, arrays))


@WAYS
@pytest.mark.parametrize("parents", [(None,), TREE], ids=["decode", "verify"])
@pytest.mark.parametrize(
    "family", ["llama_untied_biases", "gemma", "gemma4", "olmo2", "starcoder2", "layer_norms_and_a_gate"]
)
def test_inputs_of_packed_layers_are_permuted_and_scaled(
    family: str, parents: tuple[int | None, ...], way: type
) -> None:
    tokens = len(parents)
    config = replace((FAMILIES | SCALED)[family], feature_layers=() if tokens == 1 else (0, 2))
    shape = EngineShape("decode" if tokens == 1 else "verify", 2, tokens, 48, 48, tokens)
    dense, packed = packed_linears(random_model(config, 2, 48, [0, 29], parents))
    assert_equal(config, shape, launched(way, config, shape, packed), computed(config, shape, dense))


@WAYS
@pytest.mark.parametrize("head", [name for name in DRAFTS if DRAFTS[name].decoder.mixture is None])
def test_inputs_of_packed_layers_of_a_draft_are_permuted_and_scaled(head: str, way: type) -> None:
    config, shape = DRAFTS[head], draft_shape("accept", 2, 7, 64)
    dense, packed = packed_linears(random_draft(config, shape, [29, 0]))
    assert_equal(config, shape, launched(way, config, shape, packed), computed(config, shape, dense))


@pytest.mark.parametrize("what", ["permuted", "scaled"])
def test_a_packed_layer_that_does_not_say_how_its_inputs_are_arranged_is_refused(what: str) -> None:
    weight = random_packed(8, 128, 32, False, "float16")
    layout, data = to_device_layout(replace(weight, format=replace(weight.format, **{what: True})))
    with pytest.raises(KernelError, match="how its inputs are arranged"):
        _ = LinearWeights(PackedMatrix(layout, data)).arranged


@pytest.mark.parametrize(("phase", "tokens"), [("propose", 24), ("accept", 23)])
def test_a_step_of_a_draft_of_more_rows_than_a_launch_takes_runs_in_passes(phase: str, tokens: int) -> None:
    config, shape = EAGLE3, draft_shape(phase, 3, tokens, 96)
    arrays = random_draft(config, shape, [29, 0, 11])
    assert_equal(config, shape, launched(ManyRows, config, shape, arrays), computed(config, shape, arrays))
    assert len(numpy_kernel_engine(config, shape, ManyRows)._passes) == 2


@pytest.mark.parametrize(
    ("changes", "shape", "dtype", "reason"),
    [
        ({}, {}, "float32", "float16 and bfloat16, not float32"),
        ({}, {"phase": "prefill", "tokens": 16}, "float16", None),
        ({}, {"phase": "prefill", "tokens": 17}, "float16", None),
        ({}, {"phase": "prefill", "tokens": 128}, "float16", None),
        ({}, {"phase": "verify", "tokens": 128, "selected": 128}, "float16", "up to 64 rows, not 128"),
        ({"feature_layers": (0,)}, {"phase": "prefill", "tokens": 16}, "float16", None),
        *(({"feature_layers": (layer,)}, {"phase": "prefill", "tokens": 16}, "float16", None) for layer in (1, 2)),
        ({"deepstack_layers": 1}, {"phase": "prefill", "tokens": 16}, "float16", None),
        ({}, {"batch": 17}, "float16", None),
        ({}, {"batch": 65}, "float16", "up to 64 rows, not 65"),
        ({}, {"phase": "verify", "tokens": 8, "selected": 8}, "float16", None),
        ({}, {"phase": "verify", "tokens": 64, "selected": 64, "batch": 8}, "bfloat16", None),
        ({}, {"lora_slots": 8, "lora_rank": 64}, "float16", None),
        ({}, {"lora_slots": 9, "lora_rank": 8}, "float16", "qkv_proj: LoRA adapters are applied in up to 8 places"),
        ({}, {"lora_slots": 1, "lora_rank": 72}, "float16", "of rank 72, to layers of"),
        ({"intermediate_size": 100}, {}, "float16", "mlp.down_proj: widths must be multiples of 8, not 100"),
        ({"head_dim": 264}, {}, "float16", "the attention of layer 0: decode attention takes head sizes up to 256"),
        (
            {"rotary_dim": 6},
            {},
            "float16",
            "layer 0: a multiple of 4 of a head's elements is rotated, at most all 16, not 6",
        ),
        (
            {"rotary_dim": 6},
            {"phase": "prefill", "tokens": 128},
            "float16",
            "the attention of layer 0: a multiple of 4",
        ),
        ({"rotary_dim": 12}, {}, "float16", None),
        ({"num_heads": 34}, {}, "float16", "up to 16 query heads a key-value head"),
        ({"hidden_act": "gelu"}, {}, "float16", "gate_up_proj: the activation gelu has no kernel"),
        ({"feature_layers": (1,)}, {}, "float16", None),
    ],
)
def test_the_step_that_no_kernel_runs_is_named(changes: dict, shape: dict, dtype: str, reason: str | None) -> None:
    config = replace(LLAMA, **changes)
    choice, found = kernel_choice(config, replace(EngineShape("decode", 1, 1, 64, 64), **shape), dtype, H200)
    if reason is None:
        assert choice is not None
    else:
        assert choice is None
        assert reason in found


@pytest.mark.parametrize(
    ("gpu", "tokens", "expected"),
    [
        (Capacity(16, 166_912, False, "sm_87"), 1, "few many"),
        (Capacity(16, 166_912, False, "sm_87"), 8, "many"),
        (Capacity(128, 101_376, False, "sm_89"), 1, "few"),
        (Capacity(132, H200, True, "sm_90"), 1, "few"),
        (Capacity(20, H200, True, "sm_110"), 8, "few"),
    ],
)
def test_the_gpu_decides_which_kernels_run_the_layers_of_llama_1b(gpu: Capacity, tokens: int, expected: str) -> None:
    """Also of a decode step, where kernels of many rows keep an Orin's memory busier."""
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_heads": 32, "num_kv_heads": 8, "head_dim": 64}
    config = replace(LLAMA, vocab_size=128_256, num_layers=16, **sizes)
    shape = EngineShape("decode" if tokens == 1 else "verify", 1, tokens, 64, 64)
    choice, _ = kernel_choice(config, shape, "float16", gpu)
    assert choice is not None
    found = {each.name.split()[2] for each in choice.implementations if each.name.endswith("rows")}
    assert found == set(expected.split())


@pytest.mark.parametrize(
    ("changes", "shape", "limit"),
    [
        ({}, {"tokens": 3, "selected": 3}, H200),
        ({}, {}, 101_376),
        ({"generation": "1"}, {"phase": "accept", "selected": 1, "tokens": 4}, H200),
        ({"feature_norm": "each"}, {"phase": "accept", "selected": 1}, H200),
        ({}, {"batch": 2, "phase": "accept", "selected": 1}, H200),
        ({}, {"phase": "prefill", "tokens": 16, "selected": 1}, 166_912),
    ],
)
def test_kernels_run_every_step_of_a_draft_of_llama_1b(changes: dict, shape: dict, limit: int) -> None:
    wide = replace(LLAMA, hidden_size=2048, intermediate_size=8192, num_heads=32, num_kv_heads=8, head_dim=64)
    config: DraftConfig = replace(EAGLE3, decoder=replace(wide, num_layers=1), **changes)
    step = replace(draft_shape("propose", 1, 10, 64), **shape)
    choice, reason = kernel_choice(config, step, "float16", limit)
    assert choice is not None, reason


def test_an_unknown_step_is_named_and_a_choice_among_few_is_kept_to() -> None:
    program = model_program(LLAMA, EngineShape("decode", 1, 1, 64, 64))
    steps = (Product("inputs_embeds", "inputs_embeds", program.steps[0].linear.weight, 1.0), *program.steps)
    assert choose(replace(program, steps=steps), Capacity())[1] == (
        "kernels cannot run the step Product to inputs_embeds: there is no kernel for it"
    )
    for way in (FewRows, ManyRows):
        choice, _ = choose(program, Capacity(), (way,))
        assert choice is not None and {type(each) for each in choice.implementations} == {FewTokens, way}


def test_every_kind_of_step_that_models_hold_has_an_implementation() -> None:
    """Decoders and drafts, or encoders; and none is there for nothing. Experts are several of them."""
    known = {kind for kind in Step.__subclasses__() if {"results", "gives"} & vars(kind).keys()} - {Experts}
    assert known <= TABLE.keys() | encoder_calls._KINDS.keys() and all(TABLE.values())
    found = set[type[Step]]()
    base = [EngineShape(*each, 64, 64) for each in (("decode", 2, 1), ("verify", 1, 8), ("prefill", 1, 72))]
    for config in (FAMILIES | SCALED | RECURRENT | MIXED | {"deepstack": replace(LLAMA, deepstack_layers=1)}).values():
        for features in ((), (1, 2)):
            programs = [model_program(replace(config, feature_layers=features), shape) for shape in base]
            if config in (LLAMA, SCALED["gemma2"], SCALED["olmo2"]):
                programs += [sharded(programs[0], 0, 2).program]
            found |= {type(step) for program in programs for step in for_kernels(program).steps}
    for draft in DRAFTS.values():
        shapes = [draft_shape(phase, 1, 8, 64) for phase in ("prefill", "accept", "propose")]
        found |= {type(step) for shape in shapes for step in for_kernels(model_program(draft, shape)).steps}
    assert found == TABLE.keys()


@pytest.mark.parametrize("tokens", [1, 64])
def test_a_step_that_fused_kernels_refuse_leaves_all_others_theirs(tokens: int) -> None:
    program = model_program(FAMILIES["qwen2"], EngineShape("verify", 1, tokens, 64, 64, tokens))
    before, _ = choose(program, Capacity())
    assert before is not None
    for place, step in enumerate(program.steps):
        if not isinstance(step, NormLinear):
            continue
        norm = step.inputs[0].norms[0]
        behind = Input(step.inputs[0].value, (replace(norm, bias=replace(norm.weight, name="bias")),))
        steps = (*program.steps[:place], replace(step, inputs=(behind,)), *program.steps[place + 1 :])
        found, reason = choose(replace(program, steps=steps), Capacity())
        assert found is not None, reason
        pairs = enumerate(zip(found.implementations, before.implementations, strict=True))
        assert all(own is other for number, (own, other) in pairs if number != place)


@WAYS
@pytest.mark.parametrize("family", ["olmo2", "layer_norms_and_a_gate"])
def test_features_are_kept_where_what_is_added_is_normed(
    family: str, way: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the step that adds, in the place of the one that reads the residual before."""

    def moved(config: ModelConfig, shape: EngineShape, share: None = None) -> Program:
        program = model_program(config, shape)
        keep, steps = None, list[Step]()
        for step in program.steps:
            own: Step = step
            if isinstance(step, NormLinear) and step.keep is not None and step.keep.raw:
                own, keep = replace(step, keep=None), step.keep
            elif isinstance(step, LinearResidual) and keep is not None:
                own, keep = replace(step, keep=keep), None
                assert step.norm is not None
            steps.append(own)
        return replace(program, steps=tuple(steps))

    config = replace(SCALED[family], feature_layers=(0, 1))
    for shape in (EngineShape("verify", 2, 8, 48, 48, 8), EngineShape("prefill", 2, 8, 48, 48)):
        arrays = random_model(config, 2, 48, [0, 29], CHAIN) | {"last_token_ids": np.array([[5], [2]], np.int32)}
        expected = computed(config, shape, arrays)
        assert moved(config, shape).steps != model_program(config, shape).steps
        with monkeypatch.context() as patch:
            for module in (kernel_engine, table):
                patch.setattr(module, "model_program", moved)
            assert_equal(config, shape, launched(way, config, shape, arrays), expected)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"activation": "relu"}, "mlp.up_proj: the activation relu has no kernel"),
        ({"scale": 0.5}, "what an activation gives is not scaled"),
        ({"gated": True, "activation": "gelu"}, "the activation gelu has no kernel with a gate"),
    ],
)
def test_what_no_launch_computes_is_refused(changes: dict[str, Any], reason: str) -> None:
    program = model_program(SCALED["starcoder2"], EngineShape("decode", 1, 1, 64, 64))
    steps = [replace(step, **changes) if getattr(step, "activation", None) else step for step in program.steps]
    choice, found = choose(replace(program, steps=tuple(steps)), Capacity())
    assert choice is None and reason in found


def test_layer_norms_of_parts_are_refused() -> None:
    program = model_program(EAGLE3, draft_shape("propose", 1, 1, 64))
    place = next(number for number, step in enumerate(program.steps) if len(getattr(step, "inputs", ())) == 2)
    step = program.steps[place]
    assert isinstance(step, NormLinear)
    inputs = [
        replace(each, norms=tuple(replace(norm, bias=replace(norm.weight, name="bias")) for norm in each.norms))
        for each in step.inputs
    ]
    steps = (*program.steps[:place], replace(step, inputs=tuple(inputs)), *program.steps[place + 1 :])
    choice, found = choose(replace(program, steps=steps), Capacity())
    assert choice is None and "layer norms are of whole inputs, not of parts side by side" in found
