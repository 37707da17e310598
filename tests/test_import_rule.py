"""The layers: which part may import which, and what must not be imported before it is asked for."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Collection
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

LAYERS = ("kernels", "engines", "multimodal", "edgellm")
#: Loaded only when a GPU backend is asked for.
GPU_MODULES = ("pycuda", "cuda", "tensorrt", "tensorrt_rtx", "tensorrt_rtx_bindings")
TOOLS_ONLY = ("torch", "transformers")


def _sources(repository: Path) -> list[tuple[str, Path]]:
    return [(layer, path) for layer in LAYERS for path in sorted((repository / layer).rglob("*.py"))]


@cache
def _told(text: str) -> list[tuple[ast.AST, bool]]:
    """The imports of a source, and its strings with a dot, each with whether it stands at the top."""
    tree = ast.parse(text)
    top = {id(node) for node in ast.iter_child_nodes(tree)}
    return [
        (node, id(node) in top)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom)) or (isinstance(node, ast.Constant) and "." in str(node.value))
    ]


def _imports(text: str, known: Collection[str] = ()) -> list[tuple[str, int, bool]]:
    """(module, line, whether at the top of the file) of every import, and of every string among `known`."""
    found = []
    for node, at_top in _told(text):
        if isinstance(node, ast.Constant) and node.value in known:
            found.append((node.value, node.lineno, False))
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno, at_top) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}"
            found += [(f"{node.module}.{alias.name}", node.lineno, at_top) for alias in node.names]
    return found


def _layer_of(module: str) -> str | None:
    parts = module.split(".")
    if parts[0] in ("engines", "kernels", "multimodal", "configs"):
        return "by its bare name"
    if parts[0] != "edgellm" or parts[1:2] == ["configs"]:
        return None
    return parts[1] if len(parts) > 1 and parts[1] in LAYERS[:3] else "edgellm"


def test_no_layer_imports_a_later_one(repository: Path) -> None:
    wrong, known = [], {_module_name(layer, path, repository) for layer, path in _sources(repository)}
    for layer, path in _sources(repository):
        for module, line, _ in _imports(path.read_text(), known):
            imported = _layer_of(module)
            if imported is not None and (imported not in LAYERS or LAYERS.index(imported) > LAYERS.index(layer)):
                wrong.append(f"{path.relative_to(repository)}:{line} imports {module}")
    assert not wrong


def _graph(sources: dict[str, str]) -> dict[str, set[str]]:
    """Which modules each module imports, by their names: at the top, in functions, for types alone, or in strings."""
    graph: dict[str, set[str]] = {}
    for module, text in sources.items():
        named = [name for name, _, _ in _imports(text, sources)]
        # `from package import name` imports a module of that name, or the package that has the name
        found = (name if name in sources else name.rpartition(".")[0] for name in named)
        graph[module] = {name for name in found if name in sources} - {module}
    return graph


def _module_name(layer: str, path: Path, repository: Path) -> str:
    parts = path.relative_to(repository).with_suffix("").parts
    parts = parts if layer == "edgellm" else ("edgellm", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _circle(sources: dict[str, str]) -> list[str]:
    try:
        TopologicalSorter(_graph(sources)).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_no_imports_go_in_circles(repository: Path) -> None:
    sources = {_module_name(layer, path, repository): path.read_text() for layer, path in _sources(repository)}
    assert _circle(sources) == []


def _package(module: str) -> str | None:
    """The sub-package of `engines`, `kernels` or `edgellm` that a module lies in; None for modules beside these."""
    parts = module.split(".")[1:]
    depth = 2 if parts[:1] and parts[0] in LAYERS[:3] else 1
    return ".".join(parts[:depth]) if len(parts) > depth else None


def _package_graph(sources: dict[str, str]) -> dict[str, set[str]]:
    """Which sub-packages each sub-package imports from."""
    graph: dict[str, set[str]] = {}
    for module, imported in _graph(sources).items():
        if (package := _package(module)) is not None:
            graph.setdefault(package, set()).update(found for found in map(_package, imported) if found)
            graph[package].discard(package)
    return graph


def test_no_packages_import_each_other(repository: Path) -> None:
    sources = {_module_name(layer, path, repository): path.read_text() for layer, path in _sources(repository)}
    graph = _package_graph(sources)
    assert len(graph) > 20
    TopologicalSorter(graph).prepare()  # names the circle


def test_gpu_modules_are_not_imported_at_the_top_and_tools_not_at_all(repository: Path) -> None:
    wrong = []
    for _, path in _sources(repository):
        for module, line, at_top in _imports(path.read_text()):
            package = module.split(".")[0]
            if (package in GPU_MODULES and at_top) or package in TOOLS_ONLY:
                wrong.append(f"{path.relative_to(repository)}:{line} imports {module}")
    assert not wrong


@pytest.mark.parametrize("module", ["edgellm.kernels", "edgellm.engines", "edgellm"])
def test_importing_a_package_loads_nothing_of_the_api(module: str) -> None:
    program = f"import sys, {module}; print(' '.join(sorted(sys.modules)))"
    loaded = set(
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    )
    assert not loaded & {"edgellm.llm", "numpy", "tokenizers", "typer", *GPU_MODULES}
