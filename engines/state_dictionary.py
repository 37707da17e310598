"""The weights among what a file of PyTorch's holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgellm.engines.errors import CheckpointError
from edgellm.engines.torch_tensors import Storage, TensorView

#: Entries that begin so hold an optimizer's tensors, which are not weights.
_OPTIMIZER = "optim"


def _walk(value: Any) -> list[TensorView]:
    """All tensors in a value, at any depth; values may contain themselves."""
    found: list[TensorView] = []
    seen, waiting = set(), [value]
    while waiting:
        item = waiting.pop()
        if type(item) is TensorView:
            found.append(item)
        elif type(item) in (dict, list, tuple) and id(item) not in seen:
            seen.add(id(item))
            waiting.extend(item.values() if type(item) is dict else item)
    return found


def all_storages(value: Any) -> dict[str, Storage]:
    """The storages of all tensors in a value, at any depth, by key."""
    return {view.storage.key: view.storage for view in _walk(value)}


def _is_state(value: Any) -> bool:
    return (
        type(value) is dict
        and len(value) > 0
        and all(type(name) is str and type(view) is TensorView for name, view in value.items())
    )


def find_state_dictionary(path: Path, value: Any) -> tuple[dict[str, TensorView], list[str]]:
    """The one dictionary of tensors in a file, and the names of what lies beside it; raises CheckpointError."""
    if _is_state(value):
        return value, []
    if type(value) is not dict:
        raise CheckpointError(f"{path} holds a {type(value).__name__}, expected a dictionary of tensors (state_dict)")
    with_tensors = {key: entry for key, entry in value.items() if _walk(entry)}
    candidates = [key for key in with_tensors if not str(key).startswith(_OPTIMIZER)]
    if len(candidates) == 1 and _is_state(value[candidates[0]]):
        return value[candidates[0]], [str(key) for key in value if key != candidates[0]]
    listed = ", ".join(f"{key!r:.60}" for key in list(value)[:10]) or "nothing"
    raise CheckpointError(
        f"{path} does not hold one dictionary of tensors and no other: it has the keys {listed}. Which of them are the "
        "weights is unknown. Save the model's state_dict() alone"
    )
