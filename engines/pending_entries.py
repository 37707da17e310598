"""What the base model has processed and its draft has not: features, each with the token that follows."""

from __future__ import annotations

from edgellm.engines.backends.base import Backend


class PendingEntries:
    """What the draft has not seen yet, of each slot; P = `EngineLimits.accept_tokens`.

    `features` [S, P, F] compute and `token_ids` [S, P] are the entries, `counts` [S] how many there are, `start` [S]
    the draft's committed rows, where they belong, `last` [S, 1] the index of the last of them; all but features int32.
    """

    def __init__(self, backend: Backend, slots: int, rows: int, feature_size: int) -> None:
        self.features = backend.zeros((slots, rows, feature_size), "compute")
        self.token_ids = backend.zeros((slots, rows), "int32")
        self.counts = backend.zeros((slots,), "int32")
        self.start = backend.zeros((slots,), "int32")
        self.last = backend.zeros((slots, 1), "int32")
