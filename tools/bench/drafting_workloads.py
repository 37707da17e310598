"""What drafting is worth on simulated workloads, against plain decoding and every fixed plan.

    python -m tools.bench.drafting_workloads [--only WORDS] [--output TABLE.md]

Texts are the project's own: pages, code, edits of pages, actions in JSON, prose, and words in no order; how well a
draft model guesses them is assumed, in spells that are easier and harder; `drafting_simulation` plays them. For each
workload: what is drafted, the speed of it over plain decoding's, the least share of plain decoding's speed over any 512
tokens of a sequence, from the first token of the process on, and behind the first 1,024 tokens the speed over the best
fixed plan's, with that plan and what it has over plain decoding.
"""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from edgellm.decoding.loop import DecodingLoop
from edgellm.drafting.config import DraftingConfig
from edgellm.drafting.drafters import candidate_plans
from edgellm.drafting.learner import Learner
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.speculation.draft_plan import DraftPlan, given
from edgellm.engines.speculation.suffix_index import SuffixIndex
from tools.bench.drafting_simulation import (
    CPU,
    H200,
    INT4,
    ORIN,
    SHIPPED,
    SMOLLM2,
    Device,
    Simulated,
    Text,
    played,
    played_fixed,
)

_CHECKOUT = Path(__file__).resolve().parents[2]
LIMITS = EngineLimits(draft_top_k=10, draft_steps=6, verify_tree_size=60)
WINDOW, LEARNED = 512, 1024
DEEPEST = 16
#: How often a chain's first guess is right, by kind of text, and in JSON where rules leave no choice.
HEAD = {"chat": 0.62, "code": 0.8, "edit": 0.7, "action": 0.9, "schema": 0.75, "prose": 0.45, "unseen": 0.05}
#: The odds of that in an easier and in a harder spell, and how long spells are.
ODDS, SPELL = (2.7, 1 / 2.7), 12
_OBJECTS = ["red cup", "blue cup", "green apple", "white bowl", "yellow banana", "wooden spoon", "small box"]


class Workload(NamedTuple):
    """`kinds` of text in turns of `turn` tokens within an answer; `drafts` what: "model", "suffix", "both", or "rules"
    alone; so many `answers` of `length` tokens, each of `batch` sequences."""

    device: Device
    drafts: str
    kinds: tuple[str, ...]
    batch: int = 1
    temperature: float = 0.0
    answers: int = 2
    length: int = 2000
    turn: int = 400

    @property
    def name(self) -> str:
        """In words."""
        return f"{self.device.name}, {self.drafts}: {' + '.join(self.kinds)}, batch {self.batch}, T {self.temperature}"

    @property
    def has_model(self) -> bool:
        """Whether a draft model is loaded."""
        return self.drafts in ("model", "both")


def workloads() -> list[Workload]:
    """Forty, then those of a model whose steps are no longer than the host's, and of a small one."""
    found = []
    for device in (H200, ORIN, INT4, CPU):
        found += [Workload(device, "model", (kind,)) for kind in ("chat", "code", "unseen")]
        found += [Workload(device, "suffix", (kind,)) for kind in ("chat", "edit")]
    found += [Workload(device, "both", ("code", "edit", "chat")) for device in (H200, ORIN, CPU)]
    found += [Workload(device, "model", ("code", "unseen", "chat", "unseen")) for device in (H200, INT4, CPU)]
    found += [Workload(device, "suffix", ("edit", "chat", "prose"), turn=300) for device in (H200, CPU)]
    found += [Workload(device, "suffix", ("action",), answers=70, length=60) for device in (H200, CPU)]
    found += [Workload(device, "rules", ("schema",), answers=20, length=200) for device in (H200, ORIN, CPU)]
    found += [Workload(device, "both", ("schema",), answers=20, length=200) for device in (H200, CPU)]
    found += [Workload(H200, "model", ("chat",), temperature=t) for t in (0.7, 1.2)]
    found += [Workload(H200, "model", ("chat", "code"), batch, length=1500) for batch in (4, 8)]
    found.append(Workload(H200, "both", ("edit", "unseen"), 4, 0.7, length=1500))
    fast = [each for each in found if each.device is H200 and each.batch < 8]
    found += [each._replace(device=SHIPPED) for each in fast]
    return [*found, *(each._replace(device=SMOLLM2) for each in fast if each.drafts == "model")]


def texts(workload: Workload) -> list[list[Text]]:
    """The texts of a workload, answer by answer."""
    rng = random.Random(f"{workload.kinds} {workload.temperature}")
    return [[_text(workload, rng) for _ in range(workload.batch)] for _ in range(workload.answers)]


def _text(workload: Workload, rng: random.Random) -> Text:
    page = _part(rng, "chat", 1200)
    prompt = page if "edit" in workload.kinds else page[:100]
    answer: list[int] = []
    head: list[float] = []
    forced: list[bool] = []
    spell = 0
    while len(answer) < workload.length:
        for kind in workload.kinds:
            piece, alone = _piece(rng, kind, page, min(workload.turn, workload.length))
            answer, forced = answer + piece, forced + alone
            for is_forced in alone:
                spell = rng.randrange(2) if rng.random() < 1.0 / SPELL else spell
                odds = ODDS[spell] * HEAD[kind] / (1.0 - HEAD[kind])
                chance = 0.6 if is_forced else odds / (1.0 + odds)
                head.append(chance * (1.0 - 0.35 * workload.temperature))
    answer = answer[: workload.length]
    answer = [rng.randrange(10**6, 10**7) if rng.random() < 0.08 * workload.temperature else each for each in answer]
    return Text(prompt, answer, head, [rng.random() for _ in head], forced if "schema" in workload.kinds else None)


def _piece(rng: random.Random, kind: str, page: list[int], length: int) -> tuple[list[int], list[bool]]:
    """Tokens of a kind, and which of them rules would force."""
    if kind in ("action", "schema"):
        named = [("action", rng.choice(["push", "pick", "give", "place"])), ("object", rng.choice(_OBJECTS))]
        named += [("position", rng.choice(["front left", "back right", "middle"])), ("text", _words(rng, 8))]
        tokens: list[int] = []
        alone: list[bool] = []
        for name, value in named:
            for written, is_forced in ((f'"{name}": "', True), (value, False), ('", ', True)):
                ids = _tokens(written)
                tokens, alone = tokens + ids, alone + [is_forced] * len(ids)
        return tokens, alone
    if kind == "edit":
        start = rng.randrange(max(1, len(page) - length))
        tokens = page[start : start + length]
        for _ in range(len(tokens) // 60):
            place = rng.randrange(len(tokens))
            tokens[place : place + rng.randrange(3)] = _part(rng, "prose", rng.randrange(1, 9))
        return tokens, [False] * len(tokens)
    tokens = _part(rng, kind, length)
    return tokens, [False] * len(tokens)


def _part(rng: random.Random, kind: str, length: int) -> list[int]:
    if kind == "unseen":
        return rng.sample(_source("chat"), length)
    source = _source(kind)
    start = rng.randrange(max(1, len(source) - length))
    return source[start : start + length]


def _words(rng: random.Random, count: int) -> str:
    words = (_CHECKOUT / "tools/bench/public_domain_prose.txt").read_text(encoding="utf-8").split()
    return " ".join(rng.choice(words).strip('",') for _ in range(count))


_numbers: dict[str, int] = {}


def _tokens(text: str) -> list[int]:
    """Words, marks and line ends, numbered from 1: rows without a number would give 0."""
    return [_numbers.setdefault(each, 1 + len(_numbers)) for each in re.findall(r"\w+|[^\w\s]|\n", text)]


@cache
def _source(kind: str) -> list[int]:
    places = {"chat": ("docs/pages", "**/*.md"), "code": ("edgellm/snapshots", "*.py")}
    folder, pattern = places.get(kind, ("tools/bench", "public_domain_prose.txt"))
    return [token for path in sorted((_CHECKOUT / folder).glob(pattern)) for token in _tokens(path.read_text("utf-8"))]


def played_drafted(workload: Workload, answers: Sequence[Sequence[Text]], seed: int = 0) -> list[list[float]]:
    """Decode seconds until each token of each sequence, as the house would draft."""
    device = workload.device
    simulated = Simulated(device, workload.has_model, seed)
    index = None if workload.drafts in ("model", "rules") else SuffixIndex()
    if index is not None:
        propose = index.propose

        def asked(*arguments: object) -> object:
            simulated.now += device.ask
            return propose(*arguments)  # type: ignore[arg-type]

        index.propose = asked  # type: ignore[method-assign,assignment]
    loop, opened = _drafted_loop(workload, simulated, index)
    return played(simulated, loop, answers, opened)


def _drafted_loop(
    workload: Workload, simulated: Simulated, index: SuffixIndex | None
) -> tuple[DecodingLoop, Callable[..., None]]:
    own = candidate_plans(DraftingConfig(), LIMITS) if workload.has_model else []
    drafter = simulated.drafter = Learner(DEEPEST, workload.device.ahead > 0, index, own)
    simulated.ended = drafter.close  # type: ignore[method-assign]

    def takes(seconds: float, method: Callable[..., Any]) -> Callable[..., Any]:
        def taking(*arguments: object, **named: object) -> object:
            simulated.now += seconds
            return method(*arguments, **named)

        return taking

    device, choice = workload.device, drafter._choice
    drafter.choose, drafter.record = takes(device.think, drafter.choose), takes(device.think, drafter.record)  # type: ignore[method-assign]
    choice.ratings = takes(device.rate, choice.ratings)  # type: ignore[method-assign]
    return DecodingLoop(simulated), lambda sequence: drafter.open(sequence, sequence.prompt_ids)  # type: ignore[arg-type]


class Figures(NamedTuple):
    """Of a workload: the speed over plain decoding's, the worst window's, and behind what is learned that of the best
    fixed plan over plain decoding's and ours over that."""

    overall: float
    worst: float
    best: float
    share: float
    plan: str


def figures(workload: Workload, seed: int = 0) -> Figures:
    """Simulate one workload."""
    answers = texts(workload)
    plain = played_fixed(workload.device, None, answers, False)
    ours = played_drafted(workload, answers, seed)
    found = {}
    for plan in _fixed(workload):
        index = SuffixIndex() if workload.drafts in ("suffix", "both") and plan.is_given else None
        found[plan.name] = played_fixed(workload.device, plan, answers, workload.has_model, index)
    late = min(LEARNED, len(plain[0]) // 2)

    def rate(seconds: Sequence[Sequence[float]]) -> float:
        return sum((len(each) - late) / (each[-1] - each[late - 1]) for each in seconds)

    name = max(found, key=lambda each: rate(found[each]))
    best = rate(found[name])
    overall = sum(each[-1] for each in plain) / sum(each[-1] for each in ours)
    worst = min(share for pair in zip(plain, ours, strict=True) for share in windows(*pair))
    return Figures(overall, worst, best / rate(plain), rate(ours) / best, name)


def windows(plain: Sequence[float], ours: Sequence[float], size: int = WINDOW) -> Iterator[float]:
    """The speed over plain decoding's in all spans of so many tokens."""
    for start in range(0, len(plain) - size, max(1, size // 32)):
        first = (plain[start - 1], ours[start - 1]) if start else (0.0, 0.0)
        yield (plain[start + size - 1] - first[0]) / (ours[start + size - 1] - first[1])


def _fixed(workload: Workload) -> list[DraftPlan]:
    own = candidate_plans(DraftingConfig(), LIMITS) if workload.has_model else []
    return own if workload.drafts == "model" else [*own, *(given(nodes, nodes) for nodes in (3, 7, 15))]


def main() -> None:
    """Simulate and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="workloads whose name has this")
    parser.add_argument("--output", type=Path, help="write the table to a file, too")
    arguments = parser.parse_args()
    lines = ["| Workload | over plain | worst 512 | of best fixed | best fixed (over plain) |", "|---|---|---|---|---|"]
    held = below = compared = 0
    for workload in workloads():
        if arguments.only in workload.name:
            each = figures(workload)
            is_better = each.best > 1.1
            held, below = held + (each.worst >= 0.99), below + (is_better and each.share < 0.95)
            compared += is_better
            share = f"{each.share:.3f}" if is_better else f"({each.share:.3f})"
            lines.append(
                f"| {workload.name} | {each.overall:.3f} | {each.worst:.3f} | {share} | {each.plan} ({each.best:.2f}) |"
            )
            print(lines[-1], flush=True)
    lines.append(
        f"\n{held} of {len(lines) - 2} never below 0.99 of plain; {compared - below} of {compared} at 0.95 of the best "
        "fixed plan where that is above 1.1"
    )
    print(lines[-1])
    if arguments.output:
        arguments.output.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
