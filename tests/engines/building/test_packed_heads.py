"""Heads that are packed when an engine directory is built: their answers, files, snapshots, and what is refused."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_tensors import read_tensor
from multimodal_engines import IMAGE_ROWS
from multimodal_engines import LIMITS as IMAGE_LIMITS
from packed_checkpoints import write_packed
from safetensors.numpy import load_file, save_file
from synthetic_images import synthetic_image
from tiny_multimodal import FAMILIES
from typer.testing import CliRunner

from edgellm import LLM, Request, SamplingParams
from edgellm.commands.app import create_app
from edgellm.drafting.config import DraftingConfig
from edgellm.engines.backends.device_layouts import model_layouts, packed_memory
from edgellm.engines.building import checks
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.checkpoints.weight_files import HEAD_FILE
from edgellm.engines.checkpoints.weights import load_numpy_weights
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.errors import BuildError, CheckpointError, EngineDirectoryError
from edgellm.engines.families import decoder_config
from edgellm.engines.formats.digests import hash_file
from edgellm.engines.model.decoder import decoder_weights, head_format, head_weight_name
from edgellm.engines.model.draft_decoder import draft_weights
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.model.memory_plan import plan_memory
from edgellm.engines.quantizer import heads
from edgellm.engines.quantizer.written_layout import write_tensors
from edgellm.errors import SnapshotError
from edgellm.kernels.gpu import GPU

MODEL, EMBEDDING, HEAD = "model.safetensors", "model.embed_tokens.weight", "lm_head.weight"
LIMITS = EngineLimits(2, 16, 96, 4, 3, 12)
DRAFTING = DraftingConfig(draft_top_k=4, draft_steps=3, verify_tree_size=12, adaptive=False)
SYSTEM = "Be brief."
CHATS = [[{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}] for text in ("hello", "why?")]
KINDS = [("int8", "as-published"), ("int4", "as-published"), ("int8", "head"), ("int4", "head")]


def params(number: int) -> SamplingParams:
    """Greedy and drawn in turn."""
    return SamplingParams(temperature=0.9 * (number % 2), top_k=20, seed=number, max_tokens=16, ignore_eos=True)


def answers(directory: Path, drafting: DraftingConfig | None) -> list[tuple[int, ...]]:
    with LLM(directory, backend="numpy", drafting=drafting) as llm:
        ids = [llm.tokenizer.encode_chat(chat) for chat in CHATS]
        batch = llm.handle([Request(each, None, params(number)) for number, each in enumerate(ids)])
        return [response.token_ids for response in batch]


def build(source: Path, target: Path, draft: Path | None = None, **options: Any) -> EngineDirectory:
    limits = LIMITS if draft is not None else EngineLimits(2, 16, 96)
    build_engine_directory(source, target, limits, [], draft=draft, **options)
    return EngineDirectory.open(target, verify=True)


def values_of(checkpoint: Checkpoint, shape: tuple[int, int]) -> np.ndarray:
    """What the packed head of a checkpoint stands for, float32."""
    with checkpoint:
        packed = checkpoint.packed(HEAD, shape)
        assert packed is not None
        return packed.values()


@pytest.mark.parametrize(
    ("tied", "head", "embedding"),
    [(True, "int4", "head"), (True, "int8", "as-published"), (False, "int4", "as-published")],
)
def test_answers_are_those_of_a_dense_head_of_the_same_values(
    tied: bool, head: str, embedding: str, make_checkpoint: Callable[..., Path], tiny_draft: Path, tmp_path: Path
) -> None:
    source = make_checkpoint(tmp_path / "source", 4, tie_word_embeddings=tied)
    before = (source / MODEL).read_bytes()
    kinds = {"head": head, "draft_weights": head}
    directory = build(source, tmp_path / "packed", tiny_draft, embedding=embedding, **kinds)
    draft = directory.draft
    assert draft is not None and head == directory.config.head
    assert (directory.path / MODEL).read_bytes() == before == (source / MODEL).read_bytes()
    expected = head_format(head, 64, "float16")
    with directory.checkpoint() as checkpoint:
        assert checkpoint.weight_format(HEAD, (320, 64)) == expected

    twin, tensors = tmp_path / "twin", load_file(source / MODEL)
    shutil.copytree(source, twin)
    tensors[HEAD] = values_of(directory.checkpoint(), (320, 64)).astype(np.float16)
    if embedding == "head":
        tensors[EMBEDDING] = tensors[HEAD]
    save_file(tensors, twin / MODEL)
    config = json.loads((twin / "config.json").read_text())
    (twin / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    twin_draft = Path(shutil.copytree(tiny_draft, tmp_path / "twin_draft"))
    own = load_file(twin_draft / MODEL)
    with draft.checkpoint() as checkpoint:  # each weight of which is packed as the base's head
        for name, shape in ((name, values.shape) for name, values in own.items() if values.ndim == 2):
            packed = checkpoint.packed(name, shape)
            assert packed is not None and packed.format == head_format(head, 64 if head == "int8" else 32, "float16")
            own[name] = packed.values().astype(np.float16)
    save_file(own, twin_draft / MODEL)
    build(twin, tmp_path / "twin_engines", twin_draft)
    plain = answers(tmp_path / "twin_engines", None)
    assert len(set(plain)) == len(plain)
    assert answers(directory.path, None) == plain
    assert answers(directory.path, DRAFTING) == plain == answers(tmp_path / "twin_engines", DRAFTING)


def test_a_draft_without_a_head_of_its_own_shares_the_packed_one(
    make_checkpoint: Callable[..., Path], make_draft: Callable[..., Path], tmp_path: Path
) -> None:
    source = make_checkpoint(tmp_path / "source", 5)
    draft = make_draft(tmp_path / "draft", draft_vocab_size=320)
    tensors = load_file(draft / MODEL)
    del tensors[HEAD], tensors["d2t"], tensors["t2d"]
    save_file(tensors, draft / MODEL)
    directory = build(source, tmp_path / "engines", draft, head="int8")
    assert directory.draft is not None and HEAD_FILE not in directory.draft.files
    assert directory.draft.config.base_head == HEAD and directory.packed_names == {"base", "draft"}
    assert answers(directory.path, DRAFTING) == answers(directory.path, None)


@pytest.mark.parametrize("family", ["qwen3_5", "llava"])
def test_heads_of_models_that_take_images(
    family: str, make_checkpoint: Callable[..., Path], make_draft: Callable[..., Path], tmp_path: Path
) -> None:
    source = make_checkpoint(tmp_path / "source", 3, **FAMILIES[family])
    limits = replace(IMAGE_LIMITS, image_rows=IMAGE_ROWS.get(family, (64,)))
    build_engine_directory(source, tmp_path / "engines", limits, [], draft=make_draft(tmp_path / "draft"), head="int8")
    directory = EngineDirectory.open(tmp_path / "engines", verify=True)
    with Checkpoint.open(source) as checkpoint:
        config = decoder_config(checkpoint.config, checkpoint.generation_config)
        published = read_tensor(checkpoint, head_weight_name(config), "float32")
    difference = values_of(directory.checkpoint(), published.shape) - published
    assert 0 < np.linalg.norm(difference) < 0.01 * np.linalg.norm(published)
    content = [{"type": "image", "image": synthetic_image(24, 20)}, {"type": "text", "text": "What is it?"}]
    found = []
    for drafting in (None, DRAFTING):
        with LLM(directory.path, backend="numpy", drafting=drafting) as llm:
            found.append(llm.chat([{"role": "user", "content": content}], params(0)).token_ids)
    assert found[0] == found[1] and len(found[0]) == 16


def test_a_head_is_as_near_as_its_bits_allow(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", 6)
    published = load_file(source / MODEL)[EMBEDDING].astype(np.float32)
    errors = {}
    for head, step in (("int8", 127), ("int4", 7)):
        values = values_of(build(source, tmp_path / head, head=head).checkpoint(), published.shape)
        errors[head] = np.square(values - published).mean()
        largest = np.abs(published).max(1, keepdims=True) / step
        assert errors[head] < (largest**2).mean() / 12  # of steps of that size, evenly rounded
    assert 0 < errors["int8"] < errors["int4"] / 50


def test_the_packed_head_is_described_and_guarded(tiny_checkpoint: Path, tiny_draft: Path, tmp_path: Path) -> None:
    directory = build(tiny_checkpoint, tmp_path / "engines", tiny_draft, head="int8")
    assert directory.files[HEAD_FILE] == hash_file(directory.path / HEAD_FILE)
    other = build(tiny_checkpoint, tmp_path / "other", tiny_draft, head="int4", draft_weights="int4")
    for name in (HEAD_FILE, f"draft/{MODEL}"):
        copy = Path(shutil.copytree(directory.path, tmp_path / "copy"))
        shutil.copy(other.path / name, copy / name)
        with pytest.raises(EngineDirectoryError, match=rf"{name}: [\d,]+ bytes, expected"):
            EngineDirectory.open(copy)
        (copy / name).unlink()
        with pytest.raises(EngineDirectoryError, match=f"{name}: missing"):
            EngineDirectory.open(copy)
        shutil.rmtree(copy)
    flipped = bytearray((directory.path / HEAD_FILE).read_bytes())
    flipped[-1] ^= 1
    (directory.path / HEAD_FILE).write_bytes(flipped)
    with pytest.raises(EngineDirectoryError, match=rf"{HEAD_FILE}: SHA-256"):
        EngineDirectory.open(directory.path)


@pytest.mark.parametrize(
    ("section", "changes", "message"),
    [
        ("config", {"head": "int4"}, r"tensor|wrong shape"),
        ("config", {"head": "int2"}, r"'head' is 'int2', expected one of as-published, int8, int4"),
        ("config", {"head": "as-published"}, "'head' is 'as-published', but the file head.safetensors is described"),
        ("config", {"hidden_size": 72, "head": "int4"}, "rows of 72 columns are no whole groups of 128, 64, 32"),
        ("draft", {"head": "int8"}, "unknown keys 'head', expected generation"),
        ("config", {"tie_word_embeddings": False, "embeds_by_head": True}, "'embeds_by_head' is true, expected"),
    ],
)
def test_a_description_of_another_head_is_refused(
    section: str, changes: dict[str, Any], message: str, tiny_checkpoint: Path, tiny_draft: Path, tmp_path: Path
) -> None:
    directory = build(tiny_checkpoint, tmp_path / "engines", tiny_draft, head="int8")
    file = directory.path / "edgellm.json"
    values = json.loads(file.read_text())
    (values["config"] if section == "config" else values["draft"]["config"]).update(changes)
    file.write_text(json.dumps(values))
    with pytest.raises((EngineDirectoryError, CheckpointError), match=message):
        answers(directory.path, None)


def test_files_without_a_packed_head_are_as_they_were(tiny_checkpoint: Path, tmp_path: Path) -> None:
    directory = build(tiny_checkpoint, tmp_path / "engines")
    values = json.loads((directory.path / "edgellm.json").read_text())
    assert not {"head", "embeds_by_head"} & values["config"].keys() and HEAD_FILE not in values["files"]
    (directory.path / HEAD_FILE).write_bytes(b"nobody reads it")
    EngineDirectory.open(directory.path)


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, {"head": "int2"}, "--head is 'int2': expected one of as-published, int8, int4"),
        ({}, {"head": "int8", "embedding": "none"}, "--embedding is 'none': expected one of auto, as-published, head"),
        ({"hidden_size": 80}, {"head": "int4"}, "rows of 80 columns are no whole groups of 128, 64, 32: take"),
        ({}, {"embedding": "head"}, "--embedding is head, but the head is as published"),
        ({"tie_word_embeddings": False}, {"head": "int8", "embedding": "head"}, "is not the head's table"),
    ],
)
def test_heads_that_cannot_be_are_refused(
    changes: dict[str, Any], options: dict[str, str], message: str, make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    source = make_checkpoint(tmp_path / "source", **changes)
    with pytest.raises(BuildError, match=message):
        build(source, tmp_path / "engines", **options)
    assert not (tmp_path / "engines").exists()


def test_a_head_that_is_packed_already_stays(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", tie_word_embeddings=False)
    packed, _ = write_packed(source, tmp_path / "packed", tmp_path / "twin")
    tensors, config = load_file(packed / MODEL), json.loads((packed / "config.json").read_text())
    made = build(source, tmp_path / "made", head="int8")
    with made.checkpoint() as checkpoint:
        for ending in ("packed", "shape"):
            info = checkpoint.info(f"{HEAD}_{ending}")
            dtype = np.int32 if ending == "packed" else np.int64
            tensors[f"{HEAD}_{ending}"] = checkpoint.raw_bytes(info.name).view(dtype).reshape(info.shape).copy()
        tensors[f"{HEAD}_scale"] = checkpoint.raw(f"{HEAD}_scale").copy()
    del tensors[HEAD]
    save_file(tensors, packed / MODEL)
    groups = config["quantization_config"]["config_groups"]
    groups["rows"]["targets"].append("lm_head")
    config["quantization_config"]["ignore"] = []
    (packed / "config.json").write_text(json.dumps(config))
    with pytest.raises(BuildError, match=r"has a packed head already \(int8, whole rows\): leave --head out"):
        build(packed, tmp_path / "engines", head="int4")
    assert answers(build(packed, tmp_path / "engines").path, None)


@pytest.mark.parametrize(
    ("value", "dtype", "message"),
    [(np.nan, "float16", r"nan at \[7, 3\]"), (1e6, "float16", "too large for float16"), (1e6, "bfloat16", None)],
)
def test_values_that_no_head_has_are_refused_by_name(
    value: float, dtype: str, message: str | None, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    source = Path(shutil.copytree(tiny_checkpoint, tmp_path / "source"))
    tensors = {name: values.astype(np.float32) for name, values in load_file(source / MODEL).items()}
    tensors[EMBEDDING][7, 3] = value
    save_file(tensors, source / MODEL)
    if message is None:
        build(source, tmp_path / "engines", head="int8", dtype=dtype)
        return
    with pytest.raises(CheckpointError, match=rf"'{EMBEDDING}'.*{message}|{message}.*'{EMBEDDING}'|{message}"):
        build(source, tmp_path / "engines", head="int8", dtype=dtype)
    assert list(tmp_path.iterdir()) == [source]


def test_a_large_head_is_packed_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, columns = 4096, 512
    random = np.random.default_rng(0)
    (tmp_path / "config.json").write_text("{}")
    save_file({EMBEDDING: random.standard_normal((rows, columns)).astype(np.float16)}, tmp_path / MODEL)
    monkeypatch.setattr(heads, "_PIECE", 1 << 14)
    done: list[int] = []
    format = head_format("int4", columns, "float16")
    assert format is not None
    with Checkpoint.open(tmp_path) as checkpoint:
        tracemalloc.start()
        write_tensors(tmp_path / HEAD_FILE, heads.packed_head(checkpoint, EMBEDDING, format, done.append))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert sum(done) == rows and len(done) == rows * columns >> 14
    assert peak < rows * columns / 2  # the packed head alone has as many bytes
    with Checkpoint.open(tmp_path, format) as checkpoint:
        packed = checkpoint.packed(HEAD, (rows, columns))
        assert packed is not None
        published = checkpoint.raw(EMBEDDING).astype(np.float32)
        assert np.square(packed.values() - published).mean() < 0.02


def test_snapshots_are_shared_where_no_row_depends_on_the_head(
    tiny_checkpoint: Path, tiny_draft: Path, tmp_path: Path
) -> None:
    kinds = {"published": {}, "int8": {"head": "int8"}, "embeds": {"head": "int8", "embedding": "head"}}
    paths = {name: build(tiny_checkpoint, tmp_path / name, tiny_draft, **each).path for name, each in kinds.items()}
    for maker in ("published", "int8"):
        file = tmp_path / f"{maker}.snapshot"
        with LLM(paths[maker], backend="numpy", drafting=DRAFTING) as llm:
            kept = llm.cache_system_prompt(SYSTEM, save=file)
        for user in ("published", "int8"):
            with LLM(paths[user], backend="numpy", drafting=DRAFTING, snapshots=[file]) as llm:
                found = llm.chat(CHATS[0], params(0))
                assert found.usage.reused_tokens >= kept.tokens - 1
            assert found.token_ids == answers(paths[user], None)[0]
        with LLM(paths["embeds"], backend="numpy", drafting=DRAFTING) as llm, pytest.raises(SnapshotError):
            llm.load_snapshot(file)


def test_memory_and_info_count_the_packed_head(tiny_checkpoint: Path, tiny_draft: Path, tmp_path: Path) -> None:
    # Of a row: kernels have columns in blocks of 128, with a scale of int8, or two of int4.
    plans, bytes_of = {}, {"as-published": 2 * 64, "int8": 128 + 2, "int4": 64 + 4}
    for head, embedding in [("as-published", "auto"), *KINDS]:
        directory = build(tiny_checkpoint, tmp_path / f"{head}-{embedding}", tiny_draft, head=head, embedding=embedding)
        config, draft = directory.config, directory.draft
        assert draft is not None
        layouts = model_layouts(directory.models, directory.checkpoints, "float16")
        known = packed_memory(directory.models, layouts, "float16")
        plan = plan_memory(config, LIMITS, decoder_weights(config), "float16", known, draft=draft.config)
        plans[head, embedding] = plan.items["weights"], plan.items["draft weights"]
        said = CliRunner().invoke(create_app(), ["info", str(directory.path)])
        assert said.exit_code == 0, said.output
        words = {"int8": "packed: int8, whole rows, 0.0 MiB", "int4": "packed: int4, groups of 64, 0.0 MiB"}
        for kind, text in words.items():
            assert (text in said.output) == (kind == head), said.output
        assert ("tokens are looked up in it" in said.output) == (embedding == "head")
        assert "model       qwen3, 0.1 M parameters" in said.output
        facts = json.loads(CliRunner().invoke(create_app(), ["info", str(directory.path), "--json"]).stdout)
        assert facts["memory"]["weights"] == plan.items["weights"]
    table, base, draft_weights = 320 * 2 * 64, *plans["as-published", "auto"]
    for (head, embedding), (weights, of_draft) in plans.items():
        packed = 0 if head == "as-published" else 320 * bytes_of[head]
        assert weights == base + packed - (table if embedding == "head" else 0)
        assert of_draft == draft_weights


@pytest.mark.parametrize(("memory", "embeds"), [(1 << 18, True), (1 << 40, False)])
def test_the_table_is_left_out_where_a_gpu_has_no_room(
    memory: int, embeds: bool, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = GPU("small", "sm_87", (13, 0), memory, "sm_87", 8, 163 << 10, False, False)
    monkeypatch.setattr(checks, "find_gpu", lambda: gpu)
    assert build(tiny_checkpoint, tmp_path / "auto", head="int8").config.embeds_by_head == embeds
    asked = build(tiny_checkpoint, tmp_path / "kept", head="int8", embedding="as-published")
    assert not asked.config.embeds_by_head
    assert not build(tiny_checkpoint, tmp_path / "dense").config.embeds_by_head


def test_an_eagle_head_is_quantized_and_drafts(tiny_checkpoint: Path, tiny_draft: Path, tmp_path: Path) -> None:
    packed = tmp_path / "packed"
    for options, message in ((["--group-size", 64], "mlp.down_proj (96)"), (["--method", "awq"], "Take --method rtn")):
        refused = CliRunner().invoke(create_app(), ["quantize", str(tiny_draft), str(packed), *map(str, options)])
        assert refused.exit_code == 1 and not packed.exists()
        assert message in str(refused.exception) + refused.output
    said = CliRunner().invoke(create_app(), ["quantize", str(tiny_draft), str(packed), "--group-size", "32"])
    assert said.exit_code == 0, said.output
    assert "int4, groups of 32, symmetric" in said.output and "rtn" in said.output
    with pytest.raises(BuildError, match=r"packed is packed already \(int4, groups of 32\): leave --draft-weights out"):
        build(tiny_checkpoint, tmp_path / "engines", packed, draft_weights="int8")
    directory = build(tiny_checkpoint, tmp_path / "engines", packed, head="int8")
    draft = directory.draft
    assert draft is not None and (draft.path / MODEL).read_bytes() == (packed / MODEL).read_bytes()
    with draft.checkpoint() as checkpoint, Checkpoint.open(tiny_draft) as published:
        assert checkpoint.raw_bytes("d2t").tobytes() == published.raw_bytes("d2t").tobytes()
        weights = load_numpy_weights(checkpoint, draft_weights(draft.config))
        dense = load_numpy_weights(published, draft_weights(draft.config))
    for name, values in weights.items():
        difference = np.linalg.norm(values - dense[name]) / np.linalg.norm(dense[name])
        assert difference == 0 if values.ndim == 1 or name == HEAD else 0 < difference < 0.12, name
    assert answers(directory.path, DRAFTING) == answers(directory.path, None)
