"""What is logged: nothing by itself, lines for people or JSON for programs where a command is asked."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from edgellm.commands.app import run
from edgellm.commands.console import show_logs
from edgellm.kernels.compiler import ModuleSource, compiled_now

LOGGER = logging.getLogger("edgellm.test")


@pytest.fixture(autouse=True)
def quiet_again():
    yield
    logger = logging.getLogger("edgellm")
    for handler in [handler for handler in logger.handlers if isinstance(handler, logging.StreamHandler)]:
        logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


def test_a_program_that_imports_the_package_sees_nothing() -> None:
    code = "import edgellm, logging; logging.getLogger('edgellm.plans').error('not shown')"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (shown.stdout, shown.stderr) == ("", "")


def test_commands_show_warnings_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    show_logs()
    LOGGER.info("not shown")
    LOGGER.warning("built %s", "a plan")
    assert capsys.readouterr().err == "built a plan\n"


def test_a_lower_level_says_when_and_where(capsys: pytest.CaptureFixture[str]) -> None:
    show_logs("debug")
    LOGGER.debug("request ended", extra={"edgellm": {"outcome": "stop", "completion_tokens": 3}})
    line = capsys.readouterr().err
    assert line.endswith("DEBUG   edgellm.test: request ended (outcome=stop, completion_tokens=3)\n")


def test_json_lines_have_the_fields(capsys: pytest.CaptureFixture[str]) -> None:
    show_logs("info", "json")
    try:
        raise ValueError("cause")
    except ValueError as error:
        LOGGER.info("request ended: %s", "failed", extra={"edgellm": {"outcome": "failed"}}, exc_info=error)
    (line,) = capsys.readouterr().err.splitlines()
    fields = json.loads(line)
    assert fields["time"].endswith("Z") and "T" in fields["time"]
    expected = {"level": "info", "logger": "edgellm.test", "message": "request ended: failed", "outcome": "failed"}
    assert {name: fields[name] for name in expected} == expected
    assert fields["error"].endswith("ValueError: cause")


@pytest.mark.parametrize("place", ["before", "after"])
def test_the_options_stand_before_or_behind_the_command(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--log-level", "info", "--log-format", "json"]
    question = ["generate", "Hello!", "--max-tokens", "2"]
    with pytest.raises(SystemExit) as left:
        run([*given, *question] if place == "before" else [*question, *given])
    assert left.value.code == 0
    LOGGER.info("shown")
    assert json.loads(capsys.readouterr().err.splitlines()[-1])["message"] == "shown"


def test_a_level_that_there_is_none_of_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        run(["generate", "Hello!", "--log-level", "loud"])
    assert left.value.code == 2
    assert "'loud': expected one of debug, info, warning, error" in " ".join(capsys.readouterr().err.split())


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("level", ["warning", "info"])
@pytest.mark.parametrize("stream", [io.StringIO, _Terminal])
def test_a_first_start_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stream: type[io.StringIO], level: str
) -> None:
    """Compiling kernels says one thing, once; on a terminal the line is rewritten and goes away."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed")
    monkeypatch.setenv("EDGELLM_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys, "stderr", stream())
    show_logs(level)
    for name in ("one", "two", "three"):
        kernel = f'extern "C" __global__ void {name}() {{}}'
        compiled_now(ModuleSource(name, (f"{name}.cu",), (), (), ((f"{name}.cu", kernel),)), "sm_90")
    LOGGER.warning("done")
    shown, stage = sys.stderr.getvalue(), "The CUDA kernels are compiled for sm_90 now, once"
    if level == "info":
        assert [line.rpartition(": ")[2] for line in shown.splitlines()] == ["one", "two", "three", "done"]
    elif stream is _Terminal:
        lines = [f"{stage}: 1, one", f"{stage}: 2, two", f"{stage}: 3, three", ""]
        assert shown == "".join(f"\r{line}\x1b[K" for line in lines) + "done\n"
    else:
        assert shown == f"{stage}\ndone\n"
