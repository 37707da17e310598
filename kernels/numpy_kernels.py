"""The kernels in NumPy: they define what `CudaKernels` computes, and run where there is no GPU."""

from __future__ import annotations

import math

import numpy as np

from edgellm.kernels.bfloat16 import bfloat16_bits
from edgellm.kernels.checks import IN_PROMPT, check_host_arguments
from edgellm.kernels.interface import SequenceState
from edgellm.kernels.portable_math import fixed_point_exp, gumbel, log
from edgellm.kernels.random_numbers import philox_4x32

_COUNT_BITS = IN_PROMPT - 1
_MINUS_INFINITY = np.float32(-np.inf)
#: How many of the largest values are tried as the set that top-p keeps before all are sorted.
_FEW = 128
#: An infinity's bits; those of NaN are more, of finite values less, but for the sign. uint16 stands for bfloat16.
_INFINITY = {"float32": 0x7F800000, "float16": 0x7C00, "uint16": 0x7F80}
#: Values looked at together: they stay in the processor's cache until they were looked at twice.
_LOOKED_AT = 1 << 17


class NumpyKernels:
    """See `edgellm.kernels.interface.Kernels`; arrays are NumPy arrays, bfloat16 ones hold its bits as uint16.

    A NaN among logits counts as -inf; a row without any larger value selects id 0.
    """

    def embedding_lookup(self, table: np.ndarray, token_ids: np.ndarray, inputs_embeds: np.ndarray) -> None:
        """Copy rows of `table` [V, H] named by `token_ids` [B, T] to `inputs_embeds` [B, T, H]; zeros for others."""
        sizes = check_host_arguments("embedding_lookup", table, token_ids, inputs_embeds)
        # take with mode="clip" writes straight into `out`; its checking mode would go through a buffer
        np.take(table, token_ids, axis=0, out=inputs_embeds, mode="clip")
        unknown = (token_ids < 0) | (token_ids >= sizes["V"])
        if unknown.any():
            inputs_embeds[unknown] = 0

    def prepare_attention(
        self,
        kvcache_start_index: np.ndarray,
        position_offsets: np.ndarray,
        rotary_table: np.ndarray,
        rope_rotary_cos_sin: np.ndarray,
        attention_mask: np.ndarray,
    ) -> None:
        """Rotary rows [B, T, R] and causal mask [B, 1, T, L] of T tokens after `kvcache_start_index` [B] rows."""
        sizes = check_host_arguments(
            "prepare_attention",
            kvcache_start_index,
            position_offsets,
            rotary_table,
            rope_rotary_cos_sin,
            attention_mask,
        )
        rows = kvcache_start_index[:, None] + np.arange(sizes["T"], dtype=np.int32)
        np.less_equal(np.arange(sizes["L"], dtype=np.int32), rows[:, None, :, None], out=attention_mask)
        store_rounded(rotary_table.take(rows + position_offsets[:, None], axis=0, mode="clip"), rope_rotary_cos_sin)

    def prepare_step(
        self,
        table: np.ndarray,
        token_ids: np.ndarray,
        inputs_embeds: np.ndarray,
        kvcache_start_index: np.ndarray,
        position_offsets: np.ndarray,
        rotary_table: np.ndarray,
        rope_rotary_cos_sin: np.ndarray,
        attention_mask: np.ndarray,
    ) -> None:
        """`embedding_lookup` and `prepare_attention` at once."""
        embedding = (table, token_ids, inputs_embeds)
        attention = (kvcache_start_index, position_offsets, rotary_table, rope_rotary_cos_sin, attention_mask)
        check_host_arguments("prepare_step", *embedding, *attention)
        self.embedding_lookup(*embedding)
        self.prepare_attention(*attention)

    def insert_image_rows(
        self,
        image_rows: np.ndarray,
        token_ids: np.ndarray,
        target: np.ndarray,
        inserted: np.ndarray,
        image_token_id: int,
        first_row: int,
    ) -> None:
        """Rows of `image_rows` [M, H] from `first_row` on at the image tokens among `token_ids` [1, T]."""
        sizes = check_host_arguments("insert_image_rows", image_rows, token_ids, target, inserted)
        places = np.flatnonzero(token_ids[0] == image_token_id)
        rows = first_row + np.arange(len(places))
        known = (rows >= 0) & (rows < sizes["M"])
        target[0, places[known]] = image_rows[rows[known]]
        inserted += known.sum(dtype=np.int32)

    def mrope_rotary_rows(
        self, positions: np.ndarray, axes: np.ndarray, rotary_table: np.ndarray, rope_rotary_cos_sin: np.ndarray
    ) -> None:
        """Rotary rows [1, T, R] of tokens at `positions` [3, T]: column i follows the axis axes[i]."""
        sizes = check_host_arguments("mrope_rotary_rows", positions, axes, rotary_table, rope_rotary_cos_sin)
        rows = positions[axes.clip(0, 2)].clip(0, sizes["P"] - 1)
        store_rounded(rotary_table[rows.T, np.arange(sizes["R"])][None], rope_rotary_cos_sin)

    def argmax(self, logits: np.ndarray, tokens: np.ndarray, state: SequenceState | None = None) -> None:
        """`tokens` [B]: the lowest id of the largest of `logits` [B, V]; a `state` takes them."""
        check_host_arguments("argmax" if state is None else "argmax_and_advance", logits, tokens, *(state or ()))
        for row, values in enumerate(logits):
            tokens[row] = _argmax(values)
        if state is not None:
            _advance(tokens, state)

    def process_logits(
        self,
        logits: np.ndarray,
        token_counts: np.ndarray,
        repetition_penalty: np.ndarray,
        presence_penalty: np.ndarray,
        frequency_penalty: np.ndarray,
        temperature: np.ndarray,
        processed: np.ndarray,
    ) -> None:
        """Penalties, then temperature, `logits` [B, V] to `processed` [B, V]; neutral settings cost nothing."""
        check_host_arguments(
            "process_logits",
            logits,
            token_counts,
            repetition_penalty,
            presence_penalty,
            frequency_penalty,
            temperature,
            processed,
        )
        if processed is not logits:
            np.copyto(processed, logits)
        for row, values in enumerate(processed):
            repetition, presence, frequency = repetition_penalty[row], presence_penalty[row], frequency_penalty[row]
            if repetition != 1 or presence != 0 or frequency != 0:
                _penalize(values, token_counts[row], repetition, presence, frequency)
            if temperature[row] not in (0, 1):
                np.divide(values, temperature[row], out=values)

    def filter_threshold(
        self,
        processed: np.ndarray,
        top_k: np.ndarray,
        top_p: np.ndarray,
        min_p: np.ndarray,
        thresholds: np.ndarray,
    ) -> None:
        """`thresholds` [B]: exactly the values of `processed` [B, V] that are at least this pass; -inf where all do."""
        check_host_arguments("filter_threshold", processed, top_k, top_p, min_p, thresholds)
        for row, values in enumerate(processed):
            thresholds[row] = _threshold(values, int(top_k[row]), top_p[row], min_p[row])

    def sample(
        self,
        processed: np.ndarray,
        thresholds: np.ndarray,
        temperature: np.ndarray,
        seeds: np.ndarray,
        sequences: np.ndarray,
        positions: np.ndarray,
        tokens: np.ndarray,
        state: SequenceState | None = None,
    ) -> None:
        """Draw `tokens` [B] by Gumbel-max from `processed` [B, V] where >= `thresholds` [B]; a `state` takes them."""
        arrays = (processed, thresholds, temperature, seeds, sequences, positions, tokens)
        check_host_arguments("sample" if state is None else "sample_and_advance", *arrays, *(state or ()))
        for row, values in enumerate(processed):
            ids = np.flatnonzero(_without_nan(values) >= thresholds[row])
            if not ids.size:
                tokens[row] = 0
                continue
            scores = _without_nan(values[ids])
            if temperature[row] != 0:
                scores += _gumbel_of_ids(ids, int(seeds[row]), int(sequences[row]), int(positions[row]))
            tokens[row] = ids[scores.argmax()]
        if state is not None:
            _advance(tokens, state)

    def count_tokens(self, token_ids: np.ndarray, token_counts: np.ndarray) -> None:
        """Clear `token_counts` [V] and mark those of `token_ids` [N] that are ids of it as `IN_PROMPT`."""
        sizes = check_host_arguments("count_tokens", token_ids, token_counts)
        token_counts.fill(0)
        token_counts[token_ids[(token_ids >= 0) & (token_ids < sizes["V"])]] = IN_PROMPT

    def first_not_finite(self, values: np.ndarray, index: np.ndarray) -> None:
        """`index` [1]: that of the first of `values` [N] that is infinite or NaN; -1 where none is."""
        check_host_arguments("first_not_finite", values, index)
        index[0] = first_not_finite(values)


def first_not_finite(values: np.ndarray) -> int:
    """The index of the first of `values` [N] float32, float16 or bfloat16 (bits, uint16) that is infinite or NaN.

    -1 where none is. It makes no copy, and lets other threads run meanwhile.
    """
    infinity, size = _INFINITY[values.dtype.name], 8 * values.itemsize
    signed, unsigned = values.view(f"i{values.itemsize}"), values.view(f"u{values.itemsize}")
    sign = 1 << (size - 1)
    for start in range(0, len(values), _LOOKED_AT):
        piece = slice(start, start + _LOOKED_AT)
        # Positive ones are the largest of signed numbers, negative ones of unsigned.
        if signed[piece].max() >= infinity or unsigned[piece].max() >= infinity + sign:
            found = (unsigned[piece] & (sign - 1)) >= infinity
            return start + int(found.argmax())
    return -1


def store_rounded(values: np.ndarray, target: np.ndarray) -> None:
    """Set `target` of a compute dtype (uint16: bfloat16) from float32 values of its shape, or that broadcast to it."""
    if target.dtype == np.uint16:
        target[...] = bfloat16_bits(values)
    else:
        np.copyto(target, values, casting="same_kind")


def _advance(tokens: np.ndarray, state: SequenceState) -> None:
    """Each active sequence takes its one of `tokens` [B], as `SequenceState` says."""
    places, vocabulary = state.emitted.shape[1], state.token_counts.shape[1]
    for row, token in enumerate(tokens):
        active = state.active[row] == 1
        place = state.emitted_index[row]
        state.emitted[row, place] = token if active else -1
        state.emitted_index[row] = (place + 1) % places
        if not active:
            continue
        state.token_ids[row, 0] = token
        state.kvcache_start_index[row] += 1
        state.positions[row] += 1
        if 0 <= token < vocabulary:
            state.token_counts[row, token] += 1


def _argmax(values: np.ndarray) -> int:
    token = int(values.argmax())
    if values[token] != values[token]:  # NumPy's argmax stops at the first NaN
        token = int(_without_nan(values).argmax())
    return token


def _without_nan(values: np.ndarray) -> np.ndarray:
    """The values with -inf in place of NaN; the array itself where it has none."""
    maximum = values.max()
    return np.where(np.isnan(values), _MINUS_INFINITY, values) if maximum != maximum else values


def _penalize(
    values: np.ndarray, counts: np.ndarray, repetition: np.float32, presence: np.float32, frequency: np.float32
) -> None:
    """Apply the three penalties to `values` [V] in place, at the tokens that were seen."""
    seen = counts.nonzero()[0]
    penalized = values[seen]
    penalized = np.where(penalized > 0, penalized / repetition, penalized * repetition)
    generated = counts[seen] & _COUNT_BITS
    penalized -= np.where(generated > 0, presence, np.float32(0))
    penalized -= frequency * generated.astype(np.float32)
    values[seen] = penalized


def _threshold(values: np.ndarray, top_k: int, top_p: np.float32, min_p: np.float32) -> np.float32:
    """The bound of top-k, top-p and min-p on one row; see the interface for their meaning."""
    filters_k, filters_p, filters_min = 0 < top_k < values.size, top_p < 1, min_p > 0
    if not (filters_k or filters_p or filters_min):
        return _MINUS_INFINITY
    values = _without_nan(values)
    maximum = values.max()
    threshold = _MINUS_INFINITY
    if filters_k:
        threshold = np.partition(values, values.size - top_k)[values.size - top_k]
    if filters_p:
        threshold = _top_p_threshold(values[values >= threshold], maximum, float(top_p))
    if filters_min:
        threshold = max(threshold, maximum + log(np.array([min_p], np.float32))[0])
    return threshold


def _top_p_threshold(values: np.ndarray, maximum: np.float32, top_p: float) -> np.float32:
    """The last of the largest values whose fixed-point probabilities together reach `top_p` of all of them."""
    total = int(_probabilities(values, maximum).sum())
    needed = max(1, math.ceil(top_p * total))
    for count in (min(_FEW, values.size), values.size):
        largest = values if count == values.size else np.partition(values, values.size - count)[-count:]
        largest = np.sort(largest)[::-1]
        sums = _probabilities(largest, maximum).cumsum()
        if sums[-1] >= needed:
            break
    return largest[np.searchsorted(sums, np.uint64(needed))]


def _probabilities(values: np.ndarray, maximum: np.float32) -> np.ndarray:
    """Unnormalized probabilities in uint64 fixed point: 2^32 at the maximum, infinite or not."""
    if np.isinf(maximum):
        return np.where(values == maximum, np.uint64(1 << 32), np.uint64(0))
    return fixed_point_exp(values - maximum)


def _gumbel_of_ids(ids: np.ndarray, seed: int, sequence: int, position: int) -> np.ndarray:
    """Gumbel draws of ascending token ids: float32 like `ids`; one Philox block serves four neighbouring ids."""
    blocks = ids >> 2
    starts = np.empty(ids.size, bool)
    starts[0] = True
    np.not_equal(blocks[1:], blocks[:-1], out=starts[1:])
    counter = (blocks[starts], position, sequence, 0)
    words = philox_4x32(counter, (seed & 0xFFFFFFFF, seed >> 32))
    return gumbel(words[starts.cumsum() - 1, ids & 3])
