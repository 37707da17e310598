"""Every family on the NumPy twins of the hand-written kernels, against what transformers computed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy_kernel_device import NumpyKernelDevice, numpy_kernel_engine
from safetensors.numpy import load_file

from edgellm.engines.backends.executors import kernel_executor
from edgellm.engines.backends.kernel_executors import FewRows, ManyRows
from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.checkpoints.weights import load_numpy_weights
from edgellm.engines.families import FAMILIES, decoder_config
from edgellm.engines.model.config import DecoderConfig, EngineShape
from edgellm.engines.model.decoder import EMBEDDING, decoder_weights
from edgellm.engines.model.rotary import rotary_table

GOLDENS = Path(__file__).parents[2] / "goldens" / "decoder"
ROWS = 32
DECODE = EngineShape("decode", 2, 1, ROWS, ROWS)


def golden_config(name: str) -> DecoderConfig:
    with Checkpoint.open(GOLDENS / name) as checkpoint:
        return decoder_config(checkpoint.config)


#: Those whose heads have a size that the kernels take.
CONFIGS = {path.name: golden_config(path.name) for path in sorted(GOLDENS.iterdir()) if path.is_dir()}
TAKEN = [name for name, config in CONFIGS.items() if kernel_executor(config, DECODE, "float16", 1 << 20)[0]]
#: Of these, those that commit nothing: the others are in test_recurrent_kernels.py.
NAMES = [name for name in TAKEN if not CONFIGS[name].is_recurrent]


def test_every_family_is_among_them() -> None:
    with_images = {"qwen2_5_vl", "qwen3_vl", "llava"}
    assert {CONFIGS[name].family for name in TAKEN} == FAMILIES.keys() - with_images


@pytest.mark.parametrize("executor", [FewRows, ManyRows])
@pytest.mark.parametrize("name", NAMES)
def test_decoded_tokens_have_the_logits_of_transformers(name: str, executor: type[FewRows]) -> None:
    """Two sequences, token by token, over the KV caches that the kernels write."""
    config = CONFIGS[name]
    with Checkpoint.open(GOLDENS / name) as checkpoint:
        arrays = load_numpy_weights(checkpoint, decoder_weights(config))
    expected = load_file(GOLDENS / name / "expected.safetensors")
    token_ids = expected["token_ids"]
    table = rotary_table(config, ROWS, context=token_ids.shape[1])
    engine = numpy_kernel_engine(config, DECODE, executor)
    cache = (2, config.num_kv_heads, ROWS, config.head_dim)
    caches = {
        f"{kind}_cache_{index}": np.zeros(cache, np.float32) for index in range(config.num_layers) for kind in "kv"
    }
    inputs = {
        "inputs_embeds": np.zeros((2, 1, config.hidden_size), np.float32),
        "rope_rotary_cos_sin": np.zeros((2, 1, config.rotary_dim), np.float32),
        "attention_mask": np.zeros((2, 1, 1, ROWS), bool),
        "kvcache_start_index": np.zeros(2, np.int32),
    }
    logits = np.full((2, 1, config.vocab_size), np.nan, np.float32)
    bound = arrays | inputs | caches | {f"present_{key}": array for key, array in caches.items()} | {"logits": logits}
    engine.bind(
        {key: array for key, array in bound.items() if key in engine.tensor_names or key.startswith("present_")}
    )
    engine.attach(NumpyKernelDevice(), np.zeros(engine.scratch_bytes, np.uint8))
    for row in range(token_ids.shape[1]):
        inputs["inputs_embeds"][:, 0] = arrays[EMBEDDING][token_ids[:, row]]
        inputs["rope_rotary_cos_sin"][:] = table[row]
        inputs["attention_mask"][..., row] = True
        inputs["kvcache_start_index"][:] = row
        engine.enqueue()
        assert np.abs(logits[:, 0] - expected["logits"][:, row]).max() <= 1e-4
