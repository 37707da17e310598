"""Attention within a window on the GPU: against its twins, and bit for bit whatever else a token is computed with."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from decode_twins import NumpyDecodeKernels
from device_bits import from_bits, relative, stored, to_bits, widened
from gpu_device import device_copy
from prefill_twin import NumpyPrefill
from window_cases import CASES, WindowCase

from edgellm.kernels.decode.attention import attention_launch
from edgellm.kernels.decode.attention_geometries import (
    AttentionGeometry,
    AttentionShape,
    attention_counters,
    attention_partials,
)
from edgellm.kernels.decode.contract import AttentionScratch, NormedInput
from edgellm.kernels.decode.linear import CudaDecodeKernels
from edgellm.kernels.prefill.launcher import CudaPrefill

pytestmark = pytest.mark.gpu

#: As in the tests of attention to all rows; of int8 a value may take the integer beside it.
TOLERANCE = {"float16": 2.0**-10, "bfloat16": 2.0**-7}
DTYPES = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
CACHES = ("k_cache", "v_cache", "k_scale", "v_scale")


def tolerance(case: WindowCase, dtype: str) -> float:
    return TOLERANCE[dtype] + 0.01 * case.int8


def rounded(case: WindowCase, arrays: dict[str, np.ndarray], dtype: str, prompt: bool = False) -> dict[str, np.ndarray]:
    """As the device holds them: float32 for the values of decode steps, scales, and compute for the rest."""
    return stored(arrays, dtype, ("k_scale", "v_scale") if prompt else ("qkv", "k_scale", "v_scale"))


class Step:
    """A decode or verify step on the device."""

    def __init__(self, gpu, case: WindowCase, arrays: dict, dtype: str, geometry: AttentionGeometry | None = None):
        self.gpu, self.dtype, batch = gpu, dtype, len(case.starts)
        heads, kinds = case.heads, (case.size, case.rows, case.int8, case.window)
        shape = AttentionShape(batch, case.tokens, heads, case.kv_heads, *kinds)
        rows = batch * case.tokens
        partials = attention_partials(shape) if geometry is None else rows * heads * shape.spans * shape.state
        self.arrays = {name: device_copy(gpu, array) for name, array in arrays.items()}
        self.context = gpu.zeros((rows, heads * case.size), dtype)
        partial, counters = gpu.zeros((partials,), "float32"), gpu.zeros((attention_counters(shape),), "uint32")
        weights, step = case.bundles(self.arrays)
        self.shape, self.scratch = shape, AttentionScratch(partial, counters)  # a launch keeps no memory
        self.launch = attention_launch(
            gpu.kernel_module, self.arrays["qkv"], weights, step, self.scratch, self.context, geometry
        )
        self.launch()

    def found(self) -> np.ndarray:
        return from_bits(self.gpu.download(self.context), self.dtype)

    def caches(self) -> dict[str, np.ndarray]:
        return {name: self.gpu.download(self.arrays[name]) for name in CACHES if name in self.arrays}


@DTYPES
@pytest.mark.parametrize("name", CASES)
def test_steps_equal_their_twin(gpu, name: str, dtype: str) -> None:
    case = CASES[name]
    arrays = rounded(case, case.arrays(), dtype)
    step, wide = Step(gpu, case, arrays, dtype), widened(arrays, dtype)
    expected = np.empty(step.context.shape, np.float32)
    NumpyDecodeKernels().attention(wide["qkv"], *case.bundles(wide), None, expected)()
    first, kept = step.found(), step.caches()
    assert relative(first, expected) < tolerance(case, dtype)
    for key in ("k_cache", "v_cache"):
        found = kept[key] if case.int8 else from_bits(kept[key], dtype)
        scales = kept[f"{key[0]}_scale"] if case.int8 else np.ones(1, np.float32)
        own = wide[f"{key[0]}_scale"] if case.int8 else np.ones(1, np.float32)
        for b, start in enumerate(case.starts):
            new = case.places(start, case.tokens)
            pair = [(rows[b] * (s if s.ndim == 1 else s[b]))[:, new] for rows, s in ((found, scales), (wide[key], own))]
            assert relative(*pair) < tolerance(case, dtype), key
            others = np.setdiff1d(np.arange(case.rows), new)
            np.testing.assert_array_equal(kept[key][b][:, others], arrays[key][b][:, others])
    step.launch.overlap_previous()
    for _ in range(20):  # a race would show as a difference
        step.launch()
    np.testing.assert_array_equal(step.found(), first)


@DTYPES
@pytest.mark.parametrize("name", CASES)
def test_no_bit_depends_on_how_blocks_share_the_work(gpu, name: str, dtype: str) -> None:
    case = CASES[name]
    arrays = rounded(case, case.arrays(), dtype)
    usual = Step(gpu, case, arrays, dtype)
    module, tried = gpu.kernel_module, 0
    kinds = ((1, False), (4, False), (4, True))
    for splits, in_cluster in ((1, False), (2, True), (8, True), (4, False), (32, False)):
        for (slots, row_tiles, stages), kind in product(((1, 1, 1), (1, 2, 3), (2, 1, 2), (4, 2, 1), (8, 1, 1)), kinds):
            most = -(-case.tokens // (16 // case.group))
            geometry = AttentionGeometry(splits, slots, min(row_tiles, most), stages, in_cluster, *kind)
            if geometry.fits(usual.shape, module.shared_limit) and (module.has_clusters or not in_cluster):
                found = Step(gpu, case, arrays, dtype, geometry).found()
                np.testing.assert_array_equal(found, usual.found(), err_msg=str(geometry))
                tried += 1
    assert tried >= 2


@DTYPES
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.tokens > 1])
def test_a_token_of_a_tree_has_the_bits_of_decode_steps(gpu, name: str, dtype: str) -> None:
    """Wherever its window begins in a tile or a span, and wherever in the ring it stands."""
    case = replace(CASES[name], starts=CASES[name].starts[-1:])
    arrays, start = rounded(case, case.arrays(), dtype), case.starts[0]
    tree, one = Step(gpu, case, arrays, dtype).found(), replace(case, tokens=1)
    for node in sorted({0, 1, case.tokens // 2, case.tokens - 1}):
        single = dict(arrays)
        for depth, ancestor in enumerate(np.flatnonzero(arrays["mask"][0, 0, node, start:])):
            single["qkv"] = arrays["qkv"][ancestor : ancestor + 1]
            single["cos_sin"] = np.ascontiguousarray(arrays["cos_sin"][:, ancestor : ancestor + 1])
            single["starts"] = np.array([start + depth], np.int32)
            step = Step(gpu, one, single, dtype)
            single |= step.caches()
        np.testing.assert_array_equal(step.found()[0], tree[node], err_msg=f"node {node}")


@DTYPES
@pytest.mark.parametrize("window", [5, 64, 100])
def test_a_sequence_has_the_same_bits_in_every_ring(gpu, window: int, dtype: str) -> None:
    """Decode steps over positions that go round rings of several lengths."""
    steps, results = 300, []
    for rows in (192, 256, 640):
        case = WindowCase((0,), window, rows, 1, 2, 2, 64, 64)
        arrays = rounded(case, case.arrays(), dtype)
        qkv = np.random.default_rng(1).standard_normal((steps, arrays["qkv"].shape[1]), np.float32)
        found = []
        for position in range(steps):
            step = {**arrays, "qkv": qkv[position : position + 1], "starts": np.array([position], np.int32)}
            one = Step(gpu, replace(case, starts=(position,)), step, dtype)
            arrays |= one.caches()
            found.append(one.found()[0])
        results.append(np.stack(found))
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])


def run_prompt(gpu, case: WindowCase, arrays: dict, dtype: str, sizes: tuple[int, ...], **tiling: int) -> np.ndarray:
    """The context [T, E] of one sequence's tokens, in chunks."""
    start, first, found = case.starts[0], 0, []
    caches = {name: device_copy(gpu, arrays[name]) for name in CACHES if name in arrays}
    norms = {name: device_copy(gpu, arrays[name]) for name in ("q_norm", "k_norm") if name in arrays}
    qkv = arrays["qkv"].reshape(1, case.tokens, -1)
    for size in sizes:
        part = {"cos_sin": arrays["cos_sin"][:, first : first + size], "starts": np.array([start + first], np.int32)}
        device = {name: device_copy(gpu, np.ascontiguousarray(array)) for name, array in part.items()}
        own = device_copy(gpu, np.ascontiguousarray(qkv[:, first : first + size]))
        queries, context = (gpu.zeros((1, size, case.heads * case.size), dtype) for _ in range(2))
        chunk = replace(case, starts=(start + first,), tokens=size)
        chunk.prefill(CudaPrefill(gpu.kernel_module), caches | norms | device, own, queries, context, **tiling)
        found.append(from_bits(gpu.download(context), dtype)[0])
        first += size
    return np.concatenate(found)


PROMPTS = {
    "short": WindowCase((3,), 5, 256, 150),
    "gemma_3_1b": WindowCase((700,), 512, 1280, 300, 1, 4, 256, 256, before=256, norm=True),
    "from_the_first": WindowCase((0,), 100, 640, 400, 1, 2, 128, 64),
    "odd": WindowCase((1001,), 129, 640, 333, 2, 3, 80, 80),
    "int8": WindowCase((257,), 200, 512, 200, 2, 2, 128, 128, int8=True),
    "int8_of_256": WindowCase((900,), 129, 512, 90, 1, 2, 256, 256, before=256, int8=True),
}


@DTYPES
@pytest.mark.parametrize("name", PROMPTS)
def test_prompts_equal_their_twin_however_they_are_cut(gpu, name: str, dtype: str) -> None:
    case = PROMPTS[name]
    arrays = rounded(case, case.arrays(chain=True), dtype, prompt=True)
    whole = run_prompt(gpu, case, arrays, dtype, (case.tokens,))
    wide = widened(arrays, dtype)
    context = np.full((1, *whole.shape), np.nan, np.float32)
    case.prefill(NumpyPrefill(), wide, wide["qkv"].reshape(1, case.tokens, -1), np.empty_like(context), context)
    assert relative(whole, context[0]) < tolerance(case, dtype)
    for sizes in ((1, case.tokens - 1), (64, 13, case.tokens - 77)):
        np.testing.assert_array_equal(run_prompt(gpu, case, arrays, dtype, sizes), whole, err_msg=str(sizes))
    for tiles in (1, 2) if case.size <= 128 else (1,):
        np.testing.assert_array_equal(run_prompt(gpu, case, arrays, dtype, (case.tokens,), tiles=tiles), whole)


@DTYPES
@pytest.mark.parametrize("selects", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(1, 8), (5, 1152), (33, 4104)])
def test_rows_are_normed_before_they_are_added(gpu, rows: int, width: int, selects: bool, dtype: str) -> None:
    random = np.random.default_rng(width)
    values = random.standard_normal((rows, width), np.float32) * 100
    weight = to_bits(random.uniform(-0.5, 0.5, width).astype(np.float32), dtype)
    residual = random.standard_normal((rows * (3 if selects else 1), width), np.float32)
    selected = np.arange(rows, dtype=np.int32)[:, None] % 3 if selects else None
    few, expected = CudaDecodeKernels(gpu.kernel_module, dtype, 64), np.empty((rows, width), np.float32)
    for held in (residual, to_bits(residual, dtype)):
        before = held if held.dtype == np.float32 else from_bits(held, dtype)
        twin = NormedInput(values, from_bits(weight, dtype), 1e-6, 1.0)
        NumpyDecodeKernels().norm_residual(twin, before, expected, selected)()
        own = NormedInput(device_copy(gpu, values), device_copy(gpu, weight), 1e-6, 1.0)
        output = gpu.zeros((rows, width), "float32")
        places = None if selected is None else device_copy(gpu, selected)
        added = device_copy(gpu, held)  # a launch keeps no memory: this must live until it is done
        few.norm_residual(own, added, output, places)()
        np.testing.assert_allclose(gpu.download(output), expected, rtol=1e-5, atol=1e-4)
