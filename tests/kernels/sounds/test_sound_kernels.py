"""The twins of the sound kernels against transforms written out, and what launchers refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sound_arguments import FAMILIES, measuring
from synthetic_sound import sound

from edgellm.engines.building.needed_kernels import AbsentModule
from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.errors import KernelError
from edgellm.kernels.gpu import absent_gpu
from edgellm.kernels.sounds.contract import MelTables, Placing, part_samples
from edgellm.kernels.sounds.launcher import SOUNDS, CudaSounds
from edgellm.kernels.sounds.twin import NumpySounds
from edgellm.multimodal.log_mel import MelConfig, mel_filters

TWIN = NumpySounds()


@pytest.mark.parametrize("mel", FAMILIES.values(), ids=FAMILIES)
def test_frames_are_measured_as_published(mel: MelConfig) -> None:
    samples, counts, slots, _, logarithms, maxima = arguments = measuring(mel, sound(2.9), [100, 57])
    TWIN.measure_sounds(*arguments)
    times = np.arange(mel.size)
    angles = 2 * np.pi / mel.transform * times[:, None] * np.arange(mel.transform // 2 + 1)
    for part, count in enumerate(counts):
        frames = np.array([samples[part, n * mel.hop : n * mel.hop + mel.size] for n in range(count)], np.float64)
        frames *= 0.5 - 0.5 * np.cos(2 * np.pi / mel.size * times)
        values = np.hypot(frames @ np.cos(angles), frames @ np.sin(angles)) ** (1 if mel.frame else 2)
        bands = values @ mel_filters(mel).T
        expected = np.log(bands + 0.001) if mel.frame else np.log10(np.maximum(bands, 1e-10))
        found = logarithms[slots[part], :count]
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
        assert np.isnan(logarithms[slots[part], count:]).all() and maxima[part].max() == found.max()


def test_features_stand_in_groups_with_zeros_behind() -> None:
    logarithms = np.arange(4 * 5 * 3, dtype=np.float32).reshape(4, 5, 3)
    slots, features = np.int32([2, 0]), np.full(3 * 4 * 3, np.nan, np.float32)
    TWIN.place_features(logarithms, slots, Placing(7, 4, 33.0, True), features)
    rows = np.zeros((12, 3), np.float32)
    rows[:7] = (np.maximum(np.concatenate((logarithms[2], logarithms[0]))[:7], 33) + 4) / 4
    np.testing.assert_array_equal(features.reshape(3, 3, 4).swapaxes(1, 2).reshape(12, 3), rows)
    TWIN.place_features(logarithms, slots, Placing(7, 1, 0.0, False), features)
    np.testing.assert_array_equal(features.reshape(12, 3)[5:8], [*logarithms[0, :2], [0, 0, 0]])


def array(*shape: int, dtype: str = "float32") -> DeviceArray:
    return DeviceArray(1 << 20, shape, dtype)


@pytest.mark.parametrize(
    ("transform", "size", "samples", "said"),
    [
        (640, 640, part_samples(100, 160, 640), None),  # the longest that is read
        (1024, 1024, 1, "K = 513, Z = 1024, hop 160: expected at most 512 frequencies"),
        (400, 401, 1, "K = 201, Z = 401, hop 160: expected"),
        (400, 400, 16000, r"W = 16000 samples, T = 7 tiles; expected 16240, 7"),
    ],
)
def test_launches_take_what_fits(transform: int, size: int, samples: int, said: str | None) -> None:
    module: Any = AbsentModule(absent_gpu("sm_87", 16, 99 << 10))
    kernels, numbers, half = CudaSounds(module), array(2, dtype="int32"), transform // 2 + 1
    tables = array(size), array(2, half, half), array(128, half), array(128, 2, dtype="int32")
    measured = MelTables(*tables, transform, 160, 1e-10, False), array(8, 100, 128), array(2, 7)
    if said is not None:
        with pytest.raises(KernelError, match=said):
            kernels.measure_sounds(array(2, samples), numbers, numbers, *measured)
        return
    kernels.measure_sounds(array(2, samples), numbers, numbers, *measured)
    kernels.place_features(measured[1], numbers, Placing(200, 100, -4.0, True), array(200 * 128))
    assert [*module.sources] == [SOUNDS]
    for frames, room in ((201, 300), (20, 150)):
        with pytest.raises(KernelError, match=f"{frames} frames in chunks of 100, room for {room}"):
            kernels.place_features(measured[1], numbers, Placing(frames, 100, -4.0, True), array(room * 128))
