"""Packed weights on their way from the files to a GPU.

Codes go to the GPU in the words or blocks of the file, where they are unpacked or turned, and shuffled into the
kernels' layout; the host reads scales, minima and zero points alone, of a few weights at a time, and of K types the
factors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from edgellm.engines.backends.cuda_device import CudaDevice
from edgellm.engines.backends.device_layouts import takes_runs
from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.checkpoints.weights import check_finite, computed_ahead, iterate_weight_parts
from edgellm.engines.errors import CheckpointError, EngineError
from edgellm.engines.formats.tensors import contiguous
from edgellm.engines.model.config import WeightSpec
from edgellm.engines.model.sharding import Cut
from edgellm.engines.quantization.stored import StoredCodes, StoredWeight, columns_of, fused, may_fuse, rows_of
from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.compilations import usable_cores
from edgellm.kernels.launch import KernelModule
from edgellm.kernels.quantization.block_codes import BLOCK_CODES, block_levels, unblock
from edgellm.kernels.quantization.code_words import BLOCK_ROWS
from edgellm.kernels.quantization.device_layout import (
    DeviceLayout,
    InputPermutation,
    PackedMatrix,
    device_layout,
    layout_refusal,
    tail_bytes,
)
from edgellm.kernels.quantization.row_runs import AnyPacked, PackedRuns
from edgellm.kernels.quantization.turn import arrange, shuffle, turn

#: Bytes of codes that are on their way at a time.
_PIECE = 64 << 20
#: That read weights ahead, each one of them.
_MOST_THREADS = 8


class PackedLoader:
    """Puts packed weights into the memory of a device, whose stream does the work in order."""

    def __init__(
        self,
        device: CudaDevice,
        module: KernelModule,
        dtype: str,
        cuts: Mapping[str, Cut] | None = None,
        alike: str | None = None,
    ) -> None:
        """Prepares for kernels that compute in `dtype`; of specs named in `cuts` these parts, of the one named `alike`
        in the layout of the whole."""
        self._device, self._module, self._dtype, self._cuts, self._alike = device, module, dtype, cuts or {}, alike
        #: Memory for codes on their way, by what it is for.
        self._staging: dict[str, DeviceArray] = {}

    def load(
        self,
        checkpoint: Checkpoint,
        specs: Sequence[WeightSpec],
        memory: Mapping[str, DeviceArray],
        progress: Callable[[int], None],
    ) -> dict[str, AnyPacked]:
        """The matrices of specs that are packed, or in part, by name, in `memory` that holds what `packed_layouts` said
        of each; `progress` gets the bytes of each. Raises CheckpointError as `Checkpoint.stored`, for values of dense
        rows that are not finite, and for parts of one layer that are packed differently and may not be."""
        found, dense = dict[str, AnyPacked](), list[WeightSpec]()
        threads = min(usable_cores(), _MOST_THREADS)

        def prepare(spec: WeightSpec) -> list[_Prepared | _Dense]:
            return _prepare(checkpoint, spec, self._dtype, self._cuts.get(spec.name), spec.name == self._alike)

        for spec, weights in computed_ahead(prepare, specs, threads):
            runs, begin = list[Any](), 0
            for weight in weights:
                if isinstance(weight, _Dense):
                    data = self._device.part(memory[spec.name], begin, weight.values.shape, self._dtype)
                    self._device.upload(data, weight.values)
                    runs.append(data)
                    dense += weight.specs
                else:
                    data = self._device.part(memory[spec.name], begin, weight.layout.shape, "uint8")
                    runs.append(self._loaded(weight, data))
                begin += data.nbytes
            assert begin <= memory[spec.name].nbytes
            found[spec.name] = runs[0] if len(runs) == 1 else PackedRuns(tuple(runs))
            progress(begin)
        check_finite(checkpoint, dense)
        self._device.synchronize()  # staging is let go of with the loader
        return found

    def _loaded(self, weight: _Prepared, data: DeviceArray) -> PackedMatrix:
        inputs, block = weight.inputs and InputPermutation(*map(self._uploaded, weight.inputs)), 0
        for piece in _pieces(weight):
            blocks, along = piece.layout.blocks
            size = piece.layout.block_bytes - piece.layout.code_bytes
            tails = self._staged("tails", (blocks, along, size))
            codes = self._codes(piece, tails)
            if inputs is not None and inputs.order is not None:
                arranged = self._staged("words", codes.shape)
                arrange(self._module, codes, arranged, inputs.order)()
                codes = arranged
            if piece.tails is not None:
                self._device.upload(tails, piece.tails)
            shuffle(self._module, piece.layout, codes, tails, data[block : block + blocks])()
            block += blocks
        return PackedMatrix(weight.layout, data, inputs)

    def _uploaded(self, values: np.ndarray | None) -> DeviceArray | None:
        """The same in the memory of the device."""
        if values is None:
            return None
        array = self._device.empty(values.shape, values.dtype.name)
        self._device.upload(array, values)
        return array

    def _codes(self, weight: _Prepared, tails: DeviceArray) -> DeviceArray:
        """The codes of all rows in the columns of the file, uint8 [N, bytes of a row], as `shuffle` takes them. What
        the host has not read is written to `tails`."""
        row_bytes = {_row_bytes(part) for part in weight.codes}
        if len(row_bytes) > 1:
            unpacked = [StoredCodes(part.unpacked(), "bytes", 8, part.shape) for part in weight.codes]
            weight = weight._replace(codes=unpacked)
            row_bytes = {weight.layout.columns}
        codes = self._staged("codes", (weight.layout.rows, row_bytes.pop()))
        first = 0
        for arrangement, together in groupby(weight.codes, attrgetter("arrangement")):
            parts = list(together)
            data, begin = [contiguous(part.data) for part in parts], 0
            if arrangement in ("bytes", "rows"):
                rows = sum(part.shape[0] for part in parts)
                self._device.upload_parts(codes[first : first + rows], data)
                first += rows
                continue
            given = self._staged("given", (sum(each.nbytes for each in data),))
            self._device.upload_parts(given, data)
            for part, each in zip(parts, data, strict=True):
                target = codes[first : first + part.shape[0]]
                if arrangement in BLOCK_CODES:
                    blocks = self._device.part(given, begin, each.shape, "uint8")
                    unblock(self._module, blocks, target, arrangement)()
                    if weight.tails is None:
                        block_levels(self._module, blocks, tails, arrangement, first)()
                else:
                    words = each.view(np.uint32)
                    wide = self._device.part(target, 0, (target.shape[0], target.shape[1] // 4), "uint32")
                    turn(self._module, self._device.part(given, begin, words.shape, "uint32"), wide, arrangement)()
                first, begin = first + part.shape[0], begin + each.nbytes
        return codes

    def _staged(self, use: str, shape: tuple[int, ...]) -> DeviceArray:
        """Memory uint8 that is the next weight's when this one is done."""
        needed = math.prod(shape)
        if use not in self._staging or self._staging[use].nbytes < needed:
            self._staging.pop(use, None)
            self._staging[use] = self._device.empty((needed,), "uint8")
        return self._device.part(self._staging[use], 0, shape, "uint8")


class _Prepared(NamedTuple):
    """What the host reads of a weight before the device takes its codes; `tails`: None where that reads them, too."""

    layout: DeviceLayout
    codes: Sequence[StoredCodes]
    tails: np.ndarray | None
    inputs: InputPermutation | None

    def rows(self, first: int, stop: int, codes: Sequence[StoredCodes]) -> _Prepared:
        """These rows alone, whose codes these are; whole blocks before the last one."""
        tails = None if self.tails is None else self.tails[first // BLOCK_ROWS : -(-stop // BLOCK_ROWS)]
        return self._replace(layout=replace(self.layout, rows=stop - first), codes=codes, tails=tails)


@dataclass(frozen=True)
class _Dense:
    """Rows [N, K] in the compute dtype, bfloat16 as uint16, of tensors that are dense on the device: `specs`."""

    specs: list[WeightSpec]
    values: np.ndarray


def _dense(checkpoint: Checkpoint, part: tuple[str, tuple[int, ...]], dtype: str, cut: Cut | None) -> _Dense:
    """A dense part of a weight, or the rows of it that are in a cut."""
    spec = WeightSpec(*part, (part,))
    pieces = [values for _, _, values in iterate_weight_parts(checkpoint, [spec], dtype)]
    rows = (pieces[0] if len(pieces) == 1 else np.concatenate(pieces)).reshape(spec.shape)
    return _Dense([spec], rows if cut is None else np.concatenate([rows[begin:end] for begin, end in cut.ranges]))


def _prepare(
    checkpoint: Checkpoint, spec: WeightSpec, dtype: str, cut: Cut | None = None, is_alike: bool = False
) -> list[_Prepared | _Dense]:
    """The runs of rows of a weight, or of a cut of it, each of one format, or dense; of one tensor in the layout that
    the whole has, if the parts are to be `alike`: its scales decide that."""
    stacked = None if cut else _stacked(checkpoint, spec, dtype)
    runs: list[list[Any]] = [[stacked]] if stacked else []
    found, first = list[_Prepared | _Dense](), 0
    for name, shape in () if stacked else spec.parts:
        own, first = cut and cut.within(first, shape[0]), first + shape[0]
        if own is not None and not own.ranges:  # an expert of another rank
            continue
        whole = checkpoint.stored(name, shape)
        part: StoredWeight | _Dense
        if whole is None or layout_refusal(whole.format, dtype) is not None:
            part = _dense(checkpoint, (name, shape), dtype, own)
        elif own is None:
            part = whole
        else:
            part = columns_of(whole, *own.ranges[0]) if own.axis else rows_of(whole, own.ranges)
        if runs and _belong_together(runs[-1][0], part):
            runs[-1].append(part)
        else:
            runs.append([part])
    if len(runs) > 1 and not takes_runs(spec):
        names = ", ".join(name for name, _ in spec.parts)
        raise EngineError(
            f"{checkpoint.path}: the inputs of {names}, which are multiplied as one layer, are permuted or scaled "
            "differently. The NumPy backend runs them (--backend numpy)"
        )
    for run in runs:
        if isinstance(run[0], _Dense):
            values = run[0].values if len(run) == 1 else np.concatenate([part.values for part in run])
            found.append(_Dense([spec for part in run for spec in part.specs], values))
            continue
        weight = fused(run)
        layout = device_layout(weight, dtype)
        if is_alike and whole is not None:
            layout = replace(device_layout(whole, dtype), rows=layout.rows)
        in_blocks = all(part.arrangement in BLOCK_CODES for part in weight.codes) and layout.kind == "levels"
        tails = None if in_blocks else np.ascontiguousarray(tail_bytes(weight, layout))
        found.append(_Prepared(layout, weight.codes, tails, InputPermutation.of(weight)))
    return found


def _stacked(checkpoint: Checkpoint, spec: WeightSpec, dtype: str) -> StoredWeight | None:
    """All experts of a layer, hundreds that are alike, read as one; None where they are to be read one by one: their
    layouts do not stack, or one of them is not as it should be, which is said of it then."""
    (name, shape), *others = spec.parts
    layout, format = checkpoint.layout(name, shape), checkpoint.weight_format(name, shape)
    if not spec.experts or layout is None or format is None or layout_refusal(format, dtype) is not None:
        return None
    alike = all(size == shape and checkpoint.layout(other, size) is layout for other, size in others)
    if not alike or not layout.stacks(shape[0]):
        return None
    with suppress(CheckpointError):
        return checkpoint.stored(name, shape, [other for other, _ in others])
    return None


def _belong_together(one: StoredWeight | _Dense, other: StoredWeight | _Dense) -> bool:
    """Whether the rows of one stand in a run with those of the other behind them."""
    if isinstance(one, _Dense) or isinstance(other, _Dense):
        return type(one) is type(other)
    return may_fuse(one, other)


def _pieces(weight: _Prepared) -> Iterator[_Prepared]:
    """A large weight some rows at a time: whole parts, such as experts, or of one part, such as a head, rows whose
    codes are together in the file."""
    (part, *others), rows = weight.codes, weight.layout.rows
    if others and all(each.shape[0] % BLOCK_ROWS == 0 for each in weight.codes):
        yield from _whole_parts(weight)
        return
    step = max(1, _PIECE // _row_bytes(part) // BLOCK_ROWS) * BLOCK_ROWS
    if others or part.arrangement not in ("bytes", "rows", *BLOCK_CODES) or rows <= step:
        yield weight
        return
    for first in range(0, rows, step):
        stop = min(first + step, rows)
        own = replace(part, data=part.data[first:stop], shape=(stop - first, part.shape[1]))
        yield weight.rows(first, stop, [own])


def _whole_parts(weight: _Prepared) -> Iterator[_Prepared]:
    begin, first, rows, size = 0, 0, 0, 0
    for end, part in enumerate(weight.codes, 1):
        rows, size = rows + part.shape[0], size + part.data.nbytes
        if size >= _PIECE or end == len(weight.codes):
            yield weight.rows(first, rows, weight.codes[begin:end])
            begin, first, size = end, rows, 0


def _row_bytes(part: StoredCodes) -> int:
    """Bytes of a row's codes as `shuffle` takes them."""
    rows, columns = part.shape
    return part.data.nbytes // rows if part.arrangement in ("bytes", "rows") else columns * part.bits // 8
