"""Arguments of the sound kernels, for every family of features that is read."""

from __future__ import annotations

from typing import Any

import numpy as np

from edgellm.kernels.sounds.contract import TILE, part_samples
from edgellm.multimodal.log_mel import MelConfig, mel_tables

#: Qwen3-ASR's, Voxtral's and Qwen2-Audio's are Whisper's.
FAMILIES = {"whisper": MelConfig(16000, 400, 160, 8000, 128), "gemma4": MelConfig(16000, 512, 160, 161, 128, 1, 320)}


def measuring(mel: MelConfig, samples: np.ndarray, counts: list[int]) -> list[Any]:
    """Those of `measure_sounds`, of parts of so many frames one behind the other, into slots of the reverse order."""
    given = np.zeros((len(counts), part_samples(mel.part, mel.hop, mel.size)), np.float32)
    for part, count in enumerate(counts):
        own = samples[part * mel.part * mel.hop :][: part_samples(count, mel.hop, mel.size)]
        given[part, : len(own)] = own
    slots = np.arange(len(counts), dtype=np.int32)[::-1].copy()
    logarithms = np.full((len(counts) + 1, mel.part, mel.bins), np.nan, np.float32)
    maxima = np.zeros((len(counts), -(-mel.part // TILE)), np.float32)
    return [given, np.array(counts, np.int32), slots, mel_tables(mel), logarithms, maxima]
