"""Checks of the arguments that `SpecDecodeRuntime` takes beside requests."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgellm.drafting.config import DraftingConfig
from edgellm.errors import RequestError, is_whole, require, require_kind, shown
from edgellm.metrics import Metrics
from edgellm.requests import is_list

#: What Linux takes, in bytes.
_LONGEST_PATH, _LONGEST_NAME = 4096, 255


def check_options(
    path: Any,
    vision_path: Any,
    backend: Any,
    executor: Any,
    adapters: Any,
    drafting: Any,
    snapshots: Any,
    budgets: Mapping[str, Any],
    progress: Any,
    metrics: Any,
) -> None:
    """Raise RequestError for an argument of `SpecDecodeRuntime` that is not what it should be; `budgets` by name."""
    check_path("engine_directory", path)
    if vision_path is not None:
        check_path("multimodal_engine_directory", vision_path)
    require(isinstance(backend, str), "backend", backend, "one of auto, numpy, tensorrt")
    require(isinstance(executor, str), "executor", executor, "auto or tensorrt")
    expected = "directories by name, as in {'json': 'adapter-dir'}"
    require(isinstance(adapters, (Mapping, type(None))), "adapters", adapters, expected)
    for name, path in (adapters or {}).items():
        if not isinstance(name, str):
            raise RequestError(f"adapters has the name {shown(name)}: expected text")
        check_path(f"the adapter {name!r}", path)
    if not isinstance(drafting, str) or drafting != "auto":
        check_drafting(drafting, 'DraftingConfig(...), "auto" or None')
    given = str(snapshots) if isinstance(snapshots, Path) else snapshots
    require(is_list(snapshots), "snapshots", given, "a list of files")
    expected = "a callable that takes bytes done and in all, or None"
    require(progress is None or callable(progress), "progress", progress, expected)
    for name, budget in budgets.items():
        require(is_whole(budget, 0), name, budget, "a whole number of bytes, 0 or more")
    is_counter = isinstance(metrics, (Metrics, type(None)))
    require_kind(is_counter, "metrics", metrics, "edgellm.metrics.Metrics(), or None")


def check_path(name: str, path: Any) -> None:
    """Raise RequestError for what is no path."""
    require(isinstance(path, (str, Path)), name, path, "a path, as text or pathlib.Path")
    found = f"{name} is {shown(str(path))}"
    try:
        encoded = os.fsencode(path)
    except UnicodeEncodeError as error:
        raise RequestError(f"{found}: half of a surrogate pair is no character") from error
    if b"\0" in encoded:
        raise RequestError(f"{found}: a path has no null characters")
    if len(encoded) >= _LONGEST_PATH or max(map(len, encoded.split(b"/"))) > _LONGEST_NAME:
        raise RequestError(f"{found}: a path has less than {_LONGEST_PATH} bytes, a name in it {_LONGEST_NAME}")


def check_drafting(drafting: Any, expected: str = "DraftingConfig(...), or None") -> None:
    """Raise RequestError for what is neither a DraftingConfig nor None."""
    require(isinstance(drafting, (DraftingConfig, type(None))), "drafting", drafting, expected)
