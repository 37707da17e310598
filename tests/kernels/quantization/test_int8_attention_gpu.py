"""Attention over KV rows of 8 bits on the GPU: rows as defined, results of the rows that are kept, and the same
bits however tokens come."""

from __future__ import annotations

import numpy as np
import pytest
from decode_twins import rotary_embedding
from device_bits import from_bits, relative, to_bits
from gpu_device import device_copy
from prefill_twin import NumpyPrefill

from edgellm.kernels.decode.attention import attention_launch
from edgellm.kernels.decode.attention_geometries import (
    AttentionGeometry,
    AttentionShape,
    attention_counters,
    attention_partials,
)
from edgellm.kernels.decode.contract import AttentionScratch, AttentionStep, AttentionWeights
from edgellm.kernels.prefill.contract import KeyValueRows, RowScales
from edgellm.kernels.prefill.launcher import CudaPrefill
from edgellm.kernels.quantization.rows import quantize_rows

pytestmark = pytest.mark.gpu

DTYPES = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
#: Queries, weights, weights times scales and results are rounded to the dtype once each.
TOLERANCE = {"float16": 2.0**-9, "bfloat16": 2.0**-6}
KV_HEADS, GROUP, ROWS = 2, 4, 320
HEADS = KV_HEADS * GROUP
CACHES = ("k_cache", "v_cache", "k_scale", "v_scale")


def committed(size: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Caches of one sequence, by `CACHES`."""
    random = np.random.default_rng(seed)
    (k, k_scale), (v, v_scale) = (
        quantize_rows(random.standard_normal((1, KV_HEADS, ROWS, size), np.float32)) for _ in "kv"
    )
    return dict(zip(CACHES, (k, v, k_scale, v_scale), strict=True))


def new_tokens(tokens: int, size: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """qkv [T, ...] in float32, of values that the dtype holds, and angles [1, T, size] as it holds them."""
    random = np.random.default_rng(tokens)
    qkv = random.standard_normal((tokens, (HEADS + 2 * KV_HEADS) * size), np.float32)
    angles = random.uniform(0, 6, (1, tokens, size // 2))
    cos_sin = np.concatenate((np.cos(angles), np.sin(angles)), axis=-1).astype(np.float32)
    return from_bits(to_bits(qkv, dtype), dtype), to_bits(cos_sin, dtype)


class Decoder:
    """Caches on the device, to which steps of the decode kernel add tokens."""

    def __init__(self, gpu, dtype: str, size: int) -> None:
        self.gpu, self.dtype, self.size = gpu, dtype, size
        self.caches = {name: device_copy(gpu, array) for name, array in committed(size).items()}

    def step(
        self,
        start: int,
        qkv: np.ndarray,
        cos_sin: np.ndarray,
        mask: np.ndarray | None,
        rotates: bool = True,
        geometry: AttentionGeometry | None = None,
    ) -> np.ndarray:
        """The context [T, heads * size] float32 of new tokens at row `start`."""
        gpu, tokens = self.gpu, len(qkv)
        shape = AttentionShape(1, tokens, HEADS, KV_HEADS, self.size, ROWS, True)
        partial = gpu.zeros((attention_partials(shape),), "float32")
        context = gpu.zeros((tokens, HEADS * self.size), self.dtype)
        kept = [device_copy(gpu, each) for each in (qkv, cos_sin, np.array([start], np.int32))]
        given = None if mask is None else device_copy(gpu, mask)
        scales = self.caches["k_scale"], self.caches["v_scale"]
        step = AttentionStep(kept[1], kept[2], given, self.caches["k_cache"], self.caches["v_cache"], False, *scales)
        weights = AttentionWeights(None, None, 0.0, 0.0, self.size**-0.5, rotates)
        scratch = AttentionScratch(partial, gpu.zeros((attention_counters(shape),), "uint32"))
        attention_launch(gpu.kernel_module, kept[0], weights, step, scratch, context, geometry)()
        found = gpu.download(context)
        return from_bits(found, self.dtype)

    def rows(self) -> dict[str, np.ndarray]:
        return {name: self.gpu.download(array) for name, array in self.caches.items()}


def tree_mask(tokens: int, start: int, chain: bool = False) -> np.ndarray:
    sees = np.tril(np.random.default_rng(5).random((tokens, tokens)) < 0.5) | np.eye(tokens, dtype=bool)
    mask = np.zeros((1, 1, tokens, ROWS), bool)
    mask[0, 0, :, start : start + tokens] = np.tril(np.ones((tokens, tokens), bool)) if chain else sees
    return mask


@DTYPES
@pytest.mark.parametrize(
    ("tokens", "start", "size"), [(1, 0, 64), (1, 200, 128), (6, 61, 80), (20, 130, 64), (4, 9, 256), (20, 130, 512)]
)
def test_decode_attention_keeps_rows_as_defined_and_reads_what_it_keeps(
    gpu, dtype: str, tokens: int, start: int, size: int
) -> None:
    decoder, (qkv, cos_sin) = Decoder(gpu, dtype, size), new_tokens(tokens, size, dtype)
    mask = None if tokens == 1 else tree_mask(tokens, start)
    decoder.step(start, qkv, cos_sin, mask, rotates=False)
    heads = qkv.reshape(tokens, -1, size).swapaxes(0, 1)
    kept, before, new = decoder.rows(), committed(size), slice(start, start + tokens)
    for number, kind in enumerate("kv"):  # nothing was rounded before: bit for bit
        rows, scales = quantize_rows(heads[HEADS + number * KV_HEADS :][:KV_HEADS])
        np.testing.assert_array_equal(kept[f"{kind}_cache"][0, :, new], rows)
        np.testing.assert_array_equal(kept[f"{kind}_scale"][0, :, new], scales)
    for name in CACHES:
        others = np.delete(np.arange(ROWS), np.arange(start, start + tokens))
        np.testing.assert_array_equal(kept[name][:, :, others], before[name][:, :, others])
    found, kept = decoder.step(start, qkv, cos_sin, mask), decoder.rows()
    query = rotary_embedding(heads.swapaxes(0, 1)[:, :HEADS], from_bits(cos_sin, dtype)[0])
    expected = np.zeros_like(found)
    for t in range(tokens):
        seen = np.arange(ROWS) < start
        seen[new] = np.arange(tokens) == t if mask is None else mask[0, 0, t, new]
        keys, values = (kept[f"{kind}_cache"] * kept[f"{kind}_scale"].astype(np.float64) for kind in "kv")
        for head in range(HEADS):
            scores = keys[0, head // GROUP][seen] @ query[t, head].astype(np.float64) * size**-0.5
            weights = np.exp(scores - scores.max())
            context = weights / weights.sum() @ values[0, head // GROUP][seen]
            expected[t, head * size : (head + 1) * size] = context
    assert relative(found, expected) < TOLERANCE[dtype]


@DTYPES
def test_a_verified_token_has_the_bits_of_the_decode_step_that_computes_it_alone(gpu, dtype: str) -> None:
    tokens, start, size = 5, 126, 64
    qkv, cos_sin = new_tokens(tokens, size, dtype)
    together, alone = Decoder(gpu, dtype, size), Decoder(gpu, dtype, size)
    found = together.step(start, qkv, cos_sin, tree_mask(tokens, start, chain=True))
    for t in range(tokens):
        one = alone.step(start + t, qkv[t : t + 1], np.ascontiguousarray(cos_sin[:, t : t + 1]), None)
        np.testing.assert_array_equal(one[0], found[t])
    for name, rows in together.rows().items():
        np.testing.assert_array_equal(alone.rows()[name], rows)


@DTYPES
@pytest.mark.parametrize(("tokens", "size"), [(1, 64), (6, 80), (13, 128), (1, 256), (30, 256)])
def test_bits_are_the_same_however_warps_share_the_work(gpu, dtype: str, tokens: int, size: int) -> None:
    start = 290
    qkv, cos_sin = new_tokens(tokens, size, dtype)
    mask = None if tokens == 1 else tree_mask(tokens, start)
    shapes = [
        (1, 1, 1, 1),
        (1, 1, 1, 3),
        (1, 1, 2, 2),
        (1, 2, 1, 1),
        (1, 2, 1, 2),
        (1, 2, 2, 1),
        (1, 4, 1, 1),
        (1, 2, 4, 2),
    ]
    if size > 128:
        shapes += [(*numbers, False, 4) for numbers in ((1, 1, 1, 1), (1, 1, 1, 2), (1, 2, 1, 1), (1, 1, 2, 1))]
    shape = AttentionShape(1, tokens, HEADS, KV_HEADS, size, ROWS, True)
    each = [AttentionGeometry(*numbers) for numbers in shapes]
    fitting = [geometry for geometry in each if geometry.fits(shape, gpu.kernel_module.shared_limit)]
    steps = [Decoder(gpu, dtype, size).step(start, qkv, cos_sin, mask, geometry=geometry) for geometry in fitting]
    assert len(steps) > 4
    for found in steps[1:]:
        np.testing.assert_array_equal(found, steps[0])


@DTYPES
@pytest.mark.parametrize(("size", "tiles"), [(64, 1), (64, 2), (80, 1), (128, 2), (256, 1), (512, 1)])
def test_a_prompt_gives_the_same_bits_however_it_is_cut(gpu, dtype: str, size: int, tiles: int) -> None:
    tokens, start = 90, 50
    qkv, cos_sin = new_tokens(tokens, size, dtype)
    results = []
    for ends in ((tokens,), (37, tokens)):
        caches, contexts, first = {n: device_copy(gpu, a) for n, a in committed(size).items()}, [], 0
        scales = RowScales(caches["k_scale"], caches["v_scale"])
        for end in ends:
            part = device_copy(gpu, to_bits(qkv[None, first:end], dtype))
            rotary = device_copy(gpu, np.ascontiguousarray(cos_sin[:, first:end]))
            at = device_copy(gpu, np.array([start + first], np.int32))
            rows = KeyValueRows(caches["k_cache"], caches["v_cache"], at)
            own_queries, context = (gpu.zeros((1, end - first, HEADS * size), dtype) for _ in range(2))
            prefill = CudaPrefill(gpu.kernel_module)
            prefill.prepare_heads(part, None, rotary, rows, scales, None, own_queries)()
            prefill.causal_attention(own_queries, rows, size**-0.5, context, scales, tiles=tiles)()
            queries, first = from_bits(gpu.download(own_queries), dtype), end
            contexts.append(from_bits(gpu.download(context), dtype))
        results.append((np.concatenate(contexts, axis=1), {n: gpu.download(a) for n, a in caches.items()}))
        if len(ends) == 1:
            kept = results[0][1]
            twin = KeyValueRows(kept["k_cache"], kept["v_cache"], np.array([start], np.int32))
            expected = np.zeros_like(results[0][0])
            own = RowScales(kept["k_scale"], kept["v_scale"])
            NumpyPrefill().causal_attention(queries, twin, size**-0.5, expected, own)()
            assert relative(results[0][0], expected) < TOLERANCE[dtype]
    (whole, rows), (cut, others) = results
    np.testing.assert_array_equal(whole, cut)
    for name in CACHES:
        np.testing.assert_array_equal(rows[name], others[name])


@DTYPES
def test_elements_between_two_integers_go_to_the_even_one_in_every_phase(gpu, dtype: str) -> None:
    tokens, start, size = 4, 9, 64
    qkv, cos_sin = new_tokens(tokens, size, dtype)
    qkv = np.round(qkv.reshape(tokens, -1, size) * 60) / 2
    qkv[:, :, 0] = 127  # scales are 1
    expected = qkv[:, HEADS:].reshape(tokens, 2, KV_HEADS, size).swapaxes(0, 2)
    qkv, decoder = qkv.reshape(tokens, -1), Decoder(gpu, dtype, size)
    decoder.step(start, qkv, cos_sin, tree_mask(tokens, start), rotates=False)
    caches = {name: device_copy(gpu, array) for name, array in committed(size).items()}
    prompt, at = device_copy(gpu, to_bits(qkv[None], dtype)), device_copy(gpu, np.array([start], np.int32))
    rows = KeyValueRows(caches["k_cache"], caches["v_cache"], at)
    scales, queries = RowScales(caches["k_scale"], caches["v_scale"]), gpu.zeros((1, tokens, HEADS * size), dtype)
    CudaPrefill(gpu.kernel_module).prepare_heads(prompt, None, None, rows, scales, None, queries)()
    for kept in (decoder.rows(), {name: gpu.download(array) for name, array in caches.items()}):
        for number, kind in enumerate("kv"):
            found = kept[f"{kind}_cache"][0, :, start : start + tokens]
            np.testing.assert_array_equal(found, np.rint(expected[:, number].clip(-127, 127)))
