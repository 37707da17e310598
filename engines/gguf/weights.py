"""The tensors of a GGUF file by the names, in the shapes and with the values that the model was published with.

llama.cpp's converter calls tensors otherwise, puts rows of q and k into the order of rotated pairs, adds 1 to norms of
some families, stores decays as they are applied, and lets value heads of the delta rule that share a key head stand
apart. All of that is undone where a tensor is read.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from edgellm.engines.errors import CheckpointError
from edgellm.engines.formats.gguf_file import GgufFile, open_split
from edgellm.engines.formats.safetensors_file import COPY_AGAIN, TensorInfo
from edgellm.engines.formats.tensors import STORAGE, float32_into
from edgellm.engines.gguf.architectures import Architecture, architecture
from edgellm.engines.gguf.metadata import Metadata
from edgellm.engines.quantization.gguf_blocks import PACKED_TYPES, BlockLayout
from edgellm.engines.quantization.layout import Layout

_OUTSIDE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "token_embd_norm": "model.embedding_norm",
    "output": "lm_head",
}
_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
#: Of a head for multi-token prediction, which stands behind the last layer.
_MTP_MODULES = {
    "nextn.eh_proj": "mtp.fc",
    "nextn.enorm": "mtp.pre_fc_norm_embedding",
    "nextn.hnorm": "mtp.pre_fc_norm_hidden",
    "nextn.shared_head_norm": "mtp.norm",
}
#: What the configuration says already.
_UNREAD = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_LAYER = re.compile(r"blk\.(\d{1,4})\.(.+)", re.ASCII)


@dataclass(frozen=True)
class _Change:
    """What is done to a tensor of the file, `info`: row i becomes row `rows[i]` (None: none moves), columns likewise;
    then its values are changed."""

    info: TensorInfo
    rows: np.ndarray | None = None
    columns: np.ndarray | None = None
    values: Literal["", "less 1", "logarithm"] = ""


class GgufWeights:
    """One GGUF file as part of a checkpoint; see `SafetensorsFile`. `layouts` are those of its packed tensors."""

    def __init__(self, file: GgufFile, changes: dict[str, tuple[TensorInfo, _Change]]) -> None:
        self.path: Path = file.path
        self.status = file.status
        self.tensors = {name: info for name, (info, _) in changes.items()}
        self.layouts: dict[str, Layout] = {
            name: BlockLayout(info.dtype, None if change.columns is None else tuple(change.columns.tolist()))
            for name, (info, change) in changes.items()
            if info.dtype in PACKED_TYPES
        }
        self._file, self._changes = file, {name: change for name, (_, change) in changes.items()}

    def bytes_of(self, info: TensorInfo) -> np.ndarray:
        """The bytes of one of `tensors`, uint8; of a packed one without its columns' order. Raises CheckpointError as
        `GgufFile.bytes_of`."""
        change = self._changes[info.name]
        data = self._file.bytes_of(change.info)
        if change.rows is not None:
            data = data.reshape(len(change.rows), -1)[change.rows].reshape(-1)
        if change.columns is not None and info.name not in self.layouts:
            values = data.view(STORAGE[change.info.dtype]).reshape(-1, len(change.columns))[:, change.columns]
            data = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
        if not change.values:
            return data
        values = np.empty(data.nbytes // STORAGE[change.info.dtype].itemsize, np.float32)
        float32_into(data.view(STORAGE[change.info.dtype]), change.info.dtype, values)
        with np.errstate(invalid="ignore", divide="ignore"):  # what is no number is found where it is loaded
            if change.values == "less 1":
                return (values - np.float32(1)).view(np.uint8)
            return np.log(-values.astype(np.float64)).astype(np.float32).view(np.uint8)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def open_gguf_weights(path: Path) -> list[GgufWeights]:
    """The file, or all of those that it is one of, with the tensors' published names; raises CheckpointError, and
    UnsupportedModelError for an unknown architecture."""
    files = open_split(path)
    try:
        metadata = Metadata(files)
        naming = _Naming(metadata)
        found = [
            {name: change for info in file.tensors.values() for name, change in naming.named(info)} for file in files
        ]
        names = [name for changes in found for name in changes]
        if len(set(names)) < sum(len(file.tensors.keys() - set(_UNREAD)) for file in files):
            raise CheckpointError(f"{path}: two of its tensors are one and the same of the model. {COPY_AGAIN}")
        return [GgufWeights(file, changes) for file, changes in zip(files, found, strict=True)]
    except BaseException:
        for file in files:
            file.close()
        raise


class _Naming:
    """What the tensors of a model are called, and how they are changed."""

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata
        self._architecture: Architecture = architecture(metadata)
        self._names = {**_MODULES, **self._architecture.names}
        self._layers = metadata.count("block_count") - metadata.count("nextn_predict_layers", 0)

    def named(self, info: TensorInfo) -> Sequence[tuple[str, tuple[TensorInfo, _Change]]]:
        """The published name of a tensor, how it was, and what makes it so; nothing where it is not read. One of an
        unknown name keeps it, so that it is found to be unknown."""
        if info.name in _UNREAD:
            return ()
        module, dot, kind = info.name.rpartition(".")
        match = _LAYER.fullmatch(info.name)
        if match is None:
            name = f"{_OUTSIDE.get(module, module)}{dot}{kind}"
            own = module
        else:
            name, own = self._in_layer(int(match[1]), match[2])
        change = self._change(own, kind, info)
        if change.values and info.dtype not in STORAGE:
            raise CheckpointError(
                f"{info.file}: tensor {info.name!r} has the type {info.dtype}, expected one of {', '.join(STORAGE)}. "
                "Take another release of the model"
            )
        shape = self._shape(own, kind, info.shape)
        dtype = "float32" if change.values else info.dtype
        nbytes = int(np.prod(shape)) * 4 if change.values else info.nbytes
        return ((name, (replace(info, name=name, shape=shape, dtype=dtype, nbytes=nbytes), change)),)

    def _in_layer(self, layer: int, inner: str) -> tuple[str, str]:
        """The published name of a layer's tensor, and the module's own in the file."""
        if inner == "ssm_a":
            return f"model.layers.{layer}.linear_attn.A_log", inner
        if inner == "ssm_dt.bias":
            return f"model.layers.{layer}.linear_attn.dt_bias", "ssm_dt"
        module, _, kind = inner.rpartition(".")
        if layer >= self._layers and module in _MTP_MODULES:
            return f"{_MTP_MODULES[module]}.{kind}", module
        prefix = f"mtp.layers.{layer - self._layers}" if layer >= self._layers else f"model.layers.{layer}"
        return f"{prefix}.{self._names.get(module, module)}.{kind}", module

    def _change(self, own: str, kind: str, info: TensorInfo) -> _Change:
        """What is done to a tensor of the module `own`."""
        architecture, rows = self._architecture, info.shape[0]
        if own in ("attn_q", "attn_k") and architecture.permuted:
            key = "attention.head_count" if own == "attn_q" else "attention.head_count_kv"
            heads = self._metadata.same_in_all(key) or self._metadata.same_in_all("attention.head_count") or 1
            return _Change(info, rows=_pairs_apart(self._size(info, rows, 2 * heads), heads))
        if own == "ssm_a":
            return _Change(info, rows=self._value_heads(info, 0, 1), values="logarithm")
        if own in ("ssm_alpha", "ssm_beta", "ssm_dt"):
            return _Change(info, rows=self._value_heads(info, 0, 1))
        if own in ("attn_qkv", "ssm_conv1d") and self._has_delta:
            keys = 2 * self._metadata.count("ssm.group_count") * self._metadata.count("ssm.state_size")
            return _Change(info, rows=self._value_heads(info, keys, self._value_size))
        if own == "attn_gate" and self._has_delta:
            return _Change(info, rows=self._value_heads(info, 0, self._value_size))
        if own == "ssm_out":
            return _Change(info, columns=self._value_heads(info, 0, self._value_size, axis=1))
        is_norm = own.endswith("norm") and kind == "weight"
        shifted = is_norm and architecture.shifted and not own.endswith(architecture.unshifted or ("-",))
        return _Change(info, values="less 1" if shifted else "")

    @property
    def _has_delta(self) -> bool:
        return self._metadata.whole("ssm.time_step_rank") is not None

    @property
    def _value_size(self) -> int:
        return self._metadata.count("ssm.inner_size") // max(1, self._metadata.count("ssm.time_step_rank"))

    def _value_heads(self, info: TensorInfo, before: int, size: int, axis: int = 0) -> np.ndarray | None:
        """The order in which value heads of `size` rows (or columns) each, behind the first so many, stand beside those
        that share their key head."""
        heads, keys = self._metadata.count("ssm.time_step_rank"), self._metadata.count("ssm.group_count")
        if heads == keys:
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

    @staticmethod
    def _shape(own: str, kind: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The published shape: kernels of convolutions have one input channel."""
        is_kernel = own in ("ssm_conv1d", "shortconv.conv") and kind == "weight" and len(shape) == 2
        return (shape[0], 1, shape[1]) if is_kernel else shape


def _pairs_apart(rows: int, heads: int) -> np.ndarray:
    """The order in which the first elements of the rotated pairs of each head stand before the second ones."""
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)
