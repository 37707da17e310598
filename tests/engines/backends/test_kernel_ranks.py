"""Steps that ranks share, by kernels: on their twins, with threads in the place of GPUs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from absent_gpu import Module, prepare
from decode_models import FAMILIES, LLAMA, MIXED, SCALED, TREE, computed, random_model
from numpy_kernel_device import NumpyKernelDevice, numpy_kernel_engine

from edgellm.engines.backends.numpy_ranks import piece
from edgellm.engines.backends.ranks import Exchange, Rank
from edgellm.engines.backends.steps.linear import FewRows, ManyRows
from edgellm.engines.families.programs import model_program
from edgellm.engines.model.config import DecoderConfig, Mixture
from edgellm.engines.model.limits import EngineShape
from edgellm.engines.model.sharding import sharded
from edgellm.kernels.quantization.device_layout import DeviceLayout
from edgellm.kernels.quantization.packed_weight import WeightFormat
from edgellm.kernels.ranks.twin import NumpyRank

FORMAT = WeightFormat("int4", 32, False, "bfloat16")
#: Residuals that are scaled, normed sums, layer norms and biases, factors, logits with a cap, norms of all heads.
SHARED = ["llama_untied_biases", "qwen3", "granite", "gemma2", "starcoder2", "layer_norms_and_a_gate", "olmo2"]
#: Experts that ranks have some of, in rows of few and of many experts, with biases, and beside one of all tokens.
MIXTURES = ["qwen3_moe", "gpt_oss", "shared_expert"]
EVERY = FAMILIES | SCALED | MIXED | {"shared_expert": replace(LLAMA, mixture=Mixture(6, 2, 24, shared_size=48))}


def together(count: int, run: Callable[[int], Any]) -> list[Any]:
    """What ranks give that run at once."""
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def launched(config: DecoderConfig, shape: EngineShape, arrays: Mapping[str, np.ndarray], ranks: int, way: type) -> Any:
    """What engines of ranks compute, each of its parts alone: outputs of the first, and the states of all."""
    exchange, program = Exchange(ranks), model_program(config, shape)
    logits = np.full(program.outputs["logits"][0], np.nan, np.float32)  # the first rank's, in which all write

    def run(number: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        rank, cuts = Rank(number, exchange), sharded(program, number, ranks).cuts
        engine = numpy_kernel_engine(config, shape, way, None, (number, ranks), NumpyRank(number, rank.all))
        given = {name: array for name, array in arrays.items() if name in engine.tensors}
        bound = {name: (piece(array, cuts[name]) if name in cuts else array).copy() for name, array in given.items()}
        states = {name: bound[name] for name in program.states}
        outputs = {name: np.full(size, np.nan, np.float32) for name, (size, _) in program.outputs.items()}
        outputs["logits"] = logits
        engine.bind(bound | {f"present_{name}": array for name, array in states.items()} | outputs)
        engine.attach(NumpyKernelDevice(), np.full(engine.scratch_bytes, 0xFF, np.uint8))
        for _ in range(2):  # the same step again gives the same
            engine.enqueue()
        return outputs, states

    found = together(ranks, run)
    states = {name: np.concatenate([own[name] for _, own in found], axis=1) for name in program.states}
    return found[0][0] | states


@pytest.mark.parametrize("way", [FewRows, ManyRows])
@pytest.mark.parametrize(
    ("family", "phase"),
    [(family, phase) for family in [*SHARED, *MIXTURES] for phase in ("decode", "verify", "prefill")]
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
    found, program = launched(config, shape, arrays, 2, way), model_program(config, shape)
    expected = computed(config, shape, arrays)
    for name in (*program.outputs, *program.states):
        np.testing.assert_allclose(found[name], expected[name], atol=5e-5, rtol=5e-5, err_msg=name)


@pytest.mark.parametrize("kind", ["dense", "packed"])
@pytest.mark.parametrize("family", [*SHARED, *MIXTURES])
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
        assert prepare(module, config, shape, "bfloat16", packed, (1, 2)) == "kernels"
    assert any(source.name == "ranks_bfloat16" for source in module.sources)
