"""A compiler of kernels that is not there, and a build that does as if; `conftest.py` makes it known to all tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import pytest

from edgellm.engines.building import kernels as building
from edgellm.kernels.compiler import CompiledModule, ModuleSource

#: What it says that it compiles for.
ARCHITECTURES = ["sm_80", "sm_86", "sm_87", "sm_120"]


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
