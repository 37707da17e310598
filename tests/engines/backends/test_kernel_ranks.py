"""Steps that ranks share, by kernels: on their twins, with threads in the place of GPUs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from absent_gpu import Module, prepare
from decode_models import FAMILIES, LLAMA, MIXED, RECURRENT, SCALED, TREE, computed, random_adapters, random_model
from numpy_kernel_device import NumpyKernelDevice, numpy_kernel_engine
from rank_twin import NumpyRank

from edgellm.engines.backends.numpy_ranks import piece, put_back
from edgellm.engines.backends.ranks import Exchange, Rank
from edgellm.engines.backends.steps.linear import FewRows, ManyRows
from edgellm.engines.families.programs import model_program
from edgellm.engines.model.config import DecoderConfig, Mixture
from edgellm.engines.model.limits import EngineShape
from edgellm.engines.model.program import Program
from edgellm.engines.model.sharding import UNIT, Share, sharded
from edgellm.engines.model.states import is_recurrent
from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.quantization.device_layout import DeviceLayout
from edgellm.kernels.quantization.packed_weight import WeightFormat
from edgellm.kernels.ranks.launcher import CudaRank, RanksArgument, blocks_at_once

FORMAT = WeightFormat("int4", 32, False, "bfloat16")
#: Residuals that are scaled, normed sums, layer norms and biases, factors, logits with a cap, norms of all heads.
SHARED = [
    "llama_untied_biases",
    "qwen3",
    "granite",
    "gemma2",
    "starcoder2",
    "layer_norms_and_a_gate",
    "olmo2",
    "gemma4",
]
#: Experts that ranks have some of, in rows of few and of many experts, with biases, and beside one of all tokens.
MIXTURES = ["qwen3_moe", "gpt_oss", "shared_expert", "latent_experts", "gemma4_moe"]
#: Convolutions, delta rules and state spaces, of which ranks have heads; norms of groups behind these.
STATES = ["short_convolutions", "gated_delta_nets", "state_spaces", "spaces_of_one_group", "lone_parts", "qwen3_5_moe"]
SHARING = Mixture(6, 2, 24, shared_size=48)
EVERY = FAMILIES | SCALED | RECURRENT | MIXED | {"shared_expert": replace(LLAMA, mixture=SHARING)}
EVERY["qwen3_5_moe"] = replace(EVERY["qwen3_5_moe"], mixture=SHARING)
LATENT = EVERY["latent_experts"]
EVERY["latent_experts"] = replace(LATENT, mixture=replace(LATENT.mixture, shared_size=48))


def together(count: int, run: Callable[[int], Any]) -> list[Any]:
    """What ranks give that run at once."""
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def launched(
    config: DecoderConfig, shape: EngineShape, arrays: Mapping[str, np.ndarray], ranks: int, way: type, unit: int = UNIT
) -> Any:
    """What engines of ranks compute, each of its parts alone: outputs of the first, or of those who have them, and
    states."""
    exchange, program = Exchange(ranks), model_program(config, shape)
    whole = {name: arrays[name].copy() for name in program.states}
    whole |= {name: np.full(size, np.nan, np.float32) for name, (size, _) in program.outputs.items()}

    def run(number: int) -> None:
        rank, share = Rank(number, exchange), Share(number, ranks, unit)
        cuts = sharded(program, *share).cuts
        engine = numpy_kernel_engine(config, shape, way, None, share, NumpyRank(number, rank.all))
        given = arrays | whole
        own = {name: piece(given[name], cuts[name]) if name in cuts else given[name] for name in given}
        bound = {name: array.copy() for name, array in own.items() if name != "logits"}
        bound["logits"] = whole["logits"]  # the first rank's, in which all write
        bound |= {f"present_{name}": bound[name] for name in program.changed}
        engine.bind({name: array for name, array in bound.items() if name in engine.tensors})
        engine.attach(NumpyKernelDevice(), np.full(engine.scratch_bytes, 0xFF, np.uint8))
        for _ in range(1 if "state_tokens" in program.inputs else 2):  # the same step again gives the same
            engine.enqueue()
        for name in whole:
            if name in cuts:
                put_back(bound[name], whole[name], cuts[name])
            elif number == 0 and name != "logits":
                whole[name][...] = bound[name]

    together(ranks, run)
    return whole


def states_of(program: Program) -> dict[str, np.ndarray]:
    """Recurrent states before a step of the `TREE` or of a prompt, and what it is told of them."""
    random, (batch, tokens) = np.random.default_rng(5), (program.shape.batch, program.shape.tokens)
    found = {name: random.standard_normal(size, np.float32) for name, (size, _) in program.states.items()}
    parents = [-1 if parent is None else parent for parent in TREE][:tokens]
    return {name: array for name, array in found.items() if is_recurrent(name)} | {
        "node_parents": np.array([parents] * batch, np.int32),
        "state_tokens": np.full(batch, tokens - 2, np.int32),
    }


@pytest.mark.parametrize("way", [FewRows, ManyRows])
@pytest.mark.parametrize(
    ("family", "phase"),
    [(family, phase) for family in [*SHARED, *MIXTURES, *STATES] for phase in ("decode", "verify", "prefill")]
    + [(family, "long prefill") for family in MIXTURES],
)
def test_a_step_of_ranks_is_what_operations_compute_of_the_whole(family: str, phase: str, way: type) -> None:
    """Features too, of which all ranks keep the same."""
    config = replace(EVERY[family], feature_layers=(0, 2))
    length = 72 if phase == "long prefill" else 8
    parents: Sequence[int | None] = {"decode": (None,), "verify": TREE}.get(phase, (None, *range(length - 1)))
    starts, rows = ([5], 40 + length) if phase.endswith("prefill") else ([5, 0, 19], 48)
    selected = len(parents) if phase == "verify" else 1
    shape = EngineShape(phase.split()[-1], len(starts), len(parents), rows, rows, selected)
    arrays = random_model(config, len(starts), rows, starts, parents)
    if len(starts) == 1:
        arrays["last_token_ids"] = np.array([[length - 3]], np.int32)
    program = model_program(config, shape)
    arrays |= {name: array for name, array in states_of(program).items() if name in program.edge}
    found = launched(config, shape, arrays, 4 if family == "lone_parts" else 2, way)
    expected = computed(config, shape, arrays)
    for name in (*program.outputs, *program.states):
        np.testing.assert_allclose(found[name], expected[name], atol=5e-5, rtol=5e-5, err_msg=name)


@pytest.mark.parametrize(("family", "inner", "unit"), [("qwen3", 160, 32), ("shared_expert", 48, 16)])
def test_columns_between_layers_are_shared_in_whole_groups(family: str, inner: int, unit: int) -> None:
    """Of an odd number of groups one rank has one more."""
    config, shape = replace(EVERY[family], intermediate_size=inner), EngineShape("decode", 2, 1, 48, 48, 1)
    arrays, program = random_model(config, 2, 48, [5, 0]), model_program(config, shape)
    cuts = [sharded(program, rank, 2, unit).cuts for rank in range(2)]
    (down,) = {
        name for name in cuts[0] if "layers.0" in name and name.endswith("down_proj.weight") and cuts[0][name].axis
    }
    assert [cut[down].ranges for cut in cuts] == [
        ((0, inner // unit // 2 * unit),),
        ((inner // unit // 2 * unit, inner),),
    ]
    found, expected = launched(config, shape, arrays, 2, FewRows, unit), computed(config, shape, arrays)
    np.testing.assert_allclose(found["logits"], expected["logits"], atol=5e-5, rtol=5e-5)


@pytest.mark.parametrize("family", ["qwen3", "short_convolutions"])
def test_adapters_of_ranks_change_what_those_of_the_whole_do(family: str) -> None:
    """Of one fused layer, too, whose rows a rank has in several ranges."""
    shape, config = replace(EngineShape("decode", 3, 1, 48, 48, 1), lora_slots=2, lora_rank=8), EVERY[family]
    arrays, program = random_model(config, 3, 48, [5, 0, 19]), model_program(config, shape)
    arrays |= {name: array for name, array in states_of(program).items() if name in program.edge}
    arrays |= random_adapters(config, [1, None, 0], 2, 8)
    expected, plain = computed(config, shape, arrays), computed(config, replace(shape, lora_slots=0), arrays)
    found = launched(config, shape, arrays, 2, FewRows)
    np.testing.assert_allclose(found["logits"], expected["logits"], atol=5e-5, rtol=5e-5)
    assert [np.abs(own).max() > 0.1 for own in expected["logits"] - plain["logits"]] == [True, False, True]


@pytest.mark.parametrize("kind", ["dense", "packed"])
@pytest.mark.parametrize("family", [*SHARED, *MIXTURES, *STATES])
def test_launches_of_a_rank_are_prepared(family: str, kind: str) -> None:
    """On the dtypes that a GPU has: decode steps, trees in passes, prompts of few rows and of many."""
    config = replace(EVERY[family], feature_layers=(0, 2), hidden_size=256, intermediate_size=512)
    module = Module()
    shapes = [EngineShape("decode", 3, 1, 128, 128, 1), EngineShape("verify", 3, 32, 128, 128, 32)]
    shapes += [EngineShape("prefill", 1, tokens, 320, 320, 1) for tokens in (16, 65, 300)]
    for shape in shapes:
        weights = model_program(config, shape, (1, 2)).weights.values()
        layers = [spec for spec in weights if kind == "packed" and spec.name.endswith("_proj.weight")]
        packed = {spec.name: DeviceLayout(FORMAT, *spec.shape, dtype="bfloat16") for spec in layers}
        prepare(module, config, shape, "bfloat16", packed, (1, 2))
    assert any(source.name == "ranks_bfloat16" for source in module.sources)


def test_sums_have_no_more_blocks_than_each_gpu_runs_at_once() -> None:
    """Two on a multiprocessor of the smallest: a block waits for one of each other rank. Few where they share a GPU."""
    assert [blocks_at_once(sizes, True) for sizes in ([132, 132], [46, 40], [20, 60])] == [256, 80, 64]
    assert blocks_at_once([132] * 8, False) == 64


@pytest.mark.parametrize(
    ("size", "kernel", "blocks"),
    [
        (4, "sum_few<__half>", 1),
        (65_536, "sum_few<__half>", 64),
        (65_540, "sum_many<__half, 1>", 65),
        (262_144, "sum_many<__half, 1>", 256),
        (262_148, "sum_many<__half, 4>", 65),
        (16_777_216, "sum_many<__half, 4>", 256),
    ],
)
def test_where_sums_are_of_few_each_piece_of_four_has_a_thread(size: int, kernel: str, blocks: int) -> None:
    """Of 256 threads a block; of many, threads go on with pieces behind those of all blocks."""
    values, rank = DeviceArray(1 << 20, (size,), "float32"), RanksArgument(own=0, count=2, blocks=256)
    launch = CudaRank(Module(), "float16", rank).sum(values, values)
    assert (launch.name, launch._config.gridDimX) == (f"ranks::{kernel}", blocks)
