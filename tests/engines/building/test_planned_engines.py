"""The scratch that is planned without a GPU: values between a prompt's segments, TensorRT's own."""

from __future__ import annotations

from dataclasses import replace

import pytest
from decode_models import LLAMA

from edgellm.engines.building.checks import choose_limits
from edgellm.engines.building.needed_kernels import planned_engines
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


def test_packed_weights_take_no_scratch() -> None:
    assert scratch(SMALL, 2048, True) == scratch(SMALL, 2048, False)
    assert scratch(LARGE, 2048, True) == scratch(LARGE, 2048, False)


def test_values_grow_with_the_chunk() -> None:
    # The residual stream and queries, keys and values in float32; normed input, context and activation.
    row = 4 * 2048 + 4 * 3072 + 2 * 2048 + 2 * 2048 + 2 * 8192
    last = 4 * 2048 + 2 * 8192  # of the row that gets logits
    assert scratch(SMALL, 2048, False) == 2048 * row + last
    assert scratch(SMALL, 512, False) == 512 * row + last
    features = replace(LARGE, num_layers=32, feature_layers=(2, 16, 29))
    assert scratch(features, 512, True) - scratch(LARGE, 512, True) == 0  # features are an output
    assert 0 < scratch(SMALL, 16, True) < 10 << 20


@pytest.mark.parametrize(
    ("config", "is_packed", "expected"), [(SMALL, True, 2048), (LARGE, False, 2048), (LARGE, True, 512)]
)
def test_wide_packed_models_take_shorter_chunks(config: DecoderConfig, is_packed: bool, expected: int) -> None:
    config = replace(config, max_position_embeddings=8192)
    assert choose_limits(config, is_packed=is_packed).prefill_chunk == expected
    assert choose_limits(config, prefill_chunk=1024, is_packed=is_packed).prefill_chunk == 1024
    assert choose_limits(config, kv_capacity=256, is_packed=is_packed).prefill_chunk == 256
