"""Hugging Face checkpoints: `config.json` and the weights, memory-mapped from one safetensors file or several."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from edgellm.engines.checkpoints.delayed_norms import with_delayed_norms
from edgellm.engines.checkpoints.tensor_names import TABLE, experts_apart, unwrapped
from edgellm.engines.checkpoints.weight_files import (
    HEAD_FILE,
    SINGLE_FILE,
    WeightFile,
    foreign_model,
    open_weight_files,
)
from edgellm.engines.closing import Closing
from edgellm.engines.errors import CheckpointError
from edgellm.engines.formats import tensors as stored_tensors
from edgellm.engines.formats.safetensors_file import SafetensorsFile, TensorInfo, element_bytes
from edgellm.engines.formats.strict_formats import JSONObject
from edgellm.engines.gguf.weights import GgufWeights
from edgellm.engines.model.config import WeightSpec
from edgellm.engines.quantization.compressed_tensors import PackQuantized
from edgellm.engines.quantization.config import objects, read_quantization
from edgellm.engines.quantization.layout import (
    PACKED_ENDINGS,
    TABLE_CLASS,
    UNUSED_ENDINGS,
    Layout,
    LinearTensors,
    Quantization,
    Stored,
)
from edgellm.engines.quantization.stored import StoredWeight
from edgellm.kernels.quantization.packed_weight import PackedWeight, WeightFormat
from edgellm.kernels.user_paths import printable

_MODEL, _EMBEDDING, _HEAD = "model.", "model.embed_tokens.weight", "lm_head.weight"
_NORM = "model.norm.weight"
_BARE = ("embed_tokens.weight", "norm.weight")
#: Buffers that old releases of transformers stored beside the weights; they follow from the configuration.
_HARMLESS_ENDINGS: tuple[str, ...] = tuple(TABLE["harmless"])
#: Those whose every value an int64 holds.
_INTEGERS = ("int64", "int32", "int16", "int8", "uint32", "uint16", "uint8", "bool")
_TOKEN_ROWS = "model.embed_tokens_per_layer.weight"
#: Weights of two dimensions that are no linear layer's. They are packed where their tensors say so: what packs all
#: linear layers leaves them alone.
_TABLES: tuple[str, ...] = tuple(TABLE["tables"])
_WEIGHT = ".weight"
#: What chooses experts.
_ROUTERS: tuple[str, ...] = tuple(TABLE["routers"])


class Checkpoint(Closing):
    """A directory with `config.json` and weights. Tensors are views of the mapped files until they are converted; those
    of GGUF files are read when they are asked for.

    `config` and `generation_config` (None where the file is missing) are as published; `tensors` by name, those of a
    multimodal model's language model by the names that it has alone, stacked experts one by one; `files` the weight
    files in order of their names. `quantization` says which linear layers are packed, and how; None: none is. `head` is
    the format, but for its dtype, of a head in a file of its own (`HEAD_FILE`, in the layout pack-quantized), which
    stands for the published one.
    """

    def __init__(
        self,
        path: Path,
        config: dict[str, Any],
        generation_config: dict[str, Any] | None,
        files: Sequence[WeightFile],
        quantization: Quantization | None = None,
        head: WeightFormat | None = None,
    ) -> None:
        self.path = path
        self.config = config
        self.generation_config = generation_config
        self.quantization = quantization
        self._files: dict[Path, WeightFile] = {file.path: file for file in files}
        self.tensors: dict[str, TensorInfo] = {name: info for file in files for name, info in file.tensors.items()}
        #: Of packed tensors of GGUF files, which say so of each.
        self._layouts = {
            name: found for file in files if isinstance(file, GgufWeights) for name, found in file.layouts.items()
        }
        #: What `quantization` says of modules: of each expert it is asked again and again, and it may have long lists.
        self._asked: dict[str, Layout | None] = {}
        self._is_multimodal = stored_tensors.is_multimodal(config)
        #: Which rows of which tensor the head is, where it is not one of its own.
        self._head_rows: tuple[TensorInfo, np.ndarray] | None = None
        self._head = None if head is None else PackQuantized(head.bits, head.group, head.zeros)
        #: Whether names lack their "model.", as those of a decoder that was saved without its head (EAGLE's has fc).
        self._is_bare = self.tensors.keys() >= set(_BARE) and not any(name.startswith("fc.") for name in self.tensors)
        #: Whether the language model's tensors have other names in the files of such a model than by itself.
        self._is_wrapped = self._is_multimodal or config.get("model_type") == "nemotron_h"
        if self._is_wrapped:
            self.tensors = unwrapped(self.tensors)
        elif self._is_bare:
            self.tensors = {name if name == _HEAD else f"{_MODEL}{name}": info for name, info in self.tensors.items()}
        self.tensors = experts_apart(self.tensors, config)
        #: What computes tensors that are in no file.
        self._computed: dict[str, Callable[[], np.ndarray]] = {}
        if config.get("model_type") == "voxtral_realtime":
            published = {**self.tensors}
            self.tensors, self._computed = with_delayed_norms(
                published, config, lambda name: self._published(published[name])
            )
        may_be_tied = all(values.get("tie_word_embeddings") is not False for values in objects(config))
        if may_be_tied and _EMBEDDING not in self.tensors and {_HEAD, _NORM} <= self.tensors.keys():
            self.tensors[_EMBEDDING] = self.tensors.pop(_HEAD)  # safetensors' save_model keeps one name of both

    @classmethod
    def open(cls, path: str | Path, head: WeightFormat | None = None) -> Checkpoint:
        """Open and check a directory; CheckpointError names the file and what is wrong with it."""
        path = Path(path)
        foreign = foreign_model(path)
        if foreign is not None:
            raise CheckpointError(foreign)
        if not path.is_dir():
            found = "is a file" if path.exists() else "does not exist"
            raise CheckpointError(
                f"{path} {found}: expected a directory with config.json and {SINGLE_FILE}, or a GGUF file"
            )
        config = JSONObject.read(path / "config.json", CheckpointError, "Copy it from the checkpoint's source").values
        quantization = read_quantization(path, config)
        generation = path / "generation_config.json"
        generation_config = JSONObject.read(generation, CheckpointError).values if generation.exists() else None
        own = [] if head is None else [SafetensorsFile(path / HEAD_FILE)]
        files = [*open_weight_files(path), *own]
        return cls(path, config, generation_config, files, quantization, head)

    def use_shortlist(self, file: Path, mapping: str, source: str) -> None:
        """Take the tensor `mapping` from a further file, and for the head, unless there is a packed one, those rows of
        the tensor `source` that the mapping names: row i is the row i + mapping[i]. Raises CheckpointError."""
        opened = SafetensorsFile(file)
        self._files[file] = opened
        self.tensors |= {name: info for name, info in opened.tensors.items() if name == mapping}
        offsets = self.integers(mapping)
        if self.layout(_HEAD, (len(offsets), 1)) is not None:
            return
        info = self.info(source)
        ids = offsets + np.arange(len(offsets))
        if ids.size and not 0 <= ids.min() <= ids.max() < info.shape[0]:
            raise CheckpointError(f"{file}: {mapping} names rows that {source} {list(info.shape)} does not have")
        shape = (len(ids), *info.shape[1:])
        name = f"{len(ids)} rows of {info.name}"
        self.tensors[_HEAD] = replace(info, name=name, shape=shape, nbytes=info.nbytes // info.shape[0] * len(ids))
        self._head_rows = info, ids

    @property
    def files(self) -> list[Path]:
        return list(self._files)

    @cached_property
    def dtype(self) -> str | None:
        """The dtype that most bytes of the weights have, or None where none can be computed in."""
        sizes: Counter[str] = Counter()
        for info in self.tensors.values():
            if info.dtype in stored_tensors.STORAGE:
                sizes[info.dtype] += info.nbytes
        return sizes.most_common(1)[0][0] if sizes else None

    def info(self, name: str) -> TensorInfo:
        """The tensor's description; CheckpointError where there is no such tensor."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.path} has no tensor {name!r}: is it the checkpoint of another model?")
        return self.tensors[name]

    def status(self, file: Path) -> os.stat_result:
        """The status of one of the `files`, as it was when it was opened."""
        return self._files[file].status

    def raw_bytes(self, name: str) -> np.ndarray:
        """The tensor's bytes as they lie in the file, [nbytes] uint8, or of one that is turned [N, K, bytes of an
        element]: a read-only view, of a shortlist a copy."""
        if name in self._computed:
            return self._computed[name]().view(np.uint8).reshape(-1)
        if self._head_rows is not None and name == _HEAD:
            info, ids = self._head_rows
            return self._files[info.file].bytes_of(info).reshape(info.shape[0], -1)[ids].reshape(-1)
        info = self.info(name)
        if not info.turned:
            return self._files[info.file].bytes_of(info)
        (rows, columns), size = info.shape, element_bytes(info.dtype)
        lying = replace(info, nbytes=((columns - 1) * info.turned + rows) * size)
        data = self._files[info.file].bytes_of(lying)
        return np.ndarray((rows, columns, size), np.uint8, data, strides=(size, info.turned * size, 1))

    def _published(self, info: TensorInfo) -> np.ndarray:
        """The float32 values of a tensor as it lies in its file; CheckpointError for a dtype of no use."""
        values = self._files[info.file].bytes_of(info)
        if info.dtype not in stored_tensors.STORAGE:
            raise CheckpointError(f"{info.file}: tensor {info.name!r} has the dtype {info.dtype}")
        stored = values.view(stored_tensors.STORAGE[info.dtype]).reshape(info.shape)
        return stored_tensors.as_float32(stored, info.dtype)

    def raw(self, name: str) -> np.ndarray:
        """The tensor in its own dtype, a read-only view of the file; bfloat16 as its bits, uint16."""
        info = self.info(name)
        if info.dtype not in stored_tensors.STORAGE:
            raise CheckpointError(
                f"{info.file}: tensor {info.name!r} has the dtype {info.dtype}, expected one of "
                f"{', '.join(stored_tensors.STORAGE)}. Take the model's unquantized checkpoint"
            )
        return self.raw_bytes(name).view(stored_tensors.STORAGE[info.dtype]).reshape(info.shape)

    def keep(self) -> bool:
        """Have what GGUF files hold read whenever it is asked for, as copies and also once this is closed; whether
        there are any."""
        return bool([file.keep() for file in self._files.values() if isinstance(file, GgufWeights)])

    def row_reader(self, name: str) -> Callable[[np.ndarray], np.ndarray]:
        """What gives copies of rows, int [n], of a tensor: uint8 [n, bytes of a row], also once the checkpoint is
        closed. No others are read."""
        info = self.info(name)
        if self.keep() and isinstance(file := self._files[info.file], GgufWeights):
            return partial(file.bytes_of, info)
        return self.raw_bytes(name).reshape(info.shape[0], -1).__getitem__

    def integers(self, name: str) -> np.ndarray:
        """A tensor of whole numbers or truth values as int64; CheckpointError where it has another dtype."""
        info = self.info(name)
        if info.dtype not in _INTEGERS:
            raise CheckpointError(
                f"{info.file}: tensor {name!r} has the dtype {info.dtype}, expected one of {', '.join(_INTEGERS)}"
            )
        return self.raw_bytes(name).view(info.dtype).reshape(info.shape).astype(np.int64)

    def has_weight(self, name: str) -> bool:
        """Whether there is a weight of this name, be it packed."""
        module = name.removesuffix(_WEIGHT)
        return name in self.tensors or any(f"{module}.{ending}" in self.tensors for ending in PACKED_ENDINGS)

    def layout(self, name: str, shape: Sequence[int]) -> Layout | None:
        """How the weight is packed; None for one that is stored as it is."""
        if name == _HEAD and self._head is not None:
            return self._head
        if name == _HEAD and self._head_rows is not None:
            return None
        if name in self._layouts:
            return self._layouts[name]
        is_dense = name in self.tensors and self.tensors[name].dtype in stored_tensors.STORAGE
        if is_dense and (name.startswith("mtp.") or name.endswith(_ROUTERS)):
            return None  # a draft head's that ships with the model, or a router: not all who pack one say that it is
        if self.quantization is None or len(shape) != 2 or not name.endswith(_WEIGHT):
            return None
        module, is_table = name.removesuffix(_WEIGHT), name.endswith(_TABLES)
        if is_table and f"{module}.{PACKED_ENDINGS[0]}" not in self.tensors:
            return None
        if module not in self._asked:
            alone = (module, module.removeprefix(_MODEL)) if self._is_bare else (module,)
            names = stored_tensors.published_names(module) if self._is_wrapped else alone
            self._asked[module] = self.quantization.layout((*names, TABLE_CLASS) if is_table else names)
        return self._asked[module]

    def part_infos(self, name: str, shape: Sequence[int]) -> list[TensorInfo]:
        """The tensors that a weight is made of: itself, or its layout's. CheckpointError where one is missing."""
        stored = self._stored(name, shape).items()
        return [self.info(each) for each, found in stored if each in self.tensors or not found.optional]

    def weight_format(self, name: str, shape: Sequence[int]) -> WeightFormat | None:
        """The format of a packed weight; None for one that is stored as it is."""
        layout = self.layout(name, shape)
        if layout is None:
            return None
        return layout.format(self.info(f"{name.removesuffix(_WEIGHT)}.{layout.scale_tensor}").dtype)

    def packed(self, name: str, shape: Sequence[int]) -> PackedWeight | None:
        """The weight as `stored` gives it, with codes in memory, a byte each, until the weight is let go."""
        stored = self.stored(name, shape)
        return None if stored is None else stored.unpacked()

    def stored(self, name: str, shape: Sequence[int], others: Sequence[str] = ()) -> StoredWeight | None:
        """A packed weight [N, K], its values checked, its codes as they are in the file; None for one that is dense.
        Behind its rows are those of `others` of the same shape, if its layout `stacks`. Raises CheckpointError for
        tensors that are missing, mis-shaped, or hold what no weight has."""
        read = self.reader(name, shape, others)
        return None if read is None else read()

    def reader(self, name: str, shape: Sequence[int], others: Sequence[str] = ()) -> Callable[..., StoredWeight] | None:
        """What gives `stored` whenever it is called, if of one weight also once the checkpoint is closed. Of `rows`,
        int [n], it gives these alone, and reads no others."""
        layout = self.layout(name, shape)
        if layout is None:
            return None
        wanted, (rows, columns) = self._stored(name, shape), shape
        found = self._misfit(name, shape) or self._differences(wanted)
        if found:
            raise CheckpointError(f"{self.path}: {'; '.join(found)}. Take config.json and weights of one model")
        copies = name in self._layouts  # those of GGUF files, which are read whenever `read` is called
        lookup = self._typed if copies or others else {each: self._typed(each) for each in wanted}.get
        modules = [each.removesuffix(_WEIGHT) for each in (name, *others)]
        tensors = LinearTensors(modules[0], (rows, columns), lookup, modules[1:])
        read_rows = self.row_reader(name) if copies and name == _TOKEN_ROWS else None

        def of_rows(rows: np.ndarray) -> LinearTensors:
            if read_rows is None:
                return tensors.of_rows(rows)
            found = self.info(name).dtype, (len(rows), columns), read_rows(rows).reshape(-1)
            return LinearTensors(tensors.module, found[1], lambda _: found)

        def read(rows: np.ndarray | None = None) -> StoredWeight:
            try:
                return layout.read(tensors if rows is None else of_rows(rows))
            except CheckpointError as error:
                raise CheckpointError(f"{self.path}: {error}") from None

        return read

    def check(self, specs: Sequence[WeightSpec], unread: tuple[str, ...] = ()) -> None:
        """One CheckpointError that lists all `problems`."""
        problems = self.problems(specs, unread=unread)
        if problems:
            listed = "\n".join(f"  {problem}" for problem in problems)
            said = "" if self.quantization is None else f", weights packed with {self.quantization.method}"
            raise CheckpointError(
                f"{self.path}: the weights do not fit config.json ({len(problems)} differences{said}):\n{listed}\n"
                "Take config.json and weights of one and the same model; adapters are not checkpoints of their own, "
                "and packed weights go with the quantization_config that they were published with."
            )

    def problems(
        self,
        specs: Sequence[WeightSpec],
        integers: Mapping[str, tuple[int, ...]] | None = None,
        encoders: bool = False,
        unread: tuple[str, ...] = (),
        within: str = "",
    ) -> list[str]:
        """One line for every missing, unknown and mis-shaped tensor, and for dtypes of no use.

        `integers` are the names and shapes of tensors of whole numbers or truth values that are there beside `specs`.
        Of a multimodal model either the language model is looked at or, with `encoders`, its encoders. Tensors whose
        names begin with one of `unread` may be there, and those whose names do not begin with `within`.
        """
        wanted = {name: Stored.of(tuple(shape), *_INTEGERS) for name, shape in (integers or {}).items()}
        problems: list[str] = []
        for name, shape in (part for spec in specs for part in spec.parts):
            wanted |= self._stored(name, shape)
            problems += self._misfit(name, shape)
        problems += self._differences(wanted)
        for name, info in self.tensors.items():
            if (
                (self._is_multimodal and name.startswith(stored_tensors.ENCODER_PREFIXES) != encoders)
                or name.startswith(unread)
                or not name.startswith(within)
                or name in wanted
                or name.endswith(_HARMLESS_ENDINGS)
            ):
                continue
            if name == _HEAD and _EMBEDDING in wanted:
                problems += self._problems_of_tied_head()
            elif not (self.quantization is not None and self._is_idle(name, wanted)):
                problems.append(f"unknown: {printable(name)} {list(info.shape)}")
        return problems

    def _stored(self, name: str, shape: Sequence[int]) -> dict[str, Stored]:
        """The tensors that a weight is made of, by their names: itself, or its layout's."""
        layout, module = self.layout(name, shape), name.removesuffix(_WEIGHT)
        if layout is None:
            return {name: Stored.of(tuple(shape), *stored_tensors.STORAGE)}
        return {f"{module}.{ending}": stored for ending, stored in _tensors(layout, *shape).items()}

    def _misfit(self, name: str, shape: Sequence[int]) -> list[str]:
        """Why a weight of this shape cannot have the layout that it is said to have: one line, or none."""
        layout = self.layout(name, shape)
        problem = layout and layout.problem(*shape)
        return [f"no {layout.name}: {name} {list(shape)}: {problem}"] if layout and problem else []

    def _differences(self, wanted: Mapping[str, Stored]) -> list[str]:
        """Which of the wanted tensors are missing, mis-shaped or of dtypes of no use."""
        missing, problems = [], []
        for name, stored in wanted.items():
            info = self.tensors.get(name)
            if info is None:
                if not stored.optional:
                    missing.append(f"missing: {name} {list(stored.forms[0][0])}")
                continue
            if stored.fits(info.shape, info.dtype):
                continue
            if (expected := stored.shape_problem(info.shape)) is not None:
                problems.append(f"wrong shape: {name} is {list(info.shape)}, expected {expected}")
            if (expected := stored.dtype_problem(info.shape, info.dtype)) is not None:
                problems.append(f"wrong dtype: {name} is {info.dtype}, expected {expected}")
        return missing + problems

    def _is_idle(self, name: str, wanted: Mapping[str, Stored]) -> bool:
        """Whether a tensor that nothing wants changes nothing: a scale of activations or caches, or a bias of zeros,
        as packages add to packed layers that have none."""
        if name.endswith(UNUSED_ENDINGS):
            return True
        module = name.removesuffix(".bias")
        is_of_packed = module != name and any(f"{module}.{ending}" in wanted for ending in PACKED_ENDINGS)
        return is_of_packed and not self.raw_bytes(name).any()

    def _typed(self, name: str) -> tuple[str, tuple[int, ...], np.ndarray] | None:
        info = self.tensors.get(name)
        return None if info is None else (info.dtype, info.shape, self.raw_bytes(name))

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
        return [
            f"unknown: {_HEAD} differs from {_EMBEDDING}, though config.json has tie_word_embeddings true: set that to "
            "false where the head is the model's, else take the head out of the files"
        ]


def converted(info: TensorInfo, values: np.ndarray, dtype: str, source: str | None = None) -> np.ndarray:
    """Values of a tensor, which are of its dtype or of `source`, as "float32", "float16" or "bfloat16" (bits, uint16),
    rounded to nearest, ties to even; as they are where they have that dtype.

    Raises CheckpointError where a finite value has no place in it.
    """
    result, overflowed = stored_tensors.convert(values, source or info.dtype, dtype)
    if overflowed:
        raise CheckpointError(
            f"{info.file}: {overflowed} values of tensor {info.name!r} ({info.dtype}) are too large for {dtype}. "
            "Build for bfloat16 (--dtype bfloat16), which has the range of float32"
        )
    return result


def not_finite_error(info: TensorInfo, values: np.ndarray, index: int) -> CheckpointError:
    """The error for a tensor whose `values`, as the file has them, are infinite or NaN at `index` (in C order)."""
    found = stored_tensors.value_and_place(values, info.dtype, index)
    return CheckpointError(
        f"{info.file}: tensor {info.name!r} ({info.dtype} {list(info.shape)}) is {found}, expected finite numbers: "
        "no answer computed with it is of use. Copy the checkpoint anew from its source and build the engine directory "
        "again; where the source has it so, take another release of the model"
    )


@lru_cache
def _tensors(layout: Layout, rows: int, columns: int) -> Mapping[str, Stored]:
    """The same for each of thousands of experts."""
    return layout.tensors(rows, columns)
