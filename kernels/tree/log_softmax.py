"""The normalizer of a log-softmax in NumPy, the same bits as log_softmax.cuh computes on every GPU.

Floating-point sums depend on their order, which on a GPU is the schedule's. So exponentials are truncated to fixed
point, 32 bits after the point, and summed exactly; the operations that make them are those that IEEE 754 rounds alike
everywhere. `portable_math.fixed_point_exp` is the more exact and several times slower relative of `_weigh`.
"""

from __future__ import annotations

import numpy as np

from edgellm.kernels.portable_math import log

#: Ids whose exponentials are taken relative to a common maximum.
CHUNK = 4096

_LOG2_E = np.float32(1.44269504)
_NOTHING = np.float32(-100)  # exp of it times 2^32 is below 1, and its power of two is a float32
#: Added to a float32 of small magnitude, 1.5 * 2^23 leaves its nearest integer in the low bits of the mantissa.
_ROUNDING = np.float32(12582912)
_EXPONENT_SHIFT = np.int32(23)
#: 2^32 times the coefficients of f^5 to f^0 of a polynomial for 2^f, |f| <= 1/2, exact at 0; its largest relative error
#: there is the least possible, 9.1e-8 (Lawson's algorithm).
_TERMS = tuple(
    np.float32(term * 2.0**32) for term in (0.0013264727, 0.0096715130, 0.055507336, 0.24022242, 0.69314700, 1.0)
)
_INVERSE_ONE = np.float32(2.0**-32)
_LOW_BITS, _UPPER_SHIFT = np.uint64(22), np.uint64(10)
_LOW_MASK, _FULL_SHIFT = np.uint64((1 << 22) - 1), np.uint64(32)
#: How many values are worked on at a time: two such arrays stay in a core's second-level cache.
_BLOCK = 1 << 16


class LogSoftmax:
    """Computes normalizers of rows; keeps its scratch memory from call to call, so it is not thread-safe."""

    def __init__(self) -> None:
        #: Of the scratch memory: rows, chunks, ids of a chunk.
        self._shape: tuple[int, ...] = (0, 0, 0)

    def normalizers(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The maximum m [n] and log(sum of exp(value - m)) [n] of `rows` [n, V], all float32.

        The log-probability of a value is (value - m) - log sum. A row of -inf has m = -inf; infinite values of a row
        share probability 1. For a row with NaN, m is NaN and the other has no meaning.
        """
        count, size = rows.shape
        block = max(1, _BLOCK // size)
        if count <= block:
            return self._block(rows)
        parts = [self._block(rows[start : start + block]) for start in range(0, count, block)]
        maxima, log_sums = zip(*parts, strict=True)
        return np.concatenate(maxima), np.concatenate(log_sums)

    def _block(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        count, size = rows.shape
        width = min(size, CHUNK)
        whole, rest = divmod(size, width)
        split = whole * width
        shape = count, whole + (rest > 0), width
        if shape != self._shape:
            self._shape, self._ones = shape, np.ones(width)
            self._values, self._polynomial = np.empty(shape, np.float32), np.empty(shape, np.float32)
            self._exponents, self._sums = np.empty(shape, np.int32), np.empty(shape)
        values, flat = self._values, self._values.reshape(count, -1)
        maxima = np.empty(values.shape[:2], np.float32)
        source = rows[:, :split].reshape(count, whole, width)
        source.max(axis=2, out=maxima[:, :whole])
        if rest:
            rows[:, split:].max(axis=1, out=maxima[:, whole])
        finite = np.isfinite(maxima).all()
        references = maxima if finite else np.where(maxima == -np.inf, np.float32(0), maxima)
        with np.errstate(invalid="ignore", over="ignore"):
            np.subtract(source, references[:, :whole, None], out=values[:, :whole])
            if rest:
                np.subtract(rows[:, split:], references[:, whole:], out=flat[:, split:size])
                flat[:, size:] = _NOTHING
            if not finite:
                values[np.isnan(values)] = 0  # infinity less itself
            _weigh(values, self._polynomial, self._exponents)
        np.copyto(self._sums, values)  # sums of integers below 2^53 are exact in float64, in any order
        return _combine(maxima, np.dot(self._sums, self._ones).astype(np.uint64))


def _weigh(values: np.ndarray, polynomial: np.ndarray, exponents: np.ndarray) -> None:
    """Replace each x <= 0 of `values` float32 by exp(x) * 2^32, rounded down; the others are scratch of its shape."""
    if values.min() < _NOTHING:
        np.maximum(values, _NOTHING, out=values)
    np.multiply(values, _LOG2_E, out=values)
    np.add(values, _ROUNDING, out=polynomial)
    np.left_shift(polynomial.view(np.int32), _EXPONENT_SHIFT, out=exponents)
    np.subtract(polynomial, _ROUNDING, out=polynomial)
    np.subtract(values, polynomial, out=values)
    np.multiply(values, _TERMS[0], out=polynomial)
    for term in _TERMS[1:-1]:
        np.add(polynomial, term, out=polynomial)
        np.multiply(polynomial, values, out=polynomial)
    np.add(polynomial, _TERMS[-1], out=polynomial)
    np.add(polynomial.view(np.int32), exponents, out=exponents)
    np.trunc(exponents.view(np.float32), out=values)


def _combine(maxima: np.ndarray, sums: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Row maxima [n] and log sums [n] from the `maxima` float32 and `sums` uint64 [n, chunks] of their chunks."""
    maximum = maxima.max(axis=1)
    if maxima.shape[1] > 1:
        with np.errstate(invalid="ignore", over="ignore"):
            differences = maxima - maximum[:, None]
            differences[maxima == maximum[:, None]] = 0  # infinite ones too
            _weigh(differences, np.empty_like(differences), np.empty_like(differences, np.int32))
            scales = differences.astype(np.uint64)
        high = ((sums >> _LOW_BITS) * scales) >> _UPPER_SHIFT
        sums = high + (((sums & _LOW_MASK) * scales) >> _FULL_SHIFT)
    return maximum, log(sums.sum(axis=1, dtype=np.uint64).astype(np.float32) * _INVERSE_ONE)
