"""What a service and systemd tell each other: the socket that it hands over, and datagrams that say how the service is.

As of sd_listen_fds(3) and sd_notify(3), which are a few variables of the environment; processes that this one starts
do not see them.
"""

from __future__ import annotations

import logging
import os
import socket

from edgellm.errors import RequestError

logger = logging.getLogger("edgellm.http")

#: The descriptor of the first socket that is handed over.
_FIRST = 3


def handed_socket() -> socket.socket | None:
    """The socket that connections come on, where systemd hands one to this process, else None. Raises RequestError
    where it hands over several, or one for no TCP connections."""
    process, count, _ = (os.environ.pop(f"LISTEN_{name}", "") for name in ("PID", "FDS", "FDNAMES"))
    if process != str(os.getpid()):
        return None
    if count != "1":
        raise RequestError(f"systemd hands over {count} sockets: expected one ListenStream= of the socket unit")
    try:
        handed = socket.socket(fileno=_FIRST)
        listens = handed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1
    except OSError as error:
        raise RequestError(f"descriptor {_FIRST} is no socket that systemd hands over: {error.strerror}") from error
    if not listens or handed.family not in (socket.AF_INET, socket.AF_INET6):
        raise RequestError("the socket that systemd hands over takes no TCP connections: expected ListenStream=PORT")
    handed.set_inheritable(False)
    return handed


class Notifier:
    """Tells systemd how this service is; elsewhere nobody."""

    def __init__(self) -> None:
        self._address = os.environ.pop("NOTIFY_SOCKET", "")
        microseconds, process = (os.environ.pop(f"WATCHDOG_{name}", "") for name in ("USEC", "PID"))
        is_watched = self._address and microseconds.isdecimal() and process in ("", str(os.getpid()))
        #: After so many seconds without a word systemd takes the service to be stuck; 0 where it does not watch.
        self.watchdog_seconds = int(microseconds) / 1e6 if is_watched else 0.0

    def tell(self, *assignments: str) -> None:
        """Send `VARIABLE=value` texts, as many as are given, in one datagram. It waits for nobody."""
        if not self._address:
            return
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sending:
                sending.sendto("\n".join(assignments).encode(), address)
        except OSError as error:
            logger.warning("systemd was not told %s: %s", ", ".join(assignments), error)
