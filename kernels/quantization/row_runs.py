"""Weights whose rows are packed in several ways, or some of them not, as layers have them that are multiplied as one: a
run of rows of each, behind those of the run before."""

from __future__ import annotations

import math
from dataclasses import dataclass

from edgellm.kernels.arrays import OwnArray
from edgellm.kernels.quantization.device_layout import DeviceLayout, PackedMatrix


@dataclass(frozen=True)
class DenseRows:
    """The layout of a run of rows that are not packed: values of the `compute` dtype, of two bytes."""

    rows: int
    columns: int
    compute: str

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the array of bytes."""
        return self.rows, 2 * self.columns


@dataclass(frozen=True)
class RunsLayout:
    """The layouts of `runs` of rows, each of as many columns."""

    runs: tuple[DeviceLayout | DenseRows, ...]

    @property
    def shape(self) -> tuple[int]:
        """The shape of the array of bytes."""
        return (sum(math.prod(run.shape) for run in self.runs),)


@dataclass(frozen=True)
class PackedRuns:
    """Weights of as many columns, whose rows are those of one: packed ones, and arrays [rows, columns] that are not."""

    runs: tuple[PackedMatrix | OwnArray, ...]

    @property
    def layout(self) -> RunsLayout:
        """How each is packed."""
        return RunsLayout(tuple(map(_layout, self.runs)))

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the whole."""
        return sum(run.shape[0] for run in self.runs), self.runs[0].shape[1]

    @property
    def dtype(self) -> str:
        """The compute dtype of the kernels that it is for."""
        return str(self.runs[0].dtype)


def _layout(run: PackedMatrix | OwnArray) -> DeviceLayout | DenseRows:
    return run.layout if isinstance(run, PackedMatrix) else DenseRows(run.shape[0], run.shape[1], str(run.dtype))


#: How a weight is packed, and one that is, in one way or several.
PackedLayout = DeviceLayout | RunsLayout
AnyPacked = PackedMatrix | PackedRuns
