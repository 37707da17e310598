"""Models with random weights for benchmarks: what they hold, and that a sequence begins anew on rows that are kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgellm.engines.backends.kernel_engine import stand_in
from edgellm.engines.building.needed_kernels import AbsentBackend
from edgellm.engines.families import decoder_config
from edgellm.engines.model.config import DecoderConfig
from edgellm.engines.model.decoder import EMBEDDING, decoder_weights
from edgellm.engines.model.limits import EngineLimits, EngineShape
from edgellm.engines.runners.sampling_state import SamplingValues
from edgellm.engines.speculation.draft_plan import chain, tree
from edgellm.kernels.compiler import compile_module
from edgellm.kernels.experts.choice import chosen_experts
from edgellm.kernels.gpu import absent_gpu

LIMITS = EngineLimits(1, 16, 240, draft_top_k=4, draft_steps=3, verify_tree_size=12)
PROMPT = list(range(5, 40))


@pytest.fixture(autouse=True)
def bench_modules(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(repository / "tools" / "bench"))


def small_config(published: dict[str, Any]) -> DecoderConfig:
    """What a `config.json` says, but narrow and shallow."""
    small = {"num_layers": 8, "vocab_size": 400, "hidden_size": 128, "intermediate_size": 192}
    return replace(decoder_config(published), **small, num_heads=2, num_kv_heads=1)


@pytest.mark.parametrize("shape", ["qwen2.5-0.5b", "qwen3-1.7b", "llama-1b", "llama-8b"])
def test_a_sequence_begins_anew_on_the_rows_of_its_prompt(tmp_path: Path, shape: str) -> None:
    """As the benchmark's rounds do: the rows behind the prompt were overwritten by then."""
    from random_checkpoint import SHAPES
    from random_model import random_directory, random_runner

    config = small_config(SHAPES[shape])
    plan = tree(4, 3, 12) if shape != "llama-8b" else chain(3)
    with random_runner(random_directory(tmp_path, config, LIMITS), "numpy") as runner:

        def logits(kept: int) -> np.ndarray:
            runner.start(0, PROMPT, kept, SamplingValues()).wait()
            found = [runner.base.logits(0)[np.newaxis]]
            for _ in range(6):
                tokens = runner.round(1, plan).wait()[0]
                found.append(runner.logits(0, len(tokens)))
            return np.concatenate(found)

        expected = logits(0)
        np.testing.assert_allclose(logits(len(PROMPT) - 1), expected, atol=1e-5)
        assert np.abs(expected[0] - expected[-1]).max() > 1e-3


def test_a_draft_of_blocks_of_random_weights_drafts(tmp_path: Path) -> None:
    from random_checkpoint import SHAPES
    from random_model import random_directory, random_runner

    config = small_config(SHAPES["llama-1b"])
    limits = EngineLimits(1, 16, 128, draft_top_k=4, draft_steps=7, verify_tree_size=16, draft_block=8)
    directory = random_directory(tmp_path, config, limits)
    assert directory.draft.config.decoder.num_layers == 5
    with random_runner(directory, "numpy") as runner:
        runner.start(0, PROMPT, 0, SamplingValues()).wait()
        for plan in (chain(7), tree(4, 7, 16)):
            assert 1 <= len(runner.round(1, plan).wait()[0]) <= 8
        assert runner.draft.logits(1, 7).std() > 0


def small_hybrid(published: dict[str, Any]) -> DecoderConfig:
    """The same of a model with layers of several kinds, all of which stay."""
    kinds = decoder_config(published).layer_kinds[:8]
    config = replace(small_config(published), tie_word_embeddings=False)  # else they say what was said last
    if config.naming == "qwen3_5":
        return replace(config, layer_kinds=kinds, delta_heads=(2, 4, 16, 24), head_dim=64, rotary_dim=16)
    return replace(config, layer_kinds=kinds, sliding_window=config.sliding_window and 12, head_dim=64, rotary_dim=64)


@pytest.mark.parametrize("shape", ["qwen3.5-2b", "lfm2-1.2b", "gemma3-1b", "olmo2-1b", "starcoder2-3b"])
def test_rounds_of_hybrid_models_get_the_lengths_that_are_simulated(tmp_path: Path, shape: str) -> None:
    """Through the head for multi-token prediction of a model that ships with one, with fewer tokens than the model."""
    from random_checkpoint import SHAPES
    from random_model import random_directory, random_runner
    from simulated_acceptance import ForcedAcceptance, schedule

    config, plan = small_hybrid(SHAPES[shape]), chain(3)
    limits = replace(LIMITS, draft_top_k=1, verify_tree_size=4)
    directory = random_directory(tmp_path, config, limits, config.dtype)
    assert directory.draft is not None
    assert directory.draft.config.generation == ("mtp" if shape == "qwen3.5-2b" else "3")
    with random_runner(directory, "numpy") as runner:
        forced = ForcedAcceptance(runner.backend)
        runner.verification.before_acceptance = forced
        runner.start(0, PROMPT, 0, SamplingValues()).wait()
        lengths = schedule(2.4, 3)
        forced.use(lengths)
        assert [len(runner.round(1, plan).wait()[0]) for _ in range(40)] == lengths[:40].tolist()
        assert np.isfinite(runner.logits(0, 1)).all()


def test_a_step_reads_and_writes_recurrent_states_and_reads_the_rows_in_reach() -> None:
    from probes import state_traffic
    from random_checkpoint import SHAPES

    limits = EngineLimits(1, 16, 40000)
    qwen, lfm, gemma = (decoder_config(SHAPES[name]) for name in ("qwen3.5-2b", "lfm2-1.2b", "gemma3-1b"))
    matrices, columns = 18 * 16 * 128 * 128 * 4, 18 * 6144 * 3 * 4
    rows = {"KV rows": 6 * 2 * 100 * 2 * 256 * 2}
    assert state_traffic(qwen, limits, "float16", 100) == rows | {"states": 2 * (matrices + columns)}
    rows = {"KV rows": 6 * 2 * 100 * 8 * 64 * 2}
    assert state_traffic(lfm, limits, "float16", 100) == rows | {"states": 2 * 10 * 2048 * 2 * 4}
    windows = replace(limits, window_rows=limits.rows_for_window(gemma.window))
    rows = {"KV rows": (4 * 30000 + 22 * 512) * 2 * 256 * 2, "states": 0}
    assert state_traffic(gemma, windows, "bfloat16", 30000) == rows
    assert state_traffic(gemma, limits, "bfloat16", 30000) == {"KV rows": 26 * 30000 * 2 * 256 * 2, "states": 0}


def test_a_step_reads_packed_layers_as_they_are(tmp_path: Path) -> None:
    """Of 4 bits in groups of 128: 33 bytes for each 64 weights, and 2 for each of the head."""
    from probes import weight_bytes
    from random_model import shape_directory

    decode, found = EngineShape("decode", 1, 1, 64, 64), {}
    for name in ("llama-1b", "llama-8b"):
        directory = shape_directory(tmp_path, name, LIMITS, "int4")
        found[name] = weight_bytes(directory.config, decode, "float16", directory.layouts["base"])
    assert found["llama-1b"] == pytest.approx(0.973e9 * 33 / 64 + 0.525e9, rel=0.002)
    assert found["llama-8b"] == pytest.approx(6.979e9 * 33 / 64 + 1.051e9, rel=0.002)


@pytest.mark.parametrize("architecture", ["sm_90", "compute_87", "compute_86"])
def test_the_kernels_that_measure_a_device_compile(architecture: str) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed")
    import neighbour

    from edgellm.device.limits import SOURCE

    code = compile_module(SOURCE, architecture).code
    assert all(name in code for name in (b"read_ring", b"multiply", b"count_clocks"))
    assert neighbour.KERNEL.encode() in compile_module(neighbour._SOURCE, architecture).code


def test_a_packed_checkpoint_is_written_and_runs(tmp_path: Path) -> None:
    from random_checkpoint import LLAMA_3_2_1B, write_checkpoint

    from edgellm import LLM, SamplingParams
    from edgellm.engines.building.builder import build_engine_directory
    from edgellm.kernels.quantization.packed_weight import WeightFormat

    small = {"num_hidden_layers": 1, "vocab_size": 300, "hidden_size": 256, "intermediate_size": 384}
    config = LLAMA_3_2_1B | small | {"num_attention_heads": 4, "num_key_value_heads": 2}
    write_checkpoint(tmp_path / "model", config, packed=WeightFormat("int4", 128, zeros=False, dtype="float16"))
    build_engine_directory(tmp_path / "model", tmp_path / "engines", EngineLimits(1, 16, 64), None)
    with LLM(tmp_path / "engines", backend="numpy") as llm:
        assert len(llm.generate("hello", SamplingParams(max_tokens=5, ignore_eos=True)).token_ids) == 5


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("mixture", "bits"), [("q4_0", 4.95), ("q8_0", 8.5), ("q4_k_m", 5.2)])
def test_weights_of_gguf_files_have_their_sizes_and_are_those_of_dense_ones(
    mixture: str, bits: float, dtype: str
) -> None:
    from random_checkpoint import SHAPES
    from random_draft import SCALE
    from random_layouts import even_weight, gguf_layouts

    config = decoder_config(SHAPES["llama-1b"])
    layouts = gguf_layouts(config, mixture, dtype)
    shapes = {spec.name: spec.shape for spec in decoder_weights(config) if spec.name in layouts}
    count = sum(int(np.prod(shape)) for shape in shapes.values())
    found = sum(int(np.prod(layout.shape)) for layout in layouts.values()) * 8 / count
    assert bits <= found <= 1.06 * bits
    for name, layout in layouts.items():
        assert shapes[name] == (sum(run.rows for run in layout.runs), layout.runs[0].columns)
    mixed = [name for name, layout in layouts.items() if len(layout.runs) > 1]
    assert len(mixed) == (8 if mixture == "q4_k_m" else 0)
    for format in {run.format for layout in layouts.values() for run in layout.runs}:
        values = even_weight(format, 64, 1024).values()
        assert values.std() == pytest.approx(SCALE, rel=0.02) and abs(values.mean()) < 0.15 * SCALE


@pytest.mark.parametrize(
    ("shape", "mixture", "layers", "own"),
    [
        ("qwen3-30b-a3b", "q4_k_m", 2, {"num_experts": 8}),
        ("gpt-oss-20b", "mxfp4_moe", 2, {"num_local_experts": 8, "intermediate_size": 256}),
        ("lfm2-8b-a1b", "q4_k_m", 3, {"num_experts": 8}),
        ("qwen3.5-35b-a3b", "q4_k_m", 4, {"num_experts": 8, "shared_expert_intermediate_size": 256, "head_dim": 256}),
    ],
)
def test_a_random_gguf_file_of_a_mixture_is_read_as_its_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: str, mixture: str, layers: int, own: dict[str, Any]
) -> None:
    """As its `config.json` would say, its blocks of the types that models of random weights have, and it answers."""
    from random_checkpoint import SHAPES, with_layers
    from random_gguf import write_random_gguf
    from random_layouts import gguf_layouts

    from edgellm import LLM, SamplingParams
    from edgellm.engines.backends.device_layouts import packed_layouts
    from edgellm.engines.directories.engine_directory import EngineDirectory
    from edgellm.hub.directories import local_directory

    small: dict[str, Any] = {"vocab_size": 1200, "hidden_size": 256, "intermediate_size": 512, "eos_token_id": 1}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "moe_intermediate_size": 256}
    monkeypatch.setitem(SHAPES, shape, SHAPES[shape] | small | own)
    config, dtype = decoder_config(with_layers(SHAPES[shape], layers)), "bfloat16"
    folder = local_directory(write_random_gguf(tmp_path / "model.gguf", shape, layers, mixture))
    with LLM(folder, backend="numpy") as llm:
        assert len(llm.generate("hello", SamplingParams(max_tokens=3, ignore_eos=True)).token_ids) == 3
    found = EngineDirectory.open(folder).config
    with EngineDirectory.open(folder).checkpoint() as checkpoint:
        packed = packed_layouts(checkpoint, decoder_weights(found), dtype)
    same = "mixture", "layer_kinds", "num_heads", "num_kv_heads", "head_dim", "sliding_window", "attention_bias"
    assert {key: getattr(found, key) for key in same} == {key: getattr(config, key) for key in same}
    kinds = {name: [(run.format, run.rows) for run in layout.runs] for name, layout in packed.items()}
    made = gguf_layouts(config, mixture, dtype)
    if not config.tie_word_embeddings:  # whose table is as the layers are, here as the head is
        kinds[EMBEDDING] = [(run.format, run.rows) for run in made[EMBEDDING].runs]
    assert kinds == {name: [(run.format, run.rows) for run in layout.runs] for name, layout in made.items()}


@pytest.mark.parametrize("shape", ["qwen3-30b-a3b", "lfm2-8b-a1b"])
def test_experts_of_a_random_model_are_chosen_as_often_as_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: str
) -> None:
    """By a softmax and by a sigmoid; ranks are others in each layer."""
    from experts_speed import drawn_choices
    from mixture_speed import corrections, skew, with_corrections
    from random_checkpoint import SHAPES, with_layers
    from random_model import random_runner, shape_directory

    small = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "vocab_size": 64, "head_dim": 16}
    monkeypatch.setitem(SHAPES, shape, with_layers(SHAPES[shape], 4) | small | {"num_attention_heads": 8})
    directory = with_corrections(shape_directory(tmp_path, shape, EngineLimits(1, 16, 32)))
    mixture: Any = directory.config.mixture
    with random_runner(directory, "numpy") as runner:
        skew(runner, mixture, 2048)
        *_, before, last = (weight for name, weight in runner.weights.items() if name.endswith("expert_bias"))
    by_rank, random, rows = corrections(mixture, 2048), np.random.default_rng(7), 2000
    assert not np.array_equal(before, last) and np.array_equal(np.sort(last), np.sort(by_rank))
    given = random.normal(0, 0.02 * 2048**0.5, (rows, mixture.experts)).astype(np.float32)
    drawn = drawn_choices(random, np.arange(mixture.experts), rows, mixture.chosen)
    chosen = chosen_experts(given, mixture.routing, by_rank)[0]
    found, wanted = (np.bincount(ids.ravel(), minlength=mixture.experts) / rows for ids in (chosen, drawn))
    assert np.abs(found - wanted).max() < 0.08


@pytest.mark.parametrize("rows", [1, 8, 16])
def test_forms_of_packed_layers_are_tried_shape_by_shape(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rows: int
) -> None:
    """On a GPU that is not there; a step takes the less, the more of its launches are others than ship: two of a shape.
    Faster forms stay."""
    from form_speed import sweep
    from random_checkpoint import SHAPES
    from random_model import random_directory

    config = replace(small_config(SHAPES["llama-1b"]), hidden_size=256, intermediate_size=768, num_layers=2)
    directory = random_directory(tmp_path, config, EngineLimits(1, 16, 64), "float16", "int4")
    limits, gpu = directory.limits, absent_gpu("sm_90", 132, 227 << 10)
    backend = AbsentBackend({"base": config}, limits, "float16", directory.layouts, gpu)
    engine: Any = backend.load_engine(limits.base_shape("verify" if rows > 1 else "decode", 1, rows, 64, rows))
    engine.attach(backend, backend.empty((1 << 30,), "uint8"))
    engine._bound = {name: replace(engine._memory, shape=own[0], dtype=own[1]) for name, own in engine.tensors.items()}
    engine._bound |= {name: stand_in(own, engine._memory) for name, own in directory.layouts["base"].items()}
    backend.prepare_steps()
    ships = {launch.name for launch in engine.launches()}
    sweep(engine, backend.module, lambda step: step, lambda step: 100.0 - sum(each.name not in ships for each in step))
    lines = capsys.readouterr().out.splitlines()
    shapes = [number for number, line in enumerate(lines) if line.startswith("(")]
    spans = [(98.0 - 2 * number, 100.0 - 2 * number) for number in range(4)]
    found = [tuple(float(word.rstrip(":")) for word in lines[each + 1].split()[0:6:5]) for each in shapes]
    assert found == spans
    assert lines[-1] == "all that are faster: 92.0 us, as it ships 100.0"
