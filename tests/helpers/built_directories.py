"""A tiny checkpoint with real files, and engine directories made of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from safetensors.numpy import save_file

from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.model.limits import EngineLimits
from tools.demo_model.describe import describe_in_place

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_SIZE, VOCABULARY = 64, 96, 2, 4, 2, 16, 320

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_SIZE,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "torch_dtype": "float16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def tensor_shapes() -> dict[str, tuple[int, ...]]:
    """Names and shapes as the field publishes a Llama."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        shapes |= {
            f"{prefix}input_layernorm.weight": (HIDDEN,),
            f"{prefix}post_attention_layernorm.weight": (HIDDEN,),
            f"{prefix}self_attn.q_proj.weight": (HEADS * HEAD_SIZE, HIDDEN),
            f"{prefix}self_attn.k_proj.weight": (KV_HEADS * HEAD_SIZE, HIDDEN),
            f"{prefix}self_attn.v_proj.weight": (KV_HEADS * HEAD_SIZE, HIDDEN),
            f"{prefix}self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_SIZE),
            f"{prefix}mlp.gate_proj.weight": (INNER, HIDDEN),
            f"{prefix}mlp.up_proj.weight": (INNER, HIDDEN),
            f"{prefix}mlp.down_proj.weight": (HIDDEN, INNER),
        }
    return shapes


def write_checkpoint(path: Path, shards: int = 1) -> Path:
    """Random float16 weights in one file or several, a byte-level tokenizer, and the published JSON files."""
    path.mkdir(parents=True)
    generator = np.random.default_rng(7)
    tensors = {
        name: generator.standard_normal(shape).astype(np.float16) * np.float16(0.05)
        for name, shape in tensor_shapes().items()
    }
    if shards == 1:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    else:
        names = sorted(tensors)
        files = {name: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors" for i, name in enumerate(names)}
        for file in set(files.values()):
            save_file({name: tensors[name] for name in names if files[name] == file}, path / file)
        index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": files}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<s>", "</s>", *alphabet])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "config.json").write_text(json.dumps(CONFIG))
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1]}))
    return path


@pytest.fixture(scope="session")
def limits() -> EngineLimits:
    """Limits with two engines: decode, and prefill of 16 tokens."""
    return EngineLimits(max_batch=1, prefill_chunk=16, kv_capacity=128)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint, not to be changed."""
    return write_checkpoint(tmp_path_factory.mktemp("model") / "checkpoint")


@pytest.fixture
def own_checkpoint(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(checkpoint, tmp_path / "checkpoint"))


@pytest.fixture
def sharded_checkpoint(tmp_path: Path) -> Path:
    """The same model in two files with an index."""
    return write_checkpoint(tmp_path / "sharded", shards=2)


@pytest.fixture(scope="session")
def built_directory(checkpoint: Path, limits: EngineLimits, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine directory with real plans for sm_86, of what kernels run there, too; not to be changed."""
    pytest.importorskip("tensorrt_rtx")
    target = tmp_path_factory.mktemp("built") / "engines"
    build_engine_directory(checkpoint, target, limits, targets=["sm_86"], all_plans=True)
    return target


@pytest.fixture
def plain_directory(checkpoint: Path, limits: EngineLimits, tmp_path: Path) -> Path:
    """An engine directory without plans that a test may damage."""
    target = tmp_path / "plain"
    shutil.copytree(checkpoint, target)
    describe_in_place(target, limits)
    return target


@pytest.fixture
def open_copy(built_directory: Path, tmp_path: Path) -> Callable[[], EngineDirectory]:
    """Opens a copy of the built directory that a test may damage."""

    def copy() -> EngineDirectory:
        return EngineDirectory.open(shutil.copytree(built_directory, tmp_path / "copy"))

    return copy
