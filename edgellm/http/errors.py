"""What a request over HTTP fails with, in the form of the API that it asks by: OpenAI's, Anthropic's or ollama's."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from edgellm import errors
from edgellm.errors import TemplateError as ChatTemplateError
from edgellm.kernels.errors import bounded_message

#: What paths of ollama's API begin with.
OLLAMA = "/api/"
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
#: What paths of Anthropic's API begin with, and the types of its errors that are others.
MESSAGES = "/v1/messages"
#: Where sounds come in forms.
TRANSCRIPTIONS = "/v1/audio/transcriptions"
_MESSAGE_TYPES = {413: "request_too_large", 503: "overloaded_error"}
#: The folders of a file: of its path the name alone is told.
_FOLDERS = re.compile(r"(?<![\w/:.])/(?:[^\s/:;,'\"()]+/)+")
#: The field that a message begins with, and a place in it: "tools[1].function.name is ...".
_FIELD = re.compile(r"(\w+)((?:\[\d+\]|\.\w+)*)(?=[ :'])")


class HTTPError(Exception):
    """A request that is not answered: its status, what is wrong, the field (`param`) and a name for programs (`code`).
    `headers` are sent beside those of every answer."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        message = bounded_message(message)
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers)

    def body(self, path: str = "") -> dict[str, Any]:
        """The JSON object of an answer of the endpoint at `path`, and of the last event of a stream that fails."""
        if path.startswith(OLLAMA):
            return {"error": self.message}
        if path.startswith(MESSAGES):
            kind = "invalid_request_error" if self.status < 500 else "api_error"
            kind = (_TYPES | _MESSAGE_TYPES).get(self.status, kind)
            details = {} if self.code is None else {"details": {"error_code": self.code}}
            return {"type": "error", "error": {"type": kind, "message": self.message, **details}, "request_id": None}
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def without_folders(message: str, known: Iterable[str | Path] = ()) -> str:
    """A message in which paths of the server are names of files: those in `known` folders, or, without any, all that
    look like one, which is for messages that nobody else has a part in."""
    for path in sorted(map(str, known), key=len, reverse=True):
        if "/" in path:
            message = message.replace(f"{path}/", "").replace(path, Path(path).name)
    return message if known else _FOLDERS.sub("", message)


def later(status: int, message: str, code: str, seconds: int = 1) -> HTTPError:
    """The error of a request that may be asked again in so many seconds."""
    return HTTPError(status, message, code=code, headers={"retry-after": str(seconds)})


def http_error(error: Exception, fields: Mapping[str, str], retry_after: int = 1) -> HTTPError:
    """What an error of the engine is over HTTP.

    `fields` are the request's fields by the names that errors of parameters begin with, perhaps a part of one
    (".function") by its name in places; where an error begins with no field, it is of what was asked (`fields[""]`). Of
    errors that are no EdgeLLMError nothing is told.
    """
    if isinstance(error, HTTPError):
        return error
    message = str(error)
    if isinstance(error, errors.QueueFullError):
        return later(429, message, "queue_full", retry_after)
    if isinstance(error, errors.AdapterError):
        return HTTPError(404, message, param="model", code="model_not_found")
    if isinstance(error, errors.ContextError):
        said = f"the maximum context length is {error.limit} tokens: {message}"  # words that clients look for
        return HTTPError(400, said, param=fields.get(""), code="context_length_exceeded")
    if isinstance(error, errors.MediaError):
        codes = {errors.ImageError: "invalid_image", errors.AudioError: "invalid_audio"}
        code = codes.get(type(error), "invalid_media")
        return HTTPError(400, message, param=fields.get(""), code=code)
    if isinstance(error, (errors.RequestError, errors.ConstraintError, ChatTemplateError)):
        match = _FIELD.match(message)
        if match is None or match[1] not in fields:
            return HTTPError(400, message, param=fields.get(""))
        parts = (fields.get(part, part) for part in re.findall(r"\.\w+|\[\d+\]", match[2]))
        place = "".join([fields[match[1]], *parts])
        return HTTPError(400, place + message[match.end() :], param=place)
    if isinstance(error, errors.DeviceLostError):  # a proxy may ask another server
        return later(503, message, "failed", 5)
    if isinstance(error, errors.EdgeLLMError):
        told = message if isinstance(error, errors.ConstraintError) else without_folders(message)
        return HTTPError(500, told, code="engine_error")
    return HTTPError(500, f"the server has failed with {type(error).__name__}: its log says more", code="server_error")


def refused(param: str, message: str, code: str | None = None) -> HTTPError:
    """The error of a field that cannot be as it is."""
    return HTTPError(400, message, param=param, code=code)


def unserved(name: str, why: str) -> HTTPError:
    """The error of a field that nothing here honours."""
    return refused(name[:100], f"{errors.shown(name[:100])[1:-1]} is not served: {why}", "unsupported_parameter")


def wrong(name: str, value: Any, expected: str) -> HTTPError:
    """The error of a field that is not there, or not as expected."""
    found = "missing" if value is None else errors.shown(value)
    return refused(name, f"{name} is {found}: expected {expected}")


def checked(name: str, check: Any, value: Any, said: str | None = None) -> Any:
    """What a check makes of a field's value; HTTPError for what it refuses. `said` is the name in its messages."""
    try:
        return check(value)
    except errors.RequestError as error:
        raise http_error(error, {said or name: name, "": name}) from error
