"""Connections that wait for nobody: uvicorn's server, with limits on their number and on what silence may last.

A service and systemd tell each other of the socket that it hands over, and by datagrams how the service is: as of
sd_listen_fds(3) and sd_notify(3), a few variables of the environment, which processes that this one starts do not see.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from edgellm.errors import RequestError
from edgellm.http.errors import HTTPError

logger = logging.getLogger("edgellm.http")

#: Bytes of a request's line and headers.
MOST_HEADER_BYTES = 16 * 1024
#: A machine that is gone without a word is asked after so many seconds of silence, then so many later, so many times.
_PROBES = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
#: What the system holds of an answer beside the 64 KiB that the server holds itself; what comes then waits unread.
_SEND_BYTES = 128 * 1024
#: The descriptor of the first socket that systemd hands over.
_FIRST = 3
_PHRASES = {400: "Bad Request", 408: "Request Timeout", 503: "Service Unavailable"}
_PHRASES |= {431: "Request Header Fields Too Large"}
#: What a client still sends of a request that is turned away is read and dropped for so many seconds: a connection that
#: is closed with something unread may lose the answer.
_LINGER_SECONDS = 2.0
#: A target in absolute form: host and port, then path and query.
_ABSOLUTE = re.compile(rb"https?://([^/?#]*)([^#]*)", re.IGNORECASE)


@dataclass(frozen=True)
class ConnectionLimits:
    """How many connections there may be; how many seconds a request's headers may take, then its body; and how long a
    client may take nothing of what was sent to it."""

    connections: int = 256
    header_seconds: float = 10.0
    body_seconds: float = 60.0
    stall_seconds: float = 30.0


class RequestReader(h11.Connection):
    """Reads requests: none with longer headers than there may be, in however few pieces they come, and those for a
    target in absolute form as those for its path at its host (RFC 9112, 3.2.2)."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MOST_HEADER_BYTES)

    def next_event(self) -> Any:
        """See `h11.Connection`. Raises RemoteProtocolError."""
        event = super().next_event()
        if not isinstance(event, h11.Request):
            return event
        size = len(event.target) + sum(len(name) + len(value) + len(b": \r\n") for name, value in event.headers)
        if size > MOST_HEADER_BYTES:
            raise h11.RemoteProtocolError("the headers are too long", error_status_hint=431)
        if (target := _ABSOLUTE.fullmatch(event.target)) is None:
            return event
        others = [(name, value) for name, value in event.headers if name != b"host"]
        path = target[2] if target[2].startswith(b"/") else b"/" + target[2]
        headers = [(b"host", target[1]), *others]
        return h11.Request(method=event.method, target=path, headers=headers, http_version=event.http_version)


class WatchedProtocol(H11Protocol):
    """A connection that is closed where it says nothing, speaks too slowly, or takes nothing of its answer. The server
    calls `check` every now and then; uvicorn itself watches only idle connections between requests."""

    limits = ConnectionLimits()
    #: How many connections were closed, by why.
    closed: ClassVar[Counter[str]] = Counter()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection, or close it where there are as many as there may be."""
        super().connection_made(transport)
        self.conn, self._lingers = RequestReader(), False
        self._state: tuple[Any, Any] = (None, None)
        self._since, self._unsent = time.monotonic(), 0
        self._stuck_since: float | None = None
        connected: socket.socket = transport.get_extra_info("socket")
        with contextlib.suppress(OSError, AttributeError):  # not every system has all of them
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _PROBES.items():
                connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        if len(self.connections) > self.limits.connections:
            self._turn_away("too many", 503, "there are as many connections as the server takes: try again later")

    def check(self, now: float) -> None:
        """Close the connection where it has made the server wait for too long."""
        state = self.conn.their_state, self.cycle
        if state != self._state:
            self._state, self._since = state, now
        unsent = self.transport.get_write_buffer_size()
        is_stuck = unsent and (self.flow.write_paused or self.transport.is_closing())  # nothing is added meanwhile
        if not is_stuck or unsent < self._unsent or self._stuck_since is None:
            self._stuck_since = now if is_stuck else None
        self._unsent = unsent
        if self._stuck_since is not None and now - self._stuck_since > self.limits.stall_seconds:
            self.closed["slow reader"] += 1
            self.transport.abort()
        elif self.transport.is_closing() or self._lingers:
            return
        elif state[0] is h11.IDLE and now - self._since > self.limits.header_seconds:
            if self.conn.trailing_data[0]:
                self._turn_away_slow("headers", self.limits.header_seconds)
            else:
                self.closed["silent"] += 1
                self.transport.close()
        elif state[0] is h11.SEND_BODY and now - self._since > self.limits.body_seconds:
            if self.cycle.response_started:
                self.closed["slow body"] += 1
                self.transport.abort()
            else:
                self._turn_away_slow("body", self.limits.body_seconds)

    def data_received(self, data: bytes) -> None:
        """Take what came, but of a connection that was turned away."""
        if not self._lingers:
            super().data_received(data)

    def shutdown(self) -> None:
        """End the connection as soon as nothing is being answered."""
        if self._lingers:
            self.transport.abort()
        else:
            super().shutdown()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, or has headers that are too long. Called where the error is handled."""
        if getattr(sys.exc_info()[1], "error_status_hint", 400) == 431:
            message = f"the request's line and headers have more than {MOST_HEADER_BYTES:,} bytes, which are the most"
            self._turn_away("long headers", 431, message)
        else:
            self._turn_away("no HTTP", 400, msg)

    def _turn_away_slow(self, part: str, seconds: float) -> None:
        self._turn_away(f"slow {part}", 408, f"the request's {part} did not come within {seconds:g} seconds")

    def _turn_away(self, reason: str, status: int, message: str) -> None:
        self.closed[reason] += 1
        body = json.dumps(HTTPError(status, message, code=reason.lower().replace(" ", "_")).body()).encode()
        head = f"HTTP/1.1 {status} {_PHRASES[status]}\r\ncontent-type: application/json\r\nconnection: close\r\n"
        head += f"content-length: {len(body)}\r\n" + ("retry-after: 1\r\n" if status == 503 else "") + "\r\n"
        self.transport.write(head.encode() + body)
        if status == 431 and self.transport.can_write_eof():
            self._lingers = True
            self.transport.write_eof()
            self.loop.call_later(_LINGER_SECONDS, self.transport.close)
        else:
            self.transport.close()


class Server(uvicorn.Server):
    """uvicorn's server, which checks its connections, goes on listening while answers end, and survives its signals."""

    def __init__(
        self,
        app: Callable[..., Awaitable[Any]],
        address: tuple[str, int],
        limits: ConnectionLimits,
        finish: Callable[[], Awaitable[None]],
    ) -> None:
        """`finish` waits until what runs has ended, before connections are closed."""
        closed: Counter[str] = Counter()
        protocol = type("Protocol", (WatchedProtocol,), {"limits": limits, "closed": closed})
        super().__init__(
            uvicorn.Config(
                app,
                *address,
                http=protocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                backlog=512,  # taken at a time, so many more than there should be; the system lets others try again
                timeout_keep_alive=5,
                timeout_graceful_shutdown=1,
            )
        )
        self._finish = finish
        #: Where it listens, once that is set.
        self.listens, self.addresses = asyncio.Event(), list[tuple[str, int]]()
        #: How many connections were closed, by why.
        self.closed = closed
        #: The signal that ended it.
        self.ended_by: int | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, on sockets that are there already, or else on the address. Raises RequestError."""
        host, port = self.config.host, self.config.port
        try:
            if sockets is None:
                (await asyncio.get_running_loop().create_server(asyncio.Protocol, host, port)).close()
        except OSError as error:
            raise RequestError(f"the server cannot listen on {host}, port {port}: {error.strerror or error}") from error
        await super().startup(sockets)
        self.addresses = [each.getsockname()[:2] for server in self.servers for each in server.sockets]
        self.listens.set()

    async def on_tick(self, counter: int) -> bool:
        if counter % 2 == 0:  # of ticks of 0.1 s
            self._check()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let what runs end while new requests are told that the server is going; then close all."""
        finishing = asyncio.ensure_future(self._finish())
        while not finishing.done() and not self.force_exit:
            await asyncio.wait([finishing], timeout=0.1)
            self._check()
        finishing.cancel()
        await super().shutdown(sockets)
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """End on SIGINT and SIGTERM, at once on the second of them; they end this server, not the process."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {each: signal.signal(each, self.handle_exit) for each in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for each, handler in previous.items():
                signal.signal(each, handler)

    def handle_exit(self, sig: int, frame: Any) -> None:
        """A signal: the first one ends the server, the next one does not wait for anything."""
        self.force_exit = self.should_exit
        self.should_exit, self.ended_by = True, sig

    def _check(self) -> None:
        now = time.monotonic()
        for connection in list(self.server_state.connections):
            if isinstance(connection, WatchedProtocol):
                connection.check(now)


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
