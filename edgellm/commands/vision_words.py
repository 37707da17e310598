"""Vision encoders on the command line, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def vision_in_words(config: Mapping[str, Any]) -> str:
    """A vision encoder's family and dimensions, from the values of its `VisionConfig`."""
    words = f"{config['family']}, {config['num_layers']} layers of {config['hidden_size']}"
    if config["image_size"] is not None:
        return f"{words}, images of {config['image_size']} x {config['image_size']} pixels"
    return f"{words}, patches of {config['patch_size']} x {config['patch_size']} pixels"


def vision_limits_in_words(limits: Mapping[str, Any]) -> str:
    """Which images the engines take, from the values of `EngineLimits`."""
    rows = limits["image_rows"]
    engines = f"{len(rows)} engine{'s' * (len(rows) > 1)}"
    return f"images of up to {rows[-1]:,} patches ({engines})"
