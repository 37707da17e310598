"""Forms of packed layers in whole steps: each shape's others, one after the other, beside the one that ships.

    python tools/bench/form_speed.py [qwen3-30b-a3b:int4+int4 llama-1b:int4 ...] [--rows 1 8 16] [--as orin]

Microseconds of a decode step behind 128 tokens, or of one that verifies so many given ones (`--rows`), as one captured
graph in which the layers of one shape have another form; in turns with the step as it ships, the least of three. At
last all that were faster, together. Experts' rows are those of all that one row chooses.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from as_device import parse
from probes import enqueue_replaced
from random_model import random_backend, random_prompt, shape_directory

from edgellm.device.limits import gpu_milliseconds
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.runners.sampling_state import SamplingValues
from edgellm.engines.speculation.draft_plan import given
from edgellm.engines.speculation.round import GivenTree
from edgellm.engines.speculation.runner import DecodingRunner
from edgellm.kernels.decode import packed_linear, packed_rows, packed_tiles, tiled_linear
from edgellm.kernels.errors import KernelError

MODELS = ("qwen3-30b-a3b:int4+int4", "llama-1b:int4", "qwen3.5-2b:int4", "lfm2-1.2b:int4")
TOKENS = 128
#: Of `PackedRows`, as in `fitted.json`; of `PackedTiling`: warps, tiles of weights, depth, blocks; of `PackedTiles`.
ROWS: tuple[tuple[int, ...], ...] = (
    *((1, 0, 1, 2), (1, 0, 2, 2), (1, 1, 2, 2), (1, 2, 2, 2), (1, 3, 2, 2), (1, 4, 2, 2), (1, 4, 1, 1), (1, 4, 1, 2)),
    *((1, 8, 1, 2), (1, 8, 1, 2, True), (1, 4, 2, 2, True), (2, 0, 1, 1), (2, 0, 2, 2), (2, 1, 2, 2), (2, 2, 1, 1)),
    *((2, 2, 1, 2), (2, 2, 2, 2), (2, 4, 1, 1), (2, 4, 1, 2), (2, 4, 1, 2, True), (2, 1, 2, 2, False, 1)),
)
TILINGS = (
    *((16, 1, 4, 2), (16, 1, 3, 1), (16, 1, 2, 2), (16, 2, 2, 1), (16, 2, 3, 1), (4, 1, 4, 4), (4, 1, 4, 3)),
    *((4, 2, 4, 3), (4, 2, 4, 2), (4, 2, 3, 2), (4, 1, 8, 2)),
)
TILES: tuple[tuple[int, ...], ...] = (
    *((2, 1, 4, 4, 2, 0), (2, 1, 2, 4, 4, 0), (2, 2, 1, 4, 3, 8, 1, 3), (2, 1, 1, 16, 3, 6), (2, 1, 1, 16, 2, 4)),
    *((2, 2, 8, 1, 3, 0), (2, 1, 4, 4, 3, 0), (2, 2, 2, 4, 3, 0), (2, 2, 4, 4, 2, 6), (2, 2, 4, 4, 2, 3, 4)),
    *(
        (2, 2, 1, 16, 2, 3),
        (2, 2, 1, 16, 2, 4),
        (2, 2, 4, 4, 3, 0),
        (2, 2, 4, 4, 2, 0),
        (2, 1, 1, 16, 2, 3),
        (2, 1, 2, 4, 3, 6),
    ),
    *((2, 2, 1, 4, 4, 8, 1, 2), (2, 1, 1, 4, 4, 8, 1, 4), (2, 1, 2, 4, 3, 0, 1, 2), (2, 1, 4, 4, 2, 0, 1, 2)),
)
#: Rows of activations, rows and columns of weights, and how many rows chose experts, if these are theirs.
Shape = tuple[int, int, int, int]


class Forms:
    """Stands before what chooses: the forms of each shape, the one that ships first, and those that are `forced`."""

    def __init__(self) -> None:
        self.found: dict[Shape, list[Any]] = {}
        self.forced: dict[Shape, Any] = {}
        self._rows, self._tiles = packed_rows.packed_rows_ways, packed_tiles.packed_tiles

    @contextmanager
    def before(self) -> Iterator[None]:
        """Within, layers get their forms here; those of 2 to 8 rows may have those of 9 to 64."""
        with (
            patch.object(packed_rows, "packed_rows_ways", self._of_rows),
            patch.object(tiled_linear, "packed_tiles", self._of_tiles),
            patch.object(tiled_linear, "LEAST_ROWS", 2),
        ):
            yield

    def _of_rows(self, batch: int, layout: Any, gpu: Any, normed: bool, experts_rows: int = 0) -> list[Any]:
        given_, shape = (batch, layout, gpu, normed, experts_rows), (batch, layout.rows, layout.columns, experts_rows)
        ships, form = self._rows(*given_), self.forced.get(shape)
        if ships and shape not in self.found:
            with patch.object(packed_rows, "_experts_forms", lambda *_: ROWS):
                every = [*ships[:1], *self._rows(*given_)]
            more = self._tiled(batch, layout, gpu) if batch > 1 and not experts_rows else []
            self.found[shape] = [*dict.fromkeys(every + more)]
        return ships if form is None else [form] if isinstance(form, packed_rows.PackedRows) else []

    def _of_tiles(self, batch: int, layout: Any, gpu: Any) -> list[Any]:
        shape, own = (batch, layout.rows, layout.columns, 0), packed_linear.packed_tilings
        ships = (own if batch < packed_tiles.LEAST_ROWS else self._tiles)(batch, layout, gpu)[:1]
        self.found.setdefault(shape, [*dict.fromkeys(ships + self._tiled(batch, layout, gpu))])
        return [self.forced[shape]] if shape in self.forced else ships

    def _tiled(self, batch: int, layout: Any, gpu: Any) -> list[Any]:
        forms = dict.fromkeys((1, 2, 4, 8), TILINGS)
        with patch.object(packed_linear, "_FORMS", forms), patch.object(packed_tiles, "_OF_MANY", {64: TILES}):
            return [*self._tiles(batch, layout, gpu), *packed_linear.packed_tilings(batch, layout, gpu)]


def sweep(engine: Any, module: Any, graph_of: Callable[[Any], Any], microseconds: Callable[[Any], float]) -> None:
    """Print a line for each shape of a step's engine, and one of all that are faster; `graph_of` launches."""
    forms, best = Forms(), dict[Shape, Any]()

    def launches(forced: dict[Shape, Any]) -> Any:
        forms.forced, engine._launches = forced, []
        return engine.launches()

    with forms.before():
        launches({})
        with module.side_by_side():  # all are compiled
            for shape, ways in [*forms.found.items()]:
                for form in ways[1:]:
                    try:
                        launches({shape: form})
                    except KernelError:
                        ways.remove(form)
        ships = graph_of(launches({}))

        def compared(forced: dict[Shape, Any]) -> tuple[float, float]:
            step, most = graph_of(launches(forced)), 1.03 * microseconds(ships)
            turns = 3 if microseconds(step) < most else 1
            mine, other = zip(*((microseconds(ships), microseconds(step)) for _ in range(turns)), strict=True)
            return min(other), min(mine)

        for shape, ways in forms.found.items():
            found = sorted(((*compared({shape: form}), str(form), form) for form in ways[1:]), key=lambda each: each[0])
            print(f"{shape} ships {ways[0]}", flush=True)
            for other, mine, name, form in found[:7]:
                print(f"    {other:9.1f} us, as it ships {mine:9.1f}: {name}", flush=True)
                if other < 0.998 * mine:
                    best.setdefault(shape, form)
        if best:
            print("all that are faster, {:.1f} us, as it ships {:.1f}".format(*compared(best)), flush=True)


def measure(work: Path, model: str, rows: int) -> None:
    """Of a model, steps of so many rows."""
    shape, _, weights = model.partition(":")
    directory = shape_directory(work, shape, EngineLimits(1, 16, 1024), weights)
    backend = random_backend("tensorrt", directory)
    runner = DecodingRunner.open(backend, directory, drafts=False)
    try:
        runner.verification.reserve(16)
        runner.start(0, random_prompt(TOKENS), 0, SamplingValues()).wait()
        with enqueue_replaced(None) as listed:
            if rows == 1:
                runner.decode(1).wait()
            else:
                tree = GivenTree([*range(2, rows + 1)], [*range(-1, rows - 2)])
                runner.round(1, given(rows - 1, rows - 1), None, [tree]).wait()
        engine = next(each for each in listed if each.shape.phase in ("decode", "verify"))

        def graph_of(launches: Any) -> Any:
            def step() -> None:
                for launch in launches:
                    launch()

            step()  # loads code
            return backend.capture(step, "a step")

        def microseconds(step: Any) -> float:
            backend.upload(runner.base._state.kvcache_start_index[:1], np.asarray([TOKENS], np.int32))
            return 1000 * gpu_milliseconds(backend.stream, step, 20, 1, step)

        sweep(engine, backend.kernel_module, graph_of, microseconds)
    finally:
        runner.close()


def main() -> None:
    """The whole of the tool."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--rows", type=int, nargs="+", default=[1])
    arguments = parse(parser)
    with tempfile.TemporaryDirectory() as folder:
        for model in arguments.models:
            for rows in arguments.rows:
                print(f"{model}, {rows} rows", flush=True)
                measure(Path(folder), model, rows)


if __name__ == "__main__":
    main()
