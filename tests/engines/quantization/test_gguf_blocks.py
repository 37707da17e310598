"""Packed tensors of GGUF files: the bits of gguf-py's values, and of each block's definition, a column at a time."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

import numpy as np
import pytest
from device_weights import from_device_layout, to_device_layout
from gguf_writing import NUMBERS, random_blocks
from safetensors import safe_open

from edgellm.engines.errors import CheckpointError
from edgellm.engines.quantization.gguf_blocks import PACKED_TYPES, BlockLayout
from edgellm.engines.quantization.layout import LinearTensors
from edgellm.kernels.quantization.device_layout import layout_refusal
from edgellm.kernels.quantization.packed_weight import PackedWeight

NON_LINEAR = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]
HALVES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def _packed(kind: str, data: np.ndarray | bytes, shape: tuple[int, int], order: tuple[int, ...] | None = None):
    flat = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data.reshape(-1)
    tensors = LinearTensors("layer", shape, lambda name: (kind, shape, flat) if name == "layer.weight" else None)
    return BlockLayout(kind, order).read(tensors).unpacked()


def _half(block: bytes, place: int) -> float:
    return struct.unpack_from("<e", block, place)[0]


def _nibble(block: bytes, first: int, column: int) -> int:
    byte = block[first + column % 16]
    return byte >> 4 if column >= 16 else byte & 15


def _six_bits(block: bytes, group: int, is_minimum: bool) -> int:
    """The 6 bits of a group: of the first four in one byte, of the others in two."""
    packed = block[4:16]
    if group < 4:
        return packed[group + 4 * is_minimum] & 63
    low = packed[group + 4] >> 4 if is_minimum else packed[group + 4] & 15
    return low + 16 * (packed[group - 4 + 4 * is_minimum] >> 6)


def _value(kind: str, block: bytes, column: int) -> np.float32:
    """What the definition says of a column, products as whole numbers times powers of two, rounded at the end alone."""
    group, within = divmod(column, 32)
    code, scale, minimum = 0, 0.0, 0.0
    if kind in ("q4_0", "iq4_nl"):
        code, scale = _nibble(block, 2, column), _half(block, 0)
        code = code - 8 if kind == "q4_0" else NON_LINEAR[code]
    elif kind == "q4_1":
        code, scale, minimum = _nibble(block, 4, column), _half(block, 0), _half(block, 2)
    elif kind in ("q5_0", "q5_1"):
        first = 2 if kind == "q5_0" else 4
        fifth = struct.unpack_from("<I", block, first)[0] >> column & 1
        code, scale = _nibble(block, first + 4, column) + 16 * fifth, _half(block, 0)
        code, minimum = (code - 16, 0.0) if kind == "q5_0" else (code, _half(block, 2))
    elif kind == "q8_0":
        code, scale = struct.unpack_from("<b", block, 2 + column)[0], _half(block, 0)
    elif kind in ("q4_k", "q5_k"):
        first = 16 if kind == "q4_k" else 48
        code = block[first + 32 * (group // 2) + within] >> 4 * (group % 2) & 15
        code += 16 * (block[16 + within] >> group & 1) if kind == "q5_k" else 0
        scale = _half(block, 0) * _six_bits(block, group, False)
        minimum = -_half(block, 2) * _six_bits(block, group, True)
    elif kind == "q6_k":
        half, place = divmod(column, 128)
        low = block[64 * half + place % 64] >> 4 * (place // 64) & 15
        high = block[128 + 32 * half + place % 32] >> 2 * (place // 32) & 3
        code = low + 16 * high - 32
        scale = _half(block, 208) * struct.unpack_from("<b", block, 192 + column // 16)[0]
    elif kind == "iq4_xs":
        low = block[4 + group // 2] >> 4 * (group % 2) & 15
        high = struct.unpack_from("<H", block, 2)[0] >> 2 * group & 3
        code, scale = NON_LINEAR[_nibble(block, 8 + 16 * group, within)], _half(block, 0) * (low + 16 * high - 32)
    elif kind == "mxfp4":
        number = _nibble(block, 1, column)
        return np.float32((-1) ** (number >> 3) * HALVES[number & 7] * 2.0 ** (block[0] - 127))
    return np.float32(code * scale + minimum)  # exact in float64


def test_every_packed_type_is_read() -> None:
    assert sorted(PACKED_TYPES) == sorted(set(NUMBERS) - {"float32", "float16", "bfloat16", "int64"})


@pytest.mark.parametrize("kind", PACKED_TYPES)
def test_values_have_the_bits_of_gguf_py(repository: Path, kind: str) -> None:
    """Where one differs, the test of the definition says which."""
    with safe_open(repository / "tests/goldens/gguf/blocks.safetensors", "np") as golden:
        found = _packed(kind, golden.get_tensor(kind), (3, 512)).values()
        assert hashlib.sha256(found.tobytes()).hexdigest() == golden.metadata()[kind]
    assert found.dtype == np.float32 and len(np.unique(found)) > 100


@pytest.mark.parametrize("kind", PACKED_TYPES)
def test_values_are_what_the_definition_says(kind: str) -> None:
    tensor = random_blocks(kind, (4, 512), np.random.default_rng(3))
    _, elements, size = NUMBERS[kind]
    blocks = [tensor.data[place : place + size] for place in range(0, len(tensor.data), size)]
    expected = [_value(kind, block, column) for block in blocks for column in range(elements)]
    weight = _packed(kind, tensor.data, (4, 512))
    np.testing.assert_array_equal(weight.values().reshape(-1), np.array(expected, np.float32))
    np.testing.assert_array_equal(weight.rows(1, 3).values(), weight.values()[1:3])


@pytest.mark.parametrize("kind", PACKED_TYPES)
def test_columns_in_another_order(kind: str) -> None:
    tensor = random_blocks(kind, (2, 512), np.random.default_rng(4))
    order = np.random.default_rng(5).permutation(8)[:, None] * 64 + np.arange(64)
    found = _packed(kind, tensor.data, (2, 512), tuple(order.reshape(-1).tolist())).values()
    np.testing.assert_array_equal(found, _packed(kind, tensor.data, (2, 512)).values()[:, order.reshape(-1)])
    with pytest.raises(CheckpointError, match="but other columns belong together"):
        _packed(kind, tensor.data, (2, 512), tuple(range(8, 512)) + tuple(range(8)))


@pytest.mark.parametrize(("kind", "place"), [("q4_0", 0), ("q5_1", 2), ("q4_k", 2), ("q6_k", 208), ("iq4_xs", 0)])
def test_scales_and_minima_are_finite_numbers(kind: str, place: int) -> None:
    data = bytearray(random_blocks(kind, (2, 512), np.random.default_rng(6)).data)
    struct.pack_into("<e", data, NUMBERS[kind][2] + place, float("inf"))
    with pytest.raises(
        CheckpointError, match=r"tensor 'layer\.weight' holds (-?inf|nan) .* expected finite scales and minima"
    ):
        _packed(kind, bytes(data), (2, 512))


def test_an_exponent_that_is_no_number() -> None:
    data = b"\xff" + bytes(16)
    with pytest.raises(CheckpointError, match="finite scales"):
        _packed("mxfp4", data, (1, 32))


@pytest.mark.parametrize("kind", PACKED_TYPES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_what_kernels_read_packed_has_the_same_values(kind: str, dtype: str) -> None:
    weight: PackedWeight = _packed(kind, random_blocks(kind, (16, 512), np.random.default_rng(7)).data, (16, 512))
    assert layout_refusal(weight.format, dtype) is None
    layout, data = to_device_layout(weight, dtype)
    np.testing.assert_array_equal(from_device_layout(layout, data).values(), weight.values())
    _, elements, size = NUMBERS[kind]
    assert data.nbytes <= 1.08 * weight.codes.size * size / elements


def test_formats_in_words_and_bytes() -> None:
    words = {kind: str(BlockLayout(kind).format(kind)) for kind in PACKED_TYPES}
    assert words["q4_k"] == "int4, groups of 32, minima"
    assert words["q6_k"] == "int6, groups of 16"
    assert words["iq4_xs"] == "iq4, groups of 32"
    assert BlockLayout("q5_1").format("q5_1").nbytes(2, 64) == 2 * 64 * 5 // 8 + 4 * 2 * 2
    for kind in PACKED_TYPES:
        _, elements, size = NUMBERS[kind]
        assert size * 512 // elements <= BlockLayout(kind).format(kind).nbytes(1, 512) <= 1.06 * size * 512 // elements
