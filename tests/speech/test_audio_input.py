"""Sound from files, bytes and arrays: samples, rates, and what is refused."""

from __future__ import annotations

import io
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from speech_models import expected_speech
from synthetic_sound import RATE, SECONDS, SPARSE, sound, wav

from edgellm.errors import AudioError
from edgellm.multimodal.audio_input import heard, resampled

SAMPLES = sound(0.4)


def read(source: Any, rate: int = RATE, most: float = 60.0) -> np.ndarray:
    return resampled(*heard(source, most), rate)


def riff(tag: int, bits: int, data: bytes, extensible: bool = False, says: int | None = None) -> bytes:
    """A WAV file as other writers have it; its last chunk `says` how long it is."""
    width = bits // 8
    form = struct.pack("<HHIIHH", 0xFFFE if extensible else tag, 1, RATE, RATE * width, width, bits)
    form += struct.pack("<HHIH14s", 22, bits, 0, tag, bytes(14)) if extensible else b""
    body = b"WAVE" + b"fmt " + struct.pack("<I", len(form)) + form + b"LIST" + struct.pack("<I", 3) + b"abc\0"
    return b"RIFF\xff\xff\xff\xff" + body + b"data" + struct.pack("<I", len(data) if says is None else says) + data


def test_files_and_arrays_give_the_same_samples(tmp_path: Path) -> None:
    path = tmp_path / "sound.wav"
    path.write_bytes(wav(SAMPLES))
    for source in (path, str(path), wav(SAMPLES), bytearray(wav(SAMPLES))):
        np.testing.assert_allclose(read(source), SAMPLES, atol=2 / 32768)
    stereo = np.stack((SAMPLES, -0.5 * SAMPLES), axis=1)
    np.testing.assert_allclose(read(wav(stereo)), 0.25 * SAMPLES, atol=2 / 32768)
    np.testing.assert_array_equal(read((SAMPLES, RATE)), SAMPLES)
    for order in ("<i2", ">i2"):  # as a network has them
        np.testing.assert_allclose(read((np.rint(SAMPLES * 32768).astype(order), RATE)), SAMPLES, atol=1 / 32768)
    assert read((np.full(9, 128, np.uint8), np.int64(RATE))).tolist() == [0.0] * 9


@pytest.mark.parametrize(
    ("tag", "bits", "data", "error"),
    [
        (1, 8, np.rint(SAMPLES * 127 + 128).astype("u1").tobytes(), 1 / 64),
        (1, 24, b"".join(int(each).to_bytes(3, "little", signed=True) for each in SAMPLES * 2**23), 2**-22),
        (1, 32, np.rint(SAMPLES.astype(np.float64) * 2**31).astype("<i4").tobytes(), 2**-22),
        (3, 32, SAMPLES.astype("<f4").tobytes(), 0.0),
        (3, 64, SAMPLES.astype("<f8").tobytes(), 0.0),
    ],
)
@pytest.mark.parametrize("extensible", [False, True])
def test_wav_files_of_every_width(tag: int, bits: int, data: bytes, error: float, extensible: bool) -> None:
    np.testing.assert_allclose(read(riff(tag, bits, data, extensible=extensible)), SAMPLES, atol=error)
    piped = riff(tag, bits, data, extensible=extensible, says=0xFFFFFFFF)  # its writer could not go back
    np.testing.assert_allclose(read(piped), SAMPLES, atol=error)


def test_wav_files_as_recorders_leave_them() -> None:
    """ALSA's S24_LE has 24 bits in four bytes; one that was ended has said nothing of sizes."""
    steps = np.rint(SAMPLES * 2**23).astype("<i4")
    four = bytearray(riff(1, 24, steps.tobytes()))
    struct.pack_into("<H", four, four.index(b"fmt ") + 20, 4)
    np.testing.assert_allclose(read(four), SAMPLES, atol=2**-22)
    ended = bytearray(riff(3, 32, SAMPLES.tobytes(), says=0))
    for size in (0, 36):
        struct.pack_into("<I", ended, 4, size)
        np.testing.assert_array_equal(read(ended), SAMPLES)


@pytest.mark.parametrize("rate", [44100, 8000, 48000, 22050, 11025])
def test_resampling_keeps_what_both_rates_hold(rate: int, target: int = RATE) -> None:
    times, late = np.arange(rate // 2) / rate, np.arange(target // 2) / target
    heard = np.sin(2 * np.pi * 1100 * times + 0.3) + 0.5 * np.sin(2 * np.pi * 3400 * times)
    found = resampled(heard.astype(np.float32), rate, target)
    assert found.dtype == np.float32 and found.shape == (target // 2,)
    expected = np.sin(2 * np.pi * 1100 * late + 0.3) + 0.5 * np.sin(2 * np.pi * 3400 * late)
    np.testing.assert_allclose(found[200:-200], expected[200:-200], atol=2e-4)
    if rate > 20000:  # beyond what the target holds: nothing of it may fold back
        high = np.sin(2 * np.pi * 9000 * times).astype(np.float32)
        assert np.abs(resampled(high, rate, target)[200:-200]).max() < 2e-4


def test_resampling_agrees_with_soxr() -> None:
    found = resampled(sound(SECONDS[0], 44100), 44100, RATE)[::SPARSE]
    np.testing.assert_allclose(found, expected_speech()["resampled"], atol=2e-4)


def test_a_file_of_another_kind_is_read_by_soundfile_or_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "soundfile", None)
    for data in (b"fLaC" + bytes(40), riff(0x11, 16, bytes(64))):
        with pytest.raises(AudioError, match="FLAC and other kinds need the package soundfile"):
            read(data)


def test_flac_is_read_where_soundfile_is_installed() -> None:
    soundfile = pytest.importorskip("soundfile")
    content = io.BytesIO()
    soundfile.write(content, np.stack((SAMPLES, SAMPLES), 1), RATE, format="FLAC", subtype="PCM_24")
    np.testing.assert_allclose(read(content.getvalue()), SAMPLES, atol=2**-22)
    with pytest.raises(AudioError, match=r"the sound is 0\.40 seconds long"):
        read(content.getvalue(), most=0.3)
    with pytest.raises(AudioError, match=r"damaged: [A-Z]") as refused:
        read(b"fLaC" + bytes(40))
    assert " at 0x" not in str(refused.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ((SAMPLES[:, None, None], RATE), "is no sound"),
        ((SAMPLES[:0], RATE), "is no sound"),
        ((SAMPLES.reshape(2, -1), RATE), "is no sound"),
        ((SAMPLES.astype(np.int64), RATE), "expected floats from -1 to 1"),
        ((np.float32([0.0, np.nan]), RATE), "infinite values or NaN"),
        ((SAMPLES, 10), "the rate is 10 Hz"),
        ((SAMPLES, 16000.0), r"the rate is 16000\.0 Hz"),
        (SAMPLES, "a sound is a ndarray"),
        ((SAMPLES.tolist(), RATE), r"or \(a NumPy array of samples, rate in Hz\)"),
        (Path("/"), "is a folder: expected the file of a sound"),
        (b"RIFF\0\0\0\0WAVE" + bytes(3), "it is damaged"),
        (wav(SAMPLES[:0]), "a WAV file without a format or without samples"),
        (wav(SAMPLES)[:30], "it is damaged"),
        (wav(sound(0.5)), r"the sound is 0\.50 seconds long: the most that the context holds are 0\.45"),
    ],
)
def test_what_is_no_sound_is_refused(source: Any, message: str) -> None:
    with pytest.raises(AudioError, match=message):
        read(source, most=0.45)
