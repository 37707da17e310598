"""Random adapters in PEFT's layout for the tiny checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from edgellm.engines.build_inputs import read_decoder_config
from edgellm.engines.builder import build_engine_directory
from edgellm.engines.decoder import decoder_weights
from edgellm.engines.decoder_config import DecoderConfig, EngineLimits
from edgellm.engines.lora_weights import adapted_projections

ALL_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    directory: Path,
    config: DecoderConfig,
    seed: int = 0,
    rank: int = 4,
    targets: Sequence[str] = ALL_TARGETS,
    dtype: type = np.float32,
    **settings: Any,
) -> Path:
    """An adapter with random matrices, of one rank, for every layer."""
    random, tensors = np.random.default_rng(seed + 500), {}
    for each in adapted_projections(decoder_weights(config)):
        for module, rows in each.modules:
            if module.rsplit(".", 1)[-1] in targets:
                name = f"base_model.model.{module}.lora"
                tensors[f"{name}_A.weight"] = (random.standard_normal((rank, each.inputs)) * 0.2).astype(dtype)
                tensors[f"{name}_B.weight"] = (random.standard_normal((rows, rank)) * 0.2).astype(dtype)
    directory.mkdir(parents=True)
    values = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(targets)} | settings
    (directory / "adapter_config.json").write_text(json.dumps(values))
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


@pytest.fixture(scope="session")
def make_adapter() -> Callable[..., Path]:
    """`write_adapter`: (directory, config, seed, rank, targets, dtype, **settings) to the directory."""
    return write_adapter


@pytest.fixture(scope="session")
def tiny_config(tiny_checkpoint: Path) -> DecoderConfig:
    """The dimensions of `tiny_checkpoint`."""
    return read_decoder_config(tiny_checkpoint)


@pytest.fixture(scope="session")
def tiny_adapters(tiny_config: DecoderConfig, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three adapters for `tiny_checkpoint`; tests that change files copy them first."""
    folder = tmp_path_factory.mktemp("adapters")
    return {
        "wide": write_adapter(folder / "wide", tiny_config, 1, 12, dtype=np.float16),
        "attention": write_adapter(folder / "attention", tiny_config, 2, 3, ("q_proj", "v_proj")),
        "mlp": write_adapter(folder / "mlp", tiny_config, 3, 4, ("up_proj", "down_proj"), use_rslora=True),
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
