"""The NumPy twin of what passes between GPUs that share a model: ranks are threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from launched_twins import launched


class NumpyRank:
    """What one rank launches; `everything` gives what every rank has laid down, in the order of ranks."""

    def __init__(self, own: int, everything: Callable[[np.ndarray], Sequence[np.ndarray]]) -> None:
        self._own, self._everything = own, everything

    @launched
    def sum(
        self, values: np.ndarray, output: np.ndarray, residual: np.ndarray | None = None, scale: float = 1.0
    ) -> None:
        """`output` float32 = residual + scale times the sum of all ranks' values, added in the order of ranks; values
        and output are float32 [n], of one size on all ranks, a residual float32 or compute. The output may be the
        values or the residual."""
        total, *others = (each.copy() for each in self._everything(values.copy()))
        for each in others:
            total += each
        total *= np.float32(scale)
        output[...] = (total if residual is None else residual.reshape(total.shape) + total).reshape(output.shape)

    @launched
    def columns(self, values: np.ndarray, widths: Sequence[int], output: np.ndarray) -> None:
        """This rank's columns of `output` [R, N] float32, which is the first rank's, become its values [R,
        `widths[rank]`]; they stand behind those of the ranks before it."""
        begin, rows = sum(widths[: self._own]), output.reshape(-1, sum(widths))
        rows[:, begin : begin + widths[self._own]] = values.reshape(-1, widths[self._own])
