"""Engines of vision encoders on the GPU: against NumPy in float32, the same bits in larger engines, and the goldens."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decode_models import LLAMA
from device_bits import from_bits, relative, rounded, to_bits
from encoder_models import (
    MODELS,
    REFUSED,
    SPEECH_MODELS,
    expected_outputs,
    grids_of,
    lengths_of,
    padded_arrays,
    placed,
    random_encoder,
    random_speech,
    shape_of,
)
from golden_vision import NAMES, golden_directory, golden_images, open_vision, relative_difference
from gpu_device import device_copy
from kernel_refusals import kernel_refusal
from planned_engines import plan_engine

from edgellm.engines.backends import encoder_calls
from edgellm.engines.backends.cuda_backend import CudaBackend
from edgellm.engines.backends.encoder_engine import EncoderEngine, EncoderStepKernels
from edgellm.engines.backends.executors import Executors
from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.checkpoints.weights import FiniteCheck
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.errors import CheckpointError
from edgellm.engines.families.audio_encoders import audio_inputs
from edgellm.engines.families.programs import ModelConfig, model_program
from edgellm.engines.formats.tensors import float32_into
from edgellm.engines.model.limits import EngineLimits, EngineShape
from edgellm.engines.model.steps import LinearResidual
from edgellm.kernels.decode.tiled_linear import CudaTiledKernels
from edgellm.kernels.encoder.launcher import CudaEncoder
from edgellm.kernels.prefill.linear import TILINGS, CudaPromptLinear

pytestmark = pytest.mark.gpu

#: Of all elements together. NumPy with every operand of a product rounded to the dtype is within a third of these.
TOLERANCE = {"float16": 2.0**-9, "bfloat16": 2.0**-6}
#: Taking means off leaves small numbers: results rounded to the compute dtype alone, as `rounded_arithmetic` does, are
#: 2.6 times the tolerance away there, and half of it in other models.
STANDARDIZED = 2
#: Of the largest embedding, as for TensorRT's encoders.
LARGEST = {"float16": 0.01, "bfloat16": 0.08}
DTYPES = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
#: Rows of a launch of the kernels of many rows.
_ROWS = 64


class RowBlocks:
    """Linear layers of any number of rows by the kernels of up to 64, one launch behind the other."""

    def __init__(self, kernels: CudaTiledKernels) -> None:
        self._kernels = kernels

    def linear(self, x: Any, linear: Any, output: Any, scale: float = 1.0) -> Blocks:
        """`CudaTiledKernels.linear` of blocks of rows."""
        return Blocks(len_of(x), lambda own: self._kernels.linear(x[own], linear, output[own], scale))

    def gate_up(self, x: Any, linear: Any, activation: str, output: Any) -> Blocks:
        """`CudaTiledKernels.gate_up` of blocks of rows."""
        return Blocks(len_of(x), lambda own: self._kernels.gate_up(x[own], linear, activation, output[own]))

    def linear_residual(self, x: Any, linear: Any, residual: Any, output: Any, scale: float = 1.0) -> Blocks:
        """`CudaTiledKernels.linear_residual` of blocks of rows."""
        return Blocks(
            len_of(x), lambda own: self._kernels.linear_residual(x[own], linear, residual[own], output[own], scale)
        )


class Blocks:
    """The launches of a layer's blocks of rows."""

    def __init__(self, rows: int, launch: Callable[[slice], Any]) -> None:
        self._launches = [launch(slice(first, min(first + _ROWS, rows))) for first in range(0, rows, _ROWS)]

    def __call__(self) -> None:
        for launch in self._launches:
            launch()

    def overlap_previous(self) -> None:
        for launch in self._launches:
            launch.overlap_previous()


def len_of(x: Any) -> int:
    """Rows."""
    return x.shape[0]


def linear_kernels(module: Any, dtype: str, kind: str) -> Any:
    """The kernels of prompts, or those of trees by blocks of rows."""
    return prompt_kernels(module, dtype) if kind == "prompt" else RowBlocks(CudaTiledKernels(module, dtype))


def prompt_kernels(module: Any, dtype: str) -> CudaPromptLinear:
    """Those of prompts in the smallest tiles, which are compiled in the least time; no bit depends on tiles."""
    kernels = CudaPromptLinear(module, dtype)
    kernels.tiling = TILINGS[-1]
    return kernels


class OnDevice:
    """An encoder's engine, bound to copies of arrays, run twice; with `plans` TensorRT runs what kernels refuse."""

    def __init__(
        self,
        gpu: Any,
        config: ModelConfig,
        shape: EngineShape,
        arrays: dict[str, np.ndarray],
        dtype: str,
        kind: str,
        plans: bool = False,
    ) -> None:
        self.gpu, self.dtype, program = gpu, dtype, model_program(config, shape)
        assert (kernel_refusal(config, shape, dtype, 99 << 10) is not None) == plans
        ways = Executors({"base": LLAMA, "vision": config}, EngineLimits(image_rows=(shape.tokens,)), dtype, 99 << 10)
        planned: Collection[str] = (ways.planned(shape) or ()) if plans else ()
        own = {part: plan_engine(gpu, config, part, dtype) for part in (ways.plans(shape) if plans else ())}
        linear = linear_kernels(gpu.kernel_module, dtype, kind)
        kernels = EncoderStepKernels(CudaEncoder(gpu.kernel_module), linear, planned, own)
        engine = EncoderEngine(kernels, config, shape, dtype)
        self.scratch = gpu.empty((engine.scratch_bytes,), "uint8")
        engine.attach(gpu, self.scratch)
        engine.load_kernels(dict.fromkeys(program.weights))
        gpu.upload(self.scratch, np.full(self.scratch.shape, 0xFF, np.uint8))  # NaN: nothing unwritten is read
        self.bound = {}
        for name, values in padded_arrays(engine, arrays).items():
            kind_of = program.edge[name][1]
            self.bound[name] = device_copy(gpu, to_bits(values, dtype) if kind_of == "compute" else values)
        for name, (size, _) in program.outputs.items():
            self.bound[name] = device_copy(gpu, to_bits(np.full(size, np.nan, np.float32), dtype))
        engine.bind(self.bound)
        self.engine = engine
        for _ in range(2):
            engine.enqueue()

    def bits(self, name: str, rows: int) -> np.ndarray:
        """The first rows of an output as the device holds them."""
        return self.gpu.download(self.bound[name]).view(np.uint16)[0, :rows]

    def values(self, name: str, rows: int) -> np.ndarray:
        """The same in float32."""
        return from_bits(self.gpu.download(self.bound[name]), self.dtype)[0, :rows]


@DTYPES
@pytest.mark.parametrize("kind", ["tiled", "prompt"])
@pytest.mark.parametrize("name", MODELS)
def test_equals_operations(gpu: Any, name: str, kind: str, dtype: str) -> None:
    config = MODELS[name]
    tolerance = TOLERANCE[dtype] * (STANDARDIZED if config.standardized else 1)
    for grid in grids_of(config):
        shape, tokens = shape_of(config, grid), config.token_count(grid)
        arrays = random_encoder(config, grid, shape)
        wide = {key: value for key, value in arrays.items() if key in ("rotary_cos_sin", "position_embeddings")}
        arrays = rounded(arrays, dtype) | wide
        expected, found = expected_outputs(config, shape, arrays), OnDevice(gpu, config, shape, arrays, dtype, kind)
        for output, values in expected.items():
            difference = relative(found.values(output, tokens), values[0, :tokens])
            print(f"{name} {grid} {output} {kind} {dtype}: {difference:.3%}")
            assert difference < tolerance, output


@DTYPES
@pytest.mark.parametrize("name", REFUSED)
def test_a_step_that_kernels_refuse_is_tensorrts(gpu: Any, name: str, dtype: str) -> None:
    """And what was written is written again."""
    config = REFUSED[name]
    grid = grids_of(config)[0]
    shape, tokens = shape_of(config, grid), config.token_count(grid)
    arrays = random_encoder(config, grid, shape)
    wide = {key: value for key, value in arrays.items() if key in ("rotary_cos_sin", "position_embeddings")}
    arrays = rounded(arrays, dtype) | wide
    expected = expected_outputs(config, shape, arrays)
    found = OnDevice(gpu, config, shape, arrays, dtype, "prompt", plans=True)
    assert found.engine._kernels.plans
    for output, values in expected.items():
        difference = relative(found.values(output, tokens), values[0, :tokens])
        print(f"{name} {output} {dtype}: {difference:.3%}")
        assert difference < 2 * TOLERANCE[dtype], output
    first = {output: found.bits(output, tokens) for output in expected}
    found.engine.enqueue()
    for output, bits in first.items():
        np.testing.assert_array_equal(found.bits(output, tokens), bits, err_msg=output)


@DTYPES
@pytest.mark.parametrize("name", SPEECH_MODELS)
def test_speech_equals_operations(gpu: Any, name: str, dtype: str) -> None:
    config = SPEECH_MODELS[name]
    for frames in lengths_of(config):
        shape, arrays = random_speech(config, frames, whole=True)
        inputs = {key: arrays[key] for key in model_program(config, shape).inputs}
        arrays, rows = rounded(arrays, dtype) | inputs, config.rows(frames)
        expected = expected_outputs(config, shape, arrays)["audio_embeddings"][0, :rows]
        found = OnDevice(gpu, config, shape, arrays, dtype, "prompt").values("audio_embeddings", rows)
        difference = relative(found, expected)
        print(f"{name} {frames} {dtype}: {difference:.3%}")
        assert difference < TOLERANCE[dtype]


@DTYPES
def test_rows_of_gemma_4_have_the_same_bits_in_a_later_run(gpu: Any, dtype: str) -> None:
    """Which begins with as many windows as the rows behind them follow from."""
    config = SPEECH_MODELS["gemma4"]
    lead, cut = config.lead_windows * config.window_rows, 5 * config.window_frames
    shape, arrays = random_speech(config, 4 * config.run_rows, whole=True)
    features = arrays["features"].reshape(-1, config.mel_bins).T
    later = arrays | audio_inputs(config, shape, features.shape[1] - cut)
    later |= {"features": placed(config, shape, features[:, cut:])}
    one, other = (
        OnDevice(gpu, config, shape, each, dtype, "prompt").bits("audio_embeddings", shape.tokens)
        for each in (arrays, later)
    )
    first = config.rows(cut)
    np.testing.assert_array_equal(one[first + lead :], other[lead : shape.tokens - first])


@DTYPES
@pytest.mark.parametrize("name", MODELS)
def test_activations_inside_of_linear_layers_change_no_bit(gpu: Any, name: str, dtype: str) -> None:
    """The kernels of trees have none, and those of prompts give their bits."""
    config = MODELS[name]
    grid = grids_of(config)[0]
    shape = shape_of(config, grid)
    arrays, tokens = random_encoder(config, grid, shape), config.token_count(grid)
    found = [OnDevice(gpu, config, shape, arrays, dtype, kind) for kind in ("tiled", "prompt")]
    for output in model_program(config, shape).outputs:
        np.testing.assert_array_equal(*(each.bits(output, tokens) for each in found))


@DTYPES
@pytest.mark.parametrize("kind", ["tiled", "prompt"])
@pytest.mark.parametrize("name", [name for name, config in MODELS.items() if not config.image_side])
def test_an_image_has_the_same_bits_in_a_larger_engine(gpu: Any, name: str, kind: str, dtype: str) -> None:
    config = MODELS[name]
    grid = grids_of(config)[0]
    tokens, found = config.token_count(grid), []
    for larger in (False, True):
        shape = shape_of(config, grid, larger)
        found.append(OnDevice(gpu, config, shape, random_encoder(config, grid, shape), dtype, kind))
    for output in model_program(config, shape).outputs:
        np.testing.assert_array_equal(*(each.bits(output, tokens) for each in found))


def encoder_backend(directory: EngineDirectory) -> CudaBackend:
    """A backend that runs vision encoders on kernels."""
    backend = CudaBackend(directory)
    backend._any_rows.tiling = TILINGS[-1]
    return backend


@DTYPES
@pytest.mark.parametrize(
    ("name", "refused"), [*((name, False) for name in NAMES), ("qwen2_5_vl", True), ("llava_siglip", True)]
)
def test_embeddings_are_those_of_transformers(
    name: str, refused: bool, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a step that is made `refused`, of all layers, which TensorRT runs."""
    if refused:
        lowered, _ = encoder_calls._KINDS[LinearResidual]
        monkeypatch.setitem(encoder_calls._KINDS, LinearResidual, (lowered, lambda step, limit: "no"))
    directory, images = golden_directory(name, tmp_path / "engines", dtype), golden_images(name)
    backend = encoder_backend(directory)
    runner = open_vision(backend, directory)
    plans = [plan for engine in backend._engines if isinstance(engine, EncoderEngine) for plan in engine._kernels.plans]
    assert bool(plans) == refused
    differences = []
    for image, found in zip(images, runner.encode(images), strict=True):
        pairs = [(found.rows, image.embeddings), *zip(found.deepstack, image.deepstack, strict=True)]
        for rows, expected in pairs:
            stored = backend.download(rows)
            values = np.empty(stored.shape, np.float32)
            float32_into(stored, dtype, values)
            differences.append(relative_difference(values, expected))
    runner.close()
    backend.close()
    print(f"\n{name} {dtype}: {', '.join(f'{difference:.3%}' for difference in differences)}")
    assert max(differences) <= LARGEST[dtype]


def test_an_element_that_is_not_finite_is_named_as_it_is_published(tmp_path: Path, monkeypatch: Any) -> None:
    """In a weight whose rows stand in memory with zeros behind them."""
    directory = golden_directory("llava_siglip", tmp_path / "engines", "float16")
    backend, name = encoder_backend(directory), "embeddings.patch_embedding.weight"
    raw = Checkpoint.raw

    def damaged(self: Checkpoint, tensor: str) -> np.ndarray:
        values = raw(self, tensor)
        if tensor.endswith(name):
            values = values.copy()
            values.reshape(-1)[75 * 3 + 74] = np.nan
        return values

    monkeypatch.setattr(Checkpoint, "raw", damaged)
    monkeypatch.setattr(FiniteCheck, "is_due", lambda self, tensor: True)
    with pytest.raises(CheckpointError, match=rf"{name}.* is nan at \[3, 2, 4, 4\]"):
        open_vision(backend, directory)
    backend.close()
