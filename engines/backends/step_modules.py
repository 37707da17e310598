"""The modules of kernels that steps may ask for beside those of engines: of plain steps, trees, acceptance, images and
commits of recurrent states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from edgellm.engines.families.programs import ModelConfig
from edgellm.engines.model.config import DRAFT_EMBEDDING, DecoderConfig, DraftConfig
from edgellm.engines.model.decoder import embedding_name
from edgellm.engines.model.states import decoder_states, recurrent_states
from edgellm.kernels.acceptance.launcher import ADVANCE, CHAINS, TREE_LOGITS, TYPICAL, WALK
from edgellm.kernels.compiler import ModuleSource
from edgellm.kernels.images.launcher import images_source
from edgellm.kernels.quantization.device_layout import DeviceLayout
from edgellm.kernels.quantization.row_runs import PackedLayout
from edgellm.kernels.sampling.launcher import CONSTRAINING, DRAWING, EmbeddingTable, finite_source, step_source
from edgellm.kernels.tree.launcher import tree_source


def step_modules(
    models: Mapping[str, ModelConfig], dtype: str, loaded: Mapping[str, PackedLayout | None], pieces: int = 1
) -> list[ModuleSource]:
    """Those of models by `EngineShape.model`, which compute in `dtype`, whatever sampling and drafting are asked for;
    `loaded` are the weights, with their layouts where they are packed (None: dense), and the base's table of embeddings
    is in so many `pieces`."""
    found = [step_source(dtype), finite_source(dtype), DRAWING, CONSTRAINING, tree_source(dtype)]
    found += [WALK, ADVANCE, TREE_LOGITS]  # also without a draft: candidates may be given
    for table in _tables(models, loaded, pieces):
        found += [step_source(dtype, table), tree_source(dtype, table)]
    if "draft" in models:
        found += [TYPICAL, CHAINS]
    base = models.get("base")
    if "vision" in models or (isinstance(base, DecoderConfig) and base.media):
        found.append(images_source(dtype))  # the encoder may be that of another directory
    decoders = [config for config in models.values() if isinstance(config, DecoderConfig)]
    states = recurrent_states([state for config in decoders for state in decoder_states(config)])
    commits = [kernel.source for state in states for kernel in state.commit_kernels()]  # of accepted tokens
    return list(dict.fromkeys([*found, *commits]))


def _tables(
    models: Mapping[str, ModelConfig], loaded: Mapping[str, PackedLayout | None], pieces: int
) -> Iterator[EmbeddingTable]:
    """How embeddings are packed or parted, of which tokens are looked up."""
    for config in models.values():
        if isinstance(config, DecoderConfig):
            name = embedding_name(config)
        elif isinstance(config, DraftConfig):
            name = DRAFT_EMBEDDING if config.has_embedding else config.base_embedding
        else:
            continue
        layout = loaded.get(name)  # a table is of one format
        packed = layout if isinstance(layout, DeviceLayout) else None
        table = EmbeddingTable.of(packed, 1 if name == DRAFT_EMBEDDING else pieces)
        if table is not None:
            yield table
