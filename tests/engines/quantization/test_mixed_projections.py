"""Qwen3.5 as it is published packed: what the delta rule projects in several formats, its gates dense most often."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from absent_gpu import TARGET, Module, prepare
from device_weights import to_device_layout
from golden_files import golden_folder, largest_difference
from numpy_kernel_device import NumpyKernelDevice, numpy_kernel_engine
from packed_checkpoints import write_packed
from recurrent_steps import RecurrentSteps
from tiny_families import PROMPT, RECURRENT

from edgellm import LLM, Request, SamplingParams
from edgellm.engines.backends.device_layouts import model_layouts, with_delta_products
from edgellm.engines.backends.executors import planned_shapes
from edgellm.engines.backends.opening import open_backend
from edgellm.engines.backends.steps.linear import FewRows, ManyRows
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.checkpoints.weights import load_numpy_weights
from edgellm.engines.directories.description import DESCRIPTION_NAME
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.errors import EngineDirectoryError, EngineError
from edgellm.engines.families import decoder_config
from edgellm.engines.model.config import DecoderConfig
from edgellm.engines.model.decoder import decoder_program, decoder_weights
from edgellm.engines.model.limits import EngineLimits, EngineShape
from edgellm.engines.model.program import Program
from edgellm.engines.model.states import PRESENT
from edgellm.engines.quantization.stored import fused
from edgellm.engines.quantizer.quantizer import QuantizationOptions, quantize_checkpoint
from edgellm.kernels.compiler import compile_module
from edgellm.kernels.decode import tiled_linear
from edgellm.kernels.quantization.device_layout import InputPermutation, PackedMatrix

GOLDENS, DECODERS = golden_folder("quantized"), golden_folder("decoder")
PACKED = GOLDENS / "ct_w4_qwen3_5"
GATES = ("in_proj_a", "in_proj_b")
Make = Callable[..., Path]
#: What stays dense in which layers, and how many products each projection is then multiplied in.
MIXTURES = {
    "gates": (GATES, (0, 0, 1, 1)),
    "all but gates": (("in_proj_qkv", "in_proj_z"), (0, 0, 1, 1)),
    "the gate of the norm": (("in_proj_z",), (0, 1, 0, 0)),
    "in one layer": (("2.linear_attn.in_proj_qkv",), (0, 1, 1, 1)),
    "differently": (("0.linear_attn.in_proj_z", "2.linear_attn.in_proj_[ab]"), (0, 1, 2, 2)),
    "all": (("linear_attn",), ()),
    "nothing": ((), ()),
    "one gate": (("in_proj_a",), ()),
}


def config_of(directory: Path) -> DecoderConfig:
    with Checkpoint.open(directory) as checkpoint:
        return with_delta_products(decoder_config(checkpoint.config, checkpoint.generation_config), checkpoint)


class KernelSteps(RecurrentSteps):
    """On the twins of kernels, with linear layers packed as the checkpoint has them."""

    def __init__(self, directory: Path, config: DecoderConfig, way: type | None) -> None:
        super().__init__(directory)
        self.config, self._way, self.packed = config, way, dict[str, Any]()
        with Checkpoint.open(directory) as checkpoint:
            specs = decoder_weights(config)
            self.weights = load_numpy_weights(checkpoint, specs)
            for spec in specs:
                stored = [each for part in spec.parts if (each := checkpoint.stored(*part)) is not None]
                if not stored:
                    continue
                whole = fused(stored)
                assert whole.shape == spec.shape
                layout, data = to_device_layout(whole.unpacked())
                inputs = InputPermutation.of(whole.unpacked())
                self.packed[spec.name] = PackedMatrix(replace(layout, dtype="float32"), data, inputs)

    def compute(self, program: Program, bindings: dict[str, np.ndarray]) -> None:
        engine = numpy_kernel_engine(
            self.config, program.shape, self._way, {name: matrix.layout for name, matrix in self.packed.items()}
        )
        for name, (shape, _) in program.outputs.items():
            bindings[name] = np.full(shape, np.nan, np.float32)
        arrays = self.weights | self.packed | bindings
        arrays |= {PRESENT + name: bindings[name] for name in program.changed}
        engine.bind({name: arrays[name] for name in engine.tensors})
        engine.attach(NumpyKernelDevice(), np.full(engine.scratch_bytes, 0xFF, np.uint8))  # nothing unwritten is read
        engine.enqueue()


def served(steps: RecurrentSteps) -> np.ndarray:
    """The logits [T, V] of the first golden sequence: a prompt in chunks, then steps."""
    ids = steps.token_ids[0].tolist()
    logits = [*steps.prefill(ids[:9], chunk=5, padding=2)]
    for token in ids[9:]:
        logits.append(steps.decode([token])[0])
        steps.accept([[0]])
    return np.stack(logits)


@pytest.mark.parametrize("name", ["ct_w4_qwen3_5", "fp8_blocks_qwen3_5"])
def test_numpy_has_the_logits_of_transformers(name: str) -> None:
    steps = RecurrentSteps(GOLDENS / name)
    steps.config = config_of(GOLDENS / name)
    assert steps.config.delta_products == (0, 0, 1, 1)
    with Checkpoint.open(GOLDENS / name) as checkpoint:
        steps.weights = load_numpy_weights(checkpoint, decoder_weights(steps.config))
    assert largest_difference(served(steps), steps.expected[0]) <= 1e-4


@pytest.mark.parametrize("way", [FewRows, ManyRows])
@pytest.mark.parametrize("name", ["ct_w4_qwen3_5", "fp8_blocks_qwen3_5"])
def test_the_kernels_twins_have_the_logits_of_transformers(name: str, way: type) -> None:
    directory = GOLDENS / name
    steps = KernelSteps(directory, config_of(directory), way)
    assert {each.rpartition("layers.0.")[2] for each in steps.packed if ".layers.0." in each} == {
        "linear_attn.qkvz_proj.weight",
        "linear_attn.out_proj.weight",
        "mlp.gate_up_proj.weight",
        "mlp.down_proj.weight",
    }
    assert largest_difference(served(steps), steps.expected[0]) <= 1e-4


@pytest.mark.parametrize("products", [(0, 0, 1, 1), (0, 1, 0, 0), (0, 1, 1, 1), (0, 1, 2, 2)])
def test_any_products_have_the_logits_of_transformers(products: tuple[int, ...]) -> None:
    directory = DECODERS / "qwen3_5_text"
    config = replace(config_of(directory), delta_products=products)
    steps = KernelSteps(directory, config, None)
    assert largest_difference(served(steps), steps.expected[0]) <= 1e-4


@pytest.mark.parametrize(
    "mixture",
    [pytest.param(each, marks=() if each in ("differently", "one gate") else pytest.mark.slow) for each in MIXTURES],
)
def test_products_follow_from_formats(mixture: str, make_checkpoint: Make, tmp_path: Path) -> None:
    """Whatever they are, answers are those of the dense twin: a packed model without them is one as it was."""
    dense, products = MIXTURES[mixture]
    source = make_checkpoint(tmp_path / "source", 1, **RECURRENT["qwen3_5"])
    listed = [each.replace("[ab]", letter) for each in dense for letter in ("ab" if "[ab]" in each else "a")]
    packed, twin = write_packed(source, tmp_path / "packed", tmp_path / "twin", None, *listed)
    config = config_of(packed)
    assert config.delta_products == products and config_of(twin).delta_products == ()
    shape = EngineShape("decode", 1, 1, 64, 64)
    if not products:
        assert str(decoder_program(config, shape)) == str(decoder_program(config_of(twin), shape))
    answers = []
    for model in (packed, twin):
        engines = tmp_path / f"{model.name} engines"
        build_engine_directory(model, engines, EngineLimits(1, 32, 128), [], "float16")
        with LLM(engines, backend="numpy") as llm:
            params = SamplingParams(max_tokens=24, ignore_eos=True)
            answers.append(llm.handle([Request(PROMPT, None, params)])[0].token_ids)
    assert answers[0] == answers[1]
    directory = EngineDirectory.open(tmp_path / "packed engines")
    assert directory.config.delta_products == products
    if mixture == "one gate":
        with pytest.raises(EngineError, match=r"in_proj_qkv \(int4.*have one format there, not dense and int4"):
            open_backend("tensorrt", directory)


@pytest.mark.parametrize(
    ("products", "message"),
    [
        ([0, 0, 1], "expected the number of the linear layer of each of in_proj_qkv, in_proj_z, in_proj_b, in_proj_a"),
        ([1, 0, 0, 0], "counted as they come up"),
        ([0, 0, 0, 1], "expected one number for the last two"),
    ],
)
def test_wrong_descriptions_are_refused(
    products: list[int], message: str, make_checkpoint: Make, tmp_path: Path
) -> None:
    source = make_checkpoint(tmp_path / "source", 1, **RECURRENT["qwen3_5"])
    build_engine_directory(source, tmp_path / "engines", EngineLimits(1, 32, 64), [], "float16")
    file = tmp_path / "engines" / DESCRIPTION_NAME
    values = json.loads(file.read_text())
    file.write_text(json.dumps(values | {"config": values["config"] | {"delta_products": products}}))
    with pytest.raises(EngineDirectoryError, match=message):
        EngineDirectory.open(tmp_path / "engines")


def test_a_directory_is_built_and_its_kernels_compile(
    make_checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model that was quantized here, which leaves the gates dense as published ones do."""
    pytest.importorskip("tensorrt_rtx")
    pytest.importorskip("cuda.bindings.nvrtc")
    monkeypatch.setattr(tiled_linear, "tensor_map", lambda *arguments: tiled_linear._Map())
    source = make_checkpoint(tmp_path / "source", 1, **RECURRENT["qwen3_5"])
    quantize_checkpoint(source, tmp_path / "int4", QuantizationOptions(4, 32, True, "rtn"))
    limits = EngineLimits(max_batch=1, prefill_chunk=80, kv_capacity=128)
    report = build_engine_directory(tmp_path / "int4", tmp_path / "engines", limits, [TARGET], "float16")
    directory = EngineDirectory.open(tmp_path / "engines", verify=True)
    assert directory.config.delta_products == (0, 0, 1, 1)
    packed = model_layouts(directory.models, directory.checkpoints, "float16")
    names = {name for name in packed["base"] if ".layers.0." in name}
    assert {"model.layers.0.linear_attn.qkvz_proj.weight", "model.layers.0.linear_attn.out_proj.weight"} <= names
    assert not any("ba_proj" in name for name in names)
    needed = planned_shapes(directory.models, directory.limits, "float16", TARGET, packed=packed)
    assert needed == [] and not report.plans
    module = Module()
    for shape in directory.limits.engine_shapes():
        prepare(module, directory.config, shape, packed=packed["base"])
    sources = [source for source in module.sources if source.name.startswith(("recurrent_", "decode_", "packed_"))]
    assert sources
    for source in sources:
        assert b".entry " in compile_module(source, TARGET.replace("sm", "compute")).code
