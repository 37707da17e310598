"""Which kind of draft a checkpoint holds, from its `config.json` and its tensors: an EAGLE head, a DFlash draft, or one
that looks like them and is refused by name.

z-lab's DFlash gave the layout, SpecForge and vLLM's speculators write it for DSpark and Domino, too: several layers of
Qwen3, one `hidden_norm` for all of them, and `dflash_config`, where `projector_type` names what was added. P-EAGLE has
EAGLE-3's names and a learned feature `mask_hidden` for tokens that are not there yet; EAGLE-4 has a second head, of low
rank. Gemma 4's assistants are models of another width than their base's, which project its embedding and last state and
have no keys and values: they would need attention that reads rows without writing any, of windows and of int8, too, in
each of its kernels, and a tree whose levels stand at one position.

Heads for multi-token prediction (Qwen3.5's and Nemotron-H's, 3 Super and 3.5 Lightning) ship inside a checkpoint, where
their tensors' names begin with "mtp.". `transformers` leaves these out when it saves a model, and `config.json` still
speaks of them: no tensor at all is no head, some of them are a fault."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.errors import CheckpointError, UnsupportedModelError
from edgellm.engines.families.eagle import DraftReader
from edgellm.engines.families.fields import counted
from edgellm.engines.formats.strict_formats import as_json, is_integer
from edgellm.engines.model.config import DFLASH, LARGEST_DEPTH, DecoderConfig, DraftBlock, DraftConfig
from edgellm.engines.model.decoder import as_published, head_weight_name
from edgellm.engines.model.draft_decoder import draft_weights, mtp_draft
from edgellm.engines.model.limits import LARGEST_DRAFT_BLOCK

_ADVICE = "Take a draft that was trained for this very base, with the config.json that was published with it."
#: Where speculators and SpecForge name the method by a word of its own.
_METHOD_KEYS = (("speculators_model_type",), ("speculators_config", "algorithm"), ("dflash_config", "projector_type"))
_PART = "dflash_config"
_CAUSAL_KEYS = ("causal", "causal_head", "is_causal")
#: What changes the computation and is not implemented, with the values that leave it as it is.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("sample_from_anchor", "shift_label", "use_swa", "attention_sink_bias"), (False,)),
    **dict.fromkeys(("selector_rank", "conv_kernel_size", "pure_draft_prefix_len", "final_logit_softcapping"), (0,)),
    **dict.fromkeys(("attention_value_scale", "output_multiplier"), (1,)),
    "projector_type": ("dflash", ""),
}


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
    keys: Sequence[str] = ()
    tensors: Sequence[str] = ()

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
            if name.removeprefix("model.").removeprefix("logit_head.").startswith(tuple(self.tensors)):
                yield f"the weights have {name:.120}"


#: The more particular ones first: DSpark, Domino and DFlash2 have all signs of DFlash.
_OTHER_DRAFTS = [DraftKind(**each) for each in json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))]
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
    """What a draft is that cannot be served, in a sentence; None for all others. `config` is its `config.json`,
    `tensors` the names of its tensors."""
    for kind in _OTHER_DRAFTS:
        for sign in kind.signs(config, tensors):
            article = "an" if kind.name.startswith("E") else "a"
            return f"it is {article} {kind.name} draft ({sign}), which {kind.does}"
    return None


class BlockDraftReader(DraftReader):
    """Reads a DFlash draft (Chen et al. 2026, "DFlash: Block Diffusion for Flash Speculative Decoding") as z-lab and
    SpecForge write it, with fields of its own in `dflash_config`, and as speculators does, beside
    `transformer_layer_config`; see `DraftReader`.

    JetSpec's drafts are the same but for the mask within a block, which `dflash_config.causal` (vLLM), `causal_head`
    (its own word) or `is_causal` (SGLang) makes causal.
    """

    most_layers = LARGEST_DEPTH

    def __init__(self, draft: Checkpoint, base: Checkpoint, base_config: DecoderConfig) -> None:
        super().__init__(draft, base, base_config)
        part = self.top.get(_PART)
        if part is not None and not isinstance(part, dict):
            self.fields.expect(_PART, part, "an object")
        self.eagle = part if isinstance(part, dict) else {}  # where switches may stand, too

    def read(self) -> DraftConfig | None:
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
        ids = self._named(key)
        if not isinstance(ids, list) or not ids or not all(is_integer(value) for value in ids):
            self.fields.expect(key, ids, "a list of layers")
            return ()
        layers = tuple(value if self.is_speculators else value + 1 for value in ids)
        self.check_entered(layers, f"{key} is {as_json(ids)}, so that")
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


_PREFIX = "mtp."
#: By `DecoderConfig.naming`, the fields that describe a head, the number of its layers first: what they may be, beside
#: null, and that in words.
_FIELDS: dict[str, dict[str, tuple[list[Any], str]]] = json.loads(
    Path(__file__).with_name("mtp.json").read_text("utf-8")
)
_LEAVE_OUT = "or leave the head out: edgellm build --no-mtp"


def has_mtp(checkpoint: Checkpoint, base: DecoderConfig) -> bool:
    """Whether a checkpoint has tensors of a head that its family knows, be they all of it or not."""
    return base.naming in _FIELDS and any(name.startswith(_PREFIX) for name in checkpoint.tensors)


def missing_mtp(checkpoint: Checkpoint, base: DecoderConfig) -> str:
    """Why there is no head to draft with, in a sentence that begins with the checkpoint's place."""
    if base.naming not in _FIELDS:
        return f"{checkpoint.path} has no head for multi-token prediction: models of {base.family} are made without one"
    key = next(iter(_FIELDS[base.naming]))
    depth = _fields(checkpoint).get(key)
    said = f", though config.json has {key} {as_json(depth)}: whoever saved it left them out" if depth else ""
    return f"{checkpoint.path} has no head for multi-token prediction: no tensor's name begins with {_PREFIX}{said}"


def read_mtp(checkpoint: Checkpoint, base: DecoderConfig, vocabulary: int | None = None) -> DraftConfig:
    """The head in the checkpoint of `base`, with so many rows of the base's head (None: all), checked whole.

    Raises UnsupportedModelError for a head of several layers, or with an embedding of its own, and CheckpointError
    where there is none, or half of one, or the rows of a packed head are asked for; either says what to do.
    """
    if not has_mtp(checkpoint, base):
        raise CheckpointError(f"{missing_mtp(checkpoint, base)}. Take the checkpoint as its makers published it")
    fields = _fields(checkpoint)
    for key, (supported, words) in _FIELDS[base.naming].items():
        value = fields.get(key)
        if value is not None and not any(value == each and type(value) is type(each) for each in supported):
            raise UnsupportedModelError(
                f"{checkpoint.path}: {key} is {as_json(value)}, {words}. Take another release, {_LEAVE_OUT}"
            )
    specs = [spec for spec in draft_weights(mtp_draft(base)) if spec.parts]
    if problems := checkpoint.problems(specs, within=_PREFIX):
        raise CheckpointError(
            f"{checkpoint.path}: its head for multi-token prediction is not whole, {counted(problems)}\n"
            f"Copy the checkpoint anew from its source, {_LEAVE_OUT}"
        )
    if vocabulary is not None and has_packed_head(checkpoint, base):
        raise CheckpointError(
            f"{checkpoint.path}: {head_weight_name(as_published(base))} is packed as published, and a draft takes "
            "single rows of a dense head alone. Leave --draft-vocabulary out: it reads the whole head then"
        )
    return mtp_draft(base, vocabulary)


def has_packed_head(checkpoint: Checkpoint, base: DecoderConfig) -> bool:
    return checkpoint.layout(head_weight_name(as_published(base)), (base.vocab_size, base.hidden_size)) is not None


def _fields(checkpoint: Checkpoint) -> dict[str, Any]:
    part = checkpoint.config.get("text_config")
    return part if isinstance(part, dict) else checkpoint.config
