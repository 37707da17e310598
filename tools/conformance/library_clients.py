"""Libraries that ask models: litellm, langchain-openai, instructor, and the program llm. See run.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from scenarios import BATTERY, LOOK, MODEL, TOOLS, TOYS, WHERE, Seen, Server, is_place, main, refused, scenario

OBJECT = {"type": "object", "properties": {"object": {"type": "string"}}, "required": ["object"]}
LOOK_AT: Any = {"name": "look_at", "description": "Look at an object.", "parameters": OBJECT}
QUESTION: list[Any] = [{"role": "user", "content": WHERE}]
#: How litellm names the server's interfaces: what stands before the model, and behind the address.
ROUTES = {"chat": ("openai", "/v1"), "messages": ("anthropic", ""), "ollama": ("ollama_chat", "")}


def litellm_scenarios(endpoint: str) -> None:
    """litellm with one of the server's interfaces."""
    provider, path = ROUTES[endpoint]

    def complete(server: Server, model: str = MODEL, **more: Any) -> Any:
        import litellm

        base = {"api_base": f"{server.root}{path}", "api_key": "none", "max_tokens": 80, "messages": QUESTION}
        return litellm.completion(model=f"{provider}/{model}", **base | more)

    @scenario("litellm", endpoint, "plain")
    def plain(server: Server) -> None:
        found = complete(server)
        is_place(found.choices[0].message.content)
        assert found.usage.prompt_tokens > 20 < found.usage.total_tokens

    @scenario("litellm", endpoint, "streamed")
    def streamed(server: Server) -> None:
        pieces = [each.choices[0].delta.content or "" for each in complete(server, stream=True)]
        is_place("".join(pieces))
        assert sum(map(bool, pieces)) > 2

    @scenario("litellm", endpoint, "call")
    def call(server: Server) -> None:
        asked: list[Any] = [{"role": "user", "content": LOOK}]
        tools = [{"type": "function", "function": LOOK_AT}]
        message = complete(server, TOOLS, messages=asked, tools=tools).choices[0].message
        (called,) = message.tool_calls
        assert (called.function.name, json.loads(called.function.arguments)) == ("look_at", {"object": "yellow banana"})
        result = {"role": "tool", "tool_call_id": called.id, "name": "look_at", "content": "done"}
        said = complete(server, TOOLS, messages=[*asked, message.model_dump(), result], tools=tools)
        assert said.choices[0].message.content and not said.choices[0].message.tool_calls

    @scenario("litellm", endpoint, "schema")
    def schema(server: Server) -> None:
        Seen.model_validate_json(complete(server, response_format=Seen).choices[0].message.content)

    @scenario("litellm", endpoint, "image")
    def image(server: Server) -> None:
        import base64

        url = f"data:image/png;base64,{base64.b64encode(TOYS.read_bytes()).decode()}"
        parts = [{"type": "text", "text": "What do you see?"}, {"type": "image_url", "image_url": {"url": url}}]
        found = complete(server, messages=[{"role": "user", "content": parts}])
        assert "ball" in found.choices[0].message.content

    @scenario("litellm", endpoint, "error")
    def error(server: Server) -> None:
        try:
            complete(server, "shiped")
        except Exception as raised:
            refused(raised, "did you mean shipped")
            assert getattr(raised, "status_code", None) == 404, raised
        else:
            raise AssertionError("no error")


for each in ROUTES:
    litellm_scenarios(each)


def litellm_response(server: Server, asked: Any, model: str = MODEL, **more: Any) -> Any:
    import litellm

    return litellm.responses(model=f"openai/{model}", input=asked, api_base=server.url, api_key="none", **more)


@scenario("litellm", "responses", "plain")
def litellm_responses(server: Server) -> None:
    is_place(litellm_response(server, WHERE).output[0].content[0].text)


@scenario("litellm", "responses", "streamed")
def litellm_responses_streamed(server: Server) -> None:
    events = list(litellm_response(server, WHERE, stream=True))
    is_place("".join(each.delta for each in events if each.type == "response.output_text.delta"))
    is_place(events[-1].response.output[0].content[0].text)


@scenario("litellm", "responses", "call")
def litellm_responses_call(server: Server) -> None:
    tools = [{"type": "function", **LOOK_AT}]
    first = litellm_response(server, LOOK, TOOLS, tools=tools)
    (called,) = first.output
    assert (called.name, json.loads(called.arguments)) == ("look_at", {"object": "yellow banana"})
    result = [{"type": "function_call_output", "call_id": called.call_id, "output": "done"}]
    said = litellm_response(server, result, TOOLS, tools=tools, previous_response_id=first.id)
    assert said.output[0].content[0].text


def langchain_scenarios(endpoint: str) -> None:
    """LangChain's model with one of OpenAI's endpoints."""

    def chat(server: Server, model: str = MODEL) -> Any:
        from langchain_openai import ChatOpenAI

        options = {"temperature": 0, "max_tokens": 80, "use_responses_api": endpoint == "responses"}
        return ChatOpenAI(model=model, base_url=server.url, api_key="none", **options)

    @scenario("langchain-openai", endpoint, "plain")
    def plain(server: Server) -> None:
        found = chat(server).invoke(WHERE)
        is_place(found.text)
        assert found.usage_metadata["input_tokens"] > 20

    @scenario("langchain-openai", endpoint, "streamed")
    def streamed(server: Server) -> None:
        pieces = [each.text for each in chat(server).stream(WHERE)]
        is_place("".join(pieces))
        assert sum(map(bool, pieces)) > 2

    @scenario("langchain-openai", endpoint, "call")
    def call(server: Server) -> None:
        from langchain_core.messages import HumanMessage, ToolMessage

        asked: list[Any] = [HumanMessage(LOOK)]
        model = chat(server, TOOLS).bind_tools([{"type": "function", "function": LOOK_AT}])
        answer = model.invoke(asked)
        (called,) = answer.tool_calls
        assert (called["name"], called["args"]) == ("look_at", {"object": "yellow banana"})
        first, *rest = model.stream(asked)
        assert [each["args"] for each in sum(rest, first).tool_calls] == [called["args"]]
        said = model.invoke([*asked, answer, ToolMessage("done", tool_call_id=called["id"])])
        assert said.text and not said.tool_calls

    @scenario("langchain-openai", endpoint, "schema")
    def schema(server: Server) -> None:
        assert isinstance(chat(server).with_structured_output(Seen, method="json_schema").invoke(WHERE), Seen)
        called = chat(server).with_structured_output(Seen, method="function_calling").invoke(WHERE)
        assert isinstance(called, Seen)

    @scenario("langchain-openai", endpoint, "error")
    def error(server: Server) -> None:
        try:
            chat(server, "shiped").invoke(WHERE)
        except Exception as raised:
            refused(raised, "did you mean shipped")
        else:
            raise AssertionError("no error")


for each in ("chat", "responses"):
    langchain_scenarios(each)


def instructor_client(server: Server, mode: str = "JSON_SCHEMA") -> Any:
    import instructor
    import openai

    return instructor.from_openai(openai.OpenAI(base_url=server.url, api_key="none"), mode=instructor.Mode[mode])


@scenario("instructor", "chat", "schema")
def instructor_schema(server: Server) -> None:
    for mode in ("JSON_SCHEMA", "TOOLS", "TOOLS_STRICT"):
        client = instructor_client(server, mode)
        found = client.create(model=MODEL, messages=QUESTION, response_model=Seen, max_retries=0)
        assert isinstance(found, Seen), mode


@scenario("instructor", "responses", "schema")
def instructor_responses(server: Server) -> None:
    client = instructor_client(server, "RESPONSES_TOOLS")
    found = client.create(model=MODEL, messages=QUESTION, response_model=Seen, max_retries=0)
    assert isinstance(found, Seen)


@scenario("instructor", "chat", "streamed")
def instructor_streamed(server: Server) -> None:
    parts = list(instructor_client(server).create_partial(model=MODEL, messages=QUESTION, response_model=Seen))
    assert Seen(**parts[-1].model_dump()) and len(parts) > 1


@scenario("instructor", "chat", "call")
def instructor_call(server: Server) -> None:
    from pydantic import BaseModel

    class look_at(BaseModel):
        """Look at an object."""

        object: str

    asked = [{"role": "user", "content": LOOK}]
    found = instructor_client(server, "TOOLS").create(model=TOOLS, messages=asked, response_model=look_at)
    assert found.object == "yellow banana"


@scenario("instructor", "chat", "error")
def instructor_error(server: Server) -> None:
    try:
        instructor_client(server).create(model="shiped", messages=QUESTION, response_model=Seen, max_retries=0)
    except Exception as raised:
        refused(raised, "did you mean shipped")
    else:
        raise AssertionError("no error")


def command(server: Server, *words: str, model: str = MODEL) -> subprocess.CompletedProcess[str]:
    """The program llm with some words, of a model that is known as `robot`."""
    with tempfile.TemporaryDirectory() as home:
        known = f"model_id: robot, model_name: {model}, api_base: '{server.url}'"
        known += ", vision: true, supports_schema: true, supports_tools: true"
        (Path(home) / "extra-openai-models.yaml").write_text(f"- {{{known}}}\n")
        (Path(home) / "keys.json").write_text('{"openai": "none"}')
        program = [str(Path(sys.executable).with_name("llm")), "-m", "robot", *words]
        environment = {**os.environ, "LLM_USER_PATH": home}
        return subprocess.run(program, env=environment, capture_output=True, text=True, check=False)


@scenario("llm", "chat", "plain")
def llm_plain(server: Server) -> None:
    is_place(command(server, "--no-stream", WHERE).stdout)


@scenario("llm", "chat", "streamed")
def llm_streamed(server: Server) -> None:
    is_place(command(server, WHERE).stdout)


@scenario("llm", "chat", "call")
def llm_call(server: Server) -> None:
    tool = 'def look_at(object: str) -> str:\n    "Look at an object."\n    return "done"\n'
    done = command(server, "--functions", tool, "--td", LOOK, model=TOOLS)
    assert "yellow banana" in done.stderr and done.stdout.strip() and not done.returncode, done


@scenario("llm", "chat", "schema")
def llm_schema(server: Server) -> None:
    Seen.model_validate_json(command(server, "--schema", json.dumps(Seen.model_json_schema()), WHERE).stdout)


@scenario("llm", "chat", "image")
def llm_image(server: Server) -> None:
    assert "ball" in command(server, "-a", str(TOYS), "What do you see?").stdout


@scenario("llm", "chat", "error")
def llm_error(server: Server) -> None:
    done = command(server, BATTERY, model="shiped")
    assert done.returncode and "did you mean shipped" in done.stderr, done


if __name__ == "__main__":
    main()
