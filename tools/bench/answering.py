"""Sequences answered on a decoding loop by itself, without a server: for benchmarks and tests."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from edgellm.decoding.loop import DecodingLoop
from edgellm.decoding.sequence import DecodingSequence


def answered(loop: DecodingLoop, sequences: Sequence[DecodingSequence]) -> Iterator[tuple[DecodingSequence, int, str]]:
    """Answer all; yields (sequence, token id, text that it completed).

    `answer.finish("cancelled")` from outside ends a sequence at its next token, closing the iterator ends all. KV
    rows of the tokens up to then stay reusable. Where a sequence fails the others go on; the first failure is
    raised in the end.
    """
    waiting = deque(sequences)
    try:
        while waiting or loop.running:
            while waiting and _is_begun(loop, waiting[0]):
                waiting.popleft()
            for emitted in loop.advance():
                yield emitted[:3]
    except Exception:
        loop.abandon(keep_rows=False)
        raise
    finally:
        loop.abandon()
    for sequence in sequences:
        if sequence.failure is not None:
            raise sequence.failure


def _is_begun(loop: DecodingLoop, sequence: DecodingSequence) -> bool:
    """Admit a sequence if it has a place; a failure is its alone."""
    try:
        if not loop.slots.has_place(sequence):
            return False
        loop.admit(sequence)
    except Exception as error:
        sequence.failure = error
    return True
