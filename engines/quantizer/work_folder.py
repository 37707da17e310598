"""The layers of a checkpoint that are quantized already, kept while a run goes on or is interrupted."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.errors import CheckpointError
from edgellm.engines.formats.digests import hash_bytes, hash_file
from edgellm.engines.formats.staged_directory import is_taken
from edgellm.engines.formats.strict_formats import JSONObject
from edgellm.engines.quantizer.written_layout import StoredTensor, write_tensors
from edgellm.kernels.atomic_write import write_atomically
from edgellm.kernels.user_paths import resolved

_JOB_FILE = "job.json"
#: What is written into such a folder, files on their way to their names among it: nothing else is ever deleted.
_OWN_NAMES = re.compile(
    r"layer\.partial|layer-\d{4}\.safetensors|(job\.json|layer-\d{4}\.sha256)|\.(job\.json|layer-\d{4}\.sha256)\.\w{12}"
)
#: Raise this when other tensors are written for the same options: what an earlier release began is not gone on with.
_JOB_VERSION = 2


class WorkFolder:
    """The hidden folder beside `target` with the layers that are done, each with its digest, and what they were made
    from (`job`).

    One process at a time has it. It stays when the work is interrupted; `remove` ends it. A link, or a folder that
    something else made, is refused.
    """

    def __init__(self, target: Path, job: dict[str, Any], restart: bool) -> None:
        self._target, self._job, self._restart = target, job, restart
        path = resolved(target)
        self.path = path.with_name(f".{path.name}.quantizing")
        self._lock = -1

    def __enter__(self) -> WorkFolder:
        if self.path.is_symlink():
            raise self._not_ours("is a link")
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            if is_taken(self._lock):
                raise CheckpointError(f"{self._target} is being quantized by another process: wait for its end")
            self._begin()
        except BaseException:
            os.close(self._lock)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._lock)

    def _begin(self) -> None:
        file = self.path / _JOB_FILE
        if file.exists():
            found = JSONObject.read(file, CheckpointError, f"Remove {self.path} to begin anew").values
            if not found.keys() >= self._job.keys():
                raise self._not_ours(f"has another {_JOB_FILE}")
            changed = [key for key in self._job if found[key] != self._job[key]]
            if changed and not self._restart:
                raise CheckpointError(
                    f"{self.path} holds layers of a run that was interrupted, with other {', '.join(changed)}. Give "
                    "the command as it was to go on with it, or add --restart to begin anew"
                )
        elif not all(path.name.startswith(f".{_JOB_FILE}.") for path in self.path.iterdir()):
            raise self._not_ours(f"has no {_JOB_FILE}")
        if self._restart:
            self._clear()
        if not file.exists():
            write_atomically(file, json.dumps(self._job, indent=1).encode())

    def _not_ours(self, why: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path} {why}: expected a folder that edgellm quantize has made, or none. Remove or rename it, or "
            "name another target"
        )

    def _clear(self) -> None:
        for path in sorted(self.path.iterdir(), key=lambda path: path.name == _JOB_FILE):  # until then it is ours
            if _OWN_NAMES.fullmatch(path.name):
                path.unlink()

    def layer(self, index: int) -> Path:
        return self.path / f"layer-{index:04}.safetensors"

    def has(self, index: int) -> bool:
        """Whether the layer is done, and its file what was written."""
        try:
            return self._digest(index).read_text() == hash_file(self.layer(index)).sha256
        except (OSError, ValueError):
            return False

    def write(self, index: int, tensors: Mapping[str, StoredTensor], metadata: Mapping[str, str]) -> None:
        """Add a layer, with `metadata` in its file."""
        temporary = self.path / "layer.partial"
        temporary.unlink(missing_ok=True)
        write_tensors(temporary, tensors, metadata)
        write_atomically(self._digest(index), hash_file(temporary).sha256.encode())
        temporary.replace(self.layer(index))

    def remove(self) -> None:
        """End it: the layers are elsewhere. What others have put there stays."""
        with suppress(OSError):
            self._clear()
            self.path.rmdir()

    def _digest(self, index: int) -> Path:
        return self.layer(index).with_suffix(".sha256")


def job_of(checkpoint: Checkpoint, options: dict[str, Any], texts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """What a run depends on, in words that an error can name."""
    files = [
        [path.name, checkpoint.status(path).st_size, checkpoint.status(path).st_mtime_ns] for path in checkpoint.files
    ]
    tokens = hash_bytes(json.dumps([list(map(int, text)) for text in texts]).encode())
    content = json.dumps(checkpoint.config, sort_keys=True).encode()
    return {
        "version": _JOB_VERSION,
        "options": options,
        "checkpoint": {"config": hash_bytes(content), "files": files},
        "calibration texts": tokens,
    }
