"""The tokens that every conversation under a system prompt begins with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgellm.errors import RequestError
from edgellm.snapshots.prefix_index import common_tokens, token_key
from edgellm.text.tokenizer import Tokenizer

#: Two first questions that have no beginning in common.
_QUESTIONS = ("Hello!", "7 + 5 = ?")
_LONGEST_LABEL = 40
#: Text, or the parts of a message, images among them.
SystemPrompt = str | Sequence[dict[str, Any]]


@dataclass(frozen=True)
class CachedPrompt:
    """A prompt whose KV rows are kept: the tokens they are of, how many bytes they take, and their file (None: they are
    in memory alone)."""

    token_ids: tuple[int, ...]
    nbytes: int
    path: Path | None

    @property
    def tokens(self) -> int:
        """How many tokens the rows are of."""
        return len(self.token_ids)


def prompt_label(prompt: SystemPrompt) -> str:
    """A name for a system prompt: its first words."""
    parts = [prompt] if isinstance(prompt, str) else [str(part.get("text", "[image]")) for part in prompt]
    words = " ".join(" ".join(parts).split())
    return words if len(words) <= _LONGEST_LABEL else f"{words[: _LONGEST_LABEL - 3]}..."


def system_prompt_ids(tokenizer: Tokenizer, system_prompt: SystemPrompt | None) -> list[int]:
    """The token ids that the chat template gives a system prompt (None: none), whatever the user says next; one for
    each image.

    The conversation is rendered with two different questions, and what both have in common is kept, so that nothing is
    assumed of the template. Raises RequestError where that is nothing, TemplateError where the template fails.
    """
    system = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    first, second = (tokenizer.encode_chat([*system, {"role": "user", "content": question}]) for question in _QUESTIONS)
    shared = first[: common_tokens(token_key(first), token_key(second))]
    if not shared:
        raise RequestError(
            "the chat template puts the user's words before everything else: there is no beginning that all "
            "conversations share, and so nothing to keep"
        )
    return shared
