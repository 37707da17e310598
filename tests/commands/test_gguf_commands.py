"""GGUF files on the command line and in `LLM`: built, opened as they are, and noticed where they changed."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import Edgellm
from gguf_models import byte_pairs, write_model
from gguf_writing import Tensor, random_blocks, write_gguf
from tokenizers import Tokenizer

from edgellm import LLM
from edgellm.engines.building import gguf_folder
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.building.gguf_folder import checkpoint_folder
from edgellm.engines.building.inputs import read_decoder_config
from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.formats.gguf_file import GgufFile, Texts
from edgellm.errors import CheckpointError, EngineDirectoryError
from edgellm.hub.directories import local_directory
from edgellm.kernels.user_paths import user_cache_directory
from edgellm.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
PROMPTS = ("The red cup is on the table.", "one two three 123", "¿Qué? 日本")
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"


def _file(
    checkpoint: Path, target: Path, sampling: dict[str, float] | None = None, suppressed: Any = None, **more: Any
) -> Path:
    """The checkpoint as a GGUF file, with its tokenizer."""
    keys = byte_pairs(Tokenizer.from_file(str(checkpoint / "tokenizer.json")), "gpt-2")
    keys |= {"bos_token_id": 0, "eos_token_id": 1, "suppress_tokens": suppressed}
    metadata = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    metadata |= {f"general.sampling.{key}": value for key, value in (sampling or {}).items()}
    return write_model(checkpoint, target, metadata | {"tokenizer.chat_template": TEMPLATE}, **more)


def _answers(path: Path) -> list[list[int]]:
    with LLM(path, backend="numpy") as llm:
        return [llm.generate(prompt, GREEDY).token_ids for prompt in PROMPTS]


@pytest.fixture
def file(checkpoint: Path, tmp_path: Path) -> Path:
    """A tiny model as a GGUF file."""
    return _file(checkpoint, tmp_path / "tiny.gguf")


def test_a_built_file_answers_as_its_checkpoint(edgellm: Edgellm, checkpoint: Path, file: Path, tmp_path: Path) -> None:
    code, out, err = edgellm("build", file, tmp_path / "robot", "--kv-capacity", 256)
    assert code == 0, err
    assert "beside" in out and "linked weights" in out
    link = tmp_path / "robot" / "model.gguf"
    assert link.is_symlink() and link.resolve() == file.resolve()
    build_engine_directory(checkpoint, tmp_path / "published", EngineDirectory.open(tmp_path / "robot").limits, [])
    assert _answers(tmp_path / "robot") == _answers(tmp_path / "published")
    code, out, _ = edgellm("info", tmp_path / "robot", "--verify")
    assert code == 0 and "llama" in out


def test_a_copy_of_the_weights_stands_alone(edgellm: Edgellm, file: Path, tmp_path: Path) -> None:
    code, _, err = edgellm("build", file, tmp_path / "robot", "--weights", "copy", "--no-try")
    assert code == 0, err
    expected = _answers(tmp_path / "robot")
    file.unlink()
    assert not (tmp_path / "robot" / "model.gguf").is_symlink()
    assert _answers(tmp_path / "robot") == expected


def test_a_file_is_opened_as_it_is(edgellm: Edgellm, checkpoint: Path, file: Path, tmp_path: Path) -> None:
    with LLM(file, backend="numpy") as llm:
        folder = llm.directory.path
        assert folder.parent == user_cache_directory() / "gguf"
        assert llm.chat("Hello", GREEDY).text is not None
    written = (folder / "edgellm.json").stat().st_mtime_ns
    first = _answers(file)
    assert (folder / "edgellm.json").stat().st_mtime_ns == written
    code, _, err = edgellm("generate", "-m", file, "--temperature", 0, "--max-tokens", 8, "--raw", PROMPTS[0])
    assert code == 0, err
    assert edgellm("info", file)[0] == 0
    # Written anew at the same place, with another model.
    other = tmp_path / "other"
    shutil.copytree(checkpoint, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.25}))
    _file(other, tmp_path / "new.gguf").replace(file)
    with LLM(file, backend="numpy") as llm:
        assert llm.directory.path == folder
        assert llm.directory.config.rms_norm_eps == 0.25
    assert _answers(file) != first


def test_a_file_that_is_opened_takes_adapters(
    edgellm: Edgellm, checkpoint: Path, file: Path, tmp_path: Path, make_adapter: Callable[..., Path]
) -> None:
    adapter = make_adapter(tmp_path / "own", read_decoder_config(checkpoint), rank=6)
    build_engine_directory(checkpoint, tmp_path / "published", adapters={"own": adapter})
    with LLM(tmp_path / "published", backend="numpy") as llm:
        expected = [llm.generate(prompt, GREEDY, adapter="own").token_ids for prompt in PROMPTS]
    assert expected != _answers(file)
    with LLM(file, backend="numpy", adapters={"own": adapter}) as llm:
        assert [llm.generate(prompt, GREEDY, adapter="own").token_ids for prompt in PROMPTS] == expected
        assert (llm.directory.limits.max_lora_rank, llm.directory.limits.lora_slots) == (6, 1)
        assert llm.directory.name == "tiny"
    asked = ("generate", "-m", file, "--max-tokens", 8, "--raw", PROMPTS[0])
    code, _, err = edgellm(*asked, "--lora", f"own={adapter}", "--adapter", "own")
    assert code == 0, err
    code, _, err = edgellm(*asked, "--lora", f"own={tmp_path}", "--adapter", "own")
    assert code == 1 and f"{tmp_path / 'adapter_config.json'}" in err
    with LLM(file, backend="numpy", adapters={"own": adapter}, build={"max_lora_rank": 16, "lora_slots": 2}) as llm:
        assert (llm.directory.limits.max_lora_rank, llm.directory.limits.lora_slots) == (16, 2)


def test_a_linked_file_that_changed_or_went(edgellm: Edgellm, file: Path, tmp_path: Path) -> None:
    assert edgellm("build", file, tmp_path / "robot", "--no-try")[0] == 0
    data = bytearray(file.read_bytes())
    os.truncate(file, len(data) // 2)
    with pytest.raises(EngineDirectoryError, match=rf"model\.gguf: .* bytes, expected .* \(a link to {file}\)"):
        EngineDirectory.open(tmp_path / "robot")
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(EngineDirectoryError, match=r"model\.gguf: SHA-256"):
        EngineDirectory.open(tmp_path / "robot")
    file.unlink()
    with pytest.raises(EngineDirectoryError, match=rf"model\.gguf: missing \(a link to {file}\)"):
        EngineDirectory.open(tmp_path / "robot")


def test_packed_types_answer(edgellm: Edgellm, checkpoint: Path, tmp_path: Path) -> None:
    import numpy as np

    random = np.random.default_rng(3)

    def packed(name: str, values: np.ndarray) -> Any:
        if values.ndim < 2 or values.shape[1] % 32:
            return None
        return random_blocks("q8_0" if "embd" in name else "q5_1" if "attn" in name else "q4_0", values.shape, random)

    file = _file(checkpoint, tmp_path / "packed.gguf", kinds=packed)
    code, out, err = edgellm("build", file, tmp_path / "robot")
    assert code == 0, err
    assert len(_answers(tmp_path / "robot")[0]) > 0
    code, out, _ = edgellm("info", tmp_path / "robot")
    assert "GGUF Q5_1: int5, groups of 32, minima" in out


def test_errors_name_the_file(edgellm: Edgellm, checkpoint: Path, file: Path, tmp_path: Path) -> None:
    data = file.read_bytes().replace(b"gpt-2", b"gpt-9")
    file.write_bytes(data)
    code, _, err = edgellm("build", file, tmp_path / "robot")
    assert code == 1 and f"{file}: 'tokenizer.ggml.pre' is 'gpt-9'" in err
    assert not (tmp_path / "robot").exists()
    with pytest.raises(CheckpointError, match=rf"{file} is a GGUF file\. Make an engine directory of it"):
        Checkpoint.open(file)
    with pytest.raises(EngineDirectoryError, match=r"directory of GGUF files \(tiny\.gguf\)\. Name one of them"):
        EngineDirectory.open(tmp_path)
    with checkpoint_folder(checkpoint) as folder:
        assert folder == checkpoint
    mixture = _file(checkpoint, tmp_path / "mixture.gguf")
    whole = GgufFile(mixture)
    metadata = {key: each.read() if isinstance(each, Texts) else each for key, each in whole.metadata.items()}
    tensors = {
        name: Tensor(info.dtype, info.shape, whole.bytes_of(info).tobytes()) for name, info in whole.tensors.items()
    }
    write_gguf(mixture, metadata | {f"{metadata['general.architecture']}.expert_count": 8}, tensors)
    code, _, err = edgellm("build", mixture, tmp_path / "second")
    assert code == 1 and f"{mixture}, as config.json (" in err and "is 8 (mixture of experts)" in err
    write_gguf(mixture, metadata | {f"{metadata['general.architecture']}.context_length": 0}, tensors)
    code, _, err = edgellm("build", mixture, tmp_path / "second")
    assert code == 1 and "max_position_embeddings is 0" in err and "Take another release of this model" in err


def test_a_build_leaves_no_folder_behind(
    edgellm: Edgellm, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is ended, or the disk is full, while the folder of a file is written."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    previous = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        monkeypatch.setattr(gguf_folder, "model_config", lambda files: signal.raise_signal(signal.SIGTERM))
        assert edgellm("build", file, tmp_path / "robot")[0] == 128 + signal.SIGTERM
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert not list(temporary.iterdir())

    def full(files: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(gguf_folder, "model_config", full)
    code, _, err = edgellm("build", file, tmp_path / "robot")
    assert code == 1 and f"{file} cannot be opened by way of a folder in {temporary}: No space left" in err
    assert "TMPDIR" in err and not list(temporary.iterdir())
    code, _, err = edgellm("build", tmp_path / "nowhere.gguf", tmp_path / "robot")
    assert code == 1 and err.endswith("or a GGUF file\n")


def test_a_published_tokenizer_stands_for_the_files_own(
    edgellm: Edgellm, checkpoint: Path, file: Path, tmp_path: Path
) -> None:
    file.write_bytes(file.read_bytes().replace(b"gpt-2", b"gpt-9"))
    code, _, err = edgellm("build", file, tmp_path / "robot", "--tokenizer", checkpoint, "--no-try")
    assert code == 0, err
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "robot" / name).read_bytes() == (checkpoint / name).read_bytes()
        assert not (tmp_path / "robot" / name).is_symlink()
    other = Path(shutil.copytree(checkpoint, tmp_path / "other"))
    text = (other / "tokenizer.json").read_text(encoding="utf-8").replace('"!"', '"!!"')
    (other / "tokenizer.json").write_text(text, encoding="utf-8")
    code, _, err = edgellm("build", file, tmp_path / "second", "--tokenizer", other)
    assert code == 1 and "has the id None for the token '!'" in err and "Take the tokenizer of this very model" in err
    code, _, err = edgellm("build", checkpoint, tmp_path / "third", "--tokenizer", checkpoint)
    assert code == 1 and "is no GGUF file" in err


def test_the_sampling_that_a_file_recommends(checkpoint: Path, file: Path, tmp_path: Path) -> None:
    usual = _answers(file)[0]
    sampling = {"temp": 0.5, "top_k": 20, "top_p": 0.25}
    file = _file(checkpoint, tmp_path / "recommending.gguf", sampling, suppressed=[usual[0], usual[-1]])
    assert {usual[0], usual[-1]}.isdisjoint(_answers(file)[0])
    with LLM(file, backend="numpy") as llm:
        found = llm.default_params
        assert (found.temperature, found.top_k, found.top_p) == (0.5, 20, 0.25)


def test_a_model_in_several_files(edgellm: Edgellm, file: Path, tmp_path: Path) -> None:
    whole = GgufFile(file)
    infos = list(whole.tensors.values())
    for number in range(3):
        own = {info.name: Tensor(info.dtype, info.shape, whole.bytes_of(info).tobytes()) for info in infos[number::3]}
        split = {"split.no": number, "split.count": 3, "split.tensors.count": len(infos)}
        own_metadata = {key: each.read() if isinstance(each, Texts) else each for key, each in whole.metadata.items()}
        metadata = (own_metadata if number == 0 else {}) | split
        write_gguf(tmp_path / f"part-{number + 1:05}-of-00003.gguf", metadata, own)
    code, _, err = edgellm("build", tmp_path / "part-00002-of-00003.gguf", tmp_path / "robot", "--no-try")
    assert code == 0, err
    names = sorted(path.name for path in (tmp_path / "robot").glob("*.gguf"))
    assert names == [f"model-{number:05}-of-00003.gguf" for number in (1, 2, 3)]
    assert _answers(tmp_path / "robot") == _answers(file) == _answers(tmp_path / "part-00001-of-00003.gguf")
    first, second = (tmp_path / f"part-{number:05}-of-00003.gguf" for number in (1, 2))
    assert local_directory(second) == local_directory(first)
    assert edgellm("remove", second)[0] == 0 and edgellm("remove", first)[0] == 1
    (tmp_path / "part-00003-of-00003.gguf").unlink()
    with pytest.raises(EngineDirectoryError, match=r"model-00003-of-00003\.gguf: missing"):
        EngineDirectory.open(tmp_path / "robot")
