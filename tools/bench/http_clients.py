"""Clients of OpenAI's API that nobody here wrote, on a server of the shipped model: what each gets of it.

Start a server as the guide of tools shows it, and in an environment of their own (pip install langchain-openai
openai-agents pydantic-ai-slim[openai] llm) run: python tools/bench/http_clients.py http://127.0.0.1:8000/v1
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from openai import AsyncOpenAI
from pydantic import BaseModel, ConfigDict
from pydantic_ai import Agent as PydanticAgent
from pydantic_ai import NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.models.openai import OpenAIResponsesModel as PydanticResponses
from pydantic_ai.providers.openai import OpenAIProvider

MODEL = "shipped"
WHERE, BATTERY = "Where is the red cup?", "How full is your battery?"


class Seen(BaseModel):
    """What the robot saw."""

    model_config = ConfigDict(extra="forbid")
    colour: Literal["red", "blue"]
    certain: bool


@tool
def move(object: Literal["red cup", "green apple", "white bowl"], to: Literal["left", "right"]) -> str:
    """Put an object of the table somewhere else."""
    return f"{object} is at the {to}"


@function_tool
def wave(times: Literal[1, 2, 3]) -> str:
    """Wave."""
    return f"waved {times} times"


def show(name: str, value: Any) -> None:
    print(f"  {name}: {value}", flush=True)


def langchain(url: str, with_responses: bool) -> None:
    """LangChain's model: chat, stream, schema, a call whole and streamed, and what follows its result."""
    print("langchain-openai", version("langchain-openai"), "Responses" if with_responses else "Chat Completions")
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 80, "use_responses_api": with_responses}
    chat = ChatOpenAI(model=MODEL, base_url=url, api_key="none", **options)
    show("chat", chat.invoke(WHERE).text)
    show("stream", [chunk.text for chunk in chat.stream(BATTERY)])
    show("schema", repr(chat.with_structured_output(Seen, method="json_schema").invoke(WHERE)))
    asked: list[Any] = [HumanMessage("Please put the green apple to the right.")]
    bound = chat.bind_tools([move], tool_choice="move", parallel_tool_calls=False)
    answer = bound.invoke(asked)
    show("call", [(call["name"], call["args"]) for call in answer.tool_calls])
    first, *rest = bound.stream(asked)
    joined = sum(rest, first)
    show("call, streamed", [(call["name"], call["args"]) for call in joined.tool_calls])
    (call,) = answer.tool_calls
    result = ToolMessage(move.invoke(call["args"]), tool_call_id=call["id"])
    said = chat.bind_tools([move], tool_choice="none").invoke([*asked, answer, result])
    show("after its result", f"{said.text!r}, calls {said.tool_calls}")


async def agents(url: str, kind: Any) -> None:
    """OpenAI's agents, which call tools and go on by themselves."""
    print("openai-agents", version("openai-agents"), kind.__name__)
    model = kind(model=MODEL, openai_client=AsyncOpenAI(base_url=url, api_key="none"))
    settings = ModelSettings(max_tokens=60)
    plain = Agent(name="Pip", model=model, model_settings=settings)
    show("chat", (await Runner.run(plain, BATTERY)).final_output)
    typed = Agent(name="Pip", model=model, output_type=Seen, model_settings=settings)
    show("schema", repr((await Runner.run(typed, WHERE)).final_output))
    settings = ModelSettings(max_tokens=60, tool_choice="wave", parallel_tool_calls=False)
    agent = Agent(name="Pip", model=model, tools=[wave], model_settings=settings)
    found = await Runner.run(agent, "Wave.", max_turns=3)
    show("items", [type(item).__name__ for item in found.new_items])
    show("results", [item.output for item in found.new_items if hasattr(item, "output")])
    streamed = Runner.run_streamed(agent, "Wave.", max_turns=3)
    events = [getattr(event, "data", None) async for event in streamed.stream_events()]
    show("events of a stream", dict(Counter(event.type for event in events if event is not None)))


async def typed_tools(url: str, kind: Any) -> None:
    """OpenAI's agents with tools and a schema for the answer, whole and streamed."""
    print("openai-agents, tools and a schema", version("openai-agents"), kind.__name__)
    model = kind(model=MODEL, openai_client=AsyncOpenAI(base_url=url, api_key="none"))
    for choice in ("auto", "wave"):
        settings = ModelSettings(max_tokens=60, tool_choice=choice)
        agent = Agent(name="Pip", model=model, tools=[wave], output_type=Seen, model_settings=settings)
        for question in ("Wave.", WHERE):
            found = await Runner.run(agent, question, max_turns=3)
            show(f"{choice}, {question}", ([type(item).__name__ for item in found.new_items], found.final_output))
            streamed = Runner.run_streamed(agent, question, max_turns=3)
            count = len([event async for event in streamed.stream_events()])
            show("streamed", (count, streamed.final_output))


def pydantic_agents(url: str, kind: Any) -> None:
    """pydantic-ai's agents with a tool, and a schema for the answer."""
    print("pydantic-ai", version("pydantic-ai-slim"), kind.__name__)
    model = kind(MODEL, provider=OpenAIProvider(base_url=url, api_key="none"))
    agent = PydanticAgent(model, output_type=NativeOutput(Seen), model_settings={"max_tokens": 80})

    @agent.tool_plain
    def wave(times: Literal[1, 2, 3]) -> str:
        """Wave."""
        return f"waved {times} times"

    for question in ("Wave.", WHERE):
        found = agent.run_sync(question)
        parts = [type(part).__name__ for message in found.all_messages() for part in message.parts]
        show(question, (found.output, parts))


def command_line(url: str) -> None:
    """The program llm."""
    print("llm", version("llm"))
    schema = {"type": "object", "properties": {"seen": {"enum": ["cup", "bowl"]}}, "required": ["seen"]}
    schema = json.dumps({**schema, "additionalProperties": False})
    toys = Path(__file__).parents[2] / "edgellm" / "shipped" / "scenes" / "toys.png"
    with tempfile.TemporaryDirectory() as home:
        known = f"model_id: robot, model_name: {MODEL}, api_base: '{url}'"
        known += ", vision: true, supports_schema: true, supports_tools: true"
        (Path(home) / "extra-openai-models.yaml").write_text(f"- {{{known}}}\n")
        (Path(home) / "keys.json").write_text('{"openai": "none"}')
        for words in (
            [WHERE],
            ["--no-stream", WHERE],
            ["--schema", schema, WHERE],
            ["-T", "llm_version", BATTERY],
            ["-a", str(toys), "What do you see?"],
        ):
            program = [str(Path(sys.executable).with_name("llm")), "-m", "robot", *words]
            environment = {**os.environ, "LLM_USER_PATH": home}
            done = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
            shown = " ".join(word if len(word) < 40 else "..." for word in words)
            show(shown, done.stdout.strip() or done.stderr.strip()[-300:])


def main() -> None:
    """Ask the server whose address is the first argument."""
    url = sys.argv[1]
    os.environ["OPENAI_AGENTS_DISABLE_TRACING"] = "1"
    for with_responses in (False, True):
        langchain(url, with_responses)
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        asyncio.run(agents(url, kind))
        asyncio.run(typed_tools(url, kind))
    for kind in (OpenAIChatModel, PydanticResponses):
        pydantic_agents(url, kind)
    command_line(url)


if __name__ == "__main__":
    main()
