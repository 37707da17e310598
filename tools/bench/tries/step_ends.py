"""Times what a decode step does around its engine, a piece at a time, on Llama-3.2-1B shapes.

    python tools/bench/tries/step_ends.py ENGINE_DIRECTORY

Prints microseconds above the bare engine: GPU time of replayed CUDA graphs, and wall time of loops that read each
token. All variants take turns, and each sees the same lengths.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from gpu_timer import gpu_milliseconds

from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.model.config import EngineShape
from edgellm.engines.runners.comparison import open_runner
from edgellm.engines.runners.sampling_state import SamplingValues
from edgellm.kernels.interface import SequenceState

COMMITTED, REPLAYS, ROUNDS = 570, 60, 7
ONE = slice(0, 1)


class Variants:
    """The pieces of a step of one sequence, captured in several ways."""

    def __init__(self, runner) -> None:
        self.runner, self.backend, self.kernels = runner, runner.backend, runner.backend.kernels
        limits = runner.limits
        shape = EngineShape("decode", 1, 1, limits.key_ranges[0], limits.kv_rows)
        self.engine, self.inputs = runner._engine(shape, ONE), runner._step_inputs(shape)
        self.copied = self.backend.zeros((1, 8), "int32")
        self.no_mask = runner._buffers.mask[0:0].reshape(1, 1, 1, 0)
        self.index = self.backend.zeros((1,), "int32")

    def state(self, emitted=None) -> SequenceState:
        runner = self.runner
        arrays = runner._active, runner._token_ids, runner._start, runner._positions, runner.sampling.token_counts
        return SequenceState(*[array[ONE] for array in arrays], self.index, emitted or runner._emitted.tokens[ONE])

    def two_launches(self) -> None:
        runner, inputs = self.runner, self.inputs
        self.kernels.embedding_lookup(runner.embedding, runner._token_ids[ONE], inputs["inputs_embeds"])
        rows = runner._start[ONE], runner.offsets[ONE], runner.rotary
        self.kernels.prepare_attention(*rows, inputs["rope_rotary_cos_sin"], inputs["attention_mask"])

    def one_launch(self, mask=None) -> None:
        runner, inputs = self.runner, self.inputs
        self.kernels.prepare_step(
            runner.embedding,
            runner._token_ids[ONE],
            inputs["inputs_embeds"],
            runner._start[ONE],
            runner.offsets[ONE],
            runner.rotary,
            inputs["rope_rotary_cos_sin"],
            self.no_mask if mask is None else mask,
        )

    def argmax(self, state=None) -> None:
        self.kernels.argmax(self.runner._logits[ONE], self.runner._tokens[ONE], state)

    def in_order(self, step):
        """The step with every launch of argmax and of the engine's first kernel waiting for the one before."""

        def run() -> None:
            self.kernels._overlapping.can_overlap = False
            first = self.engine._launches[0]._config
            attributes, first.numAttrs = first.numAttrs, 0
            try:
                step()
            finally:
                self.kernels._overlapping.can_overlap = True
                first.numAttrs = attributes

        return run

    def sequence(self, *pieces):
        return lambda: [piece() for piece in pieces]

    def all(self):
        engine, overlapping = self.engine.enqueue, self.sequence
        mask = self.inputs["attention_mask"]
        before = self.in_order(overlapping(self.two_launches, engine))
        whole = overlapping(self.one_launch, engine, lambda: self.argmax(self.state()))
        into_device = overlapping(self.one_launch, engine, lambda: self.argmax(self.state(self.copied)))
        return {  # name: (pieces, whether the state advances)
            "bare engine": (engine, False),
            "embedding_lookup, prepare_attention, engine": (before, False),
            "prepare_step, engine in order": (self.in_order(overlapping(self.one_launch, engine)), False),
            "prepare_step, engine overlapping": (overlapping(self.one_launch, engine), False),
            "the same with a mask": (overlapping(lambda: self.one_launch(mask), engine), False),
            "engine, argmax in order": (self.in_order(overlapping(engine, self.argmax)), False),
            "engine, argmax overlapping": (overlapping(engine, self.argmax), False),
            "engine, argmax that advances": (overlapping(engine, lambda: self.argmax(self.state(self.copied))), True),
            "the same, emitting to the host": (overlapping(engine, lambda: self.argmax(self.state())), True),
            "whole step in order": (self.in_order(whole), True),
            "whole step, emitting to the device": (into_device, True),
            "whole step": (whole, True),
        }


def main() -> None:
    """Time every variant."""
    with open_runner("tensorrt", EngineDirectory.open(Path(sys.argv[1]))) as runner:
        backend, stream = runner.backend, runner.backend.device.stream
        prompt = [int(token) for token in np.random.default_rng(0).integers(0, 1000, 500)]
        runner.start(0, prompt, 0, SamplingValues()).wait()
        for _ in range(3):
            runner.decode(1).wait()
        variants = Variants(runner)
        pieces = variants.all()
        graphs = {name: (backend.capture(step, name), advances) for name, (step, advances) in pieces.items()}
        times: dict[str, list[float]] = {}

        def start_at(advances: bool) -> None:
            rows = COMMITTED if advances else COMMITTED + REPLAYS // 2
            backend.upload(runner._start[ONE], np.asarray([rows], np.int32))

        for _ in range(ROUNDS):
            for name, (graph, advances) in graphs.items():
                start_at(advances)
                span = gpu_milliseconds(stream, graph, REPLAYS, series=1, before=graph)
                times.setdefault(name, []).append(1000 * span)
            for name, graph, array in (
                ("loop that copies", "whole step, emitting to the device", variants.copied),
                ("loop that sees", "whole step", runner._emitted.tokens[ONE]),
            ):
                launch = graphs[graph][0]
                start_at(True)
                launch()
                unread = [backend.read(array)]
                started = time.perf_counter()
                for _ in range(REPLAYS):
                    launch()
                    unread.append(backend.read(array))
                    unread.pop(0).wait()
                times.setdefault(name, []).append((time.perf_counter() - started) / REPLAYS * 1e6)
                unread.pop(0).wait()
        bare = statistics.median(times["bare engine"])
        for name, values in times.items():
            middle = statistics.median(values)
            print(f"{name:45} {middle:8.1f} us  {middle - bare:+6.1f}  (spread {max(values) - min(values):.1f})")


if __name__ == "__main__":
    main()
