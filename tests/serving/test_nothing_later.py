"""After a model was opened nothing is compiled, loaded or captured for what it serves: on a GPU that is not there."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from absent_serving import ServingOnNothing, ranks_on_nothing
from every_kind import ALL_PARAMS, DRAFTINGS, PARAMS, TREE, answer_all, for_sequences
from packed_checkpoints import write_packed
from speech_models import CHECKPOINTS
from synthetic_sound import RATE, sound
from tiny_families import MIXTURES, RECURRENT, WINDOWED
from tiny_multimodal import FAMILIES

from edgellm import LLM, Request, SpecDecodeRuntime
from edgellm.engines.backends.encoder_engine import EncoderEngine
from edgellm.engines.backends.kernel_engine import KernelEngine
from edgellm.engines.backends.rank_memory import BY_NCCL
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.runners.media_inputs import MediaRows
from edgellm.kernels.made import CAPTURED
from edgellm.multimodal import prepared_image
from edgellm.multimodal.log_mel import Sound
from edgellm.opened_model import SHIPPED_MODEL
from edgellm.transcription import transcription_request


@pytest.fixture
def on_nothing(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[ServingOnNothing]]:
    """Lets models for so many sequences at a time be opened where nothing is computed; gives their backends."""

    def with_batch(batch: int) -> list[ServingOnNothing]:
        made: list[ServingOnNothing] = []

        def open_backend(name: str, directory: EngineDirectory, executor: str, *others: int | None) -> ServingOnNothing:
            made.append(ServingOnNothing(directory))
            return made[-1]

        for_sequences(batch, monkeypatch)
        monkeypatch.setattr("edgellm.opened_model.open_backend", open_backend)
        monkeypatch.setattr(MediaRows, "check", lambda *arguments: None)  # no image reaches its tokens
        return made

    return with_batch


@pytest.mark.parametrize("batch", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", DRAFTINGS)
def test_nothing_is_made_after_opening(name: str, batch: int, on_nothing: Callable[[int], list]) -> None:
    made = on_nothing(batch)
    with SpecDecodeRuntime(drafting=DRAFTINGS[name]) as runtime:
        (backend,) = made
        while batch > 1 and runtime.idle():
            pass
        before, captured = set(backend.module.sources), backend.made.counts[CAPTURED]
        assert captured > 5 and not runtime._runner.uncaptured
        while runtime.idle():  # prompts are prepared, but all of one sequence at a time is captured by now
            pass
        answer_all(runtime, batch)
        assert set(backend.module.sources) == before
        assert backend.made.counts[CAPTURED] == captured


@pytest.mark.parametrize(
    "name",
    [
        "tree",
        "lfm2_biases",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("packed", "qwen3_5", "nemotron_h_moe", "gemma4")),
    ],
)
def test_gpus_that_share_a_model_make_nothing_later(
    name: str,
    on_nothing: Callable[[int], list],
    make_checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Each has its weights and rows, and captures hold the steps of both; what moves rows moves those of all. One model
    by NCCL, where each is brought what its kernels read."""
    monkeypatch.setenv(BY_NCCL, "1" if name == "lfm2_biases" else "")
    model, drafting, limits = [tmp_path / "model"], DRAFTINGS["suffix"], EngineLimits(1, 128, 1024)
    if name == "tree":
        model, drafting = [], DRAFTINGS["tree"]
    elif name == "packed":
        checkpoint, _ = write_packed(SHIPPED_MODEL, tmp_path / "packed", tmp_path / "twin", None)
        drafting, limits = None, replace(limits, max_lora_rank=8, lora_slots=2)
    else:
        family = (WINDOWED | MIXTURES | RECURRENT)[name] | {"max_position_embeddings": 1024}
        checkpoint = make_checkpoint(tmp_path / "checkpoint", **family)
    if model:
        build_engine_directory(checkpoint, *model, limits, None, "bfloat16" if name == "gemma4" else "float16")
    made = on_nothing(2)
    opened: list[Any] = []

    def open_backend(name: str, directory: EngineDirectory, *others: object) -> Any:
        opened.append(ranks_on_nothing(directory, 2, monkeypatch))
        return opened[-1]

    monkeypatch.setattr("edgellm.opened_model.open_backend", open_backend)
    with LLM(*model, drafting=drafting, gpus=2) as llm:
        (backend,) = opened
        assert backend.gpus == 2 and not made
        before = [set(each.module.sources) for each in (backend, *backend.others)]
        assert all("ranks/sum.cu" in {file for source in own for file in source.files} for own in before)
        for params in ALL_PARAMS:
            assert len(llm.generate([5] * 20, params).token_ids) == 20
        streams = [llm.stream([7] * 30, PARAMS) for _ in range(3)]
        assert all(len(each.result().token_ids) == 20 for each in streams)
        llm.cache_system_prompt("You are a robot at a table. " * 4, save=tmp_path / "kept")
        llm.load_snapshot(tmp_path / "kept")
        assert [set(each.module.sources) for each in (backend, *backend.others)] == before


@pytest.mark.parametrize("name", [*CHECKPOINTS])
def test_nothing_is_made_for_a_sound_after_opening(
    name: str, on_nothing: Callable[[int], list], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Windows are encoded in one captured launch, and prompts of every size are prepared while nobody waits; the host
    waits for the first token, and before for the loudest of what is new where that matters, and takes no memory for the
    rows of a sound that goes on."""
    made, dtype = on_nothing(1), "bfloat16" if name == "gemma4" else "float16"
    limits = {"max_batch": 1, "prefill_chunk": 320, "kv_capacity": 512}
    build_engine_directory(CHECKPOINTS[name], tmp_path / "engines", limits, [], dtype)
    with SpecDecodeRuntime(tmp_path / "engines", drafting=None) as runtime:
        (backend,) = made
        while runtime.idle():
            pass
        prompts = [each for each in backend._engines if each.shape.phase == "prefill"]
        assert {each.shape.tokens for each in prompts} >= {16, 128, 192, 256, 320}
        before = len(backend._engines), set(backend.module.sources), backend.made.counts[CAPTURED]
        monkeypatch.setattr(KernelEngine, "_prepare", None)  # launches
        monkeypatch.setattr(EncoderEngine, "_launch", None)
        for seconds in (1.0, 2.5, 9.0):
            request = transcription_request(name, (sound(seconds), RATE), params=PARAMS)
            assert len(runtime.handle_request(request).token_ids) == 20
        assert (len(backend._engines), set(backend.module.sources), backend.made.counts[CAPTURED]) == before
        encoder: Any = runtime._media.by_name["audio"]
        spoken, cache = sound(9.0) / 50, encoder._cache
        spoken[:400] = np.random.default_rng(0).uniform(-1, 1, 400)  # the loudest: full windows stay as they are
        windows = len(Sound(RATE, spoken).prepared(encoder.mel, encoder.config).frames)
        cache.most = 3 * windows * cache._size_of(None)
        for turn in range(3):
            heard = Sound(RATE)
            for part in np.array_split(spoken / (1 + turn), 18):
                heard = heard.followed_by(part)
                request = transcription_request(name, heard, params=replace(PARAMS, max_tokens=1))
                waits, memory = backend.waits, backend._next
                assert len(runtime.handle_request(request).token_ids) == 1
                begins = name == "voxtral_realtime" and heard.count == len(part)  # in two runs, with silence before
                assert backend.waits == waits + (1 if name in ("gemma4", "voxtral_realtime") and not begins else 2)
                assert turn < 2 or backend._next == memory


def test_prompts_of_other_slots_find_their_launches(
    on_nothing: Callable[[int], list], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once each slot had a prompt of a size; for other weights, and other memory, they are prepared anew."""
    on_nothing(3)
    with SpecDecodeRuntime(drafting=None) as runtime:
        base = runtime._runner.base
        shape = base.limits.base_shape("prefill", 1, base.limits.prefill_chunks[0], base.limits.key_ranges[-1])
        slots = [slice(slot, slot + 1) for slot in range(3)]
        first: list[Any] = [base._engine(shape, slot).launches() for slot in slots]
        assert len({id(launches[0]) for launches in first}) == 3
        with monkeypatch.context() as changed:
            changed.setattr(KernelEngine, "_prepare", None)
            assert [base._engine(shape, slot).launches() for slot in slots] == first
        engine: Any = base._engine(shape, slots[0])
        engine.bind({"logits": replace(engine._bound["logits"])})
        assert base._engine(shape, slots[1]).launches()[0] is not first[1][0]


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
def test_nothing_is_made_for_an_image_after_opening(
    family: str,
    on_nothing: Callable[[int], list],
    make_checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Images of every size are encoded in one captured launch, which nothing waits for, and frames take the memory of
    those that are not kept any more. The digest of one that nobody saw is computed behind its launch."""
    made, checkpoint = on_nothing(1), make_checkpoint(tmp_path / "checkpoint", 3, **FAMILIES[family])
    limits = EngineLimits(1, prefill_chunk=64, kv_capacity=128, image_rows=(64, 128))
    build_engine_directory(checkpoint, tmp_path / "engines", limits, [])
    with SpecDecodeRuntime(tmp_path / "engines", drafting=None) as runtime:
        (backend,) = made
        while runtime.idle():
            pass
        runner: Any = runtime._media.by_name["image"]._runner
        runner.cache.most = 3 * runner._buffers["image_embeddings"].nbytes
        captured, before = backend.made.counts[CAPTURED], (set[Any](), 0)
        with monkeypatch.context() as changed:
            changed.setattr(EncoderEngine, "_launch", None)
            changed.setattr(EncoderEngine, "enqueue", None)
            digest, run = prepared_image.image_digest, runner._steps.run
            order: list[str] = []
            changed.setattr(prepared_image, "image_digest", lambda *given: order.append("digest") or digest(*given))
            changed.setattr(runner._steps, "run", lambda *given: order.append("encoder") or run(*given))
            for turn in range(12):
                if turn == 9:  # sizes are known, and what was kept of frames is full
                    before = set(backend.module.sources), backend._next
                for size in ((40, 30), (60, 50)):
                    image = np.full((*size, 3), turn, np.uint8)
                    shown = [{"type": "image", "image": image}, {"type": "text", "text": "What is this?"}]
                    waits, params = backend.waits, PARAMS if turn < 9 else replace(PARAMS, max_tokens=1)
                    runtime.handle_request(Request(messages=[{"role": "user", "content": shown}], params=params))
                    assert turn < 9 or backend.waits == waits + 1  # for the first token
            assert order == ["encoder", "digest"] * 24
        assert backend.made.counts[CAPTURED] == captured
        assert (set(backend.module.sources), backend._next) == before


def test_rows_that_the_host_brings_are_no_part_of_captures(
    on_nothing: Callable[[int], list], make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Gemma 4's tokens are read, and their rows brought, between captures of steps and of rounds."""
    made, checkpoint = on_nothing(1), make_checkpoint(tmp_path / "model", 4, **WINDOWED["gemma4"])
    limits = EngineLimits(1, prefill_chunk=16, kv_capacity=256, window_rows=128)
    build_engine_directory(checkpoint, tmp_path / "engines", limits, [], "bfloat16")
    with LLM(tmp_path / "engines", drafting=DRAFTINGS["suffix"]) as llm:
        (backend,) = made
        before, captured = set(backend.module.sources), backend.made.counts[CAPTURED]
        assert captured and not llm._runtime._runner.uncaptured
        assert any("columns.cu" in file for source in before for file in source.files)
        for length, params in product((1, 20, 65), ALL_PARAMS):
            assert len(llm.generate([5] * length, params).token_ids) == 20
        assert set(backend.module.sources) == before
        assert backend.made.counts[CAPTURED] == captured


def test_what_is_left_is_captured_while_nobody_waits(
    on_nothing: Callable[[int], list], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then it runs as it is; requests come first."""
    monkeypatch.setattr("edgellm.opened_model.CAPTURED_AT_ONCE", 3)
    made = on_nothing(1)
    with LLM(drafting=TREE) as llm:
        (backend,) = made
        assert len(llm.generate([5, 6], PARAMS).token_ids) == 20
        until = time.monotonic() + 30
        steps = [llm._runtime._runner.base.steps, llm._runtime._runner._steps]
        while any(each.planned for each in steps) and time.monotonic() < until:
            time.sleep(0.01)
        until_then = backend.made.counts[CAPTURED]  # the last one may be under way: a request comes behind it
        assert until_then > 50 and not any(each.planned for each in steps)
        for _ in range(2):
            assert len(llm.generate([5, 6], PARAMS).token_ids) == 20
            captured, until_then = until_then, backend.made.counts[CAPTURED]
            assert until_then - captured in (0, 1)
        assert until_then == captured
