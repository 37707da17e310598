"""Propose and accept steps by the decode kernels on the GPU equal their NumPy twins. Needs a GPU, not TensorRT."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from decode_models import (
    EAGLE3,
    HEADS,
    TOLERANCE,
    draft_shape,
    draft_twin_step,
    from_bits,
    random_draft,
    relative,
    rounded,
    to_bits,
)

from edgellm.engines.model.config import DraftConfig, EngineShape

pytestmark = pytest.mark.gpu


class Loaded:
    """A draft engine bound to device copies of `arrays`."""

    def __init__(self, gpu, config: DraftConfig, shape: EngineShape, arrays: dict[str, np.ndarray], dtype: str) -> None:
        from edgellm.engines.backends.cuda_draft_engine import CudaDraftEngine

        self.gpu, self.dtype = gpu, dtype
        self.engine = CudaDraftEngine(gpu.kernel_module, config, shape, dtype)
        self.scratch = gpu.empty((self.engine.scratch_bytes,), "uint8")
        gpu.upload(self.scratch, np.full(self.scratch.shape, 0xFF, np.uint8))  # NaN, so that nothing unwritten is read
        self.engine.attach(gpu, self.scratch)
        self.arrays = {}
        for name, array in arrays.items():
            self.arrays[name] = gpu.empty(array.shape, dtype if array.dtype == np.float32 else array.dtype.name)
            self.upload(name, array)
        for kind in "kv":
            self.arrays[f"present_{kind}_cache_0"] = self.arrays[f"{kind}_cache_0"]
        rows = (shape.batch, shape.selected)
        self.arrays["logits"] = gpu.zeros((*rows, config.draft_vocab_size), "float32")
        self.arrays["hidden_states"] = gpu.zeros((*rows, config.hidden_size), dtype)
        self.engine.bind(self.arrays)

    def upload(self, name: str, array: np.ndarray) -> None:
        self.gpu.upload(self.arrays[name], to_bits(array, self.dtype) if array.dtype == np.float32 else array)

    def values(self, name: str) -> np.ndarray:
        array = self.arrays[name]
        values = self.gpu.download(array)
        return values if array.dtype == "float32" else from_bits(values, self.dtype)


def assert_equals_twin(
    gpu, config: DraftConfig, shape: EngineShape, starts: list[int], dtype: str, seed: int = 7
) -> None:
    arrays = rounded(random_draft(config, shape, starts, seed), dtype)
    loaded = Loaded(gpu, config, shape, arrays, dtype)
    before = {name: arrays[name].copy() for name in ("k_cache_0", "v_cache_0")}
    expected = draft_twin_step(config, shape, arrays)
    for _ in range(2):  # the same step again: the counters are as before
        loaded.engine.enqueue()
        for name in ("logits", "hidden_states"):
            assert relative(loaded.values(name).reshape(expected[name].shape), expected[name]) < TOLERANCE[dtype], name
    for name in before:
        found = loaded.values(name)
        for b, start in enumerate(starts):
            new = slice(start, start + shape.tokens)
            assert relative(found[b, :, new], arrays[name][b, :, new]) < TOLERANCE[dtype], name
            np.testing.assert_array_equal(np.delete(found[b], new, axis=1), np.delete(before[name][b], new, axis=1))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("phase", "tokens"), [("propose", 10), ("accept", 7)])
@pytest.mark.parametrize("head", HEADS)
def test_each_head(gpu, head: str, phase: str, tokens: int, dtype: str) -> None:
    assert_equals_twin(gpu, HEADS[head], draft_shape(phase, 1, tokens, 128), [77], dtype)


@pytest.mark.parametrize("tokens", [1, 2, 3, 8, 9, 15, 16])
def test_every_number_of_rows(gpu, tokens: int) -> None:
    assert_equals_twin(gpu, EAGLE3, draft_shape("propose", 1, tokens, 96), [31], "float16")


@pytest.mark.parametrize(("phase", "tokens"), [("propose", 5), ("propose", 1), ("accept", 4)])
@pytest.mark.parametrize("starts", [[0], [22], [32], [900], [0, 5, 700]])
def test_lengths_and_batches(gpu, starts: list[int], phase: str, tokens: int) -> None:
    assert_equals_twin(gpu, EAGLE3, draft_shape(phase, len(starts), tokens, 1000), starts, "float16")


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
    assert_equals_twin(gpu, config, draft_shape(phase, 1, tokens, 700), [600], "float16")


def test_a_captured_step_follows_mask_and_length_on_the_device(gpu) -> None:
    shape = draft_shape("propose", 1, 10, 256)
    arrays = rounded(random_draft(EAGLE3, shape, [40]), "float16")
    loaded = Loaded(gpu, EAGLE3, shape, arrays, "float16")
    loaded.engine.enqueue()
    graph = gpu.capture(loaded.engine.enqueue, "propose")
    assert graph != loaded.engine.enqueue, "the step was not captured"
    draft_twin_step(EAGLE3, shape, arrays)
    for seed, start in enumerate((50, 60, 200)):
        changed = random_draft(EAGLE3, shape, [start], seed)
        for name in ("kvcache_start_index", "attention_mask"):
            arrays[name] = changed[name]
            loaded.upload(name, changed[name])
        graph()
        expected = draft_twin_step(EAGLE3, shape, arrays)
        assert relative(loaded.values("logits")[0], expected["logits"]) < TOLERANCE["float16"]
