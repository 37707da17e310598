"""Layers as three releases of compressed-tensors pack them; see `make_quantized.py`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from quantized_cases import QWEN3_5, Case, Packed, shuffled_groups


def _text(value: Any) -> str:
    """Of a setting that is an enumeration's or text."""
    return str(getattr(value, "value", value))


def _minmax(weight: torch.Tensor, arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each group, channel, block or of the whole, shaped as scales are."""
    strategy = _text(arguments.strategy)
    if strategy in ("group", "tensor_group"):
        grouped = weight.unflatten(-1, (-1, arguments.group_size))
        return grouped.amin(-1), grouped.amax(-1)
    if strategy == "channel":
        return weight.amin(-1, keepdim=True), weight.amax(-1, keepdim=True)
    if strategy == "block":
        high, wide = arguments.block_structure
        rows, columns = weight.shape
        padded = torch.nn.functional.pad(weight, (0, -columns % wide, 0, -rows % high))
        blocks = padded.unflatten(0, (-1, high)).unflatten(-1, (-1, wide)).transpose(1, 2).flatten(2)
        return blocks.amin(-1), blocks.amax(-1)
    return weight.amin().reshape(1), weight.amax().reshape(1)


def _compressed_layer(module: torch.nn.Linear, scheme: Any, kind: str) -> Packed:
    """By the compressor of the format `kind`, in releases from 0.14 on."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    weight, arguments = module.weight.data, scheme.weights
    state = {"weight": weight}
    ordered, whole = weight, None
    if _text(arguments.actorder) == "group":
        state["weight_g_idx"] = shuffled_groups(weight.shape[1], arguments.group_size)
        ordered = weight[:, torch.argsort(state["weight_g_idx"])]
    if kind == "nvfp4-pack-quantized":
        whole = generate_gparam(weight.amin().float(), weight.amax().float())
        state["weight_global_scale"] = whole
        ordered = weight.float()
    scale, zero = calculate_qparams(
        *_minmax(ordered, arguments), arguments, **({"global_scale": whole} if whole is not None else {})
    )
    state |= {"weight_scale": scale, "weight_zero_point": zero}
    if arguments.symmetric:
        del state["weight_zero_point"]
    compressor = BaseCompressor.get_value_from_registry(kind)
    tensors = compressor.compress(state, scheme)
    return Packed(tensors, compressor.decompress(dict(tensors), scheme)["weight"])


def _compressed(groups: list[tuple[list[str], dict[str, Any], str]], ignore: list[str], **others: Any) -> Case:
    """`groups` are targets, the arguments of weights, and the format."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme

    activations = others.pop("activations", None)
    model, kinds = dict(others.pop("model", {})), [kind for *_, kind in groups]
    schemes = {}
    for number, (targets, weights, kind) in enumerate(groups):
        inputs = QuantizationArgs(**activations) if activations else None
        scheme = QuantizationScheme(targets=targets, weights=QuantizationArgs(**weights), input_activations=inputs)
        if len(set(kinds)) > 1:
            scheme.format = kind
        schemes[f"group_{number}"] = scheme
    kind = kinds[0] if len(set(kinds)) == 1 else "mixed-precision"
    config = QuantizationConfig(
        config_groups=schemes, format=kind, ignore=ignore, quantization_status="compressed", **others
    )

    def fits(name: str, target: str) -> bool:
        return bool(re.match(target[3:], name)) if target.startswith("re:") else target in (name, "Linear")

    def pack(name: str, module: torch.nn.Linear) -> Packed | None:
        if any(fits(name, each) for each in ignore):
            return None
        for (targets, _, kind), scheme in zip(groups, schemes.values(), strict=True):
            if any(fits(name, target) for target in targets):
                return _compressed_layer(module, scheme, kind)
        return None

    return Case(config.model_dump(mode="json"), pack, **model)


def _integers(bits: int, group: int | None, **others: Any) -> dict[str, Any]:
    sized = {"strategy": "channel"} if group is None else {"strategy": "group", "group_size": group}
    return {"num_bits": bits, "type": "int", "symmetric": True, **sized, **others}


def compressed_tensors() -> dict[str, Case]:
    """Release 0.20."""
    plain, head = "pack-quantized", ["lm_head"]
    whole: Callable[..., Any] = lambda weights, kind=plain, ignore=head, **others: _compressed(  # noqa: E731
        [(["Linear"], weights, kind)], ignore, **others
    )
    bfloat, qwen3 = {"dtype": "bfloat16"}, {"dtype": "bfloat16", "family": "qwen3"}
    float8 = {"num_bits": 8, "type": "float", "symmetric": True}
    dynamic = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
    return {
        "ct_w4_group32": whole(_integers(4, 32), model=qwen3),
        "ct_w4_group32_zeros": whole(_integers(4, 32, symmetric=False)),
        "ct_w4_channel": whole(_integers(4, None), model={"family": "qwen3", "inner": 84}),
        "ct_w4_channel_zeros": whole(_integers(4, None, symmetric=False), model=bfloat),
        "ct_w4_group16_actorder_static": whole(_integers(4, 16, actorder="static"), model=bfloat),
        "ct_w4_group16_actorder_weight": whole(_integers(4, 16, actorder="weight", symmetric=False), model=qwen3),
        "ct_w8_group32_zeros": whole(_integers(8, 32, symmetric=False), model=bfloat),
        "ct_w8_channel_head": whole(_integers(8, None), ignore=["re:.*layers[.]1[.]mlp[.].*"]),
        "ct_w4_qwen3_vl": whole(
            _integers(4, 32), ignore=["re:.*visual.*", "lm_head"], model={"family": "qwen3_vl", "dtype": "bfloat16"}
        ),
        "ct_w4_qwen3_5": whole(
            _integers(4, 32),
            ignore=["lm_head", "re:.*linear_attn[.]in_proj_[ab]$"],
            model={"family": "qwen3_5_text", "dtype": "bfloat16", "settings": QWEN3_5},
        ),
        "ct_mixed": _compressed(
            [
                (["re:.*self_attn.(q|o)_proj"], _integers(8, None), plain),
                (
                    ["re:.*k_proj", "model.layers.1.self_attn.v_proj"],
                    {**float8, "strategy": "channel"},
                    "float-quantized",
                ),
                (["re:.*mlp.*"], _integers(4, 32, symmetric=False), plain),
            ],
            ["re:.*layers.1.mlp.gate_proj", "lm_head"],
            model=qwen3,
        ),
        "ct_fp8_tensor": whole({**float8, "strategy": "tensor"}, "float-quantized", activations=dynamic, model=qwen3),
        "ct_fp8_channel": whole({**float8, "strategy": "channel"}, "float-quantized", activations=dynamic),
        "ct_fp8_block": whole(
            {**float8, "strategy": "block", "block_structure": [64, 64]}, "float-quantized", model=bfloat
        ),
        "ct_nvfp4": whole(
            {
                "num_bits": 4,
                "type": "float",
                "strategy": "tensor_group",
                "group_size": 16,
                "scale_dtype": torch.float8_e4m3fn,
                "zp_dtype": torch.float8_e4m3fn,
            },
            "nvfp4-pack-quantized",
            model=qwen3,
        ),
    }


def compressed_tensors_16() -> dict[str, Case]:
    """Release 0.16, the last with groups in the order of activations."""
    return {
        "ct16_w4_actorder_group": _compressed(
            [(["Linear"], _integers(4, 32, actorder="group"), "pack-quantized")], ["lm_head"], model={"family": "qwen3"}
        ),
        "ct16_w4_actorder_group_zeros": _compressed(
            [(["Linear"], _integers(4, 16, actorder="group", symmetric=False), "pack-quantized")], ["lm_head"]
        ),
    }


def compressed_tensors_09() -> dict[str, Case]:
    """Release 0.9.0, which left zero points unpacked."""
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    def case(weights: dict[str, Any], **model: Any) -> Case:
        arguments = QuantizationArgs(**weights)
        scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
        config = QuantizationConfig(
            config_groups={"group_0": scheme},
            format="pack-quantized",
            ignore=["lm_head"],
            quantization_status="compressed",
        )
        compressor = PackedQuantizationCompressor()

        def pack(name: str, module: torch.nn.Linear) -> Packed | None:
            if name == "lm_head":
                return None
            weight = module.weight.data
            scale, zero = calculate_qparams(*_minmax(weight, arguments), arguments)
            rest = {"weight_scale": scale} | ({} if arguments.symmetric else {"weight_zero_point": zero})
            tensors = rest | compressor.compress_weight(weight, scale, arguments, zero)
            return Packed(tensors, compressor.decompress_weight(tensors, arguments))

        return Case(config.model_dump(mode="json"), pack, **model)

    return {
        "ct09_w4_group32_zeros": case(_integers(4, 32, symmetric=False)),
        "ct09_w8_channel_zeros": case(_integers(8, None, symmetric=False), family="qwen3", dtype="bfloat16"),
    }
