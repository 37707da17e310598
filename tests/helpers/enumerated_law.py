"""Requests whose emitted tokens have a known law: a base of five tokens, enumerated, and rounds of the real kernels.

The base and the draft are tables: the next token depends on the last one, and on the counts where there are penalties.
Rules, too, go by the last token: a mask of what may follow it, and a bias; the law is then that of the masked base. A
slot is one request with its own sequence number.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
from kernel_bundles import accepted_arrays, sampling_rows, sequence_state, tree_nodes

from edgellm.kernels.acceptance.contract import TARGET_STREAM, Accepted, Chain, NodeLogits, Pending
from edgellm.kernels.acceptance.distribution import Draws
from edgellm.kernels.acceptance.twin import NumpyAcceptance
from edgellm.kernels.sampling.record import records
from edgellm.kernels.sampling.twin import NumpySampling
from edgellm.kernels.tree.contract import TreeNodes

VOCABULARY, EMITTED, FIRST_TOKEN = 5, 3, 2
DRAFT_IDS = np.array([4, 0, 1, 3], np.int32)  # target ids of the draft's vocabulary; the draft never says 2
KERNELS, ACCEPTANCE = NumpySampling(), NumpyAcceptance()
NO_WORKSPACE = np.zeros(0, np.uint8)


@dataclass(frozen=True)
class Settings:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    rules: int = 0  # which random ones; 0: none

    def allowed(self) -> np.ndarray:
        """Which token may follow which, bool [V, V]: at least the next higher one."""
        allowed = np.random.default_rng(self.rules).random((VOCABULARY, VOCABULARY)) < (0.4 if self.rules else 1)
        allowed[np.arange(VOCABULARY), (np.arange(VOCABULARY) + 1) % VOCABULARY] = True
        return allowed

    def bias(self) -> np.ndarray:
        """What each token's logit gains, [V] float32."""
        return np.random.default_rng(self.rules).normal(0, 1 if self.rules else 0, VOCABULARY).astype(np.float32)

    def rows(self, count: int, **names: np.ndarray) -> np.ndarray:
        """The settings of `count` slots, whose draws have `names`."""
        penalties = {f"{name}_penalty": getattr(self, name) for name in ("repetition", "presence", "frequency")}
        filters = {name: getattr(self, name) for name in ("temperature", "top_k", "top_p", "min_p")}
        return sampling_rows(count, **penalties, **filters, **names, biased=self.rules > 0)


SETTINGS = {
    "plain": Settings(),
    "top-k": Settings(top_k=3, temperature=1.4),
    "top-p": Settings(top_p=0.8, temperature=0.8),
    "penalties": Settings(repetition=1.5, presence=0.4, frequency=0.6, temperature=1.2),
    "all": Settings(0.9, 4, 0.9, 0.05, 1.3, 0.2, 0.3),
    "masked": Settings(rules=1),
    "all, masked": Settings(0.9, 2, 0.9, 0.05, 1.3, 0.2, 0.3, rules=2),
}


@dataclass(frozen=True)
class Tables:
    """Logits of the base [V, V] and of the draft [V, U], by the last token."""

    base: np.ndarray
    draft: np.ndarray


def softmax(values: np.ndarray) -> np.ndarray:
    weights = np.exp(values - values.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def base_distribution(tables: Tables, last: int, counts: np.ndarray, settings: Settings) -> np.ndarray:
    """The distribution that plain decoding draws from, read off the definitions in float64."""
    values = np.where(settings.allowed()[last], tables.base[last].astype(float) + settings.bias(), -np.inf)
    seen = counts > 0
    values[seen] = np.where(values > 0, values / settings.repetition, values * settings.repetition)[seen]
    values = values - settings.presence * seen - settings.frequency * counts
    values = values / settings.temperature
    kept = np.ones(values.size, bool)
    if settings.top_k:
        kept &= values >= np.sort(values)[-settings.top_k]
    if settings.top_p < 1:
        p = softmax(np.where(kept, values, -np.inf))
        order = np.argsort(-p)
        count = int(np.searchsorted(p[order].cumsum(), settings.top_p)) + 1
        kept &= values >= values[order[count - 1]]
    kept &= np.exp(values - values.max()) >= settings.min_p
    return softmax(np.where(kept, values, -np.inf))


def enumerated(tables: Tables, settings: Settings) -> np.ndarray:
    """Probability of every sequence of emitted tokens, [V ** EMITTED]."""
    probabilities = []
    for sequence in itertools.product(range(VOCABULARY), repeat=EMITTED):
        counts = np.zeros(VOCABULARY, int)
        counts[FIRST_TOKEN] = 1
        last, probability = FIRST_TOKEN, 1.0
        for token in sequence:
            probability *= base_distribution(tables, last, counts, settings)[token]
            counts[token] += 1
            last = token
        probabilities.append(probability)
    return np.array(probabilities)


def fits(tokens: np.ndarray, expected: np.ndarray) -> bool:
    """Chi-square: whether sequences [slots, EMITTED] could come from `expected`; refuses a true law 3 times in 10^5."""
    cells = np.ravel_multi_index(tuple(tokens.T), (VOCABULARY,) * EMITTED)
    observed = np.bincount(cells, minlength=expected.size)
    if observed[expected < 1e-12].any():
        return False
    counts = expected * len(tokens)
    frequent = counts >= 5
    pairs = np.array([observed[frequent], counts[frequent]])
    if counts[~frequent].sum() >= 5:
        pairs = np.append(pairs, [[observed[~frequent].sum()], [counts[~frequent].sum()]], axis=1)
    statistic = ((pairs[0] - pairs[1]) ** 2 / pairs[1]).sum()
    degrees = pairs.shape[1] - 1
    spread = 2 / (9 * degrees)
    return statistic <= degrees * (1 - spread + 4 * math.sqrt(spread)) ** 3  # Wilson and Hilferty's quantile


class Slots:
    """The state of many requests that run side by side."""

    def __init__(self, count: int, settings: Settings, most: int) -> None:
        self.count, self.most = count, most
        names = {"seed": np.full(count, 2**40 + 17, np.uint64), "sequence": np.arange(count)}
        self.rules, self.settings = settings, settings.rows(count, **names)
        self.start = np.full(count, 6, np.int32)
        counts = np.zeros((count, VOCABULARY), np.int32)
        counts[:, FIRST_TOKEN] = 1
        self.state = sequence_state(
            count,
            token_ids=np.full((count, 1), FIRST_TOKEN, np.int32),
            kvcache_start_index=self.start,
            positions=self.start + np.int32(1),
            token_counts=counts,
        )
        self.last, self.positions, self.counts = self.state.token_ids, self.state.positions, counts
        self.tokens = np.full((count, EMITTED + most), -1, np.int32)
        self.filled = np.zeros(count, np.int64)
        self.rounds = 0

    def unfinished(self) -> bool:
        return bool((self.filled < EMITTED).any())

    def logits(self, tables: Tables, tokens: np.ndarray) -> np.ndarray:
        """The base's after each of `tokens` [B, T], masked and biased: [B, T, V]."""
        logits = tables.base[tokens]
        if not self.rules.rules:
            return logits
        masks = (self.rules.allowed() << np.arange(VOCABULARY)).sum(axis=1, keepdims=True).astype(np.uint32)
        bias = np.tile(self.rules.bias(), (self.count, 1))
        KERNELS.constrain_logits(logits.reshape(-1, VOCABULARY), tokens.reshape(-1), masks, bias, self.settings)
        return logits

    def processed(self, tables: Tables, tree: TreeNodes) -> tuple:
        """Logits [B, T, V] after masks, biases, penalties and temperature, and their thresholds [B, T]."""
        logits = self.logits(tables, tree.tokens)
        rows, values = tree.tokens.shape[1], np.empty_like(logits)
        ACCEPTANCE.process_tree_logits(logits, self.counts, tree, self.settings, values)
        # all slots have the same settings, so few rows differ
        distinct, which = np.unique(values.reshape(-1, VOCABULARY), axis=0, return_inverse=True)
        thresholds = np.empty(len(distinct), np.float32)
        KERNELS.filter_threshold(distinct, self.settings[:1], thresholds)
        return values, thresholds[which].reshape(self.count, rows)

    def drawn(self, values: np.ndarray, thresholds: np.ndarray, draw_positions: np.ndarray) -> np.ndarray:
        """The token that plain decoding draws at every node, [B, T]: `SamplingKernels.sample`, of all rows at once."""
        rows = thresholds.shape[1]
        greedy = records(self.settings)["temperature"].repeat(rows) == 0
        values = values.reshape(-1, VOCABULARY)
        if greedy.any():
            return values.argmax(axis=1).astype(np.int32).reshape(self.count, rows)
        draws = Draws(records(self.settings).repeat(rows), draw_positions.reshape(-1), TARGET_STREAM)
        tokens = draws.by_score(values, values >= thresholds.reshape(-1, 1))
        return tokens.reshape(self.count, rows)

    def accepted(self) -> Accepted:
        return accepted_arrays(self.count, self.most)

    def advance(self, accepted: Accepted) -> None:
        self.rounds += 1
        features, ids = np.zeros((self.count, self.most, 1), np.float32), np.zeros((self.count, self.most), np.int32)
        counts, start = np.zeros(self.count, np.int32), np.zeros(self.count, np.int32)
        pending = Pending(features, ids, counts, start, np.zeros((self.count, 1), np.int32))
        emitted = np.empty((self.count, self.most + 1), np.int32)
        ACCEPTANCE.advance_accepted(accepted, self.state, pending, emitted)
        for place in range(self.most):
            takes = (place < emitted[:, 0]) & (self.filled < EMITTED)
            self.tokens[takes, self.filled[takes]] = emitted[takes, place + 1]
            self.filled[takes] += 1


def plain_tokens(tables: Tables, settings: Settings, count: int) -> np.ndarray:
    """What plain decoding emits: `SamplingKernels` alone, no tree, no acceptance."""
    slots = Slots(count, settings, 1)
    rows = slots.settings
    for place in range(EMITTED):
        logits = slots.logits(tables, slots.last)[:, 0]
        values, thresholds = np.empty_like(logits), np.empty(count, np.float32)
        KERNELS.process_logits(logits, slots.counts, rows, values)
        KERNELS.filter_threshold(values, rows, thresholds)
        token = np.empty(count, np.int32)
        KERNELS.sample(values, thresholds, rows, slots.positions, token)
        slots.last[:, 0] = token
        slots.positions += 1
        slots.counts[np.arange(count), token] += 1
        slots.tokens[:, place] = token
    return slots.tokens[:, :EMITTED]


#: Node -> (parent, rank among the draft's best after the parent): a tree of depth 2, one cut at depth 1, a chain.
TREES = {
    "tree": ((-1, 0), (0, 0), (0, 2), (0, 1), (1, 1), (1, 0), (3, 0)),
    "wide": ((-1, 0), (0, 0), (0, 1), (0, 2), (0, 3)),
    "chain": ((-1, 0), (0, 0), (1, 0), (2, 0)),
}


def tree_tokens_emitted(tables: Tables, settings: Settings, kind: str, count: int) -> Slots:
    """Rounds with deterministic children: the draft's best."""
    shape = TREES[kind]
    size = len(shape)
    parents = np.array([parent for parent, _ in shape], np.int32)
    depths, ancestors = np.zeros(size, np.int32), np.eye(size, dtype=bool)
    for node in range(1, size):
        depths[node] = depths[parents[node]] + 1
        ancestors[node] |= ancestors[parents[node]] & (np.arange(size) > 0)
    slots = Slots(count, settings, int(depths.max()) + 1)
    ranked = DRAFT_IDS[np.argsort(-tables.draft, axis=1, kind="stable")]
    repeated = [np.ascontiguousarray(np.broadcast_to(a, (count, *a.shape))) for a in (parents, depths, ancestors)]
    while slots.unfinished():
        tokens = np.empty((count, size), np.int32)
        tokens[:, 0] = slots.last[:, 0]
        for node in range(1, size):
            parent, rank = shape[node]
            tokens[:, node] = ranked[tokens[:, parent], rank]
        tree = TreeNodes(tokens, *repeated, slots.positions[:, None] + depths)
        values, thresholds = slots.processed(tables, tree)
        drawn = slots.drawn(values, thresholds, tree.draw_positions)
        accepted = slots.accepted()
        ACCEPTANCE.accept_drawn(drawn, tree, slots.state.active, accepted)
        slots.advance(accepted)
    return slots


def chain_tokens_emitted(tables: Tables, settings: Settings, draft: Settings, count: int) -> Slots:
    """Rounds with chains sampled from the draft under its own settings."""
    steps = 2
    slots = Slots(count, settings, steps + 1)
    draft_rows = draft.rows(count, seed=records(slots.settings)["seed"], sequence=records(slots.settings)["sequence"])
    target_to_draft = np.full(VOCABULARY, -1, np.int32)
    target_to_draft[DRAFT_IDS] = np.arange(DRAFT_IDS.size)
    ancestors = np.ascontiguousarray(np.broadcast_to(np.tri(steps + 1, dtype=bool), (count, steps + 1, steps + 1)))
    while slots.unfinished():
        drafted, q = np.full((count, steps), -1, np.int32), np.zeros((count, steps, DRAFT_IDS.size), np.float32)
        chain = Chain(drafted, q, DRAFT_IDS, target_to_draft)
        last = slots.last[:, 0]
        for step in range(steps):
            logits = tables.draft[last]
            ACCEPTANCE.draft_sample(step, logits, draft_rows, slots.positions, chain, NO_WORKSPACE)
            last = drafted[:, step]
        tokens = np.concatenate([slots.last, drafted], axis=1)
        draw_positions = slots.positions[:, None] + np.arange(steps + 1, dtype=np.int32)
        tree = tree_nodes(tokens, ancestors=ancestors, draw_positions=draw_positions)
        nodes = NodeLogits(*slots.processed(tables, tree), np.zeros(tokens.shape, np.int32))
        accepted = slots.accepted()
        rows, active = slots.settings, slots.state.active
        ACCEPTANCE.accept_sampled_chain(nodes, tree, active, rows, chain, accepted, NO_WORKSPACE)
        slots.advance(accepted)
    return slots
