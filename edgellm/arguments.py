"""Checks of the arguments that `SpecDecodeRuntime` takes beside requests."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edgellm.drafting.config import DraftingConfig
from edgellm.engines.model.limits import MOST_GPUS
from edgellm.errors import RequestError, is_whole, require, require_kind, shown
from edgellm.metrics import Metrics
from edgellm.requests import is_list

#: What Linux takes, in bytes.
_LONGEST_PATH, _LONGEST_NAME = 4096, 255


def check_options(given: Mapping[str, Any]) -> None:
    """Raise RequestError for an argument of `SpecDecodeRuntime`, by its name, that is not what it should be."""
    for name in ("engine_directory", "multimodal_engine_directory"):
        if given[name] is not None:
            check_path(name, given[name])
    adapters, drafting, snapshots = given["adapters"], given["drafting"], given["snapshots"]
    layers, index, progress = given["hidden_layers"], given["gpu"], given["progress"]
    are_layers = isinstance(layers, Sequence) and len(layers) > 0 and all(is_whole(each, 1) for each in layers)
    for name, holds, expected in (
        ("backend", isinstance(given["backend"], str), "one of auto, numpy, tensorrt"),
        ("executor", isinstance(given["executor"], str), "auto or tensorrt"),
        ("gpu", index is None or is_whole(index, 0), "the index of a GPU, from 0 on, or None"),
        ("gpus", is_whole(given["gpus"], 1, MOST_GPUS), f"how many GPUs share the model, from 1 to {MOST_GPUS}"),
        ("hidden_layers", layers is None or are_layers, "a list of layers, or None"),
        ("adapters", isinstance(adapters, (Mapping, type(None))), "directories by name, as in {'json': 'adapter-dir'}"),
        ("progress", progress is None or callable(progress), "a callable that takes bytes done and in all, or None"),
    ):
        require(holds, name, given[name], expected)
    for name, path in (adapters or {}).items():
        if not isinstance(name, str):
            raise RequestError(f"adapters has the name {shown(name)}: expected text")
        check_path(f"the adapter {name!r}", path)
    if not isinstance(drafting, str) or drafting != "auto":
        check_drafting(drafting, 'DraftingConfig(...), "auto" or None')
    found = str(snapshots) if isinstance(snapshots, Path) else snapshots
    require(is_list(snapshots), "snapshots", found, "a list of files")
    for name in ("snapshot_budget", "preemption_budget", "state_budget"):
        require(is_whole(given[name], 0), name, given[name], "a whole number of bytes, 0 or more")
    is_counter = isinstance(given["metrics"], (Metrics, type(None)))
    require_kind(is_counter, "metrics", given["metrics"], "edgellm.metrics.Metrics(), or None")


def check_path(name: str, path: Any) -> None:
    """Raise RequestError for what is no path; "" is none, though pathlib takes it for the present directory."""
    require(isinstance(path, (str, Path)) and path != "", name, path, "a path, as text or pathlib.Path")
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
