"""Clocks, power mode, temperature and throttling of this machine, as far as it tells: by NVML and a Jetson's tools."""

from __future__ import annotations

import ctypes
import re
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

from edgellm.kernels.gpu import find_gpu

#: Kinds of clocks, and the sensor of temperature, in nvml.h.
_CLOCKS = {"multiprocessors": 1, "memory": 2}
_GPU_SENSOR = 0
#: Bits of nvmlClocksThrottleReasons that slow a GPU down, and what they say.
_REASONS = {
    0x4: "the power limit",
    0x8: "hardware (heat or power)",
    0x20: "heat",
    0x40: "heat (hardware)",
    0x80: "the power supply",
}
_SYSTEM = Path("/sys")


def sensor_facts() -> dict[str, Any]:
    """JSON values; what this machine does not tell is left out."""
    with suppress(OSError):
        return jetson_facts() | nvml_facts(ctypes.CDLL("libnvidia-ml.so.1"), _bus_id())
    return jetson_facts()


def sensors_in_words(facts: dict[str, Any]) -> str:
    """One line."""
    found = [f"power mode {facts['power_mode']}"] if "power_mode" in facts else []
    found += [f"jetson_clocks: {each}" for each in facts.get("jetson_clocks", ())]
    for name in _CLOCKS:
        if f"{name}_mhz" in facts:
            most = f" of {facts[f'{name}_most_mhz']}" if f"{name}_most_mhz" in facts else ""
            found.append(f"{name} at {facts[f'{name}_mhz']}{most} MHz")
    if "watts" in facts:
        limit = f" of {facts['limit_watts']:.0f}" if "limit_watts" in facts else ""
        found.append(f"{facts['watts']:.1f}{limit} W")
    found += [f"{facts['celsius']:.0f} C"] if "celsius" in facts else []
    found += [f"{facts['over_current_events']} over-current events"] if facts.get("over_current_events") else []
    if "throttled_by" in facts:
        held = facts["throttled_by"]
        found.append(f"THROTTLED by {' and '.join(held)}" if held else "not throttled")
    return ", ".join(found) or "neither NVML nor nvpmodel tells"


def nvml_facts(library: Any, bus_id: bytes | None) -> dict[str, Any]:
    """What the library tells of the GPU at this PCI address, or of its first: clocks and the most they may be in MHz,
    watts, degrees Celsius, and what throttles it now."""
    device, found = ctypes.c_void_p(), dict[str, Any]()
    if library.nvmlInit_v2():
        return found
    try:
        named = bus_id is not None and not library.nvmlDeviceGetHandleByPciBusId_v2(bus_id, ctypes.byref(device))
        if not named and library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device)):
            return found

        def ask(name: str, kind: type[Any], *arguments: int) -> int | None:
            value = kind()
            # Older libraries, and those of a Jetson, lack some.
            function = getattr(library, f"nvmlDeviceGet{name}", None)
            refused = function is None or function(device, *arguments, ctypes.byref(value))
            return None if refused else int(value.value)

        for name, clock in _CLOCKS.items():
            found[f"{name}_mhz"] = ask("ClockInfo", ctypes.c_uint, clock)
            found[f"{name}_most_mhz"] = ask("MaxClockInfo", ctypes.c_uint, clock)
        for name, call in (("watts", "PowerUsage"), ("limit_watts", "EnforcedPowerLimit")):
            milliwatts = ask(call, ctypes.c_uint)
            found[name] = None if milliwatts is None else milliwatts / 1000
        found["celsius"] = ask("Temperature", ctypes.c_uint, _GPU_SENSOR)
        reasons = ask("CurrentClocksThrottleReasons", ctypes.c_ulonglong)
        if reasons is not None:
            found["throttled_by"] = [words for bit, words in _REASONS.items() if reasons & bit]
    finally:
        library.nvmlShutdown()
    return {name: value for name, value in found.items() if value is not None}


def jetson_facts(system: Path = _SYSTEM) -> dict[str, Any]:
    """What a Jetson's tools and sensors tell, `system` being where Linux shows these: the power mode, clocks as
    jetson_clocks shows them (which mostly needs root), the hottest zone, and how often too much current flowed."""
    found: dict[str, Any] = {}
    mode = re.search(r"NV Power Mode: *(\S.*)", _told("nvpmodel", "-q"))
    if mode is None:
        return found
    found["power_mode"] = mode[1].strip()
    shown = _told("jetson_clocks", "--show")
    clocks = re.findall(r"^(GPU|EMC)\b.*?MaxFreq=(\d+).*?CurrentFreq=(\d+)", shown, re.MULTILINE)
    if clocks:
        found["jetson_clocks"] = [
            f"{name} at {int(now) // 10**6} of {int(most) // 10**6} MHz" for name, most, now in clocks
        ]
    degrees = _numbers(system, "class/thermal/thermal_zone*/temp")
    if degrees:
        found["celsius"] = max(degrees) / 1000
    events = _numbers(system, "class/hwmon/hwmon*/oc*_event_cnt")
    if events:
        found["over_current_events"] = sum(events)
    return found


def _told(*command: str) -> str:
    with suppress(OSError, subprocess.TimeoutExpired):
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=False).stdout
    return ""


def _numbers(system: Path, pattern: str) -> list[int]:
    found = []
    for path in sorted(system.glob(pattern)):
        with suppress(OSError, ValueError):  # zones that are switched off cannot be read
            found.append(int(path.read_text(encoding="ascii")))
    return found


def _bus_id() -> bytes | None:
    """The PCI address of the GPU that is found, which NVML may number otherwise. Raises OSError without a driver."""
    library, device, name = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.create_string_buffer(32)
    gpu = find_gpu()
    refused = library.cuInit(0) or library.cuDeviceGet(ctypes.byref(device), 0 if gpu is None else gpu.index)
    return None if refused or library.cuDeviceGetPCIBusId(name, len(name), device) else name.value
