"""Requests made ready for the engines: rendered, tokenized, their media placed, everything checked."""

from __future__ import annotations

import json
import logging
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache, partial
from itertools import chain, compress, islice, takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

from edgellm.decoding.sequence import Clock, DecodingSequence
from edgellm.defaults import ModelDefaults
from edgellm.drafting.report import DraftingTally
from edgellm.embedding import refusal_to_answer
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.recently_used import RecentlyUsed
from edgellm.engines.runners.sampling_state import SamplingValues
from edgellm.engines.speculation.runner import DecodingRunner
from edgellm.errors import ContextError, RequestError, TemplateError
from edgellm.requests import Request, require_request
from edgellm.sampling_params import SamplingParams
from edgellm.snapshots.system_prompt import SystemPrompt, Tools, beginning_ids, system_prompt_ids
from edgellm.structure.answers import RuleMaker
from edgellm.text.messages import (
    KINDS,
    SYSTEM_ROLES,
    MediaReference,
    checked_messages,
    media_of_messages,
    media_of_prompt,
    require_tools_shown,
)
from edgellm.text.output import OutputText
from edgellm.text.tokenizer import Tokenizer
from edgellm.text.turns import Dropped, OngoingConversation, stays, turn_starts, turns_to_drop
from edgellm.tool_calls.calling import ToolCalling

if TYPE_CHECKING:
    from edgellm.media.encoders import MediaEncoders, PreparedMedia


logger = logging.getLogger("edgellm.text")

#: Of so many system prompts it is remembered where they end, and what such a conversation's tokens are.
_MOST_SYSTEM_PROMPTS = 16
#: From so many tokens on it is worth rendering a new system prompt apart, to know what conversations under it share.
_LONG_PROMPT = 512
#: What kernels take of a request's sampling as it is.
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
#: What is added to the logit of a token that no answer has, unless rules leave no other.
_SUPPRESSION = -1e9
_SAMPLING_VALUES = ("temperature", "top_k", "top_p", "min_p", *_PENALTIES, "logit_bias")
#: The tokens of a prompt, by whether crops of each of its images are shown beside it.
_Encode = Callable[[Sequence[bool]], list[int]]


class _Prompt(NamedTuple):
    """The tokens of a prompt, all those of its media among them, and these."""

    token_ids: list[int]
    media: Sequence[PreparedMedia]


class Preparation:
    """Makes requests ready for one model. Any thread may use it."""

    def __init__(
        self, directory: EngineDirectory, tokenizer: Tokenizer, media: MediaEncoders, defaults: ModelDefaults
    ) -> None:
        self._directory, self._tokenizer, self._media, self._defaults = directory, tokenizer, media, defaults
        self._capacity, self._warn_once = directory.limits.kv_capacity, cache(logger.warning)
        #: The tokens of system prompts by their JSON: few are asked with again and again.
        self._system_ids = lru_cache(_MOST_SYSTEM_PROMPTS)(self._ids_of_system_prompt)
        #: The tokens of conversations that show media: a camera's next frame is asked about alike.
        self._chats: RecentlyUsed[str, array[int]] = RecentlyUsed(_MOST_SYSTEM_PROMPTS)
        #: How the model calls tools.
        self.tools = ToolCalling(tokenizer, directory.tool_format)
        vocab_size, ends = directory.config.vocab_size, directory.config.eos_token_ids
        suppressed = (each for each in defaults.suppressed_tokens if 0 <= each < vocab_size and each not in ends)
        self._suppressed = dict.fromkeys(suppressed, _SUPPRESSION)
        self._rules = RuleMaker(tokenizer, vocab_size, ends)

    def sequence(
        self, request: Request, runner: DecodingRunner, conversation: OngoingConversation | None, drafts: bool
    ) -> DecodingSequence:
        """A request, as the decoding loop takes it for this runner, which perhaps `drafts`. Where it goes on a
        conversation that drops its oldest turns, these are left out where the answer would find no room beside them
        (`turns_to_drop`).

        Raises RequestError, ContextError for a prompt that does not fit, AdapterError for an adapter that is not
        loaded.
        """
        require_request(request)
        if self._directory.config.is_embedding:
            raise refusal_to_answer(self._directory)
        clock, params = Clock(), (request.params or SamplingParams()).seeded()
        runner.base.adapter_digest(request.adapter)
        most = params.max_tokens
        drops = conversation is not None and conversation.overflow == "drop_oldest"
        prompt, dropped = self._prompt(request, None if drops else self._capacity), Dropped()
        if drops:
            prompt, dropped = self._fitted(request, prompt, params.max_tokens)
        self._check_length(prompt)
        if self._directory.config.adds_sound and prompt.media:  # a token stands for each row of the sound
            rows = max(1, prompt.media[0].tokens - len(prompt.token_ids))
            most = rows if most is None else min(most, rows)
        continued = continued_text(request)
        reader, made = self.tools.calling(request.choice, prompt.token_ids, continued, params.structure)
        answer = OutputText(
            self._tokenizer.detokenizer(shown_ids=() if reader is None else reader.shown_ids),
            params.stop,
            params.stop_token_ids,
            () if params.ignore_eos else self._directory.config.eos_token_ids,
            most,
            reader,
            params.min_tokens,
        )
        rules = self._rules.rules(params, prompt.token_ids, continued, made)
        has_choice = runner.limits.max_batch > 1 and len(prompt.token_ids) >= _LONG_PROMPT  # of slots
        is_used = has_choice or runner.base.states.is_recurrent
        tally = DraftingTally(runner.stage_seconds) if drafts or rules is not None else None
        return DecodingSequence(
            prompt.token_ids,
            sampling_values(params, self._suppressed),
            answer,
            clock,
            most,
            tally,
            request.adapter,
            prompt.media,
            logprobs=params.logprobs,
            context_length=self._capacity,
            conversation=conversation,
            dropped=dropped,
            structure=params.structure,
            priority=request.priority,
            rules=rules,
            calls=reader,
            system_tokens=self._system_tokens(request, prompt) if is_used else 0,
        )

    def prompt_ids(self, request: Request) -> list[int]:
        """The tokens of a request's prompt, those of its images included. Raises what `count_tokens` does, and
        ContextError for a prompt that does not fit."""
        prompt = self._prompt(request, self._capacity)
        self._check_length(prompt)
        return prompt.token_ids

    def count_tokens(self, request: Request) -> int:
        """How many tokens a request's prompt has, those of its images included; more than the context holds, or none,
        are no error. Raises RequestError, ImageError, TemplateError for what cannot be counted."""
        return len(self._prompt(request).token_ids)

    def system_prompt(
        self, prompt: SystemPrompt, tools: Tools | None = None, template_variables: Mapping[str, Any] | None = None
    ) -> tuple[list[int], Sequence[PreparedMedia]]:
        """The tokens that every conversation under a system prompt begins with, and its media.

        `tools` and `template_variables` go to the chat template as those of conversations do. Raises RequestError.
        """
        if not isinstance(prompt, (str, list, tuple)):
            raise RequestError(f"the system prompt is a {type(prompt).__name__}: expected text, or a list of parts")
        self._check_template_inputs(tools, template_variables or {})
        encode = partial(system_prompt_ids, self._tokenizer, prompt, tools, template_variables)
        ready = self._ready(encode, lambda: media_of_messages([{"role": "system", "content": prompt}]))
        self._check_length(ready)
        return ready

    def _prompt(self, request: Request, capacity: int | None = None) -> _Prompt:
        """The prompt of a request. Raises ContextError early for one that is far too long for a context."""
        if request.messages is not None:
            given = next((name for name, pieces in request.prompt_media.items() if pieces), None)
            if given is not None:
                raise RequestError(f"a conversation has its {given} in its messages: leave `{given}` out")
            return self._ready(partial(self._chat_ids, request, capacity), partial(media_of_messages, request.messages))
        prompt, tokenizer = () if request.prompt is None else request.prompt, self._tokenizer

        def encode(cropped: Sequence[bool]) -> list[int]:
            if not isinstance(prompt, str):
                return list(map(int, prompt))
            return tokenizer.encode(tokenizer.write_images(prompt, cropped), tokenizer.begins_prompts, capacity)

        media = request.prompt_media.items()
        return self._ready(encode, lambda: [each for name, own in media for each in media_of_prompt(KINDS[name], own)])

    def _system_tokens(self, request: Request, prompt: _Prompt) -> int:
        """How many of a prompt's first tokens are those of its system messages of text, and of its tools, as every
        conversation under these begins; 0 where that is not to be told."""
        messages = self._defaults.with_system_prompt(request.messages) if request.messages else ()
        system = list(takewhile(lambda message: message["role"] in SYSTEM_ROLES, messages))
        if not system or media_of_messages(system):
            return 0
        found = self._system_ids(json.dumps([system, request.tools, request.template_variables]))
        return len(found) if array("i", prompt.token_ids[: len(found)]) == found else 0

    def _ids_of_system_prompt(self, written: str) -> array[int]:
        """The tokens that conversations begin with, by the JSON of system messages, tools and variables; none where the
        template has no such beginning."""
        try:
            return array("i", beginning_ids(self._tokenizer, *json.loads(written)))
        except (RequestError, TemplateError):
            return array("i")

    def _chat_ids(self, request: Request, capacity: int | None, cropped: Sequence[bool]) -> list[int]:
        """The tokens of a request's messages, with the model's default system prompt where they have none, and with
        one token for each image, of which there may be crops. Raises ContextError early for far too many."""
        tools, variables = request.tools, request.template_variables or {}
        messages = () if request.messages is None else request.messages
        checked = checked_messages(messages, self._tokenizer.media)  # errors number the messages as they were given
        may_call = request.choice is not None and request.choice.mode != "none"
        self._check_template_inputs(tools if may_call else None, variables)
        template, asked = self._tokenizer.chat_template, ""
        sources = () if template is None or tools or not request.shows_media else template.sources.values()
        if sources and all(len(each) == 2 for each in checked) and not any("strftime_now" in each for each in sources):
            asked = json.dumps([*sources, checked, cropped, request.continue_final_message, variables])
        encode = partial(self._tokenizer.encode_chat, self._defaults.with_system_prompt(messages), capacity, cropped)
        also = {"tools": tools, "continue_final_message": request.continue_final_message, **variables}
        found = self._chats.find(asked) or array("i", encode(**also))
        if asked:
            self._chats.keep(asked, found)
        return found.tolist()

    def _check_template_inputs(self, tools: Tools | None, variables: Mapping[str, Any]) -> None:
        """Refuse tools, and report variables, that the chat template never reads."""
        if tools or variables:
            names, origin = self._tokenizer.template_variables(), self._tokenizer.template_origin
            require_tools_shown(tools, names, origin)
            for name in sorted(variables.keys() - names):
                self._warn_once("the chat template of %s never reads %s: setting it changes nothing", origin, name)

    def _fitted(self, request: Request, whole: _Prompt, max_tokens: int | None) -> tuple[_Prompt, Dropped]:
        """The prompt of messages, of which `whole` is that of all, without the turns that leave, and what these are.

        Media are not read again.
        """
        messages = request.messages or ()
        starts = turn_starts(messages)
        if not starts:
            return whole, Dropped()
        media = iter(whole.media)
        shown = [list(islice(media, len(media_of_messages([message])))) for message in messages]

        @cache
        def without(turns: int) -> _Prompt:
            if turns == 0:
                return whole
            kept = stays(messages, starts[turns])
            encode = partial(self._chat_ids, replace(request, messages=list(compress(messages, kept))), None)
            return self._with_media(encode, list(chain.from_iterable(compress(shown, kept))))

        turns = turns_to_drop(lambda turns: len(without(turns).token_ids), len(starts), self._capacity, max_tokens)
        return without(turns), Dropped(turns, stays(messages, starts[turns]).count(False))

    def _ready(self, encode: _Encode, shown: Callable[[], Sequence[MediaReference]]) -> _Prompt:
        """A prompt and the media that it shows, which are read once its text was found to be right."""
        ids, media = encode(()), self._media.prepare(shown())
        return self._with_media(lambda cropped: encode(cropped) if any(cropped) else ids, media)

    def _with_media(self, encode: _Encode, media: Sequence[PreparedMedia]) -> _Prompt:
        """A prompt with all tokens of its media."""
        return _Prompt(self._media.expand(encode(self._media.cropped(media)), media), media)

    def _check_length(self, prompt: _Prompt) -> None:
        count = len(prompt.token_ids)
        if not count:
            raise RequestError("the prompt is empty: it must have at least one token")
        if count >= self._capacity:
            raise ContextError.of_prompt(count, self._capacity)
        config, chunk = self._directory.config, self._directory.limits.prefill_chunk
        most = min(chunk, config.window or chunk)
        if config.prefix_attention and count > most:
            raise RequestError(
                f"the prompt has {count} tokens, each of which sees all of it, and {most} are the most: shorten it, or "
                "build with a larger --prefill-chunk"
            )


def sampling_values(params: SamplingParams, biases: Mapping[int, float] | None = None) -> SamplingValues:
    """A request's sampling, as the kernels take it; `biases` of tokens go before the request's own."""
    values = {name: getattr(params, name) for name in _SAMPLING_VALUES}
    if biases:
        values["logit_bias"] = tuple(sorted({**dict(params.logit_bias), **biases}.items()))
    return SamplingValues(**values, seed=params.seed or 0)


def continued_text(request: Request) -> str | None:
    """The text of the message that the model goes on with, where the request asks for that."""
    if not request.continue_final_message or not request.messages:
        return None
    content = request.messages[-1].get("content")
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else None
