"""The node: ROS 2's names for what `Answering` does. The only module that imports ROS 2's packages."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import rclpy
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus, KeyValue
from rcl_interfaces.msg import SetParametersResult
from rclpy.action import ActionServer, CancelResponse, GoalResponse
from rclpy.callback_groups import ReentrantCallbackGroup
from rclpy.executors import ExternalShutdownException, MultiThreadedExecutor
from rclpy.node import Node
from rclpy.qos import QoSHistoryPolicy, QoSProfile, QoSReliabilityPolicy
from sensor_msgs.msg import CompressedImage, Image
from std_msgs.msg import String
from std_srvs.srv import Trigger

from edgellm.errors import EdgeLLMError, ImageError
from edgellm.llm import LLM
from edgellm.ros.answering import Answered, Answering, Settings

try:
    from edgellm_ros.action import Generate
except ImportError:  # the package was not built, or not sourced: topics and services do without
    Generate = None

#: Besides goals: a prompt, the one that it ends, the service, images and timers.
_OTHER_CALLBACKS = 6
#: A goal that was cancelled is called so by rclpy a moment later, in another thread.
_CANCEL_SECONDS = 1.0


class AnsweringNode(Node):
    """The node "edgellm" with a model, which it opens before it offers anything. Its parameters are `Settings`, of
    which `question` can be set while it runs."""

    def __init__(self) -> None:
        super().__init__("edgellm")
        given = {each.name: self.declare_parameter(each.name, each.default).value for each in fields(Settings)}
        self.settings = settings = Settings(**given)
        self.llm = LLM(settings.model or None, backend=settings.backend)
        self._text = self.create_publisher(String, "~/text", 10)
        self._watched = self.create_publisher(String, "~/watched", 10)
        self._diagnostics = self.create_publisher(DiagnosticArray, "/diagnostics", 10)
        self.answering = Answering(
            self.llm, settings, lambda answer: self._watched.publish(String(data=answer.text.strip()))
        )
        self.add_on_set_parameters_callback(self._set)
        at_once = ReentrantCallbackGroup()  # nothing here waits for another callback
        newest = QoSProfile(history=QoSHistoryPolicy.KEEP_LAST, depth=1, reliability=QoSReliabilityPolicy.BEST_EFFORT)
        self.create_subscription(Image, "~/image", self._see, newest)
        self.create_subscription(CompressedImage, "~/image/compressed", self._see, newest)
        self.create_subscription(String, "~/prompt", self._reply, 10, callback_group=at_once)
        self.create_service(Trigger, "~/stop", self._stop, callback_group=at_once)
        self.create_timer(settings.diagnostics_period, self._diagnose)
        if Generate is None:
            self.get_logger().warning("~/generate is not offered: build and source tools/ros2/edgellm_ros for it")
            return
        self._server = ActionServer(
            self,
            Generate,
            "~/generate",
            self._execute,
            callback_group=at_once,
            goal_callback=self._take_goal,
            handle_accepted_callback=self._begin,
            cancel_callback=self._cancel,
        )

    def close(self) -> None:
        """End all answers, and free the model."""
        self.answering.close()
        self.llm.close()

    def _set(self, parameters: Sequence[Any]) -> SetParametersResult:
        changed = {parameter.name: parameter.value for parameter in parameters}
        fixed = [each.name for each in fields(Settings) if each.name in changed and each.name != "question"]
        if fixed:
            return SetParametersResult(successful=False, reason=f"{fixed[0]} is read when the node starts")
        try:
            if "question" in changed:
                self.answering.ask_about(changed["question"])
        except EdgeLLMError as error:
            return SetParametersResult(successful=False, reason=str(error))
        return SetParametersResult(successful=True)

    def _see(self, message: Any) -> None:
        stamp = message.header.stamp
        taken = stamp.sec + stamp.nanosec * 1e-9
        try:  # drivers that know no time leave it at 0
            self.answering.see(message, self.get_clock().now().nanoseconds * 1e-9 - taken if taken else 0.0)
        except ImageError as error:
            self.get_logger().warning(str(error), throttle_duration_sec=10.0)

    def _reply(self, message: Any) -> None:
        answered = self.answering.reply(message.data)
        if answered.state == "succeeded":
            self._text.publish(String(data=answered.fields["text"]))
        else:
            why = answered.fields.get("error") or f"it has ended: {answered.fields['finish_reason']}"
            self.get_logger().warning(f"the prompt {message.data!r:.80} was not answered: {why}")

    def _stop(self, _: Any, response: Any) -> Any:
        response.success, response.message = True, f"answers that were ended: {self.answering.stop()}"
        return response

    def _diagnose(self) -> None:
        level, message, values = self.answering.diagnosis()
        status = DiagnosticStatus(
            level=bytes([level]),
            name=self.get_fully_qualified_name().lstrip("/"),
            message=message,
            values=[KeyValue(key=key, value=value) for key, value in values.items()],
        )
        array = DiagnosticArray(status=[status])
        array.header.stamp = self.get_clock().now().to_msg()
        self._diagnostics.publish(array)

    def _take_goal(self, _: Any) -> GoalResponse:
        return GoalResponse.REJECT if self.answering.is_full else GoalResponse.ACCEPT

    def _begin(self, handle: Any) -> None:
        self.answering.accept(_key(handle))
        handle.execute()

    def _cancel(self, handle: Any) -> CancelResponse:
        return CancelResponse.ACCEPT if self.answering.cancel(_key(handle)) else CancelResponse.REJECT

    def _execute(self, handle: Any) -> Any:
        def tell(text: str, tokens: int) -> None:
            handle.publish_feedback(Generate.Feedback(text=text, completion_tokens=tokens))

        answered = self.answering.answer(_key(handle), handle.request, tell)
        _end_goal(handle, answered)
        shown = {} if answered.image is None else {"image": answered.image}
        return Generate.Result(**answered.fields, **shown)


def run(arguments: Sequence[str]) -> None:
    """Run the node until it is interrupted or ROS 2 shuts down; the arguments are ROS 2's (`--ros-args ...`)."""
    rclpy.init(args=list(arguments))
    try:
        node = AnsweringNode()
        executor = MultiThreadedExecutor(num_threads=node.settings.goals + _OTHER_CALLBACKS)
        executor.add_node(node)
        try:
            executor.spin()
        except (KeyboardInterrupt, ExternalShutdownException):
            pass
        finally:
            node.close()  # what callbacks wait for ends
            executor.shutdown()
            node.destroy_node()
    finally:
        rclpy.try_shutdown()


def _key(handle: Any) -> bytes:
    return bytes(handle.goal_id.uuid)


def _end_goal(handle: Any, answered: Answered) -> None:
    """Bring a goal to the state that its answer has."""
    until = time.monotonic() + _CANCEL_SECONDS
    while answered.state == "canceled" and not handle.is_cancel_requested and time.monotonic() < until:
        time.sleep(0.001)
    if answered.state == "succeeded":
        handle.succeed()
    elif answered.state == "canceled" and handle.is_cancel_requested:
        handle.canceled()
    else:
        handle.abort()
