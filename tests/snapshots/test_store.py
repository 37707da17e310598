"""The store and the folder: budgets, what goes first, and files that come and go."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kept_snapshots import save

from edgellm.errors import SnapshotError
from edgellm.snapshots import store as stores
from edgellm.snapshots.binding import SnapshotBinding
from edgellm.snapshots.file import SnapshotFolder, verify_snapshot, write_snapshot
from edgellm.snapshots.snapshot import Snapshot
from edgellm.snapshots.store import SnapshotStore

MakeSnapshot = Callable[..., Snapshot]


def labels(store: SnapshotStore) -> set[str]:
    return {stored.facts.label for stored in store.snapshots()}


def test_the_memory_budget_keeps_what_was_used_last(make_snapshot: MakeSnapshot, binding: SnapshotBinding) -> None:
    made = [make_snapshot([number, 1, 2], label=f"{number}") for number in range(4)]
    store = SnapshotStore(memory_budget=3 * made[0].nbytes)
    for snapshot in made[:3]:
        store.put(snapshot)
    assert store.memory_bytes == 3 * made[0].nbytes
    assert store.open(store.find(binding, [0, 1]).stored) is made[0]
    store.put(made[3])
    assert labels(store) == {"0", "2", "3"}
    assert store.find(binding, [1, 1, 2]) is None
    assert store.memory_bytes <= store.memory_budget
    with pytest.raises(SnapshotError, match="more than the whole memory budget") as caught:
        store.put(make_snapshot([9] * 200, label="too long"))
    assert caught.value.reason == "too large"
    assert labels(store) == {"0", "2", "3"}


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=30))
def test_memory_holds_what_a_plain_list_by_use_would(
    make_snapshot: MakeSnapshot, binding: SnapshotBinding, steps: list[tuple[bool, int]]
) -> None:
    sizes = [make_snapshot([number] * (number + 1)).nbytes for number in range(7)]
    budget = sum(sizes) // 2
    store, expected = SnapshotStore(memory_budget=budget), []
    for puts, number in steps:
        if puts:
            store.put(make_snapshot([number] * (number + 1), label=str(number)))
            expected = [item for item in expected if item != number] + [number]
            while sum(sizes[item] for item in expected) > budget:
                expected.pop(0)
        elif number in expected:
            store.open(store.find(binding, [number] * (number + 1)).stored)
            expected = [item for item in expected if item != number] + [number]
    assert labels(store) == set(map(str, expected))
    assert store.memory_bytes == sum(sizes[item] for item in expected)


def test_the_disk_budget_keeps_what_any_process_used_last(
    make_snapshot: MakeSnapshot, binding: SnapshotBinding, tmp_path: Path
) -> None:
    made = [make_snapshot([number, 1, 2], label=f"{number}") for number in range(4)]
    folder, store = SnapshotFolder(tmp_path, 3 * made[0].nbytes + 10), SnapshotStore()
    paths = [folder.save(snapshot) for snapshot in made[:3]]
    assert all(removed == [] for _, removed in paths)
    for path, _ in paths:  # as another process would use them
        store.add_file(path)
    assert labels(store) == {"0", "1", "2"}
    store.open(store.find(binding, [0]).stored)
    path, removed = folder.save(made[3])
    assert removed == [paths[1][0]] and not removed[0].exists()
    assert set(tmp_path.iterdir()) == {paths[0][0], paths[2][0], path}
    with pytest.raises(SnapshotError, match="more than the whole disk budget"):
        folder.save(make_snapshot([9] * 1000))
    assert path.exists()


def test_files_of_other_processes_count(make_snapshot: MakeSnapshot, tmp_path: Path) -> None:
    first, second = make_snapshot([1, 2]), make_snapshot([3, 4])
    folder = SnapshotFolder(tmp_path, first.nbytes + 10)
    SnapshotFolder(tmp_path).save(first)
    path, removed = folder.save(second)
    assert len(removed) == 1 and list(tmp_path.iterdir()) == [path]


def test_saving_the_same_tokens_again_replaces_the_file(
    make_snapshot: MakeSnapshot, binding: SnapshotBinding, tmp_path: Path
) -> None:
    store = SnapshotStore()
    first = save(store, make_snapshot([1, 2], seed=1), tmp_path)
    old = store.open(store.find(binding, [1, 2]).stored)
    verify_snapshot(first, old)
    second = save(store, make_snapshot([1, 2], seed=2, label="second"), tmp_path)
    assert first == second and len(list(tmp_path.iterdir())) == 1
    new = store.open(store.find(binding, [1, 2]).stored)
    assert not new.is_verified and new.facts.label == "second"
    assert (new.tensor("base.k_cache_0") != old.tensor("base.k_cache_0")).any()  # the old map is whole still


def test_a_binding_of_its_own_has_snapshots_of_its_own(
    make_snapshot: MakeSnapshot, binding: SnapshotBinding, tmp_path: Path
) -> None:
    store = SnapshotStore()
    save(store, make_snapshot([1, 2, 3], label="plain"), tmp_path)
    save(store, make_snapshot([1, 2], label="adapted", adapter="a" * 64), tmp_path)
    adapted = replace(binding, adapter="a" * 64)
    assert store.find(binding, [1, 2, 3, 4]).stored.facts.label == "plain"
    match = store.find(adapted, [1, 2, 3, 4])
    assert (match.stored.facts.label, match.common) == ("adapted", 2)
    assert store.find(replace(binding, adapter="b" * 64), [1, 2, 3]) is None
    assert len(list(tmp_path.iterdir())) == 2


def test_nothing_is_left_of_bindings_that_are_gone(make_snapshot: MakeSnapshot) -> None:
    """Prompts with images have a binding for each set of them."""
    size = make_snapshot([1, 2, 3]).nbytes
    store = SnapshotStore(memory_budget=2 * size)
    for number in range(9):
        store.put(make_snapshot([1, 2, 3], adapter=f"{number}" * 64))
    assert len(store.snapshots()) == len(store._known) <= 2
    for stored in store.snapshots():
        store.discard(stored)
        store.discard(stored)
    assert store._known == {}


def test_what_is_in_memory_is_preferred_among_equals(
    make_snapshot: MakeSnapshot, binding: SnapshotBinding, tmp_path: Path
) -> None:
    store = SnapshotStore()
    save(store, make_snapshot([1, 2, 3], label="disk"), tmp_path)
    store.put(make_snapshot([1, 2, 9], label="memory"))
    assert store.find(binding, [1, 2, 5]).stored.facts.label == "memory"
    assert store.find(binding, [1, 2, 3]).stored.facts.label == "disk"


def test_states_are_used_as_a_whole_or_not_at_all(make_snapshot: MakeSnapshot, binding: SnapshotBinding) -> None:
    store = SnapshotStore()
    for ids in ([1, 2], [1, 2, 3, 4]):
        store.put(make_snapshot(ids, states={"base.state.conv_columns_0": (1, 2, 2)}))
    assert store.find(binding, [1, 2, 3, 9]).common == 2
    assert store.find(binding, [1, 2, 3, 4, 5]).common == 4
    assert store.find(binding, [1, 9]) is None


def test_files_come_and_go(make_snapshot: MakeSnapshot, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = SnapshotFolder(tmp_path / "later", 3 * make_snapshot([1, 2, 3]).nbytes)

    def warned() -> list[str]:
        messages = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return messages

    path, _ = folder.save(make_snapshot([1, 2, 3]))
    (tmp_path / "later" / "y.safetensors").write_bytes(b"nothing")
    shutil.copy(path, tmp_path / "later" / "z.safetensors")
    folder.save(make_snapshot([1, 2, 3]))
    damaged, duplicate = sorted(warned(), key=lambda message: "same snapshot" in message)
    assert "y.safetensors is damaged" in damaged
    assert f"z.safetensors holds the same snapshot as {path}" in duplicate
    folder.save(make_snapshot([1, 2, 3]))
    assert warned() == []  # once is enough
    write_snapshot(tmp_path / "later" / "y.safetensors", make_snapshot([4, 5], states={}))
    last, removed = folder.save(make_snapshot([6, 7, 8, 9]))
    assert removed == [] and warned() == []  # what cannot be used counts nothing, and stays
    assert {each.name for each in folder._files()} == {path.name, "y.safetensors", last.name}


def test_a_verified_file_is_verified_until_it_changes(
    make_snapshot: MakeSnapshot, binding: SnapshotBinding, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "_MOST_MAPS", 2)
    store = SnapshotStore()
    paths = [save(store, make_snapshot([number, 2]), tmp_path) for number in range(3)]
    stored = [store.find(binding, [number]).stored for number in range(3)]
    first = store.open(stored[0])
    verify_snapshot(paths[0], first)
    assert store.open(stored[0]) is first
    shutil.copy(paths[0], tmp_path / "copy")
    (tmp_path / "copy").replace(paths[0])
    assert not store.open(stored[0]).is_verified
    shutil.copy(paths[1], paths[0])
    with pytest.raises(SnapshotError, match="holds another snapshot than before"):
        store.open(stored[0])
    for item in stored[1:]:
        assert store.open(item) is store.open(item)
    assert stored[0].mapped is None  # only so many maps stay open


def test_a_file_elsewhere_is_used_and_never_deleted(
    make_snapshot: MakeSnapshot, binding: SnapshotBinding, tmp_path: Path
) -> None:
    store, own = SnapshotStore(), tmp_path / "own.safetensors"
    write_snapshot(own, make_snapshot([1, 2, 3]))
    store.add_file(own)
    assert store.find(binding, [1, 2, 3]).common == 3
    store.discard(store.find(binding, [1]).stored)
    assert store.find(binding, [1]) is None and own.exists()
