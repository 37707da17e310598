"""What a decoder-only language model looks like, whatever its family calls it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class DecoderConfig:
    """Dimensions and switches of a decoder, read from a checkpoint's `config.json` by its family.

    `dtype` is the checkpoint's own ("float16", "bfloat16" or "float32"). `rope_scaling` is the published dictionary
    (None: unscaled); `rotary_dim` is the part of `head_dim` that is rotated. `feature_layers` names the layers whose
    input is output as `hidden_states` (none: no such output); drafting sets it.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rotary_dim: int
    dtype: str
    tie_word_embeddings: bool
    rope_scaling: dict[str, Any] | None = None
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    feature_layers: tuple[int, ...] = field(default=())

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads (or of all value heads) together."""
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class WeightSpec:
    """One weight as an engine takes it: a buffer that one or several checkpoint tensors fill, one behind the other.

    `shape` is the whole; `parts` are (checkpoint tensor name, shape), joined along the first axis.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class EngineShape:
    """The fixed shapes of one engine: its phase, B sequences, T tokens of each, L key rows read, C rows held.

    `phase` is "prefill", "decode" or, once drafting exists, "verify". Names a plan: `base.decode-b1-t1-l1024`.
    """

    phase: str
    batch: int
    tokens: int
    key_range: int
    kv_rows: int
    selected: int = 1

    @property
    def name(self) -> str:
        """The stem of the plan's file name."""
        return f"base.{self.phase}-b{self.batch}-t{self.tokens}-l{self.key_range}"


@dataclass(frozen=True)
class EngineLimits:
    """What an engine directory is built for.

    `max_batch` sequences at once; prompts prefilled in chunks of at most `prefill_chunk` tokens; `kv_capacity` tokens
    of context for each sequence (prompt and answer together).
    """

    max_batch: int = 1
    prefill_chunk: int = 512
    kv_capacity: int = 4096

    @property
    def kv_rows(self) -> int:
        """Physical rows of a KV cache: a padded last chunk may reach past the context by less than a chunk."""
        return self.kv_capacity + self.prefill_chunk

    @property
    def prefill_chunks(self) -> tuple[int, ...]:
        """The chunk sizes that engines exist for, ascending; the largest is `prefill_chunk`."""
        return tuple(size for size in (16, 128, 512) if size < self.prefill_chunk) + (self.prefill_chunk,)

    @property
    def key_ranges(self) -> tuple[int, ...]:
        """How many KV rows attention reads, ascending; the largest covers every row a query may see."""
        return tuple(size for size in (1024, 4096, 16384, 65536) if size < self.kv_capacity) + (self.kv_capacity,)

    @property
    def batches(self) -> tuple[int, ...]:
        """The batch sizes that decode engines exist for."""
        return tuple(size for size in (1, 2, 4, 8) if size < self.max_batch) + (self.max_batch,)

    def engine_shapes(self) -> list[EngineShape]:
        """Every engine of a directory with these limits: decode first, then prefill (one sequence at a time)."""
        decode = [
            EngineShape("decode", batch, 1, key_range, self.kv_rows)
            for batch in self.batches
            for key_range in self.key_ranges
        ]
        prefill = [
            EngineShape("prefill", 1, chunk, key_range, self.kv_rows)
            for chunk in self.prefill_chunks
            for key_range in self.key_ranges
            if chunk <= key_range
        ]
        return decode + prefill
