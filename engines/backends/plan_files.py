"""Plan files: where they are, what they were built for, and why one is refused.

A plan is executable code that TensorRT's own check can pass although it was changed, so nobody gets the bytes of a plan
before their SHA-256 was compared with the manifest beside it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from edgellm.engines.backends.platform import TensorRTLibrary, find_tensorrt
from edgellm.engines.directories.description import edgellm_version
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.errors import PlanError
from edgellm.engines.families.programs import ModelConfig, model_program
from edgellm.engines.formats.digests import hash_bytes
from edgellm.engines.formats.small_files import read_file
from edgellm.engines.formats.strict_formats import LARGEST_SIZE, JSONObject, plain_values
from edgellm.engines.model.graph import NETWORK_VERSION
from edgellm.engines.model.limits import EngineShape
from edgellm.kernels.atomic_write import write_atomically
from edgellm.kernels.gpu import GPU, current_compute_capability, find_gpu
from edgellm.kernels.user_paths import user_cache_directory

logger = logging.getLogger("edgellm.plans")

MANIFEST_VERSION = 1
_FOLDER = re.compile(r"(sm_\d{2,3})-(rtx|trt)-(\d+(?:\.\d+)*[a-z0-9.+]*)")


@dataclass(frozen=True)
class Platform:
    """What a plan is bound to: compute capability ("sm_90"), TensorRT's flavour ("rtx" or "trt") and release."""

    compute_capability: str
    flavour: str
    version: str

    def __post_init__(self) -> None:
        if not _FOLDER.fullmatch(self.folder):
            raise PlanError(
                f"No such platform: {self.folder!r}, expected a compute capability, a flavour and a release as in "
                "sm_90-rtx-1.6.1.120"
            )

    @property
    def folder(self) -> str:
        """The name of the folder with this platform's plans, as in `sm_90-rtx-1.6.1.120`."""
        return f"{self.compute_capability}-{self.flavour}-{self.version}"

    @classmethod
    def from_folder(cls, name: str) -> Platform | None:
        """The platform of a folder's name, or None where it is not one."""
        match = _FOLDER.fullmatch(name)
        return cls(*match.groups()) if match else None

    def describe(self) -> str:
        """Describes it in words, for messages."""
        flavour = "TensorRT-RTX" if self.flavour == "rtx" else "TensorRT"
        return f"{self.compute_capability} with {flavour} {self.version}"


def present_platform() -> Platform | None:
    """This machine's platform, or None without a GPU or without TensorRT."""
    gpu = find_gpu()
    library = find_tensorrt() if gpu else None
    return gpu_platform(gpu, library) if gpu and library else None


def gpu_platform(gpu: GPU, library: TensorRTLibrary) -> Platform:
    """What plans for a GPU are bound to. One that is measured as another device keeps apart what is made meanwhile."""
    release = f"{library.version}+{gpu.measured_as}" if gpu.measured_as else library.version
    return Platform(gpu.compute_capability, library.flavour, release)


@dataclass(frozen=True)
class PlanManifest:
    """What the JSON beside a plan says; `network` is the `network_digest` that it was built from."""

    format_version: int
    sha256: str
    size: int
    network: str
    shape: EngineShape
    platform: Platform
    dtype: str
    attention: str
    created_with: str

    @classmethod
    def read(cls, path: Path, advice: str) -> PlanManifest:
        """Parse strictly; raises PlanError."""
        values = JSONObject.read(path, PlanError, advice)
        version = values.get("format_version", "int")
        if version != MANIFEST_VERSION:
            raise values.error(f"'format_version' is {version}, this EdgeLLM reads {MANIFEST_VERSION}")
        return values.dataclass(cls, shape=EngineShape, platform=Platform)


def plan_path(plans: Path, shape: EngineShape, platform: Platform) -> Path:
    """Where the plan of `shape` lies under a `plans` folder."""
    return plans / platform.folder / f"{shape.name}.engine"


def manifest_path(plan: Path) -> Path:
    """The JSON beside a plan."""
    return plan.with_suffix(".json")


def cached_plans_path(network: str) -> Path:
    """The `plans` folder in the user's cache for a network; plans of directories that cannot be written are here."""
    return user_cache_directory() / "plans" / network[:32]


def directory_network(directory: EngineDirectory, shape: EngineShape) -> str:
    """The `network_digest` of one of a directory's engines."""
    return network_digest(directory.model_config(shape.model), shape, directory.dtype, directory.attention)


def plan_candidates(directory: EngineDirectory, shape: EngineShape, platform: Platform, network: str) -> list[Path]:
    """The places of a plan in the order of search: the engine directory, then the user's cache."""
    return [plan_path(plans, shape, platform) for plans in (directory.plans_path, cached_plans_path(network))]


def read_plan(plan: Path, shape: EngineShape, platform: Platform, network: str, advice: str) -> bytes:
    """The bytes of a plan that is whole and was built for exactly this; raises PlanError that names what differs."""
    manifest = manifest_path(plan)
    if not manifest.exists():
        raise PlanError(f"{plan} has no manifest {manifest.name}, so nothing says what it is. {advice}")
    expected = PlanManifest.read(manifest, advice)
    for what, found, wanted in (
        ("GPU", expected.platform.compute_capability, platform.compute_capability),
        ("TensorRT flavour", expected.platform.flavour, platform.flavour),
        ("TensorRT release", expected.platform.version, platform.version),
        ("shape", expected.shape, shape),
        ("network", expected.network, network),
    ):
        if found != wanted:
            raise PlanError(f"{plan} was built for another {what}: {found}, expected {wanted}. {advice}")
    data = read_file(plan, LARGEST_SIZE, PlanError, advice=advice)
    if len(data) != expected.size:
        raise PlanError(f"{plan} has {len(data):,} bytes, expected {expected.size:,}: it was cut or replaced. {advice}")
    found_digest = hash_bytes(data)
    if found_digest != expected.sha256:
        raise PlanError(
            f"{plan} is damaged: SHA-256 {found_digest[:16]}..., expected {expected.sha256[:16]}.... {advice}"
        )
    return data


def write_plan(
    plans: Path, data: bytes, shape: EngineShape, platform: Platform, network: str, dtype: str, attention: str
) -> None:
    """Write a plan that was just built, and its manifest, below a `plans` folder, each whole or not at all; raises
    OSError."""
    facts = hash_bytes(data), len(data), network, shape, platform, dtype, attention, edgellm_version()
    manifest = asdict(PlanManifest(MANIFEST_VERSION, *facts)) | {"shape": plain_values(shape)}
    plan = plan_path(plans, shape, platform)
    plan.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileNotFoundError):  # an old manifest beside a new plan would be a lie until it is replaced
        manifest_path(plan).unlink()
    write_atomically(plan, data)
    write_atomically(manifest_path(plan), (json.dumps(manifest, indent=2) + "\n").encode())


def find_plan(
    directory: EngineDirectory, shape: EngineShape, platform: Platform, network: str
) -> tuple[bytes | None, list[str]]:
    """The verified bytes of a plan of a `network_digest` or None, and why each file that was there before it is
    refused."""
    advice = f"Build it again: {refresh_command(directory, platform, shape)}"
    refusals: list[str] = []
    for plan in plan_candidates(directory, shape, platform, network):
        if not plan.exists():
            continue
        try:
            return read_plan(plan, shape, platform, network, advice), refusals
        except PlanError as error:
            refusals.append(str(error))
    return None, refusals


def load_or_build_plan(
    directory: EngineDirectory, shape: EngineShape, platform: Platform, build: Callable[[], bytes] | None = None
) -> tuple[bytes, bool]:
    """The verified bytes of a plan, and whether it was built just now.

    A missing or refused plan is built with `build` and written where that is possible: into the engine directory, else
    into the user's cache. Without `build` it raises PlanError that names what differs and the command that builds.
    """
    network = directory_network(directory, shape)
    found, refusals = find_plan(directory, shape, platform, network)
    if found is not None:
        return found, False
    if build is None:
        others = [other.describe() for other, plans in platforms_with_plans(directory.plans_path) if plans]
        had = f"plans for {'; '.join(others)}" if others else "no plans"
        raise PlanError(
            "\n".join(refusals)
            or f"{directory.path} has no plan {shape.name} for {platform.describe()}: it has {had}. Build it: "
            f"{refresh_command(directory, platform, shape)}"
        )
    for refusal in refusals:
        logger.warning("%s (doing so now)", refusal)
    data = build()
    store_plan(directory, shape, platform, network, data)
    return data, True


def store_plan(
    directory: EngineDirectory, shape: EngineShape, platform: Platform, network: str, data: bytes
) -> Path | None:
    """Write a plan to the first `plans` folder that can be written, and give that; None, with a warning, where none
    can."""
    reasons = []
    for plans in (directory.plans_path, cached_plans_path(network)):
        try:
            write_plan(plans, data, shape, platform, network, directory.dtype, directory.attention)
            return plans
        except OSError as error:
            reasons.append(f"{plans / platform.folder}: {error.strerror or error}")
    logger.warning("The plan %s was built but cannot be kept (%s)", shape.name, "; ".join(reasons))
    return None


def platforms_with_plans(plans: Path) -> Iterator[tuple[Platform, list[Path]]]:
    """Each platform of a `plans` folder and its plan files, both sorted by name."""
    folders = sorted(plans.iterdir()) if plans.is_dir() else []
    for folder in folders:
        platform = Platform.from_folder(folder.name)
        if platform is not None and folder.is_dir():
            yield platform, sorted(folder.glob("*.engine"))


def refresh_command(directory: EngineDirectory, platform: Platform, shape: EngineShape | None = None) -> str:
    """The command that makes the plans which a directory needs on `platform`, and that of `shape`."""
    from edgellm.engines.backends.executors import planned_shapes  # where plans are of use

    capability = platform.compute_capability
    command = f"edgellm build --refresh-plans {directory.path}"
    if capability != current_compute_capability():
        command += f" --target {capability}"
    if shape is None or shape in planned_shapes(directory.models, directory.limits, directory.dtype, capability):
        return command
    return f"{command} --all-plans"


def network_digest(config: ModelConfig, shape: EngineShape, dtype: str, attention: str) -> str:
    """SHA-256, 64 hexadecimal digits, of all that a plan is built from: the program, the compute dtype, the attention
    setting and the version of the code that makes networks of programs."""
    # As it prints: where its weights come from is no part of a network, and does not print.
    program = model_program(config, shape)
    return hashlib.sha256(f"{NETWORK_VERSION} {dtype} {attention} {program}".encode()).hexdigest()
