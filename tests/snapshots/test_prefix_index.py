"""The longest common prefix over many token sequences, against comparing with each of them."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgellm.snapshots.contents import KVContents
from edgellm.snapshots.prefix_index import PrefixIndex, common_tokens, reusable_rows, token_key

# Few ids, large ones among them, so that prefixes are often shared and bytes of different ids agree.
TOKENS = st.lists(st.sampled_from([0, 1, 255, 256, 65536, 2**31 - 1]), min_size=1, max_size=8).map(tuple)


def shared(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    count = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        count += 1
    return count


@given(TOKENS, TOKENS)
def test_common_tokens(first: tuple[int, ...], second: tuple[int, ...]) -> None:
    assert common_tokens(token_key(first), token_key(second)) == shared(first, second)


@settings(max_examples=300)
@given(st.lists(TOKENS, max_size=30), st.sets(st.integers(0, 29)), TOKENS)
def test_the_longest_prefix_is_that_of_brute_force(
    sequences: list[tuple[int, ...]], removed: set[int], prompt: tuple[int, ...]
) -> None:
    index: PrefixIndex[tuple[int, ...]] = PrefixIndex()
    for sequence in sequences:
        index.add(token_key(sequence), sequence)
    for number in removed & set(range(len(sequences))):
        if index.get(token_key(sequences[number])) is not None:
            index.remove(token_key(sequences[number]))
    kept = set(sequences) - {sequences[number] for number in removed if number < len(sequences)}
    assert set(index) == kept and len(index) == len(kept)

    common, found = index.longest(token_key(prompt))
    assert common == max((shared(sequence, prompt) for sequence in kept), default=0)
    expected = {sequence for sequence in kept if shared(sequence, prompt) == common} if common else set()
    assert set(found) == expected and len(found) == len(expected)

    whole, items = index.longest_whole(token_key(prompt))
    wholes = [sequence for sequence in kept if prompt[: len(sequence)] == sequence]
    assert whole == max(map(len, wholes), default=0)
    assert items == [prompt[:whole]] * bool(whole)


@given(TOKENS, TOKENS, st.booleans())
def test_rows_to_reuse_are_those_that_the_loop_counts(
    held: tuple[int, ...], prompt: tuple[int, ...], has_draft: bool
) -> None:
    draft_rows = len(held) - 1 if has_draft else None
    contents = KVContents()
    contents.replace(held, draft_rows)
    rows = reusable_rows(shared(held, prompt), len(prompt), draft_rows)
    assert rows == contents.reusable(prompt)
    assert rows < len(prompt)


def test_items_of_the_same_tokens_replace_each_other_and_an_unknown_one_cannot_be_removed() -> None:
    index: PrefixIndex[str] = PrefixIndex()
    index.add(token_key([1, 2]), "first")
    index.add(token_key([1, 2]), "second")
    assert index.longest(token_key([1, 2, 3])) == (2, ["second"])
    with pytest.raises(KeyError):
        index.remove(token_key([1]))
    assert len(index) == 1


def test_ids_below_zero_match_nothing() -> None:
    index: PrefixIndex[str] = PrefixIndex()
    index.add(token_key([2**31 - 1, 5]), "large")
    assert index.longest(token_key([-1, 5])) == (0, [])


def test_a_look_up_among_many_long_sequences_takes_no_time_that_matters() -> None:
    generator = random.Random(0)
    system = [generator.randrange(100_000) for _ in range(4000)]
    index: PrefixIndex[int] = PrefixIndex()
    for number in range(2000):
        index.add(token_key([*system[: 2 * number + 1], 100_001 + number]), number)
    prompt = [*system[:3001], 7, 8, 9]
    started = time.process_time()
    for _ in range(20):
        common, _ = index.longest(token_key(prompt))
    assert common == 3001
    assert (time.process_time() - started) / 20 < 0.02
