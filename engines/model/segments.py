"""Runs of a program's steps as programs of their own: what TensorRT runs of a model whose other steps kernels run.

Segments that do the same in different layers are one program, whose layers are counted from the segment's first: all
middle layers of a model share one plan. Long runs are cut between their matrices: what packed weights become dense in
is as large as a segment's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from edgellm.engines.model.limits import EngineShape
from edgellm.engines.model.program import Program
from edgellm.engines.model.states import Edge
from edgellm.engines.model.steps import Keep, Reshape, Step, stateful

#: What stands before the number of a layer in names, and in steps as they print, and that number.
_LAYER = re.compile(
    r"(model\.layers\.|deepstack_features_|[kv]_cache_|\bindex="
    r"|visual\.blocks\.|_tower\.(?:encoder\.|transformer\.)?layers?\.|hidden_)(\d+)"
)
#: What begins the name of an output that is the new value of one of the segment's inputs.
NEXT = "next_"
#: What attention reads beside the values that it declares.
_OF_ATTENTION = ("rope_rotary_cos_sin", "attention_mask", "kvcache_start_index")
#: Elements of the matrices that a segment has, unless it has one alone: 192 MiB. A layer of Llama-3.1-8B's shapes is of
#: three segments, whose largest has 224 of its 416 MiB; smaller models' layers stay whole, which saves the host time.
MOST_WEIGHTS = 96 << 20

#: The first step of a run, and the one behind its last.
Run = tuple[int, int]


@dataclass(frozen=True)
class Segment:
    """Some steps as a `program` of their own, with layers counted from `first_layer`.

    Its inputs and outputs are named as in the whole, but for an output `next_NAME`, which becomes the value NAME, and
    what `kept` has, which becomes columns of an output of the whole.
    """

    program: Program
    first_layer: int
    kept: dict[str, Keep]

    def name_in_whole(self, name: str) -> str:
        """What a tensor at the segment's edge is called in the whole program."""
        return _LAYER.sub(lambda match: f"{match[1]}{int(match[2]) + self.first_layer}", name.removeprefix(NEXT))


def segment_of(program: Program, run: Run) -> Segment:
    """The steps of a run as a program. What they read and write has the dtypes that kernels give it; an encoder's
    residual stream is float32 inside, too."""
    steps, kept = _own_steps(program, run)
    given, made = map(program.kinds_before, run)
    reads, outputs, first = _reads_of_all(steps), Edge(), _first_layer(repr(steps))
    for name in _needed(program, steps, run):
        output = NEXT + name if name in reads else name
        if output != name:
            steps.append(Reshape(output, name, made[name][0]))
        outputs[_renamed(output, first)] = made[name]
    for step in steps:
        if (keep := step.keeps) is not None and keep.target in kept and step.kept_value is not None:
            outputs[keep.target] = made[step.kept_value][0], "compute"
    inputs = {_renamed(name, first): given[name] for name in sorted(reads)}
    shape = segment_shape(program, run)
    if stateful(steps):
        rotates = any(getattr(step, "rotary", 0) for step in steps)  # no network takes what it does not read
        inputs |= {name: program.inputs[name] for name in _OF_ATTENTION[not rotates :] if name in program.inputs}
    wide = program.wide_residual or shape.phase == "encode"
    own = Program(shape, inputs, tuple(_renamed(step, first) for step in steps), outputs, wide)
    return Segment(own, first, kept)


def _own_steps(program: Program, run: Run) -> tuple[list[Step], dict[str, Keep]]:
    """The steps of a run, each of which keeps what becomes columns of an output under a name of its own; and these."""
    steps, kept = list(program.steps[slice(*run)]), dict[str, Keep]()
    for number, step in enumerate(steps):
        if (keep := step.keeps) is not None and keep.target in program.outputs:
            name = f"kept_{len(kept)}"
            changed: dict[str, Any] = {"keep": replace(keep, target=name, place=0)}
            kept[name], steps[number] = keep, replace(step, **changed)
    return steps, kept


def _needed(program: Program, steps: list[Step], run: Run) -> list[str]:
    """What others read of what the steps of a run write, and outputs of the whole."""
    behind, written = program.steps[run[1] :], sorted({name for step in steps for name in step.writes})
    return [name for name in written if name in program.outputs or _is_read(name, behind)]


def segment_shape(program: Program, run: Run) -> EngineShape:
    """The shape of a run's engine, which knows of key rows where it attends alone."""
    if stateful(program.steps[slice(*run)]):
        return replace(program.shape, segment=run)
    return replace(program.shape, key_range=1, kv_rows=1, kv_cache="compute", segment=run)


def planned_runs(program: Program, titles: Collection[str]) -> dict[Run, Run]:
    """The runs of neighbouring steps with these titles, and of each the first run that does the same."""
    alike: dict[tuple[str, str], Run] = {}
    return {run: alike.setdefault(_does(program, run), run) for run in _runs(program, titles)}


def _does(program: Program, run: Run) -> tuple[str, str]:
    """What a run does: its steps, and what is read of what they write and what they read is like, as they print, but
    for the number of their layer. Where weights come from is no part of steps, and does not print."""
    steps, _ = _own_steps(program, run)
    text, kinds = repr(steps), program.kinds_before(run[0])
    edge = repr((_needed(program, steps, run), [(name, kinds[name]) for name in sorted(_reads_of_all(steps))]))
    return _renamed(text, _first_layer(text)), _renamed(edge, _first_layer(text))


def _first_layer(text: str) -> int:
    return min((int(match[2]) for match in _LAYER.finditer(text)), default=0)


def _runs(program: Program, titles: Collection[str]) -> Iterator[Run]:
    first, held = 0, 0
    for number, step in enumerate(program.steps):
        if step.title not in titles:
            if first < number:
                yield first, number
            first, held = number + 1, 0
            continue
        size = 0 if step.multiplies is None else math.prod(step.multiplies.weight.shape)
        if held and size and held + size > MOST_WEIGHTS:
            yield first, number
            first, held = number, 0
        held += size
    if first < len(program.steps):
        yield first, len(program.steps)


def _is_read(name: str, steps: Collection[Step]) -> bool:
    """Whether one of the steps reads a value before it is written anew."""
    return next((name in step.reads for step in steps if name in step.reads or name in step.writes), False)


def _reads_of_all(steps: list[Step]) -> set[str]:
    """What the steps read that none of them wrote before."""
    found: set[str] = set()
    written: set[str] = set()
    for step in steps:
        found |= set(step.reads) - written
        written |= set(step.writes)
    return found


def _renamed(part: Any, first: int) -> Any:
    """A step, or part of one, with layers counted from `first` on."""
    if isinstance(part, str):
        return _LAYER.sub(lambda match: f"{match[1]}{int(match[2]) - first}", part)
    if isinstance(part, tuple):
        return tuple(_renamed(one, first) for one in part)
    if is_dataclass(part) and not isinstance(part, type):
        changed = {field.name: _renamed(getattr(part, field.name), first) for field in fields(part)}
        if "index" in changed:
            changed["index"] -= first
        return replace(part, **changed)
    return part
