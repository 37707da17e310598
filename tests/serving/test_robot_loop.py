"""The examples of a robot's loop and of answers that are spoken, on the shipped model."""

from __future__ import annotations

import importlib.util
import runpy
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from edgellm.llm import LLM


@pytest.fixture(scope="module")
def example(repository: Path) -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("robot_loop", repository / "tools" / "examples" / "robot_loop.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_the_robot_talks_acts_and_stops_while_the_camera_goes_on(example: ModuleType) -> None:
    said: list[str] = []
    acted: list[tuple[str, dict[str, Any]]] = []
    with LLM(backend="numpy") as llm:
        system_prompt = llm.default_system_prompt
        llm.cache_system_prompt(system_prompt)
        robot = example.Robot(llm, system_prompt, said.append, lambda *call: acted.append(call))
        spent = example.run(robot, example.kitchen_table(robot))
    table, called, done, battery = robot.answers
    assert all(thing in table for thing in ("red cup", "white bowl", "green apple"))
    assert "76 percent" in battery
    assert acted == [("pick", {"object": "red cup"}), ("stop", {})]
    assert (called, done) == ("", "I have picked up the red cup.") and "".join(said).startswith(table + done)
    assert len(spent) > 8  # pictures were taken while answers were computed
    assert statistics.median(spent) < 1 / example.CAMERA_RATE


def test_sentences_are_spoken_as_they_end(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path = str(repository / "tools" / "examples" / "spoken_answer.py")
    taken: list[str] = []
    pieces = (taken.append(each) or each for each in ("It is r", "ed. It", " is 3.5 m away!\n", "Right", "? "))
    spoken = runpy.run_path(path)["sentences"](pieces)
    assert (next(spoken), len(taken)) == ("It is red.", 2)
    assert list(spoken) == ["It is 3.5 m away!", "Right?"]
    voice = ["spoken_answer.py", "--voice", "sed 's/^/spoken: /'"]
    monkeypatch.setattr(sys, "argv", [*voice, "Where is the red cup?"])
    runpy.run_path(path, run_name="__main__")
    assert capfd.readouterr().out.splitlines()[-1] == "spoken: The red cup is at the front left."
    monkeypatch.setattr(sys, "argv", [*voice[:2], str(tmp_path / "none"), "Hello"])
    with pytest.raises(SystemExit):
        runpy.run_path(path, run_name="__main__")
    assert "none is not installed" in capfd.readouterr().err
