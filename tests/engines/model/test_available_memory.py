"""Memory that a process may take: of the machine, or of the container or unit that it is in."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgellm.engines.model.memory_plan import available_memory

MIB = 1 << 20


def group(folder: Path, limit: str, used: int, files: int, version: int = 2) -> None:
    """A control group as Linux shows it."""
    folder.mkdir(parents=True, exist_ok=True)
    names = {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache"),
        2: ("memory.max", "memory.current", "file"),
    }
    limit_name, used_name, files_name = names[version]
    (folder / limit_name).write_text(f"{limit}\n")
    (folder / used_name).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon {used - files}\n{files_name} {files}\n")


@pytest.fixture
def processes(tmp_path: Path) -> Path:
    folder = tmp_path / "proc"
    (folder / "self").mkdir(parents=True)
    (folder / "meminfo").write_text("MemTotal: 16777216 kB\nMemFree: 1024 kB\nMemAvailable:  8388608 kB\n")
    return folder


@pytest.mark.parametrize(
    ("own", "version", "place", "expected"),
    [
        ("0::/\n", 2, "", 700),  # a container, which sees its own group as the top
        ("0::/system.slice/edgellm.service\n", 2, "system.slice/edgellm.service", 700),
        ("0::/system.slice/edgellm.service\n", 2, "system.slice", 700),  # what it is in has a limit
        ("0::/not/seen/from/within\n", 2, "", 700),
        ("5:cpu,cpuacct:/\n4:memory:/docker/a\n", 1, "memory/docker/a", 700),
        ("5:cpu,cpuacct:/\n", 1, "memory", 8192),  # its memory is in no group
    ],
)
def test_the_closest_limit_counts(
    processes: Path, tmp_path: Path, own: str, version: int, place: str, expected: int
) -> None:
    (processes / "self/cgroup").write_text(own)
    group(tmp_path / "groups" / place, str(1000 * MIB), 500 * MIB, 200 * MIB, version)
    assert available_memory(processes, tmp_path / "groups") == expected * MIB


def test_a_group_without_a_limit_has_the_machines(processes: Path, tmp_path: Path) -> None:
    (processes / "self/cgroup").write_text("0::/\n")
    group(tmp_path / "groups", "max", 500 * MIB, 200 * MIB)
    assert available_memory(processes, tmp_path / "groups") == 8192 * MIB
    assert available_memory(processes, tmp_path / "nowhere") == 8192 * MIB


def test_the_machine_may_have_less_than_the_limit(processes: Path, tmp_path: Path) -> None:
    (processes / "self/cgroup").write_text("0::/\n")
    group(tmp_path / "groups", str(1 << 50), 0, 0)
    assert available_memory(processes, tmp_path / "groups") == 8192 * MIB
