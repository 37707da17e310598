"""The reader of PyTorch's files: those that PyTorch wrote, and files that mean harm."""

from __future__ import annotations

import os
import pickle
import struct
import zipfile
from pathlib import Path

import pytest
from safetensors import safe_open
from torch_pickles import GOOD_STATE, VALUES, archive, folder, number, refusal, state, storage, tensor, text

from edgellm.engines.checkpoints import torch_file
from edgellm.engines.checkpoints.torch_file import TorchFile
from edgellm.engines.errors import CheckpointError

__all__ = ["folder"]  # a fixture

GOOD = ("plain", "dtypes", "bfloat16", "parameters", "strided", "shared", "nested")
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


def test_two_dictionaries_of_tensors_are_refused_with_their_names(folder: Path) -> None:
    assert "the keys 'model', 'model_ema'. Which of them are the weights is unknown" in refusal(
        folder / "ambiguous.bin"
    )


def test_the_assembled_file_is_good(tmp_path: Path) -> None:
    with TorchFile(archive(tmp_path / "good.bin", GOOD_STATE)) as file:
        assert file.elements("w").view("<f4").tolist() == [[0, 1, 2], [3, 4, 5]]


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


def test_compressed_entries_are_refused(tmp_path: Path) -> None:
    path = archive(tmp_path / "x.bin", GOOD_STATE, {"m/data/0": VALUES}, zipfile.ZIP_DEFLATED)
    assert "is compressed, and PyTorch compresses nothing. Repack the archive without" in refusal(path)
    # The size in the local header and in the directory says more than there is.
    lying = archive(tmp_path / "lie.bin", GOOD_STATE, {"m/data/0": VALUES})
    lying.write_bytes(lying.read_bytes().replace(struct.pack("<II", 24, 24), struct.pack("<II", 24, 1 << 20)))
    assert "is compressed" in refusal(lying)


def test_few_values_do_not_become_a_huge_file(tmp_path: Path) -> None:
    repeated = state(tensor(storage(), shape=(1 << 30,), strides=(0,)))
    assert "would take 4,294,967,296 bytes, but only 24 are stored" in refusal(archive(tmp_path / "x.bin", repeated))


def test_truncated_files_are_refused_at_every_length(tmp_path: Path, folder: Path) -> None:
    for name in ("plain", "strided"):
        whole = (folder / f"{name}.bin").read_bytes()
        path = tmp_path / f"{name}.bin"
        for length in range(0, len(whole), 7):
            path.write_bytes(whole[:length])
            refusal(path)


def test_damaged_bytes_raise_nothing_else(tmp_path: Path, folder: Path) -> None:
    """A changed byte is refused, or changes values, or means nothing: never another exception."""
    for name in ("plain", "strided"):
        whole = (folder / f"{name}.bin").read_bytes()
        path, refused = tmp_path / "x.bin", 0
        for position in range(0, len(whole), 7):
            path.write_bytes(whole[:position] + bytes([whole[position] ^ 0xA5]) + whole[position + 1 :])
            try:
                with TorchFile(path) as file:
                    for key in file.tensors:
                        file.elements(key)
            except CheckpointError:
                refused += 1
        assert refused > len(whole) // 70


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    for content in (b"not a pickle", pickle.dumps({"w": [1.0, 2.0]}, 2)):
        path.write_bytes(content)
        assert "no zip archive, as torch.save writes it since PyTorch 1.6" in refusal(path)
    path.write_bytes(b"")
    assert "less than 8 bytes" in refusal(path)
    assert "does not exist" in refusal(tmp_path / "nowhere.bin")
    os.mkfifo(tmp_path / "pipe.bin")
    assert "not a regular file" in refusal(tmp_path / "pipe.bin")
