"""What a kernel takes is declared once, in a method of a `Protocol`; checks, CUDA structs and packing follow from it.

An array is declared by its axes and dtype, `Annotated[OwnArray, "BT int32"]`; what belongs together is a bundle, a
NamedTuple of such fields. A letter names an axis, which has one size in all arguments of a call; a digit is an axis of
just that size. "compute" is the dtype of the model's activations (float16 or bfloat16 on the GPU, float32 on NumPy),
one in all arguments; "rows" is that, or int8; "mixed" is that, or float32; "any" is whatever comes. Records, several
numbers of their own dtypes each, are declared by a class whose annotated fields name these, `Annotated[OwnArray,
"S record", Settings]`: memory holds them as words, [S, K] uint32, kernels see the struct, twins a structured dtype
(`record_dtype`). Wrong shapes, dtypes and limits raise `KernelError` that names the argument, what was found and what
was expected.

Kernels take everything as one struct by value, in 64-bit words: the arguments in their order, then the sizes of the
axes, called by their letters. `cuda_header` writes these structs for the compiler. Launchers and twins name the
arguments alone where these are many: their types stand in the contract, and so does what each method is for.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import numpy as np

from edgellm.kernels.arrays import ITEM_SIZES, DeviceArray
from edgellm.kernels.errors import KernelError

#: The most rows of a launch that are not on the first axis of its grid.
MAXIMUM_ROWS = 65_535

#: What "compute" may be; NumPy holds bfloat16 as its uint16 bits.
COMPUTE_DTYPES = ("float32", "float16", "bfloat16")

#: Axes that may be empty: a request may have no prompt tokens to count, an engine may read no mask, a tensor be empty,
#: a model without a draft put out no features.
_MAY_BE_EMPTY = frozenset("NLF")
_CUDA_TYPES = {
    "float32": "float*",
    "int32": "int*",
    "uint32": "unsigned*",
    "int64": "long long*",
    "uint64": "unsigned long long*",
    "uint8": "unsigned char*",
    "bool": "unsigned char*",
    "compute": "char*",
    "rows": "char*",
    "mixed": "char*",
    "any": "char*",
}
_NUMBERS = {bool: "unsigned", int: "int", float: "double"}

Rule = Callable[[dict[str, Any]], str | None]
_Method = TypeVar("_Method", bound=Callable)
_Bundle = TypeVar("_Bundle", bound=tuple)


class _Field(NamedTuple):
    """An array (with axes) or a number of a bundle, or of a method where `name` has no dot."""

    name: str
    axes: tuple[str, ...]
    dtype: str  # or the CUDA type of a number
    record: type | None = None  # what the words are


class _Parameter(NamedTuple):
    name: str
    bundle: type | None
    fields: tuple[_Field, ...]  # one, but for a bundle
    optional: bool = False


def limited(rule: Rule) -> Callable[[_Method], _Method]:
    """Let a method's arguments be checked by `rule`, which gets what `Contracts` finds and says what is wrong."""

    def mark(method: _Method) -> _Method:
        method.rule = rule  # type: ignore[attr-defined]
        return method

    return mark


class Contract:
    """What one kernel takes, read from the annotations of a protocol's method."""

    def __init__(self, method: Callable) -> None:
        self.name: str = method.__name__
        self.rule: Rule | None = getattr(method, "rule", None)
        hints = get_type_hints(method, include_extras=True)
        hints.pop("return", None)
        self.parameters = tuple(_parameter(name, annotation) for name, annotation in hints.items())
        axes = (axis for parameter in self.parameters for field in parameter.fields for axis in field.axes)
        self.letters = tuple(dict.fromkeys(axis for axis in axes if axis.isalpha()))

    @property
    def cuda_struct(self) -> str:
        """Source of the struct, `ArgmaxArguments` for `argmax`."""
        lines = []
        for parameter in self.parameters:
            if parameter.bundle is not None:
                lines.append(f"    {parameter.bundle.__name__} {parameter.name};")
            else:
                lines += [_cuda_member(field, field.name) for field in parameter.fields]
        types = {"N": "unsigned long long"}  # what a call has of some size or other: it may exceed 2^32
        lines += [f"    alignas(8) {types.get(letter, 'unsigned')} {letter};" for letter in self.letters]
        name = "".join(part.capitalize() for part in self.name.split("_"))
        words = sum(len(parameter.fields) for parameter in self.parameters) + len(self.letters)
        assertion = f'static_assert(sizeof({name}Arguments) == {8 * words}, "not what the host packs");'
        return "\n".join((f"struct {name}Arguments {{", *lines, "};", assertion))


class Contracts:
    """The contracts of a protocol's methods, by name, checked for one kind of arrays: np.ndarray or DeviceArray."""

    def __init__(self, protocol: type, kind: Any) -> None:
        self._contracts, self._kind = _contracts(protocol), kind

    def __call__(self, kernel: str, *arguments: Any) -> dict[str, Any]:
        """Sizes of the axes by letter, and by name numbers and the dtypes of the arrays that are there, if these are of
        this kind and as `kernel` declares them; of what was found right before, nothing is looked at again."""
        kind = self._kind
        on_host = kind is np.ndarray
        found: list[tuple[Any, ...]] = []
        for argument in arguments:
            entries: list[Any] = []
            values: tuple[Any, ...] = argument if isinstance(argument, tuple) else (argument,)
            for value in values:
                if isinstance(value, kind):
                    usable = value.flags.c_contiguous if on_host else value.pointer != 0
                    entries.append((value.shape, value.dtype, usable))
                else:
                    entries.append(value if value is None or isinstance(value, (int, float)) else type(value))
            found.append(tuple(entries))
        return _checked(self._contracts[kernel], kind, tuple(found))

    def pack(self, kernel: str, sizes: dict[str, Any], *arguments: Any) -> ctypes.Array:
        """The struct that `kernel` takes: addresses and numbers of `arguments`, then the sizes that checking gave."""
        contract, words = self._contracts[kernel], []
        for parameter, argument in zip(contract.parameters, arguments, strict=True):
            values = (None,) * len(parameter.fields) if argument is None else argument
            for value in values if isinstance(values, tuple) else (values,):
                words.append(_word(value))
        words += [sizes.get(letter, 0) for letter in contract.letters]
        return (ctypes.c_uint64 * len(words))(*words)


def cuda_header(*protocols: type) -> str:
    """Source of the structs of all bundles and kernels of some protocols."""
    contracts = [contract for protocol in protocols for contract in _contracts(protocol).values()]
    bundles: dict[str, str] = {}

    def add(name: str, members: Sequence[str], *assertions: str) -> None:
        # Guarded, as headers of several protocols may come together.
        guard = f"#ifndef STRUCT_{name}", f"#define STRUCT_{name}"
        text = "\n".join((*guard, f"struct {name} {{", *members, "};", *assertions, "#endif"))
        assert bundles.setdefault(name, text) == text, f"two bundles are called {name}"

    for parameter in (parameter for contract in contracts for parameter in contract.parameters):
        for record in (field.record for field in parameter.fields if field.record is not None):
            dtype, name = record_dtype(record), record.__name__
            members = [f"    {_CUDA_TYPES[dtype[field].name][:-1]} {field};" for field in dtype.names or ()]
            add(name, members, f'static_assert(sizeof({name}) == {dtype.itemsize}, "not what the host writes");')
        if parameter.bundle is not None:
            members = [_cuda_member(field, field.name.partition(".")[2]) for field in parameter.fields]
            add(parameter.bundle.__name__, members)
    structs = dict.fromkeys(contract.cuda_struct for contract in contracts)
    return "\n".join(("#pragma once", *bundles.values(), *structs, ""))


def rows_of(bundle: _Bundle, rows: slice | int) -> _Bundle:
    """The same bundle of some rows of the first axis of its arrays, or of one row, without that axis."""
    return type(bundle)(*(array[rows] for array in bundle))


@lru_cache
def record_dtype(record: type) -> np.dtype:
    """The annotated fields of a class, each at the place that C compilers give it; its size is a number of words."""
    hints = get_type_hints(record, include_extras=True)
    fields = [(name, get_args(hint)[1]) for name, hint in hints.items() if get_origin(hint) is Annotated]
    return np.dtype(fields, align=True)


@lru_cache
def _contracts(protocol: type) -> dict[str, Contract]:
    methods = {name: method for name, method in vars(protocol).items() if callable(method) and name[0] != "_"}
    # Those that say how much memory a kernel needs take no arrays.
    return {name: Contract(method) for name, method in methods.items() if not name.endswith("_size")}


def _parameter(name: str, annotation: Any) -> _Parameter:
    optional = type(None) in get_args(annotation)
    if optional:
        (annotation,) = (option for option in get_args(annotation) if option is not type(None))
    if isinstance(annotation, type) and hasattr(annotation, "_fields"):
        hints = get_type_hints(annotation, include_extras=True)
        fields = (_field(f"{name}.{field}", hints[field]) for field in annotation._fields)
        return _Parameter(name, annotation, tuple(fields), optional)
    return _Parameter(name, None, (_field(name, annotation),), optional)


def _field(name: str, annotation: Any) -> _Field:
    if annotation in _NUMBERS:
        return _Field(name, (), _NUMBERS[annotation])
    _, declared, *records = get_args(annotation)
    axes, dtype = declared.split()
    if not records:
        return _Field(name, tuple(axes), dtype)
    words = record_dtype(records[0]).itemsize // ITEM_SIZES["uint32"]
    return _Field(name, (*axes, str(words)), "uint32", records[0])


def _cuda_member(field: _Field, name: str) -> str:
    if not field.axes:
        return f"    alignas(8) {field.dtype} {name};"
    return f"    {_CUDA_TYPES[field.dtype] if field.record is None else f'{field.record.__name__}*'} {name};"


def _word(value: Any) -> int:
    if isinstance(value, DeviceArray):
        return value.pointer
    if isinstance(value, float):
        return struct.unpack("Q", struct.pack("d", value))[0]
    return value or 0


@lru_cache(maxsize=1024)
def _checked(contract: Contract, kind: type, found: tuple[tuple, ...]) -> dict[str, Any]:
    """Checked once for each combination of shapes, dtypes and numbers, as these repeat with every token."""
    sizes: dict[str, Any] = {}
    compute: str | None = None
    for field, entry in _pairs(contract, found):
        if not field.axes:
            sizes[field.name] = entry
            continue
        if not isinstance(entry, tuple):
            found_kind = entry.__name__ if isinstance(entry, type) else type(entry).__name__
            expected = f"expected a {kind.__name__}, as these kernels work on those"
            raise KernelError(f"{contract.name}: {field.name} is a {found_kind}; {expected}")
        shape, dtype, usable = entry
        _check_shape(contract, field, shape, sizes)
        name = dtype if isinstance(dtype, str) else dtype.name
        name = "bfloat16" if name == "uint16" else name  # whose bits stand on the host
        allowed: tuple[str, ...] = (field.dtype,)
        if field.dtype in ("compute", "rows", "mixed"):
            more = {"rows": ("int8",), "mixed": ("float32",)}.get(field.dtype, ())
            allowed = tuple(dict.fromkeys(((compute,) if compute else COMPUTE_DTYPES) + more))
        if name not in allowed and field.dtype != "any":
            raise KernelError(f"{contract.name}: {field.name} is {name}; expected {' or '.join(map(str, allowed))}")
        if field.dtype == "compute" or (field.dtype == "mixed" and name != "float32"):
            compute = name
        sizes[field.name] = name
        if not usable:
            raise KernelError(
                f"{contract.name}: {field.name} is not C-contiguous or has no memory; pass a contiguous array"
            )
    wrong = contract.rule(sizes) if contract.rule is not None else None
    if wrong is not None:
        raise KernelError(f"{contract.name}: {wrong}")
    return sizes


def _pairs(contract: Contract, found: tuple[tuple, ...]) -> Iterator[tuple[_Field, Any]]:
    """Every declared field with what was given for it; a bundle that may be left out, and is, has none."""
    for parameter, entries in zip(contract.parameters, found, strict=True):
        if entries != (None,) or not parameter.optional:
            yield from zip(parameter.fields, entries, strict=True)


def _check_shape(contract: Contract, field: _Field, shape: tuple[int, ...], sizes: dict[str, Any]) -> None:
    expected = f"{contract.name}: {field.name} has shape {list(shape)}; expected [{', '.join(field.axes)}]"
    if len(shape) != len(field.axes):
        raise KernelError(expected)
    for axis, size in zip(field.axes, shape, strict=True):
        wanted = int(axis) if axis.isdigit() else sizes.setdefault(axis, size)
        if size != wanted or (size == 0 and axis not in _MAY_BE_EMPTY):
            known = ", ".join(f"{letter} = {sizes[letter]}" for letter in contract.letters if letter in sizes)
            raise KernelError(f"{expected} with {known}")
