"""The draft kernels' twins against the description of the head, and what the engines of propose and accept refuse."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgellm.engines.backends.cuda_draft_engine import CudaDraftEngine
from edgellm.engines.backends.numpy_operations import NumpyOperations
from edgellm.engines.model.config import EngineShape
from edgellm.engines.model.draft_config import DraftConfig
from edgellm.engines.model.draft_decoder import DraftDescription, draft_engine_weights, draft_weights
from edgellm.kernels import numpy_decode_kernels as twins

# Test files are not importable by name: each is a module of its own.
_specification = importlib.util.spec_from_file_location("models", Path(__file__).with_name("test_decode_kernels.py"))
_models = importlib.util.module_from_spec(_specification)
_specification.loader.exec_module(_models)
LLAMA = _models.LLAMA

EAGLE3 = DraftConfig(
    "3",
    replace(LLAMA, num_layers=1),
    53,
    True,
    (0, 1, 2),
    "none",
    "midlayer.",
    False,
    True,
    "model.embed_tokens.weight",
    "lm_head.weight",
    False,
    False,
    False,
)
BIASED = replace(EAGLE3.decoder, attention_bias=True, attention_output_bias=True, mlp_bias=True)
HEADS = {
    "eagle3": EAGLE3,
    "normed_residual": replace(EAGLE3, norm_before_residual=True),
    "fed_back_normed_with_biases": replace(EAGLE3, feed_back_normed=True, fc_bias=True, decoder=BIASED),
    "head_of_the_base": replace(EAGLE3, has_head=False, has_mapping=False, draft_vocab_size=97),
    "one_feature_and_qk_norm": replace(
        EAGLE3, feature_layers=(1,), decoder=replace(EAGLE3.decoder, qk_norm=True, rotary_dim=8)
    ),
    "straddling_slices": replace(
        EAGLE3, decoder=replace(EAGLE3.decoder, hidden_size=72, num_heads=3, num_kv_heads=1, head_dim=24, rotary_dim=24)
    ),
}


def draft_shape(phase: str, batch: int, tokens: int, rows: int) -> EngineShape:
    """With a key range below the rows that the cache holds."""
    return EngineShape(phase, batch, tokens, rows - 3, rows, tokens if phase == "propose" else 1, "draft")


def random_draft(config: DraftConfig, shape: EngineShape, starts: list[int], seed: int = 7) -> dict[str, np.ndarray]:
    """Weights, inputs and filled caches by their names at the engine's edge, float32; the mask is random."""
    random, decoder, batch, tokens = np.random.default_rng(seed), config.decoder, shape.batch, shape.tokens
    hidden = config.hidden_size

    def normal(*sizes: int) -> np.ndarray:
        return random.standard_normal(sizes, np.float32)

    own = {}
    for spec in draft_weights(config):
        scale = 0.1 if len(spec.shape) == 1 else spec.shape[1] ** -0.5
        own[spec.name] = normal(*spec.shape) * np.float32(scale) + np.float32("norm" in spec.name)
    base = {config.base_head: normal(decoder.vocab_size, hidden) * np.float32(hidden**-0.5)}
    arrays = draft_engine_weights(config, shape.phase, own, base)
    arrays["inputs_embeds"] = normal(batch, tokens, hidden)
    if shape.phase == "propose":
        arrays["hidden_states_from_draft"] = normal(batch, tokens, hidden)
    else:
        arrays["hidden_states_input"] = normal(batch, tokens, config.feature_size)
        arrays["last_token_ids"] = random.integers(0, tokens, (batch, 1)).astype(np.int32)
    angles = random.uniform(0, 6, (batch, tokens, decoder.rotary_dim // 2))
    arrays["rope_rotary_cos_sin"] = np.concatenate((np.cos(angles), np.sin(angles)), axis=-1).astype(np.float32)
    arrays["kvcache_start_index"] = np.array(starts, np.int32)
    mask = np.zeros((batch, 1, tokens, shape.key_range), bool)
    for b, start in enumerate(starts):
        mask[b, 0, :, : start + tokens] = random.random((tokens, start + tokens)) < 0.6
        mask[b, 0, np.arange(tokens), start + np.arange(tokens)] = True
    arrays["attention_mask"] = mask
    for kind in "kv":
        arrays[f"{kind}_cache_0"] = normal(batch, decoder.num_kv_heads, shape.kv_rows, decoder.head_dim)
    return {name: np.ascontiguousarray(array) for name, array in arrays.items()}


def draft_twin_step(config: DraftConfig, shape: EngineShape, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A step through the twins, in the engine's order; writes KV rows, returns logits and hidden states."""
    decoder, count, chosen = config.decoder, shape.batch * shape.tokens, shape.batch * shape.selected
    hidden, epsilon, layer = config.hidden_size, decoder.rms_norm_eps, "layers.0."

    def empty(rows: int, width: int) -> np.ndarray:
        return np.full((rows, width), np.nan, np.float32)

    def projection(name: str) -> tuple[np.ndarray, np.ndarray | None]:
        return arrays[f"{layer}{name}.weight"], arrays.get(f"{layer}{name}.bias")

    feature = arrays.get("hidden_states_from_draft")
    if feature is None:
        feature = empty(count, hidden)
        twins.linear_residual(arrays["hidden_states_input"], arrays["fc.weight"], arrays.get("fc.bias"), None, feature)
    qkv, normed = empty(count, decoder.query_size + 2 * decoder.kv_size), empty(count, hidden)
    norms = arrays[f"{layer}input_layernorm.weight"], arrays[f"{layer}hidden_norm.weight"]
    twins.norms_linear(
        arrays["inputs_embeds"], norms[0], feature, norms[1], epsilon, *projection("self_attn.qkv_proj"), qkv, normed
    )
    context = empty(count, decoder.query_size)
    twins.attention(
        qkv,
        arrays.get(f"{layer}self_attn.q_norm.weight"),
        arrays.get(f"{layer}self_attn.k_norm.weight"),
        epsilon,
        arrays["rope_rotary_cos_sin"],
        arrays["kvcache_start_index"],
        arrays["attention_mask"],
        arrays["k_cache_0"],
        arrays["v_cache_0"],
        context,
        masks_all=True,
    )
    residual, stream = normed if config.norm_before_residual else feature, empty(chosen, hidden)
    selected = arrays.get("last_token_ids")
    twins.linear_residual(context, *projection("self_attn.o_proj"), residual, stream, selected=selected)
    activation = empty(chosen, decoder.intermediate_size)
    norm = arrays[f"{layer}post_attention_layernorm.weight"]
    twins.norm_gate_up(stream, norm, epsilon, *projection("mlp.gate_up_proj"), activation)
    twins.linear_residual(activation, *projection("mlp.down_proj"), stream, stream)
    result = {"logits": empty(chosen, config.draft_vocab_size), "hidden_states": empty(chosen, hidden)}
    head, keeps_raw = arrays[config.head_name], not config.feed_back_normed
    twins.norm_linear(
        stream, arrays["norm.weight"], epsilon, head, None, result["logits"], result["hidden_states"], 0, keeps_raw
    )
    return result


@pytest.mark.parametrize(("phase", "tokens"), [("propose", 1), ("propose", 10), ("accept", 7)])
@pytest.mark.parametrize("head", HEADS)
def test_the_twins_compute_what_the_description_says(head: str, phase: str, tokens: int) -> None:
    config, starts = HEADS[head], [0, 29]
    shape = draft_shape(phase, 2, tokens, 64)
    arrays = random_draft(config, shape, starts)
    described = {name: array.copy() for name, array in arrays.items()}
    DraftDescription(NumpyOperations(described, described), config, shape).describe()
    found = draft_twin_step(config, shape, arrays)
    for name in ("logits", "hidden_states"):
        expected = described[name].reshape(found[name].shape)
        np.testing.assert_allclose(found[name], expected, atol=3e-5, rtol=3e-5, err_msg=name)
    for name in ("k_cache_0", "v_cache_0"):
        np.testing.assert_allclose(arrays[name], described[name], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    ("changes", "shape", "dtype", "reason"),
    [
        ({}, {}, "float16", None),
        ({}, {"phase": "accept", "selected": 1}, "bfloat16", None),
        ({}, {"batch": 2, "tokens": 8, "selected": 8}, "float16", None),
        ({}, {}, "float32", "float16 and bfloat16, not float32"),
        ({"generation": "1"}, {}, "float16", "heads of EAGLE-3, not of EAGLE-1"),
        ({}, {"phase": "prefill"}, "float16", "they have no phase prefill"),
        ({"feature_norm": "each"}, {}, "float16", None),
        ({"feature_norm": "each"}, {"phase": "accept", "selected": 1}, "float16", "which this head wants (norm: each)"),
        ({}, {"batch": 2}, "float16", "not 10 of 10 tokens of 2 sequences"),
        ({}, {"phase": "accept"}, "float16", "not 10 of 10 tokens of 1 sequences"),
        ({"decoder": replace(EAGLE3.decoder, head_dim=512)}, {}, "float16", "head_dim up to 256"),
    ],
)
def test_what_is_unsupported_is_named(changes: dict, shape: dict, dtype: str, reason: str | None) -> None:
    found = CudaDraftEngine.unsupported(
        replace(EAGLE3, **changes), replace(draft_shape("propose", 1, 10, 64), **shape), dtype
    )
    assert (found is None) if reason is None else (reason in found)


def test_a_head_of_llama_1b_fits_into_shared_memory_of_an_h200_but_not_of_an_rtx_pc() -> None:
    wide = replace(LLAMA, hidden_size=2048, intermediate_size=8192, num_heads=32, num_kv_heads=8, head_dim=64)
    config = replace(EAGLE3, decoder=replace(wide, num_layers=1))
    for tokens in (10, 16):
        assert CudaDraftEngine.unsupported(config, draft_shape("propose", 1, tokens, 64), "float16", 232_448) is None
    found = CudaDraftEngine.unsupported(config, draft_shape("propose", 1, 10, 64), "float16", 101_376)
    assert found is not None
    assert found.endswith("bytes of shared memory for 10 tokens of width 4096, the GPU has 101376")
