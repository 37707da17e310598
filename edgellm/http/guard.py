"""Who may ask: hosts, origins, keys. It stands before everything else that the server does."""

from __future__ import annotations

import hmac
import ipaddress
import re
import socket
from collections.abc import Collection, Mapping
from hashlib import sha256
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Scope

from edgellm.errors import RequestError, shown
from edgellm.http.errors import HTTPError
from edgellm.http.page import PATHS

#: Whoever looks after the server needs no key to see whether it is well, nor a browser to load a page.
_WITHOUT_KEY = ("/health", *PATHS)
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
#: A name in a Host header, without its port; and an origin as browsers write it, or with a slash at its end.
_NAME = re.compile(r"[\w.-]+")
_ORIGIN = re.compile(r"[A-Za-z][\w+.-]*://[^/\s]+/?")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def _address(name: str) -> Address | None:
    """The address that a name is, one of IPv4 within IPv6 as that of IPv4; None where it is none."""
    try:
        found = ipaddress.ip_address(name)
    except ValueError:
        return None
    return getattr(found, "ipv4_mapped", None) or found


def is_loopback(host: str) -> bool:
    """Whether an address, or a name that stands for one on every machine, is this machine's own alone."""
    address = _address(host)
    return host.lower() == "localhost" if address is None else address.is_loopback


class Guard:
    """Refuses requests by their headers.

    A page that a browser shows can make a name of its own mean this machine and ask in that name: only requests for
    names that mean this server are answered (`hosts`; where `any_address`, every address is one, which no page can make
    its own). Requests that a page sends are answered where the page is from this server, or from one of `origins`.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        names: Collection[str] = (),
        origins: Collection[str] = (),
        keys: Collection[str] = (),
        proxies: Collection[str] = (),
    ) -> None:
        """Of a server that listens on `host`, is known by further `names`, lets pages of `origins` ask, and trusts
        `proxies`, addresses or networks, in what they say of a client's address. RequestError for what is none."""
        for name in names:
            if not _NAME.fullmatch(name) and _address(name) is None:  # no Host header would ever be it
                raise RequestError(f"--allowed-host is {shown(name)}: expected a name alone, such as robot.local")
        for origin in origins:
            if origin != "null" and not _ORIGIN.fullmatch(origin):
                raise RequestError(
                    f"--allowed-origin is {shown(origin)}: expected scheme and host, such as https://robot.local:8443"
                )
        self.any_address = not is_loopback(host)
        self.hosts = {*LOCAL_NAMES, host.lower(), *(name.lower() for name in names)}
        self.hosts |= {socket.gethostname().lower()} if self.any_address else set()
        self.keys = [sha256(key.encode()).digest() for key in keys]
        self.origins = {each.lower().rstrip("/") for each in origins}
        self.proxies = [_network(each) for each in proxies]

    def check(self, path: str, headers: Mapping[str, str]) -> None:
        """Raise HTTPError for a request that is not to be answered."""
        host = headers.get("host", "")
        name = host_name(host)
        if name is None or not (name in self.hosts or (self.any_address and _address(name) is not None)):
            asked, expected = shown(host)[:200], ", ".join(sorted(self.hosts))
            message = f"the host {asked} is not one that this server answers for: expected {expected}"
            raise HTTPError(421, f"{message} (--allowed-host adds one)", code="wrong_host")
        origin = headers.get("origin")
        own = f"http://{host.lower()}", f"https://{host.lower()}"
        if origin is not None and origin.lower().rstrip("/") not in (*self.origins, *own):
            message = f"pages of {shown(origin)[:200]} may not ask this server (--allowed-origin lets them)"
            raise HTTPError(403, message, code="wrong_origin")
        given = sha256(_given_key(headers).encode("latin-1", "replace")).digest()
        matches = [hmac.compare_digest(given, each) for each in self.keys]  # all of them, whichever it is
        if self.keys and path not in _WITHOUT_KEY and not any(matches):
            message = "the key is missing or wrong: expected the header Authorization: Bearer KEY, or x-api-key: KEY"
            raise HTTPError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})

    def address(self, scope: Scope) -> str:
        """The address that asks: that of the connection's other end or, where this is a trusted proxy, the last one in
        X-Forwarded-For that is none: what stands before that one, anybody can have written. "" where there is none."""
        peer: str = (scope.get("client") or ("",))[0]
        address = _address(peer)
        lines = Headers(scope=scope).getlist("x-forwarded-for")
        named = [name.strip() for line in lines for name in line.split(",")]
        while address is not None and named and any(address in network for network in self.proxies):
            name = named.pop()
            before = _address(name) or _address(host_name(name) or "")  # some write a port, too
            if before is None:
                break
            address = before
        return peer if address is None else str(address)

    def client(self, scope: Scope) -> str:
        """Who asks, as far as one may have no more than another: by the key, if there are any, else by the address."""
        if self.keys:
            return _given_key(Headers(scope=scope))
        found = self.address(scope)
        address = _address(found)
        if not isinstance(address, ipaddress.IPv6Address) or address.is_link_local:  # all of a link are of one network
            return found
        return str(ipaddress.IPv6Network((int(address), 64), strict=False))  # a client chooses the other bits itself

    def sharing(self, headers: Mapping[str, str]) -> dict[str, str]:
        """The headers that let a page of another, allowed origin read an answer."""
        origin = headers.get("origin", "")
        if origin.lower().rstrip("/") not in self.origins:
            return {"vary": "origin"} if self.origins else {}
        told = "edgellm-ignored, edgellm-dropped-messages, retry-after"
        return {"access-control-allow-origin": origin, "access-control-expose-headers": told, "vary": "origin"}


def _given_key(headers: Mapping[str, str]) -> str:
    """The key of a request; "" where it has none. Clients of Anthropic's API may send theirs apart."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return headers.get("x-api-key") or (key.strip() if scheme.lower() == "bearer" else "")


def host_name(host: str) -> str | None:
    """The name or address in a Host header, without its port; None for what is none."""
    try:
        parts = urlsplit(f"//{host}")
        _ = parts.port
    except ValueError:
        return None
    return parts.hostname if parts.hostname and parts.netloc == host and "@" not in host else None


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    try:
        return ipaddress.ip_network(text)
    except ValueError as error:
        raise RequestError(
            f"--trusted-proxy is {shown(text)}: expected an address, or a network such as 10.0.0.0/24 ({error})"
        ) from error
