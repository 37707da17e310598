"""The workloads of `drafting_workloads` on a real device: its steps and rounds, on texts that are played back.

    python -m tools.bench.played_workloads [--shapes shipped] [--weights float16] [--backend tensorrt] [--turns 5]
                                           [--tokens 1536] [--seconds 100] [--only WORDS] [--output RESULTS.json]

Weights are random, of the shapes of a published model or the shipped one; loop, learner, index and rules' masks are
the real ones. Before tokens are chosen the logits of the text's next token are raised; of what the draft model proposes
a path, as long as the text says (see `drafting_workloads`), becomes the text's tokens, so that acceptance takes it.

Workloads that differ by their device alone are one. Each is decoded by every fixed plan of the draft model once, then
plainly (with the draft loaded), as the learner chooses, and by the fastest of these plans, in turns. Printed
are medians: the speed over plain decoding's; the least share of its speed over any 512 tokens, from the first token
on, and the same of plain decoding in the turn before (what the machine's noise makes of it); behind 1,024 tokens the
speed over the fastest plan's. Begun is what `--seconds` leave time for.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from as_device import parse
from provenance import provenance, report
from random_checkpoint import SHAPES
from random_model import WEIGHTS, random_directory, random_runner
from simulated_acceptance import compiled

from edgellm.decoding.loop import DecodingLoop
from edgellm.decoding.sequence import DecodingSequence
from edgellm.decoding.slot_table import SlotTable
from edgellm.drafting.config import DraftingConfig
from edgellm.drafting.drafter import FixedDrafter, Policy
from edgellm.drafting.drafters import candidate_plans
from edgellm.drafting.learner import Learner
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.families import decoder_config
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.runners.sampling_state import SamplingValues
from edgellm.engines.speculation.draft_plan import DraftPlan
from edgellm.engines.speculation.runner import DecodingRunner
from edgellm.engines.speculation.suffix_index import SuffixIndex
from edgellm.opened_model import SHIPPED_MODEL
from edgellm.snapshots.contents import KVContents
from tools.bench.drafting_simulation import Answering, Forcing, Text
from tools.bench.drafting_workloads import LEARNED, LIMITS, Workload, texts, windows, workloads

#: Rows of a sequence: the longest prompt, its answer, and a round.
CAPACITY, CHUNK = 3072, 128
_THREADS = 64
_SOURCE = r"""
extern "C" __global__ void play(float* logits, int* tokens, const int* parents, const int* depths, const int* positions,
                                const int* owners, const int* expected, const int* reach, int nodes, int vocabulary,
                                int rows) {
  const long long slot = blockIdx.x, place = owners[slot] * rows + positions[slot];
  logits += slot * nodes * vocabulary;
  tokens += slot * nodes;
  parents += slot * nodes;
  depths += slot * nodes;
  const int* due = expected + place;
  __shared__ int deepest;
  if (threadIdx.x == 0) deepest = 0;
  __syncthreads();
  for (int node = threadIdx.x; node < nodes; node += blockDim.x) {
    const int depth = nodes == 1 ? 0 : depths[node];
    if (depth < 0) continue;
    logits[(long long)node * vocabulary + due[depth]] = 1e30f;
    if (reach != nullptr && tokens[node] >= 0 && depth <= reach[place]) atomicMax(&deepest, depth * 1024 + 1023 - node);
  }
  __syncthreads();
  if (threadIdx.x != 0 || deepest == 0) return;
  for (int node = 1023 - deepest % 1024; node > 0; node = parents[node]) tokens[node] = due[depths[node] - 1];
}
"""


class PlayedForcing(Forcing):
    """Rules whose masks allow every token: what is played is what rules leave."""

    def fill_mask(self, mask: np.ndarray) -> None:
        """All tokens may come."""
        mask.fill(~mask.dtype.type(0))


class Player:
    """A runner whose sequences say given texts, in whatever way they are decoded."""

    def __init__(self, runner: DecodingRunner) -> None:
        self.runner, backend = runner, runner.backend
        self._backend, base, slots = backend, runner.base, runner.limits.max_batch
        self.plans = candidate_plans(DraftingConfig(), runner.limits)
        self._rows, self._vocabulary = CAPACITY + 64, runner.config.vocab_size
        shape = slots, self._rows
        self._expected, self._owners = backend.zeros(shape, "int32"), backend.zeros((slots,), "int32")
        self._reach = {plan.name: backend.zeros(shape, "int32") for plan in self.plans}
        self._contents = [KVContents() for _ in range(slots)]
        self._function: Any = None
        if backend.fixed_shapes:
            self._function = compiled(_SOURCE, b"play.cu", backend.gpu.compute_capability).get_function("play")
            self._function.prepare("PPPPPPPPiii")
        select, move = base.sampling.select, runner.move

        def select_played(slots: slice, logits: Any, *others: Any) -> None:
            self._play(logits, slots, None, None)
            select(slots, logits, *others)

        def move_owner(source: int, target: int) -> None:
            move(source, target)
            self._order[source], self._order[target] = self._order[target], self._order[source]
            backend.upload(self._owners, np.array(self._order, np.int32))

        base.sampling.select, runner.move = select_played, move_owner  # type: ignore[method-assign]
        runner.verification.before_acceptance = lambda tree: self._play(
            tree.logits.logits, slice(0, tree.nodes.tokens.shape[0]), tree.nodes, self._reach.get(tree.plan.name)
        )

    def _play(self, logits: Any, slots: slice, nodes: Any, reach: Any) -> None:
        """Before tokens are chosen of logits [B, V] or, of trees, [B, T, V]."""
        positions, owners = self.runner.base.sequences(slots).positions, self._owners[slots]
        batch, count = slots.stop - slots.start, 1 if nodes is None else nodes.tokens.shape[1]
        vocabulary = logits.shape[-1]
        if self._function is None:
            for slot in range(batch):
                tree = None if nodes is None else (nodes.tokens[slot], nodes.parents[slot], nodes.depths[slot])
                self._play_on_host(logits[slot].reshape(count, vocabulary), owners[slot], positions[slot], tree, reach)
            return
        tree = (0, 0, 0) if nodes is None else (nodes.tokens.pointer, nodes.parents.pointer, nodes.depths.pointer)
        arrays = positions.pointer, owners.pointer, self._expected.pointer, 0 if reach is None else reach.pointer
        sizes = np.int32(count), np.int32(vocabulary), np.int32(self._rows)
        given = logits.pointer, *tree, *arrays, *sizes
        self._function.prepared_async_call((batch, 1), (_THREADS, 1, 1), self._backend.stream, *given)

    def _play_on_host(self, logits: np.ndarray, owner: int, position: int, tree: Any, reach: Any) -> None:
        """As the kernel does."""
        due = self._expected[owner, position:]
        if tree is None:
            logits[0, due[0]] = 1e30
            return
        tokens, parents, depths = tree
        known = np.flatnonzero(depths >= 0)
        logits[known, due[depths[known]]] = 1e30
        if reach is None:
            return
        reached = [n for n in range(len(tokens)) if tokens[n] >= 0 and depths[n] <= reach[owner, position]]
        node = max(reached, key=lambda each: (depths[each], -each), default=0)
        while node > 0:
            tokens[node] = due[depths[node] - 1]
            node = parents[node]

    def play(self, batch: Sequence[Text], drafter: Policy) -> Iterator[tuple[int, float]]:
        """The texts' numbers and the seconds of their tokens, behind the first of each, as they come."""
        ids = [[1 + token % (self._vocabulary - 2) for token in text.answer] for text in batch]
        prompts = [[1 + token % (self._vocabulary - 2) for token in text.prompt] for text in batch]
        expected = np.ones(self._expected.shape, np.int32)
        reach = {plan.name: np.zeros(self._expected.shape, np.int32) for plan in self.plans}
        for number, text in enumerate(batch):
            begin, end = len(prompts[number]), len(prompts[number]) + len(ids[number])
            expected[number, begin:end] = ids[number]
            for plan in self.plans:
                reach[plan.name][number, begin:end] = [text.reached(place, plan) for place in range(len(text.answer))]
        self._order = list(range(self.runner.limits.max_batch))
        for array, values in ((self._expected, expected), (self._owners, np.array(self._order, np.int32))):
            self._backend.upload(array, values)
        for name, values in reach.items():
            self._backend.upload(self._reach[name], values)
        loop = DecodingLoop(SlotTable(self.runner, self._contents, drafter=drafter))
        answers = [Answering(wanted=len(text.answer)) for text in batch]
        numbers: dict[int, int] = {}
        for number, text in enumerate(batch):
            asked = prompts[number], SamplingValues(), answers[number]
            sequence = DecodingSequence(*asked, max_tokens=len(text.answer))  # type: ignore[arg-type]
            if text.forced is not None:
                played = Text(prompts[number], ids[number], text.head, text.luck, text.forced)
                sequence.rules = SimpleNamespace(constraint=PlayedForcing(played))  # type: ignore[assignment]
            numbers[id(sequence)] = number
            loop.admit(sequence)
            for _ in loop.settle():
                pass
        began = time.perf_counter()
        while loop.running:
            for token in loop.advance():
                if token.sequence.failure is not None:
                    raise token.sequence.failure
                yield numbers[id(token.sequence)], time.perf_counter() - began
        for number, answer in enumerate(answers):
            if answer.token_ids != ids[number]:
                raise SystemExit(f"text {number} was not said as it is: nothing that was measured counts")

    def seconds(self, answers: Sequence[Sequence[Text]], drafter: Policy) -> list[list[float]]:
        """Decode seconds until each token of each sequence, over the answers one after the other."""
        found: list[list[float]] = [[] for _ in answers[0]]
        for batch in answers:
            spent = [each[-1] if each else 0.0 for each in found]
            for number, now in self.play(batch, drafter):
                found[number].append(spent[number] + now)
        return found


def learner(workload: Workload, runner: DecodingRunner, plans: Sequence[DraftPlan]) -> Learner:
    """As a process begins with it."""
    index = SuffixIndex() if workload.drafts in ("suffix", "both") else None
    own = plans if workload.has_model else ()
    return Learner(runner.verification.most_given, runner.backend.fixed_shapes, index, own)


def measure(player: Player, workload: Workload, turns: int) -> dict[str, Any]:
    """All figures of a workload."""
    answers, fixed = texts(workload), dict[str, float]()
    late = min(LEARNED, len(answers) * len(answers[0][0].answer) // 2)

    def total(seconds: Sequence[Sequence[float]], begin: int = 0) -> float:
        return sum(each[-1] - (each[begin - 1] if begin else 0.0) for each in seconds)

    for plan in player.plans if workload.has_model else ():
        fixed[plan.name] = total(player.seconds(answers, FixedDrafter(plan)), late)
    best = next((plan for plan in player.plans if fixed and fixed[plan.name] == min(fixed.values())), None)
    ways = {"plain": Policy, "auto": lambda: learner(workload, player.runner, player.plans)}
    if best is not None:
        ways["fixed"] = lambda: FixedDrafter(best)
    found: dict[str, list[list[list[float]]]] = {name: [] for name in ways}
    for name in ("plain", "auto"):  # captures steps and rounds: those of fixed plans are captured by now
        player.seconds(answers, ways[name]())
    for turn in range(turns):
        for name in sorted(ways, reverse=bool(turn % 2)):
            found[name].append(player.seconds(answers, ways[name]()))
    pairs = [*zip(found["plain"], found["auto"], strict=True)]
    worst = [min(share for own in zip(*pair, strict=True) for share in windows(*own)) for pair in pairs]
    again = [*zip(found["plain"][1:], found["plain"][:-1], strict=True)]
    noise = [min(share for own in zip(*pair, strict=True) for share in windows(*own)) for pair in again]
    figures = {
        "over_plain": statistics.median(total(plain) / total(auto) for plain, auto in pairs),
        "worst_window": statistics.median(worst),
        "plain_worst_window": statistics.median(noise) if noise else 1.0,
    }
    if best is not None:
        triples = [*zip(found["plain"], found["auto"], found["fixed"], strict=True)]
        figures["best_over_plain"] = statistics.median(total(p, late) / total(f, late) for p, _, f in triples)
        figures["of_best"] = statistics.median(total(f, late) / total(a, late) for _, a, f in triples)
    step = statistics.median(total(each) / sum(map(len, each)) for each in found["plain"])
    plans = {} if best is None else {"best": best.name, "fixed_seconds": fixed}
    return {name: round(value, 4) for name, value in figures.items()} | {"plain_step_ms": 1e3 * step} | plans


def distinct(tokens: int) -> list[Workload]:
    """The workloads, with so many tokens for each sequence, those first that differ most."""
    shorter = [each._replace(device=LIMITS, length=min(each.length, tokens)) for each in workloads()]
    found = [*dict.fromkeys(each._replace(answers=max(1, tokens // each.length)) for each in shorter)]
    return sorted(found, key=lambda each: each.batch > 1)  # those of several sequences take a runner of their own


def name_of(workload: Workload) -> str:
    """In words, without a device."""
    return f"{workload.drafts}: {' + '.join(workload.kinds)}, batch {workload.batch}, T {workload.temperature}"


def main() -> None:
    """Play, print a line each, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", choices=("shipped", *SHAPES), default="shipped")
    parser.add_argument("--weights", choices=WEIGHTS, default=WEIGHTS[0])
    parser.add_argument("--backend", choices=("tensorrt", "numpy"), default="tensorrt")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=1536, help="of each sequence, more than 1,024")
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--only", default="", help="workloads whose name has this")
    parser.add_argument("--output", type=Path)
    arguments = parse(parser)
    began = time.perf_counter()
    results: dict[str, Any] = {**provenance(), "shapes": arguments.shapes, "weights": arguments.weights}
    is_shipped = arguments.shapes == "shipped"
    config = EngineDirectory.open(SHIPPED_MODEL).config if is_shipped else decoder_config(SHAPES[arguments.shapes])
    chosen = [each for each in distinct(arguments.tokens) if arguments.only in name_of(each)]
    played = results["workloads"] = {}
    sizes = {name: getattr(LIMITS, name) for name in ("draft_top_k", "draft_steps", "verify_tree_size")}
    for batch in dict.fromkeys(each.batch for each in chosen):
        if time.perf_counter() - began > arguments.seconds:
            break
        limits = EngineLimits(batch, CHUNK, CAPACITY, **sizes)
        folder = Path(tempfile.gettempdir()) / "edgellm-played" / f"{arguments.shapes}-{arguments.weights}-{batch}"
        directory = random_directory(folder, config, limits, config.dtype, arguments.weights)
        with random_runner(directory, arguments.backend) as runner:
            player = Player(runner)
            for workload in chosen:
                if workload.batch == batch and time.perf_counter() - began <= arguments.seconds:
                    played[name_of(workload)] = figures = measure(player, workload, arguments.turns)
                    print(name_of(workload), *(f"{key} {value}" for key, value in figures.items()), flush=True)
    held = sum(each["worst_window"] >= 0.99 - (1.0 - each["plain_worst_window"]) for each in played.values())
    paid = [each for each in played.values() if each.get("best_over_plain", 1.0) > 1.1]
    print(
        f"{len(played)} of {len(chosen)} played; {held} never below 0.99 of plain less the noise; "
        f"{sum(each['of_best'] >= 0.95 for each in paid)} of {len(paid)} at 0.95 of the best fixed plan where that is "
        "above 1.1"
    )
    report(results, arguments.output)


if __name__ == "__main__":
    main()
