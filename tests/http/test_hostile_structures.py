"""Structures that would end the server: each is its own request's error, and others are answered."""

from __future__ import annotations

import json
from typing import Any

import pytest
from costly_schemas import chain
from http_server import ServerProcess


def asked(server: ServerProcess, schema: Any) -> tuple[int, Any]:
    described = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    status, body, _ = server.chat(max_tokens=12, response_format=described)
    return status, body


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (chain(199, arrays=9), "takes too much to compile"),
        ({"type": "string", "pattern": "a?" * 2000 + "a" * 2000}, "too much work"),
    ],
    ids=["depth", "work"],
)
def test_a_structure_that_takes_too_much_is_its_requests_error(server: ServerProcess, schema: Any, words: str) -> None:
    status, body = asked(server, schema)
    assert status == 400 and words in body["error"]["message"], body
    status, body = asked(server, {"enum": [words]})
    assert status == 200 and json.loads(body["choices"][0]["message"]["content"]) == words


def test_a_name_of_a_special_token_may_be_answered(server: ServerProcess) -> None:
    status, body = asked(server, {"enum": ["<|im_end|>"]})
    assert status == 200 and json.loads(body["choices"][0]["message"]["content"]) == "<|im_end|>"
