"""What tests of builds share: names in a folder, and a Python of its own."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def run_python(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
