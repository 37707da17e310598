"""What the host takes for each step, and what that costs beside a device of a given speed: no model runs.

    python -m tools.bench.host_time [--step 110] [--slower 1] [--kinds edit chat action schema] [--prompts 12]
                                    [--profile] [--output RESULTS.json]

The real decoding loop, index, rules and texts answer the prompts of given_speed.py with their accepted answers; the
device is imitated by a clock. The host's time is that of its thread, so that other load on the machine does not count:
where the host waits the clock is set forward to when the device is done. `--step` are the device's microseconds for a
plain step, `--launch` those that the host takes to launch anything, `--slower` how many times the host's own work
counts. For each kind: the tokens a second over those of plain decoding without rules and drafts, the host's
microseconds a step (what it did, not what it waited; the beginning and the end of answers too), and what steps were
taken. `--profile` prints where the time of the drafted way goes.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from edgellm.decoding import loop as loop_module
from edgellm.decoding import sequence as sequence_module
from edgellm.decoding.loop import DecodingLoop
from edgellm.decoding.sequence import Clock, DecodingSequence
from edgellm.decoding.slot_table import SlotTable
from edgellm.drafting import learner as learner_module
from edgellm.drafting.learner import Learner
from edgellm.drafting.report import DraftingTally
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.runners.sampling_state import SamplingValues, StepRules
from edgellm.engines.speculation.constraints import mask_words
from edgellm.engines.speculation.draft_plan import DraftPlan
from edgellm.engines.speculation.round import GivenTree, padded_trees
from edgellm.engines.speculation.suffix_index import SuffixIndex
from edgellm.opened_model import SHIPPED_MODEL
from edgellm.snapshots.contents import KVContents
from edgellm.structure.answers import AnswerRules
from edgellm.structure.description import Structure
from edgellm.structure.grammar import GrammarVocabulary
from edgellm.text.output import OutputText
from edgellm.text.tokenizer import Tokenizer
from tools.bench.answering import answered
from tools.bench.given_speed import SCHEMA, Asked, prompts
from tools.bench.held_out_prompts import as_they_are
from tools.bench.provenance import provenance, report
from tools.bench.structure_speed import said
from tools.demo_model.evaluate import evaluation_items
from tools.demo_model.styles import styled_items

KINDS = ("edit", "chat", "action", "schema")
MAX_TOKENS = 160
#: The share of a plain step that chooses the token, and of a round for each of its tokens.
CHOICE, EACH_NODE = 0.08, 0.01


class Machine:
    """The clock of a host, in seconds, and when its device is done with what was launched."""

    def __init__(self, launch: float, slower: float) -> None:
        self._launch, self._slower, self._ahead, self._done = launch, slower, 0.0, 0.0
        #: Seconds that the host waited.
        self.waited = 0.0

    def perf_counter(self) -> float:
        """Now."""
        return time.thread_time() * self._slower + self._ahead

    def launch(self, seconds: float) -> float:
        """Launch work of so many seconds; when it will be done."""
        self._ahead += self._launch
        self._done = max(self._done, self.perf_counter()) + seconds
        return self._done

    def wait(self, done: float) -> None:
        """Until then."""
        waited = max(0.0, done - self.perf_counter())
        self._ahead, self.waited = self._ahead + waited, self.waited + waited


class ImitatedRunner:
    """As `edgellm.decoding.runner.Runner`, of one slot: gives the tokens of a known answer when the machine is done."""

    def __init__(self, machine: Machine, step: float, vocab_size: int) -> None:
        self._machine, self._step = machine, step
        self.limits = EngineLimits(1, 16, 1024)
        self.backend = SimpleNamespace(steps_ahead=1)
        nothing: Callable[..., None] = lambda *_: None  # noqa: E731
        self.base = SimpleNamespace(
            has_adapter_place=lambda *_: True, set_adapter=nothing, adapter_digest=nothing, await_rows=nothing
        )
        self.draft = SimpleNamespace(has_model=False, rows=nothing)
        self.stop = nothing
        self._masks = np.zeros((32, mask_words(vocab_size)), np.uint32)
        self._rows = np.zeros(32, np.int32)
        self.answer: Sequence[int] = ()
        self.kinds: Counter[str] = Counter()
        self._said = 0

    def start(self, *arguments: Any) -> Any:
        """A prefill; its rules are not asked."""
        self._said = 0
        return self._emitted(self._machine.launch(self._step), 1, None)

    def begin(self, batch: int) -> str:
        """The forward pass of a step."""
        self._machine.launch((1 - CHOICE) * self._step)
        return "begun"

    def decode(self, batch: int, rules: StepRules | None = None, begun: object = None) -> Any:
        """A plain step."""
        return self._take(None, rules, None, begun)

    def round(
        self, batch: int, plan: DraftPlan, rules: StepRules | None, trees: Sequence[GivenTree] | None = None
    ) -> Any:
        """A round of given candidates."""
        return self._take(plan, rules, trees, None)

    def _take(
        self, plan: DraftPlan | None, rules: StepRules | None, trees: Sequence[GivenTree] | None, begun: object
    ) -> Any:
        self.kinds["round" if plan is not None else "begun" if begun else "ruled" if rules else "plain"] += 1
        count, seconds = 1, self._step
        if plan is not None and trees is not None:
            seconds *= 1 + EACH_NODE * plan.tree_size
            count += self._accepted(trees[0])
            padded_trees(trees, 1, plan.tree_size)
            self._machine.launch(0.0), self._machine.launch(0.0)  # what is given
        if rules is None:
            return self._emitted(self._machine.launch(seconds), count, plan)
        if not begun:
            self._machine.launch((1 - CHOICE) * seconds)
        shown = None if plan is None or trees is None else padded_trees(trees, 1, plan.tree_size)
        rules.fill(shown, self._rows[: 1 if shown is None else plan.tree_size], self._masks)  # type: ignore[union-attr]
        self._machine.launch(0.0), self._machine.launch(0.0)  # masks
        return self._emitted(self._machine.launch(CHOICE * seconds), count, plan)

    def takes_given(self, batch: int, plan: DraftPlan, ruled: bool = False) -> bool:
        """Everything."""
        return True

    def _accepted(self, tree: GivenTree) -> int:
        place, count, follows = -1, 0, self.answer[self._said :]
        while count < len(follows):
            found = [
                n
                for n, (t, p) in enumerate(zip(tree.tokens, tree.parents, strict=True))
                if p == place and t == follows[count]
            ]
            if not found:
                break
            place, count = found[0], count + 1
        return count

    def _emitted(self, done: float, count: int, plan: DraftPlan | None) -> Any:
        # Behind the end are ones: 0 is taken for a sign of rows without a number.
        tokens = [*self.answer[self._said : self._said + count], *[1] * count][:count]
        self._said += count

        def wait() -> Any:
            self._machine.wait(done)
            return [tokens] if plan is not None else np.array(tokens)

        return SimpleNamespace(wait=wait)


class Bench:
    """The shipped model's texts, and ways to answer."""

    def __init__(self, step: float, launch: float, slower: float) -> None:
        self.machine = Machine(launch, slower)
        self.tokenizer = Tokenizer.from_directory(SHIPPED_MODEL)
        self.eos = self.tokenizer.token_to_id("<|im_end|>") or 0
        width = self.tokenizer.vocab_size
        self.runner = ImitatedRunner(self.machine, step, width)
        self.vocabulary = GrammarVocabulary.of_tokenizer(self.tokenizer, width, (self.eos,))
        self.grammar = Structure(json=SCHEMA).grammar_text

    def asked(self, kind: str, count: int) -> list[Asked]:
        """Prompts of a kind with their answers."""
        if kind != "schema":
            return prompts(kind, count, 1024, True)
        found = []
        planning = GrammarVocabulary.of_tokenizer(self.tokenizer, self.tokenizer.vocab_size, (self.eos,))
        for item in styled_items(evaluation_items(77002, 3), "json"):
            if len(found) < count and item["accepted"][0].startswith('{"action"'):
                prompt = self.tokenizer.encode_chat(as_they_are(item["messages"]))
                constraint = planning.constraint_for(self.grammar)
                try:
                    answer = said(constraint, self.tokenizer, item["accepted"][0])
                except SystemExit:
                    continue  # the schema does not allow it
                found.append(Asked(prompt, [*answer, self.eos]))
        return found

    def answered(self, asked: Sequence[Asked], ruled: bool, drafter: Learner | None) -> dict[str, float]:
        """Tokens a second, and the host's microseconds a step."""
        seconds = tokens = busy = 0.0
        self.runner.kinds.clear()
        loop = DecodingLoop(SlotTable(self.runner, [KVContents()], drafter=drafter))  # type: ignore[arg-type]
        for one in asked:
            self._remember(drafter, one)
            assert one.answer is not None
            answer = OutputText(self.tokenizer.detokenizer(), (), (), (self.eos,), MAX_TOKENS)
            constraint = self.vocabulary.constraint_for(self.grammar) if ruled else None
            rules = AnswerRules(constraint, self.tokenizer, self.tokenizer.vocab_size) if constraint else None
            tally = None if drafter is None else DraftingTally({})
            sequence = DecodingSequence(
                one.prompt, SamplingValues(), answer, Clock(), len(one.answer), tally, rules=rules
            )
            self.runner.answer = one.answer
            before = self.machine.perf_counter() - self.machine.waited
            for _ in answered(loop, [sequence]):
                pass
            assert list(answer.token_ids) == list(one.answer), (answer.token_ids, one.answer)
            seconds += sequence.clock.last_token - sequence.clock.first_token
            tokens += len(one.answer) - 1
            busy += self.machine.perf_counter() - self.machine.waited - before
        steps = sum(self.runner.kinds.values())
        return {"tokens_per_second": tokens / seconds, "host_us": busy / steps * 1e6}

    @staticmethod
    def _remember(drafter: Learner | None, one: Asked) -> None:
        index = None if drafter is None else drafter.host.index
        if isinstance(index, SuffixIndex) and one.earlier:
            index.clear()
            for earlier in one.earlier:
                history = index.open(earlier.prompt)
                index.extend(history, earlier.answer)
                index.close(history)


@contextmanager
def imitated(machine: Machine) -> Iterator[None]:
    """Everything that decodes looks at the machine's clock."""
    modules = loop_module, sequence_module, learner_module
    for module in modules:
        module.time = machine  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module in modules:
            module.time = time  # type: ignore[attr-defined]


def measure(bench: Bench, kind: str, count: int, repeats: int) -> dict[str, Any]:
    """Both ways of one kind, in turns."""
    asked, ruled = bench.asked(kind, count), kind == "schema"
    index = SuffixIndex()
    drafter = Learner(16, True, index)
    ratios, plain, drafted, only = [], [], [], []
    for number in range(repeats + 1):
        index.clear()
        plain.append(bench.answered(asked, False, None))
        if ruled:
            only.append(bench.answered(asked, True, None))
        drafted.append(bench.answered(asked, ruled, drafter))
        if number:
            ratios.append(drafted[-1]["tokens_per_second"] / plain[-1]["tokens_per_second"])
    found: dict[str, Any] = {
        "ratio": round(statistics.median(ratios), 3),
        "plain_host_us": round(statistics.median(each["host_us"] for each in plain[1:]), 1),
        "drafted_host_us": round(statistics.median(each["host_us"] for each in drafted[1:]), 1),
        "steps": dict(bench.runner.kinds),
        "tokens": sum(len(one.answer or ()) - 1 for one in asked),
    }
    if ruled:
        pairs = zip(only[1:], plain[1:], strict=True)
        found["rules_alone"] = round(
            statistics.median(mine["tokens_per_second"] / theirs["tokens_per_second"] for mine, theirs in pairs), 3
        )
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step", type=float, default=110.0)
    parser.add_argument("--launch", type=float, default=6.0)
    parser.add_argument("--slower", type=float, default=1.0)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    bench = Bench(arguments.step * 1e-6, arguments.launch * 1e-6, arguments.slower)
    results: dict[str, Any] = {"provenance": provenance(), "step_us": arguments.step, "launch_us": arguments.launch}
    with imitated(bench.machine):
        for kind in arguments.kinds:
            results[kind] = measure(bench, kind, arguments.prompts, arguments.repeats)
            print(kind, results[kind], flush=True)
            if arguments.profile:
                asked, drafter = bench.asked(kind, arguments.prompts), Learner(16, True, SuffixIndex())
                profile = cProfile.Profile()
                profile.enable()
                bench.answered(asked, kind == "schema", drafter)
                profile.disable()
                pstats.Stats(profile).sort_stats("tottime").print_stats(28)
    report(results, arguments.output)


if __name__ == "__main__":
    main()
