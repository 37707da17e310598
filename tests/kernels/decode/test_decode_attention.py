"""How the attention kernel shares its work: everything that needs no GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from edgellm.kernels.decode.attention import (
    AttentionGeometry,
    AttentionShape,
    attention_geometry,
    attention_partials,
    attention_shared_bytes,
)
from edgellm.kernels.decode.contract import MAX_GROUP

#: By name: multiprocessors, shared memory of a block, whether there are clusters.
DEVICES = {
    "h200": (132, 232_448, True),
    "thor": (20, 232_448, True),
    "orin": (16, 166_912, False),
    "rtx_3090": (82, 101_376, False),
    "rtx_5090": (170, 101_376, True),
}
LLAMA_1B, LLAMA_8B, QWEN_05B, QWEN_17B = (32, 8, 64), (32, 8, 128), (14, 2, 64), (16, 8, 128)


def device(name: str) -> SimpleNamespace:
    multiprocessors, shared_limit, has_clusters = DEVICES[name]
    return SimpleNamespace(multiprocessors=multiprocessors, shared_limit=shared_limit, has_clusters=has_clusters)


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("size", [64, 80, 128])
@pytest.mark.parametrize("kv_rows", [1088, 40_000])
def test_every_step_fits_every_device(name: str, size: int, kv_rows: int) -> None:
    """Decode, propose of 1 to 10 nodes, accept, prefill of 16, a static tree's 60 nodes, verify of up to 64."""
    gpu = device(name)
    for group in (1, 2, 3, 4, 7, 8, MAX_GROUP):
        for tokens in (*range(1, 11), 16, 32, 60, 64):
            shape = AttentionShape(1, tokens, 8 * group, 8, size, kv_rows)
            assert attention_shared_bytes(shape) <= gpu.shared_limit
            geometry = attention_geometry(shape, gpu)
            assert geometry.fits(shape, gpu.shared_limit)
            assert geometry.row_tiles <= -(-tokens // (16 // group))
            assert gpu.has_clusters or not geometry.in_cluster


@pytest.mark.parametrize(("name", "tokens"), [("h200", 64), ("orin", 32), ("rtx_3090", 3)])
def test_so_many_tokens_of_heads_of_256_fit(name: str, tokens: int) -> None:
    for group in (1, 4, 8, 16):
        shape = AttentionShape(1, tokens, 4 * group, 4, 256, 4096)
        assert attention_geometry(shape, device(name)).fits(shape, device(name).shared_limit)


def test_where_nothing_fits_the_smallest_blocks_tell_what_they_need() -> None:
    shape = AttentionShape(1, 64, 16, 4, 256, 4096)
    assert attention_geometry(shape, device("rtx_3090")) == AttentionGeometry(1, 1, 1, 1)
    assert attention_shared_bytes(shape) > 101_376


@pytest.mark.parametrize("sizes", [LLAMA_1B, LLAMA_8B, QWEN_05B, QWEN_17B], ids=str)
def test_few_multiprocessors_leave_the_keys_of_many_rows_to_a_warp(sizes: tuple[int, int, int]) -> None:
    """Where blocks of many rows fill them, so that no states are merged."""
    assert not attention_geometry(AttentionShape(1, 64, *sizes, 1088), device("orin")).shares


def test_blocks_that_are_no_cluster_leave_states_of_few_rows_alone() -> None:
    many, few = AttentionShape(1, 17, *LLAMA_1B, 40_000), AttentionShape(1, 16, *LLAMA_1B, 40_000)
    assert attention_geometry(many, device("rtx_3090")).splits == 1
    assert attention_geometry(few._replace(tokens=1), device("rtx_3090")).splits > 1
    assert attention_partials(many) < attention_partials(few) == 16 * 32 * 32 * 68


def test_the_keys_are_divided_by_the_model_and_their_number_alone() -> None:
    spans = {kv_heads: AttentionShape(1, 1, 32, kv_heads, 64, 40_000).spans for kv_heads in (1, 2, 4, 8, 32)}
    assert spans == {1: 64, 2: 64, 4: 64, 8: 32, 32: 16}
    assert AttentionShape(1, 1, 32, 8, 64, 1088).spans == 17


def test_states_have_room_however_many_blocks_have_spans() -> None:
    """A cluster of 8 with 2 slots, 4 rows: of 7 blocks that have 15 spans, 4 have a row each; all 8 have 17 spans."""
    shape = AttentionShape(1, 1, *LLAMA_1B, 1088)
    geometry, without = AttentionGeometry(8, 2, 1, 1, True), AttentionGeometry(8, 2, 1, 1, False)
    places = (geometry.shared_bytes(shape) - without.shared_bytes(shape)) // (4 * shape.state)
    assert places == max(4 * 3, 2 * 5, 2 * 7, 1 * 15, 1 * 17)
