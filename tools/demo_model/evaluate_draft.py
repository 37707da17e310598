"""Mean acceptance length of a draft head on held-out prompts, with greedy verification, simulated in PyTorch.

Usage: python -m tools.demo_model.evaluate_draft --base DIR --draft DIR [--count 3] [--seed 7]

The base's greedy answer is decoded once; verification is then a comparison with it, and its features serve the draft. A
round emits the accepted tokens and one more; the first token of an answer comes from the prompt and counts for nothing.
"""

import argparse
import json
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch

from tools.demo_model.draft_model import Draft, attention_over, load_draft
from tools.demo_model.evaluate import evaluation_items
from tools.demo_model.model import Model, load_model, rotations
from tools.demo_model.vocabulary import END, load_vocabulary, render

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Tree:
    """K nodes kept a step, D steps, V nodes verified, the root included; a chain of n is (1, n, n + 1)."""

    top_k: int
    steps: int
    size: int


TREES = {"chain of 5": Tree(1, 5, 6), "tree 10 / 6 / 60": Tree(10, 6, 60), "tree 4 / 5 / 16": Tree(4, 5, 16)}


class Recorder:
    """Attention function of one pass of the draft: keeps what it was given, sees `past` rows and its own by `mask`."""

    def __init__(self, past: tuple[torch.Tensor, torch.Tensor] | None, mask: torch.Tensor):
        self.past, self.mask = past, mask

    def __call__(self, q, k, v):
        self.keys, self.values = k, v
        if self.past is not None:
            k, v = torch.cat((self.past[0], k), dim=2), torch.cat((self.past[1], v), dim=2)
        return attention_over(q, k, v, self.mask)


class Simulation:
    """One answer: token ids with the base's features of all but the last, and the draft's committed entries."""

    def __init__(self, base: Model, draft: Draft, ids: list[int]):
        self.base, self.draft, self.ids = base, draft, ids
        tokens = torch.tensor([ids])
        _, features = base.with_features(tokens[:, :-1], draft.d.eagle_aux_hidden_state_layer_ids)
        self.rotation = rotations(len(ids) + 64, draft.d, "cpu")
        count = len(ids) - 1
        self.committed = Recorder(None, torch.ones(count, count, dtype=torch.bool).tril())
        rotation = tuple(part[:count] for part in self.rotation)
        embedded = base.model.embed_tokens(tokens[:, 1:])
        self.hidden = draft.midlayer(embedded, draft.fuse(features), rotation, self.committed)

    def candidates(self, hidden: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and target ids [rows, K] of the likeliest next tokens."""
        values, places = self.draft.logits(hidden).log_softmax(-1).topk(top_k, dim=-1)
        return values, self.draft.targets[places]

    def proposed(self, root: int, tree: Tree) -> list[tuple[int, int]]:
        """(parent, token) of the nodes to verify behind token `root`; parents are positions in the list, -1 the root.

        Only the committed entries 0..root-1 are used. Ties prefer the shallow and the earlier node.
        """
        past = self.committed.keys[:, :, :root], self.committed.values[:, :, :root]
        values, tokens = self.candidates(self.hidden[0, root - 1 : root], tree.top_k)
        nodes = [(-1, int(t), float(s)) for s, t in zip(values[0], tokens[0], strict=True)]
        frontier, features = list(range(tree.top_k)), self.hidden[:, root - 1 : root].expand(1, tree.top_k, -1)
        lines: list[list[int]] = [[] for _ in frontier]  # rows of the ancestors' entries, of each frontier node
        for level in range(1, tree.steps):
            first = past[0].shape[2] - root
            mask = torch.zeros(len(frontier), past[0].shape[2] + len(frontier), dtype=torch.bool)
            mask[:, :root] = True
            for row, line in enumerate(lines):
                line.append(first + row)
                mask[row, [root + place for place in line]] = True
            recorder = Recorder(past, mask)
            rotation = tuple(part[root + level - 1 : root + level].expand(len(frontier), -1) for part in self.rotation)
            embedded = self.base.model.embed_tokens(torch.tensor([[nodes[node][1] for node in frontier]]))
            hidden = self.draft.midlayer(embedded, features, rotation, recorder)
            past = torch.cat((past[0], recorder.keys), dim=2), torch.cat((past[1], recorder.values), dim=2)
            values, tokens = self.candidates(hidden[0], tree.top_k)
            begin = len(nodes)
            for row, node in enumerate(frontier):
                scored = zip(values[row], tokens[row], strict=True)
                nodes += [(node, int(token), nodes[node][2] + float(value)) for value, token in scored]
            best = sorted(range(begin, len(nodes)), key=lambda i: (-nodes[i][2], i))[: tree.top_k]
            rows = [(i - begin) // tree.top_k for i in best]
            frontier, features, lines = best, hidden[:, rows], [list(lines[row]) for row in rows]
        kept = sorted(sorted(range(len(nodes)), key=lambda i: (-nodes[i][2], i))[: tree.size - 1])
        position = {node: place for place, node in enumerate(kept)}
        return [(position.get(nodes[i][0], -1), nodes[i][1]) for i in kept]

    def accepted(self, root: int, tree: Tree) -> int:
        """How many drafted tokens behind token `root` are those of the answer."""
        nodes, node, count = self.proposed(root, tree), -1, 0
        while root + count + 1 < len(self.ids):
            wanted = self.ids[root + count + 1]
            node = next((i for i, (parent, token) in enumerate(nodes) if (parent, token) == (node, wanted)), None)
            if node is None:
                return count
            count += 1
        return count

    def rounds(self, first: int, tree: Tree) -> list[int]:
        """Tokens emitted in each round after the first answer token, which is token `first`."""
        found, root = [], first
        while root + 1 < len(self.ids):
            emitted = min(self.accepted(root, tree) + 1, len(self.ids) - 1 - root)
            found.append(emitted)
            root += emitted
        return found


@torch.no_grad()
def greedy_ids(base: Model, prompt: list[int], end: int, limit: int) -> list[int]:
    """The prompt and the base's greedy answer, its end token included."""
    ids = list(prompt)
    while len(ids) < len(prompt) + limit:
        ids.append(int(base.logits(base(torch.tensor([ids]))[:, -1]).argmax()))
        if ids[-1] == end:
            break
    return ids


def answer_ids(base: Model, tokenizer, item: dict, end: int, limit: int) -> tuple[list[int], int]:
    """Ids of prompt and greedy answer, and the prompt's length; an accepted answer is tried before decoding."""
    prompt = tokenizer.encode(render(item["messages"], True)).ids
    for answer in item.get("accepted", ()):
        ids = tokenizer.encode(render(item["messages"], True) + answer + END).ids
        with torch.no_grad():
            best = base.logits(base(torch.tensor([ids[:-1]]))[:, len(prompt) - 1 :])[0].argmax(-1).tolist()
        if best == ids[len(prompt) :]:
            return ids, len(prompt)
    return greedy_ids(base, prompt, end, limit), len(prompt)


@torch.no_grad()
def acceptance(base: Model, draft: Draft, tokenizer, items: list[dict], trees: dict[str, Tree], limit: int) -> dict:
    """Mean emitted tokens a round, by tree: overall and by skill."""
    end, emitted = tokenizer.token_to_id(END), {name: defaultdict(list) for name in trees}
    for item in items:
        ids, first = answer_ids(base, tokenizer, item, end, limit)
        simulation = Simulation(base, draft, ids)
        for name, tree in trees.items():
            emitted[name][item["skill"]] += simulation.rounds(first, tree)
    result = {}
    for name, skills in emitted.items():
        everything = [count for counts in skills.values() for count in counts]
        result[name] = {
            "mean acceptance length": round(sum(everything) / len(everything), 3),
            "rounds": len(everything),
            "by skill": {skill: round(sum(counts) / len(counts), 2) for skill, counts in skills.items() if counts},
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--count", type=int, default=3, help="items of each skill")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--prompts", type=Path, help="instead, user lines of this file (no system prompt)")
    parser.add_argument("--limit", type=int, default=128, help="tokens of an answer that is not an accepted one")
    parser.add_argument("--trees", nargs="*", default=list(TREES), choices=list(TREES))
    parser.add_argument("--results", type=Path)
    arguments = parser.parse_args()
    begin = time.time()
    base, draft, tokenizer = load_model(arguments.base), load_draft(arguments.draft), load_vocabulary(arguments.base)
    if arguments.prompts:
        lines = [line for line in arguments.prompts.read_text().splitlines() if line]
        items = [{"skill": "open", "messages": [{"role": "user", "content": line}]} for line in lines]
    else:
        items = evaluation_items(arguments.seed, arguments.count)
    trees = {name: TREES[name] for name in arguments.trees}
    found = acceptance(base, draft, tokenizer, items, trees, arguments.limit)
    for name, values in found.items():
        print(f"{name:18} {values['mean acceptance length']:.3f} tokens a round over {values['rounds']} rounds")
        print("    " + ", ".join(f"{skill} {value}" for skill, value in values["by skill"].items()))
    print(f"{len(items)} prompts, {time.time() - begin:.0f} s")
    if arguments.results:
        record = {"seed": arguments.seed, "items_per_skill": arguments.count, "prompts": len(items), **found}
        arguments.results.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
