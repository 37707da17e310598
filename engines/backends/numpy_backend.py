"""The backend without a GPU: NumPy in float32, every call done when it returns."""

from __future__ import annotations

import ctypes
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import cast

import numpy as np

from edgellm.engines.backends.base import Engine, check_rows, row_pieces
from edgellm.engines.backends.numpy_operations import NumpyOperations
from edgellm.engines.backends.ranks import Rank
from edgellm.engines.checkpoints.weights import load_numpy_weights
from edgellm.engines.errors import DeviceLostError, DeviceMemoryError, EngineError
from edgellm.engines.families.programs import ModelConfig, model_program
from edgellm.engines.model.audio import AudioConfig
from edgellm.engines.model.config import DecoderConfig, DraftConfig
from edgellm.engines.model.graph import ProgramGraph
from edgellm.engines.model.limits import EngineShape
from edgellm.engines.model.memory_plan import MEBIBYTE, MemoryPlan, available_memory
from edgellm.engines.model.program import Program
from edgellm.engines.model.states import PRESENT
from edgellm.engines.model.vision import VisionConfig
from edgellm.engines.recently_used import RecentlyUsed
from edgellm.kernels.acceptance.twin import NumpyAcceptance
from edgellm.kernels.arrays import Array
from edgellm.kernels.images.twin import NumpyImages
from edgellm.kernels.made import Made
from edgellm.kernels.recurrent.twin import NumpyRecurrent
from edgellm.kernels.sampling.twin import NumpySampling
from edgellm.kernels.sounds.twin import NumpySounds
from edgellm.kernels.tree.twin import NumpyTree

#: Engines of fewer parameters compute on one thread (see `one_blas_thread`).
_SMALL_MODEL = 100_000_000
_KEPT_PROGRAMS = 64


class NumpyReadback:
    """Values that are on the host already."""

    def __init__(self, values: np.ndarray) -> None:
        self._values = values.copy()

    def wait(self) -> np.ndarray:
        return self._values


class NumpyWork:
    """A signal or a transfer: everything is done already."""

    def give(self) -> None:
        """Nothing is to be done."""

    def wait(self) -> None:
        """Return at once."""


class NumpyTimestamp:
    """Now."""

    def __init__(self) -> None:
        self._seconds = time.perf_counter()

    def seconds(self) -> float:
        return self._seconds


class NumpyEngine(Engine):
    """Runs a program with NumPy on the bound arrays."""

    reads_attention_mask = True

    def __init__(self, program: Program, rank: Rank | None = None) -> None:
        """`rank`: which part of a shared program this is."""
        self.shape = program.shape
        self._bindings: dict[str, np.ndarray] = {}
        self.is_small = sum(math.prod(spec.shape) for spec in program.weights.values()) < _SMALL_MODEL
        wide, threads = program.shape.kv_cache == "int8", 0 if self.is_small else blas_threads()
        operations = NumpyOperations(self._bindings, self._bindings, wide, threads, rank)
        #: Computes, by as many threads as OpenBLAS has at the moment.
        self.run = ProgramGraph(operations, program).run
        self._threads = one_blas_thread if self.is_small else nullcontext

    def bind(self, bindings: Mapping[str, Array]) -> None:
        """Remember arrays by name; the interpreter checks their shapes as it meets them. Caches change in place."""
        arrays = cast(Mapping[str, np.ndarray], bindings)
        self._bindings.update({name: array for name, array in arrays.items() if not name.startswith(PRESENT)})

    def enqueue(self) -> None:
        """Compute; outputs are written into their bound arrays."""
        with self._threads():
            self.run()


class NumpyBackend:
    """See `edgellm.engines.backends.base.Backend`."""

    name = "numpy"
    gpu_index: int | None = None
    gpus = 1
    compute_dtype = "float32"
    steps_ahead = 0
    executor = "auto"
    fixed_shapes = False
    prompt_step: int | None = 1
    computes_at_once = True

    def __init__(
        self,
        config: DecoderConfig,
        draft: DraftConfig | None = None,
        vision: VisionConfig | None = None,
        audio: AudioConfig | None = None,
    ) -> None:
        self._configs: dict[str, ModelConfig | None]
        self._configs = {"base": config, "draft": draft, "vision": vision, "audio": audio}
        #: Engines of prompts are made anew for each.
        self._programs: RecentlyUsed[EngineShape, Program] = RecentlyUsed(_KEPT_PROGRAMS)
        self.made = Made()
        self.kernels = NumpySampling()

    # What kernels do, made when it is first asked for.
    draft_tree = cached_property(lambda self: NumpyTree())
    acceptance = cached_property(lambda self: NumpyAcceptance())
    recurrent = cached_property(lambda self: NumpyRecurrent())
    image_kernels = cached_property(lambda self: NumpyImages())
    sound_kernels = cached_property(lambda self: NumpySounds())

    def lost(self) -> DeviceLostError | None:
        return None

    def empty(self, shape: Sequence[int], dtype: str) -> np.ndarray:
        return self._allocate(np.empty, shape, dtype)

    def zeros(self, shape: Sequence[int], dtype: str) -> np.ndarray:
        return self._allocate(np.zeros, shape, dtype)

    def zeros_side_by_side(self, edge: Mapping[str, tuple[tuple[int, ...], str]]) -> dict[str, np.ndarray]:
        """Each by itself: the system gives memory by pages."""
        return {name: self.zeros(shape, dtype) for name, (shape, dtype) in edge.items()}

    shared_zeros = zeros_side_by_side

    host_visible = zeros

    def upload(self, array: np.ndarray, values: np.ndarray) -> None:
        np.copyto(array, values)

    def move_slots(
        self, arrays: Sequence[np.ndarray], source: int, target: int, rows: int | None = None, swaps: bool = False
    ) -> None:
        for array in arrays:
            slots = array[source : source + 1], array[target : target + 1]
            one, other = slots if rows is None else (slot[:, :, :rows] for slot in slots)
            kept = other.copy()
            other[...] = one
            if swaps:
                one[...] = kept

    copy = upload

    signal = staticmethod(NumpyWork)

    def seen(self, array: np.ndarray) -> np.ndarray:
        return array

    read = staticmethod(NumpyReadback)

    def host_memory(self, nbytes: int) -> np.ndarray:
        """Memory like any other."""
        return self.empty((nbytes,), "uint8")

    def upload_rows(self, target: np.ndarray, values: np.ndarray, rows: int, first: int = 0) -> NumpyWork:
        check_rows(target.shape, target.dtype, values, rows, first)
        for own, of_values in row_pieces(target.shape[1], rows, first):
            np.copyto(target[:, own], values[:, of_values])
        return NumpyWork()

    def begin_beside(self) -> None:
        """Everything is done."""

    def upload_rows_beside(self, target: np.ndarray, values: np.ndarray, rows: int, first: int = 0) -> NumpyWork:
        return self.upload_rows(target, values, rows, first)

    def wait_for(self, transfer: NumpyWork) -> None:
        """It is done already."""

    def download_rows(self, source: np.ndarray, values: np.ndarray, rows: int, first: int = 0) -> NumpyWork:
        check_rows(source.shape, source.dtype, values, rows, first)
        for own, of_values in row_pieces(source.shape[1], rows, first):
            np.copyto(values[:, of_values], source[:, own])
        return NumpyWork()

    load_weights = staticmethod(load_numpy_weights)

    #: Nothing: packed weights become float32.
    known_memory: Mapping[str, int] = MappingProxyType({})

    def takes_any_key_range(self, shape: EngineShape) -> bool:
        """False: attention computes with all of the rows that it is given."""
        return False

    def load_engine(self, shape: EngineShape) -> Engine:
        return NumpyEngine(self._program(shape))

    def _program(self, shape: EngineShape) -> Program:
        config = self._configs[shape.model]
        if config is None:
            raise EngineError(f"{shape.name} was asked for, but there is no {shape.model} model")
        return self._programs.find(shape) or self._programs.keep(shape, model_program(config, shape))

    def scratch_bytes(self) -> int:
        """NumPy's temporaries are small and short-lived."""
        return 0

    def check_memory(self, plan: MemoryPlan) -> None:
        available = available_memory()
        if available is not None and plan.total > available:
            raise DeviceMemoryError(
                f"The model needs {plan.total / MEBIBYTE:.0f} MiB and {available / MEBIBYTE:.0f} MiB are free:\n"
                f"{plan.describe()}\nBuild the engine directory with a smaller --kv-capacity or --max-batch, or take "
                "a smaller model."
            )

    def capture(self, step: Callable[[], None], name: str) -> Callable[[], None]:
        """The step itself: there is nothing to gain."""
        return step

    timestamp = staticmethod(NumpyTimestamp)

    def synchronize(self) -> None:
        """Nothing is ever under way."""

    def close(self) -> None:
        """Nothing to free."""

    def _allocate(self, make: Callable[..., np.ndarray], shape: Sequence[int], dtype: str) -> np.ndarray:
        return make(tuple(shape), np.float32 if dtype == "compute" else np.dtype(dtype))


#: NumPy's own wheels rename OpenBLAS's functions; systems' packages do not.
_OPENBLAS_NAMES = (
    "scipy_openblas_{}_num_threads64_",
    "scipy_openblas_{}_num_threads",
    "openblas_{}_num_threads64_",
    "openblas_{}_num_threads",
)


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """One thread inside; without effect where NumPy uses another library."""
    functions = _openblas()
    if functions is None:
        yield
        return
    get, set_threads = functions
    before = get()
    set_threads(1)
    try:
        yield
    finally:
        set_threads(before)


def blas_threads() -> int:
    """How many threads OpenBLAS has; 0 where NumPy uses another library."""
    functions = _openblas()
    return 0 if functions is None else functions[0]()


@lru_cache(maxsize=1)
def _openblas() -> tuple[Callable[[], int], Callable[[int], None]] | None:
    """The functions that get and set the number of threads, of the OpenBLAS that this process has loaded (Linux)."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    paths = {line.split(maxsplit=5)[5] for line in maps.splitlines() if "openblas" in line and len(line.split()) > 5}
    for path in sorted(paths):
        try:
            library = ctypes.CDLL(path)
        except OSError:
            continue
        for name in _OPENBLAS_NAMES:
            if hasattr(library, name.format("get")) and hasattr(library, name.format("set")):
                get, set_threads = (getattr(library, name.format(verb)) for verb in ("get", "set"))
                set_threads.restype = None
                return get, set_threads
    return None
