"""What a model is to take on a board, by arithmetic: for each step of its program the larger of two times.

One is that of its bytes (weights, KV rows in reach, states) at the board's bandwidth. The other is that of its
arithmetic at the board's clock: the clocks that a weight took in a part of a GPU with bandwidth to spare, by rows and
format, and never less than `mma.sync` takes for whole tiles of 8 rows. A round of a draft is an accept, steps that
propose, and a step that verifies. Nothing of this was measured on a board.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from edgellm.configs import installed
from edgellm.engines.backends.device_layouts import PackedLayouts
from edgellm.engines.families.programs import ModelConfig, model_program
from edgellm.engines.model.expert_steps import DownExperts, GateUpExperts, for_kernels
from edgellm.engines.model.limits import EngineLimits, EngineShape
from edgellm.engines.model.memory_plan import weight_bytes as spec_bytes
from edgellm.engines.model.states import WindowRows, state_bytes
from edgellm.engines.model.steps import Attention, Stateful, Step
from edgellm.engines.speculation.draft_plan import DraftPlan
from edgellm.kernels.decode.tilings import Capacity
from edgellm.kernels.gpu import GPU
from edgellm.kernels.quantization.row_runs import PackedLayout


@dataclass(frozen=True)
class Board:
    """A board: its multiprocessors and their clock in GHz, the bandwidth of its memory in GB/s, its memory in GB, and
    what kernels are compiled for; `source` says where NVIDIA published it."""

    title: str
    multiprocessors: int
    ghz: float
    gb_per_s: float
    memory_gb: int
    architecture: str
    source: str

    @property
    def multiprocessor_ghz(self) -> float:
        """Clocks of all multiprocessors together, 1e9 a second."""
        return self.multiprocessors * self.ghz


BOARDS = {name: Board(**values) for name, values in installed("boards").items()}


def board_of(gpu: GPU) -> Board | None:
    """The board that a GPU is of, by compute capability, multiprocessors and memory, of which the system keeps some."""
    for board in BOARDS.values():
        number = board.architecture.rpartition("_")[2]
        is_kind = gpu.compute_capability == f"sm_{number}" and gpu.multiprocessors == board.multiprocessors
        if is_kind and 0.7 < gpu.total_memory / 1e9 / board.memory_gb < 1.1:
            return board
    return None


#: The largest share of a board's bandwidth that a published run reads: Qwen2.5-7B by MLC on an Orin Nano Super, 21.75
#: tokens a second of 3.98 GB of weights, is 85 % of 102 GB/s.
REACHED = 0.85
#: Microseconds between two kernels of a graph, an estimate: on a small GPU there is little to drain and to fill.
EDGE_MICROSECONDS = 2.0


@dataclass(frozen=True)
class Clocks:
    """Clocks of one multiprocessor that a weight takes, by rows of activations: at most, for the part in which that was
    measured may have waited for memory."""

    by_rows: dict[int, float]

    def of(self, rows: int) -> float:
        """Of so many rows, as kernels of the next larger number that was measured take them."""
        known = [measured for measured in self.by_rows if measured >= rows]
        return self.by_rows[min(known)] if known else self.by_rows[max(self.by_rows)] * rows / max(self.by_rows)


#: Of dense weights and packed ones, from steps of Llama-8B in 16 multiprocessors of an H200 without a neighbour
#: (`tools/bench/results`: 2026-11-23-h200-as-orin-8b.json.xz, 2026-11-23-h200-packed-as-orin.json.xz).
CLOCKS = {
    "dense": Clocks({1: 0.057598826, 8: 0.059682349, 16: 0.062335018, 32: 0.071663259, 64: 0.11539808}),
    "packed": Clocks({1: 0.031277045, 8: 0.052908591, 16: 0.05506605, 32: 0.077339924, 64: 0.13113716}),
}


class Cost(NamedTuple):
    """What a step takes: bytes of memory, clocks of one multiprocessor, and multiply-adds of `mma.sync`."""

    nbytes: float
    clocks: float
    multiply_adds: float

    def seconds(self, board: Board, reached: float, edge: float) -> float:
        """The largest time, at a share of the bandwidth, and what stands between this kernel and the next."""
        clocks = max(self.clocks, self.multiply_adds / multiply_adds(board))
        return max(self.nbytes / (reached * board.gb_per_s), clocks / board.multiprocessor_ghz) / 1e9 + edge


def step_cost(step: Step, shape: EngineShape, dtype: str, packed: Mapping[str, PackedLayout], context: int) -> Cost:
    """The cost of one step of a program behind so many tokens of context."""
    rows = shape.selected if getattr(step, "selects", False) else shape.tokens
    nbytes = clocks = products = 0.0
    for spec in step.weights:
        layout, size, read, own_rows, times = packed.get(spec.name), math.prod(spec.shape), 1.0, rows, 1.0
        if spec.experts and isinstance(
            step, GateUpExperts | DownExperts
        ):  # of experts chosen evenly each is read once, at best
            chosen = step.mixture.chosen / spec.experts
            read, own_rows, times = 1 - (1 - chosen) ** rows, 1, chosen * rows
        nbytes += read * (spec_bytes(spec, dtype) if layout is None else math.prod(layout.shape))
        if len(spec.shape) == 2:
            clocks += times * size * CLOCKS["dense" if layout is None else "packed"].of(own_rows)
            products += times * size * _padded(own_rows)
    if isinstance(step, Attention):
        state = step.state(shape)
        reach = min(context, state.window) if isinstance(state, WindowRows) else context
        nbytes += state_bytes(state.of_sequence(reach), dtype)
        heads, _, size = step.heads
        products += 2 * heads * size * reach * _padded(shape.tokens)  # scores, then values
    elif isinstance(step, Stateful):
        nbytes += 2 * state_bytes(step.state(shape).tensors(1, 1), dtype)  # read and written
    return Cost(nbytes, clocks, products)


def multiply_adds(board: Board) -> int:
    """Of `mma.sync` with 16 bits, in a clock of one multiprocessor: 1,024 of Orin (NVIDIA's 170 TOPS of sparse int8 are
    42.5 TFLOP/s of dense 16-bit products, by 16 multiprocessors at 1.3 GHz), and no fewer assumed of Thor."""
    return Capacity(architecture=board.architecture).speeds[1]


def _padded(rows: int) -> int:
    return -(-rows // 8) * 8


def plain_shapes(limits: EngineLimits) -> list[EngineShape]:
    """The engine of a plain step."""
    return [limits.base_shape("decode", 1, 1, limits.key_ranges[-1])]


def round_shapes(limits: EngineLimits, plan: DraftPlan) -> list[EngineShape]:
    """The engines of a round of a plan, in their order: what the draft takes of the last one, its levels behind the
    first or its block, and what the base verifies."""
    shapes = [each for each in limits.engine_shapes() if each.key_range == limits.tree_key_ranges[-1]]
    by_phase = {each.phase: [other for other in shapes if other.phase == each.phase] for each in shapes}
    propose = next(each for each in by_phase["propose"] if each.tokens >= plan.top_k or limits.draft_block)
    verify = next(each for each in by_phase["verify"] if each.tokens >= plan.tree_size)
    return [by_phase["accept"][0], *[propose] * (1 if limits.draft_block else plan.steps - 1), verify]


def engine_costs(
    models: Mapping[str, ModelConfig],
    limits: EngineLimits,
    dtype: str,
    layouts: PackedLayouts,
    context: int,
    plan: DraftPlan | None = None,
) -> list[Cost]:
    """Of each step of a plain step's engine, or of the engines of a round of a plan, behind so many tokens of context;
    `layouts` are those of the packed weights of `models`."""
    return [
        step_cost(step, shape, dtype, layouts.get(shape.model, {}), context)
        for shape in (plain_shapes(limits) if plan is None else round_shapes(limits, plan))
        for step in for_kernels(model_program(models[shape.model], shape)).steps
    ]


def seconds(
    costs: Sequence[Cost], board: Board, reached: float = REACHED, edge: float = EDGE_MICROSECONDS * 1e-6
) -> float:
    """Of all of them, one behind the other."""
    return sum(cost.seconds(board, reached, edge) for cost in costs)
