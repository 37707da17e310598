"""Sounds by a formula, which goldens are made of and tests hear: no file of them is stored."""

from __future__ import annotations

import io
import wave

import numpy as np

RATE = 16000
#: One of two windows and more, one shorter than the shortest, one of a whole window.
SECONDS = (5.3, 0.3, 2.0)
#: One of whose last four frames two are there: Gemma 4 makes a row of four.
HALF_ROW = 0.63
QUESTION = "What?"
#: Of features and samples every so many-th is stored.
SPARSE = 499


def sound(seconds: float, rate: int = RATE) -> np.ndarray:
    """float32 samples of a voice of three partials that rises and falls, in syllables."""
    times = np.arange(round(seconds * rate)) / rate
    pitch = 2 * np.pi * (140 * times - 6 * np.cos(2 * np.pi * 0.7 * times))
    voice = sum(np.sin(partial * pitch) / partial for partial in (1, 4, 11))
    syllables = 0.5 - 0.5 * np.cos(2 * np.pi * 3.1 * times)
    return (0.2 * voice * syllables * (0.3 + 0.7 * np.sin(0.9 * times) ** 2)).astype(np.float32)


def places(tokens: int, vocabulary: int) -> np.ndarray:
    """Which three logits of each token are stored: [tokens, 3] int64."""
    return (np.arange(tokens)[:, None] + vocabulary // 3 * np.arange(3)) % vocabulary


def wav(samples: np.ndarray, rate: int = RATE) -> bytes:
    """A WAV file of 16 bits of samples [N] or [N, channels], by the standard library's own writer."""
    content = io.BytesIO()
    with wave.open(content, "wb") as file:
        file.setnchannels(1 if samples.ndim == 1 else samples.shape[1])
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(np.rint(samples * 32767).astype("<i2").tobytes())
    return content.getvalue()
