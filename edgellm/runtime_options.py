"""What a runtime is opened with, checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgellm.drafting.config import DraftingConfig
from edgellm.errors import RequestError


def check_options(adapters: Any, drafting: Any, snapshots: Any, snapshot_budget: Any) -> None:
    """Raise RequestError for an argument of `SpecDecodeRuntime` that has another type than it should have."""
    if not isinstance(adapters, (Mapping, type(None))):
        raise RequestError(f"adapters is {adapters!r}: expected directories by name, as in {{'json': 'adapter-dir'}}")
    if drafting != "auto":
        check_drafting(drafting, 'DraftingConfig(...), "auto" or None')
    if isinstance(snapshots, (str, Path)):
        raise RequestError(f"snapshots is {str(snapshots)!r}: expected a list of files")
    if not isinstance(snapshot_budget, int) or isinstance(snapshot_budget, bool) or snapshot_budget < 0:
        raise RequestError(f"snapshot_budget is {snapshot_budget!r}: expected a whole number of bytes, 0 or more")


def check_drafting(drafting: Any, expected: str = "DraftingConfig(...), or None") -> None:
    """Raise RequestError for what is neither a DraftingConfig nor None."""
    if not isinstance(drafting, (DraftingConfig, type(None))):
        raise RequestError(f"drafting is {drafting!r}: expected {expected}")
