"""`edgellm embed`: texts as vectors, of an embedding model."""

from __future__ import annotations

import json

import typer

from edgellm.commands import options
from edgellm.commands.models import chosen_adapters, open_model_with
from edgellm.commands.settings import chosen_settings
from edgellm.commands.table import argument, option, takes_options
from edgellm.errors import RequestError
from edgellm.kernels.user_paths import user_path


class EmbedOptions(
    options.ModelOption, options.AdapterOptions, options.ComputingOptions, options.LogOptions, panel="Embeddings"
):
    words: list[str] | None = argument(
        "The engine directory (as --model takes it), unless --model names it, then texts [default: the lines of "
        "standard input].",
        metavar="[ENGINE_DIR] [TEXT]...",
        rich_help_panel="Arguments",
        is_free=True,
    )
    dimensions: int | None = option("The first N alone, of length 1 again [default: all].", metavar="N", least=1)
    prompt: str | None = option(
        "Begin each text with the published prompt of this name, as in query [default: the checkpoint's default, or "
        "none].",
        metavar="NAME",
        is_free=True,
    )


@takes_options
def embed(given: EmbedOptions) -> None:
    """Make vectors of texts, or of the lines of standard input, one JSON object a line: what is similar has a large
    product.

    Example: edgellm embed qwen3-embedding "Where is the cup?" --prompt query
    """
    texts = list(given.words or ())
    if not given.model:
        if not texts:
            raise typer.BadParameter("missing: name an embedding model", param_hint="ENGINE_DIR")
        given.engine_directory = user_path(texts.pop(0))
    settings = chosen_settings(given)
    if not texts:
        read, _ = options.read_source(None, "as arguments", "TEXT")
        texts = [line for line in read.splitlines() if line.strip()]
    if not texts:
        raise RequestError("there is no text: expected at least one line that is not empty")
    with open_model_with(settings, None, chosen_adapters(settings)) as llm:
        vectors = llm.embed(texts, given.dimensions, settings.adapter, prompt=given.prompt)
    for text, vector in zip(texts, vectors, strict=True):
        print(json.dumps({"text": text, "embedding": vector.tolist()}, ensure_ascii=False))
