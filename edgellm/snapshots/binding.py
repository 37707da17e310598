"""What a snapshot is bound to: rows are right only for the model, and the way of computing it, that made them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from edgellm.engines.checkpoints.weight_files import HEAD_FILE
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.directories.engine_parts import is_weight_file
from edgellm.engines.formats.digests import FileDigest, hash_bytes
from edgellm.engines.formats.strict_formats import ADDED_LATER, canonical_json, plain_values
from edgellm.engines.model.decoder import as_published, head_weight_name
from edgellm.kernels.decode.contract import ARITHMETIC

#: Stands in a binding for an adapter, a draft or images that are not there.
NONE = "none"
#: How the rows lie: keys (rotated, the first token at position 0) and values, each [n_kv, tokens, head_dim].
LAYOUT = "heads-tokens-size"
#: Rotary scalings whose frequencies depend on the context that engines are built for.
_SCALED_BY_CONTEXT = ("dynamic", "longrope")


def _said(words: str) -> dict[str, Any]:
    """The metadata of a field that errors name so."""
    return {"said": words}


@dataclass(frozen=True)
class SnapshotBinding:
    """Everything besides token ids that must be equal where a snapshot is used.

    `weights`, `config`, `adapter`, `draft` and `images` are SHA-256 digests, or "none"; `dtype` is that of computing
    and of the rows, but for the base's where `kv_cache` says int8; `backend` is what computed them, on a GPU by an
    `executor` and in an order of sums, whose number `arithmetic` is (0 on NumPy); `rotary_context` is the context in
    tokens that the rotary table was scaled for, None where it is the same for all. Plan, GPU and the chat template's
    text are no part of it.
    """

    weights: str = field(metadata=_said("the model's weights are"))
    config: str = field(metadata=_said("the model's configuration is"))
    adapter: str = field(metadata=_said("the adapter is"))
    draft: str = field(metadata=_said("the draft model is"))
    images: str = field(metadata=_said("the images are"))
    dtype: str = field(metadata=_said("the dtype is"))
    layout: str = field(metadata=_said("the layout of the rows is"))
    backend: str = field(metadata=_said("the backend is"))
    rotary_context: int | None = field(metadata=_said("the rotary table is made for a context of"))
    kv_cache: str = field(default="compute", metadata=_said("the dtype of the KV cache is") | ADDED_LATER)
    arithmetic: int = field(default=0, metadata=_said("the order of sums is number") | ADDED_LATER)
    executor: str = field(default="auto", metadata=_said("the executor is") | ADDED_LATER)

    @property
    def has_draft(self) -> bool:
        return self.draft != NONE

    def differences(self, expected: SnapshotBinding) -> dict[str, str]:
        """What was found and expected of each field that is not as `expected`, in words."""
        return {
            field.name: f"{field.metadata['said']} {_short(found)}, expected {_short(wanted)}"
            for field in fields(self)
            if (found := getattr(self, field.name)) != (wanted := getattr(expected, field.name))
        }


def snapshot_binding(
    directory: EngineDirectory, backend: str, dtype: str, with_draft: bool, adapter: str = NONE, executor: str = "auto"
) -> SnapshotBinding:
    """The binding of rows that the `backend` computes in `dtype`, by an `executor`, with the model of an engine
    directory and the adapter of a digest; there are no images among the tokens."""
    draft = directory.draft if with_draft else None
    configs = [directory.config] + ([draft.config.decoder] if draft else [])
    scalings = [each.rope_scaling or {} for each in configs]
    is_scaled = any((each.get("rope_type") or each.get("type")) in _SCALED_BY_CONTEXT for each in scalings)
    # No row depends on a packed head, unless tokens are looked up in it.
    config = directory.config if directory.config.embeds_by_head else as_published(directory.config)
    draft_digest = NONE
    if draft is not None:
        own = replace(draft.config, base_head=head_weight_name(as_published(config)))
        draft_digest = hash_bytes(canonical_json([_files_digest(draft.files), plain_values(own)]))
    return SnapshotBinding(
        weights=_files_digest(directory.files, with_head=config.embeds_by_head),
        # Features that are taken for a draft change no row, and the draft's digest has them.
        config=hash_bytes(canonical_json(plain_values(replace(config, feature_layers=())))),
        adapter=adapter,
        draft=draft_digest,
        images=NONE,
        dtype=dtype,
        layout=LAYOUT,
        backend=backend,
        rotary_context=directory.limits.kv_capacity if is_scaled else None,
        kv_cache=directory.limits.kv_cache,
        arithmetic=0 if backend == "numpy" else ARITHMETIC,
        executor=executor,
    )


def images_digest(digests: Sequence[str], encoder: str) -> str:
    """What a binding has for images with these digests, in their order; `encoder` is the encoder's; "none" for none."""
    return hash_bytes(canonical_json([encoder, *digests])) if digests else NONE


def encoder_digest(directory: EngineDirectory, vision_directory: EngineDirectory | None = None) -> str:
    """The digest of a vision encoder's weights; "none" where these are among the model's own, or there is none. The
    encoder of a `vision_directory` is used in place of the model's."""
    chosen = directory if vision_directory is None else vision_directory
    if chosen.vision is not None and chosen.vision.files is not None:
        return _files_digest(chosen.vision.files)
    return NONE if chosen.path == directory.path else _files_digest(chosen.files)


def token_key(token_ids: Sequence[int] | np.ndarray) -> bytes:
    """Token ids as bytes, 4 a token, the largest first; ids below 0, which no snapshot has, become large ones."""
    return np.asarray(token_ids, np.int64).astype(">u4").tobytes()


def binding_key(binding: SnapshotBinding, token_ids: np.ndarray) -> str:
    """A name for tokens [N] under a binding, 32 hexadecimal digits: one file for each."""
    digest = hashlib.sha256(canonical_json(plain_values(binding)))
    digest.update(token_key(token_ids))
    return digest.hexdigest()[:32]


def _files_digest(files: Mapping[str, FileDigest], with_head: bool = False) -> str:
    weights = {
        name: file.sha256 for name, file in files.items() if is_weight_file(name) and (with_head or name != HEAD_FILE)
    }
    return hash_bytes(canonical_json(weights))


def _short(value: str | int | None) -> str:
    """A digest by its first digits."""
    text = "any length" if value is None else str(value)
    return f"{text[:16]}..." if len(text) == 64 else text
