"""The marks of models that write messages in channels, as gpt-oss does: see `edgellm.tool_calls.harmony`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from edgellm.text.tokenizer import Tokenizer

START, END, MESSAGE, CHANNEL, CONSTRAIN, CALL = (
    f"<|{name}|>" for name in ("start", "end", "message", "channel", "constrain", "call")
)
MARKS = (START, END, MESSAGE, CHANNEL, CONSTRAIN, CALL)
#: Who writes an answer, and the channel of what is said.
ROLE, FINAL = "assistant", "final"


def harmony_ids(tokenizer: Tokenizer) -> dict[str, int] | None:
    """The tokens of `MARKS`; None for a model that has not all of them."""
    found = {mark: tokenizer.token_to_id(mark) for mark in MARKS}
    ids = {mark: token for mark, token in found.items() if token is not None}
    return ids if len(ids) == len(MARKS) else None


def begins_message(tokenizer: Tokenizer, ids: Mapping[str, int], prompt_ids: Sequence[int]) -> bool:
    """Whether a prompt ends where the model writes the header of a message."""
    last = next((place for place in range(len(prompt_ids) - 1, -1, -1) if prompt_ids[place] in ids.values()), None)
    if last is None or prompt_ids[last] != ids[START]:
        return False
    return tokenizer.decode(prompt_ids[last + 1 :]).strip() == ROLE
