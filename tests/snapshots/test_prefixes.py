"""The longest common prefix over many token sequences, against comparing with each of them."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st

from edgellm.snapshots.binding import SnapshotBinding, token_key
from edgellm.snapshots.contents import KVContents, reusable_rows
from edgellm.snapshots.snapshot import SnapshotFacts
from edgellm.snapshots.store import SnapshotStore, common_tokens

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


def store_of(sequences: Iterable[tuple[int, ...]], binding: SnapshotBinding) -> SnapshotStore:
    """A store that knows snapshots of these tokens, without rows."""
    store = SnapshotStore()
    for sequence in sequences:
        facts = SnapshotFacts(3, len(sequence), binding, "", "", "", "")
        made = SimpleNamespace(facts=facts, token_ids=sequence, nbytes=0, states=[])
        store._stored(made).path = Path("file")
    return store


@settings(max_examples=300)
@given(sequences=st.lists(TOKENS, max_size=30), removed=st.sets(st.integers(0, 29)), prompt=TOKENS)
def test_the_longest_prefix_is_that_of_brute_force(
    binding: SnapshotBinding, sequences: list[tuple[int, ...]], removed: set[int], prompt: tuple[int, ...]
) -> None:
    store = store_of(sequences, binding)
    gone = {sequences[number] for number in removed if number < len(sequences)}
    for stored in store.snapshots():
        if stored.token_ids in gone:
            store.discard(stored)
    kept = set(sequences) - gone
    assert sorted(stored.token_ids for stored in store.snapshots()) == sorted(kept)

    longest = max((shared(sequence, prompt) for sequence in kept), default=0)
    match = store.find(binding, prompt)
    assert (match.common if match else 0) == longest
    assert match is None or shared(match.stored.token_ids, prompt) == longest

    whole = store.find(binding, prompt, lambda held, rows: 0)  # as where none can be cut
    wholes = [sequence for sequence in kept if prompt[: len(sequence)] == sequence]
    assert (whole.common if whole else 0) == max(map(len, wholes), default=0)
    assert whole is None or whole.stored.token_ids == prompt[: whole.common]


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


def test_ids_below_zero_match_nothing(binding: SnapshotBinding) -> None:
    assert store_of([(2**31 - 1, 5)], binding).find(binding, [-1, 5]) is None


def test_a_look_up_among_many_long_sequences_takes_no_time_that_matters(binding: SnapshotBinding) -> None:
    generator = random.Random(0)
    system = [generator.randrange(100_000) for _ in range(4000)]
    store = store_of(((*system[: 2 * number + 1], 100_001 + number) for number in range(2000)), binding)
    prompt = [*system[:3001], 7, 8, 9]
    took = []
    for _ in range(20):
        started = time.process_time()
        assert store.find(binding, prompt).common == 3001
        took.append(time.process_time() - started)
    assert min(took) < 0.02  # the best of them: a collection of garbage takes longer
