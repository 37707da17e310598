"""DFlash drafts (Chen et al. 2026, "DFlash: Block Diffusion for Flash Speculative Decoding") as z-lab and SpecForge
write them, with fields of their own in `dflash_config`, and as speculators does, beside `transformer_layer_config`.

JetSpec's drafts are the same but for the mask within a block, which `dflash_config.causal` (vLLM), `causal_head` (its
own word) or `is_causal` (SGLang) makes causal.
"""

from __future__ import annotations

from typing import Any

from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.families.eagle import DraftReader
from edgellm.engines.formats.strict_formats import as_json, is_integer
from edgellm.engines.model.config import DFLASH, LARGEST_DEPTH, DecoderConfig, DraftBlock, DraftConfig
from edgellm.engines.model.limits import LARGEST_DRAFT_BLOCK

_PART = "dflash_config"
_CAUSAL_KEYS = ("causal", "causal_head", "is_causal")
#: What changes the computation and is not implemented, with the values that leave it as it is.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("sample_from_anchor", "shift_label", "use_swa", "attention_sink_bias"), (False,)),
    **dict.fromkeys(("selector_rank", "conv_kernel_size", "pure_draft_prefix_len", "final_logit_softcapping"), (0,)),
    **dict.fromkeys(("attention_value_scale", "output_multiplier"), (1,)),
    "projector_type": ("dflash", ""),
}


class BlockDraftReader(DraftReader):
    """Reads one draft; see `DraftReader`."""

    most_layers = LARGEST_DEPTH

    def __init__(self, draft: Checkpoint, base: Checkpoint, base_config: DecoderConfig) -> None:
        super().__init__(draft, base, base_config)
        part = self.top.get(_PART)
        if part is not None and not isinstance(part, dict):
            self.fields.expect(_PART, part, "an object")
        self.eagle = part if isinstance(part, dict) else {}  # where switches may stand, too

    def read(self) -> DraftConfig | None:
        """The configuration; of use only where no problem was found."""
        for key, neutral in _NEUTRAL.items():
            value = self._named(key)
            if value is not None and value not in neutral:
                self.fields.refuse(key, value, f"supported is {as_json(neutral[0])}")
        decoder = self._decoder()
        self._compare_with_base(decoder)
        size = self._number("block_size", 2, LARGEST_DRAFT_BLOCK)
        mask = self._number("mask_token_id", 0, self.base_config.vocab_size - 1)
        layers = self.feature_layers()
        declared = [self._declared(key) for key in _CAUSAL_KEYS]  # each of them is to be looked at
        if self.fields.wrong or self.fields.unsupported:
            return None
        return self._config(
            DFLASH,
            decoder,
            feature_layers=layers,
            feature_norm="none",
            fc_bias=self._has("fc.bias", None, self.prefix),
            norm_before_residual=False,
            feed_back_normed=False,
            image_embeddings=False,
            block=DraftBlock(size, mask, True in declared),
        )

    def feature_layers(self) -> tuple[int, ...]:
        """The layers of the base whose inputs are taken, ascending: `target_layer_ids` names layers whose output is,
        speculators' `aux_hidden_state_layer_ids` layers entered."""
        key = "aux_hidden_state_layer_ids" if self.is_speculators else "target_layer_ids"
        ids, count = self._named(key), self.base_config.num_layers
        if not isinstance(ids, list) or not ids or not all(is_integer(value) for value in ids):
            self.fields.expect(key, ids, "a list of layers")
            return ()
        layers = tuple(value if self.is_speculators else value + 1 for value in ids)
        if list(layers) != sorted(set(layers)) or not 1 <= layers[0] <= layers[-1] < count:
            self.fields.wrong.append(
                f"{key} is {as_json(ids)}, so that the layers entered are {list(layers)}; expected distinct ones from "
                f"1 to {count - 1}, ascending"
            )
        return layers

    def _named(self, key: str) -> Any:
        """A field of the part of its own, or of the file; null is as if it were not there."""
        value = self.eagle.get(key)
        return self.top.get(key) if value is None else value

    def _number(self, key: str, least: int, most: int) -> int:
        value = self._named(key)
        if is_integer(value) and least <= value <= most:
            return value
        self.fields.expect(key, value, f"a whole number from {least} to {most}")
        return least
