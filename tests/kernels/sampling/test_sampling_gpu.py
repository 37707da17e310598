"""Every CUDA kernel equals its NumPy twin, bit for bit, on random and on awkward inputs. Needs a GPU and pycuda."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from gpu_device import assert_equals_twin as assert_both_equal
from gpu_device import assert_same, cuda_device, device_copy, load_kernels, on_device
from gpu_timing import microseconds
from kernel_bundles import sampling_rows

from edgellm.kernels.errors import KernelError
from edgellm.kernels.sampling.contract import IN_PROMPT, ModelTables, SequenceState, StepInputs
from edgellm.kernels.sampling.twin import NumpySampling

pytestmark = pytest.mark.gpu

MAX_BATCH = 8
#: around the size of a vector load, a warp, a block, several blocks; last, Llama 3's vocabulary
VOCABULARIES = (1, 3, 7, 130, 513, 2051, 4096, 32_001, 128_256)
TWIN = NumpySampling()


@pytest.fixture(scope="module")
def gpu():
    """A CUDA context with a stream, and the kernels loaded into it."""
    with cuda_device() as device:
        load_kernels(device, rows=MAX_BATCH)
        yield device


@pytest.fixture
def random_numbers():
    return np.random.default_rng(20)


def assert_equals_twin(gpu, kernel: str, *arguments, repeats: int = 2) -> None:
    """See `gpu_device.assert_equals_twin`."""
    assert_both_equal(gpu, gpu.kernels, TWIN, kernel, *arguments, repeats=repeats)


def awkward_rows(rng: np.random.Generator, vocabulary: int) -> np.ndarray:
    """Eight rows: ordinary, peaked, flat with ties, all equal, -inf among them, NaN among them, nothing, infinities."""
    rows = rng.normal(0, 3, (8, vocabulary)).astype(np.float32)
    rows[1, rng.integers(vocabulary)] = 60
    rows[2] = np.round(rows[2])
    rows[3] = -0.0
    rows[3, ::2] = 0.0
    rows[4, rng.random(vocabulary) < 0.9] = -np.inf
    rows[5, rng.random(vocabulary) < 0.5] = np.nan
    rows[6] = np.nan
    rows[6, vocabulary // 2 :] = -np.inf
    rows[7, rng.integers(vocabulary, size=2)] = np.inf
    return rows


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_argmax(gpu, random_numbers, vocabulary):
    assert_equals_twin(gpu, "argmax", awkward_rows(random_numbers, vocabulary), np.full(8, -5, np.int32))


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_constrain_logits(gpu, random_numbers, vocabulary, nodes):
    """Rows with a mask, a bias, both, neither, and masks that are shared, full, empty or unknown."""
    logits, words = awkward_rows(random_numbers, vocabulary), -(-vocabulary // 32)
    masks = random_numbers.integers(0, 2**32, (5, words), dtype=np.uint32)
    masks[1] &= random_numbers.integers(0, 2, words).astype(np.uint32) * np.uint32(0xFFFFFFFF)
    masks[2], masks[3] = 0xFFFFFFFF, 0
    mask_rows = np.array([0, 1, -1, 2, 3, 0, -1, 5], np.int32)
    bias = awkward_rows(random_numbers, vocabulary)[: 8 // nodes]
    biased = sampling_rows(8 // nodes, biased=[1, 0, 1, 0, 0, 1, 0, 1][: 8 // nodes])
    for rows in (sampling_rows(8 // nodes), biased):
        assert_equals_twin(gpu, "constrain_logits", logits, mask_rows, masks, bias, rows)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_process_logits(gpu, random_numbers, vocabulary):
    logits = awkward_rows(random_numbers, vocabulary)
    counts = random_numbers.integers(0, 3, logits.shape).astype(np.int32)
    counts[random_numbers.random(logits.shape) < 0.2] |= IN_PROMPT
    repetition = np.array([1, 1, 1.3, 0.7, 1, 1.1, 1, 1.2], np.float32)
    presence = np.array([0, 0, 0.3, 0.1, -0.5, 0, 0, 0], np.float32)
    frequency = np.array([0, 0, 0.7, 0, 0.3, 1.1, 0, 0], np.float32)
    temperature = np.array([1, 0, 0.7, 1.3, 0, 2, 0.1, 0.3], np.float32)
    rows = sampling_rows(
        8,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        temperature=temperature,
    )
    assert_equals_twin(gpu, "process_logits", logits, counts, rows, np.zeros_like(logits))
    shared = sampling_rows(2, repetition_penalty=[1, 1.3], frequency_penalty=[0.5, 0], temperature=[0.7, 2])
    assert_equals_twin(gpu, "process_logits", logits, counts, shared, np.zeros_like(logits))


def test_process_logits_in_place(gpu, random_numbers):
    logits = random_numbers.normal(size=(2, 515)).astype(np.float32)
    counts = random_numbers.integers(0, 2, logits.shape).astype(np.int32)
    rows = sampling_rows(
        2, repetition_penalty=[1.5, 1], presence_penalty=[0.1, 0], frequency_penalty=[0.2, 0], temperature=[0.9, 1]
    )
    target = device_copy(gpu, logits)
    gpu.kernels.process_logits(target, device_copy(gpu, counts), on_device(gpu, rows), target)
    expected = logits.copy()
    TWIN.process_logits(expected, counts, rows, expected)
    np.testing.assert_array_equal(gpu.download(target), expected)


FILTERS = {
    "off": (0, 1.0, 0.0),
    "top_k": (40, 1.0, 0.0),
    "one": (1, 1.0, 0.0),
    "top_p": (0, 0.9, 0.0),
    "almost all": (0, 0.99999, 0.0),
    "tiny top_p": (0, 1e-9, 0.0),
    "zero top_p": (0, 0.0, 0.0),
    "min_p": (0, 1.0, 0.05),
    "top_k and top_p": (50, 0.8, 0.0),
    "wide top_k and top_p": (2000, 0.999, 0.0),
    "all three": (300, 0.95, 0.01),
    "beyond the vocabulary": (1_000_000, 1.0, 1e-40),
}


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("name", FILTERS)
def test_filter_threshold(gpu, random_numbers, name, vocabulary):
    top_k, top_p, min_p = FILTERS[name]
    settings = sampling_rows(8, top_k=top_k, top_p=top_p, min_p=min_p)
    rows = awkward_rows(random_numbers, vocabulary)
    assert_equals_twin(gpu, "filter_threshold", rows, settings, np.zeros(8, np.float32))


@pytest.mark.parametrize("name", FILTERS)
def test_filter_threshold_of_masked_rows(gpu, random_numbers, name):
    """Nothing, one token, about as many as top-k takes, and half of all are left; far apart in one row."""
    top_k, top_p, min_p = FILTERS[name]
    rows = random_numbers.normal(0, 3, (8, 32_003)).astype(np.float32)
    rows[7] *= 100
    for row, left in zip(rows, (0, 1, 2, 49, 50, 51, 16_000, 400), strict=True):
        row[random_numbers.permutation(row.size)[left:]] = -np.inf
    settings = sampling_rows(8, top_k=top_k, top_p=top_p, min_p=min_p)
    assert_equals_twin(gpu, "filter_threshold", rows, settings, np.zeros(8, np.float32))


def test_filter_threshold_mixed_settings(gpu, random_numbers):
    """Rows of one batch with different settings, and values so close that tens of thousands share a bin."""
    columns = zip(("top_k", "top_p", "min_p"), zip(*list(FILTERS.values())[:8], strict=True), strict=True)
    settings = sampling_rows(8, **dict(columns))
    for scale in (1e-3, 1e-6, 30):
        rows = random_numbers.normal(5, scale, (8, 70_003)).astype(np.float32)
        assert_equals_twin(gpu, "filter_threshold", rows, settings, np.zeros(8, np.float32))
        of_slots = sampling_rows(2, top_k=[50, 0], top_p=[0.8, 0.9])
        assert_equals_twin(gpu, "filter_threshold", rows, of_slots, np.zeros(8, np.float32))


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("bound", [-np.inf, 0.0, 4.0])
def test_sample(gpu, random_numbers, vocabulary, bound):
    """Equal tokens, greedy rows beside sampled ones, rows where nothing passes included."""
    rows = awkward_rows(random_numbers, vocabulary)
    thresholds = np.full(8, bound, np.float32)
    temperature = np.array([1, 1, 0, 1, 0.5, 1, 1, 0], np.float32)
    seeds = random_numbers.integers(0, 2**64, 8, dtype=np.uint64)
    sequences = np.array([0, 1, 2, 3, -1, 5, 6, 7], np.int32)
    for position in (0, 1, 2**31 - 1):
        positions = np.full(8, position, np.int32)
        draws = sampling_rows(8, temperature=temperature, seed=seeds, sequence=sequences)
        tokens = np.full(8, -5, np.int32)
        assert_equals_twin(gpu, "sample", rows, thresholds, draws, positions, tokens, repeats=1)
        shared = sampling_rows(4, temperature=temperature[:4], seed=seeds[:4], sequence=sequences[:4])
        assert_equals_twin(gpu, "sample", rows, thresholds, shared, positions, tokens, repeats=1)


def test_sample_many_draws(gpu, random_numbers):
    """Thousands of draws from a flat row, where near ties happen: all equal, as both compute the same bits."""
    rows = random_numbers.normal(0, 0.1, (8, 4099)).astype(np.float32)
    rows_on_device = device_copy(gpu, rows)
    draws = sampling_rows(8, seed=np.arange(8, dtype=np.uint64) << np.uint64(60), sequence=np.arange(8))
    constant = (np.full(8, -np.inf, np.float32), draws)
    constant_on_device = [on_device(gpu, value) for value in constant]
    tokens = np.empty(8, np.int32)
    tokens_on_device = gpu.empty((8,), "int32")
    for position in range(300):
        positions = np.full(8, position, np.int32)
        gpu.kernels.sample(rows_on_device, *constant_on_device, device_copy(gpu, positions), tokens_on_device)
        TWIN.sample(rows, *constant, positions, tokens)
        np.testing.assert_array_equal(gpu.download(tokens_on_device), tokens)


@pytest.mark.parametrize("count", [0, 1, 1000])
def test_count_tokens(gpu, random_numbers, count):
    token_ids = random_numbers.integers(-5, 520, count).astype(np.int32)
    assert_equals_twin(gpu, "count_tokens", token_ids, np.full(513, 9, np.int32))


def sequence_state(rng: np.random.Generator, batch: int, vocabulary: int) -> SequenceState:
    """With active and idle sequences, rings of 3 places at any place."""

    def integers(high, *shape):
        return rng.integers(0, high, (batch, *shape)).astype(np.int32)

    counts = integers(5, vocabulary)
    known = (integers(2), integers(33, 1), integers(99), integers(99), counts)
    return SequenceState(*known, integers(3), integers(9, 3))


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("vocabulary", [1, 513, 32_001])
def test_argmax_that_a_state_takes(gpu, random_numbers, batch, vocabulary):
    rows = awkward_rows(random_numbers, vocabulary)[:batch]
    for _ in range(4):  # each run draws other states
        state = sequence_state(random_numbers, batch, vocabulary)
        assert_equals_twin(gpu, "argmax", rows, np.full(batch, -5, np.int32), state)


@pytest.mark.parametrize("batch", [1, 8])
def test_sample_that_a_state_takes(gpu, random_numbers, batch):
    """The positions of the draw are those of the state, which the same kernel advances."""
    vocabulary = 4099
    rows = random_numbers.normal(0, 3, (batch, vocabulary)).astype(np.float32)
    state = sequence_state(random_numbers, batch, vocabulary)
    draws = sampling_rows(batch, seed=np.arange(batch), sequence=np.arange(batch))
    thresholds, tokens = np.zeros(batch, np.float32), np.zeros(batch, np.int32)
    device_rows, device_thresholds, device_draws, device_tokens, device_state = (
        on_device(gpu, value) for value in (rows, thresholds, draws, tokens, state)
    )
    for _ in range(5):
        positions = device_state.positions
        gpu.kernels.sample(device_rows, device_thresholds, device_draws, positions, device_tokens, device_state)
        TWIN.sample(rows, thresholds, draws, state.positions, tokens, state)
        for device, host in zip([device_tokens, *device_state], [tokens, *state], strict=True):
            np.testing.assert_array_equal(gpu.download(device), host)


def test_tokens_are_emitted_into_memory_that_the_host_sees(gpu, random_numbers):
    """Read after an event, without a copy, while later steps already write other places of the ring."""
    vocabulary, batch = 515, 2
    state = sequence_state(random_numbers, batch, vocabulary)
    state[0][:] = 1
    rows = [random_numbers.normal(size=(batch, vocabulary)).astype(np.float32) for _ in range(5)]
    ring = gpu.host_visible((3, 8), "int32")
    assert not gpu.read(ring).wait().any()
    device_state = SequenceState(*[device_copy(gpu, values) for values in state[:6]], ring[1:3])
    device_rows, tokens = [device_copy(gpu, values) for values in rows], gpu.empty((batch,), "int32")
    unread = []
    for values in device_rows:
        gpu.kernels.argmax(values, tokens, device_state)
        unread.append(gpu.read(ring[1:3]))
    for step, readback in enumerate(unread):
        emitted = readback.wait()
        for b in range(batch):
            assert emitted[b, (state[5][b] + step) % 8] == rows[step][b].argmax()
    assert not gpu.read(ring[0:1]).wait().any()


def test_prepare_step_and_argmax_overlap_in_a_graph(gpu, random_numbers):
    """Both ends of a step back to back: argmax, launched early, still waits for what runs before it."""
    vocabulary = hidden = 2048  # the row of a token stands in for its logits
    steps = 40
    table = random_numbers.normal(size=(vocabulary, hidden)).astype(np.float32)
    state = sequence_state(random_numbers, 1, vocabulary)
    state[0][:], state[2][:] = 1, 0
    device_state = SequenceState(*[device_copy(gpu, values) for values in state])
    device_table, embeds = device_copy(gpu, table), gpu.zeros((1, 1, hidden), "float32")
    rotary = device_copy(gpu, random_numbers.normal(size=(64, 2)).astype(np.float32))
    cos_sin, mask = gpu.zeros((1, 1, 2), "float32"), gpu.zeros((1, 1, 1, 0), "bool")
    tables, tokens = ModelTables(device_table, rotary, gpu.zeros((1,), "int32")), gpu.zeros((1,), "int32")
    inputs = StepInputs(embeds, cos_sin, mask, device_state.kvcache_start_index)

    def step():
        gpu.kernels.prepare_step(tables, device_state.token_ids, inputs)
        gpu.kernels.argmax(embeds.reshape(1, hidden), tokens, device_state)

    step()
    launch = gpu.capture(step, "both ends")
    assert launch is not step
    token = int(table[state[1][0, 0]].argmax())
    for _ in range(steps):
        launch()
        token = int(table[token].argmax())
    assert gpu.download(tokens)[0] == token
    assert gpu.download(device_state.kvcache_start_index)[0] == steps + 1


def test_views_need_no_alignment(gpu, random_numbers):
    """A row of an odd vocabulary starts at any multiple of four bytes."""
    rows = awkward_rows(random_numbers, 4097)
    on_device, tokens = device_copy(gpu, rows), gpu.empty((3,), "int32")
    gpu.kernels.argmax(on_device[3:6], tokens)
    expected = np.empty(3, np.int32)
    TWIN.argmax(rows[3:6], expected)
    np.testing.assert_array_equal(gpu.download(tokens), expected)


def test_wrong_arguments_are_named(gpu):
    logits, tokens = gpu.zeros((MAX_BATCH + 1, 8), "float32"), gpu.zeros((MAX_BATCH + 1,), "int32")
    with pytest.raises(KernelError, match=r"9 rows.*at most 8"):
        gpu.kernels.argmax(logits, tokens)
    with pytest.raises(KernelError, match="tokens has shape"):
        gpu.kernels.argmax(logits[0:2], tokens)
    with pytest.raises(KernelError, match="logits is a ndarray; expected a DeviceArray"):
        gpu.kernels.argmax(np.zeros((1, 8), np.float32), tokens[0:1])


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint16], ids=["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    ("tokens", "keys", "hidden", "rotary"),
    [(1, 1024, 2048, 64), (1, 0, 64, 2), (5, 131, 7, 6), (1, 1, 1, 2), (16, 999, 2050, 128)],
)
def test_prepare_step(gpu, random_numbers, dtype, tokens, keys, hidden, rotary):
    table = random_numbers.integers(0, 30_000, (101, hidden)).astype(dtype)
    token_ids = random_numbers.integers(-2, 104, (4, tokens)).astype(np.int32)
    start, offsets = np.array([0, 3, 130, 7], np.int32), np.array([0, 11, -50, 2_000_000_000], np.int32)
    rope, mask = np.zeros((4, tokens, rotary), dtype), np.ones((4, 1, tokens, keys), bool)
    angles = random_numbers.normal(size=(77, rotary)).astype(np.float32)
    embeds = np.ones((4, tokens, hidden), dtype)
    tables = ModelTables(table, angles, offsets)
    assert_equals_twin(gpu, "prepare_step", tables, token_ids, StepInputs(embeds, rope, mask, start))


def test_captured_sampling_step(gpu, random_numbers, caplog):
    """All kernels of a sampled step in one CUDA graph, replayed: the same tokens as the twin, step after step."""
    vocabulary, batch = 1031, 2
    values = {
        "logits": random_numbers.normal(0, 2, (batch, vocabulary)).astype(np.float32),
        "mask_rows": np.array([-1, 0], np.int32),
        "masks": random_numbers.integers(0, 2**32, (1, 33), dtype=np.uint32),
        "bias": random_numbers.normal(0, 0.01, (batch, vocabulary)).astype(np.float32),
        "rows": sampling_rows(
            2, repetition_penalty=[1.2, 1.1], temperature=[0.9, 0], top_k=[100, 0], top_p=[0.9, 1], seed=[1, 2],
            sequence=[0, 1], biased=[1, 0],
        ),
        "processed": np.zeros((batch, vocabulary), np.float32),
        "thresholds": np.zeros(batch, np.float32),
        "tokens": np.zeros(batch, np.int32),
        "state": sequence_state(random_numbers, batch, vocabulary)._replace(active=np.ones(batch, np.int32)),
    }  # fmt: skip

    def step(kernels, a):
        kernels.constrain_logits(a["logits"], a["mask_rows"], a["masks"], a["bias"], a["rows"])
        kernels.process_logits(a["logits"], a["state"].token_counts, a["rows"], a["processed"])
        kernels.filter_threshold(a["processed"], a["rows"], a["thresholds"])
        drawn = a["processed"], a["thresholds"], a["rows"], a["state"].positions, a["tokens"]
        kernels.sample(*drawn, a["state"])

    device = {name: on_device(gpu, value) for name, value in values.items()}
    with caplog.at_level(logging.WARNING):
        launch = gpu.capture(lambda: step(gpu.kernels, device), "a sampling step")
    assert not caplog.records
    seen = set()
    for _ in range(50):
        launch()
        step(TWIN, values)
        for name, value in values.items():
            assert_same(gpu, device[name], value, name)
        seen.add(tuple(values["tokens"]))
    assert len(seen) > 10


@pytest.mark.alone
def test_time_of_a_large_vocabulary(gpu, random_numbers):
    """Prints microseconds of the kernels in a CUDA graph (pytest -s); the bounds only catch a kernel gone wrong."""
    rows = device_copy(gpu, random_numbers.normal(0, 3, (1, 128_256)).astype(np.float32))
    tokens, thresholds = gpu.zeros((1,), "int32"), gpu.zeros((1,), "float32")
    draws = on_device(gpu, sampling_rows(1, top_k=50, top_p=0.9, seed=1))
    bounded_steps = {
        "argmax": (lambda: gpu.kernels.argmax(rows, tokens), 50),
        "filter_threshold": (lambda: gpu.kernels.filter_threshold(rows, draws, thresholds), 300),
        "sample": (lambda: gpu.kernels.sample(rows, thresholds, draws, tokens, tokens), 100),
    }
    for name, (step, bound) in bounded_steps.items():
        time = microseconds(gpu, step, name)
        print(f"{name}: {time:.1f} us at a vocabulary of 128,256")
        assert time < bound


def test_a_failed_launch_leaves_a_clean_workspace(gpu, random_numbers, monkeypatch):
    """The second of the filter's three launches fails; the next call finds nothing of the first."""
    rows = awkward_rows(random_numbers, 4096)
    settings = sampling_rows(8, top_k=40, top_p=0.9)
    arguments = [on_device(gpu, value) for value in (rows, settings, np.zeros(8, np.float32))]
    function = gpu.kernels._module.function

    def failing(kernel, shared_bytes):
        if kernel.expression == "filter_histogram":
            raise KernelError("the launch is made to fail")
        return function(kernel, shared_bytes)

    with monkeypatch.context() as patch:
        patch.setattr(gpu.kernels._module, "function", failing)
        with pytest.raises(KernelError, match="made to fail"):
            gpu.kernels.filter_threshold(*arguments)
    assert not gpu.download(gpu.kernels._workspace).any()
    assert_equals_twin(gpu, "filter_threshold", rows[::-1].copy(), settings, np.zeros(8, np.float32))
