"""What of a GPU's work the host waits for, or other work of the GPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from edgellm.engines.errors import EngineError
from edgellm.kernels.arrays import DeviceArray


def checked(driver: Any, result: tuple) -> Any:
    """The value of a call of the driver, of which there is one at most; raises EngineError with its status."""
    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        raise EngineError(str(status))
    return values[0] if values else None


class DeviceReadback:
    """Values in pinned memory, with the event after which they are complete."""

    def __init__(self, values: np.ndarray, event: Any) -> None:
        self._values = values
        self._event = event

    def wait(self) -> np.ndarray:
        """The values, once the event has come."""
        self._event.synchronize()
        return self._values.copy()


class DeviceTransfer:
    """A copy from or to `values` on the host, with the event after which it is done."""

    def __init__(self, values: np.ndarray, array: DeviceArray, event: Any) -> None:
        self._memory = (values, array)  # alive for as long as the copy may run
        self.event = event

    def wait(self) -> None:
        """Return once the event has come."""
        self.event.synchronize()


class DeviceSignal:
    """An event that can be recorded in a captured step: each launch of it records the event anew."""

    def __init__(self, stream: Any) -> None:
        from cuda.bindings import driver

        self._driver, self._stream = driver, driver.CUstream(stream.handle)
        self._event = checked(driver, driver.cuEventCreate(int(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)))

    def give(self) -> None:
        """Record it; within a capture as a node of the graph."""
        driver = self._driver
        status = checked(driver, driver.cuStreamIsCapturing(self._stream))
        captures = status != driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
        flags = driver.CUevent_record_flags
        flag = flags.CU_EVENT_RECORD_EXTERNAL if captures else flags.CU_EVENT_RECORD_DEFAULT
        checked(driver, driver.cuEventRecordWithFlags(self._event, self._stream, int(flag)))

    def wait(self) -> None:
        """Return once the event has come."""
        checked(self._driver, self._driver.cuEventSynchronize(self._event))

    def __del__(self) -> None:
        event = getattr(self, "_event", None)
        if event is not None:
            self._driver.cuEventDestroy(event)


class DeviceTimestamp:
    """An event, and one before it (`first`) that came at `first_seconds` of the host's clock."""

    def __init__(self, event: Any, first: Any, first_seconds: float) -> None:
        self._event, self._first, self._first_seconds = event, first, first_seconds

    def seconds(self) -> float:
        """When it came, on the clock of `time.perf_counter`; waits for it. Half a microsecond is the events' own."""
        self._event.synchronize()
        return self._first_seconds + self._first.time_till(self._event) / 1000
