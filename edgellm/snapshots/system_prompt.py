"""The tokens that every conversation under a system prompt begins with, and what they were rendered from."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from edgellm.errors import RequestError
from edgellm.text.messages import ENCODER_NAMES, JSONCopy, checked_tools, checked_variables, media_kind, text_of_part
from edgellm.text.tokenizer import Tokenizer
from edgellm.tool_calls.functions import described_tools

#: Two first questions that have no beginning in common.
_QUESTIONS = ("Hello!", "7 + 5 = ?")
_LONGEST_LABEL = 40
#: The most characters of a `PromptRecord`'s JSON, so that what anybody wrote is checked within a second.
LARGEST_RECORD = 4 << 20
#: Text, or the parts of a message, images among them.
SystemPrompt = str | Sequence[dict[str, Any]]
#: Descriptions of functions that the model may call, as chat templates take them.
Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class CachedPrompt:
    """A prompt whose KV rows are kept: the tokens they are of, how many bytes they take, and their file (None: they are
    in memory alone)."""

    token_ids: tuple[int, ...]
    nbytes: int
    path: Path | None

    @property
    def tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class PromptRecord:
    """What a system prompt's tokens were rendered from: JSON values, which a snapshot's header keeps.

    `content` is the prompt's text, or its parts: {"type": "text", "text": ...}, and of each piece of media its kind as
    "type" and a "digest", 64 hexadecimal digits. `tools` and `template_variables` are what the chat template got beside
    it (None: nothing), the keys of their objects in the order in which it saw them.
    """

    content: str | list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    template_variables: dict[str, Any] | None = None

    @classmethod
    def of(
        cls,
        prompt: SystemPrompt,
        digests_shown: Sequence[str] = (),
        tools: Tools | None = None,
        template_variables: Mapping[str, Any] | None = None,
    ) -> PromptRecord:
        """The record of a prompt that shows media of these digests, in their order. Raises RequestError."""
        digests = iter(digests_shown)
        content = (
            prompt
            if isinstance(prompt, str)
            else [
                {"type": kind, "digest": next(digests)}
                if (kind := media_kind(part)) is not None
                else {"type": "text", "text": text_of_part(part, f"part {number} of the system prompt")}
                for number, part in enumerate(prompt, 1)
            ]
        )
        return cls(content, *checked_template_inputs(tools, template_variables))

    @property
    def text(self) -> str | None:
        """The prompt as text, None where it is several parts or shows an image."""
        if isinstance(self.content, str):
            return self.content
        return self.content[0].get("text") if len(self.content) == 1 else None

    def to_json(self) -> str:
        """The record as JSON text for `from_json`; RequestError where it is larger than that takes."""
        values = {"content": self.content, "tools": self.tools, "template_variables": self.template_variables}
        text = json.dumps({key: value for key, value in values.items() if value is not None}, ensure_ascii=False)
        if len(text) > LARGEST_RECORD:
            raise RequestError(
                f"the system prompt with its tools has {len(text):,} characters of JSON: expected at most "
                f"{LARGEST_RECORD:,}"
            )
        return text

    @classmethod
    def from_json(cls, text: str) -> PromptRecord:
        """The record of a header, which anybody may have written; RequestError says what is wrong with it."""
        if len(text) > LARGEST_RECORD:
            raise RequestError(f"it has {len(text):,} characters, expected at most {LARGEST_RECORD:,}")
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"it is not valid JSON ({error})") from error
        known = ("content", "tools", "template_variables")
        if not isinstance(values, dict) or "content" not in values or not values.keys() <= set(known):
            raise RequestError(f"it is not an object with the keys {', '.join(known)}")
        content = JSONCopy("content").of(values["content"], "content")
        if not isinstance(content, str):
            _check_parts(content)
        return cls(content, *checked_template_inputs(values.get("tools"), values.get("template_variables")))


def checked_template_inputs(
    tools: Tools | None, template_variables: Mapping[str, Any] | None
) -> tuple[list[dict[str, Any]] | None, dict[str, Any] | None]:
    """Tools and variables for a chat template, None where there are none; RequestError unless they are JSON values."""
    return checked_tools(described_tools(tools)), checked_variables(template_variables) or None


def prompt_label(prompt: SystemPrompt) -> str:
    """A name for a system prompt: its first words."""
    parts = [prompt] if isinstance(prompt, str) else [str(part.get("text", "[image]")) for part in prompt]
    words = " ".join(" ".join(parts).split())
    return words if len(words) <= _LONGEST_LABEL else f"{words[: _LONGEST_LABEL - 3]}..."


def system_prompt_ids(
    tokenizer: Tokenizer,
    system_prompt: SystemPrompt | None,
    tools: Tools | None = None,
    template_variables: Mapping[str, Any] | None = None,
    cropped: Sequence[bool] = (),
) -> list[int]:
    """The token ids that the chat template gives a system prompt (None: none), whatever the user says next; one for
    each image, of which there may be crops (`cropped`). `tools` and `template_variables` are as those of conversations.
    Raises RequestError where that is nothing, TemplateError where the template fails.
    """
    system = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    shared = beginning_ids(tokenizer, system, *checked_template_inputs(tools, template_variables), cropped)
    if not shared:
        raise RequestError(
            "the chat template puts the user's words before everything else: there is no beginning that all "
            "conversations share, and so nothing to keep"
        )
    return shared


def beginning_ids(
    tokenizer: Tokenizer,
    system: Sequence[dict[str, Any]],
    tools: Any,
    variables: Mapping[str, Any] | None,
    cropped: Sequence[bool] = (),
) -> list[int]:
    """The token ids that conversations begin with which have these system messages, tools and variables of the chat
    template; none where it puts the user's words first.

    The conversation is rendered with two different questions, and what both have in common is kept, so that nothing is
    assumed of the template. Raises RequestError and TemplateError for what cannot be rendered.
    """
    first, second = (
        tokenizer.encode_chat(
            [*system, {"role": "user", "content": each}], None, cropped, tools=tools, **(variables or {})
        )
        for each in _QUESTIONS
    )
    return [token for token, _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))]


def _check_parts(parts: Any) -> None:
    if not isinstance(parts, list) or not parts:
        raise RequestError(f"content is a {type(parts).__name__}: expected text, or a list of parts")
    for number, part in enumerate(parts, 1):
        kind = part.get("type") if isinstance(part, dict) and len(part) == 2 else None
        is_text = kind == "text" and isinstance(part.get("text"), str)
        digest = part.get("digest") if kind in ENCODER_NAMES else None
        if not is_text and not (isinstance(digest, str) and re.fullmatch("[0-9a-f]{64}", digest)):
            raise RequestError(f"part {number} of content is neither a text nor the digest of media")
