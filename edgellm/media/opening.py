"""The encoders of a model, opened, and what tokenizers have to know of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from edgellm.defaults import ModelDefaults
from edgellm.engines.backends.base import Backend
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.errors import EngineDirectoryError
from edgellm.media.encoders import LazyEncoder, MediaEncoder, MediaEncoders
from edgellm.metrics import Metrics
from edgellm.text.tokenizer import Tokenizer


def open_encoders(
    backend: Backend,
    directory: EngineDirectory,
    vision_engines: EngineDirectory | None,
    metrics: Metrics,
    tokenizer: Tokenizer,
) -> MediaEncoders:
    """The encoders of a model, that of images with the engines of the directory `vision_engines` (None: there is none).

    On a GPU they open at once, since memory is planned as a whole there.
    """
    encoders: list[MediaEncoder] = []
    if vision_engines is not None and vision_engines.vision is not None:

        def opened() -> MediaEncoder:
            from edgellm.media.vision import VisionEncoder

            return VisionEncoder(backend, directory, vision_engines, metrics, partial(ids_of_tokens, tokenizer))

        kind = directory.config.image_kind(vision_engines.vision.config.image_token_id)
        encoders.append(LazyEncoder(kind, opened, backend) if backend.computes_at_once else opened())
    return MediaEncoders(encoders, directory.config, directory.path)


def ids_of_tokens(tokenizer: Tokenizer, texts: Sequence[str]) -> list[int]:
    """The ids of tokens that the processor of a model writes among those of images; EngineDirectoryError for those that
    the tokenizer lacks."""
    found = [tokenizer.token_to_id(text) for text in texts]
    missing = [text for text, token in zip(texts, found, strict=True) if token is None]
    if missing:
        raise EngineDirectoryError(
            f"the tokenizer has not the tokens {', '.join(missing)}, which the model's processor writes for images: "
            "take tokenizer.json as it was published"
        )
    return [token for token in found if token is not None]


def image_writer(directory: EngineDirectory, tokenizer: Tokenizer) -> Callable[[str], str]:
    """What makes of a text, a rendered chat template or a raw prompt, one that has an image's token for each image.

    Templates of Gemma 3 write the token before an image alone, for which the published processor writes two line feeds,
    that token, those of the image, the one behind it, and two line feeds: they become tokens together with the text
    around them. One that is followed by the image's token is left as it is. Raises EngineDirectoryError where the
    tokenizer lacks these tokens.
    """
    vision = directory.vision
    if vision is None or vision.config.family != "gemma3":
        return str
    ids = (vision.config.vision_start_token_id, vision.config.image_token_id, vision.config.vision_end_token_id)
    before, image, behind = (None if each is None else tokenizer.id_to_token(each) for each in ids)
    if before is None or image is None or behind is None:
        raise EngineDirectoryError(
            f"{directory.path}: the tokenizer has not the tokens {', '.join(map(str, ids))}, which stand for the "
            "beginning of an image, for a part of it and for its end: take tokenizer.json as it was published"
        )
    marker = re.compile(f"{re.escape(before)}(?!{re.escape(image)})")
    written = f"\n\n{before}{image}{behind}\n\n"
    return lambda text: marker.sub(lambda match: written, text)


def open_texts(directory: EngineDirectory, vision_engines: EngineDirectory | None) -> tuple[Tokenizer, ModelDefaults]:
    """The tokenizer of a directory, which writes images where there are `vision_engines`, and the model's defaults;
    EngineDirectoryError for files that are wrong."""
    tokenizer = Tokenizer.from_directory(directory.path, directory.config.vocab_size)
    if vision_engines is not None:
        tokenizer.media, tokenizer.write_images = ("image",), image_writer(vision_engines, tokenizer)
    return tokenizer, ModelDefaults(directory.path)


def vision_directory(directory: EngineDirectory, path: str | Path | None) -> EngineDirectory | None:
    """The directory with the vision engines, None without; EngineDirectoryError where `path` has none."""
    found = directory if path is None else EngineDirectory.open(Path(path))
    if found.vision is not None and found.limits.image_rows:
        rows, hidden = found.vision.config.out_hidden_size, directory.config.hidden_size
        if rows != hidden:
            raise EngineDirectoryError(
                f"the vision model of {found.path} makes embeddings of {rows}, the language model of {directory.path} "
                f"has a hidden size of {hidden}: take its own"
            )
        return found
    if path is not None:
        raise EngineDirectoryError(f"{path} has no vision model: leave multimodal_engine_directory out, or build one")
    return None
