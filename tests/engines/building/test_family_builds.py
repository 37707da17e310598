"""Directories of every family, and the networks of those whose layers are not Llama's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_families import FAMILIES

from edgellm.engines.backends.platform import find_tensorrt
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.building.inputs import read_decoder_config
from edgellm.engines.building.plans import build_plan
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.model.config import EngineLimits, EngineShape


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
