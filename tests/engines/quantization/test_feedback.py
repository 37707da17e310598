"""Columns rounded in turn: the codes that the published way gives, and what is gained and what is not."""

from __future__ import annotations

import numpy as np
import pytest

from edgellm.engines.quantizer import feedback
from edgellm.engines.quantizer import statistics as statistics_module
from edgellm.engines.quantizer.feedback import quantize_in_turn, round_in_turn, spans
from edgellm.engines.quantizer.rounding import quantize_rows
from edgellm.engines.quantizer.statistics import InputStatistics, Observation
from edgellm.kernels.quantization.packed_weight import PackedWeight, WeightFormat

COLUMNS = 192
INT4, ZEROS = WeightFormat("int4", 64, False, "float32"), WeightFormat("int4", 64, True, "float32")
ROWS = WeightFormat("int8", None, False, "float32")


def inputs_of(seed: int, rows: int, directions: int = 24) -> np.ndarray:
    """Float32 [rows, COLUMNS] that mostly lie in a few directions."""
    mixing = np.random.default_rng(99).standard_normal((directions, COLUMNS))
    random = np.random.default_rng(seed)
    found = random.standard_normal((rows, directions)) @ mixing + 0.5 * random.standard_normal((rows, COLUMNS))
    return found.astype(np.float32)


def statistics(inputs: np.ndarray, sample: np.ndarray, *cuts: int) -> InputStatistics:
    parts = np.split(inputs, cuts, axis=1)
    moments = [part.T @ part / np.float32(len(inputs)) for part in parts]
    return InputStatistics(np.abs(inputs).mean(0), np.sqrt(np.square(inputs).mean(0)), sample, moments)


def published_codes(weights: np.ndarray, packed: PackedWeight, moments: np.ndarray, damping: float) -> np.ndarray:
    """As Frantar et al. 2022 write it: after each column the others are changed by the inverse of the moments' Cholesky
    factor, in float64."""
    moments = moments.astype(np.float64)
    moments = moments + damping * np.trace(moments) / len(moments) * np.eye(len(moments))
    order = np.argsort(-np.diag(moments), kind="stable")
    upper = np.linalg.cholesky(np.linalg.inv(moments[np.ix_(order, order)])).T
    left = weights.astype(np.float64)[:, order]
    group, last = packed.format.group or weights.shape[1], (1 << packed.format.bits) - 1
    codes = np.empty(weights.shape, np.uint8)
    for place, column in enumerate(order):
        scale = packed.scales[:, column // group].astype(np.float64)
        zero = (last + 1) / 2 if packed.zeros is None else packed.zeros[:, column // group].astype(np.float64)
        codes[:, column] = np.clip(np.rint(left[:, place] / scale + zero), 0, last)
        error = (left[:, place] - (codes[:, column] - zero) * scale) / upper[place, place]
        left[:, place + 1 :] -= np.outer(error, upper[place, place + 1 :])
    return codes


@pytest.mark.parametrize("format", [INT4, ZEROS, ROWS], ids=str)
def test_codes_are_those_of_the_published_way(format: WeightFormat) -> None:
    weights = np.random.default_rng(3).standard_normal((37, COLUMNS)).astype(np.float32)
    inputs = inputs_of(1, 2000)
    seen = statistics(inputs, inputs[:100])
    packed = quantize_rows(weights, format)
    found = round_in_turn(weights, packed, spans(seen.moments, 0.01))
    expected = published_codes(weights, packed, seen.moments[0], 0.01)
    # A value in the middle between two codes may go either way in float32, and others of its row after it.
    assert (found.codes == expected).all(1).mean() > 0.9
    assert found.scales is packed.scales and found.zeros is packed.zeros


@pytest.mark.parametrize("format", [INT4, ZEROS, ROWS], ids=str)
def test_errors_of_outputs_are_made_up_for(format: WeightFormat) -> None:
    """On inputs that were not seen; less where moments are of spans of the columns alone."""
    weights = np.random.default_rng(4).standard_normal((128, COLUMNS)).astype(np.float32)
    inputs, others = inputs_of(1, 2000), inputs_of(2, 500)
    errors = [
        np.linalg.norm(others @ (packed.values() - weights).T)
        for packed in (
            quantize_rows(weights, format, np.sqrt(np.square(inputs).mean(0))),
            quantize_in_turn(weights, format, statistics(inputs, inputs_of(3, 200), 64)),
            quantize_in_turn(weights, format, statistics(inputs, inputs_of(3, 200))),
        )
    ]
    assert errors[2] < 0.5 * errors[0] and errors[2] < errors[1] < 0.9 * errors[0]


def test_moments_that_say_nothing_do_no_harm() -> None:
    """Independent elements, and hardly more rows than these: what the moments show between them is by chance."""
    random = np.random.default_rng(5)
    weights = random.standard_normal((128, COLUMNS)).astype(np.float32)
    inputs, sample, others = (random.standard_normal((rows, COLUMNS)).astype(np.float32) for rows in (200, 200, 2000))
    nearest = quantize_rows(weights, INT4, np.sqrt(np.square(inputs).mean(0)))
    found = quantize_in_turn(weights, INT4, statistics(inputs, sample))
    believed = round_in_turn(weights, nearest, spans(statistics(inputs, sample).moments, 0.01))
    errors = [np.linalg.norm(others @ (each.values() - weights).T) for each in (found, nearest, believed)]
    assert errors[0] <= errors[1] * 1.01 < errors[2]


def test_moments_are_of_rows_outside_of_the_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics_module, "_SPAN", 128)
    inputs, chosen = inputs_of(1, 90), np.array([3, 40])
    observation = Observation(COLUMNS, 64, True)
    observation.add(inputs[:50], chosen)
    observation.add(inputs[50:], np.array([], np.int64))
    seen = observation.statistics()
    scales = np.linspace(0.5, 2, COLUMNS).astype(np.float32)
    for divisor in (np.ones_like(scales), scales):
        given = seen.scaled(divisor)
        assert np.allclose(given.sample, inputs[chosen] / divisor)
        others = np.delete(inputs, chosen, 0) / divisor
        for part, found in zip((slice(128), slice(128, COLUMNS)), given.moments, strict=True):
            assert np.allclose(found, others[:, part].T @ others[:, part] / 88, rtol=1e-3, atol=1e-3)


def test_elements_that_are_never_there_cost_nothing() -> None:
    weights = np.random.default_rng(6).standard_normal((8, COLUMNS)).astype(np.float32)
    inputs = inputs_of(1, 400)
    inputs[:, :70] = 0
    for shown in (inputs, np.zeros_like(inputs)):
        packed = quantize_in_turn(weights, INT4, statistics(shown, shown[:50], 64))
        assert np.isfinite(packed.values()).all()


def test_a_row_is_the_same_among_others(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = np.random.default_rng(7).standard_normal((40, COLUMNS)).astype(np.float32)
    given = spans(statistics(inputs_of(1, 400), inputs_of(1, 10), 64).moments, 0.1)
    packed = quantize_rows(weights, ZEROS)
    whole = round_in_turn(weights, packed, given)
    monkeypatch.setattr(feedback, "_ROWS", 7)
    parts = round_in_turn(weights, packed, given)
    assert (whole.codes == parts.codes).all(1).mean() > 0.9
