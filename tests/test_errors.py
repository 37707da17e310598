"""Errors that hold more than a message cross processes: a pool hangs on one that cannot be unpickled."""

from __future__ import annotations

import pickle

import pytest

from edgellm.errors import ContextError, EdgeLLMError, SnapshotError


@pytest.mark.parametrize(
    "error", [ContextError("too long", 12, 10), SnapshotError("it differs", "other weights")], ids=repr
)
def test_errors_cross_processes(error: EdgeLLMError) -> None:
    found = pickle.loads(pickle.dumps(error))
    assert (type(found), str(found), vars(found)) == (type(error), str(error), vars(error))
