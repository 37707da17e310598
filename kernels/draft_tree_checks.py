"""Argument checks that `NumpyDraftTree` and `CudaDraftTree` share: signatures, and what the sizes must satisfy."""

from __future__ import annotations

from edgellm.kernels.checks import SIGNATURES
from edgellm.kernels.draft_tree_interface import (
    MAXIMUM_DRAFT_VOCABULARY,
    MAXIMUM_STEPS,
    MAXIMUM_TOP_K,
    MAXIMUM_TREE_TOKENS,
    candidate_count,
)
from edgellm.kernels.errors import KernelError

# n rows of the draft model's output (1 at level 1, else K), F frontiers, C candidates, S = V - 1 selected nodes, G the
# draft model's hidden size, N bytes of workspace.
SIGNATURES["expand_frontier"] = (
    ("logits", "BnV", "float32"),
    ("draft_to_target", "V", "int32"),
    ("frontiers", "BFK", "int32"),
    ("candidate_tokens", "BC", "int32"),
    ("candidate_scores", "BC", "float32"),
    ("candidate_parents", "BC", "int32"),
    ("workspace", "N", "uint8"),
)
SIGNATURES["prepare_proposal"] = (
    ("committed", "B", "int32"),
    ("position_offsets", "B", "int32"),
    ("rotary_table", "PR", "float32"),
    ("embedding", "VH", "compute"),
    ("hidden_in", "BnG", "compute"),
    ("candidate_tokens", "BC", "int32"),
    ("candidate_scores", "BC", "float32"),
    ("candidate_parents", "BC", "int32"),
    ("frontiers", "BFK", "int32"),
    ("inputs_embeds", "BKH", "compute"),
    ("hidden_out", "BKG", "compute"),
    ("kvcache_start_index", "B", "int32"),
    ("rope_rotary_cos_sin", "BKR", "compute"),
    ("attention_mask", "B1KL", "bool"),
)
SIGNATURES["prepare_verification"] = (
    ("token_ids", "B1", "int32"),
    ("positions", "B", "int32"),
    ("committed", "B", "int32"),
    ("position_offsets", "B", "int32"),
    ("rotary_table", "PR", "float32"),
    ("embedding", "VH", "compute"),
    ("candidate_tokens", "BC", "int32"),
    ("candidate_scores", "BC", "float32"),
    ("candidate_parents", "BC", "int32"),
    ("frontiers", "BFK", "int32"),
    ("selected", "BS", "int32"),
    ("tree_tokens", "BT", "int32"),
    ("tree_parents", "BT", "int32"),
    ("tree_depths", "BT", "int32"),
    ("tree_ancestors", "BTT", "bool"),
    ("draw_positions", "BT", "int32"),
    ("inputs_embeds", "BTH", "compute"),
    ("rope_rotary_cos_sin", "BTR", "compute"),
    ("attention_mask", "B1TL", "bool"),
)
SIGNATURES["expansion"] = (("draft_to_target", "V", "int32"), ("workspace", "N", "uint8"))


def check_expansion(level: int, sizes: dict[str, int], workspace_size: int) -> None:
    """Refuse what `expand_frontier` cannot do at `level` with these sizes of its axes."""
    _check_level("expand_frontier", level, MAXIMUM_STEPS, sizes, "logits")
    if level >= 2:
        _check_frontiers("expand_frontier", level - 1, sizes)
    check_draft_vocabulary(sizes["V"])
    if sizes["N"] < workspace_size:
        raise KernelError(
            f"expand_frontier: workspace has {sizes['N']} bytes; expected at least {workspace_size} "
            "(expand_workspace_size)"
        )


def check_proposal(level: int, sizes: dict[str, int]) -> None:
    """Refuse what `prepare_proposal` cannot do at `level`, which feeds the nodes of that level to the draft model."""
    _check_level("prepare_proposal", level, MAXIMUM_STEPS - 1, sizes, "hidden_in")
    _check_frontiers("prepare_proposal", level, sizes)


def check_verification(candidates: int, sizes: dict[str, int]) -> None:
    """Refuse what `prepare_verification` cannot do."""
    if not 1 <= candidates <= sizes["C"]:
        raise KernelError(
            f"prepare_verification: candidates is {candidates}; expected 1 to C = {sizes['C']}, the size of the arrays"
        )
    if sizes["T"] > MAXIMUM_TREE_TOKENS:
        raise KernelError(
            f"prepare_verification: a tree of T = {sizes['T']} tokens; expected at most {MAXIMUM_TREE_TOKENS}"
        )
    if sizes["S"] + 1 > sizes["T"]:
        raise KernelError(
            f"prepare_verification: the root and {sizes['S']} selected nodes; expected at most T = {sizes['T']} tokens"
        )


def check_top_k(kernel: str, top_k: int) -> None:
    """Refuse a tree that is too wide."""
    if not 1 <= top_k <= MAXIMUM_TOP_K:
        raise KernelError(f"{kernel}: K = {top_k} (draft top-k); expected 1 to {MAXIMUM_TOP_K}")


def check_draft_vocabulary(size: int) -> None:
    """Refuse a draft vocabulary that is too large."""
    if size > MAXIMUM_DRAFT_VOCABULARY:
        raise KernelError(f"expand_frontier: draft vocabulary V = {size}; expected at most {MAXIMUM_DRAFT_VOCABULARY}")


def _check_level(kernel: str, level: int, highest: int, sizes: dict[str, int], rows: str) -> None:
    top_k = sizes["K"]
    check_top_k(kernel, top_k)
    if not 1 <= level <= highest:
        raise KernelError(f"{kernel}: level {level}; expected 1 to {highest}")
    expected = 1 if level == 1 else top_k
    if sizes["n"] != expected:
        raise KernelError(
            f"{kernel}: {rows} has {sizes['n']} rows a sequence; expected {expected} at level {level} with K = {top_k}"
        )
    needed = candidate_count(level, top_k)
    if sizes["C"] < needed:
        raise KernelError(
            f"{kernel}: C = {sizes['C']} candidates; expected at least {needed} for level {level} with K = {top_k}"
        )


def _check_frontiers(kernel: str, level: int, sizes: dict[str, int]) -> None:
    if sizes["F"] < level:
        raise KernelError(f"{kernel}: frontiers has F = {sizes['F']} levels; expected at least {level}")
