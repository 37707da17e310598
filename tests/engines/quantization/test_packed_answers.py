"""A packed model and its dense twin give the very same answers: plain, drafted, adapted, in batches, from snapshots,
about images."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from checkpoint_files import read_tensors, write_tensors
from device_weights import to_device_layout
from multimodal_engines import IMAGE_ROWS, LIMITS
from packed_checkpoints import pack_embedding, write_packed
from safetensors.numpy import load_file, save_file
from synthetic_images import synthetic_image
from tiny_multimodal import FAMILIES
from typer.testing import CliRunner

from edgellm import LLM, Request, SamplingParams
from edgellm.commands.app import create_app
from edgellm.drafting.config import DraftingConfig
from edgellm.engines.backends.device_layouts import model_layouts, packed_memory
from edgellm.engines.backends.opening import open_backend
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.building.inputs import read_decoder_config
from edgellm.engines.building.planning import refresh_plans
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.errors import BuildError, EngineDirectoryError, EngineError
from edgellm.engines.families.programs import model_weights
from edgellm.engines.model.limits import EngineLimits
from edgellm.errors import SnapshotError

SYSTEM = "You are a robot. Be brief."
CHATS = [
    [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}] for text in ("hello", "why?", "1 + 1")
]
DRAFTING = DraftingConfig(draft_top_k=4, draft_steps=3, verify_tree_size=12, adaptive=False)
ADAPTERS = (None, "style", None)


def params(number: int) -> SamplingParams:
    """Greedy and drawn in turn."""
    return SamplingParams(temperature=0.9 * (number % 2), top_k=20, seed=number, max_tokens=16, ignore_eos=True)


@pytest.fixture(scope="module")
def engines(
    tiny_checkpoint: Path, tiny_draft: Path, make_adapter: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """The packed tiny model with a packed draft and an adapter, and the dense twins of both."""
    folder = tmp_path_factory.mktemp("packed")
    models = write_packed(tiny_checkpoint, folder / "packed", folder / "twin")
    drafts = write_packed(tiny_draft, folder / "packed_draft", folder / "twin_draft")
    adapters = {"style": make_adapter(folder / "style", read_decoder_config(tiny_checkpoint))}
    limits = EngineLimits(3, 32, 160, 4, 3, 12, max_lora_rank=4, lora_slots=1)
    for model, draft in zip(models, drafts, strict=True):
        build_engine_directory(
            model, folder / f"{model.name}_engines", limits, [], "float16", draft=draft, adapters=adapters
        )
    return folder / "packed_engines", folder / "twin_engines"


def answers(directory: Path, drafting: DraftingConfig | None, **options: object) -> list[tuple[int, ...]]:
    """A batch of three, with an adapter in one; then a chat from a snapshot."""
    with LLM(directory, backend="numpy", drafting=drafting, **options) as llm:
        ids = [llm.tokenizer.encode_chat(chat) for chat in CHATS]
        asked = zip(ids, ADAPTERS, range(3), strict=True)
        batch = llm.handle([Request(each, None, params(number), name) for each, name, number in asked])
        kept = llm.cache_system_prompt(SYSTEM)
        again = llm.chat([CHATS[0][0], {"role": "user", "content": "go!"}], params(5))
        assert again.usage.reused_tokens >= kept.tokens - 1
        return [response.token_ids for response in (*batch, again)]


def test_answers_are_those_of_the_dense_twin(engines: tuple[Path, Path]) -> None:
    packed, twin = engines
    plain = answers(twin, None)
    assert len(set(plain)) == len(plain)
    assert answers(packed, None) == plain
    assert answers(packed, DRAFTING) == plain == answers(twin, DRAFTING)


def test_a_snapshot_is_bound_to_the_packed_weights(engines: tuple[Path, Path], tmp_path: Path) -> None:
    packed, twin = engines
    file = tmp_path / "system.safetensors"
    with LLM(packed, backend="numpy") as llm:
        kept = llm.cache_system_prompt(SYSTEM, save=file)
        expected = llm.chat(CHATS[1], params(1)).token_ids
    with LLM(packed, backend="numpy", snapshots=[file]) as llm:
        found = llm.chat(CHATS[1], params(1))
        assert found.token_ids == expected and found.usage.reused_tokens >= kept.tokens - 1
    with LLM(twin, backend="numpy") as llm, pytest.raises(SnapshotError):
        llm.load_snapshot(file)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_5"])
def test_images_with_a_dense_tower(
    family: str, make_checkpoint: Callable[..., Path], make_draft: Callable[..., Path], tmp_path: Path
) -> None:
    source = make_checkpoint(tmp_path / "source", 3, **FAMILIES[family])
    draft = make_draft(tmp_path / "draft")
    limits = replace(LIMITS, image_rows=IMAGE_ROWS.get(family, (64,)))
    content = [{"type": "image", "image": synthetic_image(24, 20)}, {"type": "text", "text": "What is it?"}]
    found = []
    for model in write_packed(source, tmp_path / "packed", tmp_path / "twin"):
        engines = tmp_path / f"{model.name}_engines"
        build_engine_directory(model, engines, limits, [], "float16", draft=draft)
        for drafting in (None, DRAFTING):
            with LLM(engines, backend="numpy", drafting=drafting) as llm:
                found.append(llm.chat([{"role": "user", "content": content}], params(0)).token_ids)
    assert len(set(found)) == 1


@pytest.mark.parametrize(("tied", "target"), [(True, "Embedding"), (False, "re:.*embed_tokens$")])
def test_a_packed_embedding(tied: bool, target: str, make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """By the class of its module or a pattern; of a tied model it is the head, too. Kernels look tokens up in it."""
    source = make_checkpoint(tmp_path / "source", 6, tie_word_embeddings=tied)
    models = write_packed(source, tmp_path / "packed", tmp_path / "twin")
    pack_embedding(*models, target)
    found = []
    for model in models:
        engines = tmp_path / f"{model.name}_engines"
        build_engine_directory(model, engines, EngineLimits(1, 32, 96), [], "float16")
        with LLM(engines, backend="numpy") as llm:
            found.append([llm.chat(chat, params(number)).token_ids for number, chat in enumerate(CHATS)])
    assert found[0] == found[1] and len(set(found[0])) == len(CHATS)
    directory = EngineDirectory.open(tmp_path / "packed_engines")
    layouts = model_layouts({"base": directory.config}, {"base": directory.checkpoint}, "float16")["base"]
    assert str(layouts["model.embed_tokens.weight"].format).startswith("int8, whole rows")
    assert ("lm_head.weight" in layouts) is False


def test_a_layer_that_kernels_do_not_take_is_refused_by_name(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """Kernels take scales of 16 columns and more, here they are of 8."""
    model, _ = write_packed(tiny_checkpoint, tmp_path / "packed", tmp_path / "twin", None)
    tensors = load_file(model / "model.safetensors")
    for name, values in tensors.items():
        if name.endswith(("weight_scale", "weight_zero_point")):
            tensors[name] = np.repeat(values, 4, axis=1)
    save_file(tensors, model / "model.safetensors")
    said = (model / "config.json").read_text().replace('"group_size": 32', '"group_size": 8')
    (model / "config.json").write_text(said)
    limits, reason = EngineLimits(1, 16, 96), r"q_proj \(int4, groups of 8.*multiples of 16 columns"
    build_engine_directory(model, tmp_path / "engines", limits, [], "float16")
    packed = EngineDirectory.open(tmp_path / "engines")
    with pytest.raises(EngineError, match=rf"{reason}.*--backend numpy.*edgellm quantize"):
        open_backend("tensorrt", packed)
    with LLM(packed.path, backend="numpy") as llm:
        assert llm.chat(CHATS[0], params(0)).token_ids
    result = CliRunner().invoke(create_app(), ["info", str(packed.path)])
    assert (
        "multiples of 16 columns" in result.output.replace("\n", " ")
        and "which makes float32 of the weights" in result.output
    )
    pytest.importorskip("tensorrt_rtx")
    with pytest.raises(BuildError, match=rf"{reason}.*Without --target"):
        build_engine_directory(model, tmp_path / "others", limits, ["sm_86"], "float16")
    assert not (tmp_path / "others").exists()
    with pytest.raises(BuildError, match=reason):
        refresh_plans(packed.path, ["sm_86"])


def test_plans_of_packed_models_are_of_segments_alone(
    tiny_checkpoint: Path, make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """But for the dense tower of one with images."""
    pytest.importorskip("tensorrt_rtx")
    source = make_checkpoint(tmp_path / "source", 3, **FAMILIES["qwen2_5_vl"])
    limits = {tiny_checkpoint: EngineLimits(1, 128, 256), source: EngineLimits(1, 128, 256, image_rows=(64,))}
    for number, (checkpoint, chosen) in enumerate(limits.items()):
        folder = tmp_path / str(number)
        model, _ = write_packed(checkpoint, folder / "packed", folder / "twin", None)
        report = build_engine_directory(model, folder / "engines", chosen, ["sm_86"], "float16", all_plans=True)
        whole = {plan.shape.model for plan in report.plans if not plan.shape.segment}
        assert whole == ({"vision"} if chosen.image_rows else set())
        names = {plan.shape.name for plan in report.plans if plan.shape.segment}
        assert {"base.prefill-b1-t128-s0-1", "base.prefill-b1-t128-s2-6"} <= names


def test_the_memory_plan_counts_packed_weights(tiny_checkpoint: Path, tiny_draft: Path, tmp_path: Path) -> None:
    model, _ = write_packed(tiny_checkpoint, tmp_path / "packed", tmp_path / "twin", None)
    draft, _ = write_packed(tiny_draft, tmp_path / "packed_draft", tmp_path / "twin_draft", None)
    build_engine_directory(model, tmp_path / "engines", EngineLimits(1, 32, 96, 4, 3, 12), [], "float16", draft=draft)
    directory = EngineDirectory.open(tmp_path / "engines")
    layouts = model_layouts(directory.models, directory.checkpoints, "float16")
    found = packed_memory(directory.models, layouts, "float16")
    for name, part in (("weights", directory), ("draft weights", directory.draft)):
        with part.checkpoint() as checkpoint:
            specs = model_weights(part.config)
            stored = sum(
                to_device_layout(checkpoint.packed(*each))[1].nbytes
                if checkpoint.layout(*each)
                else 2 * math.prod(each[1])
                for spec in specs
                for each in spec.parts
            )
        assert found[name] == stored
    facts = json.loads(CliRunner().invoke(create_app(), ["info", str(directory.path), "--json"]).output)
    assert {name: facts["memory"][name] for name in found} == found


def test_what_stands_beside_config_json_goes_along(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """ModelOpt's own file: without it in the engine directory 8-bit floats would be unknown."""
    source, random = shutil.copytree(tiny_checkpoint, tmp_path / "source"), np.random.default_rng(0)
    tensors = read_tensors(source / "model.safetensors")
    for name, (_, shape, _) in list(tensors.items()):
        if len(shape) == 2 and "embed_tokens" not in name:
            codes = random.integers(0, 0x60, shape, np.uint8) | random.integers(0, 2, shape, np.uint8) << 7
            tensors[name] = "F8_E4M3", shape, codes.tobytes()
            tensors[f"{name}_scale"] = "F32", [], np.float32(0.01).tobytes()
            tensors[f"{name.removesuffix('weight')}input_scale"] = "F32", [], np.float32(1).tobytes()
    write_tensors(source / "model.safetensors", tensors)
    said = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    (source / "hf_quant_config.json").write_text(json.dumps(said))
    build_engine_directory(source, tmp_path / "engines", EngineLimits(1, 16, 96), [])
    assert "hf_quant_config.json" in EngineDirectory.open(tmp_path / "engines", verify=True).files
    with LLM(tmp_path / "engines", backend="numpy") as llm:
        assert len(llm.chat(CHATS[0][1:], params(0)).token_ids) == 16
    (tmp_path / "engines" / "hf_quant_config.json").unlink()
    with pytest.raises(EngineDirectoryError, match=r"hf_quant_config\.json: missing"):
        EngineDirectory.open(tmp_path / "engines")


def test_info_says_how_each_part_is_stored(engines: tuple[Path, Path]) -> None:
    result = CliRunner().invoke(create_app(), ["info", str(engines[0])])
    assert result.exit_code == 0, result.output
    for words in (
        "packed      base, compressed-tensors",
        "pack-quantized: int8, whole rows, 12 weights of ",
        "pack-quantized: int4, groups of 32, zero points, 9 weights of ",
        "dense, ",
        "packed      draft, compressed-tensors",
    ):
        assert words in result.output
    dense = CliRunner().invoke(create_app(), ["info", str(engines[1])])
    assert "  packed  " not in dense.output
