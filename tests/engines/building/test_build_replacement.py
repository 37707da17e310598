"""What a build of an engine directory replaces, and what it leaves where it ends early."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from build_folders import names_in, run_python
from small_disk import fill, mounted

from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.errors import BuildError
from edgellm.engines.formats.staged_directory import StagedDirectory
from edgellm.engines.model.limits import EngineLimits

pytest.importorskip("tensorrt_rtx")

#: What is built with all plans: kernels would run every step.
PLANNED = EngineLimits(max_batch=1, prefill_chunk=80, kv_capacity=128)


def test_existing_directory_is_replaced_with_force_only(checkpoint: Path, limits: EngineLimits, tmp_path: Path) -> None:
    target = tmp_path / "engines"
    build_engine_directory(checkpoint, target, limits)
    larger = EngineLimits(2, 32, 64)
    with pytest.raises(BuildError, match=r"exists: --force replaces it"):
        build_engine_directory(checkpoint, target, larger)
    assert EngineDirectory.open(target).limits == limits
    build_engine_directory(checkpoint, target, larger, force=True)
    assert EngineDirectory.open(target).limits == larger
    assert names_in(tmp_path) == {"engines"}


def test_failed_replacement_keeps_the_old_directory(checkpoint: Path, limits: EngineLimits, tmp_path: Path) -> None:
    target = tmp_path / "engines"
    build_engine_directory(checkpoint, target, limits)

    def interrupt(stage: str, done: int, total: int) -> None:
        if stage == "finish":
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        build_engine_directory(checkpoint, target, EngineLimits(2, 32, 64), force=True, progress=interrupt)
    assert EngineDirectory.open(target).limits == limits
    assert names_in(tmp_path) == {"engines"}


@pytest.mark.parametrize("force", [False, True])
def test_other_folders_are_never_replaced(checkpoint: Path, limits: EngineLimits, tmp_path: Path, force: bool) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "diary.txt").write_text("dear diary")
    with pytest.raises(BuildError, match="is not an engine directory"):
        build_engine_directory(checkpoint, tmp_path / "home", limits, force=force)
    assert names_in(tmp_path / "home") == {"diary.txt"}


def test_checkpoint_is_never_replaced(own_checkpoint: Path, limits: EngineLimits, tmp_path: Path) -> None:
    for target in (own_checkpoint, tmp_path):
        with pytest.raises(BuildError, match="name another place"):
            build_engine_directory(own_checkpoint, target, limits, force=True)


def test_empty_folder_is_filled(checkpoint: Path, limits: EngineLimits, tmp_path: Path) -> None:
    (tmp_path / "engines").mkdir()
    build_engine_directory(checkpoint, tmp_path / "engines", limits)
    EngineDirectory.open(tmp_path / "engines")
    assert names_in(tmp_path) == {"engines"}


def test_directory_that_another_build_made_meanwhile_is_kept(
    checkpoint: Path, limits: EngineLimits, tmp_path: Path
) -> None:
    target = tmp_path / "engines"

    def build_another(stage: str, done: int, total: int) -> None:
        if stage == "weights":
            (target / "sub").mkdir(parents=True)

    with pytest.raises(BuildError, match=rf"another process made it meanwhile \({target}\)"):
        build_engine_directory(checkpoint, target, limits, progress=build_another)
    assert names_in(tmp_path) == {"engines"}
    assert names_in(target) == {"sub"}


@pytest.mark.usefixtures("own_workers")
@pytest.mark.parametrize("stage", ["weights", "plans"])
def test_interruption_leaves_nothing(checkpoint: Path, tmp_path: Path, stage: str) -> None:
    def interrupt(current: str, done: int, total: int) -> None:
        if current == stage:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        build_engine_directory(
            checkpoint, tmp_path / "engines", PLANNED, targets=["sm_86"], progress=interrupt, all_plans=True
        )
    assert names_in(tmp_path) == set()


def test_leftovers_of_a_killed_build_are_removed_and_those_of_a_living_one_kept(
    checkpoint: Path, limits: EngineLimits, tmp_path: Path
) -> None:
    dead, living = tmp_path / ".engines.partial-00000000", tmp_path / ".engines.partial-11111111"
    for path in (dead, living):
        path.mkdir()
        (path / "model.safetensors").write_text("half of it")
    of_others = tmp_path / ".engines.partial-notes"
    of_others.mkdir()
    (of_others / "diary.txt").write_text("dear diary")
    descriptor = os.open(living, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    build_engine_directory(checkpoint, tmp_path / "engines", limits)
    assert names_in(tmp_path) == {"engines", living.name, of_others.name}
    assert names_in(of_others) == {"diary.txt"}
    os.close(descriptor)


def test_a_directory_is_not_taken_for_an_abandoned_one_before_it_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes that begin at once: the second one looks around between two steps of the first."""
    mkdir, made = Path.mkdir, list[Path]()

    def interrupted(path: Path, *arguments: Any, **options: Any) -> None:
        mkdir(path, *arguments, **options)
        if ".partial-" in path.name:
            made.append(path)
            if len(made) == 1:
                with StagedDirectory(tmp_path / "engines") as second:
                    assert second.path.is_dir()

    monkeypatch.setattr(Path, "mkdir", interrupted)
    with StagedDirectory(tmp_path / "engines") as first:
        assert not made[0].exists() and first.path.is_dir()
        with StagedDirectory(tmp_path / "engines") as third:
            assert third.path.is_dir() and first.path.is_dir()
        first.commit(replace=False)
    assert names_in(tmp_path) == {"engines"}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 MiB."""
    with mounted(tmp_path / "disk", 64) as problem:
        if problem is not None:
            pytest.skip(f"a small file system cannot be mounted here: {problem}")
        yield tmp_path / "disk"


@pytest.mark.parametrize("stage", ["weights", "plans", "finish"])
def test_disk_that_fills_up_during_a_build(checkpoint: Path, small_disk: Path, stage: str) -> None:
    def fill_at(current: str, done: int, total: int) -> None:
        if current == stage:
            fill(small_disk)

    with pytest.raises(BuildError, match=r"was not built, and nothing was left behind: No space left on device"):
        build_engine_directory(
            checkpoint, small_disk / "engines", PLANNED, targets=["sm_86"], progress=fill_at, all_plans=True
        )
    assert names_in(small_disk) == {"filler"}


def test_disk_that_is_too_small_is_found_at_once(checkpoint: Path, limits: EngineLimits, small_disk: Path) -> None:
    fill(small_disk, leave=8 << 20)
    with pytest.raises(
        BuildError, match=rf"^{small_disk} has 8 MiB free, \d+ MiB are needed for the engine dir.*--weights link"
    ):
        build_engine_directory(checkpoint, small_disk / "engines", limits)
    assert names_in(small_disk) == {"filler"}


def test_file_size_limit_during_a_build(checkpoint: Path, tmp_path: Path) -> None:
    result = run_python(
        """
        import resource, sys
        from edgellm.engines.building.builder import build_engine_directory
        from edgellm.engines.errors import BuildError
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))  # the weights are larger
        try:
            build_engine_directory(sys.argv[1], sys.argv[2])
        except BuildError as error:
            print(error)
        """,
        checkpoint,
        tmp_path / "engines",
    )
    assert "was not built, and nothing was left behind: File too large" in result.stdout, result.stderr
    assert names_in(tmp_path) == set()
