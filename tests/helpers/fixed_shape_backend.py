"""A backend with the habits of the GPU's and the arithmetic of NumPy's: what lies between them runs without a GPU.

Engines exist for the shapes of the limits only, and serve all key ranges where a GPU would run them on hand-written
kernels; arrays are `DeviceArray`, and a captured step repeats what was launched while it was captured, not what its
Python code would launch now.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from kernel_refusals import kernel_refusal

from edgellm.engines.backends.base import Engine
from edgellm.engines.backends.executors import SHARED_MEMORY
from edgellm.engines.backends.numpy_backend import NumpyBackend
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.families.programs import model_program
from edgellm.engines.model.limits import EngineShape
from edgellm.kernels.arrays import DeviceArray


def host_view(value: Any) -> Any:
    """The NumPy arrays behind device arrays, also those in lists, tuples and dictionaries."""
    if isinstance(value, DeviceArray):
        if value.size == 0:
            return np.zeros(value.shape, value.dtype)
        memory = (ctypes.c_char * value.nbytes).from_address(value.pointer)
        return np.frombuffer(memory, value.dtype).reshape(value.shape)
    if isinstance(value, Mapping):
        return {name: host_view(one) for name, one in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(host_view, value))
    if isinstance(value, list | tuple):
        return type(value)(map(host_view, value))
    if isinstance(value, np.ndarray):
        raise TypeError("a host array was given where one of the device is expected")
    return value


class FixedShapeBackend(NumpyBackend):
    """See `edgellm.engines.backends.base.Backend`."""

    steps_ahead = 1
    fixed_shapes = True
    prompt_step = None
    computes_at_once = False

    def __init__(self, directory: EngineDirectory, kernels_of: str | None = None) -> None:
        """`kernels_of` is the compute capability whose kernels are imitated (None: TensorRT runs everything)."""
        draft = directory.model_config("draft") if directory.draft else None
        super().__init__(directory.config, draft, directory.vision.config if directory.vision else None)
        self._shapes = set(directory.limits.all_engine_shapes())
        self._dtype, self._shared_limit = directory.dtype, SHARED_MEMORY.get(kernels_of or "")
        self._recording: list[Callable[[], None]] | None = None
        self.captures: list[str] = []
        self.transfers: list[LateTransfer] = []
        self.kernels = _Kernels(self, self.kernels)
        self.__dict__["draft_tree"] = _Kernels(self, super().draft_tree)
        self.__dict__["acceptance"] = _Kernels(self, super().acceptance)
        self.__dict__["image_kernels"] = _Kernels(self, super().image_kernels)
        self.__dict__["recurrent"] = _PreparedKernels(self, super().recurrent)

    def launch(self, call: Callable[[], None]) -> None:
        """Run a call, or note it where a step is being captured."""
        if self._recording is None:
            call()
        else:
            self._recording.append(call)

    def upload(self, array: DeviceArray, values: np.ndarray) -> None:
        assert self._recording is None, "an upload cannot be captured"
        super().upload(host_view(array), values)

    def copy(self, target: DeviceArray, source: DeviceArray) -> None:
        self.launch(lambda: np.copyto(host_view(target), host_view(source)))

    def move_slots(self, arrays: Sequence[DeviceArray], *how: Any) -> None:
        self.launch(lambda: super(FixedShapeBackend, self).move_slots([*map(host_view, arrays)], *how))

    def signal(self) -> FixedShapeSignal:
        return FixedShapeSignal(self)

    def seen(self, array: DeviceArray) -> np.ndarray:
        return host_view(array)

    def read(self, array: DeviceArray) -> Any:
        assert self._recording is None, "a readback cannot be captured"
        return CheckedReadback(super().read(host_view(array)), [*self.transfers])

    def upload_rows(self, target: DeviceArray, values: np.ndarray, rows: int, first: int = 0) -> LateTransfer:
        assert self._recording is None, "an upload cannot be captured"
        super().upload_rows(host_view(target), values, rows, first)
        self.transfers.append(LateTransfer(self, values[:, :rows]))
        return self.transfers[-1]

    def download_rows(self, source: DeviceArray, values: np.ndarray, rows: int, first: int = 0) -> Any:
        return super().download_rows(host_view(source), values, rows, first)

    def host_memory(self, nbytes: int) -> np.ndarray:
        return np.empty(nbytes, np.uint8)

    def load_weights(self, *arguments: Any) -> dict[str, DeviceArray]:
        return {
            name: _device(np.ascontiguousarray(values)) for name, values in super().load_weights(*arguments).items()
        }

    def takes_any_key_range(self, shape: EngineShape) -> bool:
        if self._shared_limit is None:
            return False
        return kernel_refusal(self._configs[shape.model], shape, self._dtype, self._shared_limit) is None

    def load_engine(self, shape: EngineShape) -> FixedShapeEngine:
        known = shape in self._shapes or self.takes_any_key_range(shape)
        assert known, f"{shape.name} (selected {shape.selected}) is none of the limits' engines"
        return FixedShapeEngine(self, super().load_engine(shape), self._edge(shape))

    def _edge(self, shape: EngineShape) -> set[str]:
        """The names of the engine's tensors: what TensorRT would know."""
        config = self._configs[shape.model]
        return set(model_program(config, shape).edge)

    def capture(self, step: Callable[[], None], name: str) -> Callable[[], None]:
        self.captures.append(name)
        self._recording = calls = []
        try:
            step()
        finally:
            self._recording = None

        def replay() -> None:
            for call in calls:
                call()

        return replay

    def _allocate(self, make: Callable[..., np.ndarray], shape: Sequence[int], dtype: str) -> DeviceArray:
        return _device(super()._allocate(make, shape, dtype))


class LateTransfer:
    """A copy from memory that has to stay as it is until the copy, or something later, was waited for."""

    def __init__(self, backend: FixedShapeBackend, values: np.ndarray) -> None:
        self._backend, self._values, self._copy = backend, values, values.copy()

    def wait(self) -> None:
        if self in self._backend.transfers:
            self._backend.transfers.remove(self)
            np.testing.assert_array_equal(self._values, self._copy, "memory was changed while it was copied from")


class CheckedReadback:
    """A readback, and the copies that are done when it is there."""

    def __init__(self, readback: Any, before: Sequence[LateTransfer]) -> None:
        self._readback, self._before = readback, before

    def wait(self) -> np.ndarray:
        for transfer in self._before:
            transfer.wait()
        return self._readback.wait()


class FixedShapeSignal:
    """A signal that has to be given, also by a captured step, each time before it is waited for."""

    def __init__(self, backend: FixedShapeBackend) -> None:
        self._backend, self._given = backend, False

    def give(self) -> None:
        self._backend.launch(self._set)

    def _set(self) -> None:
        self._given = True

    def wait(self) -> None:
        assert self._given, "nothing that is under way gives this signal"
        self._given = False


class FixedShapeEngine(Engine):
    """An engine of one shape; unknown and missing bindings are errors, as they are for TensorRT's."""

    reads_attention_mask = True

    def __init__(self, backend: FixedShapeBackend, engine: Any, edge: set[str]) -> None:
        self.shape = engine.shape
        self._backend, self._engine, self._edge, self._unbound = backend, engine, edge, set(edge)

    def bind(self, bindings: Mapping[str, DeviceArray]) -> None:
        unknown = bindings.keys() - self._edge
        assert not unknown, f"{self.shape.name} has no tensor {', '.join(sorted(unknown))}"
        self._unbound -= bindings.keys()
        self._engine.bind(host_view(dict(bindings)))

    def enqueue(self) -> None:
        assert not self._unbound, f"{self.shape.name}: never bound: {', '.join(sorted(self._unbound))}"
        self._backend.launch(self._engine.enqueue)


class _Kernels:
    """NumPy's kernels on device arrays."""

    def __init__(self, backend: FixedShapeBackend, kernels: Any) -> None:
        self._backend, self._kernels = backend, kernels

    def __getattr__(self, name: str) -> Any:
        kernel = getattr(self._kernels, name)

        def call(*arguments: Any) -> Any:
            if name.endswith("_size"):
                return kernel(*arguments)
            on_host = host_view(arguments)
            return self._backend.launch(lambda: kernel(*on_host))

        return call


class _PreparedKernels:
    """NumPy's kernels whose calls give what launches them, on device arrays."""

    def __init__(self, backend: FixedShapeBackend, kernels: Any) -> None:
        self._backend, self._kernels = backend, kernels

    def __getattr__(self, name: str) -> Any:
        kernel = getattr(self._kernels, name)

        def prepare(*arguments: Any) -> Callable[[], None]:
            launch = kernel(*host_view(arguments))
            return lambda: self._backend.launch(launch)

        return prepare


def _device(values: np.ndarray) -> DeviceArray:
    return DeviceArray(values.ctypes.data, values.shape, values.dtype.name, values)
