"""A decoder's program shared among ranks: the families' logits, adapters, what is refused, and a rank that fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from decode_models import MIXED, RECURRENT, TREE, computed, random_model, with_experts
from golden_files import golden_folder, largest_difference
from golden_sequences import Sequences

from edgellm import LLM
from edgellm.engines.backends.numpy_backend import NumpyBackend
from edgellm.engines.backends.numpy_ranks import NumpyRanks, RankedEngine
from edgellm.engines.backends.rank_memory import RankMemory
from edgellm.engines.backends.ranks import Exchange
from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.errors import DeviceLostError, EngineError
from edgellm.engines.families.programs import model_program
from edgellm.engines.lora.adapter import LoraAdapter
from edgellm.engines.model.decoder import decoder_program
from edgellm.engines.model.limits import EngineLimits, EngineShape
from edgellm.engines.model.sharding import sharded
from edgellm.engines.model.steps import AddResidual, Attention, Experts, LinearResidual, Reduce
from edgellm.engines.runners.base_runner import BaseEngineRunner
from edgellm.engines.runners.sampling_state import SamplingValues

GOLDENS = golden_folder("decoder")
#: Each with something of its own: sinks and biases of experts, a gate of the head, windows, norms behind, heads shared
#: by several ranks, biases, fused projections, a tied head, features that rounding shows, recurrent layers, norms
#: of all heads, embeddings of each layer and rows of keys and values that later layers attend to.
SHARED = [
    *(("gpt_oss", 2), ("qwen3_moe", 2), ("granitemoe", 2), ("gemma2", 2), ("gemma3", 2), ("cwm_window_5", 2)),
    *(("llama_biases_head_dim_10", 4), ("qwen2_yarn", 3), ("phi3_partial_tied", 4), ("starcoder2", 3), ("minicpm", 3)),
    *(("qwen3_5_text", 2), ("qwen3_5_moe_text", 2), ("lfm2", 3), ("lfm2_moe", 2), ("olmo2", 2), ("olmo2", 4)),
    *(("gemma4", 2), ("gemma4_plain", 2), ("gemma4_unified", 2), ("gemma4_moe", 2)),
]
REFUSED = [
    ("qwen3", 3, "the 4 query heads of layer 0 cannot be shared equally by 3 GPUs: take a number that divides them"),
    ("qwen2_yarn", 2, "the 3 key-value heads of layer 0 cannot be shared equally by 2 GPUs"),
    ("qwen3_5_text_narrow", 2, "the 3 value heads of layer 1 cannot be shared equally by 2 GPUs"),
]


def logits(backend: NumpyBackend, sequences: Sequences, name: str, **options: Any) -> np.ndarray:
    """Of a prompt in two chunks and single tokens behind it, as they are served: [6, V]."""
    token_ids = sequences.token_ids[0].tolist()
    limits = EngineLimits(prefill_chunk=16, kv_capacity=len(token_ids), **options.pop("limits", {}))
    limits = replace(limits, window_rows=limits.rows_for_window(sequences.config.window))
    with Checkpoint.open(GOLDENS / name) as checkpoint:
        runner = BaseEngineRunner(backend, sequences.config, limits, checkpoint, **options)
    with closing(runner):
        if runner.adapters is not None:
            runner.set_adapter(0, "own")
        runner.start(0, token_ids[:18], 0, SamplingValues()).wait()
        found = [runner.logits(0).copy()]
        for token in token_ids[18:23]:
            runner.force_token(0, token)
            runner.decode(1).wait()
            found.append(runner.logits(0).copy())
    return np.stack(found)


@pytest.mark.parametrize(("name", "ranks"), SHARED)
def test_ranks_give_the_logits_of_transformers_and_the_same_ones_again(name: str, ranks: int) -> None:
    sequences = Sequences(GOLDENS / name)
    found, again = (logits(NumpyRanks(ranks, sequences.config), sequences, name) for _ in range(2))
    assert largest_difference(found, sequences.expected[0, 17:23]) <= 1e-4
    np.testing.assert_array_equal(found, again)


@pytest.mark.parametrize("name", ["qwen3", "gpt_oss", "llama_biases_head_dim_10", "gemma2"])
def test_one_rank_gives_the_same_bits(name: str) -> None:
    """What is split by the pass computes as before: the seam costs nothing but a launch."""
    sequences = Sequences(GOLDENS / name)
    found = logits(NumpyRanks(1, sequences.config), sequences, name)
    np.testing.assert_array_equal(found, logits(NumpyBackend(sequences.config), sequences, name))


@pytest.mark.parametrize("ranks", [2, 4])
def test_no_rank_adds_its_residuals_alone(ranks: int) -> None:
    """Each layer sums twice, every rank has its part of the weights, and all parts together are the whole."""
    config = Sequences(GOLDENS / "llama_biases_head_dim_10").config
    program = decoder_program(config, EngineShape("prefill", 1, 4, 8, 8))
    shards = [sharded(program, rank, ranks) for rank in range(ranks)]
    for shard in shards:
        kinds = [type(step) for step in shard.program.steps]
        assert (kinds.count(Reduce), kinds.count(AddResidual)) == (2 * config.num_layers, 1)  # one selects
        assert all(step.residual is None for step in shard.program.steps if isinstance(step, LinearResidual))
        attended = [step.heads for step in shard.program.steps if isinstance(step, Attention)]
        assert attended == [(config.num_heads // ranks, 1, config.head_dim)] * config.num_layers
        for name, spec in shard.program.weights.items():
            assert [shape[1:] for _, shape in spec.parts] == [spec.shape[1:]] * len(spec.parts), name
            assert sum(shape[0] for _, shape in spec.parts) == spec.shape[0], name
    for name, spec in program.weights.items():
        cuts = [shard.cuts.get(name) for shard in shards]
        if cuts[0] is None:
            assert spec.shape[0] == config.hidden_size and len(spec.shape) == 1, name  # norms, biases behind sums
            continue
        places = [place for cut in cuts for each in cut.ranges for place in range(*each)]
        wanted = range(spec.shape[cuts[0].axis])
        assert set(places) == set(wanted)
        assert "qkv" in name or len(places) == len(wanted), name  # of one key-value head all have the same


def test_experts_are_whole_and_their_sums_are_parts() -> None:
    config = Sequences(GOLDENS / "qwen3_moe").config
    program = decoder_program(config, EngineShape("decode", 1, 1, 8, 8))
    own = [[step for step in sharded(program, rank, 2).program.steps if isinstance(step, Experts)] for rank in (0, 1)]
    count, size = config.mixture.experts, config.mixture.size
    for rank, steps in enumerate(own):
        assert {(step.own, step.residual) for step in steps} == {((count // 2 * rank, count // 2 * (rank + 1)), None)}
        assert {step.gate_up.weight.shape for step in steps} == {(count * size, config.hidden_size)}


@pytest.mark.parametrize("phase", ["decode", "verify", "prefill"])
@pytest.mark.parametrize(
    ("family", "ranks"),
    [*((name, 2) for name in (*RECURRENT, "latent_experts")), ("gated_delta_nets", 4), ("short_convolutions", 4)]
    + [("state_spaces", 4), ("spaces_of_one_group", 4), ("lone_parts", 4)],
)
def test_states_of_recurrent_layers_are_shared_and_lie_as_those_of_one(family: str, ranks: int, phase: str) -> None:
    """And what steps keep for their commit; key heads that several ranks have are written by each, alike. So are rows
    of a width of experts' own."""
    config, batch = (RECURRENT | MIXED)[family], 1 if phase == "prefill" else 3
    parents: Sequence[int | None] = {"decode": (None,), "verify": TREE}.get(phase, (None, *range(7)))
    shape = EngineShape(phase, batch, len(parents), 48, 48, len(parents) if phase == "verify" else 1)
    arrays, program = random_model(config, batch, 48, [5, 0, 19][:batch], tuple(parents)), model_program(config, shape)
    random = np.random.default_rng(1)
    arrays |= {name: random.standard_normal(size, np.float32) for name, (size, _) in program.states.items()}
    given = {"last_token_ids": [[5]], "state_tokens": [6]}
    given["node_parents"] = [[-1 if parent is None else parent for parent in parents]] * batch
    arrays |= {name: np.array(own, np.int32) for name, own in given.items() if name in program.inputs}
    expected, bound = computed(config, shape, arrays), {name: array.copy() for name, array in arrays.items()}
    bound |= {name: np.full(size, np.nan, np.float32) for name, (size, _) in program.outputs.items()}
    bound |= with_experts(program, bound)
    with closing(NumpyRanks(ranks, config)) as backend:
        engine = backend.load_engine(shape)
        engine.bind(bound)
        engine.enqueue()
    for name in (*program.outputs, *program.states):
        np.testing.assert_allclose(bound[name], expected[name], atol=5e-5, rtol=5e-5, err_msg=name)


def test_adapters_are_shared_as_their_layers_are(make_adapter: Callable[..., Path], tmp_path: Path) -> None:
    sequences = Sequences(GOLDENS / "qwen3")
    folder = make_adapter(tmp_path / "own", sequences.config, 3, 4)
    limits, adapters = {"max_lora_rank": 4, "lora_slots": 1}, {"own": LoraAdapter.read(folder, sequences.config)}
    options = {"limits": limits, "adapters": adapters}
    one = logits(NumpyBackend(sequences.config), sequences, "qwen3", **options)
    two = logits(NumpyRanks(2, sequences.config), sequences, "qwen3", **options)
    assert largest_difference(one, sequences.expected[0, 17:23]) > 0.01
    assert largest_difference(two, one) <= 1e-4


@pytest.mark.parametrize(("name", "ranks", "reason"), REFUSED)
def test_what_cannot_be_shared_is_refused_by_name(name: str, ranks: int, reason: str) -> None:
    with pytest.raises(EngineError, match=reason):
        NumpyRanks(ranks, Sequences(GOLDENS / name).config)


def test_each_rank_has_an_expert() -> None:
    config = replace(MIXED["qwen3_moe"], mixture=replace(MIXED["qwen3_moe"].mixture, experts=3))
    with pytest.raises(EngineError, match="the 3 experts of a mixture cannot be shared by 4 GPUs: take fewer GPUs"):
        NumpyRanks(4, config)


def test_a_rank_that_fails_ends_the_model_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(backend="numpy", gpus=2, drafting=None) as llm:
        before = llm.generate("The red cup", max_tokens=4).token_ids
        run = RankedEngine.enqueue

        def fail(engine: RankedEngine) -> None:
            def broken() -> None:
                raise ValueError("its memory is gone")

            engine._engines[1].run = broken  # type: ignore[method-assign]
            run(engine)

        monkeypatch.setattr(RankedEngine, "enqueue", fail)
        with pytest.raises(DeviceLostError, match="rank 1 of 2 failed: its memory is gone"):
            llm.generate("The red cup", max_tokens=4)
        monkeypatch.setattr(RankedEngine, "enqueue", run)
        with pytest.raises(DeviceLostError, match="rank 1 of 2 failed"):  # and not with what others have left behind
            llm.generate("The blue cup", max_tokens=4)
    with LLM(backend="numpy", gpus=2, drafting=None) as llm:
        assert llm.generate("The red cup", max_tokens=4).token_ids == before


def test_an_error_without_words_is_named() -> None:
    """As Python's own MemoryError is."""
    exchange = Exchange(3)
    exchange.fail(2, MemoryError())
    with pytest.raises(DeviceLostError, match=r"rank 2 of 3 failed: MemoryError\. Open the model anew"):
        exchange.check()
    memory = object.__new__(RankMemory)
    memory._devices, memory._failure = [SimpleNamespace(gpu=SimpleNamespace(index=4))] * 2, None
    assert str(memory.fail(1, MemoryError())) == "rank 1 of 2 (GPU 4) failed: MemoryError. Open the model anew"
