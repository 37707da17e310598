"""Voxtral Realtime against transformers: sound that is added to the embeddings of what is asked and written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from encoder_models import EncoderBackend
from numpy_kernel_device import NumpyKernelDevice, numpy_kernel_engine
from safetensors.numpy import load_file, save_file
from speech_models import CHECKPOINTS, TOLERANCE, encoded_frames, expected_speech, features_of
from synthetic_sound import RATE, SECONDS, SPARSE, places, sound

from edgellm import LLM, DraftingConfig, Request, SpeechStream
from edgellm.engines.backends.opening import open_backend
from edgellm.engines.backends.steps.linear import FewRows, ManyRows
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.checkpoints.weights import load_numpy_weights
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.families.programs import model_program
from edgellm.engines.model.audio import RealtimeConfig
from edgellm.engines.model.decoder import EMBEDDING, decoder_weights
from edgellm.engines.model.encoder_steps import KEPT_ROWS
from edgellm.engines.model.limits import EngineLimits, EngineShape
from edgellm.engines.model.memory_plan import MemoryPlan
from edgellm.engines.model.rotary import rotary_table
from edgellm.engines.model.row_steps import SOUND_ROWS
from edgellm.engines.runners.media import MediaEmbeddings, PromptMedia
from edgellm.engines.runners.sampling_state import SamplingValues
from edgellm.errors import AudioError, EdgeLLMError, EngineError, MediaError, RequestError
from edgellm.media.audio import AudioEncoder
from edgellm.metrics import Metrics
from edgellm.multimodal.log_mel import PreparedAudio, Sound
from edgellm.text.messages import MediaReference
from edgellm.transcription import transcription_request

NAME = "voxtral_realtime"
SPOKEN = (sound(SECONDS[0]), RATE)
#: The first token, 32 of silence and six of delay.
PROMPT = 39
ALL: dict[str, Any] = {"ignore_eos": True}


@pytest.fixture(scope="module")
def llm(voxtral_realtime_engines: Path) -> Iterator[LLM]:
    with LLM(voxtral_realtime_engines, backend="numpy", drafting=None) as opened:
        yield opened


def reference(source: Any) -> MediaReference:
    return MediaReference(source, False, "RGB", "sound", "audio")


def written(found: Any) -> list[int]:
    return list(found.response.token_ids)


def test_all_is_as_transformers_has_it(llm: LLM) -> None:
    expected = expected_speech(NAME)
    ids = expected["token_ids"].tolist()
    assert llm._runtime.prompt_ids(transcription_request(NAME, SPOKEN)) == ids[:PROMPT]

    def compute(runtime: Any) -> np.ndarray:
        encoder = runtime._media.encoder("audio")
        piece = encoder.prepare(reference(SPOKEN))
        features = features_of(piece, encoder.mel, encoder.config)
        np.testing.assert_allclose(features.flatten()[::SPARSE], expected["features0"], atol=TOLERANCE)
        rows = encoded(encoder, piece)
        assert len(rows) == piece.tokens == len(ids)
        np.testing.assert_allclose(rows.flatten()[::13], expected["rows0"], atol=TOLERANCE)
        runner, placed, found = runtime._runner.base, runtime._media.encode(ids, [piece]), []
        for stop in range(1, len(ids) + 1):
            runner.start(0, ids[:stop], stop - 1, SamplingValues(), placed).wait()
            found.append(runner.logits(0).copy())
        runner.start(0, ids, 0, SamplingValues(), placed).wait()  # in chunks of 32
        np.testing.assert_allclose(runner.logits(0), found[-1], atol=TOLERANCE)
        runner.stop(0)
        return np.stack(found)

    logits = llm.call(compute).result()
    stored = np.take_along_axis(logits, places(*logits.shape), axis=1)
    np.testing.assert_allclose(stored, expected["logits"], atol=TOLERANCE)


def test_what_is_written_is_what_transformers_writes(llm: LLM) -> None:
    assert written(llm.transcribe(SPOKEN, **ALL)) == expected_speech(NAME)["token_ids"].tolist()[PROMPT:]


@pytest.mark.gpu
def test_a_gpu_writes_with_the_probabilities_of_numpy(tmp_path: Path) -> None:
    """In float16, where another token may be as near: the first ones. The golden model's norms know the delay by
    factors of hundreds, with which a layer's values pass float16's; a hundredth of them leaves rounding."""
    folder = Path(shutil.copytree(CHECKPOINTS[NAME], tmp_path / "copy"))
    tensors = load_file(folder / "model.safetensors")
    factors = {name for name in tensors if name.endswith("ada_rms_norm.linear2.weight")}
    save_file(
        {name: values / (100 if name in factors else 1) for name, values in tensors.items()},
        folder / "model.safetensors",
    )
    build_engine_directory(folder, tmp_path / "engines", EngineLimits(2, 32, 400), [])
    with (
        LLM(tmp_path / "engines", backend="tensorrt", drafting=None) as opened,
        LLM(tmp_path / "engines", backend="numpy", drafting=None) as host,
    ):
        asked = {"logprobs": 8, "max_tokens": 3, **ALL}
        for _ in range(3):  # a step is captured the second time
            logprobs = (each.transcribe(SPOKEN, **asked).response.logprobs for each in (opened, host))
            for found, expected in zip(*logprobs, strict=True):
                both = dict(found.top).keys() & dict(expected.top).keys()
                assert len(both) >= 6
                assert all(abs(dict(found.top)[each] - dict(expected.top)[each]) < 0.05 for each in both)
        count = len(expected_speech(NAME)["token_ids"]) - PROMPT
        assert len(written(opened.transcribe(SPOKEN, **ALL))) == count


@pytest.mark.parametrize("way", [FewRows, ManyRows])
def test_decode_kernels_add_what_is_heard(llm: LLM, way: type) -> None:
    """As on a GPU, token by token, over the KV rows that the kernels write."""
    config, expected = llm.directory.config, expected_speech(NAME)
    encoder = llm._runtime._media.encoder("audio")
    rows = llm.call(lambda runtime: encoded(encoder, encoder.prepare(reference(SPOKEN)))).result()
    with Checkpoint.open(CHECKPOINTS[NAME]) as checkpoint:
        arrays: dict[str, np.ndarray] = load_numpy_weights(checkpoint, decoder_weights(config))
    ids, decode = expected["token_ids"], EngineShape("decode", 1, 1, 128, 128, window_rows=128)
    engine, table = numpy_kernel_engine(config, decode, way), rotary_table(config, 128)
    states = {name: np.zeros(shape, np.float32) for name, (shape, _) in model_program(config, decode).states.items()}
    inputs = {
        "inputs_embeds": np.zeros((1, 1, config.hidden_size), np.float32),
        SOUND_ROWS: np.zeros((1, 1, config.hidden_size), np.float32),
        "rope_rotary_cos_sin": np.zeros((1, 1, config.rotary_columns), np.float32),
        "attention_mask": np.zeros((1, 1, 1, 128), bool),
        "kvcache_start_index": np.zeros(1, np.int32),
    }
    logits = np.full((1, 1, config.vocab_size), np.nan, np.float32)
    bound = arrays | inputs | states | {f"present_{key}": each for key, each in states.items()} | {"logits": logits}
    engine.bind({key: each for key, each in bound.items() if key in engine.tensors or key.startswith("present_")})
    engine.attach(NumpyKernelDevice(), np.zeros(engine.scratch_bytes, np.uint8))
    for row, token in enumerate(ids.tolist()):
        inputs["inputs_embeds"][:], inputs[SOUND_ROWS][:] = arrays[EMBEDDING][token], rows[row]
        inputs["rope_rotary_cos_sin"][:] = table[row]
        inputs["attention_mask"][..., row] = True
        inputs["kvcache_start_index"][:] = row
        with np.errstate(over="ignore"):  # silu of large gates
            engine.enqueue()
        found = logits[0, 0, places(len(ids), config.vocab_size)[row]]
        np.testing.assert_allclose(found, expected["logits"][row], atol=5 * TOLERANCE)


def encoded(encoder: AudioEncoder, piece: PreparedAudio) -> np.ndarray:
    """Rows, on the host."""
    return np.concatenate([np.array(encoder._backend.read(each.rows).wait()) for each in encoder.encode([piece])])


@contextmanager
def opened(backend: Any, directory: EngineDirectory) -> Iterator[AudioEncoder]:
    """The encoder on a backend, which is closed at last."""
    encoder = AudioEncoder(backend, directory, Metrics())
    backend.check_memory(MemoryPlan({**encoder.memory, "engine scratch": backend.scratch_bytes()}))
    encoder.load()
    yield encoder
    encoder.close()
    backend.close()


@pytest.mark.parametrize("kind", ["numpy", "twins", pytest.param("tensorrt", marks=pytest.mark.gpu)])
def test_two_streams_give_the_rows_of_wholes(kind: str, voxtral_realtime_engines: Path, monkeypatch: Any) -> None:
    """By turns, and each whole in one run; rows go round what is kept. A third sound takes the place of one, which
    begins anew in the place of the other. The twins have weights with zeros, as on a GPU."""

    def backend() -> Any:
        return EncoderBackend(directory.audio, directory.config) if kind == "twins" else open_backend(kind, directory)

    def rows(samples: Any) -> np.ndarray:
        sound = samples if isinstance(samples, Sound) else Sound(RATE, samples)
        return encoded(encoder, sound.prepared(encoder.mel, encoder.config))

    own = directory = EngineDirectory.open(voxtral_realtime_engines)
    sounds = [SPOKEN[0], SPOKEN[0][::-1] * np.float32(0.7), sound(2.1)[::-1].copy()]
    with monkeypatch.context() as patched:
        patched.setattr(RealtimeConfig, "run_windows", 64)
        directory = replace(own, limits=replace(own.limits, audio_rows=65 * 16))
        with opened(backend(), directory) as encoder:
            wholes, exactly = [*map(rows, sounds)], encoder._backend.compute_dtype == "float32"
    chosen = wholes[0].astype(np.float32).flatten()[::13]
    np.testing.assert_allclose(chosen, expected_speech(NAME)["rows0"], atol=TOLERANCE if exactly else 0.1)
    found, streams, spent, directory = wholes[:2], [Sound(RATE)] * 2, list[int](), own
    with opened(backend(), directory) as encoder:
        frames, config = encoded_frames(monkeypatch), encoder.config
        assert config.past < config.kept_rows < config.merged * len(wholes[0])
        for first in range(0, len(sounds[0]), RATE // 2):
            for number in range(2):
                frames.clear()
                streams[number] = streams[number].followed_by(sounds[number][first : first + RATE // 2])
                found[number] = rows(streams[number])
                spent.append(sum(frames))
            if first == 4 * RATE:
                found.append(rows(sounds[2]))
        assert sum(each > (1 + config.run_windows) * config.window_frames for each in spent[4:]) == 2
    for one, whole in zip(found, wholes, strict=True):  # NumPy sums in another order among other rows
        np.testing.assert_allclose(one, whole, rtol=0, atol=1e-6 * np.abs(whole).max() if exactly else 0)


def test_three_minutes_take_the_memory_of_one(voxtral_realtime_engines: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, frames = EngineDirectory.open(voxtral_realtime_engines), encoded_frames(monkeypatch)
    stream, noise = Sound(RATE), np.random.default_rng(1)
    with opened(open_backend("numpy", directory), directory) as encoder:
        kept = [array for named in encoder._kept for array in named.values()]
        assert encoder.memory["audio keys and values"] == sum(each.nbytes for each in kept)
        for _ in range(18):
            stream = stream.followed_by(noise.standard_normal(10 * RATE, np.float32) * np.float32(0.1))
            frames.clear()
            encoder.encode([stream.prepared(encoder.mel, encoder.config)])
            assert sum(frames) < 1600 and len(stream._tail) < RATE and len(encoder._arrays) == 1
        assert all(each is array for each, array in zip(kept, (each[KEPT_ROWS] for each in encoder._kept), strict=True))


def test_slots_hear_their_own_sounds(llm: LLM) -> None:
    """Side by side, the longer one in the slot that the shorter leaves, and in rows that were written before."""
    sounds = [(sound(seconds), RATE) for seconds in (0.3, 4.1, 2.0)]
    requests = [transcription_request(NAME, each, **ALL) for each in sounds]
    alone = [llm.submit(each).result().token_ids for each in requests]
    generations = [llm.submit(each) for each in requests]
    assert [each.result().token_ids for each in generations] == alone
    assert len({*alone}) == 3
    again = llm.submit(requests[1]).result()
    assert (again.token_ids, again.usage.reused_tokens) == (alone[1], PROMPT - 1)
    other = (sound(4.1)[::-1].copy(), RATE)
    assert llm.transcribe(other, **ALL).response.usage.reused_tokens == 28  # of the silence, and not of what hears it


def test_a_text_that_hears_nothing(llm: LLM) -> None:
    """Its logits are the same token by token, in one prompt, and where all of them are asked for."""
    ids = expected_speech(NAME)["token_ids"].tolist()[:45]

    def compute(runtime: Any) -> list[np.ndarray]:
        found, runner = [], runtime._runner.base
        for first in (0, 44):
            runner.start(0, ids, first, SamplingValues(), None).wait()
            found.append(runner.logits(0).copy())
        runner.stop(0)
        return found

    whole, last = llm.call(compute).result()
    np.testing.assert_allclose(whole, last, atol=TOLERANCE)
    heard = np.take_along_axis(last[None], places(45, len(last))[-1:], axis=1)
    assert np.abs(heard - expected_speech(NAME)["logits"][44]).max() > 0.1


def test_a_stream_writes_on_as_more_is_heard(llm: LLM) -> None:
    (samples, rate), counts = SPOKEN, list[int]()
    stream = SpeechStream(llm, rate, **ALL)
    for first in range(0, len(samples), rate // 2):
        found = stream.hear(samples[first : first + rate // 2])
        counts.append(len(written(found)))
        usage = found.response.usage
        assert not first or usage.prompt_tokens - usage.reused_tokens <= 7 + 2 * 4
    assert written(stream.finish()) == expected_speech(NAME)["token_ids"].tolist()[PROMPT:]
    assert (
        found.text == stream.finish().text
        and stream._ids[PROMPT:] == written(stream.finish())[: len(stream._ids) - PROMPT]
    )
    assert max(counts) <= 7 + 1 + 17  # half a second, and the silence behind it
    bounded = SpeechStream(llm, rate, max_tokens=4, **ALL)
    texts = [bounded.hear(samples[first : first + rate]) for first in range(0, 3 * rate, rate)]
    assert [len(written(each)) for each in texts] == [4] * 3
    assert len(written(bounded.finish())) == 4 + 12


def test_what_it_does_not_do_is_named(llm: LLM) -> None:
    for asked in ({"language": "en"}, {"prompt": "EdgeLLM"}):
        with pytest.raises(RequestError, match="takes neither a language nor words to expect"):
            llm.transcribe(SPOKEN, **asked)
    with pytest.raises(MediaError, match="hears one at a time"):
        llm.generate("[STREAMING_PAD][STREAMING_PAD]", audio=[SPOKEN, SPOKEN])
    with pytest.raises(AudioError, match=r"the sound is 29\.00 seconds long: the most that the context holds are 28"):
        llm.transcribe((np.zeros(29 * RATE, np.float32), RATE))
    with pytest.raises(EngineError, match="hears as it writes: nothing is drafted"):
        llm.use_drafting(DraftingConfig(kind="suffix")).result()
    program = EngineShape("decode", 1, 1, 1, 1)
    with pytest.raises(EngineError, match="cannot be shared by 2 GPUs"):
        model_program(llm.directory.config, program, (0, 2))


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        ("config.json", {"downsample_factor": 2}, "downsample_factor is 2, supported is 4"),
        (
            "config.json",
            {"default_num_delay_tokens": 0},
            "default_num_delay_tokens is 0, expected a whole number from 1",
        ),
        ("preprocessor_config.json", {"win_length": 320}, "win_length is 320, supported is 400"),
        ("preprocessor_config.json", {"global_log_mel_max": 2.0}, "global_log_mel_max is 2.0, supported is 1.5"),
        ("preprocessor_config.json", {"feature_size": 80}, "its sizes do not fit config.json"),
    ],
)
def test_files_that_are_wrong_are_not_built(tmp_path: Path, name: str, values: dict[str, Any], said: str) -> None:
    folder = Path(shutil.copytree(CHECKPOINTS[NAME], tmp_path / "copy"))
    content = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps(content | values))
    with pytest.raises(EdgeLLMError, match=said):
        build_engine_directory(folder, tmp_path / "engines", EngineLimits(2, 32, 400), [])
        with LLM(tmp_path / "engines", backend="numpy", drafting=None) as opened:
            opened.transcribe(SPOKEN)


def test_a_checkpoint_whose_norms_know_the_delay_stays_as_it_is(tmp_path: Path) -> None:
    """As one that was written from what is read here; others whose tensors do not fit are refused."""
    folder = Path(shutil.copytree(CHECKPOINTS[NAME], tmp_path / "copy"))
    with Checkpoint.open(folder) as published:
        own = {name: published.raw(name).copy() for name in published.tensors}
    save_file(own, folder / "model.safetensors")
    with Checkpoint.open(folder) as again:
        assert again.tensors.keys() == own.keys()
        assert all(np.array_equal(again.raw(name), values) for name, values in own.items())
    published_tensors = load_file(CHECKPOINTS[NAME] / "model.safetensors")
    (first,) = (name for name in published_tensors if name.endswith("layers.1.ada_rms_norm.linear1.weight"))
    save_file(published_tensors | {first: published_tensors[first][:, :-1].copy()}, folder / "model.safetensors")
    with pytest.raises(EdgeLLMError, match=r"unknown: model\.layers\.1\.ada_rms_norm\.linear1"):
        build_engine_directory(folder, tmp_path / "engines", EngineLimits(2, 32, 400), [])


def test_its_tokens_know_which_sound_they_heard() -> None:
    """KV rows of a text are not those of the same text that heard another sound."""
    rows: Any = np.zeros((2, 4), np.float32)
    heard = [
        PromptMedia((), None, added=tuple(MediaEmbeddings(rows, (), digest) for digest in digests))
        for digests in ("ab", "ac")
    ]
    first, second = (each.identities([1, 1, 1, 2, 1]) for each in heard)
    assert first[:2] == second[:2] and not set(first[2:]) & set(second[2:])
    assert first[0] == first[1] != first[2] == first[4] != first[3]
    assert heard[0].followed_by(3) is heard[0]


def test_a_request_may_ask_for_fewer_tokens(llm: LLM) -> None:
    asked = Request.of(prompt="<s>[STREAMING_PAD]", audio=[SPOKEN], temperature=0, max_tokens=5, **ALL)
    response = llm.submit(asked).result()
    assert (len(response.token_ids), response.finish_reason) == (5, "length")
