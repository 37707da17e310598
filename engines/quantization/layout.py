"""What a published layout says of a linear layer: the tensors it consists of, and how they become a weight."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgellm.engines.errors import CheckpointError
from edgellm.engines.formats.tensors import STORAGE, encoder_prefix, float32_into
from edgellm.engines.quantization.stored import StoredWeight
from edgellm.kernels.quantization.packed_weight import WeightFormat, code_values

#: The dtypes of scales, in the order of errors' messages.
FLOATS = tuple(STORAGE)
WORDS = ("int32", "uint32")
#: 8-bit floats are stored under their own name, or by early releases as their bits.
FP8 = ("float8_e4m3",)
_INTEGER_TYPES = {"int8": np.int8, "uint8": np.uint8, "int32": np.int32, "uint32": np.uint32, "int64": np.int64}
#: What may stand beside a packed weight and changes nothing of it: scales of activations and of caches.
UNUSED_ENDINGS = (
    *(".input_scale", ".input_global_scale", ".input_zero_point", ".output_scale", ".activation_scale", ".q_scale"),
    *(".k_scale", ".v_scale", ".k_zero_point", ".v_zero_point", ".kv_scale", ".prob_scale"),
)
#: The tensor of a linear layer whose name alone says that it is packed.
PACKED_ENDINGS = ("weight_packed", "qweight")
#: What settings call modules that look rows up.
TABLE_CLASS = "Embedding"
_LONGEST_PATTERN = 1000
#: Numbers of a packed table that may stand for all of its rows: its shape, or a scale.
_FEW = 2


@dataclass(frozen=True)
class Stored:
    """A tensor as it may be stored: `forms` are the shapes it may have, each with its dtypes; an `optional` one may be
    missing."""

    forms: tuple[tuple[tuple[int, ...], tuple[str, ...]], ...]
    optional: bool = False

    @classmethod
    def of(cls, shape: tuple[int, ...], *dtypes: str, optional: bool = False) -> Stored:
        """One with a single shape."""
        return cls(((shape, dtypes),), optional)

    def fits(self, shape: tuple[int, ...], dtype: str) -> bool:
        """Whether a tensor may have such a shape and dtype."""
        return any(shape == expected and dtype in dtypes for expected, dtypes in self.forms)

    def shape_problem(self, shape: tuple[int, ...]) -> str | None:
        """Which shapes are expected, in words, where `shape` is none of them."""
        if any(shape == expected for expected, _ in self.forms):
            return None
        return " or ".join(dict.fromkeys(str(list(expected)) for expected, _ in self.forms))

    def dtype_problem(self, shape: tuple[int, ...], dtype: str) -> str | None:
        """Which dtypes are expected of a tensor of `shape`, in words, where `dtype` is none of them."""
        dtypes = [name for expected, names in self.forms if expected == shape for name in names]
        return None if dtype in dtypes or not dtypes else f"one of {', '.join(dict.fromkeys(dtypes))}"


class LinearTensors:
    """The tensors of one linear layer [N, K] in a checkpoint, by the endings of their names; what is read is checked.
    `tensor` gives dtype, shape and bytes of a tensor [nbytes] by its full name, None where there is none. Rows of
    `others`, layers of the same shape, are behind those of `module`: their tensors are read as one."""

    def __init__(
        self,
        module: str,
        shape: tuple[int, int],
        tensor: Callable[[str], tuple[str, tuple[int, ...], np.ndarray] | None],
        others: Sequence[str] = (),
    ) -> None:
        self.module, self.published, self._modules = module, shape, (module, *others)
        self.shape = len(self._modules) * shape[0], shape[1]
        self._tensor = tensor

    def of_rows(self, rows: np.ndarray) -> LinearTensors:
        """Copies of `rows` alone, int [n], in this order; `published` stays the shape of the whole. Raises
        CheckpointError where a tensor holds neither a row for each of the weight's nor one or two numbers for all."""

        def tensor(name: str) -> tuple[str, tuple[int, ...], np.ndarray] | None:
            found = self._tensor(name)
            if found is None or math.prod(found[1]) <= _FEW:
                return found
            dtype, (count, *rest), data = found
            if count != self.shape[0]:
                raise self.error(
                    name.rpartition(".")[2], f"the shape {[count, *rest]}", f"{self.shape[0]} rows, as the table has"
                )
            return dtype, (len(rows), *rest), data.reshape(count, -1)[rows].reshape(-1)

        part = LinearTensors(self.module, (len(rows), self.shape[1]), tensor)
        part.published = self.published
        return part

    def has(self, ending: str) -> bool:
        return any(self._tensor(f"{module}.{ending}") is not None for module in self._modules)

    def dtype(self, ending: str) -> str:
        return self._each(ending)[0][0]

    def integers(self, ending: str) -> np.ndarray:
        """A tensor of whole numbers, or the bits of 8-bit floats, uint8; of one layer a read-only view of the file."""
        return _integers(*self._found(ending))

    def each_integers(self, ending: str) -> list[np.ndarray]:
        """The same of each layer, by itself and never copied."""
        return [_integers(*found) for found in self._each(ending)]

    def blocks(self, ending: str) -> np.ndarray:
        """The bytes of a tensor that consists of blocks: uint8 [nbytes]."""
        return self._found(ending)[2]

    def scales(self, ending: str, may_vanish: bool = False) -> np.ndarray:
        """A tensor of floats as float32, 8-bit ones, too. Raises CheckpointError for NaN, infinities and zeros; some
        may be 0 where small ones `may_vanish` in their dtype, though not all."""
        dtype, shape, data = self._found(ending)
        if dtype in FP8:
            values = code_values("fp8")[data].reshape(shape)
        else:
            values = np.empty(shape, np.float32)
            float32_into(data.view(STORAGE[dtype]).reshape(shape), dtype, values)
        self.check(ending, np.isfinite(values), values, "finite numbers")
        if not (may_vanish and values.any()):
            self.check(ending, values != 0, values, "numbers other than 0")
        return values

    def input_scales(self, ending: str) -> np.ndarray | None:
        """What activations are multiplied by, float32 [K], where that was not folded."""
        return self.scales(ending) if self.has(ending) else None

    def check(self, ending: str, good: np.ndarray, values: np.ndarray, expected: str) -> None:
        """CheckpointError for the first value that is not `good`, of as many."""
        if good.all():
            return
        wrong = np.flatnonzero(~np.broadcast_to(good, values.shape))
        where = [int(index) for index in np.unravel_index(wrong[0], values.shape)]
        raise self.error(ending, f"{values.flat[wrong[0]]} at {where} ({wrong.size} such of {values.size})", expected)

    def error(self, ending: str, found: str, expected: str) -> CheckpointError:
        """The error for a tensor that holds what it must not."""
        return CheckpointError(
            f"tensor '{self.module}.{ending}' holds {found}, expected {expected}: no answer computed with it is of "
            "use. Copy the checkpoint anew from its source, config.json and weights of one release; where the source "
            "has it so, take another release of the model"
        )

    def _found(self, ending: str) -> tuple[str, tuple[int, ...], np.ndarray]:
        (dtype, shape, data), *others = found = self._each(ending)
        if not others:
            return dtype, shape, data
        return dtype, (len(found) * shape[0], *shape[1:]), np.concatenate([data for *_, data in found])

    def _each(self, ending: str) -> list[tuple[str, tuple[int, ...], np.ndarray]]:
        found = list[tuple[str, tuple[int, ...], np.ndarray]]()
        for name in (f"{module}.{ending}" for module in self._modules):
            tensor, problem = self._tensor(name), ""
            if tensor is None:
                problem = f"there is no tensor '{name}'"
            elif found and tensor[:2] != found[0][:2]:
                (dtype, shape, _), (first, expected, _) = tensor, found[0]
                problem = f"tensor '{name}' is {dtype} {[*shape]}, expected {first} {[*expected]}, as of {self.module}"
            if tensor is None or problem:
                raise CheckpointError(f"{problem}. Take config.json and weights of one and the same model")
            found.append(tensor)
        return found


def _integers(dtype: str, shape: tuple[int, ...], data: np.ndarray) -> np.ndarray:
    return data.view(_INTEGER_TYPES.get(dtype, np.uint8)).reshape(shape)


class Layout(ABC):
    """How one linear layer is stored. `name` is the layout's, in words; `group` how many columns of a row share a scale
    and must divide it, if such groups must."""

    name: str
    group: int | None

    @abstractmethod
    def tensors(self, rows: int, columns: int) -> dict[str, Stored]:
        """Its tensors by the endings of their names, for a weight [rows, columns]."""

    @abstractmethod
    def format(self, scale_dtype: str) -> WeightFormat:
        """The format of its weight, where `scale_tensor` has that dtype, in which integers are multiplied, as the
        packages do; columns may be permuted beyond that."""

    @abstractmethod
    def read(self, tensors: LinearTensors) -> StoredWeight:
        """The weight; raises CheckpointError for values that no weight has."""

    #: The tensor whose dtype `format` takes.
    scale_tensor = "weight_scale"
    #: The tensor that says in which order inputs are taken, or how they are scaled, if a weight may have one.
    input_tensor = ""
    #: Where kernels of GPUs do not take the format, or not beside that of another part of the same step, the weight is
    #: dense there.
    may_be_dense = False

    def stacks(self, rows: int) -> bool:
        """Whether weights of so many rows, one behind the other, are read as one: each tensor has its rows first."""
        return False

    def problem(self, rows: int, columns: int) -> str | None:
        """Why no weight [rows, columns] can have this layout; None where it can."""
        if self.group is None or columns % self.group == 0:
            return None
        return f"groups of {self.group} columns do not divide its {columns}"


class Quantization(ABC):
    """What a checkpoint's configuration says: `method` by name, and which layout each linear layer has. `notes` are
    sentences on what the file holds and nothing here uses."""

    method: str
    notes: tuple[str, ...] = ()

    @abstractmethod
    def layout(self, names: tuple[str, ...]) -> Layout | None:
        """The layout of the module which is called by one of `names` (the first is the language model's own); None:
        dense."""


class Settings:
    """An object of a configuration, read without trust; `place` begins what errors say, `method` names the method."""

    def __init__(self, values: Mapping[str, Any], place: str) -> None:
        self.values, self.place = values, place

    def refused(self, key: str, expected: str, advice: str = "") -> CheckpointError:
        """The error for a value that is not read."""
        advice = advice or "Take another release of the model, or its unquantized checkpoint"
        return CheckpointError(f"{self.place}: {key!r} is {self.values.get(key)!r:.200}, expected {expected}. {advice}")

    def choice(self, key: str, choices: Iterable[Any], default: Any = None) -> Any:
        """One of `choices`; `default` stands for absence and null."""
        value = self.values.get(key)
        value = default if value is None else value
        if isinstance(value, str):
            value = value.lower()
        if not any(type(value) is type(each) and value == each for each in choices):
            raise self.refused(key, f"one of {', '.join(map(repr, choices))}")
        return value

    def switch(self, key: str, default: bool) -> bool:
        return self.choice(key, (True, False), default)

    def group(self, key: str = "group_size", default: int | None = None) -> int | None:
        """How many columns share a scale; -1 stands for a whole row, here None."""
        value = self.values.get(key)
        value = default if value is None else value
        if value == -1:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 1 << 20:
            raise self.refused(key, "a whole number from 1 on, or -1 for a whole row")
        return value

    def block(self, key: str) -> tuple[int, int]:
        """Rows and columns that share a scale, as a list or as in "128x128"."""
        value = self.values.get(key)
        if isinstance(value, str) and re.fullmatch(r"\d{1,6}x\d{1,6}", value):
            value = [int(size) for size in value.split("x")]
        if not isinstance(value, list | tuple) or len(value) != 2 or not all(type(s) is int and s > 0 for s in value):
            raise self.refused(key, "two whole numbers")
        return value[0], value[1]

    def names(self, key: str) -> tuple[str, ...]:
        """A list of names or patterns; absence and null are an empty one."""
        value = self.values.get(key)
        if value is None:
            return ()
        if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
            raise self.refused(key, "a list of names")
        return tuple(value)

    def inner(self, key: str) -> Settings:
        """The object under `key`; absence and null are an empty one."""
        value = {} if self.values.get(key) is None else self.values[key]
        if not isinstance(value, dict):
            raise self.refused(key, "an object")
        return Settings(value, f"{self.place}: {key}")

    def pattern(self, text: str) -> re.Pattern[str]:
        """A regular expression of the file, compiled."""
        try:
            if len(text) > _LONGEST_PATTERN:
                raise re.error("it is too long")
            return re.compile(text)
        except (re.error, RecursionError, OverflowError) as error:
            raise CheckpointError(
                f"{self.place}: {text!r:.200} is no regular expression ({error}). Copy the file anew from its source"
            ) from error


def in_decoder(name: str) -> bool:
    """Whether a module is part of a decoder's layer: what methods quantize that list only exceptions."""
    return encoder_prefix(name) is None and re.search(r"(^|\.)(layers\.\d+|midlayer)\.", name) is not None


def column_order(tensors: LinearTensors, ending: str, group: int | None) -> np.ndarray | None:
    """The order, from the group of each column (`ending`, int32 [K]), int32 [K] in which groups are together, stable;
    None where they are already. Raises CheckpointError for groups out of range or of another size."""
    columns = tensors.shape[1]
    of_column = tensors.integers(ending).astype(np.int64)
    size = group or columns
    groups = -(-columns // size)
    tensors.check(ending, (of_column >= 0) & (of_column < groups), of_column, f"groups from 0 to {groups - 1}")
    counts = np.bincount(of_column, minlength=groups)
    if (counts != size).any():
        wrong = int(np.flatnonzero(counts != size)[0])
        raise tensors.error(ending, f"{counts[wrong]} columns of group {wrong}", f"{size} of each group")
    if np.array_equal(of_column, np.arange(columns) // size):
        return None
    return np.argsort(of_column, kind="stable").astype(np.int32)
