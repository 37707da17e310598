"""Which files of a directory hold a checkpoint's weights, and what a directory without any is."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

from edgellm.engines.errors import CheckpointError
from edgellm.engines.formats.gguf_file import MAGIC
from edgellm.engines.formats.safetensors_file import COPY_AGAIN, FETCH_FILE, LFS_POINTER, SafetensorsFile
from edgellm.engines.formats.small_files import size_limit
from edgellm.engines.formats.strict_formats import JSONObject
from edgellm.engines.gguf.weights import GgufWeights, open_gguf_weights
from edgellm.kernels.user_paths import printable

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
#: A GGUF file, where it is the only one; of several the first.
GGUF_FILE, _FIRST_GGUF_FILE = "model.gguf", "model-00001-of-?????.gguf"
#: Beside it the vision encoder, where that is in GGUF, too.
ENCODER_FILE = "model.mmproj.gguf"
#: In an engine directory the head, where it was packed when the directory was built.
HEAD_FILE = "head.safetensors"
#: In the folder of a draft that ships with the model, which ids of the model's vocabulary it has.
VOCABULARY_FILE = "vocabulary.safetensors"

#: In bytes; what Linux allows.
_LONGEST_FILE_NAME = 255
PICKLE_ENDINGS = (".bin", ".pt", ".pth", ".ckpt")
_CONVERSION = (
    "Convert them, without PyTorch and without running what the files say: edgellm convert {source} NEW_DIR, then "
    "build from NEW_DIR"
)


#: A file of a checkpoint, open.
WeightFile = SafetensorsFile | GgufWeights


def open_weight_files(path: Path) -> Sequence[WeightFile]:
    """The one file of weights, or the several of an index or by their names; CheckpointError where there are none."""
    if _is_there(path / SINGLE_FILE):
        return [SafetensorsFile(path / SINGLE_FILE)]
    if _is_there(path / INDEX_FILE):
        return _open_shards(path)
    if gguf := [file for pattern in (GGUF_FILE, _FIRST_GGUF_FILE) for file in path.glob(pattern)]:
        encoder = open_gguf_weights(path / ENCODER_FILE) if _is_there(path / ENCODER_FILE) else []
        return [*open_gguf_weights(gguf[0]), *encoder]
    raise _no_weights(path)


def _open_shards(path: Path) -> list[SafetensorsFile]:
    """Open every shard that the index names and check that both agree."""
    index, paths = indexed_files(path / INDEX_FILE)
    with ExitStack() as opened:
        files = [opened.enter_context(closing(SafetensorsFile(shard))) for shard in paths]
        places, weight_map = tensor_places({file.path: file.tensors for file in files}), index.get("weight_map", "dict")
        if wrong := [name for name, shard in weight_map.items() if places.get(name) != path / shard]:
            listed = "; ".join(f"{name!r} not in {weight_map[name]}" for name in wrong[:5])
            raise index.error(f"{len(wrong)} tensors are not where 'weight_map' says: {listed}")
        opened.pop_all()
    return files


def indexed_files(path: Path, endings: tuple[str, ...] = (".safetensors",)) -> tuple[JSONObject, list[Path]]:
    """An index, as `read_index` gives it, and the files that it names; CheckpointError where one is missing."""
    index = read_index(path, endings)
    shards = sorted(set(index.get("weight_map", "dict").values()))
    if missing := [shard for shard in shards if not _is_there(path.parent / shard)]:
        raise index.error(f"{len(missing)} of {len(shards)} files are missing: {', '.join(missing)}")
    return index, [path.parent / shard for shard in shards]


def tensor_places(files: Mapping[Path, Iterable[str]]) -> dict[str, Path]:
    """The file of each tensor, of the tensors' names by file; CheckpointError for one that is in several."""
    places: dict[str, Path] = {}
    for file, names in files.items():
        for name in names:
            if name in places:
                raise CheckpointError(
                    f"{file}: tensor {name!r:.80} is in {places[name].name} too; which one is meant is unknown. "
                    "Remove one"
                )
            places[name] = file
    return places


def read_index(path: Path, endings: tuple[str, ...] = (".safetensors",)) -> JSONObject:
    """The index of several files of weights, whose `weight_map` has a file name for each tensor; CheckpointError."""
    index = JSONObject.read(path, CheckpointError, "Copy it from the checkpoint's source", size_limit(path.name))
    weight_map = index.get("weight_map", "dict")
    for name, shard in weight_map.items():
        if not is_shard_name(shard, endings):
            expected = f"expected the name of a {' or '.join(endings)} file in the directory"
            raise index.error(f"'weight_map' puts {name!r:.80} into {shard!r:.80}, {expected}")
    if not weight_map:
        raise index.error("'weight_map' is empty, expected a file name for each tensor")
    return index


def _is_there(path: Path) -> bool:
    """Whether the directory has the entry, be it a link that leads nowhere: opening it says so."""
    return path.exists() or path.is_symlink()


def is_shard_name(name: Any, endings: tuple[str, ...] = (".safetensors",)) -> bool:
    """Whether one of several files of weights may be called so: the name must not lead out of the directory."""
    return (
        isinstance(name, str)
        and name.endswith(endings)
        and not name.startswith(".")
        and name.isprintable()
        and not any(character in name for character in "/\\:")
        and len(name.encode()) <= _LONGEST_FILE_NAME
    )


def _no_weights(path: Path) -> CheckpointError:
    names = sorted(printable(file.name) for file in path.iterdir())
    pickled = [name for name in names if name.endswith(PICKLE_ENDINGS)]
    others = [name for name in names if name.endswith((".safetensors", ".gguf"))]
    message = f"{path} has neither {SINGLE_FILE} nor {INDEX_FILE}"
    if pickled:
        return CheckpointError(
            f"{message}, only pickled weights ({', '.join(pickled[:5])}). {_CONVERSION.format(source=path)}"
        )
    found = f"it has {', '.join(others[:5])}" if others else "and no other weights"
    return CheckpointError(f"{message}; {found}. Expected a checkpoint in the layout of Hugging Face")


#: ORG/NAME, as models are named on the Hugging Face Hub.
HUB_NAME = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*"


def foreign_model(path: Path) -> str | None:
    """A few sentences about a GGUF file, what should be one, a directory of them, or what looks like a name on the Hub;
    None for anything else."""
    beginning = _beginning(path, len(LFS_POINTER))
    if beginning == LFS_POINTER:
        return f"{path} {FETCH_FILE}"
    if beginning is not None and path.suffix.lower() == ".gguf" and not beginning.startswith(MAGIC):
        return f"{path} is no GGUF file: it begins with {beginning[:8]!r}, expected {MAGIC!r}. {COPY_AGAIN}"
    if is_gguf_file(path):
        return f"{path} is a GGUF file. Make an engine directory of it: edgellm build {path} ENGINE_DIR"
    if path.is_dir() and not (path / "config.json").exists() and any(path.glob("*.gguf")):
        listed = ", ".join(sorted(printable(file.name) for file in path.glob("*.gguf"))[:5])
        return f"{path} is a directory of GGUF files ({listed}). Name one of them: edgellm build FILE ENGINE_DIR"
    name = str(path)
    if re.fullmatch(HUB_NAME, name, re.ASCII) and not path.parent.exists():
        return (
            f"{name} does not exist here. If it is the name of a model on the Hugging Face Hub: edgellm build {name} "
            "ENGINE_DIR makes an engine directory of it, and chat, generate, serve and bench take it as it is"
        )
    return None


def is_gguf_file(path: Path) -> bool:
    """Whether a path leads to a file that begins as GGUF files do."""
    return _beginning(path, len(MAGIC)) == MAGIC


def _beginning(path: Path, length: int) -> bytes | None:
    """The first bytes of a file; None where there is none that can be read."""
    with suppress(OSError):
        if path.is_file():  # opening a pipe would wait for ever
            with path.open("rb") as file:
                return file.read(length)
    return None
