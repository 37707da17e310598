"""Which supported model is nearest to one that is refused since it is of another family."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: By how a family's name begins, then by a part of the name of one of its fields, or of its tensors in a GGUF file.
_MODELS: dict[str, dict[str, str]] = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))


def nearest(name: str, fields: Mapping[str, Any]) -> str:
    """That model, said behind what a message says of the family `name`."""
    text = fields.get("text_config")
    keys = " ".join([name, *fields, *(text if isinstance(text, dict) else ())])
    found = [model for begin, model in _MODELS["names"].items() if name.lower().startswith(begin)]
    found += [model for part, model in _MODELS["fields"].items() if part in keys]
    return f". Nearest to it is {[*found, 'Qwen3 or Llama 3'][0]}"
