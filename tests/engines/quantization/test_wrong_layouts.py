"""Packed checkpoints that are damaged, odd, or not as their configuration says: what is refused, and how."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_files import Tensors, read_tensors, write_tensors
from golden_files import golden_folder

from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.checkpoints.weights import load_numpy_weights
from edgellm.engines.errors import CheckpointError
from edgellm.engines.families import decoder_config
from edgellm.engines.model.decoder import decoder_weights
from edgellm.engines.quantization.config import read_quantization

GOLDENS = golden_folder("quantized")
MODEL = "model.safetensors"
LAYER = "model.layers.0.mlp.down_proj"
_TYPES = {"F16": np.float16, "F32": np.float32, "I32": np.int32, "I64": np.int64, "I8": np.int8, "BF16": np.uint16}


def put(ending: str, value: Any, index: int = 3, module: str = LAYER) -> Callable[[Tensors], None]:
    """Changes one element (as its bits, where NumPy has no such type), or with an index of -1 all of them."""

    def change(tensors: Tensors) -> None:
        dtype, shape, data = tensors[f"{module}.{ending}"]
        values = np.frombuffer(data, _TYPES.get(dtype, np.uint8)).copy()
        values[slice(None) if index == -1 else min(index, values.size - 1)] = value
        tensors[f"{module}.{ending}"] = dtype, shape, values.tobytes()

    return change


def change_config(directory: Path, changes: dict[str, Any]) -> None:
    """`changes` of what it says of quantization, keys joined by "/"."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    for key, value in changes.items():
        *folders, last = key.split("/")
        target = config.setdefault("quantization_config", {})
        for folder in folders:
            target = target[folder]
        target[last] = value
    path.write_text(json.dumps(config))


@pytest.fixture
def copy(tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: Path(shutil.copytree(GOLDENS / name, tmp_path / name))


def checked(directory: Path, load: bool = True) -> None:
    with Checkpoint.open(directory) as checkpoint:
        specs = decoder_weights(decoder_config(checkpoint.config, checkpoint.generation_config))
        checkpoint.check(specs)
        if load:
            load_numpy_weights(checkpoint, specs)


INFINITE = "finite numbers"
VALUES = [
    (
        "ct_w4_group32_zeros",
        put("weight_scale", 0),
        "weight_scale' holds 0.0 at [1, 0] (1 such of 192), expected numbers",
    ),
    ("ct_w4_group32_zeros", put("weight_scale", np.inf), "weight_scale' holds inf at [1, 0]"),
    ("ct_w4_group32", put("weight_scale", 0x7FC0), "weight_scale' holds nan"),
    ("ct_w4_channel", put("weight_shape", 7, 0), "weight_shape' holds [7, 84], expected [64, 84]"),
    ("ct16_w4_actorder_group", put("weight_g_idx", 3), "weight_g_idx' holds 3 at [3] (1 such of 96), expected groups"),
    ("ct09_w4_group32_zeros", put("weight_zero_point", 9), "weight_zero_point' holds 9 at [1, 0]"),
    ("ct_fp8_channel", put("weight", 0x7F), "weight' holds 127 at [0, 3] (1 such of 6144), expected numbers"),
    ("ct_fp8_block", put("weight_scale", 0), "weight_scale' holds 0.0"),
    ("ct_nvfp4", put("weight_scale", 0, -1), "weight_scale' holds 0.0 at [0, 0] (384 such of 384)"),
    ("ct_nvfp4", put("weight_scale", 0x7F), "weight_scale' holds nan"),
    ("ct_nvfp4", put("weight_global_scale", 0), "weight_global_scale' holds 0.0 at [0]"),
    ("modelopt_nvfp4", put("weight_scale_2", np.inf), "weight_scale_2' holds inf at []"),
    ("modelopt_int4_awq", put("pre_quant_scale", 0), "pre_quant_scale' holds 0.0 at [3]"),
    ("awq_group32", put("scales", np.nan), "scales' holds nan at [0, 3]"),
    ("autoround_awq", put("qzeros", 0), "qzeros' holds 0 at [0, 24] (8 such of 192), expected zero points of 8"),
    ("gptq_v1_group32", put("qzeros", 0), "qzeros' holds 1 at [0, 24] (8 such of 192), expected zero points of 8"),
    ("gptq_v1_group32", put("scales", 0), "scales' holds 0.0 at [0, 3]"),
    ("gptq_v1_zeros_desc_act", put("g_idx", -1), "g_idx' holds -1 at [3] (1 such of 96), expected groups from 0 to 2"),
    ("gptq_v1_zeros_desc_act", put("g_idx", 0, -1), "g_idx' holds 96 columns of group 0, expected 32 of each group"),
    ("fp8_blocks", put("weight_scale_inv", np.inf, module="model.layers.0.mlp.up_proj"), "weight_scale_inv' holds inf"),
]


@pytest.mark.parametrize(("name", "change", "words"), VALUES, ids=[f"{name}-{words[:24]}" for name, _, words in VALUES])
def test_values_that_no_weight_has(
    name: str, change: Callable[[Tensors], None], words: str, copy: Callable[[str], Path]
) -> None:
    directory = copy(name)
    checked(directory)
    tensors = read_tensors(directory / MODEL)
    change(tensors)
    write_tensors(directory / MODEL, tensors)
    checked(directory, load=False)  # shapes and dtypes are as they were
    with pytest.raises(CheckpointError) as caught:
        checked(directory)
    assert f"tensor 'model.layers.{'0.mlp.up' if name == 'fp8_blocks' else '0.mlp.down'}_proj.{words}" in str(
        caught.value
    )
    assert str(directory) in str(caught.value) and "Copy the checkpoint anew" in str(caught.value)


WEIGHTS = "config_groups/group_0/weights/"
LIES = [
    ("ct_w4_group32", {f"{WEIGHTS}num_bits": 8}, f"wrong shape: {LAYER}.weight_packed is [64, 12], expected [64, 24]"),
    ("ct_w4_group32", {f"{WEIGHTS}symmetric": False}, f"missing: {LAYER}.weight_zero_point [8, 3]"),
    (
        "ct_w4_group32_zeros",
        {f"{WEIGHTS}symmetric": True},
        f"wrong shape: {LAYER}.weight_zero_point is [8, 3], expected [64, 3]",
    ),
    ("ct_w4_group32", {f"{WEIGHTS}group_size": 16}, f"wrong shape: {LAYER}.weight_scale is [64, 3], expected [64, 6]"),
    (
        "ct_w4_group32",
        {f"{WEIGHTS}group_size": 40},
        f"{LAYER}.weight [64, 96]: groups of 40 columns do not divide its 96",
    ),
    ("ct_w4_group32", {f"{WEIGHTS}actorder": "group"}, f"missing: {LAYER}.weight_g_idx [96]"),
    ("ct_w4_group32", {"ignore": []}, "missing: lm_head.weight_packed [64, 8]"),
    ("ct_w4_group32", {"ignore": ["lm_head", LAYER]}, f"missing: {LAYER}.weight [64, 96]"),
    ("ct_fp8_tensor", {f"{WEIGHTS}strategy": "channel"}, f"wrong shape: {LAYER}.weight_scale is [1], expected [64, 1]"),
    ("awq_group32", {"modules_to_not_convert": ["down_proj"]}, f"unknown: {LAYER}.qweight [96, 8]"),
    ("awq_group32", {"quant_method": "gptq"}, f"wrong shape: {LAYER}.qweight is [96, 8], expected [12, 64]"),
    ("awq_group32", {"group_size": 36}, "groups of 36 columns do not divide its 64"),
    (
        "gptq_v1_group32",
        {"bits": 8},
        "wrong shape: model.layers.0.mlp.down_proj.qweight is [12, 64], expected [24, 64]",
    ),
    ("gptq_v1_group32", {"modules_in_block_to_quantize": [["mlp.up_proj"]]}, f"missing: {LAYER}.weight [64, 96]"),
    ("gptq_v1_bias_dynamic", {"dynamic": {}}, f"wrong shape: {LAYER}.qweight"),
    ("autoround_gptq", {"extra_config": {}}, "wrong shape: model.layers.1.mlp.down_proj.qweight"),
    ("fp8_blocks", {"weight_block_size": [16, 16]}, "weight_scale_inv is [2, 4], expected [4, 4]"),
]


@pytest.mark.parametrize(("name", "changes", "words"), LIES, ids=[f"{name}-{words[:30]}" for name, _, words in LIES])
def test_a_configuration_that_lies(name: str, changes: dict[str, Any], words: str, copy: Callable[[str], Path]) -> None:
    directory = copy(name)
    checked(directory, load=False)
    change_config(directory, changes)
    with pytest.raises(CheckpointError, match=re.escape(words)):
        checked(directory)


UNREAD = [
    (
        "ct_w4_group32",
        {"quant_method": "bitsandbytes"},
        "'bitsandbytes', which is not read; read are compressed-tensors",
    ),
    ("ct_w4_group32", {"format": "int-quantized"}, "8-bit integers with 8-bit activations (W8A8) is not read"),
    ("ct_w4_group32", {"format": "mxfp6-pack-quantized"}, "MXFP6 is not read"),
    ("ct_w4_group32", {"config_groups/group_0/input_activations": {"num_bits": 8}}, "'input_activations' is"),
    ("ct_w4_group32", {f"{WEIGHTS}num_bits": 3}, "'num_bits' is 3, expected 4 or 8"),
    ("ct_w4_group32", {"transform_config": {"config_groups": {"u": {}}}}, "rotated weights are not read"),
    ("ct_w4_group32", {"ignore": ["re:("]}, "'(' is no regular expression"),
    ("ct_w4_group32", {"ignore": 5}, "'ignore' is 5, expected a list of names"),
    ("ct_w4_group32", {f"{WEIGHTS}group_size": "32"}, "'group_size' is '32', expected a whole number"),
    ("ct_w4_group32", {"config_groups/group_0/targets": ["Conv2d"]}, "'targets' is ['Conv2d']"),
    ("awq_group32", {"version": "gemv"}, "'version' is 'gemv', expected 'gemm'"),
    ("awq_group32", {"version": "marlin"}, "'version' is 'marlin', expected 'gemm'"),
    ("ct_w4_group32", {"format": ["pack-quantized"]}, "'format' is ['pack-quantized'], expected a layout's name"),
    ("awq_group32", {"bits": 8}, "'bits' is 8, expected one of 4"),
    ("gptq_v1_group32", {"bits": 3}, "'bits' is 3, expected 4 or 8. Take a release of 4 or 8 bits"),
    ("gptq_v1_group32", {"checkpoint_format": "marlin"}, "'checkpoint_format' is 'marlin', expected 'gptq'"),
    ("gptq_v1_group32", {"sym": "yes"}, "'sym' is 'yes', expected one of True, False"),
    ("autoround_gptq", {"packing_format": "auto_round:llm_compressor"}, "'packing_format' is"),
    ("autoround_gptq", {"packing_format": ["auto_round:auto_gptq"]}, "'packing_format' is"),
    ("autoround_gptq", {"bits": 2}, "'bits' is 2"),
    ("autoround_gptq", {"act_bits": 8}, "'act_bits' is 8, expected one of 16, 32"),
    ("gptq_v1_group32", {"modules_in_block_to_quantize": [["a"], [5]]}, "'modules_in_block_to_quantize' is [5]"),
    ("fp8_blocks", {"weight_block_size": [0, 1]}, "'weight_block_size' is [0, 1]"),
]


@pytest.mark.parametrize(("name", "changes", "words"), UNREAD, ids=[f"{n}-{words[:30]}" for n, _, words in UNREAD])
def test_what_is_not_read_is_refused_by_name(
    name: str, changes: dict[str, Any], words: str, copy: Callable[[str], Path]
) -> None:
    directory = copy(name)
    change_config(directory, changes)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(directory)
    assert words in str(caught.value) and str(directory / "config.json") in str(caught.value)
    assert "Take " in str(caught.value) or "Copy " in str(caught.value)


def test_tensors_that_are_missing_unknown_and_of_another_kind(copy: Callable[[str], Path]) -> None:
    directory = copy("gptq_v1_group32")
    tensors = read_tensors(directory / MODEL)
    del tensors[f"{LAYER}.g_idx"]
    tensors["model.layers.0.mlp.up_proj.weight_scale"] = "F32", [1], bytes(4)
    tensors[f"{LAYER}.scales"] = "I16", *tensors[f"{LAYER}.scales"][1:]
    write_tensors(directory / MODEL, tensors)
    with pytest.raises(CheckpointError) as caught:
        checked(directory)
    for words in (
        "(3 differences, weights packed with gptq)",
        f"missing: {LAYER}.g_idx [96]",
        "unknown: model.layers.0.mlp.up_proj.weight_scale [1]",
        f"wrong dtype: {LAYER}.scales is int16, expected one of float32, float16, bfloat16",
    ):
        assert words in str(caught.value)


def test_without_a_configuration_packed_tensors_are_unknown(copy: Callable[[str], Path]) -> None:
    directory = copy("awq_group32")
    config = json.loads((directory / "config.json").read_text())
    del config["quantization_config"]
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=re.escape(f"missing: {LAYER}.weight [64, 96]")):
        checked(directory)


def test_shards_hold_parts_of_a_weight_and_a_truncated_one_is_named(copy: Callable[[str], Path]) -> None:
    directory = copy("awq_group32")
    with Checkpoint.open(directory) as checkpoint:
        whole = checkpoint.packed(f"{LAYER}.weight", (64, 96))
    tensors = read_tensors(directory / MODEL)
    (directory / MODEL).unlink()
    shards = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(tensors)}
    for shard in set(shards.values()):
        write_tensors(directory / shard, {name: tensors[name] for name in tensors if shards[name] == shard})
    assert len({shards[f"{LAYER}.{ending}"] for ending in ("qweight", "qzeros", "scales")}) == 2
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    with Checkpoint.open(directory) as checkpoint:
        packed = checkpoint.packed(f"{LAYER}.weight", (64, 96))
    assert whole is not None and packed is not None
    np.testing.assert_array_equal(packed.values(), whole.values())
    checked(directory)
    (directory / "model-1.safetensors").write_bytes((directory / "model-1.safetensors").read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model-1\.safetensors is not a valid safetensors file"):
        checked(directory)


def test_biases_of_zeros_that_packages_add_are_harmless_and_others_are_not(copy: Callable[[str], Path]) -> None:
    directory = copy("gptq_v1_group32")
    tensors = read_tensors(directory / MODEL)
    tensors[f"{LAYER}.bias"] = "F16", [64], bytes(128)
    write_tensors(directory / MODEL, tensors)
    checked(directory)
    tensors[f"{LAYER}.bias"] = "F16", [64], bytes(127) + b"\1"
    write_tensors(directory / MODEL, tensors)
    with pytest.raises(CheckpointError, match=re.escape(f"unknown: {LAYER}.bias [64]")):
        checked(directory)


def test_a_zero_point_of_zero_in_the_first_version_is_fifteen_in_the_file(copy: Callable[[str], Path]) -> None:
    """Which adding 1 to whole words would carry into the next zero point."""
    directory = copy("gptq_v1_zeros_desc_act")
    tensors = read_tensors(directory / MODEL)
    put("qzeros", np.int32(-1), 0)(tensors)
    write_tensors(directory / MODEL, tensors)
    with Checkpoint.open(directory) as checkpoint:
        packed = checkpoint.packed(f"{LAYER}.weight", (64, 96))
    assert packed is not None and packed.zeros is not None
    assert not packed.zeros[:8, 0].any() and packed.zeros[8:, 0].all()


@pytest.mark.parametrize("said", ["exllamav2", "auto_round:exllamav2", "auto_round", "auto_round:gptqmodel"])
@pytest.mark.parametrize("key", ["packing_format", "backend"])
def test_autorounds_own_packing_keeps_zero_points_as_they_are(copy: Callable[[str], Path], key: str, said: str) -> None:
    """Its GPTQ packing stores them less 1, also where a kernel is named behind it."""
    directory = copy("autoround_gptq_zeros")

    def weights() -> np.ndarray:
        with Checkpoint.open(directory) as checkpoint:
            packed = checkpoint.packed(f"{LAYER}.weight", (64, 96))
            assert packed is not None
            return packed.values()

    expected = weights()
    change_config(directory, {"packing_format": None, key: "auto_round:auto_gptq:exllamav2"})
    np.testing.assert_array_equal(weights(), expected)
    tensors = read_tensors(directory / MODEL)
    for name in [name for name in tensors if name.endswith("qzeros")]:
        dtype, shape, data = tensors[name]
        halves = np.frombuffer(data, np.uint8)
        low, high = (halves + 1) & 15, ((halves >> 4) + 1) & 15
        tensors[name] = dtype, shape, (low | high << 4).astype(np.uint8).tobytes()
    write_tensors(directory / MODEL, tensors)
    change_config(directory, {key: said})
    np.testing.assert_array_equal(weights(), expected)


@pytest.mark.parametrize("keys", [("quantization",), ("quantization", "quantization_config"), ("quantization_config",)])
def test_what_mlx_packs_is_refused_by_its_name(copy: Callable[[str], Path], keys: tuple[str, ...]) -> None:
    directory = copy("awq_group32")
    config = json.loads((directory / "config.json").read_text())
    del config["quantization_config"]
    packed = {"group_size": 64, "bits": 4, "mode": "affine", "lm_head": False}
    (directory / "config.json").write_text(json.dumps(config | dict.fromkeys(keys, packed)))
    with pytest.raises(CheckpointError, match="packed as MLX packs them, which is not read; read are compressed-"):
        Checkpoint.open(directory)


HOSTILE = (
    None,
    True,
    -1,
    10**400,
    1.5,
    float("nan"),
    "",
    "(",
    "re:(",
    [],
    [[]],
    [{}],
    ["x"],
    [5],
    {},
    {"a": {"b": []}},
)


@pytest.mark.parametrize("name", sorted(path.name for path in GOLDENS.iterdir()))
def test_no_type_of_any_field_is_more_than_refused(name: str) -> None:
    """Of all that `quantization_config` says; `tests/goldens/quantized` has every kind that is read."""
    config = json.loads((GOLDENS / name / "config.json").read_text())

    def read(settings: Any) -> None:
        found = read_quantization(GOLDENS / name, config | {"quantization_config": settings})
        layout = None if found is None else found.layout((LAYER,))
        if layout is not None:
            layout.problem(64, 96), layout.tensors(64, 96), layout.format("float16")

    def places(values: Any, replaced: Callable[[Any], Any]) -> Iterator[Callable[[Any], Any]]:
        yield replaced
        for key, inner in values.items() if isinstance(values, dict) else ():
            yield from places(inner, lambda new, key=key: replaced({**values, key: new}))

    for place in places(config.get("quantization_config", {}), lambda new: new):
        for value in HOSTILE:
            with suppress(CheckpointError):
                read(place(value))


def test_autofp8_calls_its_scale_by_another_name(copy: Callable[[str], Path]) -> None:
    directory = copy("fp8_whole")
    with Checkpoint.open(directory) as checkpoint:
        packed = checkpoint.packed(f"{LAYER}.weight", (64, 96))
        assert packed is not None
        expected = packed.values()
    tensors = {
        name.replace("weight_scale_inv", "weight_scale"): each for name, each in read_tensors(directory / MODEL).items()
    }
    write_tensors(directory / MODEL, tensors)
    with pytest.raises(CheckpointError, match=re.escape(f"missing: {LAYER}.weight_scale_inv")):
        checked(directory)
    config = json.loads((directory / "config.json").read_text())
    del config["quantization_config"]["weight_block_size"]
    (directory / "config.json").write_text(json.dumps(config))
    checked(directory)
    with Checkpoint.open(directory) as checkpoint:
        found = checkpoint.packed(f"{LAYER}.weight", (64, 96))
    assert found is not None
    np.testing.assert_array_equal(found.values(), expected)


def test_small_groups_of_4_bit_floats_may_have_vanished(copy: Callable[[str], Path]) -> None:
    directory = copy("ct_nvfp4")
    tensors = read_tensors(directory / MODEL)
    put("weight_scale", 0, 0)(tensors)
    write_tensors(directory / MODEL, tensors)
    with Checkpoint.open(directory) as checkpoint:
        packed = checkpoint.packed(f"{LAYER}.weight", (64, 96))
    assert packed is not None and not packed.values()[0, :16].any()


def test_what_is_not_used_is_said() -> None:
    activations = "The quantization of activations is ignored: packed weights are weights only here."
    caches = "The scales of KV caches are not used."
    for name, notes in (
        ("ct_fp8_channel", (activations,)),
        ("modelopt_nvfp4", (activations, caches)),
        ("modelopt_int4_awq", (caches,)),
        ("ct_w4_group32", ()),
    ):
        with Checkpoint.open(GOLDENS / name) as checkpoint:
            assert checkpoint.quantization is not None and checkpoint.quantization.notes == notes
