"""Checks that the product goes with the CUDA of JetPack 6, on any machine, without a GPU:

    python tools/deploy/jetpack6.py --requirements       # what to install, but for pycuda, which needs a GPU
    python tools/deploy/jetpack6.py [--all]

The second compares every call and constant of CUDA's driver that the product names with the `cuda.bindings` that are
installed, and compiles a sample of the kernels, or all of them, for Orin with NVRTC 12.6. It ends with 1 where
something does not fit, and says what.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
EXTRA, RELEASE, TARGET = "jetpack6", (12, 6), "sm_87"
#: What the product calls CUDA's driver by.
_DRIVERS = ("driver", "_driver")
#: Those whose calls go through ctypes to the driver's library itself.
_BY_CTYPES = ("kernels/gpu.py",)


class Use(NamedTuple):
    """A name of the driver that the product uses; `arguments` of a call, None for what is no call."""

    name: str
    place: str
    arguments: int | None


def requirements() -> list[str]:
    """Those of the extra, but for pycuda."""
    text = (ROOT / "pyproject.toml").read_text()
    found = re.search(rf"^{EXTRA} = \[(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    assert found is not None
    return [each for each in re.findall(r'"([^"]+)"', found[1]) if not each.startswith("pycuda")]


def driver_uses() -> Iterator[Use]:
    """Every name of `cuda.bindings.driver` in the product."""
    for folder in ("kernels", "engines", "multimodal", "edgellm"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            place = str(path.relative_to(ROOT))
            if place not in _BY_CTYPES:
                yield from _uses_of(ast.parse(path.read_text()), place)


def _uses_of(tree: ast.AST, place: str) -> Iterator[Use]:
    called = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_driver(node.value) and node.attr.lower().startswith("cu"):
            call = called.get(id(node))
            count = len(call.args) + len(call.keywords) if call is not None else None
            yield Use(node.attr, f"{place}:{node.lineno}", count)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute) and _is_driver(node.value.value):
            yield Use(f"{node.value.attr}.{node.attr}", f"{place}:{node.lineno}", None)


def _is_driver(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr in _DRIVERS
    return isinstance(node, ast.Name) and node.id in _DRIVERS


def misfit(use: Use, driver: Any) -> str | None:
    """How a use does not fit the driver's bindings, None if it does."""
    found = driver
    for part in use.name.split("."):
        found = getattr(found, part, None)
        if found is None:
            return f"{use.place}: {use.name} is missing"
    signature = re.match(r"\w+\((.*)\)", (getattr(found, "__doc__", None) or "").partition("\n")[0])
    if use.arguments is None or isinstance(found, type) or signature is None:
        return None
    expected = len(_parameters(signature[1]))
    if use.arguments == expected:
        return None
    return f"{use.place}: {use.name} is called with {use.arguments} arguments, and takes {expected}: {signature[0]}"


def _parameters(signature: str) -> list[str]:
    """Of a signature without its parentheses."""
    flat = re.sub(r"\[[^\[\]]*(?:\[[^\[\]]*\][^\[\]]*)*\]", "", signature)
    return [each for each in flat.split(",") if each.strip()]


def compile_kernels(every: bool) -> None:
    """Compiles kernels for Orin with the compiler of JetPack 6. Raises what the compiler does."""
    from edgellm.kernels.compiler import compile_module
    from tools.deploy.kernel_modules import every_source

    modules = every_source()
    begin, count = time.process_time(), 0
    for module in modules if every else modules[::72]:
        compiled = compile_module(module, TARGET, RELEASE)
        assert compiled.release == RELEASE and compiled.code.startswith(b"\x7fELF")
        count += 1
    seconds = time.process_time() - begin
    print(f"{count} of {len(modules)} modules compiled for {TARGET}, {seconds:.1f} s of processor time")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requirements", action="store_true", help="print what to install")
    parser.add_argument("--all", action="store_true", help="compile all modules of kernels, which takes minutes")
    arguments = parser.parse_args()
    if arguments.requirements:
        print("\n".join(requirements()))
        return 0
    import cuda.bindings
    from cuda.bindings import driver

    uses = list(driver_uses())
    misfits = [found for found in (misfit(use, driver) for use in uses) if found is not None]
    print(f"{len(uses)} uses of {len({use.name for use in uses})} names of cuda.bindings {cuda.bindings.__version__}")
    print("\n".join(misfits), end="\n" if misfits else "")
    compile_kernels(arguments.all)
    return bool(misfits)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    raise SystemExit(main())
