"""Agents, which call functions and go on by themselves: pydantic-ai, openai-agents and smolagents. See run.py."""

from __future__ import annotations

from typing import Any

from scenarios import LOOK, MODEL, TOOLS, TOYS, WHERE, Seen, Server, is_place, main, refused, scenario


def pydantic_scenarios(endpoint: str) -> None:
    """pydantic-ai's agents with one of the server's interfaces."""

    def agent(server: Server, name: str = MODEL, **more: Any) -> Any:
        from pydantic_ai import Agent

        if endpoint == "messages":
            from pydantic_ai.models.anthropic import AnthropicModel
            from pydantic_ai.providers.anthropic import AnthropicProvider

            # That schemas are served it knows of Anthropic's own models alone.
            known: Any = {"supports_json_schema_output": True}
            provider = AnthropicProvider(base_url=server.root, api_key="none")
            model: Any = AnthropicModel(name, provider=provider, profile=known)
        else:
            from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
            from pydantic_ai.providers.openai import OpenAIProvider

            kind = OpenAIChatModel if endpoint == "chat" else OpenAIResponsesModel
            model = kind(name, provider=OpenAIProvider(base_url=server.url, api_key="none"))
        return Agent(model, model_settings={"max_tokens": 80, "temperature": 0}, **more)

    @scenario("pydantic-ai", endpoint, "plain")
    async def plain(server: Server) -> None:
        found = await agent(server).run(WHERE)
        is_place(found.output)
        assert found.usage.input_tokens > 20

    @scenario("pydantic-ai", endpoint, "streamed")
    async def streamed(server: Server) -> None:
        async with agent(server).run_stream(WHERE) as stream:
            pieces = [each async for each in stream.stream_text(delta=True, debounce_by=None)]
        is_place("".join(pieces))
        assert len(pieces) > 2

    @scenario("pydantic-ai", endpoint, "call")
    async def call(server: Server) -> None:
        looked = []

        def look_at(object: str) -> str:
            """Look at an object."""
            looked.append(object)
            return "done"

        found = await agent(server, TOOLS, tools=[look_at]).run(LOOK)
        assert looked == ["yellow banana"] and found.output, (looked, found.output)

    @scenario("pydantic-ai", endpoint, "schema")
    async def schema(server: Server) -> None:
        from pydantic_ai import NativeOutput

        assert isinstance((await agent(server, output_type=NativeOutput(Seen)).run(WHERE)).output, Seen)

    @scenario("pydantic-ai", endpoint, "schema by a call")
    async def schema_as_call(server: Server) -> None:
        from pydantic_ai import ToolOutput

        assert isinstance((await agent(server, output_type=ToolOutput(Seen)).run(WHERE)).output, Seen)

    @scenario("pydantic-ai", endpoint, "image")
    async def image(server: Server) -> None:
        from pydantic_ai import BinaryContent

        asked = ["What do you see?", BinaryContent(TOYS.read_bytes(), media_type="image/png")]
        assert "ball" in (await agent(server).run(asked)).output

    @scenario("pydantic-ai", endpoint, "error")
    async def error(server: Server) -> None:
        try:
            await agent(server, "shiped").run(WHERE)
        except Exception as raised:
            refused(raised, "did you mean shipped", "404")
        else:
            raise AssertionError("no error")


for each in ("chat", "responses", "messages"):
    pydantic_scenarios(each)


def openai_agents_scenarios(endpoint: str) -> None:
    """OpenAI's agents with one of its endpoints."""

    def agent(server: Server, name: str = MODEL, **more: Any) -> Any:
        import agents
        from openai import AsyncOpenAI

        agents.set_tracing_disabled(True)
        kind = agents.OpenAIChatCompletionsModel if endpoint == "chat" else agents.OpenAIResponsesModel
        model = kind(model=name, openai_client=AsyncOpenAI(base_url=server.url, api_key="none"))
        return agents.Agent(
            name="Pip", model=model, model_settings=agents.ModelSettings(max_tokens=80, temperature=0), **more
        )

    def with_look_at(server: Server) -> tuple[Any, list[str]]:
        from agents import function_tool

        looked: list[str] = []

        @function_tool
        def look_at(object: str) -> str:
            """Look at an object."""
            looked.append(object)
            return "done"

        return agent(server, TOOLS, tools=[look_at]), looked

    @scenario("openai-agents", endpoint, "plain")
    async def plain(server: Server) -> None:
        from agents import Runner

        is_place((await Runner.run(agent(server), WHERE)).final_output)

    @scenario("openai-agents", endpoint, "streamed")
    async def streamed(server: Server) -> None:
        from agents import Runner

        pip, looked = with_look_at(server)
        stream = Runner.run_streamed(pip, LOOK)
        kinds = {event.type async for event in stream.stream_events()}
        assert looked == ["yellow banana"] and stream.final_output and "raw_response_event" in kinds, looked

    @scenario("openai-agents", endpoint, "call")
    async def call(server: Server) -> None:
        from agents import Runner

        pip, looked = with_look_at(server)
        found = await Runner.run(pip, LOOK)
        assert looked == ["yellow banana"] and found.final_output, (looked, found.final_output)

    @scenario("openai-agents", endpoint, "schema")
    async def schema(server: Server) -> None:
        from agents import Runner

        pip = agent(server, output_type=Seen)
        assert isinstance((await Runner.run(pip, WHERE)).final_output, Seen)
        stream = Runner.run_streamed(pip, WHERE)
        assert [event async for event in stream.stream_events()] and isinstance(stream.final_output, Seen)

    @scenario("openai-agents", endpoint, "error")
    async def error(server: Server) -> None:
        from agents import Runner

        try:
            await Runner.run(agent(server, "shiped"), WHERE)
        except Exception as raised:
            refused(raised, "did you mean shipped", "404")
        else:
            raise AssertionError("no error")


for each in ("chat", "responses"):
    openai_agents_scenarios(each)


@scenario("openai-agents", "responses", "kept")
async def openai_agents_kept(server: Server) -> None:
    """A conversation that goes on from answers that the server keeps."""
    from agents import Agent, OpenAIResponsesModel, Runner
    from openai import AsyncOpenAI

    model = OpenAIResponsesModel(model=MODEL, openai_client=AsyncOpenAI(base_url=server.url, api_key="none"))
    pip = Agent(name="Pip", model=model)
    first = await Runner.run(pip, WHERE, auto_previous_response_id=True)
    second = await Runner.run(pip, "What did I ask?", previous_response_id=first.last_response_id)
    asked = [each.usage.input_tokens for each in (*first.raw_responses, *second.raw_responses)]
    assert asked[1] > asked[0] + 10, asked


def smol_model(server: Server, name: str = MODEL) -> Any:
    from smolagents import OpenAIModel

    return OpenAIModel(model_id=name, api_base=server.url, api_key="none", max_tokens=80, temperature=0)


def smol_message(text: str) -> list[Any]:
    from smolagents import ChatMessage, MessageRole

    return [ChatMessage(role=MessageRole.USER, content=[{"type": "text", "text": text}])]


def smol_tool() -> tuple[Any, list[str]]:
    from smolagents import tool

    looked: list[str] = []

    @tool
    def look_at(object: str) -> str:
        """Look at an object.

        Args:
            object: which one
        """
        looked.append(object)
        return "done"

    return look_at, looked


@scenario("smolagents", "chat", "plain")
def smol_plain(server: Server) -> None:
    found = smol_model(server).generate(smol_message(WHERE))
    is_place(found.content)
    assert found.token_usage.input_tokens > 20


@scenario("smolagents", "chat", "streamed")
def smol_streamed(server: Server) -> None:
    deltas = list(smol_model(server).generate_stream(smol_message(WHERE)))
    is_place("".join(each.content or "" for each in deltas))
    assert len(deltas) > 2


@scenario("smolagents", "chat", "call")
def smol_call(server: Server) -> None:
    """A step of an agent: the tools are given with `tool_choice` "required", and a call has to come."""
    tool, _ = smol_tool()
    message = smol_model(server, TOOLS).generate(smol_message(LOOK), tools_to_call_from=[tool])
    (called,) = message.tool_calls
    assert (called.function.name, called.function.arguments) == ("look_at", '{"object": "yellow banana"}')


@scenario("smolagents", "chat", "schema")
def smol_schema(server: Server) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "seen", "schema": Seen.model_json_schema()}}
    Seen.model_validate_json(smol_model(server).generate(smol_message(WHERE), response_format=form).content)


@scenario("smolagents", "chat", "agent")
def smol_agent(server: Server) -> None:
    """A whole agent, without its own instructions: 1,583 tokens, and the shipped model's context has 1,024."""
    from smolagents import ToolCallingAgent

    tool, looked = smol_tool()
    agent = ToolCallingAgent(tools=[tool], model=smol_model(server, TOOLS), max_steps=2, verbosity_level=0)
    agent.prompt_templates["system_prompt"] = ""
    agent.run(LOOK)
    assert "yellow banana" in looked, looked


@scenario("smolagents", "chat", "error")
def smol_error(server: Server) -> None:
    try:
        smol_model(server, "shiped").generate(smol_message(WHERE))
    except Exception as raised:
        refused(raised, "did you mean shipped", "404")
    else:
        raise AssertionError("no error")


if __name__ == "__main__":
    main()
