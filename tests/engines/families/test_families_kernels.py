"""Every family on the NumPy twins of the hand-written kernels, against what transformers computed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from golden_files import golden_folder, largest_difference
from numpy_kernel_device import NumpyKernelDevice, by_fours, numpy_kernel_engine
from safetensors.numpy import load_file

from edgellm.engines.backends.steps.linear import FewRows, ManyRows
from edgellm.engines.backends.steps.table import kernel_choice
from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.checkpoints.weights import load_numpy_weights
from edgellm.engines.families import FAMILIES, decoder_config
from edgellm.engines.model.config import DecoderConfig
from edgellm.engines.model.decoder import EMBEDDING, decoder_program, decoder_weights, token_table
from edgellm.engines.model.limits import EngineShape
from edgellm.engines.model.rotary import rotary_table
from edgellm.engines.model.row_steps import TOKEN_ROWS

GOLDENS = golden_folder("decoder")
ROWS = 32
DECODE = EngineShape("decode", 2, 1, ROWS, ROWS)
#: Of models whose texts are longer than their windows: the rings go round.
LONG = EngineShape("decode", 2, 1, 64, 64)


def decode_shape(config: DecoderConfig) -> EngineShape:
    """For all of a golden model's tokens."""
    if config.window is None or config.window > ROWS - 8:
        return DECODE
    return replace(LONG, window_rows=64 if config.window == 5 else 128)


def golden_config(name: str) -> DecoderConfig:
    with Checkpoint.open(GOLDENS / name) as checkpoint:
        return decoder_config(checkpoint.config)


#: Those whose heads have a size that the kernels take, whatever part of them is rotated.
CONFIGS = {path.name: golden_config(path.name) for path in sorted(GOLDENS.iterdir()) if path.is_dir()}
TAKEN = [
    name
    for name, config in CONFIGS.items()
    if kernel_choice(by_fours(config), decode_shape(config), "float16", 1 << 20)[0]
]
#: Of these, those that commit nothing: the others are in test_recurrent_kernels.py.
NAMES = [name for name in TAKEN if not CONFIGS[name].is_recurrent]


def test_every_family_is_among_them() -> None:
    with_images = {
        *("qwen2_5_vl", "qwen3_vl", "llava", "gemma3", "qwen3_5_moe", "qwen3_vl_moe", "gemma4", "gemma4_unified"),
        *(
            "smolvlm",
            "idefics3",
            "lfm2_vl",
            "internvl",
            "paligemma",
            "qwen3_asr",
            "voxtral",
            "qwen2_audio",
            "voxtral_realtime",
            "minicpmv4_6",
        ),
    }
    heads_of_12 = {"olmoe", "granitemoe", "lfm2_moe"}
    assert {CONFIGS[name].family for name in TAKEN} == FAMILIES.keys() - with_images - heads_of_12


@pytest.mark.parametrize("way", [FewRows, ManyRows])
@pytest.mark.parametrize("name", NAMES)
def test_decoded_tokens_have_the_logits_of_transformers(name: str, way: type) -> None:
    """Two sequences, token by token, over the KV caches that the kernels write."""
    config = CONFIGS[name]
    with Checkpoint.open(GOLDENS / name) as checkpoint:
        arrays = load_numpy_weights(checkpoint, decoder_weights(config))
        own_rows = next(iter(load_numpy_weights(checkpoint, token_table(config)).values()), np.empty(0))
    for spec in decoder_weights(config):
        if spec.experts:
            arrays[spec.name] = np.concatenate([arrays[spec.name].of(expert) for expert in range(spec.experts)])
    expected = load_file(GOLDENS / name / "expected.safetensors")
    token_ids = expected["token_ids"]
    decode = decode_shape(config)
    table = rotary_table(config, decode.kv_rows, context=token_ids.shape[1])
    engine = numpy_kernel_engine(config, decode, way)
    states = decoder_program(config, decode).states
    caches = {name: np.zeros(shape, np.float32) for name, (shape, _) in states.items()}
    inputs = {
        "inputs_embeds": np.zeros((2, 1, config.hidden_size), np.float32),
        "rope_rotary_cos_sin": np.zeros((2, 1, config.rotary_columns), np.float32),
        "attention_mask": np.zeros((2, 1, 1, decode.key_range), bool),
        "kvcache_start_index": np.zeros(2, np.int32),
    }
    if config.token_row_size:
        inputs[TOKEN_ROWS] = np.zeros((2, 1, config.token_row_size), np.float32)
    logits = np.full((2, 1, config.vocab_size), np.nan, np.float32)
    bound = arrays | inputs | caches | {f"present_{key}": array for key, array in caches.items()} | {"logits": logits}
    engine.bind({key: array for key, array in bound.items() if key in engine.tensors or key.startswith("present_")})
    engine.attach(NumpyKernelDevice(), np.zeros(engine.scratch_bytes, np.uint8))
    for row in range(token_ids.shape[1]):
        inputs["inputs_embeds"][:, 0] = arrays[EMBEDDING][token_ids[:, row]]
        if config.token_row_size:
            inputs[TOKEN_ROWS][:, 0] = own_rows[token_ids[:, row]]
        inputs["rope_rotary_cos_sin"][:] = table[row]
        inputs["attention_mask"][..., row] = True
        inputs["kvcache_start_index"][:] = row
        engine.enqueue()
        assert largest_difference(logits[:, 0], expected["logits"][:, row]) <= 1e-4
