"""Large steps on the GPU, by the kernels of many rows: against their twins, and bit for bit against few rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from decode_models import (
    FAMILIES,
    LLAMA,
    ODD,
    SCALED,
    Loaded,
    ancestors,
    assert_step_equals_twin,
    random_model,
    random_parents,
    step_shape,
    twin_step,
)
from device_bits import relative, rounded

from edgellm.engines.backends.steps.linear import FewRows, ManyRows
from edgellm.engines.model.config import DecoderConfig
from edgellm.engines.model.row_steps import TOKEN_ROWS
from edgellm.kernels.decode.contract import MAX_ROWS

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("tokens", [17, 32, 64])
@pytest.mark.parametrize("family", ODD)
def test_trees_of_each_family_and_odd_widths(gpu, family: str, tokens: int, dtype: str) -> None:
    assert_step_equals_twin(gpu, ODD[family], [77], 160, dtype, random_parents(tokens, seed=tokens))


@pytest.mark.parametrize("tokens", [17, 20, 24, 25, 31, 32, 33, 40, 47, 48, 49, 57, 63, 64])
def test_every_size_of_a_tree(gpu, tokens: int) -> None:
    assert_step_equals_twin(gpu, FAMILIES["llama_untied_biases"], [40], 130, "float16", random_parents(tokens, seed=1))


@pytest.mark.parametrize("starts", [[0], [1], [31], [32], [505], [991], [0, 968], [5, 31], [60, 700]])
def test_trees_around_tiles_and_splits(gpu, starts: list[int]) -> None:
    parents = random_parents(64 // len(starts), seed=3)
    assert_step_equals_twin(gpu, FAMILIES["qwen3"], starts, 1060, "float16", parents)


@pytest.mark.parametrize(("batch", "tokens"), [(4, 8), (5, 4), (2, 16), (9, 2), (8, 8), (3, 16), (2, 32), (32, 2)])
def test_batches_of_trees(gpu, batch: int, tokens: int) -> None:
    starts = [17 * b % 190 + 3 for b in range(batch)]
    assert_step_equals_twin(gpu, FAMILIES["qwen2"], starts, 240, "float16", random_parents(tokens, seed=2))


@pytest.mark.parametrize("layers", [(0,), (1, 0), (2,), (0, 2)], ids=str)
def test_features_are_what_enters_the_layers(gpu, layers: tuple[int, ...]) -> None:
    config = replace(FAMILIES["llama_untied_biases"], feature_layers=layers)
    assert_step_equals_twin(gpu, config, [40], 128, "bfloat16", random_parents(64, seed=4))


@pytest.mark.parametrize("tokens", [32, 64])
def test_a_chain_as_long_as_the_step(gpu, tokens: int) -> None:
    assert_step_equals_twin(gpu, LLAMA, [1000], 1100, "float16", (None, *range(tokens - 1)))


#: widths whose slices of K are whole, cut and partly empty; heads of each number of pairs; units beyond the last block
SHAPES: dict[str, DecoderConfig] = {
    "llama": replace(LLAMA, num_heads=16, num_kv_heads=8, feature_layers=(0, 1, 2)),
    "biases": replace(FAMILIES["llama_untied_biases"], feature_layers=(1, 2)),
    "qwen3": replace(FAMILIES["qwen3"], hidden_size=512, intermediate_size=1536),
    "heads_of_128": ODD["heads_of_128"],
    "heads_of_80": ODD["heads_of_80"],
    "many_heads_a_group": ODD["many_heads_a_group"],
    "more_units_than_blocks": ODD["more_units_than_blocks"],
    "gemma": replace(SCALED["gemma"], head_dim=256, rotary_dim=256),
    "granite": replace(SCALED["granite"], feature_layers=(0, 2)),
    "gemma4": replace(ODD["heads_of_gemma4"], feature_layers=(0, 4)),
}


def step_of_a_path(arrays: dict[str, np.ndarray], path: np.ndarray, start: int) -> dict[str, np.ndarray]:
    """The inputs of a step that verifies the nodes of one path, a chain."""
    own = dict(arrays)
    for name in arrays.keys() & {"inputs_embeds", "rope_rotary_cos_sin", TOKEN_ROWS}:
        own[name] = arrays[name][:, path].copy()
    own["attention_mask"] = np.zeros((1, 1, len(path), arrays["attention_mask"].shape[-1]), bool)
    for depth in range(len(path)):
        own["attention_mask"][0, 0, depth, : start + depth + 1] = True
    return own


@pytest.mark.parametrize(("shape", "start", "tokens"), [
    ("llama", 0, 32),
    ("llama", 27, 64),
    ("llama", 253, 20),
    ("llama", 1020, 33),
    ("llama", 2045, 64),
    ("biases", 31, 64),
    ("qwen3", 100, 48),
    ("heads_of_128", 63, 64),
    ("gemma4", 100, 60),
    ("heads_of_80", 5, 17),
    ("many_heads_a_group", 90, 64),
    ("more_units_than_blocks", 40, 32),
    ("more_units_than_blocks", 41, 64),
])  # fmt: skip
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_token_of_a_large_tree_has_the_bits_of_a_small_step(
    gpu, shape: str, start: int, tokens: int, dtype: str
) -> None:
    """Logits, features and KV rows of every node, against a chain of its ancestors on the kernels of few tokens.

    Those have the bits of decode steps: `test_a_verified_token_has_the_bits_of_the_decode_step_that_comes_to_it`.
    """
    config, rows = SHAPES[shape], start + 80
    parents = random_parents(tokens, seed=start, depth=9)
    arrays = random_model(config, 1, rows, [start], parents)
    large = Loaded(gpu, config, step_shape(arrays, rows), arrays, dtype)
    large.engine.enqueue()
    results = ("logits", "hidden_states") if config.feature_layers else ("logits",)
    expected = {name: gpu.download(large.arrays[name]) for name in large.arrays if "_cache_" in name or name in results}
    leaves = set(range(tokens)) - {parent for parent in parents if parent is not None}
    seen = ancestors(parents)
    for leaf in sorted(leaves):
        path = np.flatnonzero(seen[leaf])
        if len(path) == 1:
            path = np.array([path[0], path[0]])
        assert len(path) <= MAX_ROWS
        own = step_of_a_path(arrays, path, start)
        small = Loaded(gpu, config, step_shape(own, rows), own, dtype)
        small.engine.enqueue()
        for depth, node in enumerate(path):
            for name in results:
                found = gpu.download(small.arrays[name])
                np.testing.assert_array_equal(found[0, depth], expected[name][0, node], err_msg=f"{name} of {node}")
            for name in expected.keys() - {*results}:
                found = gpu.download(small.arrays[name])
                np.testing.assert_array_equal(found[0, :, start + depth], expected[name][0, :, start + node])


@pytest.mark.parametrize(
    ("starts", "tokens"), [((0, 27, 253, 90), 64), ((40, 5, 130), 32), ((1, 2, 3, 4, 5, 6, 7, 8, 9), 8)]
)
def test_a_batch_of_large_trees_has_the_bits_of_each_alone(gpu, starts: tuple[int, ...], tokens: int) -> None:
    config, rows = SHAPES["llama"], 340
    arrays = random_model(config, len(starts), rows, list(starts), random_parents(tokens, seed=tokens, depth=9))
    of_slots = {"inputs_embeds", "rope_rotary_cos_sin", "attention_mask", "kvcache_start_index"}
    of_slots |= {name for name in arrays if "_cache_" in name}
    together = Loaded(gpu, config, step_shape(arrays, rows), arrays, "float16")
    together.engine.enqueue()
    results = ["logits", "hidden_states", *(name for name in arrays if "_cache_" in name)]
    found = {name: gpu.download(together.arrays[name]) for name in results}
    for slot in range(len(starts)):
        own = {name: array[slot : slot + 1].copy() if name in of_slots else array for name, array in arrays.items()}
        alone = Loaded(gpu, config, step_shape(own, rows), own, "float16")
        alone.engine.enqueue()
        for name in results:
            np.testing.assert_array_equal(found[name][slot], gpu.download(alone.arrays[name])[0], err_msg=name)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("starts", "tokens"), [((90,), 1), ((0, 27, 253, 90), 1), ((63,), 2), ((40,), 16), ((17, 200), 8), ((5,) * 16, 1)]
)
@pytest.mark.parametrize("family", SHAPES)
def test_steps_of_few_tokens_have_the_same_bits(gpu, family: str, starts: tuple[int, ...], tokens: int, dtype: str):
    """Either executor may compute them: as is faster, and as a GPU's shared memory allows."""
    config = SHAPES[family]
    arrays = random_model(config, len(starts), 300, list(starts), random_parents(tokens, seed=tokens))
    shape = step_shape(arrays, 300)
    few, many = (Loaded(gpu, config, shape, arrays, dtype, way) for way in (FewRows, ManyRows))
    for loaded in (few, many):
        loaded.engine.enqueue()
    results = ("logits", "hidden_states") if config.feature_layers else ("logits",)
    for name in (*results, *(name for name in arrays if "_cache_" in name)):
        found, expected = (gpu.download(loaded.arrays[name]) for loaded in (many, few))
        np.testing.assert_array_equal(found, expected, err_msg=name)


@pytest.mark.parametrize("tokens", [32, 64])
def test_a_captured_step_follows_tree_and_length_on_the_device(gpu, tokens: int) -> None:
    config, rows = replace(FAMILIES["llama"], feature_layers=(1,)), 256
    arrays = rounded(random_model(config, 1, rows, [40], random_parents(tokens, seed=0)), "float16")
    loaded = Loaded(gpu, config, step_shape(arrays, rows), arrays, "float16")
    loaded.engine.enqueue()
    graph = gpu.capture(loaded.engine.enqueue, "verify")
    assert graph != loaded.engine.enqueue, "the step was not captured"
    twin_step(config, step_shape(arrays, rows), arrays)
    for start, seed in ((41, 1), (101, 2), (180, 3)):
        changed = random_model(config, 1, rows, [start], random_parents(tokens, seed=seed))
        for name in ("kvcache_start_index", "attention_mask"):
            arrays[name] = changed[name]
            gpu.upload(loaded.arrays[name], changed[name])
        graph()
        expected = twin_step(config, step_shape(arrays, rows), arrays)
        for name in ("logits", "hidden_states"):
            found = loaded.values(name).reshape(expected[name].shape)
            assert relative(found, expected[name]) < 2e-3


@pytest.mark.parametrize("tokens", [32, 64])
def test_repeated_steps_of_real_widths_give_the_same_bits(gpu, tokens: int) -> None:
    """Widths of Llama-3.2-1B, two layers: a race between overlapping kernels would show as a difference."""
    config = replace(
        LLAMA, hidden_size=2048, intermediate_size=8192, num_heads=32, num_kv_heads=8, head_dim=64, rotary_dim=64,
        vocab_size=32_000,
    )  # fmt: skip
    rows = 700
    arrays = random_model(config, 1, rows, [500], random_parents(tokens, seed=6))
    loaded = Loaded(gpu, config, step_shape(arrays, rows), arrays, "float16")
    loaded.engine.enqueue()
    first = gpu.download(loaded.arrays["logits"])
    assert np.isfinite(first).all()
    graph = gpu.capture(loaded.engine.enqueue, "verify")
    for _ in range(20):
        loaded.clear_logits()
        for _ in range(5):
            graph()
        np.testing.assert_array_equal(gpu.download(loaded.arrays["logits"]), first)
