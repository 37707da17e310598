"""Every acceptance kernel on the GPU equals its NumPy twin, bit for bit. Needs a GPU and pycuda."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import random_trees as shared
from gpu_device import assert_equals_twin as assert_both_equal
from gpu_device import assert_same, copied, cuda_device, load_kernels, on_device
from gpu_timing import microseconds
from kernel_bundles import accepted_arrays, sampling_rows, sequence_state, tree_nodes

from edgellm.kernels.acceptance.contract import Accepted, Chain, NodeLogits, Pending, TypicalBounds
from edgellm.kernels.acceptance.twin import NumpyAcceptance
from edgellm.kernels.errors import KernelError
from edgellm.kernels.sampling.contract import IN_PROMPT
from edgellm.kernels.sampling.twin import NumpySampling

pytestmark = pytest.mark.gpu

MAX_BATCH = 8
#: around the size of a vector load, a block, several blocks; last, Llama 3's vocabulary
VOCABULARIES = (1, 3, 7, 130, 2051, 32_001, 128_256)
random_trees = partial(shared.random_trees, least_share=0.5, reach=6)
TWIN, TWIN_KERNELS = NumpyAcceptance(), NumpySampling()


@pytest.fixture(scope="module")
def gpu():
    """A CUDA context with a stream, the acceptance kernels and a workspace that all calls share."""
    with cuda_device() as device:
        load_kernels(device, rows=MAX_BATCH * 8)  # nodes of trees are rows, too
        device.workspace = device.zeros((1 << 20,), "uint8")
        yield device


@pytest.fixture
def rng():
    return np.random.default_rng(47)


def assert_equals_twin(gpu, kernel: str, *arguments: Any, workspace: bool = False) -> None:
    """Run both twice on copies of the arguments and compare every array afterwards, those only read included.

    The second run shows that a kernel leaves its `workspace` fit for the next.
    """
    if not workspace:
        assert_both_equal(gpu, gpu.acceptance, TWIN, kernel, *arguments)
        return
    for _ in range(2):
        device, host = on_device(gpu, list(arguments)), copied(list(arguments))
        getattr(gpu.acceptance, kernel)(*device, gpu.workspace)
        getattr(TWIN, kernel)(*host, np.zeros(0, np.uint8))
        assert_same(gpu, device, host, kernel)


def awkward_logits(rng: np.random.Generator, slots: int, size: int, vocabulary: int) -> np.ndarray:
    """Rows [B, T, V] with ties, few values, -inf, NaN, nothing at all and infinities among ordinary ones."""
    rows = rng.normal(0, 2, (slots * size, vocabulary)).astype(np.float32)
    kinds = np.arange(slots * size) % 8
    rows[kinds == 1] = np.round(rows[kinds == 1])
    rows[kinds == 2] = 0.5
    for number in np.flatnonzero(kinds == 3):
        rows[number, rng.random(vocabulary) < 0.8] = -np.inf
    for number in np.flatnonzero(kinds == 4):
        rows[number, rng.random(vocabulary) < 0.5] = np.nan
    rows[kinds == 5, vocabulary // 2 :] = -np.inf
    rows[kinds == 5, : vocabulary // 2] = np.nan
    rows[kinds == 6, rng.integers(vocabulary)] = np.inf
    return rows.reshape(slots, size, vocabulary)


def active_slots(slots: int) -> np.ndarray:
    """All but the second."""
    active = np.ones(slots, np.int32)
    active[1:2] = 0
    return active


def follow_children(rng, drawn, tokens, parents) -> None:
    """Make most nodes draw a token of one of their children, so that walks are long. `drawn` [B, T] in place."""
    for slot, node in np.ndindex(*drawn.shape):
        children = np.flatnonzero(parents[slot] == node)
        if children.size and rng.random() < 0.8:
            drawn[slot, node] = tokens[slot, rng.choice(children)]


@pytest.mark.parametrize(("slots", "size", "vocabulary"), [(1, 64, 128_256), (4, 33, 2051), (3, 7, 5), (2, 130, 1)])
def test_process_tree_logits(gpu, rng, slots, size, vocabulary):
    tree = random_trees(rng, slots, size, min(vocabulary, 40))
    logits = awkward_logits(rng, slots, size, vocabulary)
    counts = rng.integers(0, 2, (slots, vocabulary)).astype(np.int32)
    counts[rng.random(counts.shape) < 0.2] |= IN_PROMPT
    settings = ([1.3, 1, 1, 0.8], [0.2, 0, -0.4, 0], [0.5, 0, 0.1, 0], [0.7, 1, 0, 1.5])
    named = zip(("repetition_penalty", "presence_penalty", "frequency_penalty", "temperature"), settings, strict=True)
    rows = sampling_rows(slots, **{name: values[:slots] for name, values in named})
    assert_equals_twin(gpu, "process_tree_logits", logits, counts, tree, rows, np.zeros_like(logits))
    device = [on_device(gpu, value) for value in (logits, counts, tree, rows)]
    gpu.acceptance.process_tree_logits(*device, device[0])
    TWIN.process_tree_logits(logits, counts, tree, rows, logits)
    np.testing.assert_array_equal(gpu.download(device[0]), logits)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize(("slots", "size", "most"), [(1, 64, 7), (4, 9, 3)])
def test_eagle_accept(gpu, rng, slots, size, most, vocabulary):
    tree = random_trees(rng, slots, size, vocabulary)
    logits = awkward_logits(rng, slots, size, vocabulary)
    drawn = rng.integers(0, vocabulary, (slots, size)).astype(np.int32)
    follow_children(rng, drawn, tree.tokens, tree.parents)
    forced = rng.random((slots, size)) < 0.8
    logits[forced, drawn[forced]] = 50
    outputs = accepted_arrays(slots, most)
    assert_equals_twin(gpu, "eagle_accept", logits, tree, active_slots(slots), outputs, workspace=True)


@pytest.mark.parametrize(("slots", "size", "most"), [(1, 1, 1), (5, 60, 7), (3, 1024, 33), (60, 17, 4)])
def test_accept_drawn(gpu, rng, slots, size, most):
    tree = random_trees(rng, slots, size, 5)
    drawn = rng.integers(0, 6, (slots, size)).astype(np.int32)
    follow_children(rng, drawn, tree.tokens, tree.parents)
    tree.depths[rng.random(tree.depths.shape) < 0.03] += 1
    assert_equals_twin(gpu, "accept_drawn", drawn, tree, active_slots(slots), accepted_arrays(slots, most))


def thresholds_of(rng, rows: np.ndarray) -> np.ndarray:
    """Bounds of top-p and top-k for some rows of [B, T, V], -inf for others."""
    flat = rows.reshape(-1, rows.shape[2])
    count, thresholds = len(flat), np.empty(len(flat), np.float32)
    every = np.arange(count)
    settings = sampling_rows(count, top_k=np.where(every % 3 == 0, 20, 0), top_p=np.where(every % 4 == 0, 0.9, 1))
    TWIN_KERNELS.filter_threshold(flat, settings, thresholds)
    return thresholds.reshape(rows.shape[:2])


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize(("epsilon", "delta"), [(0.09, 0.3), (1e-6, 1e-3)])
def test_typical_accept(gpu, rng, vocabulary, epsilon, delta):
    slots, size, most = 4, 24, 6
    tree = random_trees(rng, slots, size, vocabulary)
    rows = awkward_logits(rng, slots, size, vocabulary)
    likely = rng.random((slots, size)) < 0.5
    children = np.argwhere((tree.parents >= 0) & likely)
    rows[children[:, 0], tree.parents[tuple(children.T)], tree.tokens[tuple(children.T)]] = 9
    drawn = rng.integers(0, vocabulary, (slots, size)).astype(np.int32)
    nodes = NodeLogits(rows, thresholds_of(rng, rows), drawn)
    settings, bounds = sampling_rows(slots, temperature=[1, 1, 0.5, 0]), TypicalBounds(epsilon, delta)
    arguments = (nodes, tree, active_slots(slots), settings, bounds, accepted_arrays(slots, most))
    assert_equals_twin(gpu, "typical_accept", *arguments, workspace=True)


def test_typical_accept_of_the_largest_tree(gpu, rng):
    tree = random_trees(rng, 2, 1024, 50)
    rows = rng.normal(0, 1, (2, 1024, 50)).astype(np.float32)
    drawn = rng.integers(0, 50, (2, 1024)).astype(np.int32)
    nodes = NodeLogits(rows, np.full((2, 1024), -np.inf, np.float32), drawn)
    arguments = (nodes, tree, np.ones(2, np.int32), sampling_rows(2), TypicalBounds(1e-3, 1e-2), accepted_arrays(2, 33))
    assert_equals_twin(gpu, "typical_accept", *arguments, workspace=True)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_draft_sample(gpu, rng, vocabulary):
    slots, steps = 8, 3
    logits = awkward_logits(rng, slots, 1, vocabulary)[:, 0].copy()
    mapping = (rng.permutation(vocabulary) + 3).astype(np.int32)
    rows = sampling_rows(
        slots,
        temperature=[1, 0.7, 0, 1.5, 1, 0, 1, 2],
        top_k=[0, 40, 0, 5, 0, 3, 0, 0],
        top_p=[1, 0.9, 1, 0.5, 1, 1, 0.99, 0.8],
        min_p=[0, 0, 0, 0.01, 0.1, 0, 0, 0],
        seed=rng.integers(0, 2**64, slots, dtype=np.uint64),
        sequence=np.arange(slots) - 1,
    )
    positions = np.array([0, 1, 2, 3, 2**31 - 1, 5, 6, 7], np.int32)
    workspace = gpu.empty((gpu.acceptance.draft_workspace_size(slots, vocabulary),), "uint8")
    for step in range(steps):
        tokens, q = np.full((slots, steps), -5, np.int32), np.full((slots, steps, vocabulary), -5, np.float32)
        chain = Chain(tokens, q, mapping, np.zeros(vocabulary, np.int32))
        for _ in range(2):
            device = [on_device(gpu, value) for value in (logits, rows, positions, chain)]
            gpu.acceptance.draft_sample(step, *device, workspace)
            expected = copied(chain)
            with np.errstate(over="ignore"):  # the last position wraps around
                TWIN.draft_sample(step, logits, rows, positions, expected, np.zeros(0, np.uint8))
            assert_same(gpu, device[3], expected, "draft_sample")


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize(("slots", "size", "steps", "most"), [(8, 6, 5, 6), (3, 8, 4, 3), (2, 40, 39, 33)])
def test_accept_sampled_chain(gpu, rng, slots, size, steps, most, vocabulary):
    """Drafts that are likely, unlikely, impossible, missing; q near p and far from it; greedy slots."""
    if slots * size * vocabulary > 10_000_000:
        pytest.skip("covered by smaller shapes")
    draft_vocabulary = max(1, vocabulary // 2)
    rows = awkward_logits(rng, slots, size, vocabulary)
    draft_to_target = rng.permutation(vocabulary)[:draft_vocabulary]
    target_to_draft = np.full(vocabulary, -1, np.int32)
    target_to_draft[draft_to_target] = np.arange(draft_vocabulary)
    near = np.nan_to_num(rows[:, :1, draft_to_target], nan=-1e30, neginf=-1e30, posinf=30)
    weights = np.exp(near - near.max(axis=2, keepdims=True)) * (0.5 + rng.random((slots, steps, draft_vocabulary)))
    q = (weights / weights.sum(axis=2, keepdims=True)).astype(np.float32)
    chosen = rng.integers(0, draft_vocabulary, (slots, size))
    likely = rng.random((slots, size)) < 0.7
    chosen[:, 1 : steps + 1] = np.where(
        likely[:, 1 : steps + 1], q.argmax(axis=2)[:, : size - 1], chosen[:, 1 : steps + 1]
    )
    tokens = draft_to_target[chosen].astype(np.int32)
    tokens[rng.random(tokens.shape) < 0.05] = -1
    tokens[:, 0] = 0
    temperature = np.ones(slots, np.float32)
    temperature[2::4] = 0
    seeds = rng.integers(0, 2**64, slots, dtype=np.uint64)
    settings = sampling_rows(slots, temperature=temperature, seed=seeds, sequence=np.arange(slots))
    tree = tree_nodes(tokens, draw_positions=rng.integers(0, 1000, (slots, size)).astype(np.int32))
    nodes = NodeLogits(rows, thresholds_of(rng, rows), np.zeros((slots, size), np.int32))
    chain = Chain(np.zeros((slots, steps), np.int32), q, draft_to_target.astype(np.int32), target_to_draft)
    arguments = (nodes, tree, active_slots(slots), settings, chain, accepted_arrays(slots, most))
    assert_equals_twin(gpu, "accept_sampled_chain", *arguments, workspace=True)


def test_accept_sampled_chain_many_times(gpu, rng):
    """Hundreds of rounds over flat distributions: every kind of end, all equal."""
    slots, steps, vocabulary = 64, 4, 37
    rows = rng.normal(0, 0.7, (slots, steps + 1, vocabulary)).astype(np.float32)
    logits = rows[:, :steps] + rng.normal(0, 0.5, (slots, steps, vocabulary))
    q = np.exp(logits)
    q = (q / q.sum(axis=2, keepdims=True)).astype(np.float32)
    shape, identity = (slots, steps + 1), np.arange(vocabulary, dtype=np.int32)
    nodes = NodeLogits(rows, np.full(shape, -np.inf, np.float32), np.zeros(shape, np.int32))
    chain = Chain(np.zeros((slots, steps), np.int32), q, identity, identity)
    settings, active = sampling_rows(slots, seed=3, sequence=np.arange(slots)), np.ones(slots, np.int32)
    seen = set()
    for number in range(20):
        draws = (q.cumsum(axis=2) < rng.random((slots, steps, 1))).sum(axis=2).clip(max=vocabulary - 1)
        tokens = np.concatenate([np.zeros((slots, 1)), draws], axis=1).astype(np.int32)
        positions = np.tile(np.arange(steps + 1, dtype=np.int32) + 100 * number, (slots, 1))
        results = accepted_arrays(slots, steps + 1)
        arguments = (nodes, tree_nodes(tokens, draw_positions=positions), active, settings, chain, results)
        assert_equals_twin(gpu, "accept_sampled_chain", *arguments, workspace=True)
        TWIN.accept_sampled_chain(*arguments, np.zeros(0, np.uint8))
        seen.update(results.lengths.tolist())
    assert seen == set(range(1, steps + 2))


@pytest.mark.parametrize("vocabulary", [7, 2051])
def test_acceptance_from_the_logits_on(gpu, rng, vocabulary):
    """accept_draws and accept_sampled_draws. The twins leave rows that no walk visits, so only outputs are compared."""
    slots, size, most, steps = 4, 12, 6, 5
    tree = random_trees(rng, slots, size, vocabulary)
    tree = tree._replace(draw_positions=tree.depths + np.int32(5))
    logits = awkward_logits(rng, slots, size, vocabulary)
    counts = rng.integers(0, 2, (slots, vocabulary)).astype(np.int32)
    rows = sampling_rows(
        slots,
        repetition_penalty=[1.2, 1, 1, 0.9],
        presence_penalty=[0, 0, 0.3, 0],
        frequency_penalty=[0.1, 0, 0, 0],
        temperature=[1, 0.7, 1, 0],
        top_k=[0, 5, 0, 0],
        top_p=[1, 1, 0.9, 1],
        seed=np.arange(4),
        sequence=np.arange(4),
    )
    nodes = NodeLogits(logits, np.zeros((slots, size), np.float32), np.zeros((slots, size), np.int32))
    q = rng.random((slots, steps, vocabulary)).astype(np.float32)
    q /= q.sum(axis=2, keepdims=True)
    identity = np.arange(vocabulary, dtype=np.int32)
    chain = Chain(np.zeros((slots, steps), np.int32), q, identity, identity)
    state = sequence_state(slots, active=active_slots(slots), token_counts=counts)
    lead = (nodes, tree, state, rows)
    for kernel, arguments in {"accept_draws": lead, "accept_sampled_draws": (*lead, chain)}.items():
        host = accepted_arrays(slots, most)
        device = on_device(gpu, host)
        moved, copies = [on_device(gpu, value) for value in arguments], [copied(value) for value in arguments]
        sampled = kernel == "accept_sampled_draws"
        getattr(gpu.acceptance, kernel)(*moved, device, *([gpu.workspace] if sampled else []))
        getattr(TWIN, kernel)(*copies, host, *([np.zeros(0, np.uint8)] if sampled else []))
        assert_same(gpu, device, host, kernel)
    assert_equals_twin(gpu, "draw_nodes", *lead)


def pending_arrays(features: np.ndarray) -> Pending:
    """What the draft has not seen, beside these `features` [B, Q, F]."""
    slots, rows = features.shape[:2]
    counts, start = np.zeros(slots, np.int32), np.zeros(slots, np.int32)
    return Pending(features, np.full((slots, rows), -1, np.int32), counts, start, np.zeros((slots, 1), np.int32))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint16], ids=["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("caches", "heads", "width"), [(2, 1, 1), (6, 3, 6), (32, 8, 64), (300, 2, 8)])
def test_move_accepted(gpu, rng, dtype, caches, heads, width):
    slots, size, rows, most, features = 3, 45, 70, 33, (5, 64, 6144)[width % 3]
    arrays = [rng.integers(0, 30_000, (slots + 1, heads, rows, width)).astype(dtype) for _ in range(caches)]
    start = np.array([0, 9, rows - 12], np.int32)  # the last reaches beyond the cache
    lengths = np.array([most, 5, 20], np.int32)
    indices = np.full((slots, most), -1, np.int32)
    for slot, length in enumerate(lengths):
        indices[slot, 1:length] = np.sort(rng.permutation(np.arange(1, 45))[: length - 1])
        indices[slot, 0] = 0
    nodes = rng.integers(0, 30_000, (slots, size, features)).astype(dtype)
    pending = pending_arrays(np.ones((slots, most + 1, features), dtype))
    for counted in (lengths, np.array([1, 0, 2], np.int32)):
        accepted = Accepted(indices, np.zeros_like(indices), counted)
        assert_equals_twin(gpu, "move_accepted", arrays, start, accepted, nodes, pending, False)
        ring = np.array([0, 1009, 2**20 + 59], np.int32)  # of which the tree goes round the end
        assert_equals_twin(gpu, "move_accepted", arrays, ring, accepted, nodes, pending, True)


@pytest.mark.parametrize("swaps", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 33, 70, 100, None])
def test_move_slots(gpu, rng, rows, swaps):
    """Rows of several sizes and dtypes, more arrays than a launch takes, larger ones than its blocks, and numbers."""
    shapes = [(4, 3, 70, 6), (4, 1, 70, 64), (4, 3, 20, 8), *[(4, 2, 70, 8)] * 300, (4, 8, 4096, 128)]
    arrays = [rng.integers(0, 30_000, shape).astype(np.uint16) for shape in shapes]
    arrays += [rng.integers(-127, 128, (4, 2, 70, 8)).astype(np.int8), rng.standard_normal((4, 2, 70, 1), np.float32)]
    arrays += [] if rows is not None else [np.arange(4, dtype=np.int32), rng.standard_normal((4, 96, 4), np.float32)]
    moved = [on_device(gpu, array) for array in arrays]
    for source, target in ((3, 1), (0, 3)):
        gpu.acceptance.move_slots(moved, source, target, rows, swaps)
        for array in arrays:
            part = array if rows is None else array[:, :, :rows]
            part[target], part[source] = part[source].copy(), part[target if swaps else source].copy()
    assert_same(gpu, moved, arrays, "move_slots")


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint16], ids=["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("width", [1, 6, 64, 6144])
def test_append_pending(gpu, rng, dtype, width):
    slots, size, pending = 3, 20, 7
    hidden = rng.integers(0, 30_000, (slots, size, width)).astype(dtype)
    features = np.ones((slots, pending, width), dtype)
    counts = np.array([2, 0, pending], np.int32)
    waiting = pending_arrays(features)._replace(counts=counts)
    step = (hidden[:, :1].copy(), np.array([5, 6, 7], np.int32))
    start = np.array([30, 40, 50], np.int32)
    for active in ([1, 1, 1], [1, 0, 1]):
        state = sequence_state(slots, active=np.array(active, np.int32), kvcache_start_index=start)
        assert_equals_twin(gpu, "append_pending", *step, state, waiting)


@pytest.mark.parametrize(("slots", "most", "pending"), [(1, 7, 16), (40, 33, 70)])
def test_advance_accepted(gpu, rng, slots, most, pending):
    def integers(high, *shape):
        return rng.integers(0, high, (slots, *shape)).astype(np.int32)

    ids = rng.integers(-1, 12, (slots, most)).astype(np.int32)  # repeated tokens, and some that are none
    lengths = rng.integers(0, most + 1, slots).astype(np.int32)
    state = sequence_state(
        slots,
        active=integers(2),
        token_ids=integers(9, 1),
        kvcache_start_index=integers(99),
        positions=integers(99),
        token_counts=integers(3, 10),
    )
    waiting = Pending(
        np.zeros((slots, pending, 1), np.float32), integers(9, pending), *[integers(9)] * 2, integers(9, 1)
    )
    accepted = Accepted(np.zeros_like(ids), ids, lengths)
    assert_equals_twin(gpu, "advance_accepted", accepted, state, waiting, integers(9, most + 1))


def test_wrong_arguments_are_named(gpu):
    tree, results = on_device(gpu, tree_nodes(np.zeros((1, 4), np.int32))), on_device(gpu, accepted_arrays(1, 3))
    logits, active = gpu.zeros((1, 4, 8), "float32"), gpu.zeros((1,), "int32")
    with pytest.raises(KernelError, match=r"workspace has 16 bytes; expected at least 224"):
        gpu.acceptance.eagle_accept(logits, tree, active, results, gpu.zeros((16,), "uint8"))
    with pytest.raises(KernelError, match=r"expected a multiple of 16 bytes"):
        gpu.acceptance.eagle_accept(logits, tree, active, results, gpu.workspace[8:])
    with pytest.raises(KernelError, match="logits is a ndarray; expected a DeviceArray"):
        gpu.acceptance.eagle_accept(np.zeros((1, 4, 8), np.float32), tree, active, results, gpu.workspace)
    with pytest.raises(KernelError, match=r"T = 1025; expected at most 1024"):
        wide = on_device(gpu, tree_nodes(np.zeros((1, 1025), np.int32)))
        gpu.acceptance.accept_drawn(wide.tokens, wide, active, results)


@pytest.mark.alone
def test_captured_round_and_its_time(gpu, rng, caplog):
    """The kernels after a greedy verification in one CUDA graph equal the twins; prints microseconds (-s)."""
    size, most, vocabulary, width, pending, rows = 64, 7, 128_256, 6144, 16, 1200
    tree = random_trees(rng, 1, size, vocabulary)
    logits = rng.normal(0, 1, (1, size, vocabulary)).astype(np.float32)
    drawn = rng.integers(0, vocabulary, (1, size)).astype(np.int32)
    follow_children(rng, drawn, tree.tokens, tree.parents)
    logits[0, np.arange(size), drawn[0]] = 50
    values = {
        "logits": logits,
        "tree": tree,
        "accepted": accepted_arrays(1, most),
        "caches": [rng.normal(size=(1, 8, rows, 64)).astype(np.float16) for _ in range(32)],
        "hidden": rng.normal(size=(1, size, width)).astype(np.float16),
        "pending": pending_arrays(np.zeros((1, pending, width), np.float16)),
        "state": sequence_state(1, vocabulary, kvcache_start_index=np.full(1, 100, np.int32)),
        "emitted": np.zeros((1, most + 1), np.int32),
    }

    def stages(kernels, a, workspace):
        state, accepted = a["state"], a["accepted"]
        return {
            "eagle_accept": lambda: kernels.eagle_accept(a["logits"], a["tree"], state.active, accepted, workspace),
            "move_accepted": lambda: kernels.move_accepted(
                a["caches"], state.kvcache_start_index, accepted, a["hidden"], a["pending"]
            ),
            "advance_accepted": lambda: kernels.advance_accepted(accepted, state, a["pending"], a["emitted"]),
        }

    device = {name: on_device(gpu, value) for name, value in values.items()}
    device_stages = stages(gpu.acceptance, device, gpu.workspace)
    host_stages = stages(TWIN, values, np.zeros(0, np.uint8))

    def round_on_device():
        for stage in device_stages.values():
            stage()

    with caplog.at_level("WARNING"):
        launch = gpu.capture(round_on_device, "a round's acceptance")
    assert not caplog.records
    for _ in range(10):
        launch()
        for stage in host_stages.values():
            stage()
        for name, value in values.items():
            assert_same(gpu, device[name], value, name)
    assert values["emitted"][0, 0] > 1

    def rewind() -> None:
        gpu.upload(device["state"].kvcache_start_index, np.full(1, 100, np.int32))

    for name, stage in {**device_stages, "together": round_on_device}.items():
        time = microseconds(gpu, stage, name, rewind)
        print(f"{name}: {time:.1f} us with 64 nodes and a vocabulary of 128,256")
        assert time < 200
