"""The draft tree by plain recursion in Python, which the tests compare the kernels with, and random cases for both."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from kernel_bundles import sequence_state, tree_nodes

from edgellm.kernels.sampling.contract import ModelTables, SequenceState, StepInputs
from edgellm.kernels.tree.contract import (
    Candidates,
    Expansion,
    HiddenRows,
    Level,
    TreeNodes,
    candidate_count,
    level_start,
)


def best(scored: list[tuple[float, int]], count: int) -> list[int]:
    """Indices of the `count` highest scores, best first, the lower index first among equals; none of -inf or NaN."""
    existing = [(score, index) for score, index in scored if score > -np.inf]
    return [index for _, index in sorted(existing, key=lambda pair: (-pair[0], pair[1]))[:count]]


def round_to_float32(value: float) -> float:
    """Also what overflows there: to infinity."""
    with np.errstate(over="ignore"):
        return float(np.float32(value))


def expand(
    row: np.ndarray,
    draft_to_target: np.ndarray,
    parent_score: float,
    top_k: int,
    score: bool = True,
    width: int | None = None,
) -> list[tuple[int, float]]:
    """(token, score) of a node's children, summed in float64 (0 without `score`); the missing ones are (-1, -inf)."""
    values = [-np.inf if np.isnan(value) else float(value) for value in row]
    maximum = max(values)
    children = []
    if maximum > -np.inf and parent_score > -np.inf:
        differences = [0.0 if value == maximum else round_to_float32(value - maximum) for value in values]
        log_sum = float(np.log(np.sum(np.exp(differences))))
        for index in best(list(zip(values, range(len(values)), strict=True)), width or top_k):
            total = round_to_float32(parent_score + differences[index] - log_sum) if score else 0.0
            if values[index] > -np.inf < total:
                children.append((int(draft_to_target[index]), total))
    return children + [(-1, -np.inf)] * (top_k - len(children))


def select_frontier(scores: np.ndarray, level: int, top_k: int, width: int) -> list[int]:
    """The level's best candidates, -1 behind."""
    start, end = level_start(level, top_k), level_start(level + 1, top_k)
    chosen = best([(float(scores[i]), i) for i in range(start, end)], width)
    return chosen + [-1] * (top_k - len(chosen))


def is_of_level(candidate: int, level: int, top_k: int) -> bool:
    return level_start(level, top_k) <= candidate < level_start(level + 1, top_k)


def proposal_rows(frontiers: np.ndarray, level: int, slot: int) -> set[int]:
    """KV rows behind the committed ones that the slot sees: its own and those of its ancestors."""
    top_k = frontiers.shape[1]
    rows = {(level - 1) * top_k + slot}
    candidate = int(frontiers[level - 1, slot])
    if level == 1 or not is_of_level(candidate, level, top_k):
        return rows
    parent = (candidate - level_start(level, top_k)) // top_k
    return rows | proposal_rows(frontiers, level - 1, parent)


def tree(root: int, selected: list[int], tokens: np.ndarray, parents: np.ndarray, size: int) -> list[tuple]:
    """(token, parent's place, depth, places on the way from the root) of each of `size` places."""
    place = {candidate: i for i, candidate in enumerate(selected, 1) if 0 <= candidate < len(tokens)}

    def path(candidate: int) -> list[int] | None:
        if candidate == -1:
            return [0]
        if candidate not in place or tokens[candidate] < 0:
            return None
        parent = int(parents[candidate])
        above = path(parent) if parent < candidate else None
        return None if above is None else [*above, place[candidate]]

    nodes: list[tuple] = [(root, -1, 0, [0])]
    for i in range(1, size):
        candidate = selected[i - 1] if i <= len(selected) else -1
        way = path(candidate) if candidate in place else None
        nodes.append((int(tokens[candidate]), way[-2], len(way) - 1, way) if way else (-1, -1, 0, [i]))
    return nodes


def rotary_row(table: np.ndarray, position: int) -> np.ndarray:
    return table[min(max(position, 0), len(table) - 1)]


def mask_row(keys: int, committed: int, rows: set[int] | list[int]) -> list[bool]:
    return [key < committed or key - committed in rows for key in range(keys)]


@dataclass
class Drafting:
    """Arrays of a drafting round with B sequences, filled level by level as the runtime does it."""

    logits: list[np.ndarray]  # of each level, [B, 1 or K, U]
    expansion: Expansion
    committed: np.ndarray
    tables: ModelTables
    hidden: list[np.ndarray]  # of each level, [B, 1 or K, G]
    candidates: Candidates
    keys: int
    width: int  # of the tree, at most K

    @property
    def batch(self) -> int:
        return self.candidates.frontiers.shape[0]

    @property
    def top_k(self) -> int:
        return self.candidates.frontiers.shape[2]

    @property
    def steps(self) -> int:
        return len(self.logits)

    def level(self, number: int, dynamic: bool = True) -> Level:
        return Level(number, self.width, dynamic)

    def inputs(self, tokens: int, start: np.ndarray) -> StepInputs:
        """Unwritten inputs of a step of so many tokens, whose rows begin at `start`."""
        rows, compute = (self.batch, tokens), self.tables.embedding.dtype
        embeds = np.ones((*rows, self.tables.embedding.shape[1]), compute)
        cos_sin = np.ones((*rows, self.tables.rotary.shape[1]), compute)
        return StepInputs(embeds, cos_sin, np.ones((self.batch, 1, tokens, self.keys), bool), start)

    def proposal(self, level: int) -> tuple[HiddenRows, StepInputs]:
        """What `prepare_proposal` reads and writes beside the candidates."""
        hidden = self.hidden[level - 1]
        fed = np.ones((self.batch, self.top_k, hidden.shape[2]), hidden.dtype)
        return HiddenRows(hidden, fed), self.inputs(self.top_k, np.full(self.batch, -9, np.int32))

    def verification(
        self, rng: np.random.Generator, tree_size: int, tokens: int
    ) -> tuple[SequenceState, Candidates, TreeNodes, StepInputs]:
        """What `prepare_verification` reads and writes, of a tree of `tree_size` nodes padded to `tokens`."""
        vocabulary = len(self.tables.embedding)
        roots = rng.integers(0, vocabulary, (self.batch, 1)).astype(np.int32)
        positions = rng.integers(0, 999, self.batch).astype(np.int32)
        known = {"token_ids": roots, "positions": positions, "kvcache_start_index": self.committed}
        candidates = self.candidates._replace(selected=np.full((self.batch, tree_size - 1), -9, np.int32))
        nodes = tree_nodes(np.full((self.batch, tokens), -9, np.int32))
        state = sequence_state(self.batch, vocabulary, **known)
        return state, candidates, nodes, self.inputs(tokens, self.committed)


def random_drafting(
    rng: np.random.Generator,
    batch: int,
    top_k: int,
    steps: int,
    draft_vocab: int,
    kind: str = "ordinary",
    keys: int = 70,
    compute: type = np.float32,
    sizes: tuple[int, int, int] = (6, 5, 4),
    width: int | None = None,
) -> Drafting:
    """A round with logits of a `kind`; `sizes` are those of embeddings, hidden states and rotary rows.

    The tree is `top_k` wide, or narrower than these arrays.
    """
    embedding_size, hidden_size, rotary_size = sizes
    count = candidate_count(steps, top_k)
    target_vocab = 2 * draft_vocab

    def values(*shape: int) -> np.ndarray:
        return rng.integers(0, 30_000, shape).astype(compute)

    rows = [1] + [top_k] * (steps - 1)
    logits = [random_logits(rng, batch, n, draft_vocab, kind) for n in rows]
    mapping = np.sort(rng.permutation(target_vocab)[:draft_vocab]).astype(np.int32)
    committed = rng.integers(0, max(1, keys - 8), batch).astype(np.int32)
    offsets = rng.integers(-5, 9, batch).astype(np.int32)
    rotary = rng.normal(size=(max(keys, 40), rotary_size)).astype(np.float32)
    return Drafting(
        logits=logits,
        expansion=Expansion(mapping, np.zeros(0, np.uint8)),
        committed=committed,
        tables=ModelTables(values(target_vocab, embedding_size), rotary, offsets),
        hidden=[values(batch, n, hidden_size) for n in rows],
        candidates=Candidates(
            np.full((batch, count), -9, np.int32),
            np.full((batch, count), -9, np.float32),
            np.full((batch, count), -9, np.int32),
            np.full((batch, max(1, steps - 1), top_k), -1, np.int32),
            np.full((batch, 1), -9, np.int32),
        ),
        keys=keys,
        width=width or top_k,
    )


def random_block(
    rng: np.random.Generator, drafting: Drafting, rows: int, kind: str = "ordinary", strange: bool = True
) -> np.ndarray:
    """Logits [B, rows, U] of the places of a block, the first the root's; those of `drafting` become what they say
    behind every node. Its frontiers, for a static tree, are random ones, some `strange`: of other levels, or idle."""
    top_k, vocabulary = drafting.top_k, drafting.logits[0].shape[2]
    logits = random_logits(rng, drafting.batch, rows, vocabulary, kind)
    for place, own in enumerate(drafting.logits):
        own[...] = logits[:, place + 1 : place + 2]
    count = candidate_count(drafting.steps, top_k)
    for level in range(1, drafting.steps):
        row = rng.integers(level_start(level, top_k), level_start(level + 1, top_k), (drafting.batch, top_k))
        others = rng.integers(-2, count + 3, row.shape)
        drafting.candidates.frontiers[:, level - 1] = np.where(strange & (rng.random(row.shape) < 0.2), others, row)
    return logits


def random_logits(rng: np.random.Generator, batch: int, rows: int, vocab: int, kind: str) -> np.ndarray:
    """[batch, rows, vocab] float32: "ordinary", "ties" (few different values), "equal", or "awkward" (NaN, +-inf)."""
    logits = rng.normal(0, 3, (batch, rows, vocab))
    if kind == "ties":
        logits = np.round(logits / 3)
    elif kind == "equal":
        logits[...] = rng.choice([-0.0, 2.5])
    elif kind == "awkward":
        flat = logits.reshape(-1, vocab)
        choice = rng.integers(0, 6, len(flat))
        flat[(choice == 1)[:, None] & (rng.random(flat.shape) < 0.7)] = -np.inf
        flat[(choice == 2)[:, None] & (rng.random(flat.shape) < 0.5)] = np.nan
        flat[choice == 3] = -np.inf
        flat[choice == 3, ::2] = np.nan
        flat[choice == 4, rng.integers(vocab)] = np.inf
        flat[choice == 5, 0] = 3e38
        flat[choice == 5, -1] = -3e38
    return logits.astype(np.float32)
