"""DFlash drafts against SpecForge's own module: blocks behind a text, and behind tokens that were accepted."""

from __future__ import annotations

import numpy as np
import pytest
from golden_files import golden_folder, largest_difference
from safetensors import safe_open

from edgellm.engines.backends.numpy_operations import NumpyOperations
from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.checkpoints.weights import load_numpy_weights
from edgellm.engines.families import decoder_config
from edgellm.engines.families.drafts import read_draft
from edgellm.engines.model.config import DraftBlock
from edgellm.engines.model.decoder import decoder_weights
from edgellm.engines.model.draft_decoder import draft_engine_weights, draft_program, draft_weights
from edgellm.engines.model.graph import ProgramGraph
from edgellm.engines.model.limits import EngineShape
from edgellm.engines.model.rotary import rotary_table
from edgellm.engines.model.states import decoder_states, state_edge

#: Tokens of the text before each block, as the tool that made the files has them.
STARTS, TOLERANCE, ROWS = (9, 12), 2e-5, 32


@pytest.mark.parametrize(("name", "causal"), [("dflash", False), ("jetspec", True), ("speculators", False)])
def test_blocks_equal_the_reference(name: str, causal: bool) -> None:
    folder = golden_folder("dflash") / name
    with safe_open(folder / "expected.safetensors", "np") as file:
        expected, metadata = file.get_tensor("logits"), file.metadata()
    place = golden_folder("draft") / metadata["base"]
    with Checkpoint.open(place) as base, Checkpoint.open(folder) as draft:
        base_config = decoder_config(base.config, base.generation_config)
        of_base = load_numpy_weights(base, decoder_weights(base_config))
        config = read_draft(draft, base, base_config)
        own = load_numpy_weights(draft, draft_weights(config))
    assert metadata["specforge"].startswith("0.2") and np.nanstd(expected) > 1
    assert config.block == DraftBlock(6, 77, causal)
    assert (config.has_head, config.draft_vocab_size) == ((True, 48) if name == "speculators" else (False, 80))
    with safe_open(place / "expected.safetensors", "np") as file:
        tokens, entering = file.get_tensor("token_ids"), file.get_tensor("entering")
    features = np.concatenate([entering[layer - 1] for layer in config.feature_layers], axis=1)
    edge = state_edge(decoder_states(config.decoder), 1, ROWS)
    caches = {state: np.zeros(size, np.float32) for state, (size, _) in edge.items()}
    table, size = rotary_table(config.decoder, ROWS), config.block.size

    def run(phase: str, count: int, start: int, selected: int = 1, **values: np.ndarray) -> dict[str, np.ndarray]:
        shape = EngineShape(phase, 1, count, ROWS, ROWS, selected, "draft")
        bound = caches | {name: value[None] for name, value in values.items()}
        bound["rope_rotary_cos_sin"] = table[start : start + count][None]
        bound["kvcache_start_index"] = np.asarray([start], np.int32)
        weights = draft_engine_weights(config, phase, own, of_base)
        ProgramGraph(NumpyOperations(bound, weights), draft_program(config, shape)).run()
        return bound

    taken = 0
    for start, wanted in zip(STARTS, expected, strict=True):
        phase = "accept" if taken else "prefill"
        run(phase, start - taken, taken, hidden_states_input=features[taken:start])
        ids = np.full(size, config.block.mask_token_id)
        ids[0] = tokens[start]
        seen = np.arange(ROWS) <= start + (np.arange(size)[:, None] if causal else size - 1)
        embedded = of_base[config.base_embedding][ids]
        mask = seen * np.ones((size, 1), bool)
        found = run("propose", size, start, size, inputs_embeds=embedded, attention_mask=mask[None])
        assert largest_difference(found["logits"][0, 1:], wanted) <= TOLERANCE  # the first place is known
        taken = start
    assert all(np.abs(caches[name][:, :, STARTS[0] : STARTS[1]]).min() > 0 for name in caches)
