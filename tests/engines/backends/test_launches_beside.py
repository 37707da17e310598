"""Launches that run beside the one before them, of which they take nothing, on a GPU that is not there."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from edgellm.engines.backends.kernel_engine import stand_in
from edgellm.engines.building.needed_kernels import AbsentBackend, AbsentModule
from edgellm.engines.families import decoder_config
from edgellm.engines.model.limits import EngineLimits
from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.decode.contract import AddedTo, LinearWeights, NormedInput
from edgellm.kernels.decode.linear import CudaDecodeKernels
from edgellm.kernels.gpu import absent_gpu


def launches_of(folder: Path, shape: str, weights: str) -> list[Any]:
    """Those of a plain step of a model's first four layers."""
    from random_checkpoint import SHAPES, with_layers
    from random_model import random_directory

    config = replace(decoder_config(with_layers(SHAPES[shape], 4)), vocab_size=512)
    limits = EngineLimits(1, 16, 64)
    directory = random_directory(folder, config, limits, "float16", weights)
    gpu = absent_gpu("sm_90", 132, 227 << 10)
    backend = AbsentBackend({"base": config}, directory.limits, "float16", directory.layouts, gpu)
    engine: Any = backend.load_engine(directory.limits.base_shape("decode", 1, 1, 64, 1))
    engine.attach(backend, backend.empty((1 << 32,), "uint8"))
    engine._bound = {name: replace(engine._memory, shape=own[0], dtype=own[1]) for name, own in engine.tensors.items()}
    engine._bound |= {name: stand_in(own, engine._memory) for name, own in directory.layouts.get("base", {}).items()}
    backend.prepare_steps()
    return engine.launches()


def is_beside(launch: Any) -> bool:
    return bool(getattr(launch._arguments[0], "beside", 0))


def kernel(launch: Any) -> str:
    """The kernel's name without where it is, and without its forms."""
    return launch.name.partition("<")[0].rpartition("::")[2]


@pytest.mark.parametrize(
    ("shape", "weights", "expected"),
    [
        ("qwen3-30b-a3b", "float16", {}),
        ("qwen3-30b-a3b", "q4_k_m", {("norm_linear", "norm_linear"): 2}),
        ("qwen3.5-35b-a3b", "float16", {("choose", "norm_gate_up"): 4, ("norm_linear", "dense"): 4}),
        (
            "qwen3.5-35b-a3b",
            "q4_k_m",
            {("norm_linear", "norm_linear"): 1, ("choose", "gate_up"): 4, ("rounded_linear", "expert_gated"): 4},
        ),
    ],
)
def test_what_takes_nothing_of_the_launch_before_runs_beside_it(
    tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch, shape: str, weights: str, expected: dict
) -> None:
    """Layers of several formats, and an expert of all rows beside those that rows choose. Who is run beside waits first
    and is itself beside nothing."""
    monkeypatch.syspath_prepend(str(repository / "tools" / "bench"))
    pairs = [each for each in pairwise(launches_of(tmp_path, shape, weights)) if is_beside(each[1])]
    assert Counter((kernel(before), kernel(launch)) for before, launch in pairs) == expected
    assert not any(is_beside(before) or before._arguments[0].next_early for before, _ in pairs)


def test_nothing_runs_beside_what_adds_to_a_residual_stream() -> None:
    """Nor beside kernels that do not hold back the next one, nor where its own kernel waits first."""

    few = CudaDecodeKernels(AbsentModule(absent_gpu("sm_90", 132, 227 << 10)), "float16", 64)
    x, residual, total = (DeviceArray(place << 20, (1, 64), "float32") for place in (1, 2, 3))
    weight, linear = DeviceArray(1 << 20, (64,), "float16"), LinearWeights(DeviceArray(1 << 20, (64, 64), "float16"))

    def product(added: bool = False) -> Any:
        to = AddedTo(residual, total, weight, 1e-5) if added else None
        return few.norm_linear([NormedInput(x, weight, 1e-5, added=to)], linear, x)

    def norm() -> Any:
        return few.norm(NormedInput(x, weight, 1e-5), DeviceArray(1 << 20, (1, 64), "float16"))

    def beside(launch: Any, before: Any) -> list[tuple[int, int]]:
        launch.run_beside(before)
        given = (each._arguments[0] for each in (launch, before))
        return [(getattr(each, "next_early", 1), getattr(each, "beside", 0)) for each in given]

    late = product()
    assert beside(late, product()) == [(1, 1), (0, 0)]
    assert beside(product(), norm()) == [(1, 1), (0, 0)]
    for launch, before in ((product(), product(added=True)), (norm(), product()), (product(), few.cap_rows(x, 1.0))):
        assert beside(launch, before) == [(1, 0), (1, 0)]
    assert beside(product(), late) == [(1, 0), (1, 1)]
