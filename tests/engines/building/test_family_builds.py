"""Directories of every family, and the networks of those whose layers are not Llama's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_families import FAMILIES, PROMPT

from edgellm.engines.backends.platform import find_tensorrt
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.building.inputs import read_decoder_config
from edgellm.engines.building.plans import build_plan
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.model.config import EngineLimits, EngineShape
from edgellm.engines.runners.comparison import greedy_tokens, open_runner


@pytest.mark.parametrize("family", FAMILIES)
def test_a_directory_keeps_what_was_read(family: str, tmp_path: Path, make_checkpoint: Callable[..., Path]) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint", 1, **FAMILIES[family])
    build_engine_directory(checkpoint, tmp_path / "engines", EngineLimits(1, 16, 96), [])
    assert EngineDirectory.open(tmp_path / "engines").config == read_decoder_config(checkpoint)


@pytest.mark.parametrize("family", ["phi3", "granite", "granite_untied", "smollm3", "gemma"])
def test_tensorrt_builds_what_a_family_varies(
    family: str, tmp_path: Path, make_checkpoint: Callable[..., Path]
) -> None:
    library = find_tensorrt()
    if library is None or library.flavour != "rtx":
        pytest.skip("TensorRT-RTX, which builds without a GPU, is not installed: pip install '.[test]'")
    config = read_decoder_config(make_checkpoint(tmp_path, 1, **FAMILIES[family]))
    assert build_plan(config, EngineShape("prefill", 1, 32, 96, 128), "float16", "composed", "sm_86")


def test_mistral_3_is_built_without_its_vision_encoder(tmp_path: Path, make_checkpoint: Callable[..., Path]) -> None:
    text = FAMILIES["ministral3"] | {"tie_word_embeddings": True}
    checkpoint = make_checkpoint(tmp_path / "checkpoint", 1, **text)
    text = json.loads((checkpoint / "config.json").read_text())
    whole = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "text_config": text}
    (checkpoint / "config.json").write_text(json.dumps(whole | {"vision_config": {"model_type": "pixtral"}}))
    tensors = load_file(checkpoint / "model.safetensors")
    named = {f"language_model.{name}": values for name, values in tensors.items()}
    encoder = {"vision_tower.patch_conv.weight": np.zeros((4, 3, 2, 2), np.float16)}
    save_file(named | encoder, checkpoint / "model.safetensors")
    report = build_engine_directory(checkpoint, tmp_path / "engines", EngineLimits(1, 16, 96), [])
    assert "The vision encoder of this model is not supported: it is served without images." in report.notes
    directory = EngineDirectory.open(tmp_path / "engines")
    assert (directory.vision, directory.config.image_token_id, directory.config.family) == (None, None, "mistral3")
    with open_runner("numpy", directory) as runner:
        assert len(greedy_tokens(runner, PROMPT, 4)) == 4
