"""The NumPy twins of the kernels of experts, against the NumPy backend's experts; and which modules there are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from device_weights import to_device_layout
from expert_cases import ACTIVATIONS, ROUTINGS, absent_experts, random_layer, random_scores
from experts_twin import NumpyExperts
from packed_weights import GGUF_FORMATS

from edgellm.engines.backends.executors import SHARED_MEMORY
from edgellm.engines.backends.numpy_nonlinear import mixed
from edgellm.engines.building.needed_kernels import AbsentModule
from edgellm.engines.model.config import Mixture
from edgellm.kernels import nvrtc
from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.compiler import compile_module
from edgellm.kernels.decode.contract import LinearWeights
from edgellm.kernels.errors import KernelError, MissingDependencyError
from edgellm.kernels.experts import launcher
from edgellm.kernels.experts.choice import chosen_experts
from edgellm.kernels.experts.contract import (
    Activation,
    Addition,
    Choice,
    ExpertWeights,
    Routed,
    Routing,
    experts_refusal,
    matrix_refusal,
)
from edgellm.kernels.experts.launcher import CudaExperts
from edgellm.kernels.gpu import absent_gpu
from edgellm.kernels.quantization.device_layout import DeviceLayout, PackedMatrix
from edgellm.kernels.quantization.packed_weight import PackedWeight, WeightFormat

MIXTURES = {
    "normalized": Mixture(7, 3, 16),
    "shares of all": Mixture(7, 2, 16, normalized=False, scale=1.5),
    "sigmoid": Mixture(7, 3, 16, "sigmoid", True, True, 1e-6, 2.0),
    "gpt_oss": Mixture(7, 3, 16, biases=True, limit=0.4),
    "without gates": Mixture(7, 3, 16, "sigmoid", True, scale=2.5, gated=False),
    "gemma4": Mixture(7, 3, 16, beside_mlp=True),
}


@pytest.mark.parametrize("name", ROUTINGS)
def test_the_choice_is_that_of_a_loop(name: str) -> None:
    own = ROUTINGS[name]
    mixture = Mixture(own.experts, own.chosen, 8, "sigmoid" if own.sigmoid else "softmax", True, own.normalized)
    mixture = Mixture(*list(vars(mixture).values())[:6], own.epsilon, own.scale)
    assert mixture.routing == own
    scores, correction = random_scores(own, 40)
    scores[5, 1] = np.nan
    for added in (None, correction):
        ids, weights = chosen_experts(scores, own, added)
        assert np.isnan(weights).any(axis=1).nonzero()[0].tolist() == [5]
        for row in set(range(40)) - {5}:
            given = np.exp(scores[row].astype(np.float64))
            each = given / (1 + given) if own.sigmoid else given / given.sum()
            judged = (each if added is None else each + added).astype(np.float32).tolist()
            best = sorted(sorted(range(own.experts), key=lambda e, judged=judged: (-judged[e], e))[: own.chosen])
            assert ids[row].tolist() == best
            shares = each[best] / (each[best].sum() + own.epsilon) if own.normalized else each[best]
            np.testing.assert_allclose(weights[row], shares * own.scale, rtol=2e-5)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", MIXTURES)
def test_the_sum_is_that_of_the_numpy_backend(name: str, packed: bool) -> None:
    mixture, rows, hidden = MIXTURES[name], 9, 32
    random = np.random.default_rng(2)
    x, scores = random.standard_normal((rows, hidden), np.float32), random_scores(mixture.routing, rows)[0]
    sizes = {"gate_up": (mixture.activation.sums * mixture.size, hidden), "down": (hidden, mixture.size)}
    layers, own = [], []
    for number, (out, inside) in enumerate(sizes.values()):
        weight = random_layer(7, out, inside, "float16", "int4 with zeros" if packed else "dense", number)
        bias = random.standard_normal((7, out), np.float32) if mixture.biases else None
        values = weight.values() if isinstance(weight, PackedWeight) else weight
        layers.append((SimpleNamespace(of=lambda e, values=values, out=out: values[e * out : (e + 1) * out]), bias))
        on_device: Any = weight
        if isinstance(weight, PackedWeight):
            on_device = PackedMatrix(*to_device_layout(weight, "float16"))
        own.append(ExpertWeights(LinearWeights(on_device, bias), 7))

    def linear(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
        return x @ weight.T if bias is None else x @ weight.T + bias

    scales = random.uniform(0.5, 1.5, 7).astype(np.float32) if mixture.beside_mlp else None
    expected = mixed(mixture, x, (scores, None, scales), *layers, linear)
    kernels, chosen = NumpyExperts(), mixture.chosen
    routed = Routed(
        np.zeros((rows, chosen), np.int32), np.zeros((rows, chosen), np.float32), np.zeros(rows, np.float32)
    )
    inner, outputs = np.zeros((rows, chosen * 16), np.float32), np.zeros((rows, chosen * hidden), np.float32)
    gate, shared = random.standard_normal((1, hidden), np.float32), random.standard_normal((rows, hidden), np.float32)
    residual, total = random.standard_normal((rows, hidden), np.float32), np.zeros((rows, hidden), np.float32)
    choice = Choice(mixture.routing, scores, None, (x, gate), scales=scales)
    for launch in (
        kernels.choose(choice, routed),
        kernels.gate_up(x, routed.expert_ids, own[0], mixture.activation, inner),
        kernels.down(inner, routed.expert_ids, own[1], outputs),
        kernels.add(outputs, Addition(routed, residual, total, 0.5, shared)),
    ):
        launch()
    share = 1 / (1 + np.exp(-(x @ gate.T)))
    np.testing.assert_allclose(total, residual + 0.5 * (expected + share * shared), rtol=2e-5, atol=2e-5)
    again, counters = np.zeros_like(total), np.zeros((rows, 4), np.uint32)
    kernels.down_add(inner, own[1], outputs, Addition(routed, residual, again, 0.5, shared), counters)()
    np.testing.assert_array_equal(again, total)
    whole = routed._replace(shared_weights=None)  # without a gate all of what it gives is added
    kernels.add(outputs, Addition(whole, residual, total, 0.5, shared))()
    np.testing.assert_allclose(total, residual + 0.5 * (expected + shared), rtol=2e-5, atol=2e-5)


def test_what_kernels_do_not_take_is_refused_by_name() -> None:
    assert experts_refusal(128, 8) is None and "not 33 of 64" in str(experts_refusal(64, 33))
    packed = DeviceLayout(WeightFormat("int4", 32, False, "float16"), 8 * 24, 64)
    permuted = DeviceLayout(WeightFormat("int4", 32, False, "float16", permuted=True), 8 * 32, 64)
    assert matrix_refusal(48, 64, True, packed) is None and matrix_refusal(32, 64, False, None) is None
    assert "rows in eights, not 12" in str(matrix_refusal(24, 64, True, packed))
    assert "permuted" in str(matrix_refusal(32, 64, True, permuted))
    assert "[32, 60]" in str(matrix_refusal(32, 60, True, None))
    kernels = NumpyExperts()
    x, ids = np.zeros((9000, 8), np.float32), np.zeros((9000, 8), np.int32)
    weights = ExpertWeights(LinearWeights(np.zeros((16, 8), np.float32)), 1)
    with pytest.raises(KernelError, match="72000 products; expected 1 to 65535"):
        kernels.gate_up(x, ids, weights, Activation(), np.zeros((9000, 64), np.float32))()


def asked(architecture: str, dtype: str, kinds: tuple[str, ...], rows: int) -> AbsentModule:
    """A GPU that noted what products of so many rows and experts of such formats ask for, which also counts their
    shared memory."""
    module = AbsentModule(absent_gpu(architecture, 16, SHARED_MEMORY[architecture]))
    kernels = CudaExperts(module, dtype)  # type: ignore[arg-type]

    def array(*shape: int, kind: str = dtype) -> DeviceArray:
        return DeviceArray(1 << 20, shape, kind)

    routed = Routed(array(rows, 8, kind="int32"), array(rows, 8, kind="float32"), array(rows, kind="float32"))
    sums, counters = array(rows, 8 * 2048, kind="float32"), array(rows, 256, kind="uint32")
    total, x = array(rows, 2048, kind="float32"), array(rows, 2048)
    choice = Choice(Routing(128, 8), array(rows, 128, kind="float32"), None, (x, array(1, 2048)))
    kernels.choose(choice, routed)
    kernels.add(sums, Addition(routed, x, total))
    for kind in kinds:
        both = absent_experts(kind, dtype, 16)
        for how in ACTIVATIONS:
            kernels.gate_up(x, routed.expert_ids, both[0], how, array(rows, 8 * 1536 // how.sums))
        kernels.down_add(array(rows, 8 * 768), both[1], sums, Addition(routed, x, total), counters)
    return module


@pytest.mark.parametrize(("rows", "groups"), [(1, 8), (2, 16), (4, 30), (16, 83), (64, 126)])
@pytest.mark.parametrize(("size", "gated"), [((1536, 2048), True), ((2048, 768), False)])
def test_blocks_of_packed_experts_have_room_at_once(
    monkeypatch: pytest.MonkeyPatch, rows: int, groups: int, size: tuple[int, int], gated: bool
) -> None:
    """And the most of what has room: of Qwen3-30B-A3B on an H200."""
    found: list[tuple[str, int, int]] = []

    def launch(module: Any, kernel: Any, grid: tuple[int, int, int], *_: Any) -> None:
        found.append((kernel.expression, *grid[:2]))

    monkeypatch.setattr(launcher, "Launch", launch)
    kernels: Any = CudaExperts(AbsentModule(absent_gpu("sm_90", 132, SHARED_MEMORY["sm_90"])), "float16")  # type: ignore[arg-type]

    def array(*shape: int, kind: str = "float16") -> DeviceArray:
        return DeviceArray(1 << 20, shape, kind)

    layout = DeviceLayout(WeightFormat("int4", 128, False, "float16"), 128 * size[0], size[1], dtype="float16")
    experts = ExpertWeights(LinearWeights(PackedMatrix(layout, array(*layout.shape, kind="uint8"))), 128)
    ids = array(rows, 8, kind="int32")
    if gated:
        kernels.gate_up(array(rows, 2048), ids, experts, Activation(), array(rows, 8 * 768))
    else:
        kernels.down(array(rows, 8 * 768), ids, experts, array(rows, 8 * 2048, kind="float32"))
    ((expression, blocks, pairs),) = found
    room = 132 * int(expression[-2])  # on a multiprocessor, as registers are shared out
    assert pairs == 8 * rows and blocks * groups <= room < (blocks + 1) * groups


@pytest.mark.parametrize(
    ("architecture", "dtype", "kinds", "rows"),
    [
        ("compute_87", "float16", ("int4",), 1),  # as far as PTX, in a third of the time
        pytest.param("sm_90", "bfloat16", ("dense", "mxfp4"), 16, marks=pytest.mark.slow),
        pytest.param("sm_120", "bfloat16", ("q4_k",), 64, marks=pytest.mark.slow),
        *(
            pytest.param(name, "float16", ("dense", "int4", *GGUF_FORMATS), rows, marks=pytest.mark.slow)
            for name in ("sm_87", "sm_110")
            for rows in (1, 16)
        ),
    ],
)
def test_modules_compile_within_the_shared_memory_of_each_device(
    architecture: str, dtype: str, kinds: tuple[str, ...], rows: int
) -> None:
    try:
        nvrtc.find_nvrtc()
    except MissingDependencyError as missing:
        pytest.skip(str(missing))
    sources = asked(architecture.replace("compute", "sm"), dtype, kinds, rows).sources
    assert len(sources) == 2 + 5 * len(kinds)
    for source in sources:
        assert compile_module(source, architecture).code.startswith((b"\x7fELF", b"//"))
