"""Tokens are looked up with the bits of their values in tables that are packed or in pieces, by a step; trees are in
test_tree_gpu.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gpu_device import cuda_device, device_copy, load_kernels, on_device
from packed_weights import (
    GGUF_FORMATS,
    assert_same_bits,
    compute_bits,
    in_pieces,
    packed_copy,
    random_of,
    random_packed,
    shared_table,
)

from edgellm.kernels.errors import KernelError
from edgellm.kernels.quantization.packed_weight import Codes, PackedWeight
from edgellm.kernels.sampling.contract import ModelTables, StepInputs

pytestmark = pytest.mark.gpu

FORMATS: list[tuple[Codes, int | None, bool]] = [
    ("int8", None, False),
    ("int4", 128, False),
    ("int4", 64, False),
    ("int4", 32, True),
    ("int8", 16, True),
]
DTYPES = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])


@pytest.fixture(scope="module")
def gpu():
    """A CUDA context with a stream, and the kernels loaded into it."""
    with cuda_device() as device:
        load_kernels(device)
        yield device


@DTYPES
@pytest.mark.parametrize(("codes", "group", "zeros"), FORMATS)
@pytest.mark.parametrize(("hidden", "size"), [(320, 0.01), (2048, 0.5), (128, 0.01)])
def test_rows_of_a_step(
    gpu: Any, hidden: int, size: float, codes: Codes, group: int | None, zeros: bool, dtype: str
) -> None:
    if group == 128 and hidden % 128:
        pytest.skip("groups of 128 do not divide the row")
    assert_looked_up(gpu, random_packed(101, hidden, group, zeros, dtype, size, codes=codes), dtype)


@DTYPES
@pytest.mark.parametrize("kind", GGUF_FORMATS)
@pytest.mark.parametrize("hidden", [320, 2048])
def test_rows_of_a_gguf_file(gpu: Any, hidden: int, kind: str, dtype: str) -> None:
    # Products of float32 with negative scales may lose the sign of a zero (packed_codes.cuh).
    assert_looked_up(gpu, random_of(GGUF_FORMATS[kind], 101, hidden, 0.5), dtype, signed_zeros=False)


@DTYPES
@pytest.mark.parametrize("count", [2, 3, 8])
@pytest.mark.parametrize("codes", ["int8", "int4", None])
def test_rows_of_a_table_that_gpus_share(gpu: Any, codes: Codes | None, count: int, dtype: str) -> None:
    """Packed, where pieces end within blocks of eight rows, and dense."""
    weight = random_packed(101, 320, 64, codes == "int4", dtype, codes=codes or "int8")
    pieces = in_pieces(weight, count)
    if codes is None:
        own: list[Any] = [device_copy(gpu, compute_bits(piece.values(), dtype)[0]) for piece in pieces]
    else:
        own = [packed_copy(gpu, piece, dtype) for piece in pieces]
    assert_looked_up(gpu, weight, dtype, table=shared_table(gpu, own))


def assert_looked_up(gpu: Any, weight: PackedWeight, dtype: str, signed_zeros: bool = True, table: Any = None) -> None:
    """Asserts that tokens get the rows of a table of 101, and unknown ones zeros; see `assert_same_bits`."""
    hidden = weight.shape[1]
    packed, values = table or packed_copy(gpu, weight, dtype), compute_bits(weight.values(), dtype)[0]
    token_ids = np.array([[0, 100, -1, 7, 8, 49, 50], [101, 55, 99, 15, 16, 33, 34]], np.int32)
    angles = device_copy(gpu, np.ones((16, 2), np.float32))
    tables = ModelTables(packed, angles, gpu.zeros((2,), "int32"))
    shapes = (2, 7, hidden), (2, 7, 2)
    inputs = StepInputs(
        *(gpu.zeros(shape, dtype) for shape in shapes), gpu.zeros((2, 1, 7, 0), "bool"), gpu.zeros((2,), "int32")
    )
    gpu.kernels.prepare_step(tables, on_device(gpu, token_ids), inputs)
    expected = np.where(((token_ids >= 0) & (token_ids < 101))[..., None], values[token_ids.clip(0, 100)], 0)
    assert_same_bits(gpu.download(inputs.inputs_embeds), expected.astype(values.dtype), signed_zeros)


def test_columns_that_come_in_no_eights_are_refused(gpu: Any) -> None:
    packed = packed_copy(gpu, random_packed(16, 12, None, False, "float16"), "float16")
    tables = ModelTables(packed, gpu.zeros((1, 2), "float32"), gpu.zeros((1,), "int32"))
    inputs = StepInputs(
        *(gpu.zeros((1, 1, size), "float16") for size in (12, 2)),
        gpu.zeros((1, 1, 1, 0), "bool"),
        gpu.zeros((1,), "int32"),
    )
    with pytest.raises(KernelError, match="12 columns; expected a multiple of 8"):
        gpu.kernels.prepare_step(tables, gpu.zeros((1, 1), "int32"), inputs)
