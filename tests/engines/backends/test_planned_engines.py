"""The scratch that is planned without a GPU: values between a prompt's segments, dense weights, TensorRT's own."""

from __future__ import annotations

from dataclasses import replace

import pytest
from decode_models import LLAMA

from edgellm.engines.backends.planned_engines import planned_engines
from edgellm.engines.building.checks import choose_limits
from edgellm.engines.model.config import DecoderConfig
from edgellm.engines.model.decoder import decoder_weights
from edgellm.engines.model.limits import EngineLimits
from edgellm.kernels.quantization.device_layout import DeviceLayout
from edgellm.kernels.quantization.packed_weight import WeightFormat

INT4 = WeightFormat("int4", 128, zeros=False, dtype="float16")
#: With the layers of Llama-3.2-1B and Llama-3.1-8B.
SMALL = replace(
    LLAMA, hidden_size=2048, intermediate_size=8192, num_heads=32, num_kv_heads=8, head_dim=64, num_layers=4
)
LARGE = replace(SMALL, hidden_size=4096, intermediate_size=14336, head_dim=128)


def scratch(config: DecoderConfig, chunk: int, packed: bool) -> int:
    """In bytes; kernels run what stands behind the last attention."""
    specs = [spec for spec in decoder_weights(config) if len(spec.shape) == 2 and ".layers." in spec.name]
    layouts = {"base": {spec.name: DeviceLayout(INT4, *spec.shape) for spec in specs}} if packed else {}
    limits = EngineLimits(1, chunk, 4096, packed=packed)
    return planned_engines({"base": config}, limits, "float16", layouts)["engine scratch"]


def test_a_layer_of_a_small_model_is_dense_at_a_time_of_a_large_one_its_largest_matrix() -> None:
    assert scratch(SMALL, 2048, True) - scratch(SMALL, 2048, False) == 2 * 2048 * (2048 + 3 * 8192 + 3072)
    assert scratch(LARGE, 2048, True) - scratch(LARGE, 2048, False) == 2 * 4096 * 2 * 14336


def test_values_grow_with_the_chunk() -> None:
    # The residual stream twice in float32, queries, keys and values, context; TensorRT: gate and up, and their product.
    assert scratch(SMALL, 2048, False) == 2048 * (2 * 4 * 2048 + 2 * 3072 + 2 * 2048 + 2 * 3 * 8192)
    assert scratch(SMALL, 512, False) == scratch(SMALL, 2048, False) // 4
    # The activation between segments; TensorRT: gate and up, and their normed input, once in float32. 315.8 MiB were
    # taken with the features of three layers.
    values = 2 * 4 * 4096 + 2 * 6144 + 2 * 4096 + 2 * 14336
    large = 512 * (values + 2 * 2 * 14336 + (2 + 4) * 4096)
    assert scratch(LARGE, 512, False) == large
    features = replace(LARGE, num_layers=32, feature_layers=(2, 16, 29))
    assert abs(scratch(features, 512, True) / 2**20 - 315.8) < 0.5
    assert scratch(SMALL, 16, True) == 0  # by kernels whole


@pytest.mark.parametrize(
    ("config", "is_packed", "expected"), [(SMALL, True, 2048), (LARGE, False, 2048), (LARGE, True, 512)]
)
def test_wide_packed_models_take_shorter_chunks(config: DecoderConfig, is_packed: bool, expected: int) -> None:
    config = replace(config, max_position_embeddings=8192)
    assert choose_limits(config, is_packed=is_packed).prefill_chunk == expected
    assert choose_limits(config, prefill_chunk=1024, is_packed=is_packed).prefill_chunk == 1024
    assert choose_limits(config, kv_capacity=256, is_packed=is_packed).prefill_chunk == 256
