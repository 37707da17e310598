"""The server's endpoints: each takes a request's body, asks the model's thread, and sends the answer as it comes."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakSet

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Scope

from edgellm import __version__
from edgellm.asynchronous import AsyncGeneration, AsyncLLM
from edgellm.errors import EdgeLLMError, TemplateError
from edgellm.generation import Generation, RequestState
from edgellm.http import asgi, completions, messages, ollama
from edgellm.http.answers import AnswerReader, ChatWriter, CompletionWriter, Writer
from edgellm.http.bodies import TEXT_BYTES, TOKEN_BYTES
from edgellm.http.catalogue import Catalogue
from edgellm.http.counts import ServerCounts
from edgellm.http.embeddings import EMBEDDINGS, ParsedEmbedding
from edgellm.http.errors import MESSAGES, OLLAMA, TRANSCRIPTIONS, HTTPError, http_error, later, without_folders
from edgellm.http.fields import ParsedRequest, ServedModel
from edgellm.http.guard import Guard
from edgellm.http.kept_responses import KeptResponses
from edgellm.http.page import PATHS, page_file
from edgellm.http.readers import LARGE_BODY, ImageMemory, Readers
from edgellm.http.responses import ResponseWriter, response_request
from edgellm.http.transcriptions import TranscriptionWriter, transcription
from edgellm.http.under_way import AnswersUnderWay
from edgellm.opened_model import SHIPPED_MODEL
from edgellm.runtime import SpecDecodeRuntime
from edgellm.text.template import ChatTemplate

logger = logging.getLogger("edgellm.http")
T = TypeVar("T")

#: Bodies in memory have together at most so many times the size of the largest, and images the pixels of so many
#: requests.
BODIES, IMAGES = 4, 2

#: How a request is read, and its answers are written.
Read = Callable[[bytes, ServedModel], ParsedRequest]
EndpointKind = tuple[Read, Callable[..., Writer]]
Answers = dict[str, Callable[[Request], Awaitable[Response]]]
Tell = Callable[..., dict[str, Any]]
#: What asks the model, by path.
ENDPOINTS: dict[str, EndpointKind] = {
    "/v1/chat/completions": (completions.chat, ChatWriter),
    "/v1/completions": (completions.completion, CompletionWriter),
    "/v1/responses": (response_request, ResponseWriter),
    MESSAGES: (messages.message_request, messages.MessageWriter),
    TRANSCRIPTIONS: (transcription, TranscriptionWriter),
    "/api/chat": (ollama.chat, ollama.ChatLineWriter),
    "/api/generate": (ollama.generate, ollama.GenerateWriter),
}
#: Where a prompt's tokens are counted for Anthropic's clients, and for OpenAI's.
COUNT_TOKENS, INPUT_TOKENS = f"{MESSAGES}/count_tokens", "/v1/responses/input_tokens"
#: What the shipped model is, for who takes it for more.
SHIPPED = "This model comes with EdgeLLM: a toy of 10.8 M parameters, which knows its table, in English."
#: What is answered whatever the model's state.
_ALWAYS = ("/health", "/metrics", *PATHS)
_ASKED = (*ENDPOINTS, *EMBEDDINGS, COUNT_TOKENS, INPUT_TOKENS, "/tokenize", "/api/show", "/api/pull")
_COUNTED = (*_ASKED, "/v1/models", "/v1", "/version", "/api/tags", "/api/ps", *_ALWAYS)


class Service:
    """A model that is asked over HTTP. It listens while the model is loaded, and answers once that is open, all in one
    event loop but for the model's thread and those that make requests ready. Nobody waits for a slow reader: what it
    has not taken of its answer joins until it is read."""

    def __init__(
        self,
        llm: AsyncLLM,
        model: ServedModel,
        guard: Guard,
        body_bytes: int = 32 * 2**20,
        template: ChatTemplate | None = None,
        keep_responses: int = 0,
    ) -> None:
        """`model` says how the model is called and what it takes; its adapters are known when it is open. A chat
        `template` takes the place of the model's own. Of `/v1/responses` the last `keep_responses` are kept."""
        self._llm, self.guard, self._bodies = llm, guard, asgi.Bodies(body_bytes, BODIES * body_bytes)
        self.model, self._template = model, template
        self._kept = KeptResponses(keep_responses, BODIES * body_bytes)
        self._opened: Catalogue | None = None
        self._model_memory: Mapping[str, int] = {}
        #: What the model failed with, when it was loaded or later.
        self.failure: Exception | None = None
        self._is_ending = False
        self._answers: WeakSet[AsyncGeneration] = WeakSet()  # one that nobody holds is cancelled by itself
        self._working: set[asyncio.Future[None]] = set()
        self.counts = ServerCounts()
        self._created = int(time.time())
        self._endpoints: list[str] = []
        self._readers, self._images = Readers(), ImageMemory(IMAGES * model.request_pixels)

    def app(self) -> Starlette:
        """The application, as servers of ASGI run it."""
        responses = (partial(response_request, kept=self._kept), partial(ResponseWriter, kept=self._kept))
        kinds: dict[str, EndpointKind] = ENDPOINTS | {"/v1/responses": responses}
        asked: Answers = {path: partial(self._answer, kind) for path, kind in kinds.items()}
        asked |= {path: partial(self._embed, read) for path, read in EMBEDDINGS.items()}
        asked |= {COUNT_TOKENS: partial(self._count_tokens, messages.counted_request, {})}
        asked |= {INPUT_TOKENS: partial(self._count_tokens, responses[0], {"object": "response.input_tokens"})}
        asked |= {"/tokenize": self._tokenize, "/api/show": self._show, "/api/pull": self._pull}
        told: dict[str, Tell] = {"/v1/models": Catalogue.models, "/v1/models/{name:path}": Catalogue.known}
        told |= {"/api/tags": Catalogue.tags, "/api/ps": Catalogue.running}
        shown: Answers = {path: partial(self._tell, tell) for path, tell in told.items()}
        one = "/v1/responses/{id}"
        shown |= {one: self._kept.show, f"{one}/input_items": self._input_items}
        shown |= {"/v1": self._what_there_is, "/version": self._version, "/api/version": self._version}
        shown |= {"/health": self._health, "/metrics": self._metrics} | dict.fromkeys(PATHS, page_file)
        methods: dict[str, Answers] = {"POST": asked, "GET": shown, "DELETE": {one: self._kept.remove}}
        shown_as = {path: path.replace("{name:path}", "NAME").replace("{id}", "ID") for path in (*asked, *shown)}
        self._endpoints = [f"{method} {shown_as[path]}" for method, answers in methods.items() for path in answers]
        routes = [
            Route(path, asgi.Endpoint(answer, self._working), methods=[method])
            for method, answers in methods.items()
            for path, answer in answers.items()
        ]
        routes.append(Route(one, self._kept.refuse, methods=["POST"]))
        refusals = dict.fromkeys((HTTPException, HTTPError), partial(asgi.refuse, [*shown_as]))
        app = Starlette(routes=routes, exception_handlers=refusals)
        app.router.redirect_slashes = False
        app.add_middleware(asgi.Guarded, sharing=self.guard.sharing, check=self.check, count=self.count)
        return app

    @property
    def state(self) -> str:
        """ "loading", "ready", "ending", "failed", or "stuck": no thread is left to make a request ready."""
        if self.failure is not None:
            return "failed"
        if self._is_ending or not self.is_open:
            return "ending" if self._is_ending else "loading"
        return "stuck" if self._readers.are_lost else "ready"

    @property
    def is_open(self) -> bool:
        return self._opened is not None

    @property
    def _catalogue(self) -> Catalogue:
        assert self._opened is not None  # or `check` refuses what asks for it
        return self._opened

    def works(self, seconds: float) -> bool:
        """Whether the server can answer, and its model's thread is at nothing that has taken so many seconds."""
        return self.state not in ("failed", "stuck") and self._llm._thread.seconds_at_work < seconds

    async def open(self) -> None:
        """Wait until the model is open. Raises what loading it raised, which the server then tells, too."""
        try:
            await self._llm.open()
            runtime = await self._llm.call(lambda runtime: runtime)
            self.model = self._described(runtime)
            self._opened = Catalogue(self.model, runtime, self._llm.context_length, self._created)
        except Exception as error:
            self.failure = error
            raise

    async def wait_for_failure(self) -> None:
        """Return when the model's thread has ended."""
        await asyncio.shield(asyncio.wrap_future(self._llm._thread.closed))
        if self.failure is None and not self._is_ending:
            try:
                self._llm._thread.check()
            except EdgeLLMError as error:
                self.failure = error

    def _described(self, runtime: SpecDecodeRuntime) -> ServedModel:
        if self._template is not None:
            runtime.tokenizer.chat_template = self._template
        try:
            variables = runtime.tokenizer.template_variables()
        except TemplateError:  # which conversations will be told
            variables = frozenset()
        self._model_memory = runtime.planned_memory
        return replace(
            self.model,
            adapters=runtime.adapters,
            template_variables=variables,
            vocab_size=runtime.directory.config.vocab_size,
            description=SHIPPED if runtime.directory.path.resolve() == SHIPPED_MODEL.resolve() else None,
            text_bytes=max(TEXT_BYTES, TOKEN_BYTES * self._llm.context_length),
        )

    async def finish(self, seconds: float) -> None:
        """Answer nothing new, and wait until what runs has ended; what has not after so many seconds is cancelled. Of a
        model that has failed nothing comes but errors, which are on their way."""
        self._is_ending = True
        seconds = seconds if self.failure is None else min(seconds, 2.0)
        until = time.monotonic() + seconds
        while self._working and time.monotonic() < until:
            await asyncio.wait(self._working, timeout=until - time.monotonic())
        for answer in list(self._answers):
            answer.cancel()
        if self._working:  # a round, and the time to say that it was cancelled
            await asyncio.wait(self._working, timeout=1.0)

    def check(self, scope: Scope, headers: Headers) -> None:
        """Raise HTTPError for a request that is not to be answered, whatever it asks."""
        self.guard.check(scope["path"], headers)
        if scope["path"].startswith(MESSAGES):
            messages.check_version(headers)
        if scope["path"] in _ALWAYS or self.state == "ready":
            return
        if self.failure is not None:
            raise HTTPError(503, f"the model has failed: {self._said_failure}", code="failed")
        if self._is_ending:
            raise later(503, "the server is ending: ask another one", "ending", 5)
        if self.is_open:
            raise later(503, "all threads that read requests are lost: start the server anew", "stuck", 60)
        if scope["path"].startswith(("/v1/", OLLAMA)) or scope["path"] == "/tokenize":
            raise later(503, "the model is being loaded: ask again soon", "loading", 2)

    def count(self, scope: Scope, status: int) -> None:
        """A response was begun."""
        path = scope["path"] if scope["path"] in _COUNTED else "other"
        self.counts.responses[path, status] += 1
        client = self.guard.address(scope)
        logger.info("%s %s: %d", scope["method"], path, status, extra={"edgellm": {"client": client}})

    async def _answer(self, kind: EndpointKind, request: Request) -> Response:
        """Ask the model, and wait for the answers, or the first piece of those that are streamed: what a queue or the
        engine refuses has a status of its own, and what was not begun may be asked of another server."""
        read, make_writer = kind
        asked, answers, states = await self._ask(read, request)
        tokenizer = self._catalogue.runtime.tokenizer
        pairs = zip(states, asked.requests, strict=True)
        readers = [AnswerReader.of(tokenizer, state.sequence, each) for state, each in pairs]
        headers = asgi.answer_headers(asked.ignored)
        if dropped := sum(state.sequence.dropped.messages for state in states):
            headers["edgellm-dropped-messages"] = str(dropped)
        self._answers.update(answers)
        writer = make_writer(asked, tokenizer, readers, [state.sequence for state in states])
        under_way = AnswersUnderWay(answers, readers, writer)
        with self._telling(asked.fields):
            if not asked.stream:
                whole = await under_way.whole()
                if isinstance(whole, str):
                    return PlainTextResponse(whole, headers=headers)
                return JSONResponse(whole, headers=headers)
            events = await under_way.begin(lambda error: self._told(error, {}))
        headers["x-accel-buffering"] = "no"  # a proxy is to hand pieces on as they come
        return StreamingResponse(events, media_type=writer.media_type, headers=headers)

    async def _ask(
        self, read: Read, request: Request
    ) -> tuple[ParsedRequest, list[AsyncGeneration], list[RequestState]]:
        client = self.guard.client(request.scope)

        def submit(body: bytes) -> tuple[ParsedRequest, list[Generation]]:
            asked = read(body, self.model)
            with self._images.reading(asked.pixels) as hand_over, self._telling(asked.fields):
                generations: list[Generation] = []
                try:
                    for each in asked.requests:
                        generations.append(self._llm.served._submit(each, asked.conversation, client))
                        hand_over(generations[-1].request_state.sequence)
                except BaseException:  # all are answered, or none
                    for generation in generations:
                        generation.cancel()
                    raise
                return asked, generations

        asked, generations = await self._read(request, submit)
        return asked, [await _asynchronous(each) for each in generations], [each.request_state for each in generations]

    async def _embed(self, read: Callable[[bytes, ServedModel], ParsedEmbedding], request: Request) -> Response:
        """Embed texts, each in its turn among those of other requests."""

        def tokenized(body: bytes) -> tuple[ParsedEmbedding, list[list[int]]]:
            asked = read(body, self.model)
            with self._telling(asked.fields), self._llm._thread.metrics.counting_refusals():
                return asked, self._catalogue.runtime.embedding_ids(asked.request)

        began = time.perf_counter()
        asked, ids = await self._read(request, tokenized)
        with self._telling(asked.fields):
            vectors = await self._llm._vectors(asked.request, ids)
        write = partial(asked.answer, vectors, sum(map(len, ids)), time.perf_counter() - began)
        return await self._readers.run(self.guard.client(request.scope), write, vectors.nbytes > LARGE_BODY)

    async def _read(self, request: Request, function: Callable[[bytes], T]) -> T:
        """What a function makes of the body of a request, in a thread, which joins it, too."""
        async with self._bodies.reading(request) as parts:
            is_large = sum(map(len, parts)) > LARGE_BODY
            client = self.guard.client(request.scope)
            return await self._readers.run(client, lambda: function(b"".join(parts)), is_large)

    async def _tokenize(self, request: Request) -> Response:
        ids = await self._prompt_ids(completions.tokens, request)
        return JSONResponse({"count": len(ids), "max_model_len": self._llm.context_length, "tokens": ids})

    async def _count_tokens(self, read: Read, about: Mapping[str, str], request: Request) -> Response:
        return JSONResponse({**about, "input_tokens": len(await self._prompt_ids(read, request))})

    async def _prompt_ids(self, read: Read, request: Request) -> list[int]:
        def prompt_ids(body: bytes) -> list[int]:
            asked = read(body, self.model)
            with self._images.reading(asked.pixels), self._telling(asked.fields):
                return self._catalogue.runtime.prompt_ids(asked.request)

        return await self._read(request, prompt_ids)

    async def _tell(self, tell: Tell, request: Request) -> Response:
        return JSONResponse(tell(self._catalogue, **request.path_params))

    async def _show(self, request: Request) -> Response:
        name = await self._read(request, lambda body: ollama.named_model(body, self.model))
        return JSONResponse(self._catalogue.facts(name))

    async def _pull(self, request: Request) -> Response:
        """Nothing is fetched: what is served is there."""
        await self._read(request, lambda body: ollama.named_model(body, self.model, "stream", "insecure"))
        return JSONResponse({"status": "success"})

    async def _input_items(self, request: Request) -> Response:
        client = self.guard.client(request.scope)
        return await self._readers.run(client, lambda: self._kept.input_items(request), is_large=True)

    async def _what_there_is(self, request: Request) -> Response:
        return JSONResponse({"server": "edgellm", "version": __version__, "endpoints": self._endpoints})

    async def _version(self, request: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def _health(self, request: Request) -> Response:
        state = self.state
        found: dict[str, Any] = {"status": state} | ({} if self.failure is None else {"error": self._said_failure})
        if self._readers.lost:
            found["lost_readers"] = self._readers.lost
        headers = {} if state == "ready" else {"retry-after": "2"}
        return JSONResponse(found, 200 if state == "ready" else 503, headers)

    async def _metrics(self, request: Request) -> Response:
        own = self.counts.text(len(self._working), self._readers.lost, self._bodies.held, self._model_memory)
        return PlainTextResponse(self._llm.metrics_text() + own, media_type="text/plain; version=0.0.4")

    @property
    def _said_failure(self) -> str:
        return without_folders(str(self.failure))

    @contextmanager
    def _telling(self, names: Mapping[str, str]) -> Iterator[None]:
        try:
            yield
        except EdgeLLMError as error:
            raise self._told(error, names) from error

    def _told(self, error: Exception, names: Mapping[str, str]) -> HTTPError:
        """An error as a client is told it; what nobody expected goes to the log."""
        mean = self._llm.metrics()["request_seconds"]["mean"]  # after which a place in a full queue may be free
        found = http_error(error, names, min(60, max(1, math.ceil(mean or 1.0))))
        if found.status == 500:
            logger.error("a request has failed: %s", error, exc_info=error)
        if self._opened is not None:
            folder = self._opened.runtime.directory.path
            template = self._opened.runtime.tokenizer.chat_template
            origin = () if template is None else (Path(template.origin).parent,)
            found.message = without_folders(found.message, (folder, folder.absolute(), *origin))
        return found


async def _asynchronous(generation: Generation) -> AsyncGeneration:
    """A request on its way, to be read in the event loop."""

    async def ask() -> Generation:
        return generation

    return await AsyncGeneration(ask)
