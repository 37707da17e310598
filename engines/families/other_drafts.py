"""Drafts that are published like EAGLE heads, but are none: what they are, from their `config.json` and their tensors.

z-lab's DFlash gave the layout, SpecForge and vLLM's speculators write it for DSpark and Domino, too: several layers of
Qwen3, one `hidden_norm` for all of them, and `dflash_config`, where `projector_type` names what was added. P-EAGLE has
EAGLE-3's names and a learned feature `mask_hidden` for tokens that are not there yet.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from edgellm.engines.formats.strict_formats import as_json

#: Where speculators and SpecForge name the method by a word of its own.
_METHOD_KEYS = (("speculators_model_type",), ("speculators_config", "algorithm"), ("dflash_config", "projector_type"))


@dataclass(frozen=True)
class OtherDraft:
    """A kind of draft: its name, what it does, and the signs of it.

    `word` is the name in lower case, letters only: part of its architecture's name, and what `_METHOD_KEYS` have.
    `keys` are fields of `config.json` which only such drafts have, `tensors` what begins the names of such tensors,
    after "model." or "logit_head.".
    """

    name: str
    does: str
    word: str
    keys: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()

    def signs(self, config: dict[str, Any], tensors: Collection[str]) -> Iterator[str]:
        """What shows that a draft is of this kind, in words."""
        architectures = config.get("architectures")
        for name in architectures if isinstance(architectures, list) else []:
            if isinstance(name, str) and self.word in name.lower():
                yield f"architectures has {as_json(name)}"
        for *folder, key in _METHOD_KEYS:
            values = config.get(folder[0]) if folder else config
            value = values.get(key) if isinstance(values, dict) else None
            if isinstance(value, str) and value.lower() == self.word:
                yield f"{'.'.join((*folder, key))} is {as_json(value)}"
        yield from (f"config.json has {key}" for key in self.keys if config.get(key) is not None)
        for name in tensors:
            if name.removeprefix("model.").removeprefix("logit_head.").startswith(self.tensors):
                yield f"the weights have {name:.120}"


#: The more particular ones first: DSpark and Domino have all signs of DFlash.
_OTHER_DRAFTS = (
    OtherDraft(
        "Domino",
        "drafts a block of tokens in one pass, then corrects their logits by a recurrent network",
        "domino",
        tensors=("prefix_gru.",),
    ),
    OtherDraft(
        "DSpark",
        "drafts a block of tokens in one pass, then corrects each token's logits by the one before it",
        "dspark",
        keys=("dspark_target_layer_ids", "dspark_noise_token_id", "markov_rank"),
        tensors=("markov_head.", "confidence_head."),
    ),
    OtherDraft(
        "P-EAGLE",
        "drafts all tokens in one pass, from a learned feature where the base has none yet",
        "peagle",
        keys=("ptd_token_id",),
        tensors=("mask_hidden",),
    ),
    OtherDraft(
        "DFlash",
        "drafts a block of tokens in one pass, from masked tokens beside the base's features",
        "dflash",
        keys=("dflash_config",),
        tensors=("hidden_norm.",),
    ),
)


def other_draft(config: dict[str, Any], tensors: Collection[str]) -> str | None:
    """What a draft is that is no EAGLE head, in a sentence; None for all others.

    `config` is its `config.json`, `tensors` the names of its tensors.
    """
    for kind in _OTHER_DRAFTS:
        for sign in kind.signs(config, tensors):
            return f"it is a {kind.name} draft ({sign}), which {kind.does}"
    return None
