"""The CUDA kernels of the draft tree equal their NumPy twins, bit for bit. Needs a GPU and pycuda."""

from __future__ import annotations

import logging

import draft_tree_reference as reference
import numpy as np
import pytest
from gpu_device import assert_same, cuda_device, load_kernels, on_device
from gpu_timing import microseconds
from packed_weights import compute_bits, in_pieces, packed_copy, random_packed, shared_table

from edgellm.kernels.errors import KernelError
from edgellm.kernels.tree.contract import Block, HiddenRows, candidate_count, level_start
from edgellm.kernels.tree.twin import NumpyTree

pytestmark = pytest.mark.gpu

TWIN = NumpyTree()
DTYPES = pytest.mark.parametrize("compute", [np.float32, np.float16, np.uint16], ids=["float32", "float16", "bfloat16"])


@pytest.fixture(scope="module")
def gpu():
    """A CUDA context with a stream, and the kernels loaded into it."""
    with cuda_device() as device:
        load_kernels(device)
        yield device


class Twins:
    """A round of drafting on both sides. Each step runs on both and then compares every array that it could write."""

    def __init__(self, gpu, drafting, tree_size: int, tokens: int) -> None:
        self.gpu, self.drafting = gpu, drafting
        state, candidates, nodes, inputs = drafting.verification(np.random.default_rng(99), tree_size, tokens)
        drafting.candidates = candidates
        hidden, proposal = drafting.proposal(1)
        self.host = {
            "candidates": candidates,
            "committed": state.kvcache_start_index,
            "state": state,
            "tables": drafting.tables,
            "nodes": nodes,
            "verification": inputs,
            "fed": hidden.fed,
            "proposal": proposal,
            "expansion": drafting.expansion,
        }
        self.host |= {f"logits {i + 1}": values for i, values in enumerate(drafting.logits)}
        self.host |= {f"hidden {i + 1}": values for i, values in enumerate(drafting.hidden)}
        self.device = {name: on_device(gpu, value) for name, value in self.host.items()}
        self.device["state"] = self.device["state"]._replace(kvcache_start_index=self.device["committed"])
        size = gpu.draft_tree.expand_workspace_size(drafting.batch, drafting.logits[0].shape[2], drafting.top_k)
        self.use_workspace(gpu.zeros((size,), "uint8"))

    def use_workspace(self, workspace) -> None:
        self.device["expansion"] = self.device["expansion"]._replace(workspace=workspace)

    def expand(self, level: int, dynamic: bool = True) -> None:
        for kernels, arrays in self._sides():
            self.expand_on(kernels, arrays, level, dynamic)

    def expand_on(self, kernels, arrays, level: int, dynamic: bool = True) -> None:
        own = self.drafting.level(level, dynamic)
        kernels.expand_frontier(own, arrays[f"logits {level}"], arrays["candidates"], arrays["expansion"])

    def propose(self, level: int, dynamic: bool = True, expanded: bool = True) -> None:
        """Finishes the expansion of the level, too, where that was just `expanded`."""
        for kernels, arrays in self._sides():
            self.propose_on(kernels, arrays, level, dynamic, expanded)
        self._compare(f"propose {level}", ("candidates", "fed", "proposal"))

    def propose_on(self, kernels, arrays, level: int, dynamic: bool = True, expanded: bool = True) -> None:
        kernels.prepare_proposal(
            self.drafting.level(level, dynamic),
            arrays["committed"],
            arrays["tables"],
            arrays["candidates"],
            HiddenRows(arrays[f"hidden {level}"], arrays["fed"]),
            arrays["proposal"],
            arrays["expansion"] if expanded else None,
        )

    def verify(self, dynamic: bool = True, level: int | None = None, expanded: bool = True) -> None:
        """Finishes the expansion of the last level, where that was just `expanded`."""
        for kernels, arrays in self._sides():
            self.verify_on(kernels, arrays, dynamic, level, expanded)
        self._compare("verify", ("candidates", "nodes", "verification"))

    def verify_on(self, kernels, arrays, dynamic: bool = True, level: int | None = None, expanded: bool = True) -> None:
        bundles = [arrays[name] for name in ("state", "tables", "candidates", "nodes", "verification")]
        own = self.drafting.level(level or self.drafting.steps, dynamic)
        kernels.prepare_verification(own, *bundles, arrays["expansion"] if expanded else None)

    def _sides(self):
        """Kernels and arrays of the twin and of the GPU."""
        return (TWIN, self.host), (self.gpu.draft_tree, self.device)

    def _compare(self, step: str, names) -> None:
        for name in names:
            assert_same(self.gpu, self.device[name], self.host[name], f"{step}: {name}")

    def round(self, dynamic: bool = True) -> None:
        self.expand(1, dynamic)
        for level in range(1, self.drafting.steps):
            self.propose(level, dynamic)
            self.expand(level + 1, dynamic)
        self.verify(dynamic)

    def round_on(self, kernels, arrays) -> None:
        """A whole round of a dynamic tree on one side."""
        self.expand_on(kernels, arrays, 1)
        for level in range(1, self.drafting.steps):
            self.propose_on(kernels, arrays, level)
            self.expand_on(kernels, arrays, level + 1)
        self.verify_on(kernels, arrays)


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


@pytest.mark.parametrize("kind", ["ordinary", "ties", "awkward"])
@pytest.mark.parametrize(("top_k", "width", "steps"), [(10, 4, 4), (10, 1, 6), (10, 9, 2), (64, 17, 3), (5, 2, 1)])
def test_trees_narrower_than_built(gpu, top_k, width, steps, kind):
    rng = np.random.default_rng(width)
    drafting = reference.random_drafting(rng, 2, top_k, steps, 9001, kind, 300, width=width)
    size = min(32, candidate_count(steps, width) + 1)
    Twins(gpu, drafting, size, 40).round()


@DTYPES
@pytest.mark.parametrize("sizes", [(64, 48, 32), (7, 5, 6)])
def test_dtypes(gpu, compute, sizes):
    rng = np.random.default_rng(1)
    drafting = reference.random_drafting(rng, 2, 5, 4, 900, "ordinary", 130, compute, sizes)
    Twins(gpu, drafting, 20, 24).round()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize(("codes", "group"), [("int8", None), ("int4", 64)])
def test_tokens_are_looked_up_in_packed_tables(gpu, codes, group, pieces, dtype):
    """Also in those of several GPUs."""
    compute, rng = (np.float16 if dtype == "float16" else np.uint16), np.random.default_rng(5)
    drafting = reference.random_drafting(rng, 2, 5, 4, 900, "ordinary", 130, compute, (320, 48, 32))
    weight = random_packed(1800, 320, group, False, dtype, codes=codes)
    drafting.tables = drafting.tables._replace(embedding=compute_bits(weight.values(), dtype)[0])
    twins = Twins(gpu, drafting, 20, 24)
    table = packed_copy(gpu, weight, dtype)
    if pieces > 1:
        table = shared_table(gpu, [packed_copy(gpu, piece, dtype) for piece in in_pieces(weight, pieces)])
    twins.device["tables"] = twins.device["tables"]._replace(embedding=table)
    twins.round()


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
        drafting.candidates.frontiers[:, level - 1] = np.where(rng.random(row.shape) < 0.2, strange, row)
    twins = Twins(gpu, drafting, tree_size, 16)
    selected = twins.host["candidates"].selected
    selected[...] = -1
    for b in range(batch):
        chosen = np.sort(rng.permutation(count)[: rng.integers(0, tree_size)])
        selected[b, : chosen.size] = chosen
    gpu.upload(twins.device["candidates"].selected, selected)
    twins.round(dynamic=False)


@pytest.mark.parametrize("kind", ["ordinary", "ties", "equal", "awkward"])
@pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "static"])
@pytest.mark.parametrize(
    ("batch", "top_k", "width", "steps", "rows", "vocabulary"),
    [
        (1, 4, 4, 15, 16, 32_000),
        (2, 1, 1, 7, 16, 9001),
        (3, 10, 6, 5, 6, 900),
        (2, 64, 33, 3, 5, 5000),
        (1, 5, 5, 1, 2, 3),
    ],
)
def test_blocks(gpu, batch, top_k, width, steps, rows, vocabulary, dynamic, kind):
    """What a block's places become, twice, and the tree that is verified of it."""
    rng = np.random.default_rng(top_k)
    drafting = reference.random_drafting(rng, batch, top_k, steps, vocabulary, kind, 300, width=width)
    logits = reference.random_block(rng, drafting, rows, kind)
    twins = Twins(gpu, drafting, min(32, candidate_count(steps, top_k) + 1), 40)
    size = gpu.draft_tree.expand_workspace_size(batch, vocabulary, top_k, rows)
    twins.use_workspace(gpu.zeros((size,), "uint8"))
    twins.host["block"], twins.device["block"] = logits, on_device(gpu, logits)
    if not dynamic:
        twins.host["candidates"].selected[...] = -1
        gpu.upload(twins.device["candidates"].selected, twins.host["candidates"].selected)
    for _ in range(2):
        for kernels, arrays in twins._sides():
            own = drafting.level(steps, dynamic)
            kernels.expand_block(own, arrays["block"], arrays["candidates"], arrays["expansion"])
        twins._compare("expand_block", ("candidates",))
        twins.verify(dynamic, expanded=False)


@DTYPES
@pytest.mark.parametrize("sees_all", [True, False])
@pytest.mark.parametrize("committed", [0, 60, 66, 70, -3])
def test_what_is_read_of_a_block(gpu, committed, sees_all, compute):
    rng = np.random.default_rng(1)
    drafting = reference.random_drafting(rng, 2, 3, 1, 900, "ordinary", 70, compute, (64, 48, 32))
    drafting.committed[:] = committed, 5
    ids = np.asarray([[7], [1 << 20]], np.int32)
    host = ids, drafting.tables, drafting.inputs(6, drafting.committed)
    device = on_device(gpu, host)
    for kernels, arrays in ((TWIN, host), (gpu.draft_tree, device)):
        kernels.prepare_block(Block(11, sees_all), *arrays)
    assert_same(gpu, device[2], host[2], "prepare_block")
    own = device[1].embedding
    middle, inputs = own.shape[0] // 2, on_device(gpu, drafting.inputs(6, drafting.committed))
    tables = device[1]._replace(embedding=shared_table(gpu, [own[:middle], own[middle:]]))
    gpu.draft_tree.prepare_block(Block(11, sees_all), device[0], tables, inputs)
    assert_same(gpu, inputs, host[2], "prepare_block of a table that GPUs share")


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
        twins.use_workspace(workspace)
        twins.round()


def test_nodes_of_a_large_selection_tie(gpu):
    """More candidates than a block keeps in shared memory, most with equal scores, a tree of 1,024 tokens."""
    rng = np.random.default_rng(3)
    drafting = reference.random_drafting(rng, 2, 64, 4, 70, "ties", 1200)
    twins = Twins(gpu, drafting, 1024, 1024)
    twins.round()
    assert drafting.candidates.tokens.shape[1] > 8192
    twins.verify(level=2, expanded=False)


@pytest.mark.parametrize("committed", [0, 60, 66, 70, 75, -3])
def test_masks_at_the_end_of_the_key_range(gpu, committed):
    drafting = reference.random_drafting(np.random.default_rng(4), 1, 3, 3, 20, keys=70)
    drafting.committed[:] = committed
    drafting.tables.position_offsets[:] = 2_000_000_000 if committed == 75 else -50
    Twins(gpu, drafting, 9, 12).round()


def test_captured_round(gpu, caplog):
    """A round in one CUDA graph, where kernels overlap, replayed with other logits each time."""
    rng = np.random.default_rng(5)
    drafting = reference.random_drafting(rng, 2, 6, 4, 6000, keys=256, sizes=(64, 64, 32))
    twins = Twins(gpu, drafting, 30, 32)
    twins.round()

    def step() -> None:
        twins.round_on(gpu.draft_tree, twins.device)

    with caplog.at_level(logging.WARNING):
        launch = gpu.capture(step, "a round of drafting")
    assert not any("capture" in record.message for record in caplog.records)  # kernels may be compiled meanwhile
    for replay in range(20):
        for level, logits in enumerate(drafting.logits, 1):
            logits[...] = reference.random_logits(rng, *logits.shape, ("ordinary", "ties")[replay % 2])
            gpu.upload(twins.device[f"logits {level}"], logits)
        launch()
        twins.round_on(TWIN, twins.host)
        for name, value in twins.host.items():
            if name != "expansion":
                assert_same(gpu, twins.device[name], value, f"replay {replay}: {name}")


def test_limits_are_refused(gpu):
    drafting = reference.random_drafting(np.random.default_rng(6), 1, 3, 2, 9)
    twins = Twins(gpu, drafting, 5, 8)
    twins.use_workspace(gpu.zeros((100,), "uint8"))
    with pytest.raises(KernelError, match=r"workspace has 100 bytes; expected at least"):
        twins.expand(1)
    with pytest.raises(KernelError, match=r"level 33; expected 1 to 32"):
        twins.device["logits 33"] = twins.device["logits 1"]
        twins.expand_on(gpu.draft_tree, twins.device, 33)
    with pytest.raises(KernelError, match=r"K = 65 .*expected 1 to 64"):
        gpu.draft_tree.expand_workspace_size(1, 9, 65)


@pytest.mark.alone
def test_times_of_the_default_tree(gpu):
    """Prints microseconds of each kernel in a CUDA graph (pytest -s); the bounds only catch a kernel gone wrong."""
    rng = np.random.default_rng(8)
    sizes = (2048, 2048, 64)
    drafting = reference.random_drafting(rng, 1, 10, 6, 32_000, keys=1024, compute=np.float16, sizes=sizes)
    twins = Twins(gpu, drafting, 60, 64)
    twins.round()
    side = gpu.draft_tree, twins.device
    bounded_steps = {
        "expand_frontier, root": (lambda: twins.expand_on(*side, 1), 60),
        "expand_frontier, 10 x 32,000": (lambda: twins.expand_on(*side, 6), 60),
        "prepare_proposal": (lambda: twins.propose_on(*side, 5), 40),
        "prepare_verification": (lambda: twins.verify_on(*side), 40),
        "all of a round": (lambda: twins.round_on(*side), 500),
    }
    for name, (step, bound) in bounded_steps.items():
        time = microseconds(gpu, step, name)
        print(f"{name}: {time:.1f} us")
        assert time < bound
