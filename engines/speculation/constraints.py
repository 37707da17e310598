"""Rules on the tokens of an answer, as runners see them: which may come next, at a step and at each node of a tree.

A mask is a row of ceil(V / 32) words (uint32 or int32); bit i % 32 of word i // 32 is set where token i may come next.
Bits behind the width V of the logits are never set. Rules are of one answer alone, and of one thread at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from edgellm.engines.errors import ConstraintError


class TokenConstraint(Protocol):
    """The rules on one answer's tokens, at the place that the tokens consumed so far have led to. They forbid tokens,
    ask for none and are the same everywhere, unless they say otherwise."""

    def fill_mask(self, row: np.ndarray) -> None:
        """Write the mask of the next token to `row` (uint32 or int32 [ceil(V / 32)], contiguous). Raises
        ConstraintError where no token is allowed, or the rules cannot be computed; the place stays as it was."""

    def try_advance(self, token: int) -> bool:
        """Consume a token where it is allowed; else return False and leave everything as it was. Raises ConstraintError
        where the rules cannot be followed any further; the place stays as it was."""

    def rollback(self, count: int) -> None:
        """Take the latest `count` tokens back that were consumed."""
        return

    def forced(self, most: int) -> list[int]:
        """Up to `most` tokens that spell what has to come next; empty where there is a choice. Nothing is consumed.

        They are allowed one after the other, and are candidates: the text is forced, but its masks may allow other
        tokens that spell it, too, so that a model may choose these instead.
        """
        return []

    def is_free(self) -> bool:
        """Whether each of the V tokens is allowed now, so that a mask would change nothing."""

    def is_complete(self) -> bool:
        """Whether the answer may end here: the tokens so far are all that the rules ask for."""
        return True

    def is_stopped(self) -> bool:
        """Whether the answer has to end here: nothing may follow but the end of sequence, which may have come."""
        return False


def mask_words(vocab_size: int) -> int:
    return -(-vocab_size // 32)


def mask_of(token_ids: Iterable[int], vocab_size: int) -> np.ndarray:
    """The mask uint32 [ceil(V / 32)] that allows these tokens alone. Raises IndexError for an id outside of V."""
    allowed = np.zeros(vocab_size, np.bool_)
    allowed[list(token_ids)] = True
    return packed_mask(allowed)


def packed_mask(allowed: np.ndarray) -> np.ndarray:
    """The mask uint32 [ceil(V / 32)] of `allowed` bool [V]."""
    padded = np.zeros(32 * mask_words(len(allowed)), np.bool_)
    padded[: len(allowed)] = allowed
    return np.packbits(padded, bitorder="little").view("<u4").astype(np.uint32, copy=False)


def allows(row: np.ndarray, token: int) -> bool:
    """Whether a mask [ceil(V / 32)] has the bit of a token; ids outside of it have none."""
    return 0 <= token < 32 * len(row) and bool((int(row[token >> 5]) >> (token & 31)) & 1)


def fill_tree_masks(
    constraint: TokenConstraint, tokens: Sequence[int], parents: Sequence[int], masks: np.ndarray
) -> np.ndarray:
    """Write the masks of the tokens that follow each node of a tree to the leading rows of `masks` (uint32 or int32
    [>= T, ceil(V / 32)]); returns int32 [T] which of them each node has.

    Node 0 is the root, whose token is consumed already; the parent of node i is `parents[i]` < i, and a node without
    one (-1) is padding. -1 stands for no mask: of nodes that the rules leave free, that they forbid, or behind which
    they have no way on, and of all below the latter. What is forbidden is never reached. A dead end is found by
    decoding without drafts only by going there, and by the round that goes there when it has gone.

    The constraint ends where it began. Raises ConstraintError where the root itself has no way on.
    """
    children: list[list[int]] = [[] for _ in tokens]
    for node in range(len(tokens) - 1, 0, -1):  # the last pushed is the first visited
        if parents[node] >= 0:
            children[parents[node]].append(node)
    rows, used = np.full(len(tokens), -1, np.int32), 0
    if not constraint.is_free():
        constraint.fill_mask(masks[0])
        rows[0], used = 0, 1
    depth, waiting = 0, [(node, 1) for node in children[0]]
    try:
        while waiting:
            node, level = waiting.pop()
            if depth >= level:
                constraint.rollback(depth - level + 1)
                depth = level - 1
            try:
                if not constraint.try_advance(int(tokens[node])):
                    continue
                depth = level
                if not constraint.is_free():
                    constraint.fill_mask(masks[used])
                    rows[node], used = used, used + 1
            except ConstraintError:
                continue
            waiting += [(child, level + 1) for child in children[node]]
    finally:
        if depth:
            constraint.rollback(depth)
    return rows


class AllowedTokens(TokenConstraint):
    """Every token of an answer is one of these, the end of sequence only where it is among them."""

    def __init__(self, token_ids: Iterable[int], vocab_size: int) -> None:
        self._mask = mask_of(token_ids, vocab_size)
        allowed = np.flatnonzero(np.unpackbits(self._mask.view(np.uint8), bitorder="little"))
        if not len(allowed):
            raise ConstraintError("allowed_token_ids is empty: an answer needs at least one token that may come")
        self._is_free = len(allowed) == vocab_size
        self._only = int(allowed[0]) if len(allowed) == 1 else None

    def fill_mask(self, row: np.ndarray) -> None:
        row.view(np.uint32)[:] = self._mask

    def try_advance(self, token: int) -> bool:
        return allows(self._mask, token)

    def forced(self, most: int) -> list[int]:
        return [] if self._only is None else [self._only] * most

    def is_free(self) -> bool:
        return self._is_free


class LateEnd(TokenConstraint):
    """None of the tokens that end an answer is among its first `min_tokens`."""

    def __init__(self, ending_ids: Iterable[int], min_tokens: int, vocab_size: int) -> None:
        """`ending_ids` beyond `vocab_size` are never drawn, and left out."""
        self._masks = [packed_mask(np.ones(vocab_size, np.bool_))] * 2
        self._masks[1] = self._masks[0] & ~mask_of((token for token in ending_ids if token < vocab_size), vocab_size)
        self._left = min_tokens

    def fill_mask(self, row: np.ndarray) -> None:
        row.view(np.uint32)[:] = self._masks[self._left > 0]

    def try_advance(self, token: int) -> bool:
        is_allowed = allows(self._masks[self._left > 0], token)
        self._left -= is_allowed
        return is_allowed

    def rollback(self, count: int) -> None:
        self._left += count

    def is_free(self) -> bool:
        return self._left <= 0


class BadWords(TokenConstraint):
    """No answer contains one of these sequences of tokens.

    A word of one token is never allowed. The last token of a longer one is forbidden wherever the tokens before it end
    the answer so far: at a node of a tree, the answer with the node's own path. The prompt does not count, as in vLLM
    (transformers counts it): what a prompt ends with cannot forbid what an answer begins with.
    """

    def __init__(self, words: Iterable[Sequence[int]], vocab_size: int) -> None:
        """`words` have at least one token each, ids from 0 to `vocab_size` - 1."""
        unique = sorted({tuple(map(int, word)) for word in words})
        allowed = np.ones(vocab_size, np.bool_)
        allowed[[word[0] for word in unique if len(word) == 1]] = False
        self._mask = packed_mask(allowed)
        self._forbids_always = not allowed.all()
        self._last_by_beginning: dict[tuple[int, ...], list[int]] = {}
        for word in unique:
            if len(word) > 1:
                self._last_by_beginning.setdefault(word[:-1], []).append(word[-1])
        self._lengths = sorted({len(beginning) for beginning in self._last_by_beginning})
        self._answer: list[int] = []

    def _forbidden_here(self) -> list[int]:
        answer = self._answer
        return [
            token
            for length in self._lengths
            if length <= len(answer)
            for token in self._last_by_beginning.get(tuple(answer[-length:]), ())
        ]

    def fill_mask(self, row: np.ndarray) -> None:
        bits = row.view(np.uint32)
        bits[:] = self._mask
        for token in self._forbidden_here():
            bits[token >> 5] &= np.uint32(~(1 << (token & 31)) & 0xFFFFFFFF)
        if not bits.any():
            raise ConstraintError("bad_words forbid every token that could come next: leave some of them out")

    def try_advance(self, token: int) -> bool:
        if not allows(self._mask, token) or token in self._forbidden_here():
            return False
        self._answer.append(token)
        return True

    def rollback(self, count: int) -> None:
        del self._answer[len(self._answer) - count :]

    def is_free(self) -> bool:
        return not self._forbids_always and not self._forbidden_here()


class AllConstraints(TokenConstraint):
    """Several rules at a time: a token is allowed where each allows it."""

    def __init__(self, constraints: Sequence[TokenConstraint]) -> None:
        """The constraints, at least one, each of them over the same V tokens."""
        self._constraints = tuple(constraints)

    def fill_mask(self, row: np.ndarray) -> None:
        bits = row.view(np.uint32)
        binding = [each for each in self._constraints if not each.is_free()] or self._constraints[:1]
        binding[0].fill_mask(bits)
        if len(binding) > 1:
            more = np.empty_like(bits)
            for each in binding[1:]:
                each.fill_mask(more)
                bits &= more
            if not bits.any():
                raise ConstraintError(
                    "structure, allowed_token_ids, bad_words and min_tokens together leave no token that could come "
                    "next, not even the end of the answer: allow its end-of-sequence id, or forbid less"
                )

    def try_advance(self, token: int) -> bool:
        advanced: list[TokenConstraint] = []
        try:
            for each in self._constraints:
                if not each.try_advance(token):
                    break
                advanced.append(each)
        finally:
            if len(advanced) < len(self._constraints):
                for each in advanced:
                    each.rollback(1)
        return len(advanced) == len(self._constraints)

    def rollback(self, count: int) -> None:
        for each in self._constraints:
            each.rollback(count)

    def forced(self, most: int) -> list[int]:
        """What one of the rules forces and the others allow."""
        longest = max((each.forced(most) for each in self._constraints), key=len)
        count = 0
        while count < len(longest) and self.try_advance(longest[count]):
            count += 1
        self.rollback(count)
        return longest[:count]

    def is_free(self) -> bool:
        return all(each.is_free() for each in self._constraints)

    def is_complete(self) -> bool:
        return all(each.is_complete() for each in self._constraints)

    def is_stopped(self) -> bool:
        return any(each.is_stopped() for each in self._constraints)
