"""Prefixes that token sequences share, and how much of one a prompt can take over."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

#: Of a token in a key.
KEY_BYTES = 4


def token_key(token_ids: Sequence[int] | np.ndarray) -> bytes:
    """Token ids as bytes, 4 a token, the largest first; ids below 0, which no snapshot has, become large ones."""
    return np.asarray(token_ids, np.int64).astype(">u4").tobytes()


def common_tokens(first: bytes, second: bytes) -> int:
    """How many tokens two keys have in common from their beginning."""
    longest = min(len(first), len(second)) // KEY_BYTES
    one, other = (np.frombuffer(key, np.uint32, longest) for key in (first, second))
    differs = one != other
    return int(np.argmax(differs)) if differs.any() else longest


def reusable_rows(common: int, prompt_tokens: int, draft_rows: int | None = None) -> int:
    """How many KV rows a prompt of `prompt_tokens` can take over that shares its first `common` tokens with them.

    The prompt's last token is always computed. A draft, of which `draft_rows` rows are there (None: there is no
    draft), needs of each row the token after it, too.
    """
    rows = min(common, prompt_tokens - 1)
    if draft_rows is not None:
        rows = min(rows, draft_rows, common - 1)
    return max(0, rows)
