"""Tensors of checkpoints in another dtype."""

from __future__ import annotations

import numpy as np

from edgellm.engines.checkpoints.checkpoint import Checkpoint, converted


def read_tensor(checkpoint: Checkpoint, name: str, dtype: str) -> np.ndarray:
    """A tensor as "float32", "float16" or "bfloat16" (its bits, uint16)."""
    return converted(checkpoint.info(name), checkpoint.raw(name), dtype)
