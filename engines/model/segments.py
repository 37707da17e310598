"""A program cut at its attention and recurrent layers: what stands between them is run by an engine of its own, a
segment each.

Segments that do the same in different layers are one program, whose layers are counted from the segment's first: all
middle layers of a model share one plan. Large layers are cut between their matrices, too: what packed weights become
dense in is as large as a segment's.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

from edgellm.engines.model.limits import EngineShape
from edgellm.engines.model.program import Program
from edgellm.engines.model.states import Edge
from edgellm.engines.model.steps import Reshape, SideBySide, Step

Value = TypeVar("Value")

#: What stands before the number of a layer in a name, and that number.
_LAYER = re.compile(r"(model\.layers\.|deepstack_features_)(\d+)")
#: Elements of the matrices that a segment has, unless it has one alone: 192 MiB. A layer of Llama-3.1-8B's shapes is of
#: three segments, whose largest has 224 of its 416 MiB; smaller models' layers stay whole, which saves the host time.
MOST_WEIGHTS = 96 << 20


@dataclass(frozen=True)
class Segment:
    """One segment of a cut program: `program` with layers counted from `first_layer`, and the steps behind it that
    kernels run, those of an attention or of a recurrent layer, if any. `number` is that of the first segment with the
    same program.

    The values `program.inputs` and `outputs` are named as in the whole, but for an output `next_NAME`, which becomes
    the value NAME, and what `kept` has, which is the value of that name.
    """

    number: int
    program: Program
    first_layer: int
    kept: dict[str, str]
    between: tuple[Step, ...]

    def name_in_whole(self, name: str) -> str:
        """What a tensor at the segment's edge is called in the whole program."""
        name = self.kept.get(name, name.removeprefix("next_"))
        return _LAYER.sub(lambda match: f"{match[1]}{int(match[2]) + self.first_layer}", name)

    def weights_of(self, whole: Mapping[str, Value]) -> dict[str, Value]:
        """What the segment's weights have, by their names in it, of what those of the whole program have."""
        names = {name: self.name_in_whole(name) for name in self.program.weights}
        return {name: whole[of_whole] for name, of_whole in names.items() if of_whole in whole}


def segments_of(program: Program) -> tuple[Segment, ...]:
    """The segments of a program in their order: one more than it has layers, more of large ones."""
    counts = Counter(step.keeps.target for step in program.steps if step.keeps is not None)
    shared = {name: [f"{name}.{place}" for place in range(count)] for name, count in counts.items() if count > 1}
    kinds, parts = dict(program.kinds), _parts(program, shared)
    for name, places in shared.items():
        (*rows, width), dtype = program.outputs[name]
        kinds |= dict.fromkeys(places, ((*rows, width // len(places)), dtype))
    needed = set(program.outputs)
    found: list[Segment] = []
    made: dict[tuple[str, frozenset[str]], Segment] = {}  # by steps as they print, but for the number of their layer
    for part in reversed(parts):
        steps = [step for step in part if not step.cuts]
        between = tuple(step for step in part if step.cuts)
        for step in reversed(between):
            needed = (needed - {step.output}) | set(step.reads)
        written = {name for step in steps for name in step.writes}
        text = repr(steps)
        first = min((int(match[2]) for match in _LAYER.finditer(text)), default=0)
        alike = _renamed(text, first, {}), frozenset(written & needed)
        if alike not in made:
            made[alike] = _segment(program, steps, first, kinds, needed)
        found.append(replace(made[alike], first_layer=first, between=between))
        needed = (needed - written) | _reads_of_all(steps)
    # Programs are compared as they print: where weights come from is no part of them, and does not print.
    texts = {id(segment.program): str(segment.program) for segment in made.values()}
    numbers: dict[str, int] = {}
    segments = []
    for number, segment in enumerate(reversed(found)):
        segments.append(replace(segment, number=numbers.setdefault(texts[id(segment.program)], number)))
    return tuple(segments)


def segment_shapes(program: Program) -> list[EngineShape]:
    """The shapes of the different segments' engines; what the steps between alone ask for is no part of them."""
    numbers = sorted({segment.number for segment in segments_of(program)})
    return [replace(program.shape, key_range=1, kv_rows=1, kv_cache="compute", segment=number) for number in numbers]


def _parts(program: Program, shared: Mapping[str, list[str]]) -> list[list[Step]]:
    """The steps up to those that kernels run, these included, in parts of at most `MOST_WEIGHTS`, and those behind the
    last; parts of an output that several steps keep are values, `shared` by its name, that the last steps put together.
    """
    parts: list[list[Step]] = [[]]
    for step in program.steps:
        if parts[-1] and parts[-1][-1].cuts and not step.cuts:
            parts.append([])
        part: Any = step
        if (keep := step.keeps) is not None and keep.target in shared:
            part = replace(part, keep=replace(keep, target=shared[keep.target][keep.place], place=0))
        parts[-1].append(part)
    parts[-1] += [SideBySide(name, tuple(places)) for name, places in shared.items()]
    return [part for whole in parts[:-1] for part in _of_most_weights(whole)] + parts[-1:]


def _of_most_weights(steps: list[Step]) -> list[list[Step]]:
    """Steps cut in front of each whose matrix would be too much beside those before it."""
    parts: list[list[Step]] = [[]]
    held = 0
    for step in steps:
        size = 0 if step.multiplies is None else math.prod(step.multiplies.weight.shape)
        if held and size and held + size > MOST_WEIGHTS:
            parts.append([])
            held = 0
        parts[-1].append(step)
        held += size
    return parts


def _segment(program: Program, steps: list[Step], first: int, kinds: Edge, needed: set[str]) -> Segment:
    reads, written = _reads_of_all(steps), {name for step in steps for name in step.writes}
    outputs: Edge = {}
    for name in sorted(written & needed):
        output = f"next_{name}" if name in reads else name
        if output != name:
            steps = [*steps, Reshape(output, name, kinds[name][0])]
        outputs[output] = kinds[name]
    names: dict[str, str] = {}  # parts of one output are counted anew, so that it is no matter which they are
    for name in sorted(outputs):
        if name not in program.outputs and name.rpartition(".")[0] in program.outputs:
            names[name] = f"kept_{len(names)}"
    inputs = {_renamed(name, first, {}): kinds[name] for name in sorted(reads)}
    outputs = {names.get(name, name): kind for name, kind in outputs.items()}
    shape = replace(program.shape, key_range=1, kv_rows=1)
    own = Program(shape, inputs, tuple(_renamed(step, first, names) for step in steps), outputs, program.wide_residual)
    return Segment(0, own, first, {part: name for name, part in names.items()}, ())


def _reads_of_all(steps: list[Step]) -> set[str]:
    """What the steps read that none of them wrote before."""
    found: set[str] = set()
    written: set[str] = set()
    for step in steps:
        found |= set(step.reads) - written
        written |= set(step.writes)
    return found


def _renamed(part: Any, first: int, names: dict[str, str]) -> Any:
    """A step, or part of one, with layers counted from `first` on, and other `names`."""
    if isinstance(part, str):
        return names.get(part) or _LAYER.sub(lambda match: f"{match[1]}{int(match[2]) - first}", part)
    if isinstance(part, tuple):
        return tuple(_renamed(one, first, names) for one in part)
    if is_dataclass(part) and not isinstance(part, type):
        changed = {field.name: _renamed(getattr(part, field.name), first, names) for field in fields(part)}
        return replace(part, **changed)
    return part
