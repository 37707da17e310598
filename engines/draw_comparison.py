"""How close a draw was: two ways of computing the same logits may part only where rounding decides."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from edgellm.engines.sampling_state import SamplingValues
from edgellm.kernels.checks import IN_PROMPT
from edgellm.kernels.numpy_kernels import NumpyKernels
from edgellm.kernels.portable_math import gumbel
from edgellm.kernels.random_numbers import philox_4x32


def first_difference(expected: Sequence[int], found: Sequence[int]) -> int | None:
    """The index of the first token that differs, None where none does as far as both go."""
    pairs = enumerate(zip(expected, found, strict=False))
    return next((index for index, (one, other) in pairs if one != other), None)


def draw_gap(
    logits: np.ndarray,
    prompt_ids: Sequence[int],
    answer_ids: Sequence[int],
    sampling: SamplingValues,
    drawn: int,
    other: int,
) -> float:
    """How far `logits` [V] float32, after prompt and answer so far, are from drawing `other` in place of `drawn`.

    The distance of the two in what the draw maximizes: processed logits, plus Gumbel noise where it samples; or, where
    top-k, top-p or min-p keep only one of them, the other's distance from their threshold; in the units of processed
    logits.
    """
    kernels = NumpyKernels()
    counts = np.zeros((1, logits.size), np.int32)
    counts[0, list(prompt_ids)] = IN_PROMPT
    np.add.at(counts[0], list(answer_ids), 1)

    def single(value: float, dtype: type = np.float32) -> np.ndarray:
        return np.array([value], dtype)

    processed = logits[None].astype(np.float32)
    kernels.process_logits(
        processed,
        counts,
        single(sampling.repetition_penalty),
        single(sampling.presence_penalty),
        single(sampling.frequency_penalty),
        single(sampling.temperature),
        processed,
    )
    threshold = np.empty(1, np.float32)
    filters = single(sampling.top_k, np.int32), single(sampling.top_p), single(sampling.min_p)
    kernels.filter_threshold(processed, *filters, threshold)
    values = processed[0, [drawn, other]]
    if (values < threshold[0]).any():
        return float(np.abs(values - threshold[0])[values < threshold[0]].max())
    if sampling.temperature:
        values = values + _noise((drawn, other), sampling, len(prompt_ids) + len(answer_ids))
    return float(abs(values[0] - values[1]))


def _noise(ids: Sequence[int], sampling: SamplingValues, position: int) -> np.ndarray:
    """The Gumbel noise of tokens in the draw at a position (`Kernels.sample`): float32 like `ids`."""
    key = sampling.seed & 0xFFFFFFFF, sampling.seed >> 32
    blocks = [philox_4x32((np.array([token // 4]), position, sampling.sequence, 0), key)[0] for token in ids]
    return gumbel(np.array([block[token % 4] for block, token in zip(blocks, ids, strict=True)], np.uint32))


def spacing(value: float, dtype: str) -> float:
    """The distance between neighbouring numbers of `dtype` at the size of `value`."""
    mantissa = {"float16": 10, "bfloat16": 7, "float32": 23}[dtype]
    return 2.0 ** (math.floor(math.log2(abs(value))) - mantissa)
