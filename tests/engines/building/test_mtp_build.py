"""Engine directories whose draft is the head inside the checkpoint: built, described, loaded, and refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mtp_checkpoints import HEADS, TINY, TINY_NEMOTRON, add_head, edit_tensors, golden_checkpoint, write_index
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner, Result

from edgellm import LLM, DraftingConfig, SamplingParams
from edgellm.commands.app import create_app
from edgellm.drafting.config import default_drafting
from edgellm.drafting.drafters import candidate_plans
from edgellm.engines.backends.executors import planned_shapes
from edgellm.engines.backends.steps.table import kernel_choice
from edgellm.engines.backends.tensorrt_operations import build_plan
from edgellm.engines.building import shipped_draft
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.building.inputs import read_decoder_config
from edgellm.engines.building.shipped_draft import frequent_ids, read_vocabulary
from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.checkpoints.weights import load_draft_to_target, load_numpy_weights
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.errors import BuildError, CheckpointError, EngineDirectoryError, UnsupportedModelError
from edgellm.engines.families.drafts import read_mtp
from edgellm.engines.model.decoder import decoder_weights, head_format
from edgellm.engines.model.draft_decoder import draft_weights
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.model.memory_plan import plan_memory
from edgellm.engines.quantizer.arithmetic import NUMPY
from edgellm.engines.quantizer.layers import DENSE_PATTERN
from edgellm.engines.quantizer.quantizer import QuantizationOptions, quantize_checkpoint
from edgellm.engines.quantizer.rounding import quantize_rows
from edgellm.engines.quantizer.written_layout import StoredTensor, packed_tensors, write_tensors
from edgellm.engines.speculation.draft_plan import chain, tree
from edgellm.kernels.quantization.packed_weight import WeightFormat
from tools.demo_model.describe import describe_in_place

LIMITS = EngineLimits(1, 16, 96, draft_top_k=4, draft_steps=3, verify_tree_size=16)
PLAIN = EngineLimits(1, 16, 96)
IDS = np.asarray([0, 5, 7, *range(20, 200), 319])


def edgellm(*arguments: object) -> Result:
    return CliRunner().invoke(create_app(), list(map(str, arguments)))


@pytest.fixture(scope="module")
def published(make_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3.5 with its head; tests that change it copy it first."""
    return add_head(make_checkpoint(tmp_path_factory.mktemp("mtp") / "checkpoint", **TINY))


@pytest.fixture
def checkpoint(published: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(published, tmp_path / "checkpoint"))


@pytest.fixture
def ids_file(tmp_path: Path) -> Path:
    """`IDS` in a file, as JSON, not in their order."""
    path = tmp_path / "ids.json"
    path.write_text(json.dumps(IDS[::-1].tolist()))
    return path


def configure(checkpoint: Path, **changes: Any) -> Path:
    path = checkpoint / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return checkpoint


def test_a_head_in_the_checkpoint_drafts_unasked(published: Path, ids_file: Path, tmp_path: Path) -> None:
    sizes = ("--prefill-chunk", "16", "--kv-capacity", "96")
    for place, options, drafts in (
        ("by_itself", (), 320),
        ("asked_for", ("--draft", "mtp", "--draft-vocabulary", ids_file), len(IDS)),
        ("left_out", ("--no-mtp",), None),
    ):
        result = edgellm("build", published, tmp_path / place, *sizes, *options)
        assert result.exit_code == 0, result.output
        directory = EngineDirectory.open(tmp_path / place, verify=True)
        limits = directory.limits
        trees = limits.draft_top_k, limits.draft_steps, limits.verify_tree_size
        assert trees == ((0, 0, 0) if drafts is None else (4, 3, 16))
        assert (directory.draft is None) == (drafts is None)
        assert ("the model's own head for multi-token prediction" in result.stdout) == (drafts is not None)
        if directory.draft is not None:
            assert directory.draft.config.draft_vocab_size == drafts
            assert directory.config.feature_layers == (3,)
            usual = default_drafting(limits, "numpy")
            assert usual is not None and usual.adaptive and usual.plan(limits) == chain(3)
            choices = [plan.name for plan in candidate_plans(DraftingConfig.largest(limits), limits)]
            assert {chain(2).name, chain(3).name, tree(4, 3, 16).name} <= set(choices)
        assert (tmp_path / place / "draft").exists() == (drafts == len(IDS))
    shown = edgellm("info", tmp_path / "asked_for").stdout
    for words in ("multi-token prediction", f"{len(IDS)} tokens", "the last hidden state", "trees up to 4 wide"):
        assert words in shown


@pytest.mark.parametrize("tied", [False, True])
def test_the_draft_has_rows_of_the_models_head(
    tied: bool, make_checkpoint: Callable[..., Path], ids_file: Path, tmp_path: Path
) -> None:
    checkpoint = add_head(make_checkpoint(tmp_path / "tiny", **TINY | {"tie_word_embeddings": tied}))
    build_engine_directory(checkpoint, tmp_path / "engines", LIMITS, [], weights="link", draft_vocabulary=ids_file)
    directory = EngineDirectory.open(tmp_path / "engines")
    assert directory.draft is not None
    draft, specs = directory.draft.config, draft_weights(directory.draft.config)
    with directory.draft.checkpoint() as opened:
        weights = load_numpy_weights(opened, specs)
        assert np.array_equal(load_draft_to_target(opened, draft), IDS)
        assert opened.raw("lm_head.weight").dtype == np.float16
    tensors = load_file(checkpoint / "model.safetensors")
    whole = tensors["model.embed_tokens.weight" if tied else "lm_head.weight"]
    assert np.array_equal(weights["lm_head.weight"], whole[IDS].astype(np.float32))
    memory = plan_memory(directory.config, LIMITS, decoder_weights(directory.config), "float16", draft=draft)
    own = sum(values.size for name, values in tensors.items() if name.startswith("mtp."))
    assert memory.items["draft weights"] == 2 * (own + len(IDS) * 64)
    with Checkpoint.open(tmp_path / "engines") as again:  # the base's own is whole
        assert again.tensors["model.embed_tokens.weight"].shape == (320, 64)
        assert ("lm_head.weight" in again.tensors) != tied


def test_frequent_ids_are_the_lowest_and_those_of_formats(
    published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = published / "tokenizer.json"
    added = [each["id"] for each in json.loads(tokenizer.read_text())["added_tokens"]]
    assert frequent_ids(tokenizer, 32768, [319]) is None
    monkeypatch.setattr(shipped_draft, "DRAFT_VOCABULARY", 100)
    ids = frequent_ids(tokenizer, 320, [319])
    special = sorted({319, *added})
    assert ids is not None and len(ids) == 100 and set(special) <= set(ids.tolist())
    others = [each for each in range(320) if each not in special]
    assert ids.tolist() == sorted(special + others[: 100 - len(special)])
    build_engine_directory(published, tmp_path / "engines", LIMITS, [])
    directory = EngineDirectory.open(tmp_path / "engines")
    assert directory.draft is not None and directory.draft.config.draft_vocab_size == 100


def test_files_of_ids(tmp_path: Path) -> None:
    path = tmp_path / "ids"
    for text in ("[3, 1, 2]", "3\n1\n2\n", " 3 1\t2"):
        path.write_text(text)
        assert read_vocabulary(path, 4).tolist() == [1, 2, 3]
    for text, message in (
        ("", "has no ids: expected a JSON list of token ids, or one id a line"),
        ("[]", "has no ids"),
        ("[1, 2", "cannot be read"),
        ("1 two", "cannot be read"),
        ("[1, true]", "has True: expected ids of the model, 0 to 3"),
        ("[1.0]", "has 1.0: expected ids"),
        ("1 4", "has 4: expected ids of the model, 0 to 3"),
        ("[-1]", "has -1"),
        ("1 2 1", "has the id 1 twice"),
    ):
        path.write_text(text)
        with pytest.raises(BuildError, match=message):
            read_vocabulary(path, 4)
    with pytest.raises(BuildError, match="the draft's vocabulary"):
        read_vocabulary(tmp_path / "nothing", 4)


@pytest.mark.parametrize("name", HEADS)
def test_published_layouts_are_read(name: str, tmp_path: Path) -> None:
    """In shards, with the text model inside a multimodal one."""
    checkpoint = golden_checkpoint(name, tmp_path / "checkpoint")
    config = read_decoder_config(checkpoint)
    with Checkpoint.open(checkpoint) as opened:
        draft = read_mtp(opened, config)
        names = [part for spec in draft_weights(draft) for part, _ in spec.parts]
        assert sorted(names) == sorted(each for each in opened.tensors if each.startswith("mtp."))
    assert draft.decoder.rotary_dim == config.rotary_dim and draft.decoder.mrope_section == config.mrope_section
    assert draft.base_head == ("model.embed_tokens.weight" if name.endswith("tied") else "lm_head.weight")


HALF: dict[str, tuple[Callable[[dict[str, np.ndarray]], Any], str]] = {
    "no norm": (lambda t: t.pop("mtp.norm.weight"), r"1 problem.*missing: mtp.norm.weight \[64\]"),
    "fc alone": (
        lambda t: [t.pop(each) for each in list(t) if each.startswith("mtp.") and "fc.w" not in each],
        r"missing: mtp.pre_fc_norm_embedding.weight \[64\].*missing: mtp.layers.0.self_attn.q_proj.weight",
    ),
    "a second layer": (
        lambda t: t.update({"mtp.layers.1.input_layernorm.weight": np.ones(64, np.float16)}),
        r"unknown: mtp.layers.1.input_layernorm.weight \[64\]",
    ),
    "a head of its own": (
        lambda t: t.update({"mtp.shared_head.weight": np.ones((320, 64), np.float16)}),
        r"unknown: mtp.shared_head.weight",
    ),
    "a wrong fc": (
        lambda t: t.update({"mtp.fc.weight": np.ones((64, 64), np.float16)}),
        r"wrong shape: mtp.fc.weight is \[64, 64\], expected \[64, 128\]",
    ),
    "no gate": (
        lambda t: t.update({"mtp.layers.0.self_attn.q_proj.weight": np.ones((64, 64), np.float16)}),
        r"wrong shape: mtp.layers.0.self_attn.q_proj.weight",
    ),
}


@pytest.mark.parametrize("what", HALF)
def test_half_a_head_is_refused(what: str, checkpoint: Path, tmp_path: Path) -> None:
    edit, message = HALF[what]
    edit_tensors(checkpoint, edit)
    for draft in (None, "mtp"):
        with pytest.raises(CheckpointError, match=rf"(?s)multi-token prediction is not whole.*{message}.*--no-mtp"):
            build_engine_directory(checkpoint, tmp_path / "engines", LIMITS, [], draft=draft)
    assert not (tmp_path / "engines").exists()
    build_engine_directory(checkpoint, tmp_path / "engines", PLAIN, [])


def test_other_heads_are_refused_by_name(checkpoint: Path, tmp_path: Path) -> None:
    for changes, message in (
        ({"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers is 2, supported is a head of one layer"),
        ({"mtp_num_hidden_layers": 0}, "mtp_num_hidden_layers is 0"),
        ({"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings is true"),
    ):
        configure(checkpoint, **{"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False} | changes)
        with pytest.raises(UnsupportedModelError, match=f"{message}.*--no-mtp"):
            build_engine_directory(checkpoint, tmp_path / "engines", LIMITS, [])
        sizes = ("--prefill-chunk", "16", "--kv-capacity", "96")
        assert edgellm("build", checkpoint, tmp_path / "plain", "--no-mtp", "--force", *sizes).exit_code == 0


def test_nemotrons_heads_that_are_refused(tmp_path: Path) -> None:
    """Of other parts, or several; `transformers` leaves them out, too."""
    checkpoint = golden_checkpoint("nemotron_h_moe", tmp_path / "checkpoint")
    config = json.loads((checkpoint / "config.json").read_text())
    base = read_decoder_config(checkpoint)
    for changes, message in (
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers is 2, supported is a head of one layer"),
        (
            {"mtp_hybrid_override_pattern": "*EME"},
            'mtp_hybrid_override_pattern is "[*]EME", supported is a head of att',
        ),
        ({"mtp_layers_block_type": ["full_attention", "mlp"]}, "mtp_layers_block_type is .* and a mixture of experts"),
    ):
        (checkpoint / "config.json").write_text(json.dumps(config | changes))
        with Checkpoint.open(checkpoint) as opened, pytest.raises(UnsupportedModelError, match=f"{message}.*--no-mtp"):
            read_mtp(opened, base)
    (checkpoint / "config.json").write_text(json.dumps(config | {"mtp_hybrid_override_pattern": "*E"}))
    with Checkpoint.open(checkpoint) as opened:
        assert read_mtp(opened, base).decoder.nope_layers == (0,)
    (checkpoint / "model-00002-of-00002.safetensors").unlink()
    write_index(checkpoint)
    lost = "begins with mtp., though config.json has num_nextn_predict_layers 1: whoever saved it left them out"
    with Checkpoint.open(checkpoint) as opened, pytest.raises(CheckpointError, match=lost):
        read_mtp(opened, base)


def test_a_checkpoint_that_lost_its_head(checkpoint: Path, tmp_path: Path) -> None:
    """As transformers saves it: config.json still speaks of the head."""
    edit_tensors(checkpoint, lambda t: [t.pop(each) for each in list(t) if each.startswith("mtp.")])
    report = build_engine_directory(checkpoint, tmp_path / "engines", None, [])
    lost = "no tensor's name begins with mtp., though config.json has mtp_num_hidden_layers 1"
    assert report.draft is None and any(lost in note for note in report.notes)
    with pytest.raises(CheckpointError, match=f"{lost}.*Leave the draft out"):
        build_engine_directory(checkpoint, tmp_path / "other", None, [], draft="mtp")
    with pytest.raises(BuildError, match="there is no draft"):
        build_engine_directory(checkpoint, tmp_path / "other", LIMITS, [])


def test_a_dense_base_has_no_such_head(
    tiny_checkpoint: Path, published: Path, ids_file: Path, make_draft: Callable[..., Path], tmp_path: Path
) -> None:
    target = tmp_path / "engines"
    with pytest.raises(CheckpointError, match="no head for multi-token prediction: models of qwen3 are made without"):
        build_engine_directory(tiny_checkpoint, target, None, [], draft="mtp")
    with pytest.raises(BuildError, match="--draft-vocabulary is given, but no head"):
        build_engine_directory(tiny_checkpoint, target, None, [], draft_vocabulary=ids_file)
    # A whole hybrid model as the draft of a dense one, and an EAGLE head of a hybrid base of another size.
    with pytest.raises(UnsupportedModelError, match='model_type is "qwen3_5_text"'):
        build_engine_directory(tiny_checkpoint, target, None, [], draft=published)
    head = make_draft(tmp_path / "head", hidden_size=96, target_hidden_size=96)
    with pytest.raises(CheckpointError, match="hidden_size is 96, the base has 64"):
        build_engine_directory(tiny_checkpoint, target, None, [], draft=head)
    # A description that says so.
    build_engine_directory(tiny_checkpoint, target, PLAIN, [])
    build_engine_directory(published, tmp_path / "hybrid", LIMITS, [])
    hybrid, dense = (json.loads((path / "edgellm.json").read_text()) for path in (tmp_path / "hybrid", target))
    dense |= {"draft": hybrid["draft"], "limits": hybrid["limits"]}
    dense["config"]["feature_layers"] = hybrid["draft"]["config"]["feature_layers"]
    (target / "edgellm.json").write_text(json.dumps(dense))
    with pytest.raises(EngineDirectoryError, match="not the head for multi-token prediction of this model"):
        EngineDirectory.open(target)


def test_options_that_contradict_each_other(published: Path, ids_file: Path, tmp_path: Path) -> None:
    for options, message in (
        (("--no-mtp", "--draft", "mtp"), "--draft mtp is given beside --no-mtp"),
        (("--no-mtp", "--draft-vocabulary", ids_file), "--draft-vocabulary is given beside --no-mtp"),
        (("--no-mtp", "--draft-steps", "2"), "there is no draft"),
    ):
        result = edgellm("build", published, tmp_path / "engines", *options)
        assert result.exit_code != 0 and message in " ".join(f"{result.output}{result.exception}".split())


def test_a_changed_vocabulary_is_noticed(published: Path, ids_file: Path, tmp_path: Path) -> None:
    target = tmp_path / "engines"
    build_engine_directory(published, target, LIMITS, [], draft_vocabulary=ids_file)
    file = target / "draft" / "vocabulary.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    with pytest.raises(EngineDirectoryError, match=r"draft/vocabulary.safetensors: SHA-256"):
        EngineDirectory.open(target)
    file.unlink()
    with pytest.raises(EngineDirectoryError, match=r"draft/vocabulary.safetensors: missing"):
        EngineDirectory.open(target)
    values = json.loads((target / "edgellm.json").read_text())
    del values["draft"]["files"]["vocabulary.safetensors"]
    (target / "edgellm.json").write_text(json.dumps(values))
    with pytest.raises(EngineDirectoryError, match=r"its files are none, expected vocabulary.safetensors"):
        EngineDirectory.open(target)


def test_rows_that_the_head_does_not_have(published: Path, tmp_path: Path) -> None:
    save_file({"d2t": np.asarray([0, 400], np.int32)}, tmp_path / "ids.safetensors")
    with Checkpoint.open(published) as opened, pytest.raises(CheckpointError, match=r"names rows that lm_head.weight"):
        opened.use_shortlist(tmp_path / "ids.safetensors", "d2t", "lm_head.weight")


def test_a_checkpoint_is_described_where_it_is(checkpoint: Path) -> None:
    directory = describe_in_place(checkpoint, LIMITS)
    assert directory.draft is not None and directory.draft.config.generation == "mtp"
    assert describe_in_place(checkpoint, PLAIN).draft is None
    assert describe_in_place(checkpoint).limits.draft_steps == 3


def answers(place: Path) -> list[list[int]]:
    """Plain and drafted tokens of a directory on NumPy."""
    params, found = SamplingParams(max_tokens=12, ignore_eos=True), []
    with LLM(place, backend="numpy") as llm:
        for drafts in (False, True):
            llm.use_drafting(DraftingConfig(1, 3, 4, kind="chain") if drafts else None)
            response = llm.generate("what is on the table", params)
            assert (response.drafting.rounds > 0) == drafts
            found.append(response.token_ids)
    return found


def test_packed_weights(published: Path, ids_file: Path, tmp_path: Path) -> None:
    """The draft's rows are packed as the model's whole head would be, and its layer beside them."""
    target, format = tmp_path / "engines", head_format("int4", 64, "float16")
    kinds = {"head": "int4", "draft_weights": "int4"}
    build_engine_directory(published, target, LIMITS, [], draft_vocabulary=ids_file, **kinds)
    directory = EngineDirectory.open(target, verify=True)
    assert directory.draft is not None and directory.packed_names == {"base", "draft"}
    assert sorted(directory.draft.files) == ["config.json", "model.safetensors", "vocabulary.safetensors"]
    with directory.checkpoint() as base, directory.draft.checkpoint() as own:
        whole, rows = base.packed("lm_head.weight", (320, 64)), own.packed("lm_head.weight", (len(IDS), 64))
        assert whole is not None and rows is not None and format is not None
        assert np.array_equal(whole.values()[IDS], rows.values())
        layer, dense = own.packed("mtp.fc.weight", (64, 128)), load_file(published / "model.safetensors")
        assert layer is not None and layer.format == format
        expected = NUMPY.quantize_rows(dense["mtp.fc.weight"].astype(np.float32), format)
        assert np.array_equal(layer.values(), expected.values())
    plain, drafted = answers(target)
    assert plain == drafted
    assert edgellm("info", target, "--verify").exit_code == 0


def test_experts_of_a_head_are_packed_and_its_router_is_not(
    make_checkpoint: Callable[..., Path], ids_file: Path, tmp_path: Path
) -> None:
    source, target = add_head(make_checkpoint(tmp_path / "model", **TINY_NEMOTRON)), tmp_path / "engines"
    build_engine_directory(source, target, LIMITS, [], draft_vocabulary=ids_file, draft_weights="int4")
    directory = EngineDirectory.open(target, verify=True)
    assert directory.draft is not None
    with directory.draft.checkpoint() as own:
        parts = [part for spec in draft_weights(directory.draft.config) for part in spec.parts if len(part[1]) == 2]
        dense = [name for name, shape in parts if own.weight_format(name, shape) is None]
    assert dense == ["mtp.layers.1.mixer.gate.weight"] and sum(".experts." in name for name, _ in parts) == 2 * 8
    plain, drafted = answers(target)
    assert plain == drafted


def test_a_shortlist_stays_dense_beside_a_packed_head(published: Path, ids_file: Path, tmp_path: Path) -> None:
    """--head speaks of the model's alone."""
    target = tmp_path / "engines"
    build_engine_directory(published, target, LIMITS, [], head="int8", draft_vocabulary=ids_file)
    directory = EngineDirectory.open(target)
    assert directory.draft is not None and list(directory.draft.files) == ["vocabulary.safetensors"]
    assert directory.packed_names == {"base"}
    with directory.draft.checkpoint() as own:
        expected = load_file(published / "model.safetensors")["lm_head.weight"][IDS]
        assert np.array_equal(own.raw("lm_head.weight"), expected)
    plain, drafted = answers(target)
    assert plain == drafted


def pack(checkpoint: Path, beginning: str, ignored: list[str]) -> None:
    """Pack further linear layers of a checkpoint that `quantize_checkpoint` wrote, and ignore others than it does."""
    format = WeightFormat("int4", 32, False, "float16")
    file, index = checkpoint / "model-00001-of-00004.safetensors", checkpoint / "model.safetensors.index.json"
    tensors, stored = load_file(file), {}
    for name, values in tensors.items():
        if name.startswith(beginning) and values.ndim == 2:
            stored |= packed_tensors(name.removesuffix(".weight"), quantize_rows(values.astype(np.float32), format))
        else:
            stored[name] = StoredTensor("float16", values)
    write_tensors(file, stored)
    places = json.loads(index.read_text())["weight_map"]
    places = {name: place for name, place in places.items() if place != file.name} | dict.fromkeys(stored, file.name)
    index.write_text(json.dumps({"weight_map": places}))
    config = json.loads((checkpoint / "config.json").read_text())
    config["quantization_config"]["ignore"] = [*ignored, DENSE_PATTERN]
    (checkpoint / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("layers", ["dense", "dense, and nothing says so", "packed"])
def test_the_head_beside_packed_layers(layers: str, published: Path, ids_file: Path, tmp_path: Path) -> None:
    """Its layers dense, as `edgellm quantize` leaves them and they are asked to stay, or packed, too."""
    packed = tmp_path / "packed"
    quantize_checkpoint(published, packed, QuantizationOptions(4, 32, method="rtn"))
    if layers != "dense":
        pack(packed, "mtp." if layers == "packed" else "nothing", ["lm_head"])
    with Checkpoint.open(packed) as opened:
        assert opened.layout("model.layers.1.self_attn.o_proj.weight", (64, 64)) is not None
        assert (opened.layout("mtp.fc.weight", (64, 128)) is not None) == (layers == "packed")
    kept = {} if layers == "packed" else {"draft_weights": "as-published"}
    build_engine_directory(packed, tmp_path / "engines", LIMITS, [], draft_vocabulary=ids_file, **kept)
    directory = EngineDirectory.open(tmp_path / "engines")
    assert directory.draft is not None and list(directory.draft.files) == ["vocabulary.safetensors"]
    assert directory.packed_names == ({"base", "draft"} if layers == "packed" else {"base"})
    plain, drafted = answers(tmp_path / "engines")
    assert plain == drafted


def test_a_head_that_was_published_packed_is_read_whole(published: Path, ids_file: Path, tmp_path: Path) -> None:
    packed, target = tmp_path / "packed", tmp_path / "engines"
    quantize_checkpoint(published, packed, QuantizationOptions(4, 32, method="rtn"))
    pack(packed, "lm_head.", ["re:^mtp.*"])
    with pytest.raises(CheckpointError, match=r"lm_head.weight is packed as published.*Leave --draft-vocabulary out"):
        build_engine_directory(packed, target, LIMITS, [], draft_vocabulary=ids_file)
    build_engine_directory(packed, target, LIMITS, [])
    directory = EngineDirectory.open(target)
    assert directory.draft is not None and not directory.draft.config.has_head
    assert sorted(directory.draft.files) == ["config.json", "model.safetensors"], "its layer, as the model's layers are"
    plain, drafted = answers(target)
    assert plain == drafted


@pytest.mark.slow  # test_draft_build.py builds those of a head beside its base
def test_the_pair_builds_with_its_plans(published: Path, ids_file: Path, tmp_path: Path) -> None:
    """None, as kernels run every step; where TensorRT is to run them, those of all segments, and each engine of the
    draft as TensorRT would run it alone."""
    pytest.importorskip("tensorrt_rtx")
    limits = replace(LIMITS, prefill_chunk=80)
    report = build_engine_directory(
        published, tmp_path / "engines", limits, ["sm_86"], draft_vocabulary=ids_file, all_plans=True
    )
    directory = EngineDirectory.open(tmp_path / "engines", verify=True)
    assert planned_shapes(directory.models, limits, directory.dtype, "sm_86") == []
    every = planned_shapes(directory.models, limits, directory.dtype, "sm_86", needless=True)
    assert {plan.shape for plan in report.plans} == set(every)
    assert {shape.model for shape in every} == {"base", "draft"}
    config = directory.model_config("draft")
    for shape in LIMITS.engine_shapes():
        if shape.model == "draft":
            choice, _ = kernel_choice(config, shape, "float16", 99 << 10)
            assert choice is not None, shape.name
    for shape in LIMITS.engine_shapes():
        if shape.model == "draft":
            assert len(build_plan(config, shape, "float16", "composed", "sm_86")) > 1000
