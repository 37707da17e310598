"""What the launchers of CUDA kernels refuse before anything is launched: their host side, without a GPU."""

from __future__ import annotations

from typing import Any

import pytest

from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.compiler import CompiledModule
from edgellm.kernels.contracts import MAXIMUM_ROWS
from edgellm.kernels.errors import KernelError
from edgellm.kernels.images.contract import ResamplingTables
from edgellm.kernels.images.launcher import CudaImages
from edgellm.kernels.launch import refused_by_driver
from edgellm.kernels.sampling.contract import ModelTables, SequenceState, StepInputs
from edgellm.kernels.sampling.launcher import CudaSampling
from edgellm.kernels.sampling.record import SamplingRecord
from edgellm.kernels.tree.contract import Candidates, Expansion, Level, TreeNodes, candidate_count
from edgellm.kernels.tree.launcher import CudaTree


class NoGPU:
    """What launchers know of a GPU. There are no kernels behind it: a launch that was not refused fails here."""

    multiprocessors, shared_limit, has_clusters = 100, 1 << 18, False

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was asked for: the arguments were not refused")


def array(*shape: int, dtype: str = "int32") -> DeviceArray:
    """An array at an address that nothing reads."""
    return DeviceArray(1 << 20, shape, dtype)


def expansion(workspace: int, vocabulary: int = 9) -> Expansion:
    return Expansion(array(vocabulary), array(workspace, dtype="uint8"))


def candidate_arrays(batch: int, count: int, levels: int, top_k: int) -> Candidates:
    scores, frontiers = array(batch, count, dtype="float32"), array(batch, levels, top_k)
    return Candidates(array(batch, count), scores, array(batch, count), frontiers, array(batch, 1))


def verify(level: int, waiting: Expansion, top_k: int, candidates: int, levels: int, batch: int = 1):
    """`prepare_verification` of a tree of two tokens."""
    state = SequenceState(
        *[array(batch, *([1] if name == "token_ids" else [])) for name in SequenceState._fields[:4]],
        array(batch, 30),
        array(batch),
        array(batch, 2),
    )
    tables = ModelTables(array(30, 16, dtype="float16"), array(50, 8, dtype="float32"), array(batch))
    nodes = array(batch, 2)
    tree = TreeNodes(nodes, nodes, nodes, array(batch, 2, 2, dtype="bool"), nodes)
    embeds, cos_sin = array(batch, 2, 16, dtype="float16"), array(batch, 2, 8, dtype="float16")
    inputs = StepInputs(embeds, cos_sin, array(batch, 1, 2, 40, dtype="bool"), array(batch))
    arrays = candidate_arrays(batch, candidates, levels, top_k)
    tree_kernels().prepare_verification(Level(level, top_k, True), state, tables, arrays, tree, inputs, waiting)


def tree_kernels() -> CudaTree:
    return CudaTree(NoGPU(), "float16")


def test_a_verification_refuses_an_expansion_that_its_arrays_have_no_room_for():
    roomy = expansion(tree_kernels().expand_workspace_size(1, 9, 64))
    with pytest.raises(KernelError, match=r"C = 5 candidates; expected at least 12 for level 2 with K = 3"):
        verify(2, roomy, 3, 5, 1)
    with pytest.raises(KernelError, match=r"frontiers has F = 1 levels; expected at least 2"):
        verify(3, roomy, 3, candidate_count(3, 3), 1)
    with pytest.raises(KernelError, match=r"K = 65 \(draft top-k\); expected 1 to 64"):
        verify(1, roomy, 65, 65, 1)
    with pytest.raises(KernelError, match=r"level 33; expected 1 to 32"):
        verify(33, roomy, 3, candidate_count(33, 3), 32)


def test_a_verification_refuses_a_workspace_that_no_expansion_can_have_filled():
    needed = tree_kernels().expand_workspace_size(1, 9, 3)
    with pytest.raises(KernelError, match=rf"prepare_verification: workspace has {needed - 1} bytes; expected"):
        verify(2, expansion(needed - 1), 3, 12, 1)
    with pytest.raises(KernelError, match=r"prepare_verification: draft vocabulary U = 262145; expected at most"):
        verify(2, expansion(needed, vocabulary=(1 << 18) + 1), 3, 12, 1)
    with pytest.raises(KernelError, match=r"workspace starts at 0x100004; expected a multiple of 8 bytes"):
        crooked = DeviceArray((1 << 20) + 4, (needed,), "uint8")
        verify(2, expansion(needed)._replace(workspace=crooked), 3, 12, 1)


def test_more_sequences_than_a_launch_takes_are_refused():
    batch = MAXIMUM_ROWS + 1
    with pytest.raises(KernelError, match=r"prepare_verification: 65536 rows of all sequences; expected at most 65535"):
        verify(1, expansion(1 << 30), 3, 3, 1, batch=batch)
    with pytest.raises(KernelError, match=r"expand_frontier: 65536 rows of all sequences; expected at most 65535"):
        logits, candidates = array(batch // 4, 4, 9, dtype="float32"), candidate_arrays(batch // 4, 20, 1, 4)
        tree_kernels().expand_frontier(Level(2, 4, True), logits, candidates, expansion(1 << 30))


class FailingGPU:
    """A driver that refuses every launch from the `first` one on, and notes what is cleared."""

    class CUresult:
        CUDA_SUCCESS = 0

    def __init__(self, first: int) -> None:
        self.driver, self.stream, self.can_overlap, self.multiprocessors = self, 0, False, 100
        self.launches, self._first, self.cleared = [], first, []

    def load(self, source: Any) -> None:
        """There is nothing to load."""

    def function(self, kernel: Any, shared_bytes: int) -> str:
        return kernel.expression

    def cuLaunchKernel(self, function: str, *given: Any) -> tuple[int]:
        self.launches.append(function)
        return (700 if len(self.launches) >= self._first else 0,)

    def cuMemsetD8Async(self, pointer: int, value: int, nbytes: int, stream: int) -> tuple[int]:
        assert value == 0
        self.cleared.append((pointer, nbytes))
        return (0,)


@pytest.mark.parametrize("first", [1, 2, 3])
def test_a_failed_launch_has_its_workspace_cleared(first: int):
    """Of three launches one fails: what those before it wrote does not meet the next call."""
    gpu, workspace = FailingGPU(first), array(CudaSampling.workspace_bytes(4), dtype="uint8")
    kernels = CudaSampling(gpu, "float16", workspace)
    rows = array(4, SamplingRecord().words().size, dtype="uint32")
    with pytest.raises(KernelError, match=r"launching filter_.* failed"):
        kernels.filter_threshold(array(4, 99, dtype="float32"), rows, array(4, dtype="float32"))
    assert gpu.launches == ["filter_range", "filter_histogram", "filter_select"][:first]
    assert gpu.cleared == [(workspace.pointer, workspace.nbytes)]


def test_an_image_of_more_rows_than_a_launch_takes_is_refused():
    pixels, resampled = array(70_000, 4, 3, dtype="uint8"), array(70_000, 2, 3, dtype="uint8")
    with pytest.raises(KernelError, match=r"resample: 70000 rows of pixels; expected at most 65535"):
        CudaImages(NoGPU(), "float16").resample(pixels, ResamplingTables(array(2), array(2, 3), 1), resampled)


@pytest.mark.parametrize(("code", "is_image"), [(200, True), (209, True), (222, True), (2, False), (700, False)])
def test_another_driver_is_advised_for_what_was_compiled_alone(code: int, is_image: bool) -> None:
    driver = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    status = driver.CUresult(code)
    said = str(refused_by_driver("sm_90", CompiledModule(b"", {}, (13, 0)), status))
    assert status.name in said and ("'.[jetpack6]'" in said) == is_image and ("an earlier launch" in said) != is_image
