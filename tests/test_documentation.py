"""What README and the pages say is tried: Python examples run, commands parse, links lead somewhere, messages are the
code's own."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from embedding_models import EmbeddingModel
from http_server import running
from PIL import Image
from synthetic_sound import sound, wav

import edgellm
from edgellm.commands.app import create_app
from edgellm.commands.chat_commands import COMMANDS
from edgellm.commands.descriptions import executor_facts, executors_in_words
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.families import FAMILIES
from tools.docs.memory_table import TAKEN_BY_THE_SYSTEM, table

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "docs" / "pages"
TEXTS = [ROOT / "README.md", *sorted(PAGES.rglob("*.md"))]
#: Pages that tell of files as they were at some commit.
OF_THE_PAST = {PAGES / "tried.md"}
PRODUCT = ("edgellm", "engines", "kernels", "multimodal")
#: Where examples expect a server; they get one on a free port, with the options that the text starts it with.
SERVER = "127.0.0.1:8000"
#: Options of `edgellm` whose value is a file that is read.
READ_BY = {"--file", "--tools", "--image", "--prompts", "--text", "--exact-match", "--rouge", "--json-schema"}
READ_BY |= {"--api-key-file", "--system-file", "--chat-template"}
_FENCE = re.compile(r"^ *```(\w*)[^\n]*\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_FIGURE = re.compile(r"-?\d+\.\d+(e-?\d+)?")
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)|<img[^>]* src=\"([^\"]+)\"")
_PATH = re.compile(r"`((?:\.ci|configs|docs|edgellm|engines|kernels|multimodal|tests|tools)/[\w./-]+)`")


def name_of(text: Path) -> str:
    """A text as the tests call it."""
    return str(text.relative_to(ROOT))


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its content, and where the next one begins if nothing but space is between."""

    language: str
    content: str
    line: int
    shown_output: str | None


def blocks(text: Path) -> list[Block]:
    """The fenced blocks of a text; a `text` block right behind a `python` block is what that one prints."""
    content = text.read_text(encoding="utf-8")
    found = list(_FENCE.finditer(content))
    made = []
    for index, match in enumerate(found):
        following = found[index + 1] if index + 1 < len(found) else None
        output = None
        if following is not None and following[1] == "text" and not content[match.end() : following.start()].strip():
            output = following[2]
        made.append(Block(match[1], match[2], content.count("\n", 0, match.start()) + 1, output))
    return made


class Camera:
    """Stands for the camera of an example: frames [height, width, 3] uint8 in OpenCV's order."""

    def read(self) -> np.ndarray:
        with Image.open(edgellm_shipped() / "scenes" / "toys.png") as scene:
            return np.asarray(scene.convert("RGB"))[:, :, ::-1]


def edgellm_shipped() -> Path:
    """The engine directory that ships with the package."""
    return ROOT / "edgellm" / "shipped"


@pytest.fixture
def workplace(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    embedding_model: Callable[[str], EmbeddingModel],
    speech_engines: Path,
    video_engines: Callable[[str], Path],
) -> Path:
    """A folder with the files that the examples name, where they run."""
    (tmp_path / "my-engine-directory").symlink_to(edgellm_shipped())
    (tmp_path / "qwen3-embedding").symlink_to(embedding_model("published").engines)
    (tmp_path / "qwen3-asr").symlink_to(speech_engines)
    (tmp_path / "qwen3-vl").symlink_to(video_engines("qwen3_vl"))
    (tmp_path / "said.wav").write_bytes(wav(sound(2.0)))
    (tmp_path / "system_prompt.txt").write_text("You are Pip, a small tabletop robot.\n", encoding="utf-8")
    (tmp_path / "toys.png").symlink_to(edgellm_shipped() / "scenes" / "toys.png")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("text", [text for text in TEXTS if "```python" in text.read_text("utf-8")], ids=name_of)
def test_python_examples_run(text: Path, workplace: Path) -> None:
    """The examples of one text run one after another, as a reader would type them; what they print is what is shown."""
    names: dict[str, Any] = {"__name__": "__main__", "camera": Camera(), "microphone": [sound(1.0)] * 2}
    with contextlib.ExitStack() as opened:
        opened.callback(close_models, names)
        address = SERVER
        for block in blocks(text):
            if block.language != "python":
                continue
            if SERVER in block.content and address == SERVER:
                serves = [words for _, words in command_lines(text) if words[:2] == ["edgellm", "serve"]]
                started = serves[0] if serves else ["edgellm", "serve"]
                server = opened.enter_context(running(*started[2:]))
                address = f"{server.host}:{server.port}"
            printed, program = io.StringIO(), block.content.replace(SERVER, address)
            with contextlib.redirect_stdout(printed):
                # Tracebacks name the line in the text; what this file imports from __future__ a reader does not.
                exec(compile("\n" * block.line + program, str(text), "exec", dont_inherit=True), names)
            if block.shown_output is not None:
                assert without_figures(printed.getvalue()) == without_figures(block.shown_output)


def close_models(names: dict[str, Any]) -> None:
    for value in list(names.values()):
        if isinstance(value, edgellm.LLM):
            value.close()


def without_figures(text: str) -> list[str]:
    """The lines of a text without numbers that depend on time and machine: those with a decimal point."""
    return [_FIGURE.sub("#", line).rstrip() for line in text.strip().splitlines()]


def command_lines(text: Path) -> Iterator[tuple[int, list[str]]]:
    """The commands in `sh` blocks and behind `$` in `text` blocks: line and words, one for each part of a pipe."""
    for block in blocks(text):
        joined = block.content.replace("\\\n", " ")
        for offset, line in enumerate(joined.splitlines()):
            if block.language == "text" and not line.startswith("$ "):
                continue
            if block.language not in ("sh", "text"):
                continue
            lexer = shlex.shlex(line.removeprefix("$ "), posix=True, punctuation_chars=True)
            lexer.whitespace_split, lexer.commenters = True, "#"
            words: list[str] = []
            for word in [*lexer, "|"]:
                if word in ("|", "&&", ";", "||"):
                    if words:
                        yield block.line + 1 + offset, words
                    words = []
                else:
                    words.append(word)


@cache
def application() -> Any:
    return typer.main.get_command(create_app())


def parse(words: list[str]) -> None:
    """Parse `edgellm WORDS` as the program does; raises a usage error for what it does not know."""
    for redirection in ("<", ">", "2>"):
        if redirection in words:
            words = words[: words.index(redirection)]
    command, path = application(), ["edgellm"]
    while hasattr(command, "resolve_command") and words and not words[0].startswith("-"):
        context = command.context_class(command, info_name=path[-1])
        name, command, words = command.resolve_command(context, words)
        path.append(name)
    if {"--help", "-h", "--version"} & set(words) or hasattr(command, "resolve_command"):
        return
    command.make_context(" ".join(path), list(words))


@pytest.mark.parametrize("text", TEXTS, ids=name_of)
def test_commands_exist(text: Path) -> None:
    for line, words in command_lines(text):
        try:
            if words[0] == "edgellm":
                parse(words[1:])
            elif words[0].startswith("python") and len(words) > 1:
                check_script(words[1:])
        except Exception as error:
            pytest.fail(f"{name_of(text)}, line {line}: {shlex.join(words)}: {type(error).__name__}: {error}")


@pytest.mark.parametrize("text", TEXTS, ids=name_of)
def test_files_that_commands_read_are_there(text: Path) -> None:
    """A file that a command reads ships, or a command before it makes or shows it."""
    made: set[str] = set()
    missing = []
    for line, words in command_lines(text):
        made |= {words[index + 1] for index, word in enumerate(words[:-1]) if word == ">"}
        made |= set(words[1:]) if words[0] == "cat" else set()
        read = [words[index + 1] for index, word in enumerate(words[:-1]) if word in READ_BY and words[0] == "edgellm"]
        missing += [f"line {line}: {file}" for file in read if file not in made and not (ROOT / file).exists()]
    assert not missing


def check_script(words: list[str]) -> None:
    """A tool of the checkout that is started is there and knows the options."""
    if words[:1] == ["-m"]:
        script = ROOT / (words[1].replace(".", "/") + ".py") if words[1].startswith("tools.") else None
        options = words[2:]
    else:
        script, options = (ROOT / words[0] if words[0].startswith("tools/") else None), words[1:]
    if script is None:
        return
    source = script.read_text(encoding="utf-8")
    for option in options:
        if option.startswith("--"):
            assert f'"{option.partition("=")[0]}"' in source, f"no option {option}"


def anchors(text: Path) -> set[str]:
    """The anchors of a page's headings, as MkDocs makes them."""
    content = _FENCE.sub("", text.read_text(encoding="utf-8"))
    headings = re.findall(r"^#{1,6} +(.+?)\s*#*$", content, re.MULTILINE)
    slugs = {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip()) for heading in headings}
    named = re.findall(r"^::: ([\w.]+)$", content, re.MULTILINE)
    return slugs | set(named)


@pytest.mark.parametrize("text", TEXTS, ids=name_of)
def test_links_lead_somewhere(text: Path) -> None:
    content = _FENCE.sub("", text.read_text(encoding="utf-8"))
    wrong = []
    for match in _LINK.finditer(content):
        link = match[1] or match[2] or match[3]
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (text.parent / path).resolve() if path else text
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            wrong.append(link)
    assert not wrong


@pytest.mark.parametrize("text", [text for text in TEXTS if text not in OF_THE_PAST], ids=name_of)
def test_files_that_are_named_are_there(text: Path) -> None:
    content = _FENCE.sub("", text.read_text(encoding="utf-8"))
    assert [path for path in _PATH.findall(content) if not (ROOT / path).exists()] == []


def test_decode_loops_are_those_of_their_result_file() -> None:
    loops = json.loads((ROOT / "tools/bench/results/2026-11-23-h200-loops.json").read_text(encoding="utf-8"))["loops"]
    told = (PAGES / "benchmarks.md").read_text(encoding="utf-8")
    for found in loops.values():
        assert f"| {found['loop_ms']:.3f} | {found['read_share']:.1%}".replace("%", " %") in told
    assert f"takes {loops['llama-1b']['loop_ms']:.2f} ms" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_readme_lists_every_guide() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [guide.name for guide in (PAGES / "guides").iterdir() if f"guides/{guide.name})" not in readme] == []


def test_readme_is_short() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 160
    beginning = "\n".join(lines[:25])
    assert 'pip install . && edgellm generate "Where is the red cup?"' in beginning
    assert "pip install -e '.[test]' && python -m pytest -n auto" in beginning


def test_every_public_name_has_its_reference() -> None:
    shown = re.findall(r"^::: edgellm\.(\w+)$", (PAGES / "api.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(shown) == sorted(edgellm.__all__)


def test_every_command_has_its_line() -> None:
    page = (PAGES / "quickstart.md").read_text(encoding="utf-8")
    assert [name for name in application().commands if f"`edgellm {name}" not in page] == []


@pytest.mark.parametrize("names", [("Qwen3-0.6B", "Qwen2.5-VL-3B"), pytest.param(None, marks=pytest.mark.slow)])
def test_the_table_of_memory_is_that_of_the_memory_plan(names: tuple[str, ...] | None) -> None:
    page = (PAGES / "supported.md").read_text(encoding="utf-8")
    told = table(names=names)
    assert len(told) > 5 and ("\n".join(told) in page if names is None else {*told} <= {*page.splitlines()})
    assert f"{TAKEN_BY_THE_SYSTEM} GiB" in page


def test_every_family_is_on_the_page_of_models() -> None:
    page = (PAGES / "supported.md").read_text(encoding="utf-8")
    assert [family.name for family in FAMILIES.values() if f"`{family.architecture}`" not in page] == []


def test_what_runs_the_shipped_model_is_what_is_told() -> None:
    """`...` leaves out the middle of a line."""
    directory = EngineDirectory.read(edgellm_shipped())
    told = executors_in_words(executor_facts(directory.models, directory.limits, directory.dtype, "sm_90"))
    (shown,) = (block for block in blocks(PAGES / "architecture.md") if block.content.startswith("kernels: "))
    lines = shown.content.splitlines()
    assert len(lines) == len(told)
    for line, full in zip(lines, told, strict=True):
        start, _, end = line.partition(" ... ")
        assert full.startswith(start) and full.endswith(end)


@pytest.mark.parametrize(
    ("name", "source"), [("add_a_family", "engines/families/qwen.py"), ("add_a_kernel", "kernels/images/contract.py")]
)
def test_excerpts_are_the_code_s(name: str, source: str) -> None:
    """The lines of an indented block stand in the source in this order; others may stand between them."""
    page = (PAGES / f"{name}.md").read_text(encoding="utf-8").splitlines()
    shown = [line[8:] for line in page if line.startswith(" " * 8)]
    assert shown
    code = iter((ROOT / source).read_text(encoding="utf-8").splitlines())
    for line in shown:
        assert line in code, f"{source} has no line {line!r} here"


@pytest.mark.parametrize("name", ["architecture", "formats", "add_a_family", "add_a_kernel"])
def test_names_of_the_code_are_the_code_s(name: str) -> None:
    """Names in code style, and classes in the diagram, occur in the sources."""
    content = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([A-Za-z_]\w+(?:\.[A-Za-z_]\w+)*)(?:\([^`]*\))?`", _FENCE.sub("", content)))
    named |= {
        word for block in blocks(PAGES / f"{name}.md") for word in re.findall(r"\b[A-Z]\w+[a-z][A-Z]\w+", block.content)
    }
    words = {word for each in named for word in each.split(".")}
    assert len(words) > 10
    assert sorted(words - words_of_the_code()) == []


@cache
def words_of_the_code() -> set[str]:
    """Every word of the sources, and of their files' names."""
    files = [path for folder in (*PRODUCT, "tools", "tests", "configs") for path in (ROOT / folder).rglob("*.*")]
    found = {path.stem for path in ROOT.iterdir()}
    for path in files:
        found |= set(re.findall(r"\w+", path.name))
        if path.suffix in (".py", ".cu", ".cuh", ".yaml") and path != Path(__file__):
            found |= set(re.findall(r"[A-Za-z_]\w*", path.read_text(encoding="utf-8")))
    return found


@cache
def strings_of_the_code() -> set[str]:
    """Every string of the product, in one line, with `…` for each value that is put in."""
    found: set[str] = set()
    for path in sorted(file for folder in PRODUCT for file in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.add("".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return {text.replace("\n", " ") for text in found}


def test_messages_on_the_page_of_errors_are_the_code_s() -> None:
    """A message stands in the first cell of a row; `…` there is whatever was put in."""
    content = (PAGES / "errors.md").read_text(encoding="utf-8")
    messages = re.findall(r"^\| `([^`]+)` \|", content, re.MULTILINE)
    assert len(messages) > 30
    assert [message for message in messages if not is_in_the_code(message.split("…"))] == []


def is_in_the_code(parts: list[str]) -> bool:
    """Whether a string of the product has all of these parts, in this order."""
    longest, expression = max(parts, key=len), re.compile(".*".join(map(re.escape, parts)))
    return any(longest in text and expression.search(text) for text in strings_of_the_code())


def test_every_slash_command_has_its_line() -> None:
    page = (PAGES / "guides" / "chat.md").read_text(encoding="utf-8")
    assert [name for name in COMMANDS if f"`/{name}" not in page] == []


def test_the_units_are_those_that_systemd_takes(tmp_path: Path) -> None:
    """The command is one that `edgellm` knows; systemd itself sees the Python of these tests in its place."""
    units = {path.name: path.read_text("utf-8") for path in (ROOT / "docs/configurations").glob("edgellm.*")}
    (command,) = re.findall(r"^ExecStart=(.+)$", units["edgellm.service"], re.MULTILINE)
    program, *words = shlex.split(command)
    parse(words)
    assert "%d" not in command  # which the systemd of JetPack 6 (249) does not know yet
    verify = shutil.which("systemd-analyze")
    if verify is None:
        pytest.skip("there is no systemd-analyze on this machine")
    for name, unit in units.items():
        (tmp_path / name).write_text(unit.replace(program, sys.executable))
    files = [str(tmp_path / name) for name in units]
    found = subprocess.run([verify, "verify", *files], capture_output=True, text=True, check=False)
    assert found.returncode == 0 and not re.search(r"edgellm\.\w+:", found.stderr), found.stderr


@pytest.mark.slow  # it compiles 45 kernels
def test_what_a_pc_does_for_a_robot(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """The commands of the page, but for those that need a board, one after another, with a small model of that name."""
    checkpoint = shutil.copytree(tiny_checkpoint, tmp_path / "models" / "Llama-3.2-1B-Instruct")
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    (checkpoint / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    page = [block for block in blocks(PAGES / "from_pc_to_robot.md") if block.language == "sh"]
    here = [block.content for block in page if not re.match(r"# (On|To) the robot\n", block.content)]
    assert 0 < len(here) < len(page)
    places = {"HOME": str(tmp_path), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    places["EDGELLM_CACHE_DIR"] = str(tmp_path / "cache")
    command = ["bash", "-ec", "".join(here)]
    ran = subprocess.run(command, cwd=tmp_path, env=os.environ | places, capture_output=True, text=True, check=False)
    assert ran.returncode == 0 and "every file is as described" in ran.stdout, ran.stdout + ran.stderr


def test_the_page_for_robots_makes_what_the_unit_expects() -> None:
    page = (PAGES / "from_pc_to_robot.md").read_text("utf-8")
    unit = (ROOT / "docs/configurations/edgellm.service").read_text("utf-8")
    expected = re.findall(r"(?:ExecStart=|serve |keys:)(/\S+)", unit)
    assert len(expected) == 3
    for path in expected:
        assert path.removesuffix("/bin/edgellm") in page
