"""Adapters through `LLM`: chosen by name per request, never reusing rows of another, with and without a draft."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from edgellm import LLM, Request, SamplingParams
from edgellm.drafting.config import DraftingConfig
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.model.limits import EngineLimits
from edgellm.errors import AdapterError
from edgellm.snapshots.contents import KVContents

PARAMS = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
PROMPTS = [[(7 * index + 3 * seed) % 250 for index in range(30)] for seed in range(5)]
NAMES = ("wide", "attention", "mlp", None)


@pytest.fixture(scope="module", params=["plain", "drafted"])
def llm(
    request: pytest.FixtureRequest,
    tiny_checkpoint: Path,
    tiny_draft: Path,
    tiny_adapters: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[LLM]:
    drafted = request.param == "drafted"
    target = tmp_path_factory.mktemp("lora_llm") / "engines"
    limits = EngineLimits(3, 16, 96, *((4, 3, 12) if drafted else (0, 0, 0)), max_lora_rank=12, lora_slots=2)
    adapters = {name: tiny_adapters[name] for name in ("wide", "attention")}
    build_engine_directory(
        tiny_checkpoint, target, limits, [], draft=tiny_draft if drafted else None, adapters=adapters
    )
    drafting = DraftingConfig(draft_top_k=4, draft_steps=3, verify_tree_size=12, adaptive=False) if drafted else None
    with LLM(target, backend="numpy", drafting=drafting, adapters={"mlp": tiny_adapters["mlp"]}) as opened:
        yield opened


def fresh(llm: LLM, prompt: list[int], name: str | None) -> tuple[int, ...]:
    """The answer where nothing can be reused."""
    llm.generate([9, 8, 7], PARAMS)
    return llm.generate(prompt, PARAMS, name).token_ids


def test_each_request_names_its_adapter(llm: LLM) -> None:
    assert llm.adapters == ("wide", "attention", "mlp")
    expected = {name: fresh(llm, PROMPTS[0], name) for name in NAMES}
    assert len(set(map(tuple, expected.values()))) == len(NAMES)
    for name in (*NAMES, *reversed(NAMES)):  # the same prompt: rows of another adapter must not be reused
        response = llm.generate(PROMPTS[0], PARAMS, name)
        assert response.token_ids == expected[name]
    again = llm.generate(PROMPTS[0], PARAMS, NAMES[0])
    assert again.token_ids == expected[NAMES[0]]
    assert again.usage.reused_tokens >= len(PROMPTS[0]) - 2
    unseen = [99, *PROMPTS[0]]
    for name in NAMES:
        assert llm.generate(unseen, PARAMS, name).usage.reused_tokens == 0


def test_a_batch_with_more_adapters_than_places(llm: LLM) -> None:
    for shift in (0, 2):
        names = [NAMES[(index + shift) % len(NAMES)] for index in range(len(PROMPTS))]
        expected = [fresh(llm, prompt, name) for prompt, name in zip(PROMPTS, names, strict=True)]
        found = llm.handle([Request(prompt, None, PARAMS, name) for prompt, name in zip(PROMPTS, names, strict=True)])
        assert [response.token_ids for response in found] == expected


def test_what_is_refused(llm: LLM, tiny_engines: Path, tiny_adapters: dict[str, Path]) -> None:
    with pytest.raises(AdapterError, match=r"no adapter 'json'.*'wide', 'attention', 'mlp'"):
        llm.generate([1], adapter="json")
    refused, answered = llm.handle([Request([1], adapter="json"), Request([1], None, PARAMS, "mlp")])
    assert isinstance(refused, AdapterError) and len(answered.token_ids) == 16
    assert len(llm.generate([1], PARAMS, "wide").token_ids) == 16
    with pytest.raises(AdapterError, match="without LoRA adapters: build them with --lora"):
        LLM(tiny_engines, backend="numpy", adapters=tiny_adapters)
    with LLM(tiny_engines, backend="numpy") as plain:
        assert plain.adapters == ()
        with pytest.raises(AdapterError, match="opened without adapters"):
            plain.generate([1], PARAMS, "wide")


def test_a_request_that_fails_leaves_no_adapter_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    base = llm._runtime._open_runner().base
    expected = fresh(llm, PROMPTS[0], "mlp")

    def fail(*_: object) -> None:
        raise RuntimeError("out of order")

    for name in ("wide", "attention"):
        with monkeypatch.context() as patch:
            patch.setattr(base.sampling, "set", fail)
            failed = llm.handle([Request(PROMPTS[1], None, PARAMS, name)] * 3)
        assert [type(error.__cause__) for error in failed] == [RuntimeError] * 3
        assert not base.adapts(slice(0, 3))
    assert llm.generate(PROMPTS[0], PARAMS, "mlp").token_ids == expected


def test_a_damaged_adapter_of_the_directory(
    tiny_lora_engines: Path, tmp_path: Path, make_adapter: Callable[..., Path], tiny_adapters: dict[str, Path]
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in tiny_adapters["mlp"].iterdir():
        (broken / file.name).write_bytes(file.read_bytes()[:-1])
    with pytest.raises(AdapterError, match="broken"):
        LLM(tiny_lora_engines, backend="numpy", adapters={"broken": broken})


def test_rows_are_bound_to_an_adapter() -> None:
    contents = KVContents()
    contents.replace([1, 2, 3, 4], 3)
    contents.bind(None)
    assert contents.reusable([1, 2, 3, 4, 5]) == 3
    contents.bind("a")
    assert contents.reusable([1, 2, 3, 4, 5]) == 0
    contents.replace([1, 2, 3, 4], 4)
    assert contents.reusable([1, 2, 3, 9]) == 2
    contents.bind("a")
    assert contents.reusable([1, 2, 3, 9]) == 2
    contents.bind(None)
    assert contents.reusable([1, 2, 3, 9]) == 0
