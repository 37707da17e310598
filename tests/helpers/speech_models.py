"""The golden models that hear, built, and what transformers computes with them."""

from __future__ import annotations

from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from golden_files import golden_folder
from safetensors.numpy import load_file

from edgellm.engines.backends.numpy_backend import NumpyBackend
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.families.audio_encoders import read_audio
from edgellm.engines.model.audio import AudioConfig
from edgellm.engines.model.limits import EngineLimits
from edgellm.media.audio import AudioEncoder
from edgellm.multimodal.log_mel import MelConfig, PreparedAudio, read_mel_config
from edgellm.multimodal.sound_features import SoundFeatures

#: What float32 sums in another order differ by, of numbers around 1.
TOLERANCE = 1e-4
CHECKPOINTS = {
    name: golden_folder("speech") / name
    for name in ("qwen3_asr", "voxtral", "qwen2_audio", "gemma4", "voxtral_realtime")
}
CHECKPOINT = CHECKPOINTS["qwen3_asr"]


@cache
def expected_speech(name: str = "qwen3_asr") -> dict[str, np.ndarray]:
    """The tensors that `tools/goldens/make_speech.py` describes."""
    return load_file(CHECKPOINTS[name] / "expected.safetensors")


def encoded_frames(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets the frames of each run that is encoded from now on."""
    frames: list[int] = []
    encode = AudioEncoder._encoded

    def counting(self: AudioEncoder, piece: PreparedAudio, first: int, digests: Any, place: int) -> Any:
        lead = max(0, first - self.config.lead_windows)
        frames.append(sum(part.count for part in piece.windows(lead, first + len(digests))))
        return encode(self, piece, first, digests, place)

    monkeypatch.setattr(AudioEncoder, "_encoded", counting)
    return frames


def mel_of(name: str) -> tuple[MelConfig, AudioConfig]:
    """How the golden model of that name measures sound, and its encoder."""
    with closing(Checkpoint.open(CHECKPOINTS[name])) as checkpoint:
        config = read_audio(checkpoint)
    return read_mel_config(CHECKPOINTS[name], config), config


def features_of(piece: PreparedAudio, mel: MelConfig, config: AudioConfig) -> np.ndarray:
    """[bins, F] float32 of all windows, as NumPy measures them."""
    backend: Any = NumpyBackend(cast(Any, None))
    measuring, size = SoundFeatures(backend, mel, config), config.window_frames
    found = []
    for number in range(len(piece.frames)):
        frames = sum(part.count for part in piece.windows(number, number + 1))
        target = np.full((-(-size // config.group_frames), config.mel_bins, config.group_frames), np.nan, np.float32)
        measuring.write(piece, number, number + 1, target)
        found.append(target.swapaxes(1, 2).reshape(-1, config.mel_bins)[:frames].T)
    return np.concatenate(found, axis=1)


@pytest.fixture(scope="session")
def speech_engines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The engine directory of the golden model, whose prompts are cut into chunks of 32 tokens."""
    return _built("qwen3_asr", tmp_path_factory)


@pytest.fixture(scope="session")
def voxtral_engines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of Voxtral."""
    return _built("voxtral", tmp_path_factory)


@pytest.fixture(scope="session")
def qwen2_audio_engines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of Qwen2-Audio."""
    return _built("qwen2_audio", tmp_path_factory)


@pytest.fixture(scope="session")
def voxtral_realtime_engines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of Voxtral Realtime."""
    return _built("voxtral_realtime", tmp_path_factory)


@pytest.fixture(scope="session")
def gemma4_engines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of Gemma 4, which sees, too."""
    return _built("gemma4", tmp_path_factory, {"max_image_patches": 54})


def _built(name: str, tmp_path_factory: pytest.TempPathFactory, images: dict[str, int] | None = None) -> Path:
    path = tmp_path_factory.mktemp("speech") / name
    limits = {"max_batch": 2, "prefill_chunk": 32, "kv_capacity": 400}
    build_engine_directory(CHECKPOINTS[name], path, EngineLimits(2, 32, 400) if images is None else limits | images, [])
    return path
