"""Files that are read whole: configurations, templates, prompts, tokenizers. Nothing in them is trusted, and that they
are files is not either.

A file of a checkpoint is an ordinary file, or a link that ends at one. What a user names may also be a pipe, as a shell
makes it of `<(...)`. Either has a limit, so that nothing is read for ever.
"""

from __future__ import annotations

import errno
import json
import os
import select
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING

from edgellm.engines.errors import EdgeLLMError, EngineDirectoryError
from edgellm.kernels.user_paths import printable

if TYPE_CHECKING:
    import tokenizers


#: The most that is read of a file, in bytes, by what it is. Published ones have at most a tenth of that.
CONFIG_BYTES = 16 << 20
WEIGHT_INDEX_BYTES = 128 << 20
VOCABULARY_BYTES = 256 << 20
TEMPLATE_BYTES = 1 << 20
SETTINGS_BYTES = 1 << 20
PROMPT_BYTES = 16 << 20
#: Files of a checkpoint that are no weights, and have another limit than a configuration.
_LIMITS = {
    "tokenizer.json": VOCABULARY_BYTES,
    "tokenizer.model": VOCABULARY_BYTES,
    "vocab.json": VOCABULARY_BYTES,
    "merges.txt": VOCABULARY_BYTES,
    "chat_template.json": TEMPLATE_BYTES,
    "model.safetensors.index.json": WEIGHT_INDEX_BYTES,
    "pytorch_model.bin.index.json": WEIGHT_INDEX_BYTES,
}
#: How long a pipe that nobody has opened for writing is given, and one whose writer is silent, in seconds.
WRITER_SECONDS, SILENT_SECONDS = 1.0, 60.0

_BLOCK_BYTES = 1 << 20
_EXPECTED = "expected an ordinary file, or a link that ends at one"
_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)


def size_limit(name: str) -> int:
    """The most bytes that a checkpoint's file of this name may have, if it holds no weights."""
    return _LIMITS.get(name, TEMPLATE_BYTES if name.endswith((".jinja", ".txt")) else CONFIG_BYTES)


def read_file(
    path: Path, limit: int, error_class: type[EdgeLLMError], what: str = "", advice: str = "", takes_pipes: bool = False
) -> bytes:
    """The content of a file of at most `limit` bytes; `what` names it in errors, `advice` ends them. With `takes_pipes`
    pipes and terminals are read too: for what a user names. Raises `error_class`, also where a pipe stays silent."""
    with _named(f"{what} {printable(path)}".lstrip(), error_class, advice):
        return _piped_bytes(path, limit) if takes_pipes else ordinary_bytes(path, limit)


@contextmanager
def _named(name: str, error_class: type[EdgeLLMError], advice: str) -> Iterator[None]:
    """Raise `error_class` for what is wrong with a file of this name."""
    try:
        yield
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise error_class(f"{name} cannot be read: {reason}{f'. {advice}' if advice else ''}") from error


def read_text(
    path: Path, limit: int, error_class: type[EdgeLLMError], what: str = "", takes_pipes: bool = False
) -> str:
    """Reads as `read_file` does, but UTF-8 text, with or without a byte order mark."""
    return decoded(read_file(path, limit, error_class, what, takes_pipes=takes_pipes), path, error_class, what)


def decoded(data: bytes, path: Path | str, error_class: type[EdgeLLMError], what: str = "") -> str:
    """The text of a file's content; `error_class` names the first byte that is not UTF-8."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise error_class(
            f"{f'{what} {printable(path)}'.lstrip()} is not UTF-8 text: invalid byte "
            f"0x{error.object[error.start]:02x} at byte offset {error.start}"
        ) from error


def ordinary_bytes(path: Path, limit: int) -> bytes:
    """The content of an ordinary file of at most `limit` bytes; raises OSError, ValueError for what is no path."""
    with open_ordinary(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise too_large(path, size, limit)
        return _joined(file.read, path, limit)


def open_ordinary(path: Path) -> FileIO:
    """An ordinary file, opened for reading without a buffer; OSError for anything else, which is not opened."""
    _refuse_other_kinds(path, path.stat().st_mode)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # it may have become a pipe meanwhile
    try:
        _refuse_other_kinds(path, os.fstat(descriptor).st_mode)
        return FileIO(descriptor)
    except BaseException:
        os.close(descriptor)
        raise


def check_ordinary(path: Path, limit: int, error_class: type[EdgeLLMError], advice: str = "") -> None:
    """Raise `error_class` where a file that is to be copied is no ordinary file or has more than `limit` bytes."""
    with _named(printable(path), error_class, advice):
        status = path.stat()
        _refuse_other_kinds(path, status.st_mode)
        if status.st_size > limit:
            raise too_large(path, status.st_size, limit)


def _refuse_other_kinds(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = next((words for is_kind, words in _KINDS if is_kind(mode)), "no file")
        raise OSError(errno.EINVAL, f"it is {kind}, {_EXPECTED}", str(path))


def too_large(path: Path, size: int | None, limit: int) -> OSError:
    """The error for a file of more than `limit` bytes, where it is known how many."""
    found = "it has" if size is None else f"it has {size:,} bytes,"
    return OSError(errno.EFBIG, f"{found} more than the {limit:,} bytes that are read of such a file", str(path))


def _joined(read: Callable[[int], bytes | None], path: Path, limit: int) -> bytes:
    blocks, size = [], 0
    while block := read(min(_BLOCK_BYTES, limit + 1 - size)):
        blocks.append(block)
        size += len(block)
        if size > limit:
            raise too_large(path, None, limit)
    return b"".join(blocks)


def _piped_bytes(path: Path, limit: int) -> bytes:
    """The content of a file, a pipe or a terminal; OSError for others, and where a pipe stays silent."""
    mode = path.stat().st_mode
    if not (stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)):
        return ordinary_bytes(path, limit)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    was_written, until = False, time.monotonic() + WRITER_SECONDS

    def read(count: int) -> bytes:
        """The next bytes, b"" at the end; waits for the writer for a while."""
        nonlocal was_written, until
        while True:
            block = None
            with suppress(BlockingIOError):  # somebody has opened it for writing
                block = os.read(descriptor, count)
            # No byte may mean that nobody has opened the pipe for writing yet, rather than that nothing more can come.
            is_there = block is not None and (block != b"" or was_written or bool(poll.poll(0)))
            if is_there or (block is None and not was_written):
                was_written, until = True, time.monotonic() + SILENT_SECONDS
            if block is not None and is_there:
                return block
            left = until - time.monotonic()
            if left <= 0:
                seconds = SILENT_SECONDS if was_written else WRITER_SECONDS
                raise OSError(errno.ETIMEDOUT, f"nothing was written into it for {seconds:.0f} s", str(path))
            poll.poll(left * 1000)

    try:
        return _joined(read, path, limit)
    finally:
        os.close(descriptor)


#: A text of so many characters is encoded within some milliseconds.
_LONG_TEXT = 1 << 14
_one_long_text = threading.Lock()
_ADVICE = "Copy the model's tokenizer.json anew from where it was published"


def read_tokenizer(path: Path, error_class: type[EdgeLLMError]) -> tokenizers.Tokenizer:
    """The tokenizer that a `tokenizer.json` describes; `error_class` names the file and what is wrong."""
    import tokenizers  # the command line reads small files without it

    data = read_file(path, VOCABULARY_BYTES, error_class, advice=_ADVICE)
    with _explained(f"{printable(path)} cannot be read as a tokenizer", error_class):
        tokenizer = tokenizers.Tokenizer.from_buffer(data)
    if dropout := getattr(tokenizer.model, "dropout", None):
        raise error_class(
            f"{printable(path)}: 'dropout' of the model is {dropout}, so that equal texts would become other tokens "
            "each time: set it to null, as it is meant for training alone"
        )
    return tokenizer


def encoded(tokenizer: tokenizers.Tokenizer, text: str, add_special_tokens: bool = False) -> list[int]:
    """The ids of a text; EngineDirectoryError where the tokenizer fails on it. Of long texts one at a time is encoded,
    which takes a hundred bytes a token, while other threads go on: only a batch lets the GIL go."""
    with _explained("the model's tokenizer fails on the prompt", EngineDirectoryError):
        if len(text) <= _LONG_TEXT:
            return tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        with _one_long_text:
            return tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids


def decoded_ids(tokenizer: tokenizers.Tokenizer, token_ids: list[int]) -> str:
    """The text of ids, special tokens included; EngineDirectoryError where the tokenizer fails on them."""
    with _explained("the model's tokenizer fails on the answer's tokens", EngineDirectoryError):
        return tokenizer.decode(token_ids, skip_special_tokens=False)


def check_tokenizer_file(path: Path, vocab_size: int, error_class: type[EdgeLLMError]) -> tokenizers.Tokenizer:
    """Reads as `read_tokenizer` does; ids of its vocabulary must be below the model's `vocab_size`. Tokens that were
    added beyond are left out, which the model knows nothing of: Gemma 3 1B's images, paddings of training."""
    tokenizer = read_tokenizer(path, error_class)
    largest = max(tokenizer.get_vocab(with_added_tokens=False).values(), default=-1)
    if largest >= vocab_size:
        raise error_class(
            f"{printable(path)} has token ids up to {largest}, but the model's vocabulary has only {vocab_size} "
            "entries: the tokenizer belongs to another model"
        )
    if all(token_id < vocab_size for token_id in tokenizer.get_added_tokens_decoder()):
        return tokenizer
    key, text = '"added_tokens":', tokenizer.to_str()
    start = text.index(key) + len(key)  # before the vocabulary, which is not parsed
    added, end = json.JSONDecoder().raw_decode(text, start)
    kept = json.dumps([token for token in added if token["id"] < vocab_size])
    return type(tokenizer).from_str(text[:start] + kept + text[end:])


@contextmanager
def _explained(what: str, error_class: type[EdgeLLMError]) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        # Rust's exception for a panic cannot be imported; others that are no Exception are Ctrl-C and its like.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise error_class(f"{what}: {' '.join(str(error).split()) or type(error).__name__}. {_ADVICE}") from error
