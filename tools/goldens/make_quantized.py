"""Makes the golden files of `tests/goldens/quantized` with the packages that publish quantized models.

    python tools/goldens/make_quantized.py PACKAGE tests/goldens/quantized

PACKAGE is one of those in `quantized_packages.py`; their pins exclude each other, so that each is installed in an
environment of its own, beside torch and transformers (any release with `rope_parameters`, 5.0 or later). Each folder is
a checkpoint with random weights that the package's own functions pack, stored as differences from codes that are
computed again (`tests/helpers/golden_codes.py`); what stays dense is random, too, and only described
(`tests/helpers/golden_files.py`). `expected.safetensors` holds `token_ids` [2, T] int64 and of the float32 `logits`
[2, T, V], which transformers computes in float32 from the weights as the package dequantizes them; its metadata are the
releases, and in "weights" 16 digits of the SHA-256 of each of these weights, as float32 [N, K] without signs of zeros.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import transformers
from golden_folders import VERSIONS, draw_tensors, opened, randomize_vectors, store_differences, whole, with_shares
from quantized_cases import Case, Packed
from quantized_packages import PACKAGES
from safetensors.torch import load_file, save_file

_VOCABULARY, _LENGTH = 64, 16
_COMMON: dict[str, Any] = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
_VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
_IMAGES = {"image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 62, "vision_end_token_id": 63}
_CLASSES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "qwen3_5_text": (transformers.Qwen3_5TextConfig, transformers.Qwen3_5ForCausalLM),
    "qwen3_vl": (transformers.Qwen3VLConfig, transformers.Qwen3VLForConditionalGeneration),
}


def make(name: str, case: Case, directory: Path, versions: dict[str, str]) -> None:
    """Write one checkpoint and what is computed from it."""
    config_class, model_class = _CLASSES[case.family]
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
    torch.manual_seed(seed)
    # A second layer only where the settings name one: the files stay small.
    layers = 2 if re.search(r"layers\W+1\W", json.dumps(case.quantization)) else 1
    settings = _COMMON | {"intermediate_size": case.inner, "num_hidden_layers": layers} | case.settings
    if case.family == "qwen3_vl":  # prompts without images; the vision part stays dense
        rope = {**_COMMON["rope_parameters"], "mrope_section": [4, 2, 2], "mrope_interleaved": True}
        settings = {"text_config": settings | {"rope_parameters": rope}, "vision_config": _VISION, **_IMAGES}
        settings["tie_word_embeddings"] = False
    model = model_class(config_class(**settings))
    linear = {name: each for name, each in model.named_modules() if isinstance(each, torch.nn.Linear)}
    weights = {name: each.weight.detach().clone() for name, each in linear.items()}
    randomize_vectors(model.named_parameters())
    model.to(getattr(torch, case.dtype))
    dense, packed_tensors = dict(model.state_dict()), {}
    digests: dict[str, str] = {}
    for module_name, module in linear.items():
        packed: Packed | None = case.pack(module_name, module)
        if packed is None:
            continue
        del dense[f"{module_name}.weight"]
        packed_tensors |= {f"{module_name}.{ending}": tensor for ending, tensor in packed.tensors.items()}
        values = packed.weight.detach().float().contiguous()
        assert values.shape == module.weight.shape
        assert torch.isfinite(values).all() and (values - module.weight.float()).abs().mean() < 0.2, module_name
        digests[module_name] = hashlib.sha256((values + 0.0).numpy().tobytes()).hexdigest()[:16]  # no sign of a zero
        scaled = values if packed.input_scales is None else values * packed.input_scales.float()
        module.weight.data = scaled
    token_ids = torch.randint(0, 60, (2, _LENGTH))
    drawn = dense.keys() - packed_tensors.keys()
    tensors = {key: value.contiguous() for key, value in (dense | packed_tensors).items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    draw_tensors(directory / "model.safetensors", seed, _COMMON["initializer_range"], lambda name: name in drawn)
    described = {"float16": "F16", "bfloat16": "BF16"}[case.dtype]
    deviation = case.settings.get("initializer_range", _COMMON["initializer_range"])
    packed_weights = {name: weights[name] for name in digests}
    store_differences(directory / "model.safetensors", seed, deviation, described, packed_weights)
    with whole(directory) as complete:
        stored = load_file(complete / "model.safetensors")
    again = model_class(config_class(**settings))  # whose table of rotary frequencies was never rounded
    again.load_state_dict(model.state_dict() | {key: stored[key] for key in drawn})
    with torch.no_grad():
        logits = again.eval()(token_ids).logits
    model.config.dtype = case.dtype
    config = model.config.to_dict() | {"architectures": [model_class.__name__], "dtype": case.dtype}
    if case.beside_config is None:
        config["quantization_config"] = case.quantization
    else:
        (directory / case.beside_config).write_text(json.dumps(case.quantization, separators=(",", ":")) + "\n")
    (directory / "config.json").write_text(json.dumps(config, separators=(",", ":")) + "\n")
    expected = with_shares({"token_ids": token_ids, "logits": logits})
    save_file(expected, directory / "expected.safetensors", metadata=versions | {"weights": json.dumps(digests)})
    print(f"{name}: {len(digests)} packed, largest logit {logits.abs().max():.2f}, deviation {logits.std():.2f}")


def main() -> None:
    """The whole of the tool."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", choices=PACKAGES)
    parser.add_argument("directory", type=Path, help="where the folders go; folders of the same names are replaced")
    given = parser.parse_args()
    torch.set_num_threads(1)
    distribution, makers = PACKAGES[given.package]
    versions = VERSIONS | {distribution: metadata.version(distribution)}
    with opened(given.directory):
        for name, case in makers().items():
            folder: Path = given.directory / name
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            make(name, case, folder, versions)


if __name__ == "__main__":
    main()
