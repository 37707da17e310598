"""What people name in place of a checkpoint or an engine directory: what it is, and what to do with it."""

from __future__ import annotations

import re
from pathlib import Path

#: ORG/NAME, as models are named on the Hugging Face Hub.
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_GGUF_START = b"GGUF"


def foreign_model(path: Path) -> str | None:
    """One or two sentences about a GGUF file, a directory of them, or what looks like a name on the Hub; None for
    anything else."""
    if _is_gguf(path):
        return (
            f"{path} is {'a GGUF file' if path.is_file() else 'a directory of GGUF files'}, llama.cpp's format, which "
            "EdgeLLM does not read. Take the model that it was made from, as config.json, tokenizer.json and "
            "safetensors, and build that: edgellm build CHECKPOINT ENGINE_DIR"
        )
    name = str(path)
    if _HUB_NAME.fullmatch(name) and not path.parent.exists():
        folder = path.name
        return (
            f"{name} does not exist here. If it is the name of a model on the Hugging Face Hub: EdgeLLM loads nothing "
            f"from there by itself. Do that first (hf download {name} --local-dir {folder}), make an engine directory "
            f"of it (edgellm build {folder} {folder}-engines), and name that to chat, generate and the others"
        )
    return None


def _is_gguf(path: Path) -> bool:
    try:
        if path.is_file():
            with path.open("rb") as file:
                return file.read(len(_GGUF_START)) == _GGUF_START
        return path.is_dir() and not (path / "config.json").exists() and any(path.glob("*.gguf"))
    except OSError:
        return False
