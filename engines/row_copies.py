"""Rows of KV caches, copied between host and device: what fits where."""

from __future__ import annotations

import numpy as np

from edgellm.engines.errors import EngineError


def check_rows(shape: tuple[int, ...], dtype: np.dtype, values: np.ndarray, rows: int) -> None:
    """Raise EngineError unless an array [G, C, D] of `dtype` and `values` [G, N, D] both have `rows` rows."""
    fits = len(shape) == values.ndim == 3 and (values.shape[0], values.shape[2]) == (shape[0], shape[2])
    if not fits or not 0 <= rows <= min(values.shape[1], shape[1]) or values.dtype != dtype:
        raise EngineError(
            f"cannot copy {rows} rows between {values.dtype} {values.shape} on the host and {dtype} {tuple(shape)}: "
            "expected [groups, rows, size] that differ in rows only"
        )
