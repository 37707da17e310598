"""What a server counts of its own: responses, connections, memory, in Prometheus's text form."""

from __future__ import annotations

import os
import resource
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from edgellm.engines.model.memory_plan import available_memory
from edgellm.metrics import family


class ServerCounts:
    """Counts since the server began, for the event loop that it runs in. `connections` says how many are open,
    `closed_connections` how many were closed, by why."""

    def __init__(self) -> None:
        self.connections: Callable[[], int] = lambda: 0
        self.closed_connections: Counter[str] = Counter()
        #: Those that were begun, by the path that was asked and their status.
        self.responses: Counter[tuple[str, int]] = Counter()

    def text(self, answers: int, lost_readers: int, body_bytes: int, model_memory: Mapping[str, int]) -> str:
        """All of it, with what there is now: requests that are answered, lost threads, bytes of bodies and the
        model."""
        counted = sorted(self.responses.items())
        responses = {f'{{path="{path}",status="{status}"}}': count for (path, status), count in counted}
        closed = {f'{{reason="{reason}"}}': count for reason, count in sorted(self.closed_connections.items())}
        memory = {f'{{part="{part}"}}': size for part, size in model_memory.items()}
        system_bytes = os.sysconf("SC_PHYS_PAGES") * resource.getpagesize()
        families = (
            ("http_responses_total", "Responses, by endpoint and status.", responses),
            ("http_connections_closed_total", "Connections that were closed, by why.", closed),
            ("http_connections", "Connections that are open.", self.connections()),
            ("http_answers", "Requests that are being answered, this one too.", answers),
            ("http_lost_readers", "Threads that never ended making a request ready.", lost_readers),
            ("http_body_bytes", "Bytes of requests that are being read.", body_bytes),
            ("resident_memory_bytes", "Memory of the process.", _resident_bytes()),
            ("available_memory_bytes", "Memory of the system that programs can still have.", available_memory() or 0),
            ("system_memory_bytes", "Memory of the system.", system_bytes),
            ("model_memory_bytes", "Memory that the model takes on its device, by what for.", memory),
        )
        lines = []
        for name, text, value in families:
            samples = value if isinstance(value, dict) else {"": value}
            lines += family(name, "counter" if name.endswith("_total") else "gauge", text, samples)
        return "\n".join([*lines, ""])


def _resident_bytes() -> int:
    try:
        pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return pages * resource.getpagesize()
