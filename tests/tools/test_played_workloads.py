"""Texts are played back through a real runner: said as they are, drafted as far as they say, on NumPy."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgellm.drafting.drafter import FixedDrafter, Policy
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.speculation.draft_plan import given
from edgellm.engines.speculation.round import GivenTree

LIMITS = EngineLimits(2, 16, 240, draft_top_k=10, draft_steps=6, verify_tree_size=60)


@pytest.fixture
def player(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of two slots, tiny random weights and an EAGLE-3 head."""
    monkeypatch.syspath_prepend(str(repository / "tools" / "bench"))
    from random_checkpoint import SHAPES
    from random_model import random_directory, random_runner

    from edgellm.engines.families import decoder_config
    from tools.bench.played_workloads import Player

    small = {"num_layers": 8, "vocab_size": 3000, "hidden_size": 320, "intermediate_size": 96}
    config = replace(decoder_config(SHAPES["llama-1b"]), **small, num_heads=2, num_kv_heads=1)
    with random_runner(random_directory(tmp_path, config, LIMITS), "numpy") as runner:
        yield Player(runner)


def counted(runner: Any) -> Counter[str]:
    """The steps of a runner from now on, by kind."""
    found = Counter[str]()

    def counting(name: str) -> Any:
        original = getattr(type(runner), name, None) or runner.base.decode

        def step(*given: Any) -> Any:
            found[name] += 1
            return original(*given) if name == "decode" else original(runner, *given)

        return step

    runner.round, runner.decode = counting("round"), counting("decode")
    return found


def test_rounds_give_what_the_texts_say(player: Any) -> None:
    """Of two sequences, the shorter of which leaves its slot to the other; as many rounds as a simulation has."""
    from tools.bench.drafting_simulation import Text

    chances = [0.9 if place % 5 else 0.2 for place in range(40)]
    luck = [place * 7 % 10 / 10 for place in range(40)]
    long = Text(list(range(5, 25)), [place * 31 % 300 for place in range(40)], chances, luck)
    texts, rounds = [replace(long, answer=long.answer[:13]), long], []
    for plan in (player.plans[0], player.plans[5]):
        taken = counted(player.runner)
        _, times = player.seconds([player.script(texts)], FixedDrafter(plan))  # which checks what is said
        assert len(times) == 39 and times == sorted(times)
        place, expected = 1, 0  # the prompt gives the first token
        while place < 40:
            place, expected = place + long.round(place, plan, None), expected + 1
        assert taken["round"] == expected
        rounds.append(expected)
    assert rounds[0] > rounds[1]


class Giving(Policy):
    """Gives three candidates at every step, which are what the text says."""

    drafts = True

    def __init__(self, said: list[int]) -> None:
        self.said = said

    def choose(self, runner: Any, sequences: Any, *others: Any) -> Any:
        tokens = self.said[len(sequences[0].drawn) :][:3]
        return given(3, 3), [GivenTree(tokens, [*range(-1, len(tokens) - 1)])]


def test_given_candidates_are_taken_with_rules_and_without(player: Any) -> None:
    from tools.bench.drafting_simulation import Text

    said = [1 + place * 31 % 300 for place in range(60)]
    for forced in (None, [place % 4 > 0 for place in range(60)]):
        text = Text(list(range(5, 25)), [each - 1 for each in said], [0.0] * 60, [1.0] * 60, forced)
        for policy, expected in ((Giving(said), {"round": 15}), (Policy(), {"decode": 59})):
            taken = counted(player.runner)
            player.seconds([player.script([text])], policy)
            assert taken == expected


def test_texts_are_played_by_an_engine_directory_within_other_limits(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(repository / "tools" / "bench"))
    from edgellm.engines.directories.engine_directory import EngineDirectory
    from edgellm.opened_model import SHIPPED_MODEL
    from tools.bench.drafting_simulation import Text
    from tools.bench.played_workloads import Player, opened

    directory, said = EngineDirectory.open(SHIPPED_MODEL), [place * 31 % 300 for place in range(13)]
    limits = replace(LIMITS, max_batch=directory.limits.max_batch + 1)
    texts = [Text(list(range(5, 25)), said, [0.5] * 13, [0.4] * 13)] * limits.max_batch
    with opened(directory, limits, "numpy") as runner:
        player = Player(runner)
        times = player.seconds([player.script(texts)], FixedDrafter(player.plans[0]))
        assert runner.limits.max_batch == len(times) and all(len(each) == 12 for each in times)


def test_ways_take_turns_until_each_has_ended(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(repository / "tools" / "bench"))
    from tools.bench.played_workloads import SLICE, beside

    order: list[str] = []

    def way(name: str, count: int) -> Any:
        times: list[float] = []
        for place in range(count):
            order.append(name)
            times.append(place)
            yield [times]

    found = beside({"one": way("one", 2 * SLICE), "other": way("other", SLICE + 3)})
    assert found == {"one": [[*range(2 * SLICE)]], "other": [[*range(SLICE + 3)]]}
    assert order == ["one"] * SLICE + ["other"] * SLICE + ["one"] * SLICE + ["other"] * 3
