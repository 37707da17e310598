"""The twins of the kernels of vision encoders against formulas in float64, and what they refuse."""

from __future__ import annotations

import math

import numpy as np
import pytest
from encoder_cases import (
    CASES,
    Case,
    activate,
    attention,
    heads,
    local_attention,
    norm,
    nothing,
    past_attention,
    values,
)
from encoder_twin import NumpyEncoder, activated

from edgellm.engines.backends.numpy_operations import NumpyOperations
from edgellm.kernels.encoder.contract import ACTIVATIONS, Convolution, heads_refusal, padded_width
from edgellm.kernels.encoder.launcher import attention_bytes, attention_tiles
from edgellm.kernels.errors import KernelError

TWIN = NumpyEncoder()


def wide(case: Case) -> list:
    """The arguments with arrays in float64."""
    return [
        each.astype(np.float64) if isinstance(each, np.ndarray) and each.dtype == np.float32 else each
        for each in case.on_host("float16")
    ]


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.kernel == "norm"])
def test_norms(name: str) -> None:
    x, weight, bias, epsilon, offset, output = wide(CASES[name])
    centred = x - x.mean(axis=1, keepdims=True) if bias is not None else x
    expected = centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + epsilon) * (weight + offset)
    found = CASES[name].run_twin(TWIN)
    np.testing.assert_allclose(found[:, : x.shape[1]], expected + (0 if bias is None else bias), rtol=1e-4, atol=1e-4)
    assert (found[:, x.shape[1] :] == 0).all() and found.shape == output.shape


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations(kind: str) -> None:
    x = np.linspace(-90, 90, 2001)
    expected = {
        "silu": lambda z: z / (1 + math.exp(-z)),
        "gelu": lambda z: z / 2 * (1 + math.erf(z / math.sqrt(2))),
        "gelu_tanh": lambda z: z / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))),
        "quick_gelu": lambda z: z / (1 + math.exp(-1.702 * z)),
        "relu_squared": lambda z: max(z, 0.0) ** 2,
    }[kind]
    np.testing.assert_allclose(activated(x, kind), [expected(z) for z in x.tolist()], atol=1e-12)
    narrow = x.astype(np.float32)
    np.testing.assert_allclose(activated(narrow, kind), activated(x, kind), rtol=1e-4, atol=1e-5)
    operations = NumpyOperations({}, {})
    np.testing.assert_allclose(activated(narrow, kind), operations.activation(narrow, kind), rtol=1e-4, atol=1e-5)
    found = activate(kind).run_twin(TWIN)
    assert (found[:, 44:] == 0).all() and np.isfinite(found).all()


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.kernel == "local_attention"])
def test_local_attention(name: str) -> None:
    given, positions, first, past, cap, scale, context = wide(CASES[name])
    found, size, width = CASES[name].run_twin(TWIN), len(scale), context.shape[1]
    for row in range(len(given)):
        for column in range(0, width, size):
            query, own = given[row, column : column + size] * np.log1p(np.exp(scale)), slice(column, column + size)
            seen = np.arange(max(0, row - past + 1), row + 1)
            keys = given[seen, width:][:, own] * np.log(1 + np.e) + positions[row - seen, first:][:, own] * np.log(2)
            weights = np.exp(cap * np.tanh(keys @ query / (size**0.5 * cap * np.log(2) ** 2)))
            total = weights @ given[seen, 2 * width :][:, own] / weights.sum()
            np.testing.assert_allclose(found[row, own], total, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.kernel == "past_attention"])
def test_attention_to_rows_before(name: str) -> None:
    (query, *own), kept, (first,), past, scale, _ = wide(CASES[name])
    given = CASES[name].on_host("float16")
    TWIN.past_attention(*given)()
    (found, places), (heads, rows, size) = (given[-1], kept.shape[2]), query.shape
    before = np.arange(first - min(first, past - 1), first)
    keys, every_value = np.concatenate((kept[:, :, before % places], own), axis=2)
    for row in range(0, rows, 3):
        seen = slice(max(0, len(before) + row - past + 1), len(before) + row + 1)
        for head in range(heads):
            weights = np.exp(scale * keys[head, seen] @ query[head, row])
            expected = weights @ every_value[head, seen] / weights.sum()
            np.testing.assert_allclose(found[row, head * size : (head + 1) * size], expected, rtol=1e-4, atol=1e-5)
    now = np.arange(first, first + rows) % places
    np.testing.assert_array_equal(given[1][:, :, now], own)
    np.testing.assert_array_equal(np.delete(given[1], now, axis=2), np.delete(kept, now, axis=2))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.kernel == "attention"])
def test_attention(name: str) -> None:
    (query, keys, every_value), window, visible, scale, _ = wide(CASES[name])
    found, size = CASES[name].run_twin(TWIN), query.shape[2]
    for row in range(0, query.shape[1], 7):
        own = np.arange(row // window * window, (row // window + 1) * window)
        seen = own if visible is None else own[visible[own]]
        for head in range(len(query)):
            scores = keys[head, seen] @ query[head, row] * scale
            weights = np.exp(scores - scores.max()) if len(seen) else np.zeros(0)
            total = weights @ every_value[head, seen] / max(weights.sum(), 1e-300)
            np.testing.assert_allclose(found[row, head * size : (head + 1) * size], total, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.kernel == "prepare_heads"])
def test_heads(name: str) -> None:
    qkv, turning, apart = wide(CASES[name])
    found, (_, count, rows, size) = CASES[name].run_twin(TWIN), apart.shape
    for row in (0, rows - 1):
        for head in range(3 * count):
            values_of = qkv[row, head * size : (head + 1) * size].copy()
            if turning is not None and head < 2 * count:
                numbers = (values_of[: size // 2] + 1j * values_of[size // 2 :]) * (
                    turning[row, : size // 2] + 1j * turning[row, size // 2 :]
                )
                values_of = np.concatenate((numbers.real, numbers.imag))
            np.testing.assert_allclose(found[head // count, head % count, row], values_of, rtol=1e-5, atol=1e-6)


def test_rows() -> None:
    chosen = CASES["chosen_rows"]
    given, rows, *_ = chosen.on_host("float16")
    np.testing.assert_array_equal(chosen.run_twin(TWIN), given[np.clip(rows, 0, 6)])
    beside = values(5, 40)
    output = nothing(5, 100)
    TWIN.copy_rows(beside, None, output, 0)()
    TWIN.copy_rows(beside[:, :37].copy(), None, output, 40)()
    np.testing.assert_array_equal(output, np.concatenate((beside, beside[:, :37], np.zeros((5, 23))), axis=1))
    squares = values(36, 8)
    pooled = nothing(4, 8)
    TWIN.average_pool(squares, 6, 3, pooled)()
    expected = squares.reshape(2, 3, 2, 3, 8).mean(axis=(1, 3), dtype=np.float64).reshape(4, 8)
    np.testing.assert_allclose(pooled, expected, rtol=1e-5, atol=1e-6)
    left, weight, scale, _ = wide(CASES["product"])
    np.testing.assert_allclose(CASES["product"].run_twin(TWIN), left @ weight * scale, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.kernel == "unfold"])
def test_places_of_convolutions(name: str) -> None:
    """What each reads, place by place."""
    given, (channels, height, width, down, across, stride, above, left), _ = CASES[name].on_host("float16")
    found, row = CASES[name].run_twin(TWIN), 0
    for image in given[:, :channels].reshape(-1, height, width, channels):
        for top in range(-above, height + above - down + 1, stride):
            for side in range(-left, width + left - across + 1, stride):
                expected = np.zeros((channels, down, across))
                for y in range(max(top, 0), min(top + down, height)):
                    for x in range(max(side, 0), min(side + across, width)):
                        expected[:, y - top, x - side] = image[y, x]
                np.testing.assert_array_equal(found[row, : expected.size], expected.reshape(-1))
                assert not found[row, expected.size :].any()
                row += 1
    assert row == len(found)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (norm(2, 40, 32, True), "norm: output has 32 columns; expected at least 40"),
        (norm(1, 12_008, 12_008, True), "norm: rows of 12008 columns; expected up to 12000"),
        (Case("activate", (values(2, 8), 5, nothing(2, 8))), "activation is 5; expected 0 to 4"),
        (Case("copy_rows", (values(2, 8), None, nothing(3, 8), 0)), "3 rows of values of 2, without rows to choose"),
        (Case("copy_rows", (values(2, 8), None, nothing(2, 8), 4)), "columns 4 to 12 of an output of 8"),
        (
            Case("average_pool", (values(35, 8), 6, 3, nothing(4, 8))),
            "squares of 3 x 3 of values of 35, 6 a line, output of 4",
        ),
        (Case("clip_rows", (values(2, 8), values(3), nothing(2, 8), 0)), "bounds of 3 numbers"),
        (Case("clip_rows", (values(2, 8), values(2), nothing(2, 8), 4)), "columns 4 to 12 of an output of 8"),
        (
            Case("normed_heads", (values(2, 40), values(8), values(8), 1e-6, nothing(2, 40))),
            "3 times as many heads of 8",
        ),
        (
            Case("unfold", (values(9, 8), Convolution(8, 3, 3, 2, 2, 1, 0, 0), nothing(3, 32))),
            "3 x 3 have 4 places each, not 3",
        ),
        (
            Case("unfold", (values(9, 8), Convolution(9, 3, 3, 2, 2, 1, 0, 0), nothing(4, 40))),
            "9 channels of 8 columns",
        ),
        (
            Case("unfold", (values(9, 8), Convolution(8, 3, 3, 2, 2, 0, 0, 0), nothing(4, 32))),
            "strides and channels begin at 1",
        ),
        (local_attention(4, 1, 8, 33), "up to 32 rows and heads of 128, not 33 and 8"),
        (past_attention(4, 1, 8, 0), "4 rows that see 0 rows, 3 of which are kept; expected one at least"),
        (Case("gated_convolution", (values(2, 24), values(16, 5), values(16), 1e-6, nothing(2, 16))), "of 24 columns"),
        (Case("centered_norm", (values(2, 8), values(12), None, 1e-6, nothing(2, 12))), "rows of 8 columns"),
        (attention(100, 64, 2, 64), "100 rows in windows of 64; expected up to 65535 whole ones"),
        (attention(64, 64, 2, 20), r"head sizes up to 128 \(multiples of 8\), not 20"),
        (attention(64, 64, 2, 136), "head sizes up to 128"),
        (Case("prepare_heads", (values(4, 40), None, nothing(3, 2, 4, 8))), "qkv has 40 columns; .* 3 x 2 heads of 8"),
        (Case("attention", (nothing(3, 2, 4, 8), 4, None, 1.0, nothing(4, 8))), "context has 8 columns; expected 16"),
    ],
)
def test_refuses(case: Case, message: str) -> None:
    with pytest.raises(KernelError, match=message):
        case.run_twin(TWIN)


def test_sizes() -> None:
    assert [padded_width(width) for width in (1, 8, 75, 588, 3420)] == [8, 8, 80, 592, 3424]
    assert [heads_refusal(size) is None for size in (8, 64, 72, 80, 128, 0, 12, 136)] == [True] * 5 + [False] * 3
    assert all(attention_bytes(size, 16_384) <= 99 << 10 for size in (8, 64, 72, 80, 128))
    assert [attention_tiles(72, window, 16, 132) for window in (64, 256, 1_024, 4_096)] == [1, 1, 1, 2]
    assert attention_tiles(128, 4_096, 16, 16) == 1 and attention_tiles(80, 64, 1_024, 16) == 1
    assert heads(4, 2, 8, True).run_twin(TWIN).shape == (3, 2, 4, 8)
