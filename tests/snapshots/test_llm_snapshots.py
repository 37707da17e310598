"""Snapshots of system prompts through `LLM`: the same answers, with and without a draft, with adapters in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from edgellm import LLM, Request, SamplingParams
from edgellm.drafting.config import DraftingConfig
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.building.inputs import read_decoder_config
from edgellm.engines.model.limits import EngineLimits
from edgellm.errors import AdapterError, RequestError, SnapshotError
from edgellm.opened_model import SHIPPED_MODEL
from edgellm.snapshots.file import read_snapshot

SYSTEM = "You are a robot. Be brief."
QUESTIONS = ["hello", "why?", "go!", "1 + 1", "äöü"]
#: Where the best two logits are closer, rounding may choose; with a snapshot the prompt is computed in other pieces.
SMALLEST_GAP = 1e-4


def asked(question: str, system: str = SYSTEM) -> list[dict[str, str]]:
    return [{"role": "system", "content": system}, {"role": "user", "content": question}]


def params(number: int, **changes: object) -> SamplingParams:
    """Greedy and drawn in turn."""
    return SamplingParams(
        **{"temperature": 0.9 * (number % 2), "top_k": 20, "seed": number, "max_tokens": 10, "ignore_eos": True}
        | changes
    )


def crowd_out(llm: LLM, adapter: str | None = None) -> None:
    """Let every slot hold something else, so that nothing of them is reused."""
    slots = llm.directory.limits.max_batch
    ended = llm.handle([Request([9, 8, slot], None, params(0, max_tokens=4), adapter) for slot in range(slots)])
    assert all(response.usage.completion_tokens == 4 for response in ended)


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "draft"])
def drafted(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture(scope="module")
def engines(
    drafted: bool, tiny_checkpoint: Path, tiny_draft: Path, make_adapter: Callable[..., Path], tmp_path_factory
) -> Path:
    """The tiny model with two adapters, of which the engines hold one at once."""
    folder = tmp_path_factory.mktemp("llm_snapshots")
    config = read_decoder_config(tiny_checkpoint)
    adapters = {name: make_adapter(folder / name, config, seed) for seed, name in enumerate(("json", "style"))}
    limits = EngineLimits(3, 32, 160, *((4, 3, 12) if drafted else (0, 0, 0)), max_lora_rank=4, lora_slots=1)
    draft = tiny_draft if drafted else None
    build_engine_directory(tiny_checkpoint, folder / "engines", limits, [], draft=draft, adapters=adapters)
    return folder / "engines"


@pytest.fixture(scope="module")
def open_llm(engines: Path, drafted: bool) -> Callable[..., LLM]:
    drafting = DraftingConfig(draft_top_k=4, draft_steps=3, verify_tree_size=12, adaptive=False) if drafted else None
    return lambda **options: LLM(engines, backend="numpy", **{"drafting": drafting} | options)


@pytest.fixture(scope="module")
def cold(open_llm: Callable[..., LLM]) -> Iterator[Callable[[str, str | None, int], tuple[int, ...]]]:
    """The answer to a question where nothing can be reused."""
    with open_llm() as llm:

        def answer(question: str, adapter: str | None, number: int) -> tuple[int, ...]:
            crowd_out(llm)
            response = llm.chat(asked(question), params(number), adapter)
            assert response.usage.reused_tokens == 0
            return response.token_ids

        yield answer


def test_a_cached_system_prompt_changes_no_answer(open_llm: Callable[..., LLM], cold, drafted: bool) -> None:
    with open_llm() as llm:
        kept = {name: llm.cache_system_prompt(SYSTEM, name) for name in (None, "json", "style")}
        assert {each.tokens for each in kept.values()} == {kept[None].tokens} and kept[None].path is None
        for number, question in enumerate(QUESTIONS[:2]):
            for adapter in (None, "json", None, "style"):
                crowd_out(llm, adapter)
                response = llm.chat(asked(question), params(number), adapter)
                assert response.usage.reused_tokens == kept[adapter].tokens - drafted
                assert response.token_ids == cold(question, adapter, number)


def test_a_batch_takes_snapshots_in_every_slot(open_llm: Callable[..., LLM], cold, drafted: bool) -> None:
    with open_llm() as llm:
        encoded = [llm.tokenizer.encode_chat(asked(question)) for question in QUESTIONS]
        tokens = [llm.cache_system_prompt(SYSTEM, name).tokens for name in (None, "style")]
        names = [None, "style", None, "style", None]
        found = llm.handle([Request(ids, None, params(2), name) for ids, name in zip(encoded, names, strict=True)])
        for question, name, response in zip(QUESTIONS, names, found, strict=True):
            assert response.token_ids == cold(question, name, 2)
            assert response.usage.reused_tokens == tokens[0] - drafted


def test_a_file_serves_another_llm(open_llm: Callable[..., LLM], cold, drafted: bool, tmp_path: Path) -> None:
    path = tmp_path / "system.safetensors"
    with open_llm() as llm:
        kept = llm.cache_system_prompt(SYSTEM, "json", save=path)
        assert (kept.path, kept.nbytes) == (path, path.stat().st_size)
    assert read_snapshot(path).facts.label == SYSTEM
    for budget in (1 << 20, 0):  # from memory, from the file
        with open_llm(snapshots=[path], snapshot_budget=budget) as llm:
            assert llm.load_snapshot(path, ["style", "json"]).token_ids == kept.token_ids
            response = llm.chat(asked("why?"), params(3), "json")
            assert response.usage.reused_tokens == kept.tokens - drafted
            assert response.token_ids == cold("why?", "json", 3)
            assert llm.chat(asked("why?"), params(3)).usage.reused_tokens == 0  # rows of another adapter
    with open_llm(snapshot_budget=1000) as llm:
        with pytest.raises(SnapshotError, match="memory budget of 1,000"):
            llm.cache_system_prompt(SYSTEM)
        llm.cache_system_prompt(SYSTEM, save=path)
        crowd_out(llm)
        assert llm.chat(asked("hello"), params(1)).usage.reused_tokens == kept.tokens - drafted


def test_what_is_refused(open_llm: Callable[..., LLM], cold, tiny_engines: Path, tmp_path: Path) -> None:
    path = tmp_path / "system.safetensors"
    with open_llm() as llm:
        llm.cache_system_prompt(SYSTEM, "json", save=path)
        with pytest.raises(SnapshotError, match="the adapter is") as caught:
            llm.load_snapshot(path, [None])
        assert caught.value.reason == "other adapter"
        with pytest.raises(AdapterError, match="no adapter 'jsn'"):
            llm.load_snapshot(path, ["jsn"])
        with pytest.raises(AdapterError, match="no adapter 'jsn'"):
            llm.cache_system_prompt(SYSTEM, "jsn")
        with pytest.raises(RequestError, match="context 160"):
            llm.cache_system_prompt("x" * 200)
        with pytest.raises(SnapshotError, match="cannot be written"):
            llm.cache_system_prompt(SYSTEM, save="/proc/no/such/file")
        assert llm.chat(asked("hello"), params(1), "json").token_ids == cold("hello", "json", 1)
    with pytest.raises(RequestError, match="closed"):
        llm.cache_system_prompt(SYSTEM)
    with pytest.raises(RequestError, match="closed"):
        llm.load_snapshot(path)
    with pytest.raises(SnapshotError, match=r"the adapter is .*, expected none"):
        LLM(tiny_engines, backend="numpy", snapshots=[path])
    with pytest.raises(SnapshotError, match="cannot be read: No such file"):
        open_llm(snapshots=[tmp_path / "nothing"])


def test_closing_lets_go_of_snapshots(open_llm: Callable[..., LLM]) -> None:
    llm = open_llm()
    llm.cache_system_prompt(SYSTEM)
    llm.cache_system_prompt(SYSTEM, "json")
    store = llm._runtime._snapshots.store
    assert store.memory_bytes > 0
    llm.close()
    assert store.memory_bytes == 0 and store.snapshots() == []


def gap_at(llm: LLM, prompt: list[int], tokens: tuple[int, ...], adapter: str | None) -> float:
    """How far apart the best two logits are after a prompt and some tokens of its answer."""
    llm.generate([*prompt, *tokens], SamplingParams(max_tokens=1, ignore_eos=True), adapter)
    logits = sorted(llm._runtime._open_runner().base.logits(0).tolist())
    return logits[-1] - logits[-2]


@pytest.fixture(scope="module")
def shipped(make_adapter: Callable[..., Path], tmp_path_factory) -> Path:
    """The shipped model with its draft, built to take two adapters."""
    folder = tmp_path_factory.mktemp("shipped")
    config = read_decoder_config(SHIPPED_MODEL)
    adapters = {name: make_adapter(folder / name, config, seed) for seed, name in enumerate(("json", "style"))}
    limits = EngineLimits(1, 128, 1024, 10, 6, 60, max_lora_rank=4, lora_slots=2)
    draft = SHIPPED_MODEL / "draft"
    build_engine_directory(SHIPPED_MODEL, folder / "engines", limits, [], draft=draft, adapters=adapters)
    return folder / "engines"


def compare_shipped(engines: Path, drafting: DraftingConfig | None, questions: list[str]) -> int:
    """Answers with snapshots and adapters in between, against those without; how many differ after too small a gap."""
    system = (SHIPPED_MODEL / "system_prompt.txt").read_text(encoding="utf-8").rstrip("\n")
    names, close = (None, "json", None, "style"), 0
    with (
        LLM(engines, backend="numpy", drafting=drafting) as cached,
        LLM(engines, backend="numpy", drafting=None) as plain,
    ):
        tokens = {name: cached.cache_system_prompt(system, name).tokens for name in (None, "json", "style")}
        for number, question in enumerate(questions):
            name = names[number % 4]
            wanted = params(number // 4, max_tokens=16, ignore_eos=False)
            found = cached.chat(asked(question, system), wanted, name)
            assert found.usage.reused_tokens >= tokens[name] - (drafting is not None)
            plain.generate([9, 8, 7], params(0, max_tokens=1), names[(number + 1) % 4])
            expected = plain.chat(asked(question, system), wanted, name)
            assert expected.usage.reused_tokens == 0
            if found.token_ids != expected.token_ids:
                pairs = enumerate(zip(found.token_ids, expected.token_ids, strict=False))
                first = next(index for index, (one, other) in pairs if one != other)
                prompt = plain.tokenizer.encode_chat(asked(question, system))
                assert wanted.temperature == 0, question
                assert gap_at(plain, prompt, expected.token_ids[:first], name) < SMALLEST_GAP, question
                close += 1
    return close


SHIPPED_QUESTIONS = [
    "What is 7 plus 5?",
    "Turn left and stop.",
    "Name three fruits.",
    "Where is the wooden spoon?",
    "hello",
    "What day comes after Monday?",
    "Say nothing.",
    "How many legs has a spider?",
]
CHAIN = DraftingConfig(draft_top_k=1, draft_steps=5, verify_tree_size=6, adaptive=False)


@pytest.mark.parametrize("drafting", [None, CHAIN], ids=["plain", "draft"])
def test_the_shipped_model_answers_the_same(shipped: Path, drafting: DraftingConfig | None) -> None:
    assert compare_shipped(shipped, drafting, SHIPPED_QUESTIONS[::2]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("drafting", [None, CHAIN], ids=["plain", "draft"])
def test_the_shipped_model_answers_a_hundred_the_same(shipped: Path, drafting: DraftingConfig | None) -> None:
    questions = [
        f"{question} And {number} times {number + 3}?" for number in range(13) for question in SHIPPED_QUESTIONS
    ]
    close = compare_shipped(shipped, drafting, questions)
    print(f"{len(questions)} answers, {close} after a gap under {SMALLEST_GAP}")
    assert close <= 2
