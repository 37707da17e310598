"""Snapshots of KV rows of 8 bits: restored bit by bit with their scales, refused by an engine of another kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from kept_snapshots import forget

from edgellm.engines.backends.opening import open_backend
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.speculation.draft_plan import tree
from edgellm.engines.speculation.runner import DecodingRunner
from edgellm.errors import SnapshotError
from edgellm.llm import LLM
from edgellm.snapshots.contents import KVContents
from edgellm.snapshots.file import read_snapshot, write_snapshot
from edgellm.snapshots.slots import SlotSnapshots
from edgellm.snapshots.snapshot import Snapshot
from edgellm.snapshots.store import SnapshotStore

SYSTEM = [(7 * index + 3) % 250 for index in range(40)]
PROMPT = [*SYSTEM, 100, 50, 7]
Opened = tuple[DecodingRunner, SlotSnapshots]


def opened(path: Path, kv_cache: str, folder: Path) -> Iterator[Opened]:
    directory = EngineDirectory.open(path).with_kv_cache(kv_cache)
    runner = DecodingRunner.open(open_backend("numpy", directory), directory)
    yield runner, SlotSnapshots(SnapshotStore(), runner, directory)
    runner.close()


@pytest.fixture
def int8(tiny_draft_engines: Path, tmp_path: Path) -> Iterator[Opened]:
    yield from opened(tiny_draft_engines, "int8", tmp_path / "int8")


@pytest.fixture
def plain(tiny_draft_engines: Path, tmp_path: Path) -> Iterator[Opened]:
    yield from opened(tiny_draft_engines, "compute", tmp_path / "compute")


def rows_of(runner: DecodingRunner, slot: int, tokens: int) -> dict[str, np.ndarray]:
    runner.base.await_rows()
    return {name: tensor[slot, :, :tokens].copy() for name, tensor in runner.base.states.tensors.items()}


def test_rows_and_scales_come_back_as_they_were_and_change_no_token(
    int8: Opened, answer: Callable[..., list[int]], tmp_path: Path
) -> None:
    runner, snapshots = int8
    plan = tree(4, 3, 12)
    expected = answer(runner, PROMPT, 0, plan=plan)
    computed = rows_of(runner, 0, len(SYSTEM))
    made = snapshots.compute(1, SYSTEM, KVContents(), "system")
    assert made.places["base.k_cache_0"].dtype == "int8" and made.places["base.v_scale_1"].dtype == "float32"
    assert made.places["draft.k_cache_0"].dtype == "float32" and "draft.k_scale_0" not in made.places
    write_snapshot(tmp_path / "x", made)
    snapshots.load(tmp_path / "x")
    forget(runner)
    assert snapshots.restore(0, PROMPT, KVContents()) == len(SYSTEM) - 1
    restored = rows_of(runner, 0, len(SYSTEM))
    assert restored.keys() == computed.keys()
    assert all((restored[name] == rows).all() for name, rows in computed.items())
    assert answer(runner, PROMPT, len(SYSTEM) - 1, plan=plan) == expected


def test_either_kind_is_refused_by_the_other(int8: Opened, plain: Opened, tmp_path: Path) -> None:
    made = {name: opened[1].compute(0, SYSTEM, KVContents(), name) for name, opened in (("8", int8), ("c", plain))}
    assert made["8"].nbytes < 0.6 * made["c"].nbytes
    for name, snapshot in made.items():
        write_snapshot(tmp_path / name, snapshot)
    with pytest.raises(SnapshotError, match="the dtype of the KV cache is int8, expected compute") as caught:
        plain[1].load(tmp_path / "8")
    assert caught.value.reason == "other kv cache"
    with pytest.raises(SnapshotError, match="the dtype of the KV cache is compute, expected int8"):
        int8[1].load(tmp_path / "c")


def test_a_folder_that_both_share_gives_each_its_own(int8: Opened, plain: Opened) -> None:
    store = SnapshotStore()
    for _, snapshots in (int8, plain):
        snapshots.store = store
    store.put(int8[1].compute(0, SYSTEM, KVContents(), "8"))
    assert plain[1].restore(1, PROMPT, KVContents()) == 0
    store.put(plain[1].compute(0, SYSTEM, KVContents(), "c"))
    assert [each[1].restore(1, PROMPT, KVContents()) for each in (int8, plain)] == [len(SYSTEM) - 1] * 2


def test_rows_of_another_dtype_than_the_binding_says_are_damage(
    make_snapshot: Callable[..., Snapshot], tmp_path: Path
) -> None:
    write_snapshot(tmp_path / "lies", make_snapshot([1, 2, 3], kv_cache="int8"))
    with pytest.raises(SnapshotError, match=r"'base.k_cache_0' has \('float32', 3\), expected \('int8', 3\)"):
        read_snapshot(tmp_path / "lies")
    snapshot = make_snapshot([1, 2, 3])
    facts = replace(snapshot.facts, binding=replace(snapshot.facts.binding, kv_cache="int8"))
    tensors = dict.fromkeys(("base.k_cache_0", "base.v_cache_0"), ("int8", (2, 3, 8)))
    scales = {"base.k_scale_0": ("float32", (2, 2, 1))}
    short = Snapshot.allocate(facts, tensors | scales, lambda nbytes: np.zeros(nbytes, np.uint8))
    write_snapshot(tmp_path / "short", short)
    with pytest.raises(SnapshotError, match=r"'base.k_scale_0' has \('float32', 2\), expected \('float32', 3\)"):
        read_snapshot(tmp_path / "short")
    plain = Snapshot.allocate(snapshot.facts, scales, lambda nbytes: np.zeros(nbytes, np.uint8))
    write_snapshot(tmp_path / "plain", plain)
    with pytest.raises(SnapshotError, match=r"'base.k_scale_0' of shape .* belongs to no snapshot"):
        read_snapshot(tmp_path / "plain")


def test_a_snapshot_without_scales_is_refused(int8: Opened) -> None:
    _, snapshots = int8
    made = snapshots.compute(0, SYSTEM, KVContents(), "system")
    tensors = {n: (p.dtype, p.shape) for n, p in made.places.items() if "scale" not in n and n in made.rows}
    lacking = Snapshot.allocate(made.facts, tensors, lambda nbytes: np.zeros(nbytes, np.uint8))
    lacking.tensor("token_ids")[...] = SYSTEM
    snapshots.store.put(lacking)
    assert snapshots.restore(1, PROMPT, KVContents()) == 0  # dropped, with a warning


def test_a_scale_that_is_not_finite_is_not_written(int8: Opened, tmp_path: Path) -> None:
    made = int8[1].compute(0, SYSTEM, KVContents(), "system")
    made.tensor("base.v_scale_1")[1, 3, 0] = np.nan
    with pytest.raises(SnapshotError, match=r"'base.v_scale_1' .* is nan at \[1, 3, 0\]"):
        write_snapshot(tmp_path / "x", made)


def test_a_system_prompt_that_was_saved_serves_the_same_kind_alone(tiny_draft_engines: Path, tmp_path: Path) -> None:
    path, text = tmp_path / "system", "You are a robot and speak in short sentences."
    with LLM(tiny_draft_engines, backend="numpy", kv_cache="int8") as llm:
        llm.cache_system_prompt(text, save=path)
    with LLM(tiny_draft_engines, backend="numpy", kv_cache="int8", snapshots=[path]) as llm:
        assert llm.directory.limits.kv_cache == "int8"
    with pytest.raises(SnapshotError, match="the dtype of the KV cache is int8, expected compute"):
        LLM(tiny_draft_engines, backend="numpy", snapshots=[path])
