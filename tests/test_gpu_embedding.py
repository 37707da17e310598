"""Embeddings on a GPU: those of NumPy, and the same bits whatever was computed before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from embedding_models import EmbeddingModel

from edgellm import LLM
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.model.limits import EngineLimits

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 4e-3), ("bfloat16", 3e-2)])
def test_vectors_are_those_of_numpy_and_depend_on_nothing_else(
    embedding_model: Callable[[str], EmbeddingModel], tmp_path: Path, dtype: str, tolerance: float
) -> None:
    model = embedding_model("published")
    build_engine_directory(model.checkpoint, tmp_path / "robot", EngineLimits(2, 32, 160), [], dtype=dtype)
    ids = model.expected["token_ids"].tolist()
    texts = [*model.texts, *(ids[:length] for length in (1, 16, 17, 33, 70))]
    with LLM(tmp_path / "robot", backend="numpy") as llm:
        expected = llm.embed(texts)
    with LLM(tmp_path / "robot", backend="tensorrt") as llm:
        found = llm.embed(texts)
        again = llm.embed(texts[::-1])[::-1]
        assert llm.metrics()["embedding"]["texts"] == 2 * len(texts)
    np.testing.assert_allclose(found, expected, atol=tolerance)
    assert np.array_equal(found, again)
