"""Scales that are 8-bit floats times one number of the whole, found again from their products.

Weights of 4-bit floats are published with a scale of 8 bits for each 16 columns, which a number of float32 multiplies,
or divides. What a `PackedWeight` has are the products, rounded to float32. Of a scale's code only three bits are a
fraction, so that the products of one number have eight fractions at most, which tell it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

_FRACTION = 0x7FFFFF
#: What 8-bit floats are, but for a power of two.
_STEPS = np.arange(8, 16, dtype=np.float64)
#: The most numbers that the rows of one weight have: of so many layers that are multiplied as one.
_MOST = 4


class ScaleFactors(NamedTuple):
    """Scales [N, groups] as `codes` uint8, 8-bit floats without a sign, and two factors float32 [N] of each row.

    A scale is fma(v, first, v * second) of float32, v the value of its code; all codes are numbers, 127 is 480.
    """

    codes: np.ndarray
    first: np.ndarray
    second: np.ndarray


def scale_factors(scales: np.ndarray) -> ScaleFactors | None:
    """The factors of scales float32 [N, groups]; None where there are none that give their bits."""
    bits = scales.view(np.uint32)
    present = scales != 0
    if (scales < 0).any() or (present & (bits < 32 << 23)).any() or not present.any():
        return None
    seen = np.zeros(_FRACTION + 1, np.bool_)
    seen[(bits & _FRACTION)[present]] = True
    left, codes, factors = (
        np.arange(len(scales)),
        np.zeros(scales.shape, np.uint8),
        np.zeros((len(scales), 2), np.float32),
    )
    for pair in _numbers(np.flatnonzero(seen)):
        explained, own, shift = _codes(bits[left], present[left], _bits_of_products(*pair))
        codes[left[explained]], factors[left[explained]] = own, np.ldexp(pair, 10 - shift)
        left = left[~explained]
    return None if left.size else ScaleFactors(codes, *np.ascontiguousarray(factors.T))


def _codes(bits: np.ndarray, present: np.ndarray, products: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """Which rows of scales, as `bits`, have all those that are `present` among a number's eight `products` times powers
    of two; the codes of these rows; and by how much their exponents are more than the products' times steps."""
    which = np.full(_FRACTION + 1, 255, np.uint8)
    which[products & _FRACTION] = np.arange(8)
    steps = which[bits & _FRACTION]
    explained = ((steps != 255) | ~present).all(axis=1)
    bits, present, steps = bits[explained], present[explained], steps[explained] & 7
    places = (bits >> 23).astype(np.int16) - (products >> 23).astype(np.int16)[steps]
    shift = 15 - int(places[present].max(initial=-200))  # the largest scale has the largest exponent
    places += np.int16(shift)
    below = np.clip(1 - places, 0, 8).astype(np.uint8)
    steps += np.uint8(8)
    codes = np.where(places > 0, places.astype(np.uint8) << 3 | steps & 7, steps >> below) * present
    fits = ((steps & (np.uint8(1) << below) - np.uint8(1) == 0) | ~present).all(axis=1)
    explained[np.flatnonzero(explained)[~fits]] = False
    return explained, codes[fits], shift


def _numbers(fractions: np.ndarray) -> list[tuple[float, float]]:
    """Pairs of factors that explain fractions of products, those that explain most first; at most so many."""
    every = set(fractions.tolist())
    left, found = set(every), list[tuple[float, float]]()
    while left and len(found) < _MOST:
        explained = {pair: set((_bits_of_products(*pair) & _FRACTION).tolist()) for pair in _candidates(min(left))}
        best = max(explained, key=lambda pair: (len(explained[pair] & left), len(explained[pair] & every)))
        found.append(best)
        left -= explained[best]
    return found


def _candidates(fraction: int) -> Iterator[tuple[float, float]]:
    """Factors of which one of the eight products has that fraction."""
    product = 1 + fraction / (_FRACTION + 1)
    for step in _STEPS:
        for number in _around(product / step):
            yield number, 0.0
        for divisor in _around(step / product):
            first = float(np.float32(1 / divisor))
            second = float(np.float32(1 / divisor - first))
            quotients = (_STEPS / divisor).astype(np.float32).view(np.uint32)
            if np.array_equal(_bits_of_products(first, second), quotients):
                yield first, second


def _around(value: float) -> list[float]:
    """The five float32 around a value: a product's rounding leaves so many."""
    nearest = np.float32(value)
    return [float(nearest + ulps * np.spacing(nearest)) for ulps in (0, -1, 1, -2, 2)]


def _bits_of_products(first: float, second: float) -> np.ndarray:
    """The bits of fma(step, first, step * second) of float32 for each step: uint32 [8].

    float64 holds the first product; where its sum with the second would be in the middle between two numbers of
    float32 no bits are a product's.
    """
    sums = _STEPS * first + (_STEPS * second).astype(np.float32)
    bits = sums.astype(np.float32).view(np.uint32)
    middle = sums.view(np.uint64) & 0x1FFFFFFF == 0x10000000
    return np.where(middle & (second != 0), 0xFFFFFFFF, bits)
