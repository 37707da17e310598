"""Drafts that a build packs: in which format, with which values, and what opens, prepares and describes them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_files import read_tensors
from gguf_encoders import tokenizer_keys, write_head
from gguf_models import random_blocks, write_model
from gguf_writing import Tensor
from mtp_checkpoints import TINY, add_head
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from edgellm import LLM, SamplingParams
from edgellm.commands.app import create_app
from edgellm.drafting.config import DraftingConfig
from edgellm.engines.backends.device_layouts import model_layouts
from edgellm.engines.backends.executors import SHARED_MEMORY
from edgellm.engines.backends.steps.table import kernel_choice
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.building.draft_weights import chosen_format
from edgellm.engines.building.needed_kernels import AbsentBackend, WeightLayouts
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.errors import BuildError, CheckpointError
from edgellm.engines.families.programs import model_weights
from edgellm.engines.model.config import DraftConfig
from edgellm.engines.model.draft_decoder import mtp_draft
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.quantizer.quantizer import QuantizationOptions, quantize_checkpoint
from edgellm.errors import SnapshotError
from edgellm.kernels.gpu import absent_gpu
from edgellm.kernels.quantization.device_layout import DeviceLayout
from edgellm.kernels.quantization.packed_weight import WeightFormat
from edgellm.opened_model import SHIPPED_MODEL

MODEL, HEAD = "model.safetensors", "lm_head.weight"
LIMITS = EngineLimits(1, 16, 96, 4, 3, 12)
DRAFTING = DraftingConfig(draft_top_k=4, draft_steps=3, verify_tree_size=12, adaptive=False)
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "why?"}]
INT8, INT4 = WeightFormat("int8", None, False, "float16"), WeightFormat("int4", 32, False, "float16")


def build(source: Path, target: Path, draft: Path | str | None, **options: Any) -> EngineDirectory:
    build_engine_directory(source, target, LIMITS, [], "float16", draft=draft, **options)
    return EngineDirectory.open(target, verify=True)


def formats(directory: EngineDirectory) -> set[WeightFormat | None]:
    """Of the draft's linear layers and its own head."""
    assert directory.draft is not None
    parts = [part for spec in model_weights(directory.draft.config) for part in spec.parts]
    with directory.draft.checkpoint() as checkpoint:
        return {checkpoint.weight_format(*part) for part in parts if len(part[1]) == 2}


@pytest.mark.parametrize("base", [("int8", None), ("fp8", None), ("int4", 64), ("fp4", 16), None], ids=str)
def test_auto_is_8_bits_beside_packed_layers(base: tuple[str, int | None] | None) -> None:
    layers = None if base is None else WeightFormat(base[0], base[1], False, "float16")
    assert chosen_format("auto", layers, 256, "float16") == (None if base is None else INT8)
    assert chosen_format("as-published", layers, 256, "float16") is None
    assert chosen_format("int8", layers, 256, "float16") == INT8
    group = base[1] if base == ("int4", 64) else 128
    assert chosen_format("int4", layers, 256, "float16") == replace(INT4, group=group)


def test_rows_that_no_group_divides() -> None:
    wide = WeightFormat("int4", 128, False, "float16")
    assert chosen_format("int4", wide, 96, "float16") == INT4
    assert chosen_format("auto", wide, 48, "float16") == INT8
    with pytest.raises(BuildError, match=r"--draft-weights is int4, but rows of 48 columns are no .*: take int8"):
        chosen_format("int4", None, 48, "float16")


@pytest.mark.parametrize(("bits", "group"), [(4, 32), (8, None)])
def test_values_are_those_that_quantize_makes(
    bits: int, group: int | None, tiny_checkpoint: Path, tiny_draft: Path, tmp_path: Path
) -> None:
    options = QuantizationOptions(bits, group, method="rtn")
    for source, name in ((tiny_checkpoint, "base"), (tiny_draft, "draft")):
        quantize_checkpoint(source, tmp_path / name, options)
    kind = f"int{bits}"
    directory = build(tmp_path / "base", tmp_path / "engines", tiny_draft, draft_weights=kind)
    assert formats(directory) == {INT4 if bits == 4 else INT8}
    assert directory.packed_names == {"base", "draft"}
    asked = build(tiny_checkpoint, tmp_path / "asked", tiny_draft, draft_weights=kind, weights="link")
    assert asked.packed_names == {"draft"} and asked.draft is not None and directory.draft is not None
    assert asked.draft.files == directory.draft.files and not (asked.draft.path / MODEL).is_symlink()
    found, expected = (read_tensors(folder / MODEL) for folder in (asked.draft.path, tmp_path / "draft"))
    of_layers = {name for name in expected if "." in name and not name.startswith("lm_head")}
    assert of_layers == {name for name in found if "." in name and not name.startswith("lm_head")}
    assert {name: found[name] for name in of_layers} == {name: expected[name] for name in of_layers}
    with asked.draft.checkpoint() as checkpoint:
        head, published = checkpoint.packed(HEAD, (200, 64)), load_file(tiny_draft / MODEL)[HEAD].astype(np.float32)
        assert head is not None
        difference = np.linalg.norm(head.values() - published) / np.linalg.norm(published)
        assert 0 < difference < (0.12 if bits == 4 else 0.01)
    dense = build(tmp_path / "base", tmp_path / "dense", tiny_draft, draft_weights="as-published")
    assert formats(dense) == {None} and dense.draft is not None
    assert (dense.draft.path / MODEL).read_bytes() == (tiny_draft / MODEL).read_bytes()
    assert formats(build(tiny_checkpoint, tmp_path / "both", tiny_draft)) == {None}, "beside a dense base"


def test_a_draft_that_was_published_packed_stays(tiny_checkpoint: Path, tiny_draft: Path, tmp_path: Path) -> None:
    quantize_checkpoint(tiny_checkpoint, tmp_path / "base", QuantizationOptions(4, 64, method="rtn"))
    quantize_checkpoint(tiny_draft, tmp_path / "draft", QuantizationOptions(8, None, method="rtn"))
    directory = build(tmp_path / "base", tmp_path / "engines", tmp_path / "draft")
    assert directory.draft is not None and formats(directory) == {INT8, None}
    assert (directory.draft.path / MODEL).read_bytes() == (tmp_path / "draft" / MODEL).read_bytes()


def test_the_packed_draft_of_a_directory_is_a_checkpoint(
    tiny_checkpoint: Path, tiny_draft: Path, tmp_path: Path
) -> None:
    first = build(tiny_checkpoint, tmp_path / "first", tiny_draft, draft_weights="int4")
    again = build(first.path, tmp_path / "again", first.path / "draft")
    assert first.draft is not None and again.draft is not None and again.draft.files == first.draft.files


def test_nothing_is_left_of_what_cannot_be_packed(tiny_checkpoint: Path, tiny_draft: Path, tmp_path: Path) -> None:
    draft = Path(shutil.copytree(tiny_draft, tmp_path / "draft"))
    tensors = load_file(draft / MODEL)
    tensors["midlayer.mlp.up_proj.weight"][3, 5] = np.nan
    save_file(tensors, draft / MODEL)
    with pytest.raises(CheckpointError, match=r"draft/model.safetensors: tensor 'midlayer.mlp.up_proj.weight' .*nan"):
        build(tiny_checkpoint, tmp_path / "new" / "folder" / "engines", draft, draft_weights="int8")
    tensors = load_file(tiny_draft / MODEL)
    tensors["norm.weight"][3] = np.inf  # which is not packed: the check of what was built finds it
    save_file(tensors, draft / MODEL)
    said = CliRunner().invoke(
        create_app(),
        ["build", str(tiny_checkpoint), str(tmp_path / "engines"), "--draft", str(draft), "--draft-weights", "int8"],
    )
    assert said.exit_code == 1
    message = str(said.exception) + said.output
    assert str(draft / MODEL) in message and "'norm.weight'" in message, message
    with pytest.raises(BuildError, match="--draft-weights is int4, but there is no draft: name one with --draft"):
        build_engine_directory(tiny_checkpoint, tmp_path / "engines", None, [], draft_weights="int4")
    with pytest.raises(BuildError, match="--draft-weights is 'int2': expected one of auto, as-published, int8, int4"):
        build(tiny_checkpoint, tmp_path / "engines", tiny_draft, draft_weights="int2")
    assert list(tmp_path.iterdir()) == [draft]


def test_options_of_the_build_are_taken_where_files_are_opened(
    tiny_checkpoint: Path, tiny_draft: Path, tmp_path: Path
) -> None:
    """A head in GGUF of 16 bits beside a model of 8: packed as that is, or otherwise in a directory of its own."""
    random = np.random.default_rng(3)

    def packed(name: str, values: np.ndarray) -> Tensor | None:
        return random_blocks("q8_0", values.shape, random) if name.startswith("blk.") and values.ndim == 2 else None

    keys = tokenizer_keys(tiny_checkpoint)
    file = write_model(tiny_checkpoint, tmp_path / "base.gguf", keys, packed)
    head = write_head(tiny_draft, tiny_checkpoint, tmp_path / "head.gguf")
    found, chosen = [], {"auto": INT8, "int4": INT4}
    for kind, expected in chosen.items():
        more = {} if kind == "auto" else {"draft_weights": kind}
        with LLM(file, backend="numpy", build={"kv_capacity": 96, "draft": str(head), **more}) as llm:
            assert formats(llm.directory) == {expected}
            assert ("draft_weights=int4" in llm.directory.path.name) == (kind == "int4")
            for drafting in (None, DRAFTING):
                llm.use_drafting(drafting)
                found.append(llm.generate("why?", SamplingParams(max_tokens=12, ignore_eos=True)).token_ids)
    assert len(set(found)) == 1 and len(found[0]) == 12
    flags = ["--draft-checkpoint", str(head), "--kv-capacity", "96", "--draft-weights", "int4", "--max-tokens", "1"]
    said = CliRunner().invoke(create_app(), ["generate", "-m", str(file), *flags, "--backend", "numpy", "why?"])
    assert said.exit_code == 0, said.output
    of_file = llm.directory.path.name.partition(",")[0]
    assert len({*llm.directory.path.parent.glob(f"{of_file},*/edgellm.json")}) == len(chosen)


def test_info_memory_and_snapshots_know_the_packed_draft(
    tiny_checkpoint: Path, tiny_draft: Path, tmp_path: Path
) -> None:
    kinds = ("as-published", "int8", "int4")
    paths = {kind: build(tiny_checkpoint, tmp_path / kind, tiny_draft, draft_weights=kind).path for kind in kinds}
    memory = {}
    for kind, path in paths.items():
        facts = json.loads(CliRunner().invoke(create_app(), ["info", str(path), "--json", "--verify"]).stdout)
        assert facts["differences"] == [] and facts["heads"] == {}
        memory[kind] = facts["memory"]["draft weights"]
        words = {"int8": "pack-quantized: int8, whole rows", "int4": "pack-quantized: int4, groups of 32"}
        stored = facts["packed"]["draft"]["stored"] if kind != "as-published" else {}
        assert (words[kind] in stored) if stored else not facts["packed"]
        assert facts["draft"]["weights"] == {MODEL: (path / "draft" / MODEL).stat().st_size}
    said = CliRunner().invoke(create_app(), ["doctor", "-m", str(paths["int4"])])
    assert said.exit_code == 0 and "; pack-quantized: int4, groups of 32; dense; here " in said.output, said.output
    assert memory["int4"] < memory["int8"] < memory["as-published"]
    file = tmp_path / "system.safetensors"
    with LLM(paths["int8"], backend="numpy", drafting=DRAFTING) as llm:
        kept = llm.cache_system_prompt("Be brief.", save=file)
    with LLM(paths["int8"], backend="numpy", drafting=DRAFTING, snapshots=[file]) as llm:
        assert llm.chat(CHAT, SamplingParams(max_tokens=4)).usage.reused_tokens >= kept.tokens - 1
    for other in ("as-published", "int4"):
        with LLM(paths[other], backend="numpy", drafting=DRAFTING) as llm, pytest.raises(SnapshotError, match="draft"):
            llm.load_snapshot(file)


#: Drafts of published sizes: EAGLE-3's of Llama-3.1-8B, EAGLE-1's of Llama-2-7B, the head of Qwen3.5-4B.
EAGLE3 = EngineDirectory.read(SHIPPED_MODEL).models["draft"]
assert isinstance(EAGLE3, DraftConfig)
_WIDE = replace(EAGLE3.decoder, hidden_size=4096, intermediate_size=14336, num_heads=32, num_kv_heads=8, head_dim=128)
_WIDE = replace(_WIDE, rotary_dim=128, vocab_size=128256)
_GATED = replace(_WIDE, hidden_size=2560, intermediate_size=9216, num_heads=16, num_kv_heads=4, head_dim=256)
_GATED = replace(_GATED, rotary_dim=64, attention_gate=True, qk_norm=True, norm_offset=1.0, naming="qwen3_5")
PUBLISHED = {
    "eagle3": replace(EAGLE3, decoder=_WIDE, draft_vocab_size=32000, feature_layers=(2, 16, 29)),
    "eagle1": replace(
        EAGLE3,
        generation="1",
        decoder=replace(_WIDE, num_kv_heads=32, intermediate_size=11008, vocab_size=32000),
        draft_vocab_size=32000,
        has_mapping=False,
        has_head=False,
        base_head=HEAD,
        feature_layers=(32,),
        layer_prefix="layers.0.",
        fc_bias=True,
    ),
    "mtp": mtp_draft(_GATED, 32768),
}


@pytest.mark.parametrize("weights", [INT8, replace(INT4, group=128), INT4], ids=str)
@pytest.mark.parametrize("name", PUBLISHED)
def test_kernels_run_every_step_of_a_packed_draft_on_every_device(name: str, weights: WeightFormat) -> None:
    """To propose a row, a level of a tree, to accept, and to prefill, for one sequence and for several."""
    draft, limits = PUBLISHED[name], EngineLimits(4, 512, 4096, 10, 6, 60)
    specs = [spec for spec in model_weights(draft) if len(spec.shape) == 2]
    packed = {spec.name: DeviceLayout(weights, *spec.shape, dtype="float16") for spec in specs}
    shapes = [shape for shape in limits.engine_shapes() if shape.model == "draft"]
    assert {shape.phase for shape in shapes} == {"propose", "accept", "prefill"}
    for shared_limit in set(SHARED_MEMORY.values()):
        for shape in shapes:
            choice, reason = kernel_choice(draft, shape, "float16", shared_limit, packed=packed)
            assert choice is not None, f"{shape.name}: {reason}"


def test_kernels_for_a_target_are_those_of_the_packed_draft(
    tiny_checkpoint: Path, tiny_draft: Path, make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Every engine prepares its launches there, which asks for modules that a dense draft has no need of."""
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps(list(range(0, 320, 2))))
    inside = add_head(make_checkpoint(tmp_path / "mtp", **TINY))
    gpu = absent_gpu("sm_87", 16, SHARED_MEMORY["sm_87"])
    pairs = [(tiny_checkpoint, tiny_draft, {}), (inside, "mtp", {"draft_vocabulary": ids})]
    for number, (source, draft, more) in enumerate(pairs):
        modules = {}
        for kind in ("as-published", "int8", "int4"):
            directory = build(source, tmp_path / f"{number}-{kind}", draft, draft_weights=kind, **more)
            weights = WeightLayouts(directory.models, directory.checkpoints, "float16")
            planned = model_layouts(directory.models, directory.checkpoints, "float16")
            assert weights.planned.keys() == planned.keys() == ({"draft"} if kind != "as-published" else set())
            backend = AbsentBackend(directory.models, LIMITS, "float16", weights.planned, gpu)
            backend.load_all(weights.loaded.values())
            assert all(getattr(each, "_has_kernels", False) for each in backend._engines)
            modules[kind] = set(backend.module.sources)
        assert modules["int8"] - modules["as-published"] and modules["int4"] - modules["int8"]
