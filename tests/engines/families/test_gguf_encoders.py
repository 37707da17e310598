"""Vision encoders and EAGLE-3 heads as llama.cpp's converter writes them: what was published, and its numbers."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_encoders import (
    MARKERS,
    encoder_metadata,
    encoder_tensors,
    head_metadata,
    head_tensors,
    write_encoder,
    write_head,
    write_texts,
)
from gguf_writing import NUMBERS, Tensor, random_blocks
from golden_files import golden_folder
from golden_images import FOLDER, GoldenModel, assert_close

from edgellm.engines.building.gguf_folder import checkpoint_folder, draft_folder
from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.errors import CheckpointError, UnsupportedModelError
from edgellm.engines.families import decoder_config
from edgellm.engines.families.drafts import read_draft
from edgellm.engines.families.vision_config import read_vision
from edgellm.engines.families.vision_encoders import host_weights, vision_weights
from edgellm.engines.model.draft_decoder import MAPPING, draft_weights
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.runners.sampling_state import SamplingValues

DRAFTS = golden_folder("draft")
CONVERTED = json.loads((golden_folder("mmproj") / "converted.json").read_text())
MODELS = [name for name in CONVERTED if name != "eagle3"]
MIXTURES = ["qwen3_vl_moe", "qwen3_5_moe"]
#: What `tools/goldens/make_mmproj.py` gave the converter.
PREPROCESSOR = {"image_mean": [0.5, 0.25, 0.125], "image_std": [0.5, 0.75, 1.0]}
#: By our names, gguf-py's.
TYPES = {"float32": "F32", "float16": "F16", "int64": "I64"}


@pytest.fixture(params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def checkpoint_of(name: str, folder: Path) -> Path:
    """A copy of a golden model, with what says how images become input."""
    shutil.copytree(FOLDER / name, folder / name)
    (folder / name / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    return folder / name


def files_of(checkpoint: Path, folder: Path, **options: Any) -> tuple[Path, Path]:
    """The checkpoint as two GGUF files, with a tokenizer of its own ids; the encoder says how wide its windows are."""
    config = json.loads((checkpoint / "config.json").read_text())
    size = config.get("text_config", config)["vocab_size"]
    tokens = [f"token {index}" for index in range(size)]
    for key, text in MARKERS.items():
        tokens[config[key]] = text
    kinds = [3 if text in MARKERS.values() else 1 for text in tokens]
    keys = {"model": "gpt2", "pre": "qwen2", "tokens": tokens, "token_type": kinds, "merges": []}
    texts = write_texts(
        checkpoint, folder / "texts.gguf", {f"tokenizer.ggml.{key}": each for key, each in keys.items()}
    )
    window = config["vision_config"].get("window_size")
    more = {} if window is None else {"clip.vision.window_size": window}
    return texts, write_encoder(checkpoint, folder / "encoder.gguf", more, **options)


def digests(tensors: dict[str, Tensor]) -> dict[str, str]:
    found = {}
    for name, (kind, shape, data) in tensors.items():
        found[name] = hashlib.sha256(f"{TYPES[kind]} {list(shape)}".encode() + data).hexdigest()[:8]
    return found


def assert_written(metadata: dict[str, Any], expected: dict[str, Any]) -> None:
    assert metadata.keys() == expected.keys()
    for key, value in metadata.items():
        assert expected[key] == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value)


def test_the_tests_write_what_the_converter_writes(name: str, tmp_path: Path) -> None:
    checkpoint = checkpoint_of(name, tmp_path)
    assert digests(encoder_tensors(checkpoint)) == CONVERTED[name]["tensors"]
    assert_written(encoder_metadata(checkpoint), CONVERTED[name]["metadata"])


@pytest.mark.parametrize("name", [*MODELS, *MIXTURES])
def test_the_encoder_is_what_was_published(name: str, tmp_path: Path) -> None:
    checkpoint = checkpoint_of(name, tmp_path)
    texts, encoder = files_of(checkpoint, tmp_path, fused=name.startswith("qwen2_5"))
    with checkpoint_folder(texts, mmproj=encoder) as folder:
        with Checkpoint.open(folder) as found, Checkpoint.open(checkpoint) as published:
            vision, expected = read_vision(found), read_vision(published)
            assert vision is not None and expected is not None
            prefix, other = vision.tensor_prefix, expected.tensor_prefix
            same = {"tensor_prefix": other, "projector_prefix": other}
            assert replace(vision, **same) == expected
            for weights in (vision_weights(vision), host_weights(vision)):
                for tensor, _ in (part for spec in weights for part in spec.parts):
                    values = published.raw(other + tensor.removeprefix(prefix))
                    np.testing.assert_array_equal(found.raw(tensor), values.reshape(found.info(tensor).shape), tensor)
            config = decoder_config(found.config, found.generation_config, found.dtype)
            wanted = decoder_config(published.config, published.generation_config, published.dtype)
            for field in ("family", "mrope_section", "mrope_interleaved", "image_token_id", "deepstack_layers"):
                assert getattr(config, field) == getattr(wanted, field), field
        processor = json.loads((folder / "preprocessor_config.json").read_text())
        assert {key: processor[key] for key in PREPROCESSOR} == PREPROCESSOR
        fewest, most = (3136, 12845056) if name.startswith("qwen2_5") else (65536, 16777216)
        assert processor["size"] == {"shortest_edge": fewest, "longest_edge": most}


@pytest.mark.parametrize("mixture", MIXTURES)
def test_mixtures_that_take_images_have_the_logits_of_transformers(tmp_path: Path, mixture: str) -> None:
    golden = GoldenModel(mixture)
    texts, encoder = files_of(checkpoint_of(mixture, tmp_path), tmp_path)
    with checkpoint_folder(texts, mmproj=encoder) as folder:
        with Checkpoint.open(folder) as found:
            golden.config = decoder_config(found.config, found.generation_config, found.dtype)
        golden.path = folder
        runner = golden.runner(EngineLimits(max_batch=1, prefill_chunk=64, kv_capacity=96))
        runner.start(0, golden.token_ids, 0, SamplingValues(), golden.placed()).wait()
        assert_close(runner.logits(0), golden.expected["logits"][-1])


def test_the_tests_write_a_head_as_the_converter_does() -> None:
    head, base = DRAFTS / "eagle3", DRAFTS / "llama_base"
    assert digests(head_tensors(head)) == CONVERTED["eagle3"]["tensors"]
    assert_written(head_metadata(head, base), CONVERTED["eagle3"]["metadata"])


@pytest.mark.parametrize(
    ("name", "base_name", "layers"),
    [("eagle3", "llama_base", [2, 3, 4]), ("eagle3_norm_before_fc", "qwen3_base", [1, 3, 4])],
)
def test_a_head_is_what_was_published(tmp_path: Path, name: str, base_name: str, layers: list[int]) -> None:
    head, base = DRAFTS / name, DRAFTS / base_name
    file = write_head(head, base, tmp_path / "head.gguf", {"eagle3.target_layers": layers})
    with (
        draft_folder(file) as folder,
        Checkpoint.open(folder) as found,
        Checkpoint.open(head) as published,
        Checkpoint.open(base) as model,
    ):
        config = decoder_config(model.config, model.generation_config, model.dtype)
        draft, expected = read_draft(found, model, config), read_draft(published, model, config)
        assert draft.layer_prefix == "model.layers.0."
        skipped = {"layer_prefix", "decoder"}
        assert {key: value for key, value in vars(draft).items() if key not in skipped} == {
            key: value for key, value in vars(expected).items() if key not in skipped
        }
        assert draft.decoder == expected.decoder
        np.testing.assert_array_equal(found.integers(MAPPING), published.integers(MAPPING))
        for own, other in zip(draft_weights(draft), draft_weights(expected), strict=True):
            for (tensor, _), (wanted, _) in zip(own.parts, other.parts, strict=True):
                np.testing.assert_array_equal(found.raw(tensor), published.raw(wanted), tensor)


@pytest.mark.parametrize(("ids", "entered"), [([1, 2, 3], (2, 3, 4)), ([2, 3, 4], (2, 3, 4)), ([1, 3, 4], (1, 3, 4))])
def test_layers_that_a_head_takes(tmp_path: Path, ids: list[int], entered: tuple[int, ...]) -> None:
    base = DRAFTS / "llama_base"
    more = {"eagle3.target_layers": ids, "eagle3.rope.dimension_sections": [2, 1, 1, 0]}
    file = write_head(DRAFTS / "eagle3", base, tmp_path / "head.gguf", more)
    with draft_folder(file) as folder, Checkpoint.open(folder) as found, Checkpoint.open(base) as model:
        config = decoder_config(model.config, model.generation_config, model.dtype)
        config = replace(config, mrope_section=(2, 1, 1), mrope_interleaved=True)
        draft = read_draft(found, model, config)
        assert (draft.feature_layers, draft.decoder.mrope_section) == (entered, (2, 1, 1))


def test_packed_linear_layers_are_taken_as_dense(tmp_path: Path) -> None:
    checkpoint, random = checkpoint_of("qwen2_5_vl_old", tmp_path), np.random.default_rng(5)
    written: dict[str, Tensor] = {}

    def packed(name: str, values: np.ndarray) -> Tensor | None:
        if values.ndim != 2 or values.shape[1] % 32 or not name.startswith("mm."):
            return None
        written[name] = random_blocks("q8_0", values.shape, random)
        return written[name]

    texts, encoder = files_of(checkpoint, tmp_path, kinds=packed)
    assert set(written) == {"mm.0.weight", "mm.2.weight"}
    with checkpoint_folder(texts, mmproj=encoder) as folder, Checkpoint.open(folder) as found:
        assert read_vision(found) is not None
        blocks = np.frombuffer(written["mm.0.weight"].data, np.uint8).reshape(-1, NUMBERS["q8_0"][2])
        scales, codes = blocks[:, :2].copy().view("<f2").astype(np.float32), blocks[:, 2:].view(np.int8)
        np.testing.assert_array_equal(found.raw("model.visual.merger.mlp.0.weight").reshape(-1, 32), scales * codes)
        assert found.weight_format("model.visual.merger.mlp.0.weight", (64, 64)) is None


def test_parts_that_do_not_belong_together(tmp_path: Path) -> None:
    checkpoint = checkpoint_of("qwen2_5_vl_old", tmp_path)
    texts, encoder = files_of(checkpoint, tmp_path)
    data = encoder.read_bytes()
    encoder.write_bytes(data.replace(b"v.blk.0.attn_k.weight", b"v.blk.0.attn_x.weight"))
    with (
        pytest.raises(CheckpointError, match=r"blocks\.0\.attn\.qkv\.weight is made of attn_q and attn_k and attn_v"),
        checkpoint_folder(texts, mmproj=encoder) as folder,
    ):
        Checkpoint.open(folder)
    encoder.write_bytes(data.replace(b"v.patch_embd.weight.1", b"v.patch_embd.weight.2"))
    with (
        pytest.raises(CheckpointError, match=r"patch_embed\.proj\.weight is made of v\.patch_embd\.weight and"),
        checkpoint_folder(texts, mmproj=encoder) as folder,
    ):
        Checkpoint.open(folder)
    encoder.write_bytes(data.replace(b"v.blk.1.ln2.weight", b"v.blk.1.ln3.weight"))
    with (
        checkpoint_folder(texts, mmproj=encoder) as folder,
        Checkpoint.open(folder) as found,
        pytest.raises(CheckpointError, match=r"missing: model\.visual\.blocks\.1\.norm2\.weight"),
    ):
        read_vision(found)


def test_other_projectors_and_other_models_are_refused_by_name(tmp_path: Path) -> None:
    texts, encoder = files_of(checkpoint_of("qwen3_vl", tmp_path), tmp_path)
    other = write_encoder(checkpoint_of("qwen2_5_vl_old", tmp_path), tmp_path / "other.gguf")
    refused = r"'clip\.projector_type' is {}, beside a model of the architecture 'qwen3vl'; supported are"
    with (
        pytest.raises(UnsupportedModelError, match=refused.format(r"'qwen2\.5vl_merger'")),
        checkpoint_folder(texts, mmproj=other),
    ):
        pass
    encoder.write_bytes(encoder.read_bytes().replace(b"qwen3vl_merger", b"nemotron_v2_vl"))
    with (
        pytest.raises(UnsupportedModelError, match=refused.format("'nemotron_v2_vl'")),
        checkpoint_folder(texts, mmproj=encoder),
    ):
        pass
    with (
        pytest.raises(CheckpointError, match=r"'general\.architecture' is 'qwen3vl', expected 'clip'"),
        checkpoint_folder(texts, mmproj=texts),
    ):
        pass
    with (
        pytest.raises(UnsupportedModelError, match=r"is 'clip'; supported are llama, .*name it with --mmproj"),
        checkpoint_folder(other),
    ):
        pass
    with (
        pytest.raises(UnsupportedModelError, match=r"is 'qwen3vl'; supported are eagle3\. Name .* a draft"),
        draft_folder(texts),
    ):
        pass
    head = write_head(DRAFTS / "eagle3", DRAFTS / "llama_base", tmp_path / "head.gguf")
    with (
        pytest.raises(UnsupportedModelError, match=r"is 'eagle3'; supported are llama, .*name it with --draft"),
        checkpoint_folder(head),
    ):
        pass


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        ("vision.block_count", 2**31 - 1, r"depth is 2147483647, expected"),
        ("vision.patch_size", 0, r"does not say what patch_size are"),
        ("vision.n_wa_pattern", "2", r"'clip\.vision\.n_wa_pattern' is '2', expected a whole number"),
        ("vision.projection_dim", 64, r"out_hidden_size is 64, but the language model's hidden_size is 32"),
        ("projector_type", 7, r"'clip\.projector_type' is 7, expected a text"),
        ("vision.image_mean", [1, 2], r"'clip\.vision\.image_mean' is 1, expected numbers"),
    ],
)
def test_wrong_metadata_is_refused_by_name(tmp_path: Path, key: str, value: object, match: str) -> None:
    checkpoint = checkpoint_of("qwen2_5_vl_old", tmp_path)
    texts, _ = files_of(checkpoint, tmp_path)
    encoder = write_encoder(checkpoint, tmp_path / "wrong.gguf", {f"clip.{key}": value})
    with (
        pytest.raises(CheckpointError, match=match),
        checkpoint_folder(texts, mmproj=encoder) as folder,
        Checkpoint.open(folder) as found,
    ):
        read_vision(found)
