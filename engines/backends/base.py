"""The interface behind which the two backends stand: memory, kernels, engines and captured steps.

The runners are written once against it. `NumpyBackend` computes at once on the host; `CudaBackend` enqueues on one
CUDA stream, so a result is there only after `Readback.wait`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.errors import DeviceLostError, EngineError
from edgellm.engines.model.config import WeightSpec
from edgellm.engines.model.limits import EngineShape
from edgellm.engines.model.memory_plan import MemoryPlan
from edgellm.engines.model.states import PRESENT
from edgellm.kernels.acceptance.contract import AcceptanceKernels
from edgellm.kernels.arrays import Array
from edgellm.kernels.images.contract import ImageKernels
from edgellm.kernels.made import Made
from edgellm.kernels.quantization.row_runs import PackedLayout
from edgellm.kernels.recurrent.contract import RecurrentKernels
from edgellm.kernels.sampling.contract import SamplingKernels
from edgellm.kernels.sounds.contract import SoundKernels
from edgellm.kernels.tree.contract import TreeKernels

#: What runs a model's steps on a GPU: kernels wherever they take them, or TensorRT wherever it does.
EXECUTORS = ("auto", "tensorrt")


class Engine(Protocol):
    """A loaded engine of fixed shapes."""

    shape: EngineShape
    #: False where the engine takes `attention_mask` but sees the rows before `kvcache_start_index` without reading it
    reads_attention_mask: bool

    def bind(self, bindings: Mapping[str, Array]) -> None:
        """Give memory to inputs and outputs, by name; later calls replace single ones.

        Raises EngineError for a name that the engine does not have, or another shape or dtype than it expects.
        """

    def enqueue(self) -> None:
        """Run on the bound memory; raises EngineError that names a tensor which was never bound."""

    def prepare(self) -> None:
        """Make ready what `enqueue` runs on what is bound, for which it would take its time."""
        return None

    def around_rows(self) -> list[Callable[[], None]]:
        """What `enqueue` does, in the parts before tokens' own rows are taken and from there on; one where none are."""
        return [self.enqueue]


class Readback(Protocol):
    """Values of a device array that are on their way to the host."""

    def wait(self) -> np.ndarray:
        """The values, once everything enqueued before the reading is done."""


class Transfer(Protocol):
    """A copy between host memory and device memory that is under way; it keeps both alive."""

    def wait(self) -> None:
        """Return once it is done: what was read is there, or what was written from may be changed."""


class Signal(Protocol):
    """Tells the host that work has come to a point, in a captured step, too."""

    def give(self) -> None:
        """Enqueue it."""

    def wait(self) -> None:
        """Return once everything enqueued before the latest `give` is done."""


class Timestamp(Protocol):
    """The moment at which a backend's work has come to a point."""

    def seconds(self) -> float:
        """The moment on the clock of `time.perf_counter`; waits for it."""


class Backend(Protocol):
    """What a runner needs of a machine."""

    name: str
    #: of the GPU whose memory arrays are in; None on NumPy
    gpu_index: int | None
    #: how many share the base's steps; see `opening.open_backend`
    gpus: int
    #: what runs the steps of the base on a GPU, one of `EXECUTORS`; "auto" on NumPy
    executor: str
    kernels: SamplingKernels
    #: dtype of activations and weights: the model's on the GPU, "float32" on NumPy
    compute_dtype: str
    #: how many decode steps may be launched before the first of them is read: 1 hides the host's work, 0 wastes none
    steps_ahead: int
    #: True where engines exist for certain shapes only, False where any T and L will do
    fixed_shapes: bool
    #: of how many tokens chunks of prompts are multiples, but short ones: 1 where any will do, None where engines have
    #: certain sizes alone
    prompt_step: int | None
    #: True where a call is done when it returns, so that its time can be taken by the clock
    computes_at_once: bool
    #: what was compiled, loaded, built and captured so far
    made: Made
    #: kernels of the draft's tree, of acceptance, recurrent layers, images and sounds, loaded when first asked for
    draft_tree: TreeKernels
    acceptance: AcceptanceKernels
    recurrent: RecurrentKernels
    image_kernels: ImageKernels
    sound_kernels: SoundKernels

    def lost(self) -> DeviceLostError | None:
        """What the device has failed with where nothing more can be computed on it; waits for what runs. For who has
        seen another error, which may have been the first sign."""

    def empty(self, shape: Sequence[int], dtype: str) -> Array:
        """Uninitialized memory; "compute" stands for `compute_dtype`. Raises DeviceMemoryError."""

    def zeros(self, shape: Sequence[int], dtype: str) -> Array:
        """Zeroed memory."""

    def zeros_side_by_side(self, edge: Mapping[str, tuple[tuple[int, ...], str]]) -> dict[str, Array]:
        """Zeroed arrays of shapes and dtypes by name, in few pieces of memory: many that live equally long."""

    def shared_zeros(self, edge: Mapping[str, tuple[tuple[int, ...], str]]) -> dict[str, Array]:
        """The same for the states of the base, of which each GPU may hold the heads that it computes."""

    def host_visible(self, shape: Sequence[int], dtype: str) -> Array:
        """Zeroed memory for small results: kernels write it, and reading it copies nothing on the device.

        `Readback.wait` gives what is there by then, so what is read must not be written again until it was waited for:
        a ring, written a place at a time.
        """

    def upload(self, array: Array, values: np.ndarray) -> None:
        """Set `array` from host values of its shape, in order with the other work."""

    def copy(self, target: Array, source: Array) -> None:
        """Set `target` from a device array of its shape and dtype that does not overlap it, in order with the rest."""

    def move_slots(
        self, arrays: Sequence[Array], source: int, target: int, rows: int | None = None, swaps: bool = False
    ) -> None:
        """Let slot `target` of each of `arrays` [S, ...] hold what slot `source` does and, where it `swaps`, the other
        way round, too: all of it or, of arrays [S, G, C, D], the first `rows` of C rows of each of G groups."""

    def signal(self) -> Signal:
        """A signal between the device and the host."""

    def seen(self, array: Array) -> np.ndarray:
        """What the host sees of an array of `host_visible` memory, right now."""

    def read(self, array: Array) -> Readback:
        """Start bringing a small array to the host; at most 8 of the same shape may be unread at a time."""

    def host_memory(self, nbytes: int) -> np.ndarray:
        """[nbytes] uint8 of host memory for `upload_rows` and `download_rows` at the full speed of the bus (pinned on
        the GPU). Raises DeviceMemoryError."""

    def upload_rows(self, target: Array, values: np.ndarray, rows: int, first: int = 0) -> Transfer:
        """Set `rows` rows of each group of `target` [G, C, D], from row `first` on and behind the last from row 0 on,
        from the first of host `values` [G, N, D] (bfloat16 as uint16), in order with the other work. Raises EngineError
        for another shape or dtype."""

    def begin_beside(self) -> None:
        """Let the copies of `upload_rows_beside` from now on wait for the work that was enqueued up to now."""

    def upload_rows_beside(self, target: Array, values: np.ndarray, rows: int, first: int = 0) -> Transfer:
        """Uploads as `upload_rows` does, but beside the work that is enqueued since `begin_beside`: what touches
        `target` must come after `wait_for`. Transfers that are made one after the other end in this order."""

    def wait_for(self, transfer: Transfer) -> None:
        """Let what is enqueued from now on begin when a transfer of `upload_rows_beside` is done."""

    def download_rows(self, source: Array, values: np.ndarray, rows: int, first: int = 0) -> Transfer:
        """Fill the first `rows` rows of host `values` [G, N, D] from `source` [G, C, D], as `upload_rows` sets them."""

    def load_weights(
        self, checkpoint: Checkpoint, specs: Sequence[WeightSpec], progress: Callable[[int, int], None] | None = None
    ) -> dict[str, Array]:
        """All weights, fused as `specs` say; `progress` gets bytes done and bytes in all. Raises CheckpointError that
        names the tensor and the index of a value that is infinite or NaN."""

    @property
    def known_memory(self) -> Mapping[str, int]:
        """Bytes by the memory plan's names that it does not find itself: weights of models with packed ones, code."""

    def takes_any_key_range(self, shape: EngineShape) -> bool:
        """True where the engine of a shape reads what the lengths of sequences ask for, not what the key range does, so
        that one of the largest serves all. Asked where shapes are fixed."""

    def load_engine(self, shape: EngineShape) -> Engine:
        """The engine for a shape; all share one scratch buffer. Raises PlanError."""

    def scratch_bytes(self) -> int:
        """Size of that buffer for the engines loaded so far."""

    def check_memory(self, plan: MemoryPlan) -> None:
        """Raise DeviceMemoryError, with the plan, if it does not fit into what is free."""

    def capture(self, step: Callable[[], None], name: str) -> Callable[[], None]:
        """A faster way to run `step` again and again on the same memory; `step` must have run once before."""

    def timestamp(self) -> Timestamp:
        """Take note of when everything enqueued up to now is done."""

    def synchronize(self) -> None:
        """Wait for all work."""

    def close(self) -> None:
        """Free everything; the backend cannot be used afterwards."""


def uploaded(backend: Backend, values: np.ndarray) -> Array:
    """A new array of the backend's with host `values`, of a dtype that has one name on both sides."""
    array = backend.empty(values.shape, values.dtype.name)
    backend.upload(array, np.ascontiguousarray(values))
    return array


#: Where scratch of TensorRT's engines begins, in bytes.
_PLAN_ALIGNMENT = 512


class BoundEngine(Engine):
    """What engines on a GPU have in common: of a `shape`, computing in `dtype`, in scratch that others share.

    Not thread-safe: enqueue from the thread that owns the stream.
    """

    reads_attention_mask = True
    #: Whether it multiplies packed weights as they are.
    takes_packed = False
    scratch_bytes = 0

    def __init__(
        self,
        shape: EngineShape,
        dtype: str,
        edge: Mapping[str, tuple[tuple[int, ...], str]],
        weights: Collection[str] = (),
    ) -> None:
        """`edge` are the inputs and outputs by name, the `weights` among them."""
        self.shape, self._dtype, self._weights = shape, dtype, frozenset(weights)
        #: Shape and dtype of all inputs and outputs, by name.
        self.tensors = {name: (size, self._own(kind)) for name, (size, kind) in edge.items()}
        self._bound: dict[str, Any] = {}
        self._device: Any = None
        self._memory: Any = None
        self._has_kernels = False
        self._own_bytes, self._plans = 0, list[Any]()

    def _own(self, kind: str) -> str:
        return self._dtype if kind == "compute" else kind

    def attach(self, device: Any, scratch: Any) -> None:
        """Use `scratch` (at least `scratch_bytes` of uint8, shared with other engines) and the device's stream."""
        if scratch.nbytes < self.scratch_bytes:
            raise EngineError(f"{self.shape.name} needs {self.scratch_bytes} bytes of scratch, got {scratch.nbytes}")
        self._device, self._memory = device, scratch
        for plan in self._plans:
            plan.attach(device, scratch[self._own_bytes :])

    def _share_scratch(self, nbytes: int, plans: Iterable[Any]) -> None:
        """Ask for scratch of `nbytes`, and behind it what the largest of TensorRT's engines for some steps needs."""
        self._own_bytes, self._plans = -(-nbytes // _PLAN_ALIGNMENT) * _PLAN_ALIGNMENT, list(plans)
        self.scratch_bytes = self._own_bytes + max((plan.scratch_bytes for plan in self._plans), default=0)

    def load_kernels(self, loaded: Mapping[str, PackedLayout | None]) -> None:
        """Compile and load what the launches will need now, on memory that nothing reads, rather than when the first
        step waits for it: once, when all weights are `loaded`, and it is known how they are packed (None: dense)."""
        if self._has_kernels or self._bound or not self._weights <= loaded.keys():
            return
        self._bound = {
            name: replace(self._memory, shape=size, dtype=kind) for name, (size, kind) in self.tensors.items()
        }
        self._load(loaded)
        self._bound, self._has_kernels = {}, True

    def _load(self, loaded: Mapping[str, PackedLayout | None]) -> None:
        """Prepare the launches on what stands in for all tensors."""

    def bind(self, bindings: Mapping[str, Array]) -> None:
        """See `Engine.bind`."""
        fresh: dict[str, Any] = {name: array for name, array in bindings.items() if self._bound.get(name) is not array}
        if fresh:
            self._rebind(fresh)
        for name, array in fresh.items():
            if name not in self.tensors:
                raise EngineError(f"{self.shape.name} has no tensor {name!r}; it has {', '.join(self.tensors)}")
            size, dtype = self.tensors[name]
            if (array.shape, str(array.dtype)) != (size, dtype):
                found = f"{name} is {array.dtype} {array.shape}, the engine expects {dtype} {size}"
                raise EngineError(f"{self.shape.name}: {found}")
        self._bound |= fresh

    def _rebind(self, fresh: Mapping[str, Any]) -> None:
        """Forget what was prepared for tensors that get other memory."""

    def _check_bound(self, states: Iterable[str] = ()) -> None:
        """Raise EngineError unless this can be enqueued: all tensors are bound, but for a mask that it does not read,
        outputs `present_NAME` to the memory of its `states`, and scratch is attached."""
        name, bound = self.shape.name, self._bound
        unbound = self.tensors.keys() - bound.keys() - (set() if self.reads_attention_mask else {"attention_mask"})
        if unbound:
            raise EngineError(f"{name}: never bound: {', '.join(sorted(unbound))}")
        if self._memory is None:
            raise EngineError(f"{name}: attach was not called")
        for state in states:
            present, kept = bound[PRESENT + state], bound[state]
            if present is not kept and getattr(present, "pointer", 0) != getattr(kept, "pointer", 1):
                raise EngineError(f"{name}: {PRESENT}{state} must be bound to the memory of its cache")


def row_pieces(capacity: int, rows: int, first: int) -> list[tuple[slice, slice]]:
    """`rows` rows from row `first` of `capacity` on, and behind the last from row 0 on: which of the array, and which
    of the values that they are copied from or to."""
    before = min(rows, capacity - first)
    pieces = [(slice(first, first + before), slice(0, before)), (slice(0, rows - before), slice(before, rows))]
    return pieces if before < rows else pieces[:1]


def check_rows(shape: tuple[int, ...], dtype: np.dtype, values: np.ndarray, rows: int, first: int = 0) -> None:
    """Raise EngineError unless an array [G, C, D] of `dtype` and `values` [G, N, D] both have `rows` rows, and the
    array row `first`."""
    fits = len(shape) == values.ndim == 3 and (values.shape[0], values.shape[2]) == (shape[0], shape[2])
    is_within = fits and 0 <= rows <= min(values.shape[1], shape[1]) and 0 <= first < max(1, shape[1])
    if not is_within or values.dtype != dtype:
        start = f" from row {first} on" if first else ""
        raise EngineError(
            f"cannot copy {rows} rows{start} between {values.dtype} {values.shape} on the host and {dtype} "
            f"{tuple(shape)}: expected [groups, rows, size] that differ in rows only"
        )
