"""Float32 exponential and logarithm from additions, multiplications and divisions alone.

IEEE 754 fixes the result of these operations, so `shared/portable_math.cuh`, which does the same ones in the same
order, gives the same bits on every GPU; library functions differ in the last place from machine to machine. Accuracy is
about two units in the last place.
"""

from __future__ import annotations

import numpy as np

_ONE = np.float32(1)
_LOG2_E = np.float32(1.44269504)
# ln 2 in two parts: the first has so few bits that its product with an exponent is exact.
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
#: 1/7! to 1/1!, the Taylor series of exp; the next term is below 2^-27 for |r| <= ln(2) / 2.
_EXP_TERMS = tuple(_ONE / np.float32(factorial) for factorial in (5040, 720, 120, 24, 6, 2, 1))
#: 1/9 to 1/3, the series of atanh(s) / s in s^2; the next term is below 2^-28 for |s| <= 0.1716.
_ATANH_TERMS = tuple(_ONE / np.float32(odd) for odd in (9, 7, 5, 3))
_SQRT_HALF_BITS = np.int32(0x3F3504F3)
_SMALLEST_NORMAL = np.float32(1.17549435e-38)
#: exp of this times 2^32 is below 1
_NEGLIGIBLE = np.float32(-23)
#: Between these, exp is a normal number.
_LEAST, _MOST = np.float32(-87), np.float32(88)


def fixed_point_exp(differences: np.ndarray) -> np.ndarray:
    """uint64 of exp(x) * 2^32, rounded down, for each x <= 0 of a float32 array."""
    return _scaled_exp(np.maximum(differences, _NEGLIGIBLE), 32).astype(np.int64).view(np.uint64)


def exp(values: np.ndarray) -> np.ndarray:
    """The exponential of float32 values, of those below -87 and above 88 what it is there; NaN counts as -87."""
    return _scaled_exp(np.fmin(np.fmax(values, _LEAST), _MOST), 0)


def _scaled_exp(x: np.ndarray, power: int) -> np.ndarray:
    """exp(x) * 2^power; changes x."""
    exponent = np.rint(x * _LOG2_E)
    part = exponent * _LN2_HIGH
    np.subtract(x, part, out=x)
    np.multiply(exponent, _LN2_LOW, out=part)
    np.subtract(x, part, out=x)
    result = x * _EXP_TERMS[0]
    for term in _EXP_TERMS[1:]:
        np.add(result, term, out=result)
        np.multiply(result, x, out=result)
    np.add(result, _ONE, out=result)
    scale = (exponent.astype(np.int32) + np.int32(127 + power)) << np.int32(23)
    return np.multiply(result, scale.view(np.float32), out=result)


def sigmoid(values: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)) of float32 values."""
    return _ONE / (_ONE + exp(-values))


def silu(values: np.ndarray) -> np.ndarray:
    """x / (1 + exp(-x)) of float32 values."""
    return values / (_ONE + exp(-values))


def softplus(values: np.ndarray) -> np.ndarray:
    """log(1 + exp(x)) of float32 values: max(x, 0) + log1p(exp(-|x|))."""
    small = exp(-np.abs(values))
    w = _ONE + small
    rounded = w - _ONE
    logarithm = log(w) * small  # log1p(u) = log(w) * u / (w - 1) with w = 1 + u (Kahan); u where w rounds to 1
    np.divide(logarithm, rounded, out=small, where=rounded != 0)
    return np.fmax(values, np.float32(0)) + small


def fixed_point_weights(values: np.ndarray, maximum: np.ndarray | np.float32) -> np.ndarray:
    """Unnormalized probabilities of float32 `values` without NaN, as uint64 in fixed point.

    2^32 stands for the probability of the maximum, infinite or not. `maximum` is the largest value of each row, of a
    shape that broadcasts against `values`.
    """
    with np.errstate(invalid="ignore"):  # inf - inf, replaced below
        differences = np.subtract(values, maximum)
    differences[values == maximum] = 0
    return fixed_point_exp(differences)


def log(values: np.ndarray) -> np.ndarray:
    """Natural logarithm of positive finite float32 values; subnormal ones count as the smallest normal one."""
    bits = np.maximum(values, _SMALLEST_NORMAL).view(np.int32)
    exponent = (bits - _SQRT_HALF_BITS) >> np.int32(23)
    f = (bits - (exponent << np.int32(23))).view(np.float32) - _ONE
    s = f / (f + np.float32(2))
    square = s * s
    series = square * _ATANH_TERMS[0]
    for term in _ATANH_TERMS[1:]:
        np.add(series, term, out=series)
        np.multiply(series, square, out=series)
    np.add(s, s, out=s)
    np.multiply(series, s, out=series)
    np.add(series, s, out=series)
    scale = exponent.astype(np.float32)
    np.add(scale * _LN2_LOW, series, out=series)
    np.multiply(scale, _LN2_HIGH, out=scale)
    return np.add(scale, series, out=series)


def gumbel(words: np.ndarray) -> np.ndarray:
    """float32 draws of the standard Gumbel distribution, -log(-log1p(-u)), from random uint32 words.

    u = (word + 0.5) * 2^-32 in float32, at most 1 - 2^-24. Small u, which make large draws, keep their full
    precision: log1p(-u) = log(w) * u / (1 - w) with w = 1 - u (Kahan).
    """
    u = words.astype(np.float32)
    np.add(u, np.float32(0.5), out=u)
    np.multiply(u, np.float32(2.0**-32), out=u)
    np.minimum(u, np.float32(1 - 2.0**-24), out=u)
    w = _ONE - u
    rounded = _ONE - w
    exponential = -log(w) * u
    # Where w rounds to 1, log1p(-u) is -u in float32.
    np.divide(exponential, rounded, out=u, where=rounded != 0)
    return -log(u)
