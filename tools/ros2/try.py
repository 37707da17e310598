"""Asks a running node for everything that it offers, and says what came: started by try.sh, behind the node.

It ends with the exit code 1 where something is not as it should be. The node answers with the shipped model.
"""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import rclpy
from action_msgs.msg import GoalStatus
from diagnostic_msgs.msg import DiagnosticArray
from edgellm_ros.action import Generate
from PIL import Image as Pillow
from rcl_interfaces.msg import Parameter, ParameterType, ParameterValue
from rcl_interfaces.srv import SetParameters
from rclpy.action import ActionClient
from rclpy.node import Node
from sensor_msgs.msg import CompressedImage, Image
from std_msgs.msg import String
from std_srvs.srv import Trigger

from edgellm import SHIPPED_MODEL

BOAT = "Is there a boat in the photo?"
#: An answer that takes a while with any model.
LONG = '{"type": "string", "minLength": 400}'
SECONDS = 60.0


class Client(Node):
    """What a robot's program is to the node."""

    def __init__(self) -> None:
        super().__init__("edgellm_try")
        self.texts: list[str] = []
        self.watched: list[str] = []
        self.diagnostics: list[DiagnosticArray] = []
        self.goals = ActionClient(self, Generate, "/edgellm/generate")
        self.images = self.create_publisher(Image, "/edgellm/image", 1)
        self.files = self.create_publisher(CompressedImage, "/edgellm/image/compressed", 1)
        self.prompts = self.create_publisher(String, "/edgellm/prompt", 1)
        self.stop = self.create_client(Trigger, "/edgellm/stop")
        self.parameters = self.create_client(SetParameters, "/edgellm/set_parameters")
        self.create_subscription(String, "/edgellm/text", lambda message: self.texts.append(message.data), 10)
        self.create_subscription(String, "/edgellm/watched", lambda message: self.watched.append(message.data), 10)
        self.create_subscription(DiagnosticArray, "/diagnostics", self.diagnostics.append, 10)

    def until(self, found: Callable[[], Any], what: str, every: Callable[[], object] = lambda: None) -> Any:
        """Spin until something is there, doing what `every` does ten times a second, a minute at most."""
        end, due = time.monotonic() + SECONDS, 0.0
        while not (value := found()):
            if time.monotonic() > end:
                sys.exit(f"FAILED: {what} did not come within {SECONDS:.0f} s")
            if time.monotonic() >= due:
                every()
                due = time.monotonic() + 0.1
            rclpy.spin_once(self, timeout_sec=0.02)
        return value

    def got(self, future: Any, what: str) -> Any:
        self.until(future.done, what)
        return future.result()

    def begin(self, **goal: Any) -> tuple[Any, list[Any]]:
        """The handle of a goal that was accepted, and the feedback as it comes."""
        pieces: list[Any] = []
        sent = self.goals.send_goal_async(Generate.Goal(**goal), lambda message: pieces.append(message.feedback))
        handle = self.got(sent, "the goal's acceptance")
        check(handle.accepted, f"the goal is accepted: {goal}")
        return handle, pieces

    def answer(self, **goal: Any) -> Any:
        """The result of a goal, with its status."""
        return self.got(self.begin(**goal)[0].get_result_async(), "the result")

    def show(self, name: str, encoding: str = "bgr8", padding: int = 5) -> None:
        """A scene of the shipped model, as a camera's driver gives it: with rows that are longer than the image."""
        pixels = np.asarray(Pillow.open(SHIPPED_MODEL / "scenes" / f"{name}.png").convert("RGB"))
        height, width, _ = pixels.shape
        rows = np.zeros((height, 3 * width + padding), np.uint8)
        rows[:, : 3 * width] = pixels[..., ::-1].reshape(height, -1)
        message = Image(height=height, width=width, encoding=encoding, step=rows.shape[1])
        message.data = rows.tobytes()
        self._stamp(message, name)
        self.images.publish(message)

    def show_file(self, name: str) -> None:
        """The same as JPEG."""
        file = io.BytesIO()
        Pillow.open(SHIPPED_MODEL / "scenes" / f"{name}.png").convert("RGB").save(file, "JPEG", quality=95)
        message = CompressedImage(format="bgr8; jpeg compressed bgr8")
        message.data = file.getvalue()
        self._stamp(message, name)
        self.files.publish(message)

    def _stamp(self, message: Any, name: str) -> None:
        message.header.stamp, message.header.frame_id = self.get_clock().now().to_msg(), name


def check(condition: bool, what: str) -> None:
    """Say that it is so, or end the program."""
    print("ok:" if condition else "FAILED:", what, flush=True)
    if not condition:
        sys.exit(1)


def values(client: Client) -> dict[str, str]:
    """The values of the newest diagnostics."""
    return {pair.key: pair.value for pair in client.diagnostics[-1].status[0].values}


def try_images(client: Client) -> None:
    """Goals about the newest image, from either topic."""
    client.until(lambda: client.diagnostics, "diagnostics")
    check(client.diagnostics[-1].status[0].level == b"\x00", f"diagnostics are OK: {values(client)}")
    blind = client.answer(prompt=BOAT, show_image=True)
    check((blind.status, "no image" in blind.result.error) == (GoalStatus.STATUS_ABORTED, True), blind.result.error)
    for name, show in (("toys", client.show), ("study", client.show_file)):
        before = int(values(client)["images"])
        shows = lambda name=name, show=show: show(name)  # noqa: E731
        client.until(lambda before=before: int(values(client)["images"]) > before, "an image", shows)
        handle, pieces = client.begin(prompt=BOAT, show_image=True, temperature=0.0)
        done = client.got(handle.get_result_async(), "the result")
        result = done.result
        check(done.status == GoalStatus.STATUS_SUCCEEDED, f"{name}: {result.text!r}, {result.total_seconds:.2f} s")
        check("".join(piece.text for piece in pieces) == result.text, f"its text came in {len(pieces)} pieces")
        check(result.image.frame_id == name and 0 < result.image_age < SECONDS, f"image {result.image_age:.2f} s old")
        check(result.text.startswith("Yes" if name == "toys" else "No"), "it is about that image")
    old = client.answer(prompt=BOAT, show_image=True, max_image_age=1e-6)
    check("expected 1e-06 s at most" in old.result.error, old.result.error)


def try_ends(client: Client) -> None:
    """Goals that are chosen, wrong, late, cancelled and stopped."""
    chosen = client.answer(prompt="Is the sky blue?", choice=["Yes", "No"])
    check(chosen.result.text in ("Yes", "No"), f"a choice: {chosen.result.text}")
    wrong = client.answer(prompt="Hello", choice=["a"], json_schema="{}")
    check(wrong.status == GoalStatus.STATUS_ABORTED, wrong.result.error)
    late = client.answer(prompt="Tell me a story.", json_schema=LONG, deadline=0.3)
    check((late.status, late.result.finish_reason) == (GoalStatus.STATUS_ABORTED, "deadline"), "a deadline aborts")
    for ends in ("cancelled", "stopped"):
        handle, pieces = client.begin(prompt="Tell me a story.", json_schema=LONG, priority=3)
        client.until(lambda pieces=pieces: pieces, "feedback")
        began = time.monotonic()
        if ends == "cancelled":
            answered = client.got(handle.cancel_goal_async(), "the answer to a cancellation")
            check(len(answered.goals_canceling) == 1, "the cancellation is accepted")
        else:
            answered = client.got(client.stop.call_async(Trigger.Request()), "the answer of ~/stop")
            check(answered.message.endswith("1"), answered.message)
        done = client.got(handle.get_result_async(), "the result")
        expected = GoalStatus.STATUS_CANCELED if ends == "cancelled" else GoalStatus.STATUS_ABORTED
        check(
            (done.status, done.result.finish_reason) == (expected, "cancelled"),
            f"{ends}: {1000 * (time.monotonic() - began):.0f} ms later, {done.result.completion_tokens} tokens",
        )
    client.until(lambda: values(client)["requests running"] == "0", "a free model")


def try_topics(client: Client) -> None:
    """Prompts, the question about the newest image, and an encoding that is refused."""
    client.prompts.publish(String(data=BOAT))
    client.until(lambda: client.texts, "text")
    check(client.texts[0].startswith("No"), f"~/text, with the newest image: {client.texts[0]!r}")
    question = ParameterValue(type=ParameterType.PARAMETER_STRING, string_value=BOAT)
    asked = SetParameters.Request(parameters=[Parameter(name="question", value=question)])
    client.got(client.parameters.call_async(asked), "the answer to a parameter")
    client.until(lambda: client.watched, "an answer to the question")
    client.until(lambda: client.watched[-1].startswith("Yes"), "another answer", lambda: client.show("toys"))
    check(True, f"~/watched: {client.watched}")
    client.until(
        lambda: client.diagnostics[-1].status[0].level == b"\x01",
        "a warning",
        lambda: client.show("toys", "bayer_rggb8"),
    )
    check("bayer_rggb8" in client.diagnostics[-1].status[0].message, client.diagnostics[-1].status[0].message)


def main() -> None:
    """Try it."""
    rclpy.init()
    client = Client()
    client.until(client.goals.server_is_ready, "the node")
    for part in (try_images, try_ends, try_topics):
        part(client)
    client.destroy_node()
    rclpy.shutdown()
    print("all is well")


if __name__ == "__main__":
    main()
