"""Answers of `/v1/responses` that are kept for a while, to be shown again and to go on from."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from edgellm.errors import shown
from edgellm.http.errors import HTTPError


@dataclass(frozen=True)
class Items:
    """The items of a conversation, without instructions, and how many bytes they take as JSON."""

    items: tuple[Any, ...] = ()
    size: int = 0


class KeptResponses:
    """The last `most` answers, of which the oldest go first; safe from several threads.

    An answer is kept with all items of its conversation: together they have at most `most_bytes`, each conversation
    counted as a whole, though items that several share are held once.
    """

    def __init__(self, most: int = 0, most_bytes: int = 2**27) -> None:
        self.most, self._most_bytes = most, most_bytes
        self._kept: dict[str, tuple[Items, bytes]] = {}
        self._lock = threading.Lock()

    def keep(self, asked: Items, response: Mapping[str, Any]) -> None:
        """Keep an answer to a conversation that `asked` is all of."""
        text = json.dumps(response, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
        items = Items((*asked.items, *response["output"]), asked.size + len(text))
        with self._lock:
            self._kept[response["id"]] = items, text
            size = sum(each.size for each, _ in self._kept.values())
            while self._kept and (len(self._kept) > self.most or size > self._most_bytes):
                size -= self._kept.pop(next(iter(self._kept)))[0].size

    def conversation(self, response_id: str | None) -> Items:
        """The conversation up to an answer and with it; an empty one without an id. HTTPError for a lost answer."""
        if response_id is None:
            return Items()
        if not self.most:
            why = "answers are not kept: send all of the conversation as input, or start the server with"
            message = f"previous_response_id is not served: {why} --keep-responses N"
            raise HTTPError(400, message, param="previous_response_id", code="unsupported_parameter")
        found = self._kept.get(response_id)
        if found is None:
            message = f"Previous response with id {shown(response_id)[:100]} not found: {self._lost}"
            raise HTTPError(404, message, param="previous_response_id", code="previous_response_not_found")
        return found[0]

    async def show(self, request: Request) -> Response:
        """An answer as it was given."""
        for name, value in request.query_params.items():
            if name != "include" and (name, value) != ("stream", "false"):
                message = f"{shown(name)[:100]} is not served: an answer is shown again as a whole"
                raise HTTPError(400, message, param=name[:100], code="unsupported_parameter")
        return Response(self._of(request, self._kept.get), media_type="application/json")

    async def remove(self, request: Request) -> Response:
        """Forget an answer; what went on from it stays."""
        with self._lock:
            self._of(request, lambda response_id: self._kept.pop(response_id, None))
        return JSONResponse({"id": request.path_params["id"], "object": "response", "deleted": True})

    async def refuse(self, request: Request) -> Response:
        """Refuse what OpenAI's API has at paths that look like an answer's, as `/v1/responses/compact`."""
        asked = f"{request.method} {request.url.path[:200]}"
        instead = "truncation 'auto' shortens conversations, /tokenize counts their tokens"
        raise HTTPError(404, f"{asked} is not served: {instead}, and GET /v1 lists what is", code="not_found")

    def _of(self, request: Request, find: Callable[[str], tuple[Items, bytes] | None]) -> bytes:
        found = find(request.path_params["id"])
        if found is None:
            message = f"Response with id {shown(request.path_params['id'])[:100]} not found: {self._lost}"
            raise HTTPError(404, message, param="response_id", code="response_not_found")
        return found[1]

    @property
    def _lost(self) -> str:
        """What became of an answer that is not there, and what to do."""
        if not self.most:
            return "answers are not kept; start the server with --keep-responses N"
        kept = f"this server keeps its last {self.most} answers (--keep-responses) until it ends"
        return f"{kept}; send all of the conversation as input"
