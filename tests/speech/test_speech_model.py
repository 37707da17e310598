"""Qwen3-ASR against transformers: features, rows of the encoder, prompts, and the logits of every prefix."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_files import every_fourth
from speech_models import CHECKPOINT, TOLERANCE, expected_speech
from synthetic_sound import QUESTION, RATE, SECONDS, SPARSE, places, sound, wav

from edgellm import LLM, Request
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.families.audio_encoders import read_audio
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.runners.media import PromptMedia
from edgellm.engines.runners.sampling_state import SamplingValues
from edgellm.errors import AudioError, BuildError, CheckpointError, ImageError, RequestError, UnsupportedModelError
from edgellm.media.audio import AudioEncoder
from edgellm.multimodal.log_mel import log_mel, read_mel_config
from edgellm.opened_model import SHIPPED_MODEL
from edgellm.runtime import SpecDecodeRuntime
from edgellm.text.messages import MediaReference

AUDIO = "<|audio_start|><|audio_pad|><|audio_end|>"
PROMPT = f"<|im_start|>user\n{AUDIO * len(SECONDS)}{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
SOUNDS = [(sound(seconds), RATE) for seconds in SECONDS]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def llm(speech_engines: Path) -> Iterator[LLM]:
    with LLM(speech_engines, backend="numpy", drafting=None) as opened:
        yield opened


@pytest.fixture(scope="module")
def encoder(speech_engines: Path) -> Iterator[AudioEncoder]:
    with SpecDecodeRuntime(speech_engines, backend="numpy") as runtime:
        yield runtime._media.by_name["audio"]._opened()  # type: ignore[union-attr]


def heard(source: Any, kind: str = "audio") -> dict[str, Any]:
    return {"type": kind, kind: source}


def message(*sources: dict[str, Any], text: str = QUESTION) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*sources, {"type": "text", "text": text}]}]


def before(media: PromptMedia, stop: int) -> PromptMedia:
    """What stands before a token, which may be in the middle of a span."""
    spans = [
        replace(span, tokens=count, embeddings=replace(span.embeddings, rows=span.embeddings.rows[:count]))
        for span, _, count in media.within(0, stop)
    ]
    return PromptMedia(tuple(spans), None)


@pytest.mark.parametrize("index", range(len(SECONDS)))
def test_features_and_rows_are_those_of_transformers(encoder: AudioEncoder, index: int) -> None:
    features, expected = log_mel(SOUNDS[index][0], encoder.mel), expected_speech()
    np.testing.assert_allclose(features.flatten()[::SPARSE], expected[f"features{index}"], atol=TOLERANCE)
    piece = encoder.prepare(MediaReference(SOUNDS[index], False, "RGB", "sound", "audio"))
    np.testing.assert_array_equal(np.concatenate(piece.features, axis=1), features)
    assert max(each.shape[1] for each in piece.features) <= 200
    rows = np.concatenate([each.rows for each in encoder.encode([piece])])
    assert len(rows) == piece.tokens
    np.testing.assert_allclose(every_fourth(rows), expected[f"rows{index}"], atol=TOLERANCE)


def test_the_prompt_and_the_logits_of_every_prefix_are_those_of_transformers(llm: LLM) -> None:
    ids = expected_speech()["token_ids"].tolist()
    requests = [Request(PROMPT, audio=SOUNDS), Request(messages=message(*map(heard, SOUNDS)))]
    assert [llm.call(lambda runtime: runtime.prompt_ids(requests[0])).result()] == [ids]
    assert llm.call(lambda runtime: runtime.prompt_ids(requests[1])).result() == ids

    def logits(runtime: Any) -> np.ndarray:
        runner, sounds = runtime._runner.base, runtime._media.by_name["audio"]
        references = [MediaReference(each, False, "RGB", "sound", "audio") for each in SOUNDS]
        placed, found = runtime._media.encode(ids, [sounds.prepare(each) for each in references]), []
        for stop in range(1, len(ids) + 1):
            runner.start(0, ids[:stop], stop - 1, SamplingValues(), before(placed, stop)).wait()
            found.append(runner.logits(0).copy())
        return np.stack(found)

    found = llm.call(logits).result()
    stored = np.take_along_axis(found, places(*found.shape), axis=1)
    np.testing.assert_allclose(stored, expected_speech()["logits"], atol=5 * TOLERANCE)


def test_every_form_of_a_sound_is_the_same_prompt(llm: LLM, tmp_path: Path) -> None:
    path, data = tmp_path / "sound.wav", wav(sound(1.0))
    path.write_bytes(data)
    encoded = base64.b64encode(data).decode()
    samples = np.frombuffer(data[44:], "<i2").copy()
    forms = [
        heard(path),
        heard(data),
        heard((samples, RATE)),
        {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{encoded}"}},
        {"type": "audio_url", "audio_url": str(path)},
        {"type": "input_audio", "input_audio": {"data": encoded, "format": "wav"}},
    ]
    answers = [llm.chat(message(form), **GREEDY) for form in forms]
    assert len({each.token_ids for each in answers}) == 1
    assert [each.usage.reused_tokens for each in answers[1:]] == [answers[0].usage.prompt_tokens - 1] * 5
    other = llm.chat(message(heard((sound(1.0)[::-1].copy(), RATE))), **GREEDY)
    assert other.usage.prompt_tokens == answers[0].usage.prompt_tokens
    assert other.usage.reused_tokens < 20  # the words before it alone


def test_final_windows_are_neither_encoded_nor_computed_again(llm: LLM) -> None:
    samples = sound(7.0)
    samples[:1600] = np.sin(np.arange(1600) * 0.7)  # the loudest, which all is measured by, comes first

    def ask(seconds: float) -> Any:
        return llm.chat(message(heard((samples[: round(seconds * RATE)], RATE))), **GREEDY)

    first = ask(4.5)
    encoded: list[tuple[int, ...]] = []
    whole = AudioEncoder._encoded

    def counting(self: AudioEncoder, features: np.ndarray, digest: str) -> Any:
        encoded.append(features.shape)
        return whole(self, features, digest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AudioEncoder, "_encoded", counting)
        second = ask(5.0)
    assert encoded == [(128, 100)]  # the open window of those of two seconds
    head = 1 + len("user\n") + 1  # tokens before those of sound
    assert second.usage.reused_tokens == head + 4 * 13
    assert second.usage.prompt_tokens > first.usage.prompt_tokens


def test_sounds_are_bounded_by_the_context_before_they_are_decoded(llm: LLM) -> None:
    with pytest.raises(AudioError, match=r"part 1 of message 1 \(user\): the sound is 40\.00 seconds long"):
        llm.chat(message(heard(wav(np.zeros(40 * 8000), 8000))), **GREEDY)


@pytest.mark.parametrize(
    ("content", "message_"),
    [
        ({"type": "audio"}, "has no audio: expected one of"),
        ({"type": "audio", "audio": b"", "path": "x"}, "has several audios"),
        ({"type": "input_audio", "input_audio": {"format": "wav"}}, "input_audio is a dict"),
        ({"type": "video", "video": "x"}, "only text, images and audio can be sent"),
        ({"type": "image", "image": "x.png"}, "this model has no vision model"),
    ],
)
def test_parts_that_are_wrong_are_named(llm: LLM, content: dict[str, Any], message_: str) -> None:
    with pytest.raises(RequestError, match=message_):
        llm.chat(message(content))


def test_sounds_and_markers_must_match_and_other_models_take_none(llm: LLM) -> None:
    with pytest.raises(ImageError, match=r"has 1 audio markers \(token 261\), but there are 0 audios"):
        llm.generate(AUDIO)
    with pytest.raises(RequestError, match="leave `audio` out"):
        llm.chat("Hello", audio=[SOUNDS[1]])
    with (
        LLM(SHIPPED_MODEL, backend="numpy") as other,
        pytest.raises(RequestError, match="this model has no encoder of speech: send text only"),
    ):
        other.chat(message(heard(SOUNDS[1])))


def changed(path: Path, file: str, **values: Any) -> Path:
    """A copy of the checkpoint with other fields of a file, those of an inner object by that object's name."""
    shutil.copytree(CHECKPOINT, path)
    known = json.loads((path / file).read_text())
    for name, value in values.items():
        known[name] = known[name] | value if isinstance(value, dict) and name in known else value
    (path / file).write_text(json.dumps(known))
    return path


@pytest.mark.parametrize(
    ("file", "values", "error", "message_"),
    [
        ("config.json", {"audio_config": {"d_model": 17}}, CheckpointError, "d_model is 17, expected a multiple of 2"),
        (
            "config.json",
            {"audio_config": {"n_window_infer": 150}},
            CheckpointError,
            "a multiple of twice n_window, 100",
        ),
        (
            "config.json",
            {"audio_config": {"encoder_layers": 1}},
            CheckpointError,
            "unknown: model.audio_tower.layers.1",
        ),
        ("config.json", {"audio_config": {"scale_embedding": True}}, UnsupportedModelError, "scale_embedding is true"),
        ("config.json", {"audio_config": {"output_dim": 16}}, CheckpointError, "wrong shape: .*linear_2"),
        ("config.json", {"thinker_config": {}}, UnsupportedModelError, "Qwen/Qwen3-ASR-1.7B-hf"),
        ("processor_config.json", {"feature_extractor": {"dither": 0.1}}, UnsupportedModelError, "without dither"),
        (
            "processor_config.json",
            {"feature_extractor": {"hop_length": 401}},
            CheckpointError,
            "do not fit config.json",
        ),
        ("processor_config.json", {"feature_extractor": {"n_fft": "x"}}, CheckpointError, 'n_fft is "x", expected'),
    ],
)
def test_checkpoints_that_are_wrong_are_not_built(
    tmp_path: Path, file: str, values: dict[str, Any], error: type[Exception], message_: str
) -> None:
    checkpoint = changed(tmp_path / "checkpoint", file, **values)
    with pytest.raises((error, BuildError), match=message_):
        build(checkpoint, tmp_path / "engines")
    assert not (tmp_path / "engines").exists()


def build(checkpoint: Path, target: Path) -> None:
    from edgellm.built import read_built

    build_engine_directory(checkpoint, target, EngineLimits(1, 32, 64), [], check=lambda path, report: read_built(path))


def test_a_processor_s_file_by_its_older_name(tmp_path: Path) -> None:
    with Checkpoint.open(CHECKPOINT) as checkpoint:
        config = read_audio(checkpoint)
    inner = json.loads((CHECKPOINT / "processor_config.json").read_text())["feature_extractor"]
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(inner))
    assert read_mel_config(tmp_path, config) == read_mel_config(CHECKPOINT, config)
    (tmp_path / "preprocessor_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"preprocessor_config\.json is missing: it says how sound becomes input"):
        read_mel_config(tmp_path, config)
