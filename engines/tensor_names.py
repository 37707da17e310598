"""Names of tensors in multimodal checkpoints, which wrap the language model's own names in several ways.

`model.language_model.layers...` and `lm_head...` is the newest layout, `language_model.model.layers...` and
`language_model.lm_head...` LLaVA's first; Qwen2.5-VL's first has the language model's names as they are.
"""

from __future__ import annotations

from typing import Any

#: What begins a tensor of the vision encoder, or of what leads from it to the language model.
VISION_PREFIXES = tuple(
    f"{outer}{inner}" for inner in ("visual.", "vision_tower.", "multi_modal_projector.") for outer in ("", "model.")
)
#: What begins a tensor of the language model, and what its family calls it; the first that fits counts.
_WRAPPINGS = (
    ("model.language_model.model.", "model."),
    ("model.language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)


def is_multimodal(config: dict[str, Any]) -> bool:
    """Whether a `config.json` describes a model with a vision part."""
    return isinstance(config.get("vision_config"), dict)


def language_model_name(name: str) -> str:
    """The name that a tensor, or a module, has in the language model's own checkpoints; others stay as they are."""
    for wrapped, own in _WRAPPINGS:
        if name.startswith(wrapped):
            return own + name[len(wrapped) :]
    return name
