"""`ros2 launch edgellm_ros edgellm.launch.py image:=/camera/color/image_raw`: the node beside a camera's driver."""

from launch import LaunchDescription
from launch.actions import DeclareLaunchArgument
from launch.substitutions import LaunchConfiguration, PathJoinSubstitution
from launch_ros.actions import Node
from launch_ros.substitutions import FindPackageShare


def generate_launch_description() -> LaunchDescription:
    """The node with its parameters, its images remapped to the driver's topics."""
    parameters = PathJoinSubstitution([FindPackageShare("edgellm_ros"), "config", "edgellm.yaml"])
    image = LaunchConfiguration("image")
    return LaunchDescription(
        [
            DeclareLaunchArgument("image", default_value="/camera/image_raw", description="the topic of images"),
            DeclareLaunchArgument("parameters", default_value=parameters, description="a file of parameters"),
            Node(
                package="edgellm_ros",
                executable="edgellm",
                name="edgellm",
                output="screen",
                parameters=[LaunchConfiguration("parameters")],
                remappings=[("~/image", image), ("~/image/compressed", [image, "/compressed"])],
            ),
        ]
    )
