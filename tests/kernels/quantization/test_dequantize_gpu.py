"""Packed weights as dense matrices on the GPU: the bits of `PackedWeight.values`, rounded to the compute dtype."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from packed_weights import (
    GGUF_FORMATS,
    assert_same_bits,
    compute_bits,
    packed_copy,
    random_of,
    random_packed,
    rescaled,
    with_factors,
)

from edgellm.kernels.errors import KernelError
from edgellm.kernels.prefill.launcher import dequantize
from edgellm.kernels.quantization.device_layout import device_layout
from edgellm.kernels.quantization.packed_weight import Codes, PackedWeight, WeightFormat

pytestmark = pytest.mark.gpu


def assert_dequantized(
    gpu, weight: PackedWeight, dtype: str, expected: np.ndarray | None = None, signed_zeros: bool = True
) -> None:
    """Bit for bit, what was not written told from it; unless `signed_zeros`, a zero of either sign is one."""
    bits = compute_bits(weight.values() if expected is None else expected, dtype)[0]
    packed, values = packed_copy(gpu, weight, dtype), gpu.empty(weight.shape, dtype)
    gpu.upload(values, np.full_like(bits, 0xFFFF if dtype == "bfloat16" else np.nan))
    dequantize(gpu.kernel_module, packed, values)()
    assert_same_bits(gpu.download(values), bits, signed_zeros)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("group", [16, 32, 64, 128, 256, None])
def test_values_are_those_of_the_packed_weight(gpu, group: int | None, zeros: bool, dtype: str) -> None:
    for rows, columns, size in ((8, 128, 3.0), (19, 520, 0.01), (130, 1032, 0.2)):
        assert_dequantized(gpu, random_packed(rows, columns, group, zeros, dtype, size), dtype)


@pytest.mark.parametrize("compute", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("codes", "group", "zeros", "dtype"),
    [
        ("int4", 128, True, "float32"),
        ("int4", 32, False, "bfloat16"),
        ("int8", 64, True, "float16"),
        ("int8", None, False, "bfloat16"),
        ("fp8", 128, False, "float16"),
        ("fp8", None, False, "bfloat16"),
        ("fp4", 16, False, "float16"),
        ("fp4", 16, False, "float32"),
    ],
)
def test_values_of_other_formats(gpu, codes: Codes, group: int | None, zeros: bool, dtype: str, compute: str) -> None:
    weight = random_packed(19, 520, group, zeros, dtype, 0.02, codes=codes)
    assert_dequantized(gpu, weight, compute)
    if dtype == "float32":
        assert_dequantized(gpu, rescaled(weight, "float32"), compute)


@pytest.mark.parametrize("compute", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", GGUF_FORMATS)
def test_values_of_gguf_files(gpu, kind: str, compute: str) -> None:
    for rows, columns, size in ((8, 128, 3.0), (19, 544, 0.01), (130, 1056, 0.2)):
        weight = random_of(GGUF_FORMATS[kind], rows, columns, size)
        layout = device_layout(weight, compute)  # zeros of negative scales lose their signs in part
        assert_dequantized(gpu, weight, compute, signed_zeros=layout.kind == "narrow" and not layout.small)


@pytest.mark.parametrize("compute", ["float16", "bfloat16"])
@pytest.mark.parametrize(("codes", "zeros"), [("int4", False), ("int5", False), ("int6", True), ("int8", False)])
def test_values_with_minima_or_zero_points_of_any_numbers(gpu, codes: Codes, zeros: bool, compute: str) -> None:
    format = WeightFormat(codes, 64, False, "float32", minima=True)
    weight = random_packed(19, 520, 64, True, "float32", codes=codes) if zeros else random_of(format, 19, 520)
    assert_dequantized(gpu, rescaled(weight, "float32"), compute)


@pytest.mark.parametrize("compute", ["float16", "bfloat16"])
def test_values_with_scales_of_8_bits(gpu, compute: str) -> None:
    for numbers, divides in (((0.01,), False), ((90.0, 130.0), True)):
        weight = with_factors(random_packed(24, 520, 16, False, "float32", codes="fp4"), numbers, divides)
        assert device_layout(weight, compute).has_factors
        assert_dequantized(gpu, weight, compute)


def test_columns_go_where_they_belong_times_the_scales_of_inputs(gpu) -> None:
    random, plain = np.random.default_rng(5), random_packed(19, 520, 64, True, "float16")
    order, scales = random.permutation(520).astype(np.int32), random.uniform(0.5, 2, 520).astype(np.float32)
    format = WeightFormat("int4", 64, True, "float16", permuted=True)
    assert_dequantized(gpu, replace(plain, format=format, order=order), "float16")
    for weight in (replace(plain, input_scales=scales), replace(plain, order=order, input_scales=scales)):
        assert_dequantized(gpu, weight, "float16", weight.values() * scales)


def test_overlapping_launches_have_all_written_when_the_last_is_done(gpu) -> None:
    weights = [random_packed(520, 1024, 64, False, "float16", seed=seed) for seed in range(4)]
    packed = [packed_copy(gpu, weight) for weight in weights]
    values = [gpu.empty((520, 1024), "float16") for _ in weights]
    launches = [dequantize(gpu.kernel_module, *pair) for pair in zip(packed, values, strict=True)]
    for launch in launches[1:]:
        launch.overlap_previous()
    for _ in range(3):
        for array in values:
            gpu.upload(array, np.zeros(array.shape, np.float16))
        for launch in launches:
            launch()
        for array, weight in zip(values, weights, strict=True):
            np.testing.assert_array_equal(gpu.download(array), weight.values())


def test_values_of_another_weight_are_refused(gpu) -> None:
    packed = packed_copy(gpu, random_packed(8, 128, 128, False, "float16"))
    for shape, dtype in (((8, 136), "float16"), ((8, 128), "bfloat16")):
        with pytest.raises(KernelError, match=r"cannot hold a weight float16 \[8, 128\]"):
            dequantize(gpu.kernel_module, packed, gpu.empty(shape, dtype))
