"""The kernels of a plain step in NumPy: they define what `CudaSampling` computes, and run where there is no GPU."""

from __future__ import annotations

import math

import numpy as np

from edgellm.kernels.bfloat16 import store_rounded
from edgellm.kernels.contracts import Contracts
from edgellm.kernels.portable_math import fixed_point_exp, gumbel, log
from edgellm.kernels.random_numbers import philox_4x32
from edgellm.kernels.sampling.contract import IN_PROMPT, ModelTables, SamplingKernels, SequenceState, StepInputs
from edgellm.kernels.sampling.record import penalizes, records

_check = Contracts(SamplingKernels, np.ndarray)
_COUNT_BITS = IN_PROMPT - 1
_MINUS_INFINITY = np.float32(-np.inf)
#: Of each byte of a mask, the largest value that each of its eight tokens may have.
_LIMITS = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), np.inf, -np.inf)
_LIMITS = _LIMITS.astype(np.float32)
#: How many of the largest values are tried as the set that top-p keeps before all are sorted.
_FEW = 128
#: An infinity's bits; those of NaN are more, of finite values less, but for the sign. uint16 stands for bfloat16.
_INFINITY = {"float32": 0x7F800000, "float16": 0x7C00, "uint16": 0x7F80}
#: Values looked at together: they stay in the processor's cache until they were looked at twice.
_LOOKED_AT = 1 << 17


class NumpySampling:
    """See `edgellm.kernels.sampling.contract.SamplingKernels`; bfloat16 arrays hold its bits as uint16."""

    def prepare_step(self, tables: ModelTables, token_ids: np.ndarray, inputs: StepInputs) -> None:
        sizes = _check("prepare_step", tables, token_ids, inputs)
        rows = inputs.kvcache_start_index[:, None] + np.arange(sizes["T"], dtype=np.int32)
        np.less_equal(np.arange(sizes["L"], dtype=np.int32), rows[:, None, :, None], out=inputs.attention_mask)
        look_up(tables, token_ids, rows + tables.position_offsets[:, None], inputs)

    def argmax(self, logits: np.ndarray, tokens: np.ndarray, state: SequenceState | None = None) -> None:
        """The lowest id of the largest logits of each row; a `state` takes them. See the contract."""
        _check("argmax", logits, tokens, state)
        for row, values in enumerate(logits):
            tokens[row] = likeliest(values)
        if state is not None:
            _advance(tokens, state)

    def constrain_logits(self, logits, mask_rows, masks, bias, rows):
        """Masks, then biases, in place; rows without either cost nothing. See the contract."""
        sizes = _check("constrain_logits", logits, mask_rows, masks, bias, rows)
        per_slot = sizes["B"] // sizes["S"]
        for slot in np.flatnonzero(records(rows)["biased"]):
            values = logits[slot * per_slot : (slot + 1) * per_slot]
            with np.errstate(invalid="ignore"):  # inf - inf, replaced
                np.add(values, bias[slot], out=values)
            np.putmask(values, np.isnan(values), _MINUS_INFINITY)
        for index in np.unique(mask_rows[(mask_rows >= 0) & (mask_rows < sizes["M"])]):
            limits = _LIMITS.take(masks[index].view(np.uint8), axis=0).reshape(-1)[: sizes["V"]]
            for row in np.flatnonzero(mask_rows == index):
                values = np.minimum(logits[row], limits, out=logits[row])
                if np.isnan(values.max()):  # what is forbidden among them is -inf, like the rest
                    np.putmask(values, np.isnan(values) & (limits < 0), _MINUS_INFINITY)

    def process_logits(self, logits, token_counts, rows, processed):
        """Penalties, then temperature; neutral settings cost nothing. See the contract."""
        sizes = _check("process_logits", logits, token_counts, rows, processed)
        if processed is not logits:
            np.copyto(processed, logits)
        known, per_slot = records(rows), sizes["B"] // sizes["S"]
        for row, values in enumerate(processed):
            record = known[row // per_slot]
            if penalizes(record):
                _penalize(values, token_counts[row], record)
            if record["temperature"] not in (0, 1):
                np.divide(values, record["temperature"], out=values)

    def filter_threshold(self, processed: np.ndarray, rows: np.ndarray, thresholds: np.ndarray) -> None:
        sizes = _check("filter_threshold", processed, rows, thresholds)
        known, per_slot = records(rows), sizes["B"] // sizes["S"]
        for row, values in enumerate(processed):
            thresholds[row] = _threshold(values, known[row // per_slot])

    def sample(self, processed, thresholds, rows, positions, tokens, state=None):
        """Draw a token of each row by Gumbel-max; a `state` takes them. See the contract."""
        sizes = _check("sample", processed, thresholds, rows, positions, tokens, state)
        known, per_slot = records(rows), sizes["B"] // sizes["S"]
        for row, values in enumerate(processed):
            record = known[row // per_slot]
            # Of a masked row little is left, and what is -inf is drawn only where nothing else is.
            ids = np.flatnonzero((values >= thresholds[row]) & (values > _MINUS_INFINITY))
            if not ids.size:
                tokens[row] = 0
                continue
            scores = values[ids]
            if record["temperature"] != 0:
                scores += _gumbel_of_ids(ids, int(record["seed"]), int(record["sequence"]), int(positions[row]))
            tokens[row] = ids[scores.argmax()]
        if state is not None:
            _advance(tokens, state)

    def count_tokens(self, token_ids: np.ndarray, token_counts: np.ndarray) -> None:
        sizes = _check("count_tokens", token_ids, token_counts)
        token_counts.fill(0)
        token_counts[token_ids[(token_ids >= 0) & (token_ids < sizes["V"])]] = IN_PROMPT

    def first_not_finite(self, values: np.ndarray, index: np.ndarray) -> None:
        _check("first_not_finite", values, index)
        index[0] = first_not_finite(values)


def look_up(tables: ModelTables, token_ids: np.ndarray, places: np.ndarray, inputs: StepInputs) -> None:
    """Rows of `token_ids` [B, T] (zeros for unknown ids) and of the rotary `places` [B, T or 1], clamped, to
    `inputs`."""
    # take with mode="clip" writes straight into `out`; its checking mode would go through a buffer
    np.take(tables.embedding, token_ids, axis=0, out=inputs.inputs_embeds, mode="clip")
    unknown = (token_ids < 0) | (token_ids >= len(tables.embedding))
    if unknown.any():
        inputs.inputs_embeds[unknown] = 0
    store_rounded(tables.rotary.take(places, axis=0, mode="clip"), inputs.rope_rotary_cos_sin)


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


def likeliest(values: np.ndarray) -> int:
    """The lowest id of the largest of `values` [V] float32; a NaN counts as -inf."""
    token = int(values.argmax())
    if values[token] != values[token]:  # NumPy's argmax stops at the first NaN
        token = int(_without_nan(values).argmax())
    return token


def _without_nan(values: np.ndarray) -> np.ndarray:
    """The values with -inf in place of NaN; the array itself where it has none."""
    maximum = values.max()
    return np.where(np.isnan(values), _MINUS_INFINITY, values) if maximum != maximum else values


def _penalize(values: np.ndarray, counts: np.ndarray, record: np.void) -> None:
    """Apply the three penalties to `values` [V] in place, at the tokens that were seen."""
    repetition = record["repetition_penalty"]
    seen = counts.nonzero()[0]
    penalized = values[seen]
    penalized = np.where(penalized > 0, penalized / repetition, penalized * repetition)
    generated = counts[seen] & _COUNT_BITS
    penalized -= np.where(generated > 0, record["presence_penalty"], np.float32(0))
    penalized -= record["frequency_penalty"] * generated.astype(np.float32)
    values[seen] = penalized


def _threshold(values: np.ndarray, record: np.void) -> np.float32:
    """The bound of top-k, top-p and min-p on one row; see the contract for their meaning."""
    top_k, top_p, min_p = int(record["top_k"]), record["top_p"], record["min_p"]
    filters_k, filters_p, filters_min = 0 < top_k < values.size, top_p < 1, min_p > 0
    if not (filters_k or filters_p or filters_min):
        return _MINUS_INFINITY
    values = _without_nan(values)
    if values.min() == _MINUS_INFINITY:  # of a masked row little is left
        values = values[values > _MINUS_INFINITY]
        if not values.size:
            return _MINUS_INFINITY
    maximum = values.max()
    threshold = _MINUS_INFINITY
    if filters_k and top_k <= values.size:
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
