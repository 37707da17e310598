"""Programs print as they always did: a plan is built anew where the text that it was built from is another."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

import pytest
from golden_files import golden_folder
from safetensors import safe_open

from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.families import decoder_config
from edgellm.engines.families.drafts import read_draft
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


def text_digest(name: str) -> str:
    """Of the programs of one golden model, with features and without."""
    config = decoder_config(json.loads((GOLDENS / name / "config.json").read_text()))
    configs = (config, replace(config, feature_layers=(0, config.num_layers)))
    texts = [str(decoder_program(each, shape)) for each in configs for shape in SHAPES]
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


@pytest.mark.parametrize("name", TEXTS)
def test_the_programs_of_a_family_print_as_in_earlier_releases(name: str) -> None:
    assert text_digest(name) == TEXTS[name]


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


def test_what_came_later_prints_where_it_is_used() -> None:
    config = decoder_config(json.loads((GOLDENS / "llama_untied" / "config.json").read_text()))
    plain, gated = (decoder_program(replace(config, attention_gate=gate), SHAPES[0]) for gate in (False, True))
    assert "gated=True" in str(gated) and "masks_all=False, gated" not in str(plain)
    assert repr(plain.attentions[0]).startswith("Attention(output='context', value='qkv', index=0, heads=(4, 2, 8), ")
