"""`edgellm embed`: texts as vectors, of an embedding model."""

from __future__ import annotations

import json
from pathlib import Path

from edgellm.commands import options
from edgellm.commands.models import open_model_with
from edgellm.commands.settings import chosen_settings
from edgellm.commands.table import argument, option, takes_options
from edgellm.errors import RequestError


class EmbedOptions(options.AdapterOptions, options.ComputingOptions, options.LogOptions, panel="Embeddings"):
    engine_directory: Path = argument(
        f"{options.MODEL}, of an embedding model.", ..., metavar="ENGINE_DIR", rich_help_panel="Arguments"
    )
    texts: list[str] | None = argument(
        "Texts [default: the lines of standard input].", metavar="TEXT", rich_help_panel="Arguments", is_free=True
    )
    dimensions: int | None = option("The first N alone, of length 1 again [default: all].", metavar="N", least=1)
    prompt: str | None = option(
        "Begin each text with the published prompt of this name, as in query [default: the checkpoint's default, or "
        "none].",
        metavar="NAME",
        is_free=True,
    )

    def chosen_model(self) -> Path:
        """The model, which has no default: the shipped one embeds nothing."""
        return self.engine_directory


@takes_options
def embed(given: EmbedOptions) -> None:
    """Make vectors of texts, or of the lines of standard input, one JSON object a line: what is similar has a large
    product.

    Example: edgellm embed qwen3-embedding "Where is the cup?" --prompt query
    """
    settings = chosen_settings(given)
    if given.texts:
        texts = given.texts
    else:
        read, _ = options.read_source(None, "as arguments", "TEXT")
        texts = [line for line in read.splitlines() if line.strip()]
    if not texts:
        raise RequestError("there is no text: expected at least one line that is not empty")
    adapters = settings.adapters if settings.adapter is not None or settings.adapters else None
    with open_model_with(settings, None, adapters) as llm:
        vectors = llm.embed(texts, given.dimensions, settings.adapter, prompt=given.prompt)
    for text, vector in zip(texts, vectors, strict=True):
        print(json.dumps({"text": text, "embedding": vector.tolist()}, ensure_ascii=False))
