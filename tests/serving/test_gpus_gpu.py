"""A model that ranks on GPUs share: two on one GPU here, and on two where they are there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decoy_nccl import ask_for_nccl
from every_kind import DRAFTINGS
from packed_checkpoints import write_packed
from safetensors.numpy import load_file, save_file
from tiny_families import FAMILIES, MIXTURES, ONE_GROUP, RECURRENT, TOLERANCES, WINDOWED

from edgellm import LLM, DraftingConfig, EngineError, Request, SamplingParams
from edgellm.device.proof import compared_tokens
from edgellm.engines.backends import cuda_ranks, opening
from edgellm.engines.backends.cuda_ranks import CudaRanks
from edgellm.engines.backends.rank_memory import BY_NCCL, RankMemory, RankStreams
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.model.decoder import embedding_name
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.runners.comparison import LOGIT_TOLERANCES, open_runner, teacher_forced_logits
from edgellm.errors import DeviceLostError
from edgellm.kernels.gpu import visible_gpus
from edgellm.kernels.sampling.launcher import SharedTable
from edgellm.opened_model import SHIPPED_MODEL
from tests.serving import test_gpus
from tests.serving.test_gpus import DRAWN, GREEDY, TREE
from tests.serving.test_prefill import host_values

pytestmark = pytest.mark.gpu

PROMPTS = (*test_gpus.PROMPTS, "b " * 300)
#: Of a draft, those without which it takes the base's head.
HEAD_TENSORS = {"lm_head.weight", "d2t", "t2d"}
answers = partial(test_gpus.answers, prompts=PROMPTS)


@pytest.fixture(params=["one", "own", "nccl"], scope="module")
def places(request: pytest.FixtureRequest) -> Iterator[None]:
    """Both ranks on the first GPU, or each on one of its own: in each other's memory, or by NCCL."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "one":
            request.getfixturevalue("queues")
            patch.setattr(opening, "rank_gpus", lambda first, count: (0,) * count)
        elif request.param == "nccl":
            ask_for_nccl(patch)
        elif len(visible_gpus()) < 2:
            pytest.skip("there is one GPU")
        yield


@pytest.fixture(scope="module")
def two(places: None) -> Iterator[LLM]:
    with LLM(backend="tensorrt", gpus=2, drafting=TREE) as llm:
        yield llm


@pytest.fixture(scope="module")
def one() -> Iterator[LLM]:
    with LLM(backend="tensorrt", drafting=None) as llm:
        yield llm


def test_tokens_are_those_of_one_gpu_and_of_numpy_up_to_near_ties(one: LLM, two: LLM) -> None:
    found, prompts = answers(two, GREEDY), [one.tokenizer.encode(prompt) for prompt in PROMPTS]
    with LLM(backend="numpy", gpus=2, drafting=None) as ranks:
        others = {"one GPU": answers(one, GREEDY), "NumPy's ranks": answers(ranks, GREEDY)}
    with open_runner("numpy", EngineDirectory.open(SHIPPED_MODEL)) as runner:
        for name, expected in others.items():
            logits = [teacher_forced_logits(runner, *pair) for pair in zip(prompts, expected, strict=True)]
            compared = compared_tokens(expected, found, logits, LOGIT_TOLERANCES["float16"])
            print(f"\n{name}: {compared}")
            assert not compared["faults"], (name, compared)


def test_tokens_by_nccl_are_those_of_gpus_that_use_each_others_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits, drafted and plain."""
    ask_for_nccl(monkeypatch)
    found = []
    for way in ("", "1"):
        monkeypatch.setenv(BY_NCCL, way)
        with LLM(backend="tensorrt", gpus=2, drafting=TREE) as llm:
            assert (llm._runtime._open_runner().backend.memory.nccl is not None) is (way == "1")
            found.append([answers(llm, params) for params in (GREEDY, DRAWN)])
            llm.use_drafting(None)
            assert [answers(llm, params) for params in (GREEDY, DRAWN)] == found[-1]
    assert found[0] == found[1]


def test_drafted_and_plain_and_run_to_run_nothing_differs(two: LLM) -> None:
    drafted = [answers(two, params) for params in (GREEDY, DRAWN)]
    assert drafted[0] != drafted[1]
    two.use_drafting(None)
    assert [answers(two, params) for params in (GREEDY, DRAWN)] == drafted
    two.use_drafting(TREE)
    assert [answers(two, params) for params in (GREEDY, DRAWN)] == drafted


def test_every_kind_of_drafting_gives_the_tokens_of_plain_steps(two: LLM, places: None) -> None:
    two.use_drafting(None)
    expected = answers(two, GREEDY)
    for name in ("chain", "choices", "suffix", "both", "adaptive"):
        two.use_drafting(DRAFTINGS[name])
        assert answers(two, GREEDY) == expected, name
    two.use_drafting(TREE)


def test_steps_are_captured_and_nothing_is_made_later(places: None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), LLM(backend="tensorrt", gpus=2, drafting=TREE) as llm:
        runtime = llm._runtime
        assert isinstance(runtime._open_runner().backend, CudaRanks) and not runtime._open_runner().uncaptured
        before = dict(runtime.made.counts)
        for prompt in PROMPTS:
            llm.generate(prompt, GREEDY)
        assert runtime.made.counts == before and "capture" not in caplog.text
        del runtime


def test_snapshots_and_conversations_bring_rows_to_all(two: LLM, tmp_path: Path) -> None:
    system = "You are a robot at a table. You answer in one short sentence. " * 3
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "Where is the red cup?"}]
    wanted = two.chat(messages, SamplingParams(max_tokens=8)).token_ids
    two.cache_system_prompt(system, save=tmp_path / "kept")
    for gpus in (2, 1):  # the layout is that of one GPU
        with LLM(backend="tensorrt", gpus=gpus, drafting=TREE) as again:
            again.load_snapshot(tmp_path / "kept")
            found = again.chat(messages, SamplingParams(max_tokens=8))
        assert found.usage.reused_tokens > 40 and (gpus == 1 or found.token_ids == wanted)
    session = two.create_session(params=SamplingParams(max_tokens=12))
    told = [session.send(text) for text in ("Where is the red cup?", "And the ball?")]
    assert told[1].usage.reused_tokens > 50


def test_adapters_change_all_ranks(places: None, make_adapter: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "own", EngineDirectory.open(SHIPPED_MODEL).config, 3, 4)
    found, asked = [], replace(GREEDY, max_tokens=16)
    for gpus in (1, 2):
        with LLM(backend="tensorrt", gpus=gpus, drafting=None, adapters={"own": folder}) as llm:
            found.append([llm.generate(PROMPTS[0], asked, adapter=name).token_ids for name in (None, "own")])
    assert found[0][0] != found[0][1] and found[1][0] != found[1][1]
    shared = sum(one == two for one, two in zip(found[0][1], found[1][1], strict=True))
    assert shared > 8, found


def test_keys_and_values_of_several_gpus_are_not_handed_out(two: LLM) -> None:
    refused = pytest.raises(EngineError, match="keys and values of several GPUs are not handed out")
    with refused, two.prefill(Request(PROMPTS[0]), [0]):
        pass


def test_hidden_states_are_handed_out_by_the_first(places: None) -> None:
    question, layers = Request(PROMPTS[0]), [2, 4]  # which the shipped draft takes
    with LLM(backend="numpy", hidden_layers=layers) as twin, twin.prefill(question, [], hidden_states=True) as states:
        expected = [np.from_dlpack(each).copy() for each in states.hidden_states]
    opened = LLM(backend="tensorrt", gpus=2, hidden_layers=layers)
    with opened as llm, llm.prefill(question, [], hidden_states=True) as states:
        rows = states.hidden_states
        found = [llm.call(lambda runtime, each=each: host_values(each)).result() for each in rows]
        del rows
    for values, wanted in zip(found, expected, strict=True):
        assert np.abs(values - wanted).max() < 0.03 * np.abs(wanted).max()


def test_a_rank_that_dies_ends_the_model_with_its_name(places: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_ranks, "RankMemory", partial(RankMemory, wait_seconds=0.5))
    with LLM(backend="tensorrt", gpus=2, drafting=None) as llm:
        run = RankStreams._run
        monkeypatch.setattr(RankStreams, "_run", lambda streams, launches: run(streams, [launches[0], []]))
        with pytest.raises(DeviceLostError, match=r"rank 1 of 2 \(GPU \d\) has failed: rank 0 waited 0.5 s for what"):
            llm.generate("The red cup", max_tokens=4)
        monkeypatch.setattr(RankStreams, "_run", run)
        with pytest.raises(DeviceLostError, match=r"rank 1 of 2 \(GPU \d\) has failed"):
            llm.generate("The blue cup", max_tokens=4)


@pytest.mark.parametrize(
    "name",
    [
        *(
            "olmoe",
            "qwen3_moe",
            "olmo2",
            "llama_biases",
            "lfm2_biases",
            "qwen3_5",
            "granite4_moe",
            "granite4_one_group",
            "nemotron_h_latent",
        ),
        "gemma4",
    ],
)
def test_experts_states_and_norms_of_all_heads_are_shared(
    places: None, name: str, make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Tokens of one GPU up to near ties; drafted as plain, and the same again."""
    latent = {"nemotron_h_latent": MIXTURES["nemotron_h_moe"] | {"moe_latent_size": 32}}
    family = (WINDOWED | MIXTURES | FAMILIES | RECURRENT | ONE_GROUP | latent)[name] | {"max_position_embeddings": 1024}
    checkpoint = make_checkpoint(tmp_path / "checkpoint", **family)
    dtype = "bfloat16" if name == "gemma4" else "float16"  # whose values go beyond
    build_engine_directory(checkpoint, tmp_path / "engines", EngineLimits(2, 128, 1024), None, dtype)
    found = []
    for gpus in (1, 2, 2):
        with LLM(tmp_path / "engines", backend="tensorrt", gpus=gpus, drafting=None) as llm:
            found.append(answers(llm, GREEDY))
            prompts = [llm.tokenizer.encode(prompt) for prompt in PROMPTS]
            llm.use_drafting(DRAFTINGS["suffix"])
            assert answers(llm, GREEDY) == found[-1], gpus
    assert found[1] == found[2]
    with open_runner("numpy", EngineDirectory.open(tmp_path / "engines")) as runner:
        logits = [teacher_forced_logits(runner, *pair) for pair in zip(prompts, found[0], strict=True)]
    compared = compared_tokens(found[0], found[1], logits, TOLERANCES[dtype])
    print(f"\n{name}: {compared}")
    assert not compared["faults"], (name, compared)


def test_packed_weights_give_the_tokens_of_their_dense_twin(places: None, tmp_path: Path) -> None:
    """In groups of 32 with zero points, cut by rows and by columns; the same bits on each rank."""
    models = write_packed(SHIPPED_MODEL, tmp_path / "packed", tmp_path / "twin", None)
    found = []
    for model in models:
        build_engine_directory(model, model.with_suffix(".engines"), EngineLimits(1, 128, 512), None, "float16")
        with LLM(model.with_suffix(".engines"), backend="tensorrt", gpus=2, drafting=None) as llm:
            found.append(answers(llm, GREEDY))
    assert found[0] == found[1]


def test_pictures_are_seen_among_tokens_that_any_gpu_has(one: LLM, two: LLM) -> None:
    """The encoder is the first one's."""
    found = [test_gpus.told_of_a_picture(llm) for llm in (one, two, two)]
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(
    ("is_tied", "head", "embedding", "is_shared"),
    [
        (True, "as-published", "auto", True),  # the head's rows are the table's
        (False, "as-published", "auto", True),
        (True, "int8", "as-published", True),
        (True, "int8", "head", True),  # tokens are looked up in a packed head
        (True, "int4", "head", True),
        (False, "int4", "as-published", True),
        (True, "as-published", "auto", False),  # a draft has no other head, and computes on the first GPU alone
    ],
)
def test_tables_that_gpus_share_embed_as_those_of_one(
    places: None,
    is_tied: bool,
    head: str,
    embedding: str,
    is_shared: bool,
    make_checkpoint: Callable[..., Path],
    make_draft: Callable[..., Path],
    tmp_path: Path,
) -> None:
    """Of the base and of a draft without a table of its own."""
    source = make_checkpoint(tmp_path / "source", 4, tie_word_embeddings=is_tied)
    draft = make_draft(tmp_path / "draft", **({} if is_shared else {"draft_vocab_size": 320}))
    if not is_shared:
        tensors = load_file(draft / "model.safetensors")
        save_file({name: tensors[name] for name in tensors.keys() - HEAD_TENSORS}, draft / "model.safetensors")
    limits, tree = EngineLimits(2, 16, 96, 4, 3, 12), DraftingConfig(4, 3, 12)
    target = tmp_path / "engines"
    build_engine_directory(source, target, limits, [], draft=draft, dtype="float16", head=head, embedding=embedding)
    short, found = replace(GREEDY, max_tokens=8), []
    for gpus in (1, 2):
        with LLM(target, backend="tensorrt", gpus=gpus, drafting=tree) as llm:
            found.append(test_gpus.answers(llm, short))
            prompts = [llm.tokenizer.encode(prompt) for prompt in test_gpus.PROMPTS]
            llm.use_drafting(None)
            assert test_gpus.answers(llm, short) == found[-1], gpus
            if gpus == 2:
                runner: Any = llm._runtime._open_runner()
                table = runner.base.weights[embedding_name(runner.config)]
                assert isinstance(table, SharedTable) == (is_shared and runner.backend.memory.nccl is None)
                del runner, table
    with open_runner("numpy", EngineDirectory.open(target)) as runner:
        logits = [teacher_forced_logits(runner, *pair) for pair in zip(prompts, found[0], strict=True)]
    compared = compared_tokens(found[0], found[1], logits, TOLERANCES["float16"])
    assert not compared["faults"], compared
