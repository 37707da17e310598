"""The workloads of `drafting_workloads` on a real device: its steps and rounds, on texts that are played back.

    python -m tools.bench.played_workloads [--shapes shipped] [--weights float16] [--backend tensorrt] [--turns 5]
                                           [--tokens 1536] [--seconds 100] [--only WORDS] [--output RESULTS.json]
                                           [--directory ENGINE_DIR] [--cpu-time]

Weights are random, of the shapes of a published model or the shipped one, or those of an engine directory with a draft
model, whose limits are not heeded; loop, learner, index and rules' masks are
the real ones; what is drawn, and how far the draft model's guesses are right, is what the text says (`known_answers`).

Workloads that differ by their device alone are one. Each is decoded by every fixed plan of the draft model once, then
plainly (with the draft loaded), as the learner chooses, and by the fastest of these plans, in turns; on NumPy, where
nothing runs ahead, these and plain decoding once more take turns of a few tokens, as a processor's speed changes within
seconds. Printed are medians: the speed over plain decoding's; the least share of its speed over any 512 tokens, from
the first token on, and the same of plain decoding once more, or in the turn before (what the machine's noise makes of
it); behind 1,024 tokens the speed over the fastest plan's. Begun is what `--seconds` leave time for. With `--cpu-time`
all seconds are the process's processor time, the learner's too, which other work does not lengthen as much: for NumPy.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from as_device import parse
from provenance import provenance, report
from random_checkpoint import SHAPES
from random_model import WEIGHTS, random_directory, random_runner

from edgellm.decoding.loop import DecodingLoop
from edgellm.decoding.sequence import DecodingSequence
from edgellm.decoding.slot_table import SlotTable
from edgellm.drafting.config import DraftingConfig
from edgellm.drafting.drafter import FixedDrafter, Policy
from edgellm.drafting.drafters import candidate_plans, experts_read
from edgellm.drafting.learner import Learner
from edgellm.engines.backends.opening import open_backend
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
from tools.bench.known_answers import KnownAnswers

#: Rows of a sequence: the longest prompt, its answer, and a round.
CAPACITY, CHUNK = 3072, 128
#: Of ways that are played beside each other, the tokens after which the next goes on.
SLICE = 16


class PlayedForcing(Forcing):
    """Rules whose masks allow every token: what is played is what rules leave."""

    def fill_mask(self, mask: np.ndarray) -> None:
        """All tokens may come."""
        mask.fill(~mask.dtype.type(0))


class Script(NamedTuple):
    """The texts of a batch, and how many guesses of each plan, by name, are right at each place."""

    texts: list[Text]
    reached: dict[str, list[list[int]]]


class Player:
    """A runner whose sequences say given texts, in whatever way they are decoded."""

    def __init__(self, runner: DecodingRunner) -> None:
        self.runner, self._vocabulary = runner, runner.config.vocab_size
        self.plans = candidate_plans(DraftingConfig(), runner.limits)
        self._known = KnownAnswers(runner, [plan.name for plan in self.plans])
        self._contents = [KVContents() for _ in range(runner.limits.max_batch)]
        if runner.backend.fixed_shapes:  # as a model that is opened does, before its first answer
            drafter = Learner(runner.verification.most_given, True, SuffixIndex(), self.plans)
            runner.plan_captures(drafter.plans, drafter.forced_plans)
            while runner.capture_next():
                pass

    def script(self, batch: Sequence[Text]) -> Script:
        """Texts in the model's tokens."""

        def ids(tokens: Sequence[int]) -> list[int]:
            return [1 + token % (self._vocabulary - 2) for token in tokens]

        own = [replace(text, prompt=ids(text.prompt), answer=ids(text.answer)) for text in batch]
        places = [range(len(text.answer)) for text in own]
        reached = {
            plan.name: [[text.reached(n, plan) for n in each] for text, each in zip(own, places, strict=True)]
            for plan in self.plans
        }
        return Script(own, reached)

    def play(self, script: Script, drafter: Policy) -> Iterator[tuple[int, float]]:
        """The texts' numbers and the seconds of their tokens, behind the first of each, as they come. Raises
        RuntimeError where one was not said as it is."""
        texts, numbers = script.texts, dict[int, int]()
        self._known.expect([(len(text.prompt), text.answer) for text in texts], script.reached)
        loop = DecodingLoop(SlotTable(self.runner, self._contents, drafter=drafter))
        answers = [Answering(wanted=len(text.answer)) for text in texts]
        for number, text in enumerate(texts):
            asked = text.prompt, SamplingValues(), answers[number]
            sequence = DecodingSequence(*asked, max_tokens=len(text.answer))  # type: ignore[arg-type]
            if text.forced is not None:
                sequence.rules = SimpleNamespace(constraint=PlayedForcing(text))  # type: ignore[assignment]
            numbers[id(sequence)] = number
            loop.admit(sequence)
            for _ in loop.settle():
                pass
        spent, began = 0.0, time.perf_counter()
        while loop.running:
            for token in loop.advance():
                if token.sequence.failure is not None:
                    raise token.sequence.failure
                spent += time.perf_counter() - began
                yield numbers[id(token.sequence)], spent
                began = time.perf_counter()  # what is done with the token takes no time
        if any(answer.token_ids != text.answer for answer, text in zip(answers, texts, strict=True)):
            raise RuntimeError("a text was not said as it is: nothing that was measured counts")

    def timed(self, scripts: Sequence[Script], drafter: Policy) -> Iterator[list[list[float]]]:
        """Decode seconds until each token of each sequence, over the scripts one after the other; they grow."""
        found: list[list[float]] = [[] for _ in scripts[0].texts]
        for script in scripts:
            spent = [each[-1] if each else 0.0 for each in found]
            for number, now in self.play(script, drafter):
                found[number].append(spent[number] + now)
                yield found

    def seconds(self, scripts: Sequence[Script], drafter: Policy) -> list[list[float]]:
        """All of them."""
        return deque(self.timed(scripts, drafter), 1).pop()


def beside(ways: Mapping[str, Iterator[list[list[float]]]]) -> dict[str, list[list[float]]]:
    """What each of several ways gives at last, each of a player of its own: `SLICE` tokens of each in turn."""
    found, going = dict[str, list[list[float]]](), dict(ways)
    while going:
        for name, way in [*going.items()]:
            part = [*islice(way, SLICE)]
            if part:
                found[name] = part[-1]
            if len(part) < SLICE:
                del going[name]
    return found


def learner(workload: Workload, runner: DecodingRunner, plans: Sequence[DraftPlan]) -> Learner:
    """As a process begins with it."""
    index = SuffixIndex() if workload.drafts in ("suffix", "both") else None
    own, experts = plans if workload.has_model else (), experts_read(runner.config)
    return Learner(runner.verification.most_given, runner.backend.fixed_shapes, index, own, experts=experts)


def measure(players: Sequence[Player], workload: Workload, turns: int) -> dict[str, Any]:
    """All figures of a workload, by one player or by one for each of the ways, which are beside each other then."""
    player = players[0]
    answers, fixed = [player.script(batch) for batch in texts(workload)], dict[str, float]()
    late = min(LEARNED, len(answers) * workload.length // 2)

    def total(seconds: Sequence[Sequence[float]], begin: int = 0) -> float:
        return sum(each[-1] - (each[begin - 1] if begin else 0.0) for each in seconds)

    for plan in player.plans if workload.has_model else ():
        fixed[plan.name] = total(player.seconds(answers, FixedDrafter(plan)), late)
    best = next((plan for plan in player.plans if fixed and fixed[plan.name] == min(fixed.values())), None)
    ways = {"plain": Policy, "auto": lambda: learner(workload, player.runner, player.plans)}
    if best is not None:
        ways["fixed"] = lambda: FixedDrafter(best)
    if len(players) > 1:
        ways["again"] = Policy
    else:
        for name in ("plain", "auto"):  # takes what the first use of anything takes
            player.seconds(answers, ways[name]())
    found: dict[str, list[list[list[float]]]] = {name: [] for name in ways}
    for turn in range(turns):
        order = sorted(ways, reverse=bool(turn % 2))
        if len(players) > 1:
            own = zip(order, players, strict=False)
            seconds = beside({name: each.timed(answers, ways[name]()) for name, each in own})
        else:
            seconds = {name: player.seconds(answers, ways[name]()) for name in order}
        for name in order:
            found[name].append(seconds[name])
    pairs = [*zip(found["plain"], found["auto"], strict=True)]
    worst = [min(share for own in zip(*pair, strict=True) for share in windows(*own)) for pair in pairs]
    again = [*zip(found["plain"], found["again"], strict=True)] if "again" in ways else [*pairwise(found["plain"])]
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


def opened(directory: EngineDirectory, limits: EngineLimits, backend: str) -> AbstractContextManager[DecodingRunner]:
    """The runner of an engine directory's base and draft model, within other limits."""
    named = ("max_batch", "prefill_chunk", "kv_capacity", "draft_top_k", "draft_steps", "verify_tree_size")
    own = replace(directory.limits, **{name: getattr(limits, name) for name in named})
    directory = replace(directory, limits=replace(own, window_rows=own.rows_for_window(directory.config.window)))
    return closing(DecodingRunner.open(open_backend(backend, directory), directory))


def main() -> None:
    """Play, print a line each, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", choices=("shipped", *SHAPES), default="shipped")
    parser.add_argument("--directory", type=Path, metavar="ENGINE_DIR")
    parser.add_argument("--weights", choices=WEIGHTS, default=WEIGHTS[0])
    parser.add_argument("--backend", choices=("tensorrt", "numpy"), default="tensorrt")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=1536, help="of each sequence, more than 1,024")
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--only", default="", help="workloads whose name has this")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--cpu-time", action="store_true")
    arguments = parse(parser)
    if arguments.cpu_time:
        time.perf_counter = time.process_time
    began = time.perf_counter()
    published = arguments.directory and EngineDirectory.open(arguments.directory)
    shapes = published.path.name if published else arguments.shapes
    results: dict[str, Any] = {**provenance(), "shapes": shapes, "weights": arguments.weights}
    results["clock"] = "processor" if arguments.cpu_time else "wall"
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
        own = None if published else random_directory(folder, config, limits, config.dtype, arguments.weights)
        with ExitStack() as stack:
            players = []
            for _ in range(4 if arguments.backend == "numpy" else 1):
                if published:
                    running = opened(published, limits, arguments.backend)
                else:
                    running = random_runner(own, arguments.backend)
                players.append(Player(stack.enter_context(running)))
            for workload in chosen:
                if workload.batch == batch and time.perf_counter() - began <= arguments.seconds:
                    try:
                        figures = played[name_of(workload)] = measure(players, workload, arguments.turns)
                    except RuntimeError as error:  # the others count
                        figures = {"failed": error}
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
