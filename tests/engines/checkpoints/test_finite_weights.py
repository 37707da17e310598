"""Models, adapters and files with infinities or NaN: what is refused, what is remembered, what is not looked at."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from checkpoint_files import entry, file_bytes
from checkpoint_tensors import read_tensor
from command_line import Edgellm
from fixed_shape_backend import host_view
from packed_checkpoints import write_packed
from safetensors.numpy import load_file, save_file
from synthetic_images import synthetic_image
from tiny_families import MIXTURES
from tiny_multimodal import FAMILIES

from edgellm import LLM, AdapterError, EdgeLLMError, SamplingParams
from edgellm.engines.backends.cuda_backend import CudaBackend
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.building.inputs import read_decoder_config
from edgellm.engines.building.needed_kernels import AbsentModule
from edgellm.engines.checkpoints import weights as weights_module
from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.checkpoints.weights import FiniteCheck, load_numpy_weights
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.errors import CheckpointError
from edgellm.engines.families import decoder_config
from edgellm.engines.formats.digests import SMALL_FILE_BYTES, current_digest
from edgellm.engines.model.config import WeightSpec
from edgellm.engines.model.decoder import decoder_weights
from edgellm.engines.model.limits import EngineLimits
from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.bfloat16 import bfloat16_bits
from edgellm.kernels.gpu import absent_gpu
from edgellm.kernels.sampling.twin import NumpySampling
from edgellm.opened_model import SHIPPED_MODEL

LIMITS = EngineLimits(1, 16, 96, draft_top_k=4, draft_steps=3, verify_tree_size=12, image_rows=(64,))
SHORT = SamplingParams(max_tokens=4)
SPECS = [
    WeightSpec("qkv", (7, 3), (("q", (4, 3)), ("k", (2, 3)), ("v", (1, 3)))),
    WeightSpec("bias", (7,), (("q.bias", (4,)), ("k.bias", (2,)), ("v.bias", (1,)))),
]
NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def damage(file: Path, name: str, place: tuple[int, ...], value: float) -> None:
    """Put one value into a tensor of a safetensors file."""
    tensors = load_file(file)
    tensors[name] = tensors[name].copy()
    tensors[name][place] = value
    save_file(tensors, file)


def refusal(action: Callable[[], object]) -> str:
    with pytest.raises(EdgeLLMError) as caught:
        action()
    return str(caught.value)


# --- models, through the API and the command line -------------------------------------------------------------------


@pytest.fixture
def sources(make_checkpoint: Callable[..., Path], make_draft: Callable[..., Path], tmp_path: Path) -> tuple[Path, Path]:
    """Checkpoints of a model that takes images and of a draft for it, to be changed."""
    return make_checkpoint(tmp_path / "base", 3, **FAMILIES["qwen3_vl"]), make_draft(tmp_path / "draft")


def ask(engines: Path) -> None:
    with LLM(engines, backend="numpy") as llm:
        shown = [{"type": "image", "image": synthetic_image(24, 20)}, {"type": "text", "text": "What is it?"}]
        llm.chat([{"role": "user", "content": shown}], SHORT)


@pytest.mark.parametrize(
    ("part", "name", "place", "value", "words"),
    [
        ("base", "model.layers.2.mlp.down_proj.weight", (63, 127), np.nan, "is nan at [63, 127]"),
        ("base", "model.embed_tokens.weight", (319, 0), -np.inf, "is -inf at [319, 0]"),
        ("base", "model.norm.weight", (5,), np.inf, "is inf at [5]"),
        ("draft", "fc.weight", (0, 127), np.nan, "is nan at [0, 127]"),
        ("draft", "norm.weight", (63,), np.inf, "is inf at [63]"),
        ("base", "model.visual.blocks.1.mlp.linear_fc2.bias", (31,), np.nan, "is nan at [31]"),
        ("base", "model.visual.patch_embed.proj.weight", (31, 2, 1, 3, 3), np.inf, "is inf at [31, 2, 1, 3, 3]"),
        ("base", "model.visual.pos_embed.weight", (15, 31), np.nan, "is nan at [15, 31]"),
    ],
)
def test_a_model_with_one_bad_value_is_refused(
    sources: tuple[Path, Path], tmp_path: Path, part: str, name: str, place: tuple[int, ...], value: float, words: str
) -> None:
    base, draft = sources
    file = (base if part == "base" else draft) / "model.safetensors"
    damage(file, name, place, value)
    build_engine_directory(base, tmp_path / "engines", LIMITS, [], draft=draft)
    message = refusal(lambda: ask(tmp_path / "engines"))
    folder = tmp_path / "engines" / ("draft" if part == "draft" else ".")
    assert message.startswith(f"{folder / 'model.safetensors'}: tensor {name!r} (float16 [")
    assert words in message and "Copy the checkpoint anew" in message


def test_a_tensor_that_nothing_reads_may_hold_anything(tiny_checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_checkpoint, tmp_path / "base")
    file = tmp_path / "base" / "model.safetensors"
    unread = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.full(8, np.nan, np.float32)}
    save_file(load_file(file) | unread, file)
    build_engine_directory(tmp_path / "base", tmp_path / "engines", EngineLimits(1, 16, 96), [])
    with LLM(tmp_path / "engines", backend="numpy") as llm:
        llm.generate("a", SHORT)


@pytest.mark.parametrize(("matrix", "place"), [("A", (0, 3)), ("B", (63, 3))])
def test_an_adapter_with_one_bad_value_is_refused(
    tiny_checkpoint: Path, make_adapter: Callable[..., Path], tmp_path: Path, matrix: str, place: tuple[int, int]
) -> None:
    config = read_decoder_config(tiny_checkpoint)
    adapter = make_adapter(tmp_path / "adapter", config, dtype=np.float16)
    limits = EngineLimits(1, 16, 96, max_lora_rank=4, lora_slots=1)
    build_engine_directory(tiny_checkpoint, tmp_path / "engines", limits, [])
    module = "model.layers.1.self_attn.q_proj"
    damage(adapter / "adapter_model.safetensors", f"base_model.model.{module}.lora_{matrix}.weight", place, np.inf)
    expected = f"not finite: {module}.lora_{matrix} is inf at {list(place)}"
    with pytest.raises(AdapterError) as caught:
        LLM(tmp_path / "engines", backend="numpy", adapters={"bad": adapter})
    assert expected in str(caught.value)
    assert expected in refusal(
        lambda: build_engine_directory(tiny_checkpoint, tmp_path / "own", limits, [], adapters={"bad": adapter})
    )


def test_a_scale_that_makes_finite_values_infinite_is_refused(
    tiny_checkpoint: Path, make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    config = read_decoder_config(tiny_checkpoint)
    adapter = make_adapter(tmp_path / "adapter", config, lora_alpha=9e29)
    name = "base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"
    damage(adapter / "adapter_model.safetensors", name, (9, 1), -5e9)
    limits = EngineLimits(1, 16, 96, max_lora_rank=4, lora_slots=1)
    build_engine_directory(tiny_checkpoint, tmp_path / "engines", limits, [])
    with pytest.raises(AdapterError) as caught:
        LLM(tmp_path / "engines", backend="numpy", adapters={"bad": adapter})
    assert "model.layers.0.mlp.gate_up_proj.lora_b is -inf at [9, 137]" in str(caught.value)
    assert "check lora_alpha" in str(caught.value)


@pytest.fixture
def shipped(tmp_path: Path) -> Callable[[str, str, float], Path]:
    """Makes an engine directory of the shipped model with the last value of a tensor of one part changed."""

    def build(part: str, name: str, value: float) -> Path:
        shutil.copytree(SHIPPED_MODEL / part, tmp_path / "changed")
        file = tmp_path / "changed" / "model.safetensors"
        damage(file, name, tuple(np.array(load_file(file)[name].shape) - 1), value)
        chosen = {each: SHIPPED_MODEL / each for each in ("draft", "vision") if each != part} | (
            {part: tmp_path / "changed"} if part else {}
        )
        base = SHIPPED_MODEL if part else tmp_path / "changed"
        build_engine_directory(base, tmp_path / "engines", None, [], weights="link", **chosen)
        return tmp_path / "engines"

    return build


@pytest.mark.parametrize(
    ("part", "name", "value", "words"),
    [
        ("", "model.layers.7.self_attn.v_proj.weight", np.nan, "is nan at [127, 319]"),
        ("draft", "midlayer.self_attn.v_proj.weight", np.inf, "is inf at [127, 639]"),
        ("vision", "model.vision_tower.encoder.layers.6.self_attn.v_proj.weight", -np.inf, "is -inf at [191, 191]"),
    ],
)
def test_the_command_names_file_tensor_and_place(
    edgellm: Edgellm, shipped: Callable[..., Path], part: str, name: str, value: float, words: str
) -> None:
    engines = shipped(part, name, value)
    image = ["--image", SHIPPED_MODEL / "scenes" / "toys.png"] if part == "vision" else []
    code, out, err = edgellm("generate", "-m", engines, "--backend", "numpy", "--max-tokens", 4, *image, "Hello!")
    assert (code, out) == (1, "")
    assert f"{engines / part / 'model.safetensors'}: tensor {name!r} (float16 [" in err
    assert words in err and "Traceback" not in err


# --- single tensors ---------------------------------------------------------------------------------------------------


def write_shards(folder: Path, dtype: str, bad: str, place: int, value: float) -> Checkpoint:
    """`SPECS` in two files, one value changed."""
    random, shards = np.random.default_rng(0), {"a.safetensors": ["k", "q.bias"], "b.safetensors": []}
    shards["b.safetensors"] = [name for spec in SPECS for name, _ in spec.parts if name not in shards["a.safetensors"]]
    shapes = dict(part for spec in SPECS for part in spec.parts)
    for shard, names in shards.items():
        header, data = {}, b""
        for name in names:
            values = random.standard_normal(shapes[name]).astype(np.float32)
            if name == bad:
                values.reshape(-1)[place] = value
            stored = bfloat16_bits(values) if dtype == "bfloat16" else values.astype(dtype)
            header[name] = entry(NAMES[dtype], list(shapes[name]), len(data), len(data) + stored.nbytes)
            data += stored.tobytes()
        (folder / shard).write_bytes(file_bytes(header, data))
    index = {"weight_map": {name: shard for shard, names in shards.items() for name in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text("{}")
    return Checkpoint.open(folder)


def uploaded_weights(checkpoint: Checkpoint, specs: list[WeightSpec], dtype: str) -> tuple[dict, list[int]]:
    """What the GPU's backend loads, and how many results it reads, with a device in host memory and the twin of the
    kernel: all of it but the device's own part."""
    backend, read = object.__new__(CudaBackend), []

    def zeros(shape: tuple[int, ...], kind: str) -> DeviceArray:
        values = np.zeros(shape, np.uint16 if kind == "bfloat16" else kind)
        return DeviceArray(values.ctypes.data, tuple(shape), kind, values)

    def view(array: DeviceArray) -> np.ndarray:
        return host_view(DeviceArray(array.pointer, array.shape, array.dtype.replace("bfloat16", "uint16")))

    class Kernels:
        def first_not_finite(self, values: DeviceArray, index: DeviceArray) -> None:
            NumpySampling().first_not_finite(view(values), view(index))

    backend.compute_dtype, backend.kernels = dtype, Kernels()
    backend._loaded, backend._engines = {}, []  # no engine waits for its kernels
    backend._module, backend._directory = AbsentModule(absent_gpu("sm_90", 1, 1)), SimpleNamespace(models={})
    backend.empty = backend.zeros = lambda shape, kind: zeros(shape, dtype if kind == "compute" else kind)
    backend.part = lambda memory, offset, shape, kind: DeviceArray(memory.pointer + offset, shape, kind, memory)
    backend.upload = lambda array, values: np.copyto(view(array), values)
    backend.download = lambda array: read.append(array.size) or view(array)
    # Copies: a view does not keep the memory, which goes with the arrays.
    return {name: view(array).copy() for name, array in backend.load_weights(checkpoint, specs).items()}, read


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize(
    ("bad", "place", "shard", "shown"),
    [("v", 2, "b", "[0, 2]"), ("q", 7, "b", "[2, 1]"), ("v.bias", 0, "b", "[0]"), ("k", 0, "a", "[0, 0]")],
)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_one_bad_value_is_found_in_every_format_and_shard(
    tmp_path: Path, dtype: str, bad: str, place: int, shard: str, shown: str, value: float
) -> None:
    with write_shards(tmp_path, dtype, bad, place, value) as checkpoint:
        for load in (load_numpy_weights, lambda *arguments: uploaded_weights(*arguments, dtype)):
            with pytest.raises(CheckpointError) as caught:
                load(checkpoint, SPECS)
            found = str(caught.value)
            assert found.startswith(f"{tmp_path / shard}.safetensors: tensor {bad!r} ({dtype} [")
            assert f"is {value} at {shown}, expected finite numbers" in found


@pytest.mark.parametrize("stored", NAMES)
@pytest.mark.parametrize("dtype", NAMES)
def test_a_device_is_asked_once_for_all_tensors(tmp_path: Path, stored: str, dtype: str) -> None:
    with write_shards(tmp_path, stored, "none", 0, 0) as checkpoint:
        found, read = uploaded_weights(checkpoint, SPECS, dtype)
        assert read == [6]
        for spec in SPECS:
            expected = np.concatenate([read_tensor(checkpoint, name, dtype) for name, _ in spec.parts])
            np.testing.assert_array_equal(found[spec.name], expected)


# --- what is remembered -----------------------------------------------------------------------------------------------

LARGE = [WeightSpec("w", (3, SMALL_FILE_BYTES // 4), (("w", (3, SMALL_FILE_BYTES // 4)),))]
LARGER = [*LARGE, WeightSpec("other", (2,), (("other", (2,)),))]


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """The sizes of the tensors that are looked at; nothing is remembered from before."""
    sizes: list[int] = []
    encode = weights_module.first_not_finite
    monkeypatch.setattr(weights_module, "first_not_finite", lambda values: sizes.append(values.size) or encode(values))
    monkeypatch.setenv("EDGELLM_CACHE_DIR", str(tmp_path / "cache"))
    return sizes


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A checkpoint whose file is large enough for its digest to be remembered."""
    tensors = {"w": np.ones(LARGE[0].shape, np.float16), "other": np.ones(2, np.float16)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def loads(folder: Path, looked: list[int], specs: list[WeightSpec] = LARGE, hashed: bool = True) -> int:
    """How many tensors a start looks at."""
    looked.clear()
    if hashed:
        current_digest(folder / "model.safetensors")
    with Checkpoint.open(folder) as checkpoint:
        load_numpy_weights(checkpoint, specs)
    return len(looked)


def test_a_second_start_looks_at_nothing(large: Path, looked: list[int]) -> None:
    assert [loads(large, looked) for _ in range(3)] == [1, 0, 0]


def test_what_other_models_in_the_file_read_is_remembered_apart(large: Path, looked: list[int]) -> None:
    assert [loads(large, looked, specs) for specs in (LARGE, LARGER, LARGE, LARGER)] == [1, 2, 0, 0]


def test_a_file_without_a_remembered_digest_is_looked_at_every_time(large: Path, looked: list[int]) -> None:
    assert [loads(large, looked, hashed=False) for _ in range(2)] == [1, 1]


def test_a_changed_file_is_looked_at_again(large: Path, looked: list[int]) -> None:
    assert loads(large, looked) == 1
    damage(large / "model.safetensors", "w", (2, 77), np.nan)
    for _ in range(2):  # what was found bad is not remembered as good
        with pytest.raises(CheckpointError, match=r"'w' .*is nan at \[2, 77\]"):
            loads(large, looked)
    damage(large / "model.safetensors", "w", (2, 77), 1)
    assert [loads(large, looked) for _ in range(2)] == [1, 0]


def test_a_whole_verification_forgets_nothing(large: Path, looked: list[int]) -> None:
    assert loads(large, looked) == 1
    current_digest(large / "model.safetensors", trust_memory=False)
    assert loads(large, looked) == 0
    os.utime(large / "model.safetensors")  # the content is hashed again and found to be the same
    assert loads(large, looked) == 0


def test_a_file_that_is_replaced_while_it_is_loaded_is_not_called_good(large: Path, looked: list[int]) -> None:
    current_digest(large / "model.safetensors")
    with Checkpoint.open(large) as checkpoint:
        check = FiniteCheck(checkpoint, LARGE)
        bad = large / "bad.safetensors"
        save_file({"w": np.full(LARGE[0].shape, np.nan, np.float16), "other": np.ones(2, np.float16)}, bad)
        bad.replace(large / "model.safetensors")
        current_digest(large / "model.safetensors")
        check.conclude({"w": -1})
    with pytest.raises(CheckpointError, match="is nan at"):
        loads(large, looked)


def test_packed_parts_are_not_looked_at_by_a_name_that_no_tensor_has(
    make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Nor where the weight becomes dense when it is loaded, as the gate of an expert of all tokens does."""
    source = make_checkpoint(tmp_path / "source", 4, **MIXTURES["qwen3_5_moe"])
    packed, _ = write_packed(source, tmp_path / "packed", tmp_path / "twin")
    specs = decoder_weights(read_decoder_config(packed))
    specs = [spec for spec in specs if spec.shape[0] == 1 or spec.name.endswith("norm.weight")]
    with Checkpoint.open(packed) as checkpoint:
        check = FiniteCheck(checkpoint, specs)
        due = {name: check.is_due(name) for spec in specs for name, _ in spec.parts}
    assert due == {name: not name.endswith(".shared_expert_gate.weight") for name in due}
    assert set(due.values()) == {True, False}


def test_a_cache_that_cannot_be_written_costs_only_time(large: Path, looked: list[int]) -> None:
    (large / "cache").write_text("a file where a folder should be")
    assert [loads(large, looked) for _ in range(2)] == [1, 1]


def test_the_shipped_model_is_looked_at_once(looked: list[int]) -> None:
    for expected in (True, False):
        looked.clear()
        with LLM(SHIPPED_MODEL, backend="numpy"):
            assert bool(looked) == expected


# --- a GPU ------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_gpu_finds_what_numpy_finds(tmp_path: Path, make_checkpoint: Callable[..., Path], dtype: str) -> None:
    """Through the backend itself: the good model is loaded, of the bad one the last value of a tensor is named."""
    base = make_checkpoint(tmp_path / "base", 3)
    for folder in ("good", "bad"):
        if folder == "bad":
            damage(base / "model.safetensors", "model.layers.1.self_attn.v_proj.weight", (31, 63), np.nan)
        build_engine_directory(base, tmp_path / folder, EngineLimits(1, 16, 96), [], dtype=dtype)
        directory = EngineDirectory.open(tmp_path / folder)
        backend: Any = CudaBackend(directory)
        try:
            with directory.checkpoint() as checkpoint:
                specs = decoder_weights(decoder_config(checkpoint.config, checkpoint.generation_config))
                if folder == "good":
                    assert set(backend.load_weights(checkpoint, specs)) == {spec.name for spec in specs}
                else:
                    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.v_proj.* is nan at \[31, 63\]"):
                        backend.load_weights(checkpoint, specs)
        finally:
            backend.close()
