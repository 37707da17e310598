"""A robot's main loop with a language model in it.

The camera's callback keeps its rate while an answer is computed in the model's thread: it takes what has been said so
far, without waiting, and acts when an answer is complete. Questions are answered in words, commands by calls of the
robot's tools, whose results the model then tells of: the adapter was taught which is due. An obstacle in the picture
cancels an answer at once, which frees the model for the next instruction.
Run it: python tools/examples/robot_loop.py
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from edgellm.generation import Generation
from edgellm.llm import LLM
from edgellm.sampling_params import SamplingParams

CAMERA_RATE = 30.0  # pictures a second
ANSWER_SECONDS = 5.0  # an answer that takes longer is of no use
OBJECTS = ["red cup", "blue cup", "white bowl", "yellow banana", "green apple", "wooden spoon"]
PICK = {
    "name": "pick",
    "description": "Pick up an object from the table.",
    "parameters": {
        "type": "object",
        "properties": {"object": {"enum": OBJECTS}},
        "required": ["object"],
        "additionalProperties": False,
    },
}


@dataclass(frozen=True)
class Picture:
    """What the camera saw: whether something is in the way; and what was heard meanwhile."""

    number: int
    obstacle: bool = False
    heard: str | None = None


@dataclass
class Robot:
    """Listens, speaks and acts. No method waits for an answer: at most, a new instruction waits for the round of a
    cancelled one to end.

    `act` is called with the name of a tool and its arguments, and gives what came of it, or None.
    """

    llm: LLM
    system_prompt: str
    say: Callable[[str], None]
    act: Callable[[str, dict[str, Any]], str | None]
    answers: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        params = SamplingParams(max_tokens=120)
        self._session = self.llm.create_session(self.system_prompt, params, "tools", tools=[PICK])
        self._answer: Generation | None = None
        self._text = ""

    @property
    def is_answering(self) -> bool:
        """Whether an instruction is being answered."""
        return self._answer is not None

    def on_picture(self, attached_image: Picture) -> None:
        """The camera's callback."""
        if attached_image.obstacle:
            self.emergency_stop()
        self._take_what_was_said()
        if attached_image.heard is not None:
            self.hear(attached_image.heard)

    def hear(self, instruction: str | list[dict[str, Any]]) -> None:
        """A new instruction, or results of tools, take the place of what is being answered."""
        self._give_up()
        self._answer, self._text = self._session.stream(instruction, deadline=ANSWER_SECONDS), ""

    def emergency_stop(self) -> None:
        """Stop moving, and stop thinking about what to do next."""
        self.act("stop", {})
        self._give_up()

    def _take_what_was_said(self) -> None:
        if self._answer is None:
            return
        finished = self._answer.finished
        chunk = self._answer.poll()
        if chunk is not None:
            self._text += chunk.text
            self.say(chunk.text)
        if finished:
            response, self._answer = self._answer.result(), None
            self.answers.append(self._text)
            results = [
                {"role": "tool", "tool_call_id": call.id, "content": self.act(call.name, call.parsed) or "done"}
                for call in response.tool_calls
                if call.parsed is not None  # None: the deadline has cut it
            ]
            if results:
                self.hear(results)

    def _give_up(self) -> None:
        """Nothing that was said so far is acted on."""
        if self._answer is not None:
            self._answer.cancel()
            self._answer = None


def run(robot: Robot, camera: Iterable[Picture], rate: float = CAMERA_RATE) -> list[float]:
    """Call the robot's callback for each picture, at the camera's rate; returns the seconds that each call took."""
    spent, due = [], time.perf_counter()
    for attached_image in camera:
        time.sleep(max(0.0, due - time.perf_counter()))
        began = time.perf_counter()
        robot.on_picture(attached_image)
        spent.append(time.perf_counter() - began)
        due = max(due + 1.0 / rate, began)
    return spent


def kitchen_table(robot: Robot) -> Iterator[Picture]:
    """A scene: a question, a command, and a hand that comes in the way while the robot thinks about a third."""
    number = 0
    for heard, dangerous in (
        ("What is on the table?", False),
        ("Please pick up the red cup.", False),
        ("Where is the green apple?", True),
        ("What is your battery level?", False),
    ):
        yield Picture(number, heard=heard)
        while robot.is_answering:
            number += 1
            yield Picture(number, obstacle=dangerous)


def main() -> None:
    """Open the model, run the scene, show the answers and how long the callback took."""
    with LLM() as llm:
        system_prompt = llm.default_system_prompt
        llm.cache_system_prompt(system_prompt)
        robot = Robot(llm, system_prompt, partial(print, end="", flush=True), partial(print, "\n->"))
        spent = run(robot, kitchen_table(robot))
        print(f"\n{len(spent)} pictures; the callback took {1000 * max(spent):.1f} ms at most")
        print(f"requests by their end: {llm.metrics()['requests']['finished']}")


if __name__ == "__main__":
    main()
