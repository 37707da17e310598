"""HAProxy and nginx with the configurations of the documentation, in front of servers of this machine."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import subprocess
from collections.abc import Sequence
from http.cookiejar import CookieJar, DefaultCookiePolicy
from pathlib import Path

import httpx
import openai
from http_server import wait_for

CONFIGURATIONS = Path(__file__).parents[2] / "docs" / "configurations"
#: What a proxy's program is called, and where Debian has it, which is not on everybody's path.
PROGRAMS = {name: shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin") for name in ("haproxy", "nginx")}
NAME = "robot.example"
#: nginx's settings outside of the file that is included: temporary files and users are the machine's.
_NGINX = """
worker_processes 1; daemon off; pid {folder}/pid; error_log {folder}/log; {user}
events {{ worker_connections 512; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
    include {folder}/edgellm.conf;
}}
"""


class ProxyProcess:
    """A proxy with the configuration of the documentation, but for addresses, ports and the certificate's place.

    It speaks TLS with a certificate of `NAME`, which its clients check.
    """

    def __init__(self, kind: str, ports: Sequence[int], key: str, folder: Path) -> None:
        """`kind` is "haproxy" or "nginx", `ports` are those of two servers; what it writes is in `folder`."""
        self.kind = kind
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._certificate = _certificate(folder)
        address = f"https://127.0.0.1:{self.port}"
        #: A client of HTTP that asks for `NAME` here, has the key, waits 60 s at most, and keeps
        #: neither connections nor cookies.
        self.client = httpx.Client(
            base_url=address,
            headers={"host": f"{NAME}:{self.port}", "authorization": f"Bearer {key}"},
            verify=ssl.create_default_context(cafile=str(self._certificate)),
            timeout=60,
            limits=httpx.Limits(max_keepalive_connections=0),
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
        )
        #: OpenAI's client, which asks once.
        self.openai = openai.OpenAI(
            base_url=f"{address}/v1", api_key=key, max_retries=0, timeout=60, http_client=self.client
        )
        source = {"haproxy": "haproxy.cfg", "nginx": "nginx.conf"}[kind]
        text = (CONFIGURATIONS / source).read_text(encoding="utf-8")
        replaced = {
            "10.0.0.11:8000": f"127.0.0.1:{ports[0]}",
            "10.0.0.12:8000": f"127.0.0.1:{ports[1]}",
            {"haproxy": "bind :443", "nginx": "listen 443"}[kind]: {
                "haproxy": f"bind 127.0.0.1:{self.port}",
                "nginx": f"listen 127.0.0.1:{self.port}",
            }[kind],
            "/etc/edgellm/robot.example.pem": str(self._certificate),
        }
        for old, new in replaced.items():
            assert old in text, f"{source} has no {old}"
            text = text.replace(old, new)
        program = PROGRAMS[kind]
        assert program is not None
        if kind == "haproxy":
            (folder / "haproxy.cfg").write_text(text)
            command = [program, "-db", "-f", str(folder / "haproxy.cfg")]
        else:
            (folder / "edgellm.conf").write_text(text)
            user = "user root;" if os.geteuid() == 0 else ""
            (folder / "nginx.conf").write_text(_NGINX.format(folder=folder, user=user))
            command = [program, "-p", str(folder), "-e", str(folder / "log"), "-c", str(folder / "nginx.conf")]
        self._log = folder / "output"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        wait_for(self._listens, 20)

    def connect(self, *protocols: str, address: str = "") -> ssl.SSLSocket:
        """A connection from an address of this machine, for which the client names the releases of HTTP that it
        speaks."""
        context = ssl.create_default_context(cafile=str(self._certificate))
        context.set_alpn_protocols(protocols)
        return context.wrap_socket(
            socket.create_connection(("127.0.0.1", self.port), timeout=30, source_address=(address, 0)),
            server_hostname="127.0.0.1",
        )

    def close(self) -> None:
        """End the proxy."""
        self.client.close()
        self.process.terminate()
        try:
            self.process.wait(10)
        finally:
            self.process.kill()

    def said(self) -> str:
        """What it wrote so far."""
        return self._log.read_text(errors="replace")

    def _listens(self) -> bool:
        assert self.process.poll() is None, self.said()
        try:
            socket.create_connection(("127.0.0.1", self.port)).close()
        except ConnectionRefusedError:
            return False
        return True


def _certificate(folder: Path) -> Path:
    """A certificate of `NAME` and this machine with its key, signed by itself, in one file."""
    path, key = folder / "certificate.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        + ["-days", "2", "-subj", f"/CN={NAME}", "-addext", f"subjectAltName=DNS:{NAME},IP:127.0.0.1"]
        + ["-keyout", str(key), "-out", str(path)],
        check=True,
        capture_output=True,
    )
    with path.open("ab") as joined:
        joined.write(key.read_bytes())
    return path
