"""What was said before and what followed it, against a search through everything that is still known."""

from __future__ import annotations

import math
import random
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgellm.engines.errors import EngineError
from edgellm.engines.speculation import suffix_index
from edgellm.engines.speculation.suffix_index import Proposal, SuffixIndex

FEW_TOKENS = st.lists(st.integers(0, 2), max_size=40)
SHAPES = st.tuples(st.integers(1, 20), st.integers(1, 9), st.integers(1, 4))


class Reference:
    """Does what the index does by comparing every place with every other one."""

    def __init__(self, most_tokens: int) -> None:
        self.room, self.end = most_tokens + 1, 1
        self.closed = [-1] * self.room

    def close(self, prompt: list[int], answer: list[int]) -> None:
        """An answer is written with 32 tokens of its prompt, behind the last one or at the start."""
        if not answer or self.room < 3:
            return
        whole = ([*prompt[len(prompt) - min(32, len(prompt)) :], *answer])[-(self.room - 2) :] + [-1]
        if self.end + len(whole) > self.room:
            self.closed[self.end :] = [-1] * (self.room - self.end)
            self.end = 1
        self.closed[self.end : self.end + len(whole)] = whole
        self.end += len(whole)

    def propose(self, said: list[int], nodes: int, depth: int, width: int) -> tuple[list, int]:
        """(path of tokens, score) of each candidate in order, and the longest match."""
        own = [(common(said, said[:end]), said[end:]) for end in range(len(said) - 1, 0, -1)]
        ends = [*range(self.end - 1, 0, -1), *range(self.room - 1, self.end - 1, -1)]
        earlier = [
            (common(said, self.closed[max(0, end - 31) : end + 1]), self.closed[end + 1 : end + 1 + depth])
            for end in ends
            if self.closed[end] >= 0
        ]
        found = [(match, (following * depth)[:depth]) for match, following in own if match >= 8]
        found += [(match, following) for match, following in earlier if match >= 8]
        if len(found) < width:
            found += [(match, (following * depth)[:depth]) for match, following in own if 2 <= match < 8]
            found += [(match, following) for match, following in earlier if 2 <= match < 8]
        found.sort(key=lambda place: -place[0])
        longest = found[0][0] if found else 0
        paths: dict[tuple[int, ...], float] = {}
        self._spread((), 0.0, found, longest, (depth, width), paths)
        best = sorted(paths.items(), key=lambda path: -path[1])
        return best[:nodes], longest

    def _spread(self, path: tuple, score: float, speaking: list, longest: int, limits: tuple, paths: dict) -> None:
        depth, width = limits
        level = len(path)
        speaking = [one for one in speaking if level < len(one[1]) and one[1][level] >= 0]
        if level == depth or not speaking:
            return
        weights = suffix_index._WEIGHTS
        total = suffix_index._DOUBTS[longest][level] + sum(weights[match] for match, _ in speaking)
        agreed: dict[int, list] = {}
        for one in speaking:
            agreed.setdefault(one[1][level], []).append(one)
        likeliest = sorted(agreed.items(), key=lambda item: -round(sum(weights[match] for match, _ in item[1]), 6))
        for token, those in likeliest[:width]:
            child = score + math.log(sum(weights[match] for match, _ in those) / total)
            paths[(*path, token)] = child
            self._spread((*path, token), child, those, longest, limits, paths)


def common(said: list[int], before: list[int]) -> int:
    """How many last tokens are equal, up to 32."""
    equal = 0
    for one, other in zip(reversed(said[-32:]), reversed(before), strict=False):
        if one != other:
            break
        equal += 1
    return equal


def paths(proposal: Proposal) -> list[tuple[int, ...]]:
    """The tokens down to each candidate."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(proposal.tokens, proposal.parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


def check_tree(proposal: Proposal, nodes: int, depth: int, width: int) -> None:
    """Connected, parents first, no equal siblings, scores that never rise, and within its limits."""
    tokens, parents, scores, promises, _ = proposal
    assert len(tokens) == len(parents) == len(scores) == len(promises) <= nodes
    assert all(-1 <= parent < node for node, parent in enumerate(parents))
    for parent, score, promise in zip(parents, scores, promises, strict=True):
        assert score - (scores[parent] if parent >= 0 else 0.0) == pytest.approx(math.log(promise), abs=1e-9)
    found = paths(proposal)
    assert len(set(found)) == len(found) and all(len(path) <= depth for path in found)
    assert max(np.bincount(np.array(parents, int) + 1), default=0) <= width
    assert (np.diff(scores, prepend=0.0) <= 0).all()  # likeliest first, so never above the parent


@pytest.fixture
def every_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many places are linked, all are looked at."""
    monkeypatch.setattr(suffix_index, "_VISITS", 10**6)


def said_before(index: SuffixIndex, prompt: list[int], answer: list[int]) -> None:
    """A request from its prompt to its end."""
    sequence = index.open(prompt)
    index.extend(sequence, answer)
    index.close(sequence)


@pytest.mark.usefixtures("every_place")
@pytest.mark.parametrize("most_tokens", [0, 1, 2, 9, 60, 500])
def test_proposals_are_those_of_brute_force(most_tokens: int) -> None:
    @settings(max_examples=40, deadline=None)
    @given(
        st.lists(st.tuples(FEW_TOKENS, FEW_TOKENS), max_size=6), FEW_TOKENS, st.lists(FEW_TOKENS, max_size=4), SHAPES
    )
    def check(requests: list, prompt: list[int], rounds: list[list[int]], shape: tuple[int, int, int]) -> None:
        index, reference = SuffixIndex(most_tokens), Reference(most_tokens)
        said, sequence = list(prompt), index.open(prompt)
        for earlier in requests:
            said_before(index, *earlier)
            reference.close(*earlier)
        for accepted in [[], *rounds]:
            said += accepted
            index.extend(sequence, accepted)
            proposal = index.propose(sequence, *shape)
            expected, longest = reference.propose(said, *shape)
            check_tree(proposal, *shape)
            assert proposal.match == longest
            np.testing.assert_allclose(proposal.scores, [score for _, score in expected], rtol=1e-5, atol=1e-6)
            scores = dict(reference.propose(said, 10**6, *shape[1:])[0])
            for path, score in zip(paths(proposal), proposal.scores, strict=True):
                assert scores[path] == pytest.approx(score, abs=1e-5)

    check()


@pytest.mark.usefixtures("every_place")
@pytest.mark.parametrize("longest", [8, 30, 90])
def test_many_requests_leave_what_brute_force_keeps(longest: int) -> None:
    rng, index, reference = random.Random(longest), SuffixIndex(100), Reference(100)
    for _ in range(150):
        request = [rng.randrange(5) for _ in range(3)], [rng.randrange(5) for _ in range(rng.randrange(longest))]
        said_before(index, *request)
        reference.close(*request)
        said = [rng.randrange(5) for _ in range(12)]
        expected, longest_match = reference.propose(said, 30, 4, 5)
        proposal = index.propose(index.open(said), 30, 4, 5)
        assert proposal.match == longest_match
        np.testing.assert_allclose(proposal.scores, [score for _, score in expected], rtol=1e-5, atol=1e-6)


def test_many_tokens_are_linked_like_one_after_the_other() -> None:
    rng = random.Random(3)
    tokens = [rng.choice([0, 1, 2, 262_143, 2**31 - 1]) for _ in range(3000)]
    at_once, one_by_one = suffix_index._History(4096), suffix_index._History(4096)
    for start in range(0, 3000, 750):
        at_once.append(tokens[start : start + 750])
        for token in tokens[start : start + 750]:
            one_by_one.append([token])
    assert vars(at_once) == vars(one_by_one)


def test_the_longer_match_then_the_own_then_the_latest_comes_first() -> None:
    index = SuffixIndex()
    said_before(index, [], [5, 1, 2, 30])
    said_before(index, [], [6, 1, 2, 31])
    assert index.propose(index.open([1, 2]), 1, 1, 1).tokens == [31]  # as long, later
    assert index.propose(index.open([5, 1, 2]), 1, 1, 1).tokens == [30]  # longer
    proposal = index.propose(index.open([1, 2, 32, 9, 1, 2]), 3, 1, 3)
    assert proposal.tokens == [32, 31, 30]  # as long, the sequence's own, then later
    assert proposal.match == 2


def test_what_is_hardly_likely_can_be_left_out() -> None:
    """The tree is the same without the nodes below a probability, which come last and have no others below them."""
    fewer = 0
    for whole, cut in zip(played(7), played(7, 0.05), strict=True):
        kept = sum(score >= math.log(0.05) for score in whole.scores)
        assert cut == Proposal(*(each[:kept] for each in whole[:4]), whole.match)
        fewer += kept < len(whole.tokens)
    assert fewer > 20


def test_what_followed_more_often_comes_first() -> None:
    index = SuffixIndex()
    for token in (30, 30, 31):
        said_before(index, [], [1, 2, token])
    proposal = index.propose(index.open([1, 2]), 2, 1, 2)
    assert proposal.tokens == [30, 31]
    assert np.exp(proposal.scores[0]) == pytest.approx(2 * np.exp(proposal.scores[1]))


def test_without_a_match_there_is_no_candidate() -> None:
    index = SuffixIndex()
    for prompt in ([], [1], [1, 2, 3, 4, 5]):
        proposal = index.propose(index.open(prompt), 8, 8, 2)
        assert (proposal.match, len(proposal.tokens), len(proposal.parents), len(proposal.scores)) == (0, 0, 0, 0)


def test_a_loop_goes_on_behind_its_end() -> None:
    index = SuffixIndex()
    proposal = index.propose(index.open([9, 1, 2, 3, 1, 2, 3, 1, 2]), 7, 7, 1)
    assert proposal.tokens == [3, 1, 2, 3, 1, 2, 3]
    assert proposal.parents == [-1, 0, 1, 2, 3, 4, 5]


def test_an_answer_is_found_from_its_first_token_and_its_prompt_is_forgotten() -> None:
    index = SuffixIndex()
    said_before(index, [40, 41, 42, *range(100, 132)], [7, 8, 9])
    assert index.propose(index.open([130, 131]), 3, 3, 1).tokens == [7, 8, 9]
    assert index.propose(index.open([40, 41]), 3, 3, 1).match == 0


def test_arrays_of_numpy_are_tokens_too() -> None:
    index = SuffixIndex()
    sequence = index.open(np.array([262_000, 261_000, 5], np.int32))
    index.extend(sequence, np.array([262_000, 261_000], np.int32))
    assert index.propose(sequence, 1, 1, 1).tokens == [5]


def test_memory_is_bounded_and_a_running_sequence_keeps_what_it_said() -> None:
    index, rng = SuffixIndex(2000), random.Random(1)
    running = index.open([1, 2, 3, 4])
    for _ in range(300):
        said_before(index, [], [rng.randrange(10, 50) for _ in range(rng.randrange(1, 90))])
    closed = index._closed
    assert len(closed.tokens) <= 2001
    assert [len(links) for links in closed._links] == [len(closed.tokens)] * 2
    assert [len(heads) for heads in closed._heads] == [4096, 4096]
    index.extend(running, [1, 2])
    assert index.propose(running, 2, 2, 1).tokens == [3, 4]


def test_the_oldest_answers_are_forgotten_first() -> None:
    index = SuffixIndex(100)
    for first in range(1000, 5000, 100):
        said_before(index, [], list(range(first, first + 24)))
    known = [first for first in range(1000, 5000, 100) if index.propose(index.open([first, first + 1]), 1, 1, 1).match]
    assert known == [4600, 4700, 4800, 4900]


def test_clear_forgets_answers_of_closed_sequences_alone() -> None:
    index = SuffixIndex()
    said_before(index, [], [1, 2, 3])
    running = index.open([5, 6, 7, 5, 6])
    index.clear()
    assert index.propose(index.open([1, 2]), 1, 1, 1).match == 0
    assert index.propose(running, 1, 1, 1).tokens == [7]


@pytest.mark.parametrize("most_tokens", [-1, 2**30])
def test_a_limit_that_cannot_be_is_refused(most_tokens: int) -> None:
    with pytest.raises(EngineError, match=f"most_tokens is {most_tokens}"):
        SuffixIndex(most_tokens)


def test_a_closed_sequence_is_refused() -> None:
    index = SuffixIndex()
    sequence = index.open([1, 2])
    index.close(sequence)
    for call in (
        lambda: index.close(sequence),
        lambda: index.extend(sequence, [1]),
        lambda: index.propose(sequence, 1, 1, 1),
    ):
        with pytest.raises(EngineError, match="closed"):
            call()


def played(seed: int, least: float = 0.0) -> list[Proposal]:
    """Proposals of several sequences that run, grow and end at random."""
    rng, index, found = random.Random(seed), SuffixIndex(500), []
    running = [index.open([rng.randrange(6) for _ in range(rng.randrange(200))]) for _ in range(4)]
    for _ in range(400):
        slot = rng.randrange(4)
        if rng.random() < 0.1:
            index.close(running[slot])
            running[slot] = index.open([rng.randrange(6) for _ in range(rng.randrange(200))])
        index.extend(running[slot], [rng.randrange(6) for _ in range(rng.randrange(1, 33))])
        shape = rng.choice([(8, 8, 1), (32, 12, 4), (60, 40, 10)])
        found.append(index.propose(running[slot], *shape, least))
        check_tree(found[-1], *shape)
    return found


def test_the_same_calls_give_the_same_proposals() -> None:
    for one, other in zip(played(5), played(5), strict=True):
        assert one == other


def test_a_round_costs_far_less_than_a_forward_pass() -> None:
    index, rng = SuffixIndex(100_000), random.Random(2)
    phrases = [[rng.randrange(4000) for _ in range(rng.randrange(3, 30))] for _ in range(300)]
    text = [token for _ in range(1200) for token in rng.choice(phrases)]
    for start in range(0, 12_000, 400):
        said_before(index, [], text[start : start + 400])
    sequence, spans = index.open(text[:4000]), []
    for start in range(4000, 6000, 8):
        started = time.perf_counter()
        index.extend(sequence, text[start : start + 8])
        index.propose(sequence, 32, 12, 4)
        spans.append(time.perf_counter() - started)
    assert sorted(spans)[len(spans) // 10] < 1e-3  # about 50 us; only what is ten times slower fails
