"""Reading draft heads: what the published layouts mean, and every way in which a head does not fit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from golden_files import golden_folder
from safetensors.numpy import load_file, save_file

from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.errors import CheckpointError, EdgeLLMError, UnsupportedModelError
from edgellm.engines.families import decoder_config
from edgellm.engines.families.drafts import other_draft, read_draft
from edgellm.engines.families.eagle import DraftReader
from edgellm.engines.model.config import DraftConfig
from edgellm.engines.model.draft_decoder import draft_weights

GOLDENS = golden_folder("draft")
IDS, CONVENTION = "eagle_aux_hidden_state_layer_ids", "eagle_aux_hidden_state_convention"

Edit = Callable[[dict[str, np.ndarray]], Any]


def read(draft: Path, base: Path) -> DraftConfig:
    with Checkpoint.open(draft) as draft_checkpoint, Checkpoint.open(base) as base_checkpoint:
        config = decoder_config(base_checkpoint.config, dtype=base_checkpoint.dtype)
        return read_draft(draft_checkpoint, base_checkpoint, config)


def edited(draft: Path, edit: Edit) -> Path:
    tensors = load_file(draft / "model.safetensors")
    edit(tensors)
    save_file(tensors, draft / "model.safetensors")
    return draft


@pytest.fixture
def draft(tiny_draft: Path, tmp_path: Path) -> Path:
    """A copy of the tiny head that a test may change."""
    return Path(shutil.copytree(tiny_draft, tmp_path / "draft"))


def configure(draft: Path, **changes: Any) -> Path:
    path = draft / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return draft


def test_a_head_with_its_own_layers_named(draft: Path, tiny_checkpoint: Path) -> None:
    config = read(draft, tiny_checkpoint)
    assert config.generation == "3"
    assert config.feature_layers == (1, 2)
    assert (config.hidden_size, config.feature_size, config.draft_vocab_size) == (64, 128, 200)
    assert (config.decoder.head_dim, config.decoder.rope_theta, config.decoder.dtype) == (16, 10000.0, "float16")
    assert (config.has_mapping, config.has_head, config.has_embedding) == (True, True, False)
    assert config.head_name == "lm_head.weight"
    names = [name for spec in draft_weights(config) for name, _ in spec.parts]
    assert sorted([*names, "d2t", "t2d"]) == sorted(load_file(draft / "model.safetensors"))


def test_published_generations() -> None:
    bases = {"eagle1": "llama", "eagle2_biases": "qwen2", "eagle3_speculators": "qwen3", "eagle31": "llama"}
    configs = {name: read(GOLDENS / name, GOLDENS / f"{base}_base") for name, base in bases.items()}
    assert {name: config.generation for name, config in configs.items()} == {
        "eagle1": "1",
        "eagle2_biases": "1",
        "eagle3_speculators": "3",
        "eagle31": "3.1",
    }
    first = configs["eagle1"]
    assert (first.feature_layers, first.feature_size, first.head_name) == ((7,), 32, "lm_head.weight")
    assert not any("input_layernorm" in spec.name or spec.name == "norm.weight" for spec in draft_weights(first))
    assert configs["eagle2_biases"].fc_bias
    assert not first.fc_bias
    assert configs["eagle31"].feature_layers == (2, 3, 4)
    assert configs["eagle31"].layer_prefix == "model.layers.0."
    assert configs["eagle3_speculators"].decoder.qk_norm


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_tables_that_equal_the_bases_are_shared(dtype: str, draft: Path, tiny_checkpoint: Path) -> None:
    table = load_file(tiny_checkpoint / "model.safetensors")["model.embed_tokens.weight"].astype(dtype)
    config = read(edited(draft, lambda tensors: tensors.update({"embed_tokens.weight": table})), tiny_checkpoint)
    assert config.has_embedding == (dtype == "float32")  # kept where the bytes differ


def test_a_head_of_the_whole_vocabulary_needs_no_mapping_and_no_head(draft: Path, tiny_checkpoint: Path) -> None:
    def whole(tensors: dict[str, np.ndarray]) -> None:
        for name in ("d2t", "t2d", "lm_head.weight"):
            del tensors[name]

    config = read(configure(edited(draft, whole), draft_vocab_size=None), tiny_checkpoint)
    assert (config.draft_vocab_size, config.has_mapping, config.has_head) == (320, False, False)
    assert config.head_name == "model.embed_tokens.weight"  # the base's is tied


@pytest.mark.parametrize(
    "changes",
    [
        {"draft_vocab_size": None, "truncated_vocab_size": 200, "architectures": ["LlamaForCausalLM"]},
        {"draft_vocab_size": 200, "truncated_vocab_size": 320},  # the whole vocabulary, by vLLM's default
        {"draft_vocab_size": None, "truncated_vocab_size": 320},
        {"draft_vocab_size": None},
        {"draft_vocab_size": None, "architectures": ["LlamaForCausalLM"]},
    ],
)
def test_a_reduced_vocabulary_by_another_name_or_by_its_tensors(
    changes: dict[str, Any], draft: Path, tiny_checkpoint: Path
) -> None:
    expected = read(draft, tiny_checkpoint)
    assert expected.draft_vocab_size == 200
    assert read(configure(draft, **changes), tiny_checkpoint) == expected


@pytest.mark.parametrize(
    ("changes", "edit", "message"),
    [
        ({"truncated_vocab_size": 199}, None, r"(?s)2 problems.*lm_head.weight is \[200, 64\], expected \[199, 64\]"),
        (
            {"truncated_vocab_size": "200"},
            None,
            r"truncated_vocab_size is \"200\", expected a whole number from 1 to 320",
        ),
        ({}, lambda t: t.pop("d2t"), r"missing: d2t \[200\]"),
        ({}, lambda t: t.pop("lm_head.weight"), r"missing: lm_head.weight \[200, 64\]"),
        ({}, lambda t: t.update(d2t=np.zeros(321, np.int64)), r"the length of d2t is 321, expected .* from 1 to 320"),
        ({}, lambda t: t.update(d2t=t["d2t"][:-1].copy()), r"lm_head.weight is \[200, 64\], expected \[199, 64\]"),
    ],
)
def test_a_reduced_vocabulary_that_does_not_fit(
    changes: dict[str, Any], edit: Edit | None, message: str, draft: Path, tiny_checkpoint: Path
) -> None:
    configure(draft, draft_vocab_size=None, **changes)
    if edit is not None:
        edited(draft, edit)
    with pytest.raises(CheckpointError, match=message):
        read(draft, tiny_checkpoint)


BAD_TENSORS: dict[str, tuple[Edit, str]] = {
    "no d2t": (lambda t: t.pop("d2t"), r"missing: d2t \[200\]"),
    "d2t of another size": (lambda t: t.update(d2t=t["d2t"][:-1].copy()), r"wrong shape: d2t is \[199\]"),
    "d2t in floating point": (lambda t: t.update(d2t=t["d2t"].astype(np.float32)), r"wrong dtype: d2t is float32"),
    "d2t beyond the vocabulary": (
        lambda t: t["d2t"].__setitem__(-1, 121),
        r"d2t maps 1 draft ids out of the base's vocabulary of 320.*199 \(offset 121, id 320\)",
    ),
    "d2t below zero": (lambda t: t["d2t"].__setitem__(3, -4), r"3 \(offset -4, id -1\)"),
    "d2t with an id twice": (lambda t: t["d2t"].__setitem__(1, t["d2t"][0] - 1), r"maps several draft ids to \d+;"),
    "t2d of another mapping": (lambda t: t.update(t2d=~t["t2d"]), r"t2d disagrees with d2t on 320 ids"),
    "t2d of another size": (lambda t: t.update(t2d=t["t2d"][:-1].copy()), r"wrong shape: t2d is \[319\]"),
    "an unknown tensor": (lambda t: t.update(extra=np.zeros((2, 3), np.float16)), r"unknown: extra \[2, 3\]"),
    "a missing tensor": (
        lambda t: t.pop("midlayer.hidden_norm.weight"),
        r"missing: midlayer.hidden_norm.weight \[64\]",
    ),
    "a wrong fc": (lambda t: t.update({"fc.weight": np.zeros((64, 192), np.float16)}), r"fc.weight is \[64, 192\]"),
    "a second layer": (
        lambda t: t.update({"layers.0.hidden_norm.weight": np.ones(64, np.float16)}),
        r"unknown: layers.0.hidden_norm.weight",
    ),
    "no head": (lambda t: t.pop("lm_head.weight"), r"missing: lm_head.weight \[200, 64\]"),
}


@pytest.mark.parametrize("problem", BAD_TENSORS)
def test_tensors_that_do_not_fit(problem: str, draft: Path, tiny_checkpoint: Path) -> None:
    edit, message = BAD_TENSORS[problem]
    with pytest.raises(CheckpointError, match=message) as caught:
        read(edited(draft, edit), tiny_checkpoint)
    assert str(draft) in str(caught.value)
    assert str(tiny_checkpoint) in str(caught.value)


BAD_CONFIGS: dict[str, tuple[dict[str, Any], type[EdgeLLMError], str]] = {
    "no convention": ({CONVENTION: None, IDS: [1]}, CheckpointError, r"add .*convention.*output.*entered"),
    "an unknown convention": (
        {CONVENTION: "left"},
        CheckpointError,
        r"convention is \"left\", expected one of entered",
    ),
    "a layer twice": ({IDS: [1, 1]}, CheckpointError, r"expected distinct ones from 1 to 2, ascending"),
    "layers out of order": ({IDS: [2, 1]}, CheckpointError, r"ascending"),
    "a layer out of range": ({IDS: [1, 3]}, CheckpointError, r"layers entered are \[1, 3\]; expected .* 1 to 2"),
    "left and so out of range": ({CONVENTION: "output"}, CheckpointError, r"layers entered are \[2, 3\]"),
    "no layers for a shallow base": ({IDS: None}, CheckpointError, r"a base of 3 layers has no usual ones"),
    "layers that are no list": ({IDS: "1, 2"}, CheckpointError, r"expected a list of layers"),
    "an empty list": ({IDS: []}, CheckpointError, r"expected a list of layers"),
    "two lists": ({"eagle_config": {IDS: [0, 1]}}, CheckpointError, r"in one place and \[0, 1\] in another"),
    "another hidden size": ({"hidden_size": 128}, CheckpointError, r"hidden_size is 128, the base has 64"),
    "another vocabulary": ({"vocab_size": 400}, CheckpointError, r"vocab_size is 400, the base has 320"),
    "another target": ({"target_hidden_size": 96}, CheckpointError, r"target_hidden_size is 96, the base has 64"),
    "too large a draft vocabulary": ({"draft_vocab_size": 321}, CheckpointError, r"draft_vocab_size is 321"),
    "no hidden size": ({"hidden_size": None}, CheckpointError, r"hidden_size is null"),
    "a switch that is none": ({"norm_output": 1}, CheckpointError, r"norm_output is 1, expected true or false"),
    "two norms": ({"fc_norm": True, "norm_before_fc": True}, CheckpointError, r"both fc_norm and norm_before_fc"),
    "norms that are not there": ({"fc_norm": True}, CheckpointError, r"missing: fc_norm.0.weight"),
    "two layers": ({"num_hidden_layers": 2}, UnsupportedModelError, r"heads of one layer"),
    "another family": ({"model_type": "deepseek"}, UnsupportedModelError, r"model_type is \"deepseek\""),
    "an MLP of another kind": ({"hidden_act": "gelu"}, UnsupportedModelError, r"hidden_act"),
    "no hidden states": (
        {"eagle_config": {"use_aux_hidden_state": False}},
        UnsupportedModelError,
        r"use_aux_hidden_state is false",
    ),
    "another speculator": ({"speculators_model_type": "mlp"}, UnsupportedModelError, r"supported is eagle3"),
    "a layer's fields missing": (
        {"speculators_model_type": "eagle3", "transformer_layer_config": 3},
        CheckpointError,
        r"transformer_layer_config is 3",
    ),
}


@pytest.mark.parametrize("problem", BAD_CONFIGS)
def test_configurations_that_do_not_fit(problem: str, draft: Path, tiny_checkpoint: Path) -> None:
    changes, error, message = BAD_CONFIGS[problem]
    with pytest.raises(error, match=message):
        read(configure(draft, **changes), tiny_checkpoint)


DFLASH = {"mask_token_id": 318, "target_layer_ids": [0, 1]}
#: What other drafts are published with, and what they are said to be.
OTHER_DRAFTS: dict[str, tuple[dict[str, Any], str]] = {
    "EAGLE-4": (
        {"architectures": ["LlamaForCausalLMEagle4"], "efficient_lm_head_config": {"type": "low_rank"}},
        'an EAGLE-4 draft (architectures has "LlamaForCausalLMEagle4")',
    ),
    "EAGLE-4 by its fields": (
        {"efficient_lm_head_config": {"type": "low_rank"}},
        "an EAGLE-4 draft (config.json has efficient_lm_head_config)",
    ),
    "z-lab's DFlash2": (
        {"architectures": ["DFlash2DraftModel"], "dflash_config": DFLASH},
        'a DFlash2 draft (architectures has "DFlash2DraftModel")',
    ),
    "speculators' DFlash2": (
        {"architectures": None, "speculators_model_type": "dflash2", "transformer_layer_config": {}},
        'a DFlash2 draft (speculators_model_type is "dflash2")',
    ),
    "SpecForge's Domino": (
        {"architectures": ["DominoDraftModel"], "dflash_config": DFLASH | {"projector_type": "domino"}},
        'a Domino draft (architectures has "DominoDraftModel")',
    ),
    "Domino as a DFlash draft": (
        {"architectures": ["DFlashDraftModel"], "dflash_config": DFLASH | {"projector_type": "domino"}},
        'a Domino draft (dflash_config.projector_type is "domino")',
    ),
    "SpecForge's DSpark": (
        {"architectures": ["DSparkDraftModel"], "dflash_config": DFLASH | {"projector_type": "dspark"}},
        'a DSpark draft (architectures has "DSparkDraftModel")',
    ),
    "DeepSpec's DSpark": (
        {"architectures": ["Qwen3DSparkModel"], "markov_rank": 256},
        'a DSpark draft (architectures has "Qwen3DSparkModel")',
    ),
    "speculators' DSpark": (
        {"architectures": None, "speculators_model_type": "dspark", "markov_rank": 0},
        'a DSpark draft (speculators_model_type is "dspark")',
    ),
    "SpecForge's P-EAGLE": (
        {"architectures": ["PEagleDraftModel"], "num_hidden_layers": 4},
        'a P-EAGLE draft (architectures has "PEagleDraftModel")',
    ),
    "speculators' P-EAGLE": (
        {"speculators_model_type": "peagle", "transformer_layer_config": {}},
        'a P-EAGLE draft (speculators_model_type is "peagle")',
    ),
    "vLLM's P-EAGLE": ({"ptd_token_id": 319}, "a P-EAGLE draft (config.json has ptd_token_id)"),
    "Gemma 4's assistant": (
        {"architectures": ["Gemma4AssistantForCausalLM"], "model_type": "gemma4_assistant"},
        'a Gemma 4 assistant draft (architectures has "Gemma4AssistantForCausalLM")',
    ),
    "an algorithm of speculators": (
        {"architectures": None, "speculators_config": {"algorithm": "peagle"}},
        'a P-EAGLE draft (speculators_config.algorithm is "peagle")',
    ),
}


def refusal_of_other_draft(draft: Path, base: Path) -> str:
    with pytest.raises(UnsupportedModelError) as caught:
        read(draft, base)
    message = str(caught.value)
    assert str(draft) in message
    assert "DFlash and heads of EAGLE-1, EAGLE-2, EAGLE-3 and EAGLE-3.1 can" in message
    assert "layers" not in message
    return message


@pytest.mark.parametrize("kind", OTHER_DRAFTS)
def test_other_drafts_are_refused_as_what_they_are(kind: str, draft: Path, tiny_checkpoint: Path) -> None:
    changes, words = OTHER_DRAFTS[kind]
    assert f"it is {words}, which" in refusal_of_other_draft(configure(draft, **changes), tiny_checkpoint)


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        ("efficient_lm_head.weight", "an EAGLE-4 draft (the weights have efficient_lm_head.weight)"),
        ("lilicorr_query.weight", "a LiLiCorr draft (the weights have lilicorr_query.weight)"),
        ("candidate_selector.successor_codebook", "a DFlash2 draft (the weights have candidate_selector.successor_"),
        ("prefix_gru.weight_ih_l0", "a Domino draft (the weights have prefix_gru.weight_ih_l0)"),
        ("logit_head.prefix_gru.weight_ih_l0", "a Domino draft (the weights have logit_head.prefix_gru.weight_ih_l0)"),
        ("markov_head.markov_w1.weight", "a DSpark draft (the weights have markov_head.markov_w1.weight)"),
        ("mask_hidden", "a P-EAGLE draft (the weights have mask_hidden)"),
        ("pre_projection.weight", "a Gemma 4 assistant draft (the weights have pre_projection.weight)"),
    ],
)
def test_other_drafts_show_in_their_tensors(tensor: str, words: str, draft: Path, tiny_checkpoint: Path) -> None:
    edited(draft, lambda tensors: tensors.update({tensor: np.ones((1, 4), np.float16)}))
    assert words in refusal_of_other_draft(draft, tiny_checkpoint)


def test_no_eagle_head_is_taken_for_another_draft(draft: Path, tiny_checkpoint: Path) -> None:
    for path in (draft, *(path for path in GOLDENS.iterdir() if not path.name.endswith("_base"))):
        with Checkpoint.open(path) as checkpoint:
            assert other_draft(checkpoint.config, checkpoint.tensors) is None
    odd = {"architectures": [3], "dflash_config": None, "speculators_config": "dflash", "speculators_model_type": 5}
    assert other_draft(odd, ()) is None


def test_every_problem_is_listed_at_once(draft: Path, tiny_checkpoint: Path) -> None:
    def damage(tensors: dict[str, np.ndarray]) -> None:
        del tensors["d2t"], tensors["norm.weight"]
        tensors["extra"] = np.zeros(3, np.float16)

    configure(edited(draft, damage), target_hidden_size=96)
    with pytest.raises(CheckpointError) as caught:
        read(draft, tiny_checkpoint)
    for problem in ("4 problems", "target_hidden_size is 96", "missing: d2t", "missing: norm.weight", "unknown: extra"):
        assert problem in str(caught.value)
    configure(draft, hidden_act="gelu", norm_output="yes", **{IDS: [5]})
    with pytest.raises(UnsupportedModelError) as caught:
        read(draft, tiny_checkpoint)
    for problem in ("hidden_act", "norm_output", "target_hidden_size", "layers entered are [5]"):
        assert problem in str(caught.value)


def test_the_draft_of_another_base_is_refused(
    tiny_draft: Path, make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    other = make_checkpoint(tmp_path / "other", 1, hidden_size=96, vocab_size=400)
    with pytest.raises(CheckpointError, match=r"(?s)2 problems.*hidden_size is 64, the base has 96.*vocab_size"):
        read(tiny_draft, other)
    with pytest.raises(CheckpointError, match=r"vocab_size is 80, the base has 320"):
        read(GOLDENS / "eagle1", make_checkpoint(tmp_path / "third", 1))


def test_a_first_generation_head_takes_no_head_of_its_own(tmp_path: Path) -> None:
    base, draft = GOLDENS / "llama_base", Path(shutil.copytree(GOLDENS / "eagle1", tmp_path / "draft"))
    own = load_file(base / "model.safetensors")["lm_head.weight"]
    config = read(edited(draft, lambda tensors: tensors.update({"lm_head.weight": own})), base)
    assert not config.has_head
    with pytest.raises(CheckpointError, match=r"unknown: lm_head.weight \[80, 32\]"):
        read(edited(draft, lambda tensors: tensors.update({"lm_head.weight": own + np.float16(1)})), base)


@pytest.mark.parametrize("size", [0, 4, 100, 5000])
def test_a_truncated_file_is_refused(size: int, draft: Path, tiny_checkpoint: Path) -> None:
    path = draft / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        read(draft, tiny_checkpoint)


def reader_of(config: dict[str, Any], layers: int) -> DraftReader:
    """That of a head without tensors, whose base has so many layers."""
    draft: Any = SimpleNamespace(config=config, tensors={}, dtype="float16")
    base: Any = SimpleNamespace(num_layers=layers)
    return DraftReader(draft, draft, base)


@pytest.mark.parametrize(
    ("config", "eagle", "is_speculators", "expected"),
    [
        ({}, {}, False, (2, 16, 29)),
        ({IDS: [2, 16, 29]}, {}, False, (2, 16, 29)),
        ({}, {IDS: [1, 15, 28]}, False, (2, 16, 29)),
        ({IDS: [1, 23, 30]}, {}, True, (1, 23, 30)),
        ({IDS: [1, 23, 30], CONVENTION: "output"}, {}, True, (2, 24, 31)),
        ({IDS: [3]}, {CONVENTION: "entered"}, False, (3,)),
        ({IDS: [4, 9, 20, 31], CONVENTION: "entered"}, {}, False, (4, 9, 20, 31)),
    ],
)
def test_conventions_that_are_known(
    config: dict[str, Any], eagle: dict[str, Any], is_speculators: bool, expected: tuple[int, ...]
) -> None:
    declared = {"speculators_model_type": "eagle3"} if is_speculators else {}
    reader = reader_of({**config, **declared, "eagle_config": eagle}, layers=32)
    assert reader.feature_layers() == expected
    assert reader.fields.wrong == []


@pytest.mark.parametrize("layers", range(1, 12))
def test_usual_layers_need_a_base_of_seven(layers: int) -> None:
    reader = reader_of({}, layers)
    found = reader.feature_layers()
    assert bool(reader.fields.wrong) == (layers < 7)
    if layers >= 7:
        assert found == (2, layers // 2, layers - 3)
