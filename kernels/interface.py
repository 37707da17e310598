"""The contract of the kernels: `NumpyKernels` defines what they compute, `CudaKernels` computes it on the GPU.

Arrays are C-contiguous; B sequences (slots), T tokens of each, H hidden size, V vocabulary, L key range, P positions
of the rotary table, R rotary size. "compute" is the dtype of the model's activations (float16 or bfloat16 on the GPU,
float32 on NumPy). Wrong shapes or dtypes raise `KernelError` that names the argument, what was found and what was
expected. Every kernel writes into arrays of the caller; none allocates and none synchronizes, so that a CUDA graph
can hold them.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from edgellm.kernels.arrays import Array, OwnArray


class SequenceState(NamedTuple):
    """What decoding knows of B sequences, all int32, and where it writes the tokens.

    A sequence whose `active` is 1 takes a token as its next input: token_ids = token, kvcache_start_index += 1,
    positions += 1, 1 is added to token_counts at the token (an id outside 0..V-1 is not counted), and the token is
    written to `emitted`. An idle one keeps its state and emits -1. What is emitted goes to place emitted_index[b] of a
    ring of E places, emitted[b]; emitted_index[b] then moves on by one, modulo E.
    """

    active: OwnArray  # [B]
    token_ids: OwnArray  # [B, 1]
    kvcache_start_index: OwnArray  # [B]
    positions: OwnArray  # [B]
    token_counts: OwnArray  # [B, V]
    emitted_index: OwnArray  # [B]
    emitted: OwnArray  # [B, E]


class Kernels(Protocol):
    """One implementation of all kernels."""

    def embedding_lookup(self, table: Array, token_ids: Array, inputs_embeds: Array) -> None:
        """Copy rows of `table` [V, H] compute named by `token_ids` [B, T] int32 to `inputs_embeds` [B, T, H] compute.

        An id outside 0..V-1 (padding is -1) gives a row of zeros.
        """

    def prepare_attention(
        self,
        kvcache_start_index: Array,
        position_offsets: Array,
        rotary_table: Array,
        rope_rotary_cos_sin: Array,
        attention_mask: Array,
    ) -> None:
        """Positions and causal mask of T tokens that follow `kvcache_start_index` [B] int32 committed rows.

        Token t of sequence b stands at row r = kvcache_start_index[b] + t: `attention_mask` [B, 1, T, L] bool gets
        True at keys j <= r, and `rope_rotary_cos_sin` [B, T, R] compute the row r + position_offsets[b] ([B] int32) of
        `rotary_table` [P, R] float32, clamped to 0..P-1.
        """

    def prepare_step(
        self,
        table: Array,
        token_ids: Array,
        inputs_embeds: Array,
        kvcache_start_index: Array,
        position_offsets: Array,
        rotary_table: Array,
        rope_rotary_cos_sin: Array,
        attention_mask: Array,
    ) -> None:
        """`embedding_lookup` and `prepare_attention` at once; a mask of no keys (L = 0) is not written."""

    def insert_image_rows(
        self,
        image_rows: Array,
        token_ids: Array,
        target: Array,
        inserted: Array,
        image_token_id: int,
        first_row: int,
    ) -> None:
        """Put rows of `image_rows` [M, H] compute where `token_ids` [1, T] int32 are `image_token_id`, in `target`
        [1, T, H] compute.

        The n-th image token (n from 0) takes row first_row + n, where that is one of 0..M-1; all other rows of `target`
        stay. `inserted` [1] int32 grows by how many were taken, so that the caller can compare it with what it knows.
        """

    def mrope_rotary_rows(self, positions: Array, axes: Array, rotary_table: Array, rope_rotary_cos_sin: Array) -> None:
        """`rope_rotary_cos_sin` [1, T, R] compute of tokens with three positions (M-RoPE, Wang et al. 2024).

        Column i of token t is that of the row positions[axes[i], t] of `rotary_table` [P, R] float32, clamped to
        0..P-1; `positions` [3, T] and `axes` [R], each 0, 1 or 2, are int32.
        """

    def argmax(self, logits: Array, tokens: Array, state: SequenceState | None = None) -> None:
        """`tokens` [B] int32: the id of the largest of `logits` [B, V] float32; the lowest id of equal ones.

        With a `state` the sequences then take their tokens (see `SequenceState`).
        """

    def process_logits(
        self,
        logits: Array,
        token_counts: Array,
        repetition_penalty: Array,
        presence_penalty: Array,
        frequency_penalty: Array,
        temperature: Array,
        processed: Array,
    ) -> None:
        """Penalties, then temperature: `logits` [B, V] float32 to `processed` [B, V] float32 (may be the same array).

        `token_counts` [B, V] int32 counts the generated tokens in bits 0..29; bit 30 (`IN_PROMPT`) says that the token
        occurs in the prompt. Other arguments are [B] float32. In this order: a token seen in the prompt or generated
        has its logit divided by the repetition penalty if positive, else multiplied (Keskar et al. 2019); then
        presence_penalty is subtracted once from generated tokens and frequency_penalty times the count (OpenAI's
        definition); then the row is divided by its temperature, where that is not 0.
        """

    def filter_threshold(self, processed: Array, top_k: Array, top_p: Array, min_p: Array, thresholds: Array) -> None:
        """`thresholds` [B] float32: the least value of `processed` [B, V] float32 that top-k, top-p and min-p let pass.

        Applied one after the other, as Hugging Face does: top_k [B] int32 keeps the k largest (0 or >= V: all; equals
        of the k-th are all kept); top_p [B] float32 keeps the smallest set of the largest of these whose probability,
        renormalized over these, reaches top_p (1: all; equals of the last are all kept; at least one stays); min_p [B]
        float32 keeps tokens at least min_p times as likely as the likeliest (0: all). Probabilities are summed as
        unsigned 64-bit fixed point (exp(x - max) times 2^32, rounded down), so that the order of summation cannot
        change the result. The GPU takes V up to 2^21.
        """

    def sample(
        self,
        processed: Array,
        thresholds: Array,
        temperature: Array,
        seeds: Array,
        sequences: Array,
        positions: Array,
        tokens: Array,
        state: SequenceState | None = None,
    ) -> None:
        """Draw `tokens` [B] int32 from softmax(`processed` [B, V] float32) restricted to values >= thresholds [B].

        Gumbel-max: the token is the argmax (lowest id of equals) of processed + g, where g = -log(-log1p(-u)),
        u = (x + 0.5) * 2^-32 in float32, at most 1 - 2^-24, and x is word (id % 4) of
        Philox4x32-10 (Salmon et al. 2011) with counter (id // 4, position, sequence, 0) and key (low, high) words of
        seeds [B] uint64; `sequences` and `positions` [B] int32 name the draw. Where temperature [B] is 0, g is 0:
        argmax. So a draw depends on nothing but its arguments. With a `state`, whose positions may be these, the
        sequences then take their tokens (see `SequenceState`).
        """

    def count_tokens(self, token_ids: Array, token_counts: Array) -> None:
        """Set bit `IN_PROMPT` of `token_counts` [V] int32 for each of `token_ids` [N] int32; other ids are ignored.

        The row is first cleared: this starts a new request.
        """

    def first_not_finite(self, values: Array, index: Array) -> None:
        """`index` [1] int64: that of the first of `values` [N] compute that is infinite or NaN; -1 where none is.

        `values` may begin at any element of an allocation.
        """
