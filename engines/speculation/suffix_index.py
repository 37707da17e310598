"""Drafts without a model: what followed the last time that these tokens were said.

Where the last tokens of a sequence stood somewhere before, what followed there is a good guess at what follows now. As
suffix decoding does, this index takes the longest suffix, looks into earlier answers too, and proposes a tree by how
often each continuation followed; but without a suffix tree: as in a compressor of the LZ77 family, every token is
linked with the place where the same 2 or 8 last tokens stood before, the places on the links are compared backwards,
and the longest matches speak.

Whatever is proposed, the base model verifies it: under greedy and drawn acceptance, tokens of another request can make
an answer faster or slower, never another one. (Typical acceptance is lossy: there, the candidates offered have a say in
the answer.) Memory is bounded: `most_tokens` limits what is kept of closed sequences, and `clear` forgets it; a running
sequence holds its own prompt and answer, at most the context of the engine.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from edgellm.engines.errors import EngineError

#: Numbers of last tokens by which places are linked, longest first.
_LENGTHS = (8, 2)
#: Matches are compared up to so many tokens; an answer is kept with so many tokens of its prompt before it.
_LONGEST = 32
#: At most so many places are looked at for each number of last tokens, in the sequence and in earlier answers.
_VISITS = 8
#: The weight with which a match of n tokens speaks for what followed it, and the weight of something else. A match that
#: grows along a path lessens the doubt. Fitted to what tools/bench/suffix_replay.py replays.
_WEIGHTS = [1 + length / 4 + (length / 10) ** 4 for length in range(2 * _LONGEST + 1)]
_DOUBTS = [
    [1.1 * math.sqrt(_WEIGHTS[match] / _WEIGHTS[match + level]) for level in range(_LONGEST + 1)]
    for match in range(_LONGEST + 1)
]
#: Stands before, between and behind sequences: no token equals it.
_GAP = -1
#: Slots of a running sequence's tables, at least.
_FEWEST_SLOTS = 4096
#: From so many tokens on, NumPy links them faster than a loop.
_MANY = 128
#: Odd factors of the hashes of 2 and 8 tokens, which are sums modulo 2**30.
_FACTORS = 0x2545F491, 0x1B873593, 0x05EBCA6B, 0x27D4EB2F
_BITS = 2**30 - 1


class Proposal(NamedTuple):
    """What may follow: a tree of N candidates below the last token, the likeliest first.

    `parents` are indices of earlier candidates, or -1 for the last token said; `promises` the estimated probabilities
    that a candidate is accepted if its parent is, `scores` logarithms of that for all of its path; `match` is the
    number of tokens of the longest suffix that was found (at most 32; 0 where none was, and N is 0). Lists, since they
    are read node by node: in microseconds, while a device may be waiting.
    """

    tokens: list[int]
    parents: list[int]
    scores: list[float]
    promises: list[float]
    match: int


class _History:
    """Tokens, and for each the place where perhaps the same 8 and 2 last ones stood before.

    Positions count from 1, behind a gap. From `room` positions on, the oldest are overwritten; a link is followed only
    to an older place, since a younger one has overwritten what the link meant. `grams` are the hashes of the last 8 and
    2 tokens.
    """

    def __init__(self, slots: int, room: int = 2**31) -> None:
        self.tokens, self.end, self.grams = array("i", [_GAP]), 1, (0, 0)
        self._room, self._mask = room, slots - 1
        self._heads = [array("i", bytes(4 * slots)) for _ in _LENGTHS]
        self._links = [array("i", [0]) for _ in _LENGTHS]
        self._pairs = [0] * 6  # the hashes of the last pairs

    def append(self, tokens: Sequence[int]) -> None:
        """Write tokens behind the last ones and link them."""
        said = array("i", tokens)
        if len(said) >= _MANY:
            self._append_many(said)
            return
        start, mask, position = self.end, self._mask, self.end
        (by_eight, by_pair), pairs, last = self._heads, self._pairs, self.tokens[self.end - 1]
        (eight, pair), (first, second, third, fourth) = self.grams, _FACTORS
        eights_linked, pairs_linked = [], []
        for token in said:
            pair = (token * first + last * second) & _BITS
            eight = (pair + pairs[-2] * second + pairs[-4] * third + pairs[-6] * fourth) & _BITS
            pairs.append(pair)
            slot = eight & mask
            eights_linked.append(by_eight[slot])
            by_eight[slot] = position
            slot = pair & mask
            pairs_linked.append(by_pair[slot])
            by_pair[slot] = position
            last = token
            position += 1
        self.tokens[start:position] = said
        self._links[0][start:position] = array("i", eights_linked)
        self._links[1][start:position] = array("i", pairs_linked)
        self.end, self.grams = position, (eight, pair)
        del pairs[:-6]

    def _append_many(self, tokens: array[int]) -> None:
        """The same as `append`, for so many tokens that NumPy is faster."""
        first, second, third, fourth = _FACTORS
        said = np.array([self.tokens[self.end - 1], *tokens], np.int64)
        pairs = np.concatenate([self._pairs, (said[1:] * first + said[:-1] * second) & _BITS])
        eights = (pairs[6:] + pairs[4:-2] * second + pairs[2:-4] * third + pairs[:-6] * fourth) & _BITS
        start, end = self.end, self.end + len(tokens)
        self.tokens[start:end] = tokens
        for hashes, heads, links in zip((eights, pairs[6:]), self._heads, self._links, strict=True):
            slots = hashes & self._mask
            order = np.argsort(slots, kind="stable")
            slots, places = slots[order], (order + start).astype(np.int32)
            begins = np.append(True, slots[1:] != slots[:-1])
            newest = np.frombuffer(heads, np.int32)
            linked = np.empty(len(order), np.int32)
            linked[order] = np.where(begins, newest[slots], np.roll(places, 1))
            newest[slots] = places  # of equal slots the last counts
            links[start:end] = array("i", linked.tobytes())
        self.end, self.grams, self._pairs = end, (int(eights[-1]), int(pairs[-1])), pairs[-6:].tolist()

    def append_whole(self, tokens: list[int]) -> None:
        """Write a sequence that ends, and a gap; where they do not fit behind the last ones, in place of the oldest."""
        tokens = [*tokens[max(0, len(tokens) + 2 - self._room) :], _GAP]
        if self.end + len(tokens) > self._room:
            self.tokens[self.end :] = array("i", [_GAP]) * (len(self.tokens) - self.end)
            self.end = 1
        self.append(tokens)

    def match(self, level: int, last: array[int], below: int, found: list, gram: int | None = None) -> None:
        """Add to `found` the places that end like `last`, the latest first: (tokens that are equal, history, position).

        Places are those where an n-gram of a hash stood, or where the history's own last one stood before. As many
        tokens as the level's are equal at least, and fewer than `below`.
        """
        tokens, links, newest, room = self.tokens, self._links[level], self.end - 1, self._room
        at_least, size = _LENGTHS[level], len(last)
        ending = last[-at_least:]
        position, age = (links[newest], 0) if gram is None else (self._heads[level][gram & self._mask], -1)
        for _ in range(_VISITS):
            older = (newest - position) % room
            if not position or older <= age:
                break
            end = position + 1
            if size < below and end > size and tokens[end - size : end] == last:
                found.append((size, self, position))
            elif end > at_least and tokens[end - at_least : end] == ending:
                equal = at_least
                while equal < below and last[size - 1 - equal] == tokens[position - equal]:
                    equal += 1
                if equal < below:
                    found.append((equal, self, position))
            position, age = links[position], older


class SaidSequence:
    """A running sequence in an index: its prompt and its answer so far."""

    def __init__(self, prompt_tokens: Sequence[int]) -> None:
        self.prompt_size, self.is_open = len(prompt_tokens), True
        self.history = _History(_slots(2 * len(prompt_tokens)))
        self.history.append(prompt_tokens)


class SuffixIndex:
    """What running sequences said, and the answers of closed ones: `most_tokens` of them, the oldest are forgotten.

    A token of a closed answer takes 20 to 28 bytes; one of a running sequence 12, and its tables 16 to 32 bytes for
    each token of the prompt (at least 32 KiB). The same calls give the same proposals. Not thread-safe: for the thread
    that owns the engines. Raises EngineError for a closed sequence.
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

    def propose(self, sequence: SaidSequence, nodes: int, depth: int, width: int, least: float = 0.0) -> Proposal:
        """Proposes at most `nodes` candidates, at most `depth` below the last token, at most `width` below the same
        one, each with a probability of at least `least`.

        Of equally likely ones that of the longer match comes first, then the sequence's own, then the latest.
        """
        _check_open(sequence)
        said = sequence.history
        places = self._places(said, width)
        if not places:
            return Proposal([], [], [], [], 0)
        match, depth = places[0][0], min(depth, _LONGEST)
        followers: dict[bytes, list] = {}
        for length, history, position in places:
            following = history.tokens[position + 1 : position + 1 + depth]
            if history is said and len(following) < depth:
                following = (following * depth)[:depth]  # a loop: behind its end it begins again
            following.append(_GAP)
            key = following.tobytes()
            if key in followers:
                followers[key][0] += _WEIGHTS[length]
            else:
                followers[key] = [_WEIGHTS[length], following.tolist()]
        highest = -math.log(least) if least > 0.0 else math.inf
        speaking = list(followers.values())
        if len(speaking) == 1:
            weight, following = speaking[0]
            return _chain(weight, following, _DOUBTS[match][:nodes], highest, match)
        return _grown(speaking, _DOUBTS[match], nodes, width, highest, match)

    def _places(self, said: _History, enough: int) -> list[tuple[int, _History, int]]:
        """Length, history and position of at most `_VISITS` matches, in the order of `propose`. Shorter ones are
        looked for where there are not `enough` longer ones."""
        last = said.tokens[max(1, said.end - _LONGEST) :]
        found: list[tuple[int, _History, int]] = []
        below = _LONGEST + 1
        for level, length in enumerate(_LENGTHS):
            if length <= len(last):
                said.match(level, last, below, found)
                if len(found) < _VISITS:
                    self._closed.match(level, last, below, found, said.grams[level])
            if len(found) >= enough:
                break
            below = length
        found.sort(key=itemgetter(0), reverse=True)
        return found[:_VISITS]


def _chain(weight: float, following: list[int], doubts: list[float], highest: float, match: int) -> Proposal:
    """What `_grown` gives where all places agree."""
    scores: list[float] = []
    promises: list[float] = []
    cost = 0.0
    for token, doubt in zip(following, doubts, strict=False):
        cost += math.log1p(doubt / weight)
        if token == _GAP or cost > highest:
            break
        scores.append(-cost)
        promises.append(weight / (weight + doubt))
    count = len(scores)
    return Proposal(following[:count], [*range(-1, count - 1)], scores, promises, match)


def _grown(followers: list[list], doubts: list[float], nodes: int, width: int, highest: float, match: int) -> Proposal:
    """The likeliest `nodes` paths that begin what `followers` say: each has a weight and tokens up to a gap. `doubts`
    are the weights of something else, by depth; the logarithm of no path's probability is below -`highest`."""
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    promises: list[float] = []
    waiting: list[tuple[float, int, int, int, int, float, list]] = []
    made, node, cost, level, speaking = 0, -1, 0.0, 0, followers
    push, pop, log = heapq.heappush, heapq.heappop, math.log
    while len(tokens) < nodes:
        if len(speaking) == 1:
            weight, following = speaking[0]
            total, token = weight + doubts[level], following[level]
            children = [] if token == _GAP else [(weight, token, speaking)]
        else:
            shares: dict[int, list] = {}
            total = doubts[level]
            for follower in speaking:
                weight, following = follower
                token = following[level]
                if token != _GAP:
                    total += weight
                    if token in shares:
                        shares[token].append(follower)
                    else:
                        shares[token] = [follower]
            children = [(sum([weight for weight, _ in agreed]), token, agreed) for token, agreed in shares.items()]
            if len(children) > width:
                children = sorted(children, key=itemgetter(0), reverse=True)[:width]
        for weight, token, agreed in children:
            path = cost + log(total / weight)
            if path <= highest:
                push(waiting, (path, made, node, token, level + 1, weight / total, agreed))
                made += 1
        if not waiting:
            break
        cost, _, parent, token, level, promise, speaking = pop(waiting)
        node = len(tokens)
        tokens.append(token)
        parents.append(parent)
        scores.append(-cost)
        promises.append(promise)
    return Proposal(tokens, parents, scores, promises, match)


def _slots(tokens: int) -> int:
    """Slots of a table for so many tokens: a power of two."""
    return 1 << (max(tokens, _FEWEST_SLOTS) - 1).bit_length()


def _check_open(sequence: SaidSequence) -> None:
    if not sequence.is_open:
        raise EngineError("the sequence is closed: open it again with all that it said")
