"""Heads for multi-token prediction that ship inside a checkpoint: Qwen3.5's, whose tensors begin with "mtp.".

`transformers` leaves these out when it saves a model, and `config.json` still speaks of them: no tensor at all is no
head, some of them are a fault.
"""

from __future__ import annotations

from typing import Any

from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.errors import CheckpointError, UnsupportedModelError
from edgellm.engines.families.fields import counted
from edgellm.engines.formats.strict_formats import as_json
from edgellm.engines.model.config import DecoderConfig, DraftConfig
from edgellm.engines.model.decoder import as_published, head_weight_name
from edgellm.engines.model.draft_decoder import draft_weights, mtp_draft

_PREFIX = "mtp."
_DEPTH, _OWN_EMBEDDING = "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"
_LEAVE_OUT = "or leave the head out: edgellm build --no-mtp"


def has_mtp(checkpoint: Checkpoint, base: DecoderConfig) -> bool:
    """Whether a checkpoint has tensors of a head that its family knows, be they all of it or not."""
    return base.naming == "qwen3_5" and any(name.startswith(_PREFIX) for name in checkpoint.tensors)


def missing_mtp(checkpoint: Checkpoint, base: DecoderConfig) -> str:
    """Why there is no head to draft with, in a sentence that begins with the checkpoint's place."""
    if base.naming != "qwen3_5":
        return f"{checkpoint.path} has no head for multi-token prediction: models of {base.family} are made without one"
    depth = _fields(checkpoint).get(_DEPTH)
    said = f", though config.json has {_DEPTH} {as_json(depth)}: whoever saved it left them out" if depth else ""
    return f"{checkpoint.path} has no head for multi-token prediction: no tensor's name begins with {_PREFIX}{said}"


def read_mtp(checkpoint: Checkpoint, base: DecoderConfig, vocabulary: int | None = None) -> DraftConfig:
    """The head in the checkpoint of `base`, with so many rows of the base's head (None: all), checked whole.

    Raises UnsupportedModelError for a head of several layers, or with an embedding of its own, and CheckpointError
    where there is none, or half of one, or the rows of a packed head are asked for; either says what to do.
    """
    if not has_mtp(checkpoint, base):
        raise CheckpointError(f"{missing_mtp(checkpoint, base)}. Take the checkpoint as its makers published it")
    fields = _fields(checkpoint)
    for key, usual, supported in (
        (_DEPTH, 1, "supported is a head of one layer"),
        (_OWN_EMBEDDING, False, "supported are heads that take the model's embedding"),
    ):
        value = fields.get(key)
        if value is not None and (value != usual or isinstance(value, bool) != isinstance(usual, bool)):
            raise UnsupportedModelError(
                f"{checkpoint.path}: {key} is {as_json(value)}, {supported}. Take another release, {_LEAVE_OUT}"
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
    """Whether the base's head was published packed."""
    return checkpoint.layout(head_weight_name(as_published(base)), (base.vocab_size, base.hidden_size)) is not None


def _fields(checkpoint: Checkpoint) -> dict[str, Any]:
    """Those of the language model."""
    part = checkpoint.config.get("text_config")
    return part if isinstance(part, dict) else checkpoint.config
