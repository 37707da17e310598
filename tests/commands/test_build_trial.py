"""`edgellm build` opens what it built, and computes a token of it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from command_line import Edgellm
from safetensors.numpy import load_file, save_file

from edgellm import LLM
from edgellm.engines.checkpoints import weights

SMALL = ("--prefill-chunk", 16, "--kv-capacity", 16)
GENERATION, TEMPLATE, TOKENIZER = "generation_config.json", "chat_template.jinja", "tokenizer_config.json"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (GENERATION, '{"do_sample": true, "top_p": -3}', "top_p"),
        (TEMPLATE, "{% for message in messages %}", "syntax error"),
        (TEMPLATE, "{{ messages[0].content.nothing() }}", "failed"),
        (TOKENIZER, '{"additional_special_tokens": 5}', "expected a list of tokens"),
        ("model.safetensors", "", "is inf"),
    ],
)
def test_what_does_not_open_is_not_built(
    own_checkpoint: Path, tmp_path: Path, edgellm: Edgellm, name: str, content: str, message: str
) -> None:
    if content:
        (own_checkpoint / name).write_text(content)
    else:
        tensors = load_file(own_checkpoint / name)
        save_file(tensors | {"model.norm.weight": np.full(64, np.inf, np.float16)}, own_checkpoint / name)
    code, _, errors = edgellm("build", own_checkpoint, tmp_path / "robot", *SMALL)
    said = " ".join(errors.split())
    assert code == 1 and f"{tmp_path / 'robot'} was not built" in said
    assert str(own_checkpoint / name) in said and message in said and ".partial-" not in said
    assert list(tmp_path.iterdir()) == [own_checkpoint]


def test_a_token_is_computed_where_memory_is_plenty_or_it_is_asked_for(
    own_checkpoint: Path, tmp_path: Path, edgellm: Edgellm, monkeypatch: pytest.MonkeyPatch
) -> None:
    def built(*options: object) -> str:
        code, out, errors = edgellm("build", own_checkpoint, tmp_path / "robot", "--force", *SMALL, *options)
        assert code == 0, errors
        return str(out)

    assert "  first token " in built()
    found: list[str] = []
    monkeypatch.setattr(weights, "first_not_finite", lambda values: found.append("looked") or -1)
    with LLM(tmp_path / "robot", backend="numpy"):
        assert not found  # what the token's start looked at is known to the next start
    assert "first token" not in (out := built("--no-try")) and "No token" not in out
    monkeypatch.setattr("edgellm.commands.build.available_memory", lambda: 4 * 32_000)
    assert "No token of it was computed: its weights take more than a quarter" in built()
    assert "  first token " in built("--try")


def test_a_template_that_takes_other_messages_is_said_and_no_failure(
    own_checkpoint: Path, tmp_path: Path, edgellm: Edgellm
) -> None:
    values = {"chat_template": "{{ raise_exception('only lists of languages') }}"}
    (own_checkpoint / TOKENIZER).write_text(json.dumps(values))
    code, out, _ = edgellm("build", own_checkpoint, tmp_path / "robot", *SMALL)
    assert code == 0 and "A conversation of one message was not rendered" in out and "only lists of languages" in out


def test_what_answers_take_no_notice_of_is_said(own_checkpoint: Path, tmp_path: Path, edgellm: Edgellm) -> None:
    asked = {"no_repeat_ngram_size": 3, "num_beams": 1, "bad_words_ids": [[5], [5, 6]], "typical_p": None}
    (own_checkpoint / GENERATION).write_text(json.dumps(asked))
    code, out, errors = edgellm("build", own_checkpoint, tmp_path / "robot", *SMALL, "--no-try")
    said = "generation_config.json has no_repeat_ngram_size, bad_words_ids of several, of which answers take no"
    assert code == 0 and said in " ".join(out.split()), out + errors
