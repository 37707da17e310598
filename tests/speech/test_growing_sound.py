"""Sound that goes on: the features of the whole, of what is new alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from speech_models import features_of, mel_of
from synthetic_sound import RATE, sound

from edgellm import LLM, SpeechStream
from edgellm.engines.backends.numpy_backend import NumpyBackend
from edgellm.engines.model import audio
from edgellm.errors import AudioError, ContextError
from edgellm.kernels.sounds.twin import NumpySounds
from edgellm.multimodal import sound_features
from edgellm.multimodal.log_mel import Sound
from edgellm.multimodal.sound_features import SoundFeatures

SHORT: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True}


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        *(("gemma4", rate) for rate in (16000, 11025)),
        *(pytest.param("gemma4", rate, marks=pytest.mark.slow) for rate in (8000, 44100)),
        *((name, 16000) for name in ("voxtral", "voxtral_realtime")),
        *(pytest.param(name, 16000, marks=pytest.mark.slow) for name in ("qwen3_asr", "qwen2_audio")),
    ],
)
def test_a_growing_sound_has_the_features_of_the_whole(name: str, rate: int) -> None:
    """To the bit, whatever the pieces are; a failure of one changes nothing."""
    (mel, config), samples = mel_of(name), sound(4.7, rate)
    samples[2 * rate : 3 * rate] = 0
    growing, place, sizes = Sound(rate), 0, [1, 2, 399, 0, 1601, 7999, *[rate // 2] * 10]
    for size in sizes:
        growing, place = growing.followed_by(samples[place : place + size]), min(place + size, len(samples))
        found, whole = growing.prepared(mel, config), Sound(rate, samples[:place]).prepared(mel, config)
        assert (found.digest, found.frames, found.tokens) == (whole.digest, whole.frames, whole.tokens), size
        if found.frames:
            both = (features_of(each, mel, config) for each in (found, whole))
            np.testing.assert_array_equal(*both)
        with pytest.raises(AudioError):
            growing.followed_by(np.float32([1, np.nan]))
        with pytest.raises(AudioError, match="the samples are a tuple of no equal parts"):
            growing.followed_by((samples, rate))
    assert growing.count == len(samples)


@pytest.mark.parametrize("rate", [16000, 48000])
def test_what_is_new_alone_is_measured_and_held(rate: int, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []
    own = NumpySounds.measure_sounds

    def counting(kernels: NumpySounds, samples: np.ndarray, counts: np.ndarray, *given: Any) -> None:
        measured.append(int(counts.sum()))
        own(kernels, samples, counts, *given)

    monkeypatch.setattr(NumpySounds, "measure_sounds", counting)
    (mel, config), growing = mel_of("qwen3_asr"), Sound(rate)
    backend: Any = NumpyBackend(cast(Any, None))
    features = SoundFeatures(backend, mel, config)
    room = np.zeros((config.window_chunks, config.mel_bins, config.chunk_frames), np.float32)
    second = np.random.default_rng(1).standard_normal(rate).astype(np.float32)
    for _ in range(40):
        measured.clear()
        growing = growing.followed_by(second)
        piece = growing.prepared(mel, config)
        assert len(features.digests(piece)) == len(piece.frames)
        features.write(piece, len(piece.frames) - 1, len(piece.frames), room)
        assert sum(measured) <= 2 * RATE // mel.hop and len(growing._tail) < 2.1 * rate
    assert growing.count == 40 * rate


@pytest.mark.parametrize("name", ["qwen3_asr", "gemma4"])
def test_what_was_measured_too_long_ago_is_measured_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is room for a run alone, and batches are shorter than that."""
    (mel, config), samples = mel_of(name), sound(14.3)
    piece = Sound(RATE, samples).prepared(mel, config)
    expected = features_of(piece, mel, config)
    monkeypatch.setattr(audio, "_KEPT_PARTS", 1)
    monkeypatch.setattr(sound_features, "_BATCH", 3)
    assert config.kept_parts < len(piece.parts)
    again = Sound(RATE, samples).prepared(mel, config)
    np.testing.assert_array_equal(features_of(again, mel, config), expected)
    np.testing.assert_array_equal(features_of(piece, mel, config), expected)  # whose loudest is known


def test_a_call_that_fails_has_heard_nothing(speech_engines: Path) -> None:
    with LLM(speech_engines, backend="numpy", drafting=None) as llm:
        calm, troubled = (SpeechStream(llm, RATE, "en", **SHORT) for _ in range(2))
        for number in range(30):
            piece = sound(1.0) * (1 + number % 3)
            with pytest.raises(AudioError, match="infinite values or NaN"):
                troubled.hear(np.full(100, np.nan))
            try:
                found = calm.hear(piece)
            except ContextError:
                with pytest.raises(ContextError):
                    troubled.hear(piece)
                break
            assert troubled.hear(piece).response.token_ids == found.response.token_ids
            if number % 7 == 0:  # a microphone that had nothing yet
                assert troubled.hear(np.zeros(0, np.int16)).response.usage.prompt_tokens > 0
                calm.hear(np.zeros(0, np.int16))
        assert calm.seconds == troubled.seconds == number > 20
        assert calm.finish().response.token_ids == troubled.finish().response.token_ids


def test_what_a_stream_asks_for_in_vain_is_refused_before_anybody_speaks(speech_engines: Path) -> None:
    with LLM(speech_engines, backend="numpy", drafting=None) as llm:
        with pytest.raises(AudioError, match=r"the rate is 16000\.0 Hz"):
            SpeechStream(llm, 16000.0)  # type: ignore[arg-type]
        with pytest.raises(AudioError, match="there is no sound yet"):
            SpeechStream(llm, RATE).finish()
