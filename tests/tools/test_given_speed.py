"""The tool that measures drafts without a model: known answers are drawn, and both ways are compared fairly."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgellm import LLM, DraftingConfig
from edgellm.drafting import learner
from tools.bench.given_speed import KINDS, Asked, Way, compared, prompts, with_known_answers

ANSWER = [5, 6, 7, 8, 9] * 6


def test_known_answers_are_drawn_by_steps_and_by_rounds(tiny_engines: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner, "GAIN", 0.0)
    with (
        LLM(tiny_engines, backend="numpy", drafting=None) as plain,
        LLM(tiny_engines, backend="numpy", drafting=DraftingConfig(kind="suffix")) as drafted,
    ):
        ways = tuple(Way(llm, with_known_answers(llm)) for llm in (plain, drafted))
        asked = [Asked([3, 4], ANSWER), Asked([9] * 20, list(range(20, 50)))]
        for one in asked:
            for way in ways:
                assert list(way.answered(one).token_ids) == one.answer
        free = [way.answered(Asked([3, 4])).token_ids for way in ways]  # the model's own again
        assert free[0] == free[1] and list(free[0]) != ANSWER
        result = compared(*ways, asked, 2)
        assert result["answers_equal"] == "4 of 4" and len(result["ratios"]) == 2
        assert result["rounds"] > 0 and result["tokens_a_round"] > 1.5


def test_there_are_prompts_of_every_kind() -> None:
    for kind in KINDS:
        found = prompts(kind, 2, 1024, known=False)
        assert len(found) == 2
        assert all(
            (one.answer is not None) == (kind == "edit") and bool(one.earlier) == (kind == "action") for one in found
        )
