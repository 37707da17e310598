"""The state of a layer: its tensors, what snapshots hold of it, where it is cut, and the memory of all of them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from edgellm.engines.families.programs import model_program
from edgellm.engines.model.config import DecoderConfig
from edgellm.engines.model.decoder import decoder_weights
from edgellm.engines.model.limits import EngineLimits, EngineShape
from edgellm.engines.model.memory_plan import plan_memory
from edgellm.engines.model.states import KVRows, WindowRows, decoder_states, saved_dtype, state_bytes, state_edge

CONFIG = DecoderConfig("llama", 96, 64, 128, 2, 4, 2, 16, 256, 1e-5, 10000.0, 16, "float16", True)


def test_rows_of_both_kinds_have_their_tensors() -> None:
    plain = KVRows(3, 2, 16).tensors(4, 80)
    assert plain == dict.fromkeys(("k_cache_3", "v_cache_3"), ((4, 2, 80, 16), "compute"))
    quantized = KVRows(3, 2, 16, "int8").tensors(4, 80)
    assert list(quantized) == ["k_cache_3", "v_cache_3", "k_scale_3", "v_scale_3"]
    assert quantized["v_cache_3"] == ((4, 2, 80, 16), "int8") and quantized["k_scale_3"] == ((4, 2, 80, 1), "float32")
    assert KVRows(0, 2, 16, "int8").saved(5)["k_scale_0"] == ((2, 5, 1), "float32")


def test_rows_are_cut_anywhere() -> None:
    assert [KVRows(0, 2, 16).cut(10, wanted) for wanted in (0, 4, 10, 12)] == [0, 4, 10, 10]


def test_rows_of_a_window_are_a_ring_and_reach_so_far_back() -> None:
    state = WindowRows(3, 2, 16, "compute", window=5, rows=64, reach=9)
    for rows in (1, 4000):
        assert state.tensors(4, rows) == dict.fromkeys(("k_cache_3", "v_cache_3"), ((4, 2, 64, 16), "compute"))
    assert [state.saved(tokens)["k_cache_3"][0] for tokens in (3, 9, 700)] == [(2, 3, 16), (2, 9, 16), (2, 9, 16)]
    assert [state.first_saved(tokens) for tokens in (3, 9, 10, 72, 73, 700)] == [0, 0, 1, 63, 0, 51]
    # Of 20 tokens rows 11 to 19 are there: a text of 15 goes on, whose next token sees 11 to 15.
    assert [state.cut(20, wanted) for wanted in (25, 20, 15, 14, 1, 0)] == [20, 20, 15, 0, 0, 0]
    assert [state.cut(9, wanted) for wanted in (9, 5, 1)] == [9, 5, 1]  # nothing is gone yet
    assert state.kept(1, 4) == {}


def test_states_of_windows_follow_the_limits() -> None:
    config = replace(CONFIG, sliding_window=20, layer_kinds=("window", "attention"))
    limits = EngineLimits(2, 16, 512)
    limits = replace(limits, window_rows=limits.rows_for_window(20))
    assert (limits.window_step, limits.window_rows) == (64, 384)
    window, rows = decoder_states(config, "int8", limits)
    assert window == WindowRows(0, 2, 16, "int8", 20, 384, 276) and rows == KVRows(1, 2, 16, "int8")
    shorter = decoder_states(config, "compute", replace(limits, window_rows=100))[0]
    assert shorter == WindowRows(0, 2, 16, "compute", 20, 100, 36)
    assert all(type(state) is KVRows for state in decoder_states(config, "compute", EngineLimits(2, 16, 16)))
    shape = limits.base_shape("decode", 2, 1, 512)
    edge = state_edge(decoder_states(config, "compute", limits), 2, limits.kv_rows)
    assert model_program(config, shape).states == edge


@pytest.mark.parametrize(
    ("name", "compute", "int8"),
    [
        ("k_cache_0", "compute", "int8"),
        ("v_cache_17", "compute", "int8"),
        ("v_scale_2", None, "float32"),
        ("k_cache_01", None, None),
        ("x_cache_0", None, None),
        ("k_cache_0.more", None, None),
    ],
)
def test_names_are_told_apart(name: str, compute: str | None, int8: str | None) -> None:
    assert (saved_dtype(name, "compute"), saved_dtype(name, "int8")) == (compute, int8)


@pytest.mark.parametrize("kv_cache", ["compute", "int8"])
def test_an_engine_is_bound_to_the_states_of_its_layers(kv_cache: str) -> None:
    program = model_program(CONFIG, EngineShape("decode", 3, 1, 64, 80, kv_cache=kv_cache))
    expected = state_edge(decoder_states(CONFIG, kv_cache), 3, 80)
    assert program.states == expected
    assert {name: program.edge[f"present_{name}"] for name in expected} == expected


def test_the_memory_plan_counts_rows_and_scales() -> None:
    limits, specs = EngineLimits(3, 16, 96), decoder_weights(CONFIG)
    rows = 2 * 2 * 3 * 2 * limits.kv_rows  # layers, keys and values, slots, heads, rows
    plain = plan_memory(CONFIG, limits, specs, "float16").items
    quantized = plan_memory(CONFIG, replace(limits, kv_cache="int8"), specs, "float16").items
    assert plain["KV caches"] == rows * 2 * 16 and quantized["KV caches"] == rows * (16 + 4)
    assert {n: size for n, size in plain.items() if n != "KV caches"} == {
        n: size for n, size in quantized.items() if n != "KV caches"
    }


def test_bytes_of_tensors() -> None:
    edge = state_edge(decoder_states(CONFIG, "int8"), 2, 10)
    assert state_bytes(edge, "bfloat16") == sum(math.prod(s) * (1 if d == "int8" else 4) for s, d in edge.values())
