"""Records the requests of a coding agent that nobody here wrote: it works on a small project, five calls of its tools.

The agent asks a server of this file, whose answers are a script: it is told to call its own tools, which it really
does, and gets a last word. What it sends is kept as it is, but for headers of the connection and keys. Agents are
programs of others, installed apart (npm install @openai/codex@0.171.0 @mariozechner/pi-coding-agent@0.73.1); as it
writes to a home of its own, HOME, nothing of the machine is in a request where that folder has a neutral name:

    python tools/bench/record_agent.py codex node_modules/.bin/codex tests/goldens/agents/codex.json.xz
    python tools/bench/record_agent.py pi node_modules/.bin/pi tests/goldens/agents/pi.json.xz

`replay_agents.py` asks a server of a model with what was recorded.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

#: Headers of a connection, and those that hold a key.
_NOT_KEPT = ("host", "connection", "content-length", "accept-encoding", "authorization", "x-api-key")
TASK = "A test of test_stock.py fails. Find out why, mend the code, and run the tests again."
DONE = "`Stock.take` did not check what there is; it does now, and both tests pass."
PROJECT = {
    "AGENTS.md": """# How to work here

- Python 3.10 or later, the standard library alone. Lines up to 100 characters, double quotes.
- Tests are run with `python3 -m unittest`; each change of behaviour has a test.
- An error says what was found and what was expected. No function prints.
- Leave files that are not of the task as they are, and make no commit.
""",
    "stock.py": '''"""What a shop has in stock."""


class Stock:
    """Numbers of things by name; none is ever below zero."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def put(self, name: str, number: int) -> None:
        """Add so many of a thing."""
        self._numbers[name] = self._numbers.get(name, 0) + number

    def take(self, name: str, number: int) -> int:
        """Take so many of a thing, and say how many are left."""
        self._numbers[name] = self._numbers.get(name, 0) - number
        return self._numbers[name]
''',
    "test_stock.py": """import unittest

from stock import Stock


class StockTest(unittest.TestCase):
    def test_what_was_put_is_there(self) -> None:
        stock = Stock()
        stock.put("cup", 3)
        self.assertEqual(stock.take("cup", 2), 1)

    def test_no_more_is_taken_than_there_is(self) -> None:
        stock = Stock()
        stock.put("cup", 1)
        with self.assertRaises(ValueError):
            stock.take("cup", 2)


if __name__ == "__main__":
    unittest.main()
""",
}
_OLD = "        self._numbers[name] = self._numbers.get(name, 0) - number\n"
_NEW = """        found = self._numbers.get(name, 0)
        if number > found:
            raise ValueError(f"{name}: {found} found, expected at least {number}")
        self._numbers[name] = found - number
"""
_PATCH = "\n".join(
    [
        *("apply_patch <<'EOF'", "*** Begin Patch", "*** Update File: stock.py", "@@"),
        *(f"-{line}" for line in _OLD.splitlines()),
        *(f"+{line}" for line in _NEW.splitlines()),
        *("*** End Patch", "EOF"),
    ]
)
_TESTS = "python3 -m unittest 2>&1"

Calls = list[tuple[str, dict[str, Any]]]


@dataclass(frozen=True)
class Agent:
    """An agent: its name, version and licence, the files of its home that point it at a server ("SERVER"), the words of
    its command behind its program, its environment, and the calls that it is told to make."""

    name: str
    version: str
    licence: str
    files: dict[str, str]
    words: tuple[str, ...]
    environment: dict[str, str]
    calls: Calls


AGENTS = {
    "codex": Agent(
        "Codex CLI",
        "0.171.0",
        "Apache-2.0",
        {
            ".codex/config.toml": 'model = "tools"\nmodel_provider = "edgellm"\n[model_providers.edgellm]\n'
            'name = "EdgeLLM"\nbase_url = "SERVER/v1"\nwire_api = "responses"\n'
        },
        ("exec", "--dangerously-bypass-approvals-and-sandbox"),
        {},
        [
            ("exec_command", {"cmd": "ls && cat test_stock.py"}),
            ("exec_command", {"cmd": "cat stock.py"}),
            ("exec_command", {"cmd": _PATCH}),
            ("exec_command", {"cmd": _TESTS}),
            ("exec_command", {"cmd": "git diff"}),
        ],
    ),
    "pi": Agent(
        "pi",
        "0.73.1",
        "MIT",
        {
            ".pi/agent/models.json": json.dumps(
                {
                    "providers": {
                        "edgellm": {
                            **{"baseUrl": "SERVER", "api": "anthropic-messages", "apiKey": "none"},
                            "models": [{"id": "tools", "contextWindow": 32768, "maxTokens": 1024}],
                        }
                    }
                }
            )
        },
        ("--provider", "edgellm", "--model", "tools", "--tools", "read,bash,edit,write,grep,find,ls", "-p"),
        {"PI_OFFLINE": "1"},
        [
            ("ls", {}),
            ("read", {"path": "test_stock.py"}),
            ("read", {"path": "stock.py"}),
            ("edit", {"path": "stock.py", "edits": [{"oldText": _OLD, "newText": _NEW}]}),
            ("bash", {"command": _TESTS}),
        ],
    ),
    "opencode": Agent(
        "opencode",
        "1.18.33",
        "MIT",
        {
            ".config/opencode/opencode.json": json.dumps(
                {
                    **{"model": "edgellm/tools", "autoupdate": False, "share": "disabled"},
                    "provider": {
                        "edgellm": {
                            "npm": "@ai-sdk/anthropic",
                            "options": {"baseURL": "SERVER/v1", "apiKey": "none"},
                            "models": {"tools": {"limit": {"context": 32768, "output": 1024}}},
                        }
                    },
                }
            )
        },
        ("run",),
        {},
        [
            ("glob", {"pattern": "**/*.py"}),
            ("read", {"filePath": "HOME/project/test_stock.py"}),
            ("read", {"filePath": "HOME/project/stock.py"}),
            ("edit", {"filePath": "HOME/project/stock.py", "oldString": _OLD, "newString": _NEW}),
            ("bash", {"command": _TESTS, "description": "Run the tests"}),
        ],
    ),
    "qwen": Agent(
        "Qwen Code",
        "0.15.10",
        "Apache-2.0",
        {},
        ("--auth-type", "anthropic", "-m", "tools", "-y", "-p"),
        {"ANTHROPIC_API_KEY": "none", "ANTHROPIC_BASE_URL": "SERVER"},
        [
            ("list_directory", {"path": "HOME/project"}),
            ("read_file", {"file_path": "HOME/project/test_stock.py"}),
            ("read_file", {"file_path": "HOME/project/stock.py"}),
            ("edit", {"file_path": "HOME/project/stock.py", "old_string": _OLD, "new_string": _NEW}),
            ("run_shell_command", {"command": _TESTS, "is_background": False}),
        ],
    ),
}


def message_events(call: tuple[str, dict[str, Any]] | None, number: int, text: str) -> Iterator[dict[str, Any]]:
    """An answer of `/v1/messages`, a call or a text, as its stream has it."""
    usage = {"input_tokens": 1, "output_tokens": 1}
    message = {"id": f"msg_{number}", "type": "message", "role": "assistant", "model": "tools", "content": []}
    yield {"type": "message_start", "message": {**message, "stop_reason": None, "stop_sequence": None, "usage": usage}}
    if call is None:
        block, delta = {"type": "text", "text": ""}, {"type": "text_delta", "text": text}
    else:
        block = {"type": "tool_use", "id": f"toolu_{number}", "name": call[0], "input": {}}
        delta = {"type": "input_json_delta", "partial_json": json.dumps(call[1])}
    yield {"type": "content_block_start", "index": 0, "content_block": block}
    yield {"type": "content_block_delta", "index": 0, "delta": delta}
    yield {"type": "content_block_stop", "index": 0}
    reason = "end_turn" if call is None else "tool_use"
    yield {"type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": None}, "usage": usage}
    yield {"type": "message_stop"}


def response_events(call: tuple[str, dict[str, Any]] | None, number: int, text: str) -> Iterator[dict[str, Any]]:
    """The same of `/v1/responses`."""
    response = {"id": f"resp_{number}", "object": "response", "model": "tools", "status": "in_progress", "output": []}
    yield {"type": "response.created", "response": response}
    if call is None:
        part = {"type": "output_text", "text": text, "annotations": []}
        item: dict[str, Any] = {"type": "message", "id": f"msg_{number}", "role": "assistant", "content": [part]}
    else:
        name, given = call
        item = {"type": "function_call", "id": f"fc_{number}", "call_id": f"call_{number}", "name": name}
        item["arguments"] = json.dumps(given)
    item["status"] = "completed"
    yield {"type": "response.output_item.added", "output_index": 0, "item": item}
    yield {"type": "response.output_item.done", "output_index": 0, "item": item}
    usage = {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2}
    response |= {"status": "completed", "output": [item], "usage": usage}
    yield {"type": "response.completed", "response": response}


class Script(ThreadingHTTPServer):
    """Answers an agent: each request with the call behind those whose results it has, and in the end with a text; a
    request without tools, such as one for a title, with a text at once. `requests` are what came, in order."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls
        self.requests: list[dict[str, Any]] = []
        self.keeping = threading.Lock()
        super().__init__(("127.0.0.1", 0), _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: Script
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers["content-length"]))
        headers = {name.lower(): value for name, value in self.headers.items() if name.lower() not in _NOT_KEPT}
        body = json.loads(data)
        with self.server.keeping:
            self.server.requests.append({"path": self.path, "headers": headers, "body": body})
        known = data.count(b'"function_call_output"') + data.count(b'"tool_result"')
        call = self.server.calls[known] if body.get("tools") and known < len(self.server.calls) else None
        events = message_events if "/v1/messages" in self.path else response_events
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        for event in events(call, known, DONE if body.get("tools") else "Mend the stock"):
            self.wfile.write(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode())

    def log_message(self, *_: Any) -> None:
        pass


def record(agent: Agent, program: Path, home: Path) -> list[dict[str, Any]]:
    """What the agent sends while it works in a new folder `project` of `home`, which gets its files."""
    project = home / "project"
    shutil.rmtree(project, ignore_errors=True)
    project.mkdir(parents=True)
    for name, text in PROJECT.items():
        (project / name).write_text(text, "utf-8")
    git = ["git", "-c", "user.name=user", "-c", "user.email=user@localhost"]
    for words in (["init", "-q", "-b", "main"], ["add", "."], ["commit", "-q", "-m", "Stock"]):
        subprocess.run([*git, *words], cwd=project, check=True)
    script = Script(json.loads(json.dumps(agent.calls).replace("HOME", str(home))))
    threading.Thread(target=script.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{script.server_port}"
    for name, text in agent.files.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text.replace("SERVER", url), "utf-8")
    given = {name: value.replace("SERVER", url) for name, value in agent.environment.items()}
    about = {"HOME": str(home), "PATH": os.environ["PATH"], "TZ": "UTC", "LANG": "C.UTF-8", **given}
    command = [str(program.absolute()), *agent.words, TASK]
    subprocess.run(command, cwd=project, env=about, stdin=subprocess.DEVNULL, timeout=300, check=True)
    script.shutdown()
    return script.requests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("agent", choices=AGENTS)
    parser.add_argument("program", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--home", type=Path, default=Path("/home/user"))
    given = parser.parse_args()
    agent = AGENTS[given.agent]
    requests = record(agent, given.program, given.home)
    command = f"record_agent.py {given.agent}: {given.program.name} {' '.join(agent.words)} TASK"
    about = {"agent": agent.name, "version": agent.version, "licence": agent.licence, "task": TASK}
    about |= {"command": command, "recorded": str(date.today())}
    written = json.dumps({**about, "requests": requests}, ensure_ascii=False).encode()
    given.file.write_bytes(lzma.compress(written, preset=9 | lzma.PRESET_EXTREME))
    print(f"{len(requests)} requests, {len(written):,} bytes, packed {given.file.stat().st_size:,}")


if __name__ == "__main__":
    main()
