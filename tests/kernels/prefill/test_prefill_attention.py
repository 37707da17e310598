"""The twins of prefill's kernels against those of decode steps, what they refuse, and their memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from decode_twins import NumpyDecodeKernels
from prefill_cases import CASES, Case
from prefill_twin import NumpyPrefill

from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.contracts import Contracts
from edgellm.kernels.decode.contract import AttentionStep, AttentionWeights
from edgellm.kernels.errors import KernelError
from edgellm.kernels.prefill.contract import KeyValueRows, PrefillKernels
from edgellm.kernels.prefill.launcher import attention_bytes, attention_tiles

TWIN = NumpyPrefill()


@pytest.mark.parametrize("name", CASES)
def test_equals_decode_steps_of_the_same_tokens(name: str) -> None:
    case = CASES[name]
    arrays = case.arrays()
    expected = {key: array.copy() for key, array in arrays.items()}
    case.run(TWIN, arrays)
    norms = (expected.get("q_norm"), expected.get("k_norm"))
    weights = AttentionWeights(*norms, case.epsilon, case.offset, case.scale, case.rotary > 0)
    mask = np.arange(case.rows) <= (expected["start"][:, None] + np.arange(case.tokens))[:, None, :, None]
    rotary = expected.get("rotary", np.zeros((len(case.starts), case.tokens, 0), np.float32))
    step = AttentionStep(rotary, expected["start"], mask, expected["k_cache"], expected["v_cache"])
    qkv = expected["qkv"].reshape(-1, expected["qkv"].shape[2])
    context = expected["context"].reshape(-1, case.heads * case.size)
    NumpyDecodeKernels().attention(qkv, weights, step, None, context)()
    for key in ("context", "k_cache", "v_cache"):
        np.testing.assert_allclose(arrays[key], expected[key], rtol=2e-5, atol=2e-5, err_msg=key)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": 20, "rotary": 20}, r"multiples of 8\).*not 2 query and 1 key-value heads of 20"),
        ({"size": 264, "rotary": 0}, "head sizes up to 256"),
        ({"heads": 3, "kv_heads": 2}, "not 3 query and 2 key-value heads"),
        ({"size": 16, "rotary": 18}, "18 elements of heads of 16 to rotate"),
        ({"size": 16, "rotary": 6}, "6 elements of heads of 16 to rotate; expected fours of them, at most a head"),
    ],
)
def test_refuses_heads_that_it_does_not_take(change: dict, message: str) -> None:
    case = replace(Case((0,), 4, 2, 1), **change)
    with pytest.raises(KernelError, match=message):
        case.run(TWIN, case.arrays())


def test_queries_and_qkv_are_of_the_same_heads() -> None:
    case = Case((0,), 4, 2, 1)
    for name, columns, message in (
        ("queries", 64, "qkv has 256 columns; expected 192, those of 1 query and 1 key-value heads"),
        ("queries", 96, "queries have 96 columns; expected those of heads of 64"),
        ("qkv", 192, "qkv has 192 columns; expected 256"),
    ):
        arrays = case.arrays()
        arrays[name] = np.zeros((1, 4, columns), np.float32)
        with pytest.raises(KernelError, match=f"prepare_heads: {message}"):
            case.run(TWIN, arrays)


def test_qkv_is_float32_or_of_the_dtype_of_queries() -> None:
    def device(dtype: str, *shape: int) -> DeviceArray:
        return DeviceArray(4096, shape, dtype)

    check = Contracts(PrefillKernels, DeviceArray)
    caches = (device("float16", 1, 1, 64, 64) for _ in "kv")
    rows = KeyValueRows(*caches, device("int32", 1))
    for dtype, queries in (("float32", "float16"), ("float16", "float16"), ("bfloat16", "float16")):
        given = (device(dtype, 1, 4, 256), None, None, rows, None, None, device(queries, 1, 4, 128))
        if dtype != "bfloat16":
            assert check("prepare_heads", *given)["W"] == 256
            continue
        with pytest.raises(KernelError, match=r"prepare_heads: rows.k_cache is float16; expected bfloat16 or int8"):
            check("prepare_heads", *given)


def test_blocks_fit_every_gpu() -> None:
    shapes = [(size, tiles) for size in (8, 64, 72, 128) for tiles in (1, 2)] + [(136, 1), (256, 1)]
    assert all(attention_bytes(*shape) <= 99 << 10 for shape in shapes)


def test_few_queries_are_shared_among_more_blocks() -> None:
    assert [attention_tiles(64, tokens, 32, 132) for tokens in (16, 512, 640, 2048)] == [1, 1, 2, 2]
    assert [attention_tiles(64, tokens, 32, 16) for tokens in (16, 128, 512)] == [2, 2, 2]
    assert attention_tiles(256, 8192, 32, 16) == 1
