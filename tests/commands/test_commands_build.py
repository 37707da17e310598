"""`edgellm build` as a user types it."""

from __future__ import annotations

import io
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import Edgellm
from typer.testing import CliRunner

from edgellm.commands import doctor, info
from edgellm.commands.app import create_app
from edgellm.commands.console import progress_display
from edgellm.engines.backends import platform
from edgellm.engines.backends.executors import SHARED_MEMORY
from edgellm.engines.building.planning import add_targets
from edgellm.engines.building.targets import read_targets
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.model.limits import EngineLimits
from edgellm.kernels.gpu import absent_gpu

pytest.importorskip("tensorrt_rtx")
SMALL = ("--prefill-chunk", "80", "--kv-capacity", "128")


def test_build_prints_a_table_and_plain_progress(checkpoint: Path, tmp_path: Path, compiled: list) -> None:
    target = tmp_path / "engines"
    options = ("--target", "sm_86:46,sm_80:108", "--max-batch", "1", "--all-plans", *SMALL)
    arguments = ["build", str(checkpoint), str(target), *options]
    result = CliRunner().invoke(create_app(), arguments)
    assert result.exit_code == 0, result.output
    assert EngineDirectory.open(target, verify=True).limits == EngineLimits(1, 80, 128)
    rows = [line.split() for line in result.stdout.splitlines() if " base." in line]
    segments = (f"base.prefill-b1-t80-s{run}" for run in ("0-1", "2-6"))
    parts = ["base.decode-b1-t1-l128", *segments]
    assert {tuple(row[:2]) for row in rows} == {(name, part) for name in ("sm_80", "sm_86") for part in parts}
    assert all(row[3] == "MiB" for row in rows)
    assert sum(float(row[4]) for row in rows) > 0  # seconds, of which the smallest round to none
    for name in ("sm_86", "sm_80"):
        assert f"  {name}       kernels: base decode 1; base prefill 16, 80\n" in result.stdout
    assert EngineDirectory.read(target).kernels.keys() == {"sm_80-cuda13.0", "sm_86-cuda13.0"}
    for name, count in (("sm_86", 46), ("sm_80", 108)):
        assert re.search(rf" {name}: \d+ compiled for {count} multiprocessors by CUDA 13\.0, ", result.stdout)
        assert re.search(rf"  {name}   \d+ compiled kernels, CUDA 13\.0 .* MiB .* s\n", result.stdout)
    for word in ("weights", "total on disk", "time", "peak host memory"):
        assert word in result.stdout
    assert "\r" not in result.stderr
    assert "plans: done 6 of 6" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("{checkpoint}", "{target}", "--max-batch", "9"), 1, "--max-batch is 9: expected a whole number from 1 to 8"),
        (("{checkpoint}", "{target}", "--kv-capacity", "4096"), 1, "--kv-capacity is 4096"),
        (("{checkpoint}", "{target}", "--target", "sm_70"), 1, "on a machine with that GPU"),
        (("{checkpoint}", "{target}", "--target", "sm_87", "--cuda", "12.6"), 1, "pip install 'nvidia-cuda-nvrtc-cu12"),
        (("{checkpoint}", "{target}", "--target", "sm_87", "--cuda", "twelve"), 2, "a release of CUDA such as 12.6"),
        (("{checkpoint}", "{target}", "--cuda", "12.6"), 2, "name their GPUs with --target"),
        (("{checkpoint}", "--target", "sm_87"), 2, "is no engine directory"),
        (("{checkpoint}", "{target}", "--weights", "move"), 1, "--weights is 'move'"),
        (("{checkpoint}", "{target}", "--max-batch", "two"), 2, "--max-batch"),
        (("{target}", "{target}2"), 1, "does not exist"),
        (("{checkpoint}",), 2, "CHECKPOINT and ENGINE_DIR"),
        (("{checkpoint}", "--refresh-plans", "{target}"), 2, "--refresh-plans"),
        (("--refresh-plans", "{checkpoint}"), 1, "it is a checkpoint, not an engine directory"),
    ],
)
def test_wrong_use_ends_with_a_message_and_nothing_made(
    checkpoint: Path, tmp_path: Path, arguments: tuple[str, ...], code: int, message: str
) -> None:
    filled = [argument.format(checkpoint=checkpoint, target=tmp_path / "engines") for argument in arguments]
    result = CliRunner().invoke(create_app(), ["build", *filled])
    assert result.exit_code == code
    assert message in " ".join(result.output.split())
    assert isinstance(result.exception, SystemExit)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("build {checkpoint} {link}", "{link} cannot be read or written: Too many levels of symbolic links"),
        ("build {link} {link}2", "{link} does not exist"),
        ("quantize {checkpoint} {link}", "{link} cannot be read or written: Too many levels of symbolic links"),
        ("remove {link}", "{link} is no name on the hub"),
    ],
)
def test_a_link_to_itself_is_an_error_like_others(
    checkpoint: Path, tmp_path: Path, arguments: str, message: str
) -> None:
    link = tmp_path / "link.gguf" if arguments.startswith("remove") else tmp_path / "link"
    link.symlink_to(link)
    filled = [argument.format(checkpoint=checkpoint, link=link) for argument in arguments.split()]
    result = CliRunner().invoke(create_app(), filled)
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit), result.output
    assert message.format(link=link) in " ".join(result.output.split())
    assert list(tmp_path.iterdir()) == [link] and link.is_symlink()


def test_an_engine_directory_gets_more_targets(plain_directory: Path, compiled: list) -> None:
    result = CliRunner().invoke(create_app(), ["build", str(plain_directory), "--target", "sm_87", "--cuda", "12.6"])
    assert result.exit_code == 0, result.output
    assert {architecture for _, architecture in compiled} == {"sm_87"}
    assert f"sm_87: {len(compiled)} compiled for 4, 8, 14, 16 multiprocessors by CUDA 12.6" in result.output
    assert "  sm_87       kernels: base decode 1; base prefill 16\n" in result.output
    assert "none are needed: kernels run every step" in result.output
    assert "added on disk" in result.output and "total on disk" not in result.output
    assert "kernels: done" in result.output
    for more in (["--kv-capacity", "64"], ["--force"], ["--weights", "link"], ["--no-try"]):
        refused = CliRunner().invoke(create_app(), ["build", str(plain_directory), "--target", "sm_87", *more])
        assert refused.exit_code == 2 and f"{more[0].replace('no-', '')}" in refused.output
    assert not (plain_directory / "plans").exists()
    facts = json.loads(CliRunner().invoke(create_app(), ["info", str(plain_directory), "--json", "--verify"]).output)
    (kernels,) = facts["kernels"]
    assert (kernels["target"], kernels["multiprocessors"], kernels["cuda"]) == ("sm_87", [4, 8, 14, 16], "12.6")
    assert kernels["modules"] == len(compiled) and kernels["usable_here"] in (None, False)
    next((plain_directory / "kernels" / "sm_87-cuda12.6").glob("*.cubin")).write_bytes(b"damaged")
    told = CliRunner().invoke(create_app(), ["info", str(plain_directory), "--verify"])
    assert told.exit_code == 1 and "it was cut or replaced" in told.output


def test_without_tensorrt_a_target_has_kernels(
    checkpoint: Path, tmp_path: Path, compiled: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "_search", lambda: (None, "neither package is installed"))
    arguments = ["build", str(checkpoint), str(tmp_path / "robot"), "--target", "sm_87:8", "--no-try", *SMALL]
    result = CliRunner().invoke(create_app(), arguments)
    assert result.exit_code == 0, result.output
    assert "No plans were built" not in result.output and "sm_87" in result.output
    refused = CliRunner().invoke(
        create_app(), ["build", "--refresh-plans", str(tmp_path / "robot"), "--target", "sm_87"]
    )
    assert refused.exit_code == 1 and "neither package is installed" in refused.output


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_signals_leave_nothing_behind(checkpoint: Path, tmp_path: Path, number: signal.Signals) -> None:
    """The limits ask for some twenty plans, so that the build is under way for long enough."""
    command = [sys.executable, "-m", "edgellm", "build", str(checkpoint), str(tmp_path / "engines"), "--max-batch", "8"]
    targets = ["--all-plans"]
    targets += [word for target in ("sm_80", "sm_86", "sm_89", "sm_120") for word in ("--target", target)]
    process = subprocess.Popen([*command, *targets], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".engines.partial-*/plans")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert "Traceback" not in errors
    assert not list(tmp_path.iterdir())


class Terminal(io.StringIO):
    """Says that it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_progress_on_a_terminal_is_one_line_that_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys, "stderr", Terminal())
    with progress_display() as display:
        display("weights", 1 << 20, 4 << 20)
        display("plans", 1, 2)
        display("weights", 4 << 20, 4 << 20)
        display("plans", 2, 2)
    lines = sys.stderr.getvalue().split("\r")
    assert lines[0] == lines[-1].removesuffix("\x1b[K") == "" and "\n" not in sys.stderr.getvalue()
    assert all(line.endswith("\x1b[K") for line in lines[1:])
    assert lines[2].startswith("weights [#####...............] 1 of 4 MiB   plans [##########..........] 1 of 2")


def test_progress_elsewhere_is_a_line_a_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with progress_display() as display:
        for done in (*range(5), 4):
            display("plans", done, 4)
    assert sys.stderr.getvalue() == "plans ...\nplans: done 4 of 4\n"


def test_replaced_directory_needs_force(edgellm: Edgellm, checkpoint: Path, plain_directory: Path) -> None:
    code, _, err = edgellm("build", checkpoint, plain_directory, *SMALL)
    assert code == 1 and "--force" in err
    code, _, err = edgellm("build", checkpoint, plain_directory, "--force", "--weights", "link", *SMALL)
    assert code == 0, err
    assert (plain_directory / "model.safetensors").is_symlink()
    shutil.rmtree(plain_directory)
    assert (checkpoint / "model.safetensors").exists()


def test_doctor_counts_what_is_compiled_for_the_gpu(
    plain_directory: Path, compiled: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_targets(plain_directory, read_targets(["sm_87:8"]))
    directory, lines = EngineDirectory.open(plain_directory), {}
    for capability, count in (("sm_87", 8), ("sm_87", 16), ("sm_87", 4), ("sm_86", 8)):
        present = replace(absent_gpu(capability, count, SHARED_MEMORY[capability]), driver_cuda=(13, 0))
        for command in (doctor, info):
            monkeypatch.setattr(command, "find_gpu", lambda present=present: present)
        lines[capability, count] = doctor._kernels(directory)
    own = f", usable here, those for 8; this GPU's own: edgellm build {plain_directory} --target sm_87:"
    for count, end in ((8, ", usable here"), (16, f"{own}16"), (4, f"{own}4")):
        line = lines["sm_87", count]
        counted = re.match(r"(\d+) of (\d+) for this GPU are compiled; kept with the model: sm_87: ", line)
        assert counted is not None and counted[1] == counted[2] and line.endswith(end)
    assert ", the others when the model is opened; " in lines["sm_86", 8]
    assert lines["sm_86", 8].endswith(", not for this machine")
