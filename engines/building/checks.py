"""What is checked before anything heavy is done: limits, targets, tokenizer, disk space."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgellm.engines.backends.executors import SHARED_MEMORY
from edgellm.engines.backends.plan_files import Platform, present_platform
from edgellm.engines.backends.platform import TensorRTLibrary, find_tensorrt, load_tensorrt
from edgellm.engines.building.targets import Target
from edgellm.engines.directories.description import DESCRIPTION_NAME
from edgellm.engines.errors import BuildError
from edgellm.engines.formats.staged_directory import holds, is_vacant
from edgellm.engines.model.config import HEADS, DecoderConfig
from edgellm.engines.model.limits import (
    DRAFT_RANGES,
    KV_CACHES,
    LARGEST_BATCH,
    LARGEST_CONTEXT,
    LARGEST_LORA_RANK,
    LARGEST_LORA_SLOTS,
    LARGEST_MAX_IMAGE_PATCHES,
    LARGEST_PREFILL_CHUNK,
    EngineLimits,
    EngineShape,
)
from edgellm.engines.model.rotary import context_bounds
from edgellm.engines.model.vision import VisionConfig
from edgellm.kernels.gpu import find_gpu

WEIGHT_MODES = ("copy", "link")
#: Where tokens are looked up whose table was the head: as memory allows, in the published table, in the packed head.
EMBEDDINGS = ("auto", *HEADS[:1], "head")
#: Of a GPU's memory, what a model may plan before a table is left out: the rest is for engines, and other programs.
_PLANNED_SHARE = 0.8
PREFILL_CHUNK_STEP = 16
DEFAULT_PREFILL_CHUNK = 2048
#: Of packed models with MLPs wider than `_WIDE`: chunks of 2,048 would take 0.3 GB more for Llama-3.1-8B's shapes.
WIDE_PREFILL_CHUNK, _WIDE = 512, 8192
DEFAULT_KV_CAPACITY = 4096
#: An image of a megapixel, for patches of 16 pixels.
DEFAULT_MAX_IMAGE_PATCHES = 4096
#: Rows of the vision engines up to the largest: an image takes the next, a third more at most from 768 to 16,384.
_IMAGE_ROWS = (
    *(256, 512, 768, 1024, 1280, 1536, 2048, 2560, 3072, 4096),
    *(5120, 6144, 8192, 10240, 12288, 16384, 24576, 32768, 49152),
)

#: EAGLE-2's and EAGLE-3's usual tree.
DRAFT_DEFAULTS = {"draft_top_k": 10, "draft_steps": 6, "verify_tree_size": 60}
#: Published recipes for Qwen3.5 draft chains of 3: the head was made to look one token further, and each guess behind
#: that rests on its own state. Trees of that depth are there for where they pay.
MTP_DEFAULTS = {"draft_top_k": 4, "draft_steps": 3, "verify_tree_size": 16}
#: Of a draft of blocks, all places of which cost one pass: as deep as the block, and a chain that is verified whole.
BLOCK_TOP_K, BLOCK_LEAST_TREE = 4, 16

#: Without weights a plan took up to 0.6 MB a layer (16 layers of Llama-3.2-1B's shapes, TensorRT-RTX 1.6.1), one with
#: fused attention 2 MB beside.
_PLAN_BYTES = 2 << 20
_PLAN_BYTES_PER_LAYER = 1 << 20
_JETSON_TARGETS = ("sm_72", "sm_87", "sm_101", "sm_110")


@dataclass(frozen=True)
class AskedLimits:
    """What limits are to be, None for what fits the model, and what is known of it.

    `adapter_ranks` are the ranks of the LoRA adapters that are there already. By default each of them has a place, and
    each sequence. `vision` is the model's vision encoder, `kv_cache` one of `KV_CACHES`; `is_packed`: the model has
    packed weights, as devices have that are short of memory; `is_mtp`: its draft is the head that ships with it;
    `draft_block` are the tokens of the block that its draft fills in one pass, if it does.
    """

    max_batch: int | None = None
    prefill_chunk: int | None = None
    kv_capacity: int | None = None
    beyond_trained_context: bool = False
    has_draft: bool = False
    draft_top_k: int | None = None
    draft_steps: int | None = None
    verify_tree_size: int | None = None
    adapter_ranks: Sequence[int] = ()
    max_lora_rank: int | None = None
    lora_slots: int | None = None
    vision: VisionConfig | None = None
    max_image_patches: int | None = None
    kv_cache: str = KV_CACHES[0]
    is_packed: bool = False
    is_mtp: bool = False
    draft_block: int = 0


def choose_limits(config: DecoderConfig, **given: Any) -> EngineLimits:
    """Limits as `AskedLimits` of these keywords say, with defaults that fit the model where nothing is asked for;
    BuildError for numbers out of range."""
    asked = AskedLimits(**given)
    kv_capacity, prefill_chunk = asked.kv_capacity, asked.prefill_chunk
    block, ranks = asked.draft_block, asked.adapter_ranks
    if kv_capacity is None:
        kv_capacity = min(DEFAULT_KV_CAPACITY, config.max_position_embeddings, *context_bounds(config).values())
    if prefill_chunk is None:
        wide = asked.is_packed and config.intermediate_size > _WIDE
        usual_chunk = WIDE_PREFILL_CHUNK if wide else DEFAULT_PREFILL_CHUNK
        fitting = min(usual_chunk, kv_capacity, config.max_position_embeddings)
        prefill_chunk = max(PREFILL_CHUNK_STEP, fitting - fitting % PREFILL_CHUNK_STEP)
    usual = MTP_DEFAULTS if asked.is_mtp else DRAFT_DEFAULTS
    if not asked.has_draft:
        usual = dict.fromkeys(usual, 0)
    if block:
        usual = {"draft_top_k": BLOCK_TOP_K, "draft_steps": block - 1, "verify_tree_size": max(BLOCK_LEAST_TREE, block)}
    chosen: dict[str, Any] = {name: _given(getattr(asked, name), value) for name, value in usual.items()}
    batch = _given(asked.max_batch, 1)
    rank = chosen["max_lora_rank"] = _given(asked.max_lora_rank, max(ranks, default=0))
    chosen["lora_slots"] = _given(asked.lora_slots, min(max(batch, len(ranks)), LARGEST_LORA_SLOTS) if rank else 0)
    chosen |= {"draft_block": block, "kv_cache": asked.kv_cache}
    rows = choose_image_rows(asked.vision, asked.max_image_patches)
    limits = EngineLimits(batch, prefill_chunk, kv_capacity, **chosen, image_rows=rows)
    limits = with_window_rows(config, limits)
    check_limits(config, limits, asked.beyond_trained_context, asked.has_draft, ranks)
    return limits


def _given(value: int | None, default: int) -> int:
    return default if value is None else value


def choose_image_rows(vision: VisionConfig | None, max_image_patches: int | None = None) -> tuple[int, ...]:
    """Rows of the vision engines, ascending, for images of up to so many patches; none without a vision encoder, or
    where 0 is asked for. BuildError for a number out of range, or asked for where it has no effect."""
    asked = max_image_patches
    if asked == 0:
        return ()
    if vision is None:
        if asked is not None:
            raise BuildError(f"--max-image-patches is {asked}, but the model takes no images: name --vision VISION_DIR")
        return ()
    if vision.image_side:
        if asked is not None:
            raise BuildError(
                f"--max-image-patches is {asked}, but every image has {vision.image_side**2} patches: leave it out"
            )
        return (vision.image_side**2,)
    step = math.lcm(vision.window_patches, vision.merge_patches)
    asked = DEFAULT_MAX_IMAGE_PATCHES if asked is None else asked
    expected = f"{_whole(step, LARGEST_MAX_IMAGE_PATCHES)}, or 0 for the language model alone"
    _require(step <= asked <= LARGEST_MAX_IMAGE_PATCHES, "max_image_patches", asked, expected)
    largest = vision.rows_for_patches(asked)
    rows = {-(-size // step) * step for size in _IMAGE_ROWS}
    return (*sorted(size for size in rows if size < largest), largest)


def check_image_rows(vision: VisionConfig | None, is_apart: bool, limits: EngineLimits) -> None:
    """Raise BuildError where limits have vision engines and there is no encoder, or the other way round for one that
    was published apart, or their rows do not suit it."""
    rows = limits.image_rows
    if vision is None:
        if rows:
            raise BuildError("the limits have vision engines, but there is no vision encoder: name --vision VISION_DIR")
        return
    if is_apart and not rows:
        raise BuildError("there is a vision encoder, but the limits have no vision engines: leave out one or the other")
    fits = all(size >= 1 and not size % vision.window_patches and not size % vision.merge_patches for size in rows)
    if list(rows) != sorted(set(rows)) or not fits or (vision.image_side and rows not in ((), (vision.image_side**2,))):
        raise BuildError(f"image_rows are {list(rows)}: expected for example {list(choose_image_rows(vision))}")


def with_window_rows(config: DecoderConfig, limits: EngineLimits) -> EngineLimits:
    """Limits that say how many rows the layers of a window hold, where they do not yet."""
    return limits if limits.window_rows else replace(limits, window_rows=limits.rows_for_window(config.window))


def check_limits(
    config: DecoderConfig,
    limits: EngineLimits,
    beyond_trained_context: bool = False,
    has_draft: bool = False,
    adapter_ranks: Sequence[int] = (),
) -> None:
    """Raise BuildError that names option, value and range; those of drafting are all 0 without a draft, and those of
    LoRA adapters where there are to be none."""
    chunk, step = limits.prefill_chunk, PREFILL_CHUNK_STEP
    _require(1 <= limits.max_batch <= LARGEST_BATCH, "max_batch", limits.max_batch, _whole(1, LARGEST_BATCH))
    fits = step <= chunk <= LARGEST_PREFILL_CHUNK and not chunk % step
    _require(fits, "prefill_chunk", chunk, f"a multiple of {step} from {step} to {LARGEST_PREFILL_CHUNK}")
    trained, capacity = config.max_position_embeddings, limits.kv_capacity
    for name, bound in context_bounds(config).items():
        if bound < PREFILL_CHUNK_STEP:
            raise BuildError(
                f"config.json has {name}, which is not supported. Up to {bound} tokens of context it changes nothing, "
                f"but the least context is {PREFILL_CHUNK_STEP}: choose another model"
            )
        if capacity > bound:
            raise BuildError(
                f"--kv-capacity is {capacity}, but config.json has {name}, which is not supported. Up to {bound} "
                f"tokens of context it changes nothing: build with --kv-capacity {bound} or less"
            )
    made_for = "the positions that the model was made for; edgellm build --beyond-trained-context lifts this bound"
    expected = _whole(f"{chunk} (the prefill chunk)", f"{min(trained, LARGEST_CONTEXT)} ({made_for})")
    fits = chunk <= capacity <= LARGEST_CONTEXT and (capacity <= trained or beyond_trained_context)
    _require(fits, "kv_capacity", capacity, expected)
    if (problem := limits.window_problem(config)) is not None:
        raise BuildError(f"the limits' window_rows: {problem}")
    if limits.image_rows and (problem := limits.image_problem(config)) is not None:
        raise BuildError(problem)
    if limits.kv_cache not in KV_CACHES:
        raise BuildError(f"--kv-cache is {limits.kv_cache!r}: expected one of {', '.join(KV_CACHES)}")
    for name, (smallest, largest) in DRAFT_RANGES.items():
        value = getattr(limits, name)
        _require(not has_draft or smallest <= value <= largest, name, value, _whole(smallest, largest))
        if not has_draft and value != 0:
            raise BuildError(f"--{name.replace('_', '-')} is {value}, but there is no draft: name one")
    if limits.draft_block and limits.draft_steps >= limits.draft_block:
        raise BuildError(
            f"--draft-steps is {limits.draft_steps}: expected at most {limits.draft_block - 1}, since the draft fills "
            f"blocks of {limits.draft_block}, the last token of a text included"
        )
    _check_lora_limits(limits, adapter_ranks)


def _check_lora_limits(limits: EngineLimits, adapter_ranks: Sequence[int]) -> None:
    rank, slots, needed = limits.max_lora_rank, limits.lora_slots, max(adapter_ranks, default=0)
    if rank == slots == needed == 0:
        return
    least = f"{max(1, needed)}{' (the rank of an adapter)' if needed else ''}"
    _require(max(1, needed) <= rank <= LARGEST_LORA_RANK, "max_lora_rank", rank, _whole(least, LARGEST_LORA_RANK))
    _require(1 <= slots <= LARGEST_LORA_SLOTS, "lora_slots", slots, _whole(1, LARGEST_LORA_SLOTS))


def _require(condition: bool, name: str, value: int, expected: str) -> None:
    if not condition:
        raise BuildError(f"--{name.replace('_', '-')} is {value}: expected {expected}")


def _whole(least: object, most: object) -> str:
    return f"a whole number from {least} to {most}"


def leaves_out_embedding(config: DecoderConfig, head: str, embedding: str, planned: Callable[[], int]) -> bool:
    """Whether tokens are looked up in the packed `head`, so that there is no embedding table: as `embedding` says, one
    of `EMBEDDINGS`; "auto" where a GPU is here that has too little memory for the bytes that are `planned`.

    Raises BuildError where it is asked for and the two are not one table, or the head is not packed.
    """
    can = config.tie_word_embeddings and head != HEADS[0]
    if embedding == "head" and not can:
        reason = "the head is as published" if config.tie_word_embeddings else "the embedding is not the head's table"
        raise BuildError(f"--embedding is head, but {reason}: leave it out")
    gpu = find_gpu()
    if embedding != "auto" or not can or gpu is None:
        return embedding == "head"
    return planned() > _PLANNED_SHARE * gpu.total_memory


def check_places(source: Path, target: Path, force: bool) -> None:
    """Raise BuildError where the engine directory would overwrite something that it should not."""
    if holds(target, source):
        raise BuildError(
            f"{target} is the checkpoint {source} or holds it: name another place for the engine directory"
        )
    if is_vacant(target):
        return
    if not (target / DESCRIPTION_NAME).is_file():
        raise BuildError(f"{target} exists and is not an engine directory: name another place, or remove it yourself")
    if not force:
        raise BuildError(
            f"{target} exists: --force replaces it; --refresh-plans gives it the plans that it lacks, and --target, "
            "without the checkpoint, compiled kernels"
        )


def choose_platforms(targets: Sequence[str] | None) -> tuple[tuple[Platform, ...], str]:
    """What to build plans for: `targets`, or this machine's GPU; where there is nothing, a note that says why.

    Raises MissingDependencyError where targets are asked for without TensorRT, and BuildError for a target that
    TensorRT cannot build for here.
    """
    if targets:
        library = load_tensorrt(
            "A machine with a GPU and TensorRT makes plans on first use, too. Kernels are for "
            f"{', '.join(SHARED_MEMORY)}: a --target of other GPUs takes TensorRT alone."
        )
        for target in targets:
            check_target(target, library)
        return tuple(Platform(target, library.flavour, library.version) for target in dict.fromkeys(targets)), ""
    if (present := present_platform()) is not None:
        return (present,), ""
    missing = "TensorRT" if find_tensorrt() is None else "GPU"
    return (), (
        f"No {missing} was found, so no plans are built. A GPU's kernels run models without, and the NumPy backend "
        "runs all where there is no GPU. What kernels refuse takes plans on first use, on a machine with a GPU and "
        "TensorRT; for a GPU that is elsewhere: edgellm build --refresh-plans ENGINE_DIR --target sm_86."
    )


def planned_targets(targets: Sequence[Target]) -> list[str]:
    """The compute capabilities of targets that plans are built for: those that this machine can build plans for, and
    those that nothing else serves."""
    library = find_tensorrt()
    buildable = () if library is None else library.buildable_targets
    return [each.capability for each in targets if each.capability in buildable or not each.multiprocessors]


def check_target(target: str, library: TensorRTLibrary) -> None:
    """Raise BuildError where `library` cannot build for `target` on this machine."""
    if not re.fullmatch(r"sm_\d{2,3}", target):
        raise BuildError(f"--target is {target!r}: expected a compute capability such as sm_86")
    if target in library.buildable_targets:
        return
    name = "TensorRT-RTX" if library.flavour == "rtx" else "TensorRT"
    possible = ", ".join(library.buildable_targets) or "none without a GPU"
    advice = (
        "Build on the board itself, with the TensorRT of its JetPack"
        if target in _JETSON_TARGETS
        else "Build on a machine with that GPU"
    )
    raise BuildError(
        f"--target is {target}: {name} {library.version} cannot build for it on this machine (it can for: {possible}). "
        f"{advice}: edgellm build CHECKPOINT ENGINE_DIR without --target."
    )


def plan_bytes_bound(config: DecoderConfig, shapes: Sequence[EngineShape], vision: VisionConfig | None = None) -> int:
    """A generous estimate of the size of the plans of all shapes, in bytes."""
    depths = {"base": config.num_layers, "draft": 1, "vision": vision.num_layers if vision else 0}
    layers = sum(1 if shape.segment else depths[shape.model] for shape in shapes)
    return len(shapes) * _PLAN_BYTES + layers * _PLAN_BYTES_PER_LAYER
