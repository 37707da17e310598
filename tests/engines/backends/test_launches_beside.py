"""Launches that run beside the one before them, of which they take nothing, on a GPU that is not there."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgellm.engines.backends.kernel_engine import stand_in
from edgellm.engines.building.needed_kernels import AbsentBackend
from edgellm.engines.families import decoder_config
from edgellm.engines.model.limits import EngineLimits
from edgellm.kernels.gpu import absent_gpu
from edgellm.kernels.launch import run_beside


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

    def pair(own: dict[str, int], other: dict[str, int]) -> list[dict[str, int]]:
        made = [SimpleNamespace(_arguments=(SimpleNamespace(**each),)) for each in (own, other)]
        run_beside(*made)
        return [vars(each._arguments[0]) for each in made]

    plain = {"next_early": 1, "beside": 0}
    assert pair(plain, plain) == [{"next_early": 1, "beside": 1}, {"next_early": 0, "beside": 0}]
    assert pair(plain, {"next_early": 1}) == [{"next_early": 1, "beside": 1}, {"next_early": 0}]
    refused = [(plain, plain | {"added": 1}), (plain, {"next_early": 1, "beside": 1}), (plain, {}), ({}, plain)]
    assert [pair(*each) for each in refused] == [[*each] for each in refused]
