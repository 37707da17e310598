"""A server that systemd starts: the socket that it hands over, and what the server tells it, on a socket of these
tests."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from http_server import ServerProcess, running, wait_for

from edgellm.asynchronous import AsyncLLM
from edgellm.errors import RequestError
from edgellm.http.app import Service
from edgellm.http.connections import Notifier, handed_socket
from edgellm.http.fields import ServedModel
from edgellm.http.guard import Guard
from edgellm.opened_model import SHIPPED_MODEL

#: Starts a program as systemd does: its number stands in LISTEN_PID, the socket {socket} is its descriptor 3.
_HANDING = 'export LISTEN_PID=$$ LISTEN_FDS=1; exec "$0" "$@" 3<&{socket}'


class Manager:
    """Stands for systemd: a socket that is told of a service, in `folder` or, without, by an abstract name."""

    def __init__(self, folder: Path | None) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("" if folder is None else str(folder / "notify"))  # without a name the system finds one
        name = self._socket.getsockname()
        self.address = name if isinstance(name, str) else "@" + name[1:].decode()

    def told(self, seconds: float = 30.0) -> dict[str, str] | None:
        """The next datagram; None where none comes in time."""
        self._socket.settimeout(seconds)
        try:
            return dict(line.split("=", 1) for line in self._socket.recv(4096).decode().split("\n"))
        except TimeoutError:
            return None

    def empty(self) -> None:
        """Forget what came."""
        while self.told(0.001) is not None:
            pass

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(params=["file", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Manager]:
    made = Manager(tmp_path if request.param == "file" else None)
    yield made
    made.close()


def test_a_server_says_how_it_is_to_its_end(manager: Manager) -> None:
    told = {"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "600000"}
    with running("--backend", "numpy", environment=told) as server:
        ready = manager.told()
        assert ready is not None and ready["READY"] == "1" and ready["STATUS"].startswith("Serves shipped")
        assert [manager.told(), manager.told()] == [{"WATCHDOG": "1"}] * 2
        server.process.send_signal(signal.SIGSTOP)  # a loop that goes on no more says nothing
        time.sleep(0.1)
        manager.empty()
        assert manager.told(0.8) is None
        server.process.send_signal(signal.SIGCONT)
        assert manager.told() == {"WATCHDOG": "1"}
        server.terminate()
        assert wait_for(lambda: (manager.told() or {}).get("STOPPING")) == "1"


def test_a_model_that_cannot_be_opened_is_never_ready(manager: Manager, tmp_path: Path) -> None:
    engines = tmp_path / "engines"
    engines.mkdir()
    for file in SHIPPED_MODEL.iterdir():
        (engines / file.name).symlink_to(file)
    (engines / "tokenizer.json").unlink()
    (engines / "tokenizer.json").write_text("{}")
    server = ServerProcess(engines, environment={"NOTIFY_SOCKET": manager.address})
    assert server.process.wait(60) == 1
    assert manager.told(1) == {"STOPPING": "1"} and manager.told(0.001) is None


def test_nobody_is_told_where_nobody_listens(tmp_path: Path) -> None:
    told = {"NOTIFY_SOCKET": str(tmp_path / "nobody"), "WATCHDOG_USEC": "600000"}
    with running(environment=told) as server:
        assert "systemd was not told READY=1" in wait_for(lambda: "READY" in server.said and server.said)


def test_a_server_takes_the_socket_that_is_handed_over() -> None:
    """Who connects before the server has begun waits for it; address and port are the socket's, whatever is named."""
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.socket() as early:
        early.settimeout(60)
        early.connect(listening.getsockname())
        early.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        number = listening.fileno()
        started = ["bash", "-c", _HANDING.format(socket=number)]
        with running("--host", "0.0.0.0", starting=started, pass_fds=[number]) as server:
            assert (server.host, server.port) == listening.getsockname()
            assert early.recv(1 << 16).startswith(b"HTTP/1.1 503")  # it was loading then
            assert server.chat()[0] == 200
        assert listening.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1  # the next server has it


def test_a_socket_for_other_machines_needs_a_key() -> None:
    with socket.create_server(("0.0.0.0", 0)) as listening:
        number = listening.fileno()
        with pytest.raises(AssertionError, match=r"0\.0\.0\.0 is an address for other machines"):
            ServerProcess(starting=["bash", "-c", _HANDING.format(socket=number)], pass_fds=[number])


def test_sockets_that_are_not_for_this_process_or_not_to_be_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LISTEN_FDS", "1")
    monkeypatch.setenv("LISTEN_PID", "1")
    assert handed_socket() is None and "LISTEN_FDS" not in os.environ
    monkeypatch.setenv("LISTEN_FDS", "2")
    monkeypatch.setenv("LISTEN_PID", str(os.getpid()))
    with pytest.raises(RequestError, match="hands over 2 sockets: expected one"):
        handed_socket()


def test_a_datagram_socket_is_refused() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handed:
        number = handed.fileno()
        with pytest.raises(AssertionError, match="takes no TCP connections: expected ListenStream=PORT"):
            ServerProcess(starting=["bash", "-c", _HANDING.format(socket=number)], pass_fds=[number])


def test_a_watchdog_of_another_process_is_none_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for process, seconds in (("1", 0.0), (str(os.getpid()), 2.5)):
        monkeypatch.setenv("NOTIFY_SOCKET", "@nobody")
        monkeypatch.setenv("WATCHDOG_USEC", "2500000")
        monkeypatch.setenv("WATCHDOG_PID", process)
        assert Notifier().watchdog_seconds == seconds
    assert "NOTIFY_SOCKET" not in os.environ  # a child that told systemd something would speak for this process


def test_a_model_s_thread_that_hangs_does_not_work() -> None:
    async def hang() -> None:
        llm = AsyncLLM(backend="numpy")
        service = Service(llm, ServedModel("shipped"), Guard())
        await service.open()
        assert service.works(0.001)  # who waits for work is at nothing
        release = threading.Event()
        hanging = asyncio.ensure_future(llm.call(lambda _: release.wait()))
        await asyncio.sleep(0.3)
        assert not service.works(0.2) and service.works(60)
        release.set()
        await hanging
        while not service.works(0.2):
            await asyncio.sleep(0.01)
        await llm.close()

    asyncio.run(asyncio.wait_for(hang(), 60))
