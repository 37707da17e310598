"""Tiny multimodal models with random weights, built once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_multimodal import FAMILIES, IN_ROWS, WHOLE_IMAGES, WHOLE_PROMPTS

from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.model.limits import EngineLimits

LIMITS = EngineLimits(2, 16, 192, draft_top_k=4, draft_steps=3, verify_tree_size=12)
IMAGE_ROWS = {"llava": (9,), "paligemma": (9,)}


@pytest.fixture(scope="session")
def multimodal_engines(
    make_checkpoint: Callable[..., Path], make_draft: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """The engine directory of a tiny model of a family that takes images, with a draft head."""
    built: dict[str, Path] = {}

    def build(family: str) -> Path:
        if family not in built:
            folder = tmp_path_factory.mktemp(family)
            checkpoint = make_checkpoint(
                folder / "checkpoint", 3, **(FAMILIES | WHOLE_IMAGES | WHOLE_PROMPTS | IN_ROWS)[family]
            )
            draft = make_draft(folder / "draft")
            limits = replace(LIMITS, image_rows=IMAGE_ROWS.get(family, (64,)))
            limits = replace(limits, prefill_chunk=64) if family in WHOLE_PROMPTS else limits
            dtype = "bfloat16" if family in WHOLE_IMAGES else None
            build_engine_directory(checkpoint, folder / "engines", limits, [], draft=draft, dtype=dtype)
            built[family] = folder / "engines"
        return built[family]

    return build
