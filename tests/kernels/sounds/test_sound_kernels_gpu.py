"""The CUDA kernels of sounds equal their NumPy twins, a frame has the same bits wherever it is measured, and models say
the same of sounds that the host measured. Needs a GPU and pycuda."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu_device import copied, cuda_device, device_copy, on_device
from gpu_timing import microseconds
from sound_arguments import FAMILIES, measuring
from synthetic_sound import RATE, sound

from edgellm import LLM, SpeechStream
from edgellm.engines.backends.cuda_backend import CudaBackend
from edgellm.engines.model.audio import AudioConfig
from edgellm.kernels.sounds.contract import Placing, part_samples
from edgellm.kernels.sounds.twin import NumpySounds
from edgellm.multimodal.log_mel import MelConfig, Sound, mel_tables, read_mel_config
from edgellm.multimodal.sound_features import SoundFeatures

pytestmark = pytest.mark.gpu

TWIN = NumpySounds()
#: Of features that are float32 sums of products, those of powers after the bound by the loudest; natural logarithms of
#: magnitudes are furthest off where a band has but the bound beside loud ones: 1e-6 of these.
NEAR = {"whisper": 1e-4, "gemma4": 2e-3, "odd": 1e-4}
RANDOM = np.random.default_rng(6)
SOUNDS = {
    "speech": sound(61.0),
    "noise": RANDOM.standard_normal(61 * RATE).astype(np.float32) * np.float32(0.2),
    "tone": np.sin(2 * np.pi * 440 / RATE * np.arange(61 * RATE)).astype(np.float32),
    "whisper": RANDOM.standard_normal(61 * RATE).astype(np.float32) * np.float32(1e-4),
    "silence": np.zeros(61 * RATE, np.float32),
}


@pytest.fixture(scope="module")
def gpu() -> Iterator[Any]:
    """A CUDA context with a stream, and the kernels loaded into it."""
    from edgellm.kernels.launch import KernelModule
    from edgellm.kernels.sounds.launcher import CudaSounds

    with cuda_device() as device:
        device.sound_kernels = CudaSounds(KernelModule(device.gpu, device.stream))
        device.computes_at_once = False
        yield device


def single(tables: Any) -> Any:
    """Tables as GPUs take them."""
    return tables._replace(window=np.float32(tables.window), filters=np.float32(tables.filters))


def measured(gpu: Any, arguments: list[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Logarithms and maxima."""
    own = on_device(gpu, [*arguments[:3], single(arguments[3]), *arguments[4:]])
    gpu.sound_kernels.measure_sounds(*own)
    return gpu.download(own[4]), gpu.download(own[5])


@pytest.mark.parametrize("counts", [[1], [15], [16], [17, 100], [100] * 60], ids=str)
@pytest.mark.parametrize("kind", SOUNDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_frames_are_measured_as_the_twin_does(gpu: Any, family: str, kind: str, counts: list[int]) -> None:
    mel = FAMILIES[family]
    arguments = measuring(mel, SOUNDS[kind], counts)
    host = copied(arguments)
    TWIN.measure_sounds(*host)
    found, maxima = measured(gpu, arguments)
    expected, least = host[4], -np.inf if mel.frame else host[5].max() - 8
    there = ~np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(found), ~there)  # nothing else is written
    scale = 1 if mel.frame else 4
    difference = np.abs(np.maximum(found, least) - np.maximum(expected, least))[there].max() / scale
    print(f"{family} {kind} {len(counts)}: {difference:.2e}")
    assert difference < NEAR[family]
    np.testing.assert_array_equal(maxima.max(axis=1), np.nanmax(found[arguments[2]], axis=(1, 2)))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_frame_has_the_same_bits_wherever_it_is(gpu: Any, family: str) -> None:
    """In another place of its tile, its part and its call, whatever is beside it."""
    mel, samples = FAMILIES[family], SOUNDS["noise"]
    whole, _ = measured(gpu, measuring(mel, samples, [100, 100, 100]))
    for first, count in ((0, 1), (3, 40), (77, 9), (200, 100)):
        alone, _ = measured(gpu, measuring(mel, samples[first * mel.hop :], [count]))
        rows = [whole[2 - frame // 100, frame % 100] for frame in range(first, first + count)]
        np.testing.assert_array_equal(alone[0, :count], rows)


@pytest.mark.parametrize(("frames", "chunk", "floor"), [(1, 1, -9.0), (700, 100, -4.5), (233, 48, None), (0, 7, 1.0)])
def test_features_are_placed_as_the_twin_does(gpu: Any, frames: int, chunk: int, floor: float | None) -> None:
    logarithms = RANDOM.standard_normal((9, 100, 128)).astype(np.float32) * 5
    slots, size = np.int32([8, 0, 3, 3, 1, 7, 2]), -(-(frames + 5) // chunk) * chunk
    placing = Placing(frames, chunk, -np.inf if floor is None else floor, floor is not None)
    expected, target = np.zeros(size * 128, np.float32), gpu.zeros((size * 128,), "float32")
    TWIN.place_features(logarithms, slots, placing, expected)
    gpu.sound_kernels.place_features(device_copy(gpu, logarithms), device_copy(gpu, slots), placing, target)
    np.testing.assert_array_equal(gpu.download(target), expected)


def configs(name: str) -> tuple[MelConfig, AudioConfig]:
    from contextlib import closing

    from speech_models import CHECKPOINTS

    from edgellm.engines.checkpoints.checkpoint import Checkpoint
    from edgellm.engines.families.audio_encoders import read_audio

    with closing(Checkpoint.open(CHECKPOINTS[name])) as checkpoint:
        config = read_audio(checkpoint)
    return read_mel_config(CHECKPOINTS[name], config), config


@pytest.mark.parametrize("name", ["qwen3_asr", "voxtral", "qwen2_audio", "gemma4"])
def test_what_grew_has_the_bits_of_the_whole(gpu: Any, name: str) -> None:
    (mel, config), samples, growing = configs(name), sound(9.7), Sound(RATE)
    streamed = SoundFeatures(gpu, mel, config)
    for first in range(0, len(samples), 7777):
        growing = growing.followed_by(samples[first : first + 7777])
        digests = streamed.digests(growing.prepared(mel, config))
    piece = Sound(RATE, samples).prepared(mel, config)
    whole = SoundFeatures(gpu, mel, config)
    assert digests == whole.digests(piece)
    size = -(-config.window_frames // config.group_frames) * config.group_frames * config.mel_bins
    for number in range(len(piece.frames)):
        both = []
        for features, own in ((streamed, growing.prepared(mel, config)), (whole, piece)):
            target = gpu.zeros((size,), "float32")
            features.write(own, number, number + 1, target)
            both.append(gpu.download(target))
        np.testing.assert_array_equal(*both)


class HostSounds:
    """The twin in place of a backend's kernels: the host measures, in float64."""

    def __init__(self, backend: Any, mel: MelConfig) -> None:
        self._backend, self._tables = backend, mel_tables(mel)

    def measure_sounds(self, samples: Any, counts: Any, slots: Any, tables: Any, logarithms: Any, maxima: Any) -> None:
        read = self._backend.download
        own, most = read(logarithms), np.zeros(maxima.shape, np.float32)
        seen = self._backend.seen(samples).copy()
        TWIN.measure_sounds(seen, read(counts), read(slots), self._tables, own, most)
        self._backend.upload(logarithms, own)
        self._backend.synchronize()
        self._backend.seen(maxima)[...] = most

    def place_features(self, logarithms: Any, slots: Any, placing: Any, features: Any) -> None:
        target, read = np.zeros(features.shape, np.float32), self._backend.download
        TWIN.place_features(read(logarithms), read(slots), placing, target)
        self._backend.upload(features, target)


@pytest.mark.parametrize("name", ["qwen3_asr", "voxtral"])
def test_a_transcription_has_the_tokens_of_features_of_the_host(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines: Path = request.getfixturevalue("speech_engines" if name == "qwen3_asr" else f"{name}_engines")
    asked: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}
    samples, mel, tokens = sound(4.7), configs(name)[0], list[Any]()
    for on_host in (False, True):
        if on_host:
            kernels = cached_property(lambda backend: HostSounds(backend, mel))
            kernels.__set_name__(CudaBackend, "sound_kernels")
            monkeypatch.setattr(CudaBackend, "sound_kernels", kernels)
        with LLM(engines, backend="tensorrt", drafting=None) as llm:
            whole = llm.transcribe((samples, RATE), "en", **asked).response.token_ids
            stream = SpeechStream(llm, RATE, "en", **asked)
            for first in range(0, len(samples), RATE // 2):
                stream.hear(samples[first : first + RATE // 2])
            assert len(stream.finish().response.token_ids) >= len(whole)
            tokens.append((whole, stream.finish().response.token_ids))
    assert tokens[0] == tokens[1]


@pytest.mark.alone
@pytest.mark.parametrize("family", ["whisper", "gemma4"])
def test_a_minute_is_measured_faster_than_on_the_host(gpu: Any, family: str) -> None:
    mel = FAMILIES[family]
    arguments = measuring(mel, SOUNDS["noise"], [100] * 60)
    started = time.perf_counter()
    TWIN.measure_sounds(*copied(arguments))
    host = (time.perf_counter() - started) * 1e6
    own = on_device(gpu, [*arguments[:3], single(arguments[3]), *arguments[4:]])
    shape = 60, part_samples(mel.part, mel.hop, mel.size)
    visible = gpu.host_visible(shape, "float32")
    gpu.seen(visible)[...] = arguments[0]
    target = gpu.zeros((6000 * mel.bins,), "float32")
    placing = Placing(6000, 1 if mel.frame else 100, -4.0, not mel.frame)
    steps = {
        "samples on the device": lambda: gpu.sound_kernels.measure_sounds(*own),
        "samples on the host": lambda: gpu.sound_kernels.measure_sounds(visible, *own[1:]),
        "placed": lambda: gpu.sound_kernels.place_features(own[4], own[2], placing, target),
    }
    found = {name: microseconds(gpu, step, name) for name, step in steps.items()}
    print(f"{family}: host {host:.0f} us", {name: round(each, 1) for name, each in found.items()})
    assert found["samples on the host"] + found["placed"] < host / 4
