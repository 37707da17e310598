"""Videos of Qwen's families against transformers: prompts, positions and the logits of every prefix, and how they are
shown."""

from __future__ import annotations

import base64
import io
import json
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_files import golden_folder
from http_server import running
from safetensors.numpy import load_file
from synthetic_sound import places
from synthetic_video import FILES, PROMPT, QUESTION, RESIZED, SIZES, SPARSE, VIDEOS, image, timed, video

from edgellm import LLM, Request
from edgellm.built import read_built
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.runners.media import PromptMedia
from edgellm.engines.runners.sampling_state import SamplingValues
from edgellm.errors import EdgeLLMError, ImageError, MediaError, RequestError
from edgellm.multimodal.video import VideoProcessor
from edgellm.text.messages import MediaReference

FOLDER = golden_folder("video")
CLIPS = [timed(*sizes) for sizes in VIDEOS]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}


@cache
def expected_of(family: str) -> dict[str, np.ndarray]:
    return load_file(FOLDER / family / "expected.safetensors")


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def engines(request: pytest.FixtureRequest, video_engines: Callable[[str], Path]) -> Path:
    return video_engines(request.param)


@pytest.fixture(scope="module")
def llm(engines: Path) -> Iterator[LLM]:
    with LLM(engines, backend="numpy", drafting=None) as opened:
        yield opened


@pytest.fixture(scope="module")
def processor(llm: LLM) -> VideoProcessor:
    return replace(llm._runtime._media.encoder("video").processor, max_patches=1 << 20)


def shown(source: Any) -> dict[str, Any]:
    return {"type": "video", "video": source}


def message(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts, {"type": "text", "text": QUESTION}]}]


def mp4(frames: np.ndarray, rate: int) -> bytes:
    """A file of frames, as they are but for the coding's losses."""
    av = pytest.importorskip("av")
    content = io.BytesIO()
    with av.open(content, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=rate)
        stream.height, stream.width, stream.pix_fmt = *frames.shape[1:3], "yuv420p"
        stream.bit_rate = 4_000_000
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return content.getvalue()


def before(media: PromptMedia, stop: int) -> PromptMedia:
    """What stands before a token, which may be in the middle of a span."""
    spans = []
    for span, _, count in media.within(0, stop):
        deepstack = tuple(layer[:count] for layer in span.embeddings.deepstack)
        seen = replace(span.embeddings, rows=span.embeddings.rows[:count], deepstack=deepstack)
        spans.append(replace(span, places=span.places[:count], embeddings=seen))
    assert media.positions is not None
    return PromptMedia(tuple(spans), media.positions[:, :stop])


def goes_on(runtime: Any, request: Request) -> bool:
    """Whether an answer's tokens stand where those of a longer prompt would."""
    pieces = runtime._media.prepare([MediaReference(each, False, "RGB", "clip", "video") for each in request.video])
    return runtime._media.encode(runtime.prompt_ids(request), pieces).goes_on


def test_all_is_as_transformers_has_it(llm: LLM, engines: Path) -> None:
    expected = expected_of(engines.name)
    ids, parts = expected["token_ids"].tolist(), [shown(CLIPS[0]), {"type": "image", "image": image()}, shown(CLIPS[1])]
    prompt = Request(PROMPT, images=[image()], video=CLIPS)
    for request in (prompt, Request(messages=message(*parts))):
        assert llm._runtime.prompt_ids(request) == ids

    def compute(runtime: Any) -> tuple[PromptMedia, np.ndarray]:
        runner, media = runtime._runner.base, runtime._media
        kinds = [("image", image()), *(("video", clip) for clip in CLIPS)]
        placed = media.encode(
            ids, media.prepare([MediaReference(each, False, "RGB", kind, kind) for kind, each in kinds])
        )
        found = []
        for stop in range(1, len(ids) + 1):
            runner.start(0, ids[:stop], stop - 1, SamplingValues(), before(placed, stop)).wait()
            found.append(runner.logits(0).copy())
        return placed, np.stack(found)

    placed, logits = llm.call(compute).result()
    np.testing.assert_array_equal(placed.positions, expected["positions"])
    stored = np.take_along_axis(logits, places(*logits.shape), axis=1)
    np.testing.assert_allclose(stored, expected["logits"], atol=2e-5 * np.abs(logits).max())


def test_frames_are_taken_and_resized_as_published(processor: VideoProcessor, engines: Path) -> None:
    expected = expected_of(engines.name)
    found = [processor.places(*file) for file in FILES]
    assert [len(each) for each in found] == expected["counts"].tolist()
    np.testing.assert_array_equal(np.concatenate(found), expected["sampled"])
    assert [list(processor.size(*each)) for each in SIZES] == expected["sizes"].tolist()
    patches = np.concatenate([part.patches for part in processor.prepare(timed(*RESIZED)).tiles])
    step = 1 / 255 / min(processor.frames.normalization.standard_deviation or ())
    difference = np.abs(patches.flatten()[::SPARSE] - expected["patches"])
    assert difference.max() <= 2.01 * step  # torchvision's weights have fewer bits than Pillow's
    assert difference.mean() <= 0.25 * step


def test_a_video_that_grows_is_encoded_and_computed_where_it_is_new(llm: LLM) -> None:
    clip = [(seconds, frame[::-1]) for seconds, frame in timed(8, 16, 16, 2.0)]
    encoded = []
    for count in (4, 6, 7, 8):
        before_it = llm.metrics()["multimodal"]
        response = llm.chat(message(shown(clip[:count])), **GREEDY)
        now = llm.metrics()["multimodal"]
        encoded.append(now["images"] - now["reused_images"] - before_it["images"] + before_it["reused_images"])
    assert encoded == [2, 1, 1, 1]  # the last part of seven frames has its last frame twice
    if "3_5" not in str(llm):  # whose short prompts leave no state to go on from
        assert response.usage.reused_tokens >= 3 * 4


def test_a_batch_and_prompts_that_go_on_are_those_alone(llm: LLM, engines: Path) -> None:
    """Also behind a video whose time goes on for longer than the text after it."""
    slow = timed(4, 16, 24, 0.5)
    requests = [Request.of(PROMPT, images=[image()], video=CLIPS, **GREEDY)]
    marker = "<|vision_start|><|video_pad|>"
    requests += [Request.of("a" * 60 + marker, video=[slow], **GREEDY)]
    alone = [llm.submit(each).result() for each in requests]
    assert [each.token_ids for each in llm.handle(requests)] == [each.token_ids for each in alone]  # type: ignore[union-attr]
    if engines.name != "qwen2_5_vl":
        return
    assert not llm.call(lambda runtime: goes_on(runtime, requests[1])).result()
    words = llm._runtime.prompt_ids(Request("a" * 60))
    again = replace(requests[1], prompt=[*words, 258, 261, *alone[1].token_ids, 3])
    with LLM(engines, backend="numpy", drafting=None) as fresh:
        expected = fresh.submit(again).result()
    found = llm.submit(again).result()
    assert found.token_ids == expected.token_ids
    assert 0 < found.usage.reused_tokens <= alone[1].usage.prompt_tokens


def test_every_form_of_a_file_is_the_same_prompt(llm: LLM, tmp_path: Path) -> None:
    data = mp4(video(24, 16, 16), 12)
    path = tmp_path / "clip.mp4"
    path.write_bytes(data)
    url = "data:video/mp4;base64," + base64.b64encode(data).decode()
    forms = [shown(path), shown(data), shown(str(path)), {"type": "video_url", "video_url": {"url": url}}]
    answers = [llm.chat(message(form), **GREEDY) for form in forms]
    assert len({(each.token_ids, each.usage.prompt_tokens) for each in answers}) == 1
    if "3_5" not in str(llm):  # whose short prompts leave no state to go on from
        assert answers[-1].usage.reused_tokens == answers[0].usage.prompt_tokens - 1
    prepared = llm._runtime._media.encoder("video").prepare(MediaReference(data, False, "RGB", "clip", "video"))
    assert len(prepared.tiles) == 2 and prepared.interval == 1.0  # two frames a second, four of them
    sampled = [place / 12 for place in (0, 8, 15, 23)]
    if not llm._runtime._media.encoder("video")._vision.tokens_per_second:
        assert prepared.seconds == tuple((a + b) / 2 for a, b in zip(sampled[::2], sampled[1::2], strict=True))


def test_openais_client_shows_a_file(llm: LLM, engines: Path) -> None:
    if engines.name != "qwen3_vl":
        return
    data = mp4(video(24, 16, 16), 12)
    part: Any = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64," + base64.b64encode(data).decode()}}
    asked: dict[str, Any] = {"model": "qwen3_vl", "temperature": 0, "max_tokens": 6}
    with running("--model", engines) as server:
        found = server.client().chat.completions.create(messages=message(part), **asked)
        asked["max_output_tokens"] = asked.pop("max_tokens")
        created = server.client().responses.create(input=message(part), **asked)
    expected = llm.chat(message(shown(data)), temperature=0, max_tokens=6)
    assert found.choices[0].message.content == created.output_text == expected.text
    assert found.usage.prompt_tokens == expected.usage.prompt_tokens


def test_what_is_wrong_is_said(llm: LLM, engines: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frame = video(1, 16, 16)[0]
    wrong: list[tuple[Any, str]] = [
        ([], "a video is empty: expected a path"),
        (np.stack([frame, frame]), "a video is a ndarray: expected a path"),
        ([(math.nan, frame)], "a video is a list: expected a path"),
        ([frame, frame], r"pairs \(seconds, image\)"),
        ([(1.0, frame), (0.5, frame)], "not in order"),
        ([(0.0, frame), (0.5, frame[:8])], "a frame of the video has 16 x 8 pixels"),
        ([(0.0, frame), (0.5, "none")], "none cannot be read"),
    ]
    times = np.float32([0.0, 0.5]), [0.0, 0.5]
    first, second = (llm.count_tokens(message(shown([(each, frame) for each in own]))) for own in times)
    assert first == second
    for source, expected in wrong:
        with pytest.raises(ImageError, match=rf"part 1 of message 1 .*{expected}"):
            llm.chat(message(shown(source)), **GREEDY)
    with pytest.raises(
        EdgeLLMError, match=r"(600 tokens, 4 for each 2 of 300 frames: the context holds|the context) 320"
    ):
        llm.chat(message(shown(timed(300, 16, 16, 2.0))), **GREEDY)
    with pytest.raises(MediaError, match="the prompt has 2 video markers"):
        llm.generate(PROMPT, images=[image()], video=CLIPS[:1] * 3)
    with pytest.raises(RequestError, match="has its video in its messages"):
        llm.submit(Request.of(messages=message(), video=CLIPS)).result()
    monkeypatch.setitem(__import__("sys").modules, "av", None)
    with pytest.raises(ImageError, match="pip install av"):
        llm.chat(message(shown(b"no video")), **GREEDY)
    assert not read_built(engines)


def test_a_file_of_another_kind_is_an_error_of_videos_alone(engines: Path, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    shutil.copytree(FOLDER / engines.name, path)
    (path / "processor_config.json").rename(path / "preprocessor_config.json")
    settings = json.loads((path / "preprocessor_config.json").read_text())
    (path / "preprocessor_config.json").write_text(json.dumps(settings["image_processor"]))
    video_file = path / "video_preprocessor_config.json"
    video_file.write_text(json.dumps(settings["video_processor"] | {"cap_pixels_per_frame": True}))
    build_engine_directory(path, tmp_path / "engines", EngineLimits(1, 32, 320, image_rows=(64,)), [])
    said = "video_preprocessor_config.json: cap_pixels_per_frame is true, supported is false"
    with LLM(tmp_path / "engines", backend="numpy", drafting=None) as llm:
        picture = llm.chat(message({"type": "image", "image": image()}), **GREEDY)
        assert picture.usage.prompt_tokens
        with pytest.raises(EdgeLLMError, match=said):
            llm.chat(message(shown(CLIPS[0])), **GREEDY)


def test_hostile_files_are_refused(llm: LLM) -> None:
    pytest.importorskip("av")
    playlist = b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nfile:///etc/hostname\n#EXT-X-ENDLIST\n"
    good = mp4(video(24, 16, 16), 12)
    for data in (playlist, b"", b"RIFF", good[: len(good) // 2], good[::-1]):
        with pytest.raises(ImageError, match="is damaged"):
            llm.chat(message(shown(data)), **GREEDY)
