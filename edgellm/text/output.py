"""From tokens to the text that is shown: the streaming detokenizer, stop strings, and how an answer ends."""

from __future__ import annotations

import codecs
import re
from collections.abc import Collection, Iterable
from typing import Literal, NamedTuple, Protocol

from tokenizers import Tokenizer

from edgellm.engines.formats.small_files import decoded_ids
from edgellm.text.token_sizes import stages

#: Why an answer ended; see `edgellm.requests.Response`.
FinishReason = Literal["stop", "stop_string", "tool_calls", "length", "context", "cancelled", "deadline"]


class CallReader(Protocol):
    """What an answer needs of a reader of calls, such as `edgellm.tool_calls.reader.ToolReader`. Of one that
    `hides_text`, thoughts and headers, stop strings are looked for in what it shows alone."""

    hides_text: bool

    def push(self, token_id: int, text: str) -> str: ...

    def finish(self) -> str: ...


class StopStrings:
    """Finds stop strings in text that comes in pieces, wherever the pieces are cut.

    The stop string that is complete first ends the text; of several that end at the same character, the longest.
    Text that may be the beginning of a stop string is held back until that is decided.
    """

    def __init__(self, strings: Iterable[str]) -> None:
        self._strings = tuple(dict.fromkeys(strings))
        self._held = ""

    def push(self, piece: str, is_early: bool = False) -> tuple[str, str | None]:
        """Add a piece of text; return the text now certain, and the stop string where one was found. None ends in a
        piece that `is_early`."""
        if not self._strings:
            return piece, None
        text, known = self._held + piece, len(self._held)
        starts = [(text.find(string, max(0, known + 1 - len(string))), string) for string in self._strings]
        found = [(start + len(string), start, string) for start, string in starts if start >= 0]
        if found and not is_early:
            _, start, string = min(found)
            self._held = ""
            return text[:start], string
        keep = len(text) - max(_longest_beginning(text, string) for string in self._strings)
        self._held = text[keep:]
        return text[:keep], None

    def release(self) -> str:
        """The text held back, which no stop string followed."""
        held, self._held = self._held, ""
        return held


def _longest_beginning(text: str, string: str) -> int:
    """The length of the longest end of `text` that is a beginning, but not the whole, of `string`."""
    lengths = range(min(len(string) - 1, len(text)), 0, -1)
    return next((length for length in lengths if text.endswith(string[:length])), 0)


class OutputText:
    """One answer as it grows: tokens go in, text that is certain comes out, and the reason of its end is kept.

    The decoding loop calls `push` for each token until `finish_reason` is set, or ends the answer itself with
    `finish("context")` or `finish("cancelled")`. Where one token fulfils several conditions, the order is: end of
    sequence or stop id, stop string, `max_tokens`. The text of the token that ends the answer by its id, and a stop
    string, are not part of the text; the token is part of `token_ids`.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stop_strings: Iterable[str] = (),
        stop_token_ids: Collection[int] = (),
        eos_token_ids: Collection[int] = (),
        max_tokens: int | None = None,
        calls: CallReader | None = None,
        min_tokens: int = 0,
    ) -> None:
        """`eos_token_ids` is empty where a request ignores the end of sequence; `max_tokens` None sets no limit; no
        stop string ends in the text of the first `min_tokens`.

        `calls` takes calls of tools out of the text, in which stop strings are looked for, too.
        """
        self._calls = calls
        self._detokenizer = detokenizer
        self._stop_strings = StopStrings(stop_strings)
        self._stop_token_ids = frozenset(stop_token_ids)
        self._ending_ids = self._stop_token_ids | frozenset(eos_token_ids)
        self._max_tokens, self._min_tokens = max_tokens, min_tokens
        self._pieces: list[str] = []
        self._token_ids: list[int] = []
        #: How many tokens there are so far.
        self.token_count = 0
        self.finish_reason: FinishReason | None = None
        self.stop_match: str | int | None = None

    @property
    def text(self) -> str:
        """The text so far; held-back text is not in it until the answer is finished."""
        return "".join(self._pieces)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens so far, the ending one included."""
        return tuple(self._token_ids)

    def ends_at(self, token_id: int) -> bool:
        """Whether the answer ends with this token, whatever comes before it."""
        return token_id in self._ending_ids

    def push(self, token_id: int) -> str:
        """Add a token; return the text to show, and set `finish_reason` where the answer ends with it."""
        self._token_ids.append(token_id)
        self.token_count += 1
        if token_id in self._ending_ids:
            if token_id in self._stop_token_ids:
                self.stop_match = token_id
            return self.finish("stop")
        piece = self._take(self._detokenizer.push(token_id), token_id)
        if self.finish_reason is None and self._max_tokens is not None and self.token_count >= self._max_tokens:
            piece += self.finish("length")
        return piece

    def finish(self, reason: FinishReason) -> str:
        """End the answer for a reason; return the text that was held back. Once ended, does nothing."""
        if self.finish_reason is not None:
            return ""
        piece = self._take(self._detokenizer.finish())
        if self.finish_reason is None:
            self.finish_reason = reason
            piece += self._show(self._stop_strings.release(), ends=True)
        return piece

    def _take(self, new_text: str, token_id: int = -1) -> str:
        if self._calls is not None and self._calls.hides_text:
            new_text = self._calls.push(token_id, new_text)
            new_text += self._calls.finish() if token_id < 0 else ""
        piece, match = self._stop_strings.push(new_text, self.token_count <= self._min_tokens)
        if match is not None:
            self.finish_reason, self.stop_match = "stop_string", match
        return self._show(piece, token_id, match is not None)

    def _show(self, text: str, token_id: int = -1, ends: bool = False) -> str:
        """What of a text is shown, and not part of a call."""
        if self._calls is not None and not self._calls.hides_text:
            text = self._calls.push(token_id, text)
            if ends:
                text += self._calls.finish()
        self._pieces.append(text)
        return text


BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")
REPLACEMENT = "\ufffd"
# A character has at most four bytes: text that still ends in U+FFFD after as many tokens is not waiting for one.
LONGEST_CHARACTER = 4


def byte_level_characters() -> dict[str, int]:
    """Byte-level BPE's alphabet: the character that stands for each byte (Radford et al. 2019, GPT-2's encoder).
    Printable characters of Latin-1 stand for themselves, the 68 other bytes for U+0100 and up, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


class TokenPiece(NamedTuple):
    """What a token is: whether it is a special one, which shows no text unless asked for, and whether the tokenizer has
    it; the bytes that it stands for, None where it is a piece of text to be decoded in its context."""

    is_special: bool
    exists: bool
    data: bytes | None


class TokenText(dict[int, TokenPiece]):
    """What each token is, found when asked for: bytes (byte-level BPE), one byte (byte fallback), text, or nothing."""

    def __init__(self, tokenizer: Tokenizer, skipped_ids: frozenset[int]) -> None:
        """`skipped_ids` are the special tokens, which show no text unless asked for."""
        self.tokenizer = tokenizer
        self.skipped_ids = skipped_ids
        kinds = [stage["type"] for stage in stages(tokenizer.decoder, "decoders")]
        self.is_byte_level = kinds == ["ByteLevel"]
        self.has_byte_fallback = "ByteFallback" in kinds
        self._characters = byte_level_characters() if self.is_byte_level else {}

    def __missing__(self, token_id: int) -> TokenPiece:
        token = self.tokenizer.id_to_token(token_id)
        self[token_id] = piece = TokenPiece(token_id in self.skipped_ids, token is not None, self._find_bytes(token))
        return piece

    def _find_bytes(self, token: str | None) -> bytes | None:
        if token is None:
            return None
        if self.is_byte_level:
            known = all(character in self._characters for character in token)
            return bytes(self._characters[character] for character in token) if known else token.encode()
        match = BYTE_TOKEN.match(token) if self.has_byte_fallback else None
        return bytes([int(match[1], 16)]) if match else None

    def decode(self, token_ids: list[int]) -> str:
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

    def __init__(
        self, token_text: TokenText, skip_special_tokens: bool = True, shown_ids: Collection[int] = ()
    ) -> None:
        """`shown_ids` are special tokens that are not skipped."""
        self._token_text, self._shown_ids = token_text, frozenset(shown_ids)
        self._skip_special_tokens = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._context: list[int] = []  # the token or tokens that the last piece of text ended with
        self._context_text = ""
        self._pending: list[int] = []  # text tokens whose text is not settled

    def push(self, token_id: int) -> str:
        """Add a token; return the text that became certain, often a word, possibly nothing."""
        tokens = self._token_text
        is_special, exists, data = tokens[token_id]
        if not exists or (is_special and self._skip_special_tokens and token_id not in self._shown_ids):
            return ""
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
