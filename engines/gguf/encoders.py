"""Vision encoders in GGUF, which llama.cpp calls mmproj: those of Qwen2.5-VL, Qwen3-VL and Qwen3.5.

Its converter calls tensors otherwise, gives q, k and v of Qwen2.5-VL a tensor each, cuts the convolution over two
pictures into one for each, and counts deepstack mergers by their layers. What it does not write down is as published.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from edgellm.engines.errors import CheckpointError, UnsupportedModelError
from edgellm.engines.formats.safetensors_file import COPY_AGAIN, TensorInfo
from edgellm.engines.gguf.architectures import ENCODERS, TABLE
from edgellm.engines.gguf.changes import Change
from edgellm.engines.gguf.metadata import Metadata
from edgellm.engines.model.config import LARGEST_DEPTH

_Config = dict[str, Any]

#: The texts of tokens that a model has for images.
_TOKENS: dict[str, str] = TABLE["image tokens"]
_TEMPORAL_PATCH_SIZE, _MERGE_SIZE, _WINDOW_SIZE = 2, 2, 112


@dataclass(frozen=True)
class _Encoder:
    """What `models` of architectures in GGUF are with such an encoder; names of modules in a layer, and beside the
    layers; how few and how many pixels images have where the file does not say."""

    models: dict[str, str]
    layer: dict[str, str]
    outside: dict[str, str]
    pixels: tuple[int, int]
    deepstack: dict[str, str] = field(default_factory=dict)


_PROJECTORS = {projector: _Encoder(**each) for projector, each in TABLE["encoders"].items()}
#: The families, by architecture and projector.
_MODELS = {(model, name): family for name, each in _PROJECTORS.items() for model, family in each.models.items()}
_PATCHES = ("v.patch_embd.weight", "v.patch_embd.weight.1")
_LAYER = re.compile(r"v\.(blk|deepstack)\.(\d{1,4})\.(\w+)\.(\w+)", re.ASCII)
#: Modules that may become one, in their order.
_TOGETHER = ("attn_q", "attn_k", "attn_v")


def takes_images(model: Metadata) -> bool:
    """Whether there are encoders for models of this architecture."""
    return model.architecture in {architecture for architecture, _ in _MODELS}


def is_encoder_of(encoder: Metadata, model: Metadata) -> bool:
    """Whether a file is an encoder of what the model may be, as wide as it."""
    width = model.whole("embedding_length")
    is_one = encoder.architecture == ENCODERS and (model.architecture, _projector(encoder)) in _MODELS
    return is_one and encoder.whole("vision.projection_dim") == width


def image_config(text: _Config, model: Metadata, encoder: Metadata) -> tuple[_Config, _Config]:
    """What `config.json`, and `preprocessor_config.json`, of a model with its encoder would say; `text` is that of the
    model alone. Raises UnsupportedModelError for another projector, and CheckpointError."""
    if encoder.architecture != ENCODERS:
        raise CheckpointError(
            f"{encoder.path}: 'general.architecture' is {encoder.architecture!r:.80}, expected {ENCODERS!r}, as of a "
            "vision encoder: name the model's mmproj file"
        )
    projector = _projector(encoder)
    family = _MODELS.get((model.architecture, projector))
    if family is None:
        supported = " and ".join(f"{kind!r} of {name!r}" for name, kind in _MODELS)
        raise UnsupportedModelError(
            f"{encoder.path}: 'clip.projector_type' is {projector!r:.80}, beside a model of the architecture "
            f"{model.architecture!r}; supported are {supported}. Take the encoder of this very model, or its texts "
            "alone: --mmproj none"
        )
    vision: _Config = {
        "depth": encoder.count("vision.block_count"),
        "hidden_size": encoder.whole("vision.embedding_length"),
        "intermediate_size": encoder.whole("vision.feed_forward_length"),
        "num_heads": encoder.whole("vision.attention.head_count"),
        "patch_size": encoder.whole("vision.patch_size"),
        "spatial_merge_size": encoder.whole("vision.spatial_merge_size") or _MERGE_SIZE,
        "temporal_patch_size": _TEMPORAL_PATCH_SIZE,
        "out_hidden_size": encoder.whole("vision.projection_dim"),
    }
    if missing := [key for key, value in vision.items() if not value]:
        raise CheckpointError(f"{encoder.path} does not say what {', '.join(missing)} are. {COPY_AGAIN}")
    vision |= _of_windows(encoder, vision) if family == "qwen2_5_vl" else _of_positions(encoder, vision)
    rope = text["rope_parameters"] | model.sections()
    whole = {key: text[key] for key in ("tie_word_embeddings", "dtype", "quantization_config") if key in text}
    inner = {key: value for key, value in text.items() if key != "quantization_config"} | {"rope_parameters": rope}
    known = model.entries("tokenizer.ggml.tokens", str, "texts")
    if missing := [token for token in _TOKENS.values() if token not in known]:
        raise model.error("tokenizer.ggml.tokens", f"{len(known)} texts without {', '.join(missing)}", "those, too")
    tokens = {key: known.index(token) for key, token in _TOKENS.items()}
    config = {"model_type": family, "text_config": inner, "vision_config": vision} | whole | tokens
    return config, _preprocessor(encoder, vision, _PROJECTORS[projector].pixels)


def _projector(encoder: Metadata) -> str:
    return encoder.text("projector_type") or encoder.text("vision.projector_type") or ""


def _of_windows(encoder: Metadata, vision: _Config) -> _Config:
    """Every so many layers one attends to the whole image."""
    pattern, depth = encoder.count("vision.n_wa_pattern"), min(vision["depth"], LARGEST_DEPTH)
    layers = range(pattern - 1, depth, pattern) if pattern else range(depth)
    window = encoder.whole("vision.window_size") or _WINDOW_SIZE
    return {"hidden_act": "silu", "window_size": window, "fullatt_block_indexes": list(layers)}


def _of_positions(encoder: Metadata, vision: _Config) -> _Config:
    flags = encoder.flags("vision.is_deepstack_layers")
    table = encoder.tensors.get("v.position_embd.weight")
    if table is None:
        raise CheckpointError(f"{encoder.path} has no tensor 'v.position_embd.weight'. {COPY_AGAIN}")
    layers = [layer for layer, is_one in enumerate(flags) if is_one]
    own = {"num_position_embeddings": table.shape[0], "deepstack_visual_indexes": layers}
    return {"hidden_act": "gelu_pytorch_tanh"} | own


def _preprocessor(encoder: Metadata, vision: _Config, usual: tuple[int, int]) -> _Config:
    fewest, most = (encoder.whole(f"vision.image_{which}_pixels") for which in ("min", "max"))
    given = {key: encoder.numbers(f"vision.{key}") for key in ("image_mean", "image_std")}
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "size": {"shortest_edge": fewest or usual[0], "longest_edge": most or usual[1]},
        "patch_size": vision["patch_size"],
        "temporal_patch_size": vision["temporal_patch_size"],
        "merge_size": vision["spatial_merge_size"],
    } | {key: value for key, value in given.items() if value}


def encoder_tensors(encoder: Metadata) -> dict[str, Change]:
    """What makes each published tensor of an encoder, by its name. One of an unknown name keeps it, so that it is found
    to be unknown. Raises UnsupportedModelError for another projector, and CheckpointError."""
    projector = _projector(encoder)
    if projector not in _PROJECTORS:
        raise UnsupportedModelError(
            f"{encoder.path}: 'clip.projector_type' is {projector!r:.80}; supported are {', '.join(_PROJECTORS)}"
        )
    flags = encoder.flags("vision.is_deepstack_layers")
    places = {layer: sum(flags[:layer]) for layer, is_one in enumerate(flags) if is_one}
    parts: dict[str, list[TensorInfo]] = {}
    for info in encoder.tensors.values():
        parts.setdefault(f"model.visual.{_published(info.name, _PROJECTORS[projector], places)}", []).append(info)
    return {name: _joined(name, infos) for name, infos in parts.items()}


def _published(name: str, encoder: _Encoder, places: dict[int, int]) -> str:
    """The published name of the tensor that one becomes, or is a part of; `places` are those of layers among the
    mergers."""
    if name in _PATCHES:
        return "patch_embed.proj.weight"
    if name == "v.patch_embd.bias":
        return "patch_embed.proj.bias"
    match = _LAYER.fullmatch(name)
    if match is None:
        module, _, kind = name.rpartition(".")
        return f"{encoder.outside[module]}.{kind}" if module in encoder.outside else name
    part, layer, module, kind = match[1], int(match[2]), match[3], match[4]
    if part == "blk" and module in encoder.layer:
        return f"blocks.{layer}.{encoder.layer[module]}.{kind}"
    if part == "deepstack" and layer in places and module in encoder.deepstack:
        return f"deepstack_merger_list.{places[layer]}.{encoder.deepstack[module]}.{kind}"
    return name


def _joined(name: str, infos: list[TensorInfo]) -> Change:
    """What becomes one of tensors that are parts of it."""
    frames = infos[0].name in _PATCHES
    if len(infos) == 1 and not frames:
        return Change(tuple(infos), dense=True)
    order = _PATCHES if frames else _TOGETHER
    found = {info.name if frames else info.name.split(".")[-2]: info for info in infos}
    shapes = {info.shape if frames else info.shape[1:] for info in infos}
    is_whole = found.keys() == set(order) and len(infos) == len(order)
    if not is_whole or len(shapes) > 1 or (frames and len(infos[0].shape) != 4):
        listed = ", ".join(f"{info.name} {list(info.shape)}" for info in infos)
        raise CheckpointError(
            f"{infos[0].file}: {name} is made of {' and '.join(order)} of like shapes, found {listed}. {COPY_AGAIN}"
        )
    return Change(tuple(found[each] for each in order), frames=frames, dense=True)
