"""Many clients at a time, well-behaved and not, and a machine that fails: answers stay what they are alone, none is
lost, and nothing is left behind."""

from __future__ import annotations

import socket
import statistics
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from http_server import ServerProcess, chat_body, raw_request, wait_for
from load_clients import BAD_ACTS, Clients
from load_requests import Asked, all_requests, ask
from small_disk import fill, mounted

from edgellm import LLM, SamplingParams
from edgellm.opened_model import SHIPPED_MODEL

#: Starts a program that can write no file, as on a disk that is full.
_NO_FILES = ("bash", "-c", 'ulimit -f 0; exec "$0" "$@"')


@pytest.mark.parametrize(
    ("count", "seconds"), [(8, 1), *(pytest.param(64, each, marks=pytest.mark.slow) for each in (20, 300, 1800))]
)
def test_clients_of_all_kinds(tmp_path: Path, count: int, seconds: int) -> None:
    """For so long, and until each kind has come: the disk is full, and a snapshot is removed under the server. Then it
    is killed while it answers, started anew, and told to end while it answers. Prints what was seen (pytest -s)."""
    disk, requests = tmp_path / "disk", all_requests()
    kinds, least = {*BAD_ACTS, *(each.kind for each in requests)}, 5 if seconds > 2 else 0
    with ExitStack() as opened:
        problem = opened.enter_context(mounted(disk, 16))
        snapshot = disk / "robot.safetensors"
        with LLM(SHIPPED_MODEL, backend="numpy") as llm:
            system = llm.default_system_prompt
            llm.cache_system_prompt(system, save=snapshot)
            in_python = drawn_in_python(llm)
        if problem is None:
            fill(disk)
        files = files_in(disk)
        options = ("--queue-limit", count, "--trusted-proxy", "127.0.0.1", "--shutdown-seconds", 60)
        about = {"environment": {"EDGELLM_CACHE_DIR": str(disk)}, "starting": () if problem is None else _NO_FILES}
        server = ServerProcess(*options, "--system-cache", snapshot, **about).wait_until_ready()
        servers = [server]
        opened.callback(lambda: [each.process.kill() or each.process.wait() for each in servers])
        expected = {each.key: ask(server, each, False) for each in requests}
        assert len({str(each) for each in expected.values()}) > len(requests) - 3  # one for another would show
        assert in_python.items() <= {key: answer.text for key, answer in expected.items()}.items()

        memory = [resident(server)]
        clients = Clients(server, requests, expected, count)
        time.sleep(seconds / 2)
        memory.append(resident(server))
        snapshot.unlink()
        time.sleep(seconds / 2)
        until = time.monotonic() + 60
        while min(clients.seen[each] for each in kinds) <= least and not clients.wrong and time.monotonic() < until:
            time.sleep(0.05)
        memory.append(resident(server))
        clients.stop()
        assert reused_after_an_adapter(server, requests) > 50, "the snapshot is of no use any more"
        left, failed = left_behind(server), server.metric("requests_ended_total", outcome="failed")
        waited = sorted(clients.first_bytes)
        middle, late = waited[len(waited) // 2], waited[len(waited) * 99 // 100]
        wrong = [str(each)[:300] for each in clients.wrong]
        print(
            f"\n{count} clients for {seconds} s: {dict(sorted(clients.seen.items()))}; wrong: {wrong}; "
            f"failed: {failed:.0f}; left behind: {left:.0f}; memory at the start, at half, at the end: {memory} MiB; "
            f"first byte: {middle:.3f} s (p50), {late:.3f} s (p99)"
        )
        assert clients.wrong == [] and left == failed == 0 and "Traceback" not in server.said
        assert min(clients.seen[each] for each in kinds) > least
        assert memory[2] - memory[1] < 24

        clients = Clients(server, requests, expected, count)
        wait_for(lambda: clients.first_bytes and server.metric("requests_waiting") > 2, 60)
        clients.lose()
        server.process.kill()
        server.process.wait()
        assert files_in(disk) == files - {snapshot}, "a file is half-written"
        server = ServerProcess(*options, "--port", server.port, "--system", system, **about).wait_until_ready()
        servers.append(server)
        before = len(clients.first_bytes)
        clients.found(server)
        wait_for(lambda: clients.wrong or len(clients.first_bytes) > before + count / 2, 60)

        clients.end()
        server.terminate()
        assert server.process.wait(90) == 0, server.said
        clients.stop()
        print(f"killed, started anew, and told to end: {dict(sorted(clients.seen.items()))}; wrong: {clients.wrong}")
        assert clients.wrong == [] and "Traceback" not in server.said
        assert clients.seen["told that it ends"] and clients.seen["lost"]


def drawn_in_python(llm: LLM) -> dict[str, str]:
    """The texts of all chats as Python draws them, by `Asked.key`."""
    found = {}
    for asked in all_requests():
        if asked.kind == "chat":
            params = {name: asked.body[name] for name in ("temperature", "seed", "max_tokens")}
            found[asked.key] = llm.chat(asked.body["messages"], SamplingParams(**params)).text
    return found


def reused_after_an_adapter(server: ServerProcess, requests: list[Asked]) -> float:
    """How many tokens of a chat's prompt are reused where the only slot has rows of an adapter, which do not help: they
    are a snapshot's."""
    ask(server, next(each for each in requests if each.kind == "adapter"), False)
    before = server.metric("prefill_reused_tokens_total")
    ask(server, requests[0], False)
    return server.metric("prefill_reused_tokens_total") - before


def files_in(folder: Path) -> set[Path]:
    """The files in a folder and its folders."""
    return {each for each in folder.rglob("*") if each.is_file()}


def resident(server: ServerProcess) -> float:
    """MiB of a server's memory."""
    return round(server.metric("resident_memory_bytes") / 2**20, 1)


def left_behind(server: ServerProcess, seconds: float = 10.0) -> float:
    """What a server still holds so many seconds after its clients went away, or as soon as that is nothing: requests,
    bytes of bodies, and answers and connections but for those of the one who asks."""
    until, names = time.monotonic() + seconds, ("requests_running", "requests_waiting", "http_body_bytes")
    while True:
        found = sum(map(server.metric, (*names, "http_answers", "http_connections")))
        if found == 2 or time.monotonic() > until:
            return found - 2
        time.sleep(0.05)


def first_byte(server: ServerProcess) -> float:
    """Seconds until the first byte of an answer on a connection that is open already."""
    with socket.create_connection((server.host, server.port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        request = raw_request(chat_body(stream=True, max_tokens=2))
        started = time.perf_counter()
        connection.sendall(request)
        assert connection.recv(1) == b"H"
        taken = time.perf_counter() - started
        while b"[DONE]" not in connection.recv(1 << 16):
            pass
        return taken


@pytest.mark.slow  # a measurement: nothing else may run beside it
def test_the_first_byte_comes_as_soon_as_in_python(server: ServerProcess, llm: LLM) -> None:
    messages, params = chat_body()["messages"], SamplingParams(max_tokens=2)

    def first_chunk() -> float:
        started = time.perf_counter()
        answer = llm.stream_chat(messages, params)
        answer.next_chunk()
        taken = time.perf_counter() - started
        answer.result()
        return taken

    python, http = [], []
    for _ in range(40):  # by turns, so that what else the machine does hits both
        python.append(first_chunk())
        http.append(first_byte(server))
    added = statistics.median(http) - statistics.median(python)
    print(f"first byte {statistics.median(http) * 1e3:.2f} ms, of Python {statistics.median(python) * 1e3:.2f} ms")
    assert added < max(0.003, 0.45 * statistics.median(python))  # a slow machine takes longer for both
