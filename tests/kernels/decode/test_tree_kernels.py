"""The twins of the kernels of steps of many tokens, and which steps they take: everything that needs no GPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from decode_models import (
    FAMILIES,
    LLAMA,
    attention_step,
    attention_weights,
    linear_weights,
    random_model,
    random_parents,
    twin_step,
)

from edgellm.engines.backends.cuda_tiled_engine import CudaTiledEngine
from edgellm.engines.model.config import DecoderConfig, EngineShape
from edgellm.engines.model.decoder import head_weight_name
from edgellm.kernels.decode.contract import Kept, LinearWeights, NormedInput, padded_columns
from edgellm.kernels.decode.numpy_twins import NumpyDecodeKernels, NumpyTiledKernels


def tiled_twin_step(config: DecoderConfig, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A verify step through the twins, as `CudaTiledEngine` orders it; writes KV rows, returns logits and features."""
    batch, tokens, hidden_size = arrays["inputs_embeds"].shape
    count, epsilon, layers = batch * tokens, config.rms_norm_eps, config.feature_layers

    def empty(width: int) -> np.ndarray:
        return np.full((count, width), np.nan, np.float32)

    def kept(layer: int) -> Kept | None:
        return Kept(features, layers.index(layer)) if layer in layers else None

    def norm(weight: str, into: Kept | None = None) -> None:
        few.norm(NormedInput(hidden, arrays[weight], epsilon), normed, kept=into)()

    few, many = NumpyDecodeKernels(), NumpyTiledKernels()
    features, logits = empty(len(layers) * hidden_size), empty(config.vocab_size)
    normed, qkv = empty(padded_columns(hidden_size)), empty(config.query_size + 2 * config.kv_size)
    context, activation, residual = empty(config.query_size), empty(config.intermediate_size), empty(hidden_size)
    hidden = arrays["inputs_embeds"]
    for index in range(config.num_layers):
        layer = f"model.layers.{index}."
        norm(f"{layer}input_layernorm.weight")
        many.linear(normed, linear_weights(arrays, f"{layer}self_attn.qkv_proj"), qkv)()
        few.attention(qkv, attention_weights(config, arrays, layer), attention_step(arrays, index), None, context)()
        o = linear_weights(arrays, f"{layer}self_attn.o_proj")
        many.linear_residual(context, o, hidden, residual, kept=kept(index))()
        hidden = residual
        norm(f"{layer}post_attention_layernorm.weight")
        many.gate_up(normed, linear_weights(arrays, f"{layer}mlp.gate_up_proj"), "silu", activation)()
        many.linear_residual(activation, linear_weights(arrays, f"{layer}mlp.down_proj"), hidden, hidden)()
    norm("model.norm.weight", kept(config.num_layers))
    many.linear(normed, LinearWeights(arrays[head_weight_name(config)]), logits)()
    return {"logits": logits, "hidden_states": features}


@pytest.mark.parametrize("tokens", [17, 32, 64])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_twins_of_large_steps_compute_what_those_of_small_ones_do(family: str, tokens: int) -> None:
    config = replace(FAMILIES[family], feature_layers=(2, 0))
    arrays = random_model(config, 1, 128, [40], random_parents(tokens, seed=tokens))
    others = {name: array.copy() for name, array in arrays.items()}
    found, expected = tiled_twin_step(config, arrays), twin_step(config, others)
    for name in ("logits", "hidden_states"):
        np.testing.assert_allclose(found[name], expected[name], atol=1e-5, rtol=1e-5)
    for name in [name for name in arrays if "_cache_" in name]:
        np.testing.assert_array_equal(arrays[name], others[name])


@pytest.mark.parametrize(
    ("changes", "shape", "dtype", "reason"),
    [
        ({}, {}, "float16", None),
        ({}, {"tokens": 17, "selected": 17}, "bfloat16", None),
        ({}, {"tokens": 8, "selected": 8, "batch": 4}, "float16", None),
        ({}, {"tokens": 2, "selected": 2}, "float16", None),
        ({}, {"tokens": 65, "selected": 65}, "float16", "1 to 64 tokens and give logits of all, not of 65 of 65"),
        ({}, {"tokens": 8, "selected": 8, "batch": 8}, "float16", None),
        ({}, {"tokens": 8, "selected": 8, "batch": 9}, "float16", "not of 8 of 8 tokens of 9 sequences"),
        ({}, {"selected": 1}, "float16", "not of 1 of 64 tokens"),
        ({}, {"phase": "prefill", "selected": 1}, "float16", "decode one token or verify some, not 64 in prefill"),
        ({}, {"phase": "decode", "tokens": 1, "selected": 1, "batch": 8}, "float16", None),
        ({}, {"phase": "decode", "tokens": 2, "selected": 2}, "float16", "not 2 in decode"),
        ({}, {}, "float32", "float16 and bfloat16, not float32"),
        ({}, {"lora_slots": 2}, "float16", "LoRA"),
        ({"hidden_size": 100}, {}, "float16", "hidden_size to be a multiple of 8, not 100"),
        ({"num_heads": 34}, {}, "float16", "16 query heads a key-value head"),
    ],
)
def test_what_is_unsupported_is_named(changes: dict, shape: dict, dtype: str, reason: str | None) -> None:
    config = replace(LLAMA, **changes)
    found = CudaTiledEngine.unsupported(config, replace(EngineShape("verify", 1, 64, 128, 128, 64), **shape), dtype)
    assert (found is None) if reason is None else (reason in found)


@pytest.mark.parametrize(
    ("limit", "head_size", "tokens"),
    [(232_448, 64, 64), (232_448, 128, 64), (166_912, 128, 64), (101_376, 64, 64), (101_376, 128, 32)],
)
def test_real_widths_fit_into_shared_memory(limit: int, head_size: int, tokens: int) -> None:
    """H200, Jetson Orin and an RTX PC (not for 64 tokens with heads of 128); a GPU with less says so."""
    config = replace(
        LLAMA, hidden_size=4096, intermediate_size=14_336, num_heads=32, num_kv_heads=8, head_dim=head_size
    )
    shape = EngineShape("verify", 1, tokens, 1088, 1088, tokens)
    assert CudaTiledEngine.unsupported(config, shape, "float16", limit) is None
    assert f"of shared memory for {tokens} tokens" in CudaTiledEngine.unsupported(config, shape, "float16", 49_152)
