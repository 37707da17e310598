"""Every acceptance kernel on the GPU equals its NumPy twin, bit for bit. Needs a GPU and pycuda."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import random_trees as shared
from gpu_device import cuda_device, device_copy
from gpu_timing import microseconds

from edgellm.kernels.acceptance_interface import NodeDraws, SlotDraws
from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.checks import IN_PROMPT
from edgellm.kernels.errors import KernelError
from edgellm.kernels.numpy_acceptance import NumpyAcceptance
from edgellm.kernels.numpy_kernels import NumpyKernels

pytestmark = pytest.mark.gpu

MAX_BATCH = 8
#: around the size of a vector load, a block, several blocks; last, Llama 3's vocabulary
VOCABULARIES = (1, 3, 7, 130, 2051, 32_001, 128_256)
random_trees = partial(shared.random_trees, least_share=0.5, reach=6)
TWIN, TWIN_KERNELS = NumpyAcceptance(), NumpyKernels()


@pytest.fixture(scope="module")
def gpu():
    """A CUDA context with a stream, the acceptance kernels and a workspace that all calls share."""
    from edgellm.kernels.cuda_acceptance import CudaAcceptance
    from edgellm.kernels.cuda_kernels import CudaKernels
    from edgellm.kernels.launch import KernelModule

    with cuda_device() as device:
        module = KernelModule(device.compute_capability, device.stream.handle)
        device.kernels = CudaKernels(device.stream, module, max_batch=MAX_BATCH * 8)  # nodes of trees are rows, too
        device.acceptance = CudaAcceptance(device.kernels, module)
        device.workspace = device.zeros((1 << 20,), "uint8")
        yield device


@pytest.fixture
def rng():
    return np.random.default_rng(47)


def on_device(gpu, value: Any) -> Any:
    """Arrays (and lists of them) in device memory; uint16 stands for bfloat16. Other arguments as they are."""
    if isinstance(value, list):
        return [on_device(gpu, item) for item in value]
    return device_copy(gpu, value) if isinstance(value, np.ndarray) else value


def assert_equal(gpu, device: Any, host: Any, message: str) -> None:
    if isinstance(host, list):
        for number, (one, other) in enumerate(zip(device, host, strict=True)):
            assert_equal(gpu, one, other, f"{message}[{number}]")
    elif isinstance(host, np.ndarray):
        np.testing.assert_array_equal(gpu.download(device), host, err_msg=message)


def assert_equals_twin(gpu, kernel: str, *arguments: Any, workspace: DeviceArray | None = None) -> None:
    """Run both twice on copies of the arguments and compare every array afterwards, those only read included.

    The second run shows that a kernel leaves its workspace fit for the next.
    """
    for _ in range(2):
        device_arguments = on_device(gpu, list(arguments))
        host_arguments = [_copy(value) for value in arguments]
        device_workspace = [] if workspace is None else [workspace]
        host_workspace = [] if workspace is None else [np.zeros(0, np.uint8)]
        getattr(gpu.acceptance, kernel)(*device_arguments, *device_workspace)
        getattr(TWIN, kernel)(*host_arguments, *host_workspace)
        assert_equal(gpu, device_arguments, host_arguments, kernel)


def _copy(value: Any) -> Any:
    if isinstance(value, list):
        return [_copy(item) for item in value]
    return value.copy() if isinstance(value, np.ndarray) else value


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


def outputs(slots: int, most: int) -> list[np.ndarray]:
    return [np.full((slots, most), 77, np.int32), np.full((slots, most), 77, np.int32), np.full(slots, 77, np.int32)]


def follow_children(rng, drawn, tokens, parents) -> None:
    """Make most nodes draw a token of one of their children, so that walks are long. `drawn` [B, T] in place."""
    for slot, node in np.ndindex(*drawn.shape):
        children = np.flatnonzero(parents[slot] == node)
        if children.size and rng.random() < 0.8:
            drawn[slot, node] = tokens[slot, rng.choice(children)]


@pytest.mark.parametrize(("slots", "size", "vocabulary"), [(1, 64, 128_256), (4, 33, 2051), (3, 7, 5), (2, 130, 1)])
def test_process_tree_logits(gpu, rng, slots, size, vocabulary):
    tokens, _, _, ancestors = random_trees(rng, slots, size, min(vocabulary, 40))
    logits = awkward_logits(rng, slots, size, vocabulary)
    counts = rng.integers(0, 2, (slots, vocabulary)).astype(np.int32)
    counts[rng.random(counts.shape) < 0.2] |= IN_PROMPT
    settings = [
        np.array(values[:slots], np.float32)
        for values in ([1.3, 1, 1, 0.8], [0.2, 0, -0.4, 0], [0.5, 0, 0.1, 0], [0.7, 1, 0, 1.5])
    ]
    assert_equals_twin(gpu, "process_tree_logits", logits, counts, tokens, ancestors, *settings, np.zeros_like(logits))
    arguments = [on_device(gpu, value) for value in (logits, counts, tokens, ancestors, *settings)]
    gpu.acceptance.process_tree_logits(*arguments, arguments[0])
    TWIN.process_tree_logits(logits, counts, tokens, ancestors, *settings, logits)
    np.testing.assert_array_equal(gpu.download(arguments[0]), logits)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize(("slots", "size", "most"), [(1, 64, 7), (4, 9, 3)])
def test_eagle_accept(gpu, rng, slots, size, most, vocabulary):
    tokens, parents, depths, _ = random_trees(rng, slots, size, vocabulary)
    logits = awkward_logits(rng, slots, size, vocabulary)
    drawn = rng.integers(0, vocabulary, (slots, size)).astype(np.int32)
    follow_children(rng, drawn, tokens, parents)
    forced = rng.random((slots, size)) < 0.8
    logits[forced, drawn[forced]] = 50
    tree = (tokens, parents, depths, active_slots(slots))
    assert_equals_twin(gpu, "eagle_accept", logits, *tree, None, *outputs(slots, most), workspace=gpu.workspace)
    mapping = rng.permutation(vocabulary).astype(np.int32)
    assert_equals_twin(gpu, "eagle_accept", logits, *tree, mapping, *outputs(slots, most), workspace=gpu.workspace)


@pytest.mark.parametrize(("slots", "size", "most"), [(1, 1, 1), (5, 60, 7), (3, 1024, 33), (60, 17, 4)])
def test_accept_drawn(gpu, rng, slots, size, most):
    tokens, parents, depths, _ = random_trees(rng, slots, size, 5)
    drawn = rng.integers(0, 6, (slots, size)).astype(np.int32)
    follow_children(rng, drawn, tokens, parents)
    depths[rng.random(depths.shape) < 0.03] += 1
    tree = (tokens, parents, depths, active_slots(slots))
    assert_equals_twin(gpu, "accept_drawn", drawn, *tree, None, *outputs(slots, most))
    mapping = np.array([3, 1, 4, 0], np.int32)  # ids 4 and 5 have no full id
    assert_equals_twin(gpu, "accept_drawn", drawn, *tree, mapping, *outputs(slots, most))


def thresholds_of(rng, rows: np.ndarray) -> np.ndarray:
    """Bounds of top-p and top-k for some rows of [B, T, V], -inf for others."""
    flat = rows.reshape(-1, rows.shape[2])
    count, thresholds = len(flat), np.empty(len(flat), np.float32)
    top_k = np.where(np.arange(count) % 3 == 0, 20, 0).astype(np.int32)
    top_p = np.where(np.arange(count) % 4 == 0, 0.9, 1).astype(np.float32)
    TWIN_KERNELS.filter_threshold(flat, top_k, top_p, np.zeros(count, np.float32), thresholds)
    return thresholds.reshape(rows.shape[:2])


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize(("epsilon", "delta"), [(0.09, 0.3), (1e-6, 1e-3)])
def test_typical_accept(gpu, rng, vocabulary, epsilon, delta):
    slots, size, most = 4, 24, 6
    tokens, parents, depths, _ = random_trees(rng, slots, size, vocabulary)
    rows = awkward_logits(rng, slots, size, vocabulary)
    likely = rng.random((slots, size)) < 0.5
    children = np.argwhere((parents >= 0) & likely)
    rows[children[:, 0], parents[tuple(children.T)], tokens[tuple(children.T)]] = 9
    drawn = rng.integers(0, vocabulary, (slots, size)).astype(np.int32)
    temperature = np.array([1, 1, 0.5, 0], np.float32)
    arguments = (rows, thresholds_of(rng, rows), temperature, drawn, tokens, parents, depths, active_slots(slots))
    results = (epsilon, delta, *outputs(slots, most))
    assert_equals_twin(gpu, "typical_accept", *arguments, *results, workspace=gpu.workspace)


def test_typical_accept_of_the_largest_tree(gpu, rng):
    tokens, parents, depths, _ = random_trees(rng, 2, 1024, 50)
    rows = rng.normal(0, 1, (2, 1024, 50)).astype(np.float32)
    drawn = rng.integers(0, 50, (2, 1024)).astype(np.int32)
    arguments = (rows, np.full((2, 1024), -np.inf, np.float32), np.ones(2, np.float32), drawn)
    tree = (tokens, parents, depths, np.ones(2, np.int32))
    results = (1e-3, 1e-2, *outputs(2, 33))
    assert_equals_twin(gpu, "typical_accept", *arguments, *tree, *results, workspace=gpu.workspace)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_draft_sample(gpu, rng, vocabulary):
    slots, steps = 8, 3
    logits = awkward_logits(rng, slots, 1, vocabulary)[:, 0].copy()
    mapping = (rng.permutation(vocabulary) + 3).astype(np.int32)
    temperature = np.array([1, 0.7, 0, 1.5, 1, 0, 1, 2], np.float32)
    top_k = np.array([0, 40, 0, 5, 0, 3, 0, 0], np.int32)
    top_p = np.array([1, 0.9, 1, 0.5, 1, 1, 0.99, 0.8], np.float32)
    min_p = np.array([0, 0, 0, 0.01, 0.1, 0, 0, 0], np.float32)
    names = (rng.integers(0, 2**64, slots, dtype=np.uint64), np.arange(slots, dtype=np.int32) - 1)
    positions = np.array([0, 1, 2, 3, 2**31 - 1, 5, 6, 7], np.int32)
    workspace = gpu.empty((gpu.acceptance.draft_sample_workspace_size(slots, vocabulary),), "uint8")
    for step in range(steps):
        arguments = (logits, mapping, temperature, top_k, top_p, min_p, *names, positions, step)
        results = (np.full((slots, steps), -5, np.int32), np.full((slots, steps, vocabulary), -5, np.float32))
        with np.errstate(over="ignore"):  # the last position wraps around
            assert_equals_twin(gpu, "draft_sample", *arguments, *results, workspace=workspace)


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
    draw_positions = rng.integers(0, 1000, (slots, size)).astype(np.int32)
    names = (seeds, np.arange(slots, dtype=np.int32), draw_positions, active_slots(slots))
    arguments = (rows, thresholds_of(rng, rows), temperature, tokens, q, target_to_draft, *names)
    assert_equals_twin(gpu, "accept_sampled_chain", *arguments, *outputs(slots, most), workspace=gpu.workspace)


def test_accept_sampled_chain_many_times(gpu, rng):
    """Hundreds of rounds over flat distributions: every kind of end, all equal."""
    slots, steps, vocabulary = 64, 4, 37
    rows = rng.normal(0, 0.7, (slots, steps + 1, vocabulary)).astype(np.float32)
    logits = rows[:, :steps] + rng.normal(0, 0.5, (slots, steps, vocabulary))
    q = np.exp(logits)
    q = (q / q.sum(axis=2, keepdims=True)).astype(np.float32)
    thresholds, ones = np.full((slots, steps + 1), -np.inf, np.float32), np.ones(slots, np.float32)
    identity = np.arange(vocabulary, dtype=np.int32)
    seen = set()
    for number in range(20):
        draws = (q.cumsum(axis=2) < rng.random((slots, steps, 1))).sum(axis=2).clip(max=vocabulary - 1)
        tokens = np.concatenate([np.zeros((slots, 1)), draws], axis=1).astype(np.int32)
        positions = np.tile(np.arange(steps + 1, dtype=np.int32) + 100 * number, (slots, 1))
        names = (np.full(slots, 3, np.uint64), np.arange(slots, dtype=np.int32), positions, np.ones(slots, np.int32))
        results = outputs(slots, steps + 1)
        arguments = (rows, thresholds, ones, tokens, q, identity, *names)
        assert_equals_twin(gpu, "accept_sampled_chain", *arguments, *results, workspace=gpu.workspace)
        TWIN.accept_sampled_chain(*arguments, *results, np.zeros(0, np.uint8))
        seen.update(results[2].tolist())
    assert seen == set(range(1, steps + 2))


@pytest.mark.parametrize("vocabulary", [7, 2051])
def test_acceptance_from_the_logits_on(gpu, rng, vocabulary):
    """accept_draws and accept_sampled_draws. The twins leave rows that no walk visits, so only outputs are compared."""
    slots, size, most, steps = 4, 12, 6, 5
    tokens, parents, depths, ancestors = random_trees(rng, slots, size, vocabulary)
    logits = awkward_logits(rng, slots, size, vocabulary)
    counts = rng.integers(0, 2, (slots, vocabulary)).astype(np.int32)
    penalties = [np.array(values, np.float32) for values in ([1.2, 1, 1, 0.9], [0, 0, 0.3, 0], [0.1, 0, 0, 0])]
    filters = (np.array([0, 5, 0, 0], np.int32), np.array([1, 1, 0.9, 1], np.float32), np.zeros(4, np.float32))
    names = (np.arange(4, dtype=np.uint64), np.arange(4, dtype=np.int32))
    per_slot = SlotDraws(*penalties, np.array([1, 0.7, 1, 0], np.float32), *filters, *names)
    per_node = NodeDraws(*[values.repeat(size) for values in per_slot[3:]])
    thresholds, drawn = np.zeros((slots, size), np.float32), np.zeros((slots, size), np.int32)
    q = rng.random((slots, steps, vocabulary)).astype(np.float32)
    q /= q.sum(axis=2, keepdims=True)
    identity = np.arange(vocabulary, dtype=np.int32)
    lead, tail = (logits, counts, tokens), (depths + 5, active_slots(slots), per_slot, per_node, thresholds)
    calls = {
        "accept_draws": (*lead, parents, depths, ancestors, *tail, drawn),
        "accept_sampled_draws": (*lead, ancestors, q, identity, *tail),
    }
    for kernel, arguments in calls.items():
        host, device = outputs(slots, most), on_device(gpu, outputs(slots, most))
        moved = [type(v)(*on_device(gpu, list(v))) if isinstance(v, tuple) else on_device(gpu, v) for v in arguments]
        copies = [_copy(value) for value in arguments]
        sampled = kernel == "accept_sampled_draws"
        getattr(gpu.acceptance, kernel)(*moved, *device, *([gpu.workspace] if sampled else []))
        getattr(TWIN, kernel)(*copies, *host, *([np.zeros(0, np.uint8)] if sampled else []))
        assert_equal(gpu, device, host, kernel)


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
    pending = np.ones((slots, most + 1, features), dtype)
    assert_equals_twin(gpu, "move_accepted", arrays, start, indices, lengths, nodes, pending)
    few = np.array([1, 0, 2], np.int32)
    assert_equals_twin(gpu, "move_accepted", arrays, start, indices, few, nodes, pending)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint16], ids=["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("width", [1, 6, 64, 6144])
def test_append_pending(gpu, rng, dtype, width):
    slots, size, pending = 3, 20, 7
    hidden = rng.integers(0, 30_000, (slots, size, width)).astype(dtype)
    features = np.ones((slots, pending, width), dtype)
    counts = np.array([2, 0, pending], np.int32)
    state = (np.full((slots, pending), -1, np.int32), counts, np.array([30, 40, 50], np.int32))
    draft = (np.zeros(slots, np.int32), np.zeros((slots, 1), np.int32))
    step = (hidden[:, :1].copy(), np.array([5, 6, 7], np.int32), np.array([1, 1, 1], np.int32))
    assert_equals_twin(gpu, "append_pending", *step, features, *state, *draft)
    assert_equals_twin(gpu, "append_pending", *step[:2], np.array([1, 0, 1], np.int32), features, *state, *draft)


@pytest.mark.parametrize(("slots", "most", "pending"), [(1, 7, 16), (40, 33, 70)])
def test_advance_accepted(gpu, rng, slots, most, pending):
    def integers(high, *shape):
        return rng.integers(0, high, (slots, *shape)).astype(np.int32)

    ids = rng.integers(-1, 12, (slots, most)).astype(np.int32)  # repeated tokens, and some that are none
    lengths = rng.integers(0, most + 1, slots).astype(np.int32)
    state = (integers(9, 1), integers(99), integers(99), integers(3, 10))
    draft = (integers(9, pending), integers(9), integers(9), integers(9, 1))
    arguments = (ids, lengths, integers(2), *state, *draft, integers(9, most + 1))
    assert_equals_twin(gpu, "advance_accepted", *arguments)


def test_wrong_arguments_are_named(gpu):
    def integers(*shape):
        return gpu.zeros(shape, "int32")

    tree = [integers(1, 4) for _ in range(3)]
    results = (integers(1, 3), integers(1, 3), integers(1))
    logits = gpu.zeros((1, 4, 8), "float32")
    with pytest.raises(KernelError, match=r"workspace has 16 bytes; expected at least 224"):
        gpu.acceptance.eagle_accept(logits, *tree, integers(1), None, *results, gpu.zeros((16,), "uint8"))
    with pytest.raises(KernelError, match=r"expected a multiple of 16 bytes"):
        gpu.acceptance.eagle_accept(logits, *tree, integers(1), None, *results, gpu.workspace[8:])
    with pytest.raises(KernelError, match="logits is a ndarray; expected a DeviceArray"):
        gpu.acceptance.eagle_accept(np.zeros((1, 4, 8), np.float32), *tree, integers(1), None, *results, gpu.workspace)
    with pytest.raises(KernelError, match=r"T = 1025; expected at most 1024"):
        wide = [integers(1, 1025) for _ in range(4)]
        gpu.acceptance.accept_drawn(*wide, integers(1), None, *results)


def test_captured_round_and_its_time(gpu, rng, caplog):
    """The kernels after a greedy verification in one CUDA graph equal the twins; prints microseconds (-s)."""
    size, most, vocabulary, width, pending, rows = 64, 7, 128_256, 6144, 16, 1200
    tokens, parents, depths, _ = random_trees(rng, 1, size, vocabulary)
    logits = rng.normal(0, 1, (1, size, vocabulary)).astype(np.float32)
    drawn = rng.integers(0, vocabulary, (1, size)).astype(np.int32)
    follow_children(rng, drawn, tokens, parents)
    logits[0, np.arange(size), drawn[0]] = 50
    values = {
        "logits": logits,
        "tree": [tokens, parents, depths],
        "active": np.ones(1, np.int32),
        "accepted": outputs(1, most),
        "caches": [rng.normal(size=(1, 8, rows, 64)).astype(np.float16) for _ in range(32)],
        "hidden": rng.normal(size=(1, size, width)).astype(np.float16),
        "features": np.zeros((1, pending, width), np.float16),
        "token_ids": np.zeros((1, 1), np.int32),
        "start": np.full(1, 100, np.int32),
        "positions": np.full(1, 101, np.int32),
        "counts": np.zeros((1, vocabulary), np.int32),
        "draft": [
            np.zeros((1, pending), np.int32),
            *(np.zeros(1, np.int32) for _ in range(2)),
            np.zeros((1, 1), np.int32),
        ],
        "emitted": np.zeros((1, most + 1), np.int32),
    }

    def stages(kernels, a, workspace):
        indices, ids, lengths = a["accepted"]
        state = (a["token_ids"], a["start"], a["positions"], a["counts"])
        return {
            "eagle_accept": lambda: kernels.eagle_accept(
                a["logits"], *a["tree"], a["active"], None, *a["accepted"], workspace
            ),
            "move_accepted": lambda: kernels.move_accepted(
                a["caches"], a["start"], indices, lengths, a["hidden"], a["features"]
            ),
            "advance_accepted": lambda: kernels.advance_accepted(
                ids, lengths, a["active"], *state, *a["draft"], a["emitted"]
            ),
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
            assert_equal(gpu, device[name], value, name)
    assert values["emitted"][0, 0] > 1

    def rewind() -> None:
        gpu.upload(device["start"], np.full(1, 100, np.int32))

    for name, stage in {**device_stages, "together": round_on_device}.items():
        time = microseconds(gpu, stage, name, rewind)
        print(f"{name}: {time:.1f} us with 64 nodes and a vocabulary of 128,256")
        assert time < 200
