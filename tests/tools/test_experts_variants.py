"""Tries of experts' kernels: their edits fit what ships, and are compiled."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgellm.engines.building.needed_kernels import AbsentModule
from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.compiler import compile_module
from edgellm.kernels.errors import MissingDependencyError
from edgellm.kernels.gpu import absent_gpu
from edgellm.kernels.nvrtc import find_nvrtc

BENCH = Path(__file__).parents[2] / "tools" / "bench"


def test_tries_of_one_row_are_made_and_the_most_edited_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    tool: Any = __import__("experts_variants")
    gpu = absent_gpu("sm_90", 132, 227 << 10)
    memory = dict.fromkeys(("empty", "zeros"), lambda shape, dtype: DeviceArray(1 << 20, tuple(shape), dtype))
    device = SimpleNamespace(**memory, upload=lambda *given: None, copy=lambda *given: None)
    options = argparse.Namespace(experts=128, chosen=8, hidden=2048, size=768, sort_from=math.inf)
    module = AbsentModule(gpu)
    tried = tool.Tried(tool.Bench(device, module, options, "int4"), 1)
    tries = tool.variants(1, 2048, 768)
    launches = [len(tried.launches(each)[0]) for each in tries]
    assert launches == [2 if each.routes == 2 else 3 for each in tries]
    routed = [source for source in module.sources if source.name.startswith("routed")]
    assert {dict(source.macros)["HOST_ROUTES"] for source in routed} == {1, 2}
    try:
        find_nvrtc()
    except MissingDependencyError as error:
        pytest.skip(str(error))
    made = compile_module(routed[-1], "sm_90")
    assert "routed_gated" in made.lowered_names[routed[-1].expressions[0]]
