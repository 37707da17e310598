"""Who a client is, and what one may have of a server that others ask, too."""

from __future__ import annotations

import re
from contextlib import ExitStack
from typing import Any

import pytest
from http_server import chat_body, raw_request, read_to_end, running, wait_for

from edgellm.errors import RequestError
from edgellm.http.guard import Guard

PROXIES = ["127.0.0.1", "10.1.0.0/24", "2001:db8:9::/48"]


def scope(peer: str, *headers: tuple[str, str]) -> dict[str, Any]:
    """What a server is told of a request."""
    named = [(name.encode(), value.encode()) for name, value in headers]
    return {"client": (peer, 4711) if peer else None, "headers": named}


@pytest.mark.parametrize(
    ("peer", "lines", "expected"),
    [
        ("192.0.2.7", [], "192.0.2.7"),
        ("192.0.2.7", ["198.51.100.1"], "192.0.2.7"),  # no proxy's word
        ("127.0.0.1", [], "127.0.0.1"),
        ("127.0.0.1", ["198.51.100.1"], "198.51.100.1"),
        ("127.0.0.1", ["203.0.113.9, 198.51.100.1"], "198.51.100.1"),  # what the client wrote itself stands before
        ("127.0.0.1", ["203.0.113.9", "198.51.100.1, 10.1.0.4"], "198.51.100.1"),  # two proxies, two lines
        ("127.0.0.1", ["10.1.0.5,10.1.0.4"], "10.1.0.5"),  # nobody but proxies
        ("::ffff:127.0.0.1", ["::ffff:198.51.100.1"], "198.51.100.1"),
        ("2001:db8:9:1::1", ["2001:DB8::00AB"], "2001:db8::ab"),
        ("127.0.0.1", ["198.51.100.1:4711"], "198.51.100.1"),
        ("127.0.0.1", ["[2001:db8::ab]:4711"], "2001:db8::ab"),
        ("127.0.0.1", ["198.51.100.1, unknown"], "127.0.0.1"),  # what it hands on as its word is none
        ("127.0.0.1", ["198.51.100.1,, 10.1.0.4"], "10.1.0.4"),
        ("", ["198.51.100.1"], ""),  # a socket without addresses
    ],
)
def test_the_address_that_asks(peer: str, lines: list[str], expected: str) -> None:
    headers = [("x-forwarded-for", line) for line in lines]
    assert Guard("127.0.0.1", proxies=PROXIES).address(scope(peer, *headers)) == expected
    assert Guard("127.0.0.1").client(scope(peer, *headers)) == Guard("127.0.0.1").client(scope(peer))


def test_clients_are_keys_addresses_and_networks_of_ipv6() -> None:
    def client(address: str) -> str:
        return Guard("127.0.0.1").client(scope(address))

    assert client("192.0.2.7") != client("192.0.2.8")
    assert client("2001:db8::1") == client("2001:db8::ffff:0:0:1") == "2001:db8::/64"
    assert client("2001:db8::1") != client("2001:db8:0:1::1")
    assert client("fe80::1%eth0") != client("fe80::2%eth0")
    keyed, keys = Guard("127.0.0.1", keys=["a", "b"]), [("authorization", f"Bearer {key}") for key in "ab"]
    ours, theirs = (keyed.client(scope("192.0.2.7", key)) for key in keys)
    assert keyed.client(scope("192.0.2.8", keys[0])) == ours != theirs


@pytest.mark.parametrize("wrong", ["proxy.example", "10.1.0.4/24", "10.1.0.0/33", ""])
def test_proxies_that_are_no_addresses(wrong: str) -> None:
    with pytest.raises(RequestError, match=r"--trusted-proxy is .*: expected an address, or a network"):
        Guard("127.0.0.1", proxies=[wrong])


@pytest.mark.parametrize("name", ["http://robot.local", "robot.local:8000", "robot.local/", "[::1]", "*", "a b", ""])
def test_hosts_that_no_request_could_name(name: str) -> None:
    with pytest.raises(RequestError, match=r"--allowed-host is .*: expected a name alone, such as robot.local"):
        Guard("127.0.0.1", names=[name])


@pytest.mark.parametrize("origin", ["robot.local", "https://robot.local/page", "*", "https://", ""])
def test_origins_that_no_browser_would_name(origin: str) -> None:
    with pytest.raises(RequestError, match=r"--allowed-origin is .*: expected scheme and host"):
        Guard("127.0.0.1", origins=[origin])


def test_hosts_and_origins_as_clients_name_them() -> None:
    origins = ("https://Robot.local:8443/", "null", "app://obsidian.md", "http://[::1]:8000")
    guard = Guard("127.0.0.1", names=["Robot_1.local", "10.0.0.7", "fe80::1"], origins=origins)
    guard.check("/health", {"host": "robot_1.local:8000", "origin": "https://robot.local:8443"})
    guard.check("/health", {"host": "[fe80::1]:8000", "origin": "app://obsidian.md"})


def test_one_client_s_many_requests_keep_another_s_waiting_for_no_more_than_one() -> None:
    """Clients behind a proxy, whom the log tells apart, too."""
    options = ("--trusted-proxy", "127.0.0.1", "--queue-limit", 199, "--log-level", "info", "--log-format", "json")
    body = raw_request(chat_body(ignore_eos=True, max_tokens=50, temperature=0))

    def of_client(address: str) -> bytes:
        return body.replace(b"\r\n", f"\r\nX-Forwarded-For: {address}\r\nConnection: close\r\n".encode(), 1)

    with running(*options) as server, ExitStack() as opened:

        def seconds(address: str) -> float:
            began = server.processor_seconds()
            with server.connect() as connection:
                connection.sendall(of_client(address))
                assert read_to_end(connection).startswith(b"HTTP/1.1 200")
            return server.processor_seconds() - began

        alone = sorted(seconds("192.0.2.2") for _ in range(3))[1]
        for _ in range(80):
            opened.enter_context(server.connect()).sendall(of_client("192.0.2.1"))
        wait_for(lambda: server.metric("requests_waiting") > 60, 30)
        together = seconds("192.0.2.2")  # the end of another's answer and its own, beside 80 bodies that are read
        assert server.metric("requests_waiting") > 40
        opened.close()
        assert together < 3 * alone + 0.2, (alone, together)
        wait_for(lambda: server.metric("requests_waiting") == 0)
        lines = [line for line in server.said.splitlines() if "/v1/chat/completions" in line]
        told = [re.search(r'"client": "(.*?)"', line) for line in lines]
        assert {each[1] for each in told if each} == {"192.0.2.1", "192.0.2.2"}
