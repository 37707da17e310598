"""Packed weights as their files have them: codes in words that no one has unpacked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from edgellm.engines.errors import EngineError
from edgellm.kernels.quantization.block_codes import BLOCK_CODES, block_codes
from edgellm.kernels.quantization.packed_weight import LEVEL_COLUMNS, Levels, PackedWeight, WeightFormat
from edgellm.kernels.quantization.turn import AWQ_PLACES

#: How codes lie: one in each byte, in the rows' order; or in words of 32 bits (or bytes), the lowest bits first, of
#: neighbouring columns, each row's words side by side ("rows") or each column's ("columns"); or of eight neighbouring
#: rows at `AWQ_PLACES`, each column's words side by side ("awq"); or in bytes of two rows, the first one's code in the
#: lower half, as two's complements ("pairs"); or with all else in blocks of a kind of `BLOCK_CODES`, by its name.
Arrangement = str


@dataclass(frozen=True)
class StoredCodes:
    """Codes of `bits` of a weight of `shape` [N, K]: `data` is a view of the file, of two dimensions."""

    data: np.ndarray
    arrangement: Arrangement
    bits: int
    shape: tuple[int, int]

    def unpacked(self) -> np.ndarray:
        """uint8 [N, K], a code each."""
        rows, columns = self.shape
        if self.arrangement == "bytes":
            return self.data
        if self.arrangement in BLOCK_CODES:
            return block_codes(self.arrangement, self.data)
        if self.arrangement == "rows":
            return unpacked(self.data, self.bits, 1, columns)
        if self.arrangement == "pairs":
            codes = np.empty((rows, columns), np.uint8)
            codes[::2], codes[1::2] = self.data & 15, self.data >> 4
            return codes ^ 8
        if self.arrangement == "columns":
            return np.ascontiguousarray(unpacked(self.data, self.bits, 0, columns).T)
        return np.ascontiguousarray(unpacked(self.data, self.bits, 1, rows)[:, awq_order(rows)].T)


@dataclass(frozen=True)
class StoredWeight:
    """A `PackedWeight` whose `codes` are as they are published: of one tensor, or of several whose rows follow each
    other. Their columns are those of the file: `order` has yet to be applied to them. `read_levels` gives
    `levels`, which stand for `own_scales` and `own_minima`: all are made where something asks."""

    format: WeightFormat
    codes: tuple[StoredCodes, ...]
    own_scales: np.ndarray | None
    zeros: np.ndarray | None = None
    order: np.ndarray | None = None
    input_scales: np.ndarray | None = None
    own_minima: np.ndarray | None = None
    read_levels: Callable[[], Levels] | None = None

    @cached_property
    def levels(self) -> Levels | None:
        return self.read_levels and self.read_levels()

    @cached_property
    def _products(self) -> np.ndarray:
        assert self.levels is not None and self.format.group is not None
        return self.levels.products(self.format.group)

    @property
    def scales(self) -> np.ndarray:
        """float32 [N, groups]."""
        return self._products[..., 0] if self.own_scales is None else self.own_scales

    @property
    def minima(self) -> np.ndarray | None:
        """float32 [N, groups], or None."""
        return self._products[..., 1] if self.format.minima and self.own_minima is None else self.own_minima

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.shape[0] for part in self.codes), self.codes[0].shape[1]

    def unpacked(self) -> PackedWeight:
        """The weight, with a byte for each code."""
        codes = [part.unpacked() for part in self.codes]
        whole = codes[0] if len(codes) == 1 else np.concatenate(codes)
        if self.order is not None:
            whole = np.ascontiguousarray(whole[:, self.order])
        beside = self.zeros, self.order, self.input_scales, self.minima, self.levels
        return PackedWeight(self.format, whole, self.scales, *beside)


def rows_of(weight: StoredWeight, ranges: Sequence[tuple[int, int]]) -> StoredWeight:
    """Some ranges of a weight's rows, one behind the other; with a byte for each code."""

    def own(values: np.ndarray) -> np.ndarray:
        return np.concatenate([values[begin:end] for begin, end in ranges])

    return _part(weight, own, own, own(np.arange(weight.shape[0])).size, weight.shape[1])


def columns_of(weight: StoredWeight, begin: int, end: int) -> StoredWeight:
    """A range of a weight's columns; with a byte for each code. Raises EngineError where groups do not end there, and
    where columns stand in another order than inputs."""
    group, step = weight.format.group or 1, weight.format.unit
    if weight.order is not None:
        raise EngineError("weights whose columns are permuted (act order) are not shared by GPUs along their columns")
    if begin % step or end % step:
        raise EngineError(f"columns {begin} to {end} of packed weights are no whole groups of {step}")

    def own(values: np.ndarray) -> np.ndarray:
        return values[:, begin // group : end // group] if weight.format.group else values

    found = _part(weight, own, lambda codes: codes[:, begin:end], weight.shape[0], end - begin)
    levels, scales = weight.levels, weight.input_scales
    if levels is not None:
        kept = Levels(levels.factors[:, begin // LEVEL_COLUMNS : end // LEVEL_COLUMNS], own(levels.numbers))
        found = replace(found, read_levels=lambda: kept)
    return found if scales is None else replace(found, input_scales=scales[begin:end])


def _part(
    weight: StoredWeight,
    own: Callable[[np.ndarray], np.ndarray],
    of_codes: Callable[[np.ndarray], np.ndarray],
    rows: int,
    columns: int,
) -> StoredWeight:
    codes = np.ascontiguousarray(of_codes(np.concatenate([part.unpacked() for part in weight.codes])))
    scales, zeros, minima = (
        None if values is None else own(values) for values in (weight.own_scales, weight.zeros, weight.own_minima)
    )
    levels = None if weight.levels is None else Levels(*map(own, weight.levels))
    read, stored = (lambda: levels) if levels else None, StoredCodes(codes, "bytes", 8, (rows, columns))
    return replace(weight, codes=(stored,), own_scales=scales, zeros=zeros, own_minima=minima, read_levels=read)


def may_fuse(one: StoredWeight, other: StoredWeight) -> bool:
    """Whether two are rows of one weight: by their formats, and the order and scales of their inputs."""
    same = one.format == other.format and _equal(one.order, other.order)
    return same and _equal(one.input_scales, other.input_scales)


def fused(parts: Sequence[StoredWeight]) -> StoredWeight:
    """Weights that `may_fuse` as one, the rows of each behind those before."""
    first = parts[0]
    if len(parts) == 1:
        return first
    codes = tuple(codes for part in parts for codes in part.codes)
    scales, minima = _joined([part.own_scales for part in parts]), _joined([part.own_minima for part in parts])
    zeros, found = _joined([part.zeros for part in parts]), [part.read_levels for part in parts if part.read_levels]
    read = (lambda: Levels(*map(np.concatenate, zip(*(read() for read in found), strict=True)))) if found else None
    return replace(first, codes=codes, own_scales=scales, zeros=zeros, own_minima=minima, read_levels=read)


def _joined(parts: Sequence[np.ndarray | None]) -> np.ndarray | None:
    found = [part for part in parts if part is not None]
    return np.concatenate(found) if found else None


def _equal(one: np.ndarray | None, other: np.ndarray | None) -> bool:
    return one is other or (one is not None and other is not None and np.array_equal(one, other))


def awq_order(rows: int) -> np.ndarray:
    """Where the code of each row is among codes that were unpacked in their words' order: int [N]."""
    return (np.arange(0, rows, 8)[:, None] + AWQ_PLACES).reshape(-1)


def unpacked(words: np.ndarray, bits: int, axis: int, count: int) -> np.ndarray:
    """uint8 codes of 4 or 8 `bits` from words of 32, along `axis` 0 or 1, the lowest bits first; `count` of them."""
    if axis == 0:
        return np.ascontiguousarray(unpacked(words.T, bits, 1, count).T)
    codes = np.ascontiguousarray(words).view(np.uint8)
    if bits == 4:
        halves = np.empty((len(codes), 2 * codes.shape[1]), np.uint8)
        np.bitwise_and(codes, 15, out=halves[:, ::2])
        np.right_shift(codes, 4, out=halves[:, 1::2])
        codes = halves
    return np.ascontiguousarray(codes[:, :count])
