"""Models that hear against transformers: features, rows of encoders, prompts, and the logits of every prefix."""

from __future__ import annotations

import base64
import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from encoder_models import EncoderBackend
from kernel_refusals import kernel_refusal
from safetensors.numpy import load_file, save_file
from speech_models import CHECKPOINT, CHECKPOINTS, TOLERANCE, encoded_frames, expected_speech, features_of
from synthetic_images import synthetic_image
from synthetic_sound import HALF_ROW, QUESTION, RATE, SECONDS, SPARSE, places, sound, wav

from edgellm import LLM, Request
from edgellm.built import read_built
from edgellm.commands.info import directory_facts
from edgellm.engines.backends.executors import SHARED_MEMORY, Executors
from edgellm.engines.backends.numpy_backend import NumpyBackend
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.building.needed_kernels import WeightLayouts, needed_modules
from edgellm.engines.directories.engine_directory import EngineDirectory, _parse
from edgellm.engines.families.programs import model_weights
from edgellm.engines.model.audio import ConformerConfig
from edgellm.engines.model.limits import EngineLimits, audio_shape
from edgellm.engines.runners.media import PromptMedia
from edgellm.engines.runners.sampling_state import SamplingValues
from edgellm.errors import AudioError, EdgeLLMError, EngineDirectoryError, MediaError, RequestError
from edgellm.kernels.gpu import absent_gpu
from edgellm.media.audio import AudioEncoder
from edgellm.metrics import Metrics
from edgellm.opened_model import SHIPPED_MODEL
from edgellm.text.messages import MediaReference

AUDIO = "<|audio_start|><|audio_pad|><|audio_end|>"
PROMPTS = {
    "qwen3_asr": f"<|im_start|>user\n{AUDIO * len(SECONDS)}{QUESTION}<|im_end|>\n<|im_start|>assistant\n",
    "voxtral": f"<s>[INST]{'[BEGIN_AUDIO][AUDIO]' * len(SECONDS)}{QUESTION}[/INST]",
    "qwen2_audio": "<|im_start|>user\n"
    + "".join(f"Audio {number}: <|audio_bos|><|AUDIO|><|audio_eos|>\n" for number in (1, 2))
    + f"{QUESTION}<|im_end|>\n<|im_start|>assistant\n",
    "gemma4": f"<bos><turn>user\n{'<|audio|>' * len(SECONDS)}{QUESTION}\n<turn>model\n",
}
SOUNDS = [(sound(seconds), RATE) for seconds in SECONDS]
#: Those of each golden: longer ones than a window transformers cuts for Qwen2-Audio.
HEARD = {name: SOUNDS[name == "qwen2_audio" :] for name in PROMPTS}
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def llm(speech_engines: Path) -> Iterator[LLM]:
    with LLM(speech_engines, backend="numpy", drafting=None) as opened:
        yield opened


def heard(source: Any) -> dict[str, Any]:
    return {"type": "audio", "audio": source}


def message(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts, {"type": "text", "text": QUESTION}]}]


def before(media: PromptMedia, stop: int) -> PromptMedia:
    """What stands before a token, which may be in the middle of a span."""
    spans = []
    for span, _, count in media.within(0, stop):
        rows = replace(span.embeddings, rows=span.embeddings.rows[:count])
        spans.append(replace(span, places=span.places[:count], embeddings=rows))
    return PromptMedia(tuple(spans), None)


def logits_of_prefixes(runtime: Any, ids: list[int], pieces: list[Any]) -> np.ndarray:
    """[T, V] of a prompt with these pieces of media, token by token."""
    runner, placed, found = runtime._runner.base, runtime._media.encode(ids, pieces), []
    for stop in range(1, len(ids) + 1):
        runner.start(0, ids[:stop], stop - 1, SamplingValues(), before(placed, stop)).wait()
        found.append(runner.logits(0).copy())
    return np.stack(found)


def engines_of(name: str, request: pytest.FixtureRequest) -> Path:
    """The engine directory of the golden model of that name."""
    path: Path = request.getfixturevalue("speech_engines" if name == "qwen3_asr" else f"{name}_engines")
    return path


@pytest.mark.parametrize("name", PROMPTS)
def test_all_is_as_transformers_has_it(name: str, request: pytest.FixtureRequest) -> None:
    expected, ids = expected_speech(name), expected_speech(name)["token_ids"].tolist()
    llm = LLM(engines_of(name, request), backend="numpy", drafting=None)
    for asked in (Request(PROMPTS[name], audio=HEARD[name]), Request(messages=message(*map(heard, HEARD[name])))):
        assert llm._runtime.prompt_ids(asked) == ids

    def compute(runtime: Any) -> np.ndarray:
        sounds = runtime._media.encoder("audio")
        pieces = [sounds.prepare(MediaReference(each, False, "RGB", "sound", "audio")) for each in HEARD[name]]
        for index, piece in enumerate(pieces):
            features = features_of(piece, sounds.mel, sounds.config)
            # Of Gemma 4's transformers takes transforms of float32.
            near = TOLERANCE * (3 if name == "gemma4" else 1)
            np.testing.assert_allclose(features.flatten()[::SPARSE], expected[f"features{index}"], atol=near)
            rows = np.concatenate([each.rows for each in sounds.encode([piece])])
            assert len(rows) == piece.tokens
            np.testing.assert_allclose(rows.flatten()[::13], expected[f"rows{index}"], atol=TOLERANCE)
        return logits_of_prefixes(runtime, ids, pieces)

    logits = llm.call(compute).result()
    llm.close()
    stored = np.take_along_axis(logits, places(*logits.shape), axis=1)
    np.testing.assert_allclose(stored, expected["logits"], atol=5 * TOLERANCE)


def test_a_picture_beside_a_sound_is_as_transformers_has_it(gemma4_engines: Path) -> None:
    expected, picture, voice = expected_speech("gemma4"), synthetic_image(30, 44), (sound(HALF_ROW), RATE)
    ids = expected["both_token_ids"].tolist()
    shown = [MediaReference(picture, False, "RGB", "picture"), MediaReference(voice, False, "RGB", "sound", "audio")]
    with LLM(gemma4_engines, backend="numpy", drafting=None) as llm:
        asked = Request(messages=message({"type": "image", "image": picture}, heard(voice)))
        assert llm._runtime.prompt_ids(asked) == ids
        logits = llm.call(lambda runtime: logits_of_prefixes(runtime, ids, runtime._media.prepare(shown))).result()
    stored = np.take_along_axis(logits, places(*logits.shape), axis=1)
    np.testing.assert_allclose(stored, expected["both_logits"], atol=5 * TOLERANCE)


def test_rows_of_gemma_4_are_final_and_follow_from_few_before_them(
    gemma4_engines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, samples = EngineDirectory.open(gemma4_engines), sound(5.3)
    assert directory.audio is not None and directory.audio.lead_windows == 3
    on_kernels = EncoderBackend(directory.audio, directory.config)
    backends: tuple[Any, Any] = NumpyBackend(directory.config, audio=directory.audio), on_kernels
    whole, streamed = (AudioEncoder(each, directory, Metrics()) for each in backends)
    rows, frames = list[np.ndarray](), encoded_frames(monkeypatch)
    for encoder, lengths in ((whole, [5.3]), (streamed, [0.63, 0.9, 1.7, 2.93, 4.0, 5.3])):
        encoder.load()
        frames.clear()  # of fixed shapes it has run already
        for seconds in lengths:
            heard = (samples[: round(seconds * RATE)], RATE)
            prepared = encoder.prepare(MediaReference(heard, False, "RGB", "sound", "audio"))
            rows.append(np.concatenate([each.rows for each in encoder.encode([prepared])]))
    expected, *parts, last = rows
    for found in parts:  # a chunk has 12 rows
        np.testing.assert_allclose(found[: len(found) // 12 * 12], expected[: len(found) // 12 * 12], atol=TOLERANCE)
    np.testing.assert_allclose(last, expected, atol=TOLERANCE)
    # The open chunk and those behind it, and three before them; 48 frames each.
    assert frames == [62, 89, 169, 292, 399 - 3 * 48, 529 - 5 * 48]
    monkeypatch.setattr(ConformerConfig, "run_windows", 5)  # as of sounds that are longer than a run
    whole._cache.clear()
    np.testing.assert_allclose(np.concatenate([each.rows for each in whole.encode([prepared])]), expected, atol=1e-4)


@pytest.mark.parametrize("name", PROMPTS)
def test_engines_of_whole_windows_give_the_same_rows(name: str, request: pytest.FixtureRequest) -> None:
    """As on a GPU: what is not heard yet is masked, weights have zeros behind them."""
    directory = EngineDirectory.open(engines_of(name, request))
    encoder = AudioEncoder(EncoderBackend(directory.audio, directory.config), directory, Metrics())
    encoder.load()
    for index, each in enumerate(HEARD[name]):
        piece = encoder.prepare(MediaReference(each, False, "RGB", "sound", "audio"))
        for _ in range(2):  # the second time, of rows that are kept
            rows = np.concatenate([each.rows for each in encoder.encode([piece])])
            np.testing.assert_allclose(rows.flatten()[::13], expected_speech(name)[f"rows{index}"], atol=TOLERANCE)
    encoder.close()


def test_every_form_of_a_sound_is_the_same_prompt(llm: LLM, tmp_path: Path) -> None:
    path, data = tmp_path / "sound.wav", wav(sound(1.0))
    path.write_bytes(data)
    encoded = base64.b64encode(data).decode()
    forms = [
        *map(heard, (path, data, (np.frombuffer(data[44:], "<i2"), RATE))),
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


def test_final_windows_are_neither_encoded_nor_computed_again(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = sound(7.0)
    samples[:1600] = np.sin(np.arange(1600) * 0.7)  # the loudest, which all is measured by, comes first
    encoded = encoded_frames(monkeypatch)
    for seconds in (4.5, 5.0):
        encoded.clear()
        response = llm.chat(message(heard((samples[: round(seconds * RATE)], RATE))), **GREEDY)
    assert encoded == [100]  # the open window of those of two seconds
    assert response.usage.reused_tokens == 1 + len("user\n") + 1 + 4 * 13


@pytest.mark.parametrize("name", ["qwen3_asr", "qwen2_audio"])
def test_answers_in_a_batch_drafted_and_from_a_snapshot_are_those_alone(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    engines, path = engines_of(name, request), tmp_path / "heard.safetensors"
    requests = [Request.of(messages=message(heard(each)), **GREEDY) for each in SOUNDS]
    system = [{"type": "text", "text": "Listen: "}, heard(SOUNDS[2])]
    asked: list[dict[str, Any]] = [{"role": "system", "content": system}, *message(heard(SOUNDS[1]))]
    with LLM(engines, backend="numpy", drafting=None) as llm:
        alone = [llm.submit(each).result().token_ids for each in requests]
        after = llm.chat(asked, **GREEDY).token_ids
        kept = llm.cache_system_prompt(system, save=path)
    with LLM(engines, backend="numpy", drafting="auto", snapshots=[path]) as drafting:
        together = drafting.handle(requests)
        known = drafting.chat(asked, **GREEDY)
    assert [each.token_ids for each in together] == alone  # type: ignore[union-attr]
    assert (known.token_ids, known.usage.reused_tokens) == (after, kept.tokens)


def test_a_sound_longer_than_a_window_of_qwen2_audio_is_heard_in_windows(
    qwen2_audio_engines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, samples = EngineDirectory.open(qwen2_audio_engines), sound(2.5)
    samples[:1600] = np.sin(np.arange(1600) * 0.7)  # the loudest, which all is measured by
    backend: Any = NumpyBackend(directory.config, audio=directory.audio)
    encoder, rows = AudioEncoder(backend, directory, Metrics()), dict[float, np.ndarray]()
    encoder.load()
    pieces, encoded = {}, encoded_frames(monkeypatch)
    for seconds in (0.02, 2.0, 2.02, 2.03, 2.5):
        each = (samples[: round(seconds * RATE)], RATE)
        pieces[seconds] = encoder.prepare(MediaReference(each, False, "RGB", "sound", "audio"))
        rows[seconds] = np.concatenate([each.rows for each in encoder.encode([pieces[seconds]])])
    frames = {seconds: piece.frames for seconds, piece in pieces.items()}
    assert frames == {0.02: (3,), 2.0: (200,), 2.02: (200,), 2.03: (200, 3), 2.5: (200, 50)}
    assert [len(each) for each in rows.values()] == [1, 50, 50, 51, 62]
    np.testing.assert_array_equal(rows[2.03][:50], rows[2.5][:50])
    assert encoded == [200] * 5  # the first window of the last two is final


@pytest.mark.parametrize(
    ("part", "error", "said"),
    [
        ({"type": "audio"}, RequestError, "has no audio: expected one of"),
        ({"type": "audio", "audio": b"", "path": "x"}, RequestError, "has several audios"),
        ({"type": "input_audio", "input_audio": {"format": "wav"}}, RequestError, "input_audio is a dict"),
        ({"type": "video", "video": "x"}, RequestError, "this model has no encoder of videos"),
        ({"type": "image", "image": "x.png"}, RequestError, "this model has no vision model"),
        (heard(wav(np.zeros(40 * 8000), 8000)), AudioError, r"part 1 of .*: the sound is 40\.00 seconds long"),
    ],
)
def test_parts_that_are_wrong_are_named(llm: LLM, part: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        llm.chat(message(part))


def test_sounds_and_markers_must_match_and_other_models_take_none(llm: LLM) -> None:
    with pytest.raises(MediaError, match=r"has 1 sound marker \(token 261\) for 0 sounds"):
        llm.generate(AUDIO)
    with pytest.raises(RequestError, match="leave `audio` out"):
        llm.chat("Hello", audio=[SOUNDS[1]])
    with (
        LLM(SHIPPED_MODEL, backend="numpy") as other,
        pytest.raises(RequestError, match="this model has no encoder of speech: send text only"),
    ):
        other.chat(message(heard(SOUNDS[1])))


def test_gemma_4_is_built_without_ears_where_a_release_left_them_out(tmp_path: Path) -> None:
    """As releases do that are made for text and images."""
    checkpoint = shutil.copytree(CHECKPOINTS["gemma4"], tmp_path / "checkpoint")
    tensors = load_file(checkpoint / "model.safetensors")
    kept = {name: values for name, values in tensors.items() if "audio" not in name}
    assert len(kept) < len(tensors)
    (checkpoint / "model.safetensors").unlink()
    save_file(kept, checkpoint / "model.safetensors")
    build_engine_directory(checkpoint, tmp_path / "engines", EngineLimits(1, 32, 64), [])
    directory = EngineDirectory.open(tmp_path / "engines")
    assert directory.audio is None and "audio" not in directory.config.media


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        ("voxtral", {"audio_config": {"max_source_positions": 41}}, "intermediate_size is 64, expected a multiple of"),
        ("voxtral", {"audio_config": {"hidden_size": 32, "num_attention_heads": 3}}, "of num_attention_heads, 3"),
        ("voxtral", {"audio_config": {"num_hidden_layers": 1}}, "unknown: audio_tower.layers"),
        ("qwen2_audio", {"audio_config": {"max_source_positions": 301}}, "301, expected an even number"),
        ("qwen2_audio", {"audio_config": {"encoder_attention_heads": 3}}, "of encoder_attention_heads, 3"),
        ("gemma4", {"audio_config": {"attention_context_right": 4}}, "attention_context_right is 4, supported is 0"),
        ("gemma4", {"audio_config": {"subsampling_conv_channels": [6, 4]}}, "the first a multiple of 4"),
        ("gemma4", {"audio_config": {"num_attention_heads": 3}}, "a multiple of 2 and of num_attention_heads, 3"),
        ("gemma4", {"audio_config": {"num_hidden_layers": 1}}, "unknown: model.audio_tower.layers"),
        ("gemma4 extractor", {"preemphasis": 0.97}, r"preemphasis is 0\.97, supported is 0"),
        ("voxtral", {"projector_hidden_act": "relu"}, 'projector_hidden_act is "relu"'),
        ("audio_config", {"d_model": 17}, "d_model is 17, expected a multiple of 2"),
        ("audio_config", {"n_window_infer": 150}, "a multiple of twice n_window, 100"),
        ("audio_config", {"encoder_layers": 1}, "unknown: model.audio_tower.layers"),
        ("audio_config", {"scale_embedding": True}, "scale_embedding is true"),
        ("audio_config", {"output_dim": 16}, "wrong shape: .*linear_2"),
        ("thinker_config", {}, "Qwen/Qwen3-ASR-1.7B-hf"),
        ("feature_extractor", {"dither": 0.1}, "without dither"),
        ("feature_extractor", {"hop_length": 401}, "do not fit config.json"),
        ("feature_extractor", {"n_fft": "x"}, 'n_fft is "x", expected'),
        ("feature_extractor", None, "preprocessor_config.json is missing: it says how sounds become input"),
    ],
)
def test_checkpoints_that_are_wrong_are_not_built(tmp_path: Path, name: str, values: Any, said: str) -> None:
    checkpoint = shutil.copytree(CHECKPOINTS.get(name.split()[0], CHECKPOINT), tmp_path / "checkpoint")
    file = checkpoint / ("processor_config.json" if "extractor" in name else "config.json")
    known = json.loads(file.read_text())
    file.unlink()
    name = name.replace("gemma4 extractor", "feature_extractor")
    if name in CHECKPOINTS:
        values = {key: {**known[key], **each} if isinstance(each, dict) else each for key, each in values.items()}
        file.write_text(json.dumps(known | values))
    elif values is not None:
        file.write_text(json.dumps(known | {name: known.get(name, {}) | values}))
    with pytest.raises(EdgeLLMError, match=said):
        check = lambda path, report: read_built(path)  # noqa: E731
        build_engine_directory(checkpoint, tmp_path / "engines", EngineLimits(1, 32, 64), [], check=check)
    assert not (tmp_path / "engines").exists()


def test_a_directory_of_another_encoder_is_refused(speech_engines: Path) -> None:
    directory = EngineDirectory.open(speech_engines)
    assert directory.audio is not None and directory.limits.audio_rows == directory.audio.window_rows == 26
    with pytest.raises(EngineDirectoryError, match="runs of 26 rows and a width of 32, expected 13 and 32"):
        _ = replace(directory, limits=replace(directory.limits, audio_rows=13)).audio
    described = json.loads((speech_engines / "edgellm.json").read_text())
    del described["limits"]["audio_rows"]
    with pytest.raises(EngineDirectoryError, match="disagree on whether there is an encoder of speech"):
        _parse(speech_engines, json.dumps(described).encode())


def test_kernels_and_memory_of_the_encoder_are_prepared(speech_engines: Path) -> None:
    directory = EngineDirectory.open(speech_engines)
    shape = audio_shape(directory.limits.audio_rows)
    gpu, weights = absent_gpu("sm_87", 16, SHARED_MEMORY["sm_87"]), WeightLayouts.dense(directory.models)
    modules = needed_modules(directory.models, directory.limits, "float16", weights, gpu)
    names = {module.name for module in modules}
    assert {"encoder_unfold_float32_float16", "encoder_unfold_float16_float16", "sounds"} <= names
    memory = directory_facts(speech_engines, False)["memory"]
    parameters = sum(math.prod(spec.shape) for spec in model_weights(directory.models["audio"]))
    assert memory["audio weights"] == 2 * parameters
    assert kernel_refusal(directory.models["audio"], shape, "float16", 99 << 10) is None
    refusal = Executors(directory.models, directory.limits, "float32", 0).problem(shape)
    assert "TensorRT has nothing for convolutions of encoders of speech" in (refusal or "")


@pytest.mark.parametrize("backend", ["numpy", pytest.param("tensorrt", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", PROMPTS)
def test_a_backend_hears_what_numpy_hears(name: str, backend: str, request: pytest.FixtureRequest) -> None:
    asked, engines = {**GREEDY, "logprobs": 8, "max_tokens": 1}, engines_of(name, request)
    # Gemma 4 is built in bfloat16.
    least, near = (4, 0.3) if name == "gemma4" else (6, 0.05)
    with LLM(engines, backend="numpy") as llm, LLM(engines, backend=backend) as other:
        for seconds in (2.0, 2.5, 2.5):  # of a window, of one that is known and another, of known ones
            conversation = message(heard((sound(seconds), RATE)))
            (found,), (expected,) = (each.chat(conversation, **asked).logprobs for each in (other, llm))
            both = dict(found.top).keys() & dict(expected.top).keys()
            assert len(both) >= least
            assert all(abs(dict(found.top)[each] - dict(expected.top)[each]) < near for each in both)
        counts = other.metrics()["speech"]  # an encoder's seconds count with the next sound
        assert counts["reused_sounds"] == 1 and counts["seconds"] > 0
