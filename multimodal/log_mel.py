"""Log-mel features of sound, Whisper's (Radford et al. 2023) and Gemma 4's, and how a checkpoint wants them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from edgellm.engines.errors import AudioError, CheckpointError, UnsupportedModelError
from edgellm.engines.families.decoders import class_defaults
from edgellm.engines.formats.digests import hash_bytes
from edgellm.engines.formats.strict_formats import as_json, is_integer
from edgellm.engines.model.audio import AudioConfig, RealtimeConfig
from edgellm.kernels.sounds.contract import MelTables, part_samples
from edgellm.multimodal.audio_input import heard, resampled, resampling
from edgellm.multimodal.processor_config import EXTRACTORS, PREPROCESSOR_FILE, PROCESSOR_FILE, processor_values

#: What the published extractor has where the file does not say, and the most that is taken; `min_length` is in samples.
_SIZES = {"sampling_rate": (16000, 192_000), "n_fft": (400, 640), "hop_length": (160, 640)}
_SIZES |= {"min_length": (8000, 10_000_000), "feature_size": (128, 4096), "n_window": (50, 4096)}
#: Gemma 4's extractor has no other values; null stands for absence.
_GEMMA4: Mapping[str, Any] = class_defaults("Gemma4AudioFeatureExtractor")
#: The largest logarithm by which Voxtral Realtime's features are measured, whatever the sound's is.
_LOUDEST = 1.5
#: Mel bands reach up to so many Hz; the lower part of the scale is linear (Slaney 1998).
_HIGHEST, _LINEAR, _LINEAR_MELS, _STEP = 8000.0, 1000.0, 15.0, np.log(6.4) / 27
#: The least power of a band.
_LEAST = 1e-10
_NOTHING = np.zeros(0, np.float32)


@dataclass(frozen=True)
class MelConfig:
    """How sound becomes features: its rate in Hz; samples of a Fourier transform, between frames, and of the shortest
    sound; mel bands; samples whose next multiple silence fills a sound up to; and samples of a frame where it is
    shorter than the transform, as Gemma 4's, whose features are magnitudes; frames of a part; samples of silence before
    and behind a sound; and the logarithm that counts as the loudest of every sound, where features are measured so."""

    rate: int
    transform: int
    hop: int
    least: int
    bins: int
    step: int = 1
    frame: int = 0
    part: int = 100
    silence: tuple[int, int] = (0, 0)
    loudest: float | None = None

    @property
    def size(self) -> int:
        """Samples of a frame."""
        return self.frame or self.transform


@dataclass(eq=False)
class Part:
    """So many frames (`count`) of a sound, as the float32 `samples` that they are measured of, and the digest of these;
    the largest of their logarithms, where it is known, if features are measured by that of the whole sound."""

    samples: np.ndarray
    count: int
    digest: str
    loudest: float | None = None


@dataclass(frozen=True, eq=False)
class PreparedAudio:
    """Sound as its encoder measures it: parts of windows of `window_parts` each, how many `frames` of each window were
    heard, and how many `tokens` they stand for. Rows of `chained` windows follow from those before, too."""

    parts: tuple[Part, ...]
    window_parts: int
    frames: tuple[int, ...]
    tokens: int
    chained: bool
    kind: str = field(default="audio")

    @property
    def digest(self) -> str:
        """That of all parts."""
        return self._digest(f"{self.frames}", 0, len(self.frames))

    @property
    def held_pixels(self) -> int:
        """Its memory as pixels of three bytes, as that of images is bounded."""
        return sum(each.samples.nbytes for each in self.parts) // 3

    def windows(self, first: int, last: int) -> tuple[Part, ...]:
        """The parts of windows side by side."""
        return self.parts[first * self.window_parts : last * self.window_parts]

    def window_digests(self, loudest: float) -> list[str]:
        """What the rows of each window follow from, in a sound of which this is the `loudest`."""
        digests, before = list[str](), ""
        for number, count in enumerate(self.frames):
            digests.append(self._digest(f"{before}{loudest} {count} ", number, number + 1))
            before = digests[-1] if self.chained else ""
        return digests

    def _digest(self, text: str, first: int, last: int) -> str:
        """That of a text and of the parts of windows side by side."""
        return hash_bytes("".join([text, *(part.digest for part in self.windows(first, last))]).encode())


def read_mel_config(path: Path, config: AudioConfig) -> MelConfig:
    """What the processor's file of a checkpoint asks for. Raises CheckpointError, UnsupportedModelError."""
    places = [(name, key) for name in (PROCESSOR_FILE, PREPROCESSOR_FILE) for key in ("feature_extractor", None)]
    file, values = processor_values(path, places, "sounds")
    extractor = EXTRACTORS[config.family]
    kind = values.get("feature_extractor_type", extractor)
    if kind != extractor or any(values.get(name) not in (None, 0) for name in ("dither", "padding_value")):
        expected = f"supported is {extractor} without dither and with silence as padding"
        raise UnsupportedModelError(f"{file}: feature_extractor_type is {as_json(kind)}, {expected}")
    if config.family == "gemma4":
        return _gemma4(file, values, config)
    if isinstance(config, RealtimeConfig):
        fixed = {"sampling_rate": 16000, "hop_length": 160, "global_log_mel_max": _LOUDEST}
        for key, supported in {**fixed, "win_length": values.get("n_fft")}.items():
            if values.get(key, supported) != supported:
                raise UnsupportedModelError(f"{file}: {key} is {as_json(values[key])}, supported is {supported}")
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
    silence, loudest = (0, 0), None
    if isinstance(config, RealtimeConfig):
        half, least, step = config.chunk_frames // 2, config.chunk_frames * hop, config.chunk_frames * hop
        before, behind = config.silence
        silence, loudest = (before * step, (behind + config.delay) * step), _LOUDEST
    if (bins, 2 * half) != (config.mel_bins, config.chunk_frames) or not hop <= transform <= least:
        raise CheckpointError(
            f"{file}: its sizes do not fit config.json, which has {config.mel_bins} bands and chunks of "
            f"{config.chunk_frames} frames: take both as they were published"
        )
    return MelConfig(rate, transform, hop, least, bins, step, 0, config.part_frames, silence, loudest)


def _gemma4(file: Path, values: Mapping[str, Any], config: AudioConfig) -> MelConfig:
    for key, expected in {**_GEMMA4, "feature_size": config.mel_bins}.items():
        if values.get(key) not in (None, expected):
            raise UnsupportedModelError(f"{file}: {key} is {as_json(values[key])}, supported is {as_json(expected)}")
    frame, hop = _GEMMA4["frame_length"], _GEMMA4["hop_length"]
    return MelConfig(
        _GEMMA4["sampling_rate"], _GEMMA4["fft_length"], hop, hop + 1, config.mel_bins, 1, frame, config.part_frames
    )


class Sound:
    """A sound, which may go on, for one model: what is new alone is resampled and measured.

    Parts that know all around them stay, and of the samples the last ones, from which others follow.
    """

    def __init__(self, rate: int, samples: np.ndarray = _NOTHING) -> None:
        """Samples [N] and their rate in Hz, as `heard` gives them."""
        self.rate, self.count = rate, len(samples)
        #: Samples from the `_first` on, and the parts before the frames that need these.
        self._tail, self._first, self._final = samples, 0, tuple[Part, ...]()

    def followed_by(self, samples: np.ndarray) -> Sound:
        """This sound, which stays as it is, and more samples, as `heard` takes them, or none. Raises AudioError."""
        grown = copy(self)
        try:
            samples = np.asarray(samples)
        except ValueError as error:
            raise AudioError(f"the samples are a {type(samples).__name__} of no equal parts: expected [N]") from error
        if samples.size:
            new, _ = heard((samples, self.rate))
            grown.count, grown._tail = self.count + len(new), np.concatenate((self._tail, new))
        return grown

    def prepared(self, mel: MelConfig, config: AudioConfig) -> PreparedAudio:
        """The sound as the encoder measures it, in parts of windows. AudioError where there is none."""
        if not self.count:
            raise AudioError("there is no sound yet: give at least one sample")
        (up, down, reach), back, (before, behind) = resampling(self.rate, mel.rate), mel.size // 2, mel.silence
        skipped, samples = self._first // down * up, resampled(self._tail, self.rate, mel.rate)
        samples = np.concatenate((np.zeros(0 if skipped else before), samples, np.zeros(behind)), dtype=np.float32)
        parts = self._final + _parts(samples, skipped and before + skipped, len(self._final) * mel.part, mel)
        known = before + (self.count - reach) * up // down  # of the samples at the model's rate
        self._final = parts[: max(0, (known - back) // mel.hop) // mel.part]
        needed = (len(self._final) * mel.part * mel.hop - back - before) * down // up - reach
        first = max(self._first, needed // down * down)
        self._tail, self._first = self._tail[first - self._first :], first
        window, size = config.window_frames, config.window_frames // mel.part
        measured = sum(part.count for part in parts)
        if config.family == "qwen2_audio":  # the silence behind the sound is not; three frames make a token
            measured = max(3, -(-(skipped + len(samples)) // mel.hop))
        frames = tuple(min(window, measured - start) for start in range(0, measured, window))
        frames = tuple(count for count in frames if config.rows(count))
        return PreparedAudio(parts, size, frames, sum(map(config.rows, frames)), config.lead_windows > 0)


def _parts(samples: np.ndarray, skipped: int, first: int, mel: MelConfig) -> tuple[Part, ...]:
    """Those of the frames of a sound from the `first` on, the beginning of a part. The `samples` [N] are the sound's
    last ones, behind those that are `skipped`, which these frames do not need; at its ends it is mirrored (Gemma 4's:
    silence is before it), and the last frame of those that it has is left out, as published."""
    back, length = mel.size // 2, -(-max(skipped + len(samples), mel.least) // mel.step) * mel.step
    padded = np.concatenate((samples, np.zeros(length - skipped - len(samples), np.float32)), dtype=np.float32)
    before = np.zeros(back, np.float32) if mel.frame else padded[back:0:-1]
    behind = _NOTHING if mel.frame else padded[-2 : -back - 2 : -1]
    count = ((length - back - 1) // mel.hop + 1 if mel.frame else length // mel.hop) - first
    padded = np.concatenate((before, padded, behind))[first * mel.hop - skipped :]
    found = list[Part]()
    for place in range(0, count, mel.part):
        frames = min(mel.part, count - place)
        own = padded[place * mel.hop :][: part_samples(frames, mel.hop, mel.size)].copy()
        found.append(Part(own, frames, hashlib.sha256(own).hexdigest()))
    return tuple(found)


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


def mel_tables(mel: MelConfig) -> MelTables:
    """How a checkpoint's sounds are measured, under a Hann window: float64, but for what GPUs alone need."""
    frequencies = np.arange(mel.transform // 2 + 1)
    angles = 2 * np.pi / mel.transform * (frequencies[:, None] * frequencies % mel.transform)
    filters = mel_filters(mel)
    filled = filters > 0
    filled[:, 0] |= ~filled.any(axis=1)  # a band has one frequency at least
    ranges = np.stack((filled.argmax(axis=1), len(frequencies) - filled[:, ::-1].argmax(axis=1)), axis=1)
    return MelTables(
        0.5 - 0.5 * np.cos(2 * np.pi * np.arange(mel.size) / mel.size),
        np.stack((np.cos(angles), np.sin(angles))).astype(np.float32),
        filters,
        ranges.astype(np.int32),
        mel.transform,
        mel.hop,
        _GEMMA4["mel_floor"] if mel.frame else _LEAST,
        mel.frame > 0,
    )
