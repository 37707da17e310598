"""The decode kernels' twins, their host side, and their compilation: everything that needs no GPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from edgellm.engines.backends.cuda_decode_engine import CudaDecodeEngine
from edgellm.engines.backends.numpy_operations import NumpyOperations
from edgellm.engines.model.config import DecoderConfig, EngineShape
from edgellm.engines.model.decoder import DecoderDescription, decoder_weights, head_weight_name
from edgellm.kernels import numpy_decode_kernels as twins

LLAMA = DecoderConfig("llama", 97, 64, 128, 2, 4, 2, 16, 256, 1e-5, 10000.0, 16, "float16", True)
FAMILIES = {
    "llama": LLAMA,
    "llama_untied_biases": replace(
        LLAMA, tie_word_embeddings=False, attention_bias=True, attention_output_bias=True, mlp_bias=True
    ),
    "qwen2": replace(LLAMA, family="qwen2", attention_bias=True, dtype="bfloat16"),
    "qwen3": replace(LLAMA, family="qwen3", qk_norm=True, head_dim=32, rotary_dim=32),
    "partial_rotation": replace(LLAMA, rotary_dim=8),
    "one_kv_head": replace(LLAMA, num_heads=3, num_kv_heads=1, head_dim=24, rotary_dim=24),
}


#: parent of each node of a verified tree (None: the root); siblings, a gap between parent and child, depth up to 4
CHAIN = (None, 0, 1, 2, 3, 4, 5, 6)
TREE = (None, 0, 0, 1, 2, 2, 4, 6)


def ancestors(parents: tuple[int | None, ...]) -> np.ndarray:
    """[T, T] bool: which nodes each node sees, itself included."""
    seen = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents):
        if parent is not None:
            seen[node] |= seen[parent]
    return seen


def random_parents(tokens: int, seed: int, depth: int = 7) -> tuple[int | None, ...]:
    """A random tree of so many nodes, parents before their children, at most `depth` levels below the root."""
    random = np.random.default_rng(seed)
    parents: list[int | None] = [None]
    depths = [0]
    while len(parents) < tokens:
        parent = int(random.integers(0, len(parents)))
        if depths[parent] < depth:
            parents.append(parent)
            depths.append(depths[parent] + 1)
    return tuple(parents)


def random_model(
    config: DecoderConfig, batch: int, rows: int, starts: list[int], parents: tuple[int | None, ...] = (None,)
) -> dict[str, np.ndarray]:
    """Weights, inputs and filled caches by their names at the engine's edge, float32; `parents` make the tree."""
    tokens = len(parents)
    random = np.random.default_rng(7)
    arrays = {}
    for spec in decoder_weights(config):
        scale = 0.1 if len(spec.shape) == 1 else spec.shape[1] ** -0.5
        arrays[spec.name] = random.standard_normal(spec.shape, np.float32) * scale + ("norm" in spec.name)
    arrays["inputs_embeds"] = random.standard_normal((batch, tokens, config.hidden_size), np.float32)
    angles = random.uniform(0, 6, (batch, tokens, config.rotary_dim // 2))
    arrays["rope_rotary_cos_sin"] = np.concatenate((np.cos(angles), np.sin(angles)), axis=-1).astype(np.float32)
    arrays["kvcache_start_index"] = np.array(starts, np.int32)
    mask = np.repeat((np.arange(rows) < np.array(starts)[:, None])[:, None, None], tokens, axis=2)
    for b, start in enumerate(starts):
        mask[b, 0, :, start : start + tokens] = ancestors(parents)
    arrays["attention_mask"] = mask
    cache = (batch, config.num_kv_heads, rows, config.head_dim)
    for index in range(config.num_layers):
        for name in ("k_cache", "v_cache"):
            arrays[f"{name}_{index}"] = random.standard_normal(cache, np.float32)
    return {name: np.ascontiguousarray(array) for name, array in arrays.items()}


def twin_step(config: DecoderConfig, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A step through the twins, in the engine's order; writes KV rows, returns logits, features and last scratch."""
    batch, tokens, _ = arrays["inputs_embeds"].shape
    epsilon, layers = config.rms_norm_eps, config.feature_layers

    def empty(width: int) -> np.ndarray:
        return np.full((batch * tokens, width), np.nan, np.float32)

    def feature(layer: int) -> tuple[np.ndarray | None, int]:
        return (result["hidden_states"], layers.index(layer)) if layer in layers else (None, 0)

    result = {
        "qkv": empty(config.query_size + 2 * config.kv_size),
        "context": empty(config.query_size),
        "activation": empty(config.intermediate_size),
        "hidden": empty(config.hidden_size),
        "logits": empty(config.vocab_size),
        "hidden_states": empty(len(layers) * config.hidden_size),
    }
    hidden = arrays["inputs_embeds"]
    for index in range(config.num_layers):

        def weight(name: str, index: int = index) -> np.ndarray | None:
            return arrays.get(f"model.layers.{index}.{name}")

        norm = weight("input_layernorm.weight")
        qkv = weight("self_attn.qkv_proj.weight"), weight("self_attn.qkv_proj.bias")
        twins.norm_linear(hidden, norm, epsilon, *qkv, result["qkv"])
        twins.attention(
            result["qkv"],
            weight("self_attn.q_norm.weight"),
            weight("self_attn.k_norm.weight"),
            epsilon,
            arrays["rope_rotary_cos_sin"],
            arrays["kvcache_start_index"],
            arrays["attention_mask"] if tokens > 1 else None,
            arrays[f"k_cache_{index}"],
            arrays[f"v_cache_{index}"],
            result["context"],
        )
        o = weight("self_attn.o_proj.weight"), weight("self_attn.o_proj.bias")
        twins.linear_residual(result["context"], *o, hidden, result["hidden"], *feature(index))
        hidden = result["hidden"]
        norm = weight("post_attention_layernorm.weight")
        gate_up = weight("mlp.gate_up_proj.weight"), weight("mlp.gate_up_proj.bias")
        twins.norm_gate_up(hidden, norm, epsilon, *gate_up, result["activation"])
        down = weight("mlp.down_proj.weight"), weight("mlp.down_proj.bias")
        twins.linear_residual(result["activation"], *down, hidden, hidden)
    head = arrays[head_weight_name(config)]
    norm = arrays["model.norm.weight"]
    twins.norm_linear(hidden, norm, epsilon, head, None, result["logits"], *feature(config.num_layers))
    return result


@pytest.mark.parametrize(("starts", "rows"), [([0], 8), ([37], 64), ([5, 0, 63], 64)])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_twins_compute_what_the_description_says(family: str, starts: list[int], rows: int) -> None:
    config, batch = FAMILIES[family], len(starts)
    arrays = random_model(config, batch, rows, starts)
    described = {name: array.copy() for name, array in arrays.items()}
    DecoderDescription(
        NumpyOperations(described, described), config, EngineShape("decode", batch, 1, rows, rows)
    ).describe()
    found = twin_step(config, arrays)
    np.testing.assert_allclose(found["logits"], described["logits"][:, 0], atol=2e-5, rtol=2e-5)
    for index in range(config.num_layers):
        for name in (f"k_cache_{index}", f"v_cache_{index}"):
            np.testing.assert_allclose(arrays[name], described[name], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("features", [(), (1,), (0, 1), (1, 0), (2,), (0, 2)], ids=str)
@pytest.mark.parametrize("parents", [(None,), (None, 0), CHAIN, TREE], ids=["one", "two", "chain", "tree"])
@pytest.mark.parametrize("family", ["llama_untied_biases", "qwen3"])
def test_verified_tokens_and_features_are_what_the_description_says(
    family: str, parents: tuple[int | None, ...], features: tuple[int, ...]
) -> None:
    """Two sequences; `num_layers` (2) among the features stands for the final norm."""
    config = replace(FAMILIES[family], feature_layers=features)
    tokens, starts, rows = len(parents), [0, 29], 48
    arrays = random_model(config, 2, rows, starts, parents)
    described = {name: array.copy() for name, array in arrays.items()}
    shape = EngineShape("verify", 2, tokens, rows, rows, tokens)
    DecoderDescription(NumpyOperations(described, described), config, shape).describe()
    found = twin_step(config, arrays)
    for name in ("logits", "hidden_states") if features else ("logits",):
        expected = described[name].reshape(2 * tokens, -1)
        np.testing.assert_allclose(found[name], expected, atol=3e-5, rtol=3e-5, err_msg=name)
    for index in range(config.num_layers):
        for name in (f"k_cache_{index}", f"v_cache_{index}"):
            np.testing.assert_allclose(arrays[name], described[name], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    ("changes", "shape", "dtype", "reason"),
    [
        ({}, {}, "float32", "float16 and bfloat16, not float32"),
        ({}, {"tokens": 2}, "float16", "decode one token, or verify or prefill some, not 2 in decode"),
        ({}, {"phase": "accept"}, "float16", "decode one token, or verify or prefill some, not 1 in accept"),
        ({}, {"phase": "prefill", "tokens": 16}, "float16", None),
        ({}, {"phase": "prefill", "tokens": 17}, "float16", "not of 1 of 17 tokens of 1 sequences"),
        ({"feature_layers": (0,)}, {"phase": "prefill", "tokens": 16}, "float16", None),
        ({"feature_layers": (1,)}, {"phase": "prefill", "tokens": 16}, "float16", "takes its features for all"),
        ({"feature_layers": (2,)}, {"phase": "prefill", "tokens": 16}, "float16", "takes its features for all"),
        ({"deepstack_layers": 1}, {"phase": "prefill", "tokens": 16}, "float16", "features of images"),
        ({}, {"batch": 17}, "float16", "1 to 16 tokens and give logits of all (prefill: of one), not of 1 of 1 tokens"),
        ({}, {"phase": "verify", "tokens": 8, "selected": 8}, "float16", None),
        ({}, {"phase": "verify", "tokens": 4, "selected": 4, "batch": 2}, "bfloat16", None),
        ({}, {"phase": "verify", "tokens": 8, "selected": 1}, "float16", "not of 1 of 8 tokens of 1 sequences"),
        ({}, {"phase": "verify", "tokens": 4, "selected": 4, "batch": 5}, "float16", "not of 4 of 4 tokens of 5 seq"),
        ({"intermediate_size": 100}, {}, "float16", "intermediate_size to be a multiple of 8, not 100"),
        ({"head_dim": 512}, {}, "float16", "head_dim up to 256"),
        ({"num_heads": 34}, {}, "float16", "16 query heads a key-value head"),
        ({"feature_layers": (1,)}, {}, "float16", None),
        ({}, {}, "float16", None),
    ],
)
def test_what_is_unsupported_is_named(changes: dict, shape: dict, dtype: str, reason: str | None) -> None:
    config = replace(LLAMA, **changes)
    found = CudaDecodeEngine.unsupported(config, replace(EngineShape("decode", 1, 1, 64, 64), **shape), dtype)
    assert (found is None) if reason is None else (reason in found)


@pytest.mark.parametrize(("batch", "limit"), [(16, 232_448), (8, 166_912), (8, 101_376)])
def test_llama_1b_fits_into_shared_memory(batch: int, limit: int) -> None:
    """H200, Jetson Orin and an RTX PC."""
    config = replace(LLAMA, hidden_size=2048, intermediate_size=8192, num_heads=32, num_kv_heads=8, head_dim=64)
    shape = EngineShape("decode", batch, 1, 64, 64)
    assert CudaDecodeEngine.unsupported(config, shape, "float16", limit) is None


def test_a_batch_that_does_not_fit_into_shared_memory_is_refused() -> None:
    config = replace(LLAMA, hidden_size=4096)
    found = CudaDecodeEngine.unsupported(config, EngineShape("decode", 8, 1, 64, 64), "float16", 101_376)
    assert found is not None
    assert found.endswith("bytes of shared memory for 8 tokens of width 4096, the GPU has 101376")
