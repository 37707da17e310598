"""Rounds the columns of a weight in turn, so that each makes up for what rounding those before did to the outputs.

The idea is that of Frantar et al. 2022 (GPTQ). With the inputs' second moments H = R R^T, R an upper triangle, the
squared error of an output is |(w - w') R|^2 for a row w of the weight: element k of the product depends on columns 0 to
k alone. In turn, each column takes the value that brings its element nearest to 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from edgellm.engines.quantizer.arithmetic import NUMPY, Arithmetic
from edgellm.engines.quantizer.rounding import side_by_side
from edgellm.engines.quantizer.scaling import sampled_rows
from edgellm.engines.quantizer.statistics import InputStatistics
from edgellm.kernels.quantization.packed_weight import PackedWeight, WeightFormat

#: Shares of the mean square that are added to each: few rows say little about directions that they lack.
_DAMPINGS = (0.01, 0.1, 1.0)
#: Rows of a weight that a processor computes at a time, and columns between which errors are carried one by one.
_ROWS, _BLOCK = 1024, 32


@dataclass(frozen=True)
class Span:
    """Columns `columns` of a weight, the `order` [S] in which they are rounded, and the triangle of their inputs'
    moments in this order: its `diagonal` float32 [S], by which the columns of `triangle` float32 [S, S] are divided."""

    columns: slice
    order: np.ndarray
    diagonal: np.ndarray
    triangle: np.ndarray


def quantize_in_turn(
    weights: np.ndarray, format: WeightFormat, seen: InputStatistics, arithmetic: Arithmetic = NUMPY
) -> PackedWeight:
    """The weight float32 [N, K] in an integer `format`: scales as `quantize_rows` finds them, codes in turn.

    How much the moments count against the inputs' mean squares (the damping; in the end they do not count at all, and
    codes are the nearest) is tried with some rows, and decided by the error of outputs for inputs that are not in them.
    """

    def quantized(rows: np.ndarray, damping: float | None) -> PackedWeight:
        if damping is None:
            return arithmetic.quantize_rows(rows, format, seen.factors)
        given = spans(seen.moments, damping)
        factors = np.empty(rows.shape[1], np.float32)
        for span in given:
            factors[span.columns][span.order] = span.diagonal
        return round_in_turn(rows, arithmetic.quantize_rows(rows, format, factors), given)

    sampled = sampled_rows(weights)

    def error(damping: float | None) -> float:
        return seen.squared_outputs(quantized(sampled, damping).values() - sampled)

    return quantized(weights, min((*_DAMPINGS, None), key=error))


def spans(moments: Sequence[np.ndarray], damping: float) -> list[Span]:
    """Columns with large inputs come first: what is left to make up for is then found in many others."""
    found, start = [], 0
    for each in moments:
        mean = float(np.trace(each, dtype=np.float64)) / len(each) or 1.0
        order = np.argsort(-np.diagonal(each), kind="stable")
        ordered = each[np.ix_(order[::-1], order[::-1])].astype(np.float64)
        ordered[np.diag_indices_from(ordered)] += damping * mean
        triangle = np.ascontiguousarray(np.linalg.cholesky(ordered)[::-1, ::-1], np.float32)
        diagonal = triangle.diagonal().copy()
        triangle /= diagonal
        found.append(Span(slice(start, start + len(each)), order, diagonal, triangle))
        start += len(each)
    return found


def round_in_turn(weights: np.ndarray, packed: PackedWeight, given: Sequence[Span]) -> PackedWeight:
    """The weight float32 [N, K] with the scales and zero points of `packed`, its codes found in turn in each span."""
    codes = np.empty_like(packed.codes)

    def round_rows(start: int) -> None:
        for span in given:
            own = slice(start, start + _ROWS), span.columns
            codes[own] = _codes(weights[own], packed.rows(start, start + _ROWS), span)

    side_by_side(round_rows, range(0, len(weights), _ROWS))
    return replace(packed, codes=codes)


def _codes(weights: np.ndarray, packed: PackedWeight, span: Span) -> np.ndarray:
    """Codes uint8 [n, S] of the span's columns `weights` [n, S], under the scales of `packed`, of n whole rows."""
    columns = np.arange(span.columns.start, span.columns.stop)[span.order]
    group = packed.format.group or packed.shape[1]
    last, scales = (1 << packed.format.bits) - 1, packed.scales.T[columns // group]
    zeros = np.full_like(scales, last + 1 >> 1)
    if packed.zeros is not None:
        zeros[...] = packed.zeros.T[columns // group]
    wanted = np.ascontiguousarray(weights.T[span.order])
    errors, codes = np.empty_like(wanted), np.empty(wanted.shape, np.uint8)
    triangle = span.triangle
    for start in range(0, len(wanted), _BLOCK):
        stop = min(len(wanted), start + _BLOCK)
        carried = np.dot(triangle[:start, start:stop].T, errors[:start])
        for column in range(start, stop):
            value = wanted[column] + carried[column - start]
            code = np.clip(np.rint(value / scales[column] + zeros[column]), 0, last)
            codes[column] = code
            errors[column] = wanted[column] - (code - zeros[column]) * scales[column]
            carried[column - start + 1 :] += triangle[column, column + 1 : stop, None] * errors[column]
    result = np.empty(weights.shape, np.uint8)
    result[:, span.order] = codes.T
    return result
