"""Random numbers against published vectors; exponential and logarithm against NumPy's in float64."""

from __future__ import annotations

import numpy as np
import pytest

from edgellm.kernels.portable_math import exp, fixed_point_exp, gumbel, log, sigmoid, silu, softplus
from edgellm.kernels.random_numbers import philox_4x32


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        # known-answer vectors of Random123, philox4x32 with 10 rounds
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_known_answers(counter, key, expected):
    def words(text):
        return tuple(int(word, 16) for word in text.split())

    assert philox_4x32(words(counter), words(key)).tolist() == [list(words(expected))]


def test_philox_of_many_counters_is_that_of_each():
    first = np.array([0, 5, 2**32 - 1], np.int64)
    together = philox_4x32((first, 3, -1, 0), (1, 2))
    for number, word in enumerate(first):
        assert (philox_4x32((int(word), 3, 0xFFFFFFFF, 0), (1, 2))[0] == together[number]).all()


def test_fixed_point_exp_is_close_and_one_at_zero():
    x = np.concatenate([np.linspace(-25, 0, 20_001), -np.logspace(-30, 2, 2001), [-np.inf]]).astype(np.float32)
    found, expected = fixed_point_exp(x).astype(np.float64), np.exp(x.astype(np.float64)) * 2**32
    assert fixed_point_exp(np.zeros(1, np.float32))[0] == 2**32
    assert (found <= 2**32).all()
    assert (abs(found - expected) <= 1 + 2e-7 * expected).all()  # 1 for rounding down


def test_exp_and_what_is_made_of_it_are_close():
    x = np.concatenate([np.linspace(-87, 88, 40_001), np.linspace(-1, 1, 10_001), np.logspace(-30, 1, 2001)])
    x = x.astype(np.float32)
    wide = x.astype(np.float64)
    expected = {exp: np.exp(wide), softplus: np.maximum(wide, 0) + np.log1p(np.exp(-abs(wide)))}
    expected |= {sigmoid: 1 / (1 + np.exp(-wide)), silu: wide / (1 + np.exp(-wide))}
    for function, values in expected.items():
        np.testing.assert_allclose(function(x), values, rtol=4e-7, err_msg=function.__name__)
    edges = np.array([-np.inf, -1000, 1000, np.inf, np.nan], np.float32)
    assert np.isfinite(exp(edges)).all()
    np.testing.assert_allclose(sigmoid(edges[:4]), [0, 0, 1, 1], atol=1e-37)
    np.testing.assert_allclose(softplus(edges[1:3]), [0, 1000], atol=1e-37)
    assert np.isnan(silu(edges)[4])


def test_log_is_close_everywhere():
    x = np.concatenate([np.logspace(-37, 38, 20_001), 1 + np.linspace(-0.4, 0.6, 20_001)]).astype(np.float32)
    expected = np.log(x.astype(np.float64))
    assert (abs(log(x) - expected) <= 2.5e-7 * abs(expected)).all()
    assert log(np.ones(1, np.float32))[0] == 0


def test_gumbel_over_the_whole_range_of_words():
    words = np.concatenate([np.arange(1000), 2**32 - 1 - np.arange(1000), np.logspace(0, 9.6, 5000)]).astype(np.uint32)
    u = np.minimum((words.astype(np.float32) + np.float32(0.5)).astype(np.float64) * 2.0**-32, 1 - 2.0**-24)
    expected = -np.log(-np.log1p(-u))
    assert np.isfinite(gumbel(words)).all()
    np.testing.assert_allclose(gumbel(words), expected, rtol=3e-7, atol=3e-7)
