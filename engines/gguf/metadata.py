"""The metadata of a GGUF file, read without trust, and what of it all architectures share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edgellm.engines.errors import CheckpointError
from edgellm.engines.formats.gguf_file import GgufFile, Texts
from edgellm.engines.formats.safetensors_file import TensorInfo, brief
from edgellm.engines.formats.strict_formats import LARGEST_SIZE, is_number, is_whole
from edgellm.engines.formats.tensors import STORAGE

_SMALL_BYTES = 1 << 16
#: What to do about a file that says what cannot be.
ADVICE = "Take another release of this model, made by llama.cpp's own tools"


class Metadata:
    """What the first of a model's `files` says; keys without a "." before them are those of the architecture."""

    def __init__(self, files: Sequence[GgufFile]) -> None:
        self.path: Path = files[0].path
        self._values = dict(files[0].metadata)
        self.tensors: Mapping[str, TensorInfo] = {name: info for file in files for name, info in file.tensors.items()}
        self.architecture = self.text("general.architecture") or ""

    def get(self, key: str) -> Any:
        """The value as it is; None where there is none. Numbers of 32 bits are those that are written the shortest:
        1e-05, not what 32 bits hold of it."""
        value = self._values.get(self._full(key))
        if isinstance(value, Texts):
            self._values[self._full(key)] = value = value.read()
        return _shortest(value)

    def text(self, key: str) -> str | None:
        """A text; CheckpointError for anything else."""
        return self._checked(key, lambda value: isinstance(value, str), "a text")

    def flag(self, key: str) -> bool | None:
        return self._checked(key, lambda value: isinstance(value, bool), "true or false")

    def number(self, key: str) -> float | None:
        """A finite number; None where there is none."""
        return self._checked(key, is_number, "a finite number")

    def whole(self, key: str) -> int | None:
        """A whole number from 0 on; None where there is none."""
        return self._checked(key, is_whole, f"a whole number from 0 to {LARGEST_SIZE}")

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number from 0 on, which must be there unless there is a default."""
        value = self.whole(key)
        value = default if value is None else value
        if value is None:
            raise self.error(key, None, f"a whole number from 0 to {LARGEST_SIZE}")
        return value

    def entries(self, key: str, kind: type, words: str) -> list[Any]:
        """A list of values of a type, in `words`; empty where there is none."""
        values = self._checked(key, lambda value: isinstance(value, list), f"a list of {words}") or []
        if set(map(type, values)) - {kind}:
            raise self.error(key, next(each for each in values if type(each) is not kind), words)
        return values

    def numbers(self, key: str) -> list[float]:
        """A list of numbers, as `get` gives them; empty where there is none."""
        return [_shortest(each) for each in self.entries(key, float, "numbers")]

    def flags(self, key: str) -> list[bool]:
        """A list of true or false; empty where there is none."""
        return self.entries(key, bool, "true or false")

    def layer_types(self) -> list[str] | None:
        """Which layers look back on a window, by their published names; None where the file does not say."""
        pattern = self.flags("attention.sliding_window_pattern")
        return [attends(not each, "sliding") for each in pattern] or None

    def sections(self) -> dict[str, list[int]]:
        """Of an embedding at positions in time, height and width how many frequencies follow each, by its published
        name; nothing of others."""
        found = self.entries("rope.dimension_sections", int, "whole numbers")[:3]
        return {"mrope_section": found} if any(found) else {}

    def of_layers(self, key: str) -> list[int]:
        """A whole number for each layer, of a list or one for all."""
        value, layers = self.get(key), self.count("block_count")
        if isinstance(value, list):
            if len(value) != layers or not all(map(is_whole, value)):
                raise self.error(key, value, f"a whole number for each of {layers} layers")
            return value
        return [self.count(key)] * min(layers, 1)

    def same_in_all(self, key: str) -> int | None:
        """What a key says of all layers alike, but for those that have none; None where it is not there."""
        if self.get(key) is None:
            return None
        values: set[int] = set(self.of_layers(key))
        values -= {0} if len(values) > 1 else set()
        if len(values) != 1:
            raise self.error(key, sorted(values), "the same in every layer")
        return values.pop()

    def key_value_heads(self) -> int | None:
        """Those of the layers that have attention; as many as heads of queries where the file says nothing."""
        if self.get("attention.head_count_kv") is None:
            return self.same_in_all("attention.head_count")
        return max(self.of_layers("attention.head_count_kv"), default=0)

    def dtype(self, packed: str = "float16") -> str:
        """The dtype that the model computes in: that of most of its matrices, or what it is where these are
        `packed`."""
        sizes: Counter[str] = Counter()
        for info in self.tensors.values():
            sizes[info.dtype] += info.nbytes if len(info.shape) > 1 else 0
        most = sizes.most_common(1)[0][0] if sizes else ""
        return most if most in STORAGE else packed

    def has(self, *tensors: str) -> bool:
        return not self.tensors.keys().isdisjoint(tensors)

    def values(self, tensor: str, files: Sequence[GgufFile]) -> np.ndarray | None:
        """A small tensor of float32 as it is; None where there is none."""
        info = self.tensors.get(tensor)
        if info is None:
            return None
        if info.dtype != "float32" or info.nbytes > _SMALL_BYTES:
            raise CheckpointError(
                f"{info.file}: tensor {tensor!r} has the type {info.dtype} and {info.nbytes:,} bytes, expected float32 "
                f"and at most {_SMALL_BYTES:,}. {ADVICE}"
            )
        file = next(each for each in files if each.path == info.file)
        return file.bytes_of(info).view("<f4").reshape(info.shape)

    def error(self, key: str, found: Any, expected: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {self._full(key)!r} is {brief(found)}, expected {expected}. {ADVICE}")

    def _full(self, key: str) -> str:
        return key if key.startswith(("general.", "tokenizer.")) else f"{self.architecture}.{key}"

    def _checked(self, key: str, is_valid: Callable[[Any], bool], words: str) -> Any:
        value = self.get(key)
        if value is not None and not is_valid(value):
            raise self.error(key, value, words)
        return value


def attends(to_all: bool, otherwise: str) -> str:
    """The published name of a layer that attends to all tokens, or `otherwise`."""
    return f"{'full' if to_all else otherwise}_attention"


def _shortest(value: Any) -> Any:
    if isinstance(value, float) and float(np.float32(value)) == value:
        return float(str(np.float32(value)))
    return value
