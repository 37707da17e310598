"""Reads what `edgellm quantize` wrote with compressed-tensors and transformers.

Usage: python -m tools.goldens.check_quantized DIR [DIR ...]   (with torch, transformers and compressed-tensors)

Of each directory: every packed tensor is what compressed-tensors packs again from the codes that it unpacks, and
transformers loads the model, whose logits are those of a model with the weights that compressed-tensors dequantizes.
"""

import argparse
import json
from pathlib import Path

import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, CompressedTensorsConfig


def main() -> None:
    """Print one line a directory; an assertion fails where something differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directories", nargs="+", type=Path)
    for directory in parser.parse_args().directories:
        tensors = {name: each for file in directory.glob("*.safetensors") for name, each in load_file(file).items()}
        config = json.loads((directory / "config.json").read_text())
        scheme = config["quantization_config"]["config_groups"]["group_0"]["weights"]
        modules = [name.removesuffix(".weight_packed") for name in tensors if name.endswith(".weight_packed")]
        values = {module: check_module(module, tensors, QuantizationArgs(**scheme)) for module in modules}
        print(f"{directory}: {len(values)} layers as compressed-tensors has them; {compare_logits(directory, values)}")


def check_module(module: str, tensors: dict[str, torch.Tensor], scheme: QuantizationArgs) -> torch.Tensor:
    """The dequantized weight of a layer, as compressed-tensors computes it."""
    bits, packed = scheme.num_bits, tensors[f"{module}.weight_packed"]
    shape, scale = torch.Size(tensors[f"{module}.weight_shape"].tolist()), tensors[f"{module}.weight_scale"]
    assert packed.dtype == torch.int32 and tensors[f"{module}.weight_shape"].dtype == torch.int64
    codes, zero = unpack_from_int32(packed, bits, shape), tensors.get(f"{module}.weight_zero_point")
    assert torch.equal(pack_to_int32(codes, bits), packed)
    if zero is not None:
        zeros = unpack_from_int32(zero, bits, torch.Size((shape[0], scale.shape[1])), packed_dim=0)
        assert torch.equal(pack_to_int32(zeros, bits, packed_dim=0).contiguous(), zero)
        zero = zeros
    assert (zero is None) == scheme.symmetric
    return dequantize(codes, scale, zero, scheme)


def compare_logits(directory: Path, values: dict[str, torch.Tensor]) -> str:
    """How far transformers' logits of the directory are from those of the model with dense weights, in words."""
    # Kept packed, asymmetric weights cannot be loaded: the package forgets there that it packs zero points.
    unpacking = CompressedTensorsConfig(dequantize=True)
    quantized = AutoModelForCausalLM.from_pretrained(directory, dtype="auto", quantization_config=unpacking).eval()
    config = AutoConfig.from_pretrained(directory)
    del config.quantization_config
    dense = AutoModelForCausalLM.from_config(config, dtype=quantized.dtype).eval()
    tensors = {name: each for file in directory.glob("*.safetensors") for name, each in load_file(file).items()}
    state = {name: each for name, each in tensors.items() if name.rpartition(".")[0] not in values}
    state |= {f"{module}.weight": value for module, value in values.items()}
    missing, unexpected = dense.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    dense.tie_weights()
    ids = torch.tensor([[(7 * index + 3) % 250 for index in range(40)]])
    with torch.no_grad():
        found, expected = (model.float()(ids).logits for model in (quantized, dense))
    difference = (found - expected).abs().max().item()
    assert difference <= 1e-3 * expected.abs().max().item(), difference
    return f"largest difference of logits {difference:.2g} of {expected.abs().max().item():.3g}"


if __name__ == "__main__":
    main()
