"""How far drafts without a model would have been accepted, and what they cost the host: known answers are replayed
round by round against engines/speculation/suffix_index.py, without a model.

    python -m tools.bench.suffix_replay [--calibration] [--output RESULTS.json]

What is replayed, in tokens of the shipped model: `edit`, parts of README.md and docs said again with a word replaced, a
sentence left out and one added; `action`, the 20th of 20 similar commands, the others either earlier requests of the
process or earlier turns of the conversation; `chat`, answers that are no actions to the shipped model's held-out
prompts, one request after the other. Answers are those that its evaluation accepts (it gives 99 % of them itself).
`--calibration` prints, for candidates whose parent was accepted, how often they were and how often scores said so.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from edgellm.engines.speculation.suffix_index import Proposal, SuffixIndex
from edgellm.opened_model import SHIPPED_MODEL
from edgellm.text.tokenizer import Tokenizer
from tools.bench.held_out_prompts import Messages, as_they_are
from tools.bench.provenance import provenance, report
from tools.demo_model.evaluate import evaluation_items

_CHECKOUT = Path(__file__).resolve().parents[2]
#: Nodes, depth and width of what is proposed in a round.
SHAPES = {
    "chain 5": (5, 5, 1),
    "chain 8": (8, 8, 1),
    "chain 16": (16, 16, 1),
    "tree 16": (16, 8, 4),
    "tree 32": (32, 12, 4),
}
ACTIONS = ("pick", "place_object", "move", "push", "give", "turn", "point")


class Replayed(NamedTuple):
    """Token ids of a request and of its answer; `counts` is False for one that only comes before those measured."""

    prompt: list[int]
    answer: list[int]
    counts: bool = True


class Replays:
    """Requests of the shipped model's tokenizer. Each list of them is replayed in an index of its own."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.tokenizer = Tokenizer.from_directory(SHIPPED_MODEL)
        self._end = self.tokenizer.token_to_id("<|im_end|>")

    def edits(self) -> list[list[Replayed]]:
        """Parts of the project's pages, of about 2,000 characters, each said again with three changes."""
        found = []
        for path in [_CHECKOUT / "README.md", *sorted((_CHECKOUT / "docs" / "pages").glob("*.md"))]:
            text = path.read_text(encoding="utf-8")
            for start in range(0, len(text) - 2000, 6000):
                rng = random.Random(f"{self._seed} {path.name} {start}")
                original = text[start : start + 2000]
                word, answer = _edited(rng, original)
                messages = [{"role": "user", "content": f'Say "machine" instead of "{word}":\n\n{original}'}]
                found.append([self._replayed(messages, answer)])
        return found

    def actions(self, in_conversation: bool) -> list[list[Replayed]]:
        """For each kind of action several times 20 commands in different scenes; the last one counts."""
        found = []
        for seed in range(3):
            items = evaluation_items(self._seed + seed, 20)
            for skill in ACTIONS:
                alike = [item for item in items if item["skill"] == skill and "{" in item["accepted"][0]][:20]
                if in_conversation:
                    found.append([self._conversation(alike)])
                else:
                    asked = [self._replayed(item["messages"], item["accepted"][0]) for item in alike]
                    found.append([one._replace(counts=False) for one in asked[:-1]] + asked[-1:])
        return found

    def chats(self) -> list[list[Replayed]]:
        """The held-out prompts whose answers are no actions, in a mixed order."""
        items = [item for item in evaluation_items(self._seed, 3) if "{" not in item["accepted"][0]]
        random.Random(self._seed).shuffle(items)
        return [[self._replayed(item["messages"], item["accepted"][0]) for item in items]]

    def _conversation(self, items: list[dict[str, Any]]) -> Replayed:
        messages = [message for message in items[-1]["messages"] if message["role"] == "system"]
        for item in items[:-1]:
            messages += [item["messages"][-1], {"role": "assistant", "content": item["accepted"][0]}]
        return self._replayed([*messages, items[-1]["messages"][-1]], items[-1]["accepted"][0])

    def _replayed(self, messages: Messages, answer: str) -> Replayed:
        prompt = self.tokenizer.encode_chat(as_they_are(messages))
        return Replayed(prompt, [*self.tokenizer.encode(answer), self._end])


def _edited(rng: random.Random, text: str) -> tuple[str, str]:
    """A word of a text, and the text with it replaced, a line left out and another one added."""
    word = rng.choice(sorted({word for word in text.split() if word.isalpha() and len(word) > 3}))
    lines = text.replace(word, "machine").split("\n")
    del lines[rng.randrange(len(lines))]
    lines.insert(rng.randrange(len(lines)), "This line was not there before.")
    return word, "\n".join(lines)


class Round(NamedTuple):
    """What one round proposed, which nodes were accepted (by index), how many tokens it said, seconds of both calls."""

    proposal: Proposal
    accepted: list[int]
    tokens: int
    propose_seconds: float
    extend_seconds: float


def rounds(index: SuffixIndex, request: Replayed, shape: tuple[int, int, int]) -> Iterable[Round]:
    """The rounds of one request whose answer is known."""
    sequence = index.open(request.prompt)
    said = 0
    while said < len(request.answer):
        started = time.perf_counter()
        proposal = index.propose(sequence, *shape)
        proposed = time.perf_counter()
        accepted = accepted_path(proposal, request.answer[said:])
        tokens = request.answer[said : said + len(accepted) + 1]
        extending = time.perf_counter()
        index.extend(sequence, tokens)
        yield Round(proposal, accepted, len(tokens), proposed - started, time.perf_counter() - extending)
        said += len(tokens)
    index.close(sequence)


def accepted_path(proposal: Proposal, answer: list[int]) -> list[int]:
    """The indices of the nodes that an answer follows."""
    path: list[int] = []
    named = zip(proposal.parents, proposal.tokens, strict=True)
    below = {name: node for node, name in enumerate(named)}
    for token in answer:
        node = below.get((path[-1] if path else -1, token))
        if node is None:
            break
        path.append(node)
    return path


def replay(groups: list[list[Replayed]], shape: tuple[int, int, int]) -> list[Round]:
    """The rounds of the requests that count."""
    found: list[Round] = []
    for group in groups:
        index = SuffixIndex()
        for request in group:
            played = list(rounds(index, request, shape))
            found += played if request.counts else []
    return found


def calibration(played: list[Round]) -> list[dict[str, float]]:
    """Candidates whose parent was accepted, by tenths of what scores promise: how many, and how often accepted."""
    bins: dict[int, list[tuple[float, bool]]] = defaultdict(list)
    for proposal, accepted, *_ in played:
        reached = {-1, *accepted}
        for node, parent in enumerate(proposal.parents):
            if parent in reached:
                probability = proposal.promises[node]
                bins[min(9, int(probability * 10))].append((probability, node in accepted))
    return [
        {
            "candidates": len(pairs),
            "promised": round(statistics.mean(pair[0] for pair in pairs), 3),
            "accepted": round(statistics.mean(pair[1] for pair in pairs), 3),
        }
        for _, pairs in sorted(bins.items())
    ]


def summary(played: list[Round]) -> dict[str, float]:
    """Tokens a round, the bonus token included, real and promised, and microseconds of the calls."""
    proposing = sorted(one.propose_seconds for one in played)
    extending = [one.extend_seconds for one in played]
    promised = [1 + float(np.exp(one.proposal.scores).sum()) for one in played]
    return {
        "rounds": len(played),
        "tokens_a_round": round(statistics.mean(one.tokens for one in played), 3),
        "promised": round(statistics.mean(promised), 3),
        "propose_us": round(statistics.median(proposing) * 1e6, 1),
        "propose_p99_us": round(proposing[int(len(proposing) * 0.99)] * 1e6, 1),
        "extend_us": round(statistics.median(extending) * 1e6, 1),
    }


def speed(replays: Replays) -> dict[str, float]:
    """Microseconds of the calls behind 8,000 tokens of history and 200,000 of earlier answers, and of opening 4,000."""
    said = [token for group in replays.edits() for request in group for token in request.prompt + request.answer]
    index = SuffixIndex(200_000)
    for start in range(0, 200_000, 400):
        sequence = index.open([])
        at = start % (len(said) - 400)
        index.extend(sequence, said[at : at + 400])
        index.close(sequence)
    results = {"open_4000_us": _median_us(lambda: index.open(said[:4000]), 20)}
    for name, shape in SHAPES.items():
        sequence = index.open(said[:8000])
        spans = []
        for at in range(8000, 10000, 8):
            started = time.perf_counter()
            index.extend(sequence, said[at : at + 8])
            index.propose(sequence, *shape)
            spans.append(time.perf_counter() - started)
        spans.sort()
        results[f"extend by 8 and propose {name}, us (median, 99 %)"] = [
            round(spans[int(len(spans) * part)] * 1e6, 1) for part in (0.5, 0.99)
        ]
    return results


def _median_us(call: Any, times: int) -> float:
    spans = []
    for _ in range(times):
        started = time.perf_counter()
        call()
        spans.append(time.perf_counter() - started)
    return round(statistics.median(spans) * 1e6, 1)


def main() -> None:
    """Replay everything and print the results as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calibration", action="store_true", help="print how scores and acceptance agree")
    parser.add_argument("--seed", type=int, default=77002)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    replays = Replays(arguments.seed)
    kinds = {
        "edit": replays.edits(),
        "action, earlier requests": replays.actions(False),
        "action, earlier turns": replays.actions(True),
        "chat": replays.chats(),
    }
    results: dict[str, Any] = {"provenance": provenance(), "speed": speed(replays)}
    for kind, groups in kinds.items():
        played = {name: replay(groups, shape) for name, shape in SHAPES.items()}
        results[kind] = {name: summary(one) for name, one in played.items()}
        if arguments.calibration:
            results[kind]["calibration"] = calibration(played["tree 32"])
    report(results, arguments.output)


if __name__ == "__main__":
    main()
