"""What an engine directory is built for, and the engines that follow from it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any

from edgellm.engines.formats.strict_formats import ADDED_LATER, bounded, one_of
from edgellm.engines.model.config import DecoderConfig

#: What engines can be built for. A context of 16 million tokens is longer than that of any published model.
LARGEST_BATCH = 8
LARGEST_PREFILL_CHUNK = 2048
LARGEST_CONTEXT = 1 << 24
LARGEST_LORA_RANK = 1024
LARGEST_LORA_SLOTS = 32
LARGEST_MAX_IMAGE_PATCHES = 65536
#: How many GPUs can share a model.
MOST_GPUS = 64
#: Rows of a vision engine: twice the patches, for windows that are padded.
LARGEST_IMAGE_ROWS = 2 * LARGEST_MAX_IMAGE_PATCHES
#: Rows of a window of speech: far above any published encoder's.
LARGEST_AUDIO_ROWS = 1 << 16
#: A tree of one node is its root alone; the largest sizes are those of the kernels, and of the verify engines.
DRAFT_RANGES = {"draft_top_k": (1, 64), "draft_steps": (1, 32), "verify_tree_size": (2, 64)}
#: What the rows of the base's KV caches may be: of the dtype that engines compute in, or of 8 bits with a scale each.
KV_CACHES = ("compute", "int8")
#: Tokens of the largest block that a draft fills in one pass: the last token of a text, and `draft_steps` guesses.
LARGEST_DRAFT_BLOCK = DRAFT_RANGES["draft_steps"][1] + 1
#: Tokens of the largest tree of a base model without a draft: its candidates are given.
GIVEN_NODES = 32
#: Tokens of trees of given candidates, where steps are captured.
GIVEN_TREES = (4, 8, 16, GIVEN_NODES)
#: How many tokens a window can be cut back by, so that the end of an answer, or a message, can be edited: the rows of
#: so many tokens beside it take 5 MiB of a model of Gemma-3-1B's shapes.
WINDOW_SLACK = 256
#: The rows of a window are whole tiles of the attention kernels (`RING_STEP` there).
WINDOW_STEP = 64
#: What TensorRT's engines cost, whose shapes are fixed (kernels take any number of tokens at once), in tokens: a chunk
#: beside its own, for its launches; and at least, as reading the weights takes longer than computing few tokens.
_TENSORRT_CHUNK, _TENSORRT_LEAST = 64, 256
#: Of packed weights, chunks that kernels compute as they are, beside the shortest: a step of 32 tokens of 8B takes 4.4
#: ms there, one of 64 7.3. What dequantizing costs TensorRT's others, in tokens.
#: Measured with Llama-1B shapes on an H200: 64 tokens in 1.80 ms by kernels; 128 in 1.63 ms dense, in 2.32 packed; 512
#: in 2.55 and 3.29; 4.4 us for each token of long chunks. So two chunks of 64 cost more than one of 128.
_PACKED_CHUNKS, _TENSORRT_DEQUANTIZES = (32, 64), 160
_KEY_RANGES = (1024, 4096, 16384, 65536)


@dataclass(frozen=True)
class EngineShape:
    """The fixed shapes of one engine: its phase, B sequences, T tokens of each, L key rows read, C rows held.

    `selected` is how many of the T rows get logits. `model` is "base" or "draft"; `phase` "prefill", "decode" or
    "verify" of the base, "prefill", "accept" or "propose" of the draft. An engine with LoRA adapters takes
    `lora_slots` of them, each of rank `lora_rank`. Names a plan: `base.decode-b1-t1-l1024`, with adapters
    `base.decode-b1-t1-l1024.lora`.

    Where TensorRT runs some steps of a shape and kernels the others, `segment` has the first of a run and the one
    behind its last (see `segments.py`), as in `base.prefill-b1-t512-s3-9`; of a run without attention the number of key
    rows is no matter.

    Of the encoders, "vision" and "audio", there is one phase, "encode": T rows of patches of one image, or of a window
    of speech. They are named `vision.encode-p1024` and `audio.encode-p104`.

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
    segment: tuple[int, ...] = field(default=(), metadata=ADDED_LATER, repr=False)
    kv_cache: str = field(default="compute", metadata=ADDED_LATER, repr=False)
    window_rows: int = field(default=0, metadata=ADDED_LATER, repr=False)

    @property
    def name(self) -> str:
        """The stem of the plan's file name."""
        run = "s" + "-".join(map(str, self.segment)) if self.segment else ""
        keys = f"l{self.key_range}" if self.key_range > 1 or not self.segment else ""
        sizes = (f"p{self.tokens}",) if self.phase == "encode" else (f"b{self.batch}-t{self.tokens}", keys)
        name = "-".join(filter(None, (f"{self.model}.{self.phase}", *sizes, run)))
        return f"{name}.lora" if self.lora_slots else name


@dataclass(frozen=True)
class EngineLimits:
    """What an engine directory is built for.

    `max_batch` sequences at once; prompts prefilled in chunks of at most `prefill_chunk` tokens; `kv_capacity` tokens
    of context for each sequence (prompt and answer together). With a draft model: trees at most `draft_top_k` wide and
    `draft_steps` deep, of which at most `verify_tree_size` nodes, the root included, are verified; all three are 0
    without one. `draft_block` are the tokens of the block that a draft fills in one pass (0: it goes on by tokens).
    With LoRA adapters: `lora_slots` of them in use at once, each of at most `max_lora_rank`; both are 0
    without. With a vision encoder: `image_rows` are the rows of its engines, ascending (see
    `VisionConfig.patches_within`). `kv_cache` is one of `KV_CACHES`; a draft's rows are always of "compute". `packed`:
    the base's weights are, and chunks of prompts are those that are cheapest then. `window_rows` is how many rows a
    layer of the base holds that looks back on a window, position p in row p % window_rows; 0 where none looks back on
    less than the context, so that all hold `kv_rows`. With an encoder of speech: `audio_rows` are those of a window.
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
    kv_cache: str = field(default="compute", metadata=one_of(KV_CACHES, True))
    packed: bool = field(default=False, metadata=ADDED_LATER)
    window_rows: int = field(default=0, metadata=bounded(2 * LARGEST_CONTEXT, True))
    draft_block: int = field(default=0, metadata=bounded(LARGEST_DRAFT_BLOCK, True))
    audio_rows: int = field(default=0, metadata=bounded(LARGEST_AUDIO_ROWS, True))

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

        The base writes the verified nodes, `propose` K rows in each step but the first, or a block, `accept` the tokens
        of a round.
        """
        if not self.has_draft:
            return 0
        proposed = self.draft_block or (self.draft_steps - 1) * self.draft_top_k
        return _rounded_up(max(self.verify_sizes[-1], proposed, self.accept_tokens), 16)

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
        rows = min(window + self.window_step + WINDOW_SLACK, self.kv_rows)
        return _rounded_up(rows, WINDOW_STEP)

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

    def image_problem(self, config: DecoderConfig) -> str | None:
        """What is wrong with `prefill_chunk` for a model each of whose images must be in one chunk, if anything."""
        tokens, chunk = config.image_tokens, self.prefill_chunk
        if tokens > chunk:
            return (
                f"--prefill-chunk is {chunk}, expected at least {tokens}: an image has so many tokens, each of which "
                "sees all of them, so one chunk has them all"
            )
        counts = range(1 if config.images_vary else tokens, tokens + 1)
        padding = max(self.chunk_for(count) - count for count in counts)
        if tokens and padding > self.kv_rows - self.kv_capacity:
            least = _rounded_up(tokens, self.prefill_chunks[0])
            return (
                f"--prefill-chunk is {chunk}, expected {least}: an image of {tokens} tokens would be padded by "
                f"{padding} rows, which do not fit behind the context"
            )
        return None

    def chunk_for(self, count: int) -> int:
        """The smallest chunk that holds so many tokens, at most `prefill_chunk`."""
        return next(size for size in self.prefill_chunks if size >= count)

    @cached_property
    def prefill_chunks(self) -> tuple[int, ...]:
        """The chunk sizes that engines exist for, ascending: multiples of the first; the last is `prefill_chunk`."""
        sizes = (16, *(_PACKED_CHUNKS if self.packed else ()), 128, 512)
        return tuple(size for size in sizes if size < self.prefill_chunk) + (self.prefill_chunk,)

    def cheapest_chunks(self, count: int) -> tuple[int, ...]:
        """The sizes of the chunks that together hold `count` tokens, up to `prefill_chunk`, at the least cost to
        TensorRT; descending."""
        return self._cheapest_chunks[-(-count // self.prefill_chunks[0])]

    @cached_property
    def _cheapest_chunks(self) -> list[tuple[int, ...]]:
        """The cheapest chunks by the number of smallest chunks that would hold the tokens."""
        step = self.prefill_chunks[0]
        best: list[tuple[int, tuple[int, ...]]] = [(0, ())]
        for rest in range(1, self.prefill_chunk // step + 1):
            choices = []
            for size in self.prefill_chunks:
                cost, others = best[max(0, rest - size // step)]
                dequantizing = _TENSORRT_DEQUANTIZES if self.packed and size > _PACKED_CHUNKS[-1] else 0
                own = max(size, _TENSORRT_LEAST) + _TENSORRT_CHUNK + dequantizing
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
        largest = _rounded_up(self.verify_tree_size, 8)
        return (*(size for size in (2, *GIVEN_TREES) if size < largest), largest)

    @cached_property
    def propose_widths(self) -> tuple[int, ...]:
        """The widths of trees that are proposed for as they are, ascending: a chain's and the widest. Empty where one
        step is all."""
        return tuple(sorted({1, self.draft_top_k})) if self.draft_steps > 1 else ()

    def propose_shapes(self, batch: int, key_range: int) -> list[EngineShape]:
        """The propose engines, in the order of their tokens: one for each width, or for a block."""
        if self.draft_block:
            return [self.draft_shape("propose", batch, self.draft_block, key_range, self.draft_block)]
        return [self.draft_shape("propose", batch, width, key_range, width) for width in self.propose_widths]

    @cached_property
    def accept_tokens(self) -> int:
        """The most tokens that a round emits, and so the tokens of the accept engines: a path and the bonus token."""
        return self.draft_steps + 1

    def base_shape(self, phase: str, batch: int, tokens: int, key_range: int, selected: int = 1) -> EngineShape:
        """An engine of the base without adapters; see `EngineShape`."""
        own: dict[str, Any] = {"kv_cache": self.kv_cache, "window_rows": self.window_rows}
        return EngineShape(phase, batch, tokens, key_range, self.kv_rows, selected, **own)

    def draft_shape(self, phase: str, batch: int, tokens: int, key_range: int, selected: int = 1) -> EngineShape:
        """An engine of the draft; see `EngineShape`."""
        return EngineShape(phase, batch, tokens, key_range, self.kv_rows, selected, "draft")

    def with_adapters(self, shape: EngineShape) -> EngineShape:
        """The engine of the base that does what `shape` does and applies LoRA adapters."""
        return replace(shape, lora_slots=self.lora_slots, lora_rank=self.lora_rank)

    def all_engine_shapes(self) -> list[EngineShape]:
        """Every engine of a directory: behind those without adapters, one with LoRA adapters for each of the base."""
        shapes = self.engine_shapes()
        return shapes + [self.with_adapters(shape) for shape in shapes if shape.model == "base" and self.has_lora]

    def engine_shapes(self) -> list[EngineShape]:
        """The engines that run without adapters: of the base decode, prefill (one sequence at a time), verify; of the
        draft accept, propose, prefill; of encoders encode. Shapes that differ in the key range alone come in
        ascending order of it."""
        chunks = [(size, rows) for size in self.prefill_chunks for rows in self.key_ranges if size <= rows]
        shapes = [self.base_shape("decode", batch, 1, rows) for batch in self.batches for rows in self.key_ranges]
        shapes += [self.base_shape("prefill", 1, *chunk) for chunk in chunks]
        shapes += [vision_shape(rows) for rows in self.image_rows]
        shapes += [audio_shape(self.audio_rows)] if self.audio_rows else []
        if not self.has_draft:
            return shapes
        for batch, rows in product(self.batches, self.tree_key_ranges):
            shapes += [self.base_shape("verify", batch, size, rows, size) for size in self.verify_sizes]
            shapes.append(self.draft_shape("accept", batch, self.accept_tokens, rows))
            shapes += self.propose_shapes(batch, rows)
        return shapes + [self.draft_shape("prefill", 1, *chunk) for chunk in chunks]


def vision_shape(rows: int) -> EngineShape:
    """The vision engine of so many rows of patches."""
    return EngineShape("encode", 1, rows, rows, rows, model="vision")


def audio_shape(rows: int) -> EngineShape:
    """The engine of a window of speech of so many rows."""
    return EngineShape("encode", 1, rows, rows, rows, model="audio")


def _rounded_up(count: int, step: int) -> int:
    return -(-count // step) * step
