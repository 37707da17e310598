"""The pickles inside PyTorch's weight files, read by a stack machine that knows tensors and nothing else.

A pickle is a program. This machine runs only the instructions that `torch.save` writes for dictionaries of tensors,
never imports what a pickle names, and calls nothing: a tensor becomes a `TensorView`, the description of a place in a
storage. The instructions are those of the standard library's `pickletools`.
"""

from __future__ import annotations

import math
import pickletools
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from edgellm.engines.errors import CheckpointError
from edgellm.engines.formats.safetensors_file import LARGEST_COUNT, are_counts, brief, is_count

#: The largest pickle that is read, in bytes; the weights themselves lie outside it.
LARGEST_PICKLE = 64 << 20
#: An instruction makes at most one value, so that this bounds the memory too; a tensor takes about 30.
MOST_INSTRUCTIONS = 5_000_000
_LARGEST_LONG = 16
_MARK = object()

_DICTIONARY = ("collections", "OrderedDict")
_TENSOR = ("torch._utils", "_rebuild_tensor_v2")
_PARAMETER = ("torch._utils", "_rebuild_parameter")
_STORAGE_MODULES = ("torch", "torch.storage")


class _Global(NamedTuple):
    """A name that a pickle refers to; it is never looked up."""

    module: str
    name: str


def read_pickle(data: bytes, described: str) -> tuple[Any, int]:
    """Run the pickle that `data` begins with; its value and where it ends.

    The value consists of dict (keys str and int), list, tuple, str, int, float, bool, None and `TensorView`; it may
    contain itself. Raises CheckpointError, which begins with `described`.
    """
    machine = _Machine(data, described)
    return machine.run(), machine.position


class _Machine:
    def __init__(self, data: bytes, described: str) -> None:
        self._data, self.position = data, 0
        self._described = described
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._storages: dict[str, Storage] = {}

    def run(self) -> Any:
        for _ in range(MOST_INSTRUCTIONS):
            code = self._take(1)
            if code == b".":
                return self._pop()
            if code not in _INSTRUCTIONS:
                raise self._refused_instruction(code)
            _INSTRUCTIONS[code](self)
        raise self._error(f"its pickle has more than {MOST_INSTRUCTIONS:,} instructions, more than weights need")

    def _error(self, cause: str) -> CheckpointError:
        return CheckpointError(f"{self._described}: {cause}. Nothing of it was run or converted")

    def _refused_instruction(self, code: bytes) -> CheckpointError:
        name = next((opcode.name for opcode in pickletools.opcodes if opcode.code == code.decode("latin-1")), None)
        if name is None:
            return self._error(f"byte {code[0]} at {self.position - 1:,} is no instruction of a pickle: it is damaged")
        return self._error(
            f"its pickle has the instruction {name}, which files of tensors do not need. A pickle can run code: "
            "take the model from another source, as safetensors where there are any"
        )

    def _take(self, count: int) -> bytes:
        begin = self.position
        if count > len(self._data) - begin:
            raise self._error(f"its pickle is truncated at byte {begin:,}")
        self.position = begin + count
        return self._data[begin : self.position]

    def _number(self, layout: str) -> Any:
        return struct.unpack(layout, self._take(struct.calcsize(layout)))[0]

    def _line(self) -> str:
        for length in range(256):  # names of modules and classes
            if self._take(1) == b"\n":
                return self._decoded(self._data[self.position - 1 - length : self.position - 1])
        raise self._error("its pickle names a global of more than 255 characters")

    def _decoded(self, data: bytes) -> str:
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise self._error(f"its pickle has text that is not UTF-8 ({error.reason})") from None

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _top(self) -> Any:
        if not self._stack or self._stack[-1] is _MARK:
            raise self._error("its pickle takes a value where there is none: it is damaged")
        return self._stack[-1]

    def _pop(self) -> Any:
        value = self._top()
        self._stack.pop()
        return value

    def _pop_to_mark(self) -> list[Any]:
        for index in range(len(self._stack) - 1, -1, -1):
            if self._stack[index] is _MARK:
                values = self._stack[index + 1 :]
                del self._stack[index:]
                return values
        raise self._error("its pickle closes what it did not open: it is damaged")

    def _pops(self, count: int) -> list[Any]:
        return [self._pop() for _ in range(count)][::-1]

    def put(self, index: int) -> None:
        self._memo[index] = self._top()

    def get(self, index: int) -> None:
        if index not in self._memo:
            raise self._error(f"its pickle refers to value {index}, which it did not store: it is damaged")
        self._push(self._memo[index])

    def tuple_of(self, count: int) -> None:
        self._push(tuple(self._pops(count)))

    def number(self, layout: str) -> None:
        self._push(self._number(layout))

    def text(self, layout: str) -> None:
        self._push(self._decoded(self._take(self._number(layout))))

    def long(self) -> None:
        length = self._number("<B")
        if length > _LARGEST_LONG:
            raise self._error(f"its pickle has a number of {length} bytes")
        self._push(int.from_bytes(self._take(length), "little", signed=True))

    def append(self, values: list[Any]) -> None:
        target = self._top()
        if type(target) is not list:
            raise self._error("its pickle appends to what is not a list")
        target.extend(values)

    def set_items(self, values: list[Any]) -> None:
        target = self._top()
        if type(target) is not dict or len(values) % 2:
            raise self._error("its pickle sets items of what is not a dictionary")
        for key, value in zip(values[::2], values[1::2], strict=True):
            if type(key) not in (str, int):
                raise self._error(f"its pickle has a {type(key).__name__} as key of a dictionary, expected a name")
            if key in target:
                raise self._error(f"its pickle sets {key!r:.80} twice; which one is meant is unknown")
            target[key] = value

    def name(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise self._error("its pickle names a global by what is not text")
        is_storage = module in _STORAGE_MODULES and name in STORAGES
        if not is_storage and (module, name) not in (_DICTIONARY, _TENSOR, _PARAMETER):
            raise self._error(
                f"its pickle refers to {f'{module}.{name}'!r:.200}, which is neither a tensor nor a part of one. A "
                "pickle can run code through such names: only plain dictionaries of tensors are converted. Take the "
                "model from another source, or save its state_dict() alone"
            )
        self._push(_Global(module, name))

    def reduce(self) -> None:
        called, arguments = self._pops(2)
        if type(arguments) is not tuple or type(called) is not _Global:
            raise self._error("its pickle calls what is not a function. A pickle can run code: this one was refused")
        if called == _DICTIONARY and arguments == ():
            self._push({})
        elif called == _TENSOR:
            self._push(self._tensor(arguments))
        elif called == _PARAMETER and arguments and type(arguments[0]) is TensorView:
            self._push(arguments[0])
        else:
            raise self._error(f"its pickle calls {called.module}.{called.name} with arguments that PyTorch never saves")

    def build(self) -> None:
        """A state dictionary's attribute `_metadata` (versions of modules) is all that is set, and not needed."""
        state, target = self._pop(), self._top()
        if type(target) is not dict or type(state) is not dict or set(state) - {"_metadata"}:
            raise self._error("its pickle sets attributes of an object, which tensors do not need")

    def persistent(self) -> None:
        identity = self._pop()
        if type(identity) is not tuple or len(identity) not in (5, 6) or identity[0] != "storage":
            raise self._error("its pickle refers to something outside that is not a storage")
        kind, key, location, count = identity[1:5]
        if len(identity) == 6 and identity[5] is not None:
            raise self._error("its storages are views of others, as PyTorch saved before 0.4. Save it anew")
        if type(kind) is not _Global or kind.name not in STORAGES or type(key) is not str or type(location) is not str:
            raise self._error("its pickle describes a storage as PyTorch does not")
        dtype, item_size = STORAGES[kind.name]
        if not is_count(count) or count * item_size > LARGEST_COUNT:
            raise self._error(f"storage {key!r:.40} is said to have {brief(count)} elements")
        storage = Storage(key, dtype, item_size, count)
        if self._storages.setdefault(key, storage) != storage:
            raise self._error(f"storage {key!r:.40} is described twice, and not alike")
        self._push(storage)

    def _tensor(self, arguments: tuple[Any, ...]) -> TensorView:
        if len(arguments) not in (6, 7) or type(arguments[0]) is not Storage:
            raise self._error("its pickle describes a tensor as PyTorch does not")
        storage, offset, shape, strides = arguments[:4]
        if storage.dtype == "untyped":
            raise self._error(f"a tensor lies in storage {storage.key!r:.40}, which has no dtype")
        are_sizes = are_counts(shape, tuple) and are_counts(strides, tuple) and len(shape) == len(strides)
        if not are_sizes or not is_count(offset):
            raise self._error(
                f"a tensor in storage {storage.key!r:.40} has the shape {brief(shape)}, the strides "
                f"{brief(strides)} and the offset {brief(offset)}, expected whole numbers from 0 on"
            )
        if math.prod(max(1, extent) for extent in shape) * storage.item_size > LARGEST_COUNT:
            raise self._error(f"a tensor has the shape {brief(shape)}, larger than any memory")
        last = offset + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
        if offset > storage.count or (0 not in shape and last >= storage.count):
            raise self._error(
                f"a tensor of shape {brief(shape)}, strides {brief(strides)} and offset {offset} leaves its storage "
                f"{storage.key!r:.40} of {storage.count:,} elements"
            )
        return TensorView(storage, offset, shape, strides)


_CONSTANTS = {b"(": _MARK, b")": (), b"N": None, b"\x88": True, b"\x89": False}
_NUMBERS = {b"J": "<i", b"K": "<B", b"M": "<H", b"G": ">d"}
#: By the layout of their lengths; U and T are text of Python 2.
_TEXTS = {b"U": "<B", b"T": "<I", b"X": "<I", b"\x8c": "<B", b"\x8d": "<Q"}
_TUPLES = {b"\x85": 1, b"\x86": 2, b"\x87": 3}
_INSTRUCTIONS: dict[bytes, Callable[[_Machine], Any]] = {
    **{code: partial(_Machine._push, value=value) for code, value in _CONSTANTS.items()},
    **{code: partial(_Machine.number, layout=layout) for code, layout in _NUMBERS.items()},
    **{code: partial(_Machine.text, layout=layout) for code, layout in _TEXTS.items()},
    **{code: partial(_Machine.tuple_of, count=count) for code, count in _TUPLES.items()},
    b"\x80": lambda machine: machine._take(1),  # PROTO
    b"\x95": lambda machine: machine._take(8),  # FRAME
    b"}": lambda machine: machine._push({}),
    b"]": lambda machine: machine._push([]),
    b"\x8a": _Machine.long,
    b"t": lambda machine: machine._push(tuple(machine._pop_to_mark())),
    b"a": lambda machine: machine.append([machine._pop()]),
    b"e": lambda machine: machine.append(machine._pop_to_mark()),
    b"s": lambda machine: machine.set_items(machine._pops(2)),
    b"u": lambda machine: machine.set_items(machine._pop_to_mark()),
    b"q": lambda machine: machine.put(machine._number("<B")),
    b"r": lambda machine: machine.put(machine._number("<I")),
    b"\x94": lambda machine: machine.put(len(machine._memo)),  # MEMOIZE
    b"h": lambda machine: machine.get(machine._number("<B")),
    b"j": lambda machine: machine.get(machine._number("<I")),
    b"c": lambda machine: machine.name(machine._line(), machine._line()),
    b"\x93": lambda machine: machine.name(*machine._pops(2)),
    b"R": _Machine.reduce,
    b"b": _Machine.build,
    b"Q": _Machine.persistent,
}


#: PyTorch's classes of storages: the project's name of the dtype, and the bytes of one element.
STORAGES = {
    "DoubleStorage": ("float64", 8),
    "FloatStorage": ("float32", 4),
    "HalfStorage": ("float16", 2),
    "BFloat16Storage": ("bfloat16", 2),
    "LongStorage": ("int64", 8),
    "IntStorage": ("int32", 4),
    "ShortStorage": ("int16", 2),
    "CharStorage": ("int8", 1),
    "ByteStorage": ("uint8", 1),
    "BoolStorage": ("bool", 1),
    "UntypedStorage": ("untyped", 1),
}


@dataclass(frozen=True)
class Storage:
    """A block of `count` elements of one dtype, found under `key`; `item_size` in bytes."""

    key: str
    dtype: str
    item_size: int
    count: int

    @property
    def nbytes(self) -> int:
        return self.count * self.item_size


@dataclass(frozen=True, eq=False)
class TensorView:
    """A tensor: its place in a storage, `offset` and `strides` in elements; all of it lies within the storage."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.storage.item_size
