"""LoRA adapters on the command line: `NAME=DIR`, and an engine directory's limits in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from edgellm.kernels.user_paths import user_path


def named_directories(options: Sequence[str]) -> dict[str, Path]:
    """Directories by name, from `NAME=DIR` each; typer.BadParameter for another form or a name given twice."""
    found: dict[str, Path] = {}
    for option in options:
        name, sign, directory = option.partition("=")
        if not (name and sign and directory):
            raise typer.BadParameter(f"--lora {option}: expected NAME=DIR, such as --lora json=adapters/json")
        if name in found:
            raise typer.BadParameter(f"--lora {option}: {name!r} is the name of {found[name]} already")
        found[name] = user_path(directory)
    return found


def adapter_choice(option: str, folder: Path = Path()) -> tuple[str, Path | None]:
    """An adapter's name, and its directory where it is given as `NAME=DIR`, relative to `folder`."""
    if "=" not in option:
        return option, None
    ((name, directory),) = named_directories([option]).items()
    return name, folder / directory


def adapters_in_words(names: Sequence[str], chosen: str | None) -> str:
    """Which adapters there are, and which one answers; "" where there are none."""
    if not names:
        return ""
    return f"LoRA adapters {', '.join(names)}; answers are given {f'with {chosen}' if chosen else 'without one'}"


def lora_limits_in_words(limits: Mapping[str, Any]) -> str:
    """What engines take of adapters; `limits` as JSON values."""
    return f"{limits['lora_slots']} at once, rank up to {limits['max_lora_rank']}"
