"""Argument checks shared by the kernels and their NumPy twins: one table of signatures, one function."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.errors import KernelError

#: Bit of a token count that says that the token occurs in the prompt; bits 0..29 count the generated ones.
IN_PROMPT = 1 << 30

#: The most rows of a launch that are not on the first axis of its grid.
MAXIMUM_ROWS = 65_535

#: What "compute" may be; NumPy holds bfloat16 as its uint16 bits.
COMPUTE_DTYPES = ("float32", "float16", "bfloat16")

#: Axes that may be empty: a request may have no prompt tokens to count, an engine may read no mask, a tensor be empty.
_MAY_BE_EMPTY = frozenset("NL")

_STATE = (
    ("active", "B", "int32"),
    ("token_ids", "B1", "int32"),
    ("kvcache_start_index", "B", "int32"),
    ("positions", "B", "int32"),
    ("token_counts", "BV", "int32"),
    ("emitted_index", "B", "int32"),
    ("emitted", "BE", "int32"),
)
_ARGMAX = (("logits", "BV", "float32"), ("tokens", "B", "int32"))
_SAMPLE = (
    ("processed", "BV", "float32"),
    ("thresholds", "B", "float32"),
    ("temperature", "B", "float32"),
    ("seeds", "B", "uint64"),
    ("sequences", "B", "int32"),
    ("positions", "B", "int32"),
    ("tokens", "B", "int32"),
)
_ATTENTION = (
    ("kvcache_start_index", "B", "int32"),
    ("position_offsets", "B", "int32"),
    ("rotary_table", "PR", "float32"),
    ("rope_rotary_cos_sin", "BTR", "compute"),
    ("attention_mask", "B1TL", "bool"),
)
_EMBEDDING = (
    ("table", "VH", "compute"),
    ("token_ids", "BT", "int32"),
    ("inputs_embeds", "BTH", "compute"),
)

#: Kernel name -> (argument name, axes, dtype) in the order of the interface. A digit is an axis of just that size.
SIGNATURES: dict[str, tuple[tuple[str, str, str], ...]] = {
    "embedding_lookup": _EMBEDDING,
    "prepare_attention": _ATTENTION,
    "prepare_step": _EMBEDDING + _ATTENTION,
    "insert_image_rows": (
        ("image_rows", "MH", "compute"),
        ("token_ids", "1T", "int32"),
        ("target", "1TH", "compute"),
        ("inserted", "1", "int32"),
    ),
    "mrope_rotary_rows": (
        ("positions", "3T", "int32"),
        ("axes", "R", "int32"),
        ("rotary_table", "PR", "float32"),
        ("rope_rotary_cos_sin", "1TR", "compute"),
    ),
    "argmax": _ARGMAX,
    "argmax_and_advance": _ARGMAX + _STATE,
    "process_logits": (
        ("logits", "BV", "float32"),
        ("token_counts", "BV", "int32"),
        ("repetition_penalty", "B", "float32"),
        ("presence_penalty", "B", "float32"),
        ("frequency_penalty", "B", "float32"),
        ("temperature", "B", "float32"),
        ("processed", "BV", "float32"),
    ),
    "filter_threshold": (
        ("processed", "BV", "float32"),
        ("top_k", "B", "int32"),
        ("top_p", "B", "float32"),
        ("min_p", "B", "float32"),
        ("thresholds", "B", "float32"),
    ),
    "sample": _SAMPLE,
    "sample_and_advance": _SAMPLE + _STATE,
    "count_tokens": (("token_ids", "N", "int32"), ("token_counts", "V", "int32")),
    "first_not_finite": (("values", "N", "compute"), ("index", "1", "int64")),
}


def check_host_arguments(kernel: str, *arrays: Any) -> dict[str, int]:
    """Sizes of the axes of `kernel` by letter, if `arrays` are NumPy arrays as its signature wants them.

    Raises KernelError that names the argument, what was found and what is expected.
    """
    try:
        key = tuple([(array.shape, array.dtype, array.flags.c_contiguous) for array in arrays])
    except AttributeError:
        raise _wrong_kind(kernel, arrays, np.ndarray) from None
    return _check(kernel, key)


def check_device_arguments(kernel: str, *arrays: Any) -> dict[str, int]:
    """The same for `DeviceArray` arguments, which are contiguous by definition."""
    try:
        key = tuple([(array.shape, array.dtype, array.pointer != 0) for array in arrays])
    except AttributeError:
        raise _wrong_kind(kernel, arrays, DeviceArray) from None
    return _check(kernel, key)


def _wrong_kind(kernel: str, arrays: tuple[Any, ...], expected: type) -> KernelError:
    names = [name for name, _, _ in SIGNATURES[kernel]]
    name, found = next(
        (n, type(a).__name__) for n, a in zip(names, arrays, strict=False) if not isinstance(a, expected)
    )
    return KernelError(f"{kernel}: {name} is a {found}; expected a {expected.__name__}, as these kernels work on those")


@lru_cache(maxsize=256)
def _check(kernel: str, found: tuple[tuple[tuple[int, ...], Any, bool], ...]) -> dict[str, int]:
    """Checked once for each combination of shapes and dtypes, as these repeat with every token."""
    signature = SIGNATURES[kernel]
    if len(found) != len(signature):
        raise KernelError(f"{kernel}: {len(found)} arguments; expected {len(signature)}")
    sizes: dict[str, int] = {}
    compute: str | None = None
    for (name, axes, dtype), (shape, found_dtype, usable) in zip(signature, found, strict=True):
        expected_shape = "[" + ", ".join(axes) + "]"
        if len(shape) != len(axes):
            raise KernelError(f"{kernel}: {name} has shape {list(shape)}; expected {expected_shape}")
        for axis, size in zip(axes, shape, strict=True):
            wanted = int(axis) if axis.isdigit() else sizes.setdefault(axis, size)
            if size != wanted or (size == 0 and axis not in _MAY_BE_EMPTY):
                known = ", ".join(f"{letter} = {value}" for letter, value in sizes.items())
                raise KernelError(f"{kernel}: {name} has shape {list(shape)}; expected {expected_shape} with {known}")
        dtype_name = _dtype_name(found_dtype)
        if dtype == "compute":
            allowed = COMPUTE_DTYPES if compute is None else (compute,)
            compute = compute or dtype_name
        else:
            allowed = (dtype,)
        if dtype_name not in allowed:
            raise KernelError(f"{kernel}: {name} is {dtype_name}; expected {' or '.join(allowed)}")
        if not usable:
            raise KernelError(f"{kernel}: {name} is not C-contiguous or has no memory; pass a contiguous array")
    return sizes


def _dtype_name(dtype: Any) -> str:
    """The project's name of a dtype; uint16 on the host stands for the bits of bfloat16."""
    name = dtype if isinstance(dtype, str) else dtype.name
    return "bfloat16" if name == "uint16" else name
