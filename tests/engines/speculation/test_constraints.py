"""Masks of trees, allowed tokens and bad words, against their definitions tried token by token."""

import random

import numpy as np
import pytest

from edgellm.engines.errors import ConstraintError
from edgellm.engines.speculation.constraints import (
    AllConstraints,
    AllowedTokens,
    BadWords,
    LateEnd,
    allows,
    fill_tree_masks,
    mask_of,
    mask_words,
)

VOCABULARY = 41  # no multiple of 32: bits behind it must stay 0
DEAD = 40


class CountdownConstraint:
    """After token t only tokens below t are allowed, and DEAD, behind which there is no way on; at 0 it stops."""

    def __init__(self, first: int = 30) -> None:
        self.path = [first]

    def _allowed(self) -> list[int]:
        last = self.path[-1]
        return [] if last == DEAD else [0] if last == 0 else [*range(last), DEAD]

    def fill_mask(self, row: np.ndarray) -> None:
        if not self._allowed():
            raise ConstraintError("dead")
        row.view(np.uint32)[:] = mask_of(self._allowed(), VOCABULARY)

    def try_advance(self, token: int) -> bool:
        if token not in self._allowed():
            return False
        self.path.append(token)
        return True

    def rollback(self, count: int) -> None:
        assert count < len(self.path)
        del self.path[len(self.path) - count :]

    def forced(self, most: int) -> list[int]:
        return [0] * most if self.path[-1] == 0 else []

    def is_free(self) -> bool:
        return False

    def is_complete(self) -> bool:
        return self.path[-1] == 0

    def is_stopped(self) -> bool:
        return self.path[-1] == 0


def bits(row):
    return [token for token in range(32 * len(row)) if allows(row, token)]


def no_bad_word_ends(answer, words):
    return not any(len(word) <= len(answer) and tuple(answer[-len(word) :]) == tuple(word) for word in words)


@pytest.mark.parametrize("dtype", [np.uint32, np.int32])
def test_a_mask_has_the_bits_of_its_tokens_and_none_behind_the_vocabulary(dtype):
    row = np.full(mask_words(VOCABULARY), -1, np.int32).view(dtype)
    AllowedTokens([0, 5, 31, 32, 40], VOCABULARY).fill_mask(row)
    assert bits(row) == [0, 5, 31, 32, 40]
    BadWords([[1, 2]], VOCABULARY).fill_mask(row)
    assert bits(row) == list(range(VOCABULARY))


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 64, 100])
def test_masks_of_every_width_hold_what_they_were_made_of(vocab_size):
    ids = sorted(random.Random(vocab_size).sample(range(vocab_size), (vocab_size + 1) // 2))
    mask = mask_of(ids, vocab_size)
    assert mask.dtype == np.uint32 and len(mask) == mask_words(vocab_size)
    assert bits(mask) == ids
    assert not allows(mask, -1) and not allows(mask, 10**6)


def test_ids_outside_of_the_vocabulary_make_no_mask():
    with pytest.raises(IndexError):
        mask_of([VOCABULARY], VOCABULARY)


def random_tree(generator, size, tokens):
    parents = [-1] + [generator.randrange(node) for node in range(1, size)]
    return [generator.choice(tokens) for _ in range(size)], parents


def path_of(node, tokens, parents):
    path = []
    while node > 0:
        path.append(tokens[node])
        node = parents[node]
    return path[::-1]


def expected_tree(make, tokens, parents):
    """The bits of each node that is reached, None of the others: each path replayed from the start."""
    found = []
    for node in range(len(tokens)):
        constraint, row = make(), np.zeros(mask_words(VOCABULARY), np.uint32)
        reached = True
        for token in path_of(node, tokens, parents):
            try:
                constraint.fill_mask(row)
            except ConstraintError:
                reached = False
            reached = reached and token in bits(row) and constraint.try_advance(token)
        try:
            constraint.fill_mask(row)
        except ConstraintError:
            reached = False
        found.append(bits(row) if reached else None)
    return found


@pytest.mark.parametrize("seed", range(60))
def test_the_masks_of_a_tree_are_those_of_each_path_alone(seed):
    generator = random.Random(seed)
    words = [[generator.randrange(4) for _ in range(generator.randint(1, 3))] for _ in range(3)]
    makers = [
        lambda: CountdownConstraint(3),
        lambda: BadWords(words, VOCABULARY),
        lambda: AllConstraints([CountdownConstraint(4), BadWords(words, VOCABULARY)]),
        lambda: AllConstraints([AllowedTokens(range(3), VOCABULARY), BadWords([[0, 0], [1, 2]], VOCABULARY)]),
        lambda: LateEnd([1, 3, 99], 2, VOCABULARY),
    ]
    make = makers[seed % len(makers)]
    tokens, parents = random_tree(generator, generator.randint(1, 40), [0, 1, 2, 3, DEAD])
    expected = expected_tree(make, tokens, parents)
    if expected[0] is None:
        with pytest.raises(ConstraintError):
            fill_tree_masks(make(), tokens, parents, np.zeros((len(tokens), mask_words(VOCABULARY)), np.int32))
        return
    constraint, untouched = make(), np.int32(-7)
    masks = np.full((len(tokens), mask_words(VOCABULARY)), untouched)
    before = np.zeros(mask_words(VOCABULARY), np.int32)
    constraint.fill_mask(before)
    rows = fill_tree_masks(constraint, tokens, parents, masks)
    after = np.zeros(mask_words(VOCABULARY), np.int32)
    constraint.fill_mask(after)
    assert np.array_equal(before, after), "the constraint must end where it began"
    for node, row in enumerate(rows):
        binds = expected[node] not in (None, list(range(VOCABULARY)))
        assert (row >= 0) == binds, "free nodes, and those that are never reached, have none"
        assert row < 0 or bits(masks[row]) == expected[node]
    used = (rows >= 0).sum()
    assert sorted(rows[rows >= 0].tolist()) == list(range(used)), "masks lie one behind the other"
    assert (masks[used + 1 :] == untouched).all()  # that of a dead end may have been begun


def test_the_constraint_ends_where_it_began_when_its_masks_fail():
    constraint = CountdownConstraint()
    with pytest.raises(ValueError):  # a mask of another width
        fill_tree_masks(constraint, [9, 5], [-1, 0], np.zeros((2, 9), np.int32))
    masks = np.zeros((2, mask_words(VOCABULARY)), np.int32)
    constraint.path = [DEAD]
    with pytest.raises(ConstraintError):
        fill_tree_masks(constraint, [9, 5], [-1, 0], masks)
    assert constraint.path == [DEAD]


def test_padding_of_a_tree_is_never_reached():
    masks = np.zeros((4, mask_words(VOCABULARY)), np.int32)
    rows = fill_tree_masks(CountdownConstraint(), [9, 5, -1, -1], [-1, 0, -1, -1], masks)
    assert rows.tolist() == [0, 1, -1, -1]


@pytest.mark.parametrize("seed", range(40))
def test_bad_words_allow_what_ends_with_none_of_them(seed):
    generator = random.Random(seed)
    words = [[generator.randrange(4) for _ in range(generator.randint(1, 4))] for _ in range(generator.randint(1, 6))]
    constraint, answer = BadWords(words, VOCABULARY), []
    row = np.zeros(mask_words(VOCABULARY), np.uint32)
    for _ in range(60):
        constraint.fill_mask(row)
        allowed = [token for token in range(VOCABULARY) if no_bad_word_ends([*answer, token], words)]
        assert bits(row) == allowed
        assert constraint.is_free() == (len(allowed) == VOCABULARY)
        if answer and generator.random() < 0.3:
            count = generator.randint(1, len(answer))
            constraint.rollback(count)
            del answer[len(answer) - count :]
            continue
        token = generator.randrange(5)
        assert constraint.try_advance(token) == (token in allowed)
        if token in allowed:
            answer.append(token)


def test_words_that_forbid_everything_are_a_dead_end():
    row = np.zeros(1, np.uint32)
    with pytest.raises(ConstraintError, match="bad_words forbid every token"):
        BadWords([[0], [1]], 2).fill_mask(row)


def test_all_constraints_allow_what_each_allows_or_name_the_dead_end():
    row = np.zeros(mask_words(VOCABULARY), np.uint32)
    both = AllConstraints([AllowedTokens([1, 2, 3], VOCABULARY), AllowedTokens([3, 4], VOCABULARY)])
    both.fill_mask(row)
    assert bits(row) == [3] and not both.is_free()
    none = AllConstraints([AllowedTokens([1], VOCABULARY), AllowedTokens([2], VOCABULARY)])
    with pytest.raises(ConstraintError, match="together leave no token"):
        none.fill_mask(row)
    everything = AllConstraints([BadWords([[1, 2]], VOCABULARY), AllowedTokens(range(VOCABULARY), VOCABULARY)])
    assert everything.is_free()
    everything.fill_mask(row)
    assert bits(row) == list(range(VOCABULARY))


def test_a_token_that_one_rule_forbids_leaves_the_others_where_they_were():
    first, second = CountdownConstraint(), AllowedTokens([7], VOCABULARY)
    both = AllConstraints([first, second])
    assert not both.try_advance(5)
    assert first.path == [30]
    assert both.try_advance(7)
    both.rollback(1)
    assert first.path == [30]


def test_forced_tokens_are_those_that_the_other_rules_allow():
    ending = CountdownConstraint(0)
    assert AllConstraints([ending, BadWords([[3]], VOCABULARY)]).forced(3) == [0, 0, 0]
    both = AllConstraints([ending, BadWords([[0, 0]], VOCABULARY)])
    assert both.forced(3) == [0]
    assert ending.path == [0] and both.try_advance(0)
    assert AllConstraints([CountdownConstraint(5), BadWords([[0]], VOCABULARY)]).forced(3) == []
    assert both.is_complete() and both.is_stopped()
