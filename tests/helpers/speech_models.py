"""The golden model that hears, built, and what transformers computes with it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
from golden_files import golden_folder
from safetensors.numpy import load_file

from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.model.limits import EngineLimits
from edgellm.media.audio import AudioEncoder

#: What float32 sums in another order differ by, of numbers around 1.
TOLERANCE = 1e-4
CHECKPOINT = golden_folder("speech") / "qwen3_asr"


@cache
def expected_speech() -> dict[str, np.ndarray]:
    """The tensors that `tools/goldens/make_speech.py` describes."""
    return load_file(CHECKPOINT / "expected.safetensors")


def encoded_frames(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets the frames of each window that is encoded from now on."""
    frames: list[int] = []
    encode = AudioEncoder._encoded
    monkeypatch.setattr(
        AudioEncoder, "_encoded", lambda self, *given: frames.append(given[0].shape[1]) or encode(self, *given)
    )
    return frames


@pytest.fixture(scope="session")
def speech_engines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The engine directory of the golden model, whose prompts are cut into chunks of 32 tokens."""
    path = tmp_path_factory.mktemp("speech") / "qwen3_asr"
    build_engine_directory(CHECKPOINT, path, EngineLimits(2, 32, 400), [])
    return path
