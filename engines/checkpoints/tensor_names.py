"""The tensors of checkpoints by other names: the language model's own, and each expert of a mixture by itself where a
checkpoint stacks them in one tensor, as slices of the same mapped file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from edgellm.engines.errors import CheckpointError
from edgellm.engines.formats.safetensors_file import TensorInfo
from edgellm.engines.formats.tensors import language_model_name
from edgellm.engines.model.config import LARGEST_EXPERTS

_MLP, _GATE_UP, _DOWN = ".mlp.experts.", ("gate_proj.weight", "up_proj.weight"), ("down_proj.weight",)
#: How the name of a stack [E, rows, columns] ends; what its experts' names have in that place, and what stands one
#: behind the other in the rows of each.
_STACKS = {
    ".mlp.experts.gate_up_proj": (_MLP, _GATE_UP),
    ".mlp.experts.down_proj": (_MLP, _DOWN),
    ".feed_forward.experts.gate_up_proj": (".feed_forward.experts.", ("w1.weight", "w3.weight")),
    ".feed_forward.experts.down_proj": (".feed_forward.experts.", ("w2.weight",)),
    ".block_sparse_moe.input_linear.weight": (".block_sparse_moe.experts.", _GATE_UP),
    ".block_sparse_moe.output_linear.weight": (".block_sparse_moe.experts.", _DOWN),
}
#: gpt-oss's: transposed, or in blocks [E, rows, blocks, 16] with scales [E, rows, blocks]. Gate and up are one tensor.
_OF_GPT_OSS = {
    f".mlp.experts.{name}{ending}": (_MLP, (f"{name}.weight{ending}",))
    for name in ("gate_up_proj", "down_proj")
    for ending in ("", "_blocks", "_scales")
}


def experts_apart(tensors: Mapping[str, TensorInfo], is_gpt_oss: bool = False) -> dict[str, TensorInfo]:
    """The tensors with `...experts.gate_up_proj` [E, 2 I, H] as `...experts.0.gate_proj.weight` [I, H] and so on, by
    the names that checkpoints have which do not stack them."""
    found: dict[str, TensorInfo] = {}
    stacks = _OF_GPT_OSS if is_gpt_oss else _STACKS
    for name, info in tensors.items():
        ending = next((each for each in stacks if name.endswith(each)), "")
        prefix, parts = stacks.get(ending, ("", ("",)))
        if not prefix or len(info.shape) < 3 or info.shape[1] % len(parts) or info.shape[0] > LARGEST_EXPERTS:
            found[name] = info  # a stack that does not fit is found to be unknown
            continue
        count, rows, *columns = info.shape
        shape = (rows // len(parts), *columns)
        turned = is_gpt_oss and name.endswith("_proj")
        if name.endswith("_blocks"):  # of two codes a byte, as one row
            shape = (shape[0], math.prod(columns))
        for place in range(count * len(parts)):
            expert, part = divmod(place, len(parts))
            own = info.part(place, shape, f"{expert}, {part * shape[0]}:{(part + 1) * shape[0]}")
            own = replace(own, shape=shape[::-1], turned=True) if turned else own
            found[f"{name.removesuffix(ending)}{prefix}{expert}.{parts[part]}"] = own
    return found


def unwrapped(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """The tensors by the language model's own names; CheckpointError where two tensors would have the same."""
    named: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        own = language_model_name(name)
        if own in named:
            raise CheckpointError(
                f"{info.file}: the tensors {named[own].name!r} and {name!r} are one and the same of the language "
                "model. Remove one"
            )
        named[own] = info
    return named
