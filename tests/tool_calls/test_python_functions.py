"""Python functions as tools: what the model is told of them, and runs that call them."""

from __future__ import annotations

import asyncio
import enum
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, TypedDict

import pydantic
import pytest

from edgellm import LLM, AsyncLLM, Generation, Request, RequestError, Session
from edgellm.structure.description import Structure
from edgellm.tool_calls.calls import ToolCall
from edgellm.tool_calls.functions import call_arguments, function_tool, result_message


class Frame(enum.Enum):
    BASE = "base"
    TOOL = "tool"


@dataclass
class Pose:
    x: float
    frame: Frame = Frame.BASE


class Limits(TypedDict):
    speed: float


class Grip(pydantic.BaseModel):
    force: int


Object = Literal["red cup", "blue cup", "white bowl", "yellow banana", "green apple", "wooden spoon"]


def reach(
    pose: Pose,
    limits: Limits,
    grip: Grip,
    name: str | int | Frame,
    poses: list[Pose] | None = None,
    *,
    weights: dict[str, float] | None = None,
    careful: bool = True,
    rest: Any = None,
) -> None:
    pass


REACHED = {
    "pose": {"x": 1, "frame": "tool"},
    "limits": {"speed": 2},
    "grip": {"force": 3},
    "name": "base",
    "poses": [{"x": 0.5}],
    "weights": {"a": 1},
}


def test_types_become_a_schema_and_arguments_come_back_as_them() -> None:
    schema = function_tool(reach)["function"]["parameters"]
    assert schema["required"] == ["pose", "limits", "grip", "name"]
    assert set(schema["$defs"]) == {"Pose", "Limits"}
    enforced = Structure(json=schema)
    assert enforced.is_complete(json.dumps(REACHED))
    assert not enforced.is_complete(json.dumps({**REACHED, "limits": {}}))
    found = call_arguments(reach, ToolCall("1", "reach", json.dumps(REACHED)))
    assert found["pose"] == Pose(1.0, Frame.TOOL) and found["poses"] == [Pose(0.5)]
    assert found["limits"] == {"speed": 2.0} and isinstance(found["weights"]["a"], float)
    assert found["grip"] == Grip(force=3) and found["name"] == "base"


def google(count: int, object: str = "cup") -> None:
    """Count things
    on the table.

    Slowly: it takes a while.

    Args:
        count (int): How many,
            at most: 9.
        object: What.

    Returns:
        count: nothing
    """


def numpy_style(count: int, object: str = "cup") -> None:
    """
    Count things on the table.

    Parameters
    ----------
    count : int
        How many,
        at most: 9.
    object : str, optional
        What.

    Returns
    -------
    count : int
        Nothing.
    """


def sphinx(count: int, object: str = "cup") -> None:
    """Count things on the table.

    :param count: How many,
        at most: 9.
    :type count: int
    :param str object: What.
    :return: count: nothing
    """


@pytest.mark.parametrize("function", [google, numpy_style, sphinx])
def test_docstrings_describe(function: Callable[..., Any]) -> None:
    assert function_tool(function)["function"] == {
        "name": function.__name__,
        "description": "Count things on the table.",
        "parameters": {
            "type": "object",
            "properties": {
                "count": {"type": "integer", "description": "How many, at most: 9."},
                "object": {"type": "string", "description": "What."},
            },
            "required": ["count"],
            "additionalProperties": False,
        },
    }


def unnamed(x):  # type: ignore[no-untyped-def]
    pass


def starred(*x: int) -> None:
    pass


def odd(x: set[int]) -> None:
    pass


def lost(x: Missing) -> None:  # type: ignore[name-defined] # noqa: F821
    pass


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (unnamed, "the parameter x of the function unnamed has no type hint: expected one, as in x: str"),
        (starred, "the parameter x of the function starred is variadic positional: expected parameters that are given"),
        (odd, r"the parameter x of the function odd is set\[int\]: expected str, int"),
        (lost, "the annotations of lost cannot be read"),
        (Pose, r"tools\[0\] is a type: expected an object, .*, or a function"),
    ],
)
def test_what_cannot_be_described_is_refused_by_name(llm: LLM, function: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        llm.chat("Wave.", tools=[function])


class Robot:
    """Tools that the shipped model's adapter was taught, and what was done with them."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.failure: BaseException | None = None

    def look_at(self, object: Object) -> str:
        """Look at an object."""
        self.done.append(object)
        return "done"

    def wait(self, seconds: int) -> dict[str, str]:
        """Wait for some seconds."""
        if self.failure is not None:
            raise self.failure
        self.done.append(str(seconds))
        return {"status": "ok"}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(backend="numpy", drafting=None) as opened:
        yield opened


@pytest.fixture
def robot() -> Robot:
    return Robot()


@pytest.fixture
def session(llm: LLM, robot: Robot) -> Session:
    return llm.create_session(adapter="tools", tools=[robot.look_at, robot.wait])


def roles(session: Any) -> list[str]:
    return [message["role"] for message in session.messages]


BOTH = "Look at the white bowl and the wooden spoon."


def test_a_run_calls_functions_until_there_is_an_answer(session: Session, robot: Robot) -> None:
    answer = session.run(BOTH)
    assert (answer.text, robot.done) == ("I have done both.", ["white bowl", "wooden spoon"])
    assert roles(session) == ["user", "assistant", "tool", "tool", "assistant"]
    assert session.run("Where is the red cup?").text == "The red cup is at the front left."
    called = session.run("Wait 5 seconds.", tool_choice="required")  # of the first answer: this ends
    assert not called.tool_calls and robot.done[2:] == ["5"]
    assert session.messages[-2]["content"] == '{"status": "ok"}'


def test_a_call_that_broke_off_beside_a_whole_one_calls_nothing(session: Session, robot: Robot) -> None:
    ask = session._ask

    def cut(request: Request, conversation: Any) -> Generation:
        generation = ask(request, conversation)
        generation.result()
        state = generation.request_state
        if state.response is not None and len(state.response.tool_calls) == 2:
            whole, second = state.response.tool_calls
            second = replace(second, arguments='{"object": ', complete=False)
            state.response = replace(state.response, tool_calls=(whole, second))
        return generation

    session._ask = cut
    session.run(BOTH)
    assert robot.done[0] == "white bowl" and roles(session)[:4] == ["user", "assistant", "tool", "assistant"]
    assert not any("error" in message["content"] for message in session.messages if message["role"] == "tool")


def test_what_a_function_raises_is_told_or_raised(session: Session, robot: Robot) -> None:
    robot.failure = ValueError("the motor is too hot")
    assert session.run("Wait 5 seconds.").text == "That did not work: the motor is too hot."
    before = session.messages
    with pytest.raises(ValueError, match="too hot"):
        session.run("Wait 5 seconds.", raise_errors=True)
    robot.failure = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        session.run("Wait 5 seconds.")
    assert session.messages == before  # all of a run, or nothing
    assert session.send("Where is the red cup?").text == "The red cup is at the front left."


def test_a_run_ends_where_it_is_told_to(llm: LLM, session: Session, robot: Robot) -> None:
    assert len(session.run(BOTH, max_answers=1).tool_calls) == 2 and not robot.done
    session.undo()
    wave = {"type": "function", "function": {"name": "look_at", "description": "Look at an object."}}
    assert session.run("Look at the red cup.", tools=[wave]).tool_calls and not robot.done  # not a function
    session.undo()
    assert session.run(BOTH, deadline=0).finish_reason == "deadline" and session.messages == []
    with pytest.raises(RequestError, match="max_answers is 0: expected a whole number of at least 1"):
        session.run(BOTH, max_answers=0)

    def look_at(object: Object) -> object:
        """Look at an object."""
        with pytest.raises(RequestError, match="still being answered"):
            session.send("Where is the red cup?")
        return object

    assert session.run("Look at the red cup.", tools=[look_at]).finish_reason == "stop"


def test_tasks_run_functions_of_both_kinds(robot: Robot) -> None:
    hangs = asyncio.Event()

    async def wait(seconds: int) -> str:
        """Wait for some seconds."""
        if seconds > 5:
            await hangs.wait()
        return robot.wait(seconds)["status"]

    async def talk() -> None:
        async with AsyncLLM(backend="numpy", drafting=None) as llm:
            session = llm.create_session(adapter="tools", tools=[robot.look_at, wait])
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(session.run("Wait 7 seconds."), 1)
            assert session.messages == []  # all of a run, or nothing
            assert (await session.run("Wait 5 seconds.")).text
            assert (await session.run(BOTH)).text == "I have done both."
            assert roles(session)[:4] == ["user", "assistant", "tool", "assistant"]
            with pytest.raises(RequestError, match=r"wait is a coroutine function: AsyncSession\.run awaits"):
                llm.served.create_session(tools=[wait]).run("Wait 5 seconds.")

    asyncio.run(talk())
    assert robot.done == ["5", "white bowl", "wooden spoon"]


def test_results_are_text_or_json() -> None:
    call = ToolCall("1", "f", "{}")
    for result, content in (
        ("done", "done"),
        ([1, Pose(1.0)], '[1, {"x": 1.0, "frame": "base"}]'),
        (Grip(force=2), '{"force": 2}'),
        (None, "null"),
    ):
        assert result_message(call, result)["content"] == content
    with pytest.raises(RequestError, match=r"the function f returned .*: expected text, or a value as JSON has it"):
        result_message(call, {1, 2})
    with pytest.raises(RequestError, match="the function f returned nan"):
        result_message(call, float("nan"))
