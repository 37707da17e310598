"""Weights whose rows are packed in several ways, as layers have them that are multiplied as one: a run of rows of each,
behind those of the run before."""

from __future__ import annotations

import math
from dataclasses import dataclass

from edgellm.kernels.quantization.device_layout import DeviceLayout, PackedMatrix


@dataclass(frozen=True)
class RunsLayout:
    """The layouts of `runs` of rows, each of as many columns."""

    runs: tuple[DeviceLayout, ...]

    @property
    def shape(self) -> tuple[int]:
        """The shape of the array of bytes."""
        return (sum(math.prod(run.shape) for run in self.runs),)


@dataclass(frozen=True)
class PackedRuns:
    """Packed weights of as many columns, whose rows are those of one."""

    runs: tuple[PackedMatrix, ...]

    @property
    def layout(self) -> RunsLayout:
        """How each is packed."""
        return RunsLayout(tuple(run.layout for run in self.runs))

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the whole."""
        return sum(run.shape[0] for run in self.runs), self.runs[0].shape[1]

    @property
    def dtype(self) -> str:
        """The compute dtype of the kernels that it is for."""
        return self.runs[0].dtype


#: How a weight is packed, and one that is, in one way or several.
PackedLayout = DeviceLayout | RunsLayout
AnyPacked = PackedMatrix | PackedRuns
