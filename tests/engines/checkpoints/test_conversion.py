"""Pickled weights into safetensors: what is written, what is copied, and that nothing is left of a failure."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from golden_files import golden_folder
from safetensors.numpy import load_file

from edgellm.engines.building.conversion import convert_checkpoint
from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.errors import CheckpointError
from edgellm.engines.formats import staged_directory

FIRST, SECOND = "pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"
INDEX = "pytorch_model.bin.index.json"


@pytest.fixture
def folder() -> Path:
    return golden_folder("torch_files")


@pytest.fixture
def sharded(folder: Path, tmp_path: Path, tiny_checkpoint: Path) -> Path:
    """A checkpoint in two shards, with the other files of a model."""
    source = tmp_path / "source"
    shutil.copytree(folder / "sharded", source)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_checkpoint / name, source / name)
    (source / "tokenizer.model").write_bytes(b"vocabulary")
    (source / "training_args.bin").write_bytes(b"settings of a training program")
    return source


def left_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def assert_same(checkpoint: Checkpoint, expected: Path) -> None:
    values = load_file(expected)
    assert set(checkpoint.tensors) == set(values)
    for name, value in values.items():
        info = checkpoint.info(name)
        assert (info.dtype, info.shape) == (str(value.dtype), value.shape)
        assert checkpoint.raw_bytes(name).tobytes() == value.tobytes()


def test_files_stay_as_many_and_the_model_keeps_its_other_files(sharded: Path, tmp_path: Path) -> None:
    target = tmp_path / "deep" / "target"
    stages: dict[str, list[tuple[int, int]]] = {}
    report = convert_checkpoint(
        sharded, target, progress=lambda stage, *amount: stages.setdefault(stage, []).append(amount)
    )
    copied = ["config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model"]
    weights = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    assert left_in(target) == sorted([*copied, *weights, "model.safetensors.index.json"])
    for name in copied:
        assert (target / name).read_bytes() == (sharded / name).read_bytes()
    with Checkpoint.open(target) as checkpoint:
        assert_same(checkpoint, sharded / "expected.safetensors")
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 128
    assert {name: name in load_file(target / file) for name, file in index["weight_map"].items()} == dict.fromkeys(
        load_file(sharded / "expected.safetensors"), True
    )
    assert (report.tensors, report.nbytes, report.files) == (4, 4 * 16 * 2, 2)
    assert report.dtypes == {"float16": 4} and list(report.copied) == copied and report.notes == []
    assert {stage: (amounts[0], amounts[-1]) for stage, amounts in stages.items()} == {
        "weights": ((0, 128), (128, 128)),
        "verify": ((0, 128), (128, 128)),
    }


@pytest.mark.parametrize("name", ["dtypes", "strided", "shared", "parameters", "nested"])
def test_one_file_alone(folder: Path, tmp_path: Path, name: str) -> None:
    report = convert_checkpoint(folder / f"{name}.bin", tmp_path / "target")
    assert left_in(tmp_path / "target") == ["model.safetensors"]
    written, values = (
        load_file_with_bfloat16(tmp_path / "target" / "model.safetensors"),
        load_file_with_bfloat16(folder / f"{name}.safetensors"),
    )
    assert written == values
    assert any("Only weights were converted" in note for note in report.notes)
    assert any("written as a copy" in note for note in report.notes) == (name in ("shared", "strided"))
    assert any("Left out" in note for note in report.notes) == (name == "nested")


def load_file_with_bfloat16(path: Path) -> dict[str, tuple[str, list[int], bytes]]:
    from safetensors import deserialize

    return {
        name: (entry["dtype"], entry["shape"], bytes(entry["data"])) for name, entry in deserialize(path.read_bytes())
    }


def test_the_one_pickled_file_of_a_directory_is_taken(folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    shutil.copy(folder / "plain.bin", source / "consolidated.00.pth")
    shutil.copy(folder / "plain.bin", source / "optimizer.pt")
    report = convert_checkpoint(source, tmp_path / "target")
    assert report.tensors == 4 and any("no config.json" in note for note in report.notes)
    shutil.copy(folder / "plain.bin", source / "other.pt")
    with pytest.raises(CheckpointError, match=r"which of consolidated.00.pth, other.pt is meant is unknown"):
        convert_checkpoint(source, tmp_path / "second")


def change_index(source: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((source / INDEX).read_text())
    change(index["weight_map"])
    (source / INDEX).write_text(json.dumps(index))


def first_name(source: Path) -> str:
    return next(iter(json.loads((source / INDEX).read_text())["weight_map"]))


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "shard missing": (lambda source: (source / SECOND).unlink(), f"1 of 2 files are missing: {SECOND}"),
    "tensor elsewhere": (
        lambda source: change_index(source, lambda names: names.update({first_name(source): SECOND})),
        "1 tensors are not where 'weight_map' says: 'layer.0.weight'",
    ),
    "tensor nowhere": (
        lambda source: change_index(source, lambda names: names.update({"more": FIRST})),
        "1 tensors are not where 'weight_map' says: 'more'",
    ),
    "tensor not named": (
        lambda source: change_index(source, lambda names: names.pop(first_name(source))),
        "1 tensors are not where 'weight_map' says: 'layer.0.weight'",
    ),
    "tensor twice": (lambda source: shutil.copy(source / FIRST, source / SECOND), f"is in {FIRST} too"),
    "shard outside": (
        lambda source: change_index(source, lambda names: names.update({first_name(source): f"../{FIRST}"})),
        "file in the directory",
    ),
    "empty index": (lambda source: change_index(source, dict.clear), "'weight_map' is empty"),
    "safetensors there": (
        lambda source: (source / "model.safetensors").touch(),
        "has model.safetensors already: edgellm build",
    ),
    "not PyTorch's": (lambda source: (source / FIRST).write_bytes(b"x" * 99), "it is no zip archive"),
    "nothing": (lambda source: [path.unlink() for path in source.iterdir()], "no other pickled weights"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_sources_are_refused_and_nothing_is_made(sharded: Path, tmp_path: Path, case: str) -> None:
    spoil, cause = REFUSED[case]
    spoil(sharded)
    with pytest.raises(CheckpointError) as caught:
        convert_checkpoint(sharded, tmp_path / "target")
    assert cause in str(caught.value)
    assert left_in(tmp_path) == ["source"]


def test_targets_are_not_overwritten_by_mistake(sharded: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    before = left_in(sharded)
    for place in (sharded, tmp_path):
        with pytest.raises(CheckpointError, match="name another place for the new directory"):
            convert_checkpoint(sharded, place, force=True)
    assert left_in(sharded) == before
    target.mkdir()
    convert_checkpoint(sharded, target)  # an empty directory is no obstacle
    (target / "mark").touch()
    with pytest.raises(CheckpointError, match="--force replaces it"):
        convert_checkpoint(sharded, target)
    convert_checkpoint(sharded, target, force=True)
    assert not (target / "mark").exists() and (target / "model.safetensors.index.json").exists()
    (target / "edgellm.json").touch()
    with pytest.raises(CheckpointError, match="is no converted checkpoint"):
        convert_checkpoint(sharded, target, force=True)
    with pytest.raises(CheckpointError, match="does not exist: expected a directory"):
        convert_checkpoint(tmp_path / "nowhere", tmp_path / "other")


@pytest.mark.parametrize("stage", ["weights", "verify"])
def test_an_interrupt_leaves_nothing_and_keeps_what_was_there(sharded: Path, tmp_path: Path, stage: str) -> None:
    def interrupt(at: str, done: int, total: int) -> None:
        if at == stage and done:
            assert len(left_in(tmp_path)) == len(before) + 1  # it was writing
            raise KeyboardInterrupt

    before = left_in(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        convert_checkpoint(sharded, tmp_path / "target", progress=interrupt)
    assert left_in(tmp_path) == before
    convert_checkpoint(sharded, tmp_path / "target")
    content = (tmp_path / "target" / "model-00002-of-00002.safetensors").read_bytes()
    before = left_in(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        convert_checkpoint(sharded, tmp_path / "target", force=True, progress=interrupt)
    assert left_in(tmp_path) == before
    assert (tmp_path / "target" / "model-00002-of-00002.safetensors").read_bytes() == content


def test_what_the_disk_changes_is_found_before_success_is_told(sharded: Path, tmp_path: Path) -> None:
    def change_a_byte(stage: str, done: int, total: int) -> None:
        if (stage, done) == ("verify", 0):
            (path,) = tmp_path.glob(".target.partial-*/model-00002-of-00002.safetensors")
            content = bytearray(path.read_bytes())
            content[-1] ^= 1
            path.write_bytes(content)

    with pytest.raises(CheckpointError, match=r"'layer.3.weight' did not read back as it was written"):
        convert_checkpoint(sharded, tmp_path / "target", progress=change_a_byte)
    assert left_in(tmp_path) == ["source"]


def test_too_small_a_disk_is_told_before_anything_is_written(
    sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staged_directory, "_SPARE_DISK_BYTES", 1 << 60)  # more than any disk has free
    with pytest.raises(CheckpointError, match=r"1,099,511,627,776 MiB are needed for the checkpoint\. Free some"):
        convert_checkpoint(sharded, tmp_path / "deep" / "target")
    assert left_in(tmp_path) == ["source"]
