"""Who a client is, and what one may have of a server that others ask, too."""

from __future__ import annotations

import pytest
from starlette.datastructures import Headers

from edgellm.errors import RequestError
from edgellm.http.guard import Guard

PROXIES = ["127.0.0.1", "10.1.0.0/24", "2001:db8:9::/48"]


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
    headers = Headers(raw=[(b"x-forwarded-for", line.encode()) for line in lines])
    assert Guard.of("127.0.0.1", proxies=PROXIES).address(peer, headers) == expected
    assert Guard.of("127.0.0.1").client(peer, headers) == Guard.of("127.0.0.1").client(peer, Headers())


def test_clients_are_keys_addresses_and_networks_of_ipv6() -> None:
    guard, none = Guard.of("127.0.0.1"), Headers()
    assert guard.client("192.0.2.7", none) != guard.client("192.0.2.8", none)
    assert guard.client("2001:db8::1", none) == guard.client("2001:db8::ffff:0:0:1", none) == "2001:db8::/64"
    assert guard.client("2001:db8::1", none) != guard.client("2001:db8:0:1::1", none)
    assert guard.client("fe80::1%eth0", none) != guard.client("fe80::2%eth0", none)
    keyed = Guard.of("127.0.0.1", keys=["a", "b"])
    ours, theirs = (Headers({"authorization": f"Bearer {key}"}) for key in "ab")
    assert keyed.client("192.0.2.7", ours) == keyed.client("192.0.2.8", ours) != keyed.client("192.0.2.7", theirs)


@pytest.mark.parametrize("wrong", ["proxy.example", "10.1.0.4/24", "10.1.0.0/33", ""])
def test_proxies_that_are_no_addresses(wrong: str) -> None:
    with pytest.raises(RequestError, match=r"--trusted-proxy is .*: expected an address, or a network"):
        Guard.of("127.0.0.1", proxies=[wrong])
