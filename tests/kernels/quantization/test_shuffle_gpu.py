"""Weights of 4 to 8 bits in the kernels' layout, made on the GPU."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from device_weights import to_device_layout
from gguf_writing import random_blocks
from gpu_device import device_copy
from packed_weights import GGUF_FORMATS, random_of, random_packed

from edgellm.engines.quantization.gguf_blocks import BlockLayout
from edgellm.engines.quantization.layout import LinearTensors
from edgellm.engines.quantization.stored import fused
from edgellm.kernels.errors import KernelError
from edgellm.kernels.quantization.block_codes import BLOCK_CODES, block_codes, block_levels, unblock
from edgellm.kernels.quantization.device_layout import device_layout, tail_bytes
from edgellm.kernels.quantization.packed_weight import Codes
from edgellm.kernels.quantization.turn import shuffle

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("rows", "columns", "group", "zeros", "codes"),
    [
        (8, 128, 128, False, "int4"),
        (19, 520, 32, True, "int4"),
        (130, 264, None, True, "int4"),
        (19, 520, 16, True, "int8"),
        (130, 264, None, False, "fp8"),
        (19, 528, 16, False, "fp4"),
        (19, 520, 16, True, "int5"),
        (130, 264, 64, True, "int6"),
        (19, 520, 32, False, "iq4"),
    ],
)
def test_the_layout_is_made_on_the_device(
    gpu, rows: int, columns: int, group: int | None, zeros: bool, codes: Codes
) -> None:
    weight = random_packed(rows, columns, group, zeros, "float16", codes=codes)
    layout, expected = to_device_layout(weight)
    tails = device_copy(gpu, np.ascontiguousarray(tail_bytes(weight, layout)))
    data = gpu.empty(layout.shape, "uint8")
    stored = [weight.codes]
    if weight.format.bits == 4:
        stored.append(weight.codes[:, ::2] | weight.codes[:, 1::2] << 4)
    for each in stored:
        own = device_copy(gpu, np.ascontiguousarray(each))
        gpu.upload(data, np.full(layout.shape, 255, np.uint8))
        shuffle(gpu.kernel_module, layout, own, tails, data)()
        np.testing.assert_array_equal(gpu.download(data), expected)


@pytest.mark.parametrize("kind", GGUF_FORMATS)
def test_the_layout_of_gguf_files_is_made_on_the_device(gpu, kind: str) -> None:
    weight = random_of(GGUF_FORMATS[kind], 19, 544)
    layout, expected = to_device_layout(weight, "bfloat16")
    codes, tails = device_copy(gpu, weight.codes), device_copy(gpu, np.ascontiguousarray(tail_bytes(weight, layout)))
    data = device_copy(gpu, np.full(layout.shape, 255, np.uint8))
    shuffle(gpu.kernel_module, layout, codes, tails, data)()
    np.testing.assert_array_equal(gpu.download(data), expected)


@pytest.mark.parametrize("kind", BLOCK_CODES)
def test_codes_in_blocks_are_unpacked_on_the_device(gpu, kind: str) -> None:
    blocks = np.frombuffer(random_blocks(kind, (19, 768), np.random.default_rng(1)).data, np.uint8).reshape(19, -1)
    given, codes = device_copy(gpu, blocks), device_copy(gpu, np.full((19, 768), 255, np.uint8))
    unblock(gpu.kernel_module, given, codes, kind)()
    np.testing.assert_array_equal(gpu.download(codes), block_codes(kind, blocks))


def test_codes_of_another_weight_are_refused(gpu) -> None:
    weight = random_packed(8, 128, 128, False, "float16")
    layout, data = to_device_layout(weight)
    codes, tails = device_copy(gpu, weight.codes[:7].copy()), device_copy(gpu, tail_bytes(weight, layout).copy())
    with pytest.raises(KernelError, match="no weight of 8 rows"):
        shuffle(gpu.kernel_module, layout, codes, tails, device_copy(gpu, data))


@pytest.mark.parametrize("kind", [kind for kind, form in BLOCK_CODES.items() if form.level_parts])
def test_levels_in_blocks_are_laid_out_on_the_device(gpu, kind: str) -> None:
    parts = [np.frombuffer(random_blocks(kind, (n, 768), np.random.default_rng(n)).data, np.uint8) for n in (12, 7)]
    read = [
        BlockLayout(kind).read(LinearTensors("", (len(part) // row_bytes(kind), 768), partial(described, kind, part)))
        for part in parts
    ]
    weight = fused(read)
    layout = device_layout(weight, "float16")
    expected = tail_bytes(weight, layout)
    tails, first = device_copy(gpu, np.full(expected.shape, 0xEE, np.uint8)), 0
    for part in parts:
        blocks = device_copy(gpu, part.reshape(-1, row_bytes(kind)))
        block_levels(gpu.kernel_module, blocks, tails, kind, first)()
        first += blocks.shape[0]
    np.testing.assert_array_equal(gpu.download(tails), expected)
    for wrong in ({"kind": "q8_0"}, {"kind": kind, "first": 24}):
        with pytest.raises(KernelError, match="do not become tails"):
            block_levels(gpu.kernel_module, blocks, tails, **wrong)


def row_bytes(kind: str) -> int:
    return 768 // BLOCK_CODES[kind].columns * BLOCK_CODES[kind].size


def described(kind: str, part: np.ndarray, _name: str) -> tuple[str, tuple[int, ...], np.ndarray]:
    return kind, (len(part) // row_bytes(kind), 768), part
