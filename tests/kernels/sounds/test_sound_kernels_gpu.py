"""The CUDA kernels of sounds equal their NumPy twins, and models hear what they hear of features of the host. Needs a
GPU and pycuda."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu_device import assert_equals_twin, copied, cuda_device, on_device
from gpu_timing import microseconds
from sound_arguments import FAMILIES, measuring
from speech_models import CHECKPOINTS, mel_of
from synthetic_sound import RATE, sound

from edgellm import LLM
from edgellm.engines.backends.numpy_backend import NumpyBackend
from edgellm.kernels.sounds.contract import Placing
from edgellm.kernels.sounds.twin import NumpySounds
from edgellm.multimodal.log_mel import Sound
from edgellm.multimodal.sound_features import SoundFeatures

pytestmark = pytest.mark.gpu

TWIN, RANDOM = NumpySounds(), np.random.default_rng(6)
#: Of features; Gemma 4's have no bound by the loudest: bands that are silent beside loud ones are furthest off.
NEAR = {"whisper": 1e-4, "gemma4": 2e-3}
SOUNDS = {
    "speech": sound(61.0),
    "noise": RANDOM.standard_normal(61 * RATE).astype(np.float32) * np.float32(0.2),
    "tone": np.sin(2 * np.pi * 440 / RATE * np.arange(61 * RATE)).astype(np.float32),
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


def of_device(gpu: Any, arguments: list[Any]) -> list[Any]:
    tables = arguments[3]
    tables = tables._replace(window=np.float32(tables.window), filters=np.float32(tables.filters))
    return on_device(gpu, [*arguments[:3], tables, *arguments[4:]])


@pytest.mark.parametrize("counts", [[1], [16], [17, 100], [100] * 60], ids=str)
@pytest.mark.parametrize("kind", SOUNDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_frames_are_measured_as_the_twin_does(gpu: Any, family: str, kind: str, counts: list[int]) -> None:
    mel = FAMILIES[family]
    arguments = measuring(mel, SOUNDS[kind], counts)
    device, host = of_device(gpu, arguments), copied(arguments)
    gpu.sound_kernels.measure_sounds(*device)
    TWIN.measure_sounds(*host)
    (found, maxima), expected = map(gpu.download, device[4:]), host[4]
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))  # nothing else is written
    np.testing.assert_array_equal(maxima.max(axis=1), np.nanmax(found[arguments[2]], axis=(1, 2)))
    least, scale = (-np.inf, 1) if mel.frame else (host[5].max() - 8, 4)
    difference = np.nanmax(np.abs(np.maximum(found, least) - np.maximum(expected, least))) / scale
    print(f"{family} {kind} {len(counts)}: {difference:.2e}")
    assert difference < NEAR[family]


@pytest.mark.parametrize("placing", [(1, 1, -9.0, True), (700, 100, -4.5, True), (233, 48, 0.0, False)], ids=str)
def test_features_are_placed_as_the_twin_does(gpu: Any, placing: tuple) -> None:
    logarithms = RANDOM.standard_normal((9, 100, 128)).astype(np.float32) * 5
    target = np.full((-(-(placing[0] + 5) // placing[1]) * placing[1] * 128,), np.nan, np.float32)
    slots = np.int32([8, 0, 3, 3, 1, 7, 2])
    assert_equals_twin(gpu, gpu.sound_kernels, TWIN, "place_features", logarithms, slots, Placing(*placing), target)


@pytest.mark.parametrize("name", [*CHECKPOINTS])
def test_what_grew_has_the_bits_of_the_whole(gpu: Any, name: str) -> None:
    (mel, config), samples, growing, found = mel_of(name), sound(9.7), Sound(RATE), list[np.ndarray]()
    streamed, whole = (SoundFeatures(gpu, mel, config) for _ in range(2))
    for first in range(0, len(samples), 7777):
        growing = growing.followed_by(samples[first : first + 7777])
        digests = streamed.digests(growing.prepared(mel, config))
    assert digests == whole.digests(Sound(RATE, samples).prepared(mel, config))
    for features, heard in ((streamed, growing), (whole, Sound(RATE, samples))):
        piece = heard.prepared(mel, config)
        target = gpu.zeros((len(digests), config.window_frames * config.mel_bins), "float32")
        for number in range(len(digests)):
            features.write(piece, number, number + 1, target[number : number + 1])
        found.append(gpu.download(target))
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("name", ["qwen3_asr", "voxtral"])
def test_a_transcription_has_the_tokens_of_features_of_the_host(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines: Path = request.getfixturevalue("speech_engines" if name == "qwen3_asr" else f"{name}_engines")
    numpy: Any = NumpyBackend(None)  # type: ignore[arg-type]
    on_host, own, tokens = SoundFeatures(numpy, *mel_of(name)), SoundFeatures.write, list[Any]()

    def write(self: SoundFeatures, piece: Any, first: int, last: int, target: Any) -> None:
        values = np.zeros(target.shape, np.float32)
        own(on_host, piece, first, last, values)
        self._backend.upload(target, values)

    for _ in range(2):
        with LLM(engines, backend="tensorrt", drafting=None) as llm:
            found = llm.transcribe((sound(4.7), RATE), "en", max_tokens=12, ignore_eos=True)
            tokens.append(found.response.token_ids)
        monkeypatch.setattr(SoundFeatures, "write", write)
    assert tokens[0] == tokens[1]


@pytest.mark.alone
@pytest.mark.parametrize("family", FAMILIES)
def test_a_minute_is_measured_faster_than_on_the_host(gpu: Any, family: str) -> None:
    arguments = measuring(FAMILIES[family], SOUNDS["noise"], [100] * 60)
    started = time.perf_counter()
    TWIN.measure_sounds(*copied(arguments))
    host, own = (time.perf_counter() - started) * 1e6, of_device(gpu, arguments)
    seen = gpu.host_visible(own[0].shape, "float32")
    gpu.seen(seen)[...] = arguments[0]
    found = {
        name: microseconds(gpu, lambda samples=samples: gpu.sound_kernels.measure_sounds(samples, *own[1:]), name)
        for name, samples in (("samples of the device", own[0]), ("samples of the host", seen))
    }
    print(f"{family}: host {host:.0f} us, {found}")
    assert found["samples of the host"] < host / 4
