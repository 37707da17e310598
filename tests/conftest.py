"""Fixtures and options that all tests share."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from edgellm.engines.gpu import find_gpu


@pytest.fixture(scope="session", autouse=True)
def private_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep plans, kernels and digests of the tests out of the user's cache directory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGELLM_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where they cannot run, with the reason."""
    if find_gpu() is None:
        reason = "no NVIDIA GPU (no driver, or it shows no device)"
    elif importlib.util.find_spec("pycuda") is None:
        reason = "pycuda is not installed: pip install 'edgellm[gpu]'"
    else:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout that the tests lie in."""
    return Path(__file__).parent.parent
