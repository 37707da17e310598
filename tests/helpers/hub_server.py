"""A server of this machine that answers as the hub does: repositories of files at commits, and what can go wrong."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

TOKEN = "hf_of_the_tests"
_INFO = re.compile(r"/api/models/([\w.-]+/[\w.-]+)/revision/([^/]+)")
_TREE = re.compile(r"/api/models/([\w.-]+/[\w.-]+)/tree/([^/]+)")
_FILE = re.compile(r"/([\w.-]+/[\w.-]+)/resolve/([^/]+)/(.+)")


def is_large(file: str) -> bool:
    """Whether the hub keeps a file by its SHA-256, as it keeps weights."""
    return file.endswith((".safetensors", ".gguf", ".bin"))


def digest_of(file: str, data: bytes) -> str:
    """The digest under which the hub knows a file: its SHA-256, or git's."""
    if is_large(file):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclass
class Repository:
    """Files by commit, and commits by branch or tag; `access` is "all", "token" (private) or "gated"."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    revisions: dict[str, str] = field(default_factory=dict)
    access: str = "all"

    def commit(self, files: Mapping[str, bytes], *revisions: str) -> str:
        """Add a commit that these revisions (by default main) are at from now on."""
        listed = json.dumps({name: digest_of(name, data) for name, data in files.items()}, sort_keys=True)
        name = hashlib.sha1(f"{len(self.commits)} {listed}".encode()).hexdigest()
        self.commits[name] = dict(files)
        self.revisions |= dict.fromkeys(revisions or ("main",), name)
        return name

    def commit_folder(self, folder: Path, *revisions: str, **more: bytes) -> str:
        """Add a commit of all files of a folder."""
        files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        return self.commit(files | more, *revisions)


class HubServer(ThreadingHTTPServer):
    """The hub; `requests` are (method, path, range or "") of all that came.

    `cuts` are bytes after which the connection ends on GETs of a file, one a time; `wrong` is what is served in place
    of a file's content, `said_sizes` the size that its headers name; `moved` are new names of repositories by old ones.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, Repository] = {}
        self.requests: list[tuple[str, str, str]] = []
        self.cuts: dict[str, list[int]] = {}
        self.wrong: dict[str, bytes] = {}
        self.said_sizes: dict[str, int] = {}
        self.moved: dict[str, str] = {}

    @property
    def url(self) -> str:
        """Its address, as HF_ENDPOINT names it."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def repository(self, name: str) -> Repository:
        """A repository, new and empty where there is none."""
        return self.repositories.setdefault(name, Repository())

    def downloads(self) -> list[str]:
        """The files that were asked for by GET, in this order."""
        found = (_FILE.fullmatch(path) for method, path, _ in self.requests if method == "GET")
        return [match[3] for match in found if match]


class _Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing."""

    def _answer(self) -> None:
        path = self.path.partition("?")[0]
        self.server.requests.append((self.command, path, self.headers.get("Range", "")))
        info, tree, file = (pattern.fullmatch(path) for pattern in (_INFO, _TREE, _FILE))
        match = info or tree or file
        if match and match[1] in self.server.moved:
            place = self.path.replace(match[1], self.server.moved[match[1]], 1)
            return self._send(307, b"Temporary Redirect", {"Location": place})
        repository = self.server.repositories.get(match[1]) if match else None
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token and token != TOKEN:
            return self._refuse(401, "", "Invalid credentials in Authorization header")
        if match is None or repository is None or (repository.access == "token" and not token):
            return self._refuse(404 if token else 401, "RepoNotFound", "Repository not found")
        if repository.access == "gated" and file:
            return self._refuse(403, "GatedRepo", "Access to the model is restricted")
        commit = repository.revisions.get(match[2], match[2])
        if commit not in repository.commits:
            return self._refuse(404, "RevisionNotFound", "Invalid rev id")
        files = repository.commits[commit]
        if info:
            return self._send(200, json.dumps(_model_info(match[1], commit, files)).encode())
        if tree:
            entries = [_tree_entry(name, data) for name, data in files.items()]
            return self._send(200, json.dumps(entries).encode(), {"Content-Type": "application/json"})
        assert file is not None
        if file[3] not in files:
            return self._refuse(404, "EntryNotFound", "Entry not found")
        return self._send_file(file[3], files[file[3]], commit)

    def _refuse(self, status: int, code: str, message: str) -> None:
        headers = {"X-Error-Code": code} if code else {}
        self._send(status, json.dumps({"error": message}).encode(), {**headers, "X-Error-Message": message})

    def _send_file(self, name: str, data: bytes, commit: str) -> None:
        headers = {"X-Repo-Commit": commit, "ETag": f'"{digest_of(name, data)}"', "Accept-Ranges": "bytes"}
        said = self.server.said_sizes.get(name, len(data))
        if is_large(name):
            headers |= {"X-Linked-Etag": headers["ETag"], "X-Linked-Size": str(said)}
        data = self.server.wrong.get(name, data)
        span, status = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")), 200
        if span and self.command == "GET":
            headers["Content-Range"] = f"bytes {span[1]}-{len(data) - 1}/{len(data)}"
            status, data = 206, data[int(span[1]) :]
        cuts = self.server.cuts.get(name) if self.command == "GET" else None
        length = said if self.command == "HEAD" and not is_large(name) else len(data)
        self._send(status, data[: cuts.pop(0)] if cuts else data, headers, length)
        self.close_connection = self.close_connection or cuts is not None

    def _send(self, status: int, data: bytes, headers: Mapping[str, str] | None = None, length: int = -1) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data) if length < 0 else length))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)


def _model_info(name: str, commit: str, files: Mapping[str, bytes]) -> dict[str, Any]:
    siblings = []
    for file, data in files.items():
        entry = _tree_entry(file, data)
        lfs = (
            {"lfs": {"sha256": digest_of(file, data), "size": len(data), "pointerSize": 134}} if is_large(file) else {}
        )
        siblings.append({"rfilename": file, "size": len(data), "blobId": entry["oid"], **lfs})
    return {"id": name, "sha": commit, "siblings": siblings, "tags": []}


def _tree_entry(file: str, data: bytes) -> dict[str, Any]:
    """An entry of the listing of a commit; git's own digest of a large file is that of a pointer to it."""
    if not is_large(file):
        return {"type": "file", "path": file, "size": len(data), "oid": digest_of(file, data)}
    lfs = {"oid": digest_of(file, data), "size": len(data), "pointerSize": 134}
    return {"type": "file", "path": file, "size": len(data), "oid": hashlib.sha1(data).hexdigest(), "lfs": lfs}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A hub that this process and its children ask, with caches of this test's own."""
    from huggingface_hub import constants

    server = HubServer()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    home = tmp_path / "hf"
    for name, value in {"HF_ENDPOINT": server.url, "HF_HOME": str(home)}.items():
        monkeypatch.setenv(name, value)
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    # What its library read of the environment when it was imported, by whichever test was first.
    for name, value in {
        "ENDPOINT": server.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}",
        "HF_HUB_CACHE": str(home / "hub"),
        "HF_TOKEN_PATH": str(home / "token"),
        "HF_HUB_OFFLINE": False,
    }.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setenv("EDGELLM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    yield server
    server.shutdown()
    server.server_close()
