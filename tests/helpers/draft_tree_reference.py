"""The draft tree by plain recursion in Python, which the tests compare the kernels with, and random cases for both."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edgellm.kernels.draft_tree_interface import candidate_count, level_start


def best(scored: list[tuple[float, int]], count: int) -> list[int]:
    """Indices of the `count` highest scores, best first, the lower index first among equals; none of -inf or NaN."""
    existing = [(score, index) for score, index in scored if score > -np.inf]
    return [index for _, index in sorted(existing, key=lambda pair: (-pair[0], pair[1]))[:count]]


def round_to_float32(value: float) -> float:
    """Also what overflows there: to infinity."""
    with np.errstate(over="ignore"):
        return float(np.float32(value))


def expand(
    row: np.ndarray, draft_to_target: np.ndarray, parent_score: float, top_k: int, score: bool = True
) -> list[tuple[int, float]]:
    """(token, score) of a node's children, summed in float64 (0 without `score`); the missing ones are (-1, -inf)."""
    values = [-np.inf if np.isnan(value) else float(value) for value in row]
    maximum = max(values)
    children = []
    if maximum > -np.inf and parent_score > -np.inf:
        differences = [0.0 if value == maximum else round_to_float32(value - maximum) for value in values]
        log_sum = float(np.log(np.sum(np.exp(differences))))
        for index in best(list(zip(values, range(len(values)), strict=True)), top_k):
            total = round_to_float32(parent_score + differences[index] - log_sum) if score else 0.0
            if values[index] > -np.inf < total:
                children.append((int(draft_to_target[index]), total))
    return children + [(-1, -np.inf)] * (top_k - len(children))


def select_frontier(scores: np.ndarray, level: int, top_k: int) -> list[int]:
    """The level's best candidates, -1 behind."""
    start, end = level_start(level, top_k), level_start(level + 1, top_k)
    chosen = best([(float(scores[i]), i) for i in range(start, end)], top_k)
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
    place = {candidate: i + 1 for i, candidate in enumerate(selected) if 0 <= candidate < len(tokens)}

    def path(candidate: int) -> list[int] | None:
        if candidate == -1:
            return [0]
        if candidate not in place or tokens[candidate] < 0 or parents[candidate] >= candidate:
            return None
        above = path(int(parents[candidate]))
        return None if above is None else [*above, place[candidate]]

    nodes: list[tuple] = [(root, -1, 0, [0])]
    for i in range(1, size):
        way = path(selected[i - 1]) if i <= len(selected) and selected[i - 1] in place else None
        if way is None:
            nodes.append((-1, -1, 0, [i]))
        else:
            nodes.append((int(tokens[selected[i - 1]]), way[-2], len(way) - 1, way))
    return nodes


def rotary_row(table: np.ndarray, position: int) -> np.ndarray:
    return table[min(max(position, 0), len(table) - 1)]


def mask_row(keys: int, committed: int, rows: set[int] | list[int]) -> list[bool]:
    return [key < committed or key - committed in rows for key in range(keys)]


@dataclass
class Drafting:
    """Arrays of a drafting round with B sequences, filled level by level as the runtime does it."""

    logits: list[np.ndarray]  # of each level, [B, 1 or K, Vd]
    draft_to_target: np.ndarray
    committed: np.ndarray
    position_offsets: np.ndarray
    rotary_table: np.ndarray
    embedding: np.ndarray
    hidden: list[np.ndarray]  # of each level, [B, 1 or K, G]
    frontiers: np.ndarray
    candidate_tokens: np.ndarray
    candidate_scores: np.ndarray
    candidate_parents: np.ndarray
    keys: int

    @property
    def batch(self) -> int:
        return self.frontiers.shape[0]

    @property
    def top_k(self) -> int:
        return self.frontiers.shape[2]

    @property
    def steps(self) -> int:
        return len(self.logits)

    def candidates(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.candidate_tokens, self.candidate_scores, self.candidate_parents

    def proposal_outputs(self) -> tuple[np.ndarray, ...]:
        """Unwritten arrays for `prepare_proposal`: inputs_embeds to attention_mask."""
        batch, top_k = self.batch, self.top_k
        compute = self.embedding.dtype
        return (
            np.ones((batch, top_k, self.embedding.shape[1]), compute),
            np.ones((batch, top_k, self.hidden[0].shape[2]), compute),
            np.full(batch, -9, np.int32),
            np.ones((batch, top_k, self.rotary_table.shape[1]), compute),
            np.ones((batch, 1, top_k, self.keys), bool),
        )

    def verification_outputs(self, tree_size: int, tokens: int) -> tuple[np.ndarray, ...]:
        """Unwritten arrays for `prepare_verification`: selected to attention_mask."""
        batch, compute = self.batch, self.embedding.dtype
        integers = [np.full((batch, tokens), -9, np.int32) for _ in range(4)]
        return (
            np.full((batch, tree_size - 1), -9, np.int32),
            *integers[:3],
            np.ones((batch, tokens, tokens), bool),
            integers[3],
            np.ones((batch, tokens, self.embedding.shape[1]), compute),
            np.ones((batch, tokens, self.rotary_table.shape[1]), compute),
            np.ones((batch, 1, tokens, self.keys), bool),
        )


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
) -> Drafting:
    """A round with logits of a `kind`; `sizes` are those of embeddings, hidden states and rotary rows."""
    embedding_size, hidden_size, rotary_size = sizes
    count = candidate_count(steps, top_k)
    target_vocab = 2 * draft_vocab

    def values(*shape: int) -> np.ndarray:
        return rng.integers(0, 30_000, shape).astype(compute)

    rows = [1] + [top_k] * (steps - 1)
    return Drafting(
        logits=[random_logits(rng, batch, n, draft_vocab, kind) for n in rows],
        draft_to_target=np.sort(rng.permutation(target_vocab)[:draft_vocab]).astype(np.int32),
        committed=rng.integers(0, max(1, keys - 8), batch).astype(np.int32),
        position_offsets=rng.integers(-5, 9, batch).astype(np.int32),
        rotary_table=rng.normal(size=(max(keys, 40), rotary_size)).astype(np.float32),
        embedding=values(target_vocab, embedding_size),
        hidden=[values(batch, n, hidden_size) for n in rows],
        frontiers=np.full((batch, max(1, steps - 1), top_k), -1, np.int32),
        candidate_tokens=np.full((batch, count), -9, np.int32),
        candidate_scores=np.full((batch, count), -9, np.float32),
        candidate_parents=np.full((batch, count), -9, np.int32),
        keys=keys,
    )


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
