"""Adapters for the tiny checkpoints, and engines that take them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.building.inputs import read_decoder_config
from edgellm.engines.model.config import DecoderConfig
from edgellm.engines.model.limits import EngineLimits


@pytest.fixture(scope="session")
def tiny_config(tiny_checkpoint: Path) -> DecoderConfig:
    """The dimensions of `tiny_checkpoint`."""
    return read_decoder_config(tiny_checkpoint)


@pytest.fixture(scope="session")
def tiny_adapters(
    tiny_config: DecoderConfig, make_adapter: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Three adapters for `tiny_checkpoint`; tests that change files copy them first."""
    folder = tmp_path_factory.mktemp("adapters")
    return {
        "wide": make_adapter(folder / "wide", tiny_config, 1, 12, dtype=np.float16),
        "attention": make_adapter(folder / "attention", tiny_config, 2, 3, ("q_proj", "v_proj")),
        "mlp": make_adapter(folder / "mlp", tiny_config, 3, 4, ("up_proj", "down_proj"), use_rslora=True),
    }


@pytest.fixture(scope="session")
def tiny_lora_engines(
    tiny_checkpoint: Path, tiny_adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """An engine directory without plans: three adapters, of which two fit at once; three sequences."""
    target = tmp_path_factory.mktemp("engines") / "tiny_lora"
    limits = EngineLimits(3, 16, 96, max_lora_rank=12, lora_slots=2)
    build_engine_directory(tiny_checkpoint, target, limits, [], adapters=tiny_adapters)
    return target
