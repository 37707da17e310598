"""The golden models that see videos, built."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from golden_files import golden_folder

from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.model.limits import EngineLimits


@pytest.fixture(scope="session")
def video_engines(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The engine directory of the golden model of a family."""

    @cache
    def built(family: str) -> Path:
        path = tmp_path_factory.mktemp("video") / family
        build_engine_directory(golden_folder("video") / family, path, EngineLimits(2, 32, 320, image_rows=(64,)), [])
        return path

    return built
