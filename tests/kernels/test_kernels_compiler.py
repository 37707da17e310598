"""The kernels compile without a GPU for every supported architecture, and their cache can be trusted."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from pathlib import Path

import pytest

from edgellm.kernels import compiler, nvrtc
from edgellm.kernels.compiler import (
    CompiledModule,
    ModuleSource,
    compile_module,
    compiled_now,
    find_headers,
    recalled_module,
)
from edgellm.kernels.decode.linear import linear_kernel
from edgellm.kernels.errors import KernelError, MissingDependencyError
from edgellm.kernels.gpu import absent_gpu
from tools.deploy.kernel_modules import (
    decode_sources,
    encoder_sources,
    every_source,
    other_sources,
    packed_prompt_sources,
    recurrent_sources,
)

try:
    nvrtc.find_nvrtc()
except MissingDependencyError as missing:
    pytest.skip(str(missing), allow_module_level=True)

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


def cached_module(source: ModuleSource, architecture: str) -> CompiledModule:
    """As it was kept, or compiled now."""
    return recalled_module(source, architecture) or compiled_now(source, architecture)


def kinds(sources: list[ModuleSource]) -> list[ModuleSource]:
    """The module of each kernel with the smallest tiles, whatever it is instantiated with: it compiles soonest."""
    found: dict[tuple[str, ...], ModuleSource] = {}
    for source in sorted(sources, key=lambda each: sum(map(int, re.findall(r"\b\d+", str(each.expressions))))):
        found.setdefault((*source.files, *(name.partition("<")[0] for name in source.expressions)), source)
    return list(found.values())


def each_once() -> list[tuple[str, list[ModuleSource]]]:
    """Every kernel for one of the dtypes and architectures in turn: a fourth to its end, the others as far as PTX, in a
    third of the time."""
    decode, encoder, recurrent = (
        kinds(sources("bfloat16")) for sources in (decode_sources, encoder_sources, recurrent_sources)
    )
    sources = {
        "87": kinds(other_sources("float16")),
        "90": [*decode, *recurrent[::2]],
        "120": [*encoder, *recurrent[1::2]],
        "110": kinds(packed_prompt_sources("bfloat16")),
    }
    whole = [(f"sm_{number}", found[::4]) for number, found in sources.items()]
    return whole + [(f"compute_{number}", found[1::4] + found[2::4] + found[3::4]) for number, found in sources.items()]


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
    assert set(SUPPORTED) <= set(nvrtc.find_nvrtc().architectures())


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
    monkeypatch.setattr(compiler, "wheel_folders", list)
    for number, layout in enumerate(layouts):
        root = tmp_path / str(number)
        (root / layout).mkdir(parents=True)
        (root / layout / "cuda_fp16.h").touch()
        with monkeypatch.context() as patch:
            if layout.startswith("toolkit"):
                patch.setattr(compiler, "toolkit_roots", lambda root=root: [root / "toolkit"])
                assert root / layout in find_headers(13)
            else:
                patch.setattr(compiler, "wheel_folders", lambda root=root: [root])
                assert find_headers(13) == [root / layout]


def test_missing_headers_name_the_wheel(monkeypatch):
    monkeypatch.setattr(compiler, "wheel_folders", list)
    monkeypatch.setattr(compiler, "toolkit_roots", list)
    with pytest.raises(MissingDependencyError, match="pip install nvidia-cuda-runtime nvidia-cuda-cccl"):
        compile_module(small("#include <cuda_fp16.h>\n"), "sm_90")
    with pytest.raises(MissingDependencyError, match="nvidia-cuda-runtime-cu12 nvidia-cuda-cccl-cu12"):
        find_headers(12)


def test_missing_companion_headers_name_their_wheel(monkeypatch):
    monkeypatch.setattr(compiler, "find_headers", lambda major_version: [])
    with pytest.raises(MissingDependencyError, match="pip install nvidia-cuda-cccl"):
        compile_module(small("#include <nv/target>\n"), "sm_90")


@pytest.fixture
def without_libraries(monkeypatch) -> None:
    """No library of NVRTC is found."""
    monkeypatch.setattr(nvrtc, "_libraries", list)
    monkeypatch.setattr(nvrtc, "find_nvrtc", nvrtc.find_nvrtc.__wrapped__)
    monkeypatch.setattr(compiler, "find_nvrtc", nvrtc.find_nvrtc)


def test_a_missing_compiler_names_the_wheel(without_libraries):
    with pytest.raises(MissingDependencyError, match=r"not found.*: pip install 'nvidia-cuda-nvrtc-cu12==12\.6\.\*'"):
        nvrtc.find_nvrtc((12, 6))


@pytest.mark.parametrize(
    ("driver", "wheel"), [((12, 6), r"'nvidia-cuda-nvrtc-cu12==12\.6\.\*'"), ((13, 1), "nvidia-cuda-nvrtc$")]
)
def test_a_missing_compiler_is_that_of_the_driver(without_libraries, monkeypatch, driver, wheel):
    """JetPack 6's driver loads no kernels of CUDA 13."""
    monkeypatch.setattr(nvrtc, "find_gpu", lambda: replace(absent_gpu("sm_87", 8, 163 << 10), driver_cuda=driver))
    with pytest.raises(MissingDependencyError, match=f"pip install {wheel}"):
        nvrtc.find_nvrtc()


def test_what_was_kept_needs_no_compiler(cache, monkeypatch, request):
    kept = cached_module(small(), "sm_90")
    assert kept.release == nvrtc.find_nvrtc().release
    request.getfixturevalue("without_libraries")
    assert cached_module(small(), "sm_90") == kept
    with pytest.raises(MissingDependencyError, match="pip install nvidia-cuda-nvrtc"):
        cached_module(small(), "sm_87")


def test_a_release_is_asked_for_by_its_number(tmp_path, monkeypatch):
    """A file that is no library is passed over."""
    path, release = nvrtc.find_nvrtc().path, nvrtc.find_nvrtc().release
    (broken := tmp_path / "libnvrtc.so.12").write_bytes(b"no library")
    monkeypatch.setattr(nvrtc, "_libraries", lambda: [str(broken), path])
    find = nvrtc.find_nvrtc.__wrapped__
    assert find().release == find(release).release == release
    with pytest.raises(MissingDependencyError, match=rf"NVRTC of CUDA 12.6 was not found, only of {release[0]}\."):
        find((12, 6))
