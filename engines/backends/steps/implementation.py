"""One way to run a kind of step by hand-written kernels, and what it may ask about the step's program."""

from __future__ import annotations

import math
from typing import Any, Generic, TypeVar

from edgellm.engines.backends.steps.launching import JOINED_INPUTS, Launching, StepKernels
from edgellm.engines.model.program import Program
from edgellm.engines.model.states import Edge
from edgellm.engines.model.steps import Step
from edgellm.kernels.decode.tilings import Capacity
from edgellm.kernels.quantization.row_runs import PackedLayout

StepKind = TypeVar("StepKind", bound=Step)

#: The phases whose tokens see all before them: their attention reads no mask.
PROMPT_PHASES = ("prefill", "accept")


class Implementation(Generic[StepKind]):
    """Runs steps of one kind, where it does not refuse them; of one step all that do give a row the same bits.

    It holds nothing: what it is asked about is a step of a program.
    """

    #: For messages: "kernels of few rows".
    name = "kernels"
    #: Whether what it writes has the dtype that the program gives it; else that is float32.
    keeps_dtype = False
    #: Whether it reads the engine's `attention_mask`, and in decode steps, too.
    reads_mask = reads_decode_mask = False

    def lead(self, number: int) -> int:
        """With which step of a program, by number, it runs that of a `number`."""
        return number

    def suits(self, step: StepKind, program: Program) -> bool:
        """Whether it is made for so many rows, or such weights, as a step has."""
        return True

    def refusal(self, step: StepKind, program: Program, limit: int) -> str | None:
        """Why it does not run a step that suits it where blocks may have `limit` bytes of shared memory; None if it
        does."""
        return None

    def clocks(self, step: StepKind, program: Program, gpu: Capacity) -> float:
        """An estimate of the GPU's time, where another implementation may take the step too."""
        return 0.0

    def scratch(self, step: StepKind, program: Program) -> Edge:
        """Shape and dtype of what it writes, and of what it needs beside that; of what steps share, the largest counts,
        and tensors at the engine's edge do not."""
        dtype = program.kinds[step.output][1] if self.keeps_dtype else "float32"
        return {step.output: (self._rows_of(step, program), dtype)} | _kept_scratch(step, program)

    def counters(self, step: StepKind, program: Program) -> Edge:
        """Shape and dtype of memory that is zero between its launches, which is no part of what engines share; of one
        name the largest counts."""
        return {}

    def joins(self, step: StepKind, run: Launching) -> bool:
        """Whether what waits to be added to the step's input (`Launching.waits`) is added by the step's launch."""
        return False

    def launches(self, step: StepKind, run: Launching, next_early: bool) -> list[Any]:
        """The launches of a step. `next_early` False: what overlaps the last of them starts when its predecessor is
        done."""
        raise NotImplementedError

    def loads(self, step: StepKind, program: Program) -> tuple[Any, ...]:
        """What decides, beside the number of tokens, which kernels `load` loads."""
        return ()

    def load(self, what: tuple[Any, ...], program: Program, kernels: StepKernels, tokens: int) -> None:
        """Compile and load what a prompt of so many tokens, fewer than the program's, needs; `what` are `loads`."""

    @staticmethod
    def _rows_of(step: StepKind, program: Program) -> tuple[int, int]:
        return step_rows(step, program), program.kinds[step.output][0][-1]


def step_rows(step: Step, program: Program) -> int:
    """Rows of activations that a step computes."""
    return math.prod(program.kinds[step.output][0][:-1])


def _kept_scratch(step: Step, program: Program) -> Edge:
    """What a step needs for `Launching.keeping`."""
    if step.keeps is None or step.kept_value is None:
        return {}
    *rows, width = program.kinds[step.kept_value][0]
    size = math.prod(rows), width
    return {step.keeps.target: (size, "compute"), JOINED_INPUTS: ((math.prod(size),), "compute")}


def packed_layout(step: Step, program: Program) -> PackedLayout | None:
    """How a step's weight is packed, if it is: that of a linear layer, or of a layer of experts."""
    packed = program.packed
    return next((packed[each.name] for each in step.weights if each.name in packed), None) if packed else None


def too_large(needed: int, limit: int) -> str | None:
    """What is wrong where a block needs so many bytes of shared memory, if anything."""
    return None if needed <= limit else f"a block needs {needed} bytes of shared memory, of the GPU it has {limit}"
