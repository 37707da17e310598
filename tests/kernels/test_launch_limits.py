"""What the launchers of CUDA kernels refuse before anything is launched: their host side, without a GPU."""

from __future__ import annotations

from typing import Any

import pytest

from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.checks import MAXIMUM_ROWS
from edgellm.kernels.cuda_draft_tree import CudaDraftTree
from edgellm.kernels.cuda_image_kernels import CudaImageKernels
from edgellm.kernels.draft_tree_interface import Expansion, candidate_count
from edgellm.kernels.errors import KernelError


class NoGPU:
    """What launchers know of a GPU. There are no kernels behind it: a launch that was not refused fails here."""

    multiprocessors, shared_limit, has_clusters = 100, 1 << 18, False

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was asked for: the arguments were not refused")


def array(*shape: int, dtype: str = "int32") -> DeviceArray:
    """An array at an address that nothing reads."""
    return DeviceArray(1 << 20, shape, dtype)


def expansion(level: int, workspace: int, vocabulary: int = 9) -> Expansion:
    return Expansion(level, True, array(vocabulary), array(workspace, dtype="uint8"))


def verify(waiting: Expansion, top_k: int, candidates: int, levels: int, batch: int = 1, counted: int | None = None):
    """`prepare_verification` of a tree of two tokens."""
    places = [array(batch, 1), *[array(batch) for _ in range(3)]]
    tree = [array(batch, 2), array(batch, 2), array(batch, 2), array(batch, 2, 2, dtype="bool"), array(batch, 2)]
    CudaDraftTree(NoGPU()).prepare_verification(
        True,
        candidates if counted is None else counted,
        *places,
        array(50, 8, dtype="float32"),
        array(30, 16, dtype="float16"),
        array(batch, candidates),
        array(batch, candidates, dtype="float32"),
        array(batch, candidates),
        array(batch, levels, top_k),
        array(batch, 1),
        *tree,
        array(batch, 2, 16, dtype="float16"),
        array(batch, 2, 8, dtype="float16"),
        array(batch, 1, 2, 40, dtype="bool"),
        waiting,
    )


def test_a_verification_refuses_an_expansion_that_its_arrays_have_no_room_for():
    roomy = CudaDraftTree(NoGPU()).expand_workspace_size(1, 9, 64)
    with pytest.raises(KernelError, match=r"C = 5 candidates; expected at least 12 for level 2 with K = 3"):
        verify(expansion(2, roomy), 3, 5, 1)
    with pytest.raises(KernelError, match=r"frontiers has F = 1 levels; expected at least 2"):
        verify(expansion(3, roomy), 3, candidate_count(3, 3), 1)
    with pytest.raises(KernelError, match=r"candidates is 13; expected at most 12, as the expansion is that"):
        verify(expansion(2, roomy), 3, 20, 1, counted=13)
    with pytest.raises(KernelError, match=r"K = 65 \(draft top-k\); expected 1 to 64"):
        verify(expansion(1, roomy), 65, 65, 1)
    with pytest.raises(KernelError, match=r"level 33; expected 1 to 32"):
        verify(expansion(33, roomy), 3, candidate_count(33, 3), 32)


def test_a_verification_refuses_a_workspace_that_no_expansion_can_have_filled():
    needed = CudaDraftTree(NoGPU()).expand_workspace_size(1, 9, 3)
    with pytest.raises(KernelError, match=rf"prepare_verification: workspace has {needed - 1} bytes; expected"):
        verify(expansion(2, needed - 1), 3, 12, 1)
    with pytest.raises(KernelError, match=r"prepare_verification: draft vocabulary V = 262145; expected at most"):
        verify(expansion(2, needed, vocabulary=(1 << 18) + 1), 3, 12, 1)
    with pytest.raises(KernelError, match=r"workspace starts at 0x100004; expected a multiple of 8 bytes"):
        crooked = DeviceArray((1 << 20) + 4, (needed,), "uint8")
        verify(expansion(2, needed)._replace(workspace=crooked), 3, 12, 1)


def test_more_sequences_than_a_launch_takes_are_refused():
    batch = MAXIMUM_ROWS + 1
    with pytest.raises(KernelError, match=r"prepare_verification: 65536 rows of all sequences; expected at most 65535"):
        verify(expansion(1, 1 << 30), 3, 3, 1, batch=batch)
    arrays = [
        array(9),
        array(batch // 4, 1, 4),
        *[array(batch // 4, 20, dtype=kind) for kind in ("int32", "float32", "int32")],
    ]
    with pytest.raises(KernelError, match=r"expand_frontier: 65536 rows of all sequences; expected at most 65535"):
        logits = array(batch // 4, 4, 9, dtype="float32")
        CudaDraftTree(NoGPU()).expand_frontier(2, True, logits, *arrays, array(1 << 30, dtype="uint8"))


def test_an_image_of_more_rows_than_a_launch_takes_is_refused():
    pixels, resampled = array(70_000, 4, 3, dtype="uint8"), array(70_000, 2, 3, dtype="uint8")
    with pytest.raises(KernelError, match=r"resample: 70000 rows of pixels; expected at most 65535"):
        CudaImageKernels(NoGPU()).resample(pixels, array(2), array(2, 3), resampled, 1)
