"""The encoders of a model, opened, and what tokenizers have to know of them."""

from __future__ import annotations

from pathlib import Path

from edgellm.defaults import ModelDefaults
from edgellm.engines.backends.base import Backend
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.errors import EngineDirectoryError
from edgellm.media.encoders import MediaEncoder, MediaEncoders
from edgellm.media.image_text import TextOfParts, image_writer, part_texts
from edgellm.metrics import Metrics
from edgellm.text.tokenizer import Tokenizer


def open_encoders(
    backend: Backend,
    directory: EngineDirectory,
    vision_engines: EngineDirectory | None,
    metrics: Metrics,
    tokenizer: Tokenizer,
) -> MediaEncoders:
    """The encoders of a model, that of images with the engines of the directory `vision_engines` (None: there is none),
    whose images are written into prompts as the `tokenizer` has it.

    On a GPU they open at once, since memory is planned as a whole there.
    """
    encoders = MediaEncoders((), directory.config, directory.path, backend)
    if vision_engines is not None and vision_engines.vision is not None:
        vision = vision_engines.vision.config
        texts = TextOfParts(vision, tokenizer) if vision.family in part_texts() else None

        def opened_images() -> MediaEncoder:
            from edgellm.media.vision import VisionEncoder

            return VisionEncoder(backend, directory, vision_engines, metrics, texts)

        encoders.add(directory.config.image_kind(vision.image_token_id), opened_images)
        if "video" in directory.config.media:

            def opened_video() -> MediaEncoder:
                from edgellm.media.vision import VideoEncoder

                return VideoEncoder(encoders.encoder("image"), directory, vision_engines, tokenizer)

            encoders.add(directory.config.media["video"], opened_video)
    if "audio" in directory.config.media:

        def opened_audio() -> MediaEncoder:
            from edgellm.media.audio import AudioEncoder

            return AudioEncoder(backend, directory, metrics)

        encoders.add(directory.config.media["audio"], opened_audio)
    return encoders


def open_texts(directory: EngineDirectory, vision_engines: EngineDirectory | None) -> tuple[Tokenizer, ModelDefaults]:
    """The tokenizer of a directory, which writes images where there are `vision_engines`, and the model's defaults;
    EngineDirectoryError for files that are wrong."""
    tokenizer = Tokenizer.from_directory(directory.path, directory.config.vocab_size)
    if vision_engines is not None:
        kinds = ("image", "video") if "video" in directory.config.media else ("image",)
        tokenizer.media, tokenizer.write_images = kinds, image_writer(vision_engines, tokenizer)
        tokenizer.begins_prompts = not directory.config.prefix_attention
    if "audio" in directory.config.media:
        tokenizer.media = (*tokenizer.media, "audio")
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
