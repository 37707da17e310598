"""Engines of encoders of images and speech by hand-written kernels: a program's calls, each a launch that is prepared
once, among them those of plans for steps that TensorRT runs.

They stand behind the same edge as TensorRT's engines, but for the weights that `paddings` names, which have zeros
behind their rows and columns. An image's embeddings have the same bits in an engine of more rows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from edgellm.engines.backends.base import BoundEngine
from edgellm.engines.backends.encoder_calls import LINEAR_CALLS, PLANNED, EncoderCalls
from edgellm.engines.backends.encoder_places import Call, Place
from edgellm.engines.backends.padded_weights import padded_weights
from edgellm.engines.backends.steps.plans import PlanLaunch
from edgellm.engines.families.programs import ModelConfig, model_program
from edgellm.engines.model.limits import EngineShape
from edgellm.engines.model.steps import Linear
from edgellm.kernels.arrays import ITEM_SIZES, Array
from edgellm.kernels.decode.contract import LinearWeights
from edgellm.kernels.encoder.contract import EncoderKernels
from edgellm.kernels.quantization.row_runs import PackedLayout


class EncoderStepKernels(NamedTuple):
    """The kernels in a GPU's memory, or their NumPy twins: those of encoders, and linear layers of any number of rows
    as of `NumpyEncoderLinear` (`linear`, `gate_up`, `linear_residual` and, if they have it, `activated`); and of an
    engine with steps that TensorRT runs their titles, and the plans by their shapes."""

    encoder: EncoderKernels
    linear: Any
    planned: Collection[str] = ()
    plans: Mapping[EngineShape, Any] = MappingProxyType({})


class EncoderEngine(BoundEngine):
    """Enqueues the launches of an encoder's program on what is bound."""

    name = "kernels of encoders"

    def __init__(self, kernels: EncoderStepKernels, config: ModelConfig, shape: EngineShape, dtype: str) -> None:
        """A shape whose refused steps TensorRT runs; in "float32" on the kernels' twins."""
        self._kernels, program = kernels, model_program(config, shape)
        lowered = EncoderCalls(program, kernels.planned, dtype == "float32", hasattr(kernels.linear, "activated"))
        self._calls, self._places = lowered.calls, lowered.places
        #: How weights stand in memory that do not stand there as they are published, by name.
        self.paddings = padded_weights(program, kernels.planned)
        padded = {name: (padding.shape, program.edge[name][1]) for name, padding in self.paddings.items()}
        super().__init__(shape, dtype, program.edge | padded, program.weights)
        self._share_scratch(lowered.nbytes, kernels.plans.values())
        self._launches: list[Any] = [None] * len(self._calls)

    def attach(self, device: Any, scratch: Array) -> None:
        super().attach(device, scratch)
        self._launches = [None] * len(self._calls)

    def _load(self, loaded: Mapping[str, PackedLayout | None]) -> None:
        for call in self._calls:
            self._launch(call)

    def _rebind(self, fresh: Collection[str]) -> None:
        """Launches are prepared anew where they use what was bound anew, as an image's mask is."""
        for number, call in enumerate(self._calls):
            if not call.memory.isdisjoint(fresh):
                self._launches[number] = None

    def enqueue(self) -> None:
        if None in self._launches:
            self._check_bound()
            for number, call in enumerate(self._calls):
                if self._launches[number] is None:
                    self._launches[number] = self._launch(call)
                    self._launches[number].overlap_previous()
        for launch in self._launches:
            launch()

    def _launch(self, call: Call) -> Any:
        arguments = [*map(self._resolved, call.arguments)]
        if call.kernel == PLANNED:
            shape, names, *arrays = arguments
            return PlanLaunch(self._kernels.plans[shape], dict(zip(names, arrays, strict=True)))
        kernels = self._kernels.linear if call.kernel in LINEAR_CALLS else self._kernels.encoder
        return getattr(kernels, call.kernel)(*arguments)

    def _resolved(self, argument: Any) -> Any:
        """What a kernel gets: arrays in place of places, and of a linear layer its weights."""
        if isinstance(argument, Linear):
            bias = None if argument.bias is None else self._bound[argument.bias.name]
            return LinearWeights(self._bound[argument.weight.name], bias)
        if not isinstance(argument, Place):
            return argument
        if isinstance(argument.memory, str):
            flat = self._bound[argument.memory].reshape(-1)
            return flat[argument.first : argument.first + argument.size].reshape(*argument.shape)
        dtype = self._own(argument.dtype)
        begin = self._places[argument.memory] + argument.first * ITEM_SIZES[dtype]
        return self._device.part(self._memory, begin, argument.shape, dtype)
