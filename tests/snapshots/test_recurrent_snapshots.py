"""Snapshots of models with recurrent layers: rows and states bit by bit, whole or not at all; files that lie."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from kept_snapshots import forget, keep, save
from tiny_families import RECURRENT

from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.speculation.draft_plan import tree
from edgellm.engines.speculation.runner import DecodingRunner
from edgellm.errors import SnapshotError
from edgellm.snapshots.contents import KVContents
from edgellm.snapshots.file import read_snapshot, write_snapshot
from edgellm.snapshots.kept_on_host import StateKeeper
from edgellm.snapshots.slots import SlotSnapshots
from edgellm.snapshots.snapshot import DIGEST, content_digest
from edgellm.snapshots.store import SnapshotStore

SYSTEM = [(7 * index + 3) % 250 for index in range(40)]
PROMPTS = [[*SYSTEM, 100 + number, 50 - number, number] for number in range(4)]
PLACE = len(SYSTEM) - 1
Slots = tuple[DecodingRunner, EngineDirectory]
Answer = Callable[..., list[int]]


@pytest.fixture(scope="module")
def directories(
    make_checkpoint: Callable[..., Path], tiny_draft: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Two slots, a draft, context 96; of each family."""
    folder, limits = tmp_path_factory.mktemp("recurrent"), EngineLimits(2, 16, 96, 4, 3, 12)
    for name in ("lfm2", "qwen3_5", "granite4_hybrid", "nemotron_h"):
        checkpoint = make_checkpoint(folder / f"{name} checkpoint", **RECURRENT[name])
        build_engine_directory(checkpoint, folder / name, limits, [], draft=tiny_draft)
    return {name: folder / name for name in ("lfm2", "qwen3_5", "granite4_hybrid", "nemotron_h")}


@pytest.fixture(
    scope="module",
    params=[("lfm2", True), ("qwen3_5", False), ("granite4_hybrid", True), ("nemotron_h", False)],
    ids=str,
)
def slots(
    request: pytest.FixtureRequest, open_slots: Callable[..., object], directories: dict[str, Path]
) -> Iterator[Slots]:
    name, draft = request.param
    with open_slots(directories[name], draft) as opened:
        yield opened


@pytest.fixture(scope="module")
def good(slots: Slots, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("good") / "good.safetensors"
    write_snapshot(path, SlotSnapshots(SnapshotStore(), *slots).compute(0, SYSTEM, KVContents(nothing()), "good"))
    return path


def nothing() -> object:
    """No states but the slot's own."""

    class Nothing:
        def latest(self, tokens: object, adapter: object, limit: int) -> int:
            return 0

    return Nothing()


def restored(snapshots: SlotSnapshots, prompt: list[int], slot: int = 0) -> tuple[int, KVContents]:
    contents = KVContents(nothing())
    return snapshots.restore(slot, prompt, contents), contents


@pytest.mark.parametrize("place", ["memory", "disk", "file"])
def test_a_snapshot_changes_no_token(slots: Slots, answer: Answer, tmp_path: Path, place: str) -> None:
    runner, _ = slots
    snapshots = SlotSnapshots(SnapshotStore(), *slots)
    plan = tree(4, 3, 12) if runner.draft.has_model else None
    expected = [answer(runner, prompt, 0, plan=plan) for prompt in (*PROMPTS, SYSTEM)]
    made = snapshots.compute(0, SYSTEM, KVContents(nothing()), "system")
    keep(snapshots, made, place, tmp_path)
    found = []
    for number, prompt in enumerate((*PROMPTS, SYSTEM)):  # the prompt itself goes on before its last token
        forget(runner)
        reused, contents = restored(snapshots, prompt, number % 2)
        assert reused == PLACE == contents.reusable(prompt) == contents.place
        found.append(answer(runner, prompt, reused, plan=plan, slot=number % 2) if number % 2 == 0 else None)
        if found[-1] is None:
            runner.base.await_rows()
            runner.swap_rows(0, 1)
            found[-1] = answer(runner, prompt, reused, plan=plan)
    assert found == expected


def test_rows_and_states_are_restored_bit_by_bit(slots: Slots, tmp_path: Path) -> None:
    runner, _ = slots
    states: dict[str, np.ndarray] = {}

    def take() -> None:
        states.update({each.name: each.memory.copy() for each in runner.base.states.recurrent_of_slot(1)})

    from edgellm.engines.runners.sampling_state import SamplingValues

    runner.start(1, SYSTEM, 0, SamplingValues(), stops={PLACE: take}).wait()
    runner.stop(1)
    snapshots = SlotSnapshots(SnapshotStore(), *slots)
    save(snapshots.store, snapshots.compute(1, SYSTEM, KVContents(nothing()), "system"), tmp_path)
    rows = {name: tensor[1].copy() for name, tensor in runner.base.states.tensors.items()}
    forget(runner)
    assert restored(snapshots, PROMPTS[0])[0] == PLACE
    runner.base.await_rows()
    for name, tensor in runner.base.states.tensors.items():
        if name in states:
            assert (tensor[:1].reshape(states[name].shape) == states[name]).all(), name
        else:
            assert (tensor[0][:, : len(SYSTEM)] == rows[name][:, : len(SYSTEM)]).all(), name
        assert np.isnan(tensor[1]).all()


def test_states_are_of_use_whole_or_not_at_all(slots: Slots) -> None:
    snapshots = SlotSnapshots(SnapshotStore(), *slots)
    for tokens in (SYSTEM, SYSTEM[:30], [9]):
        snapshots.store.put(snapshots.compute(0, tokens, KVContents(nothing()), "system"))
    for prompt, reused in (
        (PROMPTS[0], 39),
        (SYSTEM, 39),
        (SYSTEM[:39], 29),
        ([*SYSTEM[:35], 1, 1], 29),
        (SYSTEM[:30], 29),
        (SYSTEM[:29], 0),
        ([*SYSTEM[:20], 1], 0),
        ([9, 9, 9], 0),  # a single token has no state before it
    ):
        assert restored(snapshots, prompt)[0] == reused, prompt


def test_kept_states_are_used_with_the_rows_of_a_snapshot(slots: Slots, answer: Answer) -> None:
    """A slot's state before its place is worth less, one beyond it more."""
    runner, _ = slots
    keeper = StateKeeper(runner)
    snapshots = SlotSnapshots(SnapshotStore(), *slots)
    snapshots.store.put(snapshots.compute(0, SYSTEM, KVContents(keeper), "system"))
    contents = KVContents(keeper)
    assert snapshots.restore(0, PROMPTS[0], contents) == PLACE
    runner.base.await_rows()
    keeper.keep(0, SYSTEM, PLACE, None)
    contents.replace(SYSTEM, PLACE if runner.draft.has_model else None, 7)
    assert contents.reusable(PROMPTS[1]) == PLACE and contents.reusable(SYSTEM[:20]) == 7
    assert contents.reusable([*SYSTEM[:39], 1]) == PLACE - runner.draft.has_model * (PLACE - 7)
    assert snapshots.restore(0, PROMPTS[1], contents) == 0  # as good as what is there
    keeper.close()


# Files that lie.


def header_of(data: bytes) -> tuple[dict, bytes]:
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def with_header(header: dict, rest: bytes) -> bytes:
    encoded = json.dumps(header).encode()
    encoded += b" " * (-(len(encoded) + 8) % 64)
    return len(encoded).to_bytes(8, "little") + encoded + rest


def with_digest(path: Path, data: bytes) -> None:
    """Write a file whose digest is right, whatever it holds."""
    path.write_bytes(data)
    snapshot = read_snapshot(path)
    content = snapshot.content.copy()
    place = snapshot.places[DIGEST]
    digest = content_digest(content[: -place.nbytes], snapshot.sections)
    path.write_bytes(data[: -place.nbytes] + digest)


def refusal(slots: Slots, path: Path) -> SnapshotError:
    snapshots = SlotSnapshots(SnapshotStore(), *slots)
    with pytest.raises(SnapshotError) as caught:
        snapshots.load(path)
    assert snapshots.store.snapshots() == [] and str(path) in str(caught.value)
    return caught.value


def states_of(header: dict) -> list[str]:
    return sorted(name for name in header if name.startswith("base.state."))


def test_the_file_says_what_it_holds(slots: Slots, good: Path) -> None:
    runner, _ = slots
    snapshot = read_snapshot(good)
    saved = runner.base.states.saved(len(SYSTEM))
    assert {name: snapshot.places[name].shape for name in snapshot.states} == {
        f"base.state.{name}": shape for name, (shape, _) in saved.items() if "cache" not in name
    }
    assert all(snapshot.places[name].dtype == "float32" for name in snapshot.states)
    assert sorted(snapshot.states) == states_of(header_of(good.read_bytes())[0])


def test_truncated_and_flipped_everywhere(slots: Slots, good: Path, tmp_path: Path) -> None:
    data, path = good.read_bytes(), tmp_path / "x"
    header, rest = header_of(data)
    start = len(data) - len(rest)
    offsets = {start + end for name, entry in header.items() if name != "__metadata__" for end in entry["data_offsets"]}
    for length in sorted({end + change for end in offsets for change in (-1, 0, 1)} & set(range(len(data)))):
        path.write_bytes(data[:length])
        assert refusal(slots, path).reason == "damaged", length
    for first, end in pairwise(sorted(offsets)):
        for place in {first, (first + end) // 2, end - 1}:
            flipped = bytearray(data)
            flipped[place] ^= 0x10
            path.write_bytes(flipped)
            error = refusal(slots, path)
            assert error.reason == "damaged" and "SHA-256" in str(error), place


def renamed(header: dict, name: str, other: str) -> dict:
    return {key if key != name else other: entry for key, entry in header.items()}


def test_states_of_other_kinds_names_and_shapes(slots: Slots, good: Path, tmp_path: Path) -> None:
    data, path = good.read_bytes(), tmp_path / "x"
    name = states_of(header_of(data)[0])[0]  # columns of the first layer
    own = name.removeprefix("base.state.")
    for other in (
        f"draft.{own}",
        f"draft.state.{own}",
        f"base.{own}",
        own,
        "base.state.k_cache_0",
        "base.state.recurrent_0",
        "base.state.conv_columns_00",
        "base.state.",
    ):
        header, rest = header_of(data)
        path.write_bytes(with_header(renamed(header, name, other), rest))
        error = refusal(slots, path)
        assert error.reason == "damaged" and other in str(error), other
    for other in ("base.state.conv_columns_7", "base.state.delta_matrix_7"):  # a state, but none of this model
        header, rest = header_of(data)
        with_digest(path, with_header(renamed(header, name, other), rest))
        error = refusal(slots, path)
        assert error.reason == "damaged" and (name in str(error) or other in str(error)), other
    header, rest = header_of(data)
    _, channels, columns = header[name]["shape"]
    for shape in ([channels, 1, columns], [1, columns, channels], [columns, channels, 1]):
        header[name]["shape"] = shape
        with_digest(path, with_header(header, rest))
        error = refusal(slots, path)
        assert error.reason == "damaged" and f"{name!r} has the shape" in str(error)
    header[name]["shape"] = [channels * columns]
    path.write_bytes(with_header(header, rest))
    assert "belongs to no snapshot" in str(refusal(slots, path))
    header[name] |= {"shape": [1, channels, 2 * columns], "dtype": "F16"}
    path.write_bytes(with_header(header, rest))
    assert f"{name!r} has float16, expected float32" in str(refusal(slots, path))


def test_states_that_are_missing(slots: Slots, good: Path, tmp_path: Path) -> None:
    header, rest = header_of(good.read_bytes())
    name = states_of(header)[-1]
    first, end = header.pop(name)["data_offsets"]
    for entry in header.values():
        if "data_offsets" in entry:
            entry["data_offsets"] = [each - (end - first) * (each > first) for each in entry["data_offsets"]]
    with_digest(tmp_path / "x", with_header(header, rest[:first] + rest[end:]))
    error = refusal(slots, tmp_path / "x")
    assert error.reason == "damaged" and f"{name!r} has the shape None" in str(error)


def test_states_that_are_no_numbers(slots: Slots, good: Path, tmp_path: Path) -> None:
    data = bytearray(good.read_bytes())
    snapshot = read_snapshot(good)
    name = snapshot.states[-1]
    place = snapshot.places[name]
    data[place.offset : place.offset + 4] = np.float32(np.nan).tobytes()
    with_digest(tmp_path / "x", bytes(data))
    error = refusal(slots, tmp_path / "x")
    assert error.reason == "not finite" and repr(name) in str(error)


def test_the_snapshot_of_a_model_of_another_kind(
    slots: Slots, good: Path, open_slots: Callable[..., object], tiny_engines: Path, tmp_path: Path
) -> None:
    with open_slots(tiny_engines) as dense:
        assert refusal(dense, good).reason == "other weights"
        made = SlotSnapshots(SnapshotStore(), *dense).compute(0, SYSTEM, KVContents(), "dense")
        write_snapshot(tmp_path / "x", made)
        assert refusal(slots, tmp_path / "x").reason == "other weights"
        binding = SlotSnapshots(SnapshotStore(), *dense).binding()
        header, rest = header_of(good.read_bytes())  # a lie about where it comes from
        facts = json.loads(header["__metadata__"]["edgellm_snapshot"])
        facts["binding"] |= {field: getattr(binding, field) for field in ("weights", "config", "draft")}
        header["__metadata__"]["edgellm_snapshot"] = json.dumps(facts)
        with_digest(tmp_path / "y", with_header(header, rest))
        error = refusal(dense, tmp_path / "y")
        assert error.reason == "damaged" and "base." in str(error)
