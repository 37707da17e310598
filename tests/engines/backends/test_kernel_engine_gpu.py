"""Engines of hand-written kernels on the GPU equal those of the NumPy twins within the rounding of its dtype.

Needs a GPU, not TensorRT.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from decode_models import (
    CHAIN,
    DRAFTS,
    EAGLE3,
    FAMILIES,
    LLAMA,
    ODD,
    TOLERANCE,
    TREE,
    Loaded,
    ancestors,
    assert_equals_twin,
    assert_step_equals_twin,
    draft_shape,
    random_draft,
    random_model,
    step_shape,
    twin_step,
)
from device_bits import relative, rounded, to_bits

from edgellm.engines.errors import EngineError
from edgellm.engines.model.config import DraftConfig
from edgellm.engines.model.row_steps import TOKEN_ROWS

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("family", ODD)
def test_each_family_and_odd_widths(gpu, family: str, dtype: str) -> None:
    assert_step_equals_twin(gpu, ODD[family], [77], 128, dtype)


@pytest.mark.parametrize("starts", [[0], [1], [30], [31], [32], [33], [511], [999], [0, 999], [5, 31, 32, 700]])
def test_lengths_around_tiles_and_splits(gpu, starts: list[int]) -> None:
    assert_step_equals_twin(gpu, FAMILIES["qwen3"], starts, 1000, "float16")


def test_a_long_context_gives_each_split_many_tiles(gpu) -> None:
    assert_step_equals_twin(gpu, replace(LLAMA, num_layers=1), [9_000], 9_001, "float16")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("batch", range(1, 9))
def test_every_batch(gpu, batch: int, dtype: str) -> None:
    assert_step_equals_twin(gpu, FAMILIES["llama_untied_biases"], [17 * b + 3 for b in range(batch)], 160, dtype)


@pytest.mark.parametrize(
    "family",
    ["llama", "qwen3", "olmo2", "starcoder2", "layer_norms_and_a_gate", "more_units_than_blocks", "heads_of_gemma4"],
)
def test_a_sequence_has_the_same_bits_in_every_batch(gpu, family: str) -> None:
    config, rows, starts = ODD[family], 512, [3, 500, 64, 31, 257, 0, 511, 100]
    arrays = random_model(config, len(starts), rows, starts)
    together = Loaded(gpu, config, step_shape(arrays, rows), arrays, "float16")
    together.engine.enqueue()
    expected = gpu.download(together.arrays["logits"])
    inputs = {"inputs_embeds", "rope_rotary_cos_sin", "kvcache_start_index", "attention_mask", TOKEN_ROWS}
    for b in range(len(starts)):
        own = {
            name: array[b : b + 1].copy() if name in inputs or "_cache_" in name else array
            for name, array in arrays.items()
        }
        alone = Loaded(gpu, config, step_shape(own, rows), own, "float16")
        alone.engine.enqueue()
        np.testing.assert_array_equal(gpu.download(alone.arrays["logits"])[0], expected[b])


def test_a_captured_step_follows_the_length_on_the_device(gpu) -> None:
    config, rows = FAMILIES["llama"], 256
    arrays = rounded(random_model(config, 1, rows, [40]), "float16")
    loaded = Loaded(gpu, config, step_shape(arrays, rows), arrays, "float16")
    loaded.engine.enqueue()
    graph = gpu.capture(loaded.engine.enqueue, "decode")
    assert graph != loaded.engine.enqueue, "the step was not captured"
    twin_step(config, step_shape(arrays, rows), arrays)
    for position in (41, 42, 200):
        arrays["kvcache_start_index"][0] = position
        gpu.upload(loaded.arrays["kvcache_start_index"], arrays["kvcache_start_index"])
        graph()
        expected = twin_step(config, step_shape(arrays, rows), arrays)
        assert relative(loaded.values("logits"), expected["logits"]) < TOLERANCE["float16"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("parents", [CHAIN[:2], CHAIN, TREE], ids=["two", "chain", "tree"])
@pytest.mark.parametrize("family", ODD)
def test_verified_trees_of_each_family(gpu, family: str, parents: tuple[int | None, ...], dtype: str) -> None:
    assert_step_equals_twin(gpu, ODD[family], [77], 128, dtype, parents)


@pytest.mark.parametrize("starts", [[0], [1], [25], [31], [32], [505], [992], [0, 990], [5, 31], [60, 700]])
def test_verified_tokens_around_tiles_and_splits(gpu, starts: list[int]) -> None:
    parents = TREE if len(starts) == 1 else TREE[:4]
    assert_step_equals_twin(gpu, FAMILIES["qwen3"], starts, 1000, "float16", parents)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("parents", [(None,), TREE], ids=["decode", "tree"])
@pytest.mark.parametrize("layers", [(0,), (1,), (0, 1), (1, 0), (2,), (0, 2)], ids=str)
def test_features_are_what_enters_the_layers(gpu, layers: tuple[int, ...], parents, dtype: str) -> None:
    """2, the number of layers, stands for the final norm's output."""
    config = replace(FAMILIES["llama_untied_biases"], feature_layers=layers)
    assert_step_equals_twin(gpu, config, [40], 64, dtype, parents)


#: where new keys begin or end in a step of 16, a tile of 64 or a group of four tiles
STARTS = [0, 1, 27, 31, 32, 253, 1020, 1023]


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("parents", [CHAIN, TREE, CHAIN[:2]], ids=["chain", "tree", "two"])
def test_a_verified_token_has_the_bits_of_the_decode_step_that_comes_to_it(gpu, parents, start: int) -> None:
    """Logits, features and KV rows of each node, against decode steps one after the other over the node's path."""
    config = replace(LLAMA, num_heads=16, num_kv_heads=8, feature_layers=(0, 1, 2))
    rows, tokens = 1100, len(parents)
    arrays = random_model(config, 1, rows, [start], parents)
    verified = Loaded(gpu, config, step_shape(arrays, rows), arrays, "float16")
    verified.engine.enqueue()
    for node, seen in enumerate(ancestors(parents)):
        path = np.flatnonzero(seen)
        inputs = {"inputs_embeds", "rope_rotary_cos_sin", "attention_mask"}
        own = {name: array[:, :1].copy() if name in inputs else array for name, array in arrays.items()}
        own["attention_mask"] = np.zeros((1, 1, 1, rows), bool)
        stepwise = Loaded(gpu, config, step_shape(own, rows), own, "float16")
        for depth, ancestor in enumerate(path):
            for name in ("inputs_embeds", "rope_rotary_cos_sin"):
                gpu.upload(stepwise.arrays[name], to_bits(arrays[name][:, ancestor : ancestor + 1], "float16"))
            gpu.upload(stepwise.arrays["kvcache_start_index"], np.array([start + depth], np.int32))
            stepwise.engine.enqueue()
        for name in ("logits", "hidden_states"):
            found, expected = (gpu.download(engine.arrays[name]) for engine in (verified, stepwise))
            np.testing.assert_array_equal(found[0, node], expected[0, 0], err_msg=f"{name} of node {node}")
        for index in range(config.num_layers):
            for name in (f"k_cache_{index}", f"v_cache_{index}"):
                found, expected = (gpu.download(engine.arrays[name]) for engine in (verified, stepwise))
                np.testing.assert_array_equal(found[0, :, start + node], expected[0, :, start + len(path) - 1])
    assert tokens == node + 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("last", [0, 3, 7])
@pytest.mark.parametrize("family", ["llama", "llama_untied_biases", "qwen3", "olmo2", "starcoder2", "heads_of_80"])
def test_a_short_prefill_equals_verified_tokens(gpu, family: str, last: int, dtype: str) -> None:
    """Logits of the last token of the prompt, which padding may follow, and KV rows and features of all."""
    config, rows, start = replace(ODD[family], num_layers=2, feature_layers=(0,)), 300, 250
    arrays = random_model(config, 1, rows, [start], CHAIN)
    verified = Loaded(gpu, config, step_shape(arrays, rows), arrays, dtype)
    arrays["last_token_ids"] = np.array([[last]], np.int32)
    prefilled = Loaded(gpu, config, step_shape(arrays, rows, prefills=True), arrays, dtype)
    for loaded in (verified, prefilled, prefilled):  # the second time the counters are as before
        loaded.engine.enqueue()
    assert relative(prefilled.values("logits"), verified.values("logits")[:, last : last + 1]) < TOLERANCE[dtype]
    for name in [name for name in prefilled.arrays if "_cache_" in name or name == "hidden_states"]:
        assert relative(prefilled.values(name), verified.values(name)) < TOLERANCE[dtype], name


def test_a_verified_sequence_has_the_same_bits_in_every_batch(gpu) -> None:
    config, rows, starts = FAMILIES["qwen3"], 300, [3, 255, 64, 31]
    arrays = random_model(config, 4, rows, starts, (None, 0))
    together = Loaded(gpu, config, step_shape(arrays, rows), arrays, "float16")
    together.engine.enqueue()
    inputs = {"inputs_embeds", "rope_rotary_cos_sin", "kvcache_start_index", "attention_mask", TOKEN_ROWS}
    for b in range(4):
        own = {
            name: array[b : b + 1].copy() if name in inputs or "_cache_" in name else array
            for name, array in arrays.items()
        }
        alone = Loaded(gpu, config, step_shape(own, rows), own, "float16")
        alone.engine.enqueue()
        found, expected = (gpu.download(loaded.arrays["logits"]) for loaded in (alone, together))
        np.testing.assert_array_equal(found[0], expected[b])


def test_a_captured_verify_step_follows_tree_and_length_on_the_device(gpu) -> None:
    config, rows = replace(FAMILIES["llama"], feature_layers=(1,)), 256
    arrays = rounded(random_model(config, 1, rows, [40], CHAIN), "float16")
    loaded = Loaded(gpu, config, step_shape(arrays, rows), arrays, "float16")
    loaded.engine.enqueue()
    graph = gpu.capture(loaded.engine.enqueue, "verify")
    assert graph != loaded.engine.enqueue, "the step was not captured"
    twin_step(config, step_shape(arrays, rows), arrays)
    for start, parents in ((41, TREE), (48, CHAIN), (200, TREE)):
        changed = random_model(config, 1, rows, [start], parents)
        for name in ("kvcache_start_index", "attention_mask"):
            arrays[name] = changed[name]
            gpu.upload(loaded.arrays[name], changed[name])
        graph()
        expected = twin_step(config, step_shape(arrays, rows), arrays)
        for name in ("logits", "hidden_states"):
            found = loaded.values(name).reshape(expected[name].shape)
            assert relative(found, expected[name]) < TOLERANCE["float16"]


def test_what_is_bound_is_checked(gpu) -> None:
    config = FAMILIES["llama"]
    arrays = random_model(config, 1, 64, [5])
    loaded = Loaded(gpu, config, step_shape(arrays, 64), arrays, "float16")
    with pytest.raises(EngineError, match="has no tensor 'nonsense'"):
        loaded.engine.bind({"nonsense": loaded.arrays["logits"]})
    with pytest.raises(EngineError, match=r"logits is float16 \(1, 1, 64\), the engine expects float32 \(1, 1, 97\)"):
        loaded.engine.bind({"logits": loaded.arrays["inputs_embeds"]})
    with pytest.raises(EngineError, match="present_k_cache_0 must be bound to the memory of its cache"):
        loaded.engine.bind({"present_k_cache_0": loaded.arrays["v_cache_0"]})
        loaded.engine.enqueue()
    with pytest.raises(EngineError, match=r"needs \d+ bytes of scratch, got 1"):
        loaded.engine.attach(gpu, gpu.empty((1,), "uint8"))


def assert_draft_equals_twin(
    gpu, config: DraftConfig, phase: str, tokens: int, rows: int, starts: list[int], dtype: str
):
    """A step of a draft."""
    shape = draft_shape(phase, len(starts), tokens, rows)
    assert_equals_twin(gpu, config, shape, starts, random_draft(config, shape, starts), dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("phase", "tokens"), [("propose", 10), ("accept", 7)])
@pytest.mark.parametrize("head", DRAFTS)
def test_each_draft_head(gpu, head: str, phase: str, tokens: int, dtype: str) -> None:
    assert_draft_equals_twin(gpu, DRAFTS[head], phase, tokens, 128, [77], dtype)


@pytest.mark.parametrize("tokens", [1, 2, 3, 8, 9, 15, 16, 17, 40, 64])
def test_every_number_of_rows_of_a_draft(gpu, tokens: int) -> None:
    assert_draft_equals_twin(gpu, EAGLE3, "propose", tokens, 128, [31], "float16")


@pytest.mark.parametrize(("phase", "tokens"), [("propose", 5), ("propose", 1), ("accept", 4)])
@pytest.mark.parametrize("starts", [[0], [22], [32], [900], [0, 5, 700]])
def test_lengths_and_batches_of_a_draft(gpu, starts: list[int], phase: str, tokens: int) -> None:
    assert_draft_equals_twin(gpu, EAGLE3, phase, tokens, 1000, starts, "float16")


@pytest.mark.parametrize(("phase", "tokens"), [("propose", 10), ("accept", 7)])
def test_widths_of_a_real_head(gpu, phase: str, tokens: int) -> None:
    """More units than blocks, slices longer than registers hold, more keys than a split has tiles."""
    decoder = replace(
        EAGLE3.decoder,
        hidden_size=1544,
        intermediate_size=4104,
        num_heads=8,
        num_kv_heads=2,
        head_dim=64,
        rotary_dim=64,
    )
    config = replace(EAGLE3, decoder=decoder, draft_vocab_size=20_001)
    assert_draft_equals_twin(gpu, config, phase, tokens, 700, [600], "float16")


def test_a_captured_step_of_a_draft_follows_mask_and_length_on_the_device(gpu) -> None:
    shape = draft_shape("propose", 1, 10, 256)
    arrays = rounded(random_draft(EAGLE3, shape, [40]), "float16")
    loaded = Loaded(gpu, EAGLE3, shape, arrays, "float16")
    loaded.engine.enqueue()
    graph = gpu.capture(loaded.engine.enqueue, "propose")
    assert graph != loaded.engine.enqueue, "the step was not captured"
    twin_step(EAGLE3, shape, arrays)
    for seed, start in enumerate((50, 60, 200)):
        changed = random_draft(EAGLE3, shape, [start], seed)
        for name in ("kvcache_start_index", "attention_mask"):
            arrays[name] = changed[name]
            loaded.upload(name, changed[name])
        graph()
        expected = twin_step(EAGLE3, shape, arrays)
        assert relative(loaded.values("logits"), expected["logits"]) < TOLERANCE["float16"]
