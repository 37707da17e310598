"""DFlash drafts as they are published: what is read of them, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from block_checkpoints import BLOCK, MASK_TOKEN, write_block_draft
from safetensors.numpy import load_file, save_file

from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.errors import CheckpointError, UnsupportedModelError
from edgellm.engines.families import decoder_config
from edgellm.engines.families.drafts import read_draft
from edgellm.engines.model.config import DraftBlock, DraftConfig

PART = {"mask_token_id": MASK_TOKEN, "target_layer_ids": [0, 1]}


def read(draft: Path, base: Path) -> DraftConfig:
    with Checkpoint.open(draft) as opened, Checkpoint.open(base) as base_files:
        return read_draft(opened, base_files, decoder_config(base_files.config, base_files.generation_config))


def speculators(draft: Path) -> None:
    """The same draft as speculators writes it."""
    config = json.loads((draft / "config.json").read_text())
    layer = {key: value for key, value in config.items() if key not in ("dflash_config", "block_size", "architectures")}
    own = {"speculators_model_type": "dflash", "transformer_layer_config": layer, "block_size": BLOCK}
    own |= {"mask_token_id": MASK_TOKEN, "aux_hidden_state_layer_ids": [1, 2], "draft_vocab_size": layer["vocab_size"]}
    (draft / "config.json").write_text(json.dumps(own))


def test_both_layouts_and_where_the_block_is_said(tiny_checkpoint: Path, tmp_path: Path) -> None:
    draft = write_block_draft(tmp_path / "draft", tiny_checkpoint, agreeing=False)
    config = read(draft, tiny_checkpoint)
    assert (config.generation, config.feature_layers, config.layer_prefix) == ("dflash", (1, 2), "layers.0.")
    assert (config.block, config.decoder.num_layers) == (DraftBlock(BLOCK, MASK_TOKEN, False), 2)
    assert config.decoder.qk_norm and not (config.has_embedding or config.has_head or config.has_mapping)
    newer = write_block_draft(
        tmp_path / "newer", tiny_checkpoint, False, block_size=None, dflash_config=PART | {"block_size": BLOCK}
    )
    assert read(newer, tiny_checkpoint) == config
    speculators(draft)
    assert read(draft, tiny_checkpoint) == config


@pytest.mark.parametrize(
    "changes",
    [{"dflash_config": PART | {"causal": True}}, {"dflash_config": PART | {"causal_head": True}}]
    + [{"is_causal": True}],
)
def test_a_causal_block(changes: dict[str, Any], tiny_checkpoint: Path, tmp_path: Path) -> None:
    config = read(write_block_draft(tmp_path / "draft", tiny_checkpoint, False, **changes), tiny_checkpoint)
    assert config.block is not None and config.block.causal


def test_tables_that_equal_the_bases_are_shared(tiny_checkpoint: Path, tmp_path: Path) -> None:
    draft = write_block_draft(tmp_path / "draft", tiny_checkpoint, False)
    table = load_file(tiny_checkpoint / "model.safetensors")["model.embed_tokens.weight"]
    tensors = load_file(draft / "model.safetensors") | {"embed_tokens.weight": table, "lm_head.weight": table}
    save_file(tensors, draft / "model.safetensors")
    config = read(draft, tiny_checkpoint)
    assert not config.has_embedding and not config.has_head
    save_file(tensors | {"lm_head.weight": table + np.float16(1)}, draft / "model.safetensors")
    assert read(draft, tiny_checkpoint).has_head


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"block_size": 1}, CheckpointError, "block_size is 1, expected a whole number from 2 to 33"),
        ({"block_size": None}, CheckpointError, "block_size is null"),
        ({"dflash_config": PART | {"mask_token_id": 320}}, CheckpointError, "mask_token_id is 320, .* from 0 to 319"),
        ({"dflash_config": PART | {"target_layer_ids": [0, 2]}}, CheckpointError, r"layers entered are \[1, 3\]"),
        ({"dflash_config": PART | {"target_layer_ids": None}}, CheckpointError, "target_layer_ids is null"),
        ({"dflash_config": 3}, CheckpointError, "dflash_config is 3, expected an object"),
        ({"hidden_size": 128}, CheckpointError, "hidden_size is 128, the base has 64"),
        ({"num_hidden_layers": 3}, CheckpointError, "missing: layers.2.self_attn.k_proj.weight"),
        ({"dflash_config": PART | {"causal": "yes"}}, CheckpointError, 'causal is "yes", expected true or false'),
        ({"sliding_window": 32, "use_sliding_window": True}, UnsupportedModelError, "sliding_window is there"),
        ({"sample_from_anchor": True}, UnsupportedModelError, "sample_from_anchor is true, supported is false"),
        ({"dflash_config": PART | {"shift_label": True}}, UnsupportedModelError, "shift_label is true"),
        ({"dflash_config": PART | {"selector_rank": 256}}, UnsupportedModelError, "selector_rank is 256"),
        ({"dflash_config": PART | {"projector_type": "xpress"}}, UnsupportedModelError, "projector_type is"),
    ],
)
def test_what_does_not_fit_is_refused(
    changes: dict[str, Any], error: type[Exception], message: str, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    draft = write_block_draft(tmp_path / "draft", tiny_checkpoint, False, **changes)
    with pytest.raises(error, match=message) as caught:
        read(draft, tiny_checkpoint)
    lines = str(caught.value).splitlines()
    assert len(lines) == len(set(lines))
