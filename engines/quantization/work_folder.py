"""The layers of a checkpoint that are quantized already, kept while a run goes on or is interrupted."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.checkpoints.safetensors_file import SafetensorsFile
from edgellm.engines.directories.strict_formats import JSONObject
from edgellm.engines.errors import CheckpointError
from edgellm.engines.quantization.written_layout import StoredTensor, write_tensors
from edgellm.kernels.atomic_write import write_atomically

_JOB_FILE = "job.json"
#: Raise this when other tensors are written for the same options: what an earlier release began is not gone on with.
_JOB_VERSION = 2


class WorkFolder:
    """The hidden folder beside `target` with the layers that are done, and what they were made from (`job`).

    One process at a time has it. It stays when the work is interrupted; `remove` ends it.
    """

    def __init__(self, target: Path, job: dict[str, Any], restart: bool) -> None:
        self._target, self._job, self._restart = target, job, restart
        resolved = target.resolve()
        self.path = resolved.with_name(f".{resolved.name}.quantizing")
        self._lock = -1

    def __enter__(self) -> WorkFolder:
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise CheckpointError(f"{self._target} is being quantized by another process: wait for its end") from None
        try:
            self._begin()
        except BaseException:
            os.close(self._lock)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._lock)

    def _begin(self) -> None:
        file = self.path / _JOB_FILE
        if self._restart:
            for path in self.path.iterdir():
                path.unlink()
        if file.exists():
            found = JSONObject.read(file, CheckpointError, "Add --restart to begin anew").values
            changed = [key for key in self._job if found.get(key) != self._job[key]]
            if changed:
                raise CheckpointError(
                    f"{self.path} holds layers of a run that was interrupted, with other {', '.join(changed)}. Give "
                    "the command as it was to go on with it, or add --restart to begin anew"
                )
        else:
            write_atomically(file, json.dumps(self._job, indent=1).encode())

    def layer(self, index: int) -> Path:
        """The file of a layer."""
        return self.path / f"layer-{index:04}.safetensors"

    def has(self, index: int) -> bool:
        """Whether the layer is done, and its file whole."""
        if not self.layer(index).exists():
            return False
        try:
            SafetensorsFile(self.layer(index)).close()
        except CheckpointError:
            return False
        return True

    def write(self, index: int, tensors: Mapping[str, StoredTensor]) -> None:
        """Add a layer."""
        temporary = self.path / "layer.partial"
        write_tensors(temporary, tensors)
        temporary.replace(self.layer(index))

    def remove(self) -> None:
        """End it: the layers are elsewhere."""
        shutil.rmtree(self.path, ignore_errors=True)


def job_of(checkpoint: Checkpoint, options: dict[str, Any], texts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """What a run depends on, in words that an error can name."""
    files = [
        [path.name, checkpoint.status(path).st_size, checkpoint.status(path).st_mtime_ns] for path in checkpoint.files
    ]
    tokens = hashlib.sha256(json.dumps([list(map(int, text)) for text in texts]).encode()).hexdigest()
    content = json.dumps(checkpoint.config, sort_keys=True).encode()
    return {
        "version": _JOB_VERSION,
        "options": options,
        "checkpoint": {"config": hashlib.sha256(content).hexdigest(), "files": files},
        "calibration texts": tokens,
    }
