"""A GGUF file as a build takes models: a folder with the files that are published with checkpoints, made from its
metadata, and links to its weights."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from edgellm.engines.checkpoints.weight_files import GGUF_FILE, is_gguf_file
from edgellm.engines.directories.engine_directory import published_file_names
from edgellm.engines.directories.engine_parts import TEMPLATE_FOLDER
from edgellm.engines.errors import BuildError, CheckpointError, EngineDirectoryError
from edgellm.engines.formats.gguf_file import open_split
from edgellm.engines.formats.small_files import read_tokenizer
from edgellm.engines.gguf.architectures import model_config
from edgellm.engines.gguf.metadata import Metadata
from edgellm.engines.gguf.tokenizer import tokenizer_config, tokenizer_json, used_tokens

#: What begins the names of published files that go with a tokenizer.
_OF_TOKENIZERS = ("tokenizer", "special_tokens", "chat_template", TEMPLATE_FOLDER)
#: What `general.sampling` calls what `generation_config.json` may say of sampling.
_SAMPLING = {
    **{"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"},
    "penalty_repeat": "repetition_penalty",
}


@contextmanager
def checkpoint_folder(path: Path, tokenizer: Path | None = None) -> Iterator[Path]:
    """The folder of a checkpoint for a GGUF file, as long as the context lasts; any other path as it is.

    The files of a published `tokenizer` in a folder stand for the file's own. Errors about what lies in the folder name
    the file. Raises BuildError where the folder cannot be written, or a tokenizer is given for another path;
    CheckpointError, and UnsupportedModelError.
    """
    if not is_gguf_file(path):
        if tokenizer is not None:
            raise BuildError(f"--tokenizer is given, but {path} is no GGUF file: put the tokenizer's files into it")
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="edgellm-gguf-") as name:
        folder = Path(name)
        try:
            _write(path, folder, tokenizer)
        except OSError as error:
            raise BuildError(f"{path} cannot be opened: {error.strerror or error} ({error.filename})") from error
        try:
            yield folder
        except (BuildError, CheckpointError, EngineDirectoryError) as error:
            raise type(error)(str(error).replace(str(folder), str(path))) from error


def _write(path: Path, folder: Path, tokenizer: Path | None) -> None:
    """Fill the folder; raises OSError and CheckpointError."""
    files = open_split(path)
    try:
        metadata = Metadata(files)
        made: dict[str, dict[str, Any]] = {"config.json": model_config(files)}
        if tokenizer is None:
            made |= {"tokenizer.json": tokenizer_json(metadata), "tokenizer_config.json": tokenizer_config(metadata)}
        else:
            _bring_along(tokenizer, metadata, folder)
        sampling = {name: metadata.number(f"general.sampling.{key}") for key, name in _SAMPLING.items()}
        found = {name: value for name, value in sampling.items() if value is not None}
        made |= {"generation_config.json": {"do_sample": True} | found} if found else {}
    finally:
        for file in files:
            file.close()
    for name, values in made.items():
        indent = None if name == "tokenizer.json" else 1  # a vocabulary takes a second with it
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
