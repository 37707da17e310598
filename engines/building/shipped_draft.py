"""Drafts that ship with their model: whether one drafts, and which tokens it proposes.

Reading the model's whole head for each of its guesses would take longer than the rest of the draft. What is verified is
verified with the whole head, so no answer depends on the choice.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.errors import BuildError, CheckpointError
from edgellm.engines.families.drafts import has_mtp, missing_mtp
from edgellm.engines.formats.digests import FileDigest, hash_file
from edgellm.engines.formats.small_files import read_text, read_tokenizer
from edgellm.engines.formats.strict_formats import is_integer
from edgellm.engines.model.config import MTP, DecoderConfig
from edgellm.engines.model.draft_decoder import MAPPING
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.quantizer.written_layout import StoredTensor, write_tensors
from edgellm.kernels.errors import shown

#: How many ids a draft has where nothing else is asked for.
DRAFT_VOCABULARY = 32768
#: The most bytes of a file of ids: two million of them.
_FILE_BYTES = 16 << 20
_EXPECTED = "expected a JSON list of token ids, or one id a line"


def choose_draft(
    source: Path, config: DecoderConfig, draft: str | Path | None = None, limits: EngineLimits | None = None
) -> str | Path | None:
    """What drafts for a checkpoint of dimensions `config`: the `draft` that is asked for, its place or `MTP`, else the
    head that ships with the model, where there is one and `limits` (None: not chosen yet) have room for a draft.

    Raises CheckpointError where such a head is asked for and is not there, BuildError for one of an embedding model.
    """
    if config.is_embedding and draft is not None:
        raise BuildError(f"{source} is an embedding model, which gives no answers to draft: leave the draft out")
    if draft is not None and draft != MTP:
        return Path(draft)
    if draft is None and limits is not None and not limits.has_draft:
        return None
    with Checkpoint.open(source) as checkpoint:
        if has_mtp(checkpoint, config):
            return MTP
        if draft is None:
            return None
        raise CheckpointError(f"{missing_mtp(checkpoint, config)}. Leave the draft out, or name an EAGLE head")


def lost_mtp(source: Path, config: DecoderConfig) -> str | None:
    """Why a checkpoint of a family that ships with a head for multi-token prediction has none; None where it has, or
    was made without."""
    with Checkpoint.open(source) as checkpoint:
        reason = missing_mtp(checkpoint, config)
        return reason if not has_mtp(checkpoint, config) and "config.json" in reason else None


def frequent_ids(tokenizer: Path, vocab_size: int, ends: Iterable[int]) -> np.ndarray | None:
    """Ids int64 [32,768], ascending, of tokens that are said most; None where the vocabulary is no larger.

    They are the tokens `ends` that end an answer and those added for a format (`<tool_call>`), then the lowest ids:
    byte pairs are merged in the order of how often they stood in the text that a tokenizer was trained on, and
    are numbered in it. Raises CheckpointError for a `tokenizer.json` that cannot be read.
    """
    if vocab_size <= DRAFT_VOCABULARY:
        return None
    added = read_tokenizer(tokenizer, CheckpointError).get_added_tokens_decoder()
    special = [token for token in dict.fromkeys((*ends, *sorted(added))) if token < vocab_size][:DRAFT_VOCABULARY]
    is_chosen = np.zeros(vocab_size, bool)
    is_chosen[special] = True
    others = np.flatnonzero(~is_chosen)[: DRAFT_VOCABULARY - len(special)]
    is_chosen[others] = True
    return np.flatnonzero(is_chosen)


def read_vocabulary(path: Path, vocab_size: int) -> np.ndarray:
    """The ids in a file, int64 [n], ascending; BuildError names what is wrong with it."""
    text = read_text(path, _FILE_BYTES, BuildError, "the draft's vocabulary", takes_pipes=True)
    try:
        ids = json.loads(text) if text.lstrip().startswith("[") else [int(line) for line in text.split()]
    except ValueError as error:
        raise BuildError(f"the draft's vocabulary {path} cannot be read ({error}): {_EXPECTED}") from None
    if not isinstance(ids, list) or not ids:
        raise BuildError(f"the draft's vocabulary {path} has no ids: {_EXPECTED}")
    if wrong := [each for each in ids if not is_integer(each) or not 0 <= each < vocab_size]:
        raise BuildError(
            f"the draft's vocabulary {path} has {shown(wrong[0])}: expected ids of the model, 0 to {vocab_size - 1}"
        )
    found, counts = np.unique(np.asarray(ids, np.int64), return_counts=True)
    if len(found) < len(ids):
        raise BuildError(f"the draft's vocabulary {path} has the id {found[counts > 1][0]} twice: expected each once")
    return found


def write_vocabulary(path: Path, ids: np.ndarray) -> FileDigest:
    """Write the file that says which ids a draft has, as EAGLE-3 heads have it: the model's id less the draft's, int32.
    Raises OSError."""
    offsets = ids - np.arange(len(ids))
    path.parent.mkdir(exist_ok=True)
    write_tensors(path, {MAPPING: StoredTensor("int32", offsets.astype(np.int32))})
    return hash_file(path)
