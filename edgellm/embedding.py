"""Embeddings: a text as a vector, the normalised hidden state of its last token, of models that are made for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from edgellm import errors
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.families.embedding import PROMPTS_FILE
from edgellm.text.tokenizer import Tokenizer, read_json_object

#: A text, or token ids as they are.
Embeddable = str | Sequence[int]
#: An array [N, D] float32; of `AsyncLLM` what gives it when it is awaited.
Vectors = TypeVar("Vectors")
_LEAST_NORM = 1e-12


@dataclass(frozen=True)
class EmbeddingRequest:
    """What is to be embedded: `texts`, the first so many `dimensions` (None: all), with a LoRA `adapter` (None: without
    one), behind the published `prompt` of that name (None: the checkpoint's default one, "": none)."""

    texts: Sequence[Embeddable]
    dimensions: int | None = None
    adapter: str | None = None
    prompt: str | None = None

    @classmethod
    def of(cls, texts: Embeddable | Sequence[Embeddable], *more: object) -> EmbeddingRequest:
        """A request for one text, or several; see `Embedding.embed`."""
        errors.require_kind(isinstance(texts, (str, list, tuple)), "texts", texts, "a text, or a list of texts")
        is_one = isinstance(texts, str) or (len(texts) > 0 and all(errors.is_whole(each, 0) for each in texts))
        return cls([texts] if is_one else texts, *more)  # type: ignore[arg-type, list-item]

    def check(self, directory: EngineDirectory) -> None:
        """RequestError for a model that embeds nothing, and for what no text or dimension is."""
        require_embeddings(directory)
        errors.require(len(self.texts) > 0, "texts", self.texts, "at least one text")
        for number, each in enumerate(self.texts):
            is_ids = isinstance(each, (list, tuple)) and all(errors.is_whole(token, 0) for token in each)
            errors.require_kind(isinstance(each, str) or is_ids, f"texts[{number}]", each, "a text, or token ids")
        size, found = directory.config.hidden_size, self.dimensions
        fits = found is None or errors.is_whole(found, 1, size)
        errors.require(fits, "dimensions", found, f"a whole number from 1 to {size}, the model's own")

    def token_ids(self, directory: EngineDirectory, tokenizer: Tokenizer) -> list[list[int]]:
        """The tokens of each text, with what the tokenizer puts around one. Any thread may ask.

        Raises what `check` does, RequestError for an unknown prompt or token, and ContextError for a text of more
        tokens than the context has.
        """
        self.check(directory)
        vocabulary, capacity = directory.config.vocab_size, directory.limits.kv_capacity
        before, found = self._prompt(directory), []
        for number, each in enumerate(self.texts):
            if isinstance(each, str):
                try:
                    ids, least = tokenizer.encode(before + each, capacity=capacity + 1), ""
                except errors.ContextError as error:  # far too long to be encoded
                    ids, least = [0] * (error.needed - 1), "at least "
            else:
                errors.require(
                    not self.prompt, "prompt", self.prompt, "none beside token ids, which are taken as they are"
                )
                ids, least = list(each), ""
                wrong = next((token for token in ids if token >= vocabulary), 0)
                errors.require(not wrong, f"texts[{number}]", wrong, f"token ids from 0 to {vocabulary - 1}")
            errors.require(len(ids) > 0, f"texts[{number}]", each, "at least one token")
            if len(ids) > capacity:
                raise errors.ContextError(
                    f"text {number + 1} has {least}{len(ids)} tokens and the context {capacity}: embed it in parts, or "
                    "build with a larger --kv-capacity",
                    len(ids),
                    capacity,
                )
            found.append(ids)
        return found

    def vector(self, state: np.ndarray) -> np.ndarray:
        """The embedding [D] float32 by a text's last hidden state [H] float32: cut, and of length 1. Raises EngineError
        for one that is not finite."""
        cut = state[: self.dimensions].astype(np.float64)
        length = float(np.sqrt(np.sum(cut * cut)))
        if not np.isfinite(length):
            raise errors.EngineError(
                "the hidden state of a text is infinite or NaN: build the model for bfloat16 (--dtype bfloat16), which "
                "has the range of float32"
            )
        return (cut / max(length, _LEAST_NORM)).astype(np.float32)

    def _prompt(self, directory: EngineDirectory) -> str:
        """What stands before each text, as the checkpoint says."""
        values = read_json_object(directory.path / PROMPTS_FILE)
        prompts: dict[str, Any] = found if isinstance(found := values.get("prompts"), dict) else {}
        name = values.get("default_prompt_name") if self.prompt is None else self.prompt
        if not name:
            return ""
        prompt = prompts.get(name) if isinstance(name, str) else None
        if not isinstance(prompt, str):
            known = errors.did_you_mean(str(name), list(prompts)) if prompts else ": the checkpoint has no prompts"
            raise errors.RequestError(f"prompt is {errors.shown(name)}{known}")
        return prompt


class Embedding(Generic[Vectors]):
    """What `LLM` and `AsyncLLM` have for embedding models."""

    def embed(
        self,
        texts: Embeddable | Sequence[Embeddable],
        dimensions: int | None = None,
        adapter: str | None = None,
        *,
        prompt: str | None = None,
    ) -> Vectors:
        """Embeddings [N, D] float32 of N texts, or lists of token ids, each of length 1: what is similar has a large
        product. Only a model whose checkpoint says so gives them, and it gives nothing else.

        With `dimensions` D of the first of them, for models that were trained for that (Matryoshka). `prompt` is one of
        those that the checkpoint was published with, by its name ("query"); it stands before each text. Texts are
        computed one at a time, in turn with those of others who ask: no vector depends on what is beside it. Raises
        RequestError, ContextError for a text that is longer than the context, AdapterError.
        """
        return self._embedded(EmbeddingRequest.of(texts, dimensions, adapter, prompt))

    def _embedded(self, request: EmbeddingRequest) -> Vectors:
        raise NotImplementedError


def require_embeddings(directory: EngineDirectory) -> None:
    """RequestError for a model that embeds nothing."""
    if not directory.config.is_embedding:
        raise errors.RequestError(
            f"{directory.name} is no embedding model: its checkpoint does not say how hidden states become a vector. "
            "Open one that does, such as Qwen/Qwen3-Embedding-0.6B"
        )


def refusal_to_answer(directory: EngineDirectory) -> errors.RequestError:
    """The error for who asks an embedding model for an answer."""
    return errors.RequestError(
        f"{directory.name} is an embedding model: it makes vectors of texts (LLM.embed, edgellm embed, /v1/embeddings) "
        "and gives no answers. Open another model for these"
    )
