"""The reader of PyTorch's files: files that PyTorch wrote, and files that mean harm."""

from __future__ import annotations

import os
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from edgellm.engines import torch_file, torch_pickle
from edgellm.engines.errors import CheckpointError
from edgellm.engines.torch_file import TorchFile
from edgellm.engines.torch_pickle import read_pickle

GOOD = ("plain", "dtypes", "bfloat16", "parameters", "strided", "shared", "nested", "legacy", "deflated")
NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}


@pytest.fixture(scope="module")
def folder(repository: Path) -> Path:
    return repository / "tests" / "torch_files"


def raw_safetensors(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Dtype, shape and bytes of each tensor, by the safetensors library alone."""
    from safetensors import deserialize

    return {
        name: (NAMES[e["dtype"]], tuple(e["shape"]), bytes(e["data"])) for name, e in deserialize(path.read_bytes())
    }


@pytest.mark.parametrize("name", GOOD)
def test_what_pytorch_wrote_is_read_bit_for_bit(folder: Path, name: str) -> None:
    expected = raw_safetensors(folder / f"{name}.safetensors")
    with TorchFile(folder / f"{name}.bin") as file:
        found = {
            key: (view.storage.dtype, view.shape, file.elements(key).tobytes()) for key, view in file.tensors.items()
        }
    assert found == expected
    with safe_open(folder / f"{name}.safetensors", "numpy") as opened:
        assert set(found) == set(opened.keys())


def test_sharing_and_what_is_left_out_are_told(folder: Path) -> None:
    with TorchFile(folder / "shared.bin") as file:
        assert file.shared == ["head", "rows"] and file.left_out == []
    with TorchFile(folder / "nested.bin") as file:
        assert file.shared == [] and file.left_out == ["epoch", "loss", "optimizer"]


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        TorchFile(path)
    message = str(caught.value)
    assert str(path) in message
    return message


def test_two_dictionaries_of_tensors_are_refused_with_their_names(folder: Path) -> None:
    assert "the keys 'model', 'model_ema'. Which of them are the weights is unknown" in refusal(
        folder / "ambiguous.bin"
    )


# A pickle of one tensor "w", assembled from its parts. PyTorch writes the same instructions.


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def number(value: int) -> bytes:
    encoded = value.to_bytes((value.bit_length() + 8) // 8, "little", signed=True)
    return b"\x8a" + bytes([len(encoded)]) + encoded


def numbers(values: tuple[Any, ...]) -> bytes:
    return b"(" + b"".join(map(number, values)) + b"t"


def storage(key: str = "0", count: int = 6, kind: bytes = b"ctorch\nFloatStorage\n", tag: str = "storage") -> bytes:
    return b"(" + text(tag) + kind + text(key) + text("cpu") + number(count) + b"tQ"


def tensor(place: bytes, offset: int = 0, shape: tuple[int, ...] = (2, 3), strides: tuple[int, ...] = (3, 1)) -> bytes:
    rest = number(offset) + numbers(shape) + numbers(strides) + b"\x89" + b"ccollections\nOrderedDict\n)R"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + place + rest + b"tR"


def state(value: bytes) -> bytes:
    return b"\x80\x02}" + text("w") + value + b"s."


GOOD_STATE = state(tensor(storage()))
VALUES = struct.pack("<6f", *range(6))


def archive(path: Path, data: bytes, entries: dict[str, bytes] | None = None, compression: int = 0) -> Path:
    with zipfile.ZipFile(path, "w", compression) as packed:
        packed.writestr("m/data.pkl", data)
        for name, content in ({"m/data/0": VALUES} if entries is None else entries).items():
            packed.writestr(name, content)
    return path


def test_the_assembled_file_is_good(tmp_path: Path) -> None:
    with TorchFile(archive(tmp_path / "good.bin", GOOD_STATE)) as file:
        assert file.elements("w").view("<f4").tolist() == [[0, 1, 2], [3, 4, 5]]


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
    "unknown instruction": (b"\xff.", "byte 255 at 2 is no instruction"),
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
    "text not UTF-8": (b"X\x01\x00\x00\x00\xff.", "not UTF-8"),
    "no end": (b"N", "truncated"),
    "endless name": (b"c" + b"a" * 300 + b"\n.", "more than 255 characters"),
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
    assert "has the shape a tuple" in refusal(archive(tmp_path / "shape.bin", broken))


def test_endless_programs_are_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_pickle, "MOST_INSTRUCTIONS", 100)
    assert read_pickle(b"N" * 99 + b".", 0, 100, "x") == (None, 100)
    with pytest.raises(CheckpointError, match="more than 100 instructions"):
        read_pickle(b"N" * 100 + b".", 0, 101, "x")


def test_a_pickle_is_at_most_so_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = archive(tmp_path / "x.bin", GOOD_STATE)
    monkeypatch.setattr(torch_file, "LARGEST_PICKLE", len(GOOD_STATE) - 1)
    assert "m/data.pkl has" in refusal(path)
    monkeypatch.setattr(torch_file, "LARGEST_PICKLE", len(GOOD_STATE))
    TorchFile(path).close()


def other(extra: dict[str, bytes]) -> dict[str, bytes]:
    return {"m/data/0": VALUES, **extra}


REFUSED_ARCHIVES: dict[str, tuple[bytes, dict[str, bytes], str]] = {
    "storage too short": (GOOD_STATE, {"m/data/0": VALUES[:-4]}, "has 20 bytes, 6 elements of float32 take 24"),
    "storage too long": (GOOD_STATE, {"m/data/0": VALUES + b"x"}, "has 25 bytes, 6 elements of float32 take 24"),
    "count is a lie": (state(tensor(storage(count=1 << 40))), {"m/data/0": VALUES}, "has 24 bytes, 1,099,511,627,776"),
    "missing storage": (GOOD_STATE, {"m/data/1": VALUES}, "storage '0' of tensor 'w' is missing"),
    "key leads out": (state(tensor(storage("../0"))), {"m/data/0": VALUES}, "storage '../0' of tensor 'w' is missing"),
    "up": (GOOD_STATE, other({"m/../../etc/passwd": b""}), "leads out of the archive"),
    "absolute": (GOOD_STATE, other({"/etc/passwd": b""}), "leads out of the archive"),
    "backslash": (GOOD_STATE, other({"m\\..\\x": b""}), "leads out of the archive"),
    "two pickles": (GOOD_STATE, other({"n/data.pkl": GOOD_STATE}), "2 entries data.pkl, expected one"),
    "big-endian": (GOOD_STATE, other({"m/byteorder": b"big"}), "byte order b'big', expected little"),
    "TorchScript": (GOOD_STATE, other({"m/constants.pkl": b"\x80\x02)."}), "TorchScript program"),
    "more after the pickle": (GOOD_STATE + b"N.", other({}), "2 bytes follow its pickle"),
    "no dictionary": (b"\x80\x02].", other({}), "holds a list, expected a dictionary of tensors"),
    "empty dictionary": (b"\x80\x02}.", other({}), "has the keys nothing"),
    "number among tensors": (GOOD_STATE[:-1] + text("step") + number(3) + b"s.", other({}), "the keys 'w', 'step'"),
}


@pytest.mark.parametrize("case", REFUSED_ARCHIVES)
def test_archives_that_are_not_as_pytorch_writes_them_are_refused(tmp_path: Path, case: str) -> None:
    data, entries, cause = REFUSED_ARCHIVES[case]
    assert cause in refusal(archive(tmp_path / "x.bin", data, entries))


def test_an_entry_twice_is_refused(tmp_path: Path) -> None:
    path = archive(tmp_path / "x.bin", GOOD_STATE)
    with zipfile.ZipFile(path, "a") as packed, pytest.warns(UserWarning, match="Duplicate name"):
        packed.writestr("m/data/0", b"\0" * 24)
    assert "is there twice" in refusal(path)


def test_entries_that_overlap_are_refused(tmp_path: Path) -> None:
    """Many entries of one and the same bytes, which would make much of a small file."""
    path = tmp_path / "x.bin"
    with zipfile.ZipFile(path, "w") as packed:
        packed.writestr("m/data.pkl", GOOD_STATE)
        packed.writestr("m/data/0", b"\0" * 9000)
        place = packed.getinfo("m/data/0")
        for key in range(1, 9):
            again = zipfile.ZipInfo(f"m/data/{key}")
            again.header_offset, again.CRC = place.header_offset, place.CRC
            again.file_size = again.compress_size = 9000
            packed.filelist.append(again)
            packed.NameToInfo[again.filename] = again
    assert "its entries overlap" in refusal(path)


def test_encrypted_entries_are_refused(tmp_path: Path) -> None:
    path = archive(tmp_path / "x.bin", GOOD_STATE)
    content = bytearray(path.read_bytes())
    content[content.rindex(b"PK\x01\x02") + 8] |= 1  # the flags of the last entry of the directory
    path.write_bytes(content)
    assert "'m/data/0' is encrypted" in refusal(path)


def test_zip_bombs_are_not_inflated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = state(tensor(storage(count=1 << 18), shape=(1 << 18,), strides=(1,)))
    path = archive(tmp_path / "x.bin", data, {"m/data/0": b"\0" * (1 << 20)}, zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 4096
    with TorchFile(path) as file:
        assert not file.elements("w").any()
    monkeypatch.setattr(torch_file, "LARGEST_INFLATED", (1 << 20) - 1)
    assert "said to inflate to 1,048,576 bytes, more than 1,048,575" in refusal(path)
    monkeypatch.undo()
    # The size in the local header and in the directory says less than there is.
    lying = archive(tmp_path / "lie.bin", GOOD_STATE, {"m/data/0": b"\0" * (1 << 20)}, zipfile.ZIP_DEFLATED)
    lying.write_bytes(lying.read_bytes().replace(struct.pack("<I", 1 << 20), struct.pack("<I", 24)))
    with TorchFile(lying) as file, pytest.raises(CheckpointError, match="inflates to more than 24 bytes"):
        file.elements("w")


def test_few_values_do_not_become_a_huge_file(tmp_path: Path) -> None:
    repeated = state(tensor(storage(), shape=(1 << 30,), strides=(0,)))
    assert "would take 4,294,967,296 bytes, but only 24 are stored" in refusal(archive(tmp_path / "x.bin", repeated))


def test_truncated_files_are_refused_at_every_length(tmp_path: Path, folder: Path) -> None:
    for name in ("plain", "legacy"):
        whole = (folder / f"{name}.bin").read_bytes()
        path = tmp_path / f"{name}.bin"
        for length in range(0, len(whole), 7):
            path.write_bytes(whole[:length])
            refusal(path)


def test_damaged_bytes_raise_nothing_else(tmp_path: Path, folder: Path) -> None:
    """A changed byte is refused, or changes values, or means nothing: never another exception."""
    for name in ("plain", "legacy", "deflated"):
        whole = (folder / f"{name}.bin").read_bytes()
        path, refused = tmp_path / "x.bin", 0
        for position in range(0, len(whole), 3):
            path.write_bytes(whole[:position] + bytes([whole[position] ^ 0xA5]) + whole[position + 1 :])
            try:
                with TorchFile(path) as file:
                    for key in file.tensors:
                        file.elements(key)
            except CheckpointError:
                refused += 1
        assert refused > len(whole) // 30


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(b"not a pickle")
    assert "begins neither as a zip archive nor as a pickle" in refusal(path)
    path.write_bytes(pickle.dumps({"w": [1.0, 2.0]}, 2))
    assert "not one that torch.save wrote" in refusal(path)
    path.write_bytes(b"")
    assert "less than 8 bytes" in refusal(path)
    assert "cannot be read" in refusal(tmp_path / "nowhere.bin")
    os.mkfifo(tmp_path / "pipe.bin")
    assert "not a regular file" in refusal(tmp_path / "pipe.bin")


def test_legacy_storages_must_be_as_described(tmp_path: Path) -> None:
    magic = b"\x80\x02" + number(0x1950A86A20F9469CFC6C) + b"."
    system = b"\x80\x02}" + text("little_endian") + b"\x88s."

    def legacy(keys: bytes, data: bytes, version: int = 1001, facts: bytes = system) -> Path:
        path = tmp_path / "x.bin"
        path.write_bytes(magic + b"\x80\x02" + number(version) + b"." + facts + GOOD_STATE + keys + data)
        return path

    keys = b"\x80\x02]" + text("0") + b"a."
    values = struct.pack("<q", 6) + VALUES
    with TorchFile(legacy(keys, values)) as file:
        assert file.elements("w").tobytes() == VALUES
    assert "has 20 bytes" in refusal(legacy(keys, struct.pack("<q", 5) + VALUES[:-4]))
    assert "truncated" in refusal(legacy(keys, struct.pack("<q", -6) + VALUES))
    assert "truncated" in refusal(legacy(keys, struct.pack("<q", 1 << 61) + VALUES))
    assert "1 bytes follow" in refusal(legacy(keys, values + b"x"))
    assert "belongs to no tensor" in refusal(legacy(b"\x80\x02]" + text("1") + b"a.", values))
    assert "is missing" in refusal(legacy(b"\x80\x02].", b""))
    assert "list of different names" in refusal(legacy(b"\x80\x02](" + text("0") * 2 + b"e.", values))
    assert "expected protocol 1001" in refusal(legacy(keys, values, version=1000))
    assert "big-endian" in refusal(legacy(keys, values, facts=system.replace(b"\x88", b"\x89")))
