"""What a round of each drafting configuration costs on this device: measured once, kept on disk beside the plans."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import platform as machine
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np

from edgellm.engines.backends.plan_files import cached_plans_path, present_platform
from edgellm.engines.directories.engine_directory import EngineDirectory, edgellm_version
from edgellm.engines.errors import EngineError
from edgellm.engines.formats.digests import hash_bytes
from edgellm.engines.formats.strict_formats import JSONObject, canonical_json
from edgellm.kernels.atomic_write import write_atomically
from edgellm.kernels.compilations import usable_cores
from edgellm.kernels.gpu import find_gpu

logger = logging.getLogger("edgellm.drafting")

FORMAT_VERSION = 1
#: The name of a step without a draft.
PLAIN = "plain"
_NO_PLANS = "numpy"  # the folder where a plan folder would be named after GPU and TensorRT
_ADVICE = "They are measured again"


class RoundCostsError(EngineError):
    """A file of round costs is damaged, or was measured elsewhere."""


@dataclass(frozen=True)
class Device:
    """What measured costs are bound to: the engine directory as it is, EdgeLLM's release, the backend, and the machine.

    `platform` is the plan folder's name (as in sm_90-rtx-1.6.1.120), the compute capability where there is no TensorRT,
    or "numpy"; `processor` the GPU, or the CPU with
    its cores, with the release of NumPy.
    """

    description_sha256: str
    edgellm: str
    backend: str
    platform: str
    processor: str

    @classmethod
    def present(cls, directory: EngineDirectory, backend: str) -> Device:
        """This machine with an engine directory; `backend` is "numpy" or "tensorrt"."""
        # TensorRT is not looked for where it is not used: loading its library takes a tenth of a second.
        plans, gpu = (None, None) if backend == "numpy" else (present_platform(), find_gpu())
        if gpu is None:
            processor = f"{_cpu_name()}, {usable_cores()} cores, NumPy {np.__version__}"
            return cls(directory.description_sha256, edgellm_version(), backend, _NO_PLANS, processor)
        platform = gpu.compute_capability + (f"+{gpu.measured_as}" if gpu.measured_as else "")
        platform = platform if plans is None else plans.folder  # without TensorRT kernels run everything
        return cls(directory.description_sha256, edgellm_version(), backend, platform, gpu.name)

    @property
    def file_name(self) -> str:
        """Its own for every device, so that machines that share a directory keep their figures side by side."""
        return f"round-costs-{hashlib.sha256(canonical_json(asdict(self))).hexdigest()[:12]}.json"


@dataclass(frozen=True)
class RoundCosts:
    """Seconds of a round by configuration and batch size: `measured[name][batch]`. PLAIN is always among the names."""

    measured: Mapping[str, Mapping[int, float]]

    def seconds(self, name: str, batch: int) -> float:
        """The time of a round; between measured batch sizes by interpolation, beyond them as at the nearest."""
        points = self.measured[name]
        if batch in points:
            return points[batch]
        sizes = sorted(points)
        return float(np.interp(batch, sizes, [points[size] for size in sizes]))

    def covers(self, names: Sequence[str], batches: Sequence[int]) -> bool:
        """Whether all these were measured."""
        return all(batch in self.measured.get(name, {}) for name in names for batch in batches)


def round_costs(
    directory: EngineDirectory,
    backend: str,
    names: Sequence[str],
    batches: Sequence[int],
    measure: Callable[[], RoundCosts],
) -> RoundCosts:
    """The costs kept for this device, or those that `measure` finds now, which are then kept.

    Kept costs serve where they cover all `names` and `batches`. A damaged file is a warning and measured again; where
    nothing can be written the next start measures again.
    """
    device = Device.present(directory, backend)
    for path in _places(directory, device):
        if not path.exists():
            continue
        try:
            kept = read_round_costs(path, device)
        except RoundCostsError as error:
            logger.warning("%s", error)
            continue
        if kept.covers(names, batches):
            return kept
    costs = measure()
    _store(directory, device, costs)
    return costs


def read_round_costs(path: Path, device: Device) -> RoundCosts:
    """The costs of a file, which must be whole and measured on `device`; raises RoundCostsError."""
    values = JSONObject.read(path, RoundCostsError, _ADVICE)
    version = values.get("format_version", "int")
    if version != FORMAT_VERSION:
        raise values.error(f"'format_version' is {version}, this EdgeLLM reads {FORMAT_VERSION}")
    values.refuse_other_keys("format_version", "device", "seconds", "sha256")
    found = values.object("device").dataclass(Device)
    for item in fields(Device):
        theirs, ours = getattr(found, item.name), getattr(device, item.name)
        if theirs != ours:
            raise values.error(f"measured with another {item.name}: {theirs!r}, expected {ours!r}")
    seconds = values.object("seconds")
    if values.get("sha256", "str") != _digest(seconds.values):
        raise values.error("its digest is not that of its content: it was changed or damaged")
    measured = {name: _points(seconds.object(name)) for name in seconds.values}
    if PLAIN not in measured:
        raise seconds.error(f"the key {PLAIN!r} is missing")
    return RoundCosts(measured)


def forget_round_costs(directory: EngineDirectory, backend: str) -> None:
    """Remove what is kept for this device, as far as it can be written, so that the next start measures again."""
    logger.info("The kept round costs are wrong by far: the next start measures them again")
    for path in _places(directory, Device.present(directory, backend)):
        with suppress(OSError):
            path.unlink(missing_ok=True)


def write_round_costs(path: Path, device: Device, costs: RoundCosts) -> None:
    """Write costs, whole or not at all; raises OSError."""
    seconds = {name: {str(size): value for size, value in points.items()} for name, points in costs.measured.items()}
    values = {
        "format_version": FORMAT_VERSION,
        "device": asdict(device),
        "seconds": seconds,
        "sha256": _digest(seconds),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(values, indent=2, allow_nan=False) + "\n").encode())


def _places(directory: EngineDirectory, device: Device) -> list[Path]:
    """Where costs may be kept, in the order of search: beside the plans, and in the user's cache.

    Without plans the engine directory has nothing that belongs to one machine, and stays as it is.
    """
    cached = cached_plans_path(directory.description_sha256)
    folders = [cached] if device.platform == _NO_PLANS else [directory.plans_path, cached]
    return [folder / device.platform / device.file_name for folder in folders]


def _store(directory: EngineDirectory, device: Device, costs: RoundCosts) -> None:
    reasons = []
    for path in _places(directory, device):
        try:
            write_round_costs(path, device, costs)
            return
        except OSError as error:
            reasons.append(f"{path.parent}: {error.strerror or error}")
    logger.warning("Round costs were measured but cannot be kept (%s)", "; ".join(reasons))


def _points(values: JSONObject) -> dict[int, float]:
    points = {}
    for key in values.values:
        seconds = values.get(key, "float")
        if not (key.isdecimal() and int(key) >= 1 and math.isfinite(seconds) and seconds > 0.0):
            raise values.error(f"{key!r} is {seconds!r}, expected seconds above 0 of a batch size of at least 1")
        points[int(key)] = seconds
    if not points:
        raise values.error("it is empty, expected seconds by batch size")
    return points


def _digest(seconds: Mapping[str, Mapping[str, float]]) -> str:
    return hash_bytes(canonical_json(seconds))


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named and named[0] else machine.processor() or machine.machine()
