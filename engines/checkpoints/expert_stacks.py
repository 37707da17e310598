"""Experts of a mixture that a checkpoint stacks in one tensor, as one tensor each: slices of the same mapped file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from edgellm.engines.formats.safetensors_file import TensorInfo

_GATE_UP, _DOWN = ("gate_proj", "up_proj"), ("down_proj",)
#: How the name of a stack [E, rows, columns] ends, what its experts' names have in that place, and what stands one
#: behind the other in the rows of each expert.
_STACKS = (
    (".mlp.experts.gate_up_proj", ".mlp.experts.", _GATE_UP),
    (".mlp.experts.down_proj", ".mlp.experts.", _DOWN),
    (".feed_forward.experts.gate_up_proj", ".feed_forward.experts.", ("w1", "w3")),
    (".feed_forward.experts.down_proj", ".feed_forward.experts.", ("w2",)),
    (".block_sparse_moe.input_linear.weight", ".block_sparse_moe.experts.", _GATE_UP),
    (".block_sparse_moe.output_linear.weight", ".block_sparse_moe.experts.", _DOWN),
)


def experts_apart(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """The tensors with `...experts.gate_up_proj` [E, 2 I, H] as `...experts.0.gate_proj.weight` [I, H] and so on, by
    the names that checkpoints have which do not stack them."""
    found: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        ending, prefix, parts = next((each for each in _STACKS if name.endswith(each[0])), ("", "", ("",)))
        if not prefix or len(info.shape) != 3 or info.shape[1] % len(parts):
            found[name] = info  # a stack that does not fit is found to be unknown
            continue
        count, rows, columns = info.shape
        shape, nbytes = (rows // len(parts), columns), info.nbytes // (count * len(parts))
        for place in range(count * len(parts)):
            expert, part = divmod(place, len(parts))
            first = part * shape[0]
            own = f"{info.name}[{expert}, {first}:{first + shape[0]}]"
            slice_of = replace(info, name=own, shape=shape, offset=info.offset + place * nbytes, nbytes=nbytes)
            found[f"{name.removesuffix(ending)}{prefix}{expert}.{parts[part]}.weight"] = slice_of
    return found
