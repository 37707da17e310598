"""`edgellm quantize` as it is typed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import Edgellm

from edgellm.commands.quantize import default_texts, load_texts, token_pieces
from edgellm.errors import RequestError
from edgellm.text.tokenizer import Tokenizer

SIGNALLED = """
import os, sys
from edgellm.commands.app import run
from edgellm.commands.console import ProgressDisplay

def signal_itself(self, stage, done, total):
    if done == 2:
        os.kill(os.getpid(), 15)

ProgressDisplay.__call__ = signal_itself
run(sys.argv[1:])
"""


def test_it_quantizes_and_says_what(tiny_checkpoint: Path, tmp_path: Path, edgellm: Edgellm) -> None:
    target, texts = tmp_path / "target", tmp_path / "texts.txt"
    texts.write_text("One cup is red. " * 10)
    asked = ("quantize", tiny_checkpoint, target, "--group-size", 32, "--asymmetric", "--calibration", texts)
    code, out, err = edgellm(*asked)
    assert code == 0, err
    assert f"{target}: int4, groups of 32, zero points" in out
    rows = {line.split()[0]: line.split(maxsplit=1)[1] for line in out.splitlines()[1:]}
    assert rows["method"] == "awq, 160 tokens read" and rows["layers"] == "3"
    assert rows["copied"] == "tokenizer.json, tokenizer_config.json"
    assert "layers ...\nlayers: done 3 of 3\n" in err
    assert json.loads((target / "config.json").read_text())["quantization_config"]["format"] == "pack-quantized"
    code, _, err = edgellm(*asked)
    assert code == 1 and "--force replaces it" in err


def test_the_largest_groups_that_divide_are_taken(
    tiny_checkpoint: Path, tiny_draft: Path, make_checkpoint: Callable[..., Path], tmp_path: Path, edgellm: Edgellm
) -> None:
    narrow = make_checkpoint(tmp_path / "narrow", hidden_size=96, intermediate_size=128)  # as 576 of SmolLM2
    for source, size in ((tiny_checkpoint, 64), (narrow, 32), (tiny_draft, 32)):
        code, out, err = edgellm("quantize", source, tmp_path / f"{source.name}-target", "--method", "rtn")
        assert code == 0, err
        assert f"int4, groups of {size}, symmetric" in out and f"Scales are shared by groups of {size}: " in err


def test_rounding_alone_reads_no_texts(tiny_checkpoint: Path, tmp_path: Path, edgellm: Edgellm) -> None:
    code, out, err = edgellm("quantize", tiny_checkpoint, tmp_path / "target", "--bits", 8, "--method", "rtn")
    assert code == 0, err
    assert "int8, a scale for each row, symmetric" in out and "tokens read" not in out


def test_what_cannot_be_done_is_said(tiny_checkpoint: Path, tmp_path: Path, edgellm: Edgellm) -> None:
    code, _, err = edgellm("quantize", tiny_checkpoint, tmp_path / "target", "--method", "rtn", "--group-size", 128)
    assert code == 1 and "--group-size 32 or 64 divides them all" in err
    code, _, err = edgellm("quantize", tmp_path / "nothing", tmp_path / "target")
    assert code == 1 and "does not exist" in err
    assert not list(tmp_path.glob("*target*"))


def test_a_terminated_run_goes_on(tiny_checkpoint: Path, tmp_path: Path, edgellm: Edgellm) -> None:
    arguments = ["quantize", tiny_checkpoint, tmp_path / "target", "--bits", "8", "--method", "rtn"]
    command = [sys.executable, "-c", SIGNALLED, *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    assert ended.returncode == 128 + signal.SIGTERM, ended.stderr
    assert "The layers that are done are kept" in ended.stderr and not (tmp_path / "target").exists()
    code, out, err = edgellm(*arguments)
    assert code == 0, err
    assert "3 (2 of them were there)" in out


def test_texts_are_read_in_either_form(tmp_path: Path, tiny_checkpoint: Path) -> None:
    lines, plain = tmp_path / "texts.jsonl", tmp_path / "text.txt"
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day"}]
    lines.write_text(json.dumps({"text": "a b"}) + "\n\n" + json.dumps({"messages": messages}) + "\n")
    plain.write_text("A first line.\n\nA second.\n" + "x" * 1000)
    tokenizer = Tokenizer.from_directory(tiny_checkpoint)
    text, conversation = load_texts(lines)
    assert text == "a b"
    assert token_pieces(tokenizer, [conversation]) == [tokenizer.encode_chat(messages, add_generation_prompt=False)]
    pieces = token_pieces(tokenizer, load_texts(plain))
    assert [len(piece) for piece in pieces] == [512, 512, 1]
    assert [token for piece in pieces for token in piece] == tokenizer.encode(plain.read_text())
    assert sum(map(len, token_pieces(tokenizer, ["x" * 50_000, "y"]))) == 16_384


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (" \n", "is empty"),
        ('{"text": "a"}\n{"text": 3}', "line 2: the text is 3"),
        ('{"prompt": "a"}', "line 1: expected an object with"),
        ('{"text": "a", "messages": []}', "line 1: expected an object with"),
        ('{"messages": [{"role": "user"}]}', "line 1: "),
        ('{"text"', "line 1"),
    ],
)
def test_files_of_no_use_are_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "texts"
    path.write_text(content)
    with pytest.raises(RequestError, match=message):
        load_texts(path)


def test_the_texts_that_ship_suit_every_tokenizer(tiny_checkpoint: Path, make_checkpoint: Callable[..., Path]) -> None:
    tokenizer, entries = Tokenizer.from_directory(tiny_checkpoint), default_texts()
    assert len(entries) > 25 and sum(isinstance(entry, list) for entry in entries) > 8
    assert sum(map(len, token_pieces(tokenizer, entries))) > 8000
    tokenizer.chat_template = None
    assert all(token_pieces(tokenizer, [entry]) for entry in entries)
