"""A model that others published, from its GGUF file: answers are those of transformers on the same weights."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
from command_line import Edgellm
from http_server import running
from published_model import published_answers, published_file

from edgellm import LLM, EdgeLLMError
from edgellm.hub.directories import local_directory
from tools.bench.published_tokens import compared

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "is_capital": {"type": "boolean"}},
    "required": ["city", "is_capital"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def gguf(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kept = getattr(request.config, "cache", None)  # None: pytest runs without its cache
    return published_file(tmp_path_factory.mktemp("published") if kept is None else kept.mkdir("published"))


def test_answers_are_those_of_transformers_in_float32(gguf: Path) -> None:
    """And one has the form of a schema."""
    with LLM(gguf, backend="numpy", build={"kv_capacity": 256}) as model:
        for each in published_answers()["answers"][:1]:
            found = compared(model, each, "float32", 32)
            assert found.keys() == {"tokens", "agree"}, found
        question = "What is the capital of France? Answer in JSON."
        form = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}
        found = model.chat(question, temperature=0.0, max_tokens=40, response_format=form)
    jsonschema.validate(json.loads(found.text), SCHEMA)
    assert found.finish_reason == "stop" and "Paris" in found.text


@pytest.mark.gpu
def test_a_gpu_gives_the_answers_of_transformers_on_rounded_values(gguf: Path) -> None:
    """All of them, but behind a token that transformers chose by a hair."""
    with LLM(gguf, backend="tensorrt", build={"kv_capacity": 256}) as model:
        found = [compared(model, each, "float16", 64) for each in published_answers()["answers"]]
    assert [each for each in found if each.get("margin", 0.0) is None] == []
    assert sum(each["agree"] for each in found) >= 0.9 * sum(each["tokens"] for each in found)


def test_the_server_gives_such_an_answer(gguf: Path) -> None:
    first = published_answers()["answers"][0]
    said = [{"role": "user", "content": first["prompt"]}]
    with running(gguf, "--kv-capacity", 256) as server, server.client() as client:
        (name,) = (each.id for each in client.models.list())
        assert name == gguf.stem
        chunks = client.chat.completions.create(model=name, messages=said, temperature=0, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "The capital of France is Paris."


def test_what_its_weights_take_in_float32_is_planned_and_refused_early(
    edgellm: Edgellm, gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """134.5 million of them, 94 MiB in the file; `info` says so where there is a directory."""
    monkeypatch.setattr("edgellm.engines.backends.numpy_backend.available_memory", lambda: 400 << 20)
    monkeypatch.setattr(
        "edgellm.engines.backends.numpy_backend.load_numpy_weights", lambda *_: pytest.fail("it was read")
    )
    with pytest.raises(EdgeLLMError, match=r"(?s)400 MiB are free.*weights +513\.1 MiB"):
        LLM(gguf, backend="numpy", build={"kv_capacity": 256})
    out = edgellm("info", local_directory(gguf, build={"kv_capacity": 256}))[1]
    assert "NumPy backend, which makes float32 of them, weights 513.1 MiB" in " ".join(out.split())
