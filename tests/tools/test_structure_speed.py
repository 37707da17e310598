"""The benchmark of constrained steps and rounds on a tiny model: what is prescribed is said, in so many rounds."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from edgellm.engines.families import decoder_config
from edgellm.structure.description import Structure


@pytest.fixture(autouse=True)
def bench_modules(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(repository / "tools" / "bench"))


def test_robot_actions_are_of_the_schema_and_spelled_back() -> None:
    from made_vocabulary import ROBOT_ACTION, MadeVocabulary, robot_action

    made, structure = MadeVocabulary(2000), Structure(json=ROBOT_ACTION)
    assert made.tokenizer.vocab_size == 2000 and made.tokenizer.id_to_token(made.eos_token_id) == "<|special 0|>"
    for seed in range(20):
        text = robot_action(random.Random(seed))
        ids = made.tokenizer.encode(text)
        assert made.tokenizer.decode(ids) == text and len(ids) < len(text) / 1.5
        assert structure.parsed(text) == json.loads(text)


def test_all_figures_of_a_tiny_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import structure_speed
    from random_checkpoint import SHAPES

    monkeypatch.setattr("edgellm.decoding.loop.StepMasks", structure_speed.ScriptedMasks)
    monkeypatch.setattr(structure_speed, "WARM_UPS", 1)
    small = {"num_layers": 7, "vocab_size": 2000, "hidden_size": 64, "intermediate_size": 96, "num_heads": 2}
    config = replace(decoder_config(SHAPES["llama-1b"]), **small, num_kv_heads=1)
    found = structure_speed.measure(tmp_path, config, "numpy", 20, capacity=360)
    assert list(found) == ["plain step", "beside", "round of a chain 5", "round of a tree of 16"]
    for name, values in found.items():
        assert values["rounds"] >= 10 and 0 < values["constrained_ms"] <= values["constrained_p99_ms"]
        assert "round" not in name or 1.8 < values["tokens_a_round"] < 3
