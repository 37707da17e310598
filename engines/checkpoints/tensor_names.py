"""The tensors of checkpoints by other names: the language model's own, and each expert of a mixture by itself where a
checkpoint stacks them in one tensor, as slices of the same mapped file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from edgellm.engines.errors import CheckpointError
from edgellm.engines.formats.safetensors_file import TensorInfo
from edgellm.engines.formats.strict_formats import is_integer
from edgellm.engines.formats.tensors import language_model_name
from edgellm.engines.model.config import LARGEST_EXPERTS

#: How the name of a stack [E, rows, columns] ends; what its experts' names have in that place, and what stands one
#: behind the other in the rows of each. gpt-oss's are transposed, or in blocks [E, rows, blocks, 16] with scales [E,
#: rows, blocks]; gate and up are one tensor.
TABLE: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
#: How the name of a stack's scales ends, of Hugging Face's FP8: each is that of a block of rows and columns.
_SCALES = "_scale_inv"


def experts_apart(tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> dict[str, TensorInfo]:
    """The tensors with `...experts.gate_up_proj` [E, 2 I, H] as `...experts.0.gate_proj.weight` [I, H] and so on, by
    the names that checkpoints have which do not stack them. `config` is their `config.json`. CheckpointError where an
    expert's tensor is there twice, in a stack and by itself."""
    found: dict[str, TensorInfo] = {}
    stacks = TABLE["gpt_oss" if config.get("model_type") == "gpt_oss" else "stacks"]
    for name, info in tensors.items():
        stack = name.removesuffix(_SCALES)  # itself, or whose scales these are
        ending = next((each for each in stacks if stack.endswith(each)), "")
        prefix, parts = stacks.get(ending, ("", ("",)))
        codes = tensors.get(stack, info)
        turned = len(info.shape) == len(codes.shape) == 3 and _is_turned(stack, codes, config)
        stacked, unit = 2 if turned else 1, len(parts)
        if not prefix or min(len(info.shape), len(codes.shape)) < 3 or info.shape[0] > LARGEST_EXPERTS:
            _add(found, name, info)  # a stack that does not fit is found to be unknown
            continue
        if stack != name and unit > 1:  # a block of both gates and ups belongs to neither
            unit *= _block_rows(config)
        if info.shape[stacked] % len(parts) or codes.shape[stacked] % unit:
            _add(found, name, info)
            continue
        rows, shape = info.shape[stacked] // len(parts), info.shape[1:]
        for place in range(info.shape[0] * len(parts)):
            expert, part = divmod(place, len(parts))
            words = f"{expert}, {part * rows}:{(part + 1) * rows}"
            if turned:
                whole = info.part(expert, shape, words)
                first, size = whole.offset + part * whole.nbytes // max(1, shape[0]) // len(parts), whole.nbytes
                own = replace(whole, shape=(rows, shape[0]), offset=first, nbytes=size // len(parts), turned=shape[1])
            elif name.endswith("_blocks"):  # of two codes a byte, as one row
                own = info.part(place, (rows, math.prod(shape[1:])), words)
            else:
                own = info.part(place, (rows, *shape[1:]), words)
            _add(found, f"{stack.removesuffix(ending)}{prefix}{expert}.{parts[part]}{name.removeprefix(stack)}", own)
    return found


def _block_rows(config: Mapping[str, Any]) -> int:
    """How many rows of a stack share a scale: blocks are as high as they are wide where stacks may be turned."""
    settings = config.get("quantization_config")
    block = settings.get("weight_block_size") if isinstance(settings, dict) else None
    return block[0] if isinstance(block, list) and block and is_integer(block[0]) and block[0] > 0 else 1


def _is_turned(name: str, info: TensorInfo, config: Mapping[str, Any]) -> bool:
    """Whether each matrix of a stack is the transpose of a linear layer's: gpt-oss's are, and Qwen3-VL's as published,
    not as transformers 5 writes them: the hidden size tells, as it does there."""
    family, text = config.get("model_type"), config.get("text_config")
    if family != "qwen3_vl_moe" or not isinstance(text, dict):
        return family == "gpt_oss" and name.endswith("_proj")
    return bool(info.shape[1 if name.endswith("down_proj") else 2] != text.get("hidden_size", 2048))


def unwrapped(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """The tensors by the language model's own names; CheckpointError where two tensors would have the same."""
    named: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        _add(named, language_model_name(name), info)
    return named


def _add(named: dict[str, TensorInfo], own: str, info: TensorInfo) -> None:
    if own in named:
        raise CheckpointError(
            f"{info.file}: the tensors {named[own].name!r} and {info.name!r} are one and the same of the language "
            "model. Remove one"
        )
    named[own] = info
