"""The template that turns a conversation into the text a model was trained on."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from edgellm.engines.directories.small_files import TEMPLATE_BYTES, read_text
from edgellm.engines.directories.strict_json import parse_json
from edgellm.errors import EngineDirectoryError, TemplateError
from edgellm.text.sandbox import LimitExceeded, TemplateLimits, TemplateRaised, run_with_budget


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
            return cls(_sources_of_json(text, path), str(path))
        return cls({"default": text}, str(path))

    @classmethod
    def from_directory(cls, directory: Path, tokenizer_config: dict[str, Any]) -> ChatTemplate | None:
        """Find a model's template: `chat_template.jinja`, `chat_template.json`, then `tokenizer_config.json`."""
        for name in ("chat_template.jinja", "chat_template.json"):
            if (directory / name).is_file():
                return cls.from_file(directory / name)
        value = tokenizer_config.get("chat_template")
        if value is None:
            return None
        path = directory / "tokenizer_config.json"
        return cls(_sources(value, path), str(path))

    def render(
        self,
        values: dict[str, Any],
        special_tokens: dict[str, str] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """The text of `values["messages"]`; every failure is a `TemplateError` that says where and why.

        `values` may hold `tools`, `documents` and whatever else the template knows; `special_tokens` are `bos_token`
        and so on, as text.
        """
        name = "tool_use" if values.get("tools") and "tool_use" in self.sources else "default"
        if name not in self.sources:
            raise TemplateError(
                f"{self.origin} has the chat templates {', '.join(sorted(self.sources))}, but none named 'default'"
            )
        variables = {**(special_tokens or {}), "tools": None, "documents": None, **values}
        variables["add_generation_prompt"] = add_generation_prompt
        return run_with_budget(self.limits, lambda: self._render(name, variables))

    @cached_property
    def wants_parts(self) -> bool:
        """Whether a message must be a list of parts for its text to be written, as some templates of models that take
        images have it; found out with a message."""
        text = "Hello"

        def writes(content: Any) -> bool:
            try:
                return text in self.render({"messages": [{"role": "user", "content": content}]})
            except TemplateError:
                return False

        return not writes(text) and writes([{"type": "text", "text": text}])

    @cached_property
    def variables(self) -> frozenset[str]:
        """The names of all variables that the templates read; raises TemplateError where one has an error."""
        return run_with_budget(self.limits, lambda: frozenset().union(*map(self._variables_of, self.sources.values())))

    def _variables_of(self, source: str) -> set[str]:
        from jinja2.meta import find_undeclared_variables

        try:
            return find_undeclared_variables(self._environment.parse(source))
        except Exception as error:  # as for rendering
            raise TemplateError(
                f"the chat template of {self.origin} cannot be read: {type(error).__name__}: {str(error)[:500]}"
            ) from error

    @cached_property
    def _environment(self) -> Any:
        from edgellm.text.sandbox import TemplateEnvironment

        return TemplateEnvironment()

    def _render(self, name: str, variables: dict[str, Any]) -> str:
        import jinja2

        what = f"the chat template of {self.origin}"
        try:
            if name not in self._compiled:
                self._compiled[name] = self._environment.from_string(self.sources[name])
            template = self._compiled[name]
            pieces, size = [], 0
            for piece in template.root_render_func(template.new_context(variables)):
                size += len(piece)
                if size > self.limits.output_size:
                    raise LimitExceeded(f"writes more than {self.limits.output_size} characters")
                pieces.append(piece)
            return "".join(pieces)
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


def _sources_of_json(text: str, path: Path) -> dict[str, str]:
    value = parse_json(text, f"the chat template {path}", TemplateError)
    return _sources(value.get("chat_template") if isinstance(value, dict) else value, path)


def _sources(value: Any, path: Path) -> dict[str, str]:
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, dict) and all(isinstance(item, str) for item in value.values()):
        return dict(value)
    if isinstance(value, list) and all(
        isinstance(item, dict) and isinstance(item.get("name"), str) and isinstance(item.get("template"), str)
        for item in value
    ):
        return {item["name"]: item["template"] for item in value}
    raise EngineDirectoryError(
        f"chat_template in {path} is a {type(value).__name__}: expected text, or a list of objects with name and "
        "template"
    )
