"""Vision configurations of no model, for what only asks for an encoder's sizes."""

from __future__ import annotations

from typing import Any

from edgellm.engines.model.vision import VisionConfig

_COMMON: dict[str, Any] = {
    "dtype": "float32",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_layers": 2,
    "num_heads": 2,
    "in_channels": 3,
    "out_hidden_size": 32,
    "norm_eps": 1e-6,
    "image_token_id": 5,
    "tensor_prefix": "model.vision_tower.",
    "projector_prefix": "model.multi_modal_projector.",
}


def qwen_vision(patch_size: int = 14) -> VisionConfig:
    """An encoder of Qwen2.5-VL's kind: any size, 2 x 2 patches a token."""
    sizes = {"patch_size": patch_size, "temporal_patch_size": 2, "spatial_merge_size": 2}
    return VisionConfig(family="qwen2_5_vl", activation="silu", **_COMMON, **sizes)


def llava_vision(image_size: int, patch_size: int, **changes: Any) -> VisionConfig:
    """An encoder of CLIP's or SigLIP's kind: one square size, a token a patch."""
    sizes = {"patch_size": patch_size, "temporal_patch_size": 1, "spatial_merge_size": 1, "image_size": image_size}
    return VisionConfig(family="llava", activation="gelu", **{**_COMMON, **sizes, **changes})
