"""How Python finds the package: in a checkout's root, beside an installation, and as a program."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from linked_environment import first_in_path

import edgellm

FOLDERS = ("engines", "kernels", "multimodal", "configs")
#: Where the packages of one process come from.
ORIGINS = """
import edgellm, edgellm.engines.errors, edgellm.kernels.errors, edgellm.engines.errors
from importlib import resources
print(edgellm.__file__, edgellm.engines.errors.__file__, edgellm.kernels.errors.__file__,
      edgellm.engines.errors.__file__, resources.files("edgellm.configs") / "defaults.yaml", sep="\\n")
"""


@pytest.fixture(scope="session")
def installation(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for Python's path with the package as a wheel lays it out, and decoys beside it."""
    site = tmp_path_factory.mktemp("site")
    ignored = shutil.ignore_patterns("__pycache__", "shipped")
    shutil.copytree(repository / "edgellm", site / "edgellm", ignore=ignored)
    for folder in FOLDERS:
        shutil.copytree(repository / folder, site / "edgellm" / folder, ignore=ignored)
    for decoy in ("engines", "tools", "tests"):
        (site / decoy).mkdir()
        (site / decoy / "decoy.py").touch()
    (site / "pyproject.toml").touch()
    return site


def run(folder: Path, installation: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | first_in_path(installation)
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def origins(folder: Path, installation: Path) -> list[Path]:
    done = run(folder, installation, "-c", ORIGINS)
    assert done.returncode == 0, done.stderr
    return [Path(line) for line in done.stdout.splitlines()]


def test_in_a_checkout_everything_is_its_own(repository: Path, installation: Path) -> None:
    assert all(path.is_relative_to(repository) for path in origins(repository, installation))


def test_elsewhere_everything_is_the_installation_s(installation: Path, tmp_path: Path) -> None:
    assert all(path.is_relative_to(installation) for path in origins(tmp_path, installation))


@pytest.mark.parametrize("program", [["-m", "edgellm"], ["tools/bench/cpu_speed.py"]])
def test_programs_start_in_a_checkout(repository: Path, installation: Path, program: list[str]) -> None:
    done = run(repository, installation, *program, "--help")
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout or "usage" in done.stdout


def test_another_checkout_s_editable_installation_lends_nothing(repository: Path, tmp_path: Path) -> None:
    """The finder of an editable installation knows the packages below `edgellm` by their names."""
    checkout = tmp_path / "checkout"
    ignored = shutil.ignore_patterns("__pycache__", "shipped")
    for folder in ("edgellm", *FOLDERS):
        shutil.copytree(repository / folder, checkout / folder, ignore=ignored)
    lender = f"""
import sys
from importlib.machinery import PathFinder
class Editable:
    def find_spec(name, path=None, target=None):
        parent, _, folder = name.partition(".")
        lent = parent == "edgellm" and folder in {FOLDERS}
        return PathFinder.find_spec(name, [{str(repository)!r}]) if lent else None
sys.meta_path.append(Editable)
"""
    done = run(checkout, tmp_path / "nothing", "-c", lender + ORIGINS)
    assert done.returncode == 0, done.stderr
    assert all(Path(line).is_relative_to(checkout) for line in done.stdout.splitlines())


@pytest.mark.parametrize("name", ["tools", "tests", "engines.decoy"])
def test_nothing_beside_an_installation_is_a_part_of_it(installation: Path, tmp_path: Path, name: str) -> None:
    done = run(tmp_path, installation, "-c", f"import edgellm.{name}")
    assert done.returncode == 1
    assert f"No module named 'edgellm.{name}'" in done.stderr


@pytest.mark.parametrize("name", ["tools", "tests", "docs"])
def test_of_a_checkout_four_folders_are_parts(repository: Path, installation: Path, name: str) -> None:
    done = run(repository, installation, "-c", f"import edgellm.{name}")
    assert done.returncode == 1
    assert f"No module named 'edgellm.{name}'" in done.stderr


def test_every_public_name_loads_and_is_named_once() -> None:
    names = edgellm.__all__
    assert sorted(names) == sorted(set(names))
    assert {name: getattr(edgellm, name).__class__.__name__ for name in names}.keys() == set(names)
    assert set(edgellm._MODULES) == set(names)
