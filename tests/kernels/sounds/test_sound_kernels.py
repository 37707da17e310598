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
from edgellm.multimodal.log_mel import MelConfig, mel_filters, mel_tables

TWIN = NumpySounds()


@pytest.mark.parametrize("mel", FAMILIES.values(), ids=FAMILIES)
def test_frames_are_measured_as_published_in_float64(mel: MelConfig) -> None:
    """As one transform of all frames, a window and filters in float64 give them: the same bits."""
    arguments = measuring(mel, sound(2.9), [100, 100, 57])
    samples, counts, slots, _, logarithms, maxima = arguments
    TWIN.measure_sounds(*arguments)
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(mel.size) / mel.size)
    filters = mel_filters(mel)
    for part, count in enumerate(counts):
        frames = [samples[part, n * mel.hop : n * mel.hop + mel.size].astype(np.float64) for n in range(count)]
        spectrum = np.fft.rfft(np.array(frames) * window, mel.transform)
        values = np.abs(spectrum) if mel.frame else spectrum.real**2 + spectrum.imag**2
        bands = values @ filters.T
        expected = np.log(bands + 0.001) if mel.frame else np.log10(np.maximum(bands, 1e-10))
        found = logarithms[slots[part], :count]
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
        assert np.isnan(logarithms[slots[part], count:]).all() and maxima[part].max() == found.max()
        alone = measuring(mel, samples[part, 20 * mel.hop :], [1])
        TWIN.measure_sounds(*alone)
        np.testing.assert_array_equal(alone[4][alone[2][0], 0], found[20])


@pytest.mark.parametrize("mel", FAMILIES.values(), ids=FAMILIES)
def test_folded_products_are_the_transform(mel: MelConfig) -> None:
    """What the kernel computes, here in float64: places n and transform - n together, times cosines and sines."""
    tables, frame = mel_tables(mel), np.random.default_rng(1).standard_normal(mel.size)
    padded = np.zeros(mel.transform + 1)
    padded[: mel.size] = frame * tables.window
    middle = mel.transform // 2
    left, right = padded[: middle + 1], padded[::-1][: middle + 1].copy()
    right[[0, middle] if mel.transform % 2 == 0 else [0]] = 0
    cosines, sines = np.float64(tables.waves)
    found = (left + right) @ cosines - 1j * ((left - right) @ sines)
    np.testing.assert_allclose(found, np.fft.rfft(padded[:-1]), atol=1e-5)


def test_features_stand_in_groups_with_zeros_behind() -> None:
    logarithms = np.arange(4 * 5 * 3, dtype=np.float32).reshape(4, 5, 3)
    slots, features = np.int32([2, 0]), np.full(3 * 4 * 3, np.nan, np.float32)
    TWIN.place_features(logarithms, slots, Placing(7, 4, 3.0, True), features)
    rows = np.zeros((12, 3), np.float32)
    rows[:7] = (np.maximum(np.concatenate((logarithms[2], logarithms[0]))[:7], 3) + 4) / 4
    np.testing.assert_array_equal(features.reshape(3, 3, 4).swapaxes(1, 2).reshape(12, 3), rows)
    TWIN.place_features(logarithms, slots, Placing(7, 1, -np.inf, False), features)
    np.testing.assert_array_equal(features.reshape(12, 3)[5:7], logarithms[0, :2])


def array(*shape: int, dtype: str = "float32") -> DeviceArray:
    return DeviceArray(1 << 20, shape, dtype)


def tables_of(transform: int, size: int, bins: int = 128) -> MelTables:
    half = transform // 2 + 1
    window, waves, filters = array(size), array(2, half, half), array(bins, half)
    return MelTables(window, waves, filters, array(bins, 2, dtype="int32"), transform, 160, 1e-10, False)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"transform": 1024, "size": 1024}, "K = 513 frequencies; expected at most 512"),
        ({"transform": 400, "size": 401}, "Z = 401, hop 160: these do not fit together"),
        ({"transform": 400, "size": 400, "samples": 16000}, r"W = 16000 samples, T = 7 tiles; expected 16240, 7"),
        ({"transform": 400, "size": 400, "tiles": 6}, r"T = 6 tiles; expected 16240, 7 for R = 100"),
        ({"transform": 1022, "size": 1022}, "bytes of .* of shared memory"),
    ],
)
def test_a_launch_that_cannot_be_is_refused(given: dict[str, Any], said: str) -> None:
    module: Any = AbsentModule(absent_gpu("sm_87", 16, 64 << 10))
    kernels, size = CudaSounds(module), given["size"]
    samples = given.get("samples", part_samples(100, 160, size))
    numbers = array(2, dtype="int32"), array(2, dtype="int32")
    rest = tables_of(given["transform"], size), array(8, 100, 128), array(2, given.get("tiles", 7))
    with pytest.raises(KernelError, match=said):
        kernels.measure_sounds(array(2, samples), *numbers, *rest)


def test_both_kernels_launch_from_their_module() -> None:
    module: Any = AbsentModule(absent_gpu("sm_87", 16, 99 << 10))
    kernels, logarithms, slots = CudaSounds(module), array(8, 100, 128), array(2, dtype="int32")
    rest = tables_of(640, 640), logarithms, array(2, 7)  # the longest transform that is read
    kernels.measure_sounds(array(2, part_samples(100, 160, 640)), slots, slots, *rest)
    kernels.place_features(logarithms, slots, Placing(200, 100, -4.0, True), array(200 * 128))
    assert [*module.sources] == [SOUNDS]
    with pytest.raises(KernelError, match="201 frames of P = 2 parts of R = 100, with room for 300"):
        kernels.place_features(logarithms, slots, Placing(201, 100, -4.0, True), array(300 * 128))
    with pytest.raises(KernelError, match="expected whole chunks of 100 frames"):
        kernels.place_features(logarithms, slots, Placing(20, 100, -4.0, True), array(150 * 128))
