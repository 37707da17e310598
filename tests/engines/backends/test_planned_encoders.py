"""Steps of encoders that TensorRT runs, between those of kernels, give what the whole program does; which these are,
and what steps say that they give."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from decode_models import LLAMA
from encoder_models import (
    MODELS,
    REFUSED,
    SPEECH_MODELS,
    expected_outputs,
    grids_of,
    lengths_of,
    padded_arrays,
    random_encoder,
    random_speech,
    shape_of,
    twin_engine,
)

from edgellm.engines.backends import encoder_calls
from edgellm.engines.backends.encoder_calls import EncoderCalls
from edgellm.engines.backends.encoder_engine import EncoderEngine
from edgellm.engines.backends.encoder_places import Place
from edgellm.engines.backends.executors import Executors, planned_shapes
from edgellm.engines.backends.numpy_operations import NumpyOperations
from edgellm.engines.backends.platform import find_tensorrt, load_tensorrt
from edgellm.engines.backends.tensorrt_operations import TensorRTOperations, build_plan
from edgellm.engines.building.needed_kernels import AbsentBackend
from edgellm.engines.families.programs import ModelConfig, model_program
from edgellm.engines.model import encoder_steps
from edgellm.engines.model.audio import AudioConfig
from edgellm.engines.model.encoder_steps import Clip, EncoderAttention, GatedConvolution, LocalAttention, Unfold
from edgellm.engines.model.graph import ProgramGraph
from edgellm.engines.model.limits import EngineLimits, EngineShape, audio_shape, vision_shape
from edgellm.engines.model.program import Program
from edgellm.engines.model.segments import planned_runs, segment_shape
from edgellm.engines.model.steps import LinearResidual, NormLinear, Reshape, Step
from edgellm.kernels.encoder.contract import padded_width
from edgellm.kernels.gpu import absent_gpu

ENCODERS: dict[str, ModelConfig] = MODELS | {f"hears {name}": config for name, config in SPEECH_MODELS.items()}
#: Of which TensorRT has nothing, or would have nothing to do.
LACKING = (Unfold, GatedConvolution, LocalAttention, Reshape)
#: Where kernels are made for a GPU: what blocks may have of its memory.
_SHARED = 99 << 10


def case(config: ModelConfig) -> tuple[EngineShape, dict[str, np.ndarray], int]:
    """A shape, its arrays, and how many rows come out that are no padding."""
    shape = shape_for(config)
    if isinstance(config, AudioConfig):
        frames = lengths_of(config)[0]
        return shape, random_speech(config, frames, whole=True)[1], config.rows(frames)
    grid = grids_of(config)[0]
    return shape, random_encoder(config, grid, shape), config.token_count(grid)


def shape_for(config: ModelConfig) -> EngineShape:
    if isinstance(config, AudioConfig):
        return audio_shape(config.run_rows)
    return shape_of(config, grids_of(config)[0])


def whole_program(config: ModelConfig) -> Program:
    return model_program(config, shape_for(config))


#: Of each kind of step that encoders have, one that has it.
KINDS = {type(step): name for name in reversed(ENCODERS) for step in whole_program(ENCODERS[name]).steps}


def compare(config: ModelConfig, titles: Collection[str], rounds: bool = True) -> Any:
    """Gives the engine."""
    shape, arrays, rows = case(config)
    expected, engine = expected_outputs(config, shape, arrays), twin_engine(config, shape, rounds, titles)
    found = {name: np.full(values.shape, np.nan, np.float32) for name, values in expected.items()}
    engine.bind(padded_arrays(engine, arrays) | found)
    for _ in range(2):
        engine.enqueue()
    for name, values in expected.items():
        scale = np.abs(values[0, :rows]).max()
        np.testing.assert_allclose(found[name][0, :rows], values[0, :rows], atol=2e-5 * scale, err_msg=name)
    return engine


def executors(config: ModelConfig, *rows: int, **more: Any) -> Executors:
    limits = EngineLimits(image_rows=() if isinstance(config, AudioConfig) else rows)
    limits = replace(limits, audio_rows=0 if limits.image_rows else rows[0])
    models = {"base": LLAMA, "vision" if limits.image_rows else "audio": config}
    return Executors(models, limits, "float16", _SHARED, **more)


def titles_of(program: Program, taken: Callable[[int, Step], bool]) -> set[str]:
    """Of steps that have no rows of an earlier run."""
    steps = (step for step in enumerate(program.steps) if not getattr(step[1], "past", 0))
    return {step.title for number, step in steps if taken(number, step)}


@pytest.mark.parametrize("rounds", [True, False])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_kind_of_step_may_stand_between_kernels(kind: type[Step], rounds: bool) -> None:
    """And kernels between others."""
    config = ENCODERS[KINDS[kind]]
    compare(config, titles_of(whole_program(config), lambda number, step: type(step) is kind), rounds)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("name", ENCODERS)
def test_every_second_step_is_what_the_whole_program_gives(name: str, first: int) -> None:
    config = ENCODERS[name]
    compare(config, titles_of(whole_program(config), lambda number, step: number % 2 == first))


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_step_costs_that_step_alone_in_every_shape(name: str) -> None:
    config = REFUSED[name]
    shape = shape_for(config)
    ways = executors(config, shape.tokens, 4 * shape.tokens)
    planned, large = ways.planned(shape), ways.planned(vision_shape(4 * shape.tokens))
    assert planned and planned == large and ways.problem(shape) is None and "kernels cannot" in str(ways.refusal(shape))
    kinds = {type(step) for step in model_program(config, shape).steps if step.title in planned}
    assert {"norms": {EncoderAttention}, "outputs": {NormLinear}}.get(name, kinds) == kinds
    engine = compare(config, planned)
    compare(config, planned, rounds=False)
    assert list(engine._kernels.plans) == ways.plans(shape)
    models: dict[str, ModelConfig] = {"base": LLAMA, "vision": config}
    needed = planned_shapes(models, EngineLimits(image_rows=(shape.tokens,)), "float16", "sm_86")
    assert needed == ways.plans(shape) and all(each.segment for each in needed)
    asked = executors(config, shape.tokens, executor="tensorrt")
    assert asked.planned(shape) is None and asked.plans(shape) == [shape]


def test_equal_runs_are_one_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a step that is made refused: a layer of all layers; and kernels' own weights alone have zeros behind."""
    lowered, _ = encoder_calls._KINDS[LinearResidual]
    monkeypatch.setitem(encoder_calls._KINDS, LinearResidual, (lowered, lambda step, limit: "no"))
    for name, names in (("qwen2_5_vl", "s4-5 s6-7"), ("llava_siglip", "s4-5 s6-7"), ("mistral3", "s4-5 s6-7")):
        config, steps = MODELS[name], whole_program(MODELS[name]).steps
        shape, layers = shape_for(config), sum(isinstance(step, EncoderAttention) for step in steps)
        ways = executors(config, shape.tokens)
        planned = ways.planned(shape)
        assert planned == {step.title for step in steps if isinstance(step, LinearResidual)}
        engine = compare(config, planned)
        assert " ".join(each.name.split("-")[2] + "-" + each.name.split("-")[3] for each in ways.plans(shape)) == names
        assert [plan.enqueued for plan in engine._kernels.plans.values()] == [2 * layers] * 2
        assert not any("down_proj" in each or "fc2" in each for each in engine.paddings)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_kernels_stand_around_plans(dtype: str) -> None:
    """Their launches are prepared as for a GPU."""
    gpu, base = absent_gpu("sm_86", 16, _SHARED), EngineShape("decode", 1, 1, 64, 64)
    for config in REFUSED.values():
        models, shape = {"base": LLAMA, "vision": config}, shape_for(config)
        backend = AbsentBackend(models, EngineLimits(1, 16, 64, image_rows=(shape.tokens,)), dtype, {}, gpu)
        weights = model_program(LLAMA, base).weights.keys() | model_program(config, shape).weights.keys()
        backend.load_all([dict.fromkeys(weights)])
        (engine,) = (each for each in backend._engines if each.shape == shape)
        assert isinstance(engine, EncoderEngine) and engine._kernels.plans and engine._has_kernels


def test_rows_that_differ_are_no_equal_runs() -> None:
    """Layers behind the one that merges patches have a quarter of the rows."""
    program = whole_program(MODELS["minicpmv4_6"])
    titles = titles_of(program, lambda number, step: "layers" in step.title and "qkv" in step.title)
    runs = planned_runs(program, titles)
    rows = {run: program.kinds_before(run[1])["qkv"][0][1] for run in runs}
    assert len(set(runs.values())) == len(set(rows.values())) == 2
    assert all(rows[run] == rows[plan] for run, plan in runs.items())


def test_what_neither_runs_is_named() -> None:
    hears = SPEECH_MODELS["gemma4"]
    for changes, message in (({"past": 33}, "up to 32 rows"), ({"chunk_frames": 4096}, "places, up to 65536")):
        loud: Any = replace(hears, **changes)
        shape = shape_for(loud)
        ways = executors(loud, loud.run_rows)
        refusal = str(ways.refusal(shape))
        lacking = "TensorRT has nothing for convolutions of encoders of speech. Take --backend numpy"
        assert message in refusal and str(ways.problem(shape)).endswith(f"{refusal}, and {lacking}")
    for config in SPEECH_MODELS.values():
        shape = shape_for(config)
        assert executors(config, shape.tokens, executor="tensorrt").planned(shape) == frozenset()
    many = vision_shape(65_540)
    assert executors(MODELS["qwen3_vl"], 64, 65_540).planned(many) is None


@pytest.mark.parametrize("name", ENCODERS)
def test_steps_give_what_they_say(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and widths of what operations compute; dtypes of what kernels give, which may round what linear layers alone
    take, and have zeros behind rows of linear layers."""
    config = ENCODERS[name]
    shape, arrays, _ = case(config)
    program = model_program(config, shape)
    graph = ProgramGraph(NumpyOperations(arrays, arrays | dict.fromkeys(program.outputs)), program)
    sizes: list[tuple[int, ...]] = []

    def told(run: Callable[[Any, Any], Any], *given: Any) -> Any:
        output = run(*given)
        sizes.append(output.shape)
        return output

    graph._steps = [(partial(told, run), step) for run, step in graph._steps]
    graph.run()
    places: list[Place] = []

    def placed(lower: Callable[..., Place], *given: Any) -> Place:
        places.append(lower(*given))
        return places[-1]

    for kind, (lower, refused) in encoder_calls._KINDS.items():
        monkeypatch.setitem(encoder_calls._KINDS, kind, (partial(placed, lower), refused))
    EncoderCalls(program, rounds=False)
    for number, (step, size, place) in enumerate(zip(program.steps, sizes, places, strict=True)):
        if step.output in program.outputs:
            continue
        told_size, dtype = program.kinds_before(number + 1)[step.output]
        assert told_size == size, step.title
        assert place.shape in ((size[1:]), (size[1], padded_width(size[2]))), step.title
        assert place.dtype == dtype or isinstance(step, Clip), step.title


def test_every_kind_of_step_says_what_it_gives() -> None:
    own = {kind for kind in vars(encoder_steps).values() if isinstance(kind, type) and issubclass(kind, Step)} - {Step}
    assert own <= KINDS.keys()
    assert [kind for kind in KINDS if kind.gives is None and kind.results is Step.results] == []


@pytest.mark.skipif(find_tensorrt() is None, reason="TensorRT is not installed: pip install '.[test]'")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in LACKING], ids=lambda kind: kind.__name__)
def test_every_step_that_tensorrt_has_can_be_planned_alone(kind: type[Step]) -> None:
    """Between values as kernels have them: a network of just these tensors, whose dtypes fit."""
    config = ENCODERS[KINDS[kind]]
    program = whole_program(config)
    run = next(iter(planned_runs(program, titles_of(program, lambda number, step: type(step) is kind))))
    shape, library = segment_shape(program, run), load_tensorrt()
    own, trt = model_program(config, shape), library.module
    builder = trt.Builder(library.logger(lambda severity, line: None))
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    operations = TensorRTOperations(trt, network, "float16", "composed")
    ProgramGraph(operations, own).run()
    found = [network.get_input(number) for number in range(network.num_inputs)]
    found += [network.get_output(number) for number in range(network.num_outputs)]
    edge = {name: (size, operations.dtypes[dtype]) for name, (size, dtype) in own.edge.items()}
    assert {tensor.name: (tuple(tensor.shape), tensor.dtype) for tensor in found} == edge
    assert build_plan(config, shape, "float16", "composed", "sm_86")
