"""Log-mel features of sound, Whisper's (Radford et al. 2023) and Gemma 4's, and how a checkpoint wants them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from edgellm.engines.errors import CheckpointError, UnsupportedModelError
from edgellm.engines.formats.strict_formats import as_json, is_integer
from edgellm.engines.model.audio import AudioConfig
from edgellm.multimodal.processor_config import PREPROCESSOR_FILE, PROCESSOR_FILE, processor_values

#: What the published extractor has where the file does not say, and the most that is taken; `min_length` is in samples.
_SIZES = {"sampling_rate": (16000, 192_000), "n_fft": (400, 16384), "hop_length": (160, 16384)}
_SIZES |= {"min_length": (8000, 10_000_000), "feature_size": (128, 4096), "n_window": (50, 4096)}
#: By family.
_EXTRACTORS = {
    "qwen3_asr": "Qwen3ASRFeatureExtractor",
    "voxtral": "WhisperFeatureExtractor",
    "qwen2_audio": "WhisperFeatureExtractor",
    "gemma4": "Gemma4AudioFeatureExtractor",
}
#: Gemma 4's extractor has no other values; null stands for absence.
_GEMMA4: Mapping[str, Any] = {
    **{"sampling_rate": 16000, "frame_length": 320, "frame_length_ms": 20, "hop_length": 160, "hop_length_ms": 10},
    **{"fft_length": 512, "fft_overdrive": False, "preemphasis": 0, "input_scale_factor": 1, "mel_floor": 0.001},
    **{"min_frequency": 0, "max_frequency": 8000, "per_bin_mean": None, "per_bin_stddev": None},
}
#: Mel bands reach up to so many Hz; the lower part of the scale is linear (Slaney 1998).
_HIGHEST, _LINEAR, _LINEAR_MELS, _STEP = 8000.0, 1000.0, 15.0, np.log(6.4) / 27
#: What is quieter than the loudest by more than so much, in powers of ten, counts as that.
_RANGE = 8.0
#: Frames of a block, and how many blocks are kept: 5 minutes of speech that goes on, in 35 MiB.
_BLOCK, _KEPT_BLOCKS = 200, 150


@dataclass(frozen=True)
class MelConfig:
    """How sound becomes features: its rate in Hz; samples of a Fourier transform, between frames, and of the shortest
    sound; mel bands; samples whose next multiple silence fills a sound up to; and samples of a frame where it is
    shorter than the transform, as Gemma 4's, whose features are those of `_magnitudes`."""

    rate: int
    transform: int
    hop: int
    least: int
    bins: int
    step: int = 1
    frame: int = 0

    def filled(self, samples: int) -> int:
        """How many so many samples are with the silence behind them."""
        return -(-max(samples, self.least) // self.step) * self.step


@dataclass(frozen=True, eq=False)
class PreparedAudio:
    """Sound as its encoder takes it: `features` [bins, F] float32 of each window, how many of its `frames` were heard,
    and its digest; and how many `tokens` they stand for."""

    features: tuple[np.ndarray, ...]
    frames: tuple[int, ...]
    digests: tuple[str, ...]
    tokens: int
    kind: str = field(default="audio")

    @property
    def digest(self) -> str:
        """That of all windows."""
        return hashlib.sha256("".join(self.digests).encode()).hexdigest()

    @property
    def held_pixels(self) -> int:
        """Its memory as pixels of three bytes, as that of images is bounded."""
        return sum(each.nbytes for each in self.features) // 3


def read_mel_config(path: Path, config: AudioConfig) -> MelConfig:
    """What the processor's file of a checkpoint asks for. Raises CheckpointError, UnsupportedModelError."""
    places = [(name, key) for name in (PROCESSOR_FILE, PREPROCESSOR_FILE) for key in ("feature_extractor", None)]
    file, values = processor_values(path, places, "sounds")
    extractor = _EXTRACTORS[config.family]
    kind = values.get("feature_extractor_type", extractor)
    if kind != extractor or any(values.get(name) not in (None, 0) for name in ("dither", "padding_value")):
        expected = f"supported is {extractor} without dither and with silence as padding"
        raise UnsupportedModelError(f"{file}: feature_extractor_type is {as_json(kind)}, {expected}")
    if config.family == "gemma4":
        return _gemma4(file, values, config)
    found = {}
    for key, (usual, most) in _SIZES.items():
        value = usual if values.get(key) is None else values[key]
        if not is_integer(value) or not 0 < value <= most:
            raise CheckpointError(f"{file}: {key} is {as_json(value)}, expected a whole number from 1 to {most}")
        found[key] = value
    rate, transform, hop, least, bins, half = found.values()
    step, has_whole_windows = 1, kind == "WhisperFeatureExtractor"
    if has_whole_windows:
        half, least, step = config.chunk_frames // 2, config.window_frames * hop, config.window_frames * hop
    if (bins, 2 * half) != (config.mel_bins, config.chunk_frames) or not hop <= transform <= least:
        raise CheckpointError(
            f"{file}: its sizes do not fit config.json, which has {config.mel_bins} bands and chunks of "
            f"{config.chunk_frames} frames: take both as they were published"
        )
    return MelConfig(rate, transform, hop, least, bins, step)


def _gemma4(file: Path, values: Mapping[str, Any], config: AudioConfig) -> MelConfig:
    for key, expected in {**_GEMMA4, "feature_size": config.mel_bins}.items():
        if values.get(key) not in (None, expected):
            raise UnsupportedModelError(f"{file}: {key} is {as_json(values[key])}, supported is {as_json(expected)}")
    frame, hop = _GEMMA4["frame_length"], _GEMMA4["hop_length"]
    return MelConfig(_GEMMA4["sampling_rate"], _GEMMA4["fft_length"], hop, hop + 1, config.mel_bins, frame=frame)


def prepare_audio(samples: np.ndarray, mel: MelConfig, config: AudioConfig) -> PreparedAudio:
    """float32 samples [N] at the rate of `mel`, as the encoder takes them: features of each window, none longer."""
    features = log_mel(samples, mel)
    heard, window = features.shape[1], config.window_frames
    if config.family == "qwen2_audio":  # the silence behind the sound is not; three frames make a token
        heard = max(3, -(-len(samples) // mel.hop))
    starts = [start for start in range(0, heard, window) if config.rows(min(window, heard - start))]
    frames = tuple(min(window, heard - start) for start in starts)
    windows = tuple(np.ascontiguousarray(features[:, start : start + window]) for start in starts)
    digests, before = list[str](), ""
    for each, count in zip(windows, frames, strict=True):
        digests.append(hashlib.sha256(f"{before}{each.shape}{count}".encode() + each.tobytes()).hexdigest())
        before = digests[-1] if config.lead_windows else ""
    return PreparedAudio(windows, frames, tuple(digests), sum(map(config.rows, frames)))


def log_mel(samples: np.ndarray, mel: MelConfig) -> np.ndarray:
    """Log-mel features [bins, F] float32 of samples [N], F = filled(N) // hop.

    The power of each transform under a Hann window, its middle at the frame, the sound mirrored at its ends; summed in
    mel bands; its logarithm to base 10, at least that of the loudest less 8, plus 4, by 4. The last frame of those that
    the sound has is left out, as published.
    """
    length = mel.filled(len(samples))
    if mel.frame:
        return _magnitudes(np.pad(samples.astype(np.float32), (mel.frame // 2, length - len(samples))), mel)
    padded = np.pad(samples.astype(np.float32), (0, length - len(samples)))
    mirrored, frames, blocks = np.pad(padded, mel.transform // 2, mode="reflect"), length // mel.hop, []
    for first in range(0, frames, _BLOCK):
        last = min(first + _BLOCK, frames) - 1
        blocks.append(_logarithms(mirrored[first * mel.hop : last * mel.hop + mel.transform].tobytes(), mel))
    logarithms = np.concatenate(blocks, axis=1)
    return (np.maximum(logarithms, logarithms.max() - np.float32(_RANGE)) + 4) / 4


def _magnitudes(samples: np.ndarray, mel: MelConfig) -> np.ndarray:
    """The magnitude of each transform in mel bands, of frames of which none ends after the sound, half a frame of
    silence before it; its natural logarithm, a thousandth added."""
    frames, blocks = (len(samples) - mel.frame - 1) // mel.hop + 1, []
    for first in range(0, frames, _BLOCK):
        last = min(first + _BLOCK, frames) - 1
        blocks.append(_logarithms(samples[first * mel.hop : last * mel.hop + mel.frame].tobytes(), mel))
    return np.concatenate(blocks, axis=1)


@lru_cache(maxsize=_KEPT_BLOCKS)
def _logarithms(samples: bytes, mel: MelConfig) -> np.ndarray:
    """Logarithms [bins, n] float32 of the bands of the frames of float32 `samples`. Those of blocks that were heard
    lately are kept: a sound that goes on is heard again from its beginning."""
    given = np.frombuffer(samples, np.float32).astype(np.float64)
    size = mel.frame or mel.transform
    frames = np.lib.stride_tricks.sliding_window_view(given, size)[:: mel.hop]
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(size) / size)
    spectrum = np.fft.rfft(frames * window, mel.transform)
    if mel.frame:
        return np.asarray(np.log(mel_filters(mel) @ np.abs(spectrum).T + _GEMMA4["mel_floor"]).astype(np.float32))
    bands = mel_filters(mel) @ (spectrum.real**2 + spectrum.imag**2).T
    return np.asarray(np.log10(np.maximum(bands, 1e-10)).astype(np.float32))


@lru_cache(maxsize=4)
def mel_filters(mel: MelConfig) -> np.ndarray:
    """Triangles [bins, transform / 2 + 1] float64 over the frequencies of a transform, of equal area, whose middles are
    evenly spaced on Slaney's mel scale; Gemma 4's of equal height, on that of O'Shaughnessy (1987)."""
    if mel.frame:
        edges = 700 * np.expm1(np.linspace(0, np.log1p(_HIGHEST / 700), mel.bins + 2))
    else:
        highest = float(_LINEAR_MELS + np.log(_HIGHEST / _LINEAR) / _STEP)  # in mels
        edges = _hertz(np.linspace(0, highest, mel.bins + 2))
    frequencies = np.linspace(0, mel.rate // 2, mel.transform // 2 + 1)
    widths = np.diff(edges)[:, None]
    distances = edges[:, None] - frequencies
    triangles = np.maximum(0, np.minimum(-distances[:-2] / widths[:-1], distances[2:] / widths[1:]))
    return triangles if mel.frame else np.asarray(triangles * (2 / (edges[2:] - edges[:-2]))[:, None])


def _hertz(mels: np.ndarray) -> np.ndarray:
    linear = mels * _LINEAR / _LINEAR_MELS
    return np.where(mels < _LINEAR_MELS, linear, _LINEAR * np.exp(_STEP * (mels - _LINEAR_MELS)))
