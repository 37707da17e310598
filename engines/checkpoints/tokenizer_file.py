"""The tokenizers library behind one door, where whatever it raises becomes an error of ours.

A `tokenizer.json` holds patterns and tables that nobody has checked. On some the library panics, and such a panic is a
BaseException that no `except Exception` catches; the library writes a remark of its own to standard error then, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import tokenizers

from edgellm.engines.directories.small_files import VOCABULARY_BYTES, read_file
from edgellm.engines.errors import EdgeLLMError, EngineDirectoryError
from edgellm.kernels.user_paths import printable

_ADVICE = "Copy the model's tokenizer.json anew from where it was published"


def read_tokenizer(path: Path, error_class: type[EdgeLLMError]) -> tokenizers.Tokenizer:
    """The tokenizer that a `tokenizer.json` describes; `error_class` names the file and what is wrong."""
    data = read_file(path, VOCABULARY_BYTES, error_class, advice=_ADVICE)
    with _explained(f"{printable(path)} cannot be read as a tokenizer", error_class):
        return tokenizers.Tokenizer.from_buffer(data)


def encoded(tokenizer: tokenizers.Tokenizer, text: str, add_special_tokens: bool = False) -> list[int]:
    """The ids of a text; EngineDirectoryError where the tokenizer fails on it."""
    with _explained("the model's tokenizer fails on the prompt", EngineDirectoryError):
        return tokenizer.encode(text, add_special_tokens=add_special_tokens).ids


def decoded_ids(tokenizer: tokenizers.Tokenizer, token_ids: list[int]) -> str:
    """The text of ids, special tokens included; EngineDirectoryError where the tokenizer fails on them."""
    with _explained("the model's tokenizer fails on the answer's tokens", EngineDirectoryError):
        return tokenizer.decode(token_ids, skip_special_tokens=False)


def check_tokenizer_file(path: Path, vocab_size: int, error_class: type[EdgeLLMError]) -> tokenizers.Tokenizer:
    """As `read_tokenizer`, and its ids must be below the model's `vocab_size`."""
    tokenizer = read_tokenizer(path, error_class)
    largest = largest_id(tokenizer)
    if largest >= vocab_size:
        raise error_class(
            f"{printable(path)} has token ids up to {largest}, but the model's vocabulary has only {vocab_size} "
            f"entries: "
            "the tokenizer belongs to another model"
        )
    return tokenizer


def largest_id(tokenizer: tokenizers.Tokenizer) -> int:
    """The largest token id, added tokens included; -1 without any."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)


@contextmanager
def _explained(what: str, error_class: type[EdgeLLMError]) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and not _is_panic(error):
            raise  # Ctrl-C
        raise error_class(f"{what}: {' '.join(str(error).split()) or type(error).__name__}. {_ADVICE}") from error


def _is_panic(error: BaseException) -> bool:
    """Whether Rust has panicked: its exception cannot be imported."""
    return type(error).__name__ == "PanicException"
