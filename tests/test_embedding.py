"""Embeddings in Python: those of transformers and sentence-transformers, and what is refused."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from embedding_models import TOLERANCE, EmbeddingModel, normalised
from golden_files import largest_difference

from edgellm import LLM
from edgellm.asynchronous import AsyncLLM
from edgellm.embedding import EmbeddingRequest
from edgellm.errors import ContextError, EngineError, RequestError

Models = Callable[[str], EmbeddingModel]


@pytest.fixture(scope="module")
def llm(embedding_model: Models) -> Iterator[LLM]:
    with LLM(embedding_model("published").engines, backend="numpy") as opened:
        yield opened


@pytest.mark.parametrize("name", ["published", "newer"])
def test_texts_are_embedded_as_sentence_transformers_does(embedding_model: Models, name: str) -> None:
    model = embedding_model(name)
    with LLM(model.engines, backend="numpy") as llm:
        found, queries = llm.embed(model.texts), llm.embed(model.texts, prompt="query")
    assert found.dtype == np.float32 and found.shape == (len(model.texts), 32)
    np.testing.assert_allclose(found, model.expected["embeddings"], atol=TOLERANCE)
    np.testing.assert_allclose(queries, model.expected["queries"], atol=TOLERANCE)
    assert np.abs(found - queries).max() > 0.1


def test_every_length_gives_the_last_hidden_state_of_transformers(embedding_model: Models, llm: LLM) -> None:
    expected = embedding_model("published").expected
    ids = expected["token_ids"].tolist()
    found = llm.embed([ids[:length] for length in range(1, len(ids) + 1)])
    assert largest_difference(found, expected["last_states"]) <= TOLERANCE
    assert np.array_equal(llm.embed(ids), found[-1:])  # one text of token ids


def test_the_first_dimensions_are_of_length_1_again(embedding_model: Models, llm: LLM) -> None:
    texts, whole = embedding_model("published").texts, embedding_model("published").expected["embeddings"]
    found = llm.embed(texts, 8)
    np.testing.assert_allclose(found, normalised(whole[:, :8]), atol=TOLERANCE)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-6)


def test_no_vector_depends_on_what_is_beside_it_or_before(embedding_model: Models, llm: LLM) -> None:
    texts = embedding_model("published").texts
    alone = [llm.embed(text) for text in texts]
    found: list[Any] = [None] * 4

    def embed(index: int) -> None:
        found[index] = llm.embed(texts[::-1] * (index + 1))

    threads = [threading.Thread(target=embed, args=(index,)) for index in range(len(found))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, vectors in enumerate(found):
        assert np.array_equal(vectors, np.concatenate(alone[::-1] * (index + 1)))


def test_a_long_request_lets_others_between_its_texts(embedding_model: Models) -> None:
    async def ask() -> list[str]:
        ended: list[str] = []
        async with AsyncLLM(embedding_model("published").engines, backend="numpy") as llm:

            async def embed(name: str, count: int) -> None:
                vectors = await llm.embed(["The red cup."] * count)
                assert np.array_equal(vectors, np.repeat(vectors[:1], count, axis=0))
                ended.append(name)

            long = asyncio.create_task(embed("long", 200))
            await asyncio.sleep(0.005)
            await embed("short", 2)
            await long
        return ended

    assert asyncio.run(ask()) == ["short", "long"]


def test_what_is_no_text_or_dimension_is_refused(llm: LLM) -> None:
    refused: list[tuple[Any, dict[str, Any], str]] = [
        ([], {}, r"texts is \[\]: expected at least one text"),
        (7, {}, "texts is a int: expected a text, or a list of texts"),
        (["a", None], {}, r"texts\[1\] is a NoneType: expected a text, or token ids"),
        ([[1], [272]], {}, r"texts\[1\] is 272: expected token ids from 0 to 271"),
        ([[]], {}, r"texts\[0\] is \[\]: expected at least one token"),
        ("a", {"dimensions": 33}, "dimensions is 33: expected a whole number from 1 to 32"),
        ("a", {"dimensions": True}, "dimensions is True"),
        ("a", {"prompt": "qery"}, "prompt is 'qery': did you mean query"),
        ("a", {"prompt": ["query"]}, "prompt is"),
        ([[1]], {"prompt": "query"}, "prompt is 'query': expected none beside token ids"),
        ("a", {"adapter": "json"}, "json"),
    ]
    for texts, options, message in refused:
        with pytest.raises(Exception, match=message):
            llm.embed(texts, **options)
    before = llm.metrics()
    for text in ("x" * 160, "x" * 100_000, [1] * 161):
        with pytest.raises(ContextError, match="tokens and the context 160: embed it in parts"):
            llm.embed([text])
    assert llm.embed("x" * 159).shape == (1, 32)  # and the token that ends it
    counted = llm.metrics()
    assert counted["embedding"]["texts"] == before["embedding"]["texts"] + 1
    assert counted["embedding"]["tokens"] == before["embedding"]["tokens"] + 160
    assert counted["requests"]["refused"] == before["requests"]["refused"] + 3


def test_a_model_does_what_it_is_for(llm: LLM, tiny_engines: Path) -> None:
    for ask in (llm.chat, llm.generate, llm.stream):
        with pytest.raises(RequestError, match=r"is an embedding model: it makes vectors .*gives no answers"):
            ask("hello")
    with LLM(tiny_engines, backend="numpy") as chatting, pytest.raises(RequestError, match="is no embedding model"):
        chatting.embed("hello")


def test_a_state_that_is_no_number_is_an_error() -> None:
    with pytest.raises(EngineError, match="infinite or NaN"):
        EmbeddingRequest(["a"]).vector(np.asarray([1, np.nan], np.float32))
    assert np.array_equal(EmbeddingRequest(["a"]).vector(np.zeros(3, np.float32)), np.zeros(3, np.float32))
