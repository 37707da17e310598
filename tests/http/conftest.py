"""Servers that several tests ask, and the shipped model in this process."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from http_server import ServerProcess, running

from edgellm import LLM
from edgellm.opened_model import SHIPPED_MODEL


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    """The shipped model, served with what is the default."""
    with running() as found:
        yield found


@pytest.fixture(scope="session")
def client(server: ServerProcess) -> openai.OpenAI:
    return server.client()


@pytest.fixture(scope="session")
def llm() -> Iterator[LLM]:
    """The same model, asked in Python."""
    with LLM(SHIPPED_MODEL, backend="numpy") as opened:
        yield opened
