"""GGUF files of whole models that are made to harm: read or refused in words, in little time and memory."""

from __future__ import annotations

import random
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from gguf_models import write_model
from golden_files import golden_folder

from edgellm.engines.building.gguf_folder import checkpoint_folder
from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.errors import CheckpointError, EdgeLLMError
from edgellm.engines.families import decoder_config
from edgellm.engines.model.decoder import decoder_weights

_EXTREMES = [0, 1, 255, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 62, (1 << 64) - 1]
_PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "a", "b", "ab"]


def written(path: Path, model: str = "qwen3_5_text", more: dict[str, Any] | None = None, pieces: Any = _PIECES) -> Path:
    """A golden model as a file, with a tokenizer of SentencePiece's kind."""
    tokenizer = {
        "model": "llama",
        "tokens": list(pieces),
        "scores": [-float(index) for index in range(len(pieces))],
        "token_type": [2, 3, 3, *[6] * 256, *[1] * (len(pieces) - 259)],
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    metadata = {f"tokenizer.ggml.{key}": value for key, value in tokenizer.items()} | (more or {})
    return write_model(golden_folder("decoder") / model, path, metadata)


def opened(path: Path) -> None:
    """All that a build reads of it."""
    with checkpoint_folder(path) as folder, Checkpoint.open(folder) as checkpoint:
        specs = decoder_weights(decoder_config(checkpoint.config, checkpoint.generation_config))
        checkpoint.check(specs, unread=("",))
        for name, shape in (part for spec in specs for part in spec.parts):
            if checkpoint.packed(name, shape) is None:
                checkpoint.raw(name)


def changed(data: bytes, random_: random.Random) -> bytes:
    """One field, length or byte of it is another, or bytes are missing or there twice."""
    found, place = bytearray(data), random_.randrange(min(len(data), random_.choice((600, 6000))) - 8)
    kind = random_.randrange(5)
    if kind == 0:
        found[place : place + 8] = struct.pack("<Q", random_.choice(_EXTREMES))
    elif kind == 1:
        found[place : place + 4] = struct.pack("<I", random_.choice(_EXTREMES) & 0xFFFFFFFF)
    elif kind == 2:
        found[place] ^= 1 << random_.randrange(8)
    elif kind == 3:
        del found[place : place + random_.randrange(1, 32)]
    else:
        found[place:place] = found[place : place + random_.randrange(1, 32)]
    return bytes(found)


@pytest.mark.filterwarnings("error")
def test_changed_files_are_refused_or_read(tmp_path: Path) -> None:
    data, path, random_ = written(tmp_path / "m.gguf").read_bytes(), tmp_path / "m.gguf", random.Random(5)
    outcomes = set()
    for _ in range(120):
        path.write_bytes(changed(data, random_))
        try:
            opened(path)
            outcomes.add("read")
        except EdgeLLMError:
            outcomes.add("refused")
    assert outcomes == {"read", "refused"}


def test_a_number_takes_no_memory(tmp_path: Path) -> None:
    path = written(tmp_path / "m.gguf", more={"qwen35.full_attention_interval": (1 << 31) - 1})
    tracemalloc.start()
    with pytest.raises(CheckpointError, match="in_proj_qkv"):
        opened(path)
    assert tracemalloc.get_traced_memory()[1] < 50 << 20
    tracemalloc.stop()


def test_long_tokens_take_no_time(tmp_path: Path) -> None:
    path = written(tmp_path / "m.gguf", pieces=[*_PIECES, *("ab" * length for length in range(100_000, 100_010))])
    began = time.process_time()
    with checkpoint_folder(path) as folder:
        assert '"merges":[["a","b"]]' in (folder / "tokenizer.json").read_text().replace(" ", "")
    assert time.process_time() - began < 2
