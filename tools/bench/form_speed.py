"""Forms of packed layers in whole steps: each shape's others, one after the other, beside the one that it has.

    python tools/bench/form_speed.py qwen3-30b-a3b:int4+int4 llama-1b:q4_k_m [--rows 1 8 16] [--turns 2] [--as orin]

Microseconds of a decode step behind 128 tokens, or of one that verifies so many given ones (`--rows`), as one captured
graph in which the layers of one shape have another form (any of `fitted.json`, or of `MORE`), beside the step with the
fastest forms of the shapes before, which it joins if it is faster; at last beside the step as it ships. What is fastest
depends on the other layers' forms: with more `--turns` all are tried again. Shapes are rows of activations, rows and
columns of weights, how many rows chose experts, if these are theirs, and their format.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
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

TOKENS = 128
MORE = (
    *((1, 1, 2, 2), (1, 3, 2, 2), (1, 4, 2, 2), (1, 8, 1, 2), (1, 2, 1, 1), (1, 8, 1, 1), (1, 4, 1, 2, True)),
    *((2, 0, 2, 2), (2, 1, 1, 1), (2, 2, 1, 2, True), (2, 4, 1, 2, True), (2, 3, 1, 1, True)),
)
_NAMES = ("OVERLAPPING", "ALONE", "BY_TILES", "EIGHT_TILES", "MORE_TILES", "DEEP_TILES", "EXPERTS", "MEASURED", "APART")


def leaves(value: Any) -> Iterator[tuple[int, ...]]:
    """The forms in tables of such."""
    parts = [*value.values()] if isinstance(value, dict) else value
    if isinstance(parts[0], int):
        yield tuple(parts)
    else:
        yield from (form for part in parts for form in leaves(part))


def sweep(
    engine: Any, module: Any, graph_of: Callable[[Any], Any], microseconds: Callable[[Any], float], turns: int = 1
) -> None:
    """Print the forms of each shape of a step's engine; `graph_of` launches."""
    found, forced, best = dict[Any, list[Any]](), dict[Any, Any](), dict[Any, Any]()
    ships_rows, ships_tiles, tilings = packed_rows.packed_rows_ways, packed_tiles.packed_tiling, packed_linear._FORMS
    of_rows = [*leaves([getattr(packed_rows, f"_{name}") for name in _NAMES] + [MORE])]
    of_tiles = {64: [*leaves((packed_tiles._OF_MANY, packed_tiles._OF_FEW))]}
    of_warps = {tiles: [*dict.fromkeys(leaves(tilings))] for tiles in tilings}

    def shape_of(batch: int, layout: Any, experts_rows: int = 0) -> tuple[Any, ...]:
        return batch, layout.rows, layout.columns, experts_rows, str(layout.format)

    def tiled(*asked: Any) -> list[Any]:
        with patch.object(packed_linear, "_FORMS", of_warps), patch.object(packed_tiles, "_OF_MANY", of_tiles):
            return [*packed_tiles.packed_tiles(*asked), *packed_linear.packed_tilings(*asked)]

    def rows(batch: int, layout: Any, gpu: Any, normed: bool, experts_rows: int = 0) -> list[Any]:
        asked, shape = (batch, layout, gpu, normed, experts_rows), shape_of(batch, layout, experts_rows)
        ships, form = ships_rows(*asked), forced.get(shape)
        if ships and shape not in found:
            with patch.object(packed_rows, "_experts_forms", lambda *_: of_rows):
                every = ships[:1] + ships_rows(*asked[:3], normed=not experts_rows, experts_rows=experts_rows)
            found[shape] = [*dict.fromkeys(every + (tiled(*asked[:3]) if batch > 1 and not experts_rows else []))]
        return ships if form is None else [form] if isinstance(form, packed_rows.PackedRows) else []

    def tiles(batch: int, layout: Any, gpu: Any, adapted: bool = False) -> Any:
        shape, ships = shape_of(batch, layout), ships_tiles(batch, layout, gpu, adapted)
        found.setdefault(shape, [*dict.fromkeys([ships, *tiled(batch, layout, gpu)])])
        return forced.get(shape, ships)

    def launches(chosen: dict[Any, Any]) -> Any:
        nonlocal forced
        forced, engine._launches = chosen, []
        return engine.launches()

    def compared(chosen: dict[Any, Any], other: Any) -> list[float]:
        step = graph_of(launches(chosen))
        spans = [(microseconds(step), microseconds(other))]
        if spans[0][0] < 1.01 * spans[0][1]:
            spans += [(microseconds(step), microseconds(other)) for _ in range(3)]
        return [*map(min, zip(*spans, strict=True))]

    with patch.object(packed_rows, "packed_rows_ways", rows), patch.object(tiled_linear, "packed_tiling", tiles):
        launches({})
        with module.side_by_side():  # all are compiled
            for shape, forms in [*found.items()]:
                for form in forms[1:]:
                    launches({shape: form})
        shipped = kept = graph_of(launches({}))
        for shape, forms in [*found.items()] * turns:
            now = best.get(shape, forms[0])
            print(f"{shape} has {now}", flush=True)
            others = [form for form in forms if form != now]
            spans = sorted(([*compared(best | {shape: form}, kept), form] for form in others), key=lambda each: each[0])
            for span, own, form in spans[:3]:
                print(f"    {span:9.1f} us, as it was {own:9.1f}: {form}", flush=True)
            if spans[0][0] < 0.998 * spans[0][1]:
                best[shape] = spans[0][2]
                kept = graph_of(launches(best))
        print("all that are faster: {:.1f} us, as it ships {:.1f}".format(*compared(best, shipped)), flush=True)


def measure(work: Path, model: str, rows: int, turns: int) -> None:
    """Of a model, steps of so many rows."""
    shape, _, weights = model.partition(":")
    directory = shape_directory(work, shape, EngineLimits(1, 16, 1024), weights)
    backend = random_backend("tensorrt", directory)
    runner = DecodingRunner.open(backend, directory, drafts=False)
    runner.verification.reserve(16)
    runner.start(0, random_prompt(TOKENS), 0, SamplingValues()).wait()
    tree = GivenTree([*range(2, rows + 1)], [*range(-1, rows - 2)])
    with enqueue_replaced(None) as listed:
        (runner.round(1, given(rows - 1, rows - 1), None, [tree]) if rows > 1 else runner.decode(1)).wait()
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

    sweep(engine, backend.kernel_module, graph_of, microseconds, turns)
    runner.close()


def main() -> None:
    """The whole of the tool."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--rows", type=int, nargs="+", default=[1])
    parser.add_argument("--turns", type=int, default=1)
    arguments = parse(parser)
    with tempfile.TemporaryDirectory() as folder:
        for model in arguments.models:
            for rows in arguments.rows:
                print(f"{model}, {rows} rows", flush=True)
                measure(Path(folder), model, rows, arguments.turns)


if __name__ == "__main__":
    main()
