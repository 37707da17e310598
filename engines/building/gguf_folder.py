"""A GGUF file as a build takes models: a folder with the files that are published with checkpoints, made from its
metadata, and links to its weights."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from edgellm.engines.checkpoints.weight_files import GGUF_FILE, is_gguf_file
from edgellm.engines.errors import BuildError, EdgeLLMError
from edgellm.engines.formats.gguf_file import open_split
from edgellm.engines.gguf.architectures import model_config
from edgellm.engines.gguf.metadata import Metadata
from edgellm.engines.gguf.tokenizer import read_tokenizer, tokenizer_config


@contextmanager
def checkpoint_folder(path: Path) -> Iterator[Path]:
    """The folder of a checkpoint for a GGUF file, as long as the context lasts; any other path as it is.

    Errors about what lies in the folder name the file. Raises BuildError where the folder cannot be written,
    CheckpointError, and UnsupportedModelError.
    """
    if not is_gguf_file(path):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="edgellm-gguf-") as name:
        folder = Path(name)
        try:
            _write(path, folder)
            yield folder
        except OSError as error:
            raise BuildError(f"{path} cannot be opened: {error.strerror or error} ({error.filename})") from error
        except EdgeLLMError as error:
            text = str(error)
            if str(folder) not in text:
                raise
            raise type(error)(text.replace(str(folder), str(path))) from error


def _write(path: Path, folder: Path) -> None:
    """Fill the folder; raises OSError and CheckpointError."""
    files = open_split(path)
    try:
        metadata = Metadata(files)
        made = {"config.json": model_config(files), "tokenizer_config.json": tokenizer_config(metadata)}
        made["tokenizer.json"] = json.loads(read_tokenizer(metadata).to_str())
    finally:
        for file in files:
            file.close()
    for name, values in made.items():
        (folder / name).write_text(json.dumps(values, ensure_ascii=False, indent=1), encoding="utf-8")
    for number, file in enumerate(files, 1):
        link = GGUF_FILE if len(files) == 1 else f"model-{number:05}-of-{len(files):05}.gguf"
        (folder / link).symlink_to(os.path.realpath(file.path))
