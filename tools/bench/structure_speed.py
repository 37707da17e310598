"""What constrained decoding costs: steps and rounds under a robot-action schema against unconstrained ones.

    python tools/bench/structure_speed.py [--shapes llama-1b ...] [--shipped] [--rounds 2000] [--backend tensorrt]
                                          [--work DIRECTORY] [--output RESULTS.json]

Models have published shapes, random weights and a made byte-level vocabulary of their size; with `--shipped` the model
that ships is measured, too, with its own. The real decoding loop answers one request after another: times are those
between the steps that gave a request its tokens, medians and 99th percentiles, so that the host's work counts where
nothing hides it. What is said is prescribed, for random weights never write JSON: plain steps draw under masks and what
comes is an answer of the schema; in rounds the tree's candidates are put in place of the draft's, the answer's own
tokens along its first path and others that are allowed beside it, and as many of them are accepted as a schedule says.
Unconstrained rounds have the same schedule. `beside` is a batch of two: an unconstrained request beside a constrained
one, against two unconstrained ones.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from as_device import parse
from made_vocabulary import ROBOT_ACTION, MadeVocabulary, robot_action
from provenance import provenance, report
from random_checkpoint import SHAPES
from random_model import RandomDirectory, random_backend, random_directory, random_prompt
from simulated_acceptance import SCHEDULE_ROUNDS, ForcedAcceptance, schedule

from edgellm.decoding import loop as loop_module
from edgellm.decoding.loop import DecodingLoop
from edgellm.decoding.sequence import DecodingSequence, StepMasks
from edgellm.decoding.slot_table import SlotTable
from edgellm.drafting.drafter import FixedDrafter
from edgellm.engines.families import decoder_config
from edgellm.engines.model.config import DecoderConfig
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.runners.sampling_state import SamplingValues
from edgellm.engines.speculation.constraints import allows, mask_words
from edgellm.engines.speculation.draft_plan import DraftPlan, chain, choices_plan
from edgellm.engines.speculation.runner import DecodingRunner
from edgellm.snapshots.contents import KVContents
from edgellm.structure.answers import AnswerRules
from edgellm.structure.description import Structure
from edgellm.structure.grammar import GrammarConstraint, GrammarVocabulary
from edgellm.text.output import OutputText
from edgellm.text.tokenizer import Tokenizer
from tools.bench.answering import answered

PROMPT_TOKENS = 500
#: A tree of 16 nodes whose depths are those of a chain of 5.
TREE = choices_plan(
    [[0], [1], [2], [0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [2, 0], [0, 0, 0], [0, 0, 1], [0, 1, 0]]
    + [[0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 0, 0, 0]]
)
PLANS = {"chain 5": chain(5), "tree of 16": TREE}
#: Tokens of a round, on average.
MEAN_TOKENS = 2.5
#: Answers that are not timed: code is loaded, and steps are captured as lengths come up.
WARM_UPS = 4


class Prescribed:
    """A grammar under which an answer begins with a prescribed token, so that what follows it is known, too."""

    def __init__(self, constraint: GrammarConstraint, first: int) -> None:
        self._constraint, self._first, self._place = constraint, first, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._constraint, name)

    def fill_mask(self, row: np.ndarray) -> None:
        """The first mask has one token, all others are the grammar's."""
        self._constraint.fill_mask(row)
        if self._place == 0:
            row.view(np.uint32)[:] = 0
            row.view(np.uint32)[self._first >> 5] = np.uint32(1 << (self._first & 31))

    def try_advance(self, token: int) -> bool:
        """See `TokenConstraint`."""
        advanced = self._constraint.try_advance(token)
        self._place += advanced
        return advanced

    def rollback(self, count: int) -> None:
        """See `TokenConstraint`."""
        self._constraint.rollback(count)
        self._place -= count


class Script:
    """What the rounds of one answer say: of each the candidates [T-1] of a static plan's nodes, how many tokens it
    gives, and the one behind those accepted."""

    def __init__(
        self, plan: DraftPlan, answer: Sequence[int], lengths: np.ndarray, constraint: GrammarConstraint
    ) -> None:
        nodes = sorted(plan.choices, key=plan._candidate)
        tokens, width = [*answer, *[answer[-1]] * (plan.longest + 1)], constraint._grammar.vocab_size
        place, row, generator = 1, np.empty(mask_words(width), np.uint32), random.Random(len(answer))
        assert constraint.try_advance(tokens[0])
        self.candidates, self.bonus = [], np.full(SCHEDULE_ROUNDS, -1, np.int32)
        for number in range(SCHEDULE_ROUNDS):
            paths: dict[tuple[int, ...], list[int]] = {(): []}
            given = min(int(lengths[number]), len(answer) - place)
            for node in nodes:
                taken = [paths[other][-1] for other in paths if other and other[:-1] == node[:-1]]
                token = tokens[place + len(node) - 1]
                if any(node) or len(node) >= given:  # not said: else more would be accepted
                    token = _another(constraint, paths[node[:-1]], [*taken, token], row, generator)
                paths[node] = [*paths[node[:-1]], token]
            self.candidates.append([paths[node][-1] for node in nodes])
            self.bonus[number] = tokens[place + given - 1]
            for token in tokens[place : place + given]:
                assert constraint.try_advance(token)
            place += given
            if place >= len(answer):
                break


def said(constraint: GrammarConstraint, tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens by which an answer comes to a text: the longest that are allowed. Where a grammar leaves one way it
    allows one way to spell it."""
    row, found = np.empty(mask_words(constraint._grammar.vocab_size), np.uint32), []
    while text:
        constraint.fill_mask(row)
        for end in range(min(len(text), 12), 0, -1):
            ids = tokenizer.encode(text[:end], add_special_tokens=False)
            if len(ids) == 1 and allows(row, ids[0]) and constraint.try_advance(ids[0]):
                break
        else:
            raise SystemExit(f"the vocabulary cannot say {text!r}")
        found.append(ids[0])
        text = text[end:]
    return found


def _another(
    constraint: GrammarConstraint, path: Sequence[int], taken: Sequence[int], row: np.ndarray, generator: random.Random
) -> int:
    """A token that is allowed behind a path, not one of those `taken`; any where there is none."""
    count = 0
    while count < len(path) and constraint.try_advance(path[count]):
        count += 1
    if count == len(path):
        constraint.fill_mask(row)
    constraint.rollback(count)
    if count == len(path):
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        for _ in range(20):
            token = int(generator.choice(allowed))
            if token not in taken:
                return token
    return next(token for token in range(len(taken) + 1) if token not in taken)


class ScriptedMasks(StepMasks):
    """In the place of `StepMasks`: rounds verify a script's candidates."""

    script: Script | None = None
    nodes: Any = None
    backend: Any = None
    round = 0

    def fill(self, trees: tuple[np.ndarray, np.ndarray] | None, rows: np.ndarray, masks: np.ndarray) -> int:
        """The tree's tokens are exchanged, here and on the device, before acceptance reads them."""
        cls = ScriptedMasks
        if trees is not None and cls.script is not None:
            candidates = cls.script.candidates[min(cls.round, len(cls.script.candidates) - 1)]
            tokens = trees[0].copy()
            tokens[0, 1 : len(candidates) + 1] = candidates
            cls.backend.upload(cls.nodes, tokens)
            trees, cls.round = (tokens, trees[1]), cls.round + 1
        return super().fill(trees, rows, masks)


class Bench:
    """One model, opened: its loop, and requests to it."""

    def __init__(self, runner: DecodingRunner, tokenizer: Tokenizer, eos: int, answers: int) -> None:
        self.runner, self.tokenizer, self.eos = runner, tokenizer, eos
        width = runner.config.vocab_size
        grammar = Structure(json=ROBOT_ACTION).grammar_text
        self.vocabulary, self._planning = (GrammarVocabulary.of_tokenizer(tokenizer, width, (eos,)) for _ in range(2))
        self._grammar, generator = grammar, random.Random(1)
        self.answers = [
            said(self.constraint(planning=True), tokenizer, robot_action(generator)) for _ in range(answers)
        ]
        self.prompt = random_prompt(min(PROMPT_TOKENS, runner.limits.kv_capacity - 160))
        self.contents = [KVContents() for _ in range(runner.limits.max_batch)]
        self._forced: ForcedAcceptance | None = None

    def constraint(self, planning: bool = False) -> GrammarConstraint:
        """At the beginning of an answer; those of planning keep masks of their own."""
        return (self._planning if planning else self.vocabulary).constraint_for(self._grammar)

    def sequence(self, constraint: Any, tokens: int) -> DecodingSequence:
        """A request of so many tokens at the most, exactly so many where nothing constrains it."""
        ends = () if constraint is None else (self.eos,)
        answer = OutputText(self.tokenizer.detokenizer(), (), (), ends, tokens)
        rules = None if constraint is None else AnswerRules(constraint, self.tokenizer, self.vocabulary.size)
        return DecodingSequence(self.prompt, SamplingValues(), answer, max_tokens=tokens, rules=rules)

    def run(self, sequences: Sequence[DecodingSequence], plan: DraftPlan | None = None) -> list[float]:
        """Answer them together; the seconds between the steps of the last one."""
        drafter = None if plan is None else FixedDrafter(plan)
        for _ in answered(DecodingLoop(SlotTable(self.runner, self.contents, drafter=drafter)), sequences):
            pass
        return sequences[-1].clock.gaps

    def plain(self, rounds: int) -> dict[str, Any]:
        """Plain steps, constrained and not, in turns; what comes is an answer of the schema."""
        gaps: dict[str, list[float]] = {"constrained": [], "unconstrained": []}
        number = 0
        while min(map(len, gaps.values())) < rounds or number < WARM_UPS:
            first = self.answers[number % len(self.answers)][0]
            constrained = self.sequence(Prescribed(self.constraint(), first), 120)
            found = self.run([constrained])
            assert constrained.failure is None and constrained.answer.finish_reason in ("stop", "length")
            free = self.run([self.sequence(None, max(3, len(found)))])
            if number >= WARM_UPS:
                gaps["constrained"] += found
                gaps["unconstrained"] += free
            number += 1
        return compared(gaps)

    def beside(self, rounds: int) -> dict[str, Any]:
        """An unconstrained request beside a constrained one, against beside another."""
        gaps: dict[str, list[float]] = {"constrained": [], "unconstrained": []}
        number = 0
        while min(map(len, gaps.values())) < rounds or number < WARM_UPS:
            for name in gaps:
                first = self.answers[number % len(self.answers)][0]
                rules = Prescribed(self.constraint(), first) if name == "constrained" else None
                other = self.sequence(rules, 60)
                found = self.run([other, self.sequence(None, 60)])
                if number >= WARM_UPS:
                    gaps[name] += found[: len(other.answer.token_ids) - 1]
            number += 1
        return compared(gaps)

    def rounds(self, plan: DraftPlan, rounds: int) -> dict[str, Any]:
        """Rounds of a plan, constrained and not, in turns."""
        forced = self._acceptance()
        lengths = schedule(MEAN_TOKENS, plan.steps)
        gaps: dict[str, list[float]] = {"constrained": [], "unconstrained": []}
        number = tokens = 0
        while min(map(len, gaps.values())) < rounds or number < WARM_UPS:
            answer = [*self.answers[number % len(self.answers)], self.eos]
            turned = np.roll(lengths, -7 * number)
            script = Script(plan, answer, turned, self.constraint(planning=True))
            self._present(plan, script)
            forced.use(turned, script.bonus)
            constrained = self.sequence(Prescribed(self.constraint(), answer[0]), 160)
            found = self.run([constrained], plan)
            said = list(constrained.answer.token_ids)
            assert constrained.failure is None and said == answer, (said, answer)
            ScriptedMasks.script = None
            forced.use(turned)
            free = self.run([self.sequence(None, len(answer))], plan)
            if number >= WARM_UPS:
                gaps["constrained"] += found
                gaps["unconstrained"] += free
                tokens += len(answer) - 1
            number += 1
        return compared(gaps) | {"tokens_a_round": tokens / len(gaps["constrained"])}

    def _acceptance(self) -> ForcedAcceptance:
        if self._forced is None:
            self._forced = ForcedAcceptance(self.runner.backend)
            self.runner.verification.before_acceptance = self._forced
        return self._forced

    def _present(self, plan: DraftPlan, script: Script) -> None:
        """Rounds from now on verify a script's candidates."""
        self.runner.base.lengths[0] = len(self.prompt)  # for a moment: a round's arrays are the same at all lengths
        current = self.runner.prepare_round(1, plan, True)
        self.runner.base.lengths[0] = 0
        ScriptedMasks.script, ScriptedMasks.round = script, 0
        ScriptedMasks.nodes, ScriptedMasks.backend = current._tree.nodes.tokens, self.runner.backend


def compared(gaps: dict[str, list[float]]) -> dict[str, Any]:
    """Medians and 99th percentiles in ms, and the ratio of medians."""
    found: dict[str, Any] = {"rounds": len(gaps["constrained"])}
    for name, values in gaps.items():
        found |= {
            f"{name}_ms": float(np.median(values)) * 1000,
            f"{name}_p99_ms": float(np.quantile(values, 0.99)) * 1000,
        }
    return found | {"ratio": found["constrained_ms"] / found["unconstrained_ms"]}


@contextmanager
def opened(directory: RandomDirectory, backend: str) -> Iterator[DecodingRunner]:
    """A runner of a directory with random weights, with a draft where the directory has one."""
    runner = DecodingRunner.open(random_backend(backend, directory), directory, drafts=directory.draft is not None)
    try:
        yield runner
    finally:
        runner.close()


def measure(work: Path, config: DecoderConfig, backend: str, rounds: int, capacity: int = 1024) -> dict[str, Any]:
    """All of a model's figures, by what is measured; printed as they come."""
    made, answers = MadeVocabulary(config.vocab_size), rounds // 8 + WARM_UPS
    found: dict[str, Any] = {}

    def add(name: str, values: dict[str, Any]) -> None:
        found[name] = values
        print(line(name, values), flush=True)

    plain = EngineLimits(2, 16, capacity)
    with opened(random_directory(work / "plain", config, plain), backend) as runner:
        bench = Bench(runner, made.tokenizer, made.eos_token_id, answers)
        add("plain step", bench.plain(rounds))
        add("beside", bench.beside(rounds // 2))
    eagle = EngineLimits(1, 16, capacity, draft_top_k=10, draft_steps=6, verify_tree_size=60)
    with opened(random_directory(work / "eagle", config, eagle), backend) as runner:
        bench = Bench(runner, made.tokenizer, made.eos_token_id, answers)
        for name, plan in PLANS.items():
            add(f"round of a {name}", bench.rounds(plan, rounds))
    return found


def measure_shipped(backend: str, rounds: int) -> dict[str, Any]:
    """Plain steps of the model that ships, with its own vocabulary, alone and in a batch of two."""
    from edgellm.engines.building.builder import build_engine_directory
    from edgellm.opened_model import SHIPPED_MODEL
    from edgellm.runtime import SpecDecodeRuntime

    with tempfile.TemporaryDirectory() as folder:
        limits = EngineLimits(max_batch=2, prefill_chunk=16, kv_capacity=1024)
        build_engine_directory(SHIPPED_MODEL, Path(folder) / "engines", limits, [] if backend == "numpy" else None)
        with SpecDecodeRuntime(Path(folder) / "engines", backend=backend) as runtime:
            eos = runtime.directory.config.eos_token_ids[0]
            bench = Bench(runtime._open_runner(), runtime.tokenizer, eos, rounds // 8 + WARM_UPS)
            bench.prompt = [token % 200 for token in bench.prompt]
            found = {"plain step": bench.plain(rounds), "beside": bench.beside(rounds // 2)}
    for name, values in found.items():
        print(line(name, values), flush=True)
    return found


def line(name: str, values: dict[str, Any]) -> str:
    """A line of the printed table."""
    return (
        f"{name}: constrained {values['constrained_ms']:.4f} ms (p99 {values['constrained_p99_ms']:.4f}), "
        f"unconstrained {values['unconstrained_ms']:.4f} ms (p99 {values['unconstrained_p99_ms']:.4f}), "
        f"ratio {values['ratio']:.3f}, {values['rounds']} rounds"
        + (f", {values['tokens_a_round']:.2f} tokens each" if "tokens_a_round" in values else "")
    )


def main() -> None:
    """Measure, print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", choices=list(SHAPES), default=["llama-1b"])
    parser.add_argument("--shipped", action="store_true")
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--backend", choices=("tensorrt", "numpy"), default="tensorrt")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "edgellm-bench")
    parser.add_argument("--output", type=Path)
    arguments = parse(parser)
    loop_module.StepMasks = ScriptedMasks  # type: ignore[misc]
    results: dict[str, Any] = {**provenance(), "models": {}}
    for shape in arguments.shapes:
        print(shape, flush=True)
        config = decoder_config(SHAPES[shape])
        results["models"][shape] = measure(
            arguments.work / f"structure-{shape}", config, arguments.backend, arguments.rounds
        )
    if arguments.shipped:
        print("shipped", flush=True)
        results["models"]["shipped"] = measure_shipped(arguments.backend, arguments.rounds)
    report(results, arguments.output)


if __name__ == "__main__":
    main()
