"""The decode kernels' twins, their host side, and their compilation: everything that needs no GPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from decode_models import CHAIN, FAMILIES, LLAMA, TREE, random_model, twin_step

from edgellm.engines.backends.cuda_decode_engine import CudaDecodeEngine
from edgellm.engines.backends.numpy_operations import NumpyOperations
from edgellm.engines.model.config import EngineShape
from edgellm.engines.model.decoder import DecoderDescription


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
