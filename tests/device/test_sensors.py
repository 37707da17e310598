"""What NVML and a Jetson's tools tell, from stand-ins for both: what is there is told, what is lacking left out."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from edgellm.device.sensors import jetson_facts, nvml_facts, sensors_in_words

NOT_SUPPORTED = 3


class StandInLibrary:
    """NVML as an application links it: each function gives a status, and its value through the last argument."""

    def __init__(self, **values: Any) -> None:
        self.values, self.asked, self.is_open = values, [], False

    def nvmlInit_v2(self) -> int:
        self.is_open = True
        return 0

    def nvmlShutdown(self) -> int:
        self.is_open = False
        return 0

    def nvmlDeviceGetHandleByPciBusId_v2(self, bus_id: bytes, device: Any) -> int:
        self.asked.append(bus_id)
        return 0 if bus_id == b"0000:01:00.0" else NOT_SUPPORTED

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, device: Any) -> int:
        self.asked.append(index)
        return 0

    def __getattr__(self, name: str) -> Any:
        key = name.removeprefix("nvmlDeviceGet")
        if key not in self.values:
            raise AttributeError(name)

        def tell(device: ctypes.c_void_p, *arguments: Any) -> int:
            assert self.is_open
            value = self.values[key]
            value = value.get(arguments[0]) if isinstance(value, dict) else value
            if value is None:
                return NOT_SUPPORTED
            arguments[-1]._obj.value = value
            return 0

        return tell


def test_all_that_nvml_tells() -> None:
    library = StandInLibrary(
        ClockInfo={1: 1200, 2: 3201},
        MaxClockInfo={1: 1980, 2: 3201},
        PowerUsage=250_500,
        EnforcedPowerLimit=700_000,
        Temperature={0: 41},
        CurrentClocksThrottleReasons=0x4 | 0x20 | 0x1,
    )
    found = nvml_facts(library, b"0000:01:00.0")
    assert library.asked == [b"0000:01:00.0"] and not library.is_open
    assert found == {
        "multiprocessors_mhz": 1200,
        "multiprocessors_most_mhz": 1980,
        "memory_mhz": 3201,
        "memory_most_mhz": 3201,
        "watts": 250.5,
        "limit_watts": 700.0,
        "celsius": 41,
        "throttled_by": ["the power limit", "heat"],
    }
    assert sensors_in_words(found) == (
        "multiprocessors at 1200 of 1980 MHz, memory at 3201 of 3201 MHz, 250.5 of 700 W, 41 C, "
        "THROTTLED by the power limit and heat"
    )


def test_what_a_library_lacks_or_refuses_is_left_out() -> None:
    library = StandInLibrary(ClockInfo={1: 1300}, CurrentClocksThrottleReasons=0x1)  # idle, which is no throttling
    found = nvml_facts(library, b"0000:ff:00.0")
    assert library.asked == [b"0000:ff:00.0", 0], "the first GPU where the address is not known"
    assert found == {"multiprocessors_mhz": 1300, "throttled_by": []}
    assert sensors_in_words(found) == "multiprocessors at 1300 MHz, not throttled"
    assert sensors_in_words({}) == "neither NVML nor nvpmodel tells"


def test_a_library_that_does_not_begin_tells_nothing() -> None:
    library = StandInLibrary(ClockInfo={1: 1})
    library.nvmlInit_v2 = lambda: 9  # type: ignore[method-assign]
    assert nvml_facts(library, None) == {} and not library.asked


def tool(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "tools"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    return folder


def test_a_jetson_tells_its_mode_clocks_heat_and_current(tools: Path, tmp_path: Path) -> None:
    tool(tools, "nvpmodel", "NVPM WARN: fan mode is not set!\nNV Power Mode: MAXN_SUPER\n2")
    shown = "cpu0:  Online=1 MinFreq=729600 MaxFreq=1728000 CurrentFreq=1344000"
    shown += "\nGPU MinFreq=306000000 MaxFreq=1020000000 CurrentFreq=612000000"
    shown += "\nEMC MinFreq=204000000 MaxFreq=3199000000 CurrentFreq=2133000000 FreqOverride=0"
    tool(tools, "jetson_clocks", shown)
    for name, degrees in (("0", "45000"), ("1", "61500"), ("2", "")):
        zone = tmp_path / f"sys/class/thermal/thermal_zone{name}"
        zone.mkdir(parents=True)
        (zone / "temp").write_text(degrees)
    (tmp_path / "sys/class/hwmon/hwmon1").mkdir(parents=True)
    (tmp_path / "sys/class/hwmon/hwmon1/oc1_event_cnt").write_text("3\n")
    found = jetson_facts(tmp_path / "sys")
    assert found == {
        "power_mode": "MAXN_SUPER",
        "jetson_clocks": ["GPU at 612 of 1020 MHz", "EMC at 2133 of 3199 MHz"],
        "celsius": 61.5,
        "over_current_events": 3,
    }
    assert sensors_in_words(found).startswith("power mode MAXN_SUPER, jetson_clocks: GPU at 612 of 1020 MHz")
    assert sensors_in_words(found).endswith("3 over-current events")


def test_jetson_clocks_that_needs_root_is_left_out(tools: Path, tmp_path: Path) -> None:
    tool(tools, "nvpmodel", "NV Power Mode: 15W\n0")
    tool(tools, "jetson_clocks", "Please run as root")
    assert jetson_facts(tmp_path) == {"power_mode": "15W"}


def test_a_machine_without_nvpmodel_is_no_jetson(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "class/thermal/thermal_zone0").mkdir(parents=True)
    (tmp_path / "class/thermal/thermal_zone0/temp").write_text("40000")
    assert jetson_facts(tmp_path) == {}


_LIBRARIES = {
    "libcuda.so.1": """
#include <string.h>
int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
int cuDeviceGet(int *device, int number) { *device = 7 + number; return 0; }
int cuDeviceGetAttribute(int *value, int number, int device) {
    *value = number == 75 ? 8 + device - 7 : number == 76 ? 0 : number == 16 ? 100 + device : 99 << 10;
    return 0;
}
int cuDeviceGetName(char *name, int room, int device) { strcpy(name, device == 7 ? "small" : "large"); return 0; }
int cuDeviceTotalMem_v2(unsigned long *bytes, int device) { *bytes = device * 1000; return 0; }
int cuDeviceGetPCIBusId(char *name, int room, int device) { strcpy(name, "0000:01:00.0"); return device != 8; }
""",
    "libnvidia-ml.so.1": """
#include <string.h>
static int there;
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *name, void **device) {
    *device = &there;
    return strcmp(name, "0000:01:00.0");
}
int nvmlDeviceGetClockInfo(void *device, int kind, unsigned *mhz) { *mhz = 1000 + kind; return device != &there; }
int nvmlDeviceGetCurrentClocksThrottleReasons(void *device, unsigned long long *bits) {
    *bits = 0x40;
    return device != &there;
}
""",
}


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_the_libraries_are_called_as_they_are_linked(tmp_path: Path) -> None:
    for name, code in _LIBRARIES.items():
        command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", tmp_path / name]
        subprocess.run(command, input=code, text=True, check=True)
    program = """
import json
from edgellm.device.sensors import sensor_facts
from edgellm.kernels.errors import KernelError
from edgellm.kernels.gpu import choose_gpu, find_gpu, visible_gpus
assert visible_gpus() == (find_gpu(), find_gpu(1)) and find_gpu().name == "small"
large = find_gpu(1)
assert (large.name, large.compute_capability, large.index, large.total_memory) == ("large", "sm_90", 1, 8000)
assert (large.multiprocessors, large.driver_cuda) == (108, (13, 0))
try:
    choose_gpu(2)
except KernelError as error:
    assert "there is no GPU 2. The driver shows 0 (small), 1 (large)" in str(error), error
else:
    raise AssertionError
assert find_gpu().name == "small"
choose_gpu(1)
assert find_gpu() == large and find_gpu(0).name == "small"
print(json.dumps(sensor_facts()))
"""
    environment = os.environ | {"LD_LIBRARY_PATH": str(tmp_path), "PATH": ""}
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    assert json.loads(told.stdout) == {
        "multiprocessors_mhz": 1001,
        "memory_mhz": 1002,
        "throttled_by": ["heat (hardware)"],
    }
