"""The golden embedding models, built, and what transformers and sentence-transformers make of texts with them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from golden_files import golden_folder
from safetensors.numpy import load_file

from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.model.limits import EngineLimits

#: What float32 sums in another order differ by, of vectors of length 1.
TOLERANCE = 2e-5


class EmbeddingModel(NamedTuple):
    """A golden checkpoint, the engine directory of it, the texts and what is expected."""

    checkpoint: Path
    engines: Path
    texts: list[str]
    expected: dict[str, np.ndarray]


def normalised(vectors: np.ndarray) -> np.ndarray:
    """Vectors [N, D] of length 1."""
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@pytest.fixture(scope="session")
def embedding_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], EmbeddingModel]:
    """A golden model: "published", or "newer", the same weights with the files that are written now. Texts are cut into
    chunks of 32 tokens."""
    made: dict[str, EmbeddingModel] = {}

    def model(name: str) -> EmbeddingModel:
        if name not in made:
            folder = tmp_path_factory.mktemp("embedding")
            checkpoint, engines = folder / "checkpoint", folder / name
            shutil.copytree(golden_folder("embedding") / "published", checkpoint)
            shutil.copytree(golden_folder("embedding") / name, checkpoint, dirs_exist_ok=True)
            build_engine_directory(checkpoint, engines, EngineLimits(2, 32, 160), [])
            texts: Any = json.loads((checkpoint / "texts.json").read_text())
            made[name] = EmbeddingModel(checkpoint, engines, texts, load_file(checkpoint / "expected.safetensors"))
        return made[name]

    return model
