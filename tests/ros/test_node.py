"""The node and what it does with goals, prompts and images, with the shipped model and a double of ROS 2's classes."""

from __future__ import annotations

import math
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ros_double
import yaml
from ros_double import CompressedImage, Generate, Header, Image, MultiThreadedExecutor, Node, String

import edgellm.ros.__main__ as program
from edgellm.errors import DeviceLostError
from edgellm.multimodal.image_input import read_image
from edgellm.opened_model import SHIPPED_MODEL
from edgellm.ros.answering import Answering, Goal, Settings

BOAT = "Is there a boat in the photo?"
LONG = '{"type": "string", "minLength": 300}'
SECONDS = 20.0


@pytest.fixture(scope="module")
def node() -> Iterator[Any]:
    with ros_double.installed(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Node, "overrides", {"backend": "numpy", "goals": 2, "every": 0.01})
        from edgellm.ros.node import AnsweringNode

        opened = AnsweringNode()
        yield opened
        opened.close()
        opened.destroy_node()


def until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def photo(name: str, **others: Any) -> Image:
    pixels = read_image(SHIPPED_MODEL / "scenes" / f"{name}.png")
    height, width, _ = pixels.shape
    given = {"encoding": "bgr8", "step": 3 * width, **others}
    taken = time.time_ns() - 5 * 10**9
    header = Header(frame_id=name, stamp=ros_double.Stamp(sec=taken // 10**9, nanosec=taken % 10**9))
    return Image(header=header, height=height, width=width, data=pixels[..., ::-1].tobytes(), **given)


def shown(node: Any, name: str) -> None:
    """Let an image arrive, which is the newest then."""
    before = node.answering._camera.frames
    node.deliver("~/image", photo(name)).result()
    until(lambda: node.answering._camera.frames > before)


def answered(node: Any, **goal: Any) -> tuple[str, Any, list[Any]]:
    handle = node.server.send(**goal)
    result = handle.result.result(SECONDS)
    return handle.status, result, handle.feedback


def test_a_goal_about_the_newest_image(node: Any) -> None:
    status, result, _ = answered(node, prompt=BOAT, show_image=True)
    assert (status, result.error, result.image_age) == ("aborted", "no image has come yet", -1.0)
    for name, begins in (("study", "No"), ("toys", "Yes")):
        shown(node, name)
        status, result, feedback = answered(node, prompt=BOAT, show_image=True, temperature=0.0, seed=1)
        assert (status, result.finish_reason, result.image.frame_id) == ("succeeded", "stop", name)
        assert result.text.startswith(begins) and 5 <= result.image_age < SECONDS
        assert "".join(piece.text for piece in feedback) == result.text
        assert feedback[-1].completion_tokens == result.completion_tokens > len(feedback) / 2
        assert result.total_seconds >= result.first_token_seconds > 0
    status, result, _ = answered(node, prompt=BOAT, show_image=True, max_image_age=1.0)
    assert status == "aborted" and re.search(r"image is [56]\.?\d* s old: expected 1 s at most", result.error)
    assert node.qos["~/image"] == {"history": "keep last", "depth": 1, "reliability": "best effort"}


def test_fields_of_a_goal_reach_the_request(node: Any) -> None:
    assert answered(node, prompt="Hello", choice=["Yes", "No"])[1].text in ("Yes", "No")
    result = answered(node, prompt="Hello", json_schema='{"enum": [[1, 2]]}')[1]
    assert result.text == "[1, 2]" and result.image.frame_id == "" and result.image_age == -1.0
    assert answered(node, prompt="Hello", max_tokens=2)[1].completion_tokens == 2
    assert node.answering._request(Goal("hi"), None, 0.0).params == node.llm.default_params
    drawn = node.answering._request(Goal("hi", temperature=0.5, seed=0), None, 0.0).params
    assert (drawn.temperature, drawn.seed, drawn.top_k) == (0.5, 0, node.llm.default_params.top_k)
    request = node.answering._request(Goal("hi", system="be", adapter="pirate", priority=7, deadline=2.0), None, 0.0)
    assert (request.adapter, request.priority, request.messages[0]["content"]) == ("pirate", 7, "be")
    assert request.deadline < 2.0 - 1.0  # the time since the goal was accepted counts
    for goal, said in (
        ({"choice": ["a"], "json_schema": "{}"}, "has a choice and a json_schema"),
        ({"json_schema": "{"}, "json_schema is no JSON"),
        ({"json_schema": "[" * 100_000}, "json_schema is no JSON"),
        ({"json_schema": "null"}, "json_schema is 'null': expected a JSON schema that is an object"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"show_image": True, "max_image_age": math.nan}, "s old: expected nan s at most"),
        ({"adapter": "nobody"}, "nobody"),
        ({"priority": 10**8}, "priority"),
    ):
        status, result, _ = answered(node, prompt="Hello", **goal)
        assert status == "aborted" and said in result.error and result.finish_reason == ""


@pytest.mark.parametrize("after", [0.0, 0.1])
def test_a_cancellation_ends_the_answer_at_its_next_step(node: Any, after: float) -> None:
    handle = node.server.send(prompt="Tell me a story.", json_schema=LONG)
    until(lambda: handle.feedback)
    assert node.server.cancel(handle, after)
    result = handle.result.result(SECONDS)
    assert (handle.status, result.finish_reason) == ("canceled", "cancelled")
    assert result.completion_tokens < 60 and node.llm.metrics()["requests_running"] == 0
    assert not node.server.cancel(handle)  # it is over


def test_a_goal_that_is_cancelled_before_it_begins(node: Any) -> None:
    core = node.answering
    core.accept("early")
    assert core.cancel("early") and not core.cancel("never accepted")
    early = core.answer("early", Goal("Tell me a story.", json_schema=LONG))
    assert (early.state, early.fields["finish_reason"]) == ("canceled", "cancelled")


def test_deadlines_and_stops_abort(node: Any) -> None:
    status, result, _ = answered(node, prompt="Tell me a story.", json_schema=LONG, deadline=0.05)
    assert (status, result.finish_reason, result.error) == ("aborted", "deadline", "")
    handles = [node.server.send(prompt="Tell me a story.", json_schema=LONG) for _ in range(2)]
    assert node.server.send(prompt="one too many") is None
    until(lambda: any(handle.feedback for handle in handles))
    response = node.callbacks["~/stop"]()
    assert (response.success, response.message) == (True, "answers that were ended: 2")
    for handle in handles:
        assert handle.result.result(SECONDS).finish_reason == "cancelled" and handle.status == "aborted"


def test_the_newest_prompt_is_answered(node: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shown(node, "toys")
    texts, begun, ask = node.published["~/text"], threading.Event(), node.answering._request

    def slow(goal: Goal, *others: Any) -> Any:
        request = ask(Goal(goal.prompt, json_schema=LONG) if goal.prompt == "first" else goal, *others)
        begun.set()
        return request

    monkeypatch.setattr(node.answering, "_request", slow)
    first = node.deliver("~/prompt", String(data="first"))
    assert begun.wait(SECONDS)
    node.deliver("~/prompt", String(data=BOAT)).result(SECONDS)
    first.result(SECONDS)
    assert len(texts) == 1 and texts[0].data.startswith("Yes")
    assert "'first' was not answered: it has ended: cancelled" in node.warnings[-1]


def test_a_question_is_asked_until_it_is_taken_back(node: Any) -> None:
    parameter = ros_double.SimpleNamespace
    shown(node, "study")
    said = node.published["~/watched"]
    assert node.callbacks["set"]([parameter(name="question", value=BOAT)]).successful
    until(lambda: len(said) == 1)
    shown(node, "toys")
    until(lambda: len(said) == 2)
    assert [each.data[:2] for each in said] == ["No", "Ye"]
    cut = CompressedImage(header=Header(frame_id="cut"), format="bgr8; jpeg compressed", data=b"\xff\xd8\xff cut")
    node.answering.see(cut)  # which is not looked into before it is asked about
    until(lambda: node.answering._problem)
    assert "damaged" in node.answering.diagnosis()[1]
    shown(node, "study")
    until(lambda: len(said) == 3)
    assert node.answering.diagnosis()[1] == "answers"
    shown(node, "toys")
    until(lambda: len(said) == 4)
    assert node.callbacks["set"]([parameter(name="question", value="Is there a lamp in the photo?")]).successful
    until(lambda: len(said) == 5)
    assert not node.callbacks["set"]([parameter(name="goals", value=3)]).successful
    node.callbacks["~/stop"]()
    until(lambda: not node.answering._watching.is_alive())
    shown(node, "study")
    assert len(said) == 5


def test_diagnostics(node: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    answered(node, prompt="Hello", max_tokens=1)

    def told() -> tuple[bytes, str, dict[str, str]]:
        node.timers[0]()
        (status,) = node.published["/diagnostics"][-1].status
        assert status.name == "edgellm"
        return status.level, status.message, {each.key: each.value for each in status.values}

    level, message, values = told()
    assert (level, message, values["backend"]) == (b"\0", "answers", "numpy")
    assert int(values["images"]) >= 1 and int(values["requests ended, length"]) >= 1
    node.deliver("~/image", photo("toys", encoding="bayer_rggb8")).result()
    assert told()[:1] == (b"\1",) and "bayer_rggb8" in told()[1] and "bayer_rggb8" in node.warnings[-1]
    shown(node, "toys")
    assert told()[0] == b"\0"

    def lost(_: Any) -> Any:
        raise DeviceLostError("the GPU has failed")

    monkeypatch.setattr(node.llm, "submit", lost)
    assert answered(node, prompt="Hello")[1].error == "the GPU has failed"
    assert told()[:2] == (b"\2", "the last answer failed: the GPU has failed")
    monkeypatch.undo()
    answered(node, prompt="Hello", max_tokens=1)


def test_the_interfaces_are_those_of_the_code(repository: Path) -> None:
    folder = repository / "tools" / "ros2" / "edgellm_ros"
    defaults = {name: () if default is list else default for name, default in Generate.Goal.defaults.items()}
    defaults = {name: value() if isinstance(value, type) else value for name, value in defaults.items()}
    assert defaults == asdict(Goal())
    given = yaml.safe_load((folder / "config" / "edgellm.yaml").read_text())["edgellm"]["ros__parameters"]
    assert given == asdict(Settings()) and list(given) == [each.name for each in fields(Settings)]


def test_the_program(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without ROS 2 it says what is missing, without the action's package it does without, and Ctrl-C ends it."""
    monkeypatch.setitem(sys.modules, "rclpy", None)
    monkeypatch.delitem(sys.modules, "edgellm.ros.node", raising=False)
    with pytest.raises(SystemExit, match="1"):
        program.main()
    assert "ROS 2's package rclpy is not there: source" in " ".join(capsys.readouterr().err.split())
    monkeypatch.undo()
    with ros_double.installed(without="edgellm_ros"):
        import edgellm.ros.node as module

        nodes: list[Any] = []
        monkeypatch.setattr(MultiThreadedExecutor, "add_node", lambda self, node: nodes.append(node))
        monkeypatch.setattr(MultiThreadedExecutor, "interrupt", threading.Event())
        MultiThreadedExecutor.interrupt.set()
        module.run(["edgellm"])
        assert nodes[0].server is None and "~/generate is not offered" in nodes[0].warnings[0]
        assert nodes[0].answering._camera.closed and "(closed)" in repr(nodes[0].llm)


def test_nothing_waits_for_ever_where_no_image_comes(node: Any) -> None:
    """Closing ends the camera's thread and a watch that waits for its first image."""
    core = Answering(node.llm, Settings(question=BOAT), print)
    core.close()
    assert not core._watching.is_alive() and core._camera.closed
    assert np.isfinite(float(core.diagnosis()[2]["images"]))
