"""GGUF files of Gemma 4 whose table of tokens' own embeddings is packed: its rows are read one by one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_models import byte_pairs, write_model
from gguf_writing import Tensor, dense, random_blocks
from tiny_families import WINDOWED
from tokenizers import Tokenizer

from edgellm import LLM, SamplingParams
from edgellm.engines.backends.executors import SHARED_MEMORY
from edgellm.engines.backends.numpy_backend import NumpyBackend
from edgellm.engines.building.gguf_folder import checkpoint_folder
from edgellm.engines.building.needed_kernels import WeightLayouts, needed_modules
from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.families import decoder_config
from edgellm.engines.formats.gguf_file import GgufFile, open_split
from edgellm.engines.gguf.model_config import model_config
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.quantization.gguf_blocks import BlockLayout
from edgellm.engines.quantization.layout import LinearTensors
from edgellm.engines.runners.token_rows import TokenRows
from edgellm.kernels.gpu import absent_gpu

TABLE, SHAPE = "per_layer_token_embd.weight", (320, 4 * 64)
#: A tiny one with rows of 256 elements, as many as a block of the larger kinds has.
CHANGES = WINDOWED["gemma4"] | {
    "hidden_size_per_layer_input": 64,
    "per_layer_config": {"1": {"head_dim": 32}, "3": {"head_dim": 32}},
    "torch_dtype": "bfloat16",
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}


def whole(table: Tensor) -> np.ndarray:
    """All values of a packed tensor, float32."""
    found = LinearTensors("x", SHAPE, lambda _: (table.kind, SHAPE, np.frombuffer(table.data, np.uint8)))
    return BlockLayout(table.kind).read(found).unpacked().values()


@pytest.fixture
def make_file(make_checkpoint: Callable[..., Path], tmp_path: Path) -> Callable[[str, Tensor], Path]:
    """(name, table) to a GGUF file with its tokenizer."""
    source = make_checkpoint(tmp_path / "model", 4, **CHANGES)
    keys = byte_pairs(Tokenizer.from_file(str(source / "tokenizer.json")), "gpt-2") | {"eos_token_id": 257}
    metadata = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}

    def write(name: str, table: Tensor) -> Path:
        def kinds(tensor: str, values: np.ndarray) -> Tensor | None:
            return table if tensor == TABLE else None

        return write_model(source, tmp_path / f"{name}.gguf", metadata, kinds)

    return write


@pytest.mark.parametrize("kind", ["q8_0", "q5_1", "q5_k", "q6_k", "float16"])
def test_rows_are_those_of_the_whole_table(
    make_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """It is read from the file, once that is closed, and never as a whole."""
    random = np.random.default_rng(3)
    if kind == "float16":
        values = random.normal(0, 1, SHAPE).astype(np.float16)
        table, expected = dense(values), values.astype(np.float32)
    else:
        table = random_blocks(kind, SHAPE, random, 0.05)
        expected = whole(table)
    taken, pieces_of = [], GgufFile.pieces_of

    def noted(file: GgufFile, info: Any, starts: Sequence[int], size: int) -> np.ndarray:
        taken.append((info.name, size))
        return pieces_of(file, info, starts, size)

    monkeypatch.setattr(GgufFile, "pieces_of", noted)
    with checkpoint_folder(make_file("model", table)) as folder, Checkpoint.open(folder) as checkpoint:
        config = decoder_config(checkpoint.config)
        rows = TokenRows(NumpyBackend(config), config, checkpoint, 1)
        assert config.dtype == "bfloat16" and config.token_row_size == SHAPE[1]
    ids = np.array([[0, 319, -1], [7, 7, 320]], np.int32)
    found = rows.of(ids)
    np.testing.assert_array_equal(found[[0, 0, 1, 1], [0, 1, 0, 1]], expected[[0, 319, 7, 7]])
    assert not found[0, 2].any() and not found[1, 2].any() and found[1, 0].any()
    assert {size for name, size in taken if name == TABLE} == {len(table.data) // SHAPE[0]}


#: Generates with a file, shortens it, and tries again.
SHORTENED = """
import os, sys
from edgellm import LLM, SamplingParams
from edgellm.errors import CheckpointError
with LLM(sys.argv[1], backend="numpy") as llm:
    asked = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    llm.generate("The red cup", asked)
    os.truncate(sys.argv[1], 4096)
    try:
        llm.generate("one two three", asked)
    except CheckpointError as error:
        print(error)
"""


@pytest.mark.parametrize("kind", ["q6_k", pytest.param("float16", marks=pytest.mark.slow)])
def test_a_file_that_is_shortened_while_answers_need_it(make_file: Callable[..., Path], kind: str) -> None:
    """In a process of its own: a page of a mapped file that is gone would end it."""
    random = np.random.default_rng(3)
    table = (
        random_blocks(kind, SHAPE, random) if kind == "q6_k" else dense(random.normal(0, 1, SHAPE).astype("float16"))
    )
    file = make_file("model", table)
    done = subprocess.run([sys.executable, "-c", SHORTENED, str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done
    assert "model.gguf was changed while it was read: it has 4,096 bytes" in done.stdout


def test_answers_are_those_of_the_dense_table(make_file: Callable[..., Path]) -> None:
    table = random_blocks("q6_k", SHAPE, np.random.default_rng(3), 0.005)
    other = random_blocks("q6_k", SHAPE, np.random.default_rng(4), 0.005)
    answers = []
    for name, each in (("packed", table), ("dense", dense(whole(table))), ("other", other)):
        with LLM(make_file(name, each), backend="numpy") as llm:
            asked = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
            answers.append([llm.generate(prompt, asked).token_ids for prompt in ("The red cup", "one two 123")])
    assert answers[0] == answers[1] != answers[2]


@pytest.mark.parametrize("kind", ["q4_0", "q8_0"])
def test_kernels_take_a_model_that_is_packed_throughout(
    make_checkpoint: Callable[..., Path], tmp_path: Path, kind: str
) -> None:
    """Its projections of tokens' own embeddings, too; the table of these is on no device."""
    source, random = make_checkpoint(tmp_path / "model", 4, **CHANGES), np.random.default_rng(5)

    def kinds(tensor: str, values: np.ndarray) -> Tensor | None:
        return random_blocks(kind, values.shape, random) if values.ndim == 2 else None

    folder = tmp_path / "packed"
    folder.mkdir()
    file = write_model(source, folder / "model.gguf", None, kinds)
    (folder / "config.json").write_text(json.dumps(model_config(open_split(file))))
    models = {"base": decoder_config(json.loads((folder / "config.json").read_text()))}
    weights = WeightLayouts(models, {"base": partial(Checkpoint.open, folder)}, "bfloat16")
    packed = {name for name, layout in weights.loaded["base"].items() if layout is not None}
    ours = {f"model.layers.3.per_layer_{each}.weight" for each in ("input_gate", "projection")}
    assert packed >= ours | {"model.per_layer_model_projection.weight", "model.layers.0.self_attn.qkv_proj.weight"}
    assert not any("embed_tokens_per_layer" in name for name in weights.loaded["base"])
    gpu = absent_gpu("sm_86", 16, SHARED_MEMORY["sm_86"])
    assert needed_modules(models, EngineLimits(1, 16, 64, packed=True), "bfloat16", weights, gpu)
