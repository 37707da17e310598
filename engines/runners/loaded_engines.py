"""Engines by shape, loaded once and bound anew only where the slots change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from edgellm.engines.backends.base import Backend, Engine
from edgellm.engines.model.config import EngineShape
from edgellm.kernels.arrays import Array


class LoadedEngines:
    """The engines of some shapes. Where engines exist for fixed shapes only, all are loaded at once."""

    def __init__(self, backend: Backend, shapes: Iterable[EngineShape]) -> None:
        self._backend = backend
        self._engines = {shape: backend.load_engine(shape) for shape in shapes} if backend.fixed_shapes else {}
        self._slots: dict[EngineShape, slice] = {}

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
        engine, bound = self._engines.get(shape), self._slots.get(shape)
        if engine is None:
            engine = self._backend.load_engine(shape)
            if keep or self._backend.fixed_shapes:
                self._engines[shape] = engine
        if bound is None:
            engine.bind(constant())
        if bound != slots:
            engine.bind(bindings())
            if shape in self._engines:
                self._slots[shape] = slots
        return engine

    @property
    def loaded(self) -> Mapping[EngineShape, Engine]:
        """The engines that are held, by shape."""
        return self._engines

    def replace(self, shape: EngineShape, engine: Engine) -> None:
        """Hold another engine for a shape, as where several are compared; it is bound when it is next asked for."""
        self._engines[shape] = engine
        self._slots.pop(shape, None)

    def clear(self) -> None:
        """Let go of all engines."""
        self._engines.clear()
        self._slots.clear()
