"""What all commands share: help in panels with an example, completion by shells, --model, hints about wrong models."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from command_line import Edgellm

from edgellm.commands.app import PANELS
from edgellm.engines.backends import platform as tensorrt_library

pytestmark = pytest.mark.usefixtures("private_files")

CACHE = ("build", "list", "show", "verify", "remove")
COMMANDS = [name for commands in PANELS.values() for name in commands]
ALL = [(), *((name,) for name in COMMANDS), *(("cache", name) for name in CACHE)]


def help_of(*command: str, **environment: str) -> str:
    finished = subprocess.run(
        [sys.executable, "-m", "edgellm", *command, "--help"],
        capture_output=True,
        check=True,
        env={**os.environ, "COLUMNS": "80", **environment},
    )
    assert finished.stderr == b""
    return finished.stdout.decode()


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (("serve", "-m", "A", "--model=B"), "--model: 'A' and 'B' are given: give one of them"),
        (("info", "A", "-m", "B"), "--model: 'A' and 'B' are given: give one of them"),
        (("cache", "verify", "--all", "-m", "A", "-m", "B"), "--model: 'A' and 'B' are given: give one of them"),
        (("serve", "--allowed-host", "a", "--allowed-host", "b", "--port", "1", "--port", "c"), "'--port': 'c'"),
    ],
)
def test_one_model_is_given_once_and_of_other_options_the_last_counts(
    edgellm: Edgellm, asked: tuple[str, ...], message: str
) -> None:
    code, out, err = edgellm(*asked)
    assert (code, out) == (2, "") and message in err


@pytest.mark.parametrize("command", ALL, ids=" ".join)
def test_every_help_has_panels_that_fit_and_an_example_that_is_right(
    edgellm: Edgellm, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, shown, err = edgellm(*command, "--help")
    assert (code, err) == (0, "")
    assert max(map(len, shown.splitlines())) <= 80
    assert re.search(r"^╭─ \w[\w ]* ─+╮$", shown, re.MULTILINE)
    example = re.search(r"^ +Example: (.+)$", shown, re.MULTILINE)
    assert example is not None
    asked = example[1].rpartition("| ")[2].split()
    assert asked[: 1 + len(command)] == ["edgellm", *command]
    for option in (word for word in asked if word.startswith("-")):
        assert f"{option} " in shown.replace(example[0], "")


def test_options_stand_by_their_subjects_with_their_whole_names() -> None:
    shown = help_of("generate", PYTHONIOENCODING="utf-8")
    panels = re.split(r"^╭─ ([\w ]+) ─+╮$", shown, flags=re.MULTILINE)
    options = dict(zip(panels[1::2], panels[2::2], strict=True))
    assert "--repetition-penalty " in options["Sampling"] and "--draft-top-k" in options["Drafting"]
    assert "--system-file" in options["Prompt"] and "-m, --model" in options["Model"]
    assert list(options)[-1] == "Options" and "-h, --help" in options["Options"]


def test_where_frames_cannot_be_shown_there_are_headings() -> None:
    shown = help_of("generate", PYTHONIOENCODING="ascii")
    assert "\nSampling:\n" in shown and "╭" not in shown and "?" not in shown.split("\n")[0]


def test_errors_stay_lines(edgellm: Edgellm) -> None:
    code, _, err = edgellm("generate", "--nope")
    assert code == 2 and "Error: No such option: --nope" in err and "╭" not in err
    code, _, err = edgellm("genrate")
    assert code == 2 and "No such command 'genrate'" in err and "╭" not in err


def test_commands_of_other_programs_name_ours(edgellm: Edgellm) -> None:
    for name in ("run", "pull", "ps", "rm", "show"):
        code, _, err = edgellm(name, "llama3")
        named = re.search(rf"No such command '{name}'.*?edgellm (\w+)", " ".join(err.split()))
        assert code == 2 and named is not None and named[1] in COMMANDS, err


#: What shows how each line goes on, behind "begin", in a shell that has read what `--show-completion` says in it.
_COMPLETING = {
    "bash": 'script=$(edgellm --show-completion); eval "$script"; for line in {lines}; do COMP_WORDS=($line); '
    '[[ "$line" != *" " ]] || COMP_WORDS+=(""); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); '
    'echo begin; _edgellm_completion edgellm; printf "%s\\n" "${{COMPREPLY[@]}}"; done',
    "fish": "edgellm --show-completion | source; for line in {lines}; echo begin; complete -C $line; end",
}
#: zsh completes in its editor alone.
_ZSH = (
    b'setopt no_list_ambiguous; autoload -Uz compinit; compinit -u; eval "$(edgellm --show-completion)"; echo be""gin\n'
)
#: Ctrl-U, which empties the line in zsh's editor, and a command that says so.
_NEXT_LINE = b'\x15echo be""gin\n'


def typed_in_zsh(lines: Mapping[str, set[str]]) -> list[str]:
    """What a terminal shows where each line is typed in zsh, and the tabulator pressed, until all that is expected
    is there, or half a minute later."""
    process, terminal = pty.fork()
    if process == 0:
        os.execvp("zsh", ["zsh", "-f", "-i"])
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 200, 0, 0))
    found: list[str] = []

    def shown_until(is_there: Callable[[str], bool]) -> str:
        shown, until = "", time.monotonic() + 30
        while time.monotonic() < until and not is_there(shown):
            if select.select([terminal], [], [], 0.2)[0]:
                shown += os.read(terminal, 1 << 16).decode(errors="replace")
        return shown

    try:
        for before, (line, expected) in zip([_ZSH, *[_NEXT_LINE] * len(lines)], lines.items(), strict=False):
            os.write(terminal, before)
            shown_until(lambda shown: "begin" in shown)
            os.write(terminal, line.encode() + b"\t")
            found.append(shown_until(lambda shown, expected=expected: expected <= words_of(shown)))
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(terminal)
    return found


def words_of(text: str) -> set[str]:
    """The words of what a shell shows, without what moves the cursor."""
    return set(re.findall(r"(?<![\w-])-*[a-z][\w-]*", re.sub(r"\x1b\[[0-9;]*[A-Za-z]", " ", text)))


@pytest.mark.parametrize("shell", [*_COMPLETING, "zsh"])
def test_shells_complete_commands_options_and_their_values(
    shell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} on this machine")
    (tmp_path / "edgellm").write_text(f'#!/bin/sh\nexec {sys.executable} -m edgellm "$@"\n')
    (tmp_path / "edgellm").chmod(0o755)
    for name, value in {"HOME": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    lines = {"edgellm cache verify --mo": {"--model"}}
    if shell == "bash":  # each asks the same command, which takes a second
        lines |= {"edgellm cache ": set(CACHE), "edgellm serve --backend t": {"tensorrt"}}
    if shell == "zsh":
        shown = typed_in_zsh(lines)
    else:
        told = [shell, "-c", _COMPLETING[shell].format(lines=" ".join(f"'{line}'" for line in lines))]
        said = subprocess.run(told, capture_output=True, text=True, check=True, timeout=180).stdout
        shown = said.split("begin\n")[1:]
    found = dict(zip(lines, map(words_of, shown), strict=True))
    for line, expected in lines.items():
        assert expected <= found[line], line
    assert "numpy" not in found.get("edgellm serve --backend t", ())


def test_completion_is_installed_for_the_shell_that_asks(tmp_path: Path) -> None:
    command = f"{sys.executable} -m edgellm --install-completion; true"
    finished = subprocess.run(
        ["bash", "--norc", "-c", command],
        capture_output=True,
        text=True,
        env=os.environ | {"HOME": str(tmp_path)},
        check=True,
    )
    assert "bash completion installed" in finished.stdout, finished.stderr
    assert "_EDGELLM_COMPLETE=complete_bash" in (tmp_path / ".bash_completions" / "edgellm.sh").read_text()
    shown = subprocess.run(
        ["bash", "--norc", "-c", command.replace("install", "show")], capture_output=True, text=True, check=True
    )
    assert "complete -o default -F _edgellm_completion edgellm" in shown.stdout


@pytest.mark.parametrize(
    "command",
    [("chat", "--max-tokens", 2), ("info",), ("bench", "--configurations", "plain", "--repeat", 1, "--max-tokens", 2)],
    ids=lambda command: command[0],
)
def test_a_model_is_an_argument_or_an_option(edgellm: Edgellm, tiny_engines: Path, command: tuple[object, ...]) -> None:
    name, *options = command
    for model in ((tiny_engines,), ("--model", tiny_engines), ("-m", tiny_engines)):
        code, out, err = edgellm(name, *model, *options, stdin="hi\n")
        assert (code, err) == (0, "") and out
    code, out, err = edgellm(name, tiny_engines, "-m", tiny_engines, *options)
    assert (code, out) == (2, "") and "give one of them" in err


def test_build_takes_the_directory_to_make_as_an_option(
    edgellm: Edgellm, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    options = ("--kv-capacity", 96, "--prefill-chunk", 16)
    code, _, err = edgellm("build", tiny_checkpoint, "-m", tmp_path / "made", *options)
    assert code == 0, err
    assert (tmp_path / "made" / "edgellm.json").exists()
    code, _, err = edgellm("build", tiny_checkpoint, tmp_path / "a", "-m", tmp_path / "b", *options)
    assert code == 2 and "give one of them" in err
    code, _, err = edgellm("build", "--refresh-plans", tmp_path / "made", "-m", tmp_path / "made")
    assert code == 2 and "--refresh-plans" in err


def test_dtypes_are_the_same_in_help_and_error(edgellm: Edgellm, tiny_checkpoint: Path, tmp_path: Path) -> None:
    code, _, err = edgellm("build", tiny_checkpoint, tmp_path / "made", "--dtype", "int8", "--kv-capacity", 96)
    assert code == 1
    expected = set(re.search(r"expected one of (.*)", err)[1].split(", "))
    shown = re.sub(r"[│\s]+", " ", edgellm("build", "--help")[1])
    said = re.search(r"--dtype \S+ (.*?): what engines compute in", shown)[1]
    assert set(re.split(", | or ", said)) == expected
    for dtype in sorted(expected):
        options = ("--dtype", dtype, "--kv-capacity", 96, "--no-try")
        code, _, err = edgellm("build", tiny_checkpoint, tmp_path / dtype, *options)
        assert code == 0, err


def test_a_target_without_tensorrt_names_no_option_that_build_lacks(
    edgellm: Edgellm, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorrt_library, "_search", lambda: (None, "neither package is installed"))
    code, _, err = edgellm("build", tiny_checkpoint, tmp_path / "made", "--target", "sm_75", "--kv-capacity", 96)
    assert code == 1 and "neither package is installed" in err and "makes plans on first use" in err
    shown = edgellm("build", "--help")[1]
    assert all(
        f"{option} " in shown
        for option in re.findall(r"--[a-z]+(?:-[a-z]+)*", err.replace("--system-site-packages", ""))
    )


def test_what_is_no_engine_directory_is_named(
    edgellm: Edgellm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"GGUF\x03\0\0\0")
    (tmp_path / "quantized").mkdir()
    (tmp_path / "quantized" / "q4.gguf").write_bytes(b"GGUF\x03\0\0\0")
    for command in (("build", "model.gguf", "out"), ("chat", "model.gguf")):
        code, _, err = edgellm(*command)
        assert code == 1 and "model.gguf is not a valid GGUF file: it is truncated" in err
    for command in (("build", "quantized", "out"), ("chat", "quantized")):
        code, _, err = edgellm(*command)
        assert code == 1 and "quantized is a directory of GGUF files (q4.gguf). Name one of them" in err
    code, _, err = edgellm("quantize", "Qwen/Qwen3-0.6B", "out")
    assert code == 1 and "Qwen/Qwen3-0.6B does not exist here" in err and "edgellm build Qwen/Qwen3-0.6B" in err
    code, _, err = edgellm("info", "Qwen/Qwen3-0.6B")
    assert code == 1 and "there is no directory of Qwen/Qwen3-0.6B yet: edgellm chat Qwen/Qwen3-0.6B makes one" in err
    (tmp_path / "models").mkdir()
    for path in ("models/robot", "/Qwen/Qwen3-0.6B", "a/b/c", "robot"):
        code, _, err = edgellm("chat", path)
        assert code == 1 and "does not exist" in err and "Hub" not in err
