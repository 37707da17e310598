"""How the attention kernel shares its work: everything that needs no GPU."""

from __future__ import annotations

import pytest

from edgellm.kernels.decode.attention import (
    AttentionGeometry,
    attention_geometry,
    attention_partials,
    attention_shared_bytes,
)

#: Shared memory of a block on an H200, a Jetson Orin and an RTX PC.
LIMITS = (232_448, 166_912, 101_376)


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("size", [64, 80, 128])
@pytest.mark.parametrize("tokens", [1, 10, 32])
def test_blocks_of_real_heads_fit(limit: int, size: int, tokens: int) -> None:
    for group in (1, 4, 7, 16):
        for rows in (1088, 40_000):
            geometry = attention_geometry(1, tokens, group, size, 8, rows, limit, 132)
            assert geometry.fits(tokens, size, limit)
            assert geometry.row_tiles <= -(-tokens // (16 // group))
    assert attention_shared_bytes(tokens, size) <= limit


@pytest.mark.parametrize(
    ("batch", "tokens", "slots", "row_tiles"), [(1, 1, 4, 1), (8, 1, 2, 1), (1, 10, 4, 1), (1, 32, 4, 3), (1, 64, 4, 3)]
)
def test_steps_of_llama_1b_have_the_blocks_that_were_fastest(
    batch: int, tokens: int, slots: int, row_tiles: int
) -> None:
    found = attention_geometry(batch, tokens, 4, 64, 8, 1088, LIMITS[0], 132)
    assert found == AttentionGeometry(slots, row_tiles, 1)


def test_where_nothing_fits_the_smallest_blocks_tell_what_they_need() -> None:
    assert attention_geometry(1, 64, 4, 128, 8, 1088, 101_376, 128) == AttentionGeometry(1, 1, 1)
    assert 101_376 < attention_shared_bytes(64, 128) < 166_912


def test_long_caches_have_two_tiles_of_a_span_in_memory() -> None:
    assert attention_geometry(1, 32, 4, 64, 8, 2048, LIMITS[0], 132).stages == 1
    assert attention_geometry(1, 32, 4, 64, 8, 2049, LIMITS[0], 132).stages == 2


def test_what_is_left_for_the_merge_grows_with_the_rows_up_to_a_bound() -> None:
    assert attention_partials(3, 32, 8, 1088, 64) == 3 * 32 * 5 * 68
    assert attention_partials(1, 32, 8, 100_000, 64) == 32 * 8 * 68
    assert attention_partials(1, 12, 2, 100_000, 128) == 12 * 32 * 132
