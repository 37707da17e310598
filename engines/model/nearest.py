"""Which supported model is nearest to one that is refused since it is of another family."""

from collections.abc import Mapping
from typing import Any

#: By how a family's name begins, then by a part of the name of one of its fields, or of its tensors in a GGUF file.
_BY_NAME = {
    **{"gemma3n": "Gemma 4 E2B or E4B", "gemma": "Gemma 3 or 4", "phi": "Phi-4-mini", "minicpmv": "MiniCPM-V 4.6"},
    **{"minicpm": "MiniCPM 4", "ernie": "ERNIE 4.5 0.3B", "hunyuan": "Hunyuan 0.5B to 7B", "exaone": "EXAONE 4"},
    **{"olmo": "OLMo 3", "granite": "Granite 4", "nemotron": "Nemotron 3 Nano", "lfm": "LFM2"},
    **dict.fromkeys(("mistral", "ministral"), "Ministral 3"),
    **dict.fromkeys(("qwen3_next", "qwen3next"), "Qwen3.5-MoE"),
}
_BY_FIELD = {
    **dict.fromkeys(("mamba", "ssm"), "Granite 4 H or Nemotron 3 Nano"),
    **dict.fromkeys(("expert", "exps"), "Qwen3-30B-A3B or gpt-oss-20b"),
    **{"audio_config": "Qwen3-ASR", "vision_config": "Qwen3-VL"},
}


def nearest(name: str, fields: Mapping[str, Any]) -> str:
    """That model, said behind what a message says of the family `name`."""
    text = fields.get("text_config")
    keys = " ".join([name, *fields, *(text if isinstance(text, dict) else ())])
    found = [model for begin, model in _BY_NAME.items() if name.lower().startswith(begin)]
    found += [model for part, model in _BY_FIELD.items() if part in keys]
    return f". Nearest to it is {[*found, 'Qwen3 or Llama 3'][0]}"
