"""The contract of the acceptance kernels: `NumpyAcceptance` defines what they compute, `CudaAcceptance` computes it.

They turn the logits of a verified draft tree (`edgellm.kernels.tree.contract.TreeNodes`) into accepted tokens, and
bring caches, features and counters up to date. Arrays are C-contiguous; B sequences (slots), T nodes of the tree (root
and padding included), V target vocabulary, U draft vocabulary, D drafted tokens of a chain, W most tokens that one
round can emit (depth of the tree + 1), Q rows of pending draft input, F width of a feature, N bytes of workspace. A
slot whose `active` is 1 takes part; every other one is idle.

Every kernel writes into arrays of the caller; none allocates and none synchronizes, so that a CUDA graph can hold them.
A workspace must be zero before its first use, and is fit for the next call afterwards; calls in one stream may share
it, whatever their B, T and V, but `draft_sample` needs one of its own (which need not be zero).

Exactness: both implementations give the same bits everywhere. Probabilities are unsigned 64-bit fixed-point weights
(exp(x - max) times 2^32, rounded down) of the tokens that pass their row's threshold, divided in float32 by their
sum; float arithmetic is confined to operations that IEEE 754 fixes and to `portable_math`. A NaN among logits counts as
-inf; a row of which nothing passes its threshold draws id 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple, Protocol, TypeAlias

from edgellm.kernels.arrays import OwnArray
from edgellm.kernels.contracts import MAXIMUM_ROWS, limited
from edgellm.kernels.sampling.contract import MAXIMUM_SAMPLED_VOCABULARY, SamplingRows, SequenceState
from edgellm.kernels.tree.contract import TreeNodes

#: Largest T, root included.
MAXIMUM_TREE_SIZE = 1024
#: Largest W: a tree 32 deep and the bonus token.
MAXIMUM_ACCEPTED = 33

#: Fourth counter word of Philox, which keeps the random words of one position apart by what they serve.
#: `SamplingKernels.sample` draws a target token with 0.
TARGET_STREAM, DRAFT_STREAM, TEST_STREAM, RESIDUAL_STREAM = 0, 1, 2, 3


#: A number for each token of the vocabulary at each node, one for each node, one for each slot, and bytes.
NodeRows: TypeAlias = Annotated[OwnArray, "BTV float32"]
OfNodes: TypeAlias = Annotated[OwnArray, "BT int32"]
OfSlots: TypeAlias = Annotated[OwnArray, "B int32"]
Workspace: TypeAlias = Annotated[OwnArray, "N uint8"]


class NodeLogits(NamedTuple):
    """The base's logits at each node, the threshold of each row, and the token that plain decoding draws there."""

    logits: NodeRows
    thresholds: Annotated[OwnArray, "BT float32"]
    drawn: OfNodes


class Chain(NamedTuple):
    """Chains drawn from the draft: target ids, the distributions q that they were drawn from, and both vocabularies.

    `target_to_draft` is the inverse of `draft_to_target` (which must name no target twice), -1 where the draft has no
    such token.
    """

    tokens: Annotated[OwnArray, "BD int32"]
    probabilities: Annotated[OwnArray, "BDU float32"]
    draft_to_target: Annotated[OwnArray, "U int32"]
    target_to_draft: Annotated[OwnArray, "V int32"]


class Accepted(NamedTuple):
    """What acceptance writes of a slot, n being the number of tokens that it emits.

    `indices`: the nodes on the accepted path, 0 (the root) first, ascending; -1 from n on. `ids`: the accepted drafts,
    then the token drawn after the last of them (the bonus); -1 from n on. `lengths`: n >= 1; 0 in an idle slot, where
    the others are -1.
    """

    indices: Annotated[OwnArray, "BW int32"]
    ids: Annotated[OwnArray, "BW int32"]
    lengths: OfSlots


class Pending(NamedTuple):
    """What the draft has not seen yet of each slot: features and tokens, `counts` how many of them.

    `start` counts the draft's committed rows, where they belong; `last` is the index of the last of them.
    """

    features: Annotated[OwnArray, "BQF compute"]
    token_ids: Annotated[OwnArray, "BQ int32"]
    counts: OfSlots
    start: OfSlots
    last: Annotated[OwnArray, "B1 int32"]


class TypicalBounds(NamedTuple):
    """Typical acceptance takes a token x whose p(x) > min(epsilon, delta * exp(-H(p)))."""

    epsilon: float
    delta: float


def _check_limits(sizes: dict[str, Any]) -> str | None:
    for axis, maximum in (("T", MAXIMUM_TREE_SIZE), ("W", MAXIMUM_ACCEPTED), ("B", MAXIMUM_ROWS)):
        if sizes.get(axis, 0) > maximum:
            return f"{axis} = {sizes[axis]}; expected at most {maximum}"
    nodes = sizes["B"] * sizes.get("T", 1)
    if nodes > MAXIMUM_ROWS:
        return f"B * T = {nodes}; expected at most {MAXIMUM_ROWS}"
    if sizes.get("S", sizes["B"]) != sizes["B"]:
        return f"settings of {sizes['S']} slots; expected B = {sizes['B']}"
    if "Q" in sizes and sizes["Q"] < sizes.get("W", 1):
        return f"{sizes['Q']} pending rows (Q); expected at least W = {sizes['W']}, the most tokens of a round"
    return None


def _check_sampled(sizes: dict[str, Any]) -> str | None:
    largest = max(sizes.get("V", 0), sizes.get("U", 0))
    if largest > MAXIMUM_SAMPLED_VOCABULARY:
        return f"a vocabulary of {largest}; expected at most {MAXIMUM_SAMPLED_VOCABULARY}"
    return _check_limits(sizes)


def _check_typical(sizes: dict[str, Any]) -> str | None:
    epsilon, delta = sizes["bounds.epsilon"], sizes["bounds.delta"]
    if not (epsilon > 0 and delta > 0):  # NaN is no bound
        return f"epsilon is {epsilon}, delta {delta}; expected both above 0"
    return _check_sampled(sizes)


def _check_step(sizes: dict[str, Any]) -> str | None:
    if not 0 <= sizes["step"] < sizes["D"]:
        return f"step is {sizes['step']}; expected 0 to {sizes['D'] - 1}, as chain.tokens has room for"
    return _check_sampled(sizes)


def _check_caches(sizes: dict[str, Any]) -> str | None:
    if sizes["S"] < sizes["B"]:
        return f"caches hold {sizes['S']} slots; expected at least B = {sizes['B']}"
    return _check_limits({axis: size for axis, size in sizes.items() if axis != "S"})


def _check_emitted(sizes: dict[str, Any]) -> str | None:
    if sizes["N"] != sizes["W"] + 1:
        return f"emitted has {sizes['N']} columns; expected W + 1 = {sizes['W'] + 1}: length and tokens"
    return _check_limits(sizes)


class AcceptanceKernels(Protocol):
    """One implementation of all acceptance kernels."""

    @limited(_check_limits)
    def process_tree_logits(
        self,
        logits: NodeRows,
        token_counts: Annotated[OwnArray, "BV int32"],
        tree: TreeNodes,
        rows: SamplingRows,
        processed: NodeRows,
    ) -> None:
        """`SamplingKernels.process_logits` of every node: `logits` to `processed` (may be the same array).

        `token_counts` are those before the round, the root counted; a node's counts are these, raised by one for each
        node on the path from the root (excluded) to it (included) that carries the token. So a node's row has the bits
        that plain decoding gives after the same tokens.
        """

    def accept_workspace_size(self, batch: int, tree_size: int) -> int:
        """Bytes of the workspace of every kernel but `draft_sample`; may be 0."""

    @limited(_check_limits)
    def eagle_accept(
        self, logits: NodeRows, tree: TreeNodes, active: OfSlots, accepted: Accepted, workspace: Workspace
    ) -> None:
        """Greedy acceptance: `accept_drawn` with the argmax (lowest id of equals) of each row of `logits`."""

    @limited(_check_limits)
    def accept_drawn(self, drawn: OfNodes, tree: TreeNodes, active: OfSlots, accepted: Accepted) -> None:
        """Follow `drawn`, the token that plain decoding draws at each node, from the root of each tree.

        At a node go to the child, of depth one more, whose token equals the drawn one (the lowest index of several);
        where there is none, or W tokens are reached, the drawn token is the bonus and the walk ends.
        """

    @limited(_check_limits)
    def draw_nodes(self, nodes: NodeLogits, tree: TreeNodes, state: SequenceState, rows: SamplingRows) -> None:
        """What plain decoding draws at every node: `process_tree_logits` in place, `SamplingKernels.filter_threshold`,
        then `SamplingKernels.sample` at the tree's `draw_positions`."""

    @limited(_check_typical)
    def typical_accept(
        self,
        nodes: NodeLogits,
        tree: TreeNodes,
        active: OfSlots,
        rows: SamplingRows,
        bounds: TypicalBounds,
        accepted: Accepted,
        workspace: Workspace,
    ) -> None:
        """Typical acceptance (Hewitt et al. 2022; Cai et al. 2024): lossy, the emitted distribution is not the base's.

        `nodes` are those that `draw_nodes` leaves. A child of token x is accepted by the `bounds`, where p is the
        softmax of its parent's row restricted to values >= its threshold, and H its entropy in nats. The path to the
        deepest node that is accepted with all its ancestors is taken, the lowest index of equally deep ones, at most
        W - 1 long; the bonus is `drawn` at its end. Slots of temperature 0 follow `accept_drawn` instead: their p has
        one token.
        """

    def draft_workspace_size(self, batch: int, draft_vocabulary: int) -> int:
        """Bytes of workspace that `draft_sample` needs."""

    @limited(_check_step)
    def draft_sample(
        self,
        step: int,
        logits: Annotated[OwnArray, "BU float32"],
        rows: SamplingRows,
        positions: OfSlots,
        chain: Chain,
        workspace: Workspace,
    ) -> None:
        """Draw token `step` (0..D-1) of a sampled chain from the draft's distribution q, and keep q.

        q is the softmax of `logits` over the temperature, after top-k, top-p and min-p (as
        `SamplingKernels.filter_threshold` takes them), the very distribution drawn from: the chain's `probabilities`
        get it at row `step`, and its `tokens` the drawn one's target id. Gumbel-max on log q with the words of (seed,
        sequence, positions[b] + step) of `DRAFT_STREAM`. `positions` are those of the token drawn next, as for target
        draws. At temperature 0 the token is the argmax and q is 1 there.
        """

    @limited(_check_sampled)
    def accept_sampled_chain(
        self,
        nodes: NodeLogits,
        tree: TreeNodes,
        active: OfSlots,
        rows: SamplingRows,
        chain: Chain,
        accepted: Accepted,
        workspace: Workspace,
    ) -> None:
        """Speculative sampling (Leviathan et al. 2023; Chen et al. 2023) of a chain: what is emitted has p's law.

        The tree's tokens are the chain: node t carries the token that `draft_sample` drew at step t - 1 from q, row
        t - 1 of the chain's probabilities; the chain ends before the first -1, after node D, or where W tokens are
        reached. p is the softmax of the previous node's row of processed logits restricted to values >= its threshold.

        A drafted x is accepted if u * q(x) <= p(x), p(x) > 0, u from word 0 of `TEST_STREAM`. At the first rejection
        the last token is drawn from max(p - q, 0) by Gumbel-max with `RESIDUAL_STREAM` (from p, if rounding leaves
        nothing of it); after the last node from p, as `SamplingKernels.sample` does. Words are those of (seed,
        sequence, draw position of the previous node). Slots of temperature 0 accept the argmax of p alone and emit it.
        """

    @limited(_check_limits)
    def accept_draws(
        self, nodes: NodeLogits, tree: TreeNodes, state: SequenceState, rows: SamplingRows, accepted: Accepted
    ) -> None:
        """Acceptance of deterministic children from the logits on: `draw_nodes`, then `accept_drawn`.

        `nodes` are left with what these computed, in NumPy only of the nodes that were visited.
        """

    @limited(_check_sampled)
    def accept_sampled_draws(
        self,
        nodes: NodeLogits,
        tree: TreeNodes,
        state: SequenceState,
        rows: SamplingRows,
        chain: Chain,
        accepted: Accepted,
        workspace: Workspace,
    ) -> None:
        """Acceptance of sampled chains from the logits on: process and filter every node, then `accept_sampled_chain`.

        Logits and thresholds are left with what these computed, in NumPy only of the nodes that were visited.
        """

    @limited(_check_caches)
    def move_accepted(
        self,
        caches: Annotated[Sequence[OwnArray], "SHRC any"],
        kvcache_start_index: OfSlots,
        accepted: Accepted,
        hidden_states: Annotated[OwnArray, "BTF compute"],
        pending: Pending,
        wraps: bool,
    ) -> None:
        """Move the accepted rows of every cache, and their features, to consecutive places, before lengths advance.

        In each of `caches` (keys and values of all layers, and their scales: alike but for dtype and C) row
        kvcache_start_index[b] + indices[b, i] of slot b goes to row kvcache_start_index[b] + i, i = 0..n-1. Indices
        must ascend, as acceptance writes them; rows outside the cache are left out, or if it `wraps` are these
        rows modulo R, of which a tree has each once. Pending feature i becomes row
        indices[b, i] of `hidden_states`; others keep what they hold.
        """

    @limited(_check_emitted)
    def advance_accepted(
        self, accepted: Accepted, state: SequenceState, pending: Pending, emitted: Annotated[OwnArray, "BN int32"]
    ) -> None:
        """Take the n accepted tokens of each active slot into its state.

        Sets token_ids to the last one, adds n to kvcache_start_index and positions, adds 1 to token_counts for each
        token, and leaves the tokens as the draft's pending input: token_ids = ids, then -1; counts = n; start = the new
        kvcache_start_index - n; last = n - 1. `emitted` [B, W+1] = (n, ids). Idle slots keep their state and emit
        (0, -1, ...).
        """

    @limited(_check_limits)
    def append_pending(
        self, hidden_states: Annotated[OwnArray, "B1F compute"], tokens: OfSlots, state: SequenceState, pending: Pending
    ) -> None:
        """After a plain step of active slots: its feature and its token join what the draft has not yet seen.

        With n = counts[b]: feature n = `hidden_states`, token n = `tokens`, counts = n + 1, last = n, start =
        kvcache_start_index[b] - n - 1, where kvcache_start_index is that after the step. A full slot (n >= Q) is left
        as it is: give the draft its input before that.
        """
