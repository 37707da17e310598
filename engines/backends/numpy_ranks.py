"""Several GPUs where there is none: the base's steps are shared among ranks, threads that compute with NumPy.

Their memory is one, so a rank's part of a tensor is a view of it where it can be. States lie as those of one GPU:
nobody else needs to know of the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, cast

import numpy as np

from edgellm.engines.backends.base import Engine
from edgellm.engines.backends.numpy_backend import NumpyBackend, NumpyEngine, one_blas_thread
from edgellm.engines.backends.ranks import Exchange, Rank
from edgellm.engines.checkpoints.weights import ExpertMatrices
from edgellm.engines.model.config import DecoderConfig
from edgellm.engines.model.limits import EngineShape
from edgellm.engines.model.sharding import Cut, Shard, sharded
from edgellm.kernels.arrays import Array


class NumpyRanks(NumpyBackend):
    """The backend of NumPy with so many ranks; drafts and encoders are computed by the first alone.

    Raises EngineError that names what of the model they cannot share.
    """

    def __init__(self, ranks: int, config: DecoderConfig, *others: Any) -> None:
        """`others` are those of `NumpyBackend`."""
        super().__init__(config, *others)
        self.gpus = ranks
        self._exchange = Exchange(ranks)
        self._ranks = [Rank(number, self._exchange) for number in range(ranks)]
        sharded(self._program(EngineShape("decode", 1, 1, 1, 1)), 0, ranks)  # what is refused is refused at once
        self._threads = ThreadPoolExecutor(ranks, "edgellm-rank")
        # Weights that are no views, by the array that they are pieces of.
        self._pieces: dict[tuple[int, Cut], tuple[np.ndarray, np.ndarray]] = {}

    def load_engine(self, shape: EngineShape) -> Engine:
        if shape.model != "base":
            return super().load_engine(shape)
        program, count = self._program(shape), len(self._ranks)
        shards = [sharded(program, number, count) for number in range(count)]
        engines = [NumpyEngine(shard.program, rank) for shard, rank in zip(shards, self._ranks, strict=True)]
        return RankedEngine(engines, shards, self._run, self._weight_piece)

    def close(self) -> None:
        """End the threads, which compute nothing."""
        self._threads.shutdown()

    def _run(self, steps: Sequence[Callable[[], None]]) -> None:
        """Run the steps of all ranks. Raises DeviceLostError that names a rank which has failed, now or before."""
        self._exchange.check()

        def run(rank: int) -> None:
            try:
                steps[rank]()
            except BaseException as error:
                self._exchange.fail(rank, error)

        for future in [self._threads.submit(run, rank) for rank in range(len(steps))]:
            future.result()
        self._exchange.check()

    def _weight_piece(self, weight: np.ndarray, cut: Cut) -> np.ndarray:
        if len(cut.ranges) == 1:
            return piece(weight, cut)
        kept = self._pieces.get((id(weight), cut))
        if kept is None:
            kept = self._pieces[id(weight), cut] = weight, piece(weight, cut)
        return kept[1]


def piece(whole: Any, cut: Cut) -> Any:
    """A cut of an array, or of `ExpertMatrices`: a view of it where it is in one piece."""
    if isinstance(whole, ExpertMatrices):
        return whole.rows(*cut.ranges[0])
    before = (slice(None),) * cut.axis
    parts = [whole[(*before, slice(*each))] for each in cut.ranges]
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=cut.axis)


def put_back(own: np.ndarray, whole: np.ndarray, cut: Cut) -> None:
    """Give an array its cut."""
    before, first = (slice(None),) * cut.axis, 0
    for begin, end in cut.ranges:
        whole[(*before, slice(begin, end))] = own[(*before, slice(first, first + end - begin))]
        first += end - begin


class RankedEngine(Engine):
    """The engines of all ranks as one: each is bound to its parts, the first alone gives out what there is."""

    reads_attention_mask = True

    def __init__(
        self,
        engines: Sequence[NumpyEngine],
        shards: Sequence[Shard],
        run: Callable[[Sequence[Callable[[], None]]], None],
        weight_piece: Callable[[np.ndarray, Cut], np.ndarray],
    ) -> None:
        self.shape = engines[0].shape
        self._engines, self._shards, self._run, self._weight_piece = engines, shards, run, weight_piece
        # Adapters change where they are, and some are no views: they are copied anew for each step. So are states and
        # outputs of several ranges, which are copied back.
        self._copies: dict[tuple[int, str], tuple[np.ndarray, np.ndarray, Cut]] = {}

    def bind(self, bindings: Mapping[str, Array]) -> None:
        """See `NumpyEngine.bind`."""
        arrays = cast(Mapping[str, np.ndarray], bindings)
        for rank, (engine, shard) in enumerate(zip(self._engines, self._shards, strict=True)):
            others = shard.program.outputs.keys() - shard.cuts.keys() if rank else ()
            engine.bind({name: self._own(rank, name, array) for name, array in arrays.items() if name not in others})

    def _own(self, rank: int, name: str, array: np.ndarray) -> np.ndarray:
        shard = self._shards[rank]
        cut = shard.cuts.get(name)
        if cut is None:
            return array
        if name in shard.program.weights:
            return self._weight_piece(array, cut)
        own = piece(array, cut)
        if len(cut.ranges) > 1:
            self._copies[rank, name] = own, array, cut
        return own

    def enqueue(self) -> None:
        """Compute; outputs are written into their bound arrays."""
        for own, array, cut in self._copies.values():
            np.copyto(own, piece(array, cut))
        with one_blas_thread() if self._engines[0].is_small else nullcontext():
            self._run([engine.run for engine in self._engines])
        for (rank, name), (own, array, cut) in self._copies.items():
            program = self._shards[rank].program
            if name in program.states or name in program.outputs:
                put_back(own, array, cut)
