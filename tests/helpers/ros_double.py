"""Stands for the few classes of ROS 2 that the node uses, where ROS 2 is not installed; `installed` puts it in place.

It has rclpy's names and signatures (release 9.1), the states of a goal with what may follow on what, messages whose
fields have the types that the generated ones insist on, and threads for callbacks as MultiThreadedExecutor has. It has
no middleware: a test hands messages to the node by `Node.deliver` and reads what was `published`. Nothing of discovery,
qualities of service, time, parameters' types or serialization is tried by it: `tools/ros2/try.sh` does that.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

ACTION = Path(__file__).parents[2] / "tools" / "ros2" / "edgellm_ros" / "action" / "Generate.action"
_PYTHON = {"string": str, "bool": bool, "std_msgs/Header": None}


class Message:
    """A message: its class says the default of each field, and so the type."""

    defaults: ClassVar[dict[str, Any]] = {}

    def __init__(self, **given: Any) -> None:
        for name, default in self.defaults.items():
            value = given.pop(name, default() if isinstance(default, type) else default)
            kind = default if isinstance(default, type) else type(default)
            assert isinstance(value, kind) and isinstance(value, bool) == (kind is bool), (name, value)
            setattr(self, name, value)
        assert not given, f"{type(self).__name__} has no {list(given)}"


def message(name: str, /, **defaults: Any) -> type[Message]:
    """A class of messages."""
    return type(name, (Message,), {"defaults": defaults})


Stamp = message("Time", sec=0, nanosec=0)
Header = message("Header", stamp=Stamp, frame_id="")
Image = message("Image", header=Header, height=0, width=0, encoding="", is_bigendian=0, step=0, data=b"")
CompressedImage = message("CompressedImage", header=Header, format="", data=b"")
String = message("String", data="")
DiagnosticArray = message("DiagnosticArray", header=Header, status=[])
DiagnosticStatus = message("DiagnosticStatus", level=b"\0", name="", message="", hardware_id="", values=[])
KeyValue = message("KeyValue", key="", value="")
SetParametersResult = message("SetParametersResult", successful=False, reason="")


class Trigger:
    Request, Response = message("Request"), message("Response", success=False, message="")


def _of_lines(name: str, lines: list[str]) -> type[Message]:
    """A class of messages from lines of an interface's definition: type, name, perhaps a default; and a comment."""
    defaults: ClassVar[dict[str, Any]] = {}
    for kind, field, *default in (line.split("#")[0].split() for line in lines if line.split("#")[0].strip()):
        python = Header if kind == "std_msgs/Header" else list if kind.endswith("[]") else _PYTHON.get(kind)
        python = python or (float if kind.startswith("float") else int)
        read = {"true": True, "false": False}.get
        given = read(default[0], default[0]) if default and python is bool else default[0] if default else None
        defaults[field] = python if given is None else python(given)
    return type(name, (Message,), {"defaults": defaults})


class Generate:
    """The action, as its file defines it."""

    Goal, Result, Feedback = (
        _of_lines(name, part.splitlines())
        for name, part in zip(("Goal", "Result", "Feedback"), ACTION.read_text().split("---\n"), strict=True)
    )


GoalResponse = Enum("GoalResponse", "REJECT ACCEPT")
CancelResponse = Enum("CancelResponse", "REJECT ACCEPT")
#: What may follow on a state, by its event: `rcl_action`'s table.
_NEXT = {
    ("accepted", "execute"): "executing",
    ("accepted", "cancel"): "canceling",
    ("executing", "cancel"): "canceling",
    ("executing", "succeed"): "succeeded",
    ("executing", "abort"): "aborted",
    ("canceling", "succeed"): "succeeded",
    ("canceling", "abort"): "aborted",
    ("canceling", "canceled"): "canceled",
}


class ServerGoalHandle:
    """A goal that was accepted; for a test also its `status`, `feedback` and `result`."""

    _ids = itertools.count()

    def __init__(self, server: ActionServer, request: Any) -> None:
        self._server, self.request, self.status = server, request, "accepted"
        self.goal_id = SimpleNamespace(uuid=list(next(self._ids).to_bytes(16, "big")))
        self.feedback: list[Any] = []
        self.result: Future[Any] = Future()

    is_cancel_requested = property(lambda self: self.status == "canceling")

    def execute(self, execute_callback: Any = None) -> None:
        if not self.is_cancel_requested:
            self.become("execute")
        self._server.node.executor.submit(self._run)

    def publish_feedback(self, feedback: Any) -> None:
        assert isinstance(feedback, Generate.Feedback)
        self.feedback.append(feedback)

    def become(self, event: str) -> None:
        assert (self.status, event) in _NEXT, f"{event} in the state {self.status}"
        self.status = _NEXT[self.status, event]

    def succeed(self) -> None:
        self.become("succeed")

    def abort(self) -> None:
        self.become("abort")

    def canceled(self) -> None:
        self.become("canceled")

    def _run(self) -> None:
        try:
            result = self._server.execute_callback(self)
            assert isinstance(result, Generate.Result)
            self.result.set_result(result)
        except BaseException as error:
            self.result.set_exception(error)


class ActionServer:
    def __init__(
        self,
        node: Node,
        action_type: Any,
        action_name: str,
        execute_callback: Callable[..., Any],
        *,
        callback_group: Any = None,
        goal_callback: Callable[..., Any],
        handle_accepted_callback: Callable[..., Any],
        cancel_callback: Callable[..., Any],
    ) -> None:
        assert (action_type, action_name) == (Generate, "~/generate")
        self.node, self.execute_callback = node, execute_callback
        self._goal, self._accepted, self._cancel = goal_callback, handle_accepted_callback, cancel_callback
        node.server = self

    def send(self, **goal: Any) -> ServerGoalHandle | None:
        """A client's goal; None where it is rejected."""
        request = Generate.Goal(**goal)
        if self._goal(request) is not GoalResponse.ACCEPT:
            return None
        handle = ServerGoalHandle(self, request)
        self._accepted(handle)
        return handle

    def cancel(self, handle: ServerGoalHandle, after: float = 0.0) -> bool:
        """A client's cancellation; the goal's state changes a moment after the callback, as rclpy does it."""
        accepted = self._cancel(handle) is CancelResponse.ACCEPT
        time.sleep(after)
        if accepted:
            handle.become("cancel")
        return accepted


class Node:
    """A node; `overrides` are what a launch file would set its parameters to."""

    overrides: ClassVar[dict[str, Any]] = {}

    def __init__(self, node_name: str) -> None:
        self.name, self.executor = node_name, ThreadPoolExecutor(8)
        self.published: dict[str, list[Any]] = {}
        self.callbacks: dict[str, Callable[..., Any]] = {}
        self.timers: list[Callable[[], None]] = []
        self.warnings: list[str] = []
        self.qos: dict[str, Any] = {}
        self.server: Any = None

    def declare_parameter(self, name: str, value: Any) -> Any:
        return SimpleNamespace(value=self.overrides.get(name, value))

    def add_on_set_parameters_callback(self, callback: Callable[..., Any]) -> None:
        self.callbacks["set"] = callback

    def create_publisher(self, msg_type: Any, topic: str, qos_profile: Any) -> Any:
        sent = self.published.setdefault(topic, [])
        return SimpleNamespace(publish=lambda each: sent.append(each) if isinstance(each, msg_type) else 1 / 0)

    def create_subscription(
        self, msg_type: Any, topic: str, callback: Any, qos_profile: Any, *, callback_group: Any = None
    ) -> None:
        self.callbacks[topic], self.qos[topic] = callback, qos_profile

    def create_service(self, srv_type: Any, srv_name: str, callback: Any, *, callback_group: Any = None) -> None:
        self.callbacks[srv_name] = lambda: callback(srv_type.Request(), srv_type.Response())

    def create_timer(self, timer_period_sec: float, callback: Any) -> None:
        self.timers.append(callback)

    def get_clock(self) -> Any:
        now = time.time_ns()
        stamp = SimpleNamespace(nanoseconds=now, to_msg=lambda: Stamp(sec=now // 10**9, nanosec=now % 10**9))
        return SimpleNamespace(now=lambda: stamp)

    def get_logger(self) -> Any:
        return SimpleNamespace(warning=lambda text, **_: self.warnings.append(text))

    def get_fully_qualified_name(self) -> str:
        return f"/{self.name}"

    def destroy_node(self) -> None:
        self.executor.shutdown()

    def deliver(self, topic: str, each: Any) -> Future[Any]:
        """Hand a message to the subscription, in a thread of the executor."""
        return self.executor.submit(self.callbacks[topic], each)


class MultiThreadedExecutor:
    """Spins until `interrupt` is set, as Ctrl-C would."""

    interrupt = threading.Event()

    def __init__(self, num_threads: int) -> None:
        assert num_threads > 1

    def add_node(self, node: Node) -> None:
        self.nodes = [node]

    def spin(self) -> None:
        self.interrupt.wait()
        raise KeyboardInterrupt

    def shutdown(self) -> None:
        self.nodes = []


def _modules() -> dict[str, dict[str, Any]]:
    policies = SimpleNamespace(KEEP_LAST="keep last", BEST_EFFORT="best effort")
    return {
        "rclpy": {"init": lambda *, args: None, "try_shutdown": lambda: None},
        "rclpy.node": {"Node": Node},
        "rclpy.action": {each.__name__: each for each in (ActionServer, GoalResponse, CancelResponse)},
        "rclpy.callback_groups": {"ReentrantCallbackGroup": object},
        "rclpy.executors": {
            "MultiThreadedExecutor": MultiThreadedExecutor,
            "ExternalShutdownException": type("ExternalShutdownException", (Exception,), {}),
        },
        "rclpy.qos": {"QoSProfile": dict, "QoSHistoryPolicy": policies, "QoSReliabilityPolicy": policies},
        "sensor_msgs.msg": {"Image": Image, "CompressedImage": CompressedImage},
        "std_msgs.msg": {"String": String},
        "std_srvs.srv": {"Trigger": Trigger},
        "diagnostic_msgs.msg": {each.__name__: each for each in (DiagnosticArray, DiagnosticStatus, KeyValue)},
        "rcl_interfaces.msg": {"SetParametersResult": SetParametersResult},
        "edgellm_ros.action": {"Generate": Generate},
    }


@contextmanager
def installed(*, without: str = "") -> Iterator[None]:
    """Let ROS 2's modules be those of here, none of the package `without`; the node is imported anew."""
    modules = _modules()
    modules |= {package: {} for name in modules if (package := name.split(".")[0]) not in modules}
    before = {name: sys.modules.get(name) for name in ("edgellm.ros.node", *modules)}
    for name, contents in modules.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(contents)
        if without and name.startswith(without):
            sys.modules[name] = None  # type: ignore[assignment]
    sys.modules.pop("edgellm.ros.node", None)
    try:
        yield
    finally:
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module
