"""YAML presets that are installed with the package."""

from __future__ import annotations

from importlib import resources
from typing import Any

import yaml


def installed(name: str) -> Any:
    """The values of one of these files, `NAME.yaml`."""
    return yaml.safe_load((resources.files(__name__) / f"{name}.yaml").read_text(encoding="utf-8"))
