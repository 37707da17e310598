"""The template that turns a conversation into the text a model was trained on."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from itertools import takewhile
from pathlib import Path
from typing import Any

from edgellm.engines.formats.small_files import TEMPLATE_BYTES, read_text
from edgellm.engines.formats.strict_formats import parse_json, parsed_json
from edgellm.errors import EngineDirectoryError, RequestError, TemplateError
from edgellm.text.messages import SYSTEM_ROLES, show_media, shown_texts
from edgellm.text.template_budget import LimitExceeded, TemplateLimits, TemplateRaised, run_with_budget
from edgellm.text.template_trials import TOOL, TemplateTrials

#: Roles that a model's files give to special tokens, and what these are in a trial: some templates fail without.
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
TRIAL_TOKENS = {name: f"<{name.removesuffix('_token')}>" for name in NAMED_TOKENS}
#: Of the time that a rendering may take, so much more for compiling and for all trials.
COMPILING_SHARE, TRIAL_SHARE = 0.5, 0.1


class ChatTemplate:
    """One or several named jinja2 templates, rendered in a sandbox with limits on size and time.

    `sources` maps names to template texts; "default" is used, and "tool_use" in its place where tools are given.
    """

    def __init__(self, sources: dict[str, str], origin: str, limits: TemplateLimits | None = None) -> None:
        """`origin` says in errors where the template is from."""
        self.sources = sources
        self.origin = origin
        self.limits = limits or TemplateLimits()
        self._compiled: dict[str, Any] = {}
        self._known: dict[str, TemplateTrials] = {}
        self._trial_seconds = self.limits.seconds * TRIAL_SHARE
        if not sources:
            raise TemplateError(f"{origin} holds no template")
        for name, source in sources.items():
            if len(source) > self.limits.source_size:
                raise TemplateError(
                    f"the chat template {name!r} of {origin} has {len(source)} characters: at most "
                    f"{self.limits.source_size} are accepted"
                )

    @classmethod
    def from_file(cls, path: str | Path) -> ChatTemplate:
        """Read a template from a text file, or from a JSON file that holds it under `chat_template`."""
        path = Path(path)
        text = read_text(path, TEMPLATE_BYTES, TemplateError, "the chat template", takes_pipes=True)
        if path.suffix == ".json":
            value = parse_json(text, f"the chat template {path}", TemplateError)
            return cls(_sources(value.get("chat_template") if isinstance(value, dict) else value, path), str(path))
        return cls({"default": text}, str(path))

    @classmethod
    def from_directory(cls, directory: Path, tokenizer_config: dict[str, Any]) -> ChatTemplate | None:
        """Find a model's templates: `chat_template.jinja`, `chat_template.json`, then `tokenizer_config.json`; and the
        named ones in `additional_chat_templates/*.jinja`, which come before those of the same name elsewhere."""
        files = [directory / "chat_template.jinja", directory / "chat_template.json"]
        origin, sources = next((path for path in files if path.is_file()), None), {}
        if origin is not None:
            sources = cls.from_file(origin).sources
        elif tokenizer_config.get("chat_template") is not None:
            origin = directory / "tokenizer_config.json"
            sources = _sources(tokenizer_config["chat_template"], origin)
        named = [path for path in sorted((directory / "additional_chat_templates").glob("*.jinja")) if path.is_file()]
        sources |= {path.stem: cls.from_file(path).sources["default"] for path in named}
        return None if origin is None and not named else cls(sources, str(origin or directory))

    def render(
        self, values: dict[str, Any], special_tokens: dict[str, str] | None = None, add_generation_prompt: bool = True
    ) -> str:
        """The text of `values["messages"]`; every failure is a `TemplateError` that says where and why. `values` may
        hold `tools`, `documents` and whatever else the template knows; `special_tokens` are `bos_token` and so on, as
        text."""
        name = self._name(bool(values.get("tools")))
        variables = {**(special_tokens or {}), "tools": None, "documents": None, **values}
        variables["add_generation_prompt"] = add_generation_prompt
        return self._render(name, variables, self.limits)

    def fitted(self, messages: list[dict[str, Any]], with_tools: bool = False) -> list[dict[str, Any]]:
        """Checked messages with contents as this template takes them (the one for tools, where there are some).

        A list of text parts stays one where the template writes the text in it, and is else joined by line ends; text
        becomes a part where the template writes nothing else; None beside tool calls becomes empty text, but where the
        template tests for it. Arguments of calls, an object or its text, become what the template writes as JSON. An
        empty system message is left out, but where the template would have a prompt of its own in its place. A
        developer's message is a system message, and several at the beginning are one, where the template would leave
        out what they say, or fail.
        """
        trials = self.trials(with_tools)
        messages = _fitted_system(messages, trials)
        found = [
            {**message, "content": _fitted_content(message, trials)}
            for message in messages
            if message["role"] not in SYSTEM_ROLES
            or any(shown_texts(message["content"]))
            or trials.has_own_prompt(with_tools)
        ]
        if not found:
            raise RequestError("there are no messages beside an empty system prompt: expected at least one")
        for message in found:
            if isinstance(message.get("tool_calls"), list):
                message["tool_calls"] = [_fitted_call(call, trials) for call in message["tool_calls"]]
        return found

    @cached_property
    def template_variables(self) -> frozenset[str]:
        """The names of the variables that a template of these reads, `messages` and the like among them. Raises
        TemplateError where one cannot be compiled."""
        import jinja2.meta

        found: set[str] = set()
        for name, source in self.sources.items():
            self._compiled_template(name)  # so that its errors are named
            tree = run_with_budget(self.limits, partial(self._environment.parse, source))
            found |= run_with_budget(self.limits, partial(jinja2.meta.find_undeclared_variables, tree))
        return frozenset(found - set(self._environment.globals))

    @cached_property
    def _environment(self) -> Any:
        from edgellm.text.template_sandbox import TemplateEnvironment

        return TemplateEnvironment()

    def _name(self, with_tools: bool) -> str:
        name = "tool_use" if with_tools and "tool_use" in self.sources else "default"
        if name not in self.sources:
            names = ", ".join(sorted(self.sources))
            raise TemplateError(f"{self.origin} has the chat templates {names}, but none named 'default'")
        return name

    def trials(self, with_tools: bool = False) -> TemplateTrials:
        """What the template (the one for tools, where there are some) does with forms of messages."""
        name = self._name(with_tools)
        if name not in self._known:
            self._known[name] = TemplateTrials(partial(self._tried, name))
        return self._known[name]

    def _tried(self, name: str, messages: list[dict[str, Any]], tools: bool) -> str | None:
        values = {**TRIAL_TOKENS, "messages": messages, "tools": [TOOL] if tools else None, "documents": None}
        try:
            self._compiled_template(name)  # in its own time
            started = time.thread_time()
            try:
                limits = replace(self.limits, seconds=self._trial_seconds)
                return self._render(name, {**values, "add_generation_prompt": True}, limits)
            finally:
                self._trial_seconds = max(self._trial_seconds - (time.thread_time() - started), 0)
        except TemplateError:
            return None

    def _render(self, name: str, variables: dict[str, Any], limits: TemplateLimits) -> str:
        template = self._compiled_template(name)
        write, make_context = template.root_render_func, template.new_context
        return self._run(limits, lambda: self._environment.concat(write(make_context(plain_values(variables)))))

    def _compiled_template(self, name: str) -> Any:
        """A compiled template; one that failed fails again at once."""
        if name not in self._compiled:
            limits = replace(self.limits, seconds=self.limits.seconds * COMPILING_SHARE)
            try:
                self._compiled[name] = self._run(limits, lambda: self._environment.from_string(self.sources[name]))
            except TemplateError as error:
                self._compiled[name] = error
        compiled = self._compiled[name]
        if isinstance(compiled, TemplateError):
            raise TemplateError(str(compiled)) from compiled
        return compiled

    def _run(self, limits: TemplateLimits, function: Callable[[], Any]) -> Any:
        """What `function` gives within limits; all that can go wrong in a template becomes a `TemplateError`."""
        import jinja2

        what = f"the chat template of {self.origin}"
        try:
            return run_with_budget(limits, function)
        except LimitExceeded as error:
            raise TemplateError(f"{what} was stopped: it {error}") from error
        except TemplateRaised as error:
            raise TemplateError(f"{what} refuses these messages: {error}") from error
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"{what} has a syntax error in line {error.lineno}: {error.message}") from error
        except RecursionError as error:
            raise TemplateError(f"{what} was stopped: it is nested too deeply, or calls itself without end") from error
        except Exception as error:  # a template can fail in as many ways as a program
            raise TemplateError(f"{what} failed: {type(error).__name__}: {str(error)[:500]}") from error


def _fitted_system(messages: list[dict[str, Any]], trials: TemplateTrials) -> list[dict[str, Any]]:
    if any(message["role"] == "developer" for message in messages) and not trials.writes("developer", 1):
        messages = [{**each, "role": "system"} if each["role"] == "developer" else each for each in messages]
    leading = list(takewhile(lambda message: message["role"] in SYSTEM_ROLES, messages))
    if len(leading) < 2 or show_media(leading) or trials.writes("system", 2):
        return messages
    texts = ("\n".join(shown_texts(message["content"])) for message in leading)
    return [{"role": leading[0]["role"], "content": "\n\n".join(filter(None, texts))}, *messages[len(leading) :]]


def _fitted_content(message: dict[str, Any], trials: TemplateTrials) -> Any:
    content = message["content"]
    if content is None:
        return None if trials.tests_for_none else ""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if trials.wants_parts else content
    if any(part["type"] != "text" for part in content) or trials.reads_parts(message["role"]) or trials.wants_parts:
        return content
    return "\n".join(part["text"] for part in content)


def _fitted_call(call: Any, trials: TemplateTrials) -> Any:
    function: Any = call.get("function") if isinstance(call, dict) else None
    arguments: Any = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(arguments, (str, dict)) or isinstance(arguments, str) == trials.wants_argument_text:
        return call
    try:
        read = json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else parsed_json(arguments)
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": read}}


def plain_values(value: Any) -> Any:
    """`value` rebuilt of plain text, numbers, lists and dictionaries, so that a template meets no other object. Raises
    TypeError for what is none of these."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, dict):
        return {plain_values(key): plain_values(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_values(item) for item in value]
    for kind in (str, int, float):
        if isinstance(value, kind):  # a subclass, which may do what it likes
            return getattr(kind, {str: "__str__", int: "__int__", float: "__float__"}[kind])(value)
    raise TypeError(
        f"a {type(value).__name__} is among the values: expected text, numbers, lists, dictionaries, True, False, None"
    )


def _sources(value: Any, path: Path) -> dict[str, str]:
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list) and all(isinstance(item, dict) and isinstance(item.get("name"), str) for item in value):
        value = {item["name"]: item.get("template") for item in value}
    if isinstance(value, dict) and all(isinstance(text, str) for text in value.values()):
        return dict(value)
    raise EngineDirectoryError(
        f"chat_template in {path} is a {type(value).__name__}: expected text, or a list of objects with name and "
        "template"
    )
