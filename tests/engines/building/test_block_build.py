"""Engine directories with a DFlash draft: built by the command, told by `info`, answered with, snapshots included."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from absent_serving import ServingOnNothing
from block_checkpoints import BLOCK, write_block_draft
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from edgellm.commands.app import create_app
from edgellm.device.forecast import round_shapes
from edgellm.drafting.config import DraftingConfig
from edgellm.engines.backends.executors import planned_shapes
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.errors import EngineDirectoryError
from edgellm.engines.model.draft_decoder import draft_weights
from edgellm.engines.speculation.draft_plan import tree
from edgellm.kernels.made import CAPTURED
from edgellm.llm import LLM
from edgellm.sampling_params import SamplingParams

SMALL = ("--kv-capacity", 96, "--prefill-chunk", 16, "--dtype", "float16")
PROMPT = "The quick brown fox jumps over the lazy dog"


def edgellm(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(create_app(), list(map(str, arguments)))
    return result.exit_code, result.output


@pytest.fixture(scope="module")
def built(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("blocks")
    draft = write_block_draft(folder / "draft", tiny_checkpoint, agreeing=False)
    code, output = edgellm("build", tiny_checkpoint, folder / "engines", "--draft", draft, *SMALL)
    assert code == 0, output
    return folder / "engines"


def test_limits_are_as_deep_as_the_block(built: Path) -> None:
    limits = EngineDirectory.open(built).limits
    assert (limits.draft_top_k, limits.draft_steps, limits.verify_tree_size) == (4, BLOCK - 1, 16)
    assert limits.draft_block == BLOCK and limits.kv_rows == 96 + 16
    proposing = [shape for shape in limits.engine_shapes() if shape.phase == "propose"]
    assert {(shape.tokens, shape.selected) for shape in proposing} == {(BLOCK, BLOCK)}


def test_info_tells_the_draft_and_its_memory(built: Path) -> None:
    code, output = edgellm("info", built, "--verify")
    assert code == 0 and f"DFlash of 2 layers, blocks of {BLOCK} tokens" in " ".join(output.split())
    code, output = edgellm("info", built, "--json")
    facts = json.loads(output)
    weights = draft_weights(EngineDirectory.open(built).draft.config)
    assert facts["draft"]["parameters"] >= sum(int(np.prod(spec.shape)) for spec in weights) * 0.9


def test_kernels_run_all_of_it_and_nothing_is_planned(built: Path) -> None:
    directory = EngineDirectory.open(built)
    assert planned_shapes(directory.models, directory.limits, "float16", "sm_87") == []
    needless = planned_shapes(directory.models, directory.limits, "float16", "sm_87", needless=True)
    assert {shape.model for shape in needless} <= {"base"}


@pytest.mark.parametrize(
    "drafting", [DraftingConfig(4, 5, 16), DraftingConfig(kind="chain", draft_steps=4, sampled=True)]
)
def test_on_a_gpu_that_is_not_there_nothing_is_made_after_opening(
    drafting: DraftingConfig, built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every launch of rounds is prepared and captured; modules of kernels are there before the first of them."""
    made: list[ServingOnNothing] = []

    def open_backend(name: str, directory: EngineDirectory, executor: str, *others: int | None) -> ServingOnNothing:
        made.append(ServingOnNothing(directory))
        return made[-1]

    monkeypatch.setattr("edgellm.opened_model.open_backend", open_backend)
    with LLM(built, drafting=drafting) as llm:
        before, captured = set(made[0].module.sources), made[0].made.counts[CAPTURED]
        for temperature in (0.0, 0.7):
            found = llm.generate([5, 6], SamplingParams(temperature=temperature, max_tokens=8, ignore_eos=True))
            assert found.drafting.rounds == 7
        assert set(made[0].module.sources) == before and made[0].made.counts[CAPTURED] == captured > 3


def test_a_forecast_has_one_pass_of_a_block(built: Path) -> None:
    shapes = round_shapes(EngineDirectory.open(built).limits, tree(4, BLOCK - 1, 16))
    assert [(shape.phase, shape.tokens) for shape in shapes] == [("accept", BLOCK), ("propose", BLOCK), ("verify", 16)]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_answers_are_those_of_plain_decoding(built: Path, temperature: float, tmp_path: Path) -> None:
    """Also where they go on from rows that earlier ones left."""
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=24, ignore_eos=True)
    with LLM(built, backend="numpy", drafting=None) as llm:
        plain = llm.generate(PROMPT, params)
    directory = tmp_path / "engines"
    shutil.copytree(built, directory)
    with LLM(directory, backend="numpy", drafting=DraftingConfig(4, BLOCK - 1, 16)) as llm:
        drafted, again = llm.generate(PROMPT, params), llm.generate(PROMPT, params)
        follow_up = [*llm.tokenizer.encode(PROMPT), *drafted.token_ids, 7]
        more = llm.generate(follow_up, params)
    assert drafted.token_ids == again.token_ids == plain.token_ids
    assert again.usage.reused_tokens > 0 and more.usage.reused_tokens > 0
    assert drafted.drafting.rounds > 0 and more.drafting.rounds > 0
    with LLM(built, backend="numpy", drafting=None) as llm:
        assert llm.generate(follow_up, params).token_ids == more.token_ids


def test_a_system_prompt_is_kept_on_disk_with_the_drafts_rows(built: Path, tmp_path: Path) -> None:
    """Read by a new process's model, it saves the prompt, and the answer is the one without it."""
    params, system = SamplingParams(max_tokens=12, ignore_eos=True), "Speak briefly."
    drafting = DraftingConfig(4, BLOCK - 1, 16)
    with LLM(built, backend="numpy", drafting=drafting) as llm:
        expected = llm.chat([{"role": "system", "content": system}, {"role": "user", "content": "Who?"}], params)
        kept = llm.cache_system_prompt(system, save=tmp_path / "kept")
        assert kept.tokens > 0
    with safe_open(tmp_path / "kept", "np") as file:
        assert {name for name in file.keys() if name.startswith("draft.")} >= {  # noqa: SIM118 - not a dict
            f"draft.{kind}_cache_{layer}" for kind in "kv" for layer in range(2)
        }
    with LLM(built, backend="numpy", drafting=drafting) as llm:
        llm.load_snapshot(tmp_path / "kept")
        found = llm.chat([{"role": "system", "content": system}, {"role": "user", "content": "Who?"}], params)
    assert found.token_ids == expected.token_ids and found.usage.reused_tokens >= kept.tokens - 1
    assert found.drafting.rounds > 0


def test_a_block_that_limits_do_not_fit_is_refused(built: Path, tiny_checkpoint: Path, tmp_path: Path) -> None:
    draft = built.parent / "draft"
    code, output = edgellm(
        "build", tiny_checkpoint, tmp_path / "deep", "--draft", draft, "--draft-steps", BLOCK, *SMALL
    )
    assert code != 0 and f"--draft-steps is {BLOCK}: expected at most {BLOCK - 1}" in " ".join(output.split())

    def damaged(change: dict[str, Any], part: str) -> None:
        directory = tmp_path / "damaged"
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(built, directory)
        told = json.loads((directory / "edgellm.json").read_text())
        place = told["limits"] if part == "limits" else told["draft"]["config"]
        place.update(change)
        (directory / "edgellm.json").write_text(json.dumps(told))
        with pytest.raises(EngineDirectoryError, match="block"):
            EngineDirectory.open(directory)

    damaged({"draft_block": 0}, "limits")
    damaged({"draft_block": BLOCK + 1}, "limits")
    damaged({"draft_steps": BLOCK}, "limits")
    damaged({"block": {"size": BLOCK, "mask_token_id": 320, "causal": False}}, "draft")


def test_eagle_4_is_refused_by_its_name(built: Path, tiny_checkpoint: Path, tmp_path: Path) -> None:
    draft = shutil.copytree(built.parent / "draft", tmp_path / "draft")
    tensors = load_file(draft / "model.safetensors")
    save_file(tensors | {"efficient_lm_head.weight": np.ones((320, 8), np.float16)}, draft / "model.safetensors")
    code, output = edgellm("build", tiny_checkpoint, tmp_path / "engines", "--draft", draft, *SMALL)
    told = " ".join(output.split())
    assert code != 0 and "it is an EAGLE-4 draft" in told and "source-available" in told
    assert not (tmp_path / "engines").exists()
