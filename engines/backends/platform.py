"""What this machine has beside its GPU: TensorRT (full or RTX, with one API), and cores.

Full TensorRT (`tensorrt`) is preferred: JetPack brings it, and it builds for every GPU that it runs on. TensorRT-RTX is
`tensorrt_rtx`, or `tensorrt_rtx_bindings` where only that wheel and the library's are installed.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any

from edgellm.engines.errors import MissingDependencyError
from edgellm.kernels.gpu import current_compute_capability

#: Layers of whole decoders that TensorRT has since 10.15 (and TensorRT-RTX since 1.4). Segments between attention steps
#: and encoders without rotary embeddings do without: 10.3, which JetPack 6 has, runs these.
_LATER_LAYERS = ("add_kv_cache_update", "add_attention", "add_rotary_embedding")
_RTX_TARGETS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_120", "sm_121")


@dataclass(frozen=True)
class TensorRTLibrary:
    """A TensorRT that was found: its `flavour` ("trt" or "rtx"), `version` and Python `module`."""

    flavour: str
    version: str
    module: ModuleType

    @property
    def buildable_targets(self) -> tuple[str, ...]:
        """Compute capabilities that plans can be built for on this machine."""
        present = current_compute_capability()
        targets = _RTX_TARGETS if self.flavour == "rtx" else ()
        return targets if present is None or present in targets else (present, *targets)

    @property
    def lacks(self) -> tuple[str, ...]:
        """What it has not of the layers that whole decoders need."""
        return tuple(name for name in _LATER_LAYERS if not hasattr(self.module.INetworkDefinition, name))

    def compute_capability(self, target: str) -> Any:
        """TensorRT-RTX's enumeration member for `target`; the present GPU's where it has none of its own."""
        return getattr(self.module.ComputeCapability, target.replace("_", "").upper(), None) or (
            self.module.ComputeCapability.CURRENT
        )

    def logger(self, take: Callable[[Any, str], None]) -> Any:
        """A logger of TensorRT's, for its builder or runtime, that lets `take` have each line with its severity."""
        base: Any = self.module.ILogger

        class Logger(base):
            def __init__(self) -> None:
                base.__init__(self)

            def log(self, severity: Any, message: str) -> None:
                take(severity, message)

        return Logger()


@lru_cache(maxsize=1)
def _search() -> tuple[TensorRTLibrary | None, str]:
    """The library, or None with the reason in words."""
    reasons = []
    for name, flavour in (("tensorrt", "trt"), ("tensorrt_rtx", "rtx"), ("tensorrt_rtx_bindings", "rtx")):
        if importlib.util.find_spec(name) is None:
            reasons.append(f"{name} is not installed")
            continue
        try:
            module = importlib.import_module(name)
            return TensorRTLibrary(flavour, str(module.__version__), module), ""
        except (ImportError, OSError, AttributeError, RuntimeError) as error:
            reasons.append(f"{name} is installed but does not load ({error})")
    return None, "; ".join(reasons)


def find_tensorrt() -> TensorRTLibrary | None:
    """The TensorRT of this machine, or None."""
    return _search()[0]


#: What can be done where something asked for TensorRT that runs a model.
INSTEAD = (
    "TensorRT runs steps that no kernels take, and with --executor tensorrt all that it can: --executor auto runs "
    "these on kernels, --backend numpy needs no GPU."
)


def load_tensorrt(instead: str = INSTEAD) -> TensorRTLibrary:
    """The TensorRT of this machine; MissingDependencyError names what was looked for and what to install, and what
    can be done `instead`."""
    library, reason = _search()
    if library is None:
        raise MissingDependencyError(
            f"No usable TensorRT: {reason}. On an RTX PC: pip install '.[rtx]' in EdgeLLM's checkout. On a Jetson use "
            f"JetPack's own TensorRT in a virtual environment made with --system-site-packages. {instead}"
        )
    return library
