"""Drafts without a model: what followed the last time that these tokens were said.

Answers repeat: they quote the prompt, edit a text that it holds, or follow the form of earlier answers. Where the last
tokens of a sequence stood somewhere before, what followed there is a good guess at what follows now. Prompt lookup
decoding looks for the last few tokens in the prompt and proposes the rest as a chain. Suffix decoding takes the longest
suffix, looks into earlier answers too, and proposes a tree by how often each continuation followed. This index does the
latter without a suffix tree: as in a compressor of the LZ77 family, every token is linked with the place where the same
2, 4 or 8 last tokens stood before, the places on the links are compared backwards, and the longest matches speak.

Whatever is proposed, the base model verifies it exactly: tokens of another request can make an answer faster or slower,
never another one. Memory is bounded: `SuffixIndex.clear` and its `most_tokens` say for how many tokens of closed
sequences; a running sequence holds its own prompt and answer, at most the context of the engine.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from edgellm.engines.errors import EngineError

#: Numbers of last tokens by which places are linked, longest first.
_LENGTHS = (8, 4, 2)
#: Matches are compared up to so many tokens; an answer is kept with so many tokens of its prompt before it.
_LONGEST = 32
#: At most so many places are looked at for each number of last tokens, in the sequence and in earlier answers.
_VISITS = 8
#: A match of n tokens speaks with weight n ** _GROWTH, against _DOUBT that something else follows; n grows along a path.
#: Both were fitted to what tools/bench/suffix_replay.py replays.
_GROWTH, _DOUBT = 2.0, 8.0
_WEIGHTS = [float(length) ** _GROWTH for length in range(_LONGEST + 1)]
#: Stands before, between and behind sequences: no token equals it.
_GAP = -1
#: Slots of a running sequence's tables, at least.
_FEWEST_SLOTS = 4096
#: Odd factors of the hashes of 2, 4 and 8 tokens, which are sums modulo 2**30.
_FACTORS = 0x2545F491, 0x1B873593, 0x05EBCA6B, 0x27D4EB2F
_BITS = 2**30 - 1


class Proposal(NamedTuple):
    """What may follow: a tree of N candidates below the last token, the likeliest first.

    `tokens` [N] int32; `parents` [N] int32 are indices of earlier candidates, or -1 for the last token said; `scores`
    [N] float32 are logarithms of the estimated probability that all tokens of the node's path are accepted; `match` is
    the number of tokens of the longest suffix that was found (at most 32; 0 where none was, and N is 0).
    """

    tokens: np.ndarray
    parents: np.ndarray
    scores: np.ndarray
    match: int


class _History:
    """Tokens, and for each the place where perhaps the same 8, 4 and 2 last ones stood before.

    Positions count from 1, behind a gap. From `room` positions on, the oldest are overwritten; a link is followed only
    to an older place, since a younger one has overwritten what the link meant. `grams` are the hashes of the last 8, 4
    and 2 tokens.
    """

    def __init__(self, slots: int, room: int = 2**31) -> None:
        self.tokens, self.end, self.grams = array("i", [_GAP]), 1, (0, 0, 0)
        self._room, self._mask = room, slots - 1
        self._heads = [array("i", bytes(4 * slots)) for _ in _LENGTHS]
        self._links = [array("i", [0]) for _ in _LENGTHS]
        self._pairs, self._fours = [0, 0], [0, 0, 0, 0]  # the hashes of the last places

    def append(self, tokens: Sequence[int]) -> None:
        """Write tokens behind the last ones and link them."""
        start, mask = self.end, self._mask
        by_eight, by_four, by_pair = self._heads
        links: tuple[list[int], list[int], list[int]] = ([], [], [])
        eights_linked, fours_linked, pairs_linked = (linked.append for linked in links)
        pairs, fours, last = self._pairs, self._fours, self.tokens[start - 1]
        eight, four, pair = self.grams
        first, second, third, fourth = _FACTORS
        for offset, token in enumerate(tokens):
            pair = (token * first + last * second) & _BITS
            four = (pair + pairs[offset] * third) & _BITS
            eight = (four + fours[offset] * fourth) & _BITS
            pairs.append(pair)
            fours.append(four)
            last, position = token, start + offset
            slot = eight & mask
            eights_linked(by_eight[slot])
            by_eight[slot] = position
            slot = four & mask
            fours_linked(by_four[slot])
            by_four[slot] = position
            slot = pair & mask
            pairs_linked(by_pair[slot])
            by_pair[slot] = position
        self.end = end = start + len(tokens)
        self.tokens[start:end] = array("i", tokens)
        for kept, linked in zip(self._links, links, strict=True):
            kept[start:end] = array("i", linked)
        self._pairs, self._fours, self.grams = pairs[-2:], fours[-4:], (eight, four, pair)

    def append_whole(self, tokens: list[int]) -> None:
        """Write a sequence that ends, and a gap; where they do not fit behind the last ones, in place of the oldest."""
        tokens = [*tokens[max(0, len(tokens) + 2 - self._room) :], _GAP]
        if self.end + len(tokens) > self._room:
            self.tokens[self.end :] = array("i", [_GAP]) * (len(self.tokens) - self.end)
            self.end = 1
        self.append(tokens)

    def own_place(self, level: int) -> tuple[int, int]:
        """Where perhaps the same last tokens stood before the end, and the end's age."""
        return self._links[level][self.end - 1], 0

    def place(self, level: int, gram: int) -> tuple[int, int]:
        """Where an n-gram of this hash perhaps stood last, and an age below all."""
        return self._heads[level][gram & self._mask], -1

    def matches(self, level: int, last: array, below: int, start: tuple[int, int]) -> list[tuple[int, int]]:
        """Places on the links from `start` which end like `last`, the latest first, and how many tokens are equal: at
        least the level's number, less than `below`."""
        tokens, links, newest, room = self.tokens, self._links[level], self.end - 1, self._room
        at_least, size = _LENGTHS[level], len(last)
        ending, (position, age), found = last[-at_least:], start, []
        for _ in range(_VISITS):
            older = (newest - position) % room
            if not position or older <= age:
                break
            end = position + 1
            if position >= size and tokens[end - size : end] == last:
                match = size
            elif position >= at_least and tokens[end - at_least : end] == ending:
                match = at_least
                while match < size and last[size - match - 1] == tokens[position - match]:
                    match += 1
            else:
                match = 0
            if at_least <= match < below:
                found.append((match, position))
            position, age = links[position], older
        return found


class SaidSequence:
    """A running sequence in an index: its prompt and its answer so far."""

    def __init__(self, prompt_tokens: Sequence[int]) -> None:
        self.prompt_size, self.is_open = len(prompt_tokens), True
        self.history = _History(_slots(2 * len(prompt_tokens)))
        self.history.append(prompt_tokens)


class SuffixIndex:
    """What running sequences said, and the answers of closed ones: `most_tokens` of them, the oldest are forgotten.

    A token of a closed answer takes 28 to 40 bytes; one of a running sequence 16, and its tables 24 to 48 bytes for each
    token of the prompt (at least 48 KiB). Equal calls give equal proposals. Not thread-safe: for the thread that owns
    the engines. Raises EngineError for a closed sequence.
    """

    def __init__(self, most_tokens: int = 65_536) -> None:
        if not 0 <= most_tokens < 2**30:
            raise EngineError(f"most_tokens is {most_tokens}: expected 0 (no earlier answers) to {2**30 - 1}")
        self._most_tokens = most_tokens
        self.clear()

    def clear(self) -> None:
        """Forget the answers of closed sequences. Running ones keep what they said."""
        self._closed = _History(_slots(self._most_tokens), self._most_tokens + 1)

    def open(self, prompt_tokens: Sequence[int]) -> SaidSequence:
        """A sequence with this prompt. One whose history was cut or edited is closed and opened again."""
        return SaidSequence(prompt_tokens)

    def extend(self, sequence: SaidSequence, tokens: Sequence[int]) -> None:
        """Take note of accepted tokens of a running sequence."""
        _check_open(sequence)
        sequence.history.append(tokens)

    def close(self, sequence: SaidSequence) -> None:
        """End a sequence: its answer, with the last tokens of the prompt before it, becomes an earlier answer."""
        _check_open(sequence)
        sequence.is_open = False
        said = sequence.history
        if said.end > 1 + sequence.prompt_size and self._most_tokens > 1:
            self._closed.append_whole(said.tokens[max(1, 1 + sequence.prompt_size - _LONGEST) :].tolist())

    def propose(self, sequence: SaidSequence, nodes: int, depth: int, width: int) -> Proposal:
        """At most `nodes` candidates, at most `depth` below the last token, at most `width` below the same one.

        Of equally likely ones that of the longer match comes first, then the sequence's own, then the latest.
        """
        _check_open(sequence)
        said = sequence.history
        places = self._places(said, width)
        weights: dict[bytes, float] = {}
        for match, history, position in places:
            following = history.tokens[position + 1 : position + 1 + depth]
            if history is said and len(following) < depth:
                following = (following * depth)[:depth]  # a loop: behind its end it begins again
            key = following.tobytes()
            weights[key] = weights.get(key, 0.0) + _WEIGHTS[match]
        followers = [(weight, array("i", key).tolist()) for key, weight in weights.items()]
        match = places[0][0] if places else 0
        doubts = [_DOUBT * (match / (match + level)) ** _GROWTH for level in range(depth)] if places else []
        return Proposal(*_grown(followers, doubts, nodes, width), match)

    def _places(self, said: _History, enough: int) -> list[tuple[int, _History, int]]:
        """Length, history and position of matches, in the order of `propose`. Shorter ones are looked for where there are
        not `enough` longer ones."""
        last = said.tokens[max(1, said.end - _LONGEST) :]
        found: list[tuple[int, _History, int]] = []
        below = _LONGEST + 1
        for level, length in enumerate(_LENGTHS):
            if length <= len(last):
                for history, start in (
                    (said, said.own_place(level)),
                    (self._closed, self._closed.place(level, said.grams[level])),
                ):
                    found += [(match, history, place) for match, place in history.matches(level, last, below, start)]
            if len(found) >= enough:
                break
            below = length
        found.sort(key=_longest_first)
        return found


def _longest_first(place: tuple[int, _History, int]) -> int:
    return -place[0]


def _grown(
    followers: list[tuple[float, list[int]]], doubts: list[float], nodes: int, width: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, parents and scores of the likeliest `nodes` paths that begin what followed, with its weight. `doubts` are
    the weights of something else by depth."""
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    waiting: list[tuple[float, int, int, int, int, list]] = []
    made, node, cost, level, speaking = 0, -1, 0.0, 0, followers
    while len(tokens) < nodes:
        if level < len(doubts):
            total, shares = doubts[level], {}
            for follower in speaking:
                weight, following = follower
                if level < len(following) and following[level] != _GAP:
                    total += weight
                    share = shares.setdefault(following[level], [0.0])
                    share[0] += weight
                    share.append(follower)
            children = list(shares.items())
            if len(children) > width:
                children = sorted(children, key=_heaviest_first)[:width]
            for token, (weight, *others) in children:
                child = cost - math.log(weight / total), made, node, token, level + 1, others
                heapq.heappush(waiting, child)
                made += 1
        if not waiting:
            break
        cost, _, parent, token, level, speaking = heapq.heappop(waiting)
        node = len(tokens)
        tokens.append(token)
        parents.append(parent)
        scores.append(-cost)
    return np.array(tokens, np.int32), np.array(parents, np.int32), np.array(scores, np.float32)


def _heaviest_first(child: tuple[int, list]) -> float:
    return -child[1][0]


def _slots(tokens: int) -> int:
    """Slots of a table for so many tokens: a power of two."""
    return 1 << (max(tokens, _FEWEST_SLOTS) - 1).bit_length()


def _check_open(sequence: SaidSequence) -> None:
    if not sequence.is_open:
        raise EngineError("the sequence is closed: open it again with all that it said")
