"""Rounds the rows of a weight to integers of 4 or 8 bits, each scale as the search of the clipping finds it best."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

import numpy as np

from edgellm.engines.backends.numpy_backend import one_blas_thread
from edgellm.engines.formats.tensors import as_float32, convert
from edgellm.kernels.quantization.packed_weight import PackedWeight, WeightFormat

_Item = TypeVar("_Item")
_Found = TypeVar("_Found")
#: Shares of the full scale, which the largest weight of a group asks for.
Clipping = Sequence[float]
#: Those that are tried. Above 1 there is room for a zero point that is rounded, and for a grid that fits the columns
#: with the largest inputs.
CLIPPING: Clipping = tuple(1.25 - step / 64 for step in range(42))
#: Those that are tried where nothing says which columns matter: large weights often stand where large inputs do. With
#: zero points, which the largest weights fill from end to end, none but the full scale was found to gain anything.
BLIND_CLIPPING: Clipping = CLIPPING[12:27]
BLIND_WITH_ZEROS: Clipping = (1.0,)
#: Fewer, for where much else is tried at the same time.
COARSE_CLIPPING = (1.07, 1.0, 0.93, 0.86, 0.79, 0.72)
#: How far beside the nearest a zero point is tried.
_ZERO_STEPS = (0, -1, 1)
#: Elements of a weight that are computed with at a time: a few arrays of so many stay in a processor's cache.
_BLOCK = 1 << 16
#: Scales are changed by no larger factor afterwards.
_MOST_LONGER = 1.25
_SMALLEST = {"float16": 2.0**-24, "bfloat16": 2.0**-126, "float32": 2.0**-126}


def quantize_rows(
    weights: np.ndarray, format: WeightFormat, factors: np.ndarray | None = None, clipping: Clipping = CLIPPING
) -> PackedWeight:
    """The weight float32 [N, K] in an integer `format`, each group of columns of a row by itself.

    Without zero points a code q stands for (q - 2^(b-1)) s; the full scale is s = max|w| / (2^(b-1) - 1), and as the
    codes reach one step further to one side, its negative is tried too. With them a code stands for (q - z) s; the
    full scale is (max(w, 0) - min(w, 0)) / (2^b - 1), and z = -min(w, 0) / s rounded, or one beside it. Codes are
    w / s rounded to nearest, ties to even, and clipped. Of the scales that are a share from `clipping` of the full one,
    rounded to the format's dtype, each group gets that of the least squared error (as Nagel et al. 2021 set ranges);
    the first of equals.

    The error of a group is |(w - its values) F|^2 with `factors` F float32 [groups, size, size], or diagonal ones whose
    elements are float32 [K]; None: all 1. With F F^T the mean of x x^T over inputs x it is what the group adds to the
    squared error of the output. Raises ValueError for a group that does not divide K.
    """
    rows, columns = weights.shape
    group = format.group or columns
    if columns % group:
        raise ValueError(f"groups of {group} do not divide {columns} columns")
    counts = columns // group
    factors = _of_groups(factors, counts)
    codes = np.empty((rows, columns), np.uint8)
    scales, zeros = np.empty((rows, counts), np.float32), np.empty((rows, counts), np.uint8)

    def quantize_block(block: tuple[slice, slice]) -> None:
        own, groups = block
        part = slice(groups.start * group, groups.stop * group)
        grouped = _grouped(weights[own, part], group)
        found, zero = _search(grouped, format, None if factors is None else factors[groups], clipping)
        values = np.rint(grouped / found[..., None])
        values += zero[..., None]
        np.clip(values, 0, (1 << format.bits) - 1, out=values)
        codes[own, part] = values.transpose(1, 0, 2).reshape(-1, part.stop - part.start)
        scales[own, groups], zeros[own, groups] = found.T, zero.T

    side_by_side(quantize_block, _blocks(rows, counts, group))
    return PackedWeight(format, codes, scales, zeros if format.zeros else None)


def unbiased(weights: np.ndarray, packed: PackedWeight, factors: np.ndarray | None = None) -> PackedWeight:
    """The weight float32 [N, K] with the codes of `packed` and scales so that no group is made smaller on the whole.

    Values w' of the least squared error are shorter than the weights w of their group: the error leans against w. What
    else errors are averages out over groups, but this makes every output smaller by its share, in each layer anew (1 to
    3 % with 4 bits). Scales times |w F|^2 / (w F . w' F) leave the error no part along w, and make it hardly larger;
    `factors` F as `quantize_rows` takes them.
    """
    (rows, columns), format = weights.shape, packed.format
    group = format.group or columns
    factors = _of_groups(factors, columns // group)
    scales = np.empty_like(packed.scales)
    middle = np.float32(1 << format.bits - 1)

    def scale_block(block: tuple[slice, slice]) -> None:
        own, groups = block
        part = slice(groups.start * group, groups.stop * group)
        wanted, steps = _grouped(weights[own, part], group), _grouped(packed.codes[own, part], group)
        steps -= middle if packed.zeros is None else packed.zeros[own, groups].T[..., None]
        if factors is not None:
            wanted, steps = _times(wanted, factors[groups]), _times(steps, factors[groups])
        found = packed.scales[own, groups].T
        along = np.einsum("grk,grk->gr", wanted, steps) * found
        longer = np.einsum("grk,grk->gr", wanted, wanted) / np.where(along > 0, along, np.inf)
        longer[~((longer > 1 / _MOST_LONGER) & (longer < _MOST_LONGER))] = 1  # of a group whose codes say little
        scales[own, groups] = rounded(found * longer, format.dtype).T

    side_by_side(scale_block, _blocks(rows, columns // group, group))
    return replace(packed, scales=scales)


def side_by_side(function: Callable[[_Item], _Found], items: Iterable[_Item]) -> list[_Found]:
    """What the function gives for each item, on all processors: NumPy lets other threads run as it computes."""
    with one_blas_thread(), ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(function, items))


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """Float32 values rounded to `dtype`, as float32."""
    return as_float32(convert(values, "float32", dtype)[0], dtype)


def _blocks(rows: int, counts: int, group: int) -> Iterator[tuple[slice, slice]]:
    """Rows and groups that are computed at a time."""
    high = min(rows, max(1, _BLOCK // group))
    wide = max(1, _BLOCK // (high * group))
    for start in range(0, rows, high):
        for first in range(0, counts, wide):
            yield slice(start, min(rows, start + high)), slice(first, min(counts, first + wide))


def _grouped(values: np.ndarray, group: int) -> np.ndarray:
    """A copy of [R, groups * size], float32 [groups, R, size]."""
    return values.reshape(len(values), -1, group).transpose(1, 0, 2).astype(np.float32, order="C")


def _of_groups(factors: np.ndarray | None, count: int) -> np.ndarray | None:
    """Factors as `quantize_rows` takes them, of each of so many groups: [groups, size or 1, size]."""
    return factors.reshape(count, 1, -1) if factors is not None and factors.ndim == 1 else factors


def _search(
    weights: np.ndarray, format: WeightFormat, factors: np.ndarray | None, clipping: Clipping
) -> tuple[np.ndarray, np.ndarray]:
    """The best of groups [groups, R, size]: scales and zero points (or the middle of the codes), [groups, R]."""
    last = (1 << format.bits) - 1
    middle = np.float32(last + 1 >> 1)
    low, high = np.minimum(weights.min(-1), 0), np.maximum(weights.max(-1), 0)
    largest = (high - low) / np.float32(last) if format.zeros else np.maximum(high, -low) / (middle - 1)
    best, scales = np.full(largest.shape, np.inf, np.float32), np.ones_like(largest)
    zeros = np.zeros_like(largest)
    steps, whole, error = np.empty_like(weights), np.empty_like(weights), np.empty_like(weights)
    for share in clipping:
        tried = np.maximum(rounded(largest * np.float32(share), format.dtype), np.float32(_SMALLEST[format.dtype]))
        tried[largest == 0] = 1  # of a group of zeros
        np.divide(weights, tried[..., None], out=steps)
        np.rint(steps, out=whole)
        if format.zeros:
            nearest = np.rint(-low * np.float32(share) / tried)
            places = [(np.clip(nearest + np.float32(beside), 0, last), 1) for beside in _ZERO_STEPS]
        else:  # below the middle there is one code more than above it: of a negative scale it is above
            places = [(middle, 1), (middle - 1, -1)]
        for zero, sign in places:
            np.clip(whole, -zero[..., None], last - zero[..., None], out=error)
            error -= steps
            scaled = error if factors is None else _times(error, factors)
            found = np.einsum("grk,grk->gr", scaled, scaled) * (tried * tried)
            better = found < best
            for kept, new in ((best, found), (scales, sign * tried), (zeros, zero)):
                np.copyto(kept, new, where=better)
    return scales, zeros if format.zeros else np.full_like(zeros, middle)


def _times(values: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """Values [groups, R, size] times `factors`, in place where these are diagonal."""
    return np.multiply(values, factors, out=values) if factors.shape[1] == 1 else np.matmul(values, factors)
