"""Replays of known answers say every token once, and count what was accepted."""

from __future__ import annotations

from edgellm.engines.speculation.suffix_index import Proposal, SuffixIndex
from tools.bench.suffix_replay import Replayed, accepted_path, rounds, summary


def test_the_accepted_path_follows_the_answer_through_the_tree() -> None:
    proposal = Proposal([5, 6, 7, 8], [-1, -1, 1, 0], [0.0] * 4, [1.0] * 4, 2)
    assert accepted_path(proposal, [6, 7, 8]) == [1, 2]
    assert accepted_path(proposal, [5, 7]) == [0]
    assert accepted_path(proposal, [7]) == []


def test_a_repeated_prompt_is_accepted_in_whole_chains() -> None:
    answer = [1, 2, *range(100, 164)]
    played = list(rounds(SuffixIndex(), Replayed([*answer, 3], answer), (5, 5, 1)))
    assert [len(one.accepted) for one in played] == [0, 0, *[5] * 10, 4]
    assert [one.tokens for one in played] == [1, 1, *[6] * 10, 4]  # no token follows the last one
    assert summary(played)["tokens_a_round"] == round(66 / 13, 3)
