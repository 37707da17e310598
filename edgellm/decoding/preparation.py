"""Requests made ready for the engines: rendered, tokenized, their images placed, everything checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from edgellm.decoding.runner import Runner
from edgellm.decoding.sequence import Clock, DecodingSequence
from edgellm.drafting.acceptance import DraftingTally
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.runners.sampling_state import SamplingValues
from edgellm.engines.speculation.eagle_runner import EagleRunner
from edgellm.errors import RequestError
from edgellm.requests import Request, require_request
from edgellm.sampling_params import SamplingParams
from edgellm.snapshots.system_prompt import SystemPrompt, system_prompt_ids
from edgellm.text.messages import ImageReference, images_of_messages, images_of_prompt
from edgellm.text.stop import Answer
from edgellm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from edgellm.multimodal.image_processor import PreparedImage
    from edgellm.vision.encoder import Eyes, LateEyes


class Preparation:
    """Makes requests ready for one model. Any thread may use it."""

    def __init__(self, directory: EngineDirectory, tokenizer: Tokenizer, eyes: Eyes | LateEyes | None) -> None:
        """Without `eyes` images are refused."""
        self._directory, self._tokenizer, self._eyes = directory, tokenizer, eyes

    def sequence(self, request: Request, runner: Runner) -> DecodingSequence:
        """A request, as the decoding loop takes it for this runner.

        Raises RequestError, and AdapterError for an adapter that is not loaded.
        """
        require_request(request)
        clock, params = Clock(), (request.params or SamplingParams()).seeded()
        runner.base.adapter_digest(request.adapter)
        prompt_ids, images = self._checked(*self._prompt(request))
        answer = Answer(
            self._tokenizer.detokenizer(),
            params.stop,
            params.stop_token_ids,
            () if params.ignore_eos else self._directory.eos_token_ids,
            params.max_tokens,
        )
        tally = DraftingTally(lambda: runner.stage_seconds) if isinstance(runner, EagleRunner) else None
        return DecodingSequence(
            prompt_ids,
            sampling_values(params),
            answer,
            clock,
            params.max_tokens,
            tally,
            request.adapter,
            images,
            logprobs=params.logprobs,
        )

    def count_tokens(self, request: Request) -> int:
        """How many tokens a request's prompt has, those of its images included; more than the context holds, or none,
        are no error. Raises RequestError, ImageError, TemplateError for what cannot be counted."""
        return len(self._prompt(request)[0])

    def system_prompt(self, prompt: SystemPrompt) -> tuple[list[int], Sequence[PreparedImage]]:
        """The tokens that every conversation under a system prompt begins with, and its images. Raises RequestError."""
        if not isinstance(prompt, (str, list, tuple)):
            raise RequestError(f"the system prompt is a {type(prompt).__name__}: expected text, or a list of parts")
        shown = images_of_messages([{"role": "system", "content": prompt}])
        return self._checked(*self._with_images(system_prompt_ids(self._tokenizer, prompt), shown))

    def _prompt(self, request: Request) -> tuple[list[int], Sequence[PreparedImage]]:
        if request.messages is not None:
            if request.images:
                raise RequestError("a conversation has its images in its messages: leave `images` out")
            prompt_ids = self._tokenizer.encode_chat(
                request.messages, continue_final_message=request.continue_final_message
            )
            return self._with_images(prompt_ids, images_of_messages(request.messages))
        prompt = () if request.prompt is None else request.prompt
        prompt_ids = self._tokenizer.encode(prompt) if isinstance(prompt, str) else list(map(int, prompt))
        return self._with_images(prompt_ids, images_of_prompt(request.images))

    def _with_images(
        self, prompt_ids: list[int], shown: Sequence[ImageReference]
    ) -> tuple[list[int], Sequence[PreparedImage]]:
        """A prompt with all tokens of the images that it shows, and the images."""
        images: Sequence[PreparedImage] = ()
        if self._eyes is not None:
            images = self._eyes.prepare(shown)
            prompt_ids = self._eyes.expand(prompt_ids, images)
        elif shown:
            raise RequestError(
                f"the request shows {len(shown)} images, but {self._directory.path} has no vision model: leave them "
                "out, or open a directory that has one"
            )
        return prompt_ids, images

    def _checked(
        self, prompt_ids: list[int], images: Sequence[PreparedImage]
    ) -> tuple[list[int], Sequence[PreparedImage]]:
        """The same, where they fit into the context."""
        capacity = self._directory.limits.kv_capacity
        if not prompt_ids:
            raise RequestError("the prompt is empty: it must have at least one token")
        if len(prompt_ids) >= capacity:
            raise RequestError(
                f"the prompt has {len(prompt_ids)} tokens and the context {capacity}, of which at least one is for the "
                "answer: shorten the prompt or the history, or build with a larger --kv-capacity"
            )
        return prompt_ids, images


def sampling_values(params: SamplingParams) -> SamplingValues:
    """A request's sampling, as the kernels take it."""
    return SamplingValues(
        params.temperature,
        params.top_k,
        params.top_p,
        params.min_p,
        params.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
        params.seed or 0,
    )
