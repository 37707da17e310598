"""The NumPy kernels against definitions written out as plain loops, in float64 where they compute in float32."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_bundles import sampling_rows

from edgellm.kernels.bfloat16 import bfloat16_bits
from edgellm.kernels.errors import KernelError
from edgellm.kernels.sampling.contract import IN_PROMPT, ModelTables, SequenceState, StepInputs
from edgellm.kernels.sampling.twin import NumpySampling

KERNELS = NumpySampling()


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def integers(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint16])
def test_a_step_copies_embeddings_and_zeros_padding(dtype):
    table = np.arange(1, 13).reshape(4, 3).astype(dtype)
    token_ids = np.array([[3, -1], [0, 4]], np.int32)
    tables = ModelTables(table, np.zeros((1, 2), np.float32), integers(0, 0))
    result, rope = np.full((2, 2, 3), 99, dtype), np.zeros((2, 2, 2), dtype)
    KERNELS.prepare_step(tables, token_ids, StepInputs(result, rope, np.zeros((2, 1, 2, 0), bool), integers(0, 0)))
    assert result.tolist() == [[[10, 11, 12], [0, 0, 0]], [[1, 2, 3], [0, 0, 0]]]


def test_rotary_rows_and_masks_of_a_step_by_definition():
    start, offsets, tokens, keys, positions = integers(0, 2, 6), integers(0, -3, 9), 3, 7, 11
    table = np.random.default_rng(0).normal(size=(positions, 4)).astype(np.float32)
    rope, mask = np.zeros((3, tokens, 4), np.float16), np.ones((3, 1, tokens, keys), bool)
    tables = ModelTables(np.ones((1, 1), np.float16), table, offsets)
    inputs = StepInputs(np.zeros((3, tokens, 1), np.float16), rope, mask, start)
    KERNELS.prepare_step(tables, np.zeros((3, tokens), np.int32), inputs)
    for sequence in range(3):
        for token in range(tokens):
            row = int(start[sequence]) + token
            position = min(max(row + int(offsets[sequence]), 0), positions - 1)
            assert rope[sequence, token].tolist() == table[position].astype(np.float16).tolist()
            assert mask[sequence, 0, token].tolist() == [key <= row for key in range(keys)]


def test_bfloat16_rounds_to_nearest_even():
    values = floats(1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -2.5, np.inf, 0)
    assert bfloat16_bits(values).tolist() == [0x3F80, 0x3F80, 0x3F82, 0x3F81, 0xC020, 0x7F80, 0]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ([1, 3, 2], 1),
        ([3, 1, 3], 0),
        ([-0.0, 0.0], 0),
        ([np.nan, 1, 2, 2], 2),
        ([-np.inf, -np.inf], 0),
        ([np.nan, np.nan], 0),
        ([np.nan, -np.inf, -1e30], 2),
        ([5, np.inf, np.inf], 1),
    ],
)
def test_argmax_takes_the_lowest_of_equals_and_never_nan(row, expected):
    tokens = integers(-9)
    KERNELS.argmax(floats(*row)[None], tokens)
    assert tokens[0] == expected


def penalized(logit, count, repetition, presence, frequency, temperature):
    """One logit, as the interface words it, in Python's floats."""
    generated, in_prompt = count & (IN_PROMPT - 1), bool(count & IN_PROMPT)
    if generated or in_prompt:
        logit = logit / repetition if logit > 0 else logit * repetition
    if generated:
        logit -= presence
    logit -= frequency * generated
    return logit / temperature if temperature else logit


@pytest.mark.parametrize("in_place", [False, True])
def test_process_logits_by_definition(in_place):
    rng = np.random.default_rng(1)
    logits = rng.normal(0, 3, (5, 40)).astype(np.float32)
    counts = rng.integers(0, 4, (5, 40)).astype(np.int32)
    counts[rng.random(counts.shape) < 0.3] |= IN_PROMPT
    settings = floats(1, 1.3, 1, 1, 0.8), floats(0, 0.2, 0.5, 0, 0), floats(0, 0.1, 0, 0.4, 0), floats(1, 0.7, 0, 2, 0)
    expected = [
        [penalized(float(logits[b, i]), int(counts[b, i]), *(float(s[b]) for s in settings)) for i in range(40)]
        for b in range(5)
    ]
    before = logits.copy()
    processed = logits if in_place else np.zeros_like(logits)
    names = ("repetition_penalty", "presence_penalty", "frequency_penalty", "temperature")
    KERNELS.process_logits(logits, counts, sampling_rows(5, **dict(zip(names, settings, strict=True))), processed)
    np.testing.assert_allclose(processed, expected, rtol=1e-6, atol=1e-6)
    if not in_place:
        assert (logits == before).all()


def surviving(row: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Ids that pass the filters one after the other, by sorting, in float64."""
    order = sorted(range(row.size), key=lambda i: -row[i])
    if 0 < top_k < row.size:
        order = [i for i in order if row[i] >= row[order[top_k - 1]]]
    if top_p < 1:
        probability = np.exp(row[order].astype(np.float64) - row.max())
        probability /= probability.sum()
        kept, reached = 0, 0.0
        while kept < len(order) and (reached < top_p or kept == 0):
            reached += probability[kept]
            kept += 1
        order = [i for i in order if row[i] >= row[order[kept - 1]]]
    if min_p > 0:
        order = [i for i in order if np.exp(np.float64(row[i]) - row.max()) >= min_p]
    return np.sort(order)


@pytest.mark.parametrize("top_k", [0, 1, 7, 300, 5000])
@pytest.mark.parametrize("top_p", [1.0, 0.999, 0.9, 0.5, 1e-6, 0.0])
@pytest.mark.parametrize("min_p", [0.0, 1e-4, 0.1, 1.0])
def test_filter_keeps_what_a_sort_based_filter_keeps(top_k, top_p, min_p):
    rng = np.random.default_rng(hash((top_k, top_p, min_p)) % 2**32)
    rows = rng.normal(0, 1, (6, 997)) * np.array([[0.01], [0.5], [1], [3], [10], [3]])
    rows[5] = np.round(rows[5])  # many ties
    rows = rows.astype(np.float32)
    thresholds = np.zeros(6, np.float32)
    KERNELS.filter_threshold(rows, sampling_rows(6, top_k=top_k, top_p=top_p, min_p=min_p), thresholds)
    hair = 1e-6  # what float32 may decide otherwise
    for row, threshold in zip(rows, thresholds, strict=True):
        found = set(np.flatnonzero(row >= threshold))
        most = surviving(row, top_k, top_p + hair, min_p * (1 - hair))
        least = surviving(row, top_k, top_p if top_p == 1 else top_p - hair, min(min_p * (1 + hair), 1))
        assert set(least) <= found <= set(most)
        assert len(most) - len(least) <= 1


def test_filters_that_are_off_let_everything_pass():
    thresholds = floats(5, 5)
    KERNELS.filter_threshold(np.zeros((2, 9), np.float32), sampling_rows(2, top_k=[0, 9]), thresholds)
    assert (thresholds == -np.inf).all()


def test_filter_of_rows_without_finite_values():
    rows = np.full((4, 5), -np.inf, np.float32)
    rows[1] = np.nan
    rows[2, 3] = np.inf
    rows[3, 2] = 1
    thresholds = np.zeros(4, np.float32)
    KERNELS.filter_threshold(rows, sampling_rows(4, top_k=2, top_p=0.5), thresholds)
    assert thresholds.tolist() == [-np.inf, -np.inf, np.inf, 1]


def draws(row, count, *, threshold=-np.inf, temperature=1.0, seed=7, sequence=0, first=0) -> np.ndarray:
    """Tokens drawn from one row at `count` successive positions, as a batch."""
    tokens = np.empty(count, np.int32)
    KERNELS.sample(
        np.ascontiguousarray(np.broadcast_to(np.asarray(row, np.float32), (count, len(row)))),
        np.full(count, threshold, np.float32),
        sampling_rows(1, temperature=temperature, seed=seed, sequence=sequence),
        np.arange(first, first + count, dtype=np.int32),
        tokens,
    )
    return tokens


def chi_square(tokens: np.ndarray, probability: np.ndarray) -> float:
    """Pearson's statistic over its degrees of freedom: about 1 where the tokens follow the probabilities."""
    expected = probability * tokens.size
    used = expected > 0
    observed = np.bincount(tokens, minlength=probability.size)
    assert not observed[~used].any()
    return float((((observed - expected)[used] ** 2) / expected[used]).sum() / (used.sum() - 1))


@pytest.mark.parametrize("seed", [0, 2**64 - 1, pytest.param(1, marks=pytest.mark.slow)])
def test_samples_follow_softmax(seed):
    row = np.array([1.0, -1.0, 0.5, 2.0, 0.0, 1.5, -0.5, 0.3, 1.2, 0.9, -2.0])
    probability = np.exp(row) / np.exp(row).sum()
    assert 0.1 < chi_square(draws(row, 3000, seed=seed), probability) < 2.6  # 10 degrees: p < 0.004 beyond
    kept = np.where(row >= 0.5, np.exp(row), 0)
    assert 0.05 < chi_square(draws(row, 3000, seed=seed, threshold=0.5), kept / kept.sum()) < 3.2  # 5 degrees


def test_sequences_and_positions_are_independent():
    """Pairs of neighbouring draws fill the table of pairs as evenly as independent draws would."""
    row = np.zeros(6, np.float32)
    even = np.full(36, 1 / 36)
    first, second = draws(row, 3000, sequence=0), draws(row, 3000, sequence=1)
    assert 0.4 < chi_square(first * 6 + second, even) < 1.8  # 35 degrees
    assert 0.4 < chi_square(first[:-1] * 6 + first[1:], even) < 1.8


def test_a_draw_depends_on_its_arguments_alone():
    row = np.random.default_rng(3).normal(size=101)
    tokens = draws(row, 50)
    assert (draws(row, 20, first=30) == tokens[30:]).all()
    assert (draws(row, 50, seed=8) != tokens).any()
    assert (draws(row, 50, sequence=1) != tokens).any()
    # a token that passes keeps its number whatever else passes
    least = np.sort(row)[::-1][:40].min()
    filtered = draws(row, 50, threshold=np.float32(least))
    passing = row.astype(np.float32)[tokens] >= np.float32(least)
    assert (filtered[passing] == tokens[passing]).all()


def test_temperature_zero_is_argmax_of_what_passes():
    assert draws([1, 4, 4, 2], 3, temperature=0).tolist() == [1, 1, 1]
    assert draws([np.nan, -1, 4], 2, temperature=0, threshold=-3).tolist() == [2, 2]


def test_nothing_to_draw_from_gives_token_zero():
    assert draws([1, 2], 1, threshold=3).tolist() == [0]
    assert draws([np.nan, np.nan], 1).tolist() == [0]
    assert draws([np.nan, -np.inf, 0.0], 5).tolist() == [2] * 5


def test_count_tokens_clears_and_marks():
    counts = integers(3, 3, 3, 3)
    KERNELS.count_tokens(integers(2, -1, 2, 4, 0), counts)
    assert counts.tolist() == [IN_PROMPT, 0, IN_PROMPT, 0]
    KERNELS.count_tokens(integers(), counts)
    assert counts.tolist() == [0, 0, 0, 0]


def test_active_sequences_take_their_tokens_and_idle_ones_emit_none():
    token_ids, start, positions = integers(7, 8, 9).reshape(3, 1), integers(10, 20, 30), integers(11, 21, 31)
    counts, index, emitted = np.zeros((3, 6), np.int32), integers(0, 1, 1), np.full((3, 2), 9, np.int32)
    logits = np.zeros((3, 6), np.float32)
    logits[[0, 1, 2], [5, 1, 2]] = 1
    state = SequenceState(integers(1, 0, 1), token_ids, start, positions, counts, index, emitted)
    KERNELS.argmax(logits, np.zeros(3, np.int32), state)
    assert token_ids.ravel().tolist() == [5, 8, 2]
    assert start.tolist() == [11, 20, 31]
    assert positions.tolist() == [12, 21, 32]
    assert np.argwhere(counts).tolist() == [[0, 5], [2, 2]]
    assert emitted.tolist() == [[5, 9], [9, -1], [9, 2]]
    assert index.tolist() == [1, 0, 0]


def test_a_sequence_that_takes_its_draw_draws_at_its_position_before():
    rows = np.random.default_rng(3).normal(size=(2, 50)).astype(np.float32)
    draw = (floats(-np.inf, -np.inf), sampling_rows(2, seed=[4, 5], sequence=[0, 1]))
    positions, alone, tokens = integers(3, 9), integers(0, 0), integers(0, 0)
    KERNELS.sample(rows, *draw, positions, alone)
    counts, emitted = np.zeros((2, 50), np.int32), np.zeros((2, 1), np.int32)
    state = SequenceState(
        integers(1, 1), alone[:, None] * 0, integers(0, 0), positions, counts, integers(0, 0), emitted
    )
    KERNELS.sample(rows, *draw, positions, tokens, state)
    assert tokens.tolist() == alone.tolist() == emitted.ravel().tolist()
    assert positions.tolist() == [4, 10]


def test_a_step_writes_no_mask_of_no_keys():
    table = floats(1, 2, 3, 4).reshape(2, 2)
    embeds, rope = np.zeros((2, 1, 2), np.float32), np.zeros((2, 1, 2), np.float32)
    tables = ModelTables(table, np.arange(20, dtype=np.float32).reshape(10, 2), integers(0, 2))
    for keys in (3, 0):
        mask = np.zeros((2, 1, 1, keys), bool)
        KERNELS.prepare_step(tables, integers(1, -1).reshape(2, 1), StepInputs(embeds, rope, mask, integers(1, 4)))
        assert embeds.reshape(2, 2).tolist() == [[3, 4], [0, 0]]
        assert rope.reshape(2, 2).tolist() == [[2, 3], [12, 13]]
        assert mask.reshape(2, keys).tolist() == ([[True, True, False], [True, True, True]] if keys else [[], []])


def test_rows_of_a_slot_share_its_settings():
    """Three rows for each of two slots: what each would be with settings of its own."""
    rng, wide = np.random.default_rng(6), {}
    settings = {"temperature": [0.5, 2], "top_k": [7, 0], "top_p": [1, 0.7], "seed": [3, 4], "presence_penalty": [0, 1]}
    for name, values in settings.items():
        wide[name] = np.repeat(values, 3)
    logits, counts = rng.normal(0, 2, (6, 40)).astype(np.float32), rng.integers(0, 3, (6, 40)).astype(np.int32)
    results = []
    for rows in (sampling_rows(2, **settings), sampling_rows(6, **wide)):
        processed, thresholds, tokens = np.empty_like(logits), np.empty(6, np.float32), np.empty(6, np.int32)
        KERNELS.process_logits(logits, counts, rows, processed)
        KERNELS.filter_threshold(processed, rows, thresholds)
        KERNELS.sample(processed, thresholds, rows, np.arange(6, dtype=np.int32), tokens)
        results.append((processed, thresholds, tokens))
    for found, expected in zip(*results, strict=True):
        np.testing.assert_array_equal(found, expected)
    with pytest.raises(KernelError, match="filter_threshold: 6 rows for 4 slots; expected as many rows for each slot"):
        KERNELS.filter_threshold(logits, sampling_rows(4), np.empty(6, np.float32))


@pytest.mark.parametrize(
    ("logits", "tokens", "message"),
    [
        (np.zeros(4, np.float32), np.zeros(1, np.int32), r"argmax: logits has shape \[4\]; expected \[B, V\]"),
        (np.zeros((2, 4), np.float32), np.zeros(3, np.int32), r"tokens has shape \[3\]; expected \[B\] with B = 2"),
        (np.zeros((1, 4)), np.zeros(1, np.int32), "logits is float64; expected float32"),
        (np.zeros((1, 4), np.float32), np.zeros(1, np.int64), "tokens is int64; expected int32"),
        (np.zeros((4, 2), np.float32).T, np.zeros(2, np.int32), "logits is not C-contiguous"),
        (np.zeros((1, 0), np.float32), np.zeros(1, np.int32), r"logits has shape \[1, 0\]"),
        ([[1.0]], np.zeros(1, np.int32), "logits is a list; expected a ndarray"),
    ],
)
def test_wrong_arguments_are_named(logits, tokens, message):
    with pytest.raises(KernelError, match=message):
        KERNELS.argmax(logits, tokens)


def test_what_is_declared_is_asked_for_and_what_may_be_left_out_is_not():
    rows, tokens = np.zeros((1, 4), np.float32), integers(0)
    KERNELS.argmax(rows, tokens, None)
    with pytest.raises(KernelError, match="argmax: tokens is a NoneType; expected a ndarray"):
        KERNELS.argmax(rows, None)
    state = SequenceState(*[integers(0)] * 7)
    with pytest.raises(KernelError, match=r"argmax: state.token_ids has shape \[1\]; expected \[B, 1\]"):
        KERNELS.argmax(rows, tokens, state)


def test_compute_arguments_have_one_dtype():
    inputs = StepInputs(np.zeros((1, 1, 2), np.float32), np.zeros((1, 1, 2)), np.zeros((1, 1, 1, 1), bool), integers(0))
    for dtype, message in (
        (np.float16, "inputs.inputs_embeds is float32; expected float16"),
        (np.int32, "tables.embedding is int32; expected float32 or float16 or bfloat16"),
    ):
        tables = ModelTables(np.zeros((3, 2), dtype), np.zeros((1, 2), np.float32), integers(0))
        with pytest.raises(KernelError, match=message):
            KERNELS.prepare_step(tables, np.zeros((1, 1), np.int32), inputs)
