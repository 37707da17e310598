"""What stands around each endpoint: who may ask, bodies with a limit, clients that go away, errors as JSON."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from edgellm.errors import did_you_mean
from edgellm.http.errors import OLLAMA, TRANSCRIPTIONS, HTTPError, http_error, later

logger = logging.getLogger("edgellm.http")

#: Headers that pages of other, allowed origins may send.
_HEADERS = "authorization, content-type, x-session-id, x-api-key, anthropic-version, anthropic-beta"
#: What a header cannot have, and how long one of this server may be.
_NO_HEADER, _LONGEST_HEADER = re.compile(r"[^\x20-\x7e]"), 2000
#: Of a body that is too large so many times more is read, and dropped: a client that still sends reads no answer.
_DROPPED = 4


def answer_headers(ignored: Sequence[str]) -> dict[str, str]:
    """The headers of an answer: nothing keeps it, and fields that changed nothing are named."""
    named = {"edgellm-ignored": _NO_HEADER.sub("?", ", ".join(ignored))[:_LONGEST_HEADER]} if ignored else {}
    return {"cache-control": "no-store", **named}


class Bodies:
    """Reads bodies of at most `most` bytes; those that are held at a time have together at most `together`."""

    def __init__(self, most: int, together: int) -> None:
        self._most, self._together = most, together
        #: Bytes that are held now.
        self.held = 0

    @asynccontextmanager
    async def reading(self, request: Request) -> AsyncIterator[list[bytes]]:
        """The parts of a request's body, which count as held as long as they are used. Raises HTTPError for a body that
        is too large, or of another type than JSON, and where too much is held."""
        _check_content(request.headers, request.url.path)
        message = f"the body has more than {self._most:,} bytes, which are the most (--max-body-mib)"
        too_large = HTTPError(413, message, code="body_too_large", headers={"connection": "close"})
        length = request.headers.get("content-length", "0")
        declared = int(length) if length.isdecimal() else 0
        if declared > self._most * (1 if "expect" in request.headers else 1 + _DROPPED):
            raise too_large
        parts, read = list[bytes](), 0
        try:
            async for part in request.stream():
                read += len(part)
                if read <= self._most:
                    parts.append(part)
                    self.held += len(part)
                elif read > self._most * (1 + _DROPPED):
                    raise too_large
                if self.held > self._together:
                    raise later(503, "the server reads as many requests as it can hold: ask again", "busy")
            if read > self._most:
                raise too_large
            yield parts
        finally:
            self.held -= sum(map(len, parts))


def _check_content(headers: Headers, path: str) -> None:
    kind = headers.get("content-type", "")
    # Clients of ollama may send none, or what curl sends; a page, which could without being asked for more, tells its
    # origin.
    may_be_other = path.startswith(OLLAMA) and "origin" not in headers
    usual = "multipart/form-data" if path == TRANSCRIPTIONS else "application/json"
    taken = (usual, *(("", "application/x-www-form-urlencoded") if may_be_other else ()))
    if kind.partition(";")[0].strip().lower() not in taken:
        found = kind[:100] or "missing"
        raise HTTPError(415, f"the content type is {found}: expected {usual}", code="wrong_content_type")
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise HTTPError(415, "the body is encoded: send it as it is", code="wrong_content_encoding")


class Endpoint:
    """An endpoint as ASGI has it. What it does for a client that goes away is cancelled at once."""

    def __init__(self, answer: Callable[[Request], Awaitable[Response]], working: set[asyncio.Future[None]]) -> None:
        """What is under way is among those `working`."""
        self._answer, self._working = answer, working

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_read = asyncio.Event()

        async def take() -> Message:
            message = await receive()
            if not message.get("more_body", False):
                is_read.set()
            return message

        async def listen() -> None:
            """Notice that the client has gone, when its body is read: not before, as who wants to be told to go on
            (`Expect`) is told so by the first reading."""
            await is_read.wait()
            while (await receive())["type"] != "http.disconnect":
                pass

        request = Request(scope, take)
        work = asyncio.ensure_future(self._respond(request, send))
        self._working.add(work)
        listening = asyncio.ensure_future(listen())
        try:
            await asyncio.wait({work, listening}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, listening):
                task.cancel()
            outcomes = await asyncio.gather(work, listening, return_exceptions=True)
            self._working.discard(work)
        error = outcomes[0]
        if isinstance(error, Exception) and not isinstance(error, ClientDisconnect):
            try:
                # What is answered needs no traceback, whose frames hold all that was read of the request.
                error.__cause__ = error.__context__ = None
                raise error.with_traceback(None)
            finally:
                del error, outcomes, work, listening

    async def _respond(self, request: Request, send: Send) -> None:
        try:
            response = await self._answer(request)
        except (HTTPError, HTTPException, ClientDisconnect):
            raise
        except Exception as error:
            logger.error("a request has failed: %s", error, exc_info=error)
            raise http_error(error, {}) from error
        if not isinstance(response, StreamingResponse):
            await response(request.scope, request.receive, send)
            return
        try:
            await response.stream_response(send)
        finally:
            await response.body_iterator.aclose()  # type: ignore[attr-defined]


class Guarded:
    """Checks each request first, answers what browsers ask before they ask, and gives every answer its headers."""

    def __init__(
        self,
        app: Callable[[Scope, Receive, Send], Awaitable[None]],
        sharing: Callable[[Headers], dict[str, str]],
        check: Callable[[Scope, Headers], None],
        count: Callable[[Scope, int], None],
    ) -> None:
        """`sharing` gives headers by which browsers let other pages read the answer, `check` raises HTTPError for what
        is not to be answered, `count` is told of the status of each answer that begins."""
        self._app, self._sharing, self._check, self._count = app, sharing, check, count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        more = {"x-content-type-options": "nosniff", **self._sharing(headers)}

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._count(scope, message["status"])
                pairs = [(name.encode(), value.encode("latin-1")) for name, value in more.items()]
                message = {**message, "headers": [*message["headers"], *pairs]}
            await send(message)

        try:
            is_preflight = scope["method"] == "OPTIONS" and "access-control-request-method" in headers
            if is_preflight and "access-control-allow-origin" in more:
                more["access-control-allow-methods"] = "GET, POST, DELETE"
                more["access-control-allow-headers"] = _HEADERS
                await Response(status_code=204)(scope, receive, counted)
                return
            self._check(scope, headers)
        except HTTPError as error:
            await _response(error, scope["path"])(scope, receive, counted)
            return
        await self._app(scope, receive, counted)


async def refuse(paths: Sequence[str], request: Request, error: Exception) -> Response:
    """The response to what starlette or an endpoint raises, of a server that answers at these `paths`."""
    path = request.url.path
    if isinstance(error, HTTPException):
        message, headers = f"{request.method} {path[:200]}: {error.detail}", error.headers or {}
        if error.status_code == 404:
            message += did_you_mean(path, ["those that GET /v1 lists"], paths)
        elif error.status_code == 405:
            message += f": expected {headers.get('Allow')}"
        error = HTTPError(error.status_code, message, headers=headers)
    assert isinstance(error, HTTPError)
    return _response(error, path)


def _response(error: HTTPError, path: str) -> JSONResponse:
    return JSONResponse(error.body(path), error.status, error.headers)
