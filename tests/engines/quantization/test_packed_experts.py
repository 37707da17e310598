"""Mixtures whose experts are packed as others publish them: MXFP4, NVFP4, FP8 in blocks, AutoRound, GPTQ and AWQ.

Scales are powers of two, so that 16 bits hold all values as they are.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_images import GoldenModel, assert_close
from packed_checkpoints import write_packed
from quantized_checkpoints import logits
from safetensors.numpy import load_file, save_file
from tiny_families import MIXTURES

from edgellm.engines.backends.packed_loading import _prepare
from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.errors import CheckpointError, EngineError
from edgellm.engines.families import decoder_config
from edgellm.engines.formats.tensors import contiguous
from edgellm.engines.model.config import WeightSpec
from edgellm.engines.model.decoder import decoder_weights
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.quantization.compressed_tensors import PackQuantized
from edgellm.engines.quantization.config import read_quantization
from edgellm.engines.quantization.layout import LinearTensors
from edgellm.engines.quantization.stored import StoredWeight
from edgellm.engines.quantizer.written_layout import StoredTensor, write_tensors
from edgellm.engines.runners.sampling_state import SamplingValues

Make = Callable[..., Path]
#: A layer's tensors by the endings of their names, and the values that they stand for.
Packed = tuple[dict[str, StoredTensor], np.ndarray]
MODEL, KEPT = "model.safetensors", r".*(self_attn\..*|mlp\.gate|lm_head)$"
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def _e4m3(bits: np.ndarray) -> np.ndarray:
    """The 8-bit floats of OCP: 1 sign, 4 bits of exponent that count from 7, 3 of mantissa; no infinities."""
    sign, exponent, mantissa = np.where(bits >> 7, -1.0, 1.0), bits >> 3 & 15, bits & 7
    small = mantissa / 8 * 2.0**-6
    return (sign * np.where(exponent == 0, small, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))).astype(np.float32)


def _powers(shape: tuple[int, ...], random: np.random.Generator) -> np.ndarray:
    return np.exp2(random.integers(-6, -3, shape)).astype(np.float32)


def _four_bits(rows: int, columns: int, random: np.random.Generator) -> tuple[StoredTensor, np.ndarray]:
    codes = random.integers(0, 16, (rows, columns), np.uint8)
    return StoredTensor("uint8", codes[:, ::2] | codes[:, 1::2] << 4), E2M1[codes]


def _mxfp4(rows: int, columns: int, random: np.random.Generator) -> Packed:
    packed, values = _four_bits(rows, columns, random)
    scales = random.integers(119, 123, (rows, columns // 32), np.uint8)
    own = {"weight_packed": packed, "weight_scale": StoredTensor("uint8", scales)}
    return own, values * np.repeat(2.0 ** (scales.astype(np.float32) - 127), 32, axis=1)


def _nvfp4(rows: int, columns: int, random: np.random.Generator) -> Packed:
    packed, values = _four_bits(rows, columns, random)
    scales, whole = random.integers(40, 60, (rows, columns // 16), np.uint8), np.array([32.0], np.float32)
    own = {
        "weight_packed": packed,
        "weight_scale": StoredTensor("float8_e4m3", scales),
        "weight_global_scale": StoredTensor("float32", whole),
    }
    return own, values * np.repeat(_e4m3(scales) / whole, 16, axis=1)


def _fp8(rows: int, columns: int, random: np.random.Generator) -> Packed:
    codes = random.integers(0, 256, (rows, columns), np.uint8)
    codes[codes & 127 == 127] = 0  # which are no numbers
    codes = np.where(codes >> 3 & 15 > 8, codes & 0xBF, codes).astype(np.uint8)
    scales = _powers((rows // 32, columns // 32), random)
    own = {"weight": StoredTensor("float8_e4m3", codes), "weight_scale_inv": StoredTensor("float32", scales)}
    return own, _e4m3(codes) * np.repeat(np.repeat(scales, 32, axis=0), 32, axis=1)


def _gptq(rows: int, columns: int, random: np.random.Generator) -> Packed:
    codes = random.integers(0, 16, (rows, columns)).astype(np.uint32)
    shifts = np.arange(0, 32, 4, dtype=np.uint32)
    words = (codes.T.reshape(columns // 8, 8, rows) << shifts[None, :, None]).sum(1, dtype=np.uint32)
    scales = _powers((columns // 32, rows), random).astype(np.float16)
    own = {
        "qweight": StoredTensor("int32", words.view(np.int32)),
        "qzeros": StoredTensor("int32", np.full((columns // 32, rows // 8), 0x77777777, np.int32)),
        "scales": StoredTensor("float16", scales),
        "g_idx": StoredTensor("int32", (np.arange(columns) // 32).astype(np.int32)),
    }
    return own, (codes.astype(np.float32) - 8) * np.repeat(scales.astype(np.float32).T, 32, axis=1)


def _without_groups(rows: int, columns: int, random: np.random.Generator) -> Packed:
    own, values = _gptq(rows, columns, random)
    return {name: each for name, each in own.items() if name != "g_idx"}, values


def _awq(rows: int, columns: int, random: np.random.Generator) -> Packed:
    shifts = 4 * np.array([0, 4, 1, 5, 2, 6, 3, 7], np.uint32)  # of the eight columns of a word

    def words(codes: np.ndarray) -> StoredTensor:
        found = (codes.reshape(len(codes), -1, 8).astype(np.uint32) << shifts).sum(-1, dtype=np.uint32)
        return StoredTensor("int32", found.view(np.int32))

    codes, zeros = (random.integers(0, 16, (count, rows)) for count in (columns, columns // 32))
    scales = _powers((columns // 32, rows), random).astype(np.float16)
    values = (codes - np.repeat(zeros, 32, axis=0)) * np.repeat(scales.astype(np.float32), 32, axis=0)
    return {"qweight": words(codes), "qzeros": words(zeros), "scales": StoredTensor("float16", scales)}, values.T


def _compressed(kind: str, group: int) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "float", "symmetric": True, "group_size": group}
    weights["strategy"] = "group" if group == 32 else "tensor_group"
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": groups, "ignore": [f"re:{KEPT}"]}


_GPTQ = {"bits": 4, "group_size": 32, "sym": True}
METHODS: dict[str, tuple[dict[str, Any], Callable[..., Packed]]] = {
    "mxfp4": (_compressed("mxfp4-pack-quantized", 32), _mxfp4),
    "nvfp4": (_compressed("nvfp4-pack-quantized", 16), _nvfp4),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [32, 32], "modules_to_not_convert": []}, _fp8),
    "auto-round": ({"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"} | _GPTQ, _without_groups),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "modules_to_not_convert": None}, _awq),
    "gptq": ({"quant_method": "gptq", "checkpoint_format": "gptq", "desc_act": False, "dynamic": {}} | _GPTQ, _gptq),
}


def write(source: Path, folder: Path, method: str, routers_are_named: bool) -> tuple[Path, Path]:
    """A checkpoint whose MLPs and experts are packed at random, and its dense twin in float32."""
    settings, pack = METHODS[method]
    config = json.loads((source / "config.json").read_text())
    random, tensors, twin = np.random.default_rng(7), {}, {}
    kept = []
    for name, values in sorted(load_file(source / MODEL).items()):
        module = name.removesuffix(".weight")
        is_router = method == "awq" and module.endswith("mlp.gate")  # AutoAWQ packs it, too
        if values.ndim < 2 or "embed" in name or (re.fullmatch(KEPT, module) and not is_router):
            tensors[name] = twin[name] = StoredTensor("float16", values.astype(np.float16))
            kept += [module] if values.ndim == 2 and (routers_are_named or not module.endswith("mlp.gate")) else []
            continue
        own, dense = pack(*values.shape, random)
        tensors |= {f"{module}.{ending}": each for ending, each in own.items()}
        twin[name] = StoredTensor("float32", np.ascontiguousarray(dense, np.float32))
    if method == "fp8":
        settings = settings | {"modules_to_not_convert": kept}
    elif method == "auto-round":
        settings = settings | {"extra_config": {module: {"bits": 16} for module in kept}}
    elif method == "gptq":
        settings = settings | {"dynamic": {f"-:{re.escape(module)}$": {} for module in kept}}
    elif method == "awq":
        settings = settings | {"modules_to_not_convert": ["self_attn"]}
    for target, own in ((folder / "packed", tensors), (folder / "twin", twin)):
        shutil.copytree(source, target)
        write_tensors(target / MODEL, own)
    (folder / "packed/config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return folder / "packed", folder / "twin"


@pytest.mark.parametrize("method", METHODS)
def test_packed_experts_are_their_dense_twin(method: str, make_checkpoint: Make, tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "model", 6, **MIXTURES["qwen3_moe"])
    packed, twin = write(source, tmp_path, method, routers_are_named=method not in ("gptq", "auto-round"))
    with Checkpoint.open(packed) as found, Checkpoint.open(twin) as expected:
        for expert in (0, 5):
            for part, shape in (("gate", (32, 64)), ("down", (64, 32))):
                name = f"model.layers.2.mlp.experts.{expert}.{part}_proj.weight"
                weight = found.packed(name, shape)
                assert weight is not None
                np.testing.assert_array_equal(weight.values(), expected.raw(name))
    ours, wanted = (logits(each, [range(3, 40)]) for each in (packed, twin))
    assert np.abs(ours - wanted).max() <= 1e-4 * np.abs(wanted).max()


def _fp8_stacks(golden: GoldenModel, folder: Path, turned: bool, block: int) -> dict[str, np.ndarray]:
    """The golden's checkpoint in `folder`, with stacks of 8-bit floats as published for Qwen3-VL-MoE, or not turned;
    the values that they stand for."""
    random, tensors, values = np.random.default_rng(5), {}, {}
    parts = *(f"{layer}.self_attn" for layer in range(3)), "1.mlp", "0.mlp.gate", "2.mlp.gate"
    kept = ["model.visual", *(f"model.language_model.layers.{part}" for part in parts)]
    for name, given in load_file(golden.path / MODEL).items():
        if ".experts." not in name:
            tensors[name] = StoredTensor("float16", given)
            continue
        codes = random.integers(0, 0x40, given.shape, np.uint8) | random.integers(0, 2, given.shape, np.uint8) << 7
        scales = random.uniform(0.05, 0.2, [given.shape[0], *(-(-size // block) for size in given.shape[1:])])
        scales = scales.astype(np.float32)
        every = np.repeat(np.repeat(scales, block, axis=1), block, axis=2)[:, : given.shape[1], : given.shape[2]]
        values[name] = _e4m3(codes) * every
        codes, scales = (np.ascontiguousarray(each.swapaxes(1, 2) if turned else each) for each in (codes, scales))
        tensors[name], tensors[f"{name}_scale_inv"] = (
            StoredTensor("float8_e4m3", codes),
            StoredTensor("float32", scales),
        )
    settings = {"quant_method": "fp8", "weight_block_size": [block, block], "modules_to_not_convert": kept}
    shutil.copytree(golden.path, folder)
    write_tensors(folder / MODEL, tensors)
    config = json.loads((golden.path / "config.json").read_text()) | {"quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(config))
    golden.path = folder
    return values


def test_stacks_of_8_bit_floats_are_read_as_published_and_as_transformers_writes_them(tmp_path: Path) -> None:
    found = []
    for turned in (True, False):
        golden = GoldenModel("qwen3_vl_moe")
        values = _fp8_stacks(golden, tmp_path / f"{turned}", turned, 8)
        stack, downs = (
            values[f"model.language_model.layers.2.mlp.experts.{each}_proj"] for each in ("gate_up", "down")
        )
        with Checkpoint.open(golden.path) as checkpoint:
            for part, expected in (("gate", stack[5, :24]), ("up", stack[5, 24:]), ("down", downs[5])):
                weight = checkpoint.packed(f"model.layers.2.mlp.experts.5.{part}_proj.weight", expected.shape)
                assert weight is not None
                np.testing.assert_array_equal(weight.values(), expected.astype(np.float16))
        runner = golden.runner(EngineLimits(max_batch=1, prefill_chunk=64, kv_capacity=96))
        runner.start(0, golden.token_ids, 0, SamplingValues(), golden.placed()).wait()
        found.append(runner.logits(0).copy())
    assert_close(*found)


@pytest.mark.parametrize(
    ("module", "packed"),
    [
        ("lm_head", False),
        ("model.layers.1.mlp.down_proj", False),
        ("model.layers.10.mlp.down_proj", True),
        ("model.layers.3.self_attn.q_proj", False),
        ("model.layers.4.self_attn.q_proj", True),
        ("model.layers.4.mlp.gate", False),
        ("model.visual.blocks.0.proj", False),
    ],
)
def test_names_that_stay_dense_are_whole_or_begin_or_end_a_modules_or_are_patterns(module: str, packed: bool) -> None:
    kept = ["lm_head", "model.layers.1", "model.layers.[23].self_attn", "mlp.gate", "model.visual."]
    settings = {"quant_method": "fp8", "weight_block_size": [8, 8], "modules_to_not_convert": kept}
    found = read_quantization(Path("model"), {"quantization_config": settings, "dtype": "float16"})
    assert found is not None
    assert (found.layout((module,)) is not None) == packed


@pytest.mark.parametrize("shape", [(40, 70), (65, 64), (3, 5), (1, 33)])
def test_what_lies_turned_is_copied_in_order(shape: tuple[int, int]) -> None:
    values = np.random.default_rng(3).integers(0, 256, shape[::-1], np.uint8).T
    found = contiguous(values)
    assert found.flags.c_contiguous
    np.testing.assert_array_equal(found, values)


def test_stacks_are_refused_where_a_block_has_gates_and_ups(tmp_path: Path) -> None:
    golden = GoldenModel("qwen3_vl_moe")
    _fp8_stacks(golden, tmp_path / "model", True, 16)
    with pytest.raises(CheckpointError, match=r"experts\.0\.gate_proj\.weight_scale_inv"):
        golden.runner(EngineLimits(max_batch=1, prefill_chunk=64, kv_capacity=96))


def _with_experts(make_checkpoint: Make, folder: Path, is_symmetric: bool) -> tuple[Path, WeightSpec]:
    """A mixture in int4, and the gates and ups of a layer."""
    packed, _ = write_packed(
        make_checkpoint(folder / "model", 6, **MIXTURES["qwen3_moe"]), folder / "packed", folder / "twin"
    )
    if is_symmetric:
        tensors = {name: each for name, each in load_file(packed / MODEL).items() if "zero_point" not in name}
        save_file(tensors, packed / MODEL)
        config = json.loads((packed / "config.json").read_text())
        config["quantization_config"]["config_groups"]["groups"]["weights"]["symmetric"] = True
        (packed / "config.json").write_text(json.dumps(config))
    with Checkpoint.open(packed) as checkpoint:
        specs = decoder_weights(decoder_config(checkpoint.config, checkpoint.generation_config))
    return packed, next(spec for spec in specs if spec.experts and len(spec.parts) > spec.experts)


@pytest.mark.parametrize("is_symmetric", [True, False])
def test_experts_that_are_read_as_one_are_those_that_are_read_one_by_one(
    is_symmetric: bool, make_checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, spec = _with_experts(make_checkpoint, tmp_path, is_symmetric)
    counts, found, read = list[int](), list[Any](), PackQuantized.read

    def counted(self: PackQuantized, tensors: LinearTensors) -> StoredWeight:
        counts[-1] += 1
        return read(self, tensors)

    monkeypatch.setattr(PackQuantized, "read", counted)
    with Checkpoint.open(packed) as checkpoint:
        for _ in range(2):
            counts.append(0)
            found += _prepare(checkpoint, spec, "float16")
            monkeypatch.setattr(PackQuantized, "stacks", lambda self, rows: False)
        assert counts == [1, len(spec.parts)]
        one, other = found
        assert one.layout == other.layout and one.layout.format.zeros != is_symmetric
        np.testing.assert_array_equal(one.tails, other.tails)
        for codes, expected in zip(one.codes, other.codes, strict=True):
            assert codes.shape == expected.shape == spec.parts[0][1]
            assert codes.data.ctypes.data == expected.data.ctypes.data  # where the file is mapped


@pytest.mark.parametrize(
    ("ending", "value", "said"),
    [
        ("scale", np.float16(np.nan), r"experts\.3\.up_proj\.weight_scale' holds nan at \[2, 1\]"),
        ("shape", None, r"experts\.3\.up_proj\.weight_shape' holds \[64, 32\], expected \[32, 64\]"),
        ("scale", np.float32, ""),
        ("zero_point", np.int8(1), r"experts\.3\.up_proj\.weight_zero_point' holds 1 at"),
    ],
)
def test_an_expert_that_is_unlike_is_read_by_itself(
    ending: str, value: Any, said: str, make_checkpoint: Make, tmp_path: Path
) -> None:
    """One that is damaged is named, though all are read as one; one whose scales have another dtype is not damaged."""
    packed, spec = _with_experts(make_checkpoint, tmp_path, True)
    tensors = load_file(packed / MODEL)
    name = next(name for name, _ in spec.parts if ".3.up_proj" in name) + f"_{ending}"
    if value is None:
        tensors[name] = tensors[name][::-1].copy()
    elif isinstance(value, type):
        tensors[name] = tensors[name].astype(value)
    else:
        tensors.setdefault(name, np.zeros((32, 2), np.int8))[2, 1] = value
    save_file(tensors, packed / MODEL)
    with Checkpoint.open(packed) as checkpoint:
        if said:
            with pytest.raises(CheckpointError, match=said):
                _prepare(checkpoint, spec, "float16")
        else:
            with pytest.raises(EngineError, match="multiplied as one layer"):
                _prepare(checkpoint, spec, "float16")


def test_damaged_experts_are_named(make_checkpoint: Make, tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "model", 6, **MIXTURES["qwen3_moe"])
    packed, _ = write(source, tmp_path, "mxfp4", routers_are_named=True)
    path = packed / "config.json"
    config = json.loads(path.read_text())
    name = "model.layers.2.mlp.experts.5.down_proj"
    with Checkpoint.open(packed) as checkpoint:
        place = checkpoint.info(f"{name}.weight_scale").offset
    with (packed / MODEL).open("r+b") as file:
        file.seek(place + 7)
        file.write(b"\xff")
    with (
        Checkpoint.open(packed) as checkpoint,
        pytest.raises(CheckpointError, match=r"weight_scale' holds 255 at \[7, 0"),
    ):
        checkpoint.stored(f"{name}.weight", (64, 32))
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = 16
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="'group_size' is 16, expected 32"):
        Checkpoint.open(packed)
