"""Programs print as they always did: a plan is built anew where the text that it was built from is another."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

import pytest
from golden_files import golden_folder
from golden_vision import NAMES, golden_config
from safetensors import safe_open

from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.families import decoder_config
from edgellm.engines.families.drafts import read_draft
from edgellm.engines.families.vision_encoders import vision_program
from edgellm.engines.model.decoder import decoder_program
from edgellm.engines.model.draft_decoder import draft_program
from edgellm.engines.model.limits import EngineLimits, EngineShape

GOLDENS = golden_folder("decoder")
SHAPES = (
    EngineShape("decode", 2, 1, 64, 80),
    EngineShape("verify", 1, 8, 64, 80, 8, kv_cache="int8"),
    EngineShape("prefill", 1, 16, 64, 80),
    EngineShape("prefill", 1, 16, 64, 80, lora_slots=2, lora_rank=8),
)
#: The digests of programs that plans of earlier releases were built from; Ministral 3's since its queries are scaled.
TEXTS = {
    "cwm": "9cacdc9190900737",
    "gemma": "e70c7554139c147c",
    "gemma_multi_head_biases": "845f1593219dfb06",
    "granite_biases": "f742e61f3f90364d",
    "granite_tied": "b65f1a54806ad92f",
    "llama_biases_head_dim_10": "76bbae8a30fbfcef",
    "llama_dynamic": "d85e90c5f848f16b",
    "llama_linear": "d85e90c5f848f16b",
    "llama_llama3": "d85e90c5f848f16b",
    "llama_longrope_long": "d85e90c5f848f16b",
    "llama_longrope_short": "d85e90c5f848f16b",
    "llama_multi_head_old_layout": "561127f5b602b04f",
    "llama_tied_sharded": "1dc2e02aa3916ea8",
    "llama_untied": "9cacdc9190900737",
    "ministral3": "a552062c067dd464",
    "mistral": "b91c2035c94d3238",
    "mistral3_ministral3": "1d8e9c147f1c2368",
    "mistral_window": "d85e90c5f848f16b",
    "phi3": "9cacdc9190900737",
    "phi3_partial_tied": "99b966273c9b798f",
    "qwen2": "95f041f98af6c700",
    "qwen2_float16": "3ed0cbe06219490d",
    "qwen2_yarn": "225278ac40ca065d",
    "qwen3": "4bf36503f8e2991a",
    "qwen3_biases_bfloat16": "18cf163127cd265a",
    "seed_oss": "ec451b6ee569eb7f",
    "seed_oss_biases": "22a2999d46df4129",
    "smollm3_interval": "5942f5381f1df6b2",
    "smollm3_list_tied": "922c01dbf384e875",
}
#: Of families that came later, as they were on 2026-11-29.
LATER_TEXTS = {
    "cwm_window_5": "bf528dae0cc2b962",
    "ernie4_5": "1f5ecc44b0df3c89",
    "exaone4": "5598c8eda37a986b",
    "gemma2": "65254690dcfdf615",
    "gemma3": "98246c6a543bc378",
    "gemma3_old_layout": "1b492d1e32403e1f",
    "gemma4": "cc0e270019f5a20e",
    "gemma4_moe": "4ef809e5e99bd2f0",
    "gemma4_plain": "a8ec6e15c56e195f",
    "gemma4_unified": "886ba29730994389",
    "gpt_oss": "3ea17fd02d235147",
    "granite4": "1e7a908000c5884a",
    "granite4_hybrid": "a0aea45f0a02a85b",
    "granite4_moe": "7caef62974e6a591",
    "granitemoe": "1c3fb446178d3af0",
    "hunyuan": "6bb484ad30c75746",
    "lfm2": "dc58f20b18a78976",
    "lfm2_biases_wide": "c77bb88f37ac613a",
    "lfm2_moe": "706651aec79d5ffe",
    "minicpm": "43e3a0d871061cbd",
    "ministral3_far": "6405d15401d0f873",
    "mistral_window_5": "bf528dae0cc2b962",
    "nemotron_h": "ecd447f2b2fdc9f4",
    "nemotron_h_latent": "33edcd4d8a72053f",
    "nemotron_h_moe": "7a7c36c0841166de",
    "olmo2": "d801448087a87b87",
    "olmo2_multi_head_biases": "7ad3a164a5336843",
    "olmo3": "efa5cb5cef86aa92",
    "olmoe": "de91f12a9f7b3bf1",
    "phi3_longrope_long": "37ee14d1a16cb7dd",
    "phi3_longrope_short": "37ee14d1a16cb7dd",
    "phi3_window_7": "6ba992596c6481af",
    "qwen2_window_7": "a7ef769d8e5a884a",
    "qwen3_5_moe_text": "77fc1c6f3fe52729",
    "qwen3_5_text": "9cb81aadd1731d62",
    "qwen3_5_text_narrow": "bc7d6752a6046164",
    "qwen3_5_tied": "6f2032c231cc3af1",
    "qwen3_moe": "a46fa6af4576714c",
    "starcoder2": "4053a380a8826117",
}
#: Of the programs of draft heads.
DRAFT_TEXTS = {
    "eagle1": "fabf1a76669732a2",
    "eagle2_biases": "89984df953b8830c",
    "eagle3": "d2f37e0bb20fb840",
    "eagle31": "e05f4929651dfe82",
    "eagle3_named_layers": "1d688cd5b1a989f0",
    "eagle3_norm_before_fc": "984e1ea97a9cc62d",
    "eagle3_speculators": "d99cd260ee67243e",
}
#: Of the programs of encoders, as they were then.
ENCODER_TEXTS = {
    "llava_clip": "0850c4093c4c76c5",
    "llava_clip_two_layers": "72029511732d57c1",
    "llava_siglip": "52f0198bb5c668cf",
    "llava_siglip_without_head": "52f0198bb5c668cf",
    "mistral3": "375766c90dc8abac",
    "mistral3_earlier_layer": "2760ca624912e1e6",
    "qwen2_5_vl": "12b9696f374a2d70",
    "qwen2_5_vl_old_layout": "67551c7e40449f4c",
    "qwen3_5": "145e634912975dd5",
    "qwen3_vl": "f5dd8b8f11f9abb2",
    "qwen3_vl_one_deepstack": "3d2a512a0a189bb0",
}


def text_digest(name: str) -> str:
    """Of the programs of one golden model, with features and without."""
    config = decoder_config(json.loads((GOLDENS / name / "config.json").read_text()))
    configs = (config, replace(config, feature_layers=(0, config.num_layers)))
    texts = [str(decoder_program(each, shape)) for each in configs for shape in SHAPES]
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


@pytest.mark.parametrize("name", TEXTS | LATER_TEXTS)
def test_the_programs_of_a_family_print_as_in_earlier_releases(name: str) -> None:
    assert text_digest(name) == (TEXTS | LATER_TEXTS)[name]


def test_no_family_is_left_out() -> None:
    assert {path.name for path in GOLDENS.iterdir() if path.is_dir()} == TEXTS.keys() | LATER_TEXTS.keys()


@pytest.mark.parametrize("name", DRAFT_TEXTS)
def test_the_programs_of_a_draft_head_print_as_in_earlier_releases(name: str) -> None:
    folder = golden_folder("draft")
    with safe_open(folder / name / "expected.safetensors", "np") as file:
        base_path = folder / file.metadata()["base"]
    with Checkpoint.open(folder / name) as draft, Checkpoint.open(base_path) as base:
        config = read_draft(draft, base, decoder_config(base.config, base.generation_config))
    shapes = [shape for shape in EngineLimits(2, 16, 48, 3, 3, 8).engine_shapes() if shape.model == "draft"]
    text = "\n".join(str(draft_program(config, shape)) for shape in shapes)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == DRAFT_TEXTS[name]


@pytest.mark.parametrize("name", NAMES)
def test_the_programs_of_an_encoder_print_as_they_did(name: str) -> None:
    program = vision_program(golden_config(name), EngineShape("encode", 1, 64, 64, 64, model="vision"))
    assert hashlib.sha256(str(program).encode()).hexdigest()[:16] == ENCODER_TEXTS[name]


def test_what_came_later_prints_where_it_is_used() -> None:
    config = decoder_config(json.loads((GOLDENS / "llama_untied" / "config.json").read_text()))
    plain, gated = (decoder_program(replace(config, attention_gate=gate), SHAPES[0]) for gate in (False, True))
    assert "gated=True" in str(gated) and "masks_all=False, gated" not in str(plain)
    assert repr(plain.attentions[0]).startswith("Attention(output='context', value='qkv', index=0, heads=(4, 2, 8), ")
