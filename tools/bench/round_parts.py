"""What each kernel adds to an EAGLE round, with the shapes of Llama-3.2-1B: times with it less times without it.

    python tools/bench/round_parts.py [--work DIRECTORY] [--plans "tree 10/6/60" "chain 5"] [--variants]

For each plan: the round, its kernels that are no engine's alone, and both without each of these kernels (whose results
then are those of an earlier round). For each draft step: its engine alone, and without each of its launches. With
`--variants` the same of other versions of the draft tree's kernels. Uses the directories of `eagle_speed.py` (and
builds them if they are missing). Needs TensorRT, pycuda and a GPU.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from eagle_speed import RoundBench, prepare
from probes import enqueue_replaced
from simulated_acceptance import schedule, simulated_mean

from edgellm.drafting import DraftingConfig
from edgellm.drafting_controller import candidate_plans
from edgellm.engines.backend import open_backend
from edgellm.engines.draft_plan import DraftPlan
from edgellm.engines.eagle_runner import EagleRunner
from edgellm.engines.gpu import find_gpu
from edgellm.kernels import compiler, cuda_draft_tree
from edgellm.kernels.launch import KernelModule, Launch

MEAN = 4.24
PARTS = (
    "prepare_step",
    "draft_expand",
    "draft_proposal",
    "draft_verification",
    "eagle_accept",
    "move_accepted",
    "advance_accepted",
    "decode_norms_linear_wide",
)
WAIT = "wait_for_previous_kernel();"
#: Text to replace in a source, and constants of `cuda_draft_tree` that go with it.
VARIANTS: dict[str, tuple[dict[str, list[tuple[str, str]]], dict[str, int]]] = {
    "expand, 512 threads": (
        {"draft_expand.cu": [("EXPAND_THREADS = 1024", "EXPAND_THREADS = 512")]},
        {"_EXPAND_THREADS": 512},
    ),
    "expand does nothing": ({"draft_expand.cu": [(WAIT, WAIT + " if (vocabulary != 0) return;")]}, {}),
    "expand without sums": ({"draft_expand.cu": [("if (score_children) {", "if (score_children > 1) {")]}, {}),
    "expand without ranks": ({"draft_expand.cu": [("if (own >= bound) {", "if (own > ~0ull - 1) {")]}, {}),
    "proposal does nothing": ({"draft_proposal.cu": [(WAIT, WAIT + " if (vocabulary != 0) return;")]}, {}),
    "proposal does not merge": (
        {"draft_proposal.cu": [("if (chunks == 0) {", "if (chunks != 0x7fffffff) {")]},
        {},
    ),
    "proposal and verification merge one place": (
        {"draft_children.cuh": [("place = 0; place < top_k; ++place) {", "place = 0; place < 1; ++place) {")]},
        {},
    ),
    "proposal does not choose": ({"draft_proposal.cu": [("if (select) choose", "if (select > 1) choose")]}, {}),
    "verification does nothing": ({"draft_verification.cu": [(WAIT, WAIT + " if (vocabulary != 0) return;")]}, {}),
    "verification takes the first nodes": (
        {"draft_verification.cu": [("if (reached > wanted) {", "if (reached > ~0u - 1) {")]},
        {},
    ),
}


@contextmanager
def left_out(name: str) -> Iterator[None]:
    """Meanwhile kernels whose names begin so are not launched."""
    original = Launch.__call__

    def call(launch: Launch) -> None:
        if not launch.name.startswith(name):
            original(launch)

    Launch.__call__ = call
    try:
        yield
    finally:
        Launch.__call__ = original


class PartsBench(RoundBench):
    """Rounds of one plan at a time, in microseconds."""

    def use(self, plan: DraftPlan, mean: float) -> None:
        self.plan, self.lengths = plan, schedule(mean, plan.steps)
        self.fill(self.lengths)
        for _ in range(3):
            self.runner.round(1, plan).wait()

    def whole(self) -> float:
        return 1000 * self.milliseconds(self.graph(self.plan), self.lengths, self.plan)

    def others(self) -> float:
        """Of the kernels that are no engine's, without those that force acceptance."""
        self.runner.before_acceptance = None
        try:
            with enqueue_replaced(lambda engine: None):
                launch = self.graph(self.plan)
        finally:
            self.runner.before_acceptance = self.forced
        return 1000 * self.milliseconds(launch, self.lengths, self.plan)

    def line(self, name: str, before: tuple[float, float] = (0.0, 0.0)) -> tuple[float, float]:
        whole, others = self.whole(), self.others()
        less = "" if before == (0.0, 0.0) else f"  less {before[0] - whole:7.1f} {before[1] - others:7.1f}"
        print(f"{self.plan.name:14s} {name:48s} round {whole:8.1f}  others {others:7.1f}{less}", flush=True)
        return whole, others

    def engines(self) -> None:
        """Each engine of the round alone and without each of its launches, as a graph of several steps."""
        with enqueue_replaced(None) as listed:
            for stage in self.runner.prepare_round(1, self.plan).stages.values():
                stage()
        for engine in {engine.shape: engine for engine in listed}.values():
            launches = getattr(engine, "_launches", [])
            whole = self._repeated(engine.enqueue)
            print(f"{engine.shape.name:32s} {whole:8.1f} us, {len(launches)} launches", flush=True)
            if len(launches) > 20:
                continue
            for left in launches:
                rest = [launch for launch in launches if launch is not left]
                without = self._repeated(lambda rest=rest: [launch() for launch in rest])
                print(f"    less {whole - without:6.1f} without {left.name}", flush=True)

    def _repeated(self, step: Callable[[], object], count: int = 10) -> float:
        def many() -> None:
            for _ in range(count):
                step()

        self.fill(self.lengths)
        many()
        launch = self.backend.capture(many, "repeated steps")
        return 1000 * self.milliseconds(launch, self.lengths, self.plan) / count


def variant_cubin(architecture: str, name: str) -> bytes:
    """The draft tree's kernels with some text replaced in their sources."""
    sources = {file: text for file, text in compiler._sources().items() if file.endswith(".cuh") or "draft_" in file}
    for file, pairs in VARIANTS[name][0].items():
        for old, new in pairs:
            if old.encode() not in sources[file]:
                raise ValueError(f"{file} has no {old!r}")
            sources[file] = sources[file].replace(old.encode(), new.encode())
    original, compiler._sources = compiler._sources, lambda: sources
    try:
        return compiler.compile_kernels(architecture)
    finally:
        compiler._sources = original


@contextmanager
def variant(runner: EagleRunner, name: str, cubin: Future[bytes]) -> Iterator[None]:
    """Meanwhile the draft tree's kernels are those of a variant."""
    constants, device, kernels = VARIANTS[name][1], runner.backend.device, runner.backend.draft_tree
    module, before = kernels._module, {key: getattr(cuda_draft_tree, key) for key in constants}
    kernels._module = KernelModule(device.compute_capability, device.stream.handle, cubin.result())
    for key, value in constants.items():
        setattr(cuda_draft_tree, key, value)
    try:
        yield
    finally:
        kernels._module = module
        for key, value in before.items():
            setattr(cuda_draft_tree, key, value)


def main() -> None:
    """Print one line a measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "edgellm-eagle-bench")
    parser.add_argument("--plans", nargs="+", default=["tree 10/6/60", "chain 5"])
    parser.add_argument("--variants", action="store_true")
    arguments = parser.parse_args()
    _, directory = prepare(arguments.work)
    architecture = find_gpu().compute_capability
    pool = ProcessPoolExecutor(8, get_context("spawn"))
    cubins = {name: pool.submit(variant_cubin, architecture, name) for name in VARIANTS if arguments.variants}
    plans = {p.name: p for p in candidate_plans(DraftingConfig.largest(directory.limits), directory.limits)}
    runner = EagleRunner.open(open_backend("tensorrt", directory), directory)
    try:
        bench = PartsBench(runner)
        for name in arguments.plans:
            plan = plans[name]
            bench.use(plan, simulated_mean(plan, list(plans.values())[-1], MEAN))
            before = bench.line("all")
            for part in PARTS:
                try:
                    with left_out(part):
                        bench.line(f"without {part}", before)
                except Exception:
                    traceback.print_exc()
            for other, cubin in cubins.items():
                try:
                    with variant(runner, other, cubin):
                        bench.line(other, before)
                except Exception:
                    traceback.print_exc()
            bench.line("all, again", before)
            bench.engines()
    finally:
        runner.close()
        pool.shutdown()


if __name__ == "__main__":
    main()
