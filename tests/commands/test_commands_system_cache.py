"""Snapshots and LoRA adapters on the command line: `edgellm cache build --lora`, then chat and generate with them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from command_line import Edgellm

from edgellm.commands.chat import _greeting
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.building.inputs import read_decoder_config
from edgellm.engines.model.limits import EngineLimits
from edgellm.llm import LLM
from edgellm.sampling_params import SamplingParams
from edgellm.snapshots.file import read_snapshot, write_snapshot
from edgellm.snapshots.snapshot import Snapshot

SYSTEM = "You are Pip."
#: What the template makes of it up to the user's words: a token a byte, but for three special ones. With a draft, the
#: last one is computed again.
TOKENS = len("system\nYou are Pip.\nuser\n") + 3


@pytest.fixture(autouse=True)
def own_cache(private_files: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGELLM_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def loras(tiny_checkpoint: Path, make_adapter: Callable[..., Path], tmp_path_factory) -> dict[str, Path]:
    folder, config = tmp_path_factory.mktemp("loras"), read_decoder_config(tiny_checkpoint)
    return {name: make_adapter(folder / name, config, seed) for seed, name in enumerate(("json", "style", "own"))}


@pytest.fixture(scope="module")
def engines(tiny_checkpoint: Path, tiny_draft: Path, loras: dict[str, Path], tmp_path_factory) -> Path:
    """The tiny model with a draft and two of the adapters."""
    target = tmp_path_factory.mktemp("system_cache") / "robot"
    limits = EngineLimits(1, 32, 240, 4, 3, 12, max_lora_rank=4, lora_slots=1)
    adapters = {name: loras[name] for name in ("json", "style")}
    build_engine_directory(tiny_checkpoint, target, limits, [], draft=tiny_draft, adapters=adapters)
    return target


def answered(engines: Path, questions: list[tuple[str, str | None]], loras: dict[str, Path] | None = None) -> list[str]:
    """What the API answers, each question with an adapter, in one conversation, without a snapshot."""
    messages = [{"role": "system", "content": SYSTEM}]
    with LLM(engines, backend="numpy", drafting=None, adapters=loras or {}) as llm:
        for question, adapter in questions:
            messages.append({"role": "user", "content": question})
            answer = llm.chat(messages, SamplingParams(max_tokens=8), adapter).text
            messages.append({"role": "assistant", "content": answer})
    return [message["content"] for message in messages if message["role"] == "assistant"]


def built(edgellm: Edgellm, engines: Path, *options: object) -> Path:
    code, out, err = edgellm("cache", "build", "--prompt", SYSTEM, "-m", engines, "--backend", "numpy", *options)
    assert code == 0, err
    return Path(out.partition(": ")[0])


COMMON = ("--backend", "numpy", "--system", SYSTEM, "--max-tokens", "8")


def test_chat_takes_the_system_prompt_from_a_file(edgellm: Edgellm, engines: Path, tmp_path: Path) -> None:
    path = built(edgellm, engines, "--output", tmp_path / "pip.safetensors")
    assert path == tmp_path / "pip.safetensors"
    code, out, err = edgellm("chat", engines, *COMMON, "--system-cache", path, stdin="hello\n/stats\nwhy?\n")
    expected = answered(engines, [("hello", None), ("why?", None)])
    assert (code, out) == (0, "".join(f"{text}\n" for text in expected))
    prompt, reused = map(int, re.search(r"prompt: (\d+) tokens \((\d+) reused\)", err).groups())
    assert reused == TOKENS - 1 and prompt > reused
    assert "reused" not in edgellm("chat", engines, *COMMON, stdin="hello\n/stats\n")[2]


def test_generate_finds_a_snapshot_by_its_name(edgellm: Edgellm, engines: Path) -> None:
    path = built(edgellm, engines, "--name", "pip")
    assert path.exists()
    command = ("generate", "hello", "-m", engines, *COMMON, "--json")
    cold = json.loads(edgellm(*command)[1])
    for name in ("pip", path.stem[:8], path):
        code, out, err = edgellm(*command, "--system-cache", name)
        warm = json.loads(out)
        assert (code, err) == (0, "")
        assert warm["usage"] == cold["usage"] | {"reused_tokens": TOKENS - 1}
        assert (warm["token_ids"], warm["adapter"]) == (cold["token_ids"], None)


def test_a_path_of_any_bytes_is_taken_where_one_is_written(edgellm: Edgellm, engines: Path, tmp_path: Path) -> None:
    path = tmp_path / "pip\udcff.safetensors"  # a byte 0xff, as Python hands it on
    built(edgellm, engines, "--output", path)
    assert path.exists()
    code, out, err = edgellm("generate", "hello", "-m", engines, *COMMON, "--json", "--system-cache", path)
    assert (code, err, json.loads(out)["usage"]["reused_tokens"]) == (0, "", TOKENS - 1)
    assert edgellm("cache", "verify", path)[::2] == (0, "")
    assert "not UTF-8" in edgellm("generate", "hello", "-m", engines, "--system", "pip\udcff")[2]


def test_a_snapshot_brings_its_system_prompt(edgellm: Edgellm, engines: Path, tmp_path: Path) -> None:
    built(edgellm, engines, "--name", "pip")
    config = tmp_path / "mine.yaml"
    config.write_text("system: Another.\n")
    expected = answered(engines, [("hello", None)])
    common = (*COMMON[:2], *COMMON[4:])
    for options in ((), ("--config", config)):
        code, out, err = edgellm("chat", engines, *common, *options, "--system-cache", "pip", stdin="/system\nhello\n")
        assert (code, out, err) == (0, f"{expected[0]}\n", f"{SYSTEM}\n")
        command = ("generate", "hello", "-m", engines, *common, *options, "--json")
        code, out, err = edgellm(*command, "--system-cache", "pip")
        answer = json.loads(out)
        assert (code, err, answer["text"], answer["usage"]["reused_tokens"]) == (0, "", expected[0], TOKENS - 1)
    assert json.loads(edgellm(*command, "--no-system-cache")[1])["usage"]["reused_tokens"] == 0


def test_another_system_prompt_beside_a_snapshot_is_refused(edgellm: Edgellm, engines: Path, tmp_path: Path) -> None:
    path = built(edgellm, engines, "--name", "pip")
    (tmp_path / "other.txt").write_text("Be.\n")
    (tmp_path / "same.txt").write_text(f"{SYSTEM}\n")
    (tmp_path / "mine.yaml").write_text("system: Be.\nsystem_cache: pip\n")
    refused = (
        ("--system", "Be.", "--system-cache", path),
        ("--system-file", tmp_path / "other.txt", "--system-cache", "pip"),
        ("--config", tmp_path / "mine.yaml"),
    )
    for options in refused:
        code, out, err = edgellm("generate", "hello", "-m", engines, *COMMON[:2], *options)
        assert (code, out) == (1, "")
        assert f"is of the system prompt {SYSTEM!r}, but 'Be.' is given (" in err and "): leave one of them out" in err
    code, _, err = edgellm("chat", engines, "--system", "", "--system-cache", "pip", stdin="hello\n")
    assert code == 1 and "but '' is given (--system, " in err
    same = ("--system-file", tmp_path / "same.txt", "--system-cache", "pip", "--max-tokens", "1")
    assert edgellm("generate", "hello", "-m", engines, *COMMON[:2], *same)[0] == 0


def without_prompt(path: Path) -> None:
    """Make a snapshot one that does not say what its tokens were rendered from."""
    snapshot = read_snapshot(path)
    facts = snapshot.facts
    tensors = {name: (facts.binding.dtype, snapshot.places[name].shape) for name in snapshot.rows}
    bare = Snapshot.allocate(facts, tensors, lambda nbytes: np.zeros(nbytes, np.uint8))
    for name in (*snapshot.rows, "token_ids"):
        bare.tensor(name)[...] = snapshot.tensor(name)
    write_snapshot(path, bare)


def test_a_snapshot_without_its_prompt_is_used_and_brings_none(edgellm: Edgellm, engines: Path) -> None:
    path = built(edgellm, engines)
    without_prompt(path)
    assert b"edgellm_prompt" not in path.read_bytes()
    assert json.loads(edgellm("cache", "show", path, "--json")[1])[0]["prompt"] is None
    command = ("generate", "hello", "-m", engines, "--system-cache", path, "--json")
    code, out, err = edgellm(*command, *COMMON)
    assert (code, err) == (0, "")
    assert json.loads(out)["usage"]["reused_tokens"] == TOKENS - 1
    code, _, err = edgellm("chat", engines, *COMMON[:2], "--system", "Be.", "--system-cache", path, stdin="/exit\n")
    assert code == 0 and f"{path} is of another system prompt: it has 8 of the " in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--system-cache", "nothing"], "there is no snapshot 'nothing', neither a file nor in "),
        (["--system-cache", "{path}", "--no-draft"], "was made otherwise: the draft model is "),
        (["--system-cache", "{path}", "--adapter", "json"], "was made otherwise: the adapter is none, expected "),
        (["--system-cache", "{broken}"], "is damaged: "),
        (["--system-cache", "/"], "/ is a directory: expected a snapshot that edgellm cache build made"),
        (["--adapter", "jsn"], "there is no LoRA adapter 'jsn': did you mean json?"),
        (["--adapter", "x", "--lora", "own={own}"], "there is no LoRA adapter 'x': expected one of json, style, own"),
        (["--adapter", "own", "--lora", "own=/no/such"], "/no/such"),
    ],
)
def test_what_does_not_fit_is_an_error(
    edgellm: Edgellm, engines: Path, loras: dict[str, Path], tmp_path: Path, options: list[str], message: str
) -> None:
    path = built(edgellm, engines)
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(path.read_bytes()[:-1])
    places = {"path": path, "broken": broken, "own": loras["own"]}
    options = [option.format(**places) for option in options]
    for command in (["chat", engines], ["generate", "hello", "-m", engines]):
        code, out, err = edgellm(*command, *COMMON, *options, stdin="hello\n")
        assert (code, out) == (1, "")
        assert err.startswith("error: ") and message in err


def test_adapters_need_engines_that_take_them(edgellm: Edgellm, tiny_engines: Path, loras: dict[str, Path]) -> None:
    _, _, err = edgellm("chat", tiny_engines, "--adapter", "json", stdin="hello\n")
    assert "there is no LoRA adapter 'json'" in err and "has none. Load one with --lora NAME=DIR" in err
    _, _, err = edgellm("chat", tiny_engines, "--lora", f"json={loras['json']}", stdin="hello\n")
    assert "the engines were built without LoRA adapters" in err


def test_generate_with_an_adapter(edgellm: Edgellm, engines: Path, loras: dict[str, Path]) -> None:
    command = ("generate", "hello", "-m", engines, *COMMON)
    texts = {None: edgellm(*command)[1].strip("\n")}
    for name in ("json", "own"):
        code, out, err = edgellm(*command, "--lora", f"own={loras['own']}", "--adapter", name, "--json")
        assert (code, err) == (0, "")
        answer = json.loads(out)
        assert answer["adapter"] == name
        texts[name] = answer["text"]
        assert answered(engines, [("hello", name)], {"own": loras["own"]}) == [answer["text"]]
    assert len(set(texts.values())) == 3
    code, _, err = edgellm(*command, "--lora", f"own={loras['own']}")
    assert code == 2 and "choose the one that answers with --adapter NAME" in err
    code, _, err = edgellm(*command, "--lora", "own")
    assert code == 2 and "expected NAME=DIR" in err


def test_chat_changes_adapters(edgellm: Edgellm, engines: Path, loras: dict[str, Path], tmp_path: Path) -> None:
    saved = tmp_path / "conversation.json"
    lines = (
        "/adapter\nhello\n/adapter style\nhello\n/adapter own\nhello\n/adapter stile\n"
        f'/save {saved}\n/adapter ""\nhello\n/adapter\n/load {saved}\n/adapter\n'
    )
    options = (*COMMON, "--lora", f"own={loras['own']}", "--adapter", "json")
    code, out, err = edgellm("chat", engines, *options, stdin=lines)
    asked = [("hello", name) for name in ("json", "style", "own", None)]
    expected = answered(engines, asked, {"own": loras["own"]})
    assert (code, out) == (1, "".join(f"{text}\n" for text in expected))
    assert err.splitlines() == [
        "LoRA adapters json, style, own; answers are given with json.",
        "Answers are given with style from now on.",
        "Answers are given with own from now on.",
        "error: there is no LoRA adapter 'stile': did you mean style?",
        f"Saved 6 messages to {saved}.",
        "Answers are given without an adapter from now on.",
        "LoRA adapters json, style, own; answers are given without one.",
        f"Loaded 6 messages from {saved}.",
        "LoRA adapters json, style, own; answers are given with own.",
    ]
    code, _, err = edgellm("chat", engines, *COMMON, stdin=f"/load {saved}\n/system\n")
    assert code == 1 and f"{saved}: its answers were given with the LoRA adapter 'own', which is not loaded" in err
    assert err.splitlines()[-1] == SYSTEM


def test_the_opening_line_names_the_adapters(engines: Path) -> None:
    with LLM(engines, backend="numpy", drafting=None) as llm:
        assert "context 240 tokens, LoRA adapters json, style; answers are given with json. /help" in _greeting(
            llm, "json"
        )
    with LLM(engines, backend="numpy", drafting=None, adapters=None) as llm:
        assert "context 240 tokens. /help" in _greeting(llm, None)


def test_settings_choose_adapter_and_snapshot(edgellm: Edgellm, engines: Path, tmp_path: Path) -> None:
    path = built(edgellm, engines, "--lora", "style", "--output", tmp_path / "style.safetensors")
    config = tmp_path / "mine.yaml"
    config.write_text(f"model: {engines}\nadapter: style\nsystem: {SYSTEM}\nsystem_cache: {path.name}\n")
    options = ("--config", config, "--backend", "numpy", "--max-tokens", "8", "--json")
    answer = json.loads(edgellm("generate", "hello", *options)[1])
    assert (answer["adapter"], answer["usage"]["reused_tokens"]) == ("style", TOKENS - 1)
    assert [answer["text"]] == answered(engines, [("hello", "style")])
    assert edgellm("cache", "build", "--prompt", "x", "--config", config, "--backend", "numpy")[0] == 0
    code, _, err = edgellm("generate", "hello", *options, "--no-adapter")
    assert code == 1 and "expected none" in err


def test_cache_build_for_several_adapters(
    edgellm: Edgellm, engines: Path, loras: dict[str, Path], tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.yaml"
    prompts.write_text(
        f"- {{name: plain, prompt: {SYSTEM}, output: plain.safetensors}}\n"
        f"- {{name: json, prompt: {SYSTEM}, lora: json, output: json.safetensors}}\n"
        f"- {{name: own, prompt: {SYSTEM}, lora: own={loras['own']}, output: own.safetensors}}\n"
    )
    code, out, err = edgellm("cache", "build", "--prompts", prompts, "-m", engines, "--backend", "numpy")
    assert code == 0, err
    assert [f"json' for the adapter json, {TOKENS} tokens" in line for line in out.splitlines()] == [False, True, False]
    command = ("generate", "hello", "-m", engines, *COMMON, "--json", "--lora", f"own={loras['own']}")
    for name in ("json", "own"):
        path = tmp_path / f"{name}.safetensors"
        assert re.search(r"adapter +[0-9a-f]{64}\n", edgellm("cache", "show", path)[1])
        code, out, err = edgellm(*command, "--adapter", name, "--system-cache", path)
        assert code == 0, err
        assert json.loads(out)["usage"]["reused_tokens"] == TOKENS - 1
    code, _, err = edgellm(*command, "--adapter", "json", "--system-cache", tmp_path / "own.safetensors")
    assert code == 1 and "the adapter is" in err and "expected" in err


@pytest.mark.parametrize(
    ("content", "code", "message"),
    [
        ("- {name: x, prompt: y, lora: jsn}", 1, "there is no LoRA adapter 'jsn': did you mean json?"),
        ("- {name: x, prompt: y, lora: jsn=}", 1, "prompts.yaml, prompt 1: --lora jsn=: expected NAME=DIR"),
        ("- {name: x, prompt: y, lora: a=b}\n- {name: z, prompt: y, lora: a=c}", 1, "give one of them another name"),
    ],
)
def test_wrong_adapters_of_cache_build(
    edgellm: Edgellm, engines: Path, tmp_path: Path, content: str, code: int, message: str
) -> None:
    (tmp_path / "prompts.yaml").write_text(content)
    found, _, err = edgellm("cache", "build", "--prompts", tmp_path / "prompts.yaml", "-m", engines)
    assert found == code and message in err
