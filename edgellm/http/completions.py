"""Requests to `/v1/chat/completions`, `/v1/completions` and `/tokenize`, read from their bodies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from edgellm.errors import number_of, shown
from edgellm.http.errors import HTTPError, refused, wrong
from edgellm.http.fields import TOOLS, Fields, ParsedRequest, ServedModel, with_chat_logprobs, with_logprobs

#: Completions end after so many tokens where nothing says how many; a request has at most so many answers.
COMPLETION_TOKENS, MOST_ANSWERS = 16, 64


def chat(body: bytes, model: ServedModel) -> ParsedRequest:
    """A request to `/v1/chat/completions`. Raises HTTPError."""
    fields = Fields(body, model)
    request = fields.common()
    fields.only("n", 1, why="one answer is given to a conversation")
    params = with_chat_logprobs(fields.sampling("max_tokens", "max_completion_tokens"), fields)
    request["params"] = fields.structured(params, fields.take("response_format", dict), "response_format")
    request |= {name: fields.take(name) for name in TOOLS}
    fields.only("modalities", ["text"], why="answers are text")
    others = ("audio", "functions", "function_call", "web_search_options", "moderation", "verbosity")
    fields.refuse(*others, why="there is nothing here that does it")
    if (effort := (fields.take_object("reasoning", "effort") or {}).get("effort")) is not None:
        fields.put("reasoning_effort", effort, "reasoning.effort")
    request["template_variables"] = fields.thinking(fields.take("reasoning_effort"), "reasoning_effort")
    request["continue_final_message"] = bool(fields.take("continue_final_message", bool))
    messages, conversation = fields.take("messages"), fields.truncation()
    fields.end()
    request["messages"] = fields.with_images(_said(messages))
    named = {"": "messages", "structure": "response_format"}
    return fields.parsed(named, request, conversation=conversation)


def _said(messages: Any) -> Any:
    """Messages in which what an assistant refused with is text, as it is what was said."""
    found = [dict(each) if isinstance(each, dict) else each for each in messages] if isinstance(messages, list) else []
    for message in (each for each in found if isinstance(each, dict) and each.get("role") == "assistant"):
        content, refusal = message.get("content"), message.pop("refusal", None)
        if refusal and not content:
            message["content"] = refusal
        elif refusal or isinstance(content, list):
            parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
            parts = [*parts, {"type": "refusal", "refusal": refusal}] if refusal else parts
            message["content"] = [
                {"type": "text", "text": each.get("refusal")}
                if isinstance(each, dict) and each.get("type") == "refusal"
                else each
                for each in parts
            ]
    return found or messages


def completion(body: bytes, model: ServedModel) -> ParsedRequest:
    """A request to `/v1/completions`, for `n` answers to each of its prompts. Raises HTTPError."""
    fields = Fields(body, model)
    request = fields.common()
    params = fields.sampling("max_tokens")
    if params.max_tokens is None:
        params = replace(params, max_tokens=max(COMPLETION_TOKENS, params.min_tokens))
    logprobs = fields.take("logprobs", int)
    if logprobs is not None:
        params = with_logprobs(params, "logprobs", logprobs)
    params = fields.structured(params, fields.take("response_format", dict), "response_format")
    count, echo = fields.take("n", int), bool(fields.take("echo", bool))
    count = 1 if count is None else count
    fields.only("best_of", count, why="all answers are given, none is chosen")
    fields.only("suffix", "", why="text is not filled in")
    if echo and logprobs is not None:
        why = "log-probabilities of prompts are not computed, which echo would show: leave one of them out"
        raise refused("echo", f"logprobs are not served with echo: {why}")
    prompts = prompt_list(fields.take("prompt"), model)
    fields.end()
    if not 1 <= count * len(prompts) <= MOST_ANSWERS:
        found = f"n is {shown(count)} for {number_of(len(prompts), 'prompt')}"
        raise HTTPError(400, f"{found}: expected 1 to {MOST_ANSWERS} answers", param="prompt" if count == 1 else "n")
    request |= {"prompt": prompts[0], "params": params}
    first = fields.parsed({"": "prompt"}, request, answers_each=count, echo=echo)
    each_prompt = (replace(first.request, prompt=prompt).repeated(count) for prompt in prompts)
    return replace(first, requests=tuple(chain.from_iterable(each_prompt)))


def tokens(body: bytes, model: ServedModel) -> ParsedRequest:
    """A request to `/tokenize`: a `prompt`, or `messages`, perhaps with `tools`. Raises HTTPError."""
    fields = Fields(body, model)
    request = {"adapter": model.adapter_of(fields.take("model") or model.name), "tools": fields.take("tools")}
    request["template_variables"] = fields.template_variables()
    prompt, messages = fields.take("prompt"), fields.take("messages")
    fields.end()
    if (prompt is None) == (messages is None):
        raise refused("prompt", "give a prompt or messages, one of them")
    if prompt is None:
        return fields.parsed({"": "messages"}, request | {"messages": fields.with_images(_said(messages))})
    prompt, *others = prompt_list(prompt, model)
    if others:
        raise refused("prompt", f"prompt is a list of {len(others) + 1}: expected one")
    return fields.parsed({"": "prompt"}, request | {"prompt": prompt})


def prompt_list(prompts: Any, model: ServedModel, name: str = "prompt") -> list[str | Sequence[int]]:
    """The prompts of a request, its field `name`: one, or a list of them, each text or token ids of the model. Raises
    HTTPError."""
    if prompts == []:
        raise wrong(name, prompts, "text, token ids, or a list of these")
    if not (isinstance(prompts, list) and isinstance(prompts[0], (str, list))):
        prompts = [prompts]
    for prompt in prompts:
        if isinstance(prompt, str):
            continue
        if not isinstance(prompt, list) or any(type(each) is not int for each in prompt):
            raise wrong(name, prompt, "text, token ids, or a list of these")
        for each in prompt:
            if not 0 <= each < model.vocab_size:
                raise refused(name, f"{name} has the token id {each}: this model's are 0 to {model.vocab_size - 1}")
    return prompts
