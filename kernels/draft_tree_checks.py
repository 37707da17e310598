"""Argument checks that `NumpyDraftTree` and `CudaDraftTree` share: signatures, and what the sizes must satisfy."""

from __future__ import annotations

from edgellm.kernels.checks import MAXIMUM_ROWS, SIGNATURES
from edgellm.kernels.draft_tree_interface import (
    MAXIMUM_DRAFT_VOCABULARY,
    MAXIMUM_STEPS,
    MAXIMUM_TOP_K,
    MAXIMUM_TREE_TOKENS,
    Expansion,
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


def check_expansion(level: int, sizes: dict[str, int]) -> None:
    """Refuse what `expand_frontier` cannot do at `level` with these sizes of its axes."""
    _check_level("expand_frontier", level, MAXIMUM_STEPS, sizes, "logits")
    _check_frontiers("expand_frontier", level - 1, sizes)
    check_draft_vocabulary("expand_frontier", sizes["V"])


def check_workspace(kernel: str, workspace_size: int, needed: int) -> None:
    """Refuse a workspace of too few bytes."""
    if workspace_size < needed:
        raise KernelError(
            f"{kernel}: workspace has {workspace_size} bytes; expected at least {needed} (expand_workspace_size)"
        )


def check_proposal(level: int, sizes: dict[str, int], expansion: Expansion | None) -> None:
    """Refuse what `prepare_proposal` cannot do at `level`, which feeds the nodes of that level to the draft model."""
    kernel = "prepare_proposal"
    _check_level(kernel, level, MAXIMUM_STEPS - 1, sizes, "hidden_in")
    _check_frontiers(kernel, level, sizes)
    if expansion is not None and expansion.level != level:
        raise KernelError(f"{kernel}: the expansion of level {expansion.level}; expected that of level {level}")


def check_verification(candidates: int, sizes: dict[str, int], expansion: Expansion | None) -> None:
    """Refuse what `prepare_verification` cannot do, with the `expansion` of the last level or without."""
    kernel = "prepare_verification"
    check_batch(kernel, sizes["B"])
    if not 1 <= candidates <= sizes["C"]:
        raise KernelError(
            f"{kernel}: candidates is {candidates}; expected 1 to C = {sizes['C']}, the size of the arrays"
        )
    if sizes["T"] > MAXIMUM_TREE_TOKENS:
        raise KernelError(f"{kernel}: a tree of T = {sizes['T']} tokens; expected at most {MAXIMUM_TREE_TOKENS}")
    if sizes["S"] + 1 > sizes["T"]:
        raise KernelError(
            f"{kernel}: the root and {sizes['S']} selected nodes; expected at most T = {sizes['T']} tokens"
        )
    if expansion is None:
        return
    _check_candidates(kernel, expansion.level, MAXIMUM_STEPS, sizes)
    _check_frontiers(kernel, expansion.level - 1, sizes)
    most = candidate_count(expansion.level, sizes["K"])
    if candidates > most:
        raise KernelError(
            f"{kernel}: candidates is {candidates}; expected at most {most}, as the expansion is that of level "
            f"{expansion.level} with K = {sizes['K']}"
        )


def check_batch(kernel: str, rows: int) -> None:
    """Refuse more sequences, or rows of all of them together, than one launch takes."""
    if rows > MAXIMUM_ROWS:
        raise KernelError(
            f"{kernel}: {rows} rows of all sequences; expected at most {MAXIMUM_ROWS}: use a smaller batch"
        )


def check_top_k(kernel: str, top_k: int) -> None:
    """Refuse a tree that is too wide."""
    if not 1 <= top_k <= MAXIMUM_TOP_K:
        raise KernelError(f"{kernel}: K = {top_k} (draft top-k); expected 1 to {MAXIMUM_TOP_K}")


def check_draft_vocabulary(kernel: str, size: int) -> None:
    """Refuse a draft vocabulary that is too large."""
    if size > MAXIMUM_DRAFT_VOCABULARY:
        raise KernelError(f"{kernel}: draft vocabulary V = {size}; expected at most {MAXIMUM_DRAFT_VOCABULARY}")


def _check_level(kernel: str, level: int, highest: int, sizes: dict[str, int], rows: str) -> None:
    _check_candidates(kernel, level, highest, sizes)
    expected = 1 if level == 1 else sizes["K"]
    if sizes["n"] != expected:
        raise KernelError(
            f"{kernel}: {rows} has {sizes['n']} rows a sequence; expected {expected} at level {level} with "
            f"K = {sizes['K']}"
        )
    check_batch(kernel, sizes["B"] * sizes["n"])


def _check_candidates(kernel: str, level: int, highest: int, sizes: dict[str, int]) -> None:
    top_k = sizes["K"]
    check_top_k(kernel, top_k)
    if not 1 <= level <= highest:
        raise KernelError(f"{kernel}: level {level}; expected 1 to {highest}")
    needed = candidate_count(level, top_k)
    if sizes["C"] < needed:
        raise KernelError(
            f"{kernel}: C = {sizes['C']} candidates; expected at least {needed} for level {level} with K = {top_k}"
        )


def _check_frontiers(kernel: str, level: int, sizes: dict[str, int]) -> None:
    if sizes["F"] < level:
        raise KernelError(f"{kernel}: frontiers has F = {sizes['F']} levels; expected at least {level}")
