"""What the product asks of CUDA's driver is compared with the bindings that are installed."""

from __future__ import annotations

import ast
from types import SimpleNamespace

import pytest

from tools.deploy.jetpack6 import EXTRA, Use, _uses_of, driver_uses, misfit, requirements


def graph_instantiate() -> None:
    """graph_instantiate(graph: Optional[Dict[str, tuple[int, int]]], unsigned long long flags)"""


DRIVER = SimpleNamespace(cuGraphInstantiate=graph_instantiate, CUresult=SimpleNamespace(CUDA_SUCCESS=0))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("driver.cuGraphInstantiate(graph, 0)", None),
        ("self._driver.cuGraphInstantiate(graph, flags=0)", None),
        ("status != driver.CUresult.CUDA_SUCCESS", None),
        ("driver.cuGraphInstantiate(graph, 0, 0)", "is called with 3 arguments, and takes 2"),
        ("driver.cuGraphInstantiate(graph)", "is called with 1 arguments, and takes 2"),
        ("self.driver.cuGraphLaunch(graph, 0)", "cuGraphLaunch is missing"),
        ("driver.CUresult.CUDA_FAILURE", "CUresult.CUDA_FAILURE is missing"),
    ],
)
def test_a_use_that_does_not_fit_is_said(text: str, found: str | None) -> None:
    reasons = [misfit(use, DRIVER) for use in _uses_of(ast.parse(text), "file.py")]
    assert reasons and [reason for reason in reasons if reason] == [
        reason for reason in reasons if found is not None and reason is not None and found in reason
    ]
    assert any(reasons) == (found is not None)


def test_the_product_fits_the_bindings_that_are_installed() -> None:
    driver = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings are not installed")
    uses = list(driver_uses())
    assert {"cuStreamBeginCapture", "cuGraphInstantiate", "cuLaunchKernelEx"} <= {use.name for use in uses}
    assert [found for found in (misfit(use, driver) for use in uses) if found] == []
    assert misfit(Use("cuStreamBeginCapture", "file.py:1", 1), driver)


def test_what_is_installed_is_the_extra_without_pycuda() -> None:
    found = requirements()
    assert EXTRA == "jetpack6" and any(each.startswith("cuda-bindings") for each in found)
    assert not any(each.startswith("pycuda") for each in found)
