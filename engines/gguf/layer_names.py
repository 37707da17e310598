"""What llama.cpp's converter calls parts of layers otherwise than those of Llama, as `Architecture` takes it."""

from __future__ import annotations

from typing import Any

POST_NORM = {"post_attention_norm": "post_attention_layernorm"}
POST_NORMS = POST_NORM | {"post_ffw_norm": "post_feedforward_layernorm"}
GEMMA3_NORMS = POST_NORMS | {"ffn_norm": "pre_feedforward_layernorm"}
_GEMMA4_NAMES = GEMMA3_NORMS | {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
    **{"inp_gate": "per_layer_input_gate", "proj": "per_layer_projection", "post_norm": "post_per_layer_input_norm"},
    **{f"post_ffw_norm_{number}": f"post_feedforward_layernorm_{number}" for number in (1, 2)},
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
}
GEMMA4: dict[str, Any] = {
    **{"biased": False, "uneven": True, "naming": "gemma4", "names": _GEMMA4_NAMES},
    "whole": {"ffn_gate_inp.scale": "router.scale", "ffn_down_exps.scale": "router.per_expert_scale"},
}
_CONVOLUTION = ("conv", "in_proj", "out_proj")
LFM2: dict[str, Any] = {"naming": "lfm2", "names": {f"shortconv.{each}": f"conv.{each}" for each in _CONVOLUTION}}
QWEN35_NAMES = POST_NORM | {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
QWEN35: dict[str, Any] = {"shifted": True, "unshifted": ("ssm_norm",), "names": QWEN35_NAMES}
#: Of layers of Mamba-2.
_MODULES = {"ssm_in": "in_proj", "ssm_conv1d": "conv1d", "ssm_norm": "norm", "ssm_out": "out_proj"}
_TENSORS = {"ssm_a": "A_log", "ssm_d": "D", "ssm_dt.bias": "dt_bias"}


def _inside(module: str, names: dict[str, str]) -> dict[str, str]:
    return {name: f"{module}.{own}" for name, own in names.items()}


#: Of an `Architecture`: rows of q and k are in the order of rotated pairs, though nothing rotates them.
GRANITE_HYBRID: dict[str, Any] = {
    **{"permuted": True, "joined": True, "tiled": False, "whole": _inside("mamba", _TENSORS)},
    "naming": "granitemoehybrid",
    "names": {
        **{f"ffn_{each}": "shared_mlp.input_linear" for each in ("gate", "gate_shexp")},
        **_inside("mamba", _MODULES),
    },
}
NEMOTRON_H: dict[str, Any] = {
    **{"permuted": True, "tiled": False, "biased": False, "naming": "nemotron_h"},
    "names": {"output_norm": "model.norm_f", **_inside("mixer", _MODULES)},
    "whole": {**_inside("mixer", _TENSORS), "exp_probs_b.bias": "mixer.gate.e_score_correction_bias"},
}
