"""Adapters of models that take images, against what PEFT computed: modules have the names that they had in training."""

from __future__ import annotations

import json
import re
import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from golden_files import golden_folder, largest_difference
from golden_images import FOLDER, GoldenModel
from safetensors.numpy import load_file, save_file

from edgellm.engines.backends.numpy_backend import NumpyBackend
from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.errors import AdapterError
from edgellm.engines.lora.adapter import LoraAdapter
from edgellm.engines.lora.config import LoraConfig
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.runners.base_runner import BaseEngineRunner
from edgellm.engines.runners.sampling_state import SamplingValues

GOLDENS = golden_folder("lora")
NAMES = sorted(path.name for path in GOLDENS.iterdir() if (FOLDER / path.name.split(".")[0]).is_dir())
TOLERANCE = 1e-4
VISION_LAYERS = {
    "qwen2_5_vl": [
        "model.visual.blocks.0.attn.qkv",
        "model.visual.blocks.1.mlp.down_proj",
        "model.visual.merger.mlp.0",
    ],
    "qwen3_vl": ["model.visual.blocks.0.mlp.linear_fc1", "model.visual.deepstack_merger_list.0.linear_fc2"],
    "llava_qwen3": ["model.vision_tower.encoder.layers.0.self_attn.q_proj", "model.multi_modal_projector.linear_1"],
    "llava_llama_old": ["vision_tower.vision_model.encoder.layers.0.self_attn.q_proj"],
    "qwen2_5_vl_old": ["visual.blocks.0.attn.qkv"],
}


def base_of(name: str) -> str:
    return name.split(".")[0]


def adapted_logits(golden: GoldenModel, adapter: Path) -> np.ndarray:
    """Logits [1 + n, V] after the prompt with images and along the tokens that continue it, with the adapter."""
    limits = EngineLimits(max_batch=1, prefill_chunk=16, kv_capacity=96, max_lora_rank=8, lora_slots=1)
    limits = replace(limits, window_rows=limits.rows_for_window(golden.config.window or limits.kv_rows))
    adapters = {"it": LoraAdapter.read(adapter, golden.config)}
    with Checkpoint.open(golden.path) as checkpoint:
        runner = BaseEngineRunner(NumpyBackend(golden.config), golden.config, limits, checkpoint, adapters=adapters)
    with closing(runner):
        runner.set_adapter(0, "it")
        runner.start(0, golden.token_ids, 0, SamplingValues(), golden.placed()).wait()
        rows = [runner.logits(0).copy()]
        for token in golden.expected["continued"]:
            runner.force_token(0, int(token))
            runner.decode(1).wait()
            rows.append(runner.logits(0).copy())
    return np.stack(rows)


def change(adapter: Path, target: Path, **settings: object) -> Path:
    """A copy of an adapter with other settings."""
    shutil.copytree(adapter, target)
    path = target / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return target


def with_vision_layers(adapter: Path, target: Path, modules: list[str], trained: float = 1.0) -> Path:
    """A copy of an adapter which adapts layers of an encoder, too; untrained pairs (0) change nothing."""
    shutil.copytree(adapter, target)
    file = target / "adapter_model.safetensors"
    pairs = {
        f"base_model.model.{module}.lora_{kind}.weight": np.full((2, 2), value, np.float32)
        for module in modules
        for kind, value in (("A", 1.0), ("B", trained))
    }
    save_file({name: values.astype(np.float32) for name, values in tensors_of(file).items()} | pairs, file)
    return target


def tensors_of(file: Path) -> dict[str, np.ndarray]:
    """All tensors; those in bfloat16, which NumPy lacks, as zeros."""
    header = file.read_bytes()
    described = json.loads(header[8 : 8 + int.from_bytes(header[:8], "little")])
    described.pop("__metadata__", None)
    if any(info["dtype"] == "BF16" for info in described.values()):
        return {name: np.zeros(info["shape"], np.float32) for name, info in described.items()}
    return load_file(file)


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_peft(name: str) -> None:
    golden = GoldenModel(base_of(name))
    expected = load_file(GOLDENS / name / "expected.safetensors")["logits"]
    unadapted = np.concatenate((golden.expected["logits"][-1:], golden.expected["continued_logits"]))
    found = adapted_logits(golden, GOLDENS / name)
    assert largest_difference(found, expected) <= TOLERANCE and largest_difference(found, unadapted) > 1


def test_settings_for_other_names_match_nothing(tmp_path: Path) -> None:
    """As in PEFT, which sees the names of training only."""
    name = "qwen2_5_vl.alphas"
    config = GoldenModel(base_of(name)).config
    own = {"model.layers.0.self_attn.q_proj": 400}
    read = LoraAdapter.read(change(GOLDENS / name, tmp_path / "own", alpha_pattern=own), config)
    assert {pair.scale for pair in read.pairs.values()} == {1.0}
    with pytest.raises(AdapterError, match="matches no linear layer of the language model"):
        LoraAdapter.read(change(GOLDENS / name, tmp_path / "none", target_modules=list(own)), config)


def test_problems_name_modules_as_the_file_does(tmp_path: Path) -> None:
    name = "llava_llama_old.first_names"
    config = GoldenModel(base_of(name)).config
    with pytest.raises(AdapterError) as caught:
        LoraAdapter.read(change(GOLDENS / name, tmp_path / "x", r=3), config)
    assert re.search(
        r"language_model\.model\.layers\.0\.mlp\.up_proj\.lora_A is \[2, 32\], expected \[3, 32\]", str(caught.value)
    )


def test_one_file_names_modules_in_one_way(tmp_path: Path) -> None:
    name = "qwen3_vl.full_names"
    target = change(GOLDENS / name, tmp_path / "mixed")
    file = target / "adapter_model.safetensors"
    tensors = load_file(file)
    last = max(tensors)
    tensors[last.replace("model.language_model.layers", "model.layers")] = tensors.pop(last)
    save_file(tensors, file)
    with pytest.raises(AdapterError) as caught:
        LoraAdapter.read(target, GoldenModel(base_of(name)).config)
    assert f"missing: {last.removeprefix('base_model.model.').removesuffix('.weight')}" in str(caught.value)
    assert "unknown: 'base_model.model.model.layers." in str(caught.value)


@pytest.mark.parametrize("base", VISION_LAYERS)
def test_adapted_vision_layers_are_counted_and_what_excludes_them_is_said(base: str, tmp_path: Path) -> None:
    name, layers = next(name for name in NAMES if base_of(name) == base), VISION_LAYERS[base]
    target = with_vision_layers(GOLDENS / name, tmp_path / "both", layers)
    with pytest.raises(AdapterError) as caught:
        LoraAdapter.read(target, GoldenModel(base).config)
    message = str(caught.value)
    assert f"it adapts {len(layers)} layers of encoders ({2 * len(layers)} tensors" in message
    assert "(1 problems)" in message
    untrained = with_vision_layers(GOLDENS / name, tmp_path / "untrained", layers, trained=0.0)
    assert LoraAdapter.read(untrained, GoldenModel(base).config).pairs
    exclude = json.loads('"' + re.search(r"exclude_modules='(.*)'", message)[1] + '"')
    again = LoraConfig.read(change(GOLDENS / name, tmp_path / "excluding", exclude_modules=exclude))
    assert again.problems == ()
    assert not any(again.adapts(layer) for layer in layers)
    before = LoraConfig.read(GOLDENS / name)
    modules = {
        tensor.split("base_model.model.")[1].split(".lora_")[0]
        for tensor in tensors_of(GOLDENS / name / "adapter_model.safetensors")
    }
    assert all(before.adapts(module) and again.adapts(module) for module in modules)


@pytest.mark.parametrize("excluded", [["up_proj", "mlp.down_proj"], r".*\.(up|down)_proj"])
def test_what_was_excluded_stays_excluded(excluded: list[str] | str, tmp_path: Path) -> None:
    path = change(GOLDENS / "qwen3_vl.all_but_vision", tmp_path / "x", exclude_modules=excluded)
    exclude = LoraConfig.read(path).excluding({"model.visual."})
    again = LoraConfig.read(change(path, tmp_path / "y", exclude_modules=exclude))
    assert again.problems == ()
    for module in ("layers.0.mlp.up_proj", "layers.1.mlp.down_proj"):
        assert not again.adapts(f"model.language_model.{module}")
    assert again.adapts("model.language_model.layers.0.mlp.gate_proj")
    assert not again.adapts("model.visual.blocks.0.attn.qkv")
