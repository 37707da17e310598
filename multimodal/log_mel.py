"""Log-mel features of sound, as Whisper (Radford et al. 2023) has them, and how a checkpoint wants them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np

from edgellm.engines.errors import CheckpointError, UnsupportedModelError
from edgellm.engines.formats.strict_formats import as_json, is_integer
from edgellm.engines.model.audio import AudioConfig
from edgellm.multimodal.processor_config import PREPROCESSOR_FILE, PROCESSOR_FILE, processor_values

#: What the published extractor has where the file does not say, and the most that is taken; `min_length` is in samples.
_SIZES = {"sampling_rate": (16000, 192_000), "n_fft": (400, 16384), "hop_length": (160, 16384)}
_SIZES |= {"min_length": (8000, 10_000_000), "feature_size": (128, 4096), "n_window": (50, 4096)}
_EXTRACTOR = "Qwen3ASRFeatureExtractor"
#: Mel bands reach up to so many Hz; the lower part of the scale is linear (Slaney 1998).
_HIGHEST, _LINEAR, _LINEAR_MELS, _STEP = 8000.0, 1000.0, 15.0, np.log(6.4) / 27
#: What is quieter than the loudest by more than so much, in powers of ten, counts as that.
_RANGE = 8.0


@dataclass(frozen=True)
class MelConfig:
    """How sound becomes features: its rate in Hz; samples of a Fourier transform, between frames, and of the shortest
    sound, which silence fills up to; and mel bands."""

    rate: int
    transform: int
    hop: int
    least: int
    bins: int

    def frames(self, samples: int) -> int:
        """Frames of so many samples."""
        return max(samples, self.least) // self.hop


@dataclass(frozen=True, eq=False)
class PreparedAudio:
    """Sound as its encoder takes it: `features` [bins, F] float32 and digest of each window, and how many `tokens` they
    stand for."""

    features: tuple[np.ndarray, ...]
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
    kind = values.get("feature_extractor_type", _EXTRACTOR)
    if kind != _EXTRACTOR or any(values.get(name) not in (None, 0) for name in ("dither", "padding_value")):
        expected = f"supported is {_EXTRACTOR} without dither and with silence as padding"
        raise UnsupportedModelError(f"{file}: feature_extractor_type is {as_json(kind)}, {expected}")
    found = {}
    for key, (usual, most) in _SIZES.items():
        value = usual if values.get(key) is None else values[key]
        if not is_integer(value) or not 0 < value <= most:
            raise CheckpointError(f"{file}: {key} is {as_json(value)}, expected a whole number from 1 to {most}")
        found[key] = value
    rate, transform, hop, least, bins, half = found.values()
    if (bins, 2 * half) != (config.mel_bins, config.chunk_frames) or not hop <= transform <= least:
        raise CheckpointError(
            f"{file}: its sizes do not fit config.json, which has {config.mel_bins} bands and chunks of "
            f"{config.chunk_frames} frames: take both as they were published"
        )
    return MelConfig(rate, transform, hop, least, bins)


def prepare_audio(samples: np.ndarray, mel: MelConfig, config: AudioConfig) -> PreparedAudio:
    """float32 samples [N] at the rate of `mel`, as the encoder takes them: features of each window, none longer."""
    features = log_mel(samples, mel)
    starts = range(0, features.shape[1], config.window_frames)
    windows = tuple(np.ascontiguousarray(features[:, start : start + config.window_frames]) for start in starts)
    digests = tuple(hashlib.sha256(f"{each.shape}".encode() + each.tobytes()).hexdigest() for each in windows)
    return PreparedAudio(windows, digests, config.rows(features.shape[1]))


def log_mel(samples: np.ndarray, mel: MelConfig) -> np.ndarray:
    """Log-mel features [bins, F] float32 of samples [N], F = max(N, least) // hop.

    The power of each transform under a Hann window, its middle at the frame, the sound mirrored at its ends; summed in
    mel bands; its logarithm to base 10, at least that of the loudest less 8, plus 4, by 4. The last frame of those that
    the sound has is left out, as published.
    """
    padded = np.pad(samples.astype(np.float64), (0, max(0, mel.least - len(samples))))
    mirrored = np.pad(padded, mel.transform // 2, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(mirrored, mel.transform)[:: mel.hop][: mel.frames(len(samples))]
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(mel.transform) / mel.transform)
    bands = np.empty((mel.bins, len(frames)))
    filters = mel_filters(mel)
    for start in range(0, len(frames), 1024):  # a long sound would take six times its memory
        spectrum = np.fft.rfft(frames[start : start + 1024] * window)
        bands[:, start : start + 1024] = filters @ (spectrum.real**2 + spectrum.imag**2).T
    logarithms = np.log10(np.maximum(bands, 1e-10)).astype(np.float32)
    return (np.maximum(logarithms, logarithms.max() - np.float32(_RANGE)) + 4) / 4


@lru_cache(maxsize=4)
def mel_filters(mel: MelConfig) -> np.ndarray:
    """Triangles [bins, transform / 2 + 1] float64 over the frequencies of a transform, of equal area, whose middles are
    evenly spaced on Slaney's mel scale."""
    highest = float(_LINEAR_MELS + np.log(_HIGHEST / _LINEAR) / _STEP)  # in mels
    edges = _hertz(np.linspace(0, highest, mel.bins + 2))
    frequencies = np.linspace(0, mel.rate // 2, mel.transform // 2 + 1)
    widths = np.diff(edges)[:, None]
    distances = edges[:, None] - frequencies
    triangles = np.maximum(0, np.minimum(-distances[:-2] / widths[:-1], distances[2:] / widths[1:]))
    return np.asarray(triangles * (2 / (edges[2:] - edges[:-2]))[:, None])


def _hertz(mels: np.ndarray) -> np.ndarray:
    linear = mels * _LINEAR / _LINEAR_MELS
    return np.where(mels < _LINEAR_MELS, linear, _LINEAR * np.exp(_STEP * (mels - _LINEAR_MELS)))
