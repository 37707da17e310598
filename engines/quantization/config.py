"""Which quantization a checkpoint has: what `config.json`, or a file beside it, says of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from edgellm.engines.errors import CheckpointError
from edgellm.engines.formats.strict_formats import JSONObject
from edgellm.engines.quantization.compressed_tensors import CompressedTensors
from edgellm.engines.quantization.floats import FineGrainedFp8, Mxfp4
from edgellm.engines.quantization.gguf_blocks import Gguf
from edgellm.engines.quantization.gptq_awq import AutoRound, Awq, GptqModel
from edgellm.engines.quantization.layout import Quantization, Settings
from edgellm.engines.quantization.modelopt import ModelOpt

#: ModelOpt's own file; newer releases of it write the same into `config.json`.
MODELOPT_FILE = "hf_quant_config.json"
_KEYS = ("quantization_config", "compression_config")
_CLASSES = (CompressedTensors, Awq, GptqModel, AutoRound, FineGrainedFp8, ModelOpt, Mxfp4, Gguf)
_METHODS: dict[str, Callable[[Settings, str], Quantization]] = {each.method: each for each in _CLASSES}
#: Spellings of the same.
_OTHER_NAMES = {"auto_round": "auto-round", "autoround": "auto-round", "intel/auto-round": "auto-round"}
_OTHER_NAMES |= {"modelopt_fp4": "modelopt", "modelopt_mixed": "modelopt", "compressed_tensors": "compressed-tensors"}
#: Which MLX writes under "quantization" and, in newer releases, under "quantization_config" too.
_MLX_KEYS = {"group_size", "bits"}
_DTYPES = ("float16", "bfloat16", "float32")


def read_quantization(path: Path, config: dict[str, Any]) -> Quantization | None:
    """What the checkpoint in the folder `path`, whose `config.json` is `config`, says of its weights; None: all dense.
    Raises CheckpointError for a method or a setting that is not read, by its name."""
    place, (_, values) = path / "config.json", quantization_settings(config)
    if values is None and (path / MODELOPT_FILE).exists():
        place, values = path / MODELOPT_FILE, {"quant_method": "modelopt"}
    if values is None:
        values = config.get("quantization")
        if not (isinstance(values, dict) and "bits" in values):
            return None
    if isinstance(values, dict) and "quant_method" not in values and values.keys() >= _MLX_KEYS:
        raise CheckpointError(
            f"{place}: by 'quantization' the weights are packed as MLX packs them, which is not read; read are "
            f"{', '.join(_METHODS)}. Take a release in one of these, or the model's unquantized checkpoint"
        )
    key = "" if place.name == MODELOPT_FILE else ": quantization_config"
    if not isinstance(values, dict):
        raise CheckpointError(f"{place}{key} is {values!r:.60}, expected an object")
    named = values.get("quant_method")
    if named is None and "config_groups" in values:  # as early releases of both packages wrote it
        named = "modelopt" if "quant_algo" in values else "compressed-tensors"
    method = str(named).lower()
    method = _OTHER_NAMES.get(method, method)
    made = _METHODS.get(method)
    if method == "bitsandbytes" and all(values.get(key) is False for key in ("load_in_4bit", "load_in_8bit")):
        return None  # what was trained with settings that ask for nothing
    if made is None:
        raise CheckpointError(
            f"{place}{key}: by 'quant_method' the weights are quantized with {named!r:.60}, which is not read; read "
            f"are {', '.join(_METHODS)}. Take a release in one of these, or the model's unquantized checkpoint"
        )
    if method == "modelopt" and (path / MODELOPT_FILE).exists():  # which says more, as the size of groups
        place, key = path / MODELOPT_FILE, ""
        values = JSONObject.read(place, CheckpointError).values
    return made(Settings(values, f"{place}{key}"), _dtype(config))


def quantization_settings(config: dict[str, Any]) -> tuple[str, Any]:
    """The key under which a `config.json` says how weights are quantized, and what it says; "" and None where it does
    not."""
    found = ((key, values[key]) for values in objects(config) for key in _KEYS if values.get(key))
    return next(found, ("", None))


def folder_quantization(path: Path) -> Quantization | None:
    """`read_quantization` of the folder's own `config.json`."""
    return read_quantization(path, JSONObject.read(path / "config.json", CheckpointError).values)


def objects(config: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """A configuration, and that of its language model where it is inside."""
    text = config.get("text_config")
    return (config, text) if isinstance(text, dict) else (config,)


def _dtype(config: dict[str, Any]) -> str:
    """The model's own, in which some packages round weights."""
    named = (values.get(key) for values in objects(config) for key in ("dtype", "torch_dtype"))
    names = (str(name).removeprefix("torch.") for name in named)
    return next((name for name in names if name in _DTYPES), "bfloat16")
