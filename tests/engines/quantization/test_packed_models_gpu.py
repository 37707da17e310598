"""Packed models on a GPU: they answer as their dense twins do, bit by bit, and as NumPy does but for rounding."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from checkpoint_files import read_tensors, write_tensors
from device_bits import rounded
from gguf_models import MIXTURE, write_mixture
from golden_files import golden_folder
from packed_checkpoints import MODEL, pack_embedding, write_packed
from packed_twins import DRAFTING, NO_ADAPTERS, QUESTIONS, answer_logits, answers
from safetensors import safe_open
from typer.testing import CliRunner

from edgellm.commands.app import create_app
from edgellm.engines.backends.device_layouts import with_delta_products
from edgellm.engines.backends.numpy_backend import NumpyBackend
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.families import decoder_config
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.quantizer.quantizer import QuantizationOptions, quantize_checkpoint
from edgellm.engines.runners.comparison import LOGIT_TOLERANCES, greedy_tokens, open_runner, teacher_forced_logits
from edgellm.opened_model import SHIPPED_MODEL
from edgellm.text.tokenizer import Tokenizer

pytestmark = pytest.mark.gpu

GOLDENS = golden_folder("quantized")
LIMITS = EngineLimits(3, 128, 512, 4, 4, 24, max_lora_rank=8, lora_slots=2, image_rows=(81,))
ADAPTERS = ("pirate", None, "json")
IMAGE = SHIPPED_MODEL / "scenes" / "toys.png"


@pytest.fixture(scope="module", params=[(), ("v_proj", "up_proj")], ids=["all", "v and up dense"])
def twins(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The shipped model and its draft, packed in groups of 32 with zero points, some layers of the model dense or none,
    and the same weights dense."""
    folder = tmp_path_factory.mktemp("packed")
    models = write_packed(SHIPPED_MODEL, folder / "packed", folder / "twin", None, *request.param)
    drafts = write_packed(SHIPPED_MODEL / "draft", folder / "packed_draft", folder / "twin_draft", None)
    adapters = {name: SHIPPED_MODEL / "lora" / name for name in ("json", "pirate")}
    targets = folder / "packed_engines", folder / "twin_engines"
    for model, draft, target in zip(models, drafts, targets, strict=True):
        parts = {"draft": draft, "adapters": adapters, "vision": SHIPPED_MODEL / "vision"}
        build_engine_directory(model, target, LIMITS, None, "float16", **parts)
    return targets


@pytest.mark.parametrize("adapters", [NO_ADAPTERS, ADAPTERS], ids=["plain", "adapters"])
def test_answers_are_those_of_the_dense_twin(twins: tuple[Path, Path], adapters: tuple[str | None, ...]) -> None:
    packed, twin = twins
    plain = answers(twin, None, adapters, image=IMAGE)
    assert len(set(plain[:3])) == 3
    assert answers(packed, None, adapters, image=IMAGE) == plain
    assert answers(packed, DRAFTING, adapters, image=IMAGE) == plain


def test_answers_with_kv_rows_of_8_bits_are_those_of_the_dense_twin(twins: tuple[Path, Path]) -> None:
    packed, twin = twins
    plain = answers(twin, None, kv_cache="int8", image=IMAGE)
    assert answers(packed, DRAFTING, kv_cache="int8", image=IMAGE) == plain


def test_logits_are_the_dense_twins_bit_by_bit(twins: tuple[Path, Path]) -> None:
    (*_, found), (*_, dense) = map(answer_logits, twins)
    np.testing.assert_array_equal(found, dense)


def assert_agrees_with_numpy(directory: EngineDirectory, prompt: list[int], count: int, times: int = 1) -> None:
    """Logits of a greedy answer, which is the same but where its two likeliest tokens are close, within so many times
    the dtype's tolerance."""
    with open_runner("numpy", directory) as runner:
        answer = greedy_tokens(runner, prompt, count)
        expected = teacher_forced_logits(runner, prompt, answer)
    with open_runner("tensorrt", directory) as runner:
        found, greedy = teacher_forced_logits(runner, prompt, answer), greedy_tokens(runner, prompt, count)
        memory = runner.memory_plan.items["weights"]
    allowed = times * LOGIT_TOLERANCES[directory.dtype] * np.abs(expected).max()
    print(f"\n{directory.path.name}: {np.abs(found - expected).max() / allowed:.2f} of what is allowed, {memory} bytes")
    assert np.abs(found - expected).max() <= allowed
    first = next((n for n, pair in enumerate(zip(answer, greedy, strict=True)) if pair[0] != pair[1]), None)
    if first is not None:
        second, top = np.sort(expected[first])[-2:]
        assert top - second <= 2 * allowed


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_model_that_was_quantized_here_agrees_with_numpy(symmetric: bool, tmp_path: Path) -> None:
    options = QuantizationOptions(4, 64, symmetric, "rtn")
    quantize_checkpoint(SHIPPED_MODEL, tmp_path / "int4", options)
    build_engine_directory(tmp_path / "int4", tmp_path / "engines", EngineLimits(1, 128, 512))
    directory = EngineDirectory.open(tmp_path / "engines")
    prompt = Tokenizer.from_directory(directory.path).encode_chat([{"role": "user", "content": QUESTIONS[1]}])
    assert_agrees_with_numpy(directory, (prompt * 4)[:150], 24)
    for command in (["doctor"], ["generate", QUESTIONS[0], "--max-tokens", "8"]):
        result = CliRunner().invoke(create_app(), [*command, "--model", str(directory.path)])
        assert result.exit_code == 0, result.output
        print(result.output)


def test_a_packed_embedding_agrees_with_numpy(tmp_path: Path) -> None:
    """Tokens are looked up in it, and of the shipped model it is the head, too."""
    models = write_packed(SHIPPED_MODEL, tmp_path / "packed", tmp_path / "twin", None)
    pack_embedding(*models, "Embedding")
    build_engine_directory(models[0], tmp_path / "engines", EngineLimits(1, 128, 512), None, "float16")
    directory = EngineDirectory.open(tmp_path / "engines")
    prompt = Tokenizer.from_directory(directory.path).encode_chat([{"role": "user", "content": QUESTIONS[1]}])
    assert_agrees_with_numpy(directory, prompt, 24)


#: Golden models with other formats, in their own dtypes: of each what kernels read differently.
PUBLISHED = (
    *("awq_group32", "awq_whole_rows", "gptq_v2_zeros", "ct_w4_group32_zeros", "ct_w4_group16_actorder_static"),
    *("ct_w8_group32_zeros", "gptq_v1_bits8_whole_rows", "ct_w8_channel_head"),
    *("ct_fp8_tensor", "fp8_blocks", "modelopt_fp8_channels", "ct_nvfp4", "modelopt_nvfp4"),
    *("ct_w4_qwen3_5", "fp8_blocks_qwen3_5"),  # gates of the delta rule dense beside packed projections
    *("awq_exceptions", "ct_mixed", "gptq_v1_bias_dynamic"),  # q, k and v packed in part, or differently
)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_layouts_agree_with_numpy(name: str) -> None:
    assert_agrees_with_numpy(*published(GOLDENS / name), 4)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("ct16_w4_actorder_group_zeros", None),
        ("gptq_v2_desc_act", None),
        # Not in its own bfloat16, of which this model makes a tenth of its largest logit (`open_rounded_runner`).
        ("modelopt_int4_awq", "float16"),
        ("modelopt_nvfp4_awq", None),
    ],
)
@pytest.mark.parametrize("alike", [True, False], ids=["one order", "each its own"])
def test_permuted_and_scaled_inputs_agree_with_numpy(name: str, dtype: str | None, alike: bool, tmp_path: Path) -> None:
    shutil.copytree(GOLDENS / name, tmp_path / name)
    tensors, endings = read_tensors(tmp_path / name / MODEL), ("weight_g_idx", "g_idx", "pre_quant_scale")
    for key in list(tensors):  # as packages make them: layers that share an input are quantized behind one another
        for part, first in (("k_proj", "q_proj"), ("v_proj", "q_proj"), ("up_proj", "gate_proj")):
            if alike and key.endswith(tuple(f"{part}.{ending}" for ending in endings)):
                tensors[key] = tensors[key.replace(part, first)]
    write_tensors(tmp_path / name / MODEL, tensors)
    assert_agrees_with_numpy(*published(tmp_path / name, dtype), 4)


#: Types each everywhere, and mixtures, also of layers that are multiplied as one.
GGUF = {
    "q4_0": dict.fromkeys(MIXTURE, "q4_0"),
    "q8_0": dict.fromkeys(MIXTURE, "q8_0"),
    "mixture": MIXTURE,
    "q4_0 with q4_1": dict.fromkeys(MIXTURE, "q4_0") | {"attn_v": "q4_1", "ffn_down": "q4_1"},
    "gates": dict.fromkeys(MIXTURE, "q4_0") | {"ffn_gate": "q5_0"},
    "others": {
        **{"attn_q": "q5_0", "attn_k": "q5_0", "attn_v": "q5_1", "attn_output": "iq4_nl"},
        **{"ffn_gate": "mxfp4", "ffn_up": "mxfp4", "ffn_down": "q4_1"},
    },
    "v and ups dense": dict.fromkeys(MIXTURE, "q4_k") | {"attn_v": "float16", "ffn_up": "float16"},
    "k and gates dense": MIXTURE | {"attn_k": "float32", "ffn_gate": "float16"},
    "k types": {name: "q6_k" if name in ("attn_v", "ffn_down") else "q5_k" for name in MIXTURE},
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", GGUF)
def test_gguf_files_agree_with_numpy(name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the values as a GPU holds them: rounding them to bfloat16 alone moves logits by up to a twentieth. Minima make
    large activations, whose bfloat16 is as coarse."""
    load = NumpyBackend.load_weights
    monkeypatch.setattr(NumpyBackend, "load_weights", lambda backend, *given: rounded(load(*given), dtype))
    folder = write_mixture(tmp_path / "model", GGUF[name], "q8_0" if "q4" not in name else "q6_k", 0.0008)
    config = decoder_config(json.loads((folder / "config.json").read_text()))
    directory = EngineDirectory(folder, config, dtype, "auto", EngineLimits(1, 16, 64), {}, "", name)
    times = 2 if dtype == "bfloat16" else 1
    assert_agrees_with_numpy(directory, [(7 * place + 3) % 96 for place in range(20)], 8, times)


def published(folder: Path, dtype: str | None = None) -> tuple[EngineDirectory, list[int]]:
    """The engine directory that a checkpoint is, in its own dtype or another, and the prompt of its golden answers."""
    with Checkpoint.open(folder) as checkpoint:
        config = with_delta_products(decoder_config(checkpoint.config, checkpoint.generation_config), checkpoint)
        dtype = dtype or str(checkpoint.dtype)
    with safe_open(folder / "expected.safetensors", "np") as file:
        prompt = file.get_tensor("token_ids")[0].tolist()
    return EngineDirectory(folder, config, dtype, "auto", EngineLimits(1, 16, 64), {}, "", folder.name), prompt
