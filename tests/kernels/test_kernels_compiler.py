"""The kernels compile without a GPU for every supported architecture, and their cache can be trusted."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from edgellm.kernels import compiler
from edgellm.kernels.compiler import cached_kernels, compile_kernels, find_headers
from edgellm.kernels.cuda_kernels import _PARAMETERS
from edgellm.kernels.errors import KernelError, MissingDependencyError

pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed")

#: Architectures that the project's GPUs have, in NVIDIA's names: Jetson Orin is sm_87, Jetson Thor sm_110.
SUPPORTED = ("sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_100", "sm_103", "sm_110", "sm_120", "sm_121")


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("EDGELLM_CACHE_DIR", str(tmp_path))
    return tmp_path / "kernels"


@pytest.fixture
def quick(monkeypatch) -> list[str]:
    """Compile a few kernels only, for the tests of the cache; lists the architectures compiled."""
    compiled = []
    few = {name: text for name, text in compiler._sources().items() if name in ("state.cu", "philox.cuh")}
    compile_all = compiler.compile_kernels
    monkeypatch.setattr(compiler, "_sources", lambda: few)
    monkeypatch.setattr(compiler, "compile_kernels", lambda name: compiled.append(name) or compile_all(name))
    return compiled


@pytest.mark.parametrize(
    "architecture",
    ["sm_87", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sm_90", "sm_110", "sm_120"))],
)
def test_compiles_for_jetson_and_pc(architecture):
    assert architecture in SUPPORTED
    cubin = compile_kernels(architecture)
    assert cubin.startswith(b"\x7fELF")
    for name in _PARAMETERS:
        assert b".text." + name.encode() + b"\0" in cubin
    for dtype in (b"float16", b"bfloat16"):  # the decode engine's, whose names are put together where they are launched
        linear = (b"norm_linear_", b"norm_gate_up_", b"linear_residual_")
        wide = tuple(name + b"wide_" for name in (*linear, b"norms_linear_"))
        sizes = b"32_64_", b"32_128_", b"64_64_", b"64_128_"
        tiled = tuple(b"tiled_" + name + size for name in (b"linear_", b"gate_up_", b"residual_") for size in sizes)
        attention = b"attention_4_", b"attention_8_", b"attention_16_"
        for name in (*linear, *wide, *tiled, *attention, b"norm_"):
            assert b"decode_" + name + dtype in cubin


def test_compiler_knows_every_supported_architecture():
    from cuda.bindings import nvrtc

    _, known = nvrtc.nvrtcGetSupportedArchs()
    assert set(SUPPORTED) <= {f"sm_{number}" for number in known}


def test_unknown_architecture_is_refused_with_the_known_ones():
    with pytest.raises(KernelError, match=r"cannot compile for sm_52, only for .*sm_90"):
        compile_kernels("sm_52")


@pytest.mark.parametrize("architecture", ["sm_90", "compute_80"])
def test_error_shows_the_compilers_log(monkeypatch, architecture):
    monkeypatch.setattr(compiler, "_sources", lambda: {"broken.cu": b"__global__ void f() { undeclared_name(); }"})
    with pytest.raises(KernelError, match="undeclared_name"):
        compile_kernels(architecture)


def test_cache_is_used_and_bound_to_the_sources(cache, quick, monkeypatch, caplog):
    first = cached_kernels("sm_90")
    assert cached_kernels("sm_90") == first
    assert quick == ["sm_90"]
    assert caplog.text.count("compiled for sm_90 now") == 1  # whoever waits is told, once
    changed = {name: text + b"\n" for name, text in compiler._sources().items()}
    monkeypatch.setattr(compiler, "_sources", lambda: changed)
    cached_kernels("sm_90")
    cached_kernels("sm_87")
    assert quick == ["sm_90", "sm_90", "sm_87"]
    assert len(list(cache.iterdir())) == 3


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty"])
def test_damaged_cache_is_compiled_again(cache, quick, damage, caplog):
    intact = cached_kernels("sm_90")
    (path,) = cache.iterdir()
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
    path.write_bytes(content[: {"flip": len(content), "truncate": 99, "empty": 0}[damage]])
    with caplog.at_level(logging.WARNING):
        assert cached_kernels("sm_90") == intact
    assert "damaged" in caplog.text
    assert cached_kernels("sm_90") == intact
    assert len(quick) == 2


def test_cache_that_cannot_be_written_is_no_error(tmp_path, quick, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("a file where the cache directory should be")
    monkeypatch.setenv("EDGELLM_CACHE_DIR", str(blocked))
    assert cached_kernels("sm_90") == cached_kernels("sm_90")
    assert len(quick) == 2


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
        compile_kernels("sm_90")


def test_missing_companion_headers_name_their_wheel(monkeypatch):
    monkeypatch.setattr(compiler, "_sources", lambda: {"any.cu": b"#include <nv/target>\n"})
    monkeypatch.setattr(compiler, "find_headers", lambda major_version: [])
    with pytest.raises(MissingDependencyError, match="pip install nvidia-cuda-cccl"):
        compile_kernels("sm_90")
