"""Vision encoders on the command line, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def vision_in_words(config: Mapping[str, Any]) -> str:
    """A vision encoder's family and dimensions, from the values of its `VisionConfig`."""
    words = f"{config['family']}, {config['num_layers']} layers of {config['hidden_size']}"
    if config["image_size"] is not None:
        return f"{words}, images of {config['image_size']} x {config['image_size']} pixels"
    return f"{words}, patches of {config['patch_size']} x {config['patch_size']} pixels"


def vision_limits_in_words(max_patches: int, rows: Sequence[int]) -> str:
    """Which images the engines take, and their rows."""
    return f"images of up to {max_patches:,} patches (engines of {', '.join(f'{count:,}' for count in rows)} rows)"
