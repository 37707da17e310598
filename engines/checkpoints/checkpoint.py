"""Hugging Face checkpoints: `config.json` and the weights, memory-mapped from one safetensors file or several."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from edgellm.engines.checkpoints.safetensors_file import SafetensorsFile, TensorInfo
from edgellm.engines.checkpoints.tensors import (
    STORAGE,
    VISION_PREFIXES,
    convert,
    is_multimodal,
    language_model_name,
    value_and_place,
)
from edgellm.engines.directories.small_files import size_limit
from edgellm.engines.directories.strict_formats import JSONObject
from edgellm.engines.errors import CheckpointError
from edgellm.engines.model.config import WeightSpec
from edgellm.kernels.user_paths import printable

__all__ = ["Checkpoint", "TensorInfo", "not_finite_error", "overflow_error", "storage_of"]

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
#: Buffers that old releases of transformers stored beside the weights; they follow from the configuration.
_HARMLESS_ENDINGS = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
#: Those whose every value an int64 holds.
_INTEGERS = ("int64", "int32", "int16", "int8", "uint32", "uint16", "uint8", "bool")
_QUANTIZATION_KEYS = ("quantization_config", "compression_config")
#: In bytes; what Linux allows.
_LONGEST_FILE_NAME = 255
_PICKLE_ENDINGS = (".bin", ".pt", ".pth", ".ckpt")
_CONVERSION = (
    "Convert them, without PyTorch and without running what the files say: edgellm convert {source} NEW_DIR, then "
    "build from NEW_DIR"
)


class Checkpoint:
    """A directory with `config.json` and weights. Tensors are views of the mapped files until they are converted.

    `config` and `generation_config` (None where the file is missing) are as published; `tensors` by name, those of a
    multimodal model's language model by the names that it has alone; `files` the weight files in order of their names.
    """

    def __init__(
        self, path: Path, config: dict[str, Any], generation_config: dict[str, Any] | None, files: list[SafetensorsFile]
    ) -> None:
        self.path = path
        self.config = config
        self.generation_config = generation_config
        self._files = {file.path: file for file in files}
        self.tensors: dict[str, TensorInfo] = {name: info for file in files for name, info in file.tensors.items()}
        self._is_multimodal = is_multimodal(config)
        if self._is_multimodal:
            self.tensors = _unwrapped(self.tensors)

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Open and check a directory; CheckpointError names the file and what is wrong with it."""
        path = Path(path)
        foreign = foreign_model(path)
        if foreign is not None:
            raise CheckpointError(foreign)
        if not path.is_dir():
            found = "is a file" if path.exists() else "does not exist"
            raise CheckpointError(f"{path} {found}: expected a directory with config.json and {SINGLE_FILE}")
        config = JSONObject.read(path / "config.json", CheckpointError, "Copy it from the checkpoint's source").values
        _refuse_quantized(path, config)
        generation = path / "generation_config.json"
        generation_config = JSONObject.read(generation, CheckpointError).values if generation.exists() else None
        if _is_there(path / SINGLE_FILE):
            files = [SafetensorsFile(path / SINGLE_FILE)]
        elif _is_there(path / INDEX_FILE):
            files = _open_shards(path)
        else:
            raise _no_weights(path)
        return cls(path, config, generation_config, files)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def files(self) -> list[Path]:
        """The weight files."""
        return list(self._files)

    @cached_property
    def dtype(self) -> str | None:
        """The dtype that most bytes of the weights have, or None where none can be computed in."""
        sizes: Counter[str] = Counter()
        for info in self.tensors.values():
            if info.dtype in STORAGE:
                sizes[info.dtype] += info.nbytes
        return sizes.most_common(1)[0][0] if sizes else None

    def info(self, name: str) -> TensorInfo:
        """The tensor's description; CheckpointError where there is no such tensor."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.path} has no tensor {name!r}: is it the checkpoint of another model?")
        return self.tensors[name]

    def status(self, file: Path) -> os.stat_result:
        """That of one of the `files`, as it was when it was opened."""
        return self._files[file].status

    def raw_bytes(self, name: str) -> np.ndarray:
        """The tensor's bytes as they lie in the file, [nbytes] uint8, a read-only view."""
        info = self.info(name)
        return self._files[info.file].bytes_of(info)

    def raw(self, name: str) -> np.ndarray:
        """The tensor in its own dtype, a read-only view of the file; bfloat16 as its bits, uint16."""
        info = self.info(name)
        if info.dtype not in STORAGE:
            raise _not_computable(info)
        return self.raw_bytes(name).view(STORAGE[info.dtype]).reshape(info.shape)

    def read(self, name: str, dtype: str) -> np.ndarray:
        """The tensor as "float32", "float16" or "bfloat16" (bits, uint16), rounded to nearest, ties to even.

        A view of the file where it has that dtype. Raises CheckpointError where a finite value has no place in it.
        """
        storage_of(dtype)
        values, overflowed = convert(self.raw(name), self.info(name).dtype, dtype)
        if overflowed:
            raise overflow_error(self.info(name), dtype, overflowed)
        return values

    def integers(self, name: str) -> np.ndarray:
        """A tensor of whole numbers or truth values as int64; CheckpointError where it has another dtype."""
        info = self.info(name)
        if info.dtype not in _INTEGERS:
            raise CheckpointError(
                f"{info.file}: tensor {name!r} has the dtype {info.dtype}, expected one of {', '.join(_INTEGERS)}"
            )
        return self.raw_bytes(name).view(info.dtype).reshape(info.shape).astype(np.int64)

    def check(self, specs: Sequence[WeightSpec]) -> None:
        """One CheckpointError that lists all `problems`."""
        problems = self.problems(specs)
        if problems:
            listed = "\n".join(f"  {problem}" for problem in problems)
            raise CheckpointError(
                f"{self.path}: the weights do not fit config.json ({len(problems)} differences):\n{listed}\n"
                "Take config.json and weights of one and the same model; adapters and quantized weights are not "
                "checkpoints of their own."
            )

    def problems(
        self,
        specs: Sequence[WeightSpec],
        integers: Mapping[str, tuple[int, ...]] | None = None,
        vision: bool = False,
        unread: tuple[str, ...] = (),
    ) -> list[str]:
        """One line for every missing, unknown and mis-shaped tensor, and for dtypes of no use.

        `integers` are the names and shapes of tensors of whole numbers or truth values that are there beside `specs`.
        Of a multimodal model either the language model is looked at or, with `vision`, the vision part. Tensors whose
        names begin with one of `unread` may be there.
        """
        wanted = {name: tuple(shape) for spec in specs for name, shape in spec.parts} | dict(integers or {})
        problems = [f"missing: {name} {_written(shape)}" for name, shape in wanted.items() if name not in self.tensors]
        for name, info in self.tensors.items():
            if (self._is_multimodal and name.startswith(VISION_PREFIXES) != vision) or name.startswith(unread):
                continue
            if name not in wanted:
                if name == _HEAD and _EMBEDDING in wanted:
                    problems += self._problems_of_tied_head()
                elif not name.endswith(_HARMLESS_ENDINGS):
                    problems.append(f"unknown: {printable(name)} {_written(info.shape)}")
                continue
            if info.shape != wanted[name]:
                problems.append(f"wrong shape: {name} is {_written(info.shape)}, expected {_written(wanted[name])}")
            dtypes = _INTEGERS if name in (integers or {}) else STORAGE
            if info.dtype not in dtypes:
                problems.append(f"wrong dtype: {name} is {info.dtype}, expected one of {', '.join(dtypes)}")
        return problems

    def close(self) -> None:
        """Unmap the files; views that are still in use stay valid."""
        for file in self._files.values():
            file.close()

    def _problems_of_tied_head(self) -> list[str]:
        """A stored head beside a tied embedding is harmless if it is the embedding, as transformers has it too."""
        head, embedding = self.tensors[_HEAD], self.tensors.get(_EMBEDDING)
        if embedding is None:
            return []  # listed as missing already
        same_type = head.shape == embedding.shape and head.dtype == embedding.dtype
        if same_type and np.array_equal(self.raw_bytes(_HEAD), self.raw_bytes(_EMBEDDING)):
            return []
        return [f"unknown: {_HEAD} differs from {_EMBEDDING}, though config.json has tie_word_embeddings true"]


def _unwrapped(tensors: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
    """By the language model's own names; CheckpointError where two tensors would have the same."""
    named: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        own = language_model_name(name)
        if own in named:
            raise CheckpointError(
                f"{info.file}: the tensors {named[own].name!r} and {name!r} are one and the same of the language "
                "model. Remove one"
            )
        named[own] = info
    return named


def storage_of(dtype: str) -> np.dtype:
    """The NumPy type that holds `dtype`; ValueError for one that models are not computed in."""
    if dtype not in STORAGE:
        raise ValueError(f"dtype is {dtype!r}: expected one of {', '.join(STORAGE)}")
    return STORAGE[dtype]


def overflow_error(info: TensorInfo, dtype: str, count: int) -> CheckpointError:
    """For `count` finite values of a tensor that are beyond the range of `dtype`."""
    return CheckpointError(
        f"{info.file}: {count} values of tensor {info.name!r} ({info.dtype}) are too large for {dtype}. "
        "Build for bfloat16 (--dtype bfloat16), which has the range of float32"
    )


def not_finite_error(info: TensorInfo, values: np.ndarray, index: int) -> CheckpointError:
    """For a tensor whose `values`, as the file has them, are infinite or NaN at `index` (in C order)."""
    return CheckpointError(
        f"{info.file}: tensor {info.name!r} ({info.dtype} {_written(info.shape)}) is "
        f"{value_and_place(values, info.dtype, index)}, expected finite numbers: no answer computed with it is of use. "
        "Copy the checkpoint anew from its source and build the engine directory again; where the source has it so, "
        "take another release of the model"
    )


def _not_computable(info: TensorInfo) -> CheckpointError:
    return CheckpointError(
        f"{info.file}: tensor {info.name!r} has the dtype {info.dtype}, expected one of {', '.join(STORAGE)}. "
        "Take the model's unquantized checkpoint"
    )


def _refuse_quantized(path: Path, config: dict[str, Any]) -> None:
    for key in _QUANTIZATION_KEYS:
        if settings := config.get(key):
            method = settings.get("quant_method") if isinstance(settings, dict) else None
            named = f" with the method {method!r:.60}" if isinstance(method, str) else ""
            raise CheckpointError(
                f"{path / 'config.json'}: by {key!r} the weights are quantized{named}; expected float16, bfloat16 or "
                "float32. Take the model's unquantized checkpoint"
            )


def _written(shape: Sequence[int]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def _open_shards(path: Path) -> list[SafetensorsFile]:
    """Open every shard that the index names and check that both agree."""
    index_path = path / INDEX_FILE
    index = JSONObject.read(
        index_path, CheckpointError, "Copy it from the checkpoint's source", size_limit(index_path.name)
    )
    weight_map = index.get("weight_map", "dict")
    for name, shard in weight_map.items():
        if not _is_shard_name(shard):
            raise index.error(
                f"'weight_map' puts {name!r} into {shard!r}, expected the name of a .safetensors file in the directory"
            )
    shards = sorted(set(weight_map.values()))
    if not shards:
        raise index.error("'weight_map' is empty, expected a file name for each tensor")
    missing = [shard for shard in shards if not _is_there(path / shard)]
    if missing:
        raise index.error(f"{len(missing)} of {len(shards)} files are missing: {', '.join(missing)}")
    files = [SafetensorsFile(path / shard) for shard in shards]
    place: dict[str, str] = {}
    for file in files:
        for name in file.tensors:
            if name in place:
                raise CheckpointError(
                    f"{file.path}: tensor {name!r} is in {place[name]} too; which one is meant is unknown. Remove one"
                )
            place[name] = file.path.name
    wrong = [name for name, shard in weight_map.items() if place.get(name) != shard]
    if wrong:
        listed = "; ".join(f"{name!r} not in {weight_map[name]}" for name in wrong[:5])
        raise index.error(f"{len(wrong)} tensors are not where 'weight_map' says: {listed}")
    return files


def _is_there(path: Path) -> bool:
    """Whether the directory has the entry, be it a link that leads nowhere: opening it says so."""
    return path.exists() or path.is_symlink()


def _is_shard_name(name: Any) -> bool:
    """A plain name: it must not lead out of the directory."""
    return (
        isinstance(name, str)
        and name.endswith(".safetensors")
        and not name.startswith(".")
        and name.isprintable()
        and not any(character in name for character in "/\\:")
        and len(name.encode()) <= _LONGEST_FILE_NAME
    )


def _no_weights(path: Path) -> CheckpointError:
    names = sorted(printable(file.name) for file in path.iterdir())
    pickled = [name for name in names if name.endswith(_PICKLE_ENDINGS)]
    others = [name for name in names if name.endswith((".safetensors", ".gguf"))]
    message = f"{path} has neither {SINGLE_FILE} nor {INDEX_FILE}"
    if pickled:
        return CheckpointError(
            f"{message}, only pickled weights ({', '.join(pickled[:5])}). {_CONVERSION.format(source=path)}"
        )
    found = f"it has {', '.join(others[:5])}" if others else "and no other weights"
    return CheckpointError(f"{message}; {found}. Expected a checkpoint in the layout of Hugging Face")


#: ORG/NAME, as models are named on the Hugging Face Hub.
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_GGUF_START = b"GGUF"


def foreign_model(path: Path) -> str | None:
    """One or two sentences about a GGUF file, a directory of them, or what looks like a name on the Hub; None for
    anything else."""
    if _is_gguf(path):
        return (
            f"{path} is {'a GGUF file' if path.is_file() else 'a directory of GGUF files'}, llama.cpp's format, which "
            "EdgeLLM does not read. Take the model that it was made from, as config.json, tokenizer.json and "
            "safetensors, and build that: edgellm build CHECKPOINT ENGINE_DIR"
        )
    name = str(path)
    if _HUB_NAME.fullmatch(name) and not path.parent.exists():
        folder = path.name
        return (
            f"{name} does not exist here. If it is the name of a model on the Hugging Face Hub: EdgeLLM loads nothing "
            f"from there by itself. Do that first (hf download {name} --local-dir {folder}), make an engine directory "
            f"of it (edgellm build {folder} {folder}-engines), and name that to chat, generate and the others"
        )
    return None


def _is_gguf(path: Path) -> bool:
    try:
        if path.is_file():
            with path.open("rb") as file:
                return file.read(len(_GGUF_START)) == _GGUF_START
        return path.is_dir() and not (path / "config.json").exists() and any(path.glob("*.gguf"))
    except OSError:
        return False
