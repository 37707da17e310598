"""Answers of `/v1/responses` that are kept for a while, to be shown again and to go on from."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from edgellm.errors import number_of, shown
from edgellm.http.errors import HTTPError, unserved, wrong

#: Items of one page where nothing says how many, and the most.
_PAGE, _LARGEST_PAGE = 20, 100
#: What ids of items begin with that came without one, and what their parts have where a client leaves it out.
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}
_PARTS: dict[str, dict[str, Any]] = {"output_text": {"annotations": []}, "input_image": {"detail": "auto"}}


@dataclass(frozen=True)
class Items:
    """The items of a conversation, without instructions, and how many bytes they take as JSON."""

    items: tuple[Any, ...] = ()
    size: int = 0


class _Kept(NamedTuple):
    """What was asked, that with the answer behind it, and the answer as JSON."""

    asked: Items
    conversation: Items
    text: bytes


class KeptResponses:
    """The last `most` answers, of which the oldest go first; safe from several threads.

    An answer is kept with all items of its conversation: together they have at most `most_bytes`, each conversation
    counted as a whole, though items that several share are held once.
    """

    def __init__(self, most: int = 0, most_bytes: int = 2**27) -> None:
        self.most, self._most_bytes = most, most_bytes
        self._kept: dict[str, _Kept] = {}
        self._lock = threading.Lock()

    def keep(self, asked: Items, response: Mapping[str, Any]) -> None:
        """Keep an answer to a conversation that `asked` is all of."""
        text = bytes(JSONResponse(response).body)
        items = Items((*asked.items, *response["output"]), asked.size + len(text))
        with self._lock:
            self._kept[response["id"]] = _Kept(asked, items, text)
            size = sum(each.conversation.size for each in self._kept.values())
            while self._kept and (len(self._kept) > self.most or size > self._most_bytes):
                size -= self._kept.pop(next(iter(self._kept))).conversation.size

    def conversation(self, response_id: str | None) -> Items:
        """The conversation up to an answer and with it; an empty one without an id. HTTPError for a lost answer."""
        if response_id is None:
            return Items()
        if not self.most:
            why = "answers are not kept: send all of the conversation as input, or start the server with"
            raise unserved("previous_response_id", f"{why} --keep-responses N")
        found = self._kept.get(response_id)
        if found is None:
            message = f"Previous response with id {shown(response_id)[:100]} not found: {self._lost}"
            raise HTTPError(404, message, param="previous_response_id", code="previous_response_not_found")
        return found.conversation

    async def show(self, request: Request) -> Response:
        for name, value in request.query_params.items():
            if name != "include" and (name, value) != ("stream", "false"):
                raise unserved(name, "an answer is shown again as a whole")
        return Response(self._of(request, self._kept.get).text, media_type="application/json")

    def input_items(self, request: Request) -> Response:
        """A page of the items that an answer was given to, those of earlier answers that it went on from among them:
        the newest first, or by `order` `asc` the oldest, at most `limit`, behind the item with the id `after`."""
        asked = self._of(request, self._kept.get).asked
        query = {name: value for name, value in request.query_params.items() if name != "include"}
        order, limit, after = query.pop("order", "desc"), query.pop("limit", str(_PAGE)), query.pop("after", None)
        for name in query:
            raise unserved(name, "expected after, limit, order or include")
        if order not in ("asc", "desc"):
            raise wrong("order", order, "'asc' or 'desc'")
        if not limit.isdecimal() or not 1 <= int(limit[:4]) <= _LARGEST_PAGE:
            raise wrong("limit", limit, f"a whole number from 1 to {_LARGEST_PAGE}")
        items = [_listed(item, number) for number, item in enumerate(asked.items)][:: 1 if order == "asc" else -1]
        ids = [item["id"] for item in items]
        if after is not None and after not in ids:
            raise wrong("after", after, "the id of an item of this answer's input")
        start = 0 if after is None else ids.index(after) + 1
        page = items[start : start + int(limit)]
        first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
        has_more = start + len(page) < len(items)
        found = {"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": has_more}
        return JSONResponse(found)

    async def remove(self, request: Request) -> Response:
        """Forget an answer; what went on from it stays."""
        with self._lock:
            self._of(request, lambda response_id: self._kept.pop(response_id, None))
        return JSONResponse({"id": request.path_params["id"], "object": "response", "deleted": True})

    async def refuse(self, request: Request) -> Response:
        """Refuse what OpenAI's API has at paths that look like an answer's, as `/v1/responses/compact`."""
        asked = f"{request.method} {request.url.path[:200]}"
        instead = "truncation 'auto' shortens conversations, /v1/responses/input_tokens counts their tokens"
        raise HTTPError(404, f"{asked} is not served: {instead}, and GET /v1 lists what is", code="not_found")

    def _of(self, request: Request, find: Callable[[str], _Kept | None]) -> _Kept:
        found = find(request.path_params["id"])
        if found is None:
            message = f"Response with id {shown(request.path_params['id'])[:100]} not found: {self._lost}"
            raise HTTPError(404, message, param="response_id", code="response_not_found")
        return found

    @property
    def _lost(self) -> str:
        """What became of an answer that is not there, and what to do."""
        if not self.most:
            return "answers are not kept; start the server with --keep-responses N"
        kept = f"keeps its last {number_of(self.most, 'answer')} (--keep-responses) until it ends"
        return f"this server {kept}; send all of the conversation as input"


def _listed(item: Mapping[str, Any], number: int) -> dict[str, Any]:
    """An item as lists have it: with an id, and a message's content in parts, whatever short form it came in."""
    kind = item.get("type") or "message"
    own = {name: value for name, value in item.items() if value is not None}
    found = {"id": f"{_PREFIXES[kind]}_{number}", "type": kind, "status": "completed", **own}
    if kind == "message":
        text = "output_text" if item["role"] == "assistant" else "input_text"
        parts = [{"type": text, "text": item["content"]}] if isinstance(item["content"], str) else item["content"]
        parts = [{**part, "type": text} if part["type"] == "text" else part for part in parts]
        found["content"] = [_PARTS.get(part["type"], {}) | part for part in parts]
    return found
