"""Several GPUs of one machine: the base's steps are shared among ranks, each of which has its weights and states.

The first rank is the backend that everybody sees: what is no step of the base runs on it alone, drafts and encoders
too, and its stream is the order of all work. It looks tokens up, in the memory of the rank that has their rows. A step
of the base brings its inputs to the other ranks, whose streams branch off for it, and come back behind it; so one
captured graph holds the steps of all GPUs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property, partial, partialmethod
from typing import Any, TypeVar

import numpy as np

from edgellm.engines.backends.base import Engine
from edgellm.engines.backends.cuda_backend import CudaBackend
from edgellm.engines.backends.cuda_events import DeviceReadback, DeviceTransfer
from edgellm.engines.backends.device_layouts import PackedLayouts
from edgellm.engines.backends.kernel_engine import KernelEngine
from edgellm.engines.backends.rank_memory import RankedArray, RankMemory, RankStreams, reach_each_other
from edgellm.engines.backends.rank_weights import RankWeights
from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.errors import DeviceLostError, DeviceMemoryError, EngineError
from edgellm.engines.model.adapted_projections import SCALES
from edgellm.engines.model.config import WeightSpec
from edgellm.engines.model.decoder import decoder_weights
from edgellm.engines.model.limits import EngineShape
from edgellm.engines.model.memory_plan import MEBIBYTE, MemoryPlan
from edgellm.engines.model.sharding import Range
from edgellm.kernels.acceptance.contract import MAXIMUM_ACCEPTED
from edgellm.kernels.acceptance.launcher import ADVANCE, CudaAcceptance
from edgellm.kernels.arrays import Array, DeviceArray
from edgellm.kernels.launch import KernelModule
from edgellm.kernels.ranks.launcher import MOST_RANKS
from edgellm.kernels.recurrent.launcher import CudaRecurrent
from edgellm.kernels.sampling.launcher import SharedTable

_Found = TypeVar("_Found")
#: What other ranks need to move accepted rows, and how many numbers of each slot.
_MOVES = {"rows begin": 1, "accepted": MAXIMUM_ACCEPTED, "how many": 1}


class CudaRanks(CudaBackend):
    """The backend of so many GPUs; `DeviceArray` is memory of the first, `RankedArray` that of all."""

    _ranks_opened: ExitStack | None = None

    def __init__(
        self,
        directory: EngineDirectory,
        packed: PackedLayouts | None = None,
        executor: str = "auto",
        gpus: Sequence[int] = (0, 0),
    ) -> None:
        """`gpus` are the indices of the ranks' GPUs; see `CudaBackend`. Raises EngineError that names what of the model
        they cannot share."""
        count = len(gpus)
        if count > MOST_RANKS:
            raise EngineError(f"gpus is {count}: up to {MOST_RANKS} GPUs share a model. Take so many, or fewer")
        if executor != "auto":
            raise EngineError(f"several GPUs share what kernels run: take the executor auto, not {executor}")
        #: Of the base's weights, what each rank has; it refuses what cannot be shared.
        base = (packed or {}).get("base", {})
        self._parts = RankWeights(directory, count, base, shares_table=reach_each_other(gpus))
        self.others: list[CudaBackend] = []
        with ExitStack() as opened:
            for rank in range(1, count):
                layouts = {"base": self._parts.layouts[rank]}
                self.others.append(CudaBackend(directory, layouts, executor, gpus[rank], self._parts.shares[rank]))
                opened.callback(self.others[-1].close)  # contexts lie one on the other
            own = dict(packed or {}) | ({"base": self._parts.layouts[0]} if packed else {})
            super().__init__(directory, own, executor, gpus[0], self._parts.shares[0])
            opened.callback(super().close)
            self.gpus = count
            self._ranks: list[CudaBackend] = [self, *self.others]
            self.memory = RankMemory(self._ranks)
            opened.callback(self.memory.close)
            for rank, backend in enumerate(self._ranks):
                with backend.current():
                    backend.rank = self.memory.kernels(rank, backend.kernel_module, self.compute_dtype)
            assert self.rank is not None
            self._streams = RankStreams(self._ranks, self.memory, self.rank.joined())
            self._loaded_parts: list[dict[str, Any]] = [{} for _ in self._ranks]
            self._buffers: dict[tuple[int, str], DeviceArray] = {}
            self._ranks_opened = opened.pop_all()

    acceptance = cached_property(lambda self: RankedAcceptance(self, self._directory.limits.max_batch))
    recurrent = cached_property(lambda self: RankedRecurrent(self.kernel_module, self))

    def run(self, launches: Sequence[Sequence[Callable[[], object]]]) -> None:
        """See `RankStreams.run`."""
        self._streams.run(launches)

    def each(self, run: Callable[[int, CudaBackend], _Found]) -> list[_Found]:
        """What is found of each rank and its backend, whose context is current then."""
        found = []
        for rank, backend in enumerate(self._ranks):
            with backend.current():
                found.append(run(rank, backend))
        return found

    def buffer(self, rank: int, name: str, shape: Sequence[int], dtype: str) -> DeviceArray:
        """Memory of a rank that what runs one after another shares, by name."""
        held, dtype = self._buffers.get((rank, name)), self._own(dtype)
        if held is None or held.dtype != dtype or held.size < math.prod(shape):
            with self._ranks[rank].current():
                held = self._buffers[rank, name] = self._ranks[rank].zeros((max(1, math.prod(shape)),), dtype)
        return held[: math.prod(shape)].reshape(*shape)

    def brought(self, rank: int, arrays: Mapping[str, DeviceArray]) -> tuple[list[Callable[[], object]], list[Any]]:
        """What a rank's kernels read of the first one's memory, by name: launches that bring it, and where it is then.
        It stays where ranks use each other's memory."""
        kernels, given = self._ranks[rank].rank, [*arrays.values()]
        if self.memory.nccl is None or kernels is None:
            return [], given
        own = [self.buffer(rank, name, array.shape, array.dtype) for name, array in arrays.items()] if rank else given
        return kernels.bring(given, own), own

    def read(self, array: DeviceArray) -> DeviceReadback:
        """See `Backend.read`; a rank that has failed is an error when it is waited for."""
        return _CheckedReadback(super().read(array), self.memory)

    def shared_zeros(self, edge: Mapping[str, tuple[tuple[int, ...], str]]) -> dict[str, Any]:
        """Arrays of which each rank has the heads, channels or columns that it computes with."""
        return {
            name: RankedArray(edge[name][0], parts[0][1].dtype, parts)
            for name, parts in zip(edge, zip(*self.each(partial(self._zeros_of, edge)), strict=True), strict=True)
        }

    def _zeros_of(
        self, edge: Mapping[str, tuple[tuple[int, ...], str]], rank: int, backend: CudaBackend
    ) -> list[tuple[tuple[Range, ...], DeviceArray]]:
        """A rank's part of each."""
        ranges = {name: self._parts.ranges(rank, name, shape) for name, (shape, _) in edge.items()}
        widths = {name: sum(end - begin for begin, end in own) for name, own in ranges.items()}
        own = {name: ((shape[0], widths[name], *shape[2:]), dtype) for name, (shape, dtype) in edge.items()}
        found = CudaBackend.zeros_side_by_side(backend, own)
        backend.synchronize()
        return [(ranges[name], found[name]) for name in edge]

    def upload(self, array: Any, values: np.ndarray) -> None:
        """See `Backend.upload`: into adapters each rank's columns."""
        if not isinstance(array, RankedArray):
            super().upload(array, values)
            return

        def upload(rank: int, backend: CudaBackend) -> None:
            ranges, part = array.parts[rank]
            CudaBackend.upload(backend, part, np.concatenate([values[:, begin:end] for begin, end in ranges], axis=1))

        self.each(upload)

    def copy(self, target: Any, source: Any) -> None:
        """See `Backend.copy`: into a state that ranks share, too, of what the first rank holds as one GPU would."""
        pairs = target.beside(source) if isinstance(target, RankedArray) else [(target, source)]
        for one, other in pairs:
            super().copy(one, other)

    def move_slots(self, arrays: Sequence[Any], *how: Any) -> None:
        """See `Backend.move_slots`: each rank moves what it has of arrays that ranks share."""
        super().move_slots([array for array in arrays if not isinstance(array, RankedArray)], *how)
        shared = [array.parts for array in arrays if isinstance(array, RankedArray)]

        def launches(rank: int, backend: CudaBackend) -> list[Callable[[], object]]:
            return [partial(backend.acceptance.move_slots, [parts[rank][1] for parts in shared], *how)]

        if shared:
            self.run(self.each(launches))

    def _of_heads(self, way: str, array: Any, values: np.ndarray, rows: int, first: int = 0) -> DeviceTransfer:
        """Copy each rank's heads on one stream, so that the last is done when all are."""
        copy = getattr(super(), way)
        if not isinstance(array, RankedArray):
            return copy(array, values, rows, first)
        if array.axis:  # columns of a convolution, whose rows are the channels
            pieces = ((part.reshape(1, *part.shape), *each) for each, part in array.pieces())
            return [copy(part, values[:, begin:end], end - begin) for part, begin, end in pieces][-1]
        return [copy(part, values[begin:end], rows, first) for (begin, end), part in array.pieces()][-1]

    upload_rows: Any = partialmethod(_of_heads, "upload_rows")
    upload_rows_beside: Any = partialmethod(_of_heads, "upload_rows_beside")
    download_rows: Any = partialmethod(_of_heads, "download_rows")

    def load_weights(
        self, checkpoint: Checkpoint, specs: Sequence[WeightSpec], progress: Callable[[int, int], None] | None = None
    ) -> dict[str, Any]:
        """See `Backend.load_weights`: of the base's, each rank gets its part alone, and the first what is its own. A
        table of embeddings that ranks share is a `SharedTable`."""
        if [spec.name for spec in specs] != [spec.name for spec in decoder_weights(self._directory.config)]:
            return super().load_weights(checkpoint, specs, progress)
        with ExitStack() as opened:
            size = sum(math.prod(spec.shape) for spec in specs)
            self.each(lambda rank, backend: opened.enter_context(backend.large_uploads(size)))
            loaded, table = self._parts.load(checkpoint, self._ranks, progress), self._parts.table
        self._loaded_parts = [self._parts.parts(rank, weights) for rank, weights in enumerate(loaded)]
        own = self._loaded_parts
        self.table_pieces = 1 if table is None else self.gpus  # the first alone looks tokens up
        self.each(lambda rank, backend: backend.load_kernels(own[rank] if rank else loaded[0] | own[0]))
        if table is None:
            return loaded[0]
        pieces, places = tuple(held[table] for held in loaded), self.empty((self.gpus,), "uint64")
        self.upload(places, np.array([piece.pointer for piece in pieces], np.uint64))
        return loaded[0] | {table: SharedTable(pieces, places)}

    def weight(self, rank: int, name: str) -> Any:
        """A rank's part of a loaded weight of the base."""
        return self._loaded_parts[rank][name]

    def load_engine(self, shape: EngineShape) -> Engine:
        """See `Backend.load_engine`."""
        if shape.model != "base":
            return super().load_engine(shape)
        found: list[Any] = self.each(lambda rank, backend: CudaBackend.load_engine(backend, shape))
        return RankedKernelEngine(self, found)

    def check_memory(self, plan: MemoryPlan) -> None:
        """Compare what each GPU is to hold with what is free there, then allocate the engines' scratch."""
        plans = [self._parts.plan(rank, plan, backend.scratch_bytes()) for rank, backend in enumerate(self._ranks)]
        wanted = Counter[int]()
        for backend, own in zip(self._ranks, plans, strict=True):
            wanted[backend.gpu.index] += own.total

        def check(rank: int, backend: CudaBackend) -> None:
            free, total = backend.free_memory()
            if (needed := wanted[backend.gpu.index]) > free:
                raise DeviceMemoryError(
                    f"The model's part on GPU {backend.gpu.index} needs {needed / MEBIBYTE:.0f} MiB; "
                    f"{free / MEBIBYTE:.0f} of {total / MEBIBYTE:.0f} MiB of {backend.gpu.name} are free:\n"
                    f"{plans[rank].describe()}\nTake more GPUs, build the engine directory with a smaller "
                    "--kv-capacity or --max-batch, or take a smaller model."
                )

        self.each(check)
        self.each(lambda rank, backend: backend.attach_engines())

    def lost(self) -> DeviceLostError | None:
        """See `Backend.lost`, of any rank."""
        for rank, error in enumerate(self.each(lambda rank, backend: CudaBackend.lost(backend))):
            if error is not None:
                return DeviceLostError(f"rank {rank} of {self.gpus}, GPU {self._ranks[rank].gpu.index}: {error}")
        return None

    def close(self) -> None:
        """Free what all ranks have."""
        opened, self._ranks_opened = self._ranks_opened, None
        if opened is None:
            return
        self._loaded_parts, self._buffers, self.rank = [], {}, None
        for name in ("acceptance", "recurrent"):  # which refer to it
            vars(self).pop(name, None)
        try:
            opened.close()
        finally:  # what is left goes now, and in this thread: nothing refers to itself
            self._ranks, self.others = [], []
            del self.memory, self._streams


class _CheckedReadback(DeviceReadback):
    """Values of a step that all ranks have taken, or an error."""

    def __init__(self, values: DeviceReadback, memory: RankMemory) -> None:
        self._found, self._memory = values, memory

    def wait(self) -> np.ndarray:
        """The values; raises DeviceLostError that names a rank which has failed."""
        values = self._found.wait()
        self._memory.check()
        return values


class RankedKernelEngine(Engine):
    """The engines of all ranks as one. Their inputs are brought to each; the first alone gives out what there is."""

    def __init__(self, backend: CudaRanks, engines: Sequence[KernelEngine]) -> None:
        self.shape, self._backend, self._engines = engines[0].shape, backend, engines
        self.reads_attention_mask = any(engine.reads_attention_mask for engine in engines)
        program = engines[0].program
        self._weights, self._outputs = program.weights.keys(), program.outputs
        #: What all ranks put out together, in the memory of the first.
        self._assembled = {step.output for step in program.steps if step.gathers}
        names = *program.inputs, *((SCALES,) if program.adapted else ())
        self._inputs = [name for name in names if name != "attention_mask" or self.reads_attention_mask]
        self._given: list[dict[str, DeviceArray]] = [{} for _ in engines]
        self._launches: list[list[Callable[[], object]]] = []

    def bind(self, bindings: Mapping[str, Array]) -> None:
        """See `Engine.bind`."""
        for rank, engine in enumerate(self._engines):
            own = {name: self._of_rank(rank, name, array) for name, array in bindings.items()}
            engine.bind({name: array for name, array in own.items() if array is not None})
            self._given[rank] |= {name: own[name] for name in self._inputs if name in own}
        self._launches = []

    def _of_rank(self, rank: int, name: str, array: Any) -> Any:
        """What a rank is bound to in place of an array: None where it needs nothing."""
        if name in self._weights:  # a bias that is added to a sum is the first's alone
            return self._backend.weight(rank, name) if name in self._engines[rank].program.weights else None
        if isinstance(array, RankedArray):
            return array.parts[rank][1]
        if rank == 0 or name in self._assembled:
            return array
        place = f"outputs {array.dtype}" if name in self._outputs else name  # those are for nobody
        needed = name in self._inputs or name in self._outputs
        return self._backend.buffer(rank, place, array.shape, array.dtype) if needed else None

    def enqueue(self) -> None:
        """Enqueue on all streams; raises EngineError if a tensor was never bound, DeviceLostError if a rank failed."""
        self.prepare()
        self._backend.run(self._launches)

    def prepare(self) -> None:
        """See `Engine.prepare`."""
        if not self._launches:
            self._launches = self._backend.each(self._prepared)

    def _prepared(self, rank: int, backend: CudaBackend) -> list[Callable[[], object]]:
        kernels = backend.rank
        assert kernels is not None
        inputs, own = ([self._given[each][name] for name in self._inputs] for each in (0, rank))
        joined = [kernels.joined()] if rank else []
        return [*kernels.bring(inputs, own), *joined, *self._engines[rank].launches()]

    def enqueue_by_layer(self, before_layer: Callable[[int], None]) -> None:
        """Enqueues as `enqueue` does, behind what any layer waits for."""
        for step in self._engines[0].program.stateful:
            before_layer(step.index)
        self.enqueue()


class RankedAcceptance(CudaAcceptance):
    """Moves the rows of all ranks, each on its own GPU; accepts on the first alone."""

    def __init__(self, ranks: CudaRanks, slots: int) -> None:
        super().__init__(ranks.kernel_module, ranks.kernels)
        self._ranks = ranks

        def prepare(rank: int, backend: CudaBackend) -> None:  # nothing is loaded or allocated between launches
            backend.kernel_module.load(ADVANCE)
            for name, width in _MOVES.items() if rank else ():
                ranks.buffer(rank, name, (slots, width), "int32")

        ranks.each(prepare)

    def move_accepted(self, caches, kvcache_start_index, accepted, *others):
        """See `CudaAcceptance.move_accepted`; features are the first rank's."""
        if not isinstance(caches[0], RankedArray):
            super().move_accepted(caches, kvcache_start_index, accepted, *others)
            return
        hidden_states, pending, wraps = others

        def launches(rank: int, backend: CudaBackend) -> list[Callable[[], object]]:
            given = dict(zip(_MOVES, (kvcache_start_index, accepted.indices, accepted.lengths), strict=True))
            copies, (start, indices, lengths) = self._ranks.brought(rank, given)
            own, parts = accepted._replace(indices=indices, lengths=lengths), [cache.parts[rank][1] for cache in caches]
            arguments = parts, start, own, hidden_states, pending, wraps, rank > 0
            return [*copies, partial(CudaAcceptance.move_accepted, backend.acceptance, *arguments)]

        self._ranks.run(self._ranks.each(launches))


class RankedRecurrent(CudaRecurrent):
    """Commits the states of all ranks, each on its own GPU."""

    def __init__(self, module: KernelModule, ranks: CudaRanks) -> None:
        super().__init__(module)
        self._ranks = ranks

    def _committed(self, name, layers, accepted):
        """What commits each rank's parts of layers."""
        if not isinstance(layers[0][0], RankedArray):
            return getattr(CudaRecurrent, name)(self, layers, accepted)

        def launch(rank: int, backend: CudaBackend) -> list[Callable[[], object]]:
            own = [type(layer)(*(array.parts[rank][1] for array in layer)) for layer in layers]
            copies, path = self._ranks.brought(rank, accepted._asdict())
            return [*copies, getattr(backend.recurrent, name)(own, type(accepted)(*path))]

        return partial(self._ranks.run, self._ranks.each(launch))

    # See `CudaRecurrent`.
    commit_columns: Any = partialmethod(_committed, "commit_columns")
    commit_matrices: Any = partialmethod(_committed, "commit_matrices")
    commit_scans: Any = partialmethod(_committed, "commit_scans")
