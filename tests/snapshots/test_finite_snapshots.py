"""Snapshots with infinities or NaN among their rows: refused when they are read first and when they are written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from command_line import Edgellm

from edgellm import LLM, SamplingParams
from edgellm.engines.backends.numpy_backend import NumpyBackend
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.speculation.runner import DecodingRunner
from edgellm.errors import SnapshotError
from edgellm.kernels.bfloat16 import bfloat16_bits
from edgellm.snapshots.contents import KVContents
from edgellm.snapshots.file import SnapshotFolder, read_snapshot, verify_snapshot, write_snapshot
from edgellm.snapshots.slots import SlotSnapshots
from edgellm.snapshots.snapshot import DIGEST, Snapshot, content_digest
from edgellm.snapshots.store import SnapshotStore

IDS = [(7 * index + 3) % 250 for index in range(20)]
PROMPT = [*IDS, 1]
Slots = tuple[DecodingRunner, EngineDirectory]
MakeSnapshot = Callable[..., Snapshot]


def damage(path: Path, name: str, place: tuple[int | slice, ...], value: float, keep_digest: bool = False) -> Path:
    """Put one value into a snapshot's file, whose digest is then that of what it holds, or the one before."""
    content = np.fromfile(path, np.uint8)
    mapped = read_snapshot(path)
    snapshot = Snapshot(mapped.facts, content, mapped.places, is_mapped=False)
    tensor = snapshot.tensor(name)
    tensor[place] = bfloat16_bits(np.float32([value]))[0] if tensor.dtype == np.uint16 else value
    if not keep_digest:
        snapshot.tensor(DIGEST)[...] = np.frombuffer(content_digest(snapshot.body, snapshot.sections), np.uint8)
    path.write_bytes(content.tobytes())
    return path


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "place", "value"),
    [
        ("base.v_cache_0", (1, 59_999, 7), np.nan),  # in the last of several sections
        ("base.k_cache_0", (1, 0, 0), -np.inf),
        ("draft.k_cache_0", (0, 59_998, 0), np.inf),
        ("base.state.delta_matrix_0", (0, 2, 3), np.nan),
    ],
)
def test_a_value_is_named_in_every_format(
    make_snapshot: MakeSnapshot, tmp_path: Path, dtype: str, name: str, place: tuple[int, ...], value: float
) -> None:
    states = {"base.state.delta_matrix_0": (1, 3, 4)}
    made = make_snapshot(range(60_000), dtype=dtype, draft="d" * 64, states=states)
    write_snapshot(tmp_path / "x", made)
    damage(tmp_path / "x", name, place, value)
    snapshot = read_snapshot(tmp_path / "x")
    with pytest.raises(SnapshotError) as caught:
        verify_snapshot(tmp_path / "x", snapshot)
    assert caught.value.reason == "not finite" and not snapshot.is_verified
    assert f"the snapshot {tmp_path / 'x'} cannot be used: the tensor {name!r} [" in str(caught.value)
    assert f"is {value} at {list(place)}, expected finite numbers" in str(caught.value)


def test_the_first_of_several_values_is_named(make_snapshot: MakeSnapshot, tmp_path: Path) -> None:
    write_snapshot(tmp_path / "x", make_snapshot(range(60_000)))
    for place in ((1, 3, 3), (0, 59_999, 7), (1, 9, 0)):
        damage(tmp_path / "x", "base.v_cache_0", place, np.nan)
    with pytest.raises(SnapshotError, match=r"'base.v_cache_0' .* is nan at \[0, 59999, 7\]"):
        verify_snapshot(tmp_path / "x", read_snapshot(tmp_path / "x"))


def test_a_damaged_file_is_called_damaged(make_snapshot: MakeSnapshot, tmp_path: Path) -> None:
    write_snapshot(tmp_path / "x", make_snapshot([1, 2, 3]))
    damage(tmp_path / "x", "base.k_cache_0", (0, 0, 0), np.nan, keep_digest=True)
    with pytest.raises(SnapshotError, match="SHA-256") as caught:
        verify_snapshot(tmp_path / "x", read_snapshot(tmp_path / "x"))
    assert caught.value.reason == "damaged"


def test_rows_that_are_not_finite_are_not_written(make_snapshot: MakeSnapshot, tmp_path: Path) -> None:
    made = make_snapshot([1, 2, 3])
    made.tensor("base.k_cache_0")[1, 2, 3] = np.inf
    with pytest.raises(SnapshotError, match=r"x is not written: .*'base.k_cache_0' .*is inf at \[1, 2, 3\]") as caught:
        write_snapshot(tmp_path / "x", made)
    assert caught.value.reason == "not written"
    assert list(tmp_path.iterdir()) == []


def test_a_good_digest_does_not_hide_another_content(make_snapshot: MakeSnapshot, tmp_path: Path) -> None:
    path = tmp_path / "x"
    write_snapshot(path, make_snapshot([1, 2, 3]))
    verify_snapshot(path, read_snapshot(path))
    damage(path, "base.k_cache_0", (0, 0, 0), np.nan, keep_digest=True)
    with pytest.raises(SnapshotError, match="SHA-256") as caught:
        verify_snapshot(path, read_snapshot(path))
    assert caught.value.reason == "damaged"


@pytest.fixture(scope="module")
def slots(open_slots: Callable[..., object], tiny_draft_engines: Path) -> Iterator[Slots]:
    with open_slots(tiny_draft_engines, draft=True) as opened:
        yield opened


@pytest.fixture
def bad(slots: Slots, tmp_path: Path) -> Path:
    """A snapshot of 20 tokens for the slots, base and draft, with a NaN in the last row of the draft."""
    folder = tmp_path / "snapshots"
    path, _ = SnapshotFolder(folder).save(SlotSnapshots(SnapshotStore(), *slots).compute(0, IDS, KVContents(), "bad"))
    return damage(path, "draft.v_cache_0", (1, 18, 15), np.nan)


@pytest.mark.parametrize("budget", [1 << 30, 1000], ids=["memory", "file"])
def test_a_named_file_is_refused(slots: Slots, bad: Path, budget: int) -> None:
    """Read into memory or, where it is larger than the budget, mapped."""
    snapshots = SlotSnapshots(SnapshotStore(memory_budget=budget), *slots)
    with pytest.raises(SnapshotError, match=r"'draft.v_cache_0' .* is nan at \[1, 18, 15\]") as caught:
        snapshots.load(bad)
    assert caught.value.reason == "not finite"
    assert snapshots.store.snapshots() == []


def test_a_file_that_was_not_verified_yet_is_left_out_and_the_prompt_computed(
    slots: Slots, bad: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is hashed while it is copied into a slot: the slot then counts as empty."""
    store = SnapshotStore()
    store.add_file(bad)
    snapshots, contents = SlotSnapshots(store, *slots), KVContents()
    assert snapshots.restore(0, PROMPT, contents) == 0
    assert contents.reusable(PROMPT) == 0
    assert "is nan at [1, 18, 15]" in caplog.text
    assert store.snapshots() == []


def test_the_api_and_the_command_refuse_it(edgellm: Edgellm, tiny_engines: Path, tmp_path: Path) -> None:
    folder, model = tmp_path / "snapshots", ("-m", tiny_engines, "--backend", "numpy")
    code, _, err = edgellm("cache", "build", "--prompt", "You are a robot.", "--name", "r", "--folder", folder, *model)
    assert code == 0, err
    (path,) = folder.glob("*.safetensors")
    damage(path, "base.k_cache_2", (1, 5, 15), np.nan)
    with pytest.raises(SnapshotError, match=r"'base.k_cache_2' .* is nan at \[1, 5, 15\]"):
        LLM(tiny_engines, backend="numpy", snapshots=[path])
    for command in (
        ("cache", "verify", path),
        ("generate", *model, "--system-cache", path, "--system", "You are a robot.", "hello"),
    ):
        code, out, err = edgellm(*command)
        assert code == 1 and "'base.k_cache_2' [2, " in out + err and "is nan at [1, 5, 15]" in out + err, command
        assert "Traceback" not in err


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("name", ["base.k_cache_2", "base.v_cache_0"])
def test_values_whose_products_overflow_fail_the_answer_and_name_the_file(
    edgellm: Edgellm, tiny_engines: Path, tmp_path: Path, name: str, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is finite. Nothing of the rows is taken again: what is asked next is computed."""
    monkeypatch.setattr(NumpyBackend, "steps_ahead", ahead)
    system = [{"role": "system", "content": "You are a robot."}, {"role": "user", "content": "hello"}]
    with LLM(tiny_engines, backend="numpy") as llm:
        expected = llm.chat(system, SamplingParams(max_tokens=5)).token_ids
        path = llm.cache_system_prompt("You are a robot.", save=tmp_path / "robot.safetensors").path
    damage(path, name, (slice(None), slice(None), slice(None)), 3e38)
    with LLM(tiny_engines, backend="numpy", snapshots=[path]) as llm:
        with pytest.raises(SnapshotError, match=rf"the snapshot {path} cannot be used: .* infinite or NaN"):
            llm.chat(system, SamplingParams(max_tokens=5))
        answer = llm.chat(system, SamplingParams(max_tokens=5))
        assert answer.token_ids == expected and answer.usage.reused_tokens == 0
