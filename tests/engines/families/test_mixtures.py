"""Mixtures of experts on NumPy: greedy text against transformers, trees, batches, stacks, packed experts, bad input."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf_models import write_model
from gguf_writing import Tensor
from golden_answers import GOLDENS
from golden_sequences import Sequences
from kernel_refusals import kernel_refusal
from mxfp4_checkpoints import write_mxfp4
from numpy_kernel_device import by_fours
from packed_checkpoints import write_packed
from published_families import LFM2_8B_A1B, QWEN3_5_35B_A3B
from safetensors.numpy import load_file, save_file
from tiny_families import MIXTURES

from edgellm import LLM, Request, SamplingParams
from edgellm.commands.info import directory_facts, fact_lines
from edgellm.drafting.config import DraftingConfig
from edgellm.engines.backends.device_layouts import packed_layouts
from edgellm.engines.backends.executors import Executors
from edgellm.engines.backends.numpy_backend import NumpyBackend
from edgellm.engines.backends.tensorrt_operations import TensorRTOperations
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.checkpoints.weights import iterate_weight_parts
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.errors import (
    AdapterError,
    CheckpointError,
    EngineDirectoryError,
    EngineError,
    UnsupportedModelError,
)
from edgellm.engines.families import decoder_config
from edgellm.engines.formats.gguf_file import open_split
from edgellm.engines.gguf.model_config import model_config
from edgellm.engines.lora.adapter import LoraAdapter
from edgellm.engines.model.config import Mixture
from edgellm.engines.model.decoder import decoder_program, decoder_weights
from edgellm.engines.model.limits import EngineLimits, EngineShape
from edgellm.engines.model.memory_plan import plan_memory
from edgellm.engines.model.steps import Experts
from edgellm.kernels.experts.choice import chosen_experts

MODEL = "model.safetensors"


def stacked(source: Path, target: Path) -> Path:
    """A copy of a checkpoint whose experts are stacked, as transformers has them in memory."""
    shutil.copytree(source, target)
    tensors = load_file(source / MODEL)
    experts = sorted({name.rsplit(".", 3)[0] for name in tensors if ".experts." in name})
    for module in experts:
        count = len([name for name in tensors if name.startswith(f"{module}.") and "gate_proj" in name])
        parts = {
            "gate_up_proj": [(expert, ("gate_proj", "up_proj")) for expert in range(count)],
            "down_proj": [(expert, ("down_proj",)) for expert in range(count)],
        }
        for stack, of_each in parts.items():
            found = [[tensors.pop(f"{module}.{expert}.{part}.weight") for part in own] for expert, own in of_each]
            tensors[f"{module}.{stack}"] = np.stack([np.concatenate(own) for own in found])
    save_file(tensors, target / MODEL)
    return target


def test_stacked_experts_are_slices_of_the_file(tmp_path: Path) -> None:
    source = GOLDENS / "qwen3_moe"
    target = stacked(source, tmp_path / "stacked")
    one_by_one, of_stack = Sequences(source), Sequences(target)
    np.testing.assert_array_equal(*(each.logits(each.token_ids[:1], [0]) for each in (one_by_one, of_stack)))
    with Checkpoint.open(target) as checkpoint:
        info = checkpoint.info("model.layers.2.mlp.experts.3.up_proj.weight")
        whole = checkpoint.info("model.layers.2.mlp.experts.3.gate_proj.weight")
        assert (info.offset, info.shape) == (whole.offset + whole.nbytes, (16, 24))
        assert info.name == "model.layers.2.mlp.experts.gate_up_proj[3, 16:32]"


def test_an_expert_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    target = stacked(GOLDENS / "qwen3_moe", tmp_path / "twice")
    tensors, name = load_file(target / MODEL), "model.layers.2.mlp.experts.3.up_proj.weight"
    save_file(tensors | {name: np.zeros((16, 24), np.float16)}, target / MODEL)
    with pytest.raises(CheckpointError, match=re.escape("gate_up_proj[3, 16:32]'")) as raised:
        Checkpoint.open(target)
    assert f"'{name}'" in str(raised.value) and "Remove one" in str(raised.value)


class TestChoice:
    """Which experts a row goes through."""

    def test_ties_go_to_the_lower_id(self) -> None:
        given = np.array([[1, 3, 3, 3, 0]], np.float32)
        ids, shares = chosen_experts(given, Mixture(5, 2, 8).routing)
        assert ids.tolist() == [[1, 2]] and shares.tolist() == [[0.5, 0.5]]

    def test_shares_are_of_all_unless_normalized(self) -> None:
        given = np.log(np.array([[0.1, 0.4, 0.2, 0.3]], np.float32))
        ids, shares = chosen_experts(given, Mixture(4, 2, 8, normalized=False).routing)
        assert ids.tolist() == [[1, 3]]
        np.testing.assert_allclose(shares, [[0.4, 0.3]], rtol=1e-6)
        _, shares = chosen_experts(given, Mixture(4, 2, 8, scale=2.5).routing)
        np.testing.assert_allclose(shares, [[2.5 * 4 / 7, 2.5 * 3 / 7]], rtol=1e-6)

    def test_a_correction_is_for_the_choice_alone(self) -> None:
        given, mixture = np.zeros((1, 3), np.float32), Mixture(3, 1, 8, "sigmoid", normalized=False)
        ids, shares = chosen_experts(given, mixture.routing, np.array([0, 0, 0.1], np.float32))
        assert ids.tolist() == [[2]] and shares.tolist() == [[0.5]]
        _, shares = chosen_experts(given, replace(mixture, normalized=True, epsilon=0.5).routing)
        assert shares.tolist() == [[0.5]]

    @pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
    def test_nan_is_of_its_row_alone(self, scores: str) -> None:
        given = np.array([[1, 2, 3], [1, np.nan, 3], [3, 2, 1]], np.float32)
        mixture = Mixture(3, 2, 8, scores)
        ids, shares = chosen_experts(given, mixture.routing)
        assert np.isnan(shares[1]).all() and ids.min() >= 0 and ids.max() < 3
        for row in (0, 2):
            alone = chosen_experts(given[row : row + 1], mixture.routing)
            assert alone[0][0].tolist() == ids[row].tolist() and alone[1][0].tolist() == shares[row].tolist()


DRAFTING = DraftingConfig(draft_top_k=4, draft_steps=3, verify_tree_size=12, adaptive=False)
TEXTS = ("hello", "why is the sky blue, and what else is there to say of it?", "1 + 1")


def answers(directory: Path) -> list[tuple[int, ...]]:
    """A batch of three, greedy and drawn."""
    with LLM(directory, backend="numpy") as llm:
        asked = []
        for number, text in enumerate(TEXTS):
            params = SamplingParams(temperature=0.9 * (number % 2), seed=number, max_tokens=12, ignore_eos=True)
            asked.append(Request(llm.tokenizer.encode_chat([{"role": "user", "content": text}]), None, params))
        return [response.token_ids for response in llm.handle(asked)]


@pytest.mark.parametrize("family", sorted(MIXTURES.keys() - {"gpt_oss"}))  # which is packed in a way of its own
def test_packed_answers_are_those_of_the_dense_twin(
    family: str, make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    source = make_checkpoint(tmp_path / "model", 4, **MIXTURES[family])
    found = []
    for model in write_packed(source, tmp_path / "packed", tmp_path / "twin"):
        dtype = "bfloat16" if family == "gemma4_moe" else "float16"
        build_engine_directory(model, tmp_path / f"{model.name}_engines", EngineLimits(3, 32, 128), [], dtype)
        found.append(answers(tmp_path / f"{model.name}_engines"))
    assert found[0] == found[1] and len(set(found[0])) == len(TEXTS)
    facts = directory_facts(tmp_path / "packed_engines", verify=True)
    assert facts["differences"] == []
    mixture = EngineDirectory.read(tmp_path / "packed_engines").config.mixture
    assert mixture is not None and 0 < facts["mixture"]["active_parameters"] < facts["parameters"]
    assert facts["mixture"]["token_bytes"] < sum(facts["weights"].values())
    said = "\n".join(fact_lines(facts))
    assert f"mixtures of {mixture.experts} experts of {mixture.size}, {mixture.chosen} for each token" in said


def test_packed_experts_of_a_width_of_their_own(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """And the layers that lead there and back."""
    source = make_checkpoint(tmp_path / "model", 4, **MIXTURES["nemotron_h_moe"] | {"moe_latent_size": 32})
    found = []
    for model in write_packed(source, tmp_path / "packed", tmp_path / "twin"):
        build_engine_directory(model, tmp_path / f"{model.name}_engines", EngineLimits(3, 32, 128), [], "float16")
        found.append(answers(tmp_path / f"{model.name}_engines"))
    assert found[0] == found[1] and len(set(found[0])) > 1
    config = EngineDirectory.open(tmp_path / "packed_engines").config
    assert config.mixture is not None and config.mixture.latent_size == 32


@pytest.mark.parametrize(
    ("backend", "kv_cache"),
    [("numpy", "compute"), *(pytest.param("tensorrt", each, marks=pytest.mark.gpu) for each in ("compute", "int8"))],
)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "gemma4_moe"])
def test_sessions_snapshots_adapters_and_drafts(
    family: str,
    backend: str,
    kv_cache: str,
    make_checkpoint: Callable[..., Path],
    make_adapter: Callable[..., Path],
    make_draft: Callable[..., Path],
    tmp_path: Path,
) -> None:
    """Answers of a conversation with and without what was kept of it, drafted and plain; an adapter changes them."""
    source = make_checkpoint(tmp_path / "model", 4, **MIXTURES[family] | {"torch_dtype": "bfloat16"})
    engines, kept = tmp_path / "engines", tmp_path / "kept.edgekv"
    with Checkpoint.open(source) as checkpoint:
        config = decoder_config(checkpoint.config)
    adapter = make_adapter(tmp_path / "adapter", config, targets=("q_proj", "o_proj"))
    limits = EngineLimits(
        *(2, 16, 256),
        kv_cache=kv_cache,
        draft_top_k=4,
        draft_steps=3,
        verify_tree_size=12,
        lora_slots=1,
        max_lora_rank=4,
    )
    build_engine_directory(
        source, engines, limits, [], draft=make_draft(tmp_path / "draft"), adapters={"style": adapter}
    )
    params = SamplingParams(max_tokens=10, ignore_eos=True)

    def said(adapter: str | None, drafting: DraftingConfig | None, load: bool = False) -> list[tuple[int, ...]]:
        with LLM(engines, backend=backend, drafting=drafting) as llm:
            if load:
                llm.load_snapshot(kept)
            session = llm.create_session("be brief", params, adapter=adapter)
            found = [session.send(text).token_ids for text in TEXTS]
            if not (load or kept.exists()):
                llm.cache_system_prompt("be brief", save=kept)
            return found

    plain = said(None, None)
    assert said(None, None, load=True) == plain and said(None, DRAFTING) == plain
    assert said("style", None) == said("style", DRAFTING) != plain


def blocks_of_gguf(name: str, packed: dict[str, np.ndarray]) -> Tensor | None:
    """A stack of gpt-oss's blocks as GGUF has them: of 32 columns the scale, then a byte of columns i and 16 + i."""
    match = re.fullmatch(r"blk\.(\d+)\.ffn_(gate|up|down)_exps\.weight", name)
    if match is None:
        return None
    module = f"model.layers.{match[1]}.mlp.experts.{'down' if match[2] == 'down' else 'gate_up'}_proj"
    own = slice(None) if match[2] == "down" else slice(int(match[2] == "up"), None, 2)
    blocks, scales = (packed[f"{module}_{kind}"][:, own] for kind in ("blocks", "scales"))
    codes = np.stack((blocks & 15, blocks >> 4), axis=-1).reshape(*blocks.shape[:3], 32)
    data = np.concatenate((scales[..., None], codes[..., :16] | codes[..., 16:] << 4), axis=-1)
    return Tensor("mxfp4", (*blocks.shape[:2], 32 * blocks.shape[2]), data.tobytes())


def test_the_blocks_of_gpt_oss_are_their_dense_twin(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Experts in blocks and scales, the same numbers dense and transposed, as either is published, and in GGUF."""
    source = make_checkpoint(tmp_path / "model", 4, **MIXTURES["gpt_oss"], dtype="float32", torch_dtype=None)
    found = []
    for model in write_mxfp4(source, tmp_path):
        engines = tmp_path / f"{model.name}_engines"
        build_engine_directory(model, engines, EngineLimits(3, 32, 128), [], "float16")
        found.append(answers(engines))
    packed = load_file(tmp_path / "packed" / MODEL)
    folder = shutil.copytree(tmp_path / "packed", tmp_path / "gguf")
    file = write_model(tmp_path / "twin", folder / "model.gguf", kinds=lambda name, _: blocks_of_gguf(name, packed))
    (folder / MODEL).unlink()
    (folder / "config.json").write_text(json.dumps(model_config(open_split(file))))
    build_engine_directory(folder, tmp_path / "gguf_engines", EngineLimits(3, 32, 128), [], "float16")
    found.append(answers(tmp_path / "gguf_engines"))
    assert found[0] == found[1] == found[2] and len(set(found[0])) == len(TEXTS)
    packed["model.layers.2.mlp.experts.down_proj_scales"][5, 3, 1] = 255
    save_file(packed, tmp_path / "packed" / MODEL)
    with (
        Checkpoint.open(tmp_path / "packed") as checkpoint,
        pytest.raises(CheckpointError, match=r"weight_scales' holds 255 at \[3, 1\].*, expected exponents below 255"),
    ):
        checkpoint.stored("model.layers.2.mlp.experts.5.down_proj.weight", (64, 128))


def test_a_packed_gate_of_the_expert_of_all_tokens_is_dense_on_a_gpu(
    make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """The choice of experts reads it as it is."""
    source = make_checkpoint(tmp_path / "model", 4, **MIXTURES["qwen3_5_moe"])
    packed, twin = write_packed(source, tmp_path / "packed", tmp_path / "twin")
    name, found = "model.layers.0.mlp.shared_expert_gate.weight", []
    for path in (packed, twin):
        with Checkpoint.open(path) as checkpoint:
            specs = decoder_weights(decoder_config(checkpoint.config))
            (gate,) = (spec for spec in specs if spec.name == name)
            layouts = packed_layouts(checkpoint, specs, "float16")
            assert name not in layouts and (name.replace("_gate", ".down_proj") in layouts) == (path == packed)
            found.append(
                np.concatenate([values for _, _, values in iterate_weight_parts(checkpoint, [gate], "float16")])
            )
    np.testing.assert_array_equal(*found)


def test_what_gpt_oss_does_not_have_is_refused_by_name() -> None:
    values = json.loads((GOLDENS / "gpt_oss" / "config.json").read_text())
    for changed, problem in (
        ({"swiglu_alpha": 1.5}, "swiglu_alpha is 1.5, supported is 1.702"),
        ({"norm_topk_prob": False}, "norm_topk_prob is false, supported is true"),
        ({"experts_per_token": 5}, "experts_per_token is 5, expected 2, as num_experts_per_tok says"),
    ):
        with pytest.raises((CheckpointError, UnsupportedModelError), match=problem):
            decoder_config(values | changed)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "qwen3_5_moe_text"])
def test_kernels_run_mixtures_or_refuse_them_by_name(name: str) -> None:
    """Each phase of an engine, where heads have sizes that kernels take; what is not done is said."""
    config = by_fours(Sequences(GOLDENS / name).config)
    limits = EngineLimits(2, 128, 512)
    for shape in limits.engine_shapes():
        assert kernel_refusal(config, shape, "float16", 1 << 20) is None
        asked = Executors({"base": config}, limits, "float16", 1 << 20, executor="tensorrt")
        assert asked.planned(shape) == frozenset()  # of which TensorRT has nothing
        for change, reason in (
            ({"experts": 1024}, "kernels choose up to 32 of up to 512 experts, not 2 of 1024"),
            ({"size": 20}, "experts have widths in multiples of 8 and even numbers of rows, not [24, 20]"),
        ):
            assert config.mixture is not None
            other = replace(config, mixture=replace(config.mixture, **change))
            told = Executors({"base": other}, limits, "float16", 1 << 20).problem(shape)
            assert told is not None and reason in told and told.endswith("Take --backend numpy")


def test_the_plan_counts_no_mapped_experts() -> None:
    config = Sequences(GOLDENS / "qwen3_moe").config
    specs = decoder_weights(config)
    sizes = {spec.name: int(np.prod(spec.shape)) for spec in specs}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    on_numpy, on_a_gpu = (plan_memory(config, EngineLimits(), specs, dtype).items for dtype in ("float32", "float16"))
    assert on_numpy["weights"] == 4 * (sum(sizes.values()) - experts)
    assert on_numpy["an expert's weights"] == 4 * 2 * 16 * 24
    assert on_a_gpu["weights"] == 2 * sum(sizes.values()) and "an expert's weights" not in on_a_gpu


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"num_experts_per_tok": 7}, "num_experts_per_tok is 7, but there are 6 experts"),
        ({"num_local_experts": 5000}, "num_local_experts is 5000, expected a whole number from 1 to 4096"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok is 0, expected a whole number"),
        ({"moe_intermediate_size": "16"}, 'moe_intermediate_size is "16", expected'),
        ({"mlp_only_layers": "1"}, 'mlp_only_layers is "1", expected a list of layers'),
        ({"n_shared_experts": 1}, "n_shared_experts is 1, which is not supported"),
        ({"topk_method": "noaux_tc"}, 'topk_method is "noaux_tc", which is not supported'),
        ({"score_function": "sigmoid"}, 'score_function is "sigmoid", which is not supported'),
        ({"swiglu_limit": 7.0}, "swiglu_limit is 7.0, which is not supported"),
        ({"router_logit_softcapping": 30.0}, "router_logit_softcapping is 30.0, which is not known of this family"),
        ({"use_routing_bias": True}, "use_routing_bias is true, which is not known of this family"),
        ({"num_experts": 4}, "num_local_experts is 6, expected 4, as num_experts says"),
    ],
)
def test_configurations_that_are_refused(changed: dict[str, object], problem: str) -> None:
    config = json.loads((GOLDENS / "qwen3_moe" / "config.json").read_text())
    for same in ({}, {"num_experts": 6}, {"score_function": "softmax"}, {"output_router_logits": True}):
        assert decoder_config(config | same).mixture == Mixture(6, 2, 16, dense_layers=(1,))
    with pytest.raises((CheckpointError, UnsupportedModelError)) as raised:
        decoder_config(config | changed)
    assert problem in str(raised.value)


def test_the_largest_lfm2_has_the_published_number_of_parameters() -> None:
    """8,339,929,856 parameters, and a bias of each expert beside them, which transformers calls a buffer."""
    config = decoder_config(LFM2_8B_A1B)
    assert config.mixture == Mixture(32, 4, 1792, "sigmoid", True, True, 1e-6, 1.0, (0, 1))
    assert sum(math.prod(spec.shape) for spec in decoder_weights(config)) == 8_339_929_856 + 22 * 32
    for changed, problem in (
        ({"num_dense_layers": 25}, "num_dense_layers is 25, expected a whole number from 0 to 24"),
        ({"use_expert_bias": 1}, "use_expert_bias is 1, expected true or false"),
        ({"routed_scaling_factor": 0}, "routed_scaling_factor is 0, expected a number above 0"),
    ):
        with pytest.raises(CheckpointError, match=problem):
            decoder_config(LFM2_8B_A1B | changed)


def test_clipped_projections_are_refused() -> None:
    config = json.loads((GOLDENS / "olmoe" / "config.json").read_text())
    with pytest.raises(UnsupportedModelError, match=r"clip_qkv is 8.0, which is not supported"):
        decoder_config(config | {"clip_qkv": 8.0})


def test_every_other_layer_is_dense_by_the_step() -> None:
    config = json.loads((GOLDENS / "qwen3_moe" / "config.json").read_text())
    found = decoder_config(config | {"mlp_only_layers": None, "decoder_sparse_step": 2, "norm_topk_prob": False})
    assert found.mixture == Mixture(6, 2, 16, normalized=False, dense_layers=(0, 2))


def changed_tensors(tmp_path: Path, change: Callable[[dict[str, np.ndarray]], None]) -> str:
    """What is said of the golden model where its tensors are changed."""
    shutil.copytree(GOLDENS / "qwen3_moe", tmp_path / "changed")
    tensors = load_file(tmp_path / "changed" / MODEL)
    change(tensors)
    save_file(tensors, tmp_path / "changed" / MODEL)
    with pytest.raises(CheckpointError) as raised:
        Sequences(tmp_path / "changed")
    return str(raised.value)


def test_missing_experts_and_routers_of_wrong_shapes(tmp_path: Path) -> None:
    def change(tensors: dict[str, np.ndarray]) -> None:
        del tensors["model.layers.2.mlp.experts.5.up_proj.weight"]
        tensors["model.layers.0.mlp.gate.weight"] = tensors["model.layers.0.mlp.gate.weight"][:4].copy()

    said = changed_tensors(tmp_path, change)
    assert "missing: model.layers.2.mlp.experts.5.up_proj.weight [16, 24]" in said
    assert "wrong shape: model.layers.0.mlp.gate.weight is [4, 24], expected [6, 24]" in said


def test_nan_in_an_expert_is_found_where_it_is_loaded(tmp_path: Path) -> None:
    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors["model.layers.2.mlp.experts.5.up_proj.weight"][3, 4] = np.nan

    said = changed_tensors(tmp_path, change)
    assert "'model.layers.2.mlp.experts.5.up_proj.weight'" in said and "nan at [3, 4]" in said


@pytest.mark.parametrize(
    ("backend", "dtype", "ahead"),
    [("numpy", "float32", 0), ("numpy", "bfloat16", 1), pytest.param("tensorrt", "bfloat16", 1, marks=pytest.mark.gpu)],
)
def test_scores_that_are_no_numbers_fail_their_request_alone(
    backend: str,
    dtype: str,
    ahead: int,
    make_checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """One token's embedding has an element that no other has, and that the first router multiplies by 1e38. The other
    request is longer: a step of both is always under way where steps are launched ahead."""
    monkeypatch.setattr(NumpyBackend, "steps_ahead", ahead)
    more = {**MIXTURES["qwen3_moe"], "dtype": "float32", "torch_dtype": None, "tie_word_embeddings": False}
    source = make_checkpoint(tmp_path / "model", 4, **more)
    tensors, token = {name: each.astype(np.float32) for name, each in load_file(source / MODEL).items()}, 40
    tensors["model.embed_tokens.weight"][:, 5] = 0
    tensors["model.embed_tokens.weight"][token, 5] = -1000
    tensors["model.layers.0.self_attn.o_proj.weight"][5] = 0
    tensors["model.layers.0.post_attention_layernorm.weight"][5] = 1
    tensors["model.layers.0.mlp.gate.weight"][:, 5] = 1e38
    save_file(tensors, source / MODEL)
    build_engine_directory(source, tmp_path / "engines", EngineLimits(2, 32, 128), [], dtype)
    good, bad, later = (
        Request([7, 9, 11, last], None, SamplingParams(max_tokens=most, temperature=0.0, ignore_eos=True, **own))
        for last, most, own in ((12, 14, {}), (token, 6, {}), (12, 6, {"logit_bias": {token: 100.0}}))
    )
    with LLM(tmp_path / "engines", backend=backend) as llm:
        (alone,) = llm.handle([good])
        assert not isinstance(alone, Exception), alone
        assert token not in alone.token_ids
        for request in (bad, later):  # whose prompt has the token, and whose first token it is
            failed, beside = llm.handle([request, good])
            assert isinstance(failed, EngineError) and "logits behind this text are infinite or NaN" in str(failed)
            assert beside.token_ids == alone.token_ids
        assert llm.handle([good])[0].token_ids == alone.token_ids


def test_experts_of_different_formats_are_as_the_settings_say(
    make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """One expert is dense: ignored by name it is read, otherwise it is said to lack what it should have."""
    source = make_checkpoint(tmp_path / "model", 4, **MIXTURES["qwen3_moe"])
    packed, twin = write_packed(source, tmp_path / "packed", tmp_path / "twin")
    dense, tensors = load_file(twin / MODEL), load_file(packed / MODEL)
    modules = [f"model.layers.2.mlp.experts.5.{part}_proj" for part in ("gate", "up", "down")]
    for name in [name for name in tensors if name.rpartition(".")[0] in modules]:
        del tensors[name]
    save_file(tensors | {f"{module}.weight": dense[f"{module}.weight"] for module in modules}, packed / MODEL)
    with pytest.raises(CheckpointError, match=r"missing: model.layers.2.mlp.experts.5.gate_proj.weight_packed"):
        build_engine_directory(packed, tmp_path / "refused", EngineLimits(3, 32, 128), [], "float16")
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"]["ignore"] += modules
    (packed / "config.json").write_text(json.dumps(config))
    found = []
    for model in (packed, twin):
        build_engine_directory(model, tmp_path / f"{model.name}_engines", EngineLimits(3, 32, 128), [], "float16")
        found.append(answers(tmp_path / f"{model.name}_engines"))
    assert found[0] == found[1]


def test_damaged_descriptions(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "model", **MIXTURES["qwen3_moe"])
    build_engine_directory(source, tmp_path / "engines", EngineLimits(1, 16, 96), [])
    path = tmp_path / "engines" / "edgellm.json"
    described = json.loads(path.read_text())
    for key, value, problem in (
        ("chosen", 90, "'chosen' is 90, there are 8 experts"),
        ("scores", "best", "'scores' is 'best', expected one of softmax, sigmoid"),
        ("dense_layers", [9], r"'dense_layers' is \[9\], expected different layers from 0 to 2"),
        ("experts", 5000, "'experts' is 5000, expected"),
    ):
        changed = described["config"] | {"mixture": described["config"]["mixture"] | {key: value}}
        path.write_text(json.dumps(described | {"config": changed}))
        with pytest.raises(EngineDirectoryError, match=problem):
            EngineDirectory.open(tmp_path / "engines")


@pytest.mark.parametrize(
    ("family", "layer"),
    [
        ("qwen3_moe", "mlp.experts.1.up_proj"),
        ("granitemoe", "block_sparse_moe.input_linear"),
        ("granite4_moe", "shared_mlp.output_linear"),
        ("nemotron_h_moe", "mixer.shared_experts.up_proj"),
    ],
)
def test_adapters_of_experts_are_refused_by_name(
    family: str, layer: str, make_checkpoint: Callable[..., Path], make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    source = make_checkpoint(tmp_path / "model", **MIXTURES[family])
    with Checkpoint.open(source) as checkpoint:
        config = decoder_config(checkpoint.config)
    adapter = make_adapter(tmp_path / "adapter", config)
    assert any(name.endswith(".q_proj") for name in LoraAdapter.read(adapter, config).pairs)
    tensors = load_file(adapter / "adapter_model.safetensors")
    for kind, shape in (("A", (4, config.hidden_size)), ("B", (32, 4))):
        tensors[f"base_model.model.model.layers.0.{layer}.lora_{kind}.weight"] = np.ones(shape, np.float32)
    save_file(tensors, adapter / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match=r"it adapts a mixture's experts \(2 tensors, the first is"):
        LoraAdapter.read(adapter, config)


def test_tensorrt_has_nothing_for_experts() -> None:
    program = decoder_program(Sequences(GOLDENS / "qwen3_moe").config, EngineShape("decode", 1, 1, 8, 8))
    (step, *_) = (each for each in program.steps if isinstance(each, Experts))
    with pytest.raises(EngineError, match="TensorRT has nothing for the mixture of experts model"):
        TensorRTOperations.experts(None, step)  # type: ignore[arg-type]


def test_the_published_qwen3_5_has_its_parameters() -> None:
    """Those of the language model, as transformers counts them."""
    specs = decoder_weights(decoder_config(QWEN3_5_35B_A3B))
    assert sum(math.prod(spec.shape) for spec in specs) == 34_660_610_688
