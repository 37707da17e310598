"""The tensors of a GGUF file by the names, in the shapes and with the values that the model was published with.

llama.cpp's converter calls tensors otherwise, puts rows of q and k into the order of rotated pairs, adds 1 to norms of
some families, stores decays as they are applied, and lets value heads of the delta rule that share a key head stand
apart. All of that is undone where a tensor is read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from edgellm.engines.errors import CheckpointError
from edgellm.engines.formats.gguf_file import GgufFile, open_split
from edgellm.engines.formats.safetensors_file import COPY_AGAIN, TensorInfo
from edgellm.engines.formats.tensors import STORAGE
from edgellm.engines.gguf.architectures import ENCODERS, TENSOR_NAMES, Architecture, architecture
from edgellm.engines.gguf.changes import Change
from edgellm.engines.gguf.encoders import encoder_tensors
from edgellm.engines.gguf.metadata import Metadata
from edgellm.engines.model.config import LARGEST_EXPERTS
from edgellm.engines.model.named_weights import PUBLISHED
from edgellm.engines.quantization.gguf_blocks import BlockLayout
from edgellm.engines.quantization.layout import Layout

#: Published names by those in files: of modules beside the layers, and in one; of stacks of experts [E, rows, columns],
#: where * stands for an expert's number; of tensors of a layer that are no module's, or are published without an
#: ending; of modules of a head for multi-token prediction, which stands behind the last layer.
_OUTSIDE, _MODULES, _STACKS, _WHOLE, _MTP_MODULES = (
    TENSOR_NAMES[kind] for kind in ("outside", "modules", "stacks", "whole", "mtp")
)
#: Gates and ups that `Architecture.joined` speaks of.
_JOINED = ("ffn_gate", "ffn_up", "ffn_gate_shexp", "ffn_up_shexp")
#: What the configuration says already.
_UNREAD = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
#: Of a draft's ids to those of its model, as whole ids; published are differences.
_MAPPING = "d2t"
_LAYER = re.compile(r"blk\.(\d{1,4})\.(.+)", re.ASCII)


class GgufWeights:
    """One GGUF file as part of a checkpoint; see `SafetensorsFile`. `layouts` are those of its packed tensors."""

    def __init__(self, file: GgufFile, files: Sequence[GgufFile], changes: Mapping[str, Change]) -> None:
        """`files` are all of the model, of which `changes` may read."""
        self.path: Path = file.path
        self.status = file.status
        self.tensors = {name: change.result(name) for name, change in changes.items()}
        self.layouts: dict[str, Layout] = {
            name: BlockLayout(change.dtype, None if change.columns is None else tuple(change.columns.tolist()))
            for name, change in changes.items()
            if change.is_packed
        }
        self._file, self._changes = file, changes
        self._files = {each.path: each for each in files}

    def bytes_of(self, info: TensorInfo, rows: np.ndarray | None = None) -> np.ndarray:
        """The bytes of one of `tensors`, uint8; of a packed one without its columns' order. Of one that is in the file
        as it was published `rows`, int [n], alone: [n, bytes of a row]. Raises CheckpointError as `GgufFile.bytes_of`.
        """
        if rows is None:
            return self._changes[info.name].read(self._files)
        (own,) = self._changes[info.name].infos
        size = own.nbytes // own.shape[0]
        return self._files[own.file].pieces_of(own, [row * size for row in rows.tolist()], size)

    def keep(self) -> bool:
        """See `GgufFile`; True."""
        return all(file.keep() for file in self._files.values())

    def close(self) -> None:
        self._file.close()


def open_gguf_weights(path: Path) -> list[GgufWeights]:
    """The file, or all of those that it is one of, with the tensors' published names; raises CheckpointError, and
    UnsupportedModelError for an unknown architecture."""
    files = open_split(path)
    try:
        metadata = Metadata(files)
        if metadata.architecture == ENCODERS:
            return [GgufWeights(file, files, encoder_tensors(metadata)) for file in files]
        naming = _Naming(metadata)
        found = [[pair for info in file.tensors.values() for pair in naming.named(info)] for file in files]
        names = [name for pairs in found for name, _ in pairs]
        if len(set(names)) < len(names):
            raise CheckpointError(f"{path}: two of its tensors are one and the same of the model. {COPY_AGAIN}")
        return [GgufWeights(file, files, dict(pairs)) for file, pairs in zip(files, found, strict=True)]
    except BaseException:
        for file in files:
            file.close()
        raise


class _Naming:
    """What the tensors of a model are called, and how they are changed."""

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata
        self._architecture: Architecture = architecture(metadata)
        published, own = PUBLISHED[self._architecture.naming], self._architecture.names
        self._names = {name: published.get(each, each) for name, each in (_MODULES | _STACKS).items()} | dict(own)
        self._outside = {**_OUTSIDE, **own}
        self._whole = {**_WHOLE, **self._architecture.whole}
        self._layers = metadata.count("block_count") - metadata.count("nextn_predict_layers", 0)

    def named(self, info: TensorInfo) -> Sequence[tuple[str, Change]]:
        """The published name of a tensor, and what makes it so; nothing where it is not read. One of an unknown name
        keeps it, so that it is found to be unknown."""
        if info.name in _UNREAD:
            return ()
        module, dot, kind = info.name.rpartition(".")
        match = _LAYER.fullmatch(info.name)
        if match is None:
            name = f"{self._outside.get(module, module)}{dot}{kind}"
            own = module
        else:
            name, own = self._in_layer(int(match[1]), match[2])
            if own in _STACKS and match[2] not in self._whole:
                return self._of_experts(name, own, kind, info)
        change = self._change(own, kind, info)
        if change.values or len(info.shape) < 2:
            self._check_type(info, ("int64",) if change.values == "offsets" else tuple(STORAGE))
        if own == "attn_qkv" and own not in self._names:
            return self._parts_of_qkv(name, info)
        if self._architecture.joined and own in _JOINED:
            return self._joined(name, own, info)
        is_kernel = own in ("ssm_conv1d", "shortconv.conv") and kind == "weight" and len(info.shape) == 2
        # Kernels of convolutions have one input channel; a matrix of one row may have lost that.
        shape: tuple[int, ...] | None = (info.shape[0], 1, info.shape[1]) if is_kernel else None
        if own == "ffn_gate_inp_shexp" and len(info.shape) == 1:
            shape = (1, *info.shape)
        if own in ("ssm_a", "ssm_d", "ssm_norm"):  # of Mamba-2 in groups, or with a dimension of one
            shape = (math.prod(info.shape),)
        return ((name, replace(change, shape=shape)),)

    def _joined(self, name: str, own: str, info: TensorInfo) -> Sequence[tuple[str, Change]]:
        """Gate and up of an MLP that were published as one: they come with the gate."""
        if "up" in own:
            return ()
        up = self._metadata.tensors.get(info.name.replace("gate", "up"))
        if up is None or up.shape != info.shape:
            return ((info.name, Change((info,))),)
        return ((name, Change((info, up))),)

    @staticmethod
    def _check_type(info: TensorInfo, allowed: tuple[str, ...]) -> None:
        if info.dtype not in allowed:
            raise CheckpointError(
                f"{info.file}: tensor {info.name!r} has the type {info.dtype}, expected one of {', '.join(allowed)}. "
                "Take another release of the model"
            )

    def _of_experts(self, name: str, own: str, kind: str, info: TensorInfo) -> Sequence[tuple[str, Change]]:
        """The matrices of a stack's experts, each a slice of it; where gate and up were published as one in turn, they
        come with gate, biases too. A stack that does not fit keeps its name, so that it is found to be unknown."""
        unknown = ((info.name, Change((info,))),)
        dimensions = {"weight": 3, "bias": 2}.get(kind)
        if len(info.shape) != dimensions or info.shape[0] > LARGEST_EXPERTS:
            return unknown
        count, rows = info.shape[:2]
        stacks: tuple[TensorInfo, ...] = (info,)
        parts: tuple[str, ...] = ("",)
        order: np.ndarray | None = None
        if self._architecture.alternating and own in ("ffn_gate_exps", "ffn_up_exps"):
            pair = [self._metadata.tensors.get(info.name.replace(own, f"ffn_{each}_exps")) for each in ("gate", "up")]
            stacks = tuple(each for each in pair if each is not None and each.shape == info.shape)
            if len(stacks) < 2:
                return unknown
            if own == "ffn_up_exps":
                return ()
            order = np.arange(2 * rows).reshape(2, rows).T.reshape(-1)
            name = name.replace(".gate_proj.", ".gate_up_proj.")
        elif own == "ffn_gate_up_exps" and rows % 2 == 0:
            parts, rows = (".gate_proj.", ".up_proj."), rows // 2
        if kind == "bias":
            if order is None:
                return unknown
            for each in stacks:
                self._check_type(each, tuple(STORAGE))
            flat = tuple(replace(each, shape=(count * rows,)) for each in stacks)
            order = np.arange(2 * count * rows).reshape(2, count * rows).T.reshape(-1)
            name = f"{name.replace('.*.', '.').removesuffix('.bias')}_bias"
            return ((name, Change(flat, rows=order, shape=(count, 2 * rows))),)
        found, shape = [], (rows, info.shape[2])
        for place in range(count * len(parts)):
            expert, part = divmod(place, len(parts))
            words = f"{expert}, {part * rows}:{(part + 1) * rows}"
            own_infos = tuple(each.part(place, shape, words) for each in stacks)
            named = name.replace(".*.", f".{expert}.").replace(".gate_up_proj.", parts[part] or ".gate_up_proj.")
            found.append((named, Change(own_infos, rows=order, mapped=True)))
        return found

    def _in_layer(self, layer: int, inner: str) -> tuple[str, str]:
        """The published name of a layer's tensor, and the module's own in the file."""
        module, _, kind = inner.rpartition(".")
        if layer >= self._layers and module in _MTP_MODULES:
            return f"{_MTP_MODULES[module]}.{kind}", module
        prefix = f"mtp.layers.{layer - self._layers}" if layer >= self._layers else f"model.layers.{layer}"
        if inner in self._whole:
            return f"{prefix}.{self._whole[inner]}", module or inner
        return f"{prefix}.{self._names.get(module, module)}.{kind}", module

    def _parts_of_qkv(self, name: str, info: TensorInfo) -> Sequence[tuple[str, Change]]:
        """q, k and v, which the converter puts into one where it is asked to (`--fuse-qkv`)."""
        heads = self._metadata.same_in_all("attention.head_count") or 1
        kv_heads = self._metadata.key_value_heads() or 0
        pairs = self._size(info, info.shape[0], 2 * (heads + 2 * kv_heads)) // (2 * (heads + 2 * kv_heads))
        found, first = [], 0
        for part, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            rows = np.arange(2 * pairs * count)
            if self._architecture.permuted and part != "v":
                rows = _pairs_apart(len(rows), count)
            found.append((name.replace(".attn_qkv.", f".self_attn.{part}_proj."), Change((info,), rows=first + rows)))
            first += len(rows)
        return found

    def _change(self, own: str, kind: str, info: TensorInfo) -> Change:
        architecture, rows = self._architecture, info.shape[0]
        if own in ("attn_q", "attn_k") and architecture.permuted:
            key = "attention.head_count" if own == "attn_q" else "attention.head_count_kv"
            heads = self._metadata.same_in_all(key) or self._metadata.same_in_all("attention.head_count") or 1
            return Change((info,), rows=_pairs_apart(self._size(info, rows, 2 * heads), heads))
        if own == "per_layer_token_embd":
            return Change((info,))
        if info.name == _MAPPING:
            return Change((info,), values="offsets")
        if own == "ssm_a":
            return Change((info,), rows=self._value_heads(info, 0, 1), values="logarithm")
        if own in ("ssm_alpha", "ssm_beta", "ssm_dt"):
            return Change((info,), rows=self._value_heads(info, 0, 1))
        if own in ("attn_qkv", "ssm_conv1d") and self._has_delta:
            keys = 2 * self._metadata.count("ssm.group_count") * self._metadata.count("ssm.state_size")
            return Change((info,), rows=self._value_heads(info, keys, self._value_size))
        if own == "attn_gate" and self._has_delta:
            return Change((info,), rows=self._value_heads(info, 0, self._value_size))
        if own == "ssm_out":
            return Change((info,), columns=self._value_heads(info, 0, self._value_size, axis=1))
        is_norm = own.endswith("norm") and kind == "weight"
        shifted = is_norm and architecture.shifted and not own.endswith(tuple(architecture.unshifted))
        return Change((info,), values="less 1" if shifted else "")

    @property
    def _has_delta(self) -> bool:
        return self._architecture.tiled and self._metadata.whole("ssm.time_step_rank") is not None

    @property
    def _value_size(self) -> int:
        return self._metadata.count("ssm.inner_size") // max(1, self._metadata.count("ssm.time_step_rank"))

    def _value_heads(self, info: TensorInfo, before: int, size: int, axis: int = 0) -> np.ndarray | None:
        """The order in which value heads of `size` rows (or columns) each, behind the first so many, stand beside those
        that share their key head."""
        heads, keys = self._metadata.count("ssm.time_step_rank"), self._metadata.count("ssm.group_count")
        if heads == keys or not self._architecture.tiled:
            return None
        if keys < 1 or heads % keys:
            raise self._metadata.error("ssm.time_step_rank", heads, f"a multiple of 'ssm.group_count', {keys}")
        found = info.shape[axis] if axis < len(info.shape) else 0
        if found != before + heads * size:
            raise CheckpointError(
                f"{info.file}: tensor {info.name!r} has the shape {list(info.shape)}, expected "
                f"{before + heads * size} in dimension {axis} for its {heads} value heads. Take another release of the "
                "model"
            )
        order = np.arange(heads * size).reshape(heads // keys, keys, size).swapaxes(0, 1).reshape(-1)
        return np.concatenate((np.arange(before), before + order))

    @staticmethod
    def _size(info: TensorInfo, size: int, divisor: int) -> int:
        if size % divisor:
            raise CheckpointError(
                f"{info.file}: tensor {info.name!r} has {size} rows, expected a multiple of {divisor}. Take another "
                "release of the model"
            )
        return size


def _pairs_apart(rows: int, heads: int) -> np.ndarray:
    """The order in which the first elements of the rotated pairs of each head stand before the second ones."""
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)
