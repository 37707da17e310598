"""Heads for multi-token prediction that ship inside a checkpoint, whose tensors' names begin with "mtp.": Qwen3.5's and
Nemotron-H's (3 Super, 3.5 Lightning).

`transformers` leaves these out when it saves a model, and `config.json` still speaks of them: no tensor at all is no
head, some of them are a fault.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.errors import CheckpointError, UnsupportedModelError
from edgellm.engines.families.fields import counted
from edgellm.engines.formats.strict_formats import as_json
from edgellm.engines.model.config import DecoderConfig, DraftConfig
from edgellm.engines.model.decoder import as_published, head_weight_name
from edgellm.engines.model.draft_decoder import draft_weights, mtp_draft

_PREFIX = "mtp."
#: By `DecoderConfig.naming`, the fields that describe a head, the number of its layers first: what they may be, beside
#: null, and that in words.
_FIELDS: dict[str, dict[str, tuple[list[Any], str]]] = json.loads(
    Path(__file__).with_suffix(".json").read_text("utf-8")
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
