"""Weights whose rows and columns come in eights on a device, as kernels of linear layers take them, whatever a model's
widths are: zeros stand behind."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np

from edgellm.engines.model.program import Program
from edgellm.kernels.encoder.contract import padded_width


@dataclass(frozen=True)
class Padding:
    """How a weight [rows, columns], or a bias [rows] without columns, stands in memory.

    Its rows are so many equal `parts`, gates and ups for example, each of which has zeros behind it.
    """

    rows: int
    columns: int | None
    parts: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in memory."""
        rows = self.parts * padded_width(self._part)
        return (rows,) if self.columns is None else (rows, self._padded_columns)

    @property
    def zeros(self) -> int:
        """How many elements in memory are none of the weight's."""
        return math.prod(self.shape) - self.rows * (self.columns or 1)

    def pieces(self, first: int, values: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Published `values` [n], which begin at element `first` of the weight, as what stands in memory one behind the
        other: where each begins, in elements, and its values."""
        columns, width, part = self.columns or 1, self._padded_columns, self._part
        done = 0
        while done < values.size:
            row, column = divmod(first + done, columns)
            number, row_of_part = divmod(row, part)
            begin = (number * padded_width(part) + row_of_part) * width + column
            count = min((values.size - done) // columns, part - row_of_part)
            if column or not count:  # a row's end, or its beginning
                count = min(columns - column, values.size - done)
                yield begin, values[done : done + count]
            else:
                block = np.zeros((count, width), values.dtype)
                count *= columns
                block[:, :columns] = values[done : done + count].reshape(-1, columns)
                yield begin, block.reshape(-1)
            done += count

    @property
    def _part(self) -> int:
        return self.rows // self.parts

    @property
    def _padded_columns(self) -> int:
        return 1 if self.columns is None else padded_width(self.columns)


def padded_weights(program: Program, planned: Collection[str] = ()) -> dict[str, Padding]:
    """The weights of a program's linear layers that have zeros behind them in memory, by name: not those of steps that
    TensorRT runs, whose titles are `planned`."""
    found = {}
    for step in program.steps:
        if (linear := step.multiplies) is not None and step.title not in planned:
            parts = 2 if getattr(step, "gated", False) else 1
            for spec in (linear.weight, linear.bias):
                if spec is not None:
                    padding = Padding(spec.shape[0], spec.shape[1] if len(spec.shape) > 1 else None, parts)
                    if padding.shape != spec.shape:
                        found[spec.name] = padding
    return found
