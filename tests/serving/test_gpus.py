"""A model that two GPUs share, as threads of NumPy: the tokens of one, drafted and plain, and all that is served."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tiny_families import MIXTURES, ONE_GROUP, RECURRENT

from edgellm import LLM, DraftingConfig, Request, SamplingParams
from edgellm.device.proof import compared_tokens
from edgellm.engines.backends import opening
from edgellm.engines.backends.opening import open_backend
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.errors import EngineError
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.runners.comparison import LOGIT_TOLERANCES, open_runner, teacher_forced_logits
from edgellm.errors import RequestError
from edgellm.kernels.gpu import absent_gpu
from edgellm.opened_model import SHIPPED_MODEL
from tests.helpers.command_line import Edgellm

PROMPTS = ("The red cup stands on the left, and the robot", "Hello! What can you do?", "a")
TREE = DraftingConfig(draft_top_k=4, draft_steps=4, verify_tree_size=16)
GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.9, seed=7)


@pytest.fixture(scope="module")
def two() -> Iterator[LLM]:
    with LLM(backend="numpy", gpus=2, drafting=TREE) as llm:
        yield llm


@pytest.fixture(scope="module")
def one() -> Iterator[LLM]:
    with LLM(backend="numpy", drafting=None) as llm:
        yield llm


def answers(llm: LLM, params: SamplingParams, prompts: Sequence[str] = PROMPTS) -> list[list[int]]:
    """All at once, as many as the model takes together."""
    found = [llm.stream(prompt, params) for prompt in prompts]
    return [list(each.result().token_ids) for each in found]


def test_tokens_are_those_of_one_and_the_same_drafted_plain_and_again(one: LLM, two: LLM) -> None:
    expected, found = answers(one, GREEDY), answers(two, GREEDY)
    prompts = [one.tokenizer.encode(prompt) for prompt in PROMPTS]
    with open_runner("numpy", EngineDirectory.open(SHIPPED_MODEL)) as runner:
        logits = [teacher_forced_logits(runner, *pair) for pair in zip(prompts, expected, strict=True)]
    compared = compared_tokens(expected, found, logits, LOGIT_TOLERANCES["float32"])
    assert not compared["faults"] and compared["close"] == 0, compared
    drawn = answers(two, DRAWN)
    assert drawn != found and drawn == answers(one, DRAWN)
    two.use_drafting(None)
    assert (answers(two, GREEDY), answers(two, DRAWN)) == (found, drawn)
    two.use_drafting(TREE)
    assert answers(two, GREEDY) == found


@pytest.mark.parametrize(
    "name",
    ["granite4_one_group", *(pytest.param(name, marks=pytest.mark.slow) for name in ("olmoe", "qwen3_5", "lfm2_moe"))],
)
def test_experts_and_recurrent_layers_are_those_of_one_drafted_and_plain(
    name: str, make_checkpoint: Callable[..., Path], tiny_draft: Path, tmp_path: Path
) -> None:
    """With norms of all heads, too; states are committed by what was accepted."""
    checkpoint = make_checkpoint(tmp_path / "checkpoint", **(MIXTURES | RECURRENT | ONE_GROUP)[name])
    limits = EngineLimits(2, 16, 96, draft_top_k=4, draft_steps=3, verify_tree_size=12)
    build_engine_directory(checkpoint, tmp_path / "engines", limits, [], draft=tiny_draft)
    found, tree = [], DraftingConfig(draft_top_k=4, draft_steps=3, verify_tree_size=12)
    short = [replace(params, max_tokens=8) for params in (GREEDY, DRAWN)]
    for gpus in (1, 2):
        with LLM(tmp_path / "engines", backend="numpy", gpus=gpus, drafting=tree) as llm:
            drafted = [answers(llm, params) for params in short]
            llm.use_drafting(None)
            assert [answers(llm, params) for params in short] == drafted
            found.append(drafted)
    assert found[0] == found[1]


def told_of_a_picture(llm: LLM) -> list[list[int]]:
    """Drafted, if the model drafts, and drawn."""
    parts = [
        {"type": "image", "image": str(SHIPPED_MODEL / "scenes" / "toys.png")},
        {"type": "text", "text": "What is red?"},
    ]
    return [[*llm.chat([{"role": "user", "content": parts}], params).token_ids] for params in (GREEDY, DRAWN)]


def test_pictures_are_seen_as_by_one(one: LLM, two: LLM) -> None:
    found = told_of_a_picture(two)
    assert found == told_of_a_picture(one)
    blind = two.chat([{"role": "user", "content": "What is red?"}], GREEDY)
    assert found[0] != [*blind.token_ids]


def test_conversations_go_on_from_their_rows(one: LLM, two: LLM) -> None:
    told = []
    for llm in (one, two):
        session = llm.create_session(params=SamplingParams(max_tokens=12))
        told.append([session.send(text) for text in ("Where is the red cup?", "And the ball?")])
    assert [each.text for each in told[0]] == [each.text for each in told[1]]
    assert min(each[1].usage.reused_tokens for each in told) > 100


def test_a_snapshot_lies_as_that_of_one_and_records_how_many_made_it(
    one: LLM,
    two: LLM,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    edgellm: Edgellm,
    request: pytest.FixtureRequest,
) -> None:
    if request.config.getoption("gpus") is not None:
        pytest.skip("--gpus: no model is opened on one")
    system = "You are a robot at a table. You answer in one short sentence. " * 3
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "Where is the red cup?"}]
    made_by_two, wanted = tmp_path / "two", one.chat(messages, SamplingParams(max_tokens=8)).token_ids
    two.cache_system_prompt(system, save=made_by_two)
    assert two.chat(messages, SamplingParams(max_tokens=8)).token_ids == wanted
    code, said, _ = edgellm("cache", "show", made_by_two)
    assert code == 0 and ["GPUs", "2"] in [line.split() for line in said.splitlines()]
    with LLM(backend="numpy", drafting=TREE) as drafted, caplog.at_level(logging.WARNING):
        drafted.load_snapshot(made_by_two)
        assert f"{made_by_two} was made on 2 GPUs: on 1 its rows may differ in bits" in caplog.text
        found = drafted.chat(messages, SamplingParams(max_tokens=8))
        assert found.token_ids == wanted and found.usage.reused_tokens > 40
        caplog.clear()
        drafted.cache_system_prompt(system + "Again. ", save=tmp_path / "one")
        drafted.load_snapshot(tmp_path / "one")
        assert not caplog.text
    two.load_snapshot(tmp_path / "one")
    assert f"{tmp_path / 'one'} was made on 1 GPU: on 2 its rows may differ in bits" in caplog.text


def test_prompts_are_handed_out_whole(one: LLM, two: LLM) -> None:
    """Keys and values of all heads, whichever rank wrote them."""
    shared = []
    for llm in (one, two):
        with llm.prefill(Request(PROMPTS[0]), [0, 7]) as states:
            shared.append([np.from_dlpack(each).copy() for each in (*states.keys, *states.values)])
    for mine, theirs in zip(*shared, strict=True):
        assert mine.shape[1] == 2 and np.abs(theirs).max(axis=(0, 2, 3)).min() > 0
        np.testing.assert_allclose(mine, theirs, atol=1e-3)


def test_hidden_states_are_those_of_one(tiny_engines: Path) -> None:
    """Of a prompt in several chunks."""
    found = []
    for gpus in (1, 2, 4):
        opened = LLM(tiny_engines, backend="numpy", gpus=gpus, hidden_layers=[3, 1])
        with opened as llm, llm.prefill(Request(PROMPTS[0]), [], hidden_states=True) as states:
            found.append([np.from_dlpack(each).copy() for each in states.hidden_states])
    for one, two, four in zip(*found, strict=True):
        assert np.abs(one).max() > 1
        np.testing.assert_allclose(two, one, atol=1e-4)
        np.testing.assert_allclose(four, one, atol=1e-4)


@pytest.mark.parametrize("wrong", [0, 65, True, "2", 2.0])
def test_what_is_no_number_of_gpus_is_refused(wrong: object) -> None:
    with pytest.raises(RequestError, match=r"gpus is .*: expected how many GPUs share the model, from 1 to 64"):
        LLM(gpus=wrong)  # type: ignore[arg-type]


def test_gpus_are_asked_for_on_the_command_line_and_by_the_backend(edgellm: Edgellm) -> None:
    arguments = ("generate", "The red cup", "--backend", "numpy", "--max-tokens", 4, "--no-draft")
    code, said, _ = edgellm(*arguments, "--gpus", 2)
    assert code == 0 and said.strip()
    code, _, told = edgellm(*arguments, "--gpus", 3)
    told = " ".join(told.split())
    assert code == 1 and "the 2 key-value heads of layer 0 cannot be shared equally by 3 GPUs: take a number" in told
    assert told.endswith("that divides them, or is a multiple of them")
    code, said, _ = edgellm(*arguments, "--gpus", 6)  # such as this one, of as many query heads
    assert code == 0 and said.strip()
    with pytest.raises(EngineError, match=r"gpus is 64, and there (is|are) \d+ of one kind: the driver shows"):
        open_backend("tensorrt", EngineDirectory.open(SHIPPED_MODEL), gpus=64)


def test_figures_say_how_many_gpus_gave_them(edgellm: Edgellm, tmp_path: Path) -> None:
    """A board's forecast is for one."""
    (tmp_path / "prompts").write_text("The red cup\n")
    options = ("--prompts", tmp_path / "prompts", "--repeat", 1, "--max-tokens", 4, "--configurations", "chain:2")
    code, said, told = edgellm("bench", "--backend", "numpy", "--gpus", 2, *options, "--report", tmp_path / "own")
    figures = json.loads((tmp_path / "own" / "figures.json").read_text())
    assert code == 0 and "numpy backend with 2 GPUs" in said, told
    assert figures["gpus"] == 2 and figures["forecast"] == {}
    page, plot = ((tmp_path / "own" / name).read_text() for name in ("report.md", "speed.svg"))
    assert "numpy backend with 2 GPUs" in page and "As one GPU would take it; 2 have parts of it." in page
    assert "numpy backend with 2 GPUs" in plot


def test_memory_of_each_gpu_is_said_before_there_are_any(edgellm: Edgellm) -> None:
    """And what cannot be shared."""
    code, said, _ = edgellm("info", SHIPPED_MODEL, "--gpus", 2, "--json")
    facts = json.loads(said)
    first, second = facts["memory_by_gpu"]
    assert code == 0 and {item for item in first if item not in second} > {"draft weights", "vision weights"}
    for own in (first, second):
        assert 2 * own["KV caches"] == facts["memory"]["KV caches"]
        assert 0.4 < own["weights"] / facts["memory"]["weights"] < 0.6
    told = [f"{sum(own.values()) / 2**20:,.1f} MiB" for own in (first, second)]
    assert f"of 2 GPUs: {told[0]}, {told[1]}\n" in edgellm("info", SHIPPED_MODEL, "--gpus", 2)[1]
    assert "of 1 GPU" not in edgellm("info", SHIPPED_MODEL)[1]
    code, _, told_why = edgellm("info", SHIPPED_MODEL, "--gpus", 4)
    assert code == 1 and "the 6 query heads of layer 0 cannot be shared equally by 4 GPUs" in told_why


def test_gpus_of_one_kind_are_taken_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what they cannot share is refused before one of them is opened."""
    kinds = [f"sm_{number}" for number in (90, 89, *[90] * 8)]
    shown = [replace(absent_gpu(kind, 8, 1 << 17), index=index) for index, kind in enumerate(kinds)]
    monkeypatch.setattr(opening, "visible_gpus", lambda: tuple(shown))
    monkeypatch.setattr(opening, "find_gpu", lambda index: shown[index or 0])
    assert opening.rank_gpus(None, 3) == (0, 2, 3) and opening.rank_gpus(4, 2) == (4, 5)
    with pytest.raises(
        EngineError, match=r"gpus is 2, and from GPU 1 on there is 1 of one kind: the driver shows 0 \("
    ):
        opening.rank_gpus(1, 2)
    for executor, count, reason in (
        ("tensorrt", 2, "several GPUs share what kernels run: take the executor auto, not tensorrt"),
        ("auto", 9, r"gpus is 9: up to 8 GPUs share a model\. Take so many, or fewer"),
        ("auto", 4, "the 6 query heads of layer 0 cannot be shared equally by 4 GPUs"),
    ):
        with pytest.raises(EngineError, match=reason):
            open_backend("tensorrt", EngineDirectory.open(SHIPPED_MODEL), executor, gpus=count)


def test_structure_adapters_and_priorities_are_those_of_one(one: LLM, two: LLM) -> None:
    """What is urgent takes the place of what then goes on as it would have."""
    found, schema = [], {"type": "object", "properties": {"a": {"enum": ["x", 7]}}, "additionalProperties": False}
    for llm in (one, two):
        low = llm.stream(PROMPTS[0], replace(DRAWN, max_tokens=30))
        next(iter(low))
        urgent = llm.submit(Request(PROMPTS[1], params=GREEDY, priority=5)).result()
        gone_on = low.result()
        assert gone_on.timings.preempted_seconds > 0
        others = [
            llm.generate(PROMPTS[2], SamplingParams(max_tokens=40), structure=schema),
            *(llm.generate(PROMPTS[0], GREEDY, adapter=name) for name in ("json", "pirate")),
        ]
        assert others[0].structure_complete and others[1].token_ids != others[2].token_ids
        found.append([list(each.token_ids) for each in (urgent, gone_on, *others)])
    assert found[0] == found[1]
