"""`edgellm convert` as it is typed."""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import Edgellm
from golden_files import golden_folder
from safetensors.numpy import load_file
from torch_pickles import archive


@pytest.fixture
def source(tmp_path: Path, tiny_checkpoint: Path) -> Path:
    directory = tmp_path / "source"
    shutil.copytree(golden_folder("torch_files") / "sharded", directory)
    shutil.copy(tiny_checkpoint / "config.json", directory)
    return directory


def test_it_converts_and_says_what(edgellm: Edgellm, source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    code, out, err = edgellm("convert", source, target)
    assert code == 0, err
    assert f"{target}: every tensor was read back and is the same" in out
    rows = {line.split()[0]: line.split(maxsplit=1)[1] for line in out.splitlines()[1:]}
    assert rows["tensors"] == "4" and rows["weights"] == "0.0 MiB in 2 files"
    assert rows["dtypes"] == "float16 (4)" and rows["copied"] == "config.json"
    assert "weights: done" in err and "verify: done" in err
    found = {name: value for path in target.glob("*.safetensors") for name, value in load_file(path).items()}
    expected = load_file(source / "expected.safetensors")
    assert {name: value.tobytes() for name, value in found.items()} == {
        name: value.tobytes() for name, value in expected.items()
    }
    code, _, err = edgellm("convert", source, target)
    assert code == 1 and "--force replaces it" in err
    assert edgellm("convert", source, target, "--force")[0] == 0


def test_build_names_the_command_that_helps(edgellm: Edgellm, source: Path, tmp_path: Path) -> None:
    code, _, err = edgellm("build", source, tmp_path / "engines")
    assert code == 1
    assert f"edgellm convert {source} NEW_DIR" in " ".join(err.split())


def test_a_harmful_file_is_refused_in_words(edgellm: Edgellm, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    archive(path, b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R.")
    code, _, err = edgellm("convert", path, tmp_path / "target")
    assert code == 1 and "'os.system'" in err
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.pt"]


def test_a_disk_that_takes_no_more_leaves_nothing(source: Path, tmp_path: Path) -> None:
    """A limit on the size of files fails as a full disk does, in the middle of a write."""
    (source / "config.json").write_text("{}")
    result = subprocess.run(
        [sys.executable, "-m", "edgellm", "convert", str(source), str(tmp_path / "target")],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200)),
    )
    assert result.returncode == 1 and "was not written, and nothing was left behind" in result.stderr
    assert "Traceback" not in result.stderr
    assert [entry.name for entry in tmp_path.iterdir()] == ["source"]


SIGNALLED = """
import os, signal, sys
from edgellm.commands.app import run
from edgellm.commands.console import ProgressDisplay

def signal_itself(self, stage, done, total):
    if stage == "verify":
        print(len(os.listdir(sys.argv[1])), flush=True)
        os.kill(os.getpid(), int(sys.argv[2]))

signal.signal(signal.SIGINT, signal.default_int_handler)
ProgressDisplay.__call__ = signal_itself
run(sys.argv[3:])
"""


@pytest.mark.parametrize(("number", "code"), [(2, 130), (15, 143), (1, 129)])
def test_signals_leave_nothing(source: Path, tmp_path: Path, number: int, code: int) -> None:
    command = [sys.executable, "-c", SIGNALLED, tmp_path, number, "convert", source, tmp_path / "target"]
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert result.returncode == code, result.stderr
    assert result.stdout.strip() == "2"  # the source, and what was being written
    assert [entry.name for entry in tmp_path.iterdir()] == ["source"]
