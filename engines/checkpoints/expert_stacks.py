"""Experts of a mixture that a checkpoint stacks in one tensor, as one tensor each: slices of the same mapped file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from edgellm.engines.formats.safetensors_file import TensorInfo

#: A stack [E, rows, columns], and what stands one behind the other in the rows of each expert.
_STACK = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)")
_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def experts_apart(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """The tensors with `...experts.gate_up_proj` [E, 2 I, H] as `...experts.0.gate_proj.weight` [I, H] and so on, by
    the names that checkpoints have which do not stack them."""
    found: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        match = _STACK.fullmatch(name)
        parts = _PARTS[match[2]] if match else ()
        if match is None or len(info.shape) != 3 or info.shape[1] % len(parts):
            found[name] = info  # one that does not fit is found to be unknown
            continue
        count, rows, columns = info.shape
        shape, nbytes = (rows // len(parts), columns), info.nbytes // (count * len(parts))
        for place in range(count * len(parts)):
            expert, part = divmod(place, len(parts))
            first = part * shape[0]
            own = f"{info.name}[{expert}, {first}:{first + shape[0]}]"
            slice_of = replace(info, name=own, shape=shape, offset=info.offset + place * nbytes, nbytes=nbytes)
            found[f"{match[1]}.{expert}.{parts[part]}.weight"] = slice_of
    return found
