"""The draft kernels' twins against the description of the head, and what the engines of propose and accept refuse."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from decode_models import EAGLE3, HEADS, LLAMA, draft_shape, draft_twin_step, random_draft

from edgellm.engines.backends.cuda_draft_engine import CudaDraftEngine
from edgellm.engines.backends.numpy_operations import NumpyOperations
from edgellm.engines.model.draft_decoder import DraftDescription


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
