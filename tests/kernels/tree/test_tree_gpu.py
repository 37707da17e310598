"""The CUDA kernels of the draft tree equal their NumPy twins, bit for bit. Needs a GPU and pycuda."""

from __future__ import annotations

import logging

import draft_tree_reference as reference
import numpy as np
import pytest
from gpu_device import cuda_device, device_copy
from gpu_timing import microseconds

from edgellm.kernels.draft_tree_interface import Expansion, candidate_count, level_start
from edgellm.kernels.errors import KernelError
from edgellm.kernels.numpy_draft_tree import NumpyDraftTree

pytestmark = pytest.mark.gpu

TWIN = NumpyDraftTree()
DTYPES = pytest.mark.parametrize("compute", [np.float32, np.float16, np.uint16], ids=["float32", "float16", "bfloat16"])


@pytest.fixture(scope="module")
def gpu():
    """A CUDA context with a stream, and the kernels loaded into it."""
    from edgellm.kernels.cuda_draft_tree import CudaDraftTree
    from edgellm.kernels.launch import KernelModule

    with cuda_device() as device:
        device.draft_tree = CudaDraftTree(KernelModule(device.compute_capability, device.stream.handle))
        yield device


class Twins:
    """A round of drafting on both sides. Each step runs on both and then compares every array that it could write."""

    def __init__(self, gpu, drafting, tree_size: int, tokens: int) -> None:
        self.gpu, self.drafting = gpu, drafting
        rng = np.random.default_rng(99)
        batch, vocabulary = drafting.batch, len(drafting.embedding)
        state = {
            "candidate_tokens": drafting.candidate_tokens,
            "candidate_scores": drafting.candidate_scores,
            "candidate_parents": drafting.candidate_parents,
            "frontiers": drafting.frontiers,
            "draft_to_target": drafting.draft_to_target,
            "committed": drafting.committed,
            "position_offsets": drafting.position_offsets,
            "rotary_table": drafting.rotary_table,
            "embedding": drafting.embedding,
            "token_ids": rng.integers(0, vocabulary, (batch, 1)).astype(np.int32),
            "positions": rng.integers(0, 999, batch).astype(np.int32),
        }
        state |= {f"logits {i + 1}": values for i, values in enumerate(drafting.logits)}
        state |= {f"hidden {i + 1}": values for i, values in enumerate(drafting.hidden)}
        outputs = drafting.proposal_outputs()
        state |= {f"proposal {i}": values for i, values in enumerate(outputs)}
        self.proposal = [f"proposal {i}" for i in range(len(outputs))]
        outputs = drafting.verification_outputs(tree_size, tokens)
        state |= {f"verification {i}": values for i, values in enumerate(outputs)}
        self.verification = [f"verification {i}" for i in range(len(outputs))]
        self.host = state
        self.device = {name: device_copy(gpu, values) for name, values in state.items()}
        size = gpu.draft_tree.expand_workspace_size(batch, len(drafting.draft_to_target), drafting.top_k)
        self.host_workspace, self.workspace = np.zeros(0, np.uint8), gpu.zeros((size,), "uint8")

    CANDIDATES = ("candidate_tokens", "candidate_scores", "candidate_parents")
    PLACES = ("committed", "position_offsets", "rotary_table", "embedding")

    def expand(self, level: int, score: bool = True) -> None:
        names = (f"logits {level}", "draft_to_target", "frontiers", *self.CANDIDATES)
        for kernels, arrays, workspace in self._sides():
            kernels.expand_frontier(level, score, *[arrays[name] for name in names], workspace)

    def propose(self, level: int, select: bool = True, expanded: bool = True) -> None:
        """Finishes the expansion of the level, too, where that was just `expanded`."""
        written = (*self.CANDIDATES, "frontiers", *self.proposal)
        names = (*self.PLACES, f"hidden {level}", *written)
        for kernels, arrays, workspace in self._sides():
            expansion = Expansion(level, select, arrays["draft_to_target"], workspace) if expanded else None
            kernels.prepare_proposal(level, select, *[arrays[name] for name in names], expansion)
        self._compare(f"propose {level}", written)

    def verify(self, select: bool = True, candidates: int | None = None, expanded: bool = True) -> None:
        """Finishes the expansion of the last level, where that was just `expanded`."""
        written = (*self.CANDIDATES, "frontiers", *self.verification)
        names = ("token_ids", "positions", *self.PLACES, *written)
        count = self.drafting.candidate_tokens.shape[1] if candidates is None else candidates
        for kernels, arrays, workspace in self._sides():
            expansion = Expansion(self.drafting.steps, select, arrays["draft_to_target"], workspace)
            arguments = (select, count, *[arrays[name] for name in names], expansion if expanded else None)
            kernels.prepare_verification(*arguments)
        self._compare("verify", written)

    def _sides(self):
        """Kernels, arrays and workspace of the twin and of the GPU."""
        return (TWIN, self.host, self.host_workspace), (self.gpu.draft_tree, self.device, self.workspace)

    def _compare(self, step: str, names) -> None:
        for name in names:
            np.testing.assert_array_equal(
                self.gpu.download(self.device[name]), self.host[name], err_msg=f"{step}: {name}"
            )

    def round(self, select: bool = True) -> None:
        self.expand(1, select)
        for level in range(1, self.drafting.steps):
            self.propose(level, select)
            self.expand(level + 1, select)
        self.verify(select)


ROUNDS = {
    # batch, K, D, V, T, draft vocabulary, L
    "default": (1, 10, 6, 60, 64, 32_000, 1024),
    "chain": (2, 1, 6, 7, 8, 4096, 131),
    "small vocabulary": (3, 7, 3, 30, 37, 5, 70),
    "one token": (1, 4, 3, 9, 16, 1, 64),
    "one level": (2, 10, 1, 11, 16, 4097, 70),
    "batch": (8, 4, 4, 16, 16, 12_289, 200),
    "wide": (1, 64, 3, 200, 256, 4999, 600),
    "deep": (1, 2, 32, 40, 64, 300, 333),
    "no mask": (1, 3, 3, 9, 16, 50, 0),
}


@pytest.mark.parametrize("kind", ["ordinary", "ties", "equal", "awkward"])
@pytest.mark.parametrize("name", ROUNDS)
def test_dynamic_round(gpu, name, kind):
    batch, top_k, steps, tree_size, tokens, vocab, keys = ROUNDS[name]
    rng = np.random.default_rng(len(name))
    sizes = (64, 48, 32) if name == "default" else (6, 5, 4)  # rows that vector loads can copy, and that they cannot
    drafting = reference.random_drafting(rng, batch, top_k, steps, vocab, kind, keys, sizes=sizes)
    Twins(gpu, drafting, tree_size, tokens).round()


@DTYPES
@pytest.mark.parametrize("sizes", [(64, 48, 32), (7, 5, 6)])
def test_dtypes(gpu, compute, sizes):
    rng = np.random.default_rng(1)
    drafting = reference.random_drafting(rng, 2, 5, 4, 900, "ordinary", 130, compute, sizes)
    Twins(gpu, drafting, 20, 24).round()


@pytest.mark.parametrize("seed", range(6))
def test_static_round(gpu, seed):
    """Frontiers with idle slots and foreign levels, selections with disconnected nodes."""
    rng = np.random.default_rng(seed)
    batch, top_k, steps, tree_size = 3, int(rng.integers(1, 6)), int(rng.integers(2, 5)), 12
    kind = ["ordinary", "ties", "awkward"][seed % 3]
    drafting = reference.random_drafting(rng, batch, top_k, steps, 40, kind)
    count = candidate_count(steps, top_k)
    for level in range(1, steps):
        row = rng.integers(level_start(level, top_k), level_start(level + 1, top_k), (batch, top_k))
        strange = rng.integers(-2, count + 3, row.shape)
        drafting.frontiers[:, level - 1] = np.where(rng.random(row.shape) < 0.2, strange, row)
    twins = Twins(gpu, drafting, tree_size, 16)
    selected = twins.host["verification 0"]
    selected[...] = -1
    for b in range(batch):
        chosen = np.sort(rng.permutation(count)[: rng.integers(0, tree_size)])
        selected[b, : chosen.size] = chosen
    gpu.upload(twins.device["verification 0"], selected)
    twins.round(select=False)


@pytest.mark.parametrize("top_k", [1, 6, 40])
def test_candidates_that_are_there_already(gpu, top_k):
    """As those of a sampled chain, which no expansion made."""
    drafting = reference.random_drafting(np.random.default_rng(12), 2, top_k, 3, 500, keys=150)
    twins = Twins(gpu, drafting, 3, 8)
    twins.round()
    for level in (1, 2):
        twins.propose(level, expanded=False)
    twins.verify(expanded=False)


def test_workspace_serves_any_batch_and_width(gpu):
    """Of a workspace for the largest sizes, smaller ones leave nothing behind that disturbs the next call."""
    rng = np.random.default_rng(2)
    size = gpu.draft_tree.expand_workspace_size(8, 20_000, 10)
    workspace = gpu.zeros((size,), "uint8")
    for batch, top_k in ((1, 10), (8, 3), (2, 10), (8, 10), (1, 1), (8, 10)):
        drafting = reference.random_drafting(rng, batch, top_k, 2, 20_000)
        twins = Twins(gpu, drafting, 5, 8)
        twins.workspace = workspace
        twins.round()


def test_nodes_of_a_large_selection_tie(gpu):
    """More candidates than a block keeps in shared memory, most with equal scores, a tree of 1,024 tokens."""
    rng = np.random.default_rng(3)
    drafting = reference.random_drafting(rng, 2, 64, 4, 70, "ties", 1200)
    twins = Twins(gpu, drafting, 1024, 1024)
    twins.round()
    assert drafting.candidate_tokens.shape[1] > 8192
    twins.verify(candidates=candidate_count(2, 64), expanded=False)


@pytest.mark.parametrize("committed", [0, 60, 66, 70, 75, -3])
def test_masks_at_the_end_of_the_key_range(gpu, committed):
    drafting = reference.random_drafting(np.random.default_rng(4), 1, 3, 3, 20, keys=70)
    drafting.committed[:] = committed
    drafting.position_offsets[:] = 2_000_000_000 if committed == 75 else -50
    Twins(gpu, drafting, 9, 12).round()


def test_captured_round(gpu, caplog):
    """A round in one CUDA graph, where kernels overlap, replayed with other logits each time."""
    rng = np.random.default_rng(5)
    drafting = reference.random_drafting(rng, 2, 6, 4, 6000, keys=256, sizes=(64, 64, 32))
    twins = Twins(gpu, drafting, 30, 32)
    twins.round()
    kernels, device = gpu.draft_tree, twins.device
    candidates = [device[name] for name in Twins.CANDIDATES]
    places = [device[name] for name in Twins.PLACES]

    def expansion(level: int) -> Expansion:
        return Expansion(level, True, device["draft_to_target"], twins.workspace)

    def expand(level: int) -> None:
        arrays = (device["draft_to_target"], device["frontiers"], *candidates, twins.workspace)
        kernels.expand_frontier(level, True, device[f"logits {level}"], *arrays)

    def step() -> None:
        expand(1)
        for level in range(1, drafting.steps):
            outputs = [device[name] for name in ("frontiers", *twins.proposal)]
            inputs = (*places, device[f"hidden {level}"], *candidates)
            kernels.prepare_proposal(level, True, *inputs, *outputs, expansion(level))
            expand(level + 1)
        tree = [device[name] for name in ("frontiers", *twins.verification)]
        count = drafting.candidate_tokens.shape[1]
        roots = (device["token_ids"], device["positions"])
        kernels.prepare_verification(True, count, *roots, *places, *candidates, *tree, expansion(drafting.steps))

    with caplog.at_level(logging.WARNING):
        launch = gpu.capture(step, "a round of drafting")
    assert not caplog.records
    for replay in range(20):
        for level, logits in enumerate(drafting.logits, 1):
            logits[...] = reference.random_logits(rng, *logits.shape, ("ordinary", "ties")[replay % 2])
            gpu.upload(device[f"logits {level}"], logits)
        launch()
        on_device = {name: gpu.download(array) for name, array in device.items()}
        for level in range(1, drafting.steps + 1):
            TWIN.expand_frontier(
                level,
                True,
                drafting.logits[level - 1],
                drafting.draft_to_target,
                drafting.frontiers,
                *drafting.candidates(),
                twins.host_workspace,
            )
            if level < drafting.steps:
                outputs = [twins.host[name] for name in twins.proposal]
                TWIN.prepare_proposal(
                    level,
                    True,
                    *[twins.host[name] for name in Twins.PLACES],
                    drafting.hidden[level - 1],
                    *drafting.candidates(),
                    drafting.frontiers,
                    *outputs,
                    None,
                )
        TWIN.prepare_verification(
            True,
            drafting.candidate_tokens.shape[1],
            *[twins.host[name] for name in ("token_ids", "positions", *Twins.PLACES)],
            *drafting.candidates(),
            drafting.frontiers,
            *[twins.host[name] for name in twins.verification],
            None,
        )
        for name, values in twins.host.items():
            np.testing.assert_array_equal(on_device[name], values, err_msg=f"replay {replay}: {name}")


def test_limits_are_refused(gpu):
    drafting = reference.random_drafting(np.random.default_rng(6), 1, 3, 2, 9)
    twins = Twins(gpu, drafting, 5, 8)
    twins.workspace = gpu.zeros((100,), "uint8")
    with pytest.raises(KernelError, match=r"workspace has 100 bytes; expected at least"):
        twins.expand(1)
    with pytest.raises(KernelError, match=r"level 33; expected 1 to 32"):
        twins.device["logits 33"] = twins.device["logits 1"]
        arrays = ["logits 33", "draft_to_target", "frontiers", *Twins.CANDIDATES]
        gpu.draft_tree.expand_frontier(33, True, *[twins.device[name] for name in arrays], twins.workspace)
    with pytest.raises(KernelError, match=r"K = 65 .*expected 1 to 64"):
        gpu.draft_tree.expand_workspace_size(1, 9, 65)
    expansion = Expansion(2, True, twins.device["draft_to_target"], twins.workspace)
    names = (*Twins.PLACES, "hidden 1", *Twins.CANDIDATES, "frontiers", *twins.proposal)
    with pytest.raises(KernelError, match=r"prepare_proposal: the expansion of level 2; expected that of level 1"):
        gpu.draft_tree.prepare_proposal(1, True, *[twins.device[name] for name in names], expansion)


def test_times_of_the_default_tree(gpu):
    """Prints microseconds of each kernel in a CUDA graph (pytest -s); the bounds only catch a kernel gone wrong."""
    rng = np.random.default_rng(8)
    sizes = (2048, 2048, 64)
    drafting = reference.random_drafting(rng, 1, 10, 6, 32_000, keys=1024, compute=np.float16, sizes=sizes)
    twins = Twins(gpu, drafting, 60, 64)
    twins.round()
    kernels, device = gpu.draft_tree, twins.device
    candidates = [device[name] for name in Twins.CANDIDATES]
    places = [device[name] for name in Twins.PLACES]
    outputs = [device[name] for name in ("frontiers", *twins.proposal)]
    tree = [device[name] for name in ("frontiers", *twins.verification)]
    start_of_round = (device["token_ids"], device["positions"])

    def expansion(level: int) -> Expansion:
        return Expansion(level, True, device["draft_to_target"], twins.workspace)

    def expand(level: int) -> None:
        arrays = (device["draft_to_target"], device["frontiers"], *candidates, twins.workspace)
        kernels.expand_frontier(level, True, device[f"logits {level}"], *arrays)

    def propose(level: int) -> None:
        inputs = (*places, device[f"hidden {level}"], *candidates)
        kernels.prepare_proposal(level, True, *inputs, *outputs, expansion(level))

    def verify() -> None:
        count = candidate_count(6, 10)
        kernels.prepare_verification(True, count, *start_of_round, *places, *candidates, *tree, expansion(6))

    def all_of_a_round() -> None:
        expand(1)
        for level in range(1, 6):
            propose(level)
            expand(level + 1)
        verify()

    bounded_steps = {
        "expand_frontier, root": (lambda: expand(1), 60),
        "expand_frontier, 10 x 32,000": (lambda: expand(6), 60),
        "prepare_proposal": (lambda: propose(5), 40),
        "prepare_verification": (verify, 40),
        "all of a round": (all_of_a_round, 500),
    }
    for name, (step, bound) in bounded_steps.items():
        time = microseconds(gpu, step, name)
        print(f"{name}: {time:.1f} us")
        assert time < bound
