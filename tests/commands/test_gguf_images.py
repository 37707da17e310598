"""GGUF files with a vision encoder, and with a draft in GGUF: built, opened as they are, noticed where they changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import Edgellm
from drafted_conversations import TREE
from gguf_encoders import tiny_files, tokenizer_keys, write_both, write_head
from gguf_models import write_model
from PIL import Image
from synthetic_images import synthetic_image
from tiny_multimodal import FAMILIES

from edgellm import LLM, RequestError
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.errors import BuildError, EngineDirectoryError
from edgellm.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PIXELS = synthetic_image(24, 20)
QUESTION = [{"role": "user", "content": [{"type": "image", "image": PIXELS}, {"type": "text", "text": "What is it?"}]}]
LIMITS = {"kv_capacity": 160, "max_batch": 1}


@pytest.fixture(params=["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def checkpoint(request: pytest.FixtureRequest, make_checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    """A tiny model that takes images."""
    made = make_checkpoint(tmp_path / "checkpoint", 3, **FAMILIES[request.param])
    path = made / "preprocessor_config.json"
    means = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
    path.write_text(json.dumps(json.loads(path.read_text()) | means))
    return made


@pytest.fixture
def model(make_checkpoint: Callable[..., Path], tmp_path: Path) -> tuple[Path, Path]:
    """One of them as two files."""
    return tiny_files(make_checkpoint, tmp_path)


def answer(path: Path, backend: str = "numpy", **options: object) -> list[int]:
    with LLM(path, backend=backend, **options) as llm:
        assert llm.has_vision_model
        return llm.chat(QUESTION, GREEDY).token_ids


def takes_images(path: Path | str, **options: object) -> bool:
    with LLM(path, backend="numpy", build=LIMITS, **options) as llm:
        return llm.has_vision_model


def test_an_image_is_seen_as_by_the_published_model(edgellm: Edgellm, checkpoint: Path, tmp_path: Path) -> None:
    build_engine_directory(checkpoint, tmp_path / "published", LIMITS, [])
    expected = answer(tmp_path / "published")
    texts, encoder = write_both(checkpoint, tmp_path / "files")
    code, _, err = edgellm("build", texts, tmp_path / "robot", "--mmproj", encoder, "--kv-capacity", 160, "--no-try")
    assert code == 0, err
    link = tmp_path / "robot" / "model.mmproj.gguf"
    assert link.is_symlink() and link.resolve() == encoder.resolve()
    assert answer(tmp_path / "robot") == expected
    assert answer(texts, build=LIMITS) == expected  # found beside it
    assert edgellm("info", tmp_path / "robot", "--verify")[0] == 0
    image = tmp_path / "image.png"
    Image.fromarray(PIXELS).save(image)
    code, out, err = edgellm(
        *("generate", "What is it?", "-m", texts, "--image", image, "--mmproj", encoder, "--backend", "numpy"),
        *("--kv-capacity", 160, "--temperature", 0, "--max-tokens", 12),
    )
    assert code == 0 and out, err


@pytest.mark.gpu
def test_an_image_is_seen_as_by_the_published_model_on_a_gpu(checkpoint: Path, tmp_path: Path) -> None:
    build_engine_directory(checkpoint, tmp_path / "published", LIMITS)
    texts, _ = write_both(checkpoint, tmp_path / "files")
    assert answer(texts, "tensorrt", build=LIMITS) == answer(tmp_path / "published", "tensorrt")


def test_which_file_is_the_encoder(edgellm: Edgellm, model: tuple[Path, Path], tmp_path: Path) -> None:
    texts, encoder = model
    assert takes_images(texts) and not takes_images(texts, mmproj="none")
    second = Path(shutil.copy(encoder, encoder.with_name("mmproj-tiny-F32.gguf")))
    with pytest.raises(BuildError, match=r"beside .*tiny-F16\.gguf are 2 vision encoders: .*F16\.gguf, .*F32\.gguf\. "):
        LLM(texts, backend="numpy", build=LIMITS)
    assert takes_images(texts, mmproj=second) and not takes_images(texts, mmproj="none")
    code, _, err = edgellm("build", texts, tmp_path / "robot", "--no-try")
    assert code == 1 and "are 2 vision encoders" in err and "--mmproj none" in err
    assert edgellm("build", texts, tmp_path / "robot", "--no-try", "--mmproj", "none")[0] == 0
    assert EngineDirectory.open(tmp_path / "robot").vision is None
    # Of another model, or as wide as another.
    second.write_bytes(encoder.read_bytes().replace(b"qwen3vl_merger", b"nemotron_v2_vl"))
    assert takes_images(texts)
    encoder.unlink()
    assert not takes_images(texts)
    code, _, err = edgellm("build", texts, tmp_path / "robot", "--mmproj", second, "--force")
    assert code == 1 and "'clip.projector_type' is 'nemotron_v2_vl'" in err
    code, _, err = edgellm("build", texts, tmp_path / "robot", "--mmproj", second, "--vision", tmp_path, "--force")
    assert code == 2 and "--mmproj is given beside --vision" in err
    code, _, err = edgellm("build", tmp_path / "checkpoint", tmp_path / "robot", "--mmproj", second, "--force")
    assert code == 1 and "--mmproj is given, but" in err and "is no GGUF file" in err
    with pytest.raises(RequestError, match="mmproj"):
        LLM(texts, backend="numpy", mmproj=3)  # type: ignore[arg-type]


def test_a_model_that_takes_no_images_is_opened_as_before(
    tiny_checkpoint: Path, model: tuple[Path, Path], tmp_path: Path
) -> None:
    texts = write_model(tiny_checkpoint, tmp_path / "texts.gguf", tokenizer_keys(tiny_checkpoint))
    shutil.copy(model[1], tmp_path)
    (tmp_path / "mmproj-2.gguf").write_bytes(b"GGUF")
    assert not takes_images(texts)


def test_an_encoder_that_changed_is_noticed(
    make_checkpoint: Callable[..., Path], model: tuple[Path, Path], tmp_path: Path
) -> None:
    texts, encoder = model
    with LLM(texts, backend="numpy", build=LIMITS) as llm:
        folder = llm.directory.path
    written = (folder / "edgellm.json").stat().st_mtime_ns
    first = answer(texts, build=LIMITS)
    assert (folder / "edgellm.json").stat().st_mtime_ns == written
    tiny_files(make_checkpoint, tmp_path / "other", seed=4)[1].replace(encoder)
    with pytest.raises(EngineDirectoryError, match=r"model\.mmproj\.gguf: SHA-256"):
        EngineDirectory.open(folder)
    assert answer(texts, build=LIMITS) != first
    assert EngineDirectory.open(folder).weight_files == ("model.gguf", "model.mmproj.gguf")


def test_a_draft_in_gguf(edgellm: Edgellm, tiny_checkpoint: Path, tiny_draft: Path, tmp_path: Path) -> None:
    head = write_head(tiny_draft, tiny_checkpoint, tmp_path / "head.gguf")
    trees = {"kv_capacity": 96, "draft_top_k": 4, "draft_steps": 3, "verify_tree_size": 12}
    options = [each for key, value in trees.items() for each in (f"--{key.replace('_', '-')}", value)]
    for name, draft in (("published", tiny_draft), ("robot", head)):
        code, _, err = edgellm("build", tiny_checkpoint, tmp_path / name, "--draft", draft, *options, "--no-try")
        assert code == 0, err
    assert (tmp_path / "robot" / "draft" / "model.gguf").stat().st_size == head.stat().st_size
    found = []
    for name in ("published", "robot"):
        with LLM(tmp_path / name, backend="numpy", drafting=TREE) as llm:
            response = llm.generate("The red cup", GREEDY)
            drafted = response.drafting
            found.append((response.token_ids, drafted.rounds, drafted.drafted_tokens, drafted.accepted_tokens))
    assert found[0] == found[1]
    texts = write_model(tiny_checkpoint, tmp_path / "texts.gguf", tokenizer_keys(tiny_checkpoint))
    with LLM(texts, backend="numpy", build=trees | {"draft": str(head)}) as llm:
        assert llm.directory.draft is not None
        assert llm.generate("The red cup", GREEDY).token_ids == found[0][0]
    code, _, err = edgellm("build", tiny_checkpoint, tmp_path / "other", "--draft", texts, "--no-try")
    assert code == 1 and f"{texts}: 'general.architecture' is 'qwen3'; supported are eagle3" in err
