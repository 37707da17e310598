"""What a runner of the base model does about LoRA adapters."""

from __future__ import annotations

from edgellm.engines.model.config import EngineLimits, EngineShape
from edgellm.engines.errors import AdapterError
from edgellm.engines.lora.slots import AdapterSlots
from edgellm.kernels.arrays import Array


class AdaptedRunner:
    """The adapters of a runner's slots: `adapters` adds and removes them (None: the runner was opened without)."""

    limits: EngineLimits
    adapters: AdapterSlots | None

    def set_adapter(self, slot: int, name: str | None) -> None:
        """Let the sequence that `slot` is going to hold take the adapter `name` (None: none), until it stops.

        Its KV rows are reusable for sequences with the same adapter only. Raises AdapterError for a name that is not
        loaded, and where more adapters would be in use at once than the engines hold; nothing has changed then.
        """
        if self.adapters is not None or name is not None:
            self._adapter_slots(name).assign(slot, name)

    def adapter_digest(self, name: str | None) -> str | None:
        """What is computed with an adapter is bound to this (None: without one); AdapterError as `set_adapter`."""
        return None if name is None else self._adapter_slots(name).digest(name)

    def has_adapter_place(self, slot: int, name: str | None) -> bool:
        """Whether `set_adapter` would find a place for the adapter now."""
        return name is None or self._adapter_slots(name).has_place(name, slot)

    def _adapter_slots(self, name: str | None) -> AdapterSlots:
        if self.adapters is None:
            raise AdapterError(f"the adapter {name!r} was asked for, but the model was opened without adapters")
        return self.adapters

    def adapts(self, slots: slice) -> bool:
        """Whether a sequence of the slots has an adapter."""
        return self.adapters is not None and self.adapters.in_use(slots)

    def engine_shape(self, shape: EngineShape, slots: slice) -> EngineShape:
        """The shape of the engine that must run for the slots: `shape` itself, or the one that applies adapters."""
        return self.limits.with_adapters(shape) if self.adapts(slots) else shape

    def adapter_inputs(self, shape: EngineShape, slots: slice) -> dict[str, Array]:
        """What an engine with adapters is bound to beside the rest; nothing for one without."""
        return self.adapters.bindings(slots) if shape.lora_slots and self.adapters is not None else {}

    @property
    def adapter_kinds(self) -> tuple[bool, ...]:
        """What `adapts` can say."""
        return (False,) if self.adapters is None else (False, True)
