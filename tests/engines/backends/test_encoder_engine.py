"""Engines of vision encoders on the kernels' twins give what NumPy's operations, and transformers, give."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from encoder_models import (
    MODELS,
    REFUSED,
    SPEECH_MODELS,
    EncoderBackend,
    expected_outputs,
    grids_of,
    lengths_of,
    padded_arrays,
    padded_weight,
    random_encoder,
    random_speech,
    shape_of,
    twin_engine,
)
from golden_vision import NAMES, golden_directory, golden_images, open_vision, relative_difference
from kernel_refusals import kernel_refusal

from edgellm.engines.backends.encoder_calls import EncoderCalls
from edgellm.engines.backends.padded_weights import Padding, padded_weights
from edgellm.engines.backends.steps.table import refused_steps
from edgellm.engines.errors import EngineError
from edgellm.engines.families.programs import model_program
from edgellm.engines.model.encoder_steps import EncoderAttention
from edgellm.engines.model.limits import audio_shape, vision_shape
from edgellm.engines.model.steps import LinearResidual, NormLinear, Scale, Step

_MOST_SHARED = 99 << 10


@pytest.mark.parametrize(("larger", "rounds"), [(False, True), (True, True), (True, False)])
@pytest.mark.parametrize("name", MODELS)
def test_equals_operations(name: str, larger: bool, rounds: bool) -> None:
    config = MODELS[name]
    for grid in grids_of(config):
        shape = shape_of(config, grid, larger)
        arrays = random_encoder(config, grid, shape)
        expected, engine = expected_outputs(config, shape, arrays), twin_engine(config, shape, rounds)
        found = {output: np.full(values.shape, np.nan, np.float32) for output, values in expected.items()}
        engine.bind(padded_arrays(engine, arrays) | found)
        for _ in range(2):
            engine.enqueue()
        tokens = config.token_count(grid)
        for output, values in expected.items():
            scale = np.abs(values[0, :tokens]).max()
            np.testing.assert_allclose(found[output][0, :tokens], values[0, :tokens], atol=2e-5 * scale, err_msg=output)
            assert np.isfinite(found[output]).all()


@pytest.mark.parametrize("rounds", [True, False])
@pytest.mark.parametrize("name", SPEECH_MODELS)
def test_speech_equals_operations_in_the_engine_of_a_whole_window(name: str, rounds: bool) -> None:
    config = SPEECH_MODELS[name]
    for frames in lengths_of(config):
        expected = expected_outputs(config, *random_speech(config, frames, whole=False))["audio_embeddings"]
        shape, arrays = random_speech(config, frames, whole=True)
        engine = twin_engine(config, shape, rounds)
        found = np.full(model_program(config, shape).outputs["audio_embeddings"][0], np.nan, np.float32)
        engine.bind(padded_arrays(engine, arrays) | {"audio_embeddings": found})
        engine.enqueue()
        rows = config.rows(frames)
        scale = np.abs(expected[0, :rows]).max()
        np.testing.assert_allclose(found[0, :rows], expected[0, :rows], atol=2e-5 * scale)
        assert kernel_refusal(config, shape, "float16", _MOST_SHARED) is None


@pytest.mark.parametrize("name", NAMES)
def test_embeddings_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    directory, images = golden_directory(name, tmp_path / "engines"), golden_images(name)
    assert directory.vision is not None
    runner = open_vision(EncoderBackend(directory.vision.config, directory.config), directory)
    for image, found in zip(images, runner.encode(images), strict=True):
        for rows, expected in [(found.rows, image.embeddings), *zip(found.deepstack, image.deepstack, strict=True)]:
            assert isinstance(rows, np.ndarray) and relative_difference(rows, expected) <= 1e-4
    runner.close()


def test_another_image_needs_few_launches_anew() -> None:
    """Of a mask and rotary rows, not of weights."""
    config = MODELS["qwen3_vl"]
    shape = vision_shape(128)
    engine, grids = twin_engine(config, shape), grids_of(config)
    first = padded_arrays(engine, random_encoder(config, grids[0], shape))
    outputs = {name: np.zeros(size, np.float32) for name, (size, _) in model_program(config, shape).outputs.items()}
    engine.bind(first | outputs)
    engine.enqueue()
    before = list(engine._launches)
    second = random_encoder(config, grids[2], shape)
    inputs = ("patches", "rotary_cos_sin", "attention_mask", "position_embeddings")
    engine.bind({name: second[name] for name in inputs})
    engine.enqueue()
    kept = sum(one is other for one, other in zip(before, engine._launches, strict=True))
    assert len(before) - kept == 2 + 2 * config.num_layers  # patches, positions; heads and attention of each layer
    expected = expected_outputs(config, shape, second)["image_embeddings"]
    tokens = config.token_count(grids[2])
    np.testing.assert_allclose(outputs["image_embeddings"][0, :tokens], expected[0, :tokens], atol=1e-4)


def test_what_is_not_bound_or_too_small_is_refused() -> None:
    config = MODELS["llava_siglip"]
    shape = shape_of(config, grids_of(config)[0])
    engine = twin_engine(config, shape)
    assert {"patches", "image_embeddings"} <= set(engine.tensors)
    with pytest.raises(EngineError, match="never bound: image_embeddings, multi_modal"):
        engine.enqueue()
    with pytest.raises(EngineError, match=r"patch_embedding.weight is float32 \(32, 75\), the engine expects float32"):
        engine.bind(random_encoder(config, grids_of(config)[0], shape))
    with pytest.raises(EngineError, match="bytes of scratch, got 64"):
        engine.attach(None, np.zeros(64, np.uint8))


@pytest.mark.parametrize("name", MODELS)
def test_buffers_share_memory_where_nothing_reads_them_any_more(name: str) -> None:
    config = replace(MODELS[name], num_layers=12, feature_layers=(12,) if MODELS[name].feature_layers else ())
    config = replace(config, deepstack_layers=(), full_attention_layers=(3,) if config.window_size else ())
    lowered = EncoderCalls(model_program(config, shape_of(config, grids_of(config)[0])))
    alive: dict[int, list[int]] = {}
    for number, call in enumerate(lowered.calls):
        for buffer in call.memory:
            if isinstance(buffer, int):
                alive.setdefault(buffer, []).append(number)
    sizes = lowered._sizes
    for one, used in alive.items():
        for other, others in alive.items():
            if one < other and used[0] <= others[-1] and others[0] <= used[-1]:
                apart = [lowered.places[each] for each in (one, other)]
                assert apart[0] + sizes[one] <= apart[1] or apart[1] + sizes[other] <= apart[0]
    assert all(place % 256 == 0 for place in lowered.places)
    ends = [place + -(-size // 256) * 256 for place, size in zip(lowered.places, sizes, strict=True)]
    assert lowered.nbytes == max(ends)
    assert lowered.nbytes < sum(sizes) / 3


def test_every_family_is_taken_in_two_dtypes() -> None:
    for config in MODELS.values():
        shape = shape_of(config, grids_of(config)[0])
        assert {kernel_refusal(config, shape, dtype, _MOST_SHARED) for dtype in ("float16", "bfloat16")} == {None}
        assert kernel_refusal(config, shape, "float32", _MOST_SHARED) == (
            "kernels compute in float16 and bfloat16, not float32"
        )


def _changed(index: int, **changes: Any) -> Callable[[tuple[Step, ...]], tuple[Step, ...]]:
    """A program's steps with a parameter of one of them changed."""
    return lambda steps: (*steps[:index], replace(steps[index], **changes), *steps[index + 1 :])


def test_what_no_kernel_does_is_refused_by_name() -> None:
    config = MODELS["qwen3_vl"]
    program = model_program(config, vision_shape(64))
    kinds = [type(step) for step in program.steps]
    attention, residual, linear = (kinds.index(kind) for kind in (EncoderAttention, LinearResidual, NormLinear))
    gated = next(n for n, step in enumerate(program.steps) if isinstance(step, NormLinear) and step.activation)
    cases = [
        (_changed(attention, head_size=12), "multiples of 8), not 12"),
        (_changed(attention, head_size=256), "head sizes up to 128"),
        (_changed(attention, windows=(1, 1 << 20)), "bytes of shared memory, a block has"),
        (_changed(residual, selects=True), "encoders keep and choose no rows"),
        (_changed(linear, selects=True), "encoders keep and choose no rows"),
        (_changed(gated, activation="sigmoid"), "the activation sigmoid has no kernel"),
        (_changed(gated, gated=True, activation="gelu"), "the activation gelu has no kernel with a gate"),
        (lambda steps: (Scale("hidden", "hidden", 2.0), *steps), "encoders have no kernel for it"),
    ]
    for change, message in cases:
        refused = refused_steps(replace(program, steps=change(program.steps)), _MOST_SHARED)
        assert any(message in reason for reason in refused.values()), message
    hears = SPEECH_MODELS["gemma4"]
    for changes, message in (
        ({"past": 33}, "up to 32 rows and heads of 128, not 33 and 16"),
        ({"second_channels": 136}, "136 channels, up to 128"),
        ({"chunk_frames": 4096}, "places, up to 65536"),
    ):
        loud = replace(hears, **changes)
        assert message in str(kernel_refusal(loud, audio_shape(loud.run_rows), "float16", _MOST_SHARED))
    for name, message in (
        ("qwen3_vl_widths", "widths must be multiples of 8, not 36"),
        ("outputs", "widths must be multiples of 8, not 20"),
        ("norms", "norms of queries and keys have no kernel"),
    ):
        assert message in str(kernel_refusal(REFUSED[name], vision_shape(64), "float16", _MOST_SHARED))
    many = vision_shape(65_540)
    assert kernel_refusal(config, many, "float16", 227 << 10) == "kernels take up to 65536 rows, not 65540"


@pytest.mark.parametrize("padding", [Padding(6, 5, 1), Padding(6, 5, 2), Padding(16, 8, 2), Padding(10, None, 2)])
@pytest.mark.parametrize("step", [1, 3, 5, 7, 30, 1000])
def test_pieces_of_a_weight_come_where_they_belong(padding: Padding, step: int) -> None:
    columns = padding.columns or 1
    published = np.arange(1, padding.rows * columns + 1, dtype=np.float32)
    found = np.zeros(padding.shape, np.float32)
    for first in range(0, published.size, step):
        for begin, piece in padding.pieces(first, published[first : first + step]):
            found.reshape(-1)[begin : begin + piece.size] = piece
    rows = published.reshape(padding.parts, -1, columns)
    whole = found.reshape(padding.parts, -1, 1 if padding.columns is None else found.shape[1])
    np.testing.assert_array_equal(whole[:, : rows.shape[1], :columns], rows)
    assert found.sum() == published.sum() and padding.zeros == found.size - published.size
    np.testing.assert_array_equal(padded_weight(padding, published), found)


def test_weights_of_published_encoders_that_are_padded() -> None:
    """Gates and ups of 3,420 each, and the patches of CLIP and SigLIP, 588 elements."""
    qwen = replace(
        MODELS["qwen2_5_vl"],
        hidden_size=1280,
        num_heads=16,
        intermediate_size=3420,
        patch_size=14,
        num_layers=1,
        window_size=112,
    )
    found = {name: padding.shape for name, padding in padded_weights(model_program(qwen, vision_shape(64))).items()}
    assert sorted(found.values()) == [(1280, 3424), (6848,), (6848, 1280)]
    clip = replace(MODELS["llava_clip"], hidden_size=1024, num_heads=16, patch_size=14, image_size=28)
    clip = replace(clip, intermediate_size=4096, out_hidden_size=4096)
    shapes = [each.shape for each in padded_weights(model_program(clip, vision_shape(4))).values()]
    assert shapes == [(1024, 592)]
    assert math.prod(shapes[0]) % 8 == 0
