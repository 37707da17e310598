"""Families that see parts of pictures, against transformers: how pictures are cut and written, embeddings, logits."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import pytest
from golden_files import golden_folder, largest_difference
from golden_images import GoldenModel, assert_close
from golden_vision import open_vision, relative_difference
from safetensors.numpy import load_file
from synthetic_images import synthetic_image
from tiny_families import TOLERANCES
from tiny_multimodal import stored

from edgellm.engines.backends.opening import open_backend
from edgellm.engines.building.checks import with_window_rows
from edgellm.engines.building.inputs import read_decoder_config, read_vision_config
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.formats.tensors import float32_into
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.model.vision import VisionConfig
from edgellm.engines.runners.comparison import open_runner, teacher_forced_logits
from edgellm.engines.runners.media import MediaEmbeddings, place_media
from edgellm.engines.runners.sampling_state import SamplingValues
from edgellm.errors import EngineDirectoryError, MediaError
from edgellm.llm import LLM
from edgellm.multimodal.image_processor import open_image_processor
from edgellm.multimodal.prepared_image import PreparedImage
from edgellm.multimodal.vision_layout import patch_coordinates
from edgellm.requests import Request
from edgellm.runtime import SpecDecodeRuntime
from edgellm.sampling_params import SamplingParams
from edgellm.snapshots.file import read_snapshot
from edgellm.text.messages import media_of_prompt
from tools.demo_model.describe import describe_in_place

FOLDER = golden_folder("tiled")
NAMES = sorted(path.name for path in FOLDER.iterdir())
_TOKENS = {
    "gemma3": "<start_of_image>",
    "internvl": "<IMG_CONTEXT>",
    "gemma4": "<|image|>",
    "minicpmv4": "<|image_pad|>",
}
MARKERS = {name: _TOKENS.get(name.split("_")[0], "<image>") for name in NAMES}
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
#: torchvision resizes LFM2-VL's pictures, in steps of one of 255 of Pillow's; others' have the bits of this release.
ONE_OF_255 = 1.01 / 255 / 0.22


class Golden:
    """A checkpoint, its prompt and pictures, and what transformers made of them."""

    def __init__(self, name: str, place: Path, dtype: str = "float32") -> None:
        self.expected = load_file(FOLDER / name / "expected.safetensors")
        asked = json.loads((FOLDER / name / "prompt.json").read_text())
        self.prompt: str = asked["prompt"]
        self.images = [synthetic_image(*size) for size in asked["sizes"]]
        for path in (FOLDER / name).iterdir():
            if path.name not in ("expected.safetensors", "prompt.json", "cuts.json"):
                (place / path.name).write_bytes(path.read_bytes())
        decoder = read_decoder_config(place)
        self.vision = read_vision_config(place, None, decoder)
        self.expected["rows"] /= decoder.embedding_scale  # which the language model multiplies all that it takes by
        rows = (self.vision.image_side**2 or 64 // self.vision.merge_patches * self.vision.merge_patches,)
        (place / "chat_template.jinja").write_text(
            "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
            "{% for part in message.content %}{{ part.text if part.type == 'text' else '" + MARKERS[name] + "' }}"
            "{% endfor %}{% endif %}{% if message.role == 'system' %}:{% endif %}{% endfor %}"
        )
        self.name, self.path, self.marker = name, place, MARKERS[name]
        limits = with_window_rows(decoder, EngineLimits(1, 16, 192, image_rows=rows))
        describe_in_place(place, limits, dtype)
        processor = open_image_processor(place, self.vision, rows[0])
        self.tiles = [tile for image in self.images for tile in processor.prepare(image).tiles]


class Language(GoldenModel):
    """The language model with the rows that transformers' encoder makes."""

    def __init__(self, golden: Golden) -> None:
        self.path, self.config = golden.path, read_decoder_config(golden.path)
        self.expected, self.token_ids = golden.expected, golden.expected["token_ids"].tolist()
        ends = np.cumsum([tile.tokens for tile in golden.tiles])
        rows = np.split(self.expected["rows"], ends[:-1])
        self.images = [MediaEmbeddings(part, (), f"part {number}") for number, part in enumerate(rows)]


@pytest.fixture(scope="module", params=NAMES)
def golden(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Golden:
    return Golden(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("name", NAMES)
def test_pictures_are_cut_as_the_published_processors_cut_them(name: str, tmp_path: Path) -> None:
    vision, file = Golden(name, tmp_path).vision, json.loads((FOLDER / name / "cuts.json").read_text())
    kind = json.loads((FOLDER / name / "preprocessor_config.json").read_text())["image_processor_type"]
    for case in file["cases"]:
        fields = {"image_processor_type": kind, **case["settings"]}
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(fields))
        processor, whole = open_image_processor(tmp_path, vision_for(vision, fields)), hashlib.sha256()
        for size, grids, values in case["images"]:
            tiles = processor.prepare(synthetic_image(*size)).tiles
            assert [list(tile.grid[1:]) for tile in tiles] == grids
            rows = np.concatenate([in_reading_order(tile).reshape(-1) for tile in tiles])
            found = rows[:: max(1, len(rows) // 3)]
            assert np.abs(found - values).mean() <= ONE_OF_255
            whole.update(rows.tobytes())
        if name != "lfm2_vl" and has_pillow_of(file):
            assert whole.hexdigest() == case["sha256"]


def vision_for(vision: VisionConfig, settings: dict[str, Any]) -> VisionConfig:
    """An encoder that takes what a processor of these settings gives."""
    side = settings.get("max_image_size", {}).get("longest_edge") or settings.get("size", {}).get("height")
    return replace(vision, image_size=side)


def has_pillow_of(cuts: dict[str, Any]) -> bool:
    """Whether pictures are resized here as for the goldens: releases of Pillow round some values otherwise."""
    return cuts["pillow"].split(".")[0] == PIL.__version__.split(".")[0]


def in_reading_order(tile: PreparedImage) -> np.ndarray:
    """The patches row by row."""
    rows, columns = patch_coordinates(tile.grid, tile.layout.merge_size, getattr(tile.layout, "nested", False))
    return tile.patches[np.argsort(rows * tile.grid[2] + columns)]


def test_prompts_have_the_ids_of_the_published_processors(golden: Golden) -> None:
    with SpecDecodeRuntime(golden.path, backend="numpy") as runtime:
        ids = runtime.prompt_ids(Request(golden.prompt, images=golden.images))
        assert ids == golden.expected["token_ids"].tolist()
        media = runtime._media
        spans = media.encode(ids, media.prepare(media_of_prompt("image", golden.images))).spans
    assert len(spans) == len(golden.tiles) == len({span.embeddings.digest for span in spans})


def test_parts_have_the_rows_of_transformers(golden: Golden) -> None:
    directory = EngineDirectory.open(golden.path)
    runner = open_vision(open_backend("numpy", directory), directory)
    found = np.concatenate([each.rows for each in runner.encode(golden.tiles)])
    assert found.shape == golden.expected["rows"].shape
    cuts = json.loads((FOLDER / golden.name / "cuts.json").read_text())
    assert relative_difference(found, golden.expected["rows"]) <= (1e-5 if has_pillow_of(cuts) else 0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["smolvlm", "lfm2_vl", "internvl", "gemma3", "gemma4", "gemma4_wide", "minicpmv4_6"])
def test_a_gpu_gives_the_rows_of_transformers(name: str, tmp_path: Path) -> None:
    """In float16, or where the language model's values go beyond it in bfloat16, on kernels."""
    dtype = "bfloat16" if name.startswith("gemma") else "float16"
    golden = Golden(name, tmp_path, dtype)
    directory = EngineDirectory.open(golden.path)
    backend = open_backend("tensorrt", directory)
    runner, found = open_vision(backend, directory), []
    for each in runner.encode(golden.tiles):
        found.append(np.empty(each.rows.shape, np.float32))
        float32_into(backend.download(each.rows), backend.compute_dtype, found[-1])
    runner.close()
    backend.close()
    tolerance = 0.01 if dtype == "float16" else 0.05
    assert relative_difference(np.concatenate(found), golden.expected["rows"]) <= tolerance


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gemma4", "gemma4_wide"])
def test_a_gpu_has_the_logits_of_numpy_behind_pictures(name: str, tmp_path: Path) -> None:
    """Over the prompt's last token and those that follow, with the rows that transformers' encoder makes."""
    golden = Golden(name, tmp_path, "bfloat16")
    directory, language, found = EngineDirectory.open(golden.path), Language(golden), {}
    for backend in ("numpy", "tensorrt"):
        with open_runner(backend, directory) as runner:
            images = []
            for image in language.images:
                rows = runner.backend.empty(image.rows.shape, "compute")
                runner.backend.upload(rows, stored(image.rows, runner.backend.compute_dtype))
                images.append(replace(image, rows=rows))
            placed = place_media(language.token_ids, {language.config.media["image"]: images}, language.config)
            answer = golden.expected["greedy"].tolist()
            found[backend] = teacher_forced_logits(runner, language.token_ids, answer, placed)
    largest = np.abs(found["numpy"]).max()
    assert np.abs(found["tensorrt"] - found["numpy"]).max() / largest <= TOLERANCES["bfloat16"]


def test_every_prefix_has_the_logits_of_transformers(golden: Golden) -> None:
    language = Language(golden)
    runner = language.runner(with_window_rows(language.config, EngineLimits(1, 16, 192)))
    for stop in range(1, len(language.token_ids) + 1):
        if (
            language.config.image_tokens
            and language.token_ids[stop - 1 : stop + 1] == [language.config.image_token_id] * 2
        ):
            continue  # inside an image that is seen as a whole
        runner.start(0, language.token_ids[:stop], 0, SamplingValues(), language.placed_before(stop)).wait()
        assert_close(runner.logits(0), language.expected["logits"][stop - 1])


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("gemma4", {"padding_id": 3}),
        ("gemma4_wide", {"image_tokens": 0}),
        ("minicpmv4_6", {"mrope_section": (2, 1, 1), "mrope_interleaved": True, "spatial_merge_size": 4}),
    ],
)
def test_what_a_language_model_does_with_pictures_would_be_missed(
    name: str, changed: dict[str, Any], tmp_path: Path
) -> None:
    language = Language(Golden(name, tmp_path))
    language.config = replace(language.config, **changed)
    if "mrope_section" in changed:  # as of models that count rows and columns
        language.images = [
            replace(each, grid=tile.grid)
            for each, tile in zip(language.images, Golden(name, tmp_path).tiles, strict=True)
        ]
    runner = language.runner(with_window_rows(language.config, EngineLimits(1, 16, 192)))
    runner.start(0, language.token_ids, 0, SamplingValues(), language.placed()).wait()
    assert largest_difference(runner.logits(0), language.expected["logits"][-1]) > 0.01


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("gemma4", {"rope_theta": 10000.0}),
        ("gemma4_wide", {"standardized": False}),
        ("minicpmv4_6", {"merging_layer": 0}),
    ],
)
def test_what_an_encoder_has_of_its_own_would_be_missed(name: str, changed: dict[str, Any], tmp_path: Path) -> None:
    golden = Golden(name, tmp_path)
    directory = EngineDirectory.open(golden.path)
    assert directory.vision is not None
    directory = replace(directory, vision=replace(directory.vision, config=replace(golden.vision, **changed)))
    runner = open_vision(open_backend("numpy", directory), directory)
    found = np.concatenate([each.rows for each in runner.encode(golden.tiles)])
    assert relative_difference(found, golden.expected["rows"]) > 0.01


def test_a_model_answers_as_transformers_does(golden: Golden) -> None:
    """By the raw prompt, and by a conversation whose template writes a marker for each picture."""
    texts, pictures = golden.prompt.split(golden.marker), iter(golden.images)
    parts: list[dict[str, Any]] = [{"type": "text", "text": texts[0]}]
    for text in texts[1:]:
        parts += [{"type": "image", "image": next(pictures)}, {"type": "text", "text": text}]
    with LLM(golden.path, backend="numpy") as llm:
        shown = llm.generate(golden.prompt, PARAMS, images=golden.images)
        assert shown.usage.prompt_tokens == len(golden.expected["token_ids"])
        assert list(shown.token_ids) == golden.expected["greedy"].tolist()
        asked = llm.chat([{"role": "user", "content": parts}], PARAMS)
        assert (asked.usage.prompt_tokens, asked.token_ids) == (shown.usage.prompt_tokens, shown.token_ids)
        with pytest.raises(MediaError, match=r"2 image markers .* for 1 image: show"):
            llm.generate(golden.prompt, PARAMS, images=golden.images[:1])


@pytest.mark.parametrize(("name", "token"), [("smolvlm", "<fake_token_around_image>"), ("internvl", "<img>")])
def test_a_tokenizer_without_what_stands_around_pictures_is_refused(name: str, token: str, tmp_path: Path) -> None:
    Golden(name, tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(path.read_text().replace(f'"{token}"', '"<other>"'))
    describe_in_place(tmp_path, EngineLimits(1, 16, 128, image_rows=(16,)), "float32")
    with pytest.raises(EngineDirectoryError, match=f"the tokenizer has not the tokens {token}, number"):
        LLM(tmp_path, backend="numpy")


def test_idefics3_is_smolvlm_by_another_name(tmp_path: Path) -> None:
    golden = Golden("smolvlm", tmp_path)
    for file in ("config.json", "preprocessor_config.json"):
        text = (tmp_path / file).read_text().replace("SmolVLM", "Idefics3").replace('"smolvlm', '"idefics3')
        (tmp_path / file).write_text(text)
    describe_in_place(tmp_path, EngineLimits(1, 16, 128, image_rows=(golden.vision.image_side**2,)), "float32")
    with LLM(tmp_path, backend="numpy") as llm:
        found = llm.generate(golden.prompt, PARAMS, images=golden.images)
    assert list(found.token_ids) == golden.expected["greedy"].tolist()


def test_a_kept_system_prompt_shows_all_parts_of_its_picture(golden: Golden, tmp_path: Path) -> None:
    system = [{"type": "image", "image": golden.images[0]}, {"type": "text", "text": "look"}]
    # What may follow a system prompt is tried with letters that this tokenizer does not know: so this begins with one.
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "_what?"}]
    request = Request(messages=messages, params=PARAMS)
    with SpecDecodeRuntime(golden.path, backend="numpy") as runtime:
        expected = runtime.handle_request(request)
        kept = runtime.generate_and_save_system_prompt_kv_cache(system, path=tmp_path / "kept")
    record = read_snapshot(tmp_path / "kept").prompt
    assert record is not None
    assert [part["type"] for part in record.content] == ["image", "text"]
    with SpecDecodeRuntime(golden.path, backend="numpy", snapshots=[tmp_path / "kept"]) as runtime:
        found = runtime.handle_request(request)
    states = golden.name in ("lfm2_vl", "minicpmv4_6")  # which are kept before the last token
    assert (found.token_ids, found.usage.reused_tokens) == (expected.token_ids, kept.tokens - states)
