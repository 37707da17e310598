"""The sound kernels in NumPy: they define what `CudaSounds` computes, and run where there is no GPU."""

from __future__ import annotations

import numpy as np

from edgellm.kernels.contracts import Contracts
from edgellm.kernels.sounds.contract import TILE, MelTables, SoundKernels

_check = Contracts(SoundKernels, np.ndarray)


class NumpySounds:
    """See `edgellm.kernels.sounds.contract.SoundKernels`."""

    def measure_sounds(self, samples, counts, slots, tables, logarithms, maxima):
        sizes = _check("measure_sounds", samples, counts, slots, tables, logarithms, maxima)
        tiles = np.full((sizes["P"], sizes["T"] * TILE), -np.inf, np.float32)
        for given, count, slot, own in zip(samples, counts, slots, tiles, strict=True):
            frames = np.lib.stride_tricks.sliding_window_view(given.astype(np.float64), sizes["Z"])[:: tables.hop]
            spectrum = np.fft.rfft(frames[:count] * tables.window, tables.transform)
            if tables.magnitudes:
                found = np.log(_in_bands(np.abs(spectrum), tables) + tables.least)
            else:
                powers = _in_bands(spectrum.real**2 + spectrum.imag**2, tables)
                found = np.log10(np.maximum(powers, tables.least))
            logarithms[slot, :count] = found.T
            own[:count] = logarithms[slot, :count].max(axis=1, initial=-np.inf)
        maxima[...] = tiles.reshape(*maxima.shape, TILE).max(axis=2)

    def place_features(self, logarithms, slots, placing, features):
        sizes = _check("place_features", logarithms, slots, placing, features)
        frames, chunk, _, scaled = placing
        rows = np.zeros((sizes["N"] // sizes["B"], sizes["B"]), np.float32)
        rows[:frames] = logarithms[slots].reshape(-1, sizes["B"])[:frames]
        if scaled:
            rows[:frames] = (np.maximum(rows[:frames], np.float32(placing.floor)) + 4) / 4
        features[...] = rows.reshape(-1, chunk, sizes["B"]).swapaxes(1, 2).reshape(-1)


def _in_bands(values: np.ndarray, tables: MelTables) -> np.ndarray:
    """The filters times `values` [n, K] of n frames: [B, n]. Of the few frequencies that a band has alone: matrices so
    small keep BLAS's threads waiting for each other, tens of times as long on busy cores."""
    first, end = tables.ranges.T
    bands = np.repeat(np.arange(len(first)), end - first)
    starts = np.cumsum(end - first) - (end - first)
    places = np.arange(len(bands)) - np.repeat(starts - first, end - first)
    return np.add.reduceat(values.T[places] * tables.filters[bands, places][:, None], starts, axis=0)
