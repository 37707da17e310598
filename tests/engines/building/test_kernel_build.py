"""Kernels that are compiled for GPUs that are not there, and kept with a model: which, where, and what they are good
for where there is no compiler."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gguf_models import write_mixture
from linked_environment import link_packages, run_there
from packed_checkpoints import write_packed
from tiny_families import FAMILIES, MIXTURES, RECURRENT

from edgellm.engines.backends.executors import SHARED_MEMORY, engine_shapes
from edgellm.engines.backends.step_modules import step_modules
from edgellm.engines.building import kernels as building
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.building.needed_kernels import AbsentBackend, WeightLayouts, needed_modules
from edgellm.engines.building.planning import add_targets
from edgellm.engines.building.targets import BOARDS, Target, read_targets
from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.errors import BuildError, EngineDirectoryError
from edgellm.engines.families import decoder_config
from edgellm.engines.model.limits import EngineLimits
from edgellm.kernels import nvrtc
from edgellm.kernels.acceptance import launcher as acceptance
from edgellm.kernels.compiler import ModuleSource, compile_module, module_key
from edgellm.kernels.errors import MissingDependencyError
from edgellm.kernels.gpu import absent_gpu
from edgellm.kernels.images import launcher as images
from edgellm.kernels.kept import read_manifest
from edgellm.kernels.sampling import launcher as sampling
from edgellm.kernels.tree import launcher as tree
from edgellm.opened_model import SHIPPED_MODEL
from tools.demo_model.describe import describe_in_place

TARGET = "sm_86:46"


def test_targets_are_capabilities_with_their_boards() -> None:
    assert read_targets(["sm_87"]) == [Target("sm_87", (4, 8, 14, 16))]
    assert read_targets(["sm_89:46, sm_120", "sm_89:24"]) == [
        Target("sm_89", (24, 46)),
        Target("sm_120", BOARDS["sm_120"]),
    ]
    assert read_targets(["sm_75"]) == [Target("sm_75", ())]  # which plans alone serve
    for capability, counts in BOARDS.items():
        assert capability in SHARED_MEMORY and sorted(set(counts)) == list(counts)
    orin = read_targets(["sm_87"])[0].gpus[0]
    assert (orin.architecture, orin.shared_limit, orin.has_clusters) == ("sm_87", 166_912, False)
    assert read_targets(["sm_110"])[0].gpus[0].has_clusters


@pytest.mark.parametrize("name", ["86", "sm_86:", "sm_86:0", "sm_75:16", "sm_100", "", "compute_86"])
def test_other_targets_are_refused(name: str) -> None:
    with pytest.raises(BuildError, match=f"--target is '?{name}'?: "):
        read_targets([name])


def test_kernels_are_compiled_once_for_all_boards(plain_directory: Path, compiled: list) -> None:
    before = EngineDirectory.open(plain_directory)
    (built,) = add_targets(plain_directory, read_targets(["sm_87"])).kernels
    directory = EngineDirectory.open(plain_directory, verify=True)
    assert list(directory.kernels) == ["sm_87-cuda13.0"]
    assert read_manifest(plain_directory / "kernels" / "sm_87-cuda13.0") == built.manifest
    assert len(compiled) == len({module.source for module in built.manifest.modules}) > 20
    assert built.manifest.multiprocessors == (4, 8, 14, 16)
    files = [module.file for module in built.manifest.modules]
    assert files == sorted(files)
    # What is bound to the directory stays.
    assert directory.description_sha256 == before.description_sha256
    assert replace(directory, kernels={}).limits == before.limits
    add_targets(plain_directory, read_targets([TARGET]))
    again = EngineDirectory.open(plain_directory, verify=True)
    assert list(again.kernels) == ["sm_86-cuda13.0", "sm_87-cuda13.0"]
    assert again.kernels["sm_87-cuda13.0"] == directory.kernels["sm_87-cuda13.0"]
    assert again.description_sha256 == before.description_sha256


def test_kernels_are_replaced_whole(plain_directory: Path, compiled: list, monkeypatch: pytest.MonkeyPatch) -> None:
    add_targets(plain_directory, read_targets(["sm_87"]))
    before = {path.name for path in (plain_directory / "kernels" / "sm_87-cuda13.0").iterdir()}

    def stop(*arguments: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(building, "write_cubin", stop)
        add_targets(plain_directory, read_targets(["sm_87"]))
    assert {path.name for path in (plain_directory / "kernels").iterdir()} == {"sm_87-cuda13.0"}
    EngineDirectory.open(plain_directory, verify=True)
    add_targets(plain_directory, read_targets(["sm_87:8"]))
    after = {path.name for path in (plain_directory / "kernels" / "sm_87-cuda13.0").iterdir()}
    assert after < before
    EngineDirectory.open(plain_directory, verify=True)


def test_a_build_keeps_kernels(checkpoint: Path, limits: EngineLimits, tmp_path: Path, compiled: list) -> None:
    stages: dict[str, tuple[int, int]] = {}
    report = build_engine_directory(
        checkpoint,
        tmp_path / "engines",
        replace(limits, prefill_chunk=128),
        kernels=read_targets([TARGET, "sm_87:8"]),
        progress=lambda stage, done, total: stages.update({stage: (done, total)}),
    )
    assert [built.manifest.architecture for built in report.kernels] == ["sm_86", "sm_87"]
    assert stages["kernels"] == (len(compiled), len(compiled))
    assert list(EngineDirectory.open(tmp_path / "engines", verify=True).kernels) == ["sm_86-cuda13.0", "sm_87-cuda13.0"]
    assert report.plans == [] and not any("plans" in note for note in report.notes)


@pytest.mark.parametrize("damage", ["manifest", "cubin", "gone"])
def test_what_is_not_as_described_is_told(plain_directory: Path, compiled: list, damage: str) -> None:
    add_targets(plain_directory, read_targets([TARGET]))
    folder = plain_directory / "kernels" / "sm_86-cuda13.0"
    if damage == "gone":
        shutil.rmtree(folder)
    else:
        path = folder / "manifest.json" if damage == "manifest" else next(folder.glob("*.cubin"))
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(EngineDirectoryError, match=r"kernels/sm_86-cuda13\.0"):
        EngineDirectory.open(plain_directory, verify=True)
    if damage == "cubin":  # which is compared when it is loaded
        EngineDirectory.open(plain_directory)


def test_a_target_that_the_compiler_lacks_is_refused(plain_directory: Path, compiled: list) -> None:
    with pytest.raises(BuildError, match=r"sm_110: NVRTC 13.0 compiles for sm_80, .* --cuda"):
        add_targets(plain_directory, read_targets(["sm_110"]))
    assert not (plain_directory / "kernels").exists()


def test_without_a_compiler_nothing_is_made(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "_libraries", list)
    monkeypatch.setattr(building, "find_nvrtc", nvrtc.find_nvrtc.__wrapped__)
    with pytest.raises(MissingDependencyError, match="pip install nvidia-cuda-nvrtc"):
        build_engine_directory(checkpoint, tmp_path / "engines", kernels=read_targets(["sm_87"]))
    assert not list(tmp_path.iterdir())


class Noting(AbsentBackend):
    """Which engines have prepared their kernels."""

    def unprepared(self) -> list[str]:
        engines = [each for each in self._engines if hasattr(each, "_has_kernels")]
        assert engines
        return [each.shape.name for each in engines if not each._has_kernels]


@pytest.fixture(scope="module")
def shipped() -> EngineDirectory:
    return EngineDirectory.open(SHIPPED_MODEL)


@pytest.mark.parametrize("capability", ["sm_87", "sm_90"])
def test_every_engine_prepares_its_kernels(shipped: EngineDirectory, capability: str) -> None:
    """Of a model with a draft, adapters and a vision encoder."""
    gpu = absent_gpu(capability, 16, SHARED_MEMORY[capability])
    weights = WeightLayouts(shipped.models, shipped.checkpoints, shipped.dtype)
    backend = Noting(shipped.models, shipped.limits, shipped.dtype, weights.planned, gpu)
    backend.load_all(weights.loaded.values())
    assert backend.unprepared() == []
    names = {source.name for source in backend.module.sources}
    assert {"step_float16", "sampling", "constrain", "walk", "tree_logits", "typical", "chains"} <= names
    assert any(name.startswith("images") for name in names)
    shapes = engine_shapes(shipped.limits)
    assert {shape.phase for shape in shapes} == {"decode", "prefill", "verify", "encode", "accept", "propose"}
    assert {shape.tokens for shape in shapes if shape.phase == "verify" and not shape.lora_slots} >= {4, 8, 32, 64}
    assert any(shape.lora_slots for shape in shapes)


def test_every_module_beside_engines_is_named(shipped: EngineDirectory) -> None:
    """Those of sampling, trees, acceptance and images, which launch when they are asked to."""
    named = step_modules(shipped.models, "float16", {})
    for launcher in (sampling, tree, acceptance, images):
        for name, value in vars(launcher).items():
            if isinstance(value, ModuleSource):
                assert value in named, name
            elif name.endswith("_source") and not name.startswith("_"):
                assert value("float16") in named, name


def test_kernels_differ_by_multiprocessors(shipped: EngineDirectory) -> None:
    weights = WeightLayouts(shipped.models, shipped.checkpoints, shipped.dtype)

    def needed(count: int) -> set[ModuleSource]:
        gpu = absent_gpu("sm_89", count, SHARED_MEMORY["sm_89"])
        return set(needed_modules(shipped.models, shipped.limits, shipped.dtype, weights, gpu))

    few, many = needed(20), needed(128)
    assert few != many and few & many
    keys = {module_key(source, "sm_89") for source in few | many}
    assert len(keys) == len(few | many)


@pytest.fixture(scope="module")
def kept_directory(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine directory with kernels that were compiled for a GPU of 46 multiprocessors."""
    try:
        nvrtc.find_nvrtc()
    except MissingDependencyError as missing:
        pytest.skip(str(missing))
    target = Path(shutil.copytree(checkpoint, tmp_path_factory.mktemp("kept") / "robot"))
    describe_in_place(target, EngineLimits(max_batch=1, prefill_chunk=16, kv_capacity=128))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building, "KV_CACHES", ("compute",))  # what the directory has; others take 7 s
        add_targets(target, read_targets([TARGET]))
    return target


#: Opens all engines of a directory as on a GPU, up to the driver's calls, and says what was loaded.
_OPEN = """
import sys
from dataclasses import replace
from types import SimpleNamespace
from edgellm.engines.backends.platform import find_tensorrt
from edgellm.engines.building.needed_kernels import AbsentBackend, WeightLayouts, _AbsentDriver
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.kernels.compiler import find_headers
from edgellm.kernels.errors import MissingDependencyError
from edgellm.kernels.gpu import absent_gpu
from edgellm.kernels.launch import KernelModule
from edgellm.kernels.nvrtc import find_nvrtc
from edgellm.kernels import compiler, nvrtc

compiler.toolkit_roots = nvrtc.toolkit_roots = list  # of a machine that has one
for missing in (find_nvrtc, find_headers):
    try:
        print(missing(), "was found")
    except MissingDependencyError:
        print("no", missing.__name__)
print("TensorRT", find_tensorrt())

class Driver(_AbsentDriver):
    loaded = []
    def cuModuleLoadData(self, code):
        assert code.startswith(b"\\x7fELF")
        self.loaded.append(code)
        return 0, code
    def cuModuleGetFunction(self, module, name):
        assert b".text." + name + b"\\0" in module
        return 0, object()
    def cuFuncSetAttribute(self, *arguments):
        return (0,)

class Backend(AbsentBackend):
    def use(self, module):
        self._module = module

gpu = replace(absent_gpu("sm_86", int(sys.argv[2]), 99 << 10), driver_cuda=(13, 0))
directory = EngineDirectory.open(sys.argv[1], verify=True)
weights = WeightLayouts(directory.models, directory.checkpoints, directory.dtype)
kept = directory.kept_kernels(gpu)
backend = Backend(directory.models, directory.limits, directory.dtype, weights.planned, kept.gpu)
module = KernelModule(gpu, SimpleNamespace(handle=0), kept)
module.driver = Driver()
backend.use(module)
try:
    with module.side_by_side():
        backend.load_all(weights.loaded.values())
    for source in backend.module.sources:
        module.load(source)
except MissingDependencyError as error:
    print(error)
print("loaded", len(Driver.loaded))
"""


@pytest.mark.slow
@pytest.mark.ci
def test_without_compiler_headers_and_tensorrt_a_kept_directory_opens(kept_directory: Path, tmp_path: Path) -> None:
    """In an environment without these wheels, as a device has it, every engine loads its kernels; where the GPU is a
    larger or a smaller one they are the same."""
    there = link_packages(tmp_path / "packages", ("nvidia", "tensorrt"))
    cache = {"EDGELLM_CACHE_DIR": str(tmp_path / "cache")}
    result = run_there(there, _OPEN, kept_directory, 46, **cache)
    assert result.returncode == 0, result.stderr
    *missing, loaded = result.stdout.splitlines()
    assert missing == ["no find_nvrtc", "no find_headers", "TensorRT None"]
    assert int(loaded.split()[1]) > 8
    assert not (tmp_path / "cache" / "kernels").exists()
    for multiprocessors in (84, 20):
        other = run_there(there, _OPEN, kept_directory, multiprocessors, **cache)
        assert other.stdout.splitlines() == [*missing, loaded], other.stderr


def every_engine_is_prepared(path: Path, capability: str = "sm_87") -> set[str]:
    """The names of the modules that a directory needs, once all its engines have prepared theirs."""
    directory = EngineDirectory.open(path)
    weights = WeightLayouts(directory.models, directory.checkpoints, directory.dtype)
    gpu = absent_gpu(capability, 16, SHARED_MEMORY[capability])
    backend = Noting(directory.models, directory.limits, directory.dtype, weights.planned, gpu)
    backend.load_all(weights.loaded.values())
    assert backend.unprepared() == []
    return {source.name for source in (*backend.module.sources, *weights.sources)}


def test_packed_models_bring_what_loads_their_weights(
    tiny_checkpoint: Path, tiny_draft: Path, tmp_path: Path, compiled: list
) -> None:
    model, _ = write_packed(tiny_checkpoint, tmp_path / "packed", tmp_path / "twin")
    draft, _ = write_packed(tiny_draft, tmp_path / "packed_draft", tmp_path / "twin_draft")
    limits = EngineLimits(3, 128, 160, 4, 3, 12)
    kernels = read_targets(["sm_87:16"])
    build_engine_directory(model, tmp_path / "engines", limits, [], "float16", draft=draft, kernels=kernels)
    names = every_engine_is_prepared(tmp_path / "engines")
    assert names <= {name for name, _ in compiled}
    assert any(name.startswith("shuffle") for name in names) and not any("dequantize" in name for name in names)


def test_gguf_files_bring_what_unpacks_their_blocks(tmp_path: Path) -> None:
    folder = write_mixture(tmp_path / "mixture")
    with Checkpoint.open(folder) as checkpoint:
        config = decoder_config(checkpoint.config)
    weights = WeightLayouts({"base": config}, {"base": lambda: Checkpoint.open(folder)}, "float16")
    kinds = {source.name.removeprefix("unblock-") for source in weights.sources if source.name.startswith("unblock-")}
    assert kinds == {"q4_0", "q4_k", "q6_k", "q8_0", "iq4_xs"}
    for source in weights.sources:
        compile_module(source, "sm_87")


def test_a_packed_table_has_kernels_of_its_own(tiny_checkpoint: Path, tmp_path: Path, compiled: list) -> None:
    options: dict[str, Any] = {"head": "int8", "embedding": "head", "kernels": read_targets(["sm_87:16"])}
    build_engine_directory(tiny_checkpoint, tmp_path / "engines", EngineLimits(1, 16, 128), [], "float16", **options)
    names = every_engine_is_prepared(tmp_path / "engines")
    assert any(name.startswith("step_float16_") for name in names)
    assert any(name.startswith("tree_float16_") for name in names)


@pytest.mark.parametrize(("family", "packed"), [("qwen3_moe", True), ("qwen3_5_moe", False)])
def test_mixtures_bring_the_kernels_of_their_experts(
    family: str, packed: bool, make_checkpoint: Callable[..., Path], tmp_path: Path, compiled: list
) -> None:
    model = make_checkpoint(tmp_path / "checkpoint", 1, **MIXTURES[family])
    if packed:
        model, _ = write_packed(model, tmp_path / "packed", tmp_path / "twin")
    kernels = read_targets(["sm_87:16"])
    build_engine_directory(model, tmp_path / "engines", EngineLimits(2, 80, 128), [], "float16", kernels=kernels)
    names = every_engine_is_prepared(tmp_path / "engines")
    assert names <= {name for name, _ in compiled}
    kind = "packed-expert_" if packed else "experts-dense-"
    assert any("experts-choose" in name for name in names) and any(kind in name for name in names)
    of_prompts = [name for name in names if "experts-prompt_rows" in name]
    assert "experts-sort_pairs" in names and len(of_prompts) == 2


@pytest.mark.parametrize("family", RECURRENT)
def test_recurrent_models_bring_what_commits_their_states(
    family: str, make_checkpoint: Callable[..., Path], tmp_path: Path, compiled: list
) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint", 1, **RECURRENT[family])
    kernels = read_targets(["sm_87:16"])
    build_engine_directory(checkpoint, tmp_path / "engines", EngineLimits(2, 80, 128), [], "float16", kernels=kernels)
    names = every_engine_is_prepared(tmp_path / "engines")
    assert names <= {name for name, _ in compiled}
    assert any("commit_columns" in name for name in names)
    assert any("commit_matrices" in name for name in names) == (family in ("qwen3_5", "granite4_hybrid", "nemotron_h"))


def test_layer_norms_and_activations_come_along(
    make_checkpoint: Callable[..., Path], tmp_path: Path, compiled: list
) -> None:
    """Of a model whose linear layers do not know them."""
    checkpoint, kernels = (
        make_checkpoint(tmp_path / "checkpoint", 1, **FAMILIES["starcoder2"]),
        read_targets(["sm_87:16"]),
    )
    report = build_engine_directory(
        checkpoint, tmp_path / "engines", EngineLimits(2, 80, 128), [], "float16", kernels=kernels
    )
    names = every_engine_is_prepared(tmp_path / "engines")
    assert names <= {name for name, _ in compiled} and not any("plans" in note for note in report.notes)
    norms = {f"encoder_norm_{given}_float16_float16_4" for given in ("float16", "float32")}
    assert norms | {"encoder_activate_float16_4"} <= names


def test_what_tensorrt_would_run_on_a_target_is_told(
    make_checkpoint: Callable[..., Path], limits: EngineLimits, tmp_path: Path, compiled: list
) -> None:
    """Of heads that no kernel takes."""
    checkpoint = make_checkpoint(tmp_path / "checkpoint", 1, **FAMILIES["qwen3"] | {"head_dim": 20})
    report = build_engine_directory(checkpoint, tmp_path / "engines", limits, kernels=read_targets(["sm_87:8"]))
    (note,) = (note for note in report.notes if "plans" in note)
    assert note.startswith(
        "No plans were built for sm_87, where TensorRT runs base decode of 1 tokens; base prefill of"
    )
