"""A Python environment without some wheels: a folder of links to the installed packages but those, and to EdgeLLM."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Collection
from pathlib import Path

import numpy as np

import edgellm

_CHECKOUT = Path(edgellm.__file__).parents[1]


def link_packages(folder: Path, without: Collection[str]) -> Path:
    """Make the environment in a new folder; packages are left out whose name begins with one of `without`."""
    folder.mkdir()
    for entry in Path(np.__file__).parents[1].iterdir():
        if not entry.name.lower().startswith((*without, "edgellm", "__editable__")):
            (folder / entry.name).symlink_to(entry)
    own = folder / "edgellm"
    own.mkdir()
    for name in ("engines", "kernels", "multimodal", "configs"):
        (own / name).symlink_to(_CHECKOUT / name)
    for entry in (_CHECKOUT / "edgellm").iterdir():
        (own / entry.name).symlink_to(entry)
    return folder


def first_in_path(folder: Path) -> dict[str, str]:
    """The variable by which another Python looks into a folder first, then where this one was told to look."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))}


def run_there(folder: Path, code: str, *arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run code in the environment, with no other packages to import, and no toolkit of CUDA's named."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("CUDA", "PYTHON"))}
    return subprocess.run(
        [sys.executable, "-S", "-c", textwrap.dedent(code), *map(str, arguments)],
        env=inherited | {"PYTHONPATH": str(folder), **variables},
        cwd=folder,
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
