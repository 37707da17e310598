"""Fixtures that run command lines in this process; `conftest.py` makes them known to all tests."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import typer.testing

from edgellm.commands import app
from edgellm.commands.app import run
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.model.limits import EngineLimits

#: Tokens that a conversation with `chat_engines` may have.
CONTEXT = 600
#: A command line's exit code, standard output and standard error.
Edgellm = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="session", autouse=True)
def commands_once() -> Iterator[None]:
    """What a command's options are is told to its parser once: that was more than half of the time of a command line on
    a tiny model."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name in ((app, "create_app"), (app, "load_command"), (typer.main, "get_command")):
            patch.setattr(module, name, cache(getattr(module, name)))
        patch.setattr(typer.testing, "_get_command", typer.main.get_command)
        yield


@pytest.fixture
def private_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the user's own settings and histories out of a test."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in ("EDGELLM_CONFIG", "EDGELLM_DEBUG", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(name="edgellm")
def run_edgellm(private_files: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Edgellm:
    """Runs a command line in this process; returns exit code, standard output and standard error."""

    def call(*arguments: object, stdin: str | bytes = b"") -> tuple[int, str, str]:
        data = stdin.encode() if isinstance(stdin, str) else stdin
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
        with pytest.raises(SystemExit) as left:
            run([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        return left.value.code or 0, out, err

    return call


@pytest.fixture(scope="session")
def chat_engines(make_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with room for a conversation."""
    folder = tmp_path_factory.mktemp("chat")
    checkpoint = make_checkpoint(folder / "checkpoint", max_position_embeddings=2048)
    build_engine_directory(checkpoint, folder / "robot", EngineLimits(1, 128, CONTEXT), [])
    return folder / "robot"
