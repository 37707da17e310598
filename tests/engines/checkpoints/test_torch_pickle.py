"""Pickles that mean harm or nothing: what a file of PyTorch's may hold, and what is refused."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from torch_pickles import GOOD_STATE, archive, numbers, refusal, state, storage, tensor, text

from edgellm.engines.checkpoints import torch_pickle
from edgellm.engines.checkpoints.torch_pickle import read_pickle
from edgellm.engines.errors import CheckpointError


class _Runs:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self._made = function, arguments

    def __reduce__(self) -> Any:
        return self._made


@pytest.mark.parametrize("protocol", range(6))
def test_a_call_is_refused_and_not_made(tmp_path: Path, protocol: int) -> None:
    """The harmful file does harm to whoever unpickles it, which shows that the test can tell."""
    trace = tmp_path / "trace"
    for index, value in enumerate((_Runs(os.system, f"touch {trace}"), _Runs(eval, f"open({str(trace)!r}, 'w')"))):
        data = pickle.dumps({"w": value}, protocol)
        pickle.loads(data)
        assert trace.exists()
        trace.unlink()
        message = refusal(archive(tmp_path / f"{index}.bin", data))
        assert not trace.exists()
        if protocol >= 2:
            assert (
                "'posix.system'" if index == 0 else "'builtins.eval'" if protocol > 2 else "'__builtin__.eval'"
            ) in (message)
            assert "A pickle can run code" in message


REFUSED_NAMES = [
    "os\nsystem",
    "builtins\neval",
    "builtins\ngetattr",
    "torch.hub\nload",
    "torch\nload",
    "torch.storage\n_load_from_bytes",
    "torch._utils\n_rebuild_tensor_v2.__globals__",
    "torch\nFloatStorage.from_file",
    "collections\nOrderedDict.__init__",
    "numpy\nFloatStorage",
    "torch._utils\n_rebuild_sparse_tensor",
    "__torch__\nModel",
    "\n",
]


@pytest.mark.parametrize("name", REFUSED_NAMES)
@pytest.mark.parametrize("by_stack", [False, True])
def test_every_other_name_is_refused(tmp_path: Path, name: str, by_stack: bool) -> None:
    module, member = name.split("\n")
    named = text(module) + text(member) + b"\x93" if by_stack else b"c" + name.encode() + b"\n"
    message = refusal(archive(tmp_path / "x.bin", state(named)))
    assert f"refers to '{module}.{member}', which is neither a tensor nor a part of one" in message


ORDERED = b"ccollections\nOrderedDict\n"
REFUSED_PICKLES: dict[str, tuple[bytes, str]] = {
    "INST": (b"(ios\nsystem\n.", "instruction INST"),
    "OBJ": (b"(" + ORDERED + b"o.", "instruction OBJ"),
    "NEWOBJ": (ORDERED + b")\x81.", "instruction NEWOBJ"),
    "NEWOBJ_EX": (ORDERED + b")}\x92.", "instruction NEWOBJ_EX"),
    "EXT1": (b"\x82\x01.", "instruction EXT1"),
    "EXT2": (b"\x83\x01\x00.", "instruction EXT2"),
    "EXT4": (b"\x84\x01\x00\x00\x00.", "instruction EXT4"),
    "PERSID": (b"P0\n.", "instruction PERSID"),
    "unknown instruction": (b"\xff.", "at position 2, opcode b'\\xff' unknown"),
    "BUILD with __setstate__": (ORDERED + b")R}" + text("__setstate__") + text("x") + b"sb.", "sets attributes"),
    "BUILD of slots": (ORDERED + b")RN}" + text("items") + text("x") + b"s\x86b.", "sets attributes"),
    "BUILD on a function": (ORDERED + b"}b.", "sets attributes"),
    "call of text": (text("os.system") + b")R.", "calls what is not a function"),
    "call of a storage class": (b"ctorch\nFloatStorage\n)R.", "with arguments that PyTorch never saves"),
    "dictionary of pairs": (ORDERED + b"]" + text("a") + text("b") + b"\x86a\x85R.", "PyTorch never saves"),
    "parameter of text": (b"ctorch._utils\n_rebuild_parameter\n" + text("x") + b"\x85R.", "PyTorch never saves"),
    "not a storage": (storage(tag="module") + b".", "not a storage"),
    "storage of a function": (storage(kind=ORDERED) + b".", "as PyTorch does not"),
    "storage of text": (storage(kind=text("FloatStorage")) + b".", "as PyTorch does not"),
    "negative storage": (storage(count=-1) + b".", "said to have -1 elements"),
    "huge storage": (storage(count=1 << 62) + b".", "said to have 4611686018427387904 elements"),
    "storage in two types": (storage() + storage(kind=b"ctorch\nHalfStorage\n") + b".", "twice, and not alike"),
    "tensor without storage": (tensor(text("0")) + b".", "as PyTorch does not"),
    "tensor without dtype": (tensor(storage(count=24, kind=b"ctorch\nUntypedStorage\n")) + b".", "has no dtype"),
    "negative offset": (tensor(storage(), offset=-1) + b".", "whole numbers from 0 on"),
    "negative extent": (tensor(storage(), shape=(-2, 3)) + b".", "whole numbers from 0 on"),
    "negative stride": (tensor(storage(), offset=5, strides=(-3, -1)) + b".", "whole numbers from 0 on"),
    "huge number": (tensor(storage(), offset=1 << 100) + b".", "whole numbers from 0 on"),
    "offset out of range": (tensor(storage(), offset=1) + b".", "leaves its storage '0' of 6 elements"),
    "empty beyond its storage": (tensor(storage(), offset=7, shape=(0, 3)) + b".", "leaves its storage '0' of 6"),
    "stride out of range": (tensor(storage(), strides=(4, 1)) + b".", "leaves its storage '0' of 6 elements"),
    "shape out of range": (tensor(storage(), shape=(3, 3)) + b".", "leaves its storage '0' of 6 elements"),
    "more strides than extents": (tensor(storage(), strides=(3, 1, 1)) + b".", "whole numbers from 0 on"),
    "beyond any memory": (tensor(storage(), shape=(1 << 40, 1 << 40), strides=(0, 0)) + b".", "larger than any memory"),
    "rank 33": (tensor(storage(), shape=(1,) * 33, strides=(1,) * 33) + b".", "whole numbers from 0 on"),
    "long number": (b"\x8a\xff" + b"\x01" * 255 + b".", "a number of 255 bytes"),
    "name twice": (b"}" + (text("w") + b"Ns") * 2 + b".", "sets 'w' twice"),
    "tuple as name": (b"})Ns.", "a tuple as key"),
    "odd items": (b"}(" + text("w") + b"u.", "sets items of what is not a dictionary"),
    "unknown memo": (b"h\x07.", "refers to value 7"),
    "empty stack": (b"R.", "takes a value where there is none"),
    "value behind a mark": (b"N(\x85.", "takes a value where there is none"),
    "no mark": (b"t.", "closes what it did not open"),
    "text beyond the end": (b"X\xff\xff\xff\xff.", "truncated"),
    "text not UTF-8": (b"X\x01\x00\x00\x00\xff.", "can't decode byte 0xff"),
    "half of a pair": (b"X\x03\x00\x00\x00\xed\xa0\x80.", "surrogates not allowed"),
    "no end": (b"N", "truncated"),
    "name without end": (b"cos\nsystem", "no newline found"),
    "append to a tuple": (b")Na.", "not a list"),
}


@pytest.mark.parametrize("case", REFUSED_PICKLES)
def test_pickles_that_are_no_tensors_are_refused(tmp_path: Path, case: str) -> None:
    program, cause = REFUSED_PICKLES[case]
    message = refusal(archive(tmp_path / "x.bin", b"\x80\x02" + program))
    assert cause in message and "Nothing of it was run or converted" in message


def test_values_that_contain_themselves_end(tmp_path: Path) -> None:
    itself = b"\x80\x02}q\x00" + text("w") + b"h\x00s."
    assert "the keys 'w'" in refusal(archive(tmp_path / "itself.bin", itself))
    deep = b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b"."
    assert "holds a list" in refusal(archive(tmp_path / "deep.bin", deep))
    deep_in_a_shape = b")" + b"\x85" * 100_000
    broken = GOOD_STATE.replace(numbers((2, 3)), deep_in_a_shape)
    assert "has the shape a nested tuple" in refusal(archive(tmp_path / "shape.bin", broken))


def test_endless_programs_are_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_pickle, "MOST_INSTRUCTIONS", 100)
    assert read_pickle(b"N" * 99 + b".", "x") == (None, 100)
    with pytest.raises(CheckpointError, match="more than 100 instructions"):
        read_pickle(b"N" * 100 + b".", "x")
