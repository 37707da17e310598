"""Servers that several tests ask, and the shipped model in this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from call_templates import WRITTEN, call_template
from http_server import ServerProcess, running

from edgellm import LLM
from edgellm.opened_model import SHIPPED_MODEL


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    """The shipped model, served with what is the default, also under another name."""
    with running("--allowed-host", "robot.test") as found:
        yield found


@pytest.fixture(scope="session")
def locked() -> Iterator[ServerProcess]:
    """The same for who has its key."""
    with running("--api-key", "key-of-the-robot", key="key-of-the-robot") as found:
        yield found


@pytest.fixture(scope="session")
def tool_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chat template that shows tools, and calls as Hermes writes them."""
    path = tmp_path_factory.mktemp("template") / "tools.jinja"
    path.write_text(call_template(WRITTEN["hermes"]))
    return path


@pytest.fixture(scope="session")
def tool_server(tool_template: Path) -> Iterator[ServerProcess]:
    """The shipped model with that template."""
    with running("--chat-template", tool_template) as found:
        yield found


@pytest.fixture(scope="session")
def client(server: ServerProcess) -> openai.OpenAI:
    return server.client()


@pytest.fixture(scope="session")
def llm() -> Iterator[LLM]:
    """The same model, asked in Python."""
    with LLM(SHIPPED_MODEL, backend="numpy") as opened:
        yield opened
