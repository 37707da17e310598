"""Kernel contracts: what a declaration says is what is packed and what the compiler is given."""

from __future__ import annotations

import ctypes
from typing import Annotated, NamedTuple, Protocol

import numpy as np
import pytest

from edgellm.kernels.arrays import DeviceArray, OwnArray
from edgellm.kernels.compiler import ModuleSource, compile_module
from edgellm.kernels.contracts import Contract, Contracts, cuda_header, limited, record_dtype
from edgellm.kernels.errors import KernelError


class Pair(NamedTuple):
    first: Annotated[OwnArray, "BT int32"]
    flag: bool
    second: Annotated[OwnArray, "TH compute"]


def even(sizes: dict) -> str | None:
    return "T is odd; expected an even number" if sizes["T"] % 2 else None


class Mixed(Protocol):
    def act(
        self,
        first: Annotated[OwnArray, "B mixed"],
        second: Annotated[OwnArray, "B mixed"],
        last: Annotated[OwnArray, "B compute"],
    ) -> None: ...


class Example(Protocol):
    @limited(even)
    def act(self, pair: Pair, number: int, share: float, last: Pair | None = None) -> None: ...


def array(*shape: int, dtype: str = "int32", pointer: int = 4096) -> DeviceArray:
    return DeviceArray(pointer, shape, dtype)


PAIR = Pair(array(2, 4, pointer=1 << 40), True, array(4, 5, dtype="float16", pointer=1 << 41))


def test_a_struct_is_addresses_numbers_and_sizes_in_the_order_of_the_declaration() -> None:
    check = Contracts(Example, DeviceArray)
    sizes = check("act", PAIR, -3, 0.5, None)
    assert (sizes["B"], sizes["T"], sizes["H"], sizes["number"], sizes["pair.flag"]) == (2, 4, 5, -3, True)
    packed = check.pack("act", sizes, PAIR, -3, 0.5, None)
    half = ctypes.c_uint64.from_buffer(ctypes.c_double(0.5)).value
    assert list(packed) == [1 << 40, 1, 1 << 41, (1 << 64) - 3, half, 0, 0, 0, 2, 4, 5]
    assert [field.name for parameter in Contract(Example.act).parameters for field in parameter.fields][:4] == [
        "pair.first", "pair.flag", "pair.second", "number",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        (PAIR._replace(first=array(2, 3)), r"act: pair.second has shape \[4, 5\]; expected \[T, H\] with B = 2, T = 3"),
        (PAIR._replace(first=array(2, 4, dtype="int64")), "act: pair.first is int64; expected int32"),
        (PAIR._replace(second=array(4, 5)), "pair.second is int32; expected float32 or float16 or bfloat16"),
        (PAIR._replace(second=array(4, 5, dtype="float16", pointer=0)), "pair.second is not C-contiguous or has no"),
        (Pair(array(2, 3), True, array(3, 5, dtype="float16")), "act: T is odd; expected an even number"),
        (PAIR._replace(first=None), "act: pair.first is a NoneType; expected a DeviceArray"),
    ],
)
def test_what_is_not_as_declared_is_refused(pair: Pair, message: str) -> None:
    with pytest.raises(KernelError, match=message):
        Contracts(Example, DeviceArray)("act", pair, 1, 1.0, None)


def test_the_compiler_is_given_structs_of_what_the_host_packs() -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed")
    text = """
#include "own.cuh"
#define PLACE(TYPE, MEMBER) __INTADDR__(&((TYPE*)0)->MEMBER)  // NVRTC 13.0 has no offsetof
static_assert(sizeof(ActArguments) == 88);
static_assert(PLACE(ActArguments, number) == 24 && PLACE(ActArguments, last) == 40);
static_assert(PLACE(ActArguments, B) == 64 && sizeof(Pair) == 24);
__global__ void act(ActArguments a) { a.pair.first[0] = a.number + a.T; }
"""
    headers = (("own.cuh", cuda_header(Example)), ("own.cu", text))
    assert compile_module(ModuleSource("own", ("own.cu",), ("act",), (), headers), "sm_90").code


class Settings:
    bound: Annotated[float, "float32"] = 1.0
    seed: Annotated[int, "uint64"] = 0
    count: Annotated[int, "int32"] = 0
    note: str = ""  # which is no part of the record


class Recorded(Protocol):
    def use(self, rows: Annotated[OwnArray, "S record", Settings], last: Annotated[OwnArray, "S int32"]) -> None: ...


def test_records_are_words_that_host_and_compiler_lay_out_alike() -> None:
    dtype = record_dtype(Settings)
    assert [(name, dtype.fields[name][1]) for name in dtype.names] == [("bound", 0), ("seed", 8), ("count", 16)]
    found = {"S": 3, "rows": "uint32", "last": "int32"}
    assert Contracts(Recorded, np.ndarray)("use", np.zeros((3, 6), np.uint32), np.zeros(3, np.int32)) == found
    with pytest.raises(KernelError, match=r"use: rows has shape \[3, 5\]; expected \[S, 6\]"):
        Contracts(Recorded, DeviceArray)("use", array(3, 5, dtype="uint32"), array(3))
    pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed")
    text = """
#include "own.cuh"
#define PLACE(TYPE, MEMBER) __INTADDR__(&((TYPE*)0)->MEMBER)
static_assert(sizeof(UseArguments) == 24 && sizeof(Settings) == 24);
static_assert(PLACE(Settings, seed) == 8 && PLACE(Settings, count) == 16);
__global__ void use(UseArguments a) { a.last[0] = a.rows[1].count + int(a.rows[1].bound); }
"""
    headers = (("own.cuh", cuda_header(Recorded)), ("own.cu", text))
    assert compile_module(ModuleSource("own", ("own.cu",), ("use",), (), headers), "sm_90").code


def test_a_mixed_array_is_of_the_compute_dtype_or_float32() -> None:
    check = Contracts(Mixed, DeviceArray)
    for dtypes in (("float32", "float16"), ("float16", "float32"), ("float16", "float16"), ("float32", "float32")):
        check("act", *(array(3, dtype=dtype) for dtype in (*dtypes, "float16")))
    with pytest.raises(KernelError, match="act: last is bfloat16; expected float16"):
        check("act", *(array(3, dtype=dtype) for dtype in ("float16", "float32", "bfloat16")))
    with pytest.raises(KernelError, match="act: second is bfloat16; expected float16 or float32"):
        check("act", *(array(3, dtype=dtype) for dtype in ("float16", "bfloat16", "float16")))
