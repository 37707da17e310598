"""Requests for embeddings to `/v1/embeddings`, and to ollama's `/api/embed` and `/api/embeddings`."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
from starlette.responses import JSONResponse

from edgellm.embedding import EmbeddingRequest
from edgellm.http.asgi import answer_headers
from edgellm.http.completions import prompt_list
from edgellm.http.errors import refused, unserved
from edgellm.http.fields import HARMLESS, Fields, ServedModel, wrong
from edgellm.http.ollama import LOADING

#: Texts of one request, as OpenAI's API has it.
MOST_INPUTS = 2048
_FIELDS = {"": "input", "texts": "input", "dimensions": "dimensions", "prompt": "prompt_name"}


@dataclass(frozen=True)
class ParsedEmbedding:
    """What is to be embedded, the name of the model, and what makes the answer's object of the embeddings [N, D], the
    number of tokens and the seconds that it took."""

    request: EmbeddingRequest
    model: str
    write: Callable[[ParsedEmbedding, np.ndarray, int, float], dict[str, Any]]
    ignored: tuple[str, ...] = ()
    #: What errors call fields, with the names that the client knows them by.
    fields: ClassVar[Mapping[str, str]] = _FIELDS

    def answer(self, vectors: np.ndarray, tokens: int, seconds: float) -> JSONResponse:
        """The answer, which may take a while to be written."""
        return JSONResponse(self.write(self, vectors, tokens, seconds), headers=answer_headers(self.ignored))


def embedding_request(body: bytes, model: ServedModel) -> ParsedEmbedding:
    """A request to `/v1/embeddings`. Raises HTTPError."""
    fields = Fields(body, model)
    form = fields.take("encoding_format")
    if form not in (None, "float", "base64"):
        raise wrong("encoding_format", form, "'float' or 'base64'")
    return _parsed(fields, partial(_data, in_base64=form == "base64"))


def ollama_request(body: bytes, model: ServedModel) -> ParsedEmbedding:
    """A request to `/api/embed`. Raises HTTPError."""
    fields = Fields(body, model)
    if fields.take("truncate", bool):  # which changes nothing for texts that fit; no other is answered
        fields.ignored.append("truncate")
    return _ollama_parsed(fields, _embeddings)


def _ollama_parsed(fields: Fields, write: Callable[..., dict[str, Any]]) -> ParsedEmbedding:
    for name, value in (fields.take("options", dict) or {}).items():
        if value is not None and name not in LOADING:
            raise unserved(f"options.{name}", "nothing is drawn for an embedding")
        fields.ignored += [f"options.{name}"] if value is not None else []
    return _parsed(fields, write)


def ollama_prompt(body: bytes, model: ServedModel) -> ParsedEmbedding:
    """A request to `/api/embeddings`, of ollama's earlier clients: one text, one embedding. Raises HTTPError."""
    fields = Fields(body, model)
    prompt = fields.take("prompt", str)
    if prompt is None:
        raise wrong("prompt", prompt, "text")
    fields.put("input", prompt, "prompt")
    return _ollama_parsed(fields, lambda _, vectors, tokens, seconds: {"embedding": vectors[0].tolist()})


#: What reads requests, by path.
EMBEDDINGS = {"/v1/embeddings": embedding_request, "/api/embed": ollama_request, "/api/embeddings": ollama_prompt}


def _parsed(fields: Fields, write: Callable[..., dict[str, Any]]) -> ParsedEmbedding:
    """What both have. HTTPError for a field that is left, too."""
    name, prompt, dimensions = fields.take("model"), fields.take("prompt_name", str), fields.take("dimensions", int)
    adapter = fields.model.adapter_of(name)
    texts = prompt_list(fields.take("input"), fields.model, "input")
    fields.ignore(*HARMLESS)
    fields.end()
    if len(texts) > MOST_INPUTS:
        raise refused("input", f"input has {len(texts)} texts: expected at most {MOST_INPUTS}")
    request = EmbeddingRequest(texts, dimensions, adapter, prompt)
    return ParsedEmbedding(request, name, write, tuple(fields.ignored))


def _data(asked: ParsedEmbedding, vectors: np.ndarray, tokens: int, seconds: float, in_base64: bool) -> dict[str, Any]:
    """OpenAI's object: numbers, or the bytes of float32, the lowest first."""
    written: Sequence[Any] = vectors.tolist()
    if in_base64:
        written = [base64.b64encode(each.astype("<f4").tobytes()).decode() for each in vectors]
    data = [{"object": "embedding", "index": index, "embedding": each} for index, each in enumerate(written)]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": asked.model, "usage": usage}


def _embeddings(asked: ParsedEmbedding, vectors: np.ndarray, tokens: int, seconds: float) -> dict[str, Any]:
    """ollama's object; durations are in nanoseconds."""
    took = {"total_duration": round(seconds * 10**9), "load_duration": 0}
    return {"model": asked.model, "embeddings": vectors.tolist(), **took, "prompt_eval_count": tokens}
