"""Prompts have the bits of decode steps on the GPU: KV rows and context, however a prompt is cut."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from device_bits import from_bits, relative, to_bits
from gpu_device import device_copy
from prefill_twin import NumpyPrefill
from window_cases import ring_caches

from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.decode.attention import attention_launch
from edgellm.kernels.decode.attention_geometries import AttentionShape, attention_counters, attention_partials
from edgellm.kernels.decode.contract import MAX_TOKENS, AttentionScratch, AttentionStep, AttentionWeights
from edgellm.kernels.prefill.contract import HeadNorms, KeyValueRows, RotaryPart, RowScales
from edgellm.kernels.prefill.launcher import CudaPrefill

pytestmark = pytest.mark.gpu

#: As in the tests of each kernel; rows of int8 may hold another integer now and then.
TOLERANCE = {"float16": 2.0**-9, "bfloat16": 2.0**-6}
EPSILON, OFFSET = 1e-6, 1.0
#: Products of a query's and a key's elements that the twin takes in a second or so.
TWIN_PRODUCTS = 2e8
CACHES = ("k_cache", "v_cache", "k_scale", "v_scale")


@dataclass(frozen=True)
class Prompt:
    """A sequence of `start` committed rows with so many new `tokens`, in chunks of `cuts` in turn.

    With a `window` (0: none) caches are rings of `rows` rows. The rotary rows have `before` columns in front of the
    layer's. `rounded`: the values of qkv are the dtype's, and prompts take them so, and write the context over the
    queries. `sinks`: each query head has one. Queries take turns `further` on; `neighbours` are rotated together;
    norms stand `behind` the rotation. With a `cap` scores are below it.
    """

    start: int
    tokens: int
    cuts: tuple[tuple[int, ...], ...]
    kv_heads: int = 2
    group: int = 4
    size: int = 64
    rotary: int = 64
    before: int = 0
    norm: bool = False
    int8: bool = False
    window: int = 0
    rows: int = 0
    rounded: bool = False
    sinks: bool = False
    further: int = 0
    neighbours: bool = False
    behind: bool = False
    cap: float = 0.0
    values: bool = False

    @property
    def heads(self) -> int:
        """Of queries."""
        return self.kv_heads * self.group

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of a cache."""
        return 1, self.kv_heads, self.rows or self.start + self.tokens, self.size

    @property
    def scale(self) -> float:
        """Of the scores."""
        return self.size**-0.5

    @property
    def part(self) -> RotaryPart | None:
        """Of the rotary rows."""
        return RotaryPart(self.before, self.rotary, self.further, self.neighbours) if self.rotary else None

    def norms(self, query: Any, key: Any) -> HeadNorms:
        """Of queries and keys, by their weights."""
        return HeadNorms(query, key, EPSILON, OFFSET, self.behind, self.values)

    def arrays(self, dtype: str) -> dict[str, np.ndarray]:
        """The arguments: qkv [T, W] float32, the rest as the device holds it."""
        random = np.random.default_rng(self.start + self.tokens)
        angles = random.uniform(0, 6, (self.tokens, self.rotary // 2))
        others = random.standard_normal((self.tokens, self.before))
        pairs = np.cos(angles), np.sin(angles)
        own = [1.25 * each for each in pairs] if self.further else []
        turns = np.concatenate((others, *pairs, *own), axis=-1).astype(np.float32)
        qkv = random.standard_normal((self.tokens, (self.heads + 2 * self.kv_heads) * self.size), np.float32)
        found = {"qkv": from_bits(to_bits(qkv, dtype), dtype) if self.rounded else qkv, "turns": to_bits(turns, dtype)}
        for name in ("q_norm", "k_norm") if self.norm else ():
            found[name] = to_bits(random.uniform(-0.5, 0.5, self.size).astype(np.float32), dtype)
        caches = ring_caches(random, self.shape, (self.start,), self.window, self.int8)
        for name, array in caches.items():
            found[name] = array if self.int8 else to_bits(array, dtype)
        if self.sinks:
            found["sinks"] = to_bits(2 * random.standard_normal(self.heads, np.float32), dtype)
        return found

    def alone(self) -> set[int]:
        """Tokens whose own decode steps are computed: all of a few; else the first and last, those next to where spans
        become longer, and some between."""
        if self.tokens <= MAX_TOKENS:
            return set(range(self.tokens))
        span_bits = AttentionShape(1, 1, self.heads, self.kv_heads, self.size, self.shape[2]).span_bits
        borders = [(64 << span_bits + bits) - self.start for bits in range(4)]
        chosen = {0, 1, self.tokens // 3, self.tokens // 2, self.tokens - 2, self.tokens - 1}
        chosen |= {border + step for border in borders for step in (-1, 0)}
        return {token for token in chosen if 0 <= token < self.tokens}

    def steps(self) -> Iterator[tuple[int, int]]:
        """First tokens and sizes of decode steps and of verify steps of chains that together take the prompt."""
        alone, first = self.alone(), 0
        while first < self.tokens:
            count = 1
            while first not in alone and count < MAX_TOKENS and first + count < self.tokens:
                if first + count in alone:
                    break
                count += 1
            yield first, count
            first += count


class Device:
    """A prompt's arguments in the GPU's memory."""

    def __init__(self, gpu, prompt: Prompt, dtype: str) -> None:
        self.gpu, self.prompt, self.dtype = gpu, prompt, dtype
        self.arrays = {name: device_copy(gpu, array) for name, array in prompt.arrays(dtype).items()}
        self.starts = device_copy(gpu, np.arange(prompt.start, prompt.start + prompt.tokens, dtype=np.int32))
        width = prompt.heads * prompt.size
        self.queries, self.context = (gpu.zeros((prompt.tokens, width), dtype) for _ in range(2))

    def by_decode_steps(self) -> dict[str, np.ndarray]:
        """Context and caches."""
        prompt, arrays, gpu = self.prompt, self.arrays, self.gpu
        norms, part = (arrays.get("q_norm"), arrays.get("k_norm")), (prompt.before, prompt.rotary)
        kinds = (
            prompt.scale,
            prompt.rotary > 0,
            part,
            arrays.get("sinks"),
            prompt.further,
            prompt.neighbours,
            prompt.behind,
            prompt.cap,
            prompt.values,
        )
        weights = AttentionWeights(*norms, EPSILON, OFFSET, *kinds)
        sizes = (prompt.heads, prompt.kv_heads, prompt.size, prompt.shape[2], prompt.int8, prompt.window)
        counters = gpu.zeros((attention_counters(AttentionShape(1, MAX_TOKENS, *sizes)),), "uint32")
        size = max(attention_partials(AttentionShape(1, tokens, *sizes)) for tokens in range(1, MAX_TOKENS + 1))
        scratch = AttentionScratch(gpu.zeros((size,), "float32"), counters)
        masks: list[DeviceArray] = []  # a launch keeps no memory
        for first, count in prompt.steps():
            new, position = slice(first, first + count), prompt.start + first
            mask = None
            if count > 1:
                mask = device_copy(gpu, np.tri(count, position + count, position, bool)[None, None])
                masks.append(mask)
            caches = arrays["k_cache"], arrays["v_cache"], False, arrays.get("k_scale"), arrays.get("v_scale")
            turns = arrays["turns"][new].reshape(1, count, -1)
            step = AttentionStep(turns, self.starts[first : first + 1], mask, *caches, prompt.window or None)
            qkv, context = arrays["qkv"][new], self.context[new]
            attention_launch(gpu.kernel_module, qkv, weights, step, scratch, context)()
        return self._found()

    def by_chunks(self, sizes: tuple[int, ...], tiles: int | None = None) -> dict[str, np.ndarray]:
        """The same by prompts' kernels, in chunks of these sizes, the last of them again and again."""
        prompt, arrays, kernels = self.prompt, self.arrays, CudaPrefill(self.gpu.kernel_module)
        norms = prompt.norms(arrays["q_norm"], arrays["k_norm"]) if prompt.norm else None
        scales = RowScales(arrays["k_scale"], arrays["v_scale"]) if prompt.int8 else None
        qkv = arrays["qkv"]
        if prompt.rounded:
            qkv = device_copy(self.gpu, to_bits(self.gpu.download(qkv), self.dtype))
        for new in self._chunks(sizes):
            at = self.starts[new.start : new.start + 1]

            def own(array: DeviceArray, new: slice = new) -> DeviceArray:
                return array[new].reshape(1, new.stop - new.start, -1)

            rows = KeyValueRows(arrays["k_cache"], arrays["v_cache"], at, prompt.window)
            turns = own(arrays["turns"]) if prompt.rotary else None
            queries, context = own(self.context if prompt.rounded else self.queries), own(self.context)
            kernels.prepare_heads(own(qkv), norms, turns, rows, scales, prompt.part, queries)()
            kernels.causal_attention(
                queries, rows, prompt.scale, context, scales, arrays.get("sinks"), prompt.cap, tiles
            )()
        return self._found()

    def _chunks(self, sizes: tuple[int, ...]) -> Iterator[slice]:
        first, each = 0, iter(sizes)
        while first < self.prompt.tokens:
            size = next(each, sizes[-1])
            yield slice(first, min(first + size, self.prompt.tokens))
            first += size

    def _found(self) -> dict[str, np.ndarray]:
        return {name: self.gpu.download(self.arrays[name]) for name in CACHES if name in self.arrays} | {
            "context": self.gpu.download(self.context)
        }


def by_twin(prompt: Prompt, dtype: str) -> np.ndarray:
    """The context [T, E] by the twin, of the whole prompt."""
    wide = {
        name: from_bits(array, dtype) if array.dtype.itemsize == 2 else array
        for name, array in prompt.arrays(dtype).items()
    }
    norms = prompt.norms(wide["q_norm"], wide["k_norm"]) if prompt.norm else None
    rows = KeyValueRows(wide["k_cache"], wide["v_cache"], np.array([prompt.start], np.int32), prompt.window)
    scales = RowScales(wide["k_scale"], wide["v_scale"]) if prompt.int8 else None
    turns = wide["turns"][None] if prompt.rotary else None
    queries, context = (np.full((1, prompt.tokens, prompt.heads * prompt.size), np.nan, np.float32) for _ in range(2))
    NumpyPrefill().prepare_heads(wide["qkv"][None], norms, turns, rows, scales, prompt.part, queries)()
    NumpyPrefill().causal_attention(queries, rows, prompt.scale, context, scales, wide.get("sinks"), prompt.cap)()
    return context[0]


SOME = ((200,), (1, 199), (64, 13, 123))
PROMPTS = {
    "one": Prompt(0, 1, ((1,),)),
    "one_behind_2000": Prompt(2_000, 1, ((1,),), 8, 4, 128, 128),
    "three": Prompt(5, 3, ((3,), (1, 2)), 2, 1, 80, 32, norm=True),
    "sixty_four": Prompt(100, 64, ((64,), (1, 63), (13,)), 1, 8, 96, 96),
    "a_part_turns": Prompt(0, 200, SOME, 2, 4, 128, 32, before=96, norm=True),
    "nothing_turns": Prompt(5, 200, SOME, 2, 4, 64, 0, before=8, norm=True),
    "sinks": Prompt(5, 200, SOME, 2, 8, 64, 64, sinks=True),
    "sinks_of_int8": Prompt(0, 300, ((300,), (64, 236)), 8, 1, 128, 128, int8=True, sinks=True),
    "sinks_in_a_window": Prompt(300, 200, SOME, 2, 8, 64, 64, window=128, rows=384, sinks=True),
    "capped": Prompt(5, 200, SOME, 2, 8, 64, 64, cap=0.5),
    "capped_of_int8": Prompt(0, 300, ((300,), (64, 236)), 8, 1, 128, 128, int8=True, cap=2.0),
    "capped_in_a_window": Prompt(300, 200, SOME, 2, 2, 256, 256, window=128, rows=384, cap=1.0),
    "capped_of_512": Prompt(300, 70, ((70,), (64, 6)), 1, 8, 512, 512, cap=1.0),
    "narrow": Prompt(60, 60, ((60,), (7,)), 2, 3, 24, 16),
    "of_200": Prompt(100, 100, ((100,), (33,)), 1, 3, 200, 64, norm=True),
    "rounded": Prompt(100, 200, SOME, 2, 4, 64, 64, norm=True, rounded=True),
    "rounded_of_256": Prompt(5, 64, ((64,), (1, 63)), 1, 8, 256, 256, norm=True, rounded=True),
    "sixteen_heads_a_key": Prompt(70, 100, ((100,), (50,)), 1, 16, 64, 64),
    "llama_1b": Prompt(100, 700, ((700,), (64, 1, 500, 135), (512, 188)), 8, 4, 64, 64),
    "llama_8b": Prompt(2_000, 700, ((700,), (47, 1, 60, 592), (256,)), 8, 4, 128, 128),
    "behind_4090": Prompt(4_090, 200, SOME, 8, 4, 128, 128),
    "behind_4090_of_64": Prompt(4_090, 200, SOME, 8, 1, 64, 64, norm=True),
    "long": Prompt(0, 2_300, ((2_300,), (512,), (1_000, 1_300)), 8, 1, 64, 64),
    "long_of_128": Prompt(0, 2_300, ((2_300,), (1_031, 1_269)), 16, 1, 128, 128),
    "long_of_80": Prompt(2_000, 2_300, ((2_300,), (640,)), 8, 1, 80, 80),
    "gemma": Prompt(100, 200, SOME, 1, 4, 256, 256, before=256, norm=True),
    "gemma_behind_4090": Prompt(4_090, 200, SOME, 4, 2, 256, 256, norm=True),
    "heads_of_256_behind_9000": Prompt(9_000, 70, ((70,), (64, 6)), 8, 1, 256, 64),
    "heads_of_512": Prompt(100, 200, SOME, 1, 8, 512, 512, norm=True),
    "heads_of_512_behind_4090": Prompt(4_090, 70, ((70,), (64, 6)), 1, 8, 512, 128),
    "int8_of_512": Prompt(4_090, 70, ((70,), (6, 64)), 2, 4, 512, 512, norm=True, int8=True),
    "queries_turn_otherwise": Prompt(100, 200, SOME, 2, 4, 128, 128, further=128),
    "neighbours": Prompt(100, 200, SOME, 2, 4, 128, 128, neighbours=True),
    "some_neighbours": Prompt(5, 64, ((64,), (1, 63)), 1, 8, 256, 64, neighbours=True, rounded=True),
    "norms_behind": Prompt(100, 200, SOME, 2, 4, 128, 128, norm=True, behind=True),
    "int8_norms_behind": Prompt(5, 64, ((64,), (1, 63)), 2, 1, 64, 64, norm=True, int8=True, behind=True),
    "values_of_gemma": Prompt(
        *(700, 700, ((700,), (64, 1, 500, 135)), 1, 8, 256, 256), norm=True, window=512, rows=1_280, values=True
    ),
    "values_of_512": Prompt(4_090, 70, ((70,), (6, 64)), 1, 8, 512, 512, norm=True, values=True),
    "int8_values": Prompt(5, 64, ((64,), (1, 63)), 2, 1, 64, 64, norm=True, int8=True, values=True),
    "int8": Prompt(100, 200, SOME, 2, 4, 64, 64, int8=True),
    "int8_of_80": Prompt(5, 64, ((64,), (1, 63)), 2, 1, 80, 80, int8=True),
    "int8_of_128": Prompt(2_000, 200, SOME, 8, 4, 128, 128, norm=True, int8=True),
    "int8_of_256": Prompt(4_090, 100, ((100,), (6, 94)), 1, 8, 256, 256, int8=True),
    "window": Prompt(3, 200, SOME, 2, 4, 64, 64, window=5, rows=256),
    "window_of_gemma": Prompt(700, 700, ((700,), (64, 1, 500, 135)), 1, 4, 256, 256, norm=True, window=512, rows=1_280),
    "window_of_128": Prompt(1_001, 200, SOME, 2, 3, 128, 128, window=129, rows=384),
    "window_of_spans": Prompt(4_990, 200, SOME, 16, 1, 64, 64, window=2_500, rows=2_752),
    "window_of_spans_of_256": Prompt(4_990, 100, ((100,), (31,)), 16, 1, 256, 64, window=2_500, rows=2_624),
    "int8_in_a_window": Prompt(257, 200, SOME, 2, 2, 128, 128, int8=True, window=100, rows=320),
}
#: Both dtypes have the same code: compiling each kernel again takes longer than the tests.
IN_BFLOAT16 = ("rounded", "llama_1b", "behind_4090", "gemma", "int8_of_128", "window_of_128")


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float16") for name in PROMPTS), *((name, "bfloat16") for name in IN_BFLOAT16)]
)
def test_prompts_have_the_bits_of_decode_steps(gpu, name: str, dtype: str) -> None:
    prompt = PROMPTS[name]
    expected = Device(gpu, prompt, dtype).by_decode_steps()
    for sizes in prompt.cuts:
        found = Device(gpu, prompt, dtype).by_chunks(sizes)
        for key, values in expected.items():
            np.testing.assert_array_equal(bits_of(found[key]), bits_of(values), err_msg=f"{key} in chunks of {sizes}")
    seen = min(prompt.window or prompt.start + prompt.tokens, prompt.start + prompt.tokens)
    if prompt.tokens * seen * prompt.heads * prompt.size < TWIN_PRODUCTS:
        tolerance = TOLERANCE[dtype] + 0.01 * prompt.int8
        assert relative(from_bits(expected["context"], dtype), by_twin(prompt, dtype)) < tolerance


@pytest.mark.parametrize("dtype", ["float16"])
@pytest.mark.parametrize(
    "name", ["nothing_turns", "llama_1b", "llama_8b", "behind_4090", "long_of_80", "int8_of_128", "window_of_128"]
)
def test_no_bit_depends_on_the_queries_of_a_warp(gpu, name: str, dtype: str) -> None:
    prompt = PROMPTS[name]
    expected = bits_of(Device(gpu, prompt, dtype).by_chunks(prompt.cuts[0])["context"])
    for tiles in (1, 2):
        found = Device(gpu, prompt, dtype).by_chunks(prompt.cuts[0], tiles)["context"]
        np.testing.assert_array_equal(bits_of(found), expected, err_msg=f"{tiles} tiles")


def bits_of(array: np.ndarray) -> np.ndarray:
    """Floats as they lie in memory: zeros differ by their signs."""
    return array.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[array.dtype.itemsize])
