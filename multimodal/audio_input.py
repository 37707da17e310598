"""Reads sound from files, bytes and microphones into mono samples of one rate."""

from __future__ import annotations

import io
import math
import struct
from functools import lru_cache
from pathlib import Path

import numpy as np

from edgellm.engines.errors import AudioError
from edgellm.kernels.errors import shown
from edgellm.multimodal.sources import bytes_of

RATES = range(1000, 768_001)
#: What a file may have before it is decoded, of which few bytes of FLAC may promise more.
SOURCE_SAMPLES = 64_000_000
#: By the tag of a WAV file's coding and its bits, how NumPy reads a sample; PCM of 24 bits by bytes.
_CODINGS = {(1, 8): "u1", (1, 16): "<i2", (1, 24): "u1", (1, 32): "<i4", (3, 32): "<f4", (3, 64): "<f8"}
_EXTENSIBLE = 0xFFFE
_RAW = "raw samples need a WAV header, or edgellm transcribe's --every and --rate"
#: A resampling filter reaches over so many zeros of its sinc to either side, whose cutoff is this share of the lower
#: rate's half; the Kaiser window (Kaiser 1974) of that beta leaves ripples of -90 dB. So many phases' weights are made
#: at a time.
_ZEROS, _CUTOFF, _BETA, _PHASES = 32, 0.945, 9.0, 256


def heard(
    source: str | Path | bytes | tuple[np.ndarray, int], most_seconds: float = math.inf
) -> tuple[np.ndarray, int]:
    """The sound of a source as float32 samples [N] from -1 to 1, channels averaged, and their rate in Hz.

    `source` is a path or the bytes of a file (WAV; what else the package soundfile reads, where it is installed), or
    samples with their rate: floats, int16 or int32 (full scale is 1), or uint8 (128 is silence). Raises AudioError for
    what is no sound, is damaged, empty, not finite, or longer than `most_seconds`, which is checked before anything is
    decoded, and for a file that needs soundfile where that is missing.
    """
    if (found := bytes_of(source, "audio")) is not None:
        samples, rate = _decoded(*found, most_seconds)
    elif isinstance(source, tuple) and len(source) == 2 and isinstance(source[0], np.ndarray):
        samples, rate = source
    else:
        expected = "expected a path, the bytes of a file, or (a NumPy array of samples, rate in Hz)"
        raise AudioError(f"a sound is a {type(source).__name__}: {expected}")
    if not isinstance(rate, (int, np.integer)) or rate not in RATES:
        raise AudioError(f"the rate is {shown(rate)} Hz: expected a whole number from {RATES[0]} to {RATES[-1]}")
    _check_length(len(samples) if samples.ndim else 0, 1, int(rate), most_seconds)
    return _mono(samples), int(rate)


def resampled(samples: np.ndarray, rate: int, target: int) -> np.ndarray:
    """float32 samples [N] of `rate` Hz at `target` Hz: [ceil(N target / rate)], by a windowed sinc in phases (Crochiere
    and Rabiner 1983).

    Output k stands at the time of input k rate / target; each of the `up` places that outputs have between two inputs
    has its own weights of the inputs around. What lies beyond the lower rate's half is filtered out.
    """
    if rate == target or not len(samples):
        return samples
    up, down, reach = resampling(rate, target)
    count = -(-len(samples) * up // down)
    padded = np.concatenate((np.zeros(reach, np.float32), samples, np.zeros(2 * reach + down, np.float32)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * reach + 1)
    result = np.empty(count, np.float32)
    for first in range(0, min(up, count), _PHASES):
        for phase, own in enumerate(_weights(rate, target, first, min(up, count, first + _PHASES)), first):
            outputs = result[phase::up]  # einsum, for threads of BLAS would wait for each other in small products
            np.einsum("nk,k->n", windows[phase * down // up :: down][: len(outputs)], own, out=outputs)
    return result


def resampling(rate: int, target: int) -> tuple[int, int, int]:
    """So many samples at the `target` stand for so many, and one follows from so many to either side."""
    divisor = math.gcd(rate, target)
    reach = 0 if rate == target else math.ceil(_ZEROS / (_CUTOFF * min(1.0, target / rate)))
    return target // divisor, rate // divisor, reach


@lru_cache(maxsize=4)
def _weights(rate: int, target: int, first: int, last: int) -> np.ndarray:
    """[n, 2 reach + 1] float32: what outputs of the phases `first` to `last` - 1 take of the inputs around."""
    up, down, reach = resampling(rate, target)
    times = np.arange(-reach, reach + 1) - (np.arange(first, last) * down % up)[:, None] / up
    inside = np.sqrt(np.maximum(0.0, 1 - (times / (reach + 1)) ** 2))
    weights = np.sinc(_CUTOFF * min(1.0, target / rate) * times) * np.i0(_BETA * inside)
    return np.asarray(weights / weights.sum(axis=1, keepdims=True), np.float32)


def _mono(samples: np.ndarray) -> np.ndarray:
    """Finite float32 samples [N] of an array's values."""
    samples = samples.astype(samples.dtype.newbyteorder("="), copy=False)
    what, kind = f"the array {list(samples.shape)} of {samples.dtype}", samples.dtype
    if samples.ndim not in (1, 2) or not samples.size or samples.shape[-1] > max(samples.shape[0], 1):
        raise AudioError(f"{what} is no sound: expected samples [N], at least one, or [N, channels], fewer of them")
    if kind.kind != "f" and kind not in (np.uint8, np.int16, np.int32):
        raise AudioError(f"{what}: expected floats from -1 to 1, int16, int32 or uint8. Convert it first, with astype")
    with np.errstate(over="ignore"):  # what float32 does not hold is refused below
        values: np.ndarray = samples.astype(np.float32)
    if kind.kind != "f":
        values = (values - np.float32(128 if kind == np.uint8 else 0)) / np.float32(2 ** (8 * kind.itemsize - 1))
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
    found = _wav(data, what, most_seconds) if data[:4] == b"RIFF" and data[8:12] == b"WAVE" else None
    if found is not None:
        return found
    try:
        import soundfile
    except (ImportError, OSError) as error:  # OSError: its library is missing
        raise AudioError(
            f"{what} is no WAV file of samples of 8 to 64 bits: FLAC and other kinds need the package soundfile "
            f"(pip install soundfile); {_RAW}"
        ) from error
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            _check_length(file.frames, file.channels, file.samplerate, most_seconds)
            return file.read(dtype="float32", always_2d=True), file.samplerate
    except AudioError:
        raise
    except Exception as error:  # whatever hostile bytes make a decoder raise
        reason = getattr(error, "error_string", error)  # the rest names an object in memory
        raise AudioError(f"{what} is no sound that soundfile reads, or it is damaged: {reason} ({_RAW})") from error


def _wav(data: bytes, what: str, most_seconds: float) -> tuple[np.ndarray, int] | None:
    """Samples [N, channels] of a WAV file, and their rate; None for a coding that is not read here. A chunk that says
    to be larger than the file ends with it, as where it was written to a pipe, and so do samples of which neither it
    nor the file's own size tells, as where a recorder was ended. 24 bits may lie in four bytes (ALSA's S24_LE)."""
    place, form, end = 12, (0, 0, 0, 0, 0), int.from_bytes(data[4:8], "little") + 8
    while place + 8 <= len(data):
        name, size = struct.unpack_from("<4sI", data, place)
        start, size = place + 8, min(size, len(data) - place - 8)
        if name == b"fmt " and size >= 16:
            tag, channels, rate, _, block, bits = struct.unpack_from("<HHIIHH", data, start)
            if tag == _EXTENSIBLE and size >= 26:
                (tag,) = struct.unpack_from("<H", data, start + 24)
            form = tag, channels, rate, block, bits
        elif name == b"data" and any(form):
            tag, channels, rate, block, bits = form
            if (tag, bits) not in _CODINGS or not channels or not rate:
                return None
            size = size or (len(data) - start if end <= start else 0)
            width = 4 if bits == 24 and block == 4 * channels else bits // 8
            frames = size // (width * channels)
            if not frames:
                break
            _check_length(frames, channels, rate, most_seconds)
            values = np.frombuffer(data[start : start + frames * channels * width], _CODINGS[tag, bits])
            if bits == 24:  # the upper three bytes of 32 bits
                values = np.pad(values.reshape(-1, width)[:, :3], ((0, 0), (1, 0))).view("<i4")[:, 0]
            return values.astype(values.dtype.newbyteorder("=")).reshape(frames, channels), rate
        place = start + size + size % 2
    raise AudioError(f"{what} is a WAV file without a format or without samples: it is damaged")
