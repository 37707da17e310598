"""Settings, prompts and configurations that a user names, made to harm: one line each, soon."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hostile_runs import HostileRuns

#: YAML that multiplies by aliases: a list of 9 strings, a list of 9 of these lists, and so on.
BILLION = "system:\n- &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"- &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]\n" for level in range(1, 9)
)
SETTINGS = {
    "deep lists": ("[" * 100_000, "nested more than 64 deep"),
    "deep dictionaries": ("{a: " * 100_000, "nested more than 64 deep"),
    "deep blocks": ("- " * 100_000, "nested more than 64 deep"),
    "just too deep": ("system: " + "[" * 64 + "]" * 64, "nested more than 64 deep"),
    "aliases": (BILLION, "anchor"),
    "one anchor": ("system: &a text\nmodel: *a\n", "anchor"),
    "many steps": ("drafting: {draft_steps: 1000000000000}\n", "draft_steps is 1000000000000: expected a whole number"),
    "many choices": ("drafting: {kind: chain, draft_steps: 999999999}\n", "expected a whole number from 1 to 32"),
    "a list as preset": ("drafting: {preset: [1]}\n", "preset is [1]"),
    "an object as preset": ("drafting: {preset: {a: 1}}\n", "preset is {'a': 1}"),
    "NUL in the model": ('model: "a\\0b"\n', "a null character"),
    "NUL in the template": ('chat_template: "a\\0b"\n', "a null character"),
    "NUL in the snapshot": ('system_cache: "a\\0b"\n', "a null character"),
    "NUL in an adapter": ('adapters: {one: "~a\\0b"}\n', "a null character"),
    "NUL in choices": ('drafting: {choices: "a\\0b"}\n', "null"),
    "many digits": (f"sampling: {{seed: {'9' * 20_000}}}\n", "a number of 20000 characters"),
    "many binary digits": (f"sampling: {{seed: 0b{'1' * 20_000}}}\n", "a number of 20002 characters"),
    "digits in groups": ("sampling: {max_tokens: 1_0}\n", "the number 1_0"),
    "no snapshot": ("system_cache: ''\n", "expected a file or the name of a snapshot, or null"),
    "sexagesimal digits": (f"sampling: {{seed: 1{':59' * 100_000}}}\n", "a number of 300001 characters"),
    "a large number": (f"sampling: {{temperature: {10**40}}}\n", "1.000e+40 is out of range, expected one from"),
    "a tag": ("system: !!python/object/apply:os.getcwd []\n", "tag"),
    "a tag of YAML": ("sampling: {seed: !!int '5'}\n", "tag"),
    "a date that is none": ("system: 2001-99-99\n", "not valid YAML"),
    "a control character": ("system: \x01\n", "not valid YAML"),
    "2 MiB": ("system: " + "a" * (2 << 20), "more than the 1,048,576"),
    "a key of 1 MB": ("? " + "k" * 1_000_000 + "\n: 1\n", "unknown key"),
    "a terminal's escape": ('"\\e[31mkey\\nnext": 1\n', "unknown key"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_are_refused_in_one_line_within_a_second(hostile: HostileRuns, tmp_path: Path, name: str) -> None:
    text, expected = SETTINGS[name]
    path = tmp_path / "config.yaml"
    path.write_text(text)
    ended = hostile("generate", "Hello", "--config", path)
    assert expected in ended.refusal()
    assert ended.err.count("\n") == 1 and ended.seconds < 1.0, ended


def test_a_full_mebibyte_of_yaml_is_read_or_refused_soon(hostile: HostileRuns, tmp_path: Path) -> None:
    for text in ("[" + "a," * 500_000 + "]", "a: b\n" * 200_000, "- {a: [1, 2.5, '']}\n" * 50_000):
        path = tmp_path / "config.yaml"
        path.write_text(text)
        ended = hostile("generate", "Hello", "--config", path)
        ended.refusal()
        assert ended.err.count("\n") == 1 and ended.seconds < 1.0, ended


CHOICES = {
    "deep": ("[" * 100_000, "nested more than 64 deep"),
    "aliases": (BILLION, "anchor"),
    "twice": (json.dumps([[rank] for rank in range(60_000)] + [[0]]), "choices"),
    "long paths": (json.dumps([[0] * 200_000]), "choice"),
    "a number of many digits": (f"[[{'9' * 20_000}]]", "a number of 20000 characters"),
    "text": ("a\n" * 1000, "expected a list of paths"),
}


@pytest.mark.parametrize("name", CHOICES)
def test_trees_of_choices(hostile: HostileRuns, tmp_path: Path, name: str) -> None:
    path = tmp_path / "choices.yaml"
    path.write_text(CHOICES[name][0])
    ended = hostile("generate", "Hello", "--choices", path)
    assert CHOICES[name][1] in ended.refusal() and ended.seconds < 1.0, ended


@pytest.mark.parametrize(
    "configuration",
    [
        "chain:999999",
        f"chain:{'9' * 20_000}",
        "tree:1/999999999/999999999",
        "tree:999999999/2/999999999",
        f"adaptive:{'9' * 5000}/1/1",
        "chain:5,chain:33",
    ],
)
def test_configurations_of_a_benchmark_are_checked_before_they_are_planned(
    hostile: HostileRuns, tiny_draft_engines: Path, configuration: str
) -> None:
    ended = hostile("bench", tiny_draft_engines, "--configurations", configuration, "--backend", "numpy")
    assert "the configuration" in ended.refusal() and ended.seconds < 1.0, ended


@pytest.mark.parametrize("option", ["--draft-steps", "--draft-top-k", "--verify-tree-size"])
@pytest.mark.parametrize("value", [10**12, 999, "9" * 20_000])
def test_options_of_drafting(hostile: HostileRuns, tiny_draft_engines: Path, option: str, value: object) -> None:
    ended = hostile("generate", "Hello", "-m", tiny_draft_engines, "--backend", "numpy", option, value)
    assert option in ended.refusal() and ended.seconds < 1.0, ended


PROMPTS = {
    "deep": ("[" * 100_000, "nested more than 64 deep"),
    "aliases": (BILLION, "anchor"),
    "no list": ("a: 1\n", "expected a list of prompts"),
    "a file that is none": ('- {name: a, file: "b\\0c"}\n', "null"),
    "an output that is none": ('- {name: a, prompt: b, output: "b\\0c"}\n', "null"),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts_to_cache(hostile: HostileRuns, tmp_path: Path, name: str) -> None:
    path = tmp_path / "prompts.yaml"
    path.write_text(PROMPTS[name][0])
    ended = hostile("cache", "build", "--prompts", path, "--folder", tmp_path)
    assert PROMPTS[name][1] in ended.refusal() and ended.seconds < 1.0, ended


BENCH_PROMPTS = {
    "deep": '{"prompt": ' + "[" * 100_000,
    "closed and deep": '{"prompt": ' + "[" * 90 + "]" * 90 + "}",
    "digits": '{"prompt": ' + "9" * 20_000 + "}",
    "half a pair": '{"prompt": "\\ud800"}',
    "no JSON": "{" * 100_000,
}


@pytest.mark.parametrize("name", BENCH_PROMPTS)
def test_prompts_of_a_benchmark(hostile: HostileRuns, tmp_path: Path, name: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(BENCH_PROMPTS[name])
    ended = hostile("bench", "--prompts", path)
    assert f"{path}, line 1" in ended.refusal() and ended.seconds < 1.0, ended


READERS = {
    "prompt": ("generate", "--file"),
    "system prompt": ("generate", "Hello", "--system-file"),
    "template": ("generate", "Hello", "--chat-template"),
    "settings": ("generate", "Hello", "--config"),
    "choices": ("generate", "Hello", "--choices"),
    "cached prompt": ("cache", "build", "--file"),
    "cached prompts": ("cache", "build", "--prompts"),
    "benchmark": ("bench", "--prompts"),
    "image": ("generate", "Hello", "--image"),
    "snapshot": ("generate", "Hello", "--system-cache"),
    "weights": ("convert",),
}


@pytest.mark.parametrize("name", READERS)
def test_a_file_that_never_ends(hostile: HostileRuns, tmp_path: Path, name: str) -> None:
    target = [tmp_path / "target"] if name == "weights" else []
    message = hostile(*READERS[name], "/dev/zero", *target).refusal()
    assert "/dev/zero" in message or "--choices" in message, message


@pytest.mark.parametrize("name", READERS)
def test_a_pipe_that_nobody_writes_into(hostile: HostileRuns, tmp_path: Path, name: str) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    target = [tmp_path / "target"] if name == "weights" else []
    assert str(pipe) in hostile(*READERS[name], pipe, *target).refusal()


def test_standard_input_that_never_ends(hostile: HostileRuns) -> None:
    for arguments in (("generate",), ("generate", "-"), ("cache", "build")):
        message = hostile(*arguments, stdin=Path("/dev/zero")).refusal()
        assert "standard input has more than" in message
