"""The pickles inside PyTorch's weight files, read by a stack machine that knows tensors and nothing else.

A pickle is a program. This machine runs only the instructions that `torch.save` writes for dictionaries of tensors,
never imports what a pickle names, and calls nothing: a tensor becomes a `TensorView`, the description of a place in a
storage. The standard library's `pickletools` takes the instructions apart.
"""

from __future__ import annotations

import math
import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from edgellm.engines.errors import CheckpointError
from edgellm.engines.formats.safetensors_file import LARGEST_COUNT, TYPES_OF_FILES, are_counts, brief, is_count

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
    return _Machine(described).run(data)


class _Machine:
    def __init__(self, described: str) -> None:
        self._described = described
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._storages: dict[str, Storage] = {}

    def run(self, data: bytes) -> tuple[Any, int]:
        try:
            for number, (instruction, argument, position) in enumerate(pickletools.genops(data)):
                if number >= MOST_INSTRUCTIONS:
                    raise self._error(
                        f"its pickle has more than {MOST_INSTRUCTIONS:,} instructions, more than weights need"
                    )
                if instruction.name == "STOP":
                    return self._pop(), (position or 0) + 1
                if instruction.name not in _INSTRUCTIONS:
                    raise self._error(
                        f"its pickle has the instruction {instruction.name}, which files of tensors do not need. A "
                        "pickle can run code: take the model from another source, as safetensors where there are any"
                    )
                _INSTRUCTIONS[instruction.name](self, argument)
        except ValueError as error:  # of what is no instruction, has no argument, or is text that is not UTF-8
            raise self._error(f"its pickle is damaged or truncated: {error}") from None
        raise AssertionError("instructions end with STOP")

    def _error(self, cause: str) -> CheckpointError:
        return CheckpointError(f"{self._described}: {cause}. Nothing of it was run or converted")

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

    def text(self, text: str) -> None:
        text.encode()  # halves of surrogate pairs are none
        self._push(text)

    def long(self, number: int) -> None:
        if (length := -(-number.bit_length() // 8)) > _LARGEST_LONG:
            raise self._error(f"its pickle has a number of {length} bytes")
        self._push(number)

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


#: By `pickletools`' names; each gets its argument. STRINGs are text of Python 2.
_INSTRUCTIONS: dict[str, Callable[[_Machine, Any], None]] = {
    **dict.fromkeys(("PROTO", "FRAME"), lambda machine, argument: None),
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "BINFLOAT"), _Machine._push),
    **dict.fromkeys(("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINSTRING", "SHORT_BINSTRING"), _Machine.text),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), _Machine.put),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _Machine.get),
    "MARK": lambda machine, argument: machine._push(_MARK),
    "NONE": lambda machine, argument: machine._push(None),
    "NEWTRUE": lambda machine, argument: machine._push(True),
    "NEWFALSE": lambda machine, argument: machine._push(False),
    "LONG1": _Machine.long,
    "EMPTY_DICT": lambda machine, argument: machine._push({}),
    "EMPTY_LIST": lambda machine, argument: machine._push([]),
    "EMPTY_TUPLE": lambda machine, argument: machine._push(()),
    "TUPLE1": lambda machine, argument: machine._push(tuple(machine._pops(1))),
    "TUPLE2": lambda machine, argument: machine._push(tuple(machine._pops(2))),
    "TUPLE3": lambda machine, argument: machine._push(tuple(machine._pops(3))),
    "TUPLE": lambda machine, argument: machine._push(tuple(machine._pop_to_mark())),
    "APPEND": lambda machine, argument: machine.append([machine._pop()]),
    "APPENDS": lambda machine, argument: machine.append(machine._pop_to_mark()),
    "SETITEM": lambda machine, argument: machine.set_items(machine._pops(2)),
    "SETITEMS": lambda machine, argument: machine.set_items(machine._pop_to_mark()),
    "MEMOIZE": lambda machine, argument: machine.put(len(machine._memo)),
    "GLOBAL": lambda machine, argument: machine.name(*argument.split(" ", 1)),
    "STACK_GLOBAL": lambda machine, argument: machine.name(*machine._pops(2)),
    "REDUCE": lambda machine, argument: machine.reduce(),
    "BUILD": lambda machine, argument: machine.build(),
    "BINPERSID": lambda machine, argument: machine.persistent(),
}


#: PyTorch's classes of storages: the project's name of the dtype, and the bytes of one element.
STORAGES: dict[str, tuple[str, int]] = {name: tuple(own) for name, own in TYPES_OF_FILES["torch"].items()}


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
