"""Compiled kernels that are kept with a model: what is in a folder, which one a GPU takes, and what is refused."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from edgellm.kernels import compilations, nvrtc
from edgellm.kernels.compilations import Compilations
from edgellm.kernels.compiler import CompiledModule, ModuleSource
from edgellm.kernels.errors import KernelError, MissingDependencyError
from edgellm.kernels.gpu import GPU, absent_gpu
from edgellm.kernels.kept import (
    MANIFEST_NAME,
    KeptKernels,
    Manifest,
    architecture_of,
    folder_name,
    read_cubin,
    read_manifest,
    write_cubin,
)
from edgellm.kernels.launch import Kernel, KernelModule, Launch
from edgellm.kernels.made import COMPILED, LOADED, Made

COMMAND = "edgellm build robot --target sm_87"


def source(name: str = "small<1>", text: str = "// 1\n") -> ModuleSource:
    return ModuleSource(name, ("small.cu",), ("f<1>",), (), (("small.cu", text),))


def gpu(multiprocessors: int = 8, driver: tuple[int, int] = (13, 0)) -> GPU:
    return replace(absent_gpu("sm_87", multiprocessors, 163 << 10), driver_cuda=driver)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGELLM_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kernels"


def write(
    path: Path,
    sources: Sequence[ModuleSource],
    release: tuple[int, int] = (13, 0),
    architecture: str = "sm_87",
    code: bytes = b"\x7fELF",
) -> Path:
    """A folder of kernels for 4 and 8 multiprocessors; the code of each is that of its name."""
    folder = path / folder_name(architecture, release)
    folder.mkdir(parents=True)
    modules = [
        write_cubin(folder, each, architecture, CompiledModule(code + each.name.encode(), {"f<1>": "_f1"}, release))
        for each in sources
    ]
    manifest = Manifest(architecture, release, (4, 8), "0.1.0", tuple(modules))
    (folder / MANIFEST_NAME).write_bytes(manifest.data())
    return folder


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: ModuleSource, architecture: str) -> CompiledModule:
        raise MissingDependencyError("The library NVRTC was not found")

    monkeypatch.setattr(compilations, "compiled_now", refuse)


def test_a_manifest_comes_back_as_it_was_written(tmp_path: Path) -> None:
    folder = write(tmp_path, [source("other"), source()])
    manifest = read_manifest(folder)
    assert manifest.data() == (folder / MANIFEST_NAME).read_bytes()
    assert (manifest.architecture, manifest.release, manifest.multiprocessors) == ("sm_87", (13, 0), (4, 8))
    assert [module.module for module in manifest.modules] == ["other", "small<1>"]
    assert manifest.modules[1].options[0] == "--gpu-architecture=sm_87"
    assert manifest.size == sum(module.size for module in manifest.modules) == len(b"\x7fELFother\x7fELFsmall<1>")
    assert architecture_of(folder.name) == ("sm_87", (13, 0)) and manifest.folder == folder.name
    assert read_cubin(folder, manifest.modules[0]) == b"\x7fELFother"


@pytest.mark.parametrize("name", ["sm_87", "sm_87-cuda13", "compute_87-cuda13.0", "sm_87-cuda13.0/.."])
def test_other_names_are_no_folders(name: str) -> None:
    assert architecture_of(name) is None


def test_a_kept_module_is_found_by_source_options_and_architecture(tmp_path: Path) -> None:
    kept = KeptKernels(gpu(), [write(tmp_path, [source()])], COMMAND)
    assert kept.find(source()) == CompiledModule(b"\x7fELFsmall<1>", {"f<1>": "_f1"}, (13, 0))
    assert kept.find(source(text="// 2\n")) is None
    assert kept.find(replace(source(), macros=(("N", 1),))) is None
    assert KeptKernels(absent_gpu("sm_86", 8, 99 << 10), [tmp_path / "sm_87-cuda13.0"]).find(source()) is None


def test_the_model_s_own_are_taken_before_the_user_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached = CompiledModule(b"cached", {}, (12, 9))
    monkeypatch.setattr("edgellm.kernels.kept.recalled_module", lambda source, architecture: cached)
    assert KeptKernels(gpu(), [write(tmp_path, [source()])]).find(source()).code == b"\x7fELFsmall<1>"
    assert KeptKernels(gpu()).find(source()) == cached


@pytest.mark.parametrize(("driver", "expected"), [((13, 1), b"new"), ((13, 0), b"new"), ((12, 6), b"old")])
def test_the_newest_that_the_driver_takes(tmp_path: Path, driver: tuple[int, int], expected: bytes) -> None:
    folders = [write(tmp_path, [source()], (12, 9), code=b"old"), write(tmp_path, [source()], (13, 0), code=b"new")]
    found = KeptKernels(gpu(driver=driver), folders).find(source())
    assert found is not None and found.code.startswith(expected)


@pytest.mark.parametrize(("own", "taken"), [(8, 8), (4, 4), (6, 4), (14, 8), (2, 4)])
def test_a_gpu_without_kernels_of_its_own_takes_those_of_another_one(tmp_path: Path, own: int, taken: int) -> None:
    """Also where there is a compiler; those that its driver refuses are none."""
    kept = KeptKernels(gpu(own, (12, 6)), [write(tmp_path, [source()], (12, 6))], COMMAND)
    assert kept.gpu.multiprocessors == taken
    assert kept.better == (None if own == taken else f"{COMMAND}:{own}")
    pytest.importorskip("cuda.bindings.driver")
    assert KernelModule(gpu(own, (12, 6)), SimpleNamespace(handle=0), kept).multiprocessors == taken
    newer = KeptKernels(gpu(own, (12, 6)), [write(tmp_path, [source()], (13, 0))], COMMAND)
    assert newer.gpu.multiprocessors == own and newer.better is None


@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_a_damaged_cubin_is_refused(tmp_path: Path, damage: str) -> None:
    folder = write(tmp_path, [source()])
    (path,) = folder.glob("*.cubin")
    content = path.read_bytes()
    path.unlink()
    if damage != "gone":
        path.write_bytes(content[:-1] + (b"" if damage == "cut" else b"?"))
    message = {"flip": "is damaged: SHA-256", "cut": "it was cut", "gone": "cannot be read"}[damage]
    with pytest.raises(KernelError, match=f"(?s){message}.*{COMMAND}"):
        KeptKernels(gpu(), [folder], COMMAND).find(source())


@pytest.mark.parametrize(
    "change",
    [
        {"format_version": 2},
        {"architecture": "sm_86"},
        {"release": [12, 6]},
        {"multiprocessors": ["8"]},
        {"modules": [{}]},
        {"modules": 3},
    ],
)
def test_a_manifest_of_another_form_is_refused(tmp_path: Path, change: dict) -> None:
    path = write(tmp_path, [source()]) / MANIFEST_NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(KernelError, match="is no manifest of kernels"):
        read_manifest(path.parent)


@pytest.mark.parametrize("file", ["../step.cubin", "/etc/passwd", "step.so", ""])
def test_a_cubin_is_in_its_folder(tmp_path: Path, file: str) -> None:
    path = write(tmp_path, [source()]) / MANIFEST_NAME
    values = json.loads(path.read_text())
    values["modules"][0]["file"] = file
    path.write_text(json.dumps(values))
    with pytest.raises(KernelError, match="is no manifest of kernels"):
        read_manifest(path.parent)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"[" * 100_000, b"\xff"])
def test_what_is_no_manifest_is_refused(tmp_path: Path, content: bytes) -> None:
    folder = write(tmp_path, [])
    (folder / MANIFEST_NAME).write_bytes(content)
    with pytest.raises(KernelError, match="is no manifest of kernels"):
        read_manifest(folder)


def test_without_a_compiler_what_was_kept_serves(tmp_path: Path, without_compiler: None) -> None:
    compiling = Compilations("sm_87", KeptKernels(gpu(), [write(tmp_path, [source()])], COMMAND))
    assert not compiling.begin(source())
    assert compiling.module(source()).code == b"\x7fELFsmall<1>"


@pytest.mark.parametrize(
    ("present", "wanted", "message"),
    [
        (gpu(), source(text="// 2\n"), rf"by EdgeLLM 0.1.0 from other sources of small<1> .*: {COMMAND}\. Here it"),
        (gpu(), source("new"), rf"lack new\. .*: {COMMAND}\. Here it cannot be compiled: The library NVRTC"),
        (absent_gpu("sm_86", 8, 99 << 10), source(), rf"for sm_87, this GPU is sm_86\..*: {COMMAND}\. Here it"),
        (gpu(driver=(12, 6)), source(), rf"by CUDA 13.0, and the driver takes CUDA 12.6.*: {COMMAND} --cuda 12.6"),
    ],
)
def test_without_a_compiler_a_refusal_names_what_makes_it(
    tmp_path: Path, without_compiler: None, present: GPU, wanted: ModuleSource, message: str
) -> None:
    compiling = Compilations("sm_87", KeptKernels(present, [write(tmp_path, [source()])], COMMAND))
    with pytest.raises(MissingDependencyError, match=message):
        compiling.module(wanted)
    compiling = Compilations("sm_87", KeptKernels(present, [tmp_path / "sm_87-cuda13.0"], COMMAND))
    compiling.begin(wanted)
    with pytest.raises(MissingDependencyError, match=message):
        compiling.wait()


@pytest.mark.parametrize("wanted", [source("new"), source(text="//")])
def test_what_makes_kernels_for_an_older_driver_names_its_release(
    tmp_path: Path, without_compiler: None, wanted: ModuleSource
) -> None:
    """A compiler of CUDA 13 beside it would make what JetPack 6's driver refuses."""
    folders = [write(tmp_path, [source("other")], (13, 0)), write(tmp_path, [source("old")], (12, 6))]
    kept = KeptKernels(gpu(driver=(12, 6)), folders, COMMAND)
    with pytest.raises(MissingDependencyError, match=rf": {COMMAND} --cuda 12\.6\. Here"):
        Compilations("sm_87", kept).module(wanted)


def test_without_a_compiler_and_kept_kernels_the_compiler_is_named(without_compiler: None) -> None:
    with pytest.raises(MissingDependencyError, match=r"^The library NVRTC was not found$"):
        Compilations("sm_87", KeptKernels(gpu())).module(source())


def test_without_a_compiler_what_nobody_asks_for_may_be_missing(
    tmp_path: Path, without_compiler: None, caplog: pytest.LogCaptureFixture
) -> None:
    compiling = Compilations("sm_87", KeptKernels(gpu(), [write(tmp_path, [source()])], COMMAND))
    assert not compiling.begin(source(), optional=True)
    compiling.begin(source("new"), optional=True)
    compiling.begin(source("newer"), optional=True)
    compiling.wait()
    assert "What needs the kernels new, newer does not run here: The kernels" in caplog.text
    with pytest.raises(MissingDependencyError, match="lack new"):
        compiling.module(source("new"))
    compiling.begin(source("new"), optional=True)
    compiling.begin(source("new"))  # which is loaded now
    with pytest.raises(MissingDependencyError, match="lack new"):
        compiling.wait()


def test_with_a_compiler_what_differs_is_compiled_anew(tmp_path: Path, cache: Path) -> None:
    try:
        nvrtc.find_nvrtc()
    except MissingDependencyError as missing:
        pytest.skip(str(missing))
    own = ModuleSource("own", ("own.cu",), ("f",), (), (("own.cu", "__global__ void f() {}\n"),))
    folder = write(tmp_path, [replace(own, headers=(("own.cu", "// before\n"),))])
    compiling = Compilations("sm_87", KeptKernels(gpu(), [folder], COMMAND))
    assert compiling.begin(own)
    compiling.wait()
    assert compiling.module(own).code.startswith(b"\x7fELF")
    assert len(list(cache.iterdir())) == 1
    assert not Compilations("sm_87", KeptKernels(gpu(), [folder], COMMAND)).begin(own)


def test_modules_are_compiled_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second is begun before the first is done."""
    both = threading.Barrier(2, timeout=20)

    def compile_one(source: ModuleSource, architecture: str) -> CompiledModule:
        both.wait()
        return CompiledModule(source.name.encode(), {}, (13, 0))

    monkeypatch.setattr(compilations, "compiled_now", compile_one)
    monkeypatch.setattr(compilations, "compiling_threads", lambda: 2)
    compiling = Compilations("sm_87", KeptKernels(gpu()))
    assert compiling.begin(source("a")) and compiling.begin(source("b"))
    compiling.wait()
    assert [compiling.module(source(name)).code for name in "ab"] == [b"a", b"b"]


def test_a_manifest_without_modules_is_one(tmp_path: Path) -> None:
    assert read_manifest(write(tmp_path, [])) == Manifest("sm_87", (13, 0), (4, 8), "0.1.0", ())


class Driver:
    """CUDA's driver as `KernelModule` calls it; it notes what it loads."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0)
    CUfunction_attribute = SimpleNamespace(
        CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT=1, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=2
    )

    def __init__(self) -> None:
        self.loaded: list[bytes] = []

    def cuModuleLoadData(self, code: bytes) -> tuple[int, bytes]:
        self.loaded.append(code)
        return 0, code

    def cuModuleGetFunction(self, module: bytes, name: bytes) -> tuple[int, bytes]:
        return 0, module + name

    def cuFuncSetAttribute(self, *arguments: object) -> tuple[int]:
        return (0,)

    CUlaunchConfig = SimpleNamespace

    def cuLaunchKernelEx(self, config: object, function: object, *arguments: object) -> tuple[int]:
        return (0 if function else 400,)


def test_side_by_side_nothing_waits_and_all_is_loaded_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cuda.bindings.driver")
    goes_on = threading.Event()

    def compile_one(source: ModuleSource, architecture: str) -> CompiledModule:
        assert goes_on.wait(20)
        return CompiledModule(b"new " + source.name.encode(), {}, (13, 0))

    monkeypatch.setattr(compilations, "compiled_now", compile_one)
    kept, made = KeptKernels(gpu(), [write(tmp_path, [source("kept")])], COMMAND), Made()
    module = KernelModule(gpu(), SimpleNamespace(handle=0), kept, made)
    module.driver = driver = Driver()
    new, other, early = source("new"), source("other"), source("early")
    with module.side_by_side(waits=False):
        module.load(new)
        with module.side_by_side():  # the outermost alone waits
            assert module.function(Kernel(source("kept"), "f<1>"), 0) == b"\x7fELFkept_f1"
            assert module.function(Kernel(new, "f<1>"), 0) is None
    assert driver.loaded == [b"\x7fELFkept"]
    with module.side_by_side():
        module.prepare(early)
        assert module.function(Kernel(other, "f<1>"), 0) is None
        too_early = Launch(module, Kernel(other, "f<1>"), (1, 1, 1), 32, 0, ())
        with pytest.raises(KernelError, match="bytes of shared memory"):
            module.function(Kernel(other, "f<1>"), 1 << 20)
        goes_on.set()
    assert sorted(driver.loaded) == [b"new early", b"new new", b"new other", b"\x7fELFkept"]
    assert (made.counts[COMPILED], made.counts[LOADED]) == (3, len(driver.loaded))
    assert module.function(Kernel(other, "f<1>"), 0) == b"new otherf<1>"
    Launch(module, Kernel(other, "f<1>"), (1, 1, 1), 32, 0, ())()
    with pytest.raises(KernelError, match="was made while its module was compiled"):
        too_early()
    assert made.counts[LOADED] == len(driver.loaded)
