"""`edgellm embed`: JSON lines of arguments or of standard input; an embedding model elsewhere on the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from command_line import Edgellm
from embedding_models import TOLERANCE, EmbeddingModel, normalised


def test_texts_and_lines_become_json_lines(
    edgellm: Edgellm, embedding_model: Callable[[str], EmbeddingModel], tmp_path: Path
) -> None:
    model = embedding_model("published")
    texts, expected = model.texts[:2], model.expected
    code, out, err = edgellm("embed", model.engines, *texts)
    assert (code, err) == (0, "")
    lines = [json.loads(line) for line in out.splitlines()]
    assert [each["text"] for each in lines] == texts
    np.testing.assert_allclose([each["embedding"] for each in lines], expected["embeddings"][:2], atol=TOLERANCE)
    piped = "\n".join([texts[0], "", texts[1], ""])
    code, out, _ = edgellm("embed", "-m", model.engines, "--prompt", "query", "--dimensions", 8, stdin=piped)
    found = [json.loads(line)["embedding"] for line in out.splitlines()]
    np.testing.assert_allclose(found, normalised(expected["queries"][:2, :8]), atol=TOLERANCE)
    assert edgellm("embed")[0] == 2
    assert edgellm("embed", model.engines, stdin="\n \n")[2].startswith("error: there is no text")
    code, out, err = edgellm("embed", model.engines, "a", "--dimensions", 99)
    assert (code, out) == (1, "") and "dimensions is 99: expected a whole number from 1 to 32" in err


def test_build_and_info_say_what_it_is(
    edgellm: Edgellm, embedding_model: Callable[[str], EmbeddingModel], tmp_path: Path
) -> None:
    source = embedding_model("newer").checkpoint
    code, out, err = edgellm("build", source, tmp_path / "robot", "--kv-capacity", 64, "--try")
    assert code == 0, err
    assert "embeddings  of 32 dimensions, by the last token: it gives no answers" in out and "first token" in out
    assert "no chat template" not in out  # which it needs none of
    facts = json.loads(edgellm("info", tmp_path / "robot", "--json")[1])
    assert facts["config"]["pooling"] == "last" and facts["differences"] == []
    code, _, err = edgellm("generate", "-m", tmp_path / "robot", "hello")
    assert code == 1 and "is an embedding model" in err and "edgellm embed" in err
