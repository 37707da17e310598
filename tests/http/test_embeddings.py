"""`/v1/embeddings` with OpenAI's client and ollama's `/api/embed`: vectors as in Python, and what is refused."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import openai
import pytest
from embedding_models import TOLERANCE, EmbeddingModel, normalised
from golden_files import largest_difference
from http_server import ServerProcess, running

from edgellm.http.embeddings import MOST_INPUTS, embedding_request, ollama_prompt, ollama_request
from edgellm.http.errors import HTTPError
from edgellm.http.fields import ServedModel

NAME = "published"


@pytest.fixture(scope="module")
def model(embedding_model: Callable[[str], EmbeddingModel]) -> EmbeddingModel:
    return embedding_model(NAME)


@pytest.fixture(scope="module")
def embedder(model: EmbeddingModel) -> Iterator[ServerProcess]:
    with running("--model", model.engines) as found:
        yield found


def test_openais_client_gets_the_vectors_of_the_oracle(embedder: ServerProcess, model: EmbeddingModel) -> None:
    client = embedder.client(_strict_response_validation=False)  # its types know lists alone, and it asks for base64
    create, expected = client.embeddings.create, model.expected["embeddings"]
    plain: dict[str, Any] = {"model": NAME, "input": model.texts}
    found = create(**plain)
    vectors = np.asarray([each.embedding for each in found.data], np.float32)
    np.testing.assert_allclose(vectors, expected, atol=TOLERANCE)
    assert [each.index for each in found.data] == list(range(len(model.texts))) and found.model == NAME
    count = sum(len(text.encode()) + 1 for text in model.texts)  # its tokens are bytes, and one that ends each
    assert (found.usage.prompt_tokens, found.usage.total_tokens) == (count, count)
    numbers = embedder.client().embeddings.create(**plain, encoding_format="float", user="someone")
    assert np.array_equal(np.asarray([each.embedding for each in numbers.data], np.float32), vectors)
    cut = create(**plain, dimensions=8, encoding_format="float")
    np.testing.assert_allclose([each.embedding for each in cut.data], normalised(expected[:, :8]), atol=TOLERANCE)
    queries = create(**plain, extra_body={"prompt_name": "query"})
    np.testing.assert_allclose([each.embedding for each in queries.data], model.expected["queries"], atol=TOLERANCE)


def test_one_text_and_token_ids_are_taken_and_ollama_asks_alike(embedder: ServerProcess, model: EmbeddingModel) -> None:
    ids = model.expected["token_ids"].tolist()
    last = model.expected["last_states"]  # behind each of the tokens

    def post(path: str, **fields: Any) -> tuple[int, Any, dict[str, str]]:
        return embedder.ask("POST", path, {"model": NAME, **fields})

    one = post("/v1/embeddings", input=ids)[1]
    assert len(one["data"]) == 1 and one["usage"] == {"prompt_tokens": 70, "total_tokens": 70}
    assert largest_difference(np.asarray(one["data"][0]["embedding"]), last[69]) <= TOLERANCE
    several = post("/v1/embeddings", input=[ids[:3], ids[:40]], encoding_format="base64", user="someone")
    decoded = [np.frombuffer(base64.b64decode(each["embedding"]), "<f4") for each in several[1]["data"]]
    assert largest_difference(np.stack(decoded), last[[2, 39]]) <= TOLERANCE
    assert several[2]["edgellm-ignored"] == "user" and several[2]["cache-control"] == "no-store"
    options = {"num_ctx": 99, "seed": None}
    status, found, headers = post("/api/embed", input=model.texts[0], options=options, truncate=True)
    np.testing.assert_allclose(found["embeddings"], model.expected["embeddings"][:1], atol=TOLERANCE)
    assert status == 200 and found["prompt_eval_count"] == len(model.texts[0]) + 1 and found["total_duration"] > 0
    assert headers["edgellm-ignored"] == "truncate, options.num_ctx"
    client = pytest.importorskip("ollama").Client(host=f"http://{embedder.host}:{embedder.port}")
    np.testing.assert_allclose(client.embeddings(NAME, model.texts[0]).embedding, found["embeddings"][0], atol=1e-6)
    assert post("/api/show")[1]["capabilities"][0] == "embedding"
    assert post("/tokenize", prompt="ab")[1]["tokens"][-1] == 256
    assert embedder.metric("embedding_texts_total") >= 4
    assert embedder.metric("http_responses_total", path="/v1/embeddings", status="200") >= 2


def test_refusals_name_the_field(embedder: ServerProcess, server: ServerProcess, client: openai.OpenAI) -> None:
    asked: list[tuple[dict[str, Any], str, str]] = [
        ({"dimensions": 99}, "dimensions", "dimensions is 99: expected a whole number from 1 to 32"),
        ({"prompt_name": "qery"}, "prompt_name", "prompt_name is 'qery': did you mean query"),
        ({"input": ["a", "x" * 200]}, "input", "the maximum context length is 160 tokens: text 2 has 201 tokens"),
        ({"input": [[]]}, "input[0]", "input[0] is []: expected at least one token"),
        ({"model": "other"}, "model", "there is no model 'other'"),
    ]
    for fields, param, message in asked:
        status, found, _ = embedder.ask("POST", "/v1/embeddings", {"model": NAME, "input": "a", **fields})
        assert (status, found["error"]["param"]) == (404 if param == "model" else 400, param)
        assert message in found["error"]["message"]
    for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"):
        body = {"model": NAME, "messages": [{"role": "user", "content": "hi"}], "input": "hi", "max_tokens": 5}
        del body["input" if path != "/v1/responses" else "messages"]
        body |= {"stream": False} if path == "/api/chat" else {}
        body = {key: each for key, each in body.items() if key != "max_tokens" or path == "/v1/messages"}
        status, found, _ = embedder.ask("POST", path, body)
        assert status == 400 and "is an embedding model" in str(found["error"]), found
    with pytest.raises(openai.BadRequestError, match=r"shipped is no embedding model: .*Qwen3-Embedding"):
        client.embeddings.create(model="shipped", input="a")
    assert server.metric("http_responses_total", path="/v1/embeddings", status="400") >= 1  # others ask it, too


def test_what_would_not_be_honoured_is_refused() -> None:
    model = ServedModel(NAME, vocab_size=272)

    def refusal(read: Callable[[bytes, ServedModel], Any], **fields: Any) -> HTTPError:
        with pytest.raises(HTTPError) as refused:
            read(json.dumps({"model": NAME, "input": "a", **fields}).encode(), model)
        return refused.value

    assert refusal(embedding_request, encoding_format="int8").message.startswith("encoding_format is 'int8'")
    assert refusal(embedding_request, deadline=1.0).code == "unknown_parameter"
    assert refusal(embedding_request, truncate_prompt_tokens=5).param == "truncate_prompt_tokens"
    assert refusal(embedding_request, input=[3, 272]).message.startswith("input has the token id 272")
    assert refusal(embedding_request, input=["a", 7]).param == "input"
    assert refusal(embedding_request, input=[]).message.startswith("input is []: expected text, token ids")
    assert refusal(embedding_request, input=None).message.startswith("input is missing")
    assert refusal(embedding_request, input=["a"] * (MOST_INPUTS + 1)).message.endswith(f"at most {MOST_INPUTS}")
    assert refusal(ollama_request, truncate="yes").message.startswith("truncate is 'yes'")
    assert refusal(ollama_prompt, input="x").message == "prompt is missing: expected text"
    assert refusal(ollama_prompt, prompt="x", input="x").param == "prompt"
    assert refusal(ollama_request, options={"temperature": 1}).param == "options.temperature"
    assert refusal(ollama_request, encoding_format="float").param == "encoding_format"
