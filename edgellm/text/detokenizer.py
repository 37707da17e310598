"""Turns token ids into text as they come, whole characters only."""

from __future__ import annotations

import codecs
import json
import re
from typing import TYPE_CHECKING, Any

from edgellm.engines.directories.small_files import decoded_ids

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")
REPLACEMENT = "\ufffd"
# A character has at most four bytes: text that still ends in U+FFFD after as many tokens is not waiting for one.
LONGEST_CHARACTER = 4


def byte_level_characters() -> dict[str, int]:
    """Byte-level BPE's alphabet: the character that stands for each byte (Radford et al. 2019, GPT-2's encoder).

    Printable characters of Latin-1 stand for themselves, the 68 other bytes for U+0100 and up, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


class TokenText:
    """What each token of a tokenizer is: bytes (byte-level BPE), one byte (byte fallback), text, or nothing."""

    def __init__(self, tokenizer: Tokenizer, skipped_ids: frozenset[int]) -> None:
        """`skipped_ids` are the special tokens, which show no text unless asked for."""
        self.tokenizer = tokenizer
        self.skipped_ids = skipped_ids
        kinds = _decoder_kinds(tokenizer)
        self.is_byte_level = kinds == ["ByteLevel"]
        self.has_byte_fallback = "ByteFallback" in kinds
        self._characters = byte_level_characters() if self.is_byte_level else {}
        self._known: dict[int, bytes | None] = {}

    def is_shown(self, token_id: int, skip_special_tokens: bool) -> bool:
        """Whether the id exists in the tokenizer and is not a special token that is to be left out."""
        if skip_special_tokens and token_id in self.skipped_ids:
            return False
        return self.tokenizer.id_to_token(token_id) is not None

    def bytes_of(self, token_id: int) -> bytes | None:
        """The bytes that a token stands for, or None where it is a piece of text to be decoded in its context."""
        if token_id not in self._known:
            self._known[token_id] = self._find_bytes(self.tokenizer.id_to_token(token_id))
        return self._known[token_id]

    def _find_bytes(self, token: str | None) -> bytes | None:
        if token is None:
            return None
        if self.is_byte_level:
            known = all(character in self._characters for character in token)
            return bytes(self._characters[character] for character in token) if known else token.encode()
        match = BYTE_TOKEN.match(token) if self.has_byte_fallback else None
        return bytes([int(match[1], 16)]) if match else None

    def decode(self, token_ids: list[int]) -> str:
        """The tokenizer's own decoding of a few tokens."""
        return decoded_ids(self.tokenizer, token_ids)


class Detokenizer:
    """The text of a growing list of tokens; each token costs the same, however long the text is.

    Tokens that stand for bytes go through an incremental UTF-8 decoder: a character appears when its last byte has
    come, and U+FFFD only for bytes that can no longer become a character (one for each ill-formed part, as Unicode
    recommends). Pieces of text are decoded by the tokenizer together with the token before them, which settles
    leading spaces; so the joined pieces equal the decoding of the whole.

    In one case they differ from the `tokenizers` library on purpose: where a run of byte-fallback tokens holds one
    ill-formed byte, the library replaces every byte of the run, and could tell only after the run's end.
    """

    def __init__(self, token_text: TokenText, skip_special_tokens: bool = True) -> None:
        self._token_text = token_text
        self._skip_special_tokens = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._context: list[int] = []  # the token or tokens that the last piece of text ended with
        self._context_text = ""
        self._pending: list[int] = []  # text tokens whose text is not settled

    def push(self, token_id: int) -> str:
        """Add a token; return the text that became certain, often a word, possibly nothing."""
        tokens = self._token_text
        if not tokens.is_shown(token_id, self._skip_special_tokens):
            return ""
        data = tokens.bytes_of(token_id)
        if tokens.is_byte_level:
            return self._utf8.decode(data or b"")
        # A text's first space is the decoder's to strip, in whatever form it comes.
        if data is not None and (self._context or data[0] >= 0x80):
            settled = self._settle_pending()
            self._context, self._context_text = [token_id], tokens.decode([token_id])
            return settled + self._utf8.decode(data)
        ended = self._end_of_bytes()
        self._pending.append(token_id)
        text = tokens.decode(self._context + self._pending)
        if text.endswith(REPLACEMENT) and len(self._pending) < LONGEST_CHARACTER:
            return ended
        return ended + self._settle_pending(text)

    def finish(self) -> str:
        """The text that was held back: bytes that never became a character, as U+FFFD."""
        return self._settle_pending() + self._end_of_bytes()

    def _settle_pending(self, text: str | None = None) -> str:
        if not self._pending:
            return ""
        text = self._token_text.decode(self._context + self._pending) if text is None else text
        piece = text[len(self._context_text) :]
        self._context, self._pending = self._pending, []
        self._context_text = self._token_text.decode(self._context)
        return piece

    def _end_of_bytes(self) -> str:
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return text


def _decoder_kinds(tokenizer: Tokenizer) -> list[str]:
    """The names of the decoder's steps, as `tokenizer.json` has them."""
    if tokenizer.decoder is None:
        return []
    state: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__())
    return [step["type"] for step in state.get("decoders", [state])]
