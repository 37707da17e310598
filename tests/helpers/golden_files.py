"""Golden folders whose random tensors are drawn again where they are read, from a seed that is stored in their place.

A file `NAME.drawn.json` stands for tensors of `NAME.safetensors`: their names, shapes, dtypes and how they are drawn.
Tensors that are stored in `NAME.safetensors` beside it belong to the same file. `NAME.codes.json` says which of these
are differences from codes that are computed again (`golden_codes.py`). `NAME.xz` is the file NAME, packed, as
descriptions and expected values are. A folder of many models is packed as one, `KIND.tar.xz`: what they have in common
is stored once.
Tools that make goldens read them by these functions, too, so that references compute with the bits that tests get.

Of expected values [.., T, V] of which only a share is stored, `share_of`, each token is among them and, where tokens
are eight or more, each row of the last weight. They and all logits are stored with fewer bits, `shortened`.
"""

from __future__ import annotations

import atexit
import io
import json
import lzma
import os
import re
import shutil
import struct
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from golden_codes import Tensors, codes, rounded

GOLDENS = Path(__file__).parents[1] / "goldens"
DRAWN, CODES, WHOLE, PACKED, ARCHIVE = ".drawn.json", ".codes.json", ".safetensors", ".xz", ".tar.xz"
#: What ends the names of logits in `expected.safetensors`.
LOGITS = "logits"
#: What ends the names of values there of which each 8th or 16th is stored.
SHARES = {".eighth": 8, ".sixteenth": 16}
#: Names of what is only compared, within bounds wider than what `shortened` changes; "rows" and "features" without a
#: number are what something else is computed from.
_COMPARED = re.compile(rf".*({LOGITS}|{'|'.join(map(re.escape, SHARES))})|(features|rows)\d+")
#: Of the sum of four numbers of 16 bits: its middle and its standard deviation.
_MIDDLE, _DEVIATION = 131070, 37837.0

#: How values are drawn: {"deviation": of a bell around 0}, or {"range": [low, high]}.
Law = dict[str, Any]


@cache
def golden_folder(kind: str) -> Path:
    """`tests/goldens/KIND` with all its tensors: a copy that lasts as long as this process."""
    place = Path(tempfile.mkdtemp(prefix=f"edgellm-{kind}-"))
    atexit.register(_remove, place, os.getpid())
    archive = GOLDENS / f"{kind}{ARCHIVE}"
    if not archive.exists():
        return copy_with_tensors(GOLDENS / kind, place)
    with tempfile.TemporaryDirectory() as folder:
        open_archive(archive, Path(folder))
        return copy_with_tensors(Path(folder), place)


def _remove(place: Path, process: int) -> None:
    if os.getpid() == process:  # not in one that was forked from it
        shutil.rmtree(place, ignore_errors=True)


def copy_with_tensors(source: Path, target: Path) -> Path:
    """A copy of a folder and of those in it, with all tensors in safetensors files; `target` may be there."""
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        if path.is_dir():
            copy_with_tensors(path, target / path.name)
        elif path.suffix == PACKED:
            (target / path.stem).write_bytes(lzma.decompress(path.read_bytes()))
        else:
            shutil.copy(path, target / path.name)
    for path in target.glob(f"*{CODES}"):
        whole = target / (path.name.removesuffix(CODES) + WHOLE)
        write_tensors(whole, codes(read_tensors(whole), json.loads(path.read_text())), read_metadata(whole))
        path.unlink()
    for path in target.glob(f"*{DRAWN}"):
        whole = target / (path.name.removesuffix(DRAWN) + WHOLE)
        stored, metadata = (read_tensors(whole), read_metadata(whole)) if whole.exists() else ({}, {"format": "pt"})
        write_tensors(whole, draw(json.loads(path.read_text())) | stored, metadata)
        path.unlink()
    if (expected := target / f"expected{WHOLE}").exists():
        tensors = read_tensors(expected)
        stored = [name for name in tensors if Path(name).suffix in SHARES]
        for name in stored:
            dtype, shape, data = tensors.pop(name)
            values = with_gaps(np.frombuffer(data, np.float32).reshape(shape), SHARES[Path(name).suffix])
            tensors[Path(name).stem] = dtype, list(values.shape), values.tobytes()
        if stored:
            write_tensors(expected, tensors, read_metadata(expected))
    return target


def open_archive(archive: Path, folder: Path) -> None:
    """Put what a folder had that was packed as one into `folder`."""
    with tarfile.open(archive) as files:
        for member in files:
            target = folder / member.name
            target.parent.mkdir(parents=True, exist_ok=True)
            content = files.extractfile(member)
            assert content is not None, member.name
            target.write_bytes(content.read())


def write_archive(folder: Path) -> None:
    """Pack a folder as one file in its place, the same bytes for the same files, of which those of a name follow each
    other; those that are packed are unpacked first."""
    for path in folder.rglob(f"*{PACKED}"):
        path.with_suffix("").write_bytes(lzma.decompress(path.read_bytes()))
        path.unlink()
    for path in folder.rglob(f"expected{WHOLE}"):
        tensors, metadata = read_tensors(path), read_metadata(path)
        short = {
            name: (dtype, shape, shortened(data) if dtype == "F32" and _COMPARED.fullmatch(name) else data)
            for name, (dtype, shape, data) in tensors.items()
        }
        write_tensors(path, short, metadata)
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w", format=tarfile.USTAR_FORMAT) as files:
        for path in sorted((path for path in folder.rglob("*") if path.is_file()), key=lambda path: (path.name, path)):
            member = tarfile.TarInfo(str(path.relative_to(folder)))
            member.size = path.stat().st_size
            with path.open("rb") as content:
                files.addfile(member, content)
    folder.with_name(folder.name + ARCHIVE).write_bytes(packed(archive.getvalue()))
    shutil.rmtree(folder)


@contextmanager
def opened(folder: Path) -> Iterator[None]:
    """For a tool that changes a folder: one packed as one file is there meanwhile, and packed again behind it."""
    archive = folder.with_name(folder.name + ARCHIVE)
    if not archive.exists():
        yield
        return
    open_archive(archive, folder)
    yield
    write_archive(folder)


def pack(path: Path) -> None:
    """Store a file of a golden folder packed; `golden_folder` has it as it was."""
    path.with_name(path.name + PACKED).write_bytes(packed(path.read_bytes()))
    path.unlink()


def shortened(data: bytes) -> bytes:
    """Float32 values to the nearest with up to 6 bits fewer: they change by 2^-18 of themselves or by 2^-17 at most,
    whichever is less, and are packed by a fifth shorter."""
    bits = np.frombuffer(data, "<u4").astype(np.uint64)
    exponents = (bits >> 23 & 0xFF).astype(np.int64) - 127
    half = (1 << np.clip(7 - exponents, 0, 6).astype(np.uint64)) >> 1
    return (bits + half & ~(2 * half - np.minimum(half, 1))).astype("<u4").tobytes()


def packed(data: bytes) -> bytes:
    """The shortest of what text, bytes and numbers of 16 and of 32 bits are packed best by."""
    found = []
    for context, position, alignment in ((3, 0, 2), (0, 0, 0), (0, 1, 1), (1, 2, 2), (0, 2, 0)):
        options = {"lc": context, "lp": position, "pb": alignment, "preset": 9 | lzma.PRESET_EXTREME, "nice_len": 273}
        found.append(lzma.compress(data, check=lzma.CHECK_CRC32, filters=[{"id": lzma.FILTER_LZMA2, **options}]))
    return min(found, key=len)


def share_of(shape: Sequence[int]) -> str:
    """Which of `SHARES` of values [.., T, V] is stored: the smallest that has each V, else an eighth."""
    return ".sixteenth" if shape[-2] >= 16 and shape[-1] % 16 == 0 else ".eighth"


def share(values: np.ndarray, each: int) -> np.ndarray:
    """Each 8th or 16th of values [.., T, V]: [.., T, V / each], of token t those of an index that leaves t % each."""
    parts = values.reshape(*values.shape[:-1], -1, each)
    return np.take_along_axis(parts, _places(parts.shape), axis=-1)[..., 0]


def with_gaps(stored: np.ndarray, each: int) -> np.ndarray:
    """float32 [.., T, V] of which `share` is `stored`, the others NaN."""
    parts = np.full((*stored.shape, each), np.nan, np.float32)
    np.put_along_axis(parts, _places(parts.shape), stored[..., None], axis=-1)
    return parts.reshape(*stored.shape[:-1], -1)


def _places(shape: tuple[int, ...]) -> np.ndarray:
    """Which value of each part [.., T, parts, each] is stored."""
    tokens = np.arange(shape[-3]) % shape[-1]
    return np.broadcast_to(tokens[:, None, None], (*shape[:-1], 1))


def largest_difference(found: np.ndarray, expected: np.ndarray) -> float:
    """Of what is found, all of it numbers, to what is expected of it."""
    assert found.shape == expected.shape and np.isfinite(found).all()
    return float(np.nanmax(np.abs(found - expected)))


def draw(description: Mapping[str, Any]) -> Tensors:
    """The tensors of a description, in its order; 64 bits of PCG64 each value, whose stream NumPy keeps as it is.

    What is done with them is exact but for the rounding of float64 and of the dtype: any machine has the same bits.
    """
    generator, tensors = np.random.PCG64(description["seed"]), {}
    for group in description["groups"]:
        for name, shape in group["shapes"].items():
            bits = generator.random_raw(int(np.prod(shape)))
            tensors[name] = group["dtype"], shape, rounded(_values(bits, group), group["dtype"]).tobytes()
    return tensors


def _values(bits: np.ndarray, law: Law) -> np.ndarray:
    """float64 values of uint64 `bits` under a law."""
    if "deviation" in law:
        fields = bits.view(np.uint16).reshape(-1, 4).astype(np.int64)
        return (fields.sum(axis=1) - _MIDDLE) * (law["deviation"] / _DEVIATION)
    low, high = law["range"]
    return low + (bits >> 11).astype(np.float64) * ((high - low) / (1 << 53))


def describe(shapes: Iterable[tuple[str, str, list[int], Law]], seed: int) -> dict[str, Any]:
    """The description of tensors (name, dtype, shape, law), those of one dtype and law a group."""
    groups: dict[str, dict[str, Any]] = {}
    for name, dtype, shape, law in shapes:
        head = {"dtype": dtype, **law}
        groups.setdefault(json.dumps(head), head | {"shapes": {}})["shapes"][name] = list(shape)
    return {"seed": seed, "groups": list(groups.values())}


def write_description(path: Path, description: Mapping[str, Any]) -> None:
    """A line for each tensor."""
    groups = []
    for group in description["groups"]:
        lines = (f"   {json.dumps(name)}: {json.dumps(shape)}" for name, shape in group["shapes"].items())
        head = json.dumps({key: value for key, value in group.items() if key != "shapes"})
        groups.append(f'  {head[:-1]}, "shapes": {{\n' + ",\n".join(lines) + "}}")
    joined = ",\n".join(groups)
    path.write_text(f'{{"seed": {description["seed"]}, "groups": [\n{joined}]}}\n')


def read_tensors(path: Path) -> Tensors:
    """The tensors of a safetensors file, of any dtype, which NumPy need not have."""
    header, body = _header_and_body(path)
    header.pop("__metadata__", None)
    return {name: (each["dtype"], each["shape"], body[slice(*each["data_offsets"])]) for name, each in header.items()}


def read_metadata(path: Path) -> dict[str, str]:
    """The metadata of a safetensors file."""
    return _header_and_body(path)[0].get("__metadata__", {})


def _header_and_body(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def write_tensors(path: Path, tensors: Tensors, metadata: Mapping[str, str] | None = None) -> None:
    """A safetensors file; wide dtypes come first, so that all lie at multiples of their size."""
    wide = sorted(tensors, key=lambda name: -_size(tensors[name][0]))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in wide:
        dtype, shape, data = tensors[name]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + len(data)]}
        end += len(data)
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + b"".join(tensors[name][2] for name in wide))


def _size(dtype: str) -> int:
    return 1 if dtype == "BOOL" or dtype.startswith("F8") else int(dtype.lstrip("BFIUC")) // 8
