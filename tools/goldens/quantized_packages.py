"""How each package packs a linear layer, and the cases that are made with it; see `make_quantized.py`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from quantized_cases import QWEN3_5, Case, Packed, shuffled_groups
from quantized_with_compressed_tensors import compressed_tensors, compressed_tensors_09, compressed_tensors_16

# AutoAWQ, GPTQModel, AutoRound


def _grid(weight: torch.Tensor, bits: int, group: int, symmetric: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 scales and zero points [N, groups] of the smallest range that holds each group, or a middle one."""
    grouped, most = weight.float().unflatten(-1, (-1, group)), (1 << bits) - 1
    if symmetric:
        scales = grouped.abs().amax(-1) / (1 << bits - 1)
        return scales, torch.full_like(scales, 1 << bits - 1)
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    scales = ((high - low) / most).half().float()
    return scales, (-low / scales).round().clamp(1, most)


def _stored(layer: torch.nn.Module, *endings: str) -> dict[str, torch.Tensor]:
    return {ending: getattr(layer, ending) for ending in endings}


def _is_linear_of_layer(name: str) -> bool:
    return ".layers." in name


def autoawq() -> dict[str, Case]:
    """AutoAWQ's gemm layout, which has zero points always."""
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    def case(group: int, dense: list[str] | None = None, **model: Any) -> Case:
        def pack(name: str, module: torch.nn.Linear) -> Packed | None:
            if not _is_linear_of_layer(name) or any(part in name for part in dense or []):
                return None
            size = module.in_features if group == -1 else group
            scales, zeros = _grid(module.weight.data, 4, size, False)
            layer = WQLinear_GEMM.from_linear(
                module, 4, size, scales=scales.t().contiguous(), zeros=zeros.t().contiguous()
            )
            weight = dequantize_gemm(layer.qweight, layer.qzeros, layer.scales, 4, size)
            return Packed(_stored(layer, "qweight", "qzeros", "scales"), weight.t())

        config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
        return Case({**config, "modules_to_not_convert": dense}, pack, **model)

    return {
        "awq_group32": case(32, family="qwen3"),
        "awq_exceptions": case(32, ["v_proj", "layers.1.mlp"], inner=64),
        "awq_qwen3_vl": case(32, ["visual"], family="qwen3_vl"),
        "awq_whole_rows": case(-1, family="qwen2"),
    }


def gptqmodel() -> dict[str, Case]:
    """GPTQModel's layers; version 1 by its own conversion."""
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization.config import QuantizeConfig
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    def case(kind: str = "gptq", dynamic: dict[str, dict[str, Any]] | None = None, **settings: Any) -> Case:
        given = {"bits": 4, "group_size": 32, "sym": True, "desc_act": False, **settings}
        model = {key: given.pop(key) for key in ("family", "dtype", "inner") if key in given}

        def pack(name: str, module: torch.nn.Linear) -> Packed | None:
            own = dict(given)
            if not _is_linear_of_layer(name):
                return None
            for pattern, changed in (dynamic or {}).items():
                if re.match(pattern[2:], name):
                    if pattern.startswith("-:"):
                        return None
                    own |= changed
                    break
            size = module.in_features if own["group_size"] == -1 else own["group_size"]
            groups = torch.arange(module.in_features, dtype=torch.int32) // size
            ordered = module.weight.data
            if own["desc_act"]:
                groups = shuffled_groups(module.in_features, size)
                ordered = ordered[:, torch.argsort(groups.long(), stable=True)]
            scales, zeros = _grid(ordered, own["bits"], size, own["sym"])
            layer = TorchLinear(
                **own, in_features=module.in_features, out_features=module.out_features, bias=module.bias is not None
            )
            layer.pack_original(module.float(), scales, zeros, groups)
            layer.post_init()
            weight = layer.eval().dequantize_weight()
            if kind == "gptq":
                convert_gptq_v2_to_v1_format_module(layer, QuantizeConfig(bits=own["bits"], group_size=32))
            endings = ["qweight", "qzeros", "scales", "g_idx"] + ["bias"] * (module.bias is not None)
            return Packed(_stored(layer, *endings), weight.t())

        config = {"quant_method": "gptq", "checkpoint_format": kind, "lm_head": False, "true_sequential": True, **given}
        return Case({**config, **({"dynamic": dynamic} if dynamic else {})}, pack, **model)

    rules = {
        "-:.*layers\\.1\\.self_attn\\.k_proj": {},
        "+:.*down_proj": {"bits": 8, "group_size": -1},
        "+:.*v_proj": {"group_size": 16},
    }
    return {
        "gptq_v1_group32": case(family="qwen3"),
        "gptq_v1_zeros_desc_act": case(sym=False, desc_act=True),
        "gptq_v1_bias_dynamic": case(dynamic=rules, family="qwen2"),
        "gptq_v1_bits8_whole_rows": case(bits=8, group_size=-1),
        "gptq_v2_zeros": case("gptq_v2", sym=False, family="qwen3"),
        "gptq_v2_desc_act": case("gptq_v2", desc_act=True, group_size=16),
    }


def auto_round() -> dict[str, Case]:
    """AutoRound's layers, in GPTQ's layout and in AWQ's."""
    from auto_round.export.export_to_awq.utils import WQLinear_GEMM, dequantize_gemm
    from auto_round_extension.torch.qlinear_torch_zp import QuantLinear

    def case(packing: str, extra: dict[str, dict[str, Any]] | None = None, **settings: Any) -> Case:
        given = {"bits": 4, "group_size": 32, "sym": True, **settings}
        model = {key: given.pop(key) for key in ("family", "dtype", "inner") if key in given}

        def pack(name: str, module: torch.nn.Linear) -> Packed | None:
            own = given | (extra or {}).get(name, {})
            if not _is_linear_of_layer(name) or own["bits"] >= 16:
                return None
            bits, size = own["bits"], own["group_size"]
            scales, zeros = _grid(module.weight.data, bits, size, own["sym"])
            endings = ["qweight", "qzeros", "scales"]
            if packing.endswith("awq"):
                layer = WQLinear_GEMM.from_linear(module, bits, size, scales=scales.t(), zeros=zeros.t().contiguous())
                weight = dequantize_gemm(layer.qweight, layer.qzeros, layer.scales, bits, size)
            else:
                layer = QuantLinear(bits, size, module.in_features, module.out_features, False)
                layer.pack(module, scales, zeros, None, device="cpu")
                weight = layer(torch.eye(module.in_features, dtype=torch.float16))
            return Packed(_stored(layer, *endings), weight.t())

        config = {
            "quant_method": "auto-round",
            "packing_format": packing,
            "data_type": "int",
            "autoround_version": "0.16.1",
        }
        named = {"block_name_to_quantize": "model.layers", "iters": 200, **({"extra_config": extra} if extra else {})}
        return Case({**config, **named, **given}, pack, **model)

    extra = {
        "model.layers.0.self_attn.o_proj": {"bits": 16, "data_type": "float"},
        "model.layers.1.mlp.down_proj": {"bits": 8, "sym": False},
        "model.layers.1.mlp.up_proj": {"group_size": 64},
    }
    return {
        "autoround_gptq": case("auto_round:auto_gptq", extra, family="qwen3"),
        "autoround_gptq_zeros": case("auto_round:auto_gptq", sym=False),
        "autoround_awq": case("auto_round:auto_awq", {"model.layers.0.mlp.gate_proj": {"bits": 16}}),
        "autoround_awq_zeros": case("auto_round:auto_awq", sym=False, family="qwen3"),
    }


# Hugging Face's FP8, ModelOpt


def fine_grained() -> dict[str, Case]:
    """Blocks as published models have them, dequantized by transformers' own operation."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    def case(block: list[int] | None, dense: list[str], **model: Any) -> Case:
        def pack(name: str, module: torch.nn.Linear) -> Packed | None:
            if any(name == each or name.startswith(f"{each}.") for each in dense):
                return None
            weight = module.weight.data.float()
            high, wide = block or weight.shape
            blocks = weight.unflatten(0, (-1, high)).unflatten(-1, (-1, wide))
            scales = blocks.abs().amax((1, 3)) / 448
            codes = (blocks / scales[:, None, :, None]).flatten(2).flatten(0, 1).to(torch.float8_e4m3fn)
            stored = scales if block else scales.reshape(())
            dtype = getattr(torch, model.get("dtype", "float16"))
            restored = Fp8Dequantize(None)._dequantize_one(codes, scales, dtype)
            return Packed({"weight": codes, "weight_scale_inv": stored}, restored)

        config = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": block}
        return Case({**config, "modules_to_not_convert": dense}, pack, **model)

    dense = ["lm_head", "model.layers.1.mlp", "model.layers.0.input_layernorm"]
    delta = [f"model.layers.0.linear_attn.{name}" for name in ("conv1d", "in_proj_a", "in_proj_b")]
    few = {"num_attention_heads": 2, "num_key_value_heads": 1, "linear_num_key_heads": 1, "linear_num_value_heads": 2}
    qwen3_5 = {"family": "qwen3_5_text", "dtype": "bfloat16", "settings": QWEN3_5 | few, "inner": 32}
    return {
        "fp8_blocks_qwen3_5": case([16, 16], ["lm_head", *delta], **qwen3_5),
        "fp8_blocks": case([32, 16], dense, family="qwen3", dtype="bfloat16"),
        "fp8_whole": case(None, ["lm_head"]),
    }


def modelopt() -> dict[str, Case]:
    """ModelOpt's export, whose INT4 has no function of its own that dequantizes."""
    from modelopt.torch.export.quant_utils import from_quantized_weight, to_quantized_weight
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    def nvfp4(weight: torch.Tensor) -> Packed:
        scales, whole = NVFP4QTensor.get_weights_scaling_factor(weight, 16)
        codes = to_quantized_weight(weight.clone(), scales, "nvfp4", whole, 16)
        again = NVFP4QTensor(weight.shape, weight.dtype, codes)
        restored = again.dequantize(scale=scales, double_scale=whole, block_sizes={-1: 16})
        tensors = {"weight": codes, "weight_scale": scales, "weight_scale_2": whole, "input_scale": whole.clone()}
        return Packed(tensors, restored)

    def fp8(weight: torch.Tensor, channels: bool = False) -> Packed:
        scale = (weight.abs().amax(1) if channels else weight.abs().amax()).float() / 448
        codes = to_quantized_weight(weight, scale, "fp8_pc_pt" if channels else "fp8")
        by_row = scale[:, None] if channels else scale
        tensors = {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.25)}
        return Packed(tensors, from_quantized_weight(codes, by_row, "fp8", weight.dtype))

    def nvfp4_scaled(weight: torch.Tensor) -> Packed:
        inputs = torch.empty(weight.shape[1]).uniform_(0.5, 2).to(weight.dtype)
        packed = nvfp4(weight / inputs)
        return Packed({**packed.tensors, "pre_quant_scale": inputs}, packed.weight, inputs)

    def int4(weight: torch.Tensor) -> Packed:
        inputs = torch.empty(weight.shape[1]).uniform_(0.5, 2).to(weight.dtype)
        scaled = weight / inputs
        scales = scaled.unflatten(-1, (-1, 32)).abs().amax(-1) / 7
        codes = to_quantized_weight(scaled, scales, "int4_awq", block_size=32)
        each = scales.repeat_interleave(32, 1)
        restored = (scaled / each).round().clamp(-8, 7) * each
        return Packed({"weight": codes, "weight_scale": scales, "pre_quant_scale": inputs}, restored, inputs)

    def case(algorithm: str, pack: Callable[[torch.Tensor], Packed], **others: Any) -> Case:
        dense = ["lm_head", "model.layers.1.self_attn*"]
        model = {key: others.pop(key) for key in ("family", "dtype") if key in others}
        said = {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8", "exclude_modules": dense, **others}
        config = {"producer": {"name": "modelopt", "version": "0.47.0"}, "quantization": said}

        def packs(name: str, module: torch.nn.Linear) -> Packed | None:
            if name == "lm_head" or name.startswith("model.layers.1.self_attn"):
                return None
            packed = pack(module.weight.data)
            if name.endswith(("k_proj", "v_proj")):  # the scale of a KV cache
                packed.tensors[f"{name[-6]}_scale"] = torch.tensor(0.5)
            return packed

        return Case(config, packs, beside_config="hf_quant_config.json", **model)

    def mixed() -> Case:
        """Attention in 8 bits, the rest in 4, one layer dense."""
        eight, four = {"quant_algo": "FP8"}, {"quant_algo": "NVFP4", "group_size": 16}
        parts = {f"self_attn.{name}_proj": eight for name in "qkvo"} | {
            f"mlp.{name}_proj": four for name in ("gate", "up")
        }
        layers = {f"model.layers.{number}.{part}": said for number in range(2) for part, said in parts.items()}
        said = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers, "exclude_modules": ["lm_head"]}

        def packs(name: str, module: torch.nn.Linear) -> Packed | None:
            if name not in layers:
                return None
            return (fp8 if layers[name] is eight else nvfp4)(module.weight.data)

        config = {"producer": {"name": "modelopt", "version": "0.47.0"}, "quantization": said}
        return Case(config, packs, beside_config="hf_quant_config.json")

    return {
        "modelopt_mixed": mixed(),
        "modelopt_nvfp4_awq": case("NVFP4_AWQ", nvfp4_scaled, group_size=16),
        "modelopt_nvfp4": case("NVFP4", nvfp4, group_size=16, family="qwen3", dtype="bfloat16"),
        "modelopt_fp8": case("FP8", fp8, family="qwen3", dtype="bfloat16"),
        "modelopt_fp8_channels": case("FP8_PER_CHANNEL_PER_TOKEN", lambda weight: fp8(weight, True)),
        "modelopt_int4_awq": case("W4A16_AWQ", int4, group_size=32, has_zero_point=False, dtype="bfloat16"),
    }


#: By the name on the command line: the distribution whose release is recorded, and its cases.
PACKAGES: dict[str, tuple[str, Callable[[], dict[str, Case]]]] = {
    "compressed-tensors": ("compressed-tensors", compressed_tensors),
    "compressed-tensors-0.16": ("compressed-tensors", compressed_tensors_16),
    "compressed-tensors-0.9": ("compressed-tensors", compressed_tensors_09),
    "autoawq": ("autoawq", autoawq),
    "gptqmodel": ("gptqmodel", gptqmodel),
    "auto-round": ("auto-round", auto_round),
    "transformers": ("transformers", fine_grained),
    "modelopt": ("nvidia-modelopt", modelopt),
}
