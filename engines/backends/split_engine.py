"""Engines of steps of many tokens: TensorRT's between attention and recurrent layers, which kernels compute, attention
without scores in memory.

A token sees the rows before its own, and itself, or those up to one that is given for it, as an image's tokens see all
of the image: there is no mask to read. A program is cut there (`segments.py`); equal segments share an engine, whose
weights are bound anew for each layer. TensorRT multiplies dense weights alone: packed ones of a segment are dequantized
in front of it, into scratch that all segments share. Kernels take packed ones as they are: theirs is what stands behind
the last attention, where few rows are selected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from edgellm.engines.backends.base import BoundEngine
from edgellm.engines.backends.kernel_engine import KernelEngine, stand_in
from edgellm.engines.backends.steps.attention import UNGATED
from edgellm.engines.backends.steps.implementation import Implementation
from edgellm.engines.backends.steps.launching import Launching, StepKernels
from edgellm.engines.backends.steps.table import TABLE
from edgellm.engines.model.program import Program
from edgellm.engines.model.segments import Segment, segments_of
from edgellm.engines.model.states import without_layer
from edgellm.engines.model.steps import Step, stateful
from edgellm.kernels.arrays import ITEM_SIZES, Array
from edgellm.kernels.prefill.contract import Launchable
from edgellm.kernels.quantization.row_runs import PackedLayout, PackedRuns

#: In bytes: TensorRT's engines take scratch that begins at a multiple of it, behind the values between segments.
_ALIGNMENT = 512

#: Offset, shape and dtype of a value in the scratch buffer.
_Place = tuple[int, tuple[int, ...], str]


class _Step(NamedTuple):
    """A segment's engine, what it is bound to, what makes its dense weights of packed ones, and the layer and launches
    of the steps behind it (none: no launches)."""

    engine: BoundEngine
    bindings: dict[str, Array]
    dequantizing: list[Launchable]
    layer: int
    between: list[Launchable]


class SplitEngine(BoundEngine):
    """Enqueues a program's segments, and the attention and recurrent layers between them."""

    name = "TensorRT, attention by kernels"
    reads_attention_mask = False

    def __init__(
        self,
        kernels: StepKernels,
        program: Program,
        engines: Mapping[int, BoundEngine],
        dtype: str,
        packed: Collection[str] = (),
    ) -> None:
        """`engines` are those of the program's segments, by `Segment.number`; `dtype` is what computes; the weights
        named in `packed` will be bound packed. `kernels` are those of prompts and, of a program that has recurrent
        layers or gated attention, recurrent ones."""
        super().__init__(program.shape, dtype, program.edge, program.weights)
        self._kernels, self._program, self._engines = kernels, program, engines
        self._segments = segments_of(program)
        self._packed, self._layout = frozenset(packed), dict[str, _Place]()
        #: Of each segment, the places of its engine's tensors; of the steps behind it, where they read and write.
        self._wiring: list[dict[str, str]] = []
        self._values: list[dict[str, str]] = []
        self._own_bytes = self._lay_out_weights(self._lay_out())
        self.scratch_bytes = self._own_bytes + max(engine.scratch_bytes for engine in engines.values())
        self._scratch: dict[str, Array] = {}
        self._steps: list[_Step] = []

    def _lay_out(self) -> int:
        """Find a place for each value between segments; the bytes of all."""
        offset, places = 0, dict[str, str]()
        for segment in self._segments:
            wiring = {}
            for name in segment.program.edge:
                whole = segment.name_in_whole(name)
                if name not in segment.program.outputs:
                    wiring[name] = places.get(whole, whole)
            for name, (size, kind) in segment.program.outputs.items():
                whole = segment.name_in_whole(name)
                if whole in self._program.outputs:
                    wiring[name] = whole
                    continue
                if name == whole:
                    place = f"{whole} (1)"
                else:  # who reads a value and writes it anew has both at once
                    place = f"{whole} (2)" if places.get(whole) == f"{whole} (1)" else f"{whole} (1)"
                wiring[name] = places[whole] = place
                offset = self._add(place, size, self._own(kind), offset)
            for step in segment.between:
                place = places[step.output] = f"{without_layer(step.output)} (1)"
                size, kind = self._program.kinds[step.output]
                offset = self._add(place, size, self._own(kind), offset)
                if UNGATED in between_engines(step).scratch(step, self._program):
                    places[UNGATED] = UNGATED
                    (batch, tokens, width), kind = self._program.kinds[step.reads[0]]
                    offset = self._add(UNGATED, (batch, tokens, width - size[-1]), self._own(kind), offset)
            self._wiring.append(wiring)
            self._values.append(dict(places))
        return offset

    def _lay_out_weights(self, begin: int) -> int:
        """Find a place for each segment's weights that are bound packed, from byte `begin` on; where the largest
        segment's end."""
        end = begin
        for segment, wiring in zip(self._segments, self._wiring, strict=True):
            offset = begin
            for name, whole in self._packed_of(segment):
                wiring[name] = f"{whole} (dense)"
                offset = self._add(wiring[name], segment.program.weights[name].shape, self._dtype, offset)
            end = max(end, offset)
        return end

    def _add(self, place: str, size: tuple[int, ...], dtype: str, offset: int) -> int:
        """Put a value behind the others, if it is new; the bytes of all."""
        if place in self._layout:
            return offset
        self._layout[place] = (offset, size, dtype)
        nbytes = math.prod(size) * ITEM_SIZES[dtype]
        return offset + -(-nbytes // _ALIGNMENT) * _ALIGNMENT

    def attach(self, device: Any, scratch: Array) -> None:
        super().attach(device, scratch)
        self._scratch = {name: device.part(scratch, *place) for name, place in self._layout.items()}
        for engine in self._engines.values():
            engine.attach(device, scratch[self._own_bytes :])
        self._steps = []

    def load_kernels(self, loaded: Mapping[str, PackedLayout | None]) -> None:
        """See `BoundEngine.load_kernels`: also those of the segments, and those that dequantize."""
        for segment, wiring in zip(self._segments, self._wiring, strict=True):
            engine = self._engines[segment.number]
            if isinstance(engine, KernelEngine):
                engine.load_kernels(segment.weights_of(loaded))
            for name, whole in self._packed_of(segment):
                memory, layout = self._scratch[wiring[name]], loaded.get(whole)
                if layout is not None:
                    self._dense(stand_in(layout, memory), memory)
        if self._kernels.recurrent is not None:
            super().load_kernels(loaded)

    def _load(self, loaded: Mapping[str, PackedLayout | None]) -> None:
        for number in range(len(self._segments)):
            self._between(number, self._bound | self._scratch)

    def _rebind(self, fresh: Collection[str]) -> None:
        self._steps = []

    def enqueue(self) -> None:
        self.enqueue_by_layer(lambda index: None)

    def enqueue_by_layer(self, before_layer: Callable[[int], None]) -> None:
        """Enqueues as `enqueue` does; `before_layer` is called before what touches each layer's states is enqueued, and
        can let that wait."""
        if not self._steps:
            self._steps = self._prepare()
        for step in self._steps:
            for launch in step.dequantizing:
                launch()
            step.engine.bind(step.bindings)
            step.engine.enqueue()
            if step.between:
                before_layer(step.layer)
            for launch in step.between:
                launch()

    def _prepare(self) -> list[_Step]:
        self._check_bound(self._program.changed)
        arrays, steps = self._bound | self._scratch, []
        for number, (segment, wiring) in enumerate(zip(self._segments, self._wiring, strict=True)):
            bindings = {name: arrays[wiring[name]] for name in segment.program.edge}
            layer = next((step.index for step in stateful(segment.between)), 0)
            dense, launches = self._dequantizing(segment, wiring), self._between(number, arrays)
            steps.append(_Step(self._engines[segment.number], bindings, dense, layer, launches))
        return steps

    def _between(self, number: int, arrays: Mapping[str, Array]) -> list[Launchable]:
        """The launches of the steps behind a segment."""
        places, launches = self._values[number], list[Launchable]()

        def array(name: str) -> Array:
            return arrays[places.get(name, name)]

        run = Launching(self._kernels, self._program, array, iter(()))
        for step in self._segments[number].between:
            launches += between_engines(step).launches(step, run, next_early=True)
        return launches

    def _dequantizing(self, segment: Segment, wiring: Mapping[str, str]) -> list[Launchable]:
        """What makes a segment's dense weights, all of which may run beside each other."""
        launches: list[Launchable] = []
        for name, whole in self._packed_of(segment):
            launches += self._dense(self._bound[whole], self._scratch[wiring[name]], launches[-1:])
        return launches

    def _dense(self, weight: Any, values: Array, before: Sequence[Launchable] = ()) -> list[Launchable]:
        """What makes a packed weight's dense values, [N, K]; dense rows are copied. A kernel runs beside the one
        `before` it."""
        launches, first = [*before], 0
        for run in weight.runs if isinstance(weight, PackedRuns) else (weight,):
            own, beside = values[first : first + run.shape[0]], bool(launches) and not isinstance(launches[-1], partial)
            launches.append(
                partial(self._device.copy, own, run)
                if isinstance(run, Array)
                else self._kernels.prefill.dequantize(run, own, beside=beside)
            )
            first += run.shape[0]
        return launches[len(before) :]

    def _packed_of(self, segment: Segment) -> list[tuple[str, str]]:
        """The weights of a segment that its engine takes dense alone, and are bound packed: their names there, and in
        the whole."""
        if self._engines[segment.number].takes_packed:
            return []
        names = [(name, segment.name_in_whole(name)) for name in segment.program.weights]
        return [(name, whole) for name, whole in names if whole in self._packed]


def between_engines(step: Step) -> Implementation[Any]:
    """What runs a step between TensorRT's engines."""
    return TABLE[type(step)][-1]
