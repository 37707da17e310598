"""Signatures and limits of the acceptance kernels, checked alike by `NumpyAcceptance` and `CudaAcceptance`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edgellm.kernels.acceptance_interface import (
    MAXIMUM_ACCEPTED,
    MAXIMUM_SAMPLED_VOCABULARY,
    MAXIMUM_TREE_SIZE,
)
from edgellm.kernels.arrays import Array
from edgellm.kernels.checks import MAXIMUM_ROWS, SIGNATURES
from edgellm.kernels.errors import KernelError

_TREE = (
    ("tree_tokens", "BT", "int32"),
    ("tree_parents", "BT", "int32"),
    ("tree_depths", "BT", "int32"),
    ("active", "B", "int32"),
)
_ACCEPTED = (
    ("accepted_indices", "BW", "int32"),
    ("accepted_ids", "BW", "int32"),
    ("acceptance_lengths", "B", "int32"),
)
_DISTRIBUTION = (
    ("processed", "BTV", "float32"),
    ("thresholds", "BT", "float32"),
    ("temperature", "B", "float32"),
)
_SLOT_DRAWS = (
    ("repetition_penalty", "B", "float32"),
    ("presence_penalty", "B", "float32"),
    ("frequency_penalty", "B", "float32"),
    ("temperature", "B", "float32"),
    ("top_k", "B", "int32"),
    ("top_p", "B", "float32"),
    ("min_p", "B", "float32"),
    ("seeds", "B", "uint64"),
    ("sequences", "B", "int32"),
)
_WORKSPACE = (("workspace", "N", "uint8"),)

SIGNATURES.update(
    {
        "process_tree_logits": (
            ("logits", "BTV", "float32"),
            ("token_counts", "BV", "int32"),
            ("tree_tokens", "BT", "int32"),
            ("tree_ancestors", "BTT", "bool"),
            ("repetition_penalty", "B", "float32"),
            ("presence_penalty", "B", "float32"),
            ("frequency_penalty", "B", "float32"),
            ("temperature", "B", "float32"),
            ("processed", "BTV", "float32"),
        ),
        "eagle_accept": (("logits", "BTV", "float32"), *_TREE, *_ACCEPTED, *_WORKSPACE),
        "accept_drawn": (("drawn", "BT", "int32"), *_TREE, *_ACCEPTED),
        "typical_accept": (*_DISTRIBUTION, ("drawn", "BT", "int32"), *_TREE, *_ACCEPTED, *_WORKSPACE),
        "draft_sample": (
            ("logits", "BU", "float32"),
            ("draft_to_target", "U", "int32"),
            ("temperature", "B", "float32"),
            ("top_k", "B", "int32"),
            ("top_p", "B", "float32"),
            ("min_p", "B", "float32"),
            ("seeds", "B", "uint64"),
            ("sequences", "B", "int32"),
            ("positions", "B", "int32"),
            ("chain_tokens", "BD", "int32"),
            ("draft_probabilities", "BDU", "float32"),
            *_WORKSPACE,
        ),
        "accept_sampled_chain": (
            *_DISTRIBUTION,
            ("tree_tokens", "BT", "int32"),
            ("draft_probabilities", "BDU", "float32"),
            ("target_to_draft", "V", "int32"),
            ("seeds", "B", "uint64"),
            ("sequences", "B", "int32"),
            ("draw_positions", "BT", "int32"),
            ("active", "B", "int32"),
            *_ACCEPTED,
            *_WORKSPACE,
        ),
        "accept_draws": (
            ("logits", "BTV", "float32"),
            ("token_counts", "BV", "int32"),
            *_TREE[:3],
            ("tree_ancestors", "BTT", "bool"),
            ("draw_positions", "BT", "int32"),
            ("active", "B", "int32"),
            *_SLOT_DRAWS,
            ("thresholds", "BT", "float32"),
            ("drawn", "BT", "int32"),
            *_ACCEPTED,
        ),
        "accept_sampled_draws": (
            ("logits", "BTV", "float32"),
            ("token_counts", "BV", "int32"),
            ("tree_tokens", "BT", "int32"),
            ("tree_ancestors", "BTT", "bool"),
            ("draft_probabilities", "BDU", "float32"),
            ("target_to_draft", "V", "int32"),
            ("draw_positions", "BT", "int32"),
            ("active", "B", "int32"),
            *_SLOT_DRAWS,
            ("thresholds", "BT", "float32"),
            *_ACCEPTED,
            *_WORKSPACE,
        ),
        "compact_kv": (
            ("caches[0]", "SHRC", "compute"),
            ("kvcache_start_index", "B", "int32"),
            ("accepted_indices", "BW", "int32"),
            ("acceptance_lengths", "B", "int32"),
        ),
        "gather_features": (
            ("hidden_states", "BTF", "compute"),
            ("accepted_indices", "BW", "int32"),
            ("acceptance_lengths", "B", "int32"),
            ("pending_features", "BPF", "compute"),
        ),
        "advance_accepted": (
            ("accepted_ids", "BW", "int32"),
            ("acceptance_lengths", "B", "int32"),
            ("active", "B", "int32"),
            ("token_ids", "B1", "int32"),
            ("kvcache_start_index", "B", "int32"),
            ("positions", "B", "int32"),
            ("token_counts", "BV", "int32"),
            ("pending_ids", "BP", "int32"),
            ("pending_counts", "B", "int32"),
            ("draft_start", "B", "int32"),
            ("draft_last", "B1", "int32"),
            ("emitted", "BE", "int32"),
        ),
        "append_pending": (
            ("hidden_states", "B1F", "compute"),
            ("tokens", "B", "int32"),
            ("active", "B", "int32"),
            ("pending_features", "BPF", "compute"),
            ("pending_ids", "BP", "int32"),
            ("pending_counts", "B", "int32"),
            ("kvcache_start_index", "B", "int32"),
            ("draft_start", "B", "int32"),
            ("draft_last", "B1", "int32"),
        ),
        "vocab_mapping": (("vocab_mapping", "V", "int32"),),
    }
)

#: Kernels whose vocabulary is bounded by what their fixed-point sums hold, and the axis that is it.
_SUMMED = {"typical_accept": "V", "accept_sampled_chain": "V", "accept_sampled_draws": "V", "draft_sample": "U"}

Check = Callable[..., dict[str, int]]


def check_acceptance(check: Check, kernel: str, *arrays: Array) -> dict[str, int]:
    """Sizes of the axes by letter, once shapes, dtypes and limits are found right; else KernelError.

    `check` is `check_host_arguments` or `check_device_arguments`.
    """
    sizes = check(kernel, *arrays)
    tree_size = sizes.get("T", 1)
    limits = [("T", MAXIMUM_TREE_SIZE), ("W", MAXIMUM_ACCEPTED), ("B", MAXIMUM_ROWS)]
    if kernel in _SUMMED:
        limits.append((_SUMMED[kernel], MAXIMUM_SAMPLED_VOCABULARY))
    for axis, maximum in limits:
        if sizes.get(axis, 0) > maximum:
            raise KernelError(f"{kernel}: {axis} = {sizes[axis]}; expected at most {maximum}")
    if sizes["B"] * tree_size > MAXIMUM_ROWS:
        raise KernelError(f"{kernel}: B * T = {sizes['B'] * tree_size}; expected at most {MAXIMUM_ROWS}")
    if "P" in sizes and sizes["P"] < sizes.get("W", 1):
        raise KernelError(
            f"{kernel}: {sizes['P']} pending rows (P); expected at least W = {sizes['W']}, the most tokens of a round"
        )
    return sizes


def check_mapping(check: Check, kernel: str, mapping: Array | None, vocabulary: int | None) -> int:
    """Length of a `vocab_mapping`, 0 for None; KernelError if it is not one for a `vocabulary` (None: any)."""
    if mapping is None:
        return 0
    found = check("vocab_mapping", mapping)["V"]
    if vocabulary is not None and found != vocabulary:
        raise KernelError(f"{kernel}: vocab_mapping has {found} ids; expected V = {vocabulary}, one for each logit")
    return found


def check_workspace(kernel: str, sizes: dict[str, int], needed: int) -> None:
    """KernelError if the workspace is smaller than the `needed` bytes."""
    if sizes["N"] < needed:
        raise KernelError(
            f"{kernel}: workspace has {sizes['N']} bytes; expected at least {needed} ({kernel} says how many it needs)"
        )


def check_caches(check: Check, caches: Sequence[Array], *others: Array) -> dict[str, int]:
    """Sizes of `compact_kv`; KernelError unless all caches have one shape and dtype and hold the slots."""
    if not caches:
        raise KernelError("compact_kv: no caches; expected keys and values of every layer")
    sizes = check_acceptance(check, "compact_kv", caches[0], *others)
    for number, cache in enumerate(caches):
        try:
            found = (tuple(cache.shape), cache.dtype)
        except AttributeError:
            raise KernelError(f"compact_kv: caches[{number}] is a {type(cache).__name__}; expected an array") from None
        if found != (tuple(caches[0].shape), caches[0].dtype):
            raise KernelError(
                f"compact_kv: caches[{number}] is {found[1]} {list(found[0])}; expected it to be like caches[0], "
                f"{caches[0].dtype} {list(caches[0].shape)}"
            )
        check("compact_kv", cache, *others)
    if sizes["S"] < sizes["B"]:
        raise KernelError(f"compact_kv: caches hold {sizes['S']} slots; expected at least B = {sizes['B']}")
    return sizes


def check_emitted(sizes: dict[str, int]) -> None:
    """KernelError if the `emitted` of `advance_accepted` has no room for the length and W tokens."""
    if sizes["E"] != sizes["W"] + 1:
        raise KernelError(
            f"advance_accepted: emitted has {sizes['E']} columns; expected W + 1 = {sizes['W'] + 1}: length and tokens"
        )


def check_step(sizes: dict[str, int], step: int) -> None:
    """KernelError if `step` of `draft_sample` is not one of the chain's."""
    if not 0 <= step < sizes["D"]:
        raise KernelError(f"draft_sample: step is {step}; expected 0 to {sizes['D'] - 1}, as chain_tokens has room for")


def check_typical(epsilon: float, delta: float) -> None:
    """KernelError if the bounds of typical acceptance are not positive numbers (NaN is none)."""
    if not (epsilon > 0 and delta > 0):
        raise KernelError(f"typical_accept: epsilon is {epsilon}, delta {delta}; expected both above 0")
