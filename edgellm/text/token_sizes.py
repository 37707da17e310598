"""How much of a text one token can stand for, so that a text far beyond a context is refused before it is encoded."""

from __future__ import annotations

import json
import math
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers

#: What Unicode calls white space.
_SPACES = "".join(filter(str.isspace, map(chr, range(0x3001))))
_DROPPING_SPACES = ("Whitespace", "WhitespaceSplit", "BertPreTokenizer")
#: How many times shorter in UTF-8 a normalizer or a pre-tokenizer makes a text at most, dropped spaces apart: a
#: mathematical zero of four bytes becomes a digit. Others, such as one that strips accents, may drop any number.
_SHRINKING = {
    **dict.fromkeys(("NFC", "NFD", "NFKC", "NFKD", "Lowercase"), 4),
    **dict.fromkeys(("Prepend", "Strip", "ByteLevel", "Digits", "Metaspace", "UnicodeScripts", *_DROPPING_SPACES), 1),
}


class TokenSizes:
    """How many bytes of a text one token of a tokenizer can stand for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = tokenizer.get_added_tokens_decoder().values()
        found = [*stages(tokenizer.normalizer, "normalizers"), *stages(tokenizer.pre_tokenizer, "pretokenizers")]
        #: Whether white space may go, or be swallowed by a token beside it.
        self.drops_spaces = any(stage["type"] in ("Strip", *_DROPPING_SPACES) for stage in found) or any(
            token.lstrip or token.rstrip for token in added
        )
        #: The most bytes; None where that has no bound, as parts of a text are dropped, or one token stands for all
        #: that is unknown.
        self.longest: int | None = None
        is_byte_level = any(stage["type"] == "ByteLevel" for stage in found)
        shrinking = [times for stage in found if (times := _shrinking(stage)) is not None]
        if len(shrinking) == len(found) and _knows_all(tokenizer, is_byte_level):
            size = len if is_byte_level else _bytes_of  # a character of that alphabet is a byte
            forms = [token.content for token in added]
            if tokenizer.normalizer is not None:
                forms += map(tokenizer.normalizer.normalize_str, tuple(forms))
            sizes = [*map(size, tokenizer.get_vocab(with_added_tokens=False)), *map(_bytes_of, forms)]
            self.longest = max(sizes) * math.prod(shrinking)

    def least_tokens(self, text: str) -> int:
        """How many tokens a text has at least."""
        if self.longest is None:
            return 0
        spaces = _SPACES if self.drops_spaces else ""
        return -(-(_bytes_of(text) - sum(text.count(space) * _bytes_of(space) for space in spaces)) // self.longest)


def _bytes_of(text: str) -> int:
    return len(text.encode())


def stages(whole: Any, key: str) -> list[dict[str, Any]]:
    """The stages of a normalizer, a pre-tokenizer or a decoder, as `tokenizer.json` has them under `key`."""
    waiting, found = [] if whole is None else [json.loads(whole.__getstate__())], []
    while waiting:
        part = waiting.pop()
        waiting += part.get(key, [])
        found += [part] if part["type"] != "Sequence" else []
    return found


def _shrinking(stage: dict[str, Any]) -> int | None:
    """How many times shorter a stage makes a text at most, dropped spaces apart; None where that has no bound."""
    if stage.get("behavior", "Removed") != "Removed":
        return 1
    if stage["type"] == "Replace":
        replaced, content = stage["pattern"].get("String"), stage["content"]
        return 1 if replaced is not None and _bytes_of(content) >= _bytes_of(replaced) else None
    return _SHRINKING.get(stage["type"])


def _knows_all(tokenizer: Tokenizer, is_byte_level: bool) -> bool:
    """Whether every text has tokens of its own, byte by byte where no longer ones are known."""
    model = tokenizer.model
    if not isinstance(model, models.BPE) or model.continuing_subword_prefix or model.end_of_word_suffix:
        return False
    if is_byte_level:
        needed = pre_tokenizers.ByteLevel.alphabet()
    elif model.byte_fallback:
        needed = [f"<0x{byte:02X}>" for byte in range(256)]
    else:
        return False
    return all(model.token_to_id(each) is not None for each in needed)
