"""A GGUF file as a build takes models and drafts: a folder with the files that are published with checkpoints, made
from its metadata, and links to its weights."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from edgellm.engines.checkpoints.weight_files import ENCODER_FILE, GGUF_FILE, is_gguf_file
from edgellm.engines.directories.engine_directory import PREPROCESSOR_FILES, published_file_names
from edgellm.engines.directories.engine_parts import TEMPLATE_FOLDER
from edgellm.engines.errors import BuildError, CheckpointError, EngineDirectoryError, UnsupportedModelError, explained
from edgellm.engines.families.embedding import LAST_TOKEN, MODULES, MODULES_FILE, POOLING_FILE
from edgellm.engines.families.fields import TAKE_PUBLISHED
from edgellm.engines.formats.gguf_file import GgufFile, open_split
from edgellm.engines.formats.small_files import read_tokenizer
from edgellm.engines.gguf.architectures import TABLE, check_draft
from edgellm.engines.gguf.encoders import image_config, is_encoder_of, takes_images
from edgellm.engines.gguf.metadata import ADVICE, Metadata
from edgellm.engines.gguf.model_config import model_config
from edgellm.engines.gguf.tokenizer import tokenizer_config, tokenizer_json, used_tokens

#: What begins the names of published files that go with a tokenizer.
_OF_TOKENIZERS = ("tokenizer", "special_tokens", "chat_template", TEMPLATE_FOLDER)
#: What `general.sampling` calls what `generation_config.json` may say of sampling.
_SAMPLING: dict[str, str] = TABLE["sampling"]
#: The pooling of an embedding model by llama.cpp's number.
_LAST = 3
#: What stands for an encoder where there is to be none.
NO_ENCODER = "none"


def checkpoint_folder(
    path: Path, tokenizer: Path | None = None, mmproj: str | Path | None = None
) -> AbstractContextManager[Path]:
    """The folder of a checkpoint for a GGUF file, as long as the context lasts; any other path as it is.

    The files of a published `tokenizer` in a folder stand for the file's own. `mmproj` is the file of its vision
    encoder, or `NO_ENCODER`; None: what `encoder_beside` finds. Errors about what lies in the folder name the file.
    Raises BuildError where the folder cannot be written, or a tokenizer or an encoder is given for another path;
    CheckpointError, and UnsupportedModelError.
    """
    if not is_gguf_file(path):
        for option, given in (("tokenizer", tokenizer), ("mmproj", mmproj)):
            if given is not None:
                files = "the tokenizer's files" if option == "tokenizer" else "the vision encoder"
                raise BuildError(f"--{option} is given, but {path} is no GGUF file: put {files} into it")
        return nullcontext(path)
    found = encoder_beside(path) if mmproj is None else None if str(mmproj) == NO_ENCODER else Path(mmproj)
    return _made_folder(path, lambda folder: _write_model(path, folder, tokenizer, found))


def draft_folder(path: str | Path | None) -> AbstractContextManager[str | Path | None]:
    """As `checkpoint_folder`, for the GGUF file of a draft."""
    if path is None or not is_gguf_file(Path(path)):
        return nullcontext(path)
    file = Path(path)
    return _made_folder(file, lambda folder: _write_draft(file, folder))


def encoder_beside(path: Path) -> Path | None:
    """The file mmproj*.gguf beside a model's GGUF file that is its vision encoder; None where there is none, or the
    model is not known to take images. Raises BuildError where there are several, and CheckpointError."""
    found = sorted(path.parent.glob("mmproj*.gguf"))
    if not found or not takes_images(model := read_metadata(path)):
        return None
    fitting = [each for each in found if is_encoder_of(read_metadata(each), model)]
    if len(fitting) > 1:
        raise several_encoders(path, [str(each) for each in fitting])
    return fitting[0] if fitting else None


def several_encoders(model: Path, encoders: Sequence[str]) -> BuildError:
    return BuildError(
        f"beside {model} are {len(encoders)} vision encoders: {', '.join(encoders)}. Name one, as in --mmproj "
        f"{encoders[0]}, or take --mmproj {NO_ENCODER} for texts alone"
    )


def read_metadata(path: Path) -> Metadata:
    """What a GGUF file says. Raises CheckpointError."""
    with _opened(path) as files:
        return Metadata(files)


@contextmanager
def _made_folder(path: Path, write: Callable[[Path], None]) -> Iterator[Path]:
    with ExitStack() as made:
        words = f"{path} cannot be opened by way of a folder in {tempfile.gettempdir()}"
        advice = ". Make room there, or name another folder in TMPDIR"
        with explained(words, BuildError, advice, names_file=True):
            folder = Path(made.enter_context(tempfile.TemporaryDirectory(prefix="edgellm-gguf-")))
            write(folder)
        try:
            yield folder
        except (BuildError, CheckpointError, EngineDirectoryError, UnsupportedModelError) as error:
            message = str(error).replace(TAKE_PUBLISHED, ADVICE)
            for link in folder.glob("*.gguf"):
                message = message.replace(str(link), str(link.readlink()))
            message = message.replace(str(folder), str(path))
            raise type(error)(f"{path}, as {message}" if message.startswith("config.json") else message) from error


def _write_model(path: Path, folder: Path, tokenizer: Path | None, encoder: Path | None) -> None:
    with _opened(path) as files:
        metadata = Metadata(files)
        check_draft(metadata, False)
        made: dict[str, Any] = {"config.json": model_config(files), **_pooling_files(metadata)}
        if encoder is not None:
            texts = made["config.json"]
            made["config.json"], made[PREPROCESSOR_FILES[0]] = image_config(texts, metadata, read_metadata(encoder))
        if tokenizer is None:
            made |= {"tokenizer.json": tokenizer_json(metadata), "tokenizer_config.json": tokenizer_config(metadata)}
        else:
            _bring_along(tokenizer, metadata, folder)
        sampling = {name: metadata.number(f"general.sampling.{key}") for key, name in _SAMPLING.items()}
        found = {name: value for name, value in sampling.items() if value is not None}
        generation: dict[str, Any] = {"do_sample": True} | found if found else {}
        if suppressed := metadata.entries("tokenizer.ggml.suppress_tokens", int, "whole numbers"):
            generation["suppress_tokens"] = suppressed
        made |= {"generation_config.json": generation} if generation else {}
    _fill(folder, made, files)
    if encoder is not None:
        (folder / ENCODER_FILE).symlink_to(os.path.realpath(encoder))


def _pooling_files(metadata: Metadata) -> dict[str, Any]:
    """What says of an embedding model how a text becomes a vector; nothing of others. Raises UnsupportedModelError."""
    found = metadata.whole("pooling_type") or 0
    if found not in (0, _LAST):
        name = f"'{metadata.architecture}.pooling_type'"
        raise UnsupportedModelError(f"{metadata.path}: {name} is {found}, supported is {_LAST}, the last token's")
    return {MODULES_FILE: MODULES, POOLING_FILE: LAST_TOKEN} if found else {}


def _write_draft(path: Path, folder: Path) -> None:
    with _opened(path) as files:
        check_draft(Metadata(files), True)
        _fill(folder, {"config.json": model_config(files)}, files)


@contextmanager
def _opened(path: Path) -> Iterator[list[GgufFile]]:
    files = open_split(path)
    try:
        yield files
    finally:
        for file in files:
            file.close()


def _fill(folder: Path, made: Mapping[str, Any], files: Sequence[GgufFile]) -> None:
    for name, values in made.items():
        indent = None if name == "tokenizer.json" else 1  # a vocabulary takes a second with it
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(values, ensure_ascii=False, indent=indent), encoding="utf-8")
    for number, file in enumerate(files, 1):
        link = GGUF_FILE if len(files) == 1 else f"model-{number:05}-of-{len(files):05}.gguf"
        (folder / link).symlink_to(os.path.realpath(file.path))


def _bring_along(tokenizer: Path, metadata: Metadata, folder: Path) -> None:
    """Link to the files of a published tokenizer; CheckpointError where its tokens are not those of the file."""
    ids = read_tokenizer(tokenizer / "tokenizer.json", CheckpointError).get_vocab(with_added_tokens=True)
    for index, text in used_tokens(metadata):
        if ids.get(text) != index:
            raise CheckpointError(
                f"{tokenizer / 'tokenizer.json'} has the id {ids.get(text)} for the token {text!r:.80}, which is "
                f"{index} in {metadata.path}. Take the tokenizer of this very model"
            )
    for name in published_file_names(tokenizer):
        if name.startswith(_OF_TOKENIZERS):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).symlink_to(os.path.realpath(tokenizer / name))
