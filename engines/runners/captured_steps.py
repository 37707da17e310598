"""Engines that are loaded and bound once, and steps that are run again and again: captured, whole or stage by stage."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import NamedTuple

from edgellm.engines.backends.base import Backend, Engine
from edgellm.engines.model.limits import EngineShape
from edgellm.kernels.arrays import Array

#: Where shapes are free, an engine reads a multiple of so many KV rows.
_KEY_RANGE_STEP = 64

#: Named parts of a step, in the order in which they run.
Stages = Mapping[str, Callable[[], None]]


def in_order(launches: Sequence[Callable[[], object]]) -> Callable[[], None]:
    """What enqueues one after the other."""

    def run() -> None:
        for launch in launches:
            launch()

    return run


class HostStage(partial[None]):
    """A stage in which the host takes part, so that it waits for what was enqueued before: no capture holds it."""


class Planned(NamedTuple):
    """A step that is captured before it comes up: what makes its stages, what is to be done once they have run, and
    what tells it apart beside the names of the stages."""

    stages: Callable[[], Stages]
    ran: Callable[[], object]
    kind: str


class CapturedSteps:
    """Runs steps by key and keeps their captures.

    A step runs once as it is before it is captured: that loads code, which a capture must not do. All stages are
    captured as one, or what is between those of the host (`HostStage`); where that fails, each stage by itself; a stage
    that cannot be captured runs as it is. Steps that
    are `planned` are captured by `capture_next` alone, and until then run as they are; others when they come up the
    second time. `seconds` adds up the time of each stage by name, on a backend that computes at once. With `around`,
    which gives what is to surround a stage of a name, stages are captured one by one.
    """

    around: Callable[[str], AbstractContextManager[None]] | None = None

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._warm: set[Hashable] = set()
        #: What is still to be captured, in order.
        self.planned: dict[Hashable, Planned] = {}
        #: What runs for each key that was captured: one launch of all its stages, or one of each.
        self.captures: dict[Hashable, list[Callable[[], None]]] = {}
        #: What could not be captured of what was planned: stages, with their step's kind.
        self.uncaptured: list[str] = []
        self.seconds: dict[str, float] = {}

    def run(self, key: Hashable, stages: Stages) -> None:
        """Run the stages of the step that `key` names."""
        if self._backend.computes_at_once:
            self._run_timed(stages)
            return
        if self.around is not None:
            self._run_surrounded(key, stages, self.around)
            return
        if key in self._warm and key not in self.captures and key not in self.planned:
            self.captures[key] = self._capture(key, stages)
        for launch in self.captures.get(key, stages.values()):
            launch()
        self._warm.add(key)

    def plan(
        self, key: Hashable, stages: Callable[[], Stages], ran: Callable[[], object] = lambda: None, kind: str = ""
    ) -> None:
        """Let the step that `key` names be captured by a later `capture_next`, if it was not; see `Planned`."""
        if key not in self.captures and not self._backend.computes_at_once:
            self.planned.setdefault(key, Planned(stages, ran, kind))

    def capture_next(self) -> bool:
        """Run and capture the planned step whose turn it is; False where there is none. What it runs on must be there,
        as for `run`. Where it raises, the step is planned no more."""
        key = next(iter(self.planned), None)
        if key is None:
            return False
        planned = self.planned.pop(key)
        stages = planned.stages()
        for stage in stages.values():
            stage()
        planned.ran()
        self._warm.add(key)
        launches = self.captures[key] = self._capture(key, stages)
        own = {name: stage for name, stage in stages.items() if not isinstance(stage, HostStage)}
        failed = [name for name, stage in own.items() if any(launch is stage for launch in launches)]
        self.uncaptured += [name + planned.kind for name in failed]
        return True

    def clear(self) -> None:
        """Let go of all captures."""
        self.planned.clear()
        self.captures.clear()

    def _capture(self, key: Hashable, stages: Stages) -> list[Callable[[], None]]:
        launches: list[Callable[[], None]] = []
        for _, between in groupby(stages.items(), lambda named: isinstance(named[1], HostStage)):
            own = dict(between)
            whole = in_order([*own.values()])
            captured = self._backend.capture(whole, f"the step {key}") if len(own) > 1 else whole
            launches += self._capture_each(key, own) if captured is whole else [captured]
        return launches

    def _run_surrounded(
        self, key: Hashable, stages: Stages, around: Callable[[str], AbstractContextManager[None]]
    ) -> None:
        if key in self._warm and ("stages", key) not in self.captures:
            self.captures["stages", key] = self._capture_each(key, stages)
        launches = self.captures.get(("stages", key), list(stages.values()))
        for name, launch in zip(stages, launches, strict=True):
            with around(name):
                launch()
        self._warm.add(key)

    def _capture_each(self, key: Hashable, stages: Stages) -> list[Callable[[], None]]:
        return [
            stage if isinstance(stage, HostStage) else self._backend.capture(stage, f"{name} of the step {key}")
            for name, stage in stages.items()
        ]

    def _run_timed(self, stages: Stages) -> None:
        around = self.around or (lambda name: nullcontext())
        for name, stage in stages.items():
            with around(name):
                before = time.perf_counter()
                stage()
                spent = time.perf_counter() - before
            self.seconds[name] = self.seconds.get(name, 0.0) + spent


class LoadedEngines:
    """The engines of some shapes. Where engines exist for fixed shapes only, all are loaded at once.

    Shapes that differ in the key range alone do the same; the one of the largest stands for them here. It is the only
    one that is loaded where the backend needs no other.
    """

    def __init__(self, backend: Backend, shapes: Iterable[EngineShape]) -> None:
        """`shapes` that differ in the key range alone come in ascending order of it."""
        self._backend = backend
        self._shapes: dict[EngineShape, tuple[EngineShape, ...]] = {}
        if backend.fixed_shapes:
            alike: dict[EngineShape, list[EngineShape]] = {}
            for shape in shapes:
                alike.setdefault(replace(shape, key_range=0), []).append(shape)
            for found in alike.values():
                serves_all = backend.takes_any_key_range(found[-1])
                self._shapes[found[-1]] = (found[-1],) if serves_all else tuple(found)
        #: The engines that are held.
        self.loaded = {shape: backend.load_engine(shape) for found in self._shapes.values() for shape in found}
        self._slots: dict[EngineShape, slice] = {}

    def key_ranges(self, widest: EngineShape) -> tuple[int, ...]:
        """The key ranges of the engines that do what the shape `widest` does, of the largest one; ascending."""
        return tuple(shape.key_range for shape in self._shapes.get(widest, (widest,)))

    def key_range(self, widest: EngineShape, length: int) -> int:
        """How many KV rows the engine reads that does what `widest` does, where the last query stands at row
        `length` - 1: the least that is enough."""
        if not self._backend.fixed_shapes:
            return min(-(-length // _KEY_RANGE_STEP) * _KEY_RANGE_STEP, widest.key_range)
        return next((size for size in self.key_ranges(widest) if size >= length), widest.key_range)

    def bound(
        self,
        shape: EngineShape,
        slots: slice,
        bindings: Callable[[], Mapping[str, Array]],
        constant: Callable[[], Mapping[str, Array]] = dict,
        keep: bool = True,
    ) -> Engine:
        """The engine for a shape, bound for the slots by `bindings()`, and by `constant()` whatever the slots.

        `keep` False does not hold on to an engine that a backend without fixed shapes makes for this call.
        """
        engine, bound = self.loaded.get(shape), self._slots.get(shape)
        if engine is None and self._backend.fixed_shapes:
            engine = self.hold(shape)
        elif engine is None:
            engine = self._backend.load_engine(shape)
            if keep:
                self.loaded[shape] = engine
        if bound is None:
            engine.bind(constant())
        if bound != slots:
            engine.bind(bindings())
            if shape in self.loaded:
                self._slots[shape] = slots
        return engine

    def hold(self, shape: EngineShape) -> Engine:
        """The engine of a shape, which is held from now on."""
        if shape not in self.loaded:
            self.loaded[shape] = self._backend.load_engine(shape)
        return self.loaded[shape]

    def has(self, shape: EngineShape) -> bool:
        """Whether the engine of a shape is held."""
        return shape in self.loaded

    def reads_mask(self, shape: EngineShape) -> bool:
        """Whether the engine of a shape reads its mask."""
        engine = self.loaded.get(shape)
        return engine is None or engine.reads_attention_mask

    def mask_size(self, model: str, most_rows: int, most_keys: int) -> int:
        """Elements of the largest mask that an engine of "base" or "draft" reads; where shapes are free, one of so many
        rows and keys."""
        if not self._backend.fixed_shapes:
            return most_rows * most_keys
        shapes = [shape for shape in self.loaded if shape.model == model and self.reads_mask(shape)]
        return max((shape.batch * shape.tokens * shape.key_range for shape in shapes), default=0)

    def clear(self) -> None:
        """Let go of all engines."""
        self.loaded.clear()
        self._slots.clear()
