"""Engines of kernels with LoRA adapters on the GPU: as the twins compute them, each row bit for bit as it is alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from decode_models import (
    CHAIN,
    FAMILIES,
    LLAMA,
    SCALED,
    TREE,
    Loaded,
    assert_equals_twin,
    random_adapters,
    random_model,
    step_shape,
)
from device_bits import rounded

from edgellm.engines.model.adapted_projections import SCALES
from edgellm.engines.model.config import DecoderConfig
from edgellm.engines.model.limits import EngineShape

pytestmark = pytest.mark.gpu

ROWS = 160
PLACES, RANK = 4, 16
#: With more units of A's rows than of the layers' own, and fewer.
WIDE = replace(LLAMA, hidden_size=1032, intermediate_size=2056, vocab_size=97, num_layers=2)


def adapted(
    config: DecoderConfig, taken: list[int | None], parents: tuple[int | None, ...] = (None,)
) -> tuple[EngineShape, dict[str, np.ndarray]]:
    """A step of sequences that take an adapter each: its shape, and all that it is bound to."""
    starts = [(29 * sequence + 7) % 100 for sequence in range(len(taken))]
    arrays = random_model(config, len(taken), ROWS, starts, parents) | random_adapters(config, taken, PLACES, RANK)
    return replace(step_shape(arrays, ROWS), lora_slots=PLACES, lora_rank=RANK), arrays


def logits(gpu, config: DecoderConfig, shape: EngineShape, arrays: dict[str, np.ndarray]) -> np.ndarray:
    loaded = Loaded(gpu, config, shape, arrays, "float16")
    loaded.engine.enqueue()
    return gpu.download(loaded.arrays["logits"])


def sequence_of(arrays: dict[str, np.ndarray], shape: EngineShape, b: int) -> dict[str, np.ndarray]:
    """What one sequence of a step is bound to."""
    shared = {name for name in arrays if name.startswith("model.") or name == "lm_head.weight"}
    return {name: array if name in shared else array[b : b + 1].copy() for name, array in arrays.items()}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("taken", [[1], [None], [3, None, 0], [0, 1, 2, 3, 0, None]], ids=str)
@pytest.mark.parametrize("family", ["llama_untied_biases", "qwen3", "olmo2", "starcoder2"])
def test_decode_steps(gpu, family: str, taken: list[int | None], dtype: str) -> None:
    config = (FAMILIES | SCALED)[family]
    shape, arrays = adapted(config, taken)
    assert_equals_twin(gpu, config, shape, arrays["kvcache_start_index"].tolist(), arrays, dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("taken", [[2], [3, 1]], ids=str)
@pytest.mark.parametrize("parents", [CHAIN, TREE], ids=["chain", "tree"])
def test_verified_trees(gpu, parents: tuple[int | None, ...], taken: list[int | None], dtype: str) -> None:
    shape, arrays = adapted(WIDE, taken, parents)
    assert_equals_twin(gpu, WIDE, shape, arrays["kvcache_start_index"].tolist(), arrays, dtype)


@pytest.mark.parametrize("tokens", [8, 16])
def test_short_prefills(gpu, tokens: int) -> None:
    shape, arrays = adapted(WIDE, [2], (None, *range(tokens - 1)))
    shape = replace(shape, phase="prefill", selected=1)
    arrays["last_token_ids"] = np.array([[tokens - 3]], np.int32)
    assert_equals_twin(gpu, WIDE, shape, [7], arrays, "float16")


@pytest.mark.parametrize("parents", [(None,), TREE[:3]], ids=["decode", "verify"])
def test_a_sequence_has_its_bits_whatever_others_take(gpu, parents: tuple[int | None, ...]) -> None:
    """Those that it has alone, with its adapter in another place; without one, those of an engine without adapters."""
    taken = [2, None, 0, 3, 2]
    shape, arrays = adapted(WIDE, taken, parents)
    together = logits(gpu, WIDE, shape, arrays)
    order = [3, 0, 2, 1]  # of the adapters, by place
    moved = {
        name: np.ascontiguousarray(array.reshape(PLACES, -1, array.shape[1])[order].reshape(array.shape))
        for name, array in arrays.items()
        if "lora_a" in name or "lora_b" in name
    }
    for sequence, place in enumerate(taken):
        own = sequence_of(arrays, shape, sequence) | moved
        own[SCALES] = np.array([[held == place for held in order]], np.float32)
        alone = replace(shape, batch=1)
        np.testing.assert_array_equal(logits(gpu, WIDE, alone, own)[0], together[sequence])
        if place is None:
            plain = replace(alone, lora_slots=0, lora_rank=0)
            np.testing.assert_array_equal(logits(gpu, WIDE, plain, own)[0], together[sequence])


def test_a_verified_token_has_the_bits_of_the_decode_step(gpu) -> None:
    shape, arrays = adapted(WIDE, [1, 3], CHAIN)
    verified = logits(gpu, WIDE, shape, arrays)
    first = {
        name: np.ascontiguousarray(array[:, :1]) if name in ("inputs_embeds", "rope_rotary_cos_sin") else array
        for name, array in arrays.items()
    }
    first["attention_mask"] = np.zeros((2, 1, 1, ROWS), bool)
    decoded = logits(gpu, WIDE, replace(shape, phase="decode", tokens=1, selected=1), first)
    np.testing.assert_array_equal(decoded[:, 0], verified[:, 0])


def test_a_captured_step_follows_the_adapters_on_the_device(gpu) -> None:
    """One graph, replayed with other scales; and a step that was left half done changes nothing of the next."""
    shape, arrays = adapted(WIDE, [1, 3])
    arrays = rounded(arrays, "float16")
    loaded = Loaded(gpu, WIDE, shape, arrays, "float16")
    loaded.engine.enqueue()
    graph = gpu.capture(loaded.engine.enqueue, "decode")
    assert graph != loaded.engine.enqueue, "the step was not captured"
    for taken in ([1, 3], [0, 0], [None, 2], [None, None], [1, 3]):
        scales = np.array([[place == one for place in range(PLACES)] for one in taken], np.float32)
        loaded.upload(SCALES, scales)
        expected = logits(gpu, WIDE, shape, arrays | {SCALES: scales})
        graph()
        np.testing.assert_array_equal(gpu.download(loaded.arrays["logits"]), expected)

        def stop(index: int) -> None:
            if index == 1:
                raise InterruptedError

        with pytest.raises(InterruptedError):
            loaded.engine.enqueue_by_layer(stop)
        loaded.engine.enqueue()
        np.testing.assert_array_equal(gpu.download(loaded.arrays["logits"]), expected)
