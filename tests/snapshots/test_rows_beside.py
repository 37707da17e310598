"""Rows that are copied beside the engines' work: whoever reads them waits for them first.

The backend here copies nothing until somebody waits, so that one who does not wait computes with other rows.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from kept_snapshots import save, taken

from edgellm.decoding.loop import DecodingLoop
from edgellm.decoding.sequence import DecodingSequence
from edgellm.decoding.slot_table import SlotTable
from edgellm.drafting.drafter import FixedDrafter
from edgellm.engines.backends.numpy_backend import NumpyBackend, NumpyEngine
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.model.limits import EngineShape
from edgellm.engines.runners.sampling_state import SamplingValues
from edgellm.engines.speculation.draft_plan import DraftPlan
from edgellm.engines.speculation.runner import DecodingRunner
from edgellm.errors import EngineError
from edgellm.snapshots.contents import KVContents
from edgellm.snapshots.slots import SlotSnapshots
from edgellm.snapshots.store import SnapshotStore
from edgellm.text.output import OutputText
from edgellm.text.tokenizer import Tokenizer
from tools.bench.answering import answered

SYSTEM = [(11 * index + 5) % 250 for index in range(41)]
PROMPT = [*SYSTEM, 7, 19, 4]


class LateTransfer:
    """A copy that is made when it is waited for, or one after it is."""

    def __init__(self, backend: LateBackend, copy: Callable[[], object]) -> None:
        self._backend, self.copy = backend, copy

    def wait(self) -> None:
        self._backend.wait_for(self)


class LayeredEngine(NumpyEngine):
    """Says before which layer it would wait; it computes behind the last."""

    def enqueue_by_layer(self, before_layer: Callable[[int], None]) -> None:
        layers = sum(name.startswith("k_cache_") for name in self._bindings)
        for index in range(layers):
            before_layer(index)
        self.enqueue()


class LateBackend(NumpyBackend):
    """See the module."""

    computes_at_once = False

    def __init__(self, directory: EngineDirectory, by_layer: bool = False) -> None:
        super().__init__(directory.config, directory.model_config("draft") if directory.draft else None)
        self._by_layer, self.waited = by_layer, 0
        self.pending: list[LateTransfer] = []

    def load_engine(self, shape: EngineShape) -> NumpyEngine:
        engine = super().load_engine(shape)
        if self._by_layer and shape.model == "base" and shape.phase == "prefill":
            engine.__class__ = LayeredEngine
        return engine

    def begin_beside(self) -> None:
        assert not self.pending, "these copies would overtake what is still to be waited for"

    def upload_rows_beside(self, target: np.ndarray, values: np.ndarray, rows: int, first: int = 0) -> LateTransfer:
        self.pending.append(LateTransfer(self, lambda: self.upload_rows(target, values, rows, first)))
        return self.pending[-1]

    def wait_for(self, transfer: LateTransfer) -> None:
        self.waited += 1
        while transfer in self.pending:
            self.pending.pop(0).copy()


def answer_of(runner: DecodingRunner, directory: EngineDirectory, snapshots: SlotSnapshots | None) -> DecodingSequence:
    tokenizer = Tokenizer.from_directory(directory.path, directory.config.vocab_size)
    sequence = DecodingSequence(
        PROMPT, SamplingValues(), OutputText(tokenizer.detokenizer(), (), (), (), 12), max_tokens=12
    )
    plan = FixedDrafter(DraftPlan("chain", 1, 3, 4)) if runner.draft.has_model else None
    contents = [KVContents() for _ in range(directory.limits.max_batch)]
    for _ in answered(DecodingLoop(SlotTable(runner, contents, snapshots, drafter=plan)), [sequence]):
        pass
    return sequence


def opened(backend: LateBackend, directory: EngineDirectory) -> DecodingRunner:
    return DecodingRunner.open(backend, directory, drafts=directory.draft is not None)


@pytest.fixture(params=["tiny_engines", "tiny_draft_engines"], ids=["plain", "draft"])
def directory(request: pytest.FixtureRequest) -> EngineDirectory:
    return EngineDirectory.open(request.getfixturevalue(request.param))


@pytest.mark.parametrize("by_layer", [False, True], ids=["whole", "by layer"])
@pytest.mark.parametrize("place", ["memory", "disk"])
def test_the_prefill_waits_for_the_rows_that_it_reads(
    directory: EngineDirectory, tmp_path: Path, place: str, by_layer: bool
) -> None:
    backend = LateBackend(directory, by_layer)
    runner = opened(backend, directory)
    expected = answer_of(runner, directory, None).answer.token_ids
    snapshots = SlotSnapshots(SnapshotStore(), runner, directory)
    snapshot = snapshots.compute(0, SYSTEM, KVContents(), "system")
    snapshots.store.put(snapshot) if place == "memory" else save(snapshots.store, snapshot, tmp_path)
    for cache in runner.base.states.tensors.values():
        cache.fill(7)
    backend.waited = 0
    sequence = answer_of(runner, directory, snapshots)
    assert sequence.reused_tokens >= len(SYSTEM) - 1
    assert sequence.answer.token_ids == expected
    assert not backend.pending
    assert not by_layer or backend.waited >= directory.config.num_layers
    snapshots.close()
    runner.close()


def test_a_snapshot_of_rows_on_their_way_has_them(directory: EngineDirectory) -> None:
    backend = LateBackend(directory)
    runner = opened(backend, directory)
    snapshots = SlotSnapshots(SnapshotStore(), runner, directory)
    made = snapshots.compute(0, SYSTEM, KVContents(), "system")
    snapshots.store.put(made)
    for cache in runner.base.states.tensors.values():
        cache.fill(7)
    assert snapshots.restore(0, PROMPT, KVContents()) > 0
    again = taken(snapshots, 0, SYSTEM, "again")
    for name in made.rows:
        np.testing.assert_array_equal(again.tensor(name), made.tensor(name))
    runner.close()


def test_rows_on_their_way_are_waited_for_where_the_prefill_fails(
    directory: EngineDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise they could overwrite what the slot's next sequence writes."""
    backend = LateBackend(directory)
    runner = opened(backend, directory)
    snapshots = SlotSnapshots(SnapshotStore(), runner, directory)
    snapshots.store.put(snapshots.compute(0, SYSTEM, KVContents(), "system"))

    def fail(*_: object, **__: object) -> None:
        raise EngineError("no prefill today")

    monkeypatch.setattr(runner, "start", fail)
    with pytest.raises(EngineError, match="no prefill today"):
        answer_of(runner, directory, snapshots)
    assert not backend.pending
    runner.close()
