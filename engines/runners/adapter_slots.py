"""The adapters of a base model in use: the memory that its engines read, and which sequence takes which adapter.

The engines' inputs have fixed addresses with places for a few adapters, so that captured steps stay valid; an adapter
is copied to a place when a sequence asks for it, and stays there until another needs the place.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from itertools import chain

import numpy as np

from edgellm.engines.backends.base import Backend
from edgellm.engines.errors import AdapterError
from edgellm.engines.formats.tensors import STORAGE, convert, value_and_place
from edgellm.engines.lora.adapter import LoraAdapter
from edgellm.engines.model.adapted_projections import SCALES, adapted_projections
from edgellm.engines.model.config import DecoderConfig
from edgellm.engines.model.decoder import decoder_weights
from edgellm.engines.model.limits import EngineLimits, EngineShape
from edgellm.kernels.arrays import Array
from edgellm.kernels.sampling.twin import first_not_finite


def require_adapters(limits: EngineLimits) -> None:
    """Raise AdapterError where the engines were built without adapters."""
    if not limits.has_lora:
        raise AdapterError(
            "the engines were built without LoRA adapters: build them with --lora NAME=DIR or --max-lora-rank RANK"
        )


class AdapterSlots:
    """Adapters by name, `limits.lora_slots` places for them on the device, and what each sequence's slot takes.

    Not thread-safe. Everything is done in order with the rest of the backend's work, so that steps which were launched
    before still see what they were launched with.
    """

    def __init__(self, backend: Backend, config: DecoderConfig, limits: EngineLimits) -> None:
        """Raises AdapterError where the engines were built without adapters."""
        require_adapters(limits)
        self._backend, self._config, self._limits = backend, config, limits
        self._projections = adapted_projections(decoder_weights(config))
        edges = [each.edge(limits.lora_slots, limits.lora_rank) for each in self._projections]
        self._weights = backend.shared_zeros({name: (shape, "compute") for pair in edges for name, shape in pair})
        self._scales = backend.zeros((limits.max_batch, limits.lora_slots), "compute")
        #: By name, the digest and what a place of each engine input is filled with.
        self._adapters: dict[str, tuple[str, dict[str, np.ndarray]]] = {}
        #: The place of each adapter that has one, in the order in which they were asked for last.
        self._places: OrderedDict[str, int] = OrderedDict()
        #: The adapter of each sequence's slot.
        self.assigned: list[str | None] = [None] * limits.max_batch

    @property
    def names(self) -> tuple[str, ...]:
        """The adapters that can be chosen."""
        return tuple(self._adapters)

    def add(self, name: str, adapter: LoraAdapter) -> None:
        """Make an adapter available. Its matrices are kept as the engines take them.

        Raises AdapterError for a name that is taken, a rank beyond what the engines were built for, and values that
        their dtype cannot hold, or that are infinite once the adapter's scale is multiplied into them.
        """
        if name in self._adapters:
            raise AdapterError(f"there is an adapter {name!r} already: take another name")
        if adapter.rank > self._limits.max_lora_rank:
            raise AdapterError(
                f"the adapter {name!r} has the rank {adapter.rank}, the engines take up to "
                f"{self._limits.max_lora_rank}: build them with --max-lora-rank {adapter.rank}"
            )
        self._adapters[name] = adapter.digest, self._pack(name, adapter)

    def digest(self, name: str | None) -> str | None:
        """What is to be bound to a name's adapter is bound to this (None: no adapter); AdapterError if unknown."""
        if name is None:
            return None
        if name not in self._adapters:
            known = ", ".join(map(repr, self._adapters)) or "there are none"
            raise AdapterError(f"there is no adapter {name!r}: expected one of those loaded ({known})")
        return self._adapters[name][0]

    def has_place(self, name: str | None, *slots: int) -> bool:
        """Whether `assign` would find a place for the adapter in one of the `slots`, which are left by then."""
        return name is None or self._find_place(name, *slots) is not None

    def assign(self, slot: int, name: str | None) -> None:
        """Let a sequence's slot take the adapter `name` (None: none) from the next step on.

        Raises AdapterError, and changes nothing, for an unknown name, and where every place is taken by an adapter that
        another slot uses.
        """
        self.digest(name)
        if name == self.assigned[slot]:
            return
        scales = np.zeros((1, self._limits.lora_slots), np.float32)
        if name is not None:
            index = self._find_place(name, slot)
            if index is None:
                used = ", ".join(sorted({repr(other) for other in self.assigned if other is not None}))
                raise AdapterError(
                    f"the adapter {name!r} finds no place: the engines hold {self._limits.lora_slots} at once, and "
                    f"sequences use {used}. Wait for one of them, or build with more --lora-slots"
                )
            self._fill(index, name)
            scales[0, index] = 1
        self.assigned[slot] = name
        self._backend.upload(self._scales[slot : slot + 1], self._converted(scales, "the scales"))

    def move(self, source: int, target: int) -> None:
        """Let slot `target` go on with the adapter of slot `source`, which has none then."""
        self.assign(target, self.assigned[source])
        self.assign(source, None)

    def bindings(self, slots: slice) -> dict[str, Array]:
        """The engines' inputs for consecutive sequences' slots; the same memory for as long as this object lives."""
        return self._weights | {SCALES: self._scales[slots]}

    def clear(self) -> None:
        """Let go of all memory."""
        self._weights.clear()
        self._adapters.clear()

    def _find_place(self, name: str, *slots: int) -> int | None:
        """Where the adapter is, or else an empty place, or the one that was not asked for for longest; None if others
        need them all."""
        if name in self._places:
            return self._places[name]
        needed = {other for number, other in enumerate(self.assigned) if number not in slots}
        empty = (index for index in range(self._limits.lora_slots) if index not in self._places.values())
        return next(chain(empty, (index for other, index in self._places.items() if other not in needed)), None)

    def _fill(self, index: int, name: str) -> None:
        if name not in self._places:
            for other in [other for other, place in self._places.items() if place == index]:
                del self._places[other]
            for edge, values in self._adapters[name][1].items():
                rows = len(values)
                self._backend.upload(self._weights[edge][index * rows : (index + 1) * rows], values)
            self._places[name] = index
        self._places.move_to_end(name)

    def _pack(self, name: str, adapter: LoraAdapter) -> dict[str, np.ndarray]:
        """What a place of each engine input is filled with, in memory that is fast to copy from."""
        rank, storage = self._limits.lora_rank, STORAGE[self._backend.compute_dtype]
        edges = [each.edge(1, rank) for each in self._projections]
        total = sum(math.prod(shape) for pair in edges for _, shape in pair)
        memory = self._backend.host_memory(total * storage.itemsize).view(storage)
        packed, position = {}, 0
        for each, pair in zip(self._projections, edges, strict=True):
            for (edge, shape), values in zip(pair, each.pack(adapter.pairs, rank), strict=True):
                packed[edge] = memory[position : position + values.size].reshape(shape)
                packed[edge][...] = self._converted(values, f"{name}: {edge}")
                position += values.size
        return packed

    def _converted(self, values: np.ndarray, what: str) -> np.ndarray:
        dtype = self._backend.compute_dtype
        converted, overflowed = convert(values, "float32", dtype)
        if overflowed:
            raise AdapterError(
                f"{overflowed} values of {what} are too large for {dtype}: build the engines with --dtype bfloat16"
            )
        index = first_not_finite(converted.reshape(-1))
        if index >= 0:  # the adapter's own values are finite: they are no more once its scale is multiplied into them
            raise AdapterError(
                f"{what} is {value_and_place(converted, dtype, index)} with the adapter's scale, expected finite "
                "numbers: check lora_alpha, alpha_pattern and the ranks in its adapter_config.json"
            )
        return converted


class AdaptedRunner:
    """The adapters of a runner's slots: `adapters` has them (None: the runner was opened without)."""

    limits: EngineLimits
    adapters: AdapterSlots | None

    def set_adapter(self, slot: int, name: str | None) -> None:
        """`AdapterSlots.assign` for the sequence that `slot` is going to hold, until it stops."""
        if self.adapters is not None or name is not None:
            self._adapter_slots(name).assign(slot, name)

    def adapter_digest(self, name: str | None) -> str | None:
        return None if name is None else self._adapter_slots(name).digest(name)

    def has_adapter_place(self, name: str | None, *slots: int) -> bool:
        return name is None or self._adapter_slots(name).has_place(name, *slots)

    def _adapter_slots(self, name: str | None) -> AdapterSlots:
        if self.adapters is None:
            raise AdapterError(f"the adapter {name!r} was asked for, but the model was opened without adapters")
        return self.adapters

    def adapts(self, slots: slice) -> bool:
        """Whether a sequence of the slots has an adapter, so that the engines with adapters must run."""
        return self.adapters is not None and any(name is not None for name in self.adapters.assigned[slots])

    def engine_shape(self, shape: EngineShape, slots: slice) -> EngineShape:
        """The shape of the engine that must run for the slots: `shape` itself, or the one that applies adapters."""
        return self.limits.with_adapters(shape) if self.adapts(slots) else shape

    def adapter_inputs(self, shape: EngineShape, slots: slice) -> dict[str, Array]:
        """What an engine with adapters is bound to in addition; nothing for one without."""
        return self.adapters.bindings(slots) if shape.lora_slots and self.adapters is not None else {}

    @property
    def adapter_kinds(self) -> tuple[bool, ...]:
        """What `adapts` can say."""
        return (False,) if self.adapters is None else (False, True)
