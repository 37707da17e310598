"""Makes the table of published configurations, `tests/goldens/published/configs.json.xz`.

    python tools/goldens/make_published.py tests/goldens/published CONFIGS

CONFIGS is a folder with files `OWNER--NAME_config.json` as published, whose rows join those of the table;
`*_hf_quant_config.json` are left out, as are models that differ from others there in their packed weights alone. Of
each the table has the fields that say what is computed, and how many parameters the language model has by transformers'
own class, where this project has the family; so does it of the configuration that transformers' class of each of these
families has by itself. Needs torch and transformers.
"""

from __future__ import annotations

import argparse
import json
import lzma
from pathlib import Path
from typing import Any

import torch
import transformers

#: The families of this project; MiniCPM's class is not in transformers.
_FAMILIES = (
    *("llama", "qwen2", "qwen3", "mistral", "ministral3", "seed_oss", "cwm", "phi3", "granite", "smollm3", "olmo2"),
    *(
        "olmo3",
        "exaone4",
        "granitemoehybrid",
        "gemma",
        "gemma2",
        "gemma3_text",
        "gemma4_text",
        "gemma4_unified_text",
        "starcoder2",
        "lfm2",
        "qwen3_5_text",
        "ernie4_5",
    ),
    "hunyuan_v1_dense",
    *("qwen3_moe", "olmoe", "granitemoe", "lfm2_moe", "gpt_oss", "qwen3_5_moe_text", "qwen3_5_moe", "qwen3_vl_moe"),
    "nemotron_h",
    *("qwen2_5_vl", "qwen3_vl", "llava", "gemma3", "gemma4", "gemma4_unified", "mistral3", "qwen3_5", "paligemma"),
    *("smolvlm", "idefics3", "lfm2_vl", "internvl", "qwen3_asr", "voxtral", "qwen2_audio", "minicpmv4_6"),
    "voxtral_realtime",
)
#: What changes nothing, or is not the language model's.
_LEFT_OUT = (
    *("auto_map", "id2label", "label2id", "quantization_config", "torchscript", "transformers_version", "use_cache"),
    "vision_config",
    "audio_config",
)
_PACKED = ("-FP8", "-NVFP4", "-Static-PerTensor")
#: Of whose defaults transformers makes no model: they do not say what their layers are, or how large heads.
_UNMADE = ("lfm2_moe", "hunyuan_v1_dense")
#: What corrects a mixture's choice: buffers in transformers, weights here.
_CORRECTIONS = ("correction_bias", "expert_bias")
_OF_ENCODERS = (
    *("visual", "vision_tower", "vision_model", "multi_modal_projector", "connector", "embed_vision", "merger"),
    *("audio_tower", "embed_audio", "mtp"),
    "ada_rms_norm",  # what Voxtral Realtime's norms take in here
)


def fields_of(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration without what is left out, in its parts, too."""
    kept = {key: value for key, value in config.items() if key not in _LEFT_OUT and "dropout" not in str(key)}
    return {key: fields_of(value) if isinstance(value, dict) else value for key, value in kept.items()}


def parameters_of(config: transformers.PretrainedConfig) -> int:
    """Those of the language model, of an instance without values."""
    kinds = transformers.AutoModelForImageTextToText, transformers.AutoModelForMultimodalLM
    kind = next((each for each in kinds if type(config) in each._model_mapping), transformers.AutoModelForCausalLM)
    with torch.device("meta"):
        model = kind.from_config(config)
    corrections = (each for each in model.named_buffers() if each[0].endswith(_CORRECTIONS))
    return sum(
        tensor.numel()
        for name, tensor in (*model.named_parameters(), *corrections)
        if not any(part in _OF_ENCODERS for part in name.split("."))
    )


def main() -> None:
    """Read the folder, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("configs", type=Path)
    arguments = parser.parse_args()
    target = arguments.directory / "configs.json.xz"
    known_rows = json.loads(lzma.decompress(target.read_bytes()))["published"] if target.exists() else {}
    table: dict[str, dict[str, Any]] = {"published": known_rows, "defaults": {}}
    for path in sorted(arguments.configs.rglob("*_config.json")):
        name = path.name.removesuffix("_config.json").partition("--")[2]
        if not name or path.name.endswith("_hf_quant_config.json") or any(packed in name for packed in _PACKED):
            continue
        config, count = json.loads(path.read_text()), None
        if config["model_type"] in _FAMILIES:
            known = transformers.CONFIG_MAPPING[config["model_type"]]
            count = parameters_of(known(**{key: value for key, value in config.items() if key != "architectures"}))
        table["published"][name] = {"config": fields_of(config), "parameters": count}
    for family in _FAMILIES:
        default = transformers.AutoConfig.for_model(family)
        count = None if family in _UNMADE else parameters_of(default)
        table["defaults"][family] = {"config": fields_of(default.to_dict()), "parameters": count}
    text = json.dumps(table, separators=(",", ":"), sort_keys=True, default=str).encode()
    target.write_bytes(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME))
    print({kind: len(rows) for kind, rows in table.items()}, target.stat().st_size)


if __name__ == "__main__":
    main()
