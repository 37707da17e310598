"""The contract of the draft tree's kernels: `NumpyTree` defines what they compute, `CudaTree` is the GPU's.

The draft model proposes a tree of tokens level by level, the base model verifies the best of it (EAGLE-2, Li et al.
2024). K is the width (draft top-k) of engines and arrays, D the tree's depth (draft steps), V - 1 = S the number of
verified nodes without the root. A tree may be narrower than K: see `Level`.

**Candidates** are numbered: 0..K-1 at level 1 (children of the root), K + (d-2) K K + slot K + rank at level d >= 2,
where `slot` is the place of the parent in the frontier of level d - 1 and `rank` its place among the parent's K
likeliest continuations. So an index names level and parent, and a child's index is above its parent's.

**Frontiers** [B, F, K], F >= max(1, D - 1): row d - 1 holds the candidates of level d that the draft model extends,
best first; -1 is an idle slot, and so is an index that is no candidate of that level. Propose step d feeds them to the
draft model, which writes their KV rows committed + (d-1) K to committed + d K - 1.

**Scores** are the sum of the log-probabilities on the path from the root. A candidate with score -inf does not exist:
its token is -1, its parent -1.

Arrays are C-contiguous: B sequences, C >= `candidate_count` candidates, U draft vocabulary, n rows of the draft model's
output (1 at level 1, else K; of a block, its guesses), G the draft's hidden size, T tokens; other axes as in
`edgellm.kernels.sampling.contract`. A NaN counts as -inf. Every kernel writes into arrays of the caller; none allocates
and none synchronizes, so that a CUDA graph can hold them. Both implementations give the same bits.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple, Protocol

from edgellm.kernels.arrays import OwnArray
from edgellm.kernels.contracts import MAXIMUM_ROWS, limited
from edgellm.kernels.sampling.contract import ModelTables, SequenceState, StepInputs

#: The largest K, D, T and draft vocabulary that the kernels take.
MAXIMUM_TOP_K = 64
MAXIMUM_STEPS = 32
MAXIMUM_TREE_TOKENS = 1024
MAXIMUM_DRAFT_VOCABULARY = 1 << 18


def level_start(level: int, top_k: int) -> int:
    """Index of the first candidate of `level` (from 1 on) in a tree of width `top_k`."""
    return 0 if level == 1 else top_k + (level - 2) * top_k * top_k


def candidate_count(steps: int, top_k: int) -> int:
    """How many candidates the levels 1 to `steps` have together."""
    return level_start(steps + 1, top_k)


class Level(NamedTuple):
    """A level of the tree, from 1 on.

    Of a tree narrower than K only the `width` likeliest continuations of each node exist, and only the `width` best
    candidates of a level go on: the tree is the one that arrays of that width give. A `dynamic` tree chooses by scores;
    a static one has log-probabilities of 0, and its frontiers and selection are the caller's.
    """

    number: int
    width: int
    dynamic: bool


class Candidates(NamedTuple):
    """The candidates of all levels, those that go on, and those that are verified: ascending, -1 behind."""

    tokens: Annotated[OwnArray, "BC int32"]
    scores: Annotated[OwnArray, "BC float32"]
    parents: Annotated[OwnArray, "BC int32"]
    frontiers: Annotated[OwnArray, "BFK int32"]
    selected: Annotated[OwnArray, "BS int32"]


class Block(NamedTuple):
    """What stands behind the last token of a sequence in the block that a draft model fills in one pass, and whether
    each of its tokens sees those behind it, too."""

    mask_token: int
    sees_all: bool


class TreeNodes(NamedTuple):
    """The tree that is verified; node 0 is the root, the last emitted token.

    `tokens`: -1 is padding. `parents`: the parent's place, always a smaller one; -1 of the root and of padding.
    `depths`: 0 of the root and of padding, else the parent's + 1. `ancestors`: True where the column's node is the
    row's or an ancestor of it. `draw_positions`: the random position of the draw at each node.
    """

    tokens: Annotated[OwnArray, "BT int32"]
    parents: Annotated[OwnArray, "BT int32"]
    depths: Annotated[OwnArray, "BT int32"]
    ancestors: Annotated[OwnArray, "BTT bool"]
    draw_positions: Annotated[OwnArray, "BT int32"]


class HiddenRows(NamedTuple):
    """Hidden states that the draft's latest step put out, and those that its next one is fed."""

    put_out: Annotated[OwnArray, "BnG compute"]
    fed: Annotated[OwnArray, "BTG compute"]


class Expansion(NamedTuple):
    """Target ids of the draft's, and the workspace (`expand_workspace_size`) that holds what an expansion leaves to
    do."""

    draft_to_target: Annotated[OwnArray, "U int32"]
    workspace: Annotated[OwnArray, "N uint8"]


def _check_level(sizes: dict[str, Any], highest: int, frontiers: int) -> str | None:
    """What is wrong with a level up to `highest` that needs so many levels of frontiers."""
    level, top_k, width = sizes["level.number"], sizes["K"], sizes["level.width"]
    if not 1 <= top_k <= MAXIMUM_TOP_K:
        return f"K = {top_k} (draft top-k); expected 1 to {MAXIMUM_TOP_K}"
    if not 1 <= width <= top_k:
        return f"a tree of width {width}; expected 1 to K = {top_k}"
    if not 1 <= level <= highest:
        return f"level {level}; expected 1 to {highest}"
    needed = candidate_count(level, top_k)
    if sizes["C"] < needed:
        return f"C = {sizes['C']} candidates; expected at least {needed} for level {level} with K = {top_k}"
    if sizes["F"] < frontiers:
        return f"frontiers has F = {sizes['F']} levels; expected at least {frontiers}"
    if sizes.get("U", 0) > MAXIMUM_DRAFT_VOCABULARY:
        return f"draft vocabulary U = {sizes['U']}; expected at most {MAXIMUM_DRAFT_VOCABULARY}"
    rows = sizes["B"] * sizes.get("n", 1)
    if rows > MAXIMUM_ROWS:
        return f"{rows} rows of all sequences; expected at most {MAXIMUM_ROWS}: use a smaller batch"
    return None


def _check_rows(sizes: dict[str, Any]) -> str | None:
    """What is wrong with the number of rows of a draft model's output behind the frontier of a level."""
    level, top_k = sizes["level.number"], sizes["K"]
    expected = 1 if level == 1 else top_k
    if sizes["n"] != expected:
        return f"{sizes['n']} rows a sequence; expected {expected} at level {level} with K = {top_k}"
    return None


def _check_block_expansion(sizes: dict[str, Any]) -> str | None:
    level, rows = sizes["level.number"], sizes["n"]
    if rows <= level:
        return f"{rows} rows a sequence; expected the root's and one for each of {level} levels"
    return _check_level(sizes, MAXIMUM_STEPS, level - 1)


def _check_proposal(sizes: dict[str, Any]) -> str | None:
    if sizes["T"] != sizes["K"]:
        return f"inputs of T = {sizes['T']} tokens; expected one for each of K = {sizes['K']} frontier slots"
    return _check_level(sizes, MAXIMUM_STEPS - 1, sizes["level.number"]) or _check_rows(sizes)


def _check_verification(sizes: dict[str, Any]) -> str | None:
    if sizes["T"] > MAXIMUM_TREE_TOKENS:
        return f"a tree of T = {sizes['T']} tokens; expected at most {MAXIMUM_TREE_TOKENS}"
    if sizes["S"] + 1 > sizes["T"]:
        return f"the root and {sizes['S']} selected nodes; expected at most T = {sizes['T']} tokens"
    return _check_level(sizes, MAXIMUM_STEPS, sizes["level.number"] - 1)


class TreeKernels(Protocol):
    """One implementation of the draft tree's kernels.

    What `expand_frontier` writes is there once the `prepare_proposal` of the same level, or the `prepare_verification`
    after the last level, has been given the same `Level` and `Expansion`: what remains to be done takes no launch of
    its own. Without an expansion the level's candidates are there, each parent's best first, as drawn ones are.
    """

    def expand_workspace_size(self, batch: int, draft_vocab_size: int, top_k: int, block_rows: int = 0) -> int:
        """Bytes of workspace that `expand_frontier` needs for `batch` sequences, at every level, or `expand_block` for
        `block_rows` rows of each; may be 0."""

    @limited(lambda sizes: _check_level(sizes, MAXIMUM_STEPS, sizes["level.number"] - 1) or _check_rows(sizes))
    def expand_frontier(
        self, level: Level, logits: Annotated[OwnArray, "BnU float32"], candidates: Candidates, expansion: Expansion
    ) -> None:
        """Write the candidates of `level`: the likeliest continuations of the root or of each frontier node.

        `logits` are those of the draft model after the root (level 1) or after the nodes of the frontier of level - 1.
        For each row the K largest logits, the lower draft id first among equals, become entries of `tokens` (through
        `draft_to_target`), `scores` (the parent's score, 0 for the root, plus the log-probability) and `parents` (the
        parent's index, -1 for the root). Entries that do not exist (an idle parent, fewer than K logits above -inf, a
        rank beyond the tree's width) get token -1, score -inf, parent -1.

        The log-probability is (logit - m) - log(s), m the row's maximum, in float32; s is the sum over chunks of
        4,096 ids of the chunk's sum of exp(logit - its maximum), times exp(its maximum - m), all in unsigned 64-bit
        fixed point with 32 bits after the point, rounded down (`edgellm.kernels.tree.log_softmax`). So the order of
        summation does not matter. Where m is +inf, probability 1 is shared by the infinite logits.
        """

    def prepare_block(
        self, block: Block, token_ids: Annotated[OwnArray, "B1 int32"], tables: ModelTables, inputs: StepInputs
    ) -> None:
        """Everything that a draft model reads of a block of T tokens: the sequence's last one, `token_ids`, then the
        block's mask token.

        The tokens stand at rows kvcache_start_index[b] + t, the number of committed ones, which `inputs` have already.
        `inputs_embeds` and `rope_rotary_cos_sin` are as `SamplingKernels.prepare_step` gives them; `attention_mask` is
        True at keys up to the token's own row or, where a block `sees_all`, up to its last.
        """

    @limited(_check_block_expansion)
    def expand_block(
        self, level: Level, logits: Annotated[OwnArray, "BnU float32"], candidates: Candidates, expansion: Expansion
    ) -> None:
        """Write the candidates of all levels up to `level`, whose continuations are the same behind every node: row d
        of `logits` is what a draft model says of the place d behind the root, whatever stands before it; nothing is
        taken from row 0, the root's own.

        They are those of `expand_frontier`, level by level with that row for each node of the frontier. Of a dynamic
        tree the frontiers are written, too, as `prepare_proposal` does. So the best V-1 candidates are those whose
        places' probabilities have the largest product, among K a level.
        """

    @limited(_check_proposal)
    def prepare_proposal(
        self,
        level: Level,
        committed: Annotated[OwnArray, "B int32"],
        tables: ModelTables,
        candidates: Candidates,
        hidden: HiddenRows,
        inputs: StepInputs,
        expansion: Expansion | None,
    ) -> None:
        """Everything that the draft model reads in the propose step of `level`: one token for each frontier slot.

        First a dynamic tree writes row level - 1 of `frontiers`: the level's candidates with the highest scores, best
        first, the lower index first among equals, as many as the tree is wide, -1 where there are no more above -inf.
        The caller put that of a static tree there.

        Slot t of sequence b then gets: `inputs_embeds`, the row of `embedding` that its token names (zeros for an idle
        slot or an unknown id); `fed`, the row of `put_out` of its parent's slot (an idle slot takes row 0);
        `rope_rotary_cos_sin`, row committed[b] + level - 1 + position_offsets[b] of `rotary`, clamped to 0..P-1;
        `attention_mask`, True at keys j < committed[b], at committed[b] + (d-1) K + slot for each ancestor (its level
        d, its frontier slot) and at its own row. `kvcache_start_index` becomes committed + (level-1) K, the first row
        written. `committed` counts the committed KV rows.
        """

    @limited(_check_verification)
    def prepare_verification(
        self,
        level: Level,
        state: SequenceState,
        tables: ModelTables,
        candidates: Candidates,
        tree: TreeNodes,
        inputs: StepInputs,
        expansion: Expansion | None,
    ) -> None:
        """Choose the tree to verify, lay it out as T tokens, and write everything that the base model reads.

        `level` is the last one; deeper candidates are not looked at. First a dynamic tree writes `selected`: the S best
        candidates by score, the lower index first among equals, in ascending order of index; -1 behind them where fewer
        lie above -inf. Scores never rise along a path and a parent's index is lower, so a selected node's parent is
        selected too. Of a static tree the caller's choice is read.

        Token 0 is the root, the state's last token; token i + 1 is candidate selected[b, i]. Draws at a node have the
        position positions[b] + depth; inputs are as in `prepare_proposal`, with rotary rows at kvcache_start_index +
        depth + position_offsets, and masks of keys j < kvcache_start_index and kvcache_start_index + ancestors.

        Padding, a place without a candidate, one whose token is -1, or whose parent is not in the tree, is token -1,
        parent -1, depth 0, its own only ancestor.
        """
