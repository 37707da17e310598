"""The command line where its surroundings are unusual: streams that are closed or full, homes that are not there."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgellm.__main__ import main
from edgellm.commands.app import run
from edgellm.commands.chat_input import user_history_file
from edgellm.commands.settings import load_settings
from edgellm.engines.formats.staged_directory import StagedDirectory
from edgellm.engines.quantizer.work_folder import WorkFolder
from edgellm.hub.directories import locked
from edgellm.kernels.user_paths import user_cache_directory
from edgellm.snapshots.staging import StagedFile

GENERATE = "generate hello --max-tokens 4 --backend numpy --model"


def shell(engines: Path, redirected: str) -> subprocess.CompletedProcess[str]:
    command = f"{sys.executable} -m edgellm {GENERATE} {engines} {redirected}"
    return subprocess.run(["sh", "-c", command], capture_output=True, text=True, cwd="/", check=False)


@pytest.mark.parametrize(
    "redirected", [*(pytest.param(each, marks=pytest.mark.slow) for each in (">&-", "2>&-")), "<&- >&- 2>&-"]
)
def test_closed_streams(tiny_engines: Path, redirected: str) -> None:
    finished = shell(tiny_engines, redirected)
    assert (finished.returncode, finished.stderr) == (0, "")
    assert bool(finished.stdout) is (">&-" not in redirected.replace("2>&-", ""))


@pytest.mark.parametrize("command", [f"{GENERATE} {{}}", "build {} {}/new"])
def test_no_further_thread_is_said_in_one_line(
    tiny_engines: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(SystemExit) as left:
        run(command.format(tiny_engines, tiny_engines).split())
    assert left.value.code == 1
    assert "error: no further thread can be started: allow more tasks" in " ".join(capsys.readouterr().err.split())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_said_in_one_line(tiny_engines: Path) -> None:
    finished = shell(tiny_engines, "> /dev/full")
    assert finished.returncode == 1
    assert finished.stderr == "error: the output cannot be read or written: No space left on device\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("command", ["--help", "--version", "generate --help"])
def test_help_on_a_full_disk_is_an_error_like_others(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(SystemExit) as left:
            run(command.split())
    assert left.value.code == 1
    assert capsys.readouterr().err == "error: the output cannot be read or written: No space left on device\n"


def test_help_that_nobody_reads_ends_as_other_output_does(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as nobody:
        monkeypatch.setattr(sys, "stdout", nobody)
        with pytest.raises(SystemExit) as left:
            run(["--help"])
        os.dup2(os.open(os.devnull, os.O_WRONLY), write)  # what is left in the buffer
    assert left.value.code == 141


@pytest.fixture
def collecting() -> Iterator[None]:
    threshold = gc.get_threshold()
    yield
    gc.set_threshold(*threshold)


def test_an_interrupt_while_it_starts_is_quiet(collecting: None, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        def __getattr__(self, name: str) -> object:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "edgellm.commands.app", Interrupted())
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 130


@pytest.mark.parametrize("command", ["", "generate", "cache", "cache build"])
def test_help_has_a_short_name(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        run([*command.split(), "-h"])
    assert left.value.code == 0
    assert capsys.readouterr().out.startswith(f"Usage: {' '.join(['edgellm', *command.split()])}")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["generate", "--file", "~nobody-at-all/x"], 1, "--file ~nobody-at-all/x cannot be read: No such file"),
        (["generate", "hi", "-m", "~nobody-at-all/x"], 1, "~nobody-at-all/x does not exist"),
        (["generate", "hi", "--lora", "a=~nobody-at-all", "--adapter", "a"], 1, "~nobody-at-all does not exist"),
        (["generate", "hi", "--draft-steps", "30"], 1, "draft_steps is 30 for a chain"),
        (["generate", "hi", "--draft-steps", "99"], 2, "--draft-steps is 99: expected a whole number from 1 to 32"),
        (["generate", "hi", "--choices", "LONG"], 2, "expected a list of paths"),
        (["cache", "list", "--folder", "FILE"], 1, "is a file: expected the folder that holds snapshots"),
        (["cache", "build", "--prompt", "x", "--disk-budget", "abc"], 2, "--disk-budget is 'abc': expected a size"),
        (["bench", "--output", "FOLDER"], 1, "is a directory: expected the name of a file"),
        (["bench", "--plot", "/no/such/folder/x.svg"], 1, "/no/such/folder must be there, and open to you"),
    ],
)
def test_wrong_options_are_named_at_once(
    arguments: list[str], code: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "long.yaml").write_text("word " * 10_000)
    places = {"LONG": tmp_path / "long.yaml", "FILE": tmp_path / "long.yaml", "FOLDER": tmp_path}
    with pytest.raises(SystemExit) as left:
        run([str(places.get(argument, argument)) for argument in arguments])
    shown = " ".join(capsys.readouterr().err.split())
    assert left.value.code == code
    assert message in shown and len(shown) < 1000


def test_a_service_may_have_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME", "EDGELLM_CACHE_DIR", "EDGELLM_CONFIG"):
        monkeypatch.delenv(name, raising=False)

    def unknown(number: int) -> object:
        raise KeyError(f"getpwuid(): uid not found: {number}")

    monkeypatch.setattr("pwd.getpwuid", unknown)
    assert load_settings().model is None
    assert user_history_file() == Path("/nonexistent/.local/state/edgellm/chat_history")
    assert user_cache_directory() == Path("/nonexistent/.cache/edgellm")


def test_homes_are_found_where_no_shell_does_it(
    tiny_engines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Shells leave the ~ of --lora NAME=~/DIR, and of --model=~/DIR, as it is."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "engines").symlink_to(tiny_engines)
    with pytest.raises(SystemExit) as left:
        run(["generate", "hi", "--model=~/engines", "--backend", "numpy", "--max-tokens", "2"])
    assert left.value.code == 0, capsys.readouterr().err
    with pytest.raises(SystemExit):
        run(["generate", "hi", "--lora", "a=~/adapter", "--adapter", "a"])
    assert f"{tmp_path}/adapter" in capsys.readouterr().err


def test_a_file_system_without_locks_keeps_nobody_from_working(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a network: who works there at the same time is not known, and nobody's files are taken for abandoned."""

    def refuse(descriptor: int, kind: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    for _ in range(2):
        with locked(tmp_path / "models"), WorkFolder(tmp_path / "quantized", {"version": 2}, False) as work:
            assert work.path.is_dir()
        with StagedDirectory(tmp_path / "engines") as first, StagedDirectory(tmp_path / "engines") as second:
            assert first.path.is_dir() and second.path.is_dir()
        with StagedFile(tmp_path / "snapshot") as one, StagedFile(tmp_path / "snapshot") as other:
            assert one.path.is_file() and other.path.is_file()
            one.commit()
    assert {path.name for path in tmp_path.iterdir()} == {"models", "snapshot", ".quantized.quantizing"}
