"""`edgellm cache` as it is typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from edgellm.commands.cache import cache, size_in_bytes
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.snapshots.file import read_snapshot
from edgellm.snapshots.system_prompt import PromptRecord, system_prompt_ids
from edgellm.text.tokenizer import Tokenizer


def run(*arguments: object, input: str | None = None) -> Result:
    return CliRunner().invoke(cache, list(map(str, arguments)), input=input)


def done(*arguments: object, input: str | None = None) -> str:
    result = run(*arguments, input=input)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


def error_of(result: Result) -> str:
    """What an error says."""
    return result.stderr.partition("error: ")[2].rstrip()


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
    assert read_snapshot(path).prompt == PromptRecord("You are a robot.")

    listed = done("list", "--folder", folder)
    assert f"{folder}: 1 snapshot, " in listed and "robot" in listed and "numpy float32" in listed
    (entry,) = json.loads(done("list", "--folder", folder, "--json"))
    assert (entry["label"], entry["tokens"], entry["bytes"]) == ("robot", len(ids), path.stat().st_size)
    assert entry["binding"]["draft"] == "none"
    assert entry["prompt"] == {"content": "You are a robot.", "tools": None, "template_variables": None}

    for name in ("robot", path.stem[:6], path):
        shown = done("show", name, "--folder", folder)
        assert "\n  prompt          You are a robot.\n" in shown
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
    done("build", "--replace", *options, input="First line.\nSecond line.\n")  # the same: one file
    (path,) = folder.iterdir()
    assert read_snapshot(path).prompt == PromptRecord("First line.\nSecond line.")
    done("build", "--prompt", "Third.", "--output", tmp_path / "third.safetensors", *options)
    assert len(list(folder.iterdir())) == 1
    assert read_snapshot(tmp_path / "third.safetensors").facts.label == "Third."
    assert "First line. Second line." in done("list", "--folder", folder)


def test_several_prompts_from_one_file(tiny_engines: Path, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "kitchen.txt").write_text("You cook.")
    (tmp_path / "prompts.yaml").write_text(
        "- name: patrol\n  prompt: You patrol.\n- name: kitchen\n  file: kitchen.txt\n  output: kitchen.safetensors\n"
    )
    options = ("-m", tiny_engines, "--backend", "numpy", "--folder", folder)
    result = run("build", "--prompts", tmp_path / "prompts.yaml", *options)
    assert result.exit_code == 0, result.stderr
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
    assert result.exit_code == 1
    assert error_of(result).startswith("novel: the prompt has ")
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
    assert result.exit_code == 1 and words in error_of(result)
    assert "prompts.yaml" in error_of(result)


def test_options_that_exclude_each_other_and_empty_prompts(tmp_path: Path) -> None:
    (tmp_path / "prompts.yaml").write_text("- {name: x, prompt: y}")
    for arguments in (
        ("--prompt", "x", "--file", "y"),
        ("--prompts", tmp_path / "prompts.yaml", "--name", "x"),
        ("--prompts", tmp_path / "prompts.yaml", "--output", "x"),
    ):
        assert run("build", *arguments).exit_code == 2
    result = run("build", "--prompt", "  ")
    assert "empty" in error_of(result)
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
    assert "is damaged" in error_of(result)
    ambiguous = run("remove", "x y z", "--folder", folder)
    assert "write more of one of them" in error_of(ambiguous)
    assert "there is no snapshot" in error_of(run("remove", "nothing", "--folder", folder))
    done("remove", "bad", "flipped", "--folder", folder)
    assert list(folder.iterdir()) == [path]
    done("remove", "--all", "--folder", folder)
    assert list(folder.iterdir()) == []


def test_a_snapshot_with_a_draft_is_made_for_it(tiny_draft_engines: Path, tiny_engines: Path, folder: Path) -> None:
    options = ("-m", tiny_draft_engines, "--backend", "numpy", "--folder", folder)
    done("build", "--prompt", "You are a robot.", *options)
    done("build", "--prompt", "You are a robot.", "--name", "plain", "--no-draft", *options)
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
    assert "disk budget" in error_of(run("build", "--prompt", "c" * 40, *options[:-1], "10KB"))


@pytest.fixture
def options(tiny_engines: Path, folder: Path) -> tuple[object, ...]:
    return "-m", tiny_engines, "--backend", "numpy", "--folder", folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_name_in_use_is_refused_and_replaced_if_asked(options: tuple[object, ...], folder: Path) -> None:
    done("build", "--prompt", "You patrol.", "--name", "patrol", *options)
    before = contents(folder)
    for prompt in ("You patrol.", "You patrol the hall."):
        result = run("build", "--prompt", prompt, "--name", "patrol", *options)
        assert result.exit_code == 1
        assert error_of(result).startswith(f"the name 'patrol' is in use: {folder}")
        assert error_of(result).endswith("replace what is there with --replace")
        assert contents(folder) == before
    (old,) = folder.iterdir()
    output = done("build", "--prompt", "You patrol the hall.", "--name", "patrol", "--replace", *options)
    (new,) = folder.iterdir()
    assert output.startswith(f"{new}: 'patrol'") and output.endswith(f"\n{old}: replaced\n")
    assert read_snapshot(new).prompt == PromptRecord("You patrol the hall.")


def test_the_same_prompt_keeps_the_name_that_it_has(options: tuple[object, ...], folder: Path) -> None:
    done("build", "--prompt", "You patrol.", "--name", "patrol", *options)
    before = contents(folder)
    result = run("build", "--prompt", "You patrol.", "--name", "guard", *options)
    assert "this prompt is kept already, under the name 'patrol'" in error_of(result)
    assert contents(folder) == before
    done("build", "--prompt", "You patrol.", "--name", "guard", "--replace", *options)
    (path,) = folder.iterdir()
    assert read_snapshot(path).facts.label == "guard"


def test_of_a_list_all_names_in_use_are_said_and_nothing_is_computed(
    options: tuple[object, ...], folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "prompts.yaml").write_text("- {name: a, prompt: You cook.}\n- {name: b, prompt: You patrol.}\n")
    done("build", "--prompts", tmp_path / "prompts.yaml", *options)
    (tmp_path / "more.yaml").write_text(
        "- {name: c, prompt: New.}\n- {name: b, prompt: Other.}\n- {name: a, prompt: Third.}\n"
        "- {name: d, prompt: x, output: out.safetensors}\n- {name: e, prompt: y, output: ./out.safetensors}\n"
    )
    before = contents(folder)
    result = run("build", "--prompts", tmp_path / "more.yaml", *options)
    assert all(f"the name '{name}' is in use" in error_of(result) for name in "ab")
    assert "is the output of two prompts" in error_of(result)
    assert contents(folder) == before and not (tmp_path / "out.safetensors").exists()


def test_an_output_that_is_there_is_refused_and_only_a_snapshot_is_replaced(
    options: tuple[object, ...], tmp_path: Path
) -> None:
    kept, notes = tmp_path / "kept.safetensors", tmp_path / "notes.txt"
    notes.write_text("notes")
    done("build", "--prompt", "You patrol.", "--output", kept, *options)
    before = kept.read_bytes()
    for path in (kept, notes):
        result = run("build", "--prompt", "You cook.", "--output", path, *options)
        assert f"the file {path} is there already" in error_of(result)
    result = run("build", "--prompt", "You cook.", "--output", notes, "--replace", *options)
    assert f"{notes} is no snapshot" in error_of(result)
    assert (kept.read_bytes(), notes.read_text()) == (before, "notes")
    done("build", "--prompt", "You cook.", "--output", kept, "--replace", *options)
    assert read_snapshot(kept).prompt == PromptRecord("You cook.")


def test_an_output_in_the_folder_is_one_of_its_names(options: tuple[object, ...], folder: Path) -> None:
    done("build", "--prompt", "You patrol.", "--name", "patrol", *options)
    output = ("--output", folder / "other.safetensors")
    result = run("build", "--prompt", "You cook.", "--name", "patrol", *output, *options)
    assert "the name 'patrol' is in use" in error_of(result)
    done("build", "--prompt", "You cook.", "--name", "patrol", *output, "--replace", *options)
    assert [path.name for path in folder.iterdir()] == ["other.safetensors"]


def test_labels_and_names_of_files_stay_on_their_line(options: tuple[object, ...], folder: Path) -> None:
    built = run("build", "--prompt", "x", "--name", "two\nlines \x1b[31m", *options)
    assert "two\\nlines \\x1b[31m: done" in built.output and "\x1b" not in built.output
    (path,) = folder.iterdir()
    path.rename(folder / "a\nb.safetensors")
    listed = done("list", "--folder", folder)
    assert len(listed.splitlines()) == 2 and "  a\\nb  two\\nlines \\x1b[31m" in listed
    shown = done("show", "two\nlines \x1b[31m", "--folder", folder)
    assert "\x1b" not in shown and "a\\nb.safetensors\n  name            two\\nlines" in shown
    assert done("verify", "--all", "--folder", folder) == f"{folder}/a\\nb.safetensors: whole\n"


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("500MB", 500_000_000), ("5GB", 5_000_000_000), ("4 GiB", 4 << 30), ("2kb", 2000), (" 3MiB ", 3 << 20)],
)
def test_sizes(text: str, size: int) -> None:
    assert size_in_bytes(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1", "5 TB", "GB", "1.5GB", "1e9", "٣MB", "9" * 19])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="expected a size such as"):
        size_in_bytes(text)
