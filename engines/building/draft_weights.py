"""The weights of a draft that are packed when an engine directory is built: in which format, and what is written."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from edgellm.engines.building.inputs import PACKED_FILES, BuildInputs
from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.checkpoints.weights import counted
from edgellm.engines.directories.engine_parts import DRAFT_FOLDER
from edgellm.engines.errors import BuildError
from edgellm.engines.formats.staged_directory import check_space
from edgellm.engines.model.config import DRAFT_EMBEDDING, DRAFT_HEAD, DRAFT_WEIGHTS, HEADS, MTP, DraftConfig
from edgellm.engines.model.decoder import HEAD_GROUPS, as_published, decoder_weights, head_format, head_weight_name
from edgellm.engines.model.draft_decoder import MAPPING, draft_program, draft_weights
from edgellm.engines.model.limits import EngineShape
from edgellm.engines.quantizer.heads import packed_head
from edgellm.engines.quantizer.layers import packed_linears, router_modules
from edgellm.engines.quantizer.written_layout import (
    StoredTensor,
    StreamedTensor,
    quantization_config,
    write_json,
    write_tensors,
)
from edgellm.kernels.quantization.packed_weight import WeightFormat


def with_packed_draft(
    inputs: BuildInputs, asked: str, dtype: str, folder: Path, progress: Callable[[int, int], None]
) -> BuildInputs:
    """The same with the draft's linear layers, and the head that is its own, packed as `asked`, one of
    `DRAFT_WEIGHTS`, for engines that compute in `dtype`; they are written into the engine directory `folder`.

    What chooses among experts stays as it is, as in models. A draft that was published packed stays as it is.
    `progress` gets rows done and in all. Raises OSError, CheckpointError, and BuildError where there is nothing to
    pack, or no group of columns divides the rows.
    """
    draft = inputs.draft
    if draft is None:
        if asked in HEADS[1:]:
            raise BuildError(f"--draft-weights is {asked}, but there is no draft: name one with --draft")
        return inputs
    source, shapes = inputs.sources["draft"], _matrices(draft)
    with Checkpoint.open(source) as checkpoint:
        published = next(filter(None, (checkpoint.weight_format(*each) for each in shapes.items())), None)
        if published is not None and asked in HEADS[1:]:
            raise BuildError(
                f"--draft-weights is {asked}, but {source} is packed already ({published}): leave --draft-weights out"
            )
        base = _layers_format(inputs) if published is None else None
        columns = math.gcd(draft.hidden_size, *(columns for _, columns in shapes.values()))
        format = None if published is not None else chosen_format(asked, base, columns, dtype)
        if format is None:
            return inputs
        target, sizes = folder / DRAFT_FOLDER, (checkpoint.info(name).nbytes for name in shapes)
        check_space(folder.parent, sum(sizes), BuildError, "the packed draft")
        target.mkdir(exist_ok=True)
        write_tensors(target / PACKED_FILES[1], _tensors(checkpoint, inputs, draft, format, progress))
        # Of a head inside a model, the model's configuration is not repeated.
        said = {} if draft.generation == MTP else checkpoint.config
        settings = quantization_config(format, _routers(draft))
        write_json(target / PACKED_FILES[0], said | {"quantization_config": settings})
    weights, published_files = (
        {name: path for name, path in files.items() if not name.startswith(f"{DRAFT_FOLDER}/")}
        for files in (inputs.weights, inputs.published)
    )
    return replace(inputs, weights=weights, published=published_files, packed_draft=target)


def chosen_format(asked: str, base: WeightFormat | None, columns: int, dtype: str) -> WeightFormat | None:
    """The format of a draft's weights that is `asked`, one of `DRAFT_WEIGHTS`, beside a base whose layers are `base`
    (None: dense), where `columns` divide all rows; None: as published.

    "auto" is 8 bits, and as published beside a dense base. Groups of 4 bits are the base's where it has such, else the
    largest that divide. Raises BuildError where none does.
    """
    # Of a published model's own head 4 bits lose 3 to 5 % of the tokens of a round, more than the 2 % that may be lost,
    # 8 bits none, and were faster on a GPU (tools/bench/results/2026-11-29-h200-head-training.md.xz).
    if asked == DRAFT_WEIGHTS[0]:
        asked = HEADS[0] if base is None else "int8"
    try:
        format = head_format(asked, columns, dtype)
    except ValueError as error:
        raise BuildError(f"--draft-weights is {asked}, but {error}: take int8") from None
    if format is not None and format.group and base is not None and base.group in HEAD_GROUPS:
        return replace(format, group=base.group) if columns % base.group == 0 else format
    return format


def _layers_format(inputs: BuildInputs) -> WeightFormat | None:
    """The format of most elements of the base's layers; None: they are dense."""
    counts: Counter[WeightFormat | None] = Counter()
    with Checkpoint.open(inputs.sources["base"]) as checkpoint:
        for spec in decoder_weights(inputs.config):
            if ".layers." in spec.name:
                for name, shape in spec.parts:
                    counts[checkpoint.weight_format(name, shape)] += math.prod(shape)
    return counts.most_common(1)[0][0]


def _routers(draft: DraftConfig) -> list[str]:
    return router_modules(draft_program(draft, EngineShape("propose", 1, 1, 1, 1, model="draft")))


def _matrices(draft: DraftConfig) -> dict[str, tuple[int, int]]:
    """The shapes of a draft's weights of two dimensions by their published names, without those of its base and those
    that choose among experts."""
    parts = [part for spec in draft_weights(draft) for part in spec.parts]
    others = {f"{module}.weight" for module in _routers(draft)} | ({DRAFT_HEAD} if draft.generation == MTP else set())
    return {name: (shape[0], shape[1]) for name, shape in parts if len(shape) == 2 and name not in others}


def _tensors(
    checkpoint: Checkpoint,
    inputs: BuildInputs,
    draft: DraftConfig,
    format: WeightFormat,
    progress: Callable[[int, int], None],
) -> dict[str, StoredTensor | StreamedTensor]:
    """All that the draft's engines take: tables and norms as published, the rest packed."""
    names = [name for spec in draft_weights(draft) for name, _ in spec.parts if name != DRAFT_HEAD]
    tables = (DRAFT_HEAD, DRAFT_EMBEDDING)
    linears = {name: shape for name, shape in _matrices(draft).items() if not name.endswith(tables)}
    rows = sum(rows for rows, _ in linears.values()) + (draft.draft_vocab_size if draft.has_head else 0)
    advance = counted(rows, progress)
    tensors: dict[str, StoredTensor | StreamedTensor] = {
        name: StoredTensor(checkpoint.info(name).dtype, checkpoint.raw(name)) for name in names if name not in linears
    }
    tensors |= packed_linears(checkpoint, linears, format, advance)
    if draft.has_head:
        own = head_weight_name(as_published(inputs.config)) if draft.generation == MTP else DRAFT_HEAD
        tensors |= packed_head(checkpoint, own, format, advance, inputs.vocabulary)
    if draft.has_mapping and draft.generation != MTP:
        tensors[MAPPING] = StoredTensor("int64", checkpoint.integers(MAPPING))
    return tensors
