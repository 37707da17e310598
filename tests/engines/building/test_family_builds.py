"""Directories of every family, and the networks of those whose layers are not Llama's."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from golden_files import golden_folder
from safetensors.numpy import load_file, save_file
from tiny_families import FAMILIES, PROMPT, WINDOWED

from edgellm.engines.backends.platform import find_tensorrt
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.building.inputs import read_decoder_config
from edgellm.engines.building.plans import build_plan
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.model.limits import EngineLimits, EngineShape
from edgellm.engines.runners.comparison import greedy_tokens, open_runner
from edgellm.opened_model import SHIPPED_MODEL


@pytest.mark.parametrize("family", FAMILIES)
def test_a_directory_keeps_what_was_read(family: str, tmp_path: Path, make_checkpoint: Callable[..., Path]) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint", 1, **FAMILIES[family])
    build_engine_directory(checkpoint, tmp_path / "engines", EngineLimits(1, 16, 96), [])
    assert EngineDirectory.open(tmp_path / "engines").config == read_decoder_config(checkpoint)


@pytest.mark.parametrize("head", ["as-published", "int8"])
def test_published_files_keep_their_bytes(head: str, tmp_path: Path) -> None:
    """Those of the model, its draft, its adapters and its vision encoder, in the checkpoint and in the directory."""
    published, built = tmp_path / "published", tmp_path / "engines"
    shutil.copytree(SHIPPED_MODEL, published, ignore=shutil.ignore_patterns("edgellm.json", "scenes", "*.md", "*.py*"))
    before = digests(published)
    assert {"model.safetensors", "draft/model.safetensors", "lora/json/adapter_model.safetensors"} <= before.keys()
    build_engine_directory(
        published,
        built,
        EngineDirectory.read(SHIPPED_MODEL).limits,
        [],
        draft=published / "draft",
        vision=published / "vision",
        adapters={path.name: path for path in (published / "lora").iterdir()},
        head=head,
    )
    own = {"edgellm.json"} | ({"head.safetensors"} if head != "as-published" else set())
    assert {name: each for name, each in digests(built).items() if name not in own} == before == digests(published)


def digests(folder: Path) -> dict[str, str]:
    """The SHA-256 of every file below a folder, by its name there."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize("family", ["phi3", "granite", "granite_untied", "smollm3", "gemma", "olmo2", "starcoder2"])
def test_tensorrt_builds_what_a_family_varies(
    family: str, tmp_path: Path, make_checkpoint: Callable[..., Path]
) -> None:
    library = find_tensorrt()
    if library is None or library.flavour != "rtx":
        pytest.skip("TensorRT-RTX, which builds without a GPU, is not installed: pip install '.[test]'")
    config = read_decoder_config(make_checkpoint(tmp_path, 1, **FAMILIES[family]))
    assert build_plan(config, EngineShape("prefill", 1, 32, 96, 128), "float16", "composed", "sm_86")


def test_images_of_gemma_4_are_built_beside_an_encoder_of_audio_that_is_not_described(tmp_path: Path) -> None:
    golden, source = golden_folder("tiled") / "gemma4", tmp_path / "checkpoint"
    shutil.copytree(golden, source, ignore=shutil.ignore_patterns("expected.safetensors", "prompt.json", "cuts.json"))
    audio = {f"model.{name}.weight": np.zeros((4, 2), np.float16) for name in ("audio_tower.a", "embed_audio.b")}
    save_file(load_file(source / "model.safetensors") | audio, source / "model.safetensors")
    build_engine_directory(
        source, tmp_path / "engines", {"max_image_patches": 36, "prefill_chunk": 32, "kv_capacity": 128}, [], "bfloat16"
    )
    directory = EngineDirectory.open(tmp_path / "engines")
    assert directory.vision is not None and directory.vision.config.clipped
    assert (directory.limits.image_rows[-1], list(directory.config.media)) == (36, ["image"])


@pytest.mark.parametrize("kind", ["gemma4", "gemma4_unified"])
def test_a_model_is_built_without_encoders_that_are_not_supported(
    kind: str, tmp_path: Path, make_checkpoint: Callable[..., Path]
) -> None:
    """Gemma 4 with what its published files have of layers that attend to others' rows, and 12B."""
    name, text = "Gemma4", WINDOWED["gemma4"] | {"tie_word_embeddings": True}
    if kind == "gemma4_unified":
        name, text["hidden_size_per_layer_input"] = "Gemma4Unified", 0
        text |= {"architectures": ["Gemma4UnifiedForCausalLM"], "model_type": "gemma4_unified_text"}
    checkpoint = make_checkpoint(tmp_path / "checkpoint", 1, **text)
    text = json.loads((checkpoint / "config.json").read_text())
    whole = {"architectures": [f"{name}ForConditionalGeneration"], "model_type": kind, "text_config": text}
    image = 319 if kind == "gemma4" else None  # an encoder that is left out, or is none
    whole |= {"tie_word_embeddings": True, "vision_config": {"model_type": f"{kind}_vision"}, "image_token_id": image}
    (checkpoint / "config.json").write_text(json.dumps(whole))
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["model.layers.3.self_attn.k_proj.weight"] = np.zeros((32, 64), np.float16)
    encoders = {
        f"model.{name}weight": np.zeros((4, 2), np.float16)
        for name in ("audio_tower.a.", "embed_audio.", "embed_vision.")
    }
    named = {name.replace("model.", "model.language_model.", 1): values for name, values in tensors.items()}
    save_file(named | encoders, checkpoint / "model.safetensors")
    report = build_engine_directory(checkpoint, tmp_path / "engines", EngineLimits(1, 16, 96), [], "bfloat16")
    note = "The vision encoder of this model is not supported: it is served without images."
    assert (note in report.notes) == (image is None)
    directory = EngineDirectory.open(tmp_path / "engines")
    assert (directory.vision, directory.config.image_token_id, directory.config.family) == (None, image, kind)
    with open_runner("numpy", directory) as runner:
        assert len(greedy_tokens(runner, PROMPT, 4)) == 4
