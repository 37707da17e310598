"""Reads sound from files, bytes and microphones into mono samples of one rate."""

from __future__ import annotations

import io
import math
import struct
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np

from edgellm.engines.errors import AudioError
from edgellm.kernels.errors import shown
from edgellm.multimodal.sources import check_bytes, file_bytes

#: A path, the bytes of a file, or samples [N] or [N, channels] with their rate in Hz.
AudioSource = str | Path | bytes | tuple[np.ndarray, int]

RATES = range(1000, 768_001)
#: What a file may have before it is decoded, which few bytes of FLAC may promise.
SOURCE_SAMPLES = 64_000_000
_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
#: A resampling filter reaches over so many zeros of its sinc to either side, whose cutoff is this share of the lower
#: rate's half; the Kaiser window (Kaiser 1974) of that beta leaves ripples of -90 dB.
_ZEROS, _CUTOFF, _BETA = 32, 0.945, 9.0
#: Weights are made for so many phases at a time.
_PHASES = 256


def read_audio(source: AudioSource, rate: int, most_seconds: float) -> np.ndarray:
    """The sound of a source as float32 samples [N] from -1 to 1 at `rate` Hz (see `heard`)."""
    samples, own = heard(source, most_seconds)
    return resampled(samples, own, rate)


def heard(source: AudioSource, most_seconds: float = math.inf) -> tuple[np.ndarray, int]:
    """The sound of a source as float32 samples [N] from -1 to 1, channels averaged, and their rate in Hz.

    `source` is a path or the bytes of a file (WAV; what else the package soundfile reads, where it is installed), or
    samples [N] or [N, channels] with their rate: floats, int16 or int32 (full scale is 1), or uint8 (128 is silence).
    Raises AudioError for what is no sound, is damaged, empty, not finite, or longer than `most_seconds`, which is
    checked before anything is decoded, and for a file that needs soundfile where that is missing.
    """
    if isinstance(source, tuple) and len(source) == 2:
        samples, own = source
        if not isinstance(samples, np.ndarray) or isinstance(own, bool) or not isinstance(own, (int, np.integer)):
            raise AudioError(f"samples come as an array and a whole number of Hz, not as {shown(source)[:80]}")
        own = int(own)
    elif isinstance(source, (str, Path)):
        samples, own = _decoded(file_bytes(Path(source), "audio"), str(source), most_seconds)
    elif isinstance(source, (bytes, bytearray, memoryview)):
        samples, own = _decoded(bytes(source), "the sound", most_seconds)
    else:
        raise AudioError(
            f"a sound is a {type(source).__name__}: expected a path, the bytes of a file, or (samples, rate in Hz)"
        )
    if own not in RATES:
        raise AudioError(f"the rate is {own} Hz: expected {RATES[0]} to {RATES[-1]}")
    _check_length(len(samples) if samples.ndim else 0, 1, own, most_seconds)
    return _mono(samples), own


def resampled(samples: np.ndarray, rate: int, target: int) -> np.ndarray:
    """float32 samples [N] of `rate` Hz at `target` Hz: [ceil(N target / rate)], by a windowed sinc in phases (Crochiere
    and Rabiner 1983).

    Output k stands at the time of input k rate / target; each of the `up` places that outputs have between two inputs
    has its own weights of the inputs around. What lies beyond the lower rate's half is filtered out.
    """
    if rate == target or not len(samples):
        return samples
    divisor = math.gcd(rate, target)
    up, down = target // divisor, rate // divisor
    cutoff = _CUTOFF * min(1.0, target / rate)
    reach = math.ceil(_ZEROS / cutoff)
    count = -(-len(samples) * up // down)
    padded = np.concatenate((np.zeros(reach, np.float32), samples, np.zeros(2 * reach + down, np.float32)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * reach + 1)
    result = np.empty(count, np.float32)
    for first in range(0, min(up, count), _PHASES):
        places, beyond = np.divmod(np.arange(first, min(up, count, first + _PHASES)) * down, up)
        times = np.arange(-reach, reach + 1) - beyond[:, None] / up
        inside = np.sqrt(np.maximum(0.0, 1 - (times / (reach + 1)) ** 2))
        weights = np.sinc(cutoff * times) * np.i0(_BETA * inside)
        weights /= weights.sum(axis=1, keepdims=True)
        for phase, (place, own) in enumerate(zip(places.tolist(), weights.astype(np.float32), strict=True), first):
            outputs = result[phase::up]  # einsum, for threads of BLAS would wait for each other in small products
            np.einsum("nk,k->n", windows[place::down][: len(outputs)], own, out=outputs)
    return result


def _mono(samples: np.ndarray) -> np.ndarray:
    """Finite float32 samples [N] of an array's values."""
    what = f"the array {list(samples.shape)} of {samples.dtype}"
    if samples.ndim not in (1, 2) or not samples.size:
        raise AudioError(f"{what} is no sound: expected samples [N] or [N, channels], at least one")
    if samples.ndim == 2 and samples.shape[1] > samples.shape[0]:
        raise AudioError(f"{what} has more channels than samples: the channels come last, transpose it")
    if samples.dtype.kind != "f" and samples.dtype not in (np.uint8, np.int16, np.int32):
        raise AudioError(f"{what}: expected floats from -1 to 1, int16, int32 or uint8. Convert it first, with astype")
    values: np.ndarray = samples.astype(np.float32)
    if samples.dtype.kind != "f":
        middle = np.float32(128 if samples.dtype == np.uint8 else 0)
        values = (values - middle) / np.float32(2 ** (8 * samples.dtype.itemsize - 1))
    values = values if values.ndim == 1 else values.mean(axis=1, dtype=np.float32)
    if not np.isfinite(values).all():
        raise AudioError(f"{what} has infinite values or NaN")
    return values


def _check_length(samples: int, channels: int, rate: int, most_seconds: float) -> None:
    if samples * channels > SOURCE_SAMPLES:
        raise AudioError(f"the sound has {samples} samples of {channels} channels: the most is {SOURCE_SAMPLES} in all")
    if samples > most_seconds * rate:
        raise AudioError(
            f"the sound is {samples / rate:.2f} seconds long: the most that the context holds are {most_seconds:.2f}. "
            "Cut it, or build with a larger --kv-capacity"
        )


def _decoded(data: bytes, what: str, most_seconds: float) -> tuple[np.ndarray, int]:
    """Samples [N, channels] of a file, and their rate."""
    check_bytes(len(data), what, "audio")
    if data[:4] in (b"RIFF", b"RF64") and data[8:12] == b"WAVE":
        found = _wav(data, what, most_seconds)
        if found is not None:
            return found
    soundfile = _soundfile()
    if soundfile is None:
        raise AudioError(
            f"{what} is no WAV file of samples of 8 to 64 bits: FLAC and other kinds need the package soundfile "
            "(pip install soundfile)"
        )
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            _check_length(file.frames, file.channels, file.samplerate, most_seconds)
            return file.read(dtype="float32", always_2d=True), file.samplerate
    except AudioError:
        raise
    except Exception as error:  # whatever hostile bytes make a decoder raise
        raise AudioError(f"{what} is no sound that soundfile reads, or it is damaged: {error}") from error


def _wav(data: bytes, what: str, most_seconds: float) -> tuple[np.ndarray, int] | None:
    """Samples [N, channels] of a WAV file, and their rate; None for a coding that is not read here."""
    form: tuple[int, int, int, int] | None = None
    for name, start, size in _chunks(data):
        if name == b"fmt " and size >= 16:
            tag, channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", data, start)
            if tag == _EXTENSIBLE and size >= 26:
                (tag,) = struct.unpack_from("<H", data, start + 24)
            form = tag, channels, rate, bits
        elif name == b"data" and form is not None:
            tag, channels, rate, bits = form
            width = bits // 8
            kinds = {_PCM: {8: "u1", 16: "<i2", 24: "u1", 32: "<i4"}, _FLOAT: {32: "<f4", 64: "<f8"}}
            kind = kinds.get(tag, {}).get(bits)
            if kind is None or not channels or not rate:
                return None
            frames = size // (width * channels)
            _check_length(frames, channels, rate, most_seconds)
            values = np.frombuffer(data, kind, frames * channels * width // np.dtype(kind).itemsize, start)
            if bits == 24:  # the upper three bytes of 32 bits
                wide = np.zeros((frames * channels, 4), np.uint8)
                wide[:, 1:] = values.reshape(-1, 3)
                values = wide.view("<i4")[:, 0]
            return values.astype(values.dtype.newbyteorder("=")).reshape(frames, channels), rate
    raise AudioError(f"{what} is a WAV file without a format or without samples: it is damaged")


def _chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Name, place and size of each chunk; one that says to be larger than the file ends with it, as those do that were
    written to a pipe."""
    place = 12
    while place + 8 <= len(data):
        name, size = struct.unpack_from("<4sI", data, place)
        size = min(size, len(data) - place - 8)
        yield name, place + 8, size
        place += 8 + size + size % 2


@lru_cache(maxsize=1)
def _soundfile():  # type: ignore[no-untyped-def]
    """The package, None where it is not installed."""
    try:
        import soundfile
    except (ImportError, OSError):  # OSError: its library is missing
        return None
    return soundfile
