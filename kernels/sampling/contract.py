"""The kernels of a plain step: what an engine reads is prepared, and tokens are chosen from its logits.

`NumpySampling` defines what they compute, `CudaSampling` computes it on the GPU. Arrays are C-contiguous; B sequences
or rows, T tokens of each, H hidden size, V vocabulary, L key range, P positions of the rotary table, R rotary size.
Every kernel writes into arrays of the caller; none allocates and none synchronizes, so that a CUDA graph can hold them.
A NaN among logits counts as -inf; a row without any larger value selects id 0.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple, Protocol, TypeAlias

from edgellm.kernels.arrays import OwnArray
from edgellm.kernels.contracts import limited
from edgellm.kernels.sampling.record import SamplingRecord

#: Bit of a token count that says that the token occurs in the prompt; bits 0..29 count the generated ones.
IN_PROMPT = 1 << 30
#: The filter's sums of one block stay below 2^32, and fixed-point sums of a row below 2^64, up to this vocabulary.
MAXIMUM_SAMPLED_VOCABULARY = 1 << 21


#: Logits of each row, and a whole number for each.
LogitRows: TypeAlias = Annotated[OwnArray, "BV float32"]
OfRows: TypeAlias = Annotated[OwnArray, "B int32"]


class SequenceState(NamedTuple):
    """What decoding knows of B sequences, and where it writes the tokens.

    A sequence whose `active` is 1 takes a token as its next input: token_ids = token, kvcache_start_index += 1,
    positions += 1, 1 is added to token_counts at the token (an id outside 0..V-1 is not counted), and the token is
    written to `emitted`. An idle one keeps its state and emits -1. What is emitted goes to place emitted_index[b] of a
    ring of E places, emitted[b]; emitted_index[b] then moves on by one, modulo E.
    """

    active: OfRows
    token_ids: Annotated[OwnArray, "B1 int32"]
    kvcache_start_index: OfRows
    positions: OfRows
    token_counts: Annotated[OwnArray, "BV int32"]
    emitted_index: OfRows
    emitted: Annotated[OwnArray, "BE int32"]


#: How each of S slots draws its tokens. A kernel of B rows takes those of row r from slot r / (B / S).
SamplingRows: TypeAlias = Annotated[OwnArray, "S record", SamplingRecord]


class ModelTables(NamedTuple):
    """What a model's steps look rows up in, and each sequence's difference of position and KV row.

    On the GPU `embedding` may be a `PackedMatrix`, whose columns come in eights.
    """

    embedding: Annotated[OwnArray, "VH compute"]
    rotary: Annotated[OwnArray, "PR float32"]
    position_offsets: OfRows


class StepInputs(NamedTuple):
    """What an engine reads of a step; its new KV rows begin at `kvcache_start_index`, the number of committed ones."""

    inputs_embeds: Annotated[OwnArray, "BTH compute"]
    rope_rotary_cos_sin: Annotated[OwnArray, "BTR compute"]
    attention_mask: Annotated[OwnArray, "B1TL bool"]
    kvcache_start_index: OfRows


def _check_rows(sizes: dict[str, Any]) -> str | None:
    if sizes["B"] % sizes["S"]:
        return f"{sizes['B']} rows for {sizes['S']} slots; expected as many rows for each slot"
    return None


def _check_filtered(sizes: dict[str, Any]) -> str | None:
    if sizes["V"] > MAXIMUM_SAMPLED_VOCABULARY:
        return f"V = {sizes['V']}; expected at most {MAXIMUM_SAMPLED_VOCABULARY}"
    return _check_rows(sizes)


def _check_masked(sizes: dict[str, Any]) -> str | None:
    words = -(-sizes["V"] // 32)
    if sizes["W"] != words:
        return f"masks have {sizes['W']} words; expected {words}, a bit for each of {sizes['V']} tokens"
    return _check_rows(sizes)


class SamplingKernels(Protocol):
    """One implementation of these kernels."""

    def prepare_step(self, tables: ModelTables, token_ids: Annotated[OwnArray, "BT int32"], inputs: StepInputs) -> None:
        """Everything that an engine reads of T tokens of each sequence.

        `inputs_embeds` gets the rows of `embedding` that `token_ids` name; an id outside 0..V-1 (padding is -1) gives a
        row of zeros. Token t of sequence b stands at row r = kvcache_start_index[b] + t: `attention_mask` gets True at
        keys j <= r, and `rope_rotary_cos_sin` the row r + position_offsets[b] of `rotary`, clamped to 0..P-1. A mask of
        no keys (L = 0) is not written.
        """

    def argmax(self, logits: LogitRows, tokens: OfRows, state: SequenceState | None = None) -> None:
        """`tokens`: the id of the largest of each row of `logits`; the lowest id of equal ones.

        With a `state` the sequences then take their tokens (see `SequenceState`).
        """

    @limited(_check_masked)
    def constrain_logits(
        self,
        logits: LogitRows,
        mask_rows: OfRows,
        masks: Annotated[OwnArray, "MW uint32"],
        bias: Annotated[OwnArray, "SV float32"],
        rows: SamplingRows,
    ) -> None:
        """What `logits` lose and gain before anything else reads them, in place.

        Token i of row r becomes -inf where bit i % 32 of word i // 32 of row mask_rows[r] of `masks` is not set; an
        index outside of 0..M-1 (-1 by custom) stands for no mask. Where the record of its slot is `biased`, the others
        get the slot's row of `bias` added; a sum that is NaN becomes -inf. Rows without either keep their bits, and
        neither `masks` nor `bias` is read for them. That a mask leaves a token is the caller's duty: a row that has
        lost everything selects id 0.
        """

    @limited(_check_rows)
    def process_logits(
        self, logits: LogitRows, token_counts: Annotated[OwnArray, "BV int32"], rows: SamplingRows, processed: LogitRows
    ) -> None:
        """Penalties, then temperature: `logits` (after `constrain_logits`) to `processed` (may be the same array).

        `token_counts` counts the generated tokens in bits 0..29; bit 30 (`IN_PROMPT`) says that the token occurs in the
        prompt. In this order: a token seen in the prompt or generated has its logit divided by the repetition penalty
        if positive, else multiplied (Keskar et al. 2019); then presence_penalty is subtracted once from generated
        tokens and frequency_penalty times the count (OpenAI's definition); then the row is divided by its temperature,
        where that is not 0.
        """

    @limited(_check_filtered)
    def filter_threshold(
        self, processed: LogitRows, rows: SamplingRows, thresholds: Annotated[OwnArray, "B float32"]
    ) -> None:
        """`thresholds`: exactly the values of `processed` that are at least this pass top-k, top-p and min-p.

        Applied one after the other, as Hugging Face does: top_k keeps the k largest (0 or >= V: all; equals of the k-th
        are all kept); top_p keeps the smallest set of the largest of these whose probability, renormalized over these,
        reaches top_p (1: all; equals of the last are all kept; at least one stays); min_p keeps tokens at least min_p
        times as likely as the likeliest (0: all). -inf where all pass. Probabilities are summed as unsigned 64-bit
        fixed point (exp(x - max) times 2^32, rounded down), so that the order of summation cannot change the result.
        """

    @limited(_check_rows)
    def sample(
        self,
        processed: LogitRows,
        thresholds: Annotated[OwnArray, "B float32"],
        rows: SamplingRows,
        positions: OfRows,
        tokens: OfRows,
        state: SequenceState | None = None,
    ) -> None:
        """Draw `tokens` from the softmax of each row of `processed` restricted to values >= its threshold.

        Gumbel-max: the token is the argmax (lowest id of equals) of processed + g, where g = -log(-log1p(-u)),
        u = (x + 0.5) * 2^-32 in float32, at most 1 - 2^-24, and x is word (id % 4) of
        Philox4x32-10 (Salmon et al. 2011) with counter (id // 4, position, sequence, 0) and key (low, high) words of
        the seed; sequence and `positions` name the draw. Where the temperature is 0, g is 0: argmax. So a draw depends
        on nothing but its arguments. With a `state`, whose positions may be these, the sequences then take their tokens
        (see `SequenceState`).
        """

    def count_tokens(
        self, token_ids: Annotated[OwnArray, "N int32"], token_counts: Annotated[OwnArray, "V int32"]
    ) -> None:
        """Clear `token_counts` and set its bit `IN_PROMPT` for each of `token_ids`: this starts a new request.

        Ids outside 0..V-1 are ignored.
        """

    def first_not_finite(self, values: Annotated[OwnArray, "N compute"], index: Annotated[OwnArray, "1 int64"]) -> None:
        """`index`: that of the first of `values` that is infinite or NaN; -1 where none is.

        `values` may begin at any element of an allocation.
        """
