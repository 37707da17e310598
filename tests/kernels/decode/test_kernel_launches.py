"""Engines of hand-written kernels prepare their launches without a GPU: for every shape that they say they support."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from decode_models import FAMILIES, LLAMA

from edgellm.engines.backends.cuda_decode_engine import CudaDecodeEngine
from edgellm.engines.backends.cuda_draft_engine import CudaDraftEngine
from edgellm.engines.backends.cuda_kernel_engine import CudaKernelEngine
from edgellm.engines.backends.cuda_tiled_engine import CudaTiledEngine, CudaVerifyPasses, decoder_engine_kind
from edgellm.engines.model.config import DraftConfig, EngineShape
from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.decode import attention, linear, tiled_linear
from edgellm.kernels.launch import Kernel

#: Of an H200, of RTX PCs without and with clusters.
GPUS = pytest.mark.parametrize(("shared_limit", "has_clusters"), [(232_448, True), (101_376, False), (101_376, True)])
WIDE = replace(
    LLAMA, hidden_size=2048, intermediate_size=8192, num_heads=32, num_kv_heads=8, head_dim=64, rotary_dim=64
)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[int, int, int], int]]:
    """Name, grid and shared memory of every launch that is prepared."""
    found: list[tuple[str, tuple[int, int, int], int]] = []

    class Launch:
        def __init__(
            self, module: Any, kernel: Kernel, grid: tuple[int, int, int], threads: int, shared: int, *arguments: Any
        ) -> None:
            assert kernel.expression in kernel.source.expressions
            found.append((kernel.expression, grid, shared))

        def overlap_previous(self) -> None:
            pass

        def __call__(self) -> None:
            pass

    for module in (attention, linear, tiled_linear):
        monkeypatch.setattr(module, "Launch", Launch)
    monkeypatch.setattr(tiled_linear, "tensor_map", lambda *arguments: None)
    return found


def enqueue(engine: CudaKernelEngine) -> None:
    """A step on memory that nothing reads."""
    device = SimpleNamespace(zeros=lambda shape, dtype: DeviceArray(1 << 20, shape, dtype))
    engine.attach(device, DeviceArray(1 << 20, (engine.scratch_bytes,), "uint8"))
    engine.bind({name: DeviceArray(1 << 20, *tensor) for name, tensor in engine._tensors.items()})
    engine.enqueue()


def kernels_of(shared_limit: int, has_clusters: bool) -> Any:
    """A module without a GPU."""
    limits = {"multiprocessors": 100, "shared_limit": shared_limit}
    return SimpleNamespace(**limits, has_clusters=has_clusters, can_overlap=has_clusters, load=lambda source: None)


def base_shapes() -> Iterator[EngineShape]:
    yield from (EngineShape("decode", batch, 1, 64, 64) for batch in (1, 2, 3, 8, 16))
    for tokens in (2, 8, 16, 17, 40, 64):
        yield from (EngineShape("verify", batch, tokens, 64, 64, tokens) for batch in (1, 2, 4, 8))
    yield from (EngineShape("prefill", 1, tokens, 64, 64) for tokens in (2, 16))


@GPUS
@pytest.mark.parametrize("family", [*FAMILIES, "wide"])
def test_every_supported_shape_of_the_base_is_prepared(
    launches: list, family: str, shared_limit: int, has_clusters: bool
) -> None:
    kernels, made = kernels_of(shared_limit, has_clusters), set()
    for layers in ((), (0,), (0, 1, 2)):
        config = replace(WIDE if family == "wide" else FAMILIES[family], feature_layers=layers)
        for shape in base_shapes():
            for kind in (CudaDecodeEngine, CudaTiledEngine, CudaVerifyPasses):
                if kind.unsupported(config, shape, "float16", shared_limit) is None:
                    enqueue(kind(kernels, config, shape, "float16"))
                    made.add((kind, shape.phase))
    few = {(CudaDecodeEngine, phase) for phase in ("decode", "verify", "prefill")}
    assert made == few | {(CudaTiledEngine, phase) for phase in ("decode", "verify")} | {(CudaVerifyPasses, "verify")}
    check(launches, shared_limit)


@pytest.mark.parametrize("shared_limit", [232_448, 166_912, 101_376], ids=["h200", "orin", "rtx"])
@pytest.mark.parametrize("hidden_size", [2048, 2560, 3072, 4096])
def test_no_step_of_usual_widths_is_left_to_tensorrt(hidden_size: int, shared_limit: int) -> None:
    """It rounds otherwise: what a draft is accepted for would depend on how many tokens are verified."""
    head_size = 64 if hidden_size == 2048 else 128
    config = replace(WIDE, hidden_size=hidden_size, head_dim=head_size, rotary_dim=head_size)
    most = 32 if head_size == 128 and shared_limit == 101_376 else 64  # attention of more needs more shared memory
    for shape in base_shapes():
        if shape.phase != "prefill" and shape.tokens <= most:
            kind = decoder_engine_kind(config, shape, "float16", shared_limit)
            assert kind.unsupported(config, shape, "float16", shared_limit) is None, shape


def test_the_fastest_engine_that_has_the_memory_is_taken() -> None:
    def kind(shape: EngineShape, shared_limit: int) -> type[CudaKernelEngine]:
        return decoder_engine_kind(replace(WIDE, hidden_size=4096), shape, "float16", shared_limit)

    step, batch = EngineShape("decode", 1, 1, 64, 64), EngineShape("decode", 8, 1, 64, 64)
    chain, small, tree = (EngineShape("verify", 1, tokens, 64, 64, tokens) for tokens in (8, 16, 64))
    assert [kind(shape, 232_448) for shape in (step, batch, chain)] == [CudaDecodeEngine] * 3
    assert [kind(shape, 101_376) for shape in (step, batch, chain)] == [CudaDecodeEngine] + [CudaTiledEngine] * 2
    assert [kind(shape, 232_448) for shape in (small, tree)] == [CudaTiledEngine] * 2
    assert kind(replace(tree, batch=2), 232_448) is CudaVerifyPasses
    assert kind(EngineShape("prefill", 1, 16, 64, 64), 101_376) is CudaDecodeEngine  # whose reason tells why it is not


@GPUS
@pytest.mark.parametrize("norm_before_residual", [False, True])
def test_every_supported_shape_of_the_draft_is_prepared(
    launches: list, norm_before_residual: bool, shared_limit: int, has_clusters: bool
) -> None:
    layers, names = (0, 1, 2), ("model.embed_tokens.weight", "lm_head.weight")
    switches = (True, norm_before_residual, False)
    head = DraftConfig(
        "3", replace(LLAMA, num_layers=1), 50, True, layers, "none", "midlayer.", False, True, *names, *switches
    )
    shapes = [EngineShape("accept", batch, tokens, 64, 64, 1, "draft") for batch in (1, 2, 4) for tokens in (1, 4, 7)]
    shapes += [EngineShape("propose", batch, width, 64, 64, width, "draft") for batch in (1, 2) for width in (1, 8, 10)]
    made = set()
    for shape in shapes:
        if CudaDraftEngine.unsupported(head, shape, "float16", shared_limit) is None:
            enqueue(CudaDraftEngine(kernels_of(shared_limit, has_clusters), head, shape, "float16"))
            made.add(shape)
    # The smaller GPU has no shared memory for more rows of the wide kernels.
    most = 16 if shared_limit == 232_448 else 8
    assert made == {shape for shape in shapes if shape.batch * shape.tokens <= most}
    check(launches, shared_limit)


@pytest.mark.parametrize(
    ("batch", "tokens", "slots"),
    [(4, 64, [1, 1, 1, 1]), (3, 32, [1, 2]), (4, 32, [2, 2]), (8, 16, [4, 4]), (9, 8, [4, 5]), (5, 40, [1] * 5)],
)
def test_passes_cover_every_sequence_once(launches: list, batch: int, tokens: int, slots: list[int]) -> None:
    shape = EngineShape("verify", batch, tokens, 64, 64, tokens)
    engine = CudaVerifyPasses(kernels_of(232_448, True), replace(LLAMA, feature_layers=(0, 1)), shape, "float16")
    enqueue(engine)
    parts = [part for _, part in engine._passes]
    assert [part.shape.batch for part in parts] == slots
    first = 0
    for part in parts:
        for name, array in part._bound.items():
            whole = engine._bound[name]
            of_slots = whole.shape != array.shape or batch == part.shape.batch
            row = whole.nbytes // batch if of_slots else 0
            assert array.pointer == whole.pointer + first * row, name
        assert part._bound["logits"].shape[0] == part._bound["k_cache_0"].shape[0] == part.shape.batch
        first += part.shape.batch
    assert first == batch


def check(launches: list[tuple[str, tuple[int, int, int], int]], shared_limit: int) -> None:
    """What a launch needs lies within what every GPU allows and this one has."""
    assert launches
    for name, (x, y, z), shared in launches:
        assert 1 <= x < 1 << 31 and 1 <= y <= 65_535 and 1 <= z <= 65_535, name
        assert shared <= shared_limit, name
