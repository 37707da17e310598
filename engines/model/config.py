"""What a decoder-only language model and an EAGLE head look like, whatever their families call it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from edgellm.engines.directories.strict_formats import ADDED_LATER, bounded

#: Far deeper than any published model. Every layer is described one by one, so a damaged number must not get there.
LARGEST_DEPTH = 1024
#: What engines can be built for. A context of 16 million tokens is longer than that of any published model.
LARGEST_BATCH = 8
LARGEST_PREFILL_CHUNK = 2048
LARGEST_CONTEXT = 1 << 24
LARGEST_LORA_RANK = 1024
LARGEST_LORA_SLOTS = 32
LARGEST_MAX_IMAGE_PATCHES = 65536
#: Rows of a vision engine: twice the patches, for windows that are padded.
LARGEST_IMAGE_ROWS = 2 * LARGEST_MAX_IMAGE_PATCHES
#: Patches in height and in width that become one token; published models have 2.
LARGEST_MERGE = 64
#: A tree of one node is its root alone; the largest sizes are those of the kernels, and of the verify engines.
DRAFT_RANGES = {"draft_top_k": (1, 64), "draft_steps": (1, 32), "verify_tree_size": (2, 64)}

#: What the rows of the base's KV caches may be: of the dtype that engines compute in, or of 8 bits with a scale each.
KV_CACHES = ("compute", "int8")
#: What a model's head may be: as it was published, or packed when the engine directory was built.
HEADS = ("as-published", "int8", "int4")
#: What mixes the tokens of a layer, as `DecoderConfig.layer_kinds` has it.
LAYER_KINDS = ("attention", "window", "convolution", "delta")
#: Those of them whose state follows from the whole text before, and cannot be cut.
RECURRENT_KINDS = ("convolution", "delta")
#: How many tokens a short convolution may reach over, its own included; published models have 3, 4 and 7.
CONV_WIDTHS = (2, 8)
#: What checkpoints call the parts of a layer, as `DecoderConfig.naming` has it.
NAMINGS = ("llama", "lfm2", "qwen3_5")
#: The activations of a gate, as `DecoderConfig.hidden_act` has them.
GATE_ACTIVATIONS = ("silu", "gelu_tanh")
#: Tokens of the largest tree of a base model without a draft: its candidates are given.
GIVEN_NODES = 32
#: How many tokens a window can be cut back by, so that the end of an answer, or a message, can be edited: the rows of
#: so many tokens beside it take 5 MiB of a model of Gemma-3-1B's shapes.
WINDOW_SLACK = 256
#: The rows of a window are whole tiles of the attention kernels (`RING_STEP` there).
WINDOW_STEP = 64
#: What a chunk costs beside its tokens, in tokens: its launches; and at least, as reading the weights takes longer than
#: the arithmetic of few tokens.
_CHUNK_COST, _LEAST_CHUNK_COST = 64, 256
#: Of packed weights, the chunk that kernels compute without dequantizing them, and what dequantizing costs the others,
#: in tokens. Measured with Llama-1B shapes on an H200: 64 tokens in 1.80 ms by kernels; 128 in 1.63 ms dense, in 2.32
#: packed; 512 in 2.55 and 3.29; 4.4 us for each token of long chunks. So two chunks of 64 cost more than one of 128.
_PACKED_CHUNK, _DEQUANTIZING_COST = 64, 160
_KEY_RANGES = (1024, 4096, 16384, 65536)


@dataclass(frozen=True)
class DecoderConfig:
    """Dimensions and switches of a decoder, read from a checkpoint's `config.json` by its family.

    `dtype` is the checkpoint's own ("float16", "bfloat16" or "float32"). `rope_scaling` is the published dictionary
    (None: unscaled); `rotary_dim` is the part of `head_dim` that is rotated. `feature_layers` names the layers whose
    input is output as `hidden_states` (none: no such output), `num_layers` standing for the last hidden state after the
    final norm; drafting sets it.

    A model that takes images has an `image_token_id`, which stands for each token of an image; `spatial_merge_size`
    patches in height and width make one. With M-RoPE `mrope_section` says how many of the rotary_dim / 2 frequencies
    follow the position in time, height and width: one section after the other, or `mrope_interleaved`. To the outputs
    of the first `deepstack_layers` layers features of the images are added.

    `hidden_act` is the gate's activation, one of `GATE_ACTIVATIONS`. `norm_offset` is added to the weights of all norms
    (Gemma: 1). Embeddings are multiplied by `embedding_scale`, what attention and MLP add to the residual stream by
    `residual_scale`, scores of attention by `attention_scale` (None: head_dim ** -0.5), logits by `logits_scale`.
    `nope_layers` have no rotary embedding. With `fused_projections` the checkpoint holds q, k and v as one tensor
    `qkv_proj`, gate and up as `gate_up_proj`. Layers of the kind "window" look back on `sliding_window` tokens alone,
    their own included; `local_rope_theta` is the base of their rotary embedding, unscaled, where it is one of its own
    (Gemma 3). With `post_norms` what attention and MLP give is normed, too, before it is added. A packed `head`, one of
    `HEADS`, is a weight of its own; with `embeds_by_head` tokens are looked up there.

    `layer_kinds` says of each layer what mixes its tokens, one of `LAYER_KINDS` (none: all attend to all): attention,
    attention within `sliding_window`, a short convolution of `conv_width` (with `conv_bias`), or the gated delta rule
    behind such a convolution, whose `delta_heads` are the numbers of key and value heads and their sizes. With
    `attention_gate` each query head of the q projection is followed by a gate for what it attends to. `naming` is what
    the checkpoint calls the parts of a layer, one of `NAMINGS`.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int = field(metadata=bounded(LARGEST_DEPTH))
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
    image_token_id: int | None = field(default=None, metadata=ADDED_LATER)
    spatial_merge_size: int = field(default=1, metadata=bounded(LARGEST_MERGE, True))
    mrope_section: tuple[int, ...] = field(default=(), metadata=ADDED_LATER)
    mrope_interleaved: bool = field(default=False, metadata=ADDED_LATER)
    deepstack_layers: int = field(default=0, metadata=bounded(LARGEST_DEPTH, True))
    hidden_act: str = field(default="silu", metadata=ADDED_LATER)
    norm_offset: float = field(default=0.0, metadata=ADDED_LATER)
    embedding_scale: float = field(default=1.0, metadata=ADDED_LATER)
    residual_scale: float = field(default=1.0, metadata=ADDED_LATER)
    attention_scale: float | None = field(default=None, metadata=ADDED_LATER)
    logits_scale: float = field(default=1.0, metadata=ADDED_LATER)
    nope_layers: tuple[int, ...] = field(default=(), metadata=ADDED_LATER)
    fused_projections: bool = field(default=False, metadata=ADDED_LATER)
    sliding_window: int | None = field(default=None, metadata=ADDED_LATER)
    head: str = field(default=HEADS[0], metadata=ADDED_LATER)
    embeds_by_head: bool = field(default=False, metadata=ADDED_LATER)
    layer_kinds: tuple[str, ...] = field(default=(), metadata=ADDED_LATER)
    conv_width: int = field(default=0, metadata=ADDED_LATER)
    conv_bias: bool = field(default=False, metadata=ADDED_LATER)
    delta_heads: tuple[int, ...] = field(default=(), metadata=ADDED_LATER)
    attention_gate: bool = field(default=False, metadata=ADDED_LATER)
    naming: str = field(default="llama", metadata=ADDED_LATER)
    local_rope_theta: float | None = field(default=None, metadata=ADDED_LATER)
    post_norms: bool = field(default=False, metadata=ADDED_LATER)

    @property
    def window(self) -> int | None:
        """How many tokens the layers look back on that do not look back on all; None without such layers."""
        return self.sliding_window if "window" in self.layer_kinds else None

    @property
    def rotary_columns(self) -> int:
        """Width of a token's rotary row: that of all layers, then that of the layers with a base of their own."""
        return self.rotary_dim * (1 if self.local_rope_theta is None else 2)

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads (or of all value heads) together."""
        return self.num_kv_heads * self.head_dim

    @property
    def delta_channels(self) -> int:
        """Width of the delta rule's queries, keys and values together, which are convolved."""
        key_heads, value_heads, key_size, value_size = self.delta_heads
        return 2 * key_heads * key_size + value_heads * value_size

    @property
    def is_recurrent(self) -> bool:
        """Whether there are layers whose state is more than KV rows."""
        return any(kind in RECURRENT_KINDS for kind in self.layer_kinds)

    def layer_kind(self, index: int) -> str:
        """What mixes the tokens of a layer, one of `LAYER_KINDS`."""
        return self.layer_kinds[index] if self.layer_kinds else LAYER_KINDS[0]


@dataclass(frozen=True)
class WeightSpec:
    """One weight as an engine takes it: a buffer that one or several checkpoint tensors fill, one behind the other.

    `shape` is the whole; `parts` are (checkpoint tensor name, shape), joined along the first axis. `dtype` is "compute"
    or "float32", which it then has on every backend.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[tuple[str, tuple[int, ...]], ...] = field(repr=False)
    dtype: str = field(default="compute", repr=False)


@dataclass(frozen=True)
class EngineShape:
    """The fixed shapes of one engine: its phase, B sequences, T tokens of each, L key rows read, C rows held.

    `selected` is how many of the T rows get logits. `model` is "base" or "draft"; `phase` "prefill", "decode" or
    "verify" of the base, "prefill", "accept" or "propose" of the draft. An engine with LoRA adapters takes
    `lora_slots` of them, each of rank `lora_rank`. Names a plan: `base.decode-b1-t1-l1024`, with adapters
    `base.decode-b1-t1-l1024.lora`.

    Where kernels compute the attention, what stands between is in engines of their own: `segment` is the number of one
    (see `segments.py`), whose number of key rows is no matter, as in `base.prefill-b1-t512-s2`.

    Of the "vision" encoder there is one phase, "encode": T rows of patches of one image. It is named
    `vision.encode-p1024`.

    `kv_cache` is the dtype of KV rows, one of `KV_CACHES`, and `window_rows` as in `EngineLimits`; plans are for
    "compute" and no windows alone.
    """

    phase: str
    batch: int
    tokens: int
    key_range: int
    kv_rows: int
    selected: int = 1
    model: str = field(default="base", metadata=ADDED_LATER)
    lora_slots: int = field(default=0, metadata=ADDED_LATER)
    lora_rank: int = field(default=0, metadata=ADDED_LATER)
    segment: int | None = field(default=None, metadata=ADDED_LATER, repr=False)
    kv_cache: str = field(default="compute", metadata=ADDED_LATER, repr=False)
    window_rows: int = field(default=0, metadata=ADDED_LATER, repr=False)

    @property
    def name(self) -> str:
        """The stem of the plan's file name."""
        if self.model == "vision":
            return f"{self.model}.{self.phase}-p{self.tokens}"
        end = f"l{self.key_range}" if self.segment is None else f"s{self.segment}"
        name = f"{self.model}.{self.phase}-b{self.batch}-t{self.tokens}-{end}"
        return f"{name}.lora" if self.lora_slots else name


@dataclass(frozen=True)
class EngineLimits:
    """What an engine directory is built for.

    `max_batch` sequences at once; prompts prefilled in chunks of at most `prefill_chunk` tokens; `kv_capacity` tokens
    of context for each sequence (prompt and answer together). With a draft model: trees at most `draft_top_k` wide and
    `draft_steps` deep, of which at most `verify_tree_size` nodes, the root included, are verified; all three are 0
    without one. With LoRA adapters: `lora_slots` of them in use at once, each of at most `max_lora_rank`; both are 0
    without. With a vision encoder: `image_rows` are the rows of its engines, ascending (see
    `VisionConfig.patches_within`). `kv_cache` is one of `KV_CACHES`; a draft's rows are always of "compute". `packed`:
    the base's weights are, and chunks of prompts are those that are cheapest then. `window_rows` is how many rows a
    layer of the base holds that looks back on a window, position p in row p % window_rows; 0 where none looks back on
    less than the context, so that all hold `kv_rows`.
    """

    max_batch: int = field(default=1, metadata=bounded(LARGEST_BATCH))
    prefill_chunk: int = field(default=2048, metadata=bounded(LARGEST_PREFILL_CHUNK))
    kv_capacity: int = field(default=4096, metadata=bounded(LARGEST_CONTEXT))
    draft_top_k: int = field(default=0, metadata=bounded(DRAFT_RANGES["draft_top_k"][1], True))
    draft_steps: int = field(default=0, metadata=bounded(DRAFT_RANGES["draft_steps"][1], True))
    verify_tree_size: int = field(default=0, metadata=bounded(DRAFT_RANGES["verify_tree_size"][1], True))
    max_lora_rank: int = field(default=0, metadata=bounded(LARGEST_LORA_RANK, True))
    lora_slots: int = field(default=0, metadata=bounded(LARGEST_LORA_SLOTS, True))
    image_rows: tuple[int, ...] = field(default=(), metadata=bounded(LARGEST_IMAGE_ROWS, True))
    kv_cache: str = field(default="compute", metadata=ADDED_LATER)
    packed: bool = field(default=False, metadata=ADDED_LATER)
    window_rows: int = field(default=0, metadata=bounded(2 * LARGEST_CONTEXT, True))

    @property
    def has_lora(self) -> bool:
        """Whether there are engines with LoRA adapters."""
        return self.lora_slots > 0

    @cached_property
    def lora_rank(self) -> int:
        """The rank that adapters are padded to: a multiple of 8, which matrix units want."""
        return _rounded_up(self.max_lora_rank, 8)

    @property
    def has_draft(self) -> bool:
        """Whether there are engines of a draft model."""
        return self.draft_steps > 0

    @cached_property
    def tree_rows(self) -> int:
        """KV rows beyond the committed ones that a round may write, base or draft, rounded up to 16; 0 without a draft.

        The base writes the verified nodes, `propose` K rows in each step but the first, `accept` the tokens of a round.
        """
        if not self.has_draft:
            return 0
        rows = max(self.verify_sizes[-1], (self.draft_steps - 1) * self.draft_top_k, self.accept_tokens)
        return _rounded_up(rows, 16)

    @cached_property
    def kv_rows(self) -> int:
        """Physical rows of a KV cache: a padded last chunk, or a tree, may reach past the context."""
        step = self.prefill_chunks[0]
        held = [sum(sizes) - step * number for number, sizes in enumerate(self._cheapest_chunks)]
        return self.kv_capacity + max(step + max(held), self.tree_rows)

    @cached_property
    def window_step(self) -> int:
        """How far behind a sequence's committed rows a step may write, that of a sequence that goes on unread or was
        stopped meanwhile included: it takes these rows from a window's oldest."""
        return max(self.prefill_chunk, 2 * max(self.tree_rows, GIVEN_NODES))

    def rows_for_window(self, window: int | None) -> int:
        """The `window_rows` of layers that look back on so many tokens: these, the largest step, and the slack by which
        a text can be cut; as many as without a window where that is no more."""
        if window is None or window >= self.kv_capacity:
            return 0
        return min(_rounded_up(window + self.window_step + WINDOW_SLACK, WINDOW_STEP), self._whole_rows)

    def window_problem(self, config: DecoderConfig) -> str | None:
        """What is wrong with `window_rows` for a model, if anything."""
        window = config.window
        if window is None or not self.rows_for_window(window):
            is_needless = f"it is {self.window_rows}, expected 0: no window is shorter than the context"
            return is_needless if self.window_rows else None
        least = min(window + self.window_step, self.kv_rows)
        if self.window_rows >= least:
            return None
        return f"it is {self.window_rows}, expected at least {least}: a window of {window} and what a step writes"

    @property
    def _whole_rows(self) -> int:
        """A window's rows that hold all that `kv_rows` do."""
        return _rounded_up(self.kv_rows, WINDOW_STEP)

    @cached_property
    def prefill_chunks(self) -> tuple[int, ...]:
        """The chunk sizes that engines exist for, ascending: multiples of the first; the last is `prefill_chunk`."""
        sizes = (16, *([_PACKED_CHUNK] if self.packed else []), 128, 512)
        return tuple(size for size in sizes if size < self.prefill_chunk) + (self.prefill_chunk,)

    def cheapest_chunks(self, count: int) -> tuple[int, ...]:
        """The sizes of the chunks that together hold `count` tokens, up to `prefill_chunk`, at the least cost;
        descending."""
        return self._cheapest_chunks[-(-count // self.prefill_chunks[0])]

    @cached_property
    def _cheapest_chunks(self) -> list[tuple[int, ...]]:
        """By the number of smallest chunks that would hold the tokens."""
        step = self.prefill_chunks[0]
        best: list[tuple[int, tuple[int, ...]]] = [(0, ())]
        for rest in range(1, self.prefill_chunk // step + 1):
            choices = []
            for size in self.prefill_chunks:
                cost, others = best[max(0, rest - size // step)]
                dequantizing = _DEQUANTIZING_COST if self.packed and size > _PACKED_CHUNK else 0
                own = max(size, _LEAST_CHUNK_COST) + _CHUNK_COST + dequantizing
                choices.append((cost + own, (size, *others)))
            best.append(min(choices))
        return [tuple(sorted(sizes, reverse=True)) for _, sizes in best]

    @cached_property
    def key_ranges(self) -> tuple[int, ...]:
        """How many KV rows attention reads, ascending; the largest covers every row a query may see."""
        return tuple(size for size in _KEY_RANGES if size < self.kv_capacity) + (self.kv_capacity,)

    @cached_property
    def tree_key_ranges(self) -> tuple[int, ...]:
        """The key ranges of `verify`, `propose` and `accept`: the largest covers a tree at the end of the context."""
        return self.key_ranges[:-1] + (self.kv_capacity + self.tree_rows,)

    @cached_property
    def batches(self) -> tuple[int, ...]:
        """The batch sizes that decode engines exist for."""
        return tuple(size for size in (1, 2, 4, 8) if size < self.max_batch) + (self.max_batch,)

    @cached_property
    def verify_sizes(self) -> tuple[int, ...]:
        """Tokens of the verify engines, ascending; the largest holds `verify_tree_size`. Empty without a draft."""
        if not self.has_draft:
            return ()
        return tuple(size for size in (8, 16, 32) if size < self.verify_tree_size) + (
            _rounded_up(self.verify_tree_size, 8),
        )

    @cached_property
    def propose_widths(self) -> tuple[int, ...]:
        """Tokens of the propose engines, ascending: a chain's and a tree's. Empty where one step is all."""
        return tuple(sorted({1, self.draft_top_k})) if self.draft_steps > 1 else ()

    @cached_property
    def accept_tokens(self) -> int:
        """The most tokens that a round emits, and so the tokens of the accept engines: a path and the bonus token."""
        return self.draft_steps + 1

    def base_shape(self, phase: str, batch: int, tokens: int, key_range: int, selected: int = 1) -> EngineShape:
        """An engine of the base without adapters; see `EngineShape`."""
        return EngineShape(
            phase,
            batch,
            tokens,
            key_range,
            self.kv_rows,
            selected,
            kv_cache=self.kv_cache,
            window_rows=self.window_rows,
        )

    def with_adapters(self, shape: EngineShape) -> EngineShape:
        """The engine of the base that does what `shape` does and applies LoRA adapters."""
        return replace(shape, lora_slots=self.lora_slots, lora_rank=self.lora_rank)

    def adapter_engine_shapes(self) -> list[EngineShape]:
        """The base's engines with LoRA adapters: one for each without. The draft model has none."""
        if not self.has_lora:
            return []
        return [self.with_adapters(shape) for shape in self.engine_shapes() if shape.model == "base"]

    def all_engine_shapes(self) -> list[EngineShape]:
        """Every engine of a directory, those with LoRA adapters included."""
        return self.engine_shapes() + self.adapter_engine_shapes()

    def engine_shapes(self) -> list[EngineShape]:
        """The engines that run without adapters: of the base decode, prefill (one sequence at a time), verify; of the
        draft accept, propose, prefill; of the vision encoder encode. Shapes that differ in the key range alone come in
        ascending order of it."""
        shapes = [
            self.base_shape("decode", batch, 1, key_range) for batch in self.batches for key_range in self.key_ranges
        ]
        shapes += self._prefill_shapes("base")
        shapes += [vision_shape(rows) for rows in self.image_rows]
        if not self.has_draft:
            return shapes
        for batch in self.batches:
            for key_range in self.tree_key_ranges:
                shapes += [self.base_shape("verify", batch, size, key_range, size) for size in self.verify_sizes]
                shapes.append(EngineShape("accept", batch, self.accept_tokens, key_range, self.kv_rows, 1, "draft"))
                shapes += [
                    EngineShape("propose", batch, width, key_range, self.kv_rows, width, "draft")
                    for width in self.propose_widths
                ]
        return shapes + self._prefill_shapes("draft")

    def _prefill_shapes(self, model: str) -> list[EngineShape]:
        if model == "base":
            own: dict[str, Any] = {"kv_cache": self.kv_cache, "window_rows": self.window_rows}
        else:
            own = {"model": model}
        return [
            EngineShape("prefill", 1, chunk, key_range, self.kv_rows, **own)
            for chunk in self.prefill_chunks
            for key_range in self.key_ranges
            if chunk <= key_range
        ]


def vision_shape(rows: int) -> EngineShape:
    """The vision engine of so many rows of patches."""
    return EngineShape("encode", 1, rows, rows, rows, model="vision")


def _rounded_up(count: int, step: int) -> int:
    return -(-count // step) * step


#: The head for multi-token prediction that ships inside a checkpoint, as `DraftConfig.generation` has it.
MTP = "mtp"
#: EAGLE-1 and EAGLE-2 have one kind of head; EAGLE-3.1 is EAGLE-3 with normed features.
GENERATIONS = ("1", "3", "3.1", MTP)
#: How the features are normed before `fc`: not at all, each by its own norm, or all of them by one.
FEATURE_NORMS = ("none", "each", "whole")
#: Names of the head's own tables, as the engines take them.
DRAFT_EMBEDDING, DRAFT_HEAD = "embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class DraftConfig:
    """Dimensions and switches of a draft head, read from its `config.json` and the names of its tensors.

    `generation` is one of `GENERATIONS`; the weights of an `MTP` head are in its base's own files, and a head with a
    mapping has those rows of the base's head that the mapping names. `decoder` describes the head's one decoder layer;
    its `hidden_size` H and `vocab_size` are the base's too. `draft_vocab_size` is the number of logits; `has_mapping`
    says whether `d2t` maps them to the base's ids (else they are the same). `feature_layers` are the layers of the base
    whose input is a feature (see `DecoderConfig.feature_layers`), in the order in which they are concatenated;
    `feature_norm` is one of `FEATURE_NORMS`. `layer_prefix` begins the names of the layer's tensors in the checkpoint
    ("midlayer.", or "layers.0."; with "model." before it where the checkpoint has that). Without `has_embedding` the
    base's table `base_embedding` embeds tokens, without `has_head` the base's `base_head` gives the logits.
    `norm_before_residual`: the residual stream is the normed feature. `feed_back_normed`: a propose step takes the
    hidden state after the final norm, not the one before it. `image_embeddings`: at an image's tokens it takes the
    base's image rows as embeddings, else the embedding of the image token. `head` is one of `HEADS`: what its own head
    is, where it has one.
    """

    generation: str
    decoder: DecoderConfig
    draft_vocab_size: int
    has_mapping: bool
    feature_layers: tuple[int, ...]
    feature_norm: str
    layer_prefix: str
    has_embedding: bool
    has_head: bool
    base_embedding: str
    base_head: str
    fc_bias: bool
    norm_before_residual: bool
    feed_back_normed: bool
    image_embeddings: bool = field(default=True, metadata=ADDED_LATER)
    head: str = field(default=HEADS[0], metadata=ADDED_LATER)

    @property
    def hidden_size(self) -> int:
        """H: width of embeddings and of the hidden state that a propose step takes."""
        return self.decoder.hidden_size

    @property
    def feature_size(self) -> int:
        """F: width of the base's features, concatenated."""
        return len(self.feature_layers) * self.hidden_size

    @property
    def head_name(self) -> str:
        """The weight that gives logits: among the head's own weights if `has_head`, else among the base's."""
        return DRAFT_HEAD if self.has_head else self.base_head

    @property
    def checkpoint_prefix(self) -> str:
        """What begins the names of all tensors but head and mapping: "model.", "mtp." or nothing."""
        return self.layer_prefix.removesuffix("midlayer.").removesuffix("layers.0.")
