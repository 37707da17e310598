"""A robot's main loop with a language model in it.

The camera's callback keeps its rate while an answer is computed in the model's thread: it takes what has been said so
far, without waiting, and acts when an answer is complete. An obstacle in the picture cancels an answer at once, which
frees the model for the next instruction. Run it: python tools/examples/robot_loop.py
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from edgellm.generation import Generation
from edgellm.llm import LLM
from edgellm.sampling_params import SamplingParams

CAMERA_RATE = 30.0  # pictures a second
ANSWER_SECONDS = 5.0  # an answer that takes longer is of no use


@dataclass(frozen=True)
class Picture:
    """What the camera saw: whether something is in the way, and what was heard meanwhile."""

    number: int
    obstacle: bool = False
    heard: str | None = None


@dataclass
class Robot:
    """Listens, speaks and acts. No method waits for an answer: at most, a new instruction waits for the round of a
    cancelled one to end."""

    llm: LLM
    system_prompt: str
    say: Callable[[str], None]
    act: Callable[[dict[str, Any]], None]
    answers: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._session = self.llm.create_session(self.system_prompt, SamplingParams(max_tokens=120))
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

    def hear(self, instruction: str) -> None:
        """A new instruction takes the place of one that is being answered."""
        self._give_up()
        self._answer, self._text = self._session.stream(instruction, deadline=ANSWER_SECONDS), ""

    def emergency_stop(self) -> None:
        """Stop moving, and stop thinking about what to do next."""
        self.act({"action": "stop"})
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
            complete = self._answer.result().finish_reason == "stop"
            self._answer = None
            self.answers.append(self._text)
            action = action_in(self._text) if complete else None
            if action is not None:
                self.act(action)

    def _give_up(self) -> None:
        """Nothing that was said so far is acted on."""
        if self._answer is not None:
            self._answer.cancel()
            self._answer = None


def action_in(answer: str) -> dict[str, Any] | None:
    """The action in an answer, which is a line of JSON; None where there is none."""
    for line in answer.splitlines():
        if line.startswith("{"):
            try:
                return json.loads(line)
            except ValueError:
                return None
    return None


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
        ("Now put it next to the white bowl.", True),
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
        robot = Robot(llm, system_prompt, lambda text: print(text, end="", flush=True), lambda act: print("\n->", act))
        spent = run(robot, kitchen_table(robot))
        print(f"\n{len(spent)} pictures; the callback took {1000 * max(spent):.1f} ms at most")
        print(f"requests by their end: {llm.metrics()['requests']['finished']}")


if __name__ == "__main__":
    main()
