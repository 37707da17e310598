"""What the kernels of mixtures of experts take, and which mixtures they refuse.

`Array` is a NumPy array (float32 where the device has the compute dtype) for the twins, which define what is computed,
and a `DeviceArray` for the launchers. R rows stand for the tokens of a step or of a prompt, E for the experts of a
layer, k for how many of them a row goes through. "compute" is float16 or bfloat16.

All that a row gives follows from the row alone: products have the sums of dense layers, and experts are added in
float32 in the order of their ids, whichever kernel multiplies and whatever rows are beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from edgellm.kernels.arrays import OwnArray
from edgellm.kernels.decode.contract import LinearWeights
from edgellm.kernels.errors import KernelError
from edgellm.kernels.quantization.code_words import BLOCK_ROWS
from edgellm.kernels.quantization.device_layout import DeviceLayout, PackedMatrix

#: The most experts of a layer, each lane of a warp has so many 32nds of them, and the most that a row goes through.
MAX_EXPERTS, MAX_CHOSEN = 512, 32
#: The most rows that one launch routes: each of its blocks norms all of them.
MAX_ROUTED_ROWS = 2
#: The most pairs of a row and an expert of one launch: the second axis of its grid.
MAX_PAIRS = 65_535


@dataclass(frozen=True)
class Routing:
    """How a row's experts are chosen of `experts`, and what their shares are.

    Scores are the softmax over all that the router gives or, where `sigmoid`, the sigmoid of each. The `chosen` are
    those of the largest scores, of equal ones those of the lower ids; a correction is added for the choice alone.
    Shares are the scores, `normalized`: divided by their sum + `epsilon`; times `scale`.
    """

    experts: int
    chosen: int
    sigmoid: bool = False
    normalized: bool = True
    epsilon: float = 0.0
    scale: float = 1.0


class Routed(NamedTuple):
    """`expert_ids` int32 [R, k], rising in each row, and `expert_weights` float32 [R, k]. `shared_weights` float32 [R]
    is the share of the expert that every row goes through, None without one. A row with NaN among its scores has
    weights of NaN."""

    expert_ids: OwnArray
    expert_weights: OwnArray
    shared_weights: OwnArray | None = None


class ExpertWeights(NamedTuple):
    """One layer of all `experts` of a mixture: the weight [E N, K] dense (compute) or packed as one matrix, of which
    expert e has the rows from e N on, and the bias [E, N] (compute)."""

    linear: LinearWeights
    experts: int

    @property
    def shape(self) -> tuple[int, int]:
        """N and K: the weight of one expert."""
        rows, columns = self.linear.weight.shape
        return rows // self.experts, columns

    @property
    def layout(self) -> DeviceLayout | None:
        """How the weights of all are packed, if they are."""
        weight = self.linear.weight
        return weight.layout if isinstance(weight, PackedMatrix) else None


def experts_refusal(experts: int, chosen: int) -> str | None:
    """Why kernels do not choose so many of so many experts, or None if they do."""
    if chosen <= min(experts, MAX_CHOSEN) and experts <= MAX_EXPERTS:
        return None
    return f"kernels choose up to {MAX_CHOSEN} of up to {MAX_EXPERTS} experts, not {chosen} of {experts}"


def matrix_refusal(rows: int, columns: int, gated: bool, layout: DeviceLayout | None) -> str | None:
    """Why kernels do not multiply matrices [rows, columns] of experts, `gated`: gates, then ups; `layout` is that of
    the packed weights of all. None if they do."""
    if columns % 8 or rows % 2:
        return f"experts have widths in multiples of 8 and even numbers of rows, not [{rows}, {columns}]"
    if layout is None:
        return None
    if layout.format.permuted or layout.format.scaled:
        return f"the inputs of experts are not permuted or scaled, as those of {layout.format} are"
    if (rows // 2 if gated else rows) % BLOCK_ROWS:
        return f"gates, ups and downs of packed experts have rows in eights, not {rows // 2 if gated else rows}"
    return None


def check_pairs(rows: int, chosen: int) -> int:
    """The pairs of rows and experts. Raises KernelError where they are more than one launch takes."""
    pairs = rows * chosen
    if not 1 <= pairs <= MAX_PAIRS:
        raise KernelError(f"{rows} rows that chose {chosen} experts are {pairs} products; expected 1 to {MAX_PAIRS}")
    return pairs
