"""The kernels compile without a GPU for every supported architecture, and their cache can be trusted."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from edgellm.kernels import compiler
from edgellm.kernels.acceptance.launcher import ADVANCE, CHAINS, TREE_LOGITS, TYPICAL, WALK
from edgellm.kernels.compiler import ModuleSource, cached_module, compile_module, find_headers
from edgellm.kernels.decode.arguments import CUDA_TYPES
from edgellm.kernels.decode.attention import attention_kernel
from edgellm.kernels.decode.linear import linear_kernel, norm_kernel
from edgellm.kernels.decode.tiled_linear import direct_kernel, tiled_kernel
from edgellm.kernels.decode.tilings import Capacity, direct_tilings, tilings
from edgellm.kernels.errors import KernelError, MissingDependencyError
from edgellm.kernels.images.launcher import images_source
from edgellm.kernels.prefill.launcher import attention_kernel as prefill_attention
from edgellm.kernels.prefill.launcher import heads_kernel
from edgellm.kernels.recurrent.launcher import convolution_kernel, delta_kernel, gates_kernel
from edgellm.kernels.sampling.launcher import DRAWING, EmbeddingTable, finite_source, step_source
from edgellm.kernels.tree.launcher import tree_source

pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed")

#: Architectures that the project's GPUs have, in NVIDIA's names: Jetson Orin is sm_87, Jetson Thor sm_110.
SUPPORTED = ("sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_100", "sm_103", "sm_110", "sm_120", "sm_121")


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("EDGELLM_CACHE_DIR", str(tmp_path))
    return tmp_path / "kernels"


def small(text: str = "") -> ModuleSource:
    """A module that compiles at once, with a header, a macro and a template."""
    own = '#include "shared/philox.cuh"\n#include "own.cuh"\n' + text
    own += "template <typename T> __global__ void add(T* values) { values[threadIdx.x] += AMOUNT; }\n"
    headers = (("small.cu", own), ("own.cuh", "static_assert(AMOUNT == 3);\n"))
    return ModuleSource("small", ("small.cu",), ("add<float>", "add<int>"), (("AMOUNT", 3),), headers)


@pytest.fixture
def compiled(monkeypatch) -> list[str]:
    """The architectures that modules were compiled for."""
    found, compile_one = [], compiler.compile_module

    def compile_and_note(source: ModuleSource, architecture: str):
        found.append(architecture)
        return compile_one(source, architecture)

    monkeypatch.setattr(compiler, "compile_module", compile_and_note)
    return found


def decode_sources(dtype: str) -> list[ModuleSource]:
    """All modules of linear layers and attention for a dtype."""
    kind = CUDA_TYPES[dtype]
    units = {"norm_linear": ("Narrow", "Wide"), "linear_residual": ("Narrow", "Deep", "WideTwice")}
    units["norm_gate_up"] = "NarrowPairs", "WidePairs"
    units_of = [(name, f"decode::{unit}") for name in units for unit in units[name]]
    kernels = [linear_kernel(name, kind, unit, *more) for name, unit in units_of for more in ((), ("true",))]
    kernels += [linear_kernel("norms_linear", kind, second) for second in (kind, "float")]
    kernels += [norm_kernel(name, kind) for name in ("norm", "scale_rows", "norm_residual")]
    kernels += [attention_kernel(dtype, size, shares) for size in (64, 128, 256) for shares in (False, True)]
    kernels += [attention_kernel(dtype, 256, shares, in_turn=True, window=not shares) for shares in (False, True)]
    kernels.append(attention_kernel(dtype, 256, False, tile_warps=1))
    kernels += [attention_kernel(dtype, size, shares, True) for size, shares in ((64, False), (128, True))]
    kernels += [
        attention_kernel(dtype, size, shares, int8, window=True)
        for size, shares, int8 in ((128, True, False), (256, False, False), (256, True, True))
    ]
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
    for keys in (64, 128, 256):
        kernels += [delta_kernel("delta_nodes", keys, "float", tree) for tree in ("true", "false")]
        kernels += [delta_kernel("delta_chunk", keys, value) for value in ("float", kind)]
        kernels.append(delta_kernel("delta_token", keys, "float"))
        kernels += [delta_kernel("commit_matrices", keys, is_one) for is_one in ("true", "false")]
    return [kernel.source for kernel in kernels]


def other_sources(dtype: str) -> list[ModuleSource]:
    """All other modules that a process of a model in a dtype can ask for."""
    drawing = [DRAWING, WALK, ADVANCE, TREE_LOGITS, TYPICAL, CHAINS]
    shapes = ((64, 1), (64, 2), (128, 1), (128, 2), (256, 1))
    prefill = [heads_kernel(dtype).source, *(prefill_attention(dtype, *shape).source for shape in shapes)]
    prefill += [heads_kernel(dtype, True).source, prefill_attention(dtype, 128, 2, True).source]
    shapes = ((64, 2, False), (128, 1, True), (256, 1, False))
    prefill += [prefill_attention(dtype, *shape, window=True).source for shape in shapes]
    shapes = ((64, 1, False, False), (128, 2, True, False), (256, 1, False, True), (256, 1, True, True))
    prefill += [prefill_attention(dtype, *shape, ahead=True).source for shape in shapes]
    packed = [source(dtype, EmbeddingTable(1, 4)) for source in (step_source, tree_source)]  # of int8
    every = [source(dtype) for source in (step_source, finite_source, tree_source, images_source)]
    return drawing + prefill + packed + every


def every_source() -> list[ModuleSource]:
    """All modules that a process can ask for."""
    dtypes = ("float16", "bfloat16")
    every = decode_sources, other_sources, recurrent_sources
    return [source for dtype in dtypes for sources in every for source in sources(dtype)]


def each_once() -> list[tuple[str, list[ModuleSource]]]:
    """All modules, those of layers for one of the dtypes and architectures in turn."""
    return [
        ("sm_87", [*other_sources("float16"), *decode_sources("float16")[::2], *recurrent_sources("float16")[::3]]),
        ("sm_90", [*decode_sources("bfloat16")[1::2], *recurrent_sources("bfloat16")[1::3]]),
        ("sm_120", recurrent_sources("float16")[2::3]),
    ]


@pytest.mark.parametrize(
    ("architecture", "sources"),
    [
        *each_once(),
        *(
            pytest.param(name, every_source(), marks=pytest.mark.slow)
            for name in ("sm_87", "sm_90", "sm_110", "sm_120", "compute_80")
        ),
    ],
)
def test_compiles_for_jetson_and_pc(architecture, sources):
    assert architecture.replace("compute_", "sm_") in SUPPORTED
    for source in sources:
        module = compile_module(source, architecture)
        is_ptx = architecture.startswith("compute_")
        assert is_ptx or module.code.startswith(b"\x7fELF")
        assert set(module.lowered_names) == set(source.expressions)
        for name in module.lowered_names.values():
            assert (name.encode() if is_ptx else b".text." + name.encode() + b"\0") in module.code


def test_a_structure_that_the_device_lays_out_otherwise_is_refused():
    source = linear_kernel("norm_linear", "__half", "decode::Narrow").source
    name = "HOST_NORM_LINEAR_BYTES"
    wrong = replace(source, macros=(*(pair for pair in source.macros if pair[0] != name), (name, 8)))
    with pytest.raises(KernelError, match="as the host's structure"):
        compile_module(wrong, "sm_90")


def test_an_expression_is_found_by_its_lowered_name():
    module = compile_module(small(), "sm_90")
    assert module.lowered_names.keys() == {"add<float>", "add<int>"}
    for name in module.lowered_names.values():
        assert b".text." + name.encode() + b"\0" in module.code
    assert b".target sm_80" in compile_module(small(), "compute_80").code


def test_an_expression_that_the_source_lacks_is_named():
    with pytest.raises(KernelError, match="nothing_like_it"):
        compile_module(replace(small(), expressions=("nothing_like_it<float>",)), "sm_90")


def test_compiler_knows_every_supported_architecture():
    from cuda.bindings import nvrtc

    _, known = nvrtc.nvrtcGetSupportedArchs()
    assert set(SUPPORTED) <= {f"sm_{number}" for number in known}


def test_unknown_architecture_is_refused_with_the_known_ones():
    with pytest.raises(KernelError, match=r"cannot compile for sm_52, only for .*sm_90"):
        compile_module(small(), "sm_52")


@pytest.mark.parametrize("architecture", ["sm_90", "compute_80"])
def test_error_shows_the_compilers_log(architecture):
    with pytest.raises(KernelError, match=r"(?s)refused the kernels small for .*undeclared_name"):
        compile_module(small("__global__ void f() { undeclared_name(); }"), architecture)


def test_cache_is_used_and_bound_to_the_sources(cache, compiled, monkeypatch, caplog):
    first = cached_module(small(), "sm_90")
    assert cached_module(small(), "sm_90") == first
    assert compiled == ["sm_90"]
    assert caplog.text.count("compiled for sm_90 now, once: small") == 1  # whoever waits is told, once
    read = Path.read_bytes  # a header that is included counts, one that is not does not
    for changed, count in (("philox.cuh", 2), ("reductions.cuh", 2)):
        with monkeypatch.context() as patch:
            patch.setattr(Path, "read_bytes", lambda path, name=changed: read(path) + b"\n" * (path.name == name))
            cached_module(small(), "sm_90")
            assert len(compiled) == count
    cached_module(small("\n"), "sm_90")
    cached_module(replace(small(), expressions=("add<int>",)), "sm_90")
    cached_module(small(), "sm_87")
    assert compiled == ["sm_90"] * 4 + ["sm_87"]
    assert len(list(cache.iterdir())) == 5


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty"])
def test_damaged_cache_is_compiled_again(cache, compiled, damage, caplog):
    intact = cached_module(small(), "sm_90")
    (path,) = cache.iterdir()
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
    path.write_bytes(content[: {"flip": len(content), "truncate": 99, "empty": 0}[damage]])
    with caplog.at_level(logging.WARNING):
        assert cached_module(small(), "sm_90") == intact
    assert "damaged" in caplog.text
    assert cached_module(small(), "sm_90") == intact
    assert len(compiled) == 2


def test_cache_that_cannot_be_written_is_no_error(tmp_path, compiled, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("a file where the cache directory should be")
    monkeypatch.setenv("EDGELLM_CACHE_DIR", str(blocked))
    assert cached_module(small(), "sm_90") == cached_module(small(), "sm_90")
    assert len(compiled) == 2


def test_headers_are_found_in_every_layout(tmp_path, monkeypatch):
    layouts = ("cu13/include", "cuda_runtime/include", "toolkit/include", "toolkit/targets/aarch64-linux/include")
    monkeypatch.setattr(compiler.importlib.util, "find_spec", lambda name: None)
    for number, layout in enumerate(layouts):
        root = tmp_path / str(number)
        (root / layout).mkdir(parents=True)
        (root / layout / "cuda_fp16.h").touch()
        if layout.startswith("toolkit"):
            monkeypatch.setattr(compiler, "_toolkit_roots", lambda root=root: [root / "toolkit"])
            assert root / layout in find_headers(13)
        else:
            specification = type("Specification", (), {"submodule_search_locations": [str(root)]})
            with monkeypatch.context() as patch:
                patch.setattr(compiler.importlib.util, "find_spec", lambda name, found=specification: found)
                assert find_headers(13) == [root / layout]


def test_missing_headers_name_the_wheel(monkeypatch):
    monkeypatch.setattr(compiler.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(compiler, "_toolkit_roots", lambda: [])
    with pytest.raises(MissingDependencyError, match="pip install nvidia-cuda-runtime nvidia-cuda-cccl"):
        compile_module(small("#include <cuda_fp16.h>\n"), "sm_90")


def test_missing_companion_headers_name_their_wheel(monkeypatch):
    monkeypatch.setattr(compiler, "find_headers", lambda major_version: [])
    with pytest.raises(MissingDependencyError, match="pip install nvidia-cuda-cccl"):
        compile_module(small("#include <nv/target>\n"), "sm_90")
