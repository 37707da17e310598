"""Which kind of draft a checkpoint holds, from its `config.json` and its tensors: an EAGLE head, a DFlash draft, or one
that looks like them and is refused by name.

z-lab's DFlash gave the layout, SpecForge and vLLM's speculators write it for DSpark and Domino, too: several layers of
Qwen3, one `hidden_norm` for all of them, and `dflash_config`, where `projector_type` names what was added. P-EAGLE has
EAGLE-3's names and a learned feature `mask_hidden` for tokens that are not there yet; EAGLE-4 has a second head, of low
rank. Gemma 4's assistants are models of another width than their base's, which project its embedding and last state and
have no keys and values: they would need attention that reads rows without writing any, of windows and of int8, too, in
each of its kernels, and a tree whose levels stand at one position.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.errors import CheckpointError, UnsupportedModelError
from edgellm.engines.families.block_drafts import BlockDraftReader
from edgellm.engines.families.eagle import DraftReader
from edgellm.engines.families.fields import counted
from edgellm.engines.formats.strict_formats import as_json
from edgellm.engines.model.config import DecoderConfig, DraftConfig

_ADVICE = "Take a draft that was trained for this very base, with the config.json that was published with it."
#: Where speculators and SpecForge name the method by a word of its own.
_METHOD_KEYS = (("speculators_model_type",), ("speculators_config", "algorithm"), ("dflash_config", "projector_type"))


@dataclass(frozen=True)
class DraftKind:
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


#: The more particular ones first: DSpark, Domino and DFlash2 have all signs of DFlash.
_OTHER_DRAFTS = (
    DraftKind(
        "EAGLE-4",
        "looks back on a window and picks its candidates by a head of low rank; its licence is source-available, so "
        "that it is not implemented here",
        "eagle4",
        keys=("efficient_lm_head_config",),
        tensors=("efficient_lm_head",),
    ),
    DraftKind(
        "DFlash2",
        "drafts a block of tokens in one pass with convolutions, then walks it with a selector of candidates",
        "dflash2",
        tensors=("candidate_selector.",),
    ),
    DraftKind(
        "LiLiCorr",
        "drafts a block of tokens in one pass, then ranks its candidates by a small transformer",
        "lilicorr",
        tensors=("lilicorr_",),
    ),
    DraftKind(
        "Domino",
        "drafts a block of tokens in one pass, then corrects their logits by a recurrent network",
        "domino",
        tensors=("prefix_gru.",),
    ),
    DraftKind(
        "DSpark",
        "drafts a block of tokens in one pass, then corrects each token's logits by the one before it",
        "dspark",
        keys=("dspark_target_layer_ids", "dspark_noise_token_id", "markov_rank"),
        tensors=("markov_head.", "confidence_head."),
    ),
    DraftKind(
        "P-EAGLE",
        "drafts all tokens in one pass, from a learned feature where the base has none yet",
        "peagle",
        keys=("ptd_token_id",),
        tensors=("mask_hidden",),
    ),
    DraftKind(
        "Gemma 4 assistant",
        "only reads keys and values of its base, at one position for all it guesses, where attention here writes rows",
        "assistantforcausallm",
        keys=("backbone_hidden_size",),
        tensors=("pre_projection.", "masked_embedding."),
    ),
)
#: What is read by `BlockDraftReader`.
_DFLASH = DraftKind("DFlash", "", "dflash", keys=("dflash_config",), tensors=("hidden_norm.",))


def read_draft(draft: Checkpoint, base: Checkpoint, base_config: DecoderConfig) -> DraftConfig:
    """The draft of a checkpoint, checked whole and against its base.

    Tables that equal the base's are left out, so that the two are shared. Raises UnsupportedModelError where it is of a
    kind, or has a feature, that is not implemented, else CheckpointError; either lists all problems.
    """
    if (other := other_draft(draft.config, draft.tensors)) is not None:
        raise UnsupportedModelError(
            f"{draft.path} cannot be the draft of {base.path}: {other}. Such drafts cannot be served; DFlash and heads "
            "of EAGLE-1, EAGLE-2, EAGLE-3 and EAGLE-3.1 can, as SafeAILab, z-lab, SpecForge and speculators publish "
            "them: take one that was trained for this very base, or build without a draft"
        )
    is_block = next(_DFLASH.signs(draft.config, draft.tensors), None) is not None
    reader = (BlockDraftReader if is_block else DraftReader)(draft, base, base_config)
    config = reader.read()
    problems = [*reader.fields.unsupported, *reader.fields.wrong, *reader.problems]
    if problems or config is None:
        error = UnsupportedModelError if reader.fields.unsupported else CheckpointError
        raise error(f"{draft.path} cannot be the draft of {base.path}: {counted(problems)}\n{_ADVICE}")
    return config


def other_draft(config: dict[str, Any], tensors: Collection[str]) -> str | None:
    """What a draft is that cannot be served, in a sentence; None for all others.

    `config` is its `config.json`, `tensors` the names of its tensors.
    """
    for kind in _OTHER_DRAFTS:
        for sign in kind.signs(config, tensors):
            article = "an" if kind.name.startswith("E") else "a"
            return f"it is {article} {kind.name} draft ({sign}), which {kind.does}"
    return None
