"""Vision encoders that are opened with the first image."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from synthetic_images import synthetic_image

from edgellm.errors import DeviceMemoryError, EdgeLLMError, EngineDirectoryError, RequestError
from edgellm.opened_model import SHIPPED_MODEL
from edgellm.requests import Request
from edgellm.runtime import SpecDecodeRuntime
from edgellm.sampling_params import SamplingParams
from edgellm.text.messages import MediaReference

PARAMS = SamplingParams(max_tokens=8)
CONTENT = [{"type": "image", "image": synthetic_image(24, 20)}, {"type": "text", "text": "What do you see?"}]
SHOWN = Request(messages=[{"role": "user", "content": CONTENT}], params=PARAMS)
ONLY_TEXT = """
import sys
from edgellm import LLM, SamplingParams
with LLM(backend="numpy") as llm:
    print(llm.has_vision_model, llm.chat([{"role": "user", "content": "Wave."}], SamplingParams(max_tokens=4)).text)
print(sorted({name.split(".")[0] for name in sys.modules} & {"PIL", "tensorrt", "tensorrt_rtx"}))
print([name for name in ("edgellm.media.vision", "edgellm.multimodal.vision_runner") if name in sys.modules])
"""


@pytest.fixture
def shipped_copy(tmp_path: Path) -> Path:
    """The shipped model, whose files can be changed."""
    return shutil.copytree(SHIPPED_MODEL, tmp_path / "model")


@pytest.fixture
def runtime(multimodal_engines: Callable[[str], Path]) -> Iterator[SpecDecodeRuntime]:
    with SpecDecodeRuntime(multimodal_engines("llava"), backend="numpy") as opened:
        yield opened


def test_answers_to_text_load_nothing_of_the_vision_encoder() -> None:
    found = subprocess.run([sys.executable, "-c", ONLY_TEXT], capture_output=True, text=True, check=True)
    *first, packages, modules = found.stdout.splitlines()
    assert first[0].startswith("True ")
    assert (packages, modules) == ("[]", "[]")


def test_a_changed_vision_model_is_refused_before_any_image(shipped_copy: Path) -> None:
    weights = shipped_copy / "vision" / "model.safetensors"
    weights.write_bytes(weights.read_bytes().replace(b"linear_1", b"linear_9"))
    with pytest.raises(EngineDirectoryError, match=r"vision.model\.safetensors: SHA-256"):
        SpecDecodeRuntime(shipped_copy, backend="numpy")


def test_a_vision_encoder_that_cannot_open_is_an_error_of_each_request_with_an_image(shipped_copy: Path) -> None:
    weights = shipped_copy / "vision" / "model.safetensors"
    with SpecDecodeRuntime(shipped_copy, backend="numpy") as runtime:
        hidden = weights.rename(shipped_copy / "hidden")
        for _ in range(2):
            with pytest.raises(EdgeLLMError, match=r"vision.*model\.safetensors"):
                runtime.handle_request(SHOWN)
            assert runtime.handle_request(Request("Hello", params=PARAMS)).text
        hidden.rename(weights)
        assert runtime.handle_request(SHOWN).text


def test_a_vision_encoder_that_finds_no_memory_is_an_error_of_the_request(
    runtime: SpecDecodeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgellm.engines.backends.numpy_backend.available_memory", lambda: 1000)
    closed = Mock()
    monkeypatch.setattr("edgellm.media.vision.VisionEncoder.close", closed)
    with pytest.raises(DeviceMemoryError, match="vision weights"):
        runtime.handle_request(SHOWN)
    monkeypatch.undo()
    assert closed.call_count == 1
    assert runtime.handle_request(SHOWN).text


def test_a_marker_without_an_image_is_refused(runtime: SpecDecodeRuntime) -> None:
    marker = runtime.directory.vision.config.image_token_id
    with pytest.raises(EdgeLLMError, match="image"):
        runtime.handle_request(Request([7, marker, 8], params=PARAMS))


def test_closing_twice_and_before_the_first_image(multimodal_engines: Callable[[str], Path]) -> None:
    runtime = SpecDecodeRuntime(multimodal_engines("llava"), backend="numpy")
    media = runtime._media
    assert not media.by_name
    runtime.close()
    runtime.close()
    with pytest.raises(RequestError, match="the model is closed"):  # they do not open again
        media.prepare([MediaReference(synthetic_image(24, 20), False, "RGB", "image 1")])


def test_a_vision_model_of_another_size_is_refused_at_once(multimodal_engines: Callable[[str], Path]) -> None:
    with pytest.raises(EngineDirectoryError, match=r"makes embeddings of 64, .* has a hidden size of 320"):
        SpecDecodeRuntime(SHIPPED_MODEL, multimodal_engines("llava"), backend="numpy")
