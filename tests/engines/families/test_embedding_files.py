"""Which files make an embedding model, which poolings are refused, and what else becomes of such a checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from embedding_models import TOLERANCE, EmbeddingModel
from gguf_models import byte_pairs, write_model
from golden_files import read_tensors, write_tensors
from tokenizers import Tokenizer

from edgellm import LLM
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.building.gguf_folder import checkpoint_folder
from edgellm.engines.building.inputs import read_decoder_config
from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.errors import BuildError, CheckpointError, EngineDirectoryError, UnsupportedModelError
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.quantizer.quantizer import QuantizationOptions, quantize_checkpoint
from edgellm.hub.names import HubName, chosen_files

LIMITS = EngineLimits(1, 32, 160)
MODELS = "sentence_transformers.models"


@pytest.fixture
def model(embedding_model: Callable[[str], EmbeddingModel]) -> EmbeddingModel:
    return embedding_model("published")


@pytest.fixture
def checkpoint(model: EmbeddingModel, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model.checkpoint, tmp_path / "checkpoint"))


def change(path: Path, **values: Any) -> None:
    """Set keys of a JSON object; None takes them out."""
    found = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in found.items() if value is not None}))


def test_a_checkpoint_says_that_it_is_one(model: EmbeddingModel, checkpoint: Path) -> None:
    config = read_decoder_config(checkpoint)
    assert (config.pooling, config.feature_layers, config.tie_word_embeddings) == ("last", (2,), True)
    (checkpoint / "modules.json").unlink()
    assert read_decoder_config(checkpoint).pooling == "none"
    directory = EngineDirectory.open(model.engines)
    assert {"modules.json", "1_Pooling/config.json", "config_sentence_transformers.json"} <= set(directory.files)
    with directory.checkpoint() as opened:
        assert {name.split(".")[0] for name in opened.tensors} == {"model"}


def test_its_files_come_from_the_hub() -> None:
    files = ("config.json", "tokenizer.json", "modules.json", "1_Pooling/config.json", "2_Normalize/config.json")
    found = chosen_files(HubName("org/name"), dict.fromkeys([*files, "model.safetensors"], 1), lambda: ())
    assert set(found) == {*files[:-1], "model.safetensors"}


@pytest.mark.parametrize(
    ("pooling", "said"),
    [
        ({"pooling_mode_lasttoken": False, "pooling_mode_mean_tokens": True}, '"mean_tokens"'),
        ({"pooling_mode_cls_token": True}, '"cls_token and lasttoken"'),
        ({"pooling_mode_lasttoken": None}, '""'),
        ({"pooling_mode": "mean"}, '"mean"'),
        ({"pooling_mode": ["lasttoken"]}, "lasttoken"),
    ],
)
def test_another_pooling_is_refused_by_name(checkpoint: Path, pooling: dict[str, Any], said: str) -> None:
    change(checkpoint / "1_Pooling" / "config.json", **pooling)
    with pytest.raises(UnsupportedModelError, match="the pooling is") as refused:
        read_decoder_config(checkpoint)
    assert said in str(refused.value) and "supported is lasttoken" in str(refused.value)


@pytest.mark.parametrize(
    ("modules", "said"),
    [
        ([("Transformer", ""), ("Pooling", "1_Pooling"), ("Dense", "2_Dense")], "2_Dense"),
        ([("Transformer", ""), ("Pooling", "../other")], "../other"),
        ([("Transformer", "0_Transformer"), ("Pooling", "1_Pooling")], "0_Transformer"),
        ([("Transformer", ""), ("Normalize", "1_Normalize")], "Transformer, Pooling, Normalize in this order"),
        ([], "Transformer, Pooling, Normalize in this order"),
    ],
)
def test_other_modules_are_refused_by_name(checkpoint: Path, modules: list[tuple[str, str]], said: str) -> None:
    listed = [{"path": path, "type": f"{MODELS}.{name}"} for name, path in modules]
    (checkpoint / "modules.json").write_text(json.dumps(listed))
    with pytest.raises(UnsupportedModelError) as refused:
        read_decoder_config(checkpoint)
    assert said in str(refused.value)


def test_models_whose_tokens_see_later_ones_and_other_families_are_refused(checkpoint: Path) -> None:
    for key, value in (("is_causal", False), ("use_bidirectional_attention", True), ("auto_map", {"AutoModel": "x.Y"})):
        change(checkpoint / "config.json", **{key: value})
        with pytest.raises(UnsupportedModelError, match=f"config.json has {key}"):
            read_decoder_config(checkpoint)
        change(checkpoint / "config.json", **{key: None})
    change(checkpoint / "config.json", model_type="qwen2", architectures=["Qwen2Model"])
    with pytest.raises(UnsupportedModelError, match="of the family qwen2, supported are those of qwen3"):
        read_decoder_config(checkpoint)
    for content in ("{}", '"x"', "[1]"):
        (checkpoint / "modules.json").write_text(content)
        with pytest.raises(UnsupportedModelError, match=r"modules\.json has"):
            read_decoder_config(checkpoint)
    (checkpoint / "modules.json").write_text("[")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        read_decoder_config(checkpoint)


def test_a_description_must_agree_and_no_draft_is_taken(
    model: EmbeddingModel, tiny_draft: Path, tmp_path: Path
) -> None:
    with pytest.raises(BuildError, match="gives no answers to draft"):
        build_engine_directory(model.checkpoint, tmp_path / "drafted", None, [], draft=tiny_draft)
    for change_to, message in (("mean", "'pooling' is 'mean'"), ("none", "disagree on whether there is a draft")):
        engines = Path(shutil.copytree(model.engines, tmp_path / change_to))
        described = json.loads((engines / "edgellm.json").read_text())
        described["config"]["pooling"] = change_to
        (engines / "edgellm.json").write_text(json.dumps(described))
        with pytest.raises(EngineDirectoryError, match=message):
            EngineDirectory.read(engines)


@pytest.mark.parametrize("kind", [3, 1])
def test_a_gguf_file_that_says_its_pooling_embeds(model: EmbeddingModel, tmp_path: Path, kind: int) -> None:
    """As llama.cpp's converter writes one: its tokenizer ends texts by a flag."""
    named = Path(shutil.copytree(model.checkpoint, tmp_path / "named"))
    tensors = {f"model.{name}": each for name, each in read_tensors(named / "model.safetensors").items()}
    write_tensors(named / "model.safetensors", tensors)
    keys = byte_pairs(Tokenizer.from_file(str(named / "tokenizer.json")), "qwen2")
    keys |= {"eos_token_id": 256, "add_eos_token": True, "add_bos_token": False}
    more = {f"tokenizer.ggml.{key}": value for key, value in keys.items()} | {"qwen3.pooling_type": kind}
    file = write_model(named, tmp_path / "embedding.gguf", more)
    if kind == 1:
        with pytest.raises(UnsupportedModelError, match="pooling_type' is 1, supported is 3"), checkpoint_folder(file):
            pass
        return
    with checkpoint_folder(file) as folder:
        build_engine_directory(folder, tmp_path / "engines", LIMITS, [], weights="link")
    with LLM(tmp_path / "engines", backend="numpy") as llm:
        np.testing.assert_allclose(llm.embed(model.texts), model.expected["embeddings"], atol=TOLERANCE)


def test_a_quantized_checkpoint_stays_an_embedding_model(model: EmbeddingModel, tmp_path: Path) -> None:
    """Its tensors keep their names without "model.", and the files that say the pooling go along."""
    quantize_checkpoint(model.checkpoint, tmp_path / "int8", QuantizationOptions(8, None, True, "rtn"), [])
    with Checkpoint.open(tmp_path / "int8") as opened:
        assert opened.layout("model.layers.0.mlp.up_proj.weight", (48, 32)) is not None
        assert opened.layout("model.norm.weight", (32,)) is None
    build_engine_directory(tmp_path / "int8", tmp_path / "engines", LIMITS, [])
    with LLM(tmp_path / "engines", backend="numpy") as llm:
        found = llm.embed(model.texts)
    likeness = (found * model.expected["embeddings"]).sum(axis=1)
    assert likeness.min() > 0.98 and likeness.max() < 1 - 1e-6
