"""The base's weights on several GPUs: each gets its part of the files alone, and the first what it uses besides."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from edgellm.engines.backends.cuda_backend import CudaBackend
from edgellm.engines.backends.packed_loading import PackedLoader
from edgellm.engines.backends.rank_memory import RankMemory
from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.checkpoints.weights import check_finite, counted, iterate_weight_parts
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.errors import EngineError
from edgellm.engines.families.programs import model_program
from edgellm.engines.model.config import WeightSpec
from edgellm.engines.model.decoder import decoder_weights, embedding_name
from edgellm.engines.model.memory_plan import MemoryPlan
from edgellm.engines.model.sharding import UNIT, Cut, Range, Share, sharded
from edgellm.engines.model.states import is_recurrent
from edgellm.kernels.arrays import ITEM_SIZES, DeviceArray
from edgellm.kernels.quantization.code_words import BLOCK_ROWS
from edgellm.kernels.quantization.device_layout import DeviceLayout, PackedMatrix
from edgellm.kernels.quantization.packed_weight import WeightFormat
from edgellm.kernels.quantization.row_runs import PackedLayout, RunsLayout


class RankWeights:
    """What each of `count` ranks holds of the base. Raises EngineError that names what they cannot share."""

    def __init__(
        self, directory: EngineDirectory, count: int, packed: Mapping[str, PackedLayout], shares_table: bool = True
    ) -> None:
        """`packed` are the layouts of the packed weights as one GPU has them. `shares_table`: each rank has rows of the
        table of embeddings, which the first reads there; else that has it whole."""
        config, limits = directory.config, directory.limits
        self._specs = {spec.name: spec for spec in decoder_weights(config)}
        columns = 2 * (config.rotary_columns + config.token_row_size)
        columns += (2 + len(config.feature_layers)) * config.hidden_size
        self._dtype, self._prompt = directory.dtype, limits.prefill_chunk * columns
        decode = limits.base_shape("decode", 1, 1, limits.key_ranges[-1])
        program = model_program(config, limits.with_adapters(decode) if limits.has_lora else decode)
        parted = [name for name, cut in sharded(program, 0, count).cuts.items() if cut.axis and name in packed]
        unit = math.lcm(UNIT, *(format.unit for name in parted for format in _formats(packed[name])))
        #: What each rank has of the base's steps: of packed weights whole groups of columns.
        self.shares = [Share(rank, count, unit) for rank in range(count)]
        shards = [sharded(program, *share) for share in self.shares]
        self._count, self._used = count, program.weights.keys()
        self._cuts = [shard.cuts for shard in shards]
        heads, recurrent = dict[str, int](), dict[str, int]()
        for name, (size, _) in program.states.items():
            (recurrent if is_recurrent(name) else heads)[name] = size[1]
        #: Items of a memory plan of which a rank has a part: of which tensors, and how wide these are.
        self._shared = {
            "KV caches": heads,
            "KV rows of windows": heads,
            "recurrent states": recurrent,
            "inputs of recurrent layers": {name: size[2] for name, (size, _) in program.kept.items()},
        }
        self._adapters = {name: size for name, size in program.matrices.items() if name not in program.weights}
        table, rows = embedding_name(config), config.vocab_size
        cuts = [{name: cut for name, cut in shard.cuts.items() if name in self._specs} for shard in shards]
        if shares_table:  # as a head, which it may be
            for rank, own in enumerate(cuts):
                own[table] = Cut(0, ((rows * rank // count, rows * (rank + 1) // count),))
        #: Of each rank what is cut of those weights that it holds in part, and of those that it uses in part.
        self._held, self._bound = cuts, [dict(own) for own in cuts]
        whole = set() if shares_table else {table}
        if (draft := directory.draft) is not None:
            drafts = (model_program(draft.config, shape) for shape in limits.engine_shapes() if shape.model == "draft")
            whole |= {spec.name for own in drafts for spec in own.weights.values() if not spec.parts}
        #: The table of embeddings, whose rows ranks share; None where the first has all of it, as for a draft's head.
        self.table = None if table in whole else table
        self._held[0] = {name: cut for name, cut in cuts[0].items() if name not in whole}
        #: Of each rank its packed weights as it holds them.
        self.layouts = [
            {
                name: _cut_layout(layout, self._specs[name], held.get(name))
                for name, layout in packed.items()
                if self._holds(rank, name)
            }
            for rank, held in enumerate(self._held)
        ]

    def ranges(self, rank: int, name: str, shape: Sequence[int]) -> tuple[Range, ...]:
        """Of a state or of adapters of a shape, what a rank has of the second axis."""
        cut = self._cuts[rank].get(name)
        return ((0, shape[1]),) if cut is None else cut.ranges

    def _holds(self, rank: int, name: str) -> bool:
        """Whether a rank has anything of a weight: what no step uses, a table that is not shared, the first has."""
        return name in self._specs and (rank == 0 or name in self._used or name in self._held[rank])

    def _shape(self, rank: int, name: str) -> tuple[int, ...]:
        cut, shape = self._held[rank].get(name), self._specs[name].shape
        return shape if cut is None else (*shape[: cut.axis], cut.size, *shape[cut.axis + 1 :])

    def _edge(self, rank: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of the memory of what a rank holds."""
        packed = self.layouts[rank]
        return {
            name: (packed[name].shape, "uint8") if name in packed else (self._shape(rank, name), spec.dtype)
            for name, spec in self._specs.items()
            if self._holds(rank, name)
        }

    def load(
        self, checkpoint: Checkpoint, ranks: Sequence[CudaBackend], progress: Callable[[int, int], None] | None = None
    ) -> list[dict[str, Any]]:
        """What each rank holds, by name; see `Backend.load_weights`. The files are read once but for packed weights."""
        loaded: list[dict[str, Any]] = []
        for rank, backend in enumerate(ranks):
            with backend.current():
                loaded.append(backend.zeros_side_by_side(self._edge(rank)))
        total = sum(array.nbytes for arrays in loaded for array in arrays.values())
        advance = counted(total, progress)
        layouts = self.layouts[0]
        dense = [spec for name, spec in self._specs.items() if name not in layouts]
        for spec, offset, values in iterate_weight_parts(checkpoint, dense, self._dtype):
            for rank, backend in enumerate(ranks):
                if not self._holds(rank, spec.name):
                    continue
                flat, first = loaded[rank][spec.name].reshape(-1), offset // values.itemsize
                cut = self._held[rank].get(spec.name)
                pieces = [(first, values)] if cut is None else pieces_of(cut, spec.shape, first, values)
                with backend.current():
                    for begin, piece in pieces:
                        backend.upload(flat[begin : begin + piece.size], piece)
                        advance(piece.nbytes)
        check_finite(checkpoint, dense)
        for rank, backend in enumerate(ranks):
            own = self.layouts[rank]
            with backend.current():
                if own:
                    held = self._held[rank]
                    loader = PackedLoader(backend, backend.kernel_module, self._dtype, held, self.table)
                    specs = [self._specs[name] for name in own]
                    loaded[rank] |= loader.load(checkpoint, specs, loaded[rank], advance)
                backend.synchronize()
        advance(total)
        return loaded

    def parts(self, rank: int, held: Mapping[str, Any]) -> dict[str, Any]:
        """What the steps of a rank are bound to, of what it holds."""
        cuts = self._bound[rank]
        return {
            name: first_rows(held[name], cuts[name].size)
            if name in cuts and name not in self._held[rank]
            else held[name]
            for name in self._used
        }

    def plan(self, rank: int, whole: MemoryPlan, scratch: int) -> MemoryPlan:
        """What a rank takes of its GPU, where one GPU would take the `whole`, and its engines so much scratch."""
        sizes = [
            math.prod(shape) * ITEM_SIZES[self._dtype if dtype == "compute" else dtype]
            for shape, dtype in self._edge(rank).values()
        ]
        own = {
            "weights": sum(sizes),
            "engine scratch": scratch,
            "exchange with other GPUs": RankMemory.nbytes(self._count),
        }
        if "LoRA adapters" in whole.items:
            columns = {
                name: sum(end - begin for begin, end in self.ranges(rank, name, size))
                for name, size in self._adapters.items()
            }
            own["LoRA adapters"] = (
                sum(size[0] * columns[name] for name, size in self._adapters.items()) * ITEM_SIZES[self._dtype]
            )
        for item, widths in self._shared.items():
            part = max((self._cuts[rank][name].size / width for name, width in widths.items()), default=0)
            own |= {item: math.ceil(whole.items[item] * part)} if item in whole.items else {}
        if rank == 0:
            return replace(whole, items=whole.items | own)
        # Inputs of a step, and what is put out for nobody.
        own["step buffers"] = self._prompt * ITEM_SIZES[self._dtype]
        return MemoryPlan(own | {name: size for name, size in whole.items.items() if name == "engines' code"})


def first_rows(weight: Any, rows: int) -> Any:
    """The first rows of a weight, where they are."""
    if isinstance(weight, DeviceArray):
        return weight[:rows]
    if isinstance(weight, PackedMatrix):
        return replace(weight, layout=replace(weight.layout, rows=rows), data=weight.data[: -(-rows // BLOCK_ROWS)])
    raise EngineError("a weight that is packed in several formats, and used whole besides, is not shared by GPUs")


def pieces_of(cut: Cut, shape: Sequence[int], first: int, values: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """`values` [n], which begin at element `first` of a weight of a `shape`, as far as they stand in a cut of it: where
    each piece begins in the cut, and its values."""
    columns = math.prod(shape[1:])
    begin = 0
    if cut.axis == 0:
        for start, stop in cut.ranges:
            one, other = max(first, start * columns), min(first + values.size, stop * columns)
            if one < other:
                yield begin + one - start * columns, values[one - first : other - first]
            begin += (stop - start) * columns
        return
    ((start, stop),) = cut.ranges
    width, done = stop - start, 0
    while done < values.size:
        row, column = divmod(first + done, columns)
        whole = (values.size - done) // columns
        if column == 0 and whole:
            rows = values[done : done + whole * columns].reshape(whole, columns)
            yield row * width, np.ascontiguousarray(rows[:, start:stop]).reshape(-1)
            done += whole * columns
            continue
        count = min(columns - column, values.size - done)  # a row's end, or its beginning
        one, other = max(column, start), min(column + count, stop)
        if one < other:
            yield row * width + one - start, values[done + one - column : done + other - column]
        done += count


def _cut_layout(layout: PackedLayout, whole: WeightSpec, cut: Cut | None) -> PackedLayout:
    """The layout of a rank's part of a packed weight. Raises EngineError where its columns are no whole groups, or in
    another order than inputs."""
    if cut is None:
        return layout
    for format in _formats(layout) if cut.axis else ():
        ends = ", ".join(f"{begin} to {end}" for begin, end in cut.ranges)
        if format.permuted or any(place % format.unit for each in cut.ranges for place in each):
            raise EngineError(
                f"{whole.name} ({format}) cannot be shared by GPUs: one would have columns {ends}, which must be whole "
                "groups of columns that are not permuted (act order). Take another number of GPUs, or one"
            )
    runs, parts, first = list[Any](), iter(whole.parts), 0
    for run in layout.runs:
        rows, end = 0, first + run.rows
        while first < end:
            count = next(parts)[1][0]
            own = cut.within(first, count)
            rows, first = rows + (count if cut.axis else own.size), first + count
        runs.append(replace(run, rows=rows, columns=cut.size if cut.axis else run.columns))
    return runs[0] if len(runs) == 1 else RunsLayout(tuple(runs))


def _formats(layout: PackedLayout) -> list[WeightFormat]:
    """Those of a weight's packed rows."""
    return [run.format for run in layout.runs if isinstance(run, DeviceLayout)]
