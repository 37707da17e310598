"""Engines of hand-written kernels: decode, verify and draft steps, and prompts, as launches prepared once, among them
those of plans for steps that TensorRT runs.

They stand behind the same edge as TensorRT's engines and write the same KV rows, so that all share caches and weights.
Each new token sees the committed rows, itself, and in steps of several tokens the new ones that `attention_mask` lets
it see; nothing else of the mask is read (but by drafts, whose earlier nodes stand among the committed rows), so a step
costs what the sequences' lengths ask for, not what the capacity does.

A token's logits and features are the same bits in every batch, in every tree that has its ancestors in order of depth,
and in the decode step that computes it alone: whether a draft is accepted cannot depend on what else was verified.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from edgellm.engines.backends.base import BoundEngine
from edgellm.engines.backends.steps.launching import Launching, StepKernels
from edgellm.engines.backends.steps.table import Choice, adapter_words, passes
from edgellm.engines.families.programs import ModelConfig, model_program
from edgellm.engines.model.expert_steps import for_kernels
from edgellm.engines.model.limits import EngineShape
from edgellm.engines.model.program import Program
from edgellm.engines.model.row_steps import TOKEN_ROWS
from edgellm.engines.model.sharding import Share
from edgellm.engines.model.states import without_layer
from edgellm.engines.model.steps import Step, stateful
from edgellm.kernels.arrays import ITEM_SIZES, Array, DeviceArray
from edgellm.kernels.quantization.device_layout import InputPermutation, PackedMatrix
from edgellm.kernels.quantization.row_runs import DenseRows, PackedLayout, PackedRuns, RunsLayout

#: Values begin at multiples of so many bytes.
_ALIGNMENT = 256


class KernelEngine(BoundEngine):
    """Enqueues the launches of a program, or of one for each pass, on what is bound."""

    def __init__(
        self,
        kernels: StepKernels,
        choice: Choice,
        config: ModelConfig,
        shape: EngineShape,
        dtype: str,
        packed: Mapping[str, PackedLayout] | None = None,
        prompt_step: int = 0,
        share: Share | None = None,
    ) -> None:
        """`choice` is what runs the shape's steps, as `kernel_choice` finds it; `packed` are the weights that will be
        bound packed, by name. `prompt_step`: with its own kernels those of shorter prompts are loaded, in steps of so
        many tokens (0: none are). `share`: that of a rank."""
        self.choice = choice
        self.reads_attention_mask = choice.reads_mask(shape.phase)
        self._kernels, self._prompt_step = kernels, prompt_step
        known = packed or {}
        self._passes = [
            (slots, for_kernels(replace(model_program(config, part, share), packed=known)))
            for slots, part in passes(shape)
        ]
        whole = for_kernels(replace(model_program(config, shape, share), packed=known))
        self.program = self._passes[0][1] if len(self._passes) == 1 else whole
        super().__init__(shape, dtype, self.program.edge, self.program.weights)
        layouts = [self._layout(program) for _, program in self._passes]
        self._layouts = [each for each, _ in layouts]
        self._share_scratch(max(size for _, size in layouts), kernels.plans.values())
        self._scratch: list[dict[str, Array]] = []
        self._launches: list[Any] = []
        #: Launches for the memory that was bound before, and the names of what changes: a prompt of another slot is
        #: not to wait until hundreds are prepared anew.
        self._kept: dict[tuple[Any, ...], list[Any]] = {}
        self._changing: set[str] = set()
        self._launches_by_layer: list[Any] = []
        self._layer_starts: dict[int, int] = {}
        self._is_whole = True
        self._rows_taken = 0

    def attach(self, device: Any, scratch: Array) -> None:
        super().attach(device, scratch)
        self._scratch = []
        for (_, program), layout in zip(self._passes, self._layouts, strict=True):
            arrays = {name: device.part(scratch, *place) for name, place in layout.items()}
            counters = self.choice.counters(program)  # not in the shared scratch: zero between steps
            arrays |= {name: device.zeros(size, dtype) for name, (size, dtype) in counters.items()}
            self._scratch.append(arrays)
        words = max(adapter_words(program) for _, program in self._passes)
        self._areas = [device.zeros((words,), "uint32") for _ in range(3 if words else 0)]
        self._launches, self._launches_by_layer, self._kept = [], [], {}

    def _load(self, loaded: Mapping[str, PackedLayout | None]) -> None:
        layouts = {name: layout for name in self.program.weights if (layout := loaded[name]) is not None}
        self._bound |= {name: stand_in(layout, self._memory) for name, layout in layouts.items()}
        self._prepare()
        if layouts and self._prompt_step:
            program = replace(self.program, packed=layouts)
            self.choice.load_prompts(program, self._kernels, self._prompt_step, are_packed=True)

    def _rebind(self, fresh: Mapping[str, Any]) -> None:
        arrays = [array for array in fresh.values() if isinstance(array, DeviceArray)]
        if fresh.keys() != self._changing or len(arrays) < len(fresh):
            self._kept, self._changing = {}, set(fresh)
        place = tuple((array.pointer, array.shape, array.dtype) for array in arrays)
        self._launches, self._launches_by_layer = self._kept.setdefault(place, []), []

    def enqueue(self) -> None:
        self._enqueue(self.launches(), lambda index: None)

    def around_rows(self) -> list[Callable[[], None]]:
        if TOKEN_ROWS not in self.program.inputs:
            return [self.enqueue]

        def before() -> None:
            self._enqueue(self.launches()[: self._rows_taken], lambda index: None)
            self._is_whole = False

        def behind() -> None:
            self._is_whole = True  # what stands before was checked, and is there
            self._enqueue(self.launches()[self._rows_taken :], lambda index: None)

        return [before, behind]

    def launches(self) -> Sequence[Any]:
        """What `enqueue` runs, each of which may start before the one before it has ended."""
        if not self._launches:
            self._launches += self._prepare()
            for launch in self._launches:
                launch.overlap_previous()
        return self._launches

    def prepare(self) -> None:
        """See `Engine.prepare`."""
        self.launches()

    def enqueue_by_layer(self, before_layer: Callable[[int], None]) -> None:
        """Enqueues as `enqueue` does; `before_layer` is called before each layer's work is enqueued, and can let that
        wait."""
        if not self._launches_by_layer:
            self._launches_by_layer = self._prepare()
            for number, launch in enumerate(self._launches_by_layer):
                if number not in self._layer_starts:  # that one must not overtake what its layer waits for
                    launch.overlap_previous()
        self._enqueue(self._launches_by_layer, before_layer)

    def _enqueue(self, launches: Sequence[Any], before_layer: Callable[[int], None]) -> None:
        if not self._is_whole:  # a step was left half done: its next launch did not clear what the last one wrote
            for area in self._areas:
                self._device.upload(area, np.zeros(area.shape, np.uint32))
        self._is_whole = False
        for number, launch in enumerate(launches):
            if number in self._layer_starts:
                before_layer(self._layer_starts[number])
            launch()
        self._is_whole = True

    def _lows(self) -> Iterator[tuple[Array, Array]]:
        """For each launch with adapters, in order: the area that it uses, and that of the next one, which it clears.

        Neighbours have different ones, also the last launch of a step and the first.
        """
        by_kernels = [number for number in range(len(self.program.steps)) if number not in self.choice.by_plan]
        linears = (program.steps[number].multiplies for _, program in self._passes for number in by_kernels)
        count = sum(linear is not None and linear.name in self.program.adapted for linear in linears)
        areas = [self._areas[2 if number == count - 1 else number % 2] for number in range(count)]
        return zip(areas, areas[1:] + areas[:1], strict=True)

    def _prepare(self) -> list[Any]:
        """The launches of all passes, any of which may start while the one before still runs."""
        self._check_bound(self.program.changed)
        launches: list[Any] = []
        lows = self._lows()
        for (slots, program), scratch in zip(self._passes, self._scratch, strict=True):
            arrays = partial(self._array, slots, scratch)
            run = Launching(self._kernels, program, arrays, lows)
            starts = dict(_layer_begins(program.steps))
            first = program.steps.index(program.attentions[0]) - 1 if program.attentions else None
            begins = list[int]()
            for number, (way, step) in enumerate(zip(self.choice.implementations, program.steps, strict=True)):
                lead = way.lead(number)
                begins.append(begins[lead] if lead < number else len(launches))
                if number in starts:
                    self._layer_starts[begins[number]] = starts[number]
                if TOKEN_ROWS in step.reads and not self._rows_taken:
                    self._rows_taken = begins[number]
                if lead == number:
                    launches += [] if way.joins(step, run) else run.added()
                    # The first attention reads KV rows early, which whatever was enqueued before may have written.
                    own = way.launches(step, run, next_early=number != first)
                    if number and _are_apart(program.steps[number - 1], step):
                        own[0].run_beside(launches[-1])
                    launches += own
            launches += run.added()
        return launches

    def _array(self, slots: slice, scratch: Mapping[str, Array], name: str) -> Array:
        """A tensor at the edge, of a pass its sequences' part, or a value."""
        place = without_layer(name)
        if place in scratch:
            return scratch[place]
        of_sequences = name not in self.program.matrices
        return self._bound[name][slots] if of_sequences and len(self._passes) > 1 else self._bound[name]

    def _layout(self, program: Program) -> tuple[dict[str, tuple[int, tuple[int, ...], str]], int]:
        """Offset, shape and dtype of every intermediate result, and the bytes of all."""
        layout, offset = {}, 0
        for name, (size, kind) in self.choice.scratch(program).items():
            layout[name] = (offset, size, self._own(kind))
            nbytes = math.prod(size) * ITEM_SIZES[self._own(kind)]
            offset += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        return layout, offset


def _are_apart(before: Step, step: Step) -> bool:
    """Whether a step neither takes what the one before it writes nor writes what that one works on."""
    reads, writes, theirs, written = (
        {*map(without_layer, names)} for names in (step.reads, step.writes, before.reads, before.writes)
    )
    return written.isdisjoint(reads | writes) and theirs.isdisjoint(writes)


def _layer_begins(steps: tuple[Step, ...]) -> Iterator[tuple[int, int]]:
    """Places of steps and layers: where what touches a layer's states begins, with the step before its first one that
    has any, which makes what that one takes."""
    known: set[int] = set()
    for step in stateful(steps):
        if step.index not in known:
            known.add(step.index)
            yield steps.index(step) - 1, step.index


def stand_in(layout: PackedLayout | DenseRows, memory: Any) -> Any:
    """A packed weight of a layout on memory that nothing reads."""
    if isinstance(layout, DenseRows):
        return replace(memory, shape=(layout.rows, layout.columns), dtype=layout.compute)
    if isinstance(layout, RunsLayout):
        return PackedRuns(tuple(stand_in(own, memory) for own in layout.runs))
    columns, format = (layout.columns,), layout.format
    order = replace(memory, shape=columns, dtype="int32") if format.permuted else None
    scales = replace(memory, shape=columns, dtype="float32") if format.scaled else None
    inputs = InputPermutation(order, scales) if format.permuted or format.scaled else None
    return PackedMatrix(layout, memory, inputs)
