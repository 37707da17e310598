"""Snapshots taken from a runner's slot and given to another: rows, answers, drafts, and what happens to bad ones."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kept_snapshots import forget, keep, save, taken

from edgellm.engines.backends.numpy_backend import NumpyBackend
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.errors import EngineError
from edgellm.engines.runners.sampling_state import SamplingValues
from edgellm.engines.speculation.draft_plan import DraftPlan, tree
from edgellm.engines.speculation.runner import DecodingRunner
from edgellm.errors import SnapshotError
from edgellm.snapshots import slots as slot_snapshots
from edgellm.snapshots import snapshot, transfer
from edgellm.snapshots.contents import KVContents
from edgellm.snapshots.file import write_snapshot
from edgellm.snapshots.slots import SlotSnapshots
from edgellm.snapshots.staging import touch
from edgellm.snapshots.store import SnapshotStore

SYSTEM = [(7 * index + 3) % 250 for index in range(40)]
PROMPTS = [[*SYSTEM, 100 + number, 50 - number, number] for number in range(6)]
Slots = tuple[DecodingRunner, EngineDirectory]
Answer = Callable[..., list[int]]


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "draft"])
def slots(
    request: pytest.FixtureRequest, open_slots: Callable[..., object], tiny_engines: Path, tiny_draft_engines: Path
) -> Iterator[Slots]:
    with open_slots(tiny_draft_engines if request.param else tiny_engines, request.param) as opened:
        yield opened


def plan_of(runner: DecodingRunner) -> DraftPlan | None:
    return tree(4, 3, 12) if runner.draft.has_model else None


def draft_rows(runner: DecodingRunner, rows: int) -> int | None:
    return rows - 1 if runner.draft.has_model else None


def rows_of(runner: DecodingRunner, slot: int, tokens: int) -> dict[str, np.ndarray]:
    """A copy of the rows that a slot has after a prompt of so many tokens, once all are there."""
    runner.base.await_rows()
    found = {name: cache[slot, :, :tokens].copy() for name, cache in runner.base.states.tensors.items()}
    if runner.draft.has_model:
        found |= {
            f"draft {name}": cache[slot, :, : tokens - 1].copy() for name, cache in runner.draft.states.tensors.items()
        }
    return found


def same_rows(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> bool:
    return found.keys() == expected.keys() and all((found[name] == expected[name]).all() for name in found)


@pytest.mark.parametrize("place", ["memory", "disk", "file"])
def test_a_snapshot_changes_no_token(slots: Slots, answer: Answer, tmp_path: Path, place: str) -> None:
    runner, _ = slots
    snapshots = SlotSnapshots(SnapshotStore(), *slots)
    plan = plan_of(runner)
    expected = [answer(runner, prompt, 0, plan=plan) for prompt in PROMPTS]
    contents = KVContents()
    made = snapshots.compute(0, SYSTEM, contents, "system")
    assert contents.reusable([*SYSTEM, 1]) == len(SYSTEM) - runner.draft.has_model
    keep(snapshots, made, place, tmp_path)
    found = []
    for prompt in PROMPTS:
        forget(runner)  # what is not restored would show
        contents = KVContents()
        reused = snapshots.restore(0, prompt, contents)
        assert reused == len(SYSTEM) - runner.draft.has_model == contents.reusable(prompt)
        found.append(answer(runner, prompt, reused, plan=plan))
    assert found == expected


@pytest.mark.parametrize("slot", [0, 1])
def test_rows_are_restored_bit_by_bit_into_any_slot(slots: Slots, tmp_path: Path, slot: int) -> None:
    runner, _ = slots
    snapshots = SlotSnapshots(SnapshotStore(), *slots)
    save(snapshots.store, snapshots.compute(1 - slot, SYSTEM, KVContents(), "system"), tmp_path)
    expected = rows_of(runner, 1 - slot, len(SYSTEM))
    forget(runner)
    assert snapshots.restore(slot, PROMPTS[0], KVContents()) > 0
    assert same_rows(rows_of(runner, slot, len(SYSTEM)), expected)
    for cache in runner.base.states.tensors.values():
        assert np.isnan(cache[1 - slot]).all() and np.isnan(cache[slot, :, len(SYSTEM) :]).all()


def test_a_file_is_hashed_once_unless_it_changes(slots: Slots, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, _ = slots
    snapshots = SlotSnapshots(SnapshotStore(), *slots)
    path = save(snapshots.store, snapshots.compute(1, SYSTEM, KVContents(), "system"), tmp_path)
    expected = rows_of(runner, 1, len(SYSTEM))
    hashed = []
    digest = snapshot.section_digest
    monkeypatch.setattr(snapshot, "section_digest", lambda part: hashed.append(part.nbytes) or digest(part))

    def restored() -> int:
        forget(runner)
        hashed.clear()
        assert snapshots.restore(0, PROMPTS[0], KVContents()) > 0
        assert same_rows(rows_of(runner, 0, len(SYSTEM)), expected)
        return sum(hashed)

    read = []
    reading = transfer.SectionReader.read
    monkeypatch.setattr(transfer.SectionReader, "read", lambda *a: read.append(1) or reading(*a))
    assert [restored() for _ in range(3)] == [path.stat().st_size - 32, 0, 0]
    assert len(read) == 1  # what the memory still holds is not read again
    save(snapshots.store, snapshots.compute(1, SYSTEM[::-1], KVContents(), "another"), tmp_path)
    assert snapshots.restore(0, [*SYSTEM[::-1], 251], KVContents()) > 0
    snapshots.compute(1, SYSTEM, KVContents(), "system")
    assert restored() == 0 and len(read) == 3
    status = path.stat()
    path.write_bytes(path.read_bytes())
    assert restored() > 0
    path.write_bytes(path.read_bytes())
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # who changes it can set this time, but not all
    assert restored() > 0 and restored() == 0


def test_another_process_may_use_the_file_at_the_same_time(
    slots: Slots, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    snapshots = SlotSnapshots(SnapshotStore(), *slots)
    path = save(snapshots.store, snapshots.compute(1, SYSTEM, KVContents(), "system"), tmp_path)
    opened = slot_snapshots.opened_unchanged

    def touched(*arguments: Any) -> Any:
        touch(path)
        return opened(*arguments)

    monkeypatch.setattr(slot_snapshots, "opened_unchanged", touched)
    for _ in range(3):
        assert snapshots.restore(0, PROMPTS[0], KVContents()) > 0
    monkeypatch.setattr(slot_snapshots, "opened_unchanged", lambda path, _: opened(path, None))
    assert snapshots.restore(0, PROMPTS[0], KVContents()) == 0
    assert f"{path} changed while it was opened" in caplog.text


def test_a_file_that_another_process_makes_anew_is_loaded(
    slots: Slots, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshots = SlotSnapshots(SnapshotStore(), *slots)
    path = save(snapshots.store, snapshots.compute(1, SYSTEM, KVContents(), "system"), tmp_path)
    opened, anew = slot_snapshots.opened_unchanged, [shutil.copy(path, tmp_path / "copy")]

    def replaced(*arguments: Any) -> Any:
        if anew:
            Path(anew.pop()).replace(path)
        return opened(*arguments)

    monkeypatch.setattr(slot_snapshots, "opened_unchanged", replaced)
    loading = SlotSnapshots(SnapshotStore(), *slots)
    assert loading.load(path).path == path and not anew
    assert loading.restore(0, PROMPTS[0], KVContents()) > 0
    monkeypatch.setattr(slot_snapshots, "opened_unchanged", lambda path, _: opened(path, None))
    with pytest.raises(SnapshotError, match="changed while it was opened"):  # where it has not been made anew
        loading.load(path)


@pytest.mark.parametrize("staging", [1, 5_000, 20_000])
def test_files_larger_than_what_they_are_read_through(
    slots: Slots, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staging: int
) -> None:
    runner, _ = slots
    monkeypatch.setattr(transfer, "_STAGING_BYTES", staging)
    monkeypatch.setattr(snapshot, "_SECTION_BYTES", 1 << 11)
    snapshots = SlotSnapshots(SnapshotStore(), *slots)
    save(snapshots.store, snapshots.compute(1, SYSTEM, KVContents(), "system"), tmp_path)
    for tokens in (7, len(SYSTEM), len(SYSTEM), 7):  # hashed, then not
        expected = rows_of(runner, 1, tokens)
        for cache in runner.base.states.tensors.values():
            cache[0] = np.nan
        assert snapshots.restore(0, [*SYSTEM[:tokens], 250], KVContents()) > 0
        assert same_rows(rows_of(runner, 0, tokens), expected)


@pytest.mark.parametrize("missing", [200, 10_000])
@pytest.mark.parametrize("uses", [0, 1])
def test_a_file_that_shrinks_while_it_is_read_is_refused(
    slots: Slots,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    missing: int,
    uses: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    runner, _ = slots
    snapshots = SlotSnapshots(SnapshotStore(), *slots)
    path = save(snapshots.store, snapshots.compute(1, SYSTEM, KVContents(), "system"), tmp_path)
    for _ in range(uses):
        assert snapshots.restore(0, PROMPTS[0], KVContents()) > 0
        runner.base.await_rows()
        snapshots._uploader.forget()
    read = transfer.SectionReader.read

    def shrink(reader: Any, descriptor: int, parts: Any, is_hashed: bool) -> Any:
        os.truncate(path, path.stat().st_size - 32 - missing)
        return read(reader, descriptor, parts, is_hashed)

    monkeypatch.setattr(transfer.SectionReader, "read", shrink)
    assert snapshots.restore(0, PROMPTS[0], KVContents()) == 0
    assert "shorter" in caplog.text
    runner.base.await_rows()
    write_snapshot(path, snapshots.compute(1, SYSTEM, KVContents(), "system"))
    with pytest.raises(SnapshotError, match="shorter"):
        snapshots.load(path)


def test_a_prefix_of_a_snapshot_is_as_good(slots: Slots, answer: Answer, tmp_path: Path) -> None:
    runner, _ = slots
    snapshots = SlotSnapshots(SnapshotStore(), *slots)
    save(snapshots.store, snapshots.compute(0, SYSTEM, KVContents(), "system"), tmp_path)
    for common in (1, 2, 17, 39):
        prompt = [*SYSTEM[:common], 251, 252]
        expected = answer(runner, prompt, 0)
        forget(runner)
        contents = KVContents()
        reused = snapshots.restore(0, prompt, contents)
        assert reused == common - runner.draft.has_model
        assert np.isnan(next(iter(runner.base.states.tensors.values()))[0, :, common * bool(reused) :]).all()
        assert contents.reusable(prompt) == reused
        assert answer(runner, prompt, reused) == expected


def test_the_prompt_itself_and_shorter_ones_leave_a_token_to_compute(slots: Slots, answer: Answer) -> None:
    runner, _ = slots
    snapshots = SlotSnapshots(SnapshotStore(), *slots)
    snapshots.store.put(snapshots.compute(0, SYSTEM, KVContents(), "system"))
    for prompt in (SYSTEM, SYSTEM[:20]):
        expected = answer(runner, prompt, 0)
        forget(runner)
        reused = snapshots.restore(0, prompt, KVContents())
        assert reused == len(prompt) - 1
        assert answer(runner, prompt, reused) == expected


def test_the_slots_own_rows_are_kept_where_they_are_as_good(slots: Slots) -> None:
    runner, _ = slots
    snapshots = SlotSnapshots(SnapshotStore(), *slots)
    snapshots.store.put(snapshots.compute(0, SYSTEM, KVContents(), "system"))
    contents = KVContents()
    runner.start(0, PROMPTS[0], 0, SamplingValues()).wait()
    runner.stop(0)
    contents.replace(PROMPTS[0], draft_rows(runner, len(PROMPTS[0])))
    before = rows_of(runner, 0, len(PROMPTS[0]))
    assert snapshots.restore(0, PROMPTS[0], contents) == 0
    assert snapshots.restore(0, PROMPTS[1], contents) == 0  # they share as much with the slot
    assert same_rows(rows_of(runner, 0, len(PROMPTS[0])), before)
    assert contents.reusable(PROMPTS[0]) == len(PROMPTS[0]) - 1
    contents.replace(PROMPTS[0][:5], draft_rows(runner, 5))
    assert snapshots.restore(0, PROMPTS[1], contents) == len(SYSTEM) - runner.draft.has_model


def test_a_damaged_snapshot_is_dropped_and_the_next_best_taken(
    slots: Slots, answer: Answer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runner, _ = slots
    snapshots = SlotSnapshots(SnapshotStore(), *slots)
    expected = answer(runner, PROMPTS[0], 0)
    save(snapshots.store, snapshots.compute(0, SYSTEM[:30], KVContents(), "short"), tmp_path)
    path = save(snapshots.store, snapshots.compute(0, SYSTEM, KVContents(), "long"), tmp_path)
    with path.open("r+b") as file:  # a row, half way in
        file.seek(path.stat().st_size // 2)
        file.write(b"\x55")
    forget(runner)
    contents = KVContents()
    with caplog.at_level(logging.WARNING, "edgellm.snapshots"):
        reused = snapshots.restore(0, PROMPTS[0], contents)
    assert reused == 30 - runner.draft.has_model == contents.reusable(PROMPTS[0])
    assert f"{path} is damaged" in caplog.text
    assert answer(runner, PROMPTS[0], reused) == expected
    assert [stored.facts.label for stored in snapshots.store.snapshots()] == ["short"]


def test_a_file_that_is_gone_is_no_error(slots: Slots, tmp_path: Path) -> None:
    snapshots = SlotSnapshots(SnapshotStore(), *slots)
    path = save(snapshots.store, snapshots.compute(0, SYSTEM, KVContents(), "system"), tmp_path)
    path.unlink()
    assert snapshots.restore(0, PROMPTS[0], KVContents()) == 0
    assert snapshots.store.snapshots() == []


def test_the_adapter_keeps_snapshots_apart(slots: Slots, tmp_path: Path) -> None:
    snapshots = SlotSnapshots(SnapshotStore(), *slots)
    path = save(snapshots.store, snapshots.compute(0, SYSTEM, KVContents(), "plain"), tmp_path)
    assert snapshots.restore(0, PROMPTS[0], KVContents(), "a" * 64) == 0
    with pytest.raises(SnapshotError, match="the adapter is none, expected aaaa") as caught:
        snapshots.load(path, ["a" * 64])
    assert caught.value.reason == "other adapter"
    assert snapshots.load(path, ["a" * 64, None]).path == path
    snapshots.store.put(taken(snapshots, 0, SYSTEM[:20], "adapted", "a" * 64))
    assert snapshots.restore(0, PROMPTS[0], KVContents(), "a" * 64) == 20 - slots[0].draft.has_model
    assert snapshots.restore(0, PROMPTS[0], KVContents()) == 40 - slots[0].draft.has_model
    snapshots.close()
    assert snapshots.store.memory_bytes == 0


def test_a_prompt_that_does_not_fit_leaves_the_slot_empty(slots: Slots, answer: Answer) -> None:
    runner, directory = slots
    snapshots, contents = SlotSnapshots(SnapshotStore(), *slots), KVContents()
    with pytest.raises(EngineError, match="does not fit"):
        snapshots.compute(0, [1] * directory.limits.kv_capacity, contents, "long")
    assert contents.reusable([1, 1, 1]) == 0
    assert len(answer(runner, PROMPTS[0], 0)) == 12


def test_rows_of_another_shape_or_dtype_are_refused(tiny_engines: Path) -> None:
    directory = EngineDirectory.open(tiny_engines)
    backend = NumpyBackend(directory.config)
    cache = backend.zeros((2, 10, 4), "float32")
    for shape, dtype, rows in (((2, 3, 4), "f2", 3), ((1, 3, 4), "f4", 3), ((2, 3, 5), "f4", 3), ((2, 3, 4), "f4", 4)):
        with pytest.raises(EngineError, match=f"cannot copy {rows} rows"):
            backend.upload_rows(cache, np.zeros(shape, dtype), rows)
        with pytest.raises(EngineError, match=f"cannot copy {rows} rows"):
            backend.download_rows(cache, np.zeros(shape, dtype), rows)


@pytest.mark.gpu
def test_rows_go_to_the_gpu_and_back(tiny_engines: Path, tmp_path: Path, open_slots: Callable[..., object]) -> None:
    answers = {}
    with open_slots(tiny_engines, backend="tensorrt") as slots:
        runner, _ = slots
        backend = runner.backend
        snapshots = SlotSnapshots(SnapshotStore(), *slots)
        made = snapshots.compute(0, SYSTEM, KVContents(), "system")
        save(snapshots.store, made, tmp_path)
        for place in ("disk", "disk again", "memory"):
            if place == "memory":
                snapshots.store.put(made)
            for cache in runner.base.states.tensors.values():
                backend.upload(cache, np.full(cache.shape, 7, np.float16))
            assert snapshots.restore(1, PROMPTS[0], KVContents()) == len(SYSTEM)
            again = taken(snapshots, 1, SYSTEM, "again")
            for name in made.rows:
                np.testing.assert_array_equal(again.tensor(name), made.tensor(name))
            runner.start(1, PROMPTS[0], len(SYSTEM), SamplingValues()).wait()
            answers[place] = runner.base.logits(1)
            runner.stop(1)
        runner.start(1, PROMPTS[0], 0, SamplingValues()).wait()
        np.testing.assert_allclose(answers["disk"], runner.base.logits(1), atol=0.05)
        np.testing.assert_array_equal(answers["disk"], answers["disk again"])
        np.testing.assert_array_equal(answers["disk"], answers["memory"])
        del made, again
        snapshots.close()
