"""The modules of kernels that a process can ask for, of every family and size that differs."""

from __future__ import annotations

from functools import partial

from edgellm.engines.quantization.gguf_blocks import BlockLayout
from edgellm.kernels.acceptance.launcher import ADVANCE, CHAINS, TREE_LOGITS, TYPICAL, WALK
from edgellm.kernels.compiler import ModuleSource
from edgellm.kernels.decode.arguments import CUDA_TYPES
from edgellm.kernels.decode.attention import AttentionKind, attention_kernel
from edgellm.kernels.decode.columns import column_kernel
from edgellm.kernels.decode.linear import linear_kernel
from edgellm.kernels.decode.norms import norm_kernel
from edgellm.kernels.decode.tiled_linear import direct_kernel, tiled_kernel
from edgellm.kernels.decode.tilings import Capacity, direct_tilings, tilings
from edgellm.kernels.encoder.contract import ACTIVATIONS, NO_ACTIVATION
from edgellm.kernels.encoder.launcher import attention_kernel as encoder_attention
from edgellm.kernels.encoder.launcher import row_kernel
from edgellm.kernels.experts.contract import SUMS, Activation
from edgellm.kernels.experts.prompt_launcher import PACKED_TILINGS as PACKED_EXPERT_TILINGS
from edgellm.kernels.experts.prompt_launcher import SORTING, product_kernel
from edgellm.kernels.experts.prompt_launcher import TILINGS as EXPERT_TILINGS
from edgellm.kernels.images.launcher import images_source
from edgellm.kernels.prefill.launcher import AttentionKind as PromptAttentionKind
from edgellm.kernels.prefill.launcher import attention_kernel as prefill_attention
from edgellm.kernels.prefill.launcher import heads_kernel
from edgellm.kernels.prefill.linear import PACKED_TILINGS, TILINGS, packed_prompt_kernel, prompt_kernel
from edgellm.kernels.quantization.device_layout import DeviceLayout
from edgellm.kernels.quantization.packed_weight import Codes, WeightFormat
from edgellm.kernels.ranks.launcher import ranks_source
from edgellm.kernels.recurrent.launcher import convolution_kernel, delta_kernel, gates_kernel
from edgellm.kernels.sampling.launcher import DRAWING, EmbeddingTable, finite_source, step_source
from edgellm.kernels.sounds.launcher import SOUNDS
from edgellm.kernels.tree.launcher import tree_source

#: Of attention with sinks: whether several warps share spans, and whether there is a window.
_SINKS = (False, True), (True, False)


def decode_sources(dtype: str) -> list[ModuleSource]:
    """All modules of linear layers and attention for a dtype."""
    kind = CUDA_TYPES[dtype]
    units = {"norm_linear": ("Narrow", "Wide"), "linear_residual": ("Narrow", "Deep", "WideTwice")}
    units["norm_gate_up"] = "NarrowPairs", "WidePairs"
    units_of = [(name, f"decode::{unit}") for name in units for unit in units[name]]
    kernels = [linear_kernel(name, kind, unit, *more) for name, unit in units_of for more in ((), ("true",))]
    kernels += [linear_kernel(name, kind, unit, "false", "false") for name, unit in units_of[:2] + units_of[-2:]]
    kernels += [linear_kernel(f"added_{name}", kind, unit) for name, unit in units_of[:2] + units_of[-2:]]
    kernels += [linear_kernel(f"{added}token_gate", kind, units_of[0][1]) for added in ("", "added_")]
    kernels += [linear_kernel("norms_linear", kind, second) for second in (kind, "float")]
    kernels += [column_kernel(name, kind) for name in ("insert_columns", "token_inputs", "token_gate")]
    kernels += [norm_kernel("norm_residual", f"{kind}, true")]
    kernels += [norm_kernel("norm_parts", f"{kind}, decode::{of}") for of in ("SQUARES", "RANKS")]
    kernels += [norm_kernel(name, kind) for name in ("norm", "scale_rows", "cap_rows", "norm_residual", "norm_parts")]
    both, of_windows = (False, True), ((128, True, False), (256, False, False), (256, True, True))
    attentions = [(size, AttentionKind(shares)) for size in (64, 128, 256) for shares in both]
    attentions += [(256, AttentionKind(shares, in_turn=True, window=not shares)) for shares in both]
    attentions.append((256, AttentionKind(False, tile_warps=1)))
    attentions += [(128, AttentionKind(neighbours=True)), (128, AttentionKind(norms_behind=True))]
    attentions += [(size, AttentionKind(window=size == 256, values_normed=True)) for size in (256, 512)]
    attentions += [(512, AttentionKind(int8=int8, in_turn=True, values_normed=True)) for int8 in both]
    attentions += [(64, AttentionKind(False, True)), (128, AttentionKind(True, True))]
    attentions += [(size, AttentionKind(shares, int8, window=True)) for size, shares, int8 in of_windows]
    attentions += [(64, AttentionKind(shares, window=window, sinks=True)) for shares, window in _SINKS]
    attentions += [(size, AttentionKind(True, size == 128, window=size == 256, cap=True)) for size in (64, 128, 256)]
    attentions += [(128, AttentionKind(True, int8, tile_warps=4, one_token=True)) for int8 in both]
    attentions += [(size, AttentionKind(int8=size == 64, one_token=True)) for size in (64, 256, 512)]
    attentions.append((512, AttentionKind(int8=True, in_turn=True, one_token=True)))
    kernels += [attention_kernel(dtype, size, kind) for size, kind in attentions]
    for gpu in (Capacity(132, 232_448, True), Capacity(16, 166_912, False)):
        names = {"linear": False, "gate_up": True, "linear_residual": False, "selected_residual": False}
        kernels += [tiled_kernel(name, dtype, tilings(64, gpu, gated)[-1], gpu) for name, gated in names.items()]
        kernels += [tiled_kernel(name, dtype, tilings(16, gpu, names[name])[0], gpu) for name in ("linear", "gate_up")]
        kernels.append(tiled_kernel("gate_up", dtype, tilings(64, gpu, gated=True)[-1], gpu, adapted=True))
    names = ("linear", "gate_up", "linear_residual")
    direct = direct_tilings(64, gpu, gated=True)
    largest = {type(tiling): tiling for tiling in direct}.values()
    kernels += [direct_kernel(name, dtype, tiling, 2048) for name in names for tiling in largest]
    kernels += [direct_kernel("linear", dtype, tiling, 1032) for tiling in direct_tilings(16, gpu)[:2]]
    kernels += [direct_kernel("gate_up", dtype, tiling, 2048) for tiling in direct_tilings(32, Capacity(), gated=True)]
    return [kernel.source for kernel in kernels]


def recurrent_sources(dtype: str) -> list[ModuleSource]:
    """Those of recurrent layers and gated attention, of each size that they are compiled for."""
    kind, kernels = CUDA_TYPES[dtype], [convolution_kernel("commit_columns", width) for width in (3, 4, 8)]
    for value in ("float32", dtype):
        kernels += [convolution_kernel("convolve_nodes", 4, value, "float32")]
        kernels += [convolution_kernel("convolve_chunk", width, value, dtype) for width in (2, 3)]
        kernels += [gates_kernel(name, value, dtype) for name in ("gated_norm", "sigmoid_gate")]
        kernels.append(gates_kernel("separate_gates", value))
        kernels += [gates_kernel(name, value, dtype) for name in ("gated_group_norm", "gated_part_norm")]
        kernels.append(gates_kernel("gated_squares", value))
    for keys, scans in ((64, False), (128, False), (256, False), (128, True)):
        delta = partial(delta_kernel, scans=scans)
        kernels += [delta("delta_nodes", keys, "float", tree) for tree in ("true", "false")]
        kernels += [delta("delta_chunk", keys, value) for value in ("float", kind)]
        kernels.append(delta("delta_token", keys, "float"))
        kernels += [delta("commit_matrices", keys, is_one) for is_one in ("true", "false")]
    return [kernel.source for kernel in kernels]


def encoder_sources(dtype: str) -> list[ModuleSource]:
    """Those of encoders: of each kind of arguments that steps have, each head size, and each activation."""
    kernels = [encoder_attention(dtype, size, tiles) for size in (64, 80) for tiles in (1, 2)]
    kernels.append(encoder_attention(dtype, 128, 1))
    kernels += [row_kernel("heads.cu", "prepare_heads", given, dtype) for given in ("float32", dtype)]
    kernels += [row_kernel("product.cu", "product", "float32", dtype, dtype)]
    kernels += [row_kernel("rows.cu", "unfold", given, dtype) for given in ("float32", dtype)]
    of_rows = [("norm", *pair) for pair in (("float32", dtype, dtype), ("float32", dtype, "float32"), (dtype,) * 3)]
    of_rows += [("activate", dtype), ("average_pool", "float32")]
    of_rows.append(("add_scaled_rows", dtype))
    of_rows += [("add_rows", "float32", other) for other in (dtype, "float32")]
    pairs = (("float32", dtype), (dtype, dtype), (dtype, "float32"), ("float32", "float32"))
    of_rows += [("copy_rows", *pair) for pair in pairs]
    kernels += [row_kernel("rows.cu", *names, width) for names in of_rows for width in (1, 4)]
    clipped = [
        ("clip_rows", *kinds) for kinds in (("float32", dtype, dtype), ("float32", dtype, "float32"), (dtype,) * 3)
    ]
    clipped.append(("clipped_gate", dtype))
    kernels += [row_kernel("bounds.cu", *names, width) for names in clipped for width in (1, 4)]
    kernels += [row_kernel("norms.cu", "normed_heads", dtype)]
    kernels += [row_kernel("norms.cu", "standard_norm", kind) for kind in (dtype, "float32")]
    conformer = ("centered_norm", "add_normed", "gated_convolution", "local_attention")
    kernels += [row_kernel("conformer.cu", name, dtype) for name in conformer]
    kernels.append(row_kernel("past.cu", "past_attention", dtype))
    activations = (*ACTIVATIONS.values(), NO_ACTIVATION)
    kernels += [prompt_kernel("activated", dtype, TILINGS[-1], 3, activation=number) for number in activations]
    return [kernel.source for kernel in kernels]


def other_sources(dtype: str) -> list[ModuleSource]:
    """All other modules that a process of a model in a dtype can ask for."""
    drawing = [DRAWING, SOUNDS, WALK, ADVANCE, TREE_LOGITS, TYPICAL, CHAINS]
    shapes = ((64, 1), (64, 2), (128, 1), (256, 1))
    prefill = [heads_kernel(dtype, size).source for size in (64, 128, 256)]
    prefill += [heads_kernel(dtype, 64, source="float32").source, heads_kernel(dtype, 256, True).source]
    prefill += [*(prefill_attention(dtype, *shape).source for shape in shapes)]
    prefill.append(prefill_attention(dtype, 128, 1, PromptAttentionKind(True)).source)
    kinds = [(size, tiles, PromptAttentionKind(size == 128, True)) for size, tiles in ((64, 2), (128, 1), (256, 1))]
    kinds += [(size, 1, PromptAttentionKind(size == 128, size == 256, ahead=True)) for size in (64, 128, 256)]
    kinds.append((256, 1, PromptAttentionKind(True, True, ahead=True)))
    kinds += [(size, 1, PromptAttentionKind(size == 128, size == 256, cap=True)) for size in (64, 128, 256)]
    prefill += [prefill_attention(dtype, *kind).source for kind in kinds]
    names, last = ("linear", "gate_up", "linear_residual", "low_products"), TILINGS[-1]
    prefill += [prompt_kernel(name, dtype, tiling, 3).source for tiling in TILINGS for name in names]
    adapted = ((name, tiling) for name in names[:3] for tiling in (TILINGS[0], last))
    prefill += [prompt_kernel(name, dtype, tiling, 2, adapted=True).source for name, tiling in adapted]
    tables = EmbeddingTable(1, 4), EmbeddingTable(pieces=2), EmbeddingTable(1, 4, 2)  # of int8, and of two GPUs
    packed = [source(dtype, table) for table in tables for source in (step_source, tree_source)]
    every = [source(dtype) for source in (step_source, finite_source, tree_source, images_source, ranks_source)]
    return drawing + prefill + packed + every


def packed_prompt_sources(dtype: str) -> list[ModuleSource]:
    """Those of prompts over packed weights: of formats whose codes become values by different ways."""
    formats: tuple[tuple[Codes, int | None, bool, str | None], ...] = (
        *(("int4", 128, False, None), ("int4", 64, True, None), ("int4", 16, True, "float32")),
        *(("int8", None, False, None), ("int8", 128, True, "float32"), ("fp8", 128, False, None)),
        *(("fp8", None, False, "float32"), ("fp4", 16, False, None)),
    )
    found, last = [], PACKED_TILINGS[-1]
    each = [(WeightFormat(codes, group, zeros, dtype), multiplied) for codes, group, zeros, multiplied in formats]
    each += [(BlockLayout(kind).format(dtype), "float32") for kind in ("q4_1", "q5_k", "q6_k", "iq4_xs", "mxfp4")]
    for format, multiplied in each:
        layout = DeviceLayout(format, 4096, 4096, dtype=dtype, multiplied=multiplied)
        kinds = [("linear", tiling, False) for tiling in PACKED_TILINGS]
        kinds += [("gate_up", last, False), ("linear_residual", last, False), ("gate_up", last, True)]
        found += [packed_prompt_kernel(name, layout, tiling, 2, adapted).source for name, tiling, adapted in kinds]
    return found


def sorted_expert_sources(dtype: str) -> list[ModuleSource]:
    """Those of prompts that go through a mixture's experts: each tiling, dense and packed."""
    found, formats = [SORTING.source], [WeightFormat("int4", 128, False, dtype), BlockLayout("mxfp4").format(dtype)]
    for format in (None, *formats):
        layout = None if format is None else DeviceLayout(format, 1536, 2048, dtype=dtype)
        tilings = EXPERT_TILINGS if layout is None else PACKED_EXPERT_TILINGS
        own = [each._replace(block_bytes=0 if layout is None else layout.block_bytes) for each in tilings]
        pairs = [(Activation(), each) for each in own] + [(how, own[-2]) for how in (SUMS, Activation("alternating"))]
        found += [product_kernel(how, dtype, tiling, 2, layout).source for how, tiling in pairs]
    return found


def every_source() -> list[ModuleSource]:
    """All modules that a process can ask for."""
    dtypes = ("float16", "bfloat16")
    every = (
        decode_sources,
        encoder_sources,
        other_sources,
        packed_prompt_sources,
        recurrent_sources,
        sorted_expert_sources,
    )
    return [source for dtype in dtypes for sources in every for source in sources(dtype)]
