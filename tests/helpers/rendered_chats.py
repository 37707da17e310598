"""Conversations as text: what a chat template writes, before special tokens in messages are disguised."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edgellm.text.messages import checked_messages
from edgellm.text.tokenizer import Tokenizer


def rendered_chat(tokenizer: Tokenizer, messages: Sequence[dict[str, Any]]) -> str:
    """The text of a conversation by the tokenizer's chat template, up to where the model's answer begins."""
    template = tokenizer.chat_template
    assert template is not None
    fitted = template.fitted(checked_messages(messages, tokenizer.media), False)
    return template.render({"messages": fitted, "tools": None}, tokenizer.special_tokens, add_generation_prompt=True)
