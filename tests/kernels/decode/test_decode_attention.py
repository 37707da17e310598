"""How the attention kernel shares its work: everything that needs no GPU."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace

import pytest

from edgellm.kernels.decode.attention_geometries import (
    AttentionGeometry,
    AttentionShape,
    attention_geometries,
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


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("size", [136, 192, 256, 512])
@pytest.mark.parametrize(
    ("int8", "kv_rows", "window"),
    [
        (False, 1088, 0),
        (True, 70_000, 0),
        (False, 1_048_576, 0),
        (True, 1_048_576, 0),
        (True, 1280, 512),
        (False, 33_280, 32_768),
    ],
)
def test_every_step_of_large_heads_fits_every_device(
    name: str, size: int, int8: bool, kv_rows: int, window: int
) -> None:
    gpu = device(name)
    for batch, kv_heads, group in ((1, 1, 4), (1, 2, 1), (4, 4, MAX_GROUP)):
        for tokens in (1, 3, 14, 15, 33, 64):
            shape = AttentionShape(batch, tokens, kv_heads * group, kv_heads, size, kv_rows, int8, window)
            assert attention_shared_bytes(shape) <= gpu.shared_limit
            geometry = attention_geometry(shape, gpu)
            assert geometry.fits(shape, gpu.shared_limit)
            assert geometry.row_tiles <= -(-tokens // shape.tile_tokens)
            assert gpu.has_clusters or not geometry.in_cluster
            in_memory = geometry.splits > 1 and not geometry.in_cluster
            states = batch * tokens * shape.heads * shape.spans * shape.state
            assert not in_memory or attention_partials(shape) == states
            assert attention_partials(shape) <= max(1 << 23, states // batch // tokens * 16)
            assert size <= 256 or attention_geometries(shape, gpu.shared_limit, gpu.has_clusters)


def test_where_nothing_fits_the_smallest_blocks_tell_what_they_need() -> None:
    shape, gpu = AttentionShape(1, 64, 16, 4, 256, 70_000), SimpleNamespace(multiprocessors=82, has_clusters=False)
    gpu.shared_limit = attention_shared_bytes(shape) - 1
    geometry = attention_geometry(shape, gpu)
    assert geometry == AttentionGeometry(1, 1, 1, 1, False, 4, True) and not geometry.fits(shape, gpu.shared_limit)
    gpu.shared_limit += 1
    assert attention_geometry(shape, gpu) == geometry and geometry.fits(shape, gpu.shared_limit)


def test_rows_come_in_turn_only_where_they_have_no_room_beside_each_other() -> None:
    tree, chain = AttentionShape(1, 64, 4, 1, 256, 32_784), AttentionShape(1, 8, 4, 1, 256, 32_784)
    for name in DEVICES:
        assert attention_geometry(tree, device(name)).in_turn == (DEVICES[name][1] < 110_000)
        assert not attention_geometry(chain, device(name)).in_turn
        assert not attention_geometry(tree._replace(int8=True), device(name)).in_turn


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_long_keys_of_few_heads_of_256_are_shared_by_many_blocks(kv_heads: int) -> None:
    """More than a cluster's eight, each with four warps, and few tiles of a span one after the other."""
    shape = AttentionShape(1, 1, 4 * kv_heads, kv_heads, 256, 32_784)
    for name in ("h200", "rtx_5090", "rtx_3090"):
        geometry = attention_geometry(shape, device(name))
        assert (geometry.splits, geometry.tile_warps, geometry.in_cluster) == (64, 4, False)


#: What was measured: geometries of these stay as they are.
MEASURED = {
    ("h200", QWEN_05B, 1088, 1): (4, 4, 1, 2, True),
    ("h200", QWEN_05B, 32_784, 1): (8, 8, 1, 1, True),
    ("h200", LLAMA_1B, 32_784, 1): (8, 4, 1, 2, True),
    ("orin", LLAMA_1B, 32_784, 1): (16, 2, 1, 1, False),
    ("orin", QWEN_05B, 32_784, 1): (32, 2, 1, 1, False),
}


@pytest.mark.parametrize(("name", "sizes", "kv_rows", "tokens"), MEASURED, ids=str)
def test_heads_of_up_to_128_are_shared_as_measured(
    name: str, sizes: tuple[int, int, int], kv_rows: int, tokens: int
) -> None:
    expected = AttentionGeometry(*MEASURED[name, sizes, kv_rows, tokens])
    assert attention_geometry(AttentionShape(1, tokens, *sizes, kv_rows), device(name)) == expected


def test_one_row_over_rows_of_8_bits_is_shared_as_measured_where_its_blocks_fit() -> None:
    """Else by estimate, which gives a tile to one warp."""
    shape = AttentionShape(1, 1, 32, 4, 128, 1088, True)
    assert attention_geometry(shape, device("h200")) == AttentionGeometry(8, 2, 1, 1, True, 4)
    assert attention_geometry(shape._replace(size=64), device("h200")) == AttentionGeometry(8, 2, 1, 2, True, 4)
    assert attention_geometry(shape._replace(kv_heads=2), device("thor")) == AttentionGeometry(8, 2, 1, 1, True, 4)
    on_h200 = {"int8": False, "batch": 2, "tokens": 2, "kv_heads": 32, "size": 80, "kv_rows": 8192}
    others = [(shape._replace(**{name: value}), "h200") for name, value in on_h200.items()]
    for other, name in [*others, (shape, "thor"), (shape, "orin")]:
        assert attention_geometry(other, device(name)).tile_warps == 1, (other, name)


def tiles_of_rounds(
    geometry: AttentionGeometry, shape: AttentionShape, start: int, tile_bits: int
) -> dict[tuple[int, int], list[int]]:
    """The tiles that each slot of each block has, in order, as `Block::division_of` and `tile_of` divide them."""
    worker_bits = (geometry.splits * geometry.slots).bit_length() - 1
    tiles = min(-(-(start + shape.tokens) // 64), 1 << shape.span_bits + tile_bits)
    new_span, spans = start // 64 >> tile_bits, tiles + (1 << tile_bits) - 1 >> tile_bits
    whole, found = new_span >> worker_bits, {}
    for split, slot in product(range(geometry.splits), range(geometry.slots)):
        worker = new_span - (whole << worker_bits) - split * geometry.slots
        has_new = 0 <= worker < geometry.slots
        own = found[split, slot] = []
        for turn in range(whole + (worker >= 0) + (has_new and new_span + 1 < spans)):
            span = (turn << worker_bits) + split * geometry.slots + slot
            if span > new_span:
                if span != new_span + (1 << worker_bits) or new_span + 1 >= spans:
                    continue
                span = new_span + 1
            own += range(span << tile_bits, min(span + 1 << tile_bits, tiles))
    return found


def test_steps_of_large_heads_have_warps_for_all_tiles_of_a_window() -> None:
    """Two spans a block of a cluster; and parts of keys come at once, where there is memory for them."""
    step = AttentionShape(1, 1, 8, 1, 256, 1088, window=512)
    assert attention_geometry(step, device("h200")).warps == 8
    whole = step._replace(size=512, window=0)
    assert [attention_geometry(whole, device(name)).in_turn for name in ("h200", "orin")] == [False, True]
    assert attention_geometry(whole._replace(int8=True), device("h200")).in_turn


@pytest.mark.parametrize("window", [0, 512])
@pytest.mark.parametrize("start", [0, 63, 64, 1000, 4095, 30_000, 65_500])
@pytest.mark.parametrize("tokens", [1, 9, 64])
def test_every_tile_has_one_warp_and_spans_have_theirs_in_order(window: int, start: int, tokens: int) -> None:
    """Of every geometry that is chosen from: those spans are what bits depend on, see `span_bits`, `window_bits`."""
    shape = AttentionShape(1, tokens, 4, 1, 256, 65_600, window=window)
    if window:
        first = max(start + 1 - window, 0)
        start, least = start - (first & -(64 << shape.window_bits)), shape.window_bits
        most = least
    else:
        least, most = ((-(-keys // 64) - 1 >> shape.span_bits).bit_length() for keys in (start + 1, start + tokens))
    for geometry in {each for name in DEVICES for each in attention_geometries(shape, *DEVICES[name][1:])}:
        for tile_bits in range(least, most + 1):
            found = tiles_of_rounds(geometry, shape, start, tile_bits)
            tiles = min(-(-(start + tokens) // 64), 1 << shape.span_bits + tile_bits)
            assert sorted(tile for own in found.values() for tile in own) == list(range(tiles))
            assert all(own == sorted(own) for own in found.values())
            spans = {(tile >> tile_bits, worker) for worker, own in found.items() for tile in own}
            assert len(spans) == len({span for span, _ in spans}), "a span is one slot's"


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
