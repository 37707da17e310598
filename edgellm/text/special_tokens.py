"""Keeps the text of a conversation from being read as special tokens.

A chat template writes special tokens (`<|im_end|>`) around the messages, and a message may contain the same
characters. They are told apart in three steps:

1. Before rendering, each special token's text inside messages, tools and other values is replaced by one
   private-use character that occurs in none of them (`Disguise`). Templates see such a message one character shorter
   at that place and otherwise as it is, so that trimming, comparing and cutting work as usual.
2. After rendering, every special token in the text is the template's own. It is replaced by an anchor: a token added,
   with the same matching rules, to a copy of the tokenizer that reads special tokens as plain text.
3. The disguises are undone, the text is encoded in one piece, and the anchors' ids become the special tokens' ids.

Where no message contains such text, the rendered text is encoded directly, which gives the same.

Limits: added tokens that the tokenizer itself calls ordinary text (Qwen's `<tool_call>`, `<think>`) are recognized in
messages too, as they are meant to be; a special token that a template composes from its own and a message's
characters (`<|` + content + `|>`) is recognized.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable
from typing import Any

from tokenizers import AddedToken, Tokenizer

# The two supplementary private use areas of Unicode: no standard gives their characters a meaning.
DISGUISES = range(0xF0000, 0xFFFFE)
ANCHORS = range(0x100000, 0x10FFFE)


def text_pattern(tokens: Iterable[AddedToken]) -> re.Pattern[str]:
    """A pattern for the text of any of `tokens`, the longest at the leftmost place."""
    return _alternatives(token.content for token in tokens)


def _alternatives(contents: Iterable[str], rule: Callable[[str], str] = re.escape) -> re.Pattern[str]:
    return re.compile("|".join(rule(content) for content in sorted(contents, key=len, reverse=True)) or r"(?!)")


class Disguise:
    """Replaces special tokens' text in the values that a template is given, and undoes it in the rendered text."""

    def __init__(self, pattern: re.Pattern[str], values: Any) -> None:
        """`values` is everything the template will be given from outside: nested lists, dictionaries and strings."""
        found: dict[str, None] = {}
        used: set[str] = set()
        for string in strings_in(values):
            found.update(dict.fromkeys(pattern.findall(string)))
            used.update(character for character in string if ord(character) >= DISGUISES.start)
        free = (chr(code) for code in DISGUISES if chr(code) not in used)
        self._pattern = pattern
        self._characters = dict(zip(found, free, strict=False))
        self._originals = str.maketrans({character: text for text, character in self._characters.items()})

    @property
    def is_needed(self) -> bool:
        """Whether any special token's text was found."""
        return bool(self._characters)

    def apply(self, value: Any) -> Any:
        """A copy of `value` in which special tokens' text is disguised, dictionary keys included."""
        if not self.is_needed:
            return value
        if isinstance(value, str):
            return self._pattern.sub(lambda match: self._characters[match[0]], value)
        if isinstance(value, dict):
            return {self.apply(key): self.apply(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.apply(item) for item in value]
        return value

    def undo(self, text: str) -> str:
        """`text` with the disguised special tokens' text as it was."""
        return text.translate(self._originals)


def strings_in(value: Any) -> list[str]:
    """All strings in nested lists and dictionaries, keys included."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [string for pair in value.items() for item in pair for string in strings_in(item)]
    if isinstance(value, (list, tuple)):
        return [string for item in value for string in strings_in(item)]
    return []


class AnchoredTokenizer:
    """A copy of a tokenizer in which special tokens' text is plain text, and secret anchors stand for the tokens."""

    def __init__(self, tokenizer: Tokenizer, special: dict[int, AddedToken]) -> None:
        """`special` are the special tokens by id."""
        self._tokenizer = Tokenizer.from_str(tokenizer.to_str())
        self._tokenizer.encode_special_tokens = True
        whole_words = {token.content for token in special.values() if token.single_word}
        # As tokenizers match them: the longest at the leftmost place, some only where no word goes on.
        self._pattern = _alternatives(
            (token.content for token in special.values()),
            lambda text: rf"(?<!\w){re.escape(text)}(?!\w)" if text in whole_words else re.escape(text),
        )
        secret = "".join(chr(secrets.choice(ANCHORS)) for _ in range(6))
        self._anchors: dict[str, str] = {}
        self._ids: dict[int, int] = {}
        for number, (token_id, token) in enumerate(special.items()):
            anchor = secret + chr(ANCHORS.start + number)
            self._anchors[token.content] = anchor
            self._tokenizer.add_tokens(
                [
                    AddedToken(
                        anchor,
                        lstrip=token.lstrip,
                        rstrip=token.rstrip,
                        single_word=False,  # already so by the pattern
                        normalized=False,
                        special=False,
                    )
                ]
            )
            self._ids[self._tokenizer.token_to_id(anchor)] = token_id  # type: ignore[index]

    def encode(self, rendered: str, disguise: Disguise) -> list[int]:
        """The ids of a rendered template: its own special tokens as such, disguised ones as plain text."""
        anchored = self._pattern.sub(lambda match: self._anchors[match[0]], rendered)
        ids = self._tokenizer.encode(disguise.undo(anchored), add_special_tokens=False).ids
        return [self._ids.get(token_id, token_id) for token_id in ids]
