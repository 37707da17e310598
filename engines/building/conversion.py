"""Pickled PyTorch weights into safetensors: all of it or nothing, and read back before it counts."""

from __future__ import annotations

import hashlib
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from edgellm.engines.checkpoints.torch_file import TorchFile
from edgellm.engines.checkpoints.weight_files import (
    INDEX_FILE,
    PICKLE_ENDINGS,
    SINGLE_FILE,
    indexed_files,
    tensor_places,
)
from edgellm.engines.checkpoints.weights import counted
from edgellm.engines.directories.engine_directory import check_checkpoint_places, published_file_names
from edgellm.engines.errors import CheckpointError, explained
from edgellm.engines.formats.digests import copy_published
from edgellm.engines.formats.safetensors_file import SafetensorsFile
from edgellm.engines.formats.small_files import check_ordinary, size_limit
from edgellm.engines.formats.staged_directory import StagedDirectory, check_space
from edgellm.engines.quantizer import written_layout
from edgellm.kernels.user_paths import printable

#: `progress(stage, done, total)` in bytes; stages are "weights" and "verify".
Progress = Callable[[str, int, int], None]

PICKLED_FILE = "pytorch_model.bin"
PICKLED_INDEX = "pytorch_model.bin.index.json"
#: Files that belong to a model beside those that an engine directory takes along.
_OTHER_FILES = (
    *("tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json", "preprocessor_config.json"),
    "video_preprocessor_config.json",
    *("processor_config.json", "README.md", "LICENSE", "LICENSE.txt"),
)
#: What training programs leave beside the weights.
_NOT_WEIGHTS = re.compile(r"(training_args|optimizer|scheduler|scaler|rng_state).*")


@dataclass
class ConversionReport:
    """What was converted. `nbytes` of the weights; `dtypes` counts tensors; `notes` are what a user should know."""

    path: Path
    tensors: int
    nbytes: int
    files: int
    dtypes: Mapping[str, int]
    copied: Sequence[str]
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)


def convert_checkpoint(
    source: str | Path, target: str | Path, force: bool = False, progress: Progress | None = None
) -> ConversionReport:
    """Convert a directory or one file of pickled weights into the directory `target`, with the model's other files.

    Every tensor is read back and compared by SHA-256 with what was read. With `force` an existing checkpoint is
    replaced, once the new one is complete; whatever goes wrong, Ctrl-C included, nothing is left behind. Weights of
    several files stay in as many. Raises CheckpointError.
    """
    started, progress = time.perf_counter(), progress or (lambda stage, done, total: None)
    source, target = Path(source), Path(target)
    check_checkpoint_places(source, target, force, "converted checkpoint")
    with ExitStack() as stack:
        files, weight_map = _weight_files(source)
        opened = [stack.enter_context(TorchFile(path)) for path in files]
        _check_places(opened, weight_map)
        tensors = [view for file in opened for view in file.tensors.values()]
        copied, total = _files_to_copy(source), sum(view.nbytes for view in tensors)
        needed = total + sum((source / name).stat().st_size for name in copied)
        check_space(target.parent, needed, CheckpointError, "the checkpoint")
        failing = f"{target} was not written, and nothing was left behind"
        with explained(failing, CheckpointError, names_file=True):
            _write(source, target, copied, opened, force, progress)
        dtypes = Counter(view.storage.dtype for view in tensors)
        report = ConversionReport(target, len(tensors), total, len(opened), dtypes, copied)
        report.notes += _notes(source, opened, copied)
    report.seconds = time.perf_counter() - started
    return report


def _write(
    source: Path, target: Path, copied: Sequence[str], files: Sequence[TorchFile], force: bool, progress: Progress
) -> None:
    total = sum(view.nbytes for file in files for view in file.tensors.values())
    with StagedDirectory(target) as staged:
        for name in copied:
            copy_published(source / name, staged.path / name)
        names = [SINGLE_FILE]
        if len(files) > 1:
            names = written_layout.shard_names(len(files))
            weight_map = {tensor: name for name, file in zip(names, files, strict=True) for tensor in file.tensors}
            written_layout.write_index(staged.path, weight_map, total)
        digests: dict[str, bytes] = {}
        advance = counted(total, partial(progress, "weights"))
        advance(0)
        for name, file in zip(names, files, strict=True):
            streamed = {tensor: _streamed(tensor, file, digests, advance) for tensor in file.tensors}
            written_layout.write_tensors(staged.path / name, streamed)
        advance = counted(total, partial(progress, "verify"))
        advance(0)
        for name, file in zip(names, files, strict=True):
            _verify(staged.path / name, file, digests, advance)
        staged.commit(force)


def _weight_files(source: Path) -> tuple[list[Path], dict[str, str] | None]:
    """The files to read, and which tensor lies in which where an index says so."""
    if source.is_file():
        if source.name == PICKLED_INDEX:
            return _indexed(source)
        return [source], None
    if not source.is_dir():
        raise CheckpointError(f"{source} does not exist: expected a directory with {PICKLED_FILE}, or such a file")
    for name in (SINGLE_FILE, INDEX_FILE):
        if (source / name).exists():
            raise CheckpointError(f"{source} has {name} already: edgellm build {source} ENGINE_DIR takes it as it is")
    if (source / PICKLED_FILE).exists():
        return [source / PICKLED_FILE], None
    if (source / PICKLED_INDEX).exists():
        return _indexed(source / PICKLED_INDEX)
    found = sorted(
        path
        for path in source.iterdir()
        if path.name.endswith(PICKLE_ENDINGS) and not _NOT_WEIGHTS.fullmatch(path.name)
    )
    if len(found) == 1:
        return found, None
    listed = ", ".join(printable(path.name) for path in found[:5])
    raise CheckpointError(
        f"{source} has neither {PICKLED_FILE} nor {PICKLED_INDEX}, and "
        + (f"which of {listed} is meant is unknown. Name one file as SOURCE" if found else "no other pickled weights")
    )


def _indexed(path: Path) -> tuple[list[Path], dict[str, str]]:
    index, files = indexed_files(path, PICKLE_ENDINGS)
    return files, index.get("weight_map", "dict")


def _check_places(files: Sequence[TorchFile], weight_map: Mapping[str, str] | None) -> None:
    """CheckpointError unless each tensor is in one file alone, and where the index says."""
    places = tensor_places({file.path: file.tensors for file in files})
    if (own := places.get("__metadata__")) is not None:
        raise CheckpointError(f"{own}: no tensor of a safetensors file can be named '__metadata__'")
    if weight_map is not None:
        wrong = [name for name, shard in weight_map.items() if name not in places or places[name].name != shard]
        wrong += [name for name in places if name not in weight_map]
        if wrong:
            listed = ", ".join(f"{name!r:.80}" for name in wrong[:5])
            raise CheckpointError(
                f"{files[0].path.parent / PICKLED_INDEX}: {len(wrong)} tensors are not where 'weight_map' says: "
                f"{listed}. Copy the checkpoint anew from its source"
            )


def _files_to_copy(source: Path) -> list[str]:
    """A file as source is converted alone: what lies beside it may be of another model."""
    if not source.is_dir():
        return []
    names = [name for name in (*published_file_names(source), *_OTHER_FILES) if (source / name).exists()]
    for name in names:
        check_ordinary(source / name, size_limit(name), CheckpointError, "Copy it from the checkpoint's source")
    return names


def _notes(source: Path, files: Sequence[TorchFile], copied: Sequence[str]) -> Iterator[str]:
    if shared := [name for file in files for name in file.shared]:
        listed = ", ".join(f"{name!r:.80}" for name in shared[:3]) + (", ..." if len(shared) > 3 else "")
        yield f"Shares memory with other tensors, written as a copy: {listed} ({len(shared)} in all)"
    if left_out := sorted({name for file in files for name in file.left_out}):
        yield f"Left out, as no weights of the model: {', '.join(f'{name!r:.60}' for name in left_out[:10])}"
    if source.is_file():
        yield f"Only weights were converted. Copy config.json and the tokenizer beside them, or convert {source.parent}"
    elif "config.json" not in copied:
        yield "The source has no config.json: edgellm build needs it beside the weights"


def _streamed(
    name: str, source: TorchFile, digests: dict[str, bytes], advance: Callable[[int], None]
) -> written_layout.StreamedTensor:
    """The tensor as it is written, when its SHA-256 is put into `digests`."""
    view = source.tensors[name]

    def pieces() -> Iterator[np.ndarray]:
        digest = hashlib.sha256()
        if view.nbytes:
            for piece in written_layout.StoredTensor(view.storage.dtype, source.elements(name)).pieces():
                yield piece
                digest.update(piece)
                advance(piece.size)
        digests[name] = digest.digest()

    return written_layout.StreamedTensor(view.storage.dtype, view.shape, pieces)


def _verify(path: Path, source: TorchFile, digests: Mapping[str, bytes], advance: Callable[[int], None]) -> None:
    """Read a file back and compare every tensor with its digest from the source; raises CheckpointError."""
    with closing(SafetensorsFile(path)) as file:
        for name, view in source.tensors.items():
            info = file.tensors.get(name)
            is_there = info is not None and (info.dtype, info.shape) == (view.storage.dtype, view.shape)
            if info is None or not is_there or hashlib.sha256(file.bytes_of(info)).digest() != digests[name]:
                raise CheckpointError(
                    f"{name!r:.80} did not read back as it was written, and nothing was left behind: check disk and "
                    "memory"
                )
            advance(info.nbytes)
