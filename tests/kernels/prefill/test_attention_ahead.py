"""The twin of attention to rows behind a token's own against the formula, and against causal attention."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from ahead_cases import CASES, AheadCase
from prefill_twin import NumpyPrefill

from edgellm.kernels.errors import KernelError

TWIN = NumpyPrefill()


@pytest.mark.parametrize("name", CASES)
def test_equals_the_formula(name: str) -> None:
    case = CASES[name]
    arrays = case.arrays()
    case.run(TWIN, arrays)
    np.testing.assert_allclose(arrays["context"], case.expected(arrays), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", CASES)
def test_differs_from_causal_attention_where_there_is_an_image_alone(name: str) -> None:
    case = CASES[name]
    ahead, causal = case.arrays(), case.arrays()
    case.run(TWIN, ahead)
    case.run(TWIN, causal, causal=True)
    own = ahead["start"][:, None] + np.arange(case.tokens)
    same = ahead["last_seen"] == own
    np.testing.assert_array_equal(ahead["k_cache"], causal["k_cache"])
    np.testing.assert_allclose(ahead["context"][same], causal["context"][same], atol=1e-5)
    others = np.abs(ahead["context"] - causal["context"]).max(axis=2)[~same]
    assert (others > 1e-3).all() and (others.size > 0) == bool(case.images)


def test_every_token_has_one_last_row() -> None:
    case = CASES["one"]
    arrays = case.arrays()
    arrays["last_seen"] = arrays["last_seen"][:, :-1].copy()
    with pytest.raises(KernelError, match=r"attention_ahead: last_seen has shape \[2, 59\]; expected \[B, T\]"):
        case.run(TWIN, arrays)
    with pytest.raises(KernelError, match="a ring of 64 rows for a window of 11 and 100 new tokens"):
        wide: AheadCase = replace(CASES["a_window_that_is_shorter"], rows=64)
        wide.run(TWIN, wide.arrays())
