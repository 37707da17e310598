"""`edgellm cache` as it is typed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from edgellm.commands.cache import cache
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.errors import EdgeLLMError
from edgellm.snapshots.file import read_snapshot
from edgellm.snapshots.system_prompt import system_prompt_ids
from edgellm.text.tokenizer import Tokenizer


def run(*arguments: object, input: str | None = None) -> Result:
    return CliRunner().invoke(cache, list(map(str, arguments)), input=input)


def done(*arguments: object, input: str | None = None) -> str:
    result = run(*arguments, input=input)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "snapshots"


def test_build_list_show_verify_remove(tiny_engines: Path, folder: Path) -> None:
    output = done(
        "build", "--prompt", "You are a robot.", "--name", "robot", "-m", tiny_engines, "--folder", folder, "--backend",
        "numpy",
    )  # fmt: skip
    (path,) = folder.iterdir()
    ids = system_prompt_ids(Tokenizer.from_directory(tiny_engines), "You are a robot.")
    assert output.startswith(f"{path}: 'robot', {len(ids)} tokens, ") and "read back and verified" in output
    assert read_snapshot(path).token_ids.tolist() == ids

    listed = done("list", "--folder", folder)
    assert f"{folder}: 1 snapshot, " in listed and "robot" in listed and "numpy float32" in listed
    (entry,) = json.loads(done("list", "--folder", folder, "--json"))
    assert (entry["label"], entry["tokens"], entry["bytes"]) == ("robot", len(ids), path.stat().st_size)
    assert entry["binding"]["draft"] == "none"

    for name in ("robot", path.stem[:6], path):
        shown = done("show", name, "--folder", folder)
        assert f"{len(ids)}: {', '.join(map(str, ids[:12]))}, ..." in shown and entry["binding"]["weights"] in shown
    assert json.loads(done("show", "robot", "--folder", folder, "--json")) == [entry]

    assert done("verify", "--all", "--folder", folder) == f"{path}: whole\n"
    assert f"whole, and made for {tiny_engines}" in done("verify", "robot", "-m", tiny_engines, "--folder", folder)
    assert done("remove", "robot", "--folder", folder) == f"{path}: removed\n"
    assert list(folder.iterdir()) == []
    assert "0 snapshots" in done("list", "--folder", folder)


def test_prompts_from_a_file_standard_input_and_into_a_file(tiny_engines: Path, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("First line.\nSecond line.\n")
    options = ("-m", tiny_engines, "--backend", "numpy", "--folder", folder)
    done("build", "--file", tmp_path / "prompt.txt", *options)
    done("build", *options, input="First line.\nSecond line.\n")  # the same: one file
    assert len(list(folder.iterdir())) == 1
    done("build", "--prompt", "Third.", "--output", tmp_path / "third.safetensors", *options)
    assert len(list(folder.iterdir())) == 1
    assert read_snapshot(tmp_path / "third.safetensors").facts.label == "Third."
    assert "First line. Second line." in done("list", "--folder", folder)


def test_several_prompts_from_one_file(tiny_engines: Path, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "kitchen.txt").write_text("You cook.")
    (tmp_path / "prompts.yaml").write_text(
        "- name: patrol\n  prompt: You patrol.\n- name: kitchen\n  file: kitchen.txt\n  output: kitchen.safetensors\n"
    )
    command = [sys.executable, "-c", "from edgellm.commands.cache import cache; cache()", "build", "--prompts"]
    options = ["-m", str(tiny_engines), "--backend", "numpy", "--folder", str(folder)]
    result = subprocess.run(
        [*command, str(tmp_path / "prompts.yaml"), *options], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "patrol: done" in result.stderr and "kitchen: done" in result.stderr
    assert result.stdout.count("read back and verified") == 2
    assert read_snapshot(tmp_path / "kitchen.safetensors").facts.label == "kitchen"
    assert [json.loads(done("list", "--folder", folder, "--json"))[0]["label"]] == ["patrol"]


def test_of_several_prompts_one_that_fails_is_named_and_those_before_are_there(
    tiny_engines: Path, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "prompts.yaml").write_text(f"- {{name: patrol, prompt: a}}\n- {{name: novel, prompt: {'x' * 200}}}\n")
    result = run(
        "build", "--prompts", tmp_path / "prompts.yaml", "-m", tiny_engines, "--backend", "numpy", "--folder", folder
    )
    assert isinstance(result.exception, EdgeLLMError)
    assert str(result.exception).startswith("novel: the prompt has ")
    assert "'patrol'" in result.stdout and "read back and verified" in result.stdout
    assert [entry["label"] for entry in json.loads(done("list", "--folder", folder, "--json"))] == ["patrol"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[]", "expected a list of prompts"),
        ("name: x", "holds a dict"),
        ("- [1]", "prompt 1 is a list"),
        ("- {name: x}", "expected name, and prompt or file"),
        ("- {prompt: x}", "expected name, and prompt or file"),
        ("- {name: x, prompt: y, file: z}", "expected name, and prompt or file"),
        ("- {name: x, promt: y}", "unknown key 'promt': did you mean prompt"),
        ("- {name: x, prompt: 3}", "prompt is 3: expected text"),
        ("- {name: x, prompt: y}\n- {name: x, prompt: z}", "name 'x' more than once"),
        ("- {name: x, file: nothing.txt}", "nothing.txt cannot be read"),
        ("- {name: x", "not valid YAML"),
    ],
)
def test_a_wrong_list_of_prompts_is_named(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "prompts.yaml").write_text(content)
    result = run("build", "--prompts", tmp_path / "prompts.yaml")
    assert isinstance(result.exception, EdgeLLMError) and words in str(result.exception)
    assert "prompts.yaml" in str(result.exception)


def test_options_that_exclude_each_other_and_empty_prompts(tmp_path: Path) -> None:
    (tmp_path / "prompts.yaml").write_text("- {name: x, prompt: y}")
    for arguments in (
        ("--prompt", "x", "--file", "y"),
        ("--prompts", tmp_path / "prompts.yaml", "--name", "x"),
        ("--prompts", tmp_path / "prompts.yaml", "--output", "x"),
    ):
        assert run("build", *arguments).exit_code == 2
    result = run("build", "--prompt", "  ")
    assert "empty" in str(result.exception)
    assert run("verify").exit_code == run("remove").exit_code == 2
    assert run("remove", "x", "--all").exit_code == 2


def test_files_that_cannot_be_used_are_listed_and_can_be_removed(tiny_engines: Path, folder: Path) -> None:
    done("build", "--prompt", "x y z", "-m", tiny_engines, "--backend", "numpy", "--folder", folder)
    (path,) = folder.iterdir()
    (folder / "bad.safetensors").write_bytes(path.read_bytes()[:500])
    flipped = bytearray(path.read_bytes())
    flipped[-50] ^= 1
    (folder / "flipped.safetensors").write_bytes(flipped)
    listed = done("list", "--folder", folder)
    assert "2 snapshots" in listed and "1 that cannot be used" in listed and "cannot be used: damaged" in listed
    result = run("verify", "--all", "--folder", folder)
    assert result.exit_code == 1
    assert f"{path}: whole" in result.stdout and result.stdout.count(": damaged: ") == 2
    result = run("show", "bad", "--folder", folder)
    assert "is damaged" in str(result.exception)
    ambiguous = run("remove", "x y z", "--folder", folder)
    assert "write more of one of them" in str(ambiguous.exception)
    assert "there is no snapshot" in str(run("remove", "nothing", "--folder", folder).exception)
    done("remove", "bad", "flipped", "--folder", folder)
    assert list(folder.iterdir()) == [path]
    done("remove", "--all", "--folder", folder)
    assert list(folder.iterdir()) == []


def test_a_snapshot_with_a_draft_is_made_for_it(tiny_draft_engines: Path, tiny_engines: Path, folder: Path) -> None:
    options = ("-m", tiny_draft_engines, "--backend", "numpy", "--folder", folder)
    done("build", "--prompt", "You are a robot.", *options)
    done("build", "--prompt", "You are a robot.", "--no-draft", *options)
    entries = json.loads(done("list", "--folder", folder, "--json"))
    assert sorted(entry["binding"]["draft"] == "none" for entry in entries) == [False, True]
    drafted = next(entry["path"] for entry in entries if entry["binding"]["draft"] != "none")
    result = run("verify", drafted, "-m", tiny_engines)
    assert result.exit_code == 1 and "other draft" in result.stdout
    assert EngineDirectory.read(tiny_draft_engines).draft is not None


def test_a_budget_makes_room(tiny_engines: Path, folder: Path) -> None:
    options = ("-m", tiny_engines, "--backend", "numpy", "--folder", folder, "--disk-budget", "60KB")
    done("build", "--prompt", "a" * 40, *options)
    (first,) = folder.iterdir()
    output = done("build", "--prompt", "b" * 40, *options)
    assert f"{first}: removed to keep within the disk budget" in output and not first.exists()
    assert "disk budget" in str(run("build", "--prompt", "c" * 40, *options[:-1], "10KB").exception)
