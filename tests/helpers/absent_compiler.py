"""A compiler of kernels that is quick, one that is not there, and a build that does as if; `conftest.py` makes them
known to all tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from edgellm.engines.building import kernels as building
from edgellm.kernels.compiler import CompiledModule, ModuleSource
from edgellm.kernels.gpu import find_gpu
from edgellm.kernels.nvrtc import Compiled, Nvrtc

#: What it says that it compiles for.
ARCHITECTURES = ["sm_80", "sm_86", "sm_87", "sm_120"]


@pytest.fixture(scope="session", autouse=True)
def whole_compiler() -> Iterator[Callable[..., Compiled]]:
    """Without a GPU nothing runs what is compiled: NVRTC leaves its optimizations out, which are more than half of its
    time, and compiles nothing twice. What it does otherwise is what this gives."""
    whole = Nvrtc.compile
    compiled: dict[str, Compiled] = {}

    def quick(self: Nvrtc, name: str, text: str, headers: Any, options: Sequence[str], *asked: Any) -> Compiled:
        if self.release >= (13, 0):
            options = [*options, "--Ofast-compile=max"]
        key = repr((self.release, text, headers, options, asked))
        if key not in compiled:
            compiled[key] = whole(self, name, text, headers, options, *asked)
        return compiled[key]

    with pytest.MonkeyPatch.context() as patch:
        if find_gpu() is None:
            patch.setattr(Nvrtc, "compile", quick)
        yield whole


@pytest.fixture
def optimized(whole_compiler: Callable[..., Compiled], monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are compiled as for a GPU."""
    monkeypatch.setattr(Nvrtc, "compile", whole_compiler)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Nothing is compiled: the names of the modules that would be, with the architecture."""
    found: list[tuple[str, str]] = []

    def compile_nothing(
        sources: Sequence[ModuleSource], architecture: str, release: tuple[int, int]
    ) -> Iterator[tuple[ModuleSource, CompiledModule]]:
        for source in sources:
            found.append((source.name, architecture))
            yield source, CompiledModule(b"\x7fELF" + source.name.encode(), {}, release)

    def find(release: tuple[int, int] | None) -> SimpleNamespace:
        return SimpleNamespace(release=release or (13, 0), architectures=lambda: ARCHITECTURES)

    monkeypatch.setattr(building, "compile_all", compile_nothing)
    monkeypatch.setattr(building, "find_nvrtc", find)
    return found
