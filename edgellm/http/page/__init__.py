"""The page at the server's root: a chat, and what an operator watches. Its files are sent as they are."""

from __future__ import annotations

from importlib.resources import files
from types import MappingProxyType

from starlette.requests import Request
from starlette.responses import Response

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_BESIDE = ("page.css", "chat.js", "pictures.js", "server.js", "text.js")
#: The files by the paths that they are asked for.
PATHS = MappingProxyType({"/": "page.html"} | {f"/{name}": name for name in _BESIDE})
#: Nothing comes from elsewhere, nothing goes elsewhere, and no text is ever made a program or a document.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
    "trusted-types 'none'"
)
_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": POLICY,
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(self), microphone=(), geolocation=()",
    "referrer-policy": "no-referrer",
}


async def page_file(request: Request) -> Response:
    """A file of the page, for which no key is asked."""
    name = PATHS[request.url.path]
    content = files(__name__).joinpath(name).read_bytes()
    return Response(content, headers=_HEADERS, media_type=_TYPES[name.rpartition(".")[2]])
