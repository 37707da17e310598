"""LoRA adapters on the command line: `NAME=DIR`, and an engine directory's limits in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer


def named_directories(options: Sequence[str]) -> dict[str, Path]:
    """Directories by name, from `NAME=DIR` each; typer.BadParameter for another form or a name given twice."""
    found: dict[str, Path] = {}
    for option in options:
        name, sign, directory = option.partition("=")
        if not (name and sign and directory):
            raise typer.BadParameter(f"--lora {option}: expected NAME=DIR, such as --lora json=adapters/json")
        if name in found:
            raise typer.BadParameter(f"--lora {option}: {name!r} is the name of {found[name]} already")
        found[name] = Path(directory)
    return found


def lora_limits_in_words(limits: Mapping[str, Any]) -> str:
    """What engines take of adapters; `limits` as JSON values."""
    return f"{limits['lora_slots']} at once, rank up to {limits['max_lora_rank']}"
