"""The kernels of experts on the GPU: choices equal the twins', and each pair of a row and an expert has the bits of the
dense layer that the expert is.

A launch has addresses alone: what it reads is held here until its results are there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from device_bits import from_bits, relative, to_bits
from expert_cases import ACTIVATIONS, ROUTINGS, dense_values, on_gpu, random_ids, random_layer, random_scores
from experts_twin import NumpyExperts, activated
from gpu_device import device_copy
from packed_weights import GGUF_FORMATS

from edgellm.kernels.decode.contract import MAX_TILED_ROWS, Kept, LinearWeights, NormedInput
from edgellm.kernels.decode.linear import CudaDecodeKernels
from edgellm.kernels.experts.contract import Activation, Addition, Choice, ExpertWeights, Routed, Routing
from edgellm.kernels.experts.launcher import CudaExperts, counter_words
from edgellm.kernels.quantization.packed_weight import PackedWeight

pytestmark = pytest.mark.gpu

EXPERTS, CHOSEN = 6, 3
#: Formats, and the sizes H and I of experts: whole tiles and slices, and others; gpt-oss's sizes.
CASES = [
    ("dense", 512, 256, "float16"),
    ("dense", 200, 24, "bfloat16"),
    ("dense", 2048, 768, "float16"),
    ("int4", 2048, 768, "float16"),
    ("int4", 640, 136, "bfloat16"),
    ("int4 with zeros", 2048, 512, "float16"),
    ("int4 with zeros", 2880, 96, "bfloat16"),
    ("int8", 1024, 768, "float16"),
    ("mxfp4", 2880, 288, "bfloat16"),
    *((kind, 512, 256, "float16") for kind in GGUF_FORMATS),
    *((kind, 1024, 384, "bfloat16") for kind in ("q4_0", "q4_k", "q6_k", "iq4_xs")),
]


def routed_on(gpu: Any, rows: int, chosen: int, shared: bool = False) -> Routed:
    """Room for a choice."""
    own = gpu.zeros((rows,), "float32") if shared else None
    return Routed(gpu.zeros((rows, chosen), "int32"), gpu.zeros((rows, chosen), "float32"), own)


@pytest.mark.parametrize("rows", [1, 5, 64, 300])
@pytest.mark.parametrize("name", ROUTINGS)
def test_the_choice_is_that_of_the_twin(gpu, name: str, rows: int) -> None:
    """Ties and NaN too, and shares with scales; a row's own is the same alone."""
    own, kernels = ROUTINGS[name], CudaExperts(gpu.kernel_module, "float16")
    scores, correction = random_scores(own, rows)
    scores[rows // 2, own.experts // 2] = np.nan
    x = np.random.default_rng(1).standard_normal((rows, 256), np.float32)
    gate = np.random.default_rng(2).standard_normal((1, 256), np.float32) / 16
    shared = device_copy(gpu, to_bits(x, "float16")), device_copy(gpu, to_bits(gate, "float16"))
    for added in (None, correction):
        routed, given = routed_on(gpu, rows, own.chosen, True), device_copy(gpu, scores)
        more = None if added is None else device_copy(gpu, added)
        scales = None if added is None else np.exp(added)
        many = None if scales is None else device_copy(gpu, scales)
        kernels.choose(Choice(own, given, more, shared, scales=many), routed)()
        expected = Routed(*(np.zeros_like(gpu.download(each)) for each in routed if each is not None))
        rounded = tuple(from_bits(to_bits(each, "float16"), "float16") for each in (x, gate))
        NumpyExperts().choose(Choice(own, scores, added, rounded, scales=scales), expected)()
        ids, weights = gpu.download(routed.expert_ids), gpu.download(routed.expert_weights)
        # NumPy's exponentials round otherwise: of neighbours that are as good as equal either is right.
        same = (ids == expected.expert_ids).all(axis=1)
        assert same.mean() > 0.97 and (np.diff(ids, axis=1) > 0).all()
        np.testing.assert_allclose(weights[same], expected.expert_weights[same], rtol=1e-5, atol=1e-9)
        assert np.isnan(weights).any(axis=1).nonzero()[0].tolist() == [rows // 2]
        np.testing.assert_allclose(gpu.download(routed.shared_weights), expected.shared_weights, rtol=1e-5)
        for row in {0, rows - 1} - {rows // 2}:
            alone = routed_on(gpu, 1, own.chosen)
            one = device_copy(gpu, scores[row : row + 1].copy())
            kernels.choose(Choice(own, one, more, scales=many), alone)()
            np.testing.assert_array_equal(gpu.download(alone.expert_ids)[0], ids[row])
            np.testing.assert_array_equal(gpu.download(alone.expert_weights)[0], weights[row])


def test_equal_scores_are_chosen_by_the_lower_ids(gpu) -> None:
    kernels, routed = CudaExperts(gpu.kernel_module, "float16"), routed_on(gpu, 2, 3)
    scores = np.zeros((2, 70), np.float32)
    scores[1, [40, 69]] = 1
    given = device_copy(gpu, scores)
    kernels.choose(Choice(Routing(70, 3), given), routed)()
    assert gpu.download(routed.expert_ids).tolist() == [[0, 1, 2], [0, 40, 69]]


def of_dense_layers(
    gpu: Any, dtype: str, kind: str, weight: np.ndarray, bias: np.ndarray, x: np.ndarray, ids: np.ndarray
) -> np.ndarray:
    """What the kernels of dense layers give of each pair's own row of x [R, k, K]: silu(gate) up, or sums."""
    kernels, sums = CudaDecodeKernels(gpu.kernel_module, dtype, 64), kind == "sums"
    matrices, found = weight.reshape(EXPERTS, -1, weight.shape[1]), {}
    width = matrices.shape[1] if sums else matrices.shape[1] // 2
    for expert in range(EXPERTS):
        found[expert] = LinearWeights(
            device_copy(gpu, to_bits(np.ascontiguousarray(matrices[expert]), dtype)),
            device_copy(gpu, to_bits(np.ascontiguousarray(bias[expert]), dtype)),
        )
    output, results = gpu.empty((1, width), "float32" if sums else dtype), []
    for row, own in enumerate(ids.tolist()):
        for place, expert in enumerate(own):
            one = device_copy(gpu, to_bits(np.ascontiguousarray(x[row, place][None]), dtype))
            if sums:
                kernels.linear_residual(one, found[expert], None, output)()
            else:
                kernels.norm_gate_up(NormedInput(one, None), found[expert], "silu", output)()
            results.append(gpu.download(output)[0])
    return np.stack(results).reshape(*ids.shape, width)


def layers_of(gpu: Any, kind: str, rows: int, columns: int, dtype: str) -> tuple[ExpertWeights, np.ndarray, np.ndarray]:
    """A layer on the GPU, its values and biases."""
    weight = random_layer(EXPERTS, rows, columns, dtype, kind, rows)
    bias = np.random.default_rng(3).standard_normal((EXPERTS, rows), np.float32) / 8
    return on_gpu(gpu, weight, bias, EXPERTS, dtype), dense_values(weight, dtype), bias


@pytest.mark.parametrize("rows", [1, 5, 20, 65])
@pytest.mark.parametrize(("kind", "hidden", "size", "dtype"), CASES)
def test_products_have_the_bits_of_dense_layers(gpu, kind: str, hidden: int, size: int, dtype: str, rows: int) -> None:
    """Of one row, of few, of rows of which more chose an expert than one block multiplies, of more, each by itself."""
    kernels = CudaExperts(gpu.kernel_module, dtype)
    ids = random_ids(EXPERTS, CHOSEN, rows)
    x = np.random.default_rng(4).standard_normal((rows, hidden), np.float32)
    on_device, given = device_copy(gpu, to_bits(x, dtype)), device_copy(gpu, ids)
    layer, values, bias = layers_of(gpu, kind, 2 * size, hidden, dtype)
    inner = gpu.empty((rows, CHOSEN * size), dtype)
    kernels.gate_up(on_device, given, layer, Activation(), inner)()
    pairs = np.repeat(x[:, None], CHOSEN, axis=1)
    expected = of_dense_layers(gpu, dtype, "gated", values, bias, pairs, ids)
    np.testing.assert_array_equal(gpu.download(inner).reshape(expected.shape), expected)

    sums = of_dense_layers(gpu, dtype, "sums", values, bias, pairs, ids)
    for how in ACTIVATIONS[1:]:
        inner = gpu.empty((rows, CHOSEN * 2 * size // how.sums), dtype)
        kernels.gate_up(on_device, given, layer, how, inner)()
        found = from_bits(gpu.download(inner), dtype).reshape(rows, CHOSEN, -1)
        assert relative(found, activated(sums, how)) < (5e-4 if dtype == "float16" else 4e-3)

    layer, values, bias = layers_of(gpu, kind, hidden, size, dtype)
    outputs = gpu.empty((rows, CHOSEN * hidden), "float32")
    y = np.random.default_rng(5).standard_normal((rows, CHOSEN, size), np.float32)
    on_device = device_copy(gpu, to_bits(y, dtype))
    kernels.down(on_device, given, layer, outputs)()
    expected = of_dense_layers(gpu, dtype, "sums", values, bias, y, ids)
    np.testing.assert_array_equal(gpu.download(outputs).reshape(expected.shape), expected)


@pytest.mark.parametrize("kind", ["dense", "int4"])
def test_a_row_has_the_same_bits_among_any_others(gpu, kind: str) -> None:
    """Up to 64 rows of a batch or a tree, and a prompt's; the sum over a row's experts is the twin's."""
    hidden, size, kernels = 512, 128, CudaExperts(gpu.kernel_module, "float16")
    layers = [layers_of(gpu, kind, *sizes, "float16")[0] for sizes in ((2 * size, hidden), (hidden, size))]
    most = 200
    random, ids = np.random.default_rng(6), random_ids(EXPERTS, CHOSEN, most)
    x, residual = (random.standard_normal((most, hidden), np.float32) for _ in range(2))
    weights, shares = random.random((most, CHOSEN), np.float32), random.random(most, np.float32)
    shared = random.standard_normal((most, hidden), np.float32)

    def computed(rows: slice) -> tuple[np.ndarray, np.ndarray]:
        count = len(ids[rows])
        own = Routed(*(device_copy(gpu, each[rows].copy()) for each in (ids, weights, shares)))
        inner, outputs = gpu.empty((count, CHOSEN * size), "float16"), gpu.empty((count, CHOSEN * hidden), "float32")
        given = device_copy(gpu, to_bits(x[rows], "float16"))
        kernels.gate_up(given, own.expert_ids, layers[0], Activation(), inner)()
        kernels.down(inner, own.expert_ids, layers[1], outputs)()
        total, before = gpu.empty((count, hidden), "float32"), device_copy(gpu, residual[rows].copy())
        ends = 0.25, device_copy(gpu, shared[rows].copy())
        kernels.add(outputs, Addition(own, before, total, *ends))()
        if count <= MAX_TILED_ROWS:  # the same in one launch, twice
            counters = gpu.zeros((count, counter_words(hidden)), "uint32")
            products, at_once = gpu.empty(outputs.shape, "float32"), gpu.empty(total.shape, "float32")
            for _ in range(2):
                gpu.upload(at_once, np.full(total.shape, np.nan, np.float32))
                kernels.down_add(inner, layers[1], products, Addition(own, before, at_once, *ends), counters)()
                np.testing.assert_array_equal(gpu.download(at_once), gpu.download(total))
                assert not gpu.download(counters).any()
        return gpu.download(outputs), gpu.download(total)

    products, total = computed(slice(0, most))
    expected = np.zeros_like(total)
    NumpyExperts().add(products, Addition(Routed(ids, weights, shares), residual, expected, 0.25, shared))()
    np.testing.assert_allclose(total, expected, rtol=2e-5, atol=2e-5)
    for rows in (slice(0, 1), slice(1, 3), slice(3, 11), slice(11, 27), slice(27, 91), slice(199, 200)):
        np.testing.assert_array_equal(computed(rows)[1], total[rows])


@pytest.mark.parametrize("rows", [1, 5, 20, 65])
@pytest.mark.parametrize("kind", ["dense", "int4"])
def test_a_rank_multiplies_and_adds_its_own_experts_alone(gpu, kind: str, rows: int) -> None:
    """Of others' pairs nothing is written, nor added of what stands there; its own have the bits of all experts."""
    (first, last), hidden, size, routing = (2, 5), 512, 128, Routing(EXPERTS, CHOSEN)
    kernels, scores = CudaExperts(gpu.kernel_module, "float16"), device_copy(gpu, random_scores(routing, rows)[0])
    whole, own = (routed_on(gpu, rows, CHOSEN) for _ in range(2))
    scales = device_copy(gpu, np.linspace(0.5, 1.5, EXPERTS, dtype=np.float32))
    kernels.choose(Choice(routing, scores, scales=scales), whole)()
    kernels.choose(Choice(routing, scores, own=(first, last), scales=scales), own)()
    ids, weights = gpu.download(whole.expert_ids), gpu.download(whole.expert_weights)
    is_own = (ids >= first) & (ids < last)
    np.testing.assert_array_equal(gpu.download(own.expert_ids), np.where(is_own, ids - first, -1))
    np.testing.assert_array_equal(gpu.download(own.expert_weights), np.where(is_own, weights, 0))
    x = device_copy(gpu, to_bits(np.random.default_rng(4).standard_normal((rows, hidden), np.float32), "float16"))
    found = []
    for routed, begin, end in ((whole, 0, EXPERTS), (own, first, last)):
        layers = []
        for height, columns in ((2 * size, hidden), (hidden, size)):
            weight, part = (
                random_layer(EXPERTS, height, columns, "float16", kind, height),
                (begin * height, end * height),
            )
            cut = weight.rows(*part) if isinstance(weight, PackedWeight) else weight[slice(*part)].copy()
            layers.append(on_gpu(gpu, cut, None, end - begin, "float16"))
        inner, outputs = gpu.empty((rows, CHOSEN * size), "float16"), gpu.empty((rows, CHOSEN * hidden), "float32")
        gpu.upload(outputs, np.full(outputs.shape, np.nan, np.float32))
        kernels.gate_up(x, routed.expert_ids, layers[0], Activation(), inner)()
        kernels.down(inner, routed.expert_ids, layers[1], outputs)()
        total = gpu.empty((rows, hidden), "float32")
        kernels.add(outputs, Addition(routed, None, total, 0.5))()
        products, added, expected = gpu.download(outputs), gpu.download(total), np.zeros((rows, hidden), np.float32)
        on_host = Routed(gpu.download(routed.expert_ids), gpu.download(routed.expert_weights))
        NumpyExperts().add(products, Addition(on_host, None, expected, 0.5))()
        np.testing.assert_allclose(added, expected, rtol=2e-5, atol=2e-5)
        found.append(products.reshape(rows, CHOSEN, hidden))
        if rows <= MAX_TILED_ROWS:  # the same in one launch, twice
            counters, sums = gpu.zeros((rows, counter_words(hidden)), "uint32"), gpu.empty(outputs.shape, "float32")
            for _ in range(2):
                gpu.upload(total, np.full(total.shape, np.nan, np.float32))
                kernels.down_add(inner, layers[1], sums, Addition(routed, None, total, 0.5), counters)()
                np.testing.assert_array_equal(gpu.download(total), added)
                assert not gpu.download(counters).any()
    np.testing.assert_array_equal(found[1][is_own], found[0][is_own])
    assert np.isnan(found[1][~is_own]).all()


@pytest.mark.parametrize(
    ("kind", "name"), [*(("dense", name) for name in ROUTINGS), *(("int4", name) for name in ("qwen3", "lfm2", "odd"))]
)
def test_rows_have_the_same_bits_alone_and_among_others(gpu, kind: str, name: str) -> None:
    """Any number of rows to 64, each with the bits that it has among all: ties, NaN in one row alone, a correction, and
    a shared expert with a gate."""
    own, (hidden, size), most, dtype = ROUTINGS[name], (256, 128) if kind == "int4" else (64, 32), 64, "float16"
    kernels, random = CudaExperts(gpu.kernel_module, dtype), np.random.default_rng(8)
    layers = [
        on_gpu(gpu, random_layer(own.experts, *shape, dtype, kind, 1), None, own.experts, dtype)
        for shape in ((2 * size, hidden), (hidden, size))
    ]
    scores, correction = random_scores(own, most)
    scores[3, own.experts // 2] = np.nan
    x, residual, shared = (random.standard_normal((most, hidden), np.float32) for _ in range(3))
    gate = device_copy(gpu, to_bits(random.standard_normal((1, hidden), np.float32) / 16, dtype))
    added = device_copy(gpu, correction)

    def computed(rows: slice) -> list[np.ndarray]:
        count = len(x[rows])
        given = device_copy(gpu, to_bits(x[rows].copy(), dtype))
        choice = Choice(own, device_copy(gpu, scores[rows].copy()), added, (given, gate))
        routed = routed_on(gpu, count, own.chosen, True)
        kernels.choose(choice, routed)()
        inner, products = (
            gpu.empty((count, own.chosen * size), dtype),
            gpu.empty((count, own.chosen * hidden), "float32"),
        )
        total, beside = gpu.empty((count, hidden), "float32"), device_copy(gpu, shared[rows].copy())
        addition = Addition(routed, device_copy(gpu, residual[rows].copy()), total, 0.5, beside)
        counters = gpu.zeros((count, counter_words(hidden)), "uint32")
        kernels.gate_up(given, routed.expert_ids, layers[0], Activation(), inner)()
        kernels.down_add(inner, layers[1], products, addition, counters)()
        assert not gpu.download(counters).any()
        return [gpu.download(inner), gpu.download(total)]

    expected = computed(slice(0, most))
    assert np.isnan(expected[1]).any(axis=1).nonzero()[0].tolist() == [3]
    for first, count in ((0, 1), (3, 1), (1, 2), (2, 4), (7, 8), (15, 16)):
        rows = slice(first, first + count)
        for values, whole in zip(computed(rows), expected, strict=True):
            np.testing.assert_array_equal(values, whole[rows])


@pytest.mark.parametrize("rows", [1, 2])
def test_overlapping_launches_multiply_by_what_was_just_chosen(gpu, rows: int) -> None:
    """A captured step of router, choice, an expert of all rows, gates and ups, and downs, behind one of other rows,
    some of which run beside others: with the bits of launches that wait for each other."""
    own, hidden, size, dtype = ROUTINGS["qwen3"], 512, 256, "float16"
    kernels, dense = CudaExperts(gpu.kernel_module, dtype), CudaDecodeKernels(gpu.kernel_module, dtype, 64)
    layers = [
        on_gpu(gpu, random_layer(own.experts, *shape, dtype, "dense", 1), None, own.experts, dtype)
        for shape in ((2 * size, hidden), (hidden, size))
    ]
    random = np.random.default_rng(3)
    router, weight, gate = (
        device_copy(gpu, to_bits(random.standard_normal(shape, np.float32) / 16, dtype))
        for shape in ((own.experts, hidden), (hidden,), (1, hidden))
    )
    of_all = [
        LinearWeights(device_copy(gpu, to_bits(random.standard_normal(shape, np.float32) / 16, dtype)))
        for shape in ((2 * size, hidden), (hidden, size))
    ]
    x, shared = (device_copy(gpu, random.standard_normal((rows, hidden), np.float32)) for _ in range(2))
    shared_inner = gpu.empty((rows, size), dtype)
    kept, scores = gpu.empty((rows, hidden), dtype), gpu.empty((rows, own.experts), "float32")
    inner, products = gpu.empty((rows, own.chosen * size), dtype), gpu.empty((rows, own.chosen * hidden), "float32")
    total, counters = gpu.empty((rows, hidden), "float32"), gpu.zeros((rows, counter_words(hidden)), "uint32")
    choice, routed = Choice(own, scores, None, (kept, gate)), routed_on(gpu, rows, own.chosen, True)

    def launches() -> list[Any]:
        return [
            dense.norm_linear([NormedInput(x, weight, 1e-5)], LinearWeights(router), scores, 1.0, Kept(kept)),
            kernels.choose(choice, routed),
            dense.norm_gate_up(NormedInput(kept, None), of_all[0], "silu", shared_inner),
            dense.norm_linear([NormedInput(shared_inner, None)], of_all[1], shared),
            kernels.gate_up(kept, routed.expert_ids, layers[0], Activation(), inner),
            kernels.down_add(inner, layers[1], products, Addition(routed, x, total, 1.0, shared), counters),
        ]

    apart, together = launches(), launches()
    for number in (2, 4):
        together[number].run_beside(together[number - 1])
    for launch in together:
        launch.overlap_previous()
        launch()
    graph = gpu.capture(lambda: [launch() for launch in together], "experts")
    found = []
    for seed in range(4):
        gpu.upload(x, np.random.default_rng(seed).standard_normal((rows, hidden), np.float32))
        graph()
        found.append(gpu.download(total))
        for launch in apart:
            launch()
        np.testing.assert_array_equal(found[-1], gpu.download(total))
    assert (found[0] != found[1]).any()


def test_a_captured_step_serves_any_choice(gpu) -> None:
    hidden, size, rows, kernels = 256, 64, 4, CudaExperts(gpu.kernel_module, "float16")
    layer = layers_of(gpu, "int4", 2 * size, hidden, "float16")[0]
    x = device_copy(gpu, to_bits(np.random.default_rng(7).standard_normal((rows, hidden), np.float32), "float16"))
    given, captured = device_copy(gpu, random_ids(EXPERTS, CHOSEN, rows)), gpu.empty((rows, CHOSEN * size), "float16")
    launch = kernels.gate_up(x, given, layer, Activation(), captured)
    launch()
    graph = gpu.capture(launch, "experts")
    assert graph is not launch, "the step was not captured"
    found = []
    for seed in (1, 2):
        ids = random_ids(EXPERTS, CHOSEN, rows, seed)
        gpu.upload(given, ids)
        graph()
        found.append(gpu.download(captured))
        again, there = gpu.empty((rows, CHOSEN * size), "float16"), device_copy(gpu, ids)
        kernels.gate_up(x, there, layer, Activation(), again)()
        np.testing.assert_array_equal(found[-1], gpu.download(again))
    assert (found[0] != found[1]).any()
