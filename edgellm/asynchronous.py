"""The asynchronous twin of `LLM`, for asyncio: no threads but the one that computes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Literal

from edgellm.errors import EdgeLLMError, QueueFullError, RequestError
from edgellm.generation import Generation
from edgellm.llm import LLM, start_runtime
from edgellm.requests import Messages, Request, Response, StopWhen, request_list
from edgellm.runtime import SpecDecodeRuntime
from edgellm.sampling_params import SamplingParams
from edgellm.serving.async_generation import AsyncGeneration, AsyncSession, asked_in_thread
from edgellm.serving.batch_handling import failure_of
from edgellm.serving.thread import QUEUE_LIMIT, description
from edgellm.snapshots.kept_rows import PREEMPTION_BUDGET
from edgellm.snapshots.kept_states import STATE_BUDGET
from edgellm.snapshots.store import MEMORY_BUDGET

if TYPE_CHECKING:
    from edgellm.drafting.config import DraftingConfig
    from edgellm.drafting.controller import DraftingReport
    from edgellm.engines.directories.engine_directory import EngineDirectory
    from edgellm.observing.observer import Observer
    from edgellm.snapshots.system_prompt import CachedPrompt, SystemPrompt, Tools
    from edgellm.text.tokenizer import Tokenizer
    from edgellm.text.turns import Overflow


class AsyncLLM:
    """A language model for programs on asyncio: `async with AsyncLLM(...) as llm`.

    It has what `LLM` has, under the same names and with the same arguments; what waits there is awaited here, and
    `stream`, `stream_chat` and `AsyncSession.stream` give an `AsyncGeneration` to iterate over.

    Opening, reading images, answering and closing leave the event loop free; prompts are tokenized in it, and a
    request's `stop_when` is called in it. The model is loaded from when this is made on: what is asked before it is
    open waits for that, and only properties of the model (`tokenizer`, `adapters`, ...) raise RequestError until then.
    """

    def __init__(
        self,
        engine_directory: str | Path | None = None,
        *,
        multimodal_engine_directory: str | Path | None = None,
        backend: str = "auto",
        kv_cache: str | None = None,
        drafting: DraftingConfig | Literal["auto"] | None = "auto",
        adapters: Mapping[str, str | Path] | None = MappingProxyType({}),
        snapshots: Sequence[str | Path] = (),
        snapshot_budget: int = MEMORY_BUDGET,
        preemption_budget: int = PREEMPTION_BUDGET,
        state_budget: int = STATE_BUDGET,
        progress: Callable[[int, int], None] | None = None,
        queue_limit: int = QUEUE_LIMIT,
    ) -> None:
        self._thread = start_runtime(
            engine_directory,
            queue_limit,
            multimodal_engine_directory=multimodal_engine_directory,
            backend=backend,
            kv_cache=kv_cache,
            drafting=drafting,
            adapters=adapters,
            snapshots=snapshots,
            snapshot_budget=snapshot_budget,
            preemption_budget=preemption_budget,
            state_budget=state_budget,
            progress=progress,
        )
        #: The same model for threads.
        self.served = LLM.of_thread(self._thread)
        self._is_open = False

    async def open(self) -> AsyncLLM:
        """Wait until the model is loaded; raises what loading it raised."""
        if not self._is_open:
            await asyncio.shield(asyncio.wrap_future(self._thread.opened))
            self._is_open = True
        return self

    @property
    def directory(self) -> EngineDirectory:
        """See `LLM.directory`."""
        return self._opened.directory

    @property
    def backend_name(self) -> str:
        """See `LLM.backend_name`."""
        return self._opened.backend_name

    @property
    def tokenizer(self) -> Tokenizer:
        """See `LLM.tokenizer`."""
        return self._opened.tokenizer

    @property
    def adapters(self) -> tuple[str, ...]:
        """See `LLM.adapters`."""
        return self._opened.adapters

    @property
    def context_length(self) -> int:
        """See `LLM.context_length`."""
        return self._opened.context_length

    @property
    def default_system_prompt(self) -> str:
        """See `LLM.default_system_prompt`."""
        return self._opened.default_system_prompt

    @property
    def default_image_system_prompt(self) -> str:
        """See `LLM.default_image_system_prompt`."""
        return self._opened.default_image_system_prompt

    @property
    def default_params(self) -> SamplingParams:
        """See `LLM.default_params`."""
        return self._opened.default_params

    @property
    def has_vision_model(self) -> bool:
        """See `LLM.has_vision_model`."""
        return self._opened.has_vision_model

    @property
    def drafting(self) -> DraftingConfig | None:
        """See `LLM.drafting`."""
        return self._opened.drafting

    @property
    async def drafting_report(self) -> DraftingReport | None:
        """See `LLM.drafting_report`; `await llm.drafting_report`."""
        return await self.call(lambda runtime: runtime.drafting_report)

    async def submit(self, request: Request) -> AsyncGeneration:
        """See `LLM.submit`."""
        return await AsyncGeneration(lambda: self._ask(self.served.submit, request))

    async def handle(self, requests: Sequence[Request]) -> list[Response | EdgeLLMError]:
        """See `LLM.handle`."""
        answers: list[asyncio.Task[Response | EdgeLLMError]] = []
        try:
            for request in request_list(requests):
                answers.append(asyncio.create_task(_result(await self._asked_when_possible(request, answers))))
            return list(await asyncio.gather(*answers))
        finally:
            for task in answers:
                task.cancel()

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        adapter: str | None = None,
        *,
        deadline: float | None = None,
        images: Sequence[Any] = (),
        stop_when: StopWhen | None = None,
        priority: int = 0,
    ) -> Response:
        """See `LLM.generate`."""
        return await self.stream(
            prompt, params, adapter, deadline=deadline, images=images, stop_when=stop_when, priority=priority
        ).result()

    def stream(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        adapter: str | None = None,
        *,
        deadline: float | None = None,
        images: Sequence[Any] = (),
        stop_when: StopWhen | None = None,
        priority: int = 0,
    ) -> AsyncGeneration:
        """`async for chunk in llm.stream(...)`; see `LLM.stream`."""
        with self._thread.metrics.counting_refusals():
            request = Request(
                prompt, None, params, adapter, deadline, images=images, stop_when=stop_when, priority=priority
            )
        return AsyncGeneration(lambda: self._ask(self.served.submit, request))

    async def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        adapter: str | None = None,
        *,
        deadline: float | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: Any = None,
        parallel_tool_calls: bool | None = None,
        template_variables: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        stop_when: StopWhen | None = None,
        structure: Any = None,
        response_format: Any = None,
        priority: int = 0,
    ) -> Response:
        """See `LLM.chat`."""
        return await self.stream_chat(
            messages,
            params,
            adapter,
            deadline=deadline,
            tools=tools,
            tool_choice=tool_choice,
            parallel_tool_calls=parallel_tool_calls,
            template_variables=template_variables,
            continue_final_message=continue_final_message,
            stop_when=stop_when,
            structure=structure,
            response_format=response_format,
            priority=priority,
        ).result()

    def stream_chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        adapter: str | None = None,
        *,
        deadline: float | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: Any = None,
        parallel_tool_calls: bool | None = None,
        template_variables: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        stop_when: StopWhen | None = None,
        structure: Any = None,
        response_format: Any = None,
        priority: int = 0,
    ) -> AsyncGeneration:
        """`async for chunk in llm.stream_chat(...)`; see `LLM.stream_chat`."""
        with self._thread.metrics.counting_refusals():
            request = Request(
                None,
                messages,
                params,
                adapter,
                deadline,
                tools=tools,
                tool_choice=tool_choice,
                parallel_tool_calls=parallel_tool_calls,
                template_variables=template_variables,
                continue_final_message=continue_final_message,
                stop_when=stop_when,
                structure=structure,
                response_format=response_format,
                priority=priority,
            )
        return AsyncGeneration(lambda: self._ask(self.served.submit, request))

    async def count_tokens(
        self,
        prompt: str | Sequence[int] | Messages,
        *,
        images: Sequence[Any] = (),
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_variables: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
    ) -> int:
        """See `LLM.count_tokens`."""
        await self.open()
        return await asyncio.to_thread(
            self.served.count_tokens,
            prompt,
            images=images,
            tools=tools,
            template_variables=template_variables,
            continue_final_message=continue_final_message,
        )

    def create_session(
        self,
        system: str | None = None,
        params: SamplingParams | None = None,
        adapter: str | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: Any = None,
        parallel_tool_calls: bool | None = None,
        template_variables: Mapping[str, Any] | None = None,
        overflow: Overflow = "drop_oldest",
        priority: int = 0,
    ) -> AsyncSession:
        """See `LLM.create_session`. The model may be loading still: the first message waits for it."""
        session = self.served.create_session(
            system,
            params,
            adapter,
            tools=tools,
            tool_choice=tool_choice,
            parallel_tool_calls=parallel_tool_calls,
            template_variables=template_variables,
            overflow=overflow,
            priority=priority,
        )
        return AsyncSession(session, self.open)

    async def cache_system_prompt(
        self,
        text: SystemPrompt,
        adapter: str | None = None,
        save: str | Path | None = None,
        *,
        tools: Tools | None = None,
        template_variables: Mapping[str, Any] | None = None,
    ) -> CachedPrompt:
        """See `LLM.cache_system_prompt`."""
        return await self.call(
            lambda runtime: runtime.generate_and_save_system_prompt_kv_cache(
                text, adapter, save, tools=tools, template_variables=template_variables
            )
        )

    async def load_snapshot(self, path: str | Path, adapters: Sequence[str | None] | None = None) -> CachedPrompt:
        """See `LLM.load_snapshot`."""
        return await self.call(lambda runtime: runtime.load_snapshot(path, adapters))

    async def use_drafting(self, drafting: DraftingConfig | None) -> None:
        """See `LLM.use_drafting`."""
        await self.call(lambda runtime: runtime.use_drafting(drafting))

    async def observe(self, observer: Observer | None) -> None:
        """See `LLM.observe`."""
        await self.call(lambda runtime: runtime.observe(observer))

    async def call(self, function: Callable[[SpecDecodeRuntime], Any]) -> Any:
        """See `LLM.call`; gives what the function returns."""
        await self.open()
        return await asyncio.wrap_future(self.served.call(function))

    def metrics(self) -> dict[str, Any]:
        """See `LLM.metrics`."""
        return self.served.metrics()

    def metrics_text(self) -> str:
        """See `LLM.metrics_text`."""
        return self.served.metrics_text()

    async def close(self) -> None:
        """End all requests as cancelled and free everything."""
        await asyncio.shield(asyncio.wrap_future(self._thread.stop()))
        self._thread.close()  # at its very end already

    async def __aenter__(self) -> AsyncLLM:
        try:
            return await self.open()
        except BaseException:  # a cancellation, too: what is being loaded is closed as soon as it is there
            self._thread.stop()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<AsyncLLM {description(self._thread)}>"

    @property
    def _opened(self) -> LLM:
        """The model, whose properties are there at once."""
        if not self._thread.opened.done():
            raise RequestError("the model is not open yet: await llm.open() first, or use it in `async with`")
        return self.served

    async def _ask(self, ask: Callable[[Request], Generation], request: Request) -> Generation:
        """Ask when the model is open, in a thread where that reads images: it would keep the event loop waiting."""
        await self.open()
        shows_images = isinstance(request, Request) and request.shows_images
        return await asked_in_thread(ask, request) if shows_images else ask(request)

    async def _asked_when_possible(
        self, request: Request, answers: Sequence[asyncio.Task[Any]]
    ) -> AsyncGeneration | EdgeLLMError:
        """Ask, waiting for earlier requests of the same caller where the queue is full."""
        while True:
            try:
                return await AsyncGeneration(lambda: self._ask(self.served._queued, request))
            except EdgeLLMError as error:
                unfinished = [task for task in answers if not task.done()]
                if not isinstance(error, QueueFullError) or not unfinished:
                    self._thread.metrics.refused()
                    return error
                await asyncio.wait(unfinished, return_when=asyncio.FIRST_COMPLETED)


async def _result(generation: AsyncGeneration | EdgeLLMError) -> Response | EdgeLLMError:
    if isinstance(generation, EdgeLLMError):
        return generation
    try:
        return await generation.result()
    except Exception as error:
        return failure_of(error)
