"""Writes published models that take images, and EAGLE-3 heads, as llama.cpp's converter does: texts in one GGUF file,
the vision encoder in another. What it writes of golden models is in `tests/goldens/mmproj/converted.json`."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf_models import byte_pairs, write_model
from gguf_writing import Tensor, write_gguf
from golden_files import read_tensors, write_tensors
from tiny_multimodal import FAMILIES, TEMPLATE
from tokenizers import Tokenizer

#: By `model_type`, llama.cpp's name of the language model, and what its texts alone are published as.
_MODELS = {
    **{"qwen2_5_vl": ("qwen2vl", "qwen2"), "qwen3_vl": ("qwen3vl", "qwen3"), "qwen3_5": ("qwen35", "qwen3_5_text")},
    **{"qwen3_vl_moe": ("qwen3vlmoe", "qwen3_moe"), "qwen3_5_moe": ("qwen35moe", "qwen3_5_moe_text")},
}
MARKERS = {
    "image_token_id": "<|image_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
_ENCODER_NAMES = {
    **{"norm1": "ln1", "norm2": "ln2", "attn.qkv": "attn_qkv", "attn.proj": "attn_out"},
    **{f"mlp.{each}_proj": f"ffn_{each}" for each in ("gate", "up", "down")},
    **{"mlp.linear_fc1": "ffn_up", "mlp.linear_fc2": "ffn_down"},
}
_MERGER_NAMES = {
    **{"merger.ln_q": "v.post_ln", "merger.norm": "v.post_ln", "pos_embed": "v.position_embd"},
    **{"merger.mlp.0": "mm.0", "merger.mlp.2": "mm.2", "merger.linear_fc1": "mm.0", "merger.linear_fc2": "mm.2"},
}
_HEAD_NAMES = {
    **{"fc": "fc", "norm": "output_norm", "lm_head": "output", "embed_tokens": "token_embd"},
    **{"input_norm": "enc.output_norm", "hidden_norm": "blk.0.attn_norm_2", "input_layernorm": "blk.0.attn_norm"},
    **{"post_attention_layernorm": "blk.0.ffn_norm", "self_attn.o_proj": "blk.0.attn_output"},
    **{f"self_attn.{each}_proj": f"blk.0.attn_{each}" for each in "qkv"},
    **{f"mlp.{each}_proj": f"blk.0.ffn_{each}" for each in ("gate", "up", "down")},
}
_PIXELS = {"clip.vision.image_min_pixels": 64, "clip.vision.image_max_pixels": 1024}
#: What is written in the place of a dense tensor, by its name in the file and its values; None: the values.
Kinds = Callable[[str, np.ndarray], Tensor | None]


def stored_tensors(checkpoint: Path) -> dict[str, tuple[str, np.ndarray]]:
    """The tensors of a checkpoint by name, with safetensors' dtypes; those of floats as float32."""
    found = {}
    for file in checkpoint.glob("model*.safetensors"):
        for name, (dtype, shape, data) in read_tensors(file).items():
            types = {"F16": np.float16, "F32": np.float32, "I64": np.int64, "BOOL": np.bool_}
            values = np.frombuffer(data, types[dtype]).reshape(shape)
            found[name] = dtype, values.astype(np.float32) if dtype in ("F16", "F32") else values
    return found


def write_texts(checkpoint: Path, target: Path, more: Mapping[str, Any] | None = None, **options: Any) -> Path:
    """The language model of a checkpoint that takes images, as a GGUF file; `more` is further metadata."""
    config = json.loads((checkpoint / "config.json").read_text())
    kind, texts = _MODELS[config["model_type"]]
    inner = {"linear_conv_kernel_dim": 4, **config, **config.get("text_config", {}), "model_type": texts}
    inner["tie_word_embeddings"] = config.get("tie_word_embeddings", False)
    rope = inner.get("rope_parameters") or inner["rope_scaling"]
    inner = {key: value for key, value in inner.items() if key not in ("vision_config", "text_config", "rope_scaling")}
    inner["rope_parameters"] = {"rope_theta": inner.get("rope_theta", 10000.0), **rope, "rope_type": "default"}
    inner["rope_parameters"].pop("type", None)
    own = {f"{kind}.rope.dimension_sections": [*rope["mrope_section"], 0]} | dict(more or {})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(inner))
        tensors = {}
        for file in checkpoint.glob("model*.safetensors"):
            for tensor, stored in read_tensors(file).items():
                if "visual." not in tensor:
                    tensors[tensor.replace("model.language_model.", "model.")] = stored
        write_tensors(folder / "model.safetensors", tensors, {"format": "pt"})
        return write_model(folder, target, own, kind=kind, **options)


def encoder_metadata(checkpoint: Path) -> dict[str, Any]:
    """What the converter says of a vision encoder."""
    config = json.loads((checkpoint / "config.json").read_text())
    vision, text, family = config["vision_config"], config.get("text_config", config), config["model_type"]
    images = json.loads((checkpoint / "preprocessor_config.json").read_text())
    side = round(vision["num_position_embeddings"] ** 0.5) * vision["patch_size"] if family != "qwen2_5_vl" else 560
    found = {
        "has_vision_encoder": True,
        "vision.projection_dim": text["hidden_size"],
        "vision.image_size": side,
        "vision.patch_size": vision["patch_size"],
        "vision.embedding_length": vision["hidden_size"],
        "vision.feed_forward_length": vision["intermediate_size"],
        "vision.block_count": vision["depth"],
        "vision.attention.head_count": vision["num_heads"],
        "vision.image_mean": images["image_mean"],
        "vision.image_std": images["image_std"],
    }
    if family == "qwen2_5_vl":
        pattern = vision["fullatt_block_indexes"][0] + 1
        found |= {"projector_type": "qwen2.5vl_merger", "use_silu": True, "vision.n_wa_pattern": pattern}
        found["vision.attention.layer_norm_epsilon"] = 1e-6
    else:
        flags = [layer in vision.get("deepstack_visual_indexes", []) for layer in range(vision["depth"])]
        found |= {"projector_type": "qwen3vl_merger", "use_gelu": True, "vision.spatial_merge_size": 2}
        found |= {"vision.attention.layer_norm_epsilon": text["rms_norm_eps"], "vision.is_deepstack_layers": flags}
    return {f"clip.{key}": value for key, value in found.items()}


def encoder_tensors(checkpoint: Path, kinds: Kinds | None = None, fused: bool = False) -> dict[str, Tensor]:
    """The tensors of a vision encoder by llama.cpp's names; with `fused` q, k and v are one in Qwen2.5-VL's, too."""
    config = json.loads((checkpoint / "config.json").read_text())
    deepstack = config["vision_config"].get("deepstack_visual_indexes", [])
    written: dict[str, np.ndarray] = {}
    for published, (_, values) in stored_tensors(checkpoint).items():
        if "visual." not in published:
            continue
        inner, _, kind = published.partition("visual.")[2].rpartition(".")
        first, *rest = inner.split(".", 2)
        if inner == "patch_embed.proj":
            frames = {"weight": values[:, :, 0], "weight.1": values[:, :, 1]} if kind == "weight" else {kind: values}
            written |= {f"v.patch_embd.{each}": part for each, part in frames.items()}
        elif first == "deepstack_merger_list":
            written[f"v.deepstack.{deepstack[int(rest[0])]}.{rest[1].removeprefix('linear_')}.{kind}"] = values
        elif first != "blocks":
            written[f"{_MERGER_NAMES[inner]}.{kind}"] = values
        elif rest[1] == "attn.qkv" and config["model_type"] == "qwen2_5_vl" and not fused:
            for part, rows in zip("qkv", np.split(values, 3), strict=True):
                written[f"v.blk.{rest[0]}.attn_{part}.{kind}"] = rows
        else:
            written[f"v.blk.{rest[0]}.{_ENCODER_NAMES[rest[1]]}.{kind}"] = values
    return {name: (kinds and kinds(name, values)) or _as_float16(name, values) for name, values in written.items()}


def _as_float16(name: str, values: np.ndarray) -> Tensor:
    """Vectors and tables of positions as float32, others as float16."""
    is_float32 = values.ndim == 1 or ".position_embd" in name
    kind = np.float32 if is_float32 else np.float16
    return Tensor(np.dtype(kind).name, values.shape, np.ascontiguousarray(values, kind).tobytes())


def write_encoder(checkpoint: Path, target: Path, more: Mapping[str, Any] | None = None, **options: Any) -> Path:
    """The vision encoder of a checkpoint as a GGUF file; `more` is further metadata."""
    metadata = {"general.architecture": "clip"} | encoder_metadata(checkpoint) | dict(more or {})
    return write_gguf(target, metadata, encoder_tensors(checkpoint, **options))


def head_tensors(head: Path) -> dict[str, Tensor]:
    """The tensors of an EAGLE-3 head by llama.cpp's names."""
    config = json.loads((head / "config.json").read_text())
    counts = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    written = {}
    for published, (_, values) in stored_tensors(head).items():
        if published == "t2d":
            continue
        if published == "d2t":
            ids = values + np.arange(len(values))
            written["d2t"] = Tensor("int64", ids.shape, ids.astype(np.int64).tobytes())
            continue
        module, _, kind = published.removeprefix("midlayer.").removeprefix("layers.0.").rpartition(".")
        part = module.removeprefix("self_attn.").removesuffix("_proj")
        name, changed = f"{_HEAD_NAMES[module]}.{kind}", values
        if part in counts:
            pairs = values.reshape(counts[part], 2, len(values) // counts[part] // 2, *values.shape[1:])
            changed = pairs.swapaxes(1, 2).reshape(values.shape)
        written[name] = _as_float16(name, changed)
    return written


def head_metadata(head: Path, base: Path) -> dict[str, Any]:
    """What the converter says of an EAGLE-3 head, without its model's tokenizer."""
    config, model = (json.loads((each / "config.json").read_text()) for each in (head, base))
    layers = model["num_hidden_layers"]
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    found = {
        "target_layers": config.get("eagle_aux_hidden_state_layer_ids") or [2, layers // 2, layers - 3],
        "target_hidden_size": model["hidden_size"],
        "norm_before_residual": config.get("norm_before_residual", False),
        "norm_before_fc": config.get("norm_before_fc", False),
        "block_count": 1,
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "rope.freq_base": float(config.get("rope_theta", 10000.0)),
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "attention.key_length": size,
        "attention.value_length": size,
        "vocab_size": config["vocab_size"],
        "rope.dimension_count": size,
    }
    return {f"eagle3.{key}": value for key, value in found.items()}


def write_head(head: Path, base: Path, target: Path, more: Mapping[str, Any] | None = None) -> Path:
    """An EAGLE-3 head as a GGUF file; `more` is further metadata."""
    metadata = {"general.architecture": "eagle3"} | head_metadata(head, base) | dict(more or {})
    return write_gguf(target, metadata, head_tensors(head))


def tokenizer_keys(checkpoint: Path) -> dict[str, object]:
    """The metadata of a checkpoint's tokenizer and template."""
    keys = byte_pairs(Tokenizer.from_file(str(checkpoint / "tokenizer.json")), "gpt-2")
    keys["tokens"], keys["token_type"] = keys["tokens"][:-1], keys["token_type"][:-1]
    keys |= {"bos_token_id": 256, "eos_token_id": 257}
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()} | {"tokenizer.chat_template": TEMPLATE}


def write_both(checkpoint: Path, folder: Path) -> tuple[Path, Path]:
    """A checkpoint that takes images as two GGUF files."""
    folder.mkdir(exist_ok=True)
    window = json.loads((checkpoint / "config.json").read_text())["vision_config"].get("window_size")
    more = _PIXELS | ({} if window is None else {"clip.vision.window_size": window})
    texts = write_texts(checkpoint, folder / "tiny-F16.gguf", tokenizer_keys(checkpoint))
    return texts, write_encoder(checkpoint, folder / "mmproj-tiny-F16.gguf", more)


def tiny_files(make_checkpoint: Callable[..., Path], folder: Path, seed: int = 3) -> tuple[Path, Path]:
    """A tiny model that takes images, with random weights, as two files."""
    made = make_checkpoint(folder / "checkpoint", seed, **FAMILIES["qwen3_vl"])
    path = made / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}))
    return write_both(made, folder / "files")
