"""When an answer ends, and which of its text may be shown before that is known."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Literal, Protocol, get_args

from edgellm.errors import RequestError

#: Why an answer ended; see `edgellm.requests.Response`.
FinishReason = Literal["stop", "stop_string", "length", "context", "cancelled", "deadline"]
FINISH_REASONS: tuple[FinishReason, ...] = get_args(FinishReason)


class TextSource(Protocol):
    """What an answer needs of a detokenizer."""

    def push(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


class StopStrings:
    """Finds stop strings in text that comes in pieces, wherever the pieces are cut.

    The stop string that is complete first ends the text; of several that end at the same character, the longest.
    Text that may be the beginning of a stop string is held back until that is decided.
    """

    def __init__(self, strings: Iterable[str]) -> None:
        self._strings = tuple(dict.fromkeys(strings))
        if "" in self._strings:
            raise RequestError("a stop string is empty, which would end every answer at once: leave it out")
        self._held = ""

    def push(self, piece: str) -> tuple[str, str | None]:
        """Add a piece of text; return the text now certain, and the stop string where one was found."""
        if not self._strings:
            return piece, None
        text = self._held + piece
        found = [(start + len(string), start, string) for string in self._strings if (start := text.find(string)) >= 0]
        if found:
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
    for length in range(min(len(string) - 1, len(text)), 0, -1):
        if text.endswith(string[:length]):
            return length
    return 0


class OutputText:
    """One answer as it grows: tokens go in, text that is certain comes out, and the reason of its end is kept.

    The decoding loop calls `push` for each token until `finish_reason` is set, or ends the answer itself with
    `finish("context")` or `finish("cancelled")`. Where one token fulfils several conditions, the order is: end of
    sequence or stop id, stop string, `max_tokens`. The text of the token that ends the answer by its id, and a stop
    string, are not part of the text; the token is part of `token_ids`.
    """

    def __init__(
        self,
        detokenizer: TextSource,
        stop_strings: Iterable[str] = (),
        stop_token_ids: Collection[int] = (),
        eos_token_ids: Collection[int] = (),
        max_tokens: int | None = None,
    ) -> None:
        """`eos_token_ids` is empty where a request ignores the end of sequence; `max_tokens` None sets no limit."""
        self._detokenizer = detokenizer
        self._stop_strings = StopStrings(stop_strings)
        self._stop_token_ids = frozenset(stop_token_ids)
        self._ending_ids = self._stop_token_ids | frozenset(eos_token_ids)
        self._max_tokens = max_tokens
        self._pieces: list[str] = []
        self._token_ids: list[int] = []
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

    @property
    def token_count(self) -> int:
        """How many tokens there are so far."""
        return len(self._token_ids)

    def push(self, token_id: int) -> str:
        """Add a token; return the text to show, and set `finish_reason` where the answer ends with it."""
        if self.finish_reason is not None:
            raise RequestError(f"the answer has ended ({self.finish_reason}) and takes no more tokens")
        self._token_ids.append(token_id)
        if token_id in self._ending_ids:
            if token_id in self._stop_token_ids:
                self.stop_match = token_id
            return self.finish("stop")
        piece = self._take(self._detokenizer.push(token_id))
        if self.finish_reason is None and self._max_tokens is not None and len(self._token_ids) >= self._max_tokens:
            piece += self.finish("length")
        return piece

    def finish(self, reason: FinishReason) -> str:
        """End the answer for one of `FINISH_REASONS`; return the text that was held back. Once ended, does nothing."""
        if reason not in FINISH_REASONS:
            raise RequestError(f"{reason!r} is not a finish reason: expected one of {', '.join(FINISH_REASONS)}")
        if self.finish_reason is not None:
            return ""
        piece = self._take(self._detokenizer.finish())
        if self.finish_reason is None:
            self.finish_reason = reason
            released = self._stop_strings.release()
            self._pieces.append(released)
            piece += released
        return piece

    def _take(self, new_text: str) -> str:
        piece, match = self._stop_strings.push(new_text)
        self._pieces.append(piece)
        if match is not None:
            self.finish_reason, self.stop_match = "stop_string", match
        return piece
