"""Tiny base models with EAGLE heads: random ones, and heads that mostly agree with their base."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from block_checkpoints import write_block_draft
from fixed_shape_backend import FixedShapeBackend
from mtp_checkpoints import TINY, TINY_NEMOTRON, add_head
from safetensors.numpy import load_file, save_file

from edgellm.engines.backends.opening import open_backend
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.speculation.runner import DecodingRunner

HIDDEN, HEADS, HEAD_SIZE, INNER, VOCABULARY, DRAFT_VOCABULARY = 64, 4, 16, 128, 320, 300
#: How much the layers of an agreeing base add to the embedding of its current token: less of it, more agreement.
_LAYER_WEIGHT = 0.01
LIMITS = EngineLimits(max_batch=4, prefill_chunk=16, kv_capacity=96, draft_top_k=4, draft_steps=4, verify_tree_size=16)


def write_base(
    make_checkpoint: Callable[..., Path], directory: Path, agreeing: bool, seed: int = 0, **changes: Any
) -> Path:
    """A base with untied embeddings. The next token of an `agreeing` one depends on the current one above all."""
    make_checkpoint(directory, seed, **{"tie_word_embeddings": False} | changes)
    if not agreeing:
        return directory
    tensors = load_file(directory / "model.safetensors")
    for name, values in tensors.items():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "w2.weight")):
            tensors[name] = (values * _LAYER_WEIGHT).astype(np.float16)
        elif name in ("model.norm.weight", "model.embedding_norm.weight"):
            tensors[name] = np.ones_like(values)
        elif name == "model.embed_tokens.weight":  # rows of one size, so that a head without a norm sees the same
            rows = values.astype(np.float32)
            tensors[name] = (rows / np.sqrt(np.mean(rows**2, axis=1, keepdims=True))).astype(np.float16)
    save_file(tensors, directory / "model.safetensors")
    return directory


def write_head(directory: Path, base: Path, generation: int, agreeing: bool, seed: int = 1, **changes: Any) -> Path:
    """An EAGLE-1 or EAGLE-3 head of `base`; the third generation has a vocabulary of its own.

    An `agreeing` one passes the embedding of the current token on: through `fc` in the first generation, through an
    attention that sees only its own token in the third.
    """
    random = np.random.default_rng(seed)
    first = generation == 1

    def matrix(rows: int, columns: int, scale: float = 0.2) -> np.ndarray:
        return random.standard_normal((rows, columns)) * scale

    wide, layer = HIDDEN if first else 2 * HIDDEN, "layers.0." if first else "midlayer."
    attention, mlp = f"{layer}self_attn.", f"{layer}mlp."
    small = 0.05 if agreeing else 1.0
    tensors = {
        "fc.weight": matrix(HIDDEN, (2 if first else 1) * HIDDEN, 0.2 * small),
        f"{attention}q_proj.weight": matrix(HIDDEN, wide),
        f"{attention}k_proj.weight": matrix(HIDDEN, wide),
        f"{attention}v_proj.weight": matrix(HIDDEN, wide),
        f"{attention}o_proj.weight": matrix(HIDDEN, HIDDEN, 0.2 * small),
        f"{mlp}gate_proj.weight": matrix(INNER, HIDDEN),
        f"{mlp}up_proj.weight": matrix(INNER, HIDDEN),
        f"{mlp}down_proj.weight": matrix(HIDDEN, INNER, 0.2 * small),
        f"{layer}post_attention_layernorm.weight": np.ones(HIDDEN),
    }
    config = {
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD_SIZE,
        "hidden_act": "silu",
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "torch_dtype": "float16",
    }
    identity = np.eye(HIDDEN)
    if first:
        config |= {"architectures": ["EagleForCausalLM"], "bias": False}
        if agreeing:
            tensors["fc.weight"][:, :HIDDEN] += identity
    else:
        config |= {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": DRAFT_VOCABULARY,
            "eagle_aux_hidden_state_layer_ids": [1, 2],
            "eagle_aux_hidden_state_convention": "entered",
        }
        head = load_file(base / "model.safetensors")["lm_head.weight"].astype(np.float32)
        ids = np.sort(random.choice(VOCABULARY, DRAFT_VOCABULARY, replace=False))
        tensors |= {
            "fc.weight": matrix(HIDDEN, 2 * HIDDEN, 0.2 * small),
            f"{layer}hidden_norm.weight": np.ones(HIDDEN),
            f"{layer}input_layernorm.weight": np.ones(HIDDEN),
            "norm.weight": np.ones(HIDDEN),
            "lm_head.weight": head[ids] if agreeing else matrix(DRAFT_VOCABULARY, HIDDEN, 0.3),
            "d2t": (ids - np.arange(DRAFT_VOCABULARY)).astype(np.int64),
        }
        if agreeing:
            content = matrix(HIDDEN, HIDDEN, 1.0)
            for name in ("q_proj", "k_proj"):
                tensors[f"{attention}{name}.weight"] = np.concatenate([content, 0 * content], axis=1)
            tensors[f"{attention}v_proj.weight"] = np.concatenate([identity, 0 * identity], axis=1)
            tensors[f"{attention}o_proj.weight"] = identity
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config | changes))
    halves = {
        name: values if values.dtype == np.int64 else values.astype(np.float16) for name, values in tensors.items()
    }
    save_file(halves, directory / "model.safetensors")
    return directory


@pytest.fixture(scope="session")
def make_engines(
    make_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., EngineDirectory]:
    """(generation, agreeing, limits, draft weights) to an engine directory without plans; the same arguments give the
    same one.

    Of the generations "mtp" and "nemotron_mtp" the head is inside a checkpoint of Qwen3.5 or Nemotron-H, and proposes
    300 of 320 tokens; "dflash" and "jetspec" are drafts of blocks, the second with a causal mask."""
    made: dict[tuple[int | str, bool, EngineLimits, str], EngineDirectory] = {}

    def make(
        generation: int | str = 3, agreeing: bool = True, limits: EngineLimits = LIMITS, weights: str = "auto"
    ) -> EngineDirectory:
        key = (generation, agreeing, limits, weights)
        options: dict[str, Any] = {"draft_weights": weights}
        if key not in made and generation in ("mtp", "nemotron_mtp"):
            folder = tmp_path_factory.mktemp("mtp")
            fields = TINY if generation == "mtp" else TINY_NEMOTRON
            base = add_head(make_checkpoint(folder / "base", **fields), agreeing)
            (folder / "ids.json").write_text(json.dumps([*range(0, 320, 2), *range(319, 39, -2)]))
            ids = folder / "ids.json"
            build_engine_directory(base, folder / "engines", limits, [], draft_vocabulary=ids, **options)
            made[key] = EngineDirectory.open(folder / "engines")
        elif key not in made and generation in ("dflash", "jetspec"):
            folder = tmp_path_factory.mktemp("dflash")
            base = write_base(make_checkpoint, folder / "base", agreeing, num_key_value_heads=HEADS)
            draft = write_block_draft(folder / "draft", base, agreeing, is_causal=generation == "jetspec")
            build_engine_directory(base, folder / "engines", limits, [], draft=draft, **options)
            made[key] = EngineDirectory.open(folder / "engines")
        elif key not in made:
            assert isinstance(generation, int)
            folder = tmp_path_factory.mktemp("eagle")
            base = write_base(make_checkpoint, folder / "base", agreeing)
            head = write_head(folder / "head", base, generation, agreeing)
            build_engine_directory(base, folder / "engines", limits, [], draft=head, **options)
            made[key] = EngineDirectory.open(folder / "engines")
        return made[key]

    return make


@pytest.fixture(scope="session")
def make_tiny_pair(
    make_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., tuple[Path, Path]]:
    """(generation, agreeing=True) to the directories of a base and its head; `head` are changes of the head's
    config.json, further arguments those of the base's."""

    def make(
        generation: int, agreeing: bool = True, head: Mapping[str, Any] | None = None, **changes: Any
    ) -> tuple[Path, Path]:
        folder = tmp_path_factory.mktemp("pair")
        base = write_base(make_checkpoint, folder / "base", agreeing, **changes)
        return base, write_head(folder / "head", base, generation, agreeing, **(head or {}))

    return make


@contextmanager
def _open_eagle(directory: EngineDirectory, backend: str = "numpy") -> Iterator[DecodingRunner]:
    if backend.startswith("fixed"):
        opened = FixedShapeBackend(directory, backend[len("fixed on ") :])
    else:
        opened = open_backend(backend, directory)
    try:
        runner = DecodingRunner.open(opened, directory)
    except BaseException:
        opened.close()
        raise
    try:
        yield runner
    finally:
        runner.close()


@pytest.fixture(scope="session")
def open_eagle() -> Callable[..., object]:
    """(directory, backend="numpy") to a context manager that gives an `DecodingRunner`; "fixed" is `FixedShapeBackend`,
    "fixed on sm_90" the same with the choice of that GPU."""
    return _open_eagle


@pytest.fixture(scope="module", params=["numpy", "fixed", pytest.param("tensorrt", marks=pytest.mark.gpu)])
def runner(
    request: pytest.FixtureRequest, directory: EngineDirectory, open_eagle: Callable[..., object]
) -> Iterator[DecodingRunner]:
    """Of a module's `directory`, on every backend."""
    with open_eagle(directory, request.param) as opened:
        yield opened
