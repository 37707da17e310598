"""Callbacks that are told the pieces of answers by the thread that computes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from edgellm.errors import RequestError
from edgellm.generation import Answering
from edgellm.responses import Chunk

OnChunk = Callable[[Chunk], object]


class ChunkCallbacks:
    """Hands what has come of each answer to its callback, whenever it is called.

    What a callback raises ends its request, which fails with that, and leaves the others alone.
    """

    def __init__(self, told: Iterable[tuple[Answering, OnChunk]]) -> None:
        self._told = dict(told)

    def __call__(self) -> None:
        for answering, on_chunk in list(self._told.items()):
            try:
                while (chunk := answering.take()) is not None:
                    on_chunk(chunk)
            except Exception as error:
                del self._told[answering]
                answering.sequence.failure = error  # the next round takes it out
                if answering.ended:
                    answering.end(None, error)


def callbacks_of_each(on_chunk: Any, count: int | None) -> list[OnChunk | None]:
    """The callbacks of `count` requests, None where one has none; `count` None: of one that is not in a list.

    Raises RequestError for what is not a callable or None for each.
    """
    if count is None:
        return [_checked(on_chunk, "on_chunk")]
    if on_chunk is None:
        return [None] * count
    expected = f"expected a list with a callable or None for each of the {count} requests"
    if not isinstance(on_chunk, Sequence) or isinstance(on_chunk, (str, bytes)):
        raise RequestError(f"on_chunk is a {type(on_chunk).__name__}: {expected}")
    if len(on_chunk) != count:
        raise RequestError(f"on_chunk has {len(on_chunk)} entries: {expected}")
    return [_checked(each, f"on_chunk[{index}]") for index, each in enumerate(on_chunk)]


def _checked(callback: Any, name: str) -> OnChunk | None:
    if callback is not None and not callable(callback):
        raise RequestError(f"{name} is a {type(callback).__name__}: expected a callable that takes a Chunk, or None")
    return callback
